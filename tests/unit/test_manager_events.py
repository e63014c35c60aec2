"""What a manager's tree tells: whoever knows only the events sees what can be found."""

from typing import Any

import numpy as np
import pytest

from pagoda import FullAttention, Layout, WindowAttention
from pagoda.manager import Manager
from property.tree_follower import Follower, shown

PAGE = 2
FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)
WINDOW = WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=5)


def make(kinds: list[Any], num_pages: int) -> tuple[Manager, Follower]:
    layout = Layout(kinds, PAGE)
    manager = Manager(layout, {group.name: num_pages for group in layout.groups}, num_rows=6, max_tokens=40)
    follower = Follower(PAGE)
    manager.tree.listen(follower)
    return manager, follower


def test_what_is_invalid_is_told_at_once_and_once():
    manager, follower = make([FULL], 20)
    prompt = list(range(12))
    row = manager.admit(prompt).row
    manager.plan(row, len(prompt))
    manager.commit(row, prompt)
    events: list[Any] = []
    manager.tree.listen(events.append)
    events.clear()
    manager.invalidate("full", [int(manager.page_ids(row, "full")[2])])
    assert [(event.position, len(event.keys)) for event in events] == [(4, 4)]
    assert [(view.begin, view.is_lost) for view in manager.tree.nodes() if view.level] == [
        (0, False),
        (4, True),
    ]
    assert follower.picture() == shown(manager.tree, PAGE)
    manager.release(row)
    manager.pass_fence(manager.plan().step)
    manager.drop(b"")
    assert [event.position for event in events] == [4, 0]
    assert follower.pages == {}


@pytest.mark.parametrize(
    "kinds", [[WINDOW, FULL], [FULL, WINDOW], [WINDOW]], ids=["window first", "full first", "window"]
)
def test_events_retell_what_a_manager_caches(kinds: list[Any]):
    manager, follower = make(kinds, 24)
    rng = np.random.default_rng(5)
    rows: dict[int, list[int]] = {}
    groups = [group.name for group in manager.layout.groups]
    for step in range(600):
        choice = rng.integers(12)
        if choice < 4 and len(rows) < 4:
            prompt = [int(token) for token in rng.integers(0, 2, rng.integers(2, 16))]
            name = [b"", b"", b"a"][rng.integers(3)]
            if manager.can_admit(prompt, namespace=name):
                got = manager.admit(prompt, namespace=name)
                manager.plan(got.row, len(prompt) - got.hit)
                manager.commit(got.row, prompt[got.hit :])
                rows[got.row] = prompt
        elif choice < 7 and rows:
            row = int(rng.choice(list(rows)))
            if len(rows[row]) < 36 and manager.can_reserve(row, 1):
                manager.reserve(row, 1)
                manager.plan(row)
                token = int(rng.integers(0, 2))
                manager.commit(row, [token])
                rows[row].append(token)
        elif choice < 9 and rows:
            row = int(rng.choice(list(rows)))
            manager.release(row)
            del rows[row]
        elif choice == 9:
            manager.invalidate(groups[rng.integers(len(groups))], [int(rng.integers(1, 25))])
        elif choice == 10 and rng.integers(8) == 0:
            manager.drop(b"a")
        elif step % 150 == 149:
            manager.pass_fence(manager.step - 1)
            manager.reset()
            rows = {}
        manager.pass_fence(manager.plan().step)
        manager.check()
        assert follower.picture() == shown(manager.tree, PAGE)
