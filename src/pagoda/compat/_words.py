"""Errors in the words of a public design. In: an error of one of our own parts, about to be raised again;
out: the same error, naming the argument that the caller gave."""

from __future__ import annotations

import re

from pagoda.errors import IdError, PagodaError

__all__ = ["in_words", "of_one"]

_HEAD = re.compile(r"(\w+)(\[\d+\])?")  # messages begin with an argument, and maybe an index into it


def in_words(error: PagodaError, **names: str) -> None:
    """Replace the argument that the error's message begins with by the caller's name for it."""
    head = _HEAD.match(str(error))
    if head is not None and head[1] in names:
        _replace(error, names[head[1]] + str(error)[head.end(1) :])


def of_one(error: PagodaError, name: str) -> None:
    """Turn an error about the only element of an array into one about the number `name` of the caller."""
    head = _HEAD.match(str(error))
    if head is not None and head[1] in ("id", "ids", "row", "rows"):
        _replace(error, name + str(error)[head.end() :])


def _replace(error: PagodaError, message: str) -> None:
    error.args = (message, *error.args[1:])
    if isinstance(error, IdError):
        error.message = message
