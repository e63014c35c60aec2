"""contracts/hybrid.md: `KVCacheManager`, and the known defects that concern rows, blocks and tables.

A check that also judges a small defective implementation, written beside it, proves that it can fail."""

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagoda
from conformance.builders import captured
from conformance.hybrid_models import (
    CSA,
    FAILS,
    HCA,
    LAYERS,
    SCHEDULE,
    SWA,
    exact,
    free_lists,
    is_running,
    manager_of,
    nothing_is_read,
    observe,
    parts_of,
    scramble,
    tensors_of,
    tiny,
)
from conformance.test_rule_threads import quick_switches
from pagoda import CapacityError, ConfigError, PagodaError, UsageError, kernels
from pagoda.compat import KVCacheManager, LayerCacheHandle, LayerSpec, PagedKVPool, StateCachePool
from pagoda.errors import ArgumentError, CaptureError, IdError, InvariantError, NotHeldError, OutOfRangeError

CSA_LAYERS, HCA_LAYERS, SWA_LAYERS = (2, 5), (3, 8), (1,)


# --- the object


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (
            KVCacheManager,
            "config, schedule, max_concurrent_requests, max_context_tokens=1000000, "
            "num_blocks_per_csa_layer=None, num_blocks_per_hca_layer=None, device='cuda'",
        ),
        (KVCacheManager.admit_request, "self"),
        (KVCacheManager.release_request, "self, slot"),
        (KVCacheManager.allocate_block, "self, layer_idx, request_slot"),
        (KVCacheManager.acquire, "self, layer_idx, request_slots, positions, request_ids"),
        (KVCacheManager.memory_bytes, "self"),
        (LayerCacheHandle.gather_compressed_kv, "self, topk_indices, out=None, mask=None"),
        (LayerCacheHandle.gather_all_compressed_kv, "self, out=None, lens=None"),
        (LayerCacheHandle.gather_swa_kv, "self, out=None, lens=None"),
    ],
)
def test_argument_names_their_order_and_defaults_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)) == wanted
    assert pagoda.compat.KVCacheManager is KVCacheManager


def test_attributes_are_those_of_the_contract(device: str) -> None:
    config = tiny()
    manager = manager_of(device, config)
    assert manager.config is config
    assert manager.schedule == SCHEDULE
    assert (manager.max_concurrent_requests, manager.max_blocks_per_request) == (4, 5)
    assert torch.device(manager.device).type == device
    for by_layer in (
        manager.schemas,
        manager.state_pools,
        manager.paged_pools,
        manager.allocators,
        manager.block_tables,
        manager.block_lens,
    ):
        assert tuple(by_layer) == LAYERS
    for layer in LAYERS:
        assert manager.schemas[layer].layer_idx == layer
        assert isinstance(manager.state_pools[layer], StateCachePool)
        assert manager.state_pools[layer].schema is manager.schemas[layer]
    for layer in SWA_LAYERS:
        assert manager.paged_pools[layer] is manager.allocators[layer] is None
        assert manager.block_tables[layer] is manager.block_lens[layer] is None
    for layer in (*CSA_LAYERS, *HCA_LAYERS):
        pool, table, lens = (
            it[layer] for it in (manager.paged_pools, manager.block_tables, manager.block_lens)
        )
        assert isinstance(pool, PagedKVPool)
        assert pool.schema is manager.schemas[layer]
        assert pool.num_blocks == (12 if layer in CSA_LAYERS else 9)
        assert (tuple(table.shape), table.dtype) == ((5, 5), torch.int32)
        assert table.unique().tolist() == [-1]
        assert (tuple(lens.shape), lens.dtype) == ((5,), torch.int32)
        assert lens.unique().tolist() == [0]
    manager.check()


def test_layers_of_a_kind_share_ids_an_allocator_and_a_table_but_no_memory(device: str) -> None:
    manager = manager_of(device)
    for first, second in (CSA_LAYERS, HCA_LAYERS):
        assert manager.allocators[first] is manager.allocators[second]
        assert manager.block_tables[first] is manager.block_tables[second]
        assert manager.block_lens[first] is manager.block_lens[second]
    assert manager.allocators[2] is not manager.allocators[3]
    assert manager.block_tables[2] is not manager.block_tables[3]
    begins = {tensor.data_ptr() for tensor in tensors_of(manager)}
    shared = 2 * 2  # the table and the lengths of either group, seen from two layers
    assert len(begins) == len(tensors_of(manager)) - shared


