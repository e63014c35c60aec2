"""States of layers that keep a fixed size a request: recurrent states, convolution tails."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.pools.arguments import (
    AnyIds,
    count,
    host_ids,
    is_unread,
    number,
    require_range,
    resolve_device,
    unread_ids,
)
from pagoda.pools.staging import Staging

__all__ = ["StatePart", "StatePool"]


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)


class StatePart(NamedTuple):
    """One tensor of a state: its shape for one layer and row, its dtype, and what a reset sets."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float = 0.0


class StatePool:
    """Named parts of a state for `num_rows` rows and `num_layers` layers.

    `tensors[name]` is [num_layers, num_rows + 1, *shape]; row 0 is padding. All rows begin as after a
    reset. Tensors never move and may be supplied as `buffers`, contiguous and of exactly that shape,
    dtype and device; they are then left as they are.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        parts: Mapping[str, StatePart],
        device: torch.device | str = "cuda",
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.num_rows = count(num_rows, "num_rows", low=0)
        self.num_layers = count(num_layers, "num_layers")
        self.device = resolve_device(device)
        self.parts = dict(parts)
        self.tensors: dict[str, torch.Tensor] = {}
        if buffers is not None and set(buffers) != set(self.parts):
            raise ConfigError(f"buffers: give {sorted(self.parts)}, not {sorted(buffers)}")
        for name, part in self.parts.items():
            if part.dtype not in _DTYPES:
                raise ConfigError(
                    f"dtype of {name}: give one of {', '.join(map(str, _DTYPES))}, not {part.dtype}"
                )
            shape = (
                self.num_layers,
                self.num_rows + 1,
                *(count(d, f"shape of {name}", low=0) for d in part.shape),
            )
            if buffers is None:
                self.tensors[name] = torch.full(shape, part.initial, dtype=part.dtype, device=self.device)
                continue
            found = (tuple(buffers[name].shape), buffers[name].dtype, buffers[name].device)
            if found != (shape, part.dtype, self.device) or not buffers[name].is_contiguous():
                raise ConfigError(
                    f"buffers[{name!r}] is {found}, not contiguous {(shape, part.dtype, self.device)}"
                )
            self.tensors[name] = buffers[name]
        self._staging = Staging(self.device) if staging is None else staging
        self._lock = threading.Lock()
        self._at = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Views of a layer's parts: [num_rows + 1, *shape] each. O(parts). Errors: ArgumentError."""
        at = number(layer, "layer")
        if at >= self.num_layers:
            raise ArgumentError(f"layer = {at}: this pool has layers 0 to {self.num_layers - 1}")
        return {name: tensor[at] for name, tensor in self.tensors.items()}

    def reset(self, rows: AnyIds) -> None:
        """Set the states of rows, in all layers, to what a new request begins with.

        Cost: one launch a part. Rows on the host are checked, rows in a device tensor must be valid.
        Errors: ArgumentError, OutOfRangeError; CaptureError for host rows on CUDA.
        """
        (index,) = self._on_device(rows=rows)
        with self._lock:
            for name, part in self.parts.items():
                self.tensors[name].index_fill_(1, index, part.initial)

    def copy(self, source: AnyIds, target: AnyIds) -> None:
        """Copy the states of rows to other rows, in all layers.

        All sources are read before a target is written. Cost: two launches a part, and room for the
        copied states. Errors: ArgumentError when lengths differ or a target stands twice on the host;
        OutOfRangeError; CaptureError for host rows on CUDA.
        """
        if not is_unread(target, self.device):
            targets = host_ids(target, "target")
            if np.unique(targets).size != targets.size:
                raise ArgumentError("target: a row stands twice")
        sources_at, targets_at = self._on_device(source=source, target=target)
        if sources_at.shape != targets_at.shape:
            raise ArgumentError(f"source has {sources_at.shape[0]} rows and target {targets_at.shape[0]}")
        with self._lock:
            for tensor in self.tensors.values():
                tensor.index_copy_(1, targets_at, tensor.index_select(1, sources_at))

    def mem_bytes(self) -> int:
        """Bytes of all parts, the padding row included. O(parts)."""
        return sum(math.prod(t.shape) * t.element_size() for t in self.tensors.values())

    def check(self) -> None:
        """Verify invariant 6. O(parts). Errors: InvariantError."""
        if {name: tensor.data_ptr() for name, tensor in self.tensors.items()} != self._at:
            raise InvariantError(6, "a tensor of the pool has moved")
        self._staging.check()

    def _on_device(self, **rows: AnyIds) -> list[torch.Tensor]:
        """Rows as int64 device tensors, those on the host checked and sent in one copy."""
        given = {
            name: unread_ids(ids, name).long() for name, ids in rows.items() if is_unread(ids, self.device)
        }
        host = {name: host_ids(ids, name) for name, ids in rows.items() if name not in given}
        for name, ids in host.items():
            require_range(ids, 0, self.num_rows, name, "rows")
        if host:
            given.update(zip(host, self._staging.send(*host.values()), strict=True))
        return [given[name] for name in rows]
