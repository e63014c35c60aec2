"""States and checkpoints on a real device: as on a CPU, one launch per kind of change, no waiting."""

from typing import Any

import numpy as np
import pytest
import torch

from bench.measure import no_waiting
from pagoda.errors import CaptureError
from pagoda.kernels import _states_fused as fused
from pagoda.layout import FullAttention, GatedDelta, Layout, RingWindow, from_hf, model_config
from pagoda.layout import compressed_fp8 as fp8
from pagoda.manager import Delta
from pagoda.pools import CheckpointPool, Pools, StatePool
from unit.deltas import delta_of

pytestmark = pytest.mark.gpu

FULL = FullAttention(kv_heads=2, k_dim=16, v_dim=16)
DELTA = GatedDelta(key_heads=4, value_heads=8, key_dim=64, value_dim=32, kernel=4)
ODD = GatedDelta(key_heads=1, value_heads=3, key_dim=5, value_dim=3, kernel=3)
RING = RingWindow(entry=fp8(128, 32), window=16, unaccepted=2)
HYBRID = Layout([[FULL, DELTA], RING, ODD, FULL, DELTA], 16)
SIZES: dict[str, Any] = {"num_rows": 6, "max_tokens": 64}
CAPACITY = {"full": 10, "checkpoint": 5}


def pools_of(device: str) -> Pools:
    """Pools with the same noise on every device."""
    pools = Pools(HYBRID, CAPACITY, **SIZES, device=device)
    noise = torch.Generator().manual_seed(3)
    assert pools.states is not None
    for tensor in pools.states.tensors.values():
        drawn = torch.randint(0, 100, tensor.shape, generator=noise)
        tensor.copy_(drawn)
    return pools


def some_deltas(n: int = 30) -> list[Delta]:
    """Any saves, restores, resets and copies, with a table write in each delta."""
    random, saved, deltas = np.random.default_rng(1), {}, []
    for step in range(1, n + 1):
        rows, ids = 1 + random.permutation(6), 1 + random.permutation(5)
        num_saves = int(random.integers(0, 4))
        lengths = random.integers(1, 65, num_saves)
        saves = rows[:num_saves].tolist(), lengths.tolist(), ids[:num_saves].tolist()
        saved |= dict(zip(saves[2], saves[1], strict=True))
        order = 1 + random.permutation(6)
        a, b = sorted(random.integers(0, 6, 2).tolist())
        restored = order[:a].tolist() if saved else []
        from_ids = random.choice(sorted(saved), len(restored)).tolist() if restored else []
        targets = order[b + 1 :].tolist()
        restores = restored, [saved[at] for at in from_ids], from_ids
        copies = [int(order[b])] * len(targets), targets
        deltas.append(
            delta_of(
                step, num_groups=1, copies=(), saves=saves, restores=restores, resets=order[a:b].tolist(),
                state_copies=copies, places=[4 + step % 20], page_ids=[step % 11],
            )
        )  # fmt: skip
    return deltas


def equal(mine: Pools, theirs: Pools) -> bool:
    torch.cuda.synchronize()
    pairs = zip(mine.tensors(), theirs.tensors(), strict=True)
    return all(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in pairs)


def test_deltas_do_on_a_gpu_what_they_do_on_a_cpu():
    mine, theirs = pools_of("cuda"), pools_of("cpu")
    assert equal(mine, theirs)
    for delta in some_deltas():
        mine.apply(delta)
        theirs.apply(delta)
        assert equal(mine, theirs), delta
    mine.check()


def test_nobody_waits_and_nothing_is_allocated():
    warm, pools = pools_of("cuda"), pools_of("cuda")
    deltas = some_deltas()
    for delta in deltas:
        warm.apply(delta)  # compiles
    pools.apply(deltas[0])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        for delta in deltas[1:]:
            pools.apply(delta)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert equal(pools, warm)


@pytest.mark.filterwarnings("ignore")
def test_the_device_sees_one_launch_for_each_kind_of_change():
    deltas = some_deltas()
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
    for kernel, sections in (
        ("_save_states", [delta.saves[0] for delta in deltas]),
        ("_restore_states", [delta.restores[0] for delta in deltas]),
        ("_fill_rows", [delta.resets for delta in deltas]),
        ("_copy_states", [delta.state_copies[0] for delta in deltas]),
    ):
        launched = sum(len(section) > 0 for section in sections)
        assert launched > 5
        assert sum(kernel in name for name in names) == launched, kernel
    assert sum("HtoD" in name for name in names) == len(deltas)
    assert not [name for name in names if "DtoH" in name or "DtoD" in name or "at::" in name]