def test_without_numbers_of_blocks_every_request_fits_at_its_longest(device: str) -> None:
    manager = manager_of(
        device, max_context_tokens=33, num_blocks_per_csa_layer=None, num_blocks_per_hca_layer=None
    )
    assert manager.max_blocks_per_request == 3
    for ids in free_lists(manager).values():
        assert ids is None or ids.num_ids == 4 * 3
    for _ in range(4):
        row = manager.admit_request()
        for layer in (2, 3):
            for _ in range(3):
                manager.allocate_block(layer, row)
    manager.check()


def test_memory_bytes_counts_pools_and_tables(device: str) -> None:
    manager = manager_of(device)
    # An entry has 12 B of fp8, 4 × 2 B and 8 B of scales; a key 8 B and 4 B. A page is a multiple of 20 B.
    csa_block = -(-4 * 28 // 20) * 20 + 4 * 12
    hca_block = -(-28 // 20) * 20
    window = 8 * (28 + 4)
    csa_row = window + 2 * 8 * (2 * 16 + 2 * 8) * 4
    hca_row = window + 2 * 16 * 16 * 4
    wanted = 2 * 13 * csa_block + 2 * 10 * hca_block + 5 * (window + 2 * csa_row + 2 * hca_row)
    wanted += 2 * 4 * (5 * 5 + 5)  # two tables of 5 rows of 5 blocks, and their lengths
    assert manager.memory_bytes() == wanted
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(manager)}
    assert sum(held.values()) == wanted


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("max_concurrent_requests", bad) for bad in (0, -1, 1.0, "4", None)],
        *[("max_context_tokens", bad) for bad in (0, -1, 1.0, "64", None)],
        *[("num_blocks_per_csa_layer", bad) for bad in (-1, 1.0, "4", 2**31)],
        *[("num_blocks_per_hca_layer", bad) for bad in (-1, 1.0, "4", 2**31)],
    ],
)
def test_a_manager_that_cannot_be_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError) as error:
        manager_of("cpu", **{name: bad})
    assert name in str(error.value) or bad == 2**31


def test_tables_of_more_than_2_31_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds 2\\^31 places"):
        manager_of("cpu", max_context_tokens=2**33)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device"):
        manager_of("nowhere")


def test_a_model_of_windows_alone_needs_no_blocks(device: str) -> None:
    manager = manager_of(device, schedule=[LayerSpec(0, SWA), LayerSpec(1, SWA)])
    row = manager.admit_request()
    with pytest.raises(ArgumentError, match="layer 0 is SWA: it has no paged pool"):
        manager.allocate_block(0, row)
    manager.release_request(row)
    manager.check()


# --- rows


def test_rows_are_1_to_n_lowest_first(device: str) -> None:
    manager = manager_of(device)
    assert [manager.admit_request() for _ in range(4)] == [1, 2, 3, 4]
    manager.release_request(3)
    manager.release_request(2)
    assert manager.admit_request() == 2
    manager.check()


def test_all_rows_taken_is_a_typed_error_that_changes_nothing(device: str) -> None:
    manager = manager_of(device)
    for _ in range(4):
        manager.admit_request()
    before = observe(manager)
    with pytest.raises(CapacityError) as error:
        manager.admit_request()
    assert (error.value.wanted, error.value.free, error.value.total) == (1, 0, 4)
    assert observe(manager) == before


@pytest.mark.parametrize("slot", [0, -1, 2, 4, 5, 2**31, 2**70, 1.0, "1", None, [1]])
def test_only_a_running_row_can_be_released_or_given_blocks(slot: Any) -> None:
    manager = manager_of("cpu")
    manager.admit_request()
    manager.admit_request()
    manager.release_request(2)
    before = observe(manager)
    for call in (lambda: manager.release_request(slot), lambda: manager.allocate_block(2, slot)):
        with pytest.raises(UsageError) as error:
            call()
        if isinstance(slot, int):
            assert isinstance(error.value, NotHeldError if 1 <= slot <= 4 else OutOfRangeError)
        assert observe(manager) == before
    manager.check()


def test_release_gives_back_the_row_and_all_its_blocks_and_resets_its_state(device: str) -> None:
    manager = manager_of(device)
    first, second = manager.admit_request(), manager.admit_request()
    for _ in range(3):
        for layer in (2, 3):
            manager.allocate_block(layer, first)
            manager.allocate_block(layer, second)
    scramble(manager)
    others = [row for row in range(5) if row != first]
    before = [
        {n: part[others].clone() for n, part in parts_of(p).items()} for p in manager.state_pools.values()
    ]
    manager.release_request(first)
    for layer in (2, 3):
        assert free_lists(manager)[layer].num_held == 3
        assert manager.block_tables[layer][first].tolist() == [-1] * 5
        assert manager.block_tables[layer][second].tolist() == [2, 4, 6, -1, -1]
        assert manager.block_lens[layer].tolist() == [0, 0, 3, 0, 0]
    for pool, kept in zip(manager.state_pools.values(), before, strict=True):
        for name, part in parts_of(pool).items():
            begins = -float("inf") if name.endswith("scores") else -1 if name == "positions" else 0
            assert bool((part[first] == begins).all()), name
            assert torch.equal(part[others], kept[name])
    manager.check()
    assert manager.admit_request() == first


