"""Tokens of a batch, in Triton: their requests and rows, and which of them a program handles together.

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

# The most tokens of a small batch. In larger ones, a program handles the tokens of a block together if
# requests have at least _LONG_RUNS blocks each.
_FEW_TOKENS, _LONG_RUNS = 2048, 2


def is_few(num_tokens: int) -> bool:
    """Whether a batch is small: then each program does more, and all programs run at once."""
    return num_tokens <= _FEW_TOKENS


def tokens_together(tokens: Tokens, ratio: int) -> int:
    """Return how many tokens a program checks for one that ends a block of `ratio` tokens: `ratio` in large
    batches of long requests, else one."""
    num_tokens, num_requests = tokens.positions.shape[0], tokens.rows.shape[0]
    return ratio if not is_few(num_tokens) and num_tokens >= _LONG_RUNS * ratio * num_requests else 1


def rows_and_stride(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return values [T, n], copied unless each token's are contiguous, and the stride between tokens."""
    values = values.detach()
    return (values, values.stride(0)) if values.stride(-1) == 1 else (values.contiguous(), values.shape[1])


@triton.jit
def row_of(request, rows, batch, num_rows):
    """Return the row of each request; 0 for padding and for ids out of range."""
    is_request = (request >= 0) & (request < batch)
    row = tl.load(rows + request, mask=is_request, other=0)
    return tl.where((row > 0) & (row < num_rows), row, 0).to(tl.int64)


@triton.jit
def is_last(token, request, position, request_ids, positions, num_tokens, RING: tl.constexpr):
    """Whether a token keeps its ring cell: the token RING further on is padding or of another request."""
    is_later = token + RING < num_tokens
    later = tl.load(request_ids + token + RING, mask=is_later, other=-1)
    later_position = tl.load(positions + token + RING, mask=is_later, other=-1).to(tl.int32)
    return (later != request) | (later_position != position + RING)


@triton.jit
def _is_own(token, is_token, request, request_ids, positions):
    """Whether each token belongs to the request and is not padding."""
    is_real = tl.load(positions + token, mask=is_token, other=-1) >= 0
    return is_real & (tl.load(request_ids + token, mask=is_token, other=-1) == request)


@triton.jit
def tokens_of(request, request_ids, positions, num_tokens, SCAN: tl.constexpr):
    """Return a request's first token in the batch, its number of tokens, and its length after the last."""
    # In a decode step, token i is the only one of request i, and no search is needed.
    is_alone = _is_own(request, request < num_tokens, request, request_ids, positions)
    is_before = _is_own(request - 1, (request > 0) & (request <= num_tokens), request, request_ids, positions)
    is_behind = _is_own(request + 1, request + 1 < num_tokens, request, request_ids, positions)
    is_alone = is_alone & (is_before == 0) & (is_behind == 0)
    first = tl.where(is_alone, request, num_tokens)
    last = tl.where(is_alone, request, -1)
    if is_alone == 0:
        # A request's tokens are adjacent, so sampling the batch finds some of a long request, and its first
        # and last tokens are near them. All tokens are scanned only if the sample finds none.
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
    length = tl.load(positions + last, mask=last >= 0, other=-1).to(tl.int32) + 1
    return first, tl.maximum(last - first + 1, 0), length
