"""The compressor of compressed attention: some tokens become one entry. In: projections of tokens, and those
that a state has kept of earlier ones; out: the entries of the blocks that end, and the state.

An entry is a softmax over the tokens of its block, channel by channel; where blocks overlap, over the low
half of the channels of the tokens of the block before and the high half of those of its own. Score −inf has
weight 0, so that before the first block there is nothing. A torch reference (`compress_reference`) says
what is right and serves the CPU, a Triton kernel (`compress_fused`) serves CUDA; this module picks one. They
agree to the rounding of float32. Nothing is made and nothing waits, so that every call can be captured once
one like it, of few tokens or of more than some thousand, has compiled it.
"""

from __future__ import annotations

from types import ModuleType

import torch

from pagoda.kernels import _compress_reference as compress_reference
from pagoda.kernels import on_device, pick
from pagoda.kernels.entries import Tokens

__all__ = ["compress", "push"]


def _for(tensor: torch.Tensor) -> ModuleType:
    return pick("_compress_fused", compress_reference, tensor.device)


def compress(
    tokens: Tokens,
    values: torch.Tensor,  # [T, C], C = dim, or 2 × dim where blocks overlap
    scores: torch.Tensor,  # [T, C], the bias of a token's place in its block added
    ratio: int,
    state_values: torch.Tensor,  # [num_rows + 1, R, C] float32
    state_scores: torch.Tensor,  # [num_rows + 1, R, C] float32
    out: torch.Tensor,  # [T, dim] float32
    norm: tuple[torch.Tensor, float] | None = None,  # weight [dim], epsilon
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,  # cos and sin, [T, rope / 2] float32 each
) -> None:
    """Compute the entry of the block that each token ends, in one launch; zeros for tokens that end none.

    Tokens of the batch are read from `values` and `scores`, earlier ones from the state at place position %
    R, so `push` comes afterwards and R may be as small as the tokens of an entry. With `norm` the entry is
    divided by the root of its mean square and multiplied by the weight; with `rotary`, then, its last
    numbers are rotated in pairs by the angle given for the token, that of the block's first position.
    """
    with on_device(out.device):
        _for(out).compress(tokens, values, scores, ratio, state_values, state_scores, out, norm, rotary)


def push(
    tokens: Tokens,
    values: torch.Tensor,
    scores: torch.Tensor,
    state_values: torch.Tensor,
    state_scores: torch.Tensor,
) -> None:
    """Keep the projections of tokens in place position % R of their row's state, in one launch.

    Of a request's tokens only the last R are kept, so that none is written over within a call.
    """
    with on_device(state_values.device):
        _for(state_values).push(tokens, values, scores, state_values, state_scores)
