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
    most_bytes: int  # of a row

    @staticmethod
    def of(rows: Sequence[tuple[torch.Tensor, float]], device: torch.device) -> Regions:
        """Regions of tensors that never move. Cost: O(tensors), and one copy to the device."""
        table = [
            (
                tensor.data_ptr(),
                tensor[0].numel() * tensor.element_size(),
                int(torch.full((8 // tensor.element_size(),), value, dtype=tensor.dtype).view(torch.int64)),
            )
            for tensor, value in rows
        ]
        with torch.inference_mode(False):  # also where it is made under it, it is used outside
            on_device = torch.tensor(table, dtype=torch.int64).view(-1, 3).to(device)
        return Regions(rows, on_device, max((row_bytes for _, row_bytes, _ in table), default=0))
