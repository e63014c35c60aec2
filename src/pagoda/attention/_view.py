"""The metadata of a step, for one group or several: from tables on a device to what back ends read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.kernels.views import ViewBuffers, Views, ViewSpec
from pagoda.layout import PagedGroup
from pagoda.layout._numbers import count
from pagoda.pools._arguments import filled, require_buffer, resolve_device

__all__ = ["PagedView", "PagedViews"]


class PagedView:
    """Where the tokens of a batch lie in one group, as FlashInfer, FlashAttention and vLLM-style kernels ask.

    Made once for batches of up to `max_batch` rows and `max_tokens` queries, over tables of `max_pages`
    columns; `refresh` fills it in place for a step. Every tensor is made here, or the caller's in `buffers`
    by name, and never moves: captured graphs keep its address. A smaller batch takes the first of them,
    `view.seq_lens[:batch]`; what stands behind the batch is padding.

    ::

        seq_lens         [max_batch] int32         tokens of the row once the step is written; padding 0
        query_start_loc  [max_batch + 1] int32     queries of row i are [start i, start i + 1)
        slot_mapping     [max_tokens] int64        where each query is stored, page * page_tokens + offset;
                                                   padding −1
        block_table      [max_batch, width] int32  column c is the page of tokens c * page_tokens …;
                                                   0 where there is none, or no query reads it
        indptr           [max_batch + 1] int32     row i lists indices[indptr i] to indices[indptr i + 1]
        indices          [max_indices] int32       pages of all rows, one after the other; stale behind
                                                   indptr[−1]
        last_page_len    [max_batch] int32         tokens of the last page of a list; 0 for an empty one
        begins           [max_batch] int32         position of the first token of a list

    Pages are the kernel's here: those of the group, or of `kernel_page_tokens` tokens, which divide them
    into `split` parts: page p of the group is kernel pages p * split …, and width is max_pages * split.
    `page_tokens` are the tokens of one. Slots are the same in both.

    A window group lists only what a query of the step reads: begins[i] is where the page of token max(0,
    seq_lens[i] − queries − window + 1) begins, and the list has seq_lens[i] − begins[i] tokens. Back ends
    that align queries to the end of the keys (FlashInfer) count both from there: query j of n is at
    seq_lens[i] − begins[i] − n + j of the list, so that distances, the causal mask and `window_left` are
    what they were. Token t of the list has position begins[i] + t, which matters only to kernels that rotate
    by position themselves. With `sink_tokens` the first tokens are read too: nothing is cut.

    FlashInfer's `plan` wants `indptr` and `last_page_len` on the host, and waits for a device tensor: a
    second view on the CPU, over the manager's own table, has the same numbers there.

    `max_indices` is max_batch * width if left out. When a smaller one is passed, rows from the first that
    has no room have an empty list; their `block_table` is whole.

    Errors: ConfigError, naming the argument; also for groups of compressed entries.
    """

    def __init__(
        self,
        group: PagedGroup,
        max_batch: int,
        max_tokens: int,
        max_pages: int,
        device: torch.device | str = "cuda",
        *,
        kernel_page_tokens: int | None = None,
        max_indices: int | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if not isinstance(group, PagedGroup):
            raise ConfigError(f"group: give a PagedGroup of a Layout, not {type(group).__name__}")
        if group.storage.ratio > 1:
            raise ConfigError(
                f"group {group.name}: an entry stands for {group.storage.ratio} tokens: views list tokens"
            )
        self.group = group
        self.max_batch = count(max_batch, "max_batch")
        self.max_tokens = count(max_tokens, "max_tokens")
        self.max_pages = count(max_pages, "max_pages")
        self.page_tokens = group.page_tokens
        if kernel_page_tokens is not None:
            self.page_tokens = count(kernel_page_tokens, "kernel_page_tokens")
        if group.page_tokens % self.page_tokens:
            raise ConfigError(
                f"kernel_page_tokens: {self.page_tokens} does not divide the {group.page_tokens} tokens "
                f"of a page of group {group.name}"
            )
        self.device = resolve_device(device)
        width = self.max_pages * (group.page_tokens // self.page_tokens)
        size = self.max_batch * width if max_indices is None else count(max_indices, "max_indices")
        for number, what in (
            (self.max_pages * group.page_tokens, "tokens of a row"),
            (self.max_batch * width, "entries of block_table"),
            (size, "indices"),
            (self.max_tokens, "queries"),
        ):
            if number > 2**31 - 1:
                raise ConfigError(f"{min(number, 10**18)} {what} pass 2^31: give less")
        rows = (self.max_batch,)
        shapes = (
            ViewBuffers._fields,
            (
                rows,
                (self.max_batch + 1,),
                (self.max_batch, width),
                (self.max_batch + 1,),
                (size,),
                rows,
                rows,
                (self.max_tokens,),
            ),
        )
        given = dict(buffers or {})
        if unknown := given.keys() - set(ViewBuffers._fields):
            names = ", ".join(ViewBuffers._fields)
            raise ConfigError(f"buffers: a view has {names}, no {min(map(str, unknown))}")
        self.buffers = ViewBuffers(
            *(self._buffer(name, shape, given) for name, shape in zip(*shapes, strict=True))
        )
        self._at = [buffer.data_ptr() for buffer in self.buffers]
        # Sinks are read however far the window is: such rows are listed whole. No row is longer than 2^31.
        window = 0 if group.window is None or group.storage.sink_tokens else min(group.window, 2**31)
        self._spec = ViewSpec(self.buffers, self.max_pages, group.page_tokens, self.page_tokens, window)
        self._views = Views([self._spec], self.device)

    def _buffer(self, name: str, shape: tuple[int, ...], given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        dtype = torch.int64 if name == "slot_mapping" else torch.int32
        if name not in given:
            return filled(shape, dtype, self.device)
        require_buffer(given[name], shape, dtype, self.device, f"buffers[{name!r}]")
        return given[name]

    @property
    def seq_lens(self) -> torch.Tensor:
        """[max_batch] int32. O(1)."""
        return self.buffers.seq_lens

    @property
    def query_start_loc(self) -> torch.Tensor:
        """[max_batch + 1] int32: FlashInfer's `qo_indptr`, FlashAttention's `cu_seqlens_q`. O(1)."""
        return self.buffers.query_start_loc

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[max_tokens] int64, −1 for padding: where `TokenPool.store` puts the step's tokens. O(1)."""
        return self.buffers.slot_mapping

    @property
    def block_table(self) -> torch.Tensor:
        """[max_batch, width] int32, by position. O(1)."""
        return self.buffers.block_table

    @property
    def indptr(self) -> torch.Tensor:
        """[max_batch + 1] int32: FlashInfer's `paged_kv_indptr`. O(1)."""
        return self.buffers.indptr

    @property
    def indices(self) -> torch.Tensor:
        """[max_indices] int32: FlashInfer's `paged_kv_indices`. O(1)."""
        return self.buffers.indices

    @property
    def last_page_len(self) -> torch.Tensor:
        """[max_batch] int32: FlashInfer's `paged_kv_last_page_len`; 0 for an empty list. O(1)."""
        return self.buffers.last_page_len

    @property
    def begins(self) -> torch.Tensor:
        """[max_batch] int32: position of the first token that a row lists. O(1)."""
        return self.buffers.begins

    @property
    def window_left(self) -> int:
        """Keys that a query reads before its own, as FlashInfer and FlashAttention count; −1 is all. O(1)."""
        return -1 if self.group.window is None else self.group.window - 1

    def refresh(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> None:
        """Fill all buffers for a step.

        table: [num_rows + 1, max_pages] int32, the group's. rows: [batch] int32, 0 is padding. lengths:
        [batch] int32, tokens of each row once this step is written. query_start_loc: [batch + 1] int32,
        begins at 0 and does not fall; its last entry is the number of queries. All contiguous, on the
        view's device.

        Cost: on CUDA two launches that write every buffer once; nothing is made, nothing waits, and both
        can be captured once a call before has compiled them.

        Nothing is read back, so what the tensors say is not checked but cannot do harm: a row that
        is not in the table, or of a length below 0, beyond the table or below its number of queries, is
        padding: length 0, no pages, slots −1. A query whose page is 0 has slot −1. Queries beyond
        `max_tokens` have no slot. Errors: ArgumentError for shapes, dtypes, devices and batches too large.
        """
        _require(table, "table", 2, self.device)
        if table.shape[0] < 1 or table.shape[1] != self.max_pages:
            raise ArgumentError(
                f"table has shape {tuple(table.shape)}: give [num_rows + 1, {self.max_pages}], row 0 padding"
            )
        _require_batch(rows, lengths, query_start_loc, self.max_batch, self.device)
        self._views.refresh(table, table.shape[0], rows, lengths, query_start_loc)

    def memory_bytes(self) -> int:
        """Bytes of all buffers. O(1)."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def check(self) -> None:
        """Verify invariant 6. O(1). Errors: InvariantError."""
        if [buffer.data_ptr() for buffer in self.buffers] != self._at:
            raise InvariantError(6, "a buffer of the view has moved")


class PagedViews:
    """Views of several groups that are refreshed together, in the launches of one.

    `views` are in the order of their groups' tables in a flat one, as `Pools.flat_table` has them; batches
    are as large as the smallest takes. They stay the caller's, and each can be refreshed alone too. A
    captured graph reads memory of this object: keep it as long as the graph.

    Errors: ConfigError for no views, one that stands twice, or views of several devices.
    """

    def __init__(self, views: Sequence[PagedView]) -> None:
        self.views = tuple(views)
        for view in self.views:
            if not isinstance(view, PagedView):
                raise ConfigError(f"views: give PagedViews, not {type(view).__name__}")
        if not self.views or len({view.device for view in self.views}) > 1:
            raise ConfigError("views: give at least one, all of one device")
        if len(set(map(id, self.views))) != len(self.views):
            raise ConfigError("views: one stands twice")
        self.device = self.views[0].device
        self.max_batch = min(view.max_batch for view in self.views)
        self._num_columns = sum(view.max_pages for view in self.views)
        self._views = Views([view._spec for view in self.views], self.device)

    def refresh(
        self,
        flat_table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> None:
        """Fill all buffers of all views for a step, as `PagedView.refresh` does one by one.

        flat_table: [(num_rows + 1) * max_pages of all views] int32, the views' tables one after the other.
        The rest is as there, but no tensor may be a buffer of a view. Cost: on CUDA two launches, for any
        number of groups. Errors: ArgumentError.
        """
        _require(flat_table, "flat_table", 1, self.device)
        num_rows, rest = divmod(flat_table.shape[0], self._num_columns)
        if num_rows < 1 or rest:
            raise ArgumentError(
                f"flat_table has {flat_table.shape[0]} entries: give (num_rows + 1) * {self._num_columns}, "
                "the tables of all views"
            )
        _require_batch(rows, lengths, query_start_loc, self.max_batch, self.device)
        self._views.refresh(flat_table, num_rows, rows, lengths, query_start_loc)


def _require_batch(
    rows: Any, lengths: Any, query_start_loc: Any, max_batch: int, device: torch.device
) -> None:
    """An ArgumentError unless these describe a batch of at most so many rows on the device."""
    _require(rows, "rows", 1, device)
    _require(lengths, "lengths", 1, device)
    _require(query_start_loc, "query_start_loc", 1, device)
    batch = rows.shape[0]
    if batch > max_batch:
        raise ArgumentError(f"rows: {batch} are more than this view's max_batch = {max_batch}")
    if lengths.shape[0] != batch or query_start_loc.shape[0] != batch + 1:
        raise ArgumentError(
            f"{batch} rows need {batch} lengths and a query_start_loc of {batch + 1}, "
            f"not {lengths.shape[0]} and {query_start_loc.shape[0]}"
        )


def _require(tensor: Any, name: str, dims: int, device: torch.device) -> None:
    """An ArgumentError unless this is a contiguous int32 tensor of so many dimensions on the device."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name}: give an int32 tensor on {device}, not {type(tensor).__name__}")
    if tensor.dtype != torch.int32 or tensor.device != device:
        raise ArgumentError(
            f"{name}: give int32 on {device}, not {tensor.dtype} on {tensor.device}: it is used where it lies"
        )
    if tensor.layout != torch.strided or tensor.dim() != dims or not tensor.is_contiguous():
        raise ArgumentError(
            f"{name}: give a contiguous tensor of {dims} dimensions, not shape {tuple(tensor.shape)}"
        )
