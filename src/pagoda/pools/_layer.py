"""A layer of the model in its pools, found by its number in the model. In: batches, keys, values; out: where
the layer keeps what it stores, and writes of the tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pagoda.errors import ArgumentError
from pagoda.kernels.entries import Tokens
from pagoda.layout import Layout, PagedGroup
from pagoda.pools._batch import Batch, GroupBatch
from pagoda.pools._entries import EntryPool
from pagoda.pools._kv import TokenPool
from pagoda.pools._layer_step import Known, LayerEntries, LayerStep

__all__ = ["Layer"]


@dataclass(frozen=True)
class Layer:
    """Where layer `number` of the model keeps its keys and values, or its entries, and its state.

    Keys and values are layer `index` of the pool of `group`. A layer that shares those of another (`source`
    is that layer's number) has that layer's buffers and stores none itself. Keys and values by slot, in a
    TokenPool, are `keys` and `values`, and `store` writes them. Entries in an EntryPool, and windows in
    rings, are read and written through `at`. `state` has the parts of the layer's state by name,
    [num_rows + 1, *shape] each; it is empty if the layer has none. The state of row r is state r.
    """

    layout: Layout  # that of the pools
    number: int
    source: int
    # Group, pool and index there; None without pages.
    place: tuple[PagedGroup, TokenPool | EntryPool, int] | None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    entries: LayerEntries | None = field(default=None, compare=False)

    def _place(self) -> tuple[PagedGroup, TokenPool | EntryPool, int]:
        if self.place is None:
            raise ArgumentError(f"layer {self.number} stores no pages: it has a state")
        return self.place

    @property
    def group(self) -> PagedGroup:
        """The group of the layer's pages. Errors: ArgumentError for a layer without pages."""
        return self._place()[0]

    @property
    def pool(self) -> TokenPool | EntryPool:
        """The pool of the layer's group. Errors: ArgumentError for a layer without pages."""
        return self._place()[1]

    @property
    def index(self) -> int:
        """The layer's number in the pool. Errors: ArgumentError for a layer without pages."""
        return self._place()[2]

    def _token_pool(self) -> TokenPool:
        if not isinstance(self.pool, TokenPool):
            raise ArgumentError(f"layer {self.number} stores entries, not keys by slot: use Layer.at(batch)")
        return self.pool

    @property
    def keys(self) -> torch.Tensor:
        """[num_slots, kv_heads, k_dim]: keys by slot. In latent attention, latents with one head.

        Errors: ArgumentError for a layer that stores none by slot; so for `values` and the scales.
        """
        return self._token_pool().k_buffer[self.index]

    @property
    def values(self) -> torch.Tensor | None:
        """[num_slots, kv_heads, v_dim]: values by slot. In latent attention, None."""
        pool = self._token_pool()
        return pool.v_buffer[self.index] if pool.v_buffer else None

    @property
    def k_scale(self) -> float:
        """The factor of an fp8 key when it is read; 1 in other pools."""
        return self._token_pool().k_scale[self.index]

    @property
    def v_scale(self) -> float:
        """The factor of an fp8 value when it is read; 1 in other pools."""
        return self._token_pool().v_scale[self.index]

    def part_of(self, batch: Batch) -> GroupBatch[torch.Tensor]:
        """Return the part of a batch that is about this layer's group.

        Errors: ArgumentError, also for a batch of pools with another layout, whose slots mean other places;
        StaleError for a batch whose buffers have been filled for another step.
        """
        group = self.group
        self._require(batch)
        return batch[group.name]

    def _require(self, batch: Batch) -> None:
        if not isinstance(batch, Batch):
            raise ArgumentError(f"batch: give what Pools.batch returned, not {type(batch).__name__}")
        if batch.layout is not self.layout and batch.layout != self.layout:
            raise ArgumentError(f"batch: it is of pools with another layout than layer {self.number}")
        batch.require_current()

    def store(self, batch: Batch, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Write the keys and values of a batch's tokens to their slots, in one launch.

        keys, values: [tokens, …] as `TokenPool.store` takes them, for each token of the batch, with or
        without its padding. Errors: ArgumentError, also for a layer that shares another's keys and values;
        StaleError after another `Pools.batch`.
        """
        if self.source != self.number:
            raise ArgumentError(
                f"layer {self.number} shares keys and values with layer {self.source}: store them there"
            )
        pool, slots = self._token_pool(), self.part_of(batch).slot_mapping
        if isinstance(keys, torch.Tensor) and keys.dim() and keys.shape[0] == batch.num_tokens:
            slots = slots[: batch.num_tokens]
        pool.store(self.index, slots, keys, values)

    def at(self, batch: Batch) -> LayerStep:
        """Return the layer's entries and window for the tokens of a batch.

        It reads the buffers of the batch, which never move: if captured with a padded batch, its calls serve
        every later batch of that size. Errors: ArgumentError for a layer without entries, and as `part_of`;
        StaleError after another `Pools.batch`.
        """
        if self.entries is None:
            raise ArgumentError(f"layer {self.number} has neither entries nor a window in a ring")
        self._require(batch)
        tokens = Tokens(batch.rows, batch.batch_indices, batch.positions)
        return LayerStep(self.entries, tokens, lambda: Known(*batch.longest))

    def __repr__(self) -> str:
        found = []
        if self.place is not None:
            found.append(f"group {self.group.name}, index {self.index}")
        if self.source != self.number:
            found.append(f"shared with layer {self.source}")
        if self.state:
            found.append(f"state {', '.join(self.state)}")
        return f"Layer({self.number}: {', '.join(found)})"
