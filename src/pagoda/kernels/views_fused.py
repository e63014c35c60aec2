"""The Triton kernels of views: one program counts, then many fill. Offsets are 64-bit."""

# Kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagoda.kernels.views_reference import ViewBuffers

__all__ = ["refresh"]

# Batch sizes and sizes of tables make no variants: what a call of any size compiled serves a capture
# of any other.
_GIVEN = ["rows", "lengths", "given_starts", "table"]


@triton.jit(
    do_not_specialize=["batch", "num_rows", "max_length", "max_batch", "max_indices", "window"],
    do_not_specialize_on_alignment=_GIVEN,
)
def _count(
    rows,
    lengths,
    given_starts,
    batch,
    num_rows,
    max_length,
    seq_lens,
    starts,
    indptr,
    last_page_len,
    begins,
    max_batch,
    max_indices,
    window,
    KERNEL_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: pages of all rows are summed, chunk after chunk.
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
        first = tl.where(is_real & (window > 0), oldest // KERNEL_PAGE, 0)
        count = (length + KERNEL_PAGE - 1) // KERNEL_PAGE - first
        fits = wanted + tl.cumsum(count, 0) <= max_indices
        kept = tl.where(fits, count, 0)
        last = tl.where((length > 0) & fits, (length + KERNEL_PAGE - 1) % KERNEL_PAGE + 1, 0)
        tl.store(seq_lens + at, length.to(tl.int32), mask=is_row)
        tl.store(begins + at, (first * KERNEL_PAGE).to(tl.int32), mask=is_row)
        tl.store(last_page_len + at, last.to(tl.int32), mask=is_row)
        tl.store(indptr + 1 + at, (listed + tl.cumsum(kept, 0)).to(tl.int32), mask=is_row)
        tl.store(starts + 1 + at, tl.where(is_given, stop, last_start), mask=is_row)
        wanted += tl.sum(count, 0)
        listed += tl.sum(kept, 0)


@triton.jit
def _fill_pages(
    at, first_column, table, rows, batch, max_pages, seq_lens, block_table, indptr, indices, begins, width,
    SPLIT: tl.constexpr, KERNEL_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = first_column + tl.arange(0, BLOCK)
    length = tl.load(seq_lens + at)
    row = tl.load(rows + at, mask=(at < batch) & (length > 0), other=0)
    first = tl.load(begins + at) // KERNEL_PAGE
    # Not (length + KERNEL_PAGE − 1), which may pass 2^31.
    end = length // KERNEL_PAGE + (length % KERNEL_PAGE > 0)
    is_read = (column >= first) & (column < end)
    page = tl.load(table + row.to(tl.int64) * max_pages + column // SPLIT, mask=is_read, other=0)
    kernel_page = tl.where(page > 0, page * SPLIT + column % SPLIT, 0)
    tl.store(block_table + at.to(tl.int64) * width + column, kernel_page, mask=column < width)
    # As many pages as there are, or none of a row that has no room.
    begin = tl.load(indptr + at)
    num_listed = tl.load(indptr + at + 1) - begin
    is_listed = (column >= first) & (column < first + num_listed)
    tl.store(indices + begin.to(tl.int64) + column - first, kernel_page, mask=is_listed)


@triton.jit
def _fill_slots(
    first_token, table, rows, max_pages, seq_lens, starts, slot_mapping, max_batch, max_tokens,
    PAGE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = first_token + tl.arange(0, BLOCK)
    # Of whom a token is: how many rows end at or before it, by bisection.
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + max_batch
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        is_behind = is_open & (tl.load(starts + 1 + middle, mask=is_open, other=0) <= token)
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
    is_owned = low < max_batch
    start = tl.load(starts + low, mask=is_owned, other=0)
    stop = tl.load(starts + low + 1, mask=is_owned, other=0)
    length = tl.load(seq_lens + low, mask=is_owned, other=0)
    is_token = is_owned & (token >= start) & (token < stop) & (length > 0)
    row = tl.load(rows + low, mask=is_token, other=0)
    position = tl.where(is_token, length - (stop - token), 0)
    page = tl.load(table + row.to(tl.int64) * max_pages + position // PAGE, mask=is_token, other=0)
    slot = tl.where(page > 0, page.to(tl.int64) * PAGE + position % PAGE, -1)
    tl.store(slot_mapping + token, slot, mask=token < max_tokens)


@triton.jit(
    do_not_specialize=["batch", "max_pages", "max_batch", "width", "max_tokens", "num_blocks"],
    do_not_specialize_on_alignment=_GIVEN,
)
def _fill(
    table,
    rows,
    batch,
    max_pages,
    seq_lens,
    starts,
    block_table,
    indptr,
    indices,
    begins,
    slot_mapping,
    max_batch,
    width,
    max_tokens,
    num_blocks,
    PAGE: tl.constexpr,
    KERNEL_PAGE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The first programs fill a block of columns of one row each, the others a block of tokens.
    program = tl.program_id(0)
    if program < max_batch * num_blocks:
        _fill_pages(
            program // num_blocks, (program % num_blocks) * BLOCK, table, rows, batch, max_pages, seq_lens,
            block_table, indptr, indices, begins, width, PAGE // KERNEL_PAGE, KERNEL_PAGE, BLOCK,
        )  # fmt: skip
    else:
        _fill_slots(
            (program - max_batch * num_blocks) * BLOCK, table, rows, max_pages, seq_lens, starts,
            slot_mapping, max_batch, max_tokens, PAGE, STEPS, BLOCK,
        )  # fmt: skip


_COUNT_BLOCK = 1024  # rows a step of the one program that counts
_FILL_BLOCK = 512  # columns or tokens a program


def refresh(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    query_start_loc: torch.Tensor,
    view: ViewBuffers,
    page_tokens: int,
    kernel_page_tokens: int,
    window: int,
) -> None:
    num_rows, max_pages = table.shape
    batch, (max_batch, width) = rows.shape[0], view.block_table.shape
    max_tokens = view.slot_mapping.shape[0]
    _count[(1,)](
        rows, lengths, query_start_loc, batch, num_rows, max_pages * page_tokens,
        view.seq_lens, view.query_start_loc, view.indptr, view.last_page_len, view.begins,
        max_batch, view.indices.shape[0], window,
        KERNEL_PAGE=kernel_page_tokens, BLOCK=_COUNT_BLOCK,
    )  # fmt: skip
    num_blocks = triton.cdiv(width, _FILL_BLOCK)
    _fill[(max_batch * num_blocks + triton.cdiv(max_tokens, _FILL_BLOCK),)](
        table, rows, batch, max_pages,
        view.seq_lens, view.query_start_loc, view.block_table, view.indptr, view.indices, view.begins,
        view.slot_mapping, max_batch, width, max_tokens, num_blocks,
        PAGE=page_tokens, KERNEL_PAGE=kernel_page_tokens,
        STEPS=max_batch.bit_length(), BLOCK=_FILL_BLOCK,
    )  # fmt: skip
