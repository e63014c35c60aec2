"""Slots and tree together, as a scheduler uses them: a request matches, locks, allocates, and finishes.

In: requests; out: slots. A page is free, in the tree, or handed out, never two of these (invariant 13).
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
        """How many tokens its input has. O(1), of a list O(n)."""
        ids = self.input_ids
        return ids.numel() if isinstance(ids, torch.Tensor) else int(np.size(ids))


class CacheManager:
    """Hands out the slots of pages 1 … num_pages, and caches what finished requests leave.

    Slots of page k are k * page_size … (k + 1) * page_size − 1; page 0 is padding. `manager` is the tree:
    what is inserted there is no longer handed out, what is evicted there is, and a `reset` there makes
    what was cached free. Call it between captures. Several threads may call it.

    Errors: ConfigError for sizes that are not positive or pass int32, or for a device that is not there.
    """

    def __init__(self, device: torch.device | str, num_pages: int, page_size: int = 1) -> None:
        self.num_pages, self.page_size = count(num_pages, "num_pages", low=0), count(page_size, "page_size")
        if (self.num_pages + 2) * self.page_size > 2**31:
            raise ConfigError("num_pages: slots pass 2^31: give fewer")
        self._pages = FreeList(self.num_pages, what="pages")
        self.manager = RadixCacheManager(device, self.page_size, source=self._pages)
        self.device, self._device = device, resolve_device(device)
        # The tree's own: a call of `manager` never comes in the middle of one here.
        self._lock = self.manager.mutex

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
        refuse_capture(self._device, "match_req")
        tokens = host_tokens(req.input_ids, "input_ids")
        if tokens.size == 0:
            raise ArgumentError("input_ids: give at least one token, of which something can be computed")
        require_token_range(tokens[-1:], 0, 2**31 - 1, "the last of input_ids", "tokens")
        return self.manager.match_prefix(tokens[:-1])

    def lock(self, handle: BaseCacheHandle | None) -> None:
        """Protect what a handle found from eviction. Cost and errors: `RadixCacheManager.lock_handle`."""
        self.manager.lock_handle(handle)

    def unlock(self, handle: BaseCacheHandle | None) -> None:
        """Take back one lock of a handle. Cost and errors: `RadixCacheManager.lock_handle`."""
        self.manager.lock_handle(handle, unlock=True)

    def allocate(self, needed_len: int, after: int | torch.Tensor | None = None) -> torch.Tensor:
        """needed_len slots, [needed_len] int32 on `device`: whole pages are taken, cold prefixes evicted.

        The caller holds the pages, the rest of the last one too. A request that grows gives its last slot
        as `after`: the rest of that page comes first, then new pages. So an engine calls::

            slots = cat([indices, allocate(input_len - cached_len)])          for the input
            slots = cat([slots, allocate(1, after=slots[-1])])                for each token that it generates

        Cost O(needed_len) on the host and one copy that nobody waits for; `after` in a device tensor costs
        one synchronisation. Errors: CapacityError with what was asked, what is available and the total;
        NotHeldError, OutOfRangeError for a last slot that is not handed out; ArgumentError; CaptureError.
        Nothing is evicted then, nor where there is no memory for the answer.
        """
        refuse_capture(self._device, "allocate")
        wanted, last = _growth(needed_len, after)
        self._require_available(wanted, last)
        # Memory comes first, and without our lock: a finalizer in another thread may wait for that.
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
            old_len = 0 if last is None else size - room  # in the last page; those before do not matter
            num_missing = -(-(wanted - room) // size) - self._pages.num_free
            if num_missing > 0:
                self._pages.free_slots(self.manager.evict_host(num_missing * size), size)
            return self._pages.grow([old_len], [old_len + wanted], [last or 0], size)

    def _require_available(self, wanted: int, last: int | None) -> int:
        """The room in the page of a last slot; an error unless so many slots can be had behind it."""
        size = self.page_size
        with self._lock:
            room = 0
            if last is not None:
                page, room = last // size, size - 1 - last % size
                if not 1 <= page <= self.num_pages:
                    shown = min(last, 10**18)
                    raise OutOfRangeError(f"after = {shown}: there is no page {shown // size}", last, 0)
                # What was matched ends with its page, the tree's, and needs no room in it.
                if not self._pages.is_held(page) or (room and self.manager.owns(page)):
                    raise NotHeldError(f"after = {last}: page {page} is not handed out", last, 0)
            available = self.available_size + room
            if wanted > available:
                raise CapacityError("slots", wanted, available, self.num_pages * size)
            return room

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
            self.manager.require_handed_out(pages, positions)
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
        tokens = host_tokens(input_ids, "input_ids")
        pages = host_pages(indices, tokens.size, self.page_size, "indices")
        with self._lock:
            self._pages.free(self.manager.finish(old_handle, tokens, pages))

    def reset(self) -> None:
        """Make every page free; what was cached, locked or handed out is void. O(nodes + pages)."""
        with self._lock:
            self.manager.reset()
            self._pages.reset()

    def check(self) -> None:
        """Verify invariants 1 to 4, 7, 13 and the tree's. Cost: a walk over it. Errors: InvariantError."""
        self.manager.check()


def _growth(needed_len: Any, after: Any) -> tuple[int, int | None]:
    return number(needed_len, "needed_len"), None if after is None else number(after, "after")
