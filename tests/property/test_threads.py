"""Threads hammer one object: nothing crashes, nothing is handed out twice, nothing is lost."""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable

import numpy as np

from pagoda import CapacityError, FreeList, PageTable, PagodaError, Staging

THREADS = 8


def hammer(work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_a_free_list_never_hands_an_id_out_twice():
    ids = FreeList(400)
    owner = np.full(401, -1)
    fences = itertools.count()

    def work(number: int) -> None:
        choose = random.Random(number)
        mine: list[int] = []
        for _ in range(3000):
            if choose.random() < 0.5:
                try:
                    got = ids.alloc(choose.randrange(30)).tolist()
                except CapacityError:
                    continue
                assert (owner[got] == -1).all()
                owner[got] = number
                mine += got
            else:
                choose.shuffle(mine)
                back, mine = mine[:20], mine[20:]
                assert (owner[back] == number).all()
                owner[back] = -1
                fence = next(fences) if choose.random() < 0.5 else None
                ids.free(back, fence)
                if fence is not None:
                    ids.pass_fence(fence)
        owner[mine] = -1
        ids.free(mine)

    hammer(work)
    ids.pass_fence(next(fences))
    ids.check()
    assert ids.num_free == 400


def test_rows_of_one_table_grow_from_several_threads():
    pages, table = FreeList(64), PageTable(THREADS, 16, 4)

    def work(number: int) -> None:
        row = number + 1
        choose = random.Random(number)
        for _ in range(2000):
            try:
                table.grow(pages, [row], [table.num_tokens(row) + choose.randrange(9)])
            except CapacityError:
                pages.free(table.release(row))
        pages.free(table.release(row))

    hammer(work)
    table.check()
    pages.check()
    assert pages.num_free == 64


def test_misuse_from_several_threads_raises_and_never_crashes():
    ids = FreeList(50)

    def work(number: int) -> None:
        choose = random.Random(number)
        for _ in range(3000):
            some = [choose.randrange(-2, 54) for _ in range(choose.randrange(4))]
            call = choose.choice(
                [ids.free, ids.take, lambda s: ids.free_slots(s, 3), lambda s: ids.alloc(len(s))]
            )
            with contextlib.suppress(PagodaError):
                call(some)

    hammer(work)
    ids.check()


def test_arrays_sent_from_several_threads_arrive_whole(device: str):
    staging = Staging(device, 4096)

    def work(number: int) -> None:
        for step in range(200):
            array = np.full(37 + step, number * 1000 + step, dtype=np.int32)
            (got,) = staging.send(array)
            assert (got == number * 1000 + step).all().item()
            assert got.shape == array.shape

    hammer(work)
    staging.check()
