"""The Triton kernels. Offsets are 64-bit: pools pass 2^31 elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pagoda.kernels._launch import Launch
from pagoda.kernels._reference import FP8_DTYPES
from pagoda.kernels._regions import Regions

__all__ = [
    "copy_pages",
    "fill_rows",
    "pack",
    "rounded",
    "set_table",
    "store",
    "unpack",
    "write_table",
]


@triton.jit
def rounded(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 to the bits of a narrower float, to nearest even, spelled out in integers.

    For Triton's interpreter, whose own cast to bfloat16 truncates and to fp8 rounds otherwise, and
    for GPUs before 8.9, which have no cast to fp8. |x| is in the range of the narrow type, or NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = normal - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal: adding 2^k leaves, in the lowest bits, the multiple of the quantum.
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    lifted = magnitude.to(tl.float32, bitcast=True) + tl.full((), MAGIC, tl.uint32).to(
        tl.float32, bitcast=True
    )
    subnormal = lifted.to(tl.uint32, bitcast=True) - MAGIC
    rounded = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    TOP: tl.constexpr = 0x7FC0 if BIAS == 127 else 0x7F
    SIGN_AT: tl.constexpr = 15 if BIAS == 127 else 7
    return tl.where(magnitude > 0x7F800000, TOP, rounded) | ((bits >> 31) << SIGN_AT)


@triton.jit
def _store_rows(
    source,
    pool,
    slots,
    scale,
    num_rows,
    num_slots,
    inner,
    stride_outer,
    stride_inner,
    stride_head,
    stride_dim,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    SINGLE_BATCH: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)
    is_slot = (slot >= 0) & (slot < num_slots)
    if SINGLE_BATCH:
        begin = row.to(tl.int64) * stride_inner
    else:
        begin = (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        if DIM == WIDTH:
            offset = column.to(tl.int64) * stride_dim
        else:
            offset = (column // DIM).to(tl.int64) * stride_head + (column % DIM).to(tl.int64) * stride_dim
        is_column = (column < WIDTH)[None, :]
        # The load does not ask for the slot: both are under way at once.
        x = tl.load(source + begin[:, None] + offset[None, :], mask=is_row[:, None] & is_column)
        if FP8_MAX > 0:
            x = tl.div_rn(x.to(tl.float32), scale)
            x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        elif x.dtype == tl.float64:
            x = x.to(tl.float32)
        if MANTISSA > 0:
            x = rounded(x.to(tl.float32), MANTISSA, BIAS)
        to = pool + slot[:, None] * WIDTH + column[None, :]
        tl.store(to, x.to(pool.dtype.element_ty), mask=is_slot[:, None] & is_column)


# Batch sizes make no variants: what a call of any size compiled serves a capture of any other.
@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "k_inner", "v_inner"],
    do_not_specialize_on_alignment=["slots"],
)
def _store(
    slots,
    num_rows,
    num_slots,
    keys,
    k_pool,
    k_scale,
    k_inner,
    k_stride_outer,
    k_stride_inner,
    k_stride_head,
    k_stride_dim,
    values,
    v_pool,
    v_scale,
    v_inner,
    v_stride_outer,
    v_stride_inner,
    v_stride_head,
    v_stride_dim,
    K_WIDTH: tl.constexpr,
    K_DIM: tl.constexpr,
    K_SINGLE_BATCH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_SINGLE_BATCH: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program moves ROWS rows of K, or of V: which, is the grid's second axis.
    if tl.program_id(1) == 0:
        _store_rows(
            keys, k_pool, slots, k_scale, num_rows, num_slots, k_inner, k_stride_outer, k_stride_inner,
            k_stride_head, k_stride_dim, K_WIDTH, K_DIM, K_SINGLE_BATCH, FP8_MAX, MANTISSA, BIAS,
            ROWS, BLOCK,
        )  # fmt: skip
    else:
        _store_rows(
            values, v_pool, slots, v_scale, num_rows, num_slots, v_inner, v_stride_outer, v_stride_inner,
            v_stride_head, v_stride_dim, V_WIDTH, V_DIM, V_SINGLE_BATCH, FP8_MAX, MANTISSA, BIAS,
            ROWS, BLOCK,
        )  # fmt: skip


def _merged(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions as (size, stride), neighbours that are one run merged, those of size 1 left out."""
    dims: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * step:
            dims[-1] = (dims[-1][0] * size, step)
        else:
            dims.append((size, step))
    return dims


def _strided(rows: torch.Tensor, num_rows: int, width: int) -> tuple[torch.Tensor, list[int], list[Any]]:
    """A tensor of num_rows rows as [outer, inner, heads, dim]: run-time strides, compile-time shape.

    Any tensor whose leading and trailing dimensions each merge into at most two is read where it
    lies; the rare rest is copied first.
    """
    lead, done = 0, 1
    while done < num_rows:
        done *= rows.shape[lead]
        lead += 1
    batch = _merged(rows.shape[:lead], rows.stride()[:lead])
    content = _merged(rows.shape[lead:], rows.stride()[lead:])
    if len(batch) > 2 or len(content) > 2:
        rows = rows.reshape(num_rows, width).contiguous()
        batch, content = [(num_rows, width)], [(width, 1)]
    inner = batch[-1] if batch else (1, 0)
    outer_stride = batch[0][1] if len(batch) == 2 else 0
    dim = content[-1] if content else (1, 1)
    head_stride = content[0][1] if len(content) == 2 else 0
    return rows, [inner[0], outer_stride, inner[1], head_stride, dim[1]], [width, dim[0], len(batch) < 2]


_READABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FP8_DTYPES)
# dtype: mantissa bits, exponent bias, integer of its size.
_NARROW = {
    torch.bfloat16: (7, 127, torch.uint16),
    torch.float8_e4m3fn: (3, 7, torch.uint8),
    torch.float8_e5m2: (2, 15, torch.uint8),
}


def _plain(rows: torch.Tensor) -> torch.Tensor:
    """Rows that a kernel can read: no gradient, no pending negation, a dtype that Triton knows."""
    rows = rows.detach().resolve_neg()
    return rows if rows.dtype in _READABLE else rows.to(torch.float32)


def _spelled_out(dtype: torch.dtype, device: torch.device) -> tuple[int, int, torch.dtype]:
    """Mantissa, bias and storage type where the cast to `dtype` is made of integers, else zeros."""
    if dtype not in _NARROW:
        return 0, 0, dtype
    if device.type == "cuda" and (
        dtype not in FP8_DTYPES or torch.cuda.get_device_capability(device) >= (8, 9)
    ):
        return 0, 0, dtype
    return _NARROW[dtype]


def _shape_of_work(width: int, element_bytes: int) -> tuple[int, int, int]:
    """Rows a program, columns a step, warps: 2048 elements (1024 of fp8), 16 bytes stored a thread."""
    block = min(1 << (width.bit_length() - 1), 2048)
    rows = max(1, 1024 * min(element_bytes, 2) // block)
    return rows, block, max(1, rows * block * element_bytes // 512)


def store(
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    num_rows = slots.shape[0]
    if num_rows == 0:
        return
    k_width = k_pool.shape[1] * k_pool.shape[2]
    k_rows, k_strides, k_shape = _strided(_plain(keys), num_rows, k_width)
    if values is None or v_pool is None:
        v_width, num_sides = 0, 1
        v_rows, v_strides, v_shape, v_pool = k_rows, k_strides, k_shape, k_pool
    else:
        v_width, num_sides = v_pool.shape[1] * v_pool.shape[2], 2
        v_rows, v_strides, v_shape = _strided(_plain(values), num_rows, v_width)
    fp8_max = torch.finfo(k_pool.dtype).max if k_pool.dtype in FP8_DTYPES else 0.0
    mantissa, bias, bits = _spelled_out(k_pool.dtype, k_pool.device)
    rows, block, num_warps = _shape_of_work(max(k_width, v_width), k_pool.element_size())
    grid = (triton.cdiv(num_rows, rows), num_sides)
    _store[grid](
        slots, num_rows, k_pool.shape[0],
        k_rows, k_pool.view(bits), k_scale, *k_strides,
        v_rows, v_pool.view(bits), v_scale, *v_strides,
        *k_shape, *v_shape,
        FP8_MAX=fp8_max, MANTISSA=mantissa, BIAS=bias, ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages", "num_rows"], do_not_specialize_on_alignment=["page_ids"])
def _move_pages(
    page_ids,
    addresses,
    packed,
    num_pages,
    num_rows,
    num_blocks,
    record,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    NUM_SIDES: tl.constexpr,
    ALIGN: tl.constexpr,
    INTO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Sizes are in elements of `packed`. Buffers are K, V, K, V, ... or K alone, one pair a layer.
    # The blocks of a page stand together: programs that run together touch memory together.
    block = tl.program_id(0) % num_blocks
    row = (tl.program_id(0) // num_blocks) % num_rows
    buffer = tl.program_id(0) // (num_blocks * num_rows)
    page = tl.load(page_ids + row).to(tl.int64)
    side = buffer % NUM_SIDES
    size = tl.where(side == 0, K_SIZE, V_SIZE)
    begin = (buffer // NUM_SIDES).to(tl.int64) * (K_SIZE + V_SIZE) + side * K_SIZE
    element: tl.constexpr = packed.dtype.element_ty
    pool = tl.load(addresses + buffer).to(tl.pointer_type(element))
    pool = tl.multiple_of(pool + page * size, ALIGN)
    record_at = tl.multiple_of(packed + row.to(tl.int64) * record + begin, ALIGN)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where((page >= 0) & (page < num_pages), size, 0)
    if INTO_POOL:
        tl.store(pool + at, tl.load(record_at + at, mask=mask), mask=mask)
    else:
        tl.store(record_at + at, tl.load(pool + at, mask=mask), mask=mask)


_BLOCK_OF_PAGE = (512, 4)  # elements, warps: 32 bytes a thread
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _sides(buffers: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """How many sizes take turns, and the bytes of a page of each.

    A pool's layers are alike, so its buffers are K, V, K, V, ...; or all are one size.
    """
    sizes = [buffer.shape[1] for buffer in buffers]
    return (1, sizes[0], 0) if len(set(sizes)) == 1 else (2, sizes[0], sizes[1])


def _move(
    page_ids: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    packed: torch.Tensor,
    into_pool: bool,
) -> None:
    if page_ids.shape[0] == 0:
        return
    num_sides, k_bytes, v_bytes = _sides(buffers)
    align = math.gcd(k_bytes, v_bytes, packed.data_ptr(), packed.shape[1], 16)
    width = min(align, 8)
    elements = packed.view(_ELEMENTS[width])
    block, num_warps = _BLOCK_OF_PAGE
    num_blocks = triton.cdiv(max(k_bytes, v_bytes) // width, block)
    num_rows = page_ids.shape[0]
    _move_pages[(num_blocks * len(buffers) * num_rows,)](
        page_ids, addresses, elements, buffers[0].shape[0], num_rows, num_blocks, packed.shape[1] // width,
        k_bytes // width, v_bytes // width, num_sides, align, into_pool, block,
        num_warps=num_warps,
    )  # fmt: skip


def pack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, out: torch.Tensor
) -> None:
    _move(page_ids, buffers, addresses, out, into_pool=False)


def unpack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, packed: torch.Tensor
) -> None:
    _move(page_ids, buffers, addresses, packed, into_pool=True)


@triton.jit(do_not_specialize=["num_pages", "num_rows"], do_not_specialize_on_alignment=["source", "target"])
def _copy_pages(
    source,
    target,
    addresses,
    first_pool,  # tells the type of the elements
    num_pages,
    num_rows,
    num_blocks,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    NUM_SIDES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Programs and sizes as in _move_pages.
    block = tl.program_id(0) % num_blocks
    row = (tl.program_id(0) // num_blocks) % num_rows
    buffer = tl.program_id(0) // (num_blocks * num_rows)
    read = tl.load(source + row).to(tl.int64)
    written = tl.load(target + row).to(tl.int64)
    size = tl.where(buffer % NUM_SIDES == 0, K_SIZE, V_SIZE)
    pool = tl.load(addresses + buffer).to(tl.pointer_type(first_pool.dtype.element_ty))
    read_at = tl.multiple_of(pool + read * size, ALIGN)
    written_at = tl.multiple_of(pool + written * size, ALIGN)
    is_pair = (read >= 0) & (read < num_pages) & (written >= 0) & (written < num_pages)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where(is_pair, size, 0)
    tl.store(written_at + at, tl.load(read_at + at, mask=mask), mask=mask)


def copy_pages(
    source: torch.Tensor, target: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor
) -> None:
    num_rows = source.shape[0]
    if num_rows == 0:
        return
    num_sides, k_bytes, v_bytes = _sides(buffers)
    align = math.gcd(k_bytes, v_bytes, 16)
    width = min(align, 8)
    block, num_warps = _BLOCK_OF_PAGE
    num_blocks = triton.cdiv(max(k_bytes, v_bytes) // width, block)
    _copy_pages[(num_blocks * len(buffers) * num_rows,)](
        source, target, addresses, buffers[0].view(_ELEMENTS[width]), buffers[0].shape[0], num_rows,
        num_blocks, k_bytes // width, v_bytes // width, num_sides, align, block,
        num_warps=num_warps,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_writes", "num_entries"], do_not_specialize_on_alignment=["packed", "table"]
)
def _write_table(packed, table, num_writes, num_entries, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_write = at < num_writes
    entry = tl.load(packed + at, mask=is_write, other=-1).to(tl.int64)
    value = tl.load(packed + num_writes + at, mask=is_write)
    tl.store(table + entry, value, mask=(entry >= 0) & (entry < num_entries))


_launch_writes = Launch(_write_table)
_BLOCK_OF_WRITES = 256


def write_table(packed: torch.Tensor, num_writes: int, table: torch.Tensor) -> None:
    if num_writes:
        grid = (-(-num_writes // _BLOCK_OF_WRITES), 1, 1)  # triton.cdiv takes microseconds
        _launch_writes(grid, packed, table, num_writes, table.shape[0], constants=(_BLOCK_OF_WRITES,))


@triton.jit(do_not_specialize=["at", "value", "other_at", "other"], do_not_specialize_on_alignment=["table"])
def _set_table(table, at, value, other_at, other):
    tl.store(table + at, value)
    tl.store(table + other_at, other)


_launch_set = Launch(_set_table, num_warps=1)


def set_table(table: torch.Tensor, at: int, value: int, other_at: int, other: int) -> None:
    _launch_set((1, 1, 1), table, at, value, other_at, other)


@triton.jit(do_not_specialize=["row"], do_not_specialize_on_alignment=["regions"])
def _fill_rows(regions, row, BLOCK: tl.constexpr):
    # Axis 0 of the programs is the tensor; those of axis 1 share its row.
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
