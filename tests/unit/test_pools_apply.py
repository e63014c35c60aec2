"""Pools of a rank: deltas change tables and pages as plain arrays say, on every rank, or change nothing."""

import pickle
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import kernels
from pagoda.errors import ArgumentError, CapacityError, ConfigError, OutOfRangeError
from pagoda.layout import (
    FullAttention,
    LatentAttention,
    Layout,
    WindowAttention,
    latent,
)
from pagoda.manager import Delta, Manager
from pagoda.pools import Batch, Pools, TokenPool
from profiles import examples
from unit import deltas
from unit.deltas import packed_of

FULL = FullAttention(kv_heads=2, k_dim=4, v_dim=6, dtype="float32")
WINDOW = WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=6, dtype="float16")
TWO = Layout([FULL, WINDOW, FULL], {"full": 4, "window": 2})  # tables of 5 and 10 columns at 20 tokens
SIZES: dict[str, Any] = {"num_rows": 3, "max_tokens": 20}
CAPACITY = {"full": 7, "window": 9}


def pools_of(layout: Layout = TWO, capacity: dict[str, int] = CAPACITY, **sizes: int) -> Pools:
    """Pools full of noise, so that what is not written shows."""
    pools = Pools(layout, capacity, **{**SIZES, **sizes}, device="cpu")
    noise = torch.Generator().manual_seed(1)
    for pool in pools.pools.values():
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=noise))
    return pools


def delta_of(
    step: int, places: list[int], page_ids: list[int], copies: list[tuple[list[int], list[int]]], **rows: Any
) -> Delta:
    """A delta put together by hand."""
    return deltas.delta_of(
        step, places=places, page_ids=page_ids, copies=copies, num_groups=len(copies), **rows
    )


def pages_of(pool: TokenPool) -> npt.NDArray[np.uint8]:
    """[pages, bytes] uint8: a copy of what every page holds in all layers."""
    sides = [*pool.k_buffer, *pool.v_buffer]
    return torch.cat([b.view(pool.num_pages + 1, -1).view(torch.uint8) for b in sides], dim=1).numpy()


def content(pools: Pools) -> tuple[bytes, ...]:
    return (pools.flat_table.numpy().tobytes(), *(pages_of(p).tobytes() for p in pools.pools.values()))


def host_tables(pools: Pools) -> dict[str, list[list[int]]]:
    """What the host's own tables say of rows 1 and up, by group: rows at their longest, one by one."""
    found: dict[str, list[list[int]]] = {name: [] for name in pools.pools}
    shapes = {name: pools._buffers.shape(name)[0] for name in pools._buffers.tensors}
    for row in range(1, pools.num_rows + 1):
        arrays = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        length = [pools.max_tokens]
        delta = deltas.delta_of(1, rows=[row], lengths=length, counts=length, num_groups=len(found))
        pools._rank.fill(delta.packed, 1, *length, [array.ctypes.data for array in arrays.values()])
        for name in found:
            found[name].append(
                arrays[f"{name}.page_table"]
                .reshape(-1)
                .view(np.int32)[: pools.tables[name].shape[1]]
                .tolist()
            )
    return found


# ── what is built ───────────────────────────────────────────────────────────────────────────────────


def test_tables_are_views_of_one_tensor_in_the_order_of_the_groups():
    pools = Pools(TWO, CAPACITY, **SIZES, device="cpu")
    assert {name: tuple(table.shape) for name, table in pools.tables.items()} == {
        "full": (4, 5),
        "window": (4, 10),
    }
    pools.flat_table.copy_(torch.arange(60))
    assert pools.tables["full"][1, 0] == 5
    assert pools.tables["window"][0, 0] == 20
    assert pools.tables["window"][3, 9] == 59
    assert pools.flat_table.dtype == torch.int32
    assert (pools["full"].num_pages, pools["window"].page_tokens) == (7, 2)
    pools.check()


def test_memory_is_what_groups_say_and_the_tables():
    pools = Pools(TWO, CAPACITY, **SIZES, device="cpu")
    # With padding pages: 2 layers of 4 tokens of 2 heads of 4 + 6 floats; 1 layer of 2 tokens of 16 halves.
    pages = 8 * (2 * 4 * 2 * 10 * 4) + 10 * (2 * 16 * 2)
    buffers = sum(buffer.nbytes for buffer in pools._buffers.tensors.values())
    assert pools.memory_bytes() == pages + 60 * 4 + buffers
    assert pools.memory_bytes() == sum(tensor.nbytes for tensor in pools.tensors())


