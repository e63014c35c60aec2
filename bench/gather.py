"""Gathering tokens of all layers on CPU and GPU, against a copy of equal bytes in the same run."""

from __future__ import annotations

from typing import Any

import torch

from bench.measure import graph_microseconds, microseconds, save, table
from pagoda import TokenPool
from pagoda.kernels.gather import gather

Row = dict[str, Any]

PAGE = 16
PIECE = 256 << 20  # bytes
BF16, FLOAT = torch.bfloat16, torch.float32


def slots_of(pool: TokenPool, order: str, n: int) -> torch.Tensor:
    """Return n slots on the host, without the padding page."""
    if order == "consecutive":
        return torch.arange(PAGE, PAGE + n)
    if order == "random":
        return PAGE + torch.randperm(pool.num_slots - PAGE)[:n]
    pages = 1 + torch.randperm(pool.num_pages)
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:n]
    if (
        order == "shuffled pages, padded"
    ):  # as in a row of a batch: pages of the pool and of the output begin at different tokens
        slots = torch.cat([slots.new_full((5,), -1), slots[:-5]])
    return slots


class Gathering:
    """A pool of random numbers, and outputs and slots for n of its tokens."""

    def __init__(self, n: int, layers: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
        self.n, self.layers, self.shape, self.dtype, self.device = n, layers, shape, dtype, device
        self.pool = TokenPool(2 * n // PAGE, PAGE, layers, shape, shape, dtype, device)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
        self.num_bytes = 2 * layers * n * shape[0] * shape[1] * dtype.itemsize

    def outputs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs that were written once, since the first write to memory costs page faults."""
        k, v = (
            [
                torch.ones(self.n, *self.shape, dtype=self.dtype, device=self.device)
                for _ in range(self.layers)
            ]
            for _ in range(2)
        )
        return k, v

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor of the same number of bytes, and one to copy it to."""
        source = torch.randint(0, 256, (self.num_bytes,), dtype=torch.uint8, device=self.device)
        return source, torch.ones_like(source)

    def copy_microseconds(self, sets: int) -> tuple[float, float]:
        """Return the device time of a copy of equal bytes: as one tensor, and in pieces.

        An H200 copies 1 GiB at once at two thirds of the speed at which it copies four pieces.
        """
        pairs = [self.pair() for _ in range(sets)]
        pieces = [list(zip(*(side.split(PIECE) for side in pair), strict=True)) for pair in pairs]

        def in_pieces(i: int) -> None:
            for source, target in pieces[i]:
                target.copy_(source)

        whole_us = graph_microseconds([lambda i=i: pairs[i][1].copy_(pairs[i][0]) for i in range(sets)])
        return whole_us, graph_microseconds([lambda i=i: in_pieces(i) for i in range(sets)])

    def about(self, order: str) -> Row:
        return {
            "tokens": self.n,
            "layers": self.layers,
            "row": f"{self.shape[0]}×{self.shape[1]} K+V {str(self.dtype).removeprefix('torch.')}",
            "slots": order,
            "MiB": self.num_bytes / 2**20,
        }


def on_host(n: int, layers: int, shape: tuple[int, int]) -> list[Row]:
    made = Gathering(n, layers, shape, FLOAT, "cpu")
    (out_k, out_v), (source, target) = made.outputs(), made.pair()
    copy_us = microseconds(lambda: target.copy_(source), 1)
    rows = []
    for order in ("consecutive", "shuffled pages", "shuffled pages, padded", "random"):
        slots = slots_of(made.pool, order, n)

        def index(slots: torch.Tensor = slots) -> None:
            for outs, buffers in ((out_k, made.pool.k_buffer), (out_v, made.pool.v_buffer)):
                for out, buffer in zip(outs, buffers, strict=True):
                    out.copy_(buffer[slots])

        gather_us = microseconds(lambda slots=slots: made.pool.gather(slots, out_k, out_v), 1)
        rows.append(
            made.about(order)
            | {
                "copy µs": copy_us,
                "gather µs": gather_us,
                "gather / copy speed": copy_us / gather_us,
                "plain indexing µs": microseconds(index, 1, 20),
            }
        )
    return rows


def on_gpu(n: int, layers: int, shape: tuple[int, int], order: str = "shuffled pages") -> Row:
    from bench.delta import queued_microseconds
    from bench.staging import host_microseconds

    made = Gathering(n, layers, shape, BF16, "cuda")
    pool, sets = made.pool, 2
    whole_us, pieces_us = made.copy_microseconds(sets)
    copy_us = min(whole_us, pieces_us)
    host = [slots_of(pool, order, n) for _ in range(sets)]
    outs = [made.outputs() for _ in range(sets)]
    # A call sends addresses, which cannot be captured: like the copy's, the graph has the launch alone.
    flat = [[out for pair in zip(*both, strict=True) for out in pair] for both in outs]
    addresses = [torch.tensor([out.data_ptr() for out in each], device="cuda") for each in flat]
    slots = [each.to("cuda") for each in host]

    def launch(i: int) -> None:
        gather(slots[i], pool._pages, pool._addresses, PAGE, flat[i], addresses[i])

    gather_us = graph_microseconds([lambda i=i: launch(i) for i in range(sets)])
    # The whole call, its small copy included; calls are queued, so that host time does not show.
    numpy_slots = host[0].numpy()
    call_us = queued_microseconds(lambda: pool.gather(numpy_slots, *outs[0]), 8)
    host_us = host_microseconds(lambda: pool.gather(numpy_slots, *outs[0]), 4)
    return made.about(order) | {
        "copy at once µs": whole_us,
        "copy in pieces µs": pieces_us,
        "copy TB/s": 2 * made.num_bytes / copy_us / 1e6,
        "gather µs": gather_us,
        "gather / faster copy": copy_us / gather_us,
        "call with host slots µs": call_us,
        "its host time µs": host_us,
    }


def run() -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time is of one thread
    try:
        rows = on_host(1024, 30, (3, 64))
    finally:
        torch.set_num_threads(threads)
    table("gather on the CPU, one thread", rows)
    if torch.cuda.is_available():
        llama_1b, llama_8b = (16, (8, 64)), (32, (8, 128))
        device_rows = [on_gpu(n, *model) for model in (llama_1b, llama_8b) for n in (1_024, 8_192, 32_768)]
        device_rows += [on_gpu(8_192, *llama_1b, order) for order in ("consecutive", "random")]
        device_rows += [on_gpu(8_192, 30, (3, 64)), on_gpu(8_192, 27, (1, 576))]
        table("gather on the GPU, by graph replay", device_rows)
        rows += device_rows
    save("gather", rows)
