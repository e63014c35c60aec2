"""A radix tree to look at: its nodes as they were when they were asked for, and their picture.

In: a `PrefixTree`; out: `RadixTreeNode`, which nobody can change, and text::

    Radix tree: 3 nodes, 8 tokens
    [R] #0 tokens=[] slots=[] ref=0
    └── #2 tokens=[1, 3, 6, 7] slots=[1, 2, 3, 4] ref=0
        ├── [L] #1 tokens=[9, 77] slots=[5, 6] ref=0
        └── [L] #3 tokens=[87, 66] slots=[7, 8] ref=0
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
ROOT = 0  # the root's number, empty or not; those of the tree's nodes begin at 1
PLAIN = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-"})  # for streams without box drawing


class RadixTreeNode:
    """One node of a radix tree as it was; nothing of it can be changed, and nothing changes it."""

    __slots__ = ("_children", "_parent", "_slots", "_view")

    def __init__(self, view: NodeView, slots: npt.NDArray[np.int32], parent: RadixTreeNode | None) -> None:
        self._view, self._slots, self._parent = view, slots, parent
        self._children: tuple[RadixTreeNode, ...] = ()
        for array in (view.tokens, slots):
            array.flags.writeable = False

    @property
    def uuid(self) -> int:
        """A number of its own, never used again; the root's is 0 for ever. O(1)."""
        return ROOT if self._parent is None else self._view.number

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The tokens of its run, [length] int32, host. O(1)."""
        return self._view.tokens

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """The slots of these tokens, [length] int32, host. O(1)."""
        return self._slots

    @property
    def ref_count(self) -> int:
        """How many locks protect it. O(1)."""
        return self._view.leases

    @property
    def timestamp(self) -> int:
        """Its last use, as a call counter. O(1)."""
        return self._view.used

    @property
    def length(self) -> int:
        """How many tokens it holds. O(1)."""
        return self._view.end - self._view.begin

    @property
    def parent(self) -> RadixTreeNode | None:
        """The node above; None for the root. O(1)."""
        return self._parent

    @property
    def children(self) -> tuple[RadixTreeNode, ...]:
        """The nodes below, in order of their tokens. O(1)."""
        return self._children

    def is_root(self) -> bool:
        """Whether nothing stands above. O(1)."""
        return self._parent is None

    def is_leaf(self) -> bool:
        """Whether nothing stands below. O(1)."""
        return not self._children

    def __repr__(self) -> str:
        return f"RadixTreeNode({_line(self, True, True)})"


def radix_root(tree: PrefixTree) -> RadixTreeNode:
    """The root of a tree whose page ids are page + 1, and all nodes below it. O(tokens)."""
    views = tree.nodes(max_nodes=NO_BOUND, max_tokens=NO_BOUND)
    if not views:
        nothing = np.zeros(0, dtype=np.int32)
        views = [NodeView(ROOT, None, b"", False, 0, 0, 0, nothing, (nothing,), 0, 0, 0, ())]
    nodes: dict[int, RadixTreeNode] = {}
    children: dict[int, list[RadixTreeNode]] = {}
    for view in views:
        slots = slots_of_pages(view.columns[0] - np.int32(1), tree.page_tokens)
        parent = None if view.parent is None else nodes[view.parent]
        node = nodes[view.number] = RadixTreeNode(view, slots, parent)
        if view.parent is not None:
            children.setdefault(view.parent, []).append(node)
    for at, below in children.items():
        nodes[at]._children = tuple(below)
    return nodes[views[0].number]


def format_radix_tree(
    root: RadixTreeNode, max_depth: int = 10, show_ref_count: bool = True, show_timestamp: bool = False
) -> str:
    """A heading, then one node a line: uuid, tokens, slots, ref, ts; [R] is the root, [L] a leaf.

    `root` may be any node: what stands below it is drawn, `max_depth` levels of it. Tokens and slots are
    cut at 30 characters, and levels that are left out are said. Cost: O(nodes). Errors: ArgumentError.
    """
    if not isinstance(root, RadixTreeNode):
        raise ArgumentError(f"root: give a node of a tree, as root_node, not {type(root).__name__}")
    deepest = number(max_depth, "max_depth")
    lines: list[str] = []
    num_nodes = num_tokens = 0
    # (node, its level, the bars before it, is it the last child); a stack, since trees may be deep.
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
    """Print what `format_radix_tree` gives; arguments, cost and errors are its own.

    Where the stream has no box drawing, ASCII stands for it.
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
    text = str(ids[:MAX_TEXT].tolist())  # each takes a character or more: the rest is never seen
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(MORE)] + MORE
