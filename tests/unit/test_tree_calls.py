"""What the prefix tree promises its callers: leases, namespaces, keys, events, errors."""

import sys
from typing import Any

import numpy as np
import pytest

from pagoda.errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    DoubleFreeError,
    NotHeldError,
    OutOfRangeError,
    StaleError,
)
from twin.keys import page_keys
from unit.tree_views import HOLE, lists, shape, told

# Leases


def test_a_match_finds_its_very_pages_or_less(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3], [11, 12, 13])
    match = tree.match([1, 2, 3])
    tree.evict(3)
    tree.insert([1, 2, 3], [21, 22, 23])
    lease = tree.lock(match)
    assert (lease.length, tree.page_ids(lease).tolist()) == (0, [])
    fresh = tree.match([1, 2, 3])
    assert tree.replace([1, 2], [31, 32])[0].tolist() == [21, 22]
    assert tree.lock(fresh).length == 0
    assert tree.match([1, 2, 3]).page_ids.tolist() == [31, 32, 23]


def test_a_match_outlives_splits_and_growth(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14])
    match = tree.match([1, 2, 3])
    tree.insert([1, 2, 9], [21, 22, 29])
    tree.insert([1, 2, 3, 4, 5], [31, 32, 33, 34, 15])
    lease = tree.lock(match)
    assert tree.page_ids(lease).tolist() == [11, 12, 13]


def test_replaced_pages_keep_their_leases_and_their_place(kind: Any) -> None:
    tree = kind(2)
    tree.insert([1, 1, 2, 2], [11, 12])
    tree.insert([3, 3], [13])
    lease = tree.lock(tree.match([1, 1]))
    assert lists(tree.replace([1, 1, 2, 2, 5], [21, 22, 99])) == [[11, 12]]
    assert tree.page_ids(lease).tolist() == [21]
    assert tree.evict(2).page_ids.tolist() == [22]
    for tokens, ids in (([1, 1, 9, 9], [31, 32]), ([9, 9], [31])):
        with pytest.raises(ArgumentError):
            tree.replace(tokens, ids)
    assert lists(tree.replace([1], [])) == [[]]


def test_leases_are_released_once(kind: Any) -> None:
    tree, other = kind(1), kind(1)
    match = tree.match([1])
    first, second = tree.lock(match), tree.lock(match)
    assert (first.number, second.number) == (1, 2)
    tree.release(first)
    with pytest.raises(DoubleFreeError) as caught:
        tree.release(first)
    assert caught.value.id == 1
    for call in (tree.demote, tree.page_ids, lambda lease: tree.insert([1], [1], lease)):
        with pytest.raises(NotHeldError):
            call(first)
    assert (first.is_held, second.is_held, tree.num_leases) == (False, True, 1)
    for lease in (other.lock(other.match([])), None, 7):
        with pytest.raises(ArgumentError):
            tree.release(lease)
    with pytest.raises(ArgumentError):
        other.lock(match)
    tree.reset()
    assert not second.is_held
    with pytest.raises(StaleError):
        tree.release(second)
    assert tree.lock(match).length == 0


def test_with_releases_what_is_still_held(kind: Any) -> None:
    tree = kind(1)
    with tree.lock(tree.match([])) as lease:
        assert lease.is_held
    assert not lease.is_held
    with tree.lock(tree.match([])) as lease:
        tree.release(lease)
    with tree.lock(tree.match([])) as lease:
        tree.reset()
    assert tree.num_leases == 0


def test_a_namespace_lives_as_long_as_its_pages_and_leases(kind: Any) -> None:
    tree = kind(1)
    assert tree.insert([], [], namespace="empty").stored == 0
    assert tree.namespaces() == []
    lease = tree.lock(tree.match([], "ä"))
    assert tree.namespaces() == ["ä".encode()]
    tree.insert([1], [11], lease)
    tree.release(lease)
    assert tree.match_length([1], "ä".encode()) == 1
    assert tree.match_length([1]) == 0
    tree.evict(1)
    assert tree.namespaces() == []
    with pytest.raises(ArgumentError):
        tree.insert([1], [11], tree.lock(tree.match([])), namespace=b"")


