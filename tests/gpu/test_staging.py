"""Staging on a real device that is late: nothing is overwritten, and the host does not wait."""

import numpy as np
import pytest
import torch

from pagoda.pools import Staging
from pagoda.pools import _staging as module

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 400_000_000  # about 0.2 s


def send_while_the_device_sleeps(staging: Staging, num_arrays: int) -> tuple[bool, bool]:
    """Whether every array arrived whole, and whether the device still slept when all were sent."""
    arrays = [np.full(1000, number, dtype=np.int32) for number in range(num_arrays)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    awake = torch.cuda.Event()
    awake.record()
    got = [staging.send(array)[0] for array in arrays]
    is_asleep = not awake.query()
    staging.check()
    torch.cuda.synchronize()
    return all(bool((tensor == number).all()) for number, tensor in enumerate(got)), is_asleep


def test_pending_copies_are_not_overwritten_and_nobody_waits():
    staging = Staging("cuda", 65_536)  # sixteen arrays fit
    send_while_the_device_sleeps(staging, 4)  # warm
    arrived, is_asleep = send_while_the_device_sleeps(staging, 200)
    assert arrived
    assert is_asleep  # the host did not wait for it


def test_that_test_catches_a_lane_that_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.Lane, "is_idle", lambda self, segment: True)
    arrived, _ = send_while_the_device_sleeps(Staging("cuda", 65_536), 200)
    assert not arrived


def test_arrays_posted_to_one_room_arrive_in_the_order_of_the_stream():
    """What the stream reads between two posts is the first array, however late it reads it."""
    staging, rooms = Staging("cuda", 65_536), {}
    staging.post(np.zeros(1000, dtype=np.int32), rooms)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES // 4)
    got = []
    for number in range(100):
        got.append(staging.post(np.full(1000, number, dtype=np.int32), rooms)[:1000].clone())
    staging.check()
    torch.cuda.synchronize()
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(got))


def test_other_streams_are_served_in_their_order():
    staging = Staging("cuda", 4096)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        (late,) = staging.send(np.full(500, 1, dtype=np.int32))
    prompt = [staging.send(np.full(500, 2 + n, dtype=np.int32))[0] for n in range(20)]
    torch.cuda.synchronize()
    assert bool((late == 1).all())
    assert all(bool((tensor == 2 + n).all()) for n, tensor in enumerate(prompt))
