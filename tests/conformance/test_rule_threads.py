"""contracts/README.md: rule 6, an object may be called from several threads."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.kinds import (
    FAILS,
    KINDS,
    NUM,
    Kind,
    pages_of,
)
from pagoda.compat import GDNPool, KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from pagoda.errors import NotHeldError


@contextmanager
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def check_threads_never_share_an_id(made: Any, kind: Kind, seconds: float = 0.25) -> None:
    """Four threads take and give for a while; nobody ever holds what another holds."""
    owners: dict[int, int] = {}
    wrong: list[Any] = []
    until = time.monotonic() + seconds

    def give_back(ids: list[int]) -> None:
        for one in ids:
            owners.pop(one, None)
        kind.give(made, ids)

    def work(me: int) -> None:
        try:
            held: list[list[int]] = []
            while time.monotonic() < until and not wrong:
                held.append(kind.take(made, 2))
                wrong.extend(one for one in held[-1] if owners.setdefault(one, me) != me)
                if len(held) == 3:
                    give_back(held.pop(0))
            for ids in held:
                give_back(ids)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    with quick_switches():
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if hasattr(made, "check"):
                made.check()
            time.sleep(0.01)
        for thread in threads:
            thread.join()
    assert wrong == []
    assert kind.num_free(made) == NUM


def test_threads_never_share_an_id(device: str, kind: Kind) -> None:
    check_threads_never_share_an_id(kind.make(device), kind)


def test_an_allocator_whose_calls_are_not_serialised_is_found_out() -> None:
    class Careless:
        def __init__(self) -> None:
            self.free_ids = list(range(1, NUM + 1))

        def alloc(self, n: int) -> list[int]:
            taken = sorted(self.free_ids)[:n]
            time.sleep(0.001)  # another thread comes in between
            for one in taken:
                self.free_ids.remove(one)
            return taken

        def free(self, ids: list[int]) -> None:
            self.free_ids = self.free_ids + ids

    careless = replace(KINDS["rows"], num_free=lambda made: len(made.free_ids))
    with pytest.raises(FAILS):
        check_threads_never_share_an_id(Careless(), careless)


def test_threads_with_free_groups_lose_no_slot(device: str) -> None:
    allocator = TokenToKVPoolAllocator(64 * 4, device, 4)
    wrong: list[BaseException] = []
    until = time.monotonic() + 0.3

    def work() -> None:
        try:
            while time.monotonic() < until:
                slots = allocator.alloc_host(9)
                if slots is not None:
                    # Groups are the allocator's: another thread may end this one between the calls.
                    with allocator.free_group():
                        allocator.free(slots[:4])
                        allocator.free(slots[4:])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with quick_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert allocator.available_size() == 64 * 4
    allocator.check()


def test_threads_that_free_the_same_ids_free_them_once(device: str, kind: Kind) -> None:
    made = kind.make(device)
    for _ in range(20):
        ids = pages_of(kind, kind.take(made, 1)) if kind.page_size > 1 else kind.take(made, 1)
        start = threading.Barrier(4)
        refused: list[Exception] = []

        def give(ids: list[int] = ids, start: Any = start, refused: list[Exception] = refused) -> None:
            start.wait()
            try:
                kind.give(made, ids)
            except NotHeldError as error:
                refused.append(error)

        threads = [threading.Thread(target=give) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3
        assert kind.num_free(made) == NUM
        made.check()


def race(left: Callable[[], None], right: Callable[[], None], is_torn: Callable[[], bool]) -> int:
    """Both calls at once, again and again for half a second: how often neither order explains the result."""
    start, end = threading.Barrier(3, timeout=30), threading.Barrier(3, timeout=30)
    torn = 0
    is_over = False

    def work(call: Callable[[], None]) -> None:
        while True:
            start.wait()
            if is_over:
                return
            call()
            end.wait()

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in (left, right)]
    until = time.monotonic() + 0.5
    with quick_switches():
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            start.wait()
            end.wait()
            torn += is_torn()
        is_over = True
        start.wait()
        for thread in threads:
            thread.join()
    return torn


def test_writes_of_k_and_v_from_two_threads_are_serialised(device: str) -> None:
    pool = KVPool(256, 1, 8, 64, device=device, dtype=torch.float32)
    slots = torch.arange(1, 257, device=device)
    ones = torch.ones(256, 8, 64, device=device)
    twos = 2 * ones
    torn = race(
        lambda: pool.set_kv_buffer(0, slots, ones, ones),
        lambda: pool.set_kv_buffer(0, slots, twos, twos),
        lambda: len(pool.k_buffer[0][1:].unique()) > 1 or not torch.equal(pool.k_buffer[0], pool.v_buffer[0]),
    )
    assert torn == 0


def test_writes_of_a_row_from_two_threads_are_serialised(device: str) -> None:
    num = 1 << 16
    pool = ReqToTokenPool(2, num, device)
    ones = torch.ones(num, dtype=torch.int32, device=device)
    twos = 2 * ones
    torn = race(
        lambda: pool.write((1, slice(0, num)), ones),
        lambda: pool.write((1, slice(0, num)), twos),
        lambda: len(pool.req_to_token[1].unique()) > 1,
    )
    assert torn == 0


def test_copies_of_states_from_two_threads_are_serialised(device: str) -> None:
    pool = GDNPool(4, 4, 4, 32, 32, 128, 4, device=device, dtype=torch.float32)
    for row in (1, 2):
        pool.recurrent_state[:, row], pool.conv_state[:, row] = row, row
    torn = race(
        lambda: pool.copy_states(1, 3),
        lambda: pool.copy_states(2, 3),
        lambda: (
            len({*pool.recurrent_state[:, 3].unique().tolist(), *pool.conv_state[:, 3].unique().tolist()}) > 1
        ),
    )
    assert torn == 0
