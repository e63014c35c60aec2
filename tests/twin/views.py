"""Views of the twin. In: its nodes; out: counts, node views, and the check of its invariants."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pagoda.errors import InvariantError
from pagoda.tree._values import NodeView, Tally, TreeCounts
from twin.arguments import HOLE, as_array, token_of
from twin.nodes import Forest, Node
from twin.values import Lease

__all__ = ["check", "count", "view"]


def count(forest: Forest, num_leases: int) -> TreeCounts:
    """Return what is cached, and how it divides."""
    nodes = [node for node in forest.all_nodes() if node.parent is not None]

    def tally(of: Callable[[Node], int]) -> Tally:
        evictable = sum(of(node) for node in nodes if node.leases == 0)
        protected = sum(of(node) for node in nodes if node.leases > 0)
        return Tally(evictable + protected, evictable, protected)

    def pages(column: int) -> Callable[[Node], int]:
        return lambda node: sum(page.ids[column] != HOLE for page in node.pages)

    return TreeCounts(
        tally(lambda node: len(node.pages) * forest.page_tokens),
        tuple(tally(pages(column)) for column in range(len(forest.windows))),
        tally(lambda node: len(node.checkpoints)),
        len(nodes),
        sum(not node.children for node in nodes),
        num_leases,
    )


def view(forest: Forest, max_tokens: int, namespace: bytes | None) -> list[NodeView]:
    """Return all nodes of a namespace, or of all namespaces: live ones by name, then dropped ones."""
    roots = sorted(forest.roots.values(), key=lambda root: root.namespace)
    roots += sorted(forest.dropped, key=lambda root: root.number)
    views: list[NodeView] = []
    for root in roots:
        if namespace is None or root.namespace == namespace:
            _view(forest, root, root, 0, max_tokens, views)
    return views


def _view(forest: Forest, node: Node, root: Node, level: int, max_tokens: int, views: list[NodeView]) -> None:
    tokens = [token_of(element) for page in node.pages for element in page.elements][:max_tokens]
    shown = node.pages[: -(-len(tokens) // forest.page_tokens)]
    views.append(
        NodeView(
            node.number,
            None if node.parent is None else node.parent.number,
            node.namespace,
            root.is_dropped,
            level,
            node.begin,
            forest.end(node),
            as_array(tokens),
            tuple(as_array([page.ids[column] for page in shown]) for column in range(len(forest.windows))),
            len(node.children),
            node.leases,
            0 if node is root else node.used,
            tuple(sorted(node.checkpoints.items())),
            root.is_dropped,
        )
    )

    def by_tokens(child: Node) -> list[tuple[int, bytes, int]]:
        return [it if isinstance(it, tuple) else (it, b"", -1) for it in child.pages[0].elements]

    for child in sorted(node.children, key=by_tokens):
        _view(forest, child, root, level + 1, max_tokens, views)


def check(forest: Forest, leases: Collection[Lease]) -> None:
    """Recompute what is kept twice. Errors: InvariantError for the first difference."""

    def must(number: int, is_so: bool, message: str) -> None:
        if not is_so:
            raise InvariantError(number, message)

    nodes = forest.all_nodes()
    held = dict.fromkeys(nodes, 0)
    for lease in leases:
        must(12, forest.end(lease._node) == lease.length, f"lease {lease.number} does not end with a run")
        for node in lease._node.path():
            must(12, node in held, f"lease {lease.number} holds a node that is gone")
            held[node] += 1
    place = {node: index for index, node in enumerate(forest.order)}
    must(12, len(place) == len(forest.order), "a node is in the order twice")
    must(12, place.keys() <= held.keys(), "a node in the order is gone")
    for node in nodes:
        what, parent = f"node {node.number}", node.parent
        first_pages = {child.pages[0].elements: child for child in node.children if child.pages}
        must(12, node.leases == held[node], f"{what}: {node.leases} leases, {held[node]} found")
        must(10, first_pages == node.by_first, f"{what}: children are not found by their first pages")
        must(15, all(node.begin < at <= forest.end(node) for at in node.checkpoints), f"{what}: checkpoints")
        if parent is None:
            must(10, bool(node.children or node.leases), f"{what}: an empty root")
            must(10, not node.pages and node.begin == 0 and node not in place, f"{what}: a root with pages")
            continue
        must(10, bool(node.pages), f"{what}: no pages")
        must(10, node in parent.children, f"{what}: not its parent's")
        must(10, node.begin == forest.end(parent), f"{what}: begins elsewhere than its parent ends")
        must(10, node.namespace == parent.namespace, f"{what}: another namespace than its parent's")
        must(12, (node in place) == (node.leases == 0), f"{what}: protected, or not in the order")
        if parent in place:
            must(12, place[node] < place[parent], f"{what}: hotter than its parent")
        for column, window in enumerate(forest.windows):
            is_full = window is not None or all(page.ids[column] != HOLE for page in node.pages)
            must(15, is_full, f"{what}: a hole in column {column}")
        if forest.has_states and not node.children:
            must(15, forest.end(node) in node.checkpoints, f"{what}: a leaf that ends without a checkpoint")
