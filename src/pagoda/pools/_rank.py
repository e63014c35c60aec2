"""The tensors of one rank, and the carrying out of deltas. In: a layout, deltas; out: pages and tables.

A manager plans for all ranks at once; each rank has one `Pools` and applies every delta to it, in order.
Owns the pools and tables of all groups. Invariant 6.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from pagoda import kernels
from pagoda._native import DeltaReader
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import Layout, PagedGroup
from pagoda.layout._numbers import count
from pagoda.manager import Delta
from pagoda.pools._arguments import filled, refuse_capture, resolve_device
from pagoda.pools._kv import TokenPool
from pagoda.pools._staging import Inbox, Staging, current_stream, staging_of

__all__ = ["Pools"]


class Pools:
    """Pages and tables of all groups on one device, which follow a manager's deltas.

    `layout` is the rank's (`layout.shard(n)`); `capacity`, `num_rows` and `max_tokens` are those of the
    manager, so that its ids and places mean the same on every rank. `pools[name]` is a group's TokenPool,
    `tables[name]` its table, [num_rows + 1, max_pages] int32: row 0 is padding, id 0 no page, entries behind
    a row's length are whatever was there before. Tables are views of `flat_table`, one after the other in
    the order of the groups, so that the writes of a delta are one launch. Tensors begin as zeros and never
    move.

    `k_scale` and `v_scale` have the scales of fp8 groups, by name. Buffers cannot be supplied.

    Errors: ConfigError, also for groups that a TokenPool does not hold and for layouts with states.
    """

    def __init__(
        self,
        layout: Layout,
        capacity: Mapping[str, int],
        *,
        num_rows: int,
        max_tokens: int,
        device: torch.device | str = "cuda",
        k_scale: Mapping[str, Sequence[float]] | None = None,
        v_scale: Mapping[str, Sequence[float]] | None = None,
        staging: Staging | None = None,
    ) -> None:
        groups = _groups_of(layout)
        names = [group.name for group in groups]
        if not isinstance(capacity, Mapping) or set(capacity) != set(names):
            raise ConfigError(f"capacity: give the pages of each group: {', '.join(names)}")
        self.layout = layout
        self.num_rows = count(num_rows, "num_rows")
        self.max_tokens = count(max_tokens, "max_tokens")
        self.device = resolve_device(device)
        shapes = [(self.num_rows + 1, -(-self.max_tokens // group.page_tokens)) for group in groups]
        sizes = [rows * columns for rows, columns in shapes]
        if sum(sizes) >= 2**31:
            raise ConfigError(f"tables of {sum(sizes)} entries pass 2^31: give fewer rows or tokens")
        self._staging = staging_of(self.device, staging)
        k_scales, v_scales = _scales_of(k_scale, names, "k_scale"), _scales_of(v_scale, names, "v_scale")
        self.pools = {
            group.name: TokenPool.from_group(
                group,
                count(capacity[group.name], f"capacity of {group.name}", low=0),
                self.device,
                k_scale=k_scales.get(group.name),
                v_scale=v_scales.get(group.name),
                staging=self._staging,
            )
            for group in groups
        }
        self.flat_table = filled((sum(sizes),), torch.int32, self.device)
        with torch.inference_mode(False):  # also where pools are made under it, they are written outside
            parts = self.flat_table.split(sizes)
            self.tables = {
                name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)
            }
        self._at = self._addresses()
        self._in_order = tuple(self.pools.values())
        self._inbox = Inbox(self._staging)
        self._reader = DeltaReader(
            [
                (name, columns, pool.num_pages)
                for name, (_, columns), pool in zip(names, shapes, self._in_order, strict=True)
            ],
            self.num_rows,
        )
        self._step = 0
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> TokenPool:
        if name not in self.pools:
            names = ", ".join(self.pools)
            raise ArgumentError(f"name: there is no group {str(name)[:40]!r}, only {names}")
        return self.pools[name]

    def __repr__(self) -> str:
        pages = ", ".join(f"{pool.num_pages} {name} pages" for name, pool in self.pools.items())
        return f"Pools({pages}, {self.num_rows} rows on {self.device}, at step {self._step})"

    @property
    def step(self) -> int:
        """The step of the last delta applied, 0 before the first. O(1)."""
        return self._step

    def apply(self, delta: Delta, stream: torch.cuda.Stream | None = None) -> None:
        """Carry out one step's page copies and table writes, on `stream` or the current one.

        Every delta of the manager, once, in the order of `take_delta`. It is looked through on the host
        before anything changes. Page copies read all sources before a target is written.

        What the stream runs next sees all of it, and what it still runs of earlier steps comes before: on one
        stream nobody has to wait. Another stream serves too, because rows and pages come back only behind
        fences: nothing that a running step reads is written. It has to wait for the steps that computed the
        sources of page copies, and the next step for this call, by events. Several threads may call.

        Cost: on CUDA one asynchronous copy of the delta's bytes, a launch for all table writes, and one for
        each group with page copies (two, and room for them, where a page is source and target); nothing for
        an empty delta. Nothing else is made on the device once a delta as large has come on the stream. No
        synchronisation. Errors: ArgumentError for a delta out of order, of other groups, with a target that
        stands twice, or for a stream of another device; OutOfRangeError for a place or page that is not
        there; CaptureError.
        """
        if not isinstance(delta, Delta):
            raise ArgumentError(f"delta: give what Manager.take_delta gave, not {type(delta).__name__}")
        with self._lock, self._on(stream):
            packed = np.ascontiguousarray(delta.packed, dtype=np.int32)
            num_writes, copies = self._reader.read(packed, delta.num_groups, self._step + 1)
            refuse_capture(self.device, "apply")
            body = packed[3 + len(self.pools) :]
            if body.size:
                sent = self._inbox.receive(body)
                for group, begin, n, is_disjoint in copies:
                    sources, targets = sent[begin : begin + n], sent[begin + n : begin + 2 * n]
                    self._in_order[group].copy_pages(sources, targets, is_disjoint=is_disjoint)
                if num_writes:
                    kernels.write_table(sent, num_writes, self.flat_table)
            self._step += 1

    def reset(self) -> None:
        """Begin again at step 1, as the manager does after its `reset`. O(1).

        Tables and pages keep what they hold: no row and no hit of the manager leads there any more.
        """
        with self._lock:
            self._step = 0

    def memory_bytes(self) -> int:
        """Bytes of all pages and tables, padding included. O(groups)."""
        return sum(pool.memory_bytes() for pool in self.pools.values()) + self.flat_table.numel() * 4

    def check(self) -> None:
        """Verify invariant 6. O(layers). Errors: InvariantError."""
        if self._addresses() != self._at:
            raise InvariantError(6, "a table has moved")
        for pool in self.pools.values():
            pool.check()
        self._staging.check()

    def _addresses(self) -> list[int]:
        return [self.flat_table.data_ptr(), *(table.data_ptr() for table in self.tables.values())]

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Makes a stream of this device the current one, and the device, where they are not."""
        if stream is None:
            return kernels.on_device(self.device)
        if not isinstance(stream, torch.cuda.Stream) or stream.device != self.device:
            found = stream.device if isinstance(stream, torch.cuda.Stream) else type(stream).__name__
            wanted = (
                f"a torch.cuda.Stream of {self.device}" if self.device.type == "cuda" else "None on a CPU"
            )
            raise ArgumentError(f"stream: give {wanted}, not {found}")
        if stream.cuda_stream == current_stream(self.device.index):
            return kernels.on_device(self.device)
        return torch.cuda.stream(stream)


def _groups_of(layout: Any) -> tuple[PagedGroup, ...]:
    if not isinstance(layout, Layout):
        raise ConfigError(f"layout: give a Layout, not {type(layout).__name__}")
    if layout.state_group is not None:
        raise ConfigError("layout: it has states, and Pools hold paged groups only so far")
    if not layout.paged_groups:
        raise ConfigError("layout: it stores nothing")
    return layout.paged_groups


def _scales_of(scales: Any, names: list[str], name: str) -> Mapping[str, Sequence[float]]:
    if scales is None:
        return {}
    if not isinstance(scales, Mapping) or not set(scales) <= set(names):
        raise ConfigError(f"{name}: give scales by the name of a group: {', '.join(names)}")
    return scales
