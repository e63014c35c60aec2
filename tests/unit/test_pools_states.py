"""States and checkpoints of a rank: deltas move them as plain dictionaries say, or change nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import kernels
from pagoda.errors import ArgumentError, ConfigError, InvariantError, OutOfRangeError
from pagoda.layout import FullAttention, GatedDelta, Kind, Layout, TensorSpec
from pagoda.manager import Delta
from pagoda.pools import CheckpointPool, Pools, StatePool, StateSpec
from profiles import examples
from unit.deltas import delta_of


@dataclass(frozen=True, kw_only=True)
class Rings(Kind):
    """A window with positions, a compressor of which a checkpoint keeps less than it has, and one of which it
    keeps nothing."""

    window: int = 5

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        ring, kept = self.window + 1, self.window - 1
        return (
            TensorSpec("window", (ring, 6), "uint8", kept=kept),
            TensorSpec("positions", (ring,), "int32", -1, kept=kept, holds_positions=True),
            TensorSpec("scores", (4, 2), "float32", float("-inf"), kept=2),
            TensorSpec("input", (3,), "float32", 2.0, kept=0),
        )

    def shard(self, ranks: int) -> Self:
        return self


FULL = FullAttention(kv_heads=1, k_dim=2, v_dim=2, dtype="float32")
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=2, kernel=4)
HYBRID = Layout([[FULL, DELTA], Rings(), [], FULL, DELTA, Rings(window=9)], 4)
MAMBA = Layout([DELTA, DELTA])  # no pages at all
SIZES: dict[str, Any] = {"num_rows": 3, "max_tokens": 40}
CAPACITY = {"full": 5, "checkpoint": 4}
WITHOUT_PAGES = {"checkpoint": 4}


def pools_of(layout: Layout = HYBRID, capacity: dict[str, int] | None = None) -> Pools:
    if capacity is None:
        capacity = CAPACITY if layout.paged_groups else WITHOUT_PAGES
    return Pools(layout, capacity, **SIZES, device="cpu")


def step_of(step: int, layout: Layout = HYBRID, **sections: Any) -> Delta:
    return delta_of(step, copies=(), num_groups=len(layout.paged_groups), **sections)


# ── what is built ───────────────────────────────────────────────────────────────────────────────────


def test_each_layer_has_its_state_and_its_pages():
    pools = pools_of()
    both, rings, paged = pools.layer(0), pools.layer(1), pools.layer(3)
    assert {name: tuple(part.shape) for name, part in both.state.items()} == {
        "conv": (4, 2 * 3 + 2 * 2, 3),
        "recurrent": (4, 2, 3, 2),
    }
    assert both.keys.shape == (24, 1, 2)
    assert list(rings.state) == ["window", "positions", "scores", "input"]
    assert pools.layer(5).state["window"].shape == (4, 10, 6)
    assert paged.state == {}
    assert (paged.group.name, paged.index, both.index) == ("full", 1, 0)
    for missing in ("group", "pool", "index", "keys"):
        with pytest.raises(ArgumentError, match="layer 1 stores no pages"):
            getattr(rings, missing)
    with pytest.raises(ArgumentError, match="layer 2 stores nothing"):
        pools.layer(2)
    assert repr(rings) == "Layer(1: state window, positions, scores, input)"
    assert repr(both) == "Layer(0: group full, index 0, state conv, recurrent)"
    assert repr(paged) == "Layer(3: group full, index 1)"


def test_views_of_layers_are_the_states_of_the_pool():
    pools = pools_of()
    assert pools.states is not None
    pools.layer(4).state["recurrent"][2] = 7
    pools.layer(1).state["window"][3] = 9
    assert pools.states.tensors["recurrent"][1, 2].eq(7).all()
    assert pools.states.tensors["window"][0, 3].eq(9).all()
    assert pools.states.tensors["window-2"].eq(0).all()  # rings of another size


def test_memory_is_what_the_layout_says():
    for layout in (HYBRID, MAMBA):
        pools, group = pools_of(layout), layout.state_group
        assert group is not None
        assert pools.states is not None
        assert pools.checkpoints is not None
        assert pools.states.memory_bytes() == 4 * group.state_bytes
        assert pools.checkpoints.memory_bytes() == 5 * -(-group.checkpoint_bytes // 16) * 16
        assert pools.memory_bytes() == sum(tensor.nbytes for tensor in pools.tensors())
        pools.check()
    without = Pools(Layout([FULL], 4), {"full": 1}, **SIZES, device="cpu")
    assert without.states is None
    assert without.checkpoints is None


def test_a_state_that_has_moved_is_found():
    for move in (
        lambda pools: pools.states.tensors.update(conv=pools.states.tensors["conv"].clone()),
        lambda pools: setattr(pools.checkpoints, "tensor", pools.checkpoints.tensor.clone()),
    ):
        pools = pools_of()
        pools.check()
        move(pools)
        with pytest.raises(InvariantError):
            pools.check()


@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        ({"full": 5}, "give a mapping from each of full, checkpoint to its number of pages or checkpoints"),
        ({"full": 5, "checkpoint": -1}, "capacity of checkpoint"),
        ({"full": 5, "checkpoint": 1, "state": 2}, "3 rows need as many states"),
        ({"full": 5, "checkpoint": 1, "more": 2}, "capacity: give a mapping"),
        ({"checkpoint": 1}, "capacity: give a mapping"),
    ],
)
def test_capacities_that_cannot_be(capacity: dict[str, int], said: str):
    with pytest.raises(ConfigError, match=said):
        pools_of(HYBRID, capacity)


def test_more_states_than_rows_may_be_said_and_no_checkpoints_be_had():
    pools = pools_of(HYBRID, {"full": 5, "state": 7, "checkpoint": 0})
    assert pools.states is not None
    assert pools.states.num_rows == 3
    pools.apply(step_of(1, resets=[1]))
    with pytest.raises(OutOfRangeError, match="there are no checkpoints"):
        pools.apply(step_of(2, saves=([1], [1], [1])))


def test_a_model_without_pages_has_batches_too():
    pools = pools_of(MAMBA)
    delta = step_of(1, MAMBA, rows=[2, 3], lengths=[5, 7], counts=[5, 1], resets=[2])
    pools.apply(delta)
    batch = pools.batch(delta, pad_to=(3, 8))
    assert batch.state_ids.tolist() == [2, 3, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 6, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 5, 6, 6]
    assert pools.tables == {}


# ── deltas, against states that are dictionaries ────────────────────────────────────────────────────


@dataclass
class Row:
    """A request: its length, the values of each part at each position, and parts that are kept whole."""

    length: int = 0
    tokens: dict[tuple[int, str], dict[int, Any]] = field(default_factory=dict)
    whole: dict[tuple[int, str], Any] = field(default_factory=dict)

    def copy(self) -> "Row":
        return Row(self.length, {at: dict(each) for at, each in self.tokens.items()}, dict(self.whole))


class Model:
    """Pools, and what they should hold."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.pools = layout, pools_of(layout)
        assert layout.state_group is not None
        self.parts = {
            (layer, part.name): part
            for layer, parts in zip(layout.state_group.layers, layout.state_group.parts, strict=True)
            for part in parts
        }
        self.rows = {row: Row() for row in range(1, SIZES["num_rows"] + 1)}
        self.checkpoints: dict[int, Row] = {}
        self.random = np.random.default_rng(0)

    def compute(self, row: int, n: int) -> None:
        """A step of n tokens of a row: each writes its cells, and every part that is kept whole."""
        for (layer, name), part in self.parts.items():
            state, at = self.pools.layer(layer).state[name][row], (layer, name)
            if part.kept is None:
                self.rows[row].whole[at] = value = int(self.random.integers(1, 100))
                state.fill_(value)
                continue
            for position in range(self.rows[row].length, self.rows[row].length + n):
                value = position if part.holds_positions else int(self.random.integers(1, 100))
                self.rows[row].tokens.setdefault(at, {})[position] = value
                state[position % part.shape[0]] = value
        self.rows[row].length += n

    def apply(self, **sections: Any) -> None:
        self.pools.apply(step_of(self.pools.step + 1, self.layout, **sections))
        for row, length, checkpoint in zip(*sections.get("saves", ((), (), ())), strict=True):
            assert self.rows[row].length == length
            self.checkpoints[checkpoint] = self.rows[row].copy()
        for row, length, checkpoint in zip(*sections.get("restores", ((), (), ())), strict=True):
            self.rows[row] = self.checkpoints[checkpoint].copy()
            for at, tokens in self.rows[row].tokens.items():
                kept = self.parts[at].kept
                assert kept is not None
                self.rows[row].tokens[at] = {p: v for p, v in tokens.items() if p >= length - kept}
        for row in sections.get("resets", ()):
            self.rows[row] = Row()
        for source, target in zip(*sections.get("state_copies", ((), ())), strict=True):
            self.rows[target] = self.rows[source].copy()

    def compare(self) -> None:
        for row, expected in self.rows.items():
            for (layer, name), part in self.parts.items():
                state = np.full(part.shape, part.initial)
                if part.kept is None:
                    state[...] = expected.whole.get((layer, name), part.initial)
                for position, value in sorted(expected.tokens.get((layer, name), {}).items()):
                    state[position % part.shape[0]] = value
                found = self.pools.layer(layer).state[name][row].float().numpy()
                assert np.array_equal(found, state), (row, layer, name)
        self.pools.check()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 8, 9, 23])
