"""`PrefixCacheManager` against a dict of prefixes: every answer and every eviction predicted."""

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda import UsageError
from pagoda.compat import PrefixCacheManager, SlotAllocator
from property.prefix_model import Prefix, Prefixes

RUNS = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
NUM_SLOTS = 4

sequences = st.lists(st.integers(0, 2), max_size=7).map(tuple)
slots = st.integers(0, NUM_SLOTS - 1)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Every prefix is an entry of its own: (slot, version), and how many references keep it."""

    @initialize(capacity=st.sampled_from([0, 3, 8, 100]))
    def make(self, capacity: int) -> None:
        self.cache, self.slots = PrefixCacheManager(capacity), SlotAllocator(NUM_SLOTS)
        self.capacity = capacity
        self.forget()
        self.log: list[logging.LogRecord] = []
        self.handler = logging.Handler()
        self.handler.emit = self.log.append  # type: ignore[method-assign]
        self.logger = logging.getLogger("pagoda")
        self.logger.addHandler(self.handler)
        self.logger.propagate = False

    def teardown(self) -> None:
        if hasattr(self, "logger"):
            self.logger.removeHandler(self.handler)
            self.logger.propagate = True

    def forget(self) -> None:
        self.model = Prefixes()
        self.references: dict[Prefix, int] = {}
        self.is_over = False

    def trim(self) -> None:
        """What the capacity demands, and what is said when it cannot be had."""
        excess = len(self.model.entries) - self.capacity
        evictable = self.model.evictable()
        self.model.evict(max(0, min(excess, evictable)))
        was_over, self.is_over = self.is_over, excess > evictable
        assert len(self.log) == (self.is_over and not was_over)
        self.log.clear()

    @rule(tokens=sequences, slot=slots)
    def insert(self, tokens: Prefix, slot: int) -> None:
        version = self.slots.version(slot)
        self.cache.insert(tokens, slot, version)
        if not tokens:
            return
        self.model.store(tokens, [None] * len(tokens))
        for entry in self.model.along(tokens):
            entry.value = (slot, version)
        self.model.lock(tokens)
        self.references[tokens] = self.references.get(tokens, 0) + 1
        self.trim()

    @rule(tokens=sequences)
    def pin(self, tokens: Prefix) -> None:
        self.cache.pin(tokens)
        if tokens and tokens in self.model.entries:
            self.model.lock(tokens)
            self.references[tokens] = self.references.get(tokens, 0) + 1

    def drop(self, tokens: Prefix) -> None:
        self.cache.release(tokens)
        if self.references.get(tokens, 0):
            self.references[tokens] -= 1
            self.model.unlock(tokens)
            self.trim()

    @rule(tokens=sequences)
    def release(self, tokens: Prefix) -> None:
        self.drop(tokens)

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def release_one_that_is_referenced(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(it for it, n in self.references.items() if n))))

    @rule(tokens=sequences)
    def find(self, tokens: Prefix) -> None:
        found = self.model.longest(tokens)
        wanted = (len(found), *self.model.entries[found].value) if found else (0, -1, 0)
        assert self.cache.find(tokens) == wanted
        self.model.use(found)

    @rule(tokens=sequences)
    def find_valid(self, tokens: Prefix) -> None:
        found = self.model.longest(tokens)
        for length in range(len(found), 0, -1):
            slot, version = self.model.entries[found[:length]].value
            if self.slots.version(slot) == version:
                assert self.cache.find_valid(tokens, self.slots) == (length, slot, version)
                self.model.use(found[:length])
                return
        assert self.cache.find_valid(tokens, self.slots) == (0, -1, 0)

    @rule()
    def use_slots_again(self) -> None:
        slot = self.slots.alloc()
        if slot >= 0:
            return
        for slot in range(NUM_SLOTS):
            self.slots.free(slot)

    @rule(bad=st.sampled_from([[-1], [1.5], None, ["a"], [2**31]]))
    def misuse(self, bad: Any) -> None:
        for call in (self.cache.find, self.cache.pin, self.cache.release):
            with pytest.raises(UsageError):
                call(bad)
        for arguments in ((bad, 0, 0), ([1], -1, 0), ([1], 0, 2**31)):
            with pytest.raises(UsageError):
                self.cache.insert(*arguments)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.forget()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.log == []
        assert self.cache.num_tokens == len(self.model.entries)
        tree = self.cache._tree
        assert tree.num_leases == sum(self.references.values())
        assert tree.evictable_tokens == self.model.evictable()
        paths: dict[int, Prefix] = {}  # node → all tokens to its end
        found: dict[Prefix, tuple[Any, int, int]] = {}
        for node in tree.nodes():
            above: Prefix = () if node.parent is None else paths[node.parent]
            paths[node.number] = (*above, *node.tokens.tolist())
            for at, (slot, version) in enumerate(zip(*(ids.tolist() for ids in node.columns), strict=True)):
                prefix = paths[node.number][: node.begin + at + 1]
                found[prefix] = ((slot - 1, version - 1), node.leases, node.used)
        assert {prefix: it[:2] for prefix, it in found.items()} == {
            prefix: (entry.value, entry.locks) for prefix, entry in self.model.entries.items()
        }
        self.model.require_order({prefix: used for prefix, (_, _, used) in found.items()})


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = RUNS
