"""What a manager does, call by call, on examples small enough to count by hand."""

import pickle
from typing import Any

import numpy as np
import pytest

from pagoda import FullAttention, GatedDelta, LatentAttention, Layout, WindowAttention
from pagoda.errors import (
    AlreadyHeldError,
    ArgumentError,
    CapacityError,
    ConfigError,
    NotHeldError,
    OutOfRangeError,
)
from pagoda.layout import latent
from pagoda.manager import Admitted, Delta, GroupStats, Manager, Pending
from pagoda.tree import Removed, Stored

FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)
LATENT = LatentAttention(entry=latent(16, 8, "bfloat16"))


def window(tokens: int) -> WindowAttention:
    return WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=tokens)


def make(*layers: object, page_tokens: object = 4, pages: int = 20, **given: int) -> Manager:
    layout = Layout(list(layers) or [FULL], page_tokens)
    capacity = {group.name: pages for group in layout.groups}
    return Manager(layout, capacity, **({"num_rows": 6, "max_tokens": 64} | given))


def tokens(n: int, begin: int = 0) -> list[int]:
    return list(range(begin, begin + n))


def plan_missing(manager: Manager, row: int, n: int) -> None:
    """Plans so that n tokens of a row can be committed, in a step that has finished."""
    missing = manager.committed(row) + n - manager.computed(row)
    if missing > 0:
        manager.pass_fence(manager.plan(row, missing).step)


def compute(manager: Manager, row: int, given: list[int], begin: int = 0) -> None:
    """Commits token by token what is given from `begin` on; plans what was not planned yet."""
    plan_missing(manager, row, len(given[begin:]))
    for token in given[begin:]:
        manager.commit(row, token)


def end_step(manager: Manager, rows: Any = (), counts: Any = 1) -> Delta:
    delta = manager.plan(rows, counts)
    manager.pass_fence(delta.step)
    return delta


def cache(manager: Manager, given: list[int], **more: object) -> None:
    """Leaves tokens in the tree, and nothing else."""
    got = manager.admit(given, **more)
    compute(manager, got.row, given, got.hit)
    manager.release(got.row)
    end_step(manager)


def group(manager: Manager, name: str = "full") -> GroupStats:
    return next(it for it in manager.stats().groups if it.name == name)


class Tables:
    """The flat table as a device has it."""

    def __init__(self, manager: Manager) -> None:
        self.shapes = {
            group.name: (manager.num_rows + 1, -(-manager.max_tokens // group.page_tokens))
            for group in manager.layout.paged_groups
        }
        self.flat = np.zeros(sum(rows * pages for rows, pages in self.shapes.values()), dtype=np.int32)

    def apply(self, delta: Delta) -> Delta:
        self.flat[delta.places] = delta.page_ids
        return delta

    def row(self, row: int, name: str = "full") -> list[int]:
        at = 0
        for other, (rows, pages) in self.shapes.items():
            if other == name:
                found: list[int] = self.flat[at + row * pages : at + (row + 1) * pages].tolist()
                return found
            at += rows * pages
        raise AssertionError(name)


# Building


def test_what_a_manager_says_about_itself():
    manager = make(FULL, LATENT, page_tokens={"full": 4, "latent": 6}, num_rows=3, max_tokens=30)
    assert (manager.num_rows, manager.max_tokens, manager.step) == (3, 30, 1)
    assert manager.resume_step == manager.tree.page_tokens == 12
    assert repr(manager) == (
        "Manager(0 of 3 rows running; full: 20 of 20 pages available, latent: 20 of 20 pages available)"
    )
    manager.check()


def test_capacities_of_a_layout_with_states():
    state = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=16, kernel=4)
    layout = Layout([FULL, state])
    for wrong in ({"full": 4}, {"full": 4, "states": 4}, {"checkpoint": 4}):
        with pytest.raises(ConfigError, match="each of full, checkpoint to its number"):
            Manager(layout, wrong, num_rows=1, max_tokens=8)
    with pytest.raises(ConfigError, match="2 rows need as many states, but capacity has 1"):
        Manager(layout, {"full": 4, "checkpoint": 4, "state": 1}, num_rows=2, max_tokens=8)
    with pytest.raises(ConfigError, match="checkpoint_interval"):
        Manager(layout, {"full": 4, "checkpoint": 4}, num_rows=1, max_tokens=8, checkpoint_interval=0)
    manager = Manager(layout, {"full": 4, "checkpoint": 0, "state": 2}, num_rows=2, max_tokens=8)
    assert manager.stats().checkpoints == (0, 0, 0, 0, 0, 0, 0)


def test_sinks_are_refused():
    sinks = WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=8, sink_tokens=4)
    layout = Layout([sinks])
    with pytest.raises(ConfigError, match="sink tokens"):
        Manager(layout, {it.name: 4 for it in layout.groups}, num_rows=1, max_tokens=8)


# Admission


def test_the_first_request_hits_nothing_and_the_second_what_the_first_has_committed():
    manager = make()
    first = manager.admit(tokens(10))
    assert tuple(first) == (first.row, first.hit, first.reserved) == (1, 0, 10)
    assert isinstance(first, Admitted)
    assert group(manager)[2:] == (17, 0, 0, 3, 0)
    assert manager.admit(tokens(10)).hit == 0  # reserved is not computed
    compute(manager, first.row, tokens(9))
    second = manager.admit(tokens(10))
    assert second.hit == 8
    assert (
        manager.page_ids(second.row, "full")[:2].tolist() == manager.page_ids(first.row, "full")[:2].tolist()
    )
    assert group(manager).leased == 2
    manager.check()


def test_at_least_one_token_is_left_to_compute():
    manager = make()
    cache(manager, tokens(8))
    assert manager.admit(tokens(8)).hit == 4
    assert manager.admit(tokens(9)).hit == 8
    assert make(page_tokens=1).admit([5]).hit == 0


def test_reserve_says_how_far_places_go():
    manager = make()
    cache(manager, tokens(8))
    got = manager.admit(tokens(20), reserve=5)
    assert (got.hit, got.reserved) == (8, 13)
    assert len(manager.page_ids(got.row, "full")) == 4
    assert manager.admit(tokens(20), reserve=0).reserved == 8
    more = manager.admit([50], reserve=9)  # more than the prompt: places to decode
    assert (more.hit, more.reserved) == (0, 9)


def test_namespaces_and_extra_keys_share_nothing():
    manager = make()
    cache(manager, tokens(8), namespace=b"a", extra_keys=[(0, 2, b"cat")])
    assert manager.admit(tokens(9)).hit == 0
    assert manager.admit(tokens(9), namespace=b"a").hit == 0
    assert manager.admit(tokens(9), namespace=b"a", extra_keys=[(0, 2, b"dog")]).hit == 0
    assert manager.admit(tokens(9), namespace="a", extra_keys=[(0, 2, "cat")]).hit == 8


def test_the_watermark_is_out_of_reach_of_admit_and_within_that_of_reserve():
    manager = make(pages=5, watermark=2)
    assert not manager.can_admit(tokens(16))
    with pytest.raises(CapacityError, match="2 kept back"):
        manager.admit(tokens(16))
    assert manager.can_admit(tokens(12))
    row = manager.admit(tokens(12)).row
    assert manager.num_reservable(row, 8) == 1
    manager.reserve(row, 8)
    assert group(manager).free == 0


def test_can_admit_counts_the_pages_that_its_own_hit_would_lock():
    """Four pages, all cached and evictable, three of them its own hit: one can be had, not four."""
    manager = make(pages=4)
    cache(manager, tokens(12))
    cache(manager, tokens(4, 100))
    assert group(manager).evictable == 4
    assert not manager.can_admit(tokens(20))  # hit 12, and two more pages
    before = manager.stats()
    with pytest.raises(CapacityError) as caught:
        manager.admit(tokens(20))
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert manager.stats() == before
    assert manager.can_admit(tokens(16))
    got = manager.admit(tokens(16))
    assert (got.hit, group(manager).evictable, group(manager).leased) == (12, 0, 3)
    assert manager.stats().evicted_pages == 1
    manager.check()


