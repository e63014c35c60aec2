"""The cost of sending a host array to the GPU: host time of asynchronous calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.measure import save, table
from pagoda.compat import TokenToKVPoolAllocator
from pagoda.pools import Staging


def host_microseconds(call: Callable[[], object], number: int = 200, repeats: int = 15) -> float:
    """Return the wall time of a call on the host: the median of loops, without waiting for the device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - begin) / number * 1e6)
    return statistics.median(times)


def busy_microseconds(call: Callable[[], object], repeats: int = 15) -> float:
    """Return the wall time of one call on the host while the device has milliseconds of work queued."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def run() -> None:
    staging = Staging("cuda")
    array = np.arange(256, dtype=np.int32)
    on_device = torch.arange(256, device="cuda")
    slots = TokenToKVPoolAllocator(10**6)
    gpu_list = torch.arange(10**6, dtype=torch.int32, device="cuda")
    rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
        "post 256 ids to a room": lambda: staging.post(array, rooms),
        "256 slots allocated, sent, freed": alloc,
        "peer: torch.tensor(ids, device='cuda')": torch_tensor,
        "peer: reading one device integer back": read_back,
    }
    rows_out: list[dict[str, Any]] = [
        {"call": name, "idle device, µs": host_microseconds(call), "busy device, µs": busy_microseconds(call)}
        for name, call in calls.items()
    ]
    name = "peer: cat + sort of a million slots on the device"
    rows_out.append({"call": name, "idle device, µs": host_microseconds(sort, 20)})
    table("host time of calls that send to the device", rows_out)
    save("staging", rows_out)
