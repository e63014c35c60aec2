"""`pagoda plan`: how much memory a model's cache needs, and how many requests fit. In: arguments, a stream;
out: tables, or with ``--json`` one object.

Numbers of the object are integers, or have six decimals, rounded down::

    config, model           CONFIG as given; the name of the model
    layers, ranks           number of layers; number of tensor-parallel ranks. All sizes are those of one rank
    dtypes                  {kv, index, state}: lists of torch dtype names
    model_context           the longest context the model was made for, or null
    context, context_from   length of a request in tokens; "given", "model" or "default"
    groups                  [{name, layers, unit ("page" or "state"), window, sink_tokens, ratio, page_tokens,
                            unit_bytes, token_bytes, request_units, request_bytes, copies}]; fields that do
                            not apply are null. request_units and request_bytes are the most that a request
                            of `context` tokens holds; copies is the total of all ranks divided by what a
                            single rank would keep
    token_bytes             bytes per token of the groups that keep every token
    request_bytes           the sum of request_bytes over all groups
    resume_step             requests resume at multiples of this many tokens
    state_bytes, checkpoint_bytes
                            bytes of a request's state; bytes of a checkpoint of it. Both are null if there
                            are no states
    budget                  null without --memory, else:
        memory_bytes, weights_bytes, cache_bytes    of one rank; weights_bytes is null if not given
        mix                 [{tokens, share}]: the lengths for which memory is divided
        chunk, checkpoints, in_flight               as given, or the default
        shares              [{pool, unit ("page", "state" or "checkpoint"), units, bytes, percent}]; pool is
                            the name of the group, or "checkpoint"; bytes include one more unit for padding
        spare_bytes         too few for more
        tokens              that fit in total; null if no group keeps every token
        requests, requests_float                    requests of the mix at once, as an integer and a fraction
        context_requests, context_requests_float    the same if all requests had `context` tokens
        longest_request     length of the longest request that fits alone; null if any length fits
        more_bytes, more_tokens, more_requests      what more_bytes of additional memory add: tokens of the
                            mix (or null), requests of `context` tokens

Without CONFIG: ``{"models": [{name, layers, groups: {name: layers}, token_bytes, window_bytes, state_bytes,
context}]}``; window_bytes is the size of a request's full windows, in whole pages.
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
from pagoda.layout._sizing import CHECKPOINTS

__all__ = ["configure", "run"]

EXAMPLES = """\
examples:
  pagoda plan                                             list the models that come with Pagoda
  pagoda plan llama-3.1-8b                                show sizes only
  pagoda plan llama-3.1-8b --memory 80GiB --weights 16GiB --context 32k
  pagoda plan ./my-model --memory 141GB --tp 8 --kv-dtype fp8 --mix 2k:3,32k:1 --json

G and GiB are 2^30 bytes, GB is 10^9 bytes; k is 1,024 tokens, M is 1,024k tokens.
"""
# Options that need --memory.
DIVISION = ("weights", "mix", "chunk", "checkpoints", "in-flight")
# Each option with its value and help. Values are parsed later, so that their errors are ConfigErrors.
OPTIONS = {
    "--memory BYTES": "memory of one rank for the cache, such as 80GiB; use --weights if it also has to hold "
    "the weights",
    "--weights BYTES": "weights of one rank, subtracted from --memory",
    "--context TOKENS": "length of a request, such as 128k (default: the model's limit, or 8k)",
    "--tp N": "plan one of N tensor-parallel ranks (default: 1)",
    "--kv-dtype DTYPE": "dtype of keys and values: bf16, fp16, fp32, fp8, fp8_e5m2, or for latent attention "
    "fp8_ds_mla (default: the model's)",
    "--index-dtype DTYPE": "dtype of indexer keys: fp8, fp4, bf16, ... (default: fp8)",
    "--state-dtype DTYPE": "dtype of recurrent states: bf16, fp16, fp32 (default: the config's, or fp32)",
    "--unaccepted N": "tokens written before they are accepted, for speculative decoding; makes ring windows "
    "longer (default: 1)",
    "--page-tokens TOKENS": "tokens per page, in all groups (default: 16; latent attention 64, compressed "
    "attention 128)",
    "--mix TOKENS:WEIGHT,...": "lengths of requests and their weights: 2k:3,32k:1 means three short requests "
    "for each long one (default: all are as long as --context)",
    "--checkpoints N": f"checkpoints per request, if the model has states; without any, no cached prefix is "
    f"reused (default: {CHECKPOINTS})",
    "--chunk TOKENS": "tokens of prefill per step; windows need more pages for them (default: 1)",
    "--in-flight STEPS": "steps that an engine starts before it has the results of the first; windows need "
    "more pages for them (default: 0)",
    "--like TYPE": "read a config with an unknown model_type as this type, such as llama",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Show what a model's layers store, how much memory a request needs, and how many requests fit."
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="name of a model that comes with Pagoda, or path of a config.json or its folder "
        "(default: list the models)",
    )
    for option, meaning in OPTIONS.items():
        name, _, value = option.partition(" ")
        parser.add_argument(name, metavar=value, help=meaning)
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")


def run(options: argparse.Namespace, out: TextIO) -> None:
    """Plan one model, or list the models. Errors: ConfigError, before anything is written."""
    given = [name for name in map(_name, OPTIONS) if getattr(options, name.replace("-", "_")) is not None]
    if options.config is None:
        if given:
            raise ConfigError(
                f"--{given[0]}: name a model, or give the path of its config.json; "
                f"`pagoda plan` without arguments lists the models that come with Pagoda"
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
            raise ConfigError(f"--{name}: give --memory too: this option has no effect without it")
    plan = figures.plan(asked, division)
    if options.json:
        _write_json(plan_record(plan), out)
    else:
        text.write_plan(plan, Pen(out))


def _name(option: str) -> str:
    return option.partition(" ")[0].removeprefix("--")


def _write_json(value: object, out: TextIO) -> None:
    print(json.dumps(value, indent=2, allow_nan=False), file=out, flush=True)
