"""What the tree tells: counts, nodes to look at, events. Plain values, all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["NodeView", "Removed", "Reset", "Stored", "Tally", "TreeCounts"]


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
    is_lost: bool = False  # nobody can find it any more; leases keep it


class Stored(NamedTuple):
    """Pages that can be found from now on, or ids that such pages got."""

    namespace: bytes
    position: int  # tokens before the first page
    parent: int | None  # content key of the page before; None at position 0
    keys: npt.NDArray[np.uint64]  # [pages] content keys
    tokens: npt.NDArray[np.int32]  # [pages * page_tokens]
    extra_keys: tuple[tuple[int, int, bytes], ...]  # (begin, end, key) over these tokens
    columns: tuple[npt.NDArray[np.int32], ...]  # one array per column: [pages]; -1: not by this event
    states: tuple[tuple[int, int], ...]  # checkpoints: (length, state id)
    ids_only: bool  # the pages were there before: only these ids and states are new


class Removed(NamedTuple):
    """Pages that can no longer be found, or ids that such pages lost."""

    namespace: bytes
    position: int
    parent: int | None
    keys: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]
    extra_keys: tuple[tuple[int, int, bytes], ...]
    columns: tuple[npt.NDArray[np.int32], ...]
    states: tuple[tuple[int, int], ...]
    ids_only: bool  # the pages stay: only these ids went


@dataclass(frozen=True, slots=True)
class Reset:
    """The tree forgot everything it held."""
