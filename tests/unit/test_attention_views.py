"""Views of tables against page lists written out in Python, and against what back ends document."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import ConfigError, FullAttention, LatentAttention, Layout, WindowAttention, from_hf, model_config
from pagoda.attention import PagedView, PagedViews, hnd_pages, nhd_pages
from pagoda.errors import ArgumentError, InvariantError
from pagoda.layout import PagedGroup, latent
from pagoda.pools import Pools

NUM_ROWS = 12
KV: dict[str, Any] = {"kv_heads": 2, "k_dim": 8, "v_dim": 8}


def group_of(page_tokens: int, window: int | None = None, sink_tokens: int = 0) -> PagedGroup:
    kind = (
        FullAttention(**KV)
        if window is None
        else WindowAttention(**KV, window=window, sink_tokens=sink_tokens)
    )
    return Layout([kind], page_tokens).paged_groups[0]


def int32(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Row(NamedTuple):
    """A row of a batch as a scheduler knows it: pages of the group by number, 0 for one given up."""

    number: int  # 0 is padding
    length: int
    num_queries: int
    pages: list[int]


class Batch(NamedTuple):
    group: PagedGroup
    kernel_page: int
    max_pages: int
    rows: list[Row]
    spare_batch: int
    spare_tokens: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    kernel_page = draw(st.sampled_from([1, 2, 3, 16]))
    page = kernel_page * draw(st.sampled_from([1, 1, 2, 4]))
    window = draw(st.sampled_from([None, 1, 2, 5, 16, 40]))
    max_pages = draw(st.integers(1, 7))
    ids = iter(draw(st.permutations(range(1, 60))))
    numbers = draw(st.permutations(range(1, NUM_ROWS + 1)))
    rows = []
    for number in numbers[: draw(st.integers(0, 6))]:
        if draw(st.integers(0, 4)) == 0:
            # Padding may have queries: a captured decode has one a row.
            rows.append(Row(0, draw(st.sampled_from([0, 0, 1, 9])), draw(st.integers(0, 2)), []))
            continue
        length = draw(st.integers(0, max_pages * page))
        # Without a query and with a window of itself, nothing is read; what is listed then nobody asks.
        num_queries = min(draw(st.sampled_from([1, 1, 2, 7, length])), length)
        pages = [next(ids) for _ in range(-(-length // page))]
        if window is not None:
            gone = max(0, length - num_queries - window + 1) // page
            pages[:gone] = [0] * gone
        rows.append(Row(number, length, num_queries, pages))
    return Batch(
        group_of(page, window),
        kernel_page,
        max_pages,
        rows,
        draw(st.integers(0, 3)),
        draw(st.integers(0, 5)),
    )


def table_of(batch: Batch) -> torch.Tensor:
    """What a device may hold: rows' pages, and behind them, and in rows that are nobody's, old ids."""
    table = torch.randint(60, 99, (NUM_ROWS + 1, batch.max_pages), dtype=torch.int32)
    for row in batch.rows:
        if row.number:
            table[row.number, : len(row.pages)] = int32(row.pages)
    return table


def view_of(batch: Batch, device: str = "cpu", **more: Any) -> PagedView:
    num_queries = sum(row.num_queries for row in batch.rows)
    return PagedView(
        batch.group,
        max(1, len(batch.rows) + batch.spare_batch),
        max(1, num_queries + batch.spare_tokens),
        batch.max_pages,
        device,
        kernel_page_tokens=batch.kernel_page,
        **more,
    )


def arguments(batch: Batch, device: str = "cpu") -> list[torch.Tensor]:
    starts = [0]
    for row in batch.rows:
        starts.append(starts[-1] + row.num_queries)
    return [
        table_of(batch).to(device),
        int32([row.number for row in batch.rows], device),
        int32([row.length for row in batch.rows], device),
        int32(starts, device),
    ]


def positions_read(row: Row, window: int | None) -> list[set[int]]:
    """For each query of a row, the positions that it reads."""
    first = row.length - row.num_queries
    return [
        {at for at in range(query + 1) if window is None or query - at < window}
        for query in range(first, row.length)
    ]


def slot_at(row: Row, position: int, page_tokens: int) -> int:
    page = row.pages[position // page_tokens]
    assert page > 0
    return page * page_tokens + position % page_tokens


def real(batch: Batch) -> Iterator[tuple[int, Row]]:
    for number, row in enumerate(batch.rows):
        if row.number and row.length:
            yield number, row


@settings(max_examples=300, deadline=None)
@given(batch=batches())
def test_every_buffer_is_what_page_lists_say(batch: Batch):
    view = view_of(batch)
    for buffer in view.buffers:
        buffer.fill_(77)  # whatever an earlier step left
    view.refresh(*arguments(batch))
    page, window = batch.group.page_tokens, batch.group.window
    split = page // batch.kernel_page

    lengths, slots, starts = [0] * view.max_batch, [-1] * view.max_tokens, [0]
    block_table = [[0] * (batch.max_pages * split) for _ in range(view.max_batch)]
    indptr, indices, last, begins = [0], [], [0] * view.max_batch, [0] * view.max_batch
    for number in range(view.max_batch):
        row = batch.rows[number] if number < len(batch.rows) else Row(0, 0, 0, [])
        if row.number and row.length:
            lengths[number] = row.length
            read = sorted(set().union(*positions_read(row, window)))
            columns = sorted({at // batch.kernel_page for at in read})
            for column in columns:
                kernel_page = row.pages[column // split] * split + column % split
                block_table[number][column] = kernel_page
                indices.append(kernel_page)
            begins[number] = columns[0] * batch.kernel_page
            last[number] = row.length - columns[-1] * batch.kernel_page
            for offset in range(row.num_queries):
                at = row.length - row.num_queries + offset
                slots[starts[-1] + offset] = slot_at(row, at, page)
        indptr.append(len(indices))
        starts.append(starts[-1] + row.num_queries)

    assert view.seq_lens.tolist() == lengths
    assert view.query_start_loc.tolist() == starts
    assert view.slot_mapping.tolist() == slots
    assert view.block_table.tolist() == block_table
    assert view.indptr.tolist() == indptr
    assert view.indices[: len(indices)].tolist() == indices
    assert (view.indices[len(indices) :] == 77).all()
    assert view.last_page_len.tolist() == last
    assert view.begins.tolist() == begins
    view.check()


@settings(max_examples=200, deadline=None)
@given(batch=batches())
def test_flashinfer_reads_what_the_window_says(batch: Batch):
    """FlashInfer's own arithmetic over the list gives each query the slots that its positions name.

    Its documentation and include/flashinfer/page.cuh: a row of no pages has length 0, any other
    (pages − 1) * page_tokens + last_page_len with 1 <= last_page_len <= page_tokens; queries stand at
    the end of the keys; window_left counts the keys before the query's own, −1 is all of them.
    """
    view = view_of(batch)
    view.refresh(*arguments(batch))
    indptr, indices, last = view.indptr.tolist(), view.indices.tolist(), view.last_page_len.tolist()
    begins, window_left = view.begins.tolist(), view.window_left
    for number, row in real(batch):
        num_pages = indptr[number + 1] - indptr[number]
        assert num_pages >= 1
        assert 1 <= last[number] <= view.page_tokens
        kv_len = (num_pages - 1) * view.page_tokens + last[number]
        assert begins[number] + kv_len == row.length
        for query, positions in enumerate(positions_read(row, batch.group.window)):
            own = kv_len - row.num_queries + query
            read = set()
            for key in range(kv_len):
                if key <= own and (window_left < 0 or key >= own - window_left):
                    page = indices[indptr[number] + key // view.page_tokens]
                    read.add(page * view.page_tokens + key % view.page_tokens)
            assert read == {slot_at(row, at, batch.group.page_tokens) for at in positions}


@settings(max_examples=200, deadline=None)
@given(batch=batches())
def test_flashattention_and_vllm_read_what_the_window_says(batch: Batch):
    """flash_attn_with_kvcache documents: query i reads keys [i + seqlen_k − seqlen_q − left, i + seqlen_k −
    seqlen_q], left = −1 is all; key at position p lies in page block_table[row, p // page_block_size]."""
    view = view_of(batch)
    view.refresh(*arguments(batch))
    for number, row in real(batch):
        for query, positions in enumerate(positions_read(row, batch.group.window)):
            own = query + int(view.seq_lens[number]) - row.num_queries
            lowest = 0 if view.window_left < 0 else max(0, own - view.window_left)
            pages = view.block_table[number].tolist()
            read = {
                pages[at // view.page_tokens] * view.page_tokens + at % view.page_tokens
                for at in range(lowest, own + 1)
            }
            assert read == {slot_at(row, at, batch.group.page_tokens) for at in positions}


def test_shapes_and_dtypes_are_those_that_back_ends_document():
    view = PagedView(group_of(64, window=100), 7, 33, 5, "cpu", kernel_page_tokens=16)
    # FlashInfer, BatchPrefillWithPagedKVCacheWrapper.plan: qo_indptr [batch_size + 1], paged_kv_indptr
    # [batch_size + 1], paged_kv_indices [paged_kv_indptr[-1]], paged_kv_last_page_len [batch_size], int32;
    # BatchDecodeWithPagedKVCacheWrapper with graphs: buffers of these shapes, indices of the most pages.
    assert (view.indptr.shape, view.indptr.dtype) == ((8,), torch.int32)
    assert (view.indices.shape, view.indices.dtype) == ((7 * 20,), torch.int32)
    assert (view.last_page_len.shape, view.last_page_len.dtype) == ((7,), torch.int32)
    assert (view.query_start_loc.shape, view.query_start_loc.dtype) == ((8,), torch.int32)
    # flash_attn_with_kvcache: block_table (batch_size, max_num_blocks_per_seq) and cache_seqlens
    # (batch_size,), both torch.int32, the last dimension contiguous.
    assert (view.block_table.shape, view.block_table.dtype) == ((7, 20), torch.int32)
    assert (view.seq_lens.shape, view.seq_lens.dtype) == ((7,), torch.int32)
    # vLLM's vllm/v1/worker/block_table.py: slot_mapping int64, PAD_SLOT_ID = −1.
    assert (view.slot_mapping.shape, view.slot_mapping.dtype) == ((33,), torch.int64)
    assert view.window_left == 99
    assert PagedView(group_of(16), 1, 1, 1, "cpu").window_left == -1
    assert all(buffer.is_contiguous() for buffer in view.buffers)
    assert view.memory_bytes() == 4 * (8 + 140 + 7 + 8 + 140 + 7 + 7) + 8 * 33


def test_a_page_of_64_is_four_kernel_pages_of_16():
    view = PagedView(group_of(64), 2, 3, 2, "cpu", kernel_page_tokens=16)
    table = int32([[0, 0], [5, 9]])
    view.refresh(table, int32([1]), int32([70]), int32([0, 3]))
    assert view.block_table[0].tolist() == [20, 21, 22, 23, 36, 0, 0, 0]
    assert view.indices[:5].tolist() == [20, 21, 22, 23, 36]
    assert view.last_page_len.tolist() == [6, 0]
    assert view.slot_mapping.tolist() == [9 * 64 + 3, 9 * 64 + 4, 9 * 64 + 5]


def test_a_window_lists_its_pages_and_says_where_they_begin():
    # 10 tokens in pages of 2, window 4, two queries at 8 and 9: the first reads from 5 on, page 2.
    view = PagedView(group_of(2, window=4), 1, 2, 5, "cpu")
    view.refresh(int32([[0] * 5, [0, 0, 13, 14, 15]]), int32([1]), int32([10]), int32([0, 2]))
    assert view.begins.tolist() == [4]
    assert view.indices[:3].tolist() == [13, 14, 15]
    assert view.indptr.tolist() == [0, 3]
    assert view.block_table.tolist() == [[0, 0, 13, 14, 15]]


def test_pages_behind_the_window_that_a_table_still_has_are_not_shown():
    view = PagedView(group_of(2, window=4), 1, 2, 5, "cpu")
    view.refresh(int32([[0] * 5, [11, 12, 13, 14, 15]]), int32([1]), int32([10]), int32([0, 2]))
    assert view.block_table.tolist() == [[0, 0, 13, 14, 15]]


def test_with_sink_tokens_nothing_is_cut():
    view = PagedView(group_of(2, window=4, sink_tokens=1), 1, 2, 5, "cpu")
    view.refresh(int32([[0] * 5, [11, 0, 13, 14, 15]]), int32([1]), int32([10]), int32([0, 2]))
    assert view.begins.tolist() == [0]
    assert view.block_table.tolist() == [[11, 0, 13, 14, 15]]
    assert view.indices[:5].tolist() == [11, 0, 13, 14, 15]


def test_a_row_without_queries_lists_its_pages():
    view = PagedView(group_of(2), 2, 2, 2, "cpu")
    view.refresh(int32([[0, 0], [7, 8]]), int32([1, 0]), int32([3, 0]), int32([0, 0, 1]))
    assert view.indices[:2].tolist() == [7, 8]
    assert view.slot_mapping.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("row", "length", "num_queries"),
    [
        (-1, 4, 1), (3, 4, 1), (2**31 - 1, 4, 1), (-(2**31), 4, 1),  # no such row
        (1, -1, 1), (1, 9, 1), (1, 2**31 - 1, 1), (1, -(2**31), 1),  # no such length
        (1, 4, 5), (1, 4, -1), (1, 0, 1),  # queries that are not its last tokens
    ],
)  # fmt: skip
@pytest.mark.parametrize("window", [None, 3])
def test_values_out_of_range_are_padding(row: int, length: int, num_queries: int, window: int | None):
    view = PagedView(group_of(2, window), 3, 8, 4, "cpu")
    table = int32([[0] * 4, [3, 4, 5, 6], [7, 8, 9, 1]])
    starts = [0, 1, 1 + num_queries, 2 + num_queries] if num_queries >= 0 else [0, 1, 0, 1]
    view.refresh(table, int32([2, row, 2]), int32([1, length, 1]), int32(starts))
    assert view.seq_lens.tolist() == [1, 0, 1]
    assert view.indptr.tolist() == [0, 1, 1, 2]
    assert view.last_page_len.tolist() == [1, 0, 1]
    assert view.block_table[1].tolist() == [0] * 4
    assert view.indices[:2].tolist() == [7, 7]
    if num_queries >= 0:
        assert view.slot_mapping.tolist()[: 2 + num_queries] == [14, *[-1] * num_queries, 14]


def test_a_query_without_a_page_is_stored_nowhere():
    view = PagedView(group_of(2), 1, 4, 2, "cpu")
    view.refresh(int32([[0, 0], [7, 0]]), int32([1]), int32([4]), int32([0, 4]))
    assert view.slot_mapping.tolist() == [14, 15, -1, -1]


def test_queries_beyond_the_view_have_no_slot_and_starts_that_fall_touch_nothing_else():
    view = PagedView(group_of(2), 2, 2, 2, "cpu")
    table = int32([[0, 0], [7, 8]])
    view.refresh(table, int32([1]), int32([4]), int32([0, 4]))
    assert view.slot_mapping.tolist() == [14, 15]
    for starts in ([3, 1, 2], [2**31 - 1, -(2**31), 2**31 - 1], [-5, -4, -3]):
        view.refresh(table, int32([1, 1]), int32([4, 4]), int32(starts))
        assert set(view.slot_mapping.tolist()) <= {-1, 14, 15, 16, 17}


def test_rows_for_whose_list_there_is_no_room_have_none():
    view = PagedView(group_of(2), 4, 4, 4, "cpu", max_indices=5)
    guard = view.indices.clone()
    table = int32([[0] * 4, [1, 2, 3, 4], [5, 6, 7, 8]])
    view.refresh(table, int32([1, 2, 1]), int32([8, 4, 1]), int32([0, 1, 2, 3]))
    assert view.indptr.tolist() == [0, 4, 4, 4, 4]
    assert view.last_page_len.tolist() == [2, 0, 0, 0]
    assert view.seq_lens.tolist() == [8, 4, 1, 0]
    assert view.block_table[1].tolist() == [5, 6, 0, 0]
    assert view.indices.tolist() == [1, 2, 3, 4, 0]
    assert guard.shape == view.indices.shape


def test_buffers_of_the_caller_are_filled_where_they_lie(device: str):
    group = group_of(4)
    own = PagedView(group, 2, 2, 2, device)
    mine = {name: torch.full_like(buffer, 9) for name, buffer in own.buffers._asdict().items()}
    view = PagedView(group, 2, 2, 2, device, buffers=mine)
    given_args = [int32(x, device) for x in ([[0, 0], [5, 6]], [1], [6], [0, 2])]
    for each in (own, view):
        each.refresh(*given_args)
    for name, buffer in mine.items():
        assert buffer is getattr(view, name)
        stale = 1 if name == "indices" else 0
        assert torch.equal(
            buffer.flatten()[: 2 if stale else None], getattr(own, name).flatten()[: 2 if stale else None]
        )
    view.check()
    view.buffers = own.buffers
    with pytest.raises(InvariantError):
        view.check()


def test_starts_and_lengths_may_be_the_views_own_buffers(device: str):
    view = PagedView(group_of(4), 3, 4, 2, device)
    view.query_start_loc[:3] = int32([0, 1, 2], device)
    view.seq_lens[:2] = int32([3, 5], device)
    table = int32([[0, 0], [5, 6], [7, 8]], device)
    view.refresh(table, int32([1, 2], device), view.seq_lens[:2], view.query_start_loc[:3])
    assert view.seq_lens.tolist() == [3, 5, 0]
    assert view.query_start_loc.tolist() == [0, 1, 2, 2]
    assert view.slot_mapping.tolist() == [22, 32, -1, -1]


def test_an_empty_batch_is_all_padding(device: str):
    view = PagedView(group_of(4), 3, 4, 2, device)
    for buffer in view.buffers:
        buffer.fill_(77)
    view.refresh(*(int32(x, device) for x in ([[0, 0]], [], [], [0])))
    assert view.seq_lens.tolist() == [0, 0, 0]
    assert view.indptr.tolist() == [0] * 4
    assert view.slot_mapping.tolist() == [-1] * 4
    assert not view.block_table.any()


def test_what_a_view_cannot_be_made_of_is_refused():
    group = group_of(16)

    def make(*sizes: Any, **more: Any) -> PagedView:
        return PagedView(*sizes, device="cpu", **more)

    for sizes, more, match in [
        ((group, 0, 1, 1), {}, "max_batch"),
        ((group, 1, 0, 1), {}, "max_tokens"),
        ((group, 1, 1, 0), {}, "max_pages"),
        ((group, 1, 1, 1.5), {}, "max_pages"),
        ((group, 1, 1, 1), {"kernel_page_tokens": 5}, "does not divide"),
        ((group, 1, 1, 1), {"kernel_page_tokens": 32}, "does not divide"),
        ((group, 1, 1, 1), {"max_indices": 0}, "max_indices"),
        ((group, 1, 1, 2**28), {}, "2\\^31"),
        ((group, 2**20, 1, 2**12), {}, "2\\^31"),
        ((group, 1, 2**31, 1), {}, "2\\^31"),
        ((object(), 1, 1, 1), {}, "PagedGroup"),
        ((from_hf(model_config("deepseek-v4-flash")).group("csa"), 1, 1, 1), {}, "stands for 4 tokens"),
        ((group, 1, 1, 1), {"buffers": {"lens": torch.zeros(1)}}, "no lens"),
        ((group, 1, 1, 1), {"buffers": {"seq_lens": torch.zeros(1)}}, "seq_lens"),
        ((group, 1, 1, 1), {"buffers": {"seq_lens": torch.zeros(2, dtype=torch.int32)}}, "seq_lens"),
        (
            (group, 2, 1, 1),
            {"buffers": {"seq_lens": torch.zeros(2, 2, dtype=torch.int32)[:, 0]}},
            "contiguous",
        ),
    ]:
        with pytest.raises(ConfigError, match=match):
            make(*sizes, **more)
    with pytest.raises(ConfigError, match="device"):
        PagedView(group, 1, 1, 1, "meta")


def test_what_a_view_cannot_be_refreshed_with_is_refused_and_changes_nothing():
    view = PagedView(group_of(4), 2, 2, 3, "cpu")
    good = [int32([[0] * 3, [5, 6, 7]]), int32([1, 0]), int32([5, 0]), int32([0, 1, 2])]
    view.refresh(*good)
    before = [buffer.clone() for buffer in view.buffers]
    bad: list[tuple[int, Any, str]] = [
        (0, good[0].long(), "int32"),
        (0, good[0][:, :2], "contiguous"),
        (0, int32([[0, 0], [1, 2]]), "num_rows"),
        (0, int32([0, 1, 2]), "dimensions"),
        (0, torch.zeros(0, 3, dtype=torch.int32), "num_rows"),
        (1, [1, 0], "tensor"),
        (1, int32([1, 0, 0]), "max_batch"),
        (1, int32([1]), "1 rows need 1 lengths"),
        (1, torch.tensor([1.0, 0.0]), "int32"),
        (2, int32([5]), "2 lengths"),
        (2, int32([[5, 0]]), "dimensions"),
        (2, int32([5, 0]).to("meta"), "meta"),
        (2, int32([5, 1, 0, 1])[::2], "contiguous"),
        (3, int32([0, 1]), "query_start_loc of 3"),
        (3, None, "query_start_loc"),
    ]
    for place, value, match in bad:
        given_args: list[Any] = list(good)
        given_args[place] = value
        with pytest.raises(ArgumentError, match=match):
            view.refresh(*given_args)
    assert all(torch.equal(a, b) for a, b in zip(before, view.buffers, strict=True))


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


def test_a_latent_group_has_views_too():
    (group,) = Layout([LatentAttention(entry=latent(48, 16, "bfloat16"))], 64).paged_groups
    view = PagedView(group, 1, 1, 1, "cpu")
    view.refresh(int32([[0], [3]]), int32([1]), int32([5]), int32([0, 1]))
    assert view.slot_mapping.tolist() == [3 * 64 + 4]


# ── several groups at once ──────────────────────────────────────────────────────────────────────────


def test_views_of_several_groups_are_filled_from_the_flat_table_of_pools(device: str):
    layout = Layout(
        [
            FullAttention(kv_heads=1, k_dim=2, v_dim=2),
            WindowAttention(kv_heads=1, k_dim=2, v_dim=4, window=5),
        ],
        {"full": 4, "window": 2},
    )
    pools = Pools(layout, {"full": 20, "window": 40}, num_rows=3, max_tokens=16, device=device)
    pools.flat_table[:16] = torch.arange(100, 116)  # [4, 4], then [4, 8]
    pools.flat_table[16:] = torch.arange(200, 232)
    views = [
        PagedView(group, batch, 4, 16 // group.page_tokens, device)
        for group, batch in zip(layout.paged_groups, (3, 2), strict=True)
    ]
    both = PagedViews(views)
    assert both.max_batch == 2
    both.refresh(pools.flat_table, *(int32(x, device) for x in ([2, 3], [7, 10], [0, 1, 3])))
    full, window = views
    # Rows 2 and 3 of the first table begin at 108 and 112, of the second at 216 and 224.
    assert full.block_table.tolist() == [[108, 109, 0, 0], [112, 113, 114, 0], [0] * 4]
    assert full.slot_mapping.tolist() == [109 * 4 + 2, 114 * 4, 114 * 4 + 1, -1]
    assert full.indptr.tolist() == [0, 2, 5, 5]
    # A query of 7 tokens reads 2 to 6, two of 10 read 4 to 9: pages 1 to 3, and 2 to 4.
    assert window.block_table.tolist() == [[0, 217, 218, 219, 0, 0, 0, 0], [0, 0, 226, 227, 228, 0, 0, 0]]
    assert window.slot_mapping.tolist() == [219 * 2, 228 * 2, 228 * 2 + 1, -1]
    assert window.begins.tolist() == [2, 4]
    assert window.last_page_len.tolist() == [1, 2]
    for view in views:
        view.check()


def test_what_views_cannot_be_refreshed_together_with_is_refused_and_changes_nothing():
    small, wide = PagedView(group_of(4), 1, 2, 3, "cpu"), PagedView(group_of(2), 2, 2, 4, "cpu")
    for views, said in (
        ([], "at least one"),
        ([small, small], "stands twice"),
        ([small, None], "not NoneType"),
    ):
        with pytest.raises(ConfigError, match=said):
            PagedViews(views)  # type: ignore[list-item]
    both = PagedViews([small, wide])
    good = [int32(range(14)), int32([1]), int32([5]), int32([0, 1])]
    both.refresh(*good)
    before = [buffer.clone() for view in both.views for buffer in view.buffers]
    for place, value, said in (
        (0, int32(range(13)), r"13 entries: give \(num_rows \+ 1\) \* 7"),
        (0, int32([]), "0 entries"),
        (0, int32([list(range(7))] * 2), "dimensions"),
        (0, good[0].long(), "int32"),
        (1, int32([1, 1]), "max_batch = 1"),
        (2, int32([5, 5]), "1 rows need 1 lengths"),
        (3, None, "query_start_loc"),
    ):
        given_args: list[Any] = list(good)
        given_args[place] = value
        with pytest.raises(ArgumentError, match=said):
            both.refresh(*given_args)
    after = [buffer for view in both.views for buffer in view.buffers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
