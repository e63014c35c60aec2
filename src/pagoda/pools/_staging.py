"""Host arrays to the device, without waiting for it.

A copy to a GPU is asynchronous only from pinned memory, and reads that memory later than the call
that asked for it. A `Ring` hands out places in one pinned buffer and comes back to a place only when
the event behind its copies has come (invariant 7); `Staging` has a ring a stream and makes the
copies. When copies in flight fill a ring, a larger one takes over: the host does not wait for them,
only for the system to pin the memory. An `Inbox` is where one array at a time arrives on a device, for
kernels that are asked for at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.kernels import on_device
from pagoda.layout._numbers import count
from pagoda.pools._arguments import (
    AnyIds,
    host_ids,
    is_unread,
    refuse_capture,
    require_range,
    resolve_device,
    unread_ids,
)

__all__ = ["Inbox", "Ring", "Staging", "current_stream", "staging_of"]

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.uint8): torch.uint8}
ALIGN = 16  # bytes; every array can be viewed as its dtype


# The handle of a device's current stream. torch.cuda.current_stream costs 7 µs of host time, the call
# under it, which Triton and torch's own compiler use, 0.1 µs.
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


class Event(Protocol):
    """Recorded behind work that was asked of a device; has come when that work is done."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


class Ring:
    """Places in a buffer of one stream, handed out in order, segment after segment.

    ::

        | segment 0 | segment 1 | segment 2 | segment 3 |
          in flight   current      in flight   in flight
                      ▲ begin … next: its copies are not yet behind an event

    An event is recorded when a segment is left, behind all copies out of it, so that a send costs
    none: 8 µs of host time on one machine. A segment is entered again when its event has come.
    """

    NUM_SEGMENTS = 4

    def __init__(self, capacity: int, new_event: Callable[[], Event]) -> None:
        self.segment_bytes = capacity // self.NUM_SEGMENTS // ALIGN * ALIGN
        self._events = [new_event() for _ in range(self.NUM_SEGMENTS)]
        self._was_left = [False] * self.NUM_SEGMENTS
        self._current = 0
        self._next = 0

    def reserve(self, num_bytes: int) -> int | None:
        """Where num_bytes may be written, to be copied before the next call; None when there is no room."""
        if num_bytes > self.segment_bytes:
            return None
        if self._next + num_bytes > self._begin(self._current + 1):
            following = (self._current + 1) % self.NUM_SEGMENTS
            if not self.is_idle(following):
                return None
            self._events[self._current].record()
            self._was_left[self._current] = True
            self._was_left[following] = False
            self._current, self._next = following, self._begin(following)
        at = self._next
        self._next += aligned(num_bytes)
        return at

    def is_idle(self, segment: int) -> bool:
        """Whether all copies out of a segment that was left are done."""
        return not self._was_left[segment] or self._events[segment].query()

    def _begin(self, segment: int) -> int:
        return segment * self.segment_bytes

    def check(self) -> None:
        """Verify invariant 7: the current segment is nobody's, and the next place lies in it."""
        if self._was_left[self._current]:
            raise InvariantError(7, f"segment {self._current} is written while its copies are in flight")
        if not self._begin(self._current) <= self._next <= self._begin(self._current + 1):
            raise InvariantError(7, f"byte {self._next} is not in segment {self._current}")


class _StreamEvent:
    """An event of one CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._event = stream, torch.cuda.Event()

    def record(self) -> None:
        self._event.record(self._stream)

    def query(self) -> bool:
        return bool(self._event.query())


def _pinned_bytes(num_bytes: int) -> torch.Tensor:
    # On the CPU whatever the default device is, and to be written outside of inference_mode too.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Pinned:
    """A pinned buffer of one stream, and the ring over it."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        self.num_bytes = num_bytes
        self.tensor = _pinned_bytes(num_bytes)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()  # the same memory
        self.ring = Ring(num_bytes, lambda: _StreamEvent(stream))


