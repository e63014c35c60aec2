"""Attention through pages against plain attention on tensors that were never paged."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.attention import _reference, nhd_pages, paged
from pagoda.errors import ArgumentError
from pagoda.layout import FullAttention, LatentAttention, Layout, WindowAttention, latent
from pagoda.pools import GroupBatch, Pools
from profiles import examples
from unit.deltas import delta_of

NUM_PAGES = 60


class Model(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    is_latent: bool = False
    window: int | None = None
    sink_tokens: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    scale: float | None = None
    dtype: str = "float32"


class Case:
    """A pool of NaN in which only the tokens that the step may read are stored, and the tokens themselves."""

    def __init__(
        self,
        model: Model,
        rows: list[tuple[int, int]],  # (length, queries)
        page: int = 4,
        kernel_page: int | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.model, self.rows = model, rows
        if model.is_latent:
            kind: Any = LatentAttention(entry=latent(model.v_dim, model.k_dim - model.v_dim, model.dtype))
        else:
            sizes: dict[str, Any] = {"kv_heads": model.kv_heads, "k_dim": model.k_dim, "v_dim": model.v_dim}
            kind = FullAttention(**sizes, dtype=model.dtype)
            if model.window is not None:
                kind = WindowAttention(
                    **sizes, dtype=model.dtype, window=model.window, sink_tokens=model.sink_tokens
                )
        layout = Layout([kind], page)
        (group,) = layout.paged_groups
        scales: dict[str, Any] = {}
        if model.dtype.startswith("float8"):
            scales = {"k_scale": {group.name: [0.25]}, "v_scale": {group.name: [0.5]}}
        most = max(1, *(-(-length // page) for length, _ in rows))
        num_rows, num_tokens = len(rows) + 2, sum(count for _, count in rows)
        self.pools = Pools(
            layout, {group.name: NUM_PAGES}, num_rows=num_rows, max_tokens=most * page, device=device,
            max_step_tokens=num_tokens + 3, kernel_page_tokens={group.name: kernel_page or page}, **scales,
        )  # fmt: skip
        self.layer, self.pool = self.pools.layer(0), self.pools[group.name]
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.full(buffer.shape, math.nan).to(buffer.dtype))
        table = torch.randint(1, NUM_PAGES, (num_rows + 1, most), generator=random, dtype=torch.int32)
        ids = (torch.randperm(NUM_PAGES - 1, generator=random) + 1).tolist()
        kv_heads = 1 if model.is_latent else model.kv_heads
        self.keys, self.values = [], []
        for number, (length, num_queries) in enumerate(rows, 1):
            k = torch.randn(length, kv_heads, model.k_dim, generator=random)
            v = (
                k[..., : model.v_dim]
                if model.is_latent
                else torch.randn(length, kv_heads, model.v_dim, generator=random)
            )
            self.keys.append(k)
            self.values.append(v)
            pages = [ids.pop() for _ in range(-(-length // page))]
            if model.window is not None:
                for column in range(len(pages)):
                    read_from = length - num_queries - model.window + 1
                    if (column + 1) * page <= read_from and column * page >= model.sink_tokens:
                        pages[column] = 0  # given up: NaN is all that is there
            table[number, : len(pages)] = torch.tensor(pages)
            kept = [at for at in range(length) if pages[at // page]]
            slots = [pages[at // page] * page + at % page for at in kept]
            self.pool.store(0, slots, k[kept].to(device), None if model.is_latent else v[kept].to(device))
        self.queries = torch.randn(num_tokens, model.heads, model.k_dim, generator=random)
        self.sinks = torch.randn(model.heads, generator=random) if model.has_sinks else None
        delta = delta_of(
            1,
            rows=range(1, len(rows) + 1),
            lengths=[length for length, _ in rows],
            counts=[count for _, count in rows],
            places=range(most, table.numel()),
            page_ids=table.flatten()[most:].tolist(),
            num_groups=1,
        )
        self.pools.apply(delta)
        self.batch = self.pools.batch(delta, pad_to=(num_rows, num_tokens + 3))

    @property
    def view(self) -> GroupBatch[torch.Tensor]:
        return self.batch[self.layer.group.name]

    def attend(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        model = self.model
        return paged(
            (self.queries if queries is None else queries).to(self.pool.device),
            self.layer,
            self.batch,
            scale=model.scale,
            softcap=model.softcap,
            sinks=None if self.sinks is None else self.sinks.to(self.pool.device),
        ).cpu()

    def plain(self) -> torch.Tensor:
        """The same in float64, a query at a time, from the tokens as the pool's dtype keeps them."""
        model, outs, first = self.model, [], 0
        scale = model.k_dim**-0.5 if model.scale is None else model.scale
        for (length, num_queries), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            keys, values = kept(keys, self.pool.dtype, 0.25), kept(values, self.pool.dtype, 0.5)
            for offset in range(num_queries):
                at = length - num_queries + offset
                for head in range(model.heads):
                    which = head * keys.shape[1] // model.heads
                    read = [
                        p
                        for p in range(at + 1)
                        if model.window is None or at - p < model.window or p < model.sink_tokens
                    ]
                    query = self.queries[first + offset, head].double()
                    logits = (keys[read, which] @ query) * scale
                    if model.softcap is not None:
                        logits = model.softcap * torch.tanh(logits / model.softcap)
                    if self.sinks is not None:
                        logits = torch.cat([logits, self.sinks[head : head + 1].double()])
                    weights = torch.softmax(logits, 0)[: len(read)]
                    outs.append(weights @ values[read, which])
            first += num_queries
        return torch.stack(outs).view(-1, model.heads, model.v_dim)


