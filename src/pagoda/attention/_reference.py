"""Attention over a pool's pages in plain torch: what every other implementation is judged by.

In: a call; out: its outputs. Slow and plain: it reads lengths back, and gathers and widens what it reads."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from pagoda.attention._call import Call
from pagoda.attention._pages import nhd_pages
from pagoda.kernels import FP8_DTYPES
from pagoda.pools import GroupBatch

__all__ = ["attend"]

_LOGITS = 1 << 26  # logits at a time: 256 MiB of float32


def attend(call: Call) -> None:
    """Compute a call in float32, in float64 for float64 queries.

    Rows with the same number of queries are computed together, padded to the longest, with logits in parts of
    up to 256 MiB. It waits for the device and cannot be captured. Page ids outside the pool are not read.
    """
    queries, out, view = call.queries.clone(), call.out, call.view  # `out` may be the queries
    heads, kv_heads, width = queries.shape[1], call.keys.shape[1], out.shape[2]
    exact = torch.float64 if queries.dtype == torch.float64 else torch.float32
    sinks = None if call.sinks is None else call.sinks.to(exact).view(kv_heads, -1)
    starts, lengths = call.batch.query_start_loc.tolist(), call.batch.lengths.tolist()
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        if length and starts[row] < starts[row + 1]:
            alike[starts[row + 1] - starts[row]].append(row)

    k_pages = nhd_pages(call.keys, view.page_tokens)
    v_pages = None if call.values is None else nhd_pages(call.values, view.page_tokens)
    out.zero_()
    for num_queries, rows in alike.items():
        pages, positions = _reach(view, rows, lengths, num_queries, k_pages.shape[0])
        end = torch.tensor([lengths[row] for row in rows], device=queries.device)
        begin = torch.tensor([starts[row] for row in rows], device=queries.device)
        step = max(1, _LOGITS // (len(rows) * heads * max(1, positions.shape[1])))
        for first in range(0, num_queries, step):
            which = torch.arange(first, min(first + step, num_queries), device=queries.device)
            tokens = begin[:, None] + which  # [rows, q]
            at = end[:, None] - num_queries + which  # [rows, q], positions of the queries
            is_read = _mask(view, pages, positions, at)
            k = _gather(k_pages, pages, is_read, exact) * call.k_scale
            v = k[..., :width]
            if v_pages is not None:
                v = _gather(v_pages, pages, is_read, exact) * call.v_scale
            q = queries[tokens].to(exact).unflatten(2, (kv_heads, -1)) * call.scale
            out[tokens] = _attend(q, k, v, is_read, call.softcap, sinks).flatten(2, 3).to(out.dtype)


def _reach(
    view: GroupBatch[torch.Tensor], rows: list[int], lengths: list[int], num_queries: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages that some rows may read, padded to the longest: ids [rows, n], 0 for no page, and the
    positions of their tokens, [rows, n * page_tokens]."""
    window = view.group.window
    firsts = [0] * len(rows)
    if window is not None and not view.group.storage.sink_tokens:
        firsts = [max(0, lengths[row] - num_queries - window + 1) // view.page_tokens for row in rows]
    most = max(-(-lengths[row] // view.page_tokens) - first for row, first in zip(rows, firsts, strict=True))
    columns = torch.tensor(firsts, device=view.page_table.device)[:, None] + torch.arange(
        most, device=view.page_table.device
    )
    width = view.page_table.shape[1]
    of_rows = view.page_table[torch.tensor(rows, device=view.page_table.device)]
    pages = of_rows.gather(1, columns.clamp(max=width - 1))
    pages = torch.where((columns < width) & (pages > 0) & (pages < num_pages), pages, 0)
    tokens = torch.arange(view.page_tokens, device=view.page_table.device)
    return pages, (columns[:, :, None] * view.page_tokens + tokens).flatten(1)


def _mask(
    view: GroupBatch[torch.Tensor], pages: torch.Tensor, positions: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """Return which tokens each query reads: [rows, q, tokens]."""
    there, query = positions[:, None], at[:, :, None]
    is_read = there <= query
    if view.group.window is not None:
        is_near = there > query - view.group.window
        is_read &= is_near | (there < view.group.storage.sink_tokens)
    return is_read & (pages > 0).repeat_interleave(view.page_tokens, 1)[:, None]


def _gather(
    paged: torch.Tensor, pages: torch.Tensor, is_read: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, tokens, kv_heads, dim]; tokens that no query reads are 0, whatever is stored there."""
    shown = (
        paged.view(torch.uint8) if paged.dtype in FP8_DTYPES else paged
    )  # fp8 cannot be indexed everywhere
    found = shown[pages.long()].flatten(1, 2).view(paged.dtype).to(dtype)
    return found.masked_fill_(~is_read.any(1)[:, :, None, None], 0)


def _attend(
    q: torch.Tensor,  # [rows, q, kv_heads, group, k_dim], scaled
    k: torch.Tensor,  # [rows, tokens, kv_heads, k_dim]
    v: torch.Tensor,  # [rows, tokens, kv_heads, v_dim]
    is_read: torch.Tensor,  # [rows, q, tokens]
    softcap: float,
    sinks: torch.Tensor | None,  # [kv_heads, group]
) -> torch.Tensor:  # [rows, q, kv_heads, group, v_dim]
    logits = torch.einsum("bqhgd,bthd->bhgqt", q, k)
    if softcap:
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
