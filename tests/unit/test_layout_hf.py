"""Reading Hugging Face configs: where they come from, what is refused and how, and figures that others
published."""

import contextlib
import json
import re
import resource
import socket
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.layout import (
    FullAttention,
    LatentAttention,
    Layout,
    Mamba2,
    RingWindow,
    SharedAttention,
    WindowAttention,
    from_hf,
    index_keys,
    latent_fp8,
    model_config,
    model_names,
)
from pagoda.layout._configs.families import ALIASES, FAMILIES

GIB, MIB = 2**30, 2**20
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TWO_LAYERS = Layout([FullAttention(kv_heads=2, k_dim=16, v_dim=16)] * 2)
HUGE = 10**5_000


def shipped(model, **options):
    return from_hf(model_config(model), **options)


def changed(config, **changes):
    """The config with fields changed, wherever it keeps those about text."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


class Config:
    """Stands for a transformers config: fields by way of to_dict."""

    def __init__(self, fields):
        self.fields = fields

    def to_dict(self):
        return self.fields


class TestSources:
    def test_a_dict_and_other_mappings(self):
        for config in (LLAMA, OrderedDict(LLAMA), MappingProxyType(LLAMA)):
            assert from_hf(config) == TWO_LAYERS

    def test_the_config_is_not_changed(self):
        config = json.loads(json.dumps(LLAMA))
        from_hf(config)
        assert config == LLAMA

    def test_an_object_with_to_dict(self):
        assert from_hf(Config(LLAMA)) == TWO_LAYERS

    def test_files(self, tmp_path):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(LLAMA))
        other = tmp_path / "llama.json"
        other.write_text(json.dumps(LLAMA))
        for source in (file, str(file), tmp_path, str(tmp_path), f"{tmp_path}/", other):
            assert from_hf(source) == TWO_LAYERS

    @pytest.mark.parametrize("key", ["text_config", "thinker_config", "llm_config", "language_config"])
    def test_the_text_part_of_a_model_that_sees(self, key):
        assert from_hf({"model_type": "sees", key: LLAMA, "vision_config": {"hidden_size": 9}}) == TWO_LAYERS
        assert from_hf(Config({"model_type": "sees", key: Config(LLAMA)})) == TWO_LAYERS

    def test_text_parts_within_parts(self):
        config = {"model_type": "omni", "thinker_config": {"model_type": "thinks", "text_config": LLAMA}}
        assert from_hf(config) == TWO_LAYERS
        # As Qwen2.5-Omni and Qwen2-VL write them: the part of text has a type of its own, or none.
        text = {**LLAMA, "model_type": "qwen2_5_omni_text"}
        thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text, "audio_config": {}}
        assert from_hf({"model_type": "qwen2_5_omni", "thinker_config": thinker}) == TWO_LAYERS
        assert from_hf({**LLAMA, "model_type": "qwen2_vl"}) == TWO_LAYERS

    def test_a_text_part_without_a_type_has_that_of_the_whole(self):
        inner = {name: value for name, value in LLAMA.items() if name != "model_type"}
        assert from_hf({"model_type": "llama", "text_config": inner}) == TWO_LAYERS
        # A null field is an absent one.
        assert from_hf({"model_type": "llama", "text_config": {**inner, "model_type": None}}) == TWO_LAYERS

    @pytest.mark.parametrize("outer", ["dtype", "torch_dtype"])
    def test_the_dtype_of_the_whole_is_that_of_its_text_part(self, outer):
        single = from_hf({**LLAMA, "dtype": "float32"})
        assert single.layers[0][0].dtype == "float32"
        assert from_hf({"model_type": "sees", outer: "float32", "text_config": LLAMA}) == single

    @pytest.mark.parametrize("outer", ["dtype", "torch_dtype"])
    @pytest.mark.parametrize("inner", ["dtype", "torch_dtype"])
    def test_a_null_dtype_of_the_text_part_is_none(self, outer, inner):
        config = {"model_type": "sees", outer: "float32", "text_config": {**LLAMA, inner: None}}
        assert from_hf(config).layers[0][0].dtype == "float32"

    @pytest.mark.parametrize("outer", ["dtype", "torch_dtype"])
    @pytest.mark.parametrize("inner", ["dtype", "torch_dtype"])
    def test_a_dtype_of_the_text_part_comes_before_that_of_the_whole(self, outer, inner):
        config = {"model_type": "sees", outer: "bfloat16", "text_config": {**LLAMA, inner: "float32"}}
        assert from_hf(config).layers[0][0].dtype == "float32"

    def test_nothing_is_downloaded(self, monkeypatch):
        def refuse(*_args, **_more):
            raise AssertionError("a connection was asked for")

        monkeypatch.setattr(socket, "socket", refuse)
        monkeypatch.setattr(socket, "create_connection", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        with pytest.raises(ConfigError, match=r"meta-llama/Llama-3\.1-8B'? cannot be read"):
            from_hf("meta-llama/Llama-3.1-8B")

    def test_the_name_of_a_shipped_model_points_to_its_config(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=r"from_hf\(model_config\('llama-3\.1-8b'\)\)"):
            from_hf("llama-3.1-8b")
        (tmp_path / "llama-3.1-8b").write_text(json.dumps(LLAMA))
        assert from_hf("llama-3.1-8b") == TWO_LAYERS

    def test_names_for_people(self):
        assert from_hf(LLAMA).name == "llama"
        assert from_hf({**LLAMA, "_name_or_path": "some/llama"}).name == "some/llama"
        assert from_hf({**LLAMA, "_name_or_path": "some/llama"}, name="mine").name == "mine"
        assert from_hf({**LLAMA, "_name_or_path": ""}).name == "llama"

    def test_the_name_of_a_model_that_sees(self):
        whole = {"model_type": "sees", "_name_or_path": "some/model", "text_config": LLAMA}
        assert from_hf(whole).name == "some/model"

    def test_contexts(self):
        assert from_hf({**LLAMA, "max_position_embeddings": 4096}).context == 4096
        assert from_hf({**LLAMA, "model_max_length": 10}).context == 10
        # LlamaConfig's own: 2,048.
        assert from_hf(LLAMA).context == 2048
        assert shipped("mamba-2.8b").context is None

    def test_a_number_that_json_made_a_float(self):
        assert from_hf({**LLAMA, "hidden_size": 64.0}) == TWO_LAYERS


class TestBadSources:
    @pytest.mark.parametrize(
        "config", [None, 5, 1.5, [LLAMA], (LLAMA,), b"config.json", object(), True, {1, 2}]
    )
    def test_what_is_no_config(self, config):
        with pytest.raises(ConfigError, match="give a Hugging Face config, its dict or the path"):
            from_hf(config)

    @pytest.mark.parametrize("answer", [None, [LLAMA], "llama", 5])
    def test_objects_whose_to_dict_gives_none(self, answer):
        with pytest.raises(ConfigError, match="give a Hugging Face config"):
            from_hf(Config(answer))

    def test_the_class_of_a_config_instead_of_a_config(self):
        with pytest.raises(ConfigError, match="give a Hugging Face config"):
            from_hf(Config)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "not json",
            "[1, 2]",
            '"llama"',
            "3",
            "null",
            "NaN",
            '{"model_type": "llama"',
            "\x00",
            "{" * 10,
        ],
    )
    def test_files_that_hold_no_object(self, tmp_path, text):
        file = tmp_path / "config.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            from_hf(file)

    def test_a_file_that_is_no_text(self, tmp_path):
        file = tmp_path / "config.json"
        file.write_bytes(b"\xff\xfe\x00{}")
        with pytest.raises(ConfigError, match="is not valid JSON"):
            from_hf(file)

    def test_a_file_nested_too_deeply(self, tmp_path):
        file = tmp_path / "config.json"
        file.write_text("[" * 200_000 + "]" * 200_000)
        with pytest.raises(ConfigError, match="is not valid JSON"):
            from_hf(file)

    def test_a_file_of_weights(self, tmp_path):
        file = tmp_path / "model.safetensors"
        with file.open("wb") as sparse:
            sparse.truncate(2**30)
        with pytest.raises(ConfigError, match="too large to be a config"):
            from_hf(file)

    def test_paths_that_lead_nowhere(self, tmp_path):
        for path in (tmp_path, tmp_path / "none", tmp_path / "none" / "config.json", "", "\x00", "a" * 5_000):
            with pytest.raises(ConfigError):
                from_hf(path)

    def test_an_empty_config(self):
        with pytest.raises(ConfigError, match="config has no model_type"):
            from_hf({})
        for empty in (None, ""):
            with pytest.raises(ConfigError, match="config has no model_type"):
                from_hf({"model_type": empty, "hidden_size": 1})

    def test_a_config_that_holds_itself(self):
        config = {"model_type": "sees"}
        config["text_config"] = config
        with pytest.raises(ConfigError):
            from_hf(config)

    def test_text_parts_without_end(self):
        config = LLAMA
        for _ in range(5_000):
            config = {"model_type": "sees", "text_config": config}
        with contextlib.suppress(ConfigError):
            assert from_hf(config) == TWO_LAYERS

    @pytest.mark.parametrize("inner", [[LLAMA], "llama", 5, True, {}])
    def test_text_parts_that_are_none(self, inner):
        with pytest.raises(ConfigError, match="sees"):
            from_hf({"model_type": "sees", "text_config": inner})


class TestUnknown:
    def test_model_types_are_named_and_told_what_to_do(self):
        with pytest.raises(ConfigError) as refused:
            from_hf({**LLAMA, "model_type": "llama9"})
        message = str(refused.value)
        for part in ("'llama9'", "like='llama'", "Layout([", "families.py", "qwen3_next"):
            assert part in message

    @pytest.mark.parametrize("model_type", [5, ["llama"], {"a": 1}, "x" * 10**6, "LLAMA", "llama "])
    def test_model_types_that_are_none(self, model_type):
        with pytest.raises(ConfigError, match="model_type") as refused:
            from_hf({**LLAMA, "model_type": model_type})
        assert len(str(refused.value)) < 2_000

    def test_an_unknown_type_is_read_like_a_known_one(self):
        assert from_hf({**LLAMA, "model_type": "llama9"}, like="llama") == TWO_LAYERS
        config = {name: value for name, value in LLAMA.items() if name != "model_type"}
        assert from_hf(config, like="llama") == TWO_LAYERS

    @pytest.mark.parametrize("like", ["", "llama9", "Llama", 5, ["llama"]])
    def test_like_what_is_not_known(self, like):
        with pytest.raises(ConfigError, match=r"^like: unknown family"):
            from_hf(LLAMA, like=like)

    @pytest.mark.parametrize("family", sorted({*FAMILIES, *ALIASES}))
    def test_like_reads_what_the_family_reads(self, family):
        """What a family reads may depend on the family, not on what the config calls itself."""
        sizes = {
            "deepseek_v4": {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]},
            "nemotron_h": {"hybrid_override_pattern": "M*-"},
            "mamba2": {"head_dim": 32},
        }.get(family, {})
        own = from_hf({"model_type": family, **sizes})
        assert from_hf({"model_type": "unheard of", **sizes}, like=family) == own

    @pytest.mark.parametrize(
        ("model_type", "field", "value", "number", "kind"),
        [
            ("qwen3_next", "layer_types", ["full_attention", "rwkv"], 1, "rwkv"),
            ("gpt_oss", "layer_types", ["linear_attention"], 0, "linear_attention"),
            ("gpt_oss", "layer_types", [None], 0, "None"),
            ("gpt_oss", "layer_types", [["full_attention"]], 0, "full_attention"),
            ("nemotron_h", "hybrid_override_pattern", "M?", 1, "?"),
            ("minimax", "attn_type_list", [0, 2], 1, "2"),
            ("deepseek_v4", "compress_ratios", [4, 16], 1, "compressed by 16"),
        ],
    )
    def test_kinds_of_layers_are_named_and_told_what_to_add(self, model_type, field, value, number, kind):
        with pytest.raises(ConfigError) as refused:
            from_hf({"model_type": model_type, "num_hidden_layers": len(value), field: value})
        message = str(refused.value).replace("'", "")
        known = "sliding_attention" if model_type == "deepseek_v4" else "full_attention"
        for part in (
            f"a config of {model_type}: ",
            f"layer {number} ",
            kind,
            known,
            "readers.py",
            "Layout([",
        ):
            assert part in message

    @pytest.mark.parametrize(
        "name", ["", "llama", "../models/llama-3.1-8b", "llama-3.1-8b.json", None, 5, [], "x" * 10**6]
    )
    def test_models_that_do_not_come_along(self, name):
        with pytest.raises(ConfigError, match="model_names") as refused:
            model_config(name)
        assert len(str(refused.value)) < 200


# For each model type, the fields without which it cannot be read once the config says null, and that are
# refused when they are nonsense.
FIELDS = {
    "llama": ["num_hidden_layers", "hidden_size", "num_attention_heads"],
    "mistral": ["num_hidden_layers", "hidden_size", "num_attention_heads"],
    "qwen3": ["num_hidden_layers", "num_attention_heads"],
    "gemma3_text": ["num_hidden_layers", "sliding_window"],
    "gpt_oss": ["sliding_window"],
    "llama4_text": ["attention_chunk_size"],
    "deepseek_v3": ["num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"],
    "qwen3_next": [
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ],
    "kimi_linear": ["kv_lora_rank", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"],
    "minimax": ["num_attention_heads"],
    "lfm2": ["conv_L_cache", "hidden_size"],
    "mamba": ["state_size", "expand", "conv_kernel", "hidden_size", "num_hidden_layers"],
    "mamba2": ["num_heads", "n_groups", "state_size", "conv_kernel", "num_hidden_layers"],
    "jamba": ["attn_layer_period", "attn_layer_offset", "mamba_d_state", "mamba_d_conv", "mamba_expand"],
    "bamba": ["mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"],
    "zamba2": ["n_mamba_heads", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"],
    "falcon_h1": ["mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"],
    "nemotron_h": ["mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel"],
    "deepseek_v4": ["head_dim", "sliding_window", "index_head_dim", "num_hidden_layers"],
}
BASE = {
    "deepseek_v4": {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3},
    "nemotron_h": {"hybrid_override_pattern": "M*-"},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1]},
    "minimax": {"num_key_value_heads": None},
    "qwen3": {"num_key_value_heads": None},
}
NONSENSE = {
    "zero": 0,
    "negative": -4,
    "yes": True,
    "no": False,
    "text": "32",
    "empty text": "",
    "fraction": 1.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "list": [32],
    "object": {"a": 1},
    "large": 2**41,
    "complex": 1j,
}
fields = pytest.mark.parametrize(
    ("model_type", "field"), [(model_type, field) for model_type, names in FIELDS.items() for field in names]
)
MAY_BE_ZERO = {"qk_rope_head_dim", "attn_layer_offset"}


class TestBadFields:
    @fields
    def test_null(self, model_type, field):
        with pytest.raises(ConfigError, match=rf"a config of '?{model_type}'?: .*{field}"):
            from_hf({"model_type": model_type, **BASE.get(model_type, {}), field: None})

    @fields
    def test_nonsense(self, model_type, field):
        for what, value in NONSENSE.items():
            if what == "zero" and field in MAY_BE_ZERO:
                continue
            with pytest.raises(
                ConfigError, match=rf"a config of '?{model_type}'?: {field} should be"
            ) as refused:
                from_hf({"model_type": model_type, **BASE.get(model_type, {}), field: value})
            assert len(str(refused.value)) < 300, what

    @pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["huge", "hugely negative"])
    def test_numbers_too_long_to_be_printed(self, value):
        with pytest.raises(ConfigError, match=r"a config of '?llama'?: hidden_size should be"):
            from_hf({**LLAMA, "hidden_size": value})

    def test_values_nested_too_deeply_to_be_printed(self):
        value = []
        for _ in range(100_000):
            value = [value]
        try:
            with pytest.raises(ConfigError, match="hidden_size should be"):
                from_hf({**LLAMA, "hidden_size": value})
        finally:
            while value:
                value = value.pop()

    @pytest.mark.parametrize("name", ["max_position_embeddings", "num_kv_shared_layers"])
    @pytest.mark.parametrize("value", [-1, "many", True, 1.5, [1], float("nan")])
    def test_fields_that_every_family_may_have(self, name, value):
        with pytest.raises(ConfigError, match=rf"a config of '?llama'?: {name} should be"):
            from_hf({**LLAMA, name: value})

    @pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
    @pytest.mark.parametrize("value", ["float64", "int8", 16, ["bfloat16"], "bfloat", {}])
    def test_dtypes(self, field, value):
        with pytest.raises(ConfigError, match=rf"^{field} of a config of '?llama'?: give one of"):
            from_hf({**LLAMA, field: value})

    def test_dtypes_of_states(self):
        with pytest.raises(ConfigError, match=r"mamba_ssm_dtype of a config of '?bamba'?: give one of"):
            from_hf({"model_type": "bamba", "mamba_ssm_dtype": "int8"})

    def test_heads_that_do_not_divide_the_width(self):
        """Models without a head_dim of their own round down, until nothing is left."""
        kind = from_hf({**LLAMA, "num_attention_heads": 63, "num_key_value_heads": 1}).layers[0][0]
        assert kind.k_dim == LLAMA["hidden_size"] // 63
        with pytest.raises(ConfigError, match=r"a config of '?llama'?: .*num_attention_heads.*hidden_size"):
            from_hf({**LLAMA, "num_attention_heads": LLAMA["hidden_size"] + 1, "num_key_value_heads": 1})

    def test_heads_of_mamba_that_do_not_divide_the_width(self):
        with pytest.raises(
            ConfigError, match=r"a config of '?bamba'?: 128 Mamba heads do not divide a width of 200"
        ):
            from_hf({"model_type": "bamba", "hidden_size": 100, "head_dim": 8})

    @pytest.mark.parametrize(
        ("model_type", "field", "values"),
        [
            ("gpt_oss", "layer_types", ["full_attention"]),
            ("gpt_oss", "layer_types", []),
            ("gpt_oss", "layer_types", ["full_attention"] * 4),
            ("zamba2", "layers_block_type", ["mamba", "hybrid"]),
            ("minimax", "attn_type_list", [0, 1]),
            ("deepseek_v4", "compress_ratios", [4, 128]),
        ],
    )
    def test_lists_of_the_wrong_length(self, model_type, field, values):
        lists = f"it has 3 layers but lists the types of {len(values)}"
        with pytest.raises(ConfigError, match=rf"a config of '?{model_type}'?: {lists}"):
            from_hf({"model_type": model_type, "num_hidden_layers": 3, field: values})

    @pytest.mark.parametrize(
        ("model_type", "field"),
        [
            ("gpt_oss", "layer_types"),
            ("zamba2", "layers_block_type"),
            ("minimax", "attn_type_list"),
            ("deepseek_v4", "compress_ratios"),
            ("bamba", "attn_layer_indices"),
            ("lfm2", "full_attn_idxs"),
        ],
    )
    @pytest.mark.parametrize("value", ["full_attention", 5, {"a": 1}, b"ab", True, 1.5])
    def test_lists_that_are_none(self, model_type, field, value):
        with pytest.raises(ConfigError, match=rf"a config of '?{model_type}'?: {field} should be a list"):
            from_hf({"model_type": model_type, "num_hidden_layers": 3, field: value})

    @pytest.mark.parametrize(
        ("model_type", "field"),
        [
            ("minimax", "attn_type_list"),
            ("deepseek_v4", "compress_ratios"),
            ("bamba", "attn_layer_indices"),
            ("lfm2", "full_attn_idxs"),
        ],
    )
    @pytest.mark.parametrize("item", [[0], {}, "0", None, 0.5, float("nan")], ids=repr)
    def test_nonsense_in_lists(self, model_type, field, item):
        """What is no index must not quietly make a layer another kind."""
        with pytest.raises(ConfigError, match=model_type):
            from_hf({"model_type": model_type, "num_hidden_layers": 1, field: [item]})

    @pytest.mark.parametrize("item", [[4], {}, "4", None, 0.5])
    def test_nonsense_in_the_layers_of_kimi(self, item):
        with pytest.raises(ConfigError, match="kimi_linear"):
            from_hf({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [item]}})

    @pytest.mark.parametrize("value", [5, "x", [1], True])
    def test_objects_that_are_none(self, value):
        with pytest.raises(
            ConfigError, match=r"a config of '?kimi_linear'?: linear_attn_config should be an object"
        ):
            from_hf({"model_type": "kimi_linear", "linear_attn_config": value})
        with pytest.raises(
            ConfigError, match=r"a config of '?deepseek_v4'?: compress_rates should be an object"
        ):
            from_hf({"model_type": "deepseek_v4", **BASE["deepseek_v4"], "compress_rates": value})

    def test_fields_of_inner_objects_are_named_with_them(self):
        with pytest.raises(
            ConfigError, match=r"linear_attn_config of a config of '?kimi_linear'?: head_dim should be"
        ):
            from_hf({"model_type": "kimi_linear", "linear_attn_config": {"head_dim": "128"}})
        rates = {"compressed_sparse_attention": -4}
        with pytest.raises(
            ConfigError, match=r"compress_rates of a config of '?deepseek_v4'?: compressed_sparse"
        ):
            from_hf({"model_type": "deepseek_v4", **BASE["deepseek_v4"], "compress_rates": rates})

    @pytest.mark.parametrize("value", [0, -1, "x", True, float("nan"), float("inf"), [1]])
    def test_factors_that_are_none(self, value):
        config = {"model_type": "deepseek_v4", **BASE["deepseek_v4"], "partial_rotary_factor": value}
        with pytest.raises(
            ConfigError, match=r"a config of '?deepseek_v4'?: partial_rotary_factor should be a number"
        ):
            from_hf(config)

    @pytest.mark.parametrize(
        ("model_type", "field", "value"),
        [
            ("deepseek_v4", "qk_rope_head_dim", 512),
            ("deepseek_v4", "partial_rotary_factor", 1),
            ("deepseek_v4", "partial_rotary_factor", 1e-9),
            ("deepseek_v3", "kv_lora_rank", 100),
            ("deepseek_v3", "qk_rope_head_dim", 0),
            ("deepseek_v32", "index_head_dim", 100),
        ],
    )
    def test_sizes_that_make_no_entry_are_named_by_model_and_field(self, model_type, field, value):
        kv_dtype = "auto" if model_type == "deepseek_v4" else "fp8_ds_mla"
        with pytest.raises(ConfigError, match=rf"a config of '?{model_type}'?.*{field}"):
            from_hf(
                {"model_type": model_type, **BASE.get(model_type, {}), field: value},
                kv_dtype=kv_dtype,
                index_dtype="fp4",
            )

    def test_more_shared_layers_than_layers(self):
        for shared in (2, 3, 100):
            with pytest.raises(ConfigError, match=r"a config of '?llama'?: layer 0 shares keys and values"):
                from_hf({**LLAMA, "num_kv_shared_layers": shared})

    def test_no_earlier_layer_of_that_kind(self):
        types = ["full_attention", "sliding_attention"]
        config = {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 2,
            "layer_types": types,
            "num_kv_shared_layers": 1,
        }
        with pytest.raises(ConfigError, match=r"layer 1 shares .* no sliding_attention layer"):
            from_hf(config)

    def test_an_offset_that_no_layer_has(self):
        """Jamba's own config refuses it: no layer would have attention."""
        with pytest.raises(ConfigError, match=r"a config of '?jamba'?: .*attn_layer_offset"):
            from_hf({"model_type": "jamba", "attn_layer_offset": 8, "attn_layer_period": 8})

    def test_an_absurd_number_of_layers(self):
        used = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as sizes:
            pages = int(sizes.read().split()[0])
        limit = pages * resource.getpagesize() + 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, used[1]))
        try:
            with pytest.raises(ConfigError, match="num_hidden_layers"):
                from_hf({**LLAMA, "num_hidden_layers": 2**40})
        finally:
            resource.setrlimit(resource.RLIMIT_AS, used)


