"""`CacheManager` against a dict of prefixes and sets of pages: every slot and every eviction predicted."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance.prefixes import seen
from pagoda import CapacityError, UsageError
from pagoda.compat import CacheManager, Request
from pagoda.errors import AlreadyHeldError, ArgumentError, NotHeldError, OutOfRangeError, StaleError
from property.prefix_model import Prefix, Prefixes

RUNS = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
NUM_PAGES, MOST_REQUESTS = 12, 4

# Sequences told by words, each a page of tokens, and a tail that fills no page: few words, so that they meet.
words = st.lists(st.integers(0, 1), max_size=6)
picks = st.integers(0, 100)


class CacheManagerMachine(RuleBasedStateMachine):
    """Pages are free, in the tree, or handed out: to a request, or strays that the tree gave up."""

    @initialize(page_size=st.sampled_from([1, 4]))
    def make(self, page_size: int) -> None:
        self.size = page_size
        self.cache = CacheManager("cpu", NUM_PAGES, page_size)
        self.forget()

    def forget(self) -> None:
        self.tree = Prefixes()
        self.free = set(range(1, NUM_PAGES + 1))
        self.strays: list[int] = []
        # (tokens, handle, what it locked, pages of all its tokens)
        self.requests: list[tuple[list[int], Any, Prefix, list[int]]] = []
        self.matches: list[tuple[Any, Prefix, list[int]]] = []  # handle, what it found, where

    # Words

    def tokens_of(self, sequence: list[int]) -> list[int]:
        return [10 * word + offset for word in sequence for offset in range(self.size)]

    def slots_of(self, pages: list[int]) -> list[int]:
        return [page * self.size + offset for page in pages for offset in range(self.size)]

    def pages_of(self, slots: Any) -> list[int]:
        """The pages that slots fill, the last one perhaps not to its end."""
        slots = slots.tolist()
        pages = [slot // self.size for slot in slots[:: self.size]]
        assert slots == self.slots_of(pages)[: len(slots)]
        return pages

    def prefix_of(self, tokens: list[int]) -> Prefix:
        """Whole pages only."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return tuple(tuple(tokens[end - self.size : end]) for end in ends)

    def fails(self, error: type[Exception] | tuple[type[Exception], ...], call: Any) -> None:
        before = seen(self.cache)
        with pytest.raises(error):
            call()
        assert seen(self.cache) == before

    # A request's life

    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    @rule(sequence=words, tail=st.integers(1, 3), as_tensor=st.booleans())
    def begin(self, sequence: list[int], tail: int, as_tensor: bool) -> None:
        tokens = [*self.tokens_of(sequence), *range(50, 50 + tail)]
        given: Any = torch.tensor(tokens) if as_tensor else tokens
        handle, indices = self.cache.match_req(Request(0, given, 0, 0, 1))
        found = self.tree.longest(self.prefix_of(tokens[:-1]))
        pages = [entry.value for entry in self.tree.along(found)]
        assert handle.cached_len == len(found) * self.size
        assert self.pages_of(indices) == pages
        self.cache.lock(handle)
        self.tree.lock(found)
        needed = len(tokens) - handle.cached_len
        num_pages = -(-needed // self.size)
        if num_pages > len(self.free) + self.tree.evictable():
            self.fails(CapacityError, lambda: self.cache.allocate(needed))
            self.cache.unlock(handle)
            self.tree.unlock(found)
            return
        self.free |= set(self.tree.evict(max(0, num_pages - len(self.free))))
        own = self.pages_of(self.cache.allocate(needed))
        assert own == sorted(self.free)[:num_pages]
        self.free -= set(own)
        self.requests.append((tokens, handle, found, pages + own))

    @precondition(lambda self: self.requests)
    @rule(pick=picks, num_tokens=st.integers(0, 9), token=st.integers(0, 1), on_host=st.booleans())
    def decode(self, pick: int, num_tokens: int, token: int, on_host: bool) -> None:
        at = pick % len(self.requests)
        tokens, handle, old, pages = self.requests[at]
        allocate = self.cache.allocate_host if on_host else self.cache.allocate
        slots = self.slots_of(pages)[: len(tokens)]
        num_pages = -(-(len(tokens) + num_tokens) // self.size) - len(pages)
        if num_pages > len(self.free) + self.tree.evictable():
            self.fails(CapacityError, lambda: allocate(num_tokens, after=slots[-1]))
            return
        self.free |= set(self.tree.evict(max(0, num_pages - len(self.free))))
        own = sorted(self.free)[:num_pages]
        self.free -= set(own)
        slots += allocate(num_tokens, after=slots[-1]).tolist()
        assert slots == self.slots_of([*pages, *own])[: len(slots)]
        self.requests[at] = (tokens + [token] * num_tokens, handle, old, pages + own)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        tokens, handle, old, pages = self.requests.pop(pick % len(self.requests))
        whole = self.prefix_of(tokens)
        there = self.tree.store(whole, pages)
        assert there >= len(old)
        slots = np.array(self.slots_of(pages)[: len(tokens)])
        self.cache.free_and_cache_finished_req(handle, tokens, slots)
        for entry in self.tree.along(old):
            entry.locks -= 1
        self.tree.use(whole)
        self.free |= {*pages[len(old) : there], *pages[len(whole) :]}

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        _, handle, old, pages = self.requests.pop(pick % len(self.requests))
        own = pages[len(old) :]
        self.cache.free(self.slots_of(own))
        self.cache.unlock(handle)
        self.free |= set(own)
        self.tree.unlock(old)
        self.fails(NotHeldError, lambda: self.cache.unlock(handle))
        if own:
            self.fails(NotHeldError, lambda: self.cache.free(self.slots_of(own[:1])))

    # Matches that wait

    @precondition(lambda self: len(self.matches) < MOST_REQUESTS)
    @rule(sequence=words)
    def match(self, sequence: list[int]) -> None:
        before = seen(self.cache)
        handle, indices = self.cache.manager.match_prefix(self.tokens_of(sequence))
        found = self.tree.longest(self.prefix_of(self.tokens_of(sequence)))
        pages = [entry.value for entry in self.tree.along(found)]
        assert self.pages_of(indices) == pages
        assert seen(self.cache) == before
        self.matches.append((handle, found, pages))

    @precondition(lambda self: self.matches)
    @rule(pick=picks)
    def lock_late(self, pick: int) -> None:
        handle, found, pages = self.matches.pop(pick % len(self.matches))
        is_there = self.tree.longest(found) == found
        if not is_there or [entry.value for entry in self.tree.along(found)] != pages:
            self.fails(StaleError, lambda: self.cache.lock(handle))
            return
        for _ in range(2):
            self.cache.lock(handle)
            self.tree.lock(found)
        for _ in range(2):
            self.cache.unlock(handle)
            self.tree.unlock(found)
        self.fails(NotHeldError, lambda: self.cache.unlock(handle))

    # The tree itself

    @rule(num_pages=st.integers(0, 5), on_host=st.booleans())
    def evict(self, num_pages: int, on_host: bool) -> None:
        manager = self.cache.manager
        if num_pages > self.tree.evictable():
            self.fails(CapacityError, lambda: manager.evict(num_pages * self.size))
            return
        size = max(0, num_pages * self.size - (self.size - 1))  # rounded up to pages
        gone = self.pages_of(manager.evict_host(size) if on_host else manager.evict(size))
        assert sorted(gone) == sorted(self.tree.evict(num_pages))
        self.strays += gone

    @precondition(lambda self: self.strays)
    @rule(sequence=words, data=st.data())
    def insert(self, sequence: list[int], data: st.DataObject) -> None:
        """Strays become the tree's, as far as it has not these tokens."""
        sequence = sequence[: len(self.strays)]
        pages = data.draw(st.permutations(self.strays))[: len(sequence)]
        tokens = self.tokens_of(sequence)
        there = self.tree.store(self.prefix_of(tokens), pages)
        assert self.cache.manager.insert_prefix(tokens, self.slots_of(pages)) == there * self.size
        self.tree.use(self.prefix_of(tokens))
        self.strays = [page for page in self.strays if page not in pages[there:]]

    @precondition(lambda self: self.strays)
    @rule(pick=picks)
    def free_stray(self, pick: int) -> None:
        page = self.strays.pop(pick % len(self.strays))
        self.cache.free([page * self.size + pick % self.size])
        self.free.add(page)

    @rule()
    def reset_the_tree(self) -> None:
        """What requests hold stays theirs; what they locked is void."""
        self.cache.manager.reset()
        self.free |= {entry.value for entry in self.tree.entries.values()}
        self.tree = Prefixes()
        for _, handle, old, pages in self.requests:
            self.fails(StaleError, lambda handle=handle: self.cache.unlock(handle))
            self.strays += pages[len(old) :]
        self.requests, self.matches = [], []

    @rule()
    def reset(self) -> None:
        handles = [handle for _, handle, _, _ in self.requests]
        self.cache.reset()
        self.forget()
        for handle in handles:
            self.fails(StaleError, lambda handle=handle: self.cache.unlock(handle))

    # Misuse

    @rule(pick=picks)
    def free_what_is_not_handed_out(self, pick: int) -> None:
        others = [*self.free, *(entry.value for entry in self.tree.entries.values())]
        bad = [0, NUM_PAGES + 1, *others][pick % (len(others) + 2)]
        self.fails((NotHeldError, OutOfRangeError), lambda: self.cache.free(self.slots_of([bad])))
        tokens = self.tokens_of([7])
        wrong = (NotHeldError, OutOfRangeError, AlreadyHeldError)
        self.fails(wrong, lambda: self.cache.manager.insert_prefix(tokens, self.slots_of([bad])))
        self.fails(wrong, lambda: self.cache.free_and_cache_finished_req(None, tokens, self.slots_of([bad])))

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def end_wrongly(self, pick: int) -> None:
        tokens, handle, old, pages = self.requests[pick % len(self.requests)]
        slots = self.slots_of(pages)[: len(tokens)]
        own = pages[len(old) :]
        calls = [
            lambda: self.cache.free_and_cache_finished_req(handle, tokens[:-1], slots),
            lambda: self.cache.free_and_cache_finished_req(handle, tokens, slots[:-1]),
            lambda: self.cache.free_and_cache_finished_req(handle, tokens, [-1] * len(tokens)),
            # A page of its own twice.
            lambda: self.cache.free_and_cache_finished_req(
                None, self.tokens_of([7, 7]), self.slots_of([own[0], own[0]])
            ),
        ]
        if old:
            calls.append(lambda: self.cache.free_and_cache_finished_req(None, tokens, slots))
            calls.append(lambda: self.cache.free_and_cache_finished_req(handle, [99, *tokens[1:]], slots))
        for call in calls:
            self.fails(UsageError, call)
        self.fails(ArgumentError, lambda: self.cache.allocate(-1))

    # What always holds

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        held = [page for _, _, old, pages in self.requests for page in pages[len(old) :]]
        cached = [entry.value for entry in self.tree.entries.values()]
        assert sorted([*self.free, *held, *self.strays, *cached]) == list(range(1, NUM_PAGES + 1))
        evictable = self.tree.evictable()
        assert self.cache.available_size == (len(self.free) + evictable) * self.size
        assert self.cache.manager.size_info == (
            evictable * self.size,
            (len(cached) - evictable) * self.size,
        )
        stored = self.stored()
        assert {prefix: (page, locks) for prefix, (page, locks, _) in stored.items()} == {
            prefix: (entry.value, entry.locks) for prefix, entry in self.tree.entries.items()
        }
        self.tree.require_order({prefix: used for prefix, (_, _, used) in stored.items()})

    def stored(self) -> dict[Prefix, tuple[int, int, int]]:
        """What the tree holds, from its nodes: prefix → (page, locks, time of use)."""
        found: dict[Prefix, tuple[int, int, int]] = {}
        stack: list[tuple[Any, Prefix]] = [(self.cache.manager.root_node, ())]
        while stack:
            node, prefix = stack.pop()
            for page, tokens in zip(
                self.pages_of(node.slots), self.prefix_of(node.tokens.tolist()), strict=True
            ):
                prefix = (*prefix, tokens)
                found[prefix] = (page, node.ref_count, node.timestamp)
            stack += [(child, prefix) for child in node.children]
        return found


TestCacheManager = CacheManagerMachine.TestCase
TestCacheManager.settings = RUNS
