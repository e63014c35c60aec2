"""Saves, restores, copies and resets of states, one launch for all rows and layers, against a device copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.measure import graph_microseconds, save, table
from pagoda import kernels
from pagoda.layout import GatedDelta, Layout, StateGroup, from_hf, model_config
from pagoda.pools import CheckpointPool, StatePool

# Per layer: a recurrent state of [32, 128, 128] float32, and a convolution of [8192, 3] bfloat16.
DELTA = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
LENGTH = 12_345
SETS = 2  # of rows and checkpoints; their calls alternate, so that no call finds its data in a cache


def copy_microseconds(num_bytes: int) -> float:
    """Return the time of a device copy of that many bytes, or of a kernel that moves as many: the faster."""
    source = torch.randint(0, 256, (SETS, -(-num_bytes // 8) * 8), dtype=torch.uint8, device="cuda")
    source = source.view(torch.int64)
    target = torch.empty_like(source)
    calls = (torch.Tensor.copy_, lambda out, given: torch.bitwise_not(given, out=out))
    return min(
        graph_microseconds([lambda i=i, call=call: call(target[i], source[i]) for i in range(SETS)])
        for call in calls
    )


def measure(name: str, group: StateGroup, num_rows: int) -> list[dict[str, Any]]:
    states = StatePool.from_group(group, 2 * SETS * num_rows, "cuda")
    checkpoints = CheckpointPool(states, SETS * num_rows)
    for tensor in (*states.tensors.values(), checkpoints.tensor):
        tensor.view(torch.uint8).random_()
    regions, n = states.regions(), num_rows
    rows = (1 + torch.randperm(2 * SETS * n)).view(SETS, 2, n)
    ids = (1 + torch.randperm(SETS * n)).view(SETS, n)
    # As sections of a delta: rows, other rows, lengths, checkpoints.
    deltas = [
        torch.cat([*rows[i], torch.full((n,), LENGTH), ids[i]]).to("cuda", torch.int32) for i in range(SETS)
    ]

    def both(call: Callable[[torch.Tensor], object]) -> float:
        return graph_microseconds([lambda delta=delta: call(delta) for delta in deltas])

    kept, whole = group.checkpoint_bytes, group.state_bytes
    calls = {
        "save": (2 * kept, lambda d: kernels.save_states(d, 0, 2 * n, 3 * n, n, regions, checkpoints.tensor)),
        "restore": (
            kept + whole,
            lambda d: kernels.restore_states(d, 0, 2 * n, 3 * n, n, regions, checkpoints.tensor),
        ),
        "copy": (2 * whole, lambda d: kernels.copy_states(d, 0, n, n, regions)),
        "reset": (whole, lambda d: kernels.fill_rows(regions, 0, n, d)),
    }
    found = []
    for call, (row_bytes, run) in calls.items():
        moved = n * row_bytes  # read and written
        copy_us, call_us = copy_microseconds(moved // 2), both(run)
        found.append(
            {
                "state": name,
                "rows": n,
                "call": call,
                "MiB moved": moved / 2**20,
                "µs": call_us,
                "TB/s": moved / call_us / 1e6,
                "device copy µs": copy_us,
                "of its speed": copy_us / call_us,
            }
        )
    return found


def run() -> None:
    torch.manual_seed(0)
    delta, flash = Layout([DELTA] * 32).state_group, from_hf(model_config("deepseek-v4-flash")).state_group
    assert delta is not None
    assert flash is not None
    rows = []
    for name, group, sizes in (
        ("32 × gated delta", delta, (1, 8, 64)),
        ("DeepSeek-V4-Flash", flash, (1, 8, 64)),
    ):
        for num_rows in sizes:
            rows += measure(name, group, num_rows)
            torch.cuda.empty_cache()
    table("states: one launch for all rows and layers, against a device copy of equal traffic", rows)
    save("states", rows)
