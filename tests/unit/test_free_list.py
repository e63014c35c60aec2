"""FreeList, call by call."""

import time
import weakref

import numpy as np
import pytest
import torch

from pagoda import CapacityError, ConfigError, FreeList
from pagoda.errors import AlreadyHeldError, ArgumentError, DoubleFreeError, NotHeldError, OutOfRangeError


def state(ids: FreeList) -> tuple[object, ...]:
    """Everything that can be observed."""
    span = range(ids.first_id, ids.first_id + ids.num_ids)
    return ids.num_free, ids.num_held, ids.num_quarantined, [(ids.is_free(i), ids.is_held(i)) for i in span]


def test_ids_begin_at_one_and_come_lowest_first():
    ids = FreeList(5)
    assert ids.alloc(3).tolist() == [1, 2, 3]
    ids.free([2])
    assert ids.alloc(2).tolist() == [2, 4]


def test_ids_are_int32_host_arrays():
    ids = FreeList(5).alloc(3)
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.shape) == (np.int32, (3,))


def test_first_id_moves_the_space():
    ids = FreeList(3, first_id=0)
    assert ids.alloc(3).tolist() == [0, 1, 2]
    ids = FreeList(3, first_id=100)
    assert ids.alloc(3).tolist() == [100, 101, 102]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096, 4097, 262_145])
def test_every_id_comes_out_exactly_once_across_word_and_level_borders(size: int):
    ids = FreeList(size)
    assert ids.alloc(size).tolist() == list(range(1, size + 1))
    assert not ids.can_alloc(1)
    ids.check()
    back = np.random.default_rng(0).permutation(size).astype(np.int32) + 1
    ids.free(back)
    ids.check()
    assert ids.alloc(size).tolist() == list(range(1, size + 1))


def test_running_out_says_what_was_wanted_free_and_there_and_takes_nothing():
    ids = FreeList(4, what="blocks")
    ids.alloc(3)
    before = state(ids)
    with pytest.raises(CapacityError, match="out of blocks: 2 wanted, 1 free of 4") as caught:
        ids.alloc(2)
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (2, 1, 4)
    assert isinstance(caught.value, RuntimeError)
    assert state(ids) == before


def test_can_alloc_says_what_alloc_does():
    ids = FreeList(2)
    assert ids.can_alloc(2)
    assert not ids.can_alloc(3)
    assert ids.can_alloc(0)
    assert ids.alloc(0).tolist() == []


@pytest.mark.parametrize("bad", [[0], [6], [-1], [1, 99], [2**31 - 1]])
@pytest.mark.parametrize("fence", [None, 3])
def test_freeing_an_id_out_of_range_changes_nothing(bad: list[int], fence: int | None):
    ids = FreeList(5)
    ids.alloc(2)
    before = state(ids)
    with pytest.raises(OutOfRangeError, match="out of range") as caught:
        ids.free(bad, fence)
    assert caught.value.id == bad[-1]
    assert caught.value.position == len(bad) - 1
    assert isinstance(caught.value, IndexError)
    assert state(ids) == before


def test_freeing_id_zero_says_that_it_is_padding():
    with pytest.raises(OutOfRangeError, match="0 is padding"):
        FreeList(5).free([0])


@pytest.mark.parametrize("fence", [None, 3])
def test_freeing_twice_is_found_at_the_call(fence: int | None):
    ids = FreeList(5)
    ids.alloc(3)
    ids.free([2])
    before = state(ids)
    with pytest.raises(NotHeldError, match=r"ids\[1\] = 2 is not held"):
        ids.free([1, 2, 3], fence)
    assert state(ids) == before
    with pytest.raises(NotHeldError):
        ids.free([5], fence)  # never allocated
    with pytest.raises(DoubleFreeError, match=r"ids\[2\] = 1 is duplicated"):
        ids.free([1, 3, 1], fence)
    assert state(ids) == before
    ids.free([1, 3], fence)


def test_take_takes_exactly_these():
    ids = FreeList(6)
    ids.take([2, 5])
    assert ids.alloc(3).tolist() == [1, 3, 4]
    before = state(ids)
    with pytest.raises(AlreadyHeldError) as caught:
        ids.take([6, 5])
    assert (caught.value.id, caught.value.position) == (5, 1)
    with pytest.raises(AlreadyHeldError):
        ids.take([6, 6])
    with pytest.raises(OutOfRangeError):
        ids.take([6, 7])
    assert state(ids) == before


