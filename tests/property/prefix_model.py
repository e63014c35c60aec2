"""Prefixes as a dict, the least recently used first to go: the plain model of both prefix caches.

A prefix is a tuple of pages, a page anything that can be compared. No runs, no tree: every page stands alone.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

Prefix = tuple[Hashable, ...]


@dataclass
class Entry:
    value: Any
    used: int
    locks: int = 0


class Prefixes:
    def __init__(self) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.now = 0

    def longest(self, pages: Iterable[Hashable]) -> Prefix:
        """The longest prefix that is there."""
        pages = tuple(pages)
        while pages and pages not in self.entries:
            pages = pages[:-1]
        return pages

    def along(self, prefix: Prefix) -> list[Entry]:
        """The entries of a prefix that is there, the shortest first."""
        return [self.entries[prefix[:length]] for length in range(1, len(prefix) + 1)]

    def use(self, prefix: Prefix) -> None:
        """All of it becomes the most recently used, as far as nobody locks it."""
        self.now += 1
        for entry in self.along(prefix):
            if not entry.locks:
                entry.used = self.now

    def lock(self, prefix: Prefix) -> None:
        for entry in self.along(prefix):
            entry.locks += 1

    def unlock(self, prefix: Prefix) -> None:
        for entry in self.along(prefix):
            entry.locks -= 1
        self.use(prefix)

    def store(self, prefix: Prefix, values: list[Any]) -> int:
        """What is not there yet gets its value; how many pages were there."""
        there = len(self.longest(prefix))
        for length in range(there + 1, len(prefix) + 1):
            self.entries[prefix[:length]] = Entry(values[length - 1], self.now)
        return there

    def evictable(self) -> int:
        return sum(not entry.locks for entry in self.entries.values())

    def evict(self, num_pages: int) -> list[Any]:
        """The values of what goes: always the leaf that was used longest ago; of one use, the deeper page."""
        gone = []
        for _ in range(num_pages):
            parents = {prefix[:-1] for prefix in self.entries}
            leaves = [it for it, entry in self.entries.items() if not entry.locks and it not in parents]
            coldest = min(leaves, key=lambda prefix: (self.entries[prefix].used, -len(prefix)))
            gone.append(self.entries.pop(coldest).value)
        return gone

    def require_order(self, used: dict[Prefix, int]) -> None:
        """Times of use as somebody else tells them: of what is not locked, the same order."""
        mine = {prefix: entry.used for prefix, entry in self.entries.items() if not entry.locks}
        ranks = [
            {prefix: sorted(set(times.values())).index(time) for prefix, time in times.items()}
            for times in (mine, {prefix: used[prefix] for prefix in mine})
        ]
        assert ranks[0] == ranks[1]
