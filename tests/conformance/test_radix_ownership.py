"""contracts/radix.md: what `RadixCacheManager` takes, gives back and forgets. A word is a page of tokens."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.prefixes import drawn, evict, insert, match, seen, slots_of, tokens_of
from pagoda import CapacityError, UsageError
from pagoda.compat import RadixCacheManager
from pagoda.errors import AlreadyHeldError, ArgumentError, InvariantError, OutOfRangeError, StaleError

# --- insert


def test_insert_says_how_much_was_cached_and_owns_the_rest(manager: RadixCacheManager) -> None:
    size = manager.page_size
    assert insert(manager, [1, 2, 3], [10, 11, 12]) == 0
    assert insert(manager, [1, 2, 3], [20, 21, 22]) == 3
    assert insert(manager, [1, 2], [20, 21]) == 2
    assert insert(manager, [1, 2, 4], [20, 21, 22]) == 2
    assert manager.size_info == (4 * size, 0)
    assert match(manager, [1, 2, 3])[1] == [10, 11, 12]  # what was there stays where it was
    assert match(manager, [1, 2, 4])[1] == [10, 11, 22]
    assert sorted(evict(manager, 4)) == [10, 11, 12, 22]
    manager.check()


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_tail_shorter_than_a_page_stays_the_callers(device: str, page_size: int) -> None:
    manager = RadixCacheManager(device, page_size)
    tokens, slots = tokens_of([1, 2], page_size), slots_of([10, 11], page_size)
    for length in range(2 * page_size):
        manager.reset()
        assert manager.insert_prefix(tokens[:length], slots[:length]) == 0
        assert manager.size_info.total_size == length // page_size * page_size
    assert manager.insert_prefix(tokens, slots) == page_size
    manager.check()


def test_slot_0_is_a_slot_here(manager: RadixCacheManager) -> None:
    insert(manager, [1, 2], [0, 1])
    assert match(manager, [1, 2])[1] == [0, 1]
    assert evict(manager, 2) == [0, 1]
    manager.check()


def test_pages_that_the_tree_owns_cannot_be_inserted_again(forked: RadixCacheManager) -> None:
    size = forked.page_size
    before = seen(forked)
    for words, pages, position in (
        ([7], [10], 0),
        ([7, 8], [50, 22], 1),
        ([1, 2, 7], [10, 11, 12], 2),
        ([7, 8], [50, 50], 1),  # twice in one call
        ([1, 2, 7, 8, 9], [0, 0, 51, 52, 51], 4),
    ):
        with pytest.raises(AlreadyHeldError) as error:
            insert(forked, words, pages)
        assert (error.value.id, error.value.position) == (pages[position] * size, position * size)
        assert seen(forked) == before
    forked.check()
    evict(forked, 6)
    assert insert(forked, [7, 8], [10, 22]) == 0  # they were the caller's again


NO_TOKENS: list[Any] = [None, [1.0, 2.0], ["a", "b"], [[1], [2, 3]], [-1, 2], [2**31, 2], [2**70, 2], {1: 1}]
NO_SLOTS: list[Any] = [*NO_TOKENS, [1], [1, 2, 3], [], [2**31 - 1, 1]]


@pytest.mark.parametrize("bad", NO_TOKENS, ids=str)
def test_what_are_no_tokens_raises_a_typed_error_and_changes_nothing(device: str, bad: Any) -> None:
    manager = RadixCacheManager(device)
    manager.insert_prefix([1, 2, 3], [7, 8, 9])
    before = seen(manager)
    for call in (lambda: manager.match_prefix(bad), lambda: manager.insert_prefix(bad, [4, 5])):
        with pytest.raises(UsageError):
            call()
        assert seen(manager) == before
    manager.check()


@pytest.mark.parametrize("bad", NO_SLOTS, ids=str)
def test_what_are_no_slots_raises_a_typed_error_and_changes_nothing(device: str, bad: Any) -> None:
    manager = RadixCacheManager(device)
    manager.insert_prefix([1, 2, 3], [7, 8, 9])
    before = seen(manager)
    with pytest.raises(UsageError):
        manager.insert_prefix([4, 5], bad)
    assert seen(manager) == before
    manager.check()


@pytest.mark.parametrize(
    "slots",
    [
        [1, 2, 3, 4],  # begins inside a page
        [4, 5, 7, 6],
        [4, 6, 5, 7],
        [4, 5, 6, 8],
        [4, 4, 4, 4],
        [4, 5, 6, 7, 11, 12],  # a tail in two pages
    ],
    ids=str,
)
def test_slots_are_whole_pages_in_order(device: str, slots: list[int]) -> None:
    manager = RadixCacheManager(device, 4)
    with pytest.raises(ArgumentError):
        manager.insert_prefix(range(len(slots)), slots)
    assert manager.size_info.total_size == 0
    assert manager.insert_prefix(range(6), [8, 9, 10, 11, 4, 5]) == 0
    manager.check()


@pytest.mark.parametrize("tail", [[9], [11], [8, 10], [10, 9, 8]], ids=str)
def test_a_tail_lies_anywhere_in_its_page(device: str, tail: list[int]) -> None:
    manager = RadixCacheManager(device, 4)
    assert manager.insert_prefix(range(4 + len(tail)), [4, 5, 6, 7, *tail]) == 0
    assert manager.size_info == (4, 0)
    assert manager.insert_prefix(range(50, 54), [8, 9, 10, 11]) == 0  # its page stayed the caller's
    manager.check()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_highest_slot_can_be_cached_and_one_past_it_is_named(manager: RadixCacheManager) -> None:
    size = manager.page_size
    highest = 2**31 // size - 2
    before = resident_bytes()
    for form in (list, lambda ids: np.array(ids, dtype=np.int64), lambda ids: np.array(ids, dtype=np.int32)):
        slots = range(highest * size, (highest + 1) * size)
        assert manager.insert_prefix(range(size), form(slots)) == 0
        assert match_tokens(manager, range(size)) == list(slots)
        manager.check()
        assert resident_bytes() - before < 64 << 20  # what is cached counts, not how high it lies
        assert evict(manager, 1) == [highest]
        with pytest.raises(OutOfRangeError) as error:
            manager.insert_prefix(range(size), form(range((highest + 1) * size, (highest + 2) * size)))
        assert (error.value.id, error.value.position) == ((highest + 1) * size, 0)
        assert manager.size_info.total_size == 0


def match_tokens(manager: RadixCacheManager, tokens: Any) -> list[int]:
    slots: list[int] = manager.match_prefix(tokens)[1].tolist()
    return slots


class Broken:
    """A tree whose insert fails, with memory or with the user's patience at an end."""

    def __init__(self, tree: Any, error: type[BaseException]) -> None:
        self.tree, self.error = tree, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def insert(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_insert_that_fails_takes_nothing(forked: RadixCacheManager, error: type[BaseException]) -> None:
    before, tree = seen(forked), forked._tree
    forked._tree = Broken(tree, error)  # type: ignore[assignment]
    with pytest.raises(error):
        insert(forked, [1, 2, 7, 8], [10, 11, 30, 31])
    forked._tree = tree
    assert seen(forked) == before
    forked.check()
    assert insert(forked, [1, 2, 7, 8], [10, 11, 30, 31]) == 2  # they stayed the caller's
    forked.check()


# --- evict


def test_evicting_nothing_does_nothing(forked: RadixCacheManager, device: str) -> None:
    before = seen(forked)
    freed = forked.evict(0)
    assert (freed.tolist(), freed.dtype, freed.device.type) == ([], torch.int32, device)
    assert seen(forked) == before


def test_tails_of_the_coldest_leaves_go_first(forked: RadixCacheManager) -> None:
    assert evict(forked, 1) == [13]  # the tail of the older leaf
    assert evict(forked, 2) == [12, 23]  # its rest, then the tail of the other
    assert drawn(forked) == [(1, [1, 2], [10, 11], 0), (2, [5], [22], 0)]
    assert evict(forked, 2) == [22, 11]  # the parent became a leaf
    assert drawn(forked) == [(1, [1], [10], 0)]
    assert evict(forked, 1) == [10]
    assert forked.size_info == (0, 0)
    forked.check()


def test_use_decides_what_is_cold(forked: RadixCacheManager) -> None:
    handle, _ = match(forked, [1, 2, 3, 4])
    forked.lock_handle(handle)
    forked.lock_handle(handle, unlock=True)
    assert evict(forked, 2) == [22, 23]
    insert(forked, [7], [40])
    insert(forked, [1, 2, 3, 4], [50, 51, 52, 53])  # all there: used, and nothing else
    assert evict(forked, 2) == [40, 13]
    forked.check()


def test_the_size_is_rounded_up_to_pages(device: str) -> None:
    manager = RadixCacheManager(device, 4)
    insert(manager, [1, 2, 3, 4], [1, 2, 3, 4])
    assert manager.evict(1).tolist() == [16, 17, 18, 19]
    assert manager.evict(5).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert manager.size_info == (4, 0)


def test_more_than_is_evictable_raises_and_evicts_nothing(forked: RadixCacheManager) -> None:
    size = forked.page_size
    handle, _ = match(forked, [1, 2, 3, 4])
    forked.lock_handle(handle)
    before = seen(forked)
    for wanted in (2 * size + 1, 6 * size, 10**9, 2**63, 2**100):
        with pytest.raises(CapacityError) as error:
            forked.evict(wanted)
        assert isinstance(error.value, RuntimeError)
        assert (error.value.wanted, error.value.free, error.value.total) == (wanted, 2 * size, 6 * size)
    assert seen(forked) == before
    assert evict(forked, 2) == [22, 23]


@pytest.mark.parametrize("bad", [-1, 1.0, "1", None, [1]], ids=str)
def test_what_is_no_size_is_refused(forked: RadixCacheManager, bad: Any) -> None:
    before = seen(forked)
    with pytest.raises(ArgumentError):
        forked.evict(bad)
    assert seen(forked) == before


def test_evicted_slots_come_on_the_host_too(forked: RadixCacheManager) -> None:
    freed = forked.evict_host(2 * forked.page_size)
    assert isinstance(freed, np.ndarray)
    assert (freed.dtype, freed.tolist()) == (np.int32, slots_of([12, 13], forked.page_size))
    forked.check()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_without_memory_for_the_answer_nothing_is_evicted(
    forked: RadixCacheManager, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    size = forked.page_size
    before = seen(forked)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", fail)
        with pytest.raises(error):
            forked.evict(3 * size)
        with pytest.raises(CapacityError):  # before any memory is asked for
            forked.evict(2**60)
    assert seen(forked) == before
    forked.check()
    for page in (12, 13, 23):  # what would have gone is the tree's, once
        with pytest.raises(AlreadyHeldError):
            insert(forked, [8], [page])
    assert evict(forked, 3) == [12, 13, 23]
    assert insert(forked, [8, 9], [13, 12]) == 0
    forked.check()
    assert sorted(evict(forked, 5)) == [10, 11, 12, 13, 22]
    forked.check()


def meanwhile(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """Another thread makes a call while memory for an answer is made; nobody waits for anybody."""
    empty = torch.empty

    def busy(*shape: Any, **options: Any) -> torch.Tensor:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", busy)


def test_memory_for_answers_is_made_without_a_lock_held(
    forked: RadixCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda: forked.size_info)
    assert len(forked.evict(1)) == forked.page_size
    assert match(forked, [1, 2])[1] == [10, 11]


def test_a_reset_in_the_middle_of_an_evict_leaves_nothing_to_it(
    forked: RadixCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        meanwhile(patched, forked.reset)
        with pytest.raises(CapacityError):
            forked.evict(1)
    assert forked.size_info == (0, 0)
    forked.check()
    assert insert(forked, [1, 2], [12, 13]) == 0
    forked.check()


def test_an_insert_in_the_middle_of_an_evict_loses_nothing(
    forked: RadixCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        meanwhile(patched, lambda: insert(forked, [7], [30]))
        assert evict(forked, 2) == [12, 13]
    assert forked.size_info.total_size == 5 * forked.page_size
    forked.check()


# --- reset, check


def test_reset_forgets_everything_locks_included(forked: RadixCacheManager) -> None:
    locked, _ = match(forked, [1, 2])
    matched, _ = match(forked, [1, 2, 3])
    forked.lock_handle(locked)
    forked.reset()
    assert forked.size_info == (0, 0)
    assert drawn(forked) == []
    assert match(forked, [1, 2])[0].cached_len == 0
    with pytest.raises(StaleError):
        forked.lock_handle(locked, unlock=True)
    with pytest.raises(StaleError):
        forked.lock_handle(matched)
    forked.check()
    assert insert(forked, [1, 2], [10, 11]) == 0  # the slots are the caller's again
    assert forked.size_info.evictable_size == 2 * forked.page_size
    forked.check()


def int32(*pages: int) -> Any:
    return np.array(pages, dtype=np.int32)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manager: manager._pages.remove(int32(10)),  # in the tree, and not noted
        lambda manager: manager._pages.add(int32(900)),  # noted, and not in the tree
        lambda manager: (manager._pages.remove(int32(10)), manager._pages.add(int32(900))),  # as many
        lambda manager: manager._tree.insert([5], [11]),  # a page twice in the tree
    ],
)
def test_check_finds_pages_that_are_counted_wrongly(device: str, spoil: Any) -> None:
    manager = RadixCacheManager(device)
    insert(manager, [1, 2], [10, 11])
    manager.check()
    spoil(manager)
    with pytest.raises(InvariantError) as error:
        manager.check()
    assert error.value.number == 13


def test_same_calls_same_evictions_whatever_the_clock_says() -> None:
    def history(pause_s: float) -> list[Any]:
        manager, told = RadixCacheManager("cpu"), []
        for turn in range(24):
            time.sleep(pause_s)
            insert(manager, [turn % 5, turn % 3, turn % 7], [3 * turn, 3 * turn + 1, 3 * turn + 2])
            if turn % 4 == 2:
                handle, _ = match(manager, [turn % 5, turn % 3])
                manager.lock_handle(handle)
                time.sleep(pause_s)
                manager.lock_handle(handle, unlock=True)
            if turn % 4 == 3:
                told.append(evict(manager, 2))
            told.append(seen(manager))  # times of use included
        return told

    assert history(0) == history(0.003)
