"""Tokens of all layers, out of a pool. In: slots, the pool's buffers; out: the caller's tensors, filled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda.kernels import _gather_reference as gather_reference
from pagoda.kernels._dispatch import operation

__all__ = ["gather"]


@operation("_gather_fused", gather_reference)
def gather(
    slots: torch.Tensor,  # [n] int32 or int64
    buffers: Sequence[torch.Tensor],  # each [num_pages, page_bytes_b] uint8: K, V, K, V, ... or K alone
    addresses: torch.Tensor,  # [buffers] int64, where each begins, on their device
    page_tokens: int,
    outs: Sequence[torch.Tensor],  # one per buffer, contiguous, n rows of page_bytes_b / page_tokens bytes
    out_addresses: torch.Tensor,  # [buffers] int64, where each begins, on the buffers' device
) -> torch.Tensor:
    """Copy the row of slot slots[i] of every buffer to row i of its output, in one launch.

    A slot outside of the buffers gives zeros. No output overlaps another or a buffer.
    """
    return addresses
