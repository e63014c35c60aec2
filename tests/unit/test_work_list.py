"""Work lists of attention: what managers plan, what pools refuse, what batches show."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda._native import most_parts
from pagoda.errors import ArgumentError, CaptureError, ConfigError
from pagoda.kernels._attention_extend import num_extend_programs
from pagoda.layout import FullAttention, LatentAttention, Layout, WindowAttention, latent, latent_fp8
from pagoda.layout._work import WORKERS, work_target
from pagoda.manager import Delta, Manager
from pagoda.pools import Pools, _batch
from unit.deltas import delta_of, lists_for, work_of
from unit.work_model import require_cover, require_even, work_model

KV: dict[str, Any] = {"kv_heads": 2, "k_dim": 8, "v_dim": 8}
FULL, WINDOW = FullAttention(**KV), WindowAttention(**KV, window=700)
BOTH = Layout([FULL, WINDOW], 64)
SIZES: dict[str, Any] = {"num_rows": 12, "max_tokens": 1 << 16}


def manager_of(layout: Layout = BOTH, **more: Any) -> Manager:
    return Manager(layout, {g.name: 20_000 for g in layout.paged_groups}, **{**SIZES, **more})


def pools_of(layout: Layout = BOTH, **more: Any) -> Pools:
    sizes = {**SIZES, "max_step_tokens": 1 << 16, "device": "cpu", **more}
    return Pools(layout, {g.name: 1 for g in layout.paged_groups}, **sizes)


def step_of(pools: Pools, rows: list[tuple[int, int]], step: int = 1, **more: Any) -> Delta:
    """The delta of a step whose rows have these lengths and counts."""
    lengths, counts = [length for length, _ in rows], [count for _, count in rows]
    more = {**lists_for(pools), **more}
    numbers = range(1, len(rows) + 1)
    return delta_of(step, rows=numbers, lengths=lengths, counts=counts, num_groups=len(pools.pools), **more)


# ── what is planned ─────────────────────────────────────────────────────────────────────────────────

few_tokens = st.integers(1, 8) | st.just(1)
some_rows = st.lists(
    st.tuples(st.integers(0, 3000) | st.integers(0, 60_000), few_tokens | st.integers(0, 2000)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(rows=some_rows, workers=st.sampled_from([1, 2, 7, 64, WORKERS, 5000]))
def test_a_plan_has_the_list_of_every_group(rows: list[tuple[int, int]], workers: int):
    manager = manager_of(workers=workers)
    counts = [min(length, count) for length, count in rows]
    lengths = [max(1, length) for length, _ in rows]
    admitted = [manager.admit(range(length), read=False, store=False).row for length in lengths]
    manager.plan(admitted, [length - count for length, count in zip(lengths, counts, strict=True)])
    delta = manager.plan(admitted, counts)
    assert delta.lengths.tolist() == lengths
    for g, (window, target) in enumerate([(None, -(-workers // 2)), (700, -(-workers // 2))]):
        work = delta.work(g)
        if not rows:
            assert work is None
            continue
        assert work is not None
        expected = work_model(lengths, counts, window, target)
        require_cover(expected, lengths, counts, window)
        require_even(expected, target)
        assert [part.tolist() for part in work[:4]] == list(expected[:4])
        assert work[4:] == (*expected[4:], target)
        assert all(part.dtype == np.int32 for part in work[:4])
        # What buffers and memory of kernels are made for.
        assert len(work.segments) <= len(rows) + target
        assert work.num_parts <= most_parts(len(rows), sum(counts), max(counts), target)


def list_of(rows: list[tuple[int, int]], workers: int, layer: Any = FULL) -> Any:
    """What a manager plans for rows of a group with two KV heads."""
    manager = manager_of(Layout([layer], 64), workers=workers, num_rows=64)
    admitted = [manager.admit(range(length), read=False, store=False).row for length, _ in rows]
    manager.plan(admitted, [length - count for length, count in rows])
    return manager.plan(admitted, [count for _, count in rows]).work(0)


def test_a_long_row_is_split_and_short_ones_are_not():
    """Target 4, 8,000 keys: 2,000 for each program, and rows are cut at the next multiple of 64."""
    work = list_of([(500, 1), (7000, 2), (500, 1)], workers=8)
    assert work.segments.tolist() == [
        [0, 500, 0, 1], [0, 1536, 1, 1], [1536, 3584, 2, 1], [3584, 5632, 3, 1], [5632, 7000, 4, 1],
        [0, 500, 5, 1],
    ]  # fmt: skip
    assert work.members.tolist() == [[0, -1], [1, 0], [1, 2], [1, 4], [1, 6], [2, -1]]
    assert work.splits.tolist() == [[1, -1], [4, 0], [1, -1]]
    assert work.runs.tolist() == [0, 2, 3, 4, 6]
    assert (work.num_parts, work.extend_parts, work.target) == (8, 1, 4)


def test_equal_rows_are_not_cut():
    """64 rows of 4,096 on 66 programs: each would get 3,972 keys, but a few more avoid all cuts."""
    work = list_of([(4096, 1)] * 64, workers=132)
    assert work.segments.tolist() == [[0, 4096, row, 1] for row in range(64)]
    assert work.members.tolist() == [[row, -1] for row in range(64)]
    assert work.splits.tolist() == [[1, -1]] * 64
    assert work.runs.tolist() == [*range(65), 64, 64]
    assert work.num_parts == 0


def test_a_row_is_whole_if_it_exceeds_a_share_by_a_sixteenth_at_most():
    """Target 2, shares of 1,600: the first row may have 100 keys more, and with one more it is cut."""
    assert list_of([(1700, 1), (1500, 1)], workers=4).segments[:, :2].tolist() == [[0, 1700], [0, 1500]]
    cut = list_of([(1701, 1), (1499, 1)], workers=4)
    assert cut.segments[:, :2].tolist() == [[0, 1600], [1600, 1701], [0, 1499]]
    assert cut.runs.tolist() == [0, 1, 3]


def test_one_long_row_has_a_part_for_every_program():
    work = list_of([(66 * 512, 1)], workers=132)
    assert work.segments[:, :2].tolist() == [[512 * p, 512 * (p + 1)] for p in range(66)]
    assert work.members.tolist() == [[0, p] for p in range(66)]
    assert work.splits.tolist() == [[66, 0]]
    assert work.runs.tolist() == list(range(67))
    # Shares of 497 keys are cut at multiples of 64, so two programs have nothing left to do.
    fewer = list_of([(64 * 512, 1)], workers=132)
    assert fewer.splits.tolist() == [[64, 0]]
    assert fewer.runs.tolist() == [*range(65), 64, 64]


def test_short_rows_have_a_program_each_where_there_are_enough():
    short = list_of([(86, 1)] * 6, workers=132)
    assert short.runs.tolist() == [*range(7), *[6] * 60]
    assert short.num_parts == 0
    shared = list_of([(86, 1)] * 9, workers=16)  # 8 programs: the least share, 256 keys, holds three rows
    assert shared.runs.tolist() == [0, 3, 6, *[9] * 6]


def test_a_share_has_at_least_256_keys():
    assert list_of([(1024, 1)], workers=132).splits.tolist() == [[4, 0]]


def test_short_rows_are_cut_where_a_program_has_256_keys():
    work = list_of([(length, 1) for length in (3, 200, 90, 130, 255, 1)], workers=8)
    found = [work.segments[begin:end, :2].tolist() for begin, end in pairwise(work.runs)]
    assert found == [
        [[0, 3], [0, 200], [0, 64]],
        [[64, 90], [0, 130], [0, 128]],
        [[128, 255], [0, 1]],
        [],
    ]


def test_only_the_keys_of_a_window_are_divided():
    """A window of 700 and 1 or 8 queries read 700 or 707 keys; a share on 3 programs is 499 keys."""
    work = list_of([(9000, 1), (1000, 8), (90, 1)], workers=6, layer=WINDOW)
    assert work.segments[:, :2].tolist() == [[8300, 8832], [8832, 9000], [293, 640], [640, 1000], [0, 90]]
    assert work.runs.tolist() == [0, 1, 3, 5]
    assert work.splits.tolist() == [[2, 0], [2, 2], [1, -1]]
    assert work.members.tolist() == [[0, 0], [0, 1], [1, 2], [1, 10], [2, -1]]


def test_extend_rows_have_parts_and_no_segments():
    """Target 132, a quarter of it for extend rows, 6 tiles: at most 5 parts, 16, and one per 1,024 keys."""
    work = list_of([(5000, 130), (1, 1), (40_000, 9)], workers=264)
    assert work.splits.tolist() == [[5, 0], [1, -1], [5, 650]]
    assert list_of([(40_000, 9)], workers=264).splits.tolist() == [[16, 0]]
    assert list_of([(3000, 9)], workers=264).splits.tolist() == [[3, 0]]
    assert work.segments.tolist() == [[0, 1, 0, 1]]
    assert (work.num_parts, work.extend_parts) == (650 + 5 * 9, 5)
    many = list_of([(30_000, 64 * 100), (3000, 64 * 33)], workers=264)  # 266 tiles: all programs have work
    assert many.splits.tolist() == [[1, -1], [1, -1]]
    assert (many.num_parts, many.extend_parts) == (0, 1)


def test_a_delta_without_rows_or_without_workers_has_no_list():
    assert manager_of().plan().work(0) is None
    with_list, without = manager_of(), manager_of(workers=0)
    for each in (with_list, without):
        each.admit(range(10))
    assert with_list.plan(1, 10).work(1) is not None
    delta = without.plan(1, 10)
    assert delta.work(0) is None
    assert delta.num_bytes < with_list.plan(1, 0).num_bytes


def test_groups_of_entries_have_no_list_and_latents_count_as_four_heads():
    plain = LatentAttention(entry=latent(16, 8, "bfloat16"))
    fp8 = LatentAttention(entry=latent_fp8(512, 64))
    layout = Layout([FULL, plain, fp8], 64)
    targets = {group.name: work_target(group, 264) for group in layout.paged_groups}
    heads = {group.name: group.kv_heads for group in layout.paged_groups}
    full, one, none = (group.name for group in layout.paged_groups)
    assert (targets[full], targets[one], targets[none]) == (132, 66, 0)  # latents count as four heads
    assert (heads[full], heads[one], heads[none]) == (2, 1, None)
    manager = manager_of(layout)
    manager.admit(range(10))
    delta = manager.plan(1, 10)
    assert [delta.work(g) is None for g in range(3)] == [False, False, True]
    pools = pools_of(layout, workers=264)
    with pytest.raises(ArgumentError):
        pools.batch(delta)
    batch = pools.batch(apply(pools, step_of(pools, [(10, 1)])))
    assert not batch[none].work.has_list
    assert [each.shape for each in batch[none].work[:3]] == [(0,), (0, 8), (0, 2)]
    assert [each.shape for each in batch[one].work[:3]] == [(66 + 1,), (1 + 66, 8), (1, 2)]


@pytest.mark.parametrize("workers", [-1, 1.5, None, True, 2**16 + 1, 2**70])
def test_workers_are_a_number(workers: Any):
    for make in (manager_of, pools_of):
        with pytest.raises(ConfigError, match="workers"):
            make(workers=workers)


def test_there_is_no_list_of_a_group_that_does_not_exist():
    manager = manager_of()
    manager.admit(range(3))
    delta = manager.plan(1, 3)
    for group in (2, -1):
        with pytest.raises(ArgumentError, match="2 groups"):
            delta.work(group)


# ── what pools refuse ───────────────────────────────────────────────────────────────────────────────


def apply(pools: Pools, delta: Delta) -> Delta:
    pools.apply(delta)
    return delta


def test_workers_of_manager_and_pools_have_to_agree():
    manager, without = manager_of(workers=264), manager_of(workers=0)
    for each in (manager, without):
        each.admit(range(64))
    sizes = {**SIZES, "max_step_tokens": 64, "device": "cpu"}
    capacity = {"full": 20_000, "window": 20_000}
    delta = manager.plan(1, 64)
    few, none = (Pools(BOTH, capacity, **sizes, workers=n) for n in (262, 0))
    with pytest.raises(ArgumentError, match=r"group full is for 132 .* room for 131: .* the same workers"):
        few.apply(delta)
    with pytest.raises(ArgumentError, match=r"group full is missing, .* the same workers"):
        few.apply(without.plan(1, 64))
    assert few.step == 0
    none.apply(delta)  # such pools ignore lists
    assert none.batch(delta)["full"].work.has_list is False
    assert none.batch(delta)["full"].work.num_parts == 0


ROWS = [(3000, 1), (100, 2), (5000, 20), (7, 0), (900, 1)]
TARGET = 9  # of 18 workers: 445 keys for each program


def words() -> list[int]:
    lengths, counts = zip(*ROWS, strict=True)
    return work_of(lengths, counts, [None], [TARGET])


def test_the_list_that_the_next_tests_break_is_right():
    pools = pools_of(Layout([FULL], 64), workers=18)
    work = apply(pools, step_of(pools, ROWS, work=words())).work(0)
    assert work is not None
    assert work.splits.tolist() == [[7, 0], [1, -1], [2, 7], [0, -1], [3, 47]]
    assert work.runs.tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]


def entry(at: int, value: int) -> Callable[[list[int]], None]:
    def edit(words: list[int]) -> None:
        words[at] = value

    return edit


def segment(number: int, at: int, value: int) -> Callable[[list[int]], None]:
    return lambda words: entry(words[1] + 4 * number + at, value)(words)


def member(number: int, at: int, value: int) -> Callable[[list[int]], None]:
    return lambda words: entry(words[3] + 2 * number + at, value)(words)


def split(row: int, at: int, value: int) -> Callable[[list[int]], None]:
    return lambda words: entry(words[5] + 2 * row + at, value)(words)


def run(program: int, value: int) -> Callable[[list[int]], None]:
    return lambda words: entry(words[5] + 2 * len(ROWS) + program, value)(words)


def swap_segments(words: list[int]) -> None:
    """The second part of row 0 before the first."""
    a, b = words[1], words[1] + 4
    words[a : a + 2], words[b : b + 2] = words[b : b + 2], words[a : a + 2]


def drop_segment(words: list[int]) -> None:
    """The last one, but not its member."""
    words[2] -= 1
    run(TARGET, 10)(words)


def drop_segment_and_member(words: list[int]) -> None:
    drop_segment(words)
    words[4] -= 1


def lower_target(words: list[int]) -> None:
    """One program, for which no extend row is split, and as many segments as before."""
    words[0], words[6], words[7] = 1, words[6] - 2 * 20, 1
    split(2, 0, 1)(words)
    split(2, 1, -1)(words)
    words[words[5] + 2 * 4 + 1] -= 2 * 20


BAD = {
    "segments outside of the section": (entry(1, 10_000), "truncated"),
    "segments in the directory": (entry(1, 4), "truncated"),
    "a negative number of segments": (entry(2, -1), "truncated"),
    "too many members": (entry(4, 2**30), "truncated"),
    "splits outside of the section": (entry(5, 2**31 - 1), "truncated"),
    "no target but a list": (entry(0, 0), "truncated"),
    "a negative target": (entry(0, -9), "truncated"),
    "runs outside of the section": (entry(0, 60), "truncated"),
    "a larger target": (entry(0, TARGET + 1), "room for 9: .* same workers"),
    "a smaller target": (lower_target, "too many for 5 rows"),
    "fewer runs": (entry(0, TARGET - 1), "segments that no program computes"),
    "a first run that begins late": (run(0, 1), "runs of segments that are out of order"),
    "a first run that begins early": (run(0, -1), "runs of segments that are out of order"),
    "a run that ends before it begins": (run(3, 1), "runs of segments that are out of order"),
    "segments in no run": (run(TARGET, 10), "segments that no program computes"),
    "a run of segments that are not there": (run(TARGET, 12), "segments that no program computes"),
    "a run far beyond the segments": (run(TARGET - 1, 2**30), "runs of segments that are out of order"),
    "a row that is split inside a run": (run(7, 10), "begins to split row 4 of the step inside a run"),
    "another number of parts": (entry(6, 111), "counts its parts wrongly"),
    "other extend parts": (entry(7, 4), "counts its parts wrongly"),
    "a row without queries is split": (split(3, 0, 1), "splits row 3 .* computes 0 tokens"),
    "a row with queries is in no part": (split(1, 0, 0), "splits row 1 "),
    "more parts than an extend row can have": (split(2, 0, 17), "splits row 2 "),
    "more parts than there are places for its programs": (split(2, 0, 3), "splits row 2 "),
    "an absurd number of parts": (split(0, 0, 2**31 - 1), "splits row 0 "),
    "a first part twice": (split(4, 1, 0), "numbers the parts of row 4"),
    "a first part of a row that is not split": (split(1, 1, 3), "numbers the parts of row 1"),
    "a gap": (segment(1, 0, 512), "keys 512 to .* but those from 448"),
    "an empty segment": (segment(1, 1, 448), "keys 448 to 448"),
    "a segment beyond the row": (segment(6, 1, 3001), "keys .* to 3001"),
    "a negative key": (segment(0, 0, -64), "keys -64 "),
    "a segment that ends early": (segment(6, 1, 2999), "does not cover row 0"),
    "segments in another order": (swap_segments, "those from 0 to 3000 are next"),
    "a segment is missing": (drop_segment_and_member, "does not cover row 4"),
    "no members": (segment(3, 3, 0), "members of segment 3"),
    "a member of another segment": (segment(3, 2, 2), "members of segment 3"),
    "members that are not there": (segment(10, 3, 2), "members of segment 10"),
    "a member of no segment": (drop_segment, "members that belong to no segment"),
    "a row that is not in the step": (member(0, 0, 5), "names row 5 of a step of 5"),
    "a negative row": (member(0, 0, -1), "names row -1"),
    "an extend row in a segment": (member(10, 0, 2), "row 2 of the step, which computes 20 tokens"),
    "a row without queries in a segment": (member(10, 0, 3), "row 3 of the step, which computes 0 tokens"),
    "the part of another": (member(1, 1, 2), "numbers the parts of row 0"),
    "a part for a row that is not split": (member(7, 1, 0), "numbers the parts of row 1"),
    "no part for a row that is": (member(2, 1, -1), "numbers the parts of row 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_list_is_refused_and_nothing_changes(name: str):
    edit, message = BAD[name]
    pools, bad = pools_of(Layout([FULL], 64), workers=18), words()
    edit(bad)
    with pytest.raises(ArgumentError, match=message):
        pools.apply(step_of(pools, ROWS, work=bad))
    assert pools.step == 0
    pools.apply(step_of(pools, ROWS))


def test_there_is_a_free_task_behind_those_of_a_list():
    rows = [(8, 8), (1000, 1)]
    segments, members = [0, 8, 0, 1, 0, 64, 1, 1, 64, 128, 2, 1, 128, 1000, 3, 1], [0, -1, 1, 0, 1, 1, 1, 2]
    words = [2, 8, 4, 24, 4, 32, 3, 1, *segments, *members, 1, -1, 3, 0, 0, 2, 4, 0]
    pools = pools_of(Layout([FULL], 64), workers=4)
    with pytest.raises(ArgumentError, match="too many for 2 rows"):
        pools.apply(step_of(pools, rows, work=words))
    words = [2, 8, 3, 20, 3, 28, 2, 1, *segments[:8], 64, 1000, 2, 1, *members[:6], 0, 0]
    pools.apply(step_of(pools, rows, work=[*words, 1, -1, 2, 0, 0, 2, 3, 0]))


def test_a_list_that_was_changed_after_it_was_applied_is_not_copied():
    pools = pools_of(Layout([FULL], 64), workers=18)
    delta = apply(pools, step_of(pools, ROWS))
    work = delta.work(0)
    assert work is not None
    work.segments[0, 2] = 10_000
    with pytest.raises(ArgumentError, match="members of segment 0"):
        pools.batch(delta)


def test_segments_of_several_rows_are_refused():
    """Both rows read 320 keys together, and then each its own."""
    pools = pools_of(Layout([FULL], 64), workers=6)
    segments = [0, 320, 0, 2, 320, 400, 2, 1, 320, 330, 3, 1]
    members = [0, 0, 1, 2, 0, 1, 1, 3]
    splits, runs = [2, 0, 2, 2], [0, 1, 2, 3]
    head = [3, 8, 3, 8 + 12, 4, 8 + 12 + 8, 4, 1]
    delta = step_of(pools, [(400, 1), (330, 1)], work=[*head, *segments, *members, *splits, *runs])
    assert delta.work(0) is not None
    with pytest.raises(
        ArgumentError, match=r"group full has a segment of 2 rows, .*: give each row segments of"
    ):
        pools.apply(delta)
    assert pools.step == 0


def test_a_list_for_fewer_programs_is_accepted():
    """Pools for 9 programs, a list for 4: the other programs have nothing to do."""
    pools = pools_of(Layout([FULL], 64), workers=18)
    work = pools.batch(apply(pools, step_of(pools, [(4000, 1), (300, 2)], targets=[4])))["full"].work
    assert work.runs.tolist() == [0, 1, 2, 3, 5, 5, 5, 5, 5, 5]
    assert work.splits.tolist() == [[4, 0], [1, -1]]
    assert work.tasks.shape == (2 + 9, 8)
    assert not work.tasks[5:].any()


# ── what batches show ───────────────────────────────────────────────────────────────────────────────


def test_a_batch_has_a_task_for_every_segment():
    """Target 2, 1,300 keys: shares of 650, of which 50 are left for the second row."""
    pools = pools_of(Layout([FULL], 64), workers=4)
    work = pools.batch(apply(pools, step_of(pools, [(600, 2), (20, 0), (700, 3)])), pad_to=4)["full"].work
    assert work.runs.tolist() == [0, 2, 3]
    assert work.tasks.tolist() == [
        [0, 600, 0, -1, 0, 2, 600, 0],
        [0, 64, 2, 0, 2, 3, 700, 2],
        [64, 700, 2, 3, 2, 3, 700, 0],
        *[[0] * 8] * 3,
    ]
    assert work.splits.tolist() == [[1, -1], [0, -1], [2, 0], [0, -1]]


def test_the_most_queries_of_a_batch():
    pools = pools_of()
    delta = apply(pools, step_of(pools, [(300, 5), (20, 1)]))
    assert pools.batch(delta).max_queries == 5
    assert pools.batch(delta, pad_to=(4, 64)).max_queries == 64
    assert pools.batch(delta, pad_to=4).max_queries == 6  # a batch has at least the tokens of its step
    assert pools.batch(delta, pad_to=(4, 64), max_queries=5).max_queries == 5
    assert pools.batch(delta, max_queries=np.int64(9)).max_queries == 9
    assert pools.batch(delta, max_queries=2**70).max_queries == pools.max_step_tokens
    for wrong, message in ((4, "computes 5 tokens, not 4"), (-1, "max_queries"), (1.5, "max_queries")):
        with pytest.raises(ArgumentError, match=message):
            pools.batch(delta, max_queries=wrong)
    empty = apply(pools, delta_of(2, num_groups=2))
    assert pools.batch(empty).max_queries == 0
    assert pools.batch(empty, max_queries=0)["full"].work.num_parts == 0


def test_parts_are_exact_for_one_step_and_a_bound_for_a_graph():
    pools = pools_of(Layout([FULL], 64), workers=18)
    delta = apply(pools, step_of(pools, ROWS))
    work = pools.batch(delta)["full"].work
    assert (work.num_parts, work.extend_parts, work.has_list) == (50, 2, True)
    for more in ({"pad_to": (5, 24)}, {"max_queries": 24}):
        work = pools.batch(delta, **more)["full"].work
        assert (work.num_parts, work.extend_parts) == (most_parts(5, 24, 24, 9), 16)
    decode = apply(pools, step_of(pools, [(3000, 1), (900, 1)], step=2))
    work = pools.batch(decode, pad_to=(12, 12), max_queries=1)["full"].work
    assert (work.num_parts, work.extend_parts) == (16, 1)  # below twice the target
    assert pools.batch(decode).host["full"].work.num_parts == 10
    eight = pools.batch(decode, pad_to=(12, 96), max_queries=8)["full"].work
    assert (eight.num_parts, eight.extend_parts) == (8 * 16, 1)


def test_the_bound_is_reached():
    """Target 3, shares of 400 keys: each of two rows crosses the end of one."""
    assert work_model([600, 600], [1, 1], None, 3).num_parts == 4 == most_parts(2, 2, 1, 3)
    assert work_model([600, 600], [8, 8], None, 3).num_parts == 4 * 8 == most_parts(2, 16, 8, 3)


def test_scratch_grows_stays_and_is_counted(monkeypatch: pytest.MonkeyPatch):
    pools = pools_of()
    batch = pools.batch(apply(pools, step_of(pools, [(300, 5)])))
    before = pools.memory_bytes()
    first = batch.scratch(1000)
    assert first.dtype == torch.uint8
    assert first.shape[0] >= 1000
    assert pools.memory_bytes() == before + first.nbytes
    assert batch.scratch(0) is batch.scratch(1000) is first
    monkeypatch.setattr(_batch, "is_capturing", lambda device: True)
    assert batch.scratch(first.shape[0]) is first
    with pytest.raises(CaptureError, match=r"call attention.paged once before the capture"):
        batch.scratch(first.shape[0] + 1)
    monkeypatch.undo()
    more = batch.scratch(first.shape[0] + 1)
    assert more.shape[0] > first.shape[0]
    assert {first.data_ptr(), more.data_ptr()} <= {tensor.data_ptr() for tensor in pools.tensors()}
    assert batch.scratch(1) is more
    pools.check()


def test_a_batch_of_its_own_step_is_not_captured(monkeypatch: pytest.MonkeyPatch):
    pools = pools_of()
    delta = apply(pools, step_of(pools, [(300, 5)]))
    pools.batch(delta).require_capturable()  # nothing is captured
    monkeypatch.setattr(_batch, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="make it with pad_to and max_queries"):
        pools.batch(delta).require_capturable()
    pools.batch(delta, pad_to=5).require_capturable()
    pools.batch(delta, max_queries=5).require_capturable()


@settings(max_examples=200)
@given(
    counts=st.lists(st.integers(9, 300), min_size=1, max_size=12),
    spare=st.tuples(st.integers(0, 3), st.integers(0, 400)),
    target=st.integers(1, 600),
    group=st.sampled_from([1, 3, 4, 8, 64, 128]),
    tile_rows=st.sampled_from([16, 32, 64, 128]),
)
def test_every_tile_and_part_of_an_extend_row_has_a_program(
    counts: list[int], spare: tuple[int, int], target: int, group: int, tile_rows: int
):
    """Also in a graph, whose sizes are bounds."""
    lengths = [count + 100_000 for count in counts]
    most = max(parts for parts, _ in work_model(lengths, counts, None, target).splits)
    num_rows, num_tokens = len(counts) + spare[0], sum(counts) + spare[1]
    tiles = sum(counts) * group // tile_rows + len(counts)
    for parts in (most, 16):
        made = num_extend_programs(num_rows, num_tokens, parts, tile_rows, group, target)
        assert made >= tiles * most
