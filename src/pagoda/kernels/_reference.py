"""The reference of the kernels, in plain torch: serves the CPU, and tests compare the kernels with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = [
    "FP8_DTYPES",
    "cast",
    "copy_pages",
    "pack",
    "set_table",
    "store",
    "unpack",
    "write_table",
]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def cast(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return values as a pool of `dtype` stores them.

    For fp8 they are divided by the scale in float32 and saturate at the largest finite number, where torch's
    own cast would give NaN or infinity. NaN stays NaN. float64 goes through float32, as in torch.
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
    # All reads come before any write: keys and values may be views of the pools themselves.
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
    """Return a pool, and the kept tokens of a source as the pool stores them, in the same shape.

    fp8 comes as bytes, because torch cannot index fp8 everywhere."""
    flat = pool.view(pool.shape[0], -1)
    rows = source.detach().reshape(-1, flat.shape[1])
    rows = cast(rows if kept is None else rows[kept], pool.dtype, scale)
    return (flat.view(torch.uint8), rows.view(torch.uint8)) if pool.dtype in FP8_DTYPES else (flat, rows)


def _columns(buffers: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield each buffer with the range of its bytes in a packed page."""
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


def write_table(packed: torch.Tensor, places: int, values: int, num_writes: int, table: torch.Tensor) -> None:
    at, ids = packed[places : places + num_writes], packed[values : values + num_writes]
    kept = (at >= 0) & (at < table.shape[0])
    table[at[kept].long()] = ids[kept]


def set_table(table: torch.Tensor, at: int, value: int, lens: torch.Tensor, row: int, length: int) -> None:
    table[at] = value
    lens[row] = length
