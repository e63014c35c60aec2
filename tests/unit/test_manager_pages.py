"""Pages that a manager gives by number: to a row ahead of its tokens, and to nobody's row."""

from typing import Any

import numpy as np
import pytest

from pagoda import CapacityError, UsageError
from pagoda.errors import ArgumentError, DoubleFreeError, NotHeldError, OutOfRangeError
from pagoda.layout import FullAttention, LatentAttention, Layout, latent
from pagoda.manager import Manager

FULL = FullAttention(kv_heads=1, k_dim=4, v_dim=4)
LAYOUT = Layout([FULL, LatentAttention(entry=latent(4, 4, "bfloat16"))], page_tokens=4)


def manager_of(full: int = 6) -> Manager:
    return Manager(LAYOUT, {"full": full, "latent": 6}, num_rows=3, max_tokens=20)


def finish(manager: Manager) -> Any:
    """Plan a step without rows, and let it finish."""
    delta = manager.plan()
    manager.pass_fence(delta.step)
    return delta


def free(manager: Manager) -> list[int]:
    return [group.free for group in manager.stats().groups]


def test_a_row_gets_pages_of_one_group_and_the_next_delta_has_them():
    manager = manager_of()
    row = manager.admit([1, 2, 3]).row
    finish(manager)
    assert manager.extend(row, "latent", 2).tolist() == [2, 3]
    assert manager.page_ids(row, "latent").tolist() == [1, 2, 3]
    assert manager.page_ids(row, "full").tolist() == [1]
    assert manager.reserved(row) == 3
    delta = finish(manager)
    # The table of the second group follows that of the first: 4 rows of 5 pages each.
    assert delta.places.tolist() == [4 * 5 + 5 * row + 1, 4 * 5 + 5 * row + 2]
    assert delta.page_ids.tolist() == [2, 3]
    assert free(manager) == [5, 3]
    manager.check()


def test_reserve_uses_the_pages_that_are_there():
    manager = manager_of()
    row = manager.admit([1]).row
    manager.extend(row, "full", 3)
    manager.reserve(row, 11)
    assert [len(manager.page_ids(row, name)) for name in ("full", "latent")] == [4, 3]
    assert manager.extend(row, "full", 0).size == 0
    manager.release(row)
    finish(manager)
    assert free(manager) == [6, 6]
    manager.check()


def test_pages_of_extend_may_come_from_the_cache():
    manager = manager_of()
    row = manager.admit(range(16)).row
    manager.plan(row, 16)
    manager.commit(row, range(16))
    manager.pass_fence(1)
    manager.release(row)
    other = manager.admit([7], read=False).row
    assert manager.stats().groups[0].evictable == 4
    manager.extend(other, "full", 3)
    assert manager.stats().groups[0].evictable == 2
    manager.check()


def test_a_row_gets_no_more_pages_than_it_can_use_or_than_there_are():
    manager = manager_of()
    row, other = manager.admit([1]).row, manager.admit([1]).row
    for group, n, error in (
        ("full", 5, ArgumentError),
        ("full", 2**31 - 1, ArgumentError),
        ("full", -1, UsageError),
        ("none", 1, ArgumentError),
    ):
        with pytest.raises(error):
            manager.extend(row, group, n)
    manager.extend(row, "full", 4)
    with pytest.raises(CapacityError, match="group full") as error:
        manager.extend(other, "full")
    assert (error.value.wanted, error.value.free, error.value.total) == (1, 0, 6)
    for bad, kind in ((0, OutOfRangeError), (4, OutOfRangeError), (3, NotHeldError)):
        with pytest.raises(kind):
            manager.extend(bad, "latent")
        with pytest.raises(kind):
            manager.trim(bad, "latent")
    manager.check()


def test_trim_takes_back_what_no_token_needs():
    manager = manager_of()
    row = manager.admit([1, 2, 3, 4, 5]).row
    manager.extend(row, "latent", 3)
    with pytest.raises(ArgumentError, match="plan first"):
        manager.trim(row, "latent")
    delta = manager.plan(row, 5)
    with pytest.raises(ArgumentError, match="may still be running"):
        manager.trim(row, "latent")
    manager.pass_fence(delta.step)
    with pytest.raises(ArgumentError, match="has 3 pages of group latent behind"):
        manager.trim(row, "latent", 4)
    with pytest.raises(ArgumentError, match="has 0 pages of group full behind"):
        manager.trim(row, "full")
    manager.trim(row, "latent", 2)
    assert manager.page_ids(row, "latent").tolist() == [1, 2, 3]
    assert free(manager) == [4, 3]
    manager.check()
    # What a rollback left behind goes the same way; the next pages are the lowest free ones again.
    manager.rollback(row, 4)
    manager.trim(row, "full")
    manager.trim(row, "latent", 2)
    assert free(manager) == [5, 5]
    assert manager.extend(row, "latent").tolist() == [2]
    manager.check()


def test_pages_of_nobody_are_given_out_and_freed():
    manager = manager_of()
    row = manager.admit([1]).row
    ids = manager.alloc_pages("full", 3)
    assert (ids.dtype, ids.tolist()) == (np.int32, [2, 3, 4])
    manager.check()
    group = manager.stats().groups[0]
    assert (group.free, group.running) == (2, 4)
    with pytest.raises(CapacityError):
        manager.alloc_pages("full", 3)
    assert manager.extend(row, "full").tolist() == [5]
    for bad, kind in (
        ([1], NotHeldError),
        ([2, 5], NotHeldError),
        ([6], NotHeldError),
        ([0], OutOfRangeError),
        ([7], OutOfRangeError),
        ([2, 2], UsageError),
        (None, ArgumentError),
    ):
        with pytest.raises(kind):
            manager.free_pages("full", bad)
        manager.check()
    with pytest.raises(NotHeldError):
        manager.free_pages("latent", [2])
    manager.free_pages("full", [3])
    with pytest.raises((NotHeldError, DoubleFreeError)):
        manager.free_pages("full", [3])
    assert manager.alloc_pages("full", 1).tolist() == [3]
    manager.free_pages("full", [4, 2, 3])
    manager.check()
    assert free(manager) == [4, 5]


def test_freed_pages_wait_for_the_last_planned_step():
    manager = manager_of()
    ids = manager.alloc_pages("full", 2)
    delta = manager.plan()
    manager.free_pages("full", ids)
    assert free(manager) == [4, 6]
    manager.pass_fence(delta.step)
    assert free(manager) == [6, 6]
    manager.alloc_pages("full", 6)
    manager.reset()
    assert free(manager) == [6, 6]
    manager.check()


def test_a_row_never_gets_a_page_that_was_given_out():
    manager = manager_of(full=4)
    taken = set(manager.alloc_pages("full", 2).tolist())
    row = manager.admit(range(8)).row
    assert not taken & set(manager.page_ids(row, "full").tolist())
    with pytest.raises(CapacityError):
        manager.reserve(row, 1)
    assert manager.can_reserve(row, 1) is False
    manager.check()
