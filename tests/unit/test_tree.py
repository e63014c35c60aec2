"""The tree call by call: what it says, what it owns, and what it refuses."""

import gc
import weakref

import numpy as np
import pytest
import torch

from pagoda.errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    DoubleFreeError,
    NotHeldError,
    OutOfRangeError,
    StaleError,
)
from pagoda.tree import PrefixTree


def snapshot(tree: PrefixTree) -> tuple:
    """Everything that can be seen of a tree."""
    views = [
        (*view[:7], view.tokens.tolist(), [ids.tolist() for ids in view.columns], *view[9:])
        for view in tree.nodes(10**6, 10**6)
    ]
    return views, tree.counts(), tree.namespaces()


def filled_tree(page_tokens: int = 1) -> PrefixTree:
    tree = PrefixTree(page_tokens)
    tree.insert(np.arange(6 * page_tokens), np.arange(1, 7))
    return tree


# ── finding ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_match_changes_nothing():
    tree = filled_tree()
    tree.insert([7, 8], [8, 9])  # [0 … 5] is the coldest
    before = snapshot(tree)
    assert tree.match([0, 1, 2, 99]).length == 3
    assert tree.match_length([0, 1, 2, 99]) == 3
    assert [match.length for match in tree.match_many([[0, 1], [7], [5]])] == [2, 1, 0]
    assert tree.match_lengths([[0, 1], [7], [5]]).tolist() == [2, 1, 0]
    assert snapshot(tree) == before
    assert tree.evict(2).page_ids.tolist() == [5, 6]


def test_a_match_is_a_value():
    tree = filled_tree()
    match = tree.match([0, 1, 2])
    tree.evict(6)
    assert (match.length, match.found, match.page_ids.tolist()) == (3, 3, [1, 2, 3])
    assert match.state_id is None
    assert [ids.tolist() for ids in match.columns] == [[1, 2, 3]]


