"""contracts/radix.md: whose slots are whose when a request of a `CacheManager` ends; devices and threads."""

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from conformance.builders import captured
from conformance.prefixes import (
    NUM_PAGES,
    begin,
    drawn,
    match,
    request_of,
    run,
    seen,
    slots_of,
    tokens_of,
)
from conformance.test_rules import no_synchronisation
from pagoda import CapacityError
from pagoda.compat import CacheManager, RadixCacheHandle
from pagoda.errors import (
    ArgumentError,
    CaptureError,
    DoubleFreeError,
    NotHeldError,
    OutOfRangeError,
    StaleError,
)

# --- a request ends


def test_duplicates_are_freed_exactly_once(cache: CacheManager) -> None:
    """Two requests compute the same tokens side by side."""
    size = cache.page_size
    tokens = tokens_of([1, 2, 3], size)
    one, two = begin(cache, tokens), begin(cache, tokens)
    assert cache.available_size == (NUM_PAGES - 6) * size
    cache.free_and_cache_finished_req(one[0], tokens, one[1])
    assert cache.available_size == (NUM_PAGES - 3) * size
    cache.free_and_cache_finished_req(two[0], tokens, two[1])
    assert cache.available_size == NUM_PAGES * size
    assert match(cache.manager, [1, 2, 3])[1] == [slot // size for slot in one[1].tolist()[::size]]
    cache.check()


def test_only_what_was_cached_meanwhile_is_freed(cache: CacheManager) -> None:
    """[0, old) matched, [old, cached) cached by somebody else meanwhile, [cached, n) new."""
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))
    longer = tokens_of([1, 2, 3, 4, 5], size)
    handle, indices = begin(cache, longer)
    assert handle.cached_len == 2 * size
    other = run(cache, tokens_of([1, 2, 3, 4], size))
    free_before = cache.available_size
    cache.free_and_cache_finished_req(handle, longer, indices)
    assert cache.available_size == free_before + 2 * size + size + 2 * size  # duplicates, new, unlocked
    assert cache.available_size == NUM_PAGES * size
    own = indices.tolist()
    wanted = [*own[: 2 * size], *other[2 * size :], *own[4 * size :]]
    assert cache.manager.match_prefix(longer)[1].tolist() == wanted
    cache.check()


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_tail_shorter_than_a_page_is_freed(device: str, page_size: int) -> None:
    cache = CacheManager(device, NUM_PAGES, page_size)
    for extra in (1, page_size - 1):
        tokens = [*tokens_of([1, 2], page_size), *range(extra)]
        run(cache, tokens)
        assert cache.manager.size_info == (2 * page_size, 0)
        assert cache.available_size == NUM_PAGES * page_size
        cache.check()
    run(cache, [1, 2])  # nothing but a tail
    assert cache.manager.size_info == (2 * page_size, 0)
    cache.check()


