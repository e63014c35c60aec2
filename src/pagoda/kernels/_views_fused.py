"""The Triton kernels of views: one program a view counts, then many fill. Offsets are 64-bit."""

# Kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagoda.kernels._launch import Launch
from pagoda.kernels._views_reference import ViewSpec

__all__ = ["prepare", "refresh"]

# What kernels know of a view: int64 each, its sizes, and where its buffers begin in the order of ViewBuffers.
_COLUMNS_BEFORE = tl.constexpr(0)  # of the tables before its own
_MAX_PAGES = tl.constexpr(1)
_PAGE = tl.constexpr(2)
_KERNEL_PAGE = tl.constexpr(3)
_WINDOW = tl.constexpr(4)
_MAX_BATCH = tl.constexpr(5)
_MAX_TOKENS = tl.constexpr(6)
_MAX_INDICES = tl.constexpr(7)
_SEQ_LENS = tl.constexpr(8)
_STARTS = tl.constexpr(9)
_BLOCK_TABLE = tl.constexpr(10)
_INDPTR = tl.constexpr(11)
_INDICES = tl.constexpr(12)
_LAST_PAGE_LEN = tl.constexpr(13)
_BEGINS = tl.constexpr(14)
_SLOT_MAPPING = tl.constexpr(15)
_NUM_PARAMETERS = tl.constexpr(16)


@triton.jit
def _size(view, which: tl.constexpr):
    return tl.load(view + which).to(tl.int32)


@triton.jit
def _buffer(view, which: tl.constexpr):
    return tl.load(view + which).to(tl.pointer_type(tl.int32))


