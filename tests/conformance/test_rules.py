"""contracts/README.md: rules 1 to 5 of the "Rules that hold everywhere", asked of every class."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from conformance.kinds import (
    FAILS,
    KINDS,
    NUM,
    PADDED,
    Kind,
    gdn_pool,
)
from pagoda import CapacityError, PagodaError, UsageError
from pagoda.compat import BlockAllocator, KVPool, ReqToTokenPool, SlotAllocator, TokenToKVPoolAllocator
from pagoda.errors import CaptureError, IdError, InvariantError, NotHeldError, OutOfRangeError

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
