"""Entries of compressed attention in Triton: numbers to bytes of a page and back, by a `Codec`.

In: a tile of entries as numbers, [rows, blocks, block] float32, and the page and index in it of each entry,
[rows]. Out: bytes in pages, or numbers. The whole layout is one compile-time value, `EntryConstants`, which
kernels take as C. Offsets are 64-bit.
"""

# Kernels are written in Triton's language, which mypy cannot type.
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
    """What a kernel knows at compile time about the entries that it moves. One variant per distinct value."""

    rows: int  # entries in a tile, which a program moves together
    blocks: int  # blocks per entry of a tile, a power of two: enough for all numbers and all scales
    block: int  # numbers per block of a tile, a power of two
    scales: int  # scales per entry of a tile: 1, or one per block

    flat_dim: int  # numbers in the flat format
    rope_dim: int  # numbers of the rotated part, which follows
    num_scales: int
    is_plain: bool  # numbers have no scale
    is_fp4: bool  # numbers with a scale are fp4, else fp8
    has_float_scales: bool  # scales are float32, else exponents
    largest: float  # largest number of the flat format
    least: float  # lower bound of a block's maximum when its scale is computed

    page_bytes: int
    entries_per_page: int
    data_bytes: int  # per entry
    rope_at: int  # byte offset of the rotated part in an entry's data
    scale_page_bytes: int  # bytes of a page that holds scales
    scales_at: int  # byte offset of the scales in it
    scale_bytes: int  # per entry

    flat_width: int  # bytes per element of the tensor that holds the flat part
    scale_width: int
    rope_width: int
    is_spelled: bool  # casts are spelled out in integers


_BLOCK = 32  # numbers per block where there are no scales to define blocks


class Stored(NamedTuple):
    """Where entries are: their data in pages of one tensor, their scales, from byte `scales_at` on, in pages
    of another tensor or of the same."""

    data: torch.Tensor  # [pages, page_bytes] uint8
    scales: torch.Tensor  # [pages, scale_page_bytes] uint8
    scales_at: int
    entries_per_page: int

    @staticmethod
    def in_pages(codec: Codec, pages: torch.Tensor, entries_per_page: int) -> Stored:
        """Entries in pages, [pages, page_bytes] uint8: the data of all entries, then the scales of all."""
        return Stored(pages, pages, entries_per_page * codec.data_bytes, entries_per_page)

    @staticmethod
    def in_ring(ring: Ring) -> Stored:
        """Entries in rings: each cell of a ring counts as a page."""
        data = ring.data.view(-1, ring.data.shape[2])
        scales = data if ring.scales is None else ring.scales.view(-1, ring.scales.shape[2])
        return Stored(data, scales, 0, 1)

    def typed(self, codec: Codec, is_spelled: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bytes viewed as elements of the flat part, of the scales and of the rotated part."""
        flat = self.data.view(getattr(torch, codec.flat_dtype)) if codec.scale_dtype is None else self.data
        scales = self.scales.view(torch.float32) if codec.scale_dtype == "float32" else self.scales
        ropes = self.data.view(getattr(torch, codec.rope_dtype)) if codec.rope_dim else flat
        return readable(flat, is_spelled), scales, readable(ropes, is_spelled)

    def constants(self, codec: Codec, is_spelled: bool, numbers: int) -> EntryConstants:
        """Return the compile-time value for kernels whose programs move about `numbers` numbers together."""
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
    # Numbers without a scale, or with one for all of them, are split into blocks, too.
    is_one = codec.scale_bytes == scale_width
    block = min(triton.next_power_of_2(codec.dim), _BLOCK) if is_plain or is_one else codec.block
    num_scales = codec.scale_bytes // scale_width  # with the padding that follows, which is written, too
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


# Adjacent numbers per thread: 16 bytes of bfloat16, so that no number has to change threads on the way.
_STEP = tl.constexpr(8)


@triton.jit
def _columns(BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr):
    """[1, BLOCKS, BLOCK]: indices of the numbers of an entry; a thread moves at most STEP adjacent ones."""
    at = tl.max_contiguous(tl.arange(0, BLOCK), STEP)
    return tl.arange(0, BLOCKS)[None, :, None] * BLOCK + at[None, None, :]


@triton.jit
def _scale_of(largest, C: tl.constexpr):
    """Return the scale of blocks from their largest number: as it is stored, and the factor for numbers."""
    largest = tl.maximum(largest, C.least)
    if C.has_float_scales:
        scale = tl.div_rn(largest, C.largest)
        return scale, tl.div_rn(1.0, scale)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        # The difference of the exponents, plus one if the mantissa of `largest` exceeds that of C.largest.
        limit = tl.full((), C.largest, tl.float32).to(tl.uint32, bitcast=True)
        bits = largest.to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) - (limit >> 23) + 127
        exponent += tl.where((bits & 0x7FFFFF) > (limit & 0x7FFFFF), 1, 0).to(tl.uint32)
        return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _kept_scale(kept, C: tl.constexpr):
    """Return stored scales as float32."""
    if C.has_float_scales:
        return kept
    else:  # noqa: RET505
        return (kept.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, C: tl.constexpr):
    """Return the codes of numbers in the flat format, [rows, blocks, block], and scales, [rows, scales].

    One code per number: uint8 for fp8, uint32 for fp4."""
    # NaN and infinity do not affect the scale, so that they leave the other numbers of their block alone.
    # Infinity times 0 is NaN, which a GPU's maximum ignores: one instruction per number instead of a
    # comparison.
    if C.is_spelled:  # noqa: SIM108 (a branch at compile time)
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
    """[rows, blocks, block] float32: the numbers of entry `at` of each page."""
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
    """Write the numbers of entry i to row[i] of `out`, [rows] int64."""
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
    """Write numbers to entry `at` of each page; padding after the scales becomes 0."""
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
    """[rows, blocks, block] float32: the numbers as they would be read back after a store."""
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
