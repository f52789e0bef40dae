"""A step of an elastic run, and the loop over this rank's share of its micro-batches.

The loop seeds the generators, restores the buffers and fetches the data of a micro-batch before the
user's code runs, and afterwards checks that it called `MicroBatch.backward` once. When the last
micro-batch is done, ranks exchange what else the step needs (losses, weights, buffers), and the
gradients of the whole step are in ``.grad``.

A mistake that one rank finds fails the group, so that all ranks raise it. A loop that the user
leaves early is found when the optimizer steps or the next step begins, not in the loop: if an
exception is the reason, that exception says why.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..ddp._autograd_hooks import find_tensors
from ..ddp._summation_tree import tree_sum
from ..errors import InvalidArgument, InvalidState, RankMismatch
from ..groups._call_site import user_site
from ._randomness import derive_seed, seed_generators

if TYPE_CHECKING:
    from ._loader import ElasticLoader
    from ._run import ElasticRun

SIGNATURE_BITS = 48  # of the hash of a batch's shapes; a float64 holds them exactly


class MicroBatch:
    """One micro-batch of a step, on the rank that runs it."""

    def __init__(self, loop: MicroBatchLoop, number: int, batch: Any) -> None:
        self.number = number
        """Its number in the step, from 0; equal at every world size."""
        self.batch = batch
        """What the collate function returned; None without a loader."""
        self._loop = loop
        self._backward_calls = 0

    @property
    def inputs(self) -> Any:
        """The first part of a batch that is a pair."""
        return self._pair()[0]

    @property
    def targets(self) -> Any:
        """The second part of a batch that is a pair."""
        return self._pair()[1]

    def _pair(self) -> Sequence[Any]:
        if not isinstance(self.batch, (tuple, list)) or len(self.batch) != 2:
            kind = type(self.batch).__name__
            raise InvalidState(
                f"inputs and targets are the parts of a batch that is a pair, but this is a {kind}"
                "; use micro.batch"
            )
        return self.batch

    def backward(
        self, loss: Tensor, *, weight: float | None = None, report: Any = None, **kwargs: Any
    ) -> None:
        """Run the backward pass of the loss, once per micro-batch.

        Arguments:
            loss: the mean loss of this micro-batch, a scalar.
            weight: what the mean is over, such as a number of tokens, where micro-batches differ.
                Give it for every micro-batch of a step or for none.
            report: the loss to report in `Step.loss`, if `loss` is scaled, as by a `GradScaler`.
            kwargs: arguments of ``Tensor.backward``.
        """
        self._loop.run_backward(self, loss, weight, loss if report is None else report, kwargs)


class Step:
    """One step of the optimizer: V micro-batches, over all ranks."""

    def __init__(self, run: ElasticRun, number: int) -> None:
        self.number = number
        """How many steps the run has made, counting this one."""
        self._phase = 0
        """How many loops over micro-batches it has completed."""
        self._run = run
        self._loss: float | None = None
        self._open_loop: MicroBatchLoop | None = None

    @property
    def loss(self) -> float:
        """The mean loss of all micro-batches of all ranks, weighted if they have weights.

        Of the last loop, if the step has several. It is added up in the order of the gradients, so
        it has the same bits at every world size.
        """
        if self._loss is None:
            raise InvalidState(f"the loss of step {self.number} is known after its micro-batches")
        return self._loss

    def micro_batches(self, loader: ElasticLoader | None = None) -> Iterator[MicroBatch]:
        """Iterate over this rank's micro-batches; afterwards ``.grad`` is that of the whole step.

        Call `MicroBatch.backward` once for each, and do not leave the loop early. A step may have
        several loops, each with its own gradients, as a GAN has. Without a loader, `batch` is None.
        """
        self._check_complete()
        run = self._run
        if run._current_step is not self:
            raise InvalidState(f"step {self.number} is over; use the step that run.steps() yields")
        self._open_loop = MicroBatchLoop(run, self, loader)
        return iter(self._open_loop)

    def _check_complete(self) -> None:
        """Raise, on all ranks, if a loop was left before its last micro-batch."""
        loop = self._open_loop
        if loop is not None:
            loop.fail(
                f"the loop over the micro-batches of step {self.number} ended after "
                f"{loop.backward_passes} of {len(loop.numbers)} on this rank. Do not break out of "
                "it: the other ranks wait for the rest"
            )

    def _finish_loop(self, loss: float) -> None:
        self._open_loop, self._loss = None, loss
        self._phase += 1


class MicroBatchLoop:
    """One loop over this rank's micro-batches of a step."""

    def __init__(self, run: ElasticRun, step: Step, loader: ElasticLoader | None) -> None:
        self.numbers = range(run._fold.block.lo, run._fold.block.hi)
        self._run = run
        self._step = step
        self._loader = loader
        self._current: MicroBatch | None = None
        self._weights: list[float | None] = []
        self._losses: list[float] = []
        self._signature = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        run, step, loader = self._run, self._step, self._loader
        if loader is not None and loader not in run.loaders:
            raise InvalidArgument("this loader was not made by run.loader() of this run")
        run._reducer.begin_fold(run._fold)
        previous = self._set_previous_aside()
        run._buffers.begin()
        for number in self.numbers:
            batch = None
            if loader is not None:
                batch = loader.fetch(loader.next_loop, number)
                self._check_shapes(loader, number, batch)
            run._buffers.restore()
            seed_generators(derive_seed(run.seed, "step", step.number, step._phase, number))
            micro = self._current = MicroBatch(self, number, batch)
            yield micro
            if micro._backward_calls == 0:
                self.fail(
                    f"micro-batch {number} of step {step.number} had no backward pass. Call "
                    "micro.backward(loss) in the body of the loop; the micro-batches cannot be "
                    "collected in a list"
                )
            run._buffers.collect(number)
            self._current = None
        self._finish(previous)

    @property
    def backward_passes(self) -> int:
        """How many micro-batches of this rank had their backward pass."""
        return len(self._losses)

    def fail(self, message: str) -> NoReturn:
        """Raise here, and fail the group, so that the other ranks raise too."""
        # Only once: the failure is also found by the next call.
        self._step._open_loop = None
        self._run.group.abort(message)
        raise InvalidState(f"{message} ({user_site()}, rank {self._run.group.rank()})")

    def _set_previous_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Take gradients that were not zeroed, to add those of this loop to them."""
        previous: list[tuple[Tensor, Tensor]] = []
        for parameter in self._run._reducer.parameters:
            if parameter.grad is not None:
                # A copy, since it may be a view of a bucket.
                previous.append((parameter, parameter.grad.detach().clone()))
                parameter.grad = None
        return previous

    def _check_shapes(self, loader: ElasticLoader, number: int, batch: Any) -> None:
        shapes = [f"{t.dtype}{list(t.shape)}".removeprefix("torch.") for t in find_tensors(batch)]
        text = ", ".join(shapes) or "no tensor"
        first = self._run._batch_shapes.setdefault(id(loader), text)
        if text != first:
            self.fail(
                f"micro-batch {number} of step {self._step.number} has {text}; the first one had "
                f"{first}. Micro-batches must have constant shapes: pad them in collate_fn"
            )
        digest = hashlib.sha256(text.encode()).digest()
        self._signature = int.from_bytes(digest[: SIGNATURE_BITS // 8], "little")

    # -- backward --------------------------------------------------------------------------

    def run_backward(
        self, micro: MicroBatch, loss: Any, weight: float | None, report: Any, kwargs: Any
    ) -> None:
        run, step = self._run, self._step
        if micro is not self._current or step._open_loop is not self:
            self.fail(
                f"micro-batch {micro.number} of step {step.number} is over: call micro.backward() "
                "in the body of the loop"
            )
        if micro._backward_calls:
            self.fail(
                f"micro.backward() was called twice for micro-batch {micro.number} of step "
                f"{step.number}. Add the losses and call it once"
            )
        self._check_loss(loss)
        self._weights.append(_check_weight(weight))
        if (weight is None) != (self._weights[0] is None):
            self.fail(
                f"micro-batch {micro.number} of step {step.number} has weight {weight}, the one "
                f"before had {self._weights[0]}. Give all micro-batches a weight, or none"
            )
        micro._backward_calls += 1
        self._losses.append(float(report.detach() if isinstance(report, Tensor) else report))
        # With weights, the sum of all is known only after the loop.
        run._fold.divisor = float(run.micro_batches) if weight is None else 1.0
        run._reducer.run_micro_batch(run._fold, lambda: self._call_backward(loss, weight, kwargs))

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = repr(loss)
            if isinstance(loss, Tensor):
                got = f"a tensor of shape {list(loss.shape)}"
            raise InvalidArgument(f"loss must be a tensor with one element, got {got}")
        if not loss.requires_grad:
            raise InvalidArgument(
                "the loss does not require a gradient: it depends on no parameter"
            )

    def _call_backward(self, loss: Tensor, weight: float | None, kwargs: Any) -> None:
        if weight == 0:
            return  # nothing counts; the loss may be NaN
        if weight is not None:
            loss = loss * weight
        fold = self._run._fold

        def note_graph_task(_: object) -> None:
            fold.graph_task = torch._C._current_graph_task_id()

        assert loss.grad_fn is not None
        handle = loss.grad_fn.register_prehook(note_graph_task)
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        finally:
            handle.remove()
            fold.graph_task = None

    # -- the end of the loop ---------------------------------------------------------------

    def _finish(self, previous: list[tuple[Tensor, Tensor]]) -> None:
        run, step = self._run, self._step
        means_changed, firsts_changed = run._buffers.changes()
        rows = self._exchange([float(means_changed), float(firsts_changed)])
        losses, weights = [], []
        for row, count in zip(rows, run._block_lengths, strict=True):
            losses += row[:count]
            weights += row[run._longest_block : run._longest_block + count]
        if weights[0] < 0:  # there are none
            loss = tree_sum(losses) / run.micro_batches
        else:
            total = math.fsum(weights)
            products = [w * each if w else 0.0 for w, each in zip(weights, losses, strict=True)]
            loss = tree_sum(products) / total if total else math.nan
            self._divide(total)
        means_changed, firsts_changed = (any(row[i] for row in rows) for i in (-2, -1))
        run._buffers.finish(means_changed=means_changed, firsts_changed=firsts_changed)
        with torch.no_grad():
            for parameter, before in previous:
                new = parameter.grad
                parameter.grad = before if new is None else before + new
        if self._loader is not None:
            self._loader.advance()
        seed_generators(derive_seed(run.seed, "after", step.number, step._phase))
        step._finish_loop(loss)

    def _exchange(self, flags: list[float]) -> list[list[float]]:
        """Return every rank's row: losses, weights, signature, flags."""
        run = self._run
        padding = [0.0] * (run._longest_block - len(self.numbers))
        weights = [-1.0 if weight is None else weight for weight in self._weights]
        row = [*self._losses, *padding, *weights, *padding, float(self._signature), *flags]
        if run._comm.size == 1:
            return [row]
        rows = run._comm.gather_numbers(row, torch.float64)
        signatures = {each[2 * run._longest_block] for each in rows}
        if len(signatures) > 1:
            shapes = run._comm.exchange(run._batch_shapes.get(id(self._loader), "no loader"))
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(shapes))
            raise RankMismatch(
                f"micro-batches of step {self._step.number} have different shapes ({listed}). Use "
                "the same loader on all ranks, and pad batches in collate_fn",
                group=run._comm.label,
                operation="micro_batches",
            )
        return rows

    def _divide(self, total: float) -> None:
        gradients = [p.grad for p in self._run._reducer.parameters if p.grad is not None]
        if gradients and total:
            with torch.no_grad():
                torch._foreach_div_(gradients, total)


def _check_weight(weight: float | None) -> float | None:
    if weight is None:
        return None
    weight = float(weight)
    if not 0 <= weight < math.inf:
        raise InvalidArgument(f"weight must be a finite number, at least 0, got {weight:g}")
    return weight
