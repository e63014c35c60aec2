"""Attention over shuffled pages on the GPU, against SDPA on contiguous tensors, a copy and a matmul.

`python -m bench attention` measures the lines of one table, `--sweep` decode by context and batch for the
plot, and `--smoke` both in tiny sizes on any machine, without graphs if it has no GPU, and without saving.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench.attention.lines import Line, lines
from bench.attention.step import BF16, Call, Step, decode, make_step
from bench.hybrid import PIECE
from bench.measure import best_graph_microseconds, save, table

Row = dict[str, Any]

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CONTEXTS = [1_024 << i for i in range(8)]
BATCHES = [1, 8, 64, 256]
SWEEP_TOKENS = 1 << 23  # 32 GiB of keys and values
SMOKE_DIVISOR = 32
NO = "–"  # in a cell without a number


def timed(calls: list[Call], device: str) -> float:
    """Return µs of one call: by graph replay, or by the clock where there are no graphs."""
    if device == "cuda":
        return best_graph_microseconds(calls)
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6 / len(calls)


def limits(device: str, divisor: int) -> dict[str, float]:
    """Return what the machine can do: bytes per µs of a copy of 1 GiB, operations per µs of a matmul."""
    source = torch.ones((1 << 30) // divisor**2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pieces = list(zip(source.split(PIECE), target.split(PIECE), strict=True))

    def in_pieces() -> None:
        for a, b in pieces:
            b.copy_(a)

    copy_us = min(timed([lambda: target.copy_(source)], device), timed([in_pieces], device))
    n = 8_192 // divisor
    a, b, c = (torch.randn(n, n, device=device).to(BF16) for _ in range(3))
    matmul_us = timed([lambda: torch.mm(a, b, out=c)] * 4, device)
    return {"copy": 2 * source.numel() / copy_us, "matmul": 2 * n**3 / matmul_us}


def sdpa_microseconds(step: Step, backend: str) -> tuple[float | None, Row]:
    """Return µs of SDPA for the operations of one of our calls, and µs or the refusal of each way."""
    times: list[float] = []
    about: Row = {}
    for way, (calls, work) in step.sdpa(BACKENDS[backend]).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says one by one why it refuses a shape
                calls[0]()
                about[way] = timed(calls, step.device)
            times.append(about[way] / work)
        except RuntimeError as error:
            about[way] = f"refused: {str(error).splitlines()[0]}"
    return min(times, default=None), about


def measure(line: Line, machine: dict[str, float], before: dict[str, Row], device: str) -> Row:
    """Return a row of the table. `before`: the rows that it may be compared with, by name."""
    step = make_step(line.shape, device)
    us = timed(step.calls(), device)
    done = line.shape.num_bytes if line.limit == "copy" else line.shape.num_flops
    row: Row = {
        "work": line.name,
        "ours µs": us,
        "TB/s": line.shape.num_bytes / us / 1e6,
        "TFLOP/s": line.shape.num_flops / us / 1e6,
        "limit": line.limit,
        "of the limit": done / us / machine[line.limit],
    }
    details: Row = {"layers": step.num_layers, "neighbouring pages": step.neighbours}
    for backend in BACKENDS:
        row[f"{backend} µs"] = row[f"of {backend}"] = NO
        if line.has_peers:
            peer_us, details[backend] = sdpa_microseconds(step, backend)
            row[f"{backend} µs"] = "refused" if peer_us is None else peer_us
            row[f"of {backend}"] = NO if peer_us is None else peer_us / us
    row["beside"] = " + ".join(line.beside) or NO
    row["times its speed"] = sum(before[name]["ours µs"] for name in line.beside) / us or NO
    row["goal"] = ", ".join(f"{column} ≥ {least:.2f}" for column, least in line.goals) or NO
    row["met"] = _met([(row[column], least) for column, least in line.goals])
    row["error"] = step.error()
    return {**row, "details": details}


def _met(found: list[tuple[float | str, float]]) -> str:
    if not found or any(isinstance(ratio, str) for ratio, _ in found):
        return NO
    return "yes" if all(ratio >= least for ratio, least in found) else "no"


def measure_all(machine: dict[str, float], device: str, divisor: int) -> Iterator[Row]:
    """Yield the lines of the table, one by one."""
    rows: dict[str, Row] = {}
    for line in lines(divisor):
        rows[line.name] = measure(line, machine, rows, device)
        yield rows[line.name]


def measure_sweep(machine: dict[str, float], device: str, divisor: int) -> Iterator[Row]:
    """Yield decode bandwidths by batch and context: ours, SDPA with cuDNN, and of a copy."""
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context <= SWEEP_TOKENS // divisor**2:
                yield {**measure_decode(batch, context, device), "copy TB/s": machine["copy"] / 1e6}


def measure_decode(batch: int, context: int, device: str) -> Row:
    shape = decode(batch, context)
    step = make_step(shape, device)
    us = timed(step.calls(), device)
    peer_us, _ = sdpa_microseconds(step, "cuDNN")
    return {
        "rows": batch,
        "context": context,
        "ours TB/s": shape.num_bytes / us / 1e6,
        "cuDNN TB/s": NO if peer_us is None else shape.num_bytes / peer_us / 1e6,
        "error": step.error(),
    }


def run(sweep: bool = False, smoke: bool = False) -> None:
    """Print and save the table, or the sweep. `smoke`: both, in tiny sizes, without saving them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    divisor = SMOKE_DIVISOR if smoke else 1
    machine = limits(device, divisor)
    about = {"copy TB/s": machine["copy"] / 1e6, "matmul TFLOP/s": machine["matmul"] / 1e6}
    table("the machine: a copy of 1 GiB, a bfloat16 matmul of 8,192³", [about])

    def show(name: str, title: str, found: Iterator[Row]) -> None:
        rows: list[Row] = []
        for row in found:
            rows.append(row)
            if not smoke:  # after each row, so that an interrupt loses little
                save(name, [about, *rows] if name == "attention" else rows)
        table(title, [{k: v for k, v in row.items() if k != "details"} for row in rows])

    if not sweep or smoke:
        show("attention", "attention over shuffled pages", measure_all(machine, device, divisor))
    if sweep or smoke:
        show("attention-sweep", "decode by batch and context", measure_sweep(machine, device, divisor))
