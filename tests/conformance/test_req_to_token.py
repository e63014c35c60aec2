"""contracts/pools.md: `ReqToTokenPool`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagoda import ConfigError, UsageError
from pagoda.compat import ReqToTokenPool
from pagoda.errors import NotHeldError


def test_req_to_token_is_int32_with_a_row_of_padding(device: str) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    assert pool.req_to_token.shape == (5, 8)
    assert pool.req_to_token.dtype == torch.int32
    assert pool.req_to_token.device.type == device
    assert (pool.size, pool.max_context_len) == (4, 8)
    assert torch.device(pool.device).type == device


def test_alloc_gives_a_list_of_rows_or_none(device: str) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    rows = pool.alloc()
    assert isinstance(rows, list)
    assert len(rows) == 1
    rows += pool.alloc(2)
    assert all(type(row) is int for row in rows)
    assert pool.available_size() == 1
    assert pool.alloc(2) is None
    assert pool.available_size() == 1
    rows += pool.alloc(1)
    assert sorted(rows) == [1, 2, 3, 4]
    assert pool.alloc() is None
    assert pool.alloc(0) == []


@pytest.mark.parametrize("n", [2**31, 2**40, 2**70])
def test_alloc_gives_none_however_many_rows_are_asked_for(device: str, n: int) -> None:
    assert ReqToTokenPool(4, 8, device=device).alloc(n) is None


def test_a_freed_row_can_be_allocated_again(device: str) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    pool.alloc(4)
    pool.free(3)
    assert pool.available_size() == 1
    assert pool.alloc() == [3]
    pool.free([2, 4])
    assert pool.available_size() == 2
    pool.check()


def test_clear_makes_every_row_free(device: str) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    pool.alloc(3)
    pool.clear()
    assert pool.available_size() == 4
    with pytest.raises(NotHeldError):
        pool.free(1)
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]
    pool.check()


@pytest.mark.parametrize(
    "given",
    [
        lambda values, device: values,
        lambda values, device: np.array(values, dtype=np.int64),
        lambda values, device: torch.tensor(values, dtype=torch.int32, device=device),
        lambda values, device: torch.tensor(values, dtype=torch.int64, device=device),
        lambda values, device: torch.tensor(values, dtype=torch.int32),
        lambda values, device: torch.tensor([values, values], dtype=torch.int32, device=device).t()[:, 1],
    ],
    ids=["list", "int64 array", "int32", "int64", "host tensor", "strided"],
)
def test_write_sets_positions_a_to_b_of_one_row_and_nothing_else(
    device: str, given: Callable[..., Any]
) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    pool.req_to_token.fill_(-7)
    (row,) = pool.alloc()
    pool.write((row, slice(2, 5)), given([11, 12, 13], device))
    wanted = torch.full((5, 8), -7, dtype=torch.int32)
    wanted[row, 2:5] = torch.tensor([11, 12, 13])
    assert torch.equal(pool.req_to_token.cpu(), wanted)


def test_any_position_may_be_written_again(device: str) -> None:
    pool = ReqToTokenPool(2, 8, device=device)
    (row,) = pool.alloc()
    pool.write((row, slice(0, 8)), list(range(10, 18)))
    pool.write((row, slice(5, 7)), [1, 2])  # behind, before and over what was written: no lengths here
    pool.write((row, slice(0, 2)), [3, 4])
    pool.write((row, slice(4, 4)), [])
    assert pool.req_to_token[row].tolist() == [3, 4, 12, 13, 14, 1, 2, 17]


def test_the_matrix_is_the_pools_own(device: str) -> None:
    first, second = (ReqToTokenPool(2, 4, device=device) for _ in range(2))
    first.write((1, slice(0, 4)), [5, 6, 7, 8])
    assert first.req_to_token.data_ptr() != second.req_to_token.data_ptr()
    assert 5 not in second.req_to_token


def test_values_may_be_a_view_of_the_matrix_itself(device: str) -> None:
    pool = ReqToTokenPool(2, 8, device=device)
    pool.write((1, slice(0, 8)), list(range(8)))
    pool.write((2, slice(0, 4)), pool.req_to_token[1, 4:])  # a shared prefix
    assert pool.req_to_token[2, :4].tolist() == [4, 5, 6, 7]
    pool.write((1, slice(0, 4)), pool.req_to_token[1, 2:6])  # moved up within a row
    assert pool.req_to_token[1].tolist() == [2, 3, 4, 5, 4, 5, 6, 7]


BAD_TABLE_WRITES: list[tuple[Any, Any]] = [
    ((5, slice(0, 2)), [1, 2]),
    ((-1, slice(0, 2)), [1, 2]),
    ((2**40, slice(0, 2)), [1, 2]),
    ((1.0, slice(0, 2)), [1, 2]),
    (("1", slice(0, 2)), [1, 2]),
    ((None, slice(0, 2)), [1, 2]),
    (([1, 2], slice(0, 2)), [1, 2]),
    ((1, slice(7, 9)), [1, 2]),
    ((1, slice(-2, 0)), [1, 2]),
    ((1, slice(3, 1)), [1, 2]),
    ((1, slice(0, 4, 2)), [1, 2]),
    ((1, slice(0.0, 2.0)), [1, 2]),
    ((1, slice("0", "2")), [1, 2]),
    ((1, slice(0, 2)), [1]),
    ((1, slice(0, 2)), [1, 2, 3]),
    ((1, slice(0, 2)), []),
    ((1, slice(0, 2)), [1.0, 2.0]),
    ((1, slice(0, 2)), ["1", "2"]),
    ((1, slice(0, 2)), None),
    ((1, slice(0, 2)), "12"),
    ((1, slice(0, 2)), torch.tensor([1.0, 2.0])),
    ((1, slice(0, 2)), torch.tensor([True, False])),
    ((1, slice(0, 2)), torch.tensor([1, 2], device="meta")),
    ((1, slice(0, 2)), [1, 2**31]),
    ((1, slice(0, 2)), np.array([1, 2**40])),
    ((1, slice(0, 2)), torch.tensor([1, 2**40])),
    (([1, 2, 3], [0, 1]), [1, 2]),
    (1, [1, 2]),
    ((1,), [1, 2]),
    ((1, slice(0, 1), 0), [1]),
    (None, [1]),
    (slice(0, 2), [1, 2]),
]


@pytest.mark.parametrize(("index", "values"), BAD_TABLE_WRITES, ids=repr)
def test_a_bad_write_to_the_table_raises_and_writes_nothing(device: str, index: Any, values: Any) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    pool.alloc(4)
    pool.req_to_token.fill_(-7)
    with pytest.raises(UsageError):
        pool.write(index, values)
    assert bool((pool.req_to_token == -7).all())
    pool.check()


@pytest.mark.parametrize("n", [-1, 1.0, "1", None, [1]])
def test_a_bad_number_of_rows_raises_a_typed_error(device: str, n: Any) -> None:
    pool = ReqToTokenPool(4, 8, device=device)
    with pytest.raises(UsageError):
        pool.alloc(n)
    assert pool.available_size() == 4


@pytest.mark.parametrize(
    ("max_reqs", "max_context_len"), [(-1, 8), (4, 0), (4, -1), (4.0, 8), (4, 8.0), ("4", 8), (4, None)]
)
def test_a_table_that_cannot_be_is_refused(max_reqs: Any, max_context_len: Any) -> None:
    with pytest.raises(ConfigError):
        ReqToTokenPool(max_reqs, max_context_len, device="cpu")


def test_a_table_that_is_too_large_is_told_in_the_callers_words() -> None:
    said = (
        "max_reqs = 1048576 and max_context_len = 2048: the table exceeds 2\\^31 places: give fewer requests"
    )
    with pytest.raises(ConfigError, match=f"^{said}"):
        ReqToTokenPool(2**20, 2**11, device="cpu")
