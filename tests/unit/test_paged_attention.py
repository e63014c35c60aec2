"""Attention through pages against plain attention on tensors that were never paged: what `paged` chooses, and
the torch reference."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from differential.attention_cases import Case, Model
from pagoda.attention import _reference, paged
from pagoda.errors import ArgumentError
from profiles import examples

Way = Callable[..., torch.Tensor]
WAYS = pytest.mark.parametrize("attend", [Case.attend, Case.reference])
MIXED = [(9, 1), (0, 0), (17, 17), (13, 5), (1, 1), (6, 0), (8, 1), (20, 5)]
SHAPES = {
    "grouped": Model(),
    "one-to-one": Model(heads=3, kv_heads=3),
    "one-kv-head": Model(heads=6, kv_heads=1, k_dim=5, v_dim=3),
    "wider-values": Model(k_dim=4, v_dim=12),
    "latent": Model(heads=5, kv_heads=1, k_dim=12, v_dim=8, is_latent=True, scale=0.3),
}


def assert_plain(case: Case, error: float = 1e-5) -> None:
    """Both give what plain attention gives."""
    expected = case.plain()
    for out in (case.attend(), case.reference()):
        torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)


# Latent layers have no window, and no usual scale.
COMBINATIONS = [
    (shape, scale, window)
    for shape, scale, window in itertools.product(SHAPES, [None, 0.4], [None, 1, 3, 6, 100])
    if shape != "latent" or (window is None and scale is not None)
]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("shape", "scale", "window"), COMBINATIONS)
def test_it_is_plain_attention(
    shape: str, scale: float | None, softcap: float | None, has_sinks: bool, window: int | None
):
    model = SHAPES[shape]._replace(window=window, has_sinks=has_sinks, softcap=softcap, scale=scale)
    case = Case(model, MIXED, seed=3)
    assert_plain(case)


@settings(max_examples=examples(100))
@given(data=st.data())
def test_any_batch_page_tokens_and_window(data: st.DataObject):
    kernel_page = data.draw(st.sampled_from([1, 2, 4]))
    page = kernel_page * data.draw(st.sampled_from([1, 2, 3]))
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(0, 11))
        rows.append((length, min(length, data.draw(st.sampled_from([0, 1, 1, 2, 11])))))
    if not any(q for _, q in rows):
        rows[0] = (3, 1)
    window = data.draw(st.sampled_from([None, 1, 2, 5]))
    sink_tokens = 0 if window is None else data.draw(st.sampled_from([0, 0, 1, 4]))
    model = Model(window=window, sink_tokens=sink_tokens, has_sinks=data.draw(st.booleans()))
    case = Case(model, rows, page, kernel_page, seed=data.draw(st.integers(0, 99)))
    assert_plain(case)


def test_the_first_tokens_are_read_however_far_the_window_is():
    case = Case(Model(window=3, sink_tokens=2), [(19, 2), (30, 1)])
    assert 0 in case.view.page_table[0, :4].tolist()  # a hole between the sinks and the window
    assert_plain(case)


def test_it_is_torchs_own_attention_with_an_explicit_mask():
    case = Case(Model(heads=4, kv_heads=2, window=5), [(14, 6)], seed=8)
    at = torch.arange(8, 14)[:, None]
    mask = (torch.arange(14) <= at) & (torch.arange(14) > at - 5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.queries.transpose(0, 1),
        case.keys[0].transpose(0, 1).repeat_interleave(2, 0),
        case.values[0].transpose(0, 1).repeat_interleave(2, 0),
        mask,
    ).transpose(0, 1)
    torch.testing.assert_close(case.attend(), expected)


def test_on_every_device(device: str):
    for model in (Model(window=3, has_sinks=True), SHAPES["latent"]):
        case = Case(model, MIXED, device=device)
        assert_plain(case, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_pools_are_read_as_they_are_kept(dtype: str):
    for model in (Model(window=6), SHAPES["latent"]):
        case = Case(model._replace(dtype=dtype), MIXED)
        assert_plain(case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_answer_has_the_dtype_of_the_queries(dtype: torch.dtype):
    case = Case(Model(), MIXED)
    out = case.attend(case.queries.to(dtype))
    assert out.dtype == dtype
    error = 1e-6 if dtype == torch.float64 else 0.03
    torch.testing.assert_close(out.double(), case.plain(), rtol=error, atol=error)


def test_long_prefills_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch):
    case = Case(Model(window=7, has_sinks=True), MIXED)
    whole = case.reference()
    monkeypatch.setattr(_reference, "_LOGITS", 1)
    torch.testing.assert_close(case.reference(), whole)


@WAYS
def test_padding_gets_0(attend: Way):
    case = Case(Model(has_sinks=True), [(0, 0), (5, 1)])
    out = attend(case, torch.full((4, 4, 8), 3.0))  # one query, and padding
    assert out[0].abs().min() > 0
    assert not out[1:].any()


@WAYS
def test_a_query_that_can_read_nothing_gets_0(attend: Way):
    case = Case(Model(window=2), [(8, 1)])
    case.view.page_table.zero_()  # as if the window's pages had been given up
    assert not attend(case).any()
    case.view.page_table.fill_(case.num_pages + 1)  # no such page: the pool ends before it
    assert not attend(case).any()


@WAYS
def test_sinks_take_their_part_of_the_weight(attend: Way):
    case = Case(Model(heads=2, kv_heads=1), [(3, 1)])
    without = attend(case)
    q, k = case.queries[0].double(), case.keys[0][:, 0].double()
    weight = torch.exp(q @ k.T * 8**-0.5).sum(1)
    case.sinks = weight.log().float()  # as heavy as all keys together
    torch.testing.assert_close(attend(case), without / 2)
    case.sinks = torch.full((2,), 200.0)  # exp of it is no float32
    assert attend(case).abs().max() < 1e-30


@WAYS
def test_a_prefill_in_parts_and_decoding_give_what_one_prefill_gives(attend: Way):
    whole = Case(Model(window=5), [(16, 16)], seed=4)
    together = attend(whole)
    for length, num_queries in ((6, 6), (12, 6), (13, 1), (16, 3)):
        part = Case(Model(window=5), [(length, num_queries)], seed=4)
        part.pool.store(0, [0], part.keys[0][:1], part.values[0][:1])  # page 0 may hold anything
        slots = torch.full((length,), -1)
        first = max(0, length - num_queries - 4)
        pages = part.view.page_table[0].tolist()
        for at in range(first, length):
            slots[at] = pages[at // 4] * 4 + at % 4
        part.pool.store(0, slots, whole.keys[0][:length], whole.values[0][:length])
        queries = whole.queries[length - num_queries : length]
        torch.testing.assert_close(attend(part, queries), together[length - num_queries : length])


def test_bad_input_is_refused():
    case = Case(Model(), [(5, 2)])
    layer, batch, q = case.layer, case.batch, case.queries
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q[0], layer, batch), {}, "queries"),
        ((q.int(), layer, batch), {}, "queries"),
        ((q.to_sparse(), layer, batch), {}, "queries: give a dense tensor"),
        ((None, layer, batch), {}, "queries"),
        ((q.to("meta"), layer, batch), {}, "queries: give a tensor on cpu, where the batch is, not on meta"),
        ((q[:1], layer, batch), {}, "tokens, not 1"),
        ((q[:, :3], layer, batch), {}, "multiple"),
        ((q[:, :0], layer, batch), {}, "multiple"),
        ((q[..., :7], layer, batch), {}, "heads of 7"),
        ((q, layer.keys, batch), {}, "layer: give what Pools.layer returned, not Tensor"),
        ((q, 0, batch), {}, "layer: give what Pools.layer returned, not int"),
        ((q, layer, batch["full"]), {}, "batch: give what Pools.batch returned, not GroupBatch"),
        ((q, layer, batch.host), {}, "batch: give what Pools.batch returned, not HostBatch"),
        ((q, layer, batch), {"sinks": torch.zeros(3)}, "sinks"),
        ((q, layer, batch), {"sinks": [0.0] * 4}, "sinks"),
        ((q, layer, batch), {"out": torch.zeros(len(q), 4, 7)}, "out: give torch.float32 of shape"),
        ((q, layer, batch), {"out": torch.zeros(len(q), 4, 8).double()}, "not torch.float64"),
        (
            (q, layer, batch),
            {"out": torch.zeros(8, 4, len(q)).permute(2, 1, 0)},
            "last dimension is contiguous",
        ),
        ((q, layer, batch), {"out": torch.zeros(1, 1, 8).expand(len(q), 4, 8)}, "not an expanded one"),
        ((q, layer, batch), {"out": torch.zeros(len(q), 4, 8, requires_grad=True)}, "without gradients"),
        ((q, layer, batch), {"softcap": 0.0}, "softcap"),
        ((q, layer, batch), {"softcap": math.nan}, "softcap"),
        ((q, layer, batch), {"scale": "1/8"}, "scale"),
        ((q, layer, batch), {"scale": math.inf}, "scale"),
    ]
    for positional, named, match in calls:
        with pytest.raises(ArgumentError, match=match):
            paged(*positional, **named)
    latents = Case(SHAPES["latent"], [(5, 2)])
    with pytest.raises(ArgumentError, match="scale: give one for latent attention"):
        paged(latents.queries, latents.layer, latents.batch)
