"""The numbers of a plan. In: what was asked for; out: plain values, one dataclass a table, which are also the
keys of the JSON (documented in `pagoda.cli.plan`).

Everything comes from the Layout. Requests are rounded down: no figure promises more than fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from pagoda.cli.plan.asked import Asked, Division
from pagoda.errors import ConfigError
from pagoda.layout import (
    FullAttention,
    LatentAttention,
    Layout,
    Mamba2,
    PagedGroup,
    RingWindow,
    StateGroup,
    from_hf,
    model_config,
    model_names,
)
from pagoda.layout.numbers import show_bytes

__all__ = ["Budgeted", "Dtypes", "Group", "Length", "Model", "Plan", "Repeated", "ShareOf", "models", "plan"]

USUAL_CONTEXT = 8192  # where neither the caller nor the model names one
MORE_BYTES = 2**30
LARGEST_MEMORY = 2**62  # as for Layout


@dataclass(frozen=True)
class Group:
    """What layers of one geometry keep, and what a request of the context holds of it."""

    name: str
    layers: int
    unit: Literal["page", "row"]
    window: int | None
    sink_tokens: int | None
    ratio: int | None
    page_tokens: int | None
    unit_bytes: int
    token_bytes: int | float | None
    request_units: int
    request_bytes: int


@dataclass(frozen=True)
class Dtypes:
    """What is stored in which dtypes: keys and values, indexer keys, states."""

    kv: list[str]
    index: list[str]
    state: list[str]


@dataclass(frozen=True)
class Repeated:
    """`number` heads, each of which `times` ranks keep."""

    what: str
    number: int
    times: int


@dataclass(frozen=True)
class Length:
    """A length of the mix, and which part of all requests has it."""

    tokens: int
    share: float


@dataclass(frozen=True)
class ShareOf:
    """A group's part of the memory."""

    group: str
    unit: Literal["page", "row"]
    units: int
    bytes: int
    percent: float


@dataclass(frozen=True)
class Budgeted:
    """Memory, divided."""

    memory_bytes: int
    weights_bytes: int | None
    cache_bytes: int
    mix: list[Length]
    chunk: int
    checkpoints: int
    shares: list[ShareOf]
    spare_bytes: int
    tokens: int | None
    requests: int
    requests_exact: float
    context_requests: int
    context_requests_exact: float
    longest_request: int | None
    more_bytes: int
    more_tokens: int | None
    more_requests: float


@dataclass(frozen=True)
class Plan:
    """All figures of one model on one rank."""

    config: str
    model: str
    layers: int
    ranks: int
    dtypes: Dtypes
    model_context: int | None
    context: int
    context_from: Literal["given", "model", "default"]
    groups: list[Group]
    token_bytes: int | float
    request_bytes: int
    resume_step: int
    state_bytes: int | None
    checkpoint_bytes: int | None
    repeated: list[Repeated]
    whole_on_every_rank: list[str]
    budget: Budgeted | None


@dataclass(frozen=True)
class Model:
    """A line of the list of models."""

    name: str
    layers: int
    groups: dict[str, int]
    token_bytes: int | float
    window_bytes: int
    state_bytes: int
    context: int | None


def models() -> list[Model]:
    """The models that come with Pagoda. O(models × layers)."""
    found = []
    for name in model_names():
        layout = from_hf(model_config(name), name=name)
        windows = [group for group in layout.paged_groups if group.window is not None]
        found.append(
            Model(
                name=name,
                layers=len(layout.layers),
                groups={group.name: len(group.layers) for group in layout.groups},
                token_bytes=_plain(layout.token_bytes),
                # Twice a window is past where it stops to grow.
                window_bytes=sum(
                    g.peak_units(2 * (g.window or 0) + g.page_tokens) * g.page_bytes for g in windows
                ),
                state_bytes=0 if layout.state_group is None else layout.state_group.row_bytes,
                context=layout.context,
            )
        )
    return found


