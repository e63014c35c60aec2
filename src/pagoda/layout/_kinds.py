"""The kinds of layers: one frozen description each, the source of every size in the house.

In: dimensions and dtypes of one layer; out: what it keeps in pages (`pages`), what it keeps a request
(`state`), and the same layer as one of several ranks holds it (`shard`).

    Kind
    ├── FullAttention            keys and values of every token
    ├── WindowAttention          of the last tokens, and of the first ones if they are sinks
    ├── LatentAttention          one vector a token for all heads; with or without indexer keys
    ├── SharedAttention          nothing: reads what another layer keeps
    ├── RingWindow               the last entries, in a ring of fixed size a request
    │   └── CompressedAttention  and an entry for every few tokens, and what is not yet compressed
    └── RecurrentKind            a state of fixed size a request
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
    """What a layer keeps in pages: the entries of its tensors, and how long each lives.

    `name` is what a group of such layers is called. One entry covers `ratio` tokens. With `window`, the
    query at position p reads positions p − window + 1 to p and the first `sink_tokens`, and nothing else
    has to be kept; without, all of it is kept."""

    name: str
    entries: tuple[Entry, ...]
    ratio: int = 1
    window: int | None = None
    sink_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """What one layer stores. Sizes are checked when it is made. Errors: ConfigError, naming the field.

    `pages` and `state` are computed once a value: many layers of a model are one and the same value."""

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
        """What is kept in pages, or None. O(1)."""
        return None

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """What is kept a request, of a size that does not depend on its length. O(1)."""
        return ()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the state without which a request cannot resume. O(1)."""
        return sum(part.num_bytes for part in self.state)

    @abstractmethod
    def shard(self, ranks: int) -> Self:
        """The layer as each of `ranks` tensor-parallel ranks holds it. O(1). Errors: ConfigError."""


def _split(number: int, ranks: int, what: str) -> int:
    """Heads of a rank: as many on each, or one on several when there are more ranks than heads."""
    if number % ranks == 0:
        return number // ranks
    if ranks % number == 0:
        return 1
    raise ConfigError(
        f"{number} {what} neither divide among {ranks} ranks nor can be repeated evenly on them: "
        f"give a number of ranks that divides {number} or is a multiple of it"
    )


def _divide(number: int, ranks: int, what: str) -> int:
    """As `_split`, for what is never repeated."""
    if number % ranks:
        raise ConfigError(f"{number} {what} do not divide among {ranks} ranks: give a divisor of {number}")
    return number // ranks


@dataclass(frozen=True, kw_only=True)
class FullAttention(Kind):
    """Keys and values of every token: `kv_heads` of `k_dim` and `v_dim`.

    Grouped attention has fewer KV heads than query heads; nothing else differs here. fp8 keeps a scale a
    layer, outside of pages."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str = "bfloat16"

    @cached_property
    def storage(self) -> Storage:
        """Keys and values. O(1)."""
        return Storage("full", self._entries())

    def _entries(self) -> tuple[Entry, ...]:
        keys = plain("keys", self.kv_heads, self.k_dim, self.dtype)
        return keys, plain("values", self.kv_heads, self.v_dim, self.dtype)

    def shard(self, ranks: int) -> Self:
        """KV heads divided, or repeated where ranks outnumber them. O(1). Errors: ConfigError."""
        return replace(self, kv_heads=_split(self.kv_heads, ranks, "KV heads"))


@dataclass(frozen=True, kw_only=True)
class WindowAttention(FullAttention):
    """Keys and values of the last `window` tokens, the newest one included, and of the first `sink_tokens`.

    Sinks that a model learns as one logit a head (GPT-OSS) are weights: they store nothing here.
    """

    window: int
    sink_tokens: int = field(default=0, metadata={"low": 0})

    @cached_property
    def storage(self) -> Storage:
        """Keys and values that live as long as a window reaches them. O(1)."""
        return Storage("window", self._entries(), window=self.window, sink_tokens=self.sink_tokens)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Kind):
    """One entry a token for all heads (MLA), and an indexer's key where attention is sparse.

    `entry` and `index` say which bytes (entries.py): plain, or with scales. Every rank keeps all of it.
    """

    entry: Entry
    index: Entry | None = None

    @cached_property
    def storage(self) -> Storage:
        """The latent entry, and the indexer's key. O(1)."""
        return Storage("latent", (self.entry,) if self.index is None else (self.entry, self.index))

    def shard(self, ranks: int) -> Self:
        """Itself: heads share one vector, so each rank needs it whole. O(1)."""
        return self


@dataclass(frozen=True, kw_only=True)
class SharedAttention(Kind):
    """Keeps nothing: reads the keys and values of `layer`, an earlier one."""

    layer: int = field(metadata={"low": 0})

    def shard(self, ranks: int) -> Self:
        """Itself. O(1)."""
        return self


