"""The tokens of a step, on the host or on the device. In: ids as callers give them; out: `Tokens`."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat._words import in_words
from pagoda.errors import ArgumentError, UsageError
from pagoda.kernels.entries import Tokens
from pagoda.manager import Manager
from pagoda.pools import Staging
from pagoda.pools._arguments import AnyIds, host_ids, require_range
from pagoda.pools._layer_step import Known

__all__ = ["read_tokens"]


def read_tokens(
    request_slots: AnyIds,
    request_ids: AnyIds,
    positions: AnyIds,
    manager: Manager,
    max_tokens: int,
    staging: Staging,
) -> tuple[Tokens, Known | None]:
    """Return tokens on the device of `staging`, and what is known about them. Errors: those of `acquire`."""
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
            f"there are {sizes['positions']} positions and {sizes['request_ids']} request_ids: give one of "
            "each per token"
        )
    known = None
    if on_host:
        known = _look_at(on_host, sizes["request_slots"], manager, max_tokens)
        sent = staging.send(*(ids.astype(np.int32) for ids in on_host.values()))
        there |= zip(on_host, sent, strict=True)
    return Tokens(there["request_slots"], there["request_ids"], there["positions"]), known


def _is_there(ids: Any, name: str, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Whether ids are a tensor on the device. Errors: ArgumentError for one that kernels do not take."""
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
    on_host: dict[str, npt.NDArray[np.int64]], batch: int, manager: Manager, max_tokens: int
) -> Known | None:
    """Check ids on the host, and return what they tell about lengths if all tokens are there."""
    slots, ids, positions = (on_host.get(name) for name in ("request_slots", "request_ids", "positions"))
    if slots is not None:
        require_range(slots, 0, manager.num_rows, "request_slots", "rows")
        real = slots[slots > 0]
        if np.unique(real).size != real.size:
            raise ArgumentError("request_slots has a duplicate: give each row once")
        try:
            manager.reserved(real.astype(np.int32))
        except UsageError as error:
            in_words(error, rows="request_slots")
            raise
    if ids is not None:
        require_range(ids, -1, batch - 1, "request_ids", "requests of the batch, and −1 for padding,")
    if positions is not None:
        last = min(max_tokens, 2**31 - 1) - 1
        require_range(positions, -1, last, "positions", "positions, and −1 for padding,")
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
        raise ArgumentError("positions: give the tokens of a request side by side, at consecutive positions")
    return Known(int(where.max()) + 1, int(np.diff(begins, append=whose.size).max()))
