"""Draws programs from seeds, and says what of a program is not defined.

Everything that is drawn has one right answer. `settle` rules out what has none, with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from .program import HIDDEN, OPAQUE, TRANSPARENT, Hook, Pass, Program, Turn, Uneven

HOOKS = ("tensor", "prehook", "post", "replace", "node")


def draw(seed: int, *, backend: str = "local", largest: int = 4) -> Program:
    """Draw a program; the same seed gives the same one."""
    return settle(_Drawer(Random(seed), largest).program(seed, backend))


class _Drawer:
    def __init__(self, rng: Random, largest: int) -> None:
        self.rng, self.largest = rng, largest

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def program(self, seed: int, backend: str) -> Program:
        rng = self.rng
        for_torch = self.chance(0.25)
        size = rng.randint(2, self.largest)
        layers = rng.choice([1, 1, 2, 3])
        kinds = TRANSPARENT if for_torch or self.chance(0.5) else OPAQUE
        program = Program(
            seed,
            size,
            backend,
            layers=layers,
            tied=layers > 1 and self.chance(0.3),
            output=rng.choice(kinds),
            bucket=rng.choice(["one", "some", "many"]),
            views=self.chance(0.7),
            buffers=self.chance(0.3),
            broadcasts=self.chance(0.8),
            inputs_need_gradients=self.chance(0.5),
            find_unused=self.chance(0.2),
            checkpointing=rng.choice(
                ["none", "none", "plain", "plain" if for_torch else "reentrant"]
            ),
            optimizer=rng.choice([None, "sgd", "adam"]),
            clip=rng.choice([None, None, None, "norm", "value"]),
            zeroing=rng.choice(["wrapper", "module", "optimizer", "hand", "new zeros"]),
            hooks=self.hooks() if self.chance(0.4) else (),
        )
        if self.chance(0.4):
            program = replace(program, checkpointed=tuple(self.chance(0.5) for _ in range(size)))
        if not for_torch:
            program = self.beyond_torch(program)
        count = rng.randint(1, 4)
        if program.uneven is not None:
            count = max(program.uneven.lengths) + rng.randint(0, 1)
        return self.with_turns(program, count, for_torch=for_torch)

    def beyond_torch(self, program: Program) -> Program:
        rng = self.rng
        lengths = tuple(rng.randint(0, 3) for _ in range(program.size))
        if self.chance(0.25) and any(lengths):
            uneven = Uneven(lengths, block=self.chance(0.4), divides_by_all=self.chance(0.6))
            program = replace(program, uneven=uneven)
        return replace(
            program,
            reduce="sum" if self.chance(0.15) else "mean",
            precision=rng.choice(["float32", "bfloat16"]) if self.chance(0.12) else None,
            static=self.chance(0.15),
            comm_hook=self.chance(0.15),
            in_backward=program.optimizer is not None and self.chance(0.4),
        )

    def hooks(self) -> tuple[Hook, ...]:
        rng = self.rng
        return tuple(
            Hook(rng.choice(HOOKS), rng.randint(0, 15), rng.randint(-1, 2))
            for _ in range(rng.randint(1, 3))
        )

    # -- turns -----------------------------------------------------------------------------

    def with_turns(self, program: Program, count: int, *, for_torch: bool) -> Program:
        weighted = not for_torch and program.reduce == "mean" and self.chance(0.5)
        freezes = not for_torch and not program.static and self.chance(0.15)
        turns = [self.turn(program, weighted, freezes, for_torch) for _ in range(count)]
        return replace(program, turns=tuple(turns))

    def turn(self, program: Program, weighted: bool, freezes: bool, for_torch: bool) -> Turn:
        rng = self.rng
        locals_ = rng.choice([0, 0, 0, 1, 1, 2])
        passes = [self.one_pass(program, for_torch) for _ in range(locals_ + 1)]
        passes = [replace(each, local=i < locals_) for i, each in enumerate(passes)]
        if program.uneven is not None and self.chance(0.2):
            passes[-1] = replace(passes[-1], local=True)
        if weighted and self.chance(0.8):
            given = self.chance(0.5)
            passes = [replace(each, weights=self.weights(each), given=given) for each in passes]
        return Turn(
            tuple(passes),
            steps=self.chance(0.9),
            zero=rng.choice(["none", "none", "zero", "keep", "keep"]),
            frozen=rng.getrandbits(program.units) & rng.getrandbits(program.units)
            if freezes
            else 0,
            evaluates=not for_torch and self.chance(0.1),
        )

    def weights(self, each: Pass) -> tuple[float, ...]:
        if self.chance(0.1):
            return tuple(float(self.rng.randint(0, 3)) for _ in each.rows)
        if self.chance(0.4):
            return tuple(float(rows) for rows in each.rows)
        return tuple(self.rng.choice([0.5, 1.0, 3.0, 10.0]) for _ in each.rows)

    def one_pass(self, program: Program, for_torch: bool) -> Pass:
        rng, size = self.rng, program.size
        everything = program.all_units
        uses = self.masks(program, 0.5, everything)
        penalty = self.masks(program, 0.0, 0) if self.chance(0.25) else ()
        if for_torch:
            uses = tuple(use or everything for use in uses)
        if for_torch and penalty:
            penalty = tuple(mask & use for mask, use in zip(penalty, uses, strict=True))
        return Pass(
            rows=tuple(rng.randint(1, 4) for _ in range(size)),
            uses=uses,
            parts=()
            if for_torch or self.chance(0.6)
            else self.by_rank(lambda: rng.randint(0, 2), size),
            penalty=penalty,
            inside=for_torch or self.chance(0.7),
            factors=self.factors(size),
            forwards=2
            if self.chance(0.15) and not (for_torch and set(uses) != {everything})
            else 1,
            twice=not for_torch and self.chance(0.1),
            probe=not for_torch and self.chance(0.1),
            edit=0.5 if self.chance(0.1) else 1.0,
            drop=rng.choice(["none", "zero"]) if self.chance(0.15) else "keep",
        )

    def by_rank(self, choose, size):
        """Draw the same for all ranks, or something for each."""
        if self.chance(0.5):
            return (choose(),) * size
        return tuple(choose() for _ in range(size))

    def masks(self, program: Program, share_of_all: float, default: int) -> tuple[int, ...]:
        if self.chance(share_of_all):
            return (default,) * program.size

        def choose() -> int:
            kind = self.rng.random()
            if kind < 0.15:
                return 0
            if kind < 0.4:
                return program.all_units
            return self.rng.getrandbits(program.units)

        return self.by_rank(choose, program.size)

    def factors(self, size: int) -> tuple[float, ...]:
        if self.chance(0.85):
            return ()
        return self.by_rank(lambda: self.rng.choice([0.0, 1.0, -2.0]), size)


def _same_graph(each: Pass, one: Pass) -> Pass:
    """Give a pass the graph of another, on all ranks."""
    penalty = one.penalty[:1] * len(one.rows)
    return replace(
        each,
        uses=one.uses[:1] * len(one.rows),
        parts=one.parts[:1] * len(one.rows),
        penalty=penalty,
        forwards=1,
        twice=False,
    )


# -- what has no one right answer ----------------------------------------------------------


def settle(program: Program) -> Program:
    """Take out what is undefined or refused, whoever put it in: the draw, or making it smaller."""
    program = _settle_wrapping(program)
    turns, window = [], _Window()
    last = len(program.turns) if program.uneven is None else max(program.uneven.lengths)
    for number, turn in enumerate(program.turns):
        ends = number in (last - 1, len(program.turns) - 1)
        turns.append(_settle_turn(program, turn, window, ends=ends))
    program = replace(program, turns=tuple(turns))
    reached = [
        program.reached(turn, each, rank)
        for turn in program.turns
        for each in turn.passes
        for rank in range(program.size)
    ]
    needs = not all(reached) or program.checkpointing == "reentrant"
    # Without it, a loss that reaches no parameter has no graph.
    return replace(program, inputs_need_gradients=True) if needs else program


def _settle_wrapping(program: Program) -> Program:
    if program.static and program.turns:
        one = program.turns[0].passes[0]
        turns = tuple(
            replace(turn, passes=tuple(_same_graph(each, one) for each in turn.passes), frozen=0)
            for turn in program.turns
        )
        program = replace(program, checkpointed=(), turns=turns)
    if program.precision is not None:
        optimizer = "sgd" if program.optimizer else None
        # Adam enlarges rounding, and so does adding up gradients of the small type.
        program = replace(program, optimizer=optimizer, buffers=False, tied=False)
        if program.output in HIDDEN:
            # Layers are run again before a pass is seen, and find no copies of the small type.
            program = replace(program, checkpointing="none")
    if program.optimizer is None:
        program = replace(program, in_backward=False)
    if program.zeroing == "optimizer" and (program.optimizer is None or program.in_backward):
        program = replace(program, zeroing="module")
    if program.uneven is not None:
        # A rank without data registers nothing.
        hooks = tuple(replace(hook, when=min(hook.when, 0)) for hook in program.hooks)
        program = replace(program, hooks=hooks)
        if not any(program.uneven.lengths) or len(program.turns) < max(program.uneven.lengths):
            program = replace(program, uneven=None)
    return program


class _Window:
    """The passes since gradients were reduced last."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.is_open = self.has_weight = False
        self.differs = self.has_unreached = False
        self.is_weighted = False

    def take(self, program: Program, turn: Turn, each: Pass) -> Pass:
        if self.is_open and self.is_weighted != (each.weights is not None):
            # Whether one pass counts as a number of samples and another as a rank is undefined.
            each = replace(each, weights=(1.0,) * program.size if self.is_weighted else None)
        self.is_open, self.is_weighted = True, each.weights is not None
        reached = [program.reached(turn, each, rank) for rank in range(program.size)]
        self.differs |= len(set(reached)) > 1
        self.has_unreached |= not (all(reached) and all(each.factors))
        return each


