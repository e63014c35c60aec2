"""Groups against pages that are sets of positions; sizing against trying every division of the memory."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import combinations_with_replacement, count, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagoda.errors import ConfigError
from pagoda.layout import (
    CompressedAttention,
    FullAttention,
    Kind,
    LatentAttention,
    Layout,
    PagedGroup,
    RingWindow,
    ShortConv,
    StateGroup,
    WindowAttention,
    latent,
    plain,
)
from profiles import examples
from property.layout_model import Reading, Request, Wish, best_requests, peak

RUNS = settings(max_examples=examples(150))
FEW = settings(max_examples=examples(60))


def reading_of(group: PagedGroup) -> Reading:
    return Reading(group.page_tokens, group.storage.window, group.storage.sink_tokens, group.resume_step)


FULL = FullAttention(kv_heads=1, k_dim=2, v_dim=3, dtype="fp8")


def window_kind(window: int, sinks: int = 0) -> WindowAttention:
    return WindowAttention(kv_heads=1, k_dim=2, v_dim=3, dtype="fp8", window=window, sink_tokens=sinks)


def window_group(window: int, sinks: int, page_tokens: int, full_tokens: int = 1) -> PagedGroup:
    """A window beside full attention with pages of `full_tokens`."""
    return Layout(
        [window_kind(window, sinks), FULL], {"window": page_tokens, "full": full_tokens}
    ).paged_groups[0]


def full_group(page_tokens: int) -> PagedGroup:
    return Layout([FULL], page_tokens).paged_groups[0]


page_sizes = st.integers(1, 9)
groups = st.one_of(
    st.builds(full_group, page_sizes),
    st.builds(
        window_group,
        st.integers(1, 20),
        st.integers(0, 12),
        page_sizes,
        st.sampled_from([1, 2, 3, 4, 8, 12]),
    ),
)
depths = st.integers(0, 3)
lengths = st.integers(0, 80)


def pages_in(ranges: tuple[range, ...]) -> list[int]:
    return [page for each in ranges for page in each]


class TestPages:
    @RUNS
    @given(group=groups, length=lengths)
    def test_live_pages_are_those_that_a_later_query_reads(self, group: PagedGroup, length: int) -> None:
        live = pages_in(group.live_pages(length))
        assert len(set(live)) == len(live), "a page counted twice"
        assert live == sorted(live)
        assert set(live) == reading_of(group).live(length)

    @RUNS
    @given(group=groups, steps=st.lists(st.integers(1, 12), min_size=1, max_size=12), in_flight=depths)
    def test_a_growing_request_never_holds_more_than_its_peak(
        self, group: PagedGroup, steps: list[int], in_flight: int
    ) -> None:
        request = Request(reading_of(group), in_flight)
        most = max(request.store(step) for step in steps)
        assert most <= group.peak_units(request.length, max(steps), in_flight)

    @RUNS
    @given(group=groups, length=lengths, step=st.integers(1, 6), in_flight=depths)
    def test_the_peak_is_reached_by_a_step_that_begins_at_the_worst_place(
        self, group: PagedGroup, length: int, step: int, in_flight: int
    ) -> None:
        # Steps of at most `step` tokens that may begin at any length below: for these the bound is exact.
        lag = step * (2 * in_flight + 1)
        expected = peak(reading_of(group), length, lag)
        assert group.peak_pages(length, lag) == group.peak_units(length, step, in_flight) == expected

    @pytest.mark.parametrize("full_tokens", [1, 4, 6])
    @pytest.mark.parametrize("page_tokens", [1, 2, 3, 4])
    def test_the_peak_is_exact_for_every_small_window(self, page_tokens: int, full_tokens: int) -> None:
        for window, sinks in product(range(1, 8), (0, 1, 4)):
            group = window_group(window, sinks, page_tokens, full_tokens)
            for lag, length in product((1, 2, 3, 5, 9), (0, 1, 2, 5, 8, 13, 21, 30)):
                expected = peak(reading_of(group), length, lag)
                assert group.peak_pages(length, lag) == expected, (window, sinks, lag, length)

    @pytest.mark.parametrize(("window", "page_tokens", "full_tokens"), [(5, 2, 1), (4, 2, 6), (9, 3, 3)])
    @pytest.mark.parametrize("in_flight", [0, 1, 2, 3])
    def test_a_request_of_one_token_per_step_reaches_its_peak(
        self, window: int, page_tokens: int, full_tokens: int, in_flight: int
    ) -> None:
        group = window_group(window, 0, page_tokens, full_tokens)
        request = Request(reading_of(group), in_flight)
        most = max(request.store(1) for _ in range(60))
        assert most == group.peak_units(60, 1, in_flight)

    @RUNS
    @given(group=groups, length=lengths)
    def test_layer_bytes_are_those_of_the_needed_positions(self, group: PagedGroup, length: int) -> None:
        needed = len(reading_of(group).needed(length))
        assert group.layer_bytes(group.layers[0], length) == {"keys": 2 * needed, "values": 3 * needed}

    @RUNS
    @given(ratio=st.sampled_from([2, 4, 8]), length=st.integers(0, 100))
    def test_entries_of_compressed_layers_count_when_their_tokens_are_whole(
        self, ratio: int, length: int
    ) -> None:
        kind = CompressedAttention(
            entry=plain("compressed", 1, 5, "fp8"), window=3, head_dim=5, ratio=ratio, overlap=False
        )
        group = Layout([kind], 16).paged_groups[0]
        whole = {position // ratio for position in range(length) if (position + 1) % ratio == 0}
        assert group.layer_bytes(group.layers[0], length) == {"compressed": 5 * len(whole)}
        assert group.peak_units(length) == len({position // 16 for position in range(length)})
        assert group.entries_per_page == len({position // ratio for position in range(16)})


several_windows = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 6), st.sampled_from([1, 2, 3, 4, 6])),
    min_size=1,
    max_size=3,
    unique_by=lambda each: each[0],
)


class TestResuming:
    @FEW
    @given(windows=several_windows, full_pages=st.sampled_from([1, 2, 4]), times=st.integers(1, 5))
    def test_resume_needs_the_pages_that_the_next_query_reads(
        self, windows: list[tuple[int, int, int]], full_pages: int, times: int
    ) -> None:
        kinds: list[Kind] = [FullAttention(kv_heads=1, k_dim=1, v_dim=1)]
        sizes = {"full": full_pages}
        for number, (window, sinks, page_tokens) in enumerate(windows):
            kinds.append(WindowAttention(kv_heads=1, k_dim=1, v_dim=1, window=window, sink_tokens=sinks))
            sizes["window" if number == 0 else f"window-{number + 1}"] = page_tokens
        layout = Layout(kinds, sizes)
        length = layout.resume_step * times
        for need in layout.resume_needs(length):
            group = layout.group(need.group)
            assert isinstance(group, PagedGroup)
            reading = reading_of(group)
            read = {position for position in reading.read_by(length) if position < length}
            assert set(pages_in(need.pages)) == reading.pages_of(read)
            assert need.checkpoint_bytes == 0

    @FEW
    @given(sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)), length=st.integers(0, 400))
    def test_resume_lengths_are_where_all_groups_have_whole_pages(
        self, sizes: tuple[int, int], length: int
    ) -> None:
        full = FullAttention(kv_heads=1, k_dim=1, v_dim=1)
        window = WindowAttention(kv_heads=1, k_dim=1, v_dim=1, window=5)
        layout = Layout([full, window], {"full": sizes[0], "window": sizes[1]})
        expected = [n for n in range(1, length) if n % sizes[0] == 0 and n % sizes[1] == 0]
        assert list(layout.resume_lengths(length)) == expected


def small_kinds(dims: list[int], window: int, sinks: int, which: list[str]) -> list[Kind]:
    """Kinds of a few bytes a token; fp8 so that a dimension is a byte."""
    made: dict[str, Kind] = {
        "full": FullAttention(kv_heads=1, k_dim=dims[0], v_dim=dims[1], dtype="fp8"),
        "window": WindowAttention(
            kv_heads=1, k_dim=dims[1], v_dim=dims[2], dtype="fp8", window=window, sink_tokens=sinks
        ),
        "latent": LatentAttention(entry=latent(dims[2] + 1, 0, "fp8")),
        "state": ShortConv(channels=dims[0] + 3, kernel=2, dtype="fp8"),
        # A checkpoint is smaller than a state; with a window of 1 it has no bytes.
        "ring": RingWindow(entry=plain("e", 1, dims[1], "fp8"), window=dims[0], unaccepted=dims[2]),
    }
    return [made[name] for name in which]


@st.composite
def layouts(draw: Any) -> Layout:
    names = ["full", "window", "latent", "state", "ring"]
    which = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    dims = draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    kinds = small_kinds(dims, draw(st.integers(1, 6)), draw(st.integers(0, 3)), which)
    sizes = {name: draw(st.integers(1, 4)) for name in which if name not in {"state", "ring"}}
    return Layout(kinds, sizes)


mixes = st.one_of(
    st.integers(1, 16),
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
    st.dictionaries(st.integers(1, 16), st.integers(1, 4), min_size=1, max_size=3),
)
memories = st.integers(0, 260)
chunks = st.integers(1, 9)
few_depths = st.integers(0, 2)
checkpoints = st.integers(0, 2)


def weights_of(mix: Any) -> list[int]:
    """The mix as a list in which each length stands as often as its weight."""
    if isinstance(mix, dict):
        return [length for length, weight in mix.items() for _ in range(weight)]
    return mix if isinstance(mix, list) else [mix]


def wishes_of(layout: Layout, mix: Any, chunk: int, num_checkpoints: int, in_flight: int) -> list[Wish]:
    """What `divide` promises to each pool, in the words of its docstring."""
    weights = weights_of(mix)

    def way(units: Callable[[int], int], once: int = 0) -> tuple[Fraction, int, int]:
        each = [units(length) for length in weights]
        return Fraction(sum(each), len(each)), max(each), once

    wishes = []
    for group in layout.groups:
        if isinstance(group, StateGroup):
            wishes.append(Wish(group.unit_bytes, (way(lambda length: 1),)))
            wishes.append(Wish(group.checkpoint_bytes, (way(lambda length: num_checkpoints),)))
            continue
        reading, size = reading_of(group), group.page_tokens
        ways = [way(lambda length, size=size: len({p // size for p in range(length)}))]  # type: ignore[misc]
        if group.window is not None:
            steps = 2 * in_flight + 1
            endless = group.window + group.storage.sink_tokens + 3 * group.resume_step + steps * chunk + size
            base = peak(reading, endless, steps)
            # The least tokens, beyond one per step, that take a page more; all requests get `more` of them.
            enough = next(n for n in count(1) if peak(reading, endless, steps + n) > base)
            more = steps * (chunk - 1)
            # Pages that sharing a chunk takes: each costs `enough` of these tokens, and in its step one more,
            # which the request would get anyway; several pages of one request cost a page's worth each.
            pages = min(more // enough, steps * chunk // min(enough + 1, size))
            ways.append(way(partial(peak, reading, lag=steps), pages))
            # Or each request has a page more; the rest of the chunk takes what it takes in one request.
            if more >= enough:
                rest = peak(reading, endless, steps * chunk) - base - 1
                ways.append(way(partial(peak, reading, lag=steps + enough), rest))
        wishes.append(Wish(group.unit_bytes, tuple(ways)))
    return wishes


class TestDividing:
    @RUNS
    @given(layout=layouts(), memory=memories, mix=mixes, chunk=chunks, rows=checkpoints, depth=few_depths)
    def test_no_division_serves_more_of_the_mix(
        self, layout: Layout, memory: int, mix: Any, chunk: int, rows: int, depth: int
    ) -> None:
        wishes = wishes_of(layout, mix, chunk, rows, depth)
        best = best_requests(wishes, memory)
        if best is None:
            with pytest.raises(ConfigError, match="give more memory or shorter requests"):
                layout.divide(memory, mix, chunk=chunk, checkpoints=rows, in_flight=depth)
            return
        budget = layout.divide(memory, mix, chunk=chunk, checkpoints=rows, in_flight=depth)
        assert budget.requests == best
        assert budget.num_requests == int(best) >= 1
        assert budget.memory_bytes == memory
        # What is handed out fits with the padding, and serves what it says.
        states = [layout.state_group] if layout.state_group else []
        assert [share.group for share in budget.shares] == [*layout.groups, *states]
        names = [*(group.name for group in layout.groups), *("checkpoint" for _ in states)]
        assert [share.name for share in budget.shares] == names
        for share, wish in zip(budget.shares, wishes, strict=True):
            assert share.num_bytes == (share.num_units + 1) * wish.unit_bytes
            served = wish.requests(share.num_units)
            assert served is not None, "the longest of the mix does not fit"
            assert served >= best
        assert sum(share.num_bytes for share in budget.shares) + budget.spare_bytes == memory
        assert budget.spare_bytes >= 0
        assert budget.capacity() == dict(zip(names, (s.num_units for s in budget.shares), strict=True))
        tokens = [
            share.num_units * share.group.page_tokens
            for share in budget.shares
            if isinstance(share.group, PagedGroup) and share.group.window is None
        ]
        assert budget.num_tokens == (min(tokens) if tokens else None)

    @FEW
    @given(layout=layouts(), memory=memories, more=st.integers(0, 100), mix=mixes, chunk=chunks)
    def test_more_memory_never_serves_less(
        self, layout: Layout, memory: int, more: int, mix: Any, chunk: int
    ) -> None:
        try:
            little = layout.divide(memory, mix, chunk=chunk)
        except ConfigError:
            assume(False)
        much = layout.divide(memory + more, mix, chunk=chunk)
        assert much.requests >= little.requests
        assert all(much.capacity()[name] >= units for name, units in little.capacity().items())

    @RUNS
    @given(
        layout=layouts(),
        memory=memories,
        length=st.integers(1, 16),
        chunk=chunks,
        rows=checkpoints,
        depth=few_depths,
    )
    def test_max_requests_by_counting_up(
        self, layout: Layout, memory: int, length: int, chunk: int, rows: int, depth: int
    ) -> None:
        wishes = wishes_of(layout, length, chunk, rows, depth)

        def cost(requests: int) -> int:
            units = {wish: wish.units(requests) if requests else 0 for wish in wishes}
            return sum((1 + units[wish]) * wish.unit_bytes for wish in wishes)

        expected = 0
        while cost(expected + 1) <= memory:
            expected += 1
        assert layout.max_requests(memory, length, chunk=chunk, checkpoints=rows, in_flight=depth) == expected
        assert layout.memory_for(expected, length, chunk=chunk, checkpoints=rows, in_flight=depth) == cost(
            expected
        )
        if expected:
            budget = layout.divide(memory, length, chunk=chunk, checkpoints=rows, in_flight=depth)
            assert budget.num_requests == expected
        else:
            with pytest.raises(ConfigError):
                layout.divide(memory, length, chunk=chunk, checkpoints=rows, in_flight=depth)

    @RUNS
    @given(layout=layouts(), memory=memories, chunk=chunks, rows=checkpoints, depth=few_depths)
    def test_the_longest_request_fits_and_one_token_more_does_not(
        self, layout: Layout, memory: int, chunk: int, rows: int, depth: int
    ) -> None:
        longest = layout.longest_request(memory, chunk=chunk, checkpoints=rows, in_flight=depth)
        grows = any(group.window is None for group in layout.paged_groups)
        if longest is None:
            assert not grows
            assert layout.max_requests(memory, 10**6, chunk=chunk, checkpoints=rows, in_flight=depth) >= 1
            return
        if longest:
            assert layout.max_requests(memory, longest, chunk=chunk, checkpoints=rows, in_flight=depth) >= 1
        assert layout.max_requests(memory, longest + 1, chunk=chunk, checkpoints=rows, in_flight=depth) == 0
        if not layout.paged_groups:
            assert longest == 0

    @pytest.mark.parametrize("in_flight", [0, 1])
    @pytest.mark.parametrize("requests", [1, 2, 3])
    def test_a_budget_lasts_however_chunks_are_shared_out(self, requests: int, in_flight: int) -> None:
        """Every way in which requests share the chunks of the steps they hold, each at its worst place."""
        steps = 2 * in_flight + 1
        for chunk, page_tokens, full_tokens in product((1, 2, 4, 5), (1, 2, 3, 4), (1, 4)):
            for window, length in product((1, 4, 6), (5, 14, 60)):
                layout = Layout([window_kind(window), FULL], {"window": page_tokens, "full": full_tokens})
                reading = reading_of(layout.paged_groups[0])
                lags = {
                    tuple(map(sum, zip(*chosen, strict=True)))
                    for chosen in combinations_with_replacement(ways_to_share(chunk, requests), steps)
                }
                held = max(sum(peak(reading, length, lag) for lag in each) for each in lags)
                memory = layout.memory_for(requests, length, chunk=chunk, in_flight=in_flight)
                budget = layout.divide(memory, length, chunk=chunk, in_flight=in_flight)
                there = budget.capacity()["window"]
                case = (chunk, page_tokens, full_tokens, window, length)
                assert held <= there <= held + requests - 1, f"{case}: {held} wanted, {there} there"


def ways_to_share(chunk: int, requests: int) -> list[tuple[int, ...]]:
    """Tokens of each request in one step: one, or more of a chunk."""
    shares = product(range(1, chunk + 1), repeat=requests)
    return [each for each in shares if sum(n for n in each if n > 1) <= chunk]
