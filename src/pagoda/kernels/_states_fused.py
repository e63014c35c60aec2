"""The Triton kernels of states: rows of many tensors are filled, copied, saved and restored.

A program moves one tile of one row, see `Regions`; the tiles of a row are adjacent in the grid, so that
programs that run together touch adjacent memory. Offsets are 64-bit.

The kept cells of a ring are one run of bytes in a checkpoint and two runs in a row::

    row         | last kept … |  not kept  | first kept … |        cells 0 … cells − 1
                              ▲ tail       ▲ head
    checkpoint  | first kept … | … last kept |                     positions length − kept … length − 1

Elements [head, …) of the row are the beginning of the run, elements [0, tail) its end. If the request is
shorter than what is kept, elements [head, …) would have positions below 0: they are the reset value. A row
that is kept as a whole is a ring of one cell: head is 0, and so is tail.
"""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagoda.kernels._launch import Launch
from pagoda.kernels._regions import BLOCK, COLUMNS, Regions

__all__ = ["copy_states", "fill_rows", "restore_states", "save_states"]

# The columns of `Regions.table`.
_ADDRESS = tl.constexpr(0)
_ROW_BYTES = tl.constexpr(1)
_VALUE = tl.constexpr(2)
_FIRST = tl.constexpr(3)
_ELEMENT_BYTES = tl.constexpr(4)
_CELL_BYTES = tl.constexpr(5)
_CELLS = tl.constexpr(6)
_KEPT = tl.constexpr(7)
_OFFSET = tl.constexpr(8)
_IS_POSITIONS = tl.constexpr(9)
_NUM_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _place(table, num_tiles):
    """Return the tile of a program, and the number of its pair."""
    tile = table + (tl.program_id(0) % num_tiles).to(tl.int64) * _NUM_COLUMNS
    return tile, tl.program_id(0) // num_tiles


@triton.jit
def _row_of(tile, row, ELEMENT: tl.constexpr, ALIGN: tl.constexpr):
    """Return a pointer to the first element of a tile's row."""
    at = tl.load(tile + _ADDRESS) + row.to(tl.int64) * tl.load(tile + _ROW_BYTES)
    return tl.multiple_of(at.to(tl.pointer_type(ELEMENT)), ALIGN)


