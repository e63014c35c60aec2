"""Who is told what the twin stores and removes. In: events; out: calls, after the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pagoda.errors import ArgumentError
from pagoda.tree._values import Removed, Stored
from twin.arguments import as_array, token_of
from twin.nodes import Node, Page

__all__ = ["Bulletin", "Listener"]

Listener = Callable[[Stored | Removed], object]


class _Delivery:
    """Calls a listener when it goes: what goes wrong then is what Python calls unraisable."""

    def __init__(self, listener: Listener, event: Stored | Removed) -> None:
        self.listener, self.event = listener, event

    def __del__(self) -> None:
        self.listener(self.event)


class Bulletin:
    """Events that wait for the end of a call, and those who listen."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.listeners: list[Listener] = []
        self.waiting: list[Stored | Removed] = []
        self.is_busy = False

    def add(self, listener: Listener) -> None:
        """One more who listens."""
        if not callable(listener):
            raise ArgumentError("listener: give something that can be called")
        self.listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """One less."""
        if listener not in self.listeners:
            raise ArgumentError("listener: this one does not listen")
        self.listeners.remove(listener)

    def tell(
        self,
        kind: type[Stored] | type[Removed],
        node: Node,
        begin: int,
        pages: Sequence[Page],
        columns: Iterable[Sequence[int]],
        states: Iterable[tuple[int, int]] = (),
    ) -> None:
        """An event about pages at an index of a node."""
        if not self.listeners:
            return
        parent = None
        if begin > 0:
            parent = node.pages[begin - 1].ids[0]
        elif node.parent is not None and node.parent.pages:
            parent = node.parent.pages[-1].ids[0]
        position = node.begin + begin * self.page_tokens
        tokens = as_array([token_of(element) for page in pages for element in page.elements])
        ids = tuple(as_array(column) for column in columns)
        self.waiting.append(kind(node.namespace, position, parent, tokens, ids, tuple(states)))

    def tell_run(
        self,
        kind: type[Stored] | type[Removed],
        node: Node,
        begin: int,
        states: Iterable[tuple[int, int]],
    ) -> None:
        """An event about a node's pages from an index on."""
        pages = node.pages[begin:]
        self.tell(kind, node, begin, pages, zip(*(page.ids for page in pages), strict=True), states)

    def tell_all(self, kind: type[Stored] | type[Removed], namespace: bytes, pages: Sequence[Page]) -> None:
        """An event about pages from the beginning of a sequence, whatever runs they lie in."""
        root = Node(0, None, namespace, 0, 0)
        self.tell(kind, root, 0, pages, zip(*(page.ids for page in pages), strict=True))

    def deliver(self) -> None:
        """Tells everyone, in order; what a listener's own calls make comes behind."""
        if self.is_busy:
            return
        self.is_busy = True
        try:
            while self.waiting:
                event = self.waiting.pop(0)
                for listener in list(self.listeners):
                    _Delivery(listener, event)
        finally:
            self.is_busy = False
