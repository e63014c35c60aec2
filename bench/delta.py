"""A step on the device: plan, `Pools.apply`, `Pools.batch`; host and device time against the machine's."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.manager import PAGE, WINDOW, prompts_of, random_tokens
from bench.measure import graph_microseconds, no_waiting, save, table
from bench.staging import busy_microseconds, host_microseconds
from pagoda import kernels
from pagoda.layout import FullAttention, Layout, WindowAttention
from pagoda.manager import Delta, Manager
from pagoda.pools import Pools

Row = dict[str, Any]

BATCH = 256
LENGTH = 1_000
WINDOWS = (0, 5)  # window groups beside the full one
LAYERS = 2  # per group: layers cost memory, but do not change a step's metadata
LOOPS = 15  # of one page of steps each, so that all do the same work
STEPS = PAGE * 60
SLEEP_CYCLES = 100_000_000  # about 50 ms: longer than it takes to queue the work that follows
IN_GRAPH = 20
HOST = "host, idle device, µs"
BOTH = "machine: that copy, and that kernel by Triton"


class Running:
    """A manager and pools of `batch` decoding rows; deltas that are planned wait to be applied."""

    def __init__(
        self, windows: int, device: str, *, batch: int = BATCH, length: int = LENGTH, steps: int = STEPS
    ) -> None:
        layers: list[Any] = [FullAttention(kv_heads=8, k_dim=128, v_dim=128)] * LAYERS
        for i in range(windows):  # different sizes, because equal layers share a group
            layers += [WindowAttention(kv_heads=8, k_dim=128, v_dim=128 + 8 * i, window=WINDOW)] * LAYERS
        layout = Layout(layers, PAGE)
        longest = length + PAGE + steps
        max_pages = -(-longest // PAGE)
        capacity = {group.name: (batch + 2) * max_pages for group in layout.groups}
        self.manager = Manager(layout, capacity, num_rows=batch, max_tokens=longest)
        self.pools = Pools(layout, capacity, num_rows=batch, max_tokens=longest, device=device)
        more = np.random.default_rng(3).integers(PAGE, size=batch)  # so that pages fill in different steps
        rows = []
        for prompt in prompts_of(length + more):
            rows.append(self.manager.admit(prompt).row)
            self.pools.apply(self.manager.plan(rows[-1], len(prompt)))
            self.manager.commit(rows[-1], prompt)
        self.rows = np.array(rows, np.int32)
        self.sampled = random_tokens(np.random.default_rng(1), PAGE, batch)
        self.planned: deque[Delta] = deque()
        self.last = self.plan()
        self.pools.apply(self.last)
        self.finish(self.last)

    def plan(self) -> Delta:
        self.manager.reserve(self.rows)
        return self.manager.plan(self.rows)

    def finish(self, delta: Delta) -> None:
        """Finish a step; its fence passes at once, since nothing is computed here."""
        self.manager.commit(self.rows, self.sampled[delta.step % PAGE])
        self.manager.pass_fence(delta.step)

    def plan_ahead(self, steps: int) -> tuple[float, float]:
        """Plan deltas for `apply`. Return µs per step of `plan` and `finish`: medians of loops of a page."""
        loops = []
        for _ in range(-(-steps // PAGE)):
            planning = finishing = 0
            for _ in range(PAGE):
                begin = time.perf_counter_ns()
                delta = self.plan()
                middle = time.perf_counter_ns()
                self.finish(delta)
                finishing += time.perf_counter_ns() - middle
                planning += middle - begin
                self.planned.append(delta)
            loops.append((planning / PAGE / 1_000, finishing / PAGE / 1_000))
        first, second = zip(*loops, strict=True)
        return statistics.median(first), statistics.median(second)

    def apply(self) -> None:
        self.last = self.planned.popleft()
        self.pools.apply(self.last)

    def fill(self) -> None:
        self.pools.batch(self.last)

    def step(self) -> None:
        """Run a decode step without the model."""
        delta = self.plan()
        self.pools.apply(delta)
        self.pools.batch(delta)
        self.last = delta
        self.finish(delta)

    def check(self) -> None:
        """Check that the batch of the last step agrees with the manager."""
        batch, lengths = self.pools.batch(self.last), self.manager.computed(self.rows)
        assert np.array_equal(batch.lengths.cpu().numpy(), lengths)
        for name in self.pools.pools:
            view = batch[name]
            found, begins = view.page_table.cpu().numpy(), view.begins.cpu().numpy() // PAGE
            for at, row in enumerate(self.rows.tolist()):
                begin, end = int(begins[at]), -(-int(lengths[at]) // PAGE)
                assert np.array_equal(found[at, begin:end], self.manager.page_ids(row, name)[begin:end])


def run() -> None:
    rows: list[Row] = []
    made: list[Row] = []
    for windows in WINDOWS:
        rows += costs_of(windows)
        torch.cuda.empty_cache()
    table(f"the delta of a step of {BATCH} decoding requests, from {LENGTH:,} tokens each", rows)
    save("delta", [{"figure": "cost", **row} for row in rows])
    for windows in WINDOWS:  # last, because launches may stay slower after a profiler has run
        made += asked_of(windows)
        torch.cuda.empty_cache()
    table("device operations per step", made)
    save("delta", [{"figure": "cost", **row} for row in rows] + [{"figure": "asked", **row} for row in made])


def costs_of(windows: int) -> list[Row]:
    running = Running(windows, "cuda")
    groups = windows + 1
    costs: list[Row] = []

    def add(call: str, idle: float, busy: float | None = None, **device: float | None) -> None:
        row: Row = {"groups": groups, "call": call, HOST: idle}
        row["host, busy device, µs"] = _or_dash(busy)
        row["device, queued, µs"] = _or_dash(device.get("queued"))
        row["device, in a graph, µs"] = _or_dash(device.get("graph"))
        costs.append(row)

    running.plan_ahead(PAGE)
    planning, finishing = running.plan_ahead(PAGE * (2 * LOOPS + 8))
    sent_bytes = [delta.num_bytes for delta in running.planned]
    for _ in range(PAGE):  # compiles
        running.apply()
        running.fill()

    add("reserve, plan", planning)
    add("commit, pass_fence", finishing)
    add(
        "Pools.apply",
        host_microseconds(running.apply, PAGE, LOOPS),
        busy_microseconds(running.apply),
        queued=queued_microseconds(running.apply, repeats=LOOPS // 2),
    )
    add(
        "Pools.batch",
        host_microseconds(running.fill),
        busy_microseconds(running.fill),
        queued=queued_microseconds(running.fill),
    )
    while running.planned:
        running.apply()
    for _ in range(PAGE):
        running.step()
    add("a step: all of it", host_microseconds(running.step, PAGE, LOOPS), busy_microseconds(running.step))
    torch.cuda.synchronize()
    running.check()

    for call, one in parts_of_apply(running).items():
        add(call, host_microseconds(one))
    for call, one in machine(round(statistics.mean(sent_bytes))).items():
        add(
            call,
            host_microseconds(one),
            busy_microseconds(one),
            queued=queued_microseconds(one),
            graph=graph_microseconds([one] * IN_GRAPH),
        )
    least = next(row[HOST] for row in costs if row["call"] == BOTH)
    return [{**row, "times a copy and a launch": row[HOST] / least} for row in costs]


def parts_of_apply(running: Running) -> dict[str, Callable[[], object]]:
    """Return the parts of `Pools.apply`, each on the same delta over and over."""
    pools, delta = running.pools, running.plan()
    found = pools._rank.check(delta.packed, delta.step)
    pools.apply(delta)
    running.finish(delta)
    num_writes, places, page_ids = found[5:8]
    rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sent = pools._staging.post(delta.packed, rooms)
    return {
        "of apply: looking through": lambda: pools._rank.check(delta.packed, delta.step),
        "of apply: to the device": lambda: pools._staging.post(delta.packed, rooms),
        "of apply: the launch": lambda: kernels.write_table(
            sent, places, page_ids, num_writes, pools.flat_table
        ),
        "of apply: the host's tables": lambda: pools._rank.follow(delta.packed),
    }


def asked_of(windows: int) -> list[Row]:
    """Return the device operations of a step."""
    running = Running(windows, "cuda")
    for _ in range(PAGE):
        running.step()
    was_asleep = was_asleep_during(running.step)  # before the profiler runs
    return [
        {
            "groups": windows + 1,
            "call": "a step",
            **asked(running.step),
            "synchronisations": 0,  # one would have raised
            f"{PAGE} steps asked before the device began": was_asleep,
        }
    ]


def _or_dash(value: float | None) -> float | str:
    return "–" if value is None else value


def machine(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Return the machine's own limits: a copy of the same number of bytes, and empty launches."""
    import triton

    @triton.jit
    def empty():  # type: ignore[no-untyped-def]
        pass

    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    received = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        received.copy_(pinned, non_blocking=True)

    def both() -> None:
        received.copy_(pinned, non_blocking=True)
        empty[(1,)]()

    return {
        f"machine: a pinned copy of {num_bytes:,} bytes": copy,
        "machine: an empty kernel, by Triton": lambda: empty[(1,)](),
        BOTH: both,
        "machine: an empty kernel, by torch": lambda: torch.cuda._sleep(0),
    }


