"""The rules of the prefix tree as examples that can be read: holes, checkpoints, runs, and the order."""

from typing import Any

import pytest

from pagoda.errors import (
    ArgumentError,
    CapacityError,
    OutOfRangeError,
)
from unit.tree_views import HOLE, lists, runs

# A window column has holes


def test_a_prefix_is_usable_where_the_window_before_it_is_there(kind: Any) -> None:
    tree = kind(1, windows=(None, 3))
    tree.insert([1, 2, 3, 4, 5], [[11, 12, 13, 14, 15], [HOLE, 22, 23, HOLE, 25]])
    # Of L tokens the last W - 1 = 2 are read again.
    usable = [tree.match_length([1, 2, 3, 4, 5][:length]) for length in range(6)]
    assert usable == [0, 0, 0, 3, 3, 3]
    match = tree.match([1, 2, 3, 4, 5, 6])
    assert (match.length, match.found) == (3, 5)
    assert lists(match.columns) == [[11, 12, 13], [HOLE, 22, 23]]
    assert match.page_ids.tolist() == [11, 12, 13]
    tree.check()


def test_a_page_counts_as_there_for_every_token_it_covers(kind: Any) -> None:
    tree = kind(4, windows=(4,))  # tokens 5 … 7 at L = 8: page 1
    tree.insert(range(12), [HOLE, 22, 23])
    assert [tree.match_length(range(n)) for n in (4, 8, 12)] == [0, 8, 12]
    wide = kind(4, windows=(6,))  # tokens 3 … 7 at L = 8: page 0 too
    wide.insert(range(12), [HOLE, 22, 23])
    assert [wide.match_length(range(n)) for n in (4, 8, 12)] == [0, 0, 12]


def test_a_window_of_one_token_needs_no_page(kind: Any) -> None:
    tree = kind(2, windows=(None, 1))
    tree.insert([1, 2, 3, 4], [[11, 12], [HOLE, HOLE]])
    assert tree.match_length([1, 2, 3, 4]) == 4
    assert tree.counts().columns == ((2, 2, 0), (0, 0, 0))


def test_an_insert_tells_how_far_pages_are_and_how_far_they_are_of_use(kind: Any) -> None:
    tree = kind(1, windows=(2,))
    inserted = tree.insert([1, 2, 3, 4], [11, 12, HOLE, HOLE])
    assert (inserted.present, inserted.stored, inserted.length) == (0, 4, 2)
    assert runs(tree) == [(0, 4)]
    tree.insert([1, 2], [11, 12])
    assert runs(tree) == [(0, 2), (2, 4)]  # cut where it ends: the rest was not used
    assert tree.counts().columns[0] == (2, 2, 0)


def test_ids_of_a_later_insert_fill_holes(kind: Any) -> None:
    tree = kind(1, windows=(None, 2))
    tree.insert([1, 2, 3], [[11, 12, 13], [HOLE, 22, HOLE]])
    inserted = tree.insert([1, 2, 3, 4], [[31, 32, 33, 34], [41, 42, 43, 44]])
    assert (inserted.present, inserted.stored, inserted.length) == (3, 4, 4)
    assert lists(inserted.filled) == [[], [0, 2]]
    # 31 … 33 and 42 stay the caller's: those pages were there.
    assert lists(tree.match([1, 2, 3, 4]).columns) == [[11, 12, 13, 34], [41, 22, 43, 44]]


def test_every_column_has_its_array_of_fills(kind: Any) -> None:
    assert lists(kind(1).insert([1], [11]).filled) == [[]]
    assert lists(kind(1, windows=(None, 2)).insert([1], [[11], [21]]).filled) == [[], []]


def test_a_hole_is_filled_behind_a_lease_too_and_by_its_page_number(kind: Any) -> None:
    tree = kind(2, windows=(None, 4))
    tree.insert([1, 1, 2, 2, 3, 3], [[11, 12, 13], [21, HOLE, HOLE]])
    with tree.lock(tree.match([1, 1])) as lease:
        inserted = tree.insert([2, 2, 3, 3], [[32, 33], [HOLE, 43]], lease)
        assert lists(inserted.filled) == [[], [2]]
        # Page 1 is a hole still, and the window needs it at 4 and at 6.
        assert (inserted.present, inserted.length, lease.length) == (6, 2, 2)


