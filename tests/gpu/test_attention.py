"""Attention on a GPU: captured graphs, pools past 2^31 elements, rows of 100,000 tokens, realistic sizes."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from bench.measure import no_waiting
from differential.attention_cases import SHAPES, Case, Model, assert_close, judge, same_bytes
from pagoda import attention
from pagoda.attention import _reference, _triton
from pagoda.attention._call import checked
from pagoda.errors import CaptureError
from pagoda.layout import FullAttention, LatentAttention, Layout, WindowAttention, latent
from pagoda.manager import Delta, Manager
from pagoda.pools import Batch, Pools
from unit.deltas import delta_of, lists_for

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class Kind(NamedTuple):
    layer: Any
    heads: int
    k_dim: int
    v_dim: int
    scale: float


def full(kv_heads: int, heads: int, dim: int, window: int | None = None, dtype: str = "bfloat16") -> Kind:
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "k_dim": dim, "v_dim": dim, "dtype": dtype}
    layer = FullAttention(**sizes) if window is None else WindowAttention(**sizes, window=window)
    return Kind(layer, heads, dim, dim, dim**-0.5)


KINDS = {
    "grouped": full(8, 32, 128),
    "window": full(4, 16, 64, window=700),
    "fp8": full(8, 32, 128, dtype="float8_e4m3fn"),
    "latent": Kind(LatentAttention(entry=latent(512, 64, "bfloat16")), 16, 576, 512, 576**-0.5),
}
MOST = 6000  # tokens of a row, if nothing else is said


class Served:
    """A manager with rows that grow, and pools of random tokens for them."""

    def __init__(self, kind: Kind, lengths: Sequence[int], num_rows: int, most: int = MOST) -> None:
        self.kind, page = kind, 16
        layout = Layout([kind.layer], page)
        (self.group,) = layout.paged_groups
        capacity = {self.group.name: (sum(lengths) + 4 * MOST) // page}
        sizes = {"num_rows": num_rows, "max_tokens": most}
        scales: dict[str, Any] = {}
        if str(getattr(kind.layer, "dtype", "")).startswith("float8"):
            scales = {name: {self.group.name: [0.5]} for name in ("k_scale", "v_scale")}
        self.manager = Manager(layout, capacity, **sizes)
        self.pools = Pools(layout, capacity, **sizes, device=DEVICE, max_step_tokens=2048, **scales)
        self.layer = self.pools.layer(0)
        for buffer in (self.layer.keys, self.layer.values):
            if buffer is not None:
                for part in buffer.split(1 << 16):
                    part.copy_(torch.randn(part.shape, device=DEVICE).to(part.dtype))
        self.rows: list[int] = []
        self.begun = 0
        for length in lengths:
            self.admit(length)

    def admit(self, length: int, computed: int | None = None) -> None:
        """A row with a prompt that no other has, and its first tokens already computed."""
        self.begun += 1
        first = self.begun * 1_000_000
        row = self.manager.admit(range(first, first + length)).row
        self.rows.append(row)
        computed = length if computed is None else computed
        if computed:
            delta = self.manager.plan(row, computed)
            self.pools.apply(delta)
            self.commit([row], [computed], delta)

    def release(self, number: int) -> None:
        self.manager.release(self.rows.pop(number))

    def plan(self, counts: Sequence[int], is_prompt: Sequence[bool] | None = None) -> Delta:
        """A step that computes these numbers of tokens; a row whose prompt is not computed has them."""
        for row, count, has_prompt in zip(self.rows, counts, is_prompt or [False] * len(counts), strict=True):
            if not has_prompt:
                self.manager.reserve([row], count)
        delta = self.manager.plan(self.rows, counts)
        self.pools.apply(delta)
        return delta

    def commit(self, rows: list[int], counts: Sequence[int], delta: Delta) -> None:
        self.manager.commit(rows, list(range(sum(counts))), counts)
        self.manager.pass_fence(delta.step)

    def attend(self, queries: torch.Tensor, batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        return attention.paged(queries, self.layer, batch, scale=self.kind.scale, out=out)

    def queries(self, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        shape = (num_tokens, self.kind.heads, self.kind.k_dim)
        return torch.randn(shape, device=DEVICE).to(dtype)

    def exact(self, queries: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The reference in float64."""
        call = checked(queries.double(), self.layer, batch, self.kind.scale)
        _reference.attend(call)
        return call.out


