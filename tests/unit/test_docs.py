"""The documentation is true: its example runs, its links lead somewhere, its numbers of invariants exist."""

import re
from pathlib import Path

import pytest
import torch

import pagoda

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/hf.md"])
def test_the_example_with_a_model_runs(page: str, capsys: pytest.CaptureFixture[str]):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.arange(1, 41)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
    example = examples(page)[0].replace("4GiB", "4MiB")
    names = {"model": model, "inputs": inputs, "pagoda": pagoda, "tokenizer": str}
    exec(compile(example, page, "exec"), names)
    model.generate(**inputs)
    assert names["cache"].last().hit_tokens == 32
    assert "1 call, 1 served" in capsys.readouterr().out


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    example = examples("README.md")[1]
    exec(compile(example, "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert "131072 79\n" in told
    assert "\n32\n" in told
    assert "1 of 8 rows run" in told


def test_the_example_of_compressed_attention_runs(capsys: pytest.CaptureFixture[str]):
    example = examples("docs/compressed.md")[0]
    exec(compile(example, "docs/compressed.md", "exec"), {})
    # Only from the token on that ends the first block of four.
    assert capsys.readouterr().out == "[False, False, False, True, True]\n"


def test_the_example_of_pools_runs(capsys: pytest.CaptureFixture[str]):
    exec(compile(examples("docs/pools.md")[0], "docs/pools.md", "exec"), {})
    told = capsys.readouterr().out
    assert "Batch(step 1: 40 tokens of 1 rows, padded to 64 and 8, on cpu)" in told
    assert "torch.Size([64]) [0, 3, 3, 3, 3, 3, 3, 3, 3]" in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:tests|docs|native|bench|src)/[\w/.]+)`", page.read_text()):
        assert (ROOT / target).exists(), target


def test_invariants_are_numbered_and_those_that_code_names_exist():
    numbers = [
        int(n)
        for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "invariants.md").read_text(), re.MULTILINE)
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    named = {
        int(number)
        for folder, suffix in (("src", "*.py"), ("native", "*.cpp"))
        for path in (ROOT / folder).rglob(suffix)
        for number in re.findall(r"(?:InvariantError\(|BrokenInvariant\{|broken\()\s*(\d+)", path.read_text())
    }
    assert named == set(numbers)
