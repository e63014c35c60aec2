"""An upper bound of the hit tokens, which knows the future.

In: paths and a number of checkpoints. Out: tokens that no placement and no order of eviction can exceed.

A request that resumes at a length needs a checkpoint there. It must exist since the last earlier request
that computed this length, because only such a request can have saved it. So every hit keeps one checkpoint
from that request until its own. Of all lengths that the same request computed last, the deepest is worth
most, and the others are dropped. What is left is a choice of intervals: at most one per request, at most as
many at any time as there are checkpoints, with the greatest sum of lengths. All intervals of a request end at
it, so this is a flow through time, and the linear program has a solution in whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.checkpoints.paths import Paths

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Intervals:
    """What can be chosen: `value` tokens in round `end`, if a checkpoint is kept since round `begin`."""

    begin: Int64
    end: Int64
    request: Int64
    value: Int64
    num_rounds: int


def intervals_of(paths: Paths) -> Intervals:
    """Return what can be chosen. The requests of one round start together and find nothing of each other."""
    last = np.full(paths.num_nodes, -1, np.int64)
    found: list[tuple[int, int, int, int]] = []
    request = 0
    for now, together in enumerate(paths.rounds):
        for path in together:
            rounds = last[path.nodes[: path.last]]
            known = int(np.count_nonzero(rounds >= 0))  # all pages before a known one are known
            if known:
                ends = np.append(np.flatnonzero(rounds[1:known] != rounds[: known - 1]), known - 1)
                found += [(int(rounds[i]), now, request, (int(i) + 1) * paths.page_tokens) for i in ends]
            request += 1
        for path in together:
            last[path.nodes] = now
    return Intervals(*np.array(found, np.int64).reshape(-1, 4).T, num_rounds=len(paths.rounds))


def bound(intervals: Intervals, checkpoints: int) -> int:
    """Return the greatest sum of values."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    num, rounds = len(intervals.value), intervals.num_rounds
    if not num:
        return 0
    # kept[k] checkpoints between round k and the next: those kept before, less those that end at k, plus
    # those that begin at k. Variables: one per interval, then kept[0 … rounds - 1].
    each, ones, time = np.arange(num), np.ones(num), np.arange(rounds)
    rows = np.concatenate((intervals.begin, intervals.end, time, time[1:]))
    columns = np.concatenate((each, each, num + time, num + time[:-1]))
    weights = np.concatenate((ones, -ones, -np.ones(rounds), np.ones(rounds - 1)))
    flow = coo_array((weights, (rows, columns)), shape=(rounds, num + rounds)).tocsr()
    _, request = np.unique(intervals.request, return_inverse=True)
    once = coo_array((ones, (request, each)), shape=(request.max() + 1, num + rounds)).tocsr()
    limits = np.zeros((num + rounds, 2))
    limits[:num, 1], limits[num:, 1] = 1, checkpoints
    solved = linprog(
        np.concatenate((-intervals.value.astype(np.float64), np.zeros(rounds))),
        A_ub=once,
        b_ub=np.ones(once.shape[0]),
        A_eq=flow,
        b_eq=np.zeros(rounds),
        bounds=limits,
        method="highs",
    )
    if solved.status:
        raise RuntimeError(f"the bound was not found: {solved.message}")
    return round(-solved.fun)
