"""Conversations with a real model on a cache that holds a third of them: answers are those of plain
transformers, hits those of a plain LRU cache, whatever is interrupted."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

import torch

import pagoda
from pagoda import models
from pagoda.errors import MissingError

pytestmark = pytest.mark.xdist_group("real-model")  # one worker loads it

SYSTEMS, CONVERSATIONS, NEW, PAGE = 8, 40, 3, 16
Prefix = tuple[int, ...]


class Interrupted(Exception):
    pass


class Stopper:
    """A streamer that breaks off at a token; counts those that were put."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, -1  # the prompt is put first

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == self.at:
            raise Interrupted

    def end(self) -> None:
        pass


class PlainCache:
    """Pages by the tokens up to their end, and when each was used last. The coldest goes first, of one use
    the deepest."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.used: dict[Prefix, int] = {}
        self.now = 0

    def known(self, tokens: Prefix) -> list[Prefix]:
        found = []
        for end in range(PAGE, len(tokens) + 1, PAGE):
            if tokens[:end] not in self.used:
                break
            found.append(tokens[:end])
        return found

    def touch(self, prefixes: list[Prefix]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(prefixes, self.now))

    def find(self, tokens: Prefix) -> int:
        found = self.known(tokens[:-1])
        self.touch(found)
        return len(found) * PAGE

    def keep(self, tokens: Prefix) -> None:
        found = self.known(tokens)
        wanted = [tokens[:end] for end in range(PAGE, len(tokens) + 1, PAGE)]
        while len(self.used) + len(wanted) - len(found) > self.num_pages:
            cold = [(used, -len(prefix), prefix) for prefix, used in self.used.items() if prefix not in found]
            del self.used[min(cold)[2]]
        self.touch(wanted)


@pytest.fixture(scope="module")
def talker() -> tuple[Any, Any]:
    try:
        return models.load("smollm2", device="cpu")
    except MissingError as error:
        pytest.skip(str(error))


def test_conversations_on_a_small_cache(talker: tuple[Any, Any]):
    model, tokenizer = talker
    choose = random.Random(7)
    text = tokenizer((Path(pagoda.__file__).parent / "cli/_tours/handbook.txt").read_text())["input_ids"]
    systems = [tuple(text[at : at + choose.randrange(50, 80)]) for at in range(0, SYSTEMS * 90, 90)]
    said: list[Prefix] = [systems[c % SYSTEMS] for c in range(CONVERSATIONS)]
    order = [c for c in range(CONVERSATIONS) for _ in range(choose.choice([1, 2, 3]))]
    choose.shuffle(order)
    whole = sum(map(len, systems)) + len(order) * (12 + NEW)  # tokens, each once
    token_bytes = 46_080  # 2 × 30 layers × 3 heads × 64 × 4 bytes
    hits = simulated = interrupted = evicted = 0

    def answer(tokens: Prefix, stop_at: int | None = None) -> Prefix | None:
        ids = torch.tensor([tokens])
        try:
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                streamer=Stopper(stop_at),
            )
        except Interrupted:
            return None
        return tuple(output[0, len(tokens) :].tolist())

    expected: list[Prefix] = []
    asked: list[Prefix] = []
    stops = [choose.randrange(0, NEW + 1) if choose.random() < 0.2 else None for _ in order]
    for c, stop_at in zip(order, stops, strict=True):
        begin = choose.randrange(len(text) - 12)
        asked.append(said[c] + tuple(text[begin : begin + 12]))
        new = answer(asked[-1])
        assert new is not None
        expected.append(new)
        if stop_at is None:  # what was interrupted is taken back
            said[c] = asked[-1] + new

    with pagoda.hf.cached(model, whole // 3 * token_bytes) as cache:
        manager = cache._memory.manager
        plain = PlainCache(manager.stats().groups[0].total)
        assert plain.num_pages * PAGE * 2 < whole
        for tokens, right, stop_at in zip(asked, expected, stops, strict=True):
            new = answer(tokens, stop_at)
            call = cache.last()
            assert call is not None
            if stop_at != 0:  # else it broke off before the model had run
                hits, simulated = hits + call.hit_tokens, simulated + plain.find(tokens)
                assert hits == simulated
                plain.keep(tokens)
                # The token that broke it off, or was the last, never went through the model.
                plain.keep(tokens + right[: (NEW if stop_at is None else stop_at) - 1])
            else:
                plain.find(tokens)
            if stop_at is None:
                assert new == right
            else:
                assert new is None
                interrupted += 1
        cache.check()
        stats = cache.stats()
        evicted = stats.evicted_pages
        (group,) = manager.stats().groups
        assert (group.leased, group.running, group.waiting) == (0, 0, 0)
        assert group.free + group.evictable == group.total
        assert stats.cached_tokens == len(plain.used) * PAGE
    assert interrupted >= 10
    assert evicted > 100
    assert hits > 0
