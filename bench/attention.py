"""Attention over shuffled pages on the GPU, against SDPA on contiguous tensors, a copy and a matmul.

`python -m bench attention` measures the lines of one table, `--sweep` decode by context and batch for the
plot, and `--smoke` both in tiny sizes on any machine, without graphs and without results on disk.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.hybrid import PIECE
from bench.measure import best_graph_microseconds, save, table
from pagoda.attention import _call, _reference, paged
from pagoda.layout import FullAttention, LatentAttention, Layout, WindowAttention, latent
from pagoda.manager import Manager
from pagoda.pools import Pools, TokenPool

Row = dict[str, Any]
Call = Callable[[], object]

BF16 = torch.bfloat16
PAGE = 16
ROTATED = 64  # dimensions of a latent that are not its value
REPLAY_BYTES = 2 << 30  # what a graph reads at least, in different layers: the L2 cache has 50 MB
MOST_LAYERS = {"decode": 128, "extend": 8}
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHECKED_QUERIES = 16  # at each end of a row
CONTEXTS = [1_024 << i for i in range(8)]
BATCHES = [1, 8, 64, 256]
SWEEP_TOKENS = 1 << 23  # 32 GiB of keys and values
SMOKE_DIVISOR = 32
NO = "–"  # in a cell without a number


class Shape(NamedTuple):
    """The rows of a step, the last `counts` tokens of which are its queries, and the geometry of a layer."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    k_dim: int = 128
    v_dim: int = 128
    page: int = PAGE
    window: int | None = None
    dtype: str = "bfloat16"
    is_latent: bool = False

    @property
    def is_decode(self) -> bool:
        return set(self.counts) == {1}

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that one call has to read."""
        tokens = sum(
            length if self.window is None else min(length, self.window + count - 1)
            for length, count in zip(self.lengths, self.counts, strict=True)
        )
        per_token = self.k_dim if self.is_latent else self.kv_heads * (self.k_dim + self.v_dim)
        return tokens * per_token * (1 if self.dtype.startswith("float8") else 2)

    @property
    def num_flops(self) -> int:
        """Operations of one call: two per head, dimension of key or value, query, and token that it reads."""
        pairs = 0
        for length, n in zip(self.lengths, self.counts, strict=True):
            first = length - n + 1  # tokens that the first query reads
            if self.window is None:
                pairs += n * (first + length) // 2
            else:
                pairs += sum(min(self.window, at) for at in range(first, length + 1))
        return 2 * self.heads * (self.k_dim + self.v_dim) * pairs

    @property
    def kind(self) -> FullAttention | LatentAttention:
        if self.is_latent:
            return LatentAttention(entry=latent(self.v_dim, self.k_dim - self.v_dim, self.dtype))
        sizes: Any = {"kv_heads": self.kv_heads, "k_dim": self.k_dim, "v_dim": self.v_dim}
        if self.window is None:
            return FullAttention(**sizes, dtype=self.dtype)
        return WindowAttention(**sizes, dtype=self.dtype, window=self.window)


class Line(NamedTuple):
    """A line of the table. `beside` names lines whose times, added up, are compared with this one's."""

    name: str
    shape: Shape
    limit: str = "copy"
    has_peers: bool = False
    beside: tuple[str, ...] = ()
    goals: tuple[tuple[str, float], ...] = ()  # a column of ratios, and the least