class TestFences:
    def test_quarantined_ids_are_neither_free_nor_held(self):
        ids = FreeList(3)
        ids.alloc(3)
        ids.free([1, 2], fence=7)
        assert (ids.num_free, ids.num_held, ids.num_quarantined) == (0, 1, 2)
        assert not ids.is_free(1)
        assert not ids.is_held(1)
        with pytest.raises(CapacityError):
            ids.alloc(1)

    def test_a_fence_frees_what_waits_for_it_and_for_earlier_ones(self):
        ids = FreeList(4)
        ids.alloc(4)
        ids.free([4], fence=9)
        ids.free([1], fence=5)
        ids.free([2], fence=6)
        assert ids.pass_fence(4) == 0
        assert ids.pass_fence(6) == 2
        assert ids.alloc(2).tolist() == [1, 2]
        assert ids.pass_fence(100) == 1
        ids.check()

    def test_a_fence_that_has_passed_frees_at_once(self):
        ids = FreeList(2)
        ids.alloc(2)
        ids.pass_fence(5)
        ids.free([1], fence=5)
        assert ids.num_free == 1
        ids.free([2], fence=6)
        assert ids.num_free == 1

    def test_an_earlier_fence_later_does_not_take_back_what_passed(self):
        ids = FreeList(2)
        ids.alloc(2)
        ids.pass_fence(5)
        assert ids.pass_fence(3) == 0
        ids.free([1], fence=4)
        assert ids.num_free == 1

    def test_freeing_what_waits_is_a_double_free(self):
        ids = FreeList(2)
        ids.alloc(2)
        ids.free([1], fence=1)
        before = state(ids)
        for fence in (None, 1, 2):
            with pytest.raises(DoubleFreeError, match="waits for its fence"):
                ids.free([2, 1], fence)
        assert state(ids) == before

    def test_recall_makes_held_again_exactly_that_fence(self):
        ids = FreeList(4)
        ids.alloc(4)
        ids.free([1, 2], fence=1)
        ids.free([3], fence=2)
        assert ids.recall(1) == 2
        assert ids.recall(1) == 0
        assert ids.is_held(1)
        assert ids.num_quarantined == 1
        ids.free([1])
        ids.check()

    def test_reset_forgets_fences(self):
        ids = FreeList(2)
        ids.alloc(2)
        ids.free([1], fence=3)
        ids.pass_fence(2)
        ids.reset()
        assert (ids.num_free, ids.num_quarantined) == (2, 0)
        ids.alloc(2)
        ids.free([1], fence=1)
        assert ids.num_quarantined == 1


class TestFreeSlots:
    def test_any_slot_names_its_page_and_a_page_counts_once(self):
        ids = FreeList(4)
        ids.alloc(3)
        ids.free_slots([7, 4, 5, 13], 4)  # pages 1, 1, 1, 3
        assert [ids.is_free(i) for i in (1, 2, 3)] == [True, False, True]

    def test_with_page_tokens_one_a_slot_that_stands_twice_raises(self):
        ids = FreeList(4)
        ids.alloc(3)
        with pytest.raises(DoubleFreeError):
            ids.free_slots([2, 2], 1)
        assert ids.num_held == 3

    def test_a_page_named_again_under_the_same_fence_counts_once(self):
        ids = FreeList(4)
        ids.alloc(3)
        ids.free_slots([4], 4, fence=1)
        ids.free_slots([5, 8], 4, fence=1)
        assert ids.num_quarantined == 2
        with pytest.raises(DoubleFreeError):
            ids.free_slots([12, 6], 4, fence=2)
        with pytest.raises(DoubleFreeError):
            ids.free_slots([12, 6], 4)
        assert ids.num_held == 1
        ids.check()

    @pytest.mark.parametrize("bad", [-1, 0, 3, 20, -4])
    def test_slots_outside_change_nothing(self, bad: int):
        ids = FreeList(4)
        ids.alloc(3)
        before = state(ids)
        with pytest.raises(OutOfRangeError, match="slots are 4 to 19") as caught:
            ids.free_slots([4, 8, bad], 4)
        assert (caught.value.id, caught.value.position) == (bad, 2)
        with pytest.raises(OutOfRangeError):
            ids.free_slots([bad], 4)
        assert state(ids) == before
        ids.check()

    def test_slots_of_a_page_that_is_not_held_change_nothing(self):
        ids = FreeList(4)
        ids.alloc(2)
        before = state(ids)
        with pytest.raises(NotHeldError, match="is in page 3"):
            ids.free_slots([4, 12], 4)
        assert state(ids) == before


