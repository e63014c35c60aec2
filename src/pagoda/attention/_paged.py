"""Attention over the pages of a pool: the public call, and which implementation serves it.

In: queries, a layer, a batch; out: outputs."""

from __future__ import annotations

import torch

from pagoda.attention import _native, _reference, _triton
from pagoda.attention._call import checked
from pagoda.pools import Batch, Layer

__all__ = ["paged"]


def paged(
    queries: torch.Tensor,
    layer: Layer,
    batch: Batch,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
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

    `out` is written and returned, if given. It may be `queries` itself, and otherwise overlaps neither them
    nor the pools. Gradients do not flow through the call. On CUDA, calls with batches of the same pools share
    memory: make them on one stream. Capture them with a batch that was made with `pad_to` or `max_queries`; a
    graph with another one serves that step alone. Errors: ArgumentError; StaleError after another
    `Pools.batch`.
    """
    call = checked(queries, layer, batch, scale, softcap, sinks, out)
    if batch.device.type == "cuda" and _triton.can_attend(call):
        _triton.attend(call)
    elif _native.can_attend(call):
        _native.attend(call)
    else:
        _reference.attend(call)
    return call.out