def test_in_a_capture_it_raises_and_changes_nothing():
    pools, theirs = pools_of("cuda"), pools_of("cuda")
    assert pools.checkpoints is not None
    one = torch.ones(1, device="cuda")
    raised = 0
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        one + 1  # a graph must hold something
        for call in (
            lambda: pools.apply(delta_of(1, num_groups=1, copies=(), resets=[1])),
            lambda: pools.checkpoints.save([1], [5], [1]),
            lambda: pools.checkpoints.restore([1], [5], [1]),
        ):
            try:
                call()
            except CaptureError:
                raised += 1
    assert raised == 3
    assert pools.step == 0
    assert equal(pools, theirs)


def test_a_model_without_pages():
    layout = Layout([DELTA, ODD])
    delta = delta_of(
        1,
        num_groups=0,
        copies=(),
        rows=[2, 3],
        lengths=[5, 7],
        counts=[5, 1],
        saves=([1], [4], [2]),
        resets=[2],
    )
    found = []
    for device in ("cuda", "cpu"):
        pools = Pools(layout, {"checkpoint": 2}, **SIZES, device=device)
        pools.apply(delta)
        batch = pools.batch(delta, pad_to=(4, 8))
        found.append([each.tolist() for each in (batch.rows, batch.lengths, batch.positions)])
        found[-1].append(batch.query_start_loc.tolist())
        pools.check()
    assert found[0] == found[1]


def test_every_call_launches_one_kernel():
    """`Launch` looks a kernel up once: an argument that made a variant would get what another compiled."""
    packed = torch.ones(99, dtype=torch.int32, device="cuda")
    for kind, rows in ((DELTA, 4), (ODD, 2), (RING, 17)):
        group = Layout([kind]).state_group
        assert group is not None
        states = StatePool.from_group(group, rows, "cuda")
        regions, tensor = states.regions(), CheckpointPool(states, rows).tensor
        for offset, n in ((0, 1), (1, 16), (2, 17)):
            for launch in (fused._launch_fill, fused._launch_copy, fused._launch_save, fused._launch_restore):
                launch.compiled.clear()
            fused.fill_rows(regions, 1, 1, None)
            fused._launch_fill.compiled.clear()
            fused.fill_rows(regions, offset, n, packed[offset:])
            fused.copy_states(packed[offset:], offset, 16, n, regions)
            fused.save_states(packed[offset:], offset, 16, 1, n, regions, tensor)
            fused.restore_states(packed[offset:], offset, 16, 1, n, regions, tensor)
    for kernel in (fused._fill_rows, fused._copy_states, fused._save_states, fused._restore_states):
        assert [len(caches[0]) for caches in kernel.device_caches.values()] == [1]


def test_the_states_of_a_large_model_resume():
    """Rows of DeepSeek-V4-Flash, at lengths below, at and above what its rings hold; checkpoints beyond
    byte 2^32."""
    group = from_hf(model_config("deepseek-v4-flash")).state_group
    assert group is not None
    num_rows = 2**32 // group.state_bytes + 9
    states = StatePool.from_group(group, num_rows, "cuda")
    checkpoints = CheckpointPool(states, 2**32 // group.checkpoint_bytes + 4)
    last = checkpoints.num_checkpoints
    lengths = [4, 128, 5000]
    rows, targets, ids = [1, num_rows // 2, num_rows - 3], [num_rows - 2, 2, num_rows], [last, 1, last - 1]
    theirs = StatePool.from_group(group, 3, "cpu")
    kept = CheckpointPool(theirs, 3)
    for number in range(len(group.layers)):
        for mine, same in zip(states.layer(number).values(), theirs.layer(number).values(), strict=True):
            noise = torch.randint(0, 100, (3, *same.shape[1:]))
            same[1:].copy_(noise)
            for at, row in enumerate(rows):
                mine[row].copy_(noise[at])
    kept.save([1, 2, 3], lengths, [1, 2, 3])
    kept.restore([1, 2, 3], lengths, [1, 2, 3])
    checkpoints.save(rows, lengths, ids)
    checkpoints.restore(targets, lengths, ids)
    for number in range(len(group.layers)):
        for mine, same in zip(states.layer(number).values(), theirs.layer(number).values(), strict=True):
            for at, row in enumerate(targets):
                assert torch.equal(mine[row].cpu(), same[at + 1])
