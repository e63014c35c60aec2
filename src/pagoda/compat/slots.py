"""`SlotAllocator`: one fixed slot per sequence, in a cache that the caller owns."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from pagoda.errors import AlreadyHeldError, CapacityError, InvariantError, NotHeldError
from pagoda.ids import FreeList
from pagoda.layout._numbers import count
from pagoda.pools._arguments import one_id

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hands out slots 0 … max_slots − 1, lowest first, each with a version.

    There is no padding slot here: the cache belongs to the caller. Thread-safe.

    Errors: ConfigError for a negative size.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = count(max_slots, "max_slots", low=0)
        self._slots = FreeList(self.max_slots, first_id=0, what="slots")
        self._versions = np.zeros(self.max_slots, dtype=np.int64)
        self._lock = threading.RLock()

    @property
    def free_count(self) -> int:
        """Slots that can be allocated now."""
        with self._lock:
            return self._slots.num_free

    def alloc(self) -> int:
        """Take the lowest free slot and raise its version by one; −1 if no slot is free."""
        with self._lock:
            try:
                slot = int(self._slots.alloc(1)[0])
            except CapacityError:
                return -1
            self._versions[slot] += 1
            return slot

    def occupy(self, idx: int) -> None:
        """Take a given free slot without changing its version.

        Errors: AlreadyHeldError, OutOfRangeError, ArgumentError.
        """
        with self._lock:
            slot = self._slot(idx)
            if not self._slots.is_free(slot):
                raise AlreadyHeldError(f"idx = {slot} is taken: free it first", slot, 0)
            self._slots.take([slot])

    def free(self, idx: int) -> None:
        """Free a slot. Errors: NotHeldError, OutOfRangeError, ArgumentError."""
        with self._lock:
            slot = self._slot(idx)
            if self._slots.is_free(slot):
                raise NotHeldError(f"idx = {slot} is free: it was freed before, or never allocated", slot, 0)
            self._slots.free([slot])

    def is_free(self, idx: int) -> bool:
        """Whether a slot can be allocated. Errors: OutOfRangeError, ArgumentError."""
        with self._lock:
            return self._slots.is_free(self._slot(idx))

    def version(self, idx: int) -> int:
        """Return how often `alloc` has handed this slot out. Errors: OutOfRangeError, ArgumentError."""
        with self._lock:
            return int(self._versions[self._slot(idx)])

    def _slot(self, idx: Any) -> int:
        return one_id(idx, "idx", 0, self.max_slots - 1, "slots")

    def check(self) -> None:
        """Verify invariants 1 to 4 and 9. Walks over everything. Errors: InvariantError."""
        with self._lock:
            self._slots.check()
            if len(self._versions) != self.max_slots or (self._versions < 0).any():
                raise InvariantError(9, "a slot's version is negative")
