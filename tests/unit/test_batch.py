"""Batches against numbers written out in Python and what back ends document; layers by their number."""

import gc
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.attention import hnd_pages, nhd_pages, paged
from pagoda.errors import ArgumentError, ConfigError, InvariantError, OutOfRangeError, StaleError
from pagoda.layout import (
    FullAttention,
    LatentAttention,
    Layout,
    SharedAttention,
    WindowAttention,
    latent,
)
from pagoda.layout._work import WORKERS
from pagoda.manager import Delta, Manager
from pagoda.pools import Batch, HostBatch, Pools, Staging
from unit.batch_model import Pages, Row, model, positions_read, slot_at
from unit.deltas import delta_of, lists_for

NUM_ROWS, CAPACITY = 6, 99
KV: dict[str, Any] = {"kv_heads": 2, "k_dim": 8, "v_dim": 8}
SHARED = ("rows", "lengths", "query_start_loc", "positions", "batch_indices", "extends")
PER_GROUP = ("slot_mapping", "page_table", "indptr", "indices", "last_page_len", "begins")
WORK = ("runs", "tasks", "splits")


def layer_of(window: int | None = None, sink_tokens: int = 0, v_dim: int = 8) -> Any:
    sizes = {**KV, "v_dim": v_dim}
    if window is None:
        return FullAttention(**sizes)
    return WindowAttention(**sizes, window=window, sink_tokens=sink_tokens)


class Case(NamedTuple):
    """Pools whose tables hold known ids, and a step of some rows."""

    pools: Pools
    groups: list[Pages]
    rows: list[Row]
    delta: Delta

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.rows), sum(row.count for row in self.rows)


