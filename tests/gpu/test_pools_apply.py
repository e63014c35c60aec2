"""Deltas on a real device: as on a CPU, with one copy, no waiting, on any stream, never in a capture."""

from typing import Any

import numpy as np
import pytest
import torch

from bench.measure import no_waiting
from pagoda import FullAttention, Layout, WindowAttention
from pagoda.errors import ArgumentError, CaptureError, OutOfRangeError
from pagoda.manager import Delta, Manager
from pagoda.pools import Pools, Staging

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 400_000_000  # about 0.2 s
LAYOUT = Layout(
    [
        FullAttention(kv_heads=4, k_dim=32, v_dim=16),
        WindowAttention(kv_heads=2, k_dim=64, v_dim=64, window=17),
        FullAttention(kv_heads=4, k_dim=32, v_dim=16),
    ],
    {"full": 16, "window": 8},
)
CAPACITY = {"full": 60, "window": 120}
SIZES: dict[str, Any] = {"num_rows": 8, "max_tokens": 160}


def pools_of(device: str, staging: Staging | None = None) -> Pools:
    """Pools with the same noise on every device."""
    pools = Pools(LAYOUT, CAPACITY, **SIZES, device=device, staging=staging)
    noise = torch.Generator().manual_seed(3)
    for pool in pools.pools.values():
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=noise))
    return pools


def some_deltas() -> list[Delta]:
    """Of requests that are admitted, grow, are continued with copies, and end."""
    manager = Manager(LAYOUT, CAPACITY, **SIZES)
    rows = [manager.admit(range(at, at + 21 + at)).row for at in (1, 2, 3)]
    deltas = [manager.take_delta()]
    manager.commit(rows, [t for at in (1, 2, 3) for t in range(at, at + 21 + at)], [22, 23, 24])
    for step in range(6):
        if step in (0, 2, 4):
            rows.append(manager.fork(rows[step % 2]).tolist()[0])
        manager.reserve(rows, 9)
        if step == 3:
            manager.release([rows.pop(0)])
        deltas.append(manager.take_delta())
        manager.commit(rows, list(range(9 * len(rows))), [9] * len(rows))
    deltas.append(manager.take_delta())  # an empty one
    assert sum(delta.num_writes for delta in deltas) > 30
    assert all(sum(len(d.copies[g][0]) for d in deltas) >= 2 for g in (0, 1))
    return deltas


def moves(step: int, sources: list[int], targets: list[int]) -> Delta:
    """Page copies of the first group alone, which may change places."""
    packed = [step, 0, 0, len(sources), 0, *sources, *targets]
    return Delta(np.array(packed, dtype=np.int32), 2)


def equal(mine: Pools, theirs: Pools) -> bool:
    torch.cuda.synchronize()
    pairs = [(mine.flat_table, theirs.flat_table)]
    for name, pool in mine.pools.items():
        pairs += zip(pool.k_buffer, theirs[name].k_buffer, strict=True)
        pairs += zip(pool.v_buffer, theirs[name].v_buffer, strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def test_deltas_do_on_a_gpu_what_they_do_on_a_cpu():
    mine, theirs = pools_of("cuda"), pools_of("cpu")
    assert equal(mine, theirs)
    for delta in some_deltas():
        mine.apply(delta)
        theirs.apply(delta)
        assert equal(mine, theirs)
    last = moves(mine.step + 1, [1, 2, 3, 4], [2, 3, 1, 9])
    mine.apply(last)
    assert not equal(mine, theirs)
    theirs.apply(last)
    assert equal(mine, theirs)
    mine.check()


def test_nobody_waits_and_each_delta_is_one_copy(monkeypatch: pytest.MonkeyPatch):
    deltas = some_deltas()
    warm, pools = pools_of("cuda"), pools_of("cuda")
    for delta in deltas:
        warm.apply(delta)  # compiles
    copies: list[int] = []
    copy = Staging._copy

    def counted(received: torch.Tensor, *rest: Any) -> None:
        copies.append(received.numel())
        copy(received, *rest)

    monkeypatch.setattr(Staging, "_copy", staticmethod(counted))
    with no_waiting():
        for delta in deltas:
            before = len(copies)
            pools.apply(delta)
            assert len(copies) - before == (delta.num_bytes > 20)  # a head of 5 numbers stays at home
        pools.apply(moves(pools.step + 1, [1, 2], [2, 1]))
    assert len(copies) == len(deltas)
    assert sum(copies) < 16 * len(copies) + sum(delta.num_bytes for delta in deltas)


def test_once_warm_nothing_is_made_for_a_delta_of_table_writes():
    pools = pools_of("cuda")

    def writes(step: int) -> Delta:
        n = 1 + step % 5
        return Delta(np.array([step, 0, n, 0, 0, *range(10, 10 + n), *[step % 60] * n], dtype=np.int32), 2)

    stream, own = torch.cuda.Stream(), torch.cuda.current_stream()

    def apply(step: int) -> None:
        """On two streams in turn, each of which waits for the other's step."""
        now, before = (stream, own) if step % 2 else (own, stream)
        now.wait_stream(before)
        pools.apply(writes(step), stream if step % 2 else None)

    for step in range(1, 11):
        apply(step)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in range(11, 51):
        apply(step)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert int(pools.tables["full"][1, 0]) == 50


def test_deltas_of_two_streams_do_not_disturb_each_other():
    """One stream is late with a delta when the other's arrives: each has its own memory on the device."""
    pools, stream = pools_of("cuda"), torch.cuda.Stream()

    def write(step: int, place: int) -> Delta:
        return Delta(np.array([step, 0, 1, 0, 0, place, 7], dtype=np.int32), 2)

    for step in (1, 2):
        pools.apply(write(step, 20), stream if step == 1 else None)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    pools.apply(write(3, 30), stream)
    pools.apply(write(4, 40))
    torch.cuda.synchronize()
    assert [int(pools.flat_table[place]) for place in (20, 30, 40)] == [7, 7, 7]


def test_deltas_of_any_size_share_one_kernel():
    """`Launch` looks a kernel up once: an argument that made a variant would get what another compiled."""
    from pagoda.kernels import _fused as fused

    table = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    packed = torch.arange(4097, dtype=torch.int32, device="cuda")
    for n in (1, 16, 17, 2048):
        for offset in (0, 1):  # aligned to 16 bytes, and not
            fused._launch_writes.compiled.clear()
            fused.write_table(packed[offset:], n, table[offset:])
    assert [len(caches[0]) for caches in fused._write_table.device_caches.values()] == [1]


@pytest.mark.filterwarnings("ignore")
def test_the_device_sees_one_copy_and_few_launches():
    deltas = [delta for delta in some_deltas() if delta.num_writes]
    warm, pools = pools_of("cuda"), pools_of("cuda")
    for delta in deltas:
        warm.apply(delta)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for delta in deltas:
            pools.apply(delta)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not any("_write_table" in name for name in names):
        pytest.skip("the profiler sees no kernels on this machine")
    with_copies = sum(len(sources) > 0 for delta in deltas for sources, _ in delta.copies)
    assert sum("HtoD" in name for name in names) == len(deltas)
    assert sum("_write_table" in name for name in names) == len(deltas)
    assert sum("_copy_pages" in name for name in names) == with_copies
    assert not [name for name in names if "DtoH" in name or "DtoD" in name or "at::" in name]


def test_a_delta_is_applied_on_the_stream_it_is_given():
    pools, theirs, warm = pools_of("cuda"), pools_of("cpu"), pools_of("cuda")
    deltas = some_deltas()
    for delta in deltas:
        warm.apply(delta)  # compiles
    assert int(pools.flat_table.abs().sum()) == 0  # loads what is asked below
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5 * SLEEP_CYCLES)
    for delta in deltas:
        pools.apply(delta, stream)
        theirs.apply(delta)
    current = torch.cuda.current_stream()
    current.synchronize()
    assert not stream.query()  # it sleeps, and nothing was done elsewhere
    assert int(pools.flat_table.abs().sum()) == 0
    assert current == torch.cuda.current_stream()
    stream.synchronize()
    assert equal(pools, theirs)


