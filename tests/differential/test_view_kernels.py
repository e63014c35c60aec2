"""The Triton kernels of views against the torch reference, entry for entry.

On a CPU through Triton's interpreter, on a GPU compiled: the same cases.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.kernels import _views_reference as views_reference
from pagoda.kernels._views_reference import ViewBuffers, ViewSpec

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    views_fused = pytest.importorskip("pagoda.kernels._views_fused", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=400 if DEVICE == "cuda" else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
WILD = [-(2**31), -1, 0, 1, 2**31 - 1]


def buffers_of(max_batch: int, width: int, max_tokens: int, max_indices: int) -> ViewBuffers:
    """Buffers full of what an earlier step might have left."""
    shapes = [(max_batch,), (max_batch + 1,), (max_batch, width), (max_batch + 1,), (max_indices,)]
    shapes += [(max_batch,), (max_batch,), (max_tokens,)]
    types = [torch.int32] * 7 + [torch.int64]
    return ViewBuffers(*(torch.full(shape, 77, dtype=t) for shape, t in zip(shapes, types, strict=True)))


def judge(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, *specs: ViewSpec
) -> None:
    """Refresh with both and compare every entry of every buffer."""
    num_rows = table.numel() // sum(spec.max_pages for spec in specs)
    mine = [
        spec._replace(buffers=ViewBuffers(*(buffer.to(DEVICE, copy=True) for buffer in spec.buffers)))
        for spec in specs
    ]
    on_device = [given_.to(DEVICE) for given_ in (rows, lengths, starts)]
    prepared = views_fused.prepare(mine, torch.device(DEVICE))
    views_fused.refresh(prepared, table.to(DEVICE), num_rows, *on_device)
    views_reference.refresh(specs, table, num_rows, rows, lengths, starts)
    for of_mine, spec in zip(mine, specs, strict=True):
        for name, a, b in zip(ViewBuffers._fields, of_mine.buffers, spec.buffers, strict=True):
            assert a.cpu().tolist() == b.tolist(), name


@CASES
@given(data=st.data())
def test_refresh_agrees_for_any_batch_window_and_page_tokens(data: st.DataObject):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    kernel_page = data.draw(st.sampled_from([1, 2, 3, 16, 256]))
    page = kernel_page * data.draw(st.sampled_from([1, 2, 4]))
    window = data.draw(st.sampled_from([0, 1, 2, 17, 300]))
    max_pages, num_rows = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 6))
    batch = data.draw(st.integers(0, 7))
    max_batch = max(1, batch + data.draw(st.integers(0, 3)))
    width = max_pages * page // kernel_page
    table = torch.randint(-1, 1000, (num_rows + 1, max_pages), generator=random, dtype=torch.int32)
    rows = torch.randint(-1, num_rows + 2, (batch,), generator=random, dtype=torch.int32)
    lengths = torch.randint(-2, max_pages * page + 3, (batch,), generator=random, dtype=torch.int32)
    most = torch.clamp(lengths, 0, data.draw(st.sampled_from([1, 5, 10_000])))
    num_queries = (torch.rand(batch, generator=random) * (most + 2)).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), num_queries.cumsum(0).int()])
    for given_ in (rows, lengths):
        for at in data.draw(st.lists(st.integers(0, max(batch - 1, 0)), max_size=2 if batch else 0)):
            given_[at] = data.draw(st.sampled_from(WILD))
    max_tokens = max(1, int(starts[-1]) + data.draw(st.integers(-3, 5)))
    max_indices = data.draw(st.sampled_from([max_batch * width, 1, 8]))
    view = buffers_of(max_batch, width, max_tokens, max_indices)
    judge(table, rows, lengths, starts, ViewSpec(view, max_pages, page, kernel_page, window))


@settings(CASES, max_examples=200 if DEVICE == "cuda" else 30)
@given(data=st.data())
def test_views_that_are_refreshed_together_agree(data: st.DataObject):
    """Tables of different widths in one, views of different sizes: each is what it is alone."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    num_rows, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6))
    specs, tables = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        kernel_page = data.draw(st.sampled_from([1, 3, 16]))
        split, max_pages = data.draw(st.sampled_from([1, 4])), data.draw(st.integers(1, 7))
        max_batch, max_tokens = max(1, batch + data.draw(st.integers(0, 3))), data.draw(st.integers(1, 20))
        room = data.draw(st.sampled_from([max_batch * max_pages * split, 5]))
        buffers = buffers_of(max_batch, max_pages * split, max_tokens, room)
        window = data.draw(st.sampled_from([0, 1, 17]))
        specs.append(ViewSpec(buffers, max_pages, kernel_page * split, kernel_page, window))
        tables.append(torch.randint(0, 1000, (num_rows * max_pages,), generator=random, dtype=torch.int32))
    rows = torch.randint(0, num_rows + 1, (batch,), generator=random, dtype=torch.int32)
    lengths = torch.randint(0, 60, (batch,), generator=random, dtype=torch.int32)
    num_queries = torch.minimum(lengths, torch.randint(0, 5, (batch,), generator=random)).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), num_queries.cumsum(0).int()])
    judge(torch.cat(tables), rows, lengths, starts, *specs)
    for spec, table in zip(specs, tables, strict=True):
        alone = ViewBuffers(*(torch.full_like(buffer, 77) for buffer in spec.buffers))
        views_reference.refresh([spec._replace(buffers=alone)], table, num_rows, rows, lengths, starts)
        assert all(a.tolist() == b.tolist() for a, b in zip(alone, spec.buffers, strict=True))


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.gpu)])
def scale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What blocks are to cases: those of 16 rows and columns are interpreted in no time."""
    if request.param == "small":
        monkeypatch.setattr(views_fused, "_COUNT_BLOCK", 16)
        monkeypatch.setattr(views_fused, "_FILL_BLOCK", 16)
        return 1
    assert views_fused._COUNT_BLOCK == 1024
    return 64


@pytest.mark.parametrize("window", [0, 20])
def test_more_rows_columns_and_tokens_than_a_block(window: int, scale: int):
    """Several steps of the one program that counts, several programs a row, several of tokens."""
    random = torch.Generator().manual_seed(1)
    max_batch, batch, max_pages = 40 * scale, 37 * scale, 20 * scale
    table = torch.randint(0, 2**20, (max_batch + 1, max_pages), generator=random, dtype=torch.int32)
    rows = torch.randperm(max_batch, generator=random)[:batch].int()
    lengths = torch.randint(0, 64, (batch,), generator=random, dtype=torch.int32)
    lengths[::11] = max_pages * 8 - 3
    num_queries = torch.minimum(lengths, torch.full_like(lengths, 2))
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), num_queries.cumsum(0).int()])
    view = buffers_of(max_batch, max_pages * 4, 80 * scale, max_batch * max_pages * 4)
    judge(table, rows, lengths, starts, ViewSpec(view, max_pages, 8, 2, window))
    assert int(view.indptr[-1]) > 150 * scale


def test_a_list_that_fills_up_in_a_later_step_of_the_sum(scale: int):
    batch = 40 * scale
    table = torch.arange(2 * (batch + 1), dtype=torch.int32).view(-1, 2)
    rows = torch.arange(1, batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), 2, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    for room in (1, 2, 32 * scale, 33 * scale + 1, batch * 2):
        view = buffers_of(batch, 2, batch, room)
        judge(table, rows, lengths, starts, ViewSpec(view, 2, 1, 1, 0))
        assert int(view.indptr[-1]) == room // 2 * 2


def test_starts_that_fall_stay_inside_the_buffers():
    """What they mean nobody says; both kernels only have to keep to rows' own slots."""
    table = torch.tensor([[0, 0], [7, 8]], dtype=torch.int32)
    rows, lengths = torch.tensor([1, 1], dtype=torch.int32), torch.tensor([4, 4], dtype=torch.int32)
    for given_ in ([3, 1, 2], [2**31 - 1, -(2**31), 2**31 - 1], [-5, -4, -3], [0, 2**31 - 1, 1]):
        starts = torch.tensor(given_, dtype=torch.int32)
        view = ViewBuffers(*(buffer.to(DEVICE) for buffer in buffers_of(2, 2, 3, 4)))
        prepared = views_fused.prepare([ViewSpec(view, 2, 2, 2, 0)], torch.device(DEVICE))
        on_device = [tensor.to(DEVICE) for tensor in (rows, lengths, starts)]
        views_fused.refresh(prepared, table.to(DEVICE), 2, *on_device)
        assert set(view.slot_mapping.tolist()) <= {-1, 14, 15, 16, 17}
        assert set(view.block_table.flatten().tolist()) <= {0, 7, 8}
