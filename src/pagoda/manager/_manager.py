"""The object engines talk to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda._native import ManagerCore
from pagoda.errors import ConfigError
from pagoda.layout import Layout
from pagoda.layout._numbers import count
from pagoda.manager._delta import Delta
from pagoda.manager._values import GroupStats, Stats

__all__ = ["Manager"]


class Manager(ManagerCore):
    """Plans the memory of running requests: rows, pages, what is already computed; never touches a tensor.

    `layout` says which groups there are, `capacity` how many pages each has (`Budget.capacity()`),
    `num_rows` how many requests run at once, `max_tokens` how long one gets. `watermark` pages of each
    group are out of reach of `admit`, so that running requests can grow. Every call does all it says or
    raises and changes nothing; each adds to the step's delta, which `take_delta` gives. Several threads may
    call.

    Memory: 5 bytes for each page that a row uses, 4 for each token of a prompt until it is computed, 13 for
    each page of a window, 4 for each that a fork copied to, and the tree's. Errors: ConfigError, also for
    layouts with states or sinks, which are not planned yet."""

    layout: Layout
    num_groups: int

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
            raise ConfigError("layout: it has states, and a Manager plans paged groups only so far")
        if not isinstance(capacity, Mapping) or set(capacity) != {g.name for g in layout.groups}:
            names = ", ".join(group.name for group in layout.groups)
            raise ConfigError(f"capacity: give the pages of each group: {names}")
        specs: list[tuple[Any, ...]] = []
        for group in layout.paged_groups:
            if group.storage.sink_tokens:
                raise ConfigError(
                    f"layout: group {group.name} keeps sinks, which a Manager does not plan so far"
                )
            pages = count(capacity[group.name], f"capacity of {group.name}", low=0)
            specs.append((group.name, group.page_tokens, group.window, pages))
        super().__init__(specs, num_rows, max_tokens, watermark, 0)
        self.layout = layout
        self.num_groups = len(specs)

    @property
    def table_shapes(self) -> dict[str, tuple[int, int]]:
        """[num_rows + 1, max_pages] of each group's table, in the order in which the flat table has them.
        O(groups)."""
        return {
            group.name: (self.num_rows + 1, -(-self.max_tokens // group.page_tokens))
            for group in self.layout.paged_groups
        }

    def take_delta(self) -> Delta:
        """What the calls since the last one changed; a new step begins. The caller's. Cost: its bytes."""
        delta = Delta.__new__(Delta)  # there is nothing to check
        delta.step, delta.packed = self._take_packed()
        delta.num_groups = self.num_groups
        return delta

    def stats(self) -> Stats:
        """Pages by group, rows, hits so far. O(groups), and what waits for a fence."""
        groups, *rest = self._counts()
        return Stats(tuple(GroupStats(*group) for group in groups), *rest)

    def __repr__(self) -> str:
        stats = self.stats()
        free = ", ".join(f"{g.free + g.evictable} of {g.total} {g.name} pages to have" for g in stats.groups)
        return f"Manager({stats.rows} of {stats.num_rows} rows run; {free})"
