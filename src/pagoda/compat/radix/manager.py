"""`RadixCacheManager`: a cache of slots over `PrefixTree`.

In: tokens; out: the slots that hold them. Indices are slots, slot = page * page_size + offset, and may
begin at 0: the tree's page ids are page + 1. Owns the pages that were inserted until it evicts them
(invariant 13).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat._words import in_words
from pagoda.compat.radix.answers import Answer
from pagoda.compat.radix.interface import BaseCacheHandle, BaseCacheManager, SizeInfo
from pagoda.compat.radix.pages import TreePages
from pagoda.compat.radix.picture import NO_BOUND, RadixTreeNode, radix_root
from pagoda.compat.tokens import HostTokens, host_pages, host_tokens, slots_of_pages, write_slots
from pagoda.errors import (
    AlreadyHeldError,
    ArgumentError,
    CapacityError,
    NotHeldError,
    StaleError,
    UsageError,
)
from pagoda.ids import FreeList
from pagoda.layout._numbers import count
from pagoda.pools import Staging
from pagoda.pools._arguments import AnyIds, number, refuse_capture
from pagoda.tree import Lease, PrefixTree

__all__ = ["RadixCacheHandle", "RadixCacheManager"]

NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class RadixCacheHandle(BaseCacheHandle):
    """The first `cached_len` tokens of a sequence, as `RadixCacheManager.match_prefix` found them.

    A handle made by hand names the `node` where these tokens end: ``RadixCacheHandle(0, manager.root_node)``
    is the handle of a request that matched nothing. Locking it does nothing, since the root is never evicted.

    Errors: ArgumentError if the node does not end at `cached_len` tokens.
    """

    node: RadixTreeNode | None = field(default=None, repr=False)
    _manager: RadixCacheManager | None = field(default=None, repr=False)
    _tokens: HostTokens = field(default_factory=lambda: NOTHING, repr=False)  # [cached_len]
    _pages: npt.NDArray[np.int32] = field(
        default_factory=lambda: NOTHING, repr=False
    )  # [cached_len / page_size]
    _leases: list[Lease] = field(default_factory=list, repr=False)  # one per lock

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node is None:
            return
        if not isinstance(self.node, RadixTreeNode):
            raise ArgumentError(f"node: give a node of root_node's tree, not {type(self.node).__name__}")
        path = self.node.path()
        object.__setattr__(self, "_tokens", np.concatenate([node.tokens for node in path]))
        object.__setattr__(self, "_pages", np.concatenate([node.pages for node in path]))
        if self.cached_len != self._tokens.size:
            raise ArgumentError(
                f"cached_len: give {self._tokens.size}, where the node ends, not {self.cached_len}"
            )

    @property
    def is_root(self) -> bool:
        """Whether it was made by hand at the root, so that there is nothing to lock."""
        return self.node is not None and self.cached_len == 0


class RadixCacheManager(BaseCacheManager):
    """A cache of prefixes in whole pages, which evicts the least recently used tails first.

    `source` is the free-list that pages come from, if there is one: only pages that are held there can be
    inserted, and `reset` frees cached pages there. Call it outside of captures. Thread-safe.

    Errors: ConfigError for a page_size that is not positive or an unknown device.
    """

    def __init__(
        self, device: torch.device | str, page_size: int = 1, *, source: FreeList | None = None
    ) -> None:
        self._staging = Staging(device)
        self.device = device
        self.page_size = count(page_size, "page_size")
        self._tree = PrefixTree(self.page_size)
        self._pages = TreePages(self.page_size, source)
        self._lock = threading.RLock()

    @property
    def mutex(self) -> threading.RLock:
        """The lock of all calls: hold it to make several calls atomic."""
        return self._lock

    @property
    def size_info(self) -> SizeInfo:
        """How many cached tokens are evictable, and how many are protected by locks."""
        with self._lock:
            return SizeInfo(self._tree.evictable_tokens, self._tree.protected_tokens)

    @property
    def root_node(self) -> RadixTreeNode:
        """A read-only copy of the tree as it is now; the root has no tokens. Cost: O(tokens)."""
        with self._lock:
            return radix_root(self._tree)

    def match_prefix(self, input_ids: AnyIds) -> tuple[RadixCacheHandle, torch.Tensor]:
        """Return a handle of the longest cached prefix, in whole pages, and its slots: [cached_len] int32.

        Neither the cache nor its order of eviction changes. The slots are on `device`; the tree still owns
        them, and they may be used only while the handle is locked. Cost: O(tokens) on the host and one
        asynchronous copy; a device tensor costs one synchronisation. Errors: ArgumentError, OutOfRangeError;
        CaptureError.
        """
        refuse_capture(self._staging.device, "match_prefix")
        tokens = host_tokens(input_ids, "input_ids")
        with self._lock:
            try:
                found = self._tree.match(tokens)
            except UsageError as error:
                in_words(error, tokens="input_ids")
                raise
        pages = found.page_ids - np.int32(1)
        handle = RadixCacheHandle(
            found.length, _manager=self, _tokens=tokens[: found.length].copy(), _pages=pages
        )
        return handle, self._staging.send(slots_of_pages(pages, self.page_size))[0]

    def lock_handle(self, handle: BaseCacheHandle | None, unlock: bool = False) -> None:
        """Protect the prefix of a handle from eviction; with `unlock`, undo one lock of this handle.

        A node is split if the match ends inside it. None does nothing. Errors: StaleError if tokens were
        evicted since the match, or for locks from before a `reset`; NotHeldError for a handle that is not
        locked; ArgumentError for a handle of another manager.
        """
        if handle is None:
            return
        with self._lock:
            own = self._own(handle, "handle")
            if own is None:
                return
            if unlock:
                self._release(own)
            else:
                self._protect(own)

    def _own(self, handle: Any, name: str) -> RadixCacheHandle | None:
        """Return a handle of this manager; None for None and for a handle made by hand at the root."""
        if not isinstance(handle, RadixCacheHandle) or not (
            handle._manager is self or (handle.node is not None and handle.node.is_of(self._tree))
        ):
            raise ArgumentError(f"{name}: give a handle that match_prefix of this manager returned")
        return None if handle.is_root else handle

    def _protect(self, handle: RadixCacheHandle) -> None:
        # Match again first, because a lock that turns out too short would have renewed what it found.
        found = self._tree.match(handle._tokens)
        if found.length == handle.cached_len and np.array_equal(found.page_ids - 1, handle._pages):
            lease = self._tree.lock(found)
            if lease.length == handle.cached_len:
                handle._leases.append(lease)
                return
            self._tree.release(lease)  # a finalizer evicted in between
        raise StaleError(f"handle: some of its {handle.cached_len} tokens were evicted: match again")

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
            raise NotHeldError("handle is not locked: lock it once per unlock", -1, 0)
        if not handle._leases[-1].is_held:
            raise StaleError("handle was locked before a reset, which removed its locks: match again")
        return handle._leases[-1]

    def insert_prefix(self, input_ids: AnyIds, indices: AnyIds) -> int:
        """Cache tokens in whole pages and return how many leading ones were cached already.

        ::

            [0, cached)      cached already: slots that the caller brought for them remain the caller's
            [cached, whole)  now owned by the tree
            [whole, n)       a tail shorter than a page remains the caller's

        `indices` has one slot per token: whole pages in order, token i in slot i % page_size of its page; the
        tail may be anywhere in one page. Device tensors cost one synchronisation each. Errors: ArgumentError,
        OutOfRangeError; AlreadyHeldError for pages that are in the tree or duplicated; NotHeldError for pages
        that a `CacheManager` over this tree has not handed out.
        """
        tokens = host_tokens(input_ids, "input_ids")
        pages = host_pages(indices, tokens.size, self.page_size, "indices")
        size, whole = self.page_size, tokens.size // self.page_size
        with self._lock:
            begin = self._cached_length(tokens) // size
            positions = range(begin * size, whole * size, size)
            self._pages.require_outside(pages[begin:whole], positions, AlreadyHeldError)
            return self._insert(tokens, pages, begin, None) * size

    def _cached_length(self, tokens: HostTokens) -> int:
        try:
            return self._tree.match_length(tokens)
        except UsageError as error:
            in_words(error, tokens="input_ids")
            raise

    def _insert(
        self, tokens: HostTokens, pages: npt.NDArray[np.int32], begin: int, lease: Lease | None
    ) -> int:
        """Cache a sequence, whose beginning a lease may hold, and return how many pages were cached already.

        The caller expects `begin`, and has checked that the tree may own the pages from there on.
        """
        whole = tokens.size // self.page_size
        held = 0 if lease is None else lease.length
        self._pages.add(pages[begin:whole])
        try:
            new = pages[held // self.page_size : whole] + np.int32(1)
            cached = self._tree.insert(tokens[held:], new, lease).present // self.page_size
        except BaseException:
            self._pages.remove(pages[begin:whole])
            raise
        # A finalizer may have inserted or evicted these very tokens in between.
        self._pages.remove(pages[begin:cached])
        self._pages.add(pages[cached:begin])
        return cached

    def finish(
        self, handle: BaseCacheHandle | None, tokens: HostTokens, pages: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Cache a finished request's tokens, undo one lock of its handle, and return the pages it still owns.

        `pages` are those of all its tokens, beginning with those that the handle found. After these, pages
        whose tokens are cached already, and the page of a tail, remain the caller's to free. Errors: those of
        `CacheManager.free_and_cache_finished_req`.
        """
        size, whole = self.page_size, tokens.size // self.page_size
        with self._lock:
            own = None if handle is None else self._own(handle, "old_handle")
            lease = None if own is None else self._lease(own)
            old = 0
            if own is not None:
                old = own.cached_len // size
                is_same = np.array_equal(tokens[: own.cached_len], own._tokens)
                if not is_same or not np.array_equal(pages[:old], own._pages):
                    raise ArgumentError(
                        "old_handle: input_ids and indices do not begin with the prefix that it matched"
                    )
            positions = range(old * size, tokens.size, size)
            self._pages.require_outside(pages[old:], positions, NotHeldError)
            begin = self._cached_length(tokens) // size
            cached = self._insert(tokens, pages, begin, lease)
            if own is not None:
                self._release(own)
            return np.concatenate([pages[old:cached], pages[whole:]])

    def owns(self, page: int) -> bool:
        """Whether the tree owns a page."""
        with self._lock:
            return self._pages.owns(page)

    def require_handed_out(self, pages: npt.NDArray[np.int32], positions: Sequence[int]) -> None:
        """Raise an error unless every page is held in `source` and none is owned by the tree.

        `positions` are those of the pages in `indices`, for messages. Errors: NotHeldError, DoubleFreeError,
        OutOfRangeError.
        """
        with self._lock:
            self._pages.require_outside(pages, positions, NotHeldError)

    def evict(self, size: int) -> torch.Tensor:
        """Evict `size` tokens, rounded up to pages, and return their slots: [n] int32 on `device`.

        They come off the tails of the least recently used leaves, and the caller now owns them. A parent
        becomes a leaf when its last child is evicted. Cost: one asynchronous copy. Errors: CapacityError if
        fewer tokens are evictable; ArgumentError; CaptureError. Nothing is evicted if there is no memory for
        the result.
        """
        refuse_capture(self._staging.device, "evict")
        wanted = number(size, "size")
        # Allocate first, and without our lock: a finalizer in another thread may wait for the lock.
        answer = Answer(self._evictable_slots(wanted), self._staging.device)
        self._evict_into(wanted, answer.room)
        return answer.send()

    def evict_host(self, size: int) -> npt.NDArray[np.int32]:
        """As `evict`, but [n] int32 on the host: no device is touched."""
        wanted = number(size, "size")
        room = np.empty(self._evictable_slots(wanted), dtype=np.int32)
        self._evict_into(wanted, room)
        return room

    def _evictable_slots(self, wanted: int) -> int:
        """Return how many slots the eviction of so many tokens frees. Errors: CapacityError."""
        evictable, protected = self.size_info
        if wanted > evictable:
            raise CapacityError("evictable tokens", wanted, evictable, evictable + protected)
        return -(-wanted // self.page_size) * self.page_size

    def _evict_into(self, wanted: int, room: npt.NDArray[np.int32]) -> None:
        with self._lock:
            self._evictable_slots(wanted)  # another thread may have evicted since
            pages = self._tree.evict(wanted).page_ids - np.int32(1)
            self._pages.remove(pages)
            write_slots(pages, self.page_size, room)

    def reset(self) -> None:
        """Forget everything, locks included. All slots become free in `source`; without one, the caller owns
        them."""
        with self._lock:
            # Allocated first: nothing is allocated between the two calls, so no finalizer runs there.
            owned: set[int] = set()
            self._tree.reset()
            owned = self._pages.swap(owned)
            self._pages.give_back(owned)

    def check(self) -> None:
        """Verify the tree's invariants, 7 and 13. Walks over everything. Errors: InvariantError."""
        super().check()
        with self._lock:
            self._tree.check()
            views = self._tree.nodes(max_nodes=NO_BOUND, max_tokens=NO_BOUND)
            ids = np.concatenate([NOTHING, *(view.columns[0] for view in views)])
            self._pages.check(ids - np.int32(1))
        self._staging.check()
