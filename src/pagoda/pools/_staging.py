"""Copies of host arrays to a device, without waiting for it. In: numpy arrays; out: device tensors.

A copy to a GPU is asynchronous only from pinned memory, and reads that memory after the call has returned.
`Staging` has one pinned buffer per stream and overwrites a part of it only when an event shows that the
copies from it are done (invariant 7). When copies in flight fill a buffer, a larger one replaces it: the host
waits only for the system to pin the memory, never for the copies.
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
ALIGN = 16  # bytes; aligned for every dtype


# The handle of a device's current stream. torch.cuda.current_stream costs 7 µs of host time, this call, which
# Triton and torch's own compiler use, 0.1 µs.
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


class Event(Protocol):
    """A marker after work that was queued on a device; it has passed when that work is done."""

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
    # On the CPU whatever the default device is, and writable outside of inference_mode.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Lane:
    """The pinned buffer of one stream. Memory is handed out in order, segment by segment.

    ::

        | segment 0 | segment 1 | segment 2 | segment 3 |
          in flight   current      in flight   in flight
                      ▲ begin … next: no event follows these copies yet

    One event is recorded per segment, when it is left, after all copies from it. One per send would cost 8 µs
    of host time (measured on one machine). A segment is entered again when its event has passed.
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
        """Return the offset of num_bytes to write, and to copy before the next call; None if it is full."""
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
        """Whether all copies from a segment that was left are done."""
        return not self._was_left[segment] or self._events[segment].query()

    def _begin(self, segment: int) -> int:
        return segment * self.segment_bytes

    def check(self) -> None:
        """Verify invariant 7: the current segment is not in flight, and the next offset is in it."""
        if self._was_left[self._current]:
            raise InvariantError(7, f"segment {self._current} is written while its copies are in flight")
        if not self._begin(self._current) <= self._next <= self._begin(self._current + 1):
            raise InvariantError(7, f"byte {self._next} is not in segment {self._current}")


class Staging:
    """Copies host arrays to `device` through pinned buffers of `num_bytes`, one per stream, which grow.

    `send` returns fresh tensors; `post` reuses one tensor of the caller per stream. Thread-safe. On a CPU,
    arrays are simply copied.

    Errors: ConfigError for a device that does not exist or a size that is not positive.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 1 << 20) -> None:
        self.device = resolve_device(device)
        self.num_bytes = aligned(count(num_bytes, "num_bytes"))
        self._lanes: dict[int, Lane] = {}  # by stream
        self._lock = threading.RLock()
        self._is_sending = False

    def send(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Copy int32, int64 or uint8 arrays to fresh flat tensors on the device, in one copy.

        Later work of the current stream sees their contents. The arrays may be changed as soon as the call
        returns. Cost: a memcpy of the bytes and one asynchronous copy. Errors: ArgumentError for other
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
        """Return ids as a flat tensor on the device: [n] int32 or int64.

        Ids that are on the device already are used as they are, since a check would wait for the device;
        all others are checked and sent as int64. Errors: OutOfRangeError for an id outside [low, high];
        ArgumentError; CaptureError.
        """
        if is_unread(ids, self.device):
            return unread_ids(ids, name, any_shape=any_shape)
        host = host_ids(ids, name, any_shape=any_shape)
        require_range(host, low, high, name, "valid ids")
        return self.send(host)[0]

    def fill(
        self, received: torch.Tensor, arrays: Sequence[npt.NDArray[Any]], begins: Sequence[int] = (0,)
    ) -> None:
        """Copy arrays to bytes `begins` of the caller's tensor, in one copy. Nothing is checked.

        received: [n] uint8 on the device, n > 0; bytes between the arrays are overwritten, too. The device is
        current, its stream is not being captured, and the arrays are as in `send`.
        """
        total = received.shape[0]
        with self._lock:
            if self._is_sending:
                # A finalizer or signal handler interrupts another send of this thread. No event follows the
                # memory which that one has reserved, so the lane must not be touched.
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
            # A larger buffer replaces the lane. Copies may still read the old one: torch's pinned allocator
            # keeps its memory until they are done.
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
        """Copy an array, which is not empty, to the beginning of a reused tensor: [≥ n] int32 on the device.

        `rooms` belongs to the caller and is empty at first. It gets one tensor per stream, as bytes and as
        int32, so that nothing is allocated once an array of the same size was posted. Later work of the
        current stream sees the array until the next `post` with these rooms on that stream; on the host it
        may be changed as soon as the call returns. The device is current, its stream is not being captured,
        and one thread calls at a time.
        """
        if self.device.type == "cpu":
            return torch.from_numpy(array.copy())
        stream = current_stream(self.device.index)
        room = rooms.get(stream)
        if room is None or room[0].shape[0] < array.nbytes:
            # The stream may still read the old tensor: torch reuses its memory in stream order.
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
    """Return the given staging, or a new one. Errors: ConfigError for the staging of another device."""
    if given is None:
        return Staging(device)
    if not isinstance(given, Staging) or given.device != device:
        raise ConfigError(f"staging: give a Staging of {device}")
    return given
