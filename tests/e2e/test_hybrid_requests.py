"""Two hybrids of transformers, tiny and random, through `Manager` and `Pools`: whatever was resumed, evicted,
forked or run side by side, each answers as it does alone and without a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from differential.judge import sharp_model
from differential.tiny_models import VOCABULARY
from e2e.hybrid_driver import Engine, Request
from e2e.qwen3_next import Qwen3Next
from pagoda import Delta
from unit.deltas import delta_of


class Judge:
    """A model over pools, and the same model of plain transformers. `page` is the number of tokens from one
    length at which requests can resume to the next; logits may differ by `tolerance`."""

    def __init__(self, model: Any, plain: Any, tolerance: float) -> None:
        self.model, self.plain, self.tolerance = model, plain, tolerance
        self.page: int = model.layout.resume_step
        self.unneeded: list[str] = []  # EDITS that change nothing
        self._said: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def engine(self, num_pages: int = 60, num_checkpoints: int = 30, **options: Any) -> Engine:
        """An engine with so many pages of each group; interval checkpoints are two pages apart."""
        capacity = {group.name: num_pages for group in self.model.layout.paged_groups}
        capacity["checkpoint"] = num_checkpoints
        options = {"checkpoint_interval": 2 * self.page, "max_tokens": 12 * self.page, **options}
        return Engine(self.model, capacity, **options)

    def text(self, num_pages: int, more: int, seed: int) -> list[int]:
        """Random tokens, so many pages and some more; those of one seed begin alike."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (num_pages * self.page + more,), generator=random).tolist()

    def last_resume(self, prompt: Sequence[int]) -> int:
        """The longest hit that a prompt can have."""
        return (len(prompt) - 1) // self.page * self.page

    def error(self, requests: Sequence[Request]) -> float:
        """The largest difference between logits of requests and of plain transformers; 1 for other tokens."""
        worst = 0.0
        for request in requests:
            assert request.is_done
            assert len(request.logits) == len(request.answer)
            text, logits = self._says(request.prompt, len(request.answer))
            if request.text != text:
                return 1.0
            worst = max(worst, float((torch.stack(request.logits) - logits).abs().max()))
        return worst

    def require_same(self, requests: Sequence[Request]) -> None:
        assert self.error(requests) < self.tolerance

    def _says(self, prompt: Sequence[int], num_new: int) -> tuple[list[int], torch.Tensor]:
        key = *prompt, -num_new
        if key not in self._said:
            said = self.plain.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),  # without it, token 0 is taken for padding
                max_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,  # no token ends an answer
                use_cache=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            self._said[key] = said.sequences[0].tolist(), torch.cat(said.logits)
        return self._said[key]


def qwen3_next() -> Judge:
    # Weights are scaled up, so that answers depend on all of a prompt. So is rounding: two ways to split a
    # prompt differ by up to 6e-4 without a cache of ours.
    return Judge(Qwen3Next(sharp_model("qwen3_next"), 8), sharp_model("qwen3_next"), 2e-3)


def deepseek_v4() -> Judge:
    pytest.importorskip("transformers.models.deepseek_v4", reason="needs a transformers with DeepSeek-V4")
    from differential.hybrid_model import cache_config, model_of
    from e2e.deepseek_v4 import DeepseekV4

    # A layer of each kind: window alone, HCA, CSA.
    model, plain = (model_of("cpu", 4, num_layers=3) for _ in range(2))
    config = cache_config()
    judge = Judge(DeepseekV4(model, config.layout(config.schedule()[:3])), plain, 1e-5)
    # A new request reads nothing of its row's state that it has not written: all is found by position.
    judge.unneeded = ["no resets"]
    return judge


@pytest.fixture(scope="module", params=[qwen3_next, deepseek_v4], ids=lambda make: make.__name__)
def judge(request: pytest.FixtureRequest) -> Judge:
    made: Judge = request.param()
    return made


