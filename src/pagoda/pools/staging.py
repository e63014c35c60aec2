"""Host arrays to the device, without waiting for it.

A copy to a GPU is asynchronous only from pinned memory, and reads that memory later than the call
that asked for it. `Ring` hands out regions of one pinned buffer and takes a region back only when
the event recorded behind its copy has come (invariant 7); `Staging` makes the copies. When the
regions in flight fill the ring, a larger one takes over: the host never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import InvariantError
from pagoda.pools.arguments import count, refuse_capture, resolve_device

__all__ = ["Ring", "Staging"]

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.uint8): torch.uint8}
ALIGN = 16  # bytes; every part of a region can be viewed as any dtype


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


class Event(Protocol):
    def record(self) -> None: ...
    def query(self) -> bool: ...


class Ring:
    """Regions of a buffer, handed out in order and taken back in order.

    ::

        [0 … oldest)         free
        [oldest … next)      in flight: a copy may still read them
        [next … capacity)    free            (or wrapped: the free part lies between next and oldest)
    """

    def __init__(self, capacity: int, new_event: Callable[[], Event]) -> None:
        self.capacity = capacity
        self._new_event = new_event
        self._next = 0
        self._in_flight: deque[tuple[int, int, Event]] = deque()  # begin, end, event behind the copy
        self._spare: list[Event] = []

    def reserve(self, num_bytes: int) -> int | None:
        """Where num_bytes may be written, or None when regions in flight leave no such gap."""
        while self._in_flight and self._in_flight[0][2].query():
            self._spare.append(self._in_flight.popleft()[2])
        if not self._in_flight:
            self._next = 0
            return 0 if num_bytes <= self.capacity else None
        oldest = self._in_flight[0][0]
        if self._next > oldest:
            if self._next + num_bytes <= self.capacity:
                return self._next
            # The end of the buffer is skipped. One byte stays free: next == oldest means full.
            return 0 if num_bytes < oldest else None
        return self._next if self._next + num_bytes < oldest else None

    def seal(self, begin: int, num_bytes: int) -> None:
        """The copy of a reserved region has been asked for: take it back when that is done."""
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._next = begin + num_bytes
        self._in_flight.append((begin, self._next, event))

    def check(self) -> None:
        """Verify invariant 7: regions in flight lie in the buffer, none over another."""
        regions = sorted((begin, end) for begin, end, _ in self._in_flight)
        if any(end > begin for (_, end), (begin, _) in pairwise(regions)):
            raise InvariantError(7, "regions in flight overlap")
        if any(begin < 0 or end > self.capacity for begin, end in regions):
            raise InvariantError(7, "a region in flight leaves the buffer")


class Staging:
    """Carries host arrays to `device` through a pinned ring of `num_bytes`, which grows when it must.

    Several threads may call it. On a CPU there is nothing to carry and arrays are copied.

    Errors: ConfigError for a device that is not there or a size that is not positive.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 1 << 20) -> None:
        self.device = resolve_device(device)
        self._lock = threading.Lock()
        self._grow(aligned(count(num_bytes, "num_bytes")))

    def _grow(self, capacity: int) -> None:
        if self.device.type == "cpu":
            return
        # Regions of the old buffer may still be read: torch's pinned allocator keeps its memory
        # until the copies that were asked of it are done.
        self._pinned = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        self._bytes: npt.NDArray[np.uint8] = self._pinned.numpy()
        self._ring = Ring(capacity, torch.cuda.Event)

    def send(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Fresh flat tensors on the device with the contents of int32, int64 or uint8 arrays, in one copy.

        They are there for whatever the current stream runs next. The arrays may be changed at
        once. Cost: a memcpy of the bytes, one asynchronous copy, one event. Errors: CaptureError.
        """
        refuse_capture(self.device, "sending a host array")
        if self.device.type == "cpu":
            return [torch.from_numpy(array.flatten()) for array in arrays]
        begins = [0, *accumulate(aligned(array.nbytes) for array in arrays)]
        total = begins.pop()
        if torch.cuda.current_device() == self.device.index:
            received = self._copy(arrays, begins, total)
        else:
            with torch.cuda.device(self.device):
                received = self._copy(arrays, begins, total)
        return [
            received[begin : begin + array.nbytes].view(_DTYPES[array.dtype])
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def _copy(self, arrays: tuple[npt.NDArray[Any], ...], begins: list[int], total: int) -> torch.Tensor:
        """One copy of all arrays, on the current device and stream."""
        received = torch.empty(total, dtype=torch.uint8, device=self.device)
        if total == 0:
            return received
        with self._lock:
            at = self._ring.reserve(total)
            if at is None:
                self._grow(2 * max(self._ring.capacity, total))
                at = 0
            for begin, array in zip(begins, arrays, strict=True):
                self._bytes[at + begin : at + begin + array.nbytes] = array.reshape(-1).view(np.uint8)
            try:
                received.copy_(self._pinned[at : at + total], non_blocking=True)
                self._ring.seal(at, total)
            except BaseException:  # Ctrl-C between the two: nobody would know of this copy
                self._grow(self._ring.capacity)
                raise
        return received

    def check(self) -> None:
        """Verify invariant 7. Cost: the copies in flight. Errors: InvariantError."""
        if self.device.type == "cuda":
            with self._lock:
                self._ring.check()
