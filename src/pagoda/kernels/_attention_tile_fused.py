"""Attention of one tile in Triton: pairs (query, head) of one KV head, and keys in pages.

In: queries, pointers to keys and values, a row of the page table; out: the largest logit, and sums of weights
and weighted values. Grouped heads read a key once. Logits are powers of two: the scales contain log2(e).
Vectors are read in two pieces: those of fp8 pools as their even and odd numbers, pairs of which are read as
uint16; others as a power of two of numbers, and the rest. Offsets into pools are 64-bit.
"""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
# ruff: noqa: RET505 (Triton compiles what follows a return)

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pagoda.kernels._casts_fused import from_fp8, narrow, wide

__all__ = [
    "LOG2E",
    "LOWEST",
    "Constants",
    "block",
    "finish",
    "inverse",
    "nothing",
    "pairs_of",
    "put",
    "queries_of",
    "with_sink",
]

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # below every logit, and finite: −inf − −inf would be NaN


@dataclass(frozen=True)
class Constants:
    """What a kernel knows at compile time. One variant per distinct value."""

    rows: int  # pairs of a query and a head in a tile
    keys: int  # keys in a tile
    kv_heads: int
    group: int  # query heads per KV head
    k_dim: int  # elements of a key; in fp8 pools an element is a pair of numbers
    k_first: int  # elements of its first piece, a power of two
    k_rest: int  # elements of its second piece, padded to a power of two; 0 if there is none
    v_dim: int
    v_first: int
    v_rest: int
    v_stride: int  # elements from one value to the next
    page: int  # tokens
    fp8: int  # mantissa bits of an fp8 pool; 0 for other pools
    is_latent: bool  # a value is the first piece of its key, or in fp8 the first numbers of both pieces
    is_scaled: bool  # queries are cast to a type with a smaller range
    has_window: bool
    has_sinks: bool
    has_softcap: bool
    is_spelled: bool  # casts from fp8 are spelled out in integers
    has_bits: bool  # bfloat16 is read and written as its bits
    types: tuple[
        str, ...
    ]  # of queries and outputs, of the pool, and of sinks, as a kernel gets pointers to them
    q_token: int  # strides
    q_head: int
    out_token: int
    out_head: int

    @property
    def step(self) -> int:
        """Numbers per element."""
        return 2 if self.fp8 else 1


# ── reading and writing vectors ─────────────────────────────────────────────────────────────────────


@triton.jit
def _take(
    base, at, is_in, FIRST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_MASKED: tl.constexpr
):  # fmt: skip
    """Load elements FIRST, … of the vectors at some offsets: [n, WIDTH]. What does not exist is 0."""
    d = FIRST + tl.arange(0, WIDTH)
    where = base + at[:, None] + d[None, :]
    if FIRST + WIDTH > DIM:
        if IS_MASKED:
            return tl.load(where, mask=is_in[:, None] & (d < DIM)[None, :], other=0)
        else:
            return tl.load(where, mask=(d < DIM)[None, :], other=0)
    elif IS_MASKED:
        return tl.load(where, mask=is_in[:, None], other=0)
    else:
        return tl.load(where)


@triton.jit
def put(base, at, x1, x2, is_row, C: tl.constexpr):
    """Store vectors of v_dim elements in two pieces at some offsets, as numbers."""
    STEP: tl.constexpr = C.step
    SECOND: tl.constexpr = 1 if C.fp8 else C.v_first
    d = tl.arange(0, C.v_first) * STEP
    kind: tl.constexpr = base.dtype.element_ty
    is_there = is_row[:, None] & (d < C.v_dim * STEP)[None, :]
    tl.store(base + at[:, None] + d[None, :], narrow(x1, kind, C.has_bits), mask=is_there)
    if C.v_rest:
        d = tl.arange(0, C.v_rest) * STEP + SECOND
        is_there = is_row[:, None] & (d < C.v_dim * STEP)[None, :]
        tl.store(base + at[:, None] + d[None, :], narrow(x2, kind, C.has_bits), mask=is_there)


@triton.jit
def _cast(x, KIND: tl.constexpr, C: tl.constexpr):
    """Cast numbers to the type in which tiles are multiplied."""
    if C.has_bits:
        return wide(x, True).to(KIND)
    else:
        return x.to(KIND)


