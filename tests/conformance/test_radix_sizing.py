"""contracts/radix.md: sizing, the page table, and where two tensors part."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from pagoda import ConfigError
from pagoda.compat import (
    create_page_table,
    find_first_diff_pos,
    get_mha_cache_per_page,
    get_num_pages_for_kv_cache,
)
from pagoda.errors import ArgumentError


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (
            get_mha_cache_per_page,
            "head_dim, num_kv_heads, num_layers, page_size=1, tp_size=1, dtype_size=2",
        ),
        (get_num_pages_for_kv_cache, "available_memory, cache_per_page"),
        (create_page_table, "max_running_req, max_seq_len"),
        (find_first_diff_pos, "tensor1, tensor2"),
    ],
)
def test_argument_names_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)).startswith(wanted)


def test_the_sizes_of_the_contract() -> None:
    per_page = get_mha_cache_per_page(256, 8, 1)
    assert per_page == 8_192
    assert get_num_pages_for_kv_cache(4 * 1024**3, per_page) == 524_288
    assert get_num_pages_for_kv_cache(2_000 * 1024, per_page) == 250


def test_every_factor_counts() -> None:
    whole = get_mha_cache_per_page(
        head_dim=64, num_kv_heads=8, num_layers=3, page_size=16, tp_size=4, dtype_size=1
    )
    assert whole == 2 * 8 * 64 * 3 * 16 // 4 * 1
    assert get_mha_cache_per_page(128, 8, 32, page_size=16) == 16 * get_mha_cache_per_page(128, 8, 32)
    assert get_mha_cache_per_page(128, 8, 32, tp_size=8) * 8 == get_mha_cache_per_page(128, 8, 32)


def test_only_whole_pages_fit() -> None:
    assert get_num_pages_for_kv_cache(8_191, 8_192) == 0
    assert get_num_pages_for_kv_cache(0, 8_192) == 0
    assert get_num_pages_for_kv_cache(2 * 8_192 - 1, 8_192) == 1


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, "8"], ids=str)
@pytest.mark.parametrize(
    "name", ["head_dim", "num_kv_heads", "num_layers", "page_size", "tp_size", "dtype_size"]
)
def test_sizes_that_are_none_are_refused_by_name(name: str, bad: Any) -> None:
    arguments = {"head_dim": 8, "num_kv_heads": 8, "num_layers": 1, name: bad}
    with pytest.raises(ConfigError, match=name):
        get_mha_cache_per_page(**arguments)


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(8, 3), (2, 4)])
def test_a_rank_holds_whole_heads(num_kv_heads: int, tp_size: int) -> None:
    with pytest.raises(ConfigError, match="tp_size"):
        get_mha_cache_per_page(128, num_kv_heads, 1, tp_size=tp_size)


@pytest.mark.parametrize(("memory", "per_page"), [(-1, 8), (1.5, 8), (8, 0), (8, -1), (8, None), ("8", 8)])
def test_memory_that_is_none_is_refused(memory: Any, per_page: Any) -> None:
    with pytest.raises(ConfigError):
        get_num_pages_for_kv_cache(memory, per_page)


def test_a_page_table_is_int32_zeros(device: str) -> None:
    assert create_page_table(3, 5).device.type == "cpu"
    table = create_page_table(3, 5, device)
    assert (table.shape, table.dtype, table.device.type) == ((3, 5), torch.int32, device)
    assert not table.any()
    table[2, 4] = 7
    assert int(create_page_table(3, 5, device).sum()) == 0  # each is its own


@pytest.mark.parametrize(("rows", "length"), [(-1, 5), (3, -1), (1.5, 5), (3, None), (2**40, 2**40)])
def test_a_page_table_that_cannot_be_is_refused(rows: Any, length: Any) -> None:
    with pytest.raises(ConfigError):
        create_page_table(rows, length)


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3, 4], 2),
        ([1, 5], [1, 2, 3, 4], 1),
        ([], [1, 2], 0),
        ([1, 2], [], 0),
        ([], [], 0),
        ([1, 9, 9], [1, 8, 8], 1),  # the first of several
        ([-1, 0], [-1, 1], 1),
    ],
)
def test_the_first_difference_or_the_shorter_length(
    device: str, left: list[int], right: list[int], wanted: int
) -> None:
    forms = [
        list,
        np.array,
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: torch.tensor(ids, dtype=torch.int64, device=device),
    ]
    for one in forms:
        for other in forms:
            found = find_first_diff_pos(one(left), other(right))
            assert found == wanted
            assert type(found) is int


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int64,
        torch.float32,
        torch.bfloat16,
        torch.complex64,
    ],
    ids=str,
)
def test_tensors_of_any_dtype_are_compared(device: str, dtype: torch.dtype) -> None:
    left = torch.tensor([1, 0, 1, 1], dtype=dtype, device=device)
    for position in range(4):
        right = left.clone()
        right[position] = 1 - int(left[position].real)
        assert find_first_diff_pos(left, right) == position
        assert find_first_diff_pos(left[:position], right) == position
    assert find_first_diff_pos(left, left.clone()) == 4


def test_fractions_are_not_cut_off() -> None:
    assert find_first_diff_pos(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 1.25])) == 1
    assert find_first_diff_pos([0.5, 1.5], np.array([0.5, 1.25])) == 1
    assert find_first_diff_pos(torch.ones(2, requires_grad=True), torch.ones(2)) == 2


def test_integers_of_any_width_are_one_kind() -> None:
    widths = (torch.uint8, torch.int16, torch.int32, torch.int64)
    for one in widths:
        for other in widths:
            assert (
                find_first_diff_pos(torch.tensor([1, 2], dtype=one), torch.tensor([1, 3], dtype=other)) == 1
            )


@pytest.mark.parametrize(
    "bad",
    [
        3,
        None,
        [1.5],
        "12",
        [True, False],
        [[1, 2]],
        [[1], [2]],
        [[1], [2, 3]],
        torch.tensor(1),
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.int32),
        torch.ones(2, dtype=torch.int32).to_sparse(),
        torch.ones(2, dtype=torch.int32, device="meta"),
    ],
    ids=str,
)
def test_what_is_no_flat_tensor_of_the_same_kind_is_refused(bad: Any) -> None:
    for pair in ((bad, [1, 2]), ([1, 2], bad)):
        with pytest.raises(ArgumentError):
            find_first_diff_pos(*pair)
