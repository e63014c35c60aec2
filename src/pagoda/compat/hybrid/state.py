"""The state that one layer keeps per request, of fixed size: `StateCachePool`, a layer of `Pools.states`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagoda import kernels
from pagoda.compat.hybrid.schema import LayerCacheSchema
from pagoda.errors import ArgumentError, ConfigError
from pagoda.layout._numbers import count, integer
from pagoda.pools import Pools
from pagoda.pools._arguments import one_id, refuse_capture

__all__ = ["StateCachePool", "StateSnapshot"]


@dataclass(frozen=True)
class StateSnapshot:
    """A copy of one request's state in one layer: `parts` by name, on the pool's device.

    If `length` is None, parts have all cells as in the pool. Otherwise a request resumes at `length` tokens,
    and parts have only the cells that it needs, oldest first."""

    length: int | None
    parts: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


class StateCachePool:
    """The window of each request as a ring, and the states of the layer's compressors.

    Slots are 1 … max_concurrent_requests, 0 is padding; all are reset at first. The token at position p is in
    cell p % ring of the window and in cell p % cells of a compressor::

        window                        [N + 1, ring, bytes of an entry's data] uint8
        window_scales                 [N + 1, ring, bytes of its scales] uint8, or None without scales
        positions                     [N + 1, ring] int32: the position in each cell; −1 if it is empty
        main_values, main_scores      [N + 1, cells, channels] float32, or None without a compressor
        index_values, index_scores    the same for the indexer, or None

    Errors: ConfigError.
    """

    def __init__(
        self, schema: LayerCacheSchema, max_concurrent_requests: int, device: torch.device | str = "cuda"
    ) -> None:
        if not isinstance(schema, LayerCacheSchema):
            raise ConfigError(f"schema: give a LayerCacheSchema, not {type(schema).__name__}")
        rows = count(max_concurrent_requests, "max_concurrent_requests")
        self._become(schema, schema.pools(rows, 0, device), 0, threading.RLock())

    @classmethod
    def of_layer(
        cls, schema: LayerCacheSchema, pools: Pools, layer: int, lock: threading.RLock
    ) -> StateCachePool:
        """Wrap one layer of the pools of a model, without allocating. `lock` serialises its calls. Errors:
        ArgumentError."""
        made = cls.__new__(cls)
        made._become(schema, pools, layer, lock)
        return made

    def _become(self, schema: LayerCacheSchema, pools: Pools, layer: int, lock: threading.RLock) -> None:
        states, group = pools.states, pools.layout.state_group
        assert states is not None
        assert group is not None
        self.schema, self.max_concurrent_requests, self.device = schema, pools.num_rows, pools.device
        self._pool, self._lock = states, lock
        self._parts = parts = dict(pools.layer(layer).state)
        self._specs = {part.name: part for part in schema.kind.state}
        self._regions = states.regions(group.layers.index(layer))
        self.window, self.window_scales = parts["window"], parts.get("window_scales")
        self.positions = parts["positions"]
        self.main_values, self.main_scores = parts.get("main_values"), parts.get("main_scores")
        self.index_values, self.index_scores = parts.get("index_values"), parts.get("index_scores")

    def reset_slot(self, slot: int) -> None:
        """Reset a slot to the state of a new request: values 0, scores −inf, positions −1.

        Cost: one launch, no synchronisation; it can be captured once a first call has compiled it. Errors:
        OutOfRangeError, ArgumentError.
        """
        self._reset(self._slot(slot))

    def _reset(self, at: int) -> None:
        with self._lock:
            kernels.fill_rows(self._regions, at)

    def snapshot(self, slot: int, length: int | None = None) -> StateSnapshot:
        """Return an exact copy of a request's state on the device, owned by the caller.

        Without `length`, copy all of it, for preemption. With it, a multiple of block_tokens, copy only what
        a resume at that many tokens reads, for prefix reuse: the last window − 1 cells of the window and,
        where blocks overlap, the last `ratio` cells of the compressors. The request must have these tokens
        and at most `unaccepted` − 1 more. Cost: one launch per part, two where its cells wrap around; no
        synchronisation. Errors: OutOfRangeError, ArgumentError; CaptureError.
        """
        at = self._slot(slot)
        tokens = None if length is None else self._length(length)
        refuse_capture(self.device, "snapshot")
        # The copies may be written outside of inference_mode even if made under it.
        with self._lock, torch.inference_mode(False):
            if tokens is None:
                return StateSnapshot(None, {name: part[at].clone() for name, part in self._parts.items()})
            parts = {}
            for name, begin in self._needed(tokens).items():
                runs = [self._parts[name][at, place] for place, _ in self._runs(name, begin, tokens)]
                parts[name] = torch.cat(runs) if runs else self._parts[name][at, :0].clone()
            return StateSnapshot(tokens, parts)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Copy a snapshot of this layer, or of one of the same kind, into a slot.

        Cells that a snapshot at a length does not have are reset. Cost: one launch per part; for a snapshot
        at a length, the launches of `reset_slot` and `snapshot`; no synchronisation. Errors: OutOfRangeError;
        ArgumentError for a snapshot of another kind of layer or on another device.
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
                for place, cells in self._runs(name, begin, snapshot.length):
                    self._parts[name][at, place].copy_(snapshot.parts[name][cells])
            begin = self._needed(snapshot.length)["window"]
            for place, cells in self._runs("window", begin, snapshot.length):
                torch.arange(begin + cells.start, begin + cells.stop, out=self.positions[at, place])

    def _needed(self, length: int) -> dict[str, int]:
        """Return the first position that a resume at `length` reads, for each part that it reads.

        Positions are not among them: they follow from the length."""
        return {
            name: max(0, length - part.kept)
            for name, part in self._specs.items()
            if part.kept and not part.holds_positions
        }

    def _runs(self, name: str, begin: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield where positions [begin, end) are in a part, and in a copy of just these: one or two runs."""
        size = self._parts[name].shape[1]
        at = begin
        while at < end:
            place = at % size
            stop = min(end, at + size - place)
            yield slice(place, place + stop - at), slice(at - begin, stop - begin)
            at = stop

    def _slot(self, slot: Any) -> int:
        return one_id(slot, "slot", 1, self.max_concurrent_requests, "slots")

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
            raise ArgumentError(f"snapshot: give a StateSnapshot, not {type(snapshot).__name__}")
        wanted = {name: tuple(part.shape[1:]) for name, part in self._parts.items()}
        if snapshot.length is not None:
            length = self._length(snapshot.length)
            needed = self._needed(length)
            wanted = {name: (length - begin, *wanted[name][1:]) for name, begin in needed.items()}
        if set(snapshot.parts) != set(wanted):
            raise ArgumentError(
                f"snapshot: it has {', '.join(snapshot.parts)}, but layer {self.schema.layer_idx} needs "
                f"{', '.join(wanted)}"
            )
        for name, shape in wanted.items():
            kept = snapshot.parts[name]
            if not isinstance(kept, torch.Tensor) or kept.layout != torch.strided:
                raise ArgumentError(f"snapshot: its {name} is not a dense tensor")
            found = (tuple(kept.shape), kept.dtype, kept.device)
            if found != (shape, self._parts[name].dtype, self.device):
                raise ArgumentError(
                    f"snapshot: its {name} is {found}, not {(shape, self._parts[name].dtype, self.device)}"
                )

    def memory_bytes(self) -> int:
        """Bytes of this layer's states, slot 0 included."""
        return sum(part.numel() * part.element_size() for part in self._parts.values())

    def check(self) -> None:
        """Verify invariants 6 and 7. Errors: InvariantError."""
        self._pool.check()