class Step:
    """A step of a manager whose rows have shuffled pages, in pools of noise of several layers."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        most = MOST_LAYERS["decode" if shape.is_decode else "extend"] if device == "cuda" else 2
        self.num_layers = min(
            most, max(2 if shape.num_bytes < 4 * REPLAY_BYTES else 1, -(-REPLAY_BYTES // shape.num_bytes))
        )
        layout = Layout([shape.kind] * self.num_layers, shape.page)
        (group,) = layout.paged_groups
        num_pages = [-(-length // shape.page) for length in shape.lengths]
        sizes: Any = {"num_rows": len(num_pages), "max_tokens": max(shape.lengths)}
        capacity = {group.name: sum(num_pages)}
        scales: Any = {}
        if shape.dtype.startswith("float8"):
            scales = {side: {group.name: [0.5] * self.num_layers} for side in ("k_scale", "v_scale")}
        self.manager = Manager(layout, capacity, **sizes)
        self.pools = Pools(
            layout, capacity, **sizes, device=device, max_step_tokens=sum(shape.counts), **scales
        )
        pool = self.pools[group.name]
        assert isinstance(pool, TokenPool)
        self.pool = pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            _fill(buffer)
        self.rows = self._rows(group.name, num_pages)
        self._plan(group.name)
        self.queries = torch.randn(sum(shape.counts), shape.heads, shape.k_dim, device=device).to(BF16)
        self.out = torch.empty(sum(shape.counts), shape.heads, shape.v_dim, dtype=BF16, device=device)

    def _rows(self, group: str, num_pages: list[int]) -> np.ndarray:
        """Admit the rows, and give each its pages: any of all pages, in any order."""
        rows = [
            self.manager.admit([1], reserve=0, read=False, store=False).row for _ in range(len(num_pages))
        ]
        pages = np.random.default_rng(0).permutation(self.manager.alloc_pages(group, sum(num_pages)))
        for row, page in zip(np.repeat(rows, num_pages).tolist(), pages[:, None], strict=True):
            self.manager.free_pages(group, page)  # the only free page, so the row gets it
            self.manager.extend(row, group)
        return np.array(rows, np.int32)

    def _plan(self, group: str) -> None:
        lengths, counts = np.array(self.shape.lengths), np.array(self.shape.counts)
        self.manager.reserve(self.rows, lengths)
        cached = lengths - counts
        if cached.any():
            self.pools.apply(self.manager.plan(self.rows[cached > 0], cached[cached > 0]))
        delta = self.manager.plan(self.rows, counts)
        self.pools.apply(delta)
        padding: Any = {"pad_to": len(self.rows)} if self.shape.is_decode else {}
        self.batch = self.pools.batch(delta, **padding)
        ids = [self.manager.page_ids(row, group) for row in self.rows.tolist()]
        num_pages = sum(map(len, ids))
        self.neighbours = sum(int((np.diff(each) == 1).sum()) for each in ids) / num_pages
        assert self.neighbours < 0.1 or num_pages < 100, "pages follow one another"

    def calls(self) -> list[Call]:
        """Return a call per layer."""
        scale = self.shape.k_dim**-0.5
        return [
            functools.partial(
                paged, self.queries, self.pools.layer(layer), self.batch, scale=scale, out=self.out
            )
            for layer in range(self.num_layers)
        ]

    def error(self) -> float:
        """Return the largest difference from the reference, in some rows, relative to the largest output."""
        self.calls()[0]()
        lengths, counts = self.shape.lengths, self.shape.counts
        ends = np.cumsum(counts).tolist()
        order = np.argsort(lengths, kind="stable").tolist()
        parts = [  # row, its first query, number of queries
            (row, first, min(CHECKED_QUERIES, counts[row]))
            for row in sorted({0, len(lengths) - 1, order[0], order[len(order) // 2], order[-1]})
            for first in sorted({0, max(0, counts[row] - CHECKED_QUERIES)})
        ]
        tokens = torch.tensor(
            [ends[row] - counts[row] + first + i for row, first, n in parts for i in range(n)],
            device=self.device,
        )
        # Queries in the middle of a row are the last ones of a shorter row with the same pages.
        ints = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        call = _call.checked(self.queries, self.pools.layer(0), self.batch, self.shape.k_dim**-0.5)
        batch = SimpleNamespace(
            lengths=ints([lengths[row] - counts[row] + first + n for row, first, n in parts]),
            query_start_loc=ints([0, *np.cumsum([n for _, _, n in parts]).tolist()]),
        )
        view = SimpleNamespace(
            page_table=call.view.page_table[[row for row, _, _ in parts]],
            group=call.view.group,
            page_tokens=call.view.page_tokens,
        )
        right = torch.empty(len(tokens), self.shape.heads, self.shape.v_dim, device=self.device)
        given: Any = {"queries": self.queries[tokens], "out": right, "batch": batch, "view": view}
        _reference.attend(call._replace(**given))
        return float((self.out[tokens].float() - right).abs().max() / right.abs().max())

    def sdpa(self, backend: SDPBackend) -> dict[str, tuple[list[Call], float]]:
        """Return SDPA over the same memory as if it were contiguous: by way, calls and operations per call
        relative to ours."""
        shape, num_rows = self.shape, len(self.shape.lengths)
        length, count = shape.lengths[0], shape.counts[0]
        q = self.queries.view(num_rows, count, shape.heads, -1).transpose(1, 2).contiguous()
        pairs = [
            [
                side[shape.page :][: num_rows * length].view(num_rows, shape.kv_heads, length, -1)
                for side in both
            ]
            for both in zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)
        ]

        def ways(**options: Any) -> list[Call]:
            def one(k: torch.Tensor, v: torch.Tensor) -> None:
                with sdpa_kernel(backend):
                    scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

            return [functools.partial(one, *pair) for pair in pairs]

        if count == 1:
            return {"decode": (ways(), 1.0)}
        if count == length:
            return {"causal": (ways(is_causal=True), 1.0)}
        from torch.nn.attention.bias import causal_lower_right

        if backend == SDPBackend.FLASH_ATTENTION:
            return {"lower right": (ways(attn_mask=causal_lower_right(count, length)), 1.0)}
        # Other back ends take the mask as a tensor. Without one they compute more, for no reader of a mask.
        reads = torch.ones(count, length, dtype=torch.bool, device=self.device).tril(length - count)
        mask = torch.zeros(count, length, dtype=BF16, device=self.device).masked_fill_(~reads, -torch.inf)
        all_flops = 2 * shape.heads * (shape.k_dim + shape.v_dim) * count * length
        return {"mask": (ways(attn_mask=mask), 1.0), "no mask": (ways(), all_flops / shape.num_flops)}


def _fill(buffer: torch.Tensor) -> None:
    if buffer.dtype == BF16:
        buffer.normal_()
        return
    for piece in buffer.view(-1).split(1 << 26):
        piece.copy_(torch.randn(piece.shape, device=piece.device).to(piece.dtype))


def timed(calls: list[Call], device: str) -> float:
    """Return µs of one call: by graph replay, or by the clock where there are no graphs."""
    if device == "cuda":
        return best_graph_microseconds(calls)
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6 / len(calls)


def make_step(shape: Shape, device: str) -> Step:
    """Return a step, in the memory of those before it, which must be out of use."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    return Step(shape, device)


