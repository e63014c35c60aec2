"""All cache state of one instance of a compressed-attention model: `KVCacheManager`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagoda import kernels
from pagoda.compat._words import of_one
from pagoda.compat.hybrid.blocks import BlockTable, GroupBlocks
from pagoda.compat.hybrid.budget import compute_block_budget, max_blocks
from pagoda.compat.hybrid.config import DSV4Config, LayerSpec, read_schedule
from pagoda.compat.hybrid.handle import LayerCacheHandle
from pagoda.compat.hybrid.paged import PagedKVPool
from pagoda.compat.hybrid.schema import LayerCacheSchema, build_schema
from pagoda.compat.hybrid.state import StateCachePool
from pagoda.compat.hybrid.tokens import read_tokens
from pagoda.errors import ArgumentError, ConfigError, InvariantError, UsageError
from pagoda.ids import FreeList
from pagoda.layout import RingWindow
from pagoda.layout._numbers import as_integer, count, show
from pagoda.pools import EntryPool, Staging, StatePool
from pagoda.pools._arguments import AnyIds, filled, one_id, refuse_capture, resolve_device

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
        self._rows = FreeList(self.max_concurrent_requests, what="rows")
        self.state_pools: dict[int, StateCachePool] = {}
        self._states = self._make_states()
        self.paged_pools: dict[int, PagedKVPool | None] = dict.fromkeys(self.schemas)
        self._blocks: dict[int, BlockTable | None] = dict.fromkeys(self.schemas)
        self._entries: list[EntryPool] = []
        self._groups: list[BlockTable] = []
        self._make_groups(budget)
        self.request_slot_map = filled((self.max_concurrent_requests + 1,), torch.int32, self.device)
        rows: list[tuple[torch.Tensor, float] | kernels.Region] = []
        rows += [row for states in self._states for row in states.rows()]
        rows += [row for blocks in self._groups for row in blocks.rows()]
        self._admission = kernels.Regions.of([*rows, (self.request_slot_map[:, None], 1)], self.device)
        self._release = kernels.Regions.of([*rows, (self.request_slot_map[:, None], 0)], self.device)
        self._acquired = {
            blocks: GroupBlocks(blocks.free, self._staging, self._lock) for blocks in self._groups
        }
        self.allocators = {
            layer: None if blocks is None else self._acquired[blocks]
            for layer, blocks in self._blocks.items()
        }
        self.block_tables = {
            layer: None if blocks is None else blocks.table for layer, blocks in self._blocks.items()
        }
        self.block_lens = {
            layer: None if blocks is None else blocks.lens for layer, blocks in self._blocks.items()
        }
        # [layer][row]: how many of the row's blocks the layer has asked for.
        self._taken = {
            layer: np.zeros(self.max_concurrent_requests + 1, dtype=np.int32)
            for layer, blocks in self._blocks.items()
            if blocks is not None
        }

    def _make_states(self) -> list[StatePool]:
        """Allocate one pool per kind of layer."""
        members: dict[RingWindow, list[LayerCacheSchema]] = {}
        for schema in self.schemas.values():
            members.setdefault(schema.kind, []).append(schema)
        pools = []
        for schemas in members.values():
            group = schemas[0].layout(len(schemas)).state_group
            assert group is not None
            pool = StatePool.from_group(
                group, self.max_concurrent_requests, self.device, staging=self._staging
            )
            pools.append(pool)
            for number, schema in enumerate(schemas):
                face = StateCachePool.of_layer(schema, pool, number, self._lock)
                self.state_pools[schema.layer_idx] = face
        self.state_pools = {layer: self.state_pools[layer] for layer in self.schemas}
        return pools

    def _make_groups(self, budget: dict[str, int]) -> None:
        schemas = list(self.schemas.values())
        for group in self.config.layout(self.schedule).paged_groups:
            pool = EntryPool.from_group(group, budget[group.name], self.device)
            blocks = BlockTable(
                group.name,
                budget[group.name],
                self.max_concurrent_requests,
                self.max_blocks_per_request,
                self._staging,
            )
            self._entries.append(pool)
            self._groups.append(blocks)
            for number, place in enumerate(group.layers):
                schema = schemas[place]
                self.paged_pools[schema.layer_idx] = PagedKVPool.of_layer(schema, pool, number)
                self._blocks[schema.layer_idx] = blocks

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{blocks.free.num_held} of {blocks.free.num_ids} {blocks.name} blocks" for blocks in self._groups
        )
        return (
            f"KVCacheManager({len(self.schedule)} layers on {self.device}: {self._rows.num_held} of "
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
            row = int(self._rows.alloc(1)[0])
            try:
                kernels.fill_rows(self._admission, row)
            except BaseException:
                self._rows.free([row])
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
            for blocks in self._groups:
                blocks.forget(row)
            kernels.fill_rows(self._release, row)
            for taken in self._taken.values():
                taken[row] = 0
            for blocks in self._groups:
                blocks.release(row)
            self._rows.free([row])

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
            blocks = self._blocks[layer]
            if blocks is None:
                schema = self.schemas[layer]
                raise ArgumentError(
                    f"layer_idx: layer {layer} is {schema.attn_type.name}: it has no paged pool"
                )
            taken = self._taken[layer]
            n = int(taken[row])
            block = blocks.take(row, n)
            taken[row] = n + 1
            return block

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
            request_slots, request_ids, positions, self._rows, self.max_context_tokens, self._staging
        )
        return LayerCacheHandle(
            self.state_pools[layer],
            self.paged_pools[layer],
            self._blocks[layer],
            tokens,
            self.config.num_query_heads,
            known,
        )

    def memory_bytes(self) -> int:
        """Bytes of all pools and tables on the device, padding included."""
        return sum(
            sum(part.memory_bytes() for part in parts)
            for parts in (self._states, self._entries, self._groups)
        )

    def check(self) -> None:
        """Verify invariants 1 to 7 and 18. Walks over everything. Errors: InvariantError."""
        with self._lock:
            self._rows.check()
            running = [row for row in range(1, self.max_concurrent_requests + 1) if self._rows.is_held(row)]
            for states in self._states:
                states.check()
            for entries in self._entries:
                entries.check()
            for group in self._groups:
                group.check(running, self._acquired[group].acquired)
            for layer, taken in self._taken.items():
                blocks = self._blocks[layer]
                assert blocks is not None
                for row in np.flatnonzero(taken).tolist():
                    if int(taken[row]) > blocks.num_blocks(row):
                        raise InvariantError(18, f"layer {layer} took blocks that row {row} does not have")
            self._staging.check()

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
            self._rows.require_held([row])
        except UsageError as error:
            of_one(error, name)
            raise
        return row
