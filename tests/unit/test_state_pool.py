"""StatePool and DeviceTable."""

import numpy as np
import pytest
import torch

from pagoda import ConfigError, FreeList, StatePool
from pagoda.errors import ArgumentError, InvariantError, OutOfRangeError
from pagoda.kernels import fill_rows
from pagoda.pools import DeviceTable, StateSpec
from pagoda.tables import PageTable

PARTS = {
    "recurrent": StateSpec((2, 3), torch.float32),
    "score": StateSpec((4,), torch.bfloat16, -float("inf")),
}


def pool_of(device: str) -> StatePool:
    return StatePool(5, 2, PARTS, device)


def scramble(pool: StatePool) -> dict[str, torch.Tensor]:
    for tensor in pool.tensors.values():
        tensor.normal_()
    return {name: tensor.clone() for name, tensor in pool.tensors.items()}


def test_every_row_begins_as_after_a_reset(device: str):
    pool = pool_of(device)
    assert {name: tuple(t.shape) for name, t in pool.tensors.items()} == {
        "recurrent": (2, 6, 2, 3),
        "score": (2, 6, 4),
    }
    assert not bool(pool.tensors["recurrent"].any())
    assert bool((pool.tensors["score"] == -float("inf")).all())
    assert pool.memory_bytes() == 2 * 6 * (6 * 4 + 4 * 2)


def test_reset_sets_these_rows_in_all_layers_and_no_other(device: str):
    pool = pool_of(device)
    for rows in (
        [1, 3],
        torch.tensor([1, 3], device=device),
        torch.tensor([1, 3], dtype=torch.int32, device=device),
    ):
        before = scramble(pool)
        pool.reset(rows)
        for name, part in PARTS.items():
            assert bool((pool.tensors[name][:, [1, 3]] == part.initial).all())
            assert torch.equal(pool.tensors[name][:, [0, 2, 4, 5]], before[name][:, [0, 2, 4, 5]])
    pool.reset(4)
    assert not bool(pool.tensors["recurrent"][:, 4].any())


def test_copies_read_before_they_write(device: str):
    pool = pool_of(device)
    before = scramble(pool)
    pool.copy([1, 2, 3], [2, 1, 5])
    for name in PARTS:
        assert torch.equal(pool.tensors[name], before[name][:, [0, 2, 1, 3, 4, 3]])
    pool.copy(torch.tensor([4], device=device), torch.tensor([0], device=device))
    assert torch.equal(pool.tensors["score"][:, 0], before["score"][:, 4])


def test_bad_rows_change_nothing(device: str):
    pool = pool_of(device)
    before = scramble(pool)
    for call in (
        lambda: pool.reset([1, 6]),
        lambda: pool.reset([-1]),
        lambda: pool.reset([1.5]),
        lambda: pool.reset(torch.tensor([1.0], device=device)),
        lambda: pool.copy([1], [6]),
        lambda: pool.copy([-1], [1]),
        lambda: pool.copy([1, 2], [3]),
        lambda: pool.copy([1, 2], [3, 3]),
        lambda: pool.layer(2),
        lambda: pool.layer(-1),
    ):
        with pytest.raises((ArgumentError, OutOfRangeError)):
            call()
    assert all(torch.equal(pool.tensors[name], before[name]) for name in PARTS)


def test_a_single_row_is_reset_like_several(device: str):
    pool = pool_of(device)
    for rows in (3, [3], np.array([3]), torch.tensor([3]), torch.tensor(3, device=device)):
        before = scramble(pool)
        pool.reset(rows)
        for name, part in PARTS.items():
            assert bool((pool.tensors[name][:, 3] == part.initial).all())
            others = [0, 1, 2, 4, 5]
            assert torch.equal(pool.tensors[name][:, others], before[name][:, others])


def test_bytes_are_a_state_too(device: str):
    parts = {"window": StateSpec((4, 7), torch.uint8), "mark": StateSpec((2,), torch.uint8, 255)}
    pool = StatePool(2, 3, parts, device)
    assert pool.memory_bytes() == 3 * 3 * (4 * 7 + 2)
    assert pool.tensors["mark"].unique().tolist() == [255]
    pool.tensors["window"][:, 1] = 9
    pool.copy([1], [2])
    pool.reset([1, 0])
    assert pool.tensors["window"][:, 1].unique().tolist() == [0]
    assert pool.tensors["window"][:, 2].unique().tolist() == [9]
    for initial in (-1, 256, 0.5):
        with pytest.raises(ConfigError, match="initial of window"):
            StatePool(2, 3, {"window": StateSpec((4,), torch.uint8, initial)}, device)


