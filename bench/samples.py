"""Timing one operation at a time: percentiles need every sample, `measure` only the best loop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

# CPU time of this thread, so that being descheduled does not count. The clock's own cost (a system call) is
# subtracted from each sample.
now = time.thread_time_ns
BATCH = 20  # the shortest operations are timed this many at a time


def _clock_cost_ns() -> int:
    """The tenth percentile: subtracting too little is honest, a noisy median would subtract too much."""
    samples = []
    for _ in range(5000):
        begin = now()
        samples.append(now() - begin)
    return int(np.percentile(samples, 10))


CLOCK_NS = _clock_cost_ns()


def stats(samples_ns: Sequence[int]) -> dict[str, Any]:
    """Return statistics of samples that include the cost of the clock once each.

    `best_us` is the lowest median of any 100 consecutive samples: noise of a busy neighbour is never negative
    and lasts for seconds. It is meaningful only if all samples do the same work.
    """
    us = np.maximum(np.asarray(samples_ns, dtype=np.float64) - CLOCK_NS, 1.0) / 1e3
    blocks = np.array_split(us, max(1, len(us) // 100))
    return {
        "best_us": round(float(min(np.median(block) for block in blocks)), 3),
        "mean_us": round(float(us.mean()), 3),
        "p50_us": round(float(np.percentile(us, 50)), 3),
        "p99_us": round(float(np.percentile(us, 99)), 3),
        "n": len(samples_ns),
    }


def each_of_batch(elapsed_ns: int, count: int) -> int:
    """Return one sample from a batch of `count`, with the cost of the clock once, as `stats` expects."""
    return (elapsed_ns - CLOCK_NS) // count + CLOCK_NS


def resident_bytes() -> int:
    """Resident bytes of this process, after the C library has returned unused memory."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