@triton.jit
def _elements(tile, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tile's elements in its row, and which of them exist. UNIT and ALIGN are bytes."""
    at = tl.multiple_of(tl.load(tile + _FIRST), BLOCK) + tl.arange(0, BLOCK)
    return at, at < tl.multiple_of(tl.load(tile + _ROW_BYTES) // UNIT, ALIGN // UNIT)


@triton.jit
def _value(tile, at, ELEMENT: tl.constexpr, UNIT: tl.constexpr):
    """Return the reset value of elements: eight bytes, over and over."""
    return (tl.load(tile + _VALUE) >> (8 * UNIT * (at % (8 // UNIT)))).to(ELEMENT)


@triton.jit
def _fill_tile(
    tile, row, ELEMENT: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    at, is_in = _elements(tile, UNIT, ALIGN, BLOCK)
    tl.store(_row_of(tile, row, ELEMENT, ALIGN) + at, _value(tile, at, ELEMENT, UNIT), mask=is_in)


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "rows"], do_not_specialize_on_alignment=["table", "packed"]
)
def _fill_rows(table, num_tiles, num_rows, packed, rows, BLOCK: tl.constexpr):
    tile, pair = _place(table, num_tiles)
    row = tl.load(packed + rows + pair)
    unit = tl.load(tile + _ELEMENT_BYTES)
    if (row >= 0) & (row < num_rows):
        if unit == 8:
            _fill_tile(tile, row, tl.int64, 8, 16, BLOCK)
        elif unit == 4:
            _fill_tile(tile, row, tl.int32, 4, 4, BLOCK)
        else:
            _fill_tile(tile, row, tl.uint8, 1, 1, BLOCK)


@triton.jit
def _copy_tile(
    tile, source, target, ELEMENT: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    at, is_in = _elements(tile, UNIT, ALIGN, BLOCK)
    moved = tl.load(_row_of(tile, source, ELEMENT, ALIGN) + at, mask=is_in)
    tl.store(_row_of(tile, target, ELEMENT, ALIGN) + at, moved, mask=is_in)


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "sources", "targets"],
    do_not_specialize_on_alignment=["table", "packed"],
)
def _copy_states(table, num_tiles, num_rows, packed, sources, targets, BLOCK: tl.constexpr):
    tile, pair = _place(table, num_tiles)
    source, target = tl.load(packed + sources + pair), tl.load(packed + targets + pair)
    unit = tl.load(tile + _ELEMENT_BYTES)
    if (source >= 0) & (source < num_rows) & (target >= 0) & (target < num_rows):
        if unit == 8:
            _copy_tile(tile, source, target, tl.int64, 8, 16, BLOCK)
        elif unit == 4:
            _copy_tile(tile, source, target, tl.int32, 4, 4, BLOCK)
        else:
            _copy_tile(tile, source, target, tl.uint8, 1, 1, BLOCK)


@triton.jit
def _runs(tile, length, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Return where the kept elements of a row are, as in the drawing: head and where its elements end, with
    those of positions below 0 and without them, tail, and how many elements the row has."""
    cell = tl.load(tile + _CELL_BYTES) // UNIT
    cells, kept = tl.load(tile + _CELLS), tl.load(tile + _KEPT)
    whole = tl.multiple_of(cells * cell, ALIGN // UNIT)
    # Below 2^32, and a remainder of 64 bits takes several times as long.
    first = (length + cells - kept).to(tl.uint32) % cells.to(tl.uint32)
    head = tl.multiple_of(first.to(tl.int64) * cell, ALIGN // UNIT)
    end = tl.multiple_of(head + kept * cell, ALIGN // UNIT)
    real_end = tl.multiple_of(tl.where(length >= kept, end, head), ALIGN // UNIT)
    return head, end, real_end, tl.multiple_of(end - whole, ALIGN // UNIT), whole


@triton.jit
def _run_of(tile, checkpoint, skipped, ELEMENT: tl.constexpr, ALIGN: tl.constexpr):
    """Return a pointer into a checkpoint, to which elements of the row are added: `skipped` of them before
    the run begins."""
    begin = (checkpoint + tl.load(tile + _OFFSET)).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(begin - skipped, ALIGN)


@triton.jit
def _save_tile(
    tile, row, length, checkpoint, ELEMENT: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, is_in = _elements(tile, UNIT, ALIGN, BLOCK)
    head, end, real_end, tail, whole = _runs(tile, length, UNIT, ALIGN)
    is_head, is_tail = is_in & (at >= head) & (at < end), at < tail
    is_there = is_tail | (is_in & (at >= head) & (at < real_end))
    state = _row_of(tile, row, ELEMENT, ALIGN)
    moved = tl.load(state + at, mask=is_there, other=_value(tile, at, ELEMENT, UNIT))
    tl.store(_run_of(tile, checkpoint, head, ELEMENT, ALIGN) + at, moved, mask=is_head)
    tl.store(_run_of(tile, checkpoint, head - whole, ELEMENT, ALIGN) + at, moved, mask=is_tail)


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "rows", "lengths", "ids", "num_checkpoints", "stride"],
    do_not_specialize_on_alignment=["table", "packed", "checkpoints"],
)
def _save_states(
    table, num_tiles, num_rows, packed, rows, lengths, ids, checkpoints, num_checkpoints, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile, pair = _place(table, num_tiles)
    row, length = tl.load(packed + rows + pair), tl.load(packed + lengths + pair)
    checkpoint_id = tl.load(packed + ids + pair)
    unit, offset = tl.load(tile + _ELEMENT_BYTES), tl.load(tile + _OFFSET)
    is_pair = (row >= 0) & (row < num_rows) & (checkpoint_id >= 0) & (checkpoint_id < num_checkpoints)
    checkpoint = checkpoints + checkpoint_id.to(tl.int64) * stride * 16
    if is_pair & (offset >= 0):
        if unit == 8:
            _save_tile(tile, row, length, checkpoint, tl.int64, 8, 16, BLOCK)
        elif unit == 4:
            _save_tile(tile, row, length, checkpoint, tl.int32, 4, 4, BLOCK)
        else:
            _save_tile(tile, row, length, checkpoint, tl.uint8, 1, 1, BLOCK)


@triton.jit
def _restore_tile(
    tile, row, length, checkpoint, ELEMENT: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, is_in = _elements(tile, UNIT, ALIGN, BLOCK)
    head, _, real_end, tail, whole = _runs(tile, length, UNIT, ALIGN)
    is_head, is_tail = is_in & (at >= head) & (at < real_end), at < tail
    value = _value(tile, at, ELEMENT, UNIT)
    first = tl.load(_run_of(tile, checkpoint, head, ELEMENT, ALIGN) + at, mask=is_head, other=value)
    last = tl.load(_run_of(tile, checkpoint, head - whole, ELEMENT, ALIGN) + at, mask=is_tail, other=value)
    tl.store(_row_of(tile, row, ELEMENT, ALIGN) + at, tl.where(is_tail, last, first), mask=is_in)


@triton.jit
def _restore_positions(tile, row, length, BLOCK: tl.constexpr):
    at, is_in = _elements(tile, 4, 4, BLOCK)
    head, _, real_end, tail, whole = _runs(tile, length, 4, 4)
    is_tail = at < tail
    is_kept = is_tail | ((at >= head) & (at < real_end))
    position = length - tl.load(tile + _KEPT) + at - head + tl.where(is_tail, whole, 0)
    value = tl.where(is_kept, position, tl.load(tile + _VALUE)).to(tl.int32)
    tl.store(_row_of(tile, row, tl.int32, 4) + at, value, mask=is_in)


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows", "rows", "lengths", "ids", "num_checkpoints", "stride"],
    do_not_specialize_on_alignment=["table", "packed", "checkpoints"],
)
def _restore_states(
    table, num_tiles, num_rows, packed, rows, lengths, ids, checkpoints, num_checkpoints, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile, pair = _place(table, num_tiles)
    row, length = tl.load(packed + rows + pair), tl.load(packed + lengths + pair)
    checkpoint_id = tl.load(packed + ids + pair)
    unit = tl.load(tile + _ELEMENT_BYTES)
    is_positions = tl.load(tile + _IS_POSITIONS)
    is_pair = (row >= 0) & (row < num_rows) & (checkpoint_id >= 0) & (checkpoint_id < num_checkpoints)
    checkpoint = checkpoints + checkpoint_id.to(tl.int64) * stride * 16
    if is_pair:
        if is_positions != 0:
            _restore_positions(tile, row, length, BLOCK)
        elif unit == 8:
            _restore_tile(tile, row, length, checkpoint, tl.int64, 8, 16, BLOCK)
        elif unit == 4:
            _restore_tile(tile, row, length, checkpoint, tl.int32, 4, 4, BLOCK)
        else:
            _restore_tile(tile, row, length, checkpoint, tl.uint8, 1, 1, BLOCK)


_WARPS = 8
_launch_fill = Launch(_fill_rows, num_warps=_WARPS)
_launch_copy = Launch(_copy_states, num_warps=_WARPS)
_launch_save = Launch(_save_states, num_warps=_WARPS)
_launch_restore = Launch(_restore_states, num_warps=_WARPS)


def _launch(launch: Launch, regions: Regions, n: int, *args: object) -> None:
    num_tiles, num_rows = regions.table.shape[0], regions.numbers.shape[0]
    if n and num_tiles:
        launch((n * num_tiles, 1, 1), regions.table, num_tiles, num_rows, *args, constants=(BLOCK,))


def fill_rows(regions: Regions, at: int, n: int, packed: torch.Tensor | None) -> None:
    _launch(_launch_fill, regions, n, regions.numbers if packed is None else packed, at)


def copy_states(packed: torch.Tensor, sources: int, targets: int, n: int, regions: Regions) -> None:
    _launch(_launch_copy, regions, n, packed, sources, targets)


def save_states(
    packed: torch.Tensor,
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,
) -> None:
    _launch(_launch_save, regions, n, packed, rows, lengths, ids, *_sized(checkpoints))


def restore_states(
    packed: torch.Tensor,
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,
) -> None:
    _launch(_launch_restore, regions, n, packed, rows, lengths, ids, *_sized(checkpoints))


def _sized(checkpoints: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return a pool of checkpoints as kernels take it: its stride is in units of 16 bytes, below 2^31."""
    return checkpoints, checkpoints.shape[0], checkpoints.shape[1] // 16
