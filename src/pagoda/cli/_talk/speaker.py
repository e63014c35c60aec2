"""A model that answers messages. In: messages; out: a streamed answer and its statistics."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from pagoda.errors import ArgumentError, ConfigError
from pagoda.hf import PrefixCache
from pagoda.layout._numbers import counted

__all__ = ["Answer", "Message", "Speaker"]

Message = Mapping[str, str]  # role: system, user or assistant; content


@dataclass(frozen=True)
class Answer:
    """One answer and its statistics. `hit_tokens` is None without a cache; `reason` is why the cache was
    bypassed, if it was."""

    text: str
    prompt_tokens: int
    hit_tokens: int | None
    reason: str | None
    num_tokens: int
    first_s: float  # from the call to the first token
    rest_s: float  # from the first to the last token
    was_stopped: bool = False

    def __str__(self) -> str:
        came = "" if self.hit_tokens is None else f", {self.hit_tokens:,} from the cache"
        if self.reason is not None:
            came = f", none from the cache ({self.reason})"
        rate = f", {(self.num_tokens - 1) / self.rest_s:.1f} per second" if self.num_tokens > 1 else ""
        return (
            f"{counted(self.prompt_tokens, 'prompt token')}{came} · first token after {self.first_s:.2f} s · "
            f"{counted(self.num_tokens, 'token')}{rate}{', stopped' if self.was_stopped else ''}"
        )


class Speaker:
    """A model with its tokenizer, and optionally a cache.

    With `is_raw`, messages are joined as plain text; otherwise the tokenizer's chat template formats them.
    Temperature 0 takes the most likely token. Errors: ConfigError if there is no chat template."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        cache: PrefixCache | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        is_raw: bool = False,
    ) -> None:
        if not is_raw and not tokenizer.chat_template:
            raise ConfigError("model: its tokenizer has no chat template: give --raw to continue plain text")
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.max_tokens, self.temperature, self.is_raw = max_tokens, temperature, is_raw
        # The model's longest context, or None if its config does not specify one.
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context: int | None = limit if isinstance(limit, int) and limit > 0 else None
        self.is_answering = False  # a first token has come
        self.is_stopped = False  # set this to end the answer after the current token

    @property
    def room(self) -> int | None:
        """The longest prompt that leaves room for an answer, in tokens; None without a limit."""
        if self.context is None:
            return None
        return self.context - min(self.max_tokens, self.context // 2)

    def encode(self, messages: Sequence[Message]) -> dict[str, torch.Tensor]:
        """Return a prompt as `generate` takes it, [1, tokens] each. Errors: ConfigError if the chat template
        fails."""
        # Invalid input bytes arrive as lone surrogates, which tokenizers refuse.
        turns = [
            {"role": each["role"], "content": each["content"].encode("utf-8", "replace").decode()}
            for each in messages
        ]
        if self.is_raw:
            text = "\n".join(turn["content"] for turn in turns)
            return dict(self.tokenizer(text, return_tensors="pt", verbose=False))
        try:
            found = self.tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                tokenizer_kwargs={"verbose": False},
            )
        except Exception as error:  # a template is a program that comes with the model
            told = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model: its chat template failed: {told}; try without --system, or with --raw"
            ) from error
        return dict(found)

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Return the length of the prompt."""
        return self.encode(messages)["input_ids"].shape[1]

    def ask(self, messages: Sequence[Message], write: Callable[[str], object] = lambda text: None) -> Answer:
        """Return the answer, and pass it to `write` word by word. Errors: ArgumentError for a prompt that is
        empty or too long."""
        inputs = {name: value.to(self.model.device) for name, value in self.encode(messages).items()}
        prompt_tokens, context = inputs["input_ids"].shape[1], self.context
        if prompt_tokens == 0:
            raise ArgumentError("prompt: it is empty: give at least one token")
        if context is not None and prompt_tokens >= context:
            raise ArgumentError(
                f"prompt: it has {prompt_tokens:,} tokens, but the model reads at most {context:,}: "
                "shorten it"
            )
        num_tokens = self.max_tokens if context is None else min(self.max_tokens, context - prompt_tokens)
        self.is_answering = self.is_stopped = False
        live = _Live(self, write)
        begin = time.perf_counter()
        try:
            output = self.model.generate(
                inputs["input_ids"],
                attention_mask=inputs.get("attention_mask"),
                max_new_tokens=num_tokens,
                streamer=live,
                stopping_criteria=StoppingCriteriaList([_Stop(self)]),
                **self._choice(),
                **self._ends(),
            )
        finally:
            self.is_answering = False
        call = None if self.cache is None else self.cache.last()
        new = output[0, prompt_tokens:]
        return Answer(
            text=_harmless(self.tokenizer.decode(new, skip_special_tokens=True)),
            prompt_tokens=prompt_tokens,
            hit_tokens=None if call is None else call.hit_tokens,
            reason=None if call is None else call.reason,
            num_tokens=len(new),
            first_s=live.times[0] - begin,
            rest_s=live.times[-1] - live.times[0],
            was_stopped=self.is_stopped,
        )

    def _choice(self) -> dict[str, Any]:
        if self.temperature > 0:
            return {"do_sample": True, "temperature": self.temperature}
        return {"do_sample": False}

    def _ends(self) -> dict[str, Any]:
        """Return the tokens that end an answer: those of the model and of the tokenizer, which end a turn."""
        told = (self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id)
        ends = sorted({int(end) for each in told if each is not None for end in np.ravel(each)})
        if not ends:
            return {}
        pad = self.tokenizer.pad_token_id
        return {"eos_token_id": ends, "pad_token_id": ends[0] if pad is None else pad}


class _Live(TextStreamer):
    """Writes words as soon as they are complete, and records when tokens arrive."""

    def __init__(self, speaker: Speaker, write: Callable[[str], object]) -> None:
        super().__init__(speaker.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.speaker, self.write = speaker, write
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            self.speaker.is_answering = True
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.write(_harmless(text))


class _Stop(StoppingCriteria):
    """Ends `generate` when the speaker was stopped."""

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stopped = self.speaker.is_stopped
        return torch.full((input_ids.shape[0],), stopped, dtype=torch.bool, device=input_ids.device)


def _harmless(text: str) -> str:
    """Return a model's text with control characters escaped."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else ascii(c)[1:-1] for c in text
    )
