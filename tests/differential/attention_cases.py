"""Cases of attention over pages, and who judges them. In: a variant; out: pools with a step to compute, and
what it must give.

`Case.plain` is attention in float64 on tensors that were never paged: it judges the torch reference, which in
turn judges every other implementation (`judge`), because it is fast enough for all variants. `VARIANTS` pairs
every value of a factor with every value of each other one, not all values with all.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pagoda.attention import _reference, paged
from pagoda.attention._call import Call, checked
from pagoda.layout import FullAttention, LatentAttention, Layout, WindowAttention, latent
from pagoda.pools import GroupBatch, Pools
from unit.deltas import delta_of, lists_for

__all__ = [
    "SHAPES", "VARIANTS", "Case", "Model", "Variant", "assert_close", "attend_one", "case_of", "judge",
    "same_bytes",
]  # fmt: skip

Attend = Callable[[Call], None]
K_SCALE, V_SCALE = 0.25, 0.5  # of fp8 pools
WORKERS = 264 if torch.cuda.is_available() else 16  # the interpreter takes milliseconds for each
GUARD = 77.0  # what lies between the outputs of a strided `out`


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
    """A pool of NaN in which only the tokens that the step may read are stored, and the tokens themselves.

    `rows` are (length, queries). Rows of at least `prefix` tokens begin with the same pages of that many.
    `padding` is the rows and tokens that the batch has besides those of the step; None: it is not padded.
    `max_queries` is the batch's.
    """

    def __init__(
        self,
        model: Model,
        rows: Sequence[tuple[int, int]],
        page: int = 4,
        kernel_page: int | None = None,
        device: str = "cpu",
        seed: int = 0,
        *,
        prefix: int = 0,
        padding: tuple[int, int] | None = (2, 3),
        max_queries: int | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(seed)  # of tokens and queries: whatever the pages are
        placing = torch.Generator().manual_seed(seed)
        self.model, self.rows = model, rows
        layout = Layout([kind_of(model)], page)
        (group,) = layout.paged_groups
        scales: dict[str, Any] = {}
        if model.dtype.startswith("float8"):
            scales = {"k_scale": {group.name: [K_SCALE]}}
            if not model.is_latent:
                scales["v_scale"] = {group.name: [V_SCALE]}
        pages_of = [-(-length // page) for length, _ in rows]
        most, num_pages = max(1, *pages_of), sum(pages_of) + 5
        self.num_pages = num_pages
        num_rows, num_tokens = len(rows) + 2, sum(count for _, count in rows)
        self.pools = Pools(
            layout, {group.name: num_pages}, num_rows=num_rows, max_tokens=most * page, device=device,
            max_step_tokens=num_tokens + 3, kernel_page_tokens={group.name: kernel_page or page},
            workers=WORKERS, **scales,
        )  # fmt: skip
        self.layer, self.pool = self.pools.layer(0), self.pools[group.name]
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.full(buffer.shape, math.nan).to(buffer.dtype))
        # Places behind a row's pages are stale: they name pages of other rows, or of nobody.
        table = torch.randint(1, num_pages, (num_rows + 1, most), generator=placing, dtype=torch.int32)
        ids = (torch.randperm(num_pages - 1, generator=placing) + 1).tolist()
        kv_heads = 1 if model.is_latent else model.kv_heads
        self.keys, self.values, first = [], [], None
        for number, (length, num_queries) in enumerate(rows, 1):
            k = torch.randn(length, kv_heads, model.k_dim, generator=random)
            v = (
                k[..., : model.v_dim]
                if model.is_latent
                else torch.randn(length, kv_heads, model.v_dim, generator=random)
            )
            pages = [ids.pop() for _ in range(-(-length // page))]
            if length >= prefix > 0:
                if first is None:
                    first = (pages[: prefix // page], k[:prefix].clone(), v[:prefix].clone())
                pages[: prefix // page], k[:prefix], v[:prefix] = first
            self.keys.append(k)
            self.values.append(v)
            if model.window is not None:
                for column in range(len(pages)):
                    read_from = length - num_queries - model.window + 1
                    if (column + 1) * page <= read_from and column * page >= model.sink_tokens:
                        pages[column] = 0  # given up: NaN is all that is there
            table[number, : len(pages)] = torch.tensor(pages)
            where = torch.tensor(pages, dtype=torch.int64).repeat_interleave(page)[:length]
            kept = where.nonzero().flatten()
            slots = where[kept] * page + kept % page
            self.pool.store(
                0, slots.to(device), k[kept].to(device), None if model.is_latent else v[kept].to(device)
            )
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
            **lists_for(self.pools),
        )
        self.pools.apply(delta)
        pad_to = None if padding is None else (len(rows) + padding[0], num_tokens + padding[1])
        named: dict[str, Any] = {} if max_queries is None else {"max_queries": max_queries}
        self.batch = self.pools.batch(delta, pad_to=pad_to, **named)

    @property
    def view(self) -> GroupBatch[torch.Tensor]:
        return self.batch[self.layer.group.name]

    def call(self, queries: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Call:
        """The checked call of the step, as implementations take it."""
        model, device = self.model, self.pool.device
        return checked(
            (self.queries if queries is None else queries).to(device),
            self.layer,
            self.batch,
            self.scale,
            model.softcap,
            None if self.sinks is None else self.sinks.to(device),
            out,
        )

    @property
    def scale(self) -> float:
        return self.model.k_dim**-0.5 if self.model.scale is None else self.model.scale

    def attend(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        """What `attention.paged` returns."""
        model = self.model
        return paged(
            (self.queries if queries is None else queries).to(self.pool.device),
            self.layer,
            self.batch,
            scale=model.scale,
            softcap=model.softcap,
            sinks=None if self.sinks is None else self.sinks.to(self.pool.device),
        ).cpu()

    def reference(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        """What the torch reference computes."""
        call = self.call(queries)
        _reference.attend(call)
        return call.out.cpu()

    def plain(self) -> torch.Tensor:
        """The same in float64, a query at a time, from the tokens as the pool's dtype keeps them."""
        model, outs, first = self.model, [], 0
        for (length, num_queries), k, v in zip(self.rows, self.keys, self.values, strict=True):
            keys = kept(k, self.pool.dtype, K_SCALE)
            values = keys[..., : model.v_dim] if model.is_latent else kept(v, self.pool.dtype, V_SCALE)
            for offset in range(num_queries):
                at = length - num_queries + offset
                read = [
                    p
                    for p in range(at + 1)
                    if model.window is None or at - p < model.window or p < model.sink_tokens
                ]
                outs.append(
                    attend_one(
                        self.queries[first + offset], keys[read], values[read], self.scale,
                        model.softcap, self.sinks,
                    )
                )  # fmt: skip
            first += num_queries
        return torch.stack(outs)


