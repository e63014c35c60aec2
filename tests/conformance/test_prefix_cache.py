"""contracts/slots.md: `PrefixCacheManager`: what it finds, keeps and lets go. It needs no device."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagoda
from conformance.slot_entries import MISS, cached, put
from pagoda import ConfigError, UsageError
from pagoda.compat import PrefixCacheManager, SlotAllocator
from pagoda.errors import ArgumentError, InvariantError


def entries(cache: PrefixCacheManager, tokens: list[int]) -> list[tuple[int, int, int]]:
    """What each prefix of a sequence points to, the shortest first. Renews them."""
    return [cache.find(tokens[:length]) for length in range(1, len(tokens) + 1)]


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (PrefixCacheManager, "max_capacity=1000"),
        (PrefixCacheManager.insert, "self, token_ids, slot, slot_ver"),
        (PrefixCacheManager.find, "self, token_ids"),
        (PrefixCacheManager.pin, "self, token_ids"),
        (PrefixCacheManager.release, "self, token_ids"),
        (PrefixCacheManager.copy_kv, "self, token_ids, target_slot, kv_cache, n_layers"),
        (PrefixCacheManager.find_valid, "self, token_ids, slots"),
    ],
)
def test_argument_names_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)) == wanted
    assert pagoda.compat.PrefixCacheManager is PrefixCacheManager


@pytest.mark.parametrize("max_capacity", [-1, 1.5, "3", None, 2**70])
def test_a_cache_that_cannot_be_is_refused(max_capacity: Any) -> None:
    with pytest.raises(ConfigError):
        PrefixCacheManager(max_capacity)


# --- insert and find


def test_nothing_is_found_in_an_empty_cache() -> None:
    cache = PrefixCacheManager()
    assert cache.max_capacity == 1000
    for tokens in ([], [1], [1, 2, 3]):
        assert cache.find(tokens) == MISS
    cache.check()


def test_find_gives_the_longest_match() -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2, 3, 4], 7, 3)
    cache.insert([1, 2, 9], 8, 1)
    assert cache.find([1, 2, 3, 4]) == (4, 7, 3)
    assert cache.find([1, 2, 3, 4, 5]) == (4, 7, 3)
    assert cache.find([1, 2, 3]) == (3, 7, 3)
    assert cache.find([1, 2, 9, 9]) == (3, 8, 1)
    assert cache.find([1, 2]) == (2, 8, 1)
    assert cache.find([2]) == MISS
    assert cache.find([]) == MISS
    cache.check()


def test_answers_are_plain_ints() -> None:
    cache = PrefixCacheManager()
    cache.insert(np.array([1, 2]), np.int64(0), np.int32(0))
    for answer in (cache.find([1, 2]), cache.find([3]), cache.find_valid([1, 2], SlotAllocator(1))):
        assert [type(it) for it in answer] == [int, int, int]
    assert cache.find([1, 2]) == (2, 0, 0)


def test_every_prefix_points_to_what_was_inserted_last() -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2, 3, 4], 0, 1)
    assert entries(cache, [1, 2, 3, 4]) == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 1)]
    cache.insert([1, 2, 7], 5, 2)
    assert entries(cache, [1, 2, 7]) == [(1, 5, 2), (2, 5, 2), (3, 5, 2)]
    assert entries(cache, [1, 2, 3, 4]) == [(1, 5, 2), (2, 5, 2), (3, 0, 1), (4, 0, 1)]
    cache.insert([1, 2, 3], 0, 3)  # ends inside what is there; the same slot, another version
    assert entries(cache, [1, 2, 3, 4]) == [(1, 0, 3), (2, 0, 3), (3, 0, 3), (4, 0, 1)]
    assert entries(cache, [1, 2, 7]) == [(1, 0, 3), (2, 0, 3), (3, 5, 2)]
    assert cache.num_tokens == 5
    cache.check()


def test_many_entries_may_name_one_slot_and_own_none() -> None:
    slots, cache = SlotAllocator(2), PrefixCacheManager()
    slot = slots.alloc()
    cache.insert([1, 2], slot, slots.version(slot))
    cache.insert([3, 4], slot, slots.version(slot))
    assert (cache.find([1, 2]), cache.find([3, 4])) == ((2, 0, 1), (2, 0, 1))
    assert slots.free_count == 1
    slots.free(slot)
    assert cache.find([1, 2]) == (2, 0, 1)


def test_an_empty_sequence_changes_nothing() -> None:
    cache = PrefixCacheManager()
    for call in (lambda: cache.insert([], 0, 0), lambda: cache.pin([]), lambda: cache.release([])):
        call()
        assert cache.num_tokens == 0
        cache.check()


FORMS: list[Callable[[list[int]], Any]] = [
    tuple,
    lambda ids: np.array(ids, dtype=np.int32),
    lambda ids: np.array(ids, dtype=np.int64),
    lambda ids: torch.tensor(ids),
    lambda ids: torch.tensor(ids, dtype=torch.int32),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_is_the_same_in_any_form(form: Callable[[list[int]], Any]) -> None:
    cache = PrefixCacheManager(3)
    cache.insert(form([1, 2, 3]), 4, 5)
    assert cache.find([1, 2, 3]) == cache.find(form([1, 2, 3])) == (3, 4, 5)
    cache.pin([1, 2, 3])
    cache.release(form([1, 2, 3]))
    cache.release([1, 2, 3])
    assert cache._tree.num_leases == 0
    cache.check()


@pytest.mark.parametrize(
    "bad", [None, [1.5], ["a"], [[1], [2, 3]], [-1], [2**31], [2**70], "12", {1: 2}], ids=str
)
def test_what_is_no_sequence_raises_a_typed_error_and_changes_nothing(bad: Any) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 0)
    kv = torch.zeros(2, 4, 1, 1, 1), torch.zeros(2, 4, 1, 1, 1)
    for call in (
        lambda: cache.insert(bad, 0, 0),
        lambda: cache.find(bad),
        lambda: cache.find_valid(bad, SlotAllocator(1)),
        lambda: cache.pin(bad),
        lambda: cache.release(bad),
        lambda: cache.copy_kv(bad, 1, kv, 1),
    ):
        with pytest.raises(UsageError):
            call()
        assert (cache.num_tokens, cache._tree.num_leases) == (2, 1)
        cache.check()


@pytest.mark.parametrize("bad", [-1, 1.5, None, "1", [1], 2**31 - 1, 2**70], ids=str)
def test_what_is_no_slot_or_version_raises_and_changes_nothing(bad: Any) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 0)
    for slot, version in ((bad, 0), (0, bad)):
        with pytest.raises(ArgumentError):
            cache.insert([1, 2, 3], slot, version)
        assert cached(cache, [1, 2, 3]) == [2]
        assert cache._tree.num_leases == 1
    cache.check()


# --- references and capacity


def test_the_least_recently_used_tails_go() -> None:
    cache = PrefixCacheManager(max_capacity=6)
    for first in (10, 20, 30):
        put(cache, [first, first + 1, first + 2])
    assert cached(cache, [10, 11, 12], [20, 21, 22], [30, 31, 32]) == [0, 3, 3]
    put(cache, [40])
    assert cached(cache, [20, 21, 22], [30, 31, 32], [40]) == [2, 3, 1]
    assert cache.num_tokens == 6
    cache.check()


def test_a_find_renews_what_it_found_and_its_prefixes() -> None:
    cache = PrefixCacheManager(max_capacity=6)
    put(cache, [10, 11, 12])
    put(cache, [20, 21, 22])
    assert cache.find([10, 11, 99]) == (2, 0, 1)
    put(cache, [30])
    assert cached(cache, [10, 11, 12], [20, 21, 22]) == [2, 3]  # 12 was not found, and is the coldest
    put(cache, [31, 32, 33])
    assert cached(cache, [10, 11, 12], [20, 21, 22]) == [2, 0]
    cache.check()


def test_a_miss_renews_nothing() -> None:
    cache = PrefixCacheManager(max_capacity=4)
    put(cache, [10, 11])
    put(cache, [20, 21])
    assert cache.find([99, 10, 11]) == MISS
    put(cache, [30, 31])
    assert cached(cache, [10, 11], [20, 21]) == [0, 2]


def test_capacity_counts_distinct_prefixes() -> None:
    cache = PrefixCacheManager(max_capacity=5)
    put(cache, [1, 2, 3])
    put(cache, [1, 2, 3])
    put(cache, [1, 2, 4, 5])
    assert cache.num_tokens == 5
    assert cached(cache, [1, 2, 3], [1, 2, 4, 5]) == [3, 4]
    put(cache, [1, 2, 4, 6])
    assert cache.num_tokens == 5
    assert cached(cache, [1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6]) == [2, 4, 4]
    cache.check()


def test_the_inserter_holds_a_reference_until_it_releases() -> None:
    cache = PrefixCacheManager(max_capacity=3)
    cache.insert([10, 11, 12], 0, 1)
    put(cache, [20, 21])
    assert cached(cache, [10, 11, 12], [20, 21]) == [3, 0]
    cache.release([10, 11, 12])
    assert cached(cache, [10, 11, 12]) == [3]  # kept for later
    put(cache, [20, 21])
    assert cached(cache, [10, 11, 12], [20, 21]) == [1, 2]
    cache.check()


def test_references_are_counted() -> None:
    cache = PrefixCacheManager(max_capacity=2)
    cache.insert([10, 11], 0, 1)
    cache.insert([10, 11], 0, 2)
    cache.pin([10, 11])
    for _ in range(2):
        cache.release([10, 11])
        put(cache, [20, 21])
        assert cached(cache, [10, 11], [20, 21]) == [2, 0]
    cache.release([10, 11])
    put(cache, [20, 21])
    assert cached(cache, [10, 11], [20, 21]) == [0, 2]
    cache.check()


def test_a_pin_keeps_a_prefix_and_no_more() -> None:
    cache = PrefixCacheManager(max_capacity=3)
    put(cache, [10, 11, 12])
    cache.pin([10, 11])
    put(cache, [20, 21, 22])
    assert cached(cache, [10, 11, 12], [20, 21, 22]) == [2, 1]
    cache.release([10, 11, 12])  # not what was pinned
    put(cache, [30, 31, 32])
    assert cached(cache, [10, 11, 12]) == [2]
    cache.release([10, 11])
    put(cache, [40, 41, 42])
    assert cached(cache, [10, 11, 12], [40, 41, 42]) == [0, 3]
    cache.check()


def test_pin_and_release_do_nothing_for_what_is_not_cached_or_referenced() -> None:
    cache = PrefixCacheManager(max_capacity=4)
    put(cache, [10, 11])
    for tokens in ([99], [10, 11, 12], [11]):
        cache.pin(tokens)
        cache.release(tokens)
    for _ in range(3):
        cache.release([10, 11])  # at zero already
    assert cache._tree.num_leases == 0
    cache.pin([10, 11])  # counts from zero, not from below
    put(cache, [20, 21, 22, 23])
    assert cached(cache, [10, 11], [20, 21, 22, 23]) == [2, 2]
    cache.check()


def test_a_pin_of_what_is_not_cached_does_not_renew_its_beginning() -> None:
    cache = PrefixCacheManager(max_capacity=4)
    put(cache, [10, 11])
    put(cache, [20, 21])
    cache.pin([10, 11, 12])
    cache.release([10, 11, 12])
    put(cache, [30, 31])
    assert cached(cache, [10, 11], [20, 21]) == [0, 2]


def test_one_who_holds_a_longer_sequence_keeps_the_shorter_one() -> None:
    cache = PrefixCacheManager(max_capacity=2)
    put(cache, [1, 2])
    cache.insert([1, 2, 3], 1, 1)
    cache.release([1, 2])
    put(cache, [9])
    assert cached(cache, [1, 2, 3], [9]) == [3, 0]
    cache.check()


def test_over_capacity_with_everything_referenced_it_stays_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = PrefixCacheManager(max_capacity=4)
    with caplog.at_level(logging.WARNING):
        cache.insert([1, 2, 3], 0, 1)
        assert caplog.records == []
        cache.insert([4, 5, 6], 1, 1)
        assert cache.num_tokens == 6
        cache.insert([7, 8], 2, 1)
        assert cache.num_tokens == 8
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "max_capacity" in record.getMessage()
    assert record.name.startswith("pagoda")
    cache.check()
    cache.release([1, 2, 3])  # capacity holds again as far as it can
    assert cached(cache, [1, 2, 3], [4, 5, 6], [7, 8]) == [0, 3, 2]
    cache.release([4, 5, 6])
    assert cached(cache, [4, 5, 6], [7, 8]) == [2, 2]
    cache.check()
    with caplog.at_level(logging.WARNING):
        cache.insert([4, 5, 6], 0, 2)
    assert len(caplog.records) == 2  # it had been within capacity in between


def test_one_sequence_longer_than_capacity_is_trimmed_when_it_is_released() -> None:
    cache = PrefixCacheManager(max_capacity=10)
    cache.insert(range(100), 3, 1)
    assert cache.find(range(100)) == (100, 3, 1)
    cache.release(range(100))
    assert cache.find(range(100)) == (10, 3, 1)
    cache.check()


def test_a_cache_of_nothing_keeps_what_is_referenced() -> None:
    cache = PrefixCacheManager(0)
    cache.insert([1, 2], 3, 4)
    assert cache.find([1, 2]) == (2, 3, 4)
    cache.release([1, 2])
    assert (cache.find([1, 2]), cache.num_tokens) == (MISS, 0)
    cache.check()


def test_reset_forgets_everything() -> None:
    cache = PrefixCacheManager(3)
    cache.insert([1, 2, 3, 4], 0, 1)
    cache.reset()
    assert (cache.find([1, 2, 3, 4]), cache.num_tokens) == (MISS, 0)
    cache.release([1, 2, 3, 4])
    cache.check()
    put(cache, [1, 2])
    assert cache.num_tokens == 2


class Broken:
    """A tree one of whose calls fails."""

    def __init__(self, tree: Any, call: str, error: type[BaseException]) -> None:
        self._tree, self._call, self._error = tree, call, error

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise self._error
        return getattr(self._tree, name)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["insert", "replace"])
def test_an_insert_that_fails_keeps_no_reference(call: str, error: type[BaseException]) -> None:
    cache = PrefixCacheManager(100)
    put(cache, [1, 2, 3])
    tree = cache._tree
    cache._tree = Broken(tree, call, error)  # type: ignore[assignment]
    with pytest.raises(error):
        cache.insert([1, 2, 4], 5, 1)
    cache._tree = tree
    assert (tree.num_leases, tree.protected_tokens) == (0, 0)
    cache.check()
    assert cache.find([1, 2]) == (2, 0, 1)
    cache.insert([1, 2, 4], 5, 1)
    assert cache.find([1, 2, 4]) == (3, 5, 1)
    cache.check()


def test_the_largest_slot_and_version_come_back() -> None:
    cache = PrefixCacheManager()
    largest = 2**31 - 2
    put(cache, [1, 2], largest, largest)
    assert cache.find([1, 2]) == (2, largest, largest)
    for bad in ((largest + 1, 0), (0, largest + 1)):
        with pytest.raises(ArgumentError):
            cache.insert([3], *bad)
    assert cached(cache, [3]) == [0]
    cache.check()


def test_the_largest_token_is_one_and_no_larger() -> None:
    cache, largest = PrefixCacheManager(), 2**31 - 1
    for form in (list, np.array, torch.tensor):
        put(cache, form([largest, 0]))
        assert cache.find(form([largest, 0])) == (2, 0, 1)
        for bad in ([largest + 1], [-1], [0, largest + 1, 0]):
            for call in (cache.find, cache.pin, cache.release, lambda ids: cache.insert(ids, 0, 1)):
                with pytest.raises(UsageError):
                    call(form(bad))
    cache.check()


def test_finds_at_many_lengths_leave_few_nodes() -> None:
    """Each find is a use of its own and splits; what was split is one run again when all of it is used."""
    cache = PrefixCacheManager(10_000)
    tokens = np.arange(4_096)
    put(cache, tokens)
    for length in range(1, 4_096, 13):
        assert cache.find(tokens[:length])[0] == length
        cache.check()
    assert cache.find(tokens) == (4_096, 0, 1)
    assert cache._tree.num_nodes <= 2
    for length in np.random.default_rng(0).permutation(4_096)[:500] + 1:
        assert cache.find(tokens[:length])[0] == length
    assert cache.find(tokens) == (4_096, 0, 1)
    assert cache._tree.num_nodes <= 2
    cache.check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cache: cache._references.clear(),  # the tree has a lease that nobody counts
        lambda cache: next(iter(cache._references.values())).append(None),  # one is counted that is not there
        lambda cache: cache._references.update({b"": []}),  # a sequence with no reference
    ],
)
def test_check_finds_references_that_are_counted_wrongly(spoil: Callable[[Any], None]) -> None:
    cache = PrefixCacheManager(3)
    cache.insert([1, 2], 0, 1)
    cache.check()
    spoil(cache)
    with pytest.raises(InvariantError) as error:
        cache.check()
    assert error.value.number == 16


def test_check_finds_what_should_have_been_evicted() -> None:
    cache = PrefixCacheManager(3)
    put(cache, [1, 2])
    cache.max_capacity = 1
    with pytest.raises(InvariantError) as error:
        cache.check()
    assert error.value.number == 16
