"""Views in captured graphs: a replay over changed rows and lengths is the eager result, in fixed memory."""

import pytest
import torch

from bench.measure import no_waiting
from pagoda import FullAttention, Layout, TokenPool, WindowAttention
from pagoda.attention import PagedView, PagedViews, paged_attention
from pagoda.kernels import _views_reference as views_reference
from pagoda.kernels._views_reference import ViewBuffers, ViewSpec
from pagoda.layout import PagedGroup

pytestmark = pytest.mark.gpu

BATCH, MAX_PAGES, NUM_ROWS, PAGE = 8, 20, 16, 64


def group_of(window: int | None) -> PagedGroup:
    sizes = {"kv_heads": 2, "k_dim": 16, "v_dim": 16}
    kind = FullAttention(**sizes) if window is None else WindowAttention(**sizes, window=window)
    return Layout([kind], PAGE).paged_groups[0]


class Step:
    """The tensors that a graph reads, to be changed in place."""

    def __init__(self) -> None:
        self.table = torch.zeros(NUM_ROWS + 1, MAX_PAGES, dtype=torch.int32, device="cuda")
        self.rows = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros(BATCH + 1, dtype=torch.int32, device="cuda")

    def change(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.table.copy_(torch.randint(1, 400, self.table.shape, generator=random))
        self.rows.copy_(torch.randint(0, NUM_ROWS + 1, (BATCH,), generator=random))
        lengths = torch.randint(1, MAX_PAGES * PAGE, (BATCH,), generator=random)
        num_queries = torch.minimum(torch.randint(0, 5, (BATCH,), generator=random), lengths)
        self.lengths.copy_(lengths)
        self.starts[1:] = num_queries.cumsum(0)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.table, self.rows, self.lengths, self.starts


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kernel_page", [64, 16])
def test_replays_follow_tables_rows_and_lengths_that_were_changed_in_place(
    window: int | None, kernel_page: int
):
    group, step = group_of(window), Step()
    captured, eager = (
        PagedView(group, BATCH, 64, MAX_PAGES, "cuda", kernel_page_tokens=kernel_page) for _ in range(2)
    )
    captured.refresh(*step.tensors)  # compiles
    addresses = [buffer.data_ptr() for buffer in captured.buffers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.refresh(*step.tensors)
    for seed in range(10):
        step.change(seed)
        graph.replay()
        eager.refresh(*step.tensors)
        judge = ViewBuffers(*(torch.zeros_like(buffer, device="cpu") for buffer in eager.buffers))
        table, *rest = (tensor.cpu() for tensor in step.tensors)
        spec = ViewSpec(judge, MAX_PAGES, PAGE, kernel_page, window or 0)
        views_reference.refresh([spec], table, NUM_ROWS + 1, *rest)
        num_listed = int(judge.indptr[-1])
        assert num_listed > 0
        for name, a, b, c in zip(ViewBuffers._fields, captured.buffers, eager.buffers, judge, strict=True):
            if name == "indices":
                a, b, c = a[:num_listed], b[:num_listed], c[:num_listed]
            assert torch.equal(a, b), name
            assert torch.equal(a.cpu(), c), name
    assert [buffer.data_ptr() for buffer in captured.buffers] == addresses
    captured.check()


def test_refresh_makes_nothing_and_waits_for_nothing():
    view, step = PagedView(group_of(100), BATCH, 64, MAX_PAGES, "cuda", kernel_page_tokens=16), Step()
    step.change(0)
    view.refresh(*step.tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        for batch in range(1, BATCH + 1):
            view.refresh(step.table, step.rows[:batch], step.lengths[:batch], step.starts[: batch + 1])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_step_is_stored_in_a_graph_and_read_outside_of_it():
    group, step = group_of(None), Step()
    pool = TokenPool.from_group(group, 400, "cuda")
    view = PagedView(group, BATCH, 64, MAX_PAGES, "cuda")
    k, v = (torch.zeros(64, 2, 16, device="cuda") for _ in range(2))
    view.refresh(*step.tensors)
    pool.store(0, view.slot_mapping, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        view.refresh(*step.tensors)
        pool.store(0, view.slot_mapping, k, v)
    step.table[1] = torch.arange(5, 5 + MAX_PAGES)
    for length in range(1, 200, 40):  # 40 new tokens a step
        step.rows[0], step.lengths[0], step.starts[1:] = 1, length + 39, 40
        k.normal_()
        v.normal_()
        graph.replay()
        queries = torch.randn(40, 4, 16, device="cuda")
        out = paged_attention(queries, pool.k_buffer[0], pool.v_buffer[0], view)
        # The first token of a request reads only itself.
        if length == 1:
            torch.testing.assert_close(out[0], v[0].bfloat16().float().repeat_interleave(2, 0))
        slots = view.slot_mapping[:40]
        assert torch.equal(pool.k_buffer[0][slots], k[:40].bfloat16())
        assert out.isfinite().all()


def test_views_of_several_groups_are_captured_as_one_and_follow_their_tables():
    groups = [group_of(None), group_of(100), group_of(17)]
    captured, alone = (
        [
            PagedView(group, BATCH, 64, MAX_PAGES - at, "cuda", kernel_page_tokens=PAGE >> at)
            for at, group in enumerate(groups)
        ]
        for _ in range(2)
    )
    step, views = Step(), PagedViews(captured)
    sizes = [(NUM_ROWS + 1) * view.max_pages for view in alone]
    flat = torch.zeros(sum(sizes), dtype=torch.int32, device="cuda")
    views.refresh(flat, *step.tensors[1:])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views.refresh(flat, *step.tensors[1:])
    for seed in range(10):
        step.change(seed)
        flat.copy_(torch.randint(1, 400, flat.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for view, theirs, part in zip(captured, alone, flat.split(sizes), strict=True):
            theirs.refresh(part.view(NUM_ROWS + 1, view.max_pages), *step.tensors[1:])
            assert int(theirs.indptr[-1]) > 0
            assert all(torch.equal(a, b) for a, b in zip(view.buffers, theirs.buffers, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_groups", [1, 6])
def test_any_number_of_groups_is_two_launches(num_groups: int):
    views = PagedViews([PagedView(group_of(100), BATCH, 64, MAX_PAGES, "cuda") for _ in range(num_groups)])
    step = Step()
    flat = torch.zeros(num_groups * step.table.numel(), dtype=torch.int32, device="cuda")
    views.refresh(flat, *step.tensors[1:])  # compiles
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        views.refresh(flat, *step.tensors[1:])
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    assert sorted(names) == ["_count", "_fill"]


def test_views_and_batches_of_any_size_share_one_kernel_a_set_of_constants():
    """`Launch` looks a kernel up once: an argument that made a variant would get what another compiled."""
    from pagoda.kernels import _views_fused as views_fused

    step = Step()
    step.change(1)
    launches = (views_fused._launch_count, views_fused._launch_fill)
    kernels: dict[tuple[int, ...], list[object]] = {}  # by launch, device and constants
    for window, max_tokens in ((None, 64), (100, 1)):
        view = PagedView(group_of(window), BATCH, max_tokens, MAX_PAGES, "cuda")
        for batch in (1, 2, 3, 7):
            for at in (0, 1):  # aligned to 16 bytes, and not
                for launch in launches:
                    launch.compiled.clear()
                of_batch = slice(at, at + batch)
                view.refresh(
                    step.table[at:],
                    step.rows[of_batch],
                    step.lengths[of_batch],
                    step.starts[at : at + batch + 1],
                )
                for number, launch in enumerate(launches):
                    for key, kernel in launch.compiled.items():
                        kernels.setdefault((number, *key), []).append(kernel)
    for found in kernels.values():
        assert len(found) == 16  # asked for anew each time
        assert all(kernel is found[0] for kernel in found)
