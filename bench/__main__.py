"""``python -m bench [name …]``: run all benchmarks, or the named ones; print tables and write JSON."""

from __future__ import annotations

import importlib
import sys
import time

import torch

HOST = ["ids", "arrays", "tree", "manager", "gather", "hf"]
GPU = ["store", "pack", "states", "staging", "delta", "hybrid"]


def main() -> int:
    names = sys.argv[1:] or HOST + GPU
    unknown = sorted(set(names) - set(HOST + GPU))
    if unknown:
        print(
            f"bench: unknown benchmark: {', '.join(unknown)}; the benchmarks are {', '.join(HOST + GPU)}",
            file=sys.stderr,
        )
        return 2
    for name in names:
        if name in GPU and not torch.cuda.is_available():
            print(f"\n{name}: skipped, because this machine has no CUDA device")
            continue
        begin = time.perf_counter()
        print(f"\n{name} …", flush=True)
        importlib.import_module(f"bench.{name}").run()
        print(f"\n{name}: {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
