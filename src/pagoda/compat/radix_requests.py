"""Slots and tree together, as a scheduler uses them: a request matches, locks, allocates, and finishes.

In: requests; out: slots. A page is free, in the tree, or handed out, never two of these (invariant 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat.radix import BaseCacheHandle, RadixCacheHandle, RadixCacheManager
from pagoda.compat.tokens import host_pages, host_tokens
from pagoda.errors import ArgumentError, CapacityError, ConfigError
from pagoda.ids import FreeList
from pagoda.pools.arguments import AnyIds, count, host_ids, number, refuse_capture, require_range

__all__ = ["CacheManager", "Request"]


@dataclass(eq=False)
class Request:
    """One request of a scheduler; a plain record."""

    uid: int
    input_ids: AnyIds
    table_idx: int
    cached_len: int
    output_len: int
    cache_handle: BaseCacheHandle | None = None
    max_tokens: int = 1024

    @property
    def input_len(self) -> int:
        """How many tokens its input has. O(1), of a list O(n)."""
        ids = self.input_ids
        return ids.numel() if isinstance(ids, torch.Tensor) else int(np.size(ids))


class CacheManager:
    """Hands out the slots of pages 1 … num_pages, and caches what finished requests leave.

    Slots of page k are k * page_size … (k + 1) * page_size − 1; page 0 is padding. `manager` is the tree:
    what is inserted there is no longer handed out, what is evicted there is. Call it between captures.
    Several threads may call it.

    Errors: ConfigError for sizes that are not positive or pass int32, or for a device that is not there.
    """

    def __init__(self, device: torch.device | str, num_pages: int, page_size: int = 1) -> None:
        self.num_pages, self.page_size = count(num_pages, "num_pages", low=0), count(page_size, "page_size")
        if (self.num_pages + 2) * self.page_size > 2**31:
            raise ConfigError("num_pages: slots pass 2^31: give fewer")
        self._pages = FreeList(self.num_pages, what="pages")
        self.manager = RadixCacheManager(device, self.page_size)
        self.manager._pages.source = self._pages
        self.device = device
        # The tree's own: a call of `manager` never comes in the middle of one here.
        self._lock, self._staging = self.manager._lock, self.manager._staging

    @property
    def available_size(self) -> int:
        """Tokens that can be allocated now: free or evictable, in whole pages. O(1)."""
        with self._lock:
            return self._pages.num_free * self.page_size + self.manager.size_info.evictable_size

    def match_req(self, req: Request) -> tuple[RadixCacheHandle, torch.Tensor]:
        """The longest cached prefix of a request's input but for its last token, which is to be computed.

        Cost, result and errors: `RadixCacheManager.match_prefix`; ArgumentError also for an empty input.
        """
        if not hasattr(req, "input_ids"):
            raise ArgumentError(f"req: give a Request, not {type(req).__name__}")
        refuse_capture(self._staging.device, "match_req")
        tokens = host_tokens(req.input_ids, "input_ids")
        if tokens.size == 0:
            raise ArgumentError("input_ids: give at least one token, of which something can be computed")
        return self.manager.match_prefix(tokens[:-1])

    def lock(self, handle: BaseCacheHandle | None) -> None:
        """Protect what a handle found from eviction. Cost and errors: `RadixCacheManager.lock_handle`."""
        self.manager.lock_handle(handle)

    def unlock(self, handle: BaseCacheHandle | None) -> None:
        """Take back one lock of a handle. Cost and errors: `RadixCacheManager.lock_handle`."""
        self.manager.lock_handle(handle, unlock=True)

    def allocate(self, needed_len: int) -> torch.Tensor:
        """needed_len slots, [needed_len] int32 on `device`: whole pages are taken, cold prefixes evicted.

        The caller holds the pages. Cost O(needed_len) on the host and one copy that nobody waits for.
        Errors: CapacityError with what was asked, what is available and the total, and nothing is evicted;
        ArgumentError; CaptureError. Where the device has no memory for the answer, what was evicted
        stays so, and is free.
        """
        refuse_capture(self._staging.device, "allocate")
        slots = self.allocate_host(needed_len)
        try:
            return self._staging.send(slots)[0]
        except BaseException:  # no memory on the device, Ctrl-C
            self._pages.free(slots[:: self.page_size] // self.page_size)
            raise

    def allocate_host(self, needed_len: int) -> npt.NDArray[np.int32]:
        """As `allocate`, but [needed_len] int32 on the host: no device is touched."""
        wanted = number(needed_len, "needed_len")
        with self._lock:
            available = self.available_size
            if wanted > available:
                raise CapacityError("slots", wanted, available, self.num_pages * self.page_size)
            num_missing = -(-wanted // self.page_size) - self._pages.num_free
            if num_missing > 0:
                self._pages.free(self.manager._evict(num_missing * self.page_size))
            return self._pages.grow([0], [wanted], [0], self.page_size)

    def free(self, indices: AnyIds) -> None:
        """Give back slots that are handed out: with page_size > 1 the pages they name, each once.

        For requests that end without a trace, and for what was evicted by `manager`. Cost O(n); a device
        tensor costs one synchronisation. Errors: NotHeldError, also for the tree's pages; DoubleFreeError,
        OutOfRangeError, ArgumentError; nothing is freed then.
        """
        slots = host_ids(indices, "indices")
        require_range(slots, self.page_size, (self.num_pages + 1) * self.page_size - 1, "indices", "slots")
        pages = (slots // self.page_size).astype(np.int32)
        positions: Sequence[int] = range(slots.size)
        if self.page_size > 1:
            pages, first = np.unique(pages, return_index=True)
            positions = first.tolist()
        with self._lock:
            self.manager._pages.require_outside(pages, positions)
            self._pages.free(pages)

    def free_and_cache_finished_req(
        self, old_handle: BaseCacheHandle | None, input_ids: AnyIds, indices: AnyIds
    ) -> None:
        """Cache what a request computed, free what is cached twice, and unlock what it had matched.

        `old_handle` is that of the request's match, locked; None where it had none. Whose `indices` are,
        with n tokens in all::

                                before              after
            [0, old)            the tree's          the tree's: what old_handle locked
            [old, cached)       the request's       free: somebody cached these tokens meanwhile
            [cached, whole)     the request's       the tree's
            [whole, n)          the request's       free: a tail shorter than a page

        Cost: O(n); device tensors cost one synchronisation each. Errors: ArgumentError for tokens or slots
        that are not those of the handle, or in no pages; NotHeldError for slots that are not handed out and
        for a handle that is not locked; DoubleFreeError, OutOfRangeError, StaleError. Nothing changes then.
        """
        size, tree = self.page_size, self.manager
        tokens = host_tokens(input_ids, "input_ids")
        pages = host_pages(indices, tokens.size, size, "indices")
        with self._lock:
            handle = None if old_handle is None else tree._own(old_handle)
            lease = None if handle is None else tree._lease(handle)
            old = 0
            if handle is not None:
                old = handle.cached_len // size
                is_same = np.array_equal(tokens[: handle.cached_len], handle._tokens)
                if not is_same or not np.array_equal(pages[:old], handle._pages):
                    raise ArgumentError("old_handle: input_ids and indices do not begin as what it matched")
            tree._pages.require_outside(pages[old:], range(old * size, tokens.size, size))
            cached, whole = tree._insert(tokens, pages, lease) // size, tokens.size // size
            self._pages.free(np.concatenate([pages[old:cached], pages[whole:]]))
            if handle is not None:
                tree._release(handle)

    def reset(self) -> None:
        """Make every page free; what was cached, locked or handed out is void. O(nodes + pages / 64)."""
        with self._lock:
            self.manager.reset()
            self._pages.reset()

    def check(self) -> None:
        """Verify invariants 1 to 4, 7, 13 and the tree's. Cost: a walk over it. Errors: InvariantError."""
        self.manager.check()
