"""The manager of a compressed-attention model, DeepSeek-V4 style, in the names of the public design: a face
of one `pagoda.Manager` and one `pagoda.Pools`. In: a config and a schedule of layers; out: all cache state of
one instance of the model, and handles through which attention reads and writes it.

`config` describes the model, `schema` what each layer stores, `budget` how many blocks to allocate. `paged`
and `state` show the blocks and states of one layer, `blocks` the allocator of a group of layers, `tokens`
reads the tokens of a step. `manager` ties these to requests, and `handle` is the cache of one layer during a
step. Nothing here owns a free-list, a table or a pool.
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
