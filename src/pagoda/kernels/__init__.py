"""Moving keys, values and pages. In: tensors and ids; out: tensors.

Each operation stands twice: a torch reference (`reference`), which says what is right and serves
the CPU, and a Triton kernel (`fused`), which serves CUDA. This module picks one; nothing else does.
Both agree bit for bit. Ids outside the pool are never written: a kernel cannot raise without
reading back, so the pools check ids that they get on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from pagoda.errors import ConfigError
from pagoda.kernels import _reference as reference
from pagoda.kernels._reference import FP8_DTYPES
from pagoda.kernels._regions import Regions

__all__ = [
    "FP8_DTYPES",
    "Regions",
    "copy_pages",
    "fill_rows",
    "on_device",
    "pack",
    "pick",
    "set_table",
    "store",
    "unpack",
    "write_table",
]


_HERE = nullcontext()


def pick(on_gpu: str, plain: ModuleType, device: torch.device) -> ModuleType:
    """The module whose functions serve a device: on CUDA that of Triton kernels, by name, else the reference.

    Errors: ConfigError where triton is missing.
    """
    return _fused(on_gpu) if device.type == "cuda" else plain


@cache
def _fused(name: str) -> ModuleType:
    try:
        return import_module(f"pagoda.kernels.{name}")
    except ModuleNotFoundError as missing:  # plain indexing would be right, at a quarter of the speed
        raise ConfigError("pools and views on CUDA need triton: pip install 'pagoda-kv[triton]'") from missing


def _for(tensor: torch.Tensor) -> ModuleType:
    return pick("_fused", reference, tensor.device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, which is where Triton launches and streams are looked up."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def store(
    slots: torch.Tensor,  # [n] int32 or int64
    keys: torch.Tensor,  # [..., ...] n rows of the width of k_pool's
    values: torch.Tensor | None,
    k_pool: torch.Tensor,  # [num_slots, heads, dim] contiguous
    v_pool: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write row i of keys and values to slot slots[i] of the pools, in one launch.

    Values are cast to the pool's dtype; for fp8 they are divided by the scale first and saturate.
    A slot outside the pool is not written. Of rows with one slot, any one may win.
    """
    with on_device(k_pool.device):
        _for(k_pool).store(slots, keys, values, k_pool, v_pool, k_scale, v_scale)


def pack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, out: torch.Tensor
) -> None:
    """Copy pages of all buffers into `out`, in one launch.

    page_ids: [n] int32 or int64. buffers: each [num_pages, page_bytes_b] uint8. addresses: [buffers] int64,
    where each begins, on their device. out: [n, sum of page_bytes_b] uint8: a page of every buffer
    side by side.
    """
    with on_device(out.device):
        _for(out).pack(page_ids, buffers, addresses, out)


def unpack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, packed: torch.Tensor
) -> None:
    """Copy what `pack` gave back into pages of all buffers, in one launch. Arguments as for `pack`."""
    with on_device(packed.device):
        _for(packed).unpack(page_ids, buffers, addresses, packed)


def copy_pages(
    source: torch.Tensor, target: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor
) -> None:
    """Copy page source[i] of all buffers to page target[i], in one launch.

    source, target: [n] int32 or int64; no page is both, since the launch reads and writes in no order.
    buffers and addresses as for `pack`. A pair with a page outside the pool is not copied. Of pairs with
    one target any may win.
    """
    with on_device(buffers[0].device):
        _for(buffers[0]).copy_pages(source, target, buffers, addresses)


def write_table(packed: torch.Tensor, num_writes: int, table: torch.Tensor) -> None:
    """Set entry packed[i] of a flat table to packed[num_writes + i], in one launch.

    packed: [≥ 2 * num_writes] int32, aligned to nothing. table: [entries] int32, contiguous. An index outside
    the table is not written. Of values for one entry any may win.
    """
    with on_device(table.device):
        _for(table).write_table(packed, num_writes, table)


def fill_rows(regions: Regions, row: int) -> None:
    """Fill row `row` of each tensor with its value, in one launch that carries all of it: nothing is sent."""
    with on_device(regions.table.device):
        _for(regions.table).fill_rows(regions, row)


def set_table(table: torch.Tensor, at: int, value: int, other_at: int, other: int) -> None:
    """Set entry `at` of a flat table to `value` and entry `other_at` to `other`, in one launch that carries
    all of it: nothing is sent.

    table: [entries] int32, contiguous. Places are in the table.
    """
    with on_device(table.device):
        _for(table).set_table(table, at, value, other_at, other)
