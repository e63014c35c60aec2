"""contracts/slots.md: `PrefixCacheManager`: entries that still hold, the copy, threads."""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conformance.slot_entries import MISS, cached, put
from pagoda.compat import PrefixCacheManager, SlotAllocator
from pagoda.errors import ArgumentError, OutOfRangeError

# --- what still holds


def test_only_entries_whose_version_holds_are_valid() -> None:
    slots, cache = SlotAllocator(4), PrefixCacheManager()
    old = slots.alloc()
    cache.insert([1, 2, 3, 4], old, slots.version(old))
    assert cache.find_valid([1, 2, 3, 4, 5], slots) == (4, old, 1)
    slots.free(old)
    assert cache.find_valid([1, 2, 3, 4], slots) == (4, old, 1)  # free, and not yet used again
    slots.occupy(old)
    assert cache.find_valid([1, 2, 3, 4], slots) == (4, old, 1)  # nor by who reuses it
    slots.free(old)
    assert slots.alloc() == old
    assert cache.find_valid([1, 2, 3, 4], slots) == MISS
    assert cache.find([1, 2, 3, 4]) == (4, old, 1)
    cache.check()


def test_the_longest_prefix_that_holds_is_found_behind_those_that_do_not() -> None:
    slots, cache = SlotAllocator(4), PrefixCacheManager()
    a, b, c = slots.alloc(), slots.alloc(), slots.alloc()
    cache.insert([1, 2, 3, 4, 5, 6], a, 1)
    cache.insert([1, 2, 3, 4], b, 1)
    cache.insert([1, 2], c, 1)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert cache.find_valid(tokens, slots) == (6, a, 1)
    for gone, wanted in ((a, (4, b, 1)), (b, (2, c, 1)), (c, MISS)):
        slots.free(gone)
        slots.alloc()
        assert cache.find_valid(tokens, slots) == wanted
    cache.insert([1, 2], c, slots.version(c))
    assert cache.find_valid(tokens, slots) == (2, c, 2)


def test_what_is_valid_further_down_is_found_though_its_beginning_is_not() -> None:
    slots, cache = SlotAllocator(2), PrefixCacheManager()
    a, b = slots.alloc(), slots.alloc()
    cache.insert([1, 2, 3, 4], a, 1)
    cache.insert([1, 2], b, 1)
    slots.free(b)
    slots.alloc()
    assert cache.find_valid([1, 2, 3, 4], slots) == (4, a, 1)  # the slot holds all four
    assert cache.find_valid([1, 2, 3], slots) == (3, a, 1)
    assert cache.find_valid([1, 2], slots) == MISS


def test_a_slot_that_the_allocator_has_not_does_not_hold() -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 7, 0)
    assert cache.find_valid([1, 2], SlotAllocator(7)) == MISS
    assert cache.find_valid([1, 2], SlotAllocator(8)) == (2, 7, 0)
    assert cache.find_valid([], SlotAllocator(8)) == MISS


def test_what_no_longer_holds_is_not_renewed() -> None:
    slots, cache = SlotAllocator(4), PrefixCacheManager(max_capacity=5)
    old, new = slots.alloc(), slots.alloc()
    put(cache, [1, 2, 3], old, 1)
    put(cache, [1], new, 1)
    put(cache, [20, 21], new, 1)
    slots.free(old)
    slots.alloc()
    assert cache.find_valid([1, 2, 3], slots) == (1, new, 1)
    put(cache, [30, 31], new, 1)
    assert cached(cache, [1, 2, 3], [20, 21]) == [1, 2]
    put(cache, [40, 41], new, 1)
    assert cached(cache, [1, 2, 3], [20, 21]) == [1, 0]
    cache.check()


@pytest.mark.parametrize("bad", [None, 3, [0, 1], {0: 1}])
def test_what_knows_no_versions_is_refused(bad: Any) -> None:
    with pytest.raises(ArgumentError):
        PrefixCacheManager().find_valid([1], bad)


# --- the copy


