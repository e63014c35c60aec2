"""Dividing memory between groups. In: groups, bytes, lengths of requests; out: ids of each group, and
requests.

Invariants: what a Budget hands out fits into its bytes, the padding id of every group included; each group
can hold the longest request asked for; no larger share of the mix would fit."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from pagoda.errors import ConfigError
from pagoda.layout._groups import PagedGroup, StateGroup
from pagoda.layout._numbers import count, num_bytes, show, show_bytes

__all__ = ["Budget", "Groups", "Mix", "Share", "divide", "longest_request", "max_requests", "memory_for"]

Groups: TypeAlias = Sequence[PagedGroup | StateGroup]
Mix: TypeAlias = Mapping[int, float | Fraction] | Mapping[int, int] | Iterable[int] | int

_ENDLESS = 2**62  # tokens: longer than any request


@dataclass(frozen=True)
class Share:
    """A group's part of a budget: `num_units` pages or rows that may be handed out, and its bytes, which
    include one more for padding."""

    group: PagedGroup | StateGroup
    num_units: int
    num_bytes: int


@dataclass(frozen=True)
class Budget:
    """Memory divided between groups.

    `requests` is how many requests of the mix run at once, a fraction of one included; `spare_bytes` what
    no whole page was left for."""

    memory_bytes: int
    shares: tuple[Share, ...]
    requests: Fraction
    spare_bytes: int

    @property
    def num_requests(self) -> int:
        """Whole requests of the mix that run at once. O(1)."""
        return math.floor(self.requests)

    @property
    def num_tokens(self) -> int | None:
        """Tokens that can be held in all, by the groups that keep every token; None where none does.
        O(groups)."""
        held = [
            share.num_units * share.group.page_tokens
            for share in self.shares
            if isinstance(share.group, PagedGroup) and share.group.window is None
        ]
        return min(held, default=None)

    def capacity(self) -> dict[str, int]:
        """Pages or rows of each group, by name: what a manager is built with. O(groups)."""
        return {share.group.name: share.num_units for share in self.shares}


def divide(groups: Groups, memory: int | str, mix: Mix, chunk: int, checkpoints: int) -> Budget:
    """As `Layout.divide`."""
    memory_bytes = num_bytes(memory)
    weights = _read_mix(mix)
    demands = _demands(groups, weights, chunk, checkpoints)
    least = sum(demand.bytes_for(Fraction(0)) for demand in demands)
    if least > memory_bytes:
        longest = max(weights)
        raise ConfigError(
            f"a request of {longest:,} tokens needs {show_bytes(least)} of cache ({least:,} B), "
            f"and there are {show_bytes(memory_bytes)}: give more memory or shorter requests"
        )

    def fits(requests: Fraction) -> bool:
        return sum(demand.bytes_for(requests) for demand in demands) <= memory_bytes

    # Costs rise only where one group needs one more page or row: the best is at such a point.
    requests = max(demand.largest(fits, memory_bytes) for demand in demands)
    shares = tuple(
        Share(demand.group, demand.units_for(requests), demand.bytes_for(requests)) for demand in demands
    )
    spare = memory_bytes - sum(share.num_bytes for share in shares)
    return Budget(memory_bytes, shares, requests, spare)


def max_requests(groups: Groups, memory: int | str, length: int, chunk: int, checkpoints: int) -> int:
    """As `Layout.max_requests`."""
    memory_bytes = num_bytes(memory)
    once = memory_for(groups, 0, length, chunk, checkpoints)
    each = memory_for(groups, 1, length, chunk, checkpoints) - once
    return max(0, (memory_bytes - once) // each)


def memory_for(groups: Groups, requests: int, length: int, chunk: int, checkpoints: int) -> int:
    """As `Layout.memory_for`."""
    count(requests, "requests", low=0)
    demands = _demands(groups, {count(length, "length"): Fraction(1)}, chunk, checkpoints)
    return sum((demand.extra + requests * demand.longest) * demand.group.unit_bytes for demand in demands)


def longest_request(groups: Groups, memory: int | str, chunk: int, checkpoints: int) -> int | None:
    """As `Layout.longest_request`."""
    memory_bytes = num_bytes(memory)
    count(chunk, "chunk")

    def fits(length: int) -> bool:
        return max_requests(groups, memory_bytes, length, chunk, checkpoints) > 0

    if not groups or fits(_ENDLESS):
        return None
    if not fits(1):
        return 0
    low, high = 1, _ENDLESS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class _Demand:
    """What one group needs: `mean` units for an average request, `longest` for the longest, `extra` once."""

    group: PagedGroup | StateGroup
    mean: Fraction
    longest: int
    extra: int  # the padding id, and what a chunk of prefill holds in a window

    @staticmethod
    def of(group: PagedGroup | StateGroup, weights: Mapping[int, Fraction], chunk: int, rows: int) -> _Demand:
        each, step, extra = rows if isinstance(group, StateGroup) else 1, 1, 1
        if isinstance(group, PagedGroup) and group.window is not None:
            # However a chunk is shared out: from `enough` tokens on a request holds a page more; what a chunk
            # has beyond that takes a page for every page's worth of tokens, whoever gets them.
            enough = group.page_tokens - (group.window - 2) % group.page_tokens + 1
            if chunk >= enough:
                is_each = enough <= group.page_tokens
                step = enough if is_each else 1
                extra += (chunk - enough) // group.page_tokens + (0 if is_each else 1)
        units = {length: each * group.peak_units(length, step) for length in weights}
        mean = sum((weights[length] * units[length] for length in weights), Fraction(0))
        return _Demand(group, mean, max(units.values()), extra)

    def units_for(self, requests: Fraction) -> int:
        """Units to hand out for so many average requests, and for one of the longest at least."""
        return max(self.longest, math.ceil(requests * self.mean)) + self.extra - 1

    def bytes_for(self, requests: Fraction) -> int:
        return (self.units_for(requests) + 1) * self.group.unit_bytes

    def largest(self, fits: Callable[[Fraction], bool], memory_bytes: int) -> Fraction:
        """The most requests that fit and need a whole number of this group's units."""
        low, high = 0, memory_bytes // self.group.unit_bytes + 1
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle / self.mean):
                low = middle
            else:
                high = middle
        return low / self.mean


