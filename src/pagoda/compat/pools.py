"""The pools of a serving engine in three layers (rows to slots, slots, tensors), and states of GDN layers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat._words import in_words, of_one
from pagoda.errors import ArgumentError, CapacityError, ConfigError, InvariantError, UsageError
from pagoda.ids import FreeList
from pagoda.layout._numbers import count
from pagoda.pools import DeviceTable, Staging, StatePool, StateSpec, TokenPool
from pagoda.pools._arguments import (
    AnyIds,
    host_ids,
    is_unread,
    layer_number,
    number,
    refuse_capture,
    require_range,
    unread_ids,
)

__all__ = [
    "GDNPool",
    "KVPool",
    "ReqToTokenPool",
    "TokenToKVPoolAllocator",
    "make_full_attention_net_mem_pool",
    "make_req_to_token_pool",
]


def _num_pages(size: int, page_size: int) -> int:
    if size % page_size:
        raise ConfigError(f"size = {size} is not a multiple of page_size = {page_size}: give whole pages")
    if size + page_size > 2**31 - 1:
        raise ConfigError(f"size = {size} and page_size = {page_size}: slots exceed 2^31: give fewer")
    return size // page_size


class KVPool:
    """K and V buffers of `layer_num` layers for `size` slots; slots below page_size are padding.

    Each layer has one K buffer [size + page_size, k_head_num, k_head_dim] and one V buffer, whose heads and
    dim default to K's. fp8 buffers store value / scale, with one scale per layer. `pin_memory` pins CPU pools
    on machines with a CUDA device.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        size: int,
        layer_num: int,
        k_head_num: int,
        k_head_dim: int,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.float16,
        v_head_num: int | None = None,
        v_head_dim: int | None = None,
        pin_memory: bool = True,
        page_size: int = 1,
        k_scale: Sequence[float] | None = None,
        v_scale: Sequence[float] | None = None,
    ) -> None:
        size, page_size, layer_num = (
            count(size, "size", low=0),
            count(page_size, "page_size"),
            count(layer_num, "layer_num"),
        )
        k_head_num, k_head_dim = count(k_head_num, "k_head_num"), count(k_head_dim, "k_head_dim")
        v_head_num = k_head_num if v_head_num is None else count(v_head_num, "v_head_num")
        v_head_dim = k_head_dim if v_head_dim is None else count(v_head_dim, "v_head_dim")
        self._pool = TokenPool(
            _num_pages(size, page_size),
            page_size,
            layer_num,
            (k_head_num, k_head_dim),
            (v_head_num, v_head_dim),
            dtype,
            device,
            k_scale=k_scale,
            v_scale=v_scale,
            pin_memory=pin_memory,
        )
        self.size, self.page_size, self.layer_num = size, page_size, layer_num
        self.k_head_num, self.k_head_dim = k_head_num, k_head_dim
        self.v_head_num, self.v_head_dim = v_head_num, v_head_dim
        self.device, self.dtype, self.pin_memory = device, dtype, pin_memory
        self.k_scale, self.v_scale = self._pool.k_scale, self._pool.v_scale

    @property
    def k_buffer(self) -> list[torch.Tensor]:
        """The K buffers, one per layer."""
        return self._pool.k_buffer

    @property
    def v_buffer(self) -> list[torch.Tensor]:
        """The V buffers, one per layer."""
        return self._pool.v_buffer

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the K buffer of a layer, without a copy. Errors: ArgumentError."""
        return self.k_buffer[layer_number(layer_id, self.layer_num, "layer_id")]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the V buffer of a layer, without a copy. Errors: ArgumentError."""
        return self.v_buffer[layer_number(layer_id, self.layer_num, "layer_id")]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both buffers of a layer, without a copy. Errors: ArgumentError."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer_id: int, indices: AnyIds, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the tokens of k and v to slots of a layer. Cost and errors are those of `TokenPool.store`."""
        try:
            self._pool.store(layer_id, indices, k, v)
        except UsageError as error:
            in_words(error, layer="layer_id", slots="indices", keys="k", values="v")
            raise

    def mem_bytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return self._pool.memory_bytes()

    def check(self) -> None:
        """Verify invariants 6 and 7. Walks over everything. Errors: InvariantError."""
        self._pool.check()


