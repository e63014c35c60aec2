"""Extend attention over pages for Hopper GPUs, in Gluon: what `_attention_fused._extend` computes, faster.

In: queries, the pool of a layer, page tables; out: outputs, or partial results and their log-sum-exp. It
serves pools and queries of one 16-bit dtype whose heads have 64 or 128 dimensions: `can_extend` says so. Rows
of a tile are pairs (query, head) of one KV head and logits are powers of two, as in `_attention_fused`.

A program has a tile of 128 rows and three groups of four warps. The producer copies tiles of 128 keys and
values from their pages into rings in shared memory. Two consumers of 64 rows each multiply on the tensor
cores, asynchronously, and one computes its softmax while the other multiplies. The groups meet at barriers in
shared memory alone: a place of a ring is full when all copies into it have landed, and free when both
consumers have read it. Keys are read from the last tile to the first, so that tiles with a mask come first.

The import raises ImportError if Triton has no Gluon for Hopper; versions from 3.6 have it.
"""

# Kernels are written in Gluon, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
# ruff: noqa: E741

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagoda.kernels._attention_extend import num_extend_programs
from pagoda.kernels._gluon import LOG2E, barrier, copy

__all__ = ["can_extend", "extend"]

_ROWS = 64  # of a consumer: those of one wgmma
_KEYS = 128
_STAGES = {64: 4, 128: 2}  # places of a ring by head size: the two rings have 128 KiB
# Registers per thread. Three groups share 3 * 168: the first consumer is given what these two leave.
_CONSUMER_REGISTERS = gl.constexpr(224)
_PRODUCER_REGISTERS = gl.constexpr(56)


@dataclass(frozen=True)
class Constants:
    """What the kernel knows at compile time. One variant per distinct value."""

    rows: int  # pairs of a query and a head of one consumer
    keys: int  # keys in a tile
    stages: int  # tiles in a ring
    kv_heads: int
    group: int  # query heads per KV head
    dim: int
    page: int  # tokens
    chunk: int  # keys that the producer copies at a time; more at once hold up the consumers
    has_window: bool
    has_sinks: bool
    has_parts: bool


def can_extend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    page: int,
    scale: float,
    softcap: float,
) -> bool:
    """Return whether `extend` serves such tensors, on their device, and such logits.

    Pages of fewer than 16 tokens are left to `_attention_fused`, which looks up single tokens faster.
    """
    dim = queries.shape[2]
    return (
        values is not None
        and queries.dtype in (torch.bfloat16, torch.float16)
        and queries.dtype == keys.dtype == values.dtype
        and dim in _STAGES
        and keys.shape[2] == values.shape[2] == dim
        and page >= 16
        and not page & (page - 1)
        and keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
        and scale > 0
        and softcap == 0
        and queries.is_cuda
        and torch.cuda.get_device_capability(queries.device)[0] == 9
    )


