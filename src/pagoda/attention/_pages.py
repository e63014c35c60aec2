"""Views of a pool's buffer by page, as back ends take it, in either order of heads and tokens."""

from __future__ import annotations

from typing import Any

import torch

from pagoda.errors import ArgumentError
from pagoda.layout._numbers import integer

__all__ = ["hnd_pages", "nhd_pages"]


def nhd_pages(buffer: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """View a pool's buffer [num_slots, heads, dim] as [num_pages, page_tokens, heads, dim]: FlashInfer's NHD
    order, which FlashAttention and vLLM-style kernels take, too.

    `page_tokens` is the kernel's page size (`batch[name].page_tokens`). Errors: ArgumentError for slots that
    are not a whole number of pages.
    """
    tokens = integer(page_tokens, "page_tokens", 1, ArgumentError)
    if not isinstance(buffer, torch.Tensor) or buffer.dim() != 3 or not buffer.is_contiguous():
        raise ArgumentError(f"buffer: give a pool's [num_slots, heads, dim], not {_shown(buffer)}")
    num_slots, heads, dim = buffer.shape
    if num_slots % tokens:
        raise ArgumentError(f"page_tokens: {num_slots} slots are not a whole number of pages of {tokens}")
    return buffer.view(num_slots // tokens, tokens, heads, dim)


def hnd_pages(buffer: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """View a pool's buffer [num_slots, heads, dim] as [num_pages, heads, page_tokens, dim]: FlashInfer's HND
    order.

    The view is permuted, so it serves back ends that take strides. Otherwise as `nhd_pages`.
    """
    return nhd_pages(buffer, page_tokens).transpose(1, 2)


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{'' if value.is_contiguous() else 'strided '}{tuple(value.shape)}"
