"""Requests as paths in the tree of all pages that were ever computed.

In: a workload. Out: for each request the numbers of its pages, where equal prefixes have equal pages. Pages are
never evicted here, so these paths do not depend on the checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.checkpoints.workloads import Workload

Nodes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Path:
    """The whole pages of a prompt and its answer, and how many of them a request may resume behind."""

    nodes: Nodes
    prompt_tokens: int
    limit: int  # pages: the last resume point of the prompt, which leaves at least one token to compute
    found: int  # pages of the prompt, up to `limit`, that an earlier request has computed
    more: bool  # whether an earlier request went on behind `found`, that is, went another way


@dataclass(frozen=True)
class Paths:
    page_tokens: int
    running: int
    chunk: int
    num_nodes: int
    requests: list[Path]


def paths_of(workload: Workload) -> Paths:
    page = workload.page_tokens
    known: dict[tuple[int, bytes], int] = {}
    requests = []
    inner: set[int] = {-1}  # pages that have others behind them
    for request in workload.requests():
        tokens = np.concatenate((request.prompt, request.answer))
        limit = (len(request.prompt) - 1) // page
        nodes = np.empty(len(tokens) // page, np.int32)
        data, width = tokens.tobytes(), page * tokens.itemsize
        node, found = -1, 0
        for i in range(len(nodes)):
            key = (node, data[i * width : (i + 1) * width])
            before = len(known)
            node = known.setdefault(key, before)
            found += node < before and i < limit
            nodes[i] = node
        more = bool(found) and int(nodes[found - 1]) in inner
        inner.update(nodes[:-1].tolist())
        requests.append(Path(nodes, len(request.prompt), limit, found, more))
    return Paths(page, workload.running, workload.chunk, len(known), requests)
