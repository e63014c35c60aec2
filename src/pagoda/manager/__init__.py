"""From requests to deltas. In: tokens of requests; out: rows, hits, and what one step changes, as plain
arrays.

Plans and never touches a tensor; knows no torch. docs/manager.md says exactly what each call does.
"""

from pagoda._native import Admitted, Pending
from pagoda.manager._delta import Delta
from pagoda.manager._manager import Manager
from pagoda.manager._values import GroupStats, Stats

__all__ = ["Admitted", "Delta", "GroupStats", "Manager", "Pending", "Stats"]
