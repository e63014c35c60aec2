"""Finds prefixes that are already computed. In: tokens; out: the ids of the pages that hold them.

`PrefixTree` is native. docs/tree.md describes each call. Invariants 10 to 12, 14 and 15.
"""

from pagoda._native import Freed, Inserted, Lease, Match, PrefixTree
from pagoda.tree._picture import draw_json, draw_rich, draw_text
from pagoda.tree._values import NodeView, Removed, Reset, Stored, Tally, TreeCounts

__all__ = [
    "Freed",
    "Inserted",
    "Lease",
    "Match",
    "NodeView",
    "PrefixTree",
    "Removed",
    "Reset",
    "Stored",
    "Tally",
    "TreeCounts",
    "draw_json",
    "draw_rich",
    "draw_text",
]
