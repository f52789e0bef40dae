"""Runs a program as one rank, with `phalanx.DDP` or torch's class, and notes what it sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx.ddp import DDP, MixedPrecision
from phalanx.ddp.hooks import allreduce_hook
from phalanx.join import Join

from .net import by_rank, loss_of, make, rows_of, whole_loss
from .program import Hook, Pass, Program, Turn, Uneven

CAPS = {"many": 1e-6, "some": 3e-4, "one": 25}
"""Sizes of buckets, in MiB."""
CLIP = 0.2


@dataclass
class Note:
    """What a rank has at some moment."""

    gradients: list[Tensor | None]
    parameters: list[Tensor]
    buffers: list[Tensor]
    seen: dict[int, list[Tensor]] = field(default_factory=dict)
    """What hooks on a parameter saw in its ``.grad`` during the pass, by their number."""
    reductions: int | None = None
    """How often gradients were reduced in a pass, if that is known."""


Trace = dict[str, Note]
"""Notes by the moment: ``turn.pass`` after a backward pass, ``turn`` after a turn, ``end``."""


def optimizer_options(program: Program) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer of a program and its options."""
    if program.optimizer == "adam":
        return torch.optim.Adam, {"lr": 0.02}
    return torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def clip(program: Program, parameters: list[nn.Parameter]) -> None:
    """Clip gradients as the program says."""
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters:
        return  # torch raises
    if program.clip == "norm":
        nn.utils.clip_grad_norm_(parameters, CLIP)
    elif program.clip == "value":
        nn.utils.clip_grad_value_(parameters, CLIP)


def factor_of(rank: int) -> float:
    """What hooks that multiply multiply by; it differs, so that what is reduced already shows."""
    return 1 + 0.25 * rank


def addend_of(rank: int) -> float:
    """What hooks that add add."""
    return 0.125 * (rank + 1)


