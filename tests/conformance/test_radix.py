"""contracts/radix.md: the cache interface, as `RadixCacheManager` has it. Words are pages, see `prefixes`."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagoda
from conformance.prefixes import drawn, evict, insert, match, seen, slots_of, tokens_of
from pagoda import CapacityError, ConfigError
from pagoda.compat import BaseCacheHandle, BaseCacheManager, RadixCacheHandle, RadixCacheManager, SizeInfo
from pagoda.errors import ArgumentError, InvariantError, NotHeldError, StaleError


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (RadixCacheManager, "device, page_size=1"),
        (RadixCacheManager.match_prefix, "self, input_ids"),
        (RadixCacheManager.lock_handle, "self, handle, unlock=False"),
        (RadixCacheManager.insert_prefix, "self, input_ids, indices"),
        (RadixCacheManager.evict, "self, size"),
        (RadixCacheManager.reset, "self"),
    ],
)
def test_argument_names_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)).startswith(wanted)


def test_the_interface_is_abstract_and_the_radix_cache_is_one() -> None:
    assert pagoda.compat.RadixCacheManager is RadixCacheManager
    assert issubclass(RadixCacheManager, BaseCacheManager)
    assert issubclass(RadixCacheHandle, BaseCacheHandle)
    with pytest.raises(TypeError):
        BaseCacheManager()  # type: ignore[abstract]
    for name in ("match_prefix", "lock_handle", "insert_prefix", "evict", "reset", "size_info"):
        assert name in BaseCacheManager.__abstractmethods__


class Smallest(BaseCacheManager):
    """Exactly the names of the contract: a cache of nothing."""

    sizes = SizeInfo(0, 0)

    def match_prefix(self, input_ids: Any) -> tuple[BaseCacheHandle, torch.Tensor]:
        return BaseCacheHandle(0), torch.zeros(0, dtype=torch.int32)

    def lock_handle(self, handle: BaseCacheHandle | None, unlock: bool = False) -> None: ...

    def insert_prefix(self, input_ids: Any, indices: Any) -> int:
        return 0

    def evict(self, size: int) -> torch.Tensor:
        raise CapacityError("evictable tokens", size, 0, 0)

    def reset(self) -> None: ...

    @property
    def size_info(self) -> SizeInfo:
        return self.sizes


def test_a_cache_with_the_names_of_the_contract_is_one() -> None:
    made = Smallest()
    made.check()
    assert made.match_prefix([1])[0].cached_len == made.insert_prefix([1], [1]) == 0
    for wrong in (SizeInfo(-1, 2), SizeInfo(2, -1)):
        made.sizes = wrong
        with pytest.raises(InvariantError):
            made.check()


def test_a_handle_has_a_length_that_cannot_be_changed() -> None:
    assert RadixCacheHandle(3).cached_len == 3
    assert RadixCacheHandle(cached_len=3).cached_len == 3
    with pytest.raises(AttributeError):
        RadixCacheHandle(3).cached_len = 4  # type: ignore[misc]
    for bad in (-1, 1.0, None, "3"):
        with pytest.raises(ArgumentError):
            RadixCacheHandle(bad)  # type: ignore[arg-type]
    assert RadixCacheHandle(3) != RadixCacheHandle(3)  # each is one match


def test_size_info_adds_up() -> None:
    info = SizeInfo(3, 4)
    assert (info.evictable_size, info.protected_size, info.total_size) == (3, 4, 7)
    assert SizeInfo(evictable_size=1, protected_size=2) == (1, 2)


@pytest.mark.parametrize(
    ("device", "page_size"), [("cpu", 0), ("cpu", -1), ("cpu", 1.5), ("cpu", 2**31), ("tpu", 1), (7.5, 1)]
)
def test_a_manager_that_cannot_be_is_refused(device: Any, page_size: Any) -> None:
    with pytest.raises(ConfigError):
        RadixCacheManager(device, page_size)


# --- match


def test_an_empty_cache_matches_nothing(manager: RadixCacheManager, device: str) -> None:
    for words in ([], [1], [1, 2, 3]):
        handle, indices = manager.match_prefix(tokens_of(words, manager.page_size))
        assert isinstance(handle, RadixCacheHandle)
        assert handle.cached_len == 0
        assert (indices.shape, indices.dtype, indices.device.type) == ((0,), torch.int32, device)
    assert manager.size_info == SizeInfo(0, 0)
    manager.check()


@pytest.mark.parametrize(
    ("words", "pages"),
    [
        ([1, 2, 3, 4], [10, 11, 12, 13]),
        ([1, 2, 3, 4, 9], [10, 11, 12, 13]),
        ([1, 2, 3], [10, 11, 12]),  # ends inside a run
        ([1, 2, 3, 9], [10, 11, 12]),  # leaves it inside
        ([1, 2, 5, 6], [10, 11, 22, 23]),
        ([1, 2], [10, 11]),
        ([1], [10]),
        ([2], []),
        ([], []),
    ],
)
def test_match_gives_the_slots_of_the_longest_cached_prefix(
    forked: RadixCacheManager, device: str, words: list[int], pages: list[int]
) -> None:
    size = forked.page_size
    handle, indices = forked.match_prefix(tokens_of(words, size))
    assert handle.cached_len == len(pages) * size
    assert indices.tolist() == slots_of(pages, size)
    assert (indices.dtype, indices.device.type) == (torch.int32, device)


def test_only_whole_pages_match(forked: RadixCacheManager) -> None:
    size = forked.page_size
    tokens = tokens_of([1, 2, 3], size)
    for length in range(len(tokens) + 1):
        assert forked.match_prefix(tokens[:length])[0].cached_len == length // size * size
    other = [*tokens[:-1], 7]  # the last token of a page differs
    assert forked.match_prefix(other)[0].cached_len == 2 * size


def test_match_changes_neither_what_is_cached_nor_the_order_of_eviction(forked: RadixCacheManager) -> None:
    before = seen(forked)
    for words in ([1, 2, 3, 4], [1, 2, 3], [1], [8], [1, 2, 3, 9]):
        match(forked, words)
    assert seen(forked) == before
    assert evict(forked, 2) == [12, 13]  # 3 4 is still the older one


FORMS: dict[str, Callable[[list[int], str], Any]] = {
    "list": lambda ids, device: ids,
    "tuple": lambda ids, device: tuple(ids),
    "int32": lambda ids, device: np.array(ids, dtype=np.int32),
    "int64": lambda ids, device: np.array(ids, dtype=np.int64),
    "strided": lambda ids, device: np.repeat(np.array(ids, dtype=np.int64), 2)[::2],
    "host tensor": lambda ids, device: torch.tensor(ids, dtype=torch.int64),
    "device tensor": lambda ids, device: torch.tensor(ids, dtype=torch.int32, device=device),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_slots_come_in_any_form(manager: RadixCacheManager, device: str, form: str) -> None:
    size, given = manager.page_size, FORMS[form]
    tokens, slots = tokens_of([1, 2, 3], size), slots_of([5, 3, 9], size)
    assert manager.insert_prefix(given(tokens, device), given(slots, device)) == 0
    handle, indices = manager.match_prefix(given(tokens, device))
    assert (handle.cached_len, indices.tolist()) == (3 * size, slots)
    manager.check()


def test_what_was_given_may_be_changed_afterwards(manager: RadixCacheManager) -> None:
    size = manager.page_size
    tokens, slots = np.array(tokens_of([1, 2], size)), np.array(slots_of([4, 5], size))
    manager.insert_prefix(tokens, slots)
    handle, _ = manager.match_prefix(tokens)
    tokens[:], slots[:] = 0, 0
    manager.lock_handle(handle)
    assert match(manager, [1, 2])[1] == [4, 5]
    manager.check()


# --- lock and unlock


def test_locking_moves_tokens_between_evictable_and_protected(forked: RadixCacheManager) -> None:
    size = forked.page_size
    handle, _ = match(forked, [1, 2, 3, 4])
    assert forked.size_info == (6 * size, 0)
    forked.lock_handle(handle)
    assert forked.size_info == (2 * size, 4 * size)
    forked.lock_handle(handle, unlock=True)
    assert forked.size_info == (6 * size, 0)
    forked.check()


def test_locking_splits_a_run_where_the_match_ends_inside_it(forked: RadixCacheManager) -> None:
    handle, _ = match(forked, [1, 2, 3, 8])
    shape = [(1, [1, 2], [10, 11], 0), (2, [3, 4], [12, 13], 0), (2, [5, 6], [22, 23], 0)]
    assert drawn(forked) == shape
    forked.lock_handle(handle)
    assert drawn(forked) == [
        (1, [1, 2], [10, 11], 1),
        (2, [3], [12], 1),
        (3, [4], [13], 0),
        (2, [5, 6], [22, 23], 0),
    ]
    forked.check()


def test_a_locked_path_is_not_evicted(forked: RadixCacheManager) -> None:
    size = forked.page_size
    handle, pages = match(forked, [1, 2, 3])
    forked.lock_handle(handle)
    assert sorted(evict(forked, 3)) == [13, 22, 23]
    before = seen(forked)
    with pytest.raises(CapacityError):
        forked.evict(1)
    assert seen(forked) == before
    assert match(forked, [1, 2, 3, 4])[1] == pages == [10, 11, 12]
    forked.lock_handle(handle, unlock=True)
    assert [evict(forked, 1) for _ in range(3)] == [[12], [11], [10]]
    assert forked.size_info == (0, 0)
    assert size * 3 == handle.cached_len
    forked.check()


def test_a_handle_that_is_locked_twice_is_unlocked_twice(forked: RadixCacheManager) -> None:
    size = forked.page_size
    handle, _ = match(forked, [1, 2])
    forked.lock_handle(handle)
    forked.lock_handle(handle)
    assert drawn(forked)[0][3] == 2
    forked.lock_handle(handle, unlock=True)
    assert forked.size_info.protected_size == 2 * size
    forked.lock_handle(handle, unlock=True)
    assert forked.size_info.protected_size == 0
    forked.check()


def test_unlocking_more_often_than_locked_raises_and_takes_nothing_from_others(
    forked: RadixCacheManager,
) -> None:
    mine, _ = match(forked, [1, 2, 3, 4])
    yours, _ = match(forked, [1, 2, 3, 4])
    with pytest.raises(NotHeldError):
        forked.lock_handle(mine, unlock=True)  # never locked
    forked.lock_handle(mine)
    forked.lock_handle(yours)
    forked.lock_handle(mine, unlock=True)
    before = seen(forked)
    with pytest.raises(NotHeldError):
        forked.lock_handle(mine, unlock=True)
    assert seen(forked) == before
    assert forked.size_info.protected_size == 4 * forked.page_size
    forked.lock_handle(yours, unlock=True)
    assert forked.size_info.protected_size == 0
    forked.check()


def test_no_handle_is_locked_and_unlocked_without_effect(forked: RadixCacheManager) -> None:
    before = seen(forked)
    forked.lock_handle(None)
    forked.lock_handle(None, unlock=True)
    assert seen(forked) == before


@pytest.mark.parametrize("unlock", [False, True])
def test_a_handle_of_somebody_else_is_refused(forked: RadixCacheManager, unlock: bool) -> None:
    other = RadixCacheManager(forked.device, forked.page_size)
    insert(other, [1, 2], [10, 11])
    theirs, _ = match(other, [1, 2])
    other.lock_handle(theirs)
    before = seen(forked), seen(other)
    for handle in (theirs, RadixCacheHandle(0), RadixCacheHandle(2), BaseCacheHandle(0), 7, "handle"):
        with pytest.raises(ArgumentError):
            forked.lock_handle(handle, unlock)  # type: ignore[arg-type]
    assert (seen(forked), seen(other)) == before


def test_a_handle_of_nothing_can_be_locked(manager: RadixCacheManager) -> None:
    handle, _ = match(manager, [1])
    manager.lock_handle(handle)
    assert manager.size_info == (0, 0)
    insert(manager, [1], [4])
    assert evict(manager, 1) == [4]
    manager.lock_handle(handle, unlock=True)
    with pytest.raises(NotHeldError):
        manager.lock_handle(handle, unlock=True)
    manager.check()


@pytest.mark.parametrize("num_evicted", [1, 2])
def test_a_handle_whose_tokens_were_evicted_is_stale(forked: RadixCacheManager, num_evicted: int) -> None:
    handle, _ = match(forked, [1, 2, 3, 4])
    assert evict(forked, num_evicted) == [12, 13][-num_evicted:]
    before = seen(forked)
    for _ in range(2):
        with pytest.raises(StaleError):
            forked.lock_handle(handle)
    assert seen(forked) == before  # nothing was renewed or split either
    with pytest.raises(NotHeldError):
        forked.lock_handle(handle, unlock=True)
    forked.check()


def test_a_handle_is_stale_when_its_tokens_lie_elsewhere_now(forked: RadixCacheManager) -> None:
    handle, _ = match(forked, [1, 2, 3, 4])
    evict(forked, 2)
    insert(forked, [1, 2, 3, 4], [10, 11, 30, 31])
    with pytest.raises(StaleError):
        forked.lock_handle(handle)
    assert forked.size_info.protected_size == 0
    again, pages = match(forked, [1, 2, 3, 4])
    forked.lock_handle(again)
    assert pages == [10, 11, 30, 31]


def test_a_handle_is_good_for_what_came_back_to_the_same_slots(forked: RadixCacheManager) -> None:
    handle, pages = match(forked, [1, 2, 3, 4])
    evict(forked, 2)
    insert(forked, [1, 2, 3, 4], pages)
    forked.lock_handle(handle)
    assert forked.size_info.protected_size == 4 * forked.page_size
    forked.check()


def test_a_handle_lives_through_splits_and_growth_of_what_it_found(forked: RadixCacheManager) -> None:
    handle, _ = match(forked, [1, 2, 3, 4])
    insert(forked, [1, 9], [40, 41])
    insert(forked, [1, 2, 3, 4, 5], [0, 0, 0, 0, 42])
    forked.lock_handle(handle)
    assert forked.size_info.protected_size == 4 * forked.page_size
    forked.check()
