"""Requests as paths in the tree of all pages that were ever computed.

In: a workload. Out: for each request the numbers of its pages, where equal prefixes have equal pages, and
what a page match finds. Pages are never evicted here, so that none of this depends on checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from bench.checkpoints.workloads import Request, Workload

Nodes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Path:
    """A request. Lengths are in pages, except those in tokens."""

    nodes: Nodes  # [pages] the whole pages of the prompt and its answer
    prompt_tokens: int
    total_tokens: int  # of the prompt and its answer
    last: int  # the last resume point of the prompt, which leaves at least one token to compute
    found: int  # the page match: how many pages, up to `last`, earlier requests have computed
    goes_on: bool  # whether an earlier request computed a page after `found`


@dataclass(frozen=True)
class Paths:
    """All requests of a workload. Those of a round run at the same time."""

    page_tokens: int
    chunk: int
    num_nodes: int
    rounds: list[list[Path]]


def rounds_of(requests: Iterable[Request], running: int) -> Iterator[list[Request]]:
    iterator = iter(requests)
    while together := list(islice(iterator, running)):
        yield together


def paths_of(workload: Workload) -> Paths:
    page = workload.page_tokens
    known: dict[tuple[int, bytes], int] = {}
    inner: set[int] = set()  # pages with others after them
    rounds = []
    for together in rounds_of(workload.requests(), workload.running):
        before = len(known)
        paths = []
        for request in together:
            tokens = np.concatenate((request.prompt, request.answer))
            nodes = np.empty(len(tokens) // page, np.int32)
            data, width, node = tokens.tobytes(), page * tokens.itemsize, -1
            for i in range(len(nodes)):
                node = known.setdefault((node, data[i * width : (i + 1) * width]), len(known))
                nodes[i] = node
            last = (len(request.prompt) - 1) // page
            found = int(np.count_nonzero(nodes[:last] < before))
            goes_on = found > 0 and int(nodes[found - 1]) in inner
            paths.append(Path(nodes, len(request.prompt), len(tokens), last, found, goes_on))
        for path in paths:
            inner.update(path.nodes[:-1].tolist())
        rounds.append(paths)
    return Paths(page, workload.chunk, len(known), rounds)
