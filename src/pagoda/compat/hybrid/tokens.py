"""The tokens of a step, from the host or from the device. In: ids as callers have them; out: `Tokens`."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError
from pagoda.ids import FreeList
from pagoda.kernels.entries import Tokens
from pagoda.pools import Staging
from pagoda.pools._arguments import AnyIds, host_ids, require_range

__all__ = ["Known", "read_tokens"]


class Known(NamedTuple):
    """What the host knows of the tokens of a step, when it was given them there."""

    length: int  # tokens of the longest request, those of the step included
    num_tokens: int  # of the step, of the request that has most


def read_tokens(
    request_slots: AnyIds,
    request_ids: AnyIds,
    positions: AnyIds,
    rows: FreeList,
    max_tokens: int,
    staging: Staging,
) -> tuple[Tokens, Known | None]:
    """Tokens on the device of `staging`, and what the host knows of them. Cost and errors: `acquire`."""
    given = {"request_slots": request_slots, "request_ids": request_ids, "positions": positions}
    there: dict[str, torch.Tensor] = {}
    on_host: dict[str, npt.NDArray[np.int64]] = {}
    for name, ids in given.items():
        if _is_there(ids, name, staging.device):
            there[name] = ids
        else:
            on_host[name] = host_ids(ids, name)
    sizes = {name: ids.shape[0] for name, ids in there.items()}
    sizes |= {name: ids.shape[0] for name, ids in on_host.items()}
    if sizes["positions"] != sizes["request_ids"]:
        raise ArgumentError(
            f"{sizes['positions']} positions and {sizes['request_ids']} request_ids: give one of each a token"
        )
    known = None
    if on_host:
        known = _look_at(on_host, sizes["request_slots"], rows, max_tokens)
        sent = staging.send(*(ids.astype(np.int32) for ids in on_host.values()))
        there |= zip(on_host, sent, strict=True)
    return Tokens(there["request_slots"], there["request_ids"], there["positions"]), known


def _is_there(ids: Any, name: str, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Whether ids are a tensor on the device; an ArgumentError for one that kernels do not take."""
    if not isinstance(ids, torch.Tensor) or (ids.device != device and ids.device.type == "cpu"):
        return False
    if ids.device != device:
        raise ArgumentError(f"{name}: give ids on {device} or on the host, not on {ids.device}")
    if ids.dtype != torch.int32 or ids.dim() != 1 or ids.layout != torch.strided or not ids.is_contiguous():
        raise ArgumentError(
            f"{name}: give a contiguous [n] int32 tensor, or ids on the host in a list or an array, "
            f"not {tuple(ids.shape)} {ids.dtype}"
        )
    return True


def _look_at(
    on_host: dict[str, npt.NDArray[np.int64]], batch: int, rows: FreeList, max_tokens: int
) -> Known | None:
    """Checks ids that lie on the host; what they tell of lengths, if all tokens lie there."""
    slots, ids, positions = (on_host.get(name) for name in ("request_slots", "request_ids", "positions"))
    if slots is not None:
        require_range(slots, 0, rows.num_ids, "request_slots", "rows")
        real = slots[slots > 0]
        if np.unique(real).size != real.size:
            raise ArgumentError("request_slots: a row stands twice")
        rows.require_held(real)
    if ids is not None:
        require_range(ids, -1, batch - 1, "request_ids", "requests of the batch, and −1, padding,")
    if positions is not None:
        last = min(max_tokens, 2**31 - 1) - 1
        require_range(positions, -1, last, "positions", "positions, and −1, padding,")
    if ids is None or positions is None:
        return None
    is_real = (ids >= 0) & (positions >= 0)
    if slots is not None and batch:
        is_real &= slots[ids] > 0
    at, whose, where = np.flatnonzero(is_real), ids[is_real], positions[is_real]
    if at.size == 0:
        return Known(0, 0)
    is_next = whose[1:] == whose[:-1]
    begins = np.flatnonzero(np.concatenate([[True], ~is_next]))
    is_apart = is_next & ((where[1:] != where[:-1] + 1) | (at[1:] != at[:-1] + 1))
    if is_apart.any() or np.unique(whose[begins]).size != begins.size:
        raise ArgumentError(
            "positions: tokens of a request do not stand side by side, at positions that rise by one"
        )
    return Known(int(where.max()) + 1, int(np.diff(begins, append=whose.size).max()))
