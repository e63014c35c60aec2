"""What a drawing shows of a tree. In: a tree and bounds; out: lines from top to bottom, and their texts.

Reads only `nodes()`, `counts()` and `page_tokens` of the tree. All drawings are based on this.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from pagoda.errors import ArgumentError
from pagoda.layout._numbers import counted
from pagoda.tree._labels import decode, name_label, page_label, rank_label, token_label
from pagoda.tree._values import NodeView, TreeCounts

__all__ = ["Drawable", "Line", "Reader", "Sight", "integer", "look", "reader"]

LIMIT = 2**31 - 1
NODE_PAGES = 16  # page ids requested per node
NODE_CHECKPOINTS = 3  # shown per node

Reader = Callable[[list[int]], object]  # tokens → their text


class Drawable(Protocol):
    """What a drawing needs of a tree."""

    @property
    def page_tokens(self) -> int: ...

    def counts(self) -> TreeCounts: ...

    def nodes(
        self, max_nodes: int = ..., max_tokens: int = ..., namespace: bytes | str | None = ...
    ) -> Sequence[NodeView]: ...


class Line(NamedTuple):
    """One line: a namespace, a node, or (without a view) the number of children that are not drawn."""

    view: NodeView | None
    missing: int
    level: int  # 0 for a namespace
    bars: str  # drawn before it


class Sight(NamedTuple):
    """The part of a tree that is drawn, and the texts of its lines."""

    page_tokens: int
    counts: TreeCounts  # of the whole tree
    is_whole_tree: bool  # not one namespace only
    views: list[NodeView]
    children: dict[int, list[NodeView]]  # by the parent's number
    ranks: dict[int, int]  # by number: 1 is the coldest leaf; empty unless all leaves are drawn
    num_nodes: int  # drawn, without roots
    left_out: int  # all other nodes of the tree; for one namespace, a lower bound
    max_tokens: int

    def lines(self, deepest: int) -> Iterator[Line]:
        """Yield the lines from top to bottom. Beyond level `deepest` the level is written instead of bars."""
        roots = [view for view in self.views if view.parent is None]
        # A stack, since trees of 100,000 levels exist: (what, level, bars before it, whether it is the last).
        stack: list[tuple[NodeView | int, int, str, bool]] = [(root, 0, "", True) for root in reversed(roots)]
        while stack:
            what, level, bars, is_last = stack.pop()
            if not level:
                drawn = below = ""
            elif level > deepest:
                drawn, below = f"{bars}⋮ level {level}: ", bars
            else:
                drawn, below = bars + ("└─ " if is_last else "├─ "), bars + ("   " if is_last else "│  ")
            if isinstance(what, int):
                yield Line(None, what, level, drawn)
                continue
            yield Line(what, 0, level, drawn)
            under: list[NodeView | int] = [*self.children.get(what.number, ())]
            if missing := _missing(what, self.children):
                under.append(missing)
            last = len(under) - 1
            stack.extend((under[at], level + 1, below, at == last) for at in range(last, -1, -1))

    def heading(self) -> list[str]:
        """Return the counts of the tree, in parts that stay on one line each."""
        counts, tokens = self.counts, self.counts.tokens
        things = [
            counted(counts.nodes, "node"),
            counted(counts.leaves, "leaf", "leaves"),
            counted(counts.leases, "lease"),
        ]
        if counts.states.total:
            things.append(counted(counts.states.total, "checkpoint"))
        return [
            f"{'' if self.is_whole_tree else 'of the whole tree: '}{counted(tokens.total, 'token')}: "
            f"{tokens.protected:,} protected, {tokens.evictable:,} evictable",
            ", ".join(things),
            f"pages of {self.page_tokens:,}",
        ]

    def footing(self) -> str:
        """Return what is not drawn, or "" if there is nothing to say."""
        if not (self.views or self.is_whole_tree):
            return "nothing in this namespace"
        if not (self.is_whole_tree and self.left_out):
            return ""
        return f"… {self.left_out:,} of {self.counts.nodes:,} nodes are not drawn"

    def title(self, line: Line, columns: int) -> str:
        """Return the text of a line that is not a node."""
        if line.view is None:
            return f"… {line.missing:,} more {'child' if line.missing == 1 else 'children'}"
        notes = ", dropped" if line.view.is_dropped else ""
        if line.view.leases:
            notes += f", held by {counted(line.view.leases, 'lease')}"
        return f"namespace {name_label(line.view.namespace, columns - 10 - len(notes))}{notes}"

    def label(self, view: NodeView, read: Reader | None, columns: int) -> str:
        """Return the tokens of a node, as text if a tokenizer can read them."""
        tokens = self.tokens(view)
        return token_label(tokens, decode(read, tokens), len(tokens) < view.end - view.begin, columns)

    def tokens(self, view: NodeView) -> list[int]:
        return [int(token) for token in view.tokens[: self.max_tokens]]

    def beside(self, view: NodeView) -> tuple[str, str, str]:
        """Return the cells beside the tokens of a node: its pages, number of tokens, notes."""
        num_tokens = view.end - view.begin
        notes = [counted(view.leases, "lease")] if view.leases else []
        if view.is_lost:
            notes.append("lost")
        if not view.num_children:
            notes.append("leaf")
        if view.number in self.ranks:
            notes.append(rank_label(self.ranks[view.number]))
        elif not view.leases and view.used >= 0:
            notes.append(f"used {view.used}")
        if not view.leases and view.used < 0:
            notes.append("demoted")
        if view.checkpoints:
            some = [f"{length}→{state}" for length, state in view.checkpoints[:NODE_CHECKPOINTS]]
            if len(view.checkpoints) > NODE_CHECKPOINTS:
                some.append(f"… {len(view.checkpoints) - NODE_CHECKPOINTS} more")
            notes.append(f"checkpoint{'s' * (len(view.checkpoints) > 1)} {' '.join(some)}")
        ids = [column.tolist() for column in view.columns]
        pages = page_label(ids, -(-num_tokens // self.page_tokens), 14 + 10 * len(ids))
        return pages, counted(num_tokens, "token"), ", ".join(notes)

    def mood(self, line: Line) -> str:
        """Return the key of a line's colour."""
        view = line.view
        if view is None:
            return "cut"
        if not line.level:
            return "name"
        if view.leases:
            return "leased"
        if self.ranks.get(view.number) == 1:
            return "coldest"
        return "inner" if view.num_children else "evictable"


