"""The Triton kernels of `compress`: a program computes the entries of blocks that a few tokens end, or keeps
the projections of the tokens. Offsets are 64-bit."""

# Kernels are written in Triton's language, which mypy cannot type.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagoda.kernels import _casts_fused
from pagoda.kernels._casts_fused import readable, wide
from pagoda.kernels._tokens_fused import is_few, is_last, row_of, rows_and_stride, tokens_together

if TYPE_CHECKING:
    from pagoda.kernels.entries import Tokens

__all__ = ["compress", "push"]


@triton.jit
def _pooled(
    token, position, row, request, request_ids, positions, values, scores, value_stride, score_stride,
    state_values, state_scores, column, is_column, RATIO: tl.constexpr, SPAN: tl.constexpr,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    IS_SPELLED: tl.constexpr,
):  # fmt: skip
    """Return the numbers of the entry that a token ends: a softmax over SPAN tokens, STEP at a time."""
    # Each of STEP lanes keeps its own sums, which are combined at the end, so that threads do not wait.
    most = tl.full((STEP, column.shape[0]), float("-inf"), tl.float32)
    total = tl.zeros((STEP, column.shape[0]), tl.float32)
    sums = tl.zeros((STEP, column.shape[0]), tl.float32)
    for first in range(0, SPAN, STEP):
        at = first + tl.arange(0, STEP)
        back = SPAN - 1 - at
        is_token = (at < SPAN) & (back <= position)  # there is no token before the first
        is_given = is_token & (back <= token)
        of = tl.load(request_ids + (token - back), mask=is_given, other=-1)
        where = tl.load(positions + (token - back), mask=is_given, other=-1).to(tl.int32)
        is_given = is_given & (of == request) & (where == position - back)  # padding may come before
        is_kept = is_token & (is_given == 0)
        # Low channels of the previous block, high ones of this block; with one projection, all of this block.
        channel = column[None, :] + tl.where(at >= RATIO, CHANNELS - DIM, 0)[:, None]
        given = (token - back).to(tl.int64)[:, None]
        kept = (row * PLACES + (position - back) % PLACES)[:, None] * CHANNELS + channel
        given_mask, kept_mask = is_given[:, None] & is_column[None, :], is_kept[:, None] & is_column[None, :]
        score = wide(tl.load(scores + given * score_stride + channel, mask=given_mask, other=0), IS_SPELLED)
        score = tl.where(given_mask, score, tl.load(state_scores + kept, mask=kept_mask, other=float("-inf")))
        value = wide(tl.load(values + given * value_stride + channel, mask=given_mask, other=0), IS_SPELLED)
        value = tl.where(given_mask, value, tl.load(state_values + kept, mask=kept_mask, other=0))
        new_most = tl.maximum(most, score)
        shift = tl.where(new_most > float("-inf"), new_most, 0.0)
        weight, fade = tl.exp(score - shift), tl.exp(most - shift)
        # Weight 0 hides any value, even one whose weight was not 0 before.
        total = total * fade + weight
        sums = tl.where(fade > 0, sums * fade, 0.0) + tl.where(weight > 0, value, 0.0) * weight
        most = new_most
    all_most = tl.max(most, 0)
    fade = tl.exp(most - tl.where(all_most > float("-inf"), all_most, 0.0)[None, :])
    total = tl.sum(total * fade, 0)
    return tl.sum(tl.where(fade > 0, sums * fade, 0.0), 0) / tl.where(total > 0, total, 1.0)


