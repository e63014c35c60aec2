"""What the twin returns. Plain values, except for the lease, which its tree keeps up to date."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twin.arguments import Ints
from twin.nodes import Node, Page

if TYPE_CHECKING:
    from twin import PrefixTwin

__all__ = ["Freed", "Inserted", "Lease", "Match"]


@dataclass(frozen=True)
class Match:
    """What was found. Protects nothing."""

    length: int
    found: int
    columns: tuple[Ints, ...]
    state_id: int | None
    _tree: PrefixTwin = field(repr=False)
    _namespace: bytes = field(repr=False)
    _pages: tuple[Page, ...] = field(repr=False)  # the same objects as in the tree

    @property
    def page_ids(self) -> Ints:
        """Those of column 0."""
        return self.columns[0]


class Lease:
    """A held reference to a prefix."""

    def __init__(self, tree: PrefixTwin, number: int, epoch: int, node: Node, length: int) -> None:
        self._tree, self._epoch, self._node = tree, epoch, node
        self._held, self._demoted = True, False
        self.number, self.length = number, length

    @property
    def is_held(self) -> bool:
        """Whether it is not released yet."""
        return self._held and self._epoch == self._tree._epoch

    @property
    def state_id(self) -> int | None:
        """State id of the checkpoint where it ends."""
        return self._node.checkpoints.get(self.length) if self.is_held else None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_held:
            self._tree.release(self)


@dataclass(frozen=True)
class Inserted:
    """What an insert did; the tree now owns the page ids between present and stored and those filled."""

    present: int
    stored: int
    length: int
    filled: tuple[Ints, ...]
    states: Ints


@dataclass(frozen=True)
class Freed:
    """Ids that a tree no longer owns."""

    columns: tuple[Ints, ...]
    state_ids: Ints

    @property
    def page_ids(self) -> Ints:
        """Those of column 0."""
        return self.columns[0]
