"""The bound of bench/checkpoints against an exhaustive search, and above what any order reaches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bench.checkpoints.bound import Intervals, bound, intervals_of
from bench.checkpoints.model import Model
from bench.checkpoints.order import LeastRecentlyUsed, Rule
from bench.checkpoints.paths import Paths, paths_of
from bench.checkpoints.workloads import PAGE, Request, Workload

pytest.importorskip("scipy")


def requests_of(seed: int, num: int, most_pages: int) -> Workload:
    """Requests that continue or leave earlier ones after a random page."""
    rng = np.random.default_rng(seed)
    told = [np.zeros(0, np.int32)]
    for i in range(num):
        before = told[rng.integers(len(told))]
        at = rng.integers(len(before) + 1)
        own = np.arange(i * 1_000, i * 1_000 + rng.integers(1, most_pages * PAGE), dtype=np.int32)
        told.append(np.concatenate((before[:at], own)))
    requests = [Request(tokens, tokens[:0]) for tokens in told[1:]]
    return Workload("random", lambda: iter(requests))


def best_schedule(paths: Paths, num_checkpoints: int) -> int:
    """Try everything: after each request, any of the checkpoints held before and of those it could save.

    It can save at each page after its hit, which is the deepest checkpoint held on its path."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for (path,) in paths.rounds:
        nodes = path.nodes.tolist()
        after: dict[frozenset[int], int] = {}
        for held, total in reached.items():
            hit = max((i + 1 for i, node in enumerate(nodes[: path.last]) if node in held), default=0)
            for kept in _subsets(sorted(held | set(nodes[hit:])), num_checkpoints):
                after[kept] = max(after.get(kept, 0), total + hit * PAGE)
        reached = after
    return max(reached.values())


def _subsets(nodes: list[int], most: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for node in nodes:
        found += [kept | {node} for kept in found if len(kept) < most]
    return found


@pytest.mark.parametrize("num_checkpoints", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_exceeds_the_bound(seed: int, num_checkpoints: int) -> None:
    paths = paths_of(requests_of(seed, 5, 3))
    assert best_schedule(paths, num_checkpoints) <= bound(intervals_of(paths), num_checkpoints)


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_best_choice_of_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, rounds, most = 9, 6, int(rng.integers(1, 4))
    begin = rng.integers(0, rounds - 1, num)
    end = np.array([rng.integers(b + 1, rounds) for b in begin])
    value = rng.integers(1, 100, num)
    best = 0
    for chosen in range(1 << num):
        picked = [i for i in range(num) if chosen >> i & 1]
        crossing = [sum(begin[i] <= k < end[i] for i in picked) for k in range(rounds)]
        if len({int(end[i]) for i in picked}) == len(picked) and max(crossing) <= most:
            best = max(best, int(value[picked].sum()))
    assert bound(Intervals(begin, end, end, value, rounds), most) == best


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_alone_is_worth_its_resume_points(seed: int) -> None:
    lengths = np.sort(np.random.default_rng(seed).integers(1, 1_000, 8))
    tokens = np.arange(1_000, dtype=np.int32)
    requests = [Request(tokens[:length], tokens[:0]) for length in lengths]
    paths = paths_of(Workload("chain", lambda: iter(requests)))
    # One checkpoint, at the last page of the request before, as far as a token is left to compute.
    expected = sum(min(a // PAGE, (b - 1) // PAGE) * PAGE for a, b in pairwise(lengths))
    assert bound(intervals_of(paths), 1) == expected


@pytest.mark.parametrize("order", [Rule, LeastRecentlyUsed])
@pytest.mark.parametrize("num_checkpoints", [1, 4, 16])
def test_orders_stay_below_the_bound(order: type, num_checkpoints: int) -> None:
    paths = paths_of(requests_of(0, 200, 20))
    hits = sum(outcome.hit for outcome in Model(paths, num_checkpoints, order(num_checkpoints)).run())
    assert 0 < hits <= bound(intervals_of(paths), num_checkpoints)
