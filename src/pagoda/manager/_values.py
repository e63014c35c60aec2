"""The statistics of a manager, as plain values."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CheckpointStats", "GroupStats", "Stats"]


class GroupStats(NamedTuple):
    """Pages of one group: free + evictable + leased + running + waiting = total."""

    name: str
    total: int
    free: int
    evictable: int  # cached, and no request reads them
    leased: int  # cached, and running requests read them
    running: int  # owned by running requests, or given out by alloc_pages; not cached
    waiting: int  # given up by requests, but their fence has not passed; some are cached


class CheckpointStats(NamedTuple):
    """Checkpoints by owner, free + cached + running = total, and what has happened to them so far."""

    total: int
    free: int
    cached: int  # in the tree; each can be given up for a new one
    running: int  # owned by running requests, whose tokens are not committed or who are still decoding
    saved: int  # entered the tree
    resumed: int  # a request was admitted with it
    evicted: int  # given up for a new one, or together with pages


class Stats(NamedTuple):
    """The state of a manager. `hit_tokens` of the `admitted_tokens` were cached."""

    groups: tuple[GroupStats, ...]
    rows: int  # running
    waiting_rows: int
    num_rows: int
    admitted: int
    admitted_tokens: int
    hit_tokens: int
    evicted_pages: int
    cached_tokens: int
    checkpoints: CheckpointStats | None  # None for a layout without states
