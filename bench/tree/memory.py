"""Resident bytes per cached token, built and churned: ``python -m bench.tree.memory PAGE SPLITS SCALE``."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import deque
from typing import Any

import numpy as np

from bench.radix import workload
from bench.samples import resident_bytes
from pagoda.tree import PrefixTree

SCALE = 4.0  # about 8 million tokens, so that Python's own allocations do not show
CHURN_ROUNDS = 5  # times the capacity
LEASES = 64
# The share of requests that branch off inside a known prompt; the others continue one at its end. Once as in
# bench/radix, and once all of them, which splits nodes into small pieces.
SPLITS = (1 / 6, 1.0)


def rows(pages: tuple[int, ...] = (1, 16, 64), scale: float = SCALE) -> list[dict[str, Any]]:
    found = []
    for page, splits in [(page, splits) for splits in SPLITS for page in pages]:
        command = [sys.executable, "-m", "bench.tree.memory", str(page), str(splits), str(scale)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def measured(page: int, splits: float, scale: float) -> dict[str, Any]:
    prompts = [op.tokens for op in workload.make(scale=scale, leaves=0).build]
    tree = PrefixTree(page)
    churn(tree, page, prompts[:1], splits, 0, 0)  # imports and one-time allocations do not count
    tree = PrefixTree(page)
    gc.collect()
    empty = resident_bytes()

    next_page = 1
    for tokens in prompts:
        num_pages = len(tokens) // page
        tree.insert(tokens, np.arange(next_page, next_page + num_pages, dtype=np.int32))
        next_page += num_pages
    gc.collect()
    built_tokens = tree.num_tokens
    built = (resident_bytes() - empty) / built_tokens

    evicted = churn(tree, page, prompts, splits, built_tokens, CHURN_ROUNDS)
    gc.collect()
    churned = (resident_bytes() - empty) / tree.num_tokens
    return {
        "page": page,
        "requests that split": round(splits, 2),
        "tokens": built_tokens,
        "after the build": built,
        "evicted, × the capacity": evicted / built_tokens,
        "tokens then": tree.num_tokens,
        "nodes then": tree.num_nodes,
        "after churn": churned,
        "churn / build": churned / built,
    }


def churn(
    tree: PrefixTree, page: int, prompts: list[np.ndarray], splits: float, capacity: int, rounds: int
) -> int:
    """Run requests at constant capacity, each a known prompt, or a part of one, and new tokens.

    They evict `rounds` times the capacity; 64 run at a time. Returns the tokens evicted.
    """
    rng = np.random.default_rng(2)
    running: deque[Any] = deque()
    evicted, steps = 0, 0
    while evicted < rounds * capacity or steps < 3:
        steps += 1
        known = prompts[rng.integers(len(prompts))]
        begin = known[: rng.integers(1, len(known) + 1)] if rng.random() < splits else known
        own = rng.integers(1, workload.VOCAB, rng.integers(150, 551), dtype=np.int32)
        tokens = np.concatenate((begin, own))
        lease = tree.lock(tree.match(tokens))
        wanted = len(tokens) - lease.length
        excess = tree.num_tokens + wanted - capacity
        if excess > 0 and rounds:
            evicted += len(tree.evict(excess).page_ids) * page
        # The prompt in one piece, 64 tokens of output as their pages fill.
        for end in [len(tokens) - 64, *range(len(tokens) - 64 + page, len(tokens) + 1, page)]:
            tail = tokens[lease.length : end]
            tree.insert(tail, np.arange(1, len(tail) // page + 1, dtype=np.int32), lease)
        running.append(lease)
        if len(running) > LEASES:
            tree.release(running.popleft())
    for lease in running:
        tree.release(lease)
    return evicted


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))))
