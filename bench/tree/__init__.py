"""The prefix tree without a peer: cost by leaves and length, the machine's limit, memory, the worst case."""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]

# One module each, with a function `rows`.
FIGURES = {
    "leaves": "cost by leaves: prompts of 1,500 tokens, 256 of them unique; best median / p99 of all",
    "length": "cost by length of a prompt, out of cache; best median / p99 of all",
    "cold": "a cold match of 1,500 tokens against the machine's compare + copy; best median / p99 of all",
    "commits": "a running request that commits page by page",
    "memory": "resident bytes per cached token, each in a fresh process",
    "worst": "a million operations on up to 8k tokens each, presized",
}


def run() -> None:
    # Imported here, because some figures start this package in fresh processes and count their memory.
    from bench.measure import save, table

    rows: list[Row] = []
    for name, title in FIGURES.items():
        part: list[Row] = importlib.import_module(f"bench.tree.{name}").rows()
        table(title, [_shown(row) for row in part])
        rows += [{"figure": name, **row} for row in part]
        save("tree", rows)  # after each figure, so that an interrupt loses little
    table("goals", goals(rows))


def _shown(row: Row) -> Row:
    """Show the best median and the 99th percentile of all in one cell."""
    return {
        key: f"{value['best_us']:,.2f} / {value['p99_us']:,.2f}" if isinstance(value, dict) else value
        for key, value in row.items()
    }


def goals(rows: list[Row]) -> list[Row]:
    """Return the goals, and whether they are met."""

    def of(figure: str) -> list[Row]:
        return [row for row in rows if row["figure"] == figure]

    found: list[Row] = []

    def goal(name: str, measured: float, limit: float) -> None:
        met = "met" if measured <= limit else "missed"
        found.append({"goal": name, "measured": float(measured), "at most": float(limit), "": met})

    for row in of("cold"):
        limit = 1.5 * row["machine, µs"]["best_us"] + 0.4
        goal(f"cold match, page {row['page']}, {row['tree']} tree, µs", row["match, µs"]["best_us"], limit)
    evict = [row["evict, µs"]["best_us"] for row in of("leaves")]
    goal("evict, slowest / fastest over leaves", max(evict) / min(evict), 3)
    for page in sorted({row["page"] for row in of("commits")}):
        totals = {row["tokens"]: row["total, ms"] for row in of("commits") if row["page"] == page}
        longest, shortest = max(totals), min(totals)
        growth = (totals[longest] / totals[shortest]) / (longest / shortest)
        goal(f"commits page by page, page {page}, growth / linear", growth, 1.25)
    for row in of("memory"):
        page, splits = row["page"], row["requests that split"]
        bytes_limit = {1: 9.0, 16: 5.0}.get(page)
        if bytes_limit:
            goal(f"bytes per token, page {page}", row["after the build"], bytes_limit)
            goal(f"churn / build, page {page}, {splits:.2f} of requests split", row["churn / build"], 1.2)
    for row in (row for row in of("worst") if row["operation"] == "all"):
        for clock in ("CPU", "wall"):
            for runs in ("one run", "all runs"):
                name = f"operations over 100 µs, page {row['page']}, {clock}, {runs}"
                goal(name, row[f"{clock} > 100 µs, {runs}"], 0)
    return found
