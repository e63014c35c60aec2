"""Growing running requests by one token, the host table included."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.measure import microseconds, save, table
from pagoda import FreeList
from pagoda.tables import PageTable

PAGE_SIZE = 16
STEPS = 100


def step_microseconds(batch: int, context: int) -> float:
    """One step of `batch` requests of about `context` tokens: one in PAGE_SIZE of them takes a page."""
    max_pages = (context + 61 * STEPS) // PAGE_SIZE + 2
    pages, page_table = FreeList(batch * max_pages), PageTable(batch, max_pages, PAGE_SIZE)
    rows = np.arange(1, batch + 1, dtype=np.int32)
    lens = context + np.random.default_rng(0).integers(0, PAGE_SIZE, batch).astype(np.int32)
    page_table.grow(pages, rows, lens)

    def step() -> None:
        nonlocal lens
        lens += 1
        page_table.grow(pages, rows, lens)

    return microseconds(step, STEPS)


def run() -> None:
    rows: list[dict[str, Any]] = [
        {"requests": batch, "context": context, "µs a step": step_microseconds(batch, context)}
        for batch, context in ((1, 1000), (16, 1000), (256, 1000), (256, 32_000), (4096, 1000))
    ]
    for row in rows:
        row["ns a request"] = row["µs a step"] * 1000 / row["requests"]
    table(f"growth by one token, page {PAGE_SIZE}, table and free-list included", rows)
    save("growth", rows)
