"""The drop-in for Hugging Face: what a cached prefix saves and what a miss costs, against the caches of
transformers.

On a CPU with SmolLM2-135M-Instruct in float32, real weights and text; on a GPU with a random Llama of 1 B
parameters."""

from __future__ import annotations

import copy
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import pagoda
from bench.measure import save, table
from pagoda.hf._identity import identity
from pagoda.models import load

Row = dict[str, Any]

TEXT = Path(__file__).parents[1] / "docs" / "manager.md"  # something to read
PROMPT, CACHED = 1_040, 1_024
REPEATS = 7
PAGE = 16
SYSTEMS, CONVERSATIONS, TURNS, NEW = 4, 12, 3, 8
GPU_CACHED, GPU_NEW = (8_192, 32_768), 16


def run() -> None:
    """Run what this machine can measure; print tables and write JSON."""
    rows = on_gpu() if torch.cuda.is_available() else [*first_token(), *beside_transformers()]
    save("hf_gpu" if torch.cuda.is_available() else "hf", rows)


# ── one prompt ──────────────────────────────────────────────────────────────────────────────────────


def first_token() -> list[Row]:
    """Measure the time to the first token without a cache, with a cached prefix, and for a miss: interleaved,
    the best of several.

    One thread, because on few cores two would wait for other processes."""
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2")
    words = tokenizer(TEXT.read_text())["input_ids"]
    source = random.Random(1)
    stem = (words * (1 + CACHED // len(words)))[:CACHED]
    attempts: dict[str, list[float]] = {"plain": [], "hit": [], "miss": [], "no look-up, no copy": []}
    # The lower bound of a hit: the model with a cache that is in place before the clock starts.
    in_place = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([stem]), past_key_values=in_place)

    def prompt() -> torch.Tensor:
        return torch.tensor([stem + [source.randrange(1000, 40000) for _ in range(PROMPT - CACHED)]])

    for number in range(REPEATS):
        attempts["plain"].append(seconds(model, prompt()))
        ready = copy.deepcopy(in_place)
        attempts["no look-up, no copy"].append(seconds(model, prompt(), past_key_values=ready))
        with pagoda.hf.cached(model, "256MiB") as cache:
            seconds(model, prompt())
            attempts["hit"].append(seconds(model, prompt()))
            assert cache.last().hit_tokens == CACHED
            attempts["miss"].append(seconds(model, prompt(), namespace=f"new {number}"))
            assert cache.last().hit_tokens == 0
    best = {name: min(times) for name, times in attempts.items()}
    rows = [
        {
            "to the first token": name,
            "ms": time * 1000,
            "× faster than plain": best["plain"] / time,
        }
        for name, time in best.items()
    ]
    table(f"A prompt of {PROMPT:,} tokens, {CACHED:,} of them cached; SmolLM2-135M, float32", rows)
    return rows


class FirstToken:
    """A streamer that records when the first new token after the prompt arrives."""

    def __init__(self) -> None:
        self.count, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def seconds(model: Any, ids: torch.Tensor, **more: Any) -> float:
    """Return the wall time until the first token is on the host."""
    streamer = FirstToken()
    begin = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        streamer=streamer,
        **more,
    )
    return streamer.at - begin


# ── beside what transformers offers ─────────────────────────────────────────────────────────────────


