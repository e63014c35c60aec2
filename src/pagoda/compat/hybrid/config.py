"""The description of a compressed-attention model, `DSV4Config`, and of its cached layers, `LayerSpec`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from pagoda.errors import ConfigError
from pagoda.layout import (
    CompressedAttention,
    Entry,
    Layout,
    RingWindow,
    compressed_fp8,
    from_hf,
    index_keys,
    model_config,
)
from pagoda.layout._configs.fields import Fields
from pagoda.layout._numbers import count, show

__all__ = ["AttentionType", "DSV4Config", "LayerSpec", "read_schedule"]


class AttentionType(Enum):
    """What a layer reads: SWA only its window, CSA also entries that an indexer picks, HCA all entries."""

    SWA = "swa"
    CSA = "csa"
    HCA = "hca"


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a schedule: its number in the model, and its kind, an `AttentionType` or its value.

    Errors: ConfigError.
    """

    layer_idx: int
    attn_type: AttentionType

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_idx", count(self.layer_idx, "layer_idx", low=0))
        try:
            object.__setattr__(self, "attn_type", AttentionType(self.attn_type))
        except ValueError:
            raise ConfigError(
                f"attn_type: give AttentionType.SWA, CSA or HCA, not {show(self.attn_type)}"
            ) from None


def read_schedule(schedule: Any) -> list[LayerSpec]:
    """Return the layers of a schedule. Errors: ConfigError if it is empty, or has invalid or equal layers."""
    if isinstance(schedule, (str, LayerSpec)) or not isinstance(schedule, Iterable):
        raise ConfigError(f"schedule: give a list of LayerSpec, not {type(schedule).__name__}")
    specs = list(schedule)
    if not specs:
        raise ConfigError("schedule: give at least one layer")
    for spec in specs:
        if not isinstance(spec, LayerSpec):
            raise ConfigError(f"schedule: give one LayerSpec per layer, not {type(spec).__name__}")
    numbers = [spec.layer_idx for spec in specs]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ConfigError(f"schedule: layer {twice} is duplicated: give each layer once")
    return specs