@pytest.fixture
def kv(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """4 slots of 6 positions, 3 layers; K and V of different heads. Every number stands once."""
    k = torch.arange(4 * 6 * 3 * 2 * 5, device=device, dtype=torch.float32).view(4, 6, 3, 2, 5)
    v = -1 - torch.arange(4 * 6 * 3 * 1 * 7, device=device, dtype=torch.float32).view(4, 6, 3, 1, 7)
    return k, v


@pytest.mark.parametrize("length", [1, 4, 6])
@pytest.mark.parametrize("n_layers", [0, 1, 3])
def test_a_prefix_is_copied_to_another_slot_and_nothing_else(
    kv: tuple[torch.Tensor, torch.Tensor], length: int, n_layers: int
) -> None:
    cache = PrefixCacheManager()
    cache.insert(range(6), 2, 1)
    before = [it.clone() for it in kv]
    cache.copy_kv(range(length), 1, kv, n_layers)
    for now, was in zip(kv, before, strict=True):
        wanted = was.clone()
        wanted[1, :length, :n_layers] = was[2, :length, :n_layers]
        assert torch.equal(now, wanted)
    cache.check()


def test_the_copy_comes_from_where_the_prefix_points(kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2, 3, 4], 0, 1)
    cache.insert([1, 2], 3, 1)
    k = kv[0].clone()
    cache.copy_kv([1, 2], 1, kv, 3)
    assert torch.equal(kv[0][1, :2], k[3, :2])
    cache.copy_kv([1, 2, 3], 1, list(kv), 3)
    assert torch.equal(kv[0][1, :3], k[0, :3])


def test_nothing_is_copied_for_what_is_not_cached(kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 1)
    before = [it.clone() for it in kv]
    for tokens in ([], [9], [1, 2, 3]):
        cache.copy_kv(tokens, 1, kv, 3)
    cache.copy_kv([1, 2], 0, kv, 3)  # it is there already
    assert all(torch.equal(now, was) for now, was in zip(kv, before, strict=True))


