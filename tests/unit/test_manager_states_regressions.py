"""Failures of other engines' caches for hybrid models, as tests."""

import numpy as np
import pytest

from unit.test_manager_states import STATE, WINDOW, Engine, saves, tokens


@pytest.mark.parametrize("matched", [5, 9, 17, 25, 33, 41])
def test_a_match_inside_a_cached_run_loses_no_checkpoint(matched: int):
    """Engines report hits that fall from 40,000 tokens to 0 after a split: another prompt matches part of a
    run, the run is split there, and the checkpoints of one half are gone."""
    engine = Engine(pages=200, checkpoints=30, interval=8)
    engine.serve(tokens(50))
    assert engine.kept() == [8, 16, 24, 32, 40, 48]
    other = [*tokens(matched), *tokens(9, 100)]
    got = engine.serve(other)
    assert got.hit == matched // 8 * 8
    assert {8, 16, 24, 32, 40, 48} <= set(engine.kept())
    for length in (50, 49, 45, 33, 9):
        assert engine.manager.hit(tokens(length)) == (length - 1) // 8 * 8
    assert engine.serve(tokens(50)).hit == 48
    assert engine.serve(other).hit == (len(other) - 1) // 4 * 4


def test_a_match_that_computes_nothing_new_loses_no_checkpoint():
    engine = Engine()
    engine.serve(tokens(50))
    for matched in (48, 30, 10, 3):
        row = engine.admit(tokens(matched)).row
        engine.release(row)  # cancelled at once
        engine.plan()
        assert engine.manager.hit(tokens(50)) == 48


