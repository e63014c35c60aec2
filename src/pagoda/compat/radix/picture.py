"""A read-only copy of a radix tree, and its picture.

In: a `PrefixTree`; out: immutable `RadixTreeNode`, and text.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from pagoda.compat.tokens import slots_of_pages
from pagoda.errors import ArgumentError
from pagoda.pools._arguments import number
from pagoda.tree import NodeView, PrefixTree

__all__ = ["RadixTreeNode", "format_radix_tree", "print_radix_tree", "radix_root"]

MAX_TEXT = 30  # characters of a node's tokens, and of its slots
MORE = "..."
NO_BOUND = 2**31 - 1
ROOT = 0  # the root's number; those of other nodes begin at 1
PLAIN = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-"})  # for streams without box drawing


class RadixTreeNode:
    """One node of a radix tree at the time of the copy; immutable."""

    __slots__ = ("_children", "_parent", "_slots", "_tree", "_view")

    def __init__(
        self,
        tree: PrefixTree,
        view: NodeView,
        slots: npt.NDArray[np.int32],
        parent: RadixTreeNode | None,
    ) -> None:
        self._tree, self._view, self._slots, self._parent = tree, view, slots, parent
        self._children: tuple[RadixTreeNode, ...] = ()
        for array in (view.tokens, slots):
            array.flags.writeable = False

    @property
    def uuid(self) -> int:
        """The node's unique number, which is never reused; the root's is always 0."""
        return ROOT if self._parent is None else self._view.number

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The node's tokens, [length] int32, host."""
        return self._view.tokens

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """The slots of these tokens, [length] int32, host."""
        return self._slots

    @property
    def ref_count(self) -> int:
        """How many locks protect it."""
        return self._view.leases

    @property
    def timestamp(self) -> int:
        """Its last use, as a counter of calls."""
        return self._view.used

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self._view.end - self._view.begin

    @property
    def parent(self) -> RadixTreeNode | None:
        """The parent; None for the root."""
        return self._parent

    @property
    def children(self) -> tuple[RadixTreeNode, ...]:
        """The children, in order of their tokens."""
        return self._children

    def is_of(self, tree: PrefixTree) -> bool:
        """Whether it is a node of this tree."""
        return self._tree is tree

    def path(self) -> list[RadixTreeNode]:
        """Return the nodes from the root down to this one, both included."""
        nodes = [self]
        while nodes[-1]._parent is not None:
            nodes.append(nodes[-1]._parent)
        return nodes[::-1]

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """Return the pages of its slots, [length / page_size] int32, host."""
        return self._view.columns[0] - np.int32(1)

    def is_root(self) -> bool:
        """Whether it has no parent."""
        return self._parent is None

    def is_leaf(self) -> bool:
        """Whether it has no children."""
        return not self._children

    def __repr__(self) -> str:
        return f"RadixTreeNode({_line(self, True, True)})"


def radix_root(tree: PrefixTree) -> RadixTreeNode:
    """Copy a tree whose page ids are page + 1 and return the root. Cost: O(tokens)."""
    views = tree.nodes(max_nodes=NO_BOUND, max_tokens=NO_BOUND)
    if not views:
        nothing = np.zeros(0, dtype=np.int32)
        views = [NodeView(ROOT, None, b"", False, 0, 0, 0, nothing, (nothing,), 0, 0, 0, ())]
    nodes: dict[int, RadixTreeNode] = {}
    children: dict[int, list[RadixTreeNode]] = {}
    for view in views:
        slots = slots_of_pages(view.columns[0] - np.int32(1), tree.page_tokens)
        parent = None if view.parent is None else nodes[view.parent]
        node = nodes[view.number] = RadixTreeNode(tree, view, slots, parent)
        if view.parent is not None:
            children.setdefault(view.parent, []).append(node)
    for at, below in children.items():
        nodes[at]._children = tuple(below)
    return nodes[views[0].number]


def format_radix_tree(
    root: RadixTreeNode, max_depth: int = 10, show_ref_count: bool = True, show_timestamp: bool = False
) -> str:
    """Return a heading, then one line per node: uuid, tokens, slots, ref, ts; [R] is the root, [L] a leaf.

    `root` may be any node; up to `max_depth` levels below it are drawn, and omitted levels are mentioned.
    Tokens and slots are cut at 30 characters. Errors: ArgumentError.
    """
    if not isinstance(root, RadixTreeNode):
        raise ArgumentError(f"root: give a node of a tree, such as root_node, not {type(root).__name__}")
    deepest = number(max_depth, "max_depth")
    lines: list[str] = []
    num_nodes = num_tokens = 0
    # (node, level, bars before it, whether it is the last child); a stack, since trees may be deep.
    stack = [(root, 0, "", True)]
    while stack:
        node, level, bars, is_last = stack.pop()
        num_nodes += not node.is_root()
        num_tokens += node.length
        if level <= deepest:
            elbow = "" if level == 0 else "└── " if is_last else "├── "
            lines.append(bars + elbow + _line(node, show_ref_count, show_timestamp))
            bars += "" if level == 0 else "    " if is_last else "│   "
            if level == deepest and node.children:
                lines.append(f"{bars}└── {MORE}")
        below = node.children
        stack += [(child, level + 1, bars, child is below[-1]) for child in reversed(below)]
    heading = (
        f"Radix tree: {num_nodes} node{'s' * (num_nodes != 1)}, {num_tokens} token{'s' * (num_tokens != 1)}"
    )
    return "\n".join([heading, *lines])


def print_radix_tree(
    root: RadixTreeNode, max_depth: int = 10, show_ref_count: bool = True, show_timestamp: bool = False
) -> None:
    """Print what `format_radix_tree` returns; arguments and errors are the same.

    >>> manager = RadixCacheManager("cpu")
    >>> manager.insert_prefix([1, 3, 6, 7, 9, 77], [1, 2, 3, 4, 5, 6])
    0
    >>> manager.insert_prefix([1, 3, 6, 7, 87, 66], [1, 2, 3, 4, 7, 8])
    4
    >>> print_radix_tree(manager.root_node)
    Radix tree: 3 nodes, 8 tokens
    [R] #0 tokens=[] slots=[] ref=0
    └── #3 tokens=[1, 3, 6, 7] slots=[1, 2, 3, 4] ref=0
        ├── [L] #2 tokens=[9, 77] slots=[5, 6] ref=0
        └── [L] #4 tokens=[87, 66] slots=[7, 8] ref=0

    Streams that cannot encode box-drawing characters get ASCII instead.
    """
    text = format_radix_tree(root, max_depth, show_ref_count, show_timestamp)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(PLAIN)
    print(text)


def _line(node: RadixTreeNode, show_ref_count: bool, show_timestamp: bool) -> str:
    parts = [f"#{node.uuid}", f"tokens={_cut(node.tokens)}", f"slots={_cut(node.slots)}"]
    if node.is_root():
        parts.insert(0, "[R]")
    elif node.is_leaf():
        parts.insert(0, "[L]")
    if show_ref_count:
        parts.append(f"ref={node.ref_count}")
    if show_timestamp:
        parts.append(f"ts={node.timestamp}")
    return " ".join(parts)


def _cut(ids: npt.NDArray[np.int32]) -> str:
    text = str(ids[:MAX_TEXT].tolist())  # each takes at least one character, so the rest is cut anyway
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(MORE)] + MORE
