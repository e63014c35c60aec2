"""What every cache of prefixes can do. In: tokens; out: the indices of the slots that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagoda.errors import InvariantError
from pagoda.pools._arguments import AnyIds, number

__all__ = ["BaseCacheHandle", "BaseCacheManager", "SizeInfo"]


class SizeInfo(NamedTuple):
    """How many tokens are cached, and how they divide."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens. O(1)."""
        return self.evictable_size + self.protected_size


@dataclass(frozen=True, eq=False)
class BaseCacheHandle:
    """What a match found: the first `cached_len` tokens. It protects nothing until it is locked.

    Errors: ArgumentError for a length that is none.
    """

    cached_len: int

    def __post_init__(self) -> None:
        number(self.cached_len, "cached_len")


class BaseCacheManager(ABC):
    """What every cache of prefixes can do: tokens in, the indices of their slots out."""

    @abstractmethod
    def match_prefix(self, input_ids: AnyIds) -> tuple[BaseCacheHandle, torch.Tensor]:
        """The longest cached prefix and its indices; changes nothing, protects nothing. Cost: O(tokens)."""

    @abstractmethod
    def lock_handle(self, handle: BaseCacheHandle | None, unlock: bool = False) -> None:
        """Protect what a handle found from eviction, or no longer. Cost: O(tokens)."""

    @abstractmethod
    def insert_prefix(self, input_ids: AnyIds, indices: AnyIds) -> int:
        """Cache tokens; the length that was cached already. The rest is the cache's. Cost: O(tokens)."""

    @abstractmethod
    def evict(self, size: int) -> torch.Tensor:
        """The indices of `size` tokens, in whole pages, which are the caller's now. Cost: what it evicts."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; all indices are the caller's. Cost: O(all that was cached)."""

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """How many tokens are evictable and protected. O(1)."""

    def check(self) -> None:
        """Verify what is known of every cache: no size is negative. O(1). Errors: InvariantError."""
        if min(self.size_info) < 0:
            raise InvariantError(13, f"{self.size_info}: a size is negative")
