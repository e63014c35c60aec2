"""The native tree against its twin: the same random calls to both, everything that comes back compared."""

from dataclasses import replace
from typing import Any

import pytest

from differential.tree_driver import drive
from pagoda.tree import PrefixTree
from twin import Lease, Match, PrefixTwin
from twin.nodes import Forest, Node

# page size, windows, states, tokens a sequence at most, calls
CONFIGURATIONS = [
    pytest.param(1, (None,), False, 10, 100_000, id="full"),
    pytest.param(1, (None,), False, 200, 20_000, id="full, runs of many chunks"),
    pytest.param(2, (None,), False, 16, 60_000, id="pages of 2"),
    pytest.param(16, (None,), False, 100, 20_000, id="pages of 16"),
    pytest.param(64, (None,), False, 300, 15_000, id="pages of 64"),
    pytest.param(80, (None,), False, 300, 10_000, id="pages longer than a chunk"),
    pytest.param(1, (3,), False, 10, 40_000, id="window"),
    pytest.param(2, (None, 5), False, 16, 40_000, id="full and window"),
    pytest.param(4, (6, None, 1), False, 30, 25_000, id="three columns"),
    pytest.param(1, (None,), True, 10, 50_000, id="states"),
    pytest.param(1, (None, 130), True, 200, 10_000, id="states, runs of many chunks"),
    pytest.param(2, (None, 4), True, 16, 40_000, id="window and states"),
    pytest.param(16, (20, None), True, 100, 20_000, id="window and states, pages of 16"),
]


@pytest.mark.parametrize(("page_tokens", "windows", "states", "longest", "calls"), CONFIGURATIONS)
def test_native_and_twin_agree_on_everything(
    page_tokens: int, windows: Any, states: bool, longest: int, calls: int
) -> None:
    met: dict[str, int] = {}
    for seed in range(10):
        driver = drive((PrefixTree, PrefixTwin), page_tokens, windows, states, longest, calls // 10, seed)
        for name, n in driver.count.items():
            met[name] = met.get(name, 0) + n
    # Every call was made, and most of them were right.
    wanted = ["match", "match_many", "lock", "release", "demote", "insert", "page_ids", "evict", "replace"]
    wanted += ["drop", "nodes", "reset", "insert refused", "evict refused", "release refused"]
    wanted += ["punch"] * any(windows) + ["evict_states"] * states
    assert all(met.get(name, 0) > 0 for name in wanted), met
    assert met["insert"] > 5 * met["insert refused"]


# The driver has to notice what it is there for: twins with one thing wrong each.


class ParentsFirst(Forest):
    def touch(self, nodes: Any, now: int) -> None:
        super().touch(reversed(list(nodes)), now)


class WarmTails(Forest):
    def chill(self, tail: Any) -> None:
        pass


class LongTails(Forest):
    def own_tail(self, node: Node) -> list[Node]:
        return [it for it in node.path()[:-1] if it.leases == 1]


class NewHalves(Forest):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.used = self.clock
        return upper


class Regrowing(Forest):
    def grow_or_add(self, last: Node, leases: int, now: int) -> Node:
        last.trimmed = False
        return super().grow_or_add(last, leases, now)


class OldestFirst(Forest):
    def grow_or_add(self, last: Node, leases: int, now: int) -> Node:
        node = super().grow_or_add(last, leases, now)
        if node is not last:
            last.children.append(last.children.pop(0))
        return node


class ShortWindows(Forest):
    def is_usable(self, pages: Any, checkpoints: dict[int, int]) -> bool:
        whole, self.windows = self.windows, tuple(it and max(1, it - 2) for it in self.windows)
        is_so = super().is_usable(pages, checkpoints)
        self.windows = whole
        return is_so


class Forgiving(PrefixTwin):
    """Locks what looks like the pages of a match."""

    def lock(self, match: Match) -> Lease:
        forest, elements = self._forest, [page.elements for page in match._pages]
        root = forest.roots.get(match._namespace)
        path = [] if root is None else forest.descend(root, elements)
        pages = tuple(page for node, n in path for page in node.pages[:n])
        return super().lock(replace(match, _pages=pages) if len(pages) == len(elements) else match)


class Rough(Forest):
    def pages_before(self, node: Node, num_pages: int) -> int:
        return num_pages - 1 if num_pages % 4 == 3 else super().pages_before(node, num_pages)


class Quiet(PrefixTwin):
    """Tells nothing of checkpoints among pages that are there."""

    def _add_checkpoints(self, path: Any, wanted: Any) -> list[tuple[int, int]]:
        num_waiting = len(self._bulletin.waiting)
        taken = super()._add_checkpoints(path, wanted)
        del self._bulletin.waiting[num_waiting:]
        return taken


class Lazy(PrefixTwin):
    """Fills holes of the first run only."""

    def _fill(self, path: Any, columns: Any, base: int) -> Any:
        return super()._fill(path[:1], columns, base)


@pytest.mark.parametrize(
    ("broken", "states"),
    [
        (ParentsFirst, False),
        (WarmTails, False),
        (LongTails, False),
        (NewHalves, False),
        (Regrowing, False),
        (OldestFirst, False),
        (ShortWindows, False),
        (Forgiving, False),
        (Rough, True),
        (Quiet, True),
        (Lazy, False),
    ],
)
def test_the_driver_notices(broken: Any, states: bool) -> None:
    def build(*given: Any, **named: Any) -> Any:
        if issubclass(broken, PrefixTwin):
            return broken(*given, **named)
        twin = PrefixTwin(*given, **named)
        twin._forest.__class__ = broken
        return twin

    def try_all() -> None:
        for seed in range(8):
            drive((PrefixTwin, build), 2, (None, 5), states, 16, 1000, seed)

    with pytest.raises(AssertionError):
        try_all()
