"""Pages of one request as sets of positions, the plain model of groups; and shares found by trying all.

Nothing here is clever: which positions a query reads is a set, a page is freed when no later query reads
anything of it, peaks are found by trying every place at which a step can begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product


@dataclass(frozen=True)
class Reading:
    """What queries read: all before them, or the last `window` with their own and the first `sinks`."""

    page_tokens: int
    window: int | None = None
    sinks: int = 0

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

    def held(self, length: int, step: int) -> set[int]:
        """Pages during the step that stores positions `length` to `length + step`."""
        return self.live(length) | self.pages_of(set(range(length, length + step)))


class Request:
    """A request that grows: pages are taken as tokens come and freed before the next step."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.length = reading, 0
        self.pages: dict[int, set[int]] = {}

    def free_unread(self) -> None:
        needed = self.reading.needed(self.length)
        size = self.reading.page_tokens
        self.pages = {page: held for page, held in self.pages.items() if held & needed or len(held) < size}

    def store(self, num_tokens: int) -> int:
        """Store so many tokens in one step; how many pages are held meanwhile."""
        self.free_unread()
        for _ in range(num_tokens):
            self.pages.setdefault(self.length // self.reading.page_tokens, set()).add(self.length)
            self.length += 1
        return len(self.pages)


@cache
def peak(reading: Reading, length: int, step: int) -> int:
    """The most pages during any step of at most `step` tokens, wherever it begins, up to `length`."""
    steps = [(start, size) for start in range(length) for size in range(1, min(step, length - start) + 1)]
    return max((len(reading.held(start, size)) for start, size in steps), default=0)


@dataclass(frozen=True)
class Wish:
    """What one group is asked for: units of an average request, of the longest, and once for all."""

    unit_bytes: int
    mean: Fraction
    longest: int
    once: int

    def requests(self, units: int) -> Fraction | None:
        """Average requests that so many units serve, or None if the longest does not fit."""
        if units < self.longest + self.once:
            return None
        return (units - self.once) / self.mean


def best_requests(wishes: Sequence[Wish], memory_bytes: int) -> Fraction | None:
    """The most average requests over every way to hand out units; one more of each group is padding."""
    choices = [
        [
            ((units + 1) * wish.unit_bytes, served)
            for units in range(memory_bytes // wish.unit_bytes)
            if (served := wish.requests(units)) is not None
        ]
        for wish in wishes
    ]
    fitting = (
        min(served for _, served in choice)
        for choice in product(*choices)
        if sum(cost for cost, _ in choice) <= memory_bytes
    )
    return max(fitting, default=None)
