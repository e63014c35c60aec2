"""Reads the command line. In: arguments as text; out: validated values and a Layout, or a ConfigError of one
line that names the option."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pagoda.errors import ConfigError
from pagoda.layout import Layout, from_hf, model_config, model_names
from pagoda.layout._numbers import count, num_bytes, num_tokens, show_bytes
from pagoda.layout._sizing import CHECKPOINTS
from pagoda.tree._labels import clip

__all__ = ["Asked", "Division", "visible"]

_WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,40}", re.ASCII)
# How errors of from_hf begin, and the options that they refer to.
_OPTIONS = {f"{name}:": f"--{name.replace('_', '-')}:" for name in ("like", "kv_dtype", "index_dtype")}
_OPTIONS |= {"state_dtype:": "--state-dtype:", "page_tokens ": "--page-tokens "}


def visible(text: str, columns: int) -> str:
    """Return text from a file or argument with control characters escaped, clipped to so many columns."""
    return clip("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: columns + 1]), columns)


@dataclass(frozen=True)
class Asked:
    """A model, the arguments of `from_hf`, and the number of ranks; `context` is None if not given."""

    config: str
    stored: Mapping[str, Any]
    ranks: int
    context: int | None

    @staticmethod
    def read(options: argparse.Namespace) -> Asked:
        """Validate parsed arguments. Errors: ConfigError."""
        page_tokens, context = options.page_tokens, options.context
        stored = {
            "kv_dtype": options.kv_dtype,
            "index_dtype": options.index_dtype,
            "state_dtype": options.state_dtype,
            "unaccepted": _count(options.unaccepted, "--unaccepted", low=1, usual=1),
            "page_tokens": None if page_tokens is None else num_tokens(page_tokens, "--page-tokens"),
            "like": options.like,
        }
        return Asked(
            config=options.config,
            stored={name: value for name, value in stored.items() if value is not None},
            ranks=_count(options.tp, "--tp", low=1, usual=1),
            context=None if context is None else num_tokens(context, "--context"),
        )

    def whole(self) -> Layout:
        """Return the layout of the whole model. Errors: ConfigError."""
        is_shipped = self.config in model_names()
        if not is_shipped and not os.path.exists(self.config):
            raise ConfigError(_no_such(self.config))
        config, name = (model_config(self.config), self.config) if is_shipped else (self.config, "")
        try:
            return from_hf(config, name=name, **self.stored)
        except ConfigError as error:
            raise ConfigError(_in_options(str(error))) from None

    def one_rank(self, whole: Layout) -> Layout:
        """Return the layout of each rank. Errors: ConfigError."""
        try:
            return whole.shard(self.ranks)
        except ConfigError as error:
            raise ConfigError(f"--tp: {error}") from None


@dataclass(frozen=True)
class Division:
    """The memory of one rank and how to divide it; `mix` is None if all requests are as long as the context,
    `given_checkpoints` if there are as many as by default."""

    memory_bytes: int
    weights_bytes: int | None
    mix: Mapping[int, Fraction] | None
    chunk: int
    given_checkpoints: int | None
    in_flight: int

    @property
    def cache_bytes(self) -> int:
        """Memory without the weights."""
        return self.memory_bytes - (self.weights_bytes or 0)

    @property
    def checkpoints(self) -> int:
        """Checkpoints per request."""
        return CHECKPOINTS if self.given_checkpoints is None else self.given_checkpoints

    @property
    def running(self) -> dict[str, int]:
        """How requests run, as arguments of `Layout.divide`."""
        return {"chunk": self.chunk, "checkpoints": self.checkpoints, "in_flight": self.in_flight}

    @staticmethod
    def read(options: argparse.Namespace) -> Division | None:
        """Validate parsed arguments; return None without --memory. Errors: ConfigError."""
        if options.memory is None:
            return None
        memory_bytes = num_bytes(options.memory, "--memory")
        weights_bytes = None if options.weights is None else num_bytes(options.weights, "--weights")
        if weights_bytes is not None and weights_bytes >= memory_bytes:
            raise ConfigError(
                f"--weights: {show_bytes(weights_bytes)} of weights leave no room for the cache in "
                f"{show_bytes(memory_bytes)}: give more --memory, or the weights of one rank only"
            )
        return Division(
            memory_bytes=memory_bytes,
            weights_bytes=weights_bytes,
            mix=None if options.mix is None else _mix(options.mix),
            chunk=1 if options.chunk is None else num_tokens(options.chunk, "--chunk"),
            given_checkpoints=None
            if options.checkpoints is None
            else _count(options.checkpoints, "--checkpoints", low=0, usual=CHECKPOINTS),
            in_flight=_count(options.in_flight, "--in-flight", low=0, usual=0),
        )


def _in_options(message: str) -> str:
    """Return a message of `from_hf` with the names of options instead of arguments; it may quote a config."""
    for argument, option in _OPTIONS.items():
        if message.startswith(argument):
            message = option + message.removeprefix(argument)
    if message.startswith("model_type"):
        message = message.replace("like='llama'", "--like llama", 1)
    return visible(message, 2000)


def _count(text: str | None, name: str, low: int, usual: int) -> int:
    if text is None:
        return usual
    if not _COUNT.fullmatch(text):
        raise ConfigError(f"{name}: give a whole number of {low} or more, not '{visible(text, 40)}'")
    return count(int(text), name, low)


def _mix(text: str) -> dict[int, Fraction]:
    """Return lengths with their weights. Errors: ConfigError."""
    weights: dict[int, Fraction] = {}
    for item in text.split(","):
        length, colon, weight = item.partition(":")
        if colon and not _WEIGHT.fullmatch(weight.strip()):
            raise ConfigError(
                f"--mix: '{visible(weight, 40)}' is not a weight: write lengths and weights as 2k:3,32k:1"
            )
        share = Fraction(weight.strip()) if colon else Fraction(1)
        tokens = num_tokens(length, "--mix")
        if not share:
            raise ConfigError(f"--mix: give a weight above 0 for {tokens:,} tokens, or leave them out")
        weights[tokens] = weights.get(tokens, Fraction(0)) + share
    return weights


def _no_such(config: str) -> str:
    """Return the error for what is neither a name nor a path, with similar names."""
    last = re.split(r"[/\\]", config.rstrip("/\\"))[-1].lower()
    near = difflib.get_close_matches(last[:100], model_names(), n=3, cutoff=0.5)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"CONFIG: '{visible(config, 60)}' is neither a model that comes with Pagoda nor a readable file or "
        f"folder.{guess} `pagoda plan` lists the models; or give the path of a config.json or its folder"
    )
