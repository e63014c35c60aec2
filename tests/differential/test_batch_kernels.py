"""The Triton kernels that fill a batch against native code, and both against a model in plain Python.

On a CPU through Triton's interpreter, on a GPU compiled: the same cases.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda._native import Rank
from unit.batch_model import Pages, Row, model
from unit.deltas import delta_of

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    batch_fused = pytest.importorskip("pagoda.kernels._batch_fused", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=400 if DEVICE == "cuda" else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SHARED = ("rows", "lengths", "query_start_loc", "positions", "batch_indices", "extends")
WORK = ("runs", "tasks", "splits")
PER_GROUP = ("slot_mapping", "page_table", "indptr", "indices", "last_page_len", "begins", *WORK)
WIDE = ("positions", "slot_mapping")  # int64
STALE = 77


class Sizes(NamedTuple):
    max_rows: int
    max_tokens: int
    padded_rows: int
    padded_tokens: int


def buffers_of(groups: list[Pages], sizes: Sizes) -> dict[str, torch.Tensor]:
    """Buffers in the order of their declaration, full of what an earlier step might have left."""
    rows, tokens = sizes.max_rows, sizes.max_tokens
    of_all: list[Any] = [(rows,), (rows,), (rows + 1,), (tokens,), (tokens,), (rows + 1, 2)]
    shapes: dict[str, Any] = dict(zip(SHARED, of_all, strict=True))
    for group in groups:
        own: list[Any] = [(tokens,), (rows, group.width), (rows + 1,), (group.max_indices,), (rows,), (rows,)]
        has_list, target = bool(group.target), group.target
        own += [(has_list * (target + 1),), (has_list * (rows + target), 8), (has_list * rows, 2)]
        shapes |= {f"{group.name}.{name}": shape for name, shape in zip(PER_GROUP, own, strict=True)}
    return {
        name: torch.full(shape, STALE, dtype=torch.int64 if name.endswith(WIDE) else torch.int32)
        for name, shape in shapes.items()
    }


def judge(groups: list[Pages], rows: list[Row], sizes: Sizes) -> dict[str, torch.Tensor]:
    """Fill with both, and compare every entry of every buffer, also behind what is padded to."""
    tables = [np.array(group.table, dtype=np.int32) for group in groups]
    num_rows = len(tables[0]) - 1
    max_tokens = max(1, min(table.shape[1] * g.page_tokens for table, g in zip(tables, groups, strict=True)))
    rank = Rank(
        [
            (g.name, 2**31 - 1, g.page_tokens, g.kernel_page_tokens, g.window, g.max_indices, g.target)
            for g in groups
        ],
        num_rows,
        max_tokens,
    )
    flat = np.concatenate([table.reshape(-1) for table in tables])
    begins = np.cumsum([0, *(table.size for table in tables)])
    places = [
        place
        for begin, table in zip(begins, tables, strict=False)
        for place in range(begin + table.shape[1], begin + table.size)
    ]
    delta = delta_of(
        1,
        rows=[row.number for row in rows],
        lengths=[row.length for row in rows],
        counts=[row.count for row in rows],
        places=places,
        page_ids=flat[places].tolist(),
        num_groups=len(groups),
        windows=[g.window for g in groups],
        targets=[g.list_target or g.target for g in groups],
    )
    found = rank.check(delta.packed, 1)
    rank.follow(delta.packed)
    native = buffers_of(groups, sizes)
    rank.fill(
        delta.packed,
        sizes.padded_rows,
        sizes.padded_tokens,
        [buffer.data_ptr() for buffer in native.values()],
    )

    fused = {name: buffer.to(DEVICE) for name, buffer in buffers_of(groups, sizes).items()}
    prepared = batch_fused.prepare(
        [
            batch_fused.GroupPages(
                len(group.table[0]),
                group.page_tokens,
                group.kernel_page_tokens,
                group.window or 0,
                group.target,
                *(fused[f"{group.name}.{name}"] for name in PER_GROUP),
            )
            for group in groups
        ],
        torch.device(DEVICE),
    )
    batch_fused.fill(
        prepared,
        torch.from_numpy(flat).to(DEVICE),
        num_rows + 1,
        torch.from_numpy(delta.packed).to(DEVICE),
        found[3:7],
        len(rows),
        sizes.padded_rows,
        sizes.padded_tokens,
        tuple(fused[name] for name in SHARED),
    )
    for name, buffer in native.items():
        assert fused[name].cpu().tolist() == buffer.tolist(), name
    _compare_with_model(native, groups, rows, sizes)
    return native


def _compare_with_model(
    native: dict[str, torch.Tensor], groups: list[Pages], rows: list[Row], sizes: Sizes
) -> None:
    """The judge is judged: its numbers are the model's, and behind them nothing was written."""
    for name, numbers in model(groups, rows, sizes.padded_rows, sizes.padded_tokens).items():
        buffer = native[name]
        assert buffer[: len(numbers)].tolist() == numbers, name
        assert (buffer[len(numbers) :] == STALE).all(), name


