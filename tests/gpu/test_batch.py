"""Batches on a GPU: as on the host, in fixed memory that graphs read; nothing is made and nothing waits."""

from typing import Any

import numpy as np
import pytest
import torch

from bench.measure import no_waiting
from pagoda.attention import paged
from pagoda.errors import CaptureError
from pagoda.layout import FullAttention, Layout, WindowAttention
from pagoda.manager import Delta
from pagoda.pools import Batch, Pools
from unit.deltas import delta_of, lists_for

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 400_000_000  # about 0.2 s
NUM_ROWS, MAX_TOKENS, PAGE, CAPACITY = 16, 20 * 64, 64, 400
SHARED = ("rows", "lengths", "query_start_loc", "positions", "batch_indices", "extends")
PER_GROUP = ("slot_mapping", "page_table", "indptr", "indices", "last_page_len", "begins")
WORK = ("runs", "tasks", "splits")


def layout_of(*windows: int | None) -> Layout:
    """A group per window: sizes differ, because layers that are alike share a group."""
    layers: list[Any] = []
    for number, window in enumerate(windows):
        sizes = {"kv_heads": 2, "k_dim": 16, "v_dim": 16 + number}
        layers.append(FullAttention(**sizes) if window is None else WindowAttention(**sizes, window=window))
    return Layout(layers, PAGE)


def pools_of(layout: Layout, device: str = "cuda", **more: Any) -> Pools:
    capacity = {group.name: CAPACITY for group in layout.paged_groups}
    return Pools(
        layout, capacity, num_rows=NUM_ROWS, max_tokens=MAX_TOKENS, max_step_tokens=64, device=device, **more
    )


