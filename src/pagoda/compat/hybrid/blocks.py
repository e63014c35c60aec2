"""The blocks of one group of layers, as an allocator of the public design: `GroupBlocks`."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from pagoda.compat._words import in_words
from pagoda.compat.blocks import BlockAllocator
from pagoda.errors import CapacityError, UsageError
from pagoda.manager import Manager
from pagoda.pools import Staging
from pagoda.pools._arguments import AnyIds, host_ids, number

__all__ = ["GroupBlocks"]


class GroupBlocks(BlockAllocator):
    """The blocks of one group of layers, 1 … num_total_blocks: the pages of a manager's group.

    A request's blocks come from `KVCacheManager.allocate_block` and are freed by `release_request`; only
    blocks that were acquired here can be released here.
    """

    def __init__(self, manager: Manager, group: str, staging: Staging, lock: threading.RLock) -> None:
        self._manager, self._group, self._lock, self._staging = manager, group, lock, staging
        self.device = staging.device
        self.num_total_blocks = self._count("total")

    def _count(self, what: str) -> int:
        (found,) = (group for group in self._manager.stats().groups if group.name == self._group)
        return int(getattr(found, what))

    @property
    def num_free(self) -> int:
        """Blocks that can be acquired now."""
        return self._count("free")

    def acquire_host(self, n: int) -> npt.NDArray[np.int32]:
        """As `acquire`, but [n] int32 on the host: no device is touched."""
        wanted = number(n, "n")
        with self._lock:
            if wanted > self.num_free:
                raise CapacityError("blocks", wanted, self.num_free, self.num_total_blocks)
            return self._manager.alloc_pages(self._group, wanted)

    def release(self, ids: AnyIds) -> None:
        """Free acquired blocks. Errors: as `BlockAllocator.release`; NotHeldError for a request's block."""
        blocks = host_ids(ids, "ids")
        try:
            self._manager.free_pages(self._group, blocks)
        except UsageError as error:
            in_words(error, page_ids="ids")
            raise

    def check(self) -> None:
        """Verify the invariants of all groups. Walks over everything. Errors: InvariantError."""
        self._manager.check()
        self._staging.check()
