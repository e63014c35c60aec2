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
    """Run one command and return its exit status: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C,
    141 if the output was closed (`pagoda demo | head`)."""
    parser = argparse.ArgumentParser(
        prog="pagoda", description="KV-cache memory for LLM inference: try it, and plan memory with it."
    )
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    one = commands.add_parser("generate", help="answer one prompt")
    talk.configure(one, has_prompt=True)
    one.set_defaults(run=lambda options: talk.generate(options, sys.stdout, sys.stderr))
    many = commands.add_parser("chat", help="chat with a model in the terminal")
    talk.configure(many, has_prompt=False)
    many.set_defaults(run=lambda options: talk.chat(options, sys.stdin, sys.stdout))
    tour = commands.add_parser("demo", help="show the cache at work: a real model, the pool, the tree")
    tour.add_argument(
        "part",
        nargs="?",
        choices=list(demo.PARTS),
        help="talk: a real model with and without the cache (default); pool: pages of running requests; "
        "tree: how prefixes are shared and evicted",
    )
    tour.add_argument(
        "--device", default="cpu", help="device of the model and the pool: cpu or cuda (default: cpu)"
    )
    tour.set_defaults(run=lambda options: demo.run(options.part, options.device, sys.stdout))
    sizes = commands.add_parser(
        "plan", help="how much memory a model's cache needs, and how many requests fit"
    )
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
        # The interpreter flushes stdout again when it exits, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
