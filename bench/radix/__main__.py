"""``python -m bench.radix``: one workload on several prefix trees, on the CPU, one thread.

::

    python -m bench.radix                                 # all, with the peers that SGLANG_SRC names
    python -m bench.radix --impl sglang-rust,pagoda --page 1,64
    python -m bench.radix --scale 0.05                    # smoke
    python -m bench.radix --adapter mypackage.bench:MyAdapter …

Each (implementation, page size) runs in its own process. Compare only numbers of the same invocation. The
exit status is 1 if answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from bench.measure import save
from bench.radix.adapters import PEERS, Pagoda
from bench.radix.phases import run_one
from bench.radix.report import answers_differ, best_of, report

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.radix")
    parser.add_argument("--impl", default=",".join([Pagoda.name, *PEERS]), help="comma separated")
    parser.add_argument(
        "--adapter", default="", help="more implementations, as module:Class, comma separated"
    )
    parser.add_argument("--page", default="1,16,64")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--leaves", type=int, default=10_000, help="leaves of the tree for evictions")
    parser.add_argument("--evict-leaves", default="", help="also measure evictions with these: 1000,40000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="fresh processes per cell; the best is kept")
    parser.add_argument("--evict-only", action="store_true", help="measure only evictions")
    parser.add_argument("--gc", action="store_true", help="leave the cyclic garbage collector on")
    parser.add_argument("--ref", default="sglang-rust")
    parser.add_argument("--save", default="radix", help="write bench/results/NAME.json; empty: do not write")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(options: argparse.Namespace, impl: str, page: int, leaves: int, evict_only: bool) -> Row:
    """Measure one cell in its own process."""
    command = [sys.executable, "-m", "bench.radix", "--one", f"{impl}@{page}", "--leaves", str(leaves)]
    command += ["--scale", str(options.scale), "--seed", str(options.seed)]
    command += ["--gc"] * options.gc + ["--evict-only"] * evict_only
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    environment = dict(os.environ, PATH=path, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    line = next((each for each in done.stdout.splitlines() if each.startswith("@@")), None)
    return json.loads(line[2:]) if line else {"impl": impl, "page": page, "error": done.stderr[-1500:]}


def main() -> int:
    options = arguments()
    if options.one:
        impl, page = options.one.rsplit("@", 1)
        result = run_one(
            impl, int(page), options.scale, options.seed, options.leaves, options.gc, options.evict_only
        )
        print("@@" + json.dumps(result))
        return 0

    impls = [each for each in (options.impl + "," + options.adapter).split(",") if each]
    pages = [int(each) for each in options.page.split(",")]
    plan = [(page, options.leaves, options.evict_only) for page in pages]
    more_leaves = {int(each) for each in options.evict_leaves.split(",") if each} - {options.leaves}
    plan += [(pages[0], leaves, True) for leaves in sorted(more_leaves)]
    cells: dict[tuple[str, int, int], list[Row]] = {}
    # Implementations take turns, so that a noisy minute affects all of them.
    for repeat in range(options.repeat):
        for page, leaves, evict_only in plan:
            for impl in impls:
                row = measured(options, impl, page, leaves, evict_only)
                cells.setdefault((impl, page, leaves), []).append(row)
                if options.save:  # after each measurement, so that an interrupt loses little
                    save(options.save, [best_of(tries) for tries in cells.values()])
                done = f"# {repeat + 1}/{options.repeat} {impl}, page {page}, {leaves:,} leaves"
                print(done, row.get("error", ""), file=sys.stderr, flush=True)
    rows = [best_of(tries) for tries in cells.values()]
    print(report(rows, options.ref))
    return int(any("error" in row for row in rows) or answers_differ(rows))


if __name__ == "__main__":
    raise SystemExit(main())
