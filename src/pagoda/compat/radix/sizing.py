"""How many pages fit, and the table of a radix cache. In: a model's geometry, memory; out: bytes, pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagoda.errors import ArgumentError, ConfigError
from pagoda.layout._numbers import count
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
    dtype_size: int = 2,
) -> int:
    """Bytes of K and V of one page on one rank of `tp_size`, each of which holds whole heads. O(1).

    Errors: ConfigError for sizes that are not positive, and for heads that do not divide among ranks.
    """
    heads, ranks = count(num_kv_heads, "num_kv_heads"), count(tp_size, "tp_size")
    if heads % ranks:
        raise ConfigError(f"num_kv_heads = {heads} is not a multiple of tp_size = {ranks}")
    entry_bytes = 2 * (heads // ranks) * count(head_dim, "head_dim") * count(dtype_size, "dtype_size")
    return entry_bytes * count(num_layers, "num_layers") * count(page_size, "page_size")


def get_num_pages_for_kv_cache(available_memory: int, cache_per_page: int) -> int:
    """Whole pages of `cache_per_page` bytes that fit into `available_memory` bytes. O(1).

    Errors: ConfigError for memory below 0 or pages of no bytes.
    """
    return count(available_memory, "available_memory", low=0) // count(cache_per_page, "cache_per_page")


def create_page_table(
    max_running_req: int, max_seq_len: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A page table, [max_running_req, max_seq_len] int32 zeros on `device`; the caller's.

    Cost: that of the memory. Errors: ConfigError for negative sizes or a device that is not there.
    """
    shape = count(max_running_req, "max_running_req", low=0), count(max_seq_len, "max_seq_len", low=0)
    return filled(shape, torch.int32, resolve_device(device))


def find_first_diff_pos(tensor1: AnyIds, tensor2: AnyIds) -> int:
    """The first position where two 1-D tensors of one kind differ; the shorter length when none does.

    Kinds are bool, integers, floating point and complex; arrays and flat lists will do. O(shorter
    length), compared all at once; each device tensor costs one synchronisation. Errors: ArgumentError for
    what is no flat tensor, and for two kinds.
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
    """A tensor of one axis on the host."""
    if not isinstance(given, torch.Tensor):
        try:
            array = np.asarray(given)
        except ValueError as ragged:
            raise ArgumentError(f"{name}: give a tensor of one axis") from ragged
        is_integer = array.dtype.kind in "iu" or array.size == 0
        if not is_integer and array.dtype.kind not in "bfc":
            raise ArgumentError(f"{name}: give a tensor, not {type(given).__name__} of {array.dtype}")
        shape = array.shape
        given = torch.from_numpy(host_ids(array, name) if is_integer else np.ascontiguousarray(array))
        given = given.reshape(shape)
    if given.dim() != 1:
        raise ArgumentError(f"{name}: give a tensor of one axis")
    if given.layout != torch.strided or given.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"{name}: give a dense tensor on the CPU or a CUDA device, not {given.layout} on {given.device}"
        )
    refuse_capture(given.device, f"{name}, read from a device tensor,")
    flat: torch.Tensor = given.detach().cpu()
    return flat


def _kind(flat: torch.Tensor) -> str:
    if flat.is_complex():
        return "complex"
    if flat.is_floating_point():
        return "floating point"
    return "bool" if flat.dtype == torch.bool else "integers"
