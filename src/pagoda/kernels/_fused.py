"""The Triton kernels of small writes: places of tables, and resets of rows."""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagoda.kernels._launch import Launch
from pagoda.kernels._regions import Regions

__all__ = ["fill_rows", "set_table", "write_table"]


@triton.jit(
    do_not_specialize=["places", "values", "num_writes", "num_places"],
    do_not_specialize_on_alignment=["packed", "table"],
)
def _write_table(packed, places, values, table, num_writes, num_places, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_write = at < num_writes
    place = tl.load(packed + places + at, mask=is_write, other=-1).to(tl.int64)
    value = tl.load(packed + values + at, mask=is_write)
    tl.store(table + place, value, mask=(place >= 0) & (place < num_places))


_launch_writes = Launch(_write_table)
_BLOCK_OF_WRITES = 256


def write_table(packed: torch.Tensor, places: int, values: int, num_writes: int, table: torch.Tensor) -> None:
    if num_writes:
        grid = (-(-num_writes // _BLOCK_OF_WRITES), 1, 1)  # triton.cdiv takes microseconds
        _launch_writes(
            grid, packed, places, values, table, num_writes, table.shape[0], constants=(_BLOCK_OF_WRITES,)
        )


@triton.jit(do_not_specialize=["at", "value", "other_at", "other"], do_not_specialize_on_alignment=["table"])
def _set_table(table, at, value, other_at, other):
    tl.store(table + at, value)
    tl.store(table + other_at, other)


_launch_set = Launch(_set_table, num_warps=1)


def set_table(table: torch.Tensor, at: int, value: int, other_at: int, other: int) -> None:
    _launch_set((1, 1, 1), table, at, value, other_at, other)


@triton.jit(do_not_specialize=["row"], do_not_specialize_on_alignment=["regions"])
def _fill_rows(regions, row, BLOCK: tl.constexpr):
    # Axis 0 of the grid is the tensor; the programs along axis 1 share its row.
    region = regions + 3 * tl.program_id(0)
    num_bytes, value = tl.load(region + 1), tl.load(region + 2)
    begin = tl.load(region) + row * num_bytes
    if (begin % 16 == 0) & (num_bytes % 16 == 0):
        to = tl.multiple_of(begin.to(tl.pointer_type(tl.int64)), 16)
        for first in range(tl.program_id(1) * BLOCK, num_bytes // 8, tl.num_programs(1) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(to + at, value + tl.zeros((BLOCK,), tl.int64), mask=at < num_bytes // 8)
    else:
        for first in range(tl.program_id(1) * BLOCK, num_bytes, tl.num_programs(1) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            byte = (value >> (8 * (at % 8))) & 255
            tl.store(begin.to(tl.pointer_type(tl.uint8)) + at, byte.to(tl.uint8), mask=at < num_bytes)


_launch_rows = Launch(_fill_rows)
_BLOCK_OF_ROW, _MOST_PIECES = 1024, 32


def fill_rows(regions: Regions, row: int) -> None:
    pieces = min(-(-regions.most_bytes // (8 * _BLOCK_OF_ROW)), _MOST_PIECES)
    if pieces and regions.rows:
        _launch_rows((len(regions.rows), pieces, 1), regions.table, row, constants=(_BLOCK_OF_ROW,))
