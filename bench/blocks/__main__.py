"""``python -m bench.blocks``: one workload on several block managers, on the CPU, one thread.

::

    python -m bench.blocks                                # all, with the peer that VLLM_SRC names
    python -m bench.blocks --impl pagoda,vllm-xxhash --scenario decode,hit
    python -m bench.blocks --scale 0.05                   # smoke
    python -m bench.blocks --adapter mypackage.bench:MyAdapter …

Each implementation runs in its own process. Compare only numbers of the same invocation. The exit status is 1
if answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from bench.blocks.adapters import ADAPTERS
from bench.blocks.phases import SCENARIOS, run_one
from bench.blocks.report import answers_differ, best_of, report
from bench.measure import save

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.blocks")
    parser.add_argument("--impl", default=",".join(ADAPTERS), help="comma separated")
    parser.add_argument(
        "--adapter", default="", help="more implementations, as module:Class, comma separated"
    )
    parser.add_argument("--scenario", default=",".join(SCENARIOS), help="comma separated")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--repeat", type=int, default=1, help="fresh processes per implementation; the best is kept"
    )
    parser.add_argument("--gc", action="store_true", help="leave the cyclic garbage collector on")
    parser.add_argument("--save", default="blocks", help="write bench/results/NAME.json; empty: do not write")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(options: argparse.Namespace, impl: str) -> Row:
    """Measure one implementation in its own process."""
    command = [sys.executable, "-m", "bench.blocks", "--one", impl, "--scenario", options.scenario]
    command += ["--page", str(options.page), "--scale", str(options.scale), "--seed", str(options.seed)]
    command += ["--gc"] * options.gc
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    line = next((each for each in done.stdout.splitlines() if each.startswith("@@")), None)
    if line:
        return json.loads(line[2:])
    return {"impl": impl, "error": f"ended with {done.returncode}: {done.stderr[-1500:]}"}


def main() -> int:
    options = arguments()
    scenarios = options.scenario.split(",")
    if options.one:
        result = run_one(options.one, options.page, options.scale, options.seed, options.gc, scenarios)
        print("@@" + json.dumps(result))
        return 0

    impls = [each for each in (options.impl + "," + options.adapter).split(",") if each]
    cells: dict[str, list[Row]] = {}
    # Implementations take turns, so that a noisy minute affects all of them.
    for repeat in range(options.repeat):
        for impl in impls:
            row = measured(options, impl)
            cells.setdefault(impl, []).append(row)
            if options.save:  # after each measurement, so that an interrupt loses little
                save(options.save, [best_of(tries) for tries in cells.values()])
            done = f"# {repeat + 1}/{options.repeat} {impl}"
            print(done, row.get("error", ""), file=sys.stderr, flush=True)
    rows = [best_of(tries) for tries in cells.values()]
    print(report(rows))
    return int(any("error" in row for row in rows) or bool(answers_differ(rows)))


if __name__ == "__main__":
    raise SystemExit(main())
