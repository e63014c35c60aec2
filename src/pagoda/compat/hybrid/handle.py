"""The cache of one layer during a step: `LayerCacheHandle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagoda.compat.hybrid.blocks import BlockTable
from pagoda.compat.hybrid.paged import PagedKVPool
from pagoda.compat.hybrid.state import StateCachePool
from pagoda.compat.hybrid.tokens import Known
from pagoda.errors import ArgumentError
from pagoda.kernels import compress, entries
from pagoda.kernels.entries import Codec, Tokens
from pagoda.pools._arguments import refuse_capture

__all__ = ["LayerCacheHandle"]

_OUT = (torch.float32, torch.bfloat16, torch.float16)


class LayerCacheHandle:
    """The cache of one layer for the tokens of one step, which attention reads and writes.

    `request_slots` is [batch] int32, the row of each request; 0 is padding. `positions` and `request_ids` are
    [tokens] int32, the latter an index into the batch; −1 in either is padding. The tokens of a request are
    adjacent, at consecutive positions. `block_table`, [rows, logical block] int32, and `block_lens`, [rows]
    int32, are those of the layer's group; both, and `paged`, are None for a layer with only a window.

    Every call is one launch (`compress`: two) on the current stream, does not wait, and can be captured if
    its outputs are given. Without them, outputs are allocated: bfloat16 for quantised entries, else in the
    entry's dtype. Inputs are copied if the numbers of a token are not contiguous. Inputs are not read on the
    host, and gradients do not flow through them.
    """

    __slots__ = (
        "_blocks",
        "_known",
        "_tokens",
        "block_lens",
        "block_table",
        "head_dim",
        "num_query_heads",
        "paged",
        "positions",
        "request_ids",
        "request_slots",
        "schema",
        "state",
    )

    def __init__(
        self,
        state: StateCachePool,
        paged: PagedKVPool | None,
        blocks: BlockTable | None,
        tokens: Tokens,
        num_query_heads: int,
        known: Known | None = None,
    ) -> None:
        self.state, self.paged, self.schema = state, paged, state.schema
        self.request_slots, self.request_ids, self.positions = tokens
        self.block_table = None if blocks is None else blocks.table
        self.block_lens = None if blocks is None else blocks.lens
        self.num_query_heads, self.head_dim = num_query_heads, state.schema.head_dim
        self._blocks, self._tokens, self._known = blocks, tokens, known

    def __repr__(self) -> str:
        return (
            f"LayerCacheHandle(layer {self.schema.layer_idx}, {self.schema.attn_type.name}: "
            f"{self.positions.shape[0]} tokens of {self.request_slots.shape[0]} requests)"
        )

    # --- reading

    def gather_compressed_kv(
        self,
        topk_indices: torch.Tensor,
        out: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the entries that an indexer chose for each token: out [T, k, head_dim], and mask [T, k] bool.

        `topk_indices` is [T, k] int32 or int64, entries of the token's request. An index that is negative or
        not yet visible, (p + 1) // ratio or more, gives zeros and False, as do all indices of padding.
        Errors: ArgumentError, also for a layer without entries; CaptureError without outputs.
        """
        blocks, pages = self._compressed()
        num_tokens = self.positions.shape[0]
        self._require(topk_indices, (num_tokens, None), (torch.int32, torch.int64), "topk_indices")
        k = topk_indices.shape[1]
        codec = self.schema.codec
        out = self._output(out, (num_tokens, k, codec.dim), _OUT, _dtype_of(codec), "out")
        mask = self._output(mask, (num_tokens, k), (torch.bool,), torch.bool, "mask")
        entries.gather_chosen(
            codec,
            self._tokens,
            self.schema.ratio,
            topk_indices,
            blocks.table,
            pages,
            self.schema.entries_per_block,
            out,
            mask,
        )
        return out, mask

    def gather_all_compressed_kv(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read all entries of each request: out [B, N, head_dim], and how many its last token sees: lens [B].

        N is that of `out`. Without `out`, it is the entries of the longest request if the tokens were given
        on the host, else the entries that fit into the most blocks of any row. Outputs beyond a length are
        zeros; a length may exceed N. A request without tokens in the step has length 0. Errors:
        ArgumentError, also for a layer without entries; CaptureError without outputs.
        """
        _, pages = self._compressed()
        return self._gather_all(self.schema.codec, pages, out, lens)

    def gather_index(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read all indexer keys of each request: out [B, N, index_head_dim], and lens [B] int32.

        As `gather_all_compressed_kv`. Errors: ArgumentError, also for a layer without an indexer;
        CaptureError without outputs.
        """
        codec, pages = self._indexer()
        return self._gather_all(codec, pages, out, lens)

    def _gather_all(
        self, codec: Codec, pages: torch.Tensor, out: torch.Tensor | None, lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, _ = self._compressed()
        ratio, batch = self.schema.ratio, self.request_slots.shape[0]
        width = None
        if out is None:
            known = self._known
            width = (
                blocks.most_blocks() * self.schema.entries_per_block
                if known is None
                else known.length // ratio
            )
        out = self._output(out, (batch, width, codec.dim), _OUT, _dtype_of(codec), "out")
        lens = self._output(lens, (batch,), (torch.int32,), torch.int32, "lens")
        entries.gather_all(
            codec, self._tokens, ratio, blocks.table, pages, self.schema.entries_per_block, out, lens
        )
        return out, lens

    def gather_swa_kv(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the window of each token, itself included: out [T, window, head_dim], lens [T] int32.

        Positions are oldest first. Write the step's tokens before (`write_swa`). If a request has more than
        `unaccepted` of them, part of the first ones' windows is already overwritten and gives zeros: use
        `gather_swa_chunk` for a prefill. Outputs beyond a length, and of padding, are zeros. Errors:
        ArgumentError; CaptureError without outputs.
        """
        num_tokens, codec = self.positions.shape[0], self.schema.codec
        shape = (num_tokens, self.schema.window, codec.dim)
        out = self._output(out, shape, _OUT, _dtype_of(codec), "out")
        lens = self._output(lens, (num_tokens,), (torch.int32,), torch.int32, "lens")
        entries.gather_windows(codec, self._tokens, self.schema.window, self.state.ring, out, lens)
        return out, lens

    def gather_swa_chunk(
        self, chunk: torch.Tensor, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the window before a request's tokens, then these: out [B, window − 1 + Q, head_dim], lens [B].

        `chunk`, [T, head_dim], is the input of the `write_swa` that follows; it is returned rounded as it
        will be stored, however long it is. Q is that of `out`. Without `out`, it is the most tokens of any
        request if the tokens were given on the host, else all tokens of the step. Positions are oldest first;
        outputs beyond a length are zeros. Errors: ArgumentError; CaptureError without outputs.
        """
        num_tokens, codec, window = self.positions.shape[0], self.schema.codec, self.schema.window
        batch = self.request_slots.shape[0]
        self._require(chunk, (num_tokens, codec.dim), _OUT, "chunk", is_whole=False)
        width = None
        if out is None:
            width = window - 1 + (num_tokens if self._known is None else self._known.num_tokens)
        elif isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[1] < window:
            raise ArgumentError(f"out: give at least {window} positions per request, not {out.shape[1]}")
        out = self._output(out, (batch, width, codec.dim), _OUT, _dtype_of(codec), "out")
        lens = self._output(lens, (batch,), (torch.int32,), torch.int32, "lens")
        entries.gather_chunk(codec, self._tokens, window, self.state.ring, chunk.detach(), out, lens)
        return out, lens

    # --- writing

    def write_swa(self, kv: torch.Tensor) -> None:
        """Write each token's entry to its row's ring: kv [T, head_dim], quantised on the way.

        If a request has more tokens than the ring has cells, only the last are kept. Errors: ArgumentError.
        """
        self._require(kv, (self.positions.shape[0], self.head_dim), _OUT, "kv", is_whole=False)
        entries.store_window(self.schema.codec, self._tokens, kv.detach(), self.state.ring)

    def write_compressed(self, kv: torch.Tensor) -> None:
        """Write the entry of each token that ends a block of `ratio` tokens: kv [T, head_dim], quantised.

        The values of other tokens are not read. An entry whose block was not allocated is not written.
        Errors: ArgumentError, also for a layer without entries.
        """
        _, pages = self._compressed()
        self._write(self.schema.codec, pages, kv, "kv")

    def write_index(self, keys: torch.Tensor) -> None:
        """As `write_compressed`, for the indexer's keys of these entries: keys [T, index_head_dim]."""
        codec, pages = self._indexer()
        self._write(codec, pages, keys, "keys")

    def _write(self, codec: Codec, pages: torch.Tensor, values: torch.Tensor, name: str) -> None:
        blocks, _ = self._compressed()
        self._require(values, (self.positions.shape[0], codec.dim), _OUT, name, is_whole=False)
        entries.store_entries(
            codec,
            self._tokens,
            values.detach(),
            self.schema.ratio,
            blocks.table,
            pages,
            self.schema.entries_per_block,
        )

    def compress(
        self,
        values: torch.Tensor,
        scores: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the entry of each token that ends a block, and keep the tokens for later entries.

        out is [T, head_dim] float32, zeros for tokens that do not end a block. `values` and `scores` are the
        compressor's projections of the step's tokens, [T, channels], with 2 × head_dim channels where blocks
        overlap, else head_dim; scores include the bias of a token's position in its block. `norm` is the
        weight, [head_dim], and epsilon of a root mean square norm; `rotary` is cos and sin, [T, rotated / 2]
        each, at the first position of the token's block. Cost: two launches. Errors: ArgumentError, also for
        a layer without entries; CaptureError without `out`.
        """
        self._compressed()
        state = self.state.main_values, self.state.main_scores
        return self._compress(state, self.head_dim, values, scores, norm, rotary, out)

    def compress_index(
        self,
        values: torch.Tensor,
        scores: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `compress`, with the indexer's compressor: out [T, index_head_dim] float32."""
        self._indexer()
        state = self.state.index_values, self.state.index_scores
        return self._compress(state, self.schema.index_dim, values, scores, norm, rotary, out)

    def _compress(
        self,
        state: tuple[torch.Tensor | None, torch.Tensor | None],
        dim: int,
        values: torch.Tensor,
        scores: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        kept_values, kept_scores = state
        assert kept_values is not None
        assert kept_scores is not None
        num_tokens = self.positions.shape[0]
        for name, given in (("values", values), ("scores", scores)):
            self._require(given, (num_tokens, kept_values.shape[2]), _OUT, name, is_whole=False)
        if norm is not None:
            if not isinstance(norm, Sequence) or len(norm) != 2 or not isinstance(norm[1], (int, float)):
                raise ArgumentError("norm: give (weight, epsilon)")
            self._require(norm[0], (dim,), _OUT, "norm")
        if rotary is not None:
            if not isinstance(rotary, Sequence) or len(rotary) != 2:
                raise ArgumentError("rotary: give (cos, sin)")
            for given in rotary:
                self._require(given, (num_tokens, None), _OUT, "rotary", is_whole=False)
            widths = {given.shape[1] for given in rotary}
            if len(widths) > 1 or 2 * max(widths) > dim:
                raise ArgumentError(
                    f"rotary: give cos and sin of one width, at most {dim // 2}, not {sorted(widths)}"
                )
        out = self._output(out, (num_tokens, dim), (torch.float32,), torch.float32, "out")
        values, scores = values.detach(), scores.detach()
        compress.compress(
            self._tokens,
            values,
            scores,
            self.schema.ratio,
            kept_values,
            kept_scores,
            out,
            None if norm is None else (norm[0].detach(), norm[1]),
            None if rotary is None else (rotary[0].detach(), rotary[1].detach()),
        )
        compress.push(self._tokens, values, scores, kept_values, kept_scores)
        return out

    # --- checks of the layer and of arguments

    def _compressed(self) -> tuple[BlockTable, torch.Tensor]:
        if self.paged is None or self._blocks is None:
            raise ArgumentError(
                f"layer {self.schema.layer_idx} is {self.schema.attn_type.name}: it has no compressed entries"
            )
        return self._blocks, self.paged.entries

    def _indexer(self) -> tuple[Codec, torch.Tensor]:
        paged, codec = self.paged, self.schema.index_codec
        if paged is None or paged.index is None or codec is None:
            raise ArgumentError(
                f"layer {self.schema.layer_idx} is {self.schema.attn_type.name}: it has no indexer"
            )
        return codec, paged.index

    def _require(
        self,
        given: Any,
        shape: tuple[int | None, ...],
        dtypes: tuple[torch.dtype, ...],
        name: str,
        is_whole: bool = True,
    ) -> None:
        """Raise an ArgumentError unless a kernel can take this tensor. None in `shape` matches any size."""
        if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
            raise ArgumentError(f"{name}: give a dense tensor, not {type(given).__name__}")
        fits = len(shape) == given.dim() and all(
            want in (None, have) for want, have in zip(shape, given.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise ArgumentError(f"{name}: give shape ({wanted}), not {tuple(given.shape)}")
        if given.dtype not in dtypes:
            raise ArgumentError(f"{name}: give {' or '.join(map(str, dtypes))}, not {given.dtype}")
        if given.device != self.state.device:
            raise ArgumentError(f"{name}: give a tensor on {self.state.device}, not on {given.device}")
        if is_whole and not given.is_contiguous():
            raise ArgumentError(f"{name}: give a contiguous tensor")
        if given.stride(-1) != 1 and not given.is_contiguous():
            refuse_capture(self.state.device, f"copying {name}, which is not contiguous,")

    def _output(
        self,
        given: torch.Tensor | None,
        shape: tuple[int | None, ...],
        dtypes: tuple[torch.dtype, ...],
        dtype: torch.dtype,
        name: str,
    ) -> torch.Tensor:
        """Return the caller's buffer, or a new one."""
        if given is not None:
            self._require(given, shape, dtypes, name)
            return given
        refuse_capture(self.state.device, f"allocating {name}")
        sizes = [size for size in shape if size is not None]
        return torch.empty(sizes, dtype=dtype, device=self.state.device)


def _dtype_of(codec: Codec) -> torch.dtype:
    """Return the default dtype of outputs."""
    found: torch.dtype = getattr(torch, codec.flat_dtype)
    return torch.bfloat16 if codec.scale_dtype is not None else found
