"""Which pages a radix tree owns. In: pages that a caller hands over; out: an error unless it can.

A page that stood in the tree twice would be evicted twice and handed out to two requests (invariant 13).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagoda.errors import AlreadyHeldError, IdError, InvariantError, NotHeldError
from pagoda.ids import FreeList

__all__ = ["TreePages"]


class TreePages:
    """The pages that a tree owns, each once: a set, as large as what is cached.

    `source`, where there is one, is the free-list that pages come from: what is not held there cannot
    become the tree's, and what the tree forgets is free there.
    """

    def __init__(self, page_size: int, source: FreeList | None) -> None:
        self._page_size, self._source = page_size, source
        self._owned: set[int] = set()

    def owns(self, page: int) -> bool:
        """Whether a page is the tree's. O(1)."""
        return page in self._owned

    def require_outside(
        self,
        pages: npt.NDArray[np.int32],
        positions: Sequence[int],
        error: type[AlreadyHeldError] | type[NotHeldError],
    ) -> None:
        """An error unless every page is held in the source, none is the tree's, and none stands twice.

        `positions` are theirs in `indices`, for errors. O(pages). Errors: `error` for the tree's own and,
        without a source, for one that stands twice; NotHeldError, DoubleFreeError and OutOfRangeError for
        those that the source does not hold.
        """
        if self._source is not None:
            try:
                self._source.require_held(pages)
            except IdError as wrong:
                reason = "is not handed out: it is free, stands twice, or there is no such page"
                raise self._named(type(wrong), wrong.position, pages, positions, reason) from None
        given = pages.tolist()
        seen = set(given)
        if len(seen) == len(given) and self._owned.isdisjoint(seen):
            return
        seen.clear()
        for at, page in enumerate(given):
            if page in self._owned or page in seen:
                raise self._named(error, at, pages, positions, "is in the tree, or stands twice")
            seen.add(page)

    def _named(
        self,
        error: type[IdError],
        at: int,
        pages: npt.NDArray[np.int32],
        positions: Sequence[int],
        reason: str,
    ) -> IdError:
        """An error about the slot that the caller gave."""
        page, position = int(pages[at]), positions[at]
        slot = page * self._page_size
        return error(f"indices[{position}] = {slot}: page {page} {reason}", slot, position)

    def add(self, pages: npt.NDArray[np.int32]) -> None:
        """Pages are the tree's now; `require_outside` has nothing against it. O(pages)."""
        self._owned.update(pages.tolist())

    def remove(self, pages: npt.NDArray[np.int32]) -> None:
        """Pages are no longer the tree's, but the caller's. O(pages)."""
        self._owned.difference_update(pages.tolist())

    def swap(self, owned: set[int]) -> set[int]:
        """The tree owns these instead; what it owned. O(1)."""
        before, self._owned = self._owned, owned
        return before

    def give_back(self, pages: set[int]) -> None:
        """Pages that the tree owned are free in the source; without one they are the caller's. O(pages)."""
        if self._source is not None:
            self._source.free(np.fromiter(pages, dtype=np.int32, count=len(pages)))

    def check(self, cached: npt.NDArray[np.int32]) -> None:
        """Verify invariant 13: the tree's pages are each there once, and held in the source. O(pages).

        `cached` is what a walk over the tree finds. Errors: InvariantError.
        """
        found = set(cached.tolist())
        if len(found) != cached.size:
            raise InvariantError(13, "a page stands twice in the tree")
        if found != self._owned:
            raise InvariantError(
                13, f"{cached.size} pages are in the tree, {len(self._owned)} are noted as its own, others"
            )
        if self._source is None:
            return
        self._source.check()
        try:
            self._source.require_held(cached)
        except IdError as wrong:
            raise InvariantError(13, f"page {wrong.id} is in the tree and not held") from None
        if self._source.num_quarantined:
            raise InvariantError(13, "a page is neither free, nor in the tree, nor handed out")