class Watched(torch.Tensor):
    """A tensor that notes what is done to it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_one_copy_a_tensor(kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    cache = PrefixCacheManager()
    cache.insert(range(6), 2, 1)
    k, v = (it.as_subclass(Watched) for it in kv)
    Watched.calls.clear()
    cache.copy_kv(range(6), 1, (k, v), 3)
    reads = ("__get__", "__getitem__", "dim", "stride")
    assert [name for name in Watched.calls if name not in reads] == ["__setitem__"] * 2
    assert torch.equal(kv[0][1], kv[0][2])


def test_a_copy_that_does_not_fit_is_refused_and_writes_nothing(
    kv: tuple[torch.Tensor, torch.Tensor],
) -> None:
    cache = PrefixCacheManager()
    cache.insert(range(6), 2, 1)
    cache.insert([50], 9, 1)
    cache.insert(range(60, 67), 2, 1)
    k, v = kv
    before = [it.clone() for it in kv]
    bad: list[tuple[Any, Any, Any, Any, type[Exception]]] = [
        (range(6), 4, kv, 3, OutOfRangeError),
        (range(6), 10**5000, kv, 3, OutOfRangeError),
        (range(6), -1, kv, 3, ArgumentError),
        (range(6), 1, kv, 10**5000, ArgumentError),
        (range(6), 1.0, kv, 3, ArgumentError),
        (range(6), 1, kv, 4, ArgumentError),
        (range(6), 1, kv, -1, ArgumentError),
        (range(6), 1, (k, v[:, :, :2]), 3, ArgumentError),
        (range(6), 1, (k, v[:1]), 3, OutOfRangeError),
        (range(6), 1, (k, v[:, :5]), 3, ArgumentError),
        (range(6), 1, (k,), 3, ArgumentError),
        (range(6), 1, k, 3, ArgumentError),
        (range(6), 1, None, 3, ArgumentError),
        (range(6), 1, (k, None), 3, ArgumentError),
        ([50], 1, kv, 3, OutOfRangeError),  # points to a slot that this cache has not
        (range(60, 67), 1, kv, 3, ArgumentError),  # longer than the cache
    ]
    for tokens, target, caches, n_layers, error in bad:
        with pytest.raises(error):
            cache.copy_kv(tokens, target, caches, n_layers)
    assert all(torch.equal(now, was) for now, was in zip(kv, before, strict=True))


@pytest.mark.parametrize("is_made_inside", [True, False])
@pytest.mark.parametrize("is_copied_inside", [True, False])
def test_caches_of_inference_mode_are_copied_too(
    device: str, is_made_inside: bool, is_copied_inside: bool
) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 1)
    with torch.inference_mode(is_made_inside):
        k, v = (torch.rand(2, 3, 1, 1, 4, device=device) for _ in range(2))
    with torch.inference_mode(is_copied_inside):
        cache.copy_kv([1, 2], 1, (k, v), 1)
    for tensor in (k, v):
        assert torch.equal(tensor[1, :2], tensor[0, :2])
        assert not torch.equal(tensor[1, 2], tensor[0, 2])


def test_caches_with_gradients_are_copied_without(device: str) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 1)
    k, v = (torch.rand(2, 3, 1, 1, 4, device=device, requires_grad=True) for _ in range(2))
    cache.copy_kv([1, 2], 1, (k, v), 1)
    assert torch.equal(k[1, :2], k[0, :2])
    assert k.is_leaf
    assert v.is_leaf


def test_a_second_tensor_that_cannot_be_written_stops_the_copy_of_the_first(
    kv: tuple[torch.Tensor, torch.Tensor],
) -> None:
    cache = PrefixCacheManager()
    cache.insert(range(6), 2, 1)
    k, v = kv
    before = k.clone()
    for bad in (v[:, :, :, :, :1].expand(-1, -1, -1, -1, 7), v[:1].expand(4, -1, -1, -1, -1), v.to_sparse()):
        for caches in ((k, bad), (bad, k)):
            with pytest.raises(ArgumentError):
                cache.copy_kv(range(6), 1, caches, 3)
            assert torch.equal(k, before)


# --- threads


def ask_from_another_thread(call: Callable[[], Any]) -> None:
    """Fails when the caller holds a lock that the call needs: others would wait for each other."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_slots_are_asked_without_a_lock_held() -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 0)

    class Busy(SlotAllocator):
        def version(self, idx: int) -> int:
            ask_from_another_thread(lambda: cache.find([1, 2]))
            return super().version(idx)

    assert cache.find_valid([1, 2], Busy(1)) == (2, 0, 0)  # type: ignore[arg-type]


def test_the_warning_is_logged_without_a_lock_held() -> None:
    cache, records = PrefixCacheManager(1), []

    class Busy(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ask_from_another_thread(lambda: cache.find([1, 2]))
            records.append(record)

    logger, handler = logging.getLogger("pagoda"), Busy()
    logger.addHandler(handler)
    try:
        cache.insert([1, 2], 0, 0)
    finally:
        logger.removeHandler(handler)
    assert len(records) == 1


def test_threads_that_share_a_cache_lose_no_reference() -> None:
    cache, slots = PrefixCacheManager(40), SlotAllocator(8)
    errors: list[BaseException] = []

    def serve(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(60):
                tokens = random.integers(0, 3, size=random.integers(1, 12)).tolist()
                cache.insert(tokens, int(random.integers(8)), 0)
                cache.pin(tokens)
                length, slot, version = cache.find(tokens)
                assert (length, version) == (len(tokens), 0)
                assert 0 <= slot < 8
                assert cache.find_valid(tokens, slots)[0] == len(tokens)
                cache.release(tokens)
                cache.release(tokens)
                cache.check()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    logging.disable(logging.WARNING)
    try:
        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        logging.disable(logging.NOTSET)
        sys.setswitchinterval(interval)
    assert errors == []
    assert cache._tree.num_leases == 0
    assert cache.num_tokens <= 40
    cache.check()
