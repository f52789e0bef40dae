"""Features that can be left out of a program, to look for what else is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .draw import settle
from .program import HIDDEN, OPAQUE, Program


def without(program: Program, feature: str) -> Program:
    """Leave out a feature, one of `FEATURES`."""
    return settle(FEATURES[feature](program))


def _on_passes(program: Program, **values: Any) -> Program:
    turns = tuple(
        replace(turn, passes=tuple(replace(each, **values) for each in turn.passes))
        for turn in program.turns
    )
    return replace(program, turns=turns)


def _opaque(program: Program) -> Program:
    return replace(program, output="tuple") if program.output in OPAQUE else program


def _unreached(program: Program) -> Program:
    turns = tuple(
        replace(
            turn,
            passes=tuple(
                replace(each, uses=tuple(use or program.all_units for use in each.uses))
                for each in turn.passes
            ),
        )
        for turn in program.turns
    )
    return replace(program, turns=turns)


def _zero(old: str, new: str) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        turns = tuple(
            replace(
                turn,
                zero=new if turn.zero == old else turn.zero,
                passes=tuple(
                    replace(each, drop=new if each.drop == old else each.drop)
                    for each in turn.passes
                ),
            )
            for turn in program.turns
        )
        return replace(program, turns=turns)

    return change


def _unchanged(program: Program) -> Program:
    """Leave gradients that are being reduced unchanged."""
    kept = _zero("none", "keep")(_zero("zero", "keep")(program))
    return _on_passes(replace(kept, in_backward=False, clip=None), edit=1.0)


def _kept(program: Program) -> Program:
    turns = tuple(
        replace(turn, zero="none" if turn.zero == "keep" else turn.zero) for turn in program.turns
    )
    return replace(program, turns=turns)


def _late_hooks(program: Program) -> Program:
    hooks = tuple(
        hook
        for hook in program.hooks
        if hook.kind in ("tensor", "prehook") or (hook.when < 0 and hook.kind != "node")
    )
    return replace(program, hooks=hooks)


FEATURES: dict[str, Callable[[Program], Program]] = {
    "opaque": _opaque,
    "probe": lambda program: _on_passes(program, probe=False),
    "penalty": lambda program: _on_passes(program, penalty=()),
    "unreached": _unreached,
    "zeroed": _zero("zero", "none"),
    "kept": _kept,
    "late hooks": _late_hooks,
    "adding hooks in reentrant passes": lambda program: (
        replace(program, hooks=tuple(h for h in program.hooks if h.kind in ("tensor", "prehook")))
        if program.checkpointing == "reentrant"
        else program
    ),
    "hooks": lambda program: replace(program, hooks=()),
    "weights": lambda program: _on_passes(program, weights=None),
    "checkpointing": lambda program: replace(program, checkpointing="none"),
    "weighted accumulation": lambda program: (
        _on_passes(program, weights=None) if any(e.local for e in program.passes) else program
    ),
    "uneven kept": lambda program: (
        _on_passes(_kept(program), twice=False) if program.uneven is not None else program
    ),
    "hidden checkpointed": lambda program: (
        replace(program, output="plain")
        if program.output in HIDDEN and program.checkpointing == "reentrant"
        else program
    ),
    "hidden": lambda program: replace(
        program, output="plain" if program.output in HIDDEN else program.output
    ),
    "changes while others shadow": lambda program: (
        _unchanged(program) if program.shadows else program
    ),
    "shadowing": lambda program: replace(
        program, comm_hook=program.comm_hook and program.uneven is None
    ),
    "buffers of uneven accumulation": lambda program: replace(
        program,
        buffers=program.buffers
        and not (program.uneven is not None and any(each.local for each in program.passes)),
    ),
    "probes of sums": lambda program: (
        _on_passes(program, probe=False) if program.reduce == "sum" else program
    ),
    "uneven": lambda program: replace(program, uneven=None),
    "precision": lambda program: replace(program, precision=None),
    "buffers": lambda program: replace(program, buffers=False),
    "frozen first": lambda program: replace(
        program, turns=(replace(program.turns[0], frozen=0), *program.turns[1:])
    ),
    "frozen": lambda program: replace(
        program, turns=tuple(replace(turn, frozen=0) for turn in program.turns)
    ),
    "evaluation": lambda program: replace(
        program, turns=tuple(replace(turn, evaluates=False) for turn in program.turns)
    ),
}
