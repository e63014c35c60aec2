"""The kinds of layers: a frozen description of what one layer stores, from which all sizes derive.

In: dimensions and dtypes of a layer; out: what it keeps in pages (`storage`), what it keeps per request
(`state`), and its share on one of several ranks (`shard`).

    Kind
    ├── FullAttention            keys and values of every token
    ├── WindowAttention          keys and values of the last tokens, and of the first ones (sinks)
    ├── LatentAttention          one vector per token for all heads; with or without indexer keys
    ├── SharedAttention          nothing: reads what another layer stores
    ├── RingWindow               the last entries, in a ring of fixed size per request
    │   └── CompressedAttention  plus one entry per `ratio` tokens, and tokens not yet compressed
    └── RecurrentKind            a state of fixed size per request
        └── GatedDelta, KimiDelta, Mamba1, Mamba2, ShortConv, Lightning
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self

from pagoda.errors import ConfigError
from pagoda.layout._entries import KV_DTYPES, Entry, TensorSpec, dtype_name, plain
from pagoda.layout._numbers import count

__all__ = [
    "CompressedAttention",
    "FullAttention",
    "GatedDelta",
    "KimiDelta",
    "Kind",
    "LatentAttention",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "RecurrentKind",
    "RingWindow",
    "SharedAttention",
    "ShortConv",
    "Storage",
    "WindowAttention",
]


@dataclass(frozen=True)
class Storage:
    """What a layer keeps in pages: the entries of its tensors, and how long they live.

    `name` becomes the name of the group. One entry covers `ratio` tokens. With `window`, the query at
    position p reads positions p − window + 1 to p and the first `sink_tokens`, and only these have to be
    kept; without, everything is kept."""

    name: str
    entries: tuple[Entry, ...]
    ratio: int = 1
    window: int | None = None
    sink_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """What one layer stores. Errors: ConfigError, naming the invalid field.

    `storage` and `state` are cached: many layers of a model are the same object."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kind = each.type if isinstance(each.type, str) else getattr(each.type, "__name__", "")
            if kind == "int":
                object.__setattr__(self, each.name, count(value, each.name, each.metadata.get("low", 1)))
            elif kind == "str":
                object.__setattr__(self, each.name, dtype_name(value, each.name, KV_DTYPES))
            elif kind == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{each.name}: give True or False, not {type(value).__name__}")
            elif kind == "Entry" or (kind == "Entry | None" and value is not None):
                if isinstance(value, Entry):
                    continue
                raise ConfigError(f"{each.name}: give an Entry, not {type(value).__name__}")

    @property
    def storage(self) -> Storage | None:
        """What the layer keeps in pages, or None."""
        return None

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """What the layer keeps per request, of a size that does not depend on the length."""
        return ()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the state that a request needs to resume."""
        return sum(part.checkpoint_bytes for part in self.state)

    @abstractmethod
    def shard(self, ranks: int) -> Self:
        """Return the layer's share on each of `ranks` tensor-parallel ranks. Errors: ConfigError."""


def _split(number: int, ranks: int, what: str) -> int:
    """Return the heads per rank: an equal share, or one repeated head if ranks outnumber heads."""
    if number % ranks == 0:
        return number // ranks
    if ranks % number == 0:
        return 1
    raise ConfigError(
        f"{number} {what} can be neither divided among {ranks} ranks nor repeated evenly on them: "
        f"give a number of ranks that divides {number} or is a multiple of it"
    )


def _divide(number: int, ranks: int, what: str) -> int:
    """Return an equal share, for what is never repeated."""
    if number % ranks:
        raise ConfigError(
            f"{number} {what} cannot be divided among {ranks} ranks: give a divisor of {number}"
        )
    return number // ranks


