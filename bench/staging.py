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


def busy_microseconds(call: Callable[[], object], repeats: int = 15) -> float:
    """Wall time of one call on the host while the device has some milliseconds of work before it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def run() -> None:
    staging = pagoda.pools.Staging("cuda")
    array = np.arange(256, dtype=np.int32)
    on_device = torch.arange(256, device="cuda")
    pages, page_table, copy = (
        pagoda.FreeList(10**6),
        pagoda.tables.PageTable(256, 8192, 16),
        pagoda.pools.DeviceTable(256, 8192),
    )
    rows, lens = np.arange(1, 257, dtype=np.int32), np.arange(1000, 1256, dtype=np.int32)
    page_table.grow(pages, rows, lens)
    slots = pagoda.compat.TokenToKVPoolAllocator(10**6)
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

    calls: dict[str, Callable[[], object]] = {
        "send 256 ids": lambda: staging.send(array),
        "256 slots allocated, sent, freed": alloc,
        "256 requests grow by a token, table pushed": step,
        "peer: torch.tensor(ids, device='cuda')": torch_tensor,
        "peer: reading one device integer back": read_back,
    }
    rows_out: list[dict[str, Any]] = [
        {"call": name, "idle device, µs": host_microseconds(call), "busy device, µs": busy_microseconds(call)}
        for name, call in calls.items()
    ]
    name = "peer: cat + sort of a million slots on the device"
    rows_out.append({"call": name, "idle device, µs": host_microseconds(sort, 20)})
    table("host time of what goes to the device", rows_out)
    save("staging", rows_out)
