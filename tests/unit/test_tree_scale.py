"""Sizes that break what recurses, copies or probes too much."""

import time

import numpy as np
import pytest

from pagoda.tree import PrefixTree


def test_a_million_nodes():
    tree = PrefixTree(capacity=4_000_000)
    tokens = np.empty(3, dtype=np.int32)
    for i in range(1_000_000):
        tokens[:] = i & 1023, i >> 10, 7
        tree.insert(tokens, [i + 1, i + 2, i + 3])
    assert (tree.num_leaves, tree.num_nodes) == (1_000_000, 1_000_000 + 1024)
    tree.check()
    assert tree.match([5, 7, 7]).length == 3
    assert len(tree.nodes(100)) == 100
    assert tree.evict(2_000_000).page_ids.size == 2_000_000
    assert tree.num_tokens == 1024 + 2 * 1_000_000 - 2_000_000
    assert tree.drop(b"").page_ids.size == 1024
    assert tree.num_nodes == 0
    tree.check()


def test_a_hundred_thousand_levels():
    """Two requests go down together, so every token is a level; nothing recurses over them."""
    tree, levels = PrefixTree(), 100_000
    tokens = np.arange(levels, dtype=np.int32)
    first, second = tree.lock(tree.match([])), tree.lock(tree.match([]))
    for i in range(levels):
        tree.insert(tokens[i : i + 1], [i + 1], first)
        assert tree.insert(tokens[i : i + 1], [i + 1], second).present == i + 1
    tree.release(first)
    tree.release(second)
    assert (tree.num_nodes, tree.num_leaves) == (levels, 1)
    assert np.array_equal(tree.match(tokens).page_ids, tokens + 1)
    assert tree.match_length(tokens) == levels
    tree.check()
    lease = tree.lock(tree.match(tokens))
    assert tree.protected_tokens == levels
    assert np.array_equal(tree.page_ids(lease), tokens + 1)
    assert tree.insert(tokens, tokens + 1).present == levels
    assert len(tree.nodes(10**6)) == levels + 1
    tree.demote(lease)
    tree.release(lease)
    tree.check()
    assert np.array_equal(tree.evict(levels // 2).page_ids, tokens[: levels // 2 - 1 : -1] + 1)
    assert np.array_equal(tree.drop(b"").page_ids, tokens[: levels // 2] + 1)
    assert tree.num_nodes == 0
    tree.check()


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_million_tokens(page_tokens: int):
    tree = PrefixTree(page_tokens)
    tokens = np.random.default_rng(0).integers(0, 100_000, 1_000_000).astype(np.int32)
    ids = np.arange(1, 1_000_000 // page_tokens + 1, dtype=np.int32)
    assert tree.insert(tokens, ids).stored == 1_000_000
    assert np.array_equal(tree.match(tokens).page_ids, ids)
    other = tokens.copy()
    other[700_000] += 1
    at = 700_000 // page_tokens * page_tokens
    assert tree.match(other).length == at
    assert tree.insert(other, ids + len(ids)).present == at
    assert tree.evict(300_000).page_ids[-1] == len(ids)
    tree.check()


def distinct_first_pages(kind: str, n: int, page_tokens: int) -> np.ndarray:
    """[n, page_tokens] pages made so that a weak hash of them collides."""
    pages = np.zeros((n, page_tokens), dtype=np.int32)
    numbers = np.arange(n)
    if kind == "only the last token differs":
        pages[:, -1] = numbers
    elif kind == "multiples of 2^16":
        pages[:, 0], pages[:, -1] = (numbers % 2**15) << 16, (numbers >> 15) << 16
    elif kind == "the same sum":
        pages[:, 0], pages[:, -1] = numbers, n - numbers
    elif kind == "the same xor":
        pages[:, 0], pages[:, -1] = numbers, numbers ^ 0x5A5A5A
    return pages


@pytest.mark.parametrize(
    "kind", ["only the last token differs", "multiples of 2^16", "the same sum", "the same xor"]
)
def test_keys_that_would_collide(kind: str):
    page_tokens, n = 4, 100_000
    tree = PrefixTree(page_tokens)
    pages = distinct_first_pages(kind, n, page_tokens)
    begin = time.thread_time()
    for i, page in enumerate(pages):
        tree.insert(page, [i + 1])
    assert tree.num_leaves == n
    lengths = tree.match_lengths(list(pages))
    assert (lengths == page_tokens).all()
    # A table that degenerates into a list needs minutes.
    assert time.thread_time() - begin < 20


def test_tokens_that_are_all_equal():
    tree = PrefixTree(1)
    zeros = np.zeros(5000, dtype=np.int32)
    for n in range(100, 5001, 100):
        tree.insert(zeros[:n], np.arange(1, n + 1))
    assert tree.num_tokens == 5000
    for n in (1, 99, 100, 4999):
        assert tree.match(zeros[:n]).length == n
        tree.release(tree.lock(tree.match(zeros[:n])))
        tree.check()
    assert tree.evict(5000).page_ids.size == 5000


def test_committing_page_by_page_is_linear():
    """30,000 tokens, one at a time: work, not time, so that a busy machine cannot fail it."""

    def cost(n: int) -> float:
        tree = PrefixTree(1, capacity=40_000)
        tokens = np.arange(n, dtype=np.int32)
        lease = tree.lock(tree.match([]))
        begin = time.thread_time()
        for i in range(n):
            tree.insert(tokens[i : i + 1], [i + 1], lease)
        assert tree.num_nodes == 1
        return time.thread_time() - begin

    cost(1000)
    assert min(cost(30_000) for _ in range(3)) < 12 * min(cost(5000) for _ in range(3))
