"""`pagoda demo`: tours in the terminal. In: the name of a tour, a device, a stream; out: text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from pagoda.cli._tours.pen import Pen
from pagoda.errors import ConfigError, MissingError

__all__ = ["PARTS", "run"]


def _talk(pen: Pen, device: str) -> None:
    try:
        from pagoda.cli._tours import talk  # late: transformers takes seconds and may not be installed
    except ConfigError as missing:
        raise MissingError(str(missing)) from missing
    talk.run(pen, device)


def _pool(pen: Pen, device: str) -> None:
    from pagoda.cli._tours import pool  # late: `pagoda plan` needs no torch

    pool.run(pen, device)


def _tree(pen: Pen, device: str) -> None:
    from pagoda.cli._tours import tree

    tree.run(pen, device)


PARTS: dict[str, Callable[[Pen, str], None]] = {
    "talk": _talk,  # a real model, with and without a cache
    "pool": _pool,  # ids, tables, tensors
    "tree": _tree,  # what is already computed
}


def run(part: str | None, device: str, out: TextIO) -> None:
    """Run one tour. Without `part`, run `talk`, or the other tours if its model is missing.

    Errors: ConfigError for an unavailable device, MissingError if `talk` was named but its model is
    missing."""
    pen = Pen(out)
    if part is not None:
        PARTS[part](pen, device)
        return
    try:
        _talk(pen, device)
    except MissingError as missing:
        pen.say(pen.wrap(f"The tour with a real model is not available. {missing}"))
        pen.say("\nHere are the tours that do not need a model: the pool and the tree.")
        for name in ("pool", "tree"):
            PARTS[name](pen, device)
