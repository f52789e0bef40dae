"""Runs a program with all interpreters, compares what they did, and shrinks what fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.ddp import DDP
from phalanx.testing import RankFailures

from .draw import settle
from .oracle import Expected, Oracle
from .play import Note, Trace, all_used, play
from .program import TRANSPARENT, Program, describe, to_json

TIMEOUT = 20.0


@dataclass
class Failure:
    """A program, and what is wrong with it."""

    program: Program
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.problem}\n\n{describe(self.program)}\n\nRun it again, in tests/:\n"
            f"  python -m ddp.fuzz --program '{to_json(self.program)}'"
        )


def on_rank(context: Any, programs: list[Program]) -> list[tuple[Trace, Trace | None]]:
    """Run programs as one rank, all on one group."""
    group = context.group(programs[0].backend)
    results = []
    for program in programs:
        theirs = play(program, group, TorchDDP) if is_for_torch(program) else None
        results.append((play(program, group, DDP), theirs))
    return results


def is_for_torch(program: Program) -> bool:
    """Whether torch's class supports a program."""
    everything = all_used(program)
    return not (
        program.is_weighted
        or program.reduce == "sum"
        or program.uneven is not None
        or program.precision is not None
        or program.comm_hook
        or program.in_backward
        or program.output not in TRANSPARENT
        or (program.checkpointing == "reentrant" and not program.static)
        or program.static
        or any(turn.frozen or turn.evaluates for turn in program.turns)
        # Its own hook on the node comes first.
        or any(hook.kind == "node" and hook.when >= 0 for hook in program.hooks)
        or not all(_pass_is_for_torch(each, everything) for each in program.passes)
    )


def _pass_is_for_torch(each: Any, everything: bool) -> bool:
    reaches_used = all(
        not penalty & ~use for penalty, use in zip(each.penalty, each.uses, strict=False)
    )
    return (
        each.inside
        and not (each.parts and any(each.parts))
        and reaches_used
        and (everything or each.forwards == 1)
        and not each.twice
        and not each.probe
        and (each.drop == "keep" or not each.local)  # it counts what was used, dropped or not
        and all(each.uses)
    )


def run(program: Program, runner: Any) -> str | None:
    """Run a program and tell what is wrong, or None."""
    try:
        results = runner.run(on_rank, program.size, args=([program],), timeout=TIMEOUT)
    except RankFailures as error:
        return str(error)
    return compare(program, [result[0] for result in results])


def run_all(programs: list[Program], runner: Any) -> Iterator[Failure]:
    """Run programs of one size on one group, and yield those that fail."""
    size = programs[0].size
    try:
        results = runner.run(on_rank, size, args=(programs,), timeout=TIMEOUT * 3)
    except RankFailures as error:
        failures = [Failure(each, problem) for each in programs if (problem := run(each, runner))]
        yield from failures or [Failure(programs[0], f"only together with others: {error}")]
        return
    for number, program in enumerate(programs):
        problem = compare(program, [result[number] for result in results])
        if problem is not None:
            yield Failure(program, problem)


# -- comparison ----------------------------------------------------------------------------


def tolerance(program: Program) -> float:
    """How much gradients may be off, relative to the largest element."""
    if program.precision is None:
        return 1e-9
    # Parameters that differ by rounding may be rounded to other numbers of the small type.
    is_exact = program.precision == "float32" and program.optimizer is None
    return 1e-5 if is_exact else 5e-2


def compare(program: Program, results: list[tuple[Trace, Trace | None]]) -> str | None:
    """Compare all ranks with the oracle, with each other, and with torch's class."""
    limit = tolerance(program)
    traces = [ours for ours, _ in results]
    # Parameters are compared first: those that a turn ends with, before gradients of the next.
    rounded = traces if program.precision is not None else []
    ends = {moment: note.parameters for trace in rounded for moment, note in trace.items()}
    expected = Oracle(program, ends).run()
    for moment, wanted in expected.items():
        for rank, (ours, theirs) in enumerate(results):
            if moment not in ours:
                continue
            where = f"at {moment} on rank {rank}"
            problem = _off_oracle(ours[moment], wanted, moment, rank, limit)
            if problem is not None:
                return f"{where}: {problem}"
            if theirs is not None:
                problem = _off_torch(ours[moment], theirs[moment], limit)
                if problem is not None:
                    return f"{where}: {problem}"
        if wanted.reduced:
            problem = _ranks_differ([trace[moment] for trace in traces if moment in trace])
            if problem is not None:
                return f"at {moment}: {problem}"
    return None


