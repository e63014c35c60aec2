"""The figures of a plan. In: validated arguments; out: layouts, a budget, and figures derived from them.

Fractions are exact here. They are rounded down where they are printed, so that no figure promises too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from pagoda.cli._plan.asked import Asked, Division
from pagoda.errors import ConfigError
from pagoda.layout import Budget, Layout, PagedGroup, StateGroup, from_hf, model_config, model_names
from pagoda.layout._numbers import show_bytes

__all__ = ["MORE_BYTES", "Divided", "Plan", "dtypes", "fixed_bytes", "models", "plan"]

USUAL_CONTEXT = 8192  # if neither the caller nor the model specifies one
MORE_BYTES = 2**30


@dataclass(frozen=True)
class Divided:
    """Memory divided for a mix. `requests` is how many would run at once if all had the length of the
    context; `more_…` is what MORE_BYTES of additional memory add."""

    asked: Division
    mix: Mapping[int, Fraction]
    budget: Budget
    requests: Fraction
    longest: int | None
    more_tokens: int | None
    more_requests: Fraction


@dataclass(frozen=True)
class Plan:
    """One rank of a model: its layout, the layout of the whole model, the length of requests."""

    asked: Asked
    whole: Layout
    layout: Layout
    context: int
    divided: Divided | None

    def copies(self, group: PagedGroup | StateGroup) -> Fraction:
        """Return what all ranks together keep, divided by what a single rank would keep."""
        layers = set(group.layers)
        alone = [g for g in self.whole.groups if type(g) is type(group) and layers.issuperset(g.layers)]
        return Fraction(self.asked.ranks * group.unit_bytes, sum(each.unit_bytes for each in alone))


def models() -> list[Layout]:
    """Return the models that come with Pagoda."""
    return [from_hf(model_config(name), name=name) for name in model_names()]


def fixed_bytes(layout: Layout) -> tuple[int, int]:
    """Return the bytes of a request's full windows, in whole pages, and of its state."""
    windows = [(group, group.window) for group in layout.paged_groups if group.window is not None]
    # A window stops growing at most two resume steps after it is full.
    held = sum(group.peak_units(size + 2 * group.resume_step) * group.page_bytes for group, size in windows)
    return held, 0 if layout.state_group is None else layout.state_group.state_bytes


def dtypes(layout: Layout) -> dict[str, list[str]]:
    """Return the dtypes of keys and values, of indexer keys and of states."""
    entries = [entry for group in layout.paged_groups for entry in group.storage.entries]
    # Scales are part of a format, not chosen by anyone.
    values = {entry.name: [p.dtype for p in entry.parts if p.name != "scale"] for entry in entries}
    states = layout.state_group.parts if layout.state_group is not None else ()
    return {
        "kv": _once(dtype for name, found in values.items() if name != "index" for dtype in found),
        "index": _once(values.get("index", [])),
        "state": _once(part.dtype for parts in states for part in parts),
    }


def plan(asked: Asked, division: Division | None) -> Plan:
    """Plan one rank of a model. Errors: ConfigError, also if not even one request fits."""
    whole = asked.whole()
    layout = asked.one_rank(whole)
    context = asked.context or layout.context or USUAL_CONTEXT
    divided = None if division is None else _divide(layout, whole, asked.ranks, division, context)
    return Plan(asked, whole, layout, context, divided)


def _divide(layout: Layout, whole: Layout, ranks: int, asked: Division, context: int) -> Divided:
    mix: Mapping[int, Fraction] = asked.mix or {context: Fraction(1)}
    if layout.max_requests(asked.cache_bytes, max(mix), **asked.running) == 0:
        raise ConfigError(_unfit(layout, whole, ranks, asked, max(mix)))

    def at_context(memory_bytes: int) -> Fraction:
        if layout.max_requests(memory_bytes, context, **asked.running) == 0:
            return Fraction(0)
        return layout.divide(memory_bytes, context, **asked.running).requests

    budget = layout.divide(asked.cache_bytes, mix, **asked.running)
    more = layout.divide(asked.cache_bytes + MORE_BYTES, mix, **asked.running)
    requests = at_context(asked.cache_bytes)
    return Divided(
        asked,
        {tokens: mix[tokens] / sum(mix.values()) for tokens in sorted(mix)},
        budget,
        requests,
        layout.longest_request(asked.cache_bytes, **asked.running),
        None if budget.num_tokens is None else (more.num_tokens or 0) - budget.num_tokens,
        at_context(asked.cache_bytes + MORE_BYTES) - requests,
    )


def _unfit(layout: Layout, whole: Layout, ranks: int, asked: Division, length: int) -> str:
    """Return the error that no request fits, and what would help."""
    least = layout.memory_for(1, length, **asked.running)
    needed, left = f"{show_bytes(least)} of cache", show_bytes(asked.cache_bytes)
    if left == show_bytes(least):  # only a page of padding is missing
        needed, left = f"{least:,} B of cache, padding included", f"{asked.cache_bytes:,} B"
    longest = layout.longest_request(asked.cache_bytes, **asked.running)
    reach = f"the longest that fits has {longest:,} tokens" if longest else "not even 1 token fits"
    after = "" if asked.weights_bytes is None else " after the weights"
    ways = ["more --memory"]
    if longest:
        ways.append("a shorter --context" if asked.mix is None else "shorter lengths in --mix")
    if asked.checkpoints and layout.state_group is not None:
        ways.append("fewer --checkpoints")
    has_windows = any(group.window for group in layout.paged_groups)
    if asked.chunk > 1 and has_windows:
        ways.append("a smaller --chunk")
    if asked.in_flight and has_windows:
        ways.append("fewer steps --in-flight")
    stored = dtypes(layout)["kv"]
    if stored and not any(dtype.startswith("float8") for dtype in stored):
        ways.append("--kv-dtype fp8")
    if any(_is_smaller(whole, ranks * more, layout) for more in (2, 3)):
        ways.append("more --tp ranks")
    return (
        f"--memory: one request of {length:,} tokens needs {needed}, but only {left} are available{after}; "
        f"{reach}. Try {', '.join(ways[:-1]) + ' or ' if len(ways) > 1 else ''}{ways[-1]}"
    )


def _is_smaller(whole: Layout, ranks: int, layout: Layout) -> bool:
    """Return whether each of `ranks` ranks would keep less: latent attention is not divided, for example."""
    try:
        return whole.shard(ranks).request_bytes(1) < layout.request_bytes(1)
    except ConfigError:
        return False


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