@pytest.mark.parametrize("length", [5, 8, 9, 22, 24, 25])
@pytest.mark.parametrize("layers", [(), (STATE,), (WINDOW, STATE)], ids=["full", "states", "window"])
def test_an_exact_repeat_hits_at_its_last_resume_point(length: int, layers: tuple[object, ...]):
    engine = Engine(*layers)
    engine.serve(tokens(length))
    last = (length - 1) // 4 * 4
    assert engine.serve(tokens(length)).hit == last
    engine.serve([*tokens(length // 2), 7, 7, 7, 7, 7])  # splits the path
    engine.serve([*tokens(length), 7, 7, 7, 7, 7])  # goes on from it
    assert engine.serve(tokens(length)).hit == last


def test_an_exact_repeat_hits_again_after_its_checkpoint_was_evicted():
    """Its pages are still there: the repeat recomputes once, and plants its checkpoint again."""
    engine = Engine(checkpoints=1)
    engine.serve(tokens(22))
    engine.serve(tokens(6, 100))
    assert engine.kept() == [4]
    got = engine.serve(tokens(22))
    assert (got.hit, got.cuts) == (0, (20,))
    assert engine.serve(tokens(22)).hit == 20


def test_an_exact_repeat_hits_again_after_its_pages_were_evicted():
    engine = Engine(pages=8)
    engine.serve(tokens(22))
    engine.serve(tokens(30, 100))
    assert engine.manager.hit(tokens(22)) == 0
    engine.serve(tokens(22))
    assert engine.serve(tokens(22)).hit == 20


def test_branch_points_survive_one_long_chain():
    """A chain saves many times what there is room for, while many requests share templates."""
    engine = Engine(pages=400, checkpoints=8, interval=4)
    templates = [tokens(40, 1000 * i) for i in range(1, 4)]
    for n in range(4):
        for template in templates:
            engine.serve([*template, n, n, n, n, n])
    chain = tokens(300)
    for end in range(20, 300, 20):
        engine.serve(chain[:end])
    for template in templates:
        assert engine.manager.hit([*template, 9, 9, 9]) == 40


def test_a_tail_survives_scans_that_never_come_back():
    """Worth is learned: documents that are read once are given up before a chat that goes on."""
    engine = Engine(pages=100, checkpoints=6)
    chat = tokens(30)
    engine.serve(chat)
    for n in range(40):
        engine.serve(tokens(15, 1000 + 50 * n))
        chat = [*chat, *tokens(4, 500 + 4 * n)] if n % 2 else chat
        got = engine.serve(chat)
        assert got.hit >= 28, n


def test_a_cancelled_prefill_leaves_no_checkpoint():
    """A checkpoint of tokens that were never committed must not be found, wherever the row is cancelled."""
    for at in range(1, 30):
        engine = Engine(interval=8)
        got = engine.admit(tokens(30))
        engine.plan({got.row: min(at, 8)})
        if at > 8:
            engine.plan({got.row: min(at, 16) - 8})
        if at > 16:
            engine.plan({got.row: at - 16})
        engine.release(got.row)
        engine.plan()
        assert (engine.kept(), engine.counts()) == ([], (8, 0, 0))
        assert engine.serve(tokens(30)).hit == 0


def test_an_admission_that_fails_leaves_no_checkpoint():
    """It takes no checkpoint, restores nothing and evicts nothing."""
    engine = Engine(pages=10, num_rows=3)
    engine.serve(tokens(10))
    row = engine.admit(tokens(26, 100)).row
    before = engine.seen()
    for prompt in ([*tokens(10), *tokens(20, 200)], tokens(30)):
        assert not engine.manager.can_admit(prompt)
        with pytest.raises(RuntimeError):
            engine.manager.admit(prompt)
    assert engine.seen() == before
    delta = engine.plan()
    assert (delta.resets.tolist(), delta.restores[0].size, delta.saves[0].size) == ([row], 0, 0)


def test_a_reservation_that_fails_leaves_saves_as_they_were():
    engine = Engine(pages=4)
    got = engine.admit(tokens(14))
    engine.step({got.row: 12})
    with pytest.raises(RuntimeError):
        engine.manager.reserve(got.row, 10)
    assert [it[:2] for it in saves(engine.plan())] == [(got.row, 12)]
    assert engine.manager.hit(tokens(14)) == 12


@pytest.mark.parametrize("n", [2, 3])
def test_identical_prompts_at_the_same_time(n: int):
    """All compute, all save; one checkpoint goes into the tree, the others come free."""
    engine = Engine(interval=8)
    rows = [engine.admit(tokens(22)) for _ in range(n)]
    assert {got.cuts for got in rows} == {(8, 16, 20)}
    for count in (8, 8, 4, 2):
        engine.plan({got.row: count for got in rows})
        for got in rows:
            engine.commit(got.row)
    engine.plan()
    assert engine.kept() == [8, 16, 20]
    assert engine.counts() == (5, 3, 0)
    for got in rows:
        engine.release(got.row)
    engine.plan()
    assert engine.counts() == (5, 3, 0)
    assert engine.serve(tokens(22)).hit == 20
    pages = engine.manager.stats().groups[0]
    assert pages.free + pages.evictable == pages.total


def test_identical_prompts_of_which_one_is_cancelled():
    engine = Engine()
    a, b = engine.admit(tokens(10)), engine.admit(tokens(10))
    engine.plan({a.row: 8, b.row: 8})
    engine.release(a.row)
    engine.commit(b.row)
    engine.plan()
    assert (engine.kept(), engine.counts()) == ([8], (7, 1, 0))


def test_a_checkpoint_is_not_saved_over_while_it_is_restored():
    """The only checkpoint is given up in the step that resumes from it: the save is one delta later."""
    engine = Engine(checkpoints=1)
    engine.serve(tokens(10))
    other = engine.admit(tokens(10, 50))
    engine.plan({other.row: 7})
    got = engine.admit(tokens(10))
    assert got.hit == 8
    engine.plan({other.row: 1, got.row: 2})
    assert engine.follower.states[got.row] == tuple(range(10))
    assert [it[:2] for it in saves(engine.plan())] == [(other.row, 8)]
    engine.commit(other.row)
    assert engine.kept() == [8]
    assert engine.manager.hit(tokens(10)) == 0


def test_the_evictions_of_a_long_run_are_never_stale():
    """Random requests with few checkpoints: what is restored is always the prefix, and nothing is lost."""
    engine = Engine(pages=60, checkpoints=4, interval=8)
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        prompt = [
            *tokens(int(random.integers(4, 40)), 100 * int(random.integers(3))),
            *random.integers(0, 2, 3),
        ]
        hits += engine.serve([int(token) for token in prompt], tokens(int(random.integers(0, 9)), 900)).hit
    assert hits > 0
    assert engine.counts()[2] == 0
    assert engine.manager.stats().checkpoints.evicted > 100


@pytest.mark.parametrize("checkpoints", [2, 5, 20])
def test_a_prompt_that_is_asked_again_and_again_hits(checkpoints: int):
    """Identical prompts that never hit: each answer takes the checkpoint of its own prompt, and is too long
    for the prompt to resume from."""
    engine = Engine(pages=400, checkpoints=checkpoints)
    for begin in range(1, checkpoints + 1):
        engine.serve(tokens(10, 1000 * begin), tokens(9, 1000 * begin + 10))
    hits = [engine.serve(tokens(22), tokens(15, 22)).hit for _ in range(5)]
    assert hits[2:] == [20, 20, 20]  # the second request shows that it is shared
