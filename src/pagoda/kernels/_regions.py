"""Rows of many tensors that are moved together. In: tensors and what is known about them; out: what the
operations on states take.

A region is one tensor, [num_rows, ...]. Row r of all regions is one state; a checkpoint is a copy of what it
needs of a state, in one run of bytes. Only this module knows where each region is in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

__all__ = ["BLOCK", "COLUMNS", "Region", "Regions"]

BLOCK = 2048  # elements per tile
# Kernels move elements of 8, 4 or 1 bytes: 8 where everything is aligned to 16, so that they load 16 at once.
_ELEMENT_BYTES = {16: 8, 4: 4, 1: 1}
COLUMNS = 10  # of `Regions.table`
CHECKPOINT_ALIGN = 16  # bytes


class Region(NamedTuple):
    """A contiguous tensor, [num_rows, ...], and the value that fills it when a request begins.

    `kept` is what a checkpoint keeps of a row: all of it (None), or the last `kept` cells before its length.
    Cells are the first dimension of a row, a ring: the token at position p is in cell p % cells. With
    `holds_positions`, cells are int32 positions, which follow from the length and take no bytes.
    """

    tensor: torch.Tensor
    value: float
    kept: int | None = None
    holds_positions: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()

    @property
    def cells(self) -> int:
        """Cells of a row; a row of which all or nothing is kept is one cell."""
        return self.tensor.shape[1] if self.kept else 1

    @property
    def kept_cells(self) -> int:
        """Cells of a row that a checkpoint keeps."""
        return 1 if self.kept is None else self.kept

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell."""
        return self.row_bytes // self.cells

    @property
    def kept_bytes(self) -> int:
        """Bytes of a row in a checkpoint."""
        return 0 if self.holds_positions else self.kept_cells * self.cell_bytes


class Regions(NamedTuple):
    """Tensors that never move, on one device, all with the same number of rows.

    `offsets` says where the kept cells of each region begin in a checkpoint: in the order of their positions.
    `table` has one row per tile, which is BLOCK elements of one region, as int64:

        address of the tensor, bytes of a row, its value as 8 bytes, the tile's first element, bytes of an
        element, bytes of a cell, cells, kept cells, offset in a checkpoint (−1: nothing is there), and
        whether the cells are positions
    """

    rows: Sequence[Region]
    offsets: Sequence[int]
    checkpoint_bytes: int  # of all regions, rounded up to CHECKPOINT_ALIGN
    table: torch.Tensor  # [tiles, COLUMNS] int64
    begins: Sequence[int]  # [regions + 1]: the first tile of each
    numbers: torch.Tensor  # [num_rows] int32: 0, 1, 2, …; names rows that are known on the host

    @staticmethod
    def of(rows: Iterable[Region | tuple[torch.Tensor, float]], device: torch.device) -> Regions:
        """Return the regions of tensors that never move. Costs two copies to the device."""
        regions = [Region(*row) for row in rows]
        offsets, num_bytes = _offsets(regions)
        table: list[tuple[int, ...]] = []
        begins = [0]
        for region, offset in zip(regions, offsets, strict=True):
            table += _tiles(region, offset)
            begins.append(len(table))
        num_rows = min((region.tensor.shape[0] for region in regions), default=0)
        with torch.inference_mode(False):  # used outside of inference_mode even if made under it
            on_device = torch.tensor(table, dtype=torch.int64, device=device).view(-1, COLUMNS)
            numbers = torch.arange(num_rows, dtype=torch.int32, device=device)
        rounded = -(-num_bytes // CHECKPOINT_ALIGN) * CHECKPOINT_ALIGN
        return Regions(regions, offsets, rounded, on_device, begins, numbers)

    def some(self, begin: int, end: int) -> Regions:
        """Return tensors [begin, end) alone, as views: nothing is copied to the device."""
        end = max(begin, end)
        first, last = self.begins[begin], self.begins[end]
        return self._replace(
            rows=self.rows[begin:end],
            offsets=self.offsets[begin:end],
            table=self.table[first:last],
            begins=[at - first for at in self.begins[begin : end + 1]],
        )


def _offsets(regions: Sequence[Region]) -> tuple[list[int], int]:
    """Return where the bytes of each region begin in a checkpoint, −1 if it has none, and their sum.

    Regions of 16 n bytes come first and so on, so that each is as aligned as its size, without padding.
    """
    offsets, end = [-1] * len(regions), 0
    for at in sorted(range(len(regions)), key=lambda at: -math.gcd(regions[at].kept_bytes, 16)):
        if regions[at].kept_bytes:
            offsets[at] = end
            end += regions[at].kept_bytes
    return offsets, end


def _tiles(region: Region, offset: int) -> list[tuple[int, ...]]:
    sizes = [region.tensor.data_ptr(), region.row_bytes]
    if region.kept_bytes:
        sizes += [region.cell_bytes, offset]
    align = math.gcd(*sizes, 16)
    element = 4 if region.holds_positions else next(n for a, n in _ELEMENT_BYTES.items() if align % a == 0)
    value = _as_integer(region.value, region.tensor.dtype)
    address, size, cell = region.tensor.data_ptr(), region.row_bytes, region.cell_bytes
    kept = region.cells, region.kept_cells, offset, region.holds_positions
    return [(address, size, value, first, element, cell, *kept) for first in range(0, size // element, BLOCK)]


def _as_integer(value: float, dtype: torch.dtype) -> int:
    """Return the bytes of a value, repeated to eight."""
    return int(torch.full((8 // dtype.itemsize,), value, dtype=dtype, device="cpu").view(torch.int64))
