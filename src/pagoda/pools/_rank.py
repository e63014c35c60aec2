"""The tensors of one rank, which carries out deltas. In: a layout, deltas; out: pages, states, batches.

A manager plans for all ranks at once; each rank has one `Pools` and applies every delta to it, in order.
Owns the pools and tables of all groups, the states of rows and the checkpoints. Invariant 6.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pagoda import kernels
from pagoda._native import Rank
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import Layout, PagedGroup, RingWindow
from pagoda.layout._numbers import count
from pagoda.layout._work import WORKERS, work_target
from pagoda.manager import Delta
from pagoda.manager._manager import read_capacity
from pagoda.pools._arguments import filled, number, refuse_capture, resolve_device
from pagoda.pools._batch import Batch, BatchBuffers, Geometry, Parts, Sizes
from pagoda.pools._checkpoints import CheckpointPool
from pagoda.pools._entries import EntryPool
from pagoda.pools._kv import TokenPool
from pagoda.pools._layer import Layer
from pagoda.pools._layer_step import LayerEntries
from pagoda.pools._staging import Staging, current_stream, staging_of
from pagoda.pools._state import StatePool

__all__ = ["Pools"]

STEP_TOKENS = 8192  # default of max_step_tokens


class Pools:
    """Pages, states and tables of all groups on one device, which follow a manager's deltas.

    `layout` is the rank's (`layout.shard(n)`); `capacity`, `num_rows` and `max_tokens` are those of the
    manager, so that its ids and places mean the same on every rank. `pools[name]` is a group's pool: a
    TokenPool for keys and values or latents by slot; an EntryPool for compressed entries, quantised latents,
    and latents with indexer keys. `pools.layer(n)` is a layer of the model, `tables[name]` a group's table,
    [num_rows + 1, max_pages] int32: row 0 is padding, id 0 means no page, and places beyond a row's length
    are stale. Tables are views of `flat_table`, one after the other in the order of the groups, so that one
    launch makes all writes of a delta. Tensors of pages and tables are zeros at first, states those of new
    requests; none ever moves.

    If the layout has states, `capacity["checkpoint"]` is the number of checkpoints, possibly 0, and `states`
    and `checkpoints` are their pools; otherwise both are None. The state of row r is state r, so
    `capacity["state"]` may be omitted; it is at least num_rows.

    `max_step_tokens` is the most tokens that one step computes; with 0, no batch can be made, and there are
    no buffers for batches. These arguments are mappings by group name:
    `kernel_page_tokens`, the page size of kernels where it is smaller than the group's; `max_indices`, the
    most page indices of a batch, by default enough for all rows at their longest; `k_scale` and `v_scale`,
    the scales of fp8 groups. `workers` is the manager's: how many programs of attention the device runs at
    once; 0 for batches without a work list. `buffers` has the caller's own tensors for batches by name
    (`positions`, `full.slot_mapping`, …).

    Errors: ConfigError.
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
        workers: int = WORKERS,
    ) -> None:
        groups = _groups_of(layout)
        names = [group.name for group in groups]
        self.layout = layout
        self.num_rows = count(num_rows, "num_rows")
        num_checkpoints = read_capacity(layout, capacity, self.num_rows)
        self.max_tokens = count(max_tokens, "max_tokens")
        self.max_step_tokens = (
            max(self.num_rows, min(self.max_tokens, STEP_TOKENS))
            if max_step_tokens is None
            else count(max_step_tokens, "max_step_tokens", low=0)
        )
        self.device = resolve_device(device)
        geometries = _geometries(
            groups, self.num_rows, self.max_tokens, kernel_page_tokens or {}, max_indices or {}, workers
        )
        pages = [count(capacity[name], f"capacity of {name}", low=0) for name in names]
        self._rank = Rank(
            [
                (
                    g.group.name,
                    n,
                    g.group.page_tokens,
                    g.kernel_page_tokens,
                    g.window or None,
                    g.max_indices,
                    g.target,
                )
                for g, n in zip(geometries, pages, strict=True)
            ],
            self.num_rows,
            self.max_tokens,
            num_checkpoints,
        )
        self._staging = staging_of(self.device, staging)
        k_scales, v_scales = _by_group(k_scale, names, "k_scale"), _by_group(v_scale, names, "v_scale")
        self.pools = {
            group.name: self._pool_of(group, n, k_scales.get(group.name), v_scales.get(group.name))
            for group, n in zip(groups, pages, strict=True)
        }
        self.states: StatePool | None = None
        self.checkpoints: CheckpointPool | None = None
        if layout.state_group is not None and num_checkpoints is not None:
            self.states = StatePool.from_group(
                layout.state_group, self.num_rows, self.device, staging=self._staging
            )
            self.checkpoints = CheckpointPool(self.states, num_checkpoints, staging=self._staging)
        shapes = [(self.num_rows + 1, geometry.max_pages) for geometry in geometries]
        sizes = [rows * columns for rows, columns in shapes]
        # Without groups, one place that kernels of batches may read.
        self.flat_table = filled((max(1, sum(sizes)),), torch.int32, self.device)
        with torch.inference_mode(False):  # tables are written outside of it
            parts = self.flat_table.split(sizes) if sizes else ()
            self.tables = {
                name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)
            }
        max_rows = self.num_rows if self.max_step_tokens else 0
        self._buffers = BatchBuffers(
            layout, geometries, max_rows, self.max_step_tokens, self.device, dict(buffers or {})
        )
        self._layers = [self._make_layer(number) for number in range(len(layout.layers))]
        self._at = self._addresses()
        self._in_order = tuple(self.pools.values())
        # The delta that was applied last, what was found in it, and its copy on the device.
        self._applied: tuple[Delta, Any, torch.Tensor | None] | None = None
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # device memory for deltas
        self._step = 0
        self._saved_step = 0  # the step of the last delta whose saves were carried out
        self._lock = threading.RLock()

    def _pool_of(
        self, group: PagedGroup, num_pages: int, k_scale: Any, v_scale: Any
    ) -> TokenPool | EntryPool:
        staging = self._staging
        if TokenPool.can_hold(group):
            return TokenPool.from_group(
                group, num_pages, self.device, k_scale=k_scale, v_scale=v_scale, staging=staging
            )
        for given, name in ((k_scale, "k_scale"), (v_scale, "v_scale")):
            if given is not None:
                raise ConfigError(f"{name}: group {group.name} stores entries, which have their own scales")
        return EntryPool.from_group(group, num_pages, self.device, staging=staging)

    def _make_layer(self, layer: int) -> Layer | None:
        source, states = self.layout.source(layer), self.layout.state_group
        place = next(
            (
                (group, self.pools[group.name], group.layers.index(source))
                for group in self.layout.paged_groups
                if source in group.layers
            ),
            None,
        )
        state: dict[str, torch.Tensor] = {}
        if self.states is not None and states is not None and layer in states.layers:
            state = self.states.layer(states.layers.index(layer))
        if place is None and not state:
            return None
        return Layer(self.layout, layer, source, place, state, self._entries_of(layer, place, state))

    def _entries_of(
        self,
        layer: int,
        place: tuple[PagedGroup, TokenPool | EntryPool, int] | None,
        state: Mapping[str, torch.Tensor],
    ) -> LayerEntries | None:
        """Return the entries of a layer, None without entries and without a window in a ring."""
        ring = next((kind for kind in self.layout.layers[layer] if isinstance(kind, RingWindow)), None)
        name, window = f"layer {layer}", 0 if ring is None else ring.window
        if place is not None and isinstance(place[1], EntryPool):
            group, pool, index = place[0], place[1], place[2]
            entry, *more = group.storage.entries
            return LayerEntries(
                name,
                self.device,
                entry,
                more[0] if more else None,
                group.storage.ratio,
                group.entries_per_page,
                window,
                pool.layer(index),
                self.tables[group.name],
                state,
            )
        return (
            None if ring is None else LayerEntries(name, self.device, ring.entry, window=window, state=state)
        )

    def __getitem__(self, name: str) -> TokenPool | EntryPool:
        if name not in self.pools:
            names = f"the groups are {', '.join(self.pools)}" if self.pools else "no group has pages"
            raise ArgumentError(f"name: there is no group {str(name)[:40]!r}: {names}")
        return self.pools[name]

    def __repr__(self) -> str:
        held = [f"{pool.num_pages} {name} pages" for name, pool in self.pools.items()]
        if self.checkpoints is not None:
            held.append(f"{self.checkpoints.num_checkpoints} checkpoints")
        return f"Pools({', '.join(held)}, {self.num_rows} rows on {self.device}, at step {self._step})"

    @property
    def step(self) -> int:
        """The step of the last delta applied; 0 before the first."""
        return self._step

    def layer(self, n: int) -> Layer:
        """Return layer n of the model: its group, its index in the group's pool, its buffers and its state.

        A layer that shares the keys and values of another has that layer's. Errors: ArgumentError for a
        number that the model does not have, or a layer that stores nothing.
        """
        at = number(n, "n")
        if at >= len(self._layers):
            raise ArgumentError(
                f"n: the model has layers 0 to {len(self._layers) - 1}, not {min(at, 10**18)}"
            )
        found = self._layers[at]
        if found is None:
            raise ArgumentError(f"n: layer {at} stores nothing")
        return found

    def apply(self, delta: Delta, stream: torch.cuda.Stream | None = None) -> None:
        """Carry out what a step needs before it computes, on `stream` or the current one: saves, restores,
        resets and copies of states, page copies and table writes, in this order.

        Apply every delta of the manager once, in the order of `Manager.plan`. The delta is checked on the
        host before anything changes. Page copies read all sources before any target is written.

        On a single stream nothing has to wait: work of earlier steps runs before the call, later work sees
        its writes. `stream` may be another one, because rows and pages are reused only after a fence, so
        nothing that a running step reads is written. Then, with events, let `stream` wait for the steps that
        computed the sources of page copies, and the next step wait for `stream`. A delta with saves has to
        wait for the step before it, whose states it reads. Thread-safe.

        If the call is interrupted, or the device runs out of memory, apply the same delta again.

        Cost: on CUDA one asynchronous copy of the delta, one launch for all table writes, one for each of
        saves, restores, resets and copies of states, for all rows and layers, and one per group with page
        copies (two, and memory for the pages, if a page is both source and target). Nothing else is allocated
        on the device once a delta of the same size was applied on the stream. No synchronisation. Errors:
        ArgumentError for a delta that is out of order, of other groups or with a duplicate target, or for a
        stream of another device; OutOfRangeError for a row, place, page or checkpoint that does not exist;
        CaptureError.
        """
        if not isinstance(delta, Delta):
            raise ArgumentError(f"delta: give what Manager.plan returned, not {type(delta).__name__}")
        with self._lock, self._on(stream):
            packed = delta.packed
            found = self._rank.check(packed, self._step + 1)
            refuse_capture(self.device, "apply")
            num_rows, _, _, _, _, _, _, num_writes, places, page_ids, copies, states, _ = found
            sent = None
            if num_writes or copies or num_rows or states:
                sent = self._staging.post(packed, self._rooms)
                if states:
                    self._apply_states(sent, *states)
                for group, sources, targets, n, is_disjoint in copies:
                    self._in_order[group].copy_pages(
                        sent[sources : sources + n], sent[targets : targets + n], is_disjoint=is_disjoint
                    )
                if num_writes:
                    kernels.write_table(sent, places, page_ids, num_writes, self.flat_table)
            self._rank.follow(packed)
            self._applied = delta, found, sent
            self._step += 1

    def _apply_states(
        self,
        sent: torch.Tensor,
        saves: tuple[int, int, int, int],
        restores: tuple[int, int, int, int],
        resets: tuple[int, int],
        copies: tuple[int, int, int],
    ) -> None:
        """Carry out what a checked delta asks of states: where the sections begin in `sent`, and how many ids
        they have."""
        assert self.states is not None
        assert self.checkpoints is not None
        regions, checkpoints = self.states.regions(), self.checkpoints.tensor
        if saves[-1] and self._saved_step != self._step + 1:
            kernels.save_states(sent, *saves, regions, checkpoints)
        self._saved_step = self._step + 1  # from here on, rows may have other states
        if restores[-1]:
            kernels.restore_states(sent, *restores, regions, checkpoints)
        if resets[-1]:
            kernels.fill_rows(regions, *resets, sent)
        if copies[-1]:
            kernels.copy_states(sent, *copies, regions)

    def batch(
        self,
        delta: Delta,
        *,
        pad_to: int | tuple[int, int] | None = None,
        max_queries: int | None = None,
    ) -> Batch:
        """Fill the buffers that kernels read about a step, and return them. They never move.

        `delta` is the one that was applied last. `pad_to` is the least number of rows and of tokens in the
        tensors, or a pair (rows, tokens): the sizes that a graph was captured with. `max_queries` is the most
        tokens that a row computes in this batch and in later ones that replay a graph captured with it; by
        default the padded number of tokens, or without `pad_to` what the step has. Smaller is faster: give 1
        for a graph of decode steps. Call it with the stream of `apply` current.

        Cost: on CUDA two launches for all groups, no allocation, no synchronisation. Errors: ArgumentError
        for a delta that is not the last one applied, or more rows or tokens than the pools were made for,
        or a row that computes more than `max_queries`; CaptureError.
        """
        with self._lock:
            if not self._is_last(delta):
                last = "none was applied yet" if self._applied is None else f"step {self._step}"
                raise ArgumentError(f"delta: give the one that was applied last ({last})")
            assert self._applied is not None
            _, found, sent = self._applied
            num_rows, num_tokens, max_count, *sections = found[:7]
            padded = self._padded(num_rows, num_tokens, pad_to)
            most = self._max_queries(max_count, padded, pad_to, max_queries)
            # A graph also runs for other steps of the same size, with other parts.
            is_exact = pad_to is None and max_queries is None
            counted = found[-1] if is_exact else self._buffers.parts_for(padded, most)
            parts = {name: Parts(*each) for name, each in zip(self.pools, counted, strict=True)}
            refuse_capture(self.device, "batch")
            self._buffers.fill_device(
                delta.packed, sent, (num_rows, *sections), padded, self.flat_table, self._rank
            )
            return Batch(
                self._buffers,
                padded,
                most,
                is_exact,
                parts,
                num_rows,
                num_tokens,
                delta,
                self._rank,
                self._is_last,
            )

    def _max_queries(self, max_count: int, padded: Sizes, pad_to: Any, max_queries: Any) -> int:
        if max_queries is None:
            return max_count if pad_to is None else padded.tokens
        most = number(max_queries, "max_queries")
        if most < max_count:
            raise ArgumentError(f"max_queries: a row of the delta computes {max_count} tokens, not {most}")
        return min(most, self.max_step_tokens)

    def _padded(self, num_rows: int, num_tokens: int, pad_to: Any) -> Sizes:
        if num_tokens > self.max_step_tokens:
            raise ArgumentError(
                f"delta: its step computes {num_tokens} tokens, more than max_step_tokens = "
                f"{self.max_step_tokens}: plan fewer, or make Pools with more"
            )
        if pad_to is None:
            return Sizes(num_rows, num_tokens)
        pair = pad_to if isinstance(pad_to, tuple) else (pad_to, pad_to)
        if len(pair) != 2:
            raise ArgumentError("pad_to: give a number, or a pair (rows, tokens)")
        least_rows, least_tokens = (number(each, "pad_to") for each in pair)
        padded = Sizes(max(num_rows, least_rows), max(num_tokens, least_tokens))
        if padded.rows > self.num_rows or padded.tokens > self.max_step_tokens:
            raise ArgumentError(
                f"pad_to: {padded.rows} rows and {padded.tokens} tokens exceed num_rows = {self.num_rows} or "
                f"max_step_tokens = {self.max_step_tokens}"
            )
        return padded

    def _is_last(self, delta: Delta) -> bool:
        return self._applied is not None and self._applied[0] is delta

    def reset(self, step: int = 0) -> None:
        """Expect the delta of step + 1 next. Call it without an argument after `Manager.reset`.

        When no row is running, it also lets a rank that missed deltas join again. Tables, pages, states and
        checkpoints keep their old contents, which no row or hit of the manager refers to. Errors:
        ArgumentError.
        """
        with self._lock:
            self._step, self._saved_step, self._applied = number(step, "step"), 0, None

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor on the device: pages, states, checkpoints, tables, buffers of batches."""
        pages = [tensor for pool in self.pools.values() for tensor in pool.tensors()]
        states = [] if self.states is None else list(self.states.tensors.values())
        checkpoints = [] if self.checkpoints is None else [self.checkpoints.tensor]
        return [*pages, *states, *checkpoints, self.flat_table, *self._buffers.all_tensors()]

    def memory_bytes(self) -> int:
        """Bytes of all pages, states, checkpoints, tables and batch buffers, padding included."""
        stored = sum(pool.memory_bytes() for pool in (*self.pools.values(), *self._state_pools()))
        return stored + self.flat_table.nbytes + self._buffers.memory_bytes()

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if self._addresses() != self._at:
            raise InvariantError(6, "a table has moved")
        for pool in (*self.pools.values(), *self._state_pools()):
            pool.check()
        self._buffers.check()
        self._staging.check()

    def _state_pools(self) -> list[StatePool | CheckpointPool]:
        return [pool for pool in (self.states, self.checkpoints) if pool is not None]

    def _addresses(self) -> list[int]:
        return [self.flat_table.data_ptr(), *(table.data_ptr() for table in self.tables.values())]

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Make the stream and its device current, if they are not."""
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
    if not layout.groups:
        raise ConfigError("layout: it has no groups, so there is nothing to store")
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
    workers: int,
) -> list[Geometry]:
    names = [group.name for group in groups]
    sizes = _by_group(kernel_page_tokens, names, "kernel_page_tokens")
    limits = _by_group(max_indices, names, "max_indices")
    found = []
    for group in groups:
        size = count(sizes.get(group.name, group.page_tokens), f"kernel_page_tokens of {group.name}")
        if group.page_tokens % size:
            raise ConfigError(
                f"kernel_page_tokens of {group.name}: give a divisor of the group's page_tokens = "
                f"{group.page_tokens}, not {size}"
            )
        max_pages = -(-max_tokens // group.page_tokens)
        width = max_pages * (group.page_tokens // size)
        most = count(limits.get(group.name, num_rows * width), f"max_indices of {group.name}")
        if num_rows * width > 2**31 - 1 or most > 2**31 - 1:
            raise ConfigError(
                f"num_rows = {num_rows} and max_tokens = {max_tokens}: page tables exceed 2^31 places: give "
                "fewer rows or tokens"
            )
        found.append(Geometry(group, max_pages, size, most, work_target(group, workers)))
    return found
