"""The Triton kernels of `entries`. A program moves a few entries, all their numbers together. Offsets are
64-bit."""

# Kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagoda.kernels._fused import rounded

if TYPE_CHECKING:
    from pagoda.kernels.entries import Codec, Ring, Tokens

__all__ = [
    "FEW_TOKENS",
    "gather_all",
    "gather_chosen",
    "gather_chunk",
    "gather_windows",
    "is_last",
    "is_spelled",
    "readable",
    "row_of",
    "rows_and_stride",
    "store_entries",
    "store_window",
    "tokens_together",
    "wide",
]

# Formats of the flat part.
_IS_PLAIN = tl.constexpr(0)
_IS_FP8 = tl.constexpr(1)
_IS_FP4 = tl.constexpr(2)
# Numbers that a thread moves side by side: 16 bytes of bfloat16, so that none changes its thread on the way.
_STEP = tl.constexpr(8)
# What scales are.
_NO_SCALE = tl.constexpr(0)
_EXPONENT = tl.constexpr(1)
_FLOAT = tl.constexpr(2)


@triton.jit
def _narrow(x, kind: tl.constexpr, IS_SPELLED: tl.constexpr):
    """float32 to what a pointer to `kind` takes; to the bits of bfloat16 where casts are spelled."""
    if IS_SPELLED and kind == tl.uint16:
        return rounded(x, 7, 127).to(tl.uint16)
    else:  # noqa: RET505 (Triton compiles what stands behind a return)
        return x.to(kind)


@triton.jit
def wide(x, IS_SPELLED: tl.constexpr):
    """A number as float32; bits of bfloat16 where casts are spelled."""
    if IS_SPELLED and x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return x.to(tl.float32)