# --- blocks


def test_the_nth_call_of_any_layer_gives_the_group_s_nth_block(device: str) -> None:
    manager = manager_of(device)
    row, other = manager.admit_request(), manager.admit_request()
    assert manager.allocate_block(2, row) == 1
    assert manager.allocate_block(2, other) == 2
    assert manager.allocate_block(5, row) == 1
    assert manager.allocate_block(5, row) == 3
    assert manager.allocate_block(5, row) == 4
    assert manager.allocate_block(2, row) == 3
    assert manager.allocate_block(5, other) == 2
    assert manager.allocate_block(2, row) == 4
    assert free_lists(manager)[2].num_held == 4
    assert manager.block_tables[2].tolist()[1:3] == [[1, 3, 4, -1, -1], [2, -1, -1, -1, -1]]
    assert manager.block_lens[2].tolist() == [0, 3, 1, 0, 0]
    # The other group has ids of its own.
    assert manager.allocate_block(3, row) == 1
    assert manager.block_tables[3][row].tolist() == [1, -1, -1, -1, -1]
    manager.check()


def test_a_row_that_is_admitted_again_begins_with_no_block(device: str) -> None:
    manager = manager_of(device)
    row = manager.admit_request()
    for _ in range(2):
        manager.allocate_block(2, row)
    manager.allocate_block(5, row)
    manager.release_request(row)
    assert manager.admit_request() == row
    manager.allocate_block(2, 1)
    assert manager.allocate_block(5, row) == 1
    assert manager.block_lens[2].tolist() == [0, 1, 0, 0, 0]
    manager.check()


@pytest.mark.parametrize("layer", [0, 1, 4, 9, -1, 2**70, 2.0, "2", None, [2]])
def test_a_layer_without_blocks_is_refused_and_nothing_changes(layer: Any) -> None:
    manager = manager_of("cpu")
    row = manager.admit_request()
    before = observe(manager)
    with pytest.raises(ArgumentError, match="layer"):
        manager.allocate_block(layer, row)
    assert observe(manager) == before


@pytest.mark.parametrize("layer", [2, 5, 3, 8])
def test_a_full_table_is_a_typed_error_that_changes_nothing(device: str, layer: int) -> None:
    manager = manager_of(device)
    row = manager.admit_request()
    for _ in range(5):
        manager.allocate_block(layer, row)
    before = observe(manager)
    with pytest.raises(CapacityError, match=f"table of row {row}"):
        manager.allocate_block(layer, row)
    assert observe(manager) == before
    manager.check()


def test_out_of_blocks_is_a_typed_error_that_changes_nothing(device: str) -> None:
    manager = manager_of(device)
    rows = [manager.admit_request() for _ in range(3)]
    for row in rows[:2]:
        for _ in range(5):
            manager.allocate_block(2, row)
    for _ in range(2):
        manager.allocate_block(2, rows[2])
    before = observe(manager)
    with pytest.raises(CapacityError, match="csa blocks") as error:
        manager.allocate_block(2, rows[2])
    assert (error.value.wanted, error.value.free, error.value.total) == (1, 0, 12)
    assert observe(manager) == before
    # What another layer took already is there for this one.
    assert manager.allocate_block(5, rows[0]) == 1
    manager.release_request(rows[0])
    assert manager.allocate_block(2, rows[2]) == 1
    manager.check()


# --- handles


def tokens_on(device: str, *lists: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(ids, dtype=torch.int32, device=device) for ids in lists]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_handle_has_the_attributes_of_the_contract(device: str, layer: int) -> None:
    manager = manager_of(device)
    manager.admit_request()
    slots, positions, ids = tokens_on(device, [1, 0], [0, 1, 5], [0, 0, -1])
    handle = manager.acquire(layer, slots, positions, ids)
    assert handle.request_slots is slots
    assert handle.positions is positions
    assert handle.request_ids is ids
    assert handle.paged is manager.paged_pools[layer]
    assert handle.state is manager.state_pools[layer]
    assert handle.schema is manager.schemas[layer]
    assert handle.block_table is manager.block_tables[layer]
    assert handle.block_lens is manager.block_lens[layer]
    assert (handle.num_query_heads, handle.head_dim) == (3, 16)
    assert f"layer {layer}" in repr(handle)


