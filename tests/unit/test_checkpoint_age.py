"""Checkpoints that are never used again do not stay for good, whatever they were worth."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.layout import FullAttention, GatedDelta, Layout
from pagoda.manager import Manager

PAGE = 16
LAYOUT = Layout(
    [
        FullAttention(kv_heads=1, k_dim=16, v_dim=16),
        GatedDelta(key_heads=1, value_heads=1, key_dim=16, value_dim=16, kernel=4),
    ],
    PAGE,
)


def compute(manager: Manager, tokens: np.ndarray) -> int:
    """Run a prompt through all its cuts and release it; return its hit."""
    row, hit, _ = admitted = manager.admit(tokens)
    at = hit
    for length in (*admitted.cuts, len(tokens)):
        step = manager.plan(row, length - at).step
        manager.commit(row, tokens[at:length])
        manager.pass_fence(step)
        at = length
    manager.release(row)
    return hit


@pytest.mark.parametrize("num_checkpoints", [1, 4, 16, 48])
@pytest.mark.parametrize("others", ["short prompts", "a growing chat"])
def test_no_cold_chain_survives_ten_times_the_budget(others: str, num_checkpoints: int) -> None:
    num_saves = 10 * num_checkpoints
    capacity = {"full": 2_100 + num_saves * 40, "checkpoint": num_checkpoints}
    manager = Manager(LAYOUT, capacity, num_rows=1, max_tokens=40_000)
    cold = np.arange(32_769, dtype=np.int32)
    compute(manager, cold)
    assert manager.hit(cold) == 32_768
    before = manager.stats().checkpoints.saved
    for i in range(num_saves):
        begin = 100_000 if others == "a growing chat" else 100_000 + i * 1_000
        compute(
            manager,
            np.arange(begin, begin + 33 + (i * 32 if others == "a growing chat" else 0), dtype=np.int32),
        )
    assert manager.stats().checkpoints.saved - before == num_saves  # one per prompt
    assert manager.hit(cold) == 0
    manager.check()


def test_a_chain_that_is_used_survives() -> None:
    manager = Manager(LAYOUT, {"full": 4_100, "checkpoint": 16}, num_rows=1, max_tokens=40_000)
    warm = np.arange(32_769, dtype=np.int32)
    compute(manager, warm)
    for i in range(640):
        if i % 100 == 0:
            assert compute(manager, warm) == 32_768
        compute(manager, np.arange(100_000 + i * 1_000, 100_033 + i * 1_000, dtype=np.int32))
    assert manager.hit(warm) == 32_768
