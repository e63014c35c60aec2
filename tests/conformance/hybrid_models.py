"""Small models of compressed attention for the tests of contracts/hybrid.md; ways to look at a manager."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagoda.compat import AttentionType, DSV4Config, KVCacheManager, LayerSpec
from pagoda.errors import UsageError
from pagoda.layout import index_keys, latent

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
FAILS = (AssertionError, pytest.fail.Exception)  # how a check says that an implementation is wrong

# Layer numbers with gaps: nothing counts on their beginning at 0 or standing side by side.
LAYERS = (1, 2, 3, 5, 8)
SCHEDULE = [LayerSpec(1, SWA), LayerSpec(2, CSA), LayerSpec(3, HCA), LayerSpec(5, CSA), LayerSpec(8, HCA)]


def tiny(**changed: Any) -> DSV4Config:
    """Entries of 16 numbers, 4 of them rotated; a window of 8, blocks of 16 tokens: 4 CSA entries, 1 HCA."""
    sizes = {
        "num_layers": 4,
        "num_query_heads": 3,
        "index_topk": 2,
        "compress_ratios": (0, 4, 16, 4),
        "head_dim": 16,
        "rope_dim": 4,
        "window": 8,
        "csa_ratio": 4,
        "hca_ratio": 16,
        "index_head_dim": 8,
        "block_tokens": 16,
    }
    return DSV4Config(**(sizes | changed))


def exact(**changed: Any) -> DSV4Config:
    """The same with entries of float32: what is written comes back as it was."""
    entries = {"entry": latent(12, 4, "float32"), "index": index_keys(8, "float32")}
    return tiny(**(entries | changed))


def manager_of(device: str, config: DSV4Config | None = None, **changed: Any) -> KVCacheManager:
    """Four rows of at most 5 blocks, 12 CSA and 9 HCA blocks."""
    arguments = {
        "schedule": SCHEDULE,
        "max_concurrent_requests": 4,
        "max_context_tokens": 5 * 16,
        "num_blocks_per_csa_layer": 12,
        "num_blocks_per_hca_layer": 9,
    }
    return KVCacheManager(config or tiny(), device=device, **(arguments | changed))


def scramble(manager: KVCacheManager) -> None:
    """Fill every state with what a request could have left there."""
    for pool in manager.state_pools.values():
        for part in parts_of(pool).values():
            part.copy_(torch.randint(1, 9, part.shape, device=part.device))


def parts_of(pool: Any) -> dict[str, torch.Tensor]:
    """The parts of a state pool that are there, by name."""
    names = (
        *("window", "window_scales", "positions"),
        *("main_values", "main_scores", "index_values", "index_scores"),
    )
    return {name: getattr(pool, name) for name in names if getattr(pool, name) is not None}


def tensors_of(manager: KVCacheManager) -> list[torch.Tensor]:
    """All tensors of a manager."""
    paged = [pool for pool in manager.paged_pools.values() if pool is not None]
    return [
        *(part for pool in manager.state_pools.values() for part in parts_of(pool).values()),
        *(pool.entries for pool in paged),
        *(pool.index for pool in paged if pool.index is not None),
        *(table for table in manager.block_tables.values() if table is not None),
        *(lens for lens in manager.block_lens.values() if lens is not None),
    ]


class Blocks:
    """Which blocks of a group are free, as the manager behind the face knows it."""

    def __init__(self, manager: KVCacheManager, group: str) -> None:
        self.manager, self.group = manager, group
        (stats,) = (found for found in manager._manager.stats().groups if found.name == group)
        self.num_ids, self.num_free, self.num_held = stats.total, stats.free, stats.running
        self.num_quarantined = stats.waiting
        assert stats.evictable == stats.leased == 0  # nothing of the face is ever cached

    def is_free(self, block: int) -> bool:
        rows = (row for row in range(1, self.manager.max_concurrent_requests + 1))
        return not any(
            block in self.manager._manager.page_ids(row, self.group)
            for row in rows
            if is_running(self.manager, row)
        )

    def alloc(self, n: int) -> Any:
        return self.manager._manager.alloc_pages(self.group, n)


def is_running(manager: KVCacheManager, row: int) -> bool:
    """Whether a row is held by a request."""
    try:
        return manager._manager.reserved(row) == 0
    except UsageError:
        return False


def free_lists(manager: KVCacheManager) -> dict[int, Blocks | None]:
    """The blocks of each layer; None where a layer has none."""
    return {layer: name and Blocks(manager, name) for layer, name in manager._groups.items()}


def observe(manager: KVCacheManager) -> Any:
    """Everything of a manager that calls can tell: bytes of all tensors, free ids, and what layers took."""
    tensors = [
        tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors_of(manager)
    ]
    free = [
        None if ids is None else [block for block in range(1, ids.num_ids + 1) if ids.is_free(block)]
        for ids in free_lists(manager).values()
    ]
    taken = [counts.tolist() for counts in manager._taken.values()]
    return tensors, free, taken, repr(manager)


class _Reads(TorchDispatchMode):
    """Raises where a number of a tensor would come to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            pytest.fail("a number was read from a tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tensor's numbers come to the host, on a CPU as on a device."""

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
            patch.setattr(torch.Tensor, name, refuse)
        with _Reads():
            yield