def _off_oracle(mine: Note, wanted: Expected, moment: str, rank: int, limit: float) -> str | None:
    if "." in moment and mine.reductions != wanted.reductions:
        return f"gradients were reduced {mine.reductions} times, not {wanted.reductions}"
    pairs: list[tuple[str, Any, Any]] = []
    if wanted.gradients is not None:
        pairs += _numbered("gradient", mine.gradients, wanted.gradients[rank])
    pairs += _numbered("parameter", mine.parameters, wanted.parameters)
    pairs += _numbered("buffer", mine.buffers, wanted.buffers[rank])
    for number, values in wanted.seen[rank].items():
        pairs += _numbered(f"what hook {number} saw:", mine.seen.get(number, []), values)
    return _first_difference(pairs, "the oracle", limit)


def _off_torch(mine: Note, theirs: Note, limit: float) -> str | None:
    pairs = _numbered("gradient", mine.gradients, theirs.gradients)
    pairs += _numbered("parameter", mine.parameters, theirs.parameters)
    pairs += _numbered("buffer", mine.buffers, theirs.buffers)
    return _first_difference(pairs, "torch's class", limit)


def _ranks_differ(notes: list[Note]) -> str | None:
    for kind in ("gradients", "parameters"):
        for number, values in enumerate(zip(*(getattr(n, kind) for n in notes), strict=True)):
            same = all(
                (a is None) == (values[0] is None) and (a is None or torch.equal(a, values[0]))
                for a in values
            )
            if not same:
                return f"{kind} {number} are not the same on all ranks"
    return None


def _numbered(what: str, mine: list[Any], wanted: list[Any]) -> list[tuple[str, Any, Any]]:
    if len(mine) != len(wanted):
        return [(f"{what} (there are {len(mine)}, not {len(wanted)})", None, torch.zeros(()))]
    return [(f"{what} {i}", a, b) for i, (a, b) in enumerate(zip(mine, wanted, strict=True))]


def _first_difference(pairs: list[tuple[str, Any, Any]], who: str, limit: float) -> str | None:
    for what, mine, wanted in pairs:
        if not _close(mine, wanted, limit):
            return f"{what} is {_show(mine)}, not {_show(wanted)}, as {who} has it"
    return None


def _close(mine: Tensor | None, wanted: Tensor | None, limit: float) -> bool:
    if mine is None or wanted is None:
        return mine is wanted
    if not mine.numel():
        return mine.shape == wanted.shape
    largest = max(wanted.abs().max().item(), 1e-2)
    return bool((mine - wanted).abs().max().item() <= limit * largest)


def _show(value: Tensor | None) -> str:
    if value is None:
        return "None"
    numbers = [f"{each:.6g}" for each in value.flatten().tolist()[:4]]
    return f"[{', '.join(numbers)}{', ...' if value.numel() > 4 else ''}]"


# -- shrinking -----------------------------------------------------------------------------


def shrink(failure: Failure, runner: Any, *, seconds: float = 60.0) -> Failure:
    """Make a failing program smaller, while it still fails."""
    until = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in simpler(failure.program):
            if time.monotonic() > until:
                return failure
            problem = run(smaller, runner)
            if problem is not None:
                failure, changed = Failure(smaller, problem), True
                break
    return failure


def simpler(program: Program) -> Iterator[Program]:
    """Yield what a program could be made into, what saves most first."""
    for candidate in _simpler(program):
        settled = settle(candidate)
        if settled != program and settled.turns:
            yield settled