def extend(
    queries: torch.Tensor,  # [tokens, heads, dim]; the last dimension is dense
    keys: torch.Tensor,  # [num_slots, kv_heads, dim] contiguous
    values: torch.Tensor,  # [num_slots, kv_heads, dim] contiguous
    out: torch.Tensor,  # [tokens, heads, dim]; the last dimension is dense
    table: torch.Tensor,  # [rows, width] int32: the pages of each row; the last dimension is dense
    lengths: torch.Tensor,  # [rows] int32: the tokens of each row, its queries included
    starts: torch.Tensor,  # [rows + 1] int32: where the queries of each row begin
    extends: torch.Tensor,  # [rows + 1, 2] int32: number of rows and their tokens; row, tokens before it
    num_rows: int,  # no fewer than the number of rows
    num_tokens: int,  # no fewer than their tokens
    page: int,  # tokens, a power of two
    scale: float,
    window: int = 0,  # how many tokens a query reads, its own included; 0: all
    sinks: torch.Tensor | None = None,  # [heads]
    splits: torch.Tensor | None = None,  # [rows, 2] int32: number of parts; first part, or −1 if there is one
    num_parts: int = 1,  # the most parts of a row
    target: int = 0,  # programs per KV head that the parts of rows are meant for
    parts: torch.Tensor | None = None,  # [parts, heads, dim] float32
    lses: torch.Tensor | None = None,  # [parts, heads] float32, in powers of two
) -> None:
    """Compute causal attention of the rows in `extends`.

    The queries of a row are its last tokens. If num_parts is 1, all results go to `out`, and splits, parts
    and lses are not used. Otherwise the keys of a row of n > 1 parts are cut into n ranges: part p of its
    query q is written to parts and lses at first part + p * number of queries + q, without sinks, which are
    for the merge to add. A part without keys is 0 with a log-sum-exp of −∞. Nothing else of `out` is written.
    The kernel runs on the current stream of the current device.
    """
    heads, dim = queries.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    has_parts = num_parts > 1
    # A chunk is within a page, so that one page id serves it.
    constants = Constants(
        _ROWS, _KEYS, _STAGES[dim], kv_heads, group, dim, page, 32 if page >= 32 else 16,
        window > 0, sinks is not None, has_parts,
    )  # fmt: skip
    programs = num_extend_programs(num_rows, num_tokens, num_parts, 2 * _ROWS, group, target)
    _extend[(kv_heads * programs,)](
        queries, keys, values, out, parts if has_parts else out, lses if has_parts else out,
        out if sinks is None else sinks, table, table.stride(0), lengths, starts, extends,
        splits if has_parts else starts, queries.stride(0), queries.stride(1), out.stride(0), out.stride(1),
        scale * LOG2E.value, window, constants, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _fill(tile, pool, table, start, from_key, length, n, d, C: gl.constexpr):
    """Begin to copy keys or values from position `start` on; those outside [from_key, length) are 0."""
    CHUNKS: gl.constexpr = C.keys // C.chunk
    for i in gl.static_range(CHUNKS):
        first = start + i * C.chunk
        at = first + n
        page = gl.load(table + first // C.page, mask=first < length, other=0)
        slot = page.to(gl.int64) * C.page + first % C.page
        where = slot * (C.kv_heads * C.dim) + ((n * (C.kv_heads * C.dim))[:, None] + d[None, :])
        is_in = at < length
        if C.has_window:
            is_in = is_in & (at >= from_key)
        copy(tile.slice(i * C.chunk, C.chunk), pool + where, mask=is_in[:, None])


@gluon.jit
def _produce(k, v, table, head, from_key, length, end, num_turns, k_ring, v_ring, C: gl.constexpr):
    """Fill the rings with the tiles end − 1, end − 2, …."""
    k_tiles, k_full, k_read = k_ring
    v_tiles, v_full, v_read = v_ring
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.dim, C.dim // 8], [4, 1], [1, 0])
    n = gl.arange(0, C.chunk, gl.SliceLayout(1, L))
    d = head * C.dim + gl.arange(0, C.dim, gl.SliceLayout(0, L))
    for turn in range(num_turns):
        start = (end - 1 - turn) * C.keys
        place = turn % C.stages
        phase = turn // C.stages & 1
        mbarrier.wait(k_read.index(place), phase ^ 1)
        _fill(k_tiles.index(place), k, table, start, from_key, length, n, d, C)
        async_copy.mbarrier_arrive(k_full.index(place), increment_count=False)
        mbarrier.wait(v_read.index(place), phase ^ 1)
        _fill(v_tiles.index(place), v, table, start, from_key, length, n, d, C)
        async_copy.mbarrier_arrive(v_full.index(place), increment_count=False)


@gluon.jit
def _times_keys(q, turn, ring, X: gl.constexpr, C: gl.constexpr):
    """Begin to multiply the queries by the keys of a turn: [rows, keys]."""
    tiles, full, _read = ring
    place = turn % C.stages
    mbarrier.wait(full.index(place), turn // C.stages & 1)
    fence_async_shared()  # orders the copies, which write as threads do, before the reads of the tensor cores
    zero = gl.full([C.rows, C.keys], 0.0, gl.float32, X)
    return warpgroup_mma(q, tiles.index(place).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _plus_values(acc, p, turn, ring, C: gl.constexpr):
    """Begin to add the weights times the values of a turn: [rows, dim]."""
    tiles, full, _read = ring
    place = turn % C.stages
    mbarrier.wait(full.index(place), turn // C.stages & 1)
    fence_async_shared()
    return warpgroup_mma(p, tiles.index(place), acc, is_async=True)


@gluon.jit
def _free(turn, ring, C: gl.constexpr):
    """Say that a consumer has read the tile of a turn."""
    _tiles, _full, read = ring
    barrier()  # one thread arrives for all
    mbarrier.arrive(read.index(turn % C.stages), count=1)


@gluon.jit
def _weigh(
    x, m, l, start, at_row, scale, window, KIND: gl.constexpr, IS_MASKED: gl.constexpr, C: gl.constexpr
):
    """Return the new maximum and sum of weights, the factor of the old ones, and the weights of logits."""
    if IS_MASKED:
        at = start + gl.arange(0, C.keys, gl.SliceLayout(0, x.type.layout))
        is_read = at[None, :] <= at_row[:, None]
        if C.has_window:
            is_read = is_read & (at[None, :] > at_row[:, None] - window)
        x = gl.where(is_read, x, float("-inf"))
    new = gl.maximum(m, gl.max(x, 1) * scale)
    p = gl.exp2(gl.fma(x, scale, -new[:, None]))
    alpha = gl.exp2(m - new)
    l = l * alpha + gl.sum(p, 1)
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.dim, 16])
    return new, l, alpha, gl.convert_layout(p.to(KIND), gl.DotOperandLayout(0, O, 2))


@gluon.jit
def _turns(
    q, p, m, l, acc, turns, end, at_row, scale, window, k_ring, v_ring, X: gl.constexpr,
    IS_MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Attend in some turns. A turn's logits and the output of the turn before it are multiplied together."""
    for turn in range(turns[0], turns[1]):
        x = _times_keys(q, turn, k_ring, X, C)
        acc = _plus_values(acc, p, turn - 1, v_ring, C)
        x = warpgroup_mma_wait(1, deps=[x])
        _free(turn, k_ring, C)
        start = (end - 1 - turn) * C.keys
        m, l, alpha, new = _weigh(x, m, l, start, at_row, scale, window, q.dtype, IS_MASKED, C)
        acc, p, new = warpgroup_mma_wait(0, deps=[acc, p, new])  # `new` is here so that it stays packed
        _free(turn - 1, v_ring, C)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = new
    return p, m, l, acc


@gluon.jit
def _consume(
    q, out, parts, lses, sinks, strides, head, pair, row, part, scale, window, end, num_turns, unmasked,
    q_tile, k_ring, v_ring, C: gl.constexpr,
):  # fmt: skip
    """Attend with C.rows pairs from `pair` on and write the result. Turns outside `unmasked` have a mask."""
    X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.keys, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.dim, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.dim, C.dim // 8], [4, 1], [1, 0])
    first, count, length = row
    q_token, q_head, out_token, out_head = strides
    pairs = pair + gl.arange(0, C.rows, gl.SliceLayout(1, L))
    query, which = pairs // C.group, head * C.group + pairs % C.group
    d = gl.arange(0, C.dim, gl.SliceLayout(0, L))
    from_q = (first + query).to(gl.int64) * q_token + which * q_head
    q_tile.store(gl.load(q + from_q[:, None] + d[None, :], mask=(query < count)[:, None], other=0.0))
    fence_async_shared()
    barrier()
    at_row = length - count + (pair + gl.arange(0, C.rows, gl.SliceLayout(1, X))) // C.group
    at_row = gl.minimum(at_row, length - 1)
    m = gl.full([C.rows], -1e38, gl.float32, gl.SliceLayout(1, X))
    l = gl.full([C.rows], 0.0, gl.float32, gl.SliceLayout(1, X))
    acc = gl.full([C.rows, C.dim], 0.0, gl.float32, O)
    if num_turns > 0:
        x = warpgroup_mma_wait(0, deps=[_times_keys(q_tile, 0, k_ring, X, C)])
        _free(0, k_ring, C)
        start = (end - 1) * C.keys
        m, l, _alpha, p = _weigh(x, m, l, start, at_row, scale, window, q_tile.dtype, True, C)
        p, m, l, acc = _turns(
            q_tile, p, m, l, acc, (1, unmasked[0]), end, at_row, scale, window, k_ring, v_ring, X, True, C
        )
        p, m, l, acc = _turns(
            q_tile, p, m, l, acc, unmasked, end, at_row, scale, window, k_ring, v_ring, X, False, C
        )
        if C.has_window:
            p, m, l, acc = _turns(
                q_tile, p, m, l, acc, (unmasked[1], num_turns), end, at_row, scale, window, k_ring, v_ring,
                X, True, C,
            )  # fmt: skip
        acc = _plus_values(acc, p, num_turns - 1, v_ring, C)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    m, l = gl.convert_layout(m, gl.SliceLayout(1, O)), gl.convert_layout(l, gl.SliceLayout(1, O))
    pairs = pair + gl.arange(0, C.rows, gl.SliceLayout(1, O))
    query, which = pairs // C.group, head * C.group + pairs % C.group
    d = gl.arange(0, C.dim, gl.SliceLayout(0, O))
    is_row = query < count
    if part < 0:
        scaled = gl.full([C.rows], 1.0, gl.float32, gl.SliceLayout(1, O))
        if C.has_sinks:
            sink = gl.load(sinks + which, mask=is_row, other=0.0).to(gl.float32) * LOG2E
            new = gl.maximum(m, sink)
            l = l * gl.exp2(m - new) + gl.exp2(sink - new)
            scaled = gl.exp2(m - new)
        y = acc * gl.where(l > 0, scaled / l, 0.0)[:, None]
        to = (first + query).to(gl.int64) * out_token + which * out_head
        gl.store(out + to[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=is_row[:, None])
    elif C.has_parts:
        y = acc * gl.where(l > 0, 1.0 / l, 0.0)[:, None]
        at = (part + query).to(gl.int64) * (C.kv_heads * C.group) + which
        gl.store(parts + (at * C.dim)[:, None] + d[None, :], y, mask=is_row[:, None])
        gl.store(lses + at, gl.where(l > 0, m + gl.log2(l), float("-inf")), mask=is_row)


@gluon.jit
def _extend(
    q, k, v, out, parts, lses, sinks, table, width, lengths, starts, extends, splits,
    q_token, q_head, out_token, out_head, scale, window, C: gl.constexpr,
):  # fmt: skip
    # Tiles of extend row i begin at number tokens before it * group // rows + i. The last ones come first,
    # since they read most, and all tiles with their first part before those with their second.
    ROWS: gl.constexpr = C.rows * 2
    head, program = gl.program_id(0) % C.kv_heads, gl.program_id(0) // C.kv_heads
    num_rows, num_tokens = gl.load(extends), gl.load(extends + 1)
    num_tiles = num_tokens * C.group // ROWS + num_rows
    if num_tiles == 0:
        return
    number, nth = num_tiles - 1 - program % num_tiles, program // num_tiles
    low = 0
    high = num_rows
    while low + 1 < high:
        middle = (low + high) // 2
        if gl.load(extends + 3 + 2 * middle) * C.group // ROWS + middle <= number:
            low = middle
        else:
            high = middle
    row = gl.load(extends + 2 + 2 * low)
    tile = number - (gl.load(extends + 3 + 2 * low) * C.group // ROWS + low)
    first = gl.load(starts + row)
    count = gl.load(starts + row + 1) - first
    num_parts = 1
    part = -1
    if C.has_parts:
        num_parts = gl.load(splits + row * 2)
        part = gl.where(num_parts > 1, gl.load(splits + row * 2 + 1) + nth * count, -1)
    if (tile * ROWS < count * C.group) & (nth < num_parts):
        length = gl.load(lengths + row)
        # The first and the last position of the tile. Its queries read keys from from_key on, and this part
        # of them those in the tiles [begin, end) of keys.
        lowest = length - count + tile * ROWS // C.group
        highest = gl.minimum(length - count + (tile * ROWS + ROWS - 1) // C.group, length - 1)
        from_key = 0
        if C.has_window:
            from_key = gl.maximum(lowest - window + 1, 0)
        begin = from_key // C.keys
        end = highest // C.keys + 1
        per_part = gl.cdiv(end - begin, num_parts)
        begin += nth * per_part
        end = gl.minimum(end, begin + per_part)
        num_turns = gl.maximum(end - begin, 0)
        # All queries read all keys of the turns [since, until). The first turn has a mask in any case.
        since = gl.maximum(gl.minimum(end - (lowest + 1) // C.keys, num_turns), 1)
        until = num_turns
        if C.has_window:
            outside = gl.cdiv(gl.maximum(highest - window + 1, 0), C.keys)
            until = gl.maximum(gl.minimum(end - outside, num_turns), since)
        KIND: gl.constexpr = q.dtype.element_ty
        STAGES: gl.constexpr = C.stages
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
        q_tiles = gl.allocate_shared_memory(KIND, [2, C.rows, C.dim], LAYOUT)
        k_tiles = gl.allocate_shared_memory(KIND, [C.stages, C.keys, C.dim], LAYOUT)
        v_tiles = gl.allocate_shared_memory(KIND, [C.stages, C.keys, C.dim], LAYOUT)
        k_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], BARRIERS)
        v_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], BARRIERS)
        k_read = gl.allocate_shared_memory(gl.int64, [C.stages, 1], BARRIERS)
        v_read = gl.allocate_shared_memory(gl.int64, [C.stages, 1], BARRIERS)
        for place in gl.static_range(STAGES):
            mbarrier.init(k_full.index(place), count=128)  # every thread of the producer arrives
            mbarrier.init(v_full.index(place), count=128)
            mbarrier.init(k_read.index(place), count=2)  # one thread of each consumer arrives
            mbarrier.init(v_read.index(place), count=2)
        barrier()
        k_ring = (k_tiles, k_full, k_read)
        v_ring = (v_tiles, v_full, v_read)
        own = table + gl.cast(row, gl.int64) * width
        pair = tile * ROWS
        strides = (q_token, q_head, out_token, out_head)
        this = (first, count, length)
        unmasked = (since, until)
        gl.warp_specialize(
            [
                (_consume, (
                    q, out, parts, lses, sinks, strides, head, pair, this, part, scale, window, end,
                    num_turns, unmasked, q_tiles.index(0), k_ring, v_ring, C,
                )),
                (_consume, (
                    q, out, parts, lses, sinks, strides, head, pair + C.rows, this, part, scale, window, end,
                    num_turns, unmasked, q_tiles.index(1), k_ring, v_ring, C,
                )),
                (_produce, (k, v, own, head, from_key, length, end, num_turns, k_ring, v_ring, C)),
            ],
            [4, 4],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
        )  # fmt: skip
