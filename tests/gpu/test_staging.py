"""Staging on a real device that is late: nothing is overwritten, and the host does not wait."""

import time

import numpy as np
import pytest
import torch

from pagoda.pools import Staging
from pagoda.pools import _staging as module

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 400_000_000  # about 0.2 s


def send_while_the_device_sleeps(staging: Staging, num_arrays: int) -> tuple[bool, float]:
    """Whether every array arrived whole, and how long the host took to send them."""
    arrays = [np.full(1000, number, dtype=np.int32) for number in range(num_arrays)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin = time.perf_counter()
    got = [staging.send(array)[0] for array in arrays]
    seconds = time.perf_counter() - begin
    staging.check()
    torch.cuda.synchronize()
    return all(bool((tensor == number).all()) for number, tensor in enumerate(got)), seconds


def test_pending_copies_are_not_overwritten_and_nobody_waits():
    staging = Staging("cuda", 65_536)  # sixteen arrays fit
    send_while_the_device_sleeps(staging, 4)  # warm
    arrived, seconds = send_while_the_device_sleeps(staging, 200)
    assert arrived
    assert seconds < 0.1  # the device slept for 0.2 s


def test_that_test_catches_a_ring_that_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.Ring, "is_idle", lambda self, segment: True)
    arrived, _ = send_while_the_device_sleeps(Staging("cuda", 65_536), 200)
    assert not arrived


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
