"""`RadixCacheManager`: a cache of slots over `PrefixTree`.

In: tokens; out: the slots that hold them. Indices are slots, slot = page * page_size + offset, and may
begin at 0: the tree knows a page by its number + 1. Owns the pages it was given until it evicts them
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

from pagoda.compat.radix.answers import Answer
from pagoda.compat.radix.interface import BaseCacheHandle, BaseCacheManager, SizeInfo
from pagoda.compat.radix.pages import TreePages
from pagoda.compat.radix.picture import NO_BOUND, RadixTreeNode, radix_root
from pagoda.compat.tokens import HostTokens, host_pages, host_tokens, slots_of_pages, write_slots
from pagoda.errors import AlreadyHeldError, ArgumentError, CapacityError, NotHeldError, StaleError
from pagoda.ids import FreeList
from pagoda.layout._numbers import count
from pagoda.pools import Staging
from pagoda.pools._arguments import AnyIds, number, refuse_capture
from pagoda.tree import Lease, PrefixTree

__all__ = ["RadixCacheHandle", "RadixCacheManager"]

NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class RadixCacheHandle(BaseCacheHandle):
    """What a match in a `RadixCacheManager` found; one made by hand belongs to none."""

    _manager: RadixCacheManager | None = field(default=None, repr=False)
    _tokens: HostTokens = field(default_factory=lambda: NOTHING, repr=False)  # [cached_len]
    _pages: npt.NDArray[np.int32] = field(
        default_factory=lambda: NOTHING, repr=False
    )  # [cached_len / page_size]
    _leases: list[Lease] = field(default_factory=list, repr=False)  # one a lock


class RadixCacheManager(BaseCacheManager):
    """A cache of prefixes in whole pages, evicted from the coldest tails.

    `source` is the free-list that pages come from, where one keeps them: only what is held there can be
    inserted, and a `reset` frees there what was cached. Call it between captures. Several threads may
    call it.

    Errors: ConfigError for a page_size that is not positive or a device that is not there.
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
        """Serialises all calls: whoever holds it makes several of them as one. O(1)."""
        return self._lock

    @property
    def size_info(self) -> SizeInfo:
        """How many cached tokens are evictable, and how many locks protect. O(1)."""
        with self._lock:
            return SizeInfo(self._tree.evictable_tokens, self._tree.protected_tokens)

    @property
    def root_node(self) -> RadixTreeNode:
        """The tree as it is now, to be looked at; the root has no tokens. Cost: O(tokens)."""
        with self._lock:
            return radix_root(self._tree)

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

        `indices` has one slot a token: whole pages in order, token i in slot i % page_size of its page; the
        tail lies anywhere in one page. Cost: O(tokens); device tensors cost one synchronisation each.
        Errors: ArgumentError, OutOfRangeError; AlreadyHeldError for pages that are in the tree or stand
        twice; NotHeldError for those that a `CacheManager` over this tree has not handed out.
        """
        tokens = host_tokens(input_ids, "input_ids")
        pages = host_pages(indices, tokens.size, self.page_size, "indices")
        size, whole = self.page_size, tokens.size // self.page_size
        with self._lock:
            begin = self._tree.match_length(tokens) // size
            positions = range(begin * size, whole * size, size)
            self._pages.require_outside(pages[begin:whole], positions, AlreadyHeldError)
            return self._insert(tokens, pages, begin, None) * size

    def _insert(
        self, tokens: HostTokens, pages: npt.NDArray[np.int32], begin: int, lease: Lease | None
    ) -> int:
        """Cache a sequence, the beginning of which a lease may hold; how many pages were cached.

        That should be `begin`, and nothing stands against the pages behind it becoming the tree's.
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
        """Cache what a request computed and take back one lock of its handle; the pages that stay its own.

        `pages` are those of all its tokens, the first of them what the handle found: what is cached
        already behind these, and the page of a tail, stay the caller's, to be freed once. Cost: O(tokens).
        Errors: `CacheManager.free_and_cache_finished_req`.
        """
        size, whole = self.page_size, tokens.size // self.page_size
        with self._lock:
            own = None if handle is None else self._own(handle)
            lease = None if own is None else self._lease(own)
            old = 0
            if own is not None:
                old = own.cached_len // size
                is_same = np.array_equal(tokens[: own.cached_len], own._tokens)
                if not is_same or not np.array_equal(pages[:old], own._pages):
                    raise ArgumentError("old_handle: input_ids and indices do not begin as what it matched")
            positions = range(old * size, tokens.size, size)
            self._pages.require_outside(pages[old:], positions, NotHeldError)
            begin = self._tree.match_length(tokens) // size
            cached = self._insert(tokens, pages, begin, lease)
            if own is not None:
                self._release(own)
            return np.concatenate([pages[old:cached], pages[whole:]])

    def owns(self, page: int) -> bool:
        """Whether a page is the tree's. O(1)."""
        with self._lock:
            return self._pages.owns(page)

    def require_handed_out(self, pages: npt.NDArray[np.int32], positions: Sequence[int]) -> None:
        """An error unless every page is held in `source` and none is the tree's.

        `positions` are theirs in `indices`, for errors. O(pages). Errors: NotHeldError, DoubleFreeError,
        OutOfRangeError.
        """
        with self._lock:
            self._pages.require_outside(pages, positions, NotHeldError)

    def evict(self, size: int) -> torch.Tensor:
        """Slots of `size` tokens, rounded up to pages, off the tails of the coldest leaves: [n] int32.

        They lie on `device` and are the caller's now. A parent becomes a leaf when its last child goes. Cost:
        what it evicts, and one copy that nobody waits for. Errors: CapacityError when less is
        evictable; ArgumentError; CaptureError. Where there is no memory for the answer, nothing is evicted.
        """
        refuse_capture(self._staging.device, "evict")
        wanted = number(size, "size")
        # Memory comes first, and without our lock: a finalizer in another thread may wait for that.
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
        """How many slots evicting so many tokens frees, or a CapacityError."""
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
        """Forget everything, locks included; all slots are free in `source`, without one the caller's.

        Cost: O(nodes + pages).
        """
        with self._lock:
            # Made first: between the two calls nothing is made, so no finalizer comes between them.
            owned: set[int] = set()
            self._tree.reset()
            owned = self._pages.swap(owned)
            self._pages.give_back(owned)

    def check(self) -> None:
        """Verify the tree's invariants, 7 and 13. Cost: a walk over all of it. Errors: InvariantError."""
        super().check()
        with self._lock:
            self._tree.check()
            views = self._tree.nodes(max_nodes=NO_BOUND, max_tokens=NO_BOUND)
            ids = np.concatenate([NOTHING, *(view.columns[0] for view in views)])
            self._pages.check(ids - np.int32(1))
        self._staging.check()
