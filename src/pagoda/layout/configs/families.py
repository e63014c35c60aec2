"""The families: for each `model_type`, which kinds of layers it has, how to read them, what its configs
leave out.

To add a family, add a line to `FAMILIES`; for a kind of layer that is not here yet, a function to readers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.layout.configs import readers
from pagoda.layout.configs.fields import Fields
from pagoda.layout.configs.readers import Options
from pagoda.layout.kinds import Kind

__all__ = ["CONTEXTS", "FAMILIES", "Family"]

MAX_LAYERS = 10_000  # a config with more is no config

Types = Callable[[Fields], list[str]]
Reader = Callable[[Fields, Options], Kind]

# What older configs call the kinds of layers.
ALSO = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}


@dataclass(frozen=True)
class Family:
    """How to read the configs of one model type.

    `types` names the kind of each layer, `kinds` reads each kind; `defaults` are those of the family's
    config class, for configs are written without what equals a default."""

    types: Types
    kinds: Mapping[str, tuple[Reader, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=MAX_LAYERS)


def listed(otherwise: Types) -> Types:
    """The types that a config lists, by the names of today, or what `otherwise` derives."""

    def types(fields: Fields) -> list[str]:
        for name in ("layer_types", "layers_block_type"):
            found = fields.items(name)
            if found is not None:
                return [ALSO.get(str(each), str(each)) for each in found]
        return otherwise(fields)

    return types


def all_of(kind: str) -> Types:
    return lambda fields: [kind] * num_layers(fields)


def every(period: int, kind: str, others: str, period_field: str = "") -> Types:
    """The last layer of each `period` is of one kind, the rest of another."""

    def types(fields: Fields) -> list[str]:
        step = fields.integer(period_field, default=period) if period_field else period
        return [kind if (i + 1) % step == 0 else others for i in range(num_layers(fields))]

    return types


def sliding_if_given(fields: Fields) -> list[str]:
    """All layers slide if there is a window (Mistral), and if the config does not switch it off (Qwen)."""
    is_on = fields.has("sliding_window") and fields.get("use_sliding_window") is not False
    return ["sliding_attention" if is_on else "full_attention"] * num_layers(fields)


def sliding_from_layer(fields: Fields) -> list[str]:
    """Layers from `max_window_layers` on slide, if the config switches it on (Qwen2, Qwen3)."""
    is_on = fields.get("use_sliding_window") is True and bool(fields.get("sliding_window"))
    first = fields.integer("max_window_layers", low=0)
    n = num_layers(fields)
    return ["sliding_attention" if is_on and i >= first else "full_attention" for i in range(n)]


def sliding_every_other(fields: Fields) -> list[str]:
    """Every other layer before `max_window_layers` slides, if the config switches it on (Qwen2-MoE)."""
    is_on = fields.get("use_sliding_window") is True
    last = fields.integer("max_window_layers", low=0)
    n = num_layers(fields)
    return ["sliding_attention" if is_on and i % 2 == 0 and i < last else "full_attention" for i in range(n)]


def has_positions(fields: Fields) -> list[bool]:
    """Which layers rotate their keys: a list that says 1 for each that does, or all but the last of each
    `no_rope_layer_interval`."""
    given = fields.items("no_rope_layers")
    if given:
        return [bool(each) for each in given]
    step = fields.integer("no_rope_layer_interval", default=4)
    return [(i + 1) % step != 0 for i in range(num_layers(fields))]


def llama4(fields: Fields) -> list[str]:
    """Layers with positions attend within chunks."""
    return ["chunked_attention" if each else "full_attention" for each in has_positions(fields)]


def smollm3(fields: Fields) -> list[str]:
    """Layers without positions slide, if the config switches it on."""
    is_on = fields.get("use_sliding_window") is True and fields.has("sliding_window")
    return ["sliding_attention" if is_on and not each else "full_attention" for each in has_positions(fields)]


def gemma3(fields: Fields) -> list[str]:
    return every(6, "full_attention", "sliding_attention", "sliding_window_pattern")(fields)


def full_at(name: str, others: str) -> Types:
    """A list of the layers that have attention (Bamba, LFM2)."""

    def types(fields: Fields) -> list[str]:
        n = num_layers(fields)
        given = fields.integers(name)
        full = set(range(n) if given is None and others == "conv" else given or [])
        return ["full_attention" if i in full else others for i in range(n)]

    return types


def jamba(fields: Fields) -> list[str]:
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", low=0, high=period - 1)
    n = num_layers(fields)
    return ["full_attention" if i % period == offset else "linear_attention" for i in range(n)]


def kimi(fields: Fields) -> list[str]:
    """Checkpoints list their layers, counted from 1."""
    n = num_layers(fields)
    own = fields.inner("linear_attn_config")
    full = own.integers("full_attn_layers") if own is not None else None
    if full is None:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(n)]
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(n)]


def minimax(fields: Fields) -> list[str]:
    """0 is lightning attention, 1 full attention."""
    given = fields.integers("attn_type_list")
    if given is not None:
        return [{0: "linear_attention", 1: "full_attention"}.get(each, str(each)) for each in given]
    return every(2, "linear_attention", "full_attention")(fields)


def zamba2(fields: Fields) -> list[str]:
    """Zamba2-2.7B's own pattern, which its config leaves out."""
    plain, hybrid = ["linear_attention"], ["hybrid"]
    return [*plain, *((plain * 5 + hybrid) * 7), *plain * 4, *hybrid, *plain * 3, *hybrid, *plain * 2]


