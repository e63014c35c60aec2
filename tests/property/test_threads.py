"""Threads hammer one object: nothing crashes, nothing is handed out twice, nothing is lost."""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable

import numpy as np

from pagoda import CapacityError, FreeList, PagodaError, PrefixTree
from pagoda.errors import StaleError
from pagoda.pools import Staging
from pagoda.tables import PageTable

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


def test_a_tree_keeps_its_word_under_threads():
    """Requests come, run page by page, and end, in threads; pages come from a free-list and go back to it."""
    num_pages, page_tokens = 3000, 2
    pages, tree = FreeList(num_pages), PrefixTree(page_tokens)
    told: list[object] = []
    tree.listen(told.append)  # listeners run Python in the middle of calls

    def work(number: int) -> None:
        choose = random.Random(number)
        for _ in range(400):
            tokens = [choose.randrange(3) for _ in range(2 * choose.randrange(1, 20))]
            namespace = b"ab"[: choose.randrange(3)]
            with contextlib.suppress(CapacityError), tree.lock(tree.match(tokens, namespace)) as lease:
                had = lease.length
                while had < len(tokens):
                    step = tokens[had : had + 2 * choose.randrange(1, 5)]
                    try:
                        ids = pages.alloc(len(step) // 2)
                    except CapacityError:
                        pages.free(tree.evict(min(64, tree.evictable_tokens)).page_ids)
                        continue
                    try:
                        inserted = tree.insert(step, ids, lease)
                    except StaleError:  # somebody dropped the namespace
                        pages.free(ids)
                        break
                    assert lease.length == had + len(step)
                    # What somebody cached in the meantime is ours twice: given back once.
                    duplicates = max(0, inserted.present - had) // 2
                    pages.free(ids[:duplicates])
                    had = lease.length
                assert len(tree.page_ids(lease)) == had // 2
                if choose.random() < 0.2:
                    tree.demote(lease)
            if choose.random() < 0.02:
                pages.free(tree.drop(namespace).page_ids)
            if choose.random() < 0.05:
                tree.check()

    hammer(work)
    assert tree.num_leases == 0
    tree.check()
    assert tree.num_tokens == pages.num_held * page_tokens
    pages.free(tree.evict(tree.num_tokens).page_ids)
    assert pages.num_held == 0
    assert told
