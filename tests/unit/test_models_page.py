"""The page of models is what its code makes, and the figures it says agree do."""

import importlib.util
import re
import shutil
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from pagoda.layout import model_config, model_names

DOCS = Path(__file__).parents[2] / "docs"


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


models = _load(DOCS / "models.py", "pagoda_docs_models")
PAGE = (DOCS / "models.md").read_text(encoding="utf-8")

# What each published figure counts, in bytes, from the numbers of the models' own configs: layers × (keys and
# values) × KV heads × width × bytes a value, or the entries of latent and compressed attention.
MIB, GIB = 2**20, 2**30
MILLION = 2**20  # what the sources call 1M tokens
LLAMA_8B = 32 * 2 * 8 * 128 * 2
LLAMA_70B = 80 * 2 * 8 * 128 * 2
LLAMA_405B = 126 * 2 * 8 * 128 * 2
MISTRAL = 32 * 2 * 8 * 128 * 2
GPT_OSS_LAYER = 2 * 8 * 64 * 2
# A quarter of the tokens in 30 layers with an indexer's key, a 128th in 31, a window of 128 in all 61.
PRO = 30 * (MILLION // 4) * (1024 + 256) + 31 * (MILLION // 128) * 1024 + 61 * 128 * 1024
V32 = 61 * (512 + 64 + 128) * 2 * MILLION
# fp8: 448 values, 64 of two bytes, 8 of scales; a key of 128 halves of a byte and 4 scales.
PRO_FP8 = 30 * (MILLION // 4) * (584 + 68) + 31 * (MILLION // 128) * 584 + 61 * 128 * 584
FLASH_FP8 = 21 * (MILLION // 4) * (584 + 68) + 20 * (MILLION // 128) * 584 + 43 * 128 * 584
V32_FP8 = 61 * (656 + 128 + 4) * MILLION
BY_HAND = {
    ("deepseek-v3", "70.272 KB"): Fraction(61 * (512 + 64) * 2, 1000),
    ("qwen2.5-72b", "327.680 KB"): Fraction(80 * 2 * 8 * 128 * 2, 1000),
    ("llama-3.1-405b", "516.096 KB"): Fraction(LLAMA_405B, 1000),
    ("jamba-1.5-mini", "4GB"): Fraction(4 * 2 * 8 * 128 * 2 * 262_144, GIB),
    ("llama-3.1-8b", "32GB"): Fraction(LLAMA_8B * 262_144, GIB),
    ("llama-3.1-70b", "80GB"): Fraction(LLAMA_70B * 262_144, GIB),
    ("llama-3.1-405b", "252GB"): Fraction(LLAMA_405B * 262_144, GIB),
    # The next token reads the 4,095 before it.
    ("mistral-7b-v0.1", "32GB"): Fraction(MISTRAL * 4_095, GIB),
    ("llama-3.1-8b", "0.125 GB"): Fraction(LLAMA_8B * 1_024, GIB),
    ("llama-3.1-8b", "1.95 GB"): Fraction(LLAMA_8B * 16_000, GIB),
    ("llama-3.1-8b", "15.62 GB"): Fraction(LLAMA_8B * 128_000, GIB),
    ("llama-3.1-70b", "0.313 GB"): Fraction(LLAMA_70B * 1_024, GIB),
    ("llama-3.1-70b", "4.88 GB"): Fraction(LLAMA_70B * 16_000, GIB),
    ("llama-3.1-70b", "39.06 GB"): Fraction(LLAMA_70B * 128_000, GIB),
    ("llama-3.1-405b", "0.984 GB"): Fraction(LLAMA_405B * 1_024, GIB),
    ("llama-3.1-405b", "15.38 GB"): Fraction(LLAMA_405B * 16_000, GIB),
    ("llama-3.1-405b", "123.05 GB"): Fraction(LLAMA_405B * 128_000, GIB),
    ("deepseek-v4-pro", "9.62 GiB"): Fraction(PRO, GIB),
    ("deepseek-v3.2", "83.9 GiB"): Fraction(V32, GIB),
    ("deepseek-v3.2", "8.7x"): Fraction(V32, PRO),
    ("deepseek-v4-pro", "10%"): Fraction(100 * PRO_FP8, V32_FP8),
    ("deepseek-v4-flash", "7%"): Fraction(100 * FLASH_FP8, V32_FP8),
    ("deepseek-v3.2", "656 Bytes"): Fraction(512 + 4 * 4 + 64 * 2),
    ("gpt-oss-120b", "36864"): Fraction(18 * GPT_OSS_LAYER),
    ("gpt-oss-120b", "73,728 bytes/token"): Fraction(36 * GPT_OSS_LAYER),
    ("gpt-oss-120b", "5.38 GiB"): Fraction(36 * GPT_OSS_LAYER * 78_384, GIB),
    ("gpt-oss-20b", "6.09 GiB"): Fraction(32 * 12 * (8_192 + 127) * GPT_OSS_LAYER, GIB),
    ("gpt-oss-20b", "12.00 GiB"): Fraction(32 * 24 * 8_192 * GPT_OSS_LAYER, GIB),
    ("gpt-oss-20b", "3072.00 MiB"): Fraction(12 * GPT_OSS_LAYER * 131_072, MIB),
    ("gpt-oss-20b", "18.00 MiB"): Fraction(12 * GPT_OSS_LAYER * 768, MIB),
    ("qwen3-next-80b-a3b", "75.38 MiB"): Fraction(36 * (32 * 128 * 128 + 3 * 8_192) * 4, MIB),
    ("qwen3-next-80b-a3b", "72.00 MiB"): Fraction(36 * 32 * 128 * 128 * 4, MIB),
    ("qwen3-next-80b-a3b", "3.38 MiB"): Fraction(36 * 3 * 8_192 * 4, MIB),
    ("qwen3.5-27b", "16384.00 MiB"): Fraction(16 * 2 * 4 * 256 * 2 * 262_144, MIB),
    ("qwen3.5-27b", "149.62 MiB"): Fraction(48 * (48 * 128 * 128 + 3 * 10_240) * 4, MIB),
    ("qwen3.5-27b", "144.00 MiB"): Fraction(48 * 48 * 128 * 128 * 4, MIB),
    ("qwen3.5-27b", "5.62 MiB"): Fraction(48 * 3 * 10_240 * 4, MIB),
    ("kimi-linear-48b-a3b", "up to 75%"): Fraction(100 * 20, 27),
    ("gemma-3-27b", "72.7 GB with cache, 54.0 GB without"): Fraction(
        2 * 16 * 128 * 2 * (10 * 32_768 + 52 * 1_023), 10**9
    ),
}

every_figure = pytest.mark.parametrize(
    "figure", models.PUBLISHED, ids=lambda each: f"{each.model}-{each.printed}".replace(" ", "_")
)


def _agrees(ours: Fraction, published: Decimal) -> bool:
    """Within half a unit of the last digit; sources round halves up (0.313 GB) and to even (15.62 GB)."""
    digit = Fraction(10) ** int(published.as_tuple().exponent)
    return abs(ours - Fraction(published)) <= digit / 2


def test_the_page_is_what_the_code_makes():
    assert models.page() == PAGE, "run python docs/models.py"


def test_every_model_has_its_line():
    lines = [line for line in PAGE.splitlines() if re.match(r"\| \S+ \(`", line)]
    names = [re.match(r"\| (\S+) \(`([^`]+)`\)", line).groups() for line in lines]
    assert names == [(model_config(name)["_name_or_path"], name) for name in model_names()]


@pytest.mark.parametrize(
    "line",
    [
        # 32 × 2 × 8 × 128 × 2 B a token; 2^13 and 2^17 of them.
        "| full × 32 | 131,072 | 1 GiB | 128k: 16 GiB | – | – | 16 |",
        # 9 pages of 16 tokens hold a window of 128 wherever it begins.
        f"| window of 128 × 12, full × 12 | 24,576 | {(12 * (8_192 + 144) * 2_048) / MIB:.2f} MiB |",
        # 64 layers × 5,120 channels × (16 of state, 3 of convolution) × 4 B.
        f"| state × 64 | 0 | {64 * 5_120 * 19 * 4 / MIB:.2f} MiB | – |",
        # Ten layers of 2,048 channels, two columns in bfloat16.
        f"| {10 * 2_048 * 2 * 2 // 1024} KiB | {10 * 2_048 * 2 * 2 // 1024} KiB | 16 |",
        "| beyond its context | 4k: ",
    ],
    ids=["full", "window", "state", "small state", "short context"],
)
def test_lines_of_models_computed_by_hand(line: str):
    assert line in PAGE


def test_no_figure_is_there_twice_and_each_is_computed_by_hand():
    keys = [(figure.model, figure.printed) for figure in models.PUBLISHED]
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(BY_HAND)


@every_figure
def test_ours_is_what_comes_out_by_hand(figure):
    assert figure.ours() == BY_HAND[figure.model, figure.printed]


@every_figure
def test_the_verdict_holds_at_the_precision_published(figure):
    assert figure.verdict in ("agrees", "differs", "not explained")
    assert _agrees(figure.ours(), figure.value) == (figure.verdict == "agrees")


@every_figure
def test_a_figure_that_differs_says_why_and_the_reason_gives_it(figure):
    assert bool(figure.explained_by) == (figure.verdict == "differs")
    if figure.verdict != "agrees":
        assert figure.note
    if figure.explained_by:
        assert _agrees(figure.ours(figure.explained_by), figure.value)


def test_what_notes_claim_in_numbers():
    heads = [figure for figure in models.PUBLISHED if "twice ours" in figure.note]
    assert len(heads) == 4
    assert all(figure.ours(figure.explained_by) == 2 * figure.ours() for figure in heads)
    keys = [figure for figure in models.PUBLISHED if "with fp8 it would not" in figure.note]
    assert [figure.value for figure in keys] == [10, 7]
    for figure, layers, others in zip(keys, (30, 21), (31, 20), strict=True):
        wide = layers * (MILLION // 4) * (584 + 132) + others * (MILLION // 128) * 584
        assert not _agrees(Fraction(100 * wide, V32_FP8), figure.value)
    (gemma,) = (figure for figure in models.PUBLISHED if figure.verdict == "not explained")
    assert f"would be {62 * 2 * 16 * 128 * 2 * 32_768 / 10**9:.1f} GB" in gemma.note
    assert gemma.value == Decimal("72.7") - Decimal("54.0")


@every_figure
def test_a_figure_is_on_the_page_as_it_is_printed_and_with_its_source(figure):
    (line,) = (
        line
        for line in PAGE.splitlines()
        if line.startswith(f"| {figure.model} |") and f"| {figure.printed} |" in line
    )
    title, address = figure.source.title, figure.source.address
    assert (f"[{title}]({address})" if address else f"| {title} ") in line
    assert bool(re.search(r" [¹²³] \|$", line)) == bool(figure.source.secondary)
    assert figure.value == Decimal(figure.number or re.sub(r"[^\d.]", "", figure.printed))


@pytest.mark.parametrize(
    "source", dict.fromkeys(figure.source for figure in models.PUBLISHED), ids=lambda each: each.title
)
def test_an_address_leads_to_the_figure_or_is_none(source):
    """Not to a project's home page or to the index of a blog; a README is the home page of a repository."""
    if not source.address:
        assert "no stable address" in source.secondary
        return
    parts = source.address.removeprefix("https://").rstrip("/").split("/")
    assert source.address.startswith("https://")
    assert len(parts) >= (3 if parts[0] in ("github.com", "vllm.ai", "huggingface.co") else 2)
    if parts[0] == "github.com" and len(parts) == 3:
        assert "README" in source.title


def test_caveats_are_of_shipped_models():
    assert set(models.CAVEATS) <= set(model_names())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The script and its page elsewhere, to be broken."""
    for name in ("models.py", "models.md"):
        shutil.copy(DOCS / name, tmp_path / name)
    return tmp_path


def test_check_fails_once_a_byte_is_changed(copy: Path, capsys: pytest.CaptureFixture[str]):
    script, page = _load(copy / "models.py", "pagoda_docs_models_copy"), copy / "models.md"
    right = page.read_bytes()
    assert script.main(["--check"]) == 0
    for place in (0, len(right) // 2, len(right) - 1):
        page.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        assert script.main(["--check"]) == 1
    for other in (right + b"\n", right[:-1], right.replace(b"\n", b"\r\n"), b""):
        page.write_bytes(other)
        assert script.main(["--check"]) == 1
    page.unlink()
    assert script.main(["--check"]) == 1
    assert "without --check" in capsys.readouterr().err
    assert not page.exists()
    assert script.main([]) == 0
    assert page.read_bytes() == right
    assert script.main(["--chek"]) == 2


def test_the_command_exits_with_what_it_found(copy: Path):
    command = [sys.executable, str(copy / "models.py"), "--check"]
    page = copy / "models.md"
    page.write_text(page.read_text(encoding="utf-8").replace("131,072", "131,073", 1), encoding="utf-8")
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "models.md is not what models.py makes" in failed.stderr