def test_a_dropped_namespace_is_found_no_more(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3], [11, 12, 13], namespace=b"a")
    tree.insert([1, 2, 4], [21, 22, 14], namespace=b"a")
    tree.insert([1, 5], [31, 15], namespace=b"a")
    tree.insert([8], [18], namespace=b"b")
    lease = tree.lock(tree.match([1, 2], b"a"))
    assert tree.drop(b"a").page_ids.tolist() == [15, 14, 13]  # the newest child first
    assert (tree.match_length([1], b"a"), tree.namespaces()) == (0, [b"b"])
    assert tree.page_ids(lease).tolist() == [11, 12]
    with pytest.raises(StaleError):
        tree.insert([3], [33], lease)
    tree.insert([1], [41], namespace=b"a")
    assert [(view.namespace, view.is_dropped, view.level) for view in tree.nodes() if view.level == 0] == [
        (b"a", False, 0),
        (b"b", False, 0),
        (b"a", True, 0),
    ]
    tree.release(lease)
    assert tree.evict(3).page_ids.tolist() == [11, 12, 18]  # the coldest, as if demoted, one run again
    assert tree.drop(b"unknown").page_ids.tolist() == []


def test_extra_keys_tell_tokens_apart_from_their_range_on(kind: Any) -> None:
    tree = kind(1)
    image = [(1, 3, b"cat")]
    tree.insert([1, 7, 7, 2], [11, 12, 13, 14], extra_keys=image)
    assert tree.match_length([1, 7, 7, 2], extra_keys=image) == 4
    assert tree.match_length([1, 7, 7, 2], extra_keys=[(1, 3, "cat")]) == 4
    assert tree.match_length([1, 7, 7, 2], extra_keys=[(1, 3, b"dog")]) == 1
    assert tree.match_length([1, 7, 7, 2]) == 1
    assert tree.match_length([1, 7, 7, 2], extra_keys=[(1, 2, b"cat")]) == 2
    assert tree.match_length([1, 7, 7, 2], extra_keys=[(0, 3, b"cat")]) == 0
    with tree.lock(tree.match([1, 7], extra_keys=image)) as lease:
        # Positions count from the beginning of the sequence.
        assert tree.insert([7, 2], [23, 24], lease, extra_keys=image).present == 4


# What it tells


def test_events_tell_what_is_stored_and_removed(kind: Any) -> None:
    tree = kind(2, windows=(None, 3), states=True)
    events = told(tree)
    tree.insert([1, 1, 2, 2], [[11, 12], [21, HOLE]], checkpoints=[(4, 5)])
    tree.insert([1, 1, 2, 2, 3, 3], [[31, 32, 13], [41, 22, 23]], checkpoints=[(2, 6), (6, 7)])
    lease = tree.lock(tree.match([1, 1, 2, 2, 3, 3]))
    tree.punch(lease, 1, 4)
    tree.release(lease)
    tree.evict(1)
    tree.drop(b"")
    first, second = page_keys(b"", [(1, 1), (2, 2)])
    assert [shape(event) for event in events] == [
        ("Stored", 0, None, [1, 1, 2, 2], [[11, 12], [21, HOLE]], ((4, 5),)),
        ("Stored", 2, first, [2, 2], [[HOLE], [22]], ()),
        ("Stored", 2, first, [], [[], []], ((2, 6),)),
        ("Stored", 4, second, [3, 3], [[13], [23]], ((6, 7),)),
        ("Removed", 0, None, [1, 1], [[HOLE], [21]], ()),
        ("Removed", 2, first, [2, 2], [[HOLE], [22]], ()),
        ("Removed", 4, second, [3, 3], [[13], [23]], ((6, 7),)),
        ("Removed", 0, None, [1, 1, 2, 2], [[11, 12], [HOLE, HOLE]], ((2, 6), (4, 5))),
    ]


def test_holes_have_keys_too(kind: Any) -> None:
    tree = kind(1, windows=(2,))
    tree.insert([1, 2], [HOLE, HOLE])
    events = told(tree)
    del events[:]
    tree.insert([1, 2, 3], [11, 12, 13])
    first, second = page_keys(b"", [(1,), (2,)])
    assert [(event.position, event.parent) for event in events] == [
        (0, None),
        (1, first),
        (2, second),
    ]


def test_replacing_tells_both_sides(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2], [11, 12])
    events = told(tree)
    del events[:]
    tree.replace([1, 2], [21, 22])
    assert [shape(event) for event in events] == [
        ("Removed", 0, None, [1, 2], [[11, 12]], ()),
        ("Stored", 0, None, [1, 2], [[21, 22]], ()),
    ]


def test_a_listener_that_raises_disturbs_nobody(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, seen = kind(1), []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report.exc_type))

    def fails(event: Any) -> None:
        raise KeyError(event.position)

    tree.listen(fails)
    events = told(tree)
    assert tree.insert([1], [11]).stored == 1
    assert (seen, len(events)) == ([KeyError], 1)
    tree.unlisten(fails)
    tree.insert([2], [12])
    assert (seen, len(events)) == ([KeyError], 2)
    with pytest.raises(ArgumentError):
        tree.unlisten(fails)
    with pytest.raises(ArgumentError):
        tree.listen(3)


