"""Calls of other back ends in plain torch, as they document themselves. In: the arguments that a call takes
about a step; out: what it computes, in float64.

They read what a call says that it reads, a query at a time, and nothing else; what a call does not say that
it writes is NaN. Only dense causal attention with windows and softcap is here. Sources:

- FlashInfer: https://docs.flashinfer.ai/api/decode.html, https://docs.flashinfer.ai/api/prefill.html,
  https://docs.flashinfer.ai/api/mla.html,
  https://docs.flashinfer.ai/generated/flashinfer.page.append_paged_kv_cache.html
- FlashAttention: docstrings of https://github.com/Dao-AILab/flash-attention,
  flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py
- FlashMLA: docstring of https://github.com/deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py
- vLLM: https://docs.vllm.ai/en/v0.14.0/api/vllm/v1/attention/backends/utils/ (metadata, padding of slots)
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from differential.attention_cases import attend_one

__all__ = [
    "flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_mla_with_kvcache", "flashinfer_append",
    "flashinfer_decode", "flashinfer_mla", "flashinfer_prefill", "reshape_and_cache_flash", "vllm_attention",
]  # fmt: skip

Numbers = Any  # a tensor or an array of integers
Pages = tuple[torch.Tensor, torch.Tensor]
# Positions [n] → the keys and values there, [n, kv_heads, dim] each.
Fetch = Callable[[torch.Tensor], Pages]


def read_row(
    queries: torch.Tensor,  # [q, heads, k_dim]
    num_keys: int,
    fetch: Fetch,
    v_dim: int,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
    left: int = -1,
    right: int = -1,
) -> torch.Tensor:
    """A row's queries, aligned to the end of its keys; each reads `left` keys before its own and `right`
    after it, −1 for all. A query without keys gives 0."""
    outs = [torch.zeros(0, queries.shape[1], v_dim, dtype=torch.float64)]
    for number, query in enumerate(queries):
        own = num_keys - len(queries) + number
        begin = max(0, own - left) if left >= 0 else 0
        end = min(num_keys, own + 1 if is_causal else num_keys, own + right + 1 if right >= 0 else num_keys)
        if end <= begin:
            outs.append(torch.zeros(1, queries.shape[1], v_dim, dtype=torch.float64))
            continue
        keys, values = fetch(torch.arange(begin, end))
        scaled = queries.shape[2] ** -0.5 if scale is None else scale
        outs.append(attend_one(query, keys, values, scaled, softcap)[None])
    return torch.cat(outs)


def at(pages: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The tokens at positions of a list of pages [num_pages, page_tokens, …]."""
    page_tokens = pages.shape[1]
    return pages[ids[positions // page_tokens].long(), positions % page_tokens]


def as_nhd(cache: Pages, kv_layout: str) -> Pages:
    return cache if kv_layout == "NHD" else (cache[0].transpose(1, 2), cache[1].transpose(1, 2))


def ints(numbers: Numbers) -> list[int]:
    return [int(number) for number in numbers]


# ── FlashInfer ──────────────────────────────────────────────────────────────────────────────────────


def flashinfer_prefill(
    q: torch.Tensor,
    paged_kv_cache: Pages,
    qo_indptr: Numbers,
    paged_kv_indptr: Numbers,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: Numbers,
    page_size: int,
    *,
    causal: bool = False,
    kv_layout: str = "NHD",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """BatchPrefillWithPagedKVCacheWrapper. Row i has queries q[qo_indptr[i] : qo_indptr[i + 1]] and the pages
    paged_kv_indices[paged_kv_indptr[i] : paged_kv_indptr[i + 1]], the last of which has
    paged_kv_last_page_len[i] tokens. Queries are the last tokens; each reads `window_left` keys before its
    own, inclusive."""
    k_pages, v_pages = as_nhd(paged_kv_cache, kv_layout)
    assert k_pages.shape[1] == page_size
    starts, lists = ints(qo_indptr), ints(paged_kv_indptr)
    out = torch.full((q.shape[0], q.shape[1], v_pages.shape[3]), math.nan, dtype=torch.float64)
    for i, last in enumerate(ints(paged_kv_last_page_len)):
        ids = paged_kv_indices[lists[i] : lists[i + 1]]
        assert not len(ids) or 1 <= last <= page_size
        num_keys = (len(ids) - 1) * page_size + last if len(ids) else 0

        def fetch(positions: torch.Tensor, ids: torch.Tensor = ids) -> Pages:
            return at(k_pages, ids, positions), at(v_pages, ids, positions)

        rows = slice(starts[i], starts[i + 1])
        out[rows] = read_row(
            q[rows], num_keys, fetch, v_pages.shape[3], sm_scale, logits_soft_cap, causal, window_left
        )
    return out


def flashinfer_decode(
    q: torch.Tensor,
    paged_kv_cache: Pages,
    indptr: Numbers,
    indices: torch.Tensor,
    last_page_len: Numbers,
    page_size: int,
    *,
    kv_layout: str = "NHD",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """BatchDecodeWithPagedKVCacheWrapper: row i has the one query q[i]; pages as in `flashinfer_prefill`."""
    assert q.shape[0] == len(indptr) - 1
    return flashinfer_prefill(
        q, paged_kv_cache, range(len(indptr)), indptr, indices, last_page_len, page_size,
        kv_layout=kv_layout, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
    )  # fmt: skip


def flashinfer_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: Numbers,
    kv_indptr: Numbers,
    kv_indices: torch.Tensor,
    kv_len_arr: Numbers,
    page_size: int,
    causal: bool,
    sm_scale: float,
) -> torch.Tensor:
    """BatchMLAPagedAttentionWrapper. ckv_cache: [num_pages, page_size, ckv_dim], kpe_cache: [num_pages,
    page_size, kpe_dim]; a key is both, the value is the first. Row i has kv_len_arr[i] keys."""
    assert ckv_cache.shape[1] == kpe_cache.shape[1] == page_size
    starts, lists, width = ints(qo_indptr), ints(kv_indptr), ckv_cache.shape[2]
    out = torch.full((q_nope.shape[0], q_nope.shape[1], width), math.nan, dtype=torch.float64)
    for i, num_keys in enumerate(ints(kv_len_arr)):
        ids = kv_indices[lists[i] : lists[i + 1]]
        assert len(ids) == -(-num_keys // page_size)

        def fetch(positions: torch.Tensor, ids: torch.Tensor = ids) -> Pages:
            ckv, kpe = at(ckv_cache, ids, positions), at(kpe_cache, ids, positions)
            return torch.cat([ckv, kpe], 1)[:, None], ckv[:, None]

        rows = slice(starts[i], starts[i + 1])
        queries = torch.cat([q_nope[rows], q_pe[rows]], 2)
        out[rows] = read_row(queries, num_keys, fetch, width, sm_scale, None, causal)
    return out


def flashinfer_append(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Pages,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """append_paged_kv_cache: token i goes to position positions[i] of the pages of row batch_indices[i]."""
    assert append_key.shape[0] == batch_indices.shape[0] == positions.shape[0]
    assert kv_last_page_len.shape[0] == kv_indptr.shape[0] - 1
    cache = as_nhd(paged_kv_cache, kv_layout)
    page_size = cache[0].shape[1]
    for token, (row, position) in enumerate(zip(ints(batch_indices), ints(positions), strict=True)):
        index = int(kv_indptr[row]) + position // page_size
        assert row >= 0
        assert position >= 0
        assert index < int(kv_indptr[row + 1])
        for pages, given in zip(cache, (append_key, append_value), strict=True):
            pages[int(kv_indices[index]), position % page_size] = given[token].to(pages.dtype)


# ── FlashAttention and FlashMLA ─────────────────────────────────────────────────────────────────────


def block_table_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    block_table: torch.Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Key p of row i lies in page block_table[i, p // page size]; query j reads keys from
    j + keys − queries − left to j + keys − queries + right, inclusive."""
    out = torch.full((q.shape[0], q.shape[1], v_cache.shape[3]), math.nan, dtype=torch.float64)
    for i, num_keys in enumerate(lengths):

        def fetch(positions: torch.Tensor, ids: torch.Tensor = block_table[i]) -> Pages:
            return at(k_cache, ids, positions), at(v_cache, ids, positions)

        rows = slice(starts[i], starts[i + 1])
        out[rows] = read_row(q[rows], num_keys, fetch, v_cache.shape[3], scale, softcap, causal, *window_size)
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """q: [rows, queries, heads, dim], or [tokens, heads, dim] with `cu_seqlens_q`. Without queries' keys, 0.
    FlashAttention 2 calls the table `block_table`, has no `cu_seqlens_q` and takes pages of a multiple of
    256 tokens."""
    lengths = ints(cache_seqlens)
    if cu_seqlens_q is None:
        starts = [i * q.shape[1] for i in range(q.shape[0] + 1)]
        packed = q.flatten(0, 1)
    else:
        starts, packed = ints(cu_seqlens_q), q
        assert max_seqlen_q is not None
        assert all(two - one <= max_seqlen_q for one, two in itertools.pairwise(starts))
    out = block_table_rows(
        packed, k_cache, v_cache, starts, lengths, page_table, softmax_scale, causal, window_size, softcap
    )
    return out if cu_seqlens_q is not None else out.unflatten(0, q.shape[:2])


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row i has cu_seqlens_k[i + 1] − cu_seqlens_k[i] keys; the longest of each are given."""
    assert block_table is not None
    assert cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
    starts, lengths = ints(cu_seqlens_q), ints(cu_seqlens_k.diff())
    assert max(lengths) <= max_seqlen_k
    assert max(ints(cu_seqlens_q.diff())) <= max_seqlen_q
    return block_table_rows(
        q, k, v, starts, lengths, block_table, softmax_scale, causal, window_size, softcap
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Dense latents. q: [rows, queries, heads, dim], k_cache: [num_pages, 64, 1, dim], whose first
    `head_dim_v` are the values."""
    assert k_cache.shape[1:3] == (64, 1)
    return flash_attn_with_kvcache(
        q, k_cache, k_cache[..., :head_dim_v], cache_seqlens, block_table,
        softmax_scale=softmax_scale, causal=causal,
    )  # fmt: skip


# ── vLLM ────────────────────────────────────────────────────────────────────────────────────────────


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Token i goes to slot slot_mapping[i] = page * page size + offset; −1 is padding."""
    page_size = key_cache.shape[1]
    for token, slot in enumerate(ints(slot_mapping)):
        if slot >= 0:
            key_cache[slot // page_size, slot % page_size] = key[token].to(key_cache.dtype)
            value_cache[slot // page_size, slot % page_size] = value[token].to(value_cache.dtype)


def vllm_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """A row's length counts the step's tokens, too; a window of n tokens counts the query's own."""
    assert max(ints(seq_lens)) <= max_seq_len
    assert max(ints(query_start_loc.diff())) <= max_query_len
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    return block_table_rows(
        query, key_cache, value_cache, ints(query_start_loc), ints(seq_lens), block_table, scale, True,
        window, softcap,
    )  # fmt: skip
