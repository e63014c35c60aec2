"""What every kernel must do, in plain torch. Serves the CPU and judges `fused`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pagoda.kernels._regions import Regions

__all__ = [
    "FP8_DTYPES",
    "cast",
    "copy_pages",
    "fill_rows",
    "pack",
    "set_table",
    "store",
    "unpack",
    "write_table",
]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def cast(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values as a pool of `dtype` stores them.

    fp8: divided by the scale in float32 and saturated at the largest finite value, where torch's
    own cast gives NaN or infinity. NaN stays NaN. float64 goes through float32, as torch does it.
    """
    if dtype in FP8_DTYPES:
        top = torch.finfo(dtype).max
        return (values.to(torch.float32) / scale).clamp(-top, top).to(dtype)
    if values.dtype == torch.float64:
        values = values.to(torch.float32)
    return values.to(dtype)


def store(
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    kept = (slots >= 0) & (slots < k_pool.shape[0])
    all_kept = bool(kept.all())
    where = (slots if all_kept else slots[kept]).long()
    # Everything is read before anything is written: rows may be views of the pools themselves.
    sides = [(keys, k_pool, k_scale)]
    if values is not None and v_pool is not None:
        sides.append((values, v_pool, v_scale))
    written = {pool.untyped_storage().data_ptr() for _, pool, _ in sides}
    writes = []
    for source, pool, scale in sides:
        flat, rows = _rows_of(source, pool, None if all_kept else kept, scale)
        writes.append((flat, rows.clone() if rows.untyped_storage().data_ptr() in written else rows))
    for pool, rows in writes:
        pool.index_copy_(0, where, rows)


def _rows_of(
    source: torch.Tensor, pool: torch.Tensor, kept: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool and the kept rows of a source as it stores them, alike in shape; fp8 as bytes, because indexing
    knows none."""
    flat = pool.view(pool.shape[0], -1)
    rows = source.detach().reshape(-1, flat.shape[1])
    rows = cast(rows if kept is None else rows[kept], pool.dtype, scale)
    return (flat.view(torch.uint8), rows.view(torch.uint8)) if pool.dtype in FP8_DTYPES else (flat, rows)


def _columns(buffers: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Each buffer, and which bytes of a packed page are its."""
    begin = 0
    for pages in buffers:
        end = begin + pages.shape[1]
        yield pages, slice(begin, end)
        begin = end


def pack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, out: torch.Tensor
) -> None:
    for pages, columns in _columns(buffers):
        out[:, columns] = pages[page_ids.long()]


def unpack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, packed: torch.Tensor
) -> None:
    for pages, columns in _columns(buffers):
        pages[page_ids.long()] = packed[:, columns]


def copy_pages(
    source: torch.Tensor, target: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor
) -> None:
    num_pages = buffers[0].shape[0]
    kept = (source >= 0) & (source < num_pages) & (target >= 0) & (target < num_pages)
    read, written = source[kept].long(), target[kept].long()
    for pages in buffers:
        pages[written] = pages[read]


def write_table(packed: torch.Tensor, num_writes: int, table: torch.Tensor) -> None:
    index, values = packed[: 2 * num_writes].view(2, num_writes)
    kept = (index >= 0) & (index < table.shape[0])
    table[index[kept].long()] = values[kept]


@torch.inference_mode()  # as a kernel does, it writes to any tensor
def fill_rows(regions: Regions, row: int) -> None:
    for tensor, value in regions.rows:
        tensor[row].fill_(value)


def set_table(table: torch.Tensor, at: int, value: int, other_at: int, other: int) -> None:
    table[at] = value
    table[other_at] = other
