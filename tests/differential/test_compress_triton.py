"""The compressor: the Triton kernels against the torch reference, and both against plain Python."""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.kernels import _compress_reference as compress_reference
from pagoda.kernels.entries import Tokens
from profiles import examples

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    compress_fused = pytest.importorskip("pagoda.kernels._compress_fused", reason="needs triton")
    from pagoda.kernels import _tokens_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=examples(60 if DEVICE == "cuda" else 25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NUM_ROWS = 4


# As in production, and as large batches are treated, on small ones; entries take several steps.
SIZES = {"small batches": (2048, 2, 16), "large batches": (0, 0, 8)}


@pytest.fixture(autouse=True, params=SIZES.values(), ids=SIZES, scope="module")
def sizes(request: pytest.FixtureRequest) -> Iterator[None]:
    few, runs, numbers = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tokens_fused, "_FEW_TOKENS", few)
        patch.setattr(_tokens_fused, "_LONG_RUNS", runs)
        for name in ("_FEW_NUMBERS", "_MANY_NUMBERS", "_LONG_NUMBERS"):
            patch.setattr(compress_fused, name, numbers)
        patch.setattr(compress_fused, "_PUSH_BLOCK", 4)
        yield


def both(name: str, *args: Any) -> list[list[torch.Tensor]]:
    """Run reference and kernel on copies of the arguments; what both left of every tensor, in order."""
    results = []
    for kernels, device in ((compress_reference, "cpu"), (compress_fused, DEVICE)):
        copies: list[torch.Tensor] = []

        def copied(x: Any, device: str = device, copies: list[torch.Tensor] = copies) -> Any:
            if isinstance(x, torch.Tensor):
                copies.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x))
                return copies[-1]
            if isinstance(x, Tokens):
                return Tokens(*(copied(y) for y in x))
            return tuple(copied(y) for y in x) if isinstance(x, tuple) else x

        getattr(kernels, name)(*(copied(x) for x in args))
        results.append([x.cpu() for x in copies])
    return results


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tokens, list[tuple[int, int, int]]]:
    """Tokens, and (row, first position, number) of each request."""
    rows = draw(st.permutations(range(NUM_ROWS + 1)))[: draw(st.integers(0, NUM_ROWS))]
    spans = [(row, draw(st.integers(0, 30)), draw(st.integers(0, 9))) for row in rows]
    ids: list[int] = []
    positions: list[int] = []
    for request, (_, first, number) in enumerate(spans):
        before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        ids += [request] * (before + number + behind)  # padding by its position
        positions += [-1] * before + [*range(first, first + number)] + [-1] * behind
        padding = draw(st.integers(0, 2))
        ids += [-1] * padding
        positions += [draw(st.integers(-2, 20)) for _ in range(padding)]
    parts = ([row for row, _, _ in spans], ids, positions)
    tokens = Tokens(*(torch.tensor(x, dtype=torch.int32).reshape(-1) for x in parts))
    if draw(st.booleans()):  # as batches have them
        tokens = tokens._replace(positions=tokens.positions.long())
    return tokens, spans