@pytest.mark.parametrize("num_generated", [0, 1, 7, 40])
def test_a_request_that_generates_tokens_ends_and_leaks_nothing(
    cache: CacheManager, num_generated: int
) -> None:
    """A decode loop: one slot a token, behind the last one."""
    size = cache.page_size
    cache = CacheManager(cache.device, 60, size)
    for prompt in (tokens_of([1, 2], size), [*tokens_of([1, 2], size), 7, 8], [*tokens_of([1], size), 9]):
        handle, slots = begin(cache, prompt)
        tokens = list(prompt)
        for token in range(num_generated):
            slots = torch.cat([slots, cache.allocate(1, after=slots[-1])])
            tokens.append(token)
        own = len(tokens) - handle.cached_len
        assert cache.manager.size_info.evictable_size + -(-own // size) * size <= 60 * size
        assert len(set(slots.tolist())) == len(tokens)
        cache.check()
        cache.free_and_cache_finished_req(handle, tokens, slots)
        assert cache.available_size == 60 * size
        whole = len(tokens) // size * size
        assert cache.manager.match_prefix(tokens)[0].cached_len == whole
        cache.check()
    assert sorted(cache.allocate(60 * size).tolist()) == slots_of(range(1, 61), size)


@pytest.mark.parametrize("tail", [[13], [14, 13]], ids=str)
def test_a_tail_inside_its_page_is_freed_with_it(device: str, tail: list[int]) -> None:
    cache = CacheManager(device, NUM_PAGES, 4)
    cache.allocate(12)  # pages 1, 2 and 3
    tokens = range(8 + len(tail))
    cache.free_and_cache_finished_req(None, tokens, [*slots_of([2, 1], 4), *tail])
    assert (cache.available_size, cache.manager.size_info) == (NUM_PAGES * 4, (8, 0))
    cache.check()
    with pytest.raises(DoubleFreeError):  # a tail in a page of the rest
        cache.free_and_cache_finished_req(None, range(50, 55), [*cache.allocate(4).tolist(), 12])
    cache.check()


def test_a_request_without_a_handle_ends_too(cache: CacheManager) -> None:
    size = cache.page_size
    tokens = tokens_of([1, 2], size)
    cache.free_and_cache_finished_req(None, tokens, cache.allocate(2 * size))
    assert cache.manager.size_info == (2 * size, 0)
    cache.free_and_cache_finished_req(None, tokens, cache.allocate_host(2 * size))
    assert cache.available_size == NUM_PAGES * size
    cache.free_and_cache_finished_req(None, [], [])
    cache.check()


def test_the_end_takes_one_lock_of_the_handle(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))
    tokens = tokens_of([1, 2, 3], size)
    handle, indices = begin(cache, tokens)
    other = cache.match_req(request_of(tokens))[0]
    cache.lock(other)
    cache.lock(handle)
    cache.free_and_cache_finished_req(handle, tokens, indices)
    assert drawn(cache.manager)[0][3] == 2
    cache.unlock(handle)
    with pytest.raises(NotHeldError):
        cache.unlock(handle)
    assert cache.manager.size_info.protected_size == 2 * size
    cache.unlock(other)
    assert cache.manager.size_info == (3 * size, 0)
    cache.check()


def test_what_a_request_adds_continues_the_run_it_matched(cache: CacheManager) -> None:
    """Turns of a conversation make one run, not a chain of small ones."""
    size = cache.page_size
    for turn in range(1, 6):
        run(cache, tokens_of(range(2 * turn), size))
    assert [words for _, words, _, _ in drawn(cache.manager)] == [list(range(10))]
    cache.check()


def test_what_does_not_fit_together_is_refused_and_changes_nothing(cache: CacheManager) -> None:
    size = cache.page_size
    run(cache, tokens_of([1, 2], size))
    tokens = tokens_of([1, 2, 3], size)
    handle, tensor = begin(cache, tokens)
    slots = tensor.tolist()
    free_page = slots_of([NUM_PAGES], size)
    foreign = CacheManager(cache.device, NUM_PAGES, size)
    theirs, _ = begin(foreign, tokens)
    unlocked = cache.match_req(request_of(tokens))[0]
    begun = 2 * size
    bad: list[tuple[Any, Any, Any, type[Exception]]] = [
        (handle, tokens[:-1], slots, ArgumentError),
        (handle, tokens, slots[:-1], ArgumentError),
        (handle, tokens_of([1, 7, 3], size), slots, ArgumentError),
        (handle, tokens, [*slots_of([9, 10], size), *slots[begun:]], ArgumentError),
        (handle, tokens[:size], slots[:size], ArgumentError),  # shorter than what was matched
        (handle, None, slots, ArgumentError),
        (handle, tokens, [0.5] * len(slots), ArgumentError),
        (handle, tokens, [*slots[:begun], *free_page], NotHeldError),
        (handle, tokens, [*slots[:begun], *slots[:size]], NotHeldError),  # the tree's
        (handle, tokens, [*slots[:begun], *slots_of([0], size)], OutOfRangeError),  # padding
        (handle, tokens, [*slots[:begun], *slots_of([NUM_PAGES + 1], size)], OutOfRangeError),
        (None, tokens, slots, NotHeldError),  # its first pages are the tree's
        (handle, tokens_of([1, 2, 3, 4], size), [*slots, *slots[begun:]], DoubleFreeError),
        (unlocked, tokens, slots, NotHeldError),
        (theirs, tokens, slots, ArgumentError),
        (RadixCacheHandle(begun), tokens, slots, ArgumentError),
        ("handle", tokens, slots, ArgumentError),
    ]
    before = seen(cache)
    for old_handle, ids, indices, error in bad:
        with pytest.raises(error):
            cache.free_and_cache_finished_req(old_handle, ids, indices)
        assert seen(cache) == before
        cache.check()
    cache.free_and_cache_finished_req(handle, tokens, tensor)
    for _ in range(2):  # and not once more
        with pytest.raises(NotHeldError):
            cache.free_and_cache_finished_req(handle, tokens, tensor)
        with pytest.raises(NotHeldError):
            cache.free_and_cache_finished_req(None, tokens, tensor)
    assert cache.available_size == NUM_PAGES * size
    cache.check()


