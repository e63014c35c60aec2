"""The twin's nodes and their order. In: pages; out: runs that split, are protected and evicted.

Pages are objects, and an object's identity is its birth: a page that is stored again, or gets other ids, is
another object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twin.arguments import HOLE, Element

__all__ = ["Forest", "Node", "Page"]


class Page:
    """One stored page."""

    __slots__ = ("elements", "ids")

    def __init__(self, elements: tuple[Element, ...], ids: list[int]) -> None:
        self.elements, self.ids = elements, ids  # ids: one per column


class Node:
    """A run of pages; the root of a namespace has none and no parent."""

    def __init__(self, number: int, parent: Node | None, namespace: bytes, begin: int, used: int) -> None:
        self.number, self.parent, self.namespace = number, parent, namespace
        self.begin, self.used = begin, used
        self.pages: list[Page] = []
        self.children: list[Node] = []  # newest first
        self.by_first: dict[tuple[Element, ...], Node] = {}
        self.checkpoints: dict[int, int] = {}  # length → state id, begin < length <= end
        self.leases = 0
        self.family = object()  # of its run: both halves of a split have the same
        self.trimmed = False  # it lost its tail and never grows again
        self.is_dropped = False  # of a root

    def path(self) -> list[Node]:
        """From this node up to the root, both included."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return [*nodes, node]

    def tree(self) -> list[Node]:
        """This node and all below it, a node before its children, the newest child first."""
        nodes = [self]
        for child in self.children:
            nodes += child.tree()
        return nodes

    def pages_to_end(self) -> list[Page]:
        """All pages from the beginning of the sequence to the end of this node."""
        return [page for node in reversed(self.path()) for page in node.pages]

    def checkpoints_to_end(self) -> dict[int, int]:
        """All checkpoints up to the end of this node."""
        return {length: state for node in self.path() for length, state in node.checkpoints.items()}

    def detach(self, first: Page) -> None:
        """Remove this node, whose first page is given, from its parent."""
        assert self.parent is not None
        self.parent.children.remove(self)
        del self.parent.by_first[first.elements]