def some_step(step: int, pools: Pools) -> Delta:
    """Some rows with some tokens each, and writes everywhere in the tables."""
    random, num_groups = np.random.default_rng(step), len(pools.pools)
    max_pages = MAX_TOKENS // PAGE
    num_places = num_groups * (NUM_ROWS + 1) * max_pages
    row_of = np.arange(num_places) // max_pages % (NUM_ROWS + 1)
    places = random.permutation(np.flatnonzero(row_of))[: 1 if step % 3 == 0 else num_places // 2]
    num_rows = int(random.integers(0 if step % 4 == 0 else 1, 9))
    lengths = random.integers(0, MAX_TOKENS + 1, num_rows)
    return delta_of(
        step,
        rows=(random.permutation(NUM_ROWS)[:num_rows] + 1).tolist(),
        lengths=lengths.tolist(),
        counts=np.minimum(lengths, random.integers(0, 6, num_rows)).tolist(),
        places=places.tolist(),
        page_ids=random.integers(0, CAPACITY + 1, len(places)).tolist(),
        num_groups=num_groups,
        **lists_for(pools),
    )


def numbers_of(batch: Any, names: list[str]) -> dict[str, list[Any]]:
    """Every buffer as lists, `indices` as far as they are listed."""
    found = {name: getattr(batch, name).tolist() for name in SHARED}
    for group in names:
        for name in PER_GROUP:
            found[f"{group}.{name}"] = getattr(batch[group], name).tolist()
        for name in WORK:
            found[f"{group}.{name}"] = getattr(batch[group].work, name).tolist()
        found[f"{group}.indices"] = found[f"{group}.indices"][: found[f"{group}.indptr"][-1]]
    return found


@pytest.mark.parametrize("windows", [(None,), (100,), (None, 100, 17, 1)])
@pytest.mark.parametrize("kernel_page", [64, 16])
def test_the_device_and_the_host_agree_in_every_number(windows: tuple[int | None, ...], kernel_page: int):
    layout = layout_of(*windows)
    names = [group.name for group in layout.paged_groups]
    more = {"kernel_page_tokens": dict.fromkeys(names, kernel_page), "max_indices": dict.fromkeys(names, 40)}
    pools, theirs = pools_of(layout, **more), pools_of(layout, "cpu", **more)
    num_listed = 0
    for step in range(1, 25):
        delta = some_step(step, pools)
        for each in (pools, theirs):
            each.apply(delta)
        pad_to = None if step % 2 else (NUM_ROWS, 64)
        batch, other = pools.batch(delta, pad_to=pad_to), theirs.batch(delta, pad_to=pad_to)
        found = numbers_of(batch, names)
        assert found == numbers_of(other, names) == numbers_of(batch.host, names)
        num_listed += sum(len(found[f"{name}.indices"]) for name in names)
    assert num_listed > 100
    pools.check()


def test_graphs_read_the_buffers_that_a_step_has_filled_anew():
    """A graph is captured once, over padded tensors; each replay reads what the last `batch` wrote there."""
    layout = layout_of(None, 100)
    names = [group.name for group in layout.paged_groups]
    pools = pools_of(layout)
    first = some_step(1, pools)
    pools.apply(first)
    batch = pools.batch(first, pad_to=(NUM_ROWS, 64))
    read = [getattr(batch, name) for name in SHARED]
    read += [getattr(batch[group], name) for group in names for name in PER_GROUP]
    read += [getattr(batch[group].work, name) for group in names for name in WORK]
    copies = [torch.zeros_like(tensor) for tensor in read]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor, copy in zip(read, copies, strict=True):
            copy.copy_(tensor)
    for step in range(2, 12):
        delta = some_step(step, pools)
        pools.apply(delta)
        now = pools.batch(delta, pad_to=(NUM_ROWS, 64))
        graph.replay()
        fresh = [getattr(now, name) for name in SHARED]
        fresh += [getattr(now[group], name) for group in names for name in PER_GROUP]
        fresh += [getattr(now[group].work, name) for group in names for name in WORK]
        for tensor, copy, address in zip(fresh, copies, read, strict=True):
            assert torch.equal(tensor, copy)
            assert tensor.data_ptr() == address.data_ptr()
        assert numbers_of(now, names) == numbers_of(now.host, names)
    pools.check()


def test_a_step_is_stored_in_a_graph_and_read_outside_of_it():
    pools = pools_of(layout_of(None))
    layer = pools.layer(0)
    k, v = (torch.zeros(64, 2, 16, device="cuda") for _ in range(2))
    places = list(range(20, 40))
    delta = delta_of(1, places=places, page_ids=list(range(5, 25)), num_groups=1)
    pools.apply(delta)
    batch = pools.batch(delta, pad_to=(NUM_ROWS, 64))
    layer.store(batch, k, v)  # compiles; all of it is padding
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.store(batch, k, v)
    for step, length in enumerate(range(40, 240, 40), 2):  # 40 new tokens per step
        delta = delta_of(step, rows=[1], lengths=[length], counts=[40], num_groups=1)
        pools.apply(delta)
        batch = pools.batch(delta, pad_to=(NUM_ROWS, 64))
        k.normal_()
        v.normal_()
        graph.replay()
        out = paged(torch.randn(40, 4, 16, device="cuda"), layer, batch)
        if length == 40:  # the first token of a request reads only itself
            torch.testing.assert_close(out[0], v[0].bfloat16().float().repeat_interleave(2, 0))
        slots = batch["full"].slot_mapping[:40]
        assert torch.equal(layer.keys[slots], k[:40].bfloat16())
        assert out.isfinite().all()


def test_a_batch_makes_nothing_and_waits_for_nothing():
    pools = pools_of(layout_of(None, 100), kernel_page_tokens={"full": 16})
    deltas = [some_step(step, pools) for step in range(1, 30)]

    def advance(delta: Delta) -> Batch:
        pools.apply(delta)
        pools.batch(delta)
        return pools.batch(delta, pad_to=(NUM_ROWS, 64))

    for delta in deltas[:10]:
        advance(delta)  # compiles, and makes room for deltas as large
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        for delta in deltas[10:]:
            batch = advance(delta)
            assert batch.host.rows.shape == (NUM_ROWS,)  # nothing is read back for the host either
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_another_stream_fills_the_buffers_in_its_order():
    pools, theirs = pools_of(layout_of(None, 100)), pools_of(layout_of(None, 100), "cpu")
    names = list(pools.pools)
    stream = torch.cuda.Stream()
    for step in (1, 2):  # compiles, on both
        delta = some_step(step, pools)
        theirs.apply(delta)
        pools.apply(delta, stream)
        with torch.cuda.stream(stream):
            pools.batch(delta)
    torch.cuda.synchronize()
    delta = some_step(3, pools)
    theirs.apply(delta)
    other = theirs.batch(delta)
    before = pools._buffers.tensors["lengths"].tolist()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        pools.apply(delta)
        batch = pools.batch(delta)
    copied = pools._buffers.tensors["lengths"].clone()  # on the stream that nobody sleeps on
    torch.cuda.current_stream().synchronize()
    assert not stream.query()
    assert copied.tolist() == before
    stream.synchronize()
    assert numbers_of(batch, names) == numbers_of(other, names)


def test_in_a_capture_it_raises_and_changes_nothing():
    pools = pools_of(layout_of(None))
    delta = some_step(1, pools)
    pools.apply(delta)
    before = numbers_of(pools.batch(delta, pad_to=(NUM_ROWS, 64)), ["full"])
    one = torch.ones(1, device="cuda")
    raised = False
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        one + 1  # a graph must hold something
        try:
            pools.batch(delta)
        except CaptureError:
            raised = True
    assert raised
    assert numbers_of(pools.batch(delta, pad_to=(NUM_ROWS, 64)), ["full"]) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_groups", [1, 6])
def test_any_number_of_groups_is_two_launches(num_groups: int):
    pools = pools_of(layout_of(*[100] * num_groups))
    delta = some_step(1, pools)
    pools.apply(delta)
    pools.batch(delta)  # compiles
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        pools.batch(delta)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    assert sorted(names) == ["_count", "_fill"]


def test_batches_of_any_size_share_one_kernel_per_set_of_constants():
    """`Launch` looks a kernel up once: an argument that made a variant would get what another compiled."""
    from pagoda.kernels import _batch_fused as batch_fused

    launches = (batch_fused._launch_count, batch_fused._launch_fill)
    kernels: dict[tuple[int, ...], list[object]] = {}  # by launch, device and constants
    num_batches = 0
    for windows in ((None,), (100, 17)):
        pools = pools_of(layout_of(*windows))
        for step in range(1, 9):
            delta = some_step(step, pools)
            pools.apply(delta)
            for pad_to in (None, (NUM_ROWS, 64)):
                for launch in launches:
                    launch.compiled.clear()
                pools.batch(delta, pad_to=pad_to)
                num_batches += 1
                for number, launch in enumerate(launches):
                    for key, kernel in launch.compiled.items():
                        kernels.setdefault((number, *key), []).append(kernel)
    for found in kernels.values():
        assert len(found) == num_batches  # asked for anew each time
        assert all(kernel is found[0] for kernel in found)
