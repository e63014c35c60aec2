"""Storing K and V into a paged pool on the GPU, against a device copy of equal bytes in the same run."""

from __future__ import annotations

from typing import Any

import torch

from bench.measure import graph_microseconds, save, table
from pagoda import TokenPool

PAGE_SIZE = 16


def slots_of(pool: TokenPool, order: str, n: int, sets: int) -> list[torch.Tensor]:
    """Return n slots per set, no slot in two sets, without the padding page."""
    if order == "consecutive":
        every = torch.arange(PAGE_SIZE, pool.num_slots)
    elif order == "shuffled pages":
        pages = 1 + torch.randperm(pool.num_pages)
        every = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    else:
        every = PAGE_SIZE + torch.randperm(pool.num_slots - PAGE_SIZE)
    return [every[i * n : (i + 1) * n].to("cuda", torch.int32) for i in range(sets)]


def measure(
    n: int, dtype: torch.dtype, order: str, heads: int = 8, dim: int = 128, has_values: bool = True
) -> dict[str, Any]:
    # Sets rotate, so that together they are far larger than the L2 cache.
    sets = max(2, 65_536 // n) if n < 65_536 else 2
    sets = min(sets, 128)
    shape, sides = (heads, dim), 2 if has_values else 1
    is_fp8 = dtype == torch.float8_e4m3fn
    scale = [0.37] if is_fp8 else None
    num_pages = 2 * n * sets // PAGE_SIZE + 8
    pool = TokenPool(
        num_pages,
        PAGE_SIZE,
        1,
        shape,
        shape if has_values else None,
        dtype,
        "cuda",
        k_scale=scale,
        v_scale=scale,
    )
    keys, values = (
        [torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        for _ in range(2)
    )
    slots = slots_of(pool, order, n, sets)
    moved = n * heads * dim * sides * (2 + pool.dtype.itemsize)  # bytes read and written
    source = [torch.randint(0, 256, (moved // 2,), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    target = [torch.empty_like(tensor) for tensor in source]

    def store(i: int) -> None:
        pool.store(0, slots[i], keys[i], values[i] if has_values else None)

    def index(i: int) -> None:
        where = slots[i].long()
        for rows, buffers in ((keys[i], pool.k_buffer), (values[i], pool.v_buffer))[:sides]:
            if is_fp8:
                buffers[0].view(torch.uint8)[where] = (rows / 0.37).to(dtype).view(torch.uint8)
            else:
                buffers[0][where] = rows

    copy_us = graph_microseconds([lambda i=i: target[i].copy_(source[i]) for i in range(sets)])
    store_us = graph_microseconds([lambda i=i: store(i) for i in range(sets)])
    index_us = graph_microseconds([lambda i=i: index(i) for i in range(min(sets, 16))])
    return {
        "tokens": n,
        "row": f"{heads}×{dim}" + (" K+V" if has_values else " K"),
        "into": str(dtype).removeprefix("torch."),
        "slots": order,
        "copy µs": copy_us,
        "copy TB/s": moved / copy_us / 1e6,
        "store µs": store_us,
        "store / copy speed": copy_us / store_us,
        "plain indexing µs": index_us,
    }


def run() -> None:
    torch.manual_seed(0)
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    rows = [measure(65_536, bf16, order) for order in ("consecutive", "shuffled pages", "random")]
    rows += [measure(65_536, fp8, order) for order in ("consecutive", "shuffled pages", "random")]
    rows += [measure(65_536, bf16, "shuffled pages", heads=1, dim=576, has_values=False)]
    rows += [measure(n, bf16, "shuffled pages") for n in (4096, 256, 1)]
    rows += [measure(256, fp8, "shuffled pages")]
    table("store, by graph replay, bfloat16 in", rows)
    save("store", rows)
