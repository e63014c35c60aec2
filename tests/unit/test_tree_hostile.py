"""What a hostile caller tries: finalizers in the middle of calls, objects nobody made, costs that explode."""

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

from pagoda.errors import ArgumentError
from pagoda.tree import Lease, Match, PrefixTree


class Finalizer:
    """Part of a cycle, so the garbage collector runs it wherever it runs: inside our calls too."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.me, self.action = self, action

    def __del__(self) -> None:
        self.action()


@pytest.fixture
def eager_collector():
    """A collector that runs at every object it could run for."""
    before = gc.get_threshold()
    gc.disable()
    hold = [[] for _ in range(500)]  # so that new lists are allocated, not taken from a store of old ones

    def arm() -> None:
        hold.extend([] for _ in range(500))
        gc.set_threshold(1)
        gc.enable()

    yield arm
    gc.set_threshold(*before)
    gc.enable()


def wide_tree(num_columns: int) -> PrefixTree:
    tree = PrefixTree(windows=(None,) * num_columns)
    for k in range(50):
        tokens = np.arange(200, dtype=np.int32) + 1000 * k
        tree.insert(tokens, [tokens + 1] * num_columns if num_columns > 1 else tokens + 1)
    return tree


@pytest.mark.parametrize("num_columns", [1, 2, 3])
def test_a_finalizer_that_evicts_while_something_is_evicted(eager_collector, num_columns: int):
    tree, freed = wide_tree(num_columns), []
    Finalizer(lambda: freed.extend(tree.evict(3000).page_ids.tolist()))
    eager_collector()
    freed.extend(tree.evict(5000).page_ids.tolist())
    gc.disable()
    gc.collect()
    assert len(freed) == len(set(freed)) == 8000
    tree.check()


def test_a_finalizer_that_replaces_while_something_is_replaced(eager_collector):
    tree = wide_tree(1)
    many = np.arange(20_000, dtype=np.int32) + 10**6
    tree.insert(many, many)
    Finalizer(lambda: tree.replace(many, many + 1))
    eager_collector()
    few = np.arange(200, dtype=np.int32)
    assert tree.replace(few, few + 500)[0].tolist() == list(range(1, 201))
    gc.disable()
    gc.collect()
    assert tree.match(many).page_ids.tolist() == (many + 1).tolist()
    tree.check()


def test_a_finalizer_that_drops_while_something_is_matched_locked_and_inserted(eager_collector):
    tree = wide_tree(2)
    tokens = np.arange(200, dtype=np.int32)
    for _ in range(20):
        Finalizer(lambda: tree.drop(b""))
        eager_collector()
        lease = tree.lock(tree.match(tokens))
        gc.disable()
        gc.collect()
        tree.release(lease)
        tree.insert(tokens, [tokens + 1, tokens + 1])
        tree.check()


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_objects_that_nobody_made():
    tree = PrefixTree()
    tree.insert([1, 2], [1, 2])
    for _ in range(50):
        tree.match([1, 2])  # leaves memory behind that an empty object may get
    for call in (
        lambda: tree.lock(Match.__new__(Match)),
        lambda: tree.release(Lease.__new__(Lease)),
        lambda: tree.insert([3], [3], Lease.__new__(Lease)),
    ):
        with pytest.raises(ArgumentError):
            call()
    for call in (
        lambda: Match.__new__(Match).page_ids,
        lambda: Match.__new__(Match).columns,
        lambda: Match.columns.__get__(42),
        lambda: Lease.__new__(Lease).length,
        lambda: Lease.__exit__(42),
        lambda: Lease.__exit__(Lease.__new__(Lease), None, None, None),
        lambda: PrefixTree.lock(42, tree.match([1])),
        lambda: PrefixTree.__new__(PrefixTree).match([1]),
        lambda: PrefixTree.__new__(PrefixTree).lock(tree.match([1])),
    ):
        with pytest.raises(TypeError):
            call()
    tree.check()


def best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)


def punched(n: int) -> tuple[PrefixTree, np.ndarray]:
    """A window tree in which all but the last few tokens of a prompt are holes."""
    tree = PrefixTree(windows=(None, n // 4))
    tokens = np.arange(n, dtype=np.int32)
    holes = tokens + 1
    holes[: n - 100] = -1
    tree.insert(tokens, [tokens + 1, holes])
    return tree, tokens


def test_a_match_that_ends_among_holes_costs_its_length():
    """Four times as long, some four times the cost; sixteen, if windows were searched hole by hole."""
    costs = []
    for n in (20_000, 80_000):
        tree, tokens = punched(n)
        assert tree.match_length(tokens[: n - 200]) == 0
        costs.append(best(lambda tree=tree, tokens=tokens: tree.match_length(tokens[: len(tokens) - 200])))
    assert costs[1] < 9 * costs[0] + 1e-4


def test_an_eviction_from_a_window_tree_costs_what_it_frees():
    costs = []
    for n in (20_000, 80_000):
        tokens = np.arange(n, dtype=np.int32)

        def evict(n: int = n, tokens: np.ndarray = tokens) -> None:
            tree = PrefixTree(windows=(None, 64))
            tree.insert(tokens, [tokens + 1, tokens + 1])
            assert tree.evict(n, 1).page_ids.size == n

        costs.append(best(evict))
    assert costs[1] < 9 * costs[0] + 1e-4


def test_many_tokens_under_one_large_key_hold_it_once():
    tree, key = PrefixTree(), b"k" * 1_000_000
    tokens = np.arange(20_000, dtype=np.int32)
    begin = time.thread_time()
    tree.insert(tokens, tokens + 1, extra_keys=[(0, 20_000, key)])  # a copy a token would be 20 GB
    assert tree.match_length(tokens, extra_keys=[(0, 20_000, key)]) == 20_000
    assert tree.match_length(tokens, extra_keys=[(0, 20_000, key[:-1])]) == 0
    assert time.thread_time() - begin < 5
    tree.evict(20_000)
    tree.check()
