"""The manager against docs/manager.md: random requests, and what a device holds after each step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda import (
    CompressedAttention,
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layout,
    RingWindow,
    WindowAttention,
)
from pagoda.errors import ArgumentError, CapacityError, NotHeldError, OutOfRangeError, PagodaError
from pagoda.layout import latent, plain
from pagoda.layout._work import WORKERS, work_target
from pagoda.manager import Delta, Manager
from pagoda.pools import Pools
from profiles import examples
from property.manager_device import Device
from property.manager_model import GroupModel, Model, Ranges, RowModel
from unit.work_model import require_cover, require_even, work_model

RUNS = settings(max_examples=examples(60), stateful_step_count=50)

FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8, dtype="float32")
LATENT = LatentAttention(entry=latent(16, 8, "float32"))
STATE = GatedDelta(key_heads=1, value_heads=1, key_dim=2, value_dim=2, kernel=2, dtype="float32")


def window(tokens: int) -> WindowAttention:
    return WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=tokens, dtype="float32")


def compressed(ratio: int, overlap: bool) -> CompressedAttention:
    entry = plain("compressed", 1, 1, "float32")
    return CompressedAttention(entry=entry, window=4, head_dim=1, ratio=ratio, overlap=overlap)


CSA, HCA = compressed(2, True), compressed(4, False)
RING = RingWindow(entry=plain("window", 1, 1, "float32"), window=5)

PLAIN = [
    Layout([FULL], 1),
    Layout([FULL], 4),
    Layout([FULL], 16),
    Layout([LATENT], 4),
    Layout([FULL, LATENT], {"full": 4, "latent": 8}),
    Layout([LATENT, FULL], {"full": 2, "latent": 6}),
]
WINDOWS = [
    Layout([FULL, window(6)], 4),
    Layout([FULL, window(1)], 2),
    Layout([FULL, window(9)], {"full": 4, "window": 8}),
    Layout([window(5), FULL], {"full": 8, "window": 4}),
    Layout([window(3), window(10)], {"window": 2, "window-2": 4}),
    Layout([FULL, window(4), window(13)], {"full": 4, "window": 4, "window-2": 2}),
    Layout([FULL, *map(window, (3, 5, 6, 9, 13))], 4),
    Layout([FULL, window(400)], 96),  # spans that are split
]
STATES = [
    Layout([FULL, STATE], 1),
    Layout([FULL, STATE], 4),
    Layout([STATE, LATENT, FULL], {"full": 2, "latent": 6}),
    Layout([FULL, RING, STATE], 4),
    Layout([CSA, HCA], {"csa": 4, "hca": 8}),
    Layout([FULL, STATE, CSA, HCA], {"full": 2, "csa": 4, "hca": 4}),
]
STATES_AND_WINDOWS = [
    Layout([STATE], 4),
    Layout([FULL, window(6), STATE], 4),
    Layout([window(5), STATE], 2),
    Layout([window(5), FULL, STATE], {"full": 8, "window": 4}),
    Layout([STATE, window(3), window(10)], {"window": 2, "window-2": 4}),
    Layout([FULL, window(9), STATE, CSA, HCA], {"full": 4, "window": 8, "csa": 4, "hca": 8}),
]
MOST_PAGES = 5  # of the tree, in a prompt

namespaces = st.sampled_from([b"", b"", b"", b"a"])
one_key = st.tuples(st.integers(0, 12), st.integers(1, 8), st.sampled_from([b"k", b"l"]))
extra_keys = st.just([]) | st.just([]) | st.lists(one_key, max_size=2)


class ManagerMachine(RuleBasedStateMachine):
    """One manager, its model, and a device that only sees deltas."""

    layouts: Any = None

    @initialize(data=st.data(), k=st.integers(0, 3), watermark=st.sampled_from([0, 0, 1, 3]))
    def build(self, data: st.DataObject, k: int, watermark: int) -> None:
        layout = data.draw(st.sampled_from(self.layouts))
        step = layout.resume_step
        self.k, num_rows = k, data.draw(st.integers(2, 6))
        max_tokens = (MOST_PAGES + 3) * step + data.draw(st.integers(0, step - 1))
        few = data.draw(st.integers(6, 24))  # in steps
        capacity = {
            group.name: few * step // group.page_tokens + data.draw(st.integers(0, 3))
            for group in layout.paged_groups
        }
        groups = [
            GroupModel(g.name, g.page_tokens, g.window, capacity[g.name], g.storage.ratio)
            for g in layout.paged_groups
        ]
        self.model = Model(groups, num_rows, max_tokens, watermark, step)
        interval = 1024
        if layout.state_group is not None:
            capacity["checkpoint"] = data.draw(st.sampled_from([0, 1, 2, 3, 6, 20]))
            interval = data.draw(st.sampled_from([1, 2 * step, 2 * step + 1, 3 * step, 1024]))
            self.model.add_checkpoints(capacity["checkpoint"], interval)
        workers = data.draw(st.sampled_from([0, 1, 5, WORKERS]))
        self.manager = Manager(
            layout,
            capacity,
            num_rows=num_rows,
            max_tokens=max_tokens,
            watermark=watermark,
            checkpoint_interval=interval,
            workers=workers,
        )
        assert self.manager.resume_step == step
        pools = Pools(
            layout, capacity, num_rows=num_rows, max_tokens=max_tokens, device="cpu", workers=workers
        )
        self.targets = [work_target(group, workers) for group in layout.paged_groups]
        self.device = Device(layout, groups, pools)
        self.size = step
        self.past: list[tuple[list[int], Ranges]] = [([], [])]
        self.copied: dict[
            int, set[tuple[int, int]]
        ] = {}  # rows that were forked: pages of whom they continue
        self.shared: dict[
            int, int
        ] = {}  # rows whose table is not on the device: tokens before are no new pages
        self.begun: dict[tuple[int, int], int] = {}  # (row, group): pages the device has
        self.passed = 0
        self.chunk = data.draw(st.sampled_from([1, 3, 8, 1000]))
        self.expected: set[tuple[int, int, int]] = set()  # table writes that must be in the next delta
        self.allowed: set[tuple[int, int, int]] = set()  # and that may be
        self.restores: dict[int, int] = {}  # rows that begin in the next delta: tokens they resume from
        self.sources: dict[int, int] = {}  # rows that were forked for the next delta: whose state they get
        self.planned: dict[int, list[int]] = {}  # the last step: its rows, and the contents of their tokens
        self.known_ids: set[int] = set()  # checkpoints that were in the tree after the last plan
        self.contents: dict[int, int] = {}  # of checkpoints, as the deltas saved them
        self.has_lost = False  # pages were invalidated

    # What calls are given

    def sequence(self, data: st.DataObject) -> tuple[list[int], Ranges]:
        """A prompt: most begin like an earlier one, or like what a row has known."""
        past, ranges = data.draw(st.sampled_from(self.past))
        keep = len(past) - data.draw(st.sampled_from([0, 0, 1, self.size, 2 * self.size]))
        symbols = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        rest = data.draw(st.integers(0, self.size - 1)) if self.size > 1 else 0
        more = [symbol for symbol in symbols for _ in range(self.size)][rest:] or [0]
        tokens = (past[: max(0, keep)] + more)[: MOST_PAGES * self.size]
        if data.draw(st.integers(0, 3)) == 0:
            ranges = self.ranges(data.draw(extra_keys))
        self.past = [*self.past[-6:], (tokens, ranges)]
        return tokens, ranges

    def ranges(self, given: list[tuple[int, int, bytes]]) -> Ranges:
        half, after, ranges = max(1, self.size // 2), 0, []
        for begin, length, key in sorted(given):
            if begin * half >= after:
                after = (begin + length) * half
                ranges.append((begin * half, after, key))
        return ranges

    def some_rows(self, data: st.DataObject) -> list[int]:
        rows = sorted(self.model.rows)
        return data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1, max_size=len(rows)))

    def a_row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.rows)))

    def as_rows(self, data: st.DataObject, rows: list[int]) -> Any:
        if len(rows) == 1 and data.draw(st.booleans()):
            return rows[0]
        dtype = data.draw(st.sampled_from([np.int32, np.int64, None]))
        return rows if dtype is None else np.array(rows, dtype=dtype)

    def fails(self, error: type[PagodaError], call: Callable[[], object], *words: str) -> None:
        """It raises, says so, and nothing has changed: what the next delta must be is known anyway."""
        before = self.snapshot()
        with pytest.raises(error) as caught:
            call()
        assert self.snapshot() == before
        for word in words:
            assert word in str(caught.value)

    def snapshot(self) -> Any:
        """All that a caller can see."""
        manager, rows = self.manager, sorted(self.model.rows)
        lengths = [
            it(rows).tolist()
            for it in (manager.reserved, manager.computed, manager.committed, manager.stored)
        ]
        pages = [manager.page_ids(row, group.name).tolist() for row in rows for group in self.model.groups]
        nodes = [
            (node.begin, node.end, node.leases, node.checkpoints, [ids.tolist() for ids in node.columns])
            for node in manager.tree.nodes(10**6, 10**6)
        ]
        return manager.stats(), manager.step, lengths, pages, nodes

    def tree_ids(self) -> set[int]:
        """Checkpoints in the tree that can be found."""
        nodes = self.manager.tree.nodes(10**6, 0)
        return {id for node in nodes if not (node.is_lost or node.is_dropped) for _, id in node.checkpoints}

    def saved(self) -> set[int] | None:
        """Contents of checkpoints that are surely in the tree; None if a hit needs none."""
        if self.model.checkpoints is None:
            return None
        return {self.contents[id] for id in self.known_ids & self.tree_ids()}

    # Requests

    @rule(data=st.data(), space=namespaces, part=st.integers(0, 3))
    def admit(self, data: st.DataObject, space: bytes, part: int) -> None:
        tokens, ranges = self.sequence(data)
        reserve = data.draw(st.integers(0, 2 * self.size)) if part == 0 else None
        read, store, max_hit = True, True, None
        if data.draw(st.integers(0, 3)) == 0:
            read, store = data.draw(st.booleans()), data.draw(st.booleans())
            max_hit = data.draw(st.none() | st.integers(0, len(tokens) + 2))
        most = min(len(tokens) - 1, len(tokens) if max_hit is None else max_hit) if read else 0
        given = {
            "namespace": space,
            "extra_keys": ranges,
            "reserve": reserve,
            "max_hit": max_hit,
            "read": read,
            "store": store,
        }
        model, manager = self.model, self.manager
        found = manager.pending(tokens, namespace=space, extra_keys=ranges)
        said = manager.can_admit(tokens, **given)
        if model.is_exact:
            assert said == model.can_admit(space, ranges, tokens, reserve, most)
        if not said:
            self.fails(CapacityError, lambda: manager.admit(tokens, **given))
            return
        sure = model.sure_hit(space, ranges, tokens, most, self.saved())
        exact = len(model.hit_path(space, ranges, tokens, most)) * self.size
        any_hit = len(model.hit_path(space, ranges, tokens, len(tokens) - 1)) * self.size
        expected = model.pending(space, ranges, tokens, any_hit) if model.is_exact else None
        could_hit = manager.hit(tokens, namespace=space, extra_keys=ranges)
        got = manager.admit(np.array(tokens, dtype=np.int32), **given)
        assert got.hit % self.size == 0
        assert sure <= got.hit <= most < len(tokens)
        assert got.hit == could_hit or most < could_hit
        assert got.reserved == (len(tokens) if reserve is None else got.hit + reserve)
        if expected is not None:
            assert got.hit == exact
            # Two requests with other extra keys may share tokens before them; nobody has to see that.
            if found is not None:
                assert (found.row in expected[0], found.length) == (True, expected[1])
            elif expected[0]:
                assert all(model.rows[number].ranges != ranges for number in expected[0])
        elif found is not None:
            assert could_hit < found.length < len(tokens)
            self.is_to_come(found)
        row = model.admit(got.row, space, ranges, tokens, got.hit, got.reserved, store, most)
        self.cuts_are_right(got, row, most)
        self.restores[got.row] = got.hit
        self.copied.pop(got.row, None)
        self.expect(got.row, row, [0] * len(model.groups), got.hit)
        if not model.is_exact or part != 0:
            self.leaves_the_watermark(row, got)

    def cuts_are_right(self, got: Any, row: RowModel, most: int) -> None:
        model = self.model
        if model.is_exact:
            assert got.cuts == tuple(row.cuts)
            return
        # Where pages matched further than checkpoints is not known.
        few = set(model.cuts(len(row.prompt), got.hit, 0, row.tail)) if row.is_stored else set()
        more = set(got.cuts) - few
        assert sorted(few | more) == list(got.cuts)
        assert len(more) <= (len(few) > 0)
        assert all(got.hit < length <= most and length % self.size == 0 for length in more)
        row.cuts = dict.fromkeys(got.cuts, row.tail)

    def is_to_come(self, found: Any) -> None:
        """Whoever waits for that row gets more than would hit now: it has not committed all of it."""
        row = self.model.rows[found.row]
        assert found.length > row.committed
        assert not row.is_fork
        assert row.is_stored

    def leaves_the_watermark(self, row: RowModel, got: Any) -> None:
        if got.reserved == got.hit:
            return  # nothing was taken
        for group in self.manager.stats().groups:
            assert group.free + group.evictable >= self.model.watermark

    def expect(self, number: int, row: RowModel, begins: list[int], committed: int) -> None:
        """Table writes of a row that grew from `begins` on."""
        for g, group in enumerate(self.model.groups):
            first = group.first_read(committed) // group.page_tokens
            for page in range(begins[g], row.ends[g]):
                self.allowed.add((g, number, page))
                if page >= first:
                    self.expected.add((g, number, page))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), n=st.integers(0, 9))
    def reserve(self, data: st.DataObject, n: int) -> None:
        numbers = self.some_rows(data)
        if data.draw(st.booleans()):
            counts: Any = data.draw(
                st.lists(st.integers(0, 2 * self.size), min_size=len(numbers), max_size=len(numbers))
            )
        else:
            counts = n
        each = [counts] * len(numbers) if isinstance(counts, int) else counts
        self.reserves(self.as_rows(data, numbers), numbers, counts, each)

    @precondition(lambda self: self.model.rows)
    @rule()
    def decode(self) -> None:
        numbers = sorted(self.model.rows)
        self.reserves(numbers, numbers, 1, [1] * len(numbers))

    def reserves(self, rows: Any, numbers: list[int], counts: Any, each: list[int]) -> None:
        model, manager = self.model, self.manager
        fit = manager.num_reservable(rows, counts)
        assert manager.can_reserve(rows, counts) is (fit == len(numbers))
        if model.is_exact:
            assert fit == model.num_reservable(numbers, each)
        if fit < len(numbers):
            number = numbers[fit]
            if any(model.rows[m].reserved + n > model.max_tokens for m, n in zip(numbers, each, strict=True)):
                self.fails(ArgumentError, lambda: manager.reserve(rows, counts))
            else:
                self.fails(CapacityError, lambda: manager.reserve(rows, counts), "pages of group")
                one = manager.num_reservable(numbers[: fit + 1], each[: fit + 1])
                assert one == fit, number
            numbers, each = numbers[:fit], each[:fit]
            rows, counts = numbers, each
        begins = {number: list(model.rows[number].ends) for number in numbers}
        manager.reserve(rows, counts)
        model.reserve(numbers, each)
        for number in numbers:
            row = model.rows[number]
            assert manager.reserved(number) == row.reserved
            self.expect(number, row, begins[number], 0)

    def committable(self, row: RowModel) -> int:
        """Tokens that were computed k steps ago or earlier."""
        n = row.committed
        while n < row.computed and row.steps[n] < self.model.step - self.k:
            n += 1
        return n - row.committed

    @precondition(lambda self: any(self.committable(row) for row in self.model.rows.values()))
    @rule(data=st.data(), is_all=st.integers(0, 2))
    def commit(self, data: st.DataObject, is_all: int) -> None:
        numbers = [number for number, row in sorted(self.model.rows.items()) if self.committable(row)]
        if not is_all:
            numbers = data.draw(st.lists(st.sampled_from(numbers), unique=True, min_size=1))
        most = [self.committable(self.model.rows[number]) for number in numbers]
        counts = most if is_all else [data.draw(st.integers(0, n)) for n in most]
        tokens = [token for m, n in zip(numbers, counts, strict=True) for token in self.model.commit(m, n)]
        rows = self.as_rows(data, numbers)
        is_plain = counts == [1] * len(numbers) and data.draw(st.booleans())
        if isinstance(rows, int):
            self.manager.commit(rows, tokens[0] if is_plain else tokens)
        else:
            self.manager.commit(rows, tokens, None if is_plain else np.array(counts))
        for number in numbers:
            row = self.model.rows[number]
            assert self.manager.committed(number) == row.committed
            if not self.model.is_blurred:
                assert self.manager.stored(number) == len(row.path) * self.size

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        numbers = self.some_rows(data)
        open_ = [self.model.rows[number].reserved - self.model.rows[number].committed for number in numbers]
        counts = [data.draw(st.integers(0, n)) for n in open_]
        if any(self.is_unsettled(number) and n for number, n in zip(numbers, counts, strict=True)):
            self.fails(ArgumentError, lambda: self.manager.rollback(numbers, counts), "not committed")
            return
        before = self.manager.stats()
        self.manager.rollback(self.as_rows(data, numbers), counts)
        for number, n in zip(numbers, counts, strict=True):
            self.model.rollback(number, n)
        assert self.manager.stats() == before  # pages stay the row's

    def is_unsettled(self, number: int) -> bool:
        """Its state has tokens that are not known."""
        row = self.model.rows[number]
        return self.model.checkpoints is not None and row.computed > row.committed

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        numbers = self.some_rows(data)[:2]
        self.ends(self.as_rows(data, numbers), numbers)

    def ends(self, rows: Any, numbers: list[int]) -> None:
        for number in numbers:
            row = self.model.rows[number]
            # A conversation goes on with what was said.
            self.past = [*self.past[-6:], (row.known[: MOST_PAGES * self.size], row.ranges)]
        self.manager.release(rows)
        self.model.release(numbers)
        for number in numbers:
            self.expected = {it for it in self.expected if it[1] != number}

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        """Also of a row that was itself forked in this step."""
        number = self.a_row(data)
        model, before = self.model, self.manager.stats()
        if not model.rows[number].is_stored:
            self.fails(ArgumentError, lambda: self.manager.fork(number, n), "are not cached")
            return
        if self.is_unsettled(number):
            self.fails(ArgumentError, lambda: self.manager.fork(number, n))
            return
        can = model.can_fork(number, n)
        refusals = (CapacityError, ArgumentError) if model.is_blurred else CapacityError
        try:
            rows = [self.manager.fork(number)] if n == 1 else self.manager.fork(number, n).tolist()
        except refusals:
            assert not (model.is_exact and can)
            assert self.manager.stats() == before
            return
        assert can or not model.is_exact
        assert len(set(rows)) == n
        assert not model.rows[number].is_bad
        model.fork(number, rows)
        for child in rows:
            row = model.rows[child]
            # Its half pages may be copies of any of these.
            pages = {
                (g, id)
                for g, it in enumerate(model.groups)
                for id in self.manager.page_ids(number, it.name).tolist()
            }
            self.copied[child] = self.copied.get(number, set()) | pages
            self.expect(child, row, [0] * len(model.groups), row.committed)
            self.sources[child] = self.sources.get(number, number)

    # Pages by number

    def a_group(self, data: st.DataObject) -> tuple[int, GroupModel]:
        g = data.draw(st.integers(0, len(self.model.groups) - 1))
        return g, self.model.groups[g]

    def room(self, g: int) -> int:
        group = self.manager.stats().groups[g]
        return group.free + group.evictable

    @precondition(lambda self: self.model.rows and self.model.groups)
    @rule(data=st.data(), n=st.sampled_from([1, 2, 0, 3]))
    def extend(self, data: st.DataObject, n: int) -> None:
        """A row gets pages ahead of what it reserves."""
        model, manager, number = self.model, self.manager, self.a_row(data)
        g, group = self.a_group(data)
        row = model.rows[number]
        begins = list(row.ends)
        if row.ends[g] + n > group.pages_for(model.max_tokens):
            self.fails(ArgumentError, lambda: manager.extend(number, group.name, n), "more")
            return
        if n > self.room(g):
            self.fails(CapacityError, lambda: manager.extend(number, group.name, n), "pages of group")
            return
        ids = manager.extend(number, group.name, n).tolist()
        model.extend(number, g, n)
        assert len(ids) == n
        assert manager.page_ids(number, group.name).tolist()[-n:] == ids or n == 0
        self.expect(number, row, begins, 0)

    @precondition(lambda self: self.model.rows and self.model.groups)
    @rule(data=st.data(), is_idle=st.integers(0, 2))
    def trim(self, data: st.DataObject, is_idle: int) -> None:
        """What is behind a row's reserved tokens can be taken back while nothing may use it."""
        if is_idle:
            self.extend(data, is_idle)
            self.run_step(data)
            self.passed = self.model.step - 1
            self.passes(self.passed)
        model, manager = self.model, self.manager
        places = [(number, g) for number in sorted(model.rows) for g in range(len(model.groups))]
        places = [it for it in places if model.spare(*it)] or places
        number, g = data.draw(st.sampled_from(places))
        group, spare = model.groups[g], model.spare(number, g)
        n = data.draw(st.sampled_from([spare, spare // 2, spare + 1]))
        refusals = {
            "cannot take back": n > spare,
            "plan first": model.rows[number].named == model.step,
            "may still be running": self.passed < model.step - 1,
        }
        refusal = next((words for words, is_so in refusals.items() if is_so), None)
        if refusal is not None:
            self.fails(ArgumentError, lambda: manager.trim(number, group.name, n), refusal)
            return
        before = manager.stats().groups[g].free
        manager.trim(number, group.name, n)
        model.rows[number].ends[g] -= n
        assert manager.stats().groups[g].free == before + n

    @precondition(lambda self: self.model.groups and sum(map(len, self.model.given.values())) < 4)
    @rule(data=st.data(), n=st.sampled_from([1, 2, 0, 3]))
    def alloc_pages(self, data: st.DataObject, n: int) -> None:
        """Pages of nobody's row: the caller writes to them at once, and nobody else until they are freed."""
        g, group = self.a_group(data)
        if n > self.room(g):
            self.fails(CapacityError, lambda: self.manager.alloc_pages(group.name, n), "pages of group")
            return
        self.model.make_room_in(g, n)
        ids = self.manager.alloc_pages(group.name, n).tolist()
        assert len(set(ids)) == n
        for earlier in self.device.in_flight.values():
            assert not set(ids) & earlier[g], "a page was handed out that a step in flight may use"
        self.device.memory[g][ids] = -2
        self.model.alloc_pages(g, set(ids))

    @precondition(lambda self: any(self.model.given.values()))
    @rule(data=st.data(), is_meant=st.integers(0, 3))
    def free_pages(self, data: st.DataObject, is_meant: int) -> None:
        g = data.draw(st.sampled_from([g for g, ids in self.model.given.items() if ids]))
        name, given = self.model.groups[g].name, self.model.given[g]
        ids = data.draw(st.lists(st.sampled_from(sorted(given)), unique=True, min_size=1))
        others = set(range(1, self.model.groups[g].total + 1)) - given
        if not is_meant and others:
            wrong = [*ids, data.draw(st.sampled_from(sorted(others)))]
            self.fails(PagodaError, lambda: self.manager.free_pages(name, wrong))
            return
        self.manager.free_pages(name, ids)
        self.model.free_pages(g, set(ids))

    # Steps

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        """Plans some rows, or all, and does on the device what a forward pass does."""
        model, device = self.model, self.device
        step = self.manager.step
        assert step == model.step
        planned = {
            number: min(row.reserved - row.computed, self.chunk) for number, row in sorted(model.rows.items())
        }
        if planned and data.draw(st.integers(0, 3)) == 0:
            some = data.draw(st.lists(st.sampled_from(sorted(planned)), unique=True))
            planned = {number: data.draw(st.integers(0, planned[number])) for number in some}
        if model.checkpoints is not None and data.draw(st.integers(0, 3)):
            for number, n in planned.items():  # chunks end at cuts
                row = model.rows[number]
                planned[number] = min([n, *(cut - row.computed for cut in row.cuts if cut > row.computed)])
        delta = self.manager.plan(list(planned), list(planned.values()))
        assert delta.step == step
        assert self.manager.step == step + 1
        self.says(delta, planned)
        self.says_states(delta)
        self.says_work(delta)
        fresh = self.apply(delta)
        touched = [set(model.given.get(g, ())) for g in range(len(model.groups))]
        for g, (sources, targets) in enumerate(delta.copies):
            assert not set(sources.tolist()) & (set(targets.tolist()) | fresh[g])
            touched[g] |= {*sources.tolist(), *targets.tolist()}
        for number, row in model.rows.items():
            begin, end = row.computed, row.computed + planned.get(number, 0)
            if end > len(row.known):
                row.known += [data.draw(st.integers(0, 1)) for _ in range(end - len(row.known))]
            for g, group in enumerate(model.groups):
                touched[g] |= device.pages(g, number, group.first_read(row.committed), end)
            if end > begin:
                values = model.values(row, end)
                assert device.has_state(number, values[:begin]), "the state of another prefix"
                device.write(number, begin, values)
                row.steps += [step] * (end - begin)
        for earlier in device.in_flight.values():
            for g in range(len(model.groups)):
                assert not fresh[g] & earlier[g], "a page was handed out that a step in flight may use"
        device.in_flight[step] = touched
        model.step += 1
        if model.checkpoints is not None:
            self.saves(planned)
        self.looks_right()

    def saves(self, planned: dict[int, int]) -> None:
        """What the step left on a cut or a boundary is saved in the next."""
        model = self.model
        self.planned = {
            number: model.values(model.rows[number], model.rows[number].computed) for number in planned
        }
        for number, n in planned.items():
            if model.is_exact and n:
                model.plan_save(number)
        self.known_ids = self.tree_ids()
        if model.is_exact:
            assert self.known_ids == set(model.checkpoints.contents)

    def says_states(self, delta: Delta) -> None:
        """The delta has the saves of the last step, and the beginning of each row that came since."""
        model = self.model
        rows, lengths, ids = (part.tolist() for part in delta.saves)
        if model.is_exact:
            assert rows == [number for number, _ in model.to_save]
            assert lengths == [save.length for _, save in model.to_save]
            assert ids == [save.id for _, save in model.to_save]
        model.to_save.clear()
        assert len(set(ids)) == len(ids)
        for row, length, id in zip(rows, lengths, ids, strict=True):
            assert length == len(self.planned[row])
            assert self.device.has_state(row, self.planned[row]), "a state is saved that has moved on"
            self.contents[id] = self.planned[row][-1]
        begun = dict(zip(*(part.tolist() for part in delta.restores[:2]), strict=True))
        resets, (sources, targets) = delta.resets.tolist(), (part.tolist() for part in delta.state_copies)
        if model.checkpoints is None:
            assert not [*begun, *resets, *targets]
        else:
            assert begun == {row: hit for row, hit in self.restores.items() if hit}
            assert sorted(resets) == sorted(row for row, hit in self.restores.items() if not hit)
            assert dict(zip(targets, sources, strict=True)) == self.sources
            assert len(begun) + len(resets) + len(targets) == len({*begun, *resets, *targets})
        self.restores, self.sources = {}, {}

    def says(self, delta: Delta, planned: dict[int, int]) -> None:
        """The delta names what was planned, and the same after it was sent somewhere."""
        counts = list(planned.values())
        for each in (delta, Delta(delta.packed.copy())):
            assert (each.step, each.num_groups) == (delta.step, len(self.model.groups))
            assert each.rows.tolist() == list(planned)
            assert each.counts.tolist() == counts
            assert each.lengths.tolist() == [self.model.rows[m].computed + n for m, n in planned.items()]
            assert each.num_tokens == sum(counts)
            starts = np.cumsum([0, *counts]).tolist() if counts else []
            assert each._section("starts").tolist() == starts

    def says_work(self, delta: Delta) -> None:
        """Every list is the plain model's, gives programs equal work, and has every key that is read once."""
        lengths, counts = delta.lengths.tolist(), delta.counts.tolist()
        for g, (group, target) in enumerate(zip(self.model.groups, self.targets, strict=True)):
            work = delta.work(g)
            if not target or not lengths:
                assert work is None
                continue
            assert work is not None
            expected = work_model(lengths, counts, group.window, target)
            assert [part.tolist() for part in work[:4]] == list(expected[:4])
            assert work[4:] == (*expected[4:], target)
            require_even(expected, target)
            require_cover(expected, lengths, counts, group.window)

    def apply(self, delta: Delta) -> list[set[int]]:
        """Writes the tables; out: pages of each group that were handed out anew."""
        model, device = self.model, self.device
        places = [device.place(index) for index in delta.places.tolist()]
        assert len(set(places)) == len(places)
        gone = {it for it in places if it[1] not in model.rows}
        assert self.expected <= set(places) <= self.allowed | gone
        self.expected, self.allowed = set(), set()
        before = device.flat.copy()
        device.apply(delta)
        before[delta.places] = delta.page_ids
        assert (device.flat == before).all()
        fresh: list[set[int]] = [set() for _ in model.groups]
        for (g, number, page), id in zip(places, delta.page_ids.tolist(), strict=True):
            assert 1 <= id <= model.groups[g].total
            row = model.rows.get(number)
            if row is not None and page * model.groups[g].page_tokens >= row.committed:
                fresh[g].add(id)
        return fresh

    def looks_right(self) -> None:
        model, device = self.model, self.device
        for g, ids in model.given.items():
            assert (device.memory[g][sorted(ids)] == -2).all(), "a row wrote to a page that is nobody's"
        for g, group in enumerate(model.groups):
            writable: dict[int, int] = {}
            for number, row in model.rows.items():
                table = device.table(g)[number]
                for id in table[row.committed // group.page_tokens : row.ends[g]].tolist():
                    assert id > 0, "a place has no page"
                    assert id not in writable, "two rows may write to one page"
                    writable[id] = number
            for number, row in model.rows.items():
                begin = group.first_read(row.committed)
                if not row.is_bad:
                    values = model.values(row, row.computed)
                    found = device.read(g, number, begin, row.computed)
                    assert found == {at: values[at] for at in found}
                for id in device.pages(g, number, begin, row.committed):
                    assert writable.get(id, number) == number, "a row may write to what another reads"
        for number, row in model.rows.items():
            assert device.has_state(number, model.values(row, row.computed))

    @precondition(lambda self: self.passed < self.model.step - 1 - self.k)
    @rule(data=st.data())
    def pass_fence(self, data: st.DataObject) -> None:
        last = self.model.step - 1 - self.k
        self.passed = data.draw(st.integers(self.passed + 1, last))
        self.passes(self.passed)

    def passes(self, fence: int) -> None:
        self.manager.pass_fence(fence)
        self.model.pass_fence(fence)
        for step in [it for it in self.device.in_flight if it <= fence]:
            del self.device.in_flight[step]

    @rule(data=st.data(), n=st.integers(1, 4))
    def cycle(self, data: st.DataObject, n: int) -> None:
        """What an engine does: step after step, results k steps late."""
        for _ in range(n):
            self.run_step(data)
            self.commits_all()
            if self.passed < self.model.step - 1 - self.k:
                self.passed = self.model.step - 1 - self.k
                self.passes(self.passed)

    def commits_all(self) -> None:
        counts = {number: self.committable(row) for number, row in self.model.rows.items()}
        counts = {number: n for number, n in counts.items() if n}
        tokens = [token for number, n in counts.items() for token in self.model.commit(number, n)]
        self.manager.commit(list(counts), tokens, list(counts.values()))

    @rule(data=st.data(), space=namespaces, n=st.integers(0, 5), is_released=st.booleans())
    def serve(self, data: st.DataObject, space: bytes, n: int, is_released: bool) -> None:
        """A request from prompt to answer, while the others run on."""
        before = set(self.model.rows)
        self.admit(data, space, 1)
        for number in set(self.model.rows) - before:
            row = self.model.rows[number]
            for _ in range(40):
                if row.committed >= len(row.prompt):
                    break
                self.cycle(data, 1)
                self.holds()
            for _ in range(n):
                self.reserves(number, [number], 1, [1])
                self.cycle(data, 1)
            if is_released:
                self.ends(number, [number])

    @precondition(lambda self: self.model.checkpoints is not None)
    @rule(data=st.data(), space=namespaces, num=st.integers(2, 4))
    def serve_siblings(self, data: st.DataObject, space: bytes, num: int) -> None:
        """Requests that share a prefix, one after the other: they part at branch points, or repeat."""
        past = [data.draw(st.sampled_from(self.past))]
        for _ in range(num):
            self.past = list(past)
            self.serve(data, space, data.draw(st.integers(0, 5)), True)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = self.a_row(data)
        self.ends(number, [number])
        self.cycle(data, self.k + 1)

    @precondition(lambda self: len(self.model.rows) > 1)
    @rule(data=st.data(), space=namespaces, n=st.integers(0, 2), is_named=st.integers(0, 2))
    def preempt(self, data: st.DataObject, space: bytes, n: int, is_named: int) -> None:
        """One goes, and in the same step others take its pages and somebody new its row."""
        self.cycle(data, 1)
        if not is_named:
            self.decode()
        number = self.a_row(data)
        self.ends(number, [number])
        self.holds()
        for _ in range(n):
            if self.model.rows:
                self.decode()
        self.admit(data, space, 1)
        self.holds()
        if self.model.rows and data.draw(st.booleans()):
            self.release(data)
            self.admit(data, space, 1)
        self.run_step(data)

    @precondition(lambda self: self.model.step > 3)
    @rule(space=namespaces, is_meant=st.integers(0, 3))
    def drop(self, space: bytes, is_meant: int) -> None:
        """Nothing of it is found any more: whoever comes later reads other contents."""
        if is_meant:
            return
        self.manager.drop(space)
        drops = self.model.contents.drops
        drops[space] = drops.get(space, 0) + 1
        self.model.is_blurred = True

    @precondition(lambda self: self.model.step > 3 and self.model.groups)
    @rule(data=st.data(), is_meant=st.integers(0, 3))
    def invalidate(self, data: st.DataObject, is_meant: int) -> None:
        """Pages hold rubbish: whoever reads them is named, and nobody finds them."""
        if is_meant:
            return
        self.run_step(data)  # so that the device has all tables
        model, device = self.model, self.device
        g = data.draw(st.integers(0, len(model.groups) - 1))
        group = model.groups[g]
        bad = data.draw(st.sets(st.integers(1, group.total), min_size=1, max_size=3))
        columns = range(sum(model.columns(other) for other in range(g)), 1000)[: model.columns(g)]
        # Who depends on pages that were lost earlier was named then; others computed the tokens again.
        nodes = [
            node
            for node in self.manager.tree.nodes(10**6, 10**6)
            if not node.is_lost or (node.is_dropped and not self.has_lost)
        ]
        self.has_lost = True
        cached = {id for node in nodes for c in columns for id in node.columns[c].tolist()}
        held = {id: device.memory[g][id].astype(int).tolist() for id in bad}  # before: contents
        named = self.manager.invalidate(group.name, sorted(bad)).tolist()
        assert named == sorted(set(named))
        all_copied = {id for it in self.copied.values() for which, id in it if which == g}
        for number, row in model.rows.items():
            begin = group.first_read(row.committed) // group.page_tokens
            ids = device.table(g)[number, : row.ends[g]].tolist()
            values = set(model.values(row, row.computed))
            stored = set(row.path)
            if bad & set(ids[begin:]):
                assert number in named
            elif not row.is_bad and any(stored & set(held[id]) for id in bad & cached):
                assert number in named  # it may have read the page and moved on
            elif number in named:
                assert bad & (set(ids) | all_copied) or any(values & set(held[id]) for id in bad)
            row.is_bad = row.is_bad or number in named
            if row.is_stored and not row.is_bad and row.path:
                prompt = [*row.known[: len(row.path) * self.size], 0]
                found = self.manager.hit(prompt, namespace=row.space, extra_keys=row.ranges)
                saved = self.saved()
                if saved is None or row.path[-1] in saved:
                    assert row.drops < model.contents.drops.get(row.space, 0) or found == len(prompt) - 1
        device.memory[g][sorted(bad - model.given.get(g, set()))] = -1
        model.is_blurred = True

    @precondition(lambda self: self.model.step > 6)
    @rule(is_meant=st.integers(0, 4))
    def reset(self, is_meant: int) -> None:
        """As if it were new; a page keeps what it held. Not while a step may be running."""
        if is_meant:
            return
        model = self.model
        if self.passed < model.step - 1:
            self.fails(ArgumentError, self.manager.reset, "may still be running")
            self.passes(model.step - 1)
        self.manager.reset()
        fresh = Model(model.groups, model.num_rows, model.max_tokens, model.watermark, model.resume_step)
        fresh.contents = model.contents
        if model.checkpoints is not None:
            fresh.add_checkpoints(model.checkpoints.total, model.checkpoints.interval)
        for space in (b"", b"a"):
            fresh.contents.drops[space] = fresh.contents.drops.get(space, 0) + 1
        self.model, self.passed = fresh, 0
        self.expected, self.allowed = set(), set()
        self.device.in_flight.clear()
        self.device.pools.reset()
        self.device.flat[:] = 0
        self.restores, self.sources, self.known_ids = {}, {}, set()
        self.has_lost = False

    # What must raise

    @rule(data=st.data(), which=st.integers(0, 7))
    def misuse(self, data: st.DataObject, which: int) -> None:
        manager, model = self.manager, self.model
        free = [row for row in range(1, model.num_rows + 1) if row not in model.rows]
        number = next(iter(model.rows), None)
        if which == 0 and free:
            row = data.draw(st.sampled_from(free))
            for call in (manager.release, manager.reserve, manager.fork, manager.can_reserve):
                self.fails(NotHeldError, lambda call=call, row=row: call(row))
        elif which == 1:
            for row in (0, -1, model.num_rows + 1):
                self.fails(OutOfRangeError, lambda row=row: manager.release([row]))
        elif which == 2:
            self.fails(ArgumentError, lambda: manager.pass_fence(manager.step))
        elif which == 3:
            many = [0] * (model.max_tokens + 1)
            self.fails(ArgumentError, lambda: manager.admit(many))
            self.fails(ArgumentError, lambda: manager.can_admit([]))
        elif number is not None:
            row = model.rows[number]
            open_, planned = row.reserved - row.committed, row.computed - row.committed
            if which == 4:
                self.fails(ArgumentError, lambda: manager.rollback(number, open_ + 1))
                self.fails(
                    ArgumentError, lambda: manager.commit(number, [0] * (planned + 1)), "plan them first"
                )
                self.fails(ArgumentError, lambda: manager.commit(number, [0], [1]), "leave it out")
                more = row.reserved - row.computed + 1
                self.fails(ArgumentError, lambda: manager.plan([number], more), "reserve them first")
            elif which == 5:
                more = model.max_tokens - row.reserved + 1
                assert manager.num_reservable(number, more) == 0
                self.fails(ArgumentError, lambda: manager.reserve(number, more))
            elif which == 6 and planned:
                self.fails(OutOfRangeError, lambda: manager.commit(number, -1))
                self.fails(ArgumentError, lambda: manager.commit([number], [0, 0]), "add up")
            elif which == 7 and len(model.rows) > 1:
                # The second is wrong: the first keeps what it had.
                other = list(model.rows)[1]
                too_many = model.rows[other].reserved - model.rows[other].committed + 1
                self.fails(ArgumentError, lambda: manager.rollback([number, other], [open_, too_many]))
                self.fails(PagodaError, lambda: manager.release([number, number]))
                self.fails(PagodaError, lambda: manager.release([number, 0]))
                self.fails(PagodaError, lambda: manager.plan([number, other, number], 0))
                too_many = model.rows[other].reserved - model.rows[other].computed + 1
                self.fails(ArgumentError, lambda: manager.plan([number, other], [0, too_many]))

    # Always

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        manager.check()
        stats = manager.stats()
        assert stats.rows == len(model.rows)
        assert stats.waiting_rows == len(model.waiting)
        assert stats.num_rows == model.num_rows
        assert (stats.admitted, stats.admitted_tokens) == (model.admitted, model.admitted_tokens)
        assert stats.hit_tokens == model.hit_tokens
        for g, group in enumerate(stats.groups):
            assert sum(group[2:]) == group.total
            if model.is_exact:
                assert group[2:] == model.counts(g)
        if model.checkpoints is None:
            assert stats.checkpoints is None
        else:
            assert sum(stats.checkpoints[1:4]) == stats.checkpoints.total
            assert not model.is_exact or stats.checkpoints == model.checkpoints.counts()
        if model.is_exact:
            assert stats.evicted_pages == model.evicted_pages
            assert stats.cached_tokens == len(model.cached) * self.size
        for number, row in model.rows.items():
            assert manager.reserved([number]).tolist() == [row.reserved]
            assert manager.computed([number]).tolist() == [row.computed]
            assert manager.committed([number]).tolist() == [row.committed]

    def teardown(self) -> None:
        """All ends; nothing was lost; and all of it can be had again."""
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        rows = sorted(model.rows)
        if manager.stats().rows != len(rows):
            return  # a call failed in the middle, and that is told
        manager.release(rows)
        model.release(rows)
        for g, ids in model.given.items():
            manager.free_pages(model.groups[g].name, sorted(ids))
            model.free_pages(g, set(ids))
        self.expected = set()
        manager.plan()
        self.passes(model.step)
        model.step += 1
        self.holds()
        for group in manager.stats().groups:
            assert group.free + group.evictable == group.total
        if model.checkpoints is not None:
            assert manager.stats().checkpoints.running == 0
        # Rows that nobody has seen before take all there is of the group that is the first to run out.
        taken = []
        for number in range(model.num_rows):
            if not manager.can_admit([0], namespace=b"last"):
                break
            row = manager.admit([0], namespace=b"last").row
            taken.append(row)
            while manager.reserved(row) < model.max_tokens and manager.can_reserve(row):
                manager.reserve(row)
            assert number < model.num_rows
        stats = manager.stats()
        manager.check()
        for group in stats.groups:
            assert group.free + group.evictable + group.running == group.total
        full = [g for g in stats.groups if self.model.groups[0].window is None]
        manager.release(taken)
        manager.plan()
        manager.pass_fence(manager.step - 1)
        manager.check()
        if full and full[0].running == full[0].total:
            assert all(group.free == group.total for group in manager.stats().groups)


class PlainManager(ManagerMachine):
    """Groups that keep every token: hits, evictions and counts are known exactly."""

    layouts = PLAIN


class WindowManager(ManagerMachine):
    """Windows: what a query reads is there, and what it may not read is given up."""

    layouts = WINDOWS


class StateManager(ManagerMachine):
    """States: hits, cuts, saves and evictions of checkpoints are known exactly."""

    layouts = STATES


class StateWindowManager(ManagerMachine):
    """States beside windows, and alone: what a row resumes from is the state of its prefix."""

    layouts = STATES_AND_WINDOWS


TestPlainManager = PlainManager.TestCase
TestPlainManager.settings = RUNS
TestWindowManager = WindowManager.TestCase
TestWindowManager.settings = RUNS
TestStateManager = StateManager.TestCase
TestStateManager.settings = RUNS
TestStateWindowManager = StateWindowManager.TestCase
TestStateWindowManager.settings = RUNS


@pytest.mark.parametrize(
    ("calls", "counts"),
    [
        ([[1, 2]], (2, 0, 0, 0, 3)),
        ([[2, 1]], (2, 0, 0, 0, 3)),
        ([[2], [1]], (2, 0, 0, 0, 3)),
        ([[1], [2]], (3, 0, 0, 0, 2)),  # row 2 still runs when row 1 ends: the two pages become one
    ],
)
def test_rows_of_one_release_end_together(calls: list[list[int]], counts: tuple[int, ...]):
    """Row 2 has a duplicate of row 1's page, and a new page, so what it leaves waits for the next step."""
    manager = Manager(Layout([FULL], 1), {"full": 5}, num_rows=2, max_tokens=8)
    model = Model([GroupModel("full", 1, None, 5)], 2, 8, 0, 1)
    for number in (1, 2):
        assert manager.admit([0]).row == number
        model.admit(number, b"", [], [0], 0, 1, True, 0)
    manager.plan([1, 2], 1)
    manager.commit([1, 2], [0, 0])
    manager.pass_fence(1)
    model.step = 2
    for number in (1, 2):
        model.rows[number].steps.append(1)
        model.commit(number, 1)
    model.pass_fence(1)
    manager.reserve(2, 1)
    model.reserve([2], [1])
    for rows in calls:
        manager.release(rows)
        model.release(rows)
    assert manager.stats().groups[0][2:] == counts
    assert model.counts(0) == counts


@pytest.mark.parametrize(("watermark", "num_given", "can"), [(1, 1, False), (1, 0, True), (0, 1, True)])
def test_a_hit_leaves_the_watermark_even_if_nothing_is_reserved(watermark: int, num_given: int, can: bool):
    """Pages that a hit leases can no longer be evicted for rows that grow."""
    manager = Manager(Layout([FULL], 1), {"full": 3}, num_rows=1, max_tokens=8, watermark=watermark)
    model = Model([GroupModel("full", 1, None, 3)], 1, 8, watermark, 1)
    row = manager.admit([0, 0]).row
    model.admit(row, b"", [], [0, 0], 0, 2, True, 1)
    manager.plan(row, 2)
    manager.commit(row, [0, 0])
    manager.pass_fence(1)
    manager.release(row)
    model.step = 2
    model.rows[row].steps += [1, 1]
    model.commit(row, 2)
    model.pass_fence(1)
    model.release([row])
    model.alloc_pages(0, set(manager.alloc_pages("full", num_given).tolist()))
    assert manager.stats().groups[0][2:4] == model.counts(0)[:2] == (1 - num_given, 2)
    assert manager.can_admit([0, 0, 0], reserve=0) is can
    assert model.can_admit(b"", [], [0, 0, 0], 0, 2) is can