def test_punch_makes_holes_only_where_no_other_lease_is(kind: Any) -> None:
    tree = kind(1, windows=(None, 3))
    tree.insert([1, 2, 3, 4], [[11, 12, 13, 14], [21, 22, 23, 24]])
    lease, other = tree.lock(tree.match([1, 2, 3, 4])), tree.lock(tree.match([1]))
    assert tree.punch(lease, 1, 3).tolist() == [22, 23]
    assert tree.page_ids(lease, 1).tolist() == [21, HOLE, HOLE, 24]
    assert tree.punch(lease, 1, 3).tolist() == []
    tree.release(other)
    assert tree.punch(lease, 1, 3).tolist() == [21]
    assert tree.counts().columns == ((4, 0, 4), (1, 0, 1))
    with pytest.raises(ArgumentError):
        tree.punch(lease, 0, 3)
    tree.check()


def test_punch_leaves_a_page_that_reaches_past_the_end(kind: Any) -> None:
    tree = kind(4, windows=(5,))
    tree.insert(range(8), [21, 22])
    with tree.lock(tree.match(range(8))) as lease:
        assert tree.punch(lease, 0, 3).tolist() == []
        assert tree.punch(lease, 0, 7).tolist() == [21]


def test_a_lease_that_punched_its_own_end_ends_where_it_can_resume(kind: Any) -> None:
    tree = kind(1, windows=(2,))
    tree.insert([1, 2, 3], [11, 12, 13])
    lease = tree.lock(tree.match([1, 2, 3]))
    tree.punch(lease, 0, 3)
    assert lease.length == 3
    assert tree.insert([4], [HOLE], lease).length == 0
    assert (lease.length, tree.protected_tokens) == (0, 0)
    tree.check()


def test_evicting_a_column_trims_until_enough_of_that_column_came_free(kind: Any) -> None:
    tree = kind(1, windows=(None, 2))
    tree.insert([1, 2, 3, 4], [[11, 12, 13, 14], [21, HOLE, HOLE, 24]])
    freed = tree.evict(2, column=1)
    assert lists(freed.columns) == [[11, 12, 13, 14], [21, 24]]
    with pytest.raises(CapacityError) as caught:
        tree.evict(1, column=1)
    assert caught.value.what == "evictable pages of column 1"


# A tree with states keeps what a checkpoint can resume


def test_a_match_ends_where_every_group_can_resume(kind: Any) -> None:
    tree = kind(1, windows=(None, 3), states=True)
    columns = [[11, 12, 13, 14, 15, 16], [21, 22, HOLE, 24, 25, 26]]
    tree.insert([1, 2, 3, 4, 5, 6], columns, checkpoints=[(2, 7), (4, 8), (6, 9)])
    assert tree.match_length([1, 2, 3, 4, 5, 6]) == 6
    # At 5 there is no checkpoint; at 4 the window reads the hole.
    match = tree.match([1, 2, 3, 4, 5])
    assert (match.length, match.found, match.state_id) == (2, 5, 7)
    assert tree.match([1]).state_id is None
    assert (tree.match([1]).length, tree.match([1]).found) == (0, 1)


def test_pages_behind_the_last_checkpoint_are_not_stored(kind: Any) -> None:
    tree = kind(2, states=True)
    inserted = tree.insert(range(10), [1, 2, 3, 4, 5], checkpoints=[(4, 0), (6, 3)])
    assert (inserted.present, inserted.stored, inserted.length) == (0, 6, 6)
    assert inserted.states.tolist() == [0, 3]
    assert tree.insert([7, 7], [9]).stored == 0
    assert tree.counts().states == (2, 2, 0)
    assert tree.num_nodes == 1


def test_a_checkpoint_where_there_is_one_is_not_taken(kind: Any) -> None:
    tree = kind(1, states=True)
    tree.insert([1, 2, 3], [11, 12, 13], checkpoints=[(3, 5)])
    inserted = tree.insert([1, 2, 3], [21, 22, 23], checkpoints=[(2, 6), (3, 7)])
    assert inserted.states.tolist() == [6]
    assert (inserted.present, inserted.stored) == (3, 3)
    assert tree.match([1, 2]).state_id == 6
    assert tree.match([1, 2, 3]).state_id == 5


def test_found_and_length_differ_where_a_snapshot_would_pay(kind: Any) -> None:
    tree = kind(1, states=True)
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14], checkpoints=[(4, 5)])
    match = tree.match([1, 2, 3, 9])
    assert (match.length, match.found) == (0, 3)
    inserted = tree.insert([1, 2, 3, 9], [21, 22, 23, 29], checkpoints=[(3, 6), (4, 7)])
    assert (inserted.present, inserted.stored, inserted.length) == (3, 4, 4)
    assert tree.match([1, 2, 3, 8]).length == 3