def test_pools_made_under_inference_mode_are_written_outside_of_it():
    with torch.inference_mode():
        pools = Pools(TWO, CAPACITY, **SIZES, device="cpu")
    pools.apply(delta_of(1, [5], [3], [([1], [2]), ([], [])]))
    assert pools.tables["full"][1, 0] == 3
    pools.tables["full"].fill_(0)


def test_scales_reach_the_groups_they_name():
    layout = Layout([FullAttention(kv_heads=1, k_dim=2, v_dim=2, dtype="fp8")] * 2, 4)
    pools = Pools(
        layout, {"full": 2}, **SIZES, device="cpu", k_scale={"full": [0.5, 2]}, v_scale={"full": [3, 4]}
    )
    assert (pools["full"].k_scale, pools["full"].v_scale) == ([0.5, 2.0], [3.0, 4.0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "llama"}, "layout: give a Layout"),
        ({"layout": Layout([[]])}, "has no groups"),
        (
            {"capacity": {"full": 7}},
            "capacity: give a mapping from each of full, window to its number of pages",
        ),
        ({"capacity": {**CAPACITY, "more": 1}}, "capacity: give a mapping"),
        ({"capacity": {**CAPACITY, "state": 3}}, "capacity: give a mapping"),
        ({"capacity": {**CAPACITY, "checkpoint": 3}}, "capacity: give a mapping"),
        ({"capacity": 5}, "capacity: give a mapping"),
        ({"capacity": {**CAPACITY, "full": -1}}, "capacity of full"),
        ({"num_rows": 0}, "num_rows"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_rows": 2**24, "max_tokens": 2**12}, "exceed 2\\^31"),
        ({"device": "abacus"}, "device"),
        ({"k_scale": {"other": [1.0]}}, "k_scale: give a mapping by group: full, window"),
        ({"v_scale": {"full": [1.0, 1.0]}}, "only fp8 pools have scales"),
        ({"staging": 3}, "staging"),
    ],
)
def test_what_cannot_be_built_says_why(change: dict[str, Any], said: str):
    arguments = {"layout": TWO, "capacity": CAPACITY, "device": "cpu", **SIZES, **change}
    with pytest.raises(ConfigError, match=said):
        Pools(arguments.pop("layout"), arguments.pop("capacity"), **arguments)


def test_a_group_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ArgumentError, match="no group 'state': the groups are full, window"):
        pools_of()["state"]


# ── deltas, put together by hand ────────────────────────────────────────────────────────────────────


def test_writes_reach_the_group_they_are_meant_for():
    pools = pools_of()
    # Row 2, page 1 of "full" (5 columns); row 3, page 9 of "window", which begins at 20 (10 columns).
    pools.apply(delta_of(1, [2 * 5 + 1, 20 + 3 * 10 + 9], [7, 9], [([], []), ([], [])]))
    expected = np.zeros(60, dtype=np.int32)
    expected[[11, 59]] = [7, 9]
    assert np.array_equal(pools.flat_table.numpy(), expected)
    assert (pools.tables["full"][2, 1], pools.tables["window"][3, 9]) == (7, 9)
    assert pools.step == 1


def test_all_sources_are_read_before_a_target_is_written():
    pools = pools_of()
    before = pages_of(pools["full"])
    other = pages_of(pools["window"])
    pools.apply(delta_of(1, [], [], [([1, 2, 3], [2, 3, 1]), ([], [])]))
    expected = before.copy()
    expected[[2, 3, 1]] = before[[1, 2, 3]]
    assert np.array_equal(pages_of(pools["full"]), expected)
    assert np.array_equal(pages_of(pools["window"]), other)


def test_one_launch_copies_pages_only_where_no_source_is_a_target(monkeypatch: pytest.MonkeyPatch):
    # On a device its reads and writes have no order; on a CPU nothing would show.
    pools, launched = pools_of(), []
    for name in ("copy_pages", "pack", "unpack", "write_table"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: launched.append(name))
    pools.apply(delta_of(1, [5], [1], [([1, 1], [2, 3]), ([4], [5])]))
    assert launched == ["copy_pages", "copy_pages", "write_table"]
    launched.clear()
    pools.apply(delta_of(2, [], [], [([1, 2], [2, 3]), ([4], [5])]))
    assert launched == ["pack", "unpack", "copy_pages"]
    launched.clear()
    pools.apply(delta_of(3, [], [], [([], []), ([], [])]))
    assert launched == []


