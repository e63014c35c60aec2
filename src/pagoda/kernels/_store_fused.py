"""The Triton kernel of `store`: a program casts and writes some tokens of K or of V. Offsets are 64-bit."""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pagoda.kernels._casts_fused import rounded
from pagoda.kernels._reference import FP8_DTYPES

__all__ = ["store"]


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
        # The load does not depend on the slot, so both loads are in flight at once.
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


# Batch sizes make no variants: once a call of any size has compiled the kernel, all others can be captured.
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
    # One program moves ROWS tokens of K or of V; the grid's second axis tells which.
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
    """Return dimensions as (size, stride): contiguous neighbours merged, those of size 1 left out."""
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
    """View a tensor of num_rows tokens as [outer, inner, heads, dim]: run-time strides, compile-time shape.

    A tensor whose leading and trailing dimensions each merge into at most two is read in place; any other,
    which is rare, is copied first.
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
# dtype: mantissa bits, exponent bias, integer of the same size.
_NARROW = {
    torch.bfloat16: (7, 127, torch.uint16),
    torch.float8_e4m3fn: (3, 7, torch.uint8),
    torch.float8_e5m2: (2, 15, torch.uint8),
}


def _plain(rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a kernel can read: no gradient, no lazy negation, a dtype that Triton knows."""
    rows = rows.detach().resolve_neg()
    return rows if rows.dtype in _READABLE else rows.to(torch.float32)


def _spelled_out(dtype: torch.dtype, device: torch.device) -> tuple[int, int, torch.dtype]:
    """Return mantissa bits, bias and storage dtype where the cast to `dtype` is spelled out, else zeros."""
    if dtype not in _NARROW:
        return 0, 0, dtype
    if device.type == "cuda" and (
        dtype not in FP8_DTYPES or torch.cuda.get_device_capability(device) >= (8, 9)
    ):
        return 0, 0, dtype
    return _NARROW[dtype]


def _shape_of_work(width: int, element_bytes: int) -> tuple[int, int, int]:
    """Return tokens per program, columns per step, warps: 2048 elements (fp8: 1024), 16 bytes per thread."""
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
