"""A real DeepSeek-V4, tiny and random, over our pools: what it says is what it says over its own cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4", reason="needs a transformers with DeepSeek-V4")

from transformers import DynamicCache

from differential.hybrid_model import BLOCK, Served, cache_config, model_of
from differential.tiny_models import VOCABULARY
from pagoda.compat import AttentionType, DSV4Config

MAX_TOKENS = 96


class Judge:
    """Text, and what plain transformers says after each of its tokens."""

    def __init__(self, device: str, topk: int = 4) -> None:
        self.device = device
        self.plain = model_of(device, topk)

    def text(self, length: int, seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (1, length), generator=random)

    @torch.no_grad()
    def says(self, text: torch.Tensor, chunks: Sequence[int] | None = None) -> torch.Tensor:
        """Logits, [tokens, vocabulary], over the model's own cache."""
        cache, at, found = DynamicCache(config=self.plain.config), 0, []
        for size in chunks or [text.shape[1]]:
            part = text[:, at : at + size].to(self.device)
            positions = torch.arange(at, at + size, device=self.device)[None]
            said: Any = self.plain(
                input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True
            )
            found.append(said.logits[0])
            at += size
        return torch.cat(found)

    def serve(self, config: DSV4Config, num_rows: int = 4, topk: int | None = None) -> Served:
        model = model_of(self.device, self.plain.config.index_topk if topk is None else topk)
        return Served(model, config, num_rows, MAX_TOKENS, self.device)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def judge(request: pytest.FixtureRequest) -> Judge:
    # One model for all tests of a device: TF32 is off by default, so that float32 is float32.
    return Judge(request.param)


def run(served: Served, row: int, text: torch.Tensor, chunks: Sequence[int], start: int = 0) -> torch.Tensor:
    found = []
    for size in chunks:
        found.append(served.step([row], text[:, start : start + size], [start])[0])
        start += size
    return torch.cat(found)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


