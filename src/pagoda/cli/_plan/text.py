"""A plan as text. In: figures, a pen; out: tables of at most 100 columns."""

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
TABLE = 97  # columns, 100 with the margin; a narrower terminal wraps lines, so that no figure is cut
NOTHING = "–"
BAR = 20  # columns of a full share
MIX = 4  # lengths of a mix that are spelled out
Fact = tuple[str, str]


@dataclass(frozen=True)
class Zone:
    """Columns under one caption; those in `left` are aligned to the left."""

    caption: str
    titles: Sequence[str]
    left: Sequence[str] = ()


def write_models(models: Sequence[Layout], pen: Pen) -> None:
    """Write the list of models, and what to try next."""
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
        ("per token", "in all layers that keep every token, in the model's dtype, on one rank"),
        (
            "fixed",
            "full windows and states: additional memory per request that does not grow with its length",
        ),
        ("sizes", "pagoda plan llama-3.1-8b"),
        ("what fits", "pagoda plan llama-3.1-8b --memory 80GiB --weights 16GiB --context 32k"),
        ("your own", "pagoda plan path/to/config.json, or the path of its folder"),
        ("help", "pagoda plan --help"),
    ]
    _write_facts(facts, pen)


def write_plan(plan: Plan, pen: Pen) -> None:
    """Write the sizes of all groups, what a request needs and, given memory, how it is divided."""
    layout, context = plan.layout, plan.context
    pen.say(pen.paint(BOLD, _headline(plan, TABLE)))
    pen.say()
    zones = [
        Zone("", ["group", "layers", "keeps"], ["group", "keeps"]),
        Zone("page or state", ["tokens", "bytes", "per token"]),
        Zone(f"request of {_length(context)}", ["pages", "bytes"]),
    ]
    rows = [
        [
            group.name,
            f"{len(group.layers):,}",
            _lifetime(group),
            f"{group.page_tokens:,}" if isinstance(group, PagedGroup) else NOTHING,
            show_bytes(group.unit_bytes),
            _token(group),
            f"{group.peak_units(context):,}" if isinstance(group, PagedGroup) else "1 state",
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
        return "one state per request"
    if group.window is not None:
        first = f" + first {group.storage.sink_tokens:,}" if group.storage.sink_tokens else ""
        return f"last {_tokens_or_one(group.window)}{first}"
    return "every token" if group.storage.ratio == 1 else f"one entry per {group.storage.ratio:,} tokens"


def _token(group: PagedGroup | StateGroup) -> str:
    """Return the bytes per token; in parentheses for windows, which do not count towards the total."""
    if isinstance(group, StateGroup):
        return NOTHING
    size = show_bytes(group.token_bytes)
    return size if group.window is None else f"({size})"


def _sizes(plan: Plan) -> list[Fact]:
    layout, length = plan.layout, _length(plan.context)
    source = "the default: the model has no limit" if layout.context is None else "the model's limit"
    context = f"{length}, {'as given' if plan.asked.context else source}"
    if layout.context is not None and plan.context > layout.context:
        context += f"; the model was made for {show_tokens(layout.context)}"
    has_windows, states = any(group.window for group in layout.paged_groups), layout.state_group
    token = show_bytes(layout.token_bytes)
    if has_windows or states:
        token += "; windows and states do not grow with the length"
    if has_windows:
        token += " (in parentheses: until the window is full)"
    step = layout.resume_step
    reuse = "at any length" if step == 1 else f"in multiples of {show_tokens(step)} tokens"
    facts = [
        ("context", context),
        ("per token", token),
        ("per request", f"{show_bytes(layout.request_bytes(plan.context))} for {length}"),
        ("reuse", f"cached prefixes are reused {reuse}" + (", up to a checkpoint" if states else "")),
    ]
    if states:
        size, state = show_bytes(states.checkpoint_bytes), show_bytes(states.state_bytes)
        is_whole = states.checkpoint_bytes == states.state_bytes
        facts.append(("checkpoint", f"{size}, {'a whole state' if is_whole else f'of a state of {state}'}"))
    stored = dtypes(layout)
    if stored["index"]:
        facts.append(("indexer", f"keys in {' + '.join(stored['index'])}"))
    if stored["state"] and stored["kv"]:
        facts.append(("states", f"in {' + '.join(stored['state'])}"))
    return facts + [("ranks", _kept(group, plan)) for group in layout.groups if plan.copies(group) > 1]


def _kept(group: PagedGroup | StateGroup, plan: Plan) -> str:
    copies, ranks = plan.copies(group), plan.asked.ranks
    if copies == ranks:
        return f"{group.name}: every rank keeps a full copy"
    times = f"{float(copies):.4g} times as much as a single rank would"
    return f"{group.name}: {ranks:,} ranks together keep {times}, because some heads are repeated"


def _write_budget(plan: Plan, divided: Divided, pen: Pen) -> None:
    asked = divided.asked
    left = f"{show_bytes(asked.cache_bytes)} for the cache"
    if asked.weights_bytes is not None:
        memory, weights = show_bytes(asked.memory_bytes), show_bytes(asked.weights_bytes)
        left = f"{memory} of memory − {weights} of weights = {left}"
    pen.say(pen.paint(BOLD, left + (" on each rank" if plan.asked.ranks > 1 else "")))
    pen.say()
    zones = [Zone("", ["pool", "number"], ["pool"]), Zone("", ["bytes", "share", ""], [""])]
    rows = [
        [
            share.name,
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
    length = _length(plan.context)
    at_context = f"{math.floor(divided.requests):,} of {length} at once ({_down(divided.requests, 2)})"
    fit = "no limit: no group keeps every token"
    facts = [("tokens", fit if budget.num_tokens is None else f"{budget.num_tokens:,} in total")]
    if list(divided.mix) == [plan.context]:
        facts.append(("requests", at_context))
    else:
        of_mix = f"{budget.num_requests:,} of the mix at once ({_down(budget.requests, 2)})"
        facts.append(("requests", f"{of_mix}: {_mix(divided)}"))
        facts.append(("requests", f"{at_context} if memory were divided for this length"))
    longest = "a single request of any length fits"
    if divided.longest is not None:
        longest = f"a single request of {divided.longest:,} tokens fits"
    if layout.context is not None and (divided.longest is None or divided.longest > layout.context):
        longest += f"; the model was made for {show_tokens(layout.context)}"
    facts.append(("longest", longest))
    tokens = "" if divided.more_tokens is None else f"{divided.more_tokens:,} tokens or "
    facts.append(("1 GiB more", f"adds {tokens}{_down(divided.more_requests, 3)} requests of {length}"))
    unit = "page" if layout.state_group is None else "page, state or checkpoint"
    facts.append(("padding", f"one more {unit} per pool, included in its bytes"))
    if layout.state_group is not None:
        source = "the default" if asked.given_checkpoints is None else "as given"
        without = "none: no cached prefix is reused"
        kept = f"{asked.checkpoints:,} per request, {source}" if asked.checkpoints else without
        facts.append(("checkpoints", kept))
    elif asked.given_checkpoints:
        facts.append(("checkpoints", "no effect: no layer has a state"))
    has_windows = any(group.window for group in layout.paged_groups)
    held = "windows need more pages" if has_windows else "no effect: no layer has a window in pages"
    if asked.chunk > 1:
        facts.append(("chunk", f"{show_tokens(asked.chunk)} tokens of prefill per step: {held}"))
    if asked.in_flight:
        facts.append(("in flight", f"{counted(asked.in_flight, 'step')}: {held}"))
    if asked.weights_bytes is None:
        facts.append(("weights", "not included: --weights subtracts them from --memory"))
    return facts


def _mix(divided: Divided) -> str:
    told = [f"{float(part * 100):.3g}% of {show_tokens(tokens)}" for tokens, part in divided.mix.items()]
    return ", ".join([*told[:MIX], f"and {len(told) - MIX:,} more"] if len(told) > MIX else told)


def _down(number: Fraction, decimals: int) -> str:
    """Return a number with so many decimals, rounded down, so that no figure promises too much."""
    whole, rest = divmod(math.floor(number * 10**decimals), 10**decimals)
    return f"{whole:,}.{rest:0{decimals}}"


def _length(tokens: int) -> str:
    return f"{show_tokens(tokens)} token{'s' if tokens != 1 else ''}"


def _tokens_or_one(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


def _write_facts(facts: Sequence[Fact], pen: Pen) -> None:
    """Write a label and a wrapped column of text for each fact."""
    indent = max(len(what) for what, _ in facts) + 2
    for what, rest in facts:
        lines = textwrap.wrap(rest, pen.width - indent)
        pen.say(pen.paint(DIM, f"{what:<{indent}}") + lines[0])
        for line in lines[1:]:
            pen.say(" " * indent + line)


def _write_table(
    zones: Sequence[Zone], rows: Sequence[Sequence[str]], total: Sequence[str], pen: Pen
) -> None:
    """Write columns in zones, with lines between zones, and a caption above each zone that has one."""
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
