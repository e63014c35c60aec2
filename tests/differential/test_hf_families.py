"""Every family with the cache, against plain transformers: served, or left alone with a reason."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers", reason="needs transformers: plain generate is what answers are compared with"
)

import transformers

from differential.hf_checks import CASES, REFUSED, SERVED, Checked, family, is_here, model_of
from pagoda.hf._families import served_layout

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_plain_generate(case: str) -> None:
    if not is_here(case):
        pytest.skip(f"transformers {transformers.__version__} has no {family(case)}")
    model = model_of(case)
    if not hasattr(model, "generate"):
        pytest.skip("part of a larger model: it cannot generate")
    checked = Checked(model)
    for check in SERVED if checked.reason is None else REFUSED:
        check(checked)


def rotary(kind: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        scaling |= {"original_max_position_embeddings": 64}
    return scaling


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("llama", {"rope_parameters": rotary("dynamic")}, "depends on the length (dynamic)"),
        ("phi3", {"rope_parameters": rotary("longrope")}, "depends on the length (longrope)"),
        ("llama", {"is_causal": False}, "not causal"),
        ("gemma", {"use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_configs_of_served_families_that_are_left_alone(
    case: str, changes: dict[str, Any], reason: str
) -> None:
    from differential.judge import sharp
    from differential.tiny_models import tiny_config, tiny_model

    config = tiny_config(case, torch.float32)
    for name, value in changes.items():
        setattr(config, name, value)
    checked = Checked(sharp(tiny_model(config)))
    assert checked.reason is not None
    assert reason in checked.reason
    for check in REFUSED:
        check(checked)


def test_rotary_scaling_that_is_the_same_at_all_lengths_is_served() -> None:
    from differential.judge import sharp
    from differential.tiny_models import tiny_config, tiny_model

    config = tiny_config("llama", torch.float32)
    config.rope_parameters = rotary("linear")
    checked = Checked(sharp(tiny_model(config)))
    assert checked.ask(model_prompt := torch.arange(3, 43)[None])[1] == 0
    assert checked.ask(model_prompt)[1] == 32


def test_an_encoder_and_a_decoder_are_left_alone() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    checked = Checked(transformers.T5ForConditionalGeneration(config).eval())
    assert checked.reason == "an encoder-decoder model"
    for check in REFUSED:
        check(checked)


def test_a_model_with_a_generate_of_its_own_is_left_alone() -> None:
    model = model_of("llama")
    model.generate = lambda *args, **kwargs: "mine"
    assert served_layout(model) == "LlamaForCausalLM has its own generate"


# ── the page ────────────────────────────────────────────────────────────────────────────────────────


def _families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pagoda_docs_families", DOCS / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not all(map(is_here, CASES)), reason="the page is made with all families")
def test_the_page_says_what_is_tested_here() -> None:
    assert (DOCS / "families.md").read_text(encoding="utf-8") == _families().page()


def test_the_page_has_a_row_for_every_case() -> None:
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(CASES)
    assert {line.split("`")[1] for line in rows} == {family(case) for case in CASES}


def test_the_page_is_written_by_a_command_that_knows_what_it_was_told() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "families.py"), "--chek"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