def _settle_turn(program: Program, turn: Turn, window: _Window, *, ends: bool) -> Turn:
    passes = []
    if window.is_open or turn.frozen == program.all_units:
        # Whether the gradient of a parameter that is frozen meanwhile counts is undefined.
        turn = replace(turn, frozen=0)
    for place, drawn in enumerate(turn.passes):
        each = _settle_pass(program, turn, drawn)
        if ends and place == len(turn.passes) - 1:
            each = replace(each, local=False)
        each = window.take(program, turn, each)
        is_plain = each.weights is None and program.reduce == "mean" and program.uneven is None
        if each.local and not is_plain:
            # What is in ``.grad`` before it is reduced is then up to the implementation.
            each = replace(each, edit=1.0)
        each = replace(each, drop=_settle_zero(program, each.drop, window))
        if not each.local or each.drop != "keep":
            window.begin()
        passes.append(each)
    zero = _settle_zero(program, turn.zero, window)
    if zero != "keep":
        window.begin()
    return replace(turn, passes=tuple(passes), zero=zero)


def _settle_zero(program: Program, zero: str, window: _Window) -> str:
    """Choose how gradients are dropped in the middle of an accumulation."""
    if not window.is_open or zero == "keep":
        return zero
    if window.is_weighted and window.has_unreached:
        return "keep"  # dropping None or zero gradients cannot be observed
    # Ranks would differ in which gradients are zeros, and which are none.
    return "none" if window.differs else zero


def _settle_pass(program: Program, turn: Turn, each: Pass) -> Pass:
    reached = [program.reached(turn, each, rank) for rank in range(program.size)]
    if program.output in HIDDEN and not all(reached):
        # A pass from no output to no parameter cannot be observed.
        each = replace(each, uses=(program.all_units,) * program.size, parts=())
    if program.in_backward or program.checkpointing == "reentrant":
        # A step changes what the second pass needs; autograd.grad refuses reentrant passes.
        each = replace(each, probe=False, twice=each.twice and not program.in_backward)
    if program.buffers and each.twice:
        each = replace(each, twice=False)
    if program.precision is not None:
        each = replace(each, forwards=1)
    if program.shadows:
        # Who shadows makes one backward pass for each forward pass, as it was told in forward.
        each = replace(each, forwards=1, twice=False, inside=True)
    return each
