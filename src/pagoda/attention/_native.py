"""Attention over a pool's pages in native code, on torch's threads. In: a call on a CPU; out: its outputs.

Pages are read where they lie, once for all query heads of a KV head. Sums are float32. Results do not depend
on the number of threads."""

from __future__ import annotations

import torch

from pagoda import _native
from pagoda.attention._call import Call

__all__ = ["attend", "can_attend", "levels"]

_DTYPES = (torch.float32, torch.bfloat16)


def can_attend(call: Call) -> bool:
    """Whether `attend` serves a call: a CPU's pool of float32 or bfloat16, queries of the same dtype, and no
    sink tokens.
    """
    dtype = call.keys.dtype
    return (
        call.keys.device.type == "cpu"
        and dtype in _DTYPES
        and call.queries.dtype == dtype
        and not call.view.group.storage.sink_tokens
    )


def levels() -> list[str]:
    """Return the instruction sets that `attend` can use on this machine, the best one first."""
    return _native.attention_levels()


def attend(call: Call, *, level: str | None = None) -> None:
    """Compute a call that `can_attend`. `level`: one of `levels`, else the best."""
    queries, out, keys, values, batch, view = (
        call.queries, call.out, call.keys, call.values, call.batch, call.view,
    )  # fmt: skip
    sinks = None if call.sinks is None else call.sinks.float()
    table, starts, lengths = view.page_table, batch.query_start_loc, batch.lengths
    is_latent = values is None
    _native.attend(
        (
            queries.data_ptr(),
            out.data_ptr(),
            keys.data_ptr(),
            0 if values is None else values.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            table.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
        ),
        (
            out.shape[0],
            out.shape[1],
            keys.shape[1],
            keys.shape[2],
            out.shape[2],
            queries.stride(0),
            queries.stride(1),
            out.stride(0),
            out.stride(1),
            keys.shape[0] // view.page_tokens,
            view.page_tokens,
            lengths.shape[0],
            table.shape[1],
            min(call.window, 2**31),
        ),
        (call.scale * call.k_scale, call.k_scale if is_latent else call.v_scale, call.softcap),
        keys.dtype == torch.bfloat16,
        torch.get_num_threads(),
        level,
    )
