"""All cache state of one instance of a compressed-attention model: `KVCacheManager`, the public design's face
of one `Manager` and one `Pools`.

In: requests, and the blocks that layers ask for; out: rows, block ids, and handles through which attention
reads and writes. The manager owns rows and blocks; the pools own states, blocks and tables. Here are only the
numbers that the public design has and they do not: how many blocks each layer asked for, and how many the
device shows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagoda import kernels
from pagoda.compat._words import of_one
from pagoda.compat.hybrid.blocks import GroupBlocks
from pagoda.compat.hybrid.budget import compute_block_budget, max_blocks
from pagoda.compat.hybrid.config import DSV4Config, LayerSpec, read_schedule
from pagoda.compat.hybrid.handle import LayerCacheHandle
from pagoda.compat.hybrid.paged import PagedKVPool
from pagoda.compat.hybrid.schema import LayerCacheSchema, build_schema
from pagoda.compat.hybrid.state import StateCachePool
from pagoda.compat.hybrid.tokens import read_tokens
from pagoda.errors import ArgumentError, CapacityError, ConfigError, InvariantError, UsageError
from pagoda.layout._numbers import as_integer, count, show
from pagoda.manager import Manager
from pagoda.pools import Pools, Staging
from pagoda.pools._arguments import AnyIds, filled, one_id, refuse_capture, resolve_device
from pagoda.pools._layer_step import Known, LayerEntries

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Windows, compressors and compressed entries of all layers, for rows 1 … max_concurrent_requests.

    Layers of one kind form a group: they share one space of block ids, one allocator and one table. By
    default there are enough usable blocks for all requests at their longest; an explicit 0 means none. These
    are indexed by the number of a layer: `schemas`, `state_pools` and, None for a layer without compressed
    entries, `paged_pools`, `allocators` (the group's `BlockAllocator`: `acquire` takes blocks that belong to
    no request, `release` frees them), `block_tables` ([rows, logical block] int32, −1 for no block) and
    `block_lens` ([rows] int32). `request_slot_map` is [rows] int32 on the device: 1 for a running request,
    else 0.

    Tensors are allocated once and never move, and none is read back. Admit, release and allocate outside of
    captures; handles and their calls can be captured. Thread-safe.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        config: DSV4Config,
        schedule: Sequence[LayerSpec],
        max_concurrent_requests: int,
        max_context_tokens: int = 1_000_000,
        num_blocks_per_csa_layer: int | None = None,
        num_blocks_per_hca_layer: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        if not isinstance(config, DSV4Config):
            raise ConfigError(f"config: give a DSV4Config, not {type(config).__name__}")
        self.config, self.schedule = config, read_schedule(schedule)
        self.max_concurrent_requests = count(max_concurrent_requests, "max_concurrent_requests")
        self.max_context_tokens = count(max_context_tokens, "max_context_tokens")
        self.max_blocks_per_request = max_blocks(config, self.max_context_tokens)
        self.device = resolve_device(device)
        self.schemas = {spec.layer_idx: build_schema(config, spec) for spec in self.schedule}
        budget = compute_block_budget(
            config, self.schedule, self.max_context_tokens, self.max_concurrent_requests
        )
        for name, given in (("csa", num_blocks_per_csa_layer), ("hca", num_blocks_per_hca_layer)):
            if given is not None:
                budget[name] = count(given, f"num_blocks_per_{name}_layer", low=0)
        self._lock = threading.RLock()
        self._staging = Staging(self.device)
        self._manager, self._pools = self._make(budget)
        names = list(self._pools.tables)
        rows = self.max_concurrent_requests + 1
        # What the device shows of each row: whether it runs, and its number of blocks in each group.
        self._marks = filled((1 + len(names), rows), torch.int32, self.device)
        with torch.inference_mode(False):  # they are written outside of it
            self.request_slot_map, *lens = self._marks.unbind(0)
            for table in self._pools.tables.values():
                table.fill_(-1)
            self._flat = {name: table.view(-1) for name, table in self._pools.tables.items()}
        self._marks_at = self._marks.data_ptr()
        self._lens = dict(zip(names, lens, strict=True))
        self._shown = {name: np.zeros(rows, dtype=np.int32) for name in names}  # as `_lens`, on the host
        self._admission, self._release = (self._row_regions(is_running) for is_running in (1, 0))
        blocks = {name: GroupBlocks(self._manager, name, self._staging, self._lock) for name in names}
        self.state_pools: dict[int, StateCachePool] = {}
        self.paged_pools: dict[int, PagedKVPool | None] = {}
        self.allocators: dict[int, GroupBlocks | None] = {}
        self.block_tables: dict[int, torch.Tensor | None] = {}
        self.block_lens: dict[int, torch.Tensor | None] = {}
        self._entries: dict[int, LayerEntries] = {}
        self._groups: dict[int, str | None] = {}
        for number, schema in enumerate(self.schemas.values()):
            self._add_layer(number, schema, blocks)
        # [layer][row]: how many of the row's blocks the layer has asked for.
        self._taken = {
            layer: np.zeros(rows, dtype=np.int32) for layer, name in self._groups.items() if name is not None
        }

    def _make(self, budget: dict[str, int]) -> tuple[Manager, Pools]:
        layout = self.config.layout(self.schedule)
        num_rows, width = self.max_concurrent_requests, self.max_blocks_per_request
        for group in layout.paged_groups:
            if (num_rows + 1) * width >= 2**31:
                raise ConfigError(
                    f"max_concurrent_requests and max_context_tokens: the {group.name} table of {num_rows} "
                    f"rows of {width} blocks exceeds 2^31 places: give fewer requests or a shorter context"
                )
        capacity = {group.name: budget[group.name] for group in layout.paged_groups} | {"checkpoint": 0}
        max_tokens = width * self.config.block_tokens
        manager = Manager(layout, capacity, num_rows=num_rows, max_tokens=max_tokens)
        pools = Pools(
            layout,
            capacity,
            num_rows=num_rows,
            max_tokens=max_tokens,
            device=self.device,
            max_step_tokens=0,
            staging=self._staging,
        )
        return manager, pools

    def _row_regions(self, is_running: int) -> kernels.Regions:
        """Return all that a row has on the device, with the values of a row without tokens and blocks."""
        assert self._pools.states is not None
        with torch.inference_mode(False):
            marks = [(self.request_slot_map[:, None], is_running)]
            marks += [(lens[:, None], 0) for lens in self._lens.values()]
            tables = [(table, -1) for table in self._pools.tables.values()]
        return kernels.Regions.of([*self._pools.states.rows(), *tables, *marks], self.device)

    def _add_layer(self, number: int, schema: LayerCacheSchema, blocks: dict[str, GroupBlocks]) -> None:
        idx, pools = schema.layer_idx, self._pools
        layer = pools.layer(number)
        assert layer.entries is not None
        name = None if layer.place is None else layer.group.name
        self.state_pools[idx] = StateCachePool.of_layer(schema, pools, number, self._lock)
        self.paged_pools[idx] = None if name is None else PagedKVPool.of_layer(schema, pools, number)
        self.allocators[idx] = None if name is None else blocks[name]
        self.block_tables[idx] = None if name is None else pools.tables[name]
        self.block_lens[idx] = None if name is None else self._lens[name]
        self._entries[idx] = replace(layer.entries, name=f"layer {idx} is {schema.attn_type.name}")
        self._groups[idx] = name

    def __repr__(self) -> str:
        stats = self._manager.stats()
        groups = ", ".join(f"{g.total - g.free} of {g.total} {g.name} blocks" for g in stats.groups)
        return (
            f"KVCacheManager({len(self.schedule)} layers on {self.device}: {stats.rows} of "
            f"{self.max_concurrent_requests} rows running; {groups or 'no blocks'})"
        )

    def admit_request(self) -> int:
        """Take the lowest free row and return it; the caller holds it until `release_request`.

        The row's state is that of a new request. It is reset here as well as by `release_request`, in case a
        stale handle of the row's last request has written to it since. Cost: one launch, no synchronisation.
        Errors: CapacityError if no row is free; CaptureError.
        """
        refuse_capture(self.device, "admit_request")
        with self._lock:
            # Tokens are not known here: one that is neither computed nor cached stands for them.
            row = self._manager.admit([0], reserve=0, read=False, store=False).row
            try:
                self._settle()
                kernels.fill_rows(self._admission, row)
            except BaseException:
                self._settle()
                self._manager.release(row)
                raise
            return row

    def release_request(self, slot: int) -> None:
        """Free a row and all its blocks, and reset its state in all layers.

        If the call is interrupted during the reset, the row stays held and can be released again. Cost: one
        launch, no synchronisation. Errors: NotHeldError, OutOfRangeError, ArgumentError; CaptureError.
        """
        refuse_capture(self.device, "release_request")
        with self._lock:
            row = self._held(slot, "slot")
            for counts in (*self._shown.values(), *self._taken.values()):
                counts[row] = 0
            kernels.fill_rows(self._release, row)
            self._settle()
            self._manager.release(row)

    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        """Return the next block of a request in a layer; the block is valid in all layers of its group.

        The n-th call for a layer returns the request's n-th block in the group: the first layer to ask for
        it allocates it and appends it to the request's table. An allocation costs one launch, no
        synchronisation. Errors: ArgumentError for an unknown layer or one without compressed entries;
        NotHeldError, OutOfRangeError; CapacityError if the request's table is full or no block is free;
        CaptureError.
        """
        refuse_capture(self.device, "allocate_block")
        with self._lock:
            layer = self._layer(layer_idx)
            row = self._held(request_slot, "request_slot")
            group = self._groups[layer]
            if group is None:
                schema = self.schemas[layer]
                raise ArgumentError(
                    f"layer_idx: layer {layer} is {schema.attn_type.name}: it has no paged pool"
                )
            taken = self._taken[layer]
            n = int(taken[row])
            block = self._take(group, row, n)
            taken[row] = n + 1
            return block

    def _take(self, group: str, row: int, n: int) -> int:
        """Return block n of a row, counted from 0; if the row has exactly n blocks, allocate one.

        Errors: CapacityError. Nothing is taken then, nor if the call is interrupted or the device runs out of
        memory.
        """
        shown = self._shown[group]
        blocks = self._manager.page_ids(row, group)
        is_new = n == len(blocks)
        try:
            block = self._extend(group, row, n) if is_new else int(blocks[n])
            # Of earlier blocks, the device lacks one only if a call was interrupted.
            for at in range(int(shown[row]), n + 1):
                self._show(group, row, at, block if at == n else int(blocks[at]), at + 1)
                shown[row] = at + 1
            return block
        except BaseException:
            if is_new:
                self._take_back(group, row, n)
            raise

    def _extend(self, group: str, row: int, n: int) -> int:
        """Give a row with n blocks one more, and return it. Errors: CapacityError."""
        if n == self.max_blocks_per_request:
            raise CapacityError(f"places in the {group} table of row {row}", 1, 0, n)
        try:
            block = int(self._manager.extend(row, group)[0])
        except CapacityError as error:
            raise CapacityError(f"{group} blocks", 1, 0, error.total) from None
        self._settle()
        return block

    def _show(self, group: str, row: int, at: int, block: int, num_blocks: int) -> None:
        """Write one place of a row's table, and its number of blocks, to the device: one launch."""
        place = row * self.max_blocks_per_request + at
        kernels.set_table(self._flat[group], place, block, self._lens[group], row, num_blocks)

    def _take_back(self, group: str, row: int, n: int) -> None:
        """Undo the growth of a row to n + 1 blocks. On the host this cannot fail."""
        if len(self._manager.page_ids(row, group)) != n + 1:  # it did not grow, or a finalizer has taken more
            return
        self._settle()
        self._manager.trim(row, group)
        self._shown[group][row] = min(int(self._shown[group][row]), n)
        with suppress(Exception):  # if this launch fails, the first one failed, too
            self._show(group, row, n, -1, n)

    def _settle(self) -> None:
        """End a step of the manager that computes nothing, so that what it gave up is free at once.

        Each call writes what it changes to the device itself, one row or one place in a launch that carries
        the values: applying the delta would cost a copy more.
        """
        self._manager.pass_fence(self._manager.plan().step)

    def acquire(
        self, layer_idx: int, request_slots: AnyIds, positions: AnyIds, request_ids: AnyIds
    ) -> LayerCacheHandle:
        """Return one layer's cache for the tokens of a step.

        `request_slots` is [batch], 0 is padding; `positions` and `request_ids` are [tokens], the latter
        indices into the batch; −1 in either is padding. int32 tensors on the device are used as they are:
        nothing is allocated, and the call can be captured. They are not checked; kernels ignore ids that are
        out of range. Ids on the host are checked and sent in one staged copy. Errors: ArgumentError for an
        unknown layer or a wrong dtype, shape or device, and, on the host, for a duplicate row or tokens of a
        request that are not adjacent; OutOfRangeError and NotHeldError for ids on the host; CaptureError for
        ids on the host.
        """
        layer = self._layer(layer_idx)
        tokens, known = read_tokens(
            request_slots, request_ids, positions, self._manager, self.max_context_tokens, self._staging
        )
        group, num_tokens = self._groups[layer], tokens.positions.shape[0]

        def most() -> Known:
            if known is not None:
                return known
            num_blocks = 0 if group is None else int(self._shown[group].max())
            return Known(num_blocks * self.config.block_tokens, num_tokens)

        return LayerCacheHandle(
            self._entries[layer],
            tokens,
            most,
            state=self.state_pools[layer],
            paged=self.paged_pools[layer],
            block_lens=self.block_lens[layer],
            num_query_heads=self.config.num_query_heads,
        )

    def memory_bytes(self) -> int:
        """Bytes of all pools and tables on the device, padding rows and blocks included.

        The one checkpoint that pools keep as padding, and a few kilobytes of addresses, are not counted.
        """
        pools = self._pools
        assert pools.states is not None
        entries = sum(pool.memory_bytes() for pool in pools.pools.values())
        tables = sum(table.nbytes for table in (*pools.tables.values(), *self._lens.values()))
        return int(pools.states.memory_bytes() + entries + tables)

    def check(self) -> None:
        """Verify the invariants of the manager and of the pools, and 18. Walks over everything.

        Errors: InvariantError.
        """
        with self._lock:
            self._manager.check()
            self._pools.check()
            if self._marks.data_ptr() != self._marks_at:
                raise InvariantError(6, "the lengths of rows have moved")
            for row in range(1, self.max_concurrent_requests + 1):
                for group, shown in self._shown.items():
                    num_blocks = self._num_blocks(row, group)
                    if shown[row] > num_blocks:
                        raise InvariantError(
                            18, f"the device shows {group} blocks that row {row} does not have"
                        )
                    for layer, taken in self._taken.items():
                        if self._groups[layer] == group and taken[row] > num_blocks:
                            raise InvariantError(
                                18, f"layer {layer} took blocks that row {row} does not have"
                            )

    def _num_blocks(self, row: int, group: str) -> int:
        """Return the number of blocks of a row; 0 if it is not running."""
        try:
            return len(self._manager.page_ids(row, group))
        except UsageError:
            return 0

    def _layer(self, layer_idx: Any) -> int:
        layer = as_integer(layer_idx)
        if layer is not None and layer in self.schemas:
            return layer
        raise ArgumentError(
            f"layer_idx: there is no layer {show(layer_idx)} in the schedule, which has "
            f"{', '.join(map(str, list(self.schemas)[:8]))}{', …' if len(self.schemas) > 8 else ''}"
        )

    def _held(self, slot: Any, name: str) -> int:
        row = one_id(slot, name, 1, self.max_concurrent_requests, "rows")
        try:
            self._manager.reserved(row)
        except UsageError as error:
            of_one(error, name)
            raise
        return row
