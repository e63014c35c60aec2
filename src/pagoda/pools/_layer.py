"""A layer of the model in its pool, found by its number in the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagoda.errors import ArgumentError
from pagoda.layout import PagedGroup
from pagoda.pools._batch import Batch, GroupBatch
from pagoda.pools._kv import TokenPool

__all__ = ["Layer"]


@dataclass(frozen=True)
class Layer:
    """Where layer `number` of the model keeps its keys and values: layer `index` of its group's pool.

    A layer that shares the keys and values of another (`source` is that layer's number) has that layer's
    buffers and stores nothing itself.
    """

    number: int
    source: int
    group: PagedGroup
    pool: TokenPool
    index: int

    @property
    def keys(self) -> torch.Tensor:
        """[num_slots, kv_heads, k_dim]: keys by slot. In latent attention, latents with one head."""
        return self.pool.k_buffer[self.index]

    @property
    def values(self) -> torch.Tensor | None:
        """[num_slots, kv_heads, v_dim]: values by slot. In latent attention, None."""
        return self.pool.v_buffer[self.index] if self.pool.v_buffer else None

    @property
    def k_scale(self) -> float:
        """The factor of an fp8 key when it is read; 1 in other pools."""
        return self.pool.k_scale[self.index]

    @property
    def v_scale(self) -> float:
        """The factor of an fp8 value when it is read; 1 in other pools."""
        return self.pool.v_scale[self.index]

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
        slots = self.part_of(batch).slot_mapping
        if isinstance(keys, torch.Tensor) and keys.dim() and keys.shape[0] == batch.num_tokens:
            slots = slots[: batch.num_tokens]
        self.pool.store(self.index, slots, keys, values)

    def __repr__(self) -> str:
        shared = "" if self.source == self.number else f", shared with layer {self.source}"
        return f"Layer({self.number}: group {self.group.name}, index {self.index}{shared})"
