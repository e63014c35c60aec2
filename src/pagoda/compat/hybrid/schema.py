"""What one layer stores, with every size: `LayerCacheSchema`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from pagoda.compat.hybrid.config import AttentionType, DSV4Config, LayerSpec
from pagoda.errors import ConfigError
from pagoda.kernels.entries import Codec
from pagoda.layout import CompressedAttention, Entry, Layout, RingWindow
from pagoda.pools import Pools

__all__ = ["LayerCacheSchema", "build_schema"]


@dataclass(frozen=True)
class LayerCacheSchema:
    """What layer `layer_idx` stores, all derived from its `kind`.

    Errors: ConfigError for blocks that end inside an entry, and for entries with other dimensions than the
    layer's or in a format that kernels do not support.
    """

    layer_idx: int
    attn_type: AttentionType
    kind: RingWindow
    head_dim: int
    rope_dim: int
    block_tokens: int

    def __post_init__(self) -> None:
        if self.ratio and self.block_tokens % self.ratio:
            raise ConfigError(
                f"block_tokens: give a multiple of {self.ratio}, the tokens of an entry, "
                f"not {self.block_tokens}"
            )
        _require_dim(self.codec, self.head_dim, "entry", "head_dim")
        if self.index_codec is not None:
            _require_dim(self.index_codec, self.index_dim, "index", "index_head_dim")

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry; 0 without compressed entries."""
        return self.kind.ratio if isinstance(self.kind, CompressedAttention) else 0

    @property
    def overlap(self) -> bool:
        """Whether an entry is made of its own block of tokens and the previous one."""
        return isinstance(self.kind, CompressedAttention) and self.kind.overlap

    @property
    def window(self) -> int:
        """Tokens of the window that a query reads, its own included."""
        return self.kind.window

    @property
    def ring_size(self) -> int:
        """Cells of the ring: the window, and tokens that are not yet accepted."""
        return self.kind.ring

    @property
    def entries_per_block(self) -> int:
        """Compressed entries per block; 0 without compressed entries."""
        return self.block_tokens // self.ratio if self.ratio else 0

    @property
    def entry(self) -> Entry:
        """The byte layout of an entry, in the ring and in blocks."""
        return self.kind.entry

    @property
    def index(self) -> Entry | None:
        """The byte layout of an indexer's key; None without an indexer."""
        return self.kind.index if isinstance(self.kind, CompressedAttention) else None

    @property
    def index_dim(self) -> int:
        """Numbers per indexer key; 0 without an indexer."""
        return self.kind.index_dim if isinstance(self.kind, CompressedAttention) else 0

    @property
    def main_state_shape(self) -> tuple[int, ...] | None:
        """(cells, channels) of the compressor's values, and of its scores; None without a compressor."""
        return self._shape("main_values")

    @property
    def index_state_shape(self) -> tuple[int, ...] | None:
        """As `main_state_shape`, for the indexer's compressor."""
        return self._shape("index_values")

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return next((part.shape for part in self.kind.state if part.name == name), None)

    @cached_property
    def codec(self) -> Codec:
        """How the numbers of an entry become bytes."""
        return Codec.of(self.entry)

    @cached_property
    def index_codec(self) -> Codec | None:
        """How the numbers of an indexer's key become bytes; None without an indexer."""
        return None if self.index is None else Codec.of(self.index)

    def pools(self, num_rows: int, num_blocks: int, device: torch.device | str) -> Pools:
        """Allocate pools of this layer alone, for `num_rows` requests and `num_blocks` blocks.

        Errors: ConfigError.
        """
        layout = Layout([self.kind], self.block_tokens)
        capacity = {group.name: num_blocks for group in layout.paged_groups} | {"checkpoint": 0}
        return Pools(
            layout,
            capacity,
            num_rows=num_rows,
            max_tokens=self.block_tokens,
            device=device,
            max_step_tokens=0,
        )


def build_schema(config: DSV4Config, spec: LayerSpec) -> LayerCacheSchema:
    """Return the schema of one layer of a schedule. Errors: ConfigError."""
    if not isinstance(config, DSV4Config):
        raise ConfigError(f"config: give a DSV4Config, not {type(config).__name__}")
    if not isinstance(spec, LayerSpec):
        raise ConfigError(f"spec: give a LayerSpec, not {type(spec).__name__}")
    return LayerCacheSchema(
        spec.layer_idx,
        spec.attn_type,
        config.kind(spec.attn_type),
        config.head_dim,
        config.rope_dim,
        config.block_tokens,
    )


def _require_dim(codec: Codec, dim: int, name: str, dim_name: str) -> None:
    if codec.dim != dim:
        raise ConfigError(f"{name}: give an Entry of {dim_name} = {dim} numbers, not {codec.dim}")
