"""Every class that hands out ids, one after the other; the prefix caches that the tests of radix.md share."""

import pytest

from conformance.kinds import KINDS, Kind
from conformance.prefixes import NUM_PAGES, PAGE_SIZES, insert
from pagoda.compat import CacheManager, RadixCacheManager


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=PAGE_SIZES)
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def manager(device: str, page_size: int) -> RadixCacheManager:
    return RadixCacheManager(device, page_size)


@pytest.fixture
def forked(manager: RadixCacheManager) -> RadixCacheManager:
    """1 2 over the leaves 3 4 and 5 6; the first is the older one."""
    assert insert(manager, [1, 2, 3, 4], [10, 11, 12, 13]) == 0
    assert insert(manager, [1, 2, 5, 6], [20, 21, 22, 23]) == 2
    return manager


@pytest.fixture
def cache(device: str, page_size: int) -> CacheManager:
    return CacheManager(device, NUM_PAGES, page_size)