# ── graphs ──────────────────────────────────────────────────────────────────────────────────────────

# What each step computes: tokens of each row. Rows come and go between steps.
STEPS = {
    "decode": (8, 8, 1, [[1], [1] * 8, [1] * 3, [1] * 8, [1]]),
    "draft": (6, 30, 5, [[5] * 6, [1], [2, 5, 1], [5] * 6]),
    "mixed": (6, 700, None, [[1, 1], [600, 1, 9, 1], [1] * 6, [64, 1], [300, 200, 100, 17, 8, 2], [1]]),
}
LENGTHS = [5000, 17, 900, 256, 257, 2, 3000, 64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", STEPS)
def test_a_graph_serves_every_batch_of_its_size(kind: str, steps: str):
    rows, tokens, max_queries, counts_of = STEPS[steps]
    served = Served(KINDS[kind], [20], rows)  # the graph is captured with one short row
    queries = served.queries(tokens)
    out = torch.empty(tokens, served.kind.heads, served.kind.v_dim, dtype=queries.dtype, device=DEVICE)
    size: dict[str, Any] = {"pad_to": (rows, tokens), "max_queries": max_queries}
    delta = served.plan([1])
    batch = served.pools.batch(delta, **size)
    served.attend(queries, batch, out)  # compiles, and makes room
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        served.attend(queries, batch, out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    served.commit(served.rows, [1], delta)

    for number, counts in enumerate(counts_of):
        while served.rows:
            served.release(0)
        for length, count in zip(LENGTHS[number:] + LENGTHS, counts, strict=False):
            served.admit(length + count, length)
        delta = served.plan(counts, [True] * len(counts))
        batch = served.pools.batch(delta, **size)
        queries.normal_()
        queries[batch.num_tokens :] = torch.nan
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        assert same_bytes(served.attend(queries, batch), replayed)
        assert not replayed[batch.num_tokens :].any()
        exact = served.exact(queries, batch)
        assert_close(replayed[: batch.num_tokens], exact[: batch.num_tokens])
        alone = served.pools.batch(delta)  # not padded
        assert same_bytes(served.attend(queries[: alone.num_tokens], alone), replayed[: alone.num_tokens])
        served.commit(served.rows, counts, delta)
    served.manager.check()
    served.pools.check()


def test_a_batch_of_its_own_step_is_not_captured():
    """Another step of the same size may have more parts and tiles than the graph has room for."""
    served = Served(KINDS["grouped"], [5000, 300], 2)
    batch = served.pools.batch(served.plan([1, 40]))
    queries = served.queries(41)
    out = served.attend(queries, batch)
    raised = False
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.add_(0)  # a graph must hold something
        try:
            served.attend(queries, batch, out)
        except CaptureError as error:
            raised = "pad_to and max_queries" in str(error)
    assert raised
    assert_close(served.attend(queries, batch), served.exact(queries, batch))


def test_a_capture_before_any_call_says_what_to_do():
    for number in range(2):
        served = Served(KINDS["grouped"], [5000], 2)
        queries = served.queries(2)
        out = torch.empty_like(queries)
        batch = served.pools.batch(served.plan([1]), pad_to=2, max_queries=1)
        if number == 0:
            served.attend(queries, batch, out)  # compiles, and makes room in these pools alone
            continue
        raised = False
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            out.zero_()  # a graph must hold something
            try:
                served.attend(queries, batch, out)
            except CaptureError as error:
                raised = "call attention.paged once before the capture" in str(error)
        assert raised
        served.attend(queries, batch, out)
        assert_close(out[:1], served.exact(queries, batch)[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind: str):
    served = Served(KINDS[kind], [5000, 17, 900], 4)
    queries = served.queries(70)

    def step(counts: list[int]) -> None:
        delta = served.plan(counts)
        batch = served.pools.batch(delta, pad_to=(4, 70))
        served.attend(queries, batch)
        served.commit(served.rows, counts, delta)
        delta = served.plan(counts)
        served.attend(queries[: sum(counts)], served.pools.batch(delta))
        served.commit(served.rows, counts, delta)

    step([1, 1, 1])  # compiles
    step([1, 60, 9])
    with no_waiting():
        for counts in ([1, 1, 1], [60, 1, 9], [8, 2, 1]):
            step(counts)


def test_three_runs_give_the_same_bytes():
    for kind in KINDS.values():
        served = Served(kind, LENGTHS, 8)
        counts = [1, 9, 1, 1, 2, 1, 300, 8]
        batch = served.pools.batch(served.plan(counts))
        queries = served.queries(sum(counts))
        outs = [served.attend(queries, batch) for _ in range(3)]
        assert same_bytes(outs[0], outs[1])
        assert same_bytes(outs[0], outs[2])


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["grouped", "latent", "window"])
@pytest.mark.parametrize("page", [1, 16])
def test_a_pool_past_2_to_the_31_elements(kind: str, page: int):
    """The same tokens at the far end of a large pool and in a small one give the same bytes."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    chosen, rows = KINDS[kind], [(900, 1), (300, 1), (200, 40), (65, 2)]
    layout = Layout([chosen.layer], page)
    (group,) = layout.paged_groups
    most = -(-900 // page)
    needed = sum(-(-length // page) for length, _ in rows)
    width = SIZES[kind]
    num_tokens = sum(count for _, count in rows)
    keys, values = (torch.randn(needed * page, width, device=DEVICE) for _ in range(2))
    queries = torch.randn(num_tokens, chosen.heads, chosen.k_dim, device=DEVICE, dtype=torch.bfloat16)
    outs = []
    for num_pages in (needed, 2**31 // (width * page) + needed + 3):
        pools = Pools(
            layout, {group.name: num_pages}, num_rows=4, max_tokens=most * page, device=DEVICE,
            max_step_tokens=num_tokens,
        )  # fmt: skip
        layer, pool = pools.layer(0), pools[group.name]
        ids = torch.arange(num_pages, num_pages - needed, -1)  # the last ones
        slots = (ids[:, None] * page + torch.arange(page)).flatten().to(DEVICE)
        if num_pages > needed:
            assert int(slots.min()) * width > 2**31
        shaped = (each.view(needed * page, *layer.keys.shape[1:]) for each in (keys, values))
        pool.store(0, slots, next(shaped), None if layer.values is None else next(shaped))
        table = torch.zeros(5, most, dtype=torch.int32)
        first = 0
        for number, (length, _) in enumerate(rows, 1):
            n = -(-length // page)
            table[number, :n] = ids[first : first + n]
            first += n
        delta = delta_of(
            1, rows=range(1, 5), lengths=[length for length, _ in rows], counts=[count for _, count in rows],
            places=range(most, table.numel()), page_ids=table.flatten()[most:].tolist(), num_groups=1,
            **lists_for(pools),
        )  # fmt: skip
        pools.apply(delta)
        batch = pools.batch(delta)
        outs.append(attention.paged(queries, layer, batch, scale=chosen.scale))
        exact = checked(queries.double(), layer, batch, chosen.scale)
        _reference.attend(exact)
        assert_close(outs[-1], exact.out)
        del pools, layer, pool, batch, exact
        torch.cuda.empty_cache()
    assert same_bytes(*outs)


SIZES = {"grouped": 8 * 128, "latent": 576, "window": 4 * 64}  # elements of a token's key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["grouped", "latent"])
@pytest.mark.parametrize(
    "counts", [[1, 1, 1, 1], [1, 1, 200, 1], [1], [8]], ids=["decode", "mixed", "alone", "draft"]
)
def test_rows_of_100_000_tokens(kind: str, counts: list[int], dtype: torch.dtype):
    """Each query is a key of its row, so that it reads one key as heavily as all others together: one that is
    left out, or read twice, shows."""
    lengths = [100_000, 77, 40_000, 99_999][: len(counts)]
    served = Served(KINDS[kind], lengths, 4, most=101_000)
    batch = served.pools.batch(served.plan(counts))
    work = batch[served.group.name].work
    assert int(work.splits[0, 0]) > 10  # many parts
    queries = served.queries(sum(counts), dtype)
    heads = torch.arange(served.kind.heads, device=DEVICE)
    kv_heads = served.layer.keys.shape[1]
    starts = batch.query_start_loc.tolist()
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            at = torch.randint(0, length, (served.kind.heads,), device=DEVICE)
            pages = batch[served.group.name].page_table[row, at // 16].long()
            read = served.layer.keys[pages * 16 + at % 16, heads * kv_heads // served.kind.heads]
            # About ln(100,000) above the logits of other keys.
            queries[token] = (read.float() * 12 / (served.kind.scale * served.kind.k_dim)).to(dtype)
    assert_close(served.attend(queries, batch), served.exact(queries, batch))


REALISTIC = [
    Model(32, 8, dim, dim, dtype="bfloat16") for dim in (64, 80, 96, 112, 128, 256)
] + [
    Model(16, 16, 192, 128, dtype="bfloat16"),
    Model(9, 3, 64, 64, dtype="bfloat16"),
    Model(128, 1, 576, 512, is_latent=True, scale=576**-0.5, dtype="bfloat16"),
]  # fmt: skip
LONG = [(4096, 1), (1023, 1), (17, 1), (2500, 2), (800, 300), (600, 600), (64, 8), (1, 1), (2049, 65)]


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("model", REALISTIC, ids=lambda model: f"{model.k_dim}-{model.v_dim}x{model.heads}")
def test_realistic_sizes(model: Model, page: int):
    """In bfloat16 all, in float32 with pages of 16."""
    windows = [None] if model.is_latent else [None, 1000]
    dtypes = [torch.bfloat16, torch.float32] if page == 16 else [torch.bfloat16]
    for window, dtype in itertools.product(windows, dtypes):
        case = Case(model._replace(window=window), LONG, page, None, DEVICE)
        case.queries = case.queries.to(dtype)
        judge(_triton.attend, case)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_realistic_sizes_of_other_dtypes(dtype: str):
    for model in (Model(32, 8, 128, 128), Model(128, 1, 576, 512, is_latent=True, scale=576**-0.5)):
        for queries in (torch.float16, torch.bfloat16):
            case = Case(model._replace(dtype=dtype), LONG, 16, None, DEVICE)
            case.queries = case.queries.to(queries)
            judge(_triton.attend, case)


def test_the_call_takes_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """And the reference for what Triton does not have."""

    def refuse(call: object) -> None:
        raise AssertionError("the reference was called")

    case = Case(SHAPES["64x2"], [(70, 1), (40, 9)], 16, None, DEVICE)
    expected = case.plain()
    with monkeypatch.context() as patch:
        patch.setattr(_reference, "attend", refuse)
        torch.testing.assert_close(case.attend().double(), expected, rtol=1e-5, atol=1e-5)
    sinks = Case(Model(window=5, sink_tokens=4), [(70, 1), (40, 9)], 16, None, DEVICE)
    torch.testing.assert_close(sinks.attend().double(), sinks.plain(), rtol=1e-5, atol=1e-5)