@pytest.mark.parametrize("page_tokens", [1, 2, 3, 16, 64, 100])
def test_only_whole_pages_count(page_tokens: int):
    tree = PrefixTree(page_tokens)
    tokens = np.arange(3 * page_tokens + page_tokens - 1, dtype=np.int32)
    inserted = tree.insert(tokens, np.arange(1, 4))
    assert (inserted.present, inserted.stored, inserted.length) == (0, 3 * page_tokens, 3 * page_tokens)
    for n in range(0, len(tokens), max(1, page_tokens // 3)):
        match = tree.match(tokens[:n])
        assert match.length == n // page_tokens * page_tokens
        assert match.page_ids.tolist() == list(range(1, n // page_tokens + 1))
    tree.check()


def test_ids_of_the_last_page_that_is_not_full_may_be_given():
    tree = PrefixTree(4)
    assert tree.insert(np.arange(10), [1, 2, 3]).stored == 8
    assert tree.match(np.arange(12)).page_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(5, dtype=np.int32),
        np.arange(5, dtype=np.int64),
        torch.arange(5, dtype=torch.int32),
        torch.arange(5),
        list(range(5)),
        tuple(range(5)),
        range(5),
    ],
    ids=lambda tokens: f"{type(tokens).__name__} {getattr(tokens, 'dtype', '')}",
)
def test_what_tokens_may_be(tokens):
    tree = filled_tree()
    assert tree.match(tokens).length == 5
    assert tree.insert(tokens, [1, 2, 3, 4, 5]).present == 5


def test_a_queue_with_namespaces_and_keys():
    tree = PrefixTree()
    tree.insert([1, 2], [1, 2], namespace="a")
    tree.insert([1, 2], [3, 4], namespace=b"b", extra_keys=[(1, 2, "cat")])
    prompts = [np.array([1, 2], dtype=np.int32)] * 3
    assert tree.match_lengths(prompts).tolist() == [0, 0, 0]
    assert tree.match_lengths(prompts, "a").tolist() == [2, 2, 2]
    assert tree.match_lengths(prompts, ["a", "b", b"b"]).tolist() == [2, 1, 1]
    keys = [(), [(1, 2, b"cat")], [(1, 2, "dog")]]
    assert tree.match_lengths(prompts, ["a", "b", "b"], keys).tolist() == [2, 2, 1]
    assert [m.page_ids.tolist() for m in tree.match_many(prompts, ["a", "b", "b"], keys)] == [
        [1, 2],
        [3, 4],
        [3],
    ]
    assert tree.match_many([]) == []


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_protects_exactly_the_matched_tokens():
    tree = filled_tree()
    lease = tree.lock(tree.match([0, 1, 2, 9]))
    assert (lease.length, lease.is_held, tree.protected_tokens, tree.evictable_tokens) == (3, True, 3, 3)
    assert tree.evict(3).page_ids.tolist() == [4, 5, 6]
    with pytest.raises(CapacityError):
        tree.evict(1)
    tree.release(lease)
    assert (lease.length, lease.is_held, tree.evictable_tokens) == (3, False, 3)
    tree.check()


def test_a_lease_of_nothing_is_a_lease():
    tree = PrefixTree()
    lease = tree.lock(tree.match([1, 2]))
    assert (lease.length, tree.num_leases, tree.namespaces()) == (0, 1, [b""])
    assert tree.insert([1, 2], [1, 2], lease).present == 0
    assert (lease.length, tree.protected_tokens) == (2, 2)
    tree.release(lease)
    assert tree.evict(2).page_ids.tolist() == [1, 2]
    assert tree.namespaces() == []
    tree.check()


def test_a_second_release_takes_nothing_from_others():
    tree = filled_tree()
    match = tree.match([0, 1, 2])
    mine, theirs = tree.lock(match), tree.lock(match)
    assert mine.number != theirs.number
    tree.release(mine)
    for _ in range(3):
        with pytest.raises(DoubleFreeError, match="was already released"):
            tree.release(mine)
    assert tree.protected_tokens == 3
    assert theirs.is_held
    tree.release(theirs)
    tree.check()


def test_a_lease_of_another_tree_is_refused():
    mine, theirs = filled_tree(), filled_tree()
    match = theirs.match([0, 1])
    lease = theirs.lock(match)
    before = snapshot(mine), snapshot(theirs)
    for call in (
        lambda: mine.release(lease),
        lambda: mine.demote(lease),
        lambda: mine.insert([9], [9], lease),
        lambda: mine.page_ids(lease),
        lambda: mine.lock(match),
    ):
        with pytest.raises(ArgumentError, match="another tree"):
            call()
    assert (snapshot(mine), snapshot(theirs)) == before


def test_a_lease_is_a_context_manager():
    tree = filled_tree()
    with tree.lock(tree.match([0, 1])) as lease:
        assert tree.protected_tokens == 2
    assert not lease.is_held
    with pytest.raises(ZeroDivisionError), tree.lock(tree.match([0])):
        raise ZeroDivisionError
    assert tree.num_leases == 0
    with tree.lock(tree.match([0])) as lease:
        tree.release(lease)  # what was released inside is not released again
    with tree.lock(tree.match([0])):
        tree.reset()


def test_a_released_lease_cannot_be_used():
    tree = filled_tree()
    lease = tree.lock(tree.match([0]))
    tree.release(lease)
    before = snapshot(tree)
    for call in (
        lambda: tree.insert([9], [9], lease),
        lambda: tree.demote(lease),
        lambda: tree.page_ids(lease),
    ):
        with pytest.raises(NotHeldError, match="was already released"):
            call()
    assert snapshot(tree) == before


def test_locking_revalidates():
    tree = filled_tree()
    match = tree.match(range(6))
    tree.evict(2)
    lease = tree.lock(match)
    assert lease.length == 4
    tree.release(lease)
    tree.evict(4)
    tree.insert(range(6), range(11, 17))  # the same tokens in other pages
    assert tree.lock(match).length == 0


def test_a_match_finds_what_a_split_left_of_it():
    tree = filled_tree()
    match = tree.match(range(6))
    tree.insert([0, 1, 2, 9], [1, 2, 3, 9])  # splits after 3
    assert tree.lock(match).length == 6
    tree.reset()
    tree.insert(range(6), range(1, 7))
    match = tree.match(range(6))
    tree.insert([0, 1, 2, 9], [1, 2, 3, 9])
    assert tree.evict(3).page_ids.tolist() == [4, 5, 6]  # the lower half
    assert tree.lock(match).length == 3
    tree.check()


def test_dropped_leases_do_not_keep_the_tree():
    tree = filled_tree()
    lease = tree.lock(tree.match([0]))
    tree.listen(lambda event, lease=lease, tree=tree: None)  # a ring through the listener
    gone = weakref.ref(tree)
    del tree, lease
    gc.collect()
    assert gone() is None


# ── storing ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_request_grows_in_place():
    tree = PrefixTree(16, capacity=4096)
    lease = tree.lock(tree.match([]))
    tokens = np.arange(100 * 16, dtype=np.int32)
    for page in range(100):
        inserted = tree.insert(tokens[page * 16 : page * 16 + 16], [page + 1], lease)
        assert (inserted.present, inserted.length, tree.num_nodes) == (page * 16, page * 16 + 16, 1)
    assert tree.page_ids(lease).tolist() == list(range(1, 101))
    assert tree.match(tokens).length == 1600  # a second request hits while the first runs
    tree.check()


def test_growth_does_not_reach_into_what_somebody_else_protects():
    tree = PrefixTree()
    mine = tree.lock(tree.match([]))
    tree.insert([1, 2], [1, 2], mine)
    theirs = tree.lock(tree.match([1, 2]))
    tree.insert([3], [3], mine)
    assert (mine.length, theirs.length, tree.num_nodes) == (3, 2, 2)
    tree.release(mine)
    assert tree.evict(1).page_ids.tolist() == [3]
    tree.check()


def test_insert_tells_which_pages_were_there():
    tree = filled_tree()
    lease = tree.lock(tree.match([0, 1]))
    tree.insert([2, 3, 77], [103, 104, 105], tree.lock(tree.match([0, 1])))  # somebody was faster
    inserted = tree.insert([2, 3, 77, 78], [13, 14, 15, 16], lease)
    assert (inserted.present, inserted.stored) == (5, 6)
    assert tree.page_ids(lease).tolist() == [1, 2, 3, 4, 105, 16]
    assert lease.length == 6
    tree.check()


def test_two_namespaces_never_share():
    tree = PrefixTree()
    for i, name in enumerate((b"", "a", b"\x00", "a\x00", "ä", b"\xff" * 300)):
        assert tree.insert([1, 2], [10 * i + 1, 10 * i + 2], namespace=name).present == 0
    assert tree.insert([1, 2], [8, 9], namespace=b"a").present == 2  # a str is its UTF-8
    assert tree.namespaces() == sorted([b"", b"a", b"\x00", b"a\x00", "ä".encode(), b"\xff" * 300])
    assert tree.drop("a").page_ids.tolist() == [11, 12]
    assert tree.match([1, 2], "a").length == 0
    assert tree.match([1, 2], "ä").page_ids.tolist() == [41, 42]
    assert tree.drop("never seen").page_ids.tolist() == []
    tree.check()


def test_a_dropped_namespace_waits_for_its_leases():
    tree = PrefixTree()
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4], namespace="a")
    tree.insert([1, 2, 9], [1, 2, 5], namespace="a")
    tree.insert([1, 2], [7, 8])
    lease = tree.lock(tree.match([1, 2, 3], "a"))
    old = tree.match([1, 2], "a")
    assert sorted(tree.drop("a").page_ids.tolist()) == [4, 5]
    assert tree.match([1, 2], "a").length == 0
    assert tree.namespaces() == [b""]
    assert (lease.length, tree.protected_tokens) == (3, 3)
    before = snapshot(tree)
    with pytest.raises(StaleError, match="dropped"):
        tree.insert([4], [6], lease)
    assert snapshot(tree) == before
    assert tree.page_ids(lease).tolist() == [1, 2, 3]
    assert tree.lock(old).length == 0
    tree.release(lease)
    assert tree.evict(3).page_ids.tolist() == [1, 2, 3]  # the coldest of all, one run again
    tree.check()


