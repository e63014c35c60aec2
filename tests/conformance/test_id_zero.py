"""contracts/README.md: the table "Id 0" and the six "Rules that hold everywhere".

Every class that hands out ids is told once, as a `Kind`; each rule is then asked of all of them.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda import (
    BlockAllocator,
    CapacityError,
    CaptureError,
    GDNPool,
    IdError,
    InvariantError,
    KVPool,
    NotHeldError,
    OutOfRangeError,
    PagodaError,
    ReqToTokenPool,
    SlotAllocator,
    TokenToKVPoolAllocator,
    UsageError,
)

NUM = 32  # ids of every kind; pages, where slots are handed out in pages
FAILS = (AssertionError, pytest.fail.Exception)  # how a check says that an implementation is wrong


def gdn_pool(device: str, max_reqs: int = 3, max_track_slots: int = NUM) -> GDNPool:
    return GDNPool(max_reqs, 2, 2, 3, 5, 7, 4, device=device, max_track_slots=max_track_slots)


def one_by_one(alloc: Callable[[], Any], none: Any, n: int) -> list[int]:
    ids = [alloc() for _ in range(n)]
    assert none not in ids
    return ids


@dataclass(frozen=True)
class Kind:
    """One class that hands out ids, with the same few questions for all."""

    make: Callable[[str], Any]
    take: Callable[[Any, int], list[int]]  # n ids that are there
    give: Callable[[Any, list[int]], None]  # back, in one call where there is one
    num_free: Callable[[Any], int]
    free_ids: Callable[[Any], list[int]]  # all that are free; changes nothing
    ids: range  # all that are handed out
    page_size: int = 1
    gives_several: bool = True


def give_each(free: Callable[[Any], Callable[[int], None]]) -> Callable[[Any, list[int]], None]:
    def give(made: Any, ids: list[int]) -> None:
        for one in ids:
            free(made)(one)

    return give


def token_kind(page_size: int, need_sort: bool = True) -> Kind:
    def make(device: str) -> TokenToKVPoolAllocator:
        return TokenToKVPoolAllocator(NUM * page_size, device, page_size, need_sort)

    def take(made: Any, n: int) -> list[int]:
        slots: list[int] = made.alloc(n * page_size).tolist()
        return slots

    def free_ids(made: Any) -> list[int]:
        slots = made.alloc_host(made.available_size())
        made.free(slots)
        return sorted(slots.tolist())

    return Kind(
        make,
        take,
        lambda made, ids: made.free(ids),
        lambda made: made.available_size() // page_size,
        free_ids,
        range(page_size, (NUM + 1) * page_size),
        page_size,
    )


def free_rows(made: ReqToTokenPool) -> list[int]:
    rows = made.alloc(made.available_size())
    assert rows is not None
    made.free(rows)
    return sorted(rows)


def free_blocks(made: BlockAllocator) -> list[int]:
    blocks = made.acquire_host(made.num_free)
    made.release(blocks)
    return sorted(blocks.tolist())


def free_tracks(made: GDNPool) -> list[int]:
    tracks = []
    while (track := made.alloc_track_slot()) is not None:
        tracks.append(track)
    for track in tracks:
        made.free_track_slot(track)
    return sorted(tracks)


KINDS: dict[str, Kind] = {
    **{f"slots, page_size {page_size}": token_kind(page_size) for page_size in (1, 2, 16, 64)},
    "slots, page_size 16, unsorted": token_kind(16, need_sort=False),
    "rows": Kind(
        lambda device: ReqToTokenPool(NUM, 8, device),
        lambda made, n: made.alloc(n),
        lambda made, ids: made.free(ids),
        lambda made: made.available_size(),
        free_rows,
        range(1, NUM + 1),
    ),
    "blocks": Kind(
        lambda device: BlockAllocator(NUM, device),
        lambda made, n: made.acquire(n).tolist(),
        lambda made, ids: made.release(ids),
        lambda made: made.num_free,
        free_blocks,
        range(1, NUM + 1),
    ),
    "slots of a cache": Kind(
        lambda device: SlotAllocator(NUM),
        lambda made, n: one_by_one(made.alloc, -1, n),
        give_each(lambda made: made.free),
        lambda made: made.free_count,
        lambda made: [slot for slot in range(NUM) if made.is_free(slot)],
        range(NUM),
        gives_several=False,
    ),
    "track slots": Kind(
        gdn_pool,
        lambda made, n: one_by_one(made.alloc_track_slot, None, n),
        give_each(lambda made: made.free_track_slot),
        lambda made: len(free_tracks(made)),
        free_tracks,
        range(4, 4 + NUM),
        gives_several=False,
    ),
}
PADDED = [name for name, kind in KINDS.items() if kind.ids.start > 0]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def pages_of(kind: Kind, ids: list[int]) -> list[int]:
    """One id of each page: the first."""
    return [one for one in ids if one % kind.page_size == 0]


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


# --- rule 1: a call that fails changes nothing; running out is one typed error, or None, or −1


@pytest.mark.parametrize("num_held", [0, 5, NUM])
def test_running_out_is_none_where_the_contract_says_so_and_changes_nothing(
    device: str, num_held: int
) -> None:
    for page_size in (1, 16):
        slots = TokenToKVPoolAllocator(NUM * page_size, device, page_size)
        slots.alloc(num_held * page_size)
        assert slots.alloc((NUM - num_held) * page_size + 1) is None
        assert slots.available_size() == (NUM - num_held) * page_size
    rows = ReqToTokenPool(NUM, 8, device)
    rows.alloc(num_held)
    assert rows.alloc(NUM - num_held + 1) is None
    assert rows.available_size() == NUM - num_held
    for made in (slots, rows):
        made.check()


def test_running_out_one_by_one_is_none_or_minus_one(device: str) -> None:
    tracks, slots = gdn_pool(device), SlotAllocator(NUM)
    for _ in range(NUM):
        assert tracks.alloc_track_slot() is not None
        assert slots.alloc() >= 0
    for _ in range(2):
        assert tracks.alloc_track_slot() is None
        assert slots.alloc() == -1
    for made in (tracks, slots):
        made.check()


@pytest.mark.parametrize("num_held", [0, 5, NUM])
def test_running_out_elsewhere_is_one_typed_error_with_asked_free_and_total(
    device: str, num_held: int
) -> None:
    blocks = BlockAllocator(NUM, device)
    blocks.acquire(num_held)
    with pytest.raises(CapacityError) as error:
        blocks.acquire(NUM - num_held + 7)
    assert isinstance(error.value, PagodaError)
    found = (error.value.wanted, error.value.free, error.value.total)
    assert found == (NUM - num_held + 7, NUM - num_held, NUM)
    assert blocks.num_free == NUM - num_held
    blocks.check()


# --- rule 2: bad frees raise a typed error at the call, always, and change nothing


def check_bad_frees_raise_and_change_nothing(kind: Kind, device: str) -> None:
    made = kind.make(device)
    held = kind.take(made, 6)
    first, last = kind.ids.start, kind.ids.stop - 1
    kind.give(made, held[: kind.page_size])  # page 0 of what was held: freed before
    was_freed, still_held = held[: kind.page_size], held[kind.page_size :]
    never = next(one for one in kind.free_ids(made) if one not in held)
    before = kind.free_ids(made)
    bad = {
        "freed before": was_freed[0],
        "never allocated": never,
        "below the first": first - 1,
        "negative": -1,
        "very negative": -(2**31),
        "past the last": last + 1,
        "the largest": 2**31 - 1,
    }
    if first > 0:
        bad["id 0"] = 0
    for one in bad.values():
        calls = [[one]]
        if kind.gives_several:
            calls += [[*still_held, one], [one, *still_held], [still_held[0], one, still_held[-1]]]
        for call in calls:
            with pytest.raises(IdError) as error:
                kind.give(made, call)
            assert error.value.id == one
            assert kind.free_ids(made) == before
            made.check()
    kind.give(made, still_held)
    assert kind.free_ids(made) == list(kind.ids)


def test_bad_frees_raise_and_change_nothing(device: str, kind: Kind) -> None:
    check_bad_frees_raise_and_change_nothing(kind, device)


def test_a_careless_allocator_is_found_out(device: str) -> None:
    class Careless(TokenToKVPoolAllocator):
        def free(self, indices: Any) -> None:
            good = [slot for slot in indices if 0 < slot <= self.size]
            try:
                super().free(good)
            except NotHeldError:
                return

    kind = KINDS["slots, page_size 1"]
    careless = replace(kind, make=lambda device: Careless(NUM, device))
    with pytest.raises(FAILS):
        check_bad_frees_raise_and_change_nothing(careless, device)


@pytest.mark.parametrize("one", [2**31, -(2**31) - 1, 2**40, 2**63, 2**70])
def test_an_id_that_fits_no_int32_raises_a_typed_error_too(device: str, kind: Kind, one: int) -> None:
    made = kind.make(device)
    kind.take(made, 3)
    before = kind.free_ids(made)
    with pytest.raises(UsageError):
        kind.give(made, [one])
    assert kind.free_ids(made) == before
    made.check()


@pytest.mark.parametrize("one", [1.0, "1", None, 1 + 0j, ...], ids=str)
def test_what_is_no_id_raises_a_typed_error(device: str, kind: Kind, one: Any) -> None:
    made = kind.make(device)
    kind.take(made, 3)
    before = kind.free_ids(made)
    with pytest.raises(UsageError):
        kind.give(made, [one])
    assert kind.free_ids(made) == before
    made.check()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.gives_several])
def test_an_id_twice_in_one_call_is_a_double_free_unless_it_names_a_page(device: str, name: str) -> None:
    kind = KINDS[name]
    made = kind.make(device)
    held = kind.take(made, 4)
    twice = [*held, held[0]]
    if kind.page_size > 1:
        kind.give(made, twice)
        assert kind.num_free(made) == NUM
    else:
        with pytest.raises(NotHeldError):
            kind.give(made, twice)
        assert kind.num_free(made) == NUM - 4
    made.check()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.gives_several])
def test_bad_frees_raise_also_when_ids_come_in_a_tensor_on_the_device(device: str, name: str) -> None:
    kind = KINDS[name]
    made = kind.make(device)
    held = kind.take(made, 4)
    before = kind.free_ids(made)
    for one in (0, -1, kind.ids.stop, before[-1]):
        with pytest.raises(IdError):
            kind.give(made, torch.tensor([*held, one], device=device))
        assert kind.free_ids(made) == before
    kind.give(made, torch.tensor(held, device=device))
    assert kind.num_free(made) == NUM


@pytest.mark.parametrize("name", PADDED)
def test_freeing_id_0_is_out_of_range(device: str, name: str) -> None:
    kind = KINDS[name]
    made = kind.make(device)
    kind.take(made, NUM)
    with pytest.raises(OutOfRangeError):
        kind.give(made, [0])
    assert kind.num_free(made) == 0


# --- rule 3: nothing is read back, nothing moves, nothing is made inside a capture


@dataclass
class Everything:
    """One of each class on a device, and every call that a step makes."""

    device: str

    def __post_init__(self) -> None:
        self.pool = KVPool(64, 2, 2, 4, device=self.device, dtype=torch.bfloat16, page_size=4)
        self.slots = TokenToKVPoolAllocator(64, self.device, 4)
        self.table = ReqToTokenPool(NUM, 16, self.device)
        self.blocks = BlockAllocator(NUM, self.device)
        self.states = gdn_pool(self.device)
        self.k = torch.randn(6, 2, 4, device=self.device)

    def tensors(self) -> list[torch.Tensor]:
        return [
            *self.pool.k_buffer,
            *self.pool.v_buffer,
            self.table.req_to_token,
            self.states.recurrent_state,
            self.states.conv_state,
        ]

    def step(self) -> None:
        """All of it with host ids: nothing here may wait for the device."""
        slots, on_host = self.slots.alloc(6), self.slots.alloc_host(6)
        more = self.slots.alloc_extend([6], [9], [int(on_host[-1])])
        blocks, blocks_on_host = self.blocks.acquire(3), self.blocks.acquire_host(3)
        assert all(it is not None for it in (slots, more, blocks))
        rows = self.table.alloc(2)
        self.table.write((rows[0], slice(0, 6)), slots)
        self.table.write((rows[1], slice(3, 9)), on_host)
        for layer in range(2):
            self.pool.set_kv_buffer(layer, slots, self.k, self.k)
            self.pool.set_kv_buffer(layer, on_host, self.k, self.k)
            self.pool.get_kv_buffer(layer)
            self.states.get_layer_state(layer)
        track = self.states.alloc_track_slot()
        self.states.copy_states(rows[0], track)
        self.states.reset_states(rows)
        self.states.free_track_slot(track)
        self.table.free(rows)
        with self.slots.free_group():
            self.slots.free(on_host)
        self.slots.free([8])  # names the second page of `slots`
        self.blocks.release(blocks_on_host)
        self.slots.merge_and_sort_free()
        self.slots.clear()
        self.table.clear()
        self.blocks.release(range(1, 4))

    def check(self) -> None:
        for made in (self.pool, self.slots, self.table, self.blocks, self.states):
            made.check()


def test_no_call_changes_the_address_of_a_tensor(device: str) -> None:
    everything = Everything(device)
    before = [tensor.data_ptr() for tensor in everything.tensors()]
    for _ in range(3):
        everything.step()
    assert [tensor.data_ptr() for tensor in everything.tensors()] == before
    everything.check()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_host_ids_cost_no_synchronisation() -> None:
    everything = Everything("cuda")
    everything.step()  # kernels are compiled
    with no_synchronisation():
        everything.step()
        everything.step()
    everything.check()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_check_for_synchronisation_can_fail() -> None:
    tensor = torch.ones(1, device="cuda")
    with no_synchronisation(), pytest.raises(RuntimeError):
        tensor.item()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_device_ids_that_a_group_collects_cost_nothing_until_it_ends() -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda", 4)
    slots = allocator.alloc(16)
    with no_synchronisation():
        allocator.free_group_begin()
        allocator.free(slots[:8])
        allocator.free(slots[8:])
    allocator.free_group_end()
    assert allocator.available_size() == 64


def test_every_allocator_can_hand_out_host_ids(device: str) -> None:
    slots, blocks = TokenToKVPoolAllocator(64, device, 4), BlockAllocator(NUM, device)
    for ids in (slots.alloc_host(6), slots.alloc_extend_host([0], [5], [0]), blocks.acquire_host(6)):
        assert isinstance(ids, np.ndarray)
        assert ids.dtype == np.int32
    assert all(type(row) is int for row in ReqToTokenPool(3, 4, device).alloc(2))
    assert type(gdn_pool(device).alloc_track_slot()) is int
    assert type(SlotAllocator(1).alloc()) is int


@pytest.mark.gpu
def test_what_would_make_a_device_tensor_raises_while_the_stream_is_captured() -> None:
    everything = Everything("cuda")
    last = int(everything.slots.alloc_host(6)[-1])
    calls: list[Callable[[], Any]] = [
        lambda: everything.slots.alloc(1),
        lambda: everything.slots.alloc(0),
        lambda: everything.slots.alloc(1000),  # also where the answer would be None
        lambda: everything.slots.alloc_extend([6], [7], [last]),
        lambda: everything.blocks.acquire(1),
        lambda: everything.blocks.acquire(1000),
    ]
    free_before = (everything.slots.available_size(), everything.blocks.num_free)
    counter = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        for call in calls:
            with pytest.raises(CaptureError):
                call()
        assert everything.slots.alloc_host(4) is not None
        assert everything.blocks.acquire_host(1) is not None
        everything.slots.free([12])
        everything.blocks.release([1])
    graph.replay()
    assert float(counter) == 1  # the capture lived on
    assert (everything.slots.available_size(), everything.blocks.num_free) == free_before
    everything.check()


# --- rule 4: check() and conservation


def test_ids_are_conserved_and_nothing_is_held_twice(device: str, kind: Kind) -> None:
    made, chance = kind.make(device), random.Random(3)
    held: list[list[int]] = []
    for _ in range(60):
        n = chance.randrange(6)
        if n and n <= kind.num_free(made):
            held.append(kind.take(made, n))
        elif held:
            kind.give(made, held.pop(chance.randrange(len(held))))
        made.check()
        taken = [one for ids in held for one in ids]
        assert len(set(taken)) == len(taken)
        assert sorted([*taken, *kind.free_ids(made)]) == list(kind.ids)
        assert kind.num_free(made) * kind.page_size + len(taken) == len(kind.ids)


def test_what_a_free_group_collects_is_neither_free_nor_lost(device: str) -> None:
    allocator = TokenToKVPoolAllocator(64, device, 4)
    slots = allocator.alloc(32).tolist()
    allocator.free_group_begin()
    allocator.free(slots[:12])
    allocator.check()
    assert allocator.available_size() == 32
    assert not set(allocator.alloc(32).tolist()) & set(slots)
    allocator.check()
    allocator.free_group_end()
    assert sorted(allocator.alloc(12).tolist()) == slots[:12]
    allocator.check()


@pytest.mark.parametrize("owner", ["pool", "table", "states"])
def test_check_finds_a_tensor_that_moved(device: str, owner: str) -> None:
    everything = Everything(device)
    made = getattr(everything, owner)
    for tensor in {
        "pool": [*everything.pool.k_buffer, *everything.pool.v_buffer],
        "table": [everything.table.req_to_token],
        "states": [everything.states.recurrent_state, everything.states.conv_state],
    }[owner]:
        home = tensor.data
        tensor.data = tensor.clone()
        with pytest.raises(InvariantError):
            made.check()
        tensor.data = home
        made.check()


# --- rule 5: the order depends on the calls made, never on the clock


def test_the_same_calls_give_the_same_ids_whatever_the_clock_says(
    device: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace() -> list[list[int]]:
        made, chance = kind.make(device), random.Random(5)
        held: list[list[int]] = []
        seen = []
        for _ in range(60):
            n = chance.randrange(6)
            if n and n <= kind.num_free(made):
                held.append(kind.take(made, n))
                seen.append(held[-1])
            elif held:
                kind.give(made, held.pop(chance.randrange(len(held))))
        return seen

    wanted = trace()
    chance = random.Random(7)
    with monkeypatch.context() as patch:
        for clock in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, clock, lambda: chance.uniform(-1e9, 1e9))
            patch.setattr(time, f"{clock}_ns", lambda: chance.randrange(-(10**18), 10**18))
        found = trace()
    assert found == wanted


# --- rule 6: several threads


@contextmanager
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def check_threads_never_share_an_id(made: Any, kind: Kind, seconds: float = 0.25) -> None:
    """Four threads take and give for a while; nobody ever holds what another holds."""
    owners: dict[int, int] = {}
    wrong: list[Any] = []
    until = time.monotonic() + seconds

    def give_back(ids: list[int]) -> None:
        for one in ids:
            owners.pop(one, None)
        kind.give(made, ids)

    def work(me: int) -> None:
        try:
            held: list[list[int]] = []
            while time.monotonic() < until and not wrong:
                held.append(kind.take(made, 2))
                wrong.extend(one for one in held[-1] if owners.setdefault(one, me) != me)
                if len(held) == 3:
                    give_back(held.pop(0))
            for ids in held:
                give_back(ids)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    with quick_switches():
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if hasattr(made, "check"):
                made.check()
            time.sleep(0.01)
        for thread in threads:
            thread.join()
    assert wrong == []
    assert kind.num_free(made) == NUM


def test_threads_never_share_an_id(device: str, kind: Kind) -> None:
    check_threads_never_share_an_id(kind.make(device), kind)


def test_an_allocator_whose_calls_are_not_serialised_is_found_out() -> None:
    class Careless:
        def __init__(self) -> None:
            self.free_ids = list(range(1, NUM + 1))

        def alloc(self, n: int) -> list[int]:
            taken = sorted(self.free_ids)[:n]
            time.sleep(0.001)  # another thread comes in between
            for one in taken:
                self.free_ids.remove(one)
            return taken

        def free(self, ids: list[int]) -> None:
            self.free_ids = self.free_ids + ids

    careless = replace(KINDS["rows"], num_free=lambda made: len(made.free_ids))
    with pytest.raises(FAILS):
        check_threads_never_share_an_id(Careless(), careless)


def test_threads_with_free_groups_lose_no_slot(device: str) -> None:
    allocator = TokenToKVPoolAllocator(64 * 4, device, 4)
    wrong: list[BaseException] = []
    until = time.monotonic() + 0.3

    def work() -> None:
        try:
            while time.monotonic() < until:
                slots = allocator.alloc_host(9)
                if slots is not None:
                    # Groups are the allocator's: another thread may end this one between the calls.
                    with allocator.free_group():
                        allocator.free(slots[:4])
                        allocator.free(slots[4:])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with quick_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert allocator.available_size() == 64 * 4
    allocator.check()


def test_threads_that_free_the_same_ids_free_them_once(device: str, kind: Kind) -> None:
    made = kind.make(device)
    for _ in range(20):
        ids = pages_of(kind, kind.take(made, 1)) if kind.page_size > 1 else kind.take(made, 1)
        start = threading.Barrier(4)
        refused: list[Exception] = []

        def give(ids: list[int] = ids, start: Any = start, refused: list[Exception] = refused) -> None:
            start.wait()
            try:
                kind.give(made, ids)
            except NotHeldError as error:
                refused.append(error)

        threads = [threading.Thread(target=give) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3
        assert kind.num_free(made) == NUM
        made.check()


def race(left: Callable[[], None], right: Callable[[], None], is_torn: Callable[[], bool]) -> int:
    """Both calls at once, again and again for half a second: how often neither order explains the result."""
    start, end = threading.Barrier(3, timeout=30), threading.Barrier(3, timeout=30)
    torn = 0
    is_over = False

    def work(call: Callable[[], None]) -> None:
        while True:
            start.wait()
            if is_over:
                return
            call()
            end.wait()

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in (left, right)]
    until = time.monotonic() + 0.5
    with quick_switches():
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            start.wait()
            end.wait()
            torn += is_torn()
        is_over = True
        start.wait()
        for thread in threads:
            thread.join()
    return torn


def test_writes_of_k_and_v_from_two_threads_are_serialised(device: str) -> None:
    pool = KVPool(256, 1, 8, 64, device=device, dtype=torch.float32)
    slots = torch.arange(1, 257, device=device)
    ones = torch.ones(256, 8, 64, device=device)
    twos = 2 * ones
    torn = race(
        lambda: pool.set_kv_buffer(0, slots, ones, ones),
        lambda: pool.set_kv_buffer(0, slots, twos, twos),
        lambda: len(pool.k_buffer[0][1:].unique()) > 1 or not torch.equal(pool.k_buffer[0], pool.v_buffer[0]),
    )
    assert torn == 0


def test_writes_of_a_row_from_two_threads_are_serialised(device: str) -> None:
    num = 1 << 16
    pool = ReqToTokenPool(2, num, device)
    ones = torch.ones(num, dtype=torch.int32, device=device)
    twos = 2 * ones
    torn = race(
        lambda: pool.write((1, slice(0, num)), ones),
        lambda: pool.write((1, slice(0, num)), twos),
        lambda: len(pool.req_to_token[1].unique()) > 1,
    )
    assert torn == 0


def test_copies_of_states_from_two_threads_are_serialised(device: str) -> None:
    pool = GDNPool(4, 4, 4, 32, 32, 128, 4, device=device, dtype=torch.float32)
    for row in (1, 2):
        pool.recurrent_state[:, row], pool.conv_state[:, row] = row, row
    torn = race(
        lambda: pool.copy_states(1, 3),
        lambda: pool.copy_states(2, 3),
        lambda: (
            len({*pool.recurrent_state[:, 3].unique().tolist(), *pool.conv_state[:, 3].unique().tolist()}) > 1
        ),
    )
    assert torn == 0