class Counting:
    """Counts the tokens that the model computed, and records when its first pass was done."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self.first: float | None = None
        self.hooks = [
            model.model.embed_tokens.register_forward_hook(self.count),
            model.lm_head.register_forward_hook(self.done),
        ]

    def count(self, module: Any, inputs: Any, output: Any) -> None:
        self.tokens += inputs[0].numel()

    def done(self, module: Any, inputs: Any, output: Any) -> None:
        self.first = self.first or time.perf_counter()

    def take(self) -> tuple[int, float]:
        tokens, first = self.tokens, self.first or time.perf_counter()
        self.tokens, self.first = 0, None
        return tokens, first


Answer = Callable[[int, list[int]], list[int]]  # conversation, prompt → new tokens


def turns(tokenizer: Any) -> list[tuple[int, list[int], list[int]]]:
    """Return (conversation, system prompt, user message), with conversations taking turns."""
    source = random.Random(5)
    words = tokenizer(TEXT.read_text())["input_ids"]
    systems = [words[i * 150 : i * 150 + 400] for i in range(SYSTEMS)]
    order = [c for _ in range(TURNS) for c in source.sample(range(CONVERSATIONS), CONVERSATIONS)]
    said = [[source.randrange(1000, 40000) for _ in range(24)] for _ in order]
    return [(c, systems[c % SYSTEMS], words) for c, words in zip(order, said, strict=True)]


def beside_transformers() -> list[Row]:
    """Run the same requests, one after the other, with memory for a third of them: hit rate, first token,
    speed."""
    model, tokenizer = load("smollm2")
    counting = Counting(model)
    script = turns(tokenizer)
    whole = CONVERSATIONS * (400 + TURNS * (24 + NEW))  # tokens, if nothing were shared
    num_tokens = whole // 3 // PAGE * PAGE
    rows = []
    answers: list[list[int]] = []
    for name, method in METHODS.items():
        history: dict[int, list[int]] = {}
        prompt_tokens = forwarded = 0
        first_times: list[float] = []
        found: list[list[int]] = []
        begin = time.perf_counter()
        with method(model, num_tokens) as answer:
            for conversation, system, words in script:
                prompt = history.get(conversation, list(system)) + words
                counting.take()
                asked = time.perf_counter()
                new = answer(conversation, prompt)
                tokens, first = counting.take()
                first_times.append(first - asked)
                prompt_tokens += len(prompt)
                forwarded += tokens - (len(new) - 1)
                history[conversation] = prompt + new
                found.append(new)
        wall = time.perf_counter() - begin
        answers = answers or found
        rows.append(
            {
                "with": name,
                "hit rate": 1 - forwarded / prompt_tokens,
                "first token, ms": sum(first_times) / len(first_times) * 1000,
                "tokens/s": len(script) * NEW / wall,
                "answers as plain": sum(a == b for a, b in zip(answers, found, strict=True)) / len(found),
            }
        )
    title = f"{CONVERSATIONS} conversations of {TURNS} turns over {SYSTEMS} system prompts"
    table(f"{title}, memory for {num_tokens:,} tokens of {whole:,}", rows)
    return rows


def greedy(model: Any, prompt: list[int], **more: Any) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        **more,
    )
    return list(output[0, len(prompt) :].tolist())


@contextmanager
def plain(model: Any, num_tokens: int) -> Iterator[Answer]:
    """Nothing is kept."""
    yield lambda conversation, prompt: greedy(model, prompt)


@contextmanager
def with_pagoda(model: Any, num_tokens: int) -> Iterator[Answer]:
    """One line."""
    config = model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    with pagoda.hf.cached(model, (num_tokens + PAGE) * token_bytes):
        yield lambda conversation, prompt: greedy(model, prompt)


@contextmanager
def by_hand(model: Any, num_tokens: int) -> Iterator[Answer]:
    """One DynamicCache per conversation and per system prompt; whole caches are dropped when memory is short,
    oldest first."""
    kept: OrderedDict[tuple[int, ...], DynamicCache] = OrderedDict()

    def answer(conversation: int, prompt: list[int]) -> list[int]:
        keys = [key for key in kept if tuple(prompt[: len(key)]) == key]
        key = max(keys, key=len, default=())
        cache = copy.deepcopy(kept[key]) if key else DynamicCache(config=model.config)
        if key:
            kept.move_to_end(key)
        else:  # the shared part is computed separately, so that it can be kept
            stem = torch.tensor([prompt[:400]])
            with torch.inference_mode():
                model(stem, past_key_values=cache, use_cache=True, logits_to_keep=1)
            keep(tuple(prompt[:400]), copy.deepcopy(cache))
        new = greedy(model, prompt, past_key_values=cache)
        keep(tuple(prompt + new[:-1]), cache)
        return new

    def keep(key: tuple[int, ...], cache: DynamicCache) -> None:
        kept[key] = cache
        while sum(map(len, kept)) > num_tokens:
            kept.popitem(last=False)

    yield answer


@contextmanager
def continuous_batching(model: Any, num_tokens: int) -> Iterator[Answer]:
    """Transformers' own engine, with its prefix cache."""
    chosen = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=2)
    settings = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=num_tokens // PAGE, max_batch_tokens=512, use_async_batching=False
    )
    before = model.config._attn_implementation
    with model.continuous_batching_context_manager(
        generation_config=chosen, continuous_batching_config=settings
    ) as engine:

        def answer(conversation: int, prompt: list[int]) -> list[int]:
            name = engine.add_request(prompt, max_new_tokens=NEW)
            return list(engine.get_result(request_id=name, timeout=600).generated_tokens)

        yield answer
    model.set_attn_implementation(before)


METHODS = {
    "plain generate": plain,
    "pagoda.hf": with_pagoda,
    "a DynamicCache kept by hand": by_hand,
    "continuous batching": continuous_batching,
}


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────


def on_gpu() -> list[Row]:
    """Compare the first token with a long cached prefix and without one, and measure the copy into the
    working cache."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    rows = []
    for cached in GPU_CACHED:
        stem = torch.randint(10, 100_000, (1, cached), device="cuda")

        def prompt(stem: torch.Tensor = stem) -> torch.Tensor:
            return torch.cat([stem, torch.randint(10, 100_000, (1, GPU_NEW), device="cuda")], dim=1)

        seconds(model, prompt())
        computed = min(seconds(model, prompt()) for _ in range(REPEATS))
        with pagoda.hf.cached(model, "8GiB") as cache:
            seconds(model, prompt())
            seconds(model, prompt())
            hit = min(seconds(model, prompt()) for _ in range(REPEATS))
            assert cache.last().hit_tokens == cached
            copied, device_copy = copy_in(model, cache, stem)
            missed = min(seconds(model, prompt(), namespace=str(n)) for n in range(REPEATS))
            size = cache.stats().working_bytes
        rows.append(
            {
                "cached tokens": cached,
                "computed, ms": computed * 1000,
                "cached, ms": hit * 1000,
                "×": computed / hit,
                "a miss, × of computed": missed / computed,
                "copied, MB": size / 1e6,
                "copy-in, µs": copied,
                "device copy of as much, µs": device_copy,
                "copy-in, % of a device copy's speed": 100 * device_copy / copied,
            }
        )
    table("A random Llama of 1 B parameters, bfloat16: to the first token", rows)
    return rows


def copy_in(model: Any, cache: Any, stem: torch.Tensor) -> tuple[float, float]:
    """Return µs of device time: reading a prefix from the pool, and a plain copy of the same bytes."""
    memory = cache._memory
    row = stem[0].cpu().numpy().astype("int32")
    space = f"@{identity(model)}".encode()
    found = memory.find([row], [0], 1, space)
    whole = torch.empty(found.num_bytes, dtype=torch.uint8, device="cuda")
    into = torch.empty_like(whole)
    del found

    def micros(call: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # so that the host is ahead
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        return sorted(times)[len(times) // 2]

    return micros(lambda: memory.find([row], [0], 1, space)), micros(lambda: into.copy_(whole))
