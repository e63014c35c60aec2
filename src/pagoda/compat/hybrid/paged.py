"""Compressed entries of one layer, in blocks: `PagedKVPool`."""

from __future__ import annotations

import torch

from pagoda.compat.hybrid.schema import LayerCacheSchema
from pagoda.errors import ConfigError
from pagoda.layout._numbers import count
from pagoda.pools import EntryPool, Pools

__all__ = ["PagedKVPool"]


class PagedKVPool:
    """Blocks 1 … num_blocks of a layer's compressed entries and, if it has an indexer, of the indexer's keys.

    `entries` is [num_blocks + 1, bytes of a block] uint8; `index` has the same form, or is None; block 0 is
    the null block. Entry i of a request is entry i % entries_per_block of block i // entries_per_block of its
    table. A block has the data of all its entries, then the scales of all, then padding.

    Errors: ConfigError, also for a layer without compressed entries.
    """

    def __init__(
        self, schema: LayerCacheSchema, num_blocks: int, device: torch.device | str = "cuda"
    ) -> None:
        if not isinstance(schema, LayerCacheSchema):
            raise ConfigError(f"schema: give a LayerCacheSchema, not {type(schema).__name__}")
        if schema.ratio == 0:
            raise ConfigError(
                f"schema: layer {schema.layer_idx} is {schema.attn_type.name}: it has no compressed entries"
            )
        self._become(schema, schema.pools(1, count(num_blocks, "num_blocks", low=0), device), 0)

    @classmethod
    def of_layer(cls, schema: LayerCacheSchema, pools: Pools, layer: int) -> PagedKVPool:
        """Wrap one layer of the pools of a model, without allocating. Errors: ArgumentError."""
        made = cls.__new__(cls)
        made._become(schema, pools, layer)
        return made

    def _become(self, schema: LayerCacheSchema, pools: Pools, number: int) -> None:
        layer = pools.layer(number)
        assert isinstance(layer.pool, EntryPool)
        self._pool, self._layer = layer.pool, layer.index
        self.schema, self.num_blocks, self.device = schema, self._pool.num_pages, pools.device
        pages = self._pool.layer(self._layer)
        self.entries = pages[schema.entry.name]
        self.index = None if schema.index is None else pages[schema.index.name]

    def view(self, entry: str, part: str) -> torch.Tensor:
        """View a part of all entries in its dtype: [num_blocks + 1, entries_per_block, *shape].

        view("compressed", "rope") is bfloat16, view("index", "scale") float32. Errors: ArgumentError.
        """
        return self._pool.view(self._layer, entry, part)

    def memory_bytes(self) -> int:
        """Bytes of this layer's blocks, block 0 included."""
        return self.entries.numel() + (0 if self.index is None else self.index.numel())

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        self._pool.check()
