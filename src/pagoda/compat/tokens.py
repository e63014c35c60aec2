"""Tokens, and the slots they lie in, as callers have them. In: anything; out: host arrays that are ours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.errors import ArgumentError
from pagoda.pools.arguments import AnyIds, host_ids, require_range

__all__ = ["host_pages", "host_tokens", "slots_of_pages"]


def host_tokens(tokens: AnyIds, name: str) -> npt.NDArray[np.int32]:
    """Tokens as a fresh host array, [n] int32. O(n); a device tensor costs one synchronisation."""
    host = host_ids(tokens, name)
    require_range(host, 0, 2**31 - 1, name, "tokens")
    return host.astype(np.int32)


def host_pages(slots: AnyIds, num_tokens: int, page_size: int, name: str) -> npt.NDArray[np.int32]:
    """The pages, slot // page_size, of a sequence's slots: [ceil(num_tokens / page_size)] int32, host.

    Token i lies in slot i % page_size of its page. O(n); a device tensor costs one synchronisation.
    Errors: ArgumentError for slots of another number or order; OutOfRangeError.
    """
    host = host_ids(slots, name)
    if host.size != num_tokens:
        raise ArgumentError(f"{name}: give one slot a token, {num_tokens} in all, not {host.size}")
    # The page behind the last one has slots of int32 too: the tree calls a page by its number + 1.
    require_range(host, 0, 2**31 - 1 - page_size, name, "slots")
    pages = (host[::page_size] // page_size).astype(np.int32)
    if page_size > 1:
        offsets = np.arange(num_tokens)
        wrong = np.flatnonzero(host != pages[offsets // page_size] * page_size + offsets % page_size)
        if wrong.size:
            at = int(wrong[0])
            raise ArgumentError(
                f"{name}[{at}] = {int(host[at])}: give whole pages in order, token i in slot i % {page_size} "
                "of its page"
            )
    return pages


def slots_of_pages(pages: npt.NDArray[np.int32], page_size: int) -> npt.NDArray[np.int32]:
    """All slots of pages, in order: [pages * page_size] int32. O(slots)."""
    if page_size == 1 or pages.size == 0:
        return pages
    offsets = np.arange(page_size, dtype=np.int32)
    slots: npt.NDArray[np.int32] = (pages[:, None] * np.int32(page_size) + offsets).reshape(-1)
    return slots
