"""The tensors of one rank, and the carrying out of deltas. In: a layout, deltas; out: pages, tables, batches.

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
from pagoda._native import Rank
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import Layout, PagedGroup
from pagoda.layout._numbers import count
from pagoda.manager import Delta
from pagoda.pools._arguments import filled, number, refuse_capture, resolve_device
from pagoda.pools._batch import Batch, BatchBuffers, Geometry, Sizes
from pagoda.pools._kv import TokenPool
from pagoda.pools._layer import Layer
from pagoda.pools._staging import Staging, current_stream, staging_of

__all__ = ["Pools"]

STEP_TOKENS = 8192  # tokens per step, where the caller does not say


class Pools:
    """Pages and tables of all groups on one device, which follow a manager's deltas.

    `layout` is the rank's (`layout.shard(n)`); `capacity`, `num_rows` and `max_tokens` are those of the
    manager, so that its ids and places mean the same on every rank. `pools[name]` is a group's TokenPool,
    `pools.layer(n)` a layer of the model, `tables[name]` a group's table, [num_rows + 1, max_pages] int32:
    row 0 is padding, id 0 is no page, and what stands behind a row's length is stale. Tables are views of
    `flat_table`, one after the other in the order of the groups, so that the writes of a delta are one
    launch. Tensors begin as zeros and never move.

    `max_step_tokens` is the most tokens that one step computes. `kernel_page_tokens` gives the page size of
    kernels by group, where it is smaller than the group's; `max_indices` the room for page indices by
    group, by default for all rows at their longest; `buffers` the caller's own tensors for a batch, by name
    (`positions`, `full.slot_mapping`, …). `k_scale` and `v_scale` have the scales of fp8 groups, by name.

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
        max_step_tokens: int | None = None,
        kernel_page_tokens: Mapping[str, int] | None = None,
        max_indices: Mapping[str, int] | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        k_scale: Mapping[str, Sequence[float]] | None = None,
        v_scale: Mapping[str, Sequence[float]] | None = None,
        staging: Staging | None = None,
    ) -> None:
        groups = _groups_of(layout)
        names = [group.name for group in groups]
        if not isinstance(capacity, Mapping) or set(capacity) != set(names):
            raise ConfigError(f"capacity: give the number of pages of each group: {', '.join(names)}")
        self.layout = layout
        self.num_rows = count(num_rows, "num_rows")
        self.max_tokens = count(max_tokens, "max_tokens")
        self.max_step_tokens = (
            max(self.num_rows, min(self.max_tokens, STEP_TOKENS))
            if max_step_tokens is None
            else count(max_step_tokens, "max_step_tokens")
        )
        self.device = resolve_device(device)
        geometries = _geometries(
            groups, self.num_rows, self.max_tokens, kernel_page_tokens or {}, max_indices or {}
        )
        pages = [count(capacity[name], f"capacity of {name}", low=0) for name in names]
        self._rank = Rank(
            [
                (g.group.name, n, g.group.page_tokens, g.kernel_page_tokens, g.window or None, g.max_indices)
                for g, n in zip(geometries, pages, strict=True)
            ],
            self.num_rows,
            self.max_tokens,
        )
        self._staging = staging_of(self.device, staging)
        k_scales, v_scales = _by_group(k_scale, names, "k_scale"), _by_group(v_scale, names, "v_scale")
        self.pools = {
            group.name: TokenPool.from_group(
                group,
                n,
                self.device,
                k_scale=k_scales.get(group.name),
                v_scale=v_scales.get(group.name),
                staging=self._staging,
            )
            for group, n in zip(groups, pages, strict=True)
        }
        shapes = [(self.num_rows + 1, geometry.max_pages) for geometry in geometries]
        sizes = [rows * columns for rows, columns in shapes]
        self.flat_table = filled((sum(sizes),), torch.int32, self.device)
        with torch.inference_mode(False):  # also where pools are made under it, they are written outside
            parts = self.flat_table.split(sizes)
            self.tables = {
                name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)
            }
        self._buffers = BatchBuffers(
            geometries, self.num_rows, self.max_step_tokens, self.device, dict(buffers or {})
        )
        self._layers = _layers_of(layout, self.pools)
        self._at = self._addresses()
        self._in_order = tuple(self.pools.values())
        # The last delta applied, what was found in it, and where it was sent.
        self._applied: tuple[Delta, Any, torch.Tensor | None] | None = None
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # where deltas are sent to
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

    def layer(self, n: int) -> Layer:
        """Layer n of the model: its group, its place in the group's pool, and its buffers.

        A layer that shares another's keys and values has that one's. Errors: ArgumentError for a number that
        the model has not, or a layer that keeps no pages.
        """
        at = number(n, "n")
        if at >= len(self._layers):
            raise ArgumentError(
                f"n: the model has layers 0 to {len(self._layers) - 1}, not {min(at, 10**18)}"
            )
        found = self._layers[at]
        if found is None:
            raise ArgumentError(f"n: layer {at} keeps no pages")
        return found

    def apply(self, delta: Delta, stream: torch.cuda.Stream | None = None) -> None:
        """Carry out one step's page copies and table writes, on `stream` or the current one.

        Every delta of the manager, once, in the order of `Manager.plan`. It is looked through on the host
        before anything changes. Page copies read all sources before a target is written.

        What the stream runs next sees all of it, and what it still runs of earlier steps comes before: on one
        stream nobody has to wait. Another stream serves too, because rows and pages come back only behind
        fences: nothing that a running step reads is written. It has to wait for the steps that computed the
        sources of page copies, and the next step for this call, by events. Several threads may call.

        Cost: on CUDA one asynchronous copy of the delta, one launch for all table writes, and one for each
        group with page copies (two, and memory for the pages, where a page is source and target). Nothing
        else is allocated on the device once a delta as large was applied on the stream. No synchronisation.
        Errors: ArgumentError for a delta out of order, of other groups, with a page that is copied to twice,
        or for a stream of another device; OutOfRangeError for a row, place or page that does not exist;
        CaptureError.
        """
        if not isinstance(delta, Delta):
            raise ArgumentError(f"delta: give what Manager.plan returned, not {type(delta).__name__}")
        with self._lock, self._on(stream):
            packed = np.ascontiguousarray(delta.packed, dtype=np.int32)
            found = self._rank.check(packed, self._step + 1)
            refuse_capture(self.device, "apply")
            num_rows, _, _, _, _, num_writes, places, page_ids, copies = found
            sent = None
            if num_writes or copies or num_rows:
                sent = self._staging.post(packed, self._rooms)
                for group, sources, targets, n, is_disjoint in copies:
                    self._in_order[group].copy_pages(
                        sent[sources : sources + n], sent[targets : targets + n], is_disjoint=is_disjoint
                    )
                if num_writes:
                    kernels.write_table(sent, places, page_ids, num_writes, self.flat_table)
            self._rank.follow(packed)
            self._applied = delta, found, sent
            self._step += 1

    def batch(self, delta: Delta, *, pad_to: int | tuple[int, int] | None = None) -> Batch:
        """What kernels read about the step of a delta that was applied last, in buffers that never move.

        `pad_to` is the least number of rows and of tokens that the tensors have, or a pair of both: what a
        graph was captured for. On the stream that the delta was applied on.

        Cost: on CUDA two launches for all groups; nothing is allocated, nothing waits, and the numbers are
        there for what the stream runs next. Errors: ArgumentError for a delta that is not the last one
        applied, or more rows or tokens than the pools were made for; CaptureError.
        """
        with self._lock:
            if not self._is_last(delta):
                last = "none was applied yet" if self._applied is None else f"that was step {self._step}"
                raise ArgumentError(f"delta: give the one that was applied last ({last})")
            assert self._applied is not None
            _, found, sent = self._applied
            num_rows, num_tokens, rows, lengths, starts, *_ = found
            padded = self._padded(num_rows, num_tokens, pad_to)
            refuse_capture(self.device, "batch")
            self._buffers.fill_device(
                delta.packed, sent, (num_rows, rows, lengths, starts), padded, self.flat_table, self._rank
            )
            return Batch(self._buffers, padded, num_rows, num_tokens, delta, self._rank, self._is_last)

    def _padded(self, num_rows: int, num_tokens: int, pad_to: Any) -> Sizes:
        if num_tokens > self.max_step_tokens:
            raise ArgumentError(
                f"delta: its step computes {num_tokens} tokens, more than these pools' max_step_tokens = "
                f"{self.max_step_tokens}"
            )
        if pad_to is None:
            return Sizes(num_rows, num_tokens)
        pair = pad_to if isinstance(pad_to, tuple) else (pad_to, pad_to)
        if len(pair) != 2:
            raise ArgumentError("pad_to: give a number, or a pair of rows and tokens")
        least_rows, least_tokens = (number(each, "pad_to") for each in pair)
        padded = Sizes(max(num_rows, least_rows), max(num_tokens, least_tokens))
        if padded.rows > self.num_rows or padded.tokens > self.max_step_tokens:
            raise ArgumentError(
                f"pad_to: {padded.rows} rows and {padded.tokens} tokens are more than these pools' "
                f"{self.num_rows} rows and {self.max_step_tokens} tokens per step"
            )
        return padded

    def _is_last(self, delta: Delta) -> bool:
        return self._applied is not None and self._applied[0] is delta

    def reset(self, step: int = 0) -> None:
        """Follow the manager from behind this step on: from step 1 after its `reset`.

        Where no row runs any more, a rank that has missed deltas can join again so, too. Tables and pages
        keep what they hold: no row and no hit of the manager leads there. Errors: ArgumentError.
        """
        with self._lock:
            self._step, self._applied = number(step, "step"), None

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor on the device: pages, tables and the buffers of batches."""
        pages = [buffer for pool in self.pools.values() for buffer in (*pool.k_buffer, *pool.v_buffer)]
        return [*pages, self.flat_table, *self._buffers.tensors.values()]

    def memory_bytes(self) -> int:
        """Bytes of all pages, tables and batch buffers, padding included."""
        pages = sum(pool.memory_bytes() for pool in self.pools.values())
        return pages + self.flat_table.nbytes + self._buffers.memory_bytes()

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if self._addresses() != self._at:
            raise InvariantError(6, "a table has moved")
        for pool in self.pools.values():
            pool.check()
        self._buffers.check()
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
        raise ConfigError("layout: it has states, and Pools hold paged groups only")
    if not layout.paged_groups:
        raise ConfigError("layout: it stores nothing")
    return layout.paged_groups


def _by_group(given: Any, names: list[str], name: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        raise ConfigError(f"{name}: give a mapping by group: {', '.join(names)}")
    return given


def _geometries(
    groups: Sequence[PagedGroup],
    num_rows: int,
    max_tokens: int,
    kernel_page_tokens: Mapping[str, int],
    max_indices: Mapping[str, int],
) -> list[Geometry]:
    names = [group.name for group in groups]
    sizes = _by_group(kernel_page_tokens, names, "kernel_page_tokens")
    limits = _by_group(max_indices, names, "max_indices")
    found = []
    for group in groups:
        size = count(sizes.get(group.name, group.page_tokens), f"kernel_page_tokens of {group.name}")
        if group.page_tokens % size:
            raise ConfigError(
                f"kernel_page_tokens of {group.name}: {size} does not divide its pages of "
                f"{group.page_tokens} tokens"
            )
        max_pages = -(-max_tokens // group.page_tokens)
        width = max_pages * (group.page_tokens // size)
        most = count(limits.get(group.name, num_rows * width), f"max_indices of {group.name}")
        if num_rows * width > 2**31 - 1 or most > 2**31 - 1:
            raise ConfigError(
                f"page tables of {num_rows} rows of {max_tokens} tokens exceed 2^31 entries: give fewer rows "
                "or tokens"
            )
        found.append(Geometry(group, max_pages, size, most))
    return found


def _layers_of(layout: Layout, pools: Mapping[str, TokenPool]) -> list[Layer | None]:
    places = {
        layer: (group, index) for group in layout.paged_groups for index, layer in enumerate(group.layers)
    }
    found: list[Layer | None] = []
    for layer in range(len(layout.layers)):
        source = layout.source(layer)
        place = places.get(source)
        found.append(place and Layer(layer, source, place[0], pools[place[0].name], place[1]))
    return found
