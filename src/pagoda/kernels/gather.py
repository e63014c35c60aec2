"""Read tokens of all layers from a pool. In: slots, the pool's buffers; out: the caller's tensors, filled."""

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
    addresses: torch.Tensor,  # [buffers] int64, the address of each, on their device
    page_tokens: int,
    outs: Sequence[torch.Tensor],  # one per buffer, contiguous, n * page_bytes_b / page_tokens bytes each
    out_addresses: torch.Tensor,  # [buffers] int64, the address of each output, on the buffers' device
) -> torch.Tensor:
    """Copy slot slots[i] of every buffer to token i of its output, in one launch.

    A slot outside the buffers gives zeros. Outputs must not overlap each other or a buffer.
    """
    return addresses
