"""contracts/blocks.md: `BlockAllocator`."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagoda
from pagoda import CapacityError, ConfigError, PagodaError, UsageError
from pagoda.compat import BlockAllocator
from pagoda.errors import CaptureError, NotHeldError, OutOfRangeError

FAILS = (AssertionError, pytest.fail.Exception)  # how a check says that an implementation is wrong


def free_blocks(allocator: BlockAllocator) -> list[int]:
    """Every block that can be acquired; none is taken."""
    blocks = allocator.acquire_host(allocator.num_free)
    allocator.release(blocks)
    return blocks.tolist()


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (BlockAllocator, "num_total_blocks, device='cuda'"),
        (BlockAllocator.acquire, "self, n"),
        (BlockAllocator.release, "self, ids"),
    ],
)
def test_argument_names_their_order_and_defaults_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)) == wanted
    assert pagoda.compat.BlockAllocator is BlockAllocator


def test_attributes_are_num_free_num_total_blocks_and_device(device: str) -> None:
    allocator = BlockAllocator(num_total_blocks=8, device=device)
    assert (allocator.num_free, allocator.num_total_blocks) == (8, 8)
    assert torch.device(allocator.device).type == device
    allocator.acquire(3)
    assert (allocator.num_free, allocator.num_total_blocks) == (5, 8)


@pytest.mark.parametrize("n", [0, 1, 5, 8])
def test_acquire_gives_an_int32_tensor_of_n_blocks_on_the_device(device: str, n: int) -> None:
    blocks = BlockAllocator(8, device=device).acquire(n)
    assert blocks.shape == (n,)
    assert blocks.dtype == torch.int32
    assert blocks.device.type == device
    assert len(set(blocks.tolist())) == n


def test_the_lowest_blocks_come_first(device: str) -> None:
    allocator = BlockAllocator(8, device=device)
    assert allocator.acquire(3).tolist() == [1, 2, 3]
    assert allocator.acquire(4).tolist() == [4, 5, 6, 7]
    allocator.release([6, 2])
    allocator.release([5])
    assert allocator.acquire(4).tolist() == [2, 5, 6, 8]


@pytest.mark.parametrize(("held", "n"), [(0, 9), (5, 4), (8, 1), (0, 2**31 - 1)])
def test_too_few_blocks_raise_what_was_asked_what_is_free_and_the_total(
    device: str, held: int, n: int
) -> None:
    allocator = BlockAllocator(8, device=device)
    allocator.acquire(held)
    before = free_blocks(allocator)
    for acquire in (allocator.acquire, allocator.acquire_host):
        with pytest.raises(CapacityError) as error:
            acquire(n)
        assert (error.value.wanted, error.value.free, error.value.total) == (n, 8 - held, 8)
        for said in (n, 8 - held, 8):
            assert str(said) in str(error.value)
    assert free_blocks(allocator) == before
    allocator.check()


@pytest.mark.parametrize("n", [2**31, 2**40, 2**70])
def test_out_of_blocks_is_the_answer_however_many_are_asked_for(device: str, n: int) -> None:
    with pytest.raises(CapacityError) as error:
        BlockAllocator(8, device=device).acquire(n)
    assert (error.value.wanted, error.value.free, error.value.total) == (n, 8, 8)


def test_out_of_blocks_is_a_runtime_error_too_and_survives_pickling(device: str) -> None:
    with pytest.raises(RuntimeError) as error:
        BlockAllocator(2, device=device).acquire(3)
    assert isinstance(error.value, PagodaError)
    copy = pickle.loads(pickle.dumps(error.value))
    assert str(copy) == str(error.value)
    assert (copy.wanted, copy.free, copy.total) == (3, 2, 2)


@pytest.mark.parametrize(
    "given",
    [
        lambda ids, device: ids,
        lambda ids, device: tuple(ids),
        lambda ids, device: np.array(ids, dtype=np.int32),
        lambda ids, device: np.array(ids, dtype=np.int64)[::-1],
        lambda ids, device: torch.tensor(ids, dtype=torch.int32),
        lambda ids, device: torch.tensor(ids, dtype=torch.int64),
        lambda ids, device: torch.tensor(ids, dtype=torch.int32, device=device),
        lambda ids, device: torch.tensor(ids, dtype=torch.int64, device=device),
        lambda ids, device: torch.tensor([ids, ids], device=device).t()[:, 0],
        lambda ids, device: torch.tensor([ids], device=device),
    ],
    ids=[
        "list",
        "tuple",
        "int32",
        "reversed",
        "host 32",
        "host 64",
        "device 32",
        "device 64",
        "strided",
        "2-D",
    ],
)
def test_release_takes_a_tensor_on_any_device_or_a_sequence_of_ints(
    device: str, given: Callable[..., Any]
) -> None:
    allocator = BlockAllocator(8, device=device)
    allocator.acquire(6)
    allocator.release(given([2, 5, 3], device))
    assert free_blocks(allocator) == [2, 3, 5, 7, 8]
    allocator.check()


def test_what_acquire_gave_can_be_released(device: str) -> None:
    allocator = BlockAllocator(8, device=device)
    blocks = allocator.acquire(8)
    allocator.release(blocks[:3])
    allocator.release(blocks[3:].cpu())
    assert allocator.num_free == 8
    allocator.check()


@pytest.mark.parametrize("nothing", [[], (), np.array([], dtype=np.int64), torch.empty(0, dtype=torch.int32)])
def test_releasing_nothing_changes_nothing(device: str, nothing: Any) -> None:
    allocator = BlockAllocator(8, device=device)
    allocator.acquire(3)
    allocator.release(nothing)
    assert free_blocks(allocator) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([0], OutOfRangeError),
        ([1, 2, 0], OutOfRangeError),
        ([-1], OutOfRangeError),
        ([9], OutOfRangeError),
        ([1, 9], OutOfRangeError),
        ([2**31 - 1], OutOfRangeError),
        ([2**31], UsageError),
        ([-(2**31) - 1], UsageError),
        ([2**70], UsageError),
        ([5], NotHeldError),
        ([1, 2, 5], NotHeldError),
        ([2, 2], NotHeldError),
        ([1, 2, 3, 1], NotHeldError),
        ([1.0], UsageError),
        (["1"], UsageError),
        ("1", UsageError),
        (None, UsageError),
        ([None], UsageError),
        ([True], UsageError),
        ([[1], [2, 3]], UsageError),
        (torch.tensor([1.0]), UsageError),
        (torch.tensor([True]), UsageError),
        (torch.tensor([1], dtype=torch.int8), UsageError),
        (torch.tensor([1], device="meta"), UsageError),
        (torch.tensor([1]).to_sparse(), UsageError),
        (np.array([1.0]), UsageError),
        ({1: 1}, UsageError),
    ],
    ids=repr,
)
def test_a_bad_release_raises_a_typed_error_and_releases_nothing(
    device: str, ids: Any, error: type[Exception]
) -> None:
    allocator = BlockAllocator(8, device=device)
    allocator.acquire(4)
    with pytest.raises(error):
        allocator.release(ids)
    if isinstance(ids, list) and error in (OutOfRangeError, NotHeldError):
        with pytest.raises(error):
            allocator.release(torch.tensor(ids, device=device))
    assert free_blocks(allocator) == [5, 6, 7, 8]
    allocator.check()


@pytest.mark.parametrize("n", [-1, -(2**40), 1.0, 1.5, "1", None, [1]])
def test_a_bad_number_of_blocks_raises_a_typed_error_and_takes_nothing(device: str, n: Any) -> None:
    allocator = BlockAllocator(8, device=device)
    for acquire in (allocator.acquire, allocator.acquire_host):
        with pytest.raises(UsageError):
            acquire(n)
    assert allocator.num_free == 8


@pytest.mark.parametrize("num_total_blocks", [-1, 1.0, "8", None, 2**40])
def test_an_allocator_that_cannot_be_is_refused(num_total_blocks: Any) -> None:
    with pytest.raises(ConfigError):
        BlockAllocator(num_total_blocks, device="cpu")


@pytest.mark.parametrize("name", ["nowhere", "meta", None, 3.5])
def test_a_device_that_is_not_there_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError):
        BlockAllocator(8, device=name)


def test_the_size_is_fixed_at_the_start(device: str) -> None:
    allocator = BlockAllocator(3, device=device)
    for _ in range(3):
        blocks = allocator.acquire(3)
        with pytest.raises(CapacityError):
            allocator.acquire(1)
        allocator.release(blocks)
    assert free_blocks(allocator) == [1, 2, 3]


@pytest.mark.gpu
def test_acquire_and_release_are_called_between_captures() -> None:
    allocator = BlockAllocator(8, device="cuda")
    blocks = allocator.acquire(2)
    counter = torch.zeros(1, device="cuda")
    table = torch.zeros(2, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        with pytest.raises(CaptureError):
            allocator.acquire(1)
        with pytest.raises(CaptureError):
            allocator.release(blocks)
        table.copy_(blocks)  # block tables are read inside
    assert allocator.num_free == 6
    graph.replay()
    assert table.tolist() == [1, 2]
    allocator.release(blocks)
    allocator.check()


# --- known defects of the public designs


class Stack:
    """The stack of a public design: no bound, no check, and block 0 is handed out."""

    def __init__(self, num_total_blocks: int, first: int = 0) -> None:
        self.blocks = list(range(first, first + num_total_blocks))
        self.num_total_blocks = num_total_blocks

    @property
    def num_free(self) -> int:
        return len(self.blocks)

    def acquire(self, n: int) -> torch.Tensor:
        taken = [self.blocks.pop(0) for _ in range(n)]
        return torch.tensor(taken, dtype=torch.int32)

    def release(self, ids: torch.Tensor) -> None:
        self.blocks = [*ids.tolist(), *self.blocks]


def check_a_release_is_checked(allocator: Any) -> None:
    blocks = allocator.acquire(4)
    allocator.release(blocks)
    with pytest.raises(PagodaError):
        allocator.release(blocks)
    assert allocator.num_free == allocator.num_total_blocks
    first, second = allocator.acquire(4), allocator.acquire(4)
    assert not set(first.tolist()) & set(second.tolist())


def test_defect_release_overruns_the_stack_or_hands_a_block_out_twice(device: str) -> None:
    check_a_release_is_checked(BlockAllocator(8, device=device))
    with pytest.raises(FAILS):
        check_a_release_is_checked(Stack(8))


def test_defect_construction_needs_pinned_memory_on_a_machine_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            torch.zeros(1, dtype=torch.int64).pin_memory()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    allocator = BlockAllocator(8, device="cpu")
    allocator.release(allocator.acquire(3))
    assert allocator.num_free == 8


def check_block_0_is_never_handed_out(allocator: Any) -> None:
    blocks = allocator.acquire(allocator.num_total_blocks)
    assert 0 not in blocks.tolist()


def test_defect_block_0_is_handed_out(device: str) -> None:
    check_block_0_is_never_handed_out(BlockAllocator(8, device=device))
    with pytest.raises(FAILS):
        check_block_0_is_never_handed_out(Stack(8))
    check_block_0_is_never_handed_out(Stack(8, first=1))  # the check asks for nothing else