def kind_of(model: Model) -> Any:
    """The layer of a layout."""
    if model.is_latent:
        return LatentAttention(entry=latent(model.v_dim, model.k_dim - model.v_dim, model.dtype))
    sizes: dict[str, Any] = {
        "kv_heads": model.kv_heads, "k_dim": model.k_dim, "v_dim": model.v_dim, "dtype": model.dtype
    }  # fmt: skip
    if model.window is None:
        return FullAttention(**sizes)
    return WindowAttention(**sizes, window=model.window, sink_tokens=model.sink_tokens)


def kept(tokens: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Tokens as a pool of some dtype gives them back, in float64; `scale` is that of fp8."""
    if dtype.itemsize > 1:
        return tokens.to(dtype).double()
    most = torch.finfo(dtype).max
    return (tokens / scale).clamp(-most, most).to(dtype).double() * scale


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query [heads, k_dim] over the keys [n, kv_heads, k_dim] and values [n, kv_heads, v_dim] that it
    reads, in float64: [heads, v_dim]. Without keys, 0."""
    grouped = query.double().unflatten(0, (keys.shape[1], -1))
    logits = torch.einsum("kgd,nkd->kgn", grouped, keys.double()).flatten(0, 1) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], 1)
    weights = torch.softmax(logits, 1)[:, : keys.shape[0]].unflatten(0, grouped.shape[:2])
    return torch.einsum("kgn,nkd->kgd", weights, values.double()).flatten(0, 1)


# ── variants ────────────────────────────────────────────────────────────────────────────────────────


