"""A radix-tree cache of slots: the interface of such caches, and `RadixCacheManager` over `PrefixTree`.

In: tokens; out: the slots that hold them. Indices are slots, slot = page * page_size + offset, and may
begin at 0: the tree knows a page by its number + 1. Owns the pages it was given until it evicts them
(invariant 13).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat.radix_pages import TreePages
from pagoda.compat.radix_picture import NO_BOUND, RadixTreeNode, radix_nodes
from pagoda.compat.tokens import host_pages, host_tokens, slots_of_pages
from pagoda.errors import ArgumentError, CapacityError, NotHeldError, StaleError
from pagoda.pools import Staging
from pagoda.pools.arguments import AnyIds, count, number, refuse_capture
from pagoda.tree import Lease, PrefixTree

__all__ = ["BaseCacheHandle", "BaseCacheManager", "RadixCacheHandle", "RadixCacheManager", "SizeInfo"]

NOTHING = np.zeros(0, dtype=np.int32)


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


@dataclass(frozen=True, eq=False)
class RadixCacheHandle(BaseCacheHandle):
    """What a match in a `RadixCacheManager` found; one made by hand belongs to none."""

    _manager: RadixCacheManager | None = field(default=None, repr=False)
    _tokens: npt.NDArray[np.int32] = field(default_factory=lambda: NOTHING, repr=False)  # [cached_len]
    _pages: npt.NDArray[np.int32] = field(
        default_factory=lambda: NOTHING, repr=False
    )  # [cached_len / page_size]
    _leases: list[Lease] = field(default_factory=list, repr=False)  # one a lock


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

    @abstractmethod
    def check(self) -> None:
        """Verify all invariants. Cost: a walk over all of it. Errors: InvariantError."""


class RadixCacheManager(BaseCacheManager):
    """A cache of prefixes in whole pages, evicted from the coldest tails.

    Call it between captures. Several threads may call it.

    Errors: ConfigError for a page_size that is not positive or a device that is not there.
    """

    def __init__(self, device: torch.device | str, page_size: int = 1) -> None:
        self._staging = Staging(device)
        self.device = device
        self.page_size = count(page_size, "page_size")
        self._tree = PrefixTree(self.page_size)
        self._pages = TreePages(self.page_size, self._cached_pages)
        self._unsent = NOTHING  # pages of an evict whose answer could not be sent
        self._lock = threading.RLock()

    @property
    def size_info(self) -> SizeInfo:
        """How many cached tokens are evictable, and how many locks protect. O(1)."""
        with self._lock:
            unsent = self._unsent.size * self.page_size
            return SizeInfo(self._tree.evictable_tokens + unsent, self._tree.protected_tokens)

    @property
    def root_node(self) -> RadixTreeNode:
        """The tree as it is now, to be looked at; the root has no tokens. Cost: O(tokens)."""
        with self._lock:
            return radix_nodes(self._tree)[0]

    def match_prefix(self, input_ids: AnyIds) -> tuple[RadixCacheHandle, torch.Tensor]:
        """The longest cached prefix, in whole pages: a handle, and [cached_len] int32 slots on `device`.

        Neither what is cached nor the order of eviction changes. The slots stay the tree's, and may be used
        only while the handle is locked. Cost O(tokens) on the host and one copy that nobody waits for;
        a device tensor costs one synchronisation. Errors: ArgumentError, OutOfRangeError; CaptureError.
        """
        refuse_capture(self._staging.device, "match_prefix")
        tokens = host_tokens(input_ids, "input_ids")
        with self._lock:
            found = self._tree.match(tokens)
        pages = found.page_ids - np.int32(1)
        handle = RadixCacheHandle(found.length, self, tokens[: found.length].copy(), pages)
        return handle, self._staging.send(slots_of_pages(pages, self.page_size))[0]

    def lock_handle(self, handle: BaseCacheHandle | None, unlock: bool = False) -> None:
        """Protect what a handle found from eviction; with `unlock` take back one lock of this handle.

        A run is split where the match ends inside it. None does nothing. Cost: O(cached_len). Errors:
        StaleError when tokens were evicted since the match, and for locks from before a `reset`;
        NotHeldError for a handle that is not locked; ArgumentError for another manager's.
        """
        if handle is None:
            return
        with self._lock:
            own = self._own(handle)
            if unlock:
                self._release(own)
            else:
                self._protect(own)

    def _own(self, handle: Any) -> RadixCacheHandle:
        if not isinstance(handle, RadixCacheHandle) or handle._manager is not self:
            raise ArgumentError("handle: give one that match_prefix of this manager gave")
        return handle

    def _protect(self, handle: RadixCacheHandle) -> None:
        # Matched again first: a lock that then turned out too short would have renewed what it found.
        found = self._tree.match(handle._tokens)
        if found.length == handle.cached_len and np.array_equal(found.page_ids - 1, handle._pages):
            lease = self._tree.lock(found)
            if lease.length == handle.cached_len:
                handle._leases.append(lease)
                return
            self._tree.release(lease)  # a finalizer evicted in between
        raise StaleError(f"handle: of its {handle.cached_len} tokens some were evicted: match again")

    def _release(self, handle: RadixCacheHandle) -> None:
        lease = self._lease(handle)
        handle._leases.pop()
        try:
            self._tree.release(lease)
        except BaseException:
            handle._leases.append(lease)
            raise

    def _lease(self, handle: RadixCacheHandle) -> Lease:
        if not handle._leases:
            raise NotHeldError("handle: it is not locked, or was unlocked before", -1, 0)
        if not handle._leases[-1].is_held:
            raise StaleError("handle: it was locked before a reset, which took its locks away")
        return handle._leases[-1]

    def insert_prefix(self, input_ids: AnyIds, indices: AnyIds) -> int:
        """Cache tokens in whole pages; how many leading ones were cached already.

        ::

            [0, cached)      cached already: the caller's own slots among them stay its own, to be freed once
            [cached, whole)  the tree's from now on
            [whole, n)       a tail shorter than a page stays the caller's

        `indices` has one slot a token: whole pages in order, token i in slot i % page_size of its page.
        Cost: O(tokens); device tensors cost one synchronisation each. Errors: ArgumentError,
        OutOfRangeError; AlreadyHeldError for pages that are in the tree or stand twice; NotHeldError for
        those that a `CacheManager` over this tree has not handed out.
        """
        tokens = host_tokens(input_ids, "input_ids")
        pages = host_pages(indices, tokens.size, self.page_size, "indices")
        with self._lock:
            return self._insert(tokens, pages, None)

    def _insert(
        self, tokens: npt.NDArray[np.int32], pages: npt.NDArray[np.int32], lease: Lease | None
    ) -> int:
        """Cache a sequence, the beginning of which a lease may hold; the length that was cached."""
        size = self.page_size
        whole, begin = tokens.size // size, self._tree.match_length(tokens) // size
        held = 0 if lease is None else lease.length
        self._pages.take(pages[begin:whole], range(begin * size, whole * size, size))
        try:
            cached = self._tree.insert(tokens[held:], pages[held // size : whole] + 1, lease).present // size
        except BaseException:
            self._pages.free(pages[begin:whole])
            raise
        # A finalizer may have inserted or evicted these very tokens in between.
        self._pages.free(pages[begin:cached])
        self._pages.take(pages[cached:begin], range(cached * size, begin * size, size))
        return cached * size

    def evict(self, size: int) -> torch.Tensor:
        """Slots of `size` tokens, rounded up to pages, off the tails of the coldest leaves: [n] int32.

        They lie on `device` and are the caller's now. A parent becomes a leaf when its last child goes. Cost:
        what it evicts, and one copy that nobody waits for. Errors: CapacityError when less is
        evictable; ArgumentError; CaptureError. Where the device has no memory for the answer, the slots
        stay evictable, and the next call gives them.
        """
        refuse_capture(self._staging.device, "evict")
        pages = self._evict(size)
        try:
            # Without our lock: staging has one of its own, and a finalizer under that may call us.
            return self._staging.send(slots_of_pages(pages, self.page_size))[0]
        except BaseException:  # no memory on the device, Ctrl-C
            with self._lock:
                self._unsent = np.concatenate([pages, self._unsent])
            raise

    def evict_host(self, size: int) -> npt.NDArray[np.int32]:
        """As `evict`, but [n] int32 on the host: no device is touched."""
        return slots_of_pages(self._evict(size), self.page_size)

    def _evict(self, size: int) -> npt.NDArray[np.int32]:
        wanted = number(size, "size")
        with self._lock:
            evictable, protected = self.size_info
            if wanted > evictable:
                raise CapacityError("evictable tokens", wanted, evictable, evictable + protected)
            num_pages = -(-wanted // self.page_size)
            num_unsent = min(num_pages, self._unsent.size)
            freed = self._tree.evict((num_pages - num_unsent) * self.page_size).page_ids - np.int32(1)
            self._pages.free(freed)
            first, self._unsent = self._unsent[:num_unsent], self._unsent[num_unsent:]
            return np.concatenate([first, freed])

    def reset(self) -> None:
        """Forget everything, locks included; all slots are the caller's. Cost: O(nodes + pages / 64)."""
        with self._lock:
            self._tree.reset()
            self._pages.reset()
            self._unsent = NOTHING

    def _cached_pages(self) -> npt.NDArray[np.int32]:
        views = self._tree.nodes(max_nodes=NO_BOUND, max_tokens=NO_BOUND)
        return np.concatenate([NOTHING, *(view.columns[0] for view in views)]) - np.int32(1)

    def check(self) -> None:
        """Verify the tree's invariants, 7 and 13. Cost: a walk over all of it. Errors: InvariantError."""
        with self._lock:
            self._tree.check()
            self._pages.check()
        self._staging.check()
