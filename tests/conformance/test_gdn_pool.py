"""contracts/pools.md: `GDNPool`."""

from typing import Any

import numpy as np
import pytest
import torch

from conformance.builders import (
    FP8,
    PLAIN,
    bits,
    gdn_pool,
    numbered,
)
from pagoda import ConfigError, UsageError
from pagoda.compat import GDNPool


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_states_have_the_shapes_and_dtypes_of_the_contract(device: str, dtype: torch.dtype) -> None:
    pool = gdn_pool(device, dtype=dtype)
    assert pool.recurrent_state.shape == (2, 3 + 1 + 2, 4, 5, 3)
    assert pool.recurrent_state.dtype == torch.float32
    assert pool.conv_state.shape == (2, 3 + 1 + 2, 7, 3)
    assert pool.conv_state.dtype == dtype
    assert pool.recurrent_state.device.type == pool.conv_state.device.type == device


def test_conv_state_is_bfloat16_and_there_are_no_track_slots_by_default(device: str) -> None:
    pool = GDNPool(3, 2, 4, 3, 5, 7, 4, device=device)
    assert pool.conv_state.dtype == torch.bfloat16
    assert pool.recurrent_state.shape[1] == 4
    assert pool.alloc_track_slot() is None


def test_arguments_of_the_state_pool_are_its_attributes(device: str) -> None:
    pool = gdn_pool(device, dtype=torch.float16)
    found = (pool.max_reqs, pool.num_gdn_layers, pool.num_v_heads, pool.head_k_dim, pool.head_v_dim)
    assert found == (3, 2, 4, 3, 5)
    assert (pool.conv_dim, pool.conv_kernel_size, pool.max_track_slots) == (7, 4, 2)
    assert pool.dtype == torch.float16
    assert torch.device(pool.device).type == device


def test_get_layer_state_gives_the_two_views(device: str) -> None:
    pool = gdn_pool(device)
    for layer in range(2):
        recurrent, conv = pool.get_layer_state(layer)
        assert recurrent.data_ptr() == pool.recurrent_state[layer].data_ptr()
        assert conv.data_ptr() == pool.conv_state[layer].data_ptr()
        assert recurrent.shape == pool.recurrent_state.shape[1:]
        assert conv.shape == pool.conv_state.shape[1:]
        recurrent[2], conv[2] = 5, 6
        assert bool((pool.recurrent_state[layer, 2] == 5).all())
        assert bool((pool.conv_state[layer, 2] == 6).all())


@pytest.mark.parametrize("layer", [-1, 2, 0.0, "0", None])
def test_a_state_layer_that_is_not_there_raises(device: str, layer: Any) -> None:
    with pytest.raises(UsageError):
        gdn_pool(device).get_layer_state(layer)


@pytest.mark.parametrize(
    "rows",
    [[1], [3, 1], 2, [], [2, 2], [5], np.array([1, 4]), torch.tensor([1, 3], dtype=torch.int32)],
    ids=repr,
)
def test_reset_states_zeroes_exactly_these_rows_in_all_layers(device: str, rows: Any) -> None:
    for given in (rows, torch.as_tensor(rows, dtype=torch.int64).to(device)):
        pool = gdn_pool(device)
        recurrent, conv = numbered(pool)
        pool.reset_states(given)
        at = torch.as_tensor(rows, dtype=torch.int64).reshape(-1).to(device)
        recurrent[:, at], conv[:, at] = 0, 0
        assert torch.equal(pool.recurrent_state, recurrent)
        assert torch.equal(pool.conv_state, conv)


@pytest.mark.parametrize("source", range(1, 6))
@pytest.mark.parametrize("target", range(1, 6))
def test_copy_states_copies_between_any_two_rows_in_all_layers(device: str, source: int, target: int) -> None:
    for as_tensor in (False, True):
        pool = gdn_pool(device)
        recurrent, conv = numbered(pool)
        given = [torch.tensor([row], device=device) if as_tensor else row for row in (source, target)]
        pool.copy_states(*given)
        recurrent[:, target], conv[:, target] = recurrent[:, source].clone(), conv[:, source].clone()
        assert torch.equal(pool.recurrent_state, recurrent)
        assert torch.equal(pool.conv_state, conv)


