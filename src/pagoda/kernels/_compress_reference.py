"""The reference of `compress`, in plain torch: serves the CPU, and tests compare the kernels with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagoda.kernels._entries_reference import is_last, rows_of

if TYPE_CHECKING:
    from pagoda.kernels.entries import Tokens

__all__ = ["compress", "push"]


@torch.inference_mode()
def compress(
    tokens: Tokens,
    values: torch.Tensor,
    scores: torch.Tensor,
    ratio: int,
    state_values: torch.Tensor,
    state_scores: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    dim, num_places = out.shape[1], state_values.shape[1]
    span = ratio * values.shape[1] // dim  # tokens per entry
    positions, rows = tokens.positions.long(), rows_of(tokens, state_values.shape[0])
    ends = ((rows > 0) & ((positions + 1) % ratio == 0)).nonzero().flatten()
    back = torch.arange(span - 1, -1, -1, device=out.device)  # distance from the end
    # [ends, span]: from the batch where the token is of the same request, else from the state.
    at, where = ends[:, None] - back, positions[ends][:, None] - back
    in_batch = (at >= 0) & (tokens.request_ids[at.clamp(min=0)] == tokens.request_ids[ends][:, None])
    in_batch &= positions[at.clamp(min=0)] == where  # padding may come before
    kept = rows[ends][:, None].expand_as(where), where % num_places
    sides = []
    for given, state in ((values, state_values), (scores, state_scores)):
        sides.append(given[at.clamp(min=0)].float().where(in_batch[..., None], state[kept]))
    pooled, weights = sides
    if span > ratio:  # low channels of the previous block, high ones of this block
        is_own = torch.arange(span, device=out.device)[:, None] >= ratio
        pooled, weights = (x[..., dim:].where(is_own, x[..., :dim]) for x in sides)
    weights = weights.masked_fill((where < 0)[..., None], -torch.inf)
    # torch.softmax would give NaN where all scores are −inf; the entry is 0 there. Weight 0 hides any value.
    most = weights.amax(1, keepdim=True)
    weights = (weights - most.where(most > -torch.inf, 0)).exp()
    total = weights.sum(1)
    entries = (pooled.where(weights > 0, 0) * weights).sum(1) / total.where(total > 0, 1)
    if norm is not None:
        weight, epsilon = norm
        entries = entries * torch.rsqrt(entries.square().mean(1, keepdim=True) + epsilon) * weight.float()
    if rotary is not None:
        cos, sin = (table[ends].float() for table in rotary)
        rope = entries[:, dim - 2 * cos.shape[1] :].unflatten(1, (-1, 2))
        even, odd = rope.unbind(-1)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        entries = torch.cat([entries[:, : dim - 2 * cos.shape[1]], turned.flatten(1)], 1)
    out.zero_()
    out[ends] = entries


@torch.inference_mode()
def push(
    tokens: Tokens,
    values: torch.Tensor,
    scores: torch.Tensor,
    state_values: torch.Tensor,
    state_scores: torch.Tensor,
) -> None:
    num_places = state_values.shape[1]
    rows = rows_of(tokens, state_values.shape[0])
    written = ((rows > 0) & is_last(tokens, num_places)).nonzero().flatten()
    places = rows[written], tokens.positions[written].long() % num_places
    state_values[places], state_scores[places] = values[written].float(), scores[written].float()
