"""A bool is no id, row, slot, token, count or size, and tokens and ids have one dimension."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagoda
from pagoda import _native
from pagoda.errors import ArgumentError, ConfigError
from pagoda.pools import StatePool, TokenPool

NO_NUMBERS = [True, np.True_, torch.tensor(True), np.array(True)]
NO_IDS = [
    [True],
    [1, False],
    (1, np.True_),
    [torch.tensor(True)],
    np.array([True]),
    torch.tensor([True]),
    [[1, 2]],
    np.ones((1, 2), dtype=np.int32),
    torch.ones(2, 1, dtype=torch.int64),
]


def tree() -> pagoda.PrefixTree:
    made = pagoda.PrefixTree()
    made.insert([1, 2], [1, 2])
    return made


def free_list() -> pagoda.FreeList:
    made = pagoda.FreeList(4)
    made.alloc(2)
    return made


TAKE_NUMBERS: list[Callable[[Any], object]] = [
    pagoda.FreeList,
    lambda n: pagoda.FreeList(4, first_id=n),
    lambda n: free_list().alloc(n),
    lambda n: free_list().can_alloc(n),
    lambda n: free_list().is_free(n),
    lambda n: free_list().is_held(n),
    lambda n: free_list().free([1], fence=n),
    lambda n: free_list().pass_fence(n),
    pagoda.PrefixTree,
    lambda n: pagoda.PrefixTree(1, windows=(n,)),
    lambda n: tree().evict(n),
    lambda n: tree().nodes(max_nodes=n),
    lambda n: pagoda.FullAttention(kv_heads=n, k_dim=4, v_dim=4),
    lambda n: pagoda.Layout([pagoda.FullAttention(kv_heads=1, k_dim=4, v_dim=4)], n),
    lambda n: TokenPool(n, 1, 1, (1, 1), (1, 1), torch.float32, "cpu"),
]
TAKE_IDS: list[Callable[[Any], object]] = [
    _native.sum_ids,
    lambda ids: free_list().free(ids),
    lambda ids: free_list().take(ids),
    lambda ids: free_list().require_held(ids),
    lambda ids: free_list().free_slots(ids, 1),
    lambda ids: free_list().grow(ids, [1], [1], 1),
    lambda ids: tree().match(ids),
    lambda ids: tree().match_length(ids),
    lambda ids: tree().insert(ids, [3]),
    lambda ids: tree().insert([3], ids),
    lambda ids: TokenPool(2, 1, 1, (1, 1), (1, 1), torch.float32, "cpu").pack(ids),
    lambda ids: StatePool(2, 1, {}, "cpu").reset(ids),
]


@pytest.mark.parametrize("bad", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("call", range(len(TAKE_NUMBERS)))
def test_a_bool_is_no_number(call: int, bad: Any) -> None:
    with pytest.raises((ArgumentError, ConfigError)):
        TAKE_NUMBERS[call](bad)


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
@pytest.mark.parametrize("call", range(len(TAKE_IDS)))
def test_ids_are_one_run_of_integers(call: int, bad: Any) -> None:
    with pytest.raises(ArgumentError):
        TAKE_IDS[call](bad)


def test_slots_that_are_stored_to_have_any_shape() -> None:
    pool = TokenPool(4, 1, 1, (1, 1), (1, 1), torch.float32, "cpu")
    new = torch.arange(4.0).view(2, 2, 1, 1)
    pool.store(0, [[1, 2], [3, 4]], new, new)
    assert pool.k_buffer[0].flatten().tolist() == [0, 0, 1, 2, 3]
    with pytest.raises(ArgumentError):
        pool.store(0, [[1, 2], [3, True]], new, new)
