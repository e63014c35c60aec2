"""Which models can be served. In: a model; out: what its cache holds, as a layout, or why not.

A layout says what each layer keeps; served are those whose layers keep keys and values of tokens, in any
number of kinds: full and grouped attention, latent attention, windows, layers that share. What a family is
called does not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from pagoda.errors import ConfigError
from pagoda.hf._arguments import Reason
from pagoda.layout import (
    FullAttention,
    Kind,
    LatentAttention,
    Layout,
    SharedAttention,
    WindowAttention,
    from_hf,
)

__all__ = ["served_layout"]

PAGE_TOKENS = 16  # hits are whole pages
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary scaling that changes when a text gets longer


def served_layout(model: PreTrainedModel) -> Layout | Reason:
    """What a model keeps, or why it is not served. Cost: reading its config."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    generate = getattr(model.generate, "plain", model.generate)  # the one below ours
    if getattr(generate, "__func__", None) is not GenerationMixin.generate:
        return f"{type(model).__name__} has a generate of its own"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        return "tokens that attend to later ones"
    if any("rope_deltas" in vars(module) for module in model.modules()):
        return "positions that depend on the call before"
    if getattr(config, "attn_temperature_tuning", None):  # Llama 4: by column, padding included
        return "queries that are scaled by their column"
    if len(set(getattr(model, "hf_device_map", {"": ""}).values())) > 1:
        return "layers on several devices"
    if model.device.type == "meta":
        return "weights on no device"
    for rotary in _rotaries(config):
        name = rotary.get("rope_type", rotary.get("type"))
        if name in LENGTH_DEPENDENT:
            return f"rotary scaling that depends on the length ({name})"
    try:
        layout = from_hf(config, kv_dtype=model.dtype)
    except ConfigError as error:
        return f"the config is not known: {error}"
    for kinds in layout.layers:
        for kind in kinds:
            if (why := _unserved(kind)) is not None:
                return why
    return from_hf(config, kv_dtype=model.dtype, page_tokens=PAGE_TOKENS)


def _unserved(kind: Kind) -> Reason | None:
    if isinstance(kind, LatentAttention) and kind.index is not None:
        return "layers with indexer keys"
    if isinstance(kind, WindowAttention) and kind.sink_tokens:
        return "windows that keep the first tokens"
    if not isinstance(kind, FullAttention | WindowAttention | LatentAttention | SharedAttention):
        return f"layers that keep a state ({type(kind).__name__})"
    return None


def _rotaries(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary embeddings of a config: one, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            yield found
            yield from (each for each in found.values() if isinstance(each, Mapping))
