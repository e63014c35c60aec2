"""`pagoda generate` and `pagoda chat`: a real model, with a cache. In: arguments, lines; out: its answers.

What was typed is read before anything is loaded; the other files need transformers, and come late."""

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

# Each with its value, what it is if left out, and what it means. All are read later: their errors are ours.
OPTIONS: dict[str, tuple[str | None, str]] = {
    "--model FOLDER": (
        "smollm2",
        "the folder of a Hugging Face model; left out, SmolLM2-135M-Instruct, which is fetched once (93 MB)",
    ),
    "--memory BYTES": ("1GiB", "memory of the cache, such as 4GiB (left out: 1GiB)"),
    "--max-tokens N": ("256", "the longest answer (left out: 256)"),
    "--system TEXT": (None, "what the model is told first"),
    "--temperature T": ("0", "0, or left out, takes the likeliest token; above, tokens are drawn: try 0.7"),
    "--dtype DTYPE": (
        "float32",
        "of the weights in memory: float32 (left out), bfloat16, float16, or auto: as they are kept",
    ),
    "--device DEVICE": (None, "cpu or cuda; left out, cuda where there is one"),
}


def configure(parser: argparse.ArgumentParser, *, has_prompt: bool) -> None:
    """Give a parser the arguments of one of the commands."""
    if has_prompt:
        parser.add_argument("prompt", metavar="PROMPT", help="what is asked")
    for option, (usual, meaning) in OPTIONS.items():
        name, _, value = option.partition(" ")
        parser.add_argument(name, metavar=value, default=usual, help=meaning)
    parser.add_argument("--raw", action="store_true", help="continue plain text: no chat template")


def generate(options: argparse.Namespace, out: TextIO, numbers: TextIO) -> None:
    """Answer one prompt: the answer goes to `out`, a line about it to `numbers`. Errors: PagodaError."""
    speaker, _ = Asked.read(options).open()
    pen, beside = Pen(out), Pen(numbers)
    answer = speaker.ask([*_system(options), {"role": "user", "content": options.prompt}], pen.live)
    pen.say(indent=0)
    beside.say(beside.paint("2", str(answer)), indent=0)


def chat(options: argparse.Namespace, source: TextIO, out: TextIO) -> None:
    """Talk until the lines end. Errors: PagodaError, until the model listens; later ones are only told."""
    speaker, cache = Asked.read(options).open()
    from pagoda.cli._talk.conversation import Conversation

    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")  # bytes that are no text are no reason to stop
    pen = Pen(out)
    pen.say(f"{options.model} listens. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.", indent=0)
    pen.say()
    Conversation(speaker, cache, pen, _system(options)).run(source)


@dataclass(frozen=True)
class Asked:
    """What was asked for, checked."""

    model: str
    memory_bytes: int
    max_tokens: int
    temperature: float
    is_raw: bool
    dtype: str
    device: str | None

    @staticmethod
    def read(options: argparse.Namespace) -> Asked:
        """From parsed arguments. Errors: ConfigError."""
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
        """The model with a cache. Cost: loading it. Errors: PagodaError."""
        from pagoda import hf, models  # late, hf first: where transformers is missing, it says so

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