def test_an_image_is_part_of_the_key():
    tree = PrefixTree(2)
    tokens = [1, 2, 9, 9, 9, 9, 3, 4]
    cat, dog = [(2, 6, b"cat")], [(2, 6, "dog")]
    tree.insert(tokens, [1, 2, 3, 4], extra_keys=cat)
    assert tree.match(tokens, extra_keys=cat).page_ids.tolist() == [1, 2, 3, 4]
    assert tree.match(tokens, extra_keys=dog).page_ids.tolist() == [1]  # what stands before is shared
    assert tree.match(tokens).page_ids.tolist() == [1]
    assert tree.match(tokens, extra_keys=[(2, 5, b"cat")]).length == 4  # shorter: the last page differs
    assert tree.match(tokens, extra_keys=[(2, 4, b"cat"), (4, 6, b"cat")]).length == 4  # the image again
    assert tree.insert(tokens, [5, 6, 7, 8], extra_keys=dog).present == 2
    lease = tree.lock(tree.match(tokens[:4], extra_keys=cat))
    inserted = tree.insert(
        [9, 9, 3, 4], [10, 11], lease, extra_keys=cat
    )  # positions count from the beginning
    assert inserted.present == 8
    tree.check()
    tree.release(lease)
    tree.evict(tree.num_tokens)
    tree.check()  # nothing of the keys is left


