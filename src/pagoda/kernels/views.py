"""What back ends read, made from tables: buffers filled in place. In: tables, rows, lengths; out: views.

A torch reference (`views_reference`) says what is right and serves the CPU, Triton kernels (`views_fused`)
serve CUDA; this module picks one. Both agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda.kernels import _views_reference as views_reference
from pagoda.kernels import on_device, pick
from pagoda.kernels._views_reference import ViewBuffers, ViewSpec

__all__ = ["ViewBuffers", "ViewSpec", "Views"]


class Views:
    """Views that are refreshed together, of tables that lie one after the other in the order of `specs`.

    Cost: on CUDA one small copy, which waits. Errors: ConfigError where triton is missing.
    """

    def __init__(self, specs: Sequence[ViewSpec], device: torch.device) -> None:
        self._kernels = pick("_views_fused", views_reference, device)
        self._device = device
        with on_device(device):
            self._prepared = self._kernels.prepare(specs, device)

    def refresh(
        self,
        table: torch.Tensor,  # [num_rows * columns of all tables] int32, in any shape; entry 0 is no page
        num_rows: int,  # of each table, row 0 included, which is padding
        rows: torch.Tensor,  # [batch] int32, 0 is padding
        lengths: torch.Tensor,  # [batch] int32
        query_start_loc: torch.Tensor,  # [batch + 1] int32
    ) -> None:
        """Fill every buffer of every view, in two launches.

        What the buffers then hold, and what becomes of values out of range, is said by
        `pagoda.attention.PagedView`. Nothing is made on CUDA, and nothing outside of the tables is read.
        """
        with on_device(self._device):
            self._kernels.refresh(self._prepared, table, num_rows, rows, lengths, query_start_loc)
