"""States of a fixed size a request: recurrent states, convolution tails, windows in rings."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pagoda import kernels
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import StateGroup
from pagoda.layout._numbers import count
from pagoda.pools._arguments import (
    AnyIds,
    filled,
    host_ids,
    is_unread,
    layer_number,
    one_id,
    refuse_capture,
    require_buffer,
    require_range,
    resolve_device,
)
from pagoda.pools._staging import Staging, staging_of

__all__ = ["StatePool", "StateSpec"]


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8)


class StateSpec(NamedTuple):
    """One tensor of a state: its shape for one layer and row, its dtype, and what a reset sets.

    What is stored in a format of its own (entries of a window, quantised) is bytes here, uint8."""

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
        parts: Mapping[str, StateSpec],
        device: torch.device | str = "cuda",
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.num_rows = count(num_rows, "num_rows", low=0)
        self.num_layers = count(num_layers, "num_layers")
        self.device = resolve_device(device)
        if not isinstance(parts, Mapping):
            raise ConfigError("parts: give one StateSpec per name")
        self.parts = {name: _checked(name, part) for name, part in parts.items()}
        self.tensors: dict[str, torch.Tensor] = {}
        if buffers is not None and (not isinstance(buffers, Mapping) or set(buffers) != set(self.parts)):
            raise ConfigError(f"buffers: give a tensor each for {', '.join(self.parts)}")
        for name, part in self.parts.items():
            shape = (self.num_layers, self.num_rows + 1, *part.shape)
            if buffers is None:
                self.tensors[name] = filled(shape, part.dtype, self.device, part.initial)
            else:
                require_buffer(buffers[name], shape, part.dtype, self.device, f"buffers[{name!r}]")
                self.tensors[name] = buffers[name]
        self._staging = staging_of(self.device, staging)
        self._lock = threading.RLock()
        self._regions = kernels.Regions.of(self.rows(), self.device)
        self._at = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    @classmethod
    def from_group(
        cls,
        group: StateGroup,
        num_rows: int,
        device: torch.device | str = "cuda",
        *,
        staging: Staging | None = None,
    ) -> StatePool:
        """The pool of a group of layers: its row has the bytes that the group says.

        Layers are numbered from 0 in the order of `group.layers`. Cost: that of the memory. Errors:
        ConfigError, also for layers that keep different states.
        """
        if not isinstance(group, StateGroup):
            raise ConfigError(f"group: give a StateGroup of a Layout, not {type(group).__name__}")
        if len(set(group.parts)) > 1:
            raise ConfigError(
                f"group {group.name}: its layers keep different states: one StatePool holds one kind"
            )
        parts = {
            part.name: StateSpec(part.shape, getattr(torch, part.dtype), part.initial)
            for part in group.parts[0]
        }
        return cls(num_rows, len(group.layers), parts, device, staging=staging)

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Views of a layer's parts: [num_rows + 1, *shape] each. O(parts). Errors: ArgumentError."""
        at = layer_number(layer, self.num_layers)
        return {name: tensor[at] for name, tensor in self.tensors.items()}

    def rows(self) -> list[tuple[torch.Tensor, float]]:
        """Each part of each layer, [num_rows + 1, *shape], layer by layer, and what a reset sets.

        O(layers × parts)."""
        with torch.inference_mode(False):  # also views that are made under it are written outside
            return [
                (part, self.parts[name].initial)
                for layer in range(self.num_layers)
                for name, part in self.layer(layer).items()
            ]

    def regions(self, layer: int) -> kernels.Regions:
        """What `kernels.fill_rows` resets a row of one layer with. O(parts). Errors: ArgumentError."""
        begin = layer_number(layer, self.num_layers) * len(self.parts)
        return self._regions.some(begin, begin + len(self.parts))

    def reset(self, rows: AnyIds) -> None:
        """Set the states of rows, in all layers, to what a new request begins with.

        Cost: one launch for one row on the host, else one a part. Rows on the host are checked, rows in a
        device tensor must be valid.
        Errors: ArgumentError, OutOfRangeError; CaptureError for host rows on CUDA.
        """
        if not is_unread(rows, self.device):
            rows = host_ids(rows, "rows")
            require_range(rows, 0, self.num_rows, "rows", "rows")
            if rows.size == 1:  # the usual case, a request that ends: nothing has to be sent
                refuse_capture(self.device, "resetting rows that lie on the host")
                with self._lock:
                    kernels.fill_rows(self._regions, int(rows[0]))
                return
        index = self._staging.send_ids(rows, "rows", 0, self.num_rows).long()
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
            target = host_ids(target, "target")
            if np.unique(target).size != target.size:
                raise ArgumentError("target: a row stands twice")
        sources_at, targets_at = (
            self._staging.send_ids(ids, name, 0, self.num_rows).long()
            for ids, name in ((source, "source"), (target, "target"))
        )
        if sources_at.shape != targets_at.shape:
            raise ArgumentError(f"source has {sources_at.shape[0]} rows and target {targets_at.shape[0]}")
        with self._lock:
            for tensor in self.tensors.values():
                tensor.index_copy_(1, targets_at, tensor.index_select(1, sources_at))

    def snapshot(self, row: int, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """A copy of the states of a row in all layers: a tensor a part, [num_layers, *shape], the caller's.

        `out` has tensors to copy into, of exactly these shapes, on the pool's device; with it nothing is
        made, and the call can be captured. Cost: one launch a part, no synchronisation. Errors:
        OutOfRangeError, ArgumentError; CaptureError without `out`.
        """
        at = self._row(row)
        if out is None:
            refuse_capture(self.device, "snapshot")
            # Also what is copied under inference_mode may be written outside of it.
            with self._lock, torch.inference_mode(False):
                return {name: tensor[:, at].clone() for name, tensor in self.tensors.items()}
        self._require_states(out, "out")
        with self._lock, torch.no_grad():
            for name, tensor in self.tensors.items():
                out[name].copy_(tensor[:, at])
        return dict(out)

    def restore(self, row: int, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Give a row, in all layers, the states of a snapshot, which may be another row's. It stays as it is.

        Cost: one launch a part, no synchronisation; it can be captured. Errors: OutOfRangeError;
        ArgumentError for parts of other names, shapes, dtypes or devices.
        """
        at = self._row(row)
        self._require_states(snapshot, "snapshot")
        with self._lock, torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor[:, at].copy_(snapshot[name])

    def _row(self, row: Any) -> int:
        return one_id(row, "row", 0, self.num_rows, "rows")

    def _require_states(self, states: Any, name: str) -> None:
        if not isinstance(states, Mapping) or set(states) != set(self.parts):
            raise ArgumentError(f"{name}: give a tensor each for {', '.join(self.parts)}")
        for part_name, part in self.parts.items():
            given = states[part_name]
            wanted = ((self.num_layers, *part.shape), part.dtype, self.device)
            if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
                raise ArgumentError(f"{name}[{part_name!r}]: give a dense tensor, not {type(given).__name__}")
            found = (tuple(given.shape), given.dtype, given.device)
            if found != wanted:
                raise ArgumentError(f"{name}[{part_name!r}] is {found}, not {wanted}")

    def memory_bytes(self) -> int:
        """Bytes of all parts, the padding row included. O(parts)."""
        return sum(math.prod(t.shape) * t.element_size() for t in self.tensors.values())

    def check(self) -> None:
        """Verify invariant 6. O(parts). Errors: InvariantError."""
        if {name: tensor.data_ptr() for name, tensor in self.tensors.items()} != self._at:
            raise InvariantError(6, "a tensor of the pool has moved")
        self._staging.check()


def _checked(name: str, part: object) -> StateSpec:
    """A part that a pool can hold and reset, or a ConfigError."""
    try:
        shape, dtype, initial = StateSpec(*part)  # type: ignore[misc]
        sizes = tuple(count(size, f"shape of {name}", low=0) for size in shape)
    except TypeError:
        raise ConfigError(f"parts[{name!r}]: give StateSpec(shape, dtype, initial)") from None
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype of {name}: give one of {', '.join(map(str, _DTYPES))}, not {dtype}")
    try:
        stored = torch.full((), initial, dtype=dtype, device="cpu").item()
    except (RuntimeError, TypeError):
        stored = None
    if stored is None or (
        stored != initial if not dtype.is_floating_point else math.isinf(stored) > math.isinf(initial)
    ):
        raise ConfigError(f"initial of {name}: {dtype} cannot hold {initial!r}")
    return StateSpec(sizes, dtype, initial)
