"""Which pages the tokens of each row lie in. In: row, position; out: page id.

The host's table is the truth. It is append-only per row: a row grows at its end until it is
released, so a step that runs on the device never sees an entry change under it. What a call
wrote comes back as `TableWrites`, which the pools apply to their copy on the device. Invariant 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda import _native
from pagoda.ids import FreeList

__all__ = ["Growth", "PageTable", "TableWrites"]


class TableWrites(NamedTuple):
    """Entries that a call wrote: what the copy on a device has to follow."""

    entries: npt.NDArray[np.int64]  # [n] row * max_pages_per_row + column
    page_ids: npt.NDArray[np.int32]  # [n]


class Growth(NamedTuple):
    """What growing rows gave."""

    slots: npt.NDArray[np.int32]  # [new tokens] where each lies, row after row
    writes: TableWrites


class PageTable:
    """The pages of every row of one group: ``num_rows`` rows of at most ``max_pages_per_row``.

    Rows are 1 … num_rows, handed out by a free-list that the caller owns; row 0 is padding and
    stays empty. The table owns no page: it says which pages a row uses, whoever holds them.
    Memory is 4 bytes an entry, committed when it is first written.

    Errors: ConfigError for sizes that are not positive or pass 2**31; MemoryError.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int, page_tokens: int) -> None:
        self._native = _native.PageTable(num_rows, max_pages_per_row, page_tokens)
        self.num_rows = self._native.num_rows
        self.max_pages_per_row = self._native.max_pages_per_row
        self.page_tokens = self._native.page_tokens

    def __repr__(self) -> str:
        return f"PageTable({self.num_rows} rows of {self.max_pages_per_row} pages of {self.page_tokens})"

    def num_tokens(self, row: int) -> int:
        """Tokens of a row. O(1). Errors: OutOfRangeError."""
        return self._native.num_tokens(row)

    def num_pages(self, row: int) -> int:
        """Pages of a row. O(1). Errors: OutOfRangeError."""
        return self._native.num_pages(row)

    def pages(self, row: int) -> npt.NDArray[np.int32]:
        """The page ids of a row, a copy: [num_pages] int32. Cost: its length. Errors: OutOfRangeError."""
        return self._native.pages(row)

    def grow(self, free_list: FreeList, rows: _native.IdsLike, new_lens: _native.IdsLike) -> Growth:
        """Grow each row to its new length, the rest of its last page first, then pages of `free_list`.

        One call a step. The caller holds the new pages until it frees what `release` returns. A page
        that ends half-used must be its row's alone: two rows of one call that share one are refused,
        rows of different calls are not.
        Cost O(rows + new tokens). All or nothing. Errors: CapacityError when pages or the row's
        columns run out; ArgumentError for rows that stand twice or would shrink, or a half-used
        page that two rows share; OutOfRangeError; NotHeldError for a last page nobody holds.
        """
        slots, entries, page_ids = self._native.grow(free_list, rows, new_lens)
        return Growth(slots, TableWrites(entries, page_ids))

    def append(self, row: int, page_ids: _native.IdsLike, num_tokens: int) -> TableWrites:
        """Add pages that hold tokens already (a cached prefix) to a row that ends at a page boundary.

        Owners of the pages stay who they are; if num_tokens end inside the last page, later growth
        writes to the rest of it, so that page must be this row's alone. Cost O(pages). Errors:
        CapacityError when the row's columns run out; ArgumentError when the row ends inside a page or
        num_tokens do not fill the pages; OutOfRangeError.
        """
        return TableWrites(*self._native.append(row, page_ids, num_tokens))

    def release(self, row: int) -> npt.NDArray[np.int32]:
        """Empty a row and return its page ids, [num_pages] int32: the caller frees those it holds.

        Cost: its length. Errors: OutOfRangeError.
        """
        return self._native.release(row)

    def check(self) -> None:
        """Verify invariant 5. Cost: every entry. Errors: InvariantError."""
        self._native.check()