# Nothing makes variants: what any call compiled serves a capture of any other.
@triton.jit(
    do_not_specialize=["batch", "num_rows"],
    do_not_specialize_on_alignment=["parameters", "rows", "lengths", "given_starts"],
)
def _count(parameters, rows, lengths, given_starts, batch, num_rows, BLOCK: tl.constexpr):
    # One program a view: pages of all rows are summed, chunk after chunk.
    view = parameters + tl.program_id(0) * _NUM_PARAMETERS
    kernel_page = _size(view, _KERNEL_PAGE)
    max_batch = _size(view, _MAX_BATCH)
    max_indices = tl.load(view + _MAX_INDICES)
    window = tl.load(view + _WINDOW)
    max_length = tl.load(view + _MAX_PAGES) * tl.load(view + _PAGE)
    seq_lens = _buffer(view, _SEQ_LENS)
    starts = _buffer(view, _STARTS)
    indptr = _buffer(view, _INDPTR)
    last_page_len = _buffer(view, _LAST_PAGE_LEN)
    begins = _buffer(view, _BEGINS)
    wanted = tl.zeros((), tl.int64)  # pages of all rows so far
    listed = tl.zeros((), tl.int64)  # those of rows whose list has room
    last_start = tl.load(given_starts + batch)
    tl.store(indptr, 0)
    tl.store(starts, tl.load(given_starts))
    for chunk in range(0, max_batch, BLOCK):
        at = chunk + tl.arange(0, BLOCK)
        is_row = at < max_batch
        is_given = at < batch
        row = tl.load(rows + at, mask=is_given, other=0)
        length = tl.load(lengths + at, mask=is_given, other=0).to(tl.int64)
        start = tl.load(given_starts + at, mask=is_given, other=0)
        stop = tl.load(given_starts + at + 1, mask=is_given, other=0)
        num_queries = stop.to(tl.int64) - start.to(tl.int64)
        is_real = (row > 0) & (row < num_rows) & (length <= max_length)
        is_real = is_real & (num_queries >= 0) & (num_queries <= length)
        length = tl.where(is_real, length, 0)
        oldest = tl.maximum(length - num_queries - window + 1, 0)
        oldest = tl.where(is_real & (window > 0), oldest, 0)
        # Both are in the table's range by now, and 32-bit divisions are the cheap ones.
        length, oldest = length.to(tl.int32), oldest.to(tl.int32)
        first = oldest // kernel_page
        count = (length // kernel_page + (length % kernel_page > 0) - first).to(tl.int64)
        fits = wanted + tl.cumsum(count, 0) <= max_indices
        kept = tl.where(fits, count, 0)
        last = tl.where((length > 0) & fits, (length - 1) % kernel_page + 1, 0)
        tl.store(seq_lens + at, length, mask=is_row)
        tl.store(begins + at, first * kernel_page, mask=is_row)
        tl.store(last_page_len + at, last, mask=is_row)
        tl.store(indptr + 1 + at, (listed + tl.cumsum(kept, 0)).to(tl.int32), mask=is_row)
        tl.store(starts + 1 + at, tl.where(is_given, stop, last_start), mask=is_row)
        wanted += tl.sum(count, 0)
        listed += tl.sum(kept, 0)


@triton.jit
def _fill_pages(
    at, first_column, table, rows, batch, max_pages, width, kernel_page, split, seq_lens, begins, indptr,
    block_table, indices, BLOCK: tl.constexpr,
):  # fmt: skip
    column = first_column + tl.arange(0, BLOCK)
    # All are under way at once; what a row says that is none is not read on, because its length is 0.
    row = tl.load(rows + at, mask=at < batch, other=0)
    length = tl.load(seq_lens + at)
    first = tl.load(begins + at) // kernel_page
    begin = tl.load(indptr + at)
    num_listed = tl.load(indptr + at + 1) - begin
    # Not (length + kernel_page − 1), which may pass 2^31.
    end = length // kernel_page + (length % kernel_page > 0)
    is_read = (column >= first) & (column < end)
    page = tl.load(table + row.to(tl.int64) * max_pages + column // split, mask=is_read, other=0)
    kernel_page_id = tl.where(page > 0, page * split + column % split, 0)
    tl.store(block_table + at.to(tl.int64) * width + column, kernel_page_id, mask=column < width)
    # As many pages as there are, or none of a row that has no room.
    is_listed = (column >= first) & (column < first + num_listed)
    tl.store(indices + begin.to(tl.int64) + (column - first), kernel_page_id, mask=is_listed)


@triton.jit
def _fill_slots(
    first_token, table, rows, batch, max_pages, max_batch, max_tokens, page_tokens, seq_lens, starts,
    slot_mapping, BLOCK: tl.constexpr,
):  # fmt: skip
    token = first_token + tl.arange(0, BLOCK)
    # Of whom a token is: how many rows end at or before it, by bisection.
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + max_batch
    undecided = max_batch
    while undecided > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_behind = is_open & (tl.load(starts + 1 + middle, mask=is_open, other=0) <= token)
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
        undecided = undecided // 2
    is_owned = low < max_batch
    row = tl.load(rows + low, mask=low < batch, other=0)
    start = tl.load(starts + low, mask=is_owned, other=0)
    stop = tl.load(starts + low + 1, mask=is_owned, other=0)
    length = tl.load(seq_lens + low, mask=is_owned, other=0)
    is_token = is_owned & (token >= start) & (token < stop) & (length > 0)
    position = tl.where(is_token, length - (stop - token), 0)
    page = tl.load(table + row.to(tl.int64) * max_pages + position // page_tokens, mask=is_token, other=0)
    slot = tl.where(page > 0, page.to(tl.int64) * page_tokens + position % page_tokens, -1)
    tl.store(slot_mapping + token, slot, mask=token < max_tokens)


@triton.jit(
    do_not_specialize=["batch", "num_rows"],
    do_not_specialize_on_alignment=["parameters", "table", "rows"],
)
def _fill(parameters, table, rows, batch, num_rows, BLOCK: tl.constexpr):
    # Of a view the first programs fill a block of columns of one row each, the next a block of tokens, and
    # others, of which a larger view has need, nothing. All parameters are asked for at once: one by one,
    # where they are used, they would cost as many trips to memory.
    view = parameters + tl.program_id(1) * _NUM_PARAMETERS
    table += tl.load(view + _COLUMNS_BEFORE) * num_rows
    page_tokens, kernel_page = _size(view, _PAGE), _size(view, _KERNEL_PAGE)
    max_pages, max_batch, max_tokens = (
        _size(view, _MAX_PAGES),
        _size(view, _MAX_BATCH),
        _size(view, _MAX_TOKENS),
    )
    seq_lens, starts, begins = _buffer(view, _SEQ_LENS), _buffer(view, _STARTS), _buffer(view, _BEGINS)
    indptr, indices = _buffer(view, _INDPTR), _buffer(view, _INDICES)
    block_table = _buffer(view, _BLOCK_TABLE)
    slot_mapping = tl.load(view + _SLOT_MAPPING).to(tl.pointer_type(tl.int64))
    split = page_tokens // kernel_page
    width = max_pages * split
    num_blocks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    if program < max_batch * num_blocks:
        _fill_pages(
            program // num_blocks, (program % num_blocks) * BLOCK, table, rows, batch, max_pages, width,
            kernel_page, split, seq_lens, begins, indptr, block_table, indices, BLOCK,
        )  # fmt: skip
    else:
        first_token = (program - max_batch * num_blocks).to(tl.int64) * BLOCK
        if first_token < max_tokens:
            _fill_slots(
                first_token.to(tl.int32), table, rows, batch, max_pages, max_batch, max_tokens, page_tokens,
                seq_lens, starts, slot_mapping, BLOCK,
            )  # fmt: skip


_launch_count, _launch_fill = Launch(_count, num_warps=8), Launch(_fill, num_warps=4)
# Rows a step of the one program that counts, at most. A block no larger than the batch spares 1.8 µs at 256.
_COUNT_BLOCK = 1024
_FILL_BLOCK = 512  # columns or tokens a program


class Prepared(NamedTuple):
    parameters: torch.Tensor  # [views, _NUM_PARAMETERS] int64
    num_views: int
    count_block: int
    num_programs: int  # that fill the largest view


def prepare(specs: Sequence[ViewSpec], device: torch.device) -> Prepared:
    parameters, num_programs, columns_before = [], 0, 0
    most_rows = max(spec.buffers.block_table.shape[0] for spec in specs)
    count_block = min(_COUNT_BLOCK, max(16, triton.next_power_of_2(most_rows)))
    for buffers, max_pages, page_tokens, kernel_page_tokens, window in specs:
        max_batch, width = buffers.block_table.shape
        max_tokens, max_indices = buffers.slot_mapping.shape[0], buffers.indices.shape[0]
        sizes = [columns_before, max_pages, page_tokens, kernel_page_tokens, window]
        sizes += [max_batch, max_tokens, max_indices]
        parameters.append(sizes + [buffer.data_ptr() for buffer in buffers])
        columns_before += max_pages
        of_pages = max_batch * -(-width // _FILL_BLOCK)
        num_programs = max(num_programs, of_pages + -(-max_tokens // _FILL_BLOCK))
    on_device = torch.tensor(parameters, dtype=torch.int64, device=device)
    return Prepared(on_device, len(specs), count_block, num_programs)


def refresh(
    prepared: Prepared,
    table: torch.Tensor,
    num_rows: int,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    parameters, num_views, count_block, num_programs = prepared
    batch = rows.shape[0]
    _launch_count(
        (num_views, 1, 1), parameters, rows, lengths, query_start_loc, batch, num_rows,
        constants=(count_block,),
    )  # fmt: skip
    _launch_fill(
        (num_programs, num_views, 1), parameters, table, rows, batch, num_rows, constants=(_FILL_BLOCK,)
    )
