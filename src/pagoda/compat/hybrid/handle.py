"""The cache of one layer during a step, in the names of the public design: `LayerCacheHandle`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagoda.compat.hybrid.paged import PagedKVPool
from pagoda.compat.hybrid.state import StateCachePool
from pagoda.kernels.entries import Tokens
from pagoda.pools import LayerStep
from pagoda.pools._layer_step import Known, LayerEntries

__all__ = ["LayerCacheHandle"]


class LayerCacheHandle(LayerStep):
    """The cache of one layer for the tokens of one step, which attention reads and writes: a `LayerStep`.

    `request_slots` is [batch] int32, the row of each request; 0 is padding. `positions` and `request_ids` are
    [tokens] int32, the latter an index into the batch; −1 in either is padding. `block_table`,
    [rows, logical block] int32, and `block_lens`, [rows] int32, are those of the layer's group; both, and
    `paged`, are None for a layer with only a window.
    """

    __slots__ = (
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
        layer: LayerEntries,
        tokens: Tokens,
        known: Callable[[], Known],
        *,
        state: StateCachePool,
        paged: PagedKVPool | None,
        block_lens: torch.Tensor | None,
        num_query_heads: int,
    ) -> None:
        super().__init__(layer, tokens, known)
        self.state, self.paged, self.schema = state, paged, state.schema
        self.request_slots, self.request_ids, self.positions = tokens
        self.block_table, self.block_lens = layer.table, block_lens
        self.num_query_heads, self.head_dim = num_query_heads, state.schema.head_dim

    def __repr__(self) -> str:
        return (
            f"LayerCacheHandle(layer {self.schema.layer_idx}, {self.schema.attn_type.name}: "
            f"{self.positions.shape[0]} tokens of {self.request_slots.shape[0]} requests)"
        )

    def gather_compressed_kv(
        self,
        topk_indices: torch.Tensor,
        out: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`gather_chosen`: the entries that an indexer chose for each token."""
        return self.gather_chosen(topk_indices, out, mask)

    def gather_all_compressed_kv(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`gather_all`: all entries of each request.

        Without `out`, N is the entries of the longest request if the tokens were given on the host, else the
        entries that fit into the most blocks of any row.
        """
        return self.gather_all(out, lens)

    def gather_swa_kv(
        self, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`gather_window`: the window of each token."""
        return self.gather_window(out, lens)

    def gather_swa_chunk(
        self, chunk: torch.Tensor, out: torch.Tensor | None = None, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`gather_chunk`: the window before a request's tokens, then these.

        Without `out`, Q is the most tokens of any request if the tokens were given on the host, else all
        tokens of the step.
        """
        return self.gather_chunk(chunk, out, lens)

    def write_swa(self, kv: torch.Tensor) -> None:
        """`write_window`: the entry of each token, to its row's ring."""
        self.write_window(kv)

    def write_compressed(self, kv: torch.Tensor) -> None:
        """`write_entries`: the entry of each token that ends a block of `ratio` tokens."""
        self.write_entries(kv)