def test_a_row_resumes_where_another_was_saved(length: int):
    model = Model(HYBRID)
    model.compute(1, length)
    model.compute(2, 7)
    model.apply(saves=([1], [length], [3]))
    model.compare()
    model.compute(1, 5)  # the row goes on, the checkpoint does not
    model.apply(restores=([2], [length], [3]))
    model.compare()
    model.compute(2, 9)
    model.apply()
    model.compare()


def test_a_checkpoint_saved_by_a_delta_is_restored_by_it():
    model = Model(HYBRID)
    model.compute(1, 6)
    model.apply(saves=([1], [6], [2]), restores=([3], [6], [2]))
    model.compare()
    model.compute(1, 1)
    model.compute(3, 2)
    model.apply(saves=([1, 3], [7, 8], [2, 1]), restores=([1], [8], [1]))  # over a row that is saved
    model.compare()


def test_a_row_is_saved_before_it_is_reset_and_copied_after_it_was_restored():
    model = Model(HYBRID)
    model.compute(1, 6)
    model.compute(2, 3)
    model.apply(saves=([1], [6], [4]), resets=[1])
    model.compare()
    model.apply(restores=([2], [6], [4]), resets=[1], state_copies=([2], [3]))
    model.compare()
    model.apply(resets=[2], state_copies=([2], [1]))  # the copy of a row that was reset
    model.compare()


