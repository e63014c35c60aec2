"""The drop-in on a GPU: logits as near to plain ones as those of a prefill in two parts; streams in order."""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

import torch
from transformers import DynamicCache

import pagoda
from differential.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.gpu

FAMILIES = ["llama", "mistral, window", "gemma3_text", "gpt_oss", "deepseek_v3"]
CACHED = 64


def model_of(case: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return tiny_model(tiny_config(case, dtype)).eval().cuda()


def prompts(n: int, length: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    stem = torch.randint(3, 64, (1, CACHED), generator=source)
    return [
        torch.cat([stem, torch.randint(3, 64, (1, length), generator=source)], 1).cuda() for _ in range(n)
    ]


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )
    return output.logits[0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FAMILIES)
def test_logits_differ_no_more_than_those_of_a_prefill_in_two_parts(case: str, dtype: torch.dtype):
    model = model_of(case, dtype)
    asked = prompts(6, 21)
    whole = [logits(model, ids) for ids in asked]
    apart = []
    for ids in asked:
        past = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(ids[:, :CACHED], past_key_values=past, use_cache=True)
        apart.append(logits(model, ids, past_key_values=past))
    with pagoda.hf.cached(model, "8MiB") as cache:
        logits(model, asked[0])
        ours = []
        for ids in asked:
            ours.append(logits(model, ids))
            assert cache.last().hit_tokens >= CACHED
        cache.check()
    ours_off = max((a - b).abs().max() for a, b in zip(ours, whole, strict=True))
    apart_off = max((a - b).abs().max() for a, b in zip(apart, whole, strict=True))
    # A few bits of the last place: in float32 both are little else.
    few = 16 * torch.finfo(dtype).eps * max(a.abs().max() for a in whole)
    assert ours_off <= apart_off + (few if dtype == torch.float32 else 0)


@pytest.mark.parametrize("case", FAMILIES)
def test_batches_and_second_turns(case: str):
    """float32: tokens are equal."""
    model = model_of(case, torch.float32)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    asked = prompts(3, 9)
    batch = torch.zeros(3, CACHED + 9, dtype=torch.long, device="cuda")
    mask = torch.zeros_like(batch)
    for row, cut in enumerate((0, 5, 20)):
        batch[row, cut:], mask[row, cut:] = asked[row][0, cut:], 1
    plain = [model.generate(ids, attention_mask=torch.ones_like(ids), **settings) for ids in asked]
    plain_batch = model.generate(batch, attention_mask=mask, **settings)
    with pagoda.hf.cached(model, "8MiB") as cache:
        for ids, right in zip(asked, plain, strict=True):
            assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), right)
        for _ in range(2):
            assert torch.equal(model.generate(batch, attention_mask=mask, **settings), plain_batch)
        assert cache.last().hit_tokens > CACHED
        cache.check()


def test_streams_do_not_overtake_each_other():
    """One stream is kept busy while it stores; another finds, and evicts, right behind."""
    model = model_of("llama", torch.float32)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    asked = prompts(8, 30)
    right = [model.generate(ids, attention_mask=torch.ones_like(ids), **settings) for ids in asked]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    with pagoda.hf.cached(model, "150KiB") as cache:
        for turn in range(24):
            with torch.cuda.stream(streams[turn % 2]):
                torch.cuda._sleep(2_000_000)
                ids = asked[turn * 5 % 8]
                found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                assert torch.equal(found, right[turn * 5 % 8])
        assert cache.stats().evicted_pages > 0
        assert cache.stats().hit_tokens > 0
        cache.check()


def test_a_model_that_moves_takes_its_pools_along():
    model = model_of("llama", torch.float32)
    (ids,) = prompts(1, 20)
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    right = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    with pagoda.hf.cached(model, "2MiB") as cache:
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        model.cpu()
        on_host = ids.cpu()
        for hit in (0, 80):
            found = model.generate(on_host, attention_mask=torch.ones_like(on_host), **settings)
            assert torch.equal(found, right.cpu())
            assert cache.last().hit_tokens == hit
