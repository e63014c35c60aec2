"""The interface of prefix caches. In: tokens; out: the indices of the slots that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagoda.errors import InvariantError
from pagoda.pools._arguments import AnyIds, number

__all__ = ["BaseCacheHandle", "BaseCacheManager", "SizeInfo"]


class SizeInfo(NamedTuple):
    """How many cached tokens are evictable, and how many are protected."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size + self.protected_size


@dataclass(frozen=True, eq=False)
class BaseCacheHandle:
    """What a match found: the first `cached_len` tokens. It protects nothing until it is locked.

    Errors: ArgumentError for an invalid length.
    """

    cached_len: int

    def __post_init__(self) -> None:
        number(self.cached_len, "cached_len")


class BaseCacheManager(ABC):
    """A cache of prefixes: tokens in, the indices of their slots out."""

    @abstractmethod
    def match_prefix(self, input_ids: AnyIds) -> tuple[BaseCacheHandle, torch.Tensor]:
        """Return the longest cached prefix and its indices. Changes nothing and protects nothing."""

    @abstractmethod
    def lock_handle(self, handle: BaseCacheHandle | None, unlock: bool = False) -> None:
        """Protect the prefix of a handle from eviction; with `unlock`, end that protection."""

    @abstractmethod
    def insert_prefix(self, input_ids: AnyIds, indices: AnyIds) -> int:
        """Cache tokens and return how many were cached already. The cache owns the indices of the rest."""

    @abstractmethod
    def evict(self, size: int) -> torch.Tensor:
        """Evict `size` tokens, in whole pages, and return their indices, which the caller now owns."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; the caller owns all indices."""

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """How many tokens are evictable, and how many are protected."""

    def check(self) -> None:
        """Verify what holds for every cache: no size is negative. Errors: InvariantError."""
        if min(self.size_info) < 0:
            raise InvariantError(13, f"{self.size_info}: a size is negative")
