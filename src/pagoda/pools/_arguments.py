"""Arguments of pools: devices, counts, and ids that may lie on the host or on a device."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError, CaptureError, ConfigError, OutOfRangeError
from pagoda.kernels import on_device
from pagoda.layout._numbers import integer

__all__ = [
    "AnyIds",
    "filled",
    "host_ids",
    "is_unread",
    "layer_number",
    "number",
    "one_id",
    "refuse_capture",
    "require_buffer",
    "require_range",
    "resolve_device",
    "unread_ids",
]

# Ids as callers have them: on the host, or in a device tensor.
AnyIds: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int] | int

_INTS = (torch.int32, torch.int64)


def resolve_device(device: torch.device | str) -> torch.device:
    """The device with its index, or a ConfigError when this machine has none such."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as unknown:
        raise ConfigError(f"device: {device!r} is no device that torch knows") from unknown
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ConfigError(f"device: pools live on 'cpu' or 'cuda', not on {resolved.type!r}")
    if not torch.cuda.is_available():
        raise ConfigError("device: there is no CUDA device on this machine: give device='cpu'")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: there is no cuda:{index}, only {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def number(value: Any, name: str) -> int:
    """An integer argument of a call, not negative, or an ArgumentError that names it."""
    return integer(value, name, 0, ArgumentError)


def one_id(value: Any, name: str, low: int, high: int, what: str) -> int:
    """One id of a call as an integer from `low` to `high`, or an error that names it."""
    try:
        at = operator.index(value)
    except TypeError:
        at = None
    if at is None or isinstance(value, bool):  # a bool is a slip, whatever Python takes it for
        raise ArgumentError(f"{name}: give an integer, not {type(value).__name__}")
    if not low <= at <= high:
        shown = min(max(at, -(2**62)), 2**62)
        raise OutOfRangeError(f"{name} = {shown} is out of range: {what} are {low} to {high}", shown, 0)
    return at


def layer_number(layer: Any, num_layers: int) -> int:
    """The number of a layer, or an ArgumentError."""
    at = number(layer, "layer")
    if at >= num_layers:
        raise ArgumentError(f"layer: this pool has layers 0 to {num_layers - 1}, not {min(at, 10**18)}")
    return at


def filled(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, value: float = 0.0, pinned: bool = False
) -> torch.Tensor:
    """A tensor of one value, made to stay. Errors: ConfigError for more bytes than there are addresses."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= 2**62:
        raise ConfigError(
            f"a tensor of shape {tuple(min(size, 10**18) for size in shape)} has no place in memory"
        )
    # Also where pools are made under inference_mode they are written outside of it.
    with torch.inference_mode(False):
        if value == 0:  # bytes, because zeros of fp8 are not everywhere
            flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            return flat.view(dtype).view(*shape)
        return torch.full(tuple(shape), value, dtype=dtype, device=device)


def require_buffer(
    buffer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """A ConfigError unless a caller's buffer is a tensor that a pool can use as it is."""
    if not isinstance(buffer, torch.Tensor):
        raise ConfigError(f"{name}: give a tensor, not {type(buffer).__name__}")
    found = (tuple(buffer.shape), buffer.dtype, buffer.device)
    if found != (shape, dtype, device):
        raise ConfigError(f"{name} is {found}, not {(shape, dtype, device)}")
    if buffer.layout != torch.strided or not buffer.is_contiguous() or buffer.data_ptr() % 16:
        raise ConfigError(f"{name} is not contiguous, or does not begin at a multiple of 16 bytes")


def refuse_capture(device: torch.device, call: str) -> None:
    """A CaptureError while the current stream of a CUDA device is being captured."""
    if device.type != "cuda":
        return
    with on_device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise CaptureError(f"{call} makes a device tensor, and the stream is being captured: call it before")


def host_ids(ids: AnyIds, name: str) -> npt.NDArray[np.int64]:
    """Ids as one contiguous host array: [n] int64. A device tensor costs one synchronisation."""
    if isinstance(ids, torch.Tensor):
        _require_readable(ids, name)
        if ids.is_cuda:
            refuse_capture(ids.device, f"{name}, read from a device tensor,")
        if ids.numel() == 0:
            return np.zeros(0, dtype=np.int64)
        array = ids.detach().cpu().resolve_neg().numpy()
    else:
        try:
            array = np.asarray(ids)
        except ValueError as ragged:
            raise ArgumentError(f"{name}: give a flat sequence of ids") from ragged
        if array.size and array.dtype.kind not in "iu":
            raise ArgumentError(f"{name}: give integer ids, not {array.dtype}")
        if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ArgumentError(f"{name}: an id does not fit in int64")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(-1)


def require_range(ids: npt.NDArray[np.int64], low: int, high: int, name: str, what: str) -> None:
    """An OutOfRangeError for the first id outside [low, high]."""
    if ids.size == 0 or (int(ids.min()) >= low and int(ids.max()) <= high):
        return
    position = int(np.flatnonzero((ids < low) | (ids > high))[0])
    bad = int(ids[position])
    raise OutOfRangeError(
        f"{name}[{position}] = {bad} is out of range: {what} are {low} to {high}", bad, position
    )


def is_unread(ids: object, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Whether ids are a tensor on this CUDA device: to be used there, never read back."""
    return isinstance(ids, torch.Tensor) and ids.is_cuda and ids.device == device


def unread_ids(ids: torch.Tensor, name: str) -> torch.Tensor:
    """A device tensor of ids as one run: [n] int32 or int64, contiguous."""
    _require_readable(ids, name)
    return ids.detach().resolve_neg().reshape(-1).contiguous()


def _require_readable(ids: torch.Tensor, name: str) -> None:
    if ids.layout != torch.strided or ids.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"{name}: give a dense tensor on the CPU or a CUDA device, not {ids.layout} on {ids.device}"
        )
    if ids.dtype not in _INTS and ids.numel():
        raise ArgumentError(f"{name}: give int32 or int64, not {ids.dtype}")
