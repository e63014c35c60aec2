"""contracts/pools.md: `TokenToKVPoolAllocator`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conformance.builders import (
    PAGE_SIZES,
    allocator_of,
    free_slots,
)
from pagoda import ConfigError, UsageError
from pagoda.compat import TokenToKVPoolAllocator
from pagoda.errors import NotHeldError


def test_arguments_of_the_allocator_are_its_attributes(device: str) -> None:
    allocator = TokenToKVPoolAllocator(32, device=device, page_size=4, need_sort=False)
    assert (allocator.size, allocator.page_size, allocator.need_sort) == (32, 4, False)
    assert torch.device(allocator.device).type == device


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [True, False])
def test_alloc_gives_a_flat_int32_tensor_of_exactly_that_many_slots_on_the_device(
    device: str, page_size: int, need_sort: bool
) -> None:
    for need_size in (0, 1, page_size - 1, page_size, page_size + 1, 8 * page_size):
        allocator = allocator_of(device, page_size, need_sort=need_sort)
        slots = allocator.alloc(need_size)
        assert slots.shape == (need_size,)
        assert slots.dtype == torch.int32
        assert slots.device.type == device
        assert len(set(slots.tolist())) == need_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_gives_none_when_the_slots_are_not_there_and_takes_none(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    for need_size in (8 * page_size + 1, 2**31 - 1):
        assert allocator.alloc(need_size) is None
        assert allocator.alloc_host(need_size) is None
    assert free_slots(allocator) == list(range(page_size, 9 * page_size))
    allocator.alloc(7 * page_size + 1)
    assert allocator.alloc(1) is None  # the last page is half used, and its rest is not a page
    assert allocator.alloc(0).shape == (0,)
    allocator.check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("need_size", [2**31, 2**32, 2**70])
def test_alloc_gives_none_however_many_slots_are_asked_for(
    device: str, page_size: int, need_size: int
) -> None:
    assert allocator_of(device, page_size).alloc(need_size) is None


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [True, False])
def test_whole_pages_are_taken_and_slots_are_consecutive_inside_each(
    device: str, page_size: int, need_sort: bool
) -> None:
    allocator = allocator_of(device, page_size, need_sort=need_sort)
    allocator.free(allocator.alloc(8 * page_size)[2 * page_size : 5 * page_size])  # a hole
    need_size = 2 * page_size + 1
    slots = allocator.alloc(need_size).tolist()
    assert allocator.available_size() == 0  # three pages, though the last one is used by one slot
    for at, slot in enumerate(slots):
        assert slot % page_size == at % page_size
        if at % page_size:
            assert slot == slots[at - 1] + 1


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_with_need_sort_the_lowest_slots_come_first(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    assert allocator.alloc(8 * page_size).tolist() == list(range(page_size, 9 * page_size))
    for page in (7, 2, 5, 3):
        allocator.free(torch.tensor([page * page_size], device=device))
    wanted = [page * page_size + offset for page in (2, 3, 5, 7) for offset in range(page_size)]
    assert allocator.alloc(4 * page_size).tolist() == wanted


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_without_need_sort_all_slots_come_in_some_order(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size, need_sort=False)
    allocator.free(allocator.alloc(5 * page_size))
    assert sorted(allocator.alloc(8 * page_size).tolist()) == list(range(page_size, 9 * page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [True, False])
def test_merge_and_sort_free_makes_everything_freed_allocatable_in_order(
    device: str, page_size: int, need_sort: bool
) -> None:
    allocator = allocator_of(device, page_size, need_sort=need_sort)
    slots = allocator.alloc(8 * page_size)
    for page in (6, 1, 4):
        allocator.free(slots[page * page_size : (page + 1) * page_size])
    allocator.merge_and_sort_free()
    assert allocator.available_size() == 3 * page_size
    found = allocator.alloc(3 * page_size).tolist()
    wanted = [(page + 1) * page_size + offset for page in (1, 4, 6) for offset in range(page_size)]
    assert (found if need_sort else sorted(found)) == wanted
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_available_size_counts_tokens(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    assert allocator.available_size() == 8 * page_size
    slots = allocator.alloc(page_size + 1)
    taken = 2 * page_size
    assert allocator.available_size() == 8 * page_size - taken
    allocator.free(slots)
    assert allocator.available_size() == 8 * page_size


@pytest.mark.parametrize(
    "given",
    [
        lambda slots, device: slots,
        lambda slots, device: tuple(slots),
        lambda slots, device: np.array(slots, dtype=np.int32),
        lambda slots, device: np.array(slots, dtype=np.int64)[::-1],
        lambda slots, device: torch.tensor(slots, dtype=torch.int32),
        lambda slots, device: torch.tensor(slots, dtype=torch.int64, device=device),
        lambda slots, device: torch.tensor([slots, slots], dtype=torch.int32, device=device).t()[:, 0],
    ],
    ids=["list", "tuple", "int32", "reversed int64", "host tensor", "device tensor", "strided tensor"],
)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_takes_slots_from_the_host_or_a_device(
    device: str, page_size: int, given: Callable[..., Any]
) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(3 * page_size).tolist()
    allocator.free(given(slots[page_size:], device))
    assert allocator.available_size() == 7 * page_size
    assert allocator.alloc(page_size).tolist() == slots[page_size : 2 * page_size]
    allocator.check()


@pytest.mark.parametrize("nothing", [[], (), np.array([], dtype=np.int32), torch.empty(0, dtype=torch.int32)])
def test_freeing_nothing_changes_nothing(device: str, nothing: Any) -> None:
    allocator = allocator_of(device, 2)
    held = allocator.alloc(3)
    allocator.free(nothing)
    assert allocator.available_size() == 12
    allocator.free(held)


@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_any_slot_of_a_held_page_names_it_and_a_page_named_often_is_freed_once(
    device: str, page_size: int
) -> None:
    allocator = allocator_of(device, page_size)
    allocator.alloc(4 * page_size - 1)
    # The last slot of page 4 was not among those returned, but names the page.
    last = 5 * page_size - 1
    allocator.free(torch.tensor([last, 2 * page_size + 1, last, last - 1, 2 * page_size], device=device))
    assert allocator.available_size() == 6 * page_size
    with pytest.raises(NotHeldError):
        allocator.free([last])
    assert free_slots(allocator) == [
        page * page_size + offset for page in (2, 4, 5, 6, 7, 8) for offset in range(page_size)
    ]


def test_with_page_size_1_a_slot_twice_in_one_call_is_a_double_free(device: str) -> None:
    allocator = allocator_of(device)
    slots = allocator.alloc(4)
    with pytest.raises(NotHeldError):
        allocator.free(torch.cat([slots, slots[:1]]))
    assert free_slots(allocator) == [5, 6, 7, 8]


BAD_SLOTS: list[Any] = [
    [1.0],
    ["1"],
    "1",
    1.5,
    None,
    [None],
    True,
    [[1], [2, 3]],
    [2**31],
    [2**70],
    [-(2**31) - 1],
    {1: 2},
    torch.tensor([1.0]),
    torch.tensor([True]),
    torch.tensor([1], dtype=torch.uint8),
    torch.tensor([1], device="meta"),
    torch.tensor([1]).to_sparse(),
    np.array([1.0]),
    np.array(["1"]),
    np.array([2**63], dtype=np.uint64),
    ...,
]


@pytest.mark.parametrize("bad", BAD_SLOTS, ids=repr)
@pytest.mark.parametrize("page_size", [1, 2])
def test_ids_that_are_no_ids_raise_a_typed_error_and_free_nothing(
    device: str, page_size: int, bad: Any
) -> None:
    allocator = allocator_of(device, page_size)
    allocator.alloc(4 * page_size)
    with pytest.raises(UsageError):
        allocator.free(bad)
    assert allocator.available_size() == 4 * page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_size", [-1, -(2**40), 1.0, 1.5, "1", None, [1]])
def test_a_bad_need_size_raises_a_typed_error_and_takes_nothing(
    device: str, page_size: int, need_size: Any
) -> None:
    allocator = allocator_of(device, page_size)
    for alloc in (allocator.alloc, allocator.alloc_host):
        with pytest.raises(UsageError):
            alloc(need_size)
    assert allocator.available_size() == 8 * page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_clear_makes_every_slot_free(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    held = allocator.alloc(3 * page_size)
    allocator.clear()
    assert free_slots(allocator) == list(range(page_size, 9 * page_size))
    with pytest.raises(NotHeldError):
        allocator.free(held)
    allocator.check()


def test_clear_inside_a_free_group_frees_everything_once(device: str) -> None:
    allocator = allocator_of(device, 4)
    held = allocator.alloc(32)
    allocator.free_group_begin()
    allocator.free(held[:8])
    allocator.clear()
    allocator.free_group_end()
    assert free_slots(allocator) == list(range(4, 36))
    allocator.check()


@pytest.mark.parametrize(
    ("size", "page_size"), [(-1, 1), (7, 2), (8, 0), (8, -2), (8.0, 1), ("8", 1), (None, 1), (2**40, 1)]
)
def test_an_allocator_that_cannot_be_is_refused(size: Any, page_size: Any) -> None:
    with pytest.raises(ConfigError):
        TokenToKVPoolAllocator(size, device="cpu", page_size=page_size)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_extend_fills_the_half_used_page_of_each_request_and_then_whole_pages(
    device: str, page_size: int
) -> None:
    allocator = allocator_of(device, page_size, pages=16)
    old = [1, page_size, page_size + 1, 0, 2]
    held = [allocator.alloc(length).tolist() for length in old]
    free_before = allocator.available_size() // page_size
    new = [2 * page_size + 1, page_size + 1, page_size + 1, page_size, 2]
    grown = allocator.alloc_extend(old, new, [slots[-1] if slots else 0 for slots in held])
    assert grown.dtype == torch.int32
    assert grown.device.type == device
    assert grown.shape == (sum(new) - sum(old),)
    rest = grown.tolist()
    for slots, length in zip(held, new, strict=True):
        num_new = length - len(slots)
        slots += rest[:num_new]
        del rest[:num_new]
        for at, slot in enumerate(slots):
            assert slot % page_size == at % page_size
            if at % page_size:
                assert slot == slots[at - 1] + 1
    everything = [slot for slots in held for slot in slots]
    assert len(set(everything)) == len(everything)
    num_pages = [
        -(-after // page_size) + before // -page_size for before, after in zip(old, new, strict=True)
    ]
    assert allocator.available_size() == (free_before - sum(num_pages)) * page_size
    allocator.free(everything)
    assert allocator.available_size() == 16 * page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_extend_is_all_or_nothing(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    first = allocator.alloc(1).tolist()
    before = free_slots(allocator)
    # The first two would fit, the third does not.
    assert allocator.alloc_extend([1, 0, 0], [page_size, page_size, 8 * page_size], [first[0], 0, 0]) is None
    assert free_slots(allocator) == before
    slots = allocator.alloc_extend([1, 0], [page_size, 7 * page_size], [first[0], 0])
    assert slots.shape == (8 * page_size - 1,)
    assert allocator.available_size() == 0
    assert allocator.alloc_extend([8 * page_size], [8 * page_size], [0]).shape == (0,)
    allocator.check()


@pytest.mark.parametrize("as_tensor", [True, False])
def test_alloc_extend_takes_arrays_and_tensors(device: str, as_tensor: bool) -> None:
    allocator = allocator_of(device, 4)
    last = allocator.alloc(2)[-1:]
    lengths = [[2], [7]]
    given = [torch.tensor(it, device=device) if as_tensor else np.array(it, dtype=np.int32) for it in lengths]
    assert allocator.alloc_extend(*given, last if as_tensor else last.tolist()).tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("old_lens", "new_lens", "last_slots"),
    [
        ([3], [2], [6]),  # shrinks
        ([-1], [2], [0]),
        ([3], [5, 6], [6]),
        ([3, 3], [5], [6]),
        ([3], [5], []),
        ([3], [5], [5]),  # not where token 2 lies
        ([3], [5], [10]),  # page 2: held by nobody
        ([3], [5], [2]),  # page 0: padding
        ([3], [5], [-2]),
        ([3], [5], [34 + 4]),  # past the end
        ([3], [5], [2**40 + 6]),
        ([3, 3], [5, 5], [6, 6]),  # two requests in one half-used page
        ([3.0], [5], [6]),
        ([3], [5.0], [6]),
        (["3"], [5], [6]),
        ([3], [5], [None]),
        (None, [5], [6]),
        ([0, 3], [4, 5], [0, 7]),
    ],
)
def test_a_bad_batch_raises_a_typed_error_and_takes_nothing(
    device: str, old_lens: Any, new_lens: Any, last_slots: Any
) -> None:
    allocator = allocator_of(device, 4)
    assert allocator.alloc(3).tolist() == [4, 5, 6]
    before = free_slots(allocator)
    for extend in (allocator.alloc_extend, allocator.alloc_extend_host):
        with pytest.raises(UsageError):
            extend(old_lens, new_lens, last_slots)
    assert free_slots(allocator) == before
    allocator.check()
