"""Stores the keys and values of one model. In: tokens, and tensors in transformers' form; out: the same
tensors for tokens that were stored before.

A `Manager` plans and `Pools` store. No row runs between calls: each row is admitted, read or written, and
released under one lock, so every page in use belongs to the tree. Every page in the tree has its keys and
values in all layers, because they are written before the next lookup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError, CapacityError, ConfigError, NotHeldError
from pagoda.layout import LatentAttention, Layout, PagedGroup
from pagoda.layout._numbers import num_bytes, show_bytes
from pagoda.manager import Manager
from pagoda.pools import Batch, Pools, TokenPool

__all__ = ["Columns", "Memory", "Tokens"]

Tokens: TypeAlias = npt.NDArray[np.int32]
# (layer, begin, end) → keys and values of these tokens, [heads, tokens, dim] each, or None if they are gone.
Columns: TypeAlias = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor] | None]

# Most tokens written in one step; fewer with windows, which need room for them.
CHUNK, WINDOW_CHUNK = 8192, 512
# Memory is divided between full layers and windows for requests of USUAL tokens, or shorter ones so that at
# least AT_LEAST requests fit.
USUAL, AT_LEAST = 2048, 8
ENDLESS = 2**20  # longest sequence if all layers are windows


@dataclass(frozen=True)
class Found:
    """What was found for the sequences of a batch: `num_columns` columns of each, padding included."""

    num_columns: int
    num_tokens: int  # of all sequences together
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]  # [sequences, heads, columns, dim] each, by layer
    num_bytes: int


class Memory:
    """The pools of one model, and the manager that plans them.

    `memory` is the size of the pools, padding included. Several threads may call. Errors: ConfigError if
    not even two pages of each group fit, or if the device has too little memory."""

    def __init__(self, layout: Layout, memory: int | str, device: torch.device) -> None:
        self.memory_bytes = num_bytes(memory)
        step = layout.resume_step
        longest = layout.longest_request(self.memory_bytes, chunk=step)
        if longest is not None and longest < 2 * step:
            needed = layout.memory_for(1, 2 * step, chunk=step)
            raise ConfigError(
                f"memory: {show_bytes(self.memory_bytes)} are too few to cache a prefix of this model: give "
                f"at least {show_bytes(needed)}, better several times the "
                f"{show_bytes(int(layout.request_bytes(USUAL)))} of {USUAL:,} tokens"
            )
        # Windows are kept where sequences end or branch: the shorter they are, the more windows there are.
        usual = USUAL if longest is None else min(USUAL, max(longest // AT_LEAST, 2 * step))
        self._has_windows = any(group.window for group in layout.paged_groups)
        self.chunk = max(step, (WINDOW_CHUNK if self._has_windows else CHUNK) // step * step)
        while (
            self._has_windows
            and self.chunk > step
            and layout.memory_for(1, usual, chunk=self.chunk) > self.memory_bytes
        ):
            self.chunk = max(step, self.chunk // 2 // step * step)
        budget = layout.divide(self.memory_bytes, usual, chunk=self.chunk if self._has_windows else 1)
        self.layout, self.device = layout, device
        held = budget.num_tokens
        self.max_tokens = ENDLESS if held is None else held
        given = show_bytes(self.memory_bytes)
        # Two rows: one to read or write, and one to read the window of the page before.
        capacity, num_rows, max_tokens = budget.capacity(), 2, self.max_tokens + 1
        try:
            self.manager = Manager(layout, capacity, num_rows=num_rows, max_tokens=max_tokens, workers=0)
        except ConfigError as error:
            raise ConfigError(f"memory: {given} are more than page ids can address: give less") from error
        try:
            self._pools = Pools(
                layout,
                capacity,
                num_rows=num_rows,
                max_tokens=max_tokens,
                device=device,
                max_step_tokens=min(self.chunk, self.max_tokens),
                max_indices={group.name: 1 for group in layout.paged_groups},  # nothing reads them
                workers=0,  # nor work lists
            )
        except RuntimeError as error:  # also torch.OutOfMemoryError
            raise ConfigError(f"memory: {given} cannot be allocated on {device}: give less") from error
        self._lock = threading.RLock()
        self._last: tuple[Any, Any] | None = None  # the last stream that used the pools, and an event on it

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages, padding included: never more than `memory_bytes`."""
        return sum(pool.memory_bytes() for pool in self._pools.pools.values())

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────

    def find(
        self, rows: Sequence[Tokens], pads: Sequence[int], copies: int, namespace: bytes, room: int = 0
    ) -> Found | None:
        """Return a copy of the cached columns of a batch, each sequence repeated `copies` times; None if
        nothing is cached.

        At least the last column is left to compute. If there is one sequence, full layers get room for `room`
        more columns than the batch has. Cost: one lookup per sequence and one copy of what was found."""
        with self._alone():
            columns = self._num_columns(rows, pads, namespace)
            known = [max(0, columns - pad) for pad in pads]
            if sum(known) == 0:
                return None
            slots: dict[str, list[npt.NDArray[np.int32]]] = {name: [] for name in self._pools.pools}
            for tokens, n in zip(rows, known, strict=True):
                for name, ids in self._slots(tokens, n, columns, namespace).items():
                    slots[name] += [ids] * copies
            layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            total = 0
            for group in self.layout.paged_groups:
                ids = np.concatenate(slots[group.name])
                more = len(rows[0]) + pads[0] - columns + room if group.window is None else 0
                read, size = self._gather(group, ids, len(rows) * copies, more)
                layers |= read
                total += size
            return Found(columns, sum(known), layers, total)

    def _num_columns(self, rows: Sequence[Tokens], pads: Sequence[int], namespace: bytes) -> int:
        """Return the columns that all sequences have. Hits are whole pages, but sequences begin at different
        columns, so some end inside a page; these need the windows of the page before, too."""

        def hit(row: Tokens) -> int:
            return int(self.manager.hit(row, namespace=namespace))

        columns = min(pad + hit(row) for row, pad in zip(rows, pads, strict=True))
        # Each iteration reduces the columns.
        while True:
            for row, pad in zip(rows, pads, strict=True):
                n = columns - pad
                ends = self._ends(n) if n > 0 and self._has_windows else []
                short = [found for end in ends if (found := hit(row[: end + 1])) < min(end, n)]
                if short:
                    columns = pad + min(short)
                    break
            else:
                return columns

    def _slots(self, row: Tokens, n: int, columns: int, namespace: bytes) -> dict[str, npt.NDArray[np.int32]]:
        """Return the slots of the first n tokens of a sequence, by group, −1 for the padding before them; for
        a window only those of its last columns."""
        admitted = [
            self.manager.admit(row[: end + 1], namespace=namespace, reserve=0) for end in self._ends(n)
        ]
        slots = {}
        for group in self.layout.paged_groups:
            size = group.page_tokens
            pages = np.zeros(max(1, -(-n // size)), np.int32)
            for each in reversed(admitted):  # the longer one last
                ids = self.manager.page_ids(each.row, group.name)[: pages.size]
                pages[: ids.size] = np.where(ids > 0, ids, pages[: ids.size])
            width = columns if group.window is None else min(columns, group.window - 1)
            at = np.arange(columns - width, columns) - (columns - n)  # positions in the row
            inside = np.maximum(at, 0)
            place = pages[inside // size] * size + inside % size
            slots[group.name] = np.where(at < 0, -1, place).astype(np.int32)
        self._release([each.row for each in admitted])
        return slots

    def _ends(self, n: int) -> list[int]:
        """Return the lengths to look up so that n tokens of a sequence can be read: the end of their last
        page and, with windows, of the last whole page. The longest comes first; 0 is omitted."""
        step = self.layout.resume_step
        ends = {-(-n // step) * step, n // step * step if self._has_windows else 0}
        return sorted(ends - {0}, reverse=True)

    def _gather(
        self, group: PagedGroup, slots: npt.NDArray[np.int32], num_rows: int, room: int
    ) -> tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], int]:
        """Copy the keys and values of all layers of a group: [sequences, heads, columns, dim] each."""
        pool = self._pool(group)
        shapes = [pool.k_shape] if pool.v_shape is None else [pool.k_shape, pool.v_shape]
        columns = slots.size // num_rows
        width = columns + room if num_rows == 1 else columns  # gathered columns have to be contiguous
        outs = [
            [torch.empty(num_rows, width, *shape, dtype=pool.dtype, device=self.device) for _ in group.layers]
            for shape in shapes
        ]
        pool.gather(slots, *([out[:, :columns] for out in side] for side in outs))
        found = {}
        for number, layer in enumerate(group.layers):
            sides = [side[number].transpose(1, 2) for side in outs]
            kind = self.layout.layers[layer][0]
            if isinstance(kind, LatentAttention):  # transformers has two tensors for its parts
                sides = list(sides[0].split([part.shape[0] for part in kind.entry.parts], dim=-1))
            found[layer] = (sides[0], sides[1])
        return found, sum(out.nbytes for side in outs for out in side)

    def _pool(self, group: PagedGroup) -> TokenPool:
        pool = self._pools[group.name]
        assert isinstance(pool, TokenPool)  # layouts with other pools are not served
        return pool

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────

    def keep(self, row: Tokens, columns: Columns, namespace: bytes) -> int:
        """Store the whole pages of a sequence that are not cached yet, as far as there is room, and return
        the number of tokens stored. Cost: one lookup and one copy of what is new."""
        step = self.layout.resume_step
        end = min(row.size, self.max_tokens) // step * step
        if end == 0:
            return 0
        with self._alone():
            # One more token, because the last one of a prompt is never a hit.
            try:
                admitted = self.manager.admit(
                    np.append(row[:end], np.int32(0)), namespace=namespace, reserve=0
                )
            except CapacityError:
                return 0
            number, begin = admitted.row, admitted.hit
            try:
                while begin < end:
                    n = min(self.chunk, end - begin)
                    self.manager.reserve(number, n)
                    batch = self._step(number, n)
                    if not self._write(batch, begin, begin + n, columns):
                        break
                    self.manager.commit(number, row[begin : begin + n])
                    begin += n
            except CapacityError:
                pass
            finally:
                self._release([number])
            return begin - admitted.hit

    def _write(self, batch: Batch, begin: int, end: int, columns: Columns) -> bool:
        """Write the tokens of a step in all layers; return False and write nothing if some are gone."""
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in self.layout.paged_groups:
            dtype = self._pool(group).dtype
            for number in group.layers:
                found = columns(number, begin, end)
                if found is None:
                    return False
                if found[0].dtype != dtype:
                    raise ArgumentError(
                        f"layer {number} computes {found[0].dtype}, but its pool stores {dtype}"
                    )
                read[number] = found
        for number, sides in read.items():
            layer = self._pools.layer(number)
            keys, values = (side.transpose(0, 1) for side in sides)
            if layer.values is None:
                layer.store(batch, torch.cat([keys, values], dim=-1))
            else:
                layer.store(batch, keys, values)
        return True

    def _release(self, rows: list[int]) -> None:
        self.manager.release(rows)
        self._step()

    def _step(self, rows: int | tuple[int, ...] = (), n: int = 0) -> Batch:
        """Plan a step and apply it. Work on the pools is ordered on one stream, so the step's fence can pass
        at once."""
        if self._pools.step != self.manager.step - 1:  # a call was interrupted
            self._pools.reset(self.manager.step - 1)
        delta = self.manager.plan(rows, n)
        self._pools.apply(delta)
        self.manager.pass_fence(delta.step)
        return self._pools.batch(delta)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Take the lock, release rows of interrupted calls, and order this stream after the last one."""
        with self._lock:
            held = self.manager.stats()
            if held.rows or held.waiting_rows:  # a call was interrupted
                self._release([row for row in (1, 2) if self._is_running(row)])
            if self.device.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(self.device)
            if self._last is None or self._last[0] != stream:
                if self._last is not None:
                    stream.wait_event(self._last[1])
                for buffer in self._pools.tensors():  # they may be freed while a copy is still running
                    buffer.record_stream(stream)
            try:
                yield
            finally:
                event = torch.cuda.Event()
                event.record(stream)
                self._last = stream, event

    def _is_running(self, row: int) -> bool:
        try:
            self.manager.reserved(row)
        except NotHeldError:
            return False
        return True

    # ── the whole ───────────────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """Forget all prefixes; the pools stay allocated."""
        with self._lock:
            self.manager.reset()
            self._pools.reset()

    def check(self) -> None:
        """Verify the manager and the pools. Errors: InvariantError."""
        with self._lock:
            self.manager.check()
            self._pools.check()
