"""`pagoda demo`: tours in the terminal. In: which, a device, a stream; out: text that ends by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from pagoda.cli.tours import pool, tree
from pagoda.cli.tours.pen import Pen

__all__ = ["PARTS", "run"]

PARTS: dict[str, Callable[[Pen, str], None]] = {
    "pool": pool.run,  # ids, tables, tensors
    "tree": tree.run,  # what is already computed
}


def run(part: str | None, device: str, out: TextIO) -> None:
    """One tour, or all of them one after the other. Errors: ConfigError for a device."""
    pen = Pen(out)
    for name in PARTS if part is None else [part]:
        PARTS[name](pen, device)