def _demands(groups: Groups, weights: Mapping[int, Fraction], chunk: int, checkpoints: int) -> list[_Demand]:
    count(chunk, "chunk")
    rows = 1 + count(checkpoints, "checkpoints", low=0)
    if not groups:
        raise ConfigError("this layout stores nothing: any number of requests fits")
    return [_Demand.of(group, weights, chunk, rows) for group in groups]


def _read_mix(mix: Any) -> dict[int, Fraction]:
    """Lengths with weights that add up to 1, or a ConfigError."""
    pairs: list[tuple[Any, Any]]
    try:
        pairs = [(operator.index(mix), 1)]
    except TypeError:
        if isinstance(mix, Mapping):
            pairs = list(mix.items())
        elif isinstance(mix, Iterable) and not isinstance(mix, (str, bytes, Set)):
            pairs = [(length, 1) for length in mix]
        else:  # a set does not know how often a length comes
            raise ConfigError(
                f"mix: give a length, a list of lengths or a dict with weights, not {type(mix).__name__}"
            ) from None
    if not pairs:
        raise ConfigError("mix: give at least one length")
    weights: dict[int, Fraction] = {}
    for length, weight in pairs:
        try:
            share = Fraction(weight)
        except (TypeError, ValueError, ArithmeticError):
            raise ConfigError(
                f"mix: give a number as the weight of {show(length)}, not {show(weight)}"
            ) from None
        if share <= 0:
            raise ConfigError(f"mix: give a weight above 0 for {show(length)}, not {show(weight)}")
        tokens = count(length, "length in mix")
        weights[tokens] = weights.get(tokens, Fraction(0)) + share
    whole = sum(weights.values())
    return {tokens: share / whole for tokens, share in weights.items()}
