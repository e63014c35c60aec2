"""Arguments of pools: devices, counts, and ids on the host or on a device.

In: what callers give; out: checked values, or an error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError, CaptureError, ConfigError, OutOfRangeError
from pagoda.kernels import on_device
from pagoda.layout._numbers import as_integer, integer

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

# Ids as callers give them: on the host, or in a device tensor.
AnyIds: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int] | int

_INTS = (torch.int32, torch.int64)
_BOOLS = {bool, np.bool_}
_BOOL_DTYPES = (torch.bool, np.dtype(bool))


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the device with its index. Errors: ConfigError if this machine does not have it."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as unknown:
        raise ConfigError(f"device: torch knows no device {device!r}: give 'cpu' or 'cuda'") from unknown
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ConfigError(f"device: pools are on 'cpu' or 'cuda', not on {resolved.type!r}")
    if not torch.cuda.is_available():
        raise ConfigError("device: this machine has no CUDA device: give 'cpu'")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: cuda:{index} does not exist: CUDA devices: {torch.cuda.device_count()}")
    return torch.device("cuda", index)


def number(value: Any, name: str) -> int:
    """Return an argument as an integer that is not negative. Errors: ArgumentError, naming it."""
    return integer(value, name, 0, ArgumentError)


def one_id(value: Any, name: str, low: int, high: int, what: str) -> int:
    """Return an id as an integer from `low` to `high`. Errors: ArgumentError, OutOfRangeError, naming it."""
    at = as_integer(value)
    if at is None:
        raise ArgumentError(f"{name}: give an integer, not {type(value).__name__}")
    if not low <= at <= high:
        shown = min(max(at, -(2**62)), 2**62)
        raise OutOfRangeError(f"{name} = {shown} is out of range: {what} are {low} to {high}", shown, 0)
    return at


def layer_number(layer: Any, num_layers: int, name: str = "layer") -> int:
    """Return the number of a layer of a pool. Errors: ArgumentError."""
    at = number(layer, name)
    if at >= num_layers:
        raise ArgumentError(f"{name}: this pool has layers 0 to {num_layers - 1}, not {min(at, 10**18)}")
    return at


def filled(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, value: float = 0.0, pinned: bool = False
) -> torch.Tensor:
    """Allocate a tensor filled with one value. Errors: ConfigError for a size beyond any memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= 2**62:
        raise ConfigError(
            f"a tensor of shape {tuple(min(size, 10**18) for size in shape)} exceeds the address space: "
            "give smaller sizes"
        )
    # Pools are written outside of inference_mode even if they were made under it.
    with torch.inference_mode(False):
        if value == 0:  # as bytes, because torch cannot make zeros of fp8 everywhere
            flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            return flat.view(dtype).view(*shape)
        return torch.full(tuple(shape), value, dtype=dtype, device=device)


def require_buffer(
    buffer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """Raise a ConfigError unless a caller's buffer is a tensor that a pool can use as it is."""
    if not isinstance(buffer, torch.Tensor):
        raise ConfigError(f"{name}: give a tensor, not {type(buffer).__name__}")
    found = (tuple(buffer.shape), buffer.dtype, buffer.device)
    if found != (shape, dtype, device):
        raise ConfigError(f"{name} is {found}: give {(shape, dtype, device)}")
    if buffer.layout != torch.strided or not buffer.is_contiguous() or buffer.data_ptr() % 16:
        raise ConfigError(f"{name}: give a contiguous tensor that is aligned to 16 bytes")


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a CUDA device is being captured."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, call: str) -> None:
    """Raise a CaptureError while the current stream of a CUDA device is being captured."""
    if is_capturing(device):
        raise CaptureError(
            f"{call} is not possible while the stream is being captured: do it before the capture"
        )


def host_ids(ids: AnyIds, name: str, *, any_shape: bool = False) -> npt.NDArray[np.int64]:
    """Return ids as one contiguous host array: [n] int64. A device tensor costs one synchronisation.

    A single integer is one id. Errors: ArgumentError, also for more than one dimension unless `any_shape`.
    """
    if isinstance(ids, torch.Tensor):
        _require_readable(ids, name, any_shape)
        if ids.is_cuda:
            refuse_capture(ids.device, f"reading {name} from a device tensor")
        if ids.numel() == 0:
            return np.zeros(0, dtype=np.int64)
        array = ids.detach().cpu().resolve_neg().numpy()
    else:
        try:
            array = np.asarray(ids)
        except ValueError as ragged:
            raise ArgumentError(f"{name}: give a flat sequence of ids") from ragged
        _require_flat(array.ndim, name, any_shape)
        if array.size and array.dtype.kind not in "iu":
            raise ArgumentError(f"{name}: give integer ids, not {array.dtype}")
        if isinstance(ids, (list, tuple)) and _has_bool(ids):
            raise ArgumentError(f"{name}: give integer ids, not bool")
        if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ArgumentError(f"{name}: an id does not fit in int64")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(-1)


def require_range(ids: npt.NDArray[np.int64], low: int, high: int, name: str, what: str) -> None:
    """Raise an OutOfRangeError for the first id outside [low, high]."""
    if ids.size == 0 or (int(ids.min()) >= low and int(ids.max()) <= high):
        return
    position = int(np.flatnonzero((ids < low) | (ids > high))[0])
    bad = int(ids[position])
    raise OutOfRangeError(
        f"{name}[{position}] = {bad} is out of range: {what} are {low} to {high}", bad, position
    )


def is_unread(ids: object, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Whether ids are a tensor on this CUDA device, which is used there and never read back."""
    return isinstance(ids, torch.Tensor) and ids.is_cuda and ids.device == device


def unread_ids(ids: torch.Tensor, name: str, *, any_shape: bool = False) -> torch.Tensor:
    """Return a device tensor of ids flattened: [n] int32 or int64, contiguous. Errors: as `host_ids`."""
    _require_readable(ids, name, any_shape)
    return ids.detach().resolve_neg().reshape(-1).contiguous()


def _has_bool(ids: Sequence[Any]) -> bool:
    """Whether a bool is among ids: next to integers, numpy turns it into one."""
    kinds = set(map(type, ids))
    return not kinds.isdisjoint(_BOOLS) or any(
        _has_bool(each) if isinstance(each, (list, tuple)) else getattr(each, "dtype", None) in _BOOL_DTYPES
        for each in (() if kinds == {int} else ids)
    )


def _require_flat(num_dims: int, name: str, any_shape: bool) -> None:
    if num_dims > 1 and not any_shape:
        raise ArgumentError(f"{name}: give one dimension, not {num_dims}")


def _require_readable(ids: torch.Tensor, name: str, any_shape: bool) -> None:
    _require_flat(ids.dim(), name, any_shape)
    if ids.layout != torch.strided or ids.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"{name}: give a dense tensor on the CPU or a CUDA device, not {ids.layout} on {ids.device}"
        )
    if ids.dtype not in _INTS and ids.numel():
        raise ArgumentError(f"{name}: give int32 or int64, not {ids.dtype}")
