"""Who has which block of a group of layers: `BlockTable`."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from pagoda import kernels
from pagoda.errors import CapacityError, ConfigError, InvariantError
from pagoda.ids import FreeList
from pagoda.pools._arguments import filled
from pagoda.tables import PageTable

__all__ = ["BlockTable"]


class BlockTable:
    """Blocks of one group of layers: which are free, which each row has, and a copy of that on the device.

    `free` hands out blocks 1 … num_blocks. `table` is [num_rows + 1, max_blocks] int32, −1 where nothing is,
    `lens` [num_rows + 1] int32, blocks of each row; both are views of one tensor, so that an allocation is
    one launch, and never move. The host's table is the truth: a row there is ahead of its copy
    only when a call was interrupted, and the next one makes that good. Not for several threads at once.

    Errors: ConfigError for sizes whose places pass 2^31.
    """

    def __init__(
        self, name: str, num_blocks: int, num_rows: int, max_blocks: int, device: torch.device
    ) -> None:
        self.name, self.num_rows, self.max_blocks = name, num_rows, max_blocks
        num_entries = (num_rows + 1) * max_blocks
        if num_entries + num_rows + 1 >= 2**31:
            raise ConfigError(
                f"the {name} table of {num_rows} rows of {max_blocks} blocks passes 2^31 entries: give fewer "
                "requests or a shorter context"
            )
        self.free = FreeList(num_blocks, what=f"{name} blocks")
        self._host = PageTable(num_rows, max_blocks, 1)  # a block counts as one: lengths are not ours
        # [table entries, then lengths]: int32
        self._flat = filled((num_entries + num_rows + 1,), torch.int32, device)
        with torch.inference_mode(False):  # also where it is made under it, it is written outside
            self.table = self._flat[:num_entries].view(num_rows + 1, max_blocks)
            self.lens = self._flat[num_entries:]
            self.table.fill_(-1)
        self._lens_begin = num_entries
        self._shown = np.zeros(num_rows + 1, dtype=np.int32)  # blocks of each row that the device knows of
        self._fence = 0  # of the latest release
        self._leaving: set[int] = set()  # rows whose release has begun
        self._address = self._addresses()

    def num_blocks(self, row: int) -> int:
        """Blocks of a row. O(1)."""
        return self._host.num_pages(row)

    def most_blocks(self) -> int:
        """Blocks of the row that has most. O(rows)."""
        return int(self._shown.max())

    def take(self, row: int, n: int) -> int:
        """Block n of a row, counted from 0; the next one is allocated if the row has just n.

        Cost: O(blocks of the row), and to allocate one launch. Errors: CapacityError
        when the row's table is full or the blocks are out; nothing is taken then, nor when an interrupt or
        a device out of memory comes in between.
        """
        is_new = n == self._host.num_pages(row)
        if is_new:
            if n == self.max_blocks:
                raise CapacityError(f"places in the {self.name} table of row {row}", 1, 0, n)
            self._host.grow(self.free, [row], [n + 1])
        try:
            blocks = self._host.pages(row)
            if self._shown[row] < blocks.size:
                self._show(row, blocks)
            return int(blocks[n])
        except BaseException:
            if is_new:
                self._take_back(row, n)
            raise

    def _show(self, row: int, blocks: npt.NDArray[np.int32]) -> None:
        """Tell the device about the last blocks of a row and their number: a launch for each, usually one."""
        for n in range(int(self._shown[row]), blocks.size):
            self._write(row, n, int(blocks[n]), n + 1)
            self._shown[row] = n + 1

    def _write(self, row: int, n: int, block: int, num_blocks: int) -> None:
        """Set place n of a row's table, and its length, in one launch."""
        kernels.set_table(self._flat, row * self.max_blocks + n, block, self._lens_begin + row, num_blocks)

    def _take_back(self, row: int, n: int) -> None:
        """Undo the growth of a row to n + 1 blocks, on the host for certain."""
        blocks = self._host.pages(row)
        if blocks.size != n + 1:  # a finalizer has taken more: what is there stays the row's
            return
        self._host.release(row)
        self._host.append(row, blocks[:n], n)
        self.free.free(blocks[n:])
        self._shown[row] = min(int(self._shown[row]), n)
        with suppress(Exception):  # where this launch fails, the first one had failed too
            self._write(row, n, -1, n)

    def rows(self) -> list[tuple[torch.Tensor, float]]:
        """What the device knows of rows, and what of a row without blocks. O(1)."""
        return [(self.table, -1), (self.lens, 0)]

    def forget(self, row: int) -> None:
        """Take the device not to know about a row, whose part of `rows` the caller resets. O(1).

        The host's row stays, and is shown again by the next `take`; `release` comes after.
        """
        self._shown[row] = 0

    def release(self, row: int) -> None:
        """Give back all blocks of a row, which was forgotten. Cost: O(blocks of the row)."""
        # Quarantined while they still stand in the table, and let go when no row is halfway out: wherever an
        # interrupt comes, no block has two owners, and the row's next release does what is left to do.
        blocks = self._host.pages(row)
        if row in self._leaving:
            blocks = blocks[[self.free.is_held(block) for block in blocks.tolist()]]
        self._leaving.add(row)
        if blocks.size:
            self._fence += 1
            self.free.free(blocks, fence=self._fence)
        self._host.release(row)
        self._leaving.discard(row)
        if not self._leaving:
            self.free.pass_fence(self._fence)

    def memory_bytes(self) -> int:
        """Bytes on the device. O(1)."""
        return self._flat.numel() * self._flat.element_size()

    def check(self, running: list[int]) -> None:
        """Verify invariants 1 to 6 and 18 while these rows run. Cost: every entry. Errors: InvariantError."""
        self.free.check()
        self._host.check()
        if self._addresses() != self._address:
            raise InvariantError(6, f"the {self.name} table has moved")
        held = np.concatenate([np.zeros(0, np.int32), *(self._host.pages(row) for row in running)])
        if np.unique(held).size != held.size:
            raise InvariantError(18, f"a {self.name} block stands twice in tables")
        is_free = [self.free.is_free(int(block)) for block in held]
        num_held = sum(self.free.is_held(int(block)) for block in held)
        if any(is_free) or num_held != self.free.num_held:
            raise InvariantError(
                18,
                f"{self.free.num_held} {self.name} blocks are held, {num_held} of them stand in tables, and "
                f"{sum(is_free)} that are free",
            )
        idle = set(range(1, self.num_rows + 1)) - set(running)
        if any(self._host.num_pages(row) or self._shown[row] for row in idle):
            raise InvariantError(18, f"a row that does not run has {self.name} blocks")
        if any(self._shown[row] > self._host.num_pages(row) for row in running):
            raise InvariantError(18, f"the device was told of {self.name} blocks that a row does not have")

    def _addresses(self) -> tuple[int, ...]:
        return self._flat.data_ptr(), self.table.data_ptr(), self.lens.data_ptr()
