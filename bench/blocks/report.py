"""Tables of the results: requests, their parts, steps, memory, goals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.blocks.adapters import Pagoda, PagodaSixGroups

Row = dict[str, Any]

TIMES = {
    "admit": "admit",
    "hit": "1,500 of 2,000 hit",
    "look up": "look up",
    "evict": "with eviction",
    "decode": "step of 256",
}
PARTS = ("hash", "match", "allocate", "free", "without hash")
# Goals: how many times faster than the fastest variant of the peer.
GOALS = {Pagoda.name: {"decode": 50, "hit": 40}, PagodaSixGroups.name: dict.fromkeys(TIMES, 100)}
STEP_GOAL_US = 30


def best_of(tries: list[Row]) -> Row:
    """Return the minimum of each statistic over repeats, each of which is a fresh process."""
    good = [row for row in tries if "error" not in row]
    if not good:
        return tries[0]
    best = dict(good[0])
    for key, value in good[0].items():
        if _is_time(value):
            best[key] = {stat: min(row[key][stat] for row in good) for stat in value}
        elif key.endswith("bytes_per_token"):
            best[key] = min(row[key] for row in good)
    names = good[0]["digests"]
    best["digests"] = {name: "/".join(sorted({row["digests"][name] for row in good})) for name in names}
    best["processes"] = len(good)
    return best


def answers_differ(rows: list[Row]) -> list[str]:
    """Return the scenarios with a wrong answer, or with different answers that have to be the same.

    One difference is expected and shown as hit rates: the order of eviction with windows.
    """
    found = set()
    answers: dict[tuple[Any, ...], str] = {}
    for row in (row for row in rows if "error" not in row):
        for name, digest in row["digests"].items():
            is_meant = row["groups"] > 1 and name == "evict"
            kind = (name, row["groups"], _is_ours(row) if is_meant else None)
            if "wrong" in digest or digest != answers.setdefault(kind, digest):
                found.add(name)
    return sorted(found)


def report(rows: list[Row]) -> str:
    """All tables, in Markdown."""
    lines = [f"\n{row['impl']}: {row['error']}" for row in rows if "error" in row]
    rows = [row for row in rows if "error" not in row]
    groups = sorted({row["groups"] for row in rows if not _is_ours(row)} or {1})
    for each in groups:
        here = [row for row in rows if row["groups"] == each or (_is_ours(row) and each > 1 < row["groups"])]
        title = "one group" if each == 1 else f"one full group and {each - 1} window groups"
        fastest = {key: _fastest(rows, key, each) for key in TIMES}
        lines += [f"\n### {title}: median, µs (speed-up over the fastest variant of the peer)\n"]
        lines += _times(here, fastest)
        lines += [f"\n### {title}: the parts of a request, median, µs\n", *_parts(here)]
        lines += [f"\n### {title}: answers\n", *_answers(here)]
    goals = list(_goals(rows))
    if goals:
        head = ["goal", "pagoda", "peer", "times better", "wanted", ""]
        lines += ["\n### Goals\n", *_markdown(head, goals)]
    differ = answers_differ(rows)
    if differ:
        lines += [f"\n**Answers differ: {', '.join(differ)}.**"]
    return "\n".join(lines)


def _is_time(value: Any) -> bool:
    return isinstance(value, dict) and "p50_us" in value


def _is_ours(row: Row) -> bool:
    return row["impl"].startswith(Pagoda.name)


def _fastest(rows: list[Row], key: str, groups: int) -> Row | None:
    """Return the fastest variant of the peer."""
    peers = [row for row in rows if not _is_ours(row) and row["groups"] == groups and key in row]
    return min(peers, key=lambda row: row[key]["p50_us"], default=None)


def _markdown(head: list[str], body: Iterable[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]


def _times(rows: list[Row], fastest: dict[str, Row | None]) -> list[str]:
    body = []
    for row in rows:
        cells = [row["impl"]]
        for key in TIMES:
            us, peer = row.get(key, {}).get("p50_us"), fastest[key]
            if us is None:
                cells.append("–")
            else:
                cells.append(f"{us:,.1f}" + (f" ({peer[key]['p50_us'] / us:.1f}×)" if peer else ""))
        cells.append(str(row.get("bytes_per_token", "–")))
        body.append(cells)
    return _markdown(["", *TIMES.values(), "bytes per token"], body)


def _parts(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        for name in ("admit", "hit"):
            found = [row.get(f"{name}: {part}") for part in PARTS]
            body.append(
                [row["impl"], TIMES[name], *(f"{each['p50_us']:,.1f}" if each else "–" for each in found)]
            )
    return _markdown(["", "", *PARTS], body)


def _answers(rows: list[Row]) -> list[str]:
    names = list(TIMES)
    body = []
    for row in rows:
        cells = [row["impl"]]
        for name in names:
            rate = row.get(f"{name}_hit_rate")
            cells.append("–" if rate is None else f"{rate:.4f} `{row['digests'][name]}`")
        body.append(cells)
    return _markdown(["hit rate and digest", *TIMES.values()], body)


def _goals(rows: list[Row]) -> Iterable[list[str]]:
    for ours in rows:
        for key, wanted in GOALS.get(ours["impl"], {}).items():
            peer = _fastest(rows, key, ours["groups"])
            if peer is None or key not in ours:
                continue
            us, peer_us = ours[key]["p50_us"], peer[key]["p50_us"]
            met = "met" if peer_us / us >= wanted else "missed"
            name = f"{TIMES[key]}, {ours['groups']} groups" if ours["groups"] > 1 else TIMES[key]
            theirs = f"{peer_us:,.1f} ({peer['impl']})"
            yield [name, f"{us:.1f}", theirs, f"{peer_us / us:.1f}", str(wanted), met]
        if ours["impl"] == Pagoda.name and "decode" in ours:
            us = ours["decode"]["p50_us"]
            met = "met" if us <= STEP_GOAL_US else "missed"
            yield ["step of 256, µs", f"{us:.1f}", "–", "–", f"at most {STEP_GOAL_US}", met]
