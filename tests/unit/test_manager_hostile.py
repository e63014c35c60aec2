"""What a hostile caller tries on a manager: bad input everywhere, calls inside calls, objects nobody made."""

import contextlib
import copy
import gc
import pickle
import random
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import FullAttention, Layout, WindowAttention
from pagoda.errors import (
    AlreadyHeldError,
    ArgumentError,
    CapacityError,
    ConfigError,
    NotHeldError,
    OutOfRangeError,
    PagodaError,
)
from pagoda.manager import Delta, Manager

FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)
WINDOW = WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=6)


def name_of(value: object) -> str:
    """A test's name, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:80]


def make(*layers: Any, pages: int = 20, **given: int) -> Manager:
    layout = Layout(list(layers) or [FULL], 4)
    capacity = {group.name: pages for group in layout.groups}
    return Manager(layout, capacity, **({"num_rows": 6, "max_tokens": 64} | given))


def finish_step(manager: Manager, rows: Any = (), counts: Any = 1) -> Delta:
    delta = manager.plan(rows, counts)
    manager.pass_fence(delta.step)
    return delta


def full_cache(manager: Manager, num_prompts: int, n: int = 4) -> None:
    """Leaves prompts in the tree, each n tokens of one kind."""
    for token in range(num_prompts):
        row = manager.admit([token] * n).row
        finish_step(manager, row, n)
        manager.commit(row, [token] * n)
        manager.release(row)
        finish_step(manager)


@pytest.fixture
def manager() -> Manager:
    """Row 1 has 6 tokens computed, 5 of them committed; row 2 has one computed and none committed."""
    made = make()
    made.admit([0, 1, 2, 3, 4, 5])
    made.plan(1, 6)
    made.commit(1, [0, 1, 2, 3, 4])
    made.admit([9])
    made.plan(2)
    return made


def refuses(manager: Manager, error: Any, call: Callable[[], object]) -> None:
    """It raises that error, and nothing has changed: counts, lengths, what is cached, the delta."""

    def seen() -> object:
        nodes = [(it.tokens.tolist(), [ids.tolist() for ids in it.columns]) for it in manager.tree.nodes()]
        calls = (manager.reserved, manager.computed, manager.committed, manager.stored)
        lengths = [call([1, 2]).tolist() for call in calls]
        return manager.stats(), manager.step, nodes, lengths

    before = seen()
    with pytest.raises(error):
        call()
    assert seen() == before
    manager.check()
    delta = manager.plan()
    assert len(delta.places) == sum(len(sources) for sources, _ in delta.copies) == 0
    assert len(delta.rows) == 0


NO_ARRAYS = [
    None,
    5.0,
    "12",
    b"12",
    {1: 2},
    object(),
    [1.0],
    [[1]],
    [None],
    ["1"],
    np.array([[1, 2]]),
    np.array([1.0]),
    np.array([1], dtype=np.uint32),
    np.array([1], dtype=np.int16),
    np.array([True]),
    np.array([1], dtype=">i4"),
    np.arange(8)[::2],
    torch.tensor([[1]]),
    torch.tensor([1.0]),
    [2**31],
    [2**70],
    np.array([2**40]),
]


@pytest.mark.parametrize("bad", NO_ARRAYS, ids=name_of)
def test_arrays_that_are_none(manager: Manager, bad: Any):
    for call in (
        lambda: manager.admit(bad),
        lambda: manager.can_admit(bad),
        lambda: manager.pending(bad),
        lambda: manager.reserve(bad),
        lambda: manager.reserve([1, 2], bad),
        lambda: manager.can_reserve(bad),
        lambda: manager.can_reserve([1, 2], bad),
        lambda: manager.num_reservable(bad),
        lambda: manager.num_reservable([1, 2], bad),
        lambda: manager.plan(bad),
        lambda: manager.plan([1, 2], bad),
        lambda: manager.commit(bad, [1]),
        lambda: manager.commit(1, bad),
        lambda: manager.rollback(bad, 0),
        lambda: manager.rollback([1, 2], bad),
        lambda: manager.release(bad),
        lambda: manager.reserved(bad),
        lambda: manager.computed(bad),
        lambda: manager.committed(bad),
        lambda: manager.stored(bad),
        lambda: manager.first_pages(bad, "full"),
        lambda: manager.invalidate("full", bad),
    ):
        refuses(manager, ArgumentError, call)


@pytest.mark.parametrize("bad", NO_ARRAYS[1:], ids=name_of)
def test_counts_of_a_commit_that_are_none(manager: Manager, bad: Any):
    refuses(manager, ArgumentError, lambda: manager.commit([1, 2], [1, 1], bad))


@pytest.mark.parametrize("bad", [None, 1.5, "1", [1], 2**70, -(2**70)], ids=name_of)
def test_numbers_that_are_none(manager: Manager, bad: Any):
    for call in (
        lambda: manager.fork(bad),
        lambda: manager.pass_fence(bad),
        lambda: manager.page_ids(bad, "full"),
    ):
        refuses(manager, ArgumentError, call)
    if bad is not None:
        refuses(manager, ArgumentError, lambda: manager.admit([1], reserve=bad))
        refuses(manager, ArgumentError, lambda: manager.can_admit([1], reserve=bad))
        refuses(manager, ArgumentError, lambda: manager.admit([1], max_hit=bad))
        refuses(manager, ArgumentError, lambda: manager.can_admit([1], max_hit=bad))
        refuses(manager, ArgumentError, lambda: manager.fork(1, bad))


def test_numbers_out_of_range(manager: Manager):
    for n in (0, -1):
        refuses(manager, ArgumentError, lambda n=n: manager.fork(1, n))
    for call in (
        lambda: manager.admit([1], reserve=-1),
        lambda: manager.admit([1], max_hit=-1),
        lambda: manager.plan(1, -1),
        lambda: manager.plan(1, 1),
        lambda: manager.plan([1, 2], [0, 1]),
        lambda: manager.plan([1, 2], [0, 2**31 - 1]),
        lambda: manager.plan([1, 2], [0]),
        lambda: manager.plan([1, 2], [0, -1]),
        lambda: manager.commit(1, [5, 5]),
        lambda: manager.commit(1, [5], [1]),
        lambda: manager.commit(1, [5], 1),
        lambda: manager.admit([1], reserve=2**31 - 1),
        lambda: manager.admit([1], reserve=65),
        lambda: manager.admit([]),
        lambda: manager.pending([]),
        lambda: manager.admit([1] * 65),
        lambda: manager.reserve(1, -1),
        lambda: manager.reserve([1, 2], [1, -1]),
        lambda: manager.reserve(1, 2**31 - 1),
        lambda: manager.reserve([1, 2], [1, 2**31 - 1]),
        lambda: manager.reserve([1, 2], [1]),
        lambda: manager.rollback(1, 2),
        lambda: manager.rollback([1, 2], [1, -1]),
        lambda: manager.rollback([1, 2], [1, 2]),
        lambda: manager.commit([1, 2], [5, 5], [2, 0]),
        lambda: manager.commit([1, 2], [5, 5], [1, 1, 1]),
        lambda: manager.commit([1, 2], [5], [1, -1]),
        lambda: manager.commit([1, 2], [5, 5, 5]),
        lambda: manager.commit([1, 2], []),
        lambda: manager.commit([1, 2], [5], [1, 2**31 - 1]),
        lambda: manager.pass_fence(-1),
        lambda: manager.pass_fence(manager.step),
        lambda: manager.pass_fence(2**62),
    ):
        refuses(manager, ArgumentError, call)


@pytest.mark.parametrize("row", [0, -1, 7, 2**31 - 1, -(2**31)])
def test_rows_that_do_not_exist(manager: Manager, row: int):
    for call in (
        lambda: manager.reserve([1, row]),
        lambda: manager.can_reserve([1, row]),
        lambda: manager.num_reservable([1, row]),
        lambda: manager.plan([1, row], 0),
        lambda: manager.commit([1, row], [5, 5]),
        lambda: manager.rollback([1, row], 0),
        lambda: manager.release([1, row]),
        lambda: manager.release(row),
        lambda: manager.fork(row),
        lambda: manager.reserved([1, row]),
        lambda: manager.page_ids(row, "full"),
        lambda: manager.first_pages([1, row], "full"),
    ):
        refuses(manager, OutOfRangeError, call)


def test_rows_that_do_not_run(manager: Manager):
    manager.release(manager.admit([7]).row)  # waits for a fence
    manager.plan()
    for row in (3, 4):
        for call in (
            lambda row=row: manager.reserve([1, row]),
            lambda row=row: manager.can_reserve([1, row]),
            lambda row=row: manager.plan([1, row], 0),
            lambda row=row: manager.commit([1, row], [5, 5]),
            lambda row=row: manager.rollback([1, row], 0),
            lambda row=row: manager.release([1, row]),
            lambda row=row: manager.fork(row),
            lambda row=row: manager.committed([1, row]),
            lambda row=row: manager.page_ids(row, "full"),
        ):
            refuses(manager, NotHeldError, call)


def test_rows_that_are_named_twice(manager: Manager):
    for call in (
        lambda: manager.reserve([1, 2, 1]),
        lambda: manager.can_reserve([2, 2]),
        lambda: manager.num_reservable([2, 2]),
        lambda: manager.plan([2, 1, 2], 0),
        lambda: manager.commit([1, 1], [5, 5], [1, 0]),
        lambda: manager.rollback([1, 1], 0),
        lambda: manager.release([2, 1, 2]),
    ):
        refuses(manager, AlreadyHeldError, call)


@pytest.mark.parametrize("tokens", [[-1, 2, 3], [1, -(2**31)], [1, 2, -5], [-7]], ids=name_of)
def test_tokens_below_zero(manager: Manager, tokens: list[int]):
    for call in (
        lambda: manager.admit(tokens),
        lambda: manager.can_admit(tokens),
        lambda: manager.pending(tokens),
    ):
        refuses(manager, OutOfRangeError, call)
    n = len(tokens)
    manager.reserve(1, n)
    manager.plan(1, n)
    refuses(manager, OutOfRangeError, lambda: manager.commit([2, 1], [0, *tokens], [1, n]))


@pytest.mark.parametrize("bad", [5, None, "\ud800", [b"a"]], ids=name_of)
def test_namespaces_that_are_none(manager: Manager, bad: Any):
    for call in (manager.admit, manager.can_admit, manager.pending):
        refuses(manager, ArgumentError, lambda call=call: call([1], namespace=bad))
    refuses(manager, ArgumentError, lambda: manager.drop(bad))


BAD_KEYS = [
    5,
    None,
    "ab",
    [(0, 1)],
    [(1, 1, b"a")],
    [(2, 1, b"a")],
    [(-1, 1, b"a")],
    [(0, 2, b"a"), (1, 3, b"b")],
    [(0, 1, 5)],
    [(0.0, 1, b"a")],
    [(0, 2**70, b"a")],
    [None],
]


@pytest.mark.parametrize("bad", BAD_KEYS, ids=name_of)
def test_extra_keys_that_are_none(manager: Manager, bad: Any):
    for call in (manager.admit, manager.can_admit, manager.pending):
        refuses(manager, ArgumentError, lambda call=call: call([1], extra_keys=bad))


def test_groups_and_listeners_that_are_none(manager: Manager):
    for bad in ("window", "", None, 0, b"full", "full\x00", "\ud800"):
        refuses(manager, ArgumentError, lambda bad=bad: manager.page_ids(1, bad))
        refuses(manager, ArgumentError, lambda bad=bad: manager.first_pages(1, bad))
        refuses(manager, ArgumentError, lambda bad=bad: manager.invalidate(bad, [1]))
    for bad in (None, 5, "a"):
        refuses(manager, ArgumentError, lambda bad=bad: manager.tree.listen(bad))
        refuses(manager, ArgumentError, lambda bad=bad: manager.tree.unlisten(bad))


def test_more_than_there_is(manager: Manager):
    for call in (
        lambda: manager.fork(1, 5),
        lambda: manager.fork(1, 2**31 - 1),
    ):
        refuses(manager, CapacityError, call)
    small = make(pages=2)
    small.admit([1])
    small.admit([2])
    small.plan()
    refuses(small, CapacityError, lambda: small.reserve([1, 2], [1, 4]))
    refuses(small, CapacityError, lambda: small.admit([3]))


def test_calls_with_nothing_to_do(manager: Manager):
    before = manager.stats()
    for none in ([], (), np.array([], dtype=np.int32), np.array([])):
        manager.reserve(none)
        manager.reserve(none, none)
        manager.commit(none, none)
        manager.rollback(none, 0)
        manager.release(none)
        assert manager.num_reservable(none, 1000) == 0
        assert manager.can_reserve(none, 1000) is True
        assert manager.plan(none, none).num_tokens == 0
        assert manager.reserved(none).tolist() == []
    manager.commit([1, 2], [], [0, 0])
    assert manager.stats() == before


@pytest.mark.parametrize("bad", [True, 1.0, np.True_, np.float32(1)], ids=repr)
def test_a_number_that_is_no_integer_is_called_one(manager: Manager, bad: Any):
    for name, call in {
        "rows": lambda: manager.reserve(bad),
        "n": lambda: manager.reserve(1, bad),
        "counts": lambda: manager.plan(1, bad),
        "tokens": lambda: manager.commit(1, bad),
    }.items():
        refuses(manager, ArgumentError, call)
        with pytest.raises(ArgumentError, match=f"^{name}: give an integer, not "):
            call()


def test_a_row_of_a_subclass_of_int_is_one_row(manager: Manager):
    class Row(int):
        pass

    assert manager.reserved(Row(1)) == manager.reserved(1)


# Building


@pytest.mark.parametrize(
    "given",
    [
        {"num_rows": 0},
        {"num_rows": -1},
        {"num_rows": 2**31},
        {"num_rows": None},
        {"num_rows": "3"},
        {"num_rows": 1.0},
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"max_tokens": None},
        {"num_rows": 10**5, "max_tokens": 10**6},  # tables pass 2^31
        {"watermark": -1},
        {"watermark": None},
        {"watermark": 2**31},
        {"capacity": {}},
        {"capacity": None},
        {"capacity": [5]},
        {"capacity": {"full": -1}},
        {"capacity": {"full": 2**31}},
        {"capacity": {"full": None}},
        {"capacity": {"full": 1.0}},
        {"capacity": {"full": 3, "window": 3}},
        {"capacity": {"window": 3}},
        {"layout": None},
        {"layout": FULL},
        {"layout": Layout([[]]), "capacity": {}},
    ],
    ids=repr,
)
def test_managers_that_cannot_be_built(given: dict[str, Any]):
    good: dict[str, Any] = {
        "layout": Layout([FULL], 4),
        "capacity": {"full": 3},
        "num_rows": 2,
        "max_tokens": 8,
    }
    with pytest.raises(ConfigError):
        Manager(**(good | given))


def test_a_manager_without_pages_admits_nobody():
    manager = make(pages=0)
    assert not manager.can_admit([1])
    with pytest.raises(CapacityError):
        manager.admit([1])
    row = manager.admit([1], reserve=0).row
    assert manager.num_reservable(row) == 0
    manager.release(row)
    manager.check()


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("admit", ([1],)),
    ("can_admit", ([1],)),
    ("pending", ([1],)),
    ("reserve", (1,)),
    ("can_reserve", (1,)),
    ("num_reservable", (1,)),
    ("commit", (1, [1])),
    ("rollback", (1, 0)),
    ("release", (1,)),
    ("fork", (1,)),
    ("invalidate", ("full", [1])),
    ("drop", (b"",)),
    ("pass_fence", (0,)),
    ("plan", ()),
    ("page_ids", (1, "full")),
    ("first_pages", (1, "full")),
    ("reserved", (1,)),
    ("computed", (1,)),
    ("committed", (1,)),
    ("stored", (1,)),
    ("namespaces", ()),
    ("hit", ([1],)),
    ("stats", ()),
    ("check", ()),
    ("reset", ()),
    ("__repr__", ()),
]


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
@pytest.mark.parametrize(("name", "given"), CALLS, ids=[name for name, _ in CALLS])
def test_a_manager_that_nobody_initialised(name: str, given: tuple[Any, ...]):
    made = Manager.__new__(Manager)
    with pytest.raises(TypeError):
        getattr(made, name)(*given)
    with pytest.raises((TypeError, AttributeError)):
        getattr(Manager, name)(42, *given)
    del made
    gc.collect()


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_the_tree_of_a_manager_that_nobody_initialised():
    made = Manager.__new__(Manager)
    for call in (
        made.tree.counts,
        made.tree.nodes,
        made.tree.namespaces,
        made.tree.__repr__,
        lambda: made.tree.page_tokens,
        lambda: made.tree.listen(print),
        lambda: made.tree.unlisten(print),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_a_manager_is_initialised_once(manager: Manager):
    before = manager.stats()
    with pytest.raises(TypeError):
        manager.__init__(manager.layout, {"full": 3}, num_rows=1, max_tokens=4)  # type: ignore[misc]
    assert manager.stats() == before
    manager.check()


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_copies_of_a_manager_are_no_managers(manager: Manager):
    for make_copy in (copy.copy, lambda it: pickle.loads(pickle.dumps(it))):
        with pytest.raises(TypeError):
            make_copy(manager).admit([1])
    manager.check()


def test_subclasses():
    class Forgetful(Manager):
        def __init__(self) -> None:
            pass

    class Counting(Manager):
        num_admits = 0

        def admit(self, *given: Any, **more: Any) -> Any:
            self.num_admits += 1
            return super().admit(*given, **more)

    with pytest.raises(TypeError), pytest.warns(RuntimeWarning, match="uninitialized"):
        Forgetful().admit([1])
    counting = Counting(Layout([FULL], 4), {"full": 3}, num_rows=2, max_tokens=8)
    counting.admit([1])
    assert counting.num_admits == 1
    counting.check()


def test_a_delta_is_not_lost_when_somebody_changes_the_layout(manager: Manager):
    manager.reserve(1, 10)
    with contextlib.suppress(AttributeError):  # it may be read-only
        manager.layout = Layout([FULL, WINDOW], 4)
    assert len(manager.plan().places) == 2


# Arrays that are no deltas


def a_delta() -> npt.NDArray[np.int32]:
    """Rows, table writes, and page copies of two groups."""
    manager = make(FULL, WINDOW)
    row = manager.admit([0, 1, 2, 3, 4, 5]).row
    finish_step(manager, row, 6)
    manager.commit(row, [0, 1, 2, 3, 4, 5])
    child = manager.fork(row)
    manager.reserve([row, child], 3)
    return manager.plan([row, child], [3, 2]).packed


def look_at(packed: npt.NDArray[np.int32]) -> None:
    """Reads every number that a delta says it has."""
    delta = Delta(packed)
    assert pickle.loads(pickle.dumps(delta)) == delta
    assert len(delta.rows) == len(delta.lengths) == len(delta.counts)
    assert len(delta.places) == len(delta.page_ids)
    for sources, targets in delta.copies:
        assert len(sources) == len(targets)
    assert 0 <= delta.step < 2**62
    assert delta.num_bytes == packed.nbytes
    for array in (delta.rows, delta.lengths, delta.counts, delta.places, delta.page_ids):
        assert np.shares_memory(array, packed) or len(array) == 0
    assert delta.num_tokens == sum(delta.counts.tolist())
    for group in range(min(delta.num_groups, 4)):
        if (work := delta.work(group)) is not None:
            assert len(work.splits) == len(delta.rows) > 0
            assert [part.shape[1] for part in work[:3]] == [4, 2, 2]
    assert repr(delta).startswith(f"Delta(step {delta.step}: ")


def test_arrays_that_are_no_deltas():
    good = a_delta()
    look_at(good)
    arrays: list[Any] = [
        good.tolist(),
        None,
        b"",
        good.astype(np.int64),
        good.astype(np.float32),
        good.astype(np.uint32),
        good.astype(">i4"),
        good.reshape(-1, 1),
        np.repeat(good, 2)[::2],
        good[:0],
        good[:4],
        good[: len(good) // 2],
        good[1:],
        np.zeros_like(good),
        np.full_like(good, -1),
        np.full_like(good, 2**31 - 1),
    ]
    for packed in arrays:
        with pytest.raises(ArgumentError, match="packed"):
            Delta(packed)


def test_the_head_and_the_directory_of_a_delta_are_looked_through():
    good = a_delta()
    num_sections, end = int(good[4]), 5 + 4 * int(good[4])
    assert num_sections == 11
    entries = good[5:end].reshape(-1, 4)

    def refused(words: str, at: int, value: int) -> None:
        bad = good.copy()
        bad[at] = value
        with pytest.raises(ArgumentError, match=words):
            Delta(bad)

    refused("do not start with the format word", 0, 1)
    for at in (1, 2, 3):
        refused("negative", at, -1)
    refused("too many groups", 3, 2**31 - 1)
    for n in (-1, len(good), 2**31 - 1, -(2**31)):
        refused("directory is truncated", 4, n)
    for i, (kind, group, begin, size) in enumerate(entries.tolist()):
        at = 5 + 4 * i
        for other in (-1, 2, 2**31 - 1):
            refused("belongs to no group", at + 1, other)
        for other in (-1, 0, end - 1, len(good), 2**31 - 1):
            refused("truncated", at + 2, other)
        for other in (-1, len(good) - begin + 1, 2**31 - 1):
            refused("truncated", at + 3, other)
        if kind == 18:  # the work of all groups, which belongs to no other section
            refused("out of order", at + 1, 1)
            refused("work list is truncated", at + 3, 15)
            continue
        refused("differ in size", at, 99)  # one of two that belong together is missing
        refused("differ in size", at + 3, size - 1)
        if i > 0 and entries[i - 1][1] == group:  # each kind once per group, in the order of the format
            refused("out of order", at, int(entries[i - 1][0]))
        if kind <= 6:
            refused("out of order", at + 1, 1)


def test_sections_of_unknown_kinds_are_passed_over():
    good = Delta(a_delta())
    num_sections = int(good.packed[4])
    head, entries = good.packed[:4], good.packed[5 : 5 + 4 * num_sections].reshape(-1, 4)
    rest = good.packed[5 + 4 * num_sections :]
    for kind in (0, 19, 1000, -1, 2**31 - 1, -(2**31)):
        for at in (0, 3, num_sections):
            more = np.insert(entries, at, [kind, 1, 0, 2], axis=0)
            more[:, 2] += 4
            more[at, 2] = 5 + 4 * len(more)  # it overlaps another one
            packed = np.concatenate([head, [num_sections + 1], more.ravel(), rest]).astype(np.int32)
            look_at(packed)
            new = Delta(packed)
            for name in ("rows", "lengths", "counts", "places", "page_ids"):
                assert getattr(new, name).tolist() == getattr(good, name).tolist()
            assert [[ids.tolist() for ids in pair] for pair in new.copies] == [
                [ids.tolist() for ids in pair] for pair in good.copies
            ]


words = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 70)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 150), words), max_size=6),
    cut=st.none() | st.integers(0, 150),
    tail=st.lists(words, max_size=8),
)
def test_any_head_of_a_delta(changes: list[tuple[int, int]], cut: int | None, tail: list[int]):
    """It is refused, or all of it lies inside the array."""
    packed = a_delta()
    for at, value in changes:
        packed[at % len(packed)] = value
    packed = np.concatenate([packed[:cut], tail]).astype(np.int32)
    with contextlib.suppress(ArgumentError):
        look_at(packed)


@settings(max_examples=200, deadline=None)
@given(
    num_groups=st.integers(0, 4),
    sections=st.lists(
        st.tuples(st.integers(0, 19), st.integers(0, 3), st.integers(0, 60), st.integers(0, 8))
    ),
    num_words=st.integers(0, 60),
)
def test_any_directory_of_a_delta(num_groups: int, sections: list[tuple[int, int, int, int]], num_words: int):
    directory = np.array(sorted(sections, key=lambda it: it[:2]), dtype=np.int32).reshape(-1, 4)
    directory[:, 2] += 5 + directory.size
    head = [a_delta()[0], 7, 0, num_groups, len(directory)]
    with contextlib.suppress(ArgumentError):
        look_at(np.concatenate([head, directory.ravel(), np.arange(num_words)]).astype(np.int32))


def test_a_large_directory_is_read_in_one_pass():
    """Comparing each of its sections with all others would take minutes."""
    n = 60_000
    begin = 5 + 8 * n
    kinds, groups = np.tile([16, 17], n), np.repeat(np.arange(n), 2)
    directory = np.stack([kinds, groups, np.full(2 * n, begin), np.ones(2 * n, dtype=int)], axis=1)
    packed = np.concatenate([[a_delta()[0], 1, 0, n, 2 * n], directory.ravel(), [1]]).astype(np.int32)
    assert len(Delta(packed).copies) == n


# Calls from inside calls


def test_a_listener_that_calls_whatever_it_can():
    manager, choose, rows = make(FULL, WINDOW, pages=10), random.Random(3), []

    def listener(_: object) -> None:
        with contextlib.suppress(PagodaError):
            rows.append(manager.admit([choose.randrange(3)] * choose.randrange(1, 9)).row)
        with contextlib.suppress(PagodaError):
            row = choose.randrange(1, 7)
            finish_step(manager, row)
            manager.commit(row, 1)
            manager.reserve(row, 2)
            manager.fork(row)
        with contextlib.suppress(PagodaError):
            manager.release(choose.randrange(1, 7))
        if choose.random() < 0.1:
            manager.invalidate("window", [choose.randrange(1, 11)])
        if choose.random() < 0.1:
            manager.drop(b"")
        finish_step(manager)
        manager.check()

    manager.tree.listen(listener)
    for _ in range(300):
        with contextlib.suppress(PagodaError):
            row = manager.admit([choose.randrange(3)] * choose.randrange(5, 9)).row
            for _ in range(4):
                finish_step(manager, row)
                manager.commit(row, choose.randrange(3))
        with contextlib.suppress(PagodaError):
            manager.release(choose.randrange(1, 7))
        finish_step(manager)
        manager.check()
    assert rows


@pytest.mark.parametrize("call", ["admit", "reserve", "commit", "fork", "invalidate", "drop"])
def test_a_listener_that_resets(call: str):
    manager, events = make(pages=5), []
    full_cache(manager, 3)
    row = manager.admit([7, 7, 7, 7, 7]).row
    finish_step(manager, row, 5)
    manager.commit(row, [7] * 3)

    def listener(event: object) -> None:
        if armed:
            events.append(event)
            manager.reset()

    armed: list[bool] = []
    manager.tree.listen(listener)
    armed.append(True)  # it was told what is there
    if call == "admit":
        manager.admit([8] * 12)
    elif call == "reserve":
        manager.reserve(row, 10)
    elif call == "commit":
        manager.commit(row, [7, 7])
    elif call == "invalidate":
        assert manager.invalidate("full", [1, 2, 3, 4, 5]).tolist() == [row]
    elif call == "drop":
        manager.drop(b"")
    else:
        for _ in range(3):
            with contextlib.suppress(NotHeldError):
                manager.fork(row)
    assert events
    manager.check()
    stats = manager.stats()
    assert (stats.rows, stats.cached_tokens, stats.groups[0].free, manager.step) == (0, 0, 5, 1)
    manager.tree.unlisten(listener)
    assert manager.admit([7] * 9).hit == 0


def test_a_listener_that_raises_disturbs_nobody(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []  # the text: keeping what the hook is given keeps all frames alive
    monkeypatch.setattr("sys.unraisablehook", lambda it: told.append(str(it.exc_value)))
    manager, events = make(), []

    def listener(_: object) -> None:
        raise RuntimeError("no")

    manager.tree.listen(listener)
    manager.tree.listen(events.append)
    row = manager.admit([1] * 5).row
    manager.plan(row, 4)
    manager.commit(row, [1] * 4)
    assert (len(told), len(events), manager.stored(row)) == (1, 1, 4)
    manager.tree.unlisten(events.append)
    manager.tree.unlisten(listener)
    with pytest.raises(ArgumentError):
        manager.tree.unlisten(listener)


class Sneaky:
    """A number whose reading runs code."""

    def __init__(self, n: int, action: Callable[[], object]) -> None:
        self.n, self.action = n, action

    def __index__(self) -> int:
        self.action()
        return self.n


def test_arguments_that_call_the_manager_while_they_are_read():
    manager = make()
    for _ in range(20):
        row = manager.admit([1] * 6).row
        sneaky = Sneaky(row, manager.reset)
        with contextlib.suppress(PagodaError):
            manager.reserve([sneaky], [Sneaky(1, manager.reset)])
        row = manager.admit([1] * 6).row
        with contextlib.suppress(PagodaError):
            finish_step(manager, row)
            manager.commit([row], [Sneaky(1, manager.reset)], [1])
        row = manager.admit([1] * 6).row
        with contextlib.suppress(PagodaError):
            finish_step(manager, row)
            manager.commit([row], [1], [Sneaky(1, lambda row=row: manager.release(row))])
        row = manager.admit([1] * 6).row
        with contextlib.suppress(PagodaError):
            manager.plan([Sneaky(row, manager.reset)], [Sneaky(1, manager.reset)])
        row = manager.admit([1] * 6).row
        with contextlib.suppress(PagodaError):
            manager.plan([row], [Sneaky(1, lambda row=row: manager.release(row))])
        row = manager.admit([1] * 6).row
        with contextlib.suppress(PagodaError):
            manager.fork(row, Sneaky(2, manager.reset))
        with contextlib.suppress(PagodaError):
            manager.admit([Sneaky(3, manager.reset)], extra_keys=[(Sneaky(0, manager.reset), 1, b"a")])
        tokens: list[Any] = [5, 6]
        tokens.insert(0, Sneaky(4, tokens.clear))
        with contextlib.suppress(PagodaError):
            manager.admit(tokens)
        manager.check()
        manager.reset()


def test_finalizers_that_call_the_manager():
    manager, before = make(pages=30, num_rows=20), gc.get_threshold()

    class Finalizer:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with contextlib.suppress(PagodaError):
                manager.release(random.randrange(1, 20))
            with contextlib.suppress(PagodaError):
                manager.reserve(random.randrange(1, 20), 5)
            if random.random() < 0.5:
                manager.plan()

    manager.tree.listen(lambda _: None)
    gc.set_threshold(1)
    try:
        for token in range(200):
            Finalizer()
            with contextlib.suppress(PagodaError):
                row = manager.admit([token % 5] * 9).row
                manager.plan(row, 9)
                manager.commit(row, [token % 5] * 9)
                manager.fork(row, 2)
            manager.stats(), manager.tree.nodes(), manager.plan()
            manager.pass_fence(manager.step - 1)
    finally:
        gc.set_threshold(*before)
    manager.check()


def test_managers_are_collected_with_what_listens_to_them():
    manager = make()
    manager.tree.listen(lambda _, me=manager: me)
    manager.me = manager  # type: ignore[attr-defined]
    gone = weakref.ref(manager)
    assert gone() is manager
    del manager
    gc.collect()
    assert gone() is None


def test_results_outlive_the_manager():
    manager = make()
    got, view = manager.admit([1, 2, 3, 4, 5]), manager.tree
    manager.plan(got.row, 4)
    manager.commit(got.row, [1, 2, 3, 4])
    pages, children = manager.page_ids(got.row, "full"), manager.fork(got.row, 2)
    nodes, delta = manager.tree.nodes(), manager.plan()
    del manager
    gc.collect()
    assert view.counts().tokens.total == 4
    assert pages.tolist() == [1, 2]
    assert children.tolist() == [2, 3]
    assert len(delta.places) == 2
    assert nodes[-1].tokens.tolist() == [1, 2, 3, 4]


def test_threads():
    """Each ends only what it began; together they use all there is."""
    manager = make(FULL, WINDOW, pages=40, num_rows=16)
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        choose, mine = random.Random(number), []
        try:
            start.wait()
            for _ in range(400):
                tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 13))]
                with contextlib.suppress(CapacityError):
                    got = manager.admit(tokens)
                    assert got.row not in mine
                    mine.append(got.row)
                    manager.plan(got.row, len(tokens) - got.hit)
                    for token in tokens[got.hit :]:
                        manager.commit(got.row, token)
                    mine.append(manager.fork(got.row))
                while len(mine) > choose.randrange(4):
                    manager.release(mine.pop())
                with contextlib.suppress(ArgumentError):
                    manager.pass_fence(manager.plan().step)
            manager.release(mine)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []
    finish_step(manager)
    manager.check()
    assert all(it.free + it.evictable == it.total for it in manager.stats().groups)
