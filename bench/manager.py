"""The manager without a peer: decode steps by batch and context, prefill, admission, fork, release."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.samples import CLOCK_NS, each_of_batch, now, stats
from pagoda.layout import FullAttention, GatedDelta, Layout, WindowAttention
from pagoda.layout._work import WORKERS
from pagoda.manager import Manager

Row = dict[str, Any]
Int32 = npt.NDArray[np.int32]

PAGE = 16
WINDOW = 1_024
WINDOWS = (0, 5)  # window groups beside the full one
BATCHES = (1, 4, 16, 64, 256, 1_024, 4_096)
LENGTHS = (1_024, 10_240, 102_400, 1_024_000)
CHUNK = 2_048
NEW = 500  # tokens of a prompt after its hit
RUNNING = 16  # requests in the figure by length
SAMPLES = 40
REPEATS = 4  # fresh managers; the minimum of each statistic is kept
WORST = (256, 1_024, 4_096)
CHECKPOINTS = (1_000, 10_000, 100_000)
STATE = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
STEPS = 40 * PAGE  # in the figure of single steps: rows of such contexts begin a new chunk ten times

FIGURES = {
    "batch": "a decode step by number of requests, contexts of 1,000 tokens; best median / p99 of all",
    "worst": "single decode steps, contexts of 1,000 tokens; median / p99 / max of a run, minimum of each",
    "length": f"by context: a step of {RUNNING} requests, one request's chunk, admission, fork, release",
    "states": "with a state group and without, contexts of 1,000 tokens; a hit of 1,504 of 2,000 tokens",
    "checkpoints": "a request of 36 tokens that saves one checkpoint, by number of checkpoints; µs",
    "work": "plan of a decode step of 256 requests, with work lists and without; best median / p99",
}


def run() -> None:
    from bench.measure import save, table

    figures: dict[str, Callable[[], list[Row]]] = {
        "batch": by_batch,
        "worst": by_worst,
        "length": by_length,
        "states": by_states,
        "checkpoints": by_checkpoints,
        "work": by_work,
    }
    rows: list[Row] = []
    for name, title in FIGURES.items():
        # In turn, so that a noisy minute affects all of them.
        tries = [figures[name]() for _ in range(REPEATS)]
        part = [_best(same) for same in zip(*tries, strict=True)]
        table(title, [_shown(row) for row in part])
        rows += [{"figure": name, **row} for row in part]
        save("manager", rows)  # after each figure, so that an interrupt loses little
    table("goals", goals(rows))


def goals(rows: list[Row]) -> list[Row]:
    """Return the goals, and whether they are met."""
    found = []
    for row in rows:
        if row["figure"] == "batch" and row["groups"] == 1 and row["requests"] == 256:
            us = row["step, µs"]["best_us"]
            met = "met" if us <= 30 else "missed"
            found.append({"goal": "256 requests by one token, µs", "measured": us, "at most": 30.0, "": met})
    without, with_states = (row for row in rows if row["figure"] == "states")
    for name in ("step of 256, µs", "admit, µs"):
        ratio = round(with_states[name]["best_us"] / without[name]["best_us"], 2)
        met = "met" if ratio <= 1.5 else "missed"
        found.append({"goal": f"{name}: with states / without", "measured": ratio, "at most": 1.5, "": met})
    most = max((row for row in rows if row["figure"] == "checkpoints"), key=lambda row: row["checkpoints"])
    us = round(most["evicting, µs"]["p50_us"] - most["with free ones, µs"]["p50_us"], 2)
    met = "met" if us <= 2 else "missed"
    name = f"eviction at {most['checkpoints']:,} checkpoints, µs"
    found.append({"goal": name, "measured": us, "at most": 2.0, "": met})
    for row in rows:
        if row["figure"] == "work":
            us = round(row["with lists, µs"]["best_us"] - row["without, µs"]["best_us"], 2)
            name, met = f"work list of 256 rows, {row['contexts']}, µs", "met" if us <= 20 else "missed"
            found.append({"goal": name, "measured": us, "at most": 20.0, "": met})
    return found


def by_work() -> list[Row]:
    """Time `plan` alone: the list is made there."""
    rng = np.random.default_rng(8)
    uneven = np.exp(rng.uniform(np.log(100), np.log(60_000), 256)).astype(np.int64)
    found = []
    for contexts, lengths in (("1,000 each", np.full(256, 1_000)), ("100 to 60,000", uneven)):
        row: Row = {"contexts": contexts}
        for name, workers in (("without, µs", 0), ("with lists, µs", WORKERS)):
            row[name] = plan_cost(lengths, workers)
        found.append(row)
    return found


def plan_cost(lengths: npt.NDArray[np.int64], workers: int) -> dict[str, Any]:
    layout = Layout([FullAttention(kv_heads=8, k_dim=128, v_dim=128)], PAGE)
    longest = int(lengths.max()) + STEPS
    pages = int((-(-(lengths + STEPS) // PAGE)).sum())
    manager = Manager(layout, {"full": pages}, num_rows=len(lengths), max_tokens=longest, workers=workers)
    rows = np.array([manager.admit(tokens, store=False).row for tokens in prompts_of(lengths)], np.int32)
    manager.pass_fence(manager.plan(rows, lengths).step)
    samples = []
    for _ in range(STEPS):
        manager.reserve(rows)
        begin = now()
        delta = manager.plan(rows)
        samples.append(now() - begin)
        manager.pass_fence(delta.step)
    return stats(samples)


def by_states() -> list[Row]:
    found = []
    for has_states in (False, True):
        manager, rows = running(256, 1_000, 0, checkpoints=1_024 if has_states else None)
        row: Row = {"states": "yes" if has_states else "no", "step of 256, µs": step_cost(manager, rows)}
        row["admit, µs"] = hit_cost(manager)
        found.append(row)
    return found


def hit_cost(manager: Manager) -> dict[str, Any]:
    """Time prompts of 2,000 tokens of which 1,504 are cached."""
    rng = np.random.default_rng(6)
    samples = []
    for _ in range(SAMPLES):
        first = random_tokens(rng, 1_505)
        row = manager.admit(first).row
        manager.plan(row, 1_504)
        manager.commit(row, first[:1_504])
        manager.release(row)
        manager.pass_fence(manager.plan().step)
        tokens = np.concatenate((first[:1_504], random_tokens(rng, 496)))
        begin = now()
        admitted = manager.admit(tokens)
        samples.append(now() - begin)
        assert admitted.hit == 1_504, admitted
        manager.release(admitted.row)
        manager.pass_fence(manager.plan().step)
    return stats(samples)


def by_checkpoints(counts: tuple[int, ...] = CHECKPOINTS) -> list[Row]:
    found = []
    for n in counts:
        row: Row = {"checkpoints": n}
        for name, capacity in (("with free ones, µs", 3 * n), ("evicting, µs", n)):
            row[name] = save_cost(n, capacity)
        found.append(row)
    return found


def save_cost(n: int, capacity: int) -> dict[str, Any]:
    """Time requests of 36 tokens, of which 3 in 10 repeat an earlier one, after 2 n others."""
    layout = Layout([FullAttention(kv_heads=8, k_dim=128, v_dim=128), STATE], PAGE)
    manager = Manager(layout, {"full": 8 * n, "checkpoint": capacity}, num_rows=2, max_tokens=64)
    rng = np.random.default_rng(7)
    prompts = random_tokens(rng, 2 * n, 36)
    order = np.where(
        rng.random(2 * n) < 0.7, np.arange(2 * n), (rng.random(2 * n) * np.arange(2 * n)).astype(int)
    )
    samples = []
    for which in order.tolist():
        tokens = prompts[which]
        begin = now()
        admitted = manager.admit(tokens)
        at = admitted.hit
        for cut in (*admitted.cuts, 36):
            manager.plan(admitted.row, cut - at)
            manager.commit(admitted.row, tokens[at:cut])
            at = cut
        manager.release(admitted.row)
        manager.pass_fence(manager.step - 1)
        samples.append(now() - begin)
    return stats(samples[-min(n, 20_000) :])


def by_batch(batches: tuple[int, ...] = BATCHES) -> list[Row]:
    found = []
    for windows in WINDOWS:
        for batch in batches:
            manager, rows = running(batch, 1_000, windows)
            found.append({"groups": windows + 1, "requests": batch, "step, µs": step_cost(manager, rows)})
    return found


def by_worst(batches: tuple[int, ...] = WORST) -> list[Row]:
    """Measure every step: rows that fill their pages in different steps, and all in the same one."""
    found = []
    for windows in WINDOWS:
        for batch in batches:
            row: Row = {"groups": windows + 1, "rows": batch}
            for name, own_length in (("pages fill in turn, µs", True), ("all at once, µs", False)):
                row[name] = steps_cost(*running(batch, 1_000, windows, own_length=own_length))
            found.append(row)
    return found


def by_length(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    return [measured(length, windows) for windows in WINDOWS for length in lengths]


def measured(length: int, windows: int) -> Row:
    manager, rows = running(RUNNING, length, windows, own_length=False)
    row: Row = {"groups": windows + 1, "tokens": length}
    row["admit, µs"], row["release, µs"] = admission_cost(manager, rows)
    row["fork, µs"] = fork_cost(manager, int(rows[0]))
    row[f"step of {RUNNING}, µs"] = step_cost(manager, rows)
    row[f"chunk of {CHUNK:,}, µs"] = chunk_cost(manager, rows)
    return row


def running(
    batch: int, length: int, windows: int, *, own_length: bool = True, checkpoints: int | None = None
) -> tuple[Manager, npt.NDArray[np.int32]]:
    """Return a manager and its running rows, of random tokens; with states if it has checkpoints.

    `own_length`: rows are up to a page longer, so that their pages fill in different steps.
    """
    layers: list[Any] = [FullAttention(kv_heads=8, k_dim=128, v_dim=128)]
    for i in range(windows):  # different sizes, because equal layers share a group
        layers.append(WindowAttention(kv_heads=8, k_dim=128, v_dim=128 + i, window=WINDOW))
    if checkpoints is not None:
        layers.append(STATE)
    layout = Layout(layers, PAGE)
    longest = length + max(STEPS, SAMPLES * PAGE) + 2 * PAGE + CHUNK * 4
    # Enough for every row at its longest, one more prompt, and forks.
    pages = (batch + 2) * -(-longest // PAGE)
    capacity = {group.name: pages for group in layout.paged_groups}
    if checkpoints is not None:
        capacity["checkpoint"] = checkpoints
    manager = Manager(layout, capacity, num_rows=batch + 4, max_tokens=longest)
    more = np.random.default_rng(3).integers(PAGE, size=batch) * own_length
    rows = []
    for tokens in prompts_of(length + more):
        row = manager.admit(tokens).row
        manager.plan(row, len(tokens))
        manager.commit(row, tokens)
        rows.append(row)
    manager.pass_fence(manager.step - 1)
    gc.collect()
    return manager, np.array(rows, np.int32)


def prompts_of(lengths: npt.NDArray[np.int64]) -> Iterator[Int32]:
    """Yield the prompts of running rows, the same each time."""
    rng = np.random.default_rng(0)
    for length in lengths.tolist():
        yield random_tokens(rng, length)


def random_tokens(rng: np.random.Generator, *shape: int) -> Int32:
    return rng.integers(0, 2**31 - 1, shape, dtype=np.int32)


def step_cost(manager: Manager, rows: Int32) -> dict[str, Any]:
    """Time steps of one token per row, a page of steps at a time, so that all samples do the same work."""
    sampled = random_tokens(np.random.default_rng(1), PAGE, len(rows))
    samples = []
    for _ in range(SAMPLES):
        begin = now()
        for tokens in sampled:
            manager.reserve(rows)
            delta = manager.plan(rows)
            manager.commit(rows, tokens)
            manager.pass_fence(delta.step)
        samples.append(each_of_batch(now() - begin, PAGE))
    return stats(samples)


def steps_cost(manager: Manager, rows: Int32) -> dict[str, Any]:
    """Time single steps of one token per row: the usual ones and the worst."""
    rng = np.random.default_rng(1)
    samples = []
    for _ in range(STEPS):
        tokens = random_tokens(rng, len(rows))
        begin = now()
        manager.reserve(rows)
        delta = manager.plan(rows)
        manager.commit(rows, tokens)
        manager.pass_fence(delta.step)
        samples.append(now() - begin)
    found = stats(samples)
    found["max_us"] = round((max(samples) - CLOCK_NS) / 1e3, 3)
    return found


def chunk_cost(manager: Manager, rows: Int32) -> dict[str, Any]:
    """Time one chunk of a request's prefill."""
    rng = np.random.default_rng(2)
    samples = []
    for row in rows.tolist() * 3:
        tokens = random_tokens(rng, CHUNK)
        begin = now()
        manager.reserve(row, CHUNK)
        delta = manager.plan(row, CHUNK)
        manager.commit(row, tokens)
        manager.pass_fence(delta.step)
        samples.append(now() - begin)
    return stats(samples)