@pytest.mark.parametrize("call", ["save_states", "restore_states", "fill_rows", "copy_states", "write_table"])
def test_a_delta_that_was_interrupted_can_be_applied_again(monkeypatch: pytest.MonkeyPatch, call: str):
    pools = pools_of()
    state = pools.layer(0).state["recurrent"]
    for row in (1, 2, 3):
        state[row] = row
    pools.apply(step_of(1, saves=([3], [4], [2])))
    delta = step_of(
        2,
        saves=([1, 2], [4, 4], [1, 3]),
        restores=([1], [4], [2]),
        resets=[2],
        state_copies=([1], [3]),
        places=[10],
        page_ids=[1],
    )
    operation, is_done = getattr(kernels, call), []

    def interrupted(*args: object) -> None:
        operation(*args)
        if not is_done:
            is_done.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(kernels, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pools.apply(delta)
    assert pools.step == 1
    pools.apply(delta)
    assert [int(state[row].unique()) for row in (1, 2, 3)] == [3, 0, 3]
    pools.apply(step_of(3, restores=([1, 2], [4, 4], [1, 3])))
    assert [int(state[row].unique()) for row in (1, 2)] == [1, 2]


def test_one_launch_for_all_rows_and_layers_and_the_pages_after_them(monkeypatch: pytest.MonkeyPatch):
    pools, launched = pools_of(), []
    for name in ("save_states", "restore_states", "fill_rows", "copy_states", "copy_pages", "write_table"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: launched.append(name))
    everything: dict[str, Any] = {
        "saves": ([1, 2], [3, 4], [1, 2]),
        "restores": ([1], [3], [1]),
        "resets": [2],
        "state_copies": ([1], [3]),
        "places": [10],
        "page_ids": [1],
    }
    pools.apply(delta_of(1, copies=[([1], [2])], num_groups=1, **everything))
    assert launched == [
        "save_states", "restore_states", "fill_rows", "copy_states", "copy_pages", "write_table",
    ]  # fmt: skip
    launched.clear()
    pools.apply(step_of(2, resets=[1, 2]))
    assert launched == ["fill_rows"]


@settings(max_examples=examples(40))
@given(data=st.data(), layout=st.sampled_from([HYBRID, MAMBA]))
def test_any_sequence_of_deltas_is_what_dictionaries_say(data: st.DataObject, layout: Layout):
    model = Model(layout)
    everyone = list(model.rows)
    for _ in range(data.draw(st.integers(1, 6))):
        for row in data.draw(st.lists(st.sampled_from(everyone), unique=True)):
            model.compute(row, data.draw(st.integers(1, 7)))
        started = [row for row in everyone if model.rows[row].length]
        saved = data.draw(st.lists(st.sampled_from(started), unique=True)) if started else []
        ids = data.draw(st.permutations(range(1, 5)))[: len(saved)]
        lengths = [model.rows[row].length for row in saved]
        there = {at: row.length for at, row in model.checkpoints.items()} | dict(
            zip(ids, lengths, strict=True)
        )
        order = data.draw(st.permutations(everyone))
        first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(order))] * 2)))
        restored = order[:first] if there else []
        from_ids = [data.draw(st.sampled_from(sorted(there))) for _ in restored]
        resets = order[first:second]
        targets = order[second:]
        sources = [row for row in everyone if row not in targets]
        pairs = [(data.draw(st.sampled_from(sources)), row) for row in targets] if sources else []
        model.apply(
            saves=(saved, lengths, ids),
            restores=(restored, [there[at] for at in from_ids], from_ids),
            resets=resets,
            state_copies=([source for source, _ in pairs], [target for _, target in pairs]),
        )
        model.compare()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"saves": ([4], [1], [1])}, OutOfRangeError, r"save_rows\[0\] = 4 .*rows are 1 to 3"),
    ({"saves": ([1, 0], [1, 1], [1, 2])}, OutOfRangeError, r"save_rows\[1\] = 0 "),
    ({"saves": ([1], [1], [5])}, OutOfRangeError, r"save_ids\[0\] = 5 .*checkpoints are 1 to 4"),
    ({"saves": ([1], [1], [0])}, OutOfRangeError, r"save_ids\[0\] = 0 "),
    ({"saves": ([1], [0], [1])}, ArgumentError, r"save_lengths\[0\] = 0, .* 1 to 40 tokens"),
    ({"saves": ([1], [41], [1])}, ArgumentError, r"save_lengths\[0\] = 41"),
    ({"saves": ([1, 2], [1, 1], [3, 3])}, ArgumentError, "a checkpoint is the target of two saves"),
    ({"restores": ([-1], [1], [1])}, OutOfRangeError, r"restore_rows\[0\] = -1"),
    ({"restores": ([1], [1], [-5])}, OutOfRangeError, r"restore_ids\[0\] = -5"),
    ({"restores": ([1], [-1], [1])}, ArgumentError, r"restore_lengths\[0\] = -1"),
    ({"restores": ([1, 1], [1, 1], [1, 2])}, ArgumentError, "written twice"),
    ({"resets": [4]}, OutOfRangeError, r"reset_rows\[0\] = 4"),
    ({"resets": [1, 2, 1]}, ArgumentError, "written twice"),
    ({"resets": [1], "restores": ([1], [1], [1])}, ArgumentError, "written twice"),
    ({"resets": [1], "state_copies": ([2], [1])}, ArgumentError, "written twice"),
    ({"restores": ([1], [1], [1]), "state_copies": ([2], [1])}, ArgumentError, "written twice"),
    ({"state_copies": ([0], [1])}, OutOfRangeError, r"state_sources\[0\] = 0"),
    ({"state_copies": ([1], [2**31 - 1])}, OutOfRangeError, r"state_targets\[0\] = 2147483647"),
    ({"state_copies": ([1, 2], [2, 1])}, ArgumentError, "row 1 is source and target"),
    ({"state_copies": ([1], [1])}, ArgumentError, "row 1 is source and target"),
]