def plan(asked: Asked, division: Division | None) -> Plan:
    """Plan one rank of one model. Errors: ConfigError, also when not one request fits."""
    whole = asked.whole()
    layout = asked.one_rank(whole)
    context = asked.context or layout.context or USUAL_CONTEXT
    states = layout.state_group
    return Plan(
        config=asked.config,
        model=layout.name,
        layers=len(layout.layers),
        ranks=asked.ranks,
        dtypes=_dtypes(layout),
        model_context=layout.context,
        context=context,
        context_from="given" if asked.context else "model" if layout.context else "default",
        groups=[_group(group, context) for group in layout.groups],
        token_bytes=_plain(layout.token_bytes),
        request_bytes=layout.request_bytes(context),
        resume_step=layout.resume_step,
        state_bytes=None if states is None else states.row_bytes,
        checkpoint_bytes=None if states is None else states.checkpoint_bytes,
        repeated=_repeated(whole, asked.ranks),
        whole_on_every_rank=_on_every_rank(whole) if asked.ranks > 1 else [],
        budget=None if division is None else _budget(layout, asked, division, context),
    )


def _group(group: PagedGroup | StateGroup, context: int) -> Group:
    units = group.peak_units(context)
    pages = group if isinstance(group, PagedGroup) else None
    return Group(
        name=group.name,
        layers=len(group.layers),
        unit="row" if pages is None else "page",
        window=None if pages is None else pages.window,
        sink_tokens=None if pages is None else pages.pages.sink_tokens,
        ratio=None if pages is None else pages.pages.ratio,
        page_tokens=None if pages is None else pages.page_tokens,
        unit_bytes=group.unit_bytes,
        token_bytes=None if pages is None else _plain(pages.token_bytes),
        request_units=units,
        request_bytes=units * group.unit_bytes,
    )


def _dtypes(layout: Layout) -> Dtypes:
    entries = [entry for group in layout.paged_groups for entry in group.pages.entries]
    # What a kind keeps besides its values, scales and padding, is no choice of anybody.
    values = {entry.name: [p.dtype for p in entry.parts if p.name != "scale"] for entry in entries}
    states = layout.state_group.parts if layout.state_group is not None else ()
    return Dtypes(
        kv=_once(dtype for name, dtypes in values.items() if name != "index" for dtype in dtypes),
        index=_once(values.get("index", [])),
        state=_once(part.dtype for parts in states for part in parts),
    )