def kept(tokens: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        return (tokens / scale).clamp(-448, 448).to(dtype).double() * scale
    return tokens.to(dtype).double()


MIXED = [(9, 1), (0, 0), (17, 17), (13, 5), (1, 1), (6, 0), (8, 1), (20, 5)]
SHAPES = {
    "grouped": Model(),
    "one-to-one": Model(heads=3, kv_heads=3),
    "one-kv-head": Model(heads=6, kv_heads=1, k_dim=5, v_dim=3),
    "wider-values": Model(k_dim=4, v_dim=12),
    "latent": Model(heads=5, kv_heads=1, k_dim=12, v_dim=8, is_latent=True, scale=0.3),
}


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
    torch.testing.assert_close(case.attend().double(), case.plain(), rtol=1e-5, atol=1e-5)


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
    torch.testing.assert_close(case.attend().double(), case.plain(), rtol=1e-5, atol=1e-5)


def test_the_first_tokens_are_read_however_far_the_window_is():
    case = Case(Model(window=3, sink_tokens=2), [(19, 2), (30, 1)])
    assert 0 in case.view.page_table[0, :4].tolist()  # a hole between the sinks and the window
    torch.testing.assert_close(case.attend().double(), case.plain(), rtol=1e-5, atol=1e-5)


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
        torch.testing.assert_close(case.attend().double(), case.plain(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_pools_are_read_as_they_are_kept(dtype: str):
    case = Case(Model(dtype=dtype, window=6), MIXED)
    torch.testing.assert_close(case.attend().double(), case.plain(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_answer_has_the_dtype_of_the_queries(dtype: torch.dtype):
    case = Case(Model(), MIXED)
    out = case.attend(case.queries.to(dtype))
    assert out.dtype == dtype
    error = 1e-6 if dtype == torch.float64 else 0.03
    torch.testing.assert_close(out.double(), case.plain(), rtol=error, atol=error)


def test_long_prefills_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch):
    case = Case(Model(window=7, has_sinks=True), MIXED)
    whole = case.attend()
    monkeypatch.setattr(_reference, "_LOGITS", 1)
    torch.testing.assert_close(case.attend(), whole)


def test_padding_gets_0():
    case = Case(Model(has_sinks=True), [(0, 0), (5, 1)])
    out = case.attend(torch.full((4, 4, 8), 3.0))  # one query, and padding
    assert out[0].abs().min() > 0
    assert not out[1:].any()


def test_a_query_that_can_read_nothing_gets_0():
    case = Case(Model(window=2), [(8, 1)])
    case.view.page_table.zero_()  # as if the window's pages had been given up
    assert not case.attend().any()
    case.view.page_table.fill_(NUM_PAGES + 1)  # no such page: the pool ends before it
    assert not case.attend().any()


def test_sinks_take_their_part_of_the_weight():
    case = Case(Model(heads=2, kv_heads=1), [(3, 1)])
    without = case.attend()
    q, k = case.queries[0].double(), case.keys[0][:, 0].double()
    weight = torch.exp(q @ k.T * 8**-0.5).sum(1)
    case.sinks = weight.log().float()  # as heavy as all keys together
    torch.testing.assert_close(case.attend(), without / 2)
    case.sinks = torch.full((2,), 200.0)  # exp of it is no float32
    assert case.attend().abs().max() < 1e-30


def test_a_prefill_in_parts_and_decoding_give_what_one_prefill_gives():
    whole = Case(Model(window=5), [(16, 16)], seed=4)
    together = whole.attend()
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
        torch.testing.assert_close(part.attend(queries), together[length - num_queries : length])


# ── back ends, as they document themselves ──────────────────────────────────────────────────────────


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query [heads, k_dim] over the keys [n, kv_heads, k_dim] that it reads, in float64."""
    repeats = q.shape[0] // keys.shape[1]
    k, v = (each.double().repeat_interleave(repeats, 1) for each in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) * q.shape[1] ** -0.5, 1)
    return torch.einsum("hn,nhd->hd", weights, v)


def as_flashinfer(case: Case) -> torch.Tensor:
    """BatchPrefillWithPagedKVCacheWrapper: of row i, pages indices[indptr[i] : indptr[i + 1]], of which the
    last has last_page_len[i] tokens; queries are the last ones; window_left keys before each are read."""
    view, outs = case.view, []
    k_pages, v_pages = (nhd_pages(b[0], view.page_tokens) for b in (case.pool.k_buffer, case.pool.v_buffer))
    indptr, starts = view.indptr.tolist(), case.batch.query_start_loc.tolist()
    for i in range(case.batch.num_rows):
        pages = view.indices[indptr[i] : indptr[i + 1]].long()
        kv_len = (len(pages) - 1) * view.page_tokens + int(view.last_page_len[i])
        keys, values = k_pages[pages].flatten(0, 1), v_pages[pages].flatten(0, 1)
        for query in range(starts[i], starts[i + 1]):
            own = kv_len - (starts[i + 1] - query)
            first = 0 if view.window_left < 0 else max(0, own - view.window_left)
            outs.append(attended(case.queries[query], keys[first : own + 1], values[first : own + 1]))
    return torch.stack(outs)


def as_flashattention(case: Case) -> torch.Tensor:
    """flash_attn_varlen_func with a block_table: key p of row i lies in page block_table[i, p // page size];
    query j of row i reads keys [j + seqlen_k − seqlen_q − left, j + seqlen_k − seqlen_q]."""
    view, outs = case.view, []
    k_pages, v_pages = (nhd_pages(b[0], view.page_tokens) for b in (case.pool.k_buffer, case.pool.v_buffer))
    starts = case.batch.query_start_loc.tolist()
    for i in range(case.batch.num_rows):
        for query in range(starts[i], starts[i + 1]):
            own = int(case.batch.lengths[i]) - (starts[i + 1] - query)
            first = 0 if view.window_left < 0 else max(0, own - view.window_left)
            at = torch.arange(first, own + 1)
            pages = view.page_table[i, at // view.page_tokens].long()
            read = pages, at % view.page_tokens
            outs.append(attended(case.queries[query], k_pages[read], v_pages[read]))
    return torch.stack(outs)


@pytest.mark.parametrize("back_end", [as_flashinfer, as_flashattention])
@pytest.mark.parametrize("kernel_page", [None, 2])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_back_ends_read_the_same_from_a_batch(back_end: Any, kernel_page: int | None, window: int | None):
    case = Case(Model(window=window), MIXED, kernel_page=kernel_page, seed=5)
    torch.testing.assert_close(back_end(case), case.attend().double(), rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused():
    case = Case(Model(), [(5, 2)])
    layer, batch, q = case.layer, case.batch, case.queries
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q[0], layer, batch), {}, "queries"),
        ((q.int(), layer, batch), {}, "queries"),
        ((None, layer, batch), {}, "queries"),
        ((q.to("meta"), layer, batch), {}, "queries is on meta"),
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