@triton.jit(
    do_not_specialize=["num_tokens", "group", "batch", "num_rows"],
    do_not_specialize_on_alignment=["rows", "request_ids", "positions"],
)
def _compress(
    rows, request_ids, positions, values, scores, value_stride, score_stride, state_values, state_scores, out,
    weight, epsilon, cos, sin, cos_stride, sin_stride, num_tokens, group, batch, num_rows,
    RATIO: tl.constexpr, SPAN: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
    HALF_ROPE: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    IS_SPELLED: tl.constexpr,
):  # fmt: skip
    # The rotated numbers come in pairs after the others: if those are odd in number, columns begin one
    # earlier.
    FLAT: tl.constexpr = DIM - 2 * HALF_ROPE
    column = tl.arange(0, BLOCK) - FLAT % 2
    is_column = (column >= 0) & (column < DIM)
    # A program looks at `group` tokens, of which few end a block.
    begin = tl.program_id(0) * group
    for number in range(tl.minimum(group, num_tokens - begin)):
        token = begin + number
        to = out + token.to(tl.int64) * DIM + column
        position = tl.load(positions + token).to(tl.int32)
        request = tl.load(request_ids + token)
        row = tl.where(position >= 0, row_of(request, rows, batch, num_rows), 0)
        if (row > 0) & ((position + 1) % RATIO == 0):
            x = _pooled(
                token, position, row, request, request_ids, positions, values, scores, value_stride,
                score_stride, state_values, state_scores, column, is_column, RATIO, SPAN, PLACES, CHANNELS,
                DIM, STEP, IS_SPELLED,
            )  # fmt: skip
            if HAS_NORM:
                factor = tl.rsqrt(tl.sum(x * x, 0) / DIM + epsilon)
                x = x * factor * wide(tl.load(weight + column, mask=is_column, other=0), IS_SPELLED)
            if HALF_ROPE > 0:
                even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
                pair = tl.arange(0, BLOCK // 2) - (FLAT + 1) // 2
                is_pair = (pair >= 0) & (pair < HALF_ROPE)
                at = token.to(tl.int64)
                c = wide(tl.load(cos + at * cos_stride + pair, mask=is_pair, other=0), IS_SPELLED)
                s = wide(tl.load(sin + at * sin_stride + pair, mask=is_pair, other=0), IS_SPELLED)
                turned_even, turned_odd = even * c - odd * s, odd * c + even * s
                even, odd = tl.where(is_pair, turned_even, even), tl.where(is_pair, turned_odd, odd)
                x = tl.reshape(tl.join(even, odd), (BLOCK,))
            tl.store(to, x, mask=is_column)
        else:
            tl.store(to, tl.zeros((BLOCK,), tl.float32), mask=is_column)


_FEW_NUMBERS, _MANY_NUMBERS, _LONG_NUMBERS = 2048, 512, 1024  # per program


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
    num_tokens, dim = out.shape
    if num_tokens == 0:
        return
    spelled = _casts_fused.is_spelled(out.device)
    channels = values.shape[1]
    span = ratio * channels // dim
    half_rope = 0 if rotary is None else rotary[0].shape[1]
    block = triton.next_power_of_2(dim + dim % 2)
    # Few tokens: large programs, all of which run at once. Many tokens: small programs.
    is_long = span > 32
    if is_few(num_tokens):
        numbers, num_warps = _FEW_NUMBERS, 16 if is_long else 4
    else:
        numbers, num_warps = _LONG_NUMBERS if is_long else _MANY_NUMBERS, 1
    group = tokens_together(tokens, ratio)
    step = min(triton.next_power_of_2(span), max(1, numbers // block))
    given, stride = rows_and_stride(values)
    given_scores, score_stride = rows_and_stride(scores)
    weight, epsilon = (out, 0.0) if norm is None else norm
    cos, sin = (out, out) if rotary is None else rotary
    (cos, cos_stride), (sin, sin_stride) = rows_and_stride(cos), rows_and_stride(sin)
    _compress[(triton.cdiv(num_tokens, group),)](
        tokens.rows, tokens.request_ids, tokens.positions, readable(given, spelled),
        readable(given_scores, spelled), stride, score_stride, state_values, state_scores, out,
        readable(weight, spelled), float(epsilon), readable(cos, spelled), readable(sin, spelled),
        cos_stride, sin_stride, num_tokens, group, tokens.rows.shape[0], state_values.shape[0],
        RATIO=ratio, SPAN=span, PLACES=state_values.shape[1], CHANNELS=channels, DIM=dim,
        HALF_ROPE=half_rope, HAS_NORM=norm is not None, BLOCK=block, STEP=step, IS_SPELLED=spelled,
        num_warps=num_warps,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "batch", "num_rows"],
    do_not_specialize_on_alignment=["rows", "request_ids", "positions"],
)
def _push(
    rows, request_ids, positions, values, scores, value_stride, score_stride, state_values, state_scores,
    num_tokens, batch, num_rows,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    IS_SPELLED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    request = tl.load(request_ids + token, mask=is_token, other=-1)
    position = tl.load(positions + token, mask=is_token, other=-1).to(tl.int32)
    row = tl.where(position >= 0, row_of(request, rows, batch, num_rows), 0)
    is_written = (row > 0) & is_last(token, request, position, request_ids, positions, num_tokens, PLACES)
    place = (row * PLACES + position % PLACES) * CHANNELS
    if tl.max(is_written.to(tl.int32), 0) > 0:
        for first in range(tl.program_id(1) * BLOCK, CHANNELS, tl.num_programs(1) * BLOCK):
            column = (first + tl.arange(0, BLOCK))[None, :]
            mask = is_written[:, None] & (column < CHANNELS)
            given = token.to(tl.int64)[:, None]
            value = tl.load(values + given * value_stride + column, mask=mask)
            score = tl.load(scores + given * score_stride + column, mask=mask)
            tl.store(state_values + place[:, None] + column, wide(value, IS_SPELLED), mask=mask)
            tl.store(state_scores + place[:, None] + column, wide(score, IS_SPELLED), mask=mask)


_PUSH_ROWS, _PUSH_BLOCK = 16, 128


def push(
    tokens: Tokens,
    values: torch.Tensor,
    scores: torch.Tensor,
    state_values: torch.Tensor,
    state_scores: torch.Tensor,
) -> None:
    num_tokens = tokens.positions.shape[0]
    if num_tokens == 0:
        return
    spelled = _casts_fused.is_spelled(state_values.device)
    channels = values.shape[1]
    block = min(triton.next_power_of_2(channels), _PUSH_BLOCK)
    # With many tokens, most are not kept.
    num_pieces = triton.cdiv(channels, block) if is_few(num_tokens) else 1
    given, stride = rows_and_stride(values)
    given_scores, score_stride = rows_and_stride(scores)
    _push[(triton.cdiv(num_tokens, _PUSH_ROWS), num_pieces)](
        tokens.rows, tokens.request_ids, tokens.positions, readable(given, spelled),
        readable(given_scores, spelled), stride, score_stride, state_values, state_scores,
        num_tokens, tokens.rows.shape[0], state_values.shape[0], PLACES=state_values.shape[1],
        CHANNELS=channels, ROWS=_PUSH_ROWS, BLOCK=block, IS_SPELLED=spelled, num_warps=4,
    )  # fmt: skip