@dataclass(frozen=True, kw_only=True)
class FullAttention(Kind):
    """Keys and values of every token: `kv_heads` heads of `k_dim` and `v_dim`.

    Also for grouped attention, which has fewer KV heads than query heads. fp8 uses one scale per layer,
    stored outside the pages."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str = "bfloat16"

    @cached_property
    def storage(self) -> Storage:
        """Keys and values."""
        return Storage("full", self._entries())

    def _entries(self) -> tuple[Entry, ...]:
        keys = plain("keys", self.kv_heads, self.k_dim, self.dtype)
        return keys, plain("values", self.kv_heads, self.v_dim, self.dtype)

    def shard(self, ranks: int) -> Self:
        """Divide the KV heads, or repeat them if ranks outnumber them. Errors: ConfigError."""
        return replace(self, kv_heads=_split(self.kv_heads, ranks, "KV heads"))


@dataclass(frozen=True, kw_only=True)
class WindowAttention(FullAttention):
    """Keys and values of the last `window` tokens, the newest one included, and of the first `sink_tokens`.

    Sinks that a model learns as one logit per head (GPT-OSS) are weights and store nothing.
    """

    window: int
    sink_tokens: int = field(default=0, metadata={"low": 0})

    @cached_property
    def storage(self) -> Storage:
        """Keys and values, kept while they are in the window."""
        return Storage("window", self._entries(), window=self.window, sink_tokens=self.sink_tokens)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Kind):
    """One entry per token for all heads (MLA), and an indexer's key if attention is sparse.

    `entry` and `index` define the bytes, see `latent`, `latent_fp8` and `index_keys`. Every rank keeps all
    of it.
    """

    entry: Entry
    index: Entry | None = None

    @cached_property
    def storage(self) -> Storage:
        """The latent entry, and the indexer's key."""
        return Storage("latent", (self.entry,) if self.index is None else (self.entry, self.index))

    def shard(self, ranks: int) -> Self:
        """Return the layer itself: all heads share one vector, so every rank needs all of it."""
        return self


@dataclass(frozen=True, kw_only=True)
class SharedAttention(Kind):
    """Stores nothing: reads the keys and values of an earlier layer, `layer`."""

    layer: int = field(metadata={"low": 0})

    def shard(self, ranks: int) -> Self:
        """Return the layer itself."""
        return self


@dataclass(frozen=True, kw_only=True)
class RingWindow(Kind):
    """The last `window` entries in a ring of fixed size per request, as in DeepSeek-V4.

    If `unaccepted` tokens are written before the first of them is accepted, the ring has `unaccepted` − 1
    more entries; otherwise a rollback would find its entries overwritten. Each entry has a position, −1 if it
    is empty, so that leftovers of an earlier request or a rollback are not mistaken for the window. A
    checkpoint keeps the entries that the next token reads, one fewer than `window`; their positions follow
    from its length."""

    entry: Entry
    window: int
    unaccepted: int = 1

    @property
    def ring(self) -> int:
        """Entries in the ring."""
        return self.window + self.unaccepted - 1

    def _ring(self) -> tuple[TensorSpec, ...]:
        # Scales are separate, so that the data of every entry is aligned for any size of the ring.
        kept, entry = self.window - 1, self.entry
        parts = [TensorSpec("window", (self.ring, entry.data_bytes), "uint8", kept=kept)]
        if entry.scale_bytes:
            parts.append(TensorSpec("window_scales", (self.ring, entry.scale_bytes), "uint8", kept=kept))
        positions = TensorSpec("positions", (self.ring,), "int32", -1, kept=kept, holds_positions=True)
        return *parts, positions

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The ring as bytes, data and scales separately, and the position of each entry."""
        return self._ring()

    def shard(self, ranks: int) -> Self:
        """Return the layer itself: there is one KV head."""
        return self


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(RingWindow):
    """A ring window, one entry per `ratio` tokens, and the compressor's input: the tokens not yet compressed.

    With `overlap` (CSA), an entry is computed from its own block of tokens and the previous one: the
    compressor keeps two blocks and two projections per token. Without (HCA), it keeps one block and one
    projection. `index` is the indexer's key of an entry, which has its own compressor. Compressors keep
    values and scores in float32; scores begin at −inf. Requests resume at the end of a block, so a checkpoint
    keeps the last block with `overlap`, and nothing of a compressor without."""

    head_dim: int
    ratio: int
    overlap: bool
    index: Entry | None = None
    index_dim: int = field(default=0, metadata={"low": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.index is None) != (self.index_dim == 0):
            raise ConfigError("index and index_dim: give both, or neither")

    @property
    def compressor_tokens(self) -> int:
        """Tokens that the compressor keeps: those of one entry, and those not yet accepted."""
        return self.ratio * (2 if self.overlap else 1) + self.unaccepted - 1

    @cached_property
    def storage(self) -> Storage:
        """The compressed entry, and its indexer key."""
        entries = (self.entry,) if self.index is None else (self.entry, self.index)
        return Storage("csa" if self.overlap else "hca", entries, ratio=self.ratio)

    def _compressor(self, name: str, dim: int) -> tuple[TensorSpec, TensorSpec]:
        shape = (self.compressor_tokens, dim * (2 if self.overlap else 1))
        kept = self.ratio if self.overlap else 0
        return (
            TensorSpec(f"{name}_values", shape, "float32", kept=kept),
            TensorSpec(f"{name}_scores", shape, "float32", float("-inf"), kept=kept),
        )

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The ring with its positions, and the compressors' input."""
        main = self._compressor("main", self.head_dim)
        index = self._compressor("index", self.index_dim) if self.index_dim else ()
        return (*self._ring(), *main, *index)