class Variant(NamedTuple):
    shape: str
    dtype: str  # of the pool / of the queries
    pages: tuple[int, int | None]  # tokens of a page, and of the kernel's
    rows: str
    window: int | None
    softcap: float | None
    has_sinks: bool
    form: str  # of the batch and of queries and outputs

    def __str__(self) -> str:
        page, kernel_page = self.pages
        named = [
            self.shape, self.dtype, f"page{page}" + (f"as{kernel_page}" if kernel_page else ""), self.rows,
            "" if self.window is None else f"window{self.window}", "softcap" if self.softcap else "",
            "sinks" if self.has_sinks else "", self.form,
        ]  # fmt: skip
        return "-".join(filter(None, named))

    @property
    def dtypes(self) -> tuple[str, torch.dtype]:
        pool, _, queries = self.dtype.partition("/")
        return pool, getattr(torch, queries)


SHAPES = {
    "16x1": Model(heads=2, kv_heads=2, k_dim=16, v_dim=16),
    "64x2": Model(heads=4, kv_heads=2, k_dim=64, v_dim=64),
    "80x4": Model(heads=4, kv_heads=1, k_dim=80, v_dim=80),
    "96x8": Model(heads=8, kv_heads=1, k_dim=96, v_dim=96),
    "112x3": Model(heads=6, kv_heads=2, k_dim=112, v_dim=112),
    "128x4": Model(heads=4, kv_heads=1, k_dim=128, v_dim=128),
    "192/128x2": Model(heads=2, kv_heads=1, k_dim=192, v_dim=128),
    "256x1": Model(heads=1, kv_heads=1, k_dim=256, v_dim=256),
    "latent576": Model(heads=16, kv_heads=1, k_dim=576, v_dim=512, is_latent=True, scale=0.06),
    "latent80": Model(heads=17, kv_heads=1, k_dim=80, v_dim=64, is_latent=True, scale=0.1),
    "latent48": Model(heads=3, kv_heads=1, k_dim=48, v_dim=32, is_latent=True, scale=0.2),
}
# A decode row computes up to 8 tokens, an extend row more. Those of "split" and "long" are split into parts.
# Lengths lie at the borders of tiles of 64 and 128 keys. There are few queries, since Triton's interpreter
# takes about a millisecond for each and each of its heads.
ROWS = {
    "decode": [(1, 1), (63, 1), (64, 1), (0, 0), (65, 1), (17, 1), (127, 1), (128, 1), (129, 1)],
    "draft": [(8, 8), (9, 8), (64, 2), (65, 3), (5, 0), (130, 2)],
    "extend": [(9, 9), (63, 17), (66, 9)],
    "mixed": [(127, 1), (0, 0), (40, 17), (128, 2), (1, 1), (30, 0), (12, 8)],
    "split": [(700, 1), (20, 1), (257, 1), (256, 1), (321, 8), (40, 9)],
    "long": [(1100, 9), (300, 1)],
}
MANY = [(130, 130), (129, 65), (64, 64)]  # several tiles of queries per row


FACTORS: dict[str, list[Any]] = {
    "shape": [*SHAPES],
    "dtype": [
        "float32/float32", "float16/float16", "float16/float32", "bfloat16/bfloat16", "bfloat16/float32",
        "float8_e4m3fn/float32", "float8_e4m3fn/bfloat16", "float8_e5m2/float32", "float8_e5m2/float16",
    ],
    "pages": [(1, None), (2, None), (16, None), (64, None), (64, 16), (12, 4)],
    "rows": [*ROWS],
    "window": [None, 1, 5, 40, 1500],
    "softcap": [None, 1.5],
    "has_sinks": [False, True],
    "form": ["padded", "exact", "strided"],
}  # fmt: skip


def is_possible(some: Mapping[str, Any]) -> bool:
    """Whether a variant can have these values: latents have no window. The widest ones have no long rows,
    which would take the interpreter most of its time."""
    shape = some.get("shape", "")
    return not (
        (shape.startswith("latent") and some.get("window") is not None)
        or (shape == "latent576" and some.get("rows") == "long")
    )


