"""The names of public designs, one thin module or folder per contract, built on the rest of Pagoda.

Nothing else in Pagoda imports it; names are used as `pagoda.compat.KVPool`.
"""

from pagoda.compat.blocks import BlockAllocator
from pagoda.compat.hybrid import (
    AttentionType,
    DSV4Config,
    KVCacheManager,
    LayerCacheHandle,
    LayerCacheSchema,
    LayerSpec,
    PagedKVPool,
    StateCachePool,
    build_schema,
    compute_block_budget,
)
from pagoda.compat.pools import (
    GDNPool,
    KVPool,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    make_full_attention_net_mem_pool,
    make_req_to_token_pool,
)
from pagoda.compat.radix import (
    BaseCacheHandle,
    BaseCacheManager,
    CacheManager,
    RadixCacheHandle,
    RadixCacheManager,
    RadixTreeNode,
    Request,
    SizeInfo,
    create_page_table,
    find_first_diff_pos,
    format_radix_tree,
    get_mha_cache_per_page,
    get_num_pages_for_kv_cache,
    print_radix_tree,
)
from pagoda.compat.slot_prefixes import PrefixCacheManager
from pagoda.compat.slots import SlotAllocator

__all__ = [
    "AttentionType",
    "BaseCacheHandle",
    "BaseCacheManager",
    "BlockAllocator",
    "CacheManager",
    "DSV4Config",
    "GDNPool",
    "KVCacheManager",
    "KVPool",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "PagedKVPool",
    "PrefixCacheManager",
    "RadixCacheHandle",
    "RadixCacheManager",
    "RadixTreeNode",
    "ReqToTokenPool",
    "Request",
    "SizeInfo",
    "SlotAllocator",
    "StateCachePool",
    "TokenToKVPoolAllocator",
    "build_schema",
    "compute_block_budget",
    "create_page_table",
    "find_first_diff_pos",
    "format_radix_tree",
    "get_mha_cache_per_page",
    "get_num_pages_for_kv_cache",
    "make_full_attention_net_mem_pool",
    "make_req_to_token_pool",
    "print_radix_tree",
]