@CASES
@given(
    batch=batches(),
    seed=st.integers(0, 2**32),
    ratio=st.sampled_from([1, 2, 4, 5]),
    overlap=st.booleans(),
    dim=st.sampled_from([4, 7, 10, 16]),
    extra=st.integers(0, 3),
    half_rope=st.sampled_from([None, 1, 2]),
    has_norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_entry_is_a_softmax_over_the_tokens_of_its_blocks(
    batch: tuple[Tokens, list[tuple[int, int, int]]],
    seed: int,
    ratio: int,
    overlap: bool,
    dim: int,
    extra: int,
    half_rope: int | None,
    has_norm: bool,
    dtype: torch.dtype,
):
    (tokens, spans), random = batch, torch.Generator().manual_seed(seed)
    channels, span = dim * (2 if overlap else 1), ratio * (2 if overlap else 1)
    places, num_tokens = span + extra, len(tokens.positions)
    # Halves of one projection: rows do not follow each other.
    values, scores = (torch.randn(num_tokens, 2 * channels, generator=random).to(dtype) * 3).chunk(2, 1)
    # A state as a request leaves it: −inf and NaN, which nobody may read, before its first token.
    state_values = torch.randn(NUM_ROWS + 1, places, channels, generator=random)
    state_scores = torch.randn(NUM_ROWS + 1, places, channels, generator=random)
    for row, first, _ in spans:
        for place in range(min(first, places), places):
            state_values[row, place], state_scores[row, place] = torch.nan, -torch.inf
    norm = (torch.randn(dim, generator=random), 1e-6) if has_norm else None
    rotary = None
    if half_rope is not None:
        angles = torch.rand(num_tokens, half_rope, generator=random) * 6
        both_halves = torch.cat([angles.cos(), angles.sin()], 1)  # as engines keep them: rows of both
        rotary = both_halves[:, :half_rope], both_halves[:, half_rope:]
    out = torch.full((num_tokens, dim), 77.0)
    args = tokens, values, scores, ratio, state_values, state_scores, out, norm, rotary
    reference, fused = both("compress", *args)
    for a, b in zip(reference, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    made = reference[7]  # three of the tokens, values, scores and the state come before

    expected = torch.zeros(num_tokens, dim)
    where = {(r, p): t for t, (r, p) in enumerate(zip(*(x.tolist() for x in tokens[1:]), strict=True))}
    for request, (row, first, number) in enumerate(spans):
        for position in range(first, first + number) if row else []:
            if (position + 1) % ratio:
                continue
            token = where[request, position]
            for column in range(dim):
                pairs = []
                for back in range(span):
                    q = position - back
                    channel = column + (dim if overlap and back < ratio else 0)
                    if q < 0:
                        continue
                    if q >= first:
                        t = where[request, q]
                        pairs.append((float(scores[t, channel]), float(values[t, channel])))
                    else:
                        place = row, q % places, channel
                        pairs.append((float(state_scores[place]), float(state_values[place])))
                most = max(score for score, _ in pairs)
                weights = [math.exp(score - most) for score, _ in pairs]
                total = sum(w * value for w, (_, value) in zip(weights, pairs, strict=True))
                expected[token, column] = total / sum(weights)
            if norm is not None:
                root = math.sqrt(float(expected[token].square().mean()) + norm[1])
                expected[token] = expected[token] / root * norm[0]
            if rotary is not None and half_rope is not None:
                turns = torch.complex(rotary[0][token], rotary[1][token])
                pairs_of = expected[token, dim - 2 * half_rope :].view(-1, 2)
                expected[token, dim - 2 * half_rope :] = torch.view_as_real(
                    torch.view_as_complex(pairs_of.clone()) * turns
                ).flatten()
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@CASES
@given(batch=batches(), seed=st.integers(0, 2**32), places=st.sampled_from([1, 3, 8]))
def test_the_last_tokens_of_each_request_are_kept(
    batch: tuple[Tokens, list[tuple[int, int, int]]], seed: int, places: int
):
    (tokens, spans), random = batch, torch.Generator().manual_seed(seed)
    num_tokens = len(tokens.positions)
    values, scores = (torch.randn(num_tokens, 6, generator=random).bfloat16() for _ in range(2))
    states = [torch.randn(NUM_ROWS + 1, places, 6, generator=random) for _ in range(2)]
    reference, fused = both("push", tokens, values, scores, *states)
    assert all(torch.equal(a, b) for a, b in zip(reference, fused, strict=True))
    expected = [state.clone() for state in states]
    for token, (request, position) in enumerate(zip(*(x.tolist() for x in tokens[1:]), strict=True)):
        row = spans[request][0] if request >= 0 else 0
        if row and position >= 0:
            expected[0][row, position % places] = values[token].float()
            expected[1][row, position % places] = scores[token].float()
    assert all(torch.equal(a, b) for a, b in zip(reference[-2:], expected, strict=True))


def test_scores_that_are_all_masked_give_zeros():
    """The public design divides by a sum of no weights."""
    tokens = Tokens(*(torch.tensor(x, dtype=torch.int32) for x in ([1], [0], [0])))
    states = torch.zeros(2, 1, 8), torch.full((2, 1, 8), -torch.inf)
    args = torch.ones(1, 8), torch.full((1, 8), -torch.inf), 1, *states, torch.full((1, 8), 77.0), None, None
    for left in both("compress", tokens, *args):
        assert left[-1].eq(0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # numpy, of what is then hidden
@pytest.mark.parametrize(("ratio", "at"), [(4, at) for at in range(4)] + [(8, at) for at in range(8)])
def test_a_weight_of_zero_hides_any_value(ratio: int, at: int):
    """Whichever token has it, in whichever step of the sum it comes, alone there or not; in columns."""
    cases = torch.cartesian_prod(
        torch.tensor([-math.inf, -3.4e38, -1e9, -200.0]), torch.tensor([math.nan, math.inf])
    )
    parts = ([1], [0] * ratio, range(ratio))
    tokens = Tokens(*(torch.tensor(x, dtype=torch.int32) for x in parts))
    values, scores = torch.ones(ratio, 8), torch.zeros(ratio, 8)
    scores[at], values[at] = cases.T
    states = torch.zeros(2, ratio, 8), torch.zeros(2, ratio, 8)
    expected = torch.zeros(ratio, 8)
    expected[-1] = 1
    for left in both("compress", tokens, values, scores, ratio, *states, torch.zeros(ratio, 8), None, None):
        assert torch.equal(left[-1], expected)