def queued_microseconds(call: Callable[[], object], number: int = PAGE, repeats: int = 11) -> float | None:
    """Return the median device time of a call with many queued in the stream, without gaps of the host.

    None if the host did not get ahead of a sleeping device in any repeat.
    """
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(number):
            call()
        end.record()
        is_asleep = not begin.query()
        torch.cuda.synchronize()
        if is_asleep:
            times.append(begin.elapsed_time(end) * 1_000 / number)
    return statistics.median(times) if times else None


def was_asleep_during(call: Callable[[], object]) -> str:
    """Return whether the host finished a page of calls before the device began the first."""
    with no_waiting():
        woken = torch.cuda.Event()
        torch.cuda._sleep(SLEEP_CYCLES)
        woken.record()
        for _ in range(PAGE):
            call()
        return "no" if woken.query() else "yes"


def asked(call: Callable[[], object]) -> Row:
    """Return the copies and launches of a call that does not wait, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=activities) as seen:
            with no_waiting():  # raises if anything waits
                for _ in range(PAGE):
                    call()
            torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return counted(names, PAGE)


def counted(names: list[str], calls: int) -> Row:
    """Count how often each named device operation occurred per call."""
    kinds = Counter(
        "to the device"
        if "HtoD" in name
        else "other copies"
        if "Memcpy" in name
        else "memsets"
        if "Memset" in name
        else "launches"
        for name in names
    )
    found: Row = {
        kind: kinds[kind] / calls for kind in ("to the device", "other copies", "memsets", "launches")
    }
    found["kernels"] = ", ".join(sorted({name[:40] for name in names if "Mem" not in name}))
    # A profiler without access to the device sees nothing at all, which does not mean zero.
    return found if names else dict.fromkeys(found, "not seen")
