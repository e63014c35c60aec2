"""The Triton kernels that fill a batch: one program per group counts pages, then many programs fill buffers.

native/core/rank.cpp does the same on the host and is the reference: both agree in every number. Offsets are
64-bit.
"""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagoda._native import DECODE_QUERIES
from pagoda.kernels._launch import Launch

__all__ = ["GroupPages", "fill", "no_pages", "prepare"]

# What kernels know about a group, as int64: its sizes and the addresses of its buffers.
_COLUMNS_BEFORE = tl.constexpr(0)  # columns of all tables before this group's
_MAX_PAGES = tl.constexpr(1)
_PAGE = tl.constexpr(2)
_KERNEL_PAGE = tl.constexpr(3)
_WINDOW = tl.constexpr(4)
_MAX_INDICES = tl.constexpr(5)
_SLOT_MAPPING = tl.constexpr(6)
_PAGE_TABLE = tl.constexpr(7)
_INDPTR = tl.constexpr(8)
_INDICES = tl.constexpr(9)
_LAST_PAGE_LEN = tl.constexpr(10)
_BEGINS = tl.constexpr(11)
_TARGET = tl.constexpr(12)
_RUNS = tl.constexpr(13)
_TASKS = tl.constexpr(14)
_SPLITS = tl.constexpr(15)
_NUM_PARAMETERS = tl.constexpr(16)
_DECODE_QUERIES = tl.constexpr(DECODE_QUERIES)
# A group in the directory of a delta's work, as native/core/delta.hpp describes it: its words, and where
# segments, members (each with their number) and splits begin.
_WORK_ENTRY = tl.constexpr(8)
_WORK_SEGMENTS = tl.constexpr(1)
_WORK_MEMBERS = tl.constexpr(3)
_WORK_SPLITS = tl.constexpr(5)


class GroupPages(NamedTuple):
    """One group of a batch: the geometry of its table, [num_rows + 1, max_pages], and its buffers."""

    max_pages: int
    page_tokens: int
    kernel_page_tokens: int
    window: int  # 0: no window
    target: int  # of its work list; 0: it has none
    slot_mapping: torch.Tensor  # [max_tokens] int64
    page_table: torch.Tensor  # [max_rows, width] int32
    indptr: torch.Tensor  # [max_rows + 1] int32
    indices: torch.Tensor  # [max_indices] int32
    last_page_len: torch.Tensor  # [max_rows] int32
    begins: torch.Tensor  # [max_rows] int32
    runs: torch.Tensor  # [target + 1] int32
    tasks: torch.Tensor  # [max_rows + target, 8] int32
    splits: torch.Tensor  # [max_rows, 2] int32


@triton.jit
def _size(view, which: tl.constexpr):
    return tl.load(view + which).to(tl.int32)


@triton.jit
def _buffer(view, which: tl.constexpr):
    return tl.load(view + which).to(tl.pointer_type(tl.int32))


