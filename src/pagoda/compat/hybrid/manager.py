"""All cache state of one instance of a model of compressed attention: `KVCacheManager`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagoda import kernels
from pagoda.compat.hybrid.blocks import BlockTable
from pagoda.compat.hybrid.budget import compute_block_budget, max_blocks
from pagoda.compat.hybrid.config import DSV4Config, LayerSpec, read_schedule
from pagoda.compat.hybrid.handle import LayerCacheHandle
from pagoda.compat.hybrid.paged import PagedKVPool
from pagoda.compat.hybrid.schema import LayerCacheSchema, build_schema
from pagoda.compat.hybrid.state import StateCachePool
from pagoda.compat.hybrid.tokens import read_tokens
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.ids import FreeList
from pagoda.layout import RingWindow
from pagoda.layout._numbers import count, show
from pagoda.pools import EntryPool, Staging, StatePool
from pagoda.pools._arguments import AnyIds, one_id, refuse_capture, resolve_device

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Windows, compressors and compressed entries of all layers, for rows 1 … max_concurrent_requests.

    Layers of one kind form a group: they share one space of block ids, one allocator and one table. Where the
    number of usable blocks is not given, all requests fit at their longest; an explicit 0 is 0. By the number
    of a layer there are `schemas`, `state_pools` and, None where it has no compressed entries, `paged_pools`,
    `allocators` (the group's `FreeList`), `block_tables` ([rows, logical block] int32, −1 where nothing is)
    and `block_lens` ([rows] int32).

    Tensors are made once and never move, and none is ever read back. Admission, release and allocation happen
    between captures, handles and what they do inside. Several threads may call it.

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
        rows = [row for states in self._states for row in states.rows()]
        rows += [row for blocks in self._groups for row in blocks.rows()]
        self._regions = kernels.Regions.of(rows, self.device)
        self.allocators = {
            layer: None if blocks is None else blocks.free for layer, blocks in self._blocks.items()
        }
        self.block_tables = {
            layer: None if blocks is None else blocks.table for layer, blocks in self._blocks.items()
        }
        self.block_lens = {
            layer: None if blocks is None else blocks.lens for layer, blocks in self._blocks.items()
        }
        # [layer][row]: how many blocks of the row's the layer has asked for.
        self._taken = {
            layer: np.zeros(self.max_concurrent_requests + 1, dtype=np.int32)
            for layer, blocks in self._blocks.items()
            if blocks is not None
        }

    def _make_states(self) -> list[StatePool]:
        """A pool for the layers of each kind."""
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
                self.device,
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
            f"{self.max_concurrent_requests} rows run; {groups or 'no blocks'})"
        )

    def admit_request(self) -> int:
        """The lowest free row, whose state is that of a new request; the caller's until `release_request`.

        Cost: O(1) on the host; no device is touched. Errors: CapacityError when all are taken; CaptureError.
        """
        refuse_capture(self.device, "admit_request")
        return int(self._rows.alloc(1)[0])

    def release_request(self, slot: int) -> None:
        """Give back a row and all its blocks, and reset its state in all layers.

        Interrupted while it resets the state, it leaves the row held, to be released again. Cost: O(blocks of
        the row) on the host, and one launch; no synchronisation. Errors: NotHeldError, OutOfRangeError,
        ArgumentError; CaptureError.
        """
        refuse_capture(self.device, "release_request")
        with self._lock:
            row = self._held(slot, "slot")
            for blocks in self._groups:
                blocks.forget(row)
            kernels.fill_rows(self._regions, row)
            for taken in self._taken.values():
                taken[row] = 0
            for blocks in self._groups:
                blocks.release(row)
            self._rows.free([row])

    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        """The next block of a request in a layer, which is valid in all layers of its group.

        The n-th call for any of them gives the group's n-th block of that request: the first one to ask has
        it allocated, and appended to the request's table. Cost: O(blocks of the row) on the host, and to
        allocate one launch; no synchronisation. Errors: ArgumentError for a layer that is
        not there or keeps no compressed entries; NotHeldError, OutOfRangeError; CapacityError when the table
        of the request is full or the blocks are out; CaptureError.
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
        """One layer's cache for the tokens of a step: `request_slots` [batch], 0 is padding; `positions` and
        `request_ids` [tokens], the latter into the batch, −1 in either is padding.

        int32 tensors on the device are used as they are: nothing is made, and the call can be captured. Their
        contents are not looked at; kernels leave out what is out of range. What lies on the host is looked
        through and sent. Cost: O(1), and for what lies on the host O(n) and one staged copy. Errors:
        ArgumentError for another layer, dtype, shape or device, and on the host for a row that stands twice
        and tokens of a request that do not stand side by side; OutOfRangeError and NotHeldError there;
        CaptureError for ids on the host.
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
        """Bytes of all pools and tables on the device, padding included. O(layers)."""
        return sum(
            sum(part.memory_bytes() for part in parts)
            for parts in (self._states, self._entries, self._groups)
        )

    def check(self) -> None:
        """Verify invariants 1 to 7 and 18. Cost: a walk over all of it. Errors: InvariantError."""
        with self._lock:
            self._rows.check()
            running = [row for row in range(1, self.max_concurrent_requests + 1) if self._rows.is_held(row)]
            for states in self._states:
                states.check()
            for entries in self._entries:
                entries.check()
            for group in self._groups:
                group.check(running)
            for layer, taken in self._taken.items():
                blocks = self._blocks[layer]
                assert blocks is not None
                for row in np.flatnonzero(taken).tolist():
                    if int(taken[row]) > blocks.num_blocks(row):
                        raise InvariantError(18, f"layer {layer} took blocks that row {row} does not have")
            self._staging.check()

    def _layer(self, layer_idx: Any) -> int:
        if isinstance(layer_idx, (int, np.integer)) and int(layer_idx) in self.schemas:
            return int(layer_idx)
        raise ArgumentError(
            f"layer_idx: there is no layer {show(layer_idx)} in the schedule, which has "
            f"{', '.join(map(str, list(self.schemas)[:8]))}{', …' if len(self.schemas) > 8 else ''}"
        )

    def _held(self, slot: Any, name: str) -> int:
        row = one_id(slot, name, 1, self.max_concurrent_requests, "rows")
        self._rows.require_held([row])
        return row