@dataclass(frozen=True, kw_only=True)
class RecurrentKind(Kind):
    """A recurrent state, and the last inputs of a short convolution: of fixed size per request.

    The convolution keeps one input fewer than its kernel is long. Heads are divided among ranks.
    """

    def _state(
        self, channels: int, kernel: int, dtype: str, *recurrent: TensorSpec
    ) -> tuple[TensorSpec, ...]:
        conv = (TensorSpec("conv", (channels, kernel - 1), dtype),) if kernel > 1 else ()
        return (*conv, *recurrent)


@dataclass(frozen=True, kw_only=True)
class GatedDelta(RecurrentKind):
    """Gated delta net (Qwen3-Next, Qwen3.5): [value_heads, key_dim, value_dim], and a convolution over
    queries, keys and values."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """Convolution and recurrent state."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        recurrent = TensorSpec(
            "recurrent", (self.value_heads, self.key_dim, self.value_dim), self.state_dtype
        )
        return self._state(channels, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Divide the heads. Errors: ConfigError."""
        keys, values = (_divide(n, ranks, "linear heads") for n in (self.key_heads, self.value_heads))
        return replace(self, key_heads=keys, value_heads=values)


@dataclass(frozen=True, kw_only=True)
class KimiDelta(RecurrentKind):
    """Kimi delta attention: [heads, dim, dim], and convolutions over queries, keys and values."""

    heads: int
    dim: int
    kernel: int
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """Convolution and recurrent state."""
        recurrent = TensorSpec("recurrent", (self.heads, self.dim, self.dim), self.state_dtype)
        return self._state(3 * self.heads * self.dim, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Divide the heads. Errors: ConfigError."""
        return replace(self, heads=_divide(self.heads, ranks, "linear heads"))


@dataclass(frozen=True, kw_only=True)
class Mamba1(RecurrentKind):
    """Selective state space: [channels, state_dim], and a convolution over the channels."""

    channels: int
    state_dim: int
    kernel: int
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """Convolution and recurrent state."""
        recurrent = TensorSpec("recurrent", (self.channels, self.state_dim), self.state_dtype)
        return self._state(self.channels, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Divide the channels. Errors: ConfigError."""
        return replace(self, channels=_divide(self.channels, ranks, "Mamba channels"))


@dataclass(frozen=True, kw_only=True)
class Mamba2(RecurrentKind):
    """State space duality: [heads, head_dim, state_dim], and a convolution over the heads' inputs and the two
    projections of each of `groups`."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """Convolution and recurrent state."""
        channels = self.heads * self.head_dim + 2 * self.groups * self.state_dim
        recurrent = TensorSpec("recurrent", (self.heads, self.head_dim, self.state_dim), self.state_dtype)
        return self._state(channels, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Divide the heads; divide the groups too, or repeat them if ranks outnumber them. Errors:
        ConfigError."""
        heads = _divide(self.heads, ranks, "Mamba heads")
        return replace(self, heads=heads, groups=_split(self.groups, ranks, "Mamba groups"))


@dataclass(frozen=True, kw_only=True)
class ShortConv(RecurrentKind):
    """A short convolution and nothing else (LFM2)."""

    channels: int
    kernel: int
    dtype: str = "bfloat16"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The convolution's last inputs."""
        return self._state(self.channels, self.kernel, self.dtype)

    def shard(self, ranks: int) -> Self:
        """Divide the channels. Errors: ConfigError."""
        return replace(self, channels=_divide(self.channels, ranks, "channels"))


@dataclass(frozen=True, kw_only=True)
class Lightning(RecurrentKind):
    """Lightning attention (MiniMax): [heads, dim, dim] and no convolution."""

    heads: int
    dim: int
    state_dtype: str = "float32"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The recurrent state."""
        return (TensorSpec("recurrent", (self.heads, self.dim, self.dim), self.state_dtype),)

    def shard(self, ranks: int) -> Self:
        """Divide the heads. Errors: ConfigError."""
        return replace(self, heads=_divide(self.heads, ranks, "linear heads"))
