"""The object that engines talk to."""

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
    """Plans the memory of running requests: rows, pages, what is already computed; never touches a tensor.

    `layout` says which groups there are, `capacity` how many pages each has (`Budget.capacity()`),
    `num_rows` how many requests run at once, `max_tokens` how long one gets. `watermark` pages of each
    group are out of reach of `admit`, so that running requests can grow. Every call does all it says, or
    raises and changes nothing. What calls change reaches the pools with the next `plan`. Several threads
    may call.

    ::

        admit(tokens) ─► reserve(rows, n) ─► plan(rows, counts) ─► Delta, for Pools.apply and Pools.batch
                                                 └─► commit(rows, tokens), now or up to k steps later
        stored ≤ committed ≤ computed ≤ reserved: the four lengths of a row

    Memory: 5 bytes for each page that a row uses, 4 for each token of a prompt until it is computed, 25 for
    each page of a window, and the tree's. Errors: ConfigError, also for layouts with states or sinks, which
    it does not plan.
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
            raise ConfigError("layout: it has states, and a Manager plans paged groups only")
        if not isinstance(capacity, Mapping) or set(capacity) != {g.name for g in layout.groups}:
            names = ", ".join(group.name for group in layout.groups)
            raise ConfigError(f"capacity: give the number of pages of each group: {names}")
        specs: list[tuple[Any, ...]] = []
        for group in layout.paged_groups:
            if group.storage.sink_tokens:
                raise ConfigError(
                    f"layout: group {group.name} keeps sink tokens, which a Manager does not plan"
                )
            pages = count(capacity[group.name], f"capacity of {group.name}", low=0)
            specs.append((group.name, group.page_tokens, group.window, pages))
        super().__init__(specs, num_rows, max_tokens, watermark)
        self.layout = layout

    @property
    def tree(self) -> TreeView:
        """What is cached, to look at and to listen to."""
        return TreeView(self)

    def plan(self, rows: IdsLike | int = (), counts: IdsLike | int = 1) -> Delta:
        """End the step: it computes the next counts[i] reserved tokens of each row, or `counts` of all.

        The delta names these rows, their lengths and counts, and what all calls since the last `plan`
        changed; the next step begins. Apply it on every rank, in order, before the step computes. Without
        rows nothing is computed, and the delta carries the changes alone. The delta is the caller's.
        Errors: ArgumentError for more tokens than are reserved and not computed; OutOfRangeError,
        NotHeldError, AlreadyHeldError for a row.
        """
        delta = Delta.__new__(Delta)  # there is nothing to check
        delta.step, delta.packed = self._plan(rows, counts)
        delta._sections = None
        return delta

    def stats(self) -> Stats:
        """Pages by group, rows, and hits so far. Cost: O(groups), and what waits for a fence."""
        groups, *rest = self._counts()
        return Stats(tuple(GroupStats(*group) for group in groups), *rest)

    def __repr__(self) -> str:
        stats = self.stats()
        available = ", ".join(
            f"{g.name}: {g.free + g.evictable} of {g.total} pages available" for g in stats.groups
        )
        return f"Manager({stats.rows} of {stats.num_rows} rows running; {available})"
