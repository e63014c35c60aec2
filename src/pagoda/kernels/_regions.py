"""Rows of many tensors that are reset together. In: tensors and their values; out: what `fill_rows` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Regions"]


class Regions(NamedTuple):
    """Contiguous tensors [num_rows, ...] on one device, and the value that fills a row of each."""

    rows: Sequence[tuple[torch.Tensor, float]]
    table: torch.Tensor  # [tensors, 3] int64: address, bytes of a row, the value as 8 bytes
    most_bytes: int  # bytes of the widest row

    @staticmethod
    def of(rows: Sequence[tuple[torch.Tensor, float]], device: torch.device) -> Regions:
        """Return the regions of tensors that never move. Costs one copy to the device."""
        table = [
            (
                tensor.data_ptr(),
                tensor[0].numel() * tensor.element_size(),
                _as_integer(value, tensor.dtype),
            )
            for tensor, value in rows
        ]
        with torch.inference_mode(False):  # used outside of inference_mode even if made under it
            on_device = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 3)
        return Regions(rows, on_device, max((row_bytes for _, row_bytes, _ in table), default=0))

    def some(self, begin: int, end: int) -> Regions:
        """Return tensors [begin, end) alone, as views: nothing is copied to the device."""
        return Regions(self.rows[begin:end], self.table[begin:end], self.most_bytes)


def _as_integer(value: float, dtype: torch.dtype) -> int:
    """Return the bytes of a value, repeated to eight."""
    return int(torch.full((8 // dtype.itemsize,), value, dtype=dtype, device="cpu").view(torch.int64))
