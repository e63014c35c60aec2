"""Entries of compressed attention in Triton: numbers to bytes of a page and back, by a `Codec`.

In: numbers, [rows, blocks, block] float32, a tile of entries; pages and places in them, [rows] each. Out:
bytes there, or numbers. Everything about the layout is in one compile-time value, `EntryConstants`, which
kernels take as C. Offsets are 64-bit.
"""

# Kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pagoda.kernels._casts_fused import from_fp4, from_fp8, narrow, readable, to_fp4, to_fp8, wide

if TYPE_CHECKING:
    from pagoda.kernels.entries import Codec, Ring

__all__ = ["EntryConstants", "Stored", "as_read", "load_entries", "put", "store_at", "take"]


@dataclass(frozen=True)
class EntryConstants:
    """What a kernel knows at compile time of the entries that it moves: one variant is compiled per value."""

    rows: int  # entries that a program moves together
    blocks: int  # of a tile, a power of two: all numbers of an entry, and all scales
    block: int  # numbers of a tile's block, a power of two
    scales: int  # of a tile's entry: 1, or one per block

    flat_dim: int  # numbers in the flat format
    rope_dim: int  # numbers in the format of the rotated part, behind them
    num_scales: int
    is_plain: bool  # numbers have no scale
    is_fp4: bool  # else fp8, where they have one
    has_float_scales: bool  # float32, else exponents
    largest: float  # number of the flat format
    least: float  # that the largest of a block counts for

    page_bytes: int
    entries_per_page: int
    data_bytes: int  # of an entry
    rope_at: int  # bytes before the rotated part in an entry's data
    scale_page_bytes: int  # of the page that holds the scales
    scales_at: int  # bytes before the scales in it
    scale_bytes: int  # of an entry

    flat_width: int  # bytes of an element of the tensor that holds the flat part
    scale_width: int
    rope_width: int
    is_spelled: bool  # casts are spelled out in integers


_BLOCK = 32  # numbers, where scales do not say how many


