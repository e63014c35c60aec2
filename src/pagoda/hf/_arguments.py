"""Reads calls of `generate`. In: a model and the arguments; out: the prompts, or why the call is not served.

Only known arguments are served: one that could change the meaning of cached keys and values sends the call
to plain `generate`, with a reason."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

__all__ = ["Prompts", "Reason", "read_call"]

Reason: TypeAlias = str

# Arguments of `generate` that do not affect cached keys and values.
ARGUMENTS = {
    "inputs",
    "input_ids",
    "attention_mask",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "assistant_model",
    "tokenizer",
    "assistant_tokenizer",
}
# Settings that do not affect them either: how tokens are chosen, when to stop, what to return.
SETTINGS = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time"),
    *(
        "stop_strings",
        "do_sample",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
    ),
    *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
    *(
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    ),
    *("sequence_bias", "watermarking_config", "num_return_sequences", "output_scores", "output_logits"),
    *("return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "disable_compile"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "decoder_start_token_id"),
}
# Settings that must have one of these values, and the reason given otherwise.
REQUIRED: dict[str, tuple[tuple[Any, ...], Reason]] = {
    "use_cache": ((True,), "use_cache is off"),
    "cache_implementation": ((None, "hybrid"), "another kind of cache was requested"),
    "output_attentions": ((None, False), "attentions of the whole prompt were requested"),
    "output_hidden_states": ((None, False), "hidden states of the whole prompt were requested"),
    "guidance_scale": ((None, 1, 1.0), "guidance runs the model a second time"),
    "prefill_chunk_size": ((None,), "chunked prefill"),
    "token_healing": ((None, False), "token healing changes the prompt"),
    "is_assistant": ((None, False), "the model assists another one"),
    "num_beam_groups": ((None, 1), "group beam search"),
    "diversity_penalty": ((None, 0.0), "group beam search"),
}
# Fields of a generation config that have no effect on a call.
INNER = {"transformers_version", "compile_config"}
NOT_TAKEN = "arguments that generate does not accept"


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call, padded on the left to one length."""

    ids: torch.Tensor  # [prompts, length]
    tokens: tuple[npt.NDArray[np.int32], ...]  # of each prompt, without padding
    pads: tuple[int, ...]  # padding columns of each prompt
    copies: int  # sequences per prompt: beams, or sequences to return
    is_beams: bool
    end_tokens: frozenset[int]

    @property
    def length(self) -> int:
        """Columns of the batch."""
        return self.ids.shape[1]


def read_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prompts | Reason:
    """Return the prompts of a call, or why plain `generate` has to run it. Copies prompts from a GPU to the
    host."""
    try:
        bound = inspect.signature(type(model).generate).bind(model, *args, **kwargs)
    except TypeError:
        return NOT_TAKEN
    given = dict(bound.arguments)
    given.pop("self", None)
    given |= given.pop("kwargs", {})
    asked = given.copy()
    given = {name: value for name, value in given.items() if value is not None}
    configs = [given["generation_config"]] if "generation_config" in given else []
    configs.append(model.generation_config)
    if not all(isinstance(config, GenerationConfig) for config in configs):
        return NOT_TAKEN
    sources = [vars(config) for config in configs]

    def setting(name: str, usual: Any = None) -> Any:
        """Return an argument of the call (even None), else a setting of its config, else of the model's."""
        if name in asked:
            return asked[name]
        return next((source[name] for source in sources if source.get(name) is not None), usual)

    if (why := _unknown(given, sources)) is not None:
        return why
    for name, (allowed, why) in REQUIRED.items():
        if setting(name, allowed[0]) not in allowed:
            return why
    ids = given.get("input_ids", given.get("inputs"))
    if ids is None:
        return "no input_ids"
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
        return "input_ids are not a 2-D tensor of tokens"
    if ids.is_floating_point() or ids.is_complex():
        return "input_ids are not a 2-D tensor of tokens"
    try:
        rows = ids.detach().cpu().numpy()
        if rows.min() < 0 or rows.max() >= 2**31:
            return "input_ids contain a token that is not an int32 of at least 0"
        pads = _pads(given.get("attention_mask"), rows, setting("pad_token_id"))
        beams, sequences = int(setting("num_beams") or 1), int(setting("num_return_sequences") or 1)
        end = setting("eos_token_id")
        end_tokens = frozenset() if end is None else frozenset(int(each) for each in np.ravel(_plain(end)))
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: meta tensors and sparse ones
        return NOT_TAKEN
    if isinstance(pads, str):
        return pads
    tokens = tuple(row[pad:].astype(np.int32) for row, pad in zip(rows, pads, strict=True))
    return Prompts(ids, tokens, pads, max(beams, sequences), beams > 1, end_tokens)


def _unknown(given: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> Reason | None:
    """Return the first argument or setting that may affect cached keys and values."""
    if "past_key_values" in given:
        return "past_key_values were passed"
    if "inputs_embeds" in given:
        return "inputs_embeds were passed"
    if "Assistant" in type(given.get("assistant_model")).__name__:  # the small models made for Gemma
        return "an assistant model that reads the model's own keys and values"
    known = SETTINGS | REQUIRED.keys()
    for name in sorted(given.keys() - ARGUMENTS - known):
        if name != "synced_gpus" or given[name]:
            return f"argument {name}"
    for config in configs:
        for name in sorted(config.keys() - known - INNER):
            is_set = config[name] is not None and config[name] is not False
            if is_set and not name.startswith("_"):
                return f"setting {name}"
    return None


def _pads(mask: Any, rows: npt.NDArray[Any], pad_token: Any) -> tuple[int, ...] | Reason:
    """Return the padding columns on the left of each prompt, or why they are not supported."""
    if mask is None:
        # transformers then infers the mask from padding tokens.
        if pad_token is not None and bool((rows == int(np.ravel(_plain(pad_token))[0])).any()):
            return "padding tokens without an attention_mask"
        return (0,) * len(rows)
    if not isinstance(mask, torch.Tensor):
        return "the attention_mask is not a tensor"
    if tuple(mask.shape) != rows.shape:
        return "the attention_mask has another shape than input_ids"
    # Compare before converting: numpy lacks some dtypes.
    seen = (mask.detach() == 1).cpu().numpy()
    if bool((mask.detach() != 0).cpu().numpy()[~seen].any()):
        return "the attention_mask has values other than 0 and 1"
    pads = seen.argmax(axis=1)
    if not seen[:, -1].all() or (seen.sum(axis=1) != rows.shape[1] - pads).any():
        return "the attention_mask is not left padding"
    return tuple(int(pad) for pad in pads)


def _plain(value: Any) -> Any:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