@st.composite
def some_deltas(draw: st.DrawFn, step: int) -> Delta:
    """Any delta that the pools of TWO can carry out."""
    index, page_ids = [], []
    for offset, columns, num_pages in ((0, 5, 7), (20, 10, 9)):
        places = draw(st.lists(st.integers(columns, 4 * columns - 1), unique=True, max_size=8))
        index += [offset + place for place in places]
        page_ids += [draw(st.integers(0, num_pages)) for _ in places]
    copies = []
    for num_pages in (7, 9):
        targets = draw(st.lists(st.integers(1, num_pages), unique=True, max_size=4))
        copies.append(([draw(st.integers(1, num_pages)) for _ in targets], targets))
    return delta_of(step, index, page_ids, copies)


@settings(max_examples=examples(80))
@given(data=st.data())
def test_any_sequence_of_deltas_is_what_plain_arrays_say(data: st.DataObject):
    pools = pools_of()
    table = np.zeros(60, dtype=np.int32)
    pages = [pages_of(pool) for pool in pools.pools.values()]
    for step in range(1, data.draw(st.integers(1, 4)) + 1):
        delta = data.draw(some_deltas(step))
        pools.apply(pickle.loads(pickle.dumps(delta)))
        table[delta.places] = delta.page_ids
        for content_of, (sources, targets) in zip(pages, delta.copies, strict=True):
            content_of[targets] = content_of[sources]  # numpy gathers first
        assert np.array_equal(pools.flat_table.numpy(), table)
        for pool, expected in zip(pools.pools.values(), pages, strict=True):
            assert np.array_equal(pages_of(pool), expected)
        assert pools.step == step
    pools.check()


NONE: list[tuple[list[int], list[int]]] = [([], []), ([], [])]


def step_of(**rows: Any) -> Delta:
    """A delta with writes that are right, and rows that are not."""
    return delta_of(1, [5], [1], NONE, **rows)


WRONG = [
    # Places: before the tables, in the padding row of each group, behind the tables.
    (delta_of(1, [5, -1], [1, 1], NONE), OutOfRangeError, r"places\[1\] = -1"),
    (delta_of(1, [5, 4], [1, 1], NONE), OutOfRangeError, r"places\[1\] = 4 .*row 0 is padding"),
    (delta_of(1, [0], [0], NONE), OutOfRangeError, r"places\[0\] = 0 "),
    (delta_of(1, [20], [1], NONE), OutOfRangeError, r"places\[0\] = 20 "),
    (delta_of(1, [29], [1], NONE), OutOfRangeError, r"places\[0\] = 29 "),
    (delta_of(1, [5, 60], [1, 1], NONE), OutOfRangeError, r"places\[1\] = 60 .*60 places"),
    (delta_of(1, [2**31 - 1], [1], NONE), OutOfRangeError, "2147483647"),
    # Pages: each group has its own number of them.
    (delta_of(1, [5, 30], [8, 9], NONE), OutOfRangeError, r"page_ids\[0\] = 8 .*group full are 1 to 7"),
    (delta_of(1, [5, 30], [7, 10], NONE), OutOfRangeError, r"page_ids\[1\] = 10 .*group window are 1 to 9"),
    (delta_of(1, [5], [-1], NONE), OutOfRangeError, r"page_ids\[0\] = -1"),
    (delta_of(1, [5], [-(2**31)], NONE), OutOfRangeError, "-2147483648"),
    # Copies, with writes before them that are right.
    (delta_of(1, [5], [1], [([1], [8]), ([], [])]), OutOfRangeError, "targets of group full.* = 8"),
    (delta_of(1, [5], [1], [([8], [1]), ([], [])]), OutOfRangeError, "sources of group full.* = 8"),
    (delta_of(1, [5], [1], [([1], [0]), ([], [])]), OutOfRangeError, "targets of group full.* = 0"),
    (delta_of(1, [5], [1], [([0], [1]), ([], [])]), OutOfRangeError, "sources of group full.* = 0"),
    (delta_of(1, [5], [1], [([1], [2]), ([3, 4], [5, 10])]), OutOfRangeError, r"group window\[1\] = 10"),
    (delta_of(1, [5], [1], [([-1], [2]), ([], [])]), OutOfRangeError, "= -1"),
    (
        delta_of(1, [5], [1], [([1, 2], [3, 3]), ([], [])]),
        ArgumentError,
        "a page of group full is the target of two copies",
    ),
    # Deltas of somebody else.
    (
        delta_of(1, [5], [1], [([], [])]),
        ArgumentError,
        "it has 1 groups, but these pools have 2: full, window",
    ),
    (delta_of(1, [5], [1], [*NONE, ([], [])]), ArgumentError, "it has 3 groups"),
    (delta_of(0, [5], [1], NONE), ArgumentError, "of step 0, .* the next one is step 1"),
    (delta_of(2, [5], [1], NONE), ArgumentError, "of step 2, .* the next one is step 1"),
    (np.array([1, 0, 0, 0]), ArgumentError, "give what Manager.plan returned, not ndarray"),
    (None, ArgumentError, "not NoneType"),
    # Rows of the step: numbers, lengths, counts and where they begin.
    (step_of(rows=[1, 4], lengths=[1, 1], counts=[1, 1]), OutOfRangeError, r"rows\[1\] = 4 .*1 to 3"),
    (step_of(rows=[0], lengths=[1], counts=[1]), OutOfRangeError, r"rows\[0\] = 0 "),
    (step_of(rows=[-1], lengths=[1], counts=[1]), OutOfRangeError, r"rows\[0\] = -1 "),
    (step_of(rows=[1], lengths=[21], counts=[1]), ArgumentError, "1 of 21 tokens, .* at most 20"),
    (step_of(rows=[1], lengths=[3], counts=[4]), ArgumentError, "4 of 3 tokens"),
    (step_of(rows=[1], lengths=[3], counts=[-1]), ArgumentError, "-1 of 3 tokens"),
    (step_of(rows=[1], lengths=[-1], counts=[-1], starts=[0, -1]), ArgumentError, "-1 of -1 tokens"),
    (step_of(rows=[1, 2], lengths=[3, 3], counts=[1, 2], starts=[0, 1, 2]), ArgumentError, "sums of counts"),
    (step_of(rows=[1, 2], lengths=[3, 3], counts=[1, 2], starts=[1, 2, 4]), ArgumentError, "sums of counts"),
]


