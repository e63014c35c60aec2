"""How many pages fit into memory, and the page table. In: a model's geometry, memory; out: bytes, pages."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from pagoda.errors import ArgumentError, ConfigError
from pagoda.layout._numbers import count, exact
from pagoda.pools._arguments import AnyIds, filled, host_ids, refuse_capture, resolve_device

__all__ = [
    "create_page_table",
    "find_first_diff_pos",
    "get_mha_cache_per_page",
    "get_num_pages_for_kv_cache",
]


def get_mha_cache_per_page(
    head_dim: int,
    num_kv_heads: int,
    num_layers: int,
    page_size: int = 1,
    tp_size: int = 1,
    dtype_size: float | Fraction = 2,
) -> int:
    """Return the bytes of K and V of one page on one of `tp_size` ranks, rounded up to a whole byte.

    Each rank holds whole heads: an equal share, or, with fewer heads than ranks, one head that several ranks
    replicate. `dtype_size` may be a fraction, such as 0.5 for 4-bit values. Errors: ConfigError for sizes
    that are not positive, or if neither of heads and ranks divides the other.
    """
    heads, ranks = count(num_kv_heads, "num_kv_heads"), count(tp_size, "tp_size")
    if heads % ranks and ranks % heads:
        raise ConfigError(
            f"num_kv_heads = {heads} and tp_size = {ranks}: give a tp_size that divides the heads or is a "
            "multiple of them"
        )
    values = 2 * max(heads // ranks, 1) * count(head_dim, "head_dim") * count(num_layers, "num_layers")
    return math.ceil(values * count(page_size, "page_size") * _positive(dtype_size, "dtype_size"))


def get_num_pages_for_kv_cache(available_memory: float | Fraction, cache_per_page: float | Fraction) -> int:
    """Return how many pages of `cache_per_page` bytes fit into `available_memory` bytes, computed exactly.

    Errors: ConfigError for negative memory or pages of 0 bytes.
    """
    return math.floor(
        exact(available_memory, "available_memory") / _positive(cache_per_page, "cache_per_page")
    )


def _positive(value: Any, name: str) -> Fraction:
    given = exact(value, name)
    if given == 0:
        raise ConfigError(f"{name}: give more than 0")
    return given


def create_page_table(
    max_running_req: int, max_seq_len: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a page table, [max_running_req, max_seq_len] int32 zeros on `device`, owned by the caller.

    Errors: ConfigError for negative sizes or an unknown device.
    """
    shape = count(max_running_req, "max_running_req", low=0), count(max_seq_len, "max_seq_len", low=0)
    return filled(shape, torch.int32, resolve_device(device))


def find_first_diff_pos(tensor1: AnyIds, tensor2: AnyIds) -> int:
    """Return the first position where two 1-D tensors of one kind differ; the shorter length if none does.

    Kinds are bool, integers, floating point and complex. Arrays and flat lists are accepted, too. Each device
    tensor costs one synchronisation. Errors: ArgumentError for other than 1-D tensors, and for two kinds.
    """
    left, right = _flat(tensor1, "tensor1"), _flat(tensor2, "tensor2")
    shorter = min(left.numel(), right.numel())
    if shorter == 0:
        return 0
    if _kind(left) != _kind(right):
        raise ArgumentError(f"tensor2: give the kind of tensor1, {_kind(left)}, not {_kind(right)}")
    differs = (left[:shorter] != right[:shorter]).numpy()
    first = int(np.argmax(differs))
    return first if differs[first] else shorter


def _flat(given: Any, name: str) -> torch.Tensor:
    """Return a 1-D tensor on the host."""
    if not isinstance(given, torch.Tensor):
        try:
            array = np.asarray(given)
        except ValueError as ragged:
            raise ArgumentError(f"{name}: give a 1-D tensor") from ragged
        is_integer = array.dtype.kind in "iu" or array.size == 0
        if not is_integer and array.dtype.kind not in "bfc":
            raise ArgumentError(f"{name}: give a tensor, not {type(given).__name__} of {array.dtype}")
        shape = array.shape
        given = torch.from_numpy(host_ids(array, name) if is_integer else np.ascontiguousarray(array))
        given = given.reshape(shape)
    if given.dim() != 1:
        raise ArgumentError(f"{name}: give a 1-D tensor")
    if given.layout != torch.strided or given.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"{name}: give a dense tensor on the CPU or a CUDA device, not {given.layout} on {given.device}"
        )
    refuse_capture(given.device, f"reading {name} from a device tensor")
    flat: torch.Tensor = given.detach().cpu()
    return flat


def _kind(flat: torch.Tensor) -> str:
    if flat.is_complex():
        return "complex"
    if flat.is_floating_point():
        return "floating point"
    return "bool" if flat.dtype == torch.bool else "integers"
