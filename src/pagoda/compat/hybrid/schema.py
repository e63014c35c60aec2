"""What one layer keeps, with every size: `LayerCacheSchema`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pagoda.compat.hybrid.config import AttentionType, DSV4Config, LayerSpec
from pagoda.errors import ConfigError
from pagoda.kernels.entries import Codec
from pagoda.layout import CompressedAttention, Entry, Layout, RingWindow

__all__ = ["LayerCacheSchema", "build_schema"]


@dataclass(frozen=True)
class LayerCacheSchema:
    """What layer `layer_idx` keeps, all of it read off its `kind`.

    Errors: ConfigError for blocks that end inside an entry, and for entries that hold other numbers than the
    layer has, or in a form that no kernel knows.
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
        """Tokens of a compressed entry; 0 where there is none. O(1)."""
        return self.kind.ratio if isinstance(self.kind, CompressedAttention) else 0

    @property
    def overlap(self) -> bool:
        """Whether an entry is made of its own block of tokens and the one before. O(1)."""
        return isinstance(self.kind, CompressedAttention) and self.kind.overlap

    @property
    def window(self) -> int:
        """Tokens that a query reads of the window, its own included. O(1)."""
        return self.kind.window

    @property
    def ring_size(self) -> int:
        """Rows of the ring: the window, and what is not yet accepted. O(1)."""
        return self.kind.ring

    @property
    def entries_per_block(self) -> int:
        """Compressed entries of a block; 0 where there are none. O(1)."""
        return self.block_tokens // self.ratio if self.ratio else 0

    @property
    def entry(self) -> Entry:
        """The bytes of an entry, in the ring and in blocks. O(1)."""
        return self.kind.entry

    @property
    def index(self) -> Entry | None:
        """The bytes of an indexer's key, or None. O(1)."""
        return self.kind.index if isinstance(self.kind, CompressedAttention) else None

    @property
    def index_dim(self) -> int:
        """Numbers of an indexer's key; 0 without an indexer. O(1)."""
        return self.kind.index_dim if isinstance(self.kind, CompressedAttention) else 0

    @property
    def main_state_shape(self) -> tuple[int, ...] | None:
        """(rows, channels) of the compressor's values, and of its scores; None without one. O(1)."""
        return self._shape("main_values")

    @property
    def index_state_shape(self) -> tuple[int, ...] | None:
        """As `main_state_shape`, of the indexer's compressor. O(1)."""
        return self._shape("index_values")

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return next((part.shape for part in self.kind.state if part.name == name), None)

    @cached_property
    def codec(self) -> Codec:
        """How the numbers of an entry become bytes. O(1)."""
        return Codec.of(self.entry)

    @cached_property
    def index_codec(self) -> Codec | None:
        """How the numbers of an indexer's key become bytes; None without an indexer. O(1)."""
        return None if self.index is None else Codec.of(self.index)

    def layout(self, num_layers: int = 1) -> Layout:
        """The layout of so many layers of this kind and nothing else. O(layers)."""
        return Layout([self.kind] * num_layers, self.block_tokens)


def build_schema(config: DSV4Config, spec: LayerSpec) -> LayerCacheSchema:
    """What one layer of a schedule keeps. O(1). Errors: ConfigError."""
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
        raise ConfigError(f"{name}: it holds {codec.dim} numbers, and {dim_name} is {dim}")
