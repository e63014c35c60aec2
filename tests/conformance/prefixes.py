"""What the tests of contracts/radix.md share: sequences told page by page, and ways to look at a tree."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pagoda.compat import CacheManager, RadixCacheHandle, RadixCacheManager, Request

PAGE_SIZES = [1, 4, 16]
NUM_PAGES = 20  # of a CacheManager
FAILS = (AssertionError, pytest.fail.Exception)  # how a check says that an implementation is wrong


def tokens_of(words: Iterable[int], page_size: int) -> list[int]:
    """A sequence told by words, each of which is one page of tokens: 3 is 300, 301, …"""
    return [100 * word + offset for word in words for offset in range(page_size)]


def slots_of(pages: Iterable[int], page_size: int) -> list[int]:
    """All slots of pages, in order."""
    return [page * page_size + offset for page in pages for offset in range(page_size)]


def words_of(node: Any, page_size: int) -> list[int]:
    """The words of one node; its tokens are those of these words, and no others."""
    words = [token // 100 for token in node.tokens.tolist()[::page_size]]
    assert node.tokens.tolist() == tokens_of(words, page_size)
    return words


def pages_of(node: Any, page_size: int) -> list[int]:
    pages = [slot // page_size for slot in node.slots.tolist()[::page_size]]
    assert node.slots.tolist() == slots_of(pages, page_size)
    return pages


def drawn(manager: RadixCacheManager) -> list[tuple[int, list[int], list[int], int]]:
    """The tree, node after node: (level, words, pages, ref_count)."""
    size = manager.page_size
    found, stack = [], [(child, 1) for child in reversed(manager.root_node.children)]
    while stack:
        node, level = stack.pop()
        found.append((level, words_of(node, size), pages_of(node, size), node.ref_count))
        stack += [(child, level + 1) for child in reversed(node.children)]
    return found


def seen(made: RadixCacheManager | CacheManager) -> Any:
    """All that can be observed, the order of eviction (through times of use) included; changes nothing."""
    manager = made.manager if isinstance(made, CacheManager) else made
    nodes, stack = [], [manager.root_node]
    while stack:
        node = stack.pop()
        arrays = node.tokens.tolist(), node.slots.tolist()
        nodes.append((*arrays, node.ref_count, node.timestamp, len(node.children)))
        stack += node.children
    # A root that came and went has no time of its own.
    nodes[0] = (nodes[0][2], nodes[0][4])
    counts = (made.available_size,) if isinstance(made, CacheManager) else ()
    return manager.size_info, nodes, counts


def insert(manager: RadixCacheManager, words: Iterable[int], pages: Iterable[int]) -> int:
    """How many words were cached already."""
    size = manager.page_size
    cached = manager.insert_prefix(tokens_of(words, size), slots_of(pages, size))
    assert cached % size == 0
    return cached // size


def match(manager: RadixCacheManager, words: Iterable[int]) -> tuple[Any, list[int]]:
    """The handle, and the pages of what was found."""
    handle, indices = manager.match_prefix(tokens_of(words, manager.page_size))
    assert len(indices) == handle.cached_len
    return handle, [slot // manager.page_size for slot in indices.tolist()[:: manager.page_size]]


def evict(manager: RadixCacheManager, num_pages: int) -> list[int]:
    """The pages that were evicted, in order."""
    size = manager.page_size
    slots = manager.evict(num_pages * size).tolist()
    pages = [slot // size for slot in slots[::size]]
    assert slots == slots_of(pages, size)
    return pages


def request_of(tokens: Any) -> Request:
    return Request(uid=0, input_ids=tokens, table_idx=0, cached_len=0, output_len=4)


def begin(cache: CacheManager, tokens: list[int]) -> tuple[RadixCacheHandle, torch.Tensor]:
    """A request that has matched, locked and allocated: its handle, and the slots of all its tokens."""
    handle, indices = cache.match_req(request_of(tokens))
    cache.lock(handle)
    return handle, torch.cat([indices, cache.allocate(len(tokens) - handle.cached_len)])


def run(cache: CacheManager, tokens: list[int]) -> list[int]:
    """A request from beginning to end; the slots it had."""
    handle, indices = begin(cache, tokens)
    cache.free_and_cache_finished_req(handle, tokens, indices)
    return indices.tolist()
