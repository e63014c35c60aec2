"""Which checkpoint is given up first: the manager's rule, written plainly, and least recently used.

In: what happens to checkpoints. Out: the next one to go. docs/manager.md describes the rule. Given the same
calls, `Rule` and the manager give up the same ids, so it recomputes a worth only when the manager does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Kind(IntEnum):
    FRESH = 0  # the tail of a path that continues no other
    CONTINUED = 1  # the tail of a path that continues another
    BRANCH = 2  # where paths part
    INTERVAL = 3  # saved along the way


TAILS = (Kind.FRESH, Kind.CONTINUED)


class Order(Protocol):
    saves_intervals: bool

    def add(self, id: int, kind: Kind, gap: int) -> None:
        """A checkpoint, `gap` tokens after the one before it, can be resumed from now on."""

    def resume(self, id: int, gap: int, is_near: bool, parts: bool) -> None:
        """A request resumed from it. is_near: pages matched little further. parts: it leaves others there."""

    def supersede(self, id: int, gap: int) -> None:
        """A deeper tail continues it."""

    def is_tail(self, id: int) -> bool | None:
        """Whether it is a tail of the first class; None for the second class."""

    def give_up(self, also_first: bool, gap: Callable[[int], int]) -> int:
        """Remove the one to go next, and return it; 0 if there is none that may."""


class LeastRecentlyUsed:
    """The longest unused goes first. Interval points would push out everything else, and are not saved."""

    saves_intervals = False

    def __init__(self, num_ids: int) -> None:
        self._ids: dict[int, None] = {}  # the longest unused first

    def add(self, id: int, kind: Kind, gap: int) -> None:
        self._ids[id] = None

    def resume(self, id: int, gap: int, is_near: bool, parts: bool) -> None:
        self._ids.pop(id)
        self._ids[id] = None

    def supersede(self, id: int, gap: int) -> None:
        pass

    def is_tail(self, id: int) -> bool | None:
        return False

    def give_up(self, also_first: bool, gap: Callable[[int], int]) -> int:
        id = next(iter(self._ids), 0)
        self._ids.pop(id, None)
        return id


@dataclass
class _Entry:
    kind: Kind
    inflation: float  # at its last use
    used: int  # saves of tails and branch points until its last use
    is_resumed: bool = False
    is_second: bool = False
    key: tuple[float, int] = (0.0, 0)  # worth or closeness, and order of arrival


class Rule:
    """Two classes, with reuse learned by kind."""

    saves_intervals = True
    prior = 16  # observations that are assumed of each kind
    most_observations = 2_000
    lifetime = 8  # saves of tails and branch points, times the number of checkpoints, that the unused survive
    most_updates = 64  # worths that are recomputed for one that goes

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids
        self._entries: dict[int, _Entry] = {}
        self._heaps: tuple[list[tuple[tuple[float, int], int]], ...] = (
            [],
            [],
        )  # by class, with outdated keys
        self._saved = [float(self.prior)] * len(Kind)
        self._resumed = [self.prior * share for share in (0.4, 0.8, 0.8, 0.8)]
        self._inflation = 0.0
        self._clock = 0
        self._saves = 0
        self._hand = 0

    def add(self, id: int, kind: Kind, gap: int) -> None:
        self._saves += kind != Kind.INTERVAL
        self._entries[id] = _Entry(kind, self._inflation, self._saves)
        self._count_saved(kind)
        self._list(id, gap, is_second=kind == Kind.INTERVAL)

    def resume(self, id: int, gap: int, is_near: bool, parts: bool) -> None:
        entry = self._entries[id]
        if is_near and not entry.is_resumed:
            entry.is_resumed = True
            self._resumed[entry.kind] += 1
        if parts and entry.kind != Kind.BRANCH:
            entry.kind = Kind.BRANCH
            self._count_saved(Kind.BRANCH)
            self._resumed[Kind.BRANCH] += 1
        entry.inflation, entry.used = self._inflation, self._saves
        self._list(id, gap, is_second=entry.is_second and not parts)

    def supersede(self, id: int, gap: int) -> None:
        self._list(id, gap, is_second=True)

    def is_tail(self, id: int) -> bool | None:
        entry = self._entries[id]
        return None if entry.is_second else entry.kind in TAILS

    def remove(self, id: int) -> None:
        """Its pages were evicted, and it with them."""
        del self._entries[id]

    def give_up(self, also_first: bool, gap: Callable[[int], int]) -> int:
        # One in turn, since those whose worth fell would not come up.
        self._hand = self._hand % self._num_ids + 1
        if self._hand in self._entries:
            self._update(self._hand, gap(self._hand))
        updated: list[int] = []
        while len(updated) < self.most_updates:
            id = self._next(also_first)
            if id == 0:
                return 0
            self._update(id, gap(id))
            if self._next(also_first) == id:
                return self._remove(id)
            updated.append(id)
        return self._remove(
            min(updated, key=lambda id: (not self._entries[id].is_second, self._entries[id].key))
        )

    def _remove(self, id: int) -> int:
        entry = self._entries.pop(id)
        if not entry.is_second:
            self._inflation = max(self._inflation, entry.key[0])
        return id

    def _next(self, also_first: bool) -> int:
        return self._first(True) or (self._first(False) if also_first else 0)

    def _count_saved(self, kind: Kind) -> None:
        self._saved[kind] += 1
        if self._saved[kind] > self.most_observations:
            self._saved[kind] /= 2
            self._resumed[kind] /= 2

    def _list(self, id: int, gap: int, is_second: bool) -> None:
        self._entries[id].is_second = is_second
        self._clock += 1
        self._set_key(id, self._worth(id, gap), self._clock)

    def _update(self, id: int, gap: int) -> None:
        entry = self._entries[id]
        is_old = self._saves - entry.used > self.lifetime * self._num_ids
        entry.is_second = entry.is_second or is_old
        self._set_key(id, -1.0 if is_old else self._worth(id, gap), entry.key[1])

    def _worth(self, id: int, gap: int) -> float:
        entry = self._entries[id]
        if entry.is_second:
            return float(gap.bit_length() - 1)
        return entry.inflation + self._resumed[entry.kind] / self._saved[entry.kind] * gap

    def _set_key(self, id: int, worth: float, order: int) -> None:
        entry = self._entries[id]
        entry.key = (worth, order)
        heapq.heappush(self._heaps[entry.is_second], (entry.key, id))

    def _first(self, is_second: bool) -> int:
        heap = self._heaps[is_second]
        while heap:
            key, id = heap[0]
            entry = self._entries.get(id)
            if entry is not None and entry.key == key and entry.is_second == is_second:
                return id
            heapq.heappop(heap)
        return 0
