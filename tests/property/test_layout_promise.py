"""What sizing promises, run: a manager of exactly the promised capacity never runs out of pages, and with one
page less in a window group it does."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.errors import CapacityError
from pagoda.layout import FullAttention, Kind, Layout, WindowAttention
from pagoda.manager import Manager

FULL = FullAttention(kv_heads=1, k_dim=1, v_dim=1, dtype="fp8")


def window_of(window: int) -> WindowAttention:
    return WindowAttention(kv_heads=1, k_dim=1, v_dim=1, dtype="fp8", window=window)


def layout_of(full: int | None, windows: list[tuple[int, int]]) -> Layout:
    """A full group of so many tokens per page, if any, and windows with theirs."""
    kinds: list[Kind] = [] if full is None else [FULL]
    sizes = {} if full is None else {"full": full}
    for number, (window, page_tokens) in enumerate(windows):
        kinds.append(window_of(window))
        sizes["window" if number == 0 else f"window-{number + 1}"] = page_tokens
    return Layout(kinds, sizes)


# ── an engine ───────────────────────────────────────────────────────────────────────────────────────


def take_step(manager: Manager, rows: list[int], counts: list[int]) -> int:
    return manager.plan(rows, counts).step


def commit(manager: Manager, row: int, tokens: Any) -> None:
    manager.commit(row, tokens)


@dataclass(eq=False)
class Request:
    tokens: Any  # all that it will have
    row: int = 0
    reserved: int = 0
    committed: int = 0
    is_running: bool = True


@dataclass
class Engine:
    """Steps as `Layout.divide` describes them."""

    manager: Manager
    in_flight: int
    taken: deque[tuple[int, list[tuple[Request, int]]]] = field(default_factory=deque)

    def begin(self, tokens: Any, n: int) -> tuple[Request, int]:
        """Admit a request and reserve up to n tokens behind its hit, as a part of the next step."""
        n = min(n, len(tokens) - self.manager.hit(tokens))
        admitted = self.manager.admit(tokens, reserve=n)
        return Request(tokens, admitted.row, admitted.hit + n, admitted.hit), n

    def step(self, begun: list[tuple[Request, int]], more: list[tuple[Request, int]]) -> None:
        """One step: tokens of requests that were just begun, and so many more of others."""
        if more:
            self.manager.reserve([request.row for request, _ in more], [n for _, n in more])
        for request, n in more:
            request.reserved += n
        parts = begun + more
        step = take_step(self.manager, [request.row for request, _ in parts], [n for _, n in parts])
        self.taken.append((step, parts))
        if len(self.taken) > self.in_flight:
            self.finish_step()

    def finish_step(self) -> None:
        """The results of the oldest step arrive."""
        step, parts = self.taken.popleft()
        for request, n in parts:
            if request.is_running and n:
                commit(self.manager, request.row, request.tokens[request.committed : request.committed + n])
                request.committed += n
        self.manager.pass_fence(step)

    def end(self, request: Request) -> None:
        self.manager.release(request.row)
        request.is_running = False


# ── one request alone ───────────────────────────────────────────────────────────────────────────────


def capacity_for(layout: Layout, requests: int, length: int, chunk: int, in_flight: int) -> dict[str, int]:
    memory = layout.memory_for(requests, length, chunk=chunk, in_flight=in_flight)
    assert layout.max_requests(memory, length, chunk=chunk, in_flight=in_flight) == requests
    assert layout.max_requests(memory - 1, length, chunk=chunk, in_flight=in_flight) == requests - 1
    budget = layout.divide(memory, length, chunk=chunk, in_flight=in_flight)
    assert budget.num_requests >= requests
    return budget.capacity()


def runs_alone(
    layout: Layout, capacity: dict[str, int], length: int, ones: int, chunk: int, in_flight: int
) -> bool:
    """Whether a request gets to `length` in so many steps of one token, and then steps of `chunk`."""
    manager = Manager(layout, capacity, num_rows=1, max_tokens=length)
    engine = Engine(manager, in_flight)
    tokens = np.arange(length, dtype=np.int32)
    try:
        request, n = engine.begin(tokens, 1 if ones else chunk)
        engine.step([(request, n)], [])
        while request.reserved < length:
            ones -= 1
            n = min(1 if ones > 0 else chunk, length - request.reserved)
            engine.step([], [(request, n)])
    except CapacityError:
        return False
    manager.check()
    return True


def check_alone(layout: Layout, length: int, chunk: int, in_flight: int) -> None:
    capacity = capacity_for(layout, 1, length, chunk, in_flight)
    case = (layout.page_tokens, [g.window for g in layout.paged_groups], length, chunk, in_flight, capacity)
    starts = range(1 if chunk == 1 else min(length, layout.resume_step + max_window(layout)) + 1)
    for ones in starts:
        assert runs_alone(layout, capacity, length, ones, chunk, in_flight), (*case, ones)
    for group in layout.paged_groups:
        if group.window is None:
            continue
        less = capacity | {group.name: capacity[group.name] - 1}
        fails = (not runs_alone(layout, less, length, ones, chunk, in_flight) for ones in reversed(starts))
        assert any(fails), (*case, group.name, "has a page too many")


def max_window(layout: Layout) -> int:
    return max(group.window or 0 for group in layout.paged_groups) + layout.resume_step


PAGES = [(16, 16), (16, 4), (4, 16), (1, 1), (1, 8), (8, 1), (6, 4), (3, 5), (12, 4), (None, 4), (None, 1)]


class TestOneRequest:
    @pytest.mark.parametrize("in_flight", [0, 1, 2, 3])
    @pytest.mark.parametrize(("full", "page"), PAGES)
    def test_a_request_fits_exactly(self, full: int | None, page: int, in_flight: int) -> None:
        for window in sorted({1, 2, page - 1, page, page + 1, 2 * page + 2, 200} - {0}):
            layout = layout_of(full, [(window, page)])
            for length, chunk in product((1, page, 33, 90), (1, 2, page + 1)):
                check_alone(layout, length, chunk, in_flight)

    @settings(max_examples=100, deadline=None)
    @given(
        full=st.none() | st.integers(1, 12),
        windows=st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 8)),
            min_size=1,
            max_size=2,
            unique_by=lambda each: each[0],
        ),
        length=st.integers(1, 160),
        chunk=st.integers(1, 40),
        in_flight=st.integers(0, 3),
    )
    def test_any_request_fits_exactly(
        self, full: int | None, windows: list[tuple[int, int]], length: int, chunk: int, in_flight: int
    ) -> None:
        check_alone(layout_of(full, windows), length, chunk, in_flight)

    @pytest.mark.parametrize("in_flight", [0, 1, 2, 3])
    def test_large_pages_beside_a_window_of_small_ones(self, in_flight: int) -> None:
        layout = layout_of(256, [(128, 16)])
        check_alone(layout, 2048, 1, in_flight)
        # The window of the last whole 256 tokens, these, and those of the steps in flight.
        assert capacity_for(layout, 1, 2048, 1, in_flight)["window"] == -(-(256 + 256 + 2 * in_flight) // 16)


# ── several requests ────────────────────────────────────────────────────────────────────────────────


def num_common(a: Any, b: Any) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


@dataclass
class Crowd:
    """Requests that begin, share chunks, end and are cancelled at random, never more than `most` at once."""

    layout: Layout
    most: int
    length: int
    chunk: int
    in_flight: int
    random: random.Random
    fresh: Iterator[int] = field(default_factory=lambda: count(0, 10_000))

    def tokens(self, manager: Manager, known: list[Any]) -> Any:
        """Tokens that nobody had, or that begin like those of an earlier request. Where three requests may
        compute the same tokens at once, only if all of these are a hit."""
        n = self.random.choice([self.length, self.random.randint(1, self.length)])
        tokens = np.arange(n, dtype=np.int32) + next(self.fresh)
        if known and self.random.random() < 0.7:
            earlier = self.random.choice(known)
            same = min(n, self.random.randint(0, len(earlier)))
            alike = np.concatenate([earlier[:same], tokens[same:]])
            longest = max(num_common(alike, each) for each in known)
            is_hit = manager.hit(alike) >= longest // self.layout.resume_step * self.layout.resume_step
            if is_hit or self.most <= 2:
                tokens = alike
        known.append(tokens)
        return tokens

    def shares(self, num_rows: int) -> list[int]:
        """Tokens of each row in one step: those that get more than one share a chunk."""
        shares, left = [1] * num_rows, self.chunk
        for i in self.random.sample(range(num_rows), self.random.randint(0, num_rows)):
            part = self.random.choice([0, 2, left, self.random.randint(0, self.chunk)])
            if part <= 1 or part > left:
                shares[i] = min(part, 1)
                continue
            shares[i] = part
            left -= part
        return shares

    def run(self, capacity: dict[str, int], num_steps: int) -> None:
        manager = Manager(self.layout, capacity, num_rows=self.most, max_tokens=self.length)
        engine = Engine(manager, self.in_flight)
        running: list[Request] = []
        known: list[Any] = []
        eagerness = self.random.choice([0.2, 1.0])
        for _ in range(num_steps):
            stats = manager.stats()
            room = self.most - stats.rows - stats.waiting_rows
            num_new = sum(self.random.random() < eagerness for _ in range(room))
            shares = self.shares(len(running) + num_new)
            begun = [engine.begin(self.tokens(manager, known), n) for n in shares[len(running) :]]
            more = [
                (request, min(n, len(request.tokens) - request.reserved))
                for request, n in zip(running, shares, strict=False)
            ]
            engine.step(begun, [(request, n) for request, n in more if n])
            running += [request for request, _ in begun]
            for request in list(running):
                if request.committed == len(request.tokens) or self.random.random() < 0.02:
                    engine.end(request)
                    running.remove(request)
        manager.check()


class TestSeveralRequests:
    @settings(max_examples=100, deadline=None)
    @given(
        full=st.none() | st.integers(1, 12),
        windows=st.lists(
            st.tuples(st.integers(1, 20), st.integers(1, 6)),
            min_size=1,
            max_size=2,
            unique_by=lambda each: each[0],
        ),
        most=st.integers(1, 5),
        length=st.integers(1, 90),
        chunk=st.integers(1, 25),
        in_flight=st.integers(0, 3),
        seed=st.integers(0, 2**32),
    )
    def test_no_request_is_ever_short_of_pages(
        self, full: Any, windows: Any, most: int, length: int, chunk: int, in_flight: int, seed: int
    ) -> None:
        layout = layout_of(full, windows)
        capacity = capacity_for(layout, most, length, chunk, in_flight)
        Crowd(layout, most, length, chunk, in_flight, random.Random(seed)).run(capacity, 150)
