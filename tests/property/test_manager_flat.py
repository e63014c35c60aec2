"""A manager that serves for a long time keeps its size. PAGODA_OPERATIONS=1000000 makes it a long time."""

import itertools
import os
import random

import numpy as np
import pytest

from pagoda import FullAttention, GatedDelta, Layout, WindowAttention
from pagoda.manager import Manager

OPERATIONS = int(os.environ.get("PAGODA_OPERATIONS", "150000"))
FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)
WINDOW = WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=64)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Engine:
    """Requests come, grow by chunks and tokens, are rolled back, forked, cancelled, and go."""

    def __init__(self, layout: Layout, pages: int, seed: int) -> None:
        capacity = {group.name: pages for group in layout.groups}
        self.manager = Manager(layout, capacity, num_rows=32, max_tokens=512)
        self.choose = random.Random(seed)
        self.systems = [self.some_tokens(96) for _ in range(6)]
        self.rows: list[int] = []
        self.num_calls = 0

    def some_tokens(self, n: int) -> np.ndarray:
        return np.array([self.choose.randrange(1000) for _ in range(n)], dtype=np.int32)

    def step(self) -> None:
        manager, choose = self.manager, self.choose
        tokens = np.concatenate([choose.choice(self.systems), self.some_tokens(choose.randrange(1, 30))])
        keys = [(3, 20, b"image %d" % choose.randrange(1000))] if choose.random() < 0.1 else ()
        space = b"user %d" % choose.randrange(1000) if choose.random() < 0.1 else b""
        if manager.can_admit(tokens, namespace=space, extra_keys=keys):
            row, hit, _ = manager.admit(tokens, namespace=space, extra_keys=keys)
            for begin in range(hit, len(tokens), 16):  # whole pages, as far as there are any
                part = tokens[begin : begin + 16]
                manager.pass_fence(manager.plan(row, len(part)).step)
                manager.commit(row, part)
            self.rows.append(row)
            self.num_calls += 4
        elif self.rows:
            self.ends(choose.randrange(len(self.rows)))
        for _ in range(6):
            fit = manager.num_reservable(self.rows, 2)
            if fit < len(self.rows):
                self.ends(-1)
                fit = manager.num_reservable(self.rows, 2)
            some = self.rows[:fit]
            manager.reserve(some, 2)
            manager.pass_fence(manager.plan(some, 2).step)
            manager.rollback(some, 1)
            manager.commit(some, np.ones(len(some), dtype=np.int32))
            self.num_calls += 6
        if self.rows and choose.random() < 0.2 and len(self.rows) < 30:
            row = choose.choice(self.rows)
            before = manager.stats().groups
            if all(group.free + group.evictable > 4 for group in before):
                self.rows.append(manager.fork(row))
                self.num_calls += 2
        if self.rows and choose.random() < 0.6:
            self.ends(choose.randrange(len(self.rows)))

    def ends(self, at: int) -> None:
        self.manager.release(self.rows.pop(at))
        self.manager.plan()
        self.manager.pass_fence(self.manager.step - 1)
        self.num_calls += 3


@pytest.mark.parametrize("layers", [[FULL], [FULL, WINDOW]], ids=["full", "window"])
def test_memory_stays_where_it_was(layers: list[FullAttention | WindowAttention]):
    engine = Engine(Layout(layers, 16), 300, seed=7)
    while engine.num_calls < OPERATIONS // 5:
        engine.step()
    before = resident_bytes()
    while engine.num_calls < OPERATIONS:
        engine.step()
    engine.manager.check()
    assert engine.manager.stats().evicted_pages > 1000
    assert resident_bytes() - before < 3 << 20


def test_branches_of_a_path_with_many_checkpoints_take_little_memory():
    """A thousand of them, and a path of 4,000 checkpoints: a copy of its list for each would be 32 MB."""
    num_pages = 4_000
    state = GatedDelta(key_heads=1, value_heads=1, key_dim=2, value_dim=2, kernel=2)
    manager = Manager(
        Layout([FULL, state], 4),
        {"full": 3 * num_pages, "checkpoint": 2 * num_pages},
        num_rows=2,
        max_tokens=5 * num_pages,
        checkpoint_interval=4,
    )
    path = np.arange(4 * num_pages + 1, dtype=np.int32)

    def serve(tokens: np.ndarray) -> None:
        got = manager.admit(tokens)
        for begin, end in itertools.pairwise((got.hit, *got.cuts, len(tokens))):
            manager.pass_fence(manager.plan(got.row, end - begin).step)
            manager.commit(got.row, tokens[begin:end])
        manager.release(got.row)
        manager.pass_fence(manager.plan().step)

    def branch(at: int) -> None:
        serve(np.concatenate([path[: 4 * at], np.full(2, 1_000_000, np.int32)]))

    serve(path)
    branch(num_pages - 1)
    before = resident_bytes()
    for at in range(num_pages - 2, num_pages - 1_002, -1):
        branch(at)
    assert resident_bytes() - before < 8 << 20
    manager.check()
