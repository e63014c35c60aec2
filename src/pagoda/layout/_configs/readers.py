"""Reads kinds of layers. In: the fields of a config, options; out: what such a layer stores.

Each function reads one kind of layer; families.py says which ones a family uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagoda.errors import ConfigError
from pagoda.layout._configs.fields import Fields
from pagoda.layout._entries import (
    KV_DTYPES,
    Entry,
    compressed_fp8,
    dtype_name,
    index_keys,
    latent,
    latent_fp8,
    plain,
)
from pagoda.layout._kinds import (
    CompressedAttention,
    FullAttention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    Lightning,
    Mamba1,
    Mamba2,
    RingWindow,
    ShortConv,
    WindowAttention,
)

__all__ = [
    "Options",
    "attention",
    "chunked",
    "compressed_sparse",
    "expanded_mamba1",
    "gated_delta",
    "heavily_compressed",
    "indexed_attention",
    "kimi_delta",
    "latent_attention",
    "lightning",
    "mamba1",
    "mamba2",
    "mamba2_alone",
    "named_attention",
    "ring_window",
    "short_conv",
    "sliding",
    "wide_attention",
]


@dataclass(frozen=True)
class Options:
    """What a config does not specify: dtypes of the stored tensors ('auto' means the model's own), and how
    many tokens are written before they are accepted."""

    kv_dtype: str = "auto"
    index_dtype: str = "auto"
    state_dtype: str = "auto"
    unaccepted: int = 1

    def stored(self, fields: Fields) -> str:
        """Return the dtype of keys and values."""
        if self.kv_dtype == "fp8_ds_mla":
            raise self.not_latent(fields)
        return self.computed(fields) if self.kv_dtype == "auto" else self.kv_dtype

    def not_latent(self, fields: Fields) -> ConfigError:
        """Return the error for a model without latent attention."""
        return ConfigError(f"kv_dtype: 'fp8_ds_mla' is for latent attention, not for {fields.model_type}")

    def computed(self, fields: Fields) -> str:
        """Return the dtype of the model itself, bfloat16 if the config does not specify it."""
        for name in ("dtype", "torch_dtype"):
            if fields.has(name) and fields.get(name) != "auto":
                return dtype_name(fields.get(name), f"{name} of {fields.where}", KV_DTYPES)
        return "bfloat16"

    def recurrent(self, fields: Fields) -> str:
        """Return the dtype of recurrent states: float32 by default, because rounding errors accumulate."""
        if self.state_dtype != "auto":
            return self.state_dtype
        for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
            if fields.has(name) and fields.get(name) != "auto":
                return dtype_name(fields.get(name), f"{name} of {fields.where}", KV_DTYPES)
        return "float32"


def _head_dim(fields: Fields) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    return _dim_of_heads(fields, 1)


def _dim_of_heads(fields: Fields, width: int) -> int:
    """Return the head dimension if all heads together are `width` times the hidden size wide."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dim = width * hidden // heads  # rounded down, as the models do
    if dim == 0:
        raise fields.error(f"num_attention_heads = {heads} is too large for hidden_size = {hidden}")
    return dim


def _kv_heads(fields: Fields) -> int:
    if fields.has("num_key_value_heads"):
        return fields.integer("num_key_value_heads")
    return fields.integer("num_attention_heads")


def attention(fields: Fields, options: Options) -> FullAttention:
    """Keys and values."""
    dim = _head_dim(fields)
    return FullAttention(kv_heads=_kv_heads(fields), k_dim=dim, v_dim=dim, dtype=options.stored(fields))


def wide_attention(fields: Fields, options: Options) -> FullAttention:
    """Keys and values of Zamba2: twice as wide, because its blocks read two inputs."""
    dim = fields.integer("attention_head_dim", default=0, low=0)
    dim = dim or _dim_of_heads(fields, 2)
    return FullAttention(kv_heads=_kv_heads(fields), k_dim=dim, v_dim=dim, dtype=options.stored(fields))


def named_attention(fields: Fields, options: Options) -> FullAttention:
    """Keys and values of Nemotron-H, whose first configs have another name for the head dimension."""
    dim = fields.integer("head_dim", "attention_head_dim", default=128)
    return FullAttention(kv_heads=_kv_heads(fields), k_dim=dim, v_dim=dim, dtype=options.stored(fields))


def sliding(fields: Fields, options: Options, window: str = "sliding_window") -> WindowAttention:
    """Keys and values within a window."""
    full = attention(fields, options)
    return WindowAttention(
        kv_heads=full.kv_heads,
        k_dim=full.k_dim,
        v_dim=full.v_dim,
        dtype=full.dtype,
        window=fields.integer(window),
    )


def chunked(fields: Fields, options: Options) -> WindowAttention:
    """Attention within chunks (Llama 4): a window of one chunk keeps everything that a query can read."""
    return sliding(fields, options, window="attention_chunk_size")


def latent_attention(fields: Fields, options: Options) -> LatentAttention:
    """One vector per token."""
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", low=0)
    # Sparse kernels read fp8 in one format only, so that is what 'fp8' means for models with an indexer.
    is_sparse = fields.has("index_head_dim") and options.kv_dtype == "float8_e4m3fn"
    if options.kv_dtype == "fp8_ds_mla" or is_sparse:
        if rope == 0:
            raise fields.error("qk_rope_head_dim = 0: 'fp8_ds_mla' needs a rotated part")
        return LatentAttention(entry=latent_fp8(rank, rope))
    return LatentAttention(entry=latent(rank, rope, options.stored(fields)))


def indexed_attention(fields: Fields, options: Options) -> LatentAttention:
    """One vector per token, and an indexer's key."""
    dtype = "fp8" if options.index_dtype == "auto" else options.index_dtype
    index = index_keys(fields.integer("index_head_dim"), dtype)
    return replace(latent_attention(fields, options), index=index)


def _compressed_entry(fields: Fields, options: Options) -> Entry:
    head_dim = fields.integer("head_dim")
    if fields.has("qk_rope_head_dim"):
        rope_dim = fields.integer("qk_rope_head_dim")
    else:
        rope_dim = int(head_dim * fields.number("partial_rotary_factor", 64 / 512))
    if not 0 < rope_dim < head_dim:
        raise fields.error(
            f"qk_rope_head_dim, or partial_rotary_factor × head_dim, is {rope_dim}: "
            f"it should be from 1 to {head_dim - 1}, less than head_dim"
        )
    if options.kv_dtype in ("auto", "float8_e4m3fn"):
        return compressed_fp8(head_dim, rope_dim)
    if options.kv_dtype == "float8_e5m2":
        raise ConfigError(
            f"kv_dtype: entries of {fields.model_type} are 'fp8' (auto, e4m3 with scales), 'bf16', 'fp16' or "
            f"'fp32', not 'fp8_e5m2'"
        )
    return plain("compressed", 1, head_dim, options.stored(fields))


def ring_window(fields: Fields, options: Options) -> RingWindow:
    """A layer of DeepSeek-V4 with a window only."""
    return RingWindow(
        entry=_compressed_entry(fields, options),
        window=fields.integer("sliding_window"),
        unaccepted=options.unaccepted,
    )


def _compressed(fields: Fields, options: Options, rate: str, old: str, default: int) -> CompressedAttention:
    rates = fields.inner("compress_rates")
    has_index = rate == "compressed_sparse_attention"
    dim = fields.integer("index_head_dim") if has_index else 0
    dtype = "fp8" if options.index_dtype == "auto" else options.index_dtype
    return CompressedAttention(
        entry=_compressed_entry(fields, options),
        window=fields.integer("sliding_window"),
        unaccepted=options.unaccepted,
        head_dim=fields.integer("head_dim"),
        ratio=fields.integer(old, default=default) if rates is None else rates.integer(rate, default=default),
        overlap=has_index,
        index=index_keys(dim, dtype) if has_index else None,
        index_dim=dim,
    )


def compressed_sparse(fields: Fields, options: Options) -> CompressedAttention:
    """CSA: overlapping blocks of 4 tokens, with an indexer that selects among their entries."""
    return _compressed(fields, options, "compressed_sparse_attention", "compress_rate_csa", 4)


def heavily_compressed(fields: Fields, options: Options) -> CompressedAttention:
    """HCA: blocks of 128 tokens, all entries read."""
    return _compressed(fields, options, "heavily_compressed_attention", "compress_rate_hca", 128)


def gated_delta(fields: Fields, options: Options) -> GatedDelta:
    """Gated delta net."""
    return GatedDelta(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim"),
        dtype=options.computed(fields),
        state_dtype=options.recurrent(fields),
    )


def kimi_delta(fields: Fields, options: Options) -> KimiDelta:
    """Kimi delta attention; published configs have its sizes in `linear_attn_config`."""
    own = fields.inner("linear_attn_config") or Fields({}, f"linear_attn_config of {fields.where}")
    return KimiDelta(
        heads=own.integer("num_heads", default=0, low=0) or fields.integer("linear_num_heads"),
        dim=own.integer("head_dim", default=0, low=0) or fields.integer("linear_head_dim"),
        kernel=own.integer("short_conv_kernel_size", default=0, low=0)
        or fields.integer("linear_conv_kernel_dim"),
        dtype=options.computed(fields),
        state_dtype=options.recurrent(fields),
    )


def _expanded(fields: Fields) -> int:
    """The width of a Mamba block."""
    return fields.integer("mamba_expand", "expand") * fields.integer("hidden_size")


def expanded_mamba1(fields: Fields, options: Options) -> Mamba1:
    """Mamba-1 of a hybrid (Jamba), whose `intermediate_size` is the width of its MLPs instead."""
    return _mamba1(fields, options, _expanded(fields))


def mamba1(fields: Fields, options: Options) -> Mamba1:
    """Mamba-1: its width is `intermediate_size`, which may differ from `expand` (Falcon-Mamba)."""
    width = fields.integer("intermediate_size") if fields.has("intermediate_size") else _expanded(fields)
    return _mamba1(fields, options, width)


def _mamba1(fields: Fields, options: Options, channels: int) -> Mamba1:
    return Mamba1(
        channels=channels,
        state_dim=fields.integer("mamba_d_state", "state_size"),
        kernel=fields.integer("mamba_d_conv", "conv_kernel"),
        dtype=options.computed(fields),
        state_dtype=options.recurrent(fields),
    )


def mamba2_alone(fields: Fields, options: Options) -> Mamba2:
    """Mamba-2 without attention, where `head_dim` is that of Mamba."""
    return mamba2(fields, options, "head_dim")


def mamba2(fields: Fields, options: Options, dim: str = "mamba_head_dim") -> Mamba2:
    """Mamba-2 of a hybrid, with the field names of Bamba, Zamba2, Falcon-H1 or Nemotron-H."""
    heads = fields.integer("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    names = [name for name in ("mamba_d_head", "mamba_headdim", dim) if fields.has(name)]
    if names and fields.get(names[0]) != "auto":
        head_dim = fields.integer(names[0])
    else:
        width = fields.integer("mamba_d_ssm", default=0, low=0) or _expanded(fields)
        if width % heads:
            raise fields.error(f"{heads} Mamba heads do not divide a width of {width}")
        head_dim = width // heads
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=fields.integer("mamba_n_groups", "mamba_ngroups", "n_groups"),
        state_dim=fields.integer("mamba_d_state", "ssm_state_size", "state_size"),
        kernel=fields.integer("mamba_d_conv", "conv_kernel"),
        dtype=options.computed(fields),
        state_dtype=options.recurrent(fields),
    )


def short_conv(fields: Fields, options: Options) -> ShortConv:
    """A short convolution."""
    return ShortConv(
        channels=fields.integer("hidden_size"),
        kernel=fields.integer("conv_L_cache"),
        dtype=options.computed(fields),
    )


def lightning(fields: Fields, options: Options) -> Lightning:
    """Lightning attention: one state per query head."""
    return Lightning(
        heads=fields.integer("num_attention_heads"),
        dim=_head_dim(fields),
        state_dtype=options.recurrent(fields),
    )