def test_an_admission_evicts_the_coldest_first():
    manager = make(pages=4)
    for begin in (0, 100, 200):
        cache(manager, tokens(4, begin))
    cache(manager, tokens(5))  # the first is used again
    manager.admit(tokens(8, 300))
    assert manager.admit(tokens(5), reserve=0).hit == 4
    assert manager.admit(tokens(5, 200), reserve=0).hit == 4
    assert manager.admit(tokens(5, 100), reserve=0).hit == 0


def test_rows_run_out():
    manager = make(num_rows=2)
    manager.admit([1])
    manager.admit([2])
    assert not manager.can_admit([3])
    with pytest.raises(CapacityError, match="rows"):
        manager.admit([3])
    manager.release(1)
    assert not manager.can_admit([3])  # until the step is over
    manager.plan()
    assert not manager.can_admit([3])
    manager.pass_fence(1)
    assert manager.can_admit([3])


def test_an_error_names_the_group_and_changes_nothing():
    layout = Layout([FULL, window(8)], 4)
    manager = Manager(layout, {"full": 10, "window": 2}, num_rows=2, max_tokens=64)
    cache(manager, tokens(4))
    row = manager.admit(tokens(3, 50)).row
    before = manager.stats()
    with pytest.raises(CapacityError) as caught:
        manager.reserve(row, 9)  # two more pages: one is free or evictable
    for words in ("group window", "0 free", "1 evictable", "1 held by running rows", "0 waiting for a fence"):
        assert words in str(caught.value)
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (2, 1, 2)
    assert manager.stats() == before
    assert manager.admit(tokens(5), reserve=0).hit == 4
    manager.check()


def test_an_error_says_who_holds_the_most():
    manager = make(pages=10)
    for n, begin in ((4, 0), (20, 50), (8, 100), (8, 150)):
        manager.admit(tokens(n, begin))
    with pytest.raises(CapacityError, match=r"; rows 2 \(5 pages\), 3 \(2\), 4 \(2\) hold the most\)"):
        manager.reserve(1, 4)
    end_step(manager)
    manager.release([2, 3, 4])
    with pytest.raises(CapacityError, match=r"; row 1 \(1 page\) holds the most\)"):
        manager.reserve(1, 44)
    manager.release(1)
    with pytest.raises(CapacityError, match="0 waiting for a fence\\): 11 wanted, 10 free of 10"):
        manager.admit(tokens(44))


# Growing


def test_reserve_gives_places_one_count_for_all_or_one_each():
    manager = make()
    a, b = (manager.admit([n]).row for n in (1, 2))
    manager.reserve([a, b])
    manager.reserve(np.array([a, b]), 3)
    manager.reserve(np.array([a, b], dtype=np.int32), [0, 4])
    assert manager.reserved([a, b]).tolist() == [5, 9]
    assert [len(manager.page_ids(row, "full")) for row in (a, b)] == [2, 3]
    with pytest.raises(AlreadyHeldError):
        manager.reserve([a, a])


def test_rows_may_be_numbers_of_numpy():
    """What iterating over an array of rows gives, such as that of `fork`."""
    manager = make()
    row = manager.admit(tokens(5)).row
    for child in manager.fork(row, 2):
        manager.reserve(child, np.int64(1))
        manager.release(child)


def test_num_reservable_says_how_many_fit_from_the_first_on():
    manager = make(pages=5)
    rows = [manager.admit([n] * 4).row for n in range(3)]
    for n, fit in ((1, 2), ([0, 1, 8], 2), ([8, 0, 0], 3), ([61, 0, 0], 0)):  # 61: longer than a row gets
        assert manager.num_reservable(rows, n) == fit
        assert manager.can_reserve(rows, n) is (fit == 3)
    assert manager.can_reserve(rows[:2]) is manager.can_reserve([]) is True
    with pytest.raises(CapacityError):
        manager.reserve(rows)
    assert manager.reserved(rows).tolist() == [4, 4, 4]
    manager.reserve(rows[:2])
    assert group(manager).free == 0


def test_one_row_is_asked_about_with_a_number_and_answered_with_one():
    manager = make(FULL, window(4))
    row = manager.admit(tokens(9)).row
    plan_missing(manager, row, 9)
    manager.commit(row, tokens(6))
    for call, n in (
        (manager.reserved, 9),
        (manager.computed, 9),
        (manager.committed, 6),
        (manager.stored, 4),
        (lambda rows: manager.first_pages(rows, "window"), 0),
    ):
        assert type(call(row)) is int
        assert call(row) == n
        for rows in ([row], np.array([row])):
            assert call(rows).dtype == np.int32
            assert call(rows).tolist() == [n]
    assert type(manager.fork(row)) is int
    assert manager.fork(row, 1).dtype == np.int32


def test_commit_takes_one_token_each_or_counts():
    manager = make()
    a, b = (manager.admit([n] * 8).row for n in (1, 2))
    manager.plan([a, b], [8, 8])
    manager.commit([a, b], [1, 2])
    manager.commit([a, b], [1, 1, 1, 2], [3, 1])
    assert manager.committed([a, b]).tolist() == [4, 2]
    assert manager.stored([a, b]).tolist() == [4, 0]
    with pytest.raises(ArgumentError, match="add up"):
        manager.commit([a, b], [1, 1, 1])
    with pytest.raises(ArgumentError, match="4 tokens"):
        manager.commit([b, a], [2, *[1] * 5], [1, 5])
    with pytest.raises(OutOfRangeError):
        manager.commit([a, b], [1, -1])
    with pytest.raises(ArgumentError, match="leave it out for one row"):
        manager.commit(a, [1, 1], [2])
    assert manager.committed([a, b]).tolist() == [4, 2]
    manager.commit(a, [1, 1])  # all of them are one row's
    manager.commit(np.int32(a), 1)
    assert manager.committed([a, b]).tolist() == [7, 2]


def test_duplicates_stay_the_rows_own():
    manager = make()
    tables = Tables(manager)
    a, b = (manager.admit(tokens(6)).row for _ in range(2))
    tables.apply(manager.plan())
    own = tables.row(b)
    compute(manager, a, tokens(6))
    compute(manager, b, tokens(6))
    assert manager.stored([a, b]).tolist() == [4, 4]
    stats = group(manager)
    assert (stats.evictable, stats.leased, stats.running) == (0, 1, 3)
    tables.apply(manager.plan())
    assert tables.row(b) == own  # it goes on reading what it wrote
    manager.release(a)
    end_step(manager)
    stats = group(manager)
    assert (stats.evictable, stats.leased, stats.running) == (0, 1, 1)  # the tree has taken b's page for a's
    tables.apply(manager.plan())
    assert tables.row(b) == own
    manager.check()


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_duplicate_that_is_invalid_never_becomes_the_trees(is_bad: bool):
    manager = make()
    a, b = (manager.admit(tokens(6)).row for _ in range(2))
    compute(manager, a, tokens(6))
    compute(manager, b, tokens(6))
    first, other = (int(manager.page_ids(row, "full")[0]) for row in (a, b))
    assert manager.invalidate("full", [other] if is_bad else []).tolist() == ([b] if is_bad else [])
    manager.release(a)
    end_step(manager)
    cached = [node.columns[0].tolist() for node in manager.tree.nodes() if node.level]
    assert cached == [[first if is_bad else other]]
    assert manager.hit(tokens(6)) == 4
    manager.check()


def test_a_page_that_was_lost_names_nobody_who_computed_its_tokens_again():
    manager = make()
    first = manager.admit(tokens(6)).row
    compute(manager, first, tokens(6))
    lost = int(manager.page_ids(first, "full")[0])
    assert manager.invalidate("full", [lost]).tolist() == [first]
    manager.release(first)
    end_step(manager)
    again = manager.admit(tokens(6))
    assert again.hit == 0
    compute(manager, again.row, tokens(6))
    assert [node.is_lost for node in manager.tree.nodes() if lost in node.columns[0]] == [True]
    assert manager.invalidate("full", [lost]).tolist() == []
    assert manager.hit(tokens(6)) == 4
    manager.check()


