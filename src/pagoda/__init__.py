"""Pagoda: the KV-cache memory of an LLM inference engine, as a library.

The rooms, each importing only those before it: `errors`, `ids` (which ids are free), `tables` (which
pages a row uses), `tree` (what is already computed), `kernels` (moving keys and values), `pools` (the
tensors), `compat` (the names of public designs), `cli`. docs/layers.md has the map.
"""

from importlib.metadata import version as _version

from pagoda import compat, errors
from pagoda.compat import *  # noqa: F403
from pagoda.errors import *  # noqa: F403
from pagoda.ids import FreeList
from pagoda.pools import DeviceTable, Staging, StatePart, StatePool, TokenPool
from pagoda.tables import Growth, PageTable, TableWrites
from pagoda.tree import (
    Counts,
    Freed,
    Inserted,
    Lease,
    Match,
    NodeView,
    PrefixTree,
    Removed,
    Stored,
    Tally,
    draw_json,
    draw_rich,
    draw_text,
)

__version__ = _version("pagoda-kv")

__all__ = [
    "Counts",
    "DeviceTable",
    "FreeList",
    "Freed",
    "Growth",
    "Inserted",
    "Lease",
    "Match",
    "NodeView",
    "PageTable",
    "PrefixTree",
    "Removed",
    "Staging",
    "StatePart",
    "StatePool",
    "Stored",
    "TableWrites",
    "Tally",
    "TokenPool",
    "draw_json",
    "draw_rich",
    "draw_text",
    *compat.__all__,
    *errors.__all__,
]