@pytest.mark.parametrize(("delta", "error", "said"), WRONG)
def test_a_wrong_delta_is_refused_and_changes_nothing(delta: Any, error: type[Exception], said: str):
    pools = pools_of()
    before, mirror = content(pools), host_tables(pools)
    with pytest.raises(error, match=said):
        pools.apply(delta)
    assert content(pools) == before
    assert host_tables(pools) == mirror
    assert pools.step == 0
    with pytest.raises(ArgumentError, match="none was applied yet"):
        pools.batch(delta)
    pools.apply(delta_of(1, [5], [1], [([1], [2]), ([3], [4])]))  # and the right one still goes
    assert content(pools) != before
    assert host_tables(pools) != mirror


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_delta_with_one_wrong_number_changes_nothing(data: st.DataObject):
    delta = data.draw(some_deltas(1).filter(lambda delta: delta.places.size > 0))
    parts = [delta.places, delta.page_ids, *(ids for pair in delta.copies for ids in pair)]
    part = data.draw(st.sampled_from([part for part in parts if part.size]))
    part[data.draw(st.integers(0, part.size - 1))] = data.draw(
        st.sampled_from([-(2**31), -1, 60, 1000, 2**31 - 1])
    )
    pools = pools_of()
    before = content(pools)
    with pytest.raises(OutOfRangeError):
        pools.apply(delta)
    assert content(pools) == before


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, 1, "do not start with the format word"),
        (1, -1, "a negative number"),
        (3, -2, "a negative number"),
        (4, -1, "the directory is truncated"),
        (4, 100, "the directory is truncated"),
        (4, 1, "belong together differ in size"),
        (6, 7, "a section belongs to no group"),
        (6, -1, "a section belongs to no group"),
        (7, 3, "a section is truncated"),
        (7, 1000, "a section is truncated"),
        (8, -1, "a section is truncated"),
        (8, 2**31 - 1, "a section is truncated"),
        (8, 2, "belong together differ in size"),
    ],
)
def test_a_delta_whose_head_was_changed_is_refused(at: int, value: int, said: str):
    # The head: format, step, 0, groups, sections; then kind, group, begin and size of "places".
    pools, delta = pools_of(), delta_of(1, [5], [1], NONE)
    before = content(pools)
    delta.packed[at] = value
    with pytest.raises(ArgumentError, match=said):
        pools.apply(delta)
    assert content(pools) == before
    with pytest.raises(ArgumentError, match=said):
        Delta(delta.packed)