class Player:
    """One rank that runs a program."""

    def __init__(self, program: Program, group: Any, kind: type) -> None:
        self.program, self.group, self.rank = program, group, group.rank()
        self.kind = kind
        self.net = make(program, self.rank)
        self.nodes: list[Any] = []
        self.trace: Trace = {}
        self.seen: dict[int, list[Tensor]] = {}
        self.reductions: int | None = None
        self.parameters = list(self.net.parameters())
        self.register(-1)
        self.ddp = self.wrap()
        self.optimizer = self.make_optimizer()
        self.register(0)

    # -- what is set up --------------------------------------------------------------------

    def wrap(self) -> Any:
        program = self.program
        options: dict[str, Any] = {
            "process_group": self.group,
            "bucket_cap_mb": CAPS[program.bucket],
            "gradient_as_bucket_view": program.views,
            "static_graph": program.static,
            "find_unused_parameters": program.find_unused,
            "forward_sync_buffers": program.broadcasts,
        }
        if self.kind is TorchDDP:
            options["find_unused_parameters"] = not all_used(program)
            return TorchDDP(self.net, **options)
        if program.precision is not None:
            options["mixed_precision"] = MixedPrecision(
                torch.bfloat16, getattr(torch, program.precision)
            )
        ddp = DDP(self.net, reduce=program.reduce, **options)
        if program.comm_hook:
            ddp.register_comm_hook(None, allreduce_hook)
        return ddp

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        if self.program.optimizer is None:
            return None
        kind, options = optimizer_options(self.program)
        if not self.program.in_backward:
            return kind(self.ddp.parameters(), **options)
        optimizer = self.ddp._register_fused_optim(kind, **options)
        if self.program.clip is not None:
            optimizer.register_step_pre_hook(lambda *_: clip(self.program, self.parameters))
        return None

    def register(self, turn: int) -> None:
        """Register the hooks whose time has come."""
        for number, hook in enumerate(self.program.hooks):
            if hook.when == turn:
                self.register_one(number, hook)

    def register_one(self, number: int, hook: Hook) -> None:
        parameter = self.parameters[hook.parameter % len(self.parameters)].requires_grad_()
        factor, addend = factor_of(self.rank), addend_of(self.rank)

        def look() -> None:
            assert parameter.grad is not None, f"a {hook.kind} hook finds no gradient"
            self.seen.setdefault(number, []).append(parameter.grad.detach().clone())

        def add(*_: Any) -> None:
            look()
            parameter.grad.add_(addend)

        def replace(_: Any) -> None:
            look()
            parameter.grad = parameter.grad + addend

        if hook.kind == "tensor":
            parameter.register_hook(lambda gradient: gradient * factor)
        elif hook.kind == "post":
            parameter.register_post_accumulate_grad_hook(add)
        elif hook.kind == "replace":
            parameter.register_post_accumulate_grad_hook(replace)
        else:
            node = accumulator(parameter)
            self.nodes.append(node)
            if hook.kind == "prehook":
                node.register_prehook(lambda gradients: (gradients[0] * factor,))
            else:
                assert hook.kind == "node"
                node.register_hook(add)

    # -- what it does ----------------------------------------------------------------------

    def play(self) -> Trace:
        uneven = self.program.uneven
        turns = range(self.program.length(self.rank))
        for turn in turns if uneven is None else self.run_out(turns, uneven):
            self.turn(turn)
        if uneven is not None:
            self.note("after")
            for turn in range(max(uneven.lengths), len(self.program.turns)):
                self.turn(turn)
        self.note("end")
        return self.trace

    def run_out(self, turns: range, uneven: Uneven) -> Iterator[int]:
        """Go through the turns of this rank while others may have more or fewer."""
        optimizers = [] if self.optimizer is None else [self.optimizer]
        options = {"divide_by_initial_world_size": uneven.divides_by_all, "optimizers": optimizers}
        if not uneven.block:
            yield from phalanx.uneven(turns, self.ddp, **options)
            return
        with Join([self.ddp], **options):
            yield from turns

    def turn(self, number: int) -> None:
        turn = self.program.turns[number]
        if number:
            self.register(number)
        self.freeze(turn)
        if turn.evaluates:
            self.evaluate(number)
        for place, each in enumerate(turn.passes):
            self.backward(each, (number, place))
            if each.edit != 1:
                for gradient in self.held():
                    gradient.mul_(each.edit)
            self.zero(each.drop)
        if not turn.passes[-1].local:
            if not self.program.in_backward:
                clip(self.program, self.parameters)
            if turn.steps and self.optimizer is not None:
                self.optimizer.step()
        self.zero(turn.zero)
        self.note(f"{number}")

    def freeze(self, turn: Turn) -> None:
        frozen = set(self.net.units(turn.frozen))
        for parameter in self.parameters:
            parameter.requires_grad_(parameter not in frozen)

    def evaluate(self, number: int) -> None:
        self.ddp.eval()
        with torch.no_grad():
            rows = rows_of(self.program, (number, -1), 0, self.rank)
            self.ddp(rows, self.program.all_units, "none")
        self.ddp.train()

    def forward(self, rows: Tensor, uses: int) -> Any:
        program = self.program
        checkpoints = by_rank(program.checkpointed, self.rank, True)
        return self.ddp(rows, uses, program.checkpointing if checkpoints else "none")

    def backward(self, each: Pass, where: tuple[int, int]) -> None:
        weight = None if each.weights is None else each.weights[self.rank]
        self.reductions = self.count()
        with ExitStack() as stack:
            if each.local and each.inside:
                stack.enter_context(self.ddp.no_sync())
            loss = self.loss(each, where)
            if each.probe:
                trained = [p for p in self.parameters if p.requires_grad]
                torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
            with self.ddp.no_sync() if each.local and not each.inside else nullcontext():
                for again in range(1 + each.twice):
                    self.seen = {}
                    self.call(loss, weight, each, retain_graph=each.twice and not again)
                    self.note(f"{where[0]}.{where[1]}" + "'" * again)

    def count(self) -> int | None:
        """How often gradients were reduced so far."""
        return None if self.kind is TorchDDP else len(self.ddp.stats())

    def call(self, loss: Tensor, weight: float | None, each: Pass, **options: Any) -> None:
        if self.kind is TorchDDP:
            loss.backward(**options)
            return
        self.ddp.weight = None if each.given else weight
        if each.given and weight is not None:
            self.ddp.backward(loss, weight=weight, **options)
        else:
            loss.backward(**options)

    def loss(self, each: Pass, where: tuple[int, int]) -> Tensor:
        losses = []
        for forward in range(each.forwards):
            rows = rows_of(self.program, where, forward, self.rank)
            if self.program.inputs_need_gradients:
                rows.requires_grad_()
            output = self.forward(rows, each.uses[self.rank])
            losses.append(loss_of(self.net, output, each, self.rank))
        return whole_loss(self.net, losses, each, self.rank)

    def held(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def zero(self, how: str) -> None:
        if how == "keep":
            return
        zeroing = self.program.zeroing
        whole = {"wrapper": self.ddp, "module": self.net, "optimizer": self.optimizer}.get(zeroing)
        if whole is not None:
            whole.zero_grad(set_to_none=how == "none")
            return
        for parameter in self.parameters:
            if how == "none":
                parameter.grad = None
            elif parameter.grad is not None and zeroing == "new zeros":
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def note(self, moment: str) -> None:
        before, self.reductions = self.reductions, self.count()
        with torch.no_grad():
            self.trace[moment] = Note(
                [None if p.grad is None else p.grad.clone() for p in self.parameters],
                [p.detach().clone() for p in self.parameters],
                [buffer.clone() for buffer in self.net.buffers()],
                self.seen,
                None if before is None or self.reductions is None else self.reductions - before,
            )


def accumulator(parameter: Tensor) -> Any:
    """The node of autograd that adds to a parameter's gradient."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def all_used(program: Program) -> bool:
    """Whether every pass uses every parameter on every rank."""
    everything = program.all_units
    return all(
        use | by_rank(each.penalty, rank, 0) == everything
        for each in program.passes
        for rank, use in enumerate(each.uses)
    )


def play(program: Program, group: Any, kind: type = DDP) -> Trace:
    """Run a program as one rank."""
    return Player(program, group, kind).play()
