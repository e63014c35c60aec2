"""The manager of a compressed-attention model, DeepSeek-V4 style. In: a config and a schedule of layers; out:
all cache state of one instance of the model, and handles by which attention reads and writes it.

`config` says what the model is, `schema` what each layer keeps, `budget` how many blocks there should be,
`paged` and `state` are the pools of one layer, `blocks` knows who has which block of a group of layers,
`tokens` are those of a step, `manager` ties all of it to requests, and `handle` is one layer as a step sees
it.
"""

from pagoda.compat.hybrid.budget import compute_block_budget
from pagoda.compat.hybrid.config import AttentionType, DSV4Config, LayerSpec
from pagoda.compat.hybrid.handle import LayerCacheHandle
from pagoda.compat.hybrid.manager import KVCacheManager
from pagoda.compat.hybrid.paged import PagedKVPool
from pagoda.compat.hybrid.schema import LayerCacheSchema, build_schema
from pagoda.compat.hybrid.state import StateCachePool, StateSnapshot

__all__ = [
    "AttentionType",
    "DSV4Config",
    "KVCacheManager",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "PagedKVPool",
    "StateCachePool",
    "StateSnapshot",
    "build_schema",
    "compute_block_budget",
]
