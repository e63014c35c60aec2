"""The Triton kernels against the torch reference, bit for bit.

On a CPU through Triton's interpreter, on a GPU compiled: the same cases.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.kernels import _reference as reference

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    fused = pytest.importorskip("pagoda.kernels._fused", reason="needs triton")

# The interpreter computes with numpy, which warns of the NaN and infinity that some cases are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
POOLS = [torch.float16, torch.bfloat16, torch.float32, *FP8]
SOURCES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *FP8]
CASES = settings(
    max_examples=400 if DEVICE == "cuda" else 120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bits to compare: all NaNs as one, since no rule says which NaN a cast gives."""
    raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).clone()
    raw[tensor.float().isnan()] = -1 if raw.dtype != torch.uint8 else 0x7F
    return raw


def judge(
    slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, pools: list[torch.Tensor], *scales: float
) -> None:
    """Store with both into copies of the pools and compare every bit of them."""
    mine, theirs = [pool.clone().to(DEVICE) for pool in pools], [pool.clone() for pool in pools]
    fused.store(slots.to(DEVICE), k, v, mine[0], None if v is None else mine[1], *scales)
    v_host = None if v is None else v.cpu()
    reference.store(slots, k.cpu(), v_host, theirs[0], None if v is None else theirs[1], *scales)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(bits(a.cpu()), bits(b))


def pool_of(
    num_slots: int, shape: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> torch.Tensor:
    """A pool full of noise, so that an unwritten row and a row written with zeros differ."""
    noise = torch.randn(num_slots, *shape, generator=random)
    return reference.cast(noise, dtype, 1.0)


@st.composite
def layouts(
    draw: st.DrawFn, n: int, shape: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]]:
    """A shape of rows, how its dimensions lie in memory, and slices that leave gaps between them."""
    splits = [(n,)] + [(a, n // a) for a in range(1, n + 1) if n % a == 0]
    lead = draw(st.sampled_from(splits))
    heads, dim = shape
    halves = [(heads, dim // 2, 2)] if dim % 2 == 0 else []
    trail = draw(st.sampled_from([(heads, dim), (heads * dim,), *halves]))
    whole = lead + trail
    order = draw(st.permutations(range(len(whole))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in whole]
    begins = [draw(st.integers(0, 2)) for _ in whole]
    return whole, tuple(order), steps, begins


def rows_of(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]],
    dtype: torch.dtype,
    spread: float,
    random: torch.Generator,
) -> torch.Tensor:
    whole, order, steps, begins = layout
    room = [size * step + begin for size, step, begin in zip(whole, steps, begins, strict=True)]
    store = torch.randn([room[d] for d in order], generator=random, dtype=torch.float64) * spread
    tensor = reference.cast(store, dtype, 1.0) if dtype in FP8 else store.to(dtype)
    tensor = tensor.to(DEVICE).permute([order.index(d) for d in range(len(whole))])
    return tensor[
        tuple(slice(b, b + s * step, step) for b, s, step in zip(begins, whole, steps, strict=True))
    ]


@CASES
@given(data=st.data())
def test_store_agrees_for_any_shape_stride_dtype_and_padding(data: st.DataObject):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    n = data.draw(st.integers(0, 24))
    k_shape = (data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 8, 16, 40])))
    has_values = data.draw(st.booleans())
    v_shape = (data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 5, 16, 64])))
    dtype = data.draw(st.sampled_from(POOLS))
    spread = data.draw(st.sampled_from([1e-6, 1.0, 300.0, 1e9]))
    num_slots = 48
    slots = torch.randperm(num_slots, generator=random)[:n]
    slots = slots.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    for position in data.draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=3 if n else 0)):
        slots[position] = data.draw(
            st.sampled_from([-1, -7, num_slots, 2**31 - 1])
        )  # none of them is written
    k = rows_of(data.draw(layouts(n, k_shape)), data.draw(st.sampled_from(SOURCES)), spread, random)
    v = (
        rows_of(data.draw(layouts(n, v_shape)), data.draw(st.sampled_from(SOURCES)), spread, random)
        if has_values
        else None
    )
    pools = [pool_of(num_slots, shape, dtype, random) for shape in (k_shape, v_shape)]
    scales = [data.draw(st.sampled_from([1.0, 0.5, 0.37, 11.0])) for _ in range(2)]
    judge(slots, k, v, pools, *scales)


