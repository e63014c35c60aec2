"""Attention over a pool's pages by Triton kernels. In: a call; out: its outputs.

Decode rows are computed by the batch's work list, extend rows by tiles of queries; parts of keys are merged.
Nothing is read back or allocated once scratch memory is large enough, so calls can be captured: a call
captured with a batch that was made with `pad_to` or `max_queries` serves every later one of the same size.
"""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType
from typing import Any

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
    """Compute a call that `can_attend`, in four launches at most.

    Errors: ArgumentError for a batch without a work list; CaptureError if scratch memory would have to grow,
    or if the batch was made without `pad_to` and `max_queries`.
    """
    batch, view = call.batch, call.view
    work = view.work
    if not work.has_list:
        raise ArgumentError("batch: it has no work list: give Manager and Pools the same workers, above 0")
    if not call.queries.shape[0]:
        return
    batch.require_capturable()
    if call.scale < 0:
        call = call._replace(queries=-call.queries, scale=-call.scale)
    fused = triton_module("_attention_fused")
    with on_device(batch.device):
        args = fused.Arguments(
            call.queries, call.out, call.keys, call.values, call.k_scale,
            call.v_scale if call.values is not None else call.k_scale, call.scale, call.softcap, call.sinks,
            min(call.window, 2**31 - 1), view.page_tokens, view.page_table, batch.lengths,
            batch.query_start_loc, batch.batch_indices, batch.extends, work.runs, work.tasks, work.splits,
        )  # fmt: skip
        heads, v_dim = call.out.shape[1:]
        parts = None
        if work.num_parts:
            size = work.num_parts * heads
            memory = batch.scratch(4 * size * (v_dim + 1)).view(torch.float32)
            parts = fused.Parts(memory[: size * v_dim], memory[size * v_dim : size * (v_dim + 1)])
        most = batch.most_rows
        if most.decode or call.queries.shape[0] > batch.num_tokens:  # padding is zeroed there
            _decode(fused, args, parts, max(1, min(batch.max_queries, DECODE_QUERIES)))
        if most.extend:
            num_parts = work.extend_parts if parts is not None else 1
            _extend(fused, args, parts, most.extend, most.extend_tokens, num_parts)
        if parts is not None:
            fused.merge(args, parts, DECODE_QUERIES, work.extend_parts > 1)


@functools.cache
def _hopper(name: str) -> ModuleType | None:
    """Return a module of kernels for Hopper GPUs, which are written in Gluon; None before triton 3.6."""
    major, minor = import_module("triton").__version__.split(".")[:2]
    return import_module(f"pagoda.kernels.{name}") if (int(major), int(minor)) >= (3, 6) else None


def _decode(fused: ModuleType, args: Any, parts: Any, max_queries: int) -> None:
    hopper = _hopper("_latent_hopper") if args.queries.is_cuda and args.values is None else None
    if hopper is None or not hopper.can_decode(
        args.queries, args.keys, args.out, args.scale, args.softcap, args.window
    ):
        fused.decode(args, parts, max_queries)
        return
    hopper.decode(
        args.queries, args.keys, args.out, args.table, args.starts, args.runs, args.tasks, args.page,
        args.scale, max_queries, args.sinks, *(parts or ()),
    )  # fmt: skip


def _extend(fused: ModuleType, args: Any, parts: Any, num_rows: int, num_tokens: int, num_parts: int) -> None:
    hopper = _hopper("_extend_hopper") if args.queries.is_cuda else None
    if hopper is None or not hopper.can_extend(
        args.queries, args.keys, args.values, args.page, args.scale, args.softcap
    ):
        fused.extend(args, parts, num_rows, num_tokens, num_parts)
        return
    hopper.extend(
        args.queries, args.keys, args.values, args.out, args.table, args.lengths, args.starts, args.extends,
        num_rows, num_tokens, args.page, args.scale, args.window, args.sinks, args.splits, num_parts,
        args.runs.shape[0] - 1, *(parts or ()),
    )  # fmt: skip