CHUNKS = {
    "at once": [60],
    "token by token": [1] * 40,
    "by blocks": [BLOCK] * 3,
    "one short of blocks": [15, 16, 16, 1, 1, 1],
    "shorter and longer than a window": [5, 11, 1, 7, 13, 2, 1, 1, 20],
    "a chunk that ends an entry of each kind, then one token": [8, 1, 7, 1, 15, 1],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_any_chunks_say_what_the_models_own_cache_says(judge: Judge, chunks: list[int]):
    text = judge.text(sum(chunks), 0)
    served = judge.serve(cache_config())
    expected = judge.says(text, chunks)
    same(judge.says(text), expected)  # the judge agrees with itself
    same(run(served, served.admit(), text, chunks), expected)
    served.manager.check()


@pytest.mark.parametrize("ratio", [AttentionType.SWA, AttentionType.CSA, AttentionType.HCA], ids=str)
def test_every_kind_of_layer_counts(judge: Judge, ratio: AttentionType):
    """The test above would notice: a layer whose memory is wiped says something else."""
    text = judge.text(40, 0)
    served = judge.serve(cache_config())
    row = served.admit()
    run(served, row, text, [30])
    for spec in served.manager.schedule:
        paged, state = served.manager.paged_pools[spec.layer_idx], served.manager.state_pools[spec.layer_idx]
        if spec.attn_type is ratio:
            if paged is None:
                state.reset_slot(row)
            else:
                paged.entries.zero_()
    difference = (run(served, row, text, [10], 30) - judge.says(text)[30:]).abs().max()
    assert difference > 1e-3


def test_requests_of_any_lengths_run_side_by_side_and_rows_are_used_again(judge: Judge):
    """Three requests of different lengths decode together, one ends, another takes its row and its blocks."""
    served = judge.serve(cache_config(), num_rows=3)
    texts = {seed: judge.text(70, seed) for seed in range(5)}
    expected = {seed: judge.says(text) for seed, text in texts.items()}
    rows: dict[int, int] = {}
    lengths: dict[int, int] = {}

    def begin(seed: int, length: int) -> None:
        rows[seed], lengths[seed] = served.admit(), length
        same(run(served, rows[seed], texts[seed], [length]), expected[seed][:length])

    for seed, length in enumerate((3, 17, 31)):
        begin(seed, length)
    waiting = [3, 4]
    for turn in range(30):
        seeds = sorted(rows, key=lambda seed: (seed * 7 + turn) % 5)  # in another order each time
        at = [lengths[seed] for seed in seeds]
        new = torch.cat([texts[seed][:, start : start + 1] for seed, start in zip(seeds, at, strict=True)])
        found = served.step([rows[seed] for seed in seeds], new, at)
        for seed, start, logits in zip(seeds, at, found, strict=True):
            same(logits[0], expected[seed][start])
            lengths[seed] = start + 1
        if turn % 10 == 9 and waiting:
            ended = seeds[0]
            served.release(rows.pop(ended))
            begin(waiting.pop(), 20 + turn % 3)
    served.manager.check()
    for row in rows.values():
        served.release(row)
    assert all(
        free is None or free.num_free == free.num_total_blocks for free in served.manager.allocators.values()
    )


@pytest.mark.parametrize("unaccepted", [2, 4, 9])
def test_tokens_that_are_not_accepted_leave_no_trace(judge: Judge, unaccepted: int):
    """Each step guesses, some guesses are wrong, and the next step begins behind those that were right."""
    text = judge.text(60, 3)
    expected = judge.says(text)
    served = judge.serve(cache_config(unaccepted=unaccepted))
    row, length, turn = served.admit(), 21, 0
    same(run(served, row, text, [21]), expected[:21])
    while length + unaccepted <= 60:
        num_right = 1 + turn * 5 % unaccepted
        guess = text[:, length : length + unaccepted].clone()
        guess[:, num_right:] = (guess[:, num_right:] + 1 - 3) % (VOCABULARY - 3) + 3
        found = served.step([row], guess, [length])[0]
        same(found[:num_right], expected[length : length + num_right])
        length, turn = length + num_right, turn + 1
    assert turn > 4


def test_a_ring_as_small_as_the_window_loses_what_is_not_accepted(judge: Judge):
    """So that the test before could fail: the same with rows for one token only."""
    text = judge.text(60, 3)
    expected = judge.says(text)
    small = judge.serve(cache_config(unaccepted=1))
    row = small.admit()
    run(small, row, text, [23])
    guess = text[:, 23:32].clone()
    guess[:, 1:] = 5
    small.step([row], guess, [23])
    found = run(small, row, text, [1] * 8, 24)
    assert (found - expected[24:32]).abs().max() > 1e-3


@pytest.mark.parametrize("at_a_block", [True, False])
def test_a_request_goes_on_from_a_snapshot(judge: Judge, at_a_block: bool):
    """Preempted anywhere, or resumed at the end of a block from the few rows that it needs."""
    text, other = judge.text(70, 4), judge.text(60, 5)
    expected = judge.says(text)
    length = 2 * BLOCK if at_a_block else 2 * BLOCK + 5
    served = judge.serve(cache_config(), num_rows=2)
    manager, row = served.manager, served.admit()
    run(served, row, text, [length])
    states, pages = {}, {}
    for layer, pool in manager.state_pools.items():
        states[layer] = pool.snapshot(row, length if at_a_block else None)
        table, paged = manager.block_tables[layer], manager.paged_pools[layer]
        if table is not None and paged is not None:
            blocks = table[row][table[row] > 0].long()
            pages[layer] = paged.entries[blocks].clone(), None if paged.index is None else paged.index[blocks]
    served.release(row)
    # Somebody else has the row and the blocks meanwhile.
    again = served.admit()
    assert again == row
    same(run(served, again, other, [60]), judge.says(other))
    row = served.admit()
    served.allocate(row, length)
    for layer, pool in manager.state_pools.items():
        pool.restore(row, states[layer])
        table, paged = manager.block_tables[layer], manager.paged_pools[layer]
        if table is not None and paged is not None:
            blocks = table[row][table[row] > 0].long()
            entries, index = pages[layer]
            paged.entries[blocks] = entries
            if paged.index is not None and index is not None:
                paged.index[blocks] = index
    same(run(served, row, text, [1, 1, 1, 9, 1, 20], length), expected[length : length + 33])
    served.manager.check()


def test_a_resume_without_the_window_says_something_else(judge: Judge):
    """The public design left the ring outside of its prefix cache."""
    text = judge.text(50, 4)
    served = judge.serve(cache_config(), num_rows=2)
    row = served.admit()
    run(served, row, text, [2 * BLOCK])
    for pool in served.manager.state_pools.values():
        pool.reset_slot(row)
    found = run(served, row, text, [10], 2 * BLOCK)
    assert (found - judge.says(text)[2 * BLOCK : 2 * BLOCK + 10]).abs().max() > 1e-3


def test_in_fp8_it_says_the_same_to_the_rounding_whatever_the_chunks():
    """All entries are chosen here: which are the best of many changes with any rounding."""
    judge = Judge("cpu", topk=64)
    text = judge.text(60, 6)
    expected = judge.says(text)
    found = []
    for chunks in CHUNKS.values():
        served = judge.serve(cache_config(is_quantised=True))
        length = min(sum(chunks), 60)
        found.append(run(served, served.admit(), text[:, :length], chunks)[:33])
    # fp8 has three digits behind the first: numbers are off by 2^-4 of themselves at most.
    size, error = (x.square().mean().sqrt() for x in (expected[:33], found[0] - expected[:33]))
    assert 1e-4 < error / size < 2**-4
    # Chunks add nothing to that, but where the rounding of float32 decides between two neighbours.
    for other in found[1:]:
        assert (other - found[0]).square().mean().sqrt() < error / 20


def test_configs_of_transformers_are_read(judge: Judge):
    """The schedule, the ratios and all dimensions, from the model itself."""
    read = DSV4Config.from_hf(judge.plain.config, block_tokens=BLOCK)
    mine = cache_config(is_quantised=True)
    assert replace(read, entry=mine.entry, index=mine.index) == replace(mine, index_topk=read.index_topk)
