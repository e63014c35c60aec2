"""Reading configs against transformers' config classes: what is left out, forms of one config, old names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: its config classes say what a config means")

import transformers

from differential.tiny_models import TINY, WINDOW, config_class, tiny_config
from pagoda.layout import Layout, from_hf, model_config, model_names
from pagoda.layout._configs.families import ALIASES, FAMILIES
from pagoda.layout._configs.fields import Fields

# Names that models had before transformers had them, under another name.
ELSEWHERE = {"kimi_k2", "minimax_m1", "minimax_text_01"}


def class_of(model_type: str) -> Any:
    found = config_class(model_type)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return found


def config_of(case: str) -> Any:
    class_of(TINY[case].model_type)
    return tiny_config(case, torch.float32)  # not what a layout takes where nothing is said


def test_every_family_has_a_tiny_model() -> None:
    tiny = {tiny.model_type for tiny in TINY.values()}
    assert FAMILIES.keys() <= tiny <= FAMILIES.keys() | ALIASES.keys()
    assert not FAMILIES.keys() & ALIASES.keys()
    assert set(ALIASES.values()) <= FAMILIES.keys()


@pytest.mark.parametrize("model_type", sorted((FAMILIES.keys() | ALIASES.keys()) - ELSEWHERE))
def test_what_a_config_leaves_out_is_what_its_class_says(model_type: str) -> None:
    config = class_of(model_type)()
    read = from_hf({"model_type": model_type})
    assert read == from_hf(config)
    whole = getattr(config, "text_config", config)
    assert read.context == getattr(whole, "max_position_embeddings", None)


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
    ("exaone4", ["layer_types"], {}),
    ("starcoder2", [], {"sliding_window": WINDOW}),
    ("glm_moe_dsa", [], {"index_topk_pattern": "FSSF"}),
    ("glm_moe_dsa", [], {"index_topk_pattern": ["full", "full", "shared", "shared"]}),
    ("glm_moe_dsa", [], {"index_topk_freq": 3, "index_skip_topk_offset": 1, "num_hidden_layers": 7}),
    ("glm_moe_dsa", [], {"index_topk_freq": 2, "num_hidden_layers": 7}),
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
    ("zamba2", [], {"mamba_headdim": 20}),
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


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_read_as_their_family(alias: str) -> None:
    cases = [name for name, tiny in TINY.items() if tiny.model_type == ALIASES[alias]]
    for config in map(config_of, cases):
        assert from_hf({**config.to_dict(), "model_type": alias}) == from_hf(config)
        assert from_hf(config, like=alias) == from_hf(config)
    assert cases
    assert from_hf({"model_type": alias}) == from_hf({"model_type": ALIASES[alias]})


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
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# And those that speak: the part that thinks has a part about text.
THINKERS = {"qwen2_5_omni": "qwen2_5_omni_text", "qwen3_omni_moe": "qwen3_omni_moe_text"}


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


@pytest.mark.parametrize("form", ["object", "dict", "file"])
@pytest.mark.parametrize("outer", THINKERS)
def test_the_text_of_the_thinker_of_a_model_that_speaks(outer: str, form: str, tmp_path: Path) -> None:
    text = config_of(THINKERS[outer])
    whole = class_of(outer)(thinker_config={"text_config": text.to_dict()})
    assert from_hf(whole if form == "object" else FORMS[form](whole, tmp_path)) == from_hf(text)
    assert from_hf(whole) != from_hf(class_of(outer)())


@pytest.mark.parametrize("name", [name for name in model_names() if name != "minimax-text-01"])
def test_shipped_configs_are_the_same_in_their_own_class(name: str) -> None:
    """MiniMax-Text-01 has code of its own: transformers knows it under another name."""
    raw = model_config(name)
    assert from_hf(class_of(raw["model_type"]).from_dict(raw)) == from_hf(raw)


class Recording(Fields):
    """Fields that remember for which names they were asked."""

    asked: set[str]

    def __init__(self, values: Any, where: str = "") -> None:
        class Values(dict):  # type: ignore[type-arg]
            def get(self, name: str, default: Any = None) -> Any:
                Recording.asked.add(name)
                return super().get(name, default)

        super().__init__(Values(values), where)


def test_every_field_that_is_read_is_in_some_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that no case has could be read in any way, and no comparison would notice."""
    from pagoda.layout._configs import fields, readers, reading

    written: set[str] = set()

    def write(values: dict[str, Any]) -> None:
        written.update(values)
        for value in values.values():
            if isinstance(value, dict):
                write(value)

    Recording.asked = set()
    for module in (fields, readers, reading):
        monkeypatch.setattr(module, "Fields", Recording)
    for model_type in FAMILIES:
        from_hf({"model_type": model_type})
    for tiny in TINY.values():
        write(tiny.fields)
        from_hf({"model_type": tiny.model_type, **tiny.fields})
    for case, without, more in OLD:
        write(more)
        kept = {name: value for name, value in TINY[case].fields.items() if name not in without}
        from_hf({"model_type": TINY[case].model_type, **kept, **more})
    assert {"head_dim", "compress_rates", "full_attn_layers"} <= Recording.asked
    assert Recording.asked - written == UNCASED.keys()


# What only other tests have, and which.
UNCASED = {
    "model_type": "every test: it is beside a case's fields",
    "_name_or_path": "a name for people; test_layout_hf.py",
    "dtype": "test_fields_as_people_write_them",
    "torch_dtype": "test_fields_as_people_write_them",
    "attn_type_list": "test_minimax_text_01_lists_its_layers_by_numbers",
    "mamba_ssm_dtype": "transformers keeps states as it computes them; test_layout_hf.py",
    "mamba_ssm_cache_dtype": "transformers keeps states as it computes them; test_layout_hf.py",
    "model_max_length": "no part of a comparison; test_layout_hf.py",
}