@CASES
@given(data=st.data())
def test_any_tables_windows_pages_and_padding_agree(data: st.DataObject):
    """One to four groups at once, with tables of different widths; ids 0 and stale ids anywhere."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kernel_page = data.draw(st.sampled_from([1, 2, 3, 16, 256]))
    num_rows = data.draw(st.integers(1, 6))
    max_tokens = 4 * kernel_page * data.draw(st.integers(1, 6))
    groups = []
    for number in range(data.draw(st.integers(1, 4))):
        page = kernel_page * data.draw(st.sampled_from([1, 2, 4]))
        table = random.integers(0, 1000, (num_rows + 1, max_tokens // page))
        table[0] = 0
        table[random.random(table.shape) < 0.1] = 0
        room = num_rows * (max_tokens // kernel_page)
        groups.append(
            Pages(
                f"group.{number}",
                page,
                kernel_page,
                data.draw(st.sampled_from([None, 1, 2, 17, 300, 2**31])),
                table.tolist(),
                data.draw(st.sampled_from([room, room, 1, 8])),
                data.draw(st.sampled_from([0, 1, 3, 33, 300])),
            )
        )
    rows = []
    for number in data.draw(st.permutations(range(1, num_rows + 1)))[: data.draw(st.integers(0, num_rows))]:
        length = data.draw(st.integers(0, max_tokens) | st.just(max_tokens))
        rows.append(Row(number, length, min(length, data.draw(st.sampled_from([0, 1, 1, 2, 9, 10_000])))))
    num_tokens = sum(row.count for row in rows)
    padded_rows = data.draw(st.integers(len(rows), num_rows))
    padded_tokens = num_tokens + data.draw(st.integers(0, 5))
    max_step = max(1, padded_tokens + data.draw(st.integers(0, 3)))
    judge(groups, rows, Sizes(num_rows, max_step, padded_rows, padded_tokens))


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.gpu)])
def scale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What blocks are to cases: those of 16 rows and columns are interpreted in no time."""
    if request.param == "small":
        monkeypatch.setattr(batch_fused, "_COUNT_BLOCK", 16)
        monkeypatch.setattr(batch_fused, "_FILL_BLOCK", 16)
        return 1
    assert batch_fused._COUNT_BLOCK == 1024
    return 64


@pytest.mark.parametrize("window", [None, 20])
def test_more_rows_columns_and_tokens_than_a_block(window: int | None, scale: int):
    """Several steps of the one program that counts, several programs per row, several of tokens."""
    random = np.random.default_rng(1)
    num_rows, num_used, max_pages = 40 * scale, 37 * scale, 20 * scale
    table = random.integers(0, 2**20, (num_rows + 1, max_pages))
    table[0] = 0
    lengths = random.integers(0, 64, num_used)
    lengths[::11] = max_pages * 8 - 3
    numbers = random.permutation(num_rows)[:num_used] + 1
    rows = [
        Row(int(number), int(length), min(int(length), 2))
        for number, length in zip(numbers, lengths, strict=True)
    ]
    group = Pages("one", 8, 2, window, table.tolist(), num_rows * max_pages * 4, target=10)
    found = judge([group], rows, Sizes(num_rows, 80 * scale, num_rows, 80 * scale))
    assert int(found["one.indptr"][-1]) > 150 * scale


def test_a_list_that_fills_up_in_a_later_step_of_the_sum(scale: int):
    num_rows = 40 * scale
    table = np.arange(2 * (num_rows + 1)).reshape(-1, 2)
    rows = [Row(number, 2, 1) for number in range(1, num_rows + 1)]
    for room in (1, 2, 32 * scale, 33 * scale + 1, num_rows * 2):
        group = Pages("one", 1, 1, None, table.tolist(), room)
        found = judge([group], rows, Sizes(num_rows, num_rows, num_rows, num_rows))
        assert int(found["one.indptr"][-1]) == room // 2 * 2