class TokenToKVPoolAllocator:
    """Hands out slots page_size … size + page_size − 1 of a token pool, in whole pages.

    Lowest slots come first whatever `need_sort` is, since keeping the order costs nothing here. Thread-safe.

    Errors: ConfigError if size is not a multiple of page_size, or for an unknown device.
    """

    def __init__(
        self, size: int, device: torch.device | str = "cuda", page_size: int = 1, need_sort: bool = True
    ) -> None:
        self.size, self.page_size = count(size, "size", low=0), count(page_size, "page_size")
        self.device, self.need_sort = device, need_sort
        what = "pages" if self.page_size > 1 else "slots"
        self._pages = FreeList(_num_pages(self.size, self.page_size), what=what)
        self._staging = Staging(device)
        self._lock = threading.RLock()
        self._group = 0  # number of the latest free group, and the fence of the ids that it collects
        self._group_is_open = False
        # Ids on a device, which are read when the group ends, and an event for when each is ready.
        self._group_unread: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._group_contexts = 0  # open context managers: the outermost ends the group

    def available_size(self) -> int:
        """Return how many tokens can be allocated now, in whole pages."""
        return self._pages.num_free * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return need_size slots, [need_size] int32 on `device`, or None if too few are free.

        Whole pages are taken, and the caller holds them. Cost: O(need_size) on the host and one asynchronous
        copy. Errors: ArgumentError; CaptureError.
        """
        refuse_capture(self._staging.device, "alloc")
        return self._send(self.alloc_host(need_size))

    def alloc_host(self, need_size: int) -> npt.NDArray[np.int32] | None:
        """As `alloc`, but [need_size] int32 on the host: no device is touched."""
        if number(need_size, "need_size") > self.size:
            return None
        return self._grow([0], [need_size], [0])

    def alloc_extend(self, old_lens: AnyIds, new_lens: AnyIds, last_slots: AnyIds) -> torch.Tensor | None:
        """Return slots for requests that each grow from an old to a new length, or None if too few are free.

        The result is [sum(new_lens − old_lens)] int32 on `device`, request by request; it is all or nothing.
        Request i first fills the page of last_slots[i], the slot of its last token (ignored if old_lens[i]
        ends a page), then whole pages. A partly filled page belongs to one request: two requests of one call
        that name the same page are refused, but separate calls are not compared. Cost: O(requests + tokens);
        device tensors cost one synchronisation. Errors: ArgumentError for lengths that shrink or differ in
        number, or a last slot that does not fit; NotHeldError, OutOfRangeError; CaptureError.
        """
        refuse_capture(self._staging.device, "alloc_extend")
        return self._send(self.alloc_extend_host(old_lens, new_lens, last_slots))

    def alloc_extend_host(
        self, old_lens: AnyIds, new_lens: AnyIds, last_slots: AnyIds
    ) -> npt.NDArray[np.int32] | None:
        """As `alloc_extend`, but int32 on the host: no device is touched."""
        return self._grow(
            host_ids(old_lens, "old_lens"), host_ids(new_lens, "new_lens"), host_ids(last_slots, "last_slots")
        )

    def _grow(self, old_lens: Any, new_lens: Any, last_slots: Any) -> npt.NDArray[np.int32] | None:
        try:
            return self._pages.grow(old_lens, new_lens, last_slots, self.page_size)
        except CapacityError:
            return None

    def _send(self, slots: npt.NDArray[np.int32] | None) -> torch.Tensor | None:
        if slots is None:
            return None
        try:
            return self._staging.send(slots)[0]
        except BaseException:  # out of device memory, or Ctrl-C: return the pages that were taken
            self._pages.free(slots[slots % self.page_size == 0] // self.page_size)
            raise

    def free(self, indices: AnyIds) -> None:
        """Free slots: with page_size > 1, the pages of these slots, each once.

        A free group collects them, and reads and checks ids on a device when it ends. Otherwise a device
        tensor costs one synchronisation. Errors: DoubleFreeError, NotHeldError, OutOfRangeError,
        ArgumentError; nothing is freed then.
        """
        with self._lock:
            device = self._staging.device
            if self._group_is_open and is_unread(indices, device):
                refuse_capture(device, "collecting ids from a device tensor")
                # Copied, because the caller may overwrite its tensor, on any stream, before the group ends.
                copy = unread_ids(indices, "indices").clone()
                self._group_unread.append((copy, torch.cuda.current_stream(device).record_event()))
            else:
                self._free(host_ids(indices, "indices"), self._group if self._group_is_open else None)

    def _free(self, slots: npt.NDArray[np.int64], group: int | None) -> None:
        try:
            self._pages.free_slots(slots, self.page_size, fence=group)
        except UsageError as error:
            in_words(error, slots="indices")
            raise

    def free_group(self) -> _FreeGroup:
        """Return a context manager: the group begins when it is entered and ends when it is left.

        Nested inside another group, it is part of the outer one and ends with it.
        """
        return _FreeGroup(self)

    def free_group_begin(self) -> _FreeGroup:
        """Collect what any thread frees from now on, until `free_group_end`.

        If a group is already open, because an exception kept it from ending, it continues and loses nothing.
        The result may be used as a context manager that ends the group.
        """
        with self._lock:
            if not self._group_is_open:
                self._group += 1
                self._group_is_open = True
        return _FreeGroup(self)

    def _enter_group(self) -> None:
        with self._lock:
            self.free_group_begin()
            self._group_contexts += 1

    def _leave_group(self) -> None:
        with self._lock:
            self._group_contexts -= 1
            if self._group_contexts == 0:
                self.free_group_end()

    def free_group_end(self) -> None:
        """End the group and free everything that it collected. Without a group nothing happens.

        Device tensors cost one synchronisation. Errors: as `free`, for ids in device tensors: the group then
        ends and frees nothing.
        """
        with self._lock:
            if not self._group_is_open:
                return
            # Closed first, so that a finalizer that re-enters from here on begins another group.
            group, unread = self._group, self._group_unread
            self._group_is_open, self._group_unread = False, []
            try:
                if unread:
                    for _, written in unread:
                        torch.cuda.current_stream(self._staging.device).wait_event(written)
                    self._free(host_ids(torch.cat([ids for ids, _ in unread]), "indices"), group)
                self._pages.pass_fence(group)
            except BaseException:
                self._pages.recall(group)
                raise

    def merge_and_sort_free(self) -> None:
        """Do nothing: what was freed can always be allocated, lowest first."""

    def clear(self) -> None:
        """Free every slot and discard an open group."""
        with self._lock:
            self._pages.reset()
            self._group, self._group_is_open = 0, False
            self._group_unread.clear()

    def check(self) -> None:
        """Verify invariants 1 to 4, 7 and 8. Walks over everything. Errors: InvariantError."""
        with self._lock:
            self._pages.check()
            self._staging.check()
            if not self._group_is_open and (self._pages.num_quarantined or self._group_unread):
                raise InvariantError(8, "slots are collected although no free group is open")


class _FreeGroup:
    """A free group as a context manager, which also ends the group when an exception leaves it."""

    def __init__(self, allocator: TokenToKVPoolAllocator) -> None:
        self._allocator = allocator

    def __enter__(self) -> TokenToKVPoolAllocator:
        self._allocator._enter_group()
        return self._allocator

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._allocator._leave_group()


class ReqToTokenPool:
    """Maps (row, position) to a slot: `req_to_token` is int32 [max_reqs + 1, max_context_len].

    Rows are 1 … max_reqs, lowest first; row 0 is padding. It is a plain mapping: it knows no lengths, and any
    position may be overwritten. Thread-safe.

    Errors: ConfigError for sizes that are not positive or an unknown device.
    """

    def __init__(self, max_reqs: int, max_context_len: int, device: torch.device | str = "cuda") -> None:
        self.size = count(max_reqs, "max_reqs", low=0)
        self.max_context_len = count(max_context_len, "max_context_len")
        self._staging = Staging(device)
        self.device = device
        try:
            self._table = DeviceTable(self.size, self.max_context_len, device, self._staging)
        except ConfigError:
            raise ConfigError(
                f"max_reqs = {self.size} and max_context_len = {self.max_context_len}: the table exceeds "
                "2^31 places: give fewer requests or a shorter context"
            ) from None
        self._rows = FreeList(self.size, what="rows")

    @property
    def req_to_token(self) -> torch.Tensor:
        """The matrix, int32 [max_reqs + 1, max_context_len]; it never moves."""
        return self._table.tensor

    def available_size(self) -> int:
        """Return how many rows can be allocated now."""
        return self._rows.num_free

    def alloc(self, n: int = 1) -> list[int] | None:
        """Return n rows, or None if too few are free; the caller holds them. Errors: ArgumentError."""
        if number(n, "n") > self.size:
            return None
        try:
            rows: list[int] = self._rows.alloc(n).tolist()
        except CapacityError:
            return None
        return rows

    def free(self, slot: AnyIds) -> None:
        """Free one row or several.

        Errors: DoubleFreeError, NotHeldError, OutOfRangeError, ArgumentError; nothing is freed then.
        """
        rows = host_ids(slot, "slot")
        try:
            self._rows.free(rows)
        except UsageError as error:
            in_words(error, ids="slot")
            raise

    def write(self, index: tuple[Any, Any], values: Any) -> None:
        """Write slots at (row, slice(a, b)), or at (rows, positions), one position per row.

        Values may be on the host or on the device; neither costs a synchronisation. Rows and positions in a
        device tensor must be valid, since a check would wait for the device. Cost: that of
        `DeviceTable.write_at`. Errors: ArgumentError for an index of another form, values of another length
        or float values; OutOfRangeError for rows and positions on the host; CaptureError for host values on
        CUDA.
        """
        if not isinstance(index, tuple) or len(index) != 2:
            raise ArgumentError("index: give (row, slice(a, b)) or (rows, positions)")
        row, where = index
        if isinstance(where, slice):
            rows, positions = self._run(row, where)
        else:
            rows = self._ids(row, "index[0]", 0, self.size)
            positions = self._ids(where, "index[1]", 0, self.max_context_len - 1)
        new = self._ids(values, "values", -(2**31), 2**31 - 1)
        if isinstance(where, slice) and new.shape[0] != positions.shape[0]:
            raise ArgumentError(
                f"values: give one slot per position of the slice, {positions.shape[0]}, not {new.shape[0]}"
            )
        sizes = [rows.shape[0], positions.shape[0], new.shape[0]]
        n = max(sizes) if all(sizes) else 0
        if any(size not in (1, n) for size in sizes):
            raise ArgumentError(
                f"index and values have {sizes} rows, positions and values: give one of each per write"
            )
        self._table.write_at(rows, positions, new)

    def _run(self, row: Any, where: slice) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the row and the positions of (row, slice(a, b))."""
        at = host_ids(row, "index[0]")
        if at.size != 1:
            raise ArgumentError("index: give one row with a slice")
        require_range(at, 0, self.size, "index[0]", "rows")
        begin = number(0 if where.start is None else where.start, "index[1]")
        end = number(self.max_context_len if where.stop is None else where.stop, "index[1]")
        if number(1 if where.step is None else where.step, "index[1]") != 1:
            raise ArgumentError("index: give a slice without a step")
        if end > self.max_context_len or begin > end:
            raise ArgumentError(
                f"index: give a slice within 0 to {self.max_context_len} that does not end before it begins"
            )
        return at, np.arange(begin, end)

    def _ids(self, ids: Any, name: str, low: int, high: int) -> Any:
        """Return ids for `DeviceTable.write_at`: on the device as they are, else checked and on the host."""
        if is_unread(ids, self._staging.device):
            return unread_ids(ids, name)
        host = host_ids(ids, name)
        require_range(host, low, high, name, "valid ids")
        return host

    def clear(self) -> None:
        """Free every row; the contents of the matrix stay."""
        self._rows.reset()

    def check(self) -> None:
        """Verify invariants 1 to 4, 6 and 7. Walks over everything. Errors: InvariantError."""
        self._rows.check()
        self._table.check()


