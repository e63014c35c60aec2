"""The Triton kernels of `pack`, `unpack` and `copy_pages`: a program moves part of a page of one buffer.

Offsets are 64-bit."""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["copy_pages", "pack", "unpack"]


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
    # Sizes are in elements of `packed`. Buffers are K, V, K, V, ... or K alone, one pair per layer.
    # The blocks of a page are adjacent in the grid, so that programs that run together touch adjacent memory.
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


_BLOCK_OF_PAGE = (512, 4)  # elements, warps: 32 bytes per thread
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _sides(buffers: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Return how many page sizes alternate (1 or 2), and the bytes of a page of each.

    All layers of a pool have the same geometry, so its buffers are K, V, K, V, ... or all of one size.
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
    first_pool,  # its dtype is the type of the elements
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