class TestOptions:
    @pytest.mark.parametrize("bad", ["", "q4", "int8", "float64", None, 8, ["bf16"], "AUTO", "fp4"])
    def test_dtypes_that_are_none(self, bad):
        with pytest.raises(ConfigError, match=r"^kv_dtype: give one of"):
            from_hf(LLAMA, kv_dtype=bad)
        with pytest.raises(ConfigError, match=r"^state_dtype: give one of"):
            from_hf({"model_type": "mamba"}, state_dtype=bad)
        if bad != "fp4":
            with pytest.raises(ConfigError, match=r"^index_dtype: give one of"):
                from_hf({"model_type": "deepseek_v32"}, index_dtype=bad)

    @pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b", "jamba-1.5-mini"])
    def test_latent_entries_are_for_latent_attention(self, model):
        with pytest.raises(ConfigError, match="kv_dtype: 'fp8_ds_mla' is for latent attention, not for "):
            shipped(model, kv_dtype="fp8_ds_mla")

    @pytest.mark.parametrize("model", ["mamba-2.8b", "mamba-codestral-7b"])
    def test_latent_entries_are_not_for_models_without_attention(self, model):
        with pytest.raises(
            ConfigError, match="kv_dtype: 'fp8_ds_mla' is for latent attention, not for mamba"
        ):
            shipped(model, kv_dtype="fp8_ds_mla")

    @pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3fn", torch.float8_e4m3fn])
    def test_fp8_beside_an_indexer_is_what_its_kernels_read(self, dtype):
        # 512 fp8 values, 4 float32 scales, 64 bfloat16 values; a key of 128 and a scale.
        for model in ("deepseek-v3.2", {"model_type": "glm_moe_dsa", "index_topk_freq": 2}):
            config = model_config(model) if isinstance(model, str) else model
            layout = from_hf(config, kv_dtype=dtype)
            assert layout == from_hf(config, kv_dtype="fp8_ds_mla")
            assert layout.layer_bytes(0, 1) == {"latent": 512 + 16 + 128, "index": 128 + 4}
        # Layers that take what the one before picked are read by the same kernels.
        assert layout.layer_bytes(2, 1) == {"latent": 656}
        assert shipped("deepseek-v3", kv_dtype=dtype).layer_bytes(0, 1) == {"latent": 512 + 64}
        assert shipped("kimi-linear-48b-a3b", kv_dtype=dtype).layer_bytes(3, 1) == {"latent": 512 + 64}

    @pytest.mark.parametrize("dtype", ["fp8_e5m2", torch.float8_e5m2])
    def test_entries_of_deepseek_v4_have_one_fp8(self, dtype):
        with pytest.raises(
            ConfigError, match=r"^kv_dtype: entries of deepseek_v4 are 'fp8' .*'bf16'.*not 'fp8_e5m2'"
        ):
            shipped("deepseek-v4-flash", kv_dtype=dtype)

    def test_unaccepted_tokens_change_no_recurrent_state(self):
        for model in ("qwen3-next-80b-a3b", "mamba-2.8b", "lfm2-1.2b", "llama-3.1-8b"):
            assert shipped(model, unaccepted=5) == shipped(model)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "1", None])
    def test_unaccepted(self, bad):
        with pytest.raises(ConfigError, match="unaccepted"):
            from_hf(LLAMA, unaccepted=bad)

    @pytest.mark.parametrize("dtype", ["fp8", torch.float8_e4m3fn, "float8_e4m3fn"])
    def test_keys_and_values_in_fp8(self, dtype):
        assert from_hf(LLAMA, kv_dtype=dtype).token_bytes == TWO_LAYERS.token_bytes / 2

    @pytest.mark.parametrize("dtype", ["float32", torch.float32, "torch.float32"])
    @pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
    def test_the_models_own_dtype(self, dtype, field):
        assert from_hf({**LLAMA, field: dtype}).token_bytes == TWO_LAYERS.token_bytes * 2
        assert from_hf({**LLAMA, field: dtype}, kv_dtype="bf16").token_bytes == TWO_LAYERS.token_bytes

    def test_dtypes_of_states(self):
        rows = {
            dtype: shipped("mamba-codestral-7b", state_dtype=dtype).state_group.state_bytes
            for dtype in ("fp32", "bf16")
        }
        # 64 layers × 128 heads × 64 × 128 states.
        assert rows["fp32"] - rows["bf16"] == 64 * 128 * 64 * 128 * 2
        assert shipped("mamba-codestral-7b").state_group.state_bytes == rows["fp32"]
        config = {**model_config("mamba-codestral-7b"), "mamba_ssm_dtype": "bfloat16"}
        assert from_hf(config).state_group.state_bytes == rows["bf16"]
        assert from_hf(config, state_dtype="fp32").state_group.state_bytes == rows["fp32"]
        config = {**model_config("mamba-codestral-7b"), "mamba_ssm_cache_dtype": "bfloat16"}
        assert from_hf(config).state_group.state_bytes == rows["bf16"]

    def test_page_tokenss_are_passed_on(self):
        assert from_hf(LLAMA, page_tokens=64).page_tokens == {"full": 64}
        assert shipped("gpt-oss-20b", page_tokens={"window": 32}).page_tokens == {"window": 32, "full": 16}
        with pytest.raises(ConfigError, match="no paged group 'sliding'"):
            shipped("gpt-oss-20b", page_tokens={"sliding": 32})

    def test_unaccepted_tokens_lengthen_rings(self):
        layout = shipped("deepseek-v4-flash", unaccepted=4)
        kinds = {
            type(kinds[0]).__name__ + str(getattr(kinds[0], "ratio", "")): kinds[0] for kinds in layout.layers
        }
        assert {kind.ring for kind in kinds.values()} == {128 + 3}
        assert kinds["CompressedAttention4"].compressor_tokens == 2 * 4 + 3
        assert kinds["CompressedAttention128"].compressor_tokens == 128 + 3