@triton.jit
def _unpacked(pairs, KIND: tl.constexpr, C: tl.constexpr):
    """Return the low and the high fp8 numbers of uint16."""
    if C.is_spelled:
        if C.fp8 == 3:
            low = from_fp8((pairs & 0xFF).to(tl.uint8), True)
            high = from_fp8((pairs >> 8).to(tl.uint8), True)
        else:  # e5m2 is the upper half of float16
            low = (pairs << 8).to(tl.float16, bitcast=True)
            high = (pairs & 0xFF00).to(tl.float16, bitcast=True)
    else:
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
    return low.to(KIND), high.to(KIND)


@triton.jit
def pairs_of(number, head, count, length, C: tl.constexpr):
    """Return the query and the head of each row of a tile, whether it exists, and the query's position."""
    pair = number * C.rows + tl.arange(0, C.rows)
    query, which = pair // C.group, head * C.group + pair % C.group
    is_row = query < count
    return query, which, is_row, tl.where(is_row, length - count + query, -1)


@triton.jit
def nothing(C: tl.constexpr):
    """Return top, total, acc1 and acc2, as in `block`, of a tile that has attended to no key yet."""
    top = tl.full([C.rows], LOWEST, tl.float32)
    total = tl.full([C.rows], 0.0, tl.float32)
    acc1 = tl.full([C.rows, C.v_first], 0.0, tl.float32)
    acc2 = tl.full([C.rows, C.v_rest if C.v_rest else 16], 0.0, tl.float32)
    return top, total, acc1, acc2


@triton.jit
def queries_of(q, first, query, which, is_row, KIND: tl.constexpr, C: tl.constexpr):
    """Load the queries of a tile in two pieces, and the power of two by which each was divided."""
    at = (first + query).to(tl.int64) * C.q_token + which * C.q_head
    if C.fp8:
        d = tl.arange(0, C.k_first) * 2
        where = q + at[:, None] + d[None, :]
        is_there = is_row[:, None] & (d < C.k_dim * 2)[None, :]
        q1 = tl.load(where, mask=is_there, other=0)
        q2 = tl.load(where + 1, mask=is_there, other=0)
    else:
        q1 = _take(q, at, is_row, 0, C.k_dim, C.k_first, True)
        q2 = q1
        if C.k_rest:
            q2 = _take(q, at, is_row, C.k_first, C.k_dim, C.k_rest, True)
    power = tl.full([C.rows], 1.0, tl.float32)
    if C.is_scaled:
        # At or below the largest number, so that all quotients are in the range of the type.
        q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q1), 1), tl.max(tl.abs(q2), 1))
        power = (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 1e-30)
        q1, q2 = q1 / power[:, None], q2 / power[:, None]
        return q1.to(KIND), q2.to(KIND), power
    else:
        return _cast(q1, KIND, C), _cast(q2, KIND, C), power


# ── attention of one tile ───────────────────────────────────────────────────────────────────────────


@triton.jit
def _capped(x, softcap):
    """softcap * tanh(x / softcap), softcap > 0."""
    share = x / softcap
    square = share * share
    small = tl.exp2(tl.abs(share) * (-2.0 * LOG2E))
    y = softcap * (1.0 - small) / (1.0 + small)
    # 1 − small has few digits where the share is small.
    series = x * (1.0 + square * (-0.33333333 + square * 0.13333333))
    return tl.where(square < 0.01, series, tl.where(x < 0, -y, y))


