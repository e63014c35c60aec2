"""Attention on the CPU over shuffled pages, SmolLM2's shape: against reading the same bytes, and SDPA.

Times are of the wall clock, with all of torch's threads: the best of many rounds in which the contenders take
turns, because a busy neighbour only ever adds. `warm`: one layer again and again, whose bytes a large cache
holds. `cold`: the layers of the model in turn, as a step reads them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from bench.measure import save, table
from pagoda.attention import paged
from pagoda.layout import FullAttention, Layout
from pagoda.manager import Manager
from pagoda.pools import Pools

Row = dict[str, Any]
Calls = dict[str, Callable[[int], object]]

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 9, 3, 64, 16, 30


class Step:
    """A step of `rows` rows of equal length, which compute `queries` tokens each, over pools of random
    numbers with shuffled pages; and ways to compute its attention, given the number of a layer.
    """

    def __init__(self, rows: int, length: int, queries: int, dtype: torch.dtype, layers: int) -> None:
        self.rows, self.length, self.num_queries, self.dtype, self.layers = (
            rows,
            length,
            queries,
            dtype,
            layers,
        )
        kind = FullAttention(kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, dtype=str(dtype).removeprefix("torch."))
        layout = Layout([kind] * layers, PAGE)
        (group,) = layout.paged_groups
        num_pages = -(-length // PAGE) * rows
        sizes = {"num_rows": rows, "max_tokens": length}
        manager = Manager(layout, {group.name: num_pages}, **sizes)
        self.pools = Pools(
            layout, {group.name: num_pages}, **sizes, max_step_tokens=rows * length, device="cpu"
        )
        self.pool = self.pools[group.name]
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
        admitted = [manager.admit(list(range(length)), read=False).row for _ in range(rows)]
        if length > queries:
            self.pools.apply(manager.plan(admitted, length - queries))
        delta = manager.plan(admitted, queries)
        self.pools.apply(delta)
        self.batch = self.pools.batch(delta)
        pages = self.batch[group.name].page_table
        shuffled = 1 + torch.randperm(num_pages, dtype=torch.int32)
        pages.copy_(shuffled[pages.long() - 1])
        self.slots = (pages.long()[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :length]
        self.queries = torch.randn(rows * queries, HEADS, DIM, dtype=dtype)
        self.out = torch.empty_like(self.queries)
        self.layer = [self.pools.layer(i) for i in range(layers)]
        self.num_bytes = 2 * rows * length * KV_HEADS * DIM * dtype.itemsize
        words = self.num_bytes // 4
        self.same_bytes = [torch.randn(words) for _ in range(layers)]
        self.kv = [self.gathered(i) for i in range(layers)] if queries > 1 else []

    def read(self, layer: int) -> torch.Tensor:
        return self.same_bytes[layer].sum()

    def ours(self, layer: int) -> torch.Tensor:
        return paged(self.queries, self.layer[layer], self.batch, out=self.out)

    def gathered(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, kv_heads, length, dim], contiguous"""
        k, v = (
            buffer[layer][self.slots].transpose(1, 2).contiguous()
            for buffer in (self.pool.k_buffer, self.pool.v_buffer)
        )
        return k, v

    def _q(self) -> torch.Tensor:
        return self.queries.view(self.rows, self.num_queries, HEADS, DIM).transpose(1, 2)

    def gather_and_sdpa(self, layer: int) -> torch.Tensor:
        k, v = (
            buffer[layer][self.slots].transpose(1, 2) for buffer in (self.pool.k_buffer, self.pool.v_buffer)
        )
        return F.scaled_dot_product_attention(self._q(), k, v, enable_gqa=True)

    def sdpa_ways(self) -> Calls:
        """SDPA on contiguous tensors, in every way to say what the queries read."""
        bias = causal_lower_right(self.num_queries, self.length)
        keys = torch.arange(self.length)
        is_read = keys <= torch.arange(self.length - self.num_queries, self.length)[:, None]
        added = torch.zeros(is_read.shape, dtype=self.dtype).masked_fill_(~is_read, -math.inf)
        q = self._q().contiguous()
        heads = HEADS // KV_HEADS
        wide = [tuple(each.repeat_interleave(heads, 1) for each in pair) for pair in self.kv]

        def grouped(mask: Any) -> Callable[[int], object]:
            return lambda i: F.scaled_dot_product_attention(q, *self.kv[i], mask, enable_gqa=True)

        def expanded(mask: Any) -> Callable[[int], object]:
            return lambda i: F.scaled_dot_product_attention(q, *wide[i], mask)

        return {
            "SDPA, lower right": expanded(bias),
            "SDPA, boolean mask": expanded(is_read),
            "SDPA, added mask": expanded(added),
            "SDPA, grouped, boolean mask": grouped(is_read),
            "SDPA, grouped, added mask": grouped(added),
        }


