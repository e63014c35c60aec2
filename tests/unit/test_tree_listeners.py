"""What listeners are told, in which order, and that they cannot disturb a call."""

import signal
import sys

import numpy as np
import pytest

from pagoda.errors import ArgumentError
from pagoda.tree import PrefixTree, Removed, Reset, Stored
from property.tree_follower import Follower, shown
from twin.keys import page_keys


def key(namespace: bytes, *tokens: int) -> int:
    return page_keys(namespace, [tokens])[-1]


def plain(event: Stored | Removed) -> tuple:
    return (
        type(event).__name__,
        event.namespace,
        event.position,
        event.parent,
        event.tokens.tolist(),
        [ids.tolist() for ids in event.columns],
        event.states,
    )


def recorded(tree: PrefixTree) -> list[tuple]:
    told: list[tuple] = []
    tree.listen(lambda event: told.append(plain(event)))
    return told


def test_what_is_stored_and_removed():
    tree = PrefixTree(2)
    told = recorded(tree)
    tree.insert([1, 2, 3, 4, 5], [10, 11], namespace="a")
    tree.insert([1, 2, 7, 7], [10, 12], namespace="a")
    tree.match([1, 2])
    with tree.lock(tree.match([1, 2, 3, 4], "a")):
        pass
    tree.evict(2)
    tree.drop("a")
    assert told == [
        ("Stored", b"a", 0, None, [1, 2, 3, 4], [[10, 11]], ()),
        ("Stored", b"a", 2, key(b"a", 1, 2), [7, 7], [[12]], ()),
        ("Removed", b"a", 2, key(b"a", 1, 2), [7, 7], [[12]], ()),
        ("Removed", b"a", 0, None, [1, 2], [[10]], ()),
        ("Removed", b"a", 2, key(b"a", 1, 2), [3, 4], [[11]], ()),
    ]


def test_growth_in_place_tells_the_page_before():
    tree = PrefixTree()
    told = recorded(tree)
    lease = tree.lock(tree.match([]))
    for token in (5, 6, 7):
        tree.insert([token], [token + 100], lease)
    assert [(event[2], event[3], event[4]) for event in told] == [
        (0, None, [5]),
        (1, key(b"", 5), [6]),
        (2, key(b"", 5, 6), [7]),
    ]


def test_holes_checkpoints_and_replaced_ids_are_told():
    tree = PrefixTree(1, windows=(None, 2), states=True)
    told = recorded(tree)
    tree.insert([1, 2, 3], ([1, 2, 3], [-1, 12, 13]), checkpoints=[(3, 7)])
    tree.insert([1, 2, 3], ([1, 2, 3], [11, 12, 13]), checkpoints=[(2, 8)])
    lease = tree.lock(tree.match([1, 2, 3]))
    tree.punch(lease, 1, 1)
    tree.replace([1], ([21], [-1]))
    assert told == [
        ("Stored", b"", 0, None, [1, 2, 3], [[1, 2, 3], [-1, 12, 13]], ((3, 7),)),
        ("Stored", b"", 0, None, [1], [[-1], [11]], ()),
        ("Stored", b"", 2, key(b"", 1, 2), [], [[], []], ((2, 8),)),
        ("Removed", b"", 0, None, [1], [[-1], [11]], ()),
        ("Removed", b"", 0, None, [1], [[1], [-1]], ()),
        ("Stored", b"", 0, None, [1], [[21], [-1]], ()),
    ]


def test_extra_keys_are_told_and_tell_contents_apart():
    tree, events = PrefixTree(), []
    tree.listen(events.append)
    tree.insert([4, 9, 9, 5], [1, 2, 3, 4], extra_keys=[(1, 3, "cat")])
    tree.insert([4, 9, 9, 5], [1, 5, 6, 7], extra_keys=[(1, 3, "dog")])
    tree.evict(2)
    assert [event.extra_keys for event in events] == [((1, 3, b"cat"),), ((1, 3, b"dog"),), ((1, 3, b"cat"),)]
    assert [event.tokens.tolist() for event in events] == [[4, 9, 9, 5], [9, 9, 5], [9, 5]]
    assert not set(events[0].keys[1:].tolist()) & set(events[1].keys.tolist())
    # What begins before the event keeps its begin: it is part of what the tokens mean.
    assert (events[2].position, events[2].keys.tolist()) == (2, events[0].keys[2:].tolist())


def test_keys_are_the_same_in_every_process():
    """Whoever stores them elsewhere finds them again: these numbers never change."""
    tree, events = PrefixTree(2), []
    tree.listen(events.append)
    tree.insert([1, 2, 3, 4], [7, 8], namespace="tenant", extra_keys=[(3, 4, b"image")])
    assert events[0].keys.dtype == np.uint64
    assert events[0].keys.tolist() == page_keys(b"tenant", [(1, 2), (3, (4, b"image", 3))])
    assert events[0].keys.tolist() == [1201163160842552128, 6329214727490453073]


def test_a_first_column_with_holes_has_parents_that_resolve():
    tree, follower = PrefixTree(1, windows=(2,)), Follower(1)
    tree.listen(follower)
    tree.insert([1, 2, 3], [-1, -1, 13])
    tree.insert([1, 2, 4], [-1, -1, 14])
    lease = tree.lock(tree.match([1, 2, 3]))
    tree.punch(lease, 0, 3)
    tree.insert([1, 2, 3, 5], [-1, -1, 23, 15])
    assert follower.picture() == shown(tree, 1)
    assert len(follower.pages) == 5