def look(tree: Drawable, namespace: bytes | str | None, max_nodes: int, max_tokens: int) -> Sight:
    """Read the part of a tree to draw. Errors: ArgumentError."""
    for name in ("nodes", "counts", "page_tokens"):
        if not hasattr(tree, name):
            raise ArgumentError(f"tree: give a PrefixTree or TreeView; {type(tree).__name__} has no `{name}`")
    if namespace is not None and not isinstance(namespace, (bytes, str)):
        raise ArgumentError(f"namespace: give bytes or str, not {type(namespace).__name__}")
    max_nodes, max_tokens = integer("max_nodes", max_nodes, 1), integer("max_tokens", max_tokens, 0)
    size = tree.page_tokens
    # Whole pages, so that ids and tokens end together, and some pages even if no tokens are wanted.
    wanted = max(-(-max_tokens // size), NODE_PAGES) * size
    views = list(tree.nodes(max_nodes, min(wanted, LIMIT), namespace))
    counts = tree.counts()
    children: dict[int, list[NodeView]] = {}
    for view in views:
        if view.parent is not None:
            children.setdefault(view.parent, []).append(view)
    num_nodes = sum(len(group) for group in children.values())
    if namespace is None:
        left_out = max(0, counts.nodes - num_nodes)
    else:
        left_out = sum(_missing(view, children) for view in views)
    leaves = [it for it in views if it.parent is not None and not it.num_children and not it.leases]
    # The eviction order: demoted nodes first (`used` is negative, the latest lowest), then by last use, and
    # within one use the deeper node first.
    leaves.sort(key=lambda view: (view.used, -view.end))
    sees_all = namespace is None and not left_out
    ranks = {view.number: rank for rank, view in enumerate(leaves, start=1)} if sees_all else {}
    return Sight(size, counts, namespace is None, views, children, ranks, num_nodes, left_out, max_tokens)


def integer(what: str, value: object, least: int) -> int:
    """Read a bound. Errors: ArgumentError if it is not an integer, or below `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(f"{what}: give an integer, {least} or more")
    return min(number, LIMIT)


def reader(tokenizer: object) -> Reader | None:
    """Return the `decode` of a tokenizer, or the callable itself. Errors: ArgumentError."""
    if tokenizer is None:
        return None
    read = getattr(tokenizer, "decode", tokenizer)
    if not callable(read):
        kind = type(tokenizer).__name__
        raise ArgumentError(f"tokenizer: give an object with decode(list of ids), or a callable, not {kind}")
    return read


def _missing(view: NodeView, children: dict[int, list[NodeView]]) -> int:
    return max(0, view.num_children - len(children.get(view.number, ())))
