"""Staging: regions of pinned memory are not written again while a copy may still read them.

The ring is tried against a pretended device that makes its copies late. On a real one, see
tests/gpu/test_staging.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda import ConfigError
from pagoda.errors import ArgumentError, InvariantError
from pagoda.pools import Staging
from pagoda.pools._staging import Ring


class Late:
    """A device that runs copies and events in order, but only when it is told to."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.queue: list[object] = []
        self.arrived: list[np.ndarray] = []

    def new_event(self) -> "Late.Event":
        return Late.Event(self)

    def copy(self, begin: int, end: int) -> None:
        self.queue.append((begin, end))

    def run(self, n: int) -> None:
        for _ in range(min(n, len(self.queue))):
            job = self.queue.pop(0)
            if isinstance(job, tuple):
                self.arrived.append(self.memory[job[0] : job[1]].copy())
            else:
                job.is_done = True  # type: ignore[attr-defined]

    class Event:
        def __init__(self, device: "Late") -> None:
            self.device = device
            self.is_done = False

        def record(self) -> None:
            self.is_done = False
            self.device.queue.append(self)

        def query(self) -> bool:
            return self.is_done


class Heedless(Ring):
    """The defective design: it believes every copy to be done."""

    def is_idle(self, segment: int) -> bool:
        return True


CAPACITY = 4 * 64


def send_all(kind: type[Ring], jobs: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Send arrays of the given sizes, letting the device run that many jobs after each."""
    memory = np.zeros(CAPACITY, dtype=np.uint8)
    device = Late(memory)
    ring = kind(CAPACITY, device.new_event)
    sent, refused = [], 0
    for number, (size, pace) in enumerate(jobs):
        begin = ring.reserve(size)
        if begin is None:
            refused += 1
        else:
            content = np.full(size, number % 250 + 1, dtype=np.uint8)
            memory[begin : begin + size] = content
            device.copy(begin, begin + size)
            sent.append(content)
        ring.check()
        device.run(pace)
    device.run(10**6)
    return sent, device.arrived, refused


def equal(sent: list[np.ndarray], arrived: list[np.ndarray]) -> bool:
    return len(sent) == len(arrived) and all(np.array_equal(a, b) for a, b in zip(sent, arrived, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 4)), max_size=80))
def test_what_arrives_is_what_was_sent_however_late_the_device_is(jobs: list[tuple[int, int]]):
    sent, arrived, _ = send_all(Ring, jobs)
    assert equal(sent, arrived)


def test_that_test_catches_a_ring_that_does_not_wait():
    sent, arrived, _ = send_all(Heedless, [(64, 0)] * 5)
    assert not equal(sent, arrived)


def test_a_device_that_keeps_up_is_never_refused():
    _, _, refused = send_all(Ring, [(40, 2)] * 50)
    assert refused == 0


def test_a_device_that_stands_still_is_refused_when_the_ring_is_full():
    sent, arrived, refused = send_all(Ring, [(64, 0)] * 7)
    assert (len(sent), refused) == (4, 3)
    assert equal(sent, arrived)


def test_many_small_arrays_share_a_segment_and_its_event():
    device = Late(np.zeros(CAPACITY, dtype=np.uint8))
    ring = Ring(CAPACITY, device.new_event)
    assert [ring.reserve(16) for _ in range(4)] == [0, 16, 32, 48]
    assert device.queue == []
    assert ring.reserve(1) == 64
    assert len(device.queue) == 1


def test_places_are_aligned_for_every_dtype():
    ring = Ring(CAPACITY, Late(np.zeros(CAPACITY, dtype=np.uint8)).new_event)
    assert [ring.reserve(5) for _ in range(3)] == [0, 16, 32]


def test_what_no_segment_holds_is_refused():
    ring = Ring(CAPACITY, Late(np.zeros(CAPACITY, dtype=np.uint8)).new_event)
    assert ring.reserve(65) is None
    assert ring.reserve(64) == 0


def test_check_finds_a_segment_that_is_written_too_early():
    ring = Heedless(CAPACITY, Late(np.zeros(CAPACITY, dtype=np.uint8)).new_event)
    for _ in range(4):
        ring.reserve(64)
    ring.check()
    ring._current = 0
    with pytest.raises(InvariantError) as caught:
        ring.check()
    assert caught.value.number == 7


def test_arrays_arrive_with_their_dtypes(device: str):
    staging = Staging(device)
    arrays = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int64) - 2**40, np.zeros(0, dtype=np.int64)]
    got = staging.send(*arrays)
    for array, tensor in zip(arrays, got, strict=True):
        assert tensor.device.type == device
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))
    arrays[0][:] = -1
    assert got[0].tolist() == [0, 1, 2, 3, 4]
    assert staging.send() == []
    staging.check()


@pytest.mark.parametrize("bad", ["nowhere", "meta", "cuda:99", 1.5])
def test_a_device_that_is_not_there(bad: object):
    with pytest.raises(ConfigError, match="device"):
        Staging(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [[1], np.array([1.5]), np.ones(2, ">i4"), np.array(["x"]), torch.tensor([1])])
def test_only_plain_integer_arrays_are_sent(device: str, bad: object):
    with pytest.raises(ArgumentError, match="int32, int64 or uint8"):
        Staging(device).send(np.array([1]), bad)  # type: ignore[arg-type]


def test_a_ring_has_a_size():
    with pytest.raises(ConfigError):
        Staging("cpu", 0)