@pytest.mark.parametrize(("sections", "error", "said"), WRONG)
def test_a_wrong_delta_is_refused_and_changes_nothing(
    sections: dict[str, Any], error: type[Exception], said: str
):
    model = Model(HYBRID)
    for row in (1, 2, 3):
        model.compute(row, row + 3)
    right: dict[str, Any] = {"saves": ([2], [5], [4]), "resets": [3], "places": [10], "page_ids": [1]}
    before = [tensor.clone() for tensor in model.pools.tensors()]
    with pytest.raises(error, match=said):
        model.pools.apply(step_of(1, **{**right, **sections}))
    assert all(torch.equal(*pair) for pair in zip(model.pools.tensors(), before, strict=True))
    assert model.pools.step == 0
    model.apply(**right)
    model.compare()


def test_pools_without_states_refuse_them():
    pools = Pools(Layout([FULL], 4), {"full": 1}, **SIZES, device="cpu")
    for sections in ({"resets": [1]}, {"saves": ([1], [1], [1])}, {"state_copies": ([1], [2])}):
        with pytest.raises(ArgumentError, match="these pools have none"):
            pools.apply(delta_of(1, copies=(), num_groups=1, **sections))
    assert pools.step == 0


# ── checkpoints by hand ─────────────────────────────────────────────────────────────────────────────