def _simpler(program: Program) -> Iterator[Program]:
    turns = program.turns
    for i in range(len(turns)):
        rest = turns[:i] + turns[i + 1 :]
        yield _fit(replace(program, turns=rest))
    if program.size > 2:
        yield with_size(program, program.size - 1)
    plain = Program(program.seed)
    for name in (
        "uneven", "optimizer", "precision", "comm_hook", "checkpointing", "hooks", "clip",
        "buffers", "static", "find_unused", "in_backward", "tied", "reduce", "views", "bucket",
        "broadcasts", "checkpointed", "inputs_need_gradients", "zeroing",
    ):  # fmt: skip
        if getattr(program, name) != getattr(plain, name):
            yield replace(program, **{name: getattr(plain, name)})
    for i in range(len(program.hooks)):
        yield replace(program, hooks=program.hooks[:i] + program.hooks[i + 1 :])
    if program.output != "tuple":
        yield replace(program, output="tuple")
    if program.layers > 1:
        yield _with_layers(program, program.layers - 1)
    for i, turn in enumerate(turns):
        for smaller in _simpler_turns(program, turn):
            yield replace(program, turns=(*turns[:i], smaller, *turns[i + 1 :]))


def _simpler_turns(program: Program, turn: Any) -> Iterator[Any]:
    passes = turn.passes
    for i in range(len(passes)):
        if len(passes) > 1:
            yield replace(turn, passes=passes[:i] + passes[i + 1 :])
    for name, value in (("frozen", 0), ("evaluates", False), ("zero", "none"), ("steps", True)):
        if getattr(turn, name) != value:
            yield replace(turn, **{name: value})
    size = program.size
    defaults = {
        "weights": None, "given": False, "parts": (), "penalty": (), "factors": (), "forwards": 1,
        "twice": False, "probe": False, "drop": "keep", "edit": 1.0, "inside": True,
        "rows": (1,) * size, "uses": (program.all_units,) * size,
    }  # fmt: skip
    for i, each in enumerate(passes):
        for name, value in defaults.items():
            if getattr(each, name) != value:
                smaller = replace(each, **{name: value})
                yield replace(turn, passes=(*passes[:i], smaller, *passes[i + 1 :]))


def _fit(program: Program) -> Program:
    """Have an uneven loop be no longer than there are turns."""
    if program.uneven is None:
        return program
    lengths = tuple(min(length, len(program.turns)) for length in program.uneven.lengths)
    return replace(program, uneven=replace(program.uneven, lengths=lengths))


def with_size(program: Program, size: int) -> Program:
    """Leave out the last ranks."""
    uneven = program.uneven
    if uneven is not None:
        uneven = replace(uneven, lengths=uneven.lengths[:size])
    program = replace(program, size=size, checkpointed=program.checkpointed[:size], uneven=uneven)
    names = ("rows", "uses", "parts", "penalty", "factors")

    def cut(each: Any) -> Any:
        shorter = {name: getattr(each, name)[:size] for name in names}
        weights = None if each.weights is None else each.weights[:size]
        return replace(each, weights=weights, **shorter)

    return _fit(_map_passes(program, cut))


def _with_layers(program: Program, layers: int) -> Program:
    """Leave out the last hidden layer."""
    low = (1 << (layers + 1)) - 1

    def squeeze(masks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(mask & low | mask >> 1 & ~low for mask in masks)

    smaller = _map_passes(
        program, lambda each: replace(each, uses=squeeze(each.uses), penalty=squeeze(each.penalty))
    )
    turns = tuple(replace(turn, frozen=squeeze((turn.frozen,))[0]) for turn in smaller.turns)
    return replace(smaller, layers=layers, tied=program.tied and layers > 1, turns=turns)


def _map_passes(program: Program, change: Callable[[Any], Any]) -> Program:
    turns = tuple(replace(t, passes=tuple(map(change, t.passes))) for t in program.turns)
    return replace(program, turns=turns)