def test_acquire_makes_nothing_of_tensors_that_are_there(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(device)
    manager.admit_request()
    given = tokens_on(device, [1], [0, 1], [0, 0])

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("a tensor was made")

    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refuse)
        for layer in LAYERS:
            manager.acquire(layer, *given)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: torch.tensor(ids).int().cpu(),
    ],
    ids=["list", "tuple", "int64", "int32", "host tensor"],
)
def test_acquire_takes_what_lies_on_the_host_too(device: str, form: Callable[[list[int]], Any]) -> None:
    manager = manager_of(device)
    for _ in range(2):
        manager.admit_request()
    handle = manager.acquire(2, form([2, 0, 1]), form([3, 4, 0, -1]), form([0, 0, 2, -1]))
    found = (handle.request_slots, handle.positions, handle.request_ids)
    assert [it.tolist() for it in found] == [[2, 0, 1], [3, 4, 0, -1], [0, 0, 2, -1]]
    assert {(it.dtype, it.device.type) for it in found} == {(torch.int32, device)}


@pytest.mark.parametrize(
    ("slots", "positions", "ids", "error"),
    [
        ([1], [0, 1], [0], ArgumentError),
        ([1, 1], [0, 0], [0, 1], ArgumentError),
        ([5], [0], [0], OutOfRangeError),
        ([-1], [0], [0], OutOfRangeError),
        ([3], [0], [0], NotHeldError),
        ([1], [0], [1], OutOfRangeError),
        ([1], [0], [-2], OutOfRangeError),
        ([1], [-2], [0], OutOfRangeError),
        ([1], [2**31], [0], OutOfRangeError),
        ([1, 2], [0, 1, 1, 2], [0, 1, 0, 1], ArgumentError),
        ([1], [3, 3], [0, 0], ArgumentError),
        ([1], [3, 5], [0, 0], ArgumentError),
        ([1], [3, 2], [0, 0], ArgumentError),
        ([1], [3, -1, 4], [0, -1, 0], ArgumentError),
        ([1.0], [0], [0], ArgumentError),
        ("1", [0], [0], ArgumentError),
        (None, [0], [0], ArgumentError),
        ([1], [[0], [1, 2]], [0], ArgumentError),
        (torch.tensor([1]), [0], [0], ArgumentError),
        (torch.tensor([1.0]), [0], [0], ArgumentError),
        (torch.tensor([[1]], dtype=torch.int32), [0], [0], ArgumentError),
        (torch.tensor([1, 2, 1], dtype=torch.int32)[::2], [0], [0], ArgumentError),
        (torch.tensor([1], dtype=torch.int32, device="meta"), [0], [0], ArgumentError),
        ([1], torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), ArgumentError),
        ([1], torch.zeros(2, dtype=torch.int16), [0, 0], ArgumentError),
    ],
    ids=str,
)
def test_tokens_that_are_none_are_refused(
    slots: Any, positions: Any, ids: Any, error: type[Exception]
) -> None:
    manager = manager_of("cpu")
    for _ in range(2):
        manager.admit_request()
    with pytest.raises(error):
        manager.acquire(2, slots, positions, ids)


def test_a_handle_of_another_layer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="there is no layer '4'"):
        manager_of("cpu").acquire(4, [], [], [])


# --- what is not read, made or moved


def live_a_while(manager: KVCacheManager, device: str) -> None:
    rows = [manager.admit_request() for _ in range(3)]
    for row in rows:
        for layer in (*CSA_LAYERS, *HCA_LAYERS):
            manager.allocate_block(layer, row)
    manager.release_request(rows[1])
    manager.admit_request()
    for row in rows:
        manager.release_request(row)


