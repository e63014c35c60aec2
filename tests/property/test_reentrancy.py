"""Finalizers that call the same object in the middle of its calls: nothing hangs, nothing is torn."""

import faulthandler
import gc
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from pagoda import FullAttention, Layout, Manager, StatePool, TokenPool, compat
from pagoda.pools import DeviceTable, Staging, StateSpec


@pytest.fixture(autouse=True)
def hang_is_a_crash() -> Iterator[None]:
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def sweep(call: Callable[[], object]) -> int:
    """Run `call` with the collector set to come at every possible point in it, each time with garbage
    whose finalizer makes the same call. Returns how many finalizers ran."""
    ran = 0

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal ran
            ran += 1
            call()

    call()
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what was there before is not looked at again and again
    try:
        for point in range(1, 60):
            gc.disable()
            gc.collect()
            Garbage()
            gc.set_threshold(point)
            gc.enable()
            call()
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
        gc.unfreeze()
        gc.collect()
    return ran


def calls(device: str) -> dict[str, Callable[[], object]]:
    pool = TokenPool(8, 4, 2, (2, 8), (2, 8), torch.float32, device)
    rows = torch.ones(3, 16, device=device)
    states = StatePool(4, 1, {"s": StateSpec((3,), torch.float32)}, device)
    table, staging = DeviceTable(4, 8, device), Staging(device)
    requests, slots = (
        compat.ReqToTokenPool(4, 8, device),
        compat.TokenToKVPoolAllocator(4096, device, page_size=4),
    )
    blocks, cache = compat.BlockAllocator(4096, device), compat.SlotAllocator(4096)
    layout = Layout([FullAttention(kv_heads=1, k_dim=8, v_dim=8)], 4)
    manager = Manager(layout, {"full": 4096}, num_rows=256, max_tokens=64)
    packed = pool.pack([1])

    def cycle_slots() -> None:
        with slots.free_group():
            slots.free(slots.alloc(8))  # type: ignore[arg-type]

    def cycle_rows() -> None:
        row, hit, _ = manager.admit(list(range(9)))
        delta = manager.plan([row], 9 - hit)
        assert delta.rows.tolist() == [row]
        assert len(set(delta.places.tolist())) == len(delta.places) == len(delta.page_ids)
        manager.commit(row, list(range(hit, 9)))
        manager.release([row, manager.fork(row)])
        manager.pass_fence(delta.step)

    return {
        "store": lambda: pool.store(0, [4, 5, 6], rows, rows),
        "pack": lambda: pool.pack([1, 2]),
        "unpack": lambda: pool.unpack([1], packed),
        "reset": lambda: states.reset([1]),
        "copy": lambda: states.copy([1], [2]),
        "table": lambda: table.write([9], [1]),
        "send": lambda: staging.send(np.arange(5)),
        "write": lambda: requests.write((1, slice(0, 2)), [1, 2]),
        "slots": cycle_slots,
        "rows": cycle_rows,
        "blocks": lambda: blocks.release(blocks.acquire(3)),
        "cache": lambda: cache.free(cache.alloc()),
    }


@pytest.mark.parametrize("name", list(calls("cpu")))
def test_a_finalizer_may_call_what_is_being_called(device: str, name: str):
    assert sweep(calls(device)[name]) > 20


def test_a_send_within_a_send_leaves_the_ring_alone(device: str):
    """Both arrive whole, wherever in the outer one the inner one comes."""
    staging, wrong, numbers = Staging(device, 4096), 0, itertools.count()

    def send() -> None:
        nonlocal wrong
        number = next(numbers)
        (got,) = staging.send(np.full(300, number))
        wrong += int((got != number).sum())

    sweep(send)
    assert wrong == 0
    staging.check()
