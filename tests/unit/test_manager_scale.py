"""A manager over long runs: what single pages of windows cost, and where they are said to be."""

import time

import numpy as np
import numpy.typing as npt
import pytest

from pagoda import FullAttention, Layout, WindowAttention
from pagoda.manager import Manager
from pagoda.tree import Removed, Stored

PAGE = 16
FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)


def make(full: int, window: int, max_tokens: int) -> Manager:
    layout = Layout([FULL, WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=2 * PAGE)], PAGE)
    return Manager(layout, {"full": full, "window": window}, num_rows=4, max_tokens=max_tokens)


def tokens(num_pages: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, num_pages * PAGE, dtype=np.int32)


def cache(manager: Manager, prompt: npt.NDArray[np.int32]) -> None:
    got = manager.admit(prompt)
    manager.pass_fence(manager.plan(got.row, len(prompt) - got.hit).step)
    manager.commit(got.row, prompt[got.hit :])
    manager.release(got.row)
    manager.pass_fence(manager.plan().step)


def seconds_to_evict(num_pages: int) -> float:
    """All pages of a window, one by one out of one run, while somebody listens."""
    times = []
    for _ in range(3):
        manager = make(2 * num_pages, num_pages, num_pages * PAGE)
        cache(manager, tokens(num_pages, 0))
        heard: list[object] = []
        manager.tree.listen(heard.append)
        heard.clear()  # what was there already
        begin = time.thread_time()
        manager.admit(tokens(num_pages, 1))
        times.append(time.thread_time() - begin)
        assert len(heard) == num_pages
    return min(times)


@pytest.mark.long
def test_a_page_of_a_long_run_costs_no_more_than_one_of_a_short_run():
    """Eight times the pages, some eight times the cost; sixty-four, if each were looked for."""
    assert seconds_to_evict(16_000) < 20 * seconds_to_evict(2_000) + 1e-3


def test_pages_are_removed_where_they_were_stored():
    """However runs were cut and joined in between: tokens are random, so a page is known by them."""
    manager = make(200, 24, 30 * PAGE)
    first = tokens(20, 0)
    branches = [np.concatenate((first[: n * PAGE], tokens(3, n))) for n in (3, 5, 8, 13, 14, 17)]
    stored: dict[bytes, tuple[int, int | None, int, int]] = {}
    removed = []

    def listener(event: Stored | Removed) -> None:
        parent, keys = event.parent, event.keys.tolist()
        for p, ids in enumerate(zip(*(column.tolist() for column in event.columns), strict=True)):
            name = event.tokens[p * PAGE : (p + 1) * PAGE].tobytes()
            place = event.position + p * PAGE, parent
            if isinstance(event, Removed):
                removed.append(ids)
                assert stored[name][:2] == place
                # A run, a single page of the window, or one page of a group that a row's own page replaces.
                assert ids in (stored[name][2:], (-1, stored[name][3]), (stored[name][2], -1))
            elif min(ids) < 0:  # one page of the window came back, or was exchanged
                assert stored[name][:2] == place
                kept = zip(ids, stored[name][2:], strict=True)
                stored[name] = *place, *(old if new < 0 else new for new, old in kept)
            else:
                stored[name] = *place, *ids
            parent = keys[p]

    manager.tree.listen(listener)
    rng = np.random.default_rng(0)
    for _ in range(120):
        prompts = [first, *branches, tokens(7, int(rng.integers(100, 110)))]
        prompt = prompts[rng.integers(len(prompts))]
        end = int(rng.integers(1, len(prompt)))
        cache(manager, prompt[: end + 1])
        manager.check()
    assert sum(ids[0] < 0 for ids in removed) > 20  # single pages of the window
