"""Plain values that a tree returns: counts, nodes for display, events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["NodeView", "Removed", "Reset", "Stored", "Tally", "TreeCounts"]


class Tally(NamedTuple):
    """A total, and how much of it is evictable and protected."""

    total: int
    evictable: int
    protected: int


class TreeCounts(NamedTuple):
    """What a tree holds."""

    tokens: Tally
    columns: tuple[Tally, ...]  # one per column, in pages; holes are not counted
    states: Tally  # checkpoints
    nodes: int  # runs; the roots of namespaces are not counted
    leaves: int
    leases: int


class NodeView(NamedTuple):
    """One node at the time of the call. The root of a namespace has no parent and no tokens."""

    number: int  # never reused
    parent: int | None  # the parent's number
    namespace: bytes
    is_dropped: bool  # its namespace was dropped; only leases keep it
    level: int  # 0 for the root of a namespace
    begin: int  # tokens before it
    end: int
    tokens: npt.NDArray[np.int32]  # the first few
    columns: tuple[npt.NDArray[np.int32], ...]  # the page ids of these tokens, one array per column
    num_children: int
    leases: int  # that protect it
    used: int  # its last use, as a call counter; negative if demoted
    checkpoints: tuple[tuple[int, int], ...]  # (length, state id)
    is_lost: bool = False  # it cannot be found any more; only leases keep it


class Stored(NamedTuple):
    """Pages that can be found from now on, or new ids of such pages."""

    namespace: bytes
    position: int  # tokens before the first page
    parent: int | None  # content key of the page before; None at position 0
    keys: npt.NDArray[np.uint64]  # [pages] content keys
    tokens: npt.NDArray[np.int32]  # [pages * page_tokens]
    extra_keys: tuple[tuple[int, int, bytes], ...]  # (begin, end, key) over these tokens
    columns: tuple[npt.NDArray[np.int32], ...]  # [pages] per column; -1 if not part of this event
    states: tuple[tuple[int, int], ...]  # checkpoints: (length, state id)
    ids_only: bool  # the pages were cached before; only these ids and states are new


class Removed(NamedTuple):
    """Pages that can no longer be found, or ids that pages lost. Fields as in `Stored`."""

    namespace: bytes
    position: int
    parent: int | None
    keys: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]
    extra_keys: tuple[tuple[int, int, bytes], ...]
    columns: tuple[npt.NDArray[np.int32], ...]
    states: tuple[tuple[int, int], ...]
    ids_only: bool  # the pages stay; only these ids and states were removed


@dataclass(frozen=True, slots=True)
class Reset:
    """The tree was reset."""
