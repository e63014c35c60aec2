"""Events of what the twin stores and removes. In: events; out: calls of listeners, after the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pagoda.errors import ArgumentError
from pagoda.tree._values import Removed, Reset, Stored
from twin.arguments import as_array, token_of
from twin.keys import page_keys, ranges_of
from twin.nodes import Node, Page

__all__ = ["Bulletin", "Event", "Listener"]

Event: TypeAlias = Stored | Removed | Reset
Listener = Callable[[Event], object]


@dataclass(eq=False)
class Subscription:
    """One listener; the same callable may listen twice."""

    listener: Listener


class _Delivery:
    """Calls a listener from a finalizer, so that Python reports its exceptions as unraisable."""

    def __init__(self, listener: Listener, event: Event) -> None:
        self.listener, self.event = listener, event

    def __del__(self) -> None:
        self.listener(self.event)


class Bulletin:
    """Events that wait for the end of a call, and the listeners."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.listeners: list[Subscription] = []
        self.waiting: list[tuple[Event, list[Subscription]]] = []  # with the listeners to call
        self.is_busy = False

    def add(self, listener: Listener, nodes: Iterable[Node]) -> None:
        """Add a listener; it first gets what these nodes hold, and none of the waiting events."""
        if not callable(listener):
            raise ArgumentError("listener: give a callable that takes an event")
        everyone, self.listeners = self.listeners, [Subscription(listener)]
        for node in nodes:
            self.tell_run(Stored, node, 0, sorted(node.checkpoints.items()))
        self.listeners = [*everyone, *self.listeners]
        self.deliver()

    def remove(self, listener: Listener) -> None:
        """Remove a listener."""
        for it in self.listeners:
            if it.listener == listener:
                self.listeners.remove(it)
                return
        raise ArgumentError("listener: it is not listening")

    def tell(
        self,
        kind: type[Stored] | type[Removed],
        node: Node,
        begin: int,
        pages: Sequence[Page],
        columns: Iterable[Sequence[int]],
        states: Iterable[tuple[int, int]] = (),
        *,
        ids_only: bool,
    ) -> None:
        """Record an event about pages at an index of a node, unless they cannot be found."""
        if not self.listeners or node.path()[-1].is_dropped:
            return
        before = [] if node.parent is None else node.parent.pages_to_end()
        before += node.pages[:begin]
        keys = page_keys(node.namespace, [page.elements for page in [*before, *pages]])
        elements = [element for page in pages for element in page.elements]
        position = len(before) * self.page_tokens
        event = kind(
            node.namespace,
            position,
            keys[len(before) - 1] if before else None,
            np.array(keys[len(before) :], dtype=np.uint64),
            as_array([token_of(element) for element in elements]),
            ranges_of(elements, position),
            tuple(as_array(column) for column in columns),
            tuple(states),
            ids_only,
        )
        self.waiting.append((event, self.listeners[:]))

    def tell_run(
        self,
        kind: type[Stored] | type[Removed],
        node: Node,
        begin: int,
        states: Iterable[tuple[int, int]],
    ) -> None:
        """Record an event about a node's pages from an index on."""
        pages = node.pages[begin:]
        columns = zip(*(page.ids for page in pages), strict=True)
        self.tell(kind, node, begin, pages, columns, states, ids_only=False)

    def tell_all(self, kind: type[Stored] | type[Removed], namespace: bytes, pages: Sequence[Page]) -> None:
        """Record an event about ids of pages from the beginning of a sequence, whatever runs they are in."""
        root = Node(0, None, namespace, 0, 0)
        self.tell(kind, root, 0, pages, zip(*(page.ids for page in pages), strict=True), ids_only=True)

    def tell_reset(self) -> None:
        """Record a reset."""
        if self.listeners:
            self.waiting.append((Reset(), self.listeners[:]))

    def deliver(self) -> None:
        """Call all listeners, in order; events of their own calls come last."""
        if self.is_busy:
            return
        self.is_busy = True
        try:
            while self.waiting:
                event, audience = self.waiting.pop(0)
                for it in [it for it in audience if it in self.listeners]:
                    _Delivery(it.listener, event)
        finally:
            self.is_busy = False
