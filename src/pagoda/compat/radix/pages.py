"""Which pages a radix tree owns. In: pages that a caller hands over; out: an error if it may not.

A page that was in the tree twice would be evicted twice and handed out to two requests (invariant 13).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagoda.errors import AlreadyHeldError, IdError, InvariantError, NotHeldError
from pagoda.ids import FreeList

__all__ = ["TreePages"]


class TreePages:
    """The set of pages that a tree owns.

    `source`, if there is one, is the free-list that pages come from: the tree can own only pages that are
    held there, and frees there the pages that it forgets.
    """

    def __init__(self, page_size: int, source: FreeList | None) -> None:
        self._page_size, self._source = page_size, source
        self._owned: set[int] = set()

    def owns(self, page: int) -> bool:
        """Whether the tree owns a page."""
        return page in self._owned

    def require_outside(
        self,
        pages: npt.NDArray[np.int32],
        positions: Sequence[int],
        error: type[AlreadyHeldError] | type[NotHeldError],
    ) -> None:
        """Raise an error unless every page is held in the source, outside the tree, and given once.

        `positions` are those of the pages in `indices`, for messages. Errors: `error` for pages of the tree
        and, without a source, for duplicates; NotHeldError, DoubleFreeError and OutOfRangeError for pages
        that the source does not hold.
        """
        if self._source is not None:
            try:
                self._source.require_held(pages)
            except IdError as wrong:
                reason = "is not handed out: it is free, duplicated or out of range"
                raise self._named(type(wrong), wrong.position, pages, positions, reason) from None
        given = pages.tolist()
        seen = set(given)
        if len(seen) == len(given) and self._owned.isdisjoint(seen):
            return
        seen.clear()
        for at, page in enumerate(given):
            if page in self._owned or page in seen:
                raise self._named(error, at, pages, positions, "is in the tree or duplicated")
            seen.add(page)

    def _named(
        self,
        error: type[IdError],
        at: int,
        pages: npt.NDArray[np.int32],
        positions: Sequence[int],
        reason: str,
    ) -> IdError:
        """Return an error about the slot that the caller gave."""
        page, position = int(pages[at]), positions[at]
        slot = page * self._page_size
        return error(f"indices[{position}] = {slot}: page {page} {reason}", slot, position)

    def add(self, pages: npt.NDArray[np.int32]) -> None:
        """Make the tree the owner of pages that `require_outside` has accepted."""
        self._owned.update(pages.tolist())

    def remove(self, pages: npt.NDArray[np.int32]) -> None:
        """Make the caller the owner of the tree's pages."""
        self._owned.difference_update(pages.tolist())

    def swap(self, owned: set[int]) -> set[int]:
        """Replace the set of owned pages and return the previous one."""
        before, self._owned = self._owned, owned
        return before

    def give_back(self, pages: set[int]) -> None:
        """Free pages that the tree owned in the source; without one, the caller owns them."""
        if self._source is not None:
            self._source.free(np.fromiter(pages, dtype=np.int32, count=len(pages)))

    def check(self, cached: npt.NDArray[np.int32]) -> None:
        """Verify invariant 13: each page of the tree is there once, and held in the source.

        `cached` has the pages that a walk over the tree finds. Errors: InvariantError.
        """
        found = set(cached.tolist())
        if len(found) != cached.size:
            raise InvariantError(13, "a page is in the tree twice")
        if found != self._owned:
            raise InvariantError(
                13, f"the {cached.size} pages in the tree are not the {len(self._owned)} that it owns"
            )
        if self._source is None:
            return
        self._source.check()
        try:
            self._source.require_held(cached)
        except IdError as wrong:
            raise InvariantError(13, f"page {wrong.id} is in the tree but not held") from None
        if self._source.num_quarantined:
            raise InvariantError(13, "a page is neither free, nor in the tree, nor handed out")