# ── removing ─────────────────────────────────────────────────────────────────────────────────────────


def test_eviction_trims_tails_and_rounds_up():
    tree = PrefixTree(4)
    tree.insert(range(40), range(1, 11))
    assert tree.evict(0).page_ids.tolist() == []
    assert tree.evict(1).page_ids.tolist() == [10]
    assert tree.evict(5).page_ids.tolist() == [8, 9]
    assert (tree.num_tokens, tree.num_nodes) == (28, 1)
    tree.check()


def test_a_demoted_tail_goes_first():
    tree = PrefixTree()
    tree.insert([1, 2, 3], [1, 2, 3])
    lease = tree.lock(tree.match([1, 2]))
    tree.insert([8, 9], [8, 9], lease)
    tree.demote(lease)
    tree.release(lease)
    assert tree.evict(3).page_ids.tolist() == [8, 9, 3]
    tree.check()


def test_order_depends_on_calls_alone():
    def run() -> list[int]:
        tree = PrefixTree(2)
        rng = np.random.default_rng(5)
        freed: list[int] = []
        next_id = 1
        for _ in range(300):
            tokens = rng.integers(0, 2, 2 * rng.integers(1, 9))
            with tree.lock(tree.match(tokens)) as lease:
                rest = tokens[lease.length :]
                tree.insert(rest, np.arange(next_id, next_id + len(rest) // 2), lease)
            next_id += 8
            freed += tree.evict(min(4, tree.evictable_tokens)).page_ids.tolist()
        return freed

    assert run() == run()


def test_replaced_ids_are_no_longer_what_a_match_found():
    tree = filled_tree()
    tree.insert([0, 1, 9], [1, 2, 9])
    old, deep = tree.match([0]), tree.match(range(6))
    assert [ids.tolist() for ids in tree.replace([0, 1], [21, 22])] == [[1, 2]]
    assert tree.match(range(6)).page_ids.tolist() == [21, 22, 3, 4, 5, 6]
    assert tree.lock(old).length == 0
    assert tree.lock(deep).length == 0
    with pytest.raises(ArgumentError, match="only 2 of 3"):
        tree.replace([0, 1, 99], [1, 2, 3])
    tree.check()


def test_reset_forgets_everything():
    tree = filled_tree()
    lease, match = tree.lock(tree.match([0, 1])), tree.match([0, 1, 2])
    tree.reset()
    assert (tree.num_tokens, tree.num_nodes, tree.num_leases, tree.namespaces()) == (0, 0, 0, [])
    assert not lease.is_held
    for call in (
        lambda: tree.release(lease),
        lambda: tree.insert([2], [3], lease),
        lambda: tree.demote(lease),
    ):
        with pytest.raises(StaleError, match="reset"):
            call()
    assert tree.lock(match).length == 0
    tree.check()


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────

BAD_TOKENS = [
    ([0, -1], OutOfRangeError),
    (np.array([1, -(2**31)], dtype=np.int32), OutOfRangeError),
    (np.array([2**31]), ArgumentError),
    ([2**70], ArgumentError),
    (np.zeros(3), ArgumentError),
    (np.zeros((2, 2), dtype=np.int32), ArgumentError),
    (np.arange(6, dtype=np.int32)[::2], ArgumentError),
    (np.arange(6, dtype=np.uint32), ArgumentError),
    (torch.zeros(3, dtype=torch.int32, device="meta"), ArgumentError),
    (torch.zeros(3), ArgumentError),
    (torch.arange(6)[::2], ArgumentError),
    ("abc", ArgumentError),
    (None, ArgumentError),
    (3, ArgumentError),
    ([1.5], ArgumentError),
    ([None], ArgumentError),
]


@pytest.mark.parametrize(("tokens", "error"), BAD_TOKENS, ids=repr)
def test_bad_tokens(tokens, error: type[Exception]):
    tree = filled_tree()
    lease = tree.lock(tree.match([0]))
    before = snapshot(tree)
    for call in (
        lambda: tree.match(tokens),
        lambda: tree.match_length(tokens),
        lambda: tree.match_many([[1], tokens]),
        lambda: tree.match_lengths([[1], tokens]),
        lambda: tree.insert(tokens, [1, 2]),
        lambda: tree.insert(tokens, [1, 2], namespace="new"),
        lambda: tree.insert(tokens, [1, 2], lease),
        lambda: tree.replace(tokens, [1, 2]),
    ):
        with pytest.raises(error):
            call()
        assert snapshot(tree) == before
    tree.check()


@pytest.mark.parametrize(
    ("page_ids", "error"),
    [
        ([1, 0], OutOfRangeError),
        ([-1, 1], OutOfRangeError),
        (np.array([1, -(2**31)], dtype=np.int32), OutOfRangeError),
        ([1, 2**31 // 4], OutOfRangeError),  # its slots would pass 2^31
        ([1, 2**31], ArgumentError),
        ([1], ArgumentError),
        ([1, 2, 3, 4], ArgumentError),
        ([[1, 2]], ArgumentError),
        (np.ones(2), ArgumentError),
        (np.arange(1, 5)[::2], ArgumentError),
        (None, ArgumentError),
    ],
    ids=repr,
)
def test_bad_page_ids(page_ids, error: type[Exception]):
    tree = filled_tree(4)
    before = snapshot(tree)
    for call in (tree.insert, tree.replace):
        with pytest.raises(error):
            call(np.arange(9), page_ids)
    assert snapshot(tree) == before


@pytest.mark.parametrize("namespace", [None, 3, ["a"], bytearray(b"a"), "\ud800"], ids=repr)
def test_bad_namespaces(namespace):
    tree = filled_tree()
    for call in (
        lambda: tree.match([1], namespace),
        lambda: tree.match_many([[1]], [namespace]),
        lambda: tree.drop(namespace),
        lambda: tree.replace([0], [1], namespace=namespace),
    ):
        with pytest.raises(ArgumentError, match="namespace"):
            call()
    with pytest.raises(ArgumentError):
        tree.match_many([[1]], [b"a", b"b"])
    with tree.lock(tree.match([0])) as lease, pytest.raises(ArgumentError, match="its own"):
        tree.insert([1], [2], lease, namespace="a")


@pytest.mark.parametrize(
    "extra_keys",
    [
        [(0, 2)],
        [(2, 2, "a")],
        [(3, 1, "a")],
        [(-1, 1, "a")],
        [(0, 2, "a"), (1, 3, "b")],
        [(4, 5, "a"), (0, 1, "b")],
        [(0, 1, 7)],
        [(0, 1, None)],
        [(0.5, 1, "a")],
        [(0, 2**70, "a")],
        ["abc"],
        "abc",
        None,
        7,
    ],
    ids=repr,
)
def test_bad_extra_keys(extra_keys):
    tree = filled_tree()
    before = snapshot(tree)
    for call in (
        lambda: tree.match([1, 2], extra_keys=extra_keys),
        lambda: tree.match_length([1, 2], extra_keys=extra_keys),
        lambda: tree.insert([1, 2], [8, 9], extra_keys=extra_keys),
        lambda: tree.replace([0], [1], extra_keys=extra_keys),
    ):
        with pytest.raises(ArgumentError, match="extra_keys"):
            call()
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"page_tokens": 0},
        {"page_tokens": -1},
        {"page_tokens": 1.5},
        {"page_tokens": 2**40},
        {"page_tokens": None},
        {"windows": ()},
        {"windows": (0,)},
        {"windows": (-4,)},
        {"windows": ("a",)},
        {"windows": 3},
        {"windows": None},
        {"states": 1},
        {"states": None},
        {"capacity": -1},
        {"capacity": 2**40},
        {"capacity": "many"},
    ],
    ids=repr,
)
def test_trees_that_cannot_be_built(arguments: dict):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        PrefixTree(**arguments)


def test_evicting_more_than_there_is():
    tree = filled_tree()
    lease = tree.lock(tree.match([0, 1]))
    before = snapshot(tree)
    for n in (5, 10**6, 2**60):
        with pytest.raises(CapacityError) as caught:
            tree.evict(n)
        assert (caught.value.wanted, caught.value.free, caught.value.total) == (n, 4, 6)
    for n in (-1, 1.5, None, "1", 2**70):
        with pytest.raises(ArgumentError):
            tree.evict(n)
    for column in (1, -1, None):
        with pytest.raises(ArgumentError):
            tree.evict(1, column)
    with pytest.raises(ArgumentError, match="states"):
        tree.evict_states(1)
    with pytest.raises(ArgumentError, match="window"):
        tree.punch(lease, 0, 1)
    with pytest.raises(ArgumentError, match="states"):
        tree.insert([0], [1], checkpoints=[(1, 1)])
    assert snapshot(tree) == before


@pytest.mark.parametrize("thing", [None, 1, "lease", {}], ids=repr)
def test_what_is_no_match_and_no_lease(thing):
    tree = filled_tree()
    for call in (
        lambda: tree.lock(thing),
        lambda: tree.release(thing),
        lambda: tree.demote(thing),
        lambda: tree.page_ids(thing),
        lambda: tree.punch(thing, 0, 1),
        lambda: tree.unlisten(thing),
    ):
        with pytest.raises(ArgumentError):
            call()
    if thing is not None:
        with pytest.raises(ArgumentError):
            tree.insert([1], [1], thing)
    with pytest.raises(ArgumentError):
        tree.listen(thing)
    for values in ({"max_nodes": -1}, {"max_tokens": "a"}, {"namespace": 3}):
        with pytest.raises(ArgumentError):
            tree.nodes(**values)


def test_values_cannot_be_made_by_hand():
    from pagoda.tree import Freed, Inserted, Lease, Match

    for kind in (Match, Lease, Inserted, Freed):
        with pytest.raises(TypeError):
            kind()
