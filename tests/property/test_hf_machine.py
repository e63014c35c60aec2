"""The drop-in under anything that callers do, and its memory under interrupts at any line.

The machine asks, in batches and names, interrupts, clears and changes weights; every answer is that of plain
`generate`. The memory is interrupted in the middle of what it does; what it finds later is right.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

pytest.importorskip(
    "transformers", reason="needs transformers: plain generate is what answers are compared with"
)

from transformers import StoppingCriteria, StoppingCriteriaList

import pagoda
from differential.judge import LOGITS, assert_same, batch, prompt, sharp_model
from pagoda import FullAttention, LatentAttention, Layout, WindowAttention
from pagoda.hf import _cache as cache_module
from pagoda.hf import _memory as memory_module
from pagoda.hf import _recording as recording_module
from pagoda.hf._families import served_layout
from pagoda.hf._memory import Memory
from pagoda.layout import latent
from profiles import examples

# A failure is not made smaller: steps run models, and that would take minutes.
RUNS = settings(max_examples=examples(12), stateful_step_count=20, phases=[Phase.generate])


# ── the drop-in ─────────────────────────────────────────────────────────────────────────────────────

# Two trunks, and where prompts part from them: at pages, beside them, and not at all.
PROMPTS = [prompt(length) for length in (5, 16, 33, 48, 70)]
PROMPTS += [prompt(length, (9, 1)) for length in (20, 32, 47)] + [prompt((length, 2)) for length in (17, 50)]
NEW = 3  # tokens of an answer
ASKED = {**LOGITS, "max_new_tokens": NEW}

prompts = st.integers(0, len(PROMPTS) - 1)
names = st.sampled_from(["", "", "a", "b"])


class Enough(Exception):
    """What interrupts."""


class Stop(StoppingCriteria):
    """Raises after so many tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise Enough
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Machine(RuleBasedStateMachine):
    """One model with a small memory."""

    case = ""
    plain_answers: Any = None  # of a class: answers are the same in every run

    @initialize(pages=st.sampled_from([4, 8, 20]))
    def build(self, pages: int) -> None:
        self.model = sharp_model(self.case, num_layers=2)
        layout = served_layout(self.model)
        assert not isinstance(layout, str)
        self.cache = pagoda.hf.enable(self.model, layout.memory_for(1, 16 * pages, chunk=16))
        self.sign, self.latest = 1, (4, "")
        self.calls = self.asked = self.hits = 0
        self.known: set[tuple[int, str, tuple[int, ...]]] = set()  # pages that were ever computed

    def plain(self, rows: tuple[int, ...]) -> Any:
        key = (self.sign, rows)
        if key not in self.plain_answers:
            inputs = batch([PROMPTS[row] for row in rows])
            self.plain_answers[key] = type(self.model).generate(self.model, **inputs, **ASKED)
        return self.plain_answers[key]

    def generate(self, rows: list[int], name: str, **more: Any) -> Any:
        inputs = batch([PROMPTS[row] for row in rows])
        self.latest = (rows[0], name)
        try:
            return self.model.generate(**inputs, **ASKED, namespace=name, **more)
        finally:
            call = self.cache.last()
            assert call.reason is None
            tokens = [tuple(PROMPTS[row][0].tolist()) for row in rows]
            assert call.prompt_tokens == sum(map(len, tokens))
            # No more can be hit than these weights have computed under this name.
            ever = 0
            for row in tokens:
                whole = range(16, len(row), 16)
                ever += max((end for end in whole if (self.sign, name, row[:end]) in self.known), default=0)
            assert call.hit_tokens <= ever
            self.calls, self.asked = self.calls + 1, self.asked + call.prompt_tokens
            self.hits += call.hit_tokens
            self.known |= {
                (self.sign, name, row[:end]) for row in tokens for end in range(16, len(row) + 1, 16)
            }

    @rule(row=prompts, name=names)
    def ask(self, row: int, name: str) -> None:
        assert_same(self.generate([row], name), self.plain((row,)))

    @rule(row=prompts, name=names)
    def ask_twice(self, row: int, name: str) -> None:
        for _ in range(2):
            assert_same(self.generate([row], name), self.plain((row,)))
        # What has just been kept is there, as far as there is room for it.
        room = self.cache._memory.max_tokens // 16 * 16
        assert self.cache.last().hit_tokens == min((PROMPTS[row].shape[1] - 1) // 16 * 16, room)

    @rule(rows=st.lists(prompts, min_size=2, max_size=3), name=names)
    def ask_together(self, rows: list[int], name: str) -> None:
        assert_same(self.generate(rows, name), self.plain(tuple(rows)))

    @rule(rows=st.lists(prompts, min_size=1, max_size=2), name=names, after=st.integers(0, NEW - 1))
    def interrupt(self, rows: list[int], name: str, after: int) -> None:
        with pytest.raises(Enough):
            self.generate(rows, name, stopping_criteria=StoppingCriteriaList([Stop(after)]))

    @rule(what=st.sampled_from(["clear", "change_weights", "ask_otherwise"]))
    def disturb(self, what: str) -> None:
        """One rule, so that there are more of the others."""
        getattr(self, what)()

    def clear(self) -> None:
        self.cache.clear()
        self.known.clear()
        assert self.cache.stats().cached_tokens == 0

    def change_weights(self) -> None:
        """There and back again: what was computed before is not found, for it might differ."""
        with torch.no_grad():
            self.model.model.layers[0].mlp.down_proj.weight.neg_()
        self.sign = -self.sign
        self.known.clear()
        self.ask(*self.latest)

    def ask_otherwise(self) -> None:
        self.model.generate(PROMPTS[0], use_cache=False, max_new_tokens=1, do_sample=False)
        assert self.cache.last().reason == "use_cache is off"
        self.calls += 1

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats = self.cache.stats()
        assert stats.calls == stats.served + sum(stats.refused.values()) == self.calls
        assert (stats.prompt_tokens, stats.hit_tokens) == (self.asked, self.hits)
        assert stats.cached_tokens <= stats.stored_tokens
        assert stats.pool_bytes <= stats.memory_bytes
        held = self.cache._memory.manager.stats()
        assert held.rows == 0
        for group in held.groups:
            assert group.running == group.leased == group.waiting == 0
            assert group.free + group.evictable == group.total


class LlamaMachine(Machine):
    case = "llama"
    plain_answers: Any = {}  # noqa: RUF012


class GemmaMachine(Machine):
    case = "gemma3_text"
    plain_answers: Any = {}  # noqa: RUF012


TestLlama = LlamaMachine.TestCase
TestLlama.settings = RUNS
TestGemma = GemmaMachine.TestCase
TestGemma.settings = RUNS


# ── its memory ──────────────────────────────────────────────────────────────────────────────────────

FULL = FullAttention(kv_heads=1, k_dim=4, v_dim=4, dtype="float32")
WINDOW = WindowAttention(kv_heads=1, k_dim=4, v_dim=4, window=12, dtype="float32")
LATENT = LatentAttention(entry=latent(4, 4, "float32"))
LAYOUTS = {
    "full": Layout([FULL, FULL], 16),
    "windows": Layout([WINDOW, FULL], 16),
    "latent": Layout([LATENT], 16),
}


def contents(tokens: Any, layer: int) -> torch.Tensor:
    """[tokens, 4]: depends on all tokens so far, as keys do."""
    sums = np.cumsum(np.asarray(tokens, np.int64) * (np.arange(len(tokens)) + 1)) % 1009
    return torch.tensor(np.stack([sums, sums + layer, -sums, sums * 2], axis=1), dtype=torch.float32)


def keep(memory: Memory, tokens: Any, name: bytes) -> int:
    def columns(layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = contents(tokens, layer)[begin:end][None]
        return made, made + 0.5

    return memory.keep(np.asarray(tokens, np.int32), columns, name)


def find(memory: Memory, rows: list[Any], name: bytes) -> int:
    """How many columns are found; their contents must be those of the rows."""
    length = max(map(len, rows))
    pads = [length - len(row) for row in rows]
    found = memory.find([np.asarray(row, np.int32) for row in rows], pads, 1, name)
    if found is None:
        return 0
    for layer, (keys, values) in found.layers.items():
        window = getattr(memory.layout.layers[layer][0], "window", None)
        first = 0 if window is None else max(0, found.num_columns - window + 1)
        for number, (row, pad) in enumerate(zip(rows, pads, strict=True)):
            n = found.num_columns - max(first, pad)
            if n <= 0:
                continue
            known = contents(row, layer)[max(first, pad) - pad : found.num_columns - pad]
            end = found.num_columns - first
            assert torch.equal(keys[number, 0, end - n : end], known), (layer, number)
            assert torch.equal(values[number, 0, end - n : end], known + 0.5), (layer, number)
    return found.num_columns


def interrupt_at(line: int, act: Callable[[], Any], *modules: ModuleType) -> bool:
    """Runs `act` and raises KeyboardInterrupt before the nth line of these modules; whether there was one."""
    left, sources = [line], {module.__file__ for module in modules}

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in sources:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("verb", ["keep", "find"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_interrupted_at_any_line(kind: str, verb: str) -> None:
    layout = LAYOUTS[kind]
    memory = Memory(layout, layout.memory_for(3, 96, chunk=16), torch.device("cpu"))
    rng = np.random.default_rng(1)
    trunk = rng.integers(0, 60, 40)
    for line in itertools.count(1):
        # A row of its own each time, so that memory is short and pages are used again.
        mine = np.concatenate([trunk, rng.integers(0, 60, 40)])
        other = np.concatenate([trunk, rng.integers(0, 60, 25)])
        if verb == "find":
            keep(memory, mine, b"")
        act = functools.partial(keep, memory, mine, b"")
        if verb == "find":
            act = functools.partial(find, memory, [mine, other], b"")
        was_interrupted = interrupt_at(line, act, memory_module)
        memory.check()
        # Whole pages of the one, or two pages of the other behind its padding.
        assert find(memory, [mine, other], b"") in (0, 16, 32, 15 + 32)
        assert memory.manager.stats().rows == 0
        keep(memory, other, b"")
        assert find(memory, [other], b"") == 64
        keep(memory, mine, b"")
        assert find(memory, [mine], b"") == 64
        memory.check()
        stats = memory.manager.stats()
        assert all(group.free + group.evictable == group.total for group in stats.groups)
        if not was_interrupted:
            break
    assert line > 20  # or nothing was interrupted
    assert memory.manager.stats().evicted_pages > 0


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_a_call_interrupted_at_many_lines(case: str) -> None:
    """Wherever it was, also while layers write, and windows lose, what is kept later."""
    model = sharp_model(case, num_layers=2)
    asked = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    modules = (cache_module, memory_module, recording_module)
    rows = [prompt(30, (16, 1)), prompt(30, (40, 2))]  # a page and a half in common
    expected = [type(model).generate(model, row, **asked).tolist() for row in rows]
    layout = served_layout(model)
    assert not isinstance(layout, str)
    with pagoda.hf.cached(model, layout.memory_for(2, 96, chunk=16)) as cache:
        for line in itertools.count(1, 37):
            row = line % 2
            act = functools.partial(model.generate, rows[row], **asked)
            was_interrupted = interrupt_at(line, act, *modules)
            cache.check()
            for number in (1 - row, row):
                assert model.generate(rows[number], **asked).tolist() == expected[number]
                assert cache.last().reason is None
            assert cache._memory.manager.stats().rows == 0
            if not was_interrupted:
                break
            if line % 3 == 0:
                cache.clear()
        assert line > 200


def window(tokens: int) -> WindowAttention:
    return WindowAttention(kv_heads=1, k_dim=4, v_dim=4, window=tokens, dtype="float32")


# Windows shorter and longer than a page, at its edges, several of them, and alone.
SHAPES = [Layout([FULL, window(tokens)], 16) for tokens in (1, 2, 5, 15, 16, 17, 18, 31, 32, 33, 34, 50)] + [
    Layout([window(20)], 16),
    Layout([window(7), FULL, window(40)], 16),
    Layout([FULL, LATENT, window(33)], 16),
]


@given(data=st.data())
@settings(max_examples=examples(80))
def test_what_is_found_is_what_was_kept(data: st.DataObject) -> None:
    """Rows that part anywhere, in batches with any padding, in memory that is short."""
    layout = data.draw(st.sampled_from(SHAPES))
    requests, length = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([32, 64, 100]))
    memory = Memory(layout, layout.memory_for(requests, length, chunk=16), torch.device("cpu"))
    # All ones, and from somewhere on all twos: one row begins as another does.
    rows = st.tuples(st.integers(0, 90), st.integers(0, 70)).filter(sum)

    def row(parts: tuple[int, int]) -> list[int]:
        return [1] * parts[0] + [2] * parts[1]

    for _ in range(data.draw(st.integers(1, 10))):
        if data.draw(st.booleans()):
            parts = data.draw(rows)
            assert keep(memory, row(parts), b"") % 16 == 0
            # It is there now, as far as there was room.
            whole = min(sum(parts), memory.max_tokens) // 16 * 16
            assert find(memory, [[*row(parts), 3]], b"") == whole
        else:
            asked = [row(parts) for parts in data.draw(st.lists(rows, min_size=1, max_size=3))]
            assert find(memory, asked, b"") < max(map(len, asked))
        memory.check()
        assert memory._pools.step == memory.manager.step - 1  # every delta was applied
        assert memory.manager.stats().rows == 0
        assert memory.pool_bytes <= memory.memory_bytes
