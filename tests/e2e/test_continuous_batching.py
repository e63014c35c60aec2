"""The worked example of examples/ says what its model says without a cache, and stays short."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda import CapacityError

PATH = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
SYSTEM = [7 * i % 64 for i in range(40)]
PROMPTS = [[*SYSTEM, i, i + 1, i + 2] for i in range(10)] + [[5, 6, 7], SYSTEM[:20], [1, *SYSTEM, *SYSTEM]]
NEW = 24


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alone(example: Any, prompt: list[int], num_new: int) -> list[int]:
    """A prompt and its continuation: every token is computed anew, with torch's attention and no cache."""
    text = list(prompt)
    for _ in range(num_new):
        positions = torch.arange(len(text))
        x = example.embed[text] + torch.sin(positions[:, None] / torch.arange(1, example.embed.shape[1] + 1))
        for query, key, value, output in example.weights:
            heads = [
                (x @ w).view(-1, example.HEADS, example.DIM).transpose(0, 1) for w in (query, key, value)
            ]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + out.transpose(0, 1).flatten(1) @ output
        text.append(int((x[-1] @ example.unembed.T).argmax()))
    return text


@pytest.fixture(scope="module")
def answers(example: Any) -> list[list[int]]:
    return [alone(example, prompt, NEW) for prompt in PROMPTS]


def test_answers_are_varied(answers: list[list[int]]):
    """Else a cache that mixes requests up could pass unseen."""
    assert len({tuple(text[-NEW:]) for text in answers}) == len(answers)
    assert all(len(set(text[-NEW:])) >= 4 for text in answers)


def test_answers_are_those_without_a_cache_and_prefixes_are_hit(example: Any, answers: list[list[int]]):
    manager, pools = example.memory(num_pages=40)
    assert example.generate(PROMPTS, NEW, manager, pools) == answers
    hits = manager.stats().hit_tokens
    assert hits >= 9 * 32
    assert example.generate(PROMPTS, NEW, manager, pools) == answers  # the loop can be entered again
    assert manager.stats().hit_tokens > hits
    assert manager.stats().rows == 0
    manager.check()


@pytest.mark.parametrize("num_pages", [7, 8, 10])
def test_rows_are_preempted_where_memory_is_short(example: Any, answers: list[list[int]], num_pages: int):
    """The longest request takes 7 pages: rows beside it are preempted, and answer the same."""
    manager, pools = example.memory(num_pages)
    release, released = manager.release, []
    manager.release = lambda row: (released.append(row), release(row))[1]  # type: ignore[method-assign]
    assert example.generate(PROMPTS, NEW, manager, pools) == answers
    assert len(released) > len(PROMPTS)  # each once at its end, and others before it
    manager.check()


def test_a_request_that_never_fits_raises(example: Any):
    manager, pools = example.memory(num_pages=2)
    with pytest.raises(CapacityError):
        example.generate([SYSTEM], 8, manager, pools)


def test_the_example_is_short():
    assert len(PATH.read_text().splitlines()) <= 80