# No argument makes a variant: once any call has compiled the kernel, every other call can be captured.
@triton.jit(
    do_not_specialize=["rows_at", "lengths_at", "starts_at", "num_rows", "padded_rows"],
    do_not_specialize_on_alignment=["parameters", "packed"],
)
def _count(
    parameters, packed, rows_at, lengths_at, starts_at, num_rows, padded_rows, out_rows, out_lengths,
    out_starts, extends, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, lengths, starts = packed + rows_at, packed + lengths_at, packed + starts_at
    # One program per group sums the pages of all rows, chunk by chunk. The first program also writes the
    # buffers that all groups share.
    group = parameters + tl.program_id(0) * _NUM_PARAMETERS
    kernel_page = _size(group, _KERNEL_PAGE)
    max_indices = tl.load(group + _MAX_INDICES)
    window = tl.load(group + _WINDOW)
    indptr = _buffer(group, _INDPTR)
    last_page_len = _buffer(group, _LAST_PAGE_LEN)
    begins = _buffer(group, _BEGINS)
    wanted = tl.zeros((), tl.int64)  # pages of all rows so far
    listed = tl.zeros((), tl.int64)  # pages of the rows whose list fits
    last_start = tl.load(starts + num_rows, mask=num_rows > 0, other=0)
    num_extends = tl.zeros((), tl.int32)  # rows so far that compute more than a decode row does
    extend_tokens = tl.zeros((), tl.int32)
    tl.store(indptr, 0)
    if tl.program_id(0) == 0:
        tl.store(out_starts, 0)
    for chunk in range(0, padded_rows, BLOCK):
        at = chunk + tl.arange(0, BLOCK)
        is_row = at < padded_rows
        is_given = at < num_rows
        row = tl.load(rows + at, mask=is_given, other=0)
        length = tl.load(lengths + at, mask=is_given, other=0)
        start = tl.load(starts + at, mask=is_given, other=0)
        stop = tl.load(starts + at + 1, mask=is_given, other=0)
        oldest = tl.maximum(length.to(tl.int64) - (stop - start) - window + 1, 0)
        oldest = tl.where(is_given & (window > 0), oldest, 0).to(tl.int32)
        first = oldest // kernel_page
        # (length + kernel_page − 1) could overflow int32.
        count = (length // kernel_page + (length % kernel_page > 0) - first).to(tl.int64)
        fits = wanted + tl.cumsum(count, 0) <= max_indices
        kept = tl.where(fits, count, 0)
        last = tl.where((count > 0) & fits, (length - 1) % kernel_page + 1, 0)
        if tl.program_id(0) == 0:
            tl.store(out_rows + at, row, mask=is_row)
            tl.store(out_lengths + at, length, mask=is_row)
            tl.store(out_starts + 1 + at, tl.where(is_given, stop, last_start), mask=is_row)
            is_extend = is_given & (stop - start > _DECODE_QUERIES)
            tokens = tl.where(is_extend, stop - start, 0)
            place = extends + 2 * (num_extends + tl.cumsum(is_extend.to(tl.int32), 0))
            tl.store(place, at, mask=is_extend)
            tl.store(place + 1, extend_tokens + tl.cumsum(tokens, 0) - tokens, mask=is_extend)
            num_extends += tl.sum(is_extend.to(tl.int32), 0)
            extend_tokens += tl.sum(tokens, 0)
        tl.store(begins + at, first * kernel_page, mask=is_row)
        tl.store(last_page_len + at, last, mask=is_row)
        tl.store(indptr + 1 + at, (listed + tl.cumsum(kept, 0)).to(tl.int32), mask=is_row)
        wanted += tl.sum(count, 0)
        listed += tl.sum(kept, 0)
    if tl.program_id(0) == 0:
        tl.store(extends, num_extends)
        tl.store(extends + 1, extend_tokens)
        for chunk in range(0, padded_rows, BLOCK):
            at = chunk + tl.arange(0, BLOCK)
            is_free = (at >= num_extends) & (at < padded_rows)
            tl.store(extends + 2 + 2 * at, 0, mask=is_free)
            tl.store(extends + 3 + 2 * at, 0, mask=is_free)


@triton.jit
def _fill_pages(
    at, first_column, table, rows, lengths, num_rows, max_pages, width, kernel_page, split, begins, indptr,
    page_table, indices, BLOCK: tl.constexpr,
):  # fmt: skip
    column = first_column + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < num_rows, other=0)
    length = tl.load(lengths + at, mask=at < num_rows, other=0)
    first = tl.load(begins + at) // kernel_page
    begin = tl.load(indptr + at)
    num_listed = tl.load(indptr + at + 1) - begin
    end = length // kernel_page + (length % kernel_page > 0)
    is_read = (column >= first) & (column < end)
    page = tl.load(table + row.to(tl.int64) * max_pages + column // split, mask=is_read, other=0)
    kernel_page_id = tl.where(page > 0, page * split + column % split, 0)
    tl.store(page_table + at.to(tl.int64) * width + column, kernel_page_id, mask=column < width)
    # All pages of a row, or none if its list does not fit.
    is_listed = (column >= first) & (column < first + num_listed)
    tl.store(indices + begin.to(tl.int64) + (column - first), kernel_page_id, mask=is_listed)


@triton.jit
def _fill_tokens(
    first_token, table, rows, lengths, starts, num_rows, padded_tokens, max_pages, page_tokens, slot_mapping,
    positions, batch_indices, BLOCK: tl.constexpr,
):  # fmt: skip
    token = first_token + tl.arange(0, BLOCK)
    # Find the row of each token by bisection: the number of rows that end at or before it.
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + num_rows
    undecided = num_rows
    while undecided > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_behind = is_open & (tl.load(starts + 1 + middle, mask=is_open, other=0) <= token)
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
        undecided = undecided // 2
    is_token = low < num_rows
    row = tl.load(rows + low, mask=is_token, other=0)
    stop = tl.load(starts + low + 1, mask=is_token, other=0)
    length = tl.load(lengths + low, mask=is_token, other=0)
    position = tl.where(is_token, length - (stop - token), 0)
    page = tl.load(table + row.to(tl.int64) * max_pages + position // page_tokens, mask=is_token, other=0)
    slot = tl.where(page > 0, page.to(tl.int64) * page_tokens + position % page_tokens, -1)
    tl.store(slot_mapping + token, slot, mask=token < padded_tokens)
    if tl.program_id(1) == 0:  # programs of the first group write what groups share
        tl.store(positions + token, position.to(tl.int64), mask=token < padded_tokens)
        tl.store(batch_indices + token, tl.where(is_token, low, -1), mask=token < padded_tokens)


@triton.jit
def _fill_work(
    first, work, lengths, starts, num_rows, padded_rows, target, runs, tasks, splits, BLOCK: tl.constexpr,
):  # fmt: skip
    # Number i of each buffer. A step without rows has no list.
    at = first + tl.arange(0, BLOCK)
    entry = work + tl.program_id(1) * _WORK_ENTRY
    is_given = num_rows > 0
    own_target = tl.load(entry, mask=is_given, other=-1)
    segments = work + tl.load(entry + _WORK_SEGMENTS, mask=is_given, other=0)
    num_segments = tl.load(entry + _WORK_SEGMENTS + 1, mask=is_given, other=0)
    members = work + tl.load(entry + _WORK_MEMBERS, mask=is_given, other=0)
    own_splits = work + tl.load(entry + _WORK_SPLITS, mask=is_given, other=0)

    is_row = at < num_rows
    number = tl.load(own_splits + 2 * at, mask=is_row, other=0)
    part = tl.load(own_splits + 2 * at + 1, mask=is_row, other=-1)
    tl.store(splits + 2 * at, number, mask=at < padded_rows)
    tl.store(splits + 2 * at + 1, part, mask=at < padded_rows)

    run = tl.load(own_splits + 2 * num_rows + at, mask=at <= own_target, other=0)
    tl.store(runs + at, tl.where(at <= own_target, run, num_segments), mask=at <= target)

    is_task = at < num_segments
    begin = tl.load(segments + 4 * at, mask=is_task, other=0)
    end = tl.load(segments + 4 * at + 1, mask=is_task, other=0)
    member = members + 2 * tl.load(segments + 4 * at + 2, mask=is_task, other=0)
    row = tl.load(member, mask=is_task, other=0)
    part = tl.load(member + 1, mask=is_task, other=0)
    start = tl.load(starts + row, mask=is_task, other=0)
    stop = tl.load(starts + row + 1, mask=is_task, other=0)
    length = tl.load(lengths + row, mask=is_task, other=0)
    num_parts = tl.load(own_splits + 2 * row, mask=is_task, other=0)
    is_first = tl.load(own_splits + 2 * row + 1, mask=is_task, other=-1) == part
    task, is_there = tasks + 8 * at, at < padded_rows + target
    tl.store(task, begin, mask=is_there)
    tl.store(task + 1, end, mask=is_there)
    tl.store(task + 2, row, mask=is_there)
    tl.store(task + 3, part, mask=is_there)
    tl.store(task + 4, start, mask=is_there)
    tl.store(task + 5, stop - start, mask=is_there)
    tl.store(task + 6, length, mask=is_there)
    tl.store(task + 7, tl.where(is_first & (part >= 0), num_parts, 0), mask=is_there)


@triton.jit(
    do_not_specialize=[
        "rows_at", "lengths_at", "starts_at", "work_at", "num_rows", "padded_rows", "padded_tokens",
        "table_rows",
    ],
    do_not_specialize_on_alignment=["parameters", "table", "packed"],
)  # fmt: skip
def _fill(
    parameters, table, packed, rows_at, lengths_at, starts_at, work_at, num_rows, padded_rows, padded_tokens,
    table_rows, positions, batch_indices, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, lengths, starts = packed + rows_at, packed + lengths_at, packed + starts_at
    # The first programs of a group fill one block of columns of one row each, the next ones a block of tokens
    # each, then a block of the work list each; the rest, which only a larger group needs, do nothing. All
    # parameters are loaded up front: loading each one where it is used would cost one trip to memory per
    # parameter.
    group = parameters + tl.program_id(1) * _NUM_PARAMETERS
    table += tl.load(group + _COLUMNS_BEFORE) * table_rows
    page_tokens, kernel_page = _size(group, _PAGE), _size(group, _KERNEL_PAGE)
    max_pages = _size(group, _MAX_PAGES)
    begins, indptr, indices = _buffer(group, _BEGINS), _buffer(group, _INDPTR), _buffer(group, _INDICES)
    page_table = _buffer(group, _PAGE_TABLE)
    slot_mapping = tl.load(group + _SLOT_MAPPING).to(tl.pointer_type(tl.int64))
    target = _size(group, _TARGET)
    runs, tasks, splits = _buffer(group, _RUNS), _buffer(group, _TASKS), _buffer(group, _SPLITS)
    split = page_tokens // kernel_page
    width = max_pages * split
    num_blocks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    if program < padded_rows * num_blocks:
        _fill_pages(
            program // num_blocks, (program % num_blocks) * BLOCK, table, rows, lengths, num_rows, max_pages,
            width, kernel_page, split, begins, indptr, page_table, indices, BLOCK,
        )  # fmt: skip
    else:
        first_token = (program - padded_rows * num_blocks).to(tl.int64) * BLOCK
        if first_token < padded_tokens:
            _fill_tokens(
                first_token.to(tl.int32), table, rows, lengths, starts, num_rows, padded_tokens, max_pages,
                page_tokens, slot_mapping, positions, batch_indices, BLOCK,
            )  # fmt: skip
        else:
            first = (program - padded_rows * num_blocks - tl.cdiv(padded_tokens, BLOCK)) * BLOCK
            if (target > 0) & (first < padded_rows + target + 1):
                _fill_work(
                    first, packed + work_at, lengths, starts, num_rows, padded_rows, target, runs, tasks,
                    splits, BLOCK,
                )  # fmt: skip


_launch_count, _launch_fill = Launch(_count, num_warps=8), Launch(_fill, num_warps=4)
# The most rows that the counting program handles at a time. A block no larger than the batch saves 1.8 µs at
# 256 rows.
_COUNT_BLOCK = 1024
_FILL_BLOCK = 512  # columns or tokens per program


class Prepared(NamedTuple):
    parameters: torch.Tensor  # [groups, _NUM_PARAMETERS] int64
    count_block: int
    num_blocks: int  # blocks of columns in the widest table
    target: int  # the largest of the groups
    groups: Sequence[GroupPages]  # keeps their buffers alive


def no_pages(max_rows: int, max_tokens: int, device: torch.device) -> GroupPages:
    """Return the group of a model without pages: its programs fill what groups share. No token has a slot,
    and every row reads the first place of the table."""
    slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    rows = torch.zeros(3 * (max_rows + 1), dtype=torch.int32, device=device).view(3, -1)
    none = rows[:, :0]
    return GroupPages(
        0, 1 << 30, 1 << 30, 0, 0, slots, none.view(max_rows, 0), rows[0], none[0], rows[1], rows[2], *none
    )


def prepare(groups: Sequence[GroupPages], device: torch.device) -> Prepared:
    """Return what `fill` needs to know about the groups, on the device. Waits for a small copy."""
    parameters, columns_before = [], 0
    max_rows = groups[0].page_table.shape[0]
    for group in groups:
        sizes = [columns_before, group.max_pages, group.page_tokens, group.kernel_page_tokens, group.window]
        buffers = (
            group.slot_mapping, group.page_table, group.indptr, group.indices, group.last_page_len,
            group.begins,
        )  # fmt: skip
        work = group.runs, group.tasks, group.splits
        parameters.append(
            [
                *sizes,
                group.indices.shape[0],
                *(buffer.data_ptr() for buffer in buffers),
                group.target,
                *(buffer.data_ptr() for buffer in work),
            ]
        )
        columns_before += group.max_pages
    on_device = torch.tensor(parameters, dtype=torch.int64, device=device)
    count_block = min(_COUNT_BLOCK, max(16, triton.next_power_of_2(max_rows)))
    widest = max(group.page_table.shape[1] for group in groups)
    target = max(group.target for group in groups)
    return Prepared(on_device, count_block, -(-widest // _FILL_BLOCK), target, groups)


def fill(
    prepared: Prepared,
    table: torch.Tensor,  # [num_places] int32, the tables of all groups, one after the other
    table_rows: int,  # rows of each table, row 0 included
    packed: torch.Tensor,  # [n] int32, a delta
    sections: tuple[int, ...],  # where its rows, lengths, starts and work begin
    num_rows: int,
    padded_rows: int,
    padded_tokens: int,
    out: tuple[torch.Tensor, ...],  # rows, lengths, starts, positions, batch_indices, extends
) -> None:
    """Fill the buffers of all groups in two launches, up to the padded rows and tokens."""
    parameters, count_block, num_blocks, target, _ = prepared
    num_groups = parameters.shape[0]
    _launch_count(
        (num_groups, 1, 1), parameters, packed, *sections[:3], num_rows, padded_rows, *out[:3], out[5],
        constants=(count_block,),
    )  # fmt: skip
    num_tasks = padded_rows + target + 1 if target else 0
    num_programs = padded_rows * num_blocks + -(-padded_tokens // _FILL_BLOCK) + -(-num_tasks // _FILL_BLOCK)
    _launch_fill(
        (max(1, num_programs), num_groups, 1), parameters, table, packed, *sections, num_rows, padded_rows,
        padded_tokens, table_rows, *out[3:5], constants=(_FILL_BLOCK,),
    )  # fmt: skip
