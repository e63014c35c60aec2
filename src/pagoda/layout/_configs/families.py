"""Model families: for each `model_type`, the kinds of its layers, how to read them, and config defaults.

To add a family, add an item to `FAMILIES`, or to `ALIASES` if it has the layers and defaults of another one.
A new kind of layer also needs a function in readers.py, a new order of layers one in patterns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.layout._configs import readers
from pagoda.layout._configs.fields import Fields
from pagoda.layout._configs.patterns import (
    Types,
    all_of,
    deepseek_v4,
    every,
    exaone4,
    full_at,
    gemma3,
    glm_moe_dsa,
    jamba,
    kimi,
    listed,
    llama4,
    minimax,
    nemotron_h,
    sliding_every_other,
    sliding_from_layer,
    sliding_if_given,
    smollm3,
    zamba2,
)
from pagoda.layout._configs.readers import Options
from pagoda.layout._kinds import Kind

__all__ = ["ALIASES", "FAMILIES", "Family"]

Reader = Callable[[Fields, Options], Kind]
Kinds = Mapping[str, tuple[Reader, ...]]


@dataclass(frozen=True)
class Family:
    """How to read the configs of one model type.

    `types` names the kind of each layer and `kinds` reads each kind. `defaults` are those of the family's
    config class: configs are saved without fields that equal a default. `context` is the longest context
    if the config does not specify one; 0 if its class does not either."""

    types: Types
    kinds: Kinds
    defaults: Mapping[str, Any] = field(default_factory=dict)
    context: int = 0


FULL = {"full_attention": (readers.attention,)}
SLIDING = {**FULL, "sliding_attention": (readers.sliding,)}
LATENT = {"full_attention": (readers.latent_attention,), "indexed_attention": (readers.indexed_attention,)}
GATED_DELTA = {**FULL, "linear_attention": (readers.gated_delta,)}
MAMBA1 = {"linear_attention": (readers.mamba1,)}
JAMBA = {**FULL, "linear_attention": (readers.expanded_mamba1,)}
MAMBA2: Kinds = {**FULL, "linear_attention": (readers.mamba2,), "mlp": (), "moe": ()}
MAMBA2_ALONE = {"linear_attention": (readers.mamba2_alone,)}
BOTH: Kinds = {**MAMBA2, "hybrid": (readers.attention, readers.mamba2)}
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

_VL = _sizes(80, 8192, 64, 8, use_sliding_window=False, sliding_window=4096, max_window_layers=80)
_full = all_of("full_attention")
_qwen = listed(sliding_from_layer)

FAMILIES: dict[str, Family] = {
    # Full and grouped attention, windows
    "llama": Family(_full, FULL, _sizes(32, 4096, 32), 2048),
    "mistral": Family(sliding_if_given, SLIDING, _sizes(32, 4096, 32, 8, sliding_window=4096), 131072),
    "mixtral": Family(sliding_if_given, SLIDING, _sizes(32, 4096, 32, 8), 131072),
    "ministral": Family(_sliding, SLIDING, _sizes(32, 4096, 32, 8, sliding_window=4096), 131072),
    "ministral3": Family(sliding_if_given, SLIDING, _sizes(34, 4096, 32, 8, head_dim=128), 262144),
    "qwen2": Family(_qwen, SLIDING, _sizes(32, 4096, 32, 32, **_WINDOW), 32768),
    "qwen2_vl_text": Family(_qwen, SLIDING, _VL, 32768),
    "qwen2_5_omni_text": Family(
        _qwen, SLIDING, _sizes(28, 3584, 28, 4, **{**_WINDOW, "sliding_window": 32768}), 32768
    ),
    "qwen2_moe": Family(listed(sliding_every_other), SLIDING, _sizes(24, 2048, 16, 16, **_WINDOW), 32768),
    "qwen3": Family(_qwen, SLIDING, _sizes(32, 4096, 32, 32, head_dim=128, **_WINDOW), 32768),
    "qwen3_vl_text": Family(_full, FULL, _sizes(32, 4096, 32, 32, head_dim=128), 128000),
    "qwen3_moe": Family(
        _sliding, SLIDING, _sizes(24, 2048, 32, 4, use_sliding_window=False, sliding_window=4096), 32768
    ),
    "qwen3_vl_moe_text": Family(_full, FULL, _sizes(24, 2048, 16, 16), 128000),
    "qwen3_omni_moe_text": Family(_full, FULL, _sizes(28, 2048, 28, 4), 32768),
    "gemma": Family(_full, FULL, _sizes(28, 3072, 16, 16, head_dim=256), 8192),
    "gemma2": Family(
        listed(every(2, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(26, 2304, 8, 4, head_dim=256, sliding_window=4096),
        8192,
    ),
    "gemma3_text": Family(
        listed(gemma3), SLIDING, _sizes(26, 2304, 8, 4, head_dim=256, sliding_window=4096), 131072
    ),
    "gemma3n_text": Family(
        listed(every(5, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(35, 2048, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=15),
        32768,
    ),
    "gpt_oss": Family(
        listed(every(2, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(36, 2880, 64, 8, head_dim=64, sliding_window=128),
        131072,
    ),
    "llama4_text": Family(
        listed(llama4),
        {**FULL, "chunked_attention": (readers.chunked,)},
        _sizes(48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192),
        131072,
    ),
    "cohere": Family(_full, FULL, _sizes(40, 8192, 64), 8192),
    "cohere2": Family(
        listed(every(4, "full_attention", "sliding_attention", "sliding_window_pattern")),
        SLIDING,
        _sizes(40, 8192, 64, None, sliding_window=4096),
        8192,
    ),
    "phi3": Family(sliding_if_given, SLIDING, _sizes(32, 3072, 32), 4096),
    "olmo3": Family(
        listed(every(4, "full_attention", "sliding_attention")),
        SLIDING,
        _sizes(32, 4096, 32, sliding_window=4096),
        2048,
    ),
    "olmoe": Family(_full, FULL, _sizes(16, 2048, 16), 4096),
    "smollm3": Family(listed(smollm3), SLIDING, _sizes(36, 2048, 16, 4), 32768),
    "exaone4": Family(listed(exaone4), SLIDING, _sizes(32, 4096, 32, 32, sliding_window=4096), 2048),
    "starcoder2": Family(sliding_if_given, SLIDING, _sizes(30, 3072, 24, 2), 4096),
    "gpt_neox": Family(_full, FULL, _sizes(44, 6144, 64), 2048),
    "apertus": Family(_full, FULL, _sizes(32, 4096, 32), 65536),
    "arcee": Family(_full, FULL, _sizes(32, 2560, 32), 4096),
    "ernie4_5": Family(_full, FULL, _sizes(18, 1024, 16, 2, head_dim=128), 131072),
    "ernie4_5_moe": Family(_full, FULL, _sizes(28, 2560, 20, 4), 131072),
    "seed_oss": Family(_full, FULL, _sizes(64, 4096, 80, 8, head_dim=128), 524288),
    "glm4": Family(_full, FULL, _sizes(40, 4096, 32, 2, head_dim=128), 131072),
    "glm4_moe": Family(_full, FULL, _sizes(46, 4096, 96, 8), 131072),
    "minimax_m2": Family(_full, FULL, _sizes(62, 3072, 48, 8, head_dim=128), 196608),
    # Latent attention
    "deepseek_v2": Family(_full, LATENT, {**_deepseek_v3, "num_hidden_layers": 32}, 2048),
    "deepseek_v3": Family(_full, LATENT, _deepseek_v3, 4096),
    "deepseek_v32": Family(
        listed(all_of("indexed_attention")), LATENT, {**_deepseek_v3, "index_head_dim": 128}, 163840
    ),
    "glm_moe_dsa": Family(
        glm_moe_dsa, LATENT, {**_deepseek_v3, "num_hidden_layers": 78, "index_head_dim": 128}, 202752
    ),
    # Compressed attention
    "deepseek_v4": Family(
        listed(deepseek_v4),
        COMPRESSED,
        {"num_hidden_layers": 43, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128},
        1048576,
    ),
    # Linear attention beside full or latent attention
    "qwen3_next": Family(_delta, GATED_DELTA, _sizes(48, 2048, 16, 2, head_dim=256, **_LINEAR), 32768),
    "qwen3_5_text": Family(_delta, GATED_DELTA, _sizes(32, 4096, 16, 4, head_dim=256, **_LINEAR), 32768),
    "qwen3_5_moe_text": Family(_delta, GATED_DELTA, _sizes(40, 2048, 16, 2, head_dim=256, **_LINEAR), 32768),
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
        1048576,
    ),
    "minimax": Family(
        listed(minimax), {**FULL, "linear_attention": (readers.lightning,)}, _sizes(32, 4096, 32, 8), 131072
    ),
    "lfm2": Family(
        listed(full_at("full_attn_idxs", "conv")), CONV, _sizes(32, 2560, 32, 8, conv_L_cache=3), 128000
    ),
    "lfm2_moe": Family(
        listed(full_at("full_attn_idxs", "conv")), CONV, _sizes(32, 2048, 32, 8, conv_L_cache=3), 128000
    ),
    # State spaces, alone and beside attention
    "mamba": Family(
        all_of("linear_attention"),
        MAMBA1,
        {"num_hidden_layers": 32, "hidden_size": 768, "state_size": 16, "expand": 2, "conv_kernel": 4},
    ),
    "mamba2": Family(
        all_of("linear_attention"),
        MAMBA2_ALONE,
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
        JAMBA,
        _sizes(32, 4096, 32, 8, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, **_MAMBA),
        262144,
    ),
    "bamba": Family(
        full_at("attn_layer_indices", "linear_attention"), MAMBA2, _sizes(32, 4096, 32, 8, **_BAMBA), 262144
    ),
    "granitemoehybrid": Family(
        listed(all_of("linear_attention")), MAMBA2, _sizes(32, 4096, 32, **_BAMBA), 2048
    ),
    "falcon_h1": Family(all_of("hybrid"), BOTH, _sizes(32, 4096, 32, 8, **_BAMBA, mamba_d_ssm=1024), 8192),
    "zamba2": Family(
        listed(zamba2),
        {**MAMBA2, "hybrid": (readers.wide_attention, readers.mamba2)},
        _sizes(54, 2560, 32, **_MAMBA, n_mamba_heads=8, mamba_ngroups=1, mamba_d_state=64),
        4096,
    ),
    # The pattern determines the number of layers.
    "nemotron_h": Family(
        listed(nemotron_h),
        {**MAMBA2, "full_attention": (readers.named_attention,)},
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
        4096,
    ),
}

# Model types with the layers and defaults of a family above.
ALIASES: dict[str, str] = {
    **dict.fromkeys(("granite", "granitemoe", "hunyuan_v1_dense", "olmo2"), "llama"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2_vl_text"),
    "glm": "glm4",
    "kimi_k2": "deepseek_v3",
    **dict.fromkeys(("minimax_m1", "minimax_text_01"), "minimax"),
    "falcon_mamba": "mamba",
}
