"""A radix-tree KV cache: sizing, the cache over `PrefixTree`, a scheduler's view of it, a printed picture.

In: tokens; out: the slots that hold them. `pages` and `answers` are internal.
"""

from pagoda.compat.radix.interface import BaseCacheHandle, BaseCacheManager, SizeInfo
from pagoda.compat.radix.manager import RadixCacheHandle, RadixCacheManager
from pagoda.compat.radix.picture import RadixTreeNode, format_radix_tree, print_radix_tree
from pagoda.compat.radix.requests import CacheManager, Request
from pagoda.compat.radix.sizing import (
    create_page_table,
    find_first_diff_pos,
    get_mha_cache_per_page,
    get_num_pages_for_kv_cache,
)

__all__ = [
    "BaseCacheHandle",
    "BaseCacheManager",
    "CacheManager",
    "RadixCacheHandle",
    "RadixCacheManager",
    "RadixTreeNode",
    "Request",
    "SizeInfo",
    "create_page_table",
    "find_first_diff_pos",
    "format_radix_tree",
    "get_mha_cache_per_page",
    "get_num_pages_for_kv_cache",
    "print_radix_tree",
]
