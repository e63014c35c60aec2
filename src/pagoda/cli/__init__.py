"""``pagoda …``: the command line. In: arguments; out: text and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pagoda import __version__
from pagoda.cli import demo
from pagoda.errors import PagodaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="pagoda", description="The KV-cache memory of an LLM engine, as a library."
    )
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    tour = commands.add_parser("demo", help="a tour: allocate, write, read back, free, and look at the pool")
    tour.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    tour.set_defaults(run=lambda options: demo.run(options.device, sys.stdout))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