PARTS = {
    "ring": StateSpec((4, 3), torch.uint8, 0, kept=3),
    "positions": StateSpec((4,), torch.int32, -1, kept=3, holds_positions=True),
    "sum": StateSpec((), torch.float32),
}


def test_rows_are_saved_and_restored_without_a_manager(device: str):
    states = StatePool(3, 2, PARTS, device)
    checkpoints = CheckpointPool(states, 2)
    assert checkpoints.tensor.shape == (3, -(-2 * (9 + 4) // 16) * 16)
    for layer in (0, 1):
        state = states.layer(layer)
        state["sum"][1] = 5 + layer
        for position in range(6):
            state["ring"][1, position % 4] = 10 * layer + position
            state["positions"][1, position % 4] = position
    checkpoints.save([1], [6], [2])
    states.reset([1])
    checkpoints.restore(3, 6, 2)
    for layer in (0, 1):
        state = states.layer(layer)
        assert state["sum"].tolist() == [0, 0, 0, 5 + layer]
        # Positions 3, 4 and 5 are kept, in cells 3, 0 and 1; cell 2 was not.
        assert state["positions"][3].tolist() == [4, 5, -1, 3]
        assert state["ring"][3, :, 0].tolist() == [10 * layer + 4, 10 * layer + 5, 0, 10 * layer + 3]
    checkpoints.save([], [], [])
    checkpoints.check()


def test_bad_saves_and_restores_change_nothing():
    states = StatePool(3, 1, PARTS, "cpu")
    checkpoints = CheckpointPool(states, 2)
    checkpoints.tensor.fill_(7)
    before = {name: tensor.clone() for name, tensor in states.tensors.items()}
    calls: list[Callable[[], None]] = [
        lambda: checkpoints.save([4], [1], [1]),
        lambda: checkpoints.save([1], [0], [1]),
        lambda: checkpoints.save([1], [1], [3]),
        lambda: checkpoints.save([1, 2], [1, 1], [1]),
        lambda: checkpoints.save([1, 2], [1, 1], [1, 1]),
        lambda: checkpoints.restore([1, 1], [1, 1], [1, 2]),
        lambda: checkpoints.restore([1], [1.5], [1]),  # type: ignore[list-item]
        lambda: checkpoints.restore([-1], [1], [1]),
    ]
    for call in calls:
        with pytest.raises((ArgumentError, OutOfRangeError)):
            call()
    assert checkpoints.tensor.eq(7).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in states.tensors.items())


def test_checkpoint_pools_that_cannot_be():
    states = StatePool(1, 1, PARTS, "cpu")
    for arguments in ((states, -1), (states, 2**31), (states, "2"), (None, 1)):
        with pytest.raises(ConfigError):
            CheckpointPool(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "part",
    [
        StateSpec((3, 2), torch.float32, 0, kept=4),
        StateSpec((), torch.float32, 0, kept=1),
        StateSpec((3,), torch.float32, 0, kept=-1),
        StateSpec((3,), torch.float32, 0, kept=2, holds_positions=True),
        StateSpec((3, 1), torch.int32, 0, kept=2, holds_positions=True),
        StateSpec((3,), torch.int32, 0, holds_positions=True),
    ],
)
def test_parts_of_which_that_cannot_be_kept(part: StateSpec):
    with pytest.raises(ConfigError, match="of a"):
        StatePool(2, 1, {"a": part}, "cpu")


def test_layers_with_other_parts_are_given_one_by_one():
    small, large = StateSpec((2,), torch.float32), StateSpec((5,), torch.float32)
    pool = StatePool(1, 3, [{"a": small}, {"a": large, "b": small}, {"a": small}], "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in pool.tensors.items()} == {
        "a": (2, 2, 2), "a-2": (1, 2, 5), "b": (1, 2, 2),
    }  # fmt: skip
    pool.layer(2)["a"].fill_(3)
    assert pool.tensors["a"][1].eq(3).all()
    assert pool.tensors["a"][0].eq(0).all()
    for parts in ([{"a": small}], [{"a": small}] * 2 + [3], {"a": small}.items()):
        with pytest.raises(ConfigError, match="parts"):
            StatePool(1, 3, parts, "cpu")  # type: ignore[arg-type]
