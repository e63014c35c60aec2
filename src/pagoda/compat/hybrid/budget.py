"""How many blocks to allocate. In: a config, a schedule, memory; out: blocks of each kind."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.compat.hybrid.config import DSV4Config, LayerSpec, read_schedule
from pagoda.errors import ConfigError
from pagoda.layout._numbers import count, num_bytes, show_bytes

__all__ = ["compute_block_budget", "max_blocks"]

_TABLE_BYTES = 4  # of a place in a block table, and of a length


def max_blocks(config: DSV4Config, max_context_tokens: int) -> int:
    """Return the blocks of a request of the longest context, rounded up. Errors: ConfigError."""
    return -(-count(max_context_tokens, "max_context_tokens") // config.block_tokens)


def compute_block_budget(
    config: DSV4Config,
    schedule: Sequence[LayerSpec],
    max_context_tokens: int,
    max_concurrent_requests: int,
    *,
    memory: int | str | None = None,
) -> dict[str, int]:
    """Return the usable blocks of each kind of layer, {"csa": n, "hca": n}: enough for all requests at their
    longest.

    A kind that the schedule does not have gets 0. The null block is not counted. `memory`, a number of bytes
    or text such as '80GiB', limits the blocks to those that fit beside the states of all requests and the
    block tables, padding included: what `KVCacheManager.memory_bytes` counts. Errors: ConfigError, also if
    not even one request of the longest context fits.
    """
    if not isinstance(config, DSV4Config):
        raise ConfigError(f"config: give a DSV4Config, not {type(config).__name__}")
    layout = config.layout(read_schedule(schedule))
    each = max_blocks(config, max_context_tokens)
    requests = count(max_concurrent_requests, "max_concurrent_requests")
    blocks = requests * each
    if memory is not None:
        limit = num_bytes(memory)
        state = layout.state_group
        rows = 0 if state is None else (requests + 1) * state.state_bytes
        tables = len(layout.paged_groups) * (requests + 1) * (each + 1) * _TABLE_BYTES
        block_bytes = sum(group.page_bytes for group in layout.paged_groups)
        least = rows + tables + (1 + (each if block_bytes else 0)) * block_bytes
        if least > limit:
            raise ConfigError(
                f"memory: the states of {requests:,} requests and the blocks of one of "
                f"{max_context_tokens:,} tokens need {show_bytes(least)} ({least:,} B), but there are only "
                f"{show_bytes(limit)}: give more memory, or fewer or shorter requests"
            )
        if block_bytes:
            blocks = min(blocks, (limit - rows - tables) // block_bytes - 1)
    names = {group.name for group in layout.paged_groups}
    return {name: blocks if name in names else 0 for name in ("csa", "hca")}
