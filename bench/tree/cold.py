"""A match whose pages are in no CPU cache, against memcmp + memcpy of the same bytes, alternating."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from bench.samples import CLOCK_NS, now, stats
from bench.tree.machine import calls_ns, compare_and_copy_ns
from pagoda.tree import PrefixTree

TOKENS = 1_500
WORKING_SET_TOKENS = 16 * 10**6  # tokens and ids of 64 MB each, and the same again for the machine
SAMPLES = 4_000


def rows(
    pages: tuple[int, ...] = (1, 16), working_set: int = WORKING_SET_TOKENS, samples: int = SAMPLES
) -> list[dict[str, Any]]:
    return [
        {"page": page, "tree": tree, **measured(TOKENS, page, working_set, samples, tree == "churned")}
        for page in pages
        for tree in ("fresh", "churned")
    ]


def measured(
    length: int, page: int, working_set: int, samples: int, is_churned: bool = False
) -> dict[str, Any]:
    """Time match, match_length and the machine over `working_set` tokens in prompts of `length`."""
    rng = np.random.default_rng(0)
    num_pages = length // page
    whole = num_pages * page
    num_prompts = working_set // length
    prompts = rng.integers(0, 2**31 - 1, (num_prompts, length), dtype=np.int32)
    tokens = prompts[:, :whole].copy()
    ids = np.arange(1, num_prompts * num_pages + 1, dtype=np.int32).reshape(num_prompts, num_pages)
    tree = PrefixTree(page)
    if is_churned:
        fill(tree, page, working_set)
    for i in rng.permutation(num_prompts).tolist():
        tree.evict(max(0, tree.num_tokens + whole - working_set))
        tree.insert(prompts[i], ids[i])

    gc.collect()
    gc.disable()
    times: dict[str, list[int]] = {"match": [], "length": [], "machine": [], "calls": []}
    for first, second, third in rng.integers(0, num_prompts, (samples, 3)).tolist():
        query = prompts[first].copy()
        begin = now()
        match = tree.match(query)
        found = match.page_ids
        times["match"].append(now() - begin)
        assert match.length == whole
        assert found[0] == ids[first, 0]

        query = prompts[second, :whole].copy()
        out = np.zeros(num_pages, dtype=np.int32)
        times["machine"].append(compare_and_copy_ns(query, tokens[second], ids[second], out))

        # The empty calls come after the same preparation, with the same data in the caches.
        query, out = prompts[third].copy(), np.zeros(num_pages, dtype=np.int32)
        times["calls"].append(calls_ns())
        begin = now()
        tree.match_length(query)
        times["length"].append(now() - begin)
    gc.enable()
    match, machine = stats(times["match"]), without_calls(times["machine"], times["calls"])
    return {
        "match, µs": match,
        "match_length, µs": stats(times["length"]),
        "machine, µs": machine,
        "match / machine": match["best_us"] / machine["best_us"],
    }


def without_calls(machine_ns: list[int], calls_ns: list[int]) -> dict[str, Any]:
    """Return statistics of the machine without the cost of the calls, measured at the same moment."""
    size = 100
    net = []
    for first in range(0, len(machine_ns), size):
        calls = int(np.median(calls_ns[first : first + size]))
        net += [sample - calls + CLOCK_NS for sample in machine_ns[first : first + size]]
    return stats(net)


def fill(tree: PrefixTree, page: int, capacity: int) -> None:
    """Insert and evict prompts of all lengths, in random order, for three times the capacity.

    Free memory is fragmented afterwards.
    """
    rng = np.random.default_rng(5)
    known: list[np.ndarray] = []
    inserted = 0
    while inserted < 4 * capacity:
        tokens = rng.integers(0, 2**31 - 1, rng.integers(page, 3_000), dtype=np.int32)
        excess = tree.num_tokens + len(tokens) - capacity
        if excess > 0:
            tree.evict(excess)
        tree.insert(tokens, np.arange(1, len(tokens) // page + 1, dtype=np.int32))
        inserted += len(tokens)
        known.append(tokens)
        again = known[rng.integers(max(0, len(known) - capacity // 1_500), len(known))]
        tree.release(tree.lock(tree.match(again)))
