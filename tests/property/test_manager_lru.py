"""Conversations on a small cache: every request hits what it hits in a plain LRU cache of that size."""

import random
from collections import Counter

import pytest

from pagoda import FullAttention, Layout
from pagoda.errors import CapacityError
from pagoda.manager import Manager

FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)
Prefix = tuple[int, ...]


class PlainCache:
    """Pages by the tokens before their end, each with its last use. What runs is pinned; the coldest goes
    first, of one use the deepest."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages, self.size = num_pages, page_tokens
        self.used: dict[Prefix, int] = {}
        self.pins: Counter[Prefix] = Counter()
        self.now = 0
        self.private = 0  # pages of running requests that are not cached
        self.num_evicted = 0

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        return [tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)]

    def hit(self, tokens: Prefix) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(tokens[:-1]):
            if prefix not in self.used:
                break
            found.append(prefix)
        return found

    def room(self, kept: list[Prefix]) -> int:
        """Pages to have while `kept` stays."""
        loose = sum(1 for prefix in self.used if not self.pins[prefix]) - sum(
            not self.pins[it] for it in kept
        )
        return self.num_pages - len(self.used) - self.private + loose

    def take(self, n: int) -> None:
        while self.num_pages - len(self.used) - self.private < n:
            loose = [
                (used, -len(prefix), prefix) for prefix, used in self.used.items() if not self.pins[prefix]
            ]
            del self.used[min(loose)[2]]
            self.num_evicted += 1
        self.private += n


class PlainRequest:
    def __init__(self, cache: PlainCache, tokens: Prefix) -> None:
        self.cache, self.tokens = cache, tokens
        self.pinned = cache.hit(tokens)
        self.hit = len(self.pinned) * cache.size
        self.num_private = -(-len(tokens) // cache.size) - len(self.pinned)
        for prefix in self.pinned:
            cache.pins[prefix] += 1
        cache.take(self.num_private)
        self.num_places = len(tokens)
        self.known = tokens[: self.hit]

    def pages_for_next(self) -> int:
        return int(self.num_places % self.cache.size == 0)

    def grow(self) -> None:
        self.cache.take(self.pages_for_next())
        self.num_private += self.pages_for_next()
        self.num_places += 1

    def learn(self, tokens: Prefix) -> None:
        """These are computed now; whole pages are everybody's, unless somebody was first."""
        self.known += tokens
        for prefix in self.cache.prefixes(self.known)[len(self.pinned) :]:
            if prefix not in self.cache.used:
                self.cache.used[prefix] = 0
                self.cache.private -= 1
                self.num_private -= 1
            self.cache.pins[prefix] += 1
            self.pinned.append(prefix)

    def end(self) -> None:
        self.cache.now += 1
        for prefix in self.pinned:
            self.cache.pins[prefix] -= 1
            if not self.cache.pins[prefix]:
                self.cache.used[prefix] = self.cache.now
        self.cache.private -= self.num_private


@pytest.mark.parametrize(
    ("page_tokens", "num_pages", "turns", "seed"),
    [(1, 500, 250, 1), (1, 300, 200, 2), (8, 60, 1000, 3), (8, 40, 1000, 4), (16, 45, 1000, 5)],
)
def test_hits_are_those_of_a_plain_lru_cache(page_tokens: int, num_pages: int, turns: int, seed: int):
    choose = random.Random(seed)
    systems = [tuple(choose.randrange(50) for _ in range(choose.randrange(20, 60))) for _ in range(3)]
    said = [choose.choice(systems) for _ in range(12)]  # by conversation
    manager = Manager(Layout([FULL], page_tokens), {"full": num_pages}, num_rows=6, max_tokens=400)
    cache = PlainCache(num_pages, page_tokens)
    running: dict[int, tuple[PlainRequest, int]] = {}  # row: request and conversation
    left: dict[int, int] = {}  # row: tokens still to answer
    num_hits = 0

    for _ in range(turns):
        talk = choose.randrange(len(said))
        if len(running) < 5 and all(talk != it for _, it in running.values()):
            if len(said[talk]) > 150:
                said[talk] = choose.choice(systems)
            tokens = said[talk] + tuple(choose.randrange(50) for _ in range(choose.randrange(1, 20)))
            kept = cache.hit(tokens)
            fits = -(-len(tokens) // page_tokens) - len(kept) <= cache.room(kept)
            assert manager.can_admit(tokens) == fits
            if fits:
                got, plain = manager.admit(tokens), PlainRequest(cache, tokens)
                assert got.hit == plain.hit
                num_hits += got.hit > 0
                plain.learn(tokens[plain.hit :])
                manager.pass_fence(manager.plan(got.row, len(tokens) - got.hit).step)
                manager.commit(got.row, tokens[got.hit :])
                running[got.row], left[got.row] = (plain, talk), choose.randrange(1, 15)
        # One more token for everybody; for whom there is no room, that was all.
        ended = []
        for row, (plain, _) in running.items():
            if plain.pages_for_next() > cache.room([]):
                with pytest.raises(CapacityError):
                    manager.reserve(row)
                ended.append(row)
                continue
            manager.reserve(row)
            plain.grow()
            token = choose.randrange(50)
            manager.pass_fence(manager.plan(row).step)
            manager.commit(row, token)
            plain.learn((token,))
            left[row] -= 1
            if left[row] == 0:
                ended.append(row)
        for row in ended:
            manager.release(row)
        for row in ended:
            plain, talk = running.pop(row)
            said[talk] = plain.known
            plain.end()
        (group,) = manager.stats().groups
        assert group.free == num_pages - len(cache.used) - cache.private
        assert manager.stats().evicted_pages == cache.num_evicted
    manager.check()
    assert num_hits > turns // 10
    assert cache.num_evicted > 100