def test_rows_and_blocks_are_managed_without_reading_a_tensor(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(device)
    given = tokens_on(device, [1], [0], [0])
    live_a_while(manager, device)
    # On a CPU the kernel that writes tables is plain torch, which may look where it writes.
    monkeypatch.setattr(kernels, "set_table", lambda *_: None)
    with nothing_is_read(monkeypatch):
        live_a_while(manager, device)
        for layer in LAYERS:
            manager.acquire(layer, *given)


def test_no_call_changes_the_address_of_a_tensor(device: str) -> None:
    manager = manager_of(device)
    before = [tensor.data_ptr() for tensor in tensors_of(manager)]
    for _ in range(3):
        live_a_while(manager, device)
    assert [tensor.data_ptr() for tensor in tensors_of(manager)] == before
    manager.check()


def test_check_finds_what_moved(device: str) -> None:
    manager = manager_of(device)
    pools = manager._pools
    for tensor in (
        pools.states.tensors["window"],
        pools["csa"].pages["compressed"][1],
        pools.tables["hca"],
        manager._marks,
    ):
        home = tensor.data
        tensor.data = tensor.clone()
        with pytest.raises(InvariantError):
            manager.check()
        tensor.data = home
        manager.check()


def test_check_finds_blocks_that_a_row_does_not_have() -> None:
    """Which blocks are free, and whose the others are, is checked by the manager behind the face."""
    manager = manager_of("cpu")
    row, other = manager.admit_request(), manager.admit_request()
    manager.allocate_block(2, row)
    manager.check()
    manager._shown["csa"][other] = 1
    with pytest.raises(InvariantError, match="the device shows csa blocks"):
        manager.check()
    manager._shown["csa"][other] = 0
    manager.check()
    manager._taken[5][row] = 2
    with pytest.raises(InvariantError, match="layer 5 took blocks"):
        manager.check()
    manager._taken[5][row] = 0
    manager._manager.release(row)
    with pytest.raises(InvariantError, match="18"):
        manager.check()


@pytest.mark.gpu
def test_rows_and_blocks_are_managed_between_captures_and_handles_made_inside() -> None:
    manager = manager_of("cuda")
    row = manager.admit_request()
    manager.allocate_block(2, row)
    given = tokens_on("cuda", [row], [0], [0])
    before = observe(manager)
    with captured():
        for call in (
            lambda: manager.admit_request(),
            lambda: manager.release_request(row),
            lambda: manager.allocate_block(2, row),
            lambda: manager.acquire(2, [row], [0], [0]),
        ):
            with pytest.raises(CaptureError):
                call()
        for layer in LAYERS:
            manager.acquire(layer, *given)
    assert observe(manager) == before
    manager.check()


# --- a failed call changes nothing, whatever made it fail


def blowing_up(monkeypatch: pytest.MonkeyPatch, where: str) -> Any:
    """Patches that make one step of an allocation fail, with what it fails."""
    error = torch.OutOfMemoryError("no memory") if where == "out of memory" else KeyboardInterrupt("Ctrl-C")
    patch, write, calls = monkeypatch.context(), kernels.set_table, []

    def once(*args: Any) -> None:
        calls.append(1)
        if len(calls) > 1 or where == "after the write":  # what is put back is written in peace
            write(*args)
        if len(calls) == 1:
            raise error

    patch.__enter__().setattr(kernels, "set_table", once)
    return patch, type(error)


@pytest.mark.parametrize("where", ["out of memory", "write", "after the write"])
def test_an_allocation_that_is_interrupted_has_changed_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    manager = manager_of(device)
    row, other = manager.admit_request(), manager.admit_request()
    for _ in range(2):
        manager.allocate_block(2, row)
    before = observe(manager)
    patch, error = blowing_up(monkeypatch, where)
    try:
        with pytest.raises(error):
            manager.allocate_block(2, row)
    finally:
        patch.__exit__(None, None, None)
    assert observe(manager) == before
    manager.check()
    assert manager.allocate_block(2, other) == 3
    assert manager.allocate_block(2, row) == 4
    assert manager.block_tables[2][row].tolist() == [1, 2, 4, -1, -1]
    manager.check()


def test_a_table_that_an_interrupt_left_behind_is_made_good_by_the_next_call(device: str) -> None:
    """As if Ctrl-C came between the host's table and the device's: nothing could undo it there."""
    manager = manager_of(device)
    row = manager.admit_request()
    manager.allocate_block(2, row)
    manager._manager.extend(row, "csa")
    manager.check()
    assert manager.allocate_block(2, row) == 2
    assert manager.block_tables[2][row].tolist() == [1, 2, -1, -1, -1]
    assert manager.block_lens[2].tolist() == [0, 2, 0, 0, 0]
    manager.check()


@pytest.mark.parametrize("step", range(1, 5))
def test_a_release_that_is_interrupted_can_be_made_again(
    device: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    manager = manager_of(device)
    row = manager.admit_request()
    for layer in (2, 3):
        manager.allocate_block(layer, row)
    steps = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == step:
                raise KeyboardInterrupt
            return call(*args)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "fill_rows", counted(kernels.fill_rows))
        for name in ("plan", "pass_fence", "release"):
            patch.setattr(manager._manager, name, counted(getattr(manager._manager, name)))
        with pytest.raises(KeyboardInterrupt):
            manager.release_request(row)
    manager.check()
    manager.release_request(row)
    assert all(ids is None or ids.num_held == 0 for ids in free_lists(manager).values())
    for layer in (2, 3):
        assert manager.block_tables[layer].unique().tolist() == [-1]
        assert manager.block_lens[layer].unique().tolist() == [0]
    manager.check()


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Makes a call, with Ctrl-C at that line of those of our folder that it runs; whether it came to it."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if "compat/hybrid" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_of_an_allocation_loses_nothing() -> None:
    line, was_interrupted = 0, True
    while was_interrupted:
        line += 1
        manager = manager_of("cpu")
        row, other = manager.admit_request(), manager.admit_request()
        manager.allocate_block(2, row)
        was_interrupted = interrupted_at(
            line, lambda manager=manager, row=row: manager.allocate_block(2, row)
        )
        manager.check()
        blocks = [manager.allocate_block(5, row) for _ in range(2)]
        if was_interrupted:  # at the very last line the layer has its block, and asks for one more
            again = manager.allocate_block(2, row)
            blocks += [again] if again not in blocks else []
        assert blocks == [1, 2, 3][: len(blocks)]
        assert manager.block_tables[2][row].tolist() == [*blocks, *[-1] * (5 - len(blocks))]
        assert int(manager.block_lens[2][row]) == len(blocks)
        manager.allocate_block(2, other)
        assert free_lists(manager)[2].num_held == len(blocks) + 1
        manager.check()
        manager.release_request(row)
        assert free_lists(manager)[2].num_held == 1
        manager.check()
    assert line > 20


def test_ctrl_c_at_any_line_of_a_release_loses_nothing() -> None:
    line, was_interrupted = 0, True
    while was_interrupted:
        line += 1
        manager = manager_of("cpu")
        row, other = manager.admit_request(), manager.admit_request()
        for layer in (2, 2, 3):
            manager.allocate_block(layer, row)
        manager.allocate_block(2, other)
        was_interrupted = interrupted_at(line, lambda manager=manager, row=row: manager.release_request(row))
        manager.check()
        runs_on = is_running(manager, row)
        assert was_interrupted or not runs_on
        # Others come and go meanwhile, and get nothing that somebody still has.
        manager.release_request(other)
        manager.check()
        others = [manager.admit_request(), manager.admit_request()]
        for _ in range(5):
            manager.allocate_block(2, others[0])
        manager.check()
        if runs_on:
            if line % 2:  # the row goes on a little, before somebody releases it at last
                manager.allocate_block(2, row)
                manager.check()
            manager.release_request(row)
        manager.check()
        assert free_lists(manager)[2].num_held == 5
        assert free_lists(manager)[2].num_quarantined == free_lists(manager)[3].num_held == 0
        assert int(manager.block_lens[2].sum()) == 5
        assert len({*manager.block_tables[2][others[0]].tolist()}) == 5
    assert line > 20


# --- several threads


def test_threads_never_share_a_row_or_a_block(device: str) -> None:
    manager = manager_of(device, max_concurrent_requests=8, num_blocks_per_csa_layer=40)
    wrong: list[Any] = []
    owners: dict[int, int] = {}

    def work(me: int) -> None:
        try:
            for _ in range(25):
                row = manager.admit_request()
                blocks = [manager.allocate_block(2, row) for _ in range(4)]
                wrong.extend(block for block in blocks if owners.setdefault(block, me) != me)
                if [manager.allocate_block(5, row) for _ in range(4)] != blocks:
                    wrong.append("another layer got other blocks")
                for block in blocks:
                    owners.pop(block)
                manager.release_request(row)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    with quick_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    manager.check()
    assert free_lists(manager)[2].num_held == 0
    assert manager.block_tables[2].unique().tolist() == [-1]


# --- known defects of the public designs


class Careless:
    """A manager with the defects of public designs: nothing on the host, nothing checked, nothing reset."""

    def __init__(self, num_blocks: int | None = None, rows: int = 4, columns: int = 5) -> None:
        self.num_blocks = num_blocks or 40  # 0 is taken for "not given"
        self.free_blocks = list(range(1, self.num_blocks + 1))
        self.table = torch.full((rows + 1, columns), -1, dtype=torch.int32)
        self.lens = torch.zeros(rows + 1, dtype=torch.int32)
        self.is_taken = torch.zeros(rows + 1, dtype=torch.bool)
        self.state = torch.zeros(rows + 1, 3)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self.free_blocks)

    def admit_request(self) -> int:
        for row in range(1, len(self.is_taken)):  # a scan of a device tensor
            if not bool(self.is_taken[row]):
                self.is_taken[row] = True
                return row
        raise CapacityError("rows", 1, 0, len(self.is_taken) - 1)

    def release_request(self, slot: int) -> None:
        n = int(self.lens[slot])
        self.free_blocks += self.table[slot, :n].tolist()
        self.is_taken[slot] = False

    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        block = self.free_blocks.pop(0)
        at = int(self.lens[request_slot])
        if at == self.table.shape[1]:  # the block is gone
            raise CapacityError("table", 1, 0, at)
        self.table[request_slot, at] = block
        self.lens[request_slot] += 1
        return block


