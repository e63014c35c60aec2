"""Groups against pages that are sets of positions; sizing against trying every division of the memory."""

from fractions import Fraction
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
    ShortConv,
    StateGroup,
    WindowAttention,
    latent,
    plain,
)
from property.layout_model import Reading, Request, Wish, best_requests, peak

RUNS = settings(max_examples=150, deadline=None)
FEW = settings(max_examples=60, deadline=None)


def reading_of(group: PagedGroup) -> Reading:
    return Reading(group.page_tokens, group.storage.window, group.storage.sink_tokens)


def window_group(window: int, sinks: int, page_tokens: int) -> PagedGroup:
    kind = WindowAttention(kv_heads=1, k_dim=2, v_dim=3, dtype="fp8", window=window, sink_tokens=sinks)
    return Layout([kind], page_tokens).paged_groups[0]


def full_group(page_tokens: int) -> PagedGroup:
    return Layout([FullAttention(kv_heads=1, k_dim=2, v_dim=3, dtype="fp8")], page_tokens).paged_groups[0]


page_tokenss = st.integers(1, 9)
groups = st.one_of(
    st.builds(full_group, page_tokenss),
    st.builds(window_group, st.integers(1, 20), st.integers(0, 12), page_tokenss),
)
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
        assert group.num_pages(length) == len(live)

    @RUNS
    @given(group=groups, steps=st.lists(st.integers(1, 12), min_size=1, max_size=12))
    def test_a_growing_request_never_holds_more_than_its_peak(
        self, group: PagedGroup, steps: list[int]
    ) -> None:
        request, most = Request(reading_of(group)), 0
        for step in steps:
            most = max(most, request.store(step))
            request.free_unread()
            assert set(request.pages) == set(pages_in(group.live_pages(request.length)))
        assert most <= group.peak_units(request.length, max(steps))
        assert group.num_pages(request.length) <= group.peak_units(request.length, max(steps))

    @RUNS
    @given(group=groups, length=lengths, step=st.integers(1, 12))
    def test_the_peak_is_reached_by_a_step_that_begins_at_the_worst_place(
        self, group: PagedGroup, length: int, step: int
    ) -> None:
        # Steps of at most `step` tokens that may begin at any length below: for these the bound is exact.
        assert group.peak_units(length, step) == peak(reading_of(group), length, step)

    @pytest.mark.parametrize("page_tokens", [1, 2, 3, 4])
    def test_the_peak_is_exact_for_every_small_window(self, page_tokens: int) -> None:
        for window in range(1, 8):
            for sinks in range(5):
                group = window_group(window, sinks, page_tokens)
                for step in (1, 2, 3, 5):
                    for length in (0, 1, 2, 5, 8, 13, 21, 30):
                        expected = peak(reading_of(group), length, step)
                        assert group.peak_units(length, step) == expected, (window, sinks, step, length)

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
        assert group.num_pages(length) == len({position // 16 for position in range(length)})
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
    }
    return [made[name] for name in which]


@st.composite
def layouts(draw: Any) -> Layout:
    which = draw(
        st.lists(st.sampled_from(["full", "window", "latent", "state"]), min_size=1, max_size=3, unique=True)
    )
    dims = draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    kinds = small_kinds(dims, draw(st.integers(1, 6)), draw(st.integers(0, 3)), which)
    sizes = {name: draw(st.integers(1, 4)) for name in which if name != "state"}
    return Layout(kinds, sizes)


mixes = st.one_of(
    st.integers(1, 16),
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
    st.dictionaries(st.integers(1, 16), st.integers(1, 4), min_size=1, max_size=3),
)
memories = st.integers(0, 260)
chunks = st.integers(1, 9)
checkpoints = st.integers(0, 2)


def weights_of(mix: Any) -> list[int]:
    """The mix as a list in which each length stands as often as its weight."""
    if isinstance(mix, dict):
        return [length for length, weight in mix.items() for _ in range(weight)]
    return mix if isinstance(mix, list) else [mix]


def wishes_of(layout: Layout, mix: Any, chunk: int, num_checkpoints: int) -> list[Wish]:
    """What `divide` promises to each group, in the words of its docstring."""
    wishes = []
    for group in layout.groups:
        if isinstance(group, StateGroup):
            units, once = [1 + num_checkpoints for _ in weights_of(mix)], 0
        else:
            reading = reading_of(group)
            step, once = 1, 0
            if group.window is not None:
                # Each request may get the least part of a chunk that takes a page more; the rest of the chunk
                # takes what it takes in one request.
                endless = 4 * (group.window + chunk + group.page_tokens)
                held = {part: peak(reading, endless, part) for part in range(1, chunk + 1)}
                step = next((part for part in held if held[part] > held[1]), 1)
                if step > group.page_tokens:  # sharing the chunk out takes more tokens than it fills pages
                    step = 1
                once = held[chunk] - held[step]
            units = [peak(reading, length, step) for length in weights_of(mix)]
        wishes.append(Wish(group.unit_bytes, Fraction(sum(units), len(units)), max(units), once))
    return wishes


class TestDividing:
    @RUNS
    @given(layout=layouts(), memory=memories, mix=mixes, chunk=chunks, rows=checkpoints)
    def test_no_division_serves_more_of_the_mix(
        self, layout: Layout, memory: int, mix: Any, chunk: int, rows: int
    ) -> None:
        wishes = wishes_of(layout, mix, chunk, rows)
        best = best_requests(wishes, memory)
        if best is None:
            with pytest.raises(ConfigError, match="give more memory or shorter requests"):
                layout.divide(memory, mix, chunk=chunk, checkpoints=rows)
            return
        budget = layout.divide(memory, mix, chunk=chunk, checkpoints=rows)
        assert budget.requests == best
        assert budget.num_requests == best.numerator // best.denominator >= 1
        assert budget.memory_bytes == memory
        # What is handed out fits with the padding, and serves what it says.
        assert [share.group for share in budget.shares] == list(layout.groups)
        for share, wish in zip(budget.shares, wishes, strict=True):
            assert share.num_bytes == (share.num_units + 1) * wish.unit_bytes
            served = wish.requests(share.num_units)
            assert served is not None, "the longest of the mix does not fit"
            assert served >= best
        assert sum(share.num_bytes for share in budget.shares) + budget.spare_bytes == memory
        assert budget.spare_bytes >= 0
        assert budget.capacity() == {share.group.name: share.num_units for share in budget.shares}
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
    @given(layout=layouts(), memory=memories, length=st.integers(1, 16), chunk=chunks, rows=checkpoints)
    def test_max_requests_by_counting_up(
        self, layout: Layout, memory: int, length: int, chunk: int, rows: int
    ) -> None:
        wishes = wishes_of(layout, length, chunk, rows)

        def cost(requests: int) -> int:
            return sum((1 + wish.once + requests * wish.longest) * wish.unit_bytes for wish in wishes)

        expected = 0
        while cost(expected + 1) <= memory:
            expected += 1
        assert layout.max_requests(memory, length, chunk=chunk, checkpoints=rows) == expected
        assert layout.memory_for(expected, length, chunk=chunk, checkpoints=rows) == cost(expected)
        if expected:
            budget = layout.divide(memory, length, chunk=chunk, checkpoints=rows)
            assert budget.num_requests == expected
        else:
            with pytest.raises(ConfigError):
                layout.divide(memory, length, chunk=chunk, checkpoints=rows)

    @RUNS
    @given(layout=layouts(), memory=memories, chunk=chunks, rows=checkpoints)
    def test_the_longest_request_fits_and_one_token_more_does_not(
        self, layout: Layout, memory: int, chunk: int, rows: int
    ) -> None:
        longest = layout.longest_request(memory, chunk=chunk, checkpoints=rows)
        grows = any(group.window is None for group in layout.paged_groups)
        if longest is None:
            assert not grows
            assert layout.max_requests(memory, 10**6, chunk=chunk, checkpoints=rows) >= 1
            return
        if longest:
            assert layout.max_requests(memory, longest, chunk=chunk, checkpoints=rows) >= 1
        assert layout.max_requests(memory, longest + 1, chunk=chunk, checkpoints=rows) == 0
        if not layout.paged_groups:
            assert longest == 0

    @pytest.mark.parametrize("parts", [[4], [1, 1], [3, 1], [2, 2], [2, 2, 2], [5, 1, 2]])
    def test_a_budget_lasts_for_a_step_whose_chunk_goes_to_several_requests(self, parts: list[int]) -> None:
        """Each request stores its part of one chunk in a step, and the step finds it at its worst place."""
        chunk, length = sum(parts), 40
        for window in range(1, 10):
            for page_tokens in range(1, 6):
                kind = WindowAttention(kv_heads=1, k_dim=2, v_dim=3, dtype="fp8", window=window)
                layout = Layout([kind], page_tokens)
                group = layout.paged_groups[0]
                memory = group.unit_bytes
                while layout.max_requests(memory, length, chunk=chunk) < len(parts):
                    memory += group.unit_bytes
                held = sum(peak(reading_of(group), length, part) for part in parts)
                there = layout.divide(memory, length, chunk=chunk).capacity()["window"]
                assert held <= there, f"window {window}, pages of {page_tokens}: {held} wanted, {there} there"