def test_the_next_delta_may_come_while_a_step_runs():
    pools, theirs = pools_of("cuda"), pools_of("cpu")
    seen = []
    for delta in some_deltas():
        pools.apply(delta)
        torch.cuda._sleep(SLEEP_CYCLES // 20)
        seen.append(pools.flat_table.clone())  # what this step reads, late
    for delta, table in zip(some_deltas(), seen, strict=True):
        theirs.apply(delta)
        assert torch.equal(table.cpu(), theirs.flat_table)
    assert equal(pools, theirs)


def test_in_a_capture_it_raises_and_changes_nothing():
    pools, theirs = pools_of("cuda"), pools_of("cuda")
    first, *rest = some_deltas()
    one = torch.ones(1, device="cuda")
    raised = 0
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        one + 1  # a graph must hold something
        for delta in (first, moves(1, [], [])):  # an empty one too
            try:
                pools.apply(delta)
            except CaptureError:
                raised += 1
    assert raised == 2
    assert pools.step == 0
    assert equal(pools, theirs)
    for delta in (first, *rest):
        pools.apply(delta)
        theirs.apply(delta)
    assert equal(pools, theirs)


def test_page_copies_of_device_ids_are_captured_where_they_are_disjoint():
    pools = pools_of("cuda")
    pool = pools["full"]
    source, target = (torch.tensor(ids, device="cuda") for ids in ([1, 2], [3, 4]))
    pool.copy_pages(source, target, is_disjoint=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    raised = False
    with torch.cuda.graph(graph):
        pool.copy_pages(source, target, is_disjoint=True)
        try:
            pool.copy_pages(source, target)
        except CaptureError:
            raised = True
    assert raised
    source.copy_(torch.tensor([60, 7]))
    graph.replay()
    assert torch.equal(pool.pack([3, 4]), pool.pack([60, 7]))
    before = pool.pack([5, 6])
    pool.copy_pages(torch.tensor([5, 6], device="cuda"), [6, 5])  # nobody says that they are disjoint
    assert torch.equal(pool.pack([6, 5]), before)


def test_wrong_deltas_and_streams_change_nothing():
    pools, theirs = pools_of("cuda"), pools_of("cuda")
    (delta, *_) = some_deltas()
    with pytest.raises(ArgumentError, match="stream: give a torch"):
        pools.apply(delta, torch.cuda.default_stream)  # type: ignore[arg-type]
    with pytest.raises(OutOfRangeError):
        pools.apply(moves(1, [1], [61]))
    with pytest.raises(ArgumentError, match="step 2"):
        pools.apply(moves(2, [1], [2]))
    assert equal(pools, theirs)
    assert pools.step == 0
