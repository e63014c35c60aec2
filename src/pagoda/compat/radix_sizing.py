"""How many pages fit, and the table of a radix cache. In: a model's geometry, memory; out: bytes, pages."""

from __future__ import annotations

import numpy as np
import torch

from pagoda.errors import ArgumentError, ConfigError
from pagoda.pools.arguments import AnyIds, count, filled, host_ids, resolve_device

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
    """The first position where two 1-D tensors of integers differ; the shorter length when none does.

    O(shorter length), compared all at once; each device tensor costs one synchronisation. Errors:
    ArgumentError for what is no flat tensor of integers.
    """
    for name, given in (("tensor1", tensor1), ("tensor2", tensor2)):
        num_axes = getattr(given, "ndim", 1)
        if num_axes != 1 or isinstance(given, int):
            raise ArgumentError(f"{name}: give a tensor of one axis")
    left, right = host_ids(tensor1, "tensor1"), host_ids(tensor2, "tensor2")
    shorter = min(left.size, right.size)
    differs = left[:shorter] != right[:shorter]
    first = int(np.argmax(differs)) if shorter else 0
    return first if shorter and differs[first] else shorter
