"""Random training programs, compared with a single process and with torch's DDP.

The suite runs about a hundred programs from fixed seeds, half of them in ``make test-slow``; with
PHALANX_SOAK set (``make soak``) it runs thousands from new seeds. `ddp.fuzz` defines a program. A
failure is shrunk and prints how to reproduce it.
"""

import os
import random
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from cases import in_two_suites
from phalanx.testing import ThreadRanks

from .fuzz import check
from .fuzz.check import Failure, compare, is_for_torch, on_rank, run, run_all, shrink
from .fuzz.draw import HOOKS, draw, settle
from .fuzz.features import FEATURES, without
from .fuzz.program import (
    OPAQUE,
    TRANSPARENT,
    Hook,
    Pass,
    Program,
    Turn,
    Uneven,
    from_json,
    to_json,
)

SOAK = "PHALANX_SOAK" in os.environ
SHARES = 8
"""Number of tests that share the programs on threads."""
DRAWN = 128
"""Number of programs on threads in the suite."""
COUNT = (4000 if SOAK else DRAWN) // SHARES
ON_PROCESSES = 600 if SOAK else 16
"""Programs per backend."""
BATCH = 20
"""Programs run one after the other on one group of processes."""
START = random.randrange(10**6, 10**9) if SOAK else 0
"""The first seed."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
    pytest.mark.timeout(3600 if SOAK else 300),
]


def program_of(seed, backend="local"):
    return draw(seed, backend=backend)


def report(failure, runner):
    pytest.fail(str(shrink(failure, runner)), pytrace=False)


@pytest.mark.parametrize("share", in_two_suites(SHARES))
def test_programs_on_threads(threads, share):
    for seed in range(START + share * COUNT, START + (share + 1) * COUNT):
        program = program_of(seed)
        problem = run(program, threads)
        if problem is not None:
            report(Failure(program, problem), threads)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_programs_on_processes(ranks, backend):
    seeds = range(START, START + ON_PROCESSES)
    programs = sorted((program_of(seed, backend) for seed in seeds), key=lambda each: each.size)
    for _, group in groupby(programs, key=lambda each: each.size):
        cases = list(group)
        for first in range(0, len(cases), BATCH):
            for failure in run_all(cases[first : first + BATCH], ranks):
                report(failure, ranks)


BOTH = Pass(rows=(1, 1), uses=(15, 15))
"""A pass that uses everything on two ranks."""
FIRST, LAYER, HEAD = 0b0001, 0b0010, 0b0100


def turn(*passes, **options):
    return Turn(tuple(replace(BOTH, **each) for each in passes), **options)


def program(*turns, **options):
    return settle(Program(11, **{"output": "tuple", "turns": turns, **options}))


REDUCED, LOCAL = {}, {"local": True}
WEIGHTED = turn(
    {"rows": (2, 5), "weights": (2.0, 5.0), "local": True}, {"rows": (4, 3), "weights": (4.0, 3.0)}
)
REENTRANT = {"checkpointing": "reentrant", "output": "plain"}

REGRESSIONS = {
    "opaque output, weighted": program(WEIGHTED, output="plain"),
    "distribution, weighted": program(WEIGHTED, output="distribution"),
    "closure, weighted": program(WEIGHTED, output="closure"),
    "penalty on what forward leaves out, weighted": program(
        turn(
            {"local": True, "weights": (4.0, 4.0)},
            {"weights": (1.0, 1.0), "uses": (FIRST | HEAD, 15), "penalty": (15, 0)},
        )
    ),
    "opaque output, checkpointed": program(turn({"forwards": 2}), **REENTRANT),
    "opaque output, checkpointed on one rank": program(
        *[turn({"uses": (15, 15), "parts": (2, 2)})] * 3,
        checkpointed=(True, False),
        layers=2,
        **REENTRANT,
    ),
    "opaque output, checkpointed, optimizer in backward": program(
        *[turn({"local": True, "parts": (2, 2)}, {"parts": (2, 2)})] * 2,
        optimizer="sgd",
        in_backward=True,
        layers=2,
        **REENTRANT,
    ),
    "opaque output, checkpointed, low precision": program(
        turn(REDUCED), precision="bfloat16", **REENTRANT
    ),
    "frozen after it is wrapped": program(turn(REDUCED, frozen=HEAD), turn(REDUCED)),
    "autograd.grad, sums": program(turn({"probe": True}), reduce="sum"),
    "opaque output, uneven, gradients kept": program(
        turn(REDUCED, zero="keep"), turn(REDUCED), uneven=Uneven((1, 2)), output="plain"
    ),
    "uneven, gradients kept, accumulated": program(
        turn(REDUCED, zero="keep"), turn(LOCAL, REDUCED), uneven=Uneven((0, 2))
    ),
    "uneven, gradients kept, penalty": program(
        turn(REDUCED, zero="keep"),
        turn({"uses": (LAYER, LAYER), "penalty": (FIRST, FIRST)}),
        uneven=Uneven((2, 1)),
    ),
    "no parameter reached on one rank, weighted": program(
        turn({"uses": (15, 0), "local": True, "weights": (3.0, 3.0)}, {"weights": (1.0, 1.0)})
    ),
    "local gradients zeroed, weighted": program(
        turn({"local": True, "weights": (2.0, 3.0), "drop": "zero"}, {"weights": (10.0, 0.5)})
    ),
    "reduced gradients kept, weighted": program(turn(REDUCED, zero="keep"), WEIGHTED),
    "hook on a node": program(turn(REDUCED), bucket="many", hooks=(Hook("node", 2),)),
    "hook after the first turn": program(
        *[turn(REDUCED)] * 3, bucket="many", hooks=(Hook("post", 2, when=2),)
    ),
    "hook that replaces the gradient": program(
        *[turn(REDUCED)] * 3, bucket="many", hooks=(Hook("replace", 3, when=2),)
    ),
    "gradients that others have cleared stay on a rank that shadowed": program(
        turn(REDUCED), turn(REDUCED), comm_hook=True, uneven=Uneven((0, 1))
    ),
    "ranks differ in whether they sync buffers after a join": program(
        turn(LOCAL), turn(REDUCED), turn(REDUCED), buffers=True, uneven=Uneven((1, 2))
    ),
    "evaluation while others shadow": program(
        turn(REDUCED, evaluates=True), buffers=True, comm_hook=True, uneven=Uneven((1, 0))
    ),
    "hook on a node of a parameter that arrives twice": program(
        turn({"uses": (63, 63), "penalty": (26, 26)}),
        layers=3,
        checkpointing="reentrant",
        bucket="some",
        hooks=(Hook("node", 4),),
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(threads, name):
    problem = run(REGRESSIONS[name], threads)
    if problem is not None:
        pytest.fail(str(Failure(REGRESSIONS[name], problem)), pytrace=False)


# -- the fuzzer itself ---------------------------------------------------------------------


def test_programs_round_trip_through_json():
    for seed in range(300):
        program = draw(seed)
        assert from_json(to_json(program)) == program
        assert settle(program) == program


def test_every_feature_is_drawn():
    programs = [program_of(seed) for seed in range(DRAWN)]
    assert {each.output for each in programs} == {*OPAQUE, *TRANSPARENT}
    assert {hook.kind for each in programs for hook in each.hooks} == set(HOOKS)
    assert {each.checkpointing for each in programs} == {"none", "plain", "reentrant"}
    assert {turn.zero for each in programs for turn in each.turns} == {"none", "zero", "keep"}
    for name in ("tied", "buffers", "static", "comm_hook", "in_backward", "is_weighted", "clip",
                 "precision", "uneven"):  # fmt: skip
        assert 5 < sum(bool(getattr(each, name)) for each in programs) < DRAWN / 2, name
    for name in ("local", "penalty", "parts", "factors", "twice", "probe"):
        count = sum(any(getattr(each, name) for each in program.passes) for program in programs)
        assert count > 5, name
    assert sum(map(is_for_torch, programs)) > 15


@pytest.mark.parametrize("feature", FEATURES)
def test_removing_a_feature_is_idempotent(feature):
    for seed in range(40):
        program = without(draw(seed), feature)
        assert without(program, feature) == program


def simple():
    return Program(7, turns=(Turn((Pass(rows=(1, 2), uses=(15, 15)),)),))


def test_small_gradient_difference_is_detected():
    program = simple()
    traces = ThreadRanks(2).run(on_rank, args=([program],))
    results = [trace[0] for trace in traces]
    assert compare(program, results) is None
    results[1][0]["0.0"].gradients[2].view(-1)[1] += 1e-6
    assert "gradient 2 is" in compare(program, results)


def test_difference_from_torch_is_detected():
    program = simple()
    traces = ThreadRanks(2).run(on_rank, args=([program],))
    results = [trace[0] for trace in traces]
    results[0][1]["0"].parameters[0].view(-1)[0] += 1e-6
    assert "as torch's class has it" in compare(program, results)


def test_last_bit_difference_between_ranks_is_detected():
    program = simple()
    traces = ThreadRanks(2).run(on_rank, args=([program],))
    results = [trace[0] for trace in traces]
    gradient = results[1][0]["0.0"].gradients[0]
    gradient.copy_(torch.nextafter(gradient, gradient + 1))
    assert "not the same on all ranks" in compare(program, results)


def test_failures_are_shrunk(monkeypatch):
    def fails(program, runner):
        weighted = any(each.local and each.weights for each in program.passes)
        return "wrong" if weighted and program.optimizer else None

    monkeypatch.setattr(check, "run", fails)
    seed = next(seed for seed in range(1000) if fails(draw(seed), None))
    smaller = shrink(Failure(draw(seed), "wrong"), None).program
    assert fails(smaller, None)
    assert smaller.size == 2
    assert (smaller.hooks, smaller.uneven, smaller.buffers) == ((), None, False)
    assert [len(turn.passes) for turn in smaller.turns] == [2]
    plain = replace(smaller.turns[0].passes[0], weights=None, local=False)
    assert plain == Pass(rows=(1, 1), uses=(smaller.all_units,) * 2)
