"""The workloads: seeded streams of requests. Depends on numpy only.

A request is a prompt and the tokens of its answer, which the next turn's prompt contains. Everything is a
function of the seed, and independent of what is found in a cache.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

PAGE = 16
BLOCK = 512  # tokens per block of the trace


@dataclass(frozen=True)
class Request:
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True)
class Workload:
    """`running` requests at a time, each prefilled in chunks of at most `chunk` tokens."""

    name: str
    requests: Callable[[], Iterator[Request]]
    page_tokens: int = PAGE
    running: int = 1
    chunk: int = 1 << 20


class _Words:
    """Random tokens of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def tokens(self, n: int) -> Tokens:
        return self.rng.integers(0, 2**31 - 1, n, dtype=np.int32)

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def lognormal(self, median: float, sigma: float, low: int, high: int) -> int:
        return int(np.clip(median * np.exp(sigma * self.rng.standard_normal()), low, high))

    def some(self, low: int, high: int) -> Tokens:
        return self.tokens(self.between(low, high))


def _joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def chains(seed: int) -> Iterator[Request]:
    """Six prompts of 32k tokens; a fork of each at a random point; a continuation of each."""
    words = _Words(seed)
    told = []
    for _ in range(6):
        request = Request(words.tokens(32_768), words.some(32, 256))
        told.append(_joined(request.prompt, request.answer))
        yield request
    for original in told:
        at = words.between(1, 32_767)
        yield Request(_joined(original[:at], words.tokens(2_048)), words.some(32, 256))
    for original in told:
        yield Request(_joined(original, words.tokens(2_048)), words.some(32, 256))


def agents(seed: int) -> Iterator[Request]:
    """64 agents over a shared prompt of 4k tokens, 24 turns or 60k tokens each; a tenth of turns go back."""
    words = _Words(seed)
    shared = words.tokens(4_096)
    # What each agent was told before each of its turns, the latest last: a turn goes back to one of them.
    told = [[_joined(shared, words.some(200, 4_000))] for _ in range(64)]
    turns = [24] * len(told)
    while active := [i for i, left in enumerate(turns) if left]:
        i = active[words.between(0, len(active) - 1)]
        turns[i] -= 1
        prompt = told[i][-1]
        if len(told[i]) > 1 and words.rng.random() < 0.1:
            del told[i][words.between(1, len(told[i]) - 1) :]
            prompt = _joined(told[i][-1], words.some(50, 500))
        request = Request(prompt, words.tokens(words.lognormal(200, 0.8, 20, 2_000)))
        yield request
        told[i].append(_joined(prompt, request.answer, words.some(200, 4_000)))
        if len(told[i][-1]) > 60_000:
            turns[i] = 0


def chats(seed: int) -> Iterator[Request]:
    """40 chats over 8 system prompts of 1k to 8k tokens, 6 to 12 turns, interleaved by Zipf's law."""
    words = _Words(seed)
    systems = [words.some(1_024, 8_192) for _ in range(8)]
    told = [systems[words.between(0, 7)] for _ in range(40)]
    turns = [words.between(6, 12) for _ in told]
    weights = 1 / np.arange(1, 41)
    while any(turns):
        p = weights * (np.array(turns) > 0)
        i = int(words.rng.choice(40, p=p / p.sum()))
        turns[i] -= 1
        request = Request(_joined(told[i], words.some(20, 300)), words.some(50, 500))
        yield request
        told[i] = _joined(request.prompt, request.answer)


def templates(seed: int) -> Iterator[Request]:
    """400 single requests of 6,000 tokens over 12 templates, of which each shares 4,800 to 5,200 tokens."""
    words = _Words(seed)
    texts = [words.tokens(5_200) for _ in range(12)]
    for _ in range(400):
        text = texts[words.between(0, 11)]
        shared = words.between(4_800, 5_200)
        yield Request(_joined(text[:shared], words.tokens(6_000 - shared)), words.some(32, 256))


def chats_and_scans(seed: int) -> Iterator[Request]:
    """The chats, and after each of their requests a document of 30k tokens that never comes back."""
    words = _Words(seed + 1_000_003)
    for request in chats(seed):
        yield request
        yield Request(words.tokens(30_000), words.some(32, 256))


def trace(path: Path) -> Iterator[Request]:
    """A recorded stream: one JSON object per line with `input_length` and `hash_ids`, one per block of 512.

    Equal ids mean equal blocks after equal blocks. Answers are not recorded: where a later prompt contains
    one, its blocks have new ids. So these requests have no answers.
    """
    inside = np.arange(BLOCK, dtype=np.int32)
    with gzip.open(path, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            ids = np.array(record["hash_ids"], np.int32)
            prompt = (ids[:, None] * np.int32(BLOCK) + inside).reshape(-1)[: record["input_length"]]
            yield Request(prompt, inside[:0])


SEEDED = {
    "chains": chains,
    "agents": agents,
    "chats": chats,
    "templates": templates,
    "chats + scans": chats_and_scans,
}


def seeded(name: str, seed: int) -> Workload:
    requests = SEEDED[name]
    if name == "chains":
        return Workload(name, lambda: requests(seed), running=2, chunk=2_048)
    return Workload(name, lambda: requests(seed))


def recorded(path: Path) -> Workload:
    return Workload("trace", lambda: trace(path), page_tokens=BLOCK)
