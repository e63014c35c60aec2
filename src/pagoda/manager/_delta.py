"""What one step computes and changes, in one array that can be pickled and copied to a device at once.

The format of the array is known to native/core/delta.hpp alone; here its sections are views."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda._native import read_delta
from pagoda.errors import ArgumentError

__all__ = ["Delta"]

Int32 = npt.NDArray[np.int32]


class Delta:
    """The rows of one step, and the page copies and table writes that come before it computes.

    `packed` is the whole of it, [words] int32: what is sent to each rank. Everything else is a view of it.
    Two deltas are equal when their arrays are. Errors: ArgumentError for an array that is not a delta.
    """

    __slots__ = ("_sections", "packed", "step")

    packed: Int32
    step: int  # the step's number
    _sections: dict[tuple[str, int], Int32] | None

    def __init__(self, packed: Int32) -> None:
        if not isinstance(packed, np.ndarray) or packed.ndim != 1 or packed.dtype != np.int32:
            raise ArgumentError("packed: give the int32 array of a delta")
        self.packed, self._sections = packed, None
        self.step = read_delta(packed)[0]

    def _section(self, name: str, group: int = 0) -> Int32:
        if self._sections is None:
            self._sections = {
                (found, of): self.packed[begin : begin + size]
                for found, of, begin, size in read_delta(self.packed)[2]
            }
        return self._sections.get((name, group), self.packed[:0])

    @property
    def num_groups(self) -> int:
        """Groups of the manager."""
        return read_delta(self.packed)[1]

    @property
    def rows(self) -> Int32:
        """[rows] int32: the rows that the step computes, in the order that they were planned in."""
        return self._section("rows")

    @property
    def lengths(self) -> Int32:
        """[rows] int32: tokens of each row once the step is computed."""
        return self._section("lengths")

    @property
    def counts(self) -> Int32:
        """[rows] int32: tokens of each row that the step computes, its last ones."""
        return self._section("counts")

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.counts.sum())

    @property
    def places(self) -> Int32:
        """[writes] int32: places in the page tables of all groups, each once."""
        return self._section("places")

    @property
    def page_ids(self) -> Int32:
        """[writes] int32: what to write there."""
        return self._section("page_ids")

    @property
    def copies(self) -> tuple[tuple[Int32, Int32], ...]:
        """For each group, sources and targets of page copies: [copies] int32 each."""
        return tuple(
            (self._section("sources", group), self._section("targets", group))
            for group in range(self.num_groups)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of `packed`: what is copied to a device."""
        return self.packed.nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Delta):
            return NotImplemented
        return np.array_equal(self.packed, other.packed)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Delta, (self.packed,)

    def __repr__(self) -> str:
        copies = sum(len(sources) for sources, _ in self.copies)
        return (
            f"Delta(step {self.step}: {self.num_tokens} tokens of {len(self.rows)} rows; "
            f"{len(self.places)} table writes, {copies} page copies)"
        )
