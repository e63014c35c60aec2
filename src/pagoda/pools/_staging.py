"""Host arrays to the device, without waiting for it.

A copy to a GPU is asynchronous only from pinned memory, and reads that memory later than the call
that asked for it. `Staging` has one pinned buffer per stream and writes to a place of it again only when the
event behind the copies out of it has come (invariant 7). When copies in flight fill a buffer, a larger one
takes over: the host does not wait for them, only for the system to pin the memory.
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

__all__ = ["Staging", "current_stream", "staging_of"]

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


class Lane:
    """The pinned buffer of one stream. Places are handed out in order, segment after segment.

    ::

        | segment 0 | segment 1 | segment 2 | segment 3 |
          in flight   current      in flight   in flight
                      ▲ begin … next: its copies are not yet behind an event

    An event is recorded when a segment is left, behind all copies out of it, so that a send needs none: 8 µs
    of host time on one machine. A segment is entered again when its event has come.
    """

    NUM_SEGMENTS = 4

    def __init__(self, memory: torch.Tensor, new_event: Callable[[], Event]) -> None:
        self.memory = memory  # [bytes] uint8
        self.array: npt.NDArray[np.uint8] = memory.numpy()  # the same memory
        self.segment_bytes = self.array.size // self.NUM_SEGMENTS // ALIGN * ALIGN
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
        """Verify invariant 7: the current segment is not in flight, and the next place lies in it."""
        if self._was_left[self._current]:
            raise InvariantError(7, f"segment {self._current} is written while its copies are in flight")
        if not self._begin(self._current) <= self._next <= self._begin(self._current + 1):
            raise InvariantError(7, f"byte {self._next} is not in segment {self._current}")


class Staging:
    """Carries host arrays to `device` through pinned buffers of `num_bytes`, one per stream, which grow.

    `send` gives fresh tensors; `post` writes to one tensor of the caller per stream again and again. Several
    threads may call it. On a CPU there is nothing to carry, and arrays are copied.

    Errors: ConfigError for a device that does not exist or a size that is not positive.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 1 << 20) -> None:
        self.device = resolve_device(device)
        self.num_bytes = aligned(count(num_bytes, "num_bytes"))
        self._lanes: dict[int, Lane] = {}  # by stream
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

    def send_ids(
        self, ids: AnyIds, name: str, low: int, high: int, *, any_shape: bool = False
    ) -> torch.Tensor:
        """Ids from anywhere as a flat tensor on the device: [n] int32 or int64.

        Those that lie on the device already are used as they are, since looking at them would wait for
        it; all others are checked and sent as int64. Cost: as `send`. Errors: OutOfRangeError for one
        outside [low, high]; ArgumentError; CaptureError.
        """
        if is_unread(ids, self.device):
            return unread_ids(ids, name, any_shape=any_shape)
        host = host_ids(ids, name, any_shape=any_shape)
        require_range(host, low, high, name, "valid ids")
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
                # that one reserved is not behind an event yet, so the lane is left alone.
                place = _pinned_bytes(total)
                self._copy(received, place, place.numpy(), arrays, begins)
                return
            self._is_sending = True
            try:
                lane, at = self._reserve(total)
                end = at + total
                self._copy(received, lane.memory[at:end], lane.array[at:end], arrays, begins)
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

    def _reserve(self, total: int) -> tuple[Lane, int]:
        stream = current_stream(self.device.index)
        lane = self._lanes.get(stream)
        at = None if lane is None else lane.reserve(total)
        if lane is None or at is None:
            # A larger buffer takes over. Copies may still read the old one: torch's pinned
            # allocator keeps its memory until those that were asked of it are done.
            grown = self.num_bytes if lane is None else 2 * lane.array.size
            on = torch.cuda.current_stream()
            memory = _pinned_bytes(max(grown, 2 * Lane.NUM_SEGMENTS * aligned(total)))
            lane = self._lanes[stream] = Lane(memory, lambda: _StreamEvent(on))
            at = lane.reserve(total)
            assert at is not None
        return lane, at

    def post(
        self, array: npt.NDArray[np.int32], rooms: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """A tensor on the device that begins with this array, which is not empty: [≥ n] int32.

        `rooms` are the caller's, empty at first: for each stream a tensor, as bytes and as int32, which takes
        one array after the other, so that nothing is allocated once an array as large was posted. The array
        is there for what the current stream runs next, until the next `post` to these rooms on that stream,
        and may be changed on the host at once. The device is current, its stream is not being captured, and
        one thread calls at a time.
        """
        if self.device.type == "cpu":
            return torch.from_numpy(array.copy())
        stream = current_stream(self.device.index)
        room = rooms.get(stream)
        if room is None or room[0].shape[0] < array.nbytes:
            # The stream may still read the old one: torch gives its memory out again in the stream's order.
            with torch.inference_mode(False):
                num_bytes = max(4096, aligned(2 * array.nbytes))
                raw = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
                room = rooms[stream] = raw, raw.view(torch.int32)
        self.fill(room[0][: array.nbytes], (array,))
        return room[1]

    def check(self) -> None:
        """Verify invariant 7. Errors: InvariantError."""
        with self._lock:
            for lane in self._lanes.values():
                lane.check()


def staging_of(device: torch.device, given: Staging | None) -> Staging:
    """The staging that a pool was given, or one of its own. Errors: ConfigError for another device's."""
    if given is None:
        return Staging(device)
    if not isinstance(given, Staging) or given.device != device:
        raise ConfigError(f"staging: give a Staging of {device}")
    return given
