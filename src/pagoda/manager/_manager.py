"""`Manager`, the object that engines talk to: the native core behind a layout. In: requests; out: deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagoda._native import ManagerCore
from pagoda.errors import ConfigError
from pagoda.layout import Layout
from pagoda.layout._numbers import count
from pagoda.manager._delta import Delta
from pagoda.manager._tree import TreeView
from pagoda.manager._values import GroupStats, Stats

if TYPE_CHECKING:
    from pagoda._native import IdsLike

__all__ = ["Manager"]


class Manager(ManagerCore):
    """Plans the memory of running requests: rows, pages, and what is already computed. Touches no tensor.

    `layout` has the groups, and `capacity` the number of pages of each (`Budget.capacity()`). At most
    `num_rows` requests run at once, each with at most `max_tokens` tokens. `admit` leaves `watermark` pages
    of each group untouched, so that running requests can grow. A call that raises changes nothing. Changes
    reach the pools with the delta of the next `plan`. A manager may be used from several threads.

    ::

        admit(tokens) ─► reserve(rows, n) ─► plan(rows, counts) ─► Delta, for Pools.apply and Pools.batch
                                                 └─► commit(rows, tokens), now or up to k steps later
        stored ≤ committed ≤ computed ≤ reserved: the four lengths of a row

    Memory: 5 bytes per page of a row, 4 per prompt token until it is computed, 25 per page of a window group,
    and that of the tree. Errors: ConfigError, also for layouts with states or sink tokens, which it does not
    support.
    """

    layout: Layout

    def __init__(
        self,
        layout: Layout,
        capacity: Mapping[str, int],
        *,
        num_rows: int,
        max_tokens: int,
        watermark: int = 0,
    ) -> None:
        if not isinstance(layout, Layout):
            raise ConfigError(f"layout: give a Layout, not {type(layout).__name__}")
        if layout.state_group is not None:
            raise ConfigError("layout: it has states, but a Manager plans paged groups only")
        if not isinstance(capacity, Mapping) or set(capacity) != {g.name for g in layout.groups}:
            names = ", ".join(group.name for group in layout.groups)
            raise ConfigError(f"capacity: give a mapping from each group ({names}) to its number of pages")
        specs: list[tuple[Any, ...]] = []
        for group in layout.paged_groups:
            if group.storage.sink_tokens:
                raise ConfigError(
                    f"layout: group {group.name} keeps sink tokens, which a Manager does not support"
                )
            pages = count(capacity[group.name], f"capacity of {group.name}", low=0)
            specs.append((group.name, group.page_tokens, group.window, pages))
            if 0 < pages <= count(watermark, "watermark", low=0):
                raise ConfigError(
                    f"watermark: {watermark} pages leave none of the {pages} of group {group.name}: give less"
                )
        super().__init__(specs, num_rows, max_tokens, watermark)
        self.layout = layout

    @property
    def tree(self) -> TreeView:
        """A read-only view of what is cached."""
        return TreeView(self)

    def plan(self, rows: IdsLike | int = (), counts: IdsLike | int = 1) -> Delta:
        """End the step, which computes the next `counts` reserved tokens of each row, or counts[i] of row i.

        The delta has these rows, their lengths and counts, and everything that calls since the last `plan`
        changed. Apply it on every rank, in order, before the step computes. Without rows, the delta has the
        changes alone. Errors: ArgumentError for more tokens than are reserved and not yet computed;
        OutOfRangeError, NotHeldError, AlreadyHeldError for a row.
        """
        delta = Delta.__new__(Delta)  # skips the checks of an array that was received
        delta.step, delta.packed = self._plan(rows, counts)
        delta._sections = None
        return delta

    def stats(self) -> Stats:
        """Return the pages of each group by state, the rows, and the hits so far."""
        groups, *rest = self._counts()
        return Stats(tuple(GroupStats(*group) for group in groups), *rest)

    def __repr__(self) -> str:
        stats = self.stats()
        available = ", ".join(
            f"{g.name}: {g.free + g.evictable} of {g.total} pages available" for g in stats.groups
        )
        return f"Manager({stats.rows} of {stats.num_rows} rows running; {available})"
