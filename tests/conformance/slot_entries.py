"""What the tests of `PrefixCacheManager` share."""

from typing import Any

from pagoda.compat import PrefixCacheManager

MISS = (0, -1, 0)


def cached(cache: PrefixCacheManager, *sequences: Any) -> list[int]:
    """How much of each sequence is cached; renews nothing."""
    return [cache._tree.match_length(tokens) for tokens in sequences]


def put(cache: PrefixCacheManager, tokens: Any, slot: int = 0, slot_ver: int = 1) -> None:
    """Inserted, and let go."""
    cache.insert(tokens, slot, slot_ver)
    cache.release(tokens)