def test_a_rollback_keeps_pages_for_what_is_reserved_next():
    manager = make()
    tables = Tables(manager)
    row = manager.admit(tokens(3)).row
    manager.reserve(row, 7)
    tables.apply(manager.plan())
    pages = tables.row(row)
    compute(manager, row, tokens(3))
    with pytest.raises(ArgumentError, match="7 tokens"):
        manager.rollback(row, 8)
    manager.rollback(row, 7)
    assert manager.reserved(row) == 3
    assert group(manager).running == 3
    manager.reserve(row, 9)
    delta = tables.apply(manager.plan())
    assert len(delta.places) == 0
    assert tables.row(row) == pages
    manager.reserve(row, 1)
    assert len(manager.plan().places) == 1


# Ending


def two_rows_that_fill_it() -> Manager:
    """Rows 1 and 2 have committed two pages each, of four; step 1 is taken."""
    manager = make(pages=4, num_rows=2)
    for begin in (0, 100):
        manager.admit(tokens(8, begin))
    manager.plan([1, 2], 8)
    manager.commit([1, 2], [*tokens(8), *tokens(8, 100)], [8, 8])
    return manager


def test_who_preempts_when_nothing_is_in_flight_has_pages_and_row_at_once():
    manager = two_rows_that_fill_it()
    manager.pass_fence(1)
    assert manager.num_reservable(1) == 0
    manager.release(2)
    assert group(manager)[2:] == (0, 2, 2, 0, 0)
    assert manager.num_reservable(1) == 1
    manager.reserve(1)
    assert manager.admit([7]).row == 2
    assert group(manager)[2:] == (0, 0, 2, 2, 0)
    delta = manager.plan()
    assert len(set(delta.places.tolist())) == len(delta.places) == 2
    manager.check()


def test_what_is_freed_waits_for_the_steps_in_flight():
    manager = two_rows_that_fill_it()
    manager.release(2)
    assert group(manager)[2:] == (0, 0, 2, 0, 2)  # cached, and nobody who runs reads them
    assert manager.num_reservable(1) == 0
    with pytest.raises(CapacityError, match="2 leased, 0 held by running rows, 2 waiting for a fence"):
        manager.reserve(1)
    with pytest.raises(CapacityError, match=r"rows \(1 running, 1 waiting for a fence\)"):
        manager.admit([7])
    manager.plan()
    assert not manager.can_admit([7])
    manager.pass_fence(1)
    assert group(manager)[2:] == (0, 2, 2, 0, 0)
    assert manager.admit([7]).row == 2
    with pytest.raises(ArgumentError, match="has not been planned"):
        manager.pass_fence(3)
    manager.pass_fence(1)  # known already
    manager.check()


def test_pages_that_others_lease_too_do_not_wait():
    manager = make(pages=9)
    a, b = (manager.admit(tokens(10)).row for _ in range(2))
    manager.plan([a, b], 10)
    compute(manager, a, tokens(10))
    compute(manager, b, tokens(10))  # two pages it has twice, and leases those of a
    manager.release(a)
    assert group(manager)[2:] == (3, 0, 2, 3, 1)
    manager.release(b)
    assert group(manager)[2:] == (3, 0, 0, 0, 6)
    manager.pass_fence(1)
    assert group(manager)[2:] == (7, 2, 0, 0, 0)


def test_what_the_step_names_waits_for_the_step():
    """A row that got a page in it, and one that only got a place in a page it had."""
    manager = make(pages=6)
    a, b = manager.admit(tokens(4)).row, manager.admit(tokens(3, 50)).row
    end_step(manager)
    manager.reserve([a, b])
    manager.release(a)
    assert group(manager)[2:] == (3, 0, 0, 1, 2)
    manager.release(b)
    assert group(manager)[2:] == (4, 0, 0, 0, 2)
    assert manager.stats().waiting_rows == 1
    manager.plan()
    manager.pass_fence(1)
    assert manager.stats().waiting_rows == 1
    manager.pass_fence(2)
    assert group(manager).free == 6
    assert manager.stats().waiting_rows == 0


def test_an_earlier_fence_may_be_asked_for_after_a_later_one():
    """The first waits for step 2, which names it, the second for step 1: the second is free first."""
    manager = make(FULL, window(8))
    a, b = (manager.admit(tokens(8, begin)).row for begin in (0, 50))
    manager.plan([a, b], 8)
    for row, begin in ((a, 0), (b, 50)):
        compute(manager, row, tokens(8, begin))
    manager.reserve(a)
    manager.release(a)
    manager.release(b)
    assert manager.stats().waiting_rows == 2
    for name in ("full", "window"):
        assert group(manager, name)[2:] == (15, 0, 0, 0, 5)
    manager.pass_fence(1)
    assert manager.stats().waiting_rows == 1
    for name in ("full", "window"):
        assert group(manager, name)[2:] == (15, 2, 0, 0, 3)
    manager.check()
    end_step(manager)
    for name in ("full", "window"):
        assert group(manager, name)[2:] == (16, 4, 0, 0, 0)
    manager.check()


def test_a_row_that_comes_and_goes_in_one_step_is_not_there_for_another():
    manager = make(num_rows=2)
    end_step(manager)
    first = manager.admit(tokens(9)).row
    pages = set(manager.page_ids(first, "full").tolist())
    manager.release(first)
    second = manager.admit(tokens(9, 50)).row
    assert second != first
    assert not pages & set(manager.page_ids(second, "full").tolist())
    assert not manager.can_admit([1])
    delta = manager.plan()
    assert len(set(delta.places.tolist())) == len(delta.places) == 6
    manager.pass_fence(2)
    assert manager.admit([1]).row == first


def test_the_source_of_a_copy_is_nobodys_until_the_step_is_over():
    manager = make(pages=4, num_rows=4)
    parent = manager.admit(tokens(6)).row
    compute(manager, parent, tokens(6))
    end_step(manager)
    source = int(manager.page_ids(parent, "full")[1])
    child = manager.fork(parent)
    manager.release(parent)
    assert group(manager)[2:] == (1, 0, 1, 1, 1)
    other = manager.fork(child)  # what it copies is still where its parent's parent had it
    with pytest.raises(CapacityError):
        manager.admit([9])
    delta = end_step(manager)
    ((sources, targets),) = delta.copies
    assert sources.tolist() == [source] * 2
    assert source not in [*targets.tolist(), *delta.page_ids.tolist()]
    assert manager.admit([9]).row == parent
    assert len({int(manager.page_ids(row, "full")[-1]) for row in (parent, child, other)} | {source}) == 3
    manager.check()


def test_a_cancelled_prefill_leaves_what_was_committed():
    manager = make()
    row = manager.admit(tokens(20)).row
    compute(manager, row, tokens(9))
    manager.release(row)
    with pytest.raises(NotHeldError):
        manager.release(row)
    end_step(manager)
    assert (group(manager).free, group(manager).evictable) == (18, 2)
    assert manager.admit(tokens(20)).hit == 8


# Requests that do not read, or do not store


def test_a_request_that_neither_reads_nor_stores():
    manager = make(FULL, window(4), pages=4)
    cache(manager, tokens(8))
    assert manager.hit(tokens(12)) == 8
    aloof = {"read": False, "store": False}
    assert not manager.can_admit(tokens(20), **aloof)  # five pages
    assert manager.can_admit(tokens(20)) is False  # two are its hit
    with pytest.raises(CapacityError):
        manager.admit(tokens(20), **aloof)
    prompt = [*tokens(4), *tokens(8, 50)]
    got = manager.admit(prompt, **aloof)
    assert (got.hit, got.reserved) == (0, 12)
    assert manager.pending(prompt) is None
    compute(manager, got.row, prompt)
    assert manager.stored(got.row) == 0
    assert manager.first_pages(got.row, "window") == 2
    assert group(manager, "window").running == 1  # those before the window are free
    with pytest.raises(ArgumentError, match=r"not cached.*store=False"):
        manager.fork(got.row)
    manager.check()
    manager.release(got.row)
    assert manager.hit(prompt) == manager.hit(tokens(5)) == 4
    assert all(it.running == it.leased == it.waiting == 0 for it in manager.stats().groups)
    manager.check()


