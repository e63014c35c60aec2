"""Every way of generating with the cache, against plain `generate` of the same model: tokens are equal."""

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "transformers", reason="needs transformers: plain generate is what answers are compared with"
)

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import pagoda
from differential.judge import GREEDY, LOGITS, assert_same, batch, prompt, sharp, sharp_model
from differential.tiny_models import tiny_config, tiny_model
from pagoda.errors import ArgumentError, ConfigError
from pagoda.hf._families import served_layout

# All tokens, windows beside them, latent vectors, windows with sinks.
FAMILIES = ["llama", "gemma3_text", "deepseek_v3", "gpt_oss"]


def new_model(case: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Two layers: a window and one that keeps all tokens, where a family has both."""
    return sharp_model(case, dtype, seed, num_layers=2)


@functools.cache
def shared_model(case: str) -> Any:
    """A model that no test changes."""
    return new_model(case)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(request.param)


def of_families(names: Any, *for_all: str) -> list[tuple[str, str]]:
    """All with the first two families, some with the others."""
    others = [(family, name) for family in FAMILIES[2:] for name in for_all]
    return [(family, name) for family in FAMILIES[:2] for name in names] + others


@pytest.fixture
def cache(model: Any) -> Iterator[Any]:
    with pagoda.hf.cached(model, memory="2MiB") as made:
        yield made
        made.check()
        assert made._memory.manager.stats().rows == 0


@pytest.fixture
def llama() -> Any:
    """A model that the test may change."""
    return new_model("llama")


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` as if there were no cache, under a seed."""
    torch.manual_seed(5)
    return type(model).generate(model, *args, **kwargs)


def judged(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The answer with the cache, which is the plain one."""
    expected = plain(model, *args, **kwargs)
    torch.manual_seed(5)
    ours = model.generate(*args, **kwargs)
    assert_same(ours, expected)
    return ours


def hit(model: Any) -> int:
    call = model.generate.cache.last()
    assert call.reason is None
    return int(call.hit_tokens)


# ── one prompt ──────────────────────────────────────────────────────────────────────────────────────


def test_prompts_of_every_length_about_a_page(model: Any, cache: Any) -> None:
    known = 0
    for length in (1, 15, 16, 17, 32, 31, 33, 49):
        judged(model, prompt(length), **{**LOGITS, "max_new_tokens": 2})
        assert hit(model) == min(known, (length - 1) // 16 * 16)
        known = max(known, length // 16 * 16)
    assert cache.stats().cached_tokens >= 48


def test_the_same_prompt_again_and_again(model: Any, cache: Any) -> None:
    for number in range(3):
        judged(model, prompt(40), **LOGITS)
        assert hit(model) == (32 if number else 0)
    stats = cache.stats()
    assert (stats.calls, stats.served, stats.prompt_tokens, stats.hit_tokens) == (3, 3, 120, 64)
    assert stats.stored_tokens == stats.cached_tokens == 32


def test_one_token_is_asked_for(model: Any, cache: Any) -> None:
    for length in (48, 48, 1):
        judged(model, prompt(length), max_new_tokens=1, do_sample=False)


def test_a_conversation(model: Any, cache: Any) -> None:
    """Each turn hits all of the turns before, but the last page."""
    told = prompt(20)
    for number in range(3):
        mask = torch.ones_like(told)
        answer = judged(model, told, attention_mask=mask, **{**GREEDY, "max_new_tokens": 18})
        computed = told.shape[1] - 6 - 1 if number else 0  # the last token of an answer was not
        assert hit(model) == computed // 16 * 16
        told = torch.cat([answer, prompt((6, number))], dim=1)


def test_a_prompt_longer_than_the_pool(model: Any) -> None:
    memory = layout_of(model).memory_for(1, 96, chunk=16)
    with pagoda.hf.cached(model, memory) as cache:
        for _ in range(2):
            judged(model, prompt(200), **{**LOGITS, "max_new_tokens": 2})
        assert 0 < hit(model) <= 96
        assert cache.stats().pool_bytes <= memory
        cache.check()


def layout_of(model: Any) -> Any:
    layout = served_layout(model)
    assert not isinstance(layout, str)
    return layout


def test_inference_mode_and_not(model: Any, cache: Any) -> None:
    for number, length in enumerate((40, 40, 60, 60)):
        with torch.inference_mode(number % 2 == 1):
            judged(model, prompt(length), **{**LOGITS, "max_new_tokens": 2})
        assert hit(model) == (0, 32, 32, 48)[number]


def test_it_may_be_enabled_in_inference_mode(llama: Any) -> None:
    with torch.inference_mode():
        pagoda.hf.enable(llama, "1MiB")
        judged(llama, prompt(40), **GREEDY)
    judged(llama, prompt(70), **GREEDY)
    assert hit(llama) == 32


@pytest.mark.parametrize("window", [16, 17, 18, 40])
def test_windows_as_long_as_a_page_and_longer(window: int) -> None:
    config = tiny_config("gemma3_text", torch.float32)
    config.sliding_window, config.tie_word_embeddings = window, False
    model = sharp(tiny_model(config))
    short = {**LOGITS, "max_new_tokens": 2}
    with pagoda.hf.cached(model, "1MiB"):
        for length, tokens in ((70, 0), (70, 64), (64, 48), (50, 48), (90, 64)):
            judged(model, prompt(length), **short)
            assert hit(model) == tokens
        judged(model, **batch([prompt(90), prompt(33, (20, 1)), prompt(75)]), **short)
        # The shortest row has 37 columns of padding and two pages: the middle of a page of the others.
        assert hit(model) == 69 + 32 + 54
        answer = judged(
            model, **batch([prompt((40, 2)), prompt((31, 3))]), **{**GREEDY, "max_new_tokens": 26}
        )
        told = answer[1:, 9:]
        judged(model, torch.cat([told, prompt(3)], dim=1), attention_mask=torch.ones(1, 60), **short)
        assert hit(model) == 48


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────

KNOWN = prompt(70)
BATCHES = {
    "all known": ([KNOWN, KNOWN[:, :45]], (64, 32)),
    "the longer one is new": ([prompt((70, 1)), KNOWN[:, :33]], (0, 32)),
    "the shorter one is new": ([KNOWN, prompt((33, 1))], (64, 0)),
    "none is known": ([prompt((50, 1)), prompt((41, 2))], (0, 0)),
    "part of a row is known": ([prompt(40, (30, 1)), KNOWN, KNOWN[:, :50]], (32, 64, 48)),
    "one token": ([KNOWN, prompt(1)], (64, 0)),
    "a row twice": ([KNOWN, KNOWN, KNOWN[:, :69]], (64, 64, 64)),
    "no padding": ([KNOWN[:, :64], prompt(48, (16, 1))], (48, 48)),
}


@pytest.mark.parametrize(
    ("model", "name"), of_families(BATCHES, "all known", "part of a row is known"), indirect=["model"]
)
def test_batches(model: Any, cache: Any, name: str) -> None:
    model.generate(KNOWN, max_new_tokens=1, do_sample=False)
    rows, hits = BATCHES[name]
    inputs = batch(rows)
    judged(model, **inputs, **{**LOGITS, "max_new_tokens": 2})
    # All rows begin at one column, the least that a row has, padding included.
    pads = [inputs["input_ids"].shape[1] - row.shape[1] for row in rows]
    columns = min(pad + found for pad, found in zip(pads, hits, strict=True))
    assert hit(model) == sum(max(0, columns - pad) for pad in pads)
    # What a padded row has left is right for the row alone.
    for row in rows[:2]:
        judged(model, row, **{**LOGITS, "max_new_tokens": 1})
        assert hit(model) == (row.shape[1] - 1) // 16 * 16


def test_rows_that_end_early(model: Any, cache: Any) -> None:
    rows = batch([prompt(40), prompt((33, 1)), prompt((37, 2))])
    asked = {**GREEDY, "max_new_tokens": 12, "pad_token_id": 0}
    free = plain(model, **rows, **asked)[:, 40:]
    answers = judged(model, **rows, **{**asked, "eos_token_id": [int(free[0, 3]), int(free[1, 8])]})
    assert (answers[:, -1] == 0).any()  # some row was filled up
    for row in (0, 1):  # what was computed behind an end is no answer, and what came before it is right
        told = answers[row : row + 1, int((rows["attention_mask"][row] == 0).sum()) :]
        told = torch.cat([told, prompt((5, 3))], dim=1)
        judged(model, told, attention_mask=torch.ones_like(told), **{**LOGITS, "max_new_tokens": 1})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16], ids=str)
def test_masks_may_be_of_any_type(llama: Any, dtype: torch.dtype) -> None:
    inputs = batch([prompt(40), prompt((33, 1))])
    pagoda.hf.enable(llama, "1MiB")
    for _ in range(2):
        judged(llama, inputs["input_ids"], attention_mask=inputs["attention_mask"].to(dtype), **LOGITS)
    assert hit(llama) == 32 + 25


# ── ways of generating ──────────────────────────────────────────────────────────────────────────────

WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.8},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "some of the beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "a penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}


@pytest.mark.parametrize(
    ("model", "way"), of_families(WAYS, "several sequences", "some of the beams"), indirect=["model"]
)
def test_ways_of_generating(model: Any, cache: Any, way: str) -> None:
    settings = {"max_new_tokens": 4, "eos_token_id": 9, "do_sample": False, **WAYS[way]}
    model.generate(prompt(50), max_new_tokens=1, do_sample=False)
    judged(model, prompt(50), **settings)
    assert hit(model) == 48
    judged(model, **batch([prompt(50, (9, 1)), prompt((30, 2))]), **settings)
    judged(model, **batch([prompt(50, (9, 1)), prompt((30, 2))]), **settings)
    assert hit(model) == 45 + 16  # 29 columns of padding and a page


def test_beams_leave_what_was_answered(model: Any, cache: Any) -> None:
    """Rows of the cache change places at every step: what is kept is that of the answer."""
    answer = judged(model, prompt(40), num_beams=4, max_new_tokens=26, do_sample=False, eos_token_id=None)
    judged(model, torch.cat([answer, prompt((3, 1))], dim=1), attention_mask=torch.ones(1, 69), **LOGITS)
    assert hit(model) == 64


@pytest.mark.parametrize("seed", [0, 1], ids=["same weights", "other weights"])
def test_assisted_decoding(model: Any, cache: Any, seed: int) -> None:
    assistant = new_model(cases_of(model), seed=seed)
    settings = {**GREEDY, "max_new_tokens": 16, "assistant_model": assistant}
    with pagoda.hf.cached(assistant, "1MiB") as other:
        for number in range(2):
            expected = plain(model, prompt(50), **{**settings, "assistant_model": None})
            assert model.generate(prompt(50), **settings).tolist() == expected.tolist()
            assert hit(model) == (48 if number else 0)
        assert other.stats().served == 0  # an assistant goes back and forth in a cache of its own
        other.check()
    told = torch.cat([expected, prompt((3, 1))], dim=1)
    judged(model, told, attention_mask=torch.ones_like(told), **LOGITS)
    assert hit(model) == 64


def cases_of(model: Any) -> str:
    return next(case for case in FAMILIES if shared_model(case) is model)


def test_prompt_lookup(model: Any, cache: Any) -> None:
    repeated = torch.cat([prompt(30)] * 2 + [prompt(7)], dim=1)
    for number in range(2):
        asked = {**GREEDY, "max_new_tokens": 12}
        ours = model.generate(repeated, prompt_lookup_num_tokens=3, **asked)
        assert ours.tolist() == plain(model, repeated, **asked).tolist()
        assert hit(model) == (64 if number else 0)


class Heard(BaseStreamer):
    """A streamer that remembers, and may have enough."""

    def __init__(self, enough: int = 10**6, error: type[BaseException] = RuntimeError) -> None:
        self.tokens: list[list[int]] = []
        self.enough, self.error, self.ended = enough, error, False

    def put(self, value: torch.Tensor) -> None:
        if len(self.tokens) == self.enough:
            raise self.error("enough")
        self.tokens.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


def test_streamers_hear_the_same(model: Any, cache: Any) -> None:
    for _ in range(2):
        heard, expected = Heard(), Heard()
        model.generate(prompt(40), streamer=heard, **GREEDY)
        plain(model, prompt(40), streamer=expected, **GREEDY)
        assert heard.tokens == expected.tokens
        assert heard.ended
    assert hit(model) == 32


class Until(StoppingCriteria):
    """Ends, or fails, when a text has so many tokens."""

    def __init__(self, length: int, error: type[BaseException] | None = None) -> None:
        self.length, self.error = length, error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_long = input_ids.shape[1] >= self.length
        if is_long and self.error is not None:
            raise self.error("so long")
        return torch.full((input_ids.shape[0],), is_long)


def test_stopping_criteria(model: Any, cache: Any) -> None:
    stop = StoppingCriteriaList([Until(43)])
    for _ in range(2):
        answer = judged(model, prompt(40), stopping_criteria=stop, **{**GREEDY, "max_new_tokens": 9})
        assert answer.shape[1] == 43


def test_settings_come_from_anywhere(model: Any, cache: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=True, num_return_sequences=2, eos_token_id=[2, 9])
    judged(model, prompt(40), config)
    judged(model, inputs=prompt(40), generation_config=config, num_return_sequences=3)
    judged(model, input_ids=prompt(40), generation_config=config, past_key_values=None, position_ids=None)
    assert hit(model) == 32  # a prompt counts once, however many sequences are made of it
    before = copy.deepcopy(model.generation_config)
    try:
        model.generation_config.num_beams = 2
        model.generation_config.max_new_tokens = 3
        judged(model, prompt(40))
        assert hit(model) > 0
    finally:
        model.generation_config = before


# ── what is returned ────────────────────────────────────────────────────────────────────────────────


def test_the_returned_cache_is_a_plain_one(model: Any, cache: Any) -> None:
    for _ in range(2):
        asked = {**LOGITS, "output_scores": True, "max_new_tokens": 8}
        ours = judged(model, prompt(40), **asked)
        expected = plain(model, prompt(40), **asked)
        mine, theirs = ours.past_key_values, expected.past_key_values
        assert type(mine) is type(theirs) is DynamicCache
        assert mine.get_seq_length() == theirs.get_seq_length() == 47
        for a, b in zip(mine.layers, theirs.layers, strict=True):
            assert type(a) is type(b)
            assert vars(a).keys() == vars(b).keys()
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-4)
            for held, kept in ((a.keys, b.keys), (a.values, b.values)):  # and no memory behind it
                assert held.stride() == kept.stride()
                assert held.untyped_storage().nbytes() == kept.untyped_storage().nbytes()
        assert vars(mine).keys() == vars(theirs).keys() - {"_is_user_defined"}
        # Two go on from it, and neither disturbs the other.
        kept = copy.deepcopy(mine)
        for continued in (mine, kept):
            more = torch.cat([ours.sequences, prompt((3, 1))], dim=1)
            mask = torch.ones_like(more)
            going_on = model.generate(more, attention_mask=mask, past_key_values=continued, **LOGITS)
            assert cache.last().reason == "a cache was passed in"
            assert_same(
                going_on,
                plain(model, more, attention_mask=mask, past_key_values=copy.deepcopy(theirs), **LOGITS),
            )
    cache.check()
    judged(model, prompt(40), **LOGITS)  # what they wrote is not in the pool
    assert hit(model) == 32


def test_beams_return_the_same_dictionary(model: Any, cache: Any) -> None:
    asked = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    asked |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for _ in range(2):
        ours, expected = model.generate(prompt(40), **asked), plain(model, prompt(40), **asked)
        assert_same(ours, expected)
        assert ours.beam_indices.tolist() == expected.beam_indices.tolist()
        torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
        assert type(ours.past_key_values) is DynamicCache


def byte_tokenizer() -> Any:
    """A tokenizer with a token for each of 61 letters, and padding on the left."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?-'Ġ"
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + n for n, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def test_the_pipeline(model: Any, cache: Any) -> None:
    tokenizer = byte_tokenizer()
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    text = "It was a bright cold day in April, and the clocks were striking"
    asked = {"max_new_tokens": 5, "do_sample": False}
    answers = [pipe(text, **asked), pipe(text + " thirteen.", **asked)]
    assert hit(model) == 48
    several = pipe([text, "It was late.", text + "!"], batch_size=3, **asked)
    assert cache.last().reason is None
    with pagoda_off(model):
        assert [pipe(text, **asked), pipe(text + " thirteen.", **asked)] == answers
        assert pipe([text, "It was late.", text + "!"], batch_size=3, **asked) == several


def test_the_tree_is_drawn_with_its_text(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    tokenizer = byte_tokenizer()
    inputs = tokenizer("It was a bright cold day in April", return_tensors="pt")
    llama.generate(inputs["input_ids"], **GREEDY)
    for decode in (tokenizer, tokenizer.decode):
        assert "It was a bri" in cache.tree(decode)
    cache.clear()
    assert "It was" not in cache.tree(tokenizer)


@contextlib.contextmanager
def pagoda_off(model: Any) -> Iterator[None]:
    """The plain `generate` for as long as the block runs, without disabling."""
    ours = model.__dict__.pop("generate")
    try:
        yield
    finally:
        model.__dict__["generate"] = ours


# ── left to plain generate ──────────────────────────────────────────────────────────────────────────


def embeddings(model: Any) -> dict[str, Any]:
    return {"inputs_embeds": model.get_input_embeddings()(prompt(40)).detach()}


def holes(*at: int) -> torch.Tensor:
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, list(at)] = 0
    return mask


ALONE: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "embeddings": (embeddings, "embeddings as input"),
    "embeddings and tokens": (
        lambda model: {"input_ids": prompt(40), **embeddings(model)},
        "embeddings as input",
    ),
    "a cache": (
        lambda model: {"past_key_values": DynamicCache(config=model.config)},
        "a cache was passed in",
    ),
    "a mask with holes": (lambda _: {"attention_mask": holes(5)}, "an attention_mask with holes"),
    "padding on the right": (lambda _: {"attention_mask": holes(38, 39)}, "an attention_mask with holes"),
    "no token": (lambda _: {"attention_mask": holes(*range(40))}, "an attention_mask with holes"),
    "hidden states": (
        lambda _: {"output_hidden_states": True, "return_dict_in_generate": True},
        "hidden states of the whole prompt are asked for",
    ),
    "attentions": (
        lambda _: {"output_attentions": True, "return_dict_in_generate": True},
        "attentions of the whole prompt are asked for",
    ),
    "no cache": (lambda _: {"use_cache": False}, "use_cache is off"),
    "perhaps a cache": (lambda _: {"use_cache": None}, "use_cache is off"),
    "a static cache": (
        lambda _: {"cache_implementation": "static", "disable_compile": True},
        "another kind of cache is asked for",
    ),
    "a dynamic cache": (
        lambda _: {"cache_implementation": "dynamic"},
        "another kind of cache is asked for",
    ),
    "guidance": (lambda _: {"guidance_scale": 1.5}, "guidance runs the model a second time"),
    "negative prompts": (
        lambda _: {"guidance_scale": 1.5, "negative_prompt_ids": prompt((8, 1))},
        "argument negative_prompt_ids",
    ),
    "chunks": (lambda _: {"prefill_chunk_size": 16}, "the prefill is cut into chunks"),
    "positions": (lambda _: {"position_ids": torch.arange(40)[None] + 3}, "argument position_ids"),
    "a callable": (lambda _: {"custom_generate": lucky}, "argument custom_generate"),
    "padding tokens": (
        lambda _: {"inputs": torch.cat([torch.zeros(1, 8, dtype=torch.long), prompt(32)], dim=1)},
        "padding tokens without an attention_mask",
    ),
    "a config": (
        lambda _: {"generation_config": GenerationConfig(guidance_scale=2.0, max_new_tokens=3)},
        "guidance runs the model a second time",
    ),
    "no tokens": (lambda _: {"inputs": None, "attention_mask": None}, "no input_ids"),
}


def lucky(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.cat([input_ids, input_ids[:, :1]], dim=1)


@pytest.mark.parametrize("name", ALONE)
def test_calls_that_are_left_alone(name: str) -> None:
    model = shared_model("llama")
    make, reason = ALONE[name]
    asked = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    if "inputs" not in make(model) and "input_ids" not in make(model) and "inputs_embeds" not in make(model):
        asked["inputs"] = prompt(40)
    if "generation_config" in make(model):
        asked = {"inputs": prompt(40)}
    expected = plain(model, **{**asked, **make(model)})  # for some, transformers hooks itself to the layers
    with pagoda.hf.cached(model, "1MiB") as cache:
        model.generate(prompt(40), **GREEDY)  # there would be a hit
        ours = model.generate(**{**asked, **make(model)})
        assert_same(ours, expected)
        assert cache.last() == pagoda.hf.Call(0, 0, reason)
        assert cache.stats().refused == {reason: 1}
        judged(model, prompt(40), **LOGITS)
        assert hit(model) == 32


def test_modes_that_are_left_alone(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    llama.train()
    assert llama.config.attention_dropout == 0
    judged(llama, prompt(40), **GREEDY)
    llama.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        judged(llama, prompt(40), **GREEDY)
    llama.generation_config.dola_layers = "low"
    with contextlib.suppress(Exception):
        llama.generate(prompt(40), **GREEDY)
    llama.generation_config.dola_layers = None
    llama.generation_config.use_mtp = True
    with contextlib.suppress(Exception):
        llama.generate(prompt(40), **GREEDY)
    llama.generation_config.use_mtp = None
    assert cache.stats().refused == {
        "the model is in training mode": 1,
        "autocast is on": 1,
        "setting dola_layers": 1,
        "setting use_mtp": 1,
    }
    assert cache.stats().cached_tokens == 0
    judged(llama, prompt(40), **GREEDY)
    assert hit(llama) == 0


def test_settings_that_say_what_is_usual_are_served(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    for name, value in {
        "num_beam_groups": 1,
        "diversity_penalty": 0.0,
        "cache_implementation": "hybrid",
    }.items():
        setattr(llama.generation_config, name, value)
    judged(llama, prompt(40), **GREEDY)
    assert cache.last().reason is None


WRONG: dict[str, dict[str, Any]] = {
    "an argument that is none": {"frobnicate": 1},
    "no beams": {"num_beams": 0},
    "beams in words": {"num_beams": "three"},
    "sequences in words": {"num_return_sequences": "two"},
    "more sequences than beams": {"num_beams": 2, "num_return_sequences": 3},
    "greedy sequences": {"num_return_sequences": 2},
    "an end in words": {"eos_token_id": "stop"},
    "ragged ends": {"eos_token_id": [[1, 2], [3]]},
    "padding in words": {"pad_token_id": "pad"},
    "no room": {"max_new_tokens": 0},
    "less than no room": {"max_new_tokens": -1},
    "cold": {"temperature": -1.0, "do_sample": True},
    "a config that is none": {"generation_config": {"max_new_tokens": 3}},
    "tokens twice": {"inputs": prompt(40), "input_ids": prompt(40)},
    "tokens as a list": {"inputs": [[1, 2, 3]]},
    "one row without a batch": {"inputs": prompt(40)[0]},
    "no rows": {"inputs": prompt(40)[:0]},
    "no columns": {"inputs": prompt(40)[:, :0]},
    "numbers with a point": {"inputs": prompt(40).float()},
    "a token that is too large": {"inputs": torch.tensor([[5, 64]])},
    "a token that is far too large": {"inputs": torch.tensor([[5, 2**40]])},
    "a negative token": {"inputs": torch.tensor([[5, -1]])},
    "a mask of another shape": {"attention_mask": torch.ones(1, 7, dtype=torch.long)},
    "a mask in four dimensions": {"attention_mask": torch.ones(1, 1, 40, 40)},
    "tokens without values": {"inputs": prompt(40).to("meta")},
    "a mask without values": {"attention_mask": torch.ones(1, 40, device="meta")},
    "a sparse mask": {"attention_mask": torch.ones(1, 40).to_sparse()},
    "an assistant for a batch": {"inputs": prompt(40).repeat(2, 1), "prompt_lookup_num_tokens": 2},
    "a tuple for a cache": {"past_key_values": ()},
    "a cache too many": {"past_key_values": DynamicCache(), "cache_implementation": "static"},
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_plain_generate(name: str) -> None:
    model = shared_model("llama")
    asked = {"inputs": prompt(40), "max_new_tokens": 3, "do_sample": False, **WRONG[name]}

    def outcome(call: Callable[..., Any]) -> Any:
        try:
            return call(**copy.deepcopy(asked)).tolist()
        except Exception as error:  # whatever it is, it must be the same
            return type(error), str(error)

    expected = outcome(functools.partial(type(model).generate, model))
    with pagoda.hf.cached(model, "1MiB") as cache:
        model.generate(prompt(40), **GREEDY)
        assert outcome(model.generate) == expected
        cache.check()
        judged(model, prompt(50), **LOGITS)


def test_a_name_is_text(llama: Any) -> None:
    pagoda.hf.enable(llama, "1MiB")
    for wrong in (None, 7, b"tenant"):
        with pytest.raises(ArgumentError, match=f"namespace: give text, not {type(wrong).__name__}"):
            llama.generate(prompt(40), namespace=wrong)


# ── whose prefixes ──────────────────────────────────────────────────────────────────────────────────


def test_names_never_meet(llama: Any) -> None:
    pagoda.hf.enable(llama, "1MiB")
    for name in ("", "a", "a@", "\ud800", "a" * 1000):
        judged_in(llama, name)
        assert hit(llama) == 0
        judged_in(llama, name)
        assert hit(llama) == 32


def judged_in(model: Any, name: str) -> None:
    ours = model.generate(prompt(40), namespace=name, **LOGITS)
    assert_same(ours, plain(model, prompt(40), **LOGITS))


def step(model: Any) -> None:
    model.train()
    model(prompt(20), labels=prompt(20)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()
    model.eval()


def louder(module: Any, args: Any, output: Any) -> Any:
    return output * 1.5


def swap(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a step of training": step,
    "other weights loaded": lambda model: model.load_state_dict(new_model("llama", seed=3).state_dict()),
    "other weights assigned": lambda model: model.load_state_dict(
        new_model("llama", seed=3).state_dict(), assign=True
    ),
    "a write that torch does not count": lambda model: model.model.layers[
        0
    ].self_attn.v_proj.weight.data.mul_(1.5),
    "a parameter replaced": lambda model: setattr(
        model.model.layers[0].mlp.down_proj, "weight", torch.nn.Parameter(torch.randn(48, 64))
    ),
    "a hook on a layer": lambda model: model.model.layers[0].mlp.register_forward_hook(louder),
    "a hook on all modules": lambda model: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.5 if module is model.model.layers[0].mlp else None
    ),
    "another forward": lambda model: setattr(
        model.model.layers[0].mlp, "forward", lambda hidden: torch.zeros_like(hidden)
    ),
    "another kind of module": swap,
    "layers in another order": lambda model: model.model.layers.insert(0, model.model.layers.pop(1)),
    "fewer experts": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_find_nothing(llama: Any, name: str) -> None:
    pagoda.hf.enable(llama, "1MiB")
    before = judged(llama, prompt(40), **LOGITS)
    made = CHANGES[name](llama)
    try:
        after = judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == 0
        assert not torch.equal(before.logits[0], after.logits[0])  # or the change would be none
        judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == 32
    finally:
        if hasattr(made, "remove"):
            made.remove()
            judged(llama, prompt(40), **LOGITS)
            assert hit(llama) == 32  # the weights that there were first


def test_hooks_that_come_and_go(llama: Any) -> None:
    """A new function may lie where an old one did."""
    pagoda.hf.enable(llama, "1MiB")
    for strength in range(2, 6):
        hook = llama.model.layers[0].mlp.register_forward_hook(
            lambda module, args, output, strength=strength: output * strength
        )
        judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == 0
        hook.remove()


def test_memory_that_is_used_again(llama: Any) -> None:
    """A new parameter may lie where an old one did, and differ in one element."""
    pagoda.hf.enable(llama, "1MiB")
    linear = llama.model.layers[0].mlp.down_proj
    for number in range(6):
        weight = linear.weight.detach().clone()
        weight[1, 1] += 1
        if number % 2:
            linear.weight.data = weight
        else:
            linear.weight = torch.nn.Parameter(weight)
        del weight
        judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == 0


class Louder(BaseStreamer):
    """Changes the model while it generates."""

    def __init__(self, model: Any, after: int) -> None:
        self.model, self.after, self.hook = model, after, None

    def put(self, value: torch.Tensor) -> None:
        self.after -= 1
        if self.after == 0:
            self.hook = self.model.model.layers[0].mlp.register_forward_hook(louder)

    def end(self) -> None:
        pass


def test_weights_that_change_in_the_middle_of_an_answer(llama: Any) -> None:
    pagoda.hf.enable(llama, "1MiB")
    streamer = Louder(llama, after=3)
    answer = llama.generate(prompt(40), streamer=streamer, **{**GREEDY, "max_new_tokens": 30})
    assert streamer.hook is not None
    streamer.hook.remove()
    judged(llama, torch.cat([answer, prompt((3, 1))], dim=1), attention_mask=torch.ones(1, 73), **LOGITS)
    assert hit(llama) == 32


class Asks(LogitsProcessor):
    """Generates while the model generates."""

    def __init__(self, model: Any) -> None:
        self.model, self.answers = model, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.answers.append(self.model.generate(prompt(40, (8, 1)), **GREEDY).tolist())
        return scores


def test_a_call_within_a_call(llama: Any) -> None:
    pagoda.hf.enable(llama, "1MiB")
    inner = plain(llama, prompt(40, (8, 1)), **GREEDY).tolist()
    asks = Asks(llama)
    expected = plain(llama, prompt(40), **GREEDY)
    ours = llama.generate(prompt(40), logits_processor=LogitsProcessorList([asks]), **GREEDY)
    assert ours.tolist() == expected.tolist()
    assert asks.answers == [inner] * 5


@pytest.mark.parametrize("more", [{}, {"use_cache": False}], ids=["served", "not served"])
def test_a_call_within_a_call_is_not_the_latest(llama: Any, more: dict[str, Any]) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    asks = LogitsProcessorList([Asks(llama)])  # prompts of 48 tokens
    llama.generate(prompt(40), logits_processor=asks, **GREEDY, **more)
    assert cache.last() == (pagoda.hf.Call(0, 0, "use_cache is off") if more else pagoda.hf.Call(40, 0))
    with pytest.raises(RuntimeError, match="no"):
        llama.generate(prompt(40), logits_processor=[*asks, Fails(41, RuntimeError)], **GREEDY, **more)
    assert cache.last() == (pagoda.hf.Call(0, 0, "use_cache is off") if more else pagoda.hf.Call(40, 32))


def test_a_model_that_assists_itself(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    expected = plain(llama, prompt(40), **GREEDY)
    assert llama.generate(prompt(40), assistant_model=llama, **GREEDY).tolist() == expected.tolist()
    assert cache.last() == pagoda.hf.Call(40, 0)


class Lora(torch.nn.Module):
    """A layer as peft makes it: what it adds, and marks that say whether and how much."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora = torch.nn.Linear(base.in_features, base.out_features, bias=False)
        self._active_adapter = ["a"]
        self._disable_adapters = False
        self.scaling = {"a": 1.0, "b": 2.0}
        self.merged_adapters: list[str] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(hidden)
        if self._disable_adapters:
            return out
        return out + sum(self.scaling[name] for name in self._active_adapter) * self.lora(hidden)


def test_adapters_find_their_own(llama: Any) -> None:
    pagoda.hf.enable(llama, "1MiB")
    judged(llama, prompt(40), **LOGITS)
    attention = llama.model.layers[0].self_attn
    adapter = attention.v_proj = Lora(attention.v_proj)

    def expect(tokens: int) -> None:
        judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == tokens

    expect(0)
    expect(32)
    adapter._active_adapter = ["b"]
    expect(0)
    adapter._disable_adapters = True
    expect(0)
    adapter._disable_adapters = False
    expect(32)
    adapter._active_adapter = ["a"]
    expect(32)
    adapter.scaling["a"] = 0.5
    expect(0)


def test_attention_computed_otherwise(llama: Any) -> None:
    pagoda.hf.enable(llama, "1MiB")
    for number, name in enumerate(("sdpa", "eager", "sdpa", "eager")):
        llama.set_attn_implementation(name)
        judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == (32 if number > 1 else 0)


def test_another_dtype_makes_the_pools_anew(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    judged(llama, prompt(40), **GREEDY)
    tokens_then = cache._memory.max_tokens
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        llama.to(dtype)
        for tokens in (0, 32):
            llama.generate(prompt(40), **GREEDY)
            assert hit(llama) == tokens
        assert cache.stats().pool_bytes <= cache.stats().memory_bytes
        assert cache._memory.max_tokens >= tokens_then * (4 // dtype.itemsize)
        cache.check()
    # What there was is gone with the pools; the weights have been rounded.
    judged(llama, prompt(60), **LOGITS)
    assert hit(llama) == 32


def test_a_model_that_moves_while_it_answers_has_one_set_of_pools(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    before, seen = weakref.ref(cache._memory), []

    class Moves(Heard):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 3:
                llama.double().to(torch.bfloat16)
                llama.generate(prompt(20), **GREEDY)
                seen.append(before())
                llama.float()

    llama.generate(prompt(40), streamer=Moves(), **GREEDY)
    assert seen == [None]
    assert cache.last() == pagoda.hf.Call(40, 0)
    cache.check()
    assert cache.stats().not_stored == {}
    for tokens in (0, 32):  # the weights have been rounded
        judged(llama, prompt(40), **LOGITS)
        assert hit(llama) == tokens


def test_disabled_while_it_answers(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    pools, seen = weakref.ref(cache._memory), []
    expected = plain(llama, prompt(40), **GREEDY)

    class Disables(Heard):
        def put(self, value: torch.Tensor) -> None:
            if not self.tokens:
                pagoda.hf.disable(llama)
                seen.append(pools())
            super().put(value)

    assert llama.generate(prompt(40), streamer=Disables(), **GREEDY).tolist() == expected.tolist()
    assert seen == [None]
    assert cache.stats().not_stored == {}


def test_a_dtype_that_has_no_room(llama: Any) -> None:
    """Memory that holds two pages in bfloat16 holds none in float32: calls go on without."""
    llama.bfloat16()
    cache = pagoda.hf.enable(llama, layout_of(llama).memory_for(1, 32, chunk=16))
    for _ in range(2):
        llama.float()
        judged(llama, prompt(40), **GREEDY)
        assert cache.last().reason.startswith("no pools where the model is now: memory:")
        assert cache.stats().pool_bytes == 0
        cache.check()
        cache.clear()
        assert "nothing is cached" in cache.tree()
        llama.bfloat16()
        llama.generate(prompt(40), **GREEDY)
        assert cache.last().reason is None
    llama.double()
    judged(llama, prompt(40), **GREEDY)
    assert "kv_dtype" in cache.last().reason


class Wrapped(torch.Tensor):
    """A tensor that has no memory of its own, as quantized ones do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, cls) else value

        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*map(bare, args), **{key: bare(value) for key, value in (kwargs or {}).items()})


def test_weights_without_memory_of_their_own(llama: Any) -> None:
    linear = llama.model.layers[0].mlp.down_proj
    inner = linear.weight.detach()
    linear.weight = torch.nn.Parameter(Wrapped(inner), requires_grad=False)
    pagoda.hf.enable(llama, "1MiB")
    for tokens in (0, 32):
        judged(llama, prompt(40), **GREEDY)
        assert hit(llama) == tokens
    inner.mul_(2)
    judged(llama, prompt(40), **GREEDY)
    assert hit(llama) == 0


def test_weights_that_cannot_be_told_apart(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")

    def refuse(model: Any) -> str:
        raise NotImplementedError("no storage")

    monkeypatch.setattr("pagoda.hf._cache.Look", refuse)
    judged(llama, prompt(40), **GREEDY)
    assert cache.last().reason == "weights of a kind that is not known"


# ── interruptions ───────────────────────────────────────────────────────────────────────────────────


class Fails(LogitsProcessor):
    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error = at, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.at:
            raise self.error("no")
        return scores


INTERRUPTED = ["llama", "gemma3_text"]


@pytest.mark.parametrize("step", [0, 9])
@pytest.mark.parametrize("how", ["streamer", "criterion", "processor"])
@pytest.mark.parametrize("case", INTERRUPTED)
def test_interrupted_between_passes(case: str, how: str, step: int) -> None:
    model, length = shared_model(case), 40 + step
    error = KeyboardInterrupt if step else RuntimeError
    means: dict[str, Any] = {
        "streamer": {"streamer": Heard(1 + step, error)},
        "criterion": {"stopping_criteria": StoppingCriteriaList([Until(length + 1, error)])},
        "processor": {"logits_processor": LogitsProcessorList([Fails(length, error)])},
    }[how]
    with pagoda.hf.cached(model, "1MiB") as cache:
        with pytest.raises(error):
            model.generate(prompt(40), **means, **{**GREEDY, "max_new_tokens": 20})
        cache.check()
        assert cache._memory.manager.stats().rows == 0
        judged(model, prompt(40), **{**LOGITS, "max_new_tokens": 10})
        assert hit(model) == 32  # the prefill had ended


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("case", INTERRUPTED)
def test_interrupted_inside_a_pass(case: str, number: int, error: type[BaseException]) -> None:
    """Some layers have columns that others have not, and nothing wrong is found later."""
    model, calls, at = shared_model(case), [], [0]

    def hook(module: Any, args: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == at[0]:
            raise error("broken")

    # It stays, so that what an interrupted call left is found.
    handle = model.model.layers[number].self_attn.register_forward_hook(hook)
    long = {**GREEDY, "max_new_tokens": 26}
    try:
        with pagoda.hf.cached(model, "1MiB") as cache:
            expected = plain(model, prompt(40), **long)
            told = torch.cat([expected, prompt((3, 1))], dim=1)
            asked = {"attention_mask": torch.ones_like(told), **LOGITS, "max_new_tokens": 1}
            follows = plain(model, told, **asked)
            for at[0] in (1, 2, 19):
                calls.clear()
                name = f"interrupted {at[0]}"
                with pytest.raises(error):
                    model.generate(prompt(40), namespace=name, **long)
                was, at[0] = at[0], 0
                cache.check()
                assert cache._memory.manager.stats().rows == 0
                # 19 passes have gone on to 58 tokens: three pages.
                assert_same(model.generate(told, namespace=name, **asked), follows)
                assert hit(model) == {1: 0, 2: 32, 19: 48}[was]
    finally:
        handle.remove()


def interrupted(calls: list[int], at: int, pool: Any, real: Any, *args: Any) -> None:
    """A verb of a pool: the nth time, it has done its work when it is interrupted."""
    calls.append(1)
    real(pool, *args)
    if len(calls) == at:
        raise KeyboardInterrupt


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("verb", ["store", "gather"])
def test_interrupted_while_copying(case: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model(case)
    with pagoda.hf.cached(model, "1MiB") as cache:
        if verb == "gather":
            model.generate(prompt(40), **GREEDY)
        pools = list(cache._memory._pools.pools.values())
        for at in range(1, 4):
            calls: list[int] = []
            for pool in pools:
                real = getattr(type(pool), verb)

                monkeypatch.setattr(pool, verb, functools.partial(interrupted, calls, at, pool, real))
            with contextlib.suppress(KeyboardInterrupt):
                model.generate(prompt(40), **GREEDY)
            monkeypatch.undo()
            cache.check()
            judged(model, prompt(60), **LOGITS)
            assert cache._memory.manager.stats().rows == 0
        judged(model, prompt(60), **LOGITS)
        assert hit(model) == 48


def test_no_memory_for_keeping_is_no_reason_to_fail(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        for pool in cache._memory._pools.pools.values():
            patch.setattr(pool, "store", full)
        judged(llama, prompt(40), **GREEDY)
    cache.check()
    judged(llama, prompt(40), **GREEDY)
    assert hit(llama) == 0
    with monkeypatch.context() as patch:
        for pool in cache._memory._pools.pools.values():
            patch.setattr(pool, "gather", full)
        judged(llama, prompt(40), **GREEDY)
        assert cache.last().reason == "no memory for the working copy"
    judged(llama, prompt(40), **GREEDY)
    assert hit(llama) == 32


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_threads(case: str) -> None:
    """Four at once on a memory that holds some of their prompts."""
    model = shared_model(case)
    asked = [prompt(20 + 9 * n, (7, n)) for n in range(5)] + [prompt(64), prompt((48, 3))]
    expected = [plain(model, tokens, **GREEDY).tolist() for tokens in asked]
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(len(asked), size=7):
            try:
                found = model.generate(asked[number], **GREEDY).tolist()
                if found != expected[number]:
                    wrong.append((number, found))
            except BaseException as error:
                wrong.append(error)

    with pagoda.hf.cached(model, 2**16) as cache:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        stats = cache.stats()
        assert (stats.calls, stats.served) == (28, 28)
        assert stats.evicted_pages > 0
        assert stats.hit_tokens > 0
        assert cache.last() is None  # this thread has asked nothing
        cache.check()


# ── the life of a cache ─────────────────────────────────────────────────────────────────────────────


def through_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_the_plain_generate(llama: Any, name: str) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    judged(llama, prompt(40), **LOGITS)
    made = COPIES[name](llama)
    assert made.generate.__self__ is made
    with torch.no_grad():
        made.model.layers[0].mlp.down_proj.weight.mul_(-1)
    answer = made.generate(prompt(40), **LOGITS)
    assert not torch.equal(answer.logits[0], plain(llama, prompt(40), **LOGITS).logits[0])
    assert cache.stats().calls == 1
    with pytest.raises(ArgumentError, match="it has no cache"):
        pagoda.hf.disable(made)
    # It may have a cache of its own.
    with pagoda.hf.cached(made, "1MiB") as other:
        for tokens in (0, 32):
            assert_same(made.generate(prompt(40), **LOGITS), answer)
            assert other.last().hit_tokens == tokens
    assert made.generate.__self__ is made
    assert not made._forward_hooks
    assert not made._forward_pre_hooks
    judged(llama, prompt(40), **LOGITS)
    assert hit(llama) == 32


def out_of_memory(*args: Any, **named: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate")


def test_what_cannot_be_enabled(llama: Any) -> None:
    with pytest.raises(ConfigError, match="give a model of transformers that can generate, not object"):
        pagoda.hf.enable(object())
    with pytest.raises(ConfigError, match="not Linear"):
        pagoda.hf.enable(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="not LlamaModel"):
        pagoda.hf.enable(llama.model)
    for memory in ("much", "-1GiB", 0, -5, None, 1.5, "", float("nan"), b"1GiB", np.True_, [1], 10**30):
        with pytest.raises(ConfigError, match=r"^memory: "):
            pagoda.hf.enable(llama, memory)
    for flag in (True, False):
        with pytest.raises(ConfigError, match=f"memory: give bytes, or text such as '4GiB', not {flag}"):
            pagoda.hf.enable(llama, flag)
    for memory in ("2TiB", "99999TiB", 2**62):
        with pytest.raises(ConfigError, match=r"^memory: .* TiB hold more tokens than can be numbered: give"):
            pagoda.hf.enable(llama, memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagoda.pools.TokenPool.from_group", out_of_memory)
        with pytest.raises(ConfigError, match=r"^memory: 1 GiB cannot be allocated on cpu: give less"):
            pagoda.hf.enable(llama, "1GiB")
    with pytest.raises(ConfigError, match="memory: 100 B hold no prefix of this model: give at least"):
        pagoda.hf.enable(llama, 100)
    assert "generate" not in llama.__dict__
    assert not llama._forward_hooks
    with pytest.raises(ArgumentError, match="it has no cache"):
        pagoda.hf.disable(llama)
    pagoda.hf.enable(llama, "1MiB")
    with pytest.raises(ConfigError, match="it has a cache already"):
        pagoda.hf.enable(llama, "1MiB")
    judged(llama, prompt(20), **GREEDY)


def test_disabled_and_enabled_again(llama: Any) -> None:
    first = pagoda.hf.enable(llama, "1MiB")
    judged(llama, prompt(40), **GREEDY)
    pagoda.hf.disable(llama)
    assert "generate" not in llama.__dict__
    assert not llama._forward_hooks
    assert not llama._forward_pre_hooks
    assert not llama._forward_hooks_with_kwargs
    llama.generate(prompt(40), **GREEDY)
    assert first.stats().calls == 1
    pagoda.hf.enable(llama, "1MiB")
    judged(llama, prompt(40), **GREEDY)
    assert hit(llama) == 0
    with pytest.raises(ZeroDivisionError), pagoda.hf.cached(new_model("llama"), "1MiB") as cache:
        raise ZeroDivisionError
    assert cache.stats().calls == 0


def test_a_compiled_model_has_the_cache_of_the_model_within(llama: Any) -> None:
    compiled = torch.compile(llama, backend="eager")
    expected = plain(llama, prompt(40), **LOGITS)
    with pagoda.hf.cached(compiled, "1MiB") as cache:
        for tokens in (0, 32):
            assert_same(compiled.generate(prompt(40), **LOGITS), expected)
            assert cache.last().hit_tokens == tokens
        assert isinstance(llama.generate, type(compiled.generate))
        assert cache.stats().calls == 2
    assert "generate" not in llama.__dict__


def test_cached_disables_whatever_happens(llama: Any) -> None:
    with pytest.raises(KeyboardInterrupt), pagoda.hf.cached(llama, "1MiB"):
        raise KeyboardInterrupt
    assert "generate" not in llama.__dict__


def test_a_generate_that_somebody_put_there_comes_back(llama: Any) -> None:
    def mine(*args: Any, **kwargs: Any) -> str:
        return "mine"

    llama.generate = mine
    with pagoda.hf.cached(llama, "1MiB") as cache:
        assert llama.generate(prompt(40)) == "mine"
        assert cache.last().reason == "LlamaForCausalLM has a generate of its own"
    assert llama.generate is mine


@pytest.mark.parametrize("case", [*FAMILIES, "mistral, window", "gemma3n_text"])
def test_memory_is_never_more_than_was_given(case: str) -> None:
    model = sharp_model(case)
    given = [2**exponent + odd for exponent in (17, 18, 20, 22) for odd in (0, 12345)]
    for memory in given:
        with pagoda.hf.cached(model, memory) as cache:
            stats = cache.stats()
            assert stats.memory_bytes == memory
            assert memory // 2 <= stats.pool_bytes <= memory  # and most of it is used
            pools = cache._memory._pools.pools.values()
            buffers = [buffer for pool in pools for buffer in (*pool.k_buffer, *pool.v_buffer)]
            assert sum(buffer.nbytes for buffer in buffers) == stats.pool_bytes


def test_the_least_memory_serves(llama: Any) -> None:
    """What the error names is enough, and a byte less is not."""
    with pytest.raises(ConfigError) as caught:
        pagoda.hf.enable(llama, 1000)
    least = int(str(caught.value).split("give at least ")[1].split(" B")[0].replace(",", ""))
    with pytest.raises(ConfigError):
        pagoda.hf.enable(llama, least - 1)
    pagoda.hf.enable(llama, least)
    for tokens in (0, 16):
        judged(llama, prompt(70), **LOGITS)
        assert hit(llama) >= tokens


def test_counts(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    assert cache.last() is None
    judged(llama, **batch([prompt(40), prompt((20, 1))]), **GREEDY)
    judged(llama, **batch([prompt(40), prompt((20, 1))]), **GREEDY)
    judged(llama, prompt(5), use_cache=False, **GREEDY)
    stats = cache.stats()
    assert (stats.calls, stats.served, stats.refused) == (3, 2, {"use_cache is off": 1})
    assert (stats.prompt_tokens, stats.hit_tokens) == (120, 32 + 12)  # up to column 32 of both rows
    assert stats.working_bytes > 0
    text = str(stats)
    for told in ("3 calls, 2 served", "44 of 120 prompt tokens", "37%", "1 not served: use_cache is off"):
        assert told in text
    cache.clear()
    assert cache.stats().cached_tokens == 0
    assert cache.stats().hit_tokens == 44
    judged(llama, prompt(40), **GREEDY)
    assert hit(llama) == 0


def test_reasons_do_not_grow_without_end(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may make up as many names as there are."""
    cache = pagoda.hf.enable(llama, "1MiB")
    for name in [*(f"made_up_{number}" for number in range(200)), "x" * 10**5, "made_up_3"]:
        with pytest.raises(ValueError, match="not used by the model"):
            llama.generate(prompt(5), **{name: 1}, **GREEDY)
    assert cache.last().reason == "argument made_up_3"
    stats = cache.stats()
    assert sum(stats.refused.values()) == stats.calls == 202
    assert stats.refused["argument made_up_3"] == 2
    assert stats.refused["other reasons"] > 100
    assert len(stats.refused) <= 60
    assert len(str(stats)) < 20_000

    def fail(*args: Any) -> None:
        raise RuntimeError(f"page {cache.stats().calls}")

    monkeypatch.setattr(type(cache._memory), "keep", fail)
    for _ in range(100):
        llama.generate(prompt(20), max_new_tokens=1, do_sample=False)
    assert len(cache.stats().not_stored) <= 60


def test_long_reasons_are_cut(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    with pytest.raises(ValueError, match="not used by the model"):
        llama.generate(prompt(5), **{"x" * 10**5: 1}, **GREEDY)
    (reason,) = cache.stats().refused
    assert reason.startswith("argument xxx")
    assert len(reason) < 1000


def test_one_is_not_many(llama: Any) -> None:
    cache = pagoda.hf.enable(llama, "1MiB")
    llama.generate(prompt(1), **GREEDY)
    one = str(cache.stats())
    assert one.startswith("1 call, 1 served\n0 of 1 prompt token came from the cache (0%)\n0 tokens cached;")
    llama.generate(prompt(1), **GREEDY)
    assert str(cache.stats()).startswith("2 calls, 2 served\n0 of 2 prompt tokens came")
    evicted = dataclasses.replace(cache.stats(), cached_tokens=1, evicted_pages=1)
    assert "\n1 token cached; 0 stored so far, 1 page evicted\n" in str(evicted)


# ── half precision ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FAMILIES)
def test_half_precision_differs_as_a_split_prefill_does(case: str, dtype: torch.dtype) -> None:
    model = new_model(case, dtype)
    asked = {**LOGITS, "max_new_tokens": 1}
    tokens = prompt(70)
    whole = plain(model, tokens, **asked).logits[0]
    with torch.no_grad():
        past = DynamicCache(config=model.config)
        model(tokens[:, :64], past_key_values=past, use_cache=True)
        split = model(tokens[:, 64:], past_key_values=past, use_cache=True).logits[:, -1].float()
    with pagoda.hf.cached(model, "1MiB"):
        model.generate(tokens[:, :65], **asked)
        ours = model.generate(tokens, **asked).logits[0]
        assert hit(model) == 64
    assert (ours - whole).abs().max() <= (split - whole).abs().max() + 1e-6
    assert (ours - split).abs().max() <= 1e-6