def needed_pairs() -> set[frozenset[tuple[str, Any]]]:
    """The pairs of values that some variant must have.

    Kernels are compiled for a shape and a dtype; the interpreter runs the same code for all, so without a
    GPU these two are not paired with each other.
    """
    found = set()
    for (one, ones), (two, twos) in itertools.combinations(FACTORS.items(), 2):
        if {one, two} == {"shape", "dtype"} and not torch.cuda.is_available():
            continue
        for first, second in itertools.product(ones, twos):
            if is_possible({one: first, two: second}):
                found.add(frozenset([(one, first), (two, second)]))
    return found


def pairs_of(variant: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(variant.items(), 2)}


def covering() -> Iterator[Variant]:
    """Variants that have all pairs of values: each is the one of some random ones with most new pairs."""
    source, missing = random.Random(0), needed_pairs()
    while missing:
        seed = dict(min(missing, key=repr_of))
        drawn = [
            {name: seed.get(name, source.choice(values)) for name, values in FACTORS.items()}
            for _ in range(60)
        ]
        best = max(
            (each for each in drawn if is_possible(each)), key=lambda each: len(pairs_of(each) & missing)
        )
        missing -= pairs_of(best)
        yield Variant(**best)


def repr_of(pair: frozenset[tuple[str, Any]]) -> str:
    return repr(sorted(pair))


VARIANTS = list(covering())


def case_of(variant: Variant, device: str, seed: int = 0, padding: tuple[int, int] | None = None) -> Case:
    """The case of a variant; with `padding`, that instead of the padding of its form."""
    dtype, queries = variant.dtypes
    page, kernel_page = variant.pages
    model = SHAPES[variant.shape]._replace(
        dtype=dtype, window=variant.window, softcap=variant.softcap, has_sinks=variant.has_sinks
    )
    if padding is None and variant.form != "exact":
        padding = (2, 3)
    case = Case(model, ROWS[variant.rows], page, kernel_page, device, seed, padding=padding)
    case.queries = case.queries.to(queries)
    return case


# ── the judge ───────────────────────────────────────────────────────────────────────────────────────

# Of outputs against float64: of each number, and of each query's norm, which is small where a query reads
# many keys. Queries of 16 bits mean weights and outputs of 16 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_close(out: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare outputs [tokens, heads, v_dim] with exact ones, as their dtype allows."""
    error = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=2 * error, atol=error)
    norms = exact.flatten(1).norm(dim=1)
    errors = (out.double() - exact).flatten(1).norm(dim=1)
    worst = (errors - error * norms).argmax() if len(norms) else 0
    assert (errors <= error * norms).all(), f"query {worst}: {errors[worst]:.2e} of {norms[worst]:.2e}"


def judge(attend: Attend, case: Case, is_strided: bool = False) -> torch.Tensor:
    """Compute a case with an implementation, compare it with the reference in float64, and return its
    outputs, [num_tokens, heads, v_dim].

    Queries of padding are NaN, and so is what `out` holds before. With `is_strided`, queries and outputs are
    views of larger tensors, which must not change.
    """
    device, queries, num_tokens = case.pool.device, case.queries, case.batch.num_tokens
    heads, width = case.model.heads, case.model.v_dim
    total = max(case.batch.positions.shape[0], num_tokens) + is_strided
    padded = torch.full((total, *queries.shape[1:]), math.nan, dtype=queries.dtype)
    padded[:num_tokens] = queries
    room = torch.full((heads + 1, total, width + 16), GUARD, dtype=queries.dtype, device=device)
    given, out = (
        padded.to(device),
        torch.full((total, heads, width), math.nan, dtype=queries.dtype).to(device),
    )
    if is_strided:
        wide = torch.full((heads + 2, total, queries.shape[2] + 8), math.nan, dtype=queries.dtype)
        wide[1:-1, :, : queries.shape[2]] = padded.transpose(0, 1)
        given = wide.to(device)[1:-1, :, : queries.shape[2]].transpose(0, 1)
        out = room[:heads, :, :width].transpose(0, 1)
        out.fill_(math.nan)
        assert not given.is_contiguous()
    attend(case.call(given, out))

    assert_close(out[:num_tokens].cpu(), case.reference(queries.double()))
    assert not out[num_tokens:].any(), "padding must give 0"
    assert (room[heads:] == GUARD).all(), "written behind the last head"
    assert (room[:, :, width:] == GUARD).all(), "written behind v_dim"
    return out[:num_tokens].cpu()


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)
    )
