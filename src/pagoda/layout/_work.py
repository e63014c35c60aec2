"""How many segments of attention keep a device busy. In: a group, and how many programs a device runs at
once; out: the target of the group's work list."""

from __future__ import annotations

from pagoda._native import MAX_TARGET
from pagoda.errors import ConfigError
from pagoda.layout._groups import PagedGroup
from pagoda.layout._numbers import count

__all__ = ["WORKERS", "work_target"]

WORKERS = 264  # programs that a device runs at once: two for each of the 132 multiprocessors of an H200


def work_target(group: PagedGroup, workers: int) -> int:
    """Return how many segments the group should have in a step, each of which runs once per KV head.

    0, no list: without workers, and for groups of entries. Errors: ConfigError.
    """
    if count(workers, "workers", low=0) > MAX_TARGET:
        raise ConfigError(f"workers: give {MAX_TARGET} or less, not {workers}")
    return 0 if group.kv_heads is None else -(-workers // group.kv_heads)
