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

    Call it outside of captures. Thread-safe.

    Errors: ConfigError for a negative size or an unknown device.
    """

    def __init__(self, num_total_blocks: int, device: torch.device | str = "cuda") -> None:
        total = count(num_total_blocks, "num_total_blocks", low=0)
        self.num_total_blocks, self.device = total, device
        self._blocks, self._staging = FreeList(total, what="blocks"), Staging(device)

    @property
    def num_free(self) -> int:
        """Blocks that can be acquired now."""
        return self._blocks.num_free

    def acquire(self, n: int) -> torch.Tensor:
        """Return n block numbers, [n] int32 on `device`; the caller holds them.

        Cost: O(n) on the host and one asynchronous copy. Errors: CapacityError with the requested, free and
        total numbers; ArgumentError; CaptureError.
        """
        refuse_capture(self._staging.device, "acquire")
        blocks = self.acquire_host(n)
        try:
            return self._staging.send(blocks)[0]
        except BaseException:  # out of device memory, or Ctrl-C
            self.release(blocks)
            raise

    def acquire_host(self, n: int) -> npt.NDArray[np.int32]:
        """As `acquire`, but [n] int32 on the host: no device is touched."""
        wanted = number(n, "n")
        if wanted > self._blocks.num_ids:  # may exceed the integers of the free-list
            raise CapacityError("blocks", wanted, self._blocks.num_free, self._blocks.num_ids)
        return self._blocks.alloc(wanted)

    def release(self, ids: AnyIds) -> None:
        """Free blocks. A device tensor costs one synchronisation.

        Errors: DoubleFreeError, NotHeldError, OutOfRangeError, ArgumentError; nothing is freed then.
        """
        self._blocks.free(host_ids(ids, "ids"))

    def check(self) -> None:
        """Verify invariants 1 to 4 and 7. Walks over everything. Errors: InvariantError."""
        self._blocks.check()
        self._staging.check()