@pytest.mark.parametrize("name", ["read", "store"])
@pytest.mark.parametrize("bad", [None, 1, "yes"])
def test_read_and_store_are_true_or_false(name: str, bad: Any):
    manager = make()
    for call in (manager.admit, manager.can_admit):
        with pytest.raises(ArgumentError, match=f"{name}: give True or False"):
            call([1], **{name: bad})


def test_a_request_that_does_not_read_computes_all_of_it_and_stores_what_is_not_there_yet():
    manager = make()
    cache(manager, tokens(8))
    got = manager.admit(tokens(14), read=False)
    assert (got.hit, len(manager.page_ids(got.row, "full"))) == (0, 4)
    compute(manager, got.row, tokens(14))
    assert manager.stored(got.row) == 12
    assert manager.hit(tokens(20)) == 12
    # Nobody read the two pages that were cached: the tree has taken the row's for them.
    assert group(manager)[2:] == (20 - 4, 0, 3, 1, 0)
    manager.check()
    manager.release(got.row)
    end_step(manager)
    assert group(manager)[2:] == (17, 3, 0, 0, 0)
    manager.check()


def test_a_request_that_does_not_store_reads_and_leaves_nothing():
    manager = make()
    cache(manager, tokens(8))
    got = manager.admit(tokens(14), store=False)
    assert got.hit == 8
    assert manager.pending(tokens(14)) is None
    compute(manager, got.row, tokens(14), 8)
    assert (manager.stored(got.row), manager.committed(got.row)) == (8, 14)
    assert manager.hit(tokens(20)) == 8
    with pytest.raises(ArgumentError, match="tokens are not cached"):
        manager.fork(got.row)
    manager.check()
    manager.release(got.row)
    end_step(manager)
    assert group(manager)[2:] == (18, 2, 0, 0, 0)