@triton.jit
def _from_fp8(byte, IS_SPELLED: tl.constexpr):
    if IS_SPELLED:
        size = (byte & 0x7F).to(tl.uint32)
        # The same digits in float32, whose exponent begins 120 lower; subnormal numbers come right as well.
        x = (size << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        x = tl.where(size == 0x7F, float("nan"), x)
        return x * tl.where(byte > 0x7F, -1.0, 1.0)
    else:  # noqa: RET505
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _to_fp8(x, IS_SPELLED: tl.constexpr):
    if IS_SPELLED:
        return rounded(x, 3, 7).to(tl.uint8)
    else:  # noqa: RET505
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _from_fp4(pairs, IS_HIGH: tl.constexpr):
    """One half of bytes as float32."""
    # Its exponent and its digit where float32 has them, whose exponents begin 126 lower.
    pairs = pairs.to(tl.uint32)
    size = (pairs << (18 if IS_HIGH else 22)) & 0x01C00000
    sign = (pairs << (24 if IS_HIGH else 28)) & 0x80000000
    return (size | sign).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def _to_fp4(x):
    """Codes, of which the low four bits count, as uint32: to nearest, of two equally near the even one. What
    is larger than all, and NaN, becomes the largest."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Next to 2^22 times the power of two below, the last digit is worth a step. So the sum ends in the number
    # of steps, and begins with the exponent, which counts for two; the 3 makes exponents begin at 0.
    power = tl.maximum((size.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    steps = (size + power * 4194307.0).to(tl.uint32, bitcast=True)
    return steps + (steps >> 22) + tl.where(x < 0, 8, 0).to(tl.uint32)


@triton.jit
def _scale_of(largest, LARGEST: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr):
    """The scale of blocks by their largest number: what is kept, and what numbers are multiplied with."""
    largest = tl.minimum(tl.maximum(largest, LEAST), 3.4028234663852886e38)
    if SCALE == _FLOAT:
        scale = tl.div_rn(largest, LARGEST)
        return scale, tl.div_rn(1.0, scale)
    else:  # noqa: RET505
        # Exponents of both subtracted; one more where the digits of the largest number pass those of LARGEST.
        limit = tl.full((), LARGEST, tl.float32).to(tl.uint32, bitcast=True)
        bits = largest.to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) - (limit >> 23) + 127
        exponent += tl.where((bits & 0x7FFFFF) > (limit & 0x7FFFFF), 1, 0).to(tl.uint32)
        return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _kept_scale(kept, SCALE: tl.constexpr):
    if SCALE == _FLOAT:
        return kept
    else:  # noqa: RET505
        return (kept.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _columns(BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr):
    """The numbers of an entry, [1, BLOCKS, BLOCK], of which a thread moves at most STEP side by side."""
    at = tl.max_contiguous(tl.arange(0, BLOCK), STEP)
    return tl.arange(0, BLOCKS)[None, :, None] * BLOCK + at[None, None, :]


@triton.jit
def _encode(
    x, FORMAT: tl.constexpr, SCALE: tl.constexpr, SCALES: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers, [ROWS, BLOCKS, BLOCK] float32, as codes of the flat format, and scales, [ROWS, SCALES].

    Codes of fp8 are uint8, of fp4 uint32, one a number."""
    size = tl.abs(x)
    if IS_SPELLED:
        size = tl.where(x != x, 0.0, size)  # a GPU's maximum leaves NaN out
    largest = tl.max(size, 2)
    if SCALES == 1:
        largest = tl.max(largest, 1, keep_dims=True)
    kept, inverse = _scale_of(largest, LARGEST, LEAST, SCALE)
    scaled = x * inverse[:, :, None]
    if FORMAT == _IS_FP4:
        codes = _to_fp4(scaled)
    else:
        if IS_SPELLED:  # a GPU's cast saturates
            scaled = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        codes = _to_fp8(scaled, IS_SPELLED)
    return codes, kept


@triton.jit
def _load_entries(
    page, at, is_read, pages, scales, ropes,
    PAGE_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, NUM_SCALES: tl.constexpr,
    WIDTH: tl.constexpr, SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers of entries of pages, [ROWS] both, as float32: [ROWS, BLOCKS, BLOCK]."""
    page = page.to(tl.int64)
    begin = page * PAGE_BYTES + at * DATA_BYTES
    mask = is_read[:, None, None]
    data = (pages + begin // WIDTH)[:, None, None]
    column = _columns(BLOCK, BLOCKS, _STEP)
    if FORMAT == _IS_FP4:
        byte = _columns(BLOCK // 2, BLOCKS, _STEP // 2)
        pairs = tl.load(data + byte, mask=mask & (byte < FLAT // 2), other=0)
        x = tl.join(_from_fp4(pairs, False), _from_fp4(pairs, True))
        x = tl.reshape(x, (x.shape[0], BLOCKS, BLOCK))
    else:
        x = tl.load(data + column, mask=mask & (column < FLAT), other=0)
        x = _from_fp8(x, IS_SPELLED) if FORMAT == _IS_FP8 else wide(x, IS_SPELLED)
    if SCALE != _NO_SCALE:
        scales_begin = page * SCALE_PAGE_BYTES + SCALES_AT + at * SCALE_BYTES
        block = tl.arange(0, SCALES)[None, :]
        kept = tl.load(
            scales + (scales_begin // SCALE_WIDTH)[:, None] + block,
            mask=is_read[:, None] & (block < NUM_SCALES),
            other=0,
        )
        x = x * _kept_scale(kept, SCALE)[:, :, None]
    if ROPE > 0:
        is_rope = (column >= FLAT) & (column < FLAT + ROPE)
        rope_at = ((begin + ROPE_AT) // ROPE_WIDTH)[:, None, None] + (column - FLAT)
        rope = wide(tl.load(ropes + rope_at, mask=mask & is_rope, other=0), IS_SPELLED)
        x = tl.where(is_rope, rope, x)
    return x


@triton.jit
def _put(
    row, is_row, x, out,
    FLAT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Write numbers of entries to rows of `out`, [ROWS] int64."""
    column = _columns(BLOCK, BLOCKS, _STEP)
    to = out + (row * (FLAT + ROPE))[:, None, None] + column
    mask = is_row[:, None, None] & (column < FLAT + ROPE)
    tl.store(to, _narrow(x, out.dtype.element_ty, IS_SPELLED), mask=mask)


@triton.jit
def _take(
    token, is_token, values, stride, FLAT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers of tokens as float32: [ROWS, BLOCKS, BLOCK]."""
    column = _columns(BLOCK, BLOCKS, _STEP)
    at = (token.to(tl.int64) * stride)[:, None, None] + column
    mask = is_token[:, None, None] & (column < FLAT + ROPE)
    return wide(tl.load(values + at, mask=mask, other=0), IS_SPELLED)


@triton.jit
def _store_at(
    page, at, is_written, x, pages, scales, ropes,
    PAGE_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, NUM_SCALES: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Write numbers to entries of pages, [ROWS] both; bytes of scales that hold none become 0."""
    page = page.to(tl.int64)
    begin = page * PAGE_BYTES + at * DATA_BYTES
    mask = is_written[:, None, None]
    to = (pages + begin // WIDTH)[:, None, None]
    column = _columns(BLOCK, BLOCKS, _STEP)
    if FORMAT == _IS_PLAIN:
        narrow = _narrow(x, pages.dtype.element_ty, IS_SPELLED)
        tl.store(to + column, narrow, mask=mask & (column < FLAT))
    else:
        codes, kept = _encode(
            tl.where(column < FLAT, x, 0.0), FORMAT, SCALE, SCALES, LARGEST, LEAST, IS_SPELLED
        )
        if FORMAT == _IS_FP4:
            byte = _columns(BLOCK // 2, BLOCKS, _STEP // 2)
            low, high = tl.split(tl.reshape(codes, (codes.shape[0], BLOCKS, BLOCK // 2, 2)))
            pairs = ((low & 15) + (high << 4)).to(tl.uint8)
            tl.store(to + byte, pairs, mask=mask & (byte < FLAT // 2))
        else:
            tl.store(to + column, codes, mask=mask & (column < FLAT))
        scales_begin = page * SCALE_PAGE_BYTES + SCALES_AT + at * SCALE_BYTES
        block = tl.arange(0, SCALES)[None, :]
        kept = tl.where(block < NUM_SCALES, kept, 0).to(scales.dtype.element_ty)
        to_scale = scales + (scales_begin // SCALE_WIDTH)[:, None] + block
        tl.store(to_scale, kept, mask=is_written[:, None] & (block < SCALE_BYTES // SCALE_WIDTH))
    if ROPE > 0:
        is_rope = (column >= FLAT) & (column < FLAT + ROPE)
        rope_at = ((begin + ROPE_AT) // ROPE_WIDTH)[:, None, None] + (column - FLAT)
        narrow = _narrow(x, ropes.dtype.element_ty, IS_SPELLED)
        tl.store(ropes + rope_at, narrow, mask=mask & is_rope)


@triton.jit
def _as_read(
    x, pages, ropes, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers of entries, [ROWS, BLOCKS, BLOCK] float32, as they would be read back."""
    column = _columns(BLOCK, BLOCKS, _STEP)
    if FORMAT == _IS_PLAIN:
        flat = wide(_narrow(x, pages.dtype.element_ty, IS_SPELLED), IS_SPELLED)
    else:
        codes, kept = _encode(
            tl.where(column < FLAT, x, 0.0), FORMAT, SCALE, SCALES, LARGEST, LEAST, IS_SPELLED
        )
        flat = _from_fp4(codes, False) if FORMAT == _IS_FP4 else _from_fp8(codes, IS_SPELLED)
        flat = flat * _kept_scale(kept, SCALE)[:, :, None]
    if ROPE > 0:
        flat = tl.where(column < FLAT, flat, wide(_narrow(x, ropes.dtype.element_ty, IS_SPELLED), IS_SPELLED))
    return flat


@triton.jit
def row_of(request, rows, batch, num_rows):
    """The row of requests; 0 for padding, and for what is no row."""
    is_request = (request >= 0) & (request < batch)
    row = tl.load(rows + request, mask=is_request, other=0)
    return tl.where((row > 0) & (row < num_rows), row, 0).to(tl.int64)


@triton.jit
def is_last(token, request, position, request_ids, positions, num_tokens, RING: tl.constexpr):
    """Whether no token of the batch takes a token's place in a ring: that RING behind is not of its request,
    or padding."""
    is_later = token + RING < num_tokens
    later = tl.load(request_ids + token + RING, mask=is_later, other=-1)
    later_position = tl.load(positions + token + RING, mask=is_later, other=-1)
    return (later != request) | (later_position != position + RING)


@triton.jit
def _place_of(row, entry, table, columns, num_pages, ENTRIES: tl.constexpr):
    """Where entries of rows lie, pages and places in them, and whether they lie anywhere."""
    number = entry.to(tl.uint32)  # divided with fewer instructions
    column = (number // ENTRIES).to(tl.int32)
    is_there = (row > 0) & (entry >= 0) & (column < columns)
    page = tl.load(table + row * columns + column, mask=is_there, other=0)
    return page, (number % ENTRIES).to(tl.int32), is_there & (page > 0) & (page < num_pages)


@triton.jit
def _store_ends(
    token, is_end, request, position, rows, values, stride, table, pages, scales, ropes, batch, num_rows,
    columns, num_pages, RATIO: tl.constexpr,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, NUM_SCALES: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Write the entries of tokens that end a block."""
    # Numbers are on their way while the place is looked for.
    x = _take(token, is_end, values, stride, FLAT, ROPE, BLOCK, BLOCKS, IS_SPELLED)
    row = row_of(tl.where(is_end, request, -1), rows, batch, num_rows)
    entry = (position.to(tl.uint32) // RATIO).to(tl.int32)
    page, at, is_written = _place_of(row, entry, table, columns, num_pages, ENTRIES)
    _store_at(
        page, at, is_written, x, pages, scales, ropes, PAGE_BYTES, DATA_BYTES, SCALE_PAGE_BYTES, SCALES_AT,
        SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS, SCALES, NUM_SCALES, LARGEST, LEAST,
        WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
    )  # fmt: skip


# Sizes of batches and pools make no variants: what a call compiled serves a capture of any other.
@triton.jit(
    do_not_specialize=["num_tokens", "group", "batch", "num_rows", "columns", "num_pages"],
    do_not_specialize_on_alignment=["rows", "request_ids", "positions", "table", "scales", "ring_positions"],
)
def _store(
    rows, request_ids, positions, values, stride, table, pages, scales, ropes, ring_positions,
    num_tokens, group, batch, num_rows, columns, num_pages,
    RATIO: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, NUM_SCALES: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    # Into rings where RING > 0, else into pages at the ends of blocks of RATIO tokens.
    first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * group
    is_first = first < num_tokens
    request = tl.load(request_ids + first, mask=is_first, other=-1)
    position = tl.load(positions + first, mask=is_first, other=-1)
    if RING > 0:
        row = tl.where(position >= 0, row_of(request, rows, batch, num_rows), 0)
        is_written = (row > 0) & is_last(first, request, position, request_ids, positions, num_tokens, RING)
        page = row * RING + position % RING
        tl.store(ring_positions + page, position, mask=is_written)
        x = _take(first, is_written, values, stride, FLAT, ROPE, BLOCK, BLOCKS, IS_SPELLED)
        _store_at(
            page, tl.zeros((ROWS,), tl.int32), is_written, x, pages, scales, ropes, PAGE_BYTES, DATA_BYTES,
            SCALE_PAGE_BYTES, SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS,
            SCALES, NUM_SCALES, LARGEST, LEAST, WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
        )  # fmt: skip
    else:
        # Where a group, of at most RATIO tokens, is of one request, at most one ends a block, and its place
        # is known: so a program has ROWS entries to write. The tokens of other groups are taken one by one.
        last = first + group - 1
        last_request = tl.load(request_ids + last, mask=last < num_tokens, other=-1)
        last_position = tl.load(positions + last, mask=last < num_tokens, other=-1)
        is_run = (request >= 0) & (position >= 0)  # padding may stand at both ends
        is_run = is_run & (last_request == request) & (last_position == position + group - 1)
        at = RATIO - 1 - (position.to(tl.uint32) % RATIO).to(tl.int32)
        _store_ends(
            first + at, is_run & (at < group), request, position + at, rows, values, stride, table, pages,
            scales, ropes, batch, num_rows, columns, num_pages, RATIO, PAGE_BYTES, ENTRIES, DATA_BYTES,
            SCALE_PAGE_BYTES, SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS,
            SCALES, NUM_SCALES, LARGEST, LEAST, WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
        )  # fmt: skip
        is_mixed = is_first & (is_run == 0) & (first != last)  # alone, it is a run or padding
        for number in range(tl.where(tl.max(is_mixed.to(tl.int32), 0) > 0, group, 0)):
            token = first + number
            is_token = is_mixed & (token < num_tokens)
            request = tl.load(request_ids + token, mask=is_token, other=-1)
            position = tl.load(positions + token, mask=is_token, other=-1)
            is_end = (position >= 0) & (position % RATIO == RATIO - 1)
            _store_ends(
                token, is_end, request, position, rows, values, stride, table, pages, scales, ropes, batch,
                num_rows, columns, num_pages, RATIO, PAGE_BYTES, ENTRIES, DATA_BYTES,
                SCALE_PAGE_BYTES, SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS,
                SCALES, NUM_SCALES, LARGEST, LEAST, WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
            )  # fmt: skip


# What a gather reads.
_CHOSEN = tl.constexpr(0)
_ALL = tl.constexpr(1)
_WINDOWS = tl.constexpr(2)
_CHUNK = tl.constexpr(3)


@triton.jit
def _is_own(token, is_token, request, request_ids, positions):
    """Which tokens are of a request, and no padding."""
    is_real = tl.load(positions + token, mask=is_token, other=-1) >= 0
    return is_real & (tl.load(request_ids + token, mask=is_token, other=-1) == request)


@triton.jit
def _tokens_of(request, request_ids, positions, num_tokens, SCAN: tl.constexpr):
    """Of a request: its first token, how many there are, and its length after the last."""
    # In a step of decoding token i is the only one of request i: then nothing has to be looked for.
    is_alone = _is_own(request, request < num_tokens, request, request_ids, positions)
    is_before = _is_own(request - 1, (request > 0) & (request <= num_tokens), request, request_ids, positions)
    is_behind = _is_own(request + 1, request + 1 < num_tokens, request, request_ids, positions)
    is_alone = is_alone & (is_before == 0) & (is_behind == 0)
    first = tl.where(is_alone, request, num_tokens)
    last = tl.where(is_alone, request, -1)
    if is_alone == 0:
        # Its tokens stand side by side: of long ones a sample of the batch finds some, and where they begin
        # and end is near. Only where none is found all are looked at.
        step = tl.cdiv(num_tokens, SCAN)
        token = tl.arange(0, SCAN) * step
        is_own = _is_own(token, token < num_tokens, request, request_ids, positions)
        low = tl.min(tl.where(is_own, token, num_tokens), 0)
        high = tl.max(tl.where(is_own, token, -1), 0)
        first, last = low, high
        is_found = high >= 0
        for begin in range(tl.where(is_found, low - step + 1, 0), tl.where(is_found, low, 0), SCAN):
            at = begin + tl.arange(0, SCAN)
            is_at = _is_own(at, (at >= 0) & (at < low), request, request_ids, positions)
            first = tl.minimum(first, tl.min(tl.where(is_at, at, num_tokens), 0))
        for begin in range(high + 1, tl.where(is_found, high + step, 0), SCAN):
            at = begin + tl.arange(0, SCAN)
            is_at = _is_own(at, at < num_tokens, request, request_ids, positions)
            last = tl.maximum(last, tl.max(tl.where(is_at, at, -1), 0))
        for begin in range(0, tl.where(is_found | (step <= 1), 0, num_tokens), SCAN):
            at = begin + tl.arange(0, SCAN)
            is_at = _is_own(at, at < num_tokens, request, request_ids, positions)
            first = tl.minimum(first, tl.min(tl.where(is_at, at, num_tokens), 0))
            last = tl.maximum(last, tl.max(tl.where(is_at, at, -1), 0))
    length = tl.load(positions + last, mask=last >= 0, other=-1) + 1
    return first, tl.maximum(last - first + 1, 0), length


@triton.jit
def _ring_place(row, position, is_wanted, ring_positions, RING: tl.constexpr):
    """Where positions of a row lie in its ring, and whether they are there."""
    row = tl.where(is_wanted, row, 0)
    is_wanted = (row > 0) & (position >= 0)
    page = row * RING + (position.to(tl.uint32) % RING).to(tl.int32)
    return page, is_wanted & (tl.load(ring_positions + page, mask=is_wanted, other=-1) == position)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "batch", "num_rows", "columns"),
        *("num_pages", "width", "num_chunks", "tiles"),
    ],
    do_not_specialize_on_alignment=[
        *("rows", "request_ids", "positions", "chosen", "table"),
        *("scales", "ring_positions", "mask_out", "lens"),
    ],
)
def _gather(
    rows, request_ids, positions, chosen, table, pages, scales, ropes, ring_positions, chunk, stride,
    out, mask_out, lens, num_tokens, batch, num_rows, columns, num_pages, width, num_chunks, tiles,
    WHAT: tl.constexpr, IS_SEARCH: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
    WINDOW: tl.constexpr, SCAN: tl.constexpr, ROWS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, NUM_SCALES: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    # A program fills tiles × ROWS places of one token, or of one request: `whose`.
    whose = tl.program_id(0) // num_chunks
    chunk_at = tl.program_id(0) % num_chunks
    is_first = chunk_at == 0
    if WHAT == _CHOSEN or WHAT == _WINDOWS:  # noqa: SIM109 (Triton has no `in`)
        position = tl.load(positions + whose)
        row = tl.where(position >= 0, row_of(tl.load(request_ids + whose), rows, batch, num_rows), 0)
    else:
        first, number, length = _tokens_of(whose, request_ids, positions, num_tokens, SCAN)
        row = tl.where(number > 0, row_of(whose, rows, batch, num_rows), 0)
    if WHAT == _ALL:
        visible = tl.where(row > 0, length // RATIO, 0)
        if is_first:
            tl.store(lens + whose, visible)
    elif WHAT == _WINDOWS:
        visible = tl.where(row > 0, tl.minimum(position + 1, WINDOW), 0)
        if is_first:
            tl.store(lens + whose, visible)
    elif WHAT == _CHUNK:
        number = tl.where(row > 0, number, 0)
        start = length - number
        before = tl.where(row > 0, tl.minimum(start, WINDOW - 1), 0)
        if is_first:
            tl.store(lens + whose, before + number)
    for tile in range(tiles if IS_SEARCH else 1):
        begin = (chunk_at * tiles + tile) * ROWS
        at = begin + tl.arange(0, ROWS)
        is_at = at < width
        to = whose.to(tl.int64) * width + at
        if WHAT == _CHOSEN:
            entry = tl.load(chosen + to, mask=is_at, other=-1).to(tl.int64)
            is_visible = is_at & (entry < (position + 1) // RATIO)
            of = tl.where(is_visible, row, 0)
            page, in_page, is_read = _place_of(of, entry, table, columns, num_pages, ENTRIES)
            tl.store(mask_out + to, is_read.to(tl.uint8), mask=is_at)
        elif WHAT == _ALL:
            of = tl.where(is_at & (at < visible), row, 0)
            page, in_page, is_read = _place_of(of, at, table, columns, num_pages, ENTRIES)
        elif WHAT == _WINDOWS:
            wanted = position + 1 - visible + at
            page, is_read = _ring_place(row, wanted, at < visible, ring_positions, RING)
            in_page = tl.zeros((ROWS,), tl.int32)
        if WHAT == _CHUNK:
            x = tl.zeros((ROWS, BLOCKS, BLOCK), tl.float32)
            if begin < before:
                page, is_read = _ring_place(row, start - before + at, at < before, ring_positions, RING)
                x = _load_entries(
                    page, tl.zeros((ROWS,), tl.int32), is_read, pages, scales, ropes, PAGE_BYTES, DATA_BYTES,
                    SCALE_PAGE_BYTES, SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK,
                    BLOCKS, SCALES, NUM_SCALES, WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
                )  # fmt: skip
            if begin + ROWS > before:
                in_chunk = at - before
                is_new = (in_chunk >= 0) & (in_chunk < number)
                new = _take(first + in_chunk, is_new, chunk, stride, FLAT, ROPE, BLOCK, BLOCKS, IS_SPELLED)
                new = _as_read(
                    new, pages, ropes, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS, SCALES, LARGEST, LEAST,
                    IS_SPELLED,
                )  # fmt: skip
                x = tl.where(is_new[:, None, None], new, x)
        else:
            x = _load_entries(
                page, in_page, is_read, pages, scales, ropes, PAGE_BYTES, DATA_BYTES, SCALE_PAGE_BYTES,
                SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS, SCALES, NUM_SCALES,
                WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
            )  # fmt: skip
        _put(to, is_at, x, out, FLAT, ROPE, BLOCK, BLOCKS, IS_SPELLED)


_FORMATS = {"float8_e4m3fn": _IS_FP8, "float4_e2m1fn_x2": _IS_FP4}
_SCALES = {None: _NO_SCALE, "float8_e8m0fnu": _EXPONENT, "float32": _FLOAT}
_PROGRAM_NUMBERS, _SEARCH_NUMBERS = 4096, 8192  # that a program moves together
_STORE_WARPS, _GATHER_WARPS = 1, 4  # one warp has as many small entries as threads: each is looked up once
_BLOCK = 32  # numbers, where scales do not say how many
_SCAN = 1024  # tokens of a batch that a program looks at together
_MANY_TILES, _MOST_TILES = 2048, 8
FEW_TOKENS, _LONG_RUNS, _MOST_TOGETHER = 2048, 2, 8


def is_spelled(device: torch.device) -> bool:
    """Whether casts to narrow floats are made of integers: in Triton's interpreter, and on older GPUs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)


def readable(tensor: torch.Tensor, is_spelled: bool) -> torch.Tensor:
    """Numbers as a kernel takes them: bits of bfloat16 where casts are spelled."""
    return tensor.view(torch.uint16) if is_spelled and tensor.dtype == torch.bfloat16 else tensor


def tokens_together(tokens: Tokens, ratio: int) -> int:
    """How many tokens are looked at together for the one that may end a block of `ratio`: so many where there
    are many and requests have more than that, else one."""
    num_tokens, num_requests = tokens.positions.shape[0], tokens.rows.shape[0]
    return ratio if num_tokens > FEW_TOKENS and num_tokens >= _LONG_RUNS * ratio * num_requests else 1


def rows_and_stride(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Numbers of tokens, each token's side by side."""
    values = values.detach()
    return (values, values.stride(0)) if values.stride(-1) == 1 else (values.contiguous(), values.shape[1])


class _Stored(NamedTuple):
    """Where entries lie: their data in pages of one tensor, their scales, from `scales_at` on, in those of
    another or of the same."""

    data: torch.Tensor  # [pages, bytes of a page] uint8
    scales: torch.Tensor
    scales_at: int
    entries_per_page: int


def _in_pages(codec: Codec, pages: torch.Tensor, entries_per_page: int) -> _Stored:
    return _Stored(pages, pages, entries_per_page * codec.data_bytes, entries_per_page)


def _in_ring(ring: Ring) -> _Stored:
    data = ring.data.view(-1, ring.data.shape[2])
    return _Stored(data, data if ring.scales is None else ring.scales.view(-1, ring.scales.shape[2]), 0, 1)


def _typed(
    codec: Codec, stored: _Stored, is_spelled: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of pages as the types of the flat part, of scales and of the rotated part."""
    is_plain = codec.scale_dtype is None
    flat = stored.data.view(getattr(torch, codec.flat_dtype)) if is_plain else stored.data
    scales = stored.scales.view(torch.float32) if codec.scale_dtype == "float32" else stored.scales
    ropes = stored.data.view(getattr(torch, codec.rope_dtype)) if codec.rope_dim else flat
    return readable(flat, is_spelled), scales, readable(ropes, is_spelled)


def _constants(codec: Codec, stored: _Stored, is_spelled: bool, numbers: int) -> dict[str, Any]:
    is_plain = codec.scale_dtype is None
    scale_bytes = 4 if codec.scale_dtype == "float32" else 1
    # Numbers that have no scale, or one for all, are dealt out in blocks as well.
    is_one = codec.scale_bytes == scale_bytes
    block = min(triton.next_power_of_2(codec.dim), _BLOCK) if is_plain or is_one else codec.block
    num_scales = codec.scale_bytes // scale_bytes
    blocks = triton.next_power_of_2(max(triton.cdiv(codec.dim, block), num_scales))
    rope_bytes = codec.rope_dim * getattr(torch, codec.rope_dtype).itemsize
    return {
        "ROWS": max(1, numbers // (blocks * block)),
        "PAGE_BYTES": stored.data.shape[1],
        "ENTRIES": stored.entries_per_page,
        "DATA_BYTES": codec.data_bytes,
        "SCALE_PAGE_BYTES": stored.scales.shape[1],
        "SCALES_AT": stored.scales_at,
        "SCALE_BYTES": codec.scale_bytes,
        "ROPE_AT": codec.data_bytes - rope_bytes,
        "FORMAT": _FORMATS.get(codec.flat_dtype, _IS_PLAIN).value,
        "SCALE": _SCALES[codec.scale_dtype].value,
        "FLAT": codec.flat_dim,
        "ROPE": codec.rope_dim,
        "BLOCK": block,
        "BLOCKS": blocks,
        "SCALES": 1 if is_one else blocks,
        "NUM_SCALES": codec.num_scales,
        "LARGEST": 0.0 if is_plain else codec.largest,
        "LEAST": 0.0 if is_plain else codec.least,
        "WIDTH": getattr(torch, codec.flat_dtype).itemsize if is_plain else 1,
        "SCALE_WIDTH": scale_bytes,
        "ROPE_WIDTH": getattr(torch, codec.rope_dtype).itemsize,
        "IS_SPELLED": is_spelled,
    }


def _launch_store(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,
    table: torch.Tensor,
    stored: _Stored,
    ring_positions: torch.Tensor,
    num_rows: int,
    ratio: int,
    ring: int,
) -> None:
    num_tokens = tokens.positions.shape[0]
    if num_tokens == 0:
        return
    spelled = is_spelled(values.device)
    constants = _constants(codec, stored, spelled, _PROGRAM_NUMBERS)
    given, stride = rows_and_stride(values)
    group = 1 if ring else tokens_together(tokens, min(ratio, _MOST_TOGETHER))
    _store[(triton.cdiv(num_tokens, constants["ROWS"] * group),)](
        tokens.rows, tokens.request_ids, tokens.positions, readable(given, spelled), stride, table,
        *_typed(codec, stored, spelled), ring_positions, num_tokens, group, tokens.rows.shape[0], num_rows,
        table.shape[1], stored.data.shape[0], RATIO=ratio, RING=ring, **constants,
        num_warps=_STORE_WARPS,
    )  # fmt: skip


def store_window(codec: Codec, tokens: Tokens, values: torch.Tensor, ring: Ring) -> None:
    num_rows, size = ring.positions.shape
    _launch_store(
        codec, tokens, values, ring.positions, _in_ring(ring), ring.positions, num_rows, ratio=1, ring=size
    )


def store_entries(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,
    ratio: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
) -> None:
    stored = _in_pages(codec, pages, entries_per_page)
    _launch_store(codec, tokens, values, table, stored, table, table.shape[0], ratio=ratio, ring=0)


def _launch_gather(
    codec: Codec,
    tokens: Tokens,
    what: Any,
    out: torch.Tensor,  # [tokens or requests, width, dim]
    stored: _Stored,
    num_rows: int,
    *,
    table: torch.Tensor,
    chosen: torch.Tensor | None = None,
    chunk: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
    ratio: int = 1,
    ring: int = 1,
    window: int = 1,
) -> None:
    number, width = out.shape[:2]
    if number == 0 or (width == 0 and lens is None):
        return
    spelled = is_spelled(out.device)
    # Where tokens of a request have to be looked for, a program that has more to do looks less often.
    is_search = what in (_ALL, _CHUNK) and tokens.positions.shape[0] > number
    constants = _constants(codec, stored, spelled, _SEARCH_NUMBERS if is_search else _PROGRAM_NUMBERS)
    num_tiles = triton.cdiv(width, constants["ROWS"])
    tiles = max(1, min(number * num_tiles // _MANY_TILES, _MOST_TILES)) if is_search else 1
    num_chunks = max(1, triton.cdiv(num_tiles, tiles))
    given, stride = (out, 0) if chunk is None else rows_and_stride(chunk)
    _gather[(number * num_chunks,)](
        tokens.rows, tokens.request_ids, tokens.positions, table if chosen is None else chosen, table,
        *_typed(codec, stored, spelled), table, readable(given, spelled), stride,
        readable(out, spelled), stored.data if mask is None else mask.view(torch.uint8),
        tokens.rows if lens is None else lens, tokens.positions.shape[0], tokens.rows.shape[0], num_rows,
        table.shape[1], stored.data.shape[0], width, num_chunks, tiles, WHAT=what.value, IS_SEARCH=is_search,
        RATIO=ratio, RING=ring, WINDOW=window, SCAN=_SCAN, **constants, num_warps=_GATHER_WARPS,
    )  # fmt: skip


def gather_chosen(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    chosen: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    _launch_gather(
        codec, tokens, _CHOSEN, out, _in_pages(codec, pages, entries_per_page), table.shape[0], table=table,
        chosen=chosen, mask=mask, ratio=ratio,
    )  # fmt: skip


def gather_all(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    _launch_gather(
        codec,
        tokens,
        _ALL,
        out,
        _in_pages(codec, pages, entries_per_page),
        table.shape[0],
        table=table,
        lens=lens,
        ratio=ratio,
    )


def gather_windows(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    out: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    _launch_gather(
        codec, tokens, _WINDOWS, out, _in_ring(ring), ring.positions.shape[0], table=ring.positions,
        lens=lens, ring=ring.positions.shape[1], window=window,
    )  # fmt: skip


def gather_chunk(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    chunk: torch.Tensor,
    out: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    _launch_gather(
        codec, tokens, _CHUNK, out, _in_ring(ring), ring.positions.shape[0], table=ring.positions,
        chunk=chunk, lens=lens, ring=ring.positions.shape[1], window=window,
    )  # fmt: skip
