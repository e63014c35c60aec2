"""`BlockAllocator`: fixed-size blocks of a paged pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import CapacityError
from pagoda.ids import FreeList
from pagoda.layout._numbers import count
from pagoda.pools import Staging
from pagoda.pools._arguments import AnyIds, host_ids, number, refuse_capture

__all__ = ["BlockAllocator"]


class BlockAllocator:
    """Hands out blocks 1 … num_total_blocks, lowest first; block 0 is the null block.

    Call it between captures. Several threads may call it.

    Errors: ConfigError for a negative size or a device that is not there.
    """

    def __init__(self, num_total_blocks: int, device: torch.device | str = "cuda") -> None:
        self.num_total_blocks = count(num_total_blocks, "num_total_blocks", low=0)
        self._staging = Staging(device)
        self.device = device
        self._blocks = FreeList(self.num_total_blocks, what="blocks")

    @property
    def num_free(self) -> int:
        """Blocks that can be acquired now. O(1)."""
        return self._blocks.num_free

    def acquire(self, n: int) -> torch.Tensor:
        """n block numbers, [n] int32 on `device`; the caller holds them.

        Cost O(n) on the host and one copy that nobody waits for. Errors: CapacityError with what was
        asked, what is free and the total; ArgumentError; CaptureError.
        """
        refuse_capture(self._staging.device, "acquire")
        blocks = self.acquire_host(n)
        try:
            return self._staging.send(blocks)[0]
        except BaseException:  # no memory on the device, Ctrl-C
            self._blocks.free(blocks)
            raise

    def acquire_host(self, n: int) -> npt.NDArray[np.int32]:
        """As `acquire`, but [n] int32 on the host: no device is touched."""
        wanted = number(n, "n")
        if wanted > self._blocks.num_ids:  # however large: more than any integer of the free-list too
            raise CapacityError("blocks", wanted, self._blocks.num_free, self._blocks.num_ids)
        return self._blocks.alloc(wanted)

    def release(self, ids: AnyIds) -> None:
        """Give blocks back. Cost O(n); a device tensor costs one synchronisation.

        Errors: DoubleFreeError, NotHeldError, OutOfRangeError, ArgumentError; nothing is freed then.
        """
        self._blocks.free(host_ids(ids, "ids"))

    def check(self) -> None:
        """Verify invariants 1 to 4 and 7. Cost: a walk over all of it. Errors: InvariantError."""
        self._blocks.check()
        self._staging.check()
