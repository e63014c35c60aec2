"""What every kernel must do, in plain torch. Serves the CPU and judges `fused`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["cast", "pack", "store", "unpack"]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def cast(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values as a pool of `dtype` stores them.

    fp8: divided by the scale in float32 and saturated at the largest finite value, where torch's
    own cast gives NaN or infinity. NaN stays NaN. float64 goes through float32, as torch does it.
    """
    if dtype in FP8:
        top = torch.finfo(dtype).max
        return (values.to(torch.float32) / scale).clamp(-top, top).to(dtype)
    if values.dtype == torch.float64 and dtype != torch.float64:
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
    kept: torch.Tensor | None = (slots >= 0) & (slots < k_pool.shape[0])
    assert kept is not None
    if bool(kept.all()):
        kept = None
    where = (slots if kept is None else slots[kept]).long()
    for source, pool, scale in ((keys, k_pool, k_scale), (values, v_pool, v_scale)):
        if source is None or pool is None:
            continue
        rows = source.detach().reshape(slots.shape[0], pool.shape[1] * pool.shape[2])
        rows = cast(rows if kept is None else rows[kept], pool.dtype, scale)
        flat = pool.view(pool.shape[0], -1)
        if pool.dtype in FP8:  # index_put knows no fp8
            flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
        flat[where] = rows


def pack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, out: torch.Tensor
) -> None:
    begin = 0
    for pages in buffers:
        end = begin + pages.shape[1]
        out[:, begin:end] = pages[page_ids.long()]
        begin = end


def unpack(
    page_ids: torch.Tensor, buffers: Sequence[torch.Tensor], addresses: torch.Tensor, packed: torch.Tensor
) -> None:
    begin = 0
    for pages in buffers:
        end = begin + pages.shape[1]
        pages[page_ids.long()] = packed[:, begin:end]
        begin = end
