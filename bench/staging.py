"""What a host array costs on its way to the GPU: host time of calls that nobody waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import pagoda
from bench.measure import save, table


def host_microseconds(call: Callable[[], object], number: int = 200, repeats: int = 15) -> float:
    """Wall time of a call on the host: the median of loops, the device left to itself meanwhile."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - begin) / number * 1e6)
    return statistics.median(times)


def run() -> None:
    staging = pagoda.Staging("cuda")
    array = np.arange(256, dtype=np.int32)
    on_device = torch.arange(256, device="cuda")
    pages, page_table, copy = (
        pagoda.FreeList(10**6),
        pagoda.PageTable(256, 8192, 16),
        pagoda.DeviceTable(256, 8192),
    )
    rows, lens = np.arange(1, 257, dtype=np.int32), np.arange(1000, 1256, dtype=np.int32)
    page_table.grow(pages, rows, lens)
    slots = pagoda.TokenToKVPoolAllocator(10**6)
    gpu_list = torch.arange(10**6, dtype=torch.int32, device="cuda")

    def step() -> None:
        nonlocal lens
        lens = lens + 1
        copy.write(*page_table.grow(pages, rows, lens).writes)

    def alloc() -> None:
        host = slots.alloc_host(256)
        assert host is not None
        staging.send(host)
        slots.free(host)

    def read_back() -> None:
        on_device[0].item()

    def sort() -> None:
        nonlocal gpu_list
        gpu_list = torch.sort(torch.cat((gpu_list[256:], gpu_list[:256])))[0]
        torch.cuda.synchronize()

    def torch_tensor() -> None:
        torch.tensor(array, device="cuda")

    rows_out: list[dict[str, Any]] = [
        {"call": "send 256 ids, one copy", "host µs": host_microseconds(lambda: staging.send(array))},
        {"call": "256 slots allocated, sent, freed", "host µs": host_microseconds(alloc)},
        {"call": "256 requests grow by a token, table pushed", "host µs": host_microseconds(step)},
        {"call": "peer: torch.tensor(…, device='cuda'), waits", "host µs": host_microseconds(torch_tensor)},
        {"call": "peer: reading one device integer back", "host µs": host_microseconds(read_back)},
        {"call": "peer: cat + sort of a million slots on the device", "host µs": host_microseconds(sort, 20)},
    ]  # fmt: skip
    table("host time of what goes to the device", rows_out)
    save("staging", rows_out)