def test_rows_near_2_31_tokens_agree():
    """Sums of lengths and pages do not wrap round: one page of 2^30 tokens and a window as long."""
    for window in (None, 5, 2**30, 2**31):
        group = Pages("one", 2**30, 2**30, window, [[0, 0], [1, 1], [0, 1]], 4, target=7)
        rank = Rank([("one", 1, 2**30, 2**30, window, 4, 7)], 2, 2**31 - 1)
        delta = delta_of(
            1,
            rows=[1],
            lengths=[2**31 - 1],
            counts=[1],
            places=[2, 3],
            page_ids=[1, 1],
            num_groups=1,
            windows=[window],
            targets=[7],
        )
        found = rank.check(delta.packed, 1)
        rank.follow(delta.packed)
        sizes = Sizes(2, 2, 2, 2)
        native = buffers_of([group], sizes)
        rank.fill(delta.packed, 2, 2, [buffer.data_ptr() for buffer in native.values()])
        fused = {name: buffer.to(DEVICE) for name, buffer in buffers_of([group], sizes).items()}
        pages = batch_fused.GroupPages(
            2, 2**30, 2**30, window or 0, 7, *(fused[f"one.{name}"] for name in PER_GROUP)
        )
        batch_fused.fill(
            batch_fused.prepare([pages], torch.device(DEVICE)),
            torch.tensor([0, 0, 1, 1, 0, 0], dtype=torch.int32, device=DEVICE),
            3,
            torch.from_numpy(delta.packed).to(DEVICE),
            found[3:7],
            *(1, 2, 2),
            tuple(fused[name] for name in SHARED),
        )
        for name, buffer in native.items():
            assert fused[name].cpu().tolist() == buffer.tolist(), (name, window)
        assert native["positions"].tolist() == [2**31 - 2, 0]
        assert native["one.slot_mapping"].tolist() == [2**30 + 2**30 - 2, -1]
        assert native["one.begins"].tolist() == [2**30 if window == 5 else 0, 0]
        assert native["one.splits"].tolist()[0] == ([1, -1] if window == 5 else [7, 0])


def test_lists_of_several_groups_and_more_words_than_a_block(scale: int):
    """Each group has its own list in the delta, or none, and its own number of programs."""
    rows = [Row(1, 5000, 1), Row(2, 900, 8), Row(3, 40, 0), Row(4, 3000, 700), Row(5, 1, 1)]
    table = [[0] * 5, *([number] * 5 for number in range(1, 8))]
    groups = [
        Pages(f"of {target}", 1024, 1024, window, table, 35, target)
        for window, target in ((None, 40), (300, 9), (None, 0), (None, 200), (2000, 1))
    ]
    for padded_rows in (5, 7):
        found = judge(groups, rows, Sizes(7, 800, padded_rows, 720))
        assert found["of 40.splits"].tolist()[:2] == [[20, 0], [4, 20]]
        assert found["of 9.splits"].tolist()[0] == [2, 0]
        assert found["of 200.splits"].tolist()[3] == [2, 52]


def test_a_list_for_fewer_programs_than_the_buffers_have():
    """The other programs have nothing to do. 5,000 keys on 4 programs are cut, those on 1 are not."""
    rows = [Row(2, 4000, 1), Row(1, 1000, 2), Row(3, 300, 20)]
    table = [[0] * 4, *([number] * 4 for number in range(1, 5))]
    groups = [
        Pages("four", 1024, 1024, None, table, 16, 9, list_target=4),
        Pages("one", 1024, 1024, 100, table, 16, 600, list_target=1),
    ]
    found = judge(groups, rows, Sizes(4, 30, 4, 24))
    assert found["four.runs"].tolist() == [0, 1, 2, 3, 5, 5, 5, 5, 5, 5]
    assert found["one.runs"].tolist() == [0, *[2] * 600]


def test_a_step_without_rows_has_no_tasks():
    group = Pages("one", 8, 8, None, [[0], [1]], 1, target=3)
    found = judge([group], [], Sizes(1, 4, 1, 2))
    assert found["one.runs"].tolist() == [0] * 4
    assert found["one.tasks"].tolist() == [[0] * 8] * 4


def test_the_comparison_sees_a_wrong_number(monkeypatch: pytest.MonkeyPatch):
    group = Pages("one", 2, 2, None, [[0, 0], [3, 4]], 2)
    rows, sizes = [Row(1, 3, 1)], Sizes(1, 1, 1, 1)
    judge([group], rows, sizes)
    real_fill = batch_fused.fill

    def wrong(prepared: Any, table: torch.Tensor, *rest: Any) -> None:
        real_fill(prepared, table + 1, *rest)

    monkeypatch.setattr(batch_fused, "fill", wrong)
    with pytest.raises(AssertionError, match="slot_mapping"):
        judge([group], rows, sizes)
