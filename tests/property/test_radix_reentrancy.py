"""Finalizers that call a prefix cache in the middle of its own calls: nothing hangs, nothing is torn."""

import itertools
import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from pagoda import FreeList
from pagoda.compat import CacheManager, PrefixCacheManager, RadixCacheManager, Request, SlotAllocator
from pagoda.errors import StaleError
from property.test_reentrancy import hang_is_a_crash, sweep

__all__ = ["hang_is_a_crash"]  # a fixture, used by all tests here

NUM_PAGES = 4096


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def requests(cache: CacheManager) -> Callable[[], None]:
    """A request a call, each like one of the few before it."""
    numbers = itertools.count()

    def serve() -> None:
        number = next(numbers)
        tokens = [number % 3] * 8 + [number % 5] * 8 + [9]
        handle, indices = cache.match_req(Request(number, tokens, 0, 0, 1))
        try:
            cache.lock(handle)
        except StaleError:  # a finalizer evicted what was found
            return
        own = cache.allocate(len(tokens) - handle.cached_len)
        cache.free_and_cache_finished_req(handle, tokens, torch.cat([indices, own]))

    return serve


@pytest.mark.parametrize("num_pages", [64, NUM_PAGES])
def test_requests_within_requests(device: str, num_pages: int) -> None:
    cache = CacheManager(device, num_pages, 4)
    assert sweep(requests(cache)) > 20
    cache.check()
    assert cache.available_size == num_pages * 4
    assert cache.manager.size_info.protected_size == 0


def test_inserts_and_evictions_within_each_other(device: str) -> None:
    manager, numbers = RadixCacheManager(device), itertools.count()
    pages = FreeList(NUM_PAGES, first_id=0)

    def turn() -> None:
        number = next(numbers)
        own = pages.alloc(6)
        tokens = [number % 4, number % 3, number % 2, 7, 8, number % 5]
        cached = manager.insert_prefix(tokens, own)
        pages.free(own[:cached])
        if manager.size_info.evictable_size >= 12:
            pages.free(manager.evict_host(5))

    assert sweep(turn) > 20
    manager.check()
    assert pages.num_free + manager.size_info.total_size == NUM_PAGES


def test_references_within_references() -> None:
    cache, slots = PrefixCacheManager(20), SlotAllocator(4)
    numbers = itertools.count()

    def turn() -> None:
        number = next(numbers)
        tokens = [number % 3, number % 2, *range(number % 4)]
        cache.insert(tokens, number % 4, 0)
        cache.pin(tokens)
        assert cache.find(tokens)[0] == len(tokens)
        cache.find_valid(tokens, slots)
        cache.release(tokens)
        cache.release(tokens)

    assert sweep(turn) > 20
    cache.check()
    assert cache._tree.num_leases == 0
    assert cache.num_tokens <= 20
