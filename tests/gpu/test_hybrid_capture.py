"""Handles of compressed attention in captured graphs: replays over wrapping rings, blocks that fill, rows
that are used again and batches of any size leave what eager calls leave, byte for byte."""

from typing import NamedTuple

import pytest
import torch

from bench.measure import no_waiting
from pagoda.compat import AttentionType, DSV4Config, KVCacheManager, LayerSpec
from pagoda.errors import CaptureError

pytestmark = pytest.mark.gpu

SCHEDULE = [
    LayerSpec(0, AttentionType.SWA),
    LayerSpec(1, AttentionType.CSA),
    LayerSpec(2, AttentionType.HCA),
]
BATCH, ROWS, CONTEXT, TOPK = 4, 6, 1024, 16


def config() -> DSV4Config:
    return DSV4Config(
        num_layers=3, num_query_heads=64, index_topk=TOPK, compress_ratios=(0, 4, 128), unaccepted=2
    )


class Buffers(NamedTuple):
    """What a graph reads and fills: made once."""

    slots: torch.Tensor
    positions: torch.Tensor
    request_ids: torch.Tensor
    kv: torch.Tensor
    csa: torch.Tensor  # values and scores
    index: torch.Tensor
    hca: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor
    cos: torch.Tensor
    window: torch.Tensor
    window_lens: torch.Tensor
    chunk: torch.Tensor
    chunk_lens: torch.Tensor
    picked: torch.Tensor
    picked_mask: torch.Tensor
    keys: torch.Tensor
    key_lens: torch.Tensor
    all_entries: torch.Tensor
    all_lens: torch.Tensor
    made: torch.Tensor
    made_index: torch.Tensor


def buffers(batch: int) -> Buffers:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    f32 = torch.float32
    return Buffers(
        ints(batch), ints(batch), ints(batch), floats(batch, 512), floats(2, batch, 1024, dtype=f32),
        floats(2, batch, 256, dtype=f32), floats(2, batch, 512, dtype=f32), ints(batch, TOPK),
        torch.ones(512, device="cuda"), floats(2, batch, 32, dtype=f32),
        floats(batch, 128, 512), ints(batch), floats(batch, 129, 512), ints(batch), floats(batch, TOPK, 512),
        torch.zeros(batch, TOPK, dtype=torch.bool, device="cuda"), floats(batch, 64, 128), ints(batch),
        floats(batch, 8, 512), ints(batch), floats(batch, 512, dtype=f32), floats(batch, 128, dtype=f32),
    )  # fmt: skip


def step(manager: KVCacheManager, b: Buffers) -> None:
    """One token of each request through all three kinds of layers, with every call that a graph may hold."""
    for layer in range(3):
        handle = manager.acquire(layer, b.slots, b.positions, b.request_ids)
        handle.gather_swa_chunk(b.kv, b.chunk, b.chunk_lens)
        handle.write_swa(b.kv)
        handle.gather_swa_kv(b.window, b.window_lens)
        if layer == 1:
            norm, rotary = (b.weight, 1e-6), (b.cos[0], b.cos[1])
            handle.write_compressed(handle.compress(b.csa[0], b.csa[1], norm, rotary, b.made))
            handle.write_index(handle.compress_index(b.index[0], b.index[1], out=b.made_index))
            handle.gather_index(b.keys, b.key_lens)
            handle.gather_compressed_kv(b.chosen, b.picked, b.picked_mask)
        elif layer == 2:
            handle.write_compressed(handle.compress(b.hca[0], b.hca[1], out=b.made))
            handle.gather_all_compressed_kv(b.all_entries, b.all_lens)


def outputs(b: Buffers) -> dict[str, torch.Tensor]:
    first = Buffers._fields.index("window")
    return {name: tensor for name, tensor in zip(Buffers._fields[first:], b[first:], strict=True)}


class Requests:
    """Rows of several managers that run the same requests, and their lengths."""

    def __init__(self, managers: list[KVCacheManager]) -> None:
        self.managers, self.lengths = managers, {}

    def admit(self, length: int) -> int:
        rows = {manager.admit_request() for manager in self.managers}
        (row,) = rows
        self.lengths[row] = length
        self._allocate(row)
        return row

    def release(self, row: int) -> None:
        for manager in self.managers:
            manager.release_request(row)
        del self.lengths[row]

    def grow(self, row: int) -> None:
        self.lengths[row] += 1
        self._allocate(row)

    def _allocate(self, row: int) -> None:
        for manager in self.managers:
            for layer in (1, 2):
                while int(manager._taken[layer][row]) * 128 <= self.lengths[row]:
                    manager.allocate_block(layer, row)

    def fill(self, b: Buffers, rows: list[int], seed: int) -> None:
        """The next token of each row, and padding; numbers are those of the rows, wherever they stand."""
        batch = b.slots.shape[0]
        padding = batch - len(rows)
        b.slots.copy_(torch.tensor(rows + [0] * padding, dtype=torch.int32))
        b.positions.copy_(
            torch.tensor([self.lengths[row] for row in rows] + [-1] * padding, dtype=torch.int32)
        )
        b.request_ids.copy_(torch.tensor([*range(len(rows)), *[-1] * padding], dtype=torch.int32))
        for name in ("kv", "csa", "index", "hca", "cos"):
            tensor = getattr(b, name)
            at = tensor.dim() - 2
            for i, row in enumerate(rows):
                random = torch.Generator().manual_seed(seed * 1000 + row)
                shape = list(tensor.shape)
                shape[at] = 1
                tensor.narrow(at, i, 1).copy_(torch.randn(shape, generator=random))
        for i, row in enumerate(rows):
            random = torch.Generator().manual_seed(seed * 999 + row)
            high = self.lengths[row] // 4 + 3
            b.chosen[i].copy_(torch.randint(-1, high, (TOPK,), generator=random))
        b.chosen[len(rows) :] = 0


