"""A checked call of attention, as every implementation takes it. In: arguments; out: a `Call`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from pagoda.errors import ArgumentError
from pagoda.pools import Batch, GroupBatch, Layer

__all__ = ["Call", "checked"]


class Call(NamedTuple):
    """Attention of a step's queries over the stored tokens of its rows."""

    queries: torch.Tensor  # [tokens, heads, k_dim]: no fewer than the batch's; the last dimension is dense
    out: torch.Tensor  # [tokens, heads, v_dim] of the queries' dtype; the last dimension is dense
    keys: torch.Tensor  # [num_slots, kv_heads, k_dim] contiguous
    values: torch.Tensor | None  # [num_slots, kv_heads, v_dim] contiguous; None: the first v_dim of each key
    k_scale: float
    v_scale: float
    scale: float
    softcap: float  # 0: none
    sinks: torch.Tensor | None  # [heads] contiguous
    batch: Batch
    view: GroupBatch[torch.Tensor]  # the batch's part about the layer's group

    @property
    def window(self) -> int:
        """How many tokens a query reads, its own included; 0 means all."""
        return self.view.group.window or 0


def checked(
    queries: Any,
    layer: Any,
    batch: Any,
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    out: Any = None,
) -> Call:
    """Return the call that the arguments of `attention.paged` describe, with a new `out` if it is None.

    Errors: ArgumentError; StaleError after another `Pools.batch`.
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
    if num_tokens < batch.num_tokens:
        raise ArgumentError(
            f"queries: give one for each of the batch's {batch.num_tokens} tokens, not {num_tokens}"
        )
    if values is None:
        if scale is None:
            raise ArgumentError("scale: give one for latent attention, where k_dim does not imply it")
        width = _latent_width(layer)
    else:
        width = values.shape[2]
    if sinks is not None and (
        not isinstance(sinks, torch.Tensor)
        or not sinks.is_floating_point()
        or sinks.shape != (heads,)
        or sinks.device != batch.device
    ):
        raise ArgumentError(f"sinks: give one logit per head, [{heads}] floats on {batch.device}")
    scale = _number(k_dim**-0.5 if scale is None else scale, "scale")
    if softcap is not None and _number(softcap, "softcap") <= 0:
        raise ArgumentError(f"softcap: give a number above 0 or None, not {softcap}")
    if out is None:
        out = queries.new_empty(num_tokens, heads, width)
    else:
        _require_floats(out, "out", batch.device)
        if out.shape != (num_tokens, heads, width) or out.dtype != queries.dtype or out.requires_grad:
            raise ArgumentError(
                f"out: give {queries.dtype} of shape {(num_tokens, heads, width)} without gradients, not "
                f"{out.dtype} of {tuple(out.shape)}"
            )
        if width > 1 and out.stride(2) != 1:
            raise ArgumentError("out: give a tensor whose last dimension is contiguous")
        if any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)):
            raise ArgumentError("out: give a tensor with memory for every number, not an expanded one")
    if k_dim > 1 and queries.stride(2) != 1:
        queries = queries.contiguous()
    return Call(
        queries.detach(),
        out,
        keys,
        values,
        layer.k_scale,
        layer.v_scale,
        scale,
        0.0 if softcap is None else float(softcap),
        None if sinks is None else sinks.detach().contiguous(),
        batch,
        view,
    )


def _latent_width(layer: Layer) -> int:
    """Return how many dimensions of a latent are its value: all but the rotated part, which comes last."""
    if len(layer.group.storage.entries) == 1 and len(parts := layer.group.storage.entries[0].parts) > 1:
        return int(parts[0].shape[0])
    return int(layer.keys.shape[2])


def _require_floats(tensor: Any, name: str, device: torch.device) -> None:
    if (
        not isinstance(tensor, torch.Tensor)
        or not tensor.is_floating_point()
        or tensor.dim() != 3
        or tensor.layout != torch.strided
    ):
        found = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise ArgumentError(f"{name}: give a dense tensor of floats with three dimensions, not {found}")
    if tensor.device != device:
        raise ArgumentError(f"{name}: give a tensor on {device}, where the batch is, not on {tensor.device}")


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{name}: give a number, not {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: give a finite number, not {number}")
    return number