@dataclass(frozen=True, kw_only=True)
class RingWindow(Kind):
    """The last `window` entries in a ring, a fixed size a request: how DeepSeek-V4 keeps its window.

    With `unaccepted` tokens written before the first of them is read or accepted, the ring is that much
    longer less one: otherwise a roll-back finds its rows overwritten. A position stands beside each row, −1
    where it holds none, so that what an earlier request or a roll-back left there is not taken for the
    window; a checkpoint needs no positions, because it knows its length."""

    entry: Entry
    window: int
    unaccepted: int = 1

    @property
    def ring(self) -> int:
        """Rows of the ring. O(1)."""
        return self.window + self.unaccepted - 1

    def _ring(self) -> tuple[TensorSpec, ...]:
        # Scales apart, so that the data of every row is aligned, however many rows there are.
        parts = [TensorSpec("window", (self.ring, self.entry.data_bytes), "uint8")]
        if self.entry.scale_bytes:
            parts.append(TensorSpec("window_scales", (self.ring, self.entry.scale_bytes), "uint8"))
        return *parts, TensorSpec("positions", (self.ring,), "int32", -1)

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The ring, as bytes, data and scales of each entry, and which position each row holds. O(1)."""
        return self._ring()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the window that the next token reads: one entry less than `window`. O(1)."""
        return (self.window - 1) * self.entry.num_bytes

    def shard(self, ranks: int) -> Self:
        """Itself: there is one KV head. O(1)."""
        return self


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(RingWindow):
    """A ring window, an entry for every `ratio` tokens, and the compressor's rows that feed it.

    With `overlap` (CSA) an entry is made of its own block and the one before: two projections a token, rows
    for two blocks. Without (HCA): one projection, rows for one. `index` is the indexer's key of an entry,
    which has a compressor of its own. Rows hold values and scores in float32; scores begin at −inf."""

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
    def rows(self) -> int:
        """Rows of the compressor: the tokens that an entry is made of, and those not yet accepted. O(1)."""
        return self.ratio * (2 if self.overlap else 1) + self.unaccepted - 1

    @cached_property
    def storage(self) -> Storage:
        """The compressed entry, and the indexer's key of it. O(1)."""
        entries = (self.entry,) if self.index is None else (self.entry, self.index)
        return Storage("csa" if self.overlap else "hca", entries, ratio=self.ratio)

    def _compressor(self, name: str, dim: int) -> tuple[TensorSpec, TensorSpec]:
        shape = (self.rows, dim * (2 if self.overlap else 1))
        return (
            TensorSpec(f"{name}_values", shape, "float32"),
            TensorSpec(f"{name}_scores", shape, "float32", float("-inf")),
        )

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The ring with its positions, and the compressors' rows. O(1)."""
        main = self._compressor("main", self.head_dim)
        index = self._compressor("index", self.index_dim) if self.index_dim else ()
        return (*self._ring(), *main, *index)

    @property
    def checkpoint_bytes(self) -> int:
        """The window, and with overlap the block before: what a resume at the end of a block needs. O(1)."""
        compressors = self.state[len(self._ring()) :] if self.overlap else ()
        row_bytes = sum(part.num_bytes // part.shape[0] for part in compressors)
        return super().checkpoint_bytes + self.ratio * row_bytes


@dataclass(frozen=True, kw_only=True)
class RecurrentKind(Kind):
    """A recurrent state, and the last inputs of a short convolution: fixed sizes a request.

    The convolution needs one column less than its kernel is long. Heads are divided among ranks.
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
        """Convolution and recurrent state. O(1)."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        recurrent = TensorSpec(
            "recurrent", (self.value_heads, self.key_dim, self.value_dim), self.state_dtype
        )
        return self._state(channels, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Heads divided. O(1). Errors: ConfigError."""
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
        """Convolution and recurrent state. O(1)."""
        recurrent = TensorSpec("recurrent", (self.heads, self.dim, self.dim), self.state_dtype)
        return self._state(3 * self.heads * self.dim, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Heads divided. O(1). Errors: ConfigError."""
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
        """Convolution and recurrent state. O(1)."""
        recurrent = TensorSpec("recurrent", (self.channels, self.state_dim), self.state_dtype)
        return self._state(self.channels, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Channels divided. O(1). Errors: ConfigError."""
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
        """Convolution and recurrent state. O(1)."""
        channels = self.heads * self.head_dim + 2 * self.groups * self.state_dim
        recurrent = TensorSpec("recurrent", (self.heads, self.head_dim, self.state_dim), self.state_dtype)
        return self._state(channels, self.kernel, self.dtype, recurrent)

    def shard(self, ranks: int) -> Self:
        """Heads divided; groups too, or one repeated on each rank. O(1). Errors: ConfigError."""
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
        """The convolution's last inputs. O(1)."""
        return self._state(self.channels, self.kernel, self.dtype)

    def shard(self, ranks: int) -> Self:
        """Channels divided. O(1). Errors: ConfigError."""
        return replace(self, channels=_divide(self.channels, ranks, "channels"))


@dataclass(frozen=True, kw_only=True)
class Lightning(RecurrentKind):
    """Lightning attention (MiniMax): [heads, dim, dim] and no convolution."""

    heads: int
    dim: int
    state_dtype: str = "float32"

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The recurrent state. O(1)."""
        return (TensorSpec("recurrent", (self.heads, self.dim, self.dim), self.state_dtype),)

    def shard(self, ranks: int) -> Self:
        """Heads divided. O(1). Errors: ConfigError."""
        return replace(self, heads=_divide(self.heads, ranks, "linear heads"))
