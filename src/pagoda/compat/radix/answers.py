"""Slots on their way to a device. In: how many there will be; out: a tensor of them.

All memory is there before anything is decided: what changes a cache to make an answer cannot fail
to give it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagoda.kernels import on_device

__all__ = ["Answer"]


class Answer:
    """Room for [num_slots] int32 slots: `room` on the host, to be filled once, and the tensor to `send`.

    Cost: its memory; pinned memory comes from torch's own cache.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._result = self._place = torch.empty(num_slots, dtype=torch.int32, device=device)
        if device.type != "cpu":
            self._place = torch.empty(num_slots, dtype=torch.int32, device="cpu", pin_memory=True)
        self.room: npt.NDArray[np.int32] = self._place.numpy()

    def send(self) -> torch.Tensor:
        """The slots on the device, for whatever the current stream runs next.

        Cost: one copy that nobody waits for, on a CPU none.
        """
        if self._place is not self._result:
            with on_device(self._device):
                self._result.copy_(self._place, non_blocking=True)
        return self._result