def case_of(
    layout: Layout, tables: list[list[list[int]]], rows: list[Row], device: str = "cpu", **more: Any
) -> Case:
    """tables[group][row]: ids of rows 0 and up, where row 0 is padding and has none."""
    max_tokens = len(tables[0][0]) * layout.paged_groups[0].page_tokens
    capacity = {group.name: CAPACITY for group in layout.paged_groups}
    num_rows = len(tables[0]) - 1
    sizes = {"max_step_tokens": max(1, num_rows * max_tokens), **more}
    pools = Pools(layout, capacity, num_rows=num_rows, max_tokens=max_tokens, device=device, **sizes)
    places, ids, begin = [], [], 0
    for table in tables:
        width = len(table[0])
        flat = [id_ for row in table for id_ in row]
        places += range(begin + width, begin + len(flat))
        ids += flat[width:]
        begin += len(flat)
    delta = delta_of(
        1,
        rows=[row.number for row in rows],
        lengths=[row.length for row in rows],
        counts=[row.count for row in rows],
        places=places,
        page_ids=ids,
        num_groups=len(tables),
        **lists_for(pools),
    )
    pools.apply(delta)
    kernel_pages, limits = more.get("kernel_page_tokens", {}), more.get("max_indices", {})
    groups = []
    for group, table in zip(layout.paged_groups, tables, strict=True):
        size = kernel_pages.get(group.name, group.page_tokens)
        width = len(table[0]) * group.page_tokens // size
        window = None if group.storage.sink_tokens else group.window
        limit = limits.get(group.name, num_rows * width)
        target = pools._buffers.geometries[group.name].target
        groups.append(Pages(group.name, group.page_tokens, size, window, table, limit, target))
    return Case(pools, groups, rows, delta)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to three groups with pages of any sizes; rows in any order; ids 0 and stale ids anywhere."""
    kernel_page = draw(st.sampled_from([1, 2, 3, 16]))
    splits = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    layers, page_tokens, kernel_pages = [], {}, {}
    for number, split in enumerate(splits):
        window = draw(st.sampled_from([None, 1, 2, 5, 16, 40]))
        sinks = 0 if window is None else draw(st.sampled_from([0, 0, 3]))
        layers.append(layer_of(window, sinks, 8 + number))
        (name,) = {g.name for g in Layout(layers, 4).paged_groups} - set(page_tokens)
        page_tokens[name], kernel_pages[name] = kernel_page * split, kernel_page
    layout = Layout(layers, page_tokens)
    max_tokens = 4 * kernel_page * draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = []
    for group in layout.paged_groups:
        table = random.integers(0, CAPACITY + 1, (NUM_ROWS + 1, max_tokens // group.page_tokens))
        table[0] = 0
        tables.append(table.tolist())
    rows = []
    for number in draw(st.permutations(range(1, NUM_ROWS + 1)))[: draw(st.integers(0, NUM_ROWS))]:
        length = draw(st.integers(0, max_tokens))
        count = min(draw(st.sampled_from([0, 1, 1, 2, 7, length])), length)
        rows.append(Row(number, length, count))
    limits = {name: draw(st.sampled_from([1, 5, 10_000])) for name in page_tokens}
    workers = draw(st.sampled_from([0, 1, 5, WORKERS]))
    return case_of(layout, tables, rows, kernel_page_tokens=kernel_pages, max_indices=limits, workers=workers)


def buffers_of(pools: Pools) -> dict[str, torch.Tensor]:
    return pools._buffers.tensors


def numbers_of(batch: Batch | HostBatch, names: list[str]) -> dict[str, Any]:
    """Every buffer of a batch as lists, `indices` as far as they are listed."""
    found = {name: getattr(batch, name).tolist() for name in SHARED}
    for group in names:
        for name in PER_GROUP:
            found[f"{group}.{name}"] = getattr(batch[group], name).tolist()
        for name in WORK:
            found[f"{group}.{name}"] = getattr(batch[group].work, name).tolist()
        found[f"{group}.indices"] = found[f"{group}.indices"][: found[f"{group}.indptr"][-1]]
    return found


# ── every number ────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, deadline=None)
@given(case=cases(), data=st.data())
def test_every_buffer_is_what_page_lists_say(case: Case, data: st.DataObject):
    names = [group.name for group in case.groups]
    num_rows, num_tokens = case.sizes
    for buffer in buffers_of(case.pools).values():
        buffer.fill_(77)  # whatever an earlier step left
    batch = case.pools.batch(case.delta)
    assert (batch.num_rows, batch.num_tokens, batch.step) == (num_rows, num_tokens, 1)
    plain = numbers_of(batch, names)
    assert plain == model(case.groups, case.rows, num_rows, num_tokens)

    padded_rows = data.draw(st.integers(0, NUM_ROWS))
    padded_tokens = data.draw(st.integers(0, case.pools.max_step_tokens))
    batch = case.pools.batch(case.delta, pad_to=(padded_rows, padded_tokens))
    sizes = max(num_rows, padded_rows), max(num_tokens, padded_tokens)
    padded = numbers_of(batch, names)
    assert padded == model(case.groups, case.rows, *sizes)
    assert numbers_of(batch.host, names) == padded
    # What a graph was captured for only goes on behind what the step has itself.
    for name, numbers in plain.items():
        assert padded[name][: len(numbers)] == numbers
    for group in case.groups:
        listed = batch[group.name].indptr[-1]
        assert (batch[group.name].indices[listed:] == 77).all()
    case.pools.check()


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_flashinfer_reads_what_the_window_says(case: Case):
    """FlashInfer's own arithmetic over the list gives each query the slots that its positions name.

    Its documentation and include/flashinfer/page.cuh: a row of no pages has length 0, any other
    (pages − 1) * page_size + last_page_len with 1 <= last_page_len <= page_size; queries stand at
    the end of the keys; window_left counts the keys before the query's own, −1 is all of them.
    """
    batch = case.pools.batch(case.delta, pad_to=NUM_ROWS if case.sizes[1] <= NUM_ROWS else None)
    for group in case.groups:
        view = batch[group.name]
        indptr, indices, last = view.indptr.tolist(), view.indices.tolist(), view.last_page_len.tolist()
        window = view.group.window
        window_left = -1 if view.group.storage.sink_tokens else view.window_left
        for number, row in enumerate(case.rows):
            num_pages = indptr[number + 1] - indptr[number]
            if not row.length or not num_pages:
                assert last[number] == 0
                continue
            assert 1 <= last[number] <= view.page_tokens
            kv_len = (num_pages - 1) * view.page_tokens + last[number]
            assert int(view.begins[number]) + kv_len == row.length
            for query, positions in enumerate(positions_read(row, group.window)):
                own = kv_len - row.count + query
                read = set()
                for key in range(kv_len):
                    if key <= own and (window_left < 0 or key >= own - window_left):
                        page = indices[indptr[number] + key // view.page_tokens]
                        read.add((page * view.page_tokens + key % view.page_tokens) if page else -1)
                assert read == {slot_at(group, row, at) for at in positions}
        assert window is None or view.window_left == window - 1


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_flashattention_and_vllm_read_what_the_window_says(case: Case):
    """flash_attn_with_kvcache documents: query i reads keys [i + seqlen_k − seqlen_q − left, i + seqlen_k −
    seqlen_q], left = −1 is all; key at position p lies in page block_table[row, p // page_block_size]."""
    batch = case.pools.batch(case.delta)
    for group in case.groups:
        view = batch[group.name]
        window_left = -1 if view.group.storage.sink_tokens else view.window_left
        for number, row in enumerate(case.rows):
            pages, length = view.page_table[number].tolist(), int(batch.lengths[number])
            for query, positions in enumerate(positions_read(row, group.window)):
                own = query + length - row.count
                lowest = 0 if window_left < 0 else max(0, own - window_left)
                read = {
                    pages[at // view.page_tokens] * view.page_tokens + at % view.page_tokens
                    if pages[at // view.page_tokens]
                    else -1
                    for at in range(lowest, own + 1)
                }
                assert read == {slot_at(group, row, at) for at in positions}


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_positions_and_slots_belong_to_the_tokens_between_starts(case: Case):
    batch = case.pools.batch(case.delta)
    starts = batch.query_start_loc.tolist()
    for number, row in enumerate(case.rows):
        own = slice(starts[number], starts[number + 1])
        positions = batch.positions[own].tolist()
        assert positions == list(range(row.length - row.count, row.length))
        for group in case.groups:
            slots = batch[group.name].slot_mapping[own].tolist()
            assert slots == [slot_at(group, row, at) for at in positions]


# ── single cases, to be read ────────────────────────────────────────────────────────────────────────


def one_group(
    page_tokens: int, table: list[list[int]], rows: list[Row], window: int | None = None, **more: Any
) -> Case:
    layout = Layout([layer_of(window, more.pop("sink_tokens", 0))], page_tokens)
    name = layout.paged_groups[0].name
    named = {key: {name: more.pop(key)} for key in ("kernel_page_tokens", "max_indices") if key in more}
    return case_of(layout, [table], rows, **named, **more)


def view_of(case: Case, **more: Any) -> Any:
    return case.pools.batch(case.delta, **more)[case.groups[0].name]


def test_shapes_and_dtypes_are_those_that_back_ends_document(device: str):
    layout = Layout([layer_of(100)], 64)
    pools = Pools(
        layout, {"window": 40}, num_rows=7, max_tokens=5 * 64, max_step_tokens=33, device=device,
        kernel_page_tokens={"window": 16},
    )  # fmt: skip
    delta = delta_of(1, num_groups=1)
    pools.apply(delta)
    batch = pools.batch(delta, pad_to=(7, 33))
    view = batch["window"]
    # FlashInfer, BatchPrefillWithPagedKVCacheWrapper.plan: qo_indptr [batch_size + 1], paged_kv_indptr
    # [batch_size + 1], paged_kv_indices [paged_kv_indptr[-1]], paged_kv_last_page_len [batch_size], int32;
    # BatchDecodeWithPagedKVCacheWrapper with graphs: buffers of these shapes, indices of the most pages.
    assert (view.indptr.shape, view.indptr.dtype) == ((8,), torch.int32)
    assert (view.indices.shape, view.indices.dtype) == ((7 * 20,), torch.int32)
    assert (view.last_page_len.shape, view.last_page_len.dtype) == ((7,), torch.int32)
    assert (batch.query_start_loc.shape, batch.query_start_loc.dtype) == ((8,), torch.int32)
    # flash_attn_with_kvcache: block_table (batch_size, max_num_blocks_per_seq) and cache_seqlens
    # (batch_size,), both torch.int32, the last dimension contiguous.
    assert (view.page_table.shape, view.page_table.dtype) == ((7, 20), torch.int32)
    assert (batch.lengths.shape, batch.lengths.dtype) == ((7,), torch.int32)
    # vLLM's vllm/v1/worker/block_table.py: slot_mapping int64, PAD_SLOT_ID = −1.
    assert (view.slot_mapping.shape, view.slot_mapping.dtype) == ((33,), torch.int64)
    assert (batch.positions.shape, batch.positions.dtype) == ((33,), torch.int64)
    assert (batch.rows.shape, batch.rows.dtype) == ((7,), torch.int32)
    assert (view.begins.shape, view.begins.dtype) == ((7,), torch.int32)
    assert (view.window_left, view.page_tokens, view.group.name) == (99, 16, "window")
    assert all(buffer.is_contiguous() for buffer in buffers_of(pools).values())
    assert batch.device == pools.device
    for name in SHARED:
        assert getattr(batch.host, name).shape == tuple(getattr(batch, name).shape)
        assert torch.from_numpy(getattr(batch.host, name)).dtype == getattr(batch, name).dtype


def test_a_full_group_has_no_window():
    assert view_of(one_group(4, [[0], [5]], [Row(1, 3, 1)])).window_left == -1


def test_state_ids_are_the_rows_and_padding_is_row_0():
    case = one_group(4, [[0], [5], [6], [7]], [Row(3, 4, 1), Row(1, 2, 2)])
    batch = case.pools.batch(case.delta, pad_to=3)
    assert batch.state_ids.tolist() == batch.rows.tolist() == [3, 1, 0]
    assert batch.state_ids.data_ptr() == batch.rows.data_ptr()


def test_a_page_of_64_is_four_kernel_pages_of_16():
    view = view_of(one_group(64, [[0, 0], [5, 9]], [Row(1, 70, 3)], kernel_page_tokens=16))
    assert view.page_table[0].tolist() == [20, 21, 22, 23, 36, 0, 0, 0]
    assert view.indices[:5].tolist() == [20, 21, 22, 23, 36]
    assert view.last_page_len.tolist() == [6]
    assert view.slot_mapping.tolist() == [9 * 64 + 3, 9 * 64 + 4, 9 * 64 + 5]


def test_a_window_lists_its_pages_and_says_where_they_begin():
    # 10 tokens in pages of 2, window 4, two queries at 8 and 9: the first reads from 5 on, page 2.
    view = view_of(one_group(2, [[0] * 5, [0, 0, 13, 14, 15]], [Row(1, 10, 2)], window=4))
    assert view.begins.tolist() == [4]
    assert view.indices[:3].tolist() == [13, 14, 15]
    assert view.indptr.tolist() == [0, 3]
    assert view.page_table.tolist() == [[0, 0, 13, 14, 15]]


def test_pages_behind_the_window_that_a_table_still_has_are_not_shown():
    view = view_of(one_group(2, [[0] * 5, [11, 12, 13, 14, 15]], [Row(1, 10, 2)], window=4))
    assert view.page_table.tolist() == [[0, 0, 13, 14, 15]]


def test_with_sink_tokens_rows_are_listed_whole():
    case = one_group(2, [[0] * 5, [11, 0, 13, 14, 15]], [Row(1, 10, 2)], window=4, sink_tokens=1)
    view = view_of(case)
    assert view.begins.tolist() == [0]
    assert view.page_table.tolist() == [[11, 0, 13, 14, 15]]
    assert view.indices[:5].tolist() == [11, 0, 13, 14, 15]
    assert view.window_left == 3


def test_a_row_without_queries_lists_its_pages():
    case = one_group(2, [[0, 0], [7, 8]], [Row(1, 3, 0)])
    batch = case.pools.batch(case.delta, pad_to=(1, 2))
    assert batch["full"].indices[:2].tolist() == [7, 8]
    assert batch["full"].last_page_len.tolist() == [1]
    assert batch["full"].slot_mapping.tolist() == [-1, -1]
    assert batch.query_start_loc.tolist() == [0, 0]


def test_an_empty_list_has_a_last_page_of_no_tokens():
    # Without a query, and with a window of the query's own token, nothing before token 4 is read.
    view = view_of(one_group(2, [[0, 0], [7, 8]], [Row(1, 4, 0)], window=1))
    assert (view.indptr.tolist(), view.begins.tolist(), view.last_page_len.tolist()) == ([0, 0], [4], [0])


def test_a_query_without_a_page_is_stored_nowhere():
    view = view_of(one_group(2, [[0, 0], [7, 0]], [Row(1, 4, 4)]))
    assert view.slot_mapping.tolist() == [14, 15, -1, -1]


def test_rows_for_whose_list_there_is_no_room_have_none():
    table = [[0] * 4, [1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
    case = one_group(2, table, [Row(1, 8, 1), Row(2, 4, 1), Row(3, 1, 1)], max_indices=5)
    view = view_of(case)
    assert view.indptr.tolist() == [0, 4, 4, 4]
    assert view.last_page_len.tolist() == [2, 0, 0]
    assert view.page_table[1].tolist() == [5, 6, 0, 0]
    assert view.indices.tolist() == [1, 2, 3, 4, 0]


def test_a_window_longer_than_any_row_is_all_of_it():
    view = view_of(one_group(2, [[0, 0], [7, 8]], [Row(1, 4, 1)], window=2**40))
    assert view.indices[:2].tolist() == [7, 8]
    assert view.window_left == 2**40 - 1


def test_a_step_without_rows_is_all_padding(device: str):
    case = one_group(4, [[0, 0], [5, 6], [7, 8]], [], device=device)
    empty = delta_of(2, num_groups=1)  # nothing of it is sent to a device
    case.pools.apply(empty)
    for buffer in buffers_of(case.pools).values():
        buffer.fill_(77)
    batch = case.pools.batch(empty, pad_to=2)
    assert (batch.num_rows, batch.num_tokens) == (0, 0)
    assert batch.lengths.tolist() == batch.rows.tolist() == batch.positions.tolist() == [0, 0]
    assert batch.query_start_loc.tolist() == batch["full"].indptr.tolist() == [0, 0, 0]
    assert batch["full"].slot_mapping.tolist() == [-1, -1]
    assert not batch["full"].page_table.any()
    nothing = case.pools.batch(empty)
    assert (nothing.lengths.tolist(), nothing.query_start_loc.tolist()) == ([], [0])


def test_groups_have_their_own_tables_windows_and_pages():
    layout = Layout([layer_of(), layer_of(5, v_dim=4)], {"full": 4, "window": 2})
    tables = [
        [[0] * 4, [1, 2, 3, 4], [8, 9, 10, 11], [12, 13, 14, 15]],
        [[0] * 8, [1] * 8, list(range(16, 24)), list(range(24, 32))],
    ]
    case = case_of(layout, tables, [Row(2, 7, 1), Row(3, 10, 2)])
    batch = case.pools.batch(case.delta, pad_to=(3, 4))
    full, window = batch["full"], batch["window"]
    assert full.page_table.tolist() == [[8, 9, 0, 0], [12, 13, 14, 0], [0] * 4]
    assert full.slot_mapping.tolist() == [9 * 4 + 2, 14 * 4, 14 * 4 + 1, -1]
    assert full.indptr.tolist() == [0, 2, 5, 5]
    # A query of 7 tokens reads 2 to 6, two of 10 read 4 to 9: pages 1 to 3, and 2 to 4.
    assert window.page_table[:2].tolist() == [[0, 17, 18, 19, 0, 0, 0, 0], [0, 0, 26, 27, 28, 0, 0, 0]]
    assert window.slot_mapping.tolist() == [19 * 2, 28 * 2, 28 * 2 + 1, -1]
    assert window.begins.tolist() == [2, 4, 0]
    assert window.last_page_len.tolist() == [1, 2, 0]
    with pytest.raises(ArgumentError, match="no group 'state': the groups are full, window"):
        batch["state"]


def test_a_latent_group_has_batches_too():
    layout = Layout([LatentAttention(entry=latent(48, 16, "bfloat16"))], 64)
    case = case_of(layout, [[[0], [3]]], [Row(1, 5, 1)])
    assert view_of(case).slot_mapping.tolist() == [3 * 64 + 4]


def test_a_batch_says_what_it_is():
    case = one_group(4, [[0], [5], [6]], [Row(1, 3, 2)])
    assert repr(case.pools.batch(case.delta, pad_to=(2, 4))) == (
        "Batch(step 1: 2 tokens of 1 row, padded to 4 and 2, on cpu)"
    )


# ── what a manager plans ────────────────────────────────────────────────────────────────────────────


def test_batches_of_a_manager_name_its_pages_step_after_step(device: str):
    layout = Layout([layer_of(), layer_of(6, v_dim=4)], {"full": 8, "window": 4})
    sizes: dict[str, Any] = {"num_rows": 4, "max_tokens": 64}
    capacity = {"full": 40, "window": 60}
    manager, pools = Manager(layout, capacity, **sizes), Pools(layout, capacity, **sizes, device=device)
    rows = [manager.admit(range(at, at + 5 + 3 * at)).row for at in (1, 2, 3)]
    counts = [5 + 3 * at for at in (1, 2, 3)]
    for step in range(12):
        delta = manager.plan(rows, counts)
        pools.apply(delta)
        batch = pools.batch(delta, pad_to=(4, 40))
        lengths = manager.computed(rows)
        for numbers in (batch, batch.host):
            assert numbers.rows[:3].tolist() == rows
            assert numbers.lengths[:3].tolist() == lengths.tolist()
            assert np.diff(np.array(numbers.query_start_loc.tolist()))[:3].tolist() == counts
            for group in layout.paged_groups:
                pages, view = group.page_tokens, numbers[group.name]
                for at, row in enumerate(rows):
                    planned = manager.page_ids(row, group.name).tolist()
                    begin, end = int(view.begins[at]) // pages, -(-int(lengths[at]) // pages)
                    listed = view.indices[int(view.indptr[at]) : int(view.indptr[at + 1])].tolist()
                    assert listed == view.page_table[at, begin:end].tolist() == planned[begin:end]
                    assert 0 not in listed
        manager.commit(rows, [step] * sum(counts), counts)
        manager.pass_fence(delta.step)
        manager.reserve(rows, 2)
        counts = [2, 2, 2]
    manager.check()
    pools.check()


# ── padding, staleness, order ───────────────────────────────────────────────────────────────────────


def decoding(num_rows: int = 4, **more: Any) -> Case:
    table = [[0, 0], *([at, at + 10] for at in range(1, num_rows + 1))]
    return one_group(4, table, [Row(1, 5, 1), Row(2, 3, 3)], **more)


@pytest.mark.parametrize(
    ("pad_to", "sizes"),
    [
        (None, (2, 4)), (0, (2, 4)), (4, (4, 4)), (3, (3, 4)), ((0, 0), (2, 4)), ((2, 6), (2, 6)),
        ((4, 1), (4, 4)), (np.int64(4), (4, 4)), ((np.int32(3), 7), (3, 7)),
    ],
)  # fmt: skip
def test_tensors_go_on_to_what_is_padded_to(pad_to: Any, sizes: tuple[int, int]):
    case = decoding(max_step_tokens=8)
    batch = case.pools.batch(case.delta, pad_to=pad_to)
    assert (batch.lengths.shape[0], batch.positions.shape[0]) == sizes
    assert (batch["full"].indptr.shape[0], batch["full"].slot_mapping.shape[0]) == (sizes[0] + 1, sizes[1])
    assert (batch.num_rows, batch.num_tokens) == (2, 4)


@pytest.mark.parametrize(
    ("pad_to", "said"),
    [
        (5, "5 rows and 5 tokens exceed num_rows = 4 or max_step_tokens = 8"),
        ((4, 9), "4 rows and 9 tokens"),
        (2**70, "pad_to"),
        (-1, "pad_to"),
        (2.0, "pad_to"),
        (True, "pad_to"),
        ((2, True), "pad_to"),
        ("4", "pad_to"),
        ([2, 4], "pad_to"),
        ((4,), r"a pair \(rows, tokens\)"),
        ((1, 2, 3), r"a pair \(rows, tokens\)"),
        ((2, None), "pad_to"),
    ],
)
def test_what_cannot_be_padded_to_is_refused_and_changes_nothing(pad_to: Any, said: str):
    case = decoding(max_step_tokens=8)
    case.pools.batch(case.delta, pad_to=4)
    before = {name: buffer.clone() for name, buffer in buffers_of(case.pools).items()}
    with pytest.raises(ArgumentError, match=said):
        case.pools.batch(case.delta, pad_to=pad_to)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(case.pools).items())


def test_more_tokens_than_a_step_may_have_are_refused():
    case = decoding(max_step_tokens=3)
    with pytest.raises(ArgumentError, match="computes 4 tokens, more than max_step_tokens = 3"):
        case.pools.batch(case.delta)
    assert case.pools.step == 1


def test_tokens_of_a_step_are_8192_or_as_many_as_rows_by_default():
    layout = Layout([layer_of()], 16)
    for num_rows, max_tokens, most in ((4, 100, 100), (200, 100, 200), (4, 10_000, 8192)):
        pools = Pools(layout, {"full": 1}, num_rows=num_rows, max_tokens=max_tokens, device="cpu")
        assert pools.max_step_tokens == most


def test_only_the_delta_that_was_applied_last_has_a_batch():
    case = decoding()
    again = Delta(case.delta.packed.copy())
    later = delta_of(2, rows=[3], lengths=[1], counts=[1], num_groups=1)
    fresh = Pools(Layout([layer_of()], 4), {"full": 9}, num_rows=4, max_tokens=8, device="cpu")
    with pytest.raises(ArgumentError, match="applied last \\(none was applied yet\\)"):
        fresh.batch(case.delta)
    for wrong in (again, later, None, case.delta.packed):
        with pytest.raises(ArgumentError, match="applied last \\(step 1\\)"):
            case.pools.batch(wrong)  # type: ignore[arg-type]
    case.pools.apply(later)
    with pytest.raises(ArgumentError, match="applied last \\(step 2\\)"):
        case.pools.batch(case.delta)
    assert case.pools.batch(later).lengths.tolist() == [1]
    case.pools.reset(1)
    with pytest.raises(ArgumentError, match="none was applied yet"):
        case.pools.batch(later)


def test_the_host_is_stale_once_a_later_delta_is_applied():
    case = decoding()
    batch = case.pools.batch(case.delta)
    assert batch.host.lengths.tolist() == [5, 3]
    case.pools.apply(delta_of(2, rows=[1], lengths=[6], counts=[1], num_groups=1))
    with pytest.raises(StaleError, match="step 1 is not the last one applied"):
        batch.host  # noqa: B018


def test_the_host_is_stale_also_when_steps_began_again():
    case = decoding()
    batch = case.pools.batch(case.delta)
    case.pools.reset()
    with pytest.raises(StaleError):
        batch.host  # noqa: B018
    case.pools.apply(delta_of(1, rows=[3], lengths=[2], counts=[2], num_groups=1))
    with pytest.raises(StaleError):
        batch.host  # noqa: B018


@pytest.mark.parametrize(
    ("section", "value"),
    [("rows", 5), ("rows", -1), ("lengths", 9), ("lengths", -1), ("counts", 2), ("counts", 10**6)],
)
def test_a_delta_that_was_changed_after_it_was_applied_is_refused(section: str, value: int):
    case = decoding()
    before = {name: buffer.clone() for name, buffer in buffers_of(case.pools).items()}
    getattr(case.delta, section)[0] = value
    with pytest.raises((ArgumentError, OutOfRangeError)):
        case.pools.batch(case.delta)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(case.pools).items())


def test_a_delta_that_grew_after_it_was_applied_is_refused():
    case = decoding()
    case.delta.counts[0], case.delta._section("starts")[1:3] = 2, (2, 5)
    with pytest.raises(ArgumentError, match="changed after it was applied"):
        case.pools.batch(case.delta)


def test_a_batch_serves_after_its_pools_are_gone():
    case = decoding()
    batch, delta = case.pools.batch(case.delta), case.delta
    del case
    gc.collect()
    assert batch.lengths.tolist() == [5, 3]
    assert batch.host.lengths.tolist() == [5, 3]
    assert delta.step == 1


# ── buffers ─────────────────────────────────────────────────────────────────────────────────────────


def test_buffers_never_move(device: str):
    case = decoding(device=device)
    first = case.pools.batch(case.delta, pad_to=4)
    at = [getattr(first, name).data_ptr() for name in SHARED]
    at += [getattr(first["full"], name).data_ptr() for name in PER_GROUP]
    for step in range(2, 5):
        delta = delta_of(step, rows=[3], lengths=[step], counts=[1], num_groups=1)
        case.pools.apply(delta)
        batch = case.pools.batch(delta)
        assert at == [
            *(getattr(batch, name).data_ptr() for name in SHARED),
            *(getattr(batch["full"], name).data_ptr() for name in PER_GROUP),
        ]
    assert first.lengths.tolist()[:1] == [4]  # the same buffers
    case.pools.check()


def test_buffers_of_the_caller_are_filled_where_they_lie(device: str):
    own = decoding(device=device)
    mine = {name: torch.full_like(buffer, 9) for name, buffer in buffers_of(own.pools).items()}
    case = decoding(device=device, buffers=mine)
    batch, theirs = case.pools.batch(case.delta, pad_to=4), own.pools.batch(own.delta, pad_to=4)
    assert numbers_of(batch, ["full"]) == numbers_of(theirs, ["full"])
    for name in SHARED:
        assert getattr(batch, name).data_ptr() == mine[name].data_ptr()
    for name in PER_GROUP:
        assert getattr(batch["full"], name).data_ptr() == mine[f"full.{name}"].data_ptr()
    assert all(any(tensor is buffer for tensor in case.pools.tensors()) for buffer in mine.values())
    case.pools.check()
    case.pools._buffers.tensors["full.indptr"] = mine["full.indptr"].clone()
    with pytest.raises(InvariantError):
        case.pools.check()


def test_some_buffers_are_the_callers_and_the_others_not():
    shared = torch.zeros(4, dtype=torch.int32)
    case = decoding(buffers={"lengths": shared})
    batch = case.pools.batch(case.delta)
    assert shared.tolist() == [5, 3, 0, 0]
    assert batch["full"].indptr.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("buffers", "said"),
    [
        ({"lens": torch.zeros(4)}, "there is no buffer 'lens': use rows, lengths"),
        ({"full.lens": torch.zeros(4)}, "no buffer 'full.lens'"),
        ({"window.indptr": torch.zeros(5, dtype=torch.int32)}, "no buffer 'window.indptr'"),
        ({3: torch.zeros(5)}, "no buffer '3'"),
        ({"lengths": torch.zeros(4)}, "lengths"),
        ({"lengths": [0] * 4}, "give a tensor, not list"),
        ({"lengths": torch.zeros(5, dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.zeros(4, 2, dtype=torch.int32)[:, 0]}, "contiguous"),
        ({"lengths": torch.zeros(4, dtype=torch.int32, device="meta")}, "meta"),
        ({"full.slot_mapping": torch.zeros(8, dtype=torch.int32)}, "slot_mapping"),
    ],
)
def test_buffers_that_cannot_be_used_are_refused(buffers: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        decoding(buffers=buffers, max_step_tokens=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_step_tokens": -1}, "max_step_tokens"),
        ({"max_step_tokens": 1.5}, "max_step_tokens"),
        ({"kernel_page_tokens": {"full": 3}}, "give a divisor of the group's page_tokens = 16, not 3"),
        ({"kernel_page_tokens": {"full": 32}}, "give a divisor"),
        ({"kernel_page_tokens": {"full": 0}}, "kernel_page_tokens of full"),
        ({"kernel_page_tokens": {"other": 16}}, "kernel_page_tokens: give a mapping by group: full"),
        ({"kernel_page_tokens": 16}, "kernel_page_tokens: give a mapping"),
        ({"max_indices": {"full": 0}}, "max_indices of full"),
        ({"max_indices": {"full": 2**31}}, "2\\^31"),
        ({"max_indices": {"other": 1}}, "max_indices: give a mapping"),
        ({"num_rows": 2**20, "max_tokens": 2**16}, "2\\^31"),
    ],
)
def test_sizes_of_batches_that_cannot_be_are_refused(change: dict[str, Any], said: str):
    sizes = {"num_rows": 4, "max_tokens": 64, **change}
    with pytest.raises(ConfigError, match=said):
        Pools(Layout([layer_of()], 16), {"full": 1}, device="cpu", **sizes)


def test_pools_without_batches_have_no_buffers_for_them():
    case = decoding(max_step_tokens=0)
    # Only the first of the counts of rows and of indices, where the list of the first row would begin, and
    # the two numbers of extend rows.
    assert sum(buffer.nbytes for buffer in buffers_of(case.pools).values()) == 2 * 4 + 2 * 4
    with pytest.raises(ArgumentError, match="more than max_step_tokens = 0"):
        case.pools.batch(case.delta)


def test_memory_of_batches_is_counted():
    case = decoding(max_step_tokens=8, workers=6)  # 3 for each of the two KV heads
    buffers = buffers_of(case.pools).values()
    # [4] rows, lengths, last_page_len, begins; [5] starts, indptr; [4, 2] table; [8] indices, batch_indices;
    # 8-byte numbers; [4 + 1, 2] extends, [3 + 1] runs, [4 + 3, 8] tasks, [4, 2] splits.
    work = 4 * (5 * 2 + 4 + 7 * 8 + 4 * 2)
    assert sum(buffer.nbytes for buffer in buffers) == 4 * (4 * 4 + 2 * 5 + 8 + 8 + 8) + 8 * (2 * 8) + work


def test_two_pools_with_one_staging_do_not_read_each_others_deltas(device: str):
    staging = Staging(device)
    layout = Layout([layer_of()], 4)
    ranks = [
        Pools(layout, {"full": 9}, num_rows=4, max_tokens=8, device=device, staging=staging) for _ in range(2)
    ]
    deltas = [delta_of(1, rows=[row], lengths=[row], counts=[1], num_groups=1) for row in (1, 3)]
    for pools, delta in zip(ranks, deltas, strict=True):
        pools.apply(delta)
    assert [p.batch(d).lengths.tolist() for p, d in zip(ranks, deltas, strict=True)] == [[1], [3]]


# ── layers of the model ─────────────────────────────────────────────────────────────────────────────

# As Gemma 3n has them: windows and full layers in turn, and the last ones share what earlier ones keep.
MIXED = Layout(
    [
        *(layer_of(6), layer_of(), layer_of(6), [], layer_of()),
        *(SharedAttention(layer=2), SharedAttention(layer=4)),
    ],
    {"full": 4, "window": 2},
)


def mixed_pools() -> Pools:
    return Pools(MIXED, {"full": 9, "window": 20}, num_rows=2, max_tokens=16, device="cpu")


def test_layers_are_found_by_their_number_in_the_model():
    pools = mixed_pools()
    found = {n: pools.layer(n) for n in (0, 1, 2, 4, 5, 6)}
    assert {n: (layer.group.name, layer.index, layer.source) for n, layer in found.items()} == {
        0: ("window", 0, 0), 1: ("full", 0, 1), 2: ("window", 1, 2), 4: ("full", 1, 4),
        5: ("window", 1, 2), 6: ("full", 1, 4),
    }  # fmt: skip
    for n, layer in found.items():
        assert layer.number == n
        assert layer.keys is pools[layer.group.name].k_buffer[layer.index]
        assert layer.values is pools[layer.group.name].v_buffer[layer.index]
        assert (layer.k_scale, layer.v_scale) == (1.0, 1.0)
    assert found[5].keys.data_ptr() == found[2].keys.data_ptr() != found[0].keys.data_ptr()
    assert repr(found[5]) == "Layer(5: group window, index 1, shared with layer 2)"
    assert repr(found[4]) == "Layer(4: group full, index 1)"
    assert pools.layer(np.int64(4)) is found[4]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (7, "layers 0 to 6, not 7"), (2**70, "layers 0 to 6"), (-1, "n"), (1.0, "n"), (True, "n"), ("1", "n"),
        (3, "layer 3 stores nothing"),
    ],
)  # fmt: skip
def test_layers_that_are_not_there_are_refused(n: Any, said: str):
    with pytest.raises(ArgumentError, match=said):
        mixed_pools().layer(n)


def test_layers_of_a_latent_have_no_values_and_fp8_layers_scales():
    layout = Layout([LatentAttention(entry=latent(6, 2, "float32"))], 4)
    (name,) = [group.name for group in layout.paged_groups]
    pools = Pools(layout, {name: 2}, num_rows=1, max_tokens=8, device="cpu")
    assert pools.layer(0).values is None
    assert pools.layer(0).keys.shape == (12, 1, 8)
    narrow = Layout([FullAttention(**KV, dtype="fp8")] * 2, 4)
    pools = Pools(
        narrow, {"full": 2}, num_rows=1, max_tokens=8, device="cpu",
        k_scale={"full": [0.5, 2.0]}, v_scale={"full": [3.0, 4.0]},
    )  # fmt: skip
    assert [(layer.k_scale, layer.v_scale) for layer in map(pools.layer, (0, 1))] == [(0.5, 3.0), (2.0, 4.0)]


@pytest.mark.parametrize("num_given", [3, 6])
def test_tokens_are_stored_with_or_without_padding(num_given: int, device: str):
    case = one_group(4, [[0, 0], [3, 5], [4, 6]], [Row(1, 5, 1), Row(2, 6, 2)], device=device)
    batch = case.pools.batch(case.delta, pad_to=(2, 6))
    layer = case.pools.layer(0)
    before = layer.keys.clone()
    keys, values = (torch.randn(num_given, 2, 8, device=device) for _ in range(2))
    layer.store(batch, keys, values)
    slots = [5 * 4, 6 * 4, 6 * 4 + 1]
    assert layer.values is not None
    assert torch.equal(layer.keys[slots], keys[:3].bfloat16())
    assert torch.equal(layer.values[slots], values[:3].bfloat16())
    others = [slot for slot in range(layer.keys.shape[0]) if slot not in slots]
    assert torch.equal(layer.keys[others], before[others])


def test_tokens_of_another_number_and_of_shared_layers_are_not_stored():
    pools = mixed_pools()
    delta = delta_of(1, rows=[1], lengths=[2], counts=[2], places=[8, 28], page_ids=[5, 3])
    pools.apply(delta)
    batch = pools.batch(delta, pad_to=(1, 4))
    before = [tensor.clone() for tensor in pools.tensors()]
    for n in (0, 1, 3, 5):
        with pytest.raises(ArgumentError):
            pools.layer(1).store(batch, torch.ones(n, 2, 8), torch.ones(n, 2, 8))
    for shared, source in ((5, 2), (6, 4)):
        with pytest.raises(ArgumentError, match=f"with layer {source}: store them there"):
            pools.layer(shared).store(batch, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, pools.tensors(), strict=True))
    pools.layer(1).store(batch, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert float(pools.layer(1).keys[12:14].sum()) == 32
    assert not pools.layer(4).keys.any()


def test_a_batch_is_refused_once_its_buffers_are_about_another_step():
    case = one_group(4, [[0, 0], [3, 5], [4, 6]], [Row(1, 5, 1), Row(2, 6, 2)], device="cpu")
    layer, new = case.pools.layer(0), torch.ones(3, 2, 8)
    stale = case.pools.batch(case.delta)
    batch = case.pools.batch(case.delta, pad_to=(2, 6))
    before = layer.keys.clone()
    for call in (lambda: layer.store(stale, new, new), lambda: paged(new, layer, stale)):
        with pytest.raises(StaleError, match=r"Pools\.batch was called again since"):
            call()
    assert torch.equal(layer.keys, before)
    layer.store(batch, new, new)
    assert not torch.equal(layer.keys, before)


def test_a_batch_of_pools_with_another_layout_is_refused():
    def case(num_layers: int) -> tuple[Pools, Batch]:
        layout = Layout([FullAttention(kv_heads=2, k_dim=8, v_dim=8, dtype="float32")] * num_layers)
        pools = Pools(layout, {"full": 4}, num_rows=1, max_tokens=16, device="cpu")
        step: dict[str, Any] = {"rows": [1], "lengths": [2], "counts": [2], "places": [1]}
        delta = delta_of(1, **step, page_ids=[num_layers], num_groups=1)
        pools.apply(delta)
        return pools, pools.batch(delta)

    (target, batch), (_, of_draft), (_, of_rank) = case(2), case(1), case(2)
    layer, new = target.layer(0), torch.ones(2, 2, 8)
    for wrong, said in (
        (of_draft, "batch: it is of pools with another layout than layer 0"),
        (batch.host, "batch: give what Pools.batch returned, not HostBatch"),
        (None, "batch: give what Pools.batch returned, not NoneType"),
    ):
        for call in (lambda: layer.store(wrong, new, new), lambda: paged(new, layer, wrong)):  # noqa: B023
            with pytest.raises(ArgumentError, match=said):
                call()
    assert not layer.keys.any()
    layer.store(of_rank, new, new)  # another rank of the same manager: slots mean the same
    assert float(layer.keys[32:34].sum()) == 32


# ── pages of a pool, for back ends ──────────────────────────────────────────────────────────────────


def test_pages_of_a_pool_in_both_orders_are_the_same_memory():
    buffer = torch.arange(12 * 3 * 5).view(12, 3, 5).float()
    nhd, hnd = nhd_pages(buffer, 4), hnd_pages(buffer, 4)
    assert nhd.shape == (3, 4, 3, 5)
    assert hnd.shape == (3, 3, 4, 5)
    assert nhd.data_ptr() == hnd.data_ptr() == buffer.data_ptr()
    # FlashInfer: [max_num_pages, page_size, heads, dim] is NHD, [max_num_pages, heads, page_size, dim] HND.
    for slot in range(12):
        for head in range(3):
            assert torch.equal(nhd[slot // 4, slot % 4, head], buffer[slot, head])
            assert torch.equal(hnd[slot // 4, head, slot % 4], buffer[slot, head])
    for wrong in (buffer[:, 0], buffer[::2], None):
        with pytest.raises(ArgumentError, match="buffer"):
            nhd_pages(wrong, 4)  # type: ignore[arg-type]
    for tokens in (5, 0, 2.5):
        with pytest.raises(ArgumentError, match="page_tokens"):
            hnd_pages(buffer, tokens)  # type: ignore[arg-type]


def test_two_buffers_in_one_memory_are_refused():
    shared = torch.zeros(16, dtype=torch.int64)
    both = {"positions": shared, "full.slot_mapping": shared}
    sizes = {"num_rows": 2, "max_tokens": 16, "max_step_tokens": 16}
    layout = Layout([FullAttention(kv_heads=1, k_dim=8, v_dim=8)], 4)
    with pytest.raises(ConfigError, match="buffers: two names have the same memory"):
        Pools(layout, {"full": 8}, **sizes, device="cpu", buffers=both)
