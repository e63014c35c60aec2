"""Entries, window and compressors of one layer during a step: `LayerStep`.

In: what a layer stores (`LayerEntries`), the tokens of a step; out: entries that attention reads, and bytes
written to pages and states. Every place follows from a token's row and position, so nothing here remembers
how far a request has come. Writes go to the layer's own pages and to the states of the step's rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pagoda.errors import ArgumentError
from pagoda.kernels import compress, entries
from pagoda.kernels.entries import Codec, Ring, Tokens
from pagoda.layout import Entry
from pagoda.pools._arguments import refuse_capture

__all__ = ["Known", "LayerEntries", "LayerStep"]

_OUT = (torch.float32, torch.bfloat16, torch.float16)


class Known(NamedTuple):
    """What the host knows about the tokens of a step."""

    length: int  # tokens of the longest request, those of the step included
    num_tokens: int  # the most tokens that any request has in the step


@dataclass(frozen=True)
class LayerEntries:
    """What a layer stores as entries, and where. `name` is what errors call the layer.

    `pages` has its pages by entry name, [num_pages + 1, page_bytes] uint8, and `table` the pages of each row,
    [num_rows + 1, max_pages] int32, below 1 where there is none; a layer with only a window has neither.
    `state` has the parts of its state by name, [num_rows + 1, cells, …]: the ring of a window and the
    projections that its compressors keep. `entry` is the layout of an entry, in the ring and in pages, and
    `index` that of an indexer's key. One entry covers `ratio` tokens.
    """

    name: str
    device: torch.device
    entry: Entry
    index: Entry | None = None
    ratio: int = 1
    entries_per_page: int = 0
    window: int = 0
    pages: Mapping[str, torch.Tensor] | None = None
    table: torch.Tensor | None = None
    state: Mapping[str, torch.Tensor] | None = None

    @cached_property
    def codec(self) -> Codec:
        """How the numbers of an entry become bytes. Errors: ConfigError for a format that kernels lack."""
        return Codec.of(self.entry)

    @cached_property
    def index_codec(self) -> Codec | None:
        """How the numbers of an indexer's key become bytes; None without an indexer. Errors: ConfigError."""
        return None if self.index is None else Codec.of(self.index)

    @cached_property
    def ring(self) -> Ring | None:
        """The windows of all rows, as kernels take them; None without a window."""
        state = self.state or {}
        if "window" not in state:
            return None
        return Ring(state["window"], state.get("window_scales"), state["positions"])

    def compressor(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what the compressor `main` or `index` keeps, values and scores, or None."""
        state = self.state or {}
        if f"{name}_values" not in state:
            return None
        return state[f"{name}_values"], state[f"{name}_scores"]


class LayerStep:
    """The entries of one layer for the tokens of one step, which attention reads and writes.

    `tokens` has the row of each request, [batch] int32, 0 for padding; and for each token, [tokens], the
    index of its request in the batch and its position, −1 in either for padding. The tokens of a request are
    adjacent, at consecutive positions.

    Every call is one launch (`compress`: two) on the current stream, does not wait, and can be captured if
    its outputs are given. Without them, outputs are allocated: bfloat16 for quantised entries, else in the
    entry's dtype. Inputs are copied if the numbers of a token are not contiguous. Inputs are not read on the
    host, and gradients do not flow through them.
    """

    __slots__ = ("_known", "layer", "tokens")

    def __init__(self, layer: LayerEntries, tokens: Tokens, known: Callable[[], Known]) -> None:
        self.layer, self.tokens, self._known = layer, tokens, known

    def __repr__(self) -> str:
        return (
            f"LayerStep({self.layer.name}: {self.tokens.positions.shape[0]} tokens of "
            f"{self.tokens.rows.shape[0]} requests)"
        )

    # --- reading

    def gather_chosen(
        self,
        topk_indices: torch.Tensor,
        out: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the entries that an indexer chose for each token: out [T, k, dim], and mask [T, k] bool.

        `topk_indices` is [T, k] int32 or int64, entries of the token's request. An index that is negative or
        not yet visible, (p + 1) // ratio or more, gives zeros and False, as do all indices of padding.
        Errors: ArgumentError, also for a layer without entries; CaptureError without outputs.
        """
        table, pages = self._entries()
        num_tokens, codec = self.tokens.positions.shape[0], self.layer.codec
        self._require(topk_indices, (num_tokens, None), (torch.int32, torch.int64), "topk_indices")
        k = topk_indices.shape[1]
        out = self._output(out, (num_tokens, k, codec.dim), _OUT, _dtype_of(codec), "out")
        mask = self._output(mask, (num_tokens, k), (torch.bool,), torch.bool, "mask")
        entries.gather_chosen(
            codec,
            self.tokens,
            self.layer.ratio,
            topk_indices,
            table,
            pages,
            self.layer.entries_per_page,
            out,
            mask,
        )
        return out, mask

    def gather_all(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read all entries of each request: out [B, N, dim], and how many its last token sees: lens [B].

        N is that of `out`, and without `out` the entries of the longest request. Outputs beyond a length are
        zeros; a length may exceed N. A request without tokens in the step has length 0. Errors:
        ArgumentError, also for a layer without entries; CaptureError without outputs.
        """
        _, pages = self._entries()
        return self._gather_all(self.layer.codec, pages, out, lens)

    def gather_index(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read all indexer keys of each request: out [B, N, index_dim], and lens [B] int32.

        As `gather_all`. Errors: ArgumentError, also for a layer without an indexer; CaptureError without
        outputs.
        """
        codec, pages = self._index()
        return self._gather_all(codec, pages, out, lens)

    def _gather_all(
        self, codec: Codec, pages: torch.Tensor, out: torch.Tensor | None, lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table, _ = self._entries()
        ratio, batch = self.layer.ratio, self.tokens.rows.shape[0]
        width = self._known().length // ratio if out is None else None
        out = self._output(out, (batch, width, codec.dim), _OUT, _dtype_of(codec), "out")
        lens = self._output(lens, (batch,), (torch.int32,), torch.int32, "lens")
        entries.gather_all(codec, self.tokens, ratio, table, pages, self.layer.entries_per_page, out, lens)
        return out, lens

    def gather_window(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the window of each token, itself included: out [T, window, dim], lens [T] int32.

        Positions are oldest first. Write the step's tokens before (`write_window`). If a request has more
        than `unaccepted` of them, part of the first ones' windows is already overwritten and gives zeros: use
        `gather_chunk` for a prefill. Outputs beyond a length, and of padding, are zeros. Errors:
        ArgumentError, also for a layer without a window; CaptureError without outputs.
        """
        ring, window, codec = self._ring(), self.layer.window, self.layer.codec
        num_tokens = self.tokens.positions.shape[0]
        out = self._output(out, (num_tokens, window, codec.dim), _OUT, _dtype_of(codec), "out")
        lens = self._output(lens, (num_tokens,), (torch.int32,), torch.int32, "lens")
        entries.gather_windows(codec, self.tokens, window, ring, out, lens)
        return out, lens

    def gather_chunk(
        self, chunk: torch.Tensor, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the window before a request's tokens, then these: out [B, window − 1 + Q, dim], lens [B].

        `chunk`, [T, dim], is the input of the `write_window` that follows; it is returned rounded as it will
        be stored, however long it is. Q is that of `out`, and without `out` the most tokens of any request.
        Positions are oldest first; outputs beyond a length are zeros. Errors: ArgumentError, also for a layer
        without a window; CaptureError without outputs.
        """
        ring, window, codec = self._ring(), self.layer.window, self.layer.codec
        num_tokens, batch = self.tokens.positions.shape[0], self.tokens.rows.shape[0]
        self._require(chunk, (num_tokens, codec.dim), _OUT, "chunk", is_whole=False)
        width = None
        if out is None:
            width = window - 1 + self._known().num_tokens
        elif isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[1] < window:
            raise ArgumentError(f"out: give at least {window} positions per request, not {out.shape[1]}")
        out = self._output(out, (batch, width, codec.dim), _OUT, _dtype_of(codec), "out")
        lens = self._output(lens, (batch,), (torch.int32,), torch.int32, "lens")
        entries.gather_chunk(codec, self.tokens, window, ring, chunk.detach(), out, lens)
        return out, lens

    # --- writing

    def write_window(self, kv: torch.Tensor) -> None:
        """Write each token's entry to its row's ring: kv [T, dim], quantised on the way.

        If a request has more tokens than the ring has cells, only the last are kept. Errors: ArgumentError,
        also for a layer without a window.
        """
        ring, codec = self._ring(), self.layer.codec
        self._require(kv, (self.tokens.positions.shape[0], codec.dim), _OUT, "kv", is_whole=False)
        entries.store_window(codec, self.tokens, kv.detach(), ring)

    def write_entries(self, kv: torch.Tensor) -> None:
        """Write the entry of each token that ends a block of `ratio` tokens: kv [T, dim], quantised.

        The values of other tokens are not read. An entry whose row has no page for it is not written.
        Errors: ArgumentError, also for a layer without entries.
        """
        _, pages = self._entries()
        self._write(self.layer.codec, pages, kv, "kv")

    def write_index(self, keys: torch.Tensor) -> None:
        """As `write_entries`, for the indexer's keys of these entries: keys [T, index_dim]."""
        codec, pages = self._index()
        self._write(codec, pages, keys, "keys")

    def _write(self, codec: Codec, pages: torch.Tensor, values: torch.Tensor, name: str) -> None:
        table, _ = self._entries()
        self._require(values, (self.tokens.positions.shape[0], codec.dim), _OUT, name, is_whole=False)
        entries.store_entries(
            codec,
            self.tokens,
            values.detach(),
            self.layer.ratio,
            table,
            pages,
            self.layer.entries_per_page,
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

        out is [T, dim] float32, zeros for tokens that do not end a block. `values` and `scores` are the
        compressor's projections of the step's tokens, [T, channels], with 2 × dim channels where blocks
        overlap, else dim; scores include the bias of a token's position in its block. `norm` is the weight,
        [dim], and epsilon of a root mean square norm; `rotary` is cos and sin, [T, rotated / 2] each, at the
        first position of the token's block. Cost: two launches. Errors: ArgumentError, also for a layer
        without a compressor; CaptureError without `out`.
        """
        self._entries()
        return self._compress("main", self.layer.codec.dim, values, scores, norm, rotary, out)

    def compress_index(
        self,
        values: torch.Tensor,
        scores: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `compress`, with the indexer's compressor: out [T, index_dim] float32."""
        codec, _ = self._index()
        return self._compress("index", codec.dim, values, scores, norm, rotary, out)

    def _compress(
        self,
        name: str,
        dim: int,
        values: torch.Tensor,
        scores: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        state = self.layer.compressor(name)
        if state is None:
            raise self._lacks("compressor")
        kept_values, kept_scores = state
        num_tokens = self.tokens.positions.shape[0]
        for what, given in (("values", values), ("scores", scores)):
            self._require(given, (num_tokens, kept_values.shape[2]), _OUT, what, is_whole=False)
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
            self.tokens,
            values,
            scores,
            self.layer.ratio,
            kept_values,
            kept_scores,
            out,
            None if norm is None else (norm[0].detach(), norm[1]),
            None if rotary is None else (rotary[0].detach(), rotary[1].detach()),
        )
        compress.push(self.tokens, values, scores, kept_values, kept_scores)
        return out

    # --- checks of the layer and of arguments

    def _entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layer
        if layer.pages is None or layer.table is None:
            raise self._lacks("compressed entries")
        return layer.table, layer.pages[layer.entry.name]

    def _index(self) -> tuple[Codec, torch.Tensor]:
        layer, codec = self.layer, self.layer.index_codec
        if layer.pages is None or layer.index is None or codec is None:
            raise self._lacks("indexer")
        return codec, layer.pages[layer.index.name]

    def _ring(self) -> Ring:
        if self.layer.ring is None:
            raise self._lacks("window")
        return self.layer.ring

    def _lacks(self, what: str) -> ArgumentError:
        return ArgumentError(f"{self.layer.name}: it has no {what}")

    def _require(
        self,
        given: Any,
        shape: tuple[int | None, ...],
        dtypes: tuple[torch.dtype, ...],
        name: str,
        is_whole: bool = True,
    ) -> None:
        """Raise an ArgumentError unless a kernel can take this tensor. None in `shape` matches any size."""
        device = self.layer.device
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
        if given.device != device:
            raise ArgumentError(f"{name}: give a tensor on {device}, not on {given.device}")
        if is_whole and not given.is_contiguous():
            raise ArgumentError(f"{name}: give a contiguous tensor")
        if given.stride(-1) != 1 and not given.is_contiguous():
            refuse_capture(device, f"copying {name}, which is not contiguous,")

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
        refuse_capture(self.layer.device, f"allocating {name}")
        sizes = [size for size in shape if size is not None]
        return torch.empty(sizes, dtype=dtype, device=self.layer.device)


def _dtype_of(codec: Codec) -> torch.dtype:
    """Return the default dtype of outputs."""
    found: torch.dtype = getattr(torch, codec.flat_dtype)
    return torch.bfloat16 if codec.scale_dtype is not None else found
