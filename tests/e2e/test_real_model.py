"""A real model, SmolLM2-135M-Instruct: it is what its makers made, it talks, and the tour with it is true.

It is fetched and converted once, into the user's cache; a lock sees to it that no two workers do it."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from pagoda import models
from pagoda.cli import main
from pagoda.errors import MissingError

pytestmark = pytest.mark.xdist_group("real-model")  # one worker loads it


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return models.smollm2()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def talker(folder: Path) -> tuple[Any, Any]:
    return models.load(folder, device="cpu")


def test_it_is_the_model_that_it_says(talker: tuple[Any, Any]):
    """Sizes and special tokens as its model card and its GGUF have them."""
    model, tokenizer = talker
    config = model.config
    sizes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (30, 9, 3)
    assert model.num_parameters() == 134_515_008
    assert config.max_position_embeddings == 8192
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert len(tokenizer) == config.vocab_size == 49152
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


def test_its_template_is_chatml_with_its_own_system_prompt(talker: tuple[Any, Any]):
    _, tokenizer = talker
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = tokenizer(text)["input_ids"]
    assert (tokens.count(1), tokens.count(2)) == (3, 2)
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    "text", ["naïve café 🙂\n\tx = 1984  # año", "  12 345 6.7e-8", "日本語 and العربية"]
)
def test_its_tokenizer_loses_nothing(text: str, talker: tuple[Any, Any]):
    _, tokenizer = talker
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert all(
        len(piece) == 1 for piece in tokenizer.convert_ids_to_tokens(tokens) if re.search(r"[0-9]", piece)
    )  # digits stand alone


def test_it_knows_france_and_ends_its_turn(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "What is the capital of France? One short sentence.", "--device", "cpu"]) == 0
    told, numbers = capsys.readouterr()
    assert "Paris" in told
    assert "<|" not in told
    found = re.search(r" (\d+) tokens(?:,|$)", numbers)
    assert found is not None
    assert int(found[1]) < 60  # it ended by itself: 256 were allowed


def test_the_tour(folder: Path, capsys: pytest.CaptureFixture[str]):
    """`make run`. That answers are equal, the tour itself requires."""
    assert main(["demo"]) == 0
    told, _ = capsys.readouterr()
    assert "All 4 answers are the same as without a cache." in told
    assert told.count("crane that folds paper") >= 2
    reused = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) tokens reused", told)]
    assert all(n >= 900 for n in reused[:3])
