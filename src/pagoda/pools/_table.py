"""A table on a device. In: entries and their values, from the host or the device; out: the matrix that
kernels read. Only `DeviceTable` writes it, and its tensors never move (invariant 6)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda import kernels
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout._numbers import count
from pagoda.pools._arguments import AnyIds, filled, host_ids, require_range, resolve_device
from pagoda.pools._staging import Staging, staging_of

__all__ = ["DeviceTable"]

Values = npt.NDArray[np.int64] | torch.Tensor  # [n] on the host, or [n] int32 or int64 on the device


class DeviceTable:
    """An int32 matrix [num_rows + 1, num_columns] on a device that follows a table on the host.

    `tensor` begins as `empty` everywhere; row 0 is padding. `lens`, [num_rows + 1] int32, is a length per row
    where `has_lens`, else None; it lies behind the matrix in one tensor, so that an entry and a length are
    set together. Both are made once and never move: kernels and captured graphs keep their addresses.
    Several threads may call it.

    Errors: ConfigError for sizes that are not positive or pass 2^31 entries, or a device that is not there.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device | str = "cuda",
        staging: Staging | None = None,
        *,
        empty: int = 0,
        has_lens: bool = False,
    ) -> None:
        self.num_rows = count(num_rows, "num_rows", low=0)
        self.num_columns = count(num_columns, "num_columns")
        self.device = resolve_device(device)
        num_entries = (self.num_rows + 1) * self.num_columns
        if num_entries + self.num_rows + 1 >= 2**31:
            raise ConfigError(
                f"num_rows = {self.num_rows} and num_columns = {self.num_columns}: the table passes 2^31 "
                "entries: give fewer rows or columns"
            )
        self._flat = filled((num_entries + has_lens * (self.num_rows + 1),), torch.int32, self.device)
        with torch.inference_mode(False):  # a table made under it is written outside as well
            self.tensor = self._flat[:num_entries].view(self.num_rows + 1, self.num_columns)
            self.lens = self._flat[num_entries:] if has_lens else None
            if empty:
                self.tensor.fill_(empty)
        self._staging = staging_of(self.device, staging)
        self._addresses = self._find()
        self._lock = threading.RLock()

    def write(self, entries: AnyIds, page_ids: AnyIds) -> None:
        """Set entry entries[i] = row * num_columns + column to page_ids[i], as `TableWrites` has them.

        Cost: one staged copy and one launch, no synchronisation. Of several values for one entry any may
        win. Errors: ArgumentError when lengths differ; OutOfRangeError; CaptureError.
        """
        at, new = host_ids(entries, "entries"), host_ids(page_ids, "page_ids")
        if at.shape != new.shape:
            raise ArgumentError(f"{at.size} entries and {new.size} page_ids: give one per entry")
        require_range(at, self.num_columns, self.tensor.numel() - 1, "entries", "entries of rows 1 and up")
        require_range(new, -(2**31), 2**31 - 1, "page_ids", "int32 values")
        self._write(at, new)

    def write_at(self, rows: Values, columns: Values, values: Values) -> None:
        """Set the entry of rows[i] and columns[i] to values[i]; each has n entries, or one for all.

        Arrays on the host were checked to lie in the table; what lies on the device is used as it is, and an
        entry outside the table is not written. Cost: one launch; host arrays cost one staged copy, device
        tensors two launches more. Errors: CaptureError for host arrays on CUDA.
        """
        if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
            self._write(rows * self.num_columns + columns, values)
        else:
            at, column = self._on_device(rows), self._on_device(columns)
            self._write(torch.add(column.long(), at, alpha=self.num_columns), values)

    def set(self, row: int, column: int, value: int, length: int) -> None:
        """Set one entry, and the length of its row, to values that the launch carries: nothing is sent.

        For tables with `lens`. Cost: one launch.
        """
        at = row * self.num_columns + column
        with self._lock:
            kernels.set_table(self._flat, at, value, self.tensor.numel() + row, length)

    def _write(self, entries: Values, values: Values) -> None:
        n = max(entries.shape[0], values.shape[0]) if entries.shape[0] and values.shape[0] else 0
        if n == 0:
            return
        if isinstance(entries, np.ndarray) and isinstance(values, np.ndarray):
            packed = np.empty((2, n), dtype=np.int32)
            packed[0], packed[1] = entries, values
            sent = self._staging.send(packed)[0]
        else:
            given = (self._on_device(each).to(torch.int32).expand(n) for each in (entries, values))
            sent = torch.cat(list(given))
        with self._lock:
            kernels.write_table(sent, 0, n, n, self._flat[: self.tensor.numel()])

    def _on_device(self, values: Values) -> torch.Tensor:
        return self._staging.send(values)[0] if isinstance(values, np.ndarray) else values

    def memory_bytes(self) -> int:
        """Bytes of the matrix and the lengths."""
        return self._flat.numel() * self._flat.element_size()

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if self._find() != self._addresses:
            raise InvariantError(6, "the table has moved")
        self._staging.check()

    def _find(self) -> tuple[Any, ...]:
        tensors = (self._flat, self.tensor, self.lens)
        return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
