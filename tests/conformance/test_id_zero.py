"""contracts/README.md: the table "Id 0"."""

import pytest
import torch

from conformance.kinds import (
    KINDS,
    NUM,
    PADDED,
    Kind,
    free_tracks,
    gdn_pool,
)
from pagoda import CapacityError, PagodaError
from pagoda.compat import BlockAllocator, KVPool, ReqToTokenPool, SlotAllocator, TokenToKVPoolAllocator

# --- the table


def test_exactly_the_ids_of_the_table_are_handed_out_each_once(device: str, kind: Kind) -> None:
    made = kind.make(device)
    ids = kind.take(made, NUM)
    assert sorted(ids) == list(kind.ids)
    assert kind.num_free(made) == 0
    made.check()


@pytest.mark.parametrize("name", PADDED)
def test_id_0_and_its_page_are_never_handed_out(device: str, name: str) -> None:
    kind = KINDS[name]
    made = kind.make(device)
    for _ in range(3):
        ids = kind.take(made, NUM)
        assert min(ids) >= kind.page_size
        kind.give(made, ids)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_token_pools_have_size_plus_page_size_rows(device: str, page_size: int) -> None:
    size = 4 * page_size
    pool = KVPool(size, 2, 1, 2, device=device, page_size=page_size)
    slots = TokenToKVPoolAllocator(size, device, page_size).alloc(size).tolist()
    assert sorted(slots) == list(range(page_size, size + page_size))
    assert {buffer.shape[0] for buffer in (*pool.k_buffer, *pool.v_buffer)} == {size + page_size}


@pytest.mark.parametrize("page_size", [2, 16, 64])
@pytest.mark.parametrize("off", [1, -1])
def test_the_size_of_token_pools_is_a_multiple_of_page_size(device: str, page_size: int, off: int) -> None:
    for make in (
        lambda size: KVPool(size, 1, 1, 1, device=device, page_size=page_size),
        lambda size: TokenToKVPoolAllocator(size, device, page_size),
    ):
        make(4 * page_size)
        with pytest.raises(PagodaError):
            make(4 * page_size + off)


def test_request_rows_have_one_row_of_padding_and_states_their_track_slots_behind_them(device: str) -> None:
    assert ReqToTokenPool(5, 8, device).req_to_token.shape[0] == 5 + 1
    for num_tracks in (0, 3):
        pool = gdn_pool(device, max_reqs=5, max_track_slots=num_tracks)
        assert pool.recurrent_state.shape[1] == pool.conv_state.shape[1] == 5 + 1 + num_tracks
        assert free_tracks(pool) == list(range(6, 6 + num_tracks))


def test_a_pool_of_nothing_hands_out_nothing(device: str) -> None:
    assert TokenToKVPoolAllocator(0, device).alloc(1) is None
    assert ReqToTokenPool(0, 8, device).alloc() is None
    assert SlotAllocator(0).alloc() == -1
    assert gdn_pool(device, max_track_slots=0).alloc_track_slot() is None
    with pytest.raises(CapacityError):
        BlockAllocator(0, device).acquire(1)


# --- id 0 absorbs the writes of padded tokens


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_padded_tokens_write_to_page_0_and_change_no_real_slot(
    device: str, page_size: int, dtype: torch.dtype
) -> None:
    pool = KVPool(4 * page_size, 2, 2, 4, device=device, dtype=dtype, page_size=page_size)
    real = torch.arange(page_size, 5 * page_size, device=device)
    k = torch.randn(len(real), 2, 4, device=device)
    pool.set_kv_buffer(0, real, k, -k)
    before = [buffer.view(torch.uint8)[page_size:].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    padding = torch.tensor([0, 0, page_size - 1, 0], device=device)  # many tokens, one slot
    for junk in (float("nan"), float("inf"), 1e30):
        rows = torch.full((4, 2, 4), junk, device=device)
        for layer in range(2):
            pool.set_kv_buffer(layer, padding, rows, rows)
    after = [buffer.view(torch.uint8)[page_size:] for buffer in (*pool.k_buffer, *pool.v_buffer)]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    pool.check()


def test_a_batch_padded_with_slot_0_writes_its_real_tokens(device: str) -> None:
    pool = KVPool(8, 1, 2, 4, device=device, dtype=torch.float32)
    slots = torch.tensor([3, 0, 5, 0, 0], device=device)
    k = torch.randn(5, 2, 4, device=device)
    k[slots == 0] = float("nan")
    pool.set_kv_buffer(0, slots, k, k)
    assert torch.equal(pool.k_buffer[0][[3, 5]], k[[0, 2]])
    assert not bool(pool.k_buffer[0][1:].isnan().any())


def test_what_row_0_of_the_table_holds_changes_no_other_row(device: str) -> None:
    pool = ReqToTokenPool(3, 4, device)
    rows = pool.alloc(3)
    for row in rows:
        pool.write((row, slice(0, 4)), [row] * 4)
    pool.write((0, slice(0, 4)), [99] * 4)
    assert pool.req_to_token[1:].tolist() == [[row] * 4 for row in (1, 2, 3)]
    pool.clear()
    assert sorted(pool.alloc(3)) == [1, 2, 3]


def test_what_row_0_of_the_states_holds_changes_no_other_row(device: str) -> None:
    pool = gdn_pool(device, max_track_slots=1)
    pool.reset_states([1, 2, 3, 4])
    for state in (pool.recurrent_state, pool.conv_state):
        state[:, 1] = 5
        state[:, 0] = float("nan")
    pool.copy_states(1, 2)
    pool.reset_states([3])
    pool.copy_states(2, pool.alloc_track_slot())
    for state in (pool.recurrent_state, pool.conv_state):
        assert [float(state[:, row].float().min()) for row in (1, 2, 3, 4)] == [5, 5, 0, 5]
        assert not bool(state[:, 1:].isnan().any())
