"""From a Hugging Face config to a Layout. Downloads nothing; imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.layout._configs.families import ALIASES, FAMILIES, Family
from pagoda.layout._configs.fields import Fields
from pagoda.layout._configs.readers import Options
from pagoda.layout._entries import KV_DTYPES, dtype_name
from pagoda.layout._kinds import Kind, LatentAttention, SharedAttention
from pagoda.layout._layout import Layout
from pagoda.layout._numbers import count

__all__ = ["from_hf", "model_config", "model_names"]


def from_hf(
    config: Any,
    *,
    page_tokens: int | Mapping[str, int] | None = None,
    kv_dtype: Any = "auto",
    index_dtype: Any = "auto",
    state_dtype: Any = "auto",
    unaccepted: int = 1,
    like: str | None = None,
    name: str = "",
) -> Layout:
    """Return the layout of the model that a Hugging Face config describes.

    `config` is a config object, its dict, or the path of a config.json or its folder. Of a multimodal model,
    only the text part is read. `page_tokens` is as for Layout.

    `kv_dtype` is the dtype of keys and values: 'auto' (the model's own; fp8 entries for DeepSeek-V4), 'bf16',
    'fp16', 'fp32', 'fp8', 'fp8_e5m2', or for latent attention 'fp8_ds_mla', which includes scales. For
    models with an indexer (DeepSeek-V3.2), 'fp8' means 'fp8_ds_mla', the format that their kernels read.
    `index_dtype` is the dtype of indexer keys: 'fp8' (auto), 'fp4', or unquantised. `state_dtype` is the
    dtype of recurrent states; 'auto' is float32 unless the config specifies another one. `unaccepted` is the
    number of tokens that may be written before they are accepted; it makes ring windows longer and has no
    effect on recurrent states and convolutions.

    `like="llama"` reads a config with an unknown model type as a Llama. `name` is shown to people.
    Errors: ConfigError, naming the unknown model type, field, or kind of layer.
    """
    if isinstance(config, str) and config in model_names() and not Path(config).exists():
        raise ConfigError(
            f"config: there is no file {config!r}; for the config that comes with Pagoda, use "
            f"from_hf(model_config({config!r}))"
        )
    fields = Fields.read(config).text()
    options = Options(
        _kv_dtype(kv_dtype),
        _index_dtype(index_dtype),
        "auto" if state_dtype == "auto" else dtype_name(state_dtype, "state_dtype", KV_DTYPES[:3]),
        count(unaccepted, "unaccepted"),
    )
    family = _family(fields, like)
    called = name or str(fields.get("_name_or_path") or "") or fields.model_type
    fields = fields.with_defaults(family.defaults)
    layers = [list(kinds) for kinds in _read_layers(fields, family, options)]
    if options.kv_dtype == "fp8_ds_mla" and not any(
        isinstance(k, LatentAttention) for ks in layers for k in ks
    ):
        raise options.not_latent(fields)
    limit = fields.integer("max_position_embeddings", "model_max_length", default=family.context, low=0)
    return Layout(layers, page_tokens, name=called, context=limit or None)


def model_names() -> list[str]:
    """Return the sorted names of the models whose configs come with Pagoda."""
    folder = resources.files("pagoda.layout") / "models"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def model_config(name: str) -> dict[str, Any]:
    """Return the config of a well-known model, reduced to the fields that affect what it stores.

    Errors: ConfigError for a name that `model_names` does not list.
    """
    if name not in model_names():
        raise ConfigError(
            f"name: unknown model {str(name)[:40]!r}: model_names() lists the models that come with Pagoda"
        )
    file = resources.files("pagoda.layout") / "models" / f"{name}.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _family(fields: Fields, like: str | None) -> Family:
    wanted = fields.model_type if like is None else str(like)
    family = FAMILIES.get(ALIASES.get(wanted, wanted))
    if family is not None:
        return family
    known = ", ".join(sorted({*FAMILIES, *ALIASES}))
    if like is not None:
        raise ConfigError(f"like: unknown family {wanted[:40]!r}: give one of {known}")
    if not wanted:
        raise ConfigError("config has no model_type: give the config.json of a causal language model")
    raise ConfigError(
        f"model_type {wanted[:60]!r} is unknown. If its layers store the same as those of a known family, "
        f"name that family: like='llama'. Otherwise describe them with Layout([FullAttention(…), …]), or add "
        f"the family to pagoda/layout/_configs/families.py. Known: {known}"
    )


def _read_layers(fields: Fields, family: Family, options: Options) -> list[tuple[Kind, ...]]:
    types = family.types(fields)
    if fields.has("num_hidden_layers"):
        expected = fields.integer("num_hidden_layers")
        if len(types) != expected:
            raise fields.error(f"it has {expected} layers but lists the types of {len(types)}")
    # Each kind is read once, not once per layer.
    kinds: dict[str, tuple[Kind, ...]] = {}
    for number, layer_type in enumerate(types):
        if layer_type in kinds:
            continue
        if layer_type not in family.kinds:
            raise fields.error(
                f"layer {number} is of the unknown kind {layer_type[:60]!r}; this family has "
                f"{', '.join(family.kinds)}. Describe the layers with Layout([…]), or add a reader for that "
                f"kind to pagoda/layout/_configs/readers.py"
            )
        try:
            kinds[layer_type] = tuple(read(fields, options) for read in family.kinds[layer_type])
        except ConfigError as unfit:
            raise _named(unfit, fields) from None
    return _share([kinds[layer_type] for layer_type in types], types, fields)


# Names of sizes in entries, and in configs.
_FIELDS = {"latent_dim": "kv_lora_rank", "index_dim": "index_head_dim"}


def _named(unfit: ConfigError, fields: Fields) -> ConfigError:
    """Return the error of a kind or an entry with the model and the field that it comes from."""
    text = str(unfit)
    if fields.where in text or text.startswith(("kv_dtype", "index_dtype", "state_dtype")):
        return unfit
    for name, field in _FIELDS.items():
        text = text.replace(name, field)
    return fields.error(text)


def _share(layers: list[tuple[Kind, ...]], types: list[str], fields: Fields) -> list[tuple[Kind, ...]]:
    """Let the last `num_kv_shared_layers` layers read what the last earlier layer of their type stores."""
    shared = fields.integer("num_kv_shared_layers", default=0, low=0)
    first = len(layers) - shared
    for number in range(max(first, 0), len(layers)) if shared else ():
        sources = [other for other in range(first) if types[other] == types[number]]
        if not sources:
            raise fields.error(
                f"layer {number} shares keys and values, but no {types[number]} layer comes before {first}"
            )
        layers[number] = (SharedAttention(layer=sources[-1]),)
    return layers


def _kv_dtype(value: Any) -> str:
    text = str(value)
    if text in ("auto", "fp8_ds_mla"):
        return text
    return dtype_name(value, "kv_dtype", KV_DTYPES)


def _index_dtype(value: Any) -> str:
    text = str(value)
    return text if text in ("auto", "fp4") else dtype_name(value, "index_dtype", KV_DTYPES)
