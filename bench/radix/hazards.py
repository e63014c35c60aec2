"""``python -m bench.radix.hazards``: how far eviction overshoots and what a double unlock does, per tree."""

from __future__ import annotations

import numpy as np

from bench.radix.adapters import ADAPTERS, PEERS, Adapter, Pagoda


def overshoot(adapter: Adapter) -> int:
    """Return the tokens evicted from one 30,000-token leaf when 64 are asked for."""
    tokens = adapter.prep_tokens(np.arange(30_000, dtype=np.int32))
    adapter.insert(tokens, adapter.prep_slots(256, 30_000))
    return adapter.evict(64)


def double_unlock(adapter: Adapter) -> str:
    """Return what the second unlock does, and whether the cache still answers."""
    short = adapter.prep_tokens(np.arange(3, dtype=np.int32))
    adapter.insert(short, adapter.prep_slots(256, 3))
    held = adapter.lock(adapter.match(short)[2])
    adapter.unlock(held)
    try:
        adapter.unlock(held)
        seen = "unnoticed"
    except Exception as error:
        seen = f"{type(error).__name__} {str(error)[:70]!r}"
    try:
        return f"{seen}; afterwards evictable {adapter.evictable()}"
    except RuntimeError as error:
        return f"{seen}; afterwards unusable: {str(error)[-62:]!r}"


if __name__ == "__main__":
    for name in [Pagoda.name, *PEERS]:
        print(f"{name}: evict(64) of one 30,000-token leaf: {overshoot(ADAPTERS[name](1)):,} tokens")
        print(f"{name}: double unlock: {double_unlock(ADAPTERS[name](1))}")
