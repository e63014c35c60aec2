"""Attention over a pool's pages by Triton kernels. In: a call; out: its outputs.

Decode rows are computed by the batch's work list, extend rows by tiles of queries; parts of keys are merged.
Nothing is read back or allocated once scratch memory is large enough, so calls can be captured: a captured
call serves every later batch of the same padded size.
"""

from __future__ import annotations

import torch

from pagoda._native import DECODE_QUERIES
from pagoda.attention._call import Call
from pagoda.errors import ArgumentError
from pagoda.kernels import on_device, triton_module

__all__ = ["attend", "can_attend"]

_POOLS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def can_attend(call: Call) -> bool:
    """Return whether kernels serve the call: not float64, not windows with sink tokens, not 2^31 slots."""
    return (
        call.keys.dtype in _POOLS
        and call.queries.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and not call.view.group.storage.sink_tokens
        and call.keys.shape[0] < 2**31
        and (call.keys.element_size() > 1 or call.keys.shape[2] % 2 == call.out.shape[2] % 2 == 0)
    )


def attend(call: Call) -> None:
    """Compute a call that `can_attend`. Two launches at least, four at most.

    Errors: ArgumentError for a batch without a work list; CaptureError if scratch memory would have to grow.
    """
    batch, view = call.batch, call.view
    work = view.work
    if not work.has_list:
        raise ArgumentError("batch: it has no work list: give Manager and Pools the same workers, above 0")
    if not call.queries.shape[0]:
        return
    if call.scale < 0:
        call = call._replace(queries=-call.queries, scale=-call.scale)
    fused = triton_module("_attention_fused")
    with on_device(batch.device):
        args = fused.Arguments(
            call.queries, call.out, call.keys, call.values, call.k_scale,
            call.v_scale if call.values is not None else call.k_scale, call.scale, call.softcap, call.sinks,
            min(call.window, 2**31 - 1), view.page_tokens, view.page_table, batch.lengths, batch.query_start_loc,
            batch.batch_indices, work.runs, work.tasks, work.splits,
        )  # fmt: skip
        heads, v_dim = call.out.shape[1:]
        parts = None
        if work.num_parts:
            size = work.num_parts * heads
            memory = batch.scratch(4 * size * (v_dim + 1)).view(torch.float32)
            parts = fused.Parts(memory[: size * v_dim], memory[size * v_dim : size * (v_dim + 1)])
        extends = batch.max_queries > DECODE_QUERIES
        fused.decode(args, parts, min(batch.max_queries, DECODE_QUERIES))
        if extends:
            fused.extend(args, parts, DECODE_QUERIES, work.extend_parts)
        if parts is not None:
            fused.merge(args, parts, DECODE_QUERIES, extends and work.extend_parts > 1)