def test_replays_leave_what_eager_calls_leave():
    captured, eager = (KVCacheManager(config(), SCHEDULE, ROWS, CONTEXT) for _ in range(2))
    mine, theirs = buffers(BATCH), buffers(BATCH)
    requests = Requests([captured, eager])
    rows = [requests.admit(length) for length in (0, 0, 0)]
    requests.fill(mine, rows, 0)
    # Compiles, with rows that are nobody's.
    mine.slots.zero_()
    step(captured, mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, mine)
    addresses = [
        t.data_ptr() for pool in captured.state_pools.values() for t in (pool.window, pool.positions)
    ]
    torch.cuda.synchronize()
    for turn in range(300):  # more than two rings and two blocks
        if turn in (40, 200):  # a row ends, and is somebody else's
            requests.release(rows[1])
            rows[1] = requests.admit(0)
        if turn == 90:
            rows.append(requests.admit(0))
        if turn == 150:
            requests.release(rows.pop(0))
        for b in (mine, theirs):
            requests.fill(b, rows, turn)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waiting():
            graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        step(eager, theirs)
        if turn % 7 == 0 or turn in (40, 90, 127, 128, 129, 150, 200):
            for name, tensor in outputs(mine).items():
                assert torch.equal(tensor.view(torch.uint8), outputs(theirs)[name].view(torch.uint8)), name
        for row in rows:
            requests.grow(row)
    for layer, pool in captured.state_pools.items():
        other = eager.state_pools[layer]
        pairs = [
            (getattr(pool, f"{kind}_{what}"), getattr(other, f"{kind}_{what}"))
            for kind in ("main", "index")
            for what in ("values", "scores")
        ]
        pairs += [(pool.window, other.window), (pool.positions, other.positions)]
        pairs.append((pool.window_scales, other.window_scales))
        paged, other_paged = captured.paged_pools[layer], eager.paged_pools[layer]
        if paged is not None and other_paged is not None:
            pairs += [(paged.entries, other_paged.entries), (paged.index, other_paged.index)]
        assert all(
            one is other or torch.equal(one, other) for one, other in pairs
        )  # None where there is none
    assert addresses == [
        t.data_ptr() for pool in captured.state_pools.values() for t in (pool.window, pool.positions)
    ]
    captured.check()
    eager.check()


def test_padding_changes_no_byte_of_others():
    """A batch with padding, over row and block 0 full of NaN, gives each request what it gets alone."""
    padded, alone = (KVCacheManager(config(), SCHEDULE, ROWS, CONTEXT) for _ in range(2))
    for pool in padded.state_pools.values():
        pool.window[0] = 0xFF
        assert pool.window_scales is not None
        pool.window_scales[0] = 0xFF
        for part in (pool.main_values, pool.main_scores, pool.index_values, pool.index_scores):
            if part is not None:
                part[0] = torch.nan
    for paged in padded.paged_pools.values():
        if paged is not None:
            paged.entries[0] = 0xFF
            if paged.index is not None:
                paged.index[0] = 0xFF
    requests = Requests([padded, alone])
    rows = [requests.admit(0) for _ in range(3)]
    wide, narrow = buffers(8), buffers(3)
    for turn in range(140):
        for b in (wide, narrow):
            requests.fill(b, rows, turn)
        wide.kv[3:] = torch.nan
        wide.csa[:, 3:] = torch.nan
        wide.hca[:, 3:] = torch.nan
        wide.index[:, 3:] = torch.nan
        step(padded, wide)
        step(alone, narrow)
        for name, tensor in outputs(narrow).items():
            assert torch.equal(outputs(wide)[name][:3].view(torch.uint8), tensor.view(torch.uint8)), name
            assert not outputs(wide)[name][3:].any(), name
        for row in rows:
            requests.grow(row)


def test_what_makes_a_tensor_is_refused_in_a_capture():
    manager, b = KVCacheManager(config(), SCHEDULE, ROWS, CONTEXT), buffers(BATCH)
    row = manager.admit_request()
    step(manager, b)
    calls = {
        "admit_request": lambda: manager.admit_request(),
        "release_request": lambda: manager.release_request(row),
        "allocate_block": lambda: manager.allocate_block(1, row),
        "snapshot": lambda: manager.state_pools[1].snapshot(row),
        "out": lambda: manager.acquire(0, b.slots, b.positions, b.request_ids).gather_swa_kv(),
    }
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(manager, b)
            with pytest.raises(CaptureError, match=name):
                call()
    manager.check()


def test_admission_allocation_and_release_wait_for_nothing():
    manager = KVCacheManager(config(), SCHEDULE, ROWS, CONTEXT)
    manager.release_request(manager.admit_request())
    with no_waiting():
        for _ in range(20):
            rows = [manager.admit_request() for _ in range(ROWS)]
            for row in rows:
                for _ in range(8):
                    manager.allocate_block(1, row)
                    manager.allocate_block(2, row)
            for row in rows:
                manager.release_request(row)
    manager.check()
