"""Attention over a pool's pages in plain torch: the reference, and the implementation for CPUs.

In: queries, a layer, a batch; out: outputs."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from pagoda.attention._pages import nhd_pages
from pagoda.errors import ArgumentError
from pagoda.kernels import FP8_DTYPES
from pagoda.pools import Batch, GroupBatch, Layer

__all__ = ["paged_attention"]

_LOGITS = 1 << 26  # logits at a time: 256 MiB of float32


def paged_attention(
    queries: torch.Tensor,
    layer: Layer,
    batch: Batch,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of a step's queries over the stored tokens of its rows: [tokens, heads, v_dim].

    queries: [tokens, heads, k_dim], packed by the batch's `query_start_loc`; a row's queries are its last
    tokens. layer: `Pools.layer(n)`, with the step's own keys and values already stored. The number of heads
    is a multiple of the layer's KV heads, each of which serves adjacent query heads. Latents are read in the
    absorbed form: a key is latent ‖ rotated part, and the latent is also the value. The window and the
    `sink_tokens`, which every query reads, are those of the layer's group.

    A logit is scale * query · key, then softcap * tanh(logit / softcap) if `softcap` is given. `scale` is
    k_dim ** −0.5 by default and is required for latents. `sinks`: [heads], one more logit per head, which
    counts in the denominator only. fp8 pools are read with their scales. Queries without any key, and
    padding, give 0.

    It computes in float32 (float64 for float64 queries) and returns the dtype of the queries. Cost: lengths
    are read back, so it waits for the device and cannot be captured. Rows with the same number of queries are
    computed together, padded to the longest; keys and values are gathered and widened, and logits computed in
    parts of up to 256 MiB. Page ids outside the pool are not read. Errors: ArgumentError; StaleError after
    another `Pools.batch`.
    """
    if not isinstance(layer, Layer):
        raise ArgumentError(f"layer: give what Pools.layer returned, not {type(layer).__name__}")
    view = layer.part_of(batch)
    keys, values = layer.keys, layer.values
    _require_floats(queries, "queries", batch.device)
    num_tokens, heads, k_dim = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape[2] != k_dim or heads % kv_heads or not heads:
        raise ArgumentError(
            f"queries have {heads} heads of {k_dim} dimensions: layer {layer.number} takes a multiple of "
            f"{kv_heads} heads of {keys.shape[2]} dimensions"
        )
    if values is None:
        if scale is None:
            raise ArgumentError("scale: give one for latent attention, where k_dim does not imply it")
        width = _latent_width(layer)
    else:
        width = values.shape[2]
    exact = torch.float64 if queries.dtype == torch.float64 else torch.float32
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,) or sinks.device != batch.device:
            raise ArgumentError(f"sinks: give one logit per head, [{heads}] on {batch.device}")
        sinks = sinks.to(exact).view(kv_heads, -1)
    scale = _number(k_dim**-0.5 if scale is None else scale, "scale")
    if softcap is not None and _number(softcap, "softcap") <= 0:
        raise ArgumentError(f"softcap: give a number above 0 or None, not {softcap}")
    scales = layer.k_scale, layer.v_scale

    starts, lengths = batch.query_start_loc.tolist(), batch.lengths.tolist()
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        if not length or starts[row] == starts[row + 1]:
            continue
        if starts[row] < 0 or starts[row + 1] > num_tokens:
            raise ArgumentError(
                f"queries: give one for each of the batch's {starts[row + 1]} tokens, not {num_tokens}"
            )
        alike[starts[row + 1] - starts[row]].append(row)

    k_pages = nhd_pages(keys, view.page_tokens)
    v_pages = None if values is None else nhd_pages(values, view.page_tokens)
    out = queries.new_zeros(num_tokens, heads, width)
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
            k = _gather(k_pages, pages, is_read, exact) * scales[0]
            v = k[..., :width] if v_pages is None else _gather(v_pages, pages, is_read, exact) * scales[1]
            q = queries[tokens].to(exact).unflatten(2, (kv_heads, -1)) * scale
            out[tokens] = _attend(q, k, v, is_read, softcap, sinks).flatten(2, 3).to(out.dtype)
    return out


def _latent_width(layer: Layer) -> int:
    """Return how many dimensions of a latent are its value: all but the rotated part, which comes last."""
    if len(layer.group.storage.entries) == 1 and len(parts := layer.group.storage.entries[0].parts) > 1:
        return int(parts[0].shape[0])
    return int(layer.keys.shape[2])


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
        raise ArgumentError(f"{name}: give a tensor of floats with three dimensions, not {found}")
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device} and the batch on {device}: move it there")


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{name}: give a number, not {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: give a finite number, not {number}")
    return number