def num_held(manager: Any) -> int:
    return manager.num_held if isinstance(manager, Careless) else free_lists(manager)[2].num_held


def check_a_full_table_leaks_no_block(manager: Any) -> None:
    row = manager.admit_request()
    for _ in range(5):
        manager.allocate_block(2, row)
    for _ in range(3):
        with pytest.raises(CapacityError):
            manager.allocate_block(2, row)
    assert num_held(manager) == 5
    manager.release_request(row)
    assert num_held(manager) == 0


def test_defect_a_block_is_leaked_when_the_table_overflows(device: str) -> None:
    check_a_full_table_leaks_no_block(manager_of(device))
    with pytest.raises(FAILS):
        check_a_full_table_leaks_no_block(Careless())


def check_zero_blocks_are_none(make: Callable[[int], Any]) -> None:
    manager = make(0)
    row = manager.admit_request()
    with pytest.raises(CapacityError):
        manager.allocate_block(2, row)


def test_defect_an_explicit_0_is_taken_for_not_given(device: str) -> None:
    check_zero_blocks_are_none(lambda n: manager_of(device, num_blocks_per_csa_layer=n))
    with pytest.raises(FAILS):
        check_zero_blocks_are_none(Careless)
    manager = manager_of(device, num_blocks_per_csa_layer=0, num_blocks_per_hca_layer=0)
    row = manager.admit_request()
    for layer in (*CSA_LAYERS, *HCA_LAYERS):
        assert manager.paged_pools[layer].num_blocks == manager.allocators[layer].num_total_blocks == 0
        with pytest.raises(CapacityError) as error:
            manager.allocate_block(layer, row)
        assert (error.value.free, error.value.total) == (0, 0)
    manager.check()
    # One of them given, the other not.
    manager = manager_of(device, num_blocks_per_csa_layer=0, num_blocks_per_hca_layer=None)
    assert (manager.allocators[2].num_total_blocks, manager.allocators[3].num_total_blocks) == (0, 20)


