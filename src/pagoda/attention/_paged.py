"""Attention over a pool, through a view, in plain torch: the reference, and what serves a CPU."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from pagoda.attention._pages import nhd_pages
from pagoda.attention._view import PagedView
from pagoda.errors import ArgumentError
from pagoda.kernels import FP8_DTYPES
from pagoda.layout._numbers import integer

__all__ = ["paged_attention"]

_LOGITS = 1 << 26  # logits at a time: 256 MiB of float32


def paged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    view: PagedView,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    v_dim: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of a step's queries over what its rows have stored: [tokens, heads, v_dim].

    queries: [tokens, heads, k_dim], packed as the view's `query_start_loc` says; those of a row are its last
    tokens. keys, values: [num_slots, kv_heads, k_dim or v_dim], a layer of a `TokenPool` in which the
    step's own tokens are stored already. heads are a multiple of kv_heads: each kv head serves neighbours.
    Without values the first `v_dim` of a key are its value: latent attention in its absorbed form, where
    a key is latent ‖ rotated. The window, and `sink_tokens` that every query reads, are those of the view's
    group.

    A logit is scale * query · key, then softcap * tanh(logit / softcap). scale is k_dim ** −0.5, and has to
    be said where there are no values. `sinks`: [heads], one more logit a head, which only the denominator
    knows. `k_scale` and `v_scale` are those of an fp8 pool. A query without any key, and one that is no
    row's, gets 0.

    Computes in float32 (float64 for such queries) and returns the dtype of the queries. Cost: lengths are
    read back, so it waits for the device and cannot be captured. Rows of as many queries go together, padded
    to the longest; keys and values are gathered and widened, logits made in parts of up to 256 MiB, with
    another gather for each part. For reference, tests and CPUs.
    Page ids outside the pool are not read. Errors: ArgumentError.
    """
    if not isinstance(view, PagedView):
        raise ArgumentError(f"view: give a PagedView, not {type(view).__name__}")
    _require_floats(queries, "queries", view.device)
    _require_floats(keys, "keys", view.device)
    num_tokens, heads, k_dim = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape[2] != k_dim or heads % kv_heads or not heads:
        raise ArgumentError(
            f"queries have {heads} heads of {k_dim} and keys {kv_heads} of {keys.shape[2]}: give as many "
            "dimensions, and a multiple of the heads"
        )
    if values is None:
        if v_dim is None or scale is None:
            raise ArgumentError("v_dim, scale: give both where there are no values: a key tells neither")
        width = integer(v_dim, "v_dim", 1, ArgumentError)
        if width > k_dim:
            raise ArgumentError(f"v_dim: a key has {k_dim} dimensions, not {min(width, 10**18)}")
    else:
        _require_floats(values, "values", view.device)
        if v_dim is not None:
            raise ArgumentError("v_dim: values have their own dimensions: give it only without values")
        if values.shape[:2] != keys.shape[:2]:
            raise ArgumentError(
                f"values of {tuple(values.shape[:2])} slots and heads, keys of {tuple(keys.shape[:2])}"
            )
        width = values.shape[2]
    exact = torch.float64 if queries.dtype == torch.float64 else torch.float32
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,) or sinks.device != view.device:
            raise ArgumentError(f"sinks: give one logit a head, [{heads}] on {view.device}")
        sinks = sinks.to(exact).view(kv_heads, -1)
    scale = _number(k_dim**-0.5 if scale is None else scale, "scale")
    if softcap is not None and _number(softcap, "softcap") <= 0:
        raise ArgumentError(f"softcap: give a number above 0 or None, not {softcap}")
    scales = _number(k_scale, "k_scale"), _number(v_scale, "v_scale")

    starts, lengths = view.query_start_loc.tolist(), view.seq_lens.tolist()
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        if not length or starts[row] == starts[row + 1]:
            continue
        if starts[row] < 0 or starts[row + 1] > num_tokens:
            raise ArgumentError(
                f"queries: the view has tokens {starts[row]} to {starts[row + 1]} in row {row}, "
                f"and there are {num_tokens}"
            )
        alike[starts[row + 1] - starts[row]].append(row)

    k_pages = nhd_pages(keys, view.page_tokens)
    v_pages = None if values is None else nhd_pages(values, view.page_tokens)
    out = queries.new_zeros(num_tokens, heads, width)
    for num_queries, rows in alike.items():
        pages, positions = _reach(view, rows, lengths, num_queries, k_pages.shape[0])
        end = torch.tensor([lengths[row] for row in rows], device=view.device)
        begin = torch.tensor([starts[row] for row in rows], device=view.device)
        step = max(1, _LOGITS // (len(rows) * heads * max(1, positions.shape[1])))
        for first in range(0, num_queries, step):
            which = torch.arange(first, min(first + step, num_queries), device=view.device)
            tokens = begin[:, None] + which  # [rows, q]
            at = end[:, None] - num_queries + which  # [rows, q], positions of the queries
            is_read = _mask(view, pages, positions, at)
            k = _gather(k_pages, pages, is_read, exact) * scales[0]
            v = k[..., :width] if v_pages is None else _gather(v_pages, pages, is_read, exact) * scales[1]
            q = queries[tokens].to(exact).unflatten(2, (kv_heads, -1)) * scale
            out[tokens] = _attend(q, k, v, is_read, softcap, sinks).flatten(2, 3).to(out.dtype)
    return out


def _reach(
    view: PagedView, rows: list[int], lengths: list[int], num_queries: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that some rows may read, padded to the most: ids [rows, n], 0 is none, and the
    positions of their tokens [rows, n * page_tokens]."""
    window = view.group.window
    firsts = [0] * len(rows)
    if window is not None and not view.group.storage.sink_tokens:
        firsts = [max(0, lengths[row] - num_queries - window + 1) // view.page_tokens for row in rows]
    most = max(-(-lengths[row] // view.page_tokens) - first for row, first in zip(rows, firsts, strict=True))
    columns = torch.tensor(firsts, device=view.device)[:, None] + torch.arange(most, device=view.device)
    width = view.block_table.shape[1]
    of_rows = view.block_table[torch.tensor(rows, device=view.device)]
    pages = of_rows.gather(1, columns.clamp(max=width - 1))
    pages = torch.where((columns < width) & (pages > 0) & (pages < num_pages), pages, 0)
    tokens = torch.arange(view.page_tokens, device=view.device)
    return pages, (columns[:, :, None] * view.page_tokens + tokens).flatten(1)


def _mask(view: PagedView, pages: torch.Tensor, positions: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Which tokens each query reads: [rows, q, tokens]."""
    there, query = positions[:, None], at[:, :, None]
    is_read = there <= query
    if view.group.window is not None:
        is_near = there > query - view.group.window
        is_read &= is_near | (there < view.group.storage.sink_tokens)
    return is_read & (pages > 0).repeat_interleave(view.page_tokens, 1)[:, None]


def _gather(
    paged: torch.Tensor, pages: torch.Tensor, is_read: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, tokens, kv_heads, dim]; what no query reads is 0, whatever lies there."""
    shown = paged.view(torch.uint8) if paged.dtype in FP8_DTYPES else paged  # not everywhere gathered
    found = shown[pages.long()].flatten(1, 2).view(paged.dtype).to(dtype)
    return found.masked_fill_(~is_read.any(1)[:, :, None, None], 0)


def _attend(
    q: torch.Tensor,  # [rows, q, kv_heads, group, k_dim], scaled
    k: torch.Tensor,  # [rows, tokens, kv_heads, k_dim]
    v: torch.Tensor,  # [rows, tokens, kv_heads, v_dim]
    is_read: torch.Tensor,  # [rows, q, tokens]
    softcap: float | None,
    sinks: torch.Tensor | None,  # [kv_heads, group]
) -> torch.Tensor:  # [rows, q, kv_heads, group, v_dim]
    logits = torch.einsum("bqhgd,bthd->bhgqt", q, k)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~is_read[:, None, None], -math.inf)
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, :, None, None])
    top = torch.where(top == -math.inf, 0, top)  # −inf − −inf is NaN
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, :, None, None] - top)
    weights = weights / torch.where(total == 0, 1, total)
    return torch.einsum("bhgqt,bthd->bqhgd", weights, v)


def _require_floats(tensor: Any, name: str, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() != 3:
        found = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise ArgumentError(f"{name}: give floats of three dimensions, not {found}")
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device} and the view on {device}")


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{name}: give a number, not {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: give a finite number, not {number}")
    return number