def test_an_eviction_trims_to_the_checkpoint_before(kind: Any) -> None:
    tree = kind(1, states=True)
    tree.insert([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], checkpoints=[(2, 0), (4, 1), (6, 2)])
    freed = tree.evict(1)
    assert (freed.page_ids.tolist(), freed.state_ids.tolist()) == ([15, 16], [2])
    freed = tree.evict(3)
    assert (freed.page_ids.tolist(), freed.state_ids.tolist()) == ([11, 12, 13, 14], [0, 1])
    assert tree.num_nodes == 0


def test_a_parent_that_becomes_a_leaf_is_trimmed_to_its_last_checkpoint(kind: Any) -> None:
    tree = kind(1, states=True)
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14], checkpoints=[(1, 0), (4, 1)])
    tree.insert([1, 2, 3, 9], [21, 22, 23, 29], checkpoints=[(4, 2)])
    assert runs(tree) == [(0, 3), (3, 4), (3, 4)]
    assert tree.evict(1).page_ids.tolist() == [14]
    freed = tree.evict(1)  # 29, and 12 and 13, from which nothing could resume any more
    assert (freed.page_ids.tolist(), freed.state_ids.tolist()) == ([29, 12, 13], [2])
    assert tree.match([1, 2, 3, 4]).length == 1
    tree.check()


def test_parents_without_a_checkpoint_go_with_their_last_child(kind: Any) -> None:
    tree = kind(1, states=True)
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14], checkpoints=[(4, 1)])
    tree.insert([1, 2, 3, 5], [21, 22, 23, 15], checkpoints=[(4, 2)])
    tree.insert([1, 6], [31, 16], checkpoints=[(2, 3)])
    assert runs(tree) == [(0, 1), (1, 3), (3, 4), (3, 4), (1, 2)]
    assert tree.evict_states(1).page_ids.tolist() == [14]
    assert tree.evict_states(1).page_ids.tolist() == [15, 12, 13]
    assert tree.evict_states(1).page_ids.tolist() == [16, 11]
    assert tree.namespaces() == []


def test_evicting_states_counts_checkpoints(kind: Any) -> None:
    tree = kind(1, states=True)
    tree.insert([1, 2, 3], [11, 12, 13], checkpoints=[(1, 5), (3, 6)])
    tree.lock(tree.match([1]))
    with pytest.raises(CapacityError) as caught:
        tree.evict_states(2)
    error = caught.value
    assert (error.what, error.wanted, error.free, error.total) == ("evictable states", 2, 1, 2)
    freed = tree.evict_states(1)
    assert (freed.page_ids.tolist(), freed.state_ids.tolist()) == ([12, 13], [6])
    with pytest.raises(ArgumentError):
        kind(1).evict_states(0)


def test_checkpoints_are_refused_where_they_cannot_be(kind: Any) -> None:
    tree = kind(2, states=True)
    lease = tree.lock(tree.match([]))
    tree.insert([1, 1], [11], lease, checkpoints=[(2, 0)])
    for wrong in ([(3, 0)], [(6, 0)], [(2, 0)], [(4, 0), (4, 1)], [4], [(4, 0, 0)], 4):
        with pytest.raises(ArgumentError):
            tree.insert([2, 2, 2], [12], lease, checkpoints=wrong)
    with pytest.raises(OutOfRangeError) as caught:
        tree.insert([2, 2], [12], lease, checkpoints=[(4, -1)])
    assert (caught.value.id, caught.value.position) == (-1, 0)
    with pytest.raises(ArgumentError):
        kind(2).insert([1, 1], [11], checkpoints=[(2, 0)])
    assert (tree.num_tokens, lease.length) == (2, 2)


# Runs


def test_a_run_grows_in_place_while_nobody_else_has_to_do_with_it(kind: Any) -> None:
    tree = kind(1)
    lease = tree.lock(tree.match([]))
    for token in range(100):
        tree.insert([token], [token + 1], lease)
    assert runs(tree) == [(0, 100)]
    other = tree.lock(tree.match(range(100)))
    tree.insert([100], [101], lease)
    assert runs(tree) == [(0, 100), (100, 101)]
    tree.release(other)
    tree.insert([101], [102], lease)
    assert runs(tree) == [(0, 100), (100, 102)]


def test_a_trimmed_run_does_not_grow_again(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3], [11, 12, 13])
    old = tree.match([1, 2, 3])
    tree.evict(1)
    assert tree.insert([1, 2, 3], [11, 12, 23]).present == 2
    assert runs(tree) == [(0, 2), (2, 3)]
    # The third page is another one than the match found.
    assert tree.lock(old).length == 2


