"""Attention over pages in Triton: `decode` by a work list, `extend` by tiles of queries, `merge` of parts.

In: queries, the pool of a layer, a batch; out: outputs. A program that reads only a part of a row's keys
leaves a normalised result and its log-sum-exp; `merge` combines the parts in their order, so results do not
depend on which program ends first.
"""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagoda.kernels._attention_extend import num_extend_programs
from pagoda.kernels._attention_tile_fused import (
    LOG2E,
    LOWEST,
    Constants,
    block,
    finish,
    inverse,
    nothing,
    pairs_of,
    put,
    queries_of,
    with_sink,
)
from pagoda.kernels._casts_fused import is_spelled, narrow, readable
from pagoda.kernels._launch import Launch

__all__ = ["Arguments", "Parts", "decode", "extend", "merge"]

# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["width", "window", "num_rows", "num_queries"])
def _decode(
    q, k, v, out, parts, lses, sinks, table, width, runs, tasks, starts, num_rows, num_queries, scale,
    softcap, window, v_scale, OVERLAPS: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:  # the merge may be launched: it waits for the end of this kernel before it reads parts
        gdc_launch_dependents()
    # Tiles behind the first come last: few rows have more queries than one tile, and programs that have
    # nothing to do would be in the way of others.
    head, program, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k += head * C.k_dim
    v += head * C.v_stride
    task = tasks + tl.load(runs + program) * 8
    num_tasks = tl.load(runs + program + 1) - tl.load(runs + program)
    begin, end, row, part = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    first, count, length = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6)
    for _ in range(num_tasks):
        # The next task is loaded while this one is computed; there is always one more in the buffer.
        task += 8
        next_begin, next_end, next_row = tl.load(task), tl.load(task + 1), tl.load(task + 2)
        next_part, next_first = tl.load(task + 3), tl.load(task + 4)
        next_count, next_length = tl.load(task + 5), tl.load(task + 6)
        if number * C.rows < count * C.group:
            query, which, is_row, at_row = pairs_of(number, head, count, length, C)
            q1, q2, power = queries_of(q, first, query, which, is_row, KIND, C)
            factor = power * scale
            top, total, acc1, acc2 = nothing(C)
            own = table + row.to(tl.int64) * width
            # From 0: Triton 3.6 takes a lower bound that the outer loop changes for a constant.
            for start in range(0, end - begin, C.keys):
                top, total, acc1, acc2 = block(
                    q1, q2, top, total, acc1, acc2, begin + start, begin, end, at_row, own, k, v, factor,
                    softcap, window, True, C,
                )  # fmt: skip
            finish(
                top, total, acc1, acc2, part, first, query, which, is_row, out, parts, lses, sinks, v_scale, C
            )
        begin, end, row, part = next_begin, next_end, next_row, next_part
        first, count, length = next_first, next_count, next_length
    if number == 0:  # padding gets 0
        pair = tl.arange(0, C.rows)
        none = tl.full([C.rows, C.v_first], 0.0, tl.float32)
        other = tl.full([C.rows, C.v_rest if C.v_rest else 16], 0.0, tl.float32)
        for token in range(tl.load(starts + num_rows) + program, num_queries, tl.num_programs(1)):
            for of in range(0, C.group, C.rows):
                to = (pair * 0 + token).to(tl.int64) * C.out_token + (head * C.group + of + pair) * C.out_head
                put(out, to, none, other, of + pair < C.group, C)


