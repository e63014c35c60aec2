"""Divides memory between pools: the pages of each paged group, the states, and the checkpoints. In: groups,
bytes, lengths of requests; out: the capacity of each pool, and how many requests fit.

Invariants: a Budget fits into its bytes, including one padding id per pool; each pool has room for the
longest request of the mix; no larger number of requests would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from pagoda.errors import ConfigError
from pagoda.layout._groups import CHECKPOINT, PagedGroup, StateGroup, steps_held
from pagoda.layout._numbers import LARGEST, as_integer, count, num_bytes, show, show_bytes

__all__ = [
    "CHECKPOINTS", "Budget", "Groups", "Mix", "Running", "Share", "divide", "longest_request", "max_requests",
    "memory_for",
]  # fmt: skip

Groups: TypeAlias = Sequence[PagedGroup | StateGroup]
Mix: TypeAlias = Mapping[int, float | Fraction] | Mapping[int, int] | Iterable[int] | int

# Default checkpoints per request: one at the end of its prompt, which an equal prompt resumes from, and one
# at the end of its answer, which the next turn resumes from.
CHECKPOINTS = 2


@dataclass(frozen=True)
class Share:
    """A pool's share of a budget: `num_units` pages, states or checkpoints that can be allocated, and their
    bytes, which include one more unit for padding.

    `name` is that of the group. The pool of checkpoints is named 'checkpoint', and its group is the group of
    states."""

    name: str
    group: PagedGroup | StateGroup
    num_units: int
    num_bytes: int


@dataclass(frozen=True)
class Budget:
    """Memory divided between pools.

    `requests` is how many requests of the mix run at once, as a fraction; `spare_bytes` are too few for
    more."""

    memory_bytes: int
    shares: tuple[Share, ...]
    requests: Fraction
    spare_bytes: int

    @property
    def num_requests(self) -> int:
        """Whole requests of the mix that run at once."""
        return math.floor(self.requests)

    @property
    def num_tokens(self) -> int | None:
        """Tokens that fit in total in the groups that keep every token; None if no group does."""
        held = [
            share.num_units * share.group.page_tokens
            for share in self.shares
            if isinstance(share.group, PagedGroup) and share.group.window is None
        ]
        return min(held, default=None)

    def capacity(self) -> dict[str, int]:
        """Return the pages, states and checkpoints, by the name of their share, as a Manager takes them."""
        return {share.name: share.num_units for share in self.shares}


@dataclass(frozen=True)
class Running:
    """How an engine runs requests (see `Layout.divide`): prefill tokens per step, checkpoints per request,
    steps in flight. Errors: ConfigError."""

    chunk: int
    checkpoints: int
    in_flight: int

    def __post_init__(self) -> None:
        count(self.chunk, "chunk")
        count(self.checkpoints, "checkpoints", low=0)
        count(self.in_flight, "in_flight", low=0)


def divide(groups: Groups, memory: int | str, mix: Mix, running: Running) -> Budget:
    """As `Layout.divide`."""
    memory_bytes = num_bytes(memory)
    weights = _read_mix(mix)
    demands = _demands(groups, weights, running)
    least = sum(demand.bytes_for(Fraction(0)) for demand in demands)
    if least > memory_bytes:
        longest = max(weights)
        kept = sum(demand.units_for(Fraction(0)) for demand in demands if demand.name == CHECKPOINT)
        raise ConfigError(
            f"memory: a request of {longest:,} tokens needs {show_bytes(least)} of cache ({least:,} B), "
            f"but only {show_bytes(memory_bytes)} are available: give more memory or shorter requests"
            + (", or fewer checkpoints" if kept else "")
        )

    def fits(requests: Fraction) -> bool:
        return sum(demand.bytes_for(requests) for demand in demands) <= memory_bytes

    # The cost rises only where some pool needs one more unit, so the optimum is at such a point.
    requests = max(demand.largest(fits, memory_bytes) for demand in demands if demand.grows)
    shares = tuple(
        Share(demand.name, demand.group, demand.units_for(requests), demand.bytes_for(requests))
        for demand in demands
    )
    spare = memory_bytes - sum(share.num_bytes for share in shares)
    return Budget(memory_bytes, shares, requests, spare)


def max_requests(groups: Groups, memory: int | str, length: int, running: Running) -> int:
    """As `Layout.max_requests`."""
    memory_bytes = num_bytes(memory)
    demands = _demands(groups, {count(length, "length"): Fraction(1)}, running)
    low, high = 0, memory_bytes // min(demand.unit_bytes for demand in demands if demand.grows) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(demand.bytes_for(Fraction(middle)) for demand in demands) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def memory_for(groups: Groups, requests: int, length: int, running: Running) -> int:
    """As `Layout.memory_for`."""
    demands = _demands(groups, {count(length, "length"): Fraction(1)}, running)
    if count(requests, "requests", low=0) == 0:
        return sum(demand.unit_bytes for demand in demands)
    return sum(demand.bytes_for(Fraction(requests)) for demand in demands)


def longest_request(groups: Groups, memory: int | str, running: Running) -> int | None:
    """As `Layout.longest_request`."""
    memory_bytes = num_bytes(memory)

    def fits(length: int) -> bool:
        return memory_for(groups, 1, length, running) <= memory_bytes

    if not groups or fits(LARGEST):
        return None
    if not fits(1):
        return 0
    low, high = 1, LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class _Bound:
    """A sufficient number of units: `mean` per average request, at least `longest`, the units of the longest
    one, plus `once` for all requests together."""

    mean: Fraction
    longest: int
    once: int

    @staticmethod
    def of(weights: Mapping[int, Fraction], units: Callable[[int], int], once: int = 0) -> _Bound:
        each = {length: units(length) for length in weights}
        mean = sum((weights[length] * each[length] for length in weights), Fraction(0))
        return _Bound(mean, max(each.values()), once)

    def units_for(self, requests: Fraction) -> int:
        return max(self.longest, math.ceil(requests * self.mean)) + self.once

    def requests_for(self, units: int) -> Fraction:
        is_enough = units >= self.longest + self.once
        return (units - self.once) / self.mean if is_enough else Fraction(0)


@dataclass(frozen=True)
class _Demand:
    """What one pool needs, in units of `unit_bytes`. Each bound is sufficient, so the smallest one counts."""

    name: str
    group: PagedGroup | StateGroup
    unit_bytes: int
    bounds: tuple[_Bound, ...]

    @staticmethod
    def of_states(group: StateGroup, weights: Mapping[int, Fraction], running: Running) -> list[_Demand]:
        one = _Bound.of(weights, lambda length: 1)
        kept = _Bound.of(weights, lambda length: running.checkpoints)
        return [
            _Demand(group.name, group, group.state_bytes, (one,)),
            _Demand(CHECKPOINT, group, group.checkpoint_bytes, (kept,)),
        ]

    @staticmethod
    def of_pages(group: PagedGroup, weights: Mapping[int, Fraction], running: Running) -> _Demand:
        page = group.page_tokens
        whole = _Bound.of(weights, lambda length: -(-length // page))
        if group.window is None:
            return _Demand(group.name, group, group.page_bytes, (whole,))
        # A request that gets one token per step holds `steps` tokens beyond its last commit. However a chunk
        # is distributed, all requests together get at most `more` tokens beyond that. In the worst case,
        # `enough` of them cost a request its first additional page, and every `page` tokens another one. A
        # request that gets several tokens in a step takes all of them from the chunk.
        steps = steps_held(running.in_flight)
        more = steps * (running.chunk - 1)
        enough = page - (steps - 2) % page
        num_first = min(more // enough, steps * running.chunk // min(enough + 1, page))
        bounds = [whole, _Bound.of(weights, lambda length: group.peak_pages(length, steps), num_first)]
        if more >= enough:
            lag = steps + enough
            bounds.append(
                _Bound.of(weights, lambda length: group.peak_pages(length, lag), (more - enough) // page)
            )
        return _Demand(group.name, group, group.page_bytes, tuple(bounds))

    @property
    def grows(self) -> bool:
        """Whether more requests cost more: not so for checkpoints that are not kept or have no bytes."""
        return self.unit_bytes > 0 and all(bound.mean > 0 for bound in self.bounds)

    def units_for(self, requests: Fraction) -> int:
        """Return the units for `requests` average requests, and for at least one of the longest."""
        return min(bound.units_for(requests) for bound in self.bounds)

    def bytes_for(self, requests: Fraction) -> int:
        """Return the bytes of those units and of one more for padding."""
        return (self.units_for(requests) + 1) * self.unit_bytes

    def largest(self, fits: Callable[[Fraction], bool], memory_bytes: int) -> Fraction:
        """Return the most requests that fit and need a whole number of this pool's units."""

        def requests_for(units: int) -> Fraction:
            return max(bound.requests_for(units) for bound in self.bounds)

        low, high = 0, memory_bytes // self.unit_bytes + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(requests_for(middle)) else (low, middle)
        return requests_for(low)


def _demands(groups: Groups, weights: Mapping[int, Fraction], running: Running) -> list[_Demand]:
    if not groups:
        raise ConfigError("the layout stores nothing, so any number of requests fits")
    demands: list[_Demand] = []
    for group in groups:
        if isinstance(group, StateGroup):
            demands += _Demand.of_states(group, weights, running)
        else:
            demands.append(_Demand.of_pages(group, weights, running))
    return demands


def _read_mix(mix: Any) -> dict[int, Fraction]:
    """Return lengths with weights that add up to 1. Errors: ConfigError."""
    pairs: list[tuple[Any, Any]]
    length = as_integer(mix)
    if length is not None:
        pairs = [(length, 1)]
    elif isinstance(mix, Mapping):
        pairs = list(mix.items())
    elif isinstance(mix, Iterable) and not isinstance(mix, (str, bytes, Set)):
        pairs = [(length, 1) for length in mix]
    else:  # also a set: it does not know how often a length occurs
        raise ConfigError(
            f"mix: give a length, a list of lengths or a dict with weights, not {type(mix).__name__}"
        )
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
