"""Errors in the words of a public design. In: an error of our own parts, to be raised again; out: the same
error about the argument that the caller gave."""

from __future__ import annotations

import re

from pagoda.errors import IdError, PagodaError

__all__ = ["in_words", "of_one"]

_HEAD = re.compile(r"(\w+)(\[\d+\])?")  # what our messages begin with: an argument, and which entry of it


def in_words(error: PagodaError, **names: str) -> None:
    """Call the argument that the error's message begins with by the caller's name for it."""
    head = _HEAD.match(str(error))
    if head is not None and head[1] in names:
        _replace(error, names[head[1]] + str(error)[head.end(1) :])


def of_one(error: PagodaError, name: str) -> None:
    """Make an error about the only entry of an array one about the number `name` that the caller gave."""
    head = _HEAD.match(str(error))
    if head is not None and head[1] in ("id", "ids"):
        _replace(error, name + str(error)[head.end() :])


def _replace(error: PagodaError, message: str) -> None:
    error.args = (message, *error.args[1:])
    if isinstance(error, IdError):
        error.message = message
