"""A plan for people to read. In: figures, a pen; out: tables of at most 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pagoda.cli._plan.asked import visible
from pagoda.cli._plan.figures import Divided, Plan, dtypes, fixed_bytes
from pagoda.cli._tours.pen import Pen
from pagoda.layout import Layout, PagedGroup, StateGroup
from pagoda.layout._numbers import counted, show_bytes, show_tokens
from pagoda.tree._labels import clip, columns_of

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


def write_models(models: Sequence[Layout], pen: Pen) -> None:
    """The list of models, and how to go on."""
    zones = [
        Zone("", ["model", "groups × layers"], ["model", "groups × layers"]),
        Zone("", ["bytes per token", "fixed per request", "context"]),
    ]
    rows = [
        [
            model.name,
            ", ".join(f"{group.name} × {len(group.layers)}" for group in model.groups),
            show_bytes(model.token_bytes) if model.token_bytes else NOTHING,
            show_bytes(sum(fixed_bytes(model))) if sum(fixed_bytes(model)) else NOTHING,
            NOTHING if model.context is None else show_tokens(model.context),
        ]
        for model in models
    ]
    pen.say(pen.paint(BOLD, f"{len(models)} models whose configs come with Pagoda"))
    pen.say()
    _write_table(zones, rows, [], pen)
    pen.say()
    facts = [
        ("per token", "what one more token costs for good, in the model's own dtype, on one rank"),
        ("fixed", "full windows and states: what a long request takes besides, however long"),
        ("sizes", "pagoda plan llama-3.1-8b"),
        ("what fits", "pagoda plan llama-3.1-8b --memory 80GiB --weights 16GiB --context 32k"),
        ("your own", "pagoda plan path/of/config.json, or of the folder it lies in"),
        ("more", "pagoda plan --help"),
    ]
    _write_facts(facts, pen)


def write_plan(plan: Plan, pen: Pen) -> None:
    """Sizes of all groups, what a request takes, and where there is memory how it is divided."""
    layout, context = plan.layout, plan.context
    pen.say(pen.paint(BOLD, _headline(plan, TABLE)))
    pen.say()
    zones = [
        Zone("", ["group", "layers", "keeps"], ["group", "keeps"]),
        Zone("a page or row", ["tokens", "bytes", "per token"]),
        Zone(f"a request at {show_tokens(context)}", ["pages", "bytes"]),
    ]
    rows = [
        [
            group.name,
            f"{len(group.layers):,}",
            _lifetime(group),
            f"{group.page_tokens:,}" if isinstance(group, PagedGroup) else NOTHING,
            show_bytes(group.unit_bytes),
            _token(group),
            f"{group.peak_units(context):,}" if isinstance(group, PagedGroup) else "1 row",
            show_bytes(group.peak_units(context) * group.unit_bytes),
        ]
        for group in layout.groups
    ]
    request = show_bytes(layout.request_bytes(context))
    total = ["all", f"{len(layout.layers):,}", "", "", "", show_bytes(layout.token_bytes), "", request]
    _write_table(zones, rows, total if len(rows) > 1 else [], pen)
    pen.say()
    _write_facts(_sizes(plan), pen)
    if plan.divided is not None:
        pen.say()
        _write_budget(plan, plan.divided, pen)


def _headline(plan: Plan, columns: int) -> str:
    sizes = plan.layout.page_tokens
    pages = [f"{name} pages of {_tokens_or_one(size)}" for name, size in sizes.items()]
    if len(set(sizes.values())) == 1:
        pages = [pages[0].partition(" ")[2]]
    stored = dtypes(plan.layout)
    layers = f"{len(plan.layout.layers):,} layers" if len(plan.layout.layers) != 1 else "1 layer"
    ranks = "one rank" if plan.asked.ranks == 1 else f"one of {plan.asked.ranks:,} ranks"
    kept = " + ".join(stored["kv"] or stored["state"]) or "nothing stored"
    rest = " · ".join([layers, kept, ranks, *pages])
    return clip(f"{visible(plan.layout.name, max(20, columns - len(rest) - 3))} · {rest}", columns)


def _lifetime(group: PagedGroup | StateGroup) -> str:
    if isinstance(group, StateGroup):
        return "one row per request"
    if group.window is not None:
        first = f" + first {group.storage.sink_tokens:,}" if group.storage.sink_tokens else ""
        return f"last {_tokens_or_one(group.window)}{first}"
    return "every token" if group.storage.ratio == 1 else f"one entry per {group.storage.ratio:,} tokens"


def _token(group: PagedGroup | StateGroup) -> str:
    """What a token adds; in parentheses what a window gives back, so that nobody adds it up."""
    if isinstance(group, StateGroup):
        return NOTHING
    size = show_bytes(group.token_bytes)
    return size if group.window is None else f"({size})"


def _sizes(plan: Plan) -> list[Fact]:
    layout, at = plan.layout, show_tokens(plan.context)
    source = "because the model names no limit" if layout.context is None else "the model's own limit"
    context = f"{at} tokens, {'as given' if plan.asked.context else source}"
    if layout.context is not None and plan.context > layout.context:
        context += f"; the model was made for {show_tokens(layout.context)}"
    has_windows, states = any(group.window for group in layout.paged_groups), layout.state_group
    token = f"{show_bytes(layout.token_bytes)} for good" if layout.token_bytes else "nothing for good"
    if has_windows or states:
        token += ": windows and states do not grow"
    if has_windows:
        token += "; in parentheses: until a window is full"
    step = layout.resume_step
    resume = "at any length" if step == 1 else f"at multiples of {show_tokens(step)} tokens"
    facts = [
        ("context", context),
        ("one token", token),
        ("one request", f"{show_bytes(layout.request_bytes(plan.context))} at {at}"),
        ("resume", f"requests resume {resume}" + (", where a checkpoint was taken" if states else "")),
    ]
    if states:
        row = show_bytes(states.state_bytes)
        needs = f"{show_bytes(states.checkpoint_bytes)} of a row of {row}"
        needs = f"all of a row, {row}" if states.checkpoint_bytes == states.state_bytes else needs
        facts.append(("checkpoint", f"needs {needs}; each takes a whole row, for it lies in one"))
    stored = dtypes(layout)
    if stored["index"]:
        facts.append(("indexer", f"keys in {' + '.join(stored['index'])}"))
    if stored["state"] and stored["kv"]:
        facts.append(("states", f"in {' + '.join(stored['state'])}"))
    return facts + [("ranks", _kept(group, plan)) for group in layout.groups if plan.copies(group) > 1]


def _kept(group: PagedGroup | StateGroup, plan: Plan) -> str:
    copies, ranks = plan.copies(group), plan.asked.ranks
    if copies == ranks:
        return f"{group.name}: every rank keeps all of it"
    times = f"{float(copies):.4g} times what one would"
    return f"{group.name}: {ranks:,} ranks together keep {times}: some heads are repeated"


def _write_budget(plan: Plan, divided: Divided, pen: Pen) -> None:
    asked = divided.asked
    left = f"{show_bytes(asked.cache_bytes)} for the cache"
    if asked.weights_bytes is not None:
        memory, weights = show_bytes(asked.memory_bytes), show_bytes(asked.weights_bytes)
        left = f"{memory} of memory − {weights} of weights = {left}"
    pen.say(pen.paint(BOLD, left + (" on each rank" if plan.asked.ranks > 1 else "")))
    pen.say()
    zones = [Zone("", ["group", "pages or rows"], ["group"]), Zone("", ["bytes", "share", ""], [""])]
    rows = [
        [
            share.group.name,
            f"{share.num_units:,}",
            show_bytes(share.num_bytes),
            f"{100 * share.num_bytes / asked.cache_bytes:.1f}%",
            "█" * (filled := BAR * share.num_bytes // asked.cache_bytes) + "░" * (BAR - filled),
        ]
        for share in divided.budget.shares
    ]
    _write_table(zones, rows, ["spare", "", show_bytes(divided.budget.spare_bytes), "", ""], pen)
    pen.say()
    _write_facts(_fits(plan, divided), pen)


def _fits(plan: Plan, divided: Divided) -> list[Fact]:
    asked, budget, layout = divided.asked, divided.budget, plan.layout
    at = f"at {show_tokens(plan.context)}"
    at_context = f"{math.floor(divided.requests):,} {at} ({_down(divided.requests, 2)})"
    fit = "no limit in all: no group keeps every token"
    facts = [("tokens", fit if budget.num_tokens is None else f"{budget.num_tokens:,} fit in all")]
    if list(divided.mix) == [plan.context]:
        facts.append(("requests", at_context))
    else:
        of_mix = f"{budget.num_requests:,} of the mix at once ({_down(budget.requests, 2)})"
        facts.append(("requests", f"{of_mix}: {_mix(divided)}"))
        facts.append(("requests", f"{at_context} if memory were divided for these"))
    longest = "a request of any length fits alone"
    if divided.longest is not None:
        longest = f"{divided.longest:,} tokens in a request alone"
    if layout.context is not None and (divided.longest is None or divided.longest > layout.context):
        longest += f"; the model was made for {show_tokens(layout.context)}"
    facts.append(("longest", longest))
    tokens = "" if divided.more_tokens is None else f"{divided.more_tokens:,} tokens, "
    facts.append(("1 GiB more", f"buys {tokens}{_down(divided.more_requests, 3)} requests {at}"))
    facts.append(("padding", "one page or row of each group: in its bytes, not in its count"))
    if asked.checkpoints:
        kept = "a whole row of states each" if layout.state_group else "costs nothing: no layer keeps a state"
        facts.append(("checkpoints", f"{asked.checkpoints:,} a request: {kept}"))
    has_windows = any(group.window for group in layout.paged_groups)
    held = "windows hold more pages" if has_windows else "costs nothing: no layer has a window in pages"
    if asked.chunk > 1:
        facts.append(("chunk", f"{show_tokens(asked.chunk)} tokens of prefill per step: {held}"))
    if asked.in_flight:
        facts.append(("in flight", f"{counted(asked.in_flight, 'step')}: {held}"))
    if asked.weights_bytes is None:
        facts.append(("weights", "not counted: --weights takes them off the memory"))
    return facts


def _mix(divided: Divided) -> str:
    told = [f"{float(part * 100):.3g}% of {show_tokens(tokens)}" for tokens, part in divided.mix.items()]
    return ", ".join([*told[:MIX], f"and {len(told) - MIX:,} more"] if len(told) > MIX else told)


def _down(number: Fraction, decimals: int) -> str:
    """A number with so many decimals, the rest cut off: no figure promises more than there is."""
    whole, rest = divmod(math.floor(number * 10**decimals), 10**decimals)
    return f"{whole:,}.{rest:0{decimals}}"


def _tokens_or_one(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


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
