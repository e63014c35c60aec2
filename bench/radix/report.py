"""Tables of the results: medians, 99th percentiles, eviction by leaves, goals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.radix.adapters import Pagoda

Row = dict[str, Any]

OPERATIONS = {
    "insert": "insert",
    "match_hit": "match hit",
    "match_len": "match hit, no slots",
    "match_split": "match split",
    "match_miss": "match miss",
    "lock": "lock",
    "unlock": "unlock",
    "cycle": "request cycle",
    "evict": "evict",
    "evict_steady": "evict steady",
}
# Goals: how many times faster than the reference.
GOALS = {"match_hit": 10, "insert": 10, "cycle": 15, "lock_unlock": 10}
EVICT_GOALS = {10_000: 100, 40_000: 300}
P99_GOAL = 10
CHUNKED_GOAL = 10
BYTES_GOALS = {1: 2, 16: 4}


def best_of(tries: list[Row]) -> Row:
    """Return the minimum of each statistic over repeats, each of which is a fresh process."""
    good = [row for row in tries if "error" not in row]
    if not good:
        return tries[0]
    best = dict(good[0])
    for key, value in good[0].items():
        if isinstance(value, dict):
            best[key] = {stat: min(row[key][stat] for row in good) for stat in value}
        elif (key.startswith("chunked_") and key.endswith("_us")) or key == "bytes_per_cached_token":
            best[key] = min(row[key] for row in good)
    digests = sorted({row["digest"] for row in good if "digest" in row})
    if digests:
        best["digest"] = "/".join(digests)
    return best


def answers_differ(rows: list[Row]) -> bool:
    """Whether any two implementations gave different answers, or one gave wrong ones."""
    full = [row for row in rows if "digest" in row]
    pages = {row["page"] for row in full}
    return any(row["wrong_hits"] for row in full) or any(
        len({row["digest"] for row in full if row["page"] == page}) > 1 for page in pages
    )


def report(rows: list[Row], reference: str) -> str:
    """All tables, in Markdown."""
    lines = [f"\n{row['impl']}, page {row['page']}: {row['error']}" for row in rows if "error" in row]
    rows = [row for row in rows if "error" not in row]
    full = [row for row in rows if "digest" in row]
    for page in sorted({row["page"] for row in full}):
        here = [row for row in full if row["page"] == page]
        base = next((row for row in here if row["impl"] == reference), here[0])
        speed = f"in brackets the speed-up over {base['impl']}"
        lines += [f"\n### Page {page}: median, µs ({speed})\n", *_medians(here, base)]
        lines += [f"\n### Page {page}: 99th percentile, µs ({speed})\n", *_percentiles(here, base)]
    evictions = sorted({(row["page"], row["evict_leaves"]) for row in rows})
    lines += ["\n### Eviction by leaves: median / 99th percentile, µs\n"]
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines += _markdown(["page", "leaves", *impls], (_evict_cells(rows, impls, *cell) for cell in evictions))
    goals = list(_goals(rows, reference))
    if goals:
        head = ["page", "goal", "pagoda", reference, "times better", "wanted", ""]
        lines += [f"\n### Goals, against {reference}\n", *_markdown(head, goals)]
    if answers_differ(rows):
        lines += ["\n**Answers differ: see the digests.**"]
    return "\n".join(lines)


def _markdown(head: list[str], body: Iterable[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]


def _ratio(base: float, value: float) -> str:
    return f"{value:.2f} ({base / value:.1f}×)"


def _medians(rows: list[Row], base: Row) -> list[str]:
    head = ["", *OPERATIONS.values(), "128k in chunks, ms", "bytes per token", "digest"]
    body = []
    for row in rows:
        cells = [row["impl"]]
        cells += [_ratio(base[key]["p50_us"], row[key]["p50_us"]) for key in OPERATIONS]
        cells.append(_ratio(base["chunked_total_us"] / 1e3, row["chunked_total_us"] / 1e3))
        cells.append(_ratio(base["bytes_per_cached_token"], row["bytes_per_cached_token"]))
        cells.append(row["digest"] + (f", {row['wrong_hits']} wrong" if row["wrong_hits"] else ""))
        body.append(cells)
    return _markdown(head, body)


def _percentiles(rows: list[Row], base: Row) -> list[str]:
    body = [
        [row["impl"], *(_ratio(base[key]["p99_us"], row[key]["p99_us"]) for key in OPERATIONS)]
        for row in rows
    ]
    return _markdown(["", *OPERATIONS.values()], body)


def _evict_cells(rows: list[Row], impls: list[str], page: int, leaves: int) -> list[str]:
    cells = [str(page), f"{leaves:,}"]
    for impl in impls:
        here = _find(rows, impl, page, leaves)
        cells.append(f"{here['evict']['p50_us']:.2f} / {here['evict']['p99_us']:.2f}" if here else "–")
    return cells


def _find(rows: list[Row], impl: str, page: int, leaves: int) -> Row | None:
    found = (
        row for row in rows if row["impl"] == impl and row["page"] == page and row["evict_leaves"] == leaves
    )
    return next(found, None)


def _goals(rows: list[Row], reference: str) -> Iterable[list[str]]:
    """Yield one row of cells per goal that was measured for both."""
    for ours in (row for row in rows if row["impl"] == Pagoda.name):
        page, leaves = ours["page"], ours["evict_leaves"]
        peer = _find(rows, reference, page, leaves)
        if peer is None:
            continue

        def goal(name: str, us: float, peer_us: float, wanted: float, page: int = page) -> list[str]:
            times = peer_us / us
            met = "met" if times >= wanted else "missed"
            return [str(page), name, f"{us:.2f}", f"{peer_us:.2f}", f"{times:.1f}", f"{wanted}", met]

        names = OPERATIONS | {"lock_unlock": "lock + release"}
        if "digest" in ours and "digest" in peer:
            for key, wanted in GOALS.items():
                yield goal(names[key], ours[key]["p50_us"], peer[key]["p50_us"], wanted)
            chunked = (row["chunked_total_us"] for row in (ours, peer))
            yield goal("128k in chunks", *chunked, CHUNKED_GOAL)
            if page in BYTES_GOALS:
                sizes = (row["bytes_per_cached_token"] for row in (ours, peer))
                yield goal("bytes per token", *sizes, BYTES_GOALS[page])
        for key in ("evict", "evict_steady"):
            if leaves in EVICT_GOALS:
                name = f"{names[key]}, {leaves:,} leaves"
                yield goal(name, ours[key]["p50_us"], peer[key]["p50_us"], EVICT_GOALS[leaves])
        for key, name in names.items():
            if key in ours and key in peer:
                yield goal(
                    f"p99 {name}, {leaves:,} leaves" if "evict" in key else f"p99 {name}",
                    ours[key]["p99_us"], peer[key]["p99_us"], P99_GOAL,
                )  # fmt: skip
