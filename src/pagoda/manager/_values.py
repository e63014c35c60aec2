"""What a manager tells about itself."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GroupStats", "Stats"]


class GroupStats(NamedTuple):
    """Pages of one group: free + evictable + leased + running + waiting = total."""

    name: str
    total: int
    free: int
    evictable: int  # cached, and nobody reads them
    leased: int  # cached, and running requests read them
    running: int  # of running requests, not cached
    waiting: int  # given up by requests that ended, and a fence has not passed; some of them cached


class Stats(NamedTuple):
    """A manager at one moment. `hit_tokens` of `admitted_tokens` needed no computing."""

    groups: tuple[GroupStats, ...]
    rows: int  # running
    waiting_rows: int
    num_rows: int
    admitted: int
    admitted_tokens: int
    hit_tokens: int
    evicted_pages: int
    cached_tokens: int
