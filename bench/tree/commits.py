"""A running request that commits each page as it fills: linear in its length, or decoding slows down."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from bench.samples import now
from pagoda.tree import PrefixTree

LENGTHS = (7_500, 15_000, 30_000)
REPEATS = 7


def rows(
    pages: tuple[int, ...] = (1, 16), lengths: tuple[int, ...] = LENGTHS, repeats: int = REPEATS
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for page in pages:
        for length in lengths:
            total_ms = min(total_ns(length, page) for _ in range(repeats)) / 1e6
            row = {"page": page, "tokens": length, "commits": length // page, "total, ms": total_ms}
            found.append({**row, "µs a commit": total_ms * 1e3 / (length // page)})
    return found


def total_ns(length: int, page: int) -> int:
    """Return the time of all commits together, slicing of the request's arrays included."""
    tree = PrefixTree(page)
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, length, dtype=np.int32)
    page_ids = np.arange(1, length // page + 1, dtype=np.int32)
    lease = tree.lock(tree.match(tokens))
    gc.collect()
    gc.disable()
    begin = now()
    for k in range(length // page):
        tree.insert(tokens[k * page : (k + 1) * page], page_ids[k : k + 1], lease)
    elapsed = now() - begin
    gc.enable()
    assert lease.length == length // page * page
    assert tree.num_nodes == 1
    return elapsed