def nemotron_h(fields: Fields) -> list[str]:
    """A letter a layer; without, the four layers that the config class takes."""
    pattern = fields.get("hybrid_override_pattern") or "ME*-"
    if not isinstance(pattern, str):
        raise fields.error(f"hybrid_override_pattern should be letters, not {str(pattern)[:40]!r}")
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [names.get(letter, letter) for letter in pattern]


def deepseek_v4(fields: Fields) -> list[str]:
    """A ratio a layer; what follows the last layer belongs to layers that predict further tokens. Without,
    two layers of the highest ratio, then both in turn."""
    n = num_layers(fields)
    ratios = fields.integers("compress_ratios")
    if ratios is None:
        ratios = [128 if i < 2 or i % 2 == 0 else 4 for i in range(n)]
    names = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    return [names.get(ratio, f"compressed by {ratio}") for ratio in ratios[:n]]


FULL = {"full_attention": (readers.attention,)}
SLIDING = {**FULL, "sliding_attention": (readers.sliding,)}
LATENT = {"full_attention": (readers.latent_attention,), "indexed_attention": (readers.latent_attention,)}
GATED_DELTA = {**FULL, "linear_attention": (readers.gated_delta,)}
MAMBA1 = {**FULL, "linear_attention": (readers.mamba1,)}
MAMBA2 = {**FULL, "linear_attention": (readers.mamba2,), "mlp": (), "moe": ()}
BOTH = {**MAMBA2, "hybrid": (readers.attention, readers.mamba2)}
CONV = {**FULL, "conv": (readers.short_conv,)}
COMPRESSED = {
    "sliding_attention": (readers.ring_window,),
    "compressed_sparse_attention": (readers.compressed_sparse,),
    "heavily_compressed_attention": (readers.heavily_compressed,),
}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: dict[str, Any] = {"mamba_d_conv": 4, "mamba_expand": 2}
_BAMBA: dict[str, Any] = {
    **_MAMBA,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_sliding = listed(sliding_if_given)
_delta = listed(every(4, "full_attention", "linear_attention", "full_attention_interval"))
_deepseek_v3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

FAMILIES: dict[str, Family] = {
    # Full and grouped attention, windows
    "llama": Family(all_of("full_attention"), FULL, _sizes(32, 4096, 32)),
    "mistral": Family(sliding_if_given, SLIDING, _sizes(32, 4096, 32, 8, sliding_window=4096)),
    "mixtral": Family(sliding_if_given, SLIDING, _sizes(32, 4096, 32, 8)),
    "ministral": Family(_sliding, SLIDING, _sizes(32, 4096, 32, 8, sliding_window=4096)),
    "qwen2": Family(listed(sliding_from_layer), SLIDING, _sizes(32, 4096, 32, 32, **_WINDOW)),
    "qwen2_moe": Family(listed(sliding_every_other), SLIDING, _sizes(24, 2048, 16, 16, **_WINDOW)),
    "qwen3": Family(listed(sliding_from_layer), SLIDING, _sizes(32, 4096, 32, 32, head_dim=128, **_WINDOW)),
    "qwen3_moe": Family(
        _sliding, SLIDING, _sizes(24, 2048, 32, 4, use_sliding_window=False, sliding_window=4096)
    ),
    "gemma": Family(all_of("full_attention"), FULL, _sizes(28, 3072, 16, 16, head_dim=256)),
    "gemma2": Family(
        listed(every(2, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(26, 2304, 8, 4, head_dim=256, sliding_window=4096),
    ),
    "gemma3_text": Family(listed(gemma3), SLIDING, _sizes(26, 2304, 8, 4, head_dim=256, sliding_window=4096)),
    "gemma3n_text": Family(
        listed(every(5, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(35, 2048, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=15),
    ),
    "gpt_oss": Family(
        listed(every(2, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(36, 2880, 64, 8, head_dim=64, sliding_window=128),
    ),
    "llama4_text": Family(
        listed(llama4),
        {**FULL, "chunked_attention": (readers.chunked,)},
        _sizes(48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192),
    ),
    "cohere2": Family(
        listed(every(4, "full_attention", "sliding_attention", "sliding_window_pattern")),
        SLIDING,
        _sizes(40, 8192, 64, None, sliding_window=4096),
    ),
    "phi3": Family(sliding_if_given, SLIDING, _sizes(32, 3072, 32)),
    "olmo2": Family(all_of("full_attention"), FULL, _sizes(32, 4096, 32)),
    "olmo3": Family(
        listed(every(4, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(32, 4096, 32, sliding_window=4096),
    ),
    "smollm3": Family(listed(smollm3), SLIDING, _sizes(36, 2048, 16, 4)),
    "granite": Family(all_of("full_attention"), FULL, _sizes(32, 4096, 32)),
    "glm4_moe": Family(all_of("full_attention"), FULL, _sizes(46, 4096, 96, 8)),
    "minimax_m2": Family(all_of("full_attention"), FULL, _sizes(62, 3072, 48, 8, head_dim=128)),
    # Latent attention
    "deepseek_v2": Family(all_of("full_attention"), LATENT, {**_deepseek_v3, "num_hidden_layers": 32}),
    "deepseek_v3": Family(all_of("full_attention"), LATENT, _deepseek_v3),
    "kimi_k2": Family(all_of("full_attention"), LATENT, _deepseek_v3),
    "deepseek_v32": Family(
        listed(all_of("indexed_attention")), LATENT, {**_deepseek_v3, "index_head_dim": 128}
    ),
    # Compressed attention
    "deepseek_v4": Family(
        listed(deepseek_v4),
        COMPRESSED,
        {"num_hidden_layers": 43, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128},
    ),
    # Linear attention beside full or latent attention
    "qwen3_next": Family(_delta, GATED_DELTA, _sizes(48, 2048, 16, 2, head_dim=256, **_LINEAR)),
    "qwen3_5_text": Family(_delta, GATED_DELTA, _sizes(32, 4096, 16, 4, head_dim=256, **_LINEAR)),
    "qwen3_5_moe_text": Family(_delta, GATED_DELTA, _sizes(40, 2048, 16, 2, head_dim=256, **_LINEAR)),
    "kimi_linear": Family(
        listed(kimi),
        {**LATENT, "linear_attention": (readers.kimi_delta,)},
        {
            "num_hidden_layers": 27,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "minimax": Family(
        listed(minimax), {**FULL, "linear_attention": (readers.lightning,)}, _sizes(32, 4096, 32, 8)
    ),
    "minimax_text_01": Family(
        listed(minimax), {**FULL, "linear_attention": (readers.lightning,)}, _sizes(32, 4096, 32, 8)
    ),
    "lfm2": Family(listed(full_at("full_attn_idxs", "conv")), CONV, _sizes(32, 2560, 32, 8, conv_L_cache=3)),
    "lfm2_moe": Family(
        listed(full_at("full_attn_idxs", "conv")), CONV, _sizes(32, 2048, 32, 8, conv_L_cache=3)
    ),
    # State spaces, alone and beside attention
    "mamba": Family(
        all_of("linear_attention"),
        MAMBA1,
        {"num_hidden_layers": 32, "hidden_size": 768, "state_size": 16, "expand": 2, "conv_kernel": 4},
    ),
    "falcon_mamba": Family(
        all_of("linear_attention"),
        MAMBA1,
        {"num_hidden_layers": 32, "hidden_size": 768, "state_size": 16, "expand": 2, "conv_kernel": 4},
    ),
    "mamba2": Family(
        all_of("linear_attention"),
        MAMBA2,
        {
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
    ),
    "jamba": Family(
        jamba,
        MAMBA1,
        _sizes(32, 4096, 32, 8, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, **_MAMBA),
    ),
    "bamba": Family(
        full_at("attn_layer_indices", "linear_attention"), MAMBA2, _sizes(32, 4096, 32, 8, **_BAMBA)
    ),
    "granitemoehybrid": Family(listed(all_of("linear_attention")), MAMBA2, _sizes(32, 4096, 32, **_BAMBA)),
    "falcon_h1": Family(all_of("hybrid"), BOTH, _sizes(32, 4096, 32, 8, **_BAMBA, mamba_d_ssm=1024)),
    "zamba2": Family(
        listed(zamba2),
        {**MAMBA2, "hybrid": (readers.wide_attention, readers.mamba2)},
        _sizes(54, 2560, 32, **_MAMBA, n_mamba_heads=8, mamba_ngroups=1, mamba_d_state=64),
    ),
    "nemotron_h": Family(
        listed(nemotron_h),
        MAMBA2,
        {
            **_sizes(52, 4096, 32, 8, head_dim=128),
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
    ),
}

# The longest context where a config does not say: what its class says.
CONTEXTS = {
    **dict.fromkeys(("llama", "olmo2", "olmo3", "granite", "granitemoehybrid", "deepseek_v2"), 2048),
    **dict.fromkeys(("phi3", "deepseek_v3", "zamba2", "nemotron_h"), 4096),
    **dict.fromkeys(("gemma", "gemma2", "cohere2", "falcon_h1"), 8192),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), 32768),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "gemma3n_text", "smollm3"), 32768),
    **dict.fromkeys(("lfm2", "lfm2_moe"), 128000),
    **dict.fromkeys(("mistral", "mixtral", "ministral", "gemma3_text", "gpt_oss"), 131072),
    **dict.fromkeys(("llama4_text", "glm4_moe", "minimax"), 131072),
    "deepseek_v32": 163840,
    "minimax_m2": 196608,
    **dict.fromkeys(("jamba", "bamba"), 262144),
    **dict.fromkeys(("deepseek_v4", "kimi_linear"), 1048576),
}
