"""A step's delta on the device: plan, `Pools.apply`, views; host and device time beside the machine's own."""

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
from pagoda.attention import PagedView, PagedViews
from pagoda.layout import FullAttention, Layout, WindowAttention
from pagoda.manager import Delta, Manager
from pagoda.pools import Pools

Row = dict[str, Any]

BATCH = 256
LENGTH = 1_000
WINDOWS = (0, 5)  # window groups beside the full one
LAYERS = 2  # of each group: they cost memory, a step's metadata is the same for any number
LOOPS = 15  # of one page of steps each, so that all do the same work
STEPS = PAGE * 60
SLEEP_CYCLES = 100_000_000  # some 50 ms: longer than asking for what is queued behind
IN_GRAPH = 20
HOST = "host, idle device, µs"
BOTH = "machine: that copy, and that kernel by Triton"


class Running:
    """A manager, pools and views of `batch` decoding rows; deltas that are planned wait to be applied."""

    def __init__(
        self, windows: int, device: str, *, batch: int = BATCH, length: int = LENGTH, steps: int = STEPS
    ) -> None:
        layers: list[Any] = [FullAttention(kv_heads=8, k_dim=128, v_dim=128)] * LAYERS
        for i in range(windows):  # different sizes, because layers that are alike share a group
            layers += [WindowAttention(kv_heads=8, k_dim=128, v_dim=128 + 8 * i, window=WINDOW)] * LAYERS
        layout = Layout(layers, PAGE)
        longest = length + PAGE + steps
        max_pages = -(-longest // PAGE)
        capacity = {group.name: (batch + 2) * max_pages for group in layout.groups}
        self.manager = Manager(layout, capacity, num_rows=batch, max_tokens=longest)
        self.pools = Pools(layout, capacity, num_rows=batch, max_tokens=longest, device=device)
        self.views = PagedViews(
            [PagedView(group, batch, batch, max_pages, device) for group in layout.paged_groups]
        )
        more = np.random.default_rng(3).integers(PAGE, size=batch)  # so that pages fill in different steps
        rows = []
        for prompt in prompts_of(length + more):
            rows.append(self.manager.admit(prompt).row)
            self.manager.commit(rows[-1], prompt, len(prompt))
        self.host_rows = np.array(rows, np.int32)
        self.sampled = random_tokens(np.random.default_rng(1), PAGE, batch)
        self.planned: deque[Delta] = deque([self.manager.take_delta()])
        self.apply()
        self.rows = torch.from_numpy(self.host_rows).to(device)
        self.lengths = torch.from_numpy(self.manager.reserved(self.host_rows)).to(device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def plan(self) -> Delta:
        self.manager.reserve(self.host_rows)
        return self.manager.take_delta()

    def finish(self, delta: Delta) -> None:
        """What comes after a step; its fence at once, since nobody computes anything here."""
        self.manager.commit(self.host_rows, self.sampled[delta.step % PAGE])
        self.manager.pass_fence(delta.step)

    def plan_ahead(self, steps: int) -> tuple[float, float]:
        """Deltas for `apply`. µs that a step took: `plan`, `finish`; medians of loops of a page of steps."""
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
        self.pools.apply(self.planned.popleft())

    def refresh(self) -> None:
        self.views.refresh(self.pools.flat_table, self.rows, self.lengths, self.starts)

    def catch_up(self) -> None:
        """Apply what is planned, and have the lengths that the manager has."""
        while self.planned:
            self.apply()
        self.lengths.copy_(torch.from_numpy(self.manager.reserved(self.host_rows)))

    def advance(self) -> None:
        """The device's part of a decode step behind the delta: nothing of it comes from the host."""
        self.lengths.add_(1)
        self.refresh()

    def check(self) -> None:
        """The views, after the last step, say what the manager says."""
        lengths = self.manager.reserved(self.host_rows)
        for view in self.views.views:
            assert np.array_equal(view.seq_lens.cpu().numpy(), lengths)
            found, begins = view.block_table.cpu().numpy(), view.begins.cpu().numpy() // PAGE
            for at, row in enumerate(self.host_rows.tolist()):
                pages, end = self.manager.pages(row, view.group.name), -(-int(lengths[at]) // PAGE)
                first = end - len(pages) if len(pages) < end else 0  # windows may list only what they hold
                begin = int(begins[at])
                assert np.array_equal(found[at, begin:end], pages[begin - first : end - first])


def run() -> None:
    rows: list[Row] = []
    made: list[Row] = []
    for windows in WINDOWS:
        rows += costs_of(windows)
        torch.cuda.empty_cache()
    table(f"a step's delta, {BATCH} decoding requests of {LENGTH:,} tokens and more", rows)
    save("delta", [{"figure": "cost", **row} for row in rows])
    for windows in WINDOWS:  # last, because launches may stay slower once a profiler has looked
        made += asked_of(windows)
        torch.cuda.empty_cache()
    table("what the device is asked for, a step", made)
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
    sent_bytes = [delta.num_bytes - 4 * (3 + groups) for delta in running.planned]  # the head stays here
    for _ in range(PAGE):  # compiles
        running.apply()
        running.refresh()

    add("reserve, take_delta", planning)
    add("commit, pass_fence", finishing)
    add(
        "Pools.apply",
        host_microseconds(running.apply, PAGE, LOOPS),
        busy_microseconds(running.apply),
        queued=queued_microseconds(running.apply, repeats=LOOPS // 2),
    )
    add(
        f"refresh of {groups} views" if windows else "refresh of a view",
        host_microseconds(running.refresh),
        busy_microseconds(running.refresh),
        queued=queued_microseconds(running.refresh),
        graph=graph_microseconds([running.refresh] * IN_GRAPH),
    )
    replay = replayed(running.refresh)
    add(
        "the same, a graph's replay",
        host_microseconds(replay),
        busy_microseconds(replay),
        queued=queued_microseconds(replay),
    )
    step = whole_step(running)
    add("a step: all of it, replayed", host_microseconds(step, PAGE, LOOPS), busy_microseconds(step))
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
    """What `Pools.apply` does of a step's delta, one by one: the same delta over and over."""
    pools, delta = running.pools, running.plan()
    pools.apply(delta)
    running.finish(delta)
    body = delta.packed[3 + len(pools.pools) :]
    sent = pools._inbox.receive(body)
    return {
        "of apply: looking through": lambda: pools._reader.read(delta.packed, delta.num_groups, delta.step),
        "of apply: to the device": lambda: pools._inbox.receive(body),
        "of apply: the launch": lambda: kernels.write_table(sent, delta.num_writes, pools.flat_table),
    }


def whole_step(running: Running) -> Callable[[], None]:
    """Plan, apply, views by a graph's replay, and what comes after; warmed up."""
    running.advance()  # compiles; catching up puts the lengths right
    running.catch_up()
    advance = replayed(running.advance)

    def step() -> None:
        delta = running.plan()
        running.pools.apply(delta)
        advance()
        running.finish(delta)

    for _ in range(PAGE):
        step()
    return step


def asked_of(windows: int) -> list[Row]:
    """What the device is asked for: with views refreshed one by one, and by a graph."""
    running = Running(windows, "cuda")

    def eager() -> None:
        delta = running.plan()
        running.pools.apply(delta)
        running.refresh()
        running.finish(delta)

    for _ in range(PAGE):
        eager()
    step = whole_step(running)
    calls = {"a step": eager, "a step, replayed": step}
    were_asleep = [was_asleep_during(call) for call in calls.values()]  # before the profiler looks
    return [
        {
            "groups": windows + 1,
            "call": name,
            **asked(call),
            "synchronisations": 0,  # or it would have raised
            f"{PAGE} steps asked before the device began": was_asleep,
        }
        for (name, call), was_asleep in zip(calls.items(), were_asleep, strict=True)
    ]


def _or_dash(value: float | None) -> float | str:
    return "–" if value is None else value


def machine(num_bytes: int) -> dict[str, Callable[[], object]]:
    """What the machine itself takes for a copy of as many bytes, and for launches of nothing."""
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


def replayed(call: Callable[[], object]) -> Callable[[], None]:
    """A graph that does what the call did; the call has compiled what it needs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def queued_microseconds(call: Callable[[], object], number: int = PAGE, repeats: int = 11) -> float | None:
    """Device time of a call when many wait in the stream: the median, and no gap of the host's in it.

    None where the host did not get ahead of a sleeping device in any repeat.
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
    """Whether the host was done with a page of calls before the device began with the first."""
    with no_waiting():
        woken = torch.cuda.Event()
        torch.cuda._sleep(SLEEP_CYCLES)
        woken.record()
        for _ in range(PAGE):
            call()
        return "no" if woken.query() else "yes"


def asked(call: Callable[[], object]) -> Row:
    """Copies and launches of a call that waits for nothing, as the profiler sees them on the device."""
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
    """Of the names of what a device did in so many calls, how often it did each in one."""
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
    # A profiler that may not look at the device sees nothing at all: that is no zero.
    return found if names else dict.fromkeys(found, "not seen")
