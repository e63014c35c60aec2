"""`Manager`, the object that engines talk to: the native core behind a layout. In: requests; out: deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagoda._native import ManagerCore
from pagoda.errors import ConfigError
from pagoda.layout import Layout
from pagoda.layout._numbers import count
from pagoda.layout._work import WORKERS, work_target
from pagoda.manager._delta import Delta
from pagoda.manager._tree import TreeView
from pagoda.manager._values import CheckpointStats, GroupStats, Stats

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

    If the layout has states, row r has running state r, `capacity["checkpoint"]` is the number of saved
    states, and requests resume only where one was saved. A prefill is saved every `checkpoint_interval`
    tokens, and where reuse is likely.

    `workers` is how many programs of attention a device runs at once: deltas have a work list for so many,
    or none with 0. Give `Pools` the same number.

    Memory: 5 bytes per page of a row, 4 per prompt token until it is computed, 25 per page of a window group,
    76 per checkpoint, and that of the tree. Errors: ConfigError, also for layouts with sink tokens, which it
    does not support.
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
        checkpoint_interval: int = 1024,
        workers: int = WORKERS,
    ) -> None:
        if not isinstance(layout, Layout):
            raise ConfigError(f"layout: give a Layout, not {type(layout).__name__}")
        num_checkpoints = read_capacity(layout, capacity, count(num_rows, "num_rows"))
        specs: list[tuple[Any, ...]] = []
        for group in layout.paged_groups:
            if group.storage.sink_tokens:
                raise ConfigError(
                    f"layout: group {group.name} keeps sink tokens, which a Manager does not support"
                )
            pages = count(capacity[group.name], f"capacity of {group.name}", low=0)
            specs.append((group.name, group.page_tokens, group.window, pages, work_target(group, workers)))
            if 0 < pages <= count(watermark, "watermark", low=0):
                raise ConfigError(
                    f"watermark: {watermark} pages leave none of the {pages} of group {group.name}: give less"
                )
        super().__init__(
            specs,
            layout.resume_step,
            num_rows,
            max_tokens,
            watermark,
            num_checkpoints,
            count(checkpoint_interval, "checkpoint_interval"),
        )
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
        groups, rest, checkpoints = self._counts()
        return Stats(
            tuple(GroupStats(*group) for group in groups),
            *rest,
            None if checkpoints is None else CheckpointStats(*checkpoints),
        )

    def __repr__(self) -> str:
        stats = self.stats()
        available = [f"{g.name}: {g.free + g.evictable} of {g.total} pages available" for g in stats.groups]
        if stats.checkpoints is not None:
            available.append(f"{stats.checkpoints.cached} of {stats.checkpoints.total} checkpoints cached")
        return f"Manager({stats.rows} of {stats.num_rows} rows running; {', '.join(available)})"


def read_capacity(layout: Layout, capacity: Mapping[str, int], num_rows: int) -> int | None:
    """Check the names of a capacity, and return the number of checkpoints; None for a layout without states.

    The number of states may be left out, since each row has one. Errors: ConfigError.
    """
    names = [group.name for group in layout.paged_groups]
    has_states = layout.state_group is not None
    if has_states:
        names.append("checkpoint")
    optional = {"state"} if has_states else set()
    if not isinstance(capacity, Mapping) or set(capacity) - optional != set(names):
        raise ConfigError(
            f"capacity: give a mapping from each of {', '.join(names)} to its number of "
            f"pages{' or checkpoints' if has_states else ''}"
        )
    if not has_states:
        return None
    if count(capacity.get("state", num_rows), "capacity of state", low=0) < num_rows:
        raise ConfigError(
            f"num_rows: {num_rows} rows need as many states, but capacity has {capacity['state']}: "
            "give fewer rows"
        )
    return count(capacity["checkpoint"], "capacity of checkpoint", low=0)
