"""Moving keys, values, pages, entries and states. In: tensors and ids; out: tensors.

Each operation is declared once and implemented twice: a torch reference defines the result and serves the
CPU, a Triton kernel serves CUDA, and both agree bit for bit. Ids outside the pool are never written. A kernel
cannot raise without a read-back, so pools check the ids that they receive on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda.kernels import _reference as reference
from pagoda.kernels import _states_reference as states_reference
from pagoda.kernels._dispatch import on_device, operation, triton_module
from pagoda.kernels._reference import FP8_DTYPES
from pagoda.kernels._regions import Region, Regions

__all__ = [
    "FP8_DTYPES",
    "Region",
    "Regions",
    "copy_pages",
    "copy_states",
    "fill_rows",
    "on_device",
    "pack",
    "restore_states",
    "save_states",
    "set_table",
    "store",
    "triton_module",
    "unpack",
    "write_table",
]


@operation("_store_fused", reference)
def store(
    slots: torch.Tensor,  # [n] int32 or int64
    keys: torch.Tensor,  # [..., ...]: n tokens of heads * dim numbers each, as in k_pool
    values: torch.Tensor | None,  # [..., ...]: n tokens of heads * dim numbers each, as in v_pool
    k_pool: torch.Tensor,  # [num_slots, heads, dim] contiguous
    v_pool: torch.Tensor | None,  # [num_slots, heads, dim] contiguous
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Write the key and value of token i to slot slots[i] of the pools, in one launch.

    Numbers are cast to the pool's dtype. For fp8 they are divided by the scale first; numbers out of range,
    infinity included, saturate; NaN stays NaN. A slot outside the pool is not written. If several tokens have
    the same slot, any of them may win.
    """
    return k_pool


@operation("_pages_fused", reference)
def pack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Copy pages of all buffers into `out`, in one launch.

    page_ids: [n] int32 or int64. buffers: [num_pages, page_bytes_b] uint8 each. addresses: [buffers] int64,
    the address of each buffer, on their device. out: [n, sum of page_bytes_b] uint8: for each page id, the
    page's bytes from every buffer, one after the other.
    """
    return out


@operation("_pages_fused", reference)
def unpack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, packed: torch.Tensor
) -> torch.Tensor:
    """Copy the output of `pack` back into pages of all buffers, in one launch. Arguments are as in `pack`."""
    return packed


@operation("_pages_fused", reference)
def copy_pages(
    source: torch.Tensor, target: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor
) -> torch.Tensor:
    """Copy page source[i] of all buffers to page target[i], in one launch.

    source, target: [n] int32 or int64; no page may be both, since the launch reads and writes in any order.
    buffers and addresses are as in `pack`. A pair with a page outside the pool is not copied. If several
    pairs have the same target, any of them may win.
    """
    return buffers[0]


@operation("_fused", reference)
def write_table(
    packed: torch.Tensor, places: int, values: int, num_writes: int, table: torch.Tensor
) -> torch.Tensor:
    """Set place packed[places + i] of a flat table to packed[values + i], for each write i, in one launch.

    packed: [n] int32, with any alignment. table: [num_places] int32, contiguous. A place outside the table is
    not written. If several writes have the same place, any of them may win.
    """
    return table


@operation("_fused", reference)
def set_table(
    table: torch.Tensor, at: int, value: int, lens: torch.Tensor, row: int, length: int
) -> torch.Tensor:
    """Set place `at` of a flat table to `value`, and the length of `row` to `length`, in one launch and
    without a copy to the device.

    table: [num_places] int32, contiguous. lens: [num_rows] int32, contiguous. Both places must exist.
    """
    return table


@operation("_states_fused", states_reference)
def fill_rows(regions: Regions, at: int, n: int = 1, packed: torch.Tensor | None = None) -> torch.Tensor:
    """Fill rows `at`, …, `at` + n − 1 of each tensor with its value, in one launch and without a copy to the
    device; with `packed`, [m] int32, rows packed[at], …, packed[at + n − 1].

    Rows `at` and up must exist; of those in `packed`, rows outside are not written.
    """
    return regions.table


@operation("_states_fused", states_reference)
def copy_states(packed: torch.Tensor, sources: int, targets: int, n: int, regions: Regions) -> torch.Tensor:
    """Copy row packed[sources + i] of each tensor to row packed[targets + i], for each pair i, in one launch.

    packed: [m] int32, with any alignment. No row may be both source and target, since the launch reads and
    writes in any order. A pair with a row outside is not copied.
    """
    return regions.table


@operation("_states_fused", states_reference)
def save_states(
    packed: torch.Tensor,  # [m] int32, with any alignment
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,  # [num_checkpoints, ≥ regions.checkpoint_bytes] uint8, a multiple of 16 bytes
) -> torch.Tensor:
    """Copy what is kept of row packed[rows + i], a state of packed[lengths + i] tokens, to checkpoint
    packed[ids + i], for each pair i, in one launch for all regions.

    Lengths are 1 or more. Kept cells of positions below 0 are saved as the reset value. A pair with a row or
    checkpoint outside is not copied. If several pairs have the same checkpoint, any of them may win.
    """
    return regions.table


@operation("_states_fused", states_reference)
def restore_states(
    packed: torch.Tensor,
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,
) -> torch.Tensor:
    """Copy checkpoint packed[ids + i], saved at packed[lengths + i] tokens, to row packed[rows + i], for each
    pair i, in one launch for all regions. Arguments are as in `save_states`.

    Every byte of the row is written: what the checkpoint does not keep gets the reset value, and positions
    follow from the length.
    """
    return regions.table
