"""The reference of the operations on states, in plain torch: serves the CPU, and tests compare the kernels
with it."""

from __future__ import annotations

import torch

from pagoda.kernels._regions import Region, Regions

__all__ = ["copy_states", "fill_rows", "restore_states", "save_states"]

# Like kernels, all of them write to any tensor.


@torch.inference_mode()
def fill_rows(regions: Regions, at: int, n: int, packed: torch.Tensor | None) -> None:
    (rows,) = _section(regions.numbers if packed is None else packed, n, (at, regions.numbers.shape[0]))
    for region in regions.rows:
        region.tensor[rows] = region.value


@torch.inference_mode()
def copy_states(packed: torch.Tensor, sources: int, targets: int, n: int, regions: Regions) -> None:
    num_rows = regions.numbers.shape[0]
    read, written = _section(packed, n, (sources, num_rows), (targets, num_rows))
    for region in regions.rows:
        region.tensor[written] = region.tensor[read]


@torch.inference_mode()
def save_states(
    packed: torch.Tensor,
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,
) -> None:
    row, length, at = _pairs(packed, rows, lengths, ids, n, regions, checkpoints)
    for region, begin in zip(regions.rows, regions.offsets, strict=True):
        if begin < 0:
            continue
        position, cell = _cells(region, length)
        kept = region.tensor.view(region.tensor.shape[0], region.cells, -1)[row[:, None], cell]
        kept[position < 0] = region.value
        checkpoints[at, begin : begin + region.kept_bytes] = kept.flatten(1).view(torch.uint8)


@torch.inference_mode()
def restore_states(
    packed: torch.Tensor,
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,
) -> None:
    row, length, at = _pairs(packed, rows, lengths, ids, n, regions, checkpoints)
    for region, begin in zip(regions.rows, regions.offsets, strict=True):
        region.tensor[row] = region.value
        if not region.kept_cells or not region.row_bytes or not len(row):
            continue
        position, cell = _cells(region, length)
        if region.holds_positions:
            kept = position.to(torch.int32)
        else:
            as_bytes = checkpoints[at, begin : begin + region.kept_bytes].contiguous()
            kept = as_bytes.view(region.tensor.dtype).view(*cell.shape, -1)
        is_there = position >= 0
        cells = region.tensor.view(region.tensor.shape[0], region.cells, *kept.shape[2:])
        cells[row[:, None].expand_as(cell)[is_there], cell[is_there]] = kept[is_there]


def _section(packed: torch.Tensor, n: int, *sections: tuple[int, int]) -> list[torch.Tensor]:
    """Return sections of n ids each, given by where they begin and how many ids there are, without the places
    where one of them is outside: [kept] int64 each."""
    found = [packed[begin : begin + n].long() for begin, _ in sections]
    is_inside = torch.ones_like(found[0], dtype=torch.bool)
    for ids, (_, num_ids) in zip(found, sections, strict=True):
        is_inside &= (ids >= 0) & (ids < num_ids)
    return [ids[is_inside] for ids in found]


def _pairs(
    packed: torch.Tensor,
    rows: int,
    lengths: int,
    ids: int,
    n: int,
    regions: Regions,
    checkpoints: torch.Tensor,
) -> list[torch.Tensor]:
    num_rows = regions.numbers.shape[0]
    return _section(packed, n, (rows, num_rows), (lengths, 2**31), (ids, checkpoints.shape[0]))


def _cells(region: Region, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions that a checkpoint keeps, and the cells that they are in: [n, kept] each."""
    position = length[:, None] - region.kept_cells + torch.arange(region.kept_cells, device=length.device)
    return position, position % region.cells
