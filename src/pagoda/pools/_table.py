"""A copy of a host table on a device."""

from __future__ import annotations

import threading

import numpy as np
import torch

from pagoda.errors import ArgumentError, InvariantError
from pagoda.layout._numbers import count
from pagoda.pools._arguments import AnyIds, filled, host_ids, require_range, resolve_device
from pagoda.pools._staging import Staging, staging_of

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
        self.tensor = filled((self.num_rows + 1, self.num_columns), torch.int32, self.device)
        self._staging = staging_of(self.device, staging)
        self._address = self.tensor.data_ptr()
        self._lock = threading.RLock()

    def write(self, entries: AnyIds, page_ids: AnyIds) -> None:
        """Set entry entries[i] = row * num_columns + column to page_ids[i], as `TableWrites` has them.

        Cost: one staged copy and one launch, no synchronisation. Of values for one entry any may
        win. Errors: ArgumentError when lengths differ; OutOfRangeError; CaptureError.
        """
        at, new = host_ids(entries, "entries"), host_ids(page_ids, "page_ids")
        if at.shape != new.shape:
            raise ArgumentError(f"{at.size} entries and {new.size} page_ids: give one a place")
        require_range(at, self.num_columns, self.tensor.numel() - 1, "entries", "entries of rows 1 and up")
        require_range(new, -(2**31), 2**31 - 1, "page_ids", "int32 values")
        if at.size:
            where, values = self._staging.send(at, new.astype(np.int32))
            with self._lock:
                self.tensor.view(-1).scatter_(0, where, values)

    def memory_bytes(self) -> int:
        """Bytes of the matrix. O(1)."""
        return self.tensor.numel() * self.tensor.element_size()

    def check(self) -> None:
        """Verify invariant 6. O(1). Errors: InvariantError."""
        if self.tensor.data_ptr() != self._address:
            raise InvariantError(6, "the table has moved")
        self._staging.check()
