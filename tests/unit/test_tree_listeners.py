"""What listeners are told, in which order, and that they cannot disturb a call."""

import signal
import sys

import numpy as np
import pytest

from pagoda.errors import ArgumentError
from pagoda.tree import PrefixTree, Removed, Stored


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
        ("Stored", b"a", 2, 10, [7, 7], [[12]], ()),
        ("Removed", b"a", 2, 10, [7, 7], [[12]], ()),
        ("Removed", b"a", 0, None, [1, 2], [[10]], ()),
        ("Removed", b"a", 2, 10, [3, 4], [[11]], ()),
    ]


def test_growth_in_place_tells_the_page_before():
    tree = PrefixTree()
    told = recorded(tree)
    lease = tree.lock(tree.match([]))
    for token in (5, 6, 7):
        tree.insert([token], [token + 100], lease)
    assert [(event[2], event[3], event[4]) for event in told] == [
        (0, None, [5]),
        (1, 105, [6]),
        (2, 106, [7]),
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
        ("Stored", b"", 2, 2, [], [[], []], ((2, 8),)),
        ("Removed", b"", 0, None, [1], [[-1], [11]], ()),
        ("Removed", b"", 0, None, [1], [[1], [-1]], ()),
        ("Stored", b"", 0, None, [1], [[21], [-1]], ()),
    ]


def test_tokens_under_an_extra_key_are_told_as_tokens():
    tree = PrefixTree()
    told = recorded(tree)
    tree.insert([4, 9, 9], [1, 2, 3], extra_keys=[(1, 3, "cat")])
    tree.evict(3)
    assert [event[4] for event in told] == [[4, 9, 9], [4, 9, 9]]


def test_events_retell_the_tree():
    """Whoever listens knows which pages there are, and what stands in each."""
    tree = PrefixTree(2)
    pages: dict[int, tuple] = {}

    def follow(event: Stored | Removed) -> None:
        parent = event.parent
        for i, page in enumerate(event.columns[0].tolist()):
            entry = (event.namespace, parent, event.tokens[2 * i : 2 * i + 2].tolist())
            if isinstance(event, Stored):
                assert page not in pages
                pages[page] = entry
            else:
                assert pages.pop(page) == entry
            parent = page

    tree.listen(follow)
    rng, next_id = np.random.default_rng(1), 1
    for step in range(2000):
        tokens = rng.integers(0, 2, rng.integers(2, 30))
        n = len(tokens) // 2
        tree.insert(tokens, np.arange(next_id, next_id + n), namespace=bytes([step % 2]))
        next_id += n
        tree.evict(int(min(rng.integers(0, 20), tree.evictable_tokens)))
        if step % 500 == 499:
            tree.drop(b"\0")
        assert len(pages) * 2 == tree.num_tokens


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
    tree.insert([1, 2], [1, 2])

    def interrupted(event: object) -> None:
        raise KeyboardInterrupt

    tree.listen(interrupted)
    told = recorded(tree)
    # Whoever runs tests in the background may have told them to ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tree.evict(2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tree.num_tokens, len(told)) == (0, 1)
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