class Staging:
    """Carries host arrays to `device` through pinned rings of `num_bytes`, one a stream, that grow.

    Several threads may call it. On a CPU there is nothing to carry and arrays are copied.

    Errors: ConfigError for a device that is not there or a size that is not positive.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 1 << 20) -> None:
        self.device = resolve_device(device)
        self.num_bytes = aligned(count(num_bytes, "num_bytes"))
        self._pinned: dict[int, _Pinned] = {}  # by stream
        self._lock = threading.RLock()
        self._is_sending = False

    def send(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Fresh flat tensors on the device with the contents of int32, int64 or uint8 arrays, in one copy.

        They are there for whatever the current stream runs next. The arrays may be changed at
        once. Cost: a memcpy of the bytes and one asynchronous copy. Errors: ArgumentError for other
        arrays; CaptureError.
        """
        refuse_capture(self.device, "sending a host array")
        for array in arrays:
            if not isinstance(array, np.ndarray) or array.dtype not in _DTYPES:
                found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise ArgumentError(f"arrays: give numpy arrays of int32, int64 or uint8, not {found}")
        if self.device.type == "cpu":
            return [torch.from_numpy(array.flatten()) for array in arrays]
        begins = [0, *accumulate(aligned(array.nbytes) for array in arrays)]
        total = begins.pop()
        with on_device(self.device):
            received = torch.empty(total, dtype=torch.uint8, device=self.device)
            if total:
                self.fill(received, arrays, begins)
        return [
            received[begin : begin + array.nbytes].view(_DTYPES[array.dtype])
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def send_ids(self, ids: AnyIds, name: str, low: int, high: int) -> torch.Tensor:
        """Ids from anywhere as a flat tensor on the device: [n] int32 or int64.

        Those that lie on the device already are used as they are, since looking at them would wait for
        it; all others are checked and sent as int64. Cost: as `send`. Errors: OutOfRangeError for one
        outside [low, high]; ArgumentError; CaptureError.
        """
        if is_unread(ids, self.device):
            return unread_ids(ids, name)
        host = host_ids(ids, name)
        require_range(host, low, high, name, name)
        return self.send(host)[0]

    def fill(
        self, received: torch.Tensor, arrays: Sequence[npt.NDArray[Any]], begins: Sequence[int] = (0,)
    ) -> None:
        """Copy arrays to where they begin in the caller's bytes, in one copy.

        received: [n] uint8 on the device, n > 0, of which the arrays fill all but gaps. The device is
        current, its stream is not captured, and the arrays are as `send` wants them: nothing is looked at.
        Cost: as `send`.
        """
        total = received.shape[0]
        with self._lock:
            if self._is_sending:
                # A finalizer or signal handler in the middle of another send of this thread: what
                # that one reserved is not behind an event yet, so the ring is left alone.
                place = _pinned_bytes(total)
                self._copy(received, place, place.numpy(), arrays, begins)
                return
            self._is_sending = True
            try:
                pinned, at = self._reserve(total)
                end = at + total
                self._copy(received, pinned.tensor[at:end], pinned.array[at:end], arrays, begins)
            finally:
                self._is_sending = False

    @staticmethod
    def _copy(
        received: torch.Tensor,
        place: torch.Tensor,
        room: npt.NDArray[np.uint8],
        arrays: Sequence[npt.NDArray[Any]],
        begins: Sequence[int],
    ) -> None:
        for begin, array in zip(begins, arrays, strict=True):
            room[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        received.copy_(place, non_blocking=True)

    def _reserve(self, total: int) -> tuple[_Pinned, int]:
        stream = current_stream(self.device.index)
        pinned = self._pinned.get(stream)
        at = None if pinned is None else pinned.ring.reserve(total)
        if pinned is None or at is None:
            # A larger buffer takes over. Copies may still read the old one: torch's pinned
            # allocator keeps its memory until those that were asked of it are done.
            grown = self.num_bytes if pinned is None else 2 * pinned.num_bytes
            pinned = _Pinned(max(grown, 2 * Ring.NUM_SEGMENTS * aligned(total)), torch.cuda.current_stream())
            self._pinned[stream] = pinned
            at = pinned.ring.reserve(total)
            assert at is not None
        return pinned, at

    def check(self) -> None:
        """Verify invariant 7. O(streams). Errors: InvariantError."""
        with self._lock:
            for pinned in self._pinned.values():
                pinned.ring.check()


class Inbox:
    """One array at a time on a device, in memory that is made once a stream and grows.

    Nothing is made for an array once one as large has come. Not for several threads at once.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by stream: as bytes, as int32

    def receive(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """A tensor on the device that begins with this array, which is not empty: [≥ n] int32.

        It is there for what the current stream runs next, up to the next call. The array may be changed at
        once. The device is current, and its stream is not captured. Cost: as `Staging.send`.
        """
        device = self._staging.device
        if device.type == "cpu":
            return torch.from_numpy(array.flatten())
        stream = current_stream(device.index)
        room = self._rooms.get(stream)
        if room is None or room[0].shape[0] < array.nbytes:
            # The stream may still read the old one: torch gives its memory out again in the stream's order.
            with torch.inference_mode(False):
                num_bytes = max(4096, aligned(2 * array.nbytes))
                raw = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                room = self._rooms[stream] = raw, raw.view(torch.int32)
        self._staging.fill(room[0][: array.nbytes], (array,))
        return room[1]


def staging_of(device: torch.device, given: Staging | None) -> Staging:
    """The staging that a pool was given, or one of its own. Errors: ConfigError for another device's."""
    if given is None:
        return Staging(device)
    if not isinstance(given, Staging) or given.device != device:
        raise ConfigError(f"staging: give a Staging of {device}")
    return given
