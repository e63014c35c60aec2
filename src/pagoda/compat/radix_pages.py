"""Which pages a radix tree owns. In: pages that a caller hands over; out: an error unless it can.

A page that stood in the tree twice would be evicted twice and handed out to two requests (invariant 13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pagoda.errors import AlreadyHeldError, IdError, InvariantError, NotHeldError
from pagoda.ids import FreeList

__all__ = ["TreePages"]

CHECKING = 1  # the fence under which pages stand while it is asked whether all are held


class TreePages:
    """The pages that a tree owns, each once. `cached` walks the tree and gives them.

    `source`, where there is one, is the free-list that pages come from: what is not held there cannot
    become the tree's. Nobody else may use fences of it.
    """

    def __init__(self, page_size: int, cached: Callable[[], npt.NDArray[np.int32]]) -> None:
        self.source: FreeList | None = None
        self._page_size, self._cached = page_size, cached
        self._owned = FreeList(0, first_id=0, what="pages")  # held: the tree's

    def take(self, pages: npt.NDArray[np.int32], positions: Sequence[int]) -> None:
        """Pages become the tree's: all of them or none. `positions` are theirs in `indices`, for errors.

        O(pages), and O(tokens) when there is a page twice as high as any before. Errors:
        AlreadyHeldError for the tree's own and for one that stands twice; NotHeldError,
        DoubleFreeError and OutOfRangeError for those that the source does not hold.
        """
        try:
            if self.source is not None:
                self.source.free(pages, CHECKING)
                self.source.recall(CHECKING)
            self._make_room(int(pages.max(initial=-1)))
            self._owned.take(pages)
        except IdError as wrong:
            raise self._named(wrong, positions) from None

    def require_outside(self, pages: npt.NDArray[np.int32], positions: Sequence[int]) -> None:
        """An error unless every page is held in the source, none is the tree's, and none stands twice.

        Cost and arguments: those of `take`. Errors: NotHeldError, DoubleFreeError, OutOfRangeError.
        """
        try:
            self.take(pages, positions)
        except AlreadyHeldError as owned:
            raise NotHeldError(owned.message, owned.id, owned.position) from None
        self.free(pages)

    def _named(self, wrong: IdError, positions: Sequence[int]) -> IdError:
        """The same error, about the slot that the caller gave."""
        slot, position = wrong.id * self._page_size, int(positions[wrong.position])
        reason = (
            "is in the tree, or stands twice"
            if isinstance(wrong, AlreadyHeldError)
            else "is not handed out: it is free, stands twice, or there is no such page"
        )
        return type(wrong)(f"indices[{position}] = {slot}: page {wrong.id} {reason}", slot, position)

    def free(self, pages: npt.NDArray[np.int32]) -> None:
        """Pages are no longer the tree's. O(pages)."""
        self._owned.free(pages)

    def reset(self) -> None:
        """The tree owns nothing. O(pages / 64)."""
        self._owned.reset()

    def _make_room(self, highest: int) -> None:
        if highest < self._owned.num_ids:
            return
        grown = FreeList(min(max(highest + 1, 2 * self._owned.num_ids), 2**31 - 1), first_id=0, what="pages")
        grown.take(self._cached())
        self._owned = grown

    def check(self) -> None:
        """Verify invariant 13: the tree's pages are each there once, and held in the source. O(pages).

        Errors: InvariantError.
        """
        self._owned.check()
        cached = self._cached()
        if np.unique(cached).size != cached.size:
            raise InvariantError(13, "a page stands twice in the tree")
        if cached.size != self._owned.num_held or not all(map(self._owned.is_held, cached.tolist())):
            raise InvariantError(
                13, f"{cached.size} pages are in the tree, {self._owned.num_held} are noted as its own"
            )
        if self.source is not None:
            self.source.check()
            if not all(map(self.source.is_held, cached.tolist())):
                raise InvariantError(13, "a page is in the tree and free")
            if self.source.num_quarantined:
                raise InvariantError(13, "a page is neither free, nor in the tree, nor handed out")