def check_a_row_is_released_once(manager: Any) -> None:
    row = manager.admit_request()
    manager.allocate_block(2, row)
    manager.release_request(row)
    with pytest.raises(PagodaError):
        manager.release_request(row)
    first, second = manager.admit_request(), manager.admit_request()
    assert manager.allocate_block(2, first) != manager.allocate_block(2, second)


def test_defect_a_double_free_goes_unnoticed(device: str) -> None:
    check_a_row_is_released_once(manager_of(device))
    with pytest.raises(FAILS):
        check_a_row_is_released_once(Careless())


def check_admission_reads_no_tensor(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_is_read(monkeypatch):
        assert [manager.admit_request() for _ in range(3)] == [1, 2, 3]


def test_defect_admission_scans_a_device_tensor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_admission_reads_no_tensor(manager_of(device), monkeypatch)
    with pytest.raises(FAILS):
        check_admission_reads_no_tensor(Careless(), monkeypatch)


def check_a_row_begins_clean(manager: Any, table: torch.Tensor, states: list[torch.Tensor]) -> None:
    begins = [state[1].clone() for state in states]
    row = manager.admit_request()
    for _ in range(3):
        manager.allocate_block(2, row)
    for state in states:
        state[row] = 7
    manager.release_request(row)
    assert manager.admit_request() == row
    manager.allocate_block(2, row)
    assert table[row].tolist() == [1, -1, -1, -1, -1]
    assert all(torch.equal(state[row], begin) for state, begin in zip(states, begins, strict=True))


def test_defect_stale_rows_are_visible_to_the_next_request_of_a_slot(device: str) -> None:
    manager = manager_of(device)
    states = [part for pool in manager.state_pools.values() for part in parts_of(pool).values()]
    check_a_row_begins_clean(manager, manager.block_tables[2], states)
    careless = Careless()
    with pytest.raises(FAILS):
        check_a_row_begins_clean(careless, careless.table, [careless.state])


def window_of_a_new_request(manager: KVCacheManager, device: str) -> torch.Tensor:
    """One request fills its window, ends, and the next one of the row writes a token."""
    row = manager.admit_request()
    handle = manager.acquire(1, [row], list(range(8)), [0] * 8)
    handle.write_swa(torch.full((8, 16), 5.0, device=device))
    manager.release_request(row)
    assert manager.admit_request() == row
    handle = manager.acquire(1, [row], [0], [0])
    handle.write_swa(torch.ones(1, 16, device=device))
    out, lens = handle.gather_swa_kv()
    assert lens.tolist() == [1]
    return out[0]


def test_the_window_of_a_new_request_holds_nothing_of_the_one_before(device: str) -> None:
    wanted = torch.zeros(8, 16, device=device)
    wanted[0] = 1
    assert torch.equal(window_of_a_new_request(manager_of(device, exact()), device), wanted)


def test_defect_valid_lengths_come_from_blocks(device: str) -> None:
    """Entries after L tokens are L // m, however many blocks were allocated ahead."""
    manager = manager_of(device, exact())
    row = manager.admit_request()
    for _ in range(3):
        for layer in (2, 3):
            manager.allocate_block(layer, row)
    for length in (1, 3, 4, 15, 16, 17, 31, 32, 33):
        for layer, ratio in ((2, 4), (3, 16)):
            handle = manager.acquire(layer, [row], [length - 1], [0])
            _, lens = handle.gather_all_compressed_kv()
            assert lens.tolist() == [length // ratio]
            # What a design that counts blocks would say.
            from_blocks = int(manager.block_lens[layer][row]) * manager.schemas[layer].entries_per_block
            assert lens.tolist() != [from_blocks]


def test_kinds_of_the_schedule_are_those_of_the_layers() -> None:
    manager = manager_of("cpu")
    assert [manager.schemas[layer].attn_type for layer in LAYERS] == [SWA, CSA, HCA, CSA, HCA]


def test_a_layer_s_state_is_reset_alone(device: str) -> None:
    """Layers of a kind lie in one pool: a reset of one leaves its neighbour as it is."""
    manager = manager_of(device)
    pools = [manager.state_pools[layer] for layer in CSA_LAYERS]
    for pool in pools:
        pool.positions.fill_(7)
        pool.main_scores.fill_(2.0)
    pools[1].reset_slot(3)
    rows = torch.tensor([0, 1, 2, 4], device=device)
    assert all(part.eq(full).all() for part, full in ((pools[0].positions, 7), (pools[0].main_scores, 2)))
    assert pools[1].positions[rows].eq(7).all()
    assert pools[1].main_scores[rows].eq(2).all()
    assert pools[1].positions[3].eq(-1).all()
    assert pools[1].main_scores[3].eq(-torch.inf).all()


# --- allocators, rows that run, and rows that are clean


def test_allocators_acquire_and_release_as_block_allocators(device: str) -> None:
    manager = manager_of(device)
    row = manager.admit_request()
    first = manager.allocate_block(2, row)
    blocks = manager.allocators[2].acquire(3)
    assert (blocks.dtype, blocks.device.type, blocks.tolist()) == (torch.int32, device, [2, 3, 4])
    assert manager.allocators[2].num_free == manager.allocators[5].num_free == 12 - 4
    assert (manager.allocators[2].num_total_blocks, manager.allocators[2].device) == (12, manager.device)
    manager.check()
    with pytest.raises(CapacityError) as error:
        manager.allocators[2].acquire(9)
    assert (error.value.wanted, error.value.free, error.value.total) == (9, 8, 12)
    assert manager.allocate_block(2, row) == 5  # nobody's but the request's
    for bad in ([first], [2, first], [7], [2, 2], [0], [13]):
        with pytest.raises(IdError, match="ids"):
            manager.allocators[5].release(bad)
    assert manager.allocators[2].num_free == 7
    manager.release_request(row)
    manager.check()
    manager.allocators[5].release(blocks)
    assert manager.allocators[2].num_free == 12
    with pytest.raises(IdError):
        manager.allocators[2].release(blocks)
    manager.check()


def test_request_slot_map_marks_the_rows_that_run(device: str) -> None:
    manager = manager_of(device)
    slots = manager.request_slot_map
    assert (slots.dtype, slots.device, slots.shape) == (torch.int32, manager.device, (5,))
    assert slots.tolist() == [0, 0, 0, 0, 0]
    one, two = manager.admit_request(), manager.admit_request()
    assert slots.tolist() == [0, 1, 1, 0, 0]
    manager.release_request(one)
    assert slots.tolist() == [0, 0, 1, 0, 0]
    manager.release_request(two)
    assert (manager.request_slot_map is slots, slots.tolist()) == (True, [0, 0, 0, 0, 0])


def test_a_row_is_clean_at_admission_whatever_a_stale_handle_wrote(device: str) -> None:
    fresh = manager_of(device)
    fresh.admit_request()
    wanted = observe(fresh)
    manager = manager_of(device)
    row = manager.admit_request()
    tokens = [torch.tensor(ids, dtype=torch.int32, device=manager.device) for ids in ([row], [0, 1], [0, 0])]
    stale = manager.acquire(2, *tokens)
    manager.release_request(row)
    stale.write_swa(torch.ones(2, 16, device=manager.device))
    stale.compress(
        *(torch.ones(2, stale.state.main_values.shape[2], device=manager.device) for _ in range(2))
    )
    assert stale.state.positions[row].tolist()[:2] == [0, 1]
    assert manager.admit_request() == row
    assert observe(manager) == wanted
    manager.check()
