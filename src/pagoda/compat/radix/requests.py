"""Slots and tree together, as a scheduler uses them: a request matches, locks, allocates and finishes.

In: requests; out: slots. A page is either free, in the tree, or handed out (invariant 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat.radix.answers import Answer
from pagoda.compat.radix.interface import BaseCacheHandle
from pagoda.compat.radix.manager import RadixCacheHandle, RadixCacheManager
from pagoda.compat.tokens import host_pages, host_tokens
from pagoda.compat.tokens import require_range as require_token_range
from pagoda.errors import ArgumentError, CapacityError, ConfigError, NotHeldError, OutOfRangeError
from pagoda.ids import FreeList
from pagoda.layout._numbers import count
from pagoda.pools._arguments import AnyIds, host_ids, number, refuse_capture, require_range, resolve_device

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
        """Tokens of its input."""
        ids = self.input_ids
        return ids.numel() if isinstance(ids, torch.Tensor) else int(np.size(ids))


class CacheManager:
    """Hands out the slots of pages 1 … num_pages, and caches the tokens of finished requests.

    Slots of page k are k * page_size … (k + 1) * page_size − 1; page 0 is padding. `manager` is the tree:
    pages inserted there are no longer handed out, pages evicted there count as handed out, and its `reset`
    frees the cached ones. Call it outside of captures. Thread-safe.

    Errors: ConfigError for sizes that are not positive or exceed int32, or for an unknown device.
    """

    def __init__(self, device: torch.device | str, num_pages: int, page_size: int = 1) -> None:
        self.num_pages, self.page_size = count(num_pages, "num_pages", low=0), count(page_size, "page_size")
        if (self.num_pages + 2) * self.page_size > 2**31:
            raise ConfigError("num_pages: slots exceed 2^31: give fewer pages")
        self._pages = FreeList(self.num_pages, what="pages")
        self.manager = RadixCacheManager(device, self.page_size, source=self._pages)
        self.device, self._device = device, resolve_device(device)
        # The tree's own lock, so that no call of `manager` interrupts one here.
        self._lock = self.manager.mutex

    @property
    def available_size(self) -> int:
        """Tokens that can be allocated now, free or evictable, in whole pages."""
        with self._lock:
            return self._pages.num_free * self.page_size + self.manager.size_info.evictable_size

    def match_req(self, req: Request) -> tuple[RadixCacheHandle, torch.Tensor]:
        """Match a request's input without its last token, which has to be computed.

        Cost, result and errors are those of `RadixCacheManager.match_prefix`; ArgumentError also for an empty
        input.
        """
        if not hasattr(req, "input_ids"):
            raise ArgumentError(f"req: give a Request, not {type(req).__name__}")
        refuse_capture(self._device, "match_req")
        tokens = host_tokens(req.input_ids, "input_ids")
        if tokens.size == 0:
            raise ArgumentError("input_ids: give at least one token")
        require_token_range(tokens[-1:], 0, 2**31 - 1, "the last of input_ids", "tokens")
        return self.manager.match_prefix(tokens[:-1])

    def lock(self, handle: BaseCacheHandle | None) -> None:
        """Protect the prefix of a handle from eviction. Errors: those of `RadixCacheManager.lock_handle`."""
        self.manager.lock_handle(handle)

    def unlock(self, handle: BaseCacheHandle | None) -> None:
        """Undo one lock of a handle. Errors: those of `RadixCacheManager.lock_handle`."""
        self.manager.lock_handle(handle, unlock=True)

    def allocate(self, needed_len: int, after: int | torch.Tensor | None = None) -> torch.Tensor:
        """Return needed_len slots, [needed_len] int32 on `device`, evicting unused prefixes if necessary.

        Whole pages are taken, and the caller holds them, the rest of the last one included. A request that
        grows gives its last slot as `after`: the rest of that page comes first, then new pages. So an engine
        calls::

            slots = cat([indices, allocate(input_len - cached_len)])          for the input
            slots = cat([slots, allocate(1, after=slots[-1])])                for each token that it generates

        Cost: O(needed_len) on the host and one asynchronous copy; `after` in a device tensor costs one
        synchronisation. Errors: CapacityError with the requested, available and total numbers; NotHeldError,
        OutOfRangeError for a last slot that is not handed out; ArgumentError; CaptureError. Nothing is
        evicted then, nor if there is no memory for the result.
        """
        refuse_capture(self._device, "allocate")
        wanted, last = _growth(needed_len, after)
        self._require_available(wanted, last)
        # Allocate first, and without our lock: a finalizer in another thread may wait for the lock.
        answer = Answer(wanted, self._device)
        answer.room[:] = self._allocate(wanted, last)
        return answer.send()

    def allocate_host(
        self, needed_len: int, after: int | torch.Tensor | None = None
    ) -> npt.NDArray[np.int32]:
        """As `allocate`, but [needed_len] int32 on the host: no device is touched."""
        return self._allocate(*_growth(needed_len, after))

    def _allocate(self, wanted: int, last: int | None) -> npt.NDArray[np.int32]:
        size = self.page_size
        with self._lock:
            room = self._require_available(wanted, last)
            old_len = 0 if last is None else size - room  # in the last page; earlier pages do not matter
            num_missing = -(-(wanted - room) // size) - self._pages.num_free
            if num_missing > 0:
                self._pages.free_slots(self.manager.evict_host(num_missing * size), size)
            return self._pages.grow([old_len], [old_len + wanted], [last or 0], size)

    def _require_available(self, wanted: int, last: int | None) -> int:
        """Return the slots left in the last slot's page. Errors: CapacityError if too few are available."""
        size = self.page_size
        with self._lock:
            room = 0
            if last is not None:
                page, room = last // size, size - 1 - last % size
                if not 1 <= page <= self.num_pages:
                    shown = min(last, 10**18)
                    raise OutOfRangeError(f"after = {shown}: there is no page {shown // size}", last, 0)
                # A match ends at the end of a page, which the tree owns, and nothing is left in that page.
                if not self._pages.is_held(page) or (room and self.manager.owns(page)):
                    raise NotHeldError(
                        f"after = {last}: page {page} is not handed out: give the request's last slot",
                        last,
                        0,
                    )
            available = self.available_size + room
            if wanted > available:
                raise CapacityError("slots", wanted, available, self.num_pages * size)
            return room

    def free(self, indices: AnyIds) -> None:
        """Free slots that are handed out: with page_size > 1, the pages of these slots, each once.

        For requests that end without being cached, and for slots that `manager` evicted. A device tensor
        costs one synchronisation. Errors: NotHeldError, also for pages of the tree; DoubleFreeError,
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
            self.manager.require_handed_out(pages, positions)
            self._pages.free(pages)

    def free_and_cache_finished_req(
        self, old_handle: BaseCacheHandle | None, input_ids: AnyIds, indices: AnyIds
    ) -> None:
        """Cache a finished request's tokens, free duplicates, and unlock the prefix that it had matched.

        `old_handle` is the locked handle of the request's match, or None. The owner of `indices`, for n
        tokens in all::

                                before              after
            [0, old)            the tree            the tree: the prefix of old_handle
            [old, cached)       the request         free: another request has cached these tokens meanwhile
            [cached, whole)     the request         the tree
            [whole, n)          the request         free: a tail shorter than a page

        Device tensors cost one synchronisation each. Errors: ArgumentError for tokens or slots that are not
        those of the handle, or slots that do not form pages; NotHeldError for slots that are not handed out
        and for a handle that is not locked; DoubleFreeError, OutOfRangeError, StaleError. Nothing changes
        then.
        """
        tokens = host_tokens(input_ids, "input_ids")
        pages = host_pages(indices, tokens.size, self.page_size, "indices")
        with self._lock:
            self._pages.free(self.manager.finish(old_handle, tokens, pages))

    def reset(self) -> None:
        """Free every page, whether it was cached, locked or handed out."""
        with self._lock:
            self.manager.reset()
            self._pages.reset()

    def check(self) -> None:
        """Verify invariants 1 to 4, 7, 13 and the tree's. Walks over everything. Errors: InvariantError."""
        self.manager.check()


def _growth(needed_len: Any, after: Any) -> tuple[int, int | None]:
    return number(needed_len, "needed_len"), None if after is None else number(after, "after")
