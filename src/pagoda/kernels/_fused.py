"""The Triton kernels of writes to tables."""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagoda.kernels._launch import Launch

__all__ = ["set_table", "write_table"]


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


@triton.jit(
    do_not_specialize=["at", "value", "row", "length"], do_not_specialize_on_alignment=["table", "lens"]
)
def _set_table(table, at, value, lens, row, length):
    tl.store(table + at, value)
    tl.store(lens + row, length)


_launch_set = Launch(_set_table, num_warps=1)


def set_table(table: torch.Tensor, at: int, value: int, lens: torch.Tensor, row: int, length: int) -> None:
    _launch_set((1, 1, 1), table, at, value, lens, row, length)
