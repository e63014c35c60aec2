"""A step over shuffled pages, and the same attention by SDPA. In: a shape; out: calls, and their error."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pagoda.attention import _call, _reference, paged
from pagoda.layout import FullAttention, LatentAttention, Layout, WindowAttention, latent
from pagoda.manager import Manager
from pagoda.pools import Pools, TokenPool

Call = Callable[[], object]

BF16 = torch.bfloat16
PAGE = 16
REPLAY_BYTES = 2 << 30  # what a graph reads at least, in different layers: the L2 cache has 50 MB
MOST_LAYERS = {"decode": 128, "extend": 8}
CHECKED_QUERIES = 16  # at each end of a row


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


def decode(num_rows: int, length: int, **geometry: Any) -> Shape:
    return Shape((length,) * num_rows, (1,) * num_rows, **geometry)


def extend(count: int, cached: int) -> Shape:
    return Shape((cached + count,), (count,))


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
        sizes = len(self.rows), sum(self.shape.counts)
        self.batch = self.pools.batch(delta, pad_to=sizes, max_queries=max(self.shape.counts))
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
        """Return calls of SDPA, one per layer, that read the same memory as contiguous tensors.

        By name of the way in which they are called, with the operations of a call as a multiple of ours.
        """
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

        def calls(**options: Any) -> list[Call]:
            def one(k: torch.Tensor, v: torch.Tensor) -> None:
                with sdpa_kernel(backend):
                    scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

            return [functools.partial(one, *pair) for pair in pairs]

        if count == 1:
            return {"decode": (calls(), 1.0)}
        if count == length:
            return {"causal": (calls(is_causal=True), 1.0)}
        if backend == SDPBackend.FLASH_ATTENTION:
            return {"lower right": (calls(attn_mask=causal_lower_right(count, length)), 1.0)}
        # cuDNN takes such a mask as a tensor. Without a mask it computes more, but reads none.
        reads = torch.ones(count, length, dtype=torch.bool, device=self.device).tril(length - count)
        mask = torch.zeros(count, length, dtype=BF16, device=self.device).masked_fill_(~reads, -torch.inf)
        all_flops = 2 * shape.heads * (shape.k_dim + shape.v_dim) * count * length
        return {"mask": (calls(attn_mask=mask), 1.0), "no mask": (calls(), all_flops / shape.num_flops)}


def _fill(buffer: torch.Tensor) -> None:
    if buffer.dtype == BF16:
        buffer.normal_()
        return
    for piece in buffer.view(-1).split(1 << 26):
        piece.copy_(torch.randn(piece.shape, device=piece.device).to(piece.dtype))


def make_step(shape: Shape, device: str) -> Step:
    """Return a step, in the memory of those before it, which must be out of use."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    return Step(shape, device)
