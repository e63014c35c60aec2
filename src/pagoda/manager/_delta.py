"""What one step computes and changes, in one array that can be pickled and copied to a device at once.

Only native/core/delta.hpp knows the format of the array; the properties here are views of its sections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda._native import read_delta, read_work
from pagoda.errors import ArgumentError
from pagoda.layout._numbers import counted

__all__ = ["Delta", "WorkList"]

Int32 = npt.NDArray[np.int32]


class WorkList(NamedTuple):
    """What attention computes in one group, divided among programs: docs/manager.md."""

    segments: Int32  # [segments, 4]: first key, end of the keys, first member, number of members
    members: Int32  # [members, 2]: index of the row in the step, its first part in the segment or −1
    splits: Int32  # [rows, 2]: number of parts of each row, its first part or −1
    runs: Int32  # [target + 1]: program p computes segments runs[p], …, runs[p + 1] − 1
    num_parts: int
    extend_parts: int  # the most parts of an extend row
    target: int  # programs that keep the device busy


class Delta:
    """The rows of one step, and what to apply before it computes: saves, restores, resets and copies of
    states, page copies and table writes, in this order.

    `packed` is the complete delta, [words] int32, as sent to each rank. Everything else is a view of it.
    Two deltas are equal if their arrays are. Errors: ArgumentError for an array that is not a delta.
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
        """Number of groups of the manager."""
        return read_delta(self.packed)[1]

    @property
    def rows(self) -> Int32:
        """[rows] int32: the rows that the step computes, in the order of `Manager.plan`."""
        return self._section("rows")

    @property
    def lengths(self) -> Int32:
        """[rows] int32: length of each row in tokens once the step is computed."""
        return self._section("lengths")

    @property
    def counts(self) -> Int32:
        """[rows] int32: how many tokens of each row the step computes, always its last ones."""
        return self._section("counts")

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return int(self.counts.sum())

    @property
    def saves(self) -> tuple[Int32, Int32, Int32]:
        """[saves] int32 each: rows, the tokens in their states, and the checkpoints to write."""
        return self._section("save_rows"), self._section("save_lengths"), self._section("save_ids")

    @property
    def restores(self) -> tuple[Int32, Int32, Int32]:
        """[restores] int32 each: rows, the tokens in their states, and the checkpoints to read."""
        return self._section("restore_rows"), self._section("restore_lengths"), self._section("restore_ids")

    @property
    def resets(self) -> Int32:
        """[resets] int32: rows whose state becomes that of a new request."""
        return self._section("reset_rows")

    @property
    def state_copies(self) -> tuple[Int32, Int32]:
        """[state copies] int32 each: rows whose state is copied, and the rows that get it."""
        return self._section("state_sources"), self._section("state_targets")

    @property
    def places(self) -> Int32:
        """[writes] int32: places to write in the page tables of all groups, without duplicates."""
        return self._section("places")

    @property
    def page_ids(self) -> Int32:
        """[writes] int32: the page id to write to each place."""
        return self._section("page_ids")

    @property
    def copies(self) -> tuple[tuple[Int32, Int32], ...]:
        """Sources and targets of the page copies of each group: [copies] int32 each."""
        return tuple(
            (self._section("sources", group), self._section("targets", group))
            for group in range(self.num_groups)
        )

    def work(self, group: int) -> WorkList | None:
        """Return the work list of a group, by its number; None if the delta has none for it.

        Errors: ArgumentError for a group that does not exist.
        """
        found = read_work(self.packed, group)
        if found is None:
            return None
        (segments, num_segments), (members, num_members), (splits, num_rows), (runs, num_runs), *numbers = (
            found
        )
        return WorkList(
            self.packed[segments : segments + 4 * num_segments].reshape(-1, 4),
            self.packed[members : members + 2 * num_members].reshape(-1, 2),
            self.packed[splits : splits + 2 * num_rows].reshape(-1, 2),
            self.packed[runs : runs + num_runs],
            *numbers,
        )

    @property
    def num_bytes(self) -> int:
        """Size of `packed`, which is what a device copy transfers."""
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
        tokens, rows = counted(self.num_tokens, "token"), counted(len(self.rows), "row")
        moves = (len(self.saves[0]), "save"), (len(self.restores[0]), "restore"), (len(self.resets), "reset")
        states = [counted(n, name) for n, name in moves if n]
        if n := len(self.state_copies[0]):
            states.append(counted(n, "state copy", "state copies"))
        pages = [counted(len(self.places), "table write"), counted(copies, "page copy", "page copies")]
        return f"Delta(step {self.step}: {tokens} of {rows}; {', '.join([*states, *pages])})"