def test_what_a_listener_calls_is_told_afterwards(kind: Any) -> None:
    tree, positions = kind(1), []

    def follows(event: Any) -> None:
        positions.append((event.position, tree.num_tokens))
        if event.position < 2:
            tree.insert([1, 2, 3][: event.position + 2], [11, 12, 13][: event.position + 2])
            positions.append("called")

    tree.listen(follows)
    tree.insert([1], [11])
    assert positions == [(0, 1), "called", (1, 2), "called", (2, 3)]


# Arguments


def test_ids_end_where_their_slots_would_pass_2_31(kind: Any) -> None:
    for page_tokens in (1, 2, 16, 48):
        tree, last = kind(page_tokens), 2**31 // page_tokens - 1
        tokens = [1] * page_tokens
        for wrong in (0, -1, last + 1):
            if wrong < 2**31:
                with pytest.raises(OutOfRangeError) as caught:
                    tree.insert(tokens + tokens, [1, wrong])
                assert (caught.value.id, caught.value.position) == (wrong, 1)
        assert tree.num_tokens == 0
        assert tree.insert(tokens, [last]).stored == page_tokens


def test_tokens_are_not_negative(kind: Any) -> None:
    tree = kind(2)
    for call in (tree.match, tree.match_length, lambda tokens: tree.insert(tokens, [1])):
        with pytest.raises(OutOfRangeError) as caught:
            call([3, -4])
        assert (caught.value.id, caught.value.position) == (-4, 1)
    assert tree.namespaces() == []


def test_page_ids_are_as_many_as_pages_or_one_more_for_one_that_is_not_full(kind: Any) -> None:
    tree = kind(4)
    for n, num_ids, is_right in ((8, 2, True), (8, 3, False), (9, 2, True), (9, 3, True), (9, 4, False)):
        if is_right:
            assert tree.insert(range(n), range(1, num_ids + 1)).stored == 8
        else:
            with pytest.raises(ArgumentError):
                tree.insert(range(n), range(1, num_ids + 1))
    two = kind(4, windows=(None, 2))
    for wrong in ([1, 2], [[1]], [[1], [2], [3]], [[1], [2, 3]], 1, None):
        with pytest.raises(ArgumentError):
            two.insert(range(4), wrong)


def test_evicting_more_than_is_evictable_evicts_nothing(kind: Any) -> None:
    tree = kind(4)
    tree.insert(range(12), [1, 2, 3])
    tree.lock(tree.match(range(4)))
    with pytest.raises(CapacityError) as caught:
        tree.evict(9)
    error = caught.value
    assert (error.what, error.wanted, error.free, error.total) == ("evictable tokens", 9, 8, 12)
    assert tree.evict(0).page_ids.tolist() == []
    assert tree.evict(5).page_ids.tolist() == [2, 3]  # two pages: 5 tokens, rounded up


def test_a_tree_that_cannot_be_is_refused(kind: Any) -> None:
    for given in (
        {"page_tokens": 0},
        {"page_tokens": "1"},
        {"windows": ()},
        {"windows": (0,)},
        {"windows": 3},
        {"windows": ("a",)},
        {"capacity": -1},
        {"states": 1},
    ):
        with pytest.raises(ConfigError):
            kind(**given)


def test_nodes_are_shown_in_order_and_within_bounds(kind: Any) -> None:
    tree = kind(2)
    tree.insert([5, 5, 6, 6], [11, 12], namespace=b"b")
    tree.insert([5, 5, 2, 2], [21, 13], namespace=b"b")
    tree.insert([1, 1], [14], namespace=b"a")
    views = tree.nodes()
    assert [(view.namespace, view.level, view.tokens.tolist()) for view in views] == [
        (b"a", 0, []),
        (b"a", 1, [1, 1]),
        (b"b", 0, []),
        (b"b", 1, [5, 5]),
        (b"b", 2, [2, 2]),
        (b"b", 2, [6, 6]),
    ]
    assert [view.number for view in tree.nodes(3)] == [view.number for view in views[:3]]
    shown = tree.nodes(10, 1, "b")
    assert [view.tokens.tolist() for view in shown] == [[], [5], [2], [6]]
    assert [lists(view.columns) for view in shown] == [[[]], [[11]], [[13]], [[12]]]
    assert [view.tokens.dtype for view in shown] == [np.int32] * 4
    assert [view.num_children for view in shown] == [1, 2, 0, 0]
