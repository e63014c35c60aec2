"""How pages leave the twin. In: what to free; out: ids, run after run, each run's in order of position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.tree._values import Removed
from twin.arguments import HOLE, as_array
from twin.events import Bulletin
from twin.nodes import Forest, Node, Page
from twin.values import Freed

__all__ = ["Harvest", "drop", "evict"]


class Harvest:
    """Ids that are being freed."""

    def __init__(self, num_columns: int) -> None:
        self.columns: list[list[int]] = [[] for _ in range(num_columns)]
        self.states: list[int] = []

    def take(self, pages: Sequence[Page], states: Sequence[int]) -> None:
        """Add pages in order, without holes, and states."""
        for page in pages:
            for column, id in enumerate(page.ids):
                if id != HOLE:
                    self.columns[column].append(id)
        self.states += states

    def with_end_of(self, node: Node, keep: int, end: int) -> Harvest:
        """Return what it would be with everything of a node after its first pages, which end at `end`."""
        more = Harvest(len(self.columns))
        more.columns, more.states = [list(ids) for ids in self.columns], list(self.states)
        more.take(node.pages[keep:], [state for length, state in node.checkpoints.items() if length > end])
        return more

    def freed(self) -> Freed:
        """The same as arrays."""
        return Freed(tuple(as_array(ids) for ids in self.columns), as_array(self.states))


def cut(forest: Forest, bulletin: Bulletin, node: Node, keep: int, harvest: Harvest) -> None:
    """Free a node's pages after the first few; remove a node that has none left."""
    end = node.begin + keep * forest.page_tokens
    states = sorted(it for it in node.checkpoints.items() if it[0] > end)
    bulletin.tell_run(Removed, node, keep, states)
    harvest.take(node.pages[keep:], [state for _, state in states])
    first = node.pages[0]
    del node.pages[keep:]
    node.checkpoints = {length: state for length, state in node.checkpoints.items() if length <= end}
    node.trimmed = True
    if keep == 0:
        node.detach(first)
        forest.order.remove(node)


def evict(forest: Forest, bulletin: Bulletin, is_enough: Callable[[Harvest], bool]) -> Freed:
    """Trim the coldest leaves until enough is freed; the caller has checked that there is enough."""
    harvest = Harvest(len(forest.windows))
    while not is_enough(harvest):
        node = next(node for node in forest.order if not node.children)
        keep, going = len(node.pages), harvest
        while keep > 0 and not is_enough(going):
            keep = forest.pages_before(node, keep)
            going = harvest.with_end_of(node, keep, node.begin + keep * forest.page_tokens)
        cut(forest, bulletin, node, keep, harvest)
        while not node.pages:
            assert node.parent is not None
            node = node.parent
            if node.parent is None:
                forest.tidy(node)
                break
            is_loose = forest.has_states and not node.children and forest.end(node) not in node.checkpoints
            if not is_loose:
                break
            cut(forest, bulletin, node, forest.pages_before(node, len(node.pages)), harvest)
    return harvest.freed()


def drop(forest: Forest, bulletin: Bulletin, namespace: bytes) -> Freed:
    """Remove a namespace from the forest; what leases protect is kept separately."""
    harvest = Harvest(len(forest.windows))
    root = forest.roots.pop(namespace, None)
    if root is not None:
        nodes = root.tree()[1:]
        for node in nodes:  # protected ones cannot be found either
            bulletin.tell_run(Removed, node, 0, sorted(node.checkpoints.items()))
        root.is_dropped = True
        forest.dropped.append(root)
        for node in [node for node in nodes if node.leases == 0]:
            states = sorted(node.checkpoints.items())
            harvest.take(node.pages, [state for _, state in states])
            node.detach(node.pages[0])
            forest.order.remove(node)
        forest.tidy(root)
    return harvest.freed()
