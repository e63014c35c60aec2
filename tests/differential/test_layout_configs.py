"""Reading configs against transformers' config classes: what is left out, forms of one config, old names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: its config classes say what a config means")

import transformers

from differential.tiny_models import TINY, WINDOW, config_class, tiny_config
from pagoda.layout import Layout, from_hf
from pagoda.layout.configs.families import FAMILIES

# Names that models had before transformers had them, under another name.
ALIASES = {"kimi_k2": "deepseek_v3", "minimax_text_01": "minimax"}


def class_of(model_type: str) -> Any:
    found = config_class(model_type)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return found


def config_of(case: str) -> Any:
    class_of(TINY[case].model_type)
    return tiny_config(case, torch.float32)  # not what a layout takes where nothing is said


def test_every_family_has_a_tiny_model() -> None:
    assert {tiny.model_type for tiny in TINY.values()} == FAMILIES.keys() - ALIASES.keys()


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - ALIASES.keys()))
def test_what_a_config_leaves_out_is_what_its_class_says(model_type: str) -> None:
    config = class_of(model_type)()
    read = from_hf({"model_type": model_type})
    assert read == from_hf(config)
    assert read.context == getattr(config, "max_position_embeddings", None)


def saved(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


FORMS: dict[str, Callable[[Any, Path], Any]] = {
    "dict": lambda config, folder: config.to_dict(),
    "without defaults": lambda config, folder: {**config.to_diff_dict(), "model_type": config.model_type},
    "folder": saved,
    "file": lambda config, folder: saved(config, folder) / "config.json",
    "path as text": lambda config, folder: str(saved(config, folder)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TINY)
def test_every_form_of_a_config_is_the_same_layout(case: str, form: str, tmp_path: Path) -> None:
    config = config_of(case)
    assert from_hf(FORMS[form](config, tmp_path)) == from_hf(config)


@pytest.mark.parametrize("case", TINY)
def test_fields_as_people_write_them(case: str) -> None:
    """What the class derives from the fields, the reader derives too."""
    fields = {"model_type": TINY[case].model_type, **TINY[case].fields}
    expected = from_hf(config_of(case))
    assert from_hf({**fields, "dtype": "float32"}) == expected
    assert from_hf({**fields, "torch_dtype": "float32"}) == expected


# Fields that transformers renames or derives layers from: a case, what its config loses, what it gains.
OLD: list[tuple[str, list[str], dict[str, Any]]] = [
    ("gemma3_text", ["layer_types"], {"sliding_window_pattern": 2}),
    ("gemma2", [], {"num_hidden_layers": 5}),
    ("gemma3n_text", ["layer_types", "activation_sparsity_pattern"], {"num_hidden_layers": 12}),
    ("gpt_oss", ["layer_types"], {}),
    ("cohere2", ["layer_types"], {"sliding_window_pattern": 3}),
    ("cohere2", ["layer_types"], {}),
    ("olmo3", ["layer_types"], {"num_hidden_layers": 9}),
    ("ministral", ["layer_types"], {}),
    ("ministral", ["layer_types"], {"sliding_window": None}),
    ("mixtral", [], {"sliding_window": None}),
    ("llama4_text", ["layer_types"], {"no_rope_layers": [0, 1, 1, 0]}),
    ("llama4_text", ["layer_types"], {"no_rope_layers": []}),
    ("smollm3", [], {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [0, 1, 1, 0]}),
    ("smollm3", [], {"use_sliding_window": False, "sliding_window": WINDOW}),
    ("qwen2", [], {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 0}),
    ("qwen2", [], {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    ("qwen2_moe", [], {"use_sliding_window": False, "sliding_window": WINDOW}),
    ("qwen2_moe", [], {"use_sliding_window": True, "sliding_window": WINDOW}),
    ("qwen3_moe", [], {"use_sliding_window": False, "sliding_window": WINDOW}),
    ("qwen3_next", ["layer_types"], {}),
    ("qwen3_5_text", ["layer_types"], {"full_attention_interval": 2}),
    ("qwen3_5_moe_text", ["layer_types"], {"full_attention_interval": 3}),
    (
        "kimi_linear",
        ["layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"],
        {
            "linear_attn_config": {
                "full_attn_layers": [2, 3],
                "kda_layers": [1, 4],
                "head_dim": 10,
                "num_heads": 5,
                "short_conv_kernel_size": 3,
            }
        },
    ),
    ("kimi_linear", ["layer_types"], {"num_hidden_layers": 9}),
    ("minimax", ["layer_types"], {}),
    ("lfm2", ["layer_types"], {"full_attn_idxs": [0, 2]}),
    ("lfm2", ["layer_types"], {}),
    ("deepseek_v4", ["layer_types"], {"compress_ratios": [0, 4, 128, 4, 128, 0]}),
    ("deepseek_v4", ["layer_types", "compress_rates"], {"compress_rate_csa": 2, "compress_rate_hca": 5}),
    ("deepseek_v4", ["layer_types"], {"num_hidden_layers": 1}),
    ("deepseek_v4", ["partial_rotary_factor"], {"qk_rope_head_dim": 4}),
    ("bamba", ["mamba_d_head"], {"attn_layer_indices": None}),
    ("granitemoehybrid", [], {"layer_types": ["mamba", "attention", "mamba", "attention"]}),
    ("granitemoehybrid", ["layer_types", "mamba_d_head"], {}),
    ("falcon_h1", ["mamba_d_head"], {"mamba_d_ssm": 40}),
    ("falcon_h1", ["mamba_d_head"], {"mamba_d_ssm": None, "mamba_n_heads": 9}),
    ("zamba2", [], {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"]}),
    ("nemotron_h", ["layers_block_type"], {"hybrid_override_pattern": "M*M-E"}),
    ("nemotron_h", ["layers_block_type"], {}),
    ("nemotron_h", ["layers_block_type"], {"layers_block_type": ["mamba", "attention", "moe", "mlp"]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "without", "more"),
    OLD,
    ids=[f"{case}, {', '.join(more) or 'defaults'}" for case, _, more in OLD],
)
def test_older_fields_mean_what_transformers_makes_of_them(
    case: str, without: list[str], more: dict[str, Any]
) -> None:
    tiny = TINY[case]
    fields = {name: value for name, value in tiny.fields.items() if name not in without} | more
    config = class_of(tiny.model_type)(**fields)
    assert from_hf({"model_type": tiny.model_type, **fields}) == from_hf(config)


@pytest.mark.parametrize("case", [name for name, tiny in TINY.items() if tiny.model_type in ALIASES.values()])
def test_models_that_transformers_has_under_another_name(case: str) -> None:
    config = config_of(case)
    (alias,) = [alias for alias, model_type in ALIASES.items() if model_type == config.model_type]
    assert from_hf({**config.to_dict(), "model_type": alias}) == from_hf(config)
    assert from_hf({"model_type": alias}) == from_hf({"model_type": config.model_type})


def test_minimax_text_01_lists_its_layers_by_numbers() -> None:
    config = config_of("minimax")
    fields = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    original = {**fields, "model_type": "minimax_text_01", "attn_type_list": [0, 1, 0, 0]}
    assert from_hf(original) == from_hf(config)


# Models that also see: their class, and the tiny model of their text.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


@pytest.mark.parametrize("form", ["object", *FORMS])
@pytest.mark.parametrize("outer", WRAPPERS)
def test_the_text_of_a_model_that_also_sees(outer: str, form: str, tmp_path: Path) -> None:
    text = config_of(WRAPPERS[outer])
    whole = class_of(outer)(text_config=text.to_dict())
    layout = from_hf(whole if form == "object" else FORMS[form](whole, tmp_path))
    assert layout == from_hf(text)
    assert len(layout.layers) == text.num_hidden_layers


def test_layouts_of_different_cases_differ() -> None:
    """Else comparing layouts would say nothing."""
    layouts: dict[Layout, str] = {}
    for case in ("llama", "llama, one KV head", "mistral, window", "gemma3_text", "deepseek_v3", "mamba2"):
        assert layouts.setdefault(from_hf(config_of(case)), case) == case
