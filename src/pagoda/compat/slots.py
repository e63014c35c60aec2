"""`SlotAllocator`: one fixed slot a sequence, in a cache that the caller owns."""

from __future__ import annotations

import threading

import numpy as np

from pagoda.errors import CapacityError, InvariantError
from pagoda.ids import FreeList
from pagoda.layout._numbers import count

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hands out slots 0 … max_slots − 1, lowest first, each with a version.

    There is no padding slot here: the cache is the caller's. Several threads may call it.

    Errors: ConfigError for a negative size.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = count(max_slots, "max_slots", low=0)
        self._slots = FreeList(self.max_slots, first_id=0, what="slots")
        self._versions = np.zeros(self.max_slots, dtype=np.int64)
        self._lock = threading.RLock()

    @property
    def free_count(self) -> int:
        """Slots that can be allocated now. O(1)."""
        with self._lock:
            return self._slots.num_free

    def alloc(self) -> int:
        """The lowest free slot, its version raised by one; −1 when all are taken. O(1)."""
        with self._lock:
            try:
                slot = int(self._slots.alloc(1)[0])
            except CapacityError:
                return -1
            self._versions[slot] += 1
            return slot

    def occupy(self, idx: int) -> None:
        """Take a given free slot, its version unchanged. O(1). Errors: AlreadyHeldError, OutOfRangeError."""
        with self._lock:
            self._slots.take([idx])

    def free(self, idx: int) -> None:
        """Give a slot back. O(1). Errors: NotHeldError, OutOfRangeError, ArgumentError."""
        with self._lock:
            self._slots.free([idx])

    def is_free(self, idx: int) -> bool:
        """Whether a slot can be allocated. O(1). Errors: OutOfRangeError."""
        with self._lock:
            return self._slots.is_free(idx)

    def version(self, idx: int) -> int:
        """How often `alloc` has handed this slot out. O(1). Errors: OutOfRangeError."""
        with self._lock:
            self._slots.is_free(idx)  # raises for a slot that is not there
            return int(self._versions[int(idx)])

    def check(self) -> None:
        """Verify invariants 1 to 4 and 9. Cost: a walk over all of it. Errors: InvariantError."""
        with self._lock:
            self._slots.check()
            if len(self._versions) != self.max_slots or (self._versions < 0).any():
                raise InvariantError(9, "a slot's version is negative")
