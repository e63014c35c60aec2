"""What one layer keeps a request, of a fixed size: `StateCachePool`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagoda import kernels
from pagoda.compat.hybrid.schema import LayerCacheSchema
from pagoda.errors import ArgumentError, ConfigError
from pagoda.kernels.entries import Ring
from pagoda.layout._numbers import count, integer
from pagoda.pools import StatePool
from pagoda.pools._arguments import layer_number, one_id, refuse_capture

__all__ = ["StateCachePool", "StateSnapshot"]


@dataclass(frozen=True)
class StateSnapshot:
    """A copy of one request's state in one layer: `parts` by name, on the pool's device.

    `length` is None for all rows as they lie in the pool; else the tokens that a resume begins at, and parts
    hold only the rows that it needs, oldest first."""

    length: int | None
    parts: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts. O(parts)."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


class StateCachePool:
    """The window of each request in a ring, and the rows of the layer's compressors.

    Slots are 1 … max_concurrent_requests, 0 is padding; all begin as after `reset_slot`. The token at
    position p lies in row p % ring of the window and in row p % rows of a compressor::

        window                        [N + 1, ring, bytes of an entry's data] uint8
        window_scales                 [N + 1, ring, bytes of its scales] uint8, or None where it has none
        positions                     [N + 1, ring] int32: which position a row of the window holds, −1 none
        main_values, main_scores      [N + 1, rows, channels] float32, or None without a compressor
        index_values, index_scores    the same of the indexer, or None

    Errors: ConfigError.
    """

    def __init__(
        self, schema: LayerCacheSchema, max_concurrent_requests: int, device: torch.device | str = "cuda"
    ) -> None:
        if not isinstance(schema, LayerCacheSchema):
            raise ConfigError(f"schema: give a LayerCacheSchema, not {type(schema).__name__}")
        rows = count(max_concurrent_requests, "max_concurrent_requests", low=0)
        group = schema.layout().state_group
        assert group is not None
        self._become(schema, StatePool.from_group(group, rows, device), 0, threading.RLock())

    @property
    def ring(self) -> Ring:
        """The windows of all rows, as kernels take them. O(1)."""
        return Ring(self.window, self.window_scales, self.positions)

    @classmethod
    def of_layer(
        cls, schema: LayerCacheSchema, pool: StatePool, layer: int, lock: threading.RLock
    ) -> StateCachePool:
        """The face of one layer of a pool that holds several: nothing is made. Its calls take turns under
        `lock`. O(parts). Errors: ArgumentError."""
        made = cls.__new__(cls)
        made._become(schema, pool, layer_number(layer, pool.num_layers), lock)
        return made

    def _become(self, schema: LayerCacheSchema, pool: StatePool, layer: int, lock: threading.RLock) -> None:
        self.schema, self.max_concurrent_requests, self.device = schema, pool.num_rows, pool.device
        self._pool, self._lock = pool, lock
        self._parts = parts = pool.layer(layer)
        self._regions = pool.regions(layer)
        self.window, self.window_scales = parts["window"], parts.get("window_scales")
        self.positions = parts["positions"]
        self.main_values, self.main_scores = parts.get("main_values"), parts.get("main_scores")
        self.index_values, self.index_scores = parts.get("index_values"), parts.get("index_scores")

    def reset_slot(self, slot: int) -> None:
        """Give a row what a new request begins with: values 0, scores −inf, positions −1.

        Cost: one launch, no synchronisation; it can be captured once a row was reset. Errors:
        OutOfRangeError, ArgumentError.
        """
        self._reset(self._slot(slot))

    def _reset(self, at: int) -> None:
        with self._lock:
            kernels.fill_rows(self._regions, at)

    def snapshot(self, slot: int, length: int | None = None) -> StateSnapshot:
        """A copy of a request's state, exact, on the device; the caller's own.

        Without `length` all of it, as it is: preemption. With it, a multiple of block_tokens, only what a
        resume at so many tokens reads: the last window − 1 rows of the window and, where blocks overlap, the
        last `ratio` rows of the compressors: prefix reuse. The request has these tokens and at most
        `unaccepted` − 1 more. Cost: one launch a part, two where its rows wrap around; no synchronisation.
        Errors: OutOfRangeError, ArgumentError; CaptureError.
        """
        at = self._slot(slot)
        tokens = None if length is None else self._length(length)
        refuse_capture(self.device, "snapshot")
        # Also what is copied under inference_mode may be written outside of it.
        with self._lock, torch.inference_mode(False):
            if tokens is None:
                return StateSnapshot(None, {name: part[at].clone() for name, part in self._parts.items()})
            parts = {}
            for name, begin in self._needed(tokens).items():
                runs = [self._parts[name][at, place] for place, _ in self._runs(name, begin, tokens)]
                parts[name] = torch.cat(runs) if runs else self._parts[name][at, :0].clone()
            return StateSnapshot(tokens, parts)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Give a row the state of a snapshot, of this layer or one of its kind; it stays as it is.

        What a snapshot at a length does not hold is as after `reset_slot`. Cost: one launch a part, and as
        many as `reset_slot` and `snapshot` for one at a length; no synchronisation. Errors: OutOfRangeError;
        ArgumentError for another layer kind's, or one on another device.
        """
        at = self._slot(slot)
        self._require(snapshot)
        with self._lock, torch.no_grad():
            if snapshot.length is None:
                for name, kept in snapshot.parts.items():
                    self._parts[name][at].copy_(kept)
                return
            self._reset(at)
            for name, begin in self._needed(snapshot.length).items():
                for place, rows in self._runs(name, begin, snapshot.length):
                    self._parts[name][at, place].copy_(snapshot.parts[name][rows])
            begin = self._needed(snapshot.length)["window"]
            for place, rows in self._runs("window", begin, snapshot.length):
                torch.arange(begin + rows.start, begin + rows.stop, out=self.positions[at, place])

    def _needed(self, length: int) -> dict[str, int]:
        """The first position that a resume at `length` reads, of each part that it reads. Positions of the
        window are not among them: they follow from the length."""
        first = max(0, length - self.schema.window + 1)
        needed = {name: first for name in self._parts if name in ("window", "window_scales")}
        if self.schema.overlap:
            compressors = (name for name in self._parts if name not in {*needed, "positions"})
            needed |= {name: max(0, length - self.schema.ratio) for name in compressors}
        return needed

    def _runs(self, name: str, begin: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Where positions [begin, end) lie in a part, and in a copy of just these: one run, or two."""
        size = self._parts[name].shape[1]
        at = begin
        while at < end:
            place = at % size
            stop = min(end, at + size - place)
            yield slice(place, place + stop - at), slice(at - begin, stop - begin)
            at = stop

    def _slot(self, slot: Any) -> int:
        return one_id(slot, "slot", 1, self.max_concurrent_requests, "rows")

    def _length(self, length: Any) -> int:
        tokens = integer(length, "length", 0, ArgumentError)
        if tokens % self.schema.block_tokens or tokens >= 2**31:
            raise ArgumentError(
                f"length: requests resume at multiples of {self.schema.block_tokens} tokens below 2^31, "
                f"not at {min(tokens, 10**18)}"
            )
        return tokens

    def _require(self, snapshot: Any) -> None:
        if not isinstance(snapshot, StateSnapshot):
            raise ArgumentError(f"snapshot: give what `snapshot` gave, not {type(snapshot).__name__}")
        wanted = {name: tuple(part.shape[1:]) for name, part in self._parts.items()}
        if snapshot.length is not None:
            length = self._length(snapshot.length)
            needed = self._needed(length)
            wanted = {name: (length - begin, *wanted[name][1:]) for name, begin in needed.items()}
        if set(snapshot.parts) != set(wanted):
            raise ArgumentError(
                f"snapshot: it has {', '.join(snapshot.parts)}, and layer {self.schema.layer_idx} keeps "
                f"{', '.join(wanted)}"
            )
        for name, shape in wanted.items():
            kept = snapshot.parts[name]
            if not isinstance(kept, torch.Tensor) or kept.layout != torch.strided:
                raise ArgumentError(f"snapshot: its {name} is no dense tensor")
            found = (tuple(kept.shape), kept.dtype, kept.device)
            if found != (shape, self._parts[name].dtype, self.device):
                raise ArgumentError(
                    f"snapshot: its {name} is {found}, not {(shape, self._parts[name].dtype, self.device)}"
                )

    def memory_bytes(self) -> int:
        """Bytes of this layer's states, row 0 included. O(parts)."""
        return sum(part.numel() * part.element_size() for part in self._parts.values())

    def check(self) -> None:
        """Verify invariants 6 and 7. O(parts). Errors: InvariantError."""
        self._pool.check()
