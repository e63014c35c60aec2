"""contracts/radix.md: `CacheManager`, slots and tree together; `Request`."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from conformance.prefixes import (
    NUM_PAGES,
    begin,
    evict,
    insert,
    match,
    request_of,
    run,
    seen,
    slots_of,
    tokens_of,
)
from pagoda import CapacityError, ConfigError, UsageError
from pagoda.compat import CacheManager, RadixCacheManager, Request
from pagoda.errors import (
    AlreadyHeldError,
    ArgumentError,
    DoubleFreeError,
    InvariantError,
    NotHeldError,
    OutOfRangeError,
    StaleError,
)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (CacheManager, "device, num_pages"),
        (CacheManager.match_req, "self, req"),
        (CacheManager.lock, "self, handle"),
        (CacheManager.unlock, "self, handle"),
        (CacheManager.allocate, "self, needed_len"),
        (CacheManager.free_and_cache_finished_req, "self, old_handle, input_ids, indices"),
        (
            Request,
            "uid, input_ids, table_idx, cached_len, output_len, cache_handle=None, max_tokens=1024",
        ),
    ],
)
def test_argument_names_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)).startswith(wanted)


def test_attributes(device: str) -> None:
    cache = CacheManager(device, 7)
    assert (cache.num_pages, cache.device, cache.available_size) == (7, device, 7)
    assert isinstance(cache.manager, RadixCacheManager)
    assert isinstance(inspect.getattr_static(CacheManager, "available_size"), property)


@pytest.mark.parametrize(
    ("device", "num_pages", "page_size"),
    [
        ("cpu", -1, 1),
        ("cpu", 1.5, 1),
        ("cpu", None, 1),
        ("cpu", 4, 0),
        ("cpu", 2**31, 1),
        ("cpu", 2**30, 4),
        ("tpu", 4, 1),
        (None, 4, 1),
    ],
)
def test_a_manager_that_cannot_be_is_refused(device: Any, num_pages: Any, page_size: Any) -> None:
    with pytest.raises(ConfigError):
        CacheManager(device, num_pages, page_size)


@pytest.mark.parametrize(
    "input_ids",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]])],
)
def test_a_request_knows_the_length_of_its_input(input_ids: Any) -> None:
    request = Request(7, input_ids, 1, 0, 8)
    assert request.input_len == 3
    assert (request.uid, request.table_idx, request.cached_len, request.output_len) == (7, 1, 0, 8)
    assert (request.cache_handle, request.max_tokens) == (None, 1024)
    request.cached_len = 2  # a record of the scheduler's
    assert request.cached_len == 2
    assert request_of([]).input_len == 0


# --- the worked example


def test_the_worked_example(device: str) -> None:
    cache = CacheManager(device, 250)
    assert cache.available_size == 250
    first = [1, 3, 6, 7, 9, 77]
    handle, indices = cache.match_req(request_of(first))
    assert (handle.cached_len, indices.tolist()) == (0, [])
    cache.lock(handle)
    slots = cache.allocate(6)
    assert (slots.dtype, slots.device.type, len(set(slots.tolist()))) == (torch.int32, device, 6)
    assert cache.available_size == 244
    cache.free_and_cache_finished_req(handle, first, slots)
    assert cache.available_size == 250
    (leaf,) = cache.manager.root_node.children
    assert (leaf.tokens.tolist(), leaf.slots.tolist(), leaf.is_leaf()) == (first, slots.tolist(), True)

    second = [1, 3, 6, 7, 87, 66]
    handle, indices = cache.match_req(request_of(second))
    assert (handle.cached_len, indices.tolist()) == (4, slots.tolist()[:4])
    cache.lock(handle)
    (stem,) = cache.manager.root_node.children
    (rest,) = stem.children
    assert (stem.tokens.tolist(), stem.ref_count) == ([1, 3, 6, 7], 1)
    assert (rest.tokens.tolist(), rest.ref_count) == ([9, 77], 0)
    more = cache.allocate(2)
    cache.free_and_cache_finished_req(handle, second, torch.cat([indices, more]))
    (stem,) = cache.manager.root_node.children
    assert stem.tokens.tolist() == [1, 3, 6, 7]
    assert [leaf.tokens.tolist() for leaf in stem.children] == [[9, 77], [87, 66]]
    assert all(node.ref_count == 0 for node in (stem, *stem.children))
    assert cache.manager.size_info == (8, 0)
    assert cache.available_size == 250
    cache.check()


@pytest.mark.parametrize("num_evicted", [3, 4])
def test_what_the_worked_example_evicts(device: str, num_evicted: int) -> None:
    cache = CacheManager(device, 250)
    first = run(cache, [1, 3, 6, 7, 9, 77])
    second = run(cache, [1, 3, 6, 7, 87, 66])
    slots = {9: first[4], 77: first[5], 87: second[4], 66: second[5]}
    freed = cache.manager.evict(num_evicted).tolist()
    if num_evicted == 4:
        assert freed == [slots[9], slots[77], slots[87], slots[66]]  # both leaves, the older first
        assert drawn_tokens(cache) == [[1, 3, 6, 7]]
    else:
        assert freed == [slots[9], slots[77], slots[66]]
        assert drawn_tokens(cache) == [[1, 3, 6, 7], [87]]
    assert cache.available_size == 250 - num_evicted  # they are handed out now
    cache.free(freed)
    assert cache.available_size == 250
    cache.check()


def drawn_tokens(cache: CacheManager) -> list[list[int]]:
    found, stack = [], list(cache.manager.root_node.children)
    while stack:
        node = stack.pop()
        found.append(node.tokens.tolist())
        stack += node.children
    return found


# --- match_req


def test_the_last_token_is_never_matched(cache: CacheManager) -> None:
    size = cache.page_size
    tokens = tokens_of([1, 2, 3], size)
    run(cache, tokens)
    assert cache.match_req(request_of(tokens))[0].cached_len == 2 * size
    assert cache.match_req(request_of([*tokens, 7]))[0].cached_len == 3 * size
    assert cache.match_req(request_of(tokens[:1]))[0].cached_len == 0


@pytest.mark.parametrize("bad", [[], None, [1.5], ["a"], [-1], [2**40]], ids=str)
def test_an_input_that_is_none_is_an_error(device: str, bad: Any) -> None:
    cache = CacheManager(device, 5)
    with pytest.raises(UsageError):
        cache.match_req(request_of(bad))
    with pytest.raises(ArgumentError):
        cache.match_req(bad)


# --- allocate


def test_allocate_takes_whole_pages_from_1_on_lowest_first(cache: CacheManager) -> None:
    size = cache.page_size
    assert cache.allocate(2 * size).tolist() == slots_of([1, 2], size)
    assert cache.allocate(1).tolist() == [3 * size]
    assert cache.allocate(size + 1).tolist() == slots_of([4, 5], size)[: size + 1]
    assert cache.available_size == (NUM_PAGES - 5) * size
    assert cache.allocate(0).tolist() == []
    cache.check()


def test_allocate_gives_int32_on_the_device_and_on_the_host(cache: CacheManager, device: str) -> None:
    slots, host = cache.allocate(3), cache.allocate_host(3)
    assert (slots.dtype, slots.device.type, slots.shape) == (torch.int32, device, (3,))
    assert isinstance(host, np.ndarray)
    assert (host.dtype, host.shape) == (np.int32, (3,))
    assert not set(slots.tolist()) & set(host.tolist())
    cache.check()


def test_every_page_is_handed_out_and_page_0_never(cache: CacheManager) -> None:
    size = cache.page_size
    slots = cache.allocate(NUM_PAGES * size).tolist()
    assert slots == list(range(size, (NUM_PAGES + 1) * size))
    assert cache.available_size == 0
    assert cache.allocate(0).tolist() == []


def test_allocate_evicts_as_needed_and_no_more(cache: CacheManager) -> None:
    size = cache.page_size
    old = run(cache, tokens_of(range(10), size))
    run(cache, tokens_of(range(50, 58), size))
    assert (cache.available_size, cache.manager.size_info.total_size) == (20 * size, 18 * size)
    slots = cache.allocate(5 * size)  # 2 free ones, and the last 3 of the older sequence
    assert cache.manager.size_info.total_size == 15 * size
    assert set(old[7 * size :]) <= set(slots.tolist())
    assert cache.available_size == 15 * size
    assert match(cache.manager, range(10))[0].cached_len == 7 * size
    cache.check()


def test_running_out_raises_and_changes_nothing(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of(range(8), size))
    handle, _ = begin(cache, [*tokens_of(range(3), size), 7])
    available = cache.available_size
    assert available == (NUM_PAGES - 4) * size
    before = seen(cache)
    for wanted in (available + 1, NUM_PAGES * size, 2**31, 2**63, 2**100):
        with pytest.raises(CapacityError) as error:
            cache.allocate(wanted)
        found = (error.value.wanted, error.value.free, error.value.total)
        assert found == (wanted, available, NUM_PAGES * size)
        assert seen(cache) == before
    assert len(cache.allocate(available)) == available
    assert match(cache.manager, range(8))[0] is not handle
    assert cache.manager.size_info == (0, 3 * size)
    cache.check()


@pytest.mark.parametrize("bad", [-1, 1.0, "1", None, [1]], ids=str)
def test_what_is_no_length_is_refused(cache: CacheManager, bad: Any) -> None:
    with pytest.raises(ArgumentError):
        cache.allocate(bad)
    assert cache.available_size == NUM_PAGES * cache.page_size


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_without_memory_for_the_answer_nothing_is_allocated(
    cache: CacheManager, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    size = cache.page_size
    run(cache, tokens_of(range(18), size))
    before = seen(cache)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", fail)
        with pytest.raises(error):
            cache.allocate(3 * size + 1)
        with pytest.raises(error):
            cache.manager.evict(size)
        with pytest.raises(CapacityError):  # before any memory is asked for
            cache.allocate(2**60)
    assert seen(cache) == before
    cache.check()
    with pytest.raises(NotHeldError):
        cache.free(slots_of([18], size))  # what would have been evicted is the tree's
    assert len(cache.allocate(NUM_PAGES * size)) == NUM_PAGES * size
    cache.check()


# --- allocate: a request grows


@pytest.mark.parametrize("on_host", [False, True])
def test_growth_fills_the_last_page_first(cache: CacheManager, on_host: bool) -> None:
    size = cache.page_size
    allocate: Any = cache.allocate_host if on_host else cache.allocate
    slots = allocate(size + 1).tolist()
    for length in (1, 1, size, 3 * size + 1, 0):
        slots += allocate(length, after=slots[-1]).tolist()
    num_pages = -(-len(slots) // size)
    assert slots == slots_of(range(1, num_pages + 1), size)[: len(slots)]
    assert cache.available_size == (NUM_PAGES - num_pages) * size
    cache.check()


def test_growth_takes_the_last_slot_in_a_tensor(cache: CacheManager) -> None:
    slots = cache.allocate(cache.page_size + 1)
    more = cache.allocate(2, after=slots[-1])
    assert more.tolist() == slots_of(range(2, 5), cache.page_size)[1:3]


def test_growth_behind_what_was_matched_begins_a_page(cache: CacheManager) -> None:
    size = cache.page_size
    tokens = tokens_of([1, 2], size)
    run(cache, tokens)
    handle, indices = cache.match_req(request_of([*tokens, 7]))
    cache.lock(handle)
    assert cache.allocate(1, after=indices[-1]).tolist() == [3 * size]
    cache.check()


def test_growth_evicts_as_needed_and_no_more(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of(range(15), size))
    slots = cache.allocate(5 * size - size // 2).tolist()  # all that was free
    assert len(cache.allocate(size // 2, after=slots[-1])) == size // 2
    assert cache.manager.size_info.total_size == 15 * size
    last = 20 * size + size - 1
    assert cache.allocate(size + 1, after=last).tolist() == slots_of([14, 15], size)[: size + 1]
    assert cache.manager.size_info.total_size == 13 * size
    cache.check()


def test_growth_is_all_or_nothing(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of(range(8), size))
    slots = cache.allocate(1).tolist()
    room, before = size - 1, seen(cache)
    available = cache.available_size + room
    for wanted in (available + 1, 2**31, 2**100):
        with pytest.raises(CapacityError) as error:
            cache.allocate(wanted, after=slots[-1])
        assert (error.value.wanted, error.value.free) == (wanted, available)
        assert seen(cache) == before
    assert len(cache.allocate(available, after=slots[-1])) == available
    assert cache.available_size == 0
    cache.check()


def test_growth_behind_a_slot_that_is_not_handed_out_is_refused(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))  # pages 1 and 2 are the tree's
    before = seen(cache)
    bad: dict[Any, type[Exception]] = {
        0: OutOfRangeError,
        21 * size: OutOfRangeError,
        2**100: OutOfRangeError,
    }
    bad |= {3 * size: NotHeldError, -1: ArgumentError, 1.5: ArgumentError, "1": ArgumentError}
    if size > 1:
        bad |= {size: NotHeldError, 3 * size - 2: NotHeldError}  # inside the tree's pages
    for after, error in bad.items():
        for call in (cache.allocate, cache.allocate_host):
            with pytest.raises(error):
                call(1, after)
            assert seen(cache) == before
    cache.check()


# --- free, and direct use of the tree


def test_slots_that_are_handed_out_can_be_given_back(cache: CacheManager, device: str) -> None:
    size = cache.page_size
    for form in (lambda t: t, lambda t: t.tolist(), lambda t: t.cpu().numpy()):
        cache.free(form(cache.allocate(3 * size)))
        assert cache.available_size == NUM_PAGES * size
    cache.free([])
    cache.check()


def test_bad_frees_raise_and_change_nothing(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))  # pages 1 and 2 are the tree's
    held = cache.allocate(2 * size).tolist()  # 3 and 4
    before = seen(cache)
    bad = {0: OutOfRangeError, size - 1: OutOfRangeError, -1: OutOfRangeError, 2**40: OutOfRangeError}
    bad |= {(NUM_PAGES + 1) * size: OutOfRangeError, size: NotHeldError, 5 * size: NotHeldError}
    for slot, error in bad.items():
        for slots in ([slot], [*held, slot], [slot, *held]):
            with pytest.raises(error):
                cache.free(slots)
            assert seen(cache) == before
    cache.check()


def test_a_slot_twice_in_one_call_is_a_double_free_unless_it_names_a_page(cache: CacheManager) -> None:
    slots = cache.allocate(cache.page_size).tolist()
    if cache.page_size == 1:
        with pytest.raises(DoubleFreeError):
            cache.free([*slots, *slots])
        assert cache.available_size == NUM_PAGES - 1
    else:
        cache.free([slots[-1], *slots])
        assert cache.available_size == NUM_PAGES * cache.page_size
    cache.check()


def test_what_the_tree_evicts_directly_is_handed_out_and_what_it_is_given_no_longer(
    cache: CacheManager,
) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2, 3], size))
    pages = evict(cache.manager, 2)
    assert cache.available_size == (NUM_PAGES - 2) * size
    assert insert(cache.manager, [7, 8], pages) == 0
    assert cache.available_size == NUM_PAGES * size
    with pytest.raises(NotHeldError):
        cache.free(slots_of(pages, size))
    before = seen(cache)
    for wrong in ([9], [0], [NUM_PAGES + 1]):  # free, padding, not there
        with pytest.raises((NotHeldError, OutOfRangeError)):
            insert(cache.manager, [5], wrong)
        assert seen(cache) == before
    with pytest.raises(AlreadyHeldError):
        insert(cache.manager, [5], pages[:1])
    cache.check()


# --- locks, reset, check


def test_locks_are_the_trees(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))
    handle, _ = cache.match_req(request_of([*tokens_of([1, 2], size), 7]))
    cache.lock(handle)
    assert cache.available_size == (NUM_PAGES - 2) * size
    cache.unlock(handle)
    assert cache.available_size == NUM_PAGES * size
    cache.lock(None)
    cache.unlock(None)
    with pytest.raises(NotHeldError):
        cache.unlock(handle)
    evict(cache.manager, 1)
    with pytest.raises(StaleError):
        cache.lock(handle)
    cache.check()


def test_reset_makes_everything_free(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))
    tokens = tokens_of([1, 2, 3], size)
    handle, indices = begin(cache, tokens)
    cache.reset()
    assert (cache.available_size, cache.manager.size_info) == (NUM_PAGES * size, (0, 0))
    with pytest.raises(StaleError):
        cache.free_and_cache_finished_req(handle, tokens, indices)
    with pytest.raises(StaleError):
        cache.unlock(handle)
    with pytest.raises(NotHeldError):
        cache.free(indices)
    cache.check()
    assert cache.allocate(NUM_PAGES * size).tolist() == slots_of(range(1, NUM_PAGES + 1), size)
    cache.check()


def test_a_reset_of_the_tree_makes_what_was_cached_free(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2, 3], size))
    tokens = tokens_of([1, 2, 7], size)
    handle, indices = begin(cache, tokens)  # locked, and a page of its own
    cache.manager.reset()
    assert cache.manager.size_info == (0, 0)
    assert cache.available_size == (NUM_PAGES - 1) * size
    cache.check()
    with pytest.raises(StaleError):
        cache.unlock(handle)
    cache.free(indices[2 * size :])
    with pytest.raises(NotHeldError):
        cache.free(indices[:1])
    assert sorted(cache.allocate(NUM_PAGES * size).tolist()) == slots_of(range(1, NUM_PAGES + 1), size)
    cache.check()


def test_check_finds_a_page_that_waits_for_a_fence(cache: CacheManager) -> None:
    cache.allocate(1)
    cache.check()
    cache._pages.free([1], fence=1)
    with pytest.raises(InvariantError) as error:
        cache.check()
    assert error.value.number == 13


def test_check_finds_a_page_that_is_free_and_in_the_tree(cache: CacheManager) -> None:
    run(cache, tokens_of([1, 2], cache.page_size))
    cache._pages.free([2])
    with pytest.raises(InvariantError) as error:
        cache.check()
    assert error.value.number == 13
