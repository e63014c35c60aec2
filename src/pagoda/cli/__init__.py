"""``pagoda …``: the command line. In: arguments; out: text and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pagoda import __version__
from pagoda.cli import _demo as demo
from pagoda.cli import _plan as plan
from pagoda.cli import _talk as talk
from pagoda.errors import PagodaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C, 141
    when nobody reads on (`pagoda demo | head`)."""
    parser = argparse.ArgumentParser(
        prog="pagoda", description="The KV-cache memory of an LLM engine, as a library."
    )
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    one = commands.add_parser("generate", help="ask a model one question")
    talk.configure(one, has_prompt=True)
    one.set_defaults(run=lambda options: talk.generate(options, sys.stdout, sys.stderr))
    many = commands.add_parser("chat", help="talk to a model")
    talk.configure(many, has_prompt=False)
    many.set_defaults(run=lambda options: talk.chat(options, sys.stdin, sys.stdout))
    tour = commands.add_parser("demo", help="a tour: what a cache saves a real model; also pool and tree")
    tour.add_argument(
        "part", nargs="?", choices=list(demo.PARTS), help="one part of it; talk, if none is named"
    )
    tour.add_argument("--device", default="cpu", help="where model and pool lie: cpu (the default) or cuda")
    tour.set_defaults(run=lambda options: demo.run(options.part, options.device, sys.stdout))
    sizes = commands.add_parser("plan", help="what a model's cache takes, and what fits into memory")
    plan.configure(sizes)
    sizes.set_defaults(run=lambda options: plan.run(options, sys.stdout))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