def test_sections_of_an_unknown_kind_are_passed_over():
    packed = packed_of(1, 2, [(99, 0, [1, 2, 3]), (14, 0, [5]), (98, 1, [4]), (15, 0, [3])])
    pools = pools_of()
    pools.apply(Delta(packed))
    assert pools.tables["full"][1, 0] == 3


def test_a_step_beyond_2_31_is_written_in_two_halves():
    pools = pools_of()
    pools.reset(2**33)
    delta = delta_of(2**33 + 1, [5], [3], NONE)
    assert delta.step == 2**33 + 1
    pools.apply(delta)
    assert pools.step == 2**33 + 1


def test_steps_follow_each_other():
    pools = pools_of()
    for step in (1, 2, 3):
        pools.apply(delta_of(step, [5], [step], NONE))
    before = content(pools)
    for wrong in (3, 1, 5):  # repeated, long ago, one left out
        with pytest.raises(ArgumentError, match=f"of step {wrong}, but the next one is step 4"):
            pools.apply(delta_of(wrong, [5], [7], NONE))
    assert content(pools) == before
    pools.apply(delta_of(4, [], [], NONE))
    assert (pools.step, content(pools)) == (4, before)


def test_after_a_reset_of_the_manager_steps_begin_again():
    manager, pools = Manager(TWO, CAPACITY, **SIZES), pools_of()
    for _ in range(2):
        manager.admit(range(6))
        pools.apply(manager.plan())
        manager.pass_fence(manager.step - 1)
        manager.reset()
        pools.reset()
    assert pools.step == 0
    row = manager.admit(range(5)).row
    pools.apply(manager.plan())
    assert pools.tables["full"][row, :2].tolist() == manager.page_ids(row, "full").tolist()


def test_a_cpu_has_no_streams():
    pools = pools_of()
    with pytest.raises(ArgumentError, match="stream: give None on a CPU"):
        pools.apply(delta_of(1, [5], [1], NONE), stream=0)  # type: ignore[arg-type]
    assert pools.step == 0


# ── page copies of one pool ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("source", "target"), [([1, 2], [3, 4]), ([1, 2, 1], [2, 1, 5]), ([], []), ([0], [7])]
)
def test_pages_are_copied_in_all_layers(kind: Any, source: list[int], target: list[int]):
    pool = pools_of()["full"]
    before = pages_of(pool)
    pool.copy_pages(kind(source), kind(target))
    expected = before.copy()
    expected[target] = before[source]
    assert np.array_equal(pages_of(pool), expected)


@pytest.mark.parametrize(
    ("source", "target", "error", "said"),
    [
        ([1], [8], OutOfRangeError, r"target\[0\] = 8 .*0 to 7"),
        ([1, -1], [2, 3], OutOfRangeError, r"source\[1\] = -1"),
        ([1, 2], [3], ArgumentError, "source has 2 pages and target 1"),
        ([1, 2], [3, 3], ArgumentError, "target has a duplicate"),
        ([1.0], [2], ArgumentError, "source: give integer ids"),
    ],
)
def test_wrong_page_copies_change_nothing(source: Any, target: Any, error: type[Exception], said: str):
    pool = pools_of()["full"]
    before = pages_of(pool)
    with pytest.raises(error, match=said):
        pool.copy_pages(source, target)
    assert np.array_equal(pages_of(pool), before)


# ── a manager and its ranks ─────────────────────────────────────────────────────────────────────────

KINDS = {
    "eight heads": Layout([FullAttention(kv_heads=8, k_dim=4, v_dim=2, dtype="float32")] * 2, 4),
    "two heads": Layout([FullAttention(kv_heads=2, k_dim=4, v_dim=2, dtype="float32")] * 2, 4),
    "latent": Layout([LatentAttention(entry=latent(6, 2, "float32"))] * 2, 4),
    "full and window": Layout(
        [
            FullAttention(kv_heads=8, k_dim=4, v_dim=2, dtype="float32"),
            WindowAttention(kv_heads=2, k_dim=4, v_dim=2, window=9, dtype="float32"),
            FullAttention(kv_heads=8, k_dim=4, v_dim=2, dtype="float32"),
        ],
        {"full": 8, "window": 4},
    ),
}


