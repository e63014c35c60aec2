"""What a manager does with states: where it saves them, what it resumes from, and what it gives up."""

from typing import Any

import numpy as np
import pytest

from pagoda import FullAttention, GatedDelta, Layout, WindowAttention
from pagoda.errors import ArgumentError, CapacityError
from pagoda.manager import Admitted, Delta, Manager
from pagoda.tree import Removed, Stored
from unit.state_follower import StateFollower

FULL = FullAttention(kv_heads=1, k_dim=8, v_dim=8)
STATE = GatedDelta(key_heads=1, value_heads=1, key_dim=2, value_dim=2, kernel=2)
WINDOW = WindowAttention(kv_heads=1, k_dim=8, v_dim=8, window=6)


class Engine:
    """A manager with pages of 4 tokens, and the states that follow its deltas. Steps finish at once."""

    def __init__(
        self,
        *layers: Any,
        pages: int = 60,
        checkpoints: int = 8,
        num_rows: int = 6,
        interval: int = 1024,
        page_tokens: Any = 4,
    ) -> None:
        layout = Layout(list(layers) or [FULL, STATE], page_tokens)
        capacity = {group.name: pages for group in layout.paged_groups} | {"checkpoint": checkpoints}
        self.manager = Manager(
            layout, capacity, num_rows=num_rows, max_tokens=400, checkpoint_interval=interval
        )
        self.follower = StateFollower()
        self.tokens: dict[int, list[int]] = {}

    def admit(self, tokens: list[int], **given: Any) -> Admitted:
        got = self.manager.admit(tokens, **given)
        self.tokens[got.row] = list(tokens)
        return got

    def plan(self, counts: dict[int, int] | None = None) -> Delta:
        counts = counts or {}
        delta = self.manager.plan(list(counts), list(counts.values()))
        self.follower.apply(delta, self.tokens)
        self.manager.pass_fence(delta.step)
        self.manager.check()
        return delta

    def commit(self, row: int) -> None:
        begin, end = self.manager.committed(row), self.manager.computed(row)
        self.manager.commit(row, self.tokens[row][begin:end])
        self.manager.check()

    def step(self, counts: dict[int, int]) -> Delta:
        delta = self.plan(counts)
        for row in counts:
            self.commit(row)
        return delta

    def prefill(self, got: Admitted) -> None:
        """Compute the prompt, in steps that end at the cuts."""
        for end in (*got.cuts, len(self.tokens[got.row])):
            self.step({got.row: end - self.manager.computed(got.row)})

    def decode(self, row: int, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens[row].append(token)
            self.manager.reserve(row)
            self.step({row: 1})

    def release(self, row: int) -> None:
        self.manager.release(row)
        del self.tokens[row]
        self.manager.check()

    def serve(self, tokens: list[int], answer: list[int] | None = None, **given: Any) -> Admitted:
        got = self.admit(tokens, **given)
        self.prefill(got)
        self.decode(got.row, answer or [])
        self.release(got.row)
        self.plan()
        return got

    def kept(self) -> list[int]:
        """Lengths of the checkpoints in the tree."""
        return sorted(length for node in self.nodes() for length, _ in node.checkpoints)

    def nodes(self) -> list[Any]:
        return self.manager.tree.nodes(10**6, 10**6)

    def counts(self) -> tuple[int, int, int]:
        it = self.manager.stats().checkpoints
        assert it is not None
        assert it.free + it.cached + it.running == it.total
        return it.free, it.cached, it.running

    def seen(self) -> Any:
        """Everything a caller can see."""
        rows = list(self.tokens)
        lengths = [
            each(rows).tolist()
            for each in (
                self.manager.reserved,
                self.manager.computed,
                self.manager.committed,
                self.manager.stored,
            )
        ]
        nodes = [(n.begin, n.end, n.tokens.tolist(), n.checkpoints, n.leases) for n in self.nodes()]
        return self.manager.stats(), self.manager.step, lengths, nodes


def tokens(n: int, begin: int = 0) -> list[int]:
    return list(range(begin, begin + n))


def saves(delta: Delta) -> list[tuple[int, int, int]]:
    return list(zip(*(part.tolist() for part in delta.saves), strict=True))


# ── hits ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_hit_needs_pages_and_a_checkpoint():
    engine = Engine()
    engine.serve(tokens(22))  # pages to 20, a checkpoint at 20
    assert engine.kept() == [20]
    assert engine.manager.hit(tokens(30)) == 20
    assert engine.manager.hit(tokens(18)) == 0  # pages to 16, no checkpoint
    assert engine.manager.admit(tokens(18)).hit == 0


def test_a_checkpoint_without_its_window_is_no_hit():
    """Evictions of window pages leave holes: a hit is where both remain."""
    engine = Engine(WINDOW, STATE, pages=12, checkpoints=20, interval=8)
    engine.serve(tokens(25))
    assert engine.kept() == [8, 16, 24]
    row = engine.admit(tokens(40, 100))
    assert engine.manager.stats().evicted_pages > 0
    hit = engine.manager.hit(tokens(25))
    window = {p for n in engine.nodes() if n.begin == 0 and n.end for p in np.flatnonzero(n.columns[0])}
    usable = [n for n in (8, 16, 24) if {n // 4 - 2, n // 4 - 1} <= window and n in engine.kept()]
    assert hit == max([0, *usable])
    engine.release(row.row)


def test_the_delta_restores_or_resets_the_state():
    engine = Engine()
    first = engine.admit(tokens(10))
    delta = engine.plan()
    assert delta.resets.tolist() == [first.row]
    assert delta.restores[0].size == 0
    engine.prefill(first)
    again = engine.admit(tokens(10))
    assert (again.hit, again.cuts) == (8, ())
    delta = engine.plan()
    assert delta.resets.size == 0
    ((row, length, id),) = zip(*(part.tolist() for part in delta.restores), strict=True)
    assert (row, length) == (again.row, 8)
    assert engine.follower.checkpoints[id] == engine.follower.states[again.row] == tuple(range(8))


def test_a_prompt_resumes_from_what_the_same_delta_saves():
    """Saves come before restores: what is committed before the next plan is found."""
    engine = Engine()
    first = engine.admit(tokens(10))
    engine.step({first.row: 8})
    second = engine.admit(tokens(10))
    assert second.hit == 8
    delta = engine.plan({first.row: 2, second.row: 2})
    assert saves(delta)[0][2] == delta.restores[2][0]


# ── saves ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_save_is_in_the_delta_after_the_step_that_ends_at_a_cut():
    engine = Engine()
    got = engine.admit(tokens(10))
    assert got.cuts == (8,)
    assert saves(engine.plan({got.row: 8})) == []
    ((row, length, id),) = saves(engine.plan({got.row: 2}))
    assert (row, length) == (got.row, 8)
    assert engine.follower.checkpoints[id] == tuple(range(8))
    assert saves(engine.plan()) == []


def test_the_save_is_in_an_empty_plan():
    engine = Engine()
    got = engine.admit(tokens(10))
    engine.plan({got.row: 8})
    assert [it[:2] for it in saves(engine.plan())] == [(got.row, 8)]


@pytest.mark.parametrize("is_committed", [True, False])
def test_the_save_of_a_released_row_is_in_the_delta(is_committed: bool):
    """Also if another request gets the row in the same step: its state is reset after the save."""
    engine = Engine(num_rows=1)
    got = engine.admit(tokens(10))
    engine.plan({got.row: 8})
    if is_committed:
        engine.commit(got.row)
    engine.release(got.row)
    again = engine.admit(tokens(10, 50))
    assert again.row == got.row
    delta = engine.plan({again.row: 8})
    ((row, length, id),) = saves(delta)
    assert (row, length) == (got.row, 8)
    assert engine.follower.checkpoints[id] == tuple(range(8))
    assert engine.manager.hit(tokens(10)) == (8 if is_committed else 0)
    # What was not committed came free, and was given to the save of the second request.
    assert engine.counts() == ((6, 1, 1) if is_committed else (7, 0, 1))


def test_a_checkpoint_is_found_once_its_tokens_are_committed():
    engine = Engine()
    got = engine.admit(tokens(10))
    engine.plan({got.row: 8})
    engine.plan({got.row: 2})
    assert (engine.manager.hit(tokens(10)), engine.counts()) == (0, (7, 0, 1))
    engine.manager.commit(got.row, tokens(7))
    assert engine.manager.hit(tokens(10)) == 0
    engine.manager.commit(got.row, [7])
    assert (engine.manager.hit(tokens(10)), engine.counts()) == (8, (7, 1, 0))


def test_a_save_that_is_never_committed_comes_free():
    engine = Engine()
    got = engine.admit(tokens(10))
    engine.plan({got.row: 8})
    assert engine.counts() == (7, 0, 1)
    engine.release(got.row)
    assert engine.counts() == (8, 0, 0)
    engine.plan()
    assert engine.kept() == []


def test_a_step_that_runs_past_a_cut_drops_it():
    engine = Engine(interval=8)
    got = engine.admit(tokens(22))
    assert got.cuts == (8, 16, 20)
    deltas = [engine.step({got.row: n}) for n in (7, 2, 7, 6)] + [engine.plan()]
    assert [[it[1] for it in saves(delta)] for delta in deltas] == [[], [], [], [16], []]
    assert engine.kept() == [16]
    assert engine.manager.hit(tokens(22)) == 16


# ── cuts ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("length", "cuts"), [(1, ()), (4, ()), (5, (4,)), (8, (4,)), (9, (8,)), (400, (396,))]
)
def test_the_last_resume_point_is_a_cut(length: int, cuts: tuple[int, ...]):
    engine = Engine(pages=200)
    assert engine.admit(tokens(length)).cuts == cuts


@pytest.mark.parametrize(
    ("interval", "cuts"),
    [(8, (8, 16, 24, 28)), (10, (8, 16, 24, 28)), (1, tuple(range(4, 29, 4))), (28, (28,))],
)
def test_a_long_prompt_is_saved_every_interval(interval: int, cuts: tuple[int, ...]):
    engine = Engine(interval=interval)
    assert engine.admit(tokens(31)).cuts == cuts


def test_cuts_begin_after_the_hit():
    engine = Engine(interval=8)
    engine.serve(tokens(18))
    got = engine.admit(tokens(40))
    assert (got.hit, got.cuts) == (16, (24, 32, 36))


def test_the_second_sibling_plants_a_branch_point_and_the_third_resumes_there():
    engine = Engine()
    shared = tokens(21)
    engine.serve([*shared, *tokens(20, 100)])
    second = engine.serve([*shared, *tokens(20, 200)])
    assert (second.hit, second.cuts) == (0, (20, 40))
    third = engine.serve([*shared, *tokens(20, 300)])
    assert (third.hit, third.cuts) == (20, (40,))


def test_a_branch_point_at_an_interval_is_one_cut():
    engine = Engine(interval=8)
    engine.serve([*tokens(16), *tokens(10, 100)], store=True)
    engine.manager.drop(b"")  # pages and checkpoints
    first = engine.admit([*tokens(16), *tokens(10, 100)])
    engine.step({first.row: 26})  # past every cut: pages without checkpoints
    got = engine.admit([*tokens(16), *tokens(10, 200)])
    assert (got.hit, got.cuts) == (0, (8, 16, 24))


def test_no_cuts_without_checkpoints_or_where_nothing_is_stored():
    assert Engine(checkpoints=0).admit(tokens(30)).cuts == ()
    assert Engine().admit(tokens(30), store=False).cuts == ()


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────


def test_the_next_turn_of_a_chat_resumes_at_the_last_boundary_of_the_answer():
    engine = Engine()
    engine.serve(tokens(10), tokens(13, 10))  # 23 tokens in all
    assert engine.kept() == [8, 20]
    assert engine.serve(tokens(30)).hit == 20


def test_a_decoding_row_keeps_one_checkpoint_of_its_own():
    engine = Engine(checkpoints=3)
    got = engine.admit(tokens(10))
    engine.prefill(got)
    used = []
    for token in range(10, 40):
        engine.decode(got.row, [token])
        used.append(engine.counts()[2])
    assert max(used) <= 2  # while the next is on its way
    assert engine.counts()[1:] == (1, 1)
    assert engine.kept() == [8]
    engine.release(got.row)
    assert engine.kept() == [8, 40]
    assert engine.counts() == (1, 2, 0)


def test_a_decoding_row_saves_over_its_own_checkpoint_when_ids_are_short():
    engine = Engine(checkpoints=1)
    got = engine.admit(tokens(3))
    engine.prefill(got)
    engine.decode(got.row, tokens(18, 3))
    assert engine.counts() == (0, 0, 1)
    assert engine.manager.stats().checkpoints.evicted == 0
    engine.release(got.row)
    assert engine.kept() == [20]
    assert engine.manager.hit(tokens(30)) == 20


def test_rolling_saves_of_several_steps_in_flight():
    """Tokens are committed late: the last boundary that is committed at the end goes to the tree."""
    engine = Engine()
    got = engine.admit(tokens(4))
    engine.prefill(got)
    engine.tokens[got.row] = tokens(40)
    engine.manager.reserve(got.row, 20)
    for _ in range(4):
        engine.plan({got.row: 4})
    engine.plan()
    assert engine.counts() == (4, 0, 4)  # at 8, 12, 16 and 20
    engine.manager.commit(got.row, tokens(9, 4))  # 13 are known
    assert engine.counts() == (5, 0, 3)  # 8 is behind 12
    engine.release(got.row)
    assert engine.counts() == (7, 1, 0)
    assert engine.kept() == [12]


def test_the_end_of_a_prompt_is_not_saved_where_a_repeat_could_not_resume():
    """A save at 8 would supersede the one at 4, and a repeat of these 8 tokens has one left to compute."""
    engine = Engine(checkpoints=1)
    engine.serve(tokens(8))
    assert engine.kept() == [4]
    assert engine.serve(tokens(8)).hit == 4
    engine.serve(tokens(8), tokens(4, 8))
    assert engine.kept() == [12]


# ── shortage ────────────────────────────────────────────────────────────────────────────────────────


def test_without_an_id_a_save_is_left_out_and_nothing_fails():
    engine = Engine(checkpoints=1)
    a, b = engine.admit(tokens(10)), engine.admit(tokens(10, 50))
    engine.plan({a.row: 8, b.row: 8})
    assert [it[:2] for it in saves(engine.plan({a.row: 2, b.row: 2}))] == [(a.row, 8)]
    engine.commit(a.row)
    engine.commit(b.row)
    assert (engine.manager.hit(tokens(10)), engine.manager.hit(tokens(10, 50))) == (8, 0)


def test_without_checkpoints_nothing_resumes():
    engine = Engine(checkpoints=0)
    for _ in range(2):
        assert engine.serve(tokens(20), tokens(10, 20)).hit == 0
    assert engine.counts() == (0, 0, 0)
    assert engine.manager.tree.counts().tokens.total == 28  # pages are stored as ever, and may be found


def test_interval_points_are_not_saved_for_the_price_of_others():
    """With no second class left to give up."""
    engine = Engine(checkpoints=2, interval=8)
    engine.serve(tokens(6))
    engine.serve(tokens(6, 50))
    assert engine.kept() == [4, 4]
    got = engine.admit(tokens(40, 100))
    for cut in got.cuts[:-1]:
        engine.step({got.row: cut - engine.manager.computed(got.row)})
        assert saves(engine.plan()) == []
    assert engine.kept() == [4, 4]
    engine.step({got.row: got.cuts[-1] - engine.manager.computed(got.row)})
    assert len(saves(engine.plan())) == 1
    assert engine.kept() == [4, 36]


# ── fork and rollback ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", ["fork", "rollback"])
def test_a_state_that_has_moved_on_cannot_go_back(call: str):
    engine = Engine()
    got = engine.admit(tokens(12))
    engine.plan({got.row: 6})
    engine.manager.commit(got.row, tokens(5))
    before = engine.seen()
    with pytest.raises(ArgumentError, match="row 1 has 1 tokens computed and not committed"):
        getattr(engine.manager, call)(got.row, 1)
    assert engine.seen() == before
    engine.commit(got.row)
    getattr(engine.manager, call)(got.row, 1)


def test_a_rollback_of_no_tokens_needs_no_commit():
    engine = Engine()
    got = engine.admit(tokens(12))
    engine.plan({got.row: 6})
    engine.manager.rollback(got.row, 0)


def test_one_unsettled_row_refuses_a_rollback_of_all():
    engine = Engine()
    a, b = engine.admit(tokens(12)), engine.admit(tokens(12, 50))
    engine.plan({b.row: 2})
    before = engine.seen()
    with pytest.raises(ArgumentError, match="row 2"):
        engine.manager.rollback([a.row, b.row], [3, 3])
    assert engine.seen() == before


def test_a_fork_copies_the_state():
    engine = Engine()
    got = engine.admit(tokens(10))
    engine.prefill(got)
    engine.plan()
    children = engine.manager.fork(got.row, 2).tolist()
    grandchild = engine.manager.fork(children[0])
    for row in (*children, grandchild):
        engine.tokens[row] = tokens(10)
    delta = engine.plan()
    assert [it.tolist() for it in delta.state_copies] == [[got.row] * 3, [*children, grandchild]]
    assert {engine.follower.states[row] for row in (*children, grandchild)} == {tuple(range(10))}
    for row in (*children, grandchild):
        engine.decode(row, tokens(5, 100 * row))  # each goes on with a state of its own
    engine.release(grandchild)
    assert engine.manager.hit([*tokens(10), *tokens(5, 100 * grandchild), 0]) == 12


def test_a_fork_of_a_row_that_was_just_admitted():
    """Restores come before copies."""
    engine = Engine()
    engine.serve(tokens(10))
    got = engine.admit(tokens(10))
    child = engine.manager.fork(got.row)
    engine.tokens[child] = tokens(8)
    delta = engine.plan()
    assert delta.restores[0].tolist() == [got.row]
    assert engine.follower.states[child] == tuple(range(8))


# ── pending ─────────────────────────────────────────────────────────────────────────────────────────


def test_pending_names_lengths_where_a_save_is_planned():
    engine = Engine(interval=8)
    assert engine.manager.pending(tokens(30)) is None
    got = engine.admit(tokens(22))
    assert got.cuts == (8, 16, 20)
    assert engine.manager.pending(tokens(30)) == (got.row, 20)
    assert engine.manager.pending(tokens(19)) == (got.row, 16)  # pages to 16
    assert engine.manager.pending(tokens(16)) == (got.row, 8)  # at least one token is computed
    assert engine.manager.pending(tokens(8)) is None
    engine.plan({got.row: 17})  # past 8 and 16
    assert engine.manager.pending(tokens(19)) is None
    engine.plan({got.row: 3})
    assert engine.manager.pending(tokens(30)) == (got.row, 20)  # saved, not committed
    engine.commit(got.row)
    assert engine.manager.pending(tokens(30)) is None  # it hits
    assert engine.manager.hit(tokens(30)) == 20


def test_pending_names_no_interval_point_that_nothing_makes_room_for():
    engine = Engine(checkpoints=2, interval=8)
    for begin in (100, 200):
        engine.serve(tokens(5, begin))
    got = engine.admit(tokens(22))
    assert got.cuts == (8, 16, 20)
    assert engine.manager.pending(tokens(18)) is None
    assert engine.manager.pending(tokens(30)) == (got.row, 20)  # the tail will take a document's
    engine.step({got.row: 8})
    assert engine.plan().saves[0].tolist() == []


def test_a_save_that_was_left_out_is_not_pending():
    engine = Engine(checkpoints=1)
    a, b = engine.admit(tokens(10)), engine.admit(tokens(10, 50))
    assert engine.manager.pending(tokens(10, 50)) == (b.row, 8)
    engine.plan({a.row: 8, b.row: 8})
    assert engine.manager.pending(tokens(10)) == (a.row, 8)
    assert engine.manager.pending(tokens(10, 50)) is None


# ── what goes ───────────────────────────────────────────────────────────────────────────────────────


def test_giving_up_an_inner_checkpoint_trims_no_pages():
    engine = Engine(checkpoints=2, interval=8)
    engine.serve(tokens(18))
    assert engine.kept() == [8, 16]
    before = engine.manager.tree.counts().tokens.total
    engine.serve(tokens(6, 100))
    assert engine.kept() == [4, 16]  # the interval point went
    assert engine.manager.tree.counts().tokens.total == before + 4
    assert engine.manager.hit(tokens(18)) == 16


def test_evicted_pages_free_the_checkpoints_behind_them():
    engine = Engine(pages=12, checkpoints=8, interval=8)
    engine.serve(tokens(34))  # 8 pages
    assert engine.kept() == [8, 16, 24, 32]
    got = engine.admit(tokens(28, 100))  # 7 pages: evicts at least 3 from the tail
    assert engine.manager.stats().evicted_pages == 3
    assert engine.kept() == [8, 16]
    assert engine.counts() == (6, 2, 0)
    assert engine.manager.stats().checkpoints.evicted == 2
    engine.prefill(got)


def test_drop_frees_checkpoints_and_saves():
    engine = Engine()
    engine.serve(tokens(10), namespace=b"a")
    got = engine.admit(tokens(10), namespace=b"a")  # locks 8
    late = engine.admit(tokens(10, 50), namespace=b"a")
    engine.plan({got.row: 2, late.row: 8})  # a save is on its way
    assert engine.counts() == (6, 1, 1)
    engine.manager.drop(b"a")
    engine.manager.check()
    assert engine.counts() == (8, 0, 0)
    engine.commit(got.row)
    engine.commit(late.row)
    engine.decode(late.row, tokens(9, 60))
    assert engine.counts() == (8, 0, 0)  # nothing that its rows commit is kept
    assert engine.manager.hit(tokens(10), namespace=b"a") == 0
    assert engine.serve(tokens(10)).hit == 0


def test_invalidate_frees_what_is_behind_bad_pages():
    engine = Engine(interval=8)
    engine.serve(tokens(22))
    assert engine.kept() == [8, 16, 20]
    got = engine.admit(tokens(30))
    assert got.hit == 20
    engine.step({got.row: 8})
    assert engine.kept() == [8, 16, 20, 28]
    bad = engine.manager.page_ids(got.row, "full")[3]  # tokens 12 … 15
    assert engine.manager.invalidate("full", [bad]).tolist() == [got.row]
    engine.manager.check()
    assert engine.manager.hit(tokens(30)) == 8
    assert engine.kept() == [8]
    engine.decode(got.row, tokens(6, 30))
    assert engine.counts() == (7, 1, 0)


def test_a_state_computed_from_a_bad_duplicate_is_not_resumed():
    engine = Engine()
    a, b = engine.admit(tokens(10)), engine.admit(tokens(10))
    engine.step({a.row: 10})  # runs past the cut
    engine.step({b.row: 8})  # its pages are duplicates, but its state is the one that is kept
    engine.step({b.row: 2})
    assert engine.kept() == [8]
    reader = engine.admit(tokens(12))
    assert reader.hit == 8
    bad = engine.manager.page_ids(b.row, "full")[:1]
    assert engine.manager.invalidate("full", bad).tolist() == [a.row, b.row, reader.row]
    assert engine.kept() == []
    assert engine.manager.hit(tokens(12)) == 0
    engine.manager.check()


def test_invalidate_forgets_saves_on_their_way():
    engine = Engine()
    got = engine.admit(tokens(10))
    engine.plan({got.row: 8})
    assert engine.counts() == (7, 0, 1)
    engine.manager.invalidate("full", engine.manager.page_ids(got.row, "full")[:1])
    assert engine.counts() == (8, 0, 0)
    engine.commit(got.row)
    assert engine.kept() == []


def test_store_false_saves_nothing_and_read_false_restores_nothing():
    engine = Engine()
    engine.serve(tokens(10), tokens(10, 10), store=False)
    assert engine.counts() == (8, 0, 0)
    assert engine.manager.stats().checkpoints.saved == 0
    engine.serve(tokens(10))
    got = engine.admit(tokens(10), read=False)
    assert (got.hit, got.cuts) == (0, (8,))
    assert engine.plan().resets.tolist() == [got.row]
    got = engine.admit(tokens(10), store=False)
    assert (got.hit, got.cuts) == (8, ())


def test_max_hit_resumes_from_an_earlier_checkpoint():
    engine = Engine(interval=8)
    engine.serve(tokens(22))
    got = engine.admit(tokens(22), max_hit=19)
    assert (got.hit, got.cuts) == (16, (20,))
    assert engine.admit(tokens(22), max_hit=7).hit == 0


def test_stats_of_checkpoints_add_up():
    engine = Engine(checkpoints=3)
    engine.serve(tokens(10))
    engine.serve(tokens(10))
    engine.serve(tokens(10, 50), tokens(8, 60))
    stats = engine.manager.stats().checkpoints
    assert (stats.total, stats.free, stats.cached, stats.running) == (3, 0, 3, 0)
    assert (stats.saved, stats.resumed, stats.evicted) == (3, 1, 0)
    engine.serve(tokens(10, 90))
    stats = engine.manager.stats().checkpoints
    assert (stats.free, stats.cached, stats.saved, stats.resumed, stats.evicted) == (0, 3, 4, 1, 1)
    engine.manager.reset()
    assert engine.manager.stats().checkpoints[:4] == (3, 3, 0, 0)
    assert engine.manager.hit(tokens(10)) == 0


def test_listeners_hear_of_checkpoints():
    engine = Engine(checkpoints=1)
    heard: list[Any] = []
    engine.manager.tree.listen(heard.append)
    engine.serve(tokens(10))
    engine.serve(tokens(10, 50))
    found = [(type(it), [(length) for length, _ in it.states]) for it in heard if it.states]
    assert found == [(Stored, [8]), (Removed, [8]), (Stored, [8])]


# ── layouts ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_layout_of_states_alone():
    engine = Engine(STATE, checkpoints=3)
    assert engine.manager.layout.paged_groups == ()
    engine.serve(tokens(10), tokens(7, 10))
    assert engine.kept() == [8, 16]
    got = engine.serve(tokens(30))
    assert got.hit == 16
    assert engine.manager.stats().groups == ()


def test_states_alone_keep_only_tokens_before_a_checkpoint():
    """Nothing else would ever remove them."""
    engine = Engine(STATE, checkpoints=2)
    for begin in range(0, 2000, 50):
        engine.serve(tokens(10, begin), tokens(13, begin + 10))
    assert engine.manager.tree.counts().tokens.total <= 2 * 20
    engine = Engine(STATE, checkpoints=0)
    for begin in range(0, 2000, 50):
        engine.serve(tokens(10, begin))
    assert engine.manager.tree.counts().tokens.total == 0


def test_page_sizes_that_differ():
    engine = Engine(FULL, WINDOW, STATE, page_tokens={"full": 8, "window": 4})
    assert engine.manager.resume_step == 8
    got = engine.serve(tokens(22), tokens(5, 22))
    assert got.cuts == (16,)
    assert engine.kept() == [16, 24]
    assert engine.serve(tokens(40)).hit == 24


# ── order ───────────────────────────────────────────────────────────────────────────────────────────


def test_same_calls_same_evictions():
    pair = [Engine(checkpoints=5, interval=8, pages=40) for _ in range(2)]
    random = np.random.default_rng(1)
    evicted = 0
    for _ in range(80):
        prompt = [*tokens(int(random.integers(1, 30)), 50 * int(random.integers(3))), int(random.integers(3))]
        answer = random.integers(0, 3, size=int(random.integers(0, 10))).tolist()
        seen = []
        for engine in pair:
            try:
                engine.serve(prompt, answer)
            except CapacityError:
                engine.manager.release(sorted(engine.tokens))
                engine.tokens.clear()
                engine.plan()
            seen.append((engine.seen(), engine.follower.checkpoints))
        assert seen[0] == seen[1]
        evicted = pair[0].manager.stats().checkpoints.evicted
    assert evicted > 20


def test_a_model_without_pages_says_so():
    manager = Manager(Layout([STATE], 4), {"checkpoint": 2}, num_rows=1, max_tokens=40)
    assert repr(manager) == "Manager(0 of 1 rows running; 0 of 2 checkpoints cached)"
    with pytest.raises(ArgumentError, match="there is no group 'full', and none has pages"):
        manager.alloc_pages("full", 1)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_row_that_ends_before_its_last_save_is_committed_leaves_the_one_before(in_flight: int):
    engine = Engine(checkpoints=3)
    manager = engine.manager
    engine.serve(tokens(5, 100))
    got = engine.admit(tokens(9))
    engine.prefill(got)
    engine.decode(got.row, tokens(4, 9))
    assert engine.counts() == (0, 2, 1)  # a document, the prompt at 8 tokens, and the answer at 12
    for length in range(14, 17):
        manager.reserve(got.row)
        delta = manager.plan(got.row, 1)
        if length - in_flight > 13:
            manager.commit(got.row, length - in_flight - 1)
            manager.pass_fence(delta.step - in_flight)
    manager.check()
    manager.release(got.row)
    manager.pass_fence(manager.plan().step)
    assert manager.hit(tokens(14)) == 12
    manager.check()
