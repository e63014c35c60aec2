"""How many programs of attention keep a device busy. In: a group, and how many programs a device runs at
once; out: the target of the group's work list."""

from __future__ import annotations

from pagoda._native import MAX_TARGET
from pagoda.errors import ConfigError
from pagoda.layout._groups import PagedGroup
from pagoda.layout._numbers import count

__all__ = ["WORKERS", "work_target"]

WORKERS = 528  # programs that a device runs at once: four for each of the 132 multiprocessors of an H200
# Latents count as so many KV heads: their programs are larger, and two serve 128 query heads.
LATENT_HEADS = 4


def work_target(group: PagedGroup, workers: int) -> int:
    """Return how many programs divide the work of the group among them, for each KV head.

    0, no list: without workers, and for groups of entries. Errors: ConfigError.
    """
    if count(workers, "workers", low=0) > MAX_TARGET:
        raise ConfigError(f"workers: give {MAX_TARGET} or less, not {workers}")
    if group.kv_heads is None:
        return 0
    return -(-workers // (LATENT_HEADS if group.storage.entries[0].name == "latent" else group.kv_heads))
