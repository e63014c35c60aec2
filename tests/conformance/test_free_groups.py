"""contracts/pools.md: free groups of `TokenToKVPoolAllocator`."""

import pytest
import torch

from conformance.builders import (
    PAGE_SIZES,
    allocator_of,
)
from pagoda.errors import IdError, NotHeldError


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_frees_in_a_group_are_released_at_its_end_in_one_go(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(8 * page_size)
    allocator.free_group_begin()
    allocator.free(slots[: 2 * page_size])
    allocator.free(slots[5 * page_size : 6 * page_size].tolist())
    assert allocator.available_size() == 0
    assert allocator.alloc(1) is None
    allocator.check()
    allocator.free_group_end()
    assert allocator.available_size() == 3 * page_size
    allocator.free(slots[7 * page_size :])  # the group is over: at once
    assert allocator.available_size() == 4 * page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_group_is_a_context_manager_too(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(8 * page_size)
    for group in (allocator.free_group, allocator.free_group_begin):
        before = allocator.available_size()
        with group():
            allocator.free(slots[before : before + page_size])
            assert allocator.available_size() == before
        assert allocator.available_size() == before + page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_group_left_by_an_exception_releases_what_it_collected(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(8 * page_size)

    def fail() -> None:
        with allocator.free_group():
            allocator.free(slots[:page_size])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert allocator.available_size() == page_size
    allocator.free(slots[page_size : 2 * page_size])
    assert allocator.available_size() == 2 * page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_group_that_an_exception_kept_open_loses_nothing(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(8 * page_size)

    def step(first: int, fails: bool) -> None:
        allocator.free_group_begin()
        allocator.free(slots[first : first + page_size])
        if fails:
            raise KeyError
        allocator.free_group_end()

    with pytest.raises(KeyError):
        step(0, fails=True)
    step(page_size, fails=False)
    assert allocator.available_size() == 2 * page_size
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_host_ids_in_a_group_are_checked_at_the_call(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(4 * page_size).tolist()
    allocator.free_group_begin()
    allocator.free(slots[:page_size])
    for bad in ([0], [-1], [9 * page_size], [8 * page_size], [*slots[page_size:], 8 * page_size]):
        with pytest.raises(IdError):
            allocator.free(bad)
        with pytest.raises(IdError):
            allocator.free(torch.tensor(bad))
    allocator.free_group_end()
    assert allocator.available_size() == 5 * page_size  # the group went on, without the bad calls
    allocator.free(slots[page_size:])
    allocator.check()


@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_a_page_named_several_times_in_a_group_is_freed_once(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(3 * page_size)
    with allocator.free_group():
        allocator.free(slots[:1])
        allocator.free(slots[1:2].tolist())
        allocator.free(slots[: page_size + 1])
        allocator.free(slots[:2].tolist())
    assert allocator.available_size() == 7 * page_size
    with pytest.raises(NotHeldError):
        allocator.free(slots[:1])
    allocator.check()


def test_with_page_size_1_a_slot_freed_twice_in_a_group_is_a_double_free(device: str) -> None:
    allocator = allocator_of(device)
    slots = allocator.alloc(3).tolist()
    allocator.free_group_begin()
    allocator.free(slots[:1])
    with pytest.raises(NotHeldError):
        allocator.free(slots[:1])
    allocator.free_group_end()
    assert allocator.available_size() == 6
    allocator.check()


@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_a_page_of_an_earlier_group_is_not_held_in_the_next(device: str, page_size: int) -> None:
    allocator = allocator_of(device, page_size)
    slots = allocator.alloc(page_size).tolist()
    with allocator.free_group():
        allocator.free(slots)
    with allocator.free_group(), pytest.raises(NotHeldError):
        allocator.free(slots)
    assert allocator.available_size() == 8 * page_size
    allocator.check()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ids_in_device_tensors_are_checked_at_the_end_and_one_bad_one_frees_nothing(page_size: int) -> None:
    allocator = allocator_of("cuda", page_size)
    slots = allocator.alloc(4 * page_size)
    for bad in (0, -1, 9 * page_size, 8 * page_size, 2**31 - 1):
        allocator.free_group_begin()
        allocator.free(slots[: 2 * page_size])
        allocator.free(slots[2 * page_size :].tolist())
        allocator.free(torch.tensor([bad], device="cuda"))  # not looked at yet
        allocator.check()
        with pytest.raises(IdError):
            allocator.free_group_end()
        assert allocator.available_size() == 4 * page_size
        allocator.check()
    allocator.free(slots)  # all are still held, and the group is over
    assert allocator.available_size() == 8 * page_size


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_device_tensor_given_to_a_group_may_be_overwritten_before_the_end(page_size: int) -> None:
    allocator = allocator_of("cuda", page_size)
    slots = allocator.alloc(4 * page_size)
    given = slots[:page_size].clone()
    with allocator.free_group():
        allocator.free(given)
        given.zero_()
    assert allocator.available_size() == 5 * page_size
    allocator.check()


@pytest.mark.gpu
def test_with_page_size_1_two_device_tensors_of_a_group_may_not_name_one_slot() -> None:
    allocator = allocator_of("cuda")
    slots = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(slots[:2])
    allocator.free(slots[1:])
    with pytest.raises(NotHeldError):
        allocator.free_group_end()
    assert allocator.available_size() == 4
    allocator.check()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_device_tensors_of_a_group_may_name_a_page_several_times(page_size: int) -> None:
    allocator = allocator_of("cuda", page_size)
    slots = allocator.alloc(4 * page_size)
    with allocator.free_group():
        allocator.free(slots[:1].tolist())
        allocator.free(slots[: page_size + 1])
        allocator.free(slots[1 : page_size + 2])
    assert allocator.available_size() == 6 * page_size
    allocator.check()


def test_a_group_within_a_group_is_part_of_it(device: str) -> None:
    allocator = allocator_of(device, 4)
    first, second, third = (allocator.alloc_host(4) for _ in range(3))
    with allocator.free_group():
        allocator.free(first)
        with allocator.free_group():
            allocator.free(second)
        assert allocator.available_size() == 5 * 4
        allocator.free(third)
        assert allocator.available_size() == 5 * 4
    assert allocator.available_size() == 8 * 4
    allocator.check()


@pytest.mark.gpu
def test_ids_of_several_streams_are_read_when_they_are_there() -> None:
    allocator = allocator_of("cuda", 1, pages=64)
    held = allocator.alloc(32)
    stream, source = torch.cuda.Stream(), torch.zeros(32, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with allocator.free_group(), torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        source.copy_(held)
        allocator.free(source)
    assert allocator.available_size() == 64
