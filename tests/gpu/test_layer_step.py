"""Layers of compressed attention in a graph that was captured with a padded batch: replays for later batches
leave what eager calls leave, byte for byte, and wait for nothing."""

from typing import Any

import numpy as np
import pytest
import torch

from bench.measure import no_waiting
from pagoda import Manager
from pagoda.compat import DSV4Config
from pagoda.pools import Batch, Pools

pytestmark = pytest.mark.gpu

ROWS, CONTEXT, TOPK = 4, 512, 16
CAPACITY = {"csa": 24, "hca": 24, "checkpoint": 4}
SIZES: dict[str, Any] = {"num_rows": ROWS, "max_tokens": CONTEXT}


class Engine:
    """A manager and pools; a step computes one token of each row, with every call that a graph may hold."""

    def __init__(self, device: str) -> None:
        config = DSV4Config(num_layers=3, num_query_heads=64, index_topk=TOPK, compress_ratios=(0, 4, 128))
        layout = config.layout()
        self.manager = Manager(layout, CAPACITY, **SIZES)
        self.pools = Pools(layout, CAPACITY, **SIZES, device=device)
        self.rows: list[int] = []

        def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.kv, self.chosen = floats(ROWS, 512), floats(ROWS, TOPK, dtype=torch.int32)
        self.csa, self.index, self.hca = floats(2, ROWS, 1024), floats(2, ROWS, 256), floats(2, ROWS, 512)
        self.out = {
            "window": (floats(ROWS, 128, 512), floats(ROWS, dtype=torch.int32)),
            "chunk": (floats(ROWS, 128, 512), floats(ROWS, dtype=torch.int32)),
            "picked": (floats(ROWS, TOPK, 512), floats(ROWS, TOPK, dtype=torch.bool)),
            "keys": (floats(ROWS, 128, 128), floats(ROWS, dtype=torch.int32)),
            "all": (floats(ROWS, 4, 512), floats(ROWS, dtype=torch.int32)),
            "made": (floats(ROWS, 512), floats(ROWS, 128)),
        }

    def admit(self, first: int) -> None:
        self.rows.append(self.manager.admit([first]).row)

    def next_batch(self) -> Batch:
        delta = self.manager.plan(self.rows, 1)
        self.pools.apply(delta)
        batch = self.pools.batch(delta, pad_to=ROWS)
        self.manager.commit(self.rows, np.full(len(self.rows), delta.step, dtype=np.int32))
        self.manager.pass_fence(delta.step)  # work on one stream
        self.manager.reserve(self.rows, 1)
        return batch

    def fill(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for tensor in (self.kv, self.csa, self.index, self.hca):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        self.chosen.copy_(torch.randint(-1, 1 + seed // 4, self.chosen.shape, generator=random))

    def compute(self, batch: Batch) -> None:
        for number in range(3):
            step = self.pools.layer(number).at(batch)
            step.gather_chunk(self.kv, *self.out["chunk"])
            step.write_window(self.kv)
            step.gather_window(*self.out["window"])
            made, made_index = self.out["made"]
            if number == 1:
                step.write_entries(step.compress(self.csa[0], self.csa[1], out=made))
                step.write_index(step.compress_index(self.index[0], self.index[1], out=made_index))
                step.gather_index(*self.out["keys"])
                step.gather_chosen(self.chosen, *self.out["picked"])
            elif number == 2:
                step.write_entries(step.compress(self.hca[0], self.hca[1], out=made))
                step.gather_all(*self.out["all"])


def test_replays_serve_every_later_batch():
    captured, eager = Engine("cuda"), Engine("cuda")
    for engine in (captured, eager):
        for first in (7, 8, 9):
            engine.admit(first)
        engine.fill(0)
        engine.compute(engine.next_batch())  # compiles
    graph = torch.cuda.CUDAGraph()
    batch = captured.next_batch()
    with torch.cuda.graph(graph):
        captured.compute(batch)
    eager_batch = eager.next_batch()
    for turn in range(1, 280):  # two rings, and two blocks of each kind
        for engine in (captured, eager):
            engine.fill(turn)
        with no_waiting():
            graph.replay()
        eager.compute(eager_batch)
        if turn % 9 == 0 or turn in (126, 127, 128, 129, 255, 256, 257):
            for name, pair in captured.out.items():
                for one, other in zip(pair, eager.out[name], strict=True):
                    assert torch.equal(one, other), (turn, name)
        if turn in (60, 200):  # a row ends, and is somebody else's
            for engine in (captured, eager):
                engine.manager.release(engine.rows.pop(0))
                engine.admit(turn)
        batch, eager_batch = captured.next_batch(), eager.next_batch()
    for one, other in zip(captured.pools.tensors(), eager.pools.tensors(), strict=True):
        assert torch.equal(one, other)
    captured.pools.check()
    captured.manager.check()