@dataclass(frozen=True, kw_only=True)
class DSV4Config:
    """The sizes of a DeepSeek-V4 model and of its cache.

    `compress_ratios` has one number per layer: 0 for a window only, `csa_ratio` or `hca_ratio`. `entry` and
    `index` are the byte layouts of an entry and of an indexer's key, by default the model's own: fp8 with
    scales. A block covers `block_tokens` tokens. Up to `unaccepted` tokens are written before they are
    accepted; rings and compressors are longer by `unaccepted` − 1.

    Errors: ConfigError, naming the field.
    """

    num_layers: int
    num_query_heads: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    head_dim: int = 512
    rope_dim: int = 64
    window: int = 128
    csa_ratio: int = 4
    hca_ratio: int = 128
    index_head_dim: int = 128
    block_tokens: int = 128
    # By default, these follow from the dimensions above.
    entry: Entry = None  # type: ignore[assignment]
    index: Entry = None  # type: ignore[assignment]
    unaccepted: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type == "int":
                object.__setattr__(self, each.name, count(getattr(self, each.name), each.name))
        if self.rope_dim >= self.head_dim:
            raise ConfigError(f"rope_dim: give less than head_dim = {self.head_dim}, not {self.rope_dim}")
        own = {
            "entry": compressed_fp8(self.head_dim, self.rope_dim),
            "index": index_keys(self.index_head_dim, "fp8"),
        }
        for name, made in own.items():
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, made)
            elif not isinstance(given, Entry):
                raise ConfigError(f"{name}: give an Entry, not {type(given).__name__}")
        object.__setattr__(self, "compress_ratios", self._read_ratios())
        used = math.lcm(*(ratio for ratio in self.compress_ratios if ratio))
        if self.block_tokens % used:
            raise ConfigError(
                f"block_tokens: give a multiple of {used}, where entries of all ratios end, "
                f"not {self.block_tokens}"
            )

    def _read_ratios(self) -> tuple[int, ...]:
        given: Any = self.compress_ratios
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigError(f"compress_ratios: give one ratio per layer, not {type(given).__name__}")
        ratios = tuple(count(ratio, "compress_ratios", low=0) for ratio in given)
        if len(ratios) != self.num_layers:
            raise ConfigError(f"compress_ratios: give {self.num_layers}, one per layer, not {len(ratios)}")
        known = (0, self.csa_ratio, self.hca_ratio)
        for ratio in ratios:
            if ratio not in known:
                raise ConfigError(f"compress_ratios: give 0, csa_ratio or hca_ratio, {known}, not {ratio}")
        if self.csa_ratio == self.hca_ratio and any(ratios):
            raise ConfigError(f"csa_ratio and hca_ratio are both {self.csa_ratio}: give different ratios")
        return ratios

    @classmethod
    def flash(cls) -> DSV4Config:
        """DeepSeek-V4-Flash: 43 layers, 64 query heads."""
        return cls.from_hf(model_config("deepseek-v4-flash"))

    @classmethod
    def pro(cls) -> DSV4Config:
        """DeepSeek-V4-Pro: 61 layers, 128 query heads."""
        return cls.from_hf(model_config("deepseek-v4-pro"))

    @classmethod
    def from_hf(
        cls,
        config: Any,
        *,
        kv_dtype: Any = "auto",
        index_dtype: Any = "auto",
        block_tokens: int | None = None,
        unaccepted: int = 1,
    ) -> DSV4Config:
        """Read a Hugging Face config: the object, its dict, or the path of its config.json.

        `kv_dtype` and `index_dtype` are as in `pagoda.from_hf`. `block_tokens` is by default the smallest
        number from 128 on at which entries of all ratios end. Errors: ConfigError, also for a model without
        compressed attention.
        """
        layers = [
            _only_ring(kinds)
            for kinds in from_hf(
                config, kv_dtype=kv_dtype, index_dtype=index_dtype, unaccepted=unaccepted
            ).layers
        ]
        # The fp8 entry has the rotated part separately, whichever entry was asked for.
        flat, rope = (part.shape[0] for part in _only_ring(from_hf(config).layers[0]).entry.parts)
        fields = Fields.read(config).text()
        compressed = [kind for kind in layers if isinstance(kind, CompressedAttention)]
        csa = next((kind for kind in compressed if kind.overlap), None)
        hca = next((kind for kind in compressed if not kind.overlap), None)
        step = math.lcm(*(kind.ratio for kind in compressed))
        return cls(
            num_layers=len(layers),
            num_query_heads=fields.integer("num_attention_heads", default=64),
            index_topk=fields.integer("index_topk", default=512),
            compress_ratios=tuple(getattr(kind, "ratio", 0) for kind in layers),
            head_dim=flat + rope,
            rope_dim=rope,
            window=layers[0].window,
            csa_ratio=4 if csa is None else csa.ratio,
            hca_ratio=128 if hca is None else hca.ratio,
            index_head_dim=128 if csa is None else csa.index_dim,
            block_tokens=-(-128 // step) * step if block_tokens is None else block_tokens,
            entry=layers[0].entry,
            index=None if csa is None else csa.index,  # type: ignore[arg-type]
            unaccepted=unaccepted,
        )

    def schedule(self) -> list[LayerSpec]:
        """Return every layer of the model, in order."""
        types = {self.hca_ratio: AttentionType.HCA, self.csa_ratio: AttentionType.CSA, 0: AttentionType.SWA}
        return [LayerSpec(number, types[ratio]) for number, ratio in enumerate(self.compress_ratios)]

    def kind(self, attn_type: AttentionType) -> RingWindow:
        """Return what a layer of this kind stores, the source of all its sizes. Errors: ConfigError."""
        spec = LayerSpec(0, attn_type)
        if spec.attn_type is AttentionType.SWA:
            return RingWindow(entry=self.entry, window=self.window, unaccepted=self.unaccepted)
        is_csa = spec.attn_type is AttentionType.CSA
        return CompressedAttention(
            entry=self.entry,
            window=self.window,
            unaccepted=self.unaccepted,
            head_dim=self.head_dim,
            ratio=self.csa_ratio if is_csa else self.hca_ratio,
            overlap=is_csa,
            index=self.index if is_csa else None,
            index_dim=self.index_head_dim if is_csa else 0,
        )

    def layout(self, schedule: Sequence[LayerSpec] | None = None) -> Layout:
        """Return the layout of a schedule, by default of the whole model, with layers numbered in its order.

        Errors: ConfigError.
        """
        specs = self.schedule() if schedule is None else read_schedule(schedule)
        kinds = {attn_type: self.kind(attn_type) for attn_type in AttentionType}
        return Layout([kinds[spec.attn_type] for spec in specs], self.block_tokens)


def _only_ring(kinds: Sequence[object]) -> RingWindow:
    if len(kinds) == 1 and isinstance(kinds[0], RingWindow):
        return kinds[0]
    found = ", ".join(type(kind).__name__ for kind in kinds) or "nothing"
    raise ConfigError(f"config: give one of a compressed-attention model: a layer of this one stores {found}")