def limits(device: str, divisor: int) -> dict[str, float]:
    """Return what the machine can do: bytes per µs of a copy of 1 GiB, operations per µs of a matmul."""
    source = torch.ones((1 << 30) // divisor**2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pieces = list(zip(source.split(PIECE), target.split(PIECE), strict=True))

    def in_pieces() -> None:
        for a, b in pieces:
            b.copy_(a)

    copy_us = min(timed([lambda: target.copy_(source)], device), timed([in_pieces], device))
    n = 8_192 // divisor
    a, b, c = (torch.randn(n, n, device=device).to(BF16) for _ in range(3))
    matmul_us = timed([lambda: torch.mm(a, b, out=c)] * 4, device)
    return {"copy": 2 * source.numel() / copy_us, "matmul": 2 * n**3 / matmul_us}


def sdpa_microseconds(step: Step, backend: str) -> tuple[float | None, Row]:
    """Return µs of SDPA for the operations of one of our calls, and µs or the refusal of each way."""
    times: list[float] = []
    about: Row = {}
    for way, (calls, work) in step.sdpa(BACKENDS[backend]).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says one by one why it refuses a shape
                calls[0]()
                about[way] = timed(calls, step.device)
            times.append(about[way] / work)
        except RuntimeError as error:
            about[way] = f"refused: {str(error).splitlines()[0]}"
    return min(times, default=None), about


def measure(line: Line, machine: dict[str, float], before: dict[str, Row], device: str) -> Row:
    """Return a row of the table. `before`: the rows that it may be compared with, by name."""
    step = make_step(line.shape, device)
    us = timed(step.calls(), device)
    done = line.shape.num_bytes if line.limit == "copy" else line.shape.num_flops
    row: Row = {
        "work": line.name,
        "ours µs": us,
        "TB/s": line.shape.num_bytes / us / 1e6,
        "TFLOP/s": line.shape.num_flops / us / 1e6,
        "limit": line.limit,
        "of the limit": done / us / machine[line.limit],
    }
    details: Row = {"layers": step.num_layers, "neighbouring pages": step.neighbours}
    for backend in BACKENDS:
        row[f"{backend} µs"] = row[f"of {backend}"] = NO
        if line.has_peers:
            peer_us, details[backend] = sdpa_microseconds(step, backend)
            row[f"{backend} µs"] = "refused" if peer_us is None else peer_us
            row[f"of {backend}"] = NO if peer_us is None else peer_us / us
    row["beside"] = " + ".join(line.beside) or NO
    row["times its speed"] = sum(before[name]["ours µs"] for name in line.beside) / us or NO
    row["goal"] = ", ".join(f"{column} ≥ {least:.2f}" for column, least in line.goals) or NO
    row["met"] = _met([(row[column], least) for column, least in line.goals])
    row["error"] = step.error()
    return {**row, "details": details}


def _met(found: list[tuple[float | str, float]]) -> str:
    if not found or any(isinstance(ratio, str) for ratio, _ in found):
        return NO
    return "yes" if all(ratio >= least for ratio, least in found) else "no"


def decode(num_rows: int, length: int, **geometry: Any) -> Shape:
    return Shape((length,) * num_rows, (1,) * num_rows, **geometry)


def extend(count: int, cached: int) -> Shape:
    return Shape((cached + count,), (count,))


def lines(divisor: int) -> list[Line]:
    """Return all lines, with fewer rows and tokens if `divisor` is not 1."""

    def rows(n: int) -> int:
        return max(2, n // divisor)

    def tokens(n: int) -> int:
        return max(64, n // divisor)

    def queries(n: int) -> int:
        return max(4, n // divisor)

    lengths = np.exp(np.random.default_rng(0).uniform(np.log(100), np.log(60_000), rows(64)))
    uneven = Shape(tuple(tokens(int(n)) for n in lengths), (1,) * len(lengths))
    batch, context, chunk = rows(64), tokens(4_096), queries(512)
    at_once, uneven_name = f"decode, {batch} × {context:,}", f"decode, {batch} uneven rows"
    shapes = [(batch, context), (rows(256), tokens(1_024)), (rows(8), tokens(32_768))]
    found: list[Line] = []

    def add(name: str, shape: Shape, **about: Any) -> None:
        goals = tuple(about.pop("goals", {}).items())
        found.append(Line(name, shape, **about, goals=goals))

    fast = {"of the limit": 0.97, "of cuDNN": 0.95}
    for n, length in shapes:
        add(f"decode, {n} × {length:,}", decode(n, length), has_peers=True, goals=fast)
    add(
        f"decode, 1 × {tokens(32_768):,}",
        decode(1, tokens(32_768)),
        has_peers=True,
        goals={"of cuDNN": 1.0},
    )
    add(uneven_name, uneven, goals={"of the limit": 0.9})
    same = {"times its speed": 0.95}
    for page in (1, 64):
        add(f"{at_once}, page {page}", decode(batch, context, page=page), beside=(at_once,), goals=same)
        add(f"{uneven_name}, page {page}", uneven._replace(page=page), beside=(uneven_name,), goals=same)
    for n, length in shapes:
        name, fp8 = f"decode, {n} × {length:,}", decode(n, length, dtype="float8_e4m3fn")
        add(f"{name}, fp8", fp8, beside=(name,), goals={"times its speed": 1.7})
    add(
        f"latent decode, {batch} × {context:,}",
        decode(batch, context, heads=128, kv_heads=1, k_dim=512 + ROTATED, v_dim=512, is_latent=True),
        limit="matmul",
        goals={"of the limit": 0.4},
    )
    for dim in (64, 96, 256):
        add(f"{at_once}, heads of {dim}", decode(batch, context, k_dim=dim, v_dim=dim))
    window = tokens(1_024)
    add(f"{at_once}, window {window:,}", decode(batch, context, window=window))
    fast = {"of cuDNN": 0.68}
    compute: Any = {"limit": "matmul", "has_peers": True}
    add(f"extend, {queries(8_192):,}", extend(queries(8_192), 0), **compute, goals=fast)
    for count, cached, goals in ((1_024, 31_744, fast), (256, 32_768, {}), (64, 32_768, {})):
        count, cached = queries(count), tokens(cached)
        name = f"extend, {count:,} on {cached:,}"
        add(name, extend(count, cached), **compute, goals=goals)
    alone = f"extend, {chunk:,} on {context:,}"
    add(alone, extend(chunk, context), **compute)
    add(
        "both in one step",
        Shape((context,) * batch + (context + chunk,), (1,) * batch + (chunk,)),
        beside=(at_once, alone),
        goals={"times its speed": 1 / 1.1},
    )
    return found


def measure_all(device: str, divisor: int) -> tuple[list[Row], list[Row]]:
    """Return the machine's limits and the lines of the table."""
    machine = limits(device, divisor)
    rows: dict[str, Row] = {}
    for line in lines(divisor):
        rows[line.name] = measure(line, machine, rows, device)
    machine_rows = [
        {"machine": "copy of 1 GiB", "rate": f"{machine['copy'] / 1e6:.2f} TB/s"},
        {"machine": "bf16 matmul of 8,192³", "rate": f"{machine['matmul'] / 1e6:.0f} TFLOP/s"},
    ]
    return machine_rows, list(rows.values())


def measure_sweep(device: str, divisor: int) -> list[Row]:
    """Return decode bandwidths by batch and context: ours, SDPA with cuDNN, and of a copy."""
    copy = limits(device, divisor)["copy"]
    return [
        {**measure_decode(batch, context, device), "copy TB/s": copy / 1e6}
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context <= SWEEP_TOKENS // divisor**2
    ]


def measure_decode(batch: int, context: int, device: str) -> Row:
    shape = decode(batch, context)
    step = make_step(shape, device)
    us = timed(step.calls(), device)
    peer_us, _ = sdpa_microseconds(step, "cuDNN")
    return {
        "rows": batch,
        "context": context,
        "ours TB/s": shape.num_bytes / us / 1e6,
        "cuDNN TB/s": NO if peer_us is None else shape.num_bytes / peer_us / 1e6,
        "error": step.error(),
    }


def run(sweep: bool = False, smoke: bool = False) -> None:
    """Print and save the table, or the sweep. `smoke`: both, in tiny sizes, without saving them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    divisor = SMOKE_DIVISOR if smoke else 1
    if not sweep or smoke:
        machine, rows = measure_all(device, divisor)
        table("the machine", machine)
        table(
            "attention over shuffled pages",
            [{k: v for k, v in row.items() if k != "details"} for row in rows],
        )
        if not smoke:
            save("attention", machine + rows)
    if sweep or smoke:
        rows = measure_sweep(device, divisor)
        table("decode by batch and context", rows)
        if not smoke:
            save("attention-sweep", rows)
