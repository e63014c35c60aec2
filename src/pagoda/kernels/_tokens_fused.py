"""Tokens of a batch, in Triton: whose they are, and which of them a kernel looks at together.

In: the tensors of `Tokens`; out: rows, first and last tokens, lengths. An id out of range belongs to row 0,
which is padding.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pagoda.kernels.entries import Tokens

__all__ = ["is_few", "is_last", "row_of", "rows_and_stride", "tokens_of", "tokens_together"]

# Tokens of a small batch, at most. In larger ones a block's tokens are looked at together where requests have
# _LONG_RUNS blocks each or more.
_FEW_TOKENS, _LONG_RUNS = 2048, 2


def is_few(num_tokens: int) -> bool:
    """Whether a batch is small: its programs do more each, and the device holds all of them at once."""
    return num_tokens <= _FEW_TOKENS


def tokens_together(tokens: Tokens, ratio: int) -> int:
    """How many tokens a program looks at for the one that may end a block of `ratio` tokens: `ratio` in large
    batches of long requests, else one."""
    num_tokens, num_requests = tokens.positions.shape[0], tokens.rows.shape[0]
    return ratio if not is_few(num_tokens) and num_tokens >= _LONG_RUNS * ratio * num_requests else 1


def rows_and_stride(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[T, n] values with contiguous rows, copied if need be, and the distance between rows in elements."""
    values = values.detach()
    return (values, values.stride(0)) if values.stride(-1) == 1 else (values.contiguous(), values.shape[1])


@triton.jit
def row_of(request, rows, batch, num_rows):
    """The row of requests; 0 for padding, and for what is no row."""
    is_request = (request >= 0) & (request < batch)
    row = tl.load(rows + request, mask=is_request, other=0)
    return tl.where((row > 0) & (row < num_rows), row, 0).to(tl.int64)


@triton.jit
def is_last(token, request, position, request_ids, positions, num_tokens, RING: tl.constexpr):
    """Whether no token of the batch takes a token's place in a ring: that RING behind is not of its request,
    or padding."""
    is_later = token + RING < num_tokens
    later = tl.load(request_ids + token + RING, mask=is_later, other=-1)
    later_position = tl.load(positions + token + RING, mask=is_later, other=-1)
    return (later != request) | (later_position != position + RING)


@triton.jit
def _is_own(token, is_token, request, request_ids, positions):
    """Which tokens are of a request, and no padding."""
    is_real = tl.load(positions + token, mask=is_token, other=-1) >= 0
    return is_real & (tl.load(request_ids + token, mask=is_token, other=-1) == request)


@triton.jit
def tokens_of(request, request_ids, positions, num_tokens, SCAN: tl.constexpr):
    """Of a request: its first token, how many there are, and its length after the last."""
    # In a step of decoding token i is the only one of request i: then nothing has to be looked for.
    is_alone = _is_own(request, request < num_tokens, request, request_ids, positions)
    is_before = _is_own(request - 1, (request > 0) & (request <= num_tokens), request, request_ids, positions)
    is_behind = _is_own(request + 1, request + 1 < num_tokens, request, request_ids, positions)
    is_alone = is_alone & (is_before == 0) & (is_behind == 0)
    first = tl.where(is_alone, request, num_tokens)
    last = tl.where(is_alone, request, -1)
    if is_alone == 0:
        # Its tokens stand side by side: of long ones a sample of the batch finds some, and where they begin
        # and end is near. Only where none is found all are looked at.
        step = tl.cdiv(num_tokens, SCAN)
        token = tl.arange(0, SCAN) * step
        is_own = _is_own(token, token < num_tokens, request, request_ids, positions)
        low = tl.min(tl.where(is_own, token, num_tokens), 0)
        high = tl.max(tl.where(is_own, token, -1), 0)
        first, last = low, high
        is_found = high >= 0
        for begin in range(tl.where(is_found, low - step + 1, 0), tl.where(is_found, low, 0), SCAN):
            at = begin + tl.arange(0, SCAN)
            is_at = _is_own(at, (at >= 0) & (at < low), request, request_ids, positions)
            first = tl.minimum(first, tl.min(tl.where(is_at, at, num_tokens), 0))
        for begin in range(high + 1, tl.where(is_found, high + step, 0), SCAN):
            at = begin + tl.arange(0, SCAN)
            is_at = _is_own(at, at < num_tokens, request, request_ids, positions)
            last = tl.maximum(last, tl.max(tl.where(is_at, at, -1), 0))
        for begin in range(0, tl.where(is_found | (step <= 1), 0, num_tokens), SCAN):
            at = begin + tl.arange(0, SCAN)
            is_at = _is_own(at, at < num_tokens, request, request_ids, positions)
            first = tl.minimum(first, tl.min(tl.where(is_at, at, num_tokens), 0))
            last = tl.maximum(last, tl.max(tl.where(is_at, at, -1), 0))
    length = tl.load(positions + last, mask=last >= 0, other=-1) + 1
    return first, tl.maximum(last - first + 1, 0), length
