"""Cost by length of a prompt. Together the prompts exceed the CPU's caches, as in an engine."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from bench.samples import BATCH, each_of_batch, now, stats
from bench.tree import cold
from pagoda.tree import PrefixTree

LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000)
WORKING_SET_TOKENS = 16 * 10**6
MAX_SAMPLES = 2_000


def rows(lengths: tuple[int, ...] = LENGTHS, working_set: int = WORKING_SET_TOKENS) -> list[dict[str, Any]]:
    return [measured(length, working_set) for length in lengths]


def measured(length: int, working_set: int) -> dict[str, Any]:
    # Half of the prompts are measured; the less recently used half is there to be evicted.
    samples = min(MAX_SAMPLES, working_set // length // 2)
    reads = cold.measured(length, 1, working_set, max(samples, 40))
    row: dict[str, Any] = {"tokens": length, **reads}
    rng = np.random.default_rng(1)
    num_prompts = working_set // length
    prompts = rng.integers(0, 2**31 - 1, (num_prompts, length), dtype=np.int32)
    ids = np.arange(1, length + 1, dtype=np.int32)  # the tree need not know that they repeat
    tree = PrefixTree(1)
    for prompt in prompts:
        tree.insert(prompt, ids)
    gc.collect()
    gc.disable()

    order = rng.permutation(num_prompts)[:samples].tolist()
    times = []
    for first in range(0, samples, BATCH):
        matches = [tree.match(prompts[i]) for i in order[first : first + BATCH]]
        begin = now()
        for match in matches:
            tree.release(tree.lock(match))
        times.append(each_of_batch(now() - begin, len(matches)))
    row["lock + release, µs"] = stats(times)

    # The tree is full: as many tokens are evicted as inserted. Half of the prompt is cached: a node is split.
    times = []
    for i in order:
        tree.evict(length - length // 2)
        prompt = np.concatenate((prompts[i, : length // 2], prompts[i - 1, : length - length // 2]))
        begin = now()
        tree.insert(prompt, ids)
        times.append(now() - begin)
    row["insert half new, µs"] = stats(times)

    evictions, inserts = [], []
    for _ in range(samples):
        begin = now()
        tree.evict(length)
        evictions.append(now() - begin)
        prompt = rng.integers(0, 2**31 - 1, length, dtype=np.int32)
        begin = now()
        tree.insert(prompt, ids)
        inserts.append(now() - begin)
    row["insert new, µs"], row["evict as many, µs"] = stats(inserts), stats(evictions)
    gc.enable()
    return row
