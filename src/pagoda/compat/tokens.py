"""Tokens, and the slots they lie in, as callers have them. In: anything; out: host arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError
from pagoda.pools._arguments import AnyIds, host_ids
from pagoda.pools._arguments import require_range as require_wide_range

__all__ = ["HostTokens", "host_pages", "host_tokens", "require_range", "slots_of_pages", "write_slots"]

# Tokens that the native tree reads as they are.
HostTokens: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_INTS = (np.dtype(np.int32), np.dtype(np.int64))
_TORCH_INTS = (torch.int32, torch.int64)


def host_tokens(tokens: AnyIds, name: str) -> HostTokens:
    """Tokens as a flat contiguous host array, [n] int32 or int64, in which the tree finds what are none.

    What is such an array already, or a tensor over one, is used as it is: O(1), and the caller's still.
    Anything else O(n); a device tensor costs one synchronisation. Errors: ArgumentError.
    """
    array: Any = tokens
    if (
        isinstance(tokens, torch.Tensor)
        and tokens.device.type == "cpu"
        and tokens.layout == torch.strided
        and tokens.dtype in _TORCH_INTS
        and not tokens.is_neg()
    ):
        array = tokens.detach().numpy()
    if type(array) is np.ndarray and array.dtype in _INTS and array.ndim == 1 and array.flags.c_contiguous:
        return array
    return host_ids(tokens, name)


def host_pages(slots: AnyIds, num_tokens: int, page_size: int, name: str) -> npt.NDArray[np.int32]:
    """The pages, slot // page_size, of a sequence's slots: [ceil(num_tokens / page_size)] int32, host.

    Token i lies in slot i % page_size of its page; a tail shorter than a page lies anywhere in one page.
    O(n); a device tensor costs one synchronisation. Errors: ArgumentError for slots of another number
    or order; OutOfRangeError.
    """
    host = host_tokens(slots, name)
    if host.size != num_tokens:
        raise ArgumentError(f"{name}: give one slot a token, {num_tokens} in all, not {host.size}")
    # The page behind the last one has slots of int32 too: the tree calls a page by its number + 1.
    require_range(host, 0, 2**31 - 1 - page_size, name, "slots")
    if page_size == 1:
        return host.astype(np.int32, copy=False)
    pages = (host[::page_size] // page_size).astype(np.int32)
    whole = num_tokens // page_size
    wanted = slots_of_pages(pages[:whole], page_size)
    wrong = np.flatnonzero(host[: wanted.size] != wanted)
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(
            f"{name}[{at}] = {int(host[at])}: give whole pages in order, token i in slot i % {page_size} "
            "of its page"
        )
    if (host[wanted.size :] // page_size != pages[whole:]).any():
        raise ArgumentError(f"{name}: the last {num_tokens - wanted.size} lie in several pages, not in one")
    return pages


def require_range(ids: HostTokens, low: int, high: int, name: str, what: str) -> None:
    """An OutOfRangeError for the first id outside [low, high]. O(n)."""
    if ids.size and (int(ids.min()) < low or int(ids.max()) > high):
        require_wide_range(ids.astype(np.int64), low, high, name, what)


def slots_of_pages(pages: npt.NDArray[np.int32], page_size: int) -> npt.NDArray[np.int32]:
    """All slots of pages, in order: [pages * page_size] int32. O(slots)."""
    if page_size == 1:
        return pages
    slots = np.empty(pages.size * page_size, dtype=np.int32)
    write_slots(pages, page_size, slots)
    return slots


def write_slots(pages: npt.NDArray[np.int32], page_size: int, room: npt.NDArray[np.int32]) -> None:
    """All slots of pages, in order, into `room`: [pages * page_size] int32. O(slots)."""
    by_page = room.reshape(pages.size, page_size)
    by_page[:] = pages[:, None]
    by_page *= page_size
    by_page += np.arange(page_size, dtype=np.int32)