class TestGrow:
    def test_the_last_page_is_filled_first_then_whole_pages(self):
        ids = FreeList(10)
        ids.alloc(2)  # request 0 ends at slot 4 + 1 of page 1, request 1 fills page 2
        slots = ids.grow([2, 4, 0], [7, 5, 3], [5, 11, 0], 4)
        assert slots.tolist() == [6, 7, 12, 13, 14, 16, 20, 21, 22]
        assert ids.num_held == 5

    def test_requests_that_stay_need_no_slot_and_no_valid_last_one(self):
        ids = FreeList(2)
        assert ids.grow([3, 8], [3, 8], [-5, 999], 4).tolist() == []
        assert ids.num_free == 2

    def test_all_or_nothing(self):
        ids = FreeList(3)
        ids.alloc(1)
        before = state(ids)
        with pytest.raises(CapacityError, match="3 wanted, 2 free of 3"):
            ids.grow([1, 0], [2, 9], [4, 0], 4)
        assert state(ids) == before

    @pytest.mark.parametrize(
        ("old", "new", "last", "error"),
        [
            ([2], [1], [5], ArgumentError),  # shrinks
            ([-1], [1], [5], ArgumentError),
            ([2, 2], [3], [5, 5], ArgumentError),  # lengths differ
            ([2], [3], [], ArgumentError),
            ([2], [3], [6], ArgumentError),  # not where token 1 lies
            ([2, 2], [3, 3], [5, 5], ArgumentError),  # one half-used page for two
            ([2], [3], [17], NotHeldError),
            ([2], [3], [1], OutOfRangeError),
            ([2], [3], [-3], OutOfRangeError),
            ([2], [3], [4001], OutOfRangeError),
        ],
    )
    def test_bad_growth_changes_nothing(
        self, old: list[int], new: list[int], last: list[int], error: type[Exception]
    ):
        ids = FreeList(5)
        ids.alloc(2)
        before = state(ids)
        with pytest.raises(error):
            ids.grow(old, new, last, 4)
        assert state(ids) == before
        ids.check()

    def test_slots_that_would_pass_int32_are_refused(self):
        with pytest.raises(ArgumentError, match=r"exceed 2\^31"):
            FreeList(2**20).grow([0], [1], [0], 2**12)


@pytest.mark.parametrize("bad", [-1, 1.0, "3", None, 2**80, [1]])
def test_counts_that_are_no_counts(bad: object):
    ids = FreeList(5)
    with pytest.raises(ArgumentError):
        ids.alloc(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        FreeList(bad)  # type: ignore[arg-type]
    if bad is not None:
        with pytest.raises(ArgumentError):
            ids.free([], fence=bad if bad != -1 else 1.5)  # type: ignore[arg-type]
    assert ids.num_free == 5


def test_sizes_that_pass_int32_are_refused():
    with pytest.raises(ConfigError):
        FreeList(2**31)
    with pytest.raises(ConfigError):
        FreeList(10, first_id=2**31 - 5)


def test_an_empty_space_is_allowed():
    ids = FreeList(0)
    assert ids.alloc(0).tolist() == []
    with pytest.raises(CapacityError):
        ids.alloc(1)
    with pytest.raises(OutOfRangeError, match="has no ids"):
        ids.free([1])
    ids.check()


def test_results_own_their_memory():
    ids = FreeList(4)
    first = ids.alloc(2)
    ids.free(first)
    first[:] = 77
    assert ids.alloc(2).tolist() == [1, 2]


def test_torch_and_numpy_and_lists_are_taken_alike():
    ids = FreeList(6)
    ids.alloc(6)
    ids.free(torch.tensor([1], dtype=torch.int32))
    ids.free(torch.tensor([2]))
    ids.free(np.array([3]))
    ids.free(np.array([4], dtype=np.int32))
    ids.free([5])
    ids.free(range(6, 7))
    assert ids.num_free == 6


@pytest.mark.parametrize("far", [-(2**63), 2**63 - 1, -(2**31), 2**31])
def test_ids_far_outside_are_out_of_range(far: int):
    ids = FreeList(5, first_id=3)
    for call in (ids.is_free, ids.is_held):
        with pytest.raises(OutOfRangeError):
            call(far)


@pytest.mark.long
def test_a_fence_costs_no_more_in_a_large_list():
    """The first fenced free makes a place for every id, which must not be filled."""

    def first_fenced_free(num_ids: int) -> float:
        seconds = []
        for _ in range(5):
            ids = FreeList(num_ids)
            ids.alloc(16)
            begin = time.thread_time()
            ids.free([1], fence=1)
            seconds.append(time.thread_time() - begin)
        return min(seconds)

    assert first_fenced_free(10**7) < 100 * first_fenced_free(10**3) + 1e-3


def test_a_name_of_broken_characters_is_refused():
    with pytest.raises(ConfigError, match="what"):
        FreeList(5, what="\ud800")


def test_a_free_list_can_be_referenced_weakly():
    ids = FreeList(5)
    assert weakref.ref(ids)() is ids


def test_repr_says_how_full_it_is():
    ids = FreeList(5, what="pages")
    ids.alloc(2)
    assert repr(ids) == "FreeList(5 pages from 1: 3 free, 2 held, 0 quarantined)"


def test_require_held_raises_as_free_would_and_changes_nothing():
    ids = FreeList(10)
    ids.alloc(5)
    ids.free([5], fence=3)
    ids.require_held([1, 4, 2])
    for bad, error in (
        ([1, 1], DoubleFreeError),
        ([5], DoubleFreeError),
        ([6], NotHeldError),
        ([1, 11], OutOfRangeError),
        ([0], OutOfRangeError),
        (None, ArgumentError),
    ):
        with pytest.raises(error):
            ids.require_held(bad)
        assert (ids.num_held, ids.num_quarantined) == (4, 1)
        ids.check()
