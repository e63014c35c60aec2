"""Rows of many tensors that are reset together. In: tensors and a value each; out: what `fill_rows` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Regions"]


class Regions(NamedTuple):
    """Tensors [num_rows, ...], contiguous, on one device, and the value that a row of each is filled with."""

    rows: Sequence[tuple[torch.Tensor, float]]
    table: torch.Tensor  # [tensors, 3] int64: where each begins, bytes of a row, the value as 8 bytes
    most_bytes: int  # that a row has at most

    @staticmethod
    def of(rows: Sequence[tuple[torch.Tensor, float]], device: torch.device) -> Regions:
        """Regions of tensors that never move. Cost: O(tensors), and one copy to the device."""
        table = [
            (
                tensor.data_ptr(),
                tensor[0].numel() * tensor.element_size(),
                _as_integer(value, tensor.dtype),
            )
            for tensor, value in rows
        ]
        with torch.inference_mode(False):  # also where it is made under it, it is used outside
            on_device = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 3)
        return Regions(rows, on_device, max((row_bytes for _, row_bytes, _ in table), default=0))

    def some(self, begin: int, end: int) -> Regions:
        """Tensors [begin, end) of these alone: views, nothing is sent. O(end − begin)."""
        return Regions(self.rows[begin:end], self.table[begin:end], self.most_bytes)


def _as_integer(value: float, dtype: torch.dtype) -> int:
    """The bytes of a value, repeated to eight."""
    return int(torch.full((8 // dtype.itemsize,), value, dtype=dtype, device="cpu").view(torch.int64))
