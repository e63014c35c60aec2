"""How array arguments cross into the core: what is taken, what is refused, and that nothing leaks."""

import contextlib
import gc
import sys

import numpy as np
import pytest
import torch

from pagoda import FreeList
from pagoda._native import sum_ids
from pagoda.errors import ArgumentError

VALUES = [3, -1, 2**31 - 1, -(2**31), 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_numpy(dtype: type):
    assert sum_ids(np.array(VALUES, dtype=dtype)) == sum(VALUES)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_torch(dtype: torch.dtype):
    assert sum_ids(torch.tensor(VALUES, dtype=dtype)) == sum(VALUES)
    assert sum_ids(torch.tensor([9, *VALUES, 9], dtype=dtype)[1:-1]) == sum(VALUES)  # an offset into storage


def test_torch_parameters_and_subclasses():
    class Mine(torch.Tensor):
        pass

    assert sum_ids(torch.tensor(VALUES).as_subclass(Mine)) == sum(VALUES)


@pytest.mark.parametrize(
    "make", [list, tuple, iter, lambda v: (x for x in v), lambda v: [np.int64(x) for x in v]]
)
def test_sequences(make: object):
    assert sum_ids(make(VALUES)) == sum(VALUES)  # type: ignore[operator]


def test_other_libraries_go_through_dlpack():
    class Foreign:
        def __init__(self) -> None:
            self.array = np.array(VALUES)

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    assert sum_ids(Foreign()) == sum(VALUES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "empty",
    [[], (), np.array([]), np.array([], dtype=np.int32), torch.tensor([], dtype=torch.int64), range(0)],
)
def test_empty(empty: object):
    assert sum_ids(empty) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("one", [np.arange(4)[2:3], np.arange(9)[::3][1:2], torch.arange(9)[::3][1:2]])
def test_one_element_has_no_stride_that_matters(one: object):
    assert sum_ids(one) == int(one[0])  # type: ignore[index,arg-type]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.array([1.5]), "int32 or int64"),
        (np.array([1], dtype=np.int16), "int32 or int64"),
        (np.array([1], dtype=np.uint32), "int32 or int64"),
        (np.array([1], dtype=">i4"), "int32 or int64"),
        (np.array([True]), "int32 or int64"),
        (np.array([[1]]), "one dimension"),
        (np.array(1), "one dimension"),
        (np.arange(6)[::2], "contiguous"),
        (np.arange(6)[::-1], "contiguous"),
        (np.array([2**31]), "entry 0 is 2147483648"),
        (np.array([0, -(2**31) - 1]), "entry 1 is -2147483649"),
        (torch.tensor([1.5]), "int32 or int64"),
        (torch.tensor([1], dtype=torch.uint8), "int32 or int64"),
        (torch.tensor([[1]]), "one dimension"),
        (torch.tensor(1), "one dimension"),
        (torch.arange(6)[::2], "contiguous"),
        (torch.tensor([2**31]), "does not fit"),
        (torch.zeros(3, device="meta", dtype=torch.int32), "device|read"),
        (torch.ones(3, dtype=torch.int32).to_sparse(), "read"),
        ([1.5], "integer"),
        ([2**31], "2147483648"),
        ([10**5000], "exceeds 64 bits"),
        (["1"], "integer"),
        ([None], "integer"),
        ("12", "str"),
        (b"1234", "int32 or int64"),
        ({1: 2}, "dict"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_bad_arrays_say_what_is_wrong(bad: object, why: str):
    with pytest.raises(ArgumentError, match=why) as caught:
        sum_ids(bad)  # type: ignore[arg-type]
    assert str(caught.value).startswith("ids: ")


def test_an_error_inside_a_sequence_is_not_swallowed_into_a_crash():
    class Shrinking:
        def __init__(self, items: list[object]) -> None:
            self.items = items

        def __index__(self) -> int:
            self.items.clear()
            return 1

    items: list[object] = []
    items += [Shrinking(items), 2, 3]
    assert sum_ids(items) == 1  # type: ignore[arg-type]


def test_memory_that_a_later_argument_frees_is_not_read():
    """Reading one argument may run Python that frees what another points to."""
    lens = torch.zeros(2_000_000, dtype=torch.int32)
    same = np.zeros(2_000_000, dtype=np.int32)

    class Freeing:
        def __index__(self) -> int:
            lens.set_()
            return 16

    with pytest.raises(ArgumentError, match="entries"):
        FreeList(1000).grow(lens, same, same, Freeing())  # type: ignore[arg-type]


def test_a_tensor_without_storage_is_refused():
    ids = torch.arange(4, dtype=torch.int32)
    ids.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="no storage"):
        sum_ids(ids)


def test_a_subclass_that_has_no_data_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.arange(4)
    with pytest.raises(ArgumentError, match="cannot be read"):
        sum_ids(fake)


def test_memory_that_is_not_aligned_is_refused():
    raw = bytes(41)
    with pytest.raises(ArgumentError, match="aligned"):
        sum_ids(np.frombuffer(raw, dtype=np.int32, offset=1))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_errors_that_are_not_about_the_argument_go_on(error: type[BaseException]):
    class Interrupted:
        def __index__(self) -> int:
            raise error

    def generator() -> object:
        yield 1
        raise error

    for argument in ([Interrupted()], generator()):
        with pytest.raises(error):
            sum_ids(argument)  # type: ignore[arg-type]
    with pytest.raises(error):
        FreeList(4).alloc(Interrupted())  # type: ignore[arg-type]


def test_arguments_are_released_also_after_an_error():
    arrays = [
        np.array([1], dtype=np.int32),
        np.arange(6)[::2],
        torch.tensor([1]),
        [1, "x"],
        torch.arange(6)[::2],
    ]
    for array in arrays:
        for _ in range(3):
            with contextlib.suppress(ArgumentError):
                sum_ids(array)  # type: ignore[arg-type]
        gc.collect()
        before = sys.getrefcount(array)
        for _ in range(100):
            with contextlib.suppress(ArgumentError):
                sum_ids(array)  # type: ignore[arg-type]
        assert sys.getrefcount(array) == before
    resizable = np.array([1], dtype=np.int32)
    sum_ids(resizable)
    resizable.resize(2, refcheck=False)


@pytest.mark.gpu
def test_a_tensor_on_a_device_is_refused_not_read():
    with pytest.raises(ArgumentError, match=r"\.cpu\(\)"):
        sum_ids(torch.zeros(3, dtype=torch.int32, device="cuda"))
