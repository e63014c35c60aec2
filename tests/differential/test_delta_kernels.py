"""The Triton kernels of deltas against plain numpy and the torch reference, bit for bit."""

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.kernels import _reference as reference
from profiles import examples

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    fused = pytest.importorskip("pagoda.kernels._fused", reason="needs triton")
    from pagoda.kernels import _pages_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=examples(300 if DEVICE == "cuda" else 80),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NUM_PAGES = 9
OUTSIDE = [-1, -7, NUM_PAGES, 2**31 - 1]


@CASES
@given(data=st.data())
def test_copies_of_pages_agree(data: st.DataObject):
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    sizes = data.draw(
        st.lists(st.sampled_from([1, 2, 6, 8, 16, 48, 4096, 8208, 12_300]), min_size=1, max_size=2)
    )
    sizes = sizes * data.draw(st.integers(1, 3))
    order = torch.randperm(NUM_PAGES, generator=noise).tolist()
    split = data.draw(st.integers(1, NUM_PAGES - 1))  # no page is source and target
    target = order[split:][: data.draw(st.integers(0, NUM_PAGES))]
    source = [data.draw(st.sampled_from(order[:split])) for _ in target]
    for ids in (source, target):
        for at in data.draw(st.lists(st.integers(0, len(target) - 1), max_size=2) if target else st.just([])):
            ids[at] = data.draw(st.sampled_from(OUTSIDE))  # such a pair is not copied

    buffers = [torch.randint(0, 256, (NUM_PAGES, size), generator=noise, dtype=torch.uint8) for size in sizes]
    expected = [buffer.numpy().copy() for buffer in buffers]
    for page, to in zip(source, target, strict=True):
        if 0 <= page < NUM_PAGES and 0 <= to < NUM_PAGES:
            for pages in expected:
                pages[to] = pages[page]

    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    offset = data.draw(st.integers(0, 1))  # as a part of a delta, ids are aligned to nothing
    ids = torch.tensor([0] * offset + source + target, dtype=dtype)
    n = len(source)
    for kernels, device in ((_pages_fused, DEVICE), (reference, "cpu")):
        mine, there = [buffer.to(device, copy=True) for buffer in buffers], ids.to(device)
        addresses = torch.tensor([buffer.data_ptr() for buffer in mine], device=device)
        kernels.copy_pages(there[offset : offset + n], there[offset + n :], mine, addresses)
        for pages, want in zip(mine, expected, strict=True):
            assert np.array_equal(pages.cpu().numpy(), want)


@CASES
@given(data=st.data())
def test_table_writes_agree(data: st.DataObject):
    num_entries = data.draw(st.sampled_from([1, 7, 300, 5000]))
    places = data.draw(st.lists(st.integers(0, num_entries - 1), unique=True, max_size=600))
    outside = data.draw(st.lists(st.sampled_from([-1, -(2**31), num_entries, 2**31 - 1]), max_size=3))
    index = np.array([*places, *outside], dtype=np.int32)
    np.random.default_rng(len(places)).shuffle(index)
    values = np.arange(len(index), dtype=np.int32) * 7919 - 1000
    expected = np.full(num_entries, -5, dtype=np.int32)
    is_inside = (index >= 0) & (index < num_entries)
    expected[index[is_inside]] = values[is_inside]
    before, between, behind = (data.draw(st.integers(0, 5)) for _ in range(3))  # what else a delta holds
    parts = [[7] * before, index, [3] * between, values, [3] * behind]
    if data.draw(st.booleans()):  # in any order
        parts[1], parts[3] = parts[3], parts[1]
    first, second = before, before + len(index) + between
    at, ids = (first, second) if parts[1] is index else (second, first)
    packed = torch.tensor(np.concatenate(parts).astype(np.int32))
    offset = data.draw(st.integers(0, before))  # aligned to nothing
    for kernels, device in ((fused, DEVICE), (reference, "cpu")):
        table = torch.full((num_entries,), -5, dtype=torch.int32, device=device)
        kernels.write_table(packed.to(device)[offset:], at - offset, ids - offset, len(index), table)
        assert np.array_equal(table.cpu().numpy(), expected)


@CASES
@given(
    offset=st.integers(0, 5),
    size=st.integers(2, 40),
    value=st.integers(-(2**31), 2**31 - 1),
    data=st.data(),
)
def test_a_place_and_a_length_are_set_and_nothing_else(
    offset: int, size: int, value: int, data: st.DataObject
):
    at, row = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    places, lengths = list(range(offset + size + 3)), list(range(100, 103 + size))
    for kernels, device in ((fused, DEVICE), (reference, "cpu")):
        table = torch.tensor(places, dtype=torch.int32, device=device)
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        kernels.set_table(table[offset:], at, value, lens[1:], row, -7)
        assert table.tolist() == [*places[: offset + at], value, *places[offset + at + 1 :]], kernels.__name__
        assert lens.tolist() == [*lengths[: 1 + row], -7, *lengths[2 + row :]], kernels.__name__