class Stored(NamedTuple):
    """Where entries lie: their data in pages of one tensor, their scales, from `scales_at` on, in those of
    another or of the same."""

    data: torch.Tensor  # [pages, page_bytes] uint8
    scales: torch.Tensor  # [pages, scale_page_bytes] uint8
    scales_at: int
    entries_per_page: int

    @staticmethod
    def in_pages(codec: Codec, pages: torch.Tensor, entries_per_page: int) -> Stored:
        """Entries of pages, [pages, page_bytes] uint8: the data of all, then the scales of all."""
        return Stored(pages, pages, entries_per_page * codec.data_bytes, entries_per_page)

    @staticmethod
    def in_ring(ring: Ring) -> Stored:
        """Entries of rings: every place is a page."""
        data = ring.data.view(-1, ring.data.shape[2])
        scales = data if ring.scales is None else ring.scales.view(-1, ring.scales.shape[2])
        return Stored(data, scales, 0, 1)

    def typed(self, codec: Codec, is_spelled: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bytes as elements of the flat part, of the scales and of the rotated part."""
        flat = self.data.view(getattr(torch, codec.flat_dtype)) if codec.scale_dtype is None else self.data
        scales = self.scales.view(torch.float32) if codec.scale_dtype == "float32" else self.scales
        ropes = self.data.view(getattr(torch, codec.rope_dtype)) if codec.rope_dim else flat
        return readable(flat, is_spelled), scales, readable(ropes, is_spelled)

    def constants(self, codec: Codec, is_spelled: bool, numbers: int) -> EntryConstants:
        """The compile-time value of kernels whose programs move some `numbers` numbers together."""
        data, scales = self.data.shape[1], self.scales.shape[1]
        return _constants(codec, data, self.entries_per_page, scales, self.scales_at, is_spelled, numbers)


@functools.cache
def _constants(
    codec: Codec,
    page_bytes: int,
    entries_per_page: int,
    scale_page_bytes: int,
    scales_at: int,
    is_spelled: bool,
    numbers: int,
) -> EntryConstants:
    is_plain = codec.scale_dtype is None
    scale_width = 4 if codec.scale_dtype == "float32" else 1
    rope_width = getattr(torch, codec.rope_dtype).itemsize
    # Numbers that have no scale, or one for all, are dealt out in blocks as well.
    is_one = codec.scale_bytes == scale_width
    block = min(triton.next_power_of_2(codec.dim), _BLOCK) if is_plain or is_one else codec.block
    num_scales = codec.scale_bytes // scale_width  # with the padding behind them, which is written too
    blocks = triton.next_power_of_2(max(triton.cdiv(codec.dim, block), num_scales))
    return EntryConstants(
        rows=max(1, numbers // (blocks * block)),
        blocks=blocks,
        block=block,
        scales=1 if is_one else blocks,
        flat_dim=codec.flat_dim,
        rope_dim=codec.rope_dim,
        num_scales=codec.num_scales,
        is_plain=is_plain,
        is_fp4=codec.flat_dtype == "float4_e2m1fn_x2",
        has_float_scales=codec.scale_dtype == "float32",
        largest=0.0 if is_plain else codec.largest,
        least=0.0 if is_plain else codec.least,
        page_bytes=page_bytes,
        entries_per_page=entries_per_page,
        data_bytes=codec.data_bytes,
        rope_at=codec.data_bytes - codec.rope_dim * rope_width,
        scale_page_bytes=scale_page_bytes,
        scales_at=scales_at,
        scale_bytes=codec.scale_bytes,
        flat_width=getattr(torch, codec.flat_dtype).itemsize if is_plain else 1,
        scale_width=scale_width,
        rope_width=rope_width,
        is_spelled=is_spelled,
    )


# Numbers that a thread moves side by side: 16 bytes of bfloat16, so that none changes its thread on the way.
_STEP = tl.constexpr(8)


@triton.jit
def _columns(BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr):
    """[1, BLOCKS, BLOCK] indices of the numbers of an entry; a thread moves at most STEP side by side."""
    at = tl.max_contiguous(tl.arange(0, BLOCK), STEP)
    return tl.arange(0, BLOCKS)[None, :, None] * BLOCK + at[None, None, :]


@triton.jit
def _scale_of(largest, C: tl.constexpr):
    """The scale of blocks by their largest number: what is kept, and what numbers are multiplied by."""
    largest = tl.maximum(largest, C.least)
    if C.has_float_scales:
        scale = tl.div_rn(largest, C.largest)
        return scale, tl.div_rn(1.0, scale)
    else:  # noqa: RET505 (Triton compiles what stands behind a return)
        # Exponents of both subtracted; one more where the digits of `largest` exceed those of C.largest.
        limit = tl.full((), C.largest, tl.float32).to(tl.uint32, bitcast=True)
        bits = largest.to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) - (limit >> 23) + 127
        exponent += tl.where((bits & 0x7FFFFF) > (limit & 0x7FFFFF), 1, 0).to(tl.uint32)
        return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _kept_scale(kept, C: tl.constexpr):
    """Scales as float32, of what is kept."""
    if C.has_float_scales:
        return kept
    else:  # noqa: RET505
        return (kept.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, C: tl.constexpr):
    """[rows, blocks, block] codes of the flat format, and [rows, scales] scales, of numbers.

    Codes of fp8 are uint8, of fp4 uint32, one per number."""
    # NaN and infinity do not make the scale: they leave the other numbers of their block as they are.
    # Infinity times 0 is NaN, which a GPU's maximum leaves out: one instruction per number, and no
    # comparison.
    if C.is_spelled:
        size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
    else:
        size = tl.abs(x + x * 0.0)
    largest = tl.max(size, 2)
    if C.scales == 1:
        largest = tl.max(largest, 1, keep_dims=True)
    kept, inverse = _scale_of(largest, C)
    scaled = x * inverse[:, :, None]
    if C.is_fp4:
        codes = to_fp4(scaled)
    else:
        if C.is_spelled:  # a GPU's cast saturates
            scaled = tl.clamp(scaled, -C.largest, C.largest, propagate_nan=tl.PropagateNan.ALL)
        codes = to_fp8(scaled, C.is_spelled)
    return codes, kept


@triton.jit
def load_entries(page, at, is_read, pages, scales, ropes, C: tl.constexpr):
    """[rows, blocks, block] float32: the numbers of entries at places `at` of pages."""
    BLOCK: tl.constexpr = C.block  # Triton takes shapes of such names, and not of fields
    BLOCKS: tl.constexpr = C.blocks
    page = page.to(tl.int64)
    begin = page * C.page_bytes + at * C.data_bytes
    mask = is_read[:, None, None]
    data = (pages + begin // C.flat_width)[:, None, None]
    column = _columns(C.block, C.blocks, _STEP)
    if C.is_fp4:
        byte = _columns(C.block // 2, C.blocks, _STEP // 2)
        pairs = tl.load(data + byte, mask=mask & (byte < C.flat_dim // 2), other=0)
        x = tl.join(from_fp4(pairs, False), from_fp4(pairs, True))
        x = tl.reshape(x, (x.shape[0], BLOCKS, BLOCK))
    else:
        x = tl.load(data + column, mask=mask & (column < C.flat_dim), other=0)
        x = wide(x, C.is_spelled) if C.is_plain else from_fp8(x, C.is_spelled)
    if not C.is_plain:
        scales_begin = page * C.scale_page_bytes + C.scales_at + at * C.scale_bytes
        block = tl.arange(0, C.scales)[None, :]
        kept = tl.load(
            scales + (scales_begin // C.scale_width)[:, None] + block,
            mask=is_read[:, None] & (block < C.num_scales),
            other=0,
        )
        x = x * _kept_scale(kept, C)[:, :, None]
    if C.rope_dim > 0:
        is_rope = (column >= C.flat_dim) & (column < C.flat_dim + C.rope_dim)
        rope_at = ((begin + C.rope_at) // C.rope_width)[:, None, None] + (column - C.flat_dim)
        rope = wide(tl.load(ropes + rope_at, mask=mask & is_rope, other=0), C.is_spelled)
        x = tl.where(is_rope, rope, x)
    return x


@triton.jit
def put(row, is_row, x, out, C: tl.constexpr):
    """Write the numbers of entries to rows of `out`, [rows] int64."""
    column = _columns(C.block, C.blocks, _STEP)
    to = out + (row * (C.flat_dim + C.rope_dim))[:, None, None] + column
    mask = is_row[:, None, None] & (column < C.flat_dim + C.rope_dim)
    tl.store(to, narrow(x, out.dtype.element_ty, C.is_spelled), mask=mask)


@triton.jit
def take(token, is_token, values, stride, C: tl.constexpr):
    """[rows, blocks, block] float32: the numbers of tokens."""
    column = _columns(C.block, C.blocks, _STEP)
    at = (token.to(tl.int64) * stride)[:, None, None] + column
    mask = is_token[:, None, None] & (column < C.flat_dim + C.rope_dim)
    return wide(tl.load(values + at, mask=mask, other=0), C.is_spelled)


@triton.jit
def store_at(page, at, is_written, x, pages, scales, ropes, C: tl.constexpr):
    """Write numbers to entries at places `at` of pages; bytes of scales that hold none become 0."""
    BLOCK: tl.constexpr = C.block  # Triton takes shapes of such names, and not of fields
    BLOCKS: tl.constexpr = C.blocks
    page = page.to(tl.int64)
    begin = page * C.page_bytes + at * C.data_bytes
    mask = is_written[:, None, None]
    to = (pages + begin // C.flat_width)[:, None, None]
    column = _columns(C.block, C.blocks, _STEP)
    if C.is_plain:
        plain = narrow(x, pages.dtype.element_ty, C.is_spelled)
        tl.store(to + column, plain, mask=mask & (column < C.flat_dim))
    else:
        codes, kept = _encode(tl.where(column < C.flat_dim, x, 0.0), C)
        if C.is_fp4:
            byte = _columns(C.block // 2, C.blocks, _STEP // 2)
            low, high = tl.split(tl.reshape(codes, (codes.shape[0], BLOCKS, BLOCK // 2, 2)))
            pairs = ((low & 15) + (high << 4)).to(tl.uint8)
            tl.store(to + byte, pairs, mask=mask & (byte < C.flat_dim // 2))
        else:
            tl.store(to + column, codes, mask=mask & (column < C.flat_dim))
        scales_begin = page * C.scale_page_bytes + C.scales_at + at * C.scale_bytes
        block = tl.arange(0, C.scales)[None, :]
        kept = tl.where(block < C.num_scales, kept, 0).to(scales.dtype.element_ty)
        to_scale = scales + (scales_begin // C.scale_width)[:, None] + block
        tl.store(to_scale, kept, mask=is_written[:, None] & (block < C.scale_bytes // C.scale_width))
    if C.rope_dim > 0:
        is_rope = (column >= C.flat_dim) & (column < C.flat_dim + C.rope_dim)
        rope_at = ((begin + C.rope_at) // C.rope_width)[:, None, None] + (column - C.flat_dim)
        rope = narrow(x, ropes.dtype.element_ty, C.is_spelled)
        tl.store(ropes + rope_at, rope, mask=mask & is_rope)


@triton.jit
def as_read(x, pages, ropes, C: tl.constexpr):
    """[rows, blocks, block] float32: numbers as they would be read back after they were stored."""
    column = _columns(C.block, C.blocks, _STEP)
    if C.is_plain:
        flat = wide(narrow(x, pages.dtype.element_ty, C.is_spelled), C.is_spelled)
    else:
        codes, kept = _encode(tl.where(column < C.flat_dim, x, 0.0), C)
        flat = from_fp4(codes, False) if C.is_fp4 else from_fp8(codes, C.is_spelled)
        flat = flat * _kept_scale(kept, C)[:, :, None]
    if C.rope_dim > 0:
        rope = wide(narrow(x, ropes.dtype.element_ty, C.is_spelled), C.is_spelled)
        flat = tl.where(column < C.flat_dim, flat, rope)
    return flat
