"""Which families are checked, and what for: the cases of docs/families.md. In: a name; out: a model that was
checked, or an AssertionError.

Each check runs prompts with the cache and compares with plain `generate` of the same model. Its docstring is
a line on the page."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

import pagoda
from differential.judge import LOGITS, assert_same, prompt, sharp, sharp_model, spoil
from differential.tiny_models import TINY, config_class, tiny_config
from pagoda.hf._families import served_layout
from pagoda.layout import Layout

__all__ = ["CASES", "REFUSED", "SERVED", "Checked", "family", "is_here", "model_of"]

PAGE = 16  # tokens
FIRST = prompt(70)

# Models that see, which are given text alone: the case of their text, and what else their configs need.
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
_IMAGE = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
            "image_token_index": 60,
            "mm_tokens_per_image": 4,
        },
    ),
    "llava": (
        "llama",
        {"vision_config": {"model_type": "clip_vision_model", **_TOWER}, "image_token_index": 60},
    ),
    "paligemma": (
        "gemma",
        {"vision_config": {"model_type": "siglip_vision_model", **_TOWER}, "image_token_index": 60},
    ),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"vision_config": _QWEN_TOWER, **_IMAGE}),
    "qwen3_vl": (
        "qwen3_vl_text",
        {
            "vision_config": {
                **_QWEN_TOWER,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **_IMAGE,
        },
    ),
}
CASES = (*TINY, *SEEING)


def family(case: str) -> str:
    """The model type of a case. O(1)."""
    return case if case in SEEING else TINY[case].model_type


def is_here(case: str) -> bool:
    """Whether the installed transformers has the family of a case. O(1)."""
    return config_class(family(case)) is not None


def model_of(case: str) -> Any:
    """A model whose answers depend on their prompts."""
    if case not in SEEING:
        return sharp_model(case)
    text, more = SEEING[case]
    config = config_class(case)(text_config=tiny_config(text, torch.float32).to_dict(), **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return sharp(transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)).eval()


def _memory(layout: Layout) -> int:
    """Bytes that hold a few prompts, and not many."""
    return layout.memory_for(3, 96, chunk=PAGE)


class Checked:
    """A model with a cache, and plain `generate` beside it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        layout = served_layout(model)
        self.reason = layout if isinstance(layout, str) else None
        self.cache = pagoda.hf.enable(model, 2**20 if isinstance(layout, str) else _memory(layout))

    def ask(self, tokens: torch.Tensor, **settings: Any) -> tuple[Any, int]:
        """The answer with the cache, which is that of plain `generate`, and how many tokens were hit."""
        # An answer may have the padding token, which is one like any other then.
        settings = {**LOGITS, "max_new_tokens": 1, "attention_mask": torch.ones_like(tokens), **settings}
        ours = self.model.generate(tokens, **settings)
        call = self.cache.last()
        assert_same(ours, type(self.model).generate(self.model, tokens, **settings))
        assert call.reason == self.reason
        self.cache.check()
        return ours, call.hit_tokens


def lengths(checked: Checked) -> None:
    """A prompt again, and its first 48 and 49 tokens: whole pages are hit, except that of the last token."""
    assert checked.ask(FIRST)[1] == 0
    for length, hit in ((70, 64), (48, 32), (49, 48)):
        assert checked.ask(FIRST[:, :length])[1] == hit


def parting(checked: Checked) -> None:
    """A prompt that leaves another one in the middle of a page: the pages before are hit."""
    assert checked.ask(prompt(41, (11, 1)))[1] == 32


def second_turn(checked: Checked) -> None:
    """A second turn hits the prompt and the answer."""
    # 60 tokens and 4 of the answer are four pages; the last token of an answer was never computed with.
    answer, _ = checked.ask(prompt((60, 2)), max_new_tokens=5)
    assert checked.ask(torch.cat([answer.sequences, prompt((7, 3))], dim=1))[1] == 64


def eviction(checked: Checked) -> None:
    """The same prompts again after others have evicted them."""
    for number in range(4):
        checked.model.generate(prompt((90, 10 + number)), max_new_tokens=1, do_sample=False)
    assert checked.cache.stats().evicted_pages > 0
    assert checked.cache.stats().pool_bytes <= checked.cache.stats().memory_bytes
    assert checked.ask(FIRST)[1] == 0
    assert checked.ask(FIRST, max_new_tokens=3)[1] == 64
    spoil(checked.cache)  # or the comparisons above would say nothing
    once = {**LOGITS, "max_new_tokens": 1}
    ours = checked.model.generate(FIRST, **once)
    plain = type(checked.model).generate(checked.model, FIRST, **once)
    assert (ours.logits[0] - plain.logits[0]).abs().max() > 1e-2


def left_alone(checked: Checked) -> None:
    """A prompt twice: plain `generate` answers, the reason is counted, nothing is cached."""
    for _ in range(2):
        assert checked.ask(FIRST[:, :40])[1] == 0
    stats = checked.cache.stats()
    assert stats.refused == {checked.reason: 2}
    assert (stats.calls, stats.served, stats.cached_tokens, stats.pool_bytes) == (2, 0, 0, 0)


Check = Callable[[Checked], None]
SERVED: tuple[Check, ...] = (lengths, parting, second_turn, eviction)
REFUSED: tuple[Check, ...] = (left_alone,)
