"""Hits of a model with states: the manager's checkpoints beside a bound that knows the future, and LRU.

In: seeds of workloads, and a recorded trace. Out: hit tokens as a share of the bound, by number of
checkpoints. No model and no pools: only what the manager plans. The figures are the same on every machine.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.checkpoints import real
from bench.checkpoints.bound import bound, intervals_of
from bench.checkpoints.model import Model, Outcome
from bench.checkpoints.order import LeastRecentlyUsed, Rule
from bench.checkpoints.paths import paths_of
from bench.checkpoints.workloads import Workload, recorded, seeded

Row = dict[str, Any]

BUDGETS = (16, 24, 48, 96, 256)
TRACE_BUDGETS = (100, 300, 1_000, 3_000)
SEEDS = {"chains": 20, "agents": 6, "chats": 20, "templates": 20, "chats + scans": 20}
GOALS = {  # at least, by budget
    "chains": (70, 85, 93, 96, 97),
    "agents": (42, 50, 72, 90, 96),
    "chats": (78, 87, 97, 99, 99),
    "templates": (83, 86, 90, 94, 97),
    "chats + scans": (62, 74, 88, 92, 95),
    "trace": (42, 52, 75, 88),
}


def run(trace: Path | None = None) -> None:
    from bench.measure import save, table

    if trace is None:
        print("trace: skipped, because no --trace PATH was given")
    jobs = [(name, seed, trace) for name, num in SEEDS.items() for seed in range(num)]
    jobs += [("trace", 0, trace)] if trace else []
    rows: list[Row] = []
    # All cores: these are counts, which a busy machine does not change.
    with multiprocessing.get_context("spawn").Pool() as pool:
        for name, results in groupby(pool.imap(_measured, jobs), key=itemgetter(0)):
            parts = [part for _, part in results]
            by_budget = zip(zip(*parts, strict=True), GOALS[name], strict=True)
            means = [_mean(name, list(same), goal) for same, goal in by_budget]
            table(f"{name}: hit tokens, % of the bound; mean of the seeds", means)
            rows += means
            save("checkpoints", rows)  # after each workload, so that an interrupt loses little


def measured(workload: Workload, budgets: tuple[int, ...]) -> Iterator[Row]:
    """Yield hit tokens as a share of the bound, for each number of checkpoints."""
    paths = paths_of(workload)
    intervals = intervals_of(paths)
    longest = max(path.total_tokens for together in paths.rounds for path in together)
    # Every page that is ever computed, and those that running rows compute again.
    num_pages = paths.num_nodes + workload.running * (longest // workload.page_tokens + 1)
    for n in budgets:
        outcomes = real.run(workload, n, num_pages, longest)
        model = Model(paths, n, Rule(n)).run()
        lru = Model(paths, n, LeastRecentlyUsed(n)).run()
        most = bound(intervals, n)
        yield {
            "checkpoints": n,
            "manager, %": _share(outcomes, most),
            "LRU, %": _share(lru, most),
            "plain model, %": _share(model, most),
            "model agrees": outcomes == model,
        }


def _measured(job: tuple[str, int, Path | None]) -> tuple[str, list[Row]]:
    name, seed, trace = job
    if trace is not None and name == "trace":
        return name, list(measured(recorded(trace), TRACE_BUDGETS))
    workload = seeded(name, seed)
    requests = list(workload.requests())  # once, not for each budget
    return name, list(measured(replace(workload, requests=lambda: iter(requests)), BUDGETS))


def _share(outcomes: list[Outcome], most: int) -> float:
    return 100 * sum(outcome.hit for outcome in outcomes) / most


def _mean(name: str, rows: list[Row], goal: int) -> Row:
    shares = {key: fmean(row[key] for row in rows) for key in rows[0] if key.endswith("%")}
    lowest = min(row["manager, %"] for row in rows)
    return {
        "workload": name,
        "checkpoints": rows[0]["checkpoints"],
        "seeds": len(rows),
        **{key: round(share, 1) for key, share in shares.items()},
        "lowest seed, %": round(lowest, 1),
        "at least": goal,
        "": "met" if shares["manager, %"] >= goal else "missed",
        "model agrees": "yes" if all(row["model agrees"] for row in rows) else "no",
    }
