"""Pagoda: the KV-cache memory of an LLM inference engine, as a library.

The rooms, each importing only those before it: `errors`, `layout` (what a model stores), `ids` (which ids
are free), `tree` (what is already computed), `manager` (what running
requests need), `kernels` (moving keys and values), `pools` (the tensors), `attention` (over pages),
`hf` (a cache for Hugging Face models), `models` (a small model to try things with), `compat` (the names of
public designs), `cli`. docs/layers.md has the map.

Importing this module imports none of them: each name is looked up in its room when it is first used, so that
sizing a model needs no torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from pagoda import attention as attention
    from pagoda import compat as compat
    from pagoda import errors as errors
    from pagoda import hf as hf
    from pagoda import ids as ids
    from pagoda import kernels as kernels
    from pagoda import layout as layout
    from pagoda import manager as manager
    from pagoda import models as models
    from pagoda import pools as pools
    from pagoda import tree as tree
    from pagoda.errors import CapacityError, ConfigError, PagodaError, UsageError
    from pagoda.ids import FreeList
    from pagoda.layout import (
        CompressedAttention,
        FullAttention,
        GatedDelta,
        KimiDelta,
        LatentAttention,
        Layout,
        Lightning,
        Mamba1,
        Mamba2,
        RingWindow,
        SharedAttention,
        ShortConv,
        WindowAttention,
        from_hf,
        model_config,
        model_names,
    )
    from pagoda.manager import Delta, Manager
    from pagoda.pools import Batch, EntryPool, Pools, StatePool, TokenPool
    from pagoda.tree import PrefixTree, draw_json, draw_rich, draw_text

    __version__: str

__all__ = [
    "Batch",
    "CapacityError",
    "CompressedAttention",
    "ConfigError",
    "Delta",
    "EntryPool",
    "FreeList",
    "FullAttention",
    "GatedDelta",
    "KimiDelta",
    "LatentAttention",
    "Layout",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "Manager",
    "PagodaError",
    "Pools",
    "PrefixTree",
    "RingWindow",
    "SharedAttention",
    "ShortConv",
    "StatePool",
    "TokenPool",
    "UsageError",
    "WindowAttention",
    "draw_json",
    "draw_rich",
    "draw_text",
    "from_hf",
    "model_config",
    "model_names",
]

_NAMES = {
    "attention": "",
    "compat": "",
    "errors": "CapacityError ConfigError PagodaError UsageError",
    "hf": "",
    "ids": "FreeList",
    "kernels": "",
    "layout": (
        "CompressedAttention FullAttention GatedDelta KimiDelta LatentAttention Layout Lightning Mamba1 "
        "Mamba2 RingWindow SharedAttention ShortConv WindowAttention from_hf model_config model_names"
    ),
    "manager": "Delta Manager",
    "models": "",
    "pools": "Batch EntryPool Pools StatePool TokenPool",
    "tree": "PrefixTree draw_json draw_rich draw_text",
}
_ROOMS = {name: room for room, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return _import_module(f"pagoda.{name}")
    if name in _ROOMS:
        found: object = getattr(_import_module(f"pagoda.{_ROOMS[name]}"), name)
    elif name == "__version__":
        found = _import_module("importlib.metadata").version("pagoda-kv")
    else:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    globals()[name] = found  # the next look finds it without this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMES, "__version__"})
