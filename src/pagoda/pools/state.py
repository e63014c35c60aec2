"""States of layers that keep a fixed size a request: recurrent states, convolution tails."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import StateGroup
from pagoda.layout.numbers import count
from pagoda.pools.arguments import (
    AnyIds,
    filled,
    host_ids,
    is_unread,
    layer_number,
    require_buffer,
    resolve_device,
)
from pagoda.pools.staging import Staging, staging_of

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
        if not isinstance(parts, Mapping):
            raise ConfigError("parts: give a StatePart a name")
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
            part.name: StatePart(part.shape, getattr(torch, part.dtype), part.initial)
            for part in group.parts[0]
        }
        return cls(num_rows, len(group.layers), parts, device, staging=staging)

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Views of a layer's parts: [num_rows + 1, *shape] each. O(parts). Errors: ArgumentError."""
        at = layer_number(layer, self.num_layers)
        return {name: tensor[at] for name, tensor in self.tensors.items()}

    def reset(self, rows: AnyIds) -> None:
        """Set the states of rows, in all layers, to what a new request begins with.

        Cost: one launch a part. Rows on the host are checked, rows in a device tensor must be valid.
        Errors: ArgumentError, OutOfRangeError; CaptureError for host rows on CUDA.
        """
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

    def mem_bytes(self) -> int:
        """Bytes of all parts, the padding row included. O(parts)."""
        return sum(math.prod(t.shape) * t.element_size() for t in self.tensors.values())

    def check(self) -> None:
        """Verify invariant 6. O(parts). Errors: InvariantError."""
        if {name: tensor.data_ptr() for name, tensor in self.tensors.items()} != self._at:
            raise InvariantError(6, "a tensor of the pool has moved")
        self._staging.check()


def _checked(name: str, part: object) -> StatePart:
    """A part that a pool can hold and reset, or a ConfigError."""
    try:
        shape, dtype, initial = StatePart(*part)  # type: ignore[misc]
        sizes = tuple(count(size, f"shape of {name}", low=0) for size in shape)
    except TypeError:
        raise ConfigError(f"parts[{name!r}]: give StatePart(shape, dtype, initial)") from None
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
    return StatePart(sizes, dtype, initial)
