"""``python -m bench [name …] [options]``: run all benchmarks, or the named ones; tables and JSON.

`--trace` is a recorded stream of requests for `checkpoints` (`bench.checkpoints.workloads.trace`). `--sweep`
and `--smoke` are for `attention` (`bench.attention.run`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

HOST = ["ids", "arrays", "tree", "manager", "checkpoints", "gather", "attention_cpu", "hf"]
GPU = ["store", "pack", "states", "staging", "delta", "hybrid", "attention"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(HOST + GPU))
    parser.add_argument("--trace", type=Path, help="a recorded stream of requests for checkpoints")
    parser.add_argument("--sweep", action="store_true", help="attention: decode by context and batch instead")
    parser.add_argument("--smoke", action="store_true", help="attention: tiny sizes, on any machine")
    asked = parser.parse_args()
    names = asked.names or HOST + GPU
    options: dict[str, dict[str, Any]] = {
        "checkpoints": {"trace": asked.trace},
        "attention": {"sweep": asked.sweep, "smoke": asked.smoke},
    }
    unknown = sorted(set(names) - set(HOST + GPU))
    if unknown:
        print(
            f"bench: unknown benchmark: {', '.join(unknown)}; the benchmarks are {', '.join(HOST + GPU)}",
            file=sys.stderr,
        )
        return 2
    for name in names:
        is_smoke = name == "attention" and asked.smoke
        if name in GPU and not torch.cuda.is_available() and not is_smoke:
            print(f"\n{name}: skipped, because this machine has no CUDA device")
            continue
        begin = time.perf_counter()
        print(f"\n{name} …", flush=True)
        importlib.import_module(f"bench.{name}").run(**options.get(name, {}))
        print(f"\n{name}: {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
