"""Which request owns which block of a group of layers: `BlockTable`, and its public face, `GroupBlocks`."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat.blocks import BlockAllocator
from pagoda.errors import CapacityError, ConfigError, InvariantError, NotHeldError
from pagoda.ids import FreeList
from pagoda.pools import DeviceTable, Staging
from pagoda.pools._arguments import AnyIds, host_ids

__all__ = ["BlockTable", "GroupBlocks"]


class GroupBlocks(BlockAllocator):
    """The blocks of one group of layers, 1 … num_total_blocks, for requests and for callers.

    A request's blocks come from `KVCacheManager.allocate_block` and are freed by `release_request`; only
    blocks that were acquired here can be released here.
    """

    def __init__(self, free: FreeList, staging: Staging, lock: threading.RLock) -> None:
        self._become(free, staging, staging.device)
        self._lock = lock
        self._acquired: set[int] = set()

    @property
    def acquired(self) -> frozenset[int]:
        """The blocks that callers have acquired."""
        return frozenset(self._acquired)

    def acquire_host(self, n: int) -> npt.NDArray[np.int32]:
        """As `acquire`, but [n] int32 on the host: no device is touched."""
        with self._lock:
            blocks = super().acquire_host(n)
            self._acquired.update(blocks.tolist())
            return blocks

    def release(self, ids: AnyIds) -> None:
        """Free acquired blocks. Errors: as `BlockAllocator.release`; NotHeldError for a request's block."""
        blocks = host_ids(ids, "ids")
        with self._lock:
            for at, block in enumerate(blocks.tolist()):
                if block not in self._acquired and 1 <= block <= self.num_total_blocks:
                    raise NotHeldError(
                        f"ids[{at}] = {block} was not acquired: it is free or belongs to a request", block, at
                    )
            self._blocks.free(blocks)
            self._acquired.difference_update(blocks.tolist())


