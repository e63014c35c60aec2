"""TokenPool.gather on a GPU: one launch, nothing waited for, any stream, past 2^31 elements."""

import warnings

import numpy as np
import pytest
import torch

from bench.measure import no_waiting
from pagoda import TokenPool
from pagoda.errors import CaptureError
from pagoda.kernels import _gather_fused as gather_fused

pytestmark = pytest.mark.gpu


def pool_of(layers: int = 3, k_shape: tuple[int, int] = (4, 32)) -> TokenPool:
    pool = TokenPool(32, 4, layers, k_shape, (2, 16), torch.bfloat16, "cuda")
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    return pool


def outputs(pool: TokenPool, n: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    assert pool.v_shape is not None
    k, v = (
        [torch.full((n, *shape), 7.0, dtype=pool.dtype, device="cuda") for _ in range(pool.num_layers)]
        for shape in (pool.k_shape, pool.v_shape)
    )
    return k, v


def judge(pool: TokenPool, slots: list[int], outs: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    for buffers, filled in zip((pool.k_buffer, pool.v_buffer), outs, strict=True):
        for buffer, out in zip(buffers, filled, strict=True):
            host = buffer.cpu()
            rows = [host[s] if s >= 0 else torch.zeros_like(host[0]) for s in slots]
            assert torch.equal(out.cpu(), torch.stack(rows))


def test_nothing_waits_for_the_device():
    pool, slots = pool_of(), [5, -1, *range(20, 60)]
    on_device = torch.tensor(slots, device="cuda")
    given = (slots, np.array(slots), torch.tensor(slots), on_device, on_device.int())
    outs = [outputs(pool, len(slots)) for _ in given]
    with no_waiting():
        for each, out in zip(given, outs, strict=True):
            pool.gather(each, *out)
    for out in outs:
        judge(pool, slots, out)


def test_one_copy_and_one_launch():
    from torch.profiler import ProfilerActivity, profile

    pool, slots = pool_of(), list(range(4, 40))
    outs = outputs(pool, len(slots))
    pool.gather(slots, *outs)  # compiles, pins
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler tells of its options
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            pool.gather(slots, *outs)
            torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler may not look at this device")
    assert sorted("HtoD" if "HtoD" in name else name for name in names) == ["HtoD", "_gather"]


def test_calls_follow_what_their_stream_did_before():
    pool, slots = pool_of(), list(range(8, 40))
    outs = outputs(pool, len(slots))
    pool.gather(slots, *outs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.neg_()
        pool.gather(slots, *outs)
        copies = [[out.clone() for out in side] for side in outs]
        for side in outs:
            for out in side:
                out.zero_()
    stream.synchronize()
    judge(pool, slots, (copies[0], copies[1]))


def test_a_capture_is_refused_and_writes_nothing():
    pool = pool_of()
    outs, slots = outputs(pool, 2), torch.tensor([4, 5], device="cuda")
    pool.gather(slots, *outs)
    for side in outs:
        for out in side:
            out.fill_(7.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots + 1  # a graph must hold something
        for given in (slots, [4, 5]):
            with pytest.raises(CaptureError):
                pool.gather(given, *outs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((out == 7).all()) for side in outs for out in side)


def test_sizes_of_batches_and_pools_compile_nothing_new():
    def variants() -> int:
        return sum(len(caches[0]) for caches in gather_fused._gather.device_caches.values())

    pool = pool_of()
    pool.gather(torch.arange(4, 20, device="cuda"), *outputs(pool, 16))
    compiled = variants()
    assert compiled > 0
    other = pool_of(layers=1)
    for n in (1, 2, 3, 16, 97):
        for slots in (torch.arange(4, 4 + n).tolist(), torch.arange(3, 4 + n, device="cuda")[1:]):
            for each in (pool, other):
                outs = outputs(each, n)
                each.gather(slots, *outs)
                judge(each, list(range(4, 4 + n)), outs)
    assert variants() == compiled


def test_buffers_past_the_border_of_32_bits():
    """2^31 elements and more in the pool, and in the output."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    num_pages, width = 2**17 + 7, 8 * 128
    pool = TokenPool(num_pages, 16, 1, (8, 128), None, torch.bfloat16, "cuda")
    border = 2**31 // width
    some = [16, border - 1, border, pool.num_slots - 1]
    for slot in some:
        pool.k_buffer[0][slot].normal_()
    out = torch.empty(pool.num_slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    backwards = torch.arange(pool.num_slots - 1, -1, -1, device="cuda", dtype=torch.int32)
    pool.gather(backwards, [out])
    for slot in some:
        assert torch.equal(out[pool.num_slots - 1 - slot], pool.k_buffer[0][slot])
    assert int(out.view(pool.num_slots, -1).any(dim=1).sum()) == len(some)