def test_an_error_names_the_slot_and_where_it_stands(cache: CacheManager) -> None:
    size = cache.page_size
    slots = [*cache.allocate(2 * size).tolist(), *slots_of([9], size)]
    with pytest.raises(NotHeldError) as error:
        cache.free_and_cache_finished_req(None, tokens_of([1, 2, 3], size), slots)
    assert (error.value.id, error.value.position) == (9 * size, 2 * size)
    with pytest.raises(NotHeldError) as error:
        cache.free(slots)
    assert (error.value.id, error.value.position) == (9 * size, 2 * size)


# --- devices and threads


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_host_tokens_and_slots_cost_no_synchronisation() -> None:
    cache = CacheManager("cuda", NUM_PAGES, 4)
    tokens = tokens_of([1, 2, 3], 4)

    def step() -> None:
        handle, _ = cache.match_req(request_of(tokens))
        cache.lock(handle)
        own = cache.allocate_host(len(tokens) - handle.cached_len)
        cache.allocate(0)
        begun = slots_of([page for page in handle._pages], 4)
        cache.free_and_cache_finished_req(handle, tokens, [*begun, *own])
        cache.manager.evict(4)
        cache.manager.root_node  # noqa: B018
        cache.reset()

    step()
    with no_synchronisation():
        step()
        step()
    cache.check()


@pytest.mark.gpu
def test_what_would_make_a_device_tensor_raises_while_the_stream_is_captured() -> None:
    cache = CacheManager("cuda", NUM_PAGES, 4)
    tokens = tokens_of([1, 2, 3], 4)
    run(cache, tokens)
    on_device = torch.tensor(tokens, device="cuda")
    slots = cache.allocate(4)
    before = seen(cache)
    calls = [
        lambda: cache.match_req(request_of(tokens)),
        lambda: cache.manager.match_prefix(tokens),
        lambda: cache.allocate(1),
        lambda: cache.allocate(0),
        lambda: cache.allocate(10**6),
        lambda: cache.manager.evict(1),
        lambda: cache.manager.evict(0),
        lambda: cache.manager.insert_prefix(on_device, slots),
        lambda: cache.free(slots),
    ]
    with captured():
        for call in calls:
            with pytest.raises(CaptureError):
                call()
        host = cache.allocate_host(3)
        cache.free(host)
    assert seen(cache) == before
    cache.check()


def test_threads_that_share_a_manager_lose_nothing(device: str) -> None:
    cache = CacheManager(device, 64, 4)
    errors: list[BaseException] = []

    def serve(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(40):
                tokens = tokens_of(random.integers(0, 3, size=random.integers(1, 7)).tolist(), 4)
                try:
                    handle, indices = cache.match_req(request_of(tokens))
                    cache.lock(handle)
                except StaleError:
                    continue  # evicted between the two calls
                try:
                    own = cache.allocate(len(tokens) - handle.cached_len)
                except CapacityError:
                    cache.unlock(handle)
                    continue
                if random.random() < 0.2:
                    cache.free(own)
                    cache.unlock(handle)
                else:
                    cache.free_and_cache_finished_req(handle, tokens, torch.cat([indices, own]))
                cache.check()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert cache.available_size == 64 * 4
    assert cache.manager.size_info.protected_size == 0
    cache.check()