def test_what_a_dropped_namespace_leaves_is_told_once():
    tree, events = PrefixTree(), []
    tree.listen(events.append)
    tree.insert([1, 2, 3], [1, 2, 3], namespace="a")
    lease = tree.lock(tree.match([1, 2], "a"))
    events.clear()
    assert tree.drop("a").page_ids.tolist() == [3]
    assert [(type(it), it.position, it.columns[0].tolist()) for it in events] == [
        (Removed, 0, [1, 2]),
        (Removed, 2, [3]),
    ]
    assert [(view.begin, view.is_lost) for view in tree.nodes() if view.level] == [(0, True)]
    events.clear()
    tree.release(lease)
    assert tree.evict(2).page_ids.tolist() == [1, 2]
    assert events == []


def test_a_reset_is_told():
    tree, events = PrefixTree(), []
    tree.listen(events.append)
    tree.insert([1], [1])
    tree.reset()
    tree.insert([1], [1])
    assert [type(event) for event in events] == [Stored, Reset, Stored]


def test_who_comes_late_is_told_what_is_there():
    tree = PrefixTree(1, windows=(None, 2), states=True)
    early: list[object] = []
    tree.listen(early.append)
    tree.insert([1, 2, 3], ([1, 2, 3], [-1, 12, 13]), checkpoints=[(2, 5), (3, 7)])
    tree.insert([1, 2, 4], ([1, 2, 4], [-1, -1, 14]), checkpoints=[(3, 8)], extra_keys=[(2, 3, "x")])
    tree.insert([9], ([9], [19]), checkpoints=[(1, 9)], namespace="gone")
    lease = tree.lock(tree.match([9], "gone"))
    tree.drop("gone")
    num_told, late = len(early), Follower(1)
    tree.listen(late)
    assert len(early) == num_told
    assert late.picture() == shown(tree, 1)
    assert len(late.pages) == 4
    tree.insert(
        [1, 2, 4, 5], ([1, 2, 4, 6], [-1, -1, -1, 15]), checkpoints=[(4, 10)], extra_keys=[(2, 3, "x")]
    )
    tree.release(lease)
    assert late.picture() == shown(tree, 1)


def test_who_listens_while_others_are_told_gets_each_event_once():
    tree, late = PrefixTree(), Follower(1)

    def brings_another(event: Stored | Removed) -> None:
        if event.position == 0:
            tree.insert([1, 2, 3], [1, 2, 3])
            tree.listen(late)
            tree.insert([1, 2, 4], [1, 2, 4])

    tree.listen(brings_another)
    tree.insert([1, 2], [1, 2])
    assert late.picture() == shown(tree, 1)
    assert len(late.pages) == 4


def test_nobody_listens_and_somebody_comes_again():
    tree, follower = PrefixTree(), Follower(1)
    tree.listen(follower)
    tree.insert([1, 2], [1, 2])
    tree.unlisten(follower)
    tree.insert([1, 2, 3], [1, 2, 3])
    tree.evict(1)
    again = Follower(1)
    tree.insert([1, 5], [1, 5])
    tree.listen(again)
    assert again.picture() == shown(tree, 1)
    tree.check()


def test_a_failed_call_tells_nothing():
    tree = PrefixTree()
    told = recorded(tree)
    with pytest.raises(ArgumentError):
        tree.insert([1, 2], [1])
    assert told == []


def test_an_exception_in_a_listener_is_reported_and_disturbs_nothing(monkeypatch):
    tree, reports = PrefixTree(), []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(report.exc_type))

    def broken(event: object) -> None:
        raise ZeroDivisionError

    tree.listen(broken)
    told = recorded(tree)
    assert tree.insert([1, 2], [1, 2]).stored == 2
    assert tree.evict(2).page_ids.tolist() == [1, 2]
    assert reports == [ZeroDivisionError, ZeroDivisionError]
    assert len(told) == 2
    tree.check()


def test_ctrl_c_in_a_listener_comes_when_the_call_is_done():
    tree = PrefixTree()

    def interrupted(event: object) -> None:
        if isinstance(event, Removed):
            raise KeyboardInterrupt

    tree.listen(interrupted)
    told = recorded(tree)
    tree.insert([1, 2], [1, 2])
    # Whoever runs tests in the background may have told them to ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tree.evict(2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tree.num_tokens, len(told)) == (0, 2)
    tree.check()


def test_a_listener_may_call_the_tree_and_order_is_kept():
    tree = PrefixTree()
    told = recorded(tree)

    def calls(event: Stored | Removed) -> None:
        if isinstance(event, Stored) and len(event.tokens) == 2:
            tree.insert([8], [8], namespace="from a listener")
            told.append(("inside",))

    tree.listen(calls)
    later = recorded(tree)
    tree.insert([1, 2], [1, 2])
    tree.evict(3)
    assert [event[0] for event in told] == ["Stored", "inside", "Stored", "Removed", "Removed"]
    assert [event[4] for event in later] == [[1, 2], [8], [1, 2], [8]]


def test_unlisten():
    tree, told = PrefixTree(), []
    tree.listen(told.append)
    tree.listen(told.append)
    tree.insert([1], [1])
    assert len(told) == 2
    tree.unlisten(told.append)  # bound methods are equal, not identical
    tree.insert([2], [2])
    assert len(told) == 3
    tree.unlisten(told.append)
    tree.insert([3], [3])
    assert len(told) == 3
    with pytest.raises(ArgumentError):
        tree.unlisten(told.append)


def test_a_listener_that_leaves_while_it_is_told():
    tree, told = PrefixTree(), []

    def once(event: object) -> None:
        told.append(event)
        tree.unlisten(once)

    tree.listen(once)
    tree.insert([1], [1])
    tree.insert([2], [2])
    assert len(told) == 1
