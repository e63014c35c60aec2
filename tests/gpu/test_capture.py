"""Captured graphs: what may be captured gives the eager result, what may not raises and changes nothing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import pagoda
from pagoda import StatePool, TokenPool
from pagoda.errors import CaptureError
from pagoda.kernels import _fused as fused
from pagoda.pools import DeviceTable, Staging, StateSpec

pytestmark = pytest.mark.gpu


def pool_of(dtype: torch.dtype = torch.bfloat16) -> TokenPool:
    scale = [0.37, 2.0] if dtype == torch.float8_e4m3fn else None
    return TokenPool(32, 4, 2, (4, 32), (2, 16), dtype, "cuda", k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_replays_store_through_indices_that_were_changed_in_place(dtype: torch.dtype, index: torch.dtype):
    captured, eager = pool_of(dtype), pool_of(dtype)
    slots = torch.zeros(16, dtype=index, device="cuda")
    k, v = torch.zeros(16, 4, 32, device="cuda"), torch.zeros(16, 2, 16, device="cuda")
    captured.store(0, slots, k, v)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(2):
            captured.store(layer, slots, k, v)
    for step in range(5):
        slots.copy_(torch.randperm(132, device="cuda")[:16])
        slots[step:] = 0  # a batch of fewer tokens is padded with slot 0
        k.normal_()
        v.normal_()
        graph.replay()
        for layer in range(2):
            eager.store(layer, slots[:step], k[:step], v[:step])
        for mine, theirs in zip(
            (*captured.k_buffer, *captured.v_buffer), (*eager.k_buffer, *eager.v_buffer), strict=True
        ):
            assert torch.equal(
                mine[4:].view(torch.uint8), theirs[4:].view(torch.uint8)
            )  # page 0 is anybody's


def test_a_call_of_any_size_compiles_for_captures_of_any_other():
    def variants() -> int:
        return sum(
            len(caches[0])
            for kernel in (fused._store, fused._move_pages)
            for caches in kernel.device_caches.values()
        )

    pool = pool_of()
    many = torch.arange(4, 20, device="cuda", dtype=torch.int32)
    k, v = torch.randn(16, 4, 32, device="cuda"), torch.randn(16, 2, 16, device="cuda")
    pool.store(0, many, k, v)
    out = pool.pack(many[:8])
    compiled = variants()
    assert compiled > 0
    for n in (1, 2, 3, 8):
        graph = torch.cuda.CUDAGraph()
        slots = many[1 : n + 1]  # not aligned to 16 bytes either
        with torch.cuda.graph(graph):
            pool.store(1, slots, k[:n], v[:n])
            pool.pack(slots, out[:n])
        graph.replay()
        assert torch.equal(pool.k_buffer[1][slots], k[:n].bfloat16())
    assert variants() == compiled


def test_pack_and_unpack_are_captured_with_ids_changed_in_place():
    pool = pool_of()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    ids = torch.tensor([1, 2], device="cuda")
    out = pool.pack(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.pack(ids, out)
    ids.copy_(torch.tensor([30, 7]))
    graph.replay()
    assert torch.equal(out, pool.pack([30, 7]))


def test_states_are_reset_and_copied_in_a_graph():
    pool = StatePool(4, 2, {"s": StateSpec((3,), torch.float32)}, "cuda")
    source, target, gone = (torch.tensor([row], device="cuda") for row in (1, 2, 3))
    pool.copy(source, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.copy(source, target)
        pool.reset(gone)
    pool.tensors["s"].normal_()
    target.fill_(4)
    before = pool.tensors["s"].clone()
    graph.replay()
    expected = before.clone()
    expected[:, 4], expected[:, 3] = before[:, 1], 0
    assert torch.equal(pool.tensors["s"], expected)


def test_what_makes_a_device_tensor_raises_in_a_capture_and_changes_nothing():
    pool, table, staging = pool_of(), DeviceTable(4, 4, "cuda"), Staging("cuda")
    states = StatePool(4, 2, {"s": StateSpec((3,), torch.float32)}, "cuda")
    slots, blocks = pagoda.compat.TokenToKVPoolAllocator(64, page_size=4), pagoda.compat.BlockAllocator(8)
    rows = pagoda.compat.ReqToTokenPool(4, 8)
    held = slots.alloc(8)
    assert held is not None
    k, v = torch.ones(1, 128, device="cuda"), torch.ones(1, 32, device="cuda")
    calls: list[Callable[[], object]] = [
        lambda: slots.alloc(4),
        lambda: slots.alloc_extend([0], [4], [0]),
        lambda: slots.free(held),
        lambda: blocks.acquire(1),
        lambda: blocks.release(torch.tensor([1], device="cuda")),
        lambda: rows.write((1, slice(0, 1)), [3]),
        lambda: table.write(np.array([4]), np.array([1])),
        lambda: staging.send(np.array([1])),
        lambda: states.reset([1]),
        lambda: pool.store(0, [4], k, v),
        lambda: pool.pack(torch.tensor([1], device="cuda")),
    ]
    before = (slots.available_size(), blocks.num_free)
    graph = torch.cuda.CUDAGraph()
    raised = []
    some = torch.tensor([1], device="cuda")
    calls[4] = lambda: blocks.release(some)
    calls[10] = lambda: pool.pack(some)
    with torch.cuda.graph(graph):
        k + 1  # a graph must hold something
        for number, call in enumerate(calls):
            try:
                call()
            except CaptureError:
                raised.append(number)
    assert raised == list(range(len(calls)))
    assert (slots.available_size(), blocks.num_free) == before
    assert blocks.acquire(1).tolist() == [1]
    slots.free(held)
    assert slots.available_size() == 64
    # Host ids need no device, captured or not.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        k + 1
        got = slots.alloc_host(4)
        assert got is not None
        slots.free(got)
        assert blocks.acquire_host(1).tolist() == [2]