def test_requests_resume_at_every_length(judge: Judge):
    """At the last resume point, at interval points, and at the branch points that siblings discover."""
    engine, page, prompt = judge.engine(), judge.page, judge.text(5, 3, seed=0)
    (first,) = requests = engine.generate([prompt], 3)
    assert first.hits == [0]
    assert first.cuts == (2 * page, 4 * page, 5 * page)
    hits = {}
    for pages in (1, 2, 3, 4):
        siblings = [
            [*prompt[: pages * page + 1], *judge.text(1, 2, seed)] for seed in (2 * pages, 2 * pages + 1)
        ]
        for sibling in siblings:
            requests += engine.generate([sibling], 3)
        hits[pages] = [request.hits[0] // page for request in requests[-2:]]
    assert hits == {1: [0, 1], 2: [2, 2], 3: [2, 3], 4: [4, 4]}
    requests += engine.generate([prompt], 3)
    assert requests[-1].hits == [5 * page]
    judge.require_same(requests)
    assert len({tuple(request.answer) for request in requests}) == len(requests) - 1  # the repeat alone


@pytest.mark.parametrize("delay", [0, 2])
def test_the_next_turn_of_a_chat_resumes_behind_the_answer(judge: Judge, delay: int):
    engine = judge.engine(delay=delay)
    turns = engine.generate([judge.text(2, -3, seed=0)], 6)
    for seed, length, num_new in ((1, 4, 2), (2, judge.page - 4, 7), (3, 5, 2)):
        before = turns[-1].text
        turns += engine.generate([[*before, *judge.text(0, length, seed)]], num_new)
        # The last token of an answer is not computed.
        assert turns[-1].hits == [judge.last_resume(before)]
    assert turns[1].hits[0] > judge.last_resume(turns[0].prompt)
    judge.require_same(turns)


@pytest.mark.parametrize(
    ("chunks", "delay"),
    [((1,), 0), ((7, 13, 2, 30, 1), 0), ((7, 13, 2, 30, 1), 2)],
    ids=["token by token", "uneven", "uneven, late commits"],
)
def test_any_chunks_that_end_at_cuts_give_the_same_hits(judge: Judge, chunks: tuple[int, ...], delay: int):
    engine, page = judge.engine(chunks=chunks, delay=delay), judge.page
    prompt, other = judge.text(2, 2, seed=0), judge.text(1, 1, seed=1)
    branch = [*prompt[: page + 2], *other]
    requests = [engine.generate([text], 2)[0] for text in (prompt, other, prompt, branch, branch)]
    assert [request.hits[0] // page for request in requests] == [0, 0, 2, 0, 2]
    judge.require_same(requests)


@pytest.mark.parametrize(("pages", "more", "hit"), [(2, 0, 4), (4, 0, 4), (1, 1, 0), (5, 0, 5)])
def test_chunks_that_miss_cuts_resume_before_them(judge: Judge, pages: int, more: int, hit: int):
    """Of cuts after 2, 4 and 5 pages, only those where a chunk ends are saved."""
    engine = judge.engine(chunks=(pages * judge.page + more,), keeps_cuts=False, delay=hit % 4)
    prompt = judge.text(5, 3, seed=0)
    requests = engine.generate([prompt], 2)
    assert requests[0].cuts == tuple(n * judge.page for n in (2, 4, 5))
    requests += engine.generate([prompt], 2)
    assert requests[1].hits == [hit * judge.page]
    judge.require_same(requests)


def family(judge: Judge) -> list[list[int]]:
    """Prompts of which some share one page, others two, and one nothing. Some end shortly before a page."""
    page, root = judge.page, judge.text(2, 0, seed=0)
    return [
        [*root, *judge.text(2, -3, seed=1)],
        [*root[: page + 3], *judge.text(1, 0, seed=2)],
        judge.text(2, -2, seed=3),
        [*root, *judge.text(0, 3, seed=4)],
        [*root, *judge.text(1, -1, seed=5)],
        [*root[: page + 3], *judge.text(1, 2, seed=6)],
    ]


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("keeps_cuts", [True, False], ids=["cuts", "no cuts"])
def test_requests_run_side_by_side(judge: Judge, keeps_cuts: bool, delay: int):
    chunks = judge.page, 3, 2 * judge.page - 3
    engine = judge.engine(num_rows=3, chunks=chunks, keeps_cuts=keeps_cuts, delay=delay)
    prompts = family(judge)
    requests = engine.generate(prompts, 5)
    again = engine.generate(prompts[::-1], 5)[::-1]
    if keeps_cuts:
        assert [request.hits for request in again] == [[judge.last_resume(prompt)] for prompt in prompts]
    assert any(request.hits[0] for request in again)
    judge.require_same([*requests, *again])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_request_waits_for_what_another_computes(judge: Judge, delay: int):
    engine, prompt = judge.engine(waits=True, delay=delay), judge.text(4, 3, seed=0)
    branch = [*prompt[: 3 * judge.page + 1], *judge.text(0, 3, seed=1)]
    requests = engine.generate([prompt, prompt, branch], 3)
    assert [request.hits for request in requests] == [[0], [4 * judge.page], [2 * judge.page]]
    judge.require_same(requests)


@pytest.mark.parametrize(("num_checkpoints", "delay"), [(0, 0), (1, 0), (3, 0), (3, 2)])
def test_checkpoints_are_evicted(judge: Judge, num_checkpoints: int, delay: int):
    engine = judge.engine(num_checkpoints=num_checkpoints, num_rows=2, delay=delay)
    requests = []
    for prompt in family(judge):
        requests += engine.generate([prompt, prompt[::-1]], 2)
        requests += engine.generate([prompt], 2)
    stats = engine.manager.stats()
    assert stats.checkpoints is not None
    assert (stats.checkpoints.evicted > 0) == (stats.hit_tokens > 0) == (num_checkpoints > 0)
    assert stats.evicted_pages == 0
    judge.require_same(requests)


@pytest.mark.parametrize("delay", [0, 2])
def test_pages_are_evicted_and_requests_preempted(judge: Judge, delay: int):
    """Four rows fill all pages with their prompts, and each needs one more for its answer."""
    engine = judge.engine(num_pages=8, delay=delay)
    root = judge.text(1, 0, seed=0)
    prompts = [judge.text(2, -2, seed) for seed in (1, 2, 3, 4)]
    prompts += [[*root, *judge.text(1, -2, seed)] for seed in (5, 6, 7)]
    requests = engine.generate(prompts, 5)
    assert engine.num_preempted > 0
    assert engine.manager.stats().evicted_pages > 0
    for prompt in (prompts[0], prompts[-1], prompts[-1]):
        requests += engine.generate([prompt], 3)
    assert requests[-1].hits == [judge.page]
    judge.require_same(requests)


@pytest.mark.parametrize("delay", [0, 2])
def test_forks_continue_with_the_state_of_their_parent(judge: Judge, delay: int):
    """From the middle of a page, of which each gets a copy: in the parent's prompt, and in its answer."""
    engine, page = judge.engine(num_rows=6, delay=delay, chunks=(11, 6, 20)), judge.page
    parent = Request(judge.text(3, -2, seed=0), 6)
    engine.waiting.append(parent)
    engine.step()
    forks = engine.fork(parent, [judge.text(0, 4, seed=1), judge.text(1, 2, seed=2)], 3)
    while len(parent.answer) < 2:
        engine.step()
    forks += engine.fork(parent, [judge.text(0, 1, seed=3), judge.text(0, 2, seed=4)], 5)
    assert [len(fork.prompt) for fork in forks[2:]] == [3 * page, 3 * page + 1]
    engine.run()
    judge.require_same([parent, *forks])
    turns = engine.generate([[*fork.text, 5, 6] for fork in forks[2:]], 2)
    # The second fork ran past the end of the page in one step.
    assert [turn.hits for turn in turns] == [[3 * page], [2 * page]]
    judge.require_same(turns)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_cancelled_request_leaves_nothing_wrong(judge: Judge, delay: int):
    """It ends while the step that reached a cut is in flight, and the one that runs past it."""
    engine, prompt = judge.engine(delay=delay), judge.text(4, 3, seed=0)
    done = []
    for num_steps in (1, 2, 3):
        request = Request(list(prompt), 5)
        engine.waiting.append(request)
        for _ in range(num_steps):
            engine.step()
        engine.cancel(request)
        done += engine.generate([judge.text(1, num_steps, seed=1)], 2)
        done += engine.generate([[*prompt, num_steps]], 2)
    stats = engine.manager.stats()
    assert stats.checkpoints is not None
    assert stats.checkpoints.running == 0
    judge.require_same(done)
    assert done[-1].hits == [judge.last_resume(prompt)]


# --- the tests above would notice


def edited(delta: Delta, **changes: Any) -> Delta:
    """The same delta with other sections."""
    names = "rows", "lengths", "counts", "places", "page_ids", "resets"
    sections: dict[str, Any] = {name: getattr(delta, name).tolist() for name in names}
    for name in ("saves", "restores", "state_copies"):
        sections[name] = [part.tolist() for part in getattr(delta, name)]
    sections["copies"] = [(sources.tolist(), targets.tolist()) for sources, targets in delta.copies]
    return delta_of(delta.step, num_groups=delta.num_groups, **{**sections, **changes})


def late_saves() -> Callable[[Delta], Delta]:
    """Each save is carried out one step too late."""
    kept: list[Any] = [([], [], [])]

    def edit(delta: Delta) -> Delta:
        kept.append([part.tolist() for part in delta.saves])
        return edited(delta, saves=kept.pop(0))

    return edit


EDITS: dict[str, Callable[[], Callable[[Delta], Delta]]] = {
    "nothing": lambda: edited,
    "no saves": lambda: lambda delta: edited(delta, saves=[[], [], []]),
    "late saves": late_saves,
    "no restores": lambda: lambda delta: edited(delta, restores=[[], [], []]),
    "no resets": lambda: lambda delta: edited(delta, resets=[]),
    "no state copies": lambda: lambda delta: edited(delta, state_copies=[[], []]),
    "no page copies": lambda: lambda delta: edited(delta, copies=[([], []) for _ in delta.copies]),
    "no table writes": lambda: lambda delta: edited(delta, places=[], page_ids=[]),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_delta_that_is_not_carried_out_is_noticed(judge: Judge, name: str):
    engine = judge.engine(edit=EDITS[name]())
    prompt = judge.text(2, 3, seed=0)
    requests = engine.generate([prompt], 4)
    requests += engine.generate([judge.text(1, 3, seed=1)], 3)
    requests += engine.generate([prompt], 3)
    assert requests[-1].hits == [2 * judge.page]
    parent = Request(judge.text(1, 9, seed=2), 4)
    engine.waiting.append(parent)
    while not parent.answer:
        engine.step()
    requests += [parent, *engine.fork(parent, [judge.text(0, 2, seed=3)], 3)]
    engine.run()
    error = judge.error(requests)
    if name == "nothing" or name in judge.unneeded:
        assert error < judge.tolerance
    else:
        assert error > 10 * judge.tolerance
