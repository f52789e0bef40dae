"""Look for programs that fail, or run one again."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from contextlib import ExitStack
from typing import Any

import torch

from phalanx.testing import RankPool, ThreadRanks

from .check import Failure, run, shrink
from .draw import draw
from .features import without
from .program import describe, from_json


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ddp.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="run the program of this seed")
    parser.add_argument("--program", help="run this program, as JSON")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds to try")
    parser.add_argument("--backend", default="local", choices=["local", "shm", "gloo"])
    parser.add_argument("--without", default="", help="features to leave out, with commas")
    parser.add_argument("--shrink", type=float, default=30.0, help="seconds to shrink a failure")
    parser.add_argument("--stop", type=int, default=1, help="stop after so many failures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with ExitStack() as stack:
        runner: Any = ThreadRanks(4)
        if options.backend != "local":
            runner = stack.enter_context(RankPool(4, preload=("ddp.fuzz.play", "torch._dynamo")))
        return search(options, runner)


def search(options: argparse.Namespace, runner: Any) -> int:
    """Run programs until enough have failed."""
    failures, began = 0, time.monotonic()
    for program in programs(options):
        problem = run(program, runner)
        if problem is None:
            continue
        failures += 1
        found = shrink(Failure(program, problem), runner, seconds=options.shrink)
        print(
            f"--- seed {program.seed}, after {time.monotonic() - began:.0f} s\n{found}\n",
            flush=True,
        )
        if failures >= options.stop:
            break
    print(f"{failures} failures, {time.monotonic() - began:.1f} s")
    return int(failures > 0)


def programs(options: argparse.Namespace) -> Any:
    """The programs that were asked for."""
    if options.program is not None:
        program = from_json(options.program)
        print(describe(program))
        yield program
        return
    seeds = range(options.start, options.start + options.count)
    for seed in seeds if options.seed is None else [options.seed]:
        program = draw(seed, backend=options.backend)
        for feature in filter(None, options.without.split(",")):
            program = without(program, feature)
        yield program


if __name__ == "__main__":
    sys.exit(main())
