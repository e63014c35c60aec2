"""The Triton kernel of `gather`: a program copies some tokens of one buffer. Offsets are 64-bit."""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["gather"]


@triton.jit
def _gather_rows(
    slots, pool, out, first_row, num_rows, num_slots,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)
    is_slot = (slot >= 0) & (slot < num_slots)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = (column < WIDTH)[None, :]
        read = pool + slot[:, None] * WIDTH + column[None, :]
        written = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        words = tl.load(read, mask=is_slot[:, None] & is_column, other=0)
        tl.store(written, words, mask=is_row[:, None] & is_column)


# Sizes of batches and pools make no variants: one compiled kernel serves calls of every size.
@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_blocks"],
    do_not_specialize_on_alignment=["slots", "addresses", "out_addresses"],
)
def _gather(
    slots,
    addresses,
    out_addresses,
    word,  # its dtype is the type of a word
    num_rows,
    num_slots,
    num_blocks,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    NUM_SIDES: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Widths are in words. Buffers are K, V, K, V, ... or all of one width. The blocks of a buffer are
    # adjacent in the grid, so that programs that run together write adjacent memory.
    buffer = tl.program_id(0) // num_blocks
    first_row = (tl.program_id(0) % num_blocks) * ROWS
    pointer: tl.constexpr = tl.pointer_type(word.dtype.element_ty)
    pool = tl.multiple_of(tl.load(addresses + buffer).to(pointer), ALIGN)
    out = tl.multiple_of(tl.load(out_addresses + buffer).to(pointer), ALIGN)
    if NUM_SIDES == 1 or buffer % 2 == 0:
        _gather_rows(slots, pool, out, first_row, num_rows, num_slots, K_WIDTH, ROWS, BLOCK)
    else:
        _gather_rows(slots, pool, out, first_row, num_rows, num_slots, V_WIDTH, ROWS, BLOCK)


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_PROGRAM_WORDS = 512  # words per program and iteration; with words of 8 bytes, 32 bytes per thread
_NUM_WARPS = 4


def gather(
    slots: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    page_tokens: int,
    outs: Sequence[torch.Tensor],
    out_addresses: torch.Tensor,
) -> None:
    num_rows = slots.shape[0]
    if num_rows == 0:
        return
    row_bytes = [pages.shape[1] // page_tokens for pages in buffers[:2]]
    align = math.gcd(16, *row_bytes, *(out.data_ptr() for out in outs))
    word_bytes = min(align, 8)
    widths = [size // word_bytes for size in row_bytes]
    block = min(1 << (max(widths).bit_length() - 1), _PROGRAM_WORDS)
    rows = _PROGRAM_WORDS // block
    num_blocks = triton.cdiv(num_rows, rows)
    _gather[(num_blocks * len(buffers),)](
        slots, addresses, out_addresses, buffers[0].view(_WORDS[word_bytes]),
        num_rows, buffers[0].shape[0] * page_tokens, num_blocks,
        widths[0], widths[-1], len(set(widths)), align, rows, block,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
