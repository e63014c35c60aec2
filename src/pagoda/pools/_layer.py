"""A layer of the model in its pool, found by its number in the model: where its keys, values, entries and
state are, and how the tokens of a batch are written there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagoda.errors import ArgumentError
from pagoda.kernels.entries import Tokens
from pagoda.layout import PagedGroup
from pagoda.pools._batch import Batch, GroupBatch
from pagoda.pools._entries import EntryPool
from pagoda.pools._kv import TokenPool
from pagoda.pools._layer_step import Known, LayerEntries, LayerStep

__all__ = ["Layer"]


@dataclass(frozen=True)
class Layer:
    """Where layer `number` of the model keeps what it stores: layer `index` of its group's pool.

    A layer that shares the keys and values of another (`source` is that layer's number) has that layer's
    buffers and stores nothing itself. Keys and values, or latents, are in a TokenPool: `keys`, `values` and
    `store`. Entries, and windows in rings, are read and written through `at`.
    """

    number: int
    source: int
    group: PagedGroup
    pool: TokenPool | EntryPool
    index: int
    entries: LayerEntries | None = None

    def _tokens(self) -> TokenPool:
        if not isinstance(self.pool, TokenPool):
            raise ArgumentError(f"layer {self.number} stores entries, not keys by slot: use Layer.at(batch)")
        return self.pool

    @property
    def keys(self) -> torch.Tensor:
        """[num_slots, kv_heads, k_dim]: keys by slot. In latent attention, latents with one head.

        Errors: ArgumentError for a layer that stores entries; so for `values` and the scales.
        """
        return self._tokens().k_buffer[self.index]

    @property
    def values(self) -> torch.Tensor | None:
        """[num_slots, kv_heads, v_dim]: values by slot. In latent attention, None."""
        pool = self._tokens()
        return pool.v_buffer[self.index] if pool.v_buffer else None

    @property
    def k_scale(self) -> float:
        """The factor of an fp8 key when it is read; 1 in other pools."""
        return self._tokens().k_scale[self.index]

    @property
    def v_scale(self) -> float:
        """The factor of an fp8 value when it is read; 1 in other pools."""
        return self._tokens().v_scale[self.index]

    def part_of(self, batch: Batch) -> GroupBatch[torch.Tensor]:
        """Return the part of a batch that is about this layer's group.

        Errors: ArgumentError, also for a batch of pools with another layout, whose slots mean other places;
        StaleError for a batch whose buffers have been filled for another step.
        """
        if not isinstance(batch, Batch):
            raise ArgumentError(f"batch: give what Pools.batch returned, not {type(batch).__name__}")
        part = batch[self.group.name]
        if part.group is not self.group and part.group != self.group:
            raise ArgumentError(f"batch: it is of pools with another layout than layer {self.number}")
        batch.require_current()
        return part

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
        pool, slots = self._tokens(), self.part_of(batch).slot_mapping
        if isinstance(keys, torch.Tensor) and keys.dim() and keys.shape[0] == batch.num_tokens:
            slots = slots[: batch.num_tokens]
        pool.store(self.index, slots, keys, values)

    def at(self, batch: Batch) -> LayerStep:
        """Return the layer's entries and window for the tokens of a batch.

        It reads the buffers of the batch, which never move: captured with a padded batch, its calls serve
        every later batch of that size. Errors: ArgumentError for a layer without entries; StaleError after
        another `Pools.batch`; ConfigError for entries in a format that kernels do not support.
        """
        if self.entries is None:
            raise ArgumentError(f"layer {self.number} stores keys by slot, not entries: use Layer.store")
        self.part_of(batch)
        tokens = Tokens(batch.rows, batch.batch_indices, batch.positions)
        return LayerStep(self.entries, tokens, lambda: Known(*batch.longest))

    def __repr__(self) -> str:
        shared = "" if self.source == self.number else f", shared with layer {self.source}"
        return f"Layer({self.number}: group {self.group.name}, index {self.index}{shared})"
