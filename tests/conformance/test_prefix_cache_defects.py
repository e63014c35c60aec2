"""Known defects of the public designs of contracts/slots.md that `PrefixCacheManager` must not have.

Beside it stands the defective design in small: the check must find it.
"""

import gc
import logging
from typing import Any

import numpy as np
import pytest

from conformance.prefixes import FAILS
from pagoda.compat import PrefixCacheManager, SlotAllocator


class Trie:
    """The public design in small: an object a token, all in one list of use, references never dropped."""

    def __init__(self, max_capacity: int = 1000, patience: int = 10_000) -> None:
        self.max_capacity, self.patience = max_capacity, patience
        self.root: dict[str, Any] = {"children": {}}
        self.used: list[dict[str, Any]] = []  # least recently used first

    def insert(self, token_ids: Any, slot: int, slot_ver: int) -> None:
        node = self.root
        for token in token_ids:
            above, node = node, node["children"].setdefault(token, {"children": {}, "refs": 0})
            node.update(slot=slot, version=slot_ver, parent=above, token=token)
            if node not in self.used:
                self.used.append(node)
        node["refs"] += 1
        steps = 0
        while len(self.used) > self.max_capacity:
            steps += 1
            assert steps < self.patience, "eviction does not end"
            victim = self.used[steps % len(self.used)]
            if not victim["refs"]:
                self.used.remove(victim)  # and its children stay in the list
                victim["parent"]["children"].pop(victim["token"], None)

    def find(self, token_ids: Any) -> tuple[int, int, int]:
        node, length = self.root, 0
        for token in token_ids:
            if token not in node["children"]:
                break
            node, length = node["children"][token], length + 1
        return (length, node["slot"], node["version"]) if length else (0, -1, 0)

    def release(self, token_ids: Any) -> None:
        pass

    @property
    def num_tokens(self) -> int:
        return len(self.used)

    def find_valid(self, token_ids: Any, slots: SlotAllocator) -> tuple[int, int, int]:
        return self.find(token_ids)


def check_a_long_prompt_makes_few_objects(cache: Any) -> None:
    prompt = list(range(4_000))
    gc.collect()
    before = len(gc.get_objects())
    cache.insert(prompt, 0, 1)
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_defect_every_token_is_an_object() -> None:
    class Quick(Trie):
        def insert(self, token_ids: Any, slot: int, slot_ver: int) -> None:
            node = self.root
            for token in token_ids:
                node = node["children"].setdefault(token, {"children": {}})

    check_a_long_prompt_makes_few_objects(PrefixCacheManager(10_000))
    with pytest.raises(FAILS):
        check_a_long_prompt_makes_few_objects(Quick(10_000))


def test_a_prompt_of_32k_is_one_run() -> None:
    cache = PrefixCacheManager(100_000)
    prompt = np.arange(32_768)
    cache.insert(prompt, 3, 1)
    assert cache._tree.num_nodes == 1
    assert cache.find(prompt) == (32_768, 3, 1)
    cache.insert(prompt[:1000], 4, 1)
    assert cache._tree.num_nodes == 2
    cache.check()


def check_eviction_ends_when_everything_is_referenced(cache: Any) -> None:
    for number in range(5):
        cache.insert([10 * number, 10 * number + 1], number, 1)
    assert cache.num_tokens == 10  # over its capacity, and whole
    for number in range(5):
        assert cache.find([10 * number, 10 * number + 1]) == (2, number, 1)


def test_defect_eviction_loops_when_everything_is_referenced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_eviction_ends_when_everything_is_referenced(PrefixCacheManager(4))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with pytest.raises(FAILS):
        check_eviction_ends_when_everything_is_referenced(Trie(4))


def check_what_counts_can_be_found(cache: Any) -> None:
    """Whatever is evicted, all that is counted can still be reached."""
    sequences = [[1, 2, 3, 4], [1, 2, 5], [6, 7, 8, 9]]
    for slot, tokens in enumerate(sequences):
        cache.insert(tokens, slot, 1)
        cache.release(tokens)
    reachable = {
        tuple(tokens[:length]) for tokens in sequences for length in range(1, cache.find(tokens)[0] + 1)
    }
    assert cache.num_tokens == len(reachable) <= 6


def test_defect_evicting_an_inner_node_leaves_its_children_behind() -> None:
    class NoReferences(Trie):
        def insert(self, token_ids: Any, slot: int, slot_ver: int) -> None:
            super().insert(token_ids, slot, slot_ver)
            for node in self.used:
                node["refs"] = 0

    class Inner(NoReferences):
        """Evicts the least recently used, which is an inner node."""

        def insert(self, token_ids: Any, slot: int, slot_ver: int) -> None:
            capacity, self.max_capacity = self.max_capacity, 10**9
            super().insert(token_ids, slot, slot_ver)
            self.max_capacity = capacity
            while len(self.used) > capacity:
                victim = self.used.pop(0)
                victim["parent"]["children"].pop(victim["token"], None)

    cache = PrefixCacheManager(6)
    check_what_counts_can_be_found(cache)
    cache.check()
    with pytest.raises(FAILS):
        check_what_counts_can_be_found(Inner(6))


def check_a_stale_entry_is_no_hit(cache: Any) -> None:
    slots = SlotAllocator(2)
    slot = slots.alloc()
    cache.insert([1, 2, 3], slot, slots.version(slot))
    assert cache.find_valid([1, 2, 3], slots) == (3, slot, 1)
    slots.free(slot)
    assert slots.alloc() == slot  # another sequence lies there now
    assert cache.find_valid([1, 2, 3], slots) == (0, -1, 0)


def test_defect_a_stale_entry_is_a_hit() -> None:
    check_a_stale_entry_is_no_hit(PrefixCacheManager())
    with pytest.raises(FAILS):
        check_a_stale_entry_is_no_hit(Trie())
