"""contracts/pools.md: known defects of the public designs, and captures.

A check that also judges a small defective implementation, written beside it, proves that it can fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.builders import (
    FAILS,
    PAGE_SIZES,
    allocator_of,
    captured,
    gdn_pool,
    kv_pool,
    rows_like,
)
from pagoda import PagodaError
from pagoda.compat import ReqToTokenPool, make_full_attention_net_mem_pool
from pagoda.errors import CaptureError, OutOfRangeError


@pytest.mark.gpu
def test_what_makes_a_device_tensor_raises_inside_a_capture_and_changes_nothing() -> None:
    allocator = allocator_of("cuda", 4)
    held = allocator.alloc(6)
    table = ReqToTokenPool(2, 8, device="cuda")
    states = gdn_pool("cuda")
    pool = kv_pool("cuda")
    k, v = rows_like(pool, 2)
    last = int(held[-1])
    refused: list[Callable[[], Any]] = [
        lambda: allocator.alloc(4),
        lambda: allocator.alloc_extend([6], [9], [last]),
        lambda: table.write((1, slice(0, 2)), [1, 2]),
        lambda: pool.set_kv_buffer(0, [1, 2], k, v),
        lambda: states.reset_states([1]),
        lambda: states.copy_states(1, 2),
        lambda: allocator.free(held),
    ]
    with captured():
        for call in refused:
            with pytest.raises(CaptureError):
                call()
        on_host = allocator.alloc_host(4)  # no device is touched
        allocator.free(on_host)
        assert allocator.available_size() == 24
    allocator.free(held)
    assert allocator.available_size() == 32
    assert not bool(table.req_to_token.any())
    for made in (allocator, table, states, pool):
        made.check()


def check_the_highest_slot_lies_in_the_buffer(make: Callable[[int, int], tuple[Any, Any]]) -> None:
    """make(size, page_size) → (K buffer, all slots that are handed out)."""
    for page_size in PAGE_SIZES:
        buffer, slots = make(4 * page_size, page_size)
        assert max(slots) < buffer.shape[0]
        assert min(slots) >= page_size
        assert len(set(slots)) == 4 * page_size


def test_defect_the_highest_slot_of_a_paged_pool_lies_past_its_end(device: str) -> None:
    def make(size: int, page_size: int) -> tuple[torch.Tensor, list[int]]:
        pool, allocator = make_full_attention_net_mem_pool(
            size, 1, 2, 4, 2, 4, device=device, dtype=torch.float32, page_size=page_size
        )
        slots = allocator.alloc(size)
        ones = torch.ones(size, 2, 4, device=device)
        pool.set_kv_buffer(0, slots, ones, ones)
        assert bool((pool.k_buffer[0][int(slots.max())] == 1).all())
        return pool.k_buffer[0], slots.tolist()

    check_the_highest_slot_lies_in_the_buffer(make)
    with pytest.raises(FAILS):  # size + 1 rows, pages from 1
        check_the_highest_slot_lies_in_the_buffer(
            lambda size, page_size: (torch.empty(size + 1, 2, 4), range(page_size, size + page_size))
        )


def check_rows_are_rows_of_the_state_pool(table: Any, padding: int = 0) -> None:
    rows = table.alloc(3)
    assert padding not in rows
    assert table.alloc(1) is None


def test_defect_the_request_table_hands_out_row_0(device: str) -> None:
    class FromZero:
        def __init__(self) -> None:
            self.rows = [0, 1, 2]

        def alloc(self, n: int) -> list[int] | None:
            taken, self.rows = self.rows[:n], self.rows[n:]
            return taken if len(taken) == n else None

    check_rows_are_rows_of_the_state_pool(ReqToTokenPool(3, 8, device=device))
    with pytest.raises(FAILS):
        check_rows_are_rows_of_the_state_pool(FromZero())
    # Every row of the table is a working row of the states: none is padding, none a track slot.
    table, states = ReqToTokenPool(3, 8, device=device), gdn_pool(device)
    tracks = {states.alloc_track_slot(), states.alloc_track_slot()}
    assert not tracks & set(table.alloc(3))


def check_recurrent_state_is_v_by_k(state: torch.Tensor, head_k_dim: int, head_v_dim: int) -> None:
    """An outer product v kᵀ fits a row as it is."""
    v, k = torch.randn(head_v_dim, device=state.device), torch.randn(head_k_dim, device=state.device)
    assert state.shape[-2:] == (head_v_dim, head_k_dim)
    state[0, 1, 0] = torch.outer(v, k)
    torch.testing.assert_close(state[0, 1, 0] @ k, v * (k @ k))


@pytest.mark.parametrize(("head_k_dim", "head_v_dim"), [(3, 5), (5, 3), (1, 4)])
def test_defect_the_recurrent_state_is_k_by_v(device: str, head_k_dim: int, head_v_dim: int) -> None:
    pool = gdn_pool(device, head_k_dim=head_k_dim, head_v_dim=head_v_dim)
    check_recurrent_state_is_v_by_k(pool.recurrent_state, head_k_dim, head_v_dim)
    check_recurrent_state_is_v_by_k(pool.get_layer_state(1)[0].unsqueeze(0), head_k_dim, head_v_dim)
    with pytest.raises(FAILS):
        check_recurrent_state_is_v_by_k(torch.empty(2, 6, 4, head_k_dim, head_v_dim), head_k_dim, head_v_dim)


def check_no_slot_is_handed_out_twice(allocator: Any, device: str) -> None:
    slots = allocator.alloc(4)
    allocator.free(slots)
    with pytest.raises(PagodaError):
        allocator.free(slots)
    first, second = allocator.alloc(4), allocator.alloc(4)
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize("page_size", [1, 4])
def test_defect_a_slot_freed_again_is_handed_out_twice(device: str, page_size: int) -> None:
    class Careless:
        def __init__(self) -> None:
            self.free_slots = torch.arange(1, 17, dtype=torch.int32)

        def alloc(self, need_size: int) -> torch.Tensor:
            taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
            return taken

        def free(self, indices: torch.Tensor) -> None:
            self.free_slots = torch.cat([self.free_slots, indices])

    check_no_slot_is_handed_out_twice(allocator_of(device, page_size), device)
    with pytest.raises(FAILS):
        check_no_slot_is_handed_out_twice(Careless(), device)


def test_out_of_range_is_an_index_error_too(device: str) -> None:
    with pytest.raises(IndexError) as error:
        allocator_of(device).free([9])
    assert isinstance(error.value, OutOfRangeError)
