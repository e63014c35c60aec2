"""What back ends read, made from a table: buffers filled in place. In: tables, rows, lengths; out: views.

A torch reference (`views_reference`) says what is right and serves the CPU, a Triton kernel (`views_fused`)
serves CUDA; this module picks one. Both agree bit for bit.
"""

from __future__ import annotations

import torch

from pagoda.errors import ConfigError
from pagoda.kernels import on_device, views_reference
from pagoda.kernels.views_reference import ViewBuffers

__all__ = ["ViewBuffers", "refresh"]


def refresh(
    table: torch.Tensor,  # [num_rows + 1, max_pages] int32, row 0 padding, entry 0 no page
    rows: torch.Tensor,  # [batch] int32, 0 is padding
    lengths: torch.Tensor,  # [batch] int32
    query_start_loc: torch.Tensor,  # [batch + 1] int32
    view: ViewBuffers,
    page_tokens: int,
    kernel_page_tokens: int,
    window: int,
) -> None:
    """Fill every buffer of a view from a table, in two launches; `window` 0 is none.

    What the buffers then hold, and what becomes of values out of range, is said by
    `pagoda.attention.PagedView`. Nothing is made on CUDA, and nothing outside of the table is read.
    """
    if table.device.type != "cuda":
        views_reference.refresh(
            table, rows, lengths, query_start_loc, view, page_tokens, kernel_page_tokens, window
        )
        return
    try:
        from pagoda.kernels import views_fused
    except ModuleNotFoundError as missing:
        raise ConfigError("views on CUDA need triton: pip install 'pagoda-kv[triton]'") from missing
    with on_device(table.device):
        views_fused.refresh(
            table, rows, lengths, query_start_loc, view, page_tokens, kernel_page_tokens, window
        )