def computed(
    layer: int, tokens: list[int], begin: int, heads: int, dim: int, side: int
) -> torch.Tensor:  # [tokens, heads, dim] float32
    """What a model would compute for tokens[begin:]: an own number for each token, place, layer and head."""
    position = torch.arange(begin, len(tokens))[:, None, None]
    token = torch.tensor(tokens[begin:])[:, None, None]
    head, column = torch.arange(heads)[None, :, None], torch.arange(dim)[None, None, :]
    return (((token * 64 + position) * 4 + layer) * 8 + head) * 16 + column * 2 + side + 0.0


class Cluster:
    """Ranks that follow one manager, and the tokens that every row stands for."""

    def __init__(self, layout: Layout, ranks: int, capacity: dict[str, int], num_rows: int, max_tokens: int):
        sizes: dict[str, Any] = {"num_rows": num_rows, "max_tokens": max_tokens}
        self.layout, self.num_ranks = layout, ranks
        self.manager = Manager(layout, capacity, **sizes)
        self.ranks = [
            Pools(layout.shard(ranks), capacity, **sizes, device="cpu", max_step_tokens=num_rows * max_tokens)
            for _ in range(ranks)
        ]
        self.tokens: dict[int, list[int]] = {}  # of each running row, reserved ones included
        self.num_pages_compared = 0

    def heads_of(self, rank: int, group: Any) -> tuple[int, slice]:
        """Heads of the whole model, and which of them a rank has."""
        (entry, *_), (part, *_) = group.storage.entries, group.storage.entries[0].parts
        if entry.name == "latent":  # all heads share it
            return 1, slice(0, 1)
        heads = part.shape[0]
        if heads >= self.num_ranks:
            each = heads // self.num_ranks
            return heads, slice(rank * each, (rank + 1) * each)
        one = rank * heads // self.num_ranks
        return heads, slice(one, one + 1)

    def step(self) -> None:
        """Plan what is reserved, apply it everywhere, as other processes get it, compute and commit it."""
        rows = [
            row for row, tokens in sorted(self.tokens.items()) if self.manager.computed(row) < len(tokens)
        ]
        begins = [self.manager.computed(row) for row in rows]
        counts = [len(self.tokens[row]) - begin for row, begin in zip(rows, begins, strict=True)]
        sent = pickle.dumps(self.manager.plan(rows, counts))
        for rank, pools in enumerate(self.ranks):
            delta = pickle.loads(sent)
            pools.apply(delta)
            self.compute(rank, pools, pools.batch(delta), rows, begins)
        for row, begin in zip(rows, begins, strict=True):
            self.manager.commit(row, self.tokens[row][begin:])

    def compute(self, rank: int, pools: Pools, batch: Batch, rows: list[int], begins: list[int]) -> None:
        assert batch.rows.tolist() == rows
        if not rows:
            return
        for group in self.layout.paged_groups:
            assert bool((batch[group.name].slot_mapping > 0).all())
            heads, mine = self.heads_of(rank, group)
            for number in group.layers:
                layer = pools.layer(number)

                sides = []
                for side, buffer in enumerate((layer.keys, layer.values)):
                    if buffer is not None:
                        parts = [
                            computed(number, self.tokens[row], begin, heads, buffer.shape[2], side)[:, mine]
                            for row, begin in zip(rows, begins, strict=True)
                        ]
                        sides.append(torch.cat(parts))
                layer.store(batch, *sides)

    def compare(self) -> None:
        """Every page that a row can still read holds, on every rank, its part of what was computed."""
        for row, tokens in self.tokens.items():
            for group in self.layout.paged_groups:
                size = group.page_tokens
                first = self.manager.first_pages(row, group.name)
                planned = self.manager.page_ids(row, group.name)
                for rank, pools in enumerate(self.ranks):
                    table = pools.tables[group.name][row][: len(planned)]
                    assert table[first:].tolist() == planned[first:].tolist()
                    position = torch.arange(first * size, len(tokens))
                    slots = table[position // size].long() * size + position % size
                    heads, mine = self.heads_of(rank, group)
                    sides = [pools[group.name].k_buffer, pools[group.name].v_buffer]
                    for side, buffers in enumerate(sides):
                        for layer, buffer in zip(group.layers, buffers, strict=bool(buffers)):
                            want = computed(layer, tokens, first * size, heads, buffer.shape[2], side)[
                                :, mine
                            ]
                            assert torch.equal(buffer[slots], want), (row, group.name, rank, layer, side)
                    self.num_pages_compared += len(planned) - first


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_every_rank_holds_its_heads_of_what_was_computed(name: str, ranks: int, seed: int):
    chance = random.Random(seed)
    layout = KINDS[name]
    capacity = {group.name: 40 if group.page_tokens == 4 else 24 for group in layout.paged_groups}
    cluster = Cluster(layout, ranks, capacity, num_rows=5, max_tokens=40)
    manager, tokens = cluster.manager, cluster.tokens
    num_hits = num_copies = 0
    prompts = [[chance.randrange(3) for _ in range(30)] for _ in range(2)]  # whose beginnings are shared
    for _ in range(60):
        rows = sorted(tokens)
        what = chance.choice(["admit", "admit", "grow", "grow", "grow", "fork", "release"])
        if what == "admit":
            prompt = [*chance.choice(prompts)[: chance.randrange(1, 25)], chance.randrange(3)]
            if manager.stats().rows + manager.stats().waiting_rows < 5 and manager.can_admit(prompt):
                admitted = manager.admit(prompt)
                tokens[admitted.row] = prompt
                num_hits += admitted.hit > 0
        elif what == "grow" and rows:
            row, n = chance.choice(rows), chance.randrange(1, 6)
            if len(tokens[row]) + n <= 40 and manager.can_reserve([row], n):
                manager.reserve([row], n)
                tokens[row] = tokens[row] + [chance.randrange(3) for _ in range(n)]
        elif what == "fork" and rows:
            row = chance.choice(rows)
            try:
                child = manager.fork(row)
            except CapacityError:
                continue
            length = manager.committed(row)
            num_copies += any(length % group.page_tokens for group in layout.paged_groups)
            tokens[child] = tokens[row][:length]
            # What the child continues with is its own, in the same step.
            if length + 2 <= 40 and manager.can_reserve([child], 2):
                manager.reserve([child], 2)
                tokens[child] = [*tokens[child], chance.randrange(3), chance.randrange(3)]
            cluster.step()
        elif what == "release" and rows:
            row = chance.choice(rows)
            manager.release([row])
            del tokens[row]
        if chance.random() < 0.6:
            cluster.step()
            if chance.random() < 0.7:
                manager.pass_fence(manager.step - 1 - chance.randrange(2) if manager.step > 2 else 0)
            cluster.compare()
    manager.check()
    for pools in cluster.ranks:
        pools.check()
        assert torch.equal(pools.flat_table, cluster.ranks[0].flat_table)
    assert num_hits > 0
    assert num_copies > 0
    assert cluster.num_pages_compared > 100


def test_a_comparison_of_ranks_sees_one_wrong_number():
    cluster = Cluster(KINDS["eight heads"], 2, {"full": 8}, num_rows=2, max_tokens=16)
    row = cluster.manager.admit([1, 2, 3, 4, 5]).row
    cluster.tokens[row] = [1, 2, 3, 4, 5]
    cluster.step()
    cluster.compare()
    slot = int(cluster.ranks[1].tables["full"][row, 1]) * 4
    cluster.ranks[1]["full"].v_buffer[1][slot, 3, 1] += 1
    with pytest.raises(AssertionError, match="full"):
        cluster.compare()


def test_ranks_have_different_heads_and_the_same_tables():
    cluster = Cluster(KINDS["two heads"], 4, {"full": 8}, num_rows=2, max_tokens=16)
    row = cluster.manager.admit([1, 2, 3]).row
    cluster.tokens[row] = [1, 2, 3]
    cluster.step()
    one, same, other, _ = (pools["full"].k_buffer[0] for pools in cluster.ranks)
    assert one.shape[1] == 1
    assert torch.equal(one, same)  # two heads on four ranks: each stands on two of them
    assert not torch.equal(one, other)


def test_a_continuation_of_a_continuation_of_the_same_step_holds_its_tokens():
    cluster = Cluster(KINDS["eight heads"], 2, {"full": 8}, num_rows=3, max_tokens=16)
    first = cluster.manager.admit([1, 2, 3]).row
    cluster.tokens[first] = [1, 2, 3]
    cluster.step()
    second = cluster.manager.fork(first)
    third = cluster.manager.fork(second)
    cluster.tokens |= {second: [1, 2, 3], third: [1, 2, 3]}
    cluster.step()
    cluster.compare()
