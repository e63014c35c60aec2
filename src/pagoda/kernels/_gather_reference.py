"""The reference of `gather`, in plain torch: serves the CPU, and tests compare the kernel with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["gather"]


def gather(
    slots: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    page_tokens: int,
    outs: Sequence[torch.Tensor],
    out_addresses: torch.Tensor,
) -> None:
    n, num_slots = slots.shape[0], buffers[0].shape[0] * page_tokens
    if n == 0:
        return
    is_blank = (slots < 0) | (slots >= num_slots)
    blanks = is_blank.nonzero().flatten()
    if blanks.shape[0]:
        slots = slots.masked_fill(is_blank, 0)  # any valid slot: its output is zeroed below
    # Each index costs one memcpy: indexing by whole pages, where possible, makes them fewer and longer.
    whole = _whole_pages(slots, page_tokens)
    rows = slots if whole is None else whole
    for pages, out in zip(buffers, outs, strict=True):
        source = pages.view(num_slots, -1) if whole is None else pages
        target = out.view(rows.shape[0], -1).view(torch.uint8)
        torch.index_select(source, 0, rows, out=target)
        if blanks.shape[0]:
            target.view(n, -1).index_fill_(0, blanks, 0)


def _whole_pages(slots: torch.Tensor, page_tokens: int) -> torch.Tensor | None:
    """Return the page ids if slots are whole pages, one after the other; else None."""
    if page_tokens == 1 or slots.shape[0] % page_tokens:
        return None
    runs = slots.view(-1, page_tokens)
    begins = runs[:, 0]
    is_whole = bool((begins % page_tokens == 0).all()) and bool((runs.diff(dim=1) == 1).all())
    return begins // page_tokens if is_whole else None
