"""What the kernels of views must do, in plain torch. Serves the CPU and judges `views_fused`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["ViewBuffers", "ViewSpec", "prepare", "refresh"]


class ViewBuffers(NamedTuple):
    """What a back end reads of one group. `width` is kernel pages a row."""

    seq_lens: torch.Tensor  # [max_batch] int32
    query_start_loc: torch.Tensor  # [max_batch + 1] int32
    block_table: torch.Tensor  # [max_batch, width] int32, columns by position
    indptr: torch.Tensor  # [max_batch + 1] int32
    indices: torch.Tensor  # [max_indices] int32
    last_page_len: torch.Tensor  # [max_batch] int32
    begins: torch.Tensor  # [max_batch] int32, position of the first token of a row's list
    slot_mapping: torch.Tensor  # [max_tokens] int64, −1 is padding


class ViewSpec(NamedTuple):
    """A view of one table: [num_rows, max_pages]."""

    buffers: ViewBuffers
    max_pages: int
    page_tokens: int
    kernel_page_tokens: int
    window: int  # 0 is none


def prepare(specs: Sequence[ViewSpec], device: torch.device) -> Sequence[ViewSpec]:
    return specs


def refresh(
    specs: Sequence[ViewSpec],
    table: torch.Tensor,
    num_rows: int,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    parts = table.view(-1).split([num_rows * spec.max_pages for spec in specs])
    for spec, part in zip(specs, parts, strict=True):
        _refresh(spec, part.view(num_rows, spec.max_pages), rows, lengths, query_start_loc)


def _refresh(
    spec: ViewSpec,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    view, _, page_tokens, kernel_page_tokens, window = spec
    num_rows, max_pages = table.shape
    batch, (max_batch, width) = rows.shape[0], view.block_table.shape
    starts = torch.cat([query_start_loc, query_start_loc[-1:].expand(max_batch - batch)])
    padding = rows.new_zeros(max_batch - batch)
    # int64, because what a caller got wrong may overflow a difference.
    row, length = (torch.cat([given, padding]).long() for given in (rows, lengths))
    num_queries = starts.long().diff()
    is_real = (row > 0) & (row < num_rows) & (length <= max_pages * page_tokens)
    is_real &= (num_queries >= 0) & (num_queries <= length)
    row, length = row * is_real, length * is_real
    first = (length - num_queries - window + 1).clamp(min=0) // kernel_page_tokens * is_real * (window > 0)
    end = -(-length // kernel_page_tokens)

    split = page_tokens // kernel_page_tokens
    column = torch.arange(width)
    is_read = (column >= first[:, None]) & (column < end[:, None])
    page = table[row].long().repeat_interleave(split, dim=1)
    kernel_page = torch.where(is_read & (page > 0), page * split + column % split, 0)

    is_listed = (end - first).cumsum(0) <= view.indices.shape[0]
    listed = kernel_page[is_read & is_listed[:, None]]
    last_page_len = (length - 1) % kernel_page_tokens + 1

    token = torch.arange(view.slot_mapping.shape[0], dtype=torch.int32)
    owner = torch.searchsorted(starts[1:], token, right=True).clamp(max=max_batch - 1)
    position = length[owner] - (starts[owner + 1].long() - token)
    is_token = (token >= starts[owner]) & (token < starts[owner + 1]) & (length[owner] > 0)
    token_page = table[row[owner], torch.where(is_token, position // page_tokens, 0)].long()
    slot = token_page * page_tokens + position % page_tokens

    # Everything is read before anything is written: what is given may be a buffer of the view.
    view.seq_lens.copy_(length)
    view.query_start_loc.copy_(starts)
    view.block_table.copy_(kernel_page)
    view.indptr[0] = 0
    view.indptr[1:] = ((end - first) * is_listed).cumsum(0)
    view.indices[: listed.shape[0]] = listed
    view.last_page_len.copy_(torch.where((length > 0) & is_listed, last_page_len, 0))
    view.begins.copy_(first * kernel_page_tokens)
    view.slot_mapping.copy_(torch.where(is_token & (token_page > 0), slot, -1))
