"""Tiny models of every family that layouts know: a config each, and a random model made from it.

In: the name of a case, a dtype; out: a transformers config, a model. A config has a few layers, every kind of
layer of its family, and sizes that differ from one another, so that heads, dimensions, groups, widths of
convolutions and factors cannot be taken for each other unseen. Nothing is downloaded and nothing asserted.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["TINY", "VOCABULARY", "WINDOW", "Tiny", "config_class", "tiny_config", "tiny_model", "tokens"]

VOCABULARY = 64
# Text of models that hear: transformers builds it only as a part of the whole.
TEXT_PARTS = {
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
}
WINDOW = 12  # of every window and chunk, so that one length lies at its edge in all families


@dataclass(frozen=True)
class Tiny:
    """A case: which family, and the fields of its config."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)


def _fields(base: dict[str, Any], *without: str, **more: Any) -> dict[str, Any]:
    return {**{name: value for name, value in base.items() if name not in without}, **more}


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE = {
    **_TOKENS,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}
_WIDE = {**_BASE, "head_dim": 14}  # 6 × 14 is not the hidden size
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEP_MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT = {
    **_fields(_BASE, num_key_value_heads=6),
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 18,
}
_INDEX = {"index_n_heads": 2, "index_head_dim": 22, "index_topk": 8}
_DELTA = {
    **_WIDE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
_MAMBA1 = {
    **_TOKENS,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "state_size": 10,
    "expand": 3,
    "conv_kernel": 5,
    "time_step_rank": 7,
}
# 9 heads of 16 are three times the hidden size.
_BAMBA = {
    **_BASE,
    "mamba_n_heads": 9,
    "mamba_d_head": 16,
    "mamba_d_state": 10,
    "mamba_n_groups": 3,
    "mamba_d_conv": 5,
    "mamba_expand": 3,
    "mamba_chunk_size": 8,
}
_ZAMBA2 = {
    **_BASE,
    "num_key_value_heads": 6,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "mamba_d_state": 10,
    "mamba_d_conv": 5,
    "mamba_expand": 3,
    "n_mamba_heads": 9,
    "mamba_ngroups": 3,
    "chunk_size": 8,
    "num_mem_blocks": 1,
}
_MINIMAX = {
    **_WIDE,
    **_LOCAL_MOE,
    "block_size": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_LFM2 = {**_BASE, "conv_L_cache": 5, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_DEEPSEEK_V4 = {
    **_fields(_WIDE, "intermediate_size", num_key_value_heads=1, head_dim=16),
    "num_hidden_layers": 5,
    "q_lora_rank": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_topk": 4,
    "hc_mult": 2,
    "partial_rotary_factor": 0.5,
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 7},
    "num_hash_layers": 1,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
}

TINY: dict[str, Tiny] = {
    # Full and grouped attention, windows
    "llama": Tiny("llama", _BASE),
    "llama, one KV head": Tiny("llama", _fields(_WIDE, num_key_value_heads=1)),
    "llama, as many KV heads as query heads": Tiny("llama", _fields(_WIDE, "num_key_value_heads")),
    "mistral, window": Tiny("mistral", _fields(_WIDE, sliding_window=WINDOW)),
    "mistral, no window": Tiny("mistral", _fields(_WIDE, sliding_window=None)),
    "mixtral": Tiny("mixtral", {**_BASE, **_LOCAL_MOE, "sliding_window": WINDOW}),
    "ministral": Tiny("ministral", {**_WIDE, **_SLIDING}),
    "ministral3": Tiny("ministral3", _fields(_WIDE, rope_parameters=_YARN)),
    "ministral3, window": Tiny("ministral3", _fields(_WIDE, rope_parameters=_YARN, sliding_window=WINDOW)),
    "qwen2": Tiny("qwen2", _BASE),
    "qwen2, windows from layer 1": Tiny(
        "qwen2", _fields(_BASE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen2_vl_text": Tiny("qwen2_vl_text", {**_BASE, **_SECTIONS, **_WINDOWED, "max_window_layers": 2}),
    "qwen2_5_vl_text": Tiny("qwen2_5_vl_text", {**_BASE, **_SECTIONS}),
    "qwen2_5_omni_text": Tiny(
        "qwen2_5_omni_text", {**_BASE, **_SECTIONS, **_WINDOWED, "max_window_layers": 2}
    ),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        {**_BASE, **_MOE, "shared_expert_intermediate_size": 32},
    ),
    "qwen2_moe, windows before layer 3": Tiny(
        "qwen2_moe",
        {
            **_BASE,
            **_MOE,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 3,
        },
    ),
    "qwen3": Tiny(
        "qwen3", _fields(_WIDE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3)
    ),
    "qwen3_moe": Tiny("qwen3_moe", {**_WIDE, **_MOE}),
    "qwen3_moe, window": Tiny(
        "qwen3_moe", {**_WIDE, **_MOE, "use_sliding_window": True, "sliding_window": WINDOW}
    ),
    "qwen3_vl_text": Tiny("qwen3_vl_text", {**_WIDE, **_SECTIONS}),
    "qwen3_vl_moe_text": Tiny("qwen3_vl_moe_text", {**_WIDE, **_SECTIONS, **_MOE}),
    "qwen3_omni_moe_text": Tiny("qwen3_omni_moe_text", {**_BASE, **_SECTIONS, **_MOE}),
    "gemma": Tiny("gemma", _WIDE),
    "gemma2": Tiny("gemma2", _fields(_WIDE, sliding_window=WINDOW)),
    "gemma3_text": Tiny("gemma3_text", {**_WIDE, **_SLIDING}),
    "gemma3_text, every third full": Tiny(
        "gemma3_text", _fields(_WIDE, sliding_window=WINDOW, sliding_window_pattern=3)
    ),
    "gemma3n_text": Tiny(
        "gemma3n_text",
        {
            **_WIDE,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "gpt_oss": Tiny(
        "gpt_oss",
        {
            **_WIDE,
            **_LOCAL_MOE,
            **_SLIDING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4_text": Tiny(
        "llama4_text",
        {
            **_WIDE,
            **_LOCAL_MOE,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
        },
    ),
    "llama4_text, every third full": Tiny(
        "llama4_text",
        {
            **_WIDE,
            **_LOCAL_MOE,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 3,
        },
    ),
    "cohere": Tiny("cohere", _BASE),
    "cohere2": Tiny("cohere2", {**_BASE, **_SLIDING}),
    "phi3": Tiny("phi3", _BASE),
    "phi3, window": Tiny("phi3", _fields(_BASE, sliding_window=WINDOW)),
    "olmo2": Tiny("olmo2", _BASE),
    "olmo3": Tiny("olmo3", {**_BASE, **_SLIDING}),
    "smollm3": Tiny("smollm3", _BASE),
    "smollm3, windows without positions": Tiny(
        "smollm3",
        _fields(_BASE, use_sliding_window=True, sliding_window=WINDOW, no_rope_layer_interval=3),
    ),
    "exaone4": Tiny("exaone4", {**_BASE, **_SLIDING}),
    "exaone4, every third full": Tiny(
        "exaone4", _fields(_BASE, sliding_window=WINDOW, sliding_window_pattern=3)
    ),
    "olmoe": Tiny("olmoe", {**_BASE, **_MOE}),
    "starcoder2": Tiny("starcoder2", _BASE),
    "starcoder2, window": Tiny("starcoder2", _fields(_BASE, sliding_window=WINDOW)),
    "gpt_neox": Tiny("gpt_neox", _fields(_BASE, "num_key_value_heads")),
    "apertus": Tiny("apertus", _BASE),
    "arcee": Tiny("arcee", _WIDE),
    "ernie4_5": Tiny("ernie4_5", _WIDE),
    "ernie4_5_moe": Tiny(
        "ernie4_5_moe", {**_BASE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    ),
    "seed_oss": Tiny("seed_oss", _WIDE),
    "hunyuan_v1_dense": Tiny("hunyuan_v1_dense", _WIDE),
    "glm": Tiny("glm", _WIDE),
    "glm4": Tiny("glm4", _WIDE),
    "granite": Tiny("granite", _BASE),
    "granitemoe": Tiny("granitemoe", {**_BASE, **_LOCAL_MOE}),
    "glm4_moe": Tiny("glm4_moe", {**_WIDE, **_DEEP_MOE}),
    "minimax_m2": Tiny("minimax_m2", {**_WIDE, **_LOCAL_MOE}),
    # Latent attention
    "deepseek_v2": Tiny("deepseek_v2", {**_LATENT, **_DEEP_MOE}),
    "deepseek_v3": Tiny("deepseek_v3", {**_LATENT, **_DEEP_MOE}),
    "deepseek_v32": Tiny(
        "deepseek_v32",
        {**_LATENT, **_DEEP_MOE, **_INDEX},
    ),
    "glm_moe_dsa": Tiny("glm_moe_dsa", {**_LATENT, **_DEEP_MOE, **_INDEX}),
    "glm_moe_dsa, some layers without an indexer": Tiny(
        "glm_moe_dsa",
        {**_LATENT, **_DEEP_MOE, **_INDEX, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    # Compressed attention
    "deepseek_v4": Tiny("deepseek_v4", _DEEPSEEK_V4),
    # Linear attention beside full or latent attention
    "qwen3_next": Tiny("qwen3_next", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_5_text": Tiny("qwen3_5_text", _DELTA),
    "qwen3_5_moe_text": Tiny("qwen3_5_moe_text", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32}),
    "kimi_linear": Tiny(
        "kimi_linear",
        {
            **_fields(_LATENT, "q_lora_rank"),
            **_LOCAL_MOE,
            "moe_intermediate_size": 32,
            "linear_head_dim": 10,
            "linear_num_heads": 5,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "minimax": Tiny("minimax", _MINIMAX),
    "lfm2": Tiny("lfm2", _fields(_LFM2, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": Tiny("lfm2_moe", {**_LFM2, **_MOE}),
    # State spaces, alone and beside attention
    "mamba": Tiny("mamba", _MAMBA1),
    "mamba, a width of its own": Tiny("mamba", _fields(_MAMBA1, intermediate_size=72)),
    "falcon_mamba": Tiny("falcon_mamba", _MAMBA1),
    "falcon_mamba, a width of its own": Tiny("falcon_mamba", _fields(_MAMBA1, intermediate_size=72)),
    "mamba2": Tiny(
        "mamba2",
        {
            **_fields(_MAMBA1, "time_step_rank", hidden_size=48),
            "num_heads": 9,
            "head_dim": 16,
            "n_groups": 3,
            "chunk_size": 8,
        },
    ),
    "jamba": Tiny(
        "jamba",
        {
            **_BASE,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 10,
            "mamba_d_conv": 5,
            "mamba_expand": 3,
            "mamba_dt_rank": 7,
        },
    ),
    "bamba": Tiny("bamba", _fields(_BAMBA, attn_layer_indices=[1, 3])),
    "bamba, widths of heads left out": Tiny("bamba", _fields(_BAMBA, "mamba_d_head", attn_layer_indices=[2])),
    "granitemoehybrid": Tiny(
        "granitemoehybrid",
        {
            **_BAMBA,
            **_LOCAL_MOE,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "falcon_h1": Tiny(
        "falcon_h1",
        _fields(
            {**_BAMBA, "head_dim": 14}, mamba_d_ssm=40, mamba_n_heads=5, mamba_d_head=8, mamba_n_groups=1
        ),
    ),
    "zamba2": Tiny("zamba2", _ZAMBA2),
    "zamba2, heads of their own width": Tiny("zamba2", _fields(_ZAMBA2, attention_head_dim=10)),
    "zamba2, fewer KV heads": Tiny("zamba2", _fields(_ZAMBA2, num_key_value_heads=3)),
    "nemotron_h": Tiny(
        "nemotron_h",
        {
            **_fields(_WIDE, "num_hidden_layers"),
            **_fields(_DEEP_MOE, "first_k_dense_replace", moe_shared_expert_intermediate_size=32),
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp", "moe"],
            "mamba_num_heads": 9,
            "mamba_head_dim": 16,
            "ssm_state_size": 10,
            "n_groups": 3,
            "conv_kernel": 5,
            "expand": 3,
            "chunk_size": 8,
        },
    ),
}


def config_class(model_type: str) -> type[PretrainedConfig] | None:
    """The config class of a family, or None where the installed transformers has none. O(1)."""
    try:
        return CONFIG_MAPPING[model_type]
    except KeyError:
        return None


def tiny_config(case: str, dtype: torch.dtype = torch.bfloat16) -> PretrainedConfig:
    """The config of a case of `TINY`, new at each call.

    Errors: KeyError for a case that is none, LookupError for a family that transformers does not have.
    """
    tiny = TINY[case]
    family = config_class(tiny.model_type)
    if family is None:
        raise LookupError(f"transformers has no {tiny.model_type}")
    config = family(**tiny.fields)
    config.dtype = dtype
    return config


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, ready to run, in the dtype of its config; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.model_type in TEXT_PARTS:
            model = getattr(transformers, TEXT_PARTS[config.model_type])._from_config(config)
        elif type(config) in AutoModelForCausalLM._model_mapping:
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        else:  # the text of a model that sees, without its head
            model = AutoModel.from_config(config, dtype=config.dtype)
    return model.eval()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    """[1, length] int64: random tokens, none of them special; a longer one begins with a shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, length), generator=generator)