def test_the_upper_half_of_a_split_does_not_grow_again(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2], [11, 12])
    with tree.lock(tree.match([1])) as lease:
        assert tree.evict(1).page_ids.tolist() == [12]
        tree.insert([3], [13], lease)
        assert runs(tree) == [(0, 1), (1, 2)]


def test_matching_splits_nothing_and_locking_splits_where_the_lease_ends(kind: Any) -> None:
    tree = kind(2)
    tree.insert(range(8), [1, 2, 3, 4])
    match = tree.match([0, 1, 2, 3, 9])
    assert (match.length, runs(tree)) == (4, [(0, 8)])
    tree.lock(match)
    assert runs(tree) == [(0, 4), (4, 8)]
    assert (tree.evictable_tokens, tree.protected_tokens) == (4, 4)


def test_an_insert_splits_where_it_ends_inside_a_run(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3], [11, 12, 13])
    inserted = tree.insert([1], [21])
    assert (inserted.present, inserted.stored, inserted.length) == (1, 1, 1)
    assert runs(tree) == [(0, 1), (1, 3)]


# Order


def test_the_deepest_page_of_a_path_goes_first(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14])
    tree.insert([1, 2, 5, 6], [21, 22, 15, 16])
    assert tree.evict(3).page_ids.tolist() == [13, 14, 16]
    assert tree.evict(3).page_ids.tolist() == [15, 11, 12]


def test_matching_renews_nothing_and_locking_does(kind: Any) -> None:
    tree = kind(1)
    for token in (1, 2, 3):
        tree.insert([token], [10 + token])
    tree.match([1])
    assert tree.evict(1).page_ids.tolist() == [11]
    tree.release(tree.lock(tree.match([2])))
    assert tree.evict(2).page_ids.tolist() == [13, 12]


def test_a_demoted_tail_goes_first_and_the_latest_demoted_before_all(kind: Any) -> None:
    tree = kind(1)
    leases = []
    for token in (1, 2, 3):
        leases.append(tree.lock(tree.match([], b"")))
        tree.insert([token, 9], [10 + token, 20 + token], leases[-1])
    tree.demote(leases[1])
    tree.demote(leases[2])
    for lease in leases:
        tree.release(lease)
    assert tree.evict(6).page_ids.tolist() == [13, 23, 12, 22, 11, 21]


def test_a_demoted_lease_leaves_what_others_continue_where_it_is(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3], [11, 12, 13])
    tree.insert([1, 2, 4], [11, 12, 14])
    tree.insert([5], [15])
    lease = tree.lock(tree.match([1, 2, 3]))
    tree.demote(lease)
    tree.release(lease)
    assert tree.evict(5).page_ids.tolist() == [13, 14, 15, 11, 12]


def test_what_is_stored_makes_all_above_it_hot(kind: Any) -> None:
    tree = kind(1, windows=(2,))
    tree.insert([1, 1], [HOLE, 12])
    tree.insert([3], [13])
    tree.insert([1, 2], [HOLE, HOLE])  # of no use to anybody, and still stored
    tree.check()
    assert tree.evict(2).page_ids.tolist() == [12, 13]


def test_halves_that_are_used_together_are_one_run_again(kind: Any) -> None:
    tree = kind(1)
    tokens = list(range(200))
    tree.insert(tokens, range(1, 201))
    for n in range(199, 0, -1):  # found at every length, shortest last
        tree.release(tree.lock(tree.match(tokens[:n])))
    assert tree.num_nodes == 200
    old = tree.match(tokens[:150])
    tree.release(tree.lock(tree.match(tokens)))
    assert tree.num_nodes == 1
    tree.check()
    assert tree.lock(old).length == 150  # the very pages it found, in other nodes
    assert tree.match(tokens).page_ids.tolist() == list(range(1, 201))


def test_halves_stay_apart_while_something_tells_them_apart(kind: Any) -> None:
    tree = kind(1)
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14])
    tree.insert([1, 2, 9], [11, 12, 19])  # a branch
    tree.release(tree.lock(tree.match([1, 2, 3, 4])))
    assert runs(tree) == [(0, 2), (2, 4), (2, 3)]
    assert tree.evict(1).page_ids.tolist() == [19]
    lease = tree.lock(tree.match([1, 2]))
    tree.insert([1, 2, 3, 4], [11, 12, 13, 14])  # a lease on the upper half
    assert runs(tree) == [(0, 2), (2, 4)]
    tree.release(lease)  # the upper half was used later than the lower
    assert runs(tree) == [(0, 2), (2, 4)]
    tree.insert([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    assert runs(tree) == [(0, 5)]
    tree.check()
