"""A plan as JSON. In: figures; out: one object, documented in `pagoda.cli._plan`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from pagoda.cli._plan.figures import MORE_BYTES, Divided, Plan, dtypes, fixed_bytes
from pagoda.layout import Layout, PagedGroup, StateGroup

__all__ = ["model_record", "plan_record"]


def model_record(layout: Layout) -> dict[str, Any]:
    """Return one model of the list."""
    window_bytes, state_bytes = fixed_bytes(layout)
    return {
        "name": layout.name,
        "layers": len(layout.layers),
        "groups": {group.name: len(group.layers) for group in layout.groups},
        "token_bytes": _plain(layout.token_bytes),
        "window_bytes": window_bytes,
        "state_bytes": state_bytes,
        "context": layout.context,
    }


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return all figures of one rank of a model."""
    layout, states = plan.layout, plan.layout.state_group
    return {
        "config": plan.asked.config,
        "model": layout.name,
        "layers": len(layout.layers),
        "ranks": plan.asked.ranks,
        "dtypes": dtypes(layout),
        "model_context": layout.context,
        "context": plan.context,
        "context_from": "given" if plan.asked.context else "model" if layout.context else "default",
        "groups": [_group(group, plan) for group in layout.groups],
        "token_bytes": _plain(layout.token_bytes),
        "request_bytes": layout.request_bytes(plan.context),
        "resume_step": layout.resume_step,
        "state_bytes": states and states.state_bytes,
        "checkpoint_bytes": states and states.checkpoint_bytes,
        "budget": plan.divided and _budget(plan.divided),
    }


def _group(group: PagedGroup | StateGroup, plan: Plan) -> dict[str, Any]:
    units = group.peak_units(plan.context)
    paged = group if isinstance(group, PagedGroup) else None
    return {
        "name": group.name,
        "layers": len(group.layers),
        "unit": "page" if paged else "state",
        "window": paged and paged.window,
        "sink_tokens": paged and paged.storage.sink_tokens,
        "ratio": paged and paged.storage.ratio,
        "page_tokens": paged and paged.page_tokens,
        "unit_bytes": group.unit_bytes,
        "token_bytes": paged and _plain(paged.token_bytes),
        "request_units": units,
        "request_bytes": units * group.unit_bytes,
        "copies": _plain(plan.copies(group)),
    }


def _budget(divided: Divided) -> dict[str, Any]:
    asked, budget = divided.asked, divided.budget
    return {
        "memory_bytes": asked.memory_bytes,
        "weights_bytes": asked.weights_bytes,
        "cache_bytes": asked.cache_bytes,
        "mix": [{"tokens": tokens, "share": _plain(share)} for tokens, share in divided.mix.items()],
        "chunk": asked.chunk,
        "checkpoints": asked.checkpoints,
        "in_flight": asked.in_flight,
        "shares": [
            {
                "pool": share.name,
                "unit": "page" if isinstance(share.group, PagedGroup) else share.name,
                "units": share.num_units,
                "bytes": share.num_bytes,
                "percent": round(100 * share.num_bytes / asked.cache_bytes, 1),
            }
            for share in budget.shares
        ],
        "spare_bytes": budget.spare_bytes,
        "tokens": budget.num_tokens,
        "requests": budget.num_requests,
        "requests_float": _plain(budget.requests),
        "context_requests": math.floor(divided.requests),
        "context_requests_float": _plain(divided.requests),
        "longest_request": divided.longest,
        "more_bytes": MORE_BYTES,
        "more_tokens": divided.more_tokens,
        "more_requests": _plain(divided.more_requests),
    }


def _plain(number: Fraction) -> int | float:
    """Return an integer, or a float with six decimals, rounded down."""
    return number.numerator if number.denominator == 1 else math.floor(number * 10**6) / 10**6
