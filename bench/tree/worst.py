"""The longest of a million operations in a presized tree: ``python -m bench.tree.worst PAGE COUNT FILE``.

Requests of up to 8k tokens match, lock, evict, insert, commit page by page, and end, in a full tree. Both
clocks are read: wall time is what an engine sees, CPU time excludes most noise. The same million runs three
times, each in a fresh process: an operation that is slow in every run is the tree's fault, one that is slow
in a single run the machine's. The machine itself is measured in between, one memcmp + memcpy of 8k tokens per
operation: if that takes over 100 µs, no tree can avoid it.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from bench.samples import CLOCK_NS, now
from bench.tree.machine import compare_and_copy_ns
from pagoda.tree import PrefixTree

OPERATIONS = 10**6
RUNS = 3
CAPACITY_TOKENS = 4 * 10**6
MAX_TOKENS = 8_192
NUM_KNOWN = 4_000
RUNNING = 48
LIMIT_NS = 100_000
KINDS = ["match_length", "match", "lock", "evict", "insert", "commit a page", "demote", "release"]


def rows(
    pages: tuple[int, ...] = (1, 16), operations: int = OPERATIONS, runs: int = RUNS
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for page in pages:
        times = []
        with tempfile.TemporaryDirectory() as folder:
            for run in range(runs):
                file = Path(folder) / f"{run}.npy"
                command = [sys.executable, "-m", "bench.tree.worst", str(page), str(operations), str(file)]
                subprocess.run(command, check=True)
                times.append(np.load(file))
        found += summary(page, np.stack(times))
    return found


class Timed:
    """Runs operations and records the time of each on both clocks, and of the machine after it."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []  # kind, CPU, wall, machine's CPU, machine's wall
        rng = np.random.default_rng(3)
        self._tokens = rng.integers(0, 2**31 - 1, (500, MAX_TOKENS), dtype=np.int32)  # 16 MB, three times
        self._same, self._ids = self._tokens.copy(), self._tokens.copy()
        self._out = np.zeros(MAX_TOKENS, dtype=np.int32)

    def __call__(self, name: str, operation: Any, *arguments: Any) -> Any:
        begin = time.perf_counter_ns()
        cpu = now()
        result = operation(*arguments)
        cpu = now() - cpu
        wall = time.perf_counter_ns() - begin
        row = len(self.rows) * 7 % 500
        begin = time.perf_counter_ns()
        machine = compare_and_copy_ns(self._tokens[row], self._same[row], self._ids[row], self._out)
        machine_wall = time.perf_counter_ns() - begin
        self.rows.append((KINDS.index(name), cpu - CLOCK_NS, wall, machine - CLOCK_NS, machine_wall))
        return result


def summary(page: int, times: np.ndarray) -> list[dict[str, Any]]:
    """[runs, operations, 5] → one row per kind, one for all, one for the machine."""
    kinds = times[0, :, 0]
    assert (times[:, :, 0] == kinds).all(), "every run does the same"
    parts = {name: (kinds == i, 1) for i, name in enumerate(KINDS)}
    parts |= {"all": (kinds >= 0, 1), "machine: compare + copy": (kinds >= 0, 3)}
    found = []
    for name, (which, column) in parts.items():
        cpu, wall = times[:, which, column] / 1e3, times[:, which, column + 1] / 1e3  # [runs, operations] µs
        if cpu.size == 0:
            continue
        row: dict[str, Any] = {"page": page, "operation": name, "count": cpu.shape[1]}
        row |= {f"p{percent:g}, µs": float(np.percentile(cpu.min(0), percent)) for percent in (50, 99, 99.9)}
        for clock, us in (("CPU", cpu), ("wall", wall)):
            row[f"{clock} max, one run, µs"] = float(us[0].max())
            row[f"{clock} max, all runs, µs"] = float(us.min(0).max())
        for clock, us in (("CPU", cpu), ("wall", wall)):
            row[f"{clock} > 100 µs, one run"] = int((us[0] > LIMIT_NS / 1e3).sum())
            row[f"{clock} > 100 µs, all runs"] = int((us.min(0) > LIMIT_NS / 1e3).sum())
        found.append(row)
    return found


def measured(page: int, operations: int) -> np.ndarray:
    """[operations, 5] int64: kind, CPU and wall ns, and the machine's; the same operations every time."""
    rng = np.random.default_rng(4)
    lengths = np.exp(rng.uniform(np.log(64), np.log(MAX_TOKENS), NUM_KNOWN)).astype(int)
    known = [rng.integers(0, 2**31 - 1, length, dtype=np.int32) for length in lengths]
    tree = PrefixTree(page, capacity=CAPACITY_TOKENS)
    timed = Timed()
    running: deque[tuple[Any, np.ndarray]] = deque()  # leases, and the tokens to commit page by page
    ids = np.arange(1, MAX_TOKENS // page + 2, dtype=np.int32)
    gc.collect()
    gc.disable()
    while len(timed.rows) < operations:
        before = known[rng.integers(NUM_KNOWN)]
        length = int(np.exp(rng.uniform(np.log(64), np.log(MAX_TOKENS))))
        cut = int(rng.integers(0, min(length, len(before)) + 1))
        own = rng.integers(0, 2**31 - 1, length - cut, dtype=np.int32)
        tokens = np.concatenate((before[:cut], own))
        if rng.random() < 0.2:  # its continuation is looked up later
            known[rng.integers(NUM_KNOWN)] = tokens
        timed("match_length", tree.match_length, tokens)
        match = timed("match", _match, tree, tokens)
        lease = timed("lock", tree.lock, match)
        # Make room for the prompt and for the pages that running requests may commit below.
        excess = tree.num_tokens + length + 8 * page - CAPACITY_TOKENS
        if excess > 0:
            timed("evict", tree.evict, min(excess, MAX_TOKENS))
        prompt_end = max(lease.length, length - int(rng.integers(0, 64)))
        tail = tokens[lease.length : prompt_end]
        timed("insert", tree.insert, tail, ids[: len(tail) // page], lease)
        running.append((lease, tokens))
        for i in rng.integers(0, len(running), 8).tolist():
            lease, tokens = running[i]
            tail = tokens[lease.length : lease.length + page]
            if len(tail) == page:
                timed("commit a page", tree.insert, tail, ids[:1], lease)
        if len(running) > RUNNING:
            lease, _ = running.popleft()
            if rng.random() < 0.1:
                timed("demote", tree.demote, lease)
            timed("release", tree.release, lease)
    gc.enable()
    tree.check()
    return np.asarray(timed.rows, dtype=np.int64)


def _match(tree: PrefixTree, tokens: np.ndarray) -> Any:
    match = tree.match(tokens)
    _ = match.page_ids
    return match


if __name__ == "__main__":
    np.save(sys.argv[3], measured(int(sys.argv[1]), int(sys.argv[2])))