@triton.jit(do_not_specialize=["width", "window"])
def _extend(
    q, k, v, out, parts, lses, sinks, table, width, lengths, starts, extends, splits, scale, softcap, window,
    v_scale, KIND: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # Tiles of extend row i begin at number tokens before it * group // rows + i. The last ones come first,
    # since they read most, and all tiles with their first part before those with their second.
    head, program = tl.program_id(0) % C.kv_heads, tl.program_id(0) // C.kv_heads
    k += head * C.k_dim
    v += head * C.v_stride
    num_extends, num_tokens = tl.load(extends), tl.load(extends + 1)
    num_tiles = num_tokens * C.group // C.rows + num_extends
    if num_tiles == 0:
        return
    number, nth = num_tiles - 1 - program % num_tiles, program // num_tiles
    low = 0
    high = num_extends
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(extends + 3 + 2 * middle) * C.group // C.rows + middle <= number:
            low = middle
        else:
            high = middle
    row = tl.load(extends + 2 + 2 * low)
    tile = number - (tl.load(extends + 3 + 2 * low) * C.group // C.rows + low)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    num_parts, first_part = tl.load(splits + row * 2), tl.load(splits + row * 2 + 1)
    if (tile * C.rows < count * C.group) & (nth < num_parts):
        length = tl.load(lengths + row)
        query, which, is_row, at_row = pairs_of(tile, head, count, length, C)
        q1, q2, power = queries_of(q, first, query, which, is_row, KIND, C)
        factor = power * scale
        top, total, acc1, acc2 = nothing(C)
        own = table + row.to(tl.int64) * width
        # The first and the last position of the tile. Its queries read [low, high), a program a part of it.
        lowest = length - count + tile * C.rows // C.group
        highest = tl.minimum(length - count + (tile * C.rows + C.rows - 1) // C.group, length - 1)
        from_key = 0
        if C.has_window:
            from_key = tl.maximum(lowest - window + 1, 0)
        low = from_key // C.keys * C.keys
        high = highest + 1
        per_part = tl.cdiv(tl.cdiv(high - low, C.keys), num_parts) * C.keys
        low += nth * per_part
        high = tl.minimum(high, low + per_part)
        # Every query reads all keys in [inner, outer).
        inner = low
        if C.has_window:
            whole = tl.cdiv(tl.maximum(highest - window + 1, 0), C.keys) * C.keys
            inner = tl.minimum(tl.maximum(low, whole), high)
            for start in range(low, inner, C.keys):
                top, total, acc1, acc2 = block(
                    q1, q2, top, total, acc1, acc2, start, from_key, length, at_row, own, k, v, factor,
                    softcap, window, True, C,
                )  # fmt: skip
        outer = tl.maximum(tl.minimum((lowest + 1) // C.keys * C.keys, high // C.keys * C.keys), inner)
        for start in range(inner, outer, C.keys):
            top, total, acc1, acc2 = block(
                q1, q2, top, total, acc1, acc2, start, from_key, length, at_row, own, k, v, factor,
                softcap, window, False, C,
            )  # fmt: skip
        for start in range(outer, high, C.keys):
            top, total, acc1, acc2 = block(
                q1, q2, top, total, acc1, acc2, start, from_key, length, at_row, own, k, v, factor,
                softcap, window, True, C,
            )  # fmt: skip
        part = tl.where(num_parts > 1, first_part + nth * count, -1)
        finish(top, total, acc1, acc2, part, first, query, which, is_row, out, parts, lses, sinks, v_scale, C)


@triton.jit
def _merge_one(
    token, part, count, num_parts, parts, lses, out, sinks, v_scale, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a token and a head, which are at part, part + count, …, in this order."""
    DIM: tl.constexpr = C.v_dim * C.step
    which = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([WIDTH], 0.0, tl.float32)
    for start in range(0, num_parts, BLOCK):
        p = start + tl.arange(0, BLOCK)
        is_part = p < num_parts
        at = (part + p * count).to(tl.int64) * (C.kv_heads * C.group) + which
        lse = tl.load(lses + at, mask=is_part, other=float("-inf"))
        is_there = is_part[:, None] & (d < DIM)[None, :]
        x = tl.load(parts + at[:, None] * DIM + d[None, :], mask=is_there, other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        weight, alpha = tl.exp2(lse - new), tl.exp2(top - new)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(x * weight[:, None], 0)
        top = new
    if C.has_sinks:
        which_ = which + tl.arange(0, 1)
        total, kept = with_sink(sinks, which_, which_ >= 0, top, total)
        factor = v_scale * kept * inverse(total)
    else:
        factor = v_scale * inverse(total)
    to = out + token.to(tl.int64) * C.out_token + which * C.out_head + d
    tl.store(to, narrow(acc * factor, out.dtype.element_ty, C.has_bits), mask=d < DIM)


@triton.jit(do_not_specialize=[])
def _merge_runs(
    parts, lses, out, sinks, runs, tasks, v_scale, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # A row that is split begins at the end of a run.
    before, after = tl.load(runs + tl.program_id(0)), tl.load(runs + tl.program_id(0) + 1)
    task = tasks + tl.maximum(after - 1, 0) * 8
    part, first = tl.load(task + 3), tl.load(task + 4)
    count, num_parts = tl.load(task + 5), tl.load(task + 7)
    if OVERLAPS:
        gdc_wait()
    if (after > before) & (num_parts > 1):
        for query in range(count):
            _merge_one(
                first + query, part + query, count, num_parts, parts, lses, out, sinks, v_scale, BLOCK, WIDTH,
                C,
            )  # fmt: skip


@triton.jit(do_not_specialize=[])
def _merge_tokens(
    parts, lses, out, sinks, splits, starts, indices, v_scale, SKIPPED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(indices + token)
    if row >= 0:
        num_parts, part = tl.load(splits + row * 2), tl.load(splits + row * 2 + 1)
        first = tl.load(starts + row)
        count = tl.load(starts + row + 1) - first
        if (num_parts > 1) & (count > SKIPPED):
            _merge_one(
                token,
                part + token - first,
                count,
                num_parts,
                parts,
                lses,
                out,
                sinks,
                v_scale,
                BLOCK,
                WIDTH,
                C,
            )


# ── launches ────────────────────────────────────────────────────────────────────────────────────────


class Arguments(NamedTuple):
    """A call of attention in plain tensors."""

    queries: torch.Tensor  # [tokens, heads, k_dim]; the last dimension is dense
    out: torch.Tensor  # [tokens, heads, v_dim]; the last dimension is dense
    keys: torch.Tensor  # [num_slots, kv_heads, k_dim] contiguous
    values: torch.Tensor | None  # [num_slots, kv_heads, v_dim] contiguous; None: the first v_dim of each key
    k_scale: float
    v_scale: float
    scale: float
    softcap: float  # 0: none
    sinks: torch.Tensor | None  # [heads]
    window: int  # tokens that a query reads, its own included; 0: all
    page: int  # tokens per page of `table`
    table: torch.Tensor  # [rows, width] int32
    lengths: torch.Tensor  # [rows] int32
    starts: torch.Tensor  # [rows + 1] int32
    indices: torch.Tensor  # [tokens] int32: the row of each token, −1 for padding
    extends: torch.Tensor  # [rows + 1, 2] int32: number of extend rows, tokens; each row, tokens before it
    runs: torch.Tensor  # [programs + 1] int32
    tasks: torch.Tensor  # [rows + programs, 8] int32
    splits: torch.Tensor  # [rows, 2] int32

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.queries.shape[1] // self.keys.shape[1]


class Parts(NamedTuple):
    """Memory for partial results."""

    results: torch.Tensor  # [parts, heads, v_dim] float32
    lses: torch.Tensor  # [parts, heads] float32


class Tiling(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _pieces(dim: int, is_fp8: bool) -> tuple[int, int]:
    """Return the elements in the two pieces of a vector: powers of two of at least 16, or 0."""
    if is_fp8:  # even and odd numbers
        return (max(16, triton.next_power_of_2(dim)),) * 2
    first = 1 << (dim.bit_length() - 1)
    if first < 16 or first == dim:
        return max(16, first if first == dim else 2 * first), 0
    return first, max(16, triton.next_power_of_2(dim - first))


@functools.lru_cache(maxsize=1024)
def _constants(
    kv_heads: int,
    group: int,
    k_dim: int,
    v_dim: int,
    is_latent: bool,
    page: int,
    dtype: torch.dtype,
    q_dtype: torch.dtype,
    sinks: torch.dtype | None,
    has_window: bool,
    has_softcap: bool,
    strides: tuple[int, int, int, int],
    is_interpreted: bool,
    spells: bool,
) -> tuple[Constants, Any]:
    """Return what kernels know at compile time, tiles apart, and the type in which they multiply."""
    fp8 = _MANTISSA.get(dtype, 0)
    step = 2 if fp8 else 1
    kind = q_dtype
    if fp8 and q_dtype != torch.float32:
        kind = torch.float16  # it holds every fp8 number
    elif q_dtype != dtype:
        kind = torch.float32
    if is_interpreted:
        kind = torch.float32
    k_first, k_rest = _pieces(k_dim // step, bool(fp8))
    v_first, v_rest = _pieces(v_dim // step, bool(fp8))
    if is_latent and fp8 and k_first <= 64:  # what is behind the value is computed, and not stored
        v_first = v_rest = k_first
    constants = Constants(
        0, 0, kv_heads, group, k_dim // step, k_first, k_rest, v_dim // step, v_first, v_rest,
        (k_dim if is_latent else v_dim) // step, page, fp8,
        # A value in pieces that are not those of its key is read apart.
        is_latent and v_first == k_first and (v_rest == k_rest if fp8 else v_dim == v_first),
        kind == torch.float16 and q_dtype == torch.bfloat16, has_window, sinks is not None, has_softcap,
        spells, is_interpreted, (str(q_dtype), str(dtype), str(sinks)), *strides,
    )  # fmt: skip
    return constants, _KINDS[kind]


def _is_interpreted(device: torch.device) -> bool:
    return device.type != "cuda"


def _token_stride(tensor: torch.Tensor) -> int:
    """Return the stride of tokens; for one token, whose stride means nothing, that of a contiguous tensor."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1] * tensor.shape[2]


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it waits for has ended (from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _known(call: Arguments) -> tuple[Constants, Any]:
    queries, out = call.queries, call.out
    return _constants(
        call.keys.shape[1],
        call.group,
        queries.shape[2],
        out.shape[2],
        call.values is None,
        call.page,
        call.keys.dtype,
        queries.dtype,
        None if call.sinks is None else call.sinks.dtype,
        call.window > 0,
        call.softcap > 0,
        (_token_stride(queries), queries.stride(1), _token_stride(out), out.stride(1)),
        _is_interpreted(queries.device),
        is_spelled(queries.device),
    )


def _tensors(call: Arguments, parts: Parts | None, C: Constants) -> tuple[torch.Tensor, ...]:
    """Return the first arguments of kernels."""
    keys, values = call.keys, call.keys if call.values is None else call.values
    if C.fp8:
        keys, values = keys.view(torch.uint16), values.view(torch.uint16)
    unread = call.lengths.view(torch.float32)
    results, lses = parts or (unread, unread)
    return (
        readable(call.queries, C.has_bits), readable(keys, C.has_bits), readable(values, C.has_bits),
        readable(call.out, C.has_bits), results, lses, unread if call.sinks is None else call.sinks,
        call.table,
    )  # fmt: skip


def _scales(call: Arguments) -> tuple[float, float, int, float]:
    scale = call.scale * call.k_scale
    if not call.softcap:
        scale *= LOG2E.value
    return float(scale), float(call.softcap), call.window, float(call.v_scale)


@functools.cache
def _launcher(kernel: Any, num_warps: int, num_stages: int, overlaps: bool) -> Launch:
    options = {"launch_pdl": True} if overlaps else {}
    return Launch(kernel, num_warps=num_warps, num_stages=num_stages, **options)


def _run(
    kernel: Any,
    tiling: Tiling,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    *constants: Any,
    overlaps: bool = False,
) -> None:
    """Launch a kernel without looking its variant up again, unless a tensor is not aligned.

    Constants determine the types of all pointers: `Launch` finds a compiled kernel by them alone.
    """
    aligned = all(arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, torch.Tensor))
    if aligned:
        _launcher(kernel, tiling.num_warps, tiling.num_stages, overlaps)(grid, *args, constants=constants)
    else:
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        kernel[grid](*args, *constants, **options)


def _bytes(C: Constants, dtype: torch.dtype) -> int:
    """Return the bytes of the larger of a key and a value in shared memory."""
    return (
        max(C.k_first + C.k_rest * (not C.fp8), C.v_first + C.v_rest * (not C.fp8)) * dtype.itemsize * C.step
    )


def _decode_tiling(C: Constants, dtype: torch.dtype, kind: Any) -> Tiling:
    """Tiles of 8 KiB of keys, of which four programs of two warps fit a multiprocessor."""
    rows = min(_most_rows(C, kind), max(16, triton.next_power_of_2(C.group)))
    size = _bytes(C, dtype)
    if rows > 16:
        return Tiling(rows, 64 if size <= 256 else 32 if size <= 512 else 16, 8 if size > 512 else 4, 3)
    if size > 512:
        return Tiling(rows, 16, 4, 3)
    return Tiling(rows, min(128, 8192 // triton.next_power_of_2(size)), 2, 5)


def _extend_tiling(C: Constants, dtype: torch.dtype, kind: Any) -> Tiling:
    """Large tiles; small ones in float32, of which every product is an instruction: else it compiles for a
    minute."""
    size = _bytes(C, dtype)
    if size <= 256 and kind != tl.float32:
        return Tiling(128, 64, 4, 4)
    rows = min(32 if kind == tl.float32 else 64, _most_rows(C, kind))
    return Tiling(rows, 32 if size <= 512 else 16, 4 if size <= 512 else 8, 3)


def _most_rows(C: Constants, kind: Any) -> int:
    """Return for how many pairs (query, head) shared memory has room: at most 64."""
    size = (C.k_first + C.k_rest) * int(kind.primitive_bitwidth) // 8
    return min(64, int(1 << (81920 // size).bit_length() - 1))


def decode(call: Arguments, parts: Parts | None, max_queries: int) -> None:
    """Compute the rows of the work list, which have at most `max_queries` queries, and zero the padding."""
    C, kind = _known(call)
    tiling = _decode_tiling(C, call.keys.dtype, kind)
    C = replace(C, rows=tiling.rows, keys=tiling.keys)
    grid = (C.kv_heads, call.runs.shape[0] - 1, triton.cdiv(max_queries * C.group, C.rows))
    args = (
        *_tensors(call, parts, C), call.table.stride(0), call.runs, call.tasks, call.starts, call.num_rows,
        call.queries.shape[0], *_scales(call),
    )  # fmt: skip
    _run(_decode, tiling, grid, args, parts is not None and _overlaps(call.queries.device), kind, C)


def extend(call: Arguments, parts: Parts | None, num_rows: int, num_tokens: int, num_parts: int) -> None:
    """Compute the extend rows: at most `num_rows` of `num_tokens` queries, with keys in `num_parts` parts."""
    C, kind = _known(call)
    tiling = _extend_tiling(C, call.keys.dtype, kind)
    C = replace(C, rows=tiling.rows, keys=tiling.keys)
    target = call.runs.shape[0] - 1
    grid = (C.kv_heads * num_extend_programs(num_rows, num_tokens, num_parts, C.rows, C.group, target), 1, 1)
    args = (
        *_tensors(call, parts, C), call.table.stride(0), call.lengths, call.starts, call.extends, call.splits,
        *_scales(call),
    )  # fmt: skip
    _run(_extend, tiling, grid, args, kind, C)


def merge(call: Arguments, parts: Parts, skipped: int, has_extends: bool) -> None:
    """Merge the parts of the rows of the work list, and, if there are any, of rows with more queries."""
    C, _ = _known(call)
    tensors = (parts.results, parts.lses, readable(call.out, C.has_bits))
    sinks = call.lengths.view(torch.float32) if call.sinks is None else call.sinks
    heads, width = C.kv_heads * C.group, triton.next_power_of_2(call.out.shape[2])
    tiling, at_once = Tiling(1, 1, 4, 1), min(64, 8192 // width)
    overlaps = _overlaps(call.queries.device)
    _run(
        _merge_runs, tiling, (call.runs.shape[0] - 1, heads, 1),
        (*tensors, sinks, call.runs, call.tasks, float(call.v_scale)), overlaps, at_once, width, C,
        overlaps=overlaps,
    )  # fmt: skip
    if has_extends:
        _run(
            _merge_tokens, tiling, (min(call.queries.shape[0], call.indices.shape[0]), heads, 1),
            (*tensors, sinks, call.splits, call.starts, call.indices, float(call.v_scale)), skipped, at_once,
            width, C,
        )  # fmt: skip