def admission_cost(manager: Manager, rows: Int32) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time a prompt that shares a running row's beginning; then its release, until its fence has passed."""
    length = int(manager.committed(rows[:1])[0])
    rng = np.random.default_rng(4)
    admissions, releases = [], []
    for _ in range(3):
        for prompt in prompts_of(np.full(len(rows), length)):
            tokens = np.concatenate((prompt, random_tokens(rng, NEW)))
            begin = now()
            admitted = manager.admit(tokens)
            middle = now()
            manager.release(admitted.row)
            end = now()
            assert admitted.hit == length, (admitted.hit, length)
            step = manager.plan().step
            fence = now()
            manager.pass_fence(step)
            releases.append(end - middle + now() - fence)
            admissions.append(middle - begin)
    return stats(admissions), stats(releases)


def fork_cost(manager: Manager, row: int) -> dict[str, Any]:
    """Time one fork, which is released again."""
    samples = []
    for _ in range(SAMPLES):
        begin = now()
        child = manager.fork(row)
        samples.append(now() - begin)
        manager.release(child)
        manager.pass_fence(manager.plan().step)
    return stats(samples)


def _best(tries: Sequence[Row]) -> Row:
    """Return the minimum of each statistic."""
    return {
        key: {stat: min(row[key][stat] for row in tries) for stat in value}
        if isinstance(value, dict)
        else value
        for key, value in tries[0].items()
    }


def _shown(row: Row) -> Row:
    """Show the best median and the 99th percentile in one cell; for a step, also the cost per request.

    For single steps, show the median of all and the worst, since they do not all do the same work."""

    def cell(value: dict[str, Any]) -> str:
        if "max_us" in value:
            return " / ".join(f"{value[stat]:,.1f}" for stat in ("p50_us", "p99_us", "max_us"))
        return f"{value['best_us']:,.2f} / {value['p99_us']:,.2f}"

    shown: Row = {key: cell(value) if isinstance(value, dict) else value for key, value in row.items()}
    if "requests" in row:
        shown["ns per request"] = row["step, µs"]["best_us"] * 1_000 / row["requests"]
    if "contexts" in row:
        shown["ratio"] = row["with lists, µs"]["best_us"] / row["without, µs"]["best_us"]
    return shown
