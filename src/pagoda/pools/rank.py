"""The tensors of one rank, and the carrying out of deltas. In: a layout, deltas; out: pages and tables.

A manager plans for all ranks at once; each rank has one `Pools` and applies every delta to it, in order.
Owns the pools and tables of all groups. Invariant 6.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from pagoda import kernels
from pagoda.errors import ArgumentError, ConfigError, InvariantError, OutOfRangeError
from pagoda.layout import Layout, PagedGroup
from pagoda.layout.numbers import count
from pagoda.manager import Delta
from pagoda.pools.arguments import filled, refuse_capture, require_range, resolve_device
from pagoda.pools.kv import TokenPool
from pagoda.pools.staging import Staging, staging_of

__all__ = ["Pools"]

Int32 = npt.NDArray[np.int32]


class _Copies(NamedTuple):
    """Page copies of one group: n sources from `begin` on behind the head of a delta, then n targets."""

    pool: TokenPool
    begin: int
    n: int
    is_disjoint: bool


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
        self._step = 0
        self._lock = threading.RLock()
        # Where intervals of the flat table begin (row 0, rows 1 and up, of group after group), and the
        # largest id that may be written into each; -1 where nothing may: before, in row 0, behind.
        begins, limits, at = [], [-1], 0
        for size, (_, columns), pool in zip(sizes, shapes, self.pools.values(), strict=True):
            begins += [at, at + columns]
            limits += [-1, pool.num_pages]
            at += size
        self._begins = np.array([*begins, at], dtype=np.int32)
        self._limits = np.array([*limits, -1], dtype=np.int64)

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
        an empty delta. No synchronisation. Errors: ArgumentError for a delta out of order, of other groups,
        with a target that stands twice, or for a stream of another device; OutOfRangeError for a place or
        page that is not there; CaptureError.
        """
        if not isinstance(delta, Delta):
            raise ArgumentError(f"delta: give what Manager.take_delta gave, not {type(delta).__name__}")
        with self._lock, self._on(stream):
            body, num_writes, num_copies = self._read(delta)
            self._check_writes(body[:num_writes], body[num_writes : 2 * num_writes])
            copies = self._check_copies(body, 2 * num_writes, num_copies)
            refuse_capture(self.device, "apply")
            if body.size:
                (sent,) = self._staging.send(body)
                for pool, begin, n, is_disjoint in copies:
                    sources, targets = sent[begin : begin + n], sent[begin + n : begin + 2 * n]
                    pool.copy_pages(sources, targets, is_disjoint=is_disjoint)
                if num_writes:
                    index, page_ids = sent[:num_writes], sent[num_writes : 2 * num_writes]
                    kernels.write_entries(index, page_ids, self.flat_table)
            self._step += 1

    def reset(self) -> None:
        """Begin again at step 1, as the manager does after its `reset`. O(1).

        Tables and pages keep what they hold: no row and no hit of the manager leads there any more.
        """
        with self._lock:
            self._step = 0

    def mem_bytes(self) -> int:
        """Bytes of all pages and tables, padding included. O(groups)."""
        return sum(pool.mem_bytes() for pool in self.pools.values()) + self.flat_table.numel() * 4

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
        """Makes a stream of this device the current one, and the device."""
        if stream is None:
            return kernels.on_device(self.device)
        if not isinstance(stream, torch.cuda.Stream) or stream.device != self.device:
            found = stream.device if isinstance(stream, torch.cuda.Stream) else type(stream).__name__
            wanted = (
                f"a torch.cuda.Stream of {self.device}" if self.device.type == "cuda" else "None on a CPU"
            )
            raise ArgumentError(f"stream: give {wanted}, not {found}")
        return torch.cuda.stream(stream)

    def _read(self, delta: Delta) -> tuple[Int32, int, list[int]]:
        """What stands behind the head of the next delta, how many writes, and copies of each group."""
        num_groups = len(self.pools)
        if delta.num_groups != num_groups:
            raise ArgumentError(
                f"delta: it is of {delta.num_groups} groups, and these pools have {num_groups}: "
                f"{', '.join(self.pools)}"
            )
        packed, head = np.ascontiguousarray(delta.packed), 3 + num_groups
        low, high, *sizes = packed[:head].tolist()
        step = low | high << 31
        if step != self._step + 1:
            raise ArgumentError(
                f"delta: it is of step {step}, and the next one is of step {self._step + 1}: "
                "apply every delta once, in the order of take_delta"
            )
        if min(sizes) < 0 or head + 2 * sum(sizes) != packed.size:  # changed since it was made
            raise ArgumentError(f"delta: {packed.size} entries are no delta of {num_groups} groups")
        return packed[head:], sizes[0], sizes[1:]

    def _check_writes(self, index: Int32, page_ids: Int32) -> None:
        """An OutOfRangeError for the first place or page that is not there."""
        limits = self._limits[self._begins.searchsorted(index, side="right")]
        is_bad = page_ids.view(np.uint32) > limits  # a negative id is above every limit then
        if is_bad.any():
            self._refuse_write(index, page_ids, int(is_bad.argmax()))

    def _check_copies(self, body: Int32, begin: int, num_copies: list[int]) -> list[_Copies]:
        """The copies of groups that have some, or an error for the first page that cannot be copied."""
        copies = []
        for n, (name, pool) in zip(num_copies, self.pools.items(), strict=True):
            if n == 0:
                continue
            sources, targets = (body[at : at + n].astype(np.int64) for at in (begin, begin + n))
            for ids, what in ((sources, "sources"), (targets, "targets")):
                require_range(ids, 1, pool.num_pages, f"{what} of group {name}", "its pages")
            if np.unique(targets).size != n:
                raise ArgumentError(f"delta: a target of group {name} stands twice")
            copies.append(_Copies(pool, begin, n, not np.isin(sources, targets).any()))
            begin += 2 * n
        return copies

    def _refuse_write(self, index: Int32, page_ids: Int32, position: int) -> NoReturn:
        place, page = int(index[position]), int(page_ids[position])
        interval = int(self._begins.searchsorted(place, side="right"))
        largest = int(self._limits[interval])
        if largest < 0:
            raise OutOfRangeError(
                f"index[{position}] = {place} is out of range: tables of {self.num_rows} rows have "
                f"{self.flat_table.numel()} places, those of row 0 are padding: "
                "give the pools the rows, tokens and groups of the manager",
                place,
                position,
            )
        name = list(self.pools)[interval // 2 - 1]
        raise OutOfRangeError(
            f"page_ids[{position}] = {page} is out of range: pages of group {name} are 1 to {largest}: "
            "give the pools the capacity of the manager",
            page,
            position,
        )


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
