"""``python -m bench.plot``: bench/results/*.json → docs/plots/*.svg. Draws only existing results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench.measure import RESULTS

PLOTS = Path(__file__).parent.parent / "docs" / "plots"
GREY = "#7d8590"  # text and axes: legible on white and on black, as the colours are
COLOURS = ["#2f81f7", "#d29922", "#3fb950", "#db61a2", "#a371f7"]
PEER_COLOURS = {"sglang-rust": "#f85149", "sglang-unified": "#bc8c5f", "sglang-radix": "#8b949e"}
VLLM_COLOURS = {1: "#f85149", 6: "#bc8c5f"}  # by groups
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and it can be searched
    "svg.hashsalt": "pagoda",  # the same numbers give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}

Row = dict[str, Any]


def results(name: str) -> list[Row]:
    """Return the rows of one benchmark; none if it was not run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def main() -> None:
    mpl.rcParams.update(STYLE)
    tree, manager, attention = results("tree"), results("manager"), results("attention-sweep")
    if not tree and not manager and not attention:
        raise SystemExit(
            "bench.plot: no results; run `python -m bench tree manager` first, or "
            "`python -m bench attention --sweep` on a machine with a GPU"
        )
    PLOTS.mkdir(parents=True, exist_ok=True)
    if tree:
        by_leaves(
            [row for row in tree if row["figure"] == "leaves"],
            [row for row in results("radix") if row["impl"] in PEER_COLOURS and "evict" in row],
        )
        by_length([row for row in tree if row["figure"] == "length"])
    if manager:
        by_batch(
            [row for row in manager if row["figure"] == "batch"],
            [row for row in results("blocks") if row["impl"].startswith("vllm") and "decode" in row],
        )
        by_context([row for row in manager if row["figure"] == "length"])
    if attention:
        by_decode(attention)


def by_leaves(rows: list[Row], peers: list[Row]) -> None:
    figure, axes = _axes("leaves in the tree", "Cost of an operation by leaves (prompts of 1,500 tokens)")
    _lines(axes, rows, "leaves", ["match, µs", "insert, µs", "lock + release, µs", "evict, µs"])
    first_page = min((row["page"] for row in peers), default=0)
    for name, colour in PEER_COLOURS.items():
        points = sorted(
            (row["evict_leaves"], row["evict"]["p50_us"])
            for row in peers
            if row["impl"] == name and row["page"] == first_page
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o--", color=colour, label=f"evict, {name}")
    _write(figure, axes, "tree-leaves")


def by_length(rows: list[Row]) -> None:
    figure, axes = _axes("tokens of the prompt", "Cost of an operation by length (out of cache)")
    names = ["match, µs", "insert half new, µs", "insert new, µs", "evict as many, µs", "lock + release, µs"]
    _lines(axes, rows, "tokens", names)
    points = [(row["tokens"], row["machine, µs"]["best_us"]) for row in rows]
    axes.plot(*zip(*points, strict=True), ":", color=GREY, label="machine: compare + copy")
    _write(figure, axes, "tree-length")


def by_batch(rows: list[Row], peers: list[Row]) -> None:
    figure, axes = _axes("running requests", "Cost of a decode step (contexts of 1,000 tokens)")
    for groups, colour in zip(sorted({row["groups"] for row in rows}), COLOURS, strict=False):
        points = [(row["requests"], row["step, µs"]["best_us"]) for row in rows if row["groups"] == groups]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=_groups(groups))
        best = min((row["decode"]["p50_us"] for row in peers if row["groups"] == groups), default=None)
        if best is not None:
            label = f"{_groups(groups)}, vLLM's fastest"
            axes.plot([256], [best], "D", color=VLLM_COLOURS.get(groups, GREY), label=label)
    _write(figure, axes, "manager-batch")


def by_context(rows: list[Row]) -> None:
    figure, axes = _axes("tokens of context", "Cost of the manager's calls by context")
    names = [name for name in rows[0] if name.endswith(", µs")]
    for groups, line in zip(sorted({row["groups"] for row in rows}), ("o-", "o--"), strict=False):
        here = [row for row in rows if row["groups"] == groups]
        for name, colour in zip(names, COLOURS, strict=False):
            points = [(row["tokens"], row[name]["best_us"]) for row in here]
            label = f"{name.removesuffix(', µs')}, {_groups(groups)}"
            axes.plot(*zip(*points, strict=True), line, color=colour, label=label)
    _write(figure, axes, "manager-context")


def by_decode(rows: list[Row]) -> None:
    title = "Bandwidth of decode attention (8 KV heads × 128, bfloat16, pages of 16, shuffled)"
    figure, axes = _axes("tokens of context", title, "TB/s of keys and values", "linear")
    for batch, colour in zip(sorted({row["rows"] for row in rows}), COLOURS, strict=False):
        here = [row for row in rows if row["rows"] == batch]
        name = "1 row" if batch == 1 else f"{batch} rows"
        for column, line, label in (
            ("ours TB/s", "o-", name),
            ("cuDNN TB/s", "o--", f"{name}, SDPA (cuDNN) on contiguous tensors"),
        ):
            points = [(row["context"], row[column]) for row in here if isinstance(row[column], float)]
            if points:
                axes.plot(*zip(*points, strict=True), line, color=colour, label=label)
    axes.axhline(rows[0]["copy TB/s"], linestyle=":", color=GREY, label="limit: a device copy")
    axes.set_xticks(sorted({row["context"] for row in rows}))
    axes.set_ylim(bottom=0)
    _write(figure, axes, "attention-decode")


def _groups(n: int) -> str:
    return "1 group" if n == 1 else f"{n} groups"


def _axes(across: str, title: str, up: str = "µs, median", scale: str = "log") -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.subplots()
    axes.set(xscale="log", yscale=scale, xlabel=across, ylabel=up)
    axes.set_title(title, fontsize=11, color=GREY)
    axes.grid(True, which="major")
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure, axes


def _lines(axes: Axes, rows: list[Row], across: str, names: list[str]) -> None:
    for name, colour in zip(names, COLOURS, strict=False):
        points = [(row[across], row[name]["best_us"]) for row in rows]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name.removesuffix(", µs"))


def _write(figure: Figure, axes: Axes, name: str) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(PLOTS / f"{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    print(f"docs/plots/{name}.svg")


if __name__ == "__main__":
    main()
