"""Packing pages of all layers into one buffer and back, against a device copy of equal bytes."""

from __future__ import annotations

from typing import Any

import torch

from bench.measure import graph_microseconds, save, table
from pagoda import TokenPool


def measure(num_packed: int, page_tokens: int, layers: int) -> dict[str, Any]:
    shape = (8, 128)
    pool = TokenPool(4 * num_packed, page_tokens, layers, shape, shape, torch.bfloat16, "cuda")
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    sets = 2
    ids = [(1 + torch.randperm(pool.num_pages)[:num_packed]).to("cuda", torch.int32) for _ in range(sets)]
    packed = [torch.empty(num_packed, pool.page_bytes, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    source = [torch.randint_like(tensor, 0, 256) for tensor in packed]
    copy_us = graph_microseconds([lambda i=i: packed[i].copy_(source[i]) for i in range(sets)])
    pack_us = graph_microseconds([lambda i=i: pool.pack(ids[i], packed[i]) for i in range(sets)])
    unpack_us = graph_microseconds([lambda i=i: pool.unpack(ids[i], packed[i]) for i in range(sets)])
    return {
        "pages": num_packed,
        "page size": page_tokens,
        "layers": layers,
        "MiB": packed[0].numel() >> 20,
        "copy µs": copy_us,
        "copy TB/s": 2 * packed[0].numel() / copy_us / 1e6,
        "pack / copy speed": copy_us / pack_us,
        "unpack / copy speed": copy_us / unpack_us,
    }


def run() -> None:
    torch.manual_seed(0)
    rows = [measure(128, 16, 32), measure(2048, 1, 32), measure(32, 64, 32), measure(8, 16, 32)]
    table("pack and unpack of pages in random order, 8×128 K+V bfloat16, by graph replay", rows)
    save("pack", rows)
