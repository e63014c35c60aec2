"""A read-only view of a manager's tree."""

from __future__ import annotations

from collections.abc import Callable

from pagoda._native import ManagerCore
from pagoda.tree._values import NodeView, Removed, Reset, Stored, TreeCounts

__all__ = ["TreeView"]


class TreeView:
    """A read-only view of a manager's prefix tree: what is cached, and events when that changes.

    `draw_text`, `draw_rich` and `draw_json` accept it like a PrefixTree. A page of this tree ends where pages
    of all groups end, and has one column of page ids for each page of a group that it covers.
    """

    __slots__ = ("_manager",)

    def __init__(self, manager: ManagerCore) -> None:
        self._manager = manager

    @property
    def page_tokens(self) -> int:
        """Tokens per page of the tree: the manager's `resume_step`."""
        return self._manager.resume_step

    def counts(self) -> TreeCounts:
        """Like `PrefixTree.counts`."""
        return self._manager._tree_counts()

    def namespaces(self) -> list[bytes]:
        """Like `PrefixTree.namespaces`."""
        return self._manager.namespaces()

    def nodes(
        self, max_nodes: int = 1000, max_tokens: int = 32, namespace: bytes | str | None = None
    ) -> list[NodeView]:
        """Like `PrefixTree.nodes`."""
        return self._manager._tree_nodes(max_nodes, max_tokens, namespace)

    def listen(self, listener: Callable[[Stored | Removed | Reset], object]) -> None:
        """Like `PrefixTree.listen`."""
        self._manager._tree_listen(listener)

    def unlisten(self, listener: Callable[[Stored | Removed | Reset], object]) -> None:
        """Like `PrefixTree.unlisten`."""
        self._manager._tree_unlisten(listener)

    def __repr__(self) -> str:
        counts = self.counts()
        return f"TreeView({counts.tokens.total} tokens in {counts.nodes} nodes, {counts.leases} leases)"
