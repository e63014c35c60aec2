"""The compressor of compressed attention, which turns the tokens of a block into one entry.

In: projections of the batch's tokens, and a state with the projections of earlier ones; out: the entries of
blocks that end in the batch, and the state.

An entry is the softmax-weighted sum of its block's values, channel by channel. Where blocks overlap, it takes
the low half of the channels from the previous block's tokens and the high half from its own. A score of −inf
has weight 0, so nothing precedes the first block. Reference and kernel agree up to float32 rounding. Nothing
is allocated and nothing waits, so a call can be captured once a similar call has compiled the kernel: small
batches and those of more than some thousand tokens are compiled separately.
"""

from __future__ import annotations

import torch

from pagoda.kernels import _compress_reference as compress_reference
from pagoda.kernels._dispatch import operation
from pagoda.kernels.entries import Tokens

__all__ = ["compress", "push"]


@operation("_compress_fused", compress_reference)
def compress(
    tokens: Tokens,
    values: torch.Tensor,  # [T, C], C = dim, or 2 × dim where blocks overlap
    scores: torch.Tensor,  # [T, C], with the bias of the token's position in its block already added
    ratio: int,
    state_values: torch.Tensor,  # [num_rows + 1, R, C] float32
    state_scores: torch.Tensor,  # [num_rows + 1, R, C] float32
    out: torch.Tensor,  # [T, dim] float32
    norm: tuple[torch.Tensor, float] | None = None,  # weight [dim], epsilon
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,  # cos and sin, [T, rope / 2] float32 each
) -> torch.Tensor:
    """Compute the entry of the block that each token ends, in one launch; zeros for tokens that end none.

    Tokens of the batch are read from `values` and `scores`, earlier ones from index position % R of the
    state; call `push` afterwards, so that R need be no larger than the number of tokens per entry. With
    `norm`, the entry is divided by the root of its mean square and multiplied by the weight. With `rotary`,
    its last numbers are then rotated in pairs by the token's angle, which is that of the block's first
    position.
    """
    return out


@operation("_compress_fused", compress_reference)
def push(
    tokens: Tokens,
    values: torch.Tensor,
    scores: torch.Tensor,
    state_values: torch.Tensor,
    state_scores: torch.Tensor,
) -> torch.Tensor:
    """Store the projections of tokens at index position % R of their row's state, in one launch.

    Only the last R tokens of a request are stored, so that no index is written twice within a call.
    """
    return state_values
