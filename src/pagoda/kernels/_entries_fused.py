"""The Triton kernels of `entries`: a program stores or gathers a few entries, all their numbers together.

One kernel writes to rings or pages; one kernel serves all reads. Offsets are 64-bit.
"""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from pagoda.kernels import _casts_fused
from pagoda.kernels._casts_fused import readable
from pagoda.kernels._codec_fused import Stored, as_read, load_entries, put, store_at, take
from pagoda.kernels._tokens_fused import is_last, row_of, rows_and_stride, tokens_of, tokens_together

if TYPE_CHECKING:
    from pagoda.kernels.entries import Codec, Ring, Tokens

__all__ = [
    "gather_all",
    "gather_chosen",
    "gather_chunk",
    "gather_windows",
    "store_entries",
    "store_window",
]


@triton.jit
def _place_of(row, entry, table, columns, num_pages, C: tl.constexpr):
    """Return the page of each row's entry, its index in the page, and whether it has a page."""
    number = entry.to(tl.uint32)  # unsigned division takes fewer instructions
    column = (number // C.entries_per_page).to(tl.int32)
    is_there = (row > 0) & (entry >= 0) & (column < columns)
    page = tl.load(table + row * columns + column, mask=is_there, other=0)
    return page, (number % C.entries_per_page).to(tl.int32), is_there & (page > 0) & (page < num_pages)


@triton.jit
def _store_ends(
    token, is_end, request, position, rows, values, stride, table, pages, scales, ropes, batch, num_rows,
    columns, num_pages, RATIO: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write the entries of tokens that end a block."""
    # The numbers load while the place is looked up.
    x = take(token, is_end, values, stride, C)
    row = row_of(tl.where(is_end, request, -1), rows, batch, num_rows)
    entry = (position.to(tl.uint32) // RATIO).to(tl.int32)
    page, at, is_written = _place_of(row, entry, table, columns, num_pages, C)
    store_at(page, at, is_written, x, pages, scales, ropes, C)


# Sizes of batches and pools make no variants: once one call has compiled the kernel, others can be captured.
@triton.jit(
    do_not_specialize=["num_tokens", "group", "batch", "num_rows", "columns", "num_pages"],
    do_not_specialize_on_alignment=["rows", "request_ids", "positions", "table", "scales", "ring_positions"],
)
def _store(
    rows, request_ids, positions, values, stride, table, pages, scales, ropes, ring_positions,
    num_tokens, group, batch, num_rows, columns, num_pages,
    RATIO: tl.constexpr, RING: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # Into rings where RING > 0, else into pages at the ends of blocks of RATIO tokens.
    ROWS: tl.constexpr = C.rows
    first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * group
    is_first = first < num_tokens
    request = tl.load(request_ids + first, mask=is_first, other=-1)
    position = tl.load(positions + first, mask=is_first, other=-1).to(tl.int32)
    if RING > 0:
        row = tl.where(position >= 0, row_of(request, rows, batch, num_rows), 0)
        is_written = (row > 0) & is_last(first, request, position, request_ids, positions, num_tokens, RING)
        page = row * RING + position % RING
        tl.store(ring_positions + page, position, mask=is_written)
        x = take(first, is_written, values, stride, C)
        store_at(page, tl.zeros((ROWS,), tl.int32), is_written, x, pages, scales, ropes, C)
    else:
        # If all tokens of a group (at most RATIO) are of one request, at most one ends a block, and its place
        # is known: so a program writes C.rows entries. Tokens of mixed groups are handled one by one.
        last = first + group - 1
        last_request = tl.load(request_ids + last, mask=last < num_tokens, other=-1)
        last_position = tl.load(positions + last, mask=last < num_tokens, other=-1).to(tl.int32)
        is_run = (request >= 0) & (position >= 0)  # padding may be at both ends
        is_run = is_run & (last_request == request) & (last_position == position + group - 1)
        at = RATIO - 1 - (position.to(tl.uint32) % RATIO).to(tl.int32)
        _store_ends(
            first + at, is_run & (at < group), request, position + at, rows, values, stride, table, pages,
            scales, ropes, batch, num_rows, columns, num_pages, RATIO, C,
        )  # fmt: skip
        is_mixed = is_first & (is_run == 0) & (first != last)  # a single token is a run or padding
        for number in range(tl.where(tl.max(is_mixed.to(tl.int32), 0) > 0, group, 0)):
            token = first + number
            is_token = is_mixed & (token < num_tokens)
            request = tl.load(request_ids + token, mask=is_token, other=-1)
            position = tl.load(positions + token, mask=is_token, other=-1).to(tl.int32)
            is_end = (position >= 0) & (position % RATIO == RATIO - 1)
            _store_ends(
                token, is_end, request, position, rows, values, stride, table, pages, scales, ropes, batch,
                num_rows, columns, num_pages, RATIO, C,
            )  # fmt: skip


# What a gather reads.
_CHOSEN = tl.constexpr(0)
_ALL = tl.constexpr(1)
_WINDOWS = tl.constexpr(2)
_CHUNK = tl.constexpr(3)


@triton.jit
def _ring_place(row, position, is_wanted, ring_positions, RING: tl.constexpr):
    """Return the ring cell of each position, and whether the ring still has that position."""
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
    WINDOW: tl.constexpr, SCAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # A program fills tiles × C.rows outputs of one token or of one request, `whose`.
    ROWS: tl.constexpr = C.rows
    BLOCKS: tl.constexpr = C.blocks
    BLOCK: tl.constexpr = C.block
    whose = tl.program_id(0) // num_chunks
    chunk_at = tl.program_id(0) % num_chunks
    is_first = chunk_at == 0
    if WHAT == _CHOSEN or WHAT == _WINDOWS:  # noqa: SIM109 (Triton has no `in`)
        position = tl.load(positions + whose).to(tl.int32)
        row = tl.where(position >= 0, row_of(tl.load(request_ids + whose), rows, batch, num_rows), 0)
    else:
        first, number, length = tokens_of(whose, request_ids, positions, num_tokens, SCAN)
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
            page, in_page, is_read = _place_of(of, entry, table, columns, num_pages, C)
            tl.store(mask_out + to, is_read.to(tl.uint8), mask=is_at)
        elif WHAT == _ALL:
            of = tl.where(is_at & (at < visible), row, 0)
            page, in_page, is_read = _place_of(of, at, table, columns, num_pages, C)
        elif WHAT == _WINDOWS:
            wanted = position + 1 - visible + at
            page, is_read = _ring_place(row, wanted, at < visible, ring_positions, RING)
            in_page = tl.zeros((ROWS,), tl.int32)
        if WHAT == _CHUNK:
            x = tl.zeros((ROWS, BLOCKS, BLOCK), tl.float32)
            if begin < before:
                page, is_read = _ring_place(row, start - before + at, at < before, ring_positions, RING)
                x = load_entries(page, tl.zeros((ROWS,), tl.int32), is_read, pages, scales, ropes, C)
            if begin + ROWS > before:
                in_chunk = at - before
                is_new = (in_chunk >= 0) & (in_chunk < number)
                new = take(first + in_chunk, is_new, chunk, stride, C)
                new = as_read(new, pages, ropes, C)
                x = tl.where(is_new[:, None, None], new, x)
        else:
            x = load_entries(page, in_page, is_read, pages, scales, ropes, C)
        put(to, is_at, x, out, C)


_PROGRAM_NUMBERS, _SEARCH_NUMBERS = 4096, 8192  # numbers per program
_STORE_WARPS, _GATHER_WARPS = 1, 4  # one warp: one small entry per thread, each looked up once
_SCAN = 1024  # tokens of a batch that a program scans at a time
_MANY_TILES, _MOST_TILES = 2048, 8
_MOST_TOGETHER = 8


def _launch_store(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,
    table: torch.Tensor,
    stored: Stored,
    ring_positions: torch.Tensor,
    num_rows: int,
    ratio: int,
    ring: int,
) -> None:
    num_tokens = tokens.positions.shape[0]
    if num_tokens == 0:
        return
    spelled = _casts_fused.is_spelled(values.device)
    constants = stored.constants(codec, spelled, _PROGRAM_NUMBERS)
    given, stride = rows_and_stride(values)
    group = 1 if ring else tokens_together(tokens, min(ratio, _MOST_TOGETHER))
    _store[(triton.cdiv(num_tokens, constants.rows * group),)](
        tokens.rows, tokens.request_ids, tokens.positions, readable(given, spelled), stride, table,
        *stored.typed(codec, spelled), ring_positions, num_tokens, group, tokens.rows.shape[0], num_rows,
        table.shape[1], stored.data.shape[0], RATIO=ratio, RING=ring, C=constants,
        num_warps=_STORE_WARPS,
    )  # fmt: skip


def store_window(codec: Codec, tokens: Tokens, values: torch.Tensor, ring: Ring) -> None:
    num_rows, size = ring.positions.shape
    _launch_store(
        codec,
        tokens,
        values,
        ring.positions,
        Stored.in_ring(ring),
        ring.positions,
        num_rows,
        ratio=1,
        ring=size,
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
    stored = Stored.in_pages(codec, pages, entries_per_page)
    _launch_store(codec, tokens, values, table, stored, table, table.shape[0], ratio=ratio, ring=0)


def _launch_gather(
    codec: Codec,
    tokens: Tokens,
    what: Any,
    out: torch.Tensor,  # [tokens or requests, width, dim]
    stored: Stored,
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
    spelled = _casts_fused.is_spelled(out.device)
    # Where programs search the batch for a request's tokens, larger programs search less often.
    is_search = what in (_ALL, _CHUNK) and tokens.positions.shape[0] > number
    constants = stored.constants(codec, spelled, _SEARCH_NUMBERS if is_search else _PROGRAM_NUMBERS)
    num_tiles = triton.cdiv(width, constants.rows)
    tiles = max(1, min(number * num_tiles // _MANY_TILES, _MOST_TILES)) if is_search else 1
    num_chunks = max(1, triton.cdiv(num_tiles, tiles))
    given, stride = (out, 0) if chunk is None else rows_and_stride(chunk)
    _gather[(number * num_chunks,)](
        tokens.rows, tokens.request_ids, tokens.positions, table if chosen is None else chosen, table,
        *stored.typed(codec, spelled), table, readable(given, spelled), stride,
        readable(out, spelled), stored.data if mask is None else mask.view(torch.uint8),
        tokens.rows if lens is None else lens, tokens.positions.shape[0], tokens.rows.shape[0], num_rows,
        table.shape[1], stored.data.shape[0], width, num_chunks, tiles, WHAT=what.value, IS_SEARCH=is_search,
        RATIO=ratio, RING=ring, WINDOW=window, SCAN=_SCAN, C=constants, num_warps=_GATHER_WARPS,
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
    stored = Stored.in_pages(codec, pages, entries_per_page)
    _launch_gather(
        codec,
        tokens,
        _CHOSEN,
        out,
        stored,
        table.shape[0],
        table=table,
        chosen=chosen,
        mask=mask,
        ratio=ratio,
    )


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
        Stored.in_pages(codec, pages, entries_per_page),
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
        codec, tokens, _WINDOWS, out, Stored.in_ring(ring), ring.positions.shape[0], table=ring.positions,
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
        codec, tokens, _CHUNK, out, Stored.in_ring(ring), ring.positions.shape[0], table=ring.positions,
        chunk=chunk, lens=lens, ring=ring.positions.shape[1], window=window,
    )  # fmt: skip
