"""`pagoda plan`: what a model's cache takes, and what fits into memory. In: arguments, a stream; out:
tables, or with ``--json`` one object.

The object, in plain numbers; what is no whole number has six decimals, rounded down::

    config, model           what was asked for; what the model is called
    layers, ranks           of the model; over which its heads are divided. All sizes are those of one rank
    dtypes                  {kv, index, state}: what is stored in which dtypes, by torch's names
    model_context           the longest context the model was made for, or null
    context, context_from   tokens of the requests below; "given", "model" or "default"
    groups                  [{name, layers, unit ("page" or "row"), window, sink_tokens, ratio, page_tokens,
                            unit_bytes, token_bytes, request_units, request_bytes, copies}]: what layers of
                            one geometry keep. Where a field says nothing about a group it is null. request_…
                            is the most that a request of `context` tokens holds; copies is how often all
                            ranks together keep what one alone would
    token_bytes             what one more token costs for good; windows and states do not grow
    request_bytes           the sum of the groups'
    resume_step             requests resume at multiples of so many tokens
    state_bytes, checkpoint_bytes
                            a request's row of states; what of it a checkpoint needs, though memory is
                            divided as if it took a whole row; null without
    budget                  null without --memory, else:
        memory_bytes, weights_bytes, cache_bytes    of one rank; weights_bytes is null if not given
        mix                 [{tokens, share}]: the lengths for which memory is divided
        chunk, checkpoints  as given
        shares              [{group, unit, units, bytes, percent}]: units may be handed out; bytes have one
                            more, for padding
        spare_bytes         what no whole page or row was left for
        tokens              that fit in all, or null where no group keeps every token
        requests, requests_float                    of the mix at once: whole, and with a fraction of one
        context_requests, context_requests_float    the same if all were of `context` tokens
        longest_request     tokens of the longest request that fits alone; null if any does
        more_bytes, more_tokens, more_requests      what so many more bytes buy: tokens of the mix (null as
                            above), requests of `context` tokens

Without CONFIG: ``{"models": [{name, layers, groups: {name: layers}, token_bytes, window_bytes, state_bytes,
context}]}``; window_bytes is what full windows of a request take, with whole pages.
"""

from __future__ import annotations

import argparse
import json
from typing import TextIO

from pagoda.cli._plan import figures, text
from pagoda.cli._plan.asked import Asked, Division
from pagoda.cli._plan.record import model_record, plan_record
from pagoda.cli._tours.pen import Pen
from pagoda.errors import ConfigError

__all__ = ["configure", "run"]

EXAMPLES = """\
examples:
  pagoda plan                                             the models whose configs come with Pagoda
  pagoda plan llama-3.1-8b                                sizes only
  pagoda plan llama-3.1-8b --memory 80GiB --weights 16GiB --context 32k
  pagoda plan ./my-model --memory 141GB --tp 8 --kv-dtype fp8 --mix 2k:3,32k:1 --json

GiB and a bare G are 2^30 bytes, GB is 10^9; k of tokens is 1,024, M is 1,024k.
"""
# Options that mean something only where memory is divided.
DIVISION = ("weights", "mix", "chunk", "checkpoints")
# Each with its value and what it means. All are read later, as text: their errors are ours.
OPTIONS = {
    "--memory BYTES": "memory of one rank for the cache, such as 80GiB; the weights are not counted unless "
    "--weights says what they take of it",
    "--weights BYTES": "the weights of one rank: taken off --memory",
    "--context TOKENS": "how long requests are, such as 128k; left out, the model's limit, or 8k without one",
    "--tp N": "plan one of N tensor-parallel ranks (left out: 1)",
    "--kv-dtype DTYPE": "what keys and values are stored in: bf16, fp16, fp32, fp8, fp8_e5m2, for latent "
    "attention fp8_ds_mla; left out, the model's own",
    "--index-dtype DTYPE": "what indexer keys are stored in: fp8 (left out), fp4, bf16, ...",
    "--state-dtype DTYPE": "what recurrent states are stored in: bf16, fp16, fp32; left out, as the config "
    "says, or fp32",
    "--unaccepted N": "tokens written before they are accepted, which makes rings longer (left out: 1)",
    "--page-tokens TOKENS": "tokens of a page, in all groups that have pages; left out, 16, for latent "
    "attention 64, for compressed attention 128",
    "--mix TOKENS:WEIGHT,...": "lengths of requests with their weights, for which memory is divided: "
    "2k:3,32k:1 is three short ones for each long one; left out, all are as long as --context",
    "--checkpoints N": "states kept a request besides its own, each in a whole row (left out: 0)",
    "--chunk TOKENS": "tokens of prefill in flight at once, which windows hold besides (left out: 1)",
    "--like TYPE": "read a config of unknown model_type as one of this type, such as llama",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "What every layer of a model keeps, what a request takes, and how many fit into memory."
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a model that comes with Pagoda, by name, or the path of a config.json or of its folder; "
        "left out, the models are listed",
    )
    for option, meaning in OPTIONS.items():
        name, _, value = option.partition(" ")
        parser.add_argument(name, metavar=value, help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, with all numbers")


def run(options: argparse.Namespace, out: TextIO) -> None:
    """Plan one model, or list those there are. Errors: ConfigError, before anything is written."""
    given = [name for name in map(_name, OPTIONS) if getattr(options, name.replace("-", "_")) is not None]
    if options.config is None:
        if given:
            raise ConfigError(
                f"--{given[0]}: name a model, or give the path of its config.json; "
                f"`pagoda plan` alone lists the models that come with Pagoda"
            )
        models = figures.models()
        if options.json:
            _write_json({"models": [model_record(model) for model in models]}, out)
        else:
            text.write_models(models, Pen(out))
        return
    asked, division = Asked.read(options), Division.read(options)
    for name in given:
        if division is None and name in DIVISION:
            raise ConfigError(f"--{name}: give --memory too: it is for dividing it")
    plan = figures.plan(asked, division)
    if options.json:
        _write_json(plan_record(plan), out)
    else:
        text.write_plan(plan, Pen(out))


def _name(option: str) -> str:
    return option.partition(" ")[0].removeprefix("--")


def _write_json(value: object, out: TextIO) -> None:
    print(json.dumps(value, indent=2, allow_nan=False), file=out, flush=True)
