"""The documentation is true: its examples run, its commands, links and numbers of invariants exist."""

import argparse
import ast
import builtins
import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pagoda
from pagoda.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


# A fenced block: what stands behind its three backticks, and its lines.
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(page: Path) -> list[tuple[str, str]]:
    """Info and text of the fenced blocks of a page, in order."""
    return [(info.strip(), text) for info, text in FENCE.findall(page.read_text())]


def python_blocks(page: Path) -> list[str]:
    return [text for info, text in fences(page) if info.split(" ")[0] == "python"]


WITH_PYTHON = [page for page in PAGES if python_blocks(page)]


def free_names(code: str) -> set[str]:
    """Names that are read and never bound."""
    tree = ast.parse(code)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    return read - {node.id for node in names if not isinstance(node.ctx, ast.Load)}


def prelude(code: str) -> dict[str, Any]:
    """What a page may use without making it: `pagoda` and `torch`; where it asks for them, a `model` of
    transformers with one layer, a `tokenizer`, and `inputs` for its `generate`: 40 tokens, two to come."""
    names: dict[str, Any] = {"pagoda": pagoda, "torch": torch}
    asked = free_names(code) & {"model", "inputs", "tokenizer"}
    if asked or "import torch, transformers" in code:
        transformers = pytest.importorskip("transformers", reason="needs transformers")
    if not asked:
        return names
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, pad_token_id=0)
    ids = torch.arange(1, 41)[None]
    return names | {
        "model": transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval(),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2},
        "tokenizer": str,
    }


def run_page(blocks: list[tuple[str, str]], name: str, told: Callable[[], str]) -> dict[str, Any]:
    """Run the python blocks of a page in order, in one namespace; the names that they leave.

    - What a line is said to print stands behind it as `# → text`; the texts come in this order.
    - ```` ```python no-run: why ```` is compiled and not run.
    - A model's `memory="…"` is 4 MiB here.
    """
    codes = [
        (info, re.sub(r'\bmemory="[^"]+"', 'memory="4MiB"', text))
        for info, text in blocks
        if info.split(" ")[0] == "python"
    ]
    names = prelude("\n".join(code for _, code in codes))
    for number, (info, code) in enumerate(codes):
        compiled = compile(code, f"{name}, example {number + 1}", "exec")
        if info != "python":
            assert re.fullmatch(r"python no-run: \w.+", info), f"{name}: ```{info}"
            continue
        exec(compiled, names)
        rest = told()
        for text in re.findall(r"# → (.*)$", code, re.MULTILINE):
            assert text in rest, f"{name}, example {number + 1}: {text!r} is not printed"
            rest = rest.split(text, 1)[1]
    return names


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]):
    names = run_page(fences(page), page.name, lambda: capsys.readouterr().out)
    if "inputs" in names and "cache" in names:  # pagoda.hf is on: a second call finds what the first computed
        names["model"].generate(**names["inputs"])
        assert names["cache"].last().hit_tokens == 32


def test_each_example_of_the_readme_runs_as_it_stands():
    for number, code in enumerate(python_blocks(ROOT / "README.md")):
        imported = {
            (each.asname or each.name).split(".")[0]
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in node.names
        }
        assert free_names(code) - imported <= set(dir(builtins)), f"example {number + 1}"


@pytest.mark.parametrize(
    ("info", "code"),
    [
        ("python", "1 / 0"),
        ("python", "print(1)  # → 2"),
        ("python", "print(1, 2)  # → 2\nprint(3)  # → 1"),
        ("python no-run", "pass"),
        ("python no-run: it is wrong", "1 +"),
    ],
)
def test_an_example_that_is_wrong_is_found(info: str, code: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises((AssertionError, ZeroDivisionError, SyntaxError)):
        run_page([(info, code)], "page", lambda: capsys.readouterr().out)


def commands(page: Path) -> list[list[str]]:
    """The words of each command line: of console blocks, and of lines that are indented as code."""
    text = page.read_text()
    console = [block for info, block in fences(page) if info in ("console", "sh", "bash", "shell")]
    indented = re.findall(r"(?<=\n\n)((?:    \S.*\n)+)", FENCE.sub("", text))
    lines = [
        line.strip().removeprefix("$ ") for block in [*console, *indented] for line in block.splitlines()
    ]
    starts = re.compile(r"(\.venv/bin/)?(pagoda|make|python -m bench)\b")
    return [shlex.split(line, comments=True) for line in lines if starts.match(line)]


def require_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for a command with a target, module, subcommand or option that does not exist."""
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets), words
    elif program == "python":
        assert importlib.util.find_spec(arguments[1]), words
    else:
        parse = argparse.ArgumentParser.parse_args

        def parse_alone(self: argparse.ArgumentParser, given: Any = None) -> None:
            parse(self, given)
            raise InterruptedError

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
        with pytest.raises(InterruptedError):
            main(arguments)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path, monkeypatch: pytest.MonkeyPatch):
    for words in commands(page):
        require_command(words, monkeypatch)


@pytest.mark.parametrize("line", ["make tea", "pagoda brew", "pagoda plan --tea 1", "python -m bench.tea"])
def test_a_command_that_does_not_exist_is_found(line: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises((AssertionError, SystemExit)):
        require_command(line.split(), monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:tests|docs|native|bench|src|examples)/[\w/.]+)`", page.read_text()):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`(test_\w+\.py)`", page.read_text()):
        assert list((ROOT / "tests").rglob(target)), target


def test_figures_begin_with_a_summary_of_one_screen():
    summary = (ROOT / "docs" / "figures.md").read_text().split("\n## ")[0]
    assert len(summary.splitlines()) <= 35


def test_an_invariant_has_its_statement_owner_proof_and_reason():
    rows = re.findall(r"^\| \d+ \|.*$", (ROOT / "docs" / "invariants.md").read_text(), re.MULTILINE)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells), row


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
