"""Tokens and their slots, as callers give them. In: arrays, tensors, sequences; out: host arrays."""

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
    """Return tokens as a flat contiguous host array, [n] int32 or int64. The tree checks their range.

    Such an array, or a CPU tensor over one, is used without a copy and still belongs to the caller. A device
    tensor costs one synchronisation. Errors: ArgumentError.
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
    """Return the pages, slot // page_size, of a sequence's slots: [ceil(num_tokens / page_size)] int32, host.

    Token i is in slot i % page_size of its page; a tail shorter than a page may be anywhere in one page. A
    device tensor costs one synchronisation. Errors: ArgumentError for slots in another number or order;
    OutOfRangeError.
    """
    host = host_tokens(slots, name)
    if host.size != num_tokens:
        raise ArgumentError(f"{name}: give one slot per token of input_ids, {num_tokens}, not {host.size}")
    # The slots of the next page must fit into int32, too: the tree's page ids are page + 1.
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
        raise ArgumentError(f"{name}: give the last {num_tokens - wanted.size} slots in one page")
    return pages


def require_range(ids: HostTokens, low: int, high: int, name: str, what: str) -> None:
    """Raise an OutOfRangeError for the first id outside [low, high]."""
    if ids.size and (int(ids.min()) < low or int(ids.max()) > high):
        require_wide_range(ids.astype(np.int64), low, high, name, what)


def slots_of_pages(pages: npt.NDArray[np.int32], page_size: int) -> npt.NDArray[np.int32]:
    """Return all slots of pages, in order: [pages * page_size] int32."""
    if page_size == 1:
        return pages
    slots = np.empty(pages.size * page_size, dtype=np.int32)
    write_slots(pages, page_size, slots)
    return slots


def write_slots(pages: npt.NDArray[np.int32], page_size: int, room: npt.NDArray[np.int32]) -> None:
    """Write all slots of pages, in order, to `room`: [pages * page_size] int32."""
    by_page = room.reshape(pages.size, page_size)
    by_page[:] = pages[:, None]
    by_page *= page_size
    by_page += np.arange(page_size, dtype=np.int32)
