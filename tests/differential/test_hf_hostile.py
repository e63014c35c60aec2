"""The drop-in against what users do to models: each was once a wrong answer."""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

import torch

import pagoda
from differential.judge import sharp
from differential.tiny_models import tiny_config, tiny_model

SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def model_of(case: str, **fields: Any) -> Any:
    config = tiny_config(case, torch.float32)
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return sharp(tiny_model(config)).eval()


def tokens(seed: int, n: int) -> torch.Tensor:
    return torch.randint(3, 64, (1, n), generator=torch.Generator().manual_seed(seed))


def answer(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**SETTINGS, **more})


def test_a_config_that_changes_finds_nothing_of_before() -> None:
    """A window that gets wider needs other pools too."""
    model, ids = model_of("mistral, window"), tokens(1, 70)
    with pagoda.hf.cached(model, "2MiB") as cache:
        answer(model, ids)
        model.config.sliding_window = 40
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 40
        found = answer(model, ids)
        assert cache.last().hit_tokens == 0
        assert torch.equal(answer(model, ids), found)
        assert cache.last().hit_tokens == 64
    assert torch.equal(answer(model, ids), found)


def test_queries_scaled_by_their_column_are_left_alone() -> None:
    model = model_of("llama4_text", attn_temperature_tuning=True)
    with pagoda.hf.cached(model, "2MiB") as cache:
        answer(model, tokens(1, 40))
        assert cache.last().reason == "queries that are scaled by column"


class Writer:
    """A streamer that writes into what it is given: on a CPU that is the prompt itself."""

    def __init__(self) -> None:
        self.has_written = False

    def put(self, value: torch.Tensor) -> None:
        if not self.has_written:
            value[:, 5:20] = 7
        self.has_written = True

    def end(self) -> None:
        pass


def test_a_streamer_that_writes_into_the_prompt_spoils_nothing() -> None:
    model, ids = model_of("llama"), tokens(1, 50)
    right = answer(model, ids)
    with pagoda.hf.cached(model, "2MiB") as cache:
        answer(model, ids.clone(), streamer=Writer())
        assert torch.equal(answer(model, ids), right)
        assert torch.equal(answer(model, ids), right)
        assert cache.last().hit_tokens == 48


def test_layers_of_another_dtype_are_not_stored() -> None:
    model, ids = model_of("llama"), tokens(1, 50)
    model.model.embed_tokens.to(torch.bfloat16)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.float())
    right = answer(model, ids)
    with pagoda.hf.cached(model, "2MiB") as cache:
        for _ in range(2):
            assert torch.equal(answer(model, ids), right)
        (why,) = cache.stats().not_stored
        assert "float32" in why
        assert "bfloat16" in why


def test_dropout_in_a_part_of_the_model_is_left_alone() -> None:
    model, ids = model_of("gpt_neox"), tokens(1, 40)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
            module.train()
    with pagoda.hf.cached(model, "2MiB") as cache:
        answer(model, ids)
        assert cache.last().reason == "a part of the model is in training mode"


def test_a_cache_that_is_disabled_stays_so() -> None:
    model, ids = model_of("llama"), tokens(1, 40)
    cache = pagoda.hf.enable(model, "2MiB")
    held = model.generate
    pagoda.hf.disable(model)
    model.to(torch.bfloat16)
    held(ids, attention_mask=torch.ones_like(ids), **SETTINGS)
    assert cache.stats().pool_bytes == 0
    assert cache.last().reason == "the cache is disabled"


def test_an_answer_is_not_lost_when_keeping_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("llama"), tokens(1, 40)
    right = answer(model, ids)
    with pagoda.hf.cached(model, "2MiB") as cache:
        monkeypatch.setattr(type(cache._memory), "keep", lambda *args: 1 / 0)
        assert torch.equal(answer(model, ids), right)
        assert list(cache.stats().not_stored) == ["ZeroDivisionError: division by zero"]
