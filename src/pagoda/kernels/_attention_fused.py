"""Attention over pages in Triton: `_decode` runs a work list, `_extend` tiles of queries.

In: queries, the pool of a layer, a batch; out: outputs. A tile has C.rows rows, which are pairs (query, head)
of one KV head, so that grouped heads read a key once, and C.keys keys. Where the keys of a row are cut into
parts, each program leaves a normalised partial result and its log-sum-exp, and `_merge` merges the parts in their
order. Logits are powers of two: factors of
log2(e) are in the scales. Vectors are read in two parts: those of fp8 pools as their even and odd numbers, two
of which are one uint16; others as a power of two of numbers, and the rest. Offsets into pools are 64-bit.
"""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pagoda.kernels._casts_fused import from_fp8, wide

__all__ = ["Constants"]

_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Constants:
    """What a kernel knows at compile time. One variant per distinct value."""

    rows: int  # pairs of a query and a head in a tile
    keys: int  # keys in a tile
    kv_heads: int
    group: int  # query heads per KV head
    k_dim: int  # elements of a key
    k_first: int  # elements in its first part, a power of two
    k_rest: int  # elements in its second part, padded to a power of two; 0 if there is none
    v_dim: int
    v_first: int
    v_rest: int
    v_stride: int  # elements from one value to the next
    page: int  # tokens
    fp8: int  # mantissa bits of an fp8 pool, whose elements are pairs of numbers; 0 for other pools
    is_latent: bool  # values are the first parts of keys
    is_scaled: bool  # queries are cast to a narrower range
    has_window: bool
    has_sinks: bool
    has_softcap: bool
    is_spelled: bool  # casts are spelled out in integers
    queries: int  # the most queries of a row in the work list
    v_numbers: int  # numbers of a value
    v_width: int  # the same, padded to a power of two


