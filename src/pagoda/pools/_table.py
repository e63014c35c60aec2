"""A table on a device. In: places and their values, on the host or the device; out: the matrix that kernels
read. Only `DeviceTable` writes it, and its tensors never move (invariant 6)."""

from __future__ import annotations

import threading

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
    """An int32 matrix [num_rows + 1, num_columns] on a device, the copy of a table on the host.

    All places of `tensor` are 0 at first; row 0 is padding. It is allocated once and never moves: kernels and
    captured graphs keep its address. Thread-safe.

    Errors: ConfigError for sizes that are not positive or exceed 2^31 places, or an unknown device.
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
        num_entries = (self.num_rows + 1) * self.num_columns
        if num_entries >= 2**31:
            raise ConfigError(
                f"num_rows = {self.num_rows} and num_columns = {self.num_columns}: the table exceeds 2^31 "
                "places: give fewer rows or columns"
            )
        self.tensor = filled((self.num_rows + 1, self.num_columns), torch.int32, self.device)
        with torch.inference_mode(False):  # the table is written outside of it
            self._flat = self.tensor.view(-1)
        self._staging = staging_of(self.device, staging)
        self._addresses = self._find()
        self._lock = threading.RLock()

    def write(self, places: AnyIds, page_ids: AnyIds) -> None:
        """Set place places[i] = row * num_columns + column to page_ids[i].

        Cost: one staged copy and one launch, no synchronisation. If several writes have the same place, any
        of them may win. Errors: ArgumentError if lengths differ; OutOfRangeError; CaptureError.
        """
        at, new = host_ids(places, "places"), host_ids(page_ids, "page_ids")
        if at.shape != new.shape:
            raise ArgumentError(f"there are {at.size} places and {new.size} page_ids: give one id per place")
        require_range(at, self.num_columns, self.tensor.numel() - 1, "places", "places of rows 1 and up")
        require_range(new, -(2**31), 2**31 - 1, "page_ids", "int32 values")
        self._write(at, new)

    def write_at(self, rows: Values, columns: Values, values: Values) -> None:
        """Set the place in row rows[i], column columns[i] to values[i]; each has n elements, or one for all.

        The caller has checked host arrays to be in the table; device tensors are used as they are, and a
        place outside the table is not written. Cost: one launch; one staged copy more for host arrays, two
        launches more for device tensors. Errors: CaptureError for host arrays on CUDA.
        """
        if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
            self._write(rows * self.num_columns + columns, values)
        else:
            at, column = self._on_device(rows), self._on_device(columns)
            self._write(torch.add(column.long(), at, alpha=self.num_columns), values)

    def _write(self, places: Values, values: Values) -> None:
        n = max(places.shape[0], values.shape[0]) if places.shape[0] and values.shape[0] else 0
        if n == 0:
            return
        if isinstance(places, np.ndarray) and isinstance(values, np.ndarray):
            packed = np.empty((2, n), dtype=np.int32)
            packed[0], packed[1] = places, values
            sent = self._staging.send(packed)[0]
        else:
            given = (self._on_device(each).to(torch.int32).expand(n) for each in (places, values))
            sent = torch.cat(list(given))
        with self._lock:
            kernels.write_table(sent, 0, n, n, self._flat)

    def _on_device(self, values: Values) -> torch.Tensor:
        return self._staging.send(values)[0] if isinstance(values, np.ndarray) else values

    def memory_bytes(self) -> int:
        """Bytes of the matrix."""
        return self._flat.numel() * self._flat.element_size()

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if self._find() != self._addresses:
            raise InvariantError(6, "the table has moved")
        self._staging.check()

    def _find(self) -> tuple[int, int]:
        return self._flat.data_ptr(), self.tensor.data_ptr()
