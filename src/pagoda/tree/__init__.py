"""What is already computed. In: tokens; out: the ids of the pages that hold them.

`PrefixTree` is native; `twin` is the same in plain Python, the oracle of its tests. docs/tree.md says
exactly what each call does. Invariants 10 to 12, 14 and 15.
"""

from pagoda._native import Freed, Inserted, Lease, Match, PrefixTree
from pagoda.tree.picture import draw_json, draw_rich, draw_text
from pagoda.tree.values import Counts, NodeView, Removed, Reset, Stored, Tally

__all__ = [
    "Counts",
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
    "draw_json",
    "draw_rich",
    "draw_text",
]