def test_a_snapshot_is_a_copy_of_a_row_in_all_layers(device: str):
    pool = pool_of(device)
    before = scramble(pool)
    kept = pool.snapshot(2)
    assert {name: tuple(t.shape) for name, t in kept.items()} == {"recurrent": (2, 2, 3), "score": (2, 4)}
    scramble(pool)
    assert all(torch.equal(kept[name], before[name][:, 2]) for name in PARTS)
    after = {name: tensor.clone() for name, tensor in pool.tensors.items()}
    pool.restore(5, kept)
    for name in PARTS:
        assert torch.equal(pool.tensors[name][:, 5], before[name][:, 2])
        assert torch.equal(pool.tensors[name][:, :5], after[name][:, :5])
    pool.check()


def test_a_snapshot_into_tensors_of_the_caller(device: str):
    pool = pool_of(device)
    before = scramble(pool)
    # Slices of a larger buffer serve: one for each of many snapshots.
    out = {"recurrent": torch.zeros(2, 4, 2, 3, device=device)[:, 1], "score": torch.zeros(
        2, 4, device=device, dtype=torch.bfloat16)}  # fmt: skip
    kept = pool.snapshot(4, out)
    assert kept["recurrent"].data_ptr() == out["recurrent"].data_ptr()
    assert all(torch.equal(out[name], before[name][:, 4]) for name in PARTS)


def test_snapshots_that_do_not_fit_change_nothing(device: str):
    pool = pool_of(device)
    kept = pool.snapshot(1)
    before = scramble(pool)
    bad = {
        "a part less": {"score": kept["score"]},
        "a part more": {**kept, "more": kept["score"]},
        "another shape": {**kept, "score": kept["score"][:, :3]},
        "another dtype": {**kept, "score": kept["score"].float()},
        "another device": {**kept, "score": kept["score"].to("meta")},
        "no tensor": {**kept, "score": [1]},
        "a sparse one": {**kept, "score": kept["score"].to_sparse()},
        "no parts": 3,
    }
    for states in bad.values():
        with pytest.raises(ArgumentError):
            pool.restore(1, states)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            pool.snapshot(1, states)  # type: ignore[arg-type]
    for row in (6, -1, 2**70, 1.5, "1", None, [1]):
        for call in (lambda row=row: pool.restore(row, kept), lambda row=row: pool.snapshot(row)):
            with pytest.raises((ArgumentError, OutOfRangeError)):
                call()
    with pytest.raises(ArgumentError):
        pool.restore(1, None)  # type: ignore[arg-type]
    assert all(torch.equal(pool.tensors[name], before[name]) for name in PARTS)


def test_a_snapshot_that_needs_gradients_leaves_none_behind(device: str):
    pool = StatePool(2, 1, {"s": StateSpec((3,), torch.float32)}, device)
    pool.restore(1, {"s": torch.ones(1, 3, device=device, requires_grad=True)})
    assert not pool.tensors["s"].requires_grad
    assert pool.tensors["s"][0, 1].tolist() == [1, 1, 1]


def test_buffers_of_the_caller(device: str):
    buffers = {
        "recurrent": torch.ones(2, 6, 2, 3, device=device),
        "score": torch.ones(2, 6, 4, device=device, dtype=torch.bfloat16),
    }
    pool = StatePool(5, 2, PARTS, device, buffers=buffers)
    pool.reset([2])
    assert float(buffers["recurrent"].sum()) == 2 * 5 * 6
    for bad in (
        {"score": buffers["score"]},
        {**buffers, "score": buffers["score"][:, :5]},
        {**buffers, "more": buffers["score"]},
    ):
        with pytest.raises(ConfigError, match="buffers"):
            StatePool(5, 2, PARTS, device, buffers=bad)