@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16, torch.float16])
def test_every_bfloat16_and_its_neighbours_round_alike(dtype: torch.dtype):
    """All 65,536 bfloat16 values, and the float32 ties and near-ties between them."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF])
    values = (high[:, None] | low).flatten()
    values = torch.where(values >= 2**31, values - 2**32, values).to(torch.int32).view(torch.float32)
    rows = values.view(-1, 4096).to(DEVICE)
    pool = torch.zeros(len(rows), 1, 4096).to(dtype)
    judge(torch.arange(len(rows)), rows, None, [pool], 1.0, 1.0)


@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0, 1e-3])
@pytest.mark.parametrize("dtype", FP8)
def test_division_by_the_scale_rounds_alike(dtype: torch.dtype, scale: float):
    rows = (torch.randn(256, 2048, generator=torch.Generator().manual_seed(1)) * 50 * scale).to(DEVICE)
    pool = torch.zeros(256, 1, 2048).to(dtype)
    judge(torch.arange(256), rows, None, [pool], scale, scale)


def test_rows_wider_than_a_block_and_no_power_of_two():
    random = torch.Generator().manual_seed(0)
    for width in (1, 17, 576, 2047, 2048, 2049, 5000):
        k = torch.randn(9, width, generator=random, dtype=torch.float32).to(DEVICE)
        pool = pool_of(20, (1, width), torch.float32, random)
        judge(torch.tensor([3, 0, 19, 7, -1, 5, 6, 20, 8]), k, None, [pool], 1.0, 1.0)


@CASES
@given(data=st.data())
def test_pack_and_unpack_agree(data: st.DataObject):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    k_bytes, v_bytes = (
        data.draw(st.sampled_from([1, 2, 6, 8, 16, 48, 4096, 8208, 12_300])) for _ in range(2)
    )
    has_values = data.draw(st.booleans())
    layers = data.draw(st.integers(1, 3))
    sizes = ([k_bytes, v_bytes] if has_values else [k_bytes]) * layers
    num_pages = 9

    def noise(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, columns), generator=random, dtype=torch.uint8)

    buffers = [noise(num_pages, size) for size in sizes]
    page_ids = torch.randperm(num_pages, generator=random)[: data.draw(st.integers(0, num_pages))]
    page_ids = page_ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    record = sum(sizes)
    # An offset, as a caller that packs into the middle of a larger buffer has it.
    offset = data.draw(st.sampled_from([0, 1, 8, 16]))
    packed = noise(1, len(page_ids) * record + offset)[0]

    mine, theirs = [b.to(DEVICE) for b in buffers], [b.clone() for b in buffers]
    addresses = torch.tensor([b.data_ptr() for b in mine], device=DEVICE)
    for name in ("pack", "unpack"):
        ours_packed, their_packed = packed.to(DEVICE).clone(), packed.clone()
        ours, plain = (p[offset:].view(len(page_ids), record) for p in (ours_packed, their_packed))
        getattr(fused, name)(page_ids.to(DEVICE), mine, addresses, ours)
        getattr(reference, name)(page_ids, theirs, addresses, plain)
        assert torch.equal(ours_packed.cpu(), their_packed)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, theirs, strict=True))


def test_the_judge_sees_one_wrong_bit():
    pool = torch.zeros(4, 1, 8)
    wrong = pool.clone()
    wrong.view(torch.int32)[2, 0, 3] = 1
    assert not torch.equal(bits(pool), bits(wrong))
