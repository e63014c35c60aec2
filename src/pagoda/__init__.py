"""Pagoda: the KV-cache memory of an LLM inference engine, as a library.

The rooms, each importing only those before it: `errors`, `layout` (what a model stores), `ids` (which ids
are free), `tables` (which pages a row uses), `tree` (what is already computed), `kernels` (moving keys and
values), `manager` (what running requests need), `pools` (the tensors), `attention` (what back ends read),
`hf` (a cache for Hugging Face models), `compat` (the names of public designs), `cli`. docs/layers.md has the
map."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from types import ModuleType as _ModuleType

from pagoda import compat, errors
from pagoda.attention import hnd_pages, nhd_pages, paged_attention
from pagoda.compat import *  # noqa: F403
from pagoda.errors import *  # noqa: F403
from pagoda.ids import FreeList
from pagoda.layout import (
    Budget,
    CompressedAttention,
    Entry,
    FullAttention,
    GatedDelta,
    KimiDelta,
    Kind,
    LatentAttention,
    Layout,
    Lightning,
    Mamba1,
    Mamba2,
    Need,
    PagedGroup,
    Pages,
    Part,
    RingWindow,
    Share,
    SharedAttention,
    ShortConv,
    StateGroup,
    WindowAttention,
    from_hf,
    model_config,
    model_names,
)
from pagoda.manager import Admitted, Delta, GroupStats, Manager, Pending, Stats
from pagoda.pools import Batch, DeviceTable, EntryPool, Pools, Staging, StatePart, StatePool, TokenPool
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
    "Admitted",
    "Batch",
    "Budget",
    "CompressedAttention",
    "Counts",
    "Delta",
    "DeviceTable",
    "Entry",
    "EntryPool",
    "FreeList",
    "Freed",
    "FullAttention",
    "GatedDelta",
    "GroupStats",
    "Inserted",
    "KimiDelta",
    "Kind",
    "LatentAttention",
    "Layout",
    "Lease",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "Manager",
    "Match",
    "Need",
    "NodeView",
    "PagedGroup",
    "Pages",
    "Part",
    "Pending",
    "Pools",
    "PrefixTree",
    "Removed",
    "RingWindow",
    "Share",
    "SharedAttention",
    "ShortConv",
    "Staging",
    "StateGroup",
    "StatePart",
    "StatePool",
    "Stats",
    "Stored",
    "Tally",
    "TokenPool",
    "WindowAttention",
    "draw_json",
    "draw_rich",
    "draw_text",
    "from_hf",
    "hnd_pages",
    "model_config",
    "model_names",
    "nhd_pages",
    "paged_attention",
    *compat.__all__,
    *errors.__all__,
]


def __getattr__(name: str) -> _ModuleType:
    # Transformers takes seconds to import, and not everybody has it.
    if name == "hf":
        return _import_module("pagoda.hf")
    raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
