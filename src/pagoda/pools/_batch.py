"""What kernels read about a step. In: a delta that was applied; out: fixed buffers, on the device and on the
host.

Every buffer is declared here, once. On CUDA two launches fill them from the device's tables. On a CPU, and
for back ends that want the numbers on the host, native code fills them from the host's tables. Both agree in
every number. Buffers never move, because captured graphs keep their addresses. Invariant 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pagoda import kernels
from pagoda._native import DECODE_QUERIES, EXTEND_PARTS, Rank, most_parts
from pagoda.errors import ArgumentError, CaptureError, ConfigError, InvariantError, StaleError
from pagoda.layout import Layout, PagedGroup
from pagoda.layout._numbers import counted
from pagoda.manager import Delta
from pagoda.pools._arguments import filled, is_capturing, number, require_buffer

__all__ = ["Batch", "BatchBuffers", "GroupBatch", "HostBatch", "Work"]

Array = TypeVar("Array", torch.Tensor, npt.NDArray[Any])


class Declared(NamedTuple):
    """A buffer. `length`: it has one element per row, token, page index, run, task or split of the batch, and
    `extra` more; with `columns`, an element is a row of so many numbers, and with `wide` one of the page
    table."""

    length: str
    dtype: torch.dtype
    extra: int = 0
    wide: bool = False
    columns: int = 0


SHARED = {
    "rows": Declared("rows", torch.int32),
    "lengths": Declared("rows", torch.int32),
    "query_start_loc": Declared("rows", torch.int32, extra=1),
    "positions": Declared("tokens", torch.int64),
    "batch_indices": Declared("tokens", torch.int32),
    "extends": Declared("rows", torch.int32, extra=1, columns=2),
}
PER_GROUP = {
    "slot_mapping": Declared("tokens", torch.int64),
    "page_table": Declared("rows", torch.int32, wide=True),
    "indptr": Declared("rows", torch.int32, extra=1),
    "indices": Declared("indices", torch.int32),
    "last_page_len": Declared("rows", torch.int32),
    "begins": Declared("rows", torch.int32),
    "runs": Declared("runs", torch.int32),
    "tasks": Declared("tasks", torch.int32, columns=8),
    "splits": Declared("splits", torch.int32, columns=2),
}
NUMPY = {torch.int32: np.int32, torch.int64: np.int64}


class Geometry(NamedTuple):
    """How kernels see the pages of a group."""

    group: PagedGroup
    max_pages: int  # per row
    kernel_page_tokens: int
    max_indices: int
    target: int  # of its work list; 0: it has none

    @property
    def width(self) -> int:
        return self.max_pages * (self.group.page_tokens // self.kernel_page_tokens)

    @property
    def window(self) -> int:
        # Sink tokens are read wherever the window is, so such rows list all pages. No row is longer than
        # 2^31.
        if self.group.window is None or self.group.storage.sink_tokens:
            return 0
        return min(self.group.window, 2**31)


class Sizes(NamedTuple):
    rows: int
    tokens: int

    def length(self, what: str, target: int) -> int:
        """Return the length of the buffers of this kind."""
        if what == "tokens":
            return self.tokens
        if what == "rows":
            return self.rows
        if not target:
            return 0
        return {"runs": target + 1, "tasks": self.rows + target, "splits": self.rows}[what]


class Rows(NamedTuple):
    """Rows of a batch by what they compute."""

    decode: int  # rows of 1 to DECODE_QUERIES tokens
    extend: int  # rows of more
    extend_tokens: int  # tokens of the latter


class Parts(NamedTuple):
    """What kernels need room for in one group."""

    num_parts: int
    extend_parts: int


class Work(NamedTuple, Generic[Array]):
    """What attention computes in one group, divided among `target` programs per KV head.

    A decode row computes at most `DECODE_QUERIES` tokens. Its keys are in one segment, or are split into
    several, whose results are merged: part p of query q of a row with `count` queries is number
    first + p * count + q of all parts. An extend row computes more tokens; kernels divide its queries
    themselves, and the keys of each tile into as many parts as `splits` says.

    ::

        runs    [target + 1] int32        program p computes tasks runs[p], …, runs[p + 1] − 1
        tasks   [rows + target, 8] int32  one per segment: first key, end of the keys, index of the row in the
                                          batch, first part or −1; of the row: first token in the step, tokens
                                          in the step, length; number of its parts if this is the first of
                                          several, else 0
        splits  [rows, 2] int32           number of parts of each row, and the first; −1 if it is not split
    """

    runs: Array
    tasks: Array
    splits: Array
    num_parts: int  # that memory for results has to have room for
    extend_parts: int  # the most parts of an extend row
    has_list: bool  # False: nothing is listed, since the pools have no workers or the group stores entries


class BatchBuffers:
    """All buffers of a rank's batches, for up to `max_rows` rows and `max_tokens` tokens per step."""

    def __init__(
        self,
        layout: Layout,
        geometries: Sequence[Geometry],
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        given: Mapping[str, torch.Tensor],
    ) -> None:
        self.layout = layout
        self.geometries = {geometry.group.name: geometry for geometry in geometries}
        self.max_rows, self.max_tokens, self.device = max_rows, max_tokens, device
        names = [*SHARED, *(f"{group}.{name}" for group in self.geometries for name in PER_GROUP)]
        if unknown := set(given) - set(names):
            raise ConfigError(
                f"buffers: there is no buffer {str(min(map(str, unknown)))[:60]!r}: use {', '.join(names)}"
            )
        self.tensors: dict[str, torch.Tensor] = {}
        for name in names:
            shape, dtype = self.shape(name)
            if name in given:
                require_buffer(given[name], shape, dtype, device, f"buffers[{name!r}]")
                self.tensors[name] = given[name]
            else:
                self.tensors[name] = filled(shape, dtype, device)
        places = [tensor.data_ptr() for tensor in self.tensors.values() if tensor.numel()]
        if len(set(places)) < len(places):
            raise ConfigError("buffers: two names have the same memory: give each a tensor of its own")
        self._shared = tuple(self.tensors[name] for name in SHARED)
        self.num_fills = 0  # a batch is stale once there was another
        self._at = self.addresses()
        self._host: dict[str, npt.NDArray[Any]] | None = None
        self._scratch: list[torch.Tensor] = []  # the last one is in use; graphs may use the others
        if device.type == "cuda":
            fused = kernels.triton_module("_batch_fused")
            with kernels.on_device(device):
                self._prepared = fused.prepare(
                    [
                        fused.GroupPages(
                            geometry.max_pages,
                            geometry.group.page_tokens,
                            geometry.kernel_page_tokens,
                            geometry.window,
                            geometry.target,
                            *(self.tensors[f"{name}.{each}"] for each in PER_GROUP),
                        )
                        for name, geometry in self.geometries.items()
                    ]
                    or [fused.no_pages(max_rows, max_tokens, device)],
                    device,
                )

    def declared(self, name: str) -> tuple[Declared, Geometry | None]:
        """Return the declaration of a buffer, and its group's geometry if its name is `group.name`."""
        if name in SHARED:
            return SHARED[name], None
        group, _, own = name.rpartition(".")
        return PER_GROUP[own], self.geometries[group]

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a whole buffer."""
        what, geometry = self.declared(name)
        if geometry is not None and what.length == "indices":
            return (geometry.max_indices if self.max_rows else 0,), what.dtype
        sizes = Sizes(self.max_rows, self.max_tokens)
        target = geometry.target if geometry is not None and self.max_rows else 0
        length = sizes.length(what.length, target) + what.extra
        columns = geometry.width if geometry is not None and what.wide else what.columns
        return (length, columns) if columns or what.wide else (length,), what.dtype

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return at least `num_bytes` of memory that kernels of one step use and no later step reads: uint8.

        It grows, but stays allocated with the pools, since captured graphs keep its address. Errors:
        CaptureError if it would have to grow while the stream is being captured.
        """
        if not self._scratch or self._scratch[-1].shape[0] < num_bytes:
            if is_capturing(self.device):
                raise CaptureError(
                    f"attention needs {num_bytes} bytes of memory, which cannot be allocated during a "
                    "capture: call attention.paged once before the capture, with a batch of the same size"
                )
            size = max(1 << 16, 1 << (number(num_bytes, "num_bytes") - 1).bit_length())
            with torch.inference_mode(False):
                self._scratch.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return self._scratch[-1]

    def parts_for(self, padded: Sizes, max_queries: int) -> list[tuple[int, int]]:
        """Return the most parts of any batch of this size, of each group: all, and of one extend row."""
        extend = EXTEND_PARTS if max_queries > DECODE_QUERIES else 1
        return [
            (most_parts(*padded, max_queries, geometry.target) if geometry.target else 0, extend)
            for geometry in self.geometries.values()
        ]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors.values()]

    def fill_device(
        self,
        packed: npt.NDArray[np.int32],
        sent: torch.Tensor | None,
        found: tuple[int, int, int, int, int],
        padded: Sizes,
        table: torch.Tensor,
        rank: Rank,
    ) -> None:
        """Fill the buffers on the device.

        `found`: the number of rows of the step, and where its rows, lengths, starts and work begin in
        `packed`.
        """
        self.num_fills += 1
        if self.device.type == "cpu":
            rank.fill(packed, *padded, self._at)
            return
        num_rows, *sections = found
        if sent is None:  # an empty delta was not sent, and nothing of it is read
            sent = table
        with kernels.on_device(self.device):
            kernels.triton_module("_batch_fused").fill(
                self._prepared,
                table,
                self.max_rows + 1,  # of each table, row 0 included
                sent,
                tuple(sections),
                num_rows,
                *padded,
                self._shared,
            )

    def fill_host(
        self, packed: npt.NDArray[np.int32], padded: Sizes, rank: Rank
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the same buffers on the host, in arrays that are allocated once."""
        if self.device.type == "cpu":
            return {name: tensor.numpy() for name, tensor in self.tensors.items()}
        if self._host is None:
            self._host = {
                name: np.zeros(shape, NUMPY[dtype])
                for name in self.tensors
                for shape, dtype in [self.shape(name)]
            }
        rank.fill(packed, *padded, [array.ctypes.data for array in self._host.values()])
        return self._host

    def all_tensors(self) -> list[torch.Tensor]:
        return [*self.tensors.values(), *self._scratch]

    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.all_tensors())

    def check(self) -> None:
        if self.addresses() != self._at:
            raise InvariantError(6, "a buffer of batches has moved")


class _Views(Generic[Array]):
    """Views of buffers, cut to the rows and tokens of one step on access."""

    def __init__(
        self,
        buffers: BatchBuffers,
        arrays: Mapping[str, Array],
        padded: Sizes,
        parts: Mapping[str, Parts],
        prefix: str = "",
    ) -> None:
        self._buffers, self._padded, self._parts, self._prefix = buffers, padded, parts, prefix
        self._arrays: Mapping[str, Array] = arrays

    def _view(self, name: str) -> Array:
        what, geometry = self._buffers.declared(self._prefix + name)
        whole = self._arrays[self._prefix + name]
        if what.length == "indices":
            return whole
        target = geometry.target if geometry is not None else 0
        return whole[: self._padded.length(what.length, target) + what.extra]


class GroupBatch(_Views[Array]):
    """Where a batch's tokens are in one group, as FlashInfer, FlashAttention and vLLM-style kernels take it.

    ::

        slot_mapping   [tokens] int64       slot of each token: page id * page_tokens + offset; padding −1
        page_table     [rows, width] int32  column c is the page of tokens c * page_tokens and up; 0 if the
                                            row has no such page or no query reads it
        indptr         [rows + 1] int32     row i lists indices[indptr[i] : indptr[i + 1]]
        indices        [max_indices] int32  pages of all rows, one after the other; stale from
                                            indptr[−1] on
        last_page_len  [rows] int32         tokens in the last page of a list; 0 for an empty list
        begins         [rows] int32         position of the first token of a list

    Pages here are the kernel's: those of the group, or smaller ones of `kernel_page_tokens` tokens, which
    divide them. Slots are the same for both. A window group lists only the pages that a query of the step
    reads: begins[i] is the first position in the page of token max(0, lengths[i] − queries − window + 1).
    Back ends that align queries to the end of the keys (FlashInfer) count both from there, so distances, the
    causal mask and `window_left` stay right.
    """

    @property
    def group(self) -> PagedGroup:
        """The group of the layout."""
        return self._geometry.group

    @property
    def page_tokens(self) -> int:
        """Tokens per page of the kernel."""
        return self._geometry.kernel_page_tokens

    @property
    def window_left(self) -> int:
        """Keys that a query reads before its own, as FlashInfer and FlashAttention count; −1 means all."""
        return -1 if self.group.window is None else self.group.window - 1

    @property
    def _geometry(self) -> Geometry:
        return self._buffers.geometries[self._prefix[:-1]]

    @property
    def slot_mapping(self) -> Array:
        """[tokens] int64: the slots for `TokenPool.store`; −1 for padding."""
        return self._view("slot_mapping")

    @property
    def page_table(self) -> Array:
        """[rows, width] int32, indexed by position: FlashAttention's `block_table`."""
        return self._view("page_table")

    @property
    def indptr(self) -> Array:
        """[rows + 1] int32: FlashInfer's `paged_kv_indptr`."""
        return self._view("indptr")

    @property
    def indices(self) -> Array:
        """[max_indices] int32: FlashInfer's `paged_kv_indices`."""
        return self._view("indices")

    @property
    def last_page_len(self) -> Array:
        """[rows] int32: FlashInfer's `paged_kv_last_page_len`; 0 for an empty list."""
        return self._view("last_page_len")

    @property
    def begins(self) -> Array:
        """[rows] int32: the position of the first token that a row lists."""
        return self._view("begins")

    @cached_property
    def work(self) -> Work[Array]:
        """What attention computes. Tasks behind those of the step are 0, and rows of padding have splits
        (0, −1)."""
        return Work(
            self._view("runs"),
            self._view("tasks"),
            self._view("splits"),
            *self._parts[self.group.name],
            self._geometry.target > 0,
        )


class _Rows(_Views[Array]):
    """What all groups of a batch share, and the groups by name."""

    @property
    def rows(self) -> Array:
        """[rows] int32: the manager's rows; 0 is padding."""
        return self._view("rows")

    @property
    def state_ids(self) -> Array:
        """[rows] int32: the state id of each row; 0 is padding. The state of row r is state r."""
        return self._view("rows")

    @property
    def lengths(self) -> Array:
        """[rows] int32: tokens of each row once the step is computed; padding 0. FlashAttention's
        `cache_seqlens`.
        """
        return self._view("lengths")

    @property
    def query_start_loc(self) -> Array:
        """[rows + 1] int32: FlashInfer's `qo_indptr`, FlashAttention's `cu_seqlens_q`."""
        return self._view("query_start_loc")

    @property
    def positions(self) -> Array:
        """[tokens] int64: the position of each token of the step in its row; padding 0."""
        return self._view("positions")

    @property
    def batch_indices(self) -> Array:
        """[tokens] int32: where the row of each token is in `rows`; padding −1. As FlashInfer appends."""
        return self._view("batch_indices")

    @property
    def extends(self) -> Array:
        """[rows + 1, 2] int32: the number of extend rows and of their tokens; then, for each extend row, its
        index in `rows` and the tokens of extend rows before it; then 0."""
        return self._view("extends")

    @cached_property
    def _groups(self) -> dict[str, GroupBatch[Array]]:
        return {
            name: GroupBatch(self._buffers, self._arrays, self._padded, self._parts, f"{name}.")
            for name in self._buffers.geometries
        }

    def __getitem__(self, name: str) -> GroupBatch[Array]:
        if name not in self._buffers.geometries:
            names = ", ".join(self._buffers.geometries)
            raise ArgumentError(f"name: there is no group {str(name)[:40]!r}: the groups are {names}")
        return self._groups[name]


class HostBatch(_Rows[npt.NDArray[Any]]):
    """A batch on the host, as numpy arrays, for back ends whose `plan` wants them there."""


class Batch(_Rows[torch.Tensor]):
    """The rows of one step, and everything kernels read about them, in buffers that never move.

    `num_rows` rows compute `num_tokens` tokens, each row its last ones. Tensors are padded with rows of
    length 0 and tokens whose slot is −1. `batch[name]` is the part of one group. The contents are valid until
    the next `Pools.batch`.

    `max_queries` is the most tokens that a row computes, in this step or in later ones that replay a graph
    captured with the batch.
    """

    def __init__(
        self,
        buffers: BatchBuffers,
        padded: Sizes,
        max_queries: int,
        is_exact: bool,
        parts: Mapping[str, Parts],
        num_rows: int,
        num_tokens: int,
        delta: Delta,
        rank: Rank,
        is_last: Callable[[Delta], bool],
    ) -> None:
        super().__init__(buffers, buffers.tensors, padded, parts)
        self.max_queries, self._is_exact = max_queries, is_exact
        self.num_rows, self.num_tokens, self.step = num_rows, num_tokens, delta.step
        self._delta, self._rank, self._is_last = delta, rank, is_last
        self._fill = buffers.num_fills

    @property
    def layout(self) -> Layout:
        """The layout of the pools."""
        return self._buffers.layout

    @cached_property
    def most_rows(self) -> Rows:
        """How many rows of each kind the batch has. If `pad_to` or `max_queries` was given, a bound that also
        holds for other batches which replay a graph captured with this one."""
        rows, tokens = self._padded
        if not self._is_exact:
            if self.max_queries <= DECODE_QUERIES:
                return Rows(rows, 0, 0)
            return Rows(rows, min(rows, tokens // (DECODE_QUERIES + 1)), tokens)
        counts = self._delta.counts
        extends = counts[counts > DECODE_QUERIES]
        return Rows(int((counts > 0).sum()) - len(extends), len(extends), int(extends.sum()))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._buffers.device

    @property
    def longest(self) -> tuple[int, int]:
        """The largest length of a row, and the most tokens that a row computes, as the host knows them."""
        delta = self._delta
        return int(delta.lengths.max(initial=0)), int(delta.counts.max(initial=0))

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return at least `num_bytes` of memory that kernels of one step use: uint8.

        It stays allocated with the pools, and grows only outside of captures. Errors: CaptureError.
        """
        return self._buffers.scratch(num_bytes)

    def require_capturable(self) -> None:
        """Raise a CaptureError while a graph is captured, if the batch was made without `pad_to` and
        `max_queries`: a later step of the same size may need more than such a batch has room for."""
        if self._is_exact and is_capturing(self.device):
            raise CaptureError(
                "batch: it fits its own step only: make it with pad_to and max_queries for a graph"
            )

    def require_current(self) -> None:
        """Raise a StaleError if the buffers have been filled again, and so are about another step."""
        if self._fill != self._buffers.num_fills:
            raise StaleError(
                f"batch: Pools.batch was called again since this one of step {self.step}: use that"
            )

    @property
    def host(self) -> HostBatch:
        """The same numbers on the host. They are computed there: nothing is read back.

        Valid until the next `Pools.batch`. Errors: StaleError once a later delta was applied.
        """
        if not self._is_last(self._delta):
            raise StaleError(
                f"step {self.step} is not the last one applied: read batch.host before the next Pools.apply"
            )
        return HostBatch(
            self._buffers,
            self._buffers.fill_host(self._delta.packed, self._padded, self._rank),
            self._padded,
            self._parts,
        )

    def __repr__(self) -> str:
        rows, tokens = self._padded
        return (
            f"Batch(step {self.step}: {counted(self.num_tokens, 'token')} of "
            f"{counted(self.num_rows, 'row')}, "
            f"padded to {tokens} and {rows}, on {self.device})"
        )