@pytest.mark.parametrize(("max_hit", "hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (99, 8)])
def test_max_hit_limits_the_hit(max_hit: int, hit: int):
    manager = make(FULL, window(6))
    cache(manager, tokens(12))
    assert manager.can_admit(tokens(12), max_hit=max_hit)
    got = manager.admit(tokens(12), max_hit=max_hit)
    assert (got.hit, got.reserved) == (hit, 12)
    assert manager.admit(tokens(12), max_hit=max_hit, reserve=1).reserved == hit + 1
    assert manager.admit(tokens(12), max_hit=max_hit, read=False).hit == 0
    manager.check()


def test_tokens_after_max_hit_are_checked_too():
    manager = make()
    for bad, error in ((-1, ArgumentError), ("4", ArgumentError), (2**31, ArgumentError)):
        with pytest.raises(error, match="max_hit"):
            manager.admit([1], max_hit=bad)
    with pytest.raises(OutOfRangeError, match=r"tokens\[4\] = -5 is out of range") as caught:
        manager.admit([1, 2, 3, 4, -5, 6], max_hit=4)
    assert (caught.value.id, caught.value.position) == (-5, 4)
    assert manager.stats().rows == 0


# Forks


def test_a_fork_shares_whole_pages_and_copies_the_half_page():
    manager = make()
    tables = Tables(manager)
    parent = manager.admit(tokens(10)).row
    manager.reserve(parent, 6)
    tables.apply(manager.plan(parent, 10))
    compute(manager, parent, tokens(10))
    children = manager.fork(parent, 2).tolist()
    assert manager.committed(children).tolist() == manager.reserved(children).tolist() == [10, 10]
    delta = tables.apply(manager.plan())
    ((sources, targets),) = delta.copies
    assert sources.tolist() == [tables.row(parent)[2]] * 2
    assert targets.tolist() == [tables.row(child)[2] for child in children]
    for child in children:
        assert tables.row(child)[:2] == tables.row(parent)[:2]
        assert tables.row(child)[3] == 0
    assert len({tables.row(row)[2] for row in (parent, *children)}) == 3
    assert group(manager)[2:] == (20 - 2 - 2 - 2, 0, 2, 4, 0)
    manager.release(parent)
    end_step(manager)
    assert group(manager).leased == 2
    manager.check()


def test_a_fork_of_a_fork_of_the_same_step_copies_what_is_there_before_the_step():
    """Copies of one delta are made at once: no source is another one's target."""
    manager = make()
    parent = manager.admit(tokens(6)).row
    compute(manager, parent, tokens(6))
    manager.plan()
    child = manager.fork(parent)
    manager.fork(child)
    ((sources, targets),) = manager.plan().copies
    assert len(targets) == 2
    assert not set(sources.tolist()) & set(targets.tolist())


def test_a_fork_that_does_not_fit_changes_nothing():
    manager = make(pages=4, num_rows=3)
    parent = manager.admit(tokens(6)).row
    compute(manager, parent, tokens(6))
    end_step(manager)
    with pytest.raises(CapacityError, match="rows"):
        manager.fork(parent, 3)
    with pytest.raises(CapacityError, match="rows"):
        manager.fork(parent, 2**31 - 1)
    manager.admit([9] * 7, reserve=4)
    before = manager.stats()
    with pytest.raises(CapacityError):
        manager.fork(parent, 2)
    assert manager.stats() == before
    assert manager.fork(parent) == 3


# Who computes what


def test_pending_names_who_will_have_computed_most():
    manager = make()
    assert manager.pending(tokens(12)) is None
    row = manager.admit(tokens(16), reserve=10).row
    found = manager.pending(tokens(20))
    assert isinstance(found, Pending)
    assert found == (row, 8)  # whole pages among those with a place
    assert manager.pending(tokens(8)) == (row, 4)
    assert manager.pending([*tokens(6), 99, 99, 99]) == (row, 4)
    assert manager.pending(tokens(20), namespace=b"a") is None
    manager.reserve(row, 6)
    assert manager.pending(tokens(20)) == (row, 16)
    compute(manager, row, tokens(16))
    assert manager.pending(tokens(20)) is None  # it would hit


def test_pending_sees_past_extra_keys_that_come_later():
    manager = make()
    row = manager.admit(tokens(16), extra_keys=[(12, 14, b"cat")]).row
    assert manager.pending(tokens(16), extra_keys=[(12, 14, b"cat")]) == (row, 12)
    assert manager.pending(tokens(10)) == (row, 8)
    assert manager.pending(tokens(16), extra_keys=[(12, 14, b"dog")]) == (row, 12)
    assert manager.pending(tokens(16), extra_keys=[(2, 3, b"cat")]) is None


def test_pending_promises_nothing_that_has_left_a_window():
    """The row has committed all of it, and its first window has gone: waiting would be for ever."""
    layout = Layout([FULL, window(4)], 4)
    manager = Manager(layout, {"full": 20, "window": 5}, num_rows=6, max_tokens=64)
    row = manager.admit(tokens(16)).row
    compute(manager, row, tokens(16))
    end_step(manager)
    manager.admit([99] * 16)  # one page of the window is free: the three that nobody reads go
    assert manager.admit(tokens(10), reserve=0).hit == 0
    assert manager.pending(tokens(10)) is None


def test_hit_is_what_admit_finds():
    manager = make(FULL, window(6))
    cache(manager, tokens(16))
    for prompt in (tokens(20), tokens(16), tokens(9), [99], [*tokens(8), 99, 99]):
        before = manager.stats()
        found = manager.hit(prompt)
        assert manager.stats() == before
        assert manager.admit(prompt, reserve=0).hit == found
    assert manager.hit(tokens(20)) == 16
    assert manager.hit(tokens(20), namespace="other") == 0


def test_pending_promises_nothing_that_went_another_way():
    manager = make()
    row = manager.admit(tokens(16)).row
    compute(manager, row, [99] * 4)
    assert manager.pending(tokens(16)) is None


def test_pending_never_names_a_fork_for_its_parents_prompt():
    """A continuation goes its own way: nobody knows that it will compute the rest of the prompt."""
    manager = make(pages=30)
    row = manager.admit(tokens(16)).row
    compute(manager, row, tokens(6))
    children = manager.fork(row, 2)
    manager.reserve(children, 10)
    assert manager.pending(tokens(20)) == (row, 16)
    manager.release(row)
    assert manager.pending(tokens(20)) is None
    manager.check()


def test_a_prompt_is_kept_until_it_is_computed_or_went_another_way():
    """`check` sees prompts that nobody needs any more."""
    manager = make(pages=30)
    row, other = (manager.admit(tokens(16)).row for _ in range(2))
    compute(manager, row, tokens(6))
    compute(manager, other, [*tokens(6), 99])
    manager.check()
    assert manager.pending(tokens(20)) == (row, 16)
    compute(manager, row, tokens(16), 6)
    assert manager.pending(tokens(20)) is None
    manager.reserve(row)
    compute(manager, row, [16])
    manager.check()


def test_bad_pages_above_and_below_each_other_are_forgotten_once():
    """A page of a prompt and pages of what two others continue it with, the deepest stored first."""
    manager = make(pages=40)
    for more in ([1] * 8, [2] * 8, [3] * 4):
        cache(manager, [*tokens(8), *more])
    cache(manager, [*tokens(8), *[1] * 8, *[4] * 4])
    row = manager.admit([*tokens(8), *[2] * 8, 9]).row
    bad = [node.columns[0][-1] for node in manager.tree.nodes() if len(node.columns[0])]
    assert len(bad) >= 4
    assert manager.invalidate("full", bad).tolist() == [row]
    manager.check()
    assert manager.hit([*tokens(8), *[1] * 8, 9]) in (0, 4)
    manager.release(row)
    end_step(manager)
    manager.check()
    assert group(manager).free + group(manager).evictable == 40


def test_a_copy_of_a_bad_page_is_bad():
    manager = make()
    row = manager.admit(tokens(6)).row
    compute(manager, row, tokens(6))
    child = manager.fork(row)
    grandchild = manager.fork(child)
    bad = manager.page_ids(row, "full")[1:2]  # the half page that was copied
    assert manager.invalidate("full", bad).tolist() == [row, child, grandchild]
    for each in (child, grandchild):
        manager.reserve(each, 6)
        compute(manager, each, tokens(6, 6))
    assert manager.hit(tokens(12)) == 4
    manager.check()


def test_a_run_of_windows_goes_with_its_last_page():
    manager = make(window(6), pages=12)
    cache(manager, [*tokens(8), 1, 1, 1, 1])
    cache(manager, [*tokens(8), 2, 2, 2, 2])
    pages = [id for node in manager.tree.nodes() for id in node.columns[0].tolist() if id > 0]
    manager.invalidate("window", pages)
    assert manager.stats().cached_tokens == 0
    assert group(manager, "window").free == 12
    manager.check()


def test_sizes_that_cannot_be_numbered():
    layout = Layout([FULL, window(9000)], {"full": 16, "window": 4096})
    with pytest.raises(ConfigError, match="capacity of full: at most 524286 pages"):
        Manager(layout, {"full": 700_000, "window": 3}, num_rows=1, max_tokens=64)
    layout = Layout([FULL, window(9000)], {"full": 65_537, "window": 65_536})
    with pytest.raises(ConfigError, match="no common multiple"):
        Manager(layout, {"full": 7, "window": 3}, num_rows=1, max_tokens=64)


# Windows


def test_pages_of_a_window_are_given_up_while_the_request_runs():
    manager = make(FULL, window(6), pages=8)
    row = manager.admit([0]).row
    compute(manager, row, [0])
    for token in range(1, 32):
        manager.reserve(row)
        end_step(manager, row)
        manager.commit(row, token)
        stats = group(manager, "window")
        # A window of 6 lies in three pages at most; the rest is cached, for whoever needs room.
        assert stats.leased + stats.running <= 3
        assert stats.free + stats.evictable >= 5
    assert group(manager).leased == 8
    assert manager.first_pages(row, "window") == (32 - 6 + 1) // 4
    assert manager.page_ids(row, "window")[:6].tolist() == [0] * 6
    manager.check()


def test_pages_that_left_a_window_wait_for_the_steps_in_flight():
    """The next query is at 12: positions 9, 10 and 11 are read, which lie in the third page."""
    for is_in_flight in (False, True):
        manager = make(FULL, window(4), pages=8)
        row = manager.admit(tokens(12)).row
        manager.plan(row, 12)
        if not is_in_flight:
            manager.pass_fence(1)
        compute(manager, row, tokens(12))
        assert group(manager, "window")[2:] == ((5, 0, 1, 0, 2) if is_in_flight else (5, 2, 1, 0, 0))
        manager.pass_fence(1)
        assert group(manager, "window")[2:] == (5, 2, 1, 0, 0)
        manager.check()


@pytest.mark.parametrize("how", ["drop", "invalidate"])
@pytest.mark.parametrize("is_over", [False, True])
def test_pages_of_a_window_that_nobody_finds_go_first(how: str, is_over: bool):
    """Of a prompt of 16 tokens, what resumes at 8 reads the first two pages, and at 16 the last two."""
    manager = Manager(Layout([FULL, window(8)], 4), {"full": 30, "window": 8}, num_rows=4, max_tokens=64)
    live, dead = tokens(16), tokens(16, 100)
    cache(manager, live, namespace=b"live")
    row = manager.admit(dead, namespace=b"dead").row
    compute(manager, row, dead)
    end_step(manager)
    if how == "drop":
        manager.drop(b"dead")
    else:
        assert manager.invalidate("full", manager.page_ids(row, "full")[:1]).tolist() == [row]
    manager.check()
    if is_over:
        manager.release(row)
    # The dead have four pages, of which a row that still runs reads two.
    new = manager.admit(tokens(16 if is_over else 8, 200))
    manager.check()
    assert manager.hit([*live[:8], 99], namespace=b"live") == 8
    assert manager.hit([*live, 99], namespace=b"live") == 16
    manager.reserve(new.row, 4)  # one page more: now the coldest of the living goes
    assert manager.hit([*live[:8], 99], namespace=b"live") == 0
    assert manager.hit([*live, 99], namespace=b"live") == 16
    manager.check()


@pytest.mark.parametrize("layers", [[FULL, window(4)], [window(4), FULL], [window(4)], [FULL, window(9)]])
@pytest.mark.parametrize("count", [3, 5, 7, 11, 15, 30])
def test_a_chunk_that_ends_inside_a_page_is_stored(layers: list[object], count: int):
    """What the tree takes has to be protected, whatever the window has left behind by then."""
    manager = make(*layers, pages=12)
    row = manager.admit(tokens(40)).row
    manager.plan(row, 40)  # and its step is still running
    for begin in range(0, 40, count):
        part = tokens(40)[begin : begin + count]
        manager.commit(row, part)
        committed = begin + len(part)
        assert manager.stored(row) == committed // 4 * 4
        manager.check()
        assert all(it.evictable == 0 for it in manager.stats().groups)


def test_a_hit_ends_where_the_window_can_resume():
    layout = Layout([FULL, window(6)], 4)
    manager = Manager(layout, {"full": 20, "window": 6}, num_rows=6, max_tokens=64)
    cache(manager, tokens(16))
    # At 16, positions 11 … 15 are read: pages 2 and 3. Those before are there too, until somebody needs them.
    got = manager.admit(tokens(20))
    assert got.hit == 16
    assert manager.page_ids(got.row, "window")[:2].tolist() == [0, 0]
    assert (manager.page_ids(got.row, "window")[2:] > 0).all()
    again = manager.admit([*tokens(14), 99, 99, 99], reserve=0)
    assert again.hit == 12
    manager.release(again.row)
    end_step(manager)
    manager.admit([98] * 8)  # 2 pages, and one is free: the coldest goes, which is the first of all
    assert manager.admit([*tokens(9), 99, 99], reserve=0).hit == 0  # at 8, positions 3 … 7 are read
    assert manager.admit([*tokens(14), 99, 99, 99], reserve=0).hit == 12
    assert manager.admit(tokens(20), reserve=0).hit == 16
    manager.check()


def test_a_window_that_another_request_leases_is_kept():
    manager = make(FULL, window(6))
    row = manager.admit(tokens(8)).row
    compute(manager, row, tokens(8))
    other = manager.admit([*tokens(8), 99])
    assert other.hit == 8
    manager.reserve(row, 12)
    compute(manager, row, tokens(12, 8))
    assert manager.admit([*tokens(8), 98], reserve=0).hit == 8
    manager.check()


def test_groups_with_pages_of_their_own_size():
    manager = make(FULL, window(9), page_tokens={"full": 4, "window": 8})
    assert manager.resume_step == 8
    cache(manager, tokens(16))
    got = manager.admit(tokens(18))
    assert got.hit == 16
    assert [len(manager.page_ids(got.row, name)) for name in ("full", "window")] == [5, 3]
    manager.check()


# Duplicates: a row keeps what it wrote of a page that another row had stored first


def duplicates(num_rows: int = 2, **given: int) -> tuple[Manager, list[int]]:
    """Rows 1 … num_rows have computed the same 8 tokens, all of them read by a window of 8; the tree has the
    pages of row 1. Then row 1 computes 8 more and leaves its first two pages, which nobody reads now."""
    layout = Layout([FULL, window(8)], 4)
    manager = Manager(layout, {"full": 40, "window": given.get("pages", 12)}, num_rows=6, max_tokens=64)
    rows = [manager.admit(tokens(8), reserve=8).row for _ in range(num_rows)]
    for row in rows:
        compute(manager, row, tokens(8))
    manager.reserve(1, 8)
    compute(manager, 1, [*tokens(16)], 8)
    end_step(manager)
    assert group(manager, "window").evictable == 2
    assert manager.hit([*tokens(8), 99]) == 8
    return manager, rows


def use_up(manager: Manager, name: str = "window") -> int:
    """Takes every page of a window that can be had, and gives back the row that has them."""
    available = group(manager, name).free + group(manager, name).evictable
    return manager.admit([77] * (4 * available), read=False, store=False).row


def test_a_duplicate_fills_the_hole_that_eviction_leaves():
    manager, (_, b) = duplicates()
    own = manager.page_ids(b, "window").tolist()
    before = group(manager, "window")
    assert (before.free, before.evictable, before.running) == (12 - 6, 2, 2)
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 8  # the pages of the second row are the tree's now
    after = group(manager, "window")
    assert (after.free, after.evictable, after.leased, after.running) == (0, 0, 4, 8)
    assert manager.page_ids(b, "window").tolist() == own
    got = manager.admit([*tokens(8), 99], reserve=0)
    assert manager.page_ids(got.row, "window").tolist() == own
    manager.check()


def test_the_tree_keeps_what_was_a_duplicate_when_its_row_ends():
    manager, (a, b) = duplicates()
    big = use_up(manager)
    manager.release([b, big])
    end_step(manager)
    assert manager.hit([*tokens(8), 99]) == 8
    assert group(manager, "window").evictable == 2
    manager.release(a)
    manager.check()


def test_of_several_duplicates_one_is_enough():
    """Each takes the place of the one before when that has been evicted."""
    manager, (_, b, c, d) = duplicates(4, pages=20)
    left = {b, c, d}
    while left:
        taken = use_up(manager)
        assert manager.hit([*tokens(8), 99]) == 8
        holder = manager.admit([*tokens(8), 99], reserve=0).row
        pages = manager.page_ids(holder, "window").tolist()
        (owner,) = [row for row in left if manager.page_ids(row, "window").tolist() == pages]
        manager.check()
        manager.release([taken, holder])
        end_step(manager)
        # It moves past its pages: they can be evicted, and another one's fill the hole.
        manager.reserve(owner, 8)
        compute(manager, owner, tokens(8, 8))
        end_step(manager)
        left.remove(owner)
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 0
    manager.check()


def test_a_duplicate_of_a_row_that_ended_fills_nothing():
    manager, (_, b) = duplicates()
    manager.release(b)
    end_step(manager)
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 0
    manager.check()


def test_a_duplicate_that_left_the_window_fills_nothing():
    manager, (_, b) = duplicates()
    manager.reserve(b, 8)
    compute(manager, b, tokens(8, 50))
    end_step(manager)
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 0
    manager.check()


@pytest.mark.parametrize("who_ends", ["parent", "child"])
def test_the_copy_of_a_duplicate_is_one_too(who_ends: str):
    manager, (_, b) = duplicates(pages=16)
    child = manager.fork(b)
    assert set(manager.page_ids(child, "window")).isdisjoint(manager.page_ids(b, "window"))
    end_step(manager)
    ends, stays = (b, child) if who_ends == "parent" else (child, b)
    manager.release(ends)
    end_step(manager)
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 8
    got = manager.admit([*tokens(8), 99], reserve=0).row
    assert manager.page_ids(got, "window").tolist() == manager.page_ids(stays, "window").tolist()
    manager.check()


@pytest.mark.parametrize("which", ["duplicate", "original"])
def test_a_duplicate_of_something_bad_fills_nothing(which: str):
    manager, (a, b) = duplicates()
    if which == "duplicate":
        bad = manager.page_ids(b, "window")[:1]
        assert manager.invalidate("window", bad).tolist() == [b]
        assert manager.hit([*tokens(8), 99]) == 8  # the tree's own is good
        use_up(manager)
        assert manager.hit([*tokens(8), 99]) == 0
    else:
        bad = [int(node.columns[1][0]) for node in manager.tree.nodes() if len(node.columns[1])][:1]
        assert set(manager.invalidate("window", bad).tolist()) >= {a}
        assert manager.hit([*tokens(8), 99]) == 0
        use_up(manager)
        assert manager.hit([*tokens(8), 99]) == 0
    manager.check()
    manager.release([a, b])
    end_step(manager)
    manager.check()


def test_a_duplicate_in_a_dropped_namespace_fills_nothing():
    manager, (a, b) = duplicates()
    manager.drop(b"")
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 0
    manager.check()
    manager.release([a, b])
    end_step(manager)
    manager.check()


def test_a_row_that_does_not_read_holds_a_duplicate_too():
    layout = Layout([FULL, window(8)], 4)
    manager = Manager(layout, {"full": 40, "window": 6}, num_rows=6, max_tokens=64)
    cache(manager, tokens(8))
    row = manager.admit(tokens(9), read=False).row
    compute(manager, row, tokens(8))
    end_step(manager)
    use_up(manager)
    assert manager.hit([*tokens(8), 99]) == 8
    manager.check()


# Steps and deltas


def test_a_plan_computes_reserved_tokens_and_the_delta_says_which():
    manager = make(FULL, window(6))
    a, b, c = (manager.admit(tokens(n, 50 * n)).row for n in (10, 6, 3))
    delta = manager.plan([c, a], [3, 4])
    assert (delta.step, delta.num_tokens) == (1, 7)
    assert delta.rows.tolist() == [c, a]
    assert delta.lengths.tolist() == [3, 4]
    assert delta.counts.tolist() == [3, 4]
    assert delta._section("starts").tolist() == [0, 3, 7]
    assert manager.computed([a, b, c]).tolist() == [4, 0, 3]
    assert manager.reserved([a, b, c]).tolist() == [10, 6, 3]
    assert manager.committed([a, b, c]).tolist() == [0, 0, 0]
    delta = manager.plan(np.array([a, b]), 6)  # before anything is known of the step before
    assert (delta.rows.tolist(), delta.lengths.tolist(), delta.counts.tolist()) == ([a, b], [10, 6], [6, 6])
    delta = manager.plan([a, c], 0)  # a row may be named that computes nothing
    assert (delta.rows.tolist(), delta.lengths.tolist(), delta.num_tokens) == ([a, c], [10, 3], 0)
    manager.reserve(c)
    delta = manager.plan(c)
    assert (delta.rows.tolist(), delta.lengths.tolist(), delta.counts.tolist()) == ([c], [4], [1])
    assert manager.step == 5
    manager.check()


def test_a_plan_without_rows_carries_what_changed_and_computes_nothing():
    manager = make()
    row = manager.admit(tokens(9)).row
    delta = manager.plan()
    assert (len(delta.rows), len(delta.lengths), len(delta.counts), delta.num_tokens) == (0, 0, 0, 0)
    assert len(delta.places) == len(delta.page_ids) == 3
    assert manager.computed(row) == 0
    assert len(manager.plan(row, 9).places) == 0


def test_a_plan_that_is_refused_changes_nothing():
    manager = make()
    a, b = (manager.admit(tokens(6, begin)).row for begin in (0, 50))
    manager.reserve(a, 2)
    for call, error, words in (
        (lambda: manager.plan([b, a], [6, 9]), ArgumentError, "has 8 tokens reserved and not computed"),
        (lambda: manager.plan([a, b], 7), ArgumentError, "cannot plan 7; reserve them first"),
        (lambda: manager.plan([a, b], [1, -1]), ArgumentError, "counts"),
        (lambda: manager.plan([a, b], [1]), ArgumentError, "1 entries for 2 rows"),
        (lambda: manager.plan(a, -1), ArgumentError, "counts"),
        (lambda: manager.plan([a, b, a]), AlreadyHeldError, "is duplicated"),
        (lambda: manager.plan([a, 0]), OutOfRangeError, "out of range"),
        (lambda: manager.plan([a, 5]), NotHeldError, "not running"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert (manager.step, manager.computed([a, b]).tolist()) == (1, [0, 0])
    delta = manager.plan([a, b], [8, 6])
    assert (delta.step, len(delta.places)) == (1, 4)
    with pytest.raises(ArgumentError, match="has 0 tokens reserved and not computed"):
        manager.plan(a)


def test_no_more_is_committed_than_was_planned():
    manager = make()
    row = manager.admit(tokens(8)).row
    with pytest.raises(ArgumentError, match="has 0 tokens computed and not committed: cannot commit 1; plan"):
        manager.commit(row, 0)
    manager.plan(row, 5)
    with pytest.raises(ArgumentError, match="has 5 tokens computed and not committed: cannot commit 6"):
        manager.commit(row, tokens(6))
    assert (manager.committed(row), manager.stored(row)) == (0, 0)
    manager.commit(row, tokens(5))
    assert (manager.computed(row), manager.committed(row), manager.stored(row)) == (5, 5, 4)


def test_a_rollback_takes_back_what_was_computed():
    """Look-ahead tokens that turned out wrong are planned again."""
    manager = make()
    a, b = (manager.admit(tokens(6, begin)).row for begin in (0, 50))
    manager.plan([a, b], [6, 2])
    manager.commit(a, tokens(3))
    manager.rollback([a, b], [2, 3])
    assert manager.reserved([a, b]).tolist() == [4, 3]
    assert manager.computed([a, b]).tolist() == [4, 2]  # b has given up places only
    with pytest.raises(ArgumentError, match="has 1 tokens reserved and not committed: cannot roll back 2"):
        manager.rollback(a, 2)
    manager.rollback(a, 1)
    assert (manager.computed(a), manager.committed(a)) == (3, 3)
    manager.reserve(a, 2)
    delta = manager.plan(a, 2)
    assert (delta.lengths.tolist(), delta.counts.tolist(), len(delta.places)) == ([5], [2], 0)
    manager.commit(a, [97, 98])
    assert manager.hit([*tokens(3), 97, 0]) == 4


def test_a_fork_continues_what_is_committed_and_plans_for_itself():
    manager = make()
    row = manager.admit(tokens(9)).row
    manager.plan(row, 9)
    manager.commit(row, tokens(6))
    child = manager.fork(row)
    assert (manager.computed(child), manager.committed(child), manager.reserved(child)) == (6, 6, 6)
    manager.reserve(child, 2)
    delta = manager.plan([child, row], [2, 0])
    assert (delta.lengths.tolist(), delta.counts.tolist()) == ([8, 9], [2, 0])


def test_a_delta_of_many_decoding_rows_is_a_few_hundred_bytes():
    """256 rows, pages of 16 tokens: 16 rows a step begin a page, each a place and an id of 4 bytes."""
    manager = make(page_tokens=16, pages=600, num_rows=256, max_tokens=64)
    rows = []
    for n in range(256):
        rows.append(manager.admit([n] * (1 + n % 16)).row)
    manager.plan()
    for _ in range(20):
        manager.reserve(rows)
        delta = manager.plan()
        assert len(delta.places) == 16
        assert delta.num_bytes < 300


def test_a_delta_can_be_pickled_and_compared():
    manager = make(FULL, window(8))
    row = manager.admit(tokens(6)).row
    compute(manager, row, tokens(6))
    child = manager.fork(row)
    manager.reserve(child, 3)
    delta = manager.plan([row, child], [0, 2])
    again = pickle.loads(pickle.dumps(delta))
    assert again == delta
    assert again.step == delta.step == 2
    assert again.num_groups == 2
    for name in ("rows", "lengths", "counts", "page_ids"):
        assert getattr(again, name).tolist() == getattr(delta, name).tolist()
    assert again.places.tolist() == delta.places.tolist()
    assert [it[0].tolist() for it in again.copies] == [it[0].tolist() for it in delta.copies]
    assert delta != manager.plan()
    assert "writes" in repr(delta)
    assert delta.places.dtype == delta.page_ids.dtype == delta.packed.dtype == np.int32


def test_a_delta_has_each_place_once_and_an_empty_step_is_empty():
    manager = make(num_rows=2)
    row = manager.admit(tokens(9)).row
    manager.rollback(row, 9)
    manager.reserve(row, 12)
    delta = manager.plan()
    assert len(set(delta.places.tolist())) == len(delta.places) == 3
    empty = manager.plan()
    assert (empty.step, len(empty.places)) == (2, 0)
    assert empty.num_bytes < 40


# The rest


def test_reset_forgets_everything():
    manager = make()
    cache(manager, tokens(8))
    row = manager.admit(tokens(12)).row
    manager.fork(row)
    manager.release(row)
    manager.reset()
    fresh = make()
    assert manager.stats() == fresh.stats()
    assert manager.step == 1
    assert manager.plan() == fresh.plan()
    assert manager.admit(tokens(12)).hit == 0
    with pytest.raises(NotHeldError):
        manager.release(2)
    manager.check()


def test_reset_is_refused_while_a_step_may_be_running():
    manager = make(FULL, window(6))
    cache(manager, tokens(8))
    row = manager.admit(tokens(12)).row
    manager.plan(row, 4)
    manager.reserve(row, 8)
    manager.plan(row, 8)
    before = manager.stats(), manager.tree.counts(), manager.computed(row)
    with pytest.raises(ArgumentError, match=r"steps 3 to 4 may still be running: call pass_fence\(4\)"):
        manager.reset()
    manager.pass_fence(3)
    with pytest.raises(ArgumentError, match="steps 4 to 4"):
        manager.reset()
    assert (manager.stats(), manager.tree.counts(), manager.computed(row)) == before
    assert manager.step == 5
    assert manager.hit(tokens(12)) == 8
    manager.check()
    manager.pass_fence(4)
    manager.reset()
    assert (manager.step, manager.stats().rows, manager.hit(tokens(12))) == (1, 0, 0)


def test_listeners_hear_what_is_stored_and_removed():
    manager, events = make(pages=3), []
    manager.tree.listen(events.append)
    row = manager.admit(tokens(6), namespace=b"a").row
    compute(manager, row, tokens(6))
    (stored,) = events
    assert isinstance(stored, Stored)
    assert (stored.namespace, stored.position, stored.parent) == (b"a", 0, None)
    assert stored.tokens.tolist() == tokens(4)
    assert stored.columns[0].tolist() == manager.page_ids(row, "full")[:1].tolist()
    manager.release(row)
    end_step(manager)
    events.clear()
    manager.admit(tokens(12, 50))
    (removed,) = events
    assert isinstance(removed, Removed)
    assert removed.tokens.tolist() == tokens(4)
    manager.tree.unlisten(events.append)
    manager.reset()
    assert len(events) == 1


def test_nodes_show_the_tree():
    manager = make()
    cache(manager, tokens(8))
    (node,) = [it for it in manager.tree.nodes() if len(it.tokens)]
    assert node.tokens.tolist() == tokens(8)


def test_stats_count_hits():
    manager = make()
    cache(manager, tokens(8))
    manager.admit(tokens(12))
    stats = manager.stats()
    assert (stats.admitted, stats.admitted_tokens, stats.hit_tokens, stats.cached_tokens) == (2, 20, 8, 8)
    assert (stats.rows, stats.waiting_rows, stats.num_rows) == (1, 0, 6)


@pytest.mark.parametrize("n", range(12, 21))
@pytest.mark.parametrize("size", [4, 6, 9])
def test_a_conversation_that_ends_inside_a_page_is_hit_up_to_its_last_whole_page(n: int, size: int):
    """Whether a prompt is found again must not depend on how far its last page was filled."""
    manager = make(FULL, window(size))
    cache(manager, tokens(n))
    assert manager.admit(tokens(30)).hit == n // 4 * 4


def test_fences_count_anew_after_a_reset():
    manager = make()
    for _ in range(9):
        end_step(manager)
    manager.reset()
    manager.release(manager.admit(tokens(5)).row)
    assert (group(manager).free, group(manager).waiting, manager.stats().waiting_rows) == (18, 2, 1)
    end_step(manager)
    assert group(manager).free == 20


# What is bad or unwanted


def test_invalidate_names_who_reads_and_nobody_finds_it():
    manager = make()
    cache(manager, tokens(12))
    reader = manager.admit(tokens(13)).row
    other = manager.admit([*tokens(4), 99, 99]).row
    bad = int(manager.page_ids(reader, "full")[1])
    assert manager.invalidate("full", [bad]).tolist() == [reader]
    assert manager.admit(tokens(13), reserve=0).hit == 4
    compute(manager, reader, [12])
    manager.reserve(reader, 8)
    compute(manager, reader, tokens(8, 13))
    assert manager.admit(tokens(22), reserve=0).hit == 4  # nor what continues it
    with pytest.raises(ArgumentError, match="cannot be forked, because its tokens are not cached"):
        manager.fork(reader)
    compute(manager, other, [99, 99])
    manager.check()
    manager.release([reader, other])
    end_step(manager)
    manager.check()
    stats = group(manager)
    assert stats.free + stats.evictable + stats.leased == 20
    assert stats.waiting == stats.running == 0


def test_what_a_row_stored_after_a_bad_duplicate_is_not_found():
    manager = make()
    a, b = (manager.admit(tokens(9)).row for _ in range(2))
    compute(manager, a, tokens(9))
    compute(manager, b, tokens(9))
    manager.reserve(b, 8)
    compute(manager, b, tokens(8, 9))
    reader = manager.admit(tokens(18)).row
    assert manager.hit(tokens(18)) == 16
    assert manager.invalidate("full", manager.page_ids(b, "full")[:1]).tolist() == [b, reader]
    assert manager.hit(tokens(18)) == 8  # the pages of a are good
    manager.check()


def test_invalidate_names_who_has_moved_past_a_bad_page():
    """What it computed behind the page depends on it, though its window no longer reads it."""
    manager = make(FULL, window(4))
    cache(manager, tokens(8))
    row = manager.admit([*tokens(8), *tokens(12, 50)]).row
    other = manager.admit(tokens(9, 100)).row
    bad = manager.page_ids(row, "window")[1:2]
    assert bad[0] > 0
    compute(manager, row, tokens(12, 50))
    end_step(manager)
    assert bad[0] not in manager.page_ids(row, "window")
    assert manager.invalidate("window", bad).tolist() == [row]
    assert manager.hit([*tokens(8), *tokens(12, 50), 0]) == 4  # nor what it stored behind it
    compute(manager, other, tokens(9, 100))
    manager.check()


def test_invalidate_names_copies_of_copies_also_once_the_first_is_stored():
    manager = make()
    row = manager.admit(tokens(6)).row
    compute(manager, row, tokens(6))
    child = manager.fork(row)
    end_step(manager)
    manager.reserve(child, 5)
    compute(manager, child, tokens(5, 6))  # the copy is a whole page now, and the tree's
    grandchild = manager.fork(child)
    assert manager.stored(grandchild) == 8
    stranger = manager.admit(tokens(6, 50)).row
    bad = manager.page_ids(row, "full")[1:2]
    assert manager.invalidate("full", bad).tolist() == [row, child, grandchild]
    assert manager.hit([*tokens(11), 0]) == 4
    compute(manager, stranger, tokens(6, 50))
    assert manager.stored(stranger) == 4
    manager.check()


def test_invalidate_does_not_name_rows_of_an_earlier_drop():
    manager = make(FULL, window(4))
    cache(manager, tokens(8), namespace=b"a")
    dropped = manager.admit(tokens(12), namespace=b"a").row
    manager.drop(b"a")
    cache(manager, tokens(8), namespace=b"a")
    fresh = manager.admit(tokens(12), namespace=b"a").row
    end_step(manager)
    bad = manager.page_ids(fresh, "full")[:1]
    assert manager.invalidate("full", bad).tolist() == [fresh]
    assert manager.invalidate("full", bad).tolist() == [fresh]  # it still reads it
    assert manager.invalidate("full", manager.page_ids(dropped, "full")[:1]).tolist() == [dropped]
    manager.check()


def test_invalidate_names_a_row_that_has_not_stored_anything():
    manager = make()
    row = manager.admit(tokens(6), store=False).row
    compute(manager, row, tokens(6))
    assert manager.invalidate("full", manager.page_ids(row, "full")[1:]).tolist() == [row]
    manager.check()


def test_invalidate_frees_what_nobody_reads_at_once():
    manager = make()
    cache(manager, tokens(12))
    assert manager.invalidate("full", [2]).tolist() == []
    assert (group(manager).free, group(manager).evictable) == (19, 1)
    assert manager.invalidate("full", []).tolist() == []
    assert manager.invalidate("full", [15, 15]).tolist() == []  # holds nothing
    for bad in ([0], [21], [-1]):
        with pytest.raises(OutOfRangeError):
            manager.invalidate("full", bad)
    with pytest.raises(ArgumentError):
        manager.invalidate("window", [1])
    assert manager.admit(tokens(12)).hit == 4
    manager.check()


def test_drop_forgets_a_namespace():
    manager = make()
    for space in (b"a", b"b"):
        cache(manager, tokens(8), namespace=space)
    assert manager.namespaces() == manager.tree.namespaces() == [b"a", b"b"]
    row = manager.admit(tokens(12), namespace=b"a").row
    manager.drop(b"a")
    assert manager.namespaces() == [b"b"]
    assert manager.admit(tokens(12), namespace=b"a", reserve=0).hit == 0
    assert manager.admit(tokens(12), namespace=b"b", reserve=0).hit == 8
    compute(manager, row, tokens(4, 8))
    assert manager.pending(tokens(20), namespace=b"a") is None
    manager.release(row)
    end_step(manager)
    assert manager.admit(tokens(13), namespace=b"a", reserve=0).hit == 0
    manager.drop(b"nobody")
    manager.drop("b")
    assert manager.admit(tokens(12), namespace=b"b", reserve=0).hit == 0
    manager.check()


def test_a_watermark_that_leaves_nothing_is_refused():
    layout = Layout([FULL], 4)
    with pytest.raises(ConfigError, match="watermark: 8 pages leave none of the 8 of group full"):
        Manager(layout, {"full": 8}, num_rows=2, max_tokens=16, watermark=8)
    Manager(layout, {"full": 8}, num_rows=2, max_tokens=16, watermark=7)
