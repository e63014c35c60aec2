"""What the tree tells: counts, nodes to look at, events. Plain values, all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["NodeView", "Removed", "Stored", "Tally", "TreeCounts"]


class Tally(NamedTuple):
    """How much there is of something, and how it divides."""

    total: int
    evictable: int
    protected: int


class TreeCounts(NamedTuple):
    """What a tree holds."""

    tokens: Tally
    columns: tuple[Tally, ...]  # one a paged group, in pages; holes are not counted
    states: Tally  # checkpoints
    nodes: int  # runs; the roots of namespaces are not counted
    leaves: int
    leases: int


class NodeView(NamedTuple):
    """One node as it was when it was asked for; the root of a namespace has no parent and no tokens."""

    number: int  # of its own, never used again
    parent: int | None  # the parent's number
    namespace: bytes
    is_dropped: bool  # its namespace was dropped; leases keep it
    level: int  # 0: the root of a namespace
    begin: int  # tokens before it
    end: int
    tokens: npt.NDArray[np.int32]  # the first few
    columns: tuple[npt.NDArray[np.int32], ...]  # the page ids of these, one array a column
    num_children: int
    leases: int  # that protect it
    used: int  # its last use, as a call counter; negative: demoted
    checkpoints: tuple[tuple[int, int], ...]  # (length, state id)


class Stored(NamedTuple):
    """Pages that a tree now owns."""

    namespace: bytes
    position: int  # tokens before the first page
    parent: int | None  # page id of column 0 before it
    tokens: npt.NDArray[np.int32]  # [pages * page_tokens]
    columns: tuple[npt.NDArray[np.int32], ...]  # one array a column: [pages]; -1: not by this event
    states: tuple[tuple[int, int], ...]  # checkpoints: (length, state id)


class Removed(NamedTuple):
    """Pages that a tree no longer owns."""

    namespace: bytes
    position: int
    parent: int | None
    tokens: npt.NDArray[np.int32]
    columns: tuple[npt.NDArray[np.int32], ...]
    states: tuple[tuple[int, int], ...]