class Forest:
    """The trees of all namespaces, and the order in which their unprotected nodes are evicted."""

    def __init__(self, page_tokens: int, windows: tuple[int | None, ...], has_states: bool) -> None:
        self.page_tokens, self.windows, self.has_states = page_tokens, windows, has_states
        self.clock = self.cold = self.last_number = 0
        self.clear()

    def clear(self) -> None:
        """Forget all nodes."""
        self.roots: dict[bytes, Node] = {}
        self.dropped: list[Node] = []  # roots that leases keep
        self.order: list[Node] = []  # unprotected nodes, coldest first

    def tick(self) -> int:
        """The time of a call that uses something."""
        self.clock += 1
        return self.clock

    def number(self) -> int:
        """Return a number that no node had before."""
        self.last_number += 1
        return self.last_number

    def end(self, node: Node) -> int:
        """Tokens up to the end of a node."""
        return node.begin + len(node.pages) * self.page_tokens

    def all_nodes(self) -> list[Node]:
        """Roots included."""
        return [node for root in (*self.roots.values(), *self.dropped) for node in root.tree()]

    def root(self, namespace: bytes, now: int) -> Node:
        """Return the root of a namespace, and make it if it does not exist."""
        if namespace not in self.roots:
            self.roots[namespace] = Node(self.number(), None, namespace, 0, now)
        return self.roots[namespace]

    def tidy(self, root: Node) -> None:
        """Remove a root without children and leases."""
        if root.children or root.leases:
            return
        if root.is_dropped:
            self.dropped.remove(root)
        else:
            del self.roots[root.namespace]

    def descend(self, node: Node, pages: Sequence[tuple[Element, ...]]) -> list[tuple[Node, int]]:
        """The nodes below this one that begin like `pages`, and how many pages of each agree."""
        path: list[tuple[Node, int]] = []
        at = 0
        while at < len(pages) and pages[at] in node.by_first:
            node, n = node.by_first[pages[at]], 0
            while n < len(node.pages) and at + n < len(pages) and node.pages[n].elements == pages[at + n]:
                n += 1
            path.append((node, n))
            at += n
            if n < len(node.pages):
                break
        return path

    def is_usable(self, pages: Sequence[Page], checkpoints: dict[int, int]) -> bool:
        """Whether every group can resume after these pages, which begin the sequence."""
        length = len(pages) * self.page_tokens
        for column, window in enumerate(self.windows):
            # Tokens [first, length) are read again; there may be none.
            first = 0 if window is None else max(0, length - window + 1)
            if window is None or first == length:
                continue
            if any(page.ids[column] == HOLE for page in pages[first // self.page_tokens :]):
                return False
        return not self.has_states or length in checkpoints

    def usable(self, pages: Sequence[Page], checkpoints: dict[int, int]) -> int:
        """The longest usable part of these pages, in tokens."""
        n = len(pages)
        while n > 0 and not self.is_usable(pages[:n], checkpoints):
            n -= 1
        return n * self.page_tokens

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after this many of its pages; return the upper half, which is new."""
        parent = node.parent
        assert parent is not None
        assert 0 < num_pages < len(node.pages)
        upper = Node(self.number(), parent, node.namespace, node.begin, node.used)
        upper.leases, upper.trimmed, upper.family = node.leases, True, node.family
        upper.pages, node.pages = node.pages[:num_pages], node.pages[num_pages:]
        node.begin = self.end(upper)
        for length in [length for length in node.checkpoints if length <= node.begin]:
            upper.checkpoints[length] = node.checkpoints.pop(length)
        parent.children[parent.children.index(node)] = upper
        parent.by_first[upper.pages[0].elements] = upper
        upper.children = [node]
        upper.by_first = {node.pages[0].elements: node}
        node.parent = upper
        if node in self.order:
            self.order.insert(self.order.index(node) + 1, upper)
        return upper

    def rejoin(self, node: Node) -> None:
        """Join halves of a run again, from a node upwards, if nothing distinguishes them any more."""
        while node.parent is not None and node.leases == 0:
            upper = node.parent
            if upper.parent is None or upper.leases > 0 or upper.used != node.used:
                return
            if len(upper.children) == 1 and upper.family is node.family:
                self.join(upper, node)
            else:
                node = upper

    def join(self, upper: Node, node: Node) -> None:
        """Let the lower half become the whole."""
        parent = upper.parent
        assert parent is not None
        node.pages, node.begin, node.parent = upper.pages + node.pages, upper.begin, parent
        node.checkpoints |= upper.checkpoints
        parent.children[parent.children.index(upper)] = node
        parent.by_first[node.pages[0].elements] = node
        self.order.remove(upper)

    def split_at(self, node: Node, length: int) -> Node:
        """Return the node on the path up from this one that ends at a length, cut there if necessary."""
        while node.parent is not None and node.begin >= length:
            node = node.parent
        if node.parent is not None and length < self.end(node):
            return self.split(node, (length - node.begin) // self.page_tokens)
        return node

    def grow_or_add(self, last: Node, leases: int, now: int) -> Node:
        """Return the node that takes pages after the end of one: itself, if nothing else uses it."""
        if last.parent is not None and not last.children and not last.trimmed and last.leases == leases:
            return last
        node = Node(self.number(), last, last.namespace, self.end(last), now)
        last.children.insert(0, node)
        self.order.append(node)
        return node

    def pages_before(self, node: Node, num_pages: int) -> int:
        """Return how much of a node is left when its first pages lose their last stretch."""
        if not self.has_states:
            return num_pages - 1
        counts = [(length - node.begin) // self.page_tokens for length in node.checkpoints]
        return max((n for n in counts if n < num_pages), default=0)

    def touch(self, nodes: Iterable[Node], now: int) -> None:
        """Make the unprotected ones of these nodes, deepest first, the most recently used."""
        for node in nodes:
            if node.leases == 0 and node.parent is not None:
                node.used = now
                if node in self.order:
                    self.order.remove(node)
                self.order.append(node)

    def protect(self, nodes: Iterable[Node], now: int) -> None:
        """Add a lease."""
        for node in nodes:
            node.leases += 1
            if node.leases == 1 and node.parent is not None:
                node.used = now
                self.order.remove(node)

    def unprotect(self, nodes: Iterable[Node], now: int) -> None:
        """Remove a lease, deepest node first."""
        for node in nodes:
            node.leases -= 1
            self.touch([node], now)

    def chill(self, tail: Sequence[Node]) -> None:
        """Make a tail, deepest node first, the coldest."""
        for node in reversed(tail):
            node.used = self.cold
            self.order.remove(node)
            self.order.insert(0, node)

    def bury(self, path: Iterable[Node]) -> None:
        """Make nodes that cannot be found any more, deepest first, as cold as their children."""
        for node in path:
            if node.leases > 0 or node.parent is None:
                return
            self.order.remove(node)
            hottest = max((self.order.index(child) for child in node.children), default=-1)
            node.used = self.order[hottest].used if node.children else self.cold
            self.order.insert(hottest + 1, node)

    def own_tail(self, node: Node) -> list[Node]:
        """Return, from a node upwards, what one lease alone protects and nothing else continues."""
        tail: list[Node] = []
        for it in node.path()[:-1]:
            if it.leases > 1 or it.children != tail[-1:]:
                break
            tail.append(it)
        return tail
