"""From requests to deltas. In: tokens of requests; out: rows, hits, and what one step computes and changes,
as plain arrays.

Plans memory without touching a tensor and without torch. docs/manager.md describes each call. Invariants 5
and 17.
"""

from pagoda._native import Admitted, Pending
from pagoda.manager._delta import Delta, WorkList
from pagoda.manager._manager import Manager
from pagoda.manager._tree import TreeView
from pagoda.manager._values import CheckpointStats, GroupStats, Stats

__all__ = [
    "Admitted",
    "CheckpointStats",
    "Delta",
    "GroupStats",
    "Manager",
    "Pending",
    "Stats",
    "TreeView",
    "WorkList",
]
