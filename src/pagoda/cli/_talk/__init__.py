"""`pagoda generate` and `pagoda chat`: a real model with a cache. In: arguments, lines; out: its answers.

Arguments are validated before anything is loaded. The other modules of this folder need transformers and are
imported late."""

from __future__ import annotations

import argparse
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from pagoda.cli._tours.pen import Pen
from pagoda.errors import ConfigError
from pagoda.layout._numbers import num_bytes, num_tokens, show

if TYPE_CHECKING:
    from pagoda.cli._talk.speaker import Message, Speaker
    from pagoda.hf import PrefixCache

__all__ = ["chat", "configure", "generate"]

# Each option with its value, its default and its help. Values are parsed later, so that their errors are
# ConfigErrors.
OPTIONS: dict[str, tuple[str | None, str]] = {
    "--model FOLDER": (
        "smollm2",
        "folder of a Hugging Face model (default: SmolLM2-135M-Instruct, 93 MB, downloaded once)",
    ),
    "--memory BYTES": ("1GiB", "memory of the cache, such as 4GiB (default: 1GiB)"),
    "--max-tokens N": ("256", "maximum length of an answer (default: 256)"),
    "--system TEXT": (None, "system prompt"),
    "--temperature T": ("0", "sampling temperature, such as 0.7; 0 takes the most likely token (default: 0)"),
    "--dtype DTYPE": (
        "float32",
        "dtype of the weights in memory: float32, bfloat16, float16, or auto for that of the file "
        "(default: float32)",
    ),
    "--device DEVICE": (None, "cpu or cuda (default: cuda if available)"),
}


def configure(parser: argparse.ArgumentParser, *, has_prompt: bool) -> None:
    """Give a parser the arguments of one of the commands."""
    if has_prompt:
        parser.add_argument("prompt", metavar="PROMPT", help="the prompt")
    for option, (usual, meaning) in OPTIONS.items():
        name, _, value = option.partition(" ")
        parser.add_argument(name, metavar=value, default=usual, help=meaning)
    parser.add_argument("--raw", action="store_true", help="continue the text without a chat template")


def generate(options: argparse.Namespace, out: TextIO, numbers: TextIO) -> None:
    """Answer one prompt: write the answer to `out`, its statistics to `numbers`. Errors: PagodaError."""
    speaker, _ = Asked.read(options).open()
    pen, beside = Pen(out), Pen(numbers)
    answer = speaker.ask([*_system(options), {"role": "user", "content": options.prompt}], pen.live)
    pen.say(indent=0)
    beside.say(beside.paint("2", str(answer)), indent=0)


def chat(options: argparse.Namespace, source: TextIO, out: TextIO) -> None:
    """Chat until the input ends. Errors: PagodaError while the model is loaded; later ones are printed."""
    speaker, cache = Asked.read(options).open()
    from pagoda.cli._talk.conversation import Conversation

    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")  # invalid bytes should not end the chat
    pen = Pen(out)
    pen.say(
        f"{options.model} is ready. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat.",
        indent=0,
    )
    pen.say()
    Conversation(speaker, cache, pen, _system(options)).run(source)


@dataclass(frozen=True)
class Asked:
    """The validated arguments."""

    model: str
    memory_bytes: int
    max_tokens: int
    temperature: float
    is_raw: bool
    dtype: str
    device: str | None

    @staticmethod
    def read(options: argparse.Namespace) -> Asked:
        """Validate parsed arguments. Errors: ConfigError."""
        return Asked(
            model=options.model,
            memory_bytes=num_bytes(options.memory, "--memory"),
            max_tokens=num_tokens(options.max_tokens, "--max-tokens"),
            temperature=_temperature(options.temperature),
            is_raw=options.raw,
            dtype=options.dtype,
            device=options.device,
        )

    def open(self) -> tuple[Speaker, PrefixCache]:
        """Load the model and give it a cache. Errors: PagodaError."""
        from pagoda import hf, models  # late; hf first: it says so if transformers is missing

        model, tokenizer = models.load(self.model, dtype=self.dtype, device=self.device)
        cache = hf.enable(model, self.memory_bytes)
        from pagoda.cli._talk.speaker import Speaker

        speaker = Speaker(
            model,
            tokenizer,
            cache=cache,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            is_raw=self.is_raw,
        )
        return speaker, cache


def _system(options: argparse.Namespace) -> list[Message]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"--temperature: give 0 or more, such as 0.7, not {show(text)}")
    return value