class BlockTable:
    """Blocks of one group of layers: the free ones, those of each row, and a copy of these on the device.

    `free` hands out blocks 1 … num_blocks. `table` is [num_rows + 1, max_blocks] int32, −1 for no block;
    `lens` is [num_rows + 1] int32, the number of blocks of each row. Both belong to one `DeviceTable`, so
    that an allocation takes one launch. The host's table is authoritative: a row there is ahead of the device
    only if a call was interrupted, and the next call repairs that. Not thread-safe.

    Errors: ConfigError for tables of more than 2^31 places.
    """

    def __init__(self, name: str, num_blocks: int, num_rows: int, max_blocks: int, staging: Staging) -> None:
        self.name, self.num_rows, self.max_blocks = name, num_rows, max_blocks
        try:
            self._device = DeviceTable(num_rows, max_blocks, staging.device, staging, empty=-1, has_lens=True)
        except ConfigError:
            raise ConfigError(
                f"max_concurrent_requests and max_context_tokens: the {name} table of {num_rows} rows of "
                f"{max_blocks} blocks exceeds 2^31 places: give fewer requests or a shorter context"
            ) from None
        self.free = FreeList(num_blocks, what=f"{name} blocks")
        self._blocks: list[list[int]] = [[] for _ in range(num_rows + 1)]  # of each row
        self._shown = np.zeros(num_rows + 1, dtype=np.int32)  # blocks of each row that the device has
        self._fence = 0  # of the latest release
        self._leaving: set[int] = set()  # rows whose release has begun

    @property
    def table(self) -> torch.Tensor:
        """The blocks of every row, [num_rows + 1, max_blocks] int32."""
        return self._device.tensor

    @property
    def lens(self) -> torch.Tensor:
        """How many blocks each row has, [num_rows + 1] int32."""
        assert self._device.lens is not None
        return self._device.lens

    def num_blocks(self, row: int) -> int:
        """Return the number of blocks of a row."""
        return len(self._blocks[row])

    def most_blocks(self) -> int:
        """Return the largest number of blocks of any row."""
        return int(self._shown.max())

    def take(self, row: int, n: int) -> int:
        """Return block n of a row, counted from 0; if the row has exactly n blocks, allocate one.

        An allocation costs one launch. Errors: CapacityError if the row's table is full or no block is free.
        Nothing is taken then, nor if the call is interrupted or the device runs out of memory.
        """
        is_new = n == len(self._blocks[row])
        if is_new:
            if n == self.max_blocks:
                raise CapacityError(f"places in the {self.name} table of row {row}", 1, 0, n)
            self._blocks[row].append(int(self.free.alloc(1)[0]))
        try:
            blocks = self._blocks[row]
            if self._shown[row] < len(blocks):
                self._show(row, blocks)
            return blocks[n]
        except BaseException:
            if is_new:
                self._take_back(row, n)
            raise

    def _show(self, row: int, blocks: list[int]) -> None:
        """Copy a row's new blocks and their number to the device: one launch per block, usually one."""
        for n in range(int(self._shown[row]), len(blocks)):
            self._device.set(row, n, blocks[n], n + 1)
            self._shown[row] = n + 1

    def _take_back(self, row: int, n: int) -> None:
        """Undo the growth of a row to n + 1 blocks. On the host this cannot fail."""
        blocks = self._blocks[row]
        if len(blocks) != n + 1:  # a finalizer has taken more: the row keeps its blocks
            return
        self.free.free([blocks.pop()])
        self._shown[row] = min(int(self._shown[row]), n)
        with suppress(Exception):  # if this launch fails, the first one failed, too
            self._device.set(row, n, -1, n)

    def rows(self) -> list[tuple[torch.Tensor, float]]:
        """Return the tensors on the device, each with its value for a row without blocks."""
        return [(self.table, -1), (self.lens, 0)]

    def forget(self, row: int) -> None:
        """Record that the caller resets a row on the device (the tensors of `rows`).

        The host's row stays, and the next `take` copies it to the device again; `release` comes after.
        """
        self._shown[row] = 0

    def release(self, row: int) -> None:
        """Free all blocks of a row after `forget`."""
        # Blocks are quarantined while they are still in the table, and freed when no row is half released:
        # wherever an interrupt comes, no block has two owners, and the row's next release does the rest.
        blocks = list(self._blocks[row])
        if row in self._leaving:
            blocks = [block for block in blocks if self.free.is_held(block)]
        self._leaving.add(row)
        if blocks:
            self._fence += 1
            self.free.free(blocks, fence=self._fence)
        self._blocks[row] = []
        self._leaving.discard(row)
        if not self._leaving:
            self.free.pass_fence(self._fence)

    def memory_bytes(self) -> int:
        """Bytes on the device."""
        return self._device.memory_bytes()

    def check(self, running: list[int], acquired: frozenset[int]) -> None:
        """Verify invariants 1 to 6 and 18, given the running rows and the blocks that callers have acquired.

        Walks over every place. Errors: InvariantError.
        """
        self.free.check()
        self._device.check()
        held = [*acquired, *(block for row in running for block in self._blocks[row])]
        if len(set(held)) != len(held):
            raise InvariantError(18, f"a {self.name} block is duplicated in tables")
        is_free = [self.free.is_free(block) for block in held]
        num_held = sum(self.free.is_held(block) for block in held)
        if any(is_free) or num_held != self.free.num_held:
            raise InvariantError(
                18,
                f"{self.free.num_held} {self.name} blocks are held, {num_held} of them are in tables, and "
                f"{sum(is_free)} blocks in tables are free",
            )
        idle = set(range(1, self.num_rows + 1)) - set(running)
        if any(self._blocks[row] or self._shown[row] for row in idle):
            raise InvariantError(18, f"a row that is not running has {self.name} blocks")
        if any(self._shown[row] > len(self._blocks[row]) for row in running):
            raise InvariantError(18, f"the device has {self.name} blocks that a row does not have")
