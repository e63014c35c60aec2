"""Cost by number of leaves: the work of an operation stays the same, only the tree grows."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from bench.samples import BATCH, each_of_batch, now, stats
from pagoda.tree import PrefixTree

SIZES = (10**3, 10**4, 10**5, 10**6)
NUM_ROOTS = 200
# A prompt has 1,500 tokens. Tails of 256 keep a million leaves near 2.2 GB.
ROOT_TOKENS = 1_244
TAIL_TOKENS = 256
SAMPLES = 2_000


class Prompts:
    """Prompt number i: one of the roots and a unique tail, made on demand."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.roots = rng.integers(0, 2**31 - 1, (NUM_ROOTS, ROOT_TOKENS), dtype=np.int32)
        self._steps = np.arange(TAIL_TOKENS, dtype=np.int64) * 2_654_435_761

    def __call__(self, i: int) -> np.ndarray:
        """[1,500] int32; tails of different numbers differ in their first token: the factor is odd."""
        tail = (self._steps + i * TAIL_TOKENS * 2_654_435_761) & 0x7FFFFFFF
        return np.concatenate((self.roots[i % NUM_ROOTS], tail.astype(np.int32)))

    def page_ids(self, i: int) -> np.ndarray:
        """Return unique ids for the tail, and the root's own ids for the root."""
        own = 1 + NUM_ROOTS * ROOT_TOKENS + i * TAIL_TOKENS
        root = 1 + (i % NUM_ROOTS) * ROOT_TOKENS
        parts = np.arange(root, root + ROOT_TOKENS), np.arange(own, own + TAIL_TOKENS)
        return np.concatenate(parts).astype(np.int32)


def rows(sizes: tuple[int, ...] = SIZES, samples: int = SAMPLES) -> list[dict[str, Any]]:
    return [measured(leaves, samples) for leaves in sizes]


def measured(leaves: int, samples: int) -> dict[str, Any]:
    rng, prompts, tree = np.random.default_rng(1), Prompts(), PrefixTree(1)
    for i in range(leaves):
        tree.insert(prompts(i), prompts.page_ids(i))
    # Used in another order than stored, so that the least recently used leaves are not adjacent.
    for i in rng.permutation(leaves).tolist():
        tree.release(tree.lock(tree.match(prompts(i))))
    gc.collect()
    gc.disable()
    row: dict[str, Any] = {"leaves": leaves, "tokens": tree.num_tokens}

    times, matches = [], []
    for i in rng.integers(0, leaves, samples).tolist():
        prompt = prompts(i)
        begin = now()
        match = tree.match(prompt)
        _ = match.page_ids
        times.append(now() - begin)
        assert match.length == len(prompt)
        matches.append(match)
    row["match, µs"] = stats(times)

    times = []
    for first in range(0, samples, BATCH):
        part = matches[first : first + BATCH]
        begin = now()
        for match in part:
            tree.release(tree.lock(match))
        times.append(each_of_batch(now() - begin, len(part)))
    row["lock + release, µs"] = stats(times)

    # The tree is full: evict a little, insert a prompt with a new tail.
    evictions, inserts = [], []
    for i, n in enumerate(rng.integers(64, 2 * TAIL_TOKENS - 63, samples).tolist(), leaves):
        begin = now()
        freed = tree.evict(n).page_ids
        evictions.append(now() - begin)
        assert len(freed) == n
        prompt, page_ids = prompts(i), prompts.page_ids(i)
        begin = now()
        tree.insert(prompt, page_ids)
        inserts.append(now() - begin)
    row["insert, µs"], row["evict, µs"] = stats(inserts), stats(evictions)
    gc.enable()
    return row