def best_microseconds(calls: Calls, layers: int, rounds: int) -> dict[str, float]:
    """Return the time of each call: the best of each layer, averaged over the layers. Calls take turns after
    each pass over the layers.
    """
    best = {name: [math.inf] * layers for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                for layer in range(layers):
                    begin = time.perf_counter_ns()
                    call(layer)
                    best[name][layer] = min(best[name][layer], (time.perf_counter_ns() - begin) / 1000)
    finally:
        gc.enable()
    return {name: sum(times) / layers for name, times in best.items()}


def decode(rows: int, length: int, dtype: torch.dtype, is_cold: bool) -> Row:
    layers = LAYERS if is_cold else 1
    step = Step(rows, length, 1, dtype, layers)
    calls: Calls = {"read": step.read, "ours": step.ours}
    # Apart when warm, so that none finds the caches that another has filled.
    found = best_microseconds(calls, layers, 60) if is_cold else {}
    if not is_cold:
        for name, call in calls.items():
            found |= best_microseconds({name: call}, layers, 600)
    found |= best_microseconds({"gather": step.gather_and_sdpa}, layers, 5 if is_cold else 30)
    return {
        "decode": f"{rows} × {length:,}",
        "dtype": str(dtype).removeprefix("torch."),
        "caches": "cold" if is_cold else "warm",
        "MiB": step.num_bytes / 2**20,
        "read once µs": found["read"],
        "ours µs": found["ours"],
        "GB/s": step.num_bytes / found["ours"] / 1000,
        "ours / read": found["ours"] / found["read"],
        "gather and SDPA µs": found["gather"],
        "gather and SDPA / ours": found["gather"] / found["ours"],
    }


def extend(queries: int, cached: int, dtype: torch.dtype) -> Row:
    step = Step(1, cached + queries, queries, dtype, 1)
    ways = step.sdpa_ways()
    found = best_microseconds({"ours": step.ours, **ways}, 1, 40)
    fastest = min(ways, key=lambda name: found[name])
    pairs = queries * cached + queries * (queries + 1) // 2
    return {
        "extend": f"{queries:,} on {cached:,}",
        "dtype": str(dtype).removeprefix("torch."),
        "ours µs": found["ours"],
        "GFLOP/s": 4 * pairs * HEADS * DIM / found["ours"] / 1000,
        "fastest SDPA µs": found[fastest],
        "which": fastest,
        "SDPA / ours": found[fastest] / found["ours"],
    }


def run() -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16)
    decodes = [
        decode(rows, length, dtype, is_cold)
        for rows, length in ((8, 1_024), (1, 32_768))
        for dtype in dtypes
        for is_cold in (False, True)
        if not (is_cold and rows == 1)
    ]
    table(f"decode on the CPU, {torch.get_num_threads()} threads", decodes)
    extends = [extend(*size, dtype) for size in ((512, 512), (512, 0), (64, 4_096)) for dtype in dtypes]
    table(f"extend on the CPU, {torch.get_num_threads()} threads, warm caches", extends)
    save("attention_cpu", decodes + extends)
