"""A plan for people to read. In: figures, a pen; out: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.cli.plan.asked import visible
from pagoda.cli.plan.figures import Budgeted, Group, Model, Plan, Repeated
from pagoda.cli.tours.pen import Pen
from pagoda.layout.numbers import show_bytes, show_tokens
from pagoda.tree.labels import clip, columns_of

__all__ = ["write_models", "write_plan"]

BOLD, DIM, CYAN = "1", "2", "36"
TABLE = 97  # columns, 100 with the margin; a narrower terminal continues lines below: figures are not cut
NOTHING = "–"
BAR = 20  # columns of a full share
MIX = 4  # lengths of a mix that are spelled out
Fact = tuple[str, str]


@dataclass(frozen=True)
class Zone:
    """Columns that stand together under one caption; those in `left` begin with a word."""

    caption: str
    titles: Sequence[str]
    left: Sequence[str] = ()


def write_models(models: Sequence[Model], pen: Pen) -> None:
    """The list of models, and how to go on."""
    zones = [
        Zone("", ["model", "groups × layers"], ["model", "groups × layers"]),
        Zone("", ["bytes per token", "fixed per request", "context"]),
    ]
    rows = [
        [
            model.name,
            ", ".join(f"{name} × {layers}" for name, layers in model.groups.items()),
            _bytes(model.token_bytes) if model.token_bytes else NOTHING,
            _bytes(model.window_bytes + model.state_bytes)
            if model.window_bytes + model.state_bytes
            else NOTHING,
            NOTHING if model.context is None else _tokens(model.context),
        ]
        for model in models
    ]
    pen.say(pen.paint(BOLD, f"{len(models)} models whose configs come with Pagoda"))
    pen.say()
    _write_table(zones, rows, [], pen)
    pen.say()
    _write_facts(
        [
            ("per token", "what one more token costs for good, in the model's own dtype, on one rank"),
            ("fixed", "full windows and states: what a long request takes besides, however long"),
            ("sizes", "pagoda plan llama-3.1-8b"),
            ("what fits", "pagoda plan llama-3.1-8b --memory 80GiB --weights 16GiB --context 32k"),
            ("your own", "pagoda plan path/of/config.json, or of the folder it lies in"),
            ("more", "pagoda plan --help"),
        ],
        pen,
    )


def write_plan(plan: Plan, pen: Pen) -> None:
    """Sizes of all groups, what a request takes, and where there is memory how it is divided."""
    pen.say(pen.paint(BOLD, _headline(plan, TABLE)))
    pen.say()
    zones = [
        Zone("", ["group", "layers", "keeps"], ["group", "keeps"]),
        Zone("a page or row", ["tokens", "bytes", "per token"]),
        Zone(f"a request at {_tokens(plan.context)}", ["pages", "bytes"]),
    ]
    rows = [
        [
            group.name,
            f"{group.layers:,}",
            _lifetime(group),
            NOTHING if group.page_tokens is None else _count(group.page_tokens),
            _bytes(group.unit_bytes),
            NOTHING if group.token_bytes is None else _bytes(group.token_bytes),
            _count(group.request_units) if group.unit == "page" else "1 row",
            _bytes(group.request_bytes),
        ]
        for group in plan.groups
    ]
    total = ["all", f"{plan.layers:,}", "", "", "", _bytes(plan.token_bytes), "", _bytes(plan.request_bytes)]
    _write_table(zones, rows, total if len(rows) > 1 else [], pen)
    pen.say()
    _write_facts(_sizes(plan), pen)
    if plan.budget is not None:
        pen.say()
        _write_budget(plan, plan.budget, pen)


def _headline(plan: Plan, columns: int) -> str:
    sizes = {group.page_tokens: group.name for group in plan.groups if group.page_tokens is not None}
    if len(sizes) == 1:
        pages = [f"pages of {_tokens_or_one(next(iter(sizes)))}"]
    else:
        pages = [
            f"{group.name} pages of {_tokens_or_one(group.page_tokens)}"
            for group in plan.groups
            if group.page_tokens is not None
        ]
    dtypes = " + ".join(plan.dtypes.kv or plan.dtypes.state) or "nothing stored"
    layers = "1 layer" if plan.layers == 1 else f"{plan.layers:,} layers"
    ranks = "one rank" if plan.ranks == 1 else f"one of {plan.ranks:,} ranks"
    rest = " · ".join([layers, dtypes, ranks, *pages])
    return clip(f"{visible(plan.model, max(20, columns - len(rest) - 3))} · {rest}", columns)


def _lifetime(group: Group) -> str:
    if group.unit == "row":
        return "one row per request"
    if group.window is not None:
        first = f" + first {group.sink_tokens:,}" if group.sink_tokens else ""
        return f"last {_tokens_or_one(group.window)}{first}"
    if group.ratio is not None and group.ratio > 1:
        return f"one entry per {group.ratio:,} tokens"
    return "every token"


def _sizes(plan: Plan) -> list[Fact]:
    sources = {
        "given": "as given",
        "model": "the model's own limit",
        "default": "because the model names no limit",
    }
    context = f"{_tokens(plan.context)} tokens, {sources[plan.context_from]}"
    if plan.model_context is not None and plan.context > plan.model_context:
        context += f"; the model was made for {_tokens(plan.model_context)}"
    has_fixed = any(group.window or group.unit == "row" for group in plan.groups)
    token = f"{_bytes(plan.token_bytes)} for good" if plan.token_bytes else "nothing for good"
    resume = (
        "at any length" if plan.resume_step == 1 else f"at multiples of {_tokens(plan.resume_step)} tokens"
    )
    facts = [
        ("context", context),
        ("one token", token + (": windows and states do not grow" if has_fixed else "")),
        ("one request", f"{_bytes(plan.request_bytes)} at {_tokens(plan.context)}"),
        ("resume", f"requests resume {resume}"),
    ]
    if plan.checkpoint_bytes is not None and plan.state_bytes is not None:
        facts[-1] = ("resume", f"requests resume {resume}, where a checkpoint was taken")
        weight = _bytes(plan.checkpoint_bytes)
        of_row = f", of the {_bytes(plan.state_bytes)} of a row"
        facts.append(("checkpoint", weight + (of_row if plan.checkpoint_bytes < plan.state_bytes else "")))
    if plan.dtypes.index:
        facts.append(("indexer", f"keys in {' + '.join(plan.dtypes.index)}"))
    if plan.dtypes.state and plan.dtypes.kv:
        facts.append(("states", f"in {' + '.join(plan.dtypes.state)}"))
    facts += [("ranks", _repetition(each, plan.ranks)) for each in plan.repeated]
    if plan.whole_on_every_rank:
        names = ", ".join(plan.whole_on_every_rank)
        facts.append(("ranks", f"{names}: all heads share one entry, so every rank keeps all of it"))
    return facts


def _repetition(repeated: Repeated, ranks: int) -> str:
    times = "twice" if repeated.times == 2 else f"{repeated.times:,} times"
    if repeated.number == 1:
        return f"1 {repeated.what.removesuffix('s')} on {ranks:,} ranks: it is kept {times}"
    return f"{repeated.number:,} {repeated.what} on {ranks:,} ranks: each is kept {times}"


def _write_budget(plan: Plan, budget: Budgeted, pen: Pen) -> None:
    left = f"{_bytes(budget.cache_bytes)} for the cache"
    if budget.weights_bytes is not None:
        left = f"{_bytes(budget.memory_bytes)} of memory − {_bytes(budget.weights_bytes)} of weights = {left}"
    pen.say(pen.paint(BOLD, left + (" on each rank" if plan.ranks > 1 else "")))
    pen.say()
    zones = [
        Zone("", ["group", "pages or rows"], ["group"]),
        Zone("", ["bytes", "share", ""], [""]),
    ]
    rows = [
        [
            share.group,
            _count(share.units),
            _bytes(share.bytes),
            f"{share.percent:.1f}%",
            _bar(share.bytes, budget.cache_bytes),
        ]
        for share in budget.shares
    ]
    _write_table(zones, rows, ["spare", "", _bytes(budget.spare_bytes), "", ""], pen)
    pen.say()
    _write_facts(_fits(plan, budget), pen)


def _fits(plan: Plan, budget: Budgeted) -> list[Fact]:
    at = f"at {_tokens(plan.context)}"
    at_context = f"{_count(budget.context_requests)} {at} ({budget.context_requests_exact:,.1f} exactly)"
    is_mix = [length.tokens for length in budget.mix] != [plan.context]
    facts = []
    if budget.tokens is None:
        facts.append(("tokens", "no limit in all: no group keeps every token"))
    else:
        facts.append(("tokens", f"{_count(budget.tokens)} fit in all"))
    if is_mix:
        exact = f"{budget.requests_exact:,.1f}"
        facts.append(
            ("requests", f"{_count(budget.requests)} of the mix at once ({exact} exactly): {_mix(budget)}")
        )
        facts.append(("requests", f"{at_context} if memory were divided for these"))
    else:
        facts.append(("requests", f"{at_context}"))
    made_for = ""
    if plan.model_context is not None and (budget.longest_request or 2**62) > plan.model_context:
        made_for = f"; the model was made for {_tokens(plan.model_context)}"
    if budget.longest_request is None:
        facts.append(("longest", f"a request of any length fits alone{made_for}"))
    else:
        facts.append(("longest", f"{_count(budget.longest_request)} tokens in a request alone{made_for}"))
    tokens = "" if budget.more_tokens is None else f"{_count(budget.more_tokens)} tokens, "
    facts.append(("1 GiB more", f"buys {tokens}{budget.more_requests:,} requests {at}"))
    facts.append(("padding", "one page or row of each group: in its bytes, not in its count"))
    if budget.checkpoints:
        has_states = plan.state_bytes is not None
        kept = "rows of states besides its own" if has_states else "costs nothing: no layer keeps a state"
        facts.append(("checkpoints", f"{_count(budget.checkpoints)} a request: {kept}"))
    if budget.chunk > 1:
        has_windows = any(group.window for group in plan.groups)
        held = "windows hold them besides" if has_windows else "costs nothing: no layer has a window in pages"
        facts.append(("chunk", f"{_tokens(budget.chunk)} tokens of prefill in flight: {held}"))
    if budget.weights_bytes is None:
        facts.append(("weights", "not counted: --weights takes them off the memory"))
    return facts


def _mix(budget: Budgeted) -> str:
    told = [f"{length.share * 100:.3g}% of {_tokens(length.tokens)}" for length in budget.mix[:MIX]]
    rest = len(budget.mix) - len(told)
    return ", ".join([*told, f"and {rest:,} more"] if rest else told)


def _bar(part: int, whole: int) -> str:
    filled = BAR * part // whole
    return "█" * filled + "░" * (BAR - filled)


def _bytes(size: float) -> str:
    """As `show_bytes`; in powers of ten where that is wider than a column."""
    return show_bytes(size) if size < 2**50 else f"{size:.3g} B"


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**10 else f"{number:.3g}"


def _tokens(number: int) -> str:
    return show_tokens(number) if number < 10**10 else f"{number:.3g}"


def _tokens_or_one(number: int) -> str:
    return "1 token" if number == 1 else f"{_count(number)} tokens"


def _write_facts(facts: Sequence[Fact], pen: Pen) -> None:
    """A line each, or more where it is long: what, then the rest in a column."""
    indent = max(len(what) for what, _ in facts) + 2
    for what, rest in facts:
        lines = textwrap.wrap(rest, pen.width - indent)
        pen.say(pen.paint(DIM, f"{what:<{indent}}") + lines[0])
        for line in lines[1:]:
            pen.say(" " * indent + line)


def _write_table(
    zones: Sequence[Zone], rows: Sequence[Sequence[str]], total: Sequence[str], pen: Pen
) -> None:
    """Columns in zones, with lines between these; a caption over each zone that has one."""
    titles = [title for zone in zones for title in zone.titles]
    lefts = [title in zone.left for zone in zones for title in zone.titles]
    table = [titles, *rows, *([total] if total else [])]
    widths = [max(columns_of(row[at]) for row in table) for at in range(len(titles))]
    bounds: list[tuple[int, int]] = []
    for zone in zones:
        first = bounds[-1][1] if bounds else 0
        bounds.append((first, first + len(zone.titles)))
        room = sum(widths[slice(*bounds[-1])]) + 2 * (len(zone.titles) - 1)
        widths[bounds[-1][1] - 1] += max(0, columns_of(zone.caption) - room)
    rooms = [sum(widths[a:b]) + 2 * (b - a - 1) for a, b in bounds]

    def line(row: Sequence[str]) -> str:
        padded = []
        for cell, width, left in zip(row, widths, lefts, strict=True):
            space = " " * (width - columns_of(cell))
            padded.append(cell + space if left else space + cell)
        return clip(" │ ".join("  ".join(padded[a:b]) for a, b in bounds).rstrip(), TABLE)

    def rule(crossing: str) -> str:
        return clip(f"─{crossing}─".join("─" * room for room in rooms), TABLE)

    if any(zone.caption for zone in zones):
        captions = " │ ".join(f"{z.caption:^{room}}" for z, room in zip(zones, rooms, strict=True))
        pen.say(pen.paint(DIM, clip(captions.rstrip(), TABLE)))
    pen.say(pen.paint(CYAN, line(titles)))
    pen.say(rule("┼"))
    for row in rows:
        pen.say(line(row))
    if total:
        pen.say(rule("┼"))
        pen.say(line(total))
    pen.say(rule("┴"))