class TestFamilies:
    """Sizes that configs leave out or name in other ways; sources are the config classes of transformers."""

    @pytest.mark.parametrize("family", sorted({*FAMILIES, *ALIASES}))
    def test_every_family_can_be_read_with_its_defaults(self, family):
        layout = from_hf({"model_type": family, **BASE.get(family, {})})
        assert layout.groups
        assert layout.request_bytes(1000) > 0

    def test_the_docs_list_every_family_and_no_other(self):
        page = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
        table = page.partition("<!-- families -->")[2].partition("<!-- end of families -->")[0]
        named = re.findall(r"`([^`]+)`(?: \(([^)]*)\))?", table)
        assert sorted(name for name, _ in named) == sorted(FAMILIES)
        also = {alias: name for name, others in named for alias in re.findall(r"`([^`]+)`", others)}
        assert also == ALIASES

    def test_zamba2_attention_is_twice_as_wide(self):
        # Zamba2Config: attention_head_dim = 2 × hidden_size // num_attention_heads = 2 × 2560 // 32.
        attention = from_hf({"model_type": "zamba2"}).layers[6][0]
        assert (attention.kv_heads, attention.k_dim, attention.v_dim) == (32, 160, 160)

    def test_widths_of_mamba_that_are_no_multiple(self):
        # Zamba2Config: int(1.5 × 2560) // 8; to refuse a fraction would do as well.
        try:
            kinds = from_hf({"model_type": "zamba2", "mamba_expand": 1.5}).layers[0]
        except ConfigError:
            return
        assert kinds[0].head_dim == 480

    def test_qwen_slides_only_if_it_is_switched_on(self):
        config = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 9, "max_window_layers": 3}
        assert [group.name for group in from_hf(config).groups] == ["full"]
        layout = from_hf({**config, "use_sliding_window": True})
        assert [(group.name, group.layers) for group in layout.groups] == [
            ("full", (0, 1, 2)),
            ("window", (3,)),
        ]

    def test_mistral_slides_unless_its_window_is_null(self):
        assert [group.name for group in shipped("mistral-7b-v0.1").groups] == ["window"]
        layout = from_hf({**model_config("mistral-7b-v0.1"), "sliding_window": None})
        assert [group.name for group in layout.groups] == ["full"]

    @pytest.mark.parametrize(
        "model_type", ["mistral", "qwen2", "qwen3_moe", "phi3", "smollm3", "exaone4", "starcoder2"]
    )
    @pytest.mark.parametrize("none", [None, 0, -1])
    def test_a_window_of_nothing_is_none(self, model_type, none):
        config = {"model_type": model_type, "use_sliding_window": True, "sliding_window": none}
        assert [group.name for group in from_hf({**config, "max_window_layers": 0}).groups] == ["full"]

    @pytest.mark.parametrize("nonsense", [-2, True, False, "0"])
    def test_other_windows_of_nothing_are_refused(self, nonsense):
        with pytest.raises(ConfigError, match="sliding_window should be"):
            from_hf({"model_type": "mistral", "sliding_window": nonsense})

    def test_falcon_mamba_names_its_width(self):
        # Falcon-Mamba-7B's config.json: hidden_size 4096, expand 16, intermediate_size 8192, state_size 16.
        config = {"hidden_size": 4096, "expand": 16, "intermediate_size": 8192, "state_size": 16}
        for model_type in ("falcon_mamba", "mamba"):
            kind = from_hf({"model_type": model_type, **config}).layers[0][0]
            assert (kind.channels, kind.state_dim) == (8192, 16)
        # Jamba's is that of its MLPs.
        kind = from_hf({"model_type": "jamba", "hidden_size": 64, "intermediate_size": 100}).layers[0][0]
        assert kind.channels == 2 * 64

    def test_nemotron_h_has_the_layers_of_its_pattern(self):
        config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*"}
        assert len(from_hf(config).layers) == 3
        assert from_hf({**config, "num_hidden_layers": 3}) == from_hf(config)
        with pytest.raises(ConfigError, match="it has 52 layers but lists the types of 3"):
            from_hf({**config, "num_hidden_layers": 52})

    def test_nemotron_h_heads_have_two_names(self):
        config = {"model_type": "nemotron_h", "hybrid_override_pattern": "*"}
        assert from_hf(config).layers[0][0].k_dim == 128
        assert from_hf({**config, "attention_head_dim": 96}).layers[0][0].k_dim == 96
        assert from_hf({**config, "head_dim": 64}).layers[0][0].v_dim == 64

    def test_layers_that_take_what_another_indexer_picked(self):
        config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "index_topk_pattern": "FSF"}
        assert [kinds[0].index is not None for kinds in from_hf(config).layers] == [True, False, True]
        with pytest.raises(ConfigError, match=r"layer 1 is of the unknown kind 'indexed by X'"):
            from_hf({**config, "index_topk_pattern": "FXF"})

    def test_older_names_of_layer_kinds(self):
        types = ["mamba", "attention", "hybrid", "mamba2"]
        layout = from_hf({"model_type": "zamba2", "num_hidden_layers": 4, "layers_block_type": types})
        assert [[type(kind) for kind in kinds] for kinds in layout.layers] == [
            [Mamba2],
            [FullAttention],
            [FullAttention, Mamba2],
            [Mamba2],
        ]

    def test_layers_without_a_cache(self):
        layout = from_hf({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"})
        assert [len(kinds) for kinds in layout.layers] == [1, 0, 1, 0]

    def test_layers_beyond_the_last_predict_and_are_not_counted(self):
        ratios = [0, 4, 128, 0]
        layout = from_hf({"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": ratios})
        assert len(layout.layers) == 3
        assert type(layout.layers[0][0]) is RingWindow

    def test_the_rotated_part_from_its_factor(self):
        config = {"model_type": "deepseek_v4", "num_hidden_layers": 1, "compress_ratios": [0]}
        for more in ({}, {"partial_rotary_factor": 0.125}, {"qk_rope_head_dim": 64}):
            assert from_hf({**config, **more}).layers[0][0].entry.num_bytes == 584


class TestShipped:
    def test_there_are_some_and_they_are_sorted(self):
        assert len(model_names()) == 27
        assert model_names() == sorted(model_names())

    @pytest.mark.parametrize("model", model_names())
    def test_all_are_read_from_dict_file_and_object(self, model, tmp_path):
        config = model_config(model)
        layout = from_hf(config)
        text = config.get("text_config", config)
        assert len(layout.layers) == text["num_hidden_layers"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert from_hf(tmp_path) == from_hf(Config(config)) == layout
        assert layout.name

    @pytest.mark.parametrize("model", model_names())
    def test_configs_are_copies(self, model):
        model_config(model)["model_type"] = "changed"
        assert model_config(model)["model_type"] != "changed"

    @pytest.mark.parametrize("model", model_names())
    def test_layers_count_no_bytes_but_those_of_their_groups(self, model):
        layout = from_hf(model_config(model))
        length = layout.resume_step * 64
        for number, kinds in enumerate(layout.layers):
            if kinds and isinstance(kinds[0], SharedAttention):
                assert layout.layer_bytes(number, length) == {}
        whole = sum(sum(layout.layer_bytes(n, length).values()) for n in range(len(layout.layers)))
        state = layout.state_group.state_bytes if layout.state_group else 0
        windows = sum(
            g.unpadded_token_bytes * min(length, g.window - 1) for g in layout.paged_groups if g.window
        )
        grown = sum(g.unpadded_token_bytes * length for g in layout.paged_groups if g.window is None)
        assert whole == state + windows + grown


def grown_bytes(layout, length):
    """What all layers keep of so many tokens, states aside."""
    return sum(sum(g.layer_bytes(n, length).values()) for g in layout.paged_groups for n in g.layers)


def states_by_name(layout):
    sizes = {}
    for parts in layout.state_group.parts:
        for part in parts:
            sizes[part.name] = sizes.get(part.name, 0) + part.num_bytes
    return sizes


class TestPublished:
    """Figures of others, each with its source and the sum that gives it."""

    @pytest.mark.parametrize(
        ("model", "token_bytes"),
        [
            ("deepseek-v3", 70_272),  # 61 × (512 + 64) × 2
            ("qwen2.5-72b", 327_680),  # 2 × 80 × 8 × 128 × 2
            ("llama-3.1-405b", 516_096),  # 2 × 126 × 8 × 128 × 2
        ],
    )
    def test_insights_into_deepseek_v3(self, model, token_bytes):
        """Insights into DeepSeek-V3 (arXiv 2505.09343), Table 1: 70.272, 327.680 and 516.096 KB a token."""
        assert shipped(model).token_bytes == token_bytes

    @pytest.mark.parametrize(
        ("model", "gib"),
        [
            ("jamba-1.5-mini", 4),  # 4 layers × 2 × 8 × 128 × 2 B × 262,144
            ("llama-3.1-8b", 32),  # 32 × 4,096 B × 262,144
            ("llama-3.1-70b", 80),  # 80 × 4,096 B × 262,144
            # 126 × 4,096 B × 262,144; the paper has 252, after a checkpoint of 16 KV heads.
            ("llama-3.1-405b", 252 // 2),
        ],
    )
    def test_jamba_1_5(self, model, gib):
        """Jamba-1.5 (arXiv 2408.12570), Table 1: the KV cache at 256K tokens, 16 bit, states not counted."""
        assert shipped(model).token_bytes * 262_144 == gib * GIB
        assert grown_bytes(shipped(model), 262_144) == gib * GIB

    def test_jamba_1_5_on_mistral(self):
        """As above: 32 GB for Mistral 7B, with its window ignored; with it, 4,096 tokens are kept."""
        config = model_config("mistral-7b-v0.1")
        assert from_hf({**config, "sliding_window": None}).token_bytes * 262_144 == 32 * GIB
        assert shipped("mistral-7b-v0.1").group("window").token_bytes * 4_096 == 512 * MIB

    def test_jamba_states(self):
        """Not in the table: 28 × 8192 × 16 float32 of states and 28 × 8192 × 3 bf16 of convolutions."""
        assert states_by_name(shipped("jamba-1.5-mini")) == {"recurrent": 14_680_064, "conv": 1_376_256}

    @pytest.mark.parametrize(
        ("model", "published", "halved"),
        [
            ("llama-3.1-8b", (0.125, 1.95, 15.62), 1),
            ("llama-3.1-70b", (0.313, 4.88, 39.06), 1),
            ("llama-3.1-405b", (0.984, 15.38, 123.05), 2),  # the post has 16 KV heads, the model 8
        ],
    )
    def test_llama_31_post(self, model, published, halved):
        """huggingface.co/blog/llama31, Inference Memory Requirements: 1,024, 16,000 and 128,000 tokens."""
        token_bytes = shipped(model).token_bytes
        for tokens, gib in zip((1_024, 16_000, 128_000), published, strict=True):
            assert float(token_bytes * tokens * halved / GIB) == pytest.approx(gib, abs=0.0051)

    def test_deepseek_v4_post(self):
        """vLLM's post on DeepSeek V4 (2026-04-24): 9.62 GiB for a sequence of 2^20 tokens in bf16, window
        counted and compressor state not; 83.9 GiB for a V3.2-like stack; about 8.7 times less."""
        layout = shipped("deepseek-v4-pro", kv_dtype="bf16", index_dtype="bf16")
        pages = grown_bytes(layout, 2**20)
        assert pages == 30 * 262_144 * (1_024 + 256) + 31 * 8_192 * 1_024
        compressed = pages + states_by_name(layout)["window"]
        assert compressed == 10_334_371_840
        assert round(compressed / GIB, 2) == 9.62
        indexed = grown_bytes(shipped("deepseek-v3.2", index_dtype="bf16"), 2**20)
        assert indexed == 61 * 2**20 * (1_152 + 256)
        assert round(indexed / GIB, 1) == 83.9
        assert round(indexed / compressed, 1) == 8.7

    def test_pages_of_the_deepseek_v4_post(self):
        """As above: pages of 1,728 and 37,440 B a 256-token block."""
        layout = shipped("deepseek-v4-pro", page_tokens=256)
        for name, expected in (("hca", 1_728), ("csa", 37_440)):
            group = layout.group(name)
            assert group.storage.entries[0].page_bytes(group.entries_per_page) == expected

    def test_flash_mla(self):
        """FlashMLA's README and vLLM's post on DeepSeek-V3.2-Exp (2025-09-29): 512 + 16 + 128 B an entry;
        keys of the indexer in fp8 with a float32 scale, 132 B."""
        layout = shipped("deepseek-v3.2", kv_dtype="fp8_ds_mla")
        assert layout.layer_bytes(0, 1) == {"latent": 656, "index": 132}
        assert layout.token_bytes == 61 * (656 + 132) == 48_068

    def test_glm_5(self):
        """Published for GLM-5 in vLLM, 78 layers: 61,464 B a token."""
        kind = LatentAttention(entry=latent_fp8(512, 64), index=index_keys(128, "fp8"))
        assert Layout([kind] * 78).token_bytes == 61_464

    def test_gpt_oss_120b_in_vllm(self):
        """github.com/alvarobartt/hf-mem issue 60: 5.38 GiB are 78,384 tokens, all 36 layers stored."""
        layout = shipped("gpt-oss-120b")
        every_layer = sum(group.token_bytes for group in layout.paged_groups)
        assert every_layer == 36 * 2 * 8 * 64 * 2 == 73_728
        assert round(float(78_384 * every_layer / GIB), 2) == 5.38
        assert layout.token_bytes == 36_864

    def test_gpt_oss_20b_with_and_without_windows(self):
        """hf-mem pull 70: 32 requests of 8,192 tokens in bf16, 6.09 GiB with windows and 12.00 without."""
        layout = shipped("gpt-oss-20b")
        whole, window = layout.group("full"), layout.group("window")
        with_windows = 32 * (8_192 * whole.token_bytes + 128 * window.token_bytes)
        assert with_windows == 32 * (12 * 8192 + 12 * 128) * 2048
        assert round(float(with_windows / GIB), 2) == 6.09
        assert round(32 * grown_bytes(layout, 8_192) / GIB, 2) == 6.09
        assert 32 * 8_192 * (whole.token_bytes + window.token_bytes) == 12 * GIB

    def test_gpt_oss_20b_in_llama_cpp(self):
        """A log of llama.cpp: 3,072 MiB for 131,072 cells of 12 layers, 18 MiB for 768 cells of 12."""
        layout = shipped("gpt-oss-20b", kv_dtype="fp16")
        assert [len(group.layers) for group in layout.paged_groups] == [12, 12]
        assert layout.group("full").token_bytes * 131_072 == 3_072 * MIB
        assert layout.group("window").token_bytes * 768 == 18 * MIB

    def test_qwen3_next_in_llama_cpp(self):
        """A log of llama.cpp: 75.38 MiB a sequence, R 3.38 and S 72.00, all float32."""
        layout = from_hf({**model_config("qwen3-next-80b-a3b"), "torch_dtype": "float32"})
        # S: 36 × 32 × 128 × 128 × 4; R: 36 × 3 × (2 × 16 × 128 + 32 × 128) × 4.
        assert states_by_name(layout) == {"recurrent": 72 * MIB, "conv": Fraction(3.375) * MIB}
        assert layout.state_group.state_bytes / MIB == pytest.approx(75.38, abs=0.0051)
        assert shipped("qwen3-next-80b-a3b").token_bytes == 12 * 2 * 2 * 256 * 2

    def test_qwen35_27b_in_llama_cpp(self):
        """A log of llama.cpp, of a later model of the same shape: 16,384 MiB at 262,144 tokens in f16; 149.62
        MiB a sequence, R 5.62 and S 144.00, all float32."""
        assert shipped("qwen3.5-27b").token_bytes * 262_144 == 16_384 * MIB
        layout = from_hf(changed(model_config("qwen3.5-27b"), dtype="float32"))
        # S: 48 × 48 × 128 × 128 × 4; R: 48 × 3 × 10,240 × 4.
        assert states_by_name(layout) == {"recurrent": 144 * MIB, "conv": 48 * 3 * 10_240 * 4}
        assert layout.state_group.state_bytes / MIB == pytest.approx(149.62, abs=0.0051)

    def test_falcon_h1_34b(self):
        """A sizing test of others: 144 KiB a token, and 153,206,784 B a sequence with states in bf16."""
        layout = shipped("falcon-h1-34b", state_dtype="bf16")
        assert layout.token_bytes == 72 * 2 * 4 * 128 * 2 == 144 * 1024
        assert layout.state_group.state_bytes == 72 * (4096 * 256 * 2 + 3 * 5120 * 2) == 153_206_784

    def test_deepseek_v3_in_llama_cpp(self):
        """Reported of llama.cpp in f16, latents alone: 10.72 GiB at 163,840 tokens, 68.625 at 2^20."""
        layout = shipped("deepseek-v3", kv_dtype="fp16")
        assert round(grown_bytes(layout, 163_840) / GIB, 2) == 10.72
        assert grown_bytes(layout, 2**20) / GIB == 68.625

    def test_windows_of_the_shipped_models(self):
        """From the models' own cards and configs."""
        windows = {
            model: {
                kind.window
                for kinds in shipped(model).layers
                for kind in kinds
                if isinstance(kind, WindowAttention)
            }
            for model in (
                "gemma-3-27b",
                "gemma-3n-e4b",
                "gpt-oss-20b",
                "gpt-oss-120b",
                "mistral-7b-v0.1",
                "qwen2.5-72b",
            )
        }
        assert windows == {
            "gemma-3-27b": {1024},
            "gemma-3n-e4b": {512},
            "gpt-oss-20b": {128},
            "gpt-oss-120b": {128},
            "mistral-7b-v0.1": {4096},
            "qwen2.5-72b": set(),
        }
