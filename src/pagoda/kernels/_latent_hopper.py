"""Latent decode over pages for Hopper GPUs: the case that `_attention_fused._decode` computes too, faster.

In: absorbed queries, a pool of latents, a work list; out: outputs, or partial results with their log-sum-exp.
A latent is a key of 576 numbers whose first 512 are the value, and all heads share it. Pool and queries have
one 16-bit dtype; `can_decode` says what is served. Rows of a tile are (query, head) pairs, and logits are in
powers of two, as in `_attention_fused`.

A program has 64 rows and three groups of four warps. The loader copies tiles of 64 latents, token by token,
into two places in shared memory: even tiles into place 0, odd ones into place 1. The two consumers split the
logits by tile and the output by column:

    left    S0 = Q K0ᵀ, P0 = softmax    O[:, :256] += P0 V0[:, :256]    O[:, :256] += P1 V1[:, :256]
    right   S1 = Q K1ᵀ, P1 = softmax    O[:, 256:] += P0 V0[:, 256:]    O[:, 256:] += P1 V1[:, 256:]

so one can multiply while the other computes its softmax, and an accumulator fits a consumer's registers. The
maxima of the rows go from left to right within a pair of tiles, and from right to left to the next pair. The
probabilities of a tile overwrite the last 64 numbers of its keys, which are not needed once the logits exist.

The groups meet only at barriers in shared memory. Each place has two halves: the columns before 256, and the
rest. A half is full when all copies into it have landed. It is empty when the consumer that owns its columns
has multiplied with its values; the keys of the tile have been used by then. A tile is ready when its maxima
and probabilities are in shared memory.

Importing this raises ImportError where Triton has no Gluon for Hopper (before 3.6).
"""

# Kernels are written in Gluon, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

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

from pagoda.kernels._gluon import LOG2E, barrier, copy

__all__ = ["can_decode", "decode"]

K_DIM = 576
V_DIM = 512
ROWS = 64  # a wgmma has 64

