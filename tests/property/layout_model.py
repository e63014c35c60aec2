"""Pages of one request as sets of positions, the plain model of groups; and shares found by trying all.

Nothing here is clever: which positions a query reads is a set, a page is freed when the step after which
nobody reads anything of it has finished, peaks are found by trying every place at which a step can begin.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache


@dataclass(frozen=True)
class Reading:
    """What queries read: all before them, or the last `window` with their own and the first `sinks`."""

    page_tokens: int
    window: int | None = None
    sinks: int = 0
    resume_step: int = 1

    def read_by(self, query: int) -> set[int]:
        """The positions that the query at this position reads, its own included."""
        before = set(range(query + 1))
        if self.window is None:
            return before
        return {p for p in before if query - p < self.window or p < self.sinks}

    @cache  # noqa: B019
    def needed(self, length: int) -> frozenset[int]:
        """Of `length` stored positions, those that some later query reads."""
        later = range(length, length + (self.window or 1) + 1)
        return frozenset(p for query in later for p in self.read_by(query) if p < length)

    def pages_of(self, positions: set[int] | frozenset[int]) -> set[int]:
        return {position // self.page_tokens for position in positions}

    def live(self, length: int) -> set[int]:
        """Pages to go on with: those with needed positions, and one that is not yet full."""
        pages = self.pages_of(self.needed(length))
        return pages | {length // self.page_tokens} if length % self.page_tokens else pages

    @cache  # noqa: B019
    def given_up(self, committed: int) -> frozenset[int]:
        """Pages that nobody reads who goes on behind `committed` tokens or resumes at the last place before.

        Sinks aside, a window is given up a whole `resume_step` at a time."""
        whole = committed // self.resume_step * self.resume_step
        needed = self.needed(whole)
        sinks = {p for p in range(whole) if p < self.sinks}
        steps = {p // self.resume_step for p in needed - sinks}
        # A sink that the window reaches too counts as the window's.
        steps |= {p // self.resume_step for p in needed & sinks if self.window and whole - p < self.window}
        kept = {p for p in range(whole) if p // self.resume_step in steps} | sinks
        return frozenset(self.pages_of(set(range(whole))) - self.pages_of(kept))


class Request:
    """A request that grows: pages are taken as tokens come, given up when tokens are committed, and freed
    when the last step that was taken before has finished."""

    def __init__(self, reading: Reading, in_flight: int) -> None:
        self.reading, self.in_flight = reading, in_flight
        self.length = self.committed = 0
        self.pages: set[int] = set()
        self.steps: deque[int] = deque()  # tokens of those in flight
        self.waiting: deque[frozenset[int]] = deque()  # given up behind each of them

    def store(self, num_tokens: int) -> int:
        """Store so many tokens in one step; how many pages are held meanwhile."""
        self.pages |= self.reading.pages_of(set(range(self.length, self.length + num_tokens)))
        self.length += num_tokens
        most = len(self.pages)
        self.steps.append(num_tokens)
        self.waiting.append(frozenset())
        if len(self.steps) > self.in_flight:
            self.committed += self.steps.popleft()
            self.waiting[-1] = self.reading.given_up(self.committed)
            self.pages -= self.waiting.popleft()
        return most


@cache
def peak(reading: Reading, length: int, lag: int) -> int:
    """The most pages while it grows to `length`, if it holds at most `lag` tokens more than were committed
    when it gave up pages."""
    held = (
        reading.pages_of(set(range(end))) - reading.given_up(max(0, end - lag)) for end in range(length + 1)
    )
    return max(map(len, held))


@dataclass(frozen=True)
class Wish:
    """What one pool is asked for, in several ways each of which is enough: units of an average request, of
    the longest, and once for all."""

    unit_bytes: int
    ways: tuple[tuple[Fraction, int, int], ...]

    def requests(self, units: int) -> Fraction | float | None:
        """Average requests that so many units serve, or None if the longest does not fit."""
        served = [
            (units - once) / mean if mean else math.inf
            for mean, longest, once in self.ways
            if units >= longest + once
        ]
        return max(served, default=None)

    def units(self, requests: int) -> int:
        """Units for so many of the longest."""
        return min(requests * longest + once for _, longest, once in self.ways)


def best_requests(wishes: Sequence[Wish], memory_bytes: int) -> Fraction | float | None:
    """The most average requests over every way to hand out units; one more of each pool is padding."""

    @cache
    def best(which: int, left: int) -> Fraction | float | None:
        """The most that these and all later wishes serve with the bytes that are left."""
        if which == len(wishes):
            return math.inf
        wish = wishes[which]
        if wish.unit_bytes == 0:  # as many as anybody wants
            return best(which + 1, left)
        served = (
            (wish.requests(units), best(which + 1, left - (units + 1) * wish.unit_bytes))
            for units in range(left // wish.unit_bytes)
        )
        return max(
            (min(own, others) for own, others in served if own is not None and others is not None),
            default=None,
        )

    return best(0, memory_bytes)
