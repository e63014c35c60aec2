"""A copy of a host table on a device."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError, InvariantError
from pagoda.pools.arguments import count, require_range, resolve_device
from pagoda.pools.staging import Staging

__all__ = ["DeviceTable"]


class DeviceTable:
    """An int32 matrix [num_rows + 1, num_columns] on a device that follows a table on the host.

    `tensor` is made once, zeros, and never moves: kernels and captured graphs keep its address. Row 0
    is padding. Entries behind a row's length are whatever was there before.

    Errors: ConfigError for sizes that are not positive or a device that is not there.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        device: torch.device | str = "cuda",
        staging: Staging | None = None,
    ) -> None:
        self.num_rows = count(num_rows, "num_rows", low=0)
        self.num_columns = count(num_columns, "num_columns")
        self.device = resolve_device(device)
        self.tensor = torch.zeros(self.num_rows + 1, self.num_columns, dtype=torch.int32, device=self.device)
        self._staging = Staging(self.device) if staging is None else staging
        self._address = self.tensor.data_ptr()
        self._lock = threading.Lock()

    def write(self, index: npt.NDArray[np.int64], values: npt.NDArray[np.int32]) -> None:
        """Set entries index[i] = row * num_columns + column to values[i], as `TableWrites` has them.

        Cost: one staged copy and one launch, no synchronisation. Of entries with one index any may
        win. Errors: ArgumentError when lengths differ; OutOfRangeError; CaptureError.
        """
        index = np.ascontiguousarray(index, dtype=np.int64)
        values = np.ascontiguousarray(values, dtype=np.int32)
        if index.ndim != 1 or index.shape != values.shape:
            raise ArgumentError(
                f"index has shape {index.shape} and values {values.shape}: give one value an entry"
            )
        require_range(index, self.num_columns, self.tensor.numel() - 1, "index", "entries of rows 1 and up")
        if index.size:
            at, new = self._staging.send(index, values)
            with self._lock:
                self.tensor.view(-1).scatter_(0, at, new)

    def mem_bytes(self) -> int:
        """Bytes of the matrix. O(1)."""
        return self.tensor.numel() * self.tensor.element_size()

    def check(self) -> None:
        """Verify invariant 6. O(1). Errors: InvariantError."""
        if self.tensor.data_ptr() != self._address:
            raise InvariantError(6, "the table has moved")
        self._staging.check()