_K_DIM = gl.constexpr(K_DIM)
_V_DIM = gl.constexpr(V_DIM)
_HALF = gl.constexpr(V_DIM // 2)  # columns of one consumer
_REST = gl.constexpr(K_DIM - V_DIM)
_ROWS = gl.constexpr(ROWS)
_KEYS = gl.constexpr(64)  # two tiles of keys and the queries fill the shared memory
_CONSUMER_REGISTERS = gl.constexpr(216)  # per thread; 2 * 216 + 72 of the 3 * 168 that a thread may have
_LOADER_REGISTERS = gl.constexpr(72)

# Layouts of logits, of half an output, of copies, of operands in shared memory, and of one number per row.
_S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_O = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_LOAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_PER_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclass(frozen=True)
class Constants:
    """What the kernel knows at compile time. One variant per distinct value."""

    group: int  # query heads
    page: int  # tokens
    has_sinks: bool


def can_decode(
    queries: torch.Tensor,
    latents: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> bool:
    """Return whether `decode` serves these tensors, which are as in `decode`, on their device."""
    return (
        queries.dtype in (torch.bfloat16, torch.float16)
        and queries.dtype == latents.dtype
        and queries.shape[-1] == latents.shape[-1] == K_DIM
        and out.shape[-1] == V_DIM
        and scale > 0
        and not softcap
        and not window
        and latents.data_ptr() % 16 == queries.data_ptr() % 16 == 0
        and queries.stride(0) % 16 == queries.stride(1) % 16 == 0
        and queries.is_cuda
        and torch.cuda.get_device_capability(queries.device)[0] == 9
    )


def decode(
    queries: torch.Tensor,  # [tokens, heads, 576]; the last dimension is dense
    latents: torch.Tensor,  # [num_slots, 1, 576] contiguous
    out: torch.Tensor,  # [tokens, heads, 512]; the last dimension is dense
    table: torch.Tensor,  # [rows, width] int32: pages of each row; the last dimension is dense
    starts: torch.Tensor,  # [rows + 1] int32: where the queries of each row begin
    runs: torch.Tensor,  # [programs + 1] int32; the last is the number of tasks
    tasks: torch.Tensor,  # [rows + programs, 8] int32: the work list; those behind its end are 0
    page: int,  # tokens per page, a power of two
    scale: float,
    max_queries: int,  # the most queries of a row that has segments
    sinks: torch.Tensor | None = None,  # [heads]
    parts: torch.Tensor | None = None,  # [parts, heads, 512] float32
    lses: torch.Tensor | None = None,  # [parts, heads] float32, in powers of two
) -> None:
    """Compute causal attention of the rows in the work list, and zero the outputs of padding.

    One program computes one task for 64 rows, whatever the runs. The queries of a row are its last tokens.
    The results of a row that is not split go to `out`. Query q of a split row leaves its normalised result
    over the keys of a task at first part + q, for a merge that also adds the sinks; `parts` and `lses` may be
    missing if no row is split. Runs on the current stream of the current device and does not synchronise.
    """
    heads = queries.shape[1]
    _decode[(1, -(-max_queries * heads // ROWS), tasks.shape[0])](
        queries, latents, out,
        out if parts is None else parts, out if lses is None else lses, out if sinks is None else sinks,
        table, table.stride(0), starts, starts.shape[0] - 1, queries.shape[0], runs, runs.shape[0] - 1, tasks,
        queries.stride(0), queries.stride(1), out.stride(0), out.stride(1), scale * LOG2E.value,
        Constants(heads, page, sinks is not None), num_warps=4,
    )  # fmt: skip


@gluon.jit
def _pages(table, at, end, C: gl.constexpr):
    return gl.load(table + at // C.page, mask=at < end, other=0)


@gluon.jit
def _load(
    q, k, table, first, count, q_token, q_head, begin, end, num_pairs, q1, q2, k1, k2, full, empty,
    C: gl.constexpr,
):  # fmt: skip
    """Copy the queries, then tile after tile of latents; what lies behind the end is 0."""
    d = gl.arange(0, _HALF, gl.SliceLayout(0, _LOAD))[None, :]
    rest = gl.arange(0, _REST, gl.SliceLayout(0, _LOAD))[None, :] + _V_DIM
    n = gl.arange(0, _KEYS, gl.SliceLayout(1, _LOAD))
    pair = gl.program_id(1) * _ROWS + n
    query = pair // C.group
    is_row = (query < count)[:, None]
    where = q + ((first + query).to(gl.int64) * q_token + (pair % C.group) * q_head)[:, None]
    copy(q1.index(0).slice(0, _HALF, 1), where + d, mask=is_row)
    copy(q1.index(0).slice(_HALF, _HALF, 1), where + (d + _HALF), mask=is_row)
    copy(q2.index(0), where + rest, mask=is_row)
    at = begin + n
    page = _pages(table, at, end, C)
    for tile in range(2 * num_pairs):
        place, phase = tile & 1, ((tile >> 1) & 1) ^ 1
        is_in = (at < end)[:, None]
        where = k + ((page.to(gl.int64) * C.page + at % C.page) * _K_DIM)[:, None]
        mbarrier.wait(empty.index(place), phase)
        copy(k1.index(place).slice(0, _HALF, 1), where + d, mask=is_in)
        async_copy.mbarrier_arrive(full.index(place), increment_count=False)
        mbarrier.wait(empty.index(2 + place), phase)
        copy(k1.index(place).slice(_HALF, _HALF, 1), where + (d + _HALF), mask=is_in)
        copy(k2.index(place), where + rest, mask=is_in)
        async_copy.mbarrier_arrive(full.index(2 + place), increment_count=False)
        at += _KEYS
        page = _pages(table, at, end, C)


@gluon.jit
def _zero(x):
    """Return 0, which the compiler does not know.

    With places known to it, it would compute all descriptors of operands before the loop, and spill them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _logits(q1, q2, k1, k2, full, PLACE: gl.constexpr, phase):
    """Compute the logits of a tile, without the scale, as its halves become full: [rows, keys]."""
    x = gl.full([_ROWS, _KEYS], 0.0, gl.float32, _S)
    mbarrier.wait(full.index(PLACE), phase)
    fence_async_shared()
    x = warpgroup_mma(
        q1.slice(0, _HALF, 1), k1.slice(0, _HALF, 1).permute((1, 0)), x, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 + PLACE), phase)
    fence_async_shared()
    x = warpgroup_mma(q1.slice(_HALF, _HALF, 1), k1.slice(_HALF, _HALF, 1).permute((1, 0)), x, is_async=True)
    x = warpgroup_mma(q2, k2.permute((1, 0)), x, is_async=True)
    return warpgroup_mma_wait(0, (x,))


@gluon.jit
def _seen(x, start, end, at_row, inner):
    """Mask the logits of a tile, unless all rows see all of its keys: those before `inner`."""
    if start + _KEYS > inner:
        at = start + gl.arange(0, _KEYS, gl.SliceLayout(0, _S))
        x = gl.where((at < end)[None, :] & (at[None, :] <= at_row[:, None]), x, float("-inf"))
    return x


@gluon.jit
def _scaled(acc, factor):
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, _O))[:, None]


@gluon.jit
def _arrive(at):
    """Arrive for a group once all of its threads are here."""
    barrier()
    mbarrier.arrive(at)


@gluon.jit
def _consume(
    out, parts, lses, sinks, q1, q2, k1, k2, ms, totals, full, empty, ready, done, begin, end, num_pairs,
    part, first, count, length, out_token, out_head, scale, IS_LEFT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    FROM: gl.constexpr = 0 if IS_LEFT else _HALF
    EMPTY: gl.constexpr = 0 if IS_LEFT else 2
    query = (gl.program_id(1) * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _S))) // C.group
    at_row = gl.where(query < count, length - count + query, -1)
    inner = gl.minimum(end, length - count + 1)
    m = gl.full([_ROWS], -1e38, gl.float32, gl.SliceLayout(1, _S))
    total = gl.full([_ROWS], 0.0, gl.float32, gl.SliceLayout(1, _S))
    acc = gl.full([_ROWS, _HALF], 0.0, gl.float32, _O)
    start = begin if IS_LEFT else begin + _KEYS
    for pair in range(num_pairs):
        phase = pair & 1
        even = _zero(pair)
        odd = even + 1
        p0, p1 = k2.index(even), k2.index(odd)
        v0, v1 = k1.index(even).slice(FROM, _HALF, 1), k1.index(odd).slice(FROM, _HALF, 1)
        if IS_LEFT:
            x = _logits(q1.index(even), q2.index(even), k1.index(even), p0, full, 0, phase)
            x = _seen(x, start, end, at_row, inner)
            m0 = gl.maximum(m, gl.max(x, 1) * scale)
            p = gl.exp2(x * scale - m0[:, None])
            ms.index(0).store(m0)
            p0.store(p.to(k1.dtype))
            fence_async_shared()
            _arrive(ready.index(0))
            alpha = gl.exp2(m - m0)
            total = total * alpha + gl.sum(p, 1)
            acc = warpgroup_mma(p0, v0, _scaled(acc, alpha), is_async=True)
            acc = warpgroup_mma_wait(0, (acc,))
            _arrive(empty.index(EMPTY))
            mbarrier.wait(ready.index(1), phase)
            fence_async_shared()
            m = ms.index(1).load(gl.SliceLayout(1, _S))
            beta = gl.exp2(m0 - m)
            total = total * beta
        else:
            x = _logits(q1.index(even), q2.index(even), k1.index(odd), p1, full, 1, phase)
            x = _seen(x, start, end, at_row, inner)
            highest = gl.max(x, 1) * scale
            mbarrier.wait(ready.index(0), phase)
            fence_async_shared()
            m0 = ms.index(0).load(gl.SliceLayout(1, _S))
            m1 = gl.maximum(m0, highest)
            acc = warpgroup_mma(p0, v0, _scaled(acc, gl.exp2(m - m0)), is_async=True)
            p = gl.exp2(x * scale - m1[:, None])
            total = total * gl.exp2(m - m1) + gl.sum(p, 1)
            ms.index(1).store(m1)
            p1.store(p.to(k1.dtype))
            fence_async_shared()
            _arrive(ready.index(1))
            acc = warpgroup_mma_wait(0, (acc,))
            _arrive(empty.index(EMPTY))
            beta = gl.exp2(m0 - m1)
            m = m1
        acc = warpgroup_mma(p1, v1, _scaled(acc, beta), is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        _arrive(empty.index(EMPTY + 1))
        start += 2 * _KEYS
    OWN: gl.constexpr = 0 if IS_LEFT else 1
    totals.index(OWN).store(total)
    _arrive(done.index(OWN))
    mbarrier.wait(done.index(1 - OWN), 0)
    total += totals.index(1 - OWN).load(gl.SliceLayout(1, _S))
    _finish(out, parts, lses, sinks, m, total, acc, part, first, count, out_token, out_head, FROM, C)


@gluon.jit
def _finish(
    out, parts, lses, sinks, m, total, acc, part, first, count, out_token, out_head,
    FROM: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Write columns FROM, … of the outputs or, if the row is split, of a part with its log-sum-exp."""
    m = gl.convert_layout(m, gl.SliceLayout(1, _O))
    total = gl.convert_layout(total, gl.SliceLayout(1, _O))
    pair = gl.program_id(1) * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _O))
    query, which = pair // C.group, pair % C.group
    is_row = query < count
    d = (FROM + gl.arange(0, _HALF, gl.SliceLayout(0, _O)))[None, :]
    if part < 0:
        if C.has_sinks:
            sink = gl.load(sinks + which).to(gl.float32) * LOG2E
            new = gl.maximum(m, sink)
            factor = gl.exp2(m - new) / (total * gl.exp2(m - new) + gl.exp2(sink - new))
        else:
            factor = gl.where(total > 0, 1.0 / total, 0.0)
        to = (first + query).to(gl.int64) * out_token + which * out_head
        result = (acc * factor[:, None]).to(out.dtype.element_ty)
        gl.store(out + to[:, None] + d, result, mask=is_row[:, None])
    else:
        factor = gl.where(total > 0, 1.0 / total, 0.0)
        to = (part + query).to(gl.int64) * C.group + which
        gl.store(parts + (to * _V_DIM)[:, None] + d, acc * factor[:, None], mask=is_row[:, None])
        if FROM == 0:
            gl.store(lses + to, gl.where(total > 0, m + gl.log2(total), float("-inf")), mask=is_row)


@gluon.jit
def _zero_padding(out, first, num_queries, num_tasks, out_token, out_head, C: gl.constexpr):
    """Zero the outputs of tokens from `first` on, which the programs without a task share."""
    which = gl.program_id(1) * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _LOAD))
    d = gl.arange(0, _V_DIM, gl.SliceLayout(0, _LOAD))
    none = gl.full([_ROWS, _V_DIM], 0.0, out.dtype.element_ty, _LOAD)
    for token in range(first + gl.program_id(2) - num_tasks, num_queries, gl.num_programs(2) - num_tasks):
        at = (which * 0 + token).to(gl.int64) * out_token + which * out_head
        gl.store(out + at[:, None] + d[None, :], none, mask=(which < C.group)[:, None])


@gluon.jit
def _decode(
    q, k, out, parts, lses, sinks, table, width, starts, num_rows, num_queries, runs, num_runs, tasks,
    q_token, q_head, out_token, out_head, scale, C: gl.constexpr,
):  # fmt: skip
    task = tasks + gl.program_id(2) * 8
    begin, end, row, part = gl.load(task), gl.load(task + 1), gl.load(task + 2), gl.load(task + 3)
    first, count, length = gl.load(task + 4), gl.load(task + 5), gl.load(task + 6)
    if end == 0:
        _zero_padding(
            out, gl.load(starts + num_rows), num_queries, gl.load(runs + num_runs), out_token, out_head, C
        )
        return
    if gl.program_id(1) * _ROWS >= count * C.group:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    q1 = gl.allocate_shared_memory(dtype, [1, _ROWS, _V_DIM], _OPERAND)
    q2 = gl.allocate_shared_memory(dtype, [1, _ROWS, _REST], _OPERAND)
    k1 = gl.allocate_shared_memory(dtype, [2, _KEYS, _V_DIM], _OPERAND)
    k2 = gl.allocate_shared_memory(dtype, [2, _KEYS, _REST], _OPERAND)
    ms = gl.allocate_shared_memory(gl.float32, [2, _ROWS], _PER_ROW)
    totals = gl.allocate_shared_memory(gl.float32, [2, _ROWS], _PER_ROW)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    own = table + row.to(gl.int64) * width
    num_pairs = (end - begin + 2 * _KEYS - 1) // (2 * _KEYS)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out, parts, lses, sinks, q1, q2, k1, k2, ms, totals, full, empty, ready, done, begin, end,
                    num_pairs, part, first, count, length, out_token, out_head, scale, True, C,
                ),
            ),
            (
                _consume,
                (
                    out, parts, lses, sinks, q1, q2, k1, k2, ms, totals, full, empty, ready, done, begin, end,
                    num_pairs, part, first, count, length, out_token, out_head, scale, False, C,
                ),
            ),
            (
                _load,
                (
                    q, k, own, first, count, q_token, q_head, begin, end, num_pairs, q1, q2, k1, k2, full,
                    empty, C,
                ),
            ),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