@pytest.mark.parametrize(
    "parts",
    [
        None,
        {"a": 3},
        {"a": ((3,), torch.float32, "x")},
        {"a": StateSpec(3, torch.float32)},  # type: ignore[arg-type]
        {"a": StateSpec((-1,), torch.float32)},
        {"a": StateSpec((3,), torch.float8_e5m2)},
        {"a": StateSpec((3,), torch.float16, 1e300)},
        {"a": StateSpec((3,), torch.int32, 1.5)},
        {"a": StateSpec((3,), "float32")},  # type: ignore[arg-type]
    ],
)
def test_parts_that_cannot_be(parts: object):
    with pytest.raises(ConfigError):
        StatePool(5, 2, parts, "cpu")  # type: ignore[arg-type]


def test_positions_are_a_state_too(device: str):
    pool = StatePool(2, 1, {"position": StateSpec((4,), torch.int32, -1)}, device)
    assert pool.tensors["position"].unique().tolist() == [-1]


def test_check_finds_a_state_that_has_moved(device: str):
    pool = pool_of(device)
    pool.check()
    pool.tensors["score"] = pool.tensors["score"].clone()
    with pytest.raises(InvariantError):
        pool.check()


def test_the_device_table_follows_the_host_table(device: str):
    pages, table, copy = FreeList(50), PageTable(4, 6, 4), DeviceTable(4, 6, device)
    random = np.random.default_rng(0)
    address = copy.tensor.data_ptr()
    for _ in range(60):
        row = int(random.integers(1, 5))
        if table.num_tokens(row) > 18:
            pages.free(table.release(row))
        copy.write(*table.grow(pages, [row], [table.num_tokens(row) + int(random.integers(0, 6))]).writes)
        for r in range(1, 5):
            assert copy.tensor[r, : table.num_pages(r)].tolist() == table.pages(r).tolist()
    assert copy.tensor.data_ptr() == address
    assert not bool(copy.tensor[0].any())
    copy.check()


def test_bad_writes_change_nothing(device: str):
    copy = DeviceTable(4, 6, device)
    for entries, values in (
        ([5], [1]),
        ([30], [1]),
        ([-1], [1]),
        ([7, 8], [1]),
        ([7.9], [1]),
        ([7], [2**32 + 7]),
        (["7"], [1]),
    ):
        with pytest.raises((ArgumentError, OutOfRangeError)):
            copy.write(np.array(entries), np.array(values))
    assert not bool(copy.tensor.any())
    copy.write(np.array([], dtype=np.int64), np.array([], dtype=np.int32))


@pytest.mark.parametrize("sizes", [(-1, 5), (2, 0), ("2", 5)])
def test_tables_that_cannot_be(sizes: tuple[int, int]):
    with pytest.raises(ConfigError):
        DeviceTable(*sizes, "cpu")


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_pools_do_not_ask_for_the_default_device(default: str) -> None:
    parts = {"a": StateSpec((3,), torch.float32, -1.0), "b": StateSpec((2,), torch.int64, 2.0**40)}
    with torch.device(default):
        pool = StatePool(2, 2, parts, "cpu")
        for tensor in pool.tensors.values():
            tensor.zero_()
        pool.reset([2])
    for name, part in parts.items():
        assert pool.tensors[name][:, :2].eq(0).all()
        assert pool.tensors[name][:, 2].eq(part.initial).all()


def test_a_row_of_buffers_with_gradients_is_reset(device: str) -> None:
    given = torch.randn(2, 3, 4, device=device, requires_grad=True)
    pool = StatePool(2, 2, {"a": StateSpec((4,), torch.float32, 5.0)}, device, buffers={"a": given})
    before = given.detach().clone()
    pool.reset(1)
    assert given.detach()[:, 1].eq(5).all()
    assert torch.equal(given.detach()[:, [0, 2]], before[:, [0, 2]])
    assert given.requires_grad


def test_a_row_of_one_layer_is_reset_and_no_other(device: str) -> None:
    pool = pool_of(device)
    before = scramble(pool)
    fill_rows(pool.regions(1), 3)
    for name, part in PARTS.items():
        before[name][1, 3] = part.initial
        assert torch.equal(pool.tensors[name], before[name])
    with pytest.raises(ArgumentError, match="layers 0 to 1"):
        pool.regions(2)
