"""Slots on their way to a device. In: how many there will be; out: a tensor of them.

All memory is allocated before a cache changes, so that a call which has changed it cannot fail to return.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagoda.kernels import on_device

__all__ = ["Answer"]


class Answer:
    """Memory for [num_slots] int32 slots: `room` on the host, to be filled once, and the tensor to `send`.

    Pinned memory comes from torch's own cache.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._result = self._place = torch.empty(num_slots, dtype=torch.int32, device=device)
        if device.type != "cpu":
            self._place = torch.empty(num_slots, dtype=torch.int32, device="cpu", pin_memory=True)
        self.room: npt.NDArray[np.int32] = self._place.numpy()

    def send(self) -> torch.Tensor:
        """Return the slots on the device, for later work of the current stream.

        Cost: one asynchronous copy; none on a CPU.
        """
        if self._place is not self._result:
            with on_device(self._device):
                self._result.copy_(self._place, non_blocking=True)
        return self._result