@triton.jit
def _where(base, at, is_in, FIRST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load elements FIRST, … of the vectors that begin at some offsets: [n, WIDTH]."""
    d = FIRST + tl.arange(0, WIDTH)
    where = base + at[:, None] + d[None, :]
    if FIRST + WIDTH > DIM:
        if IS_MASKED:
            return tl.load(where, mask=is_in[:, None] & (d < DIM)[None, :], other=0)
        else:  # noqa: RET505 (Triton compiles what follows a return)
            return tl.load(where, mask=(d < DIM)[None, :], other=0)
    elif IS_MASKED:
        return tl.load(where, mask=is_in[:, None], other=0)
    else:
        return tl.load(where)


@triton.jit
def _numbers(pairs, kind: tl.constexpr, C: tl.constexpr):
    """Return the low and the high fp8 numbers of uint16."""
    if C.is_spelled:
        if C.fp8 == 3:
            low = from_fp8((pairs & 0xFF).to(tl.uint8), True)
            high = from_fp8((pairs >> 8).to(tl.uint8), True)
        else:  # e5m2 is the upper half of float16
            low = (pairs << 8).to(tl.float16, bitcast=True).to(tl.float32)
            high = (pairs & 0xFF00).to(tl.float16, bitcast=True).to(tl.float32)
        return low.to(kind), high.to(kind)
    else:  # noqa: RET505
        if C.fp8 == 3:
            both = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [pairs], dtype=tl.uint32, is_pure=True, pack=1
            )
        else:
            both = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.e5m2x2 $0, $1;", "=r,h", [pairs], dtype=tl.uint32, is_pure=True, pack=1
            )
        low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(kind), high.to(kind)


@triton.jit
def _narrowed(x, kind: tl.constexpr, C: tl.constexpr):
    """Cast numbers of a pool to what is multiplied: bfloat16 comes as its bits where casts are spelled out."""
    if C.is_spelled:
        return wide(x, True).to(kind)
    else:  # noqa: RET505
        return x.to(kind)


@triton.jit
def _queries(q, first, query, which, is_row, q_token, q_head, kind: tl.constexpr, C: tl.constexpr):
    """Load the queries of a tile in two parts, and the factor that each was divided by."""
    at = (first + query).to(tl.int64) * q_token + which * q_head
    if C.fp8:
        d = tl.arange(0, C.k_first) * 2
        where = q + at[:, None] + d[None, :]
        is_there = is_row[:, None] & (d < C.k_dim * 2)[None, :]
        q1 = tl.load(where, mask=is_there, other=0)
        q2 = tl.load(where + 1, mask=is_there, other=0)
    else:
        q1 = _where(q, at, is_row, 0, C.k_dim, C.k_first, True)
        q2 = q1
        if C.k_rest:
            q2 = _where(q, at, is_row, C.k_first, C.k_dim, C.k_rest, True)
    power = tl.full([C.rows], 1.0, tl.float32)
    if C.is_scaled:
        # The power of two at or below the largest number, so that the narrower type can hold all of them.
        q1, q2 = wide(q1, C.is_spelled), wide(q2, C.is_spelled)
        largest = tl.maximum(tl.max(tl.abs(q1), 1), tl.max(tl.abs(q2), 1))
        power = (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 1e-30)
        q1 = q1 / power[:, None]
        q2 = q2 / power[:, None]
        return q1.to(kind), q2.to(kind), power
    else:  # noqa: RET505
        return _narrowed(q1, kind, C), _narrowed(q2, kind, C), power


@triton.jit
def _capped(x, softcap):
    """softcap * tanh(x / softcap), softcap > 0."""
    small = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E / softcap))
    y = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def _block(
    q1, q2, m, l, acc1, acc2, start, end, at_row, table, k, v, factor, softcap, window,
    IS_MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Attend to keys start, …, start + C.keys − 1, or those before `end`."""
    at = start + tl.arange(0, C.keys)
    is_in = at < end
    if IS_MASKED:
        page = tl.load(table + at // C.page, mask=is_in, other=0)
    else:
        page = tl.load(table + at // C.page)
    slot = (page * C.page + at % C.page).to(tl.int64)
    from_k = slot * (C.kv_heads * C.k_dim)
    from_v = slot * (C.kv_heads * C.v_stride)
    k1 = _where(k, from_k, is_in, 0, C.k_dim, C.k_first, IS_MASKED)
    if C.fp8:
        k1, k2 = _numbers(k1, q1.dtype, C)
        x = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        x = tl.dot(q2, tl.trans(k2), x, input_precision="ieee")
    else:
        k1 = _narrowed(k1, q1.dtype, C)
        x = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if C.k_rest:
            k2 = _where(k, from_k, is_in, C.k_first, C.k_dim, C.k_rest, IS_MASKED)
            x = tl.dot(q2, tl.trans(_narrowed(k2, q1.dtype, C)), x, input_precision="ieee")
    if C.has_softcap:
        x = _capped(x * factor[:, None], softcap) * _LOG2E
    elif IS_MASKED:
        x = x * factor[:, None]
    if IS_MASKED:
        is_read = is_in[None, :] & (at[None, :] <= at_row[:, None])
        if C.has_window:
            is_read = is_read & (at[None, :] > at_row[:, None] - window)
        x = tl.where(is_read, x, float("-inf"))
    if IS_MASKED or C.has_softcap:
        new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - new[:, None])
    else:  # one multiply-add per logit
        new = tl.maximum(m, tl.max(x, 1) * factor)
        p = tl.exp2(x * factor[:, None] - new[:, None])
    alpha = tl.exp2(m - new)
    l = l * alpha + tl.sum(p, 1)
    p = p.to(q1.dtype)
    acc1 = acc1 * alpha[:, None]
    if C.v_rest:
        acc2 = acc2 * alpha[:, None]
    if C.is_latent:
        acc1 = tl.dot(p, k1, acc1, input_precision="ieee")
    else:
        v1 = _where(v, from_v, is_in, 0, C.v_dim, C.v_first, IS_MASKED)
        if C.fp8:
            v1, v2 = _numbers(v1, q1.dtype, C)
            acc1 = tl.dot(p, v1, acc1, input_precision="ieee")
            acc2 = tl.dot(p, v2, acc2, input_precision="ieee")
        else:
            acc1 = tl.dot(p, _narrowed(v1, q1.dtype, C), acc1, input_precision="ieee")
            if C.v_rest:
                v2 = _where(v, from_v, is_in, C.v_first, C.v_dim, C.v_rest, IS_MASKED)
                acc2 = tl.dot(p, _narrowed(v2, q1.dtype, C), acc2, input_precision="ieee")
    return new, l, acc1, acc2


@triton.jit
def _spread(base, at, C: tl.constexpr):
    """Where the two parts of vectors of v_dim numbers begin and what of them exists."""
    STEP: tl.constexpr = 2 if C.fp8 else 1
    d1 = tl.arange(0, C.v_first) * STEP
    d2 = (tl.arange(0, C.v_rest) * STEP + (1 if C.fp8 else C.v_first)) if C.v_rest else d1
    return base + at[:, None] + d1[None, :], base + at[:, None] + d2[None, :], d1 < C.v_dim * STEP, d2 < C.v_dim * STEP


@triton.jit
def _put(base, at, acc1, acc2, is_row, C: tl.constexpr):
    """Store vectors of v_dim numbers at some offsets."""
    to1, to2, is1, is2 = _spread(base, at, C)
    tl.store(to1, _stored(acc1, base.dtype.element_ty, C), mask=is_row[:, None] & is1[None, :])
    if C.v_rest:
        tl.store(to2, _stored(acc2, base.dtype.element_ty, C), mask=is_row[:, None] & is2[None, :])


@triton.jit
def _stored(x, kind: tl.constexpr, C: tl.constexpr):
    return x.to(kind)


@triton.jit
def _finish(
    m, l, acc1, acc2, part, first, query, which, is_row, out, parts, lses, sinks, out_token, out_head, v_scale,
    C: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile, or, if its keys are a part of all, a partial result and its log-sum-exp."""
    if part < 0:
        scaled = v_scale
        if C.has_sinks:
            sink = tl.load(sinks + which, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
            new = tl.maximum(m, sink)
            l = l * tl.exp2(m - new) + tl.exp2(sink - new)
            scaled = v_scale * tl.exp2(m - new)
        inverse = tl.where(l > 0, scaled / l, 0.0)
        to = (first + query).to(tl.int64) * out_token + which * out_head
        _put(out, to, acc1 * inverse[:, None], acc2 * inverse[:, None], is_row, C)
    else:
        inverse = tl.where(l > 0, 1.0 / l, 0.0)
        at = (part + query).to(tl.int64) * (C.kv_heads * C.group) + which
        _put(parts, at * C.v_numbers, acc1 * inverse[:, None], acc2 * inverse[:, None], is_row, C)
        tl.store(lses + at, tl.where(l > 0, m + tl.log2(l), float("-inf")), mask=is_row)


@triton.jit
def _merge(
    parts, lses, out, splits, starts, indices, num_tokens, sinks, out_token, out_head, v_scale,
    BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one token and head, in their order; zero the output of padding."""
    token, which = tl.program_id(0), tl.program_id(1)
    row = tl.load(indices + token, mask=token < num_tokens, other=-1)
    d = tl.arange(0, C.v_width)
    to = out + token.to(tl.int64) * out_token + which * out_head + d
    if row < 0:
        tl.store(to, tl.full([C.v_width], 0.0, out.dtype.element_ty), mask=d < C.v_numbers)
    else:
        num_parts, first_part = tl.load(splits + row * 2), tl.load(splits + row * 2 + 1)
        first, after = tl.load(starts + row), tl.load(starts + row + 1)
        if num_parts > 1:
            m = tl.full([], -1e38, tl.float32)
            l = tl.full([], 0.0, tl.float32)
            acc = tl.full([C.v_width], 0.0, tl.float32)
            for start in range(0, num_parts, BLOCK):
                p = start + tl.arange(0, BLOCK)
                is_part = p < num_parts
                at = (first_part + p * (after - first) + token - first).to(tl.int64) * (C.kv_heads * C.group) + which
                lse = tl.load(lses + at, mask=is_part, other=float("-inf"))
                x = tl.load(
                    parts + at[:, None] * C.v_numbers + d[None, :],
                    mask=is_part[:, None] & (d < C.v_numbers)[None, :],
                    other=0.0,
                )
                new = tl.maximum(m, tl.max(lse, 0))
                weight, alpha = tl.exp2(lse - new), tl.exp2(m - new)
                l = l * alpha + tl.sum(weight, 0)
                acc = acc * alpha + tl.sum(x * weight[:, None], 0)
                m = new
            scaled = v_scale
            if C.has_sinks:
                sink = tl.load(sinks + which).to(tl.float32) * _LOG2E
                new = tl.maximum(m, sink)
                l = l * tl.exp2(m - new) + tl.exp2(sink - new)
                scaled = v_scale * tl.exp2(m - new)
            inverse = tl.where(l > 0, scaled / l, 0.0)
            tl.store(to, (acc * inverse).to(out.dtype.element_ty), mask=d < C.v_numbers)


@triton.jit
def _decode(
    q, k, v, out, parts, lses, sinks, table, width, runs, tasks,
    q_token, q_head, out_token, out_head, scale, softcap, window, v_scale, KIND: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0), tl.program_id(1)
    k += head * C.k_dim
    v += head * C.v_stride
    number, stop = tl.load(runs + tl.program_id(2)), tl.load(runs + tl.program_id(2) + 1)
    task = tasks + number * 8
    begin, end, row, part = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    first, count, length = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6)
    for this in range(number, stop):
        # What the next segment is, is loaded while this one is computed.
        task += 8
        begin_, end_, row_, part_ = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
        first_, count_, length_ = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6)
        if block * C.rows < count * C.group:
            pair = block * C.rows + tl.arange(0, C.rows)
            query, which = pair // C.group, head * C.group + pair % C.group
            is_row = query < count
            at_row = tl.where(is_row, length - count + query, -1)
            q1, q2, power = _queries(q, first, query, which, is_row, q_token, q_head, KIND, C)
            factor = power * scale
            m = tl.full([C.rows], -1e38, tl.float32)
            l = tl.full([C.rows], 0.0, tl.float32)
            acc1 = tl.full([C.rows, C.v_first], 0.0, tl.float32)
            acc2 = tl.full([C.rows, C.v_rest if C.v_rest else 16], 0.0, tl.float32)
            own = table + row.to(tl.int64) * width
            # From 0: as a lower bound, Triton 3.6 would take the `begin` of the first segment for all.
            for start in range(0, end - begin, C.keys):
                m, l, acc1, acc2 = _block(
                    q1, q2, m, l, acc1, acc2, begin + start, end, at_row, own, k, v, factor, softcap,
                    window, True, C,
                )  # fmt: skip
            _finish(
                m, l, acc1, acc2, part, first, query, which, is_row, out, parts, lses, sinks, out_token, out_head,
                v_scale, C,
            )  # fmt: skip
        begin, end, row, part, first, count, length = begin_, end_, row_, part_, first_, count_, length_


@triton.jit
def _extend(
    q, k, v, out, parts, lses, sinks, table, width, lengths, starts, num_rows, splits,
    q_token, q_head, out_token, out_head, scale, softcap, window, v_scale, KIND: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # Tiles of row r begin at number starts[r] * group // rows + r; the last ones, which read most, come first.
    head, piece = tl.program_id(0), tl.program_id(2)
    k += head * C.k_dim
    v += head * C.v_stride
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    row = 0
    above = num_rows
    while row + 1 < above:
        middle = (row + above) // 2
        if tl.load(starts + middle) * C.group // C.rows + middle <= number:
            row = middle
        else:
            above = middle
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    tile = number - (first * C.group // C.rows + row)
    num_parts, first_part = tl.load(splits + row * 2), tl.load(splits + row * 2 + 1)
    if (tile * C.rows < count * C.group) & (count > C.queries) & (piece < num_parts):
        length = tl.load(lengths + row)
        pair = tile * C.rows + tl.arange(0, C.rows)
        query, which = pair // C.group, head * C.group + pair % C.group
        is_row = query < count
        at_row = tl.where(is_row, length - count + query, -1)
        q1, q2, power = _queries(q, first, query, which, is_row, q_token, q_head, KIND, C)
        factor = power * scale
        m = tl.full([C.rows], -1e38, tl.float32)
        l = tl.full([C.rows], 0.0, tl.float32)
        acc1 = tl.full([C.rows, C.v_first], 0.0, tl.float32)
        acc2 = tl.full([C.rows, C.v_rest if C.v_rest else 16], 0.0, tl.float32)
        own = table + row.to(tl.int64) * width
        # The first and the last position of the tile, and the keys that its queries read: [low, high).
        lowest = length - count + tile * C.rows // C.group
        highest = tl.minimum(length - count + (tile * C.rows + C.rows - 1) // C.group, length - 1)
        low = 0
        if C.has_window:
            low = tl.maximum(lowest - window + 1, 0) // C.keys * C.keys
        high = highest + 1
        per_part = tl.cdiv(tl.cdiv(high - low, C.keys), num_parts) * C.keys
        low += piece * per_part
        high = tl.minimum(high, low + per_part)
        # All queries read the keys in [inner, outer).
        inner = low
        if C.has_window:
            inner = tl.minimum(tl.maximum(low, tl.cdiv(tl.maximum(highest - window + 1, 0), C.keys) * C.keys), high)
            for start in range(low, inner, C.keys):
                m, l, acc1, acc2 = _block(
                    q1, q2, m, l, acc1, acc2, start, length, at_row, own, k, v, factor, softcap,
                    window, True, C,
                )  # fmt: skip
        outer = tl.maximum(tl.minimum((lowest + 1) // C.keys * C.keys, high // C.keys * C.keys), inner)
        for start in range(inner, outer, C.keys):
            m, l, acc1, acc2 = _block(
                q1, q2, m, l, acc1, acc2, start, length, at_row, own, k, v, factor, softcap,
                window, False, C,
            )  # fmt: skip
        for start in range(outer, high, C.keys):
            m, l, acc1, acc2 = _block(
                q1, q2, m, l, acc1, acc2, start, length, at_row, own, k, v, factor, softcap,
                window, True, C,
            )  # fmt: skip
        part = tl.where(num_parts > 1, first_part + piece * count, -1)
        _finish(
            m, l, acc1, acc2, part, first, query, which, is_row, out, parts, lses, sinks, out_token, out_head,
            v_scale, C,
        )  # fmt: skip
