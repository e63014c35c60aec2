"""How things are timed, and how results are written down."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LOOP_US = 20_000  # device time of a loop of replays


def microseconds(call: Callable[[], object], number: int, repeats: int = 60) -> float:
    """Return the CPU time of one call in this thread: the best of `repeats` loops of `number` calls.

    The best, because noise of a shared machine is never negative; loops a little apart, because a busy
    neighbour on the same core halves the speed of both for milliseconds. The loop's own cost is measured the
    same way and subtracted. The garbage collector is off.
    """

    def loop(body: Callable[[], object]) -> float:
        time.sleep(0.003)
        begin = time.thread_time_ns()
        for _ in range(number):
            body()
        return (time.thread_time_ns() - begin) / number / 1000

    def nothing() -> None:
        return None

    call()
    gc.collect()
    gc.disable()
    try:
        empty = min(loop(nothing) for _ in range(repeats))
        return max(0.0, min(loop(call) for _ in range(repeats)) - empty)
    finally:
        gc.enable()


def graph_microseconds(calls: list[Callable[[], object]], repeats: int = 21) -> float:
    """Return the device time of one of `calls`: the median replay of a graph with all of them, once each."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = _captured(calls, stream)
        times = [_replay_microseconds(graph, stream, 1) for _ in range(repeats + 3)]
    return statistics.median(times[3:]) / len(calls)


def best_graph_microseconds(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Return the same as the best of `repeats` loops of replays that follow one another without a gap."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = _captured(calls, stream)
        once = min(_replay_microseconds(graph, stream, 1) for _ in range(3))
        number = min(1_000, 1 + int(LOOP_US / once))
        return min(_replay_microseconds(graph, stream, number) for _ in range(repeats)) / len(calls)


def _captured(calls: list[Callable[[], object]], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Return a graph of all calls, each of which has run once before."""
    torch.cuda.synchronize()
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def _replay_microseconds(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, number: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for _ in range(number):
        graph.replay()
    end.record(stream)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / number


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise at any call that waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def table(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print rows as a Markdown table."""
    rows = list(rows)
    columns = list(rows[0])
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        print("| " + " | ".join(_text(cell) for cell in cells) + " |", flush=True)


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return (
            f"{cell:.0e}"
            if 0 < cell < 1e-3
            else f"{cell:.3f}"
            if cell < 1
            else f"{cell:.2f}"
            if cell < 100
            else f"{cell:,.0f}"
        )
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows, and the machine that they were measured on, to results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