@triton.jit
def block(
    q1, q2, top, total, acc1, acc2, start, begin, end, at_row, table, k, v, factor, softcap, window,
    IS_MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Attend to the keys start, …, start + C.keys − 1; if IS_MASKED, to those in [begin, end) that are read.

    top, total, acc1, acc2: [rows] and [rows, …], the largest logit so far, and the sums of weights and of
    weighted values relative to it.
    """
    KIND: tl.constexpr = q1.dtype
    at = start + tl.arange(0, C.keys)
    is_in = at < end
    if C.has_window:
        is_in = is_in & (at >= begin)
    if IS_MASKED:  # noqa: SIM108
        page = tl.load(table + at // C.page, mask=is_in, other=0)
    else:
        page = tl.load(table + at // C.page)
    slot = (page * C.page + at % C.page).to(tl.int64)
    from_k = slot * (C.kv_heads * C.k_dim)
    from_v = slot * (C.kv_heads * C.v_stride)
    k1 = _take(k, from_k, is_in, 0, C.k_dim, C.k_first, IS_MASKED)
    if C.fp8:
        k1, k2 = _unpacked(k1, KIND, C)
        x = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        x = tl.dot(q2, tl.trans(k2), x, input_precision="ieee")
    else:
        k1 = _cast(k1, KIND, C)
        x = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if C.k_rest:
            k2 = _take(k, from_k, is_in, C.k_first, C.k_dim, C.k_rest, IS_MASKED)
            x = tl.dot(q2, tl.trans(_cast(k2, KIND, C)), x, input_precision="ieee")
    if C.has_softcap:
        x = _capped(x * factor[:, None], softcap) * LOG2E
    elif IS_MASKED:
        x = x * factor[:, None]
    if IS_MASKED:
        is_read = is_in[None, :] & (at[None, :] <= at_row[:, None])
        if C.has_window:
            is_read = is_read & (at[None, :] > at_row[:, None] - window)
        x = tl.where(is_read, x, float("-inf"))
    if IS_MASKED or C.has_softcap:
        new = tl.maximum(top, tl.max(x, 1))
        p = tl.exp2(x - new[:, None])
    else:  # one multiply-add per logit
        new = tl.maximum(top, tl.max(x, 1) * factor)
        p = tl.exp2(x * factor[:, None] - new[:, None])
    alpha = tl.exp2(top - new)
    total = total * alpha + tl.sum(p, 1)
    p = p.to(KIND)
    acc1 = acc1 * alpha[:, None]
    if C.v_rest:
        acc2 = acc2 * alpha[:, None]
    if C.is_latent:
        acc1 = tl.dot(p, k1, acc1, input_precision="ieee")
        if C.fp8:
            acc2 = tl.dot(p, k2, acc2, input_precision="ieee")
    else:
        v1 = _take(v, from_v, is_in, 0, C.v_dim, C.v_first, IS_MASKED)
        if C.fp8:
            v1, v2 = _unpacked(v1, KIND, C)
            acc1 = tl.dot(p, v1, acc1, input_precision="ieee")
            acc2 = tl.dot(p, v2, acc2, input_precision="ieee")
        else:
            acc1 = tl.dot(p, _cast(v1, KIND, C), acc1, input_precision="ieee")
            if C.v_rest:
                v2 = _take(v, from_v, is_in, C.v_first, C.v_dim, C.v_rest, IS_MASKED)
                acc2 = tl.dot(p, _cast(v2, KIND, C), acc2, input_precision="ieee")
    return new, total, acc1, acc2


@triton.jit
def inverse(total):
    """1 / total, and 0 for nothing."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def with_sink(sinks, which, is_row, top, total):
    """Return the sum of weights with the sink of each head, and the factor of the others in it."""
    sink = tl.load(sinks + which, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    new = tl.maximum(top, sink)
    return total * tl.exp2(top - new) + tl.exp2(sink - new), tl.exp2(top - new)


@triton.jit
def finish(
    top, total, acc1, acc2, part, first, query, which, is_row, out, parts, lses, sinks, v_scale,
    C: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile, or a partial result and its log-sum-exp."""
    if part < 0:
        if C.has_sinks:
            total, kept = with_sink(sinks, which, is_row, top, total)
            factor = v_scale * kept * inverse(total)
        else:
            factor = v_scale * inverse(total)
        to = (first + query).to(tl.int64) * C.out_token + which * C.out_head
        put(out, to, acc1 * factor[:, None], acc2 * factor[:, None], is_row, C)
    else:
        factor = inverse(total)
        at = (part + query).to(tl.int64) * (C.kv_heads * C.group) + which
        put(parts, at * (C.v_dim * C.step), acc1 * factor[:, None], acc2 * factor[:, None], is_row, C)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lses + at, lse, mask=is_row)
