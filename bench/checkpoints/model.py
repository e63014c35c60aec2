"""A plain model of the manager's checkpoints: where states are saved, and where requests resume.

In: paths, a number of checkpoints and an order. Out: for each request its hit, its cuts and its saves. It
plans what the real manager plans, call by call, so that both can be compared. Pages are never evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.checkpoints.order import TAILS, Kind, Order
from bench.checkpoints.paths import Nodes, Path, Paths

INTERVAL = 1_024
NEAR_TOKENS = 1_024  # the match may end this much beyond a checkpoint for its reuse to count
NEAR_PAGES = 64  # and this much for the request to make it a branch point


def cuts_of(hit: int, last: int, interval: int, branch: int, tail: Kind) -> dict[int, Kind]:
    """Return where a prefill that resumes at `hit` is saved: ascending lengths, and the kind of each.

    These are the multiples of `interval`, `last`, its last resume point, and `branch`, where it parts from
    others, or ends and others go on. All lengths are in one unit. An interval of 0 means no interval points;
    a branch of 0, that it goes on where all others end.
    """
    kinds = dict.fromkeys(range(interval, last, interval), Kind.INTERVAL) if interval else {}
    kinds[last] = tail
    kinds[branch] = Kind.BRANCH
    return {length: kinds[length] for length in sorted(kinds) if length > hit}


@dataclass
class Outcome:
    """What became of one request, in tokens."""

    hit: int
    cuts: tuple[int, ...] = ()
    saves: list[tuple[int, int]] = field(default_factory=list)  # (length, id), in order


def stops(at: int, cuts: tuple[int, ...], prompt: int, total: int, chunk: int, page: int) -> Iterator[int]:
    """Yield the lengths at which a request's steps end: chunks and cuts, then whole pages of the answer."""
    ahead = [*cuts, prompt]
    while at < prompt:
        while ahead[0] <= at:
            ahead.pop(0)
        at = min(at + chunk, ahead[0])
        yield at
    while at < total:
        at = min(at - at % page + page, total)
        yield at


@dataclass
class _Row:
    path: Path
    kinds: dict[int, Kind]
    tail: Kind
    outcome: Outcome
    lengths: Iterator[int]
    taken: tuple[int, int, Kind] | None = None  # length in pages, id, kind: to be kept when it is committed
    rolling: tuple[int, int] | None = None  # length in pages, id: kept when the request ends
    replaced: int = 0  # id of the rolling save before it


class Model:
    def __init__(self, paths: Paths, num_checkpoints: int, order: Order) -> None:
        self.paths = paths
        self.order = order
        self._free = list(range(1, num_checkpoints + 1))  # a heap: the lowest goes first
        self._id_of: dict[int, int] = {}  # node → checkpoint after it
        self._place_of: dict[int, tuple[Nodes, int]] = {}  # checkpoint → its path, and its length in pages
        self._has = np.zeros(paths.num_nodes, bool)  # whether a node has a checkpoint

    def run(self) -> list[Outcome]:
        outcomes = []
        for together in self.paths.rounds:
            rows = [self._admit(path) for path in together]
            outcomes += [row.outcome for row in rows]
            while rows:
                running = [(row, length) for row in rows if (length := next(row.lengths, 0))]
                for row in rows:
                    if all(row is not other for other, _ in running):
                        self._release(row)
                for row, length in running:
                    self._plan(row, length)
                for row, _ in running:
                    self._commit(row)
                rows = [row for row, _ in running]
        return outcomes

    def _last(self, nodes: Nodes) -> int:
        """Return the length of the deepest checkpoint on a path."""
        at = np.flatnonzero(self._has[nodes])
        return int(at[-1]) + 1 if len(at) else 0

    def _before(self, id: int) -> int:
        """Return the length of the checkpoint before this one."""
        nodes, length = self._place_of[id]
        near = max(0, length - 1 - NEAR_PAGES)  # usually there is one: interval points are no further apart
        return near + found if (found := self._last(nodes[near : length - 1])) else self._last(nodes[:near])

    def _gap(self, id: int) -> int:
        return (self._place_of[id][1] - self._before(id)) * self.paths.page_tokens

    def _admit(self, path: Path) -> _Row:
        page = self.paths.page_tokens
        hit = self._last(path.nodes[: path.last])
        parts = path.goes_on and path.found < path.last
        if hit:
            id, further = self._id_of[int(path.nodes[hit - 1])], path.found - hit
            self.order.resume(
                id, self._gap(id), further * page <= NEAR_TOKENS, parts and further <= NEAR_PAGES
            )
        tail = Kind.CONTINUED if path.found and not path.goes_on else Kind.FRESH
        interval = max(1, INTERVAL // page) if self.order.saves_intervals else 0
        kinds = cuts_of(hit, path.last, interval, path.found if path.goes_on else 0, tail)
        cuts = tuple(length * page for length in kinds)
        outcome = Outcome(hit * page, cuts)
        lengths = stops(hit * page, cuts, path.prompt_tokens, path.total_tokens, self.paths.chunk, page)
        return _Row(path, kinds, tail, outcome, lengths)

    def _plan(self, row: _Row, length: int) -> None:
        pages, offset = divmod(length, self.paths.page_tokens)
        is_rolling = length > row.path.prompt_tokens
        if offset or not (is_rolling or pages in row.kinds):
            return
        kind = row.tail if is_rolling else row.kinds[pages]
        own = row.rolling[1] if is_rolling and row.rolling else 0
        if is_rolling and not own:
            self._supersede(row.path.nodes[: pages - 1])
        if self._free:
            id = heapq.heappop(self._free)
            row.replaced = own
        else:
            id = own or self._evict(kind)
        if not id:
            return
        row.outcome.saves.append((length, id))
        if is_rolling:
            row.rolling = (pages, id)
        else:
            row.taken = (pages, id, kind)

    def _evict(self, kind: Kind) -> int:
        id = self.order.give_up(kind != Kind.INTERVAL, self._gap)
        if id:
            nodes, length = self._place_of.pop(id)
            del self._id_of[int(nodes[length - 1])]
            self._has[nodes[length - 1]] = False
        return id

    def _commit(self, row: _Row) -> None:
        if row.taken:
            self._keep(row, *row.taken)
            row.taken = None
        if row.replaced:
            heapq.heappush(self._free, row.replaced)
            row.replaced = 0

    def _release(self, row: _Row) -> None:
        if row.rolling:
            self._keep(row, *row.rolling, row.tail)

    def _keep(self, row: _Row, length: int, id: int, kind: Kind) -> None:
        nodes = row.path.nodes
        node = int(nodes[length - 1])
        if node in self._id_of:
            heapq.heappush(self._free, id)
            return
        self._id_of[node], self._place_of[id], self._has[node] = id, (nodes, length), True
        self.order.add(id, kind, self._gap(id))
        if kind in TAILS:
            self._supersede(nodes[: length - 1])

    def _supersede(self, nodes: Nodes) -> None:
        """Supersede the tail that one at the end of this path continues, with no first class between them."""
        while length := self._last(nodes):
            id = self._id_of[int(nodes[length - 1])]
            is_tail = self.order.is_tail(id)
            if is_tail:
                self.order.supersede(id, self._gap(id))
            if is_tail is not None:
                break
            nodes = nodes[: length - 1]
