"""`pagoda demo`: tours in the terminal. In: which, a device, a stream; out: text that ends by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from pagoda.cli._tours.pen import Pen
from pagoda.errors import ConfigError, MissingError

__all__ = ["PARTS", "run"]


def _talk(pen: Pen, device: str) -> None:
    try:
        from pagoda.cli._tours import talk  # late: transformers takes seconds, and may not be there
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
    "talk": _talk,  # a real model, with a cache and without
    "pool": _pool,  # ids, tables, tensors
    "tree": _tree,  # what is already computed
}


def run(part: str | None, device: str, out: TextIO) -> None:
    """One tour; `talk` if none is named, and where there is no model for it, the others.

    Errors: ConfigError for a device, MissingError where `talk` itself was asked for."""
    pen = Pen(out)
    if part is not None:
        PARTS[part](pen, device)
        return
    try:
        _talk(pen, device)
    except MissingError as missing:
        pen.say(pen.wrap(f"There is no model to talk to. {missing}"))
        pen.say("\nHere are the tours that need none: the pool and the tree.")
        for name in ("pool", "tree"):
            PARTS[name](pen, device)
