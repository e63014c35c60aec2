"""The Triton kernels of `entries`. A program moves a few entries: their places first, then all their numbers.
Offsets are 64-bit."""

# Kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagoda.kernels.fused import rounded

if TYPE_CHECKING:
    from pagoda.kernels.entries import Codec, Ring, Tokens

__all__ = [
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
    "wide",
]

# Formats of the flat part.
_IS_PLAIN = tl.constexpr(0)
_IS_FP8 = tl.constexpr(1)
_IS_FP4 = tl.constexpr(2)
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
def _from_fp4(code):
    size = (code & 7).to(tl.int32)
    # 0, ½, then 1, 1½, 2, 3, 4, 6: two digits each for three exponents.
    power = ((size >> 1) + 126).to(tl.uint32) << 23
    x = power.to(tl.float32, bitcast=True) * (1.0 + 0.5 * (size & 1).to(tl.float32))
    x = tl.where(size < 2, 0.5 * size.to(tl.float32), x)
    return x * tl.where(code > 7, -1.0, 1.0)  # not −x: Triton's is 0 − x, which loses the sign of 0


@triton.jit
def _to_fp4(x):
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code + tl.where(x < 0, 8, 0)


@triton.jit
def _scale_of(largest, LARGEST: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr):
    """The scale of blocks by their largest number: what is kept, and what numbers are multiplied with."""
    scale = tl.div_rn(tl.minimum(tl.maximum(largest, LEAST), 3.4028234663852886e38), LARGEST)
    if SCALE == _FLOAT:
        return scale, tl.div_rn(1.0, scale)
    else:  # noqa: RET505
        bits = scale.to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) > 0, 1, 0).to(tl.uint32)
        return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _kept_scale(kept, SCALE: tl.constexpr):
    if SCALE == _FLOAT:
        return kept
    else:  # noqa: RET505
        return (kept.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _columns(FLAT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr):
    """[1, BLOCKS, SPAN] numbers of the flat part, and whether they are some."""
    block = tl.arange(0, BLOCKS)[None, :, None]
    at = tl.arange(0, SPAN)[None, None, :]
    column = block * BLOCK + at
    return column, (at < BLOCK) & (column < FLAT)


@triton.jit
def _load_flat(
    data, scales, is_read,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SPAN: tl.constexpr, NUM_SCALES: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers of entries, [ROWS, BLOCKS, SPAN] float32, from where their data and scales begin, [ROWS]."""
    mask = is_read[:, None, None]
    if FORMAT == _IS_FP4:
        byte, is_byte = _columns(FLAT // 2, BLOCK // 2, BLOCKS, SPAN // 2)
        pair = tl.load(data[:, None, None] + byte, mask=mask & is_byte, other=0)
        x = tl.join(_from_fp4(pair & 15), _from_fp4(pair >> 4))
        x = tl.reshape(x, (x.shape[0], BLOCKS, SPAN))
    else:
        column, is_column = _columns(FLAT, BLOCK, BLOCKS, SPAN)
        x = tl.load(data[:, None, None] + column, mask=mask & is_column, other=0)
        x = _from_fp8(x, IS_SPELLED) if FORMAT == _IS_FP8 else wide(x, IS_SPELLED)
    if SCALE != _NO_SCALE:
        block = tl.arange(0, BLOCKS)[None, :]
        kept = tl.load(scales[:, None] + block, mask=is_read[:, None] & (block < NUM_SCALES), other=0)
        x = x * _kept_scale(kept, SCALE)[:, :, None]
    return x


@triton.jit
def _encode(
    x, FORMAT: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers, [ROWS, BLOCKS, SPAN] float32, as codes of the flat format, and scales to keep, [ROWS, BLOCKS].

    Codes are uint8; of fp4 one a number."""
    largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 2)
    kept, inverse = _scale_of(largest, LARGEST, LEAST, SCALE)
    scaled = x * inverse[:, :, None]
    scaled = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    codes = _to_fp4(scaled).to(tl.uint8) if FORMAT == _IS_FP4 else _to_fp8(scaled, IS_SPELLED)
    return codes, kept


@triton.jit
def _load_entries(
    place, is_read, pages, scales, ropes,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROPE_SPAN: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Entries at places, [ROWS] int64: flat part [ROWS, BLOCKS, SPAN] and rotated part [ROWS, ROPE_SPAN]."""
    page, at = place // ENTRIES, place % ENTRIES
    begin = page * PAGE_BYTES + at * DATA_BYTES
    scales_begin = page * SCALE_PAGE_BYTES + SCALES_AT + at * SCALE_BYTES
    flat = _load_flat(
        pages + begin // WIDTH, scales + scales_begin // SCALE_WIDTH, is_read, FORMAT, SCALE, FLAT, BLOCK,
        BLOCKS, SPAN, NUM_SCALES, IS_SPELLED,
    )  # fmt: skip
    column = tl.arange(0, ROPE_SPAN)[None, :]
    rope = tl.load(
        ropes + (begin + ROPE_AT)[:, None] // ROPE_WIDTH + column,
        mask=is_read[:, None] & (column < ROPE),
        other=0,
    )
    return flat, wide(rope, IS_SPELLED)


@triton.jit
def _put(
    row, is_row, flat, rope, out,
    FLAT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr,
    ROPE_SPAN: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Write numbers of entries to rows of `out`, [ROWS] int64."""
    kind: tl.constexpr = out.dtype.element_ty
    begin = row * (FLAT + ROPE)
    column, is_column = _columns(FLAT, BLOCK, BLOCKS, SPAN)
    to = out + begin[:, None, None] + column
    tl.store(to, _narrow(flat, kind, IS_SPELLED), mask=is_row[:, None, None] & is_column)
    at = tl.arange(0, ROPE_SPAN)[None, :]
    to = out + begin[:, None] + FLAT + at
    tl.store(to, _narrow(rope, kind, IS_SPELLED), mask=is_row[:, None] & (at < ROPE))


@triton.jit
def _take(
    token, is_token, values, stride, FLAT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, SPAN: tl.constexpr, ROPE_SPAN: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Numbers of tokens as float32: flat part [ROWS, BLOCKS, SPAN], rotated part [ROWS, ROPE_SPAN]."""
    begin = token.to(tl.int64) * stride
    column, is_column = _columns(FLAT, BLOCK, BLOCKS, SPAN)
    flat = tl.load(values + begin[:, None, None] + column, mask=is_token[:, None, None] & is_column, other=0)
    at = tl.arange(0, ROPE_SPAN)[None, :]
    rope = tl.load(values + begin[:, None] + FLAT + at, mask=is_token[:, None] & (at < ROPE), other=0)
    return wide(flat, IS_SPELLED), wide(rope, IS_SPELLED)


@triton.jit
def _store_at(
    place, is_written, flat, rope, pages, scales, ropes,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROPE_SPAN: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Write numbers of entries to places, [ROWS] int64; bytes of scales that hold none become 0."""
    page, at = place // ENTRIES, place % ENTRIES
    begin = page * PAGE_BYTES + at * DATA_BYTES
    scales_begin = page * SCALE_PAGE_BYTES + SCALES_AT + at * SCALE_BYTES
    kind: tl.constexpr = pages.dtype.element_ty
    rope_kind: tl.constexpr = ropes.dtype.element_ty
    mask = is_written[:, None, None]
    to = (pages + begin // WIDTH)[:, None, None]
    if FORMAT == _IS_PLAIN:
        column, is_column = _columns(FLAT, BLOCK, BLOCKS, SPAN)
        tl.store(to + column, _narrow(flat, kind, IS_SPELLED), mask=mask & is_column)
    else:
        codes, kept = _encode(flat, FORMAT, SCALE, LARGEST, LEAST, IS_SPELLED)
        if FORMAT == _IS_FP4:
            byte, is_byte = _columns(FLAT // 2, BLOCK // 2, BLOCKS, SPAN // 2)
            low, high = tl.split(tl.reshape(codes, (codes.shape[0], BLOCKS, SPAN // 2, 2)))
            tl.store(to + byte, low | (high << 4), mask=mask & is_byte)
        else:
            column, is_column = _columns(FLAT, BLOCK, BLOCKS, SPAN)
            tl.store(to + column, codes, mask=mask & is_column)
        block = tl.arange(0, BLOCKS)[None, :]
        kept = tl.where(block < NUM_SCALES, kept, 0).to(scales.dtype.element_ty)
        to_scale = scales + (scales_begin // SCALE_WIDTH)[:, None] + block
        tl.store(to_scale, kept, mask=is_written[:, None] & (block < SCALE_BYTES // SCALE_WIDTH))
    column = tl.arange(0, ROPE_SPAN)[None, :]
    to_rope = ropes + (begin + ROPE_AT)[:, None] // ROPE_WIDTH + column
    tl.store(to_rope, _narrow(rope, rope_kind, IS_SPELLED), mask=is_written[:, None] & (column < ROPE))


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
    """Where entries of rows lie, and whether they lie anywhere."""
    column = entry // ENTRIES
    is_there = (row > 0) & (entry >= 0) & (column < columns)
    block = tl.load(table + row * columns + column, mask=is_there, other=0).to(tl.int64)
    is_there = is_there & (block > 0) & (block < num_pages)
    return block * ENTRIES + entry % ENTRIES, is_there


# Sizes of batches and pools make no variants, but that large batches have their own: what a call compiled
# serves a capture of any other on the same side of _FEW_TOKENS and _MANY_ENTRIES.
@triton.jit(
    do_not_specialize=["num_tokens", "batch", "num_rows", "columns", "num_pages"],
    do_not_specialize_on_alignment=["rows", "request_ids", "positions", "table", "scales", "ring_positions"],
)
def _store(
    rows, request_ids, positions, values, stride, table, pages, scales, ropes, ring_positions,
    num_tokens, batch, num_rows, columns, num_pages,
    RATIO: tl.constexpr, RING: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROPE_SPAN: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    # Into rings where RING > 0, else into pages at the ends of blocks of RATIO tokens.
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if RING > 0:
        request = tl.load(request_ids + group, mask=group < num_tokens, other=-1)
        position = tl.load(positions + group, mask=group < num_tokens, other=-1)
        row = tl.where(position >= 0, row_of(request, rows, batch, num_rows), 0)
        is_written = (row > 0) & is_last(group, request, position, request_ids, positions, num_tokens, RING)
        place = row * RING + position % RING
        tl.store(ring_positions + place, position, mask=is_written)
        flat, rope = _take(
            group, is_written, values, stride, FLAT, ROPE, BLOCK, BLOCKS, SPAN, ROPE_SPAN, IS_SPELLED
        )
        _store_at(
            place, is_written, flat, rope, pages, scales, ropes, PAGE_BYTES, ENTRIES, DATA_BYTES,
            SCALE_PAGE_BYTES, SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS,
            SPAN, NUM_SCALES, ROPE_SPAN, LARGEST, LEAST,
            WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
        )  # fmt: skip
    else:
        # Of GROUP tokens that stand side by side few end a block, in a prefill one, so that a program has
        # ROWS entries to write and not a part of them; in any other batch it goes round more often.
        in_group = tl.arange(0, GROUP)[None, :]
        token = group[:, None] * GROUP + in_group
        position = tl.load(positions + token, mask=token < num_tokens, other=-1)
        request = tl.load(request_ids + token, mask=token < num_tokens, other=-1)
        is_end = (position >= 0) & (request >= 0) & ((position + 1) % RATIO == 0)
        for _ in range(tl.max(tl.sum(is_end.to(tl.int32), 1), 0)):
            at = tl.min(tl.where(is_end, in_group, GROUP), 1)
            end = group * GROUP + at
            of = tl.load(request_ids + end, mask=at < GROUP, other=-1)
            length = tl.load(positions + end, mask=at < GROUP, other=-1) + 1
            row = row_of(of, rows, batch, num_rows)
            place, is_written = _place_of(row, length // RATIO - 1, table, columns, num_pages, ENTRIES)
            flat, rope = _take(
                end, is_written, values, stride, FLAT, ROPE, BLOCK, BLOCKS, SPAN, ROPE_SPAN, IS_SPELLED
            )
            _store_at(
                place, is_written, flat, rope, pages, scales, ropes, PAGE_BYTES, ENTRIES, DATA_BYTES,
                SCALE_PAGE_BYTES, SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS,
                SPAN, NUM_SCALES, ROPE_SPAN,
                LARGEST, LEAST, WIDTH, SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
            )  # fmt: skip
            is_end = is_end & (in_group != at[:, None])


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
    place = row * RING + position % RING
    return place, is_wanted & (tl.load(ring_positions + place, mask=is_wanted, other=-1) == position)


@triton.jit(
    do_not_specialize=["num_tokens", "batch", "num_rows", "columns", "num_pages", "width", "num_chunks"],
    do_not_specialize_on_alignment=[
        *("rows", "request_ids", "positions", "chosen", "table"),
        *("scales", "ring_positions", "mask_out", "lens"),
    ],
)
def _gather(
    rows, request_ids, positions, chosen, table, pages, scales, ropes, ring_positions, chunk, stride,
    out, mask_out, lens, num_tokens, batch, num_rows, columns, num_pages, width, num_chunks,
    WHAT: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, WINDOW: tl.constexpr, SCAN: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, ENTRIES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_PAGE_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, FLAT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROPE_SPAN: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, IS_SPELLED: tl.constexpr,
):  # fmt: skip
    # A program fills TILES × ROWS places of one token, or of one request: `whose`.
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
    for tile in range(TILES):
        at = (chunk_at * TILES + tile) * ROWS + tl.arange(0, ROWS)
        is_at = at < width
        to = whose.to(tl.int64) * width + at
        if WHAT == _CHOSEN:
            entry = tl.load(chosen + to, mask=is_at, other=-1).to(tl.int64)
            is_visible = is_at & (entry < (position + 1) // RATIO)
            of = tl.where(is_visible, row, 0)
            place, is_read = _place_of(of, entry, table, columns, num_pages, ENTRIES)
            tl.store(mask_out + to, is_read.to(tl.uint8), mask=is_at)
        elif WHAT == _ALL:
            of = tl.where(is_at & (at < visible), row, 0)
            place, is_read = _place_of(of, at, table, columns, num_pages, ENTRIES)
        elif WHAT == _WINDOWS:
            wanted = position + 1 - visible + at
            place, is_read = _ring_place(row, wanted, at < visible, ring_positions, RING)
        else:
            place, is_read = _ring_place(row, start - before + at, at < before, ring_positions, RING)
        flat, rope = _load_entries(
            place, is_read, pages, scales, ropes, PAGE_BYTES, ENTRIES, DATA_BYTES, SCALE_PAGE_BYTES,
            SCALES_AT, SCALE_BYTES, ROPE_AT, FORMAT, SCALE, FLAT, ROPE, BLOCK, BLOCKS, SPAN, NUM_SCALES,
            ROPE_SPAN, WIDTH,
            SCALE_WIDTH, ROPE_WIDTH, IS_SPELLED,
        )  # fmt: skip
        if WHAT == _CHUNK:
            in_chunk = at - before
            is_new = (in_chunk >= 0) & (in_chunk < number)
            new_flat, new_rope = _take(
                first + in_chunk, is_new, chunk, stride, FLAT, ROPE, BLOCK, BLOCKS, SPAN, ROPE_SPAN,
                IS_SPELLED,
            )  # fmt: skip
            # As it would be read back.
            if FORMAT == _IS_PLAIN:
                new_flat = wide(_narrow(new_flat, pages.dtype.element_ty, IS_SPELLED), IS_SPELLED)
            else:
                codes, kept = _encode(new_flat, FORMAT, SCALE, LARGEST, LEAST, IS_SPELLED)
                new_flat = _from_fp4(codes) if FORMAT == _IS_FP4 else _from_fp8(codes, IS_SPELLED)
                new_flat = new_flat * _kept_scale(kept, SCALE)[:, :, None]
            new_rope = wide(_narrow(new_rope, ropes.dtype.element_ty, IS_SPELLED), IS_SPELLED)
            flat = tl.where(is_new[:, None, None], new_flat, flat)
            rope = tl.where(is_new[:, None], new_rope, rope)
        _put(to, is_at, flat, rope, out, FLAT, ROPE, BLOCK, BLOCKS, SPAN, ROPE_SPAN, IS_SPELLED)


_FORMATS = {"float8_e4m3fn": _IS_FP8, "float4_e2m1fn_x2": _IS_FP4}
_SCALES = {None: _NO_SCALE, "float8_e8m0fnu": _EXPONENT, "float32": _FLOAT}
_PROGRAM_NUMBERS = 2048  # that a program moves, 16 a thread
_NUM_WARPS = 4
_SCAN = 1024  # tokens of a batch that a program looks at together
_TILES, _MANY_ENTRIES = 8, 65_536
_FEW_TOKENS = 2048  # up to here they are written one by one


def is_spelled(device: torch.device) -> bool:
    """Whether casts to narrow floats are made of integers: in Triton's interpreter, and on older GPUs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)


def readable(tensor: torch.Tensor, is_spelled: bool) -> torch.Tensor:
    """Numbers as a kernel takes them: bits of bfloat16 where casts are spelled."""
    return tensor.view(torch.uint16) if is_spelled and tensor.dtype == torch.bfloat16 else tensor


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


def _constants(codec: Codec, stored: _Stored, is_spelled: bool) -> dict[str, Any]:
    is_plain = codec.scale_dtype is None
    block = min(codec.block, 64) if is_plain else codec.block
    scale_bytes = 4 if codec.scale_dtype == "float32" else 1
    num_blocks = max(triton.cdiv(codec.flat_dim, block), codec.scale_bytes // scale_bytes)
    blocks, span = triton.next_power_of_2(num_blocks), triton.next_power_of_2(block)
    rope_bytes = codec.rope_dim * getattr(torch, codec.rope_dtype).itemsize
    return {
        "ROWS": max(1, _PROGRAM_NUMBERS // (blocks * span)),
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
        "SPAN": span,
        "NUM_SCALES": codec.num_scales,
        "ROPE_SPAN": triton.next_power_of_2(max(codec.rope_dim, 1)),
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
    constants = _constants(codec, stored, spelled)
    given, stride = rows_and_stride(values)
    # A program for every few tokens; where there are many, of which most end no block, for as many ends.
    group = 1 if ring or num_tokens <= _FEW_TOKENS else 1 << (ratio.bit_length() - 1)
    _store[(triton.cdiv(num_tokens, constants["ROWS"] * group),)](
        tokens.rows, tokens.request_ids, tokens.positions, readable(given, spelled), stride, table,
        *_typed(codec, stored, spelled), ring_positions, num_tokens, tokens.rows.shape[0], num_rows,
        table.shape[1], stored.data.shape[0], RATIO=ratio, RING=ring, GROUP=group, **constants,
        num_warps=_NUM_WARPS,
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
    constants = _constants(codec, stored, spelled)
    # Where tokens of a request are looked for, a program that has more to do looks less often.
    is_search = what in (_ALL, _CHUNK)
    tiles = _TILES if is_search and number * width > _MANY_ENTRIES else 1
    num_chunks = max(1, triton.cdiv(width, constants["ROWS"] * tiles))
    given, stride = (out, 0) if chunk is None else rows_and_stride(chunk)
    _gather[(number * num_chunks,)](
        tokens.rows, tokens.request_ids, tokens.positions, table if chosen is None else chosen, table,
        *_typed(codec, stored, spelled), table, readable(given, spelled), stride,
        readable(out, spelled), stored.data if mask is None else mask.view(torch.uint8),
        tokens.rows if lens is None else lens, tokens.positions.shape[0], tokens.rows.shape[0], num_rows,
        table.shape[1], stored.data.shape[0], width, num_chunks, WHAT=what.value, RATIO=ratio, RING=ring,
        WINDOW=window, SCAN=_SCAN, TILES=tiles, **constants, num_warps=_NUM_WARPS,
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
