"""The longest of a million operations in a presized tree: ``python -m bench.tree.worst PAGE OPERATIONS``.

Requests of up to 8k tokens come, find, lock, evict, insert, commit page by page, and end, in a tree that is
full. Both clocks are read: wall time is what an engine feels, CPU time leaves out most of what neighbours
do. The machine is measured in between, one memcmp + memcpy of 8k tokens an operation: what it has over
100 µs, nobody can prevent.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import deque
from typing import Any

import numpy as np

from bench.samples import CLOCK_NS, now
from bench.tree.machine import compare_and_copy_ns
from pagoda.tree import PrefixTree

OPERATIONS = 10**6
CAPACITY_TOKENS = 4 * 10**6
MAX_TOKENS = 8_192
NUM_KNOWN = 4_000
RUNNING = 48
LIMIT_NS = 100_000


def rows(pages: tuple[int, ...] = (1, 16), operations: int = OPERATIONS) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for page in pages:
        command = [sys.executable, "-m", "bench.tree.worst", str(page), str(operations)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found += json.loads(done.stdout.splitlines()[-1])
    return found


class Timed:
    """Runs operations and keeps how long each kind took, on both clocks."""

    def __init__(self) -> None:
        self.cpu: dict[str, list[int]] = {}
        self.wall: dict[str, list[int]] = {}
        self.count = 0
        rng = np.random.default_rng(3)
        self._tokens = rng.integers(0, 2**31 - 1, (500, MAX_TOKENS), dtype=np.int32)  # 16 MB, three times
        self._same, self._ids = self._tokens.copy(), self._tokens.copy()
        self._out = np.zeros(MAX_TOKENS, dtype=np.int32)

    def __call__(self, name: str, operation: Any, *arguments: Any) -> Any:
        wall = time.perf_counter_ns()
        cpu = now()
        result = operation(*arguments)
        cpu = now() - cpu
        self._add(name, cpu, time.perf_counter_ns() - wall)
        self.count += 1
        row = self.count * 7 % 500
        wall = time.perf_counter_ns()
        cpu = compare_and_copy_ns(self._tokens[row], self._same[row], self._ids[row], self._out)
        self._add("machine: compare + copy", cpu, time.perf_counter_ns() - wall)
        return result

    def _add(self, name: str, cpu: int, wall: int) -> None:
        self.cpu.setdefault(name, []).append(cpu - CLOCK_NS)
        self.wall.setdefault(name, []).append(wall)

    def rows(self, page: int) -> list[dict[str, Any]]:
        machine = "machine: compare + copy"
        kinds = {name: [name] for name in sorted(self.cpu) if name != machine}
        kinds |= {"all": list(kinds), machine: [machine]}
        rows = []
        for name, parts in kinds.items():
            cpu = np.concatenate([np.asarray(self.cpu[part]) for part in parts])
            wall = np.concatenate([np.asarray(self.wall[part]) for part in parts])
            row = {"page": page, "operation": name, "count": len(cpu)}
            for percent in (50, 99, 99.9):
                row[f"p{percent:g}, µs"] = float(np.percentile(cpu, percent)) / 1e3
            row |= {"CPU max, µs": float(cpu.max()) / 1e3, "wall max, µs": float(wall.max()) / 1e3}
            row |= {
                "CPU > 100 µs": int((cpu > LIMIT_NS).sum()),
                "wall > 100 µs": int((wall > LIMIT_NS).sum()),
            }
            rows.append(row)
        return rows


def measured(page: int, operations: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)
    lengths = np.exp(rng.uniform(np.log(64), np.log(MAX_TOKENS), NUM_KNOWN)).astype(int)
    known = [rng.integers(0, 2**31 - 1, length, dtype=np.int32) for length in lengths]
    tree = PrefixTree(page, capacity=CAPACITY_TOKENS)
    timed = Timed()
    running: deque[list[Any]] = deque()  # [lease, the tokens to commit page by page]
    ids = np.arange(1, MAX_TOKENS // page + 2, dtype=np.int32)
    gc.collect()
    gc.disable()
    while timed.count < operations:
        before = known[rng.integers(NUM_KNOWN)]
        length = int(np.exp(rng.uniform(np.log(64), np.log(MAX_TOKENS))))
        cut = int(rng.integers(0, min(length, len(before)) + 1))
        own = rng.integers(0, 2**31 - 1, length - cut, dtype=np.int32)
        tokens = np.concatenate((before[:cut], own))
        if rng.random() < 0.2:  # its continuation will be looked for later
            known[rng.integers(NUM_KNOWN)] = tokens
        timed("match_length", tree.match_length, tokens)
        match = timed("match", _match, tree, tokens)
        lease = timed("lock", tree.lock, match)
        # Room for the prompt, and for the page that each running request may commit below.
        excess = tree.num_tokens + length + 8 * page - CAPACITY_TOKENS
        if excess > 0:
            timed("evict", tree.evict, min(excess, MAX_TOKENS))
        prompt_end = max(lease.length, length - int(rng.integers(0, 64)))
        tail = tokens[lease.length : prompt_end]
        timed("insert", tree.insert, tail, ids[: len(tail) // page], lease)
        running.append([lease, tokens])
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
    return timed.rows(page)


def _match(tree: PrefixTree, tokens: np.ndarray) -> Any:
    match = tree.match(tokens)
    _ = match.page_ids
    return match


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]), int(sys.argv[2]))))