@pytest.mark.parametrize(
    ("source", "target"),
    [(1, 6), (6, 1), (-1, 1), (1, -1), (1.0, 2), (1, "2"), (None, 1), ([1, 2], [3]), (1, 2**40), (1, 2**70)],
)
def test_a_bad_copy_of_states_raises_and_copies_nothing(device: str, source: Any, target: Any) -> None:
    pool = gdn_pool(device)
    before = numbered(pool)
    with pytest.raises(UsageError):
        pool.copy_states(source, target)
    assert torch.equal(pool.recurrent_state, before[0])
    assert torch.equal(pool.conv_state, before[1])
    pool.check()


@pytest.mark.parametrize(
    "rows", [[1, 6], [-1], [1.0], ["1"], None, "1", [2**40], [2**70], torch.tensor([1.0])]
)
def test_a_bad_reset_raises_and_zeroes_nothing(device: str, rows: Any) -> None:
    pool = gdn_pool(device)
    before = numbered(pool)
    with pytest.raises(UsageError):
        pool.reset_states(rows)
    assert torch.equal(pool.recurrent_state, before[0])
    assert torch.equal(pool.conv_state, before[1])
    pool.check()


@pytest.mark.parametrize("dtype", [*PLAIN, torch.float64, *FP8], ids=str)
def test_a_dtype_of_the_convolution_works_or_is_refused_at_once(device: str, dtype: torch.dtype) -> None:
    try:
        pool = gdn_pool(device, dtype=dtype)
    except ConfigError:
        assert dtype not in PLAIN
        return
    pool.recurrent_state.fill_(1)
    pool.conv_state.view(torch.uint8).fill_(0x3C)
    pool.copy_states(1, 4)
    pool.reset_states([1])
    assert not bool(pool.conv_state[:, 1].contiguous().view(torch.uint8).any())
    assert torch.equal(bits(pool.conv_state[:, 4]), bits(pool.conv_state[:, 2]))


def test_track_slots_lie_behind_the_working_rows(device: str) -> None:
    pool = gdn_pool(device)
    assert pool.alloc_track_slot() == 4
    assert pool.alloc_track_slot() == 5
    assert pool.alloc_track_slot() is None
    pool.free_track_slot(4)
    assert pool.alloc_track_slot() == 4
    pool.check()


def test_a_track_slot_holds_a_snapshot_while_the_row_goes_on(device: str) -> None:
    pool = gdn_pool(device)
    recurrent, conv = numbered(pool)
    track = pool.alloc_track_slot()
    pool.copy_states(2, track)
    pool.reset_states([2])
    pool.copy_states(track, 3)
    assert torch.equal(pool.recurrent_state[:, 3], recurrent[:, 2])
    assert torch.equal(pool.conv_state[:, 3], conv[:, 2])


@pytest.mark.parametrize("slot", [0, 1, 3, 5, 6, -1, 2**31, 2**40, 4.0, "4", None])
def test_only_a_held_track_slot_can_be_freed(device: str, slot: Any) -> None:
    pool = gdn_pool(device)
    assert pool.alloc_track_slot() == 4
    with pytest.raises(UsageError):
        pool.free_track_slot(slot)
    assert pool.alloc_track_slot() == 5
    assert pool.alloc_track_slot() is None
    pool.check()


def test_mem_bytes_counts_both_states(device: str) -> None:
    assert gdn_pool(device, dtype=torch.float16).mem_bytes() == 2 * 6 * (4 * 5 * 3 * 4 + 7 * 3 * 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_reqs": -1},
        {"max_reqs": 1.0},
        {"num_gdn_layers": 0},
        {"num_v_heads": 0},
        {"head_k_dim": -3},
        {"head_v_dim": "5"},
        {"conv_dim": 0},
        {"conv_kernel_size": 0},
        {"max_track_slots": -1},
        {"dtype": "bfloat16"},
        {"device": "nowhere"},
    ],
    ids=str,
)
def test_a_state_pool_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        gdn_pool(**({"device": "cpu"} | bad))