def _repeated(whole: Layout, ranks: int) -> list[Repeated]:
    heads: dict[tuple[str, int], None] = {}  # in the order of layers
    for kind in (kind for kinds in whole.layers for kind in kinds):
        if isinstance(kind, FullAttention):
            heads["KV heads", kind.kv_heads] = None
        elif isinstance(kind, Mamba2):
            heads["Mamba groups", kind.groups] = None
    return [Repeated(what, number, ranks // number) for what, number in heads if ranks > number]


def _on_every_rank(whole: Layout) -> list[str]:
    """Names of groups of which each rank keeps all; of the states, those that are rings and compressors."""
    kinds = [
        kind for kinds in whole.layers for kind in kinds if isinstance(kind, (LatentAttention, RingWindow))
    ]
    paged = [kind.pages.name for kind in kinds if kind.pages is not None]
    return _once([*paged, *("state" for kind in kinds if kind.state)])


def _budget(layout: Layout, asked: Asked, division: Division, context: int) -> Budgeted:
    mix: Mapping[int, int] = {context: 1} if division.mix is None else division.mix
    cache_bytes, chunk, checkpoints = division.cache_bytes, division.chunk, division.checkpoints
    if layout.max_requests(cache_bytes, max(mix), chunk=chunk, checkpoints=checkpoints) == 0:
        raise ConfigError(_unfit(layout, asked, division, max(mix)))

    def at_context(memory_bytes: int) -> Fraction:
        if layout.max_requests(memory_bytes, context, chunk=chunk, checkpoints=checkpoints) == 0:
            return Fraction(0)
        return layout.divide(memory_bytes, context, chunk=chunk, checkpoints=checkpoints).requests

    divided = layout.divide(cache_bytes, mix, chunk=chunk, checkpoints=checkpoints)
    more = layout.divide(cache_bytes + MORE_BYTES, mix, chunk=chunk, checkpoints=checkpoints)
    has_tokens = divided.num_tokens is not None and more.num_tokens is not None
    requests, more_requests = at_context(cache_bytes), at_context(cache_bytes + MORE_BYTES)
    whole_mix = sum(mix.values())
    return Budgeted(
        memory_bytes=division.memory_bytes,
        weights_bytes=division.weights_bytes,
        cache_bytes=cache_bytes,
        mix=[Length(tokens, weight / whole_mix) for tokens, weight in sorted(mix.items())],
        chunk=chunk,
        checkpoints=checkpoints,
        shares=[
            ShareOf(
                group=share.group.name,
                unit="page" if isinstance(share.group, PagedGroup) else "row",
                units=share.num_units,
                bytes=share.num_bytes,
                percent=round(100 * share.num_bytes / cache_bytes, 1),
            )
            for share in divided.shares
        ],
        spare_bytes=divided.spare_bytes,
        tokens=divided.num_tokens,
        requests=divided.num_requests,
        requests_exact=_down(divided.requests, 1),
        context_requests=math.floor(requests),
        context_requests_exact=_down(requests, 1),
        longest_request=_longest(layout, division),
        more_bytes=MORE_BYTES,
        more_tokens=(more.num_tokens or 0) - (divided.num_tokens or 0) if has_tokens else None,
        more_requests=_down(more_requests - requests, 3),
    )


def _longest(layout: Layout, division: Division) -> int | None:
    """Tokens of the longest request that fits alone with its checkpoints; None when any does."""
    return layout.longest_request(
        division.cache_bytes, chunk=division.chunk, checkpoints=division.checkpoints
    )


def _unfit(layout: Layout, asked: Asked, division: Division, length: int) -> str:
    """Why not one request fits, and what would help."""

    least = layout.memory_for(1, length, chunk=division.chunk, checkpoints=division.checkpoints)
    needed = (
        f"{show_bytes(least)} of cache" if least <= LARGEST_MEMORY else "more cache than any memory holds"
    )
    left = show_bytes(division.cache_bytes)
    if least <= LARGEST_MEMORY and left == show_bytes(least):  # a page of padding may be all that is missing
        needed, left = f"{least:,} B of cache, padding included", f"{division.cache_bytes:,} B"
    longest = _longest(layout, division) or 0
    reach = f"the longest that fits has {longest:,} tokens" if longest else "not even one of 1 token fits"
    after = "" if division.weights_bytes is None else " after the weights"
    ways = ["more --memory"]
    if longest:
        ways.append("a shorter --context" if division.mix is None else "shorter lengths in --mix")
    if division.checkpoints and layout.state_group is not None:
        ways.append("fewer --checkpoints")
    if division.chunk > 1 and any(group.window for group in layout.paged_groups):
        ways.append("a smaller --chunk")
    # Not every model gets smaller by these: latent attention, for one, is whole on every rank.
    if _is_smaller(replace(asked, kv_dtype="fp8"), layout, length):
        ways.append("--kv-dtype fp8")
    if any(_is_smaller(replace(asked, ranks=n * asked.ranks), layout, length) for n in (2, 3)):
        ways.append("more --tp ranks")
    return (
        f"--memory: one request of {length:,} tokens needs {needed}, and there are {left}{after}; {reach}. "
        f"Ways out: {', '.join(ways)}"
    )


def _is_smaller(other: Asked, layout: Layout, length: int) -> bool:
    try:
        return other.one_rank(other.whole()).request_bytes(length) < layout.request_bytes(length)
    except ConfigError:
        return False


def _plain(number: Fraction) -> int | float:
    return number.numerator if number.denominator == 1 else float(number)


def _down(number: Fraction, decimals: int) -> float:
    steps: int = math.floor(number * 10**decimals)
    return float(Fraction(steps, 10**decimals))


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
