"""Reading a call of `generate`. In: a model and the arguments; out: the prompts, or why they are left alone.

What is not known here is not touched: an argument or a setting that could change what the cache means sends
the call to plain `generate`, with the reason."""

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

# Arguments of `generate` that leave what is cached as it is.
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
# Settings likewise: how tokens are chosen, when it ends, what is returned of the new ones.
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
# Settings that must have one of these values, and what to say otherwise.
REQUIRED: dict[str, tuple[tuple[Any, ...], Reason]] = {
    "use_cache": ((True,), "use_cache is off"),
    "cache_implementation": ((None, "hybrid"), "another kind of cache is asked for"),
    "output_attentions": ((None, False), "attentions of the whole prompt are asked for"),
    "output_hidden_states": ((None, False), "hidden states of the whole prompt are asked for"),
    "guidance_scale": ((None, 1, 1.0), "guidance runs the model a second time"),
    "prefill_chunk_size": ((None,), "the prefill is cut into chunks"),
    "token_healing": ((None, False), "token healing changes the prompt"),
    "is_assistant": ((None, False), "the model assists another one"),
    "num_beam_groups": ((None, 1), "beams in groups"),
    "diversity_penalty": ((None, 0.0), "beams in groups"),
}
# Neither says anything about a call.
INNER = {"transformers_version", "compile_config"}
NOT_TAKEN = "arguments that generate does not take"


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call: one row each, padded on the left to one length."""

    ids: torch.Tensor  # [rows, length]
    tokens: tuple[npt.NDArray[np.int32], ...]  # of each row, without its padding
    pads: tuple[int, ...]
    copies: int  # rows that each becomes: beams, or sequences to return
    is_beams: bool
    end_tokens: frozenset[int]

    @property
    def length(self) -> int:
        """Columns of the batch."""
        return self.ids.shape[1]


def read_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prompts | Reason:
    """The prompts of a call, or why it is left to plain `generate`. O(tokens); a prompt on a GPU is copied
    to the host."""
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
        """What the call sets itself, also None, comes before its config, that before the model's."""
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
        return "input_ids are not a matrix of tokens"
    if ids.is_floating_point() or ids.is_complex():
        return "input_ids are not a matrix of tokens"
    try:
        rows = ids.detach().cpu().numpy()
        if rows.min() < 0 or rows.max() >= 2**31:
            return "input_ids have a negative token"
        pads = _pads(given.get("attention_mask"), rows, setting("pad_token_id"))
        beams, sequences = int(setting("num_beams") or 1), int(setting("num_return_sequences") or 1)
        end = setting("eos_token_id")
        end_tokens = frozenset() if end is None else frozenset(int(each) for each in np.ravel(_plain(end)))
    except (TypeError, ValueError, RuntimeError):  # the last of tensors that have no values, or sparse ones
        return NOT_TAKEN
    if isinstance(pads, str):
        return pads
    tokens = tuple(row[pad:].astype(np.int32) for row, pad in zip(rows, pads, strict=True))
    return Prompts(ids, tokens, pads, max(beams, sequences), beams > 1, end_tokens)


def _unknown(given: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> Reason | None:
    """The first argument or setting that is not known to leave the cache as it is."""
    if "past_key_values" in given:
        return "a cache was passed in"
    if "inputs_embeds" in given:
        return "embeddings as input"
    if "Assistant" in type(given.get("assistant_model")).__name__:  # the small models made for Gemma
        return "an assistant that reads what the model has computed"
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
    """Padding columns on the left of each row."""
    if mask is None:
        # Then transformers guesses by the padding token.
        if pad_token is not None and bool((rows == int(np.ravel(_plain(pad_token))[0])).any()):
            return "padding tokens without an attention_mask"
        return (0,) * len(rows)
    if not isinstance(mask, torch.Tensor):
        return "an attention_mask that is no tensor"
    if tuple(mask.shape) != rows.shape:
        return "an attention_mask of another shape"
    # Of any dtype: numpy does not have all of them.
    seen = (mask.detach() == 1).cpu().numpy()
    if bool((mask.detach() != 0).cpu().numpy()[~seen].any()):
        return "an attention_mask of other values than 0 and 1"
    pads = seen.argmax(axis=1)
    if not seen[:, -1].all() or (seen.sum(axis=1) != rows.shape[1] - pads).any():
        return "an attention_mask with holes"
    return tuple(int(pad) for pad in pads)


def _plain(value: Any) -> Any:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