class GDNPool:
    """States of gated-delta-net layers, indexed by the rows of `ReqToTokenPool`, then by track slots.

    `recurrent_state` is float32 [layers, rows, num_v_heads, head_v_dim, head_k_dim] (V before K),
    `conv_state` is `dtype` [layers, rows, conv_dim, conv_kernel_size − 1]. Index 0 is padding, 1 … max_reqs
    are the rows of requests, and the max_track_slots indices from max_reqs + 1 on hold snapshots.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        max_reqs: int,
        num_gdn_layers: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_dim: int,
        conv_kernel_size: int,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        max_track_slots: int = 0,
    ) -> None:
        self.max_reqs = count(max_reqs, "max_reqs", low=0)
        self.max_track_slots = count(max_track_slots, "max_track_slots", low=0)
        self.num_gdn_layers = count(num_gdn_layers, "num_gdn_layers")
        self.num_v_heads, self.head_v_dim = count(num_v_heads, "num_v_heads"), count(head_v_dim, "head_v_dim")
        self.head_k_dim, self.conv_dim = count(head_k_dim, "head_k_dim"), count(conv_dim, "conv_dim")
        self.conv_kernel_size = count(conv_kernel_size, "conv_kernel_size")
        self.device, self.dtype = device, dtype
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ConfigError(f"dtype: give float16, bfloat16 or float32, not {dtype}")
        parts = {
            "recurrent": StateSpec((self.num_v_heads, self.head_v_dim, self.head_k_dim), torch.float32),
            "conv": StateSpec((self.conv_dim, self.conv_kernel_size - 1), dtype),
        }
        self._pool = StatePool(self.max_reqs + self.max_track_slots, self.num_gdn_layers, parts, device)
        self._tracks = FreeList(self.max_track_slots, first_id=self.max_reqs + 1, what="track slots")

    @property
    def recurrent_state(self) -> torch.Tensor:
        """The recurrent states of all layers; the tensor never moves."""
        return self._pool.tensors["recurrent"]

    @property
    def conv_state(self) -> torch.Tensor:
        """The convolution states of all layers; the tensor never moves."""
        return self._pool.tensors["conv"]

    def get_layer_state(self, gdn_layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's recurrent and convolution states. Errors: ArgumentError."""
        layer = self._pool.layer(layer_number(gdn_layer_idx, self.num_gdn_layers, "gdn_layer_idx"))
        return layer["recurrent"], layer["conv"]

    def reset_states(self, req_pool_indices: AnyIds) -> None:
        """Zero the states of rows in all layers. Cost and errors are those of `StatePool.reset`."""
        try:
            self._pool.reset(req_pool_indices)
        except UsageError as error:
            in_words(error, rows="req_pool_indices")
            raise

    def copy_states(self, src_index: AnyIds, dst_index: AnyIds) -> None:
        """Copy states between rows and track slots. Cost and errors are those of `StatePool.copy`."""
        try:
            self._pool.copy(src_index, dst_index)
        except UsageError as error:
            in_words(error, source="src_index", target="dst_index")
            raise

    def alloc_track_slot(self) -> int | None:
        """Return the lowest free track slot, or None; the caller holds it."""
        try:
            return int(self._tracks.alloc(1)[0])
        except CapacityError:
            return None

    def free_track_slot(self, slot: int) -> None:
        """Free a track slot. Errors: NotHeldError, OutOfRangeError, ArgumentError."""
        try:
            self._tracks.free([slot])
        except UsageError as error:
            of_one(error, "slot")
            raise

    def mem_bytes(self) -> int:
        """Bytes of both states, padding and track slots included."""
        return self._pool.memory_bytes()

    def check(self) -> None:
        """Verify invariants 1 to 4, 6 and 7. Walks over everything. Errors: InvariantError."""
        self._tracks.check()
        self._pool.check()


def make_req_to_token_pool(
    max_reqs: int, max_context_len: int, device: torch.device | str = "cuda"
) -> ReqToTokenPool:
    """Make a `ReqToTokenPool`. Cost and errors are those of the class."""
    return ReqToTokenPool(max_reqs, max_context_len, device)


def make_full_attention_net_mem_pool(
    size: int,
    layer_num: int,
    k_head_num: int,
    k_head_dim: int,
    v_head_num: int,
    v_head_dim: int,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.float16,
    page_size: int = 1,
    need_sort: bool = True,
    pin_memory: bool = True,
) -> tuple[KVPool, TokenToKVPoolAllocator]:
    """Make a `KVPool` and the allocator of its slots. Cost and errors are those of the classes."""
    pool = KVPool(
        size,
        layer_num,
        k_head_num,
        k_head_dim,
        device=device,
        dtype=dtype,
        v_head_num=v_head_num,
        v_head_dim=v_head_dim,
        pin_memory=pin_memory,
        page_size=page_size,
    )
    return pool, TokenToKVPoolAllocator(size, device=device, page_size=page_size, need_sort=need_sort)
