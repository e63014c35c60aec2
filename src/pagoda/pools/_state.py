"""States of fixed size per request: recurrent states, convolution tails, windows in rings. In: rows; out: the
tensors that kernels read and write. Tensors never move (invariant 6)."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
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
    """One tensor of a state: its shape per layer and row, its dtype, and its value after a reset.

    `kept` is what a checkpoint keeps of it: everything (None), or the last `kept` cells before its length, as
    in `pagoda.layout.TensorSpec`; with `holds_positions`, cells are positions, which follow from the length.
    Data in a format of its own, such as the quantised entries of a window, is uint8 here."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float = 0.0
    kept: int | None = None
    holds_positions: bool = False


class StatePool:
    """The named parts of a state, for `num_rows` rows and `num_layers` layers.

    `parts` has the parts of every layer, by name; if layers differ, it is a list with one mapping per layer.
    `tensors[name]` is [layers with this part, num_rows + 1, *shape], in the order of the layers; row 0 is
    padding. If parts of one name differ between layers, each kind of them has its own tensor: `name`,
    `name-2`, and so on. All rows are reset at first. Tensors never move. The caller may supply them as
    `buffers`: contiguous, of exactly that shape, dtype and device; their contents are then left as they are.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        parts: Mapping[str, StateSpec] | Sequence[Mapping[str, StateSpec]],
        device: torch.device | str = "cuda",
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.num_rows = count(num_rows, "num_rows", low=0)
        self.num_layers = count(num_layers, "num_layers")
        self.device = resolve_device(device)
        self.parts: dict[str, StateSpec] = {}  # by name in `tensors`
        # [layer][part's name]: its name in `tensors`, and its index there.
        self._layers: list[dict[str, tuple[str, int]]] = []
        sizes: dict[str, int] = {}  # layers of each tensor
        for layer in _by_layer(parts, self.num_layers):
            places = {}
            for name, part in layer.items():
                key = next(key for key in _keys(name) if self.parts.setdefault(key, part) == part)
                places[name] = key, sizes.get(key, 0)
                sizes[key] = sizes.get(key, 0) + 1
            self._layers.append(places)
        self.tensors: dict[str, torch.Tensor] = {}
        if buffers is not None and (not isinstance(buffers, Mapping) or set(buffers) != set(self.parts)):
            raise ConfigError(f"buffers: give one tensor for each of {', '.join(self.parts)}")
        for name, part in self.parts.items():
            shape = (sizes[name], self.num_rows + 1, *part.shape)
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
        """Allocate the pool of a group. Layers are numbered from 0 in the order of `group.layers`.

        Errors: ConfigError.
        """
        if not isinstance(group, StateGroup):
            raise ConfigError(f"group: give a StateGroup of a Layout, not {type(group).__name__}")
        layers = [
            {
                part.name: StateSpec(
                    part.shape, getattr(torch, part.dtype), part.initial, part.kept, part.holds_positions
                )
                for part in parts
            }
            for parts in group.parts
        ]
        return cls(num_rows, len(group.layers), layers, device, staging=staging)

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Return views of a layer's parts: [num_rows + 1, *shape] each. Errors: ArgumentError."""
        at = layer_number(layer, self.num_layers)
        with torch.inference_mode(False):  # the views are written outside of it
            return {name: self.tensors[key][index] for name, (key, index) in self._layers[at].items()}

    def rows(self) -> list[kernels.Region]:
        """Return each part of each layer, [num_rows + 1, *shape], with its value after a reset and what a
        checkpoint keeps of it."""
        return [
            kernels.Region(tensor, spec.initial, spec.kept, spec.holds_positions)
            for number, places in enumerate(self._layers)
            for name, tensor in self.layer(number).items()
            for spec in [self.parts[places[name][0]]]
        ]

    def regions(self, layer: int | None = None) -> kernels.Regions:
        """Return the regions of all layers, or of one, for `kernels.fill_rows`. Errors: ArgumentError."""
        if layer is None:
            return self._regions
        at = layer_number(layer, self.num_layers)
        begin = sum(map(len, self._layers[:at]))
        return self._regions.some(begin, begin + len(self._layers[at]))

    def reset(self, rows: AnyIds) -> None:
        """Reset the states of rows, in all layers, to those of a new request.

        Cost: one launch for one row on the host, else one per part. Rows on the host are checked; rows in a
        device tensor must be valid. Errors: ArgumentError, OutOfRangeError; CaptureError for host rows on
        CUDA.
        """
        if not is_unread(rows, self.device):
            rows = host_ids(rows, "rows")
            require_range(rows, 0, self.num_rows, "rows", "rows")
            if rows.size == 1:  # the usual case, one request: nothing has to be sent
                refuse_capture(self.device, "resetting rows that are given on the host")
                with self._lock:
                    kernels.fill_rows(self._regions, int(rows[0]))
                return
        index = self._staging.send_ids(rows, "rows", 0, self.num_rows).long()
        with self._lock:
            for name, part in self.parts.items():
                self.tensors[name].index_fill_(1, index, part.initial)

    def copy(self, source: AnyIds, target: AnyIds) -> None:
        """Copy the states of rows to other rows, in all layers.

        All sources are read before any target is written. Cost: two launches per part, and memory for the
        copied states. Errors: ArgumentError if lengths differ or host rows have a duplicate target;
        OutOfRangeError; CaptureError for host rows on CUDA.
        """
        if not is_unread(target, self.device):
            target = host_ids(target, "target")
            if np.unique(target).size != target.size:
                raise ArgumentError("target has a duplicate: give each row once")
        sources_at, targets_at = (
            self._staging.send_ids(ids, name, 0, self.num_rows).long()
            for ids, name in ((source, "source"), (target, "target"))
        )
        if sources_at.shape != targets_at.shape:
            raise ArgumentError(
                f"source has {sources_at.shape[0]} rows and target {targets_at.shape[0]}: give one source "
                "per target"
            )
        with self._lock:
            for tensor in self.tensors.values():
                tensor.index_copy_(1, targets_at, tensor.index_select(1, sources_at))

    def snapshot(self, row: int, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copy a row's states in all layers: one tensor per part, as `tensors` without the rows, owned by the
        caller.

        `out` has tensors of exactly these shapes on the pool's device to copy into; with it nothing is
        allocated, and the call can be captured. Cost: one launch per part, no synchronisation. Errors:
        OutOfRangeError, ArgumentError; CaptureError without `out`.
        """
        at = self._row(row)
        if out is None:
            refuse_capture(self.device, "snapshot")
            # The copies may be written outside of inference_mode even if made under it.
            with self._lock, torch.inference_mode(False):
                return {name: tensor[:, at].clone() for name, tensor in self.tensors.items()}
        self._require_states(out, "out")
        with self._lock, torch.no_grad():
            for name, tensor in self.tensors.items():
                out[name].copy_(tensor[:, at])
        return dict(out)

    def restore(self, row: int, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Copy a snapshot, of this or another row, into a row's states in all layers.

        Cost: one launch per part, no synchronisation; it can be captured. Errors: OutOfRangeError;
        ArgumentError for parts with other names, shapes, dtypes or devices.
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
            raise ArgumentError(f"{name}: give one tensor for each of {', '.join(self.parts)}")
        for part_name, part in self.parts.items():
            given = states[part_name]
            wanted = ((self.tensors[part_name].shape[0], *part.shape), part.dtype, self.device)
            if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
                raise ArgumentError(f"{name}[{part_name!r}]: give a dense tensor, not {type(given).__name__}")
            found = (tuple(given.shape), given.dtype, given.device)
            if found != wanted:
                raise ArgumentError(f"{name}[{part_name!r}] is {found}: give {wanted}")

    def memory_bytes(self) -> int:
        """Bytes of all parts, the padding row included."""
        return sum(math.prod(t.shape) * t.element_size() for t in self.tensors.values())

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if {name: tensor.data_ptr() for name, tensor in self.tensors.items()} != self._at:
            raise InvariantError(6, "a tensor of the pool has moved")
        self._staging.check()


def _by_layer(parts: Any, num_layers: int) -> list[dict[str, StateSpec]]:
    """Return the checked parts of each layer. Errors: ConfigError."""
    if isinstance(parts, Mapping):
        return [{name: _checked(name, part) for name, part in parts.items()}] * num_layers
    if not isinstance(parts, (list, tuple)) or not all(isinstance(layer, Mapping) for layer in parts):
        raise ConfigError("parts: give a mapping from names to StateSpec, or one per layer")
    if len(parts) != num_layers:
        raise ConfigError(f"parts: give one mapping for each of {num_layers} layers, not {len(parts)}")
    return [{name: _checked(name, part) for name, part in layer.items()} for layer in parts]


def _keys(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def _checked(name: str, part: object) -> StateSpec:
    """Return a part that a pool can hold and reset. Errors: ConfigError."""
    try:
        shape, dtype, initial, kept, holds_positions = StateSpec(*part)  # type: ignore[misc]
        sizes = tuple(count(size, f"shape of {name}", low=0) for size in shape)
    except TypeError:
        raise ConfigError(f"parts[{name!r}]: give StateSpec(shape, dtype, initial, kept)") from None
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
    if kept is not None and count(kept, f"kept of {name}", low=0) > (sizes[0] if sizes else 0):
        raise ConfigError(f"kept of {name}: give at most the number of its cells, not {kept}")
    if holds_positions and (kept is None or len(sizes) != 1 or dtype != torch.int32):
        raise ConfigError(f"holds_positions of {name}: give one int32 per cell, and the number of cells kept")
    return StateSpec(sizes, dtype, initial, kept, bool(holds_positions))
