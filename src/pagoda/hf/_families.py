"""Which models can be served. In: a model; out: the layout of its cache, or why it cannot be served.

A model is served if all of its layers store keys and values of tokens: full and grouped attention, latent
attention, windows, shared layers, in any combination. The name of its family does not matter."""

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
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary scaling that depends on the length of the text


def served_layout(model: PreTrainedModel) -> Layout | Reason:
    """Return the layout of a model's cache, or why the model cannot be served."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "an encoder-decoder model"
    generate = getattr(model.generate, "plain", model.generate)  # the original
    if getattr(generate, "__func__", None) is not GenerationMixin.generate:
        return f"{type(model).__name__} has its own generate"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        return "attention that is not causal"
    if any("rope_deltas" in vars(module) for module in model.modules()):
        return "positions that depend on the previous call"
    if getattr(config, "attn_temperature_tuning", None):  # Llama 4: by column, padding included
        return "queries that are scaled by column"
    if len(set(getattr(model, "hf_device_map", {"": ""}).values())) > 1:
        return "layers on several devices"
    if model.device.type == "meta":
        return "weights on the meta device"
    for rotary in _rotaries(config):
        name = rotary.get("rope_type", rotary.get("type"))
        if name in LENGTH_DEPENDENT:
            return f"rotary scaling that depends on the length ({name})"
    try:
        layout = from_hf(config, kv_dtype=model.dtype)
    except ConfigError as error:
        return f"unknown config: {error}"
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
    """Yield the rotary settings of a config: one, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            yield found
            yield from (each for each in found.values() if isinstance(each, Mapping))
