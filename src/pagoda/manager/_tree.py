"""A manager's tree, to look at."""

from __future__ import annotations

from collections.abc import Callable

from pagoda._native import ManagerCore
from pagoda.tree._values import NodeView, Removed, Reset, Stored, TreeCounts

__all__ = ["TreeView"]


class TreeView:
    """The prefix tree of a manager, read-only: what is cached, and who is told when that changes.

    Pictures (`draw_text`, `draw_rich`, `draw_json`) take it as they take a PrefixTree. A page of this tree
    ends where pages of all groups end, and has one column of page ids for each page of a group in it.
    """

    __slots__ = ("_manager",)

    def __init__(self, manager: ManagerCore) -> None:
        self._manager = manager

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the tree: the manager's `resume_step`."""
        return self._manager.resume_step

    def counts(self) -> TreeCounts:
        """As `PrefixTree.counts`."""
        return self._manager._tree_counts()

    def namespaces(self) -> list[bytes]:
        """As `PrefixTree.namespaces`."""
        return self._manager.namespaces()

    def nodes(
        self, max_nodes: int = 1000, max_tokens: int = 32, namespace: bytes | str | None = None
    ) -> list[NodeView]:
        """As `PrefixTree.nodes`. Errors: ArgumentError."""
        return self._manager._tree_nodes(max_nodes, max_tokens, namespace)

    def listen(self, listener: Callable[[Stored | Removed | Reset], object]) -> None:
        """As `PrefixTree.listen`. Errors: ArgumentError."""
        self._manager._tree_listen(listener)

    def unlisten(self, listener: Callable[[Stored | Removed | Reset], object]) -> None:
        """As `PrefixTree.unlisten`. Errors: ArgumentError."""
        self._manager._tree_unlisten(listener)

    def __repr__(self) -> str:
        counts = self.counts()
        return f"TreeView({counts.tokens.total} tokens in {counts.nodes} nodes, {counts.leases} leases)"
