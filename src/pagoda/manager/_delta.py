"""What one step changes, in one array that can be pickled and copied to a device at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import ArgumentError
from pagoda.layout._numbers import integer

__all__ = ["Delta"]

Int32 = npt.NDArray[np.int32]


class Delta:
    """Table writes and page copies of one step.

    `packed` is [step in two halves of 31 bits, writes, copies of each group …, places, ids, then sources
    and targets of each group] int32; everything else is a view of it. Two are equal when their arrays are.
    Errors: ArgumentError for an array that is no delta of so many groups."""

    __slots__ = ("num_groups", "packed", "step")

    packed: Int32
    num_groups: int
    step: int  # the step's number

    def __init__(self, packed: Int32, num_groups: int) -> None:
        head = 3 + integer(num_groups, "num_groups", 0, ArgumentError)
        if (
            not isinstance(packed, np.ndarray)
            or packed.ndim != 1
            or packed.dtype != np.int32
            or packed.shape[0] < head
        ):
            raise ArgumentError("packed: give the int32 array of a delta")
        sizes = packed[2:head]
        if (sizes < 0).any() or packed.shape[0] != head + 2 * int(sizes.sum()):
            raise ArgumentError(f"packed: {packed.shape[0]} entries are no delta of {num_groups} groups")
        self.packed, self.num_groups = packed, num_groups
        self.step = int(packed[0]) | int(packed[1]) << 31

    @property
    def num_writes(self) -> int:
        """Entries of tables that change. O(1)."""
        return int(self.packed[2])

    @property
    def index(self) -> Int32:
        """[writes] int32: places in the flat table of all groups, each once. O(1)."""
        head = 3 + self.num_groups
        return self.packed[head : head + self.num_writes]

    @property
    def page_ids(self) -> Int32:
        """[writes] int32: what to write there. O(1)."""
        begin = 3 + self.num_groups + self.num_writes
        return self.packed[begin : begin + self.num_writes]

    @property
    def copies(self) -> tuple[tuple[Int32, Int32], ...]:
        """For each group, sources and targets of page copies: [copies] int32 each. O(groups)."""
        at = 3 + self.num_groups + 2 * self.num_writes
        found = []
        for n in self.packed[3 : 3 + self.num_groups].tolist():
            found.append((self.packed[at : at + n], self.packed[at + n : at + 2 * n]))
            at += 2 * n
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of `packed`: what is copied to a device. O(1)."""
        return self.packed.nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Delta):
            return NotImplemented
        return self.num_groups == other.num_groups and np.array_equal(self.packed, other.packed)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Delta, (self.packed, self.num_groups)

    def __repr__(self) -> str:
        copies = sum(len(sources) for sources, _ in self.copies)
        return f"Delta(step {self.step}: {self.num_writes} writes, {copies} page copies)"
