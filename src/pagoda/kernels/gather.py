"""Tokens of all layers, out of a pool. In: slots and the pool's buffers; out: the caller's tensors, filled.

A torch reference (`gather_reference`) says what is right and serves the CPU, a Triton kernel
(`gather_fused`) serves CUDA; this module picks one. Both agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda.kernels import _gather_reference as gather_reference
from pagoda.kernels import on_device, pick

__all__ = ["gather"]


def gather(
    slots: torch.Tensor,  # [n] int32 or int64
    buffers: Sequence[torch.Tensor],  # each [num_pages, page_bytes_b] uint8: K, V, K, V, ... or K alone
    addresses: torch.Tensor,  # [buffers] int64, where each begins, on their device
    page_tokens: int,
    outs: Sequence[torch.Tensor],  # one a buffer, contiguous, n rows of page_bytes_b / page_tokens bytes
    out_addresses: torch.Tensor,  # [buffers] int64, where each begins, on the buffers' device
) -> None:
    """Copy the row of slot slots[i] of every buffer to row i of its output, in one launch.

    A slot outside of the buffers gives zeros. No output overlaps another or a buffer.
    """
    with on_device(addresses.device):
        pick("_gather_fused", gather_reference, addresses.device).gather(
            slots, buffers, addresses, page_tokens, outs, out_addresses
        )
