"""A step of an elastic run, and the loop over this rank's share of its micro-batches.

The loop seeds the generators, restores the buffers and fetches the data of a micro-batch before the
user's code runs, and afterwards checks that it called `MicroBatch.backward` once. When the last
micro-batch is done, ranks exchange what else the step needs (losses, weights, buffers), and the
gradients of the whole step are in ``.grad``.

A mistake that one rank finds fails the group, so that all ranks raise it. Leaving the loop early is
reported by the next step of an optimizer or of the run, not in the loop, so that an exception that
passes through it is not masked.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..ddp._autograd_hooks import find_tensors
from ..ddp._summation_tree import ordered_sum
from ..errors import InvalidState, RankMismatch
from ..groups._call_site import user_site
from ._randomness import derive_seed, seed_generators

if TYPE_CHECKING:
    from ._loader import ElasticLoader
    from ._run import ElasticRun

SIGNATURE_BITS = 48  # of the hash of a batch's shapes; a float64 holds them exactly
NO_WEIGHT = -1.0
_running = threading.local()  # has `is_managed` while this thread is in `MicroBatch.backward`


class LoopRecord(NamedTuple):
    """What a rank tells the others at the end of a loop, as numbers of equal count on all ranks."""

    losses: list[float]
    weights: list[float]  # `NO_WEIGHT` for each, or at least 0
    signature: float  # a hash of the shapes of its batches
    means_changed: float  # whether its micro-batches changed buffers; see `BufferAverage`
    firsts_changed: float

    def pack(self, longest: int) -> list[float]:
        padding = [0.0] * (longest - len(self.losses))
        return [*self.losses, *padding, *self.weights, *padding, *self[2:]]

    @classmethod
    def unpack(cls, row: list[float], count: int, longest: int) -> LoopRecord:
        return cls(row[:count], row[longest : longest + count], *row[2 * longest :])


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
        batch = self.batch
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise InvalidState(
                f"micro.inputs and micro.targets need a batch of two elements, got a "
                f"{type(batch).__name__}{size}; use micro.batch"
            )
        return batch

    def __repr__(self) -> str:
        return f"<MicroBatch {self.number} of step {self._loop.step.number}>"

    def backward(
        self, loss: Tensor, *, weight: float | None = None, report: Any = None, **kwargs: Any
    ) -> None:
        """Run the backward pass of the loss, once per micro-batch.

        Arguments:
            loss: the mean loss of this micro-batch, a scalar.
            weight: how many items `loss` averages over, such as tokens, if that varies. Give it for
                every micro-batch of a step or for none.
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
        self._losses: list[float] = []
        self._open_loop: MicroBatchLoop | None = None

    @property
    def loss(self) -> float:
        """The mean loss of all micro-batches of all ranks, weighted if they have weights.

        Of the last loop, if the step has several. It is added up in the order of the gradients, so
        it has the same bits at every world size.
        """
        if self._loss is None:
            raise InvalidState(
                f"step.loss is available only after the micro-batch loop of step {self.number}"
            )
        return self._loss

    @property
    def losses(self) -> list[float]:
        """The losses of all micro-batches of all ranks in the last loop, by number."""
        return list(self._losses)

    def __repr__(self) -> str:
        return f"<Step {self.number}: loss {'unknown' if self._loss is None else self._loss}>"

    def micro_batches(self, loader: ElasticLoader | None = None) -> Iterator[MicroBatch]:
        """Iterate over this rank's micro-batches; afterwards ``.grad`` is that of the whole step.

        Call `MicroBatch.backward` once for each, and do not leave the loop early. A step may have
        several loops, each with its own gradients, as a GAN has. Without a loader, `batch` is None.
        """
        self._check_complete("step.micro_batches()")
        run = self._run
        if run._current_step is not self:
            raise InvalidState(
                f"step {self.number} is over, or the run was restored meanwhile; use the step that "
                "run.steps() yields"
            )
        self._open_loop = MicroBatchLoop(run, self, loader)
        return iter(self._open_loop)

    def _check_complete(self, caller: str) -> None:
        """Raise, on all ranks, if something else is called before a loop has ended."""
        loop = self._open_loop
        if loop is None:
            return
        if loop.backward_passes == len(loop.numbers):
            loop.fail(
                f"{caller} was called before the loop over the micro-batches of step {self.number} "
                "was over. Let the for loop run to its end; zip() and break leave it early"
            )
        else:
            loop.fail(
                f"{caller} was called after {loop.backward_passes} of {len(loop.numbers)} "
                f"micro-batches of this rank in step {self.number}. Call it after the loop, and do "
                "not break out of the loop: the other ranks wait for the rest"
            )

    def _finish_loop(self, loss: float, losses: list[float]) -> None:
        self._open_loop, self._loss, self._losses = None, loss, losses
        self._phase += 1


class MicroBatchLoop:
    """One loop over this rank's micro-batches of a step."""

    def __init__(self, run: ElasticRun, step: Step, loader: ElasticLoader | None) -> None:
        self.numbers = range(run._plan.block.lo, run._plan.block.hi)
        self.step = step
        self._run = run
        self._loader = loader
        self._current: MicroBatch | None = None
        self._weights: list[float] = []
        self._losses: list[float] = []
        self._signature = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        run, step, loader = self._run, self.step, self._loader
        if loader is not None and loader not in run.loaders:
            self.fail(
                "step.micro_batches() takes a loader that run.loader() of this run has made, got "
                f"another {type(loader).__name__}"
            )
        run._check_parameters()
        run._reducer.begin_fold(run._fold)
        previous = self._set_previous_aside()
        run._buffers.begin()
        for number in self.numbers:
            batch = None
            if loader is not None:
                batch = loader._fetch(loader.next_loop, number)
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
            try:
                run._buffers.collect(number)
            except InvalidState as error:
                self.fail(str(error))
            self._current = None
        self._finish(previous)

    def refuse_unmanaged_backward(self) -> None:
        """Raise for a call of backward in the loop that is not `MicroBatch.backward`."""
        # Another run may train the same parameters, after this one has failed.
        if not getattr(_running, "is_managed", False) and self._run.group.failure() is None:
            self.fail(
                f"backward() was called on a tensor in the micro-batches of step {self.step.number}"
                ". Call micro.backward(loss) instead of loss.backward()"
            )

    @property
    def backward_passes(self) -> int:
        """How many micro-batches of this rank had their backward pass."""
        return len(self._losses)

    def fail(self, message: str) -> NoReturn:
        """Raise here, and fail the group, so that the other ranks raise too."""
        # Clear it first, or the next call would report it again.
        self.step._open_loop = None
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
        first = loader.shapes = loader.shapes or text
        if text != first:
            self.fail(
                f"micro-batch {number} of step {self.step.number} has {text}; the first one had "
                f"{first}. Micro-batches must have constant shapes: pad them in collate_fn"
            )
        place = f"{text} of loader {loader.key}, loop {loader.next_loop}"
        digest = hashlib.sha256(place.encode()).digest()
        self._signature = int.from_bytes(digest[: SIGNATURE_BITS // 8], "little")

    # -- backward --------------------------------------------------------------------------

    def run_backward(
        self, micro: MicroBatch, loss: Any, weight: float | None, report: Any, kwargs: Any
    ) -> None:
        run, step = self._run, self.step
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
        self._check_weight(micro, weight)
        micro._backward_calls += 1
        self._weights.append(NO_WEIGHT if weight is None else float(weight))
        self._losses.append(float(report.detach() if isinstance(report, Tensor) else report))
        # With weights, the sum of all is known only after the loop.
        run._fold.divisor = float(run.micro_batches) if weight is None else 1.0
        if weight == 0:
            loss = None  # it contributes nothing, even if it is NaN
        elif weight is not None:
            loss = loss * weight
        outer, _running.is_managed = getattr(_running, "is_managed", False), True
        try:
            run._reducer.run_micro_batch(run._fold, loss, **kwargs)
        except InvalidState as error:  # of ours: a late or sparse gradient
            self.fail(str(error))
        finally:
            _running.is_managed = outer

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = repr(loss)
            if isinstance(loss, Tensor):
                got = f"a tensor of shape {list(loss.shape)}"
            self.fail(f"loss must be a tensor with one element, got {got}")
        if not loss.requires_grad:
            self.fail("the loss does not require a gradient: it depends on no parameter")

    def _check_weight(self, micro: MicroBatch, weight: float | None) -> None:
        if weight is not None and not 0 <= weight < math.inf:
            self.fail(f"weight must be a finite number, at least 0, got {weight}")
        before = self._weights[:1]
        if before and (weight is None) != (before[0] == NO_WEIGHT):
            self.fail(
                f"micro-batch {micro.number} of step {self.step.number} has weight {weight}, the "
                f"one before had {None if weight is not None else before[0]}. Give all "
                "micro-batches a weight, or none"
            )

    # -- the end of the loop ---------------------------------------------------------------

    def _finish(self, previous: list[tuple[Tensor, Tensor]]) -> None:
        run, step = self._run, self.step
        records = self._exchange()
        losses = [loss for record in records for loss in record.losses]
        weights = [weight for record in records for weight in record.weights]
        without = [weight == NO_WEIGHT for weight in weights]
        if any(without) and not all(without):
            raise RankMismatch(
                f"micro-batches {[i for i, each in enumerate(without) if each]} of step "
                f"{step.number} have no weight and the others have one. Give all a weight, or none",
                group=run._comm.label,
                operation="micro_batches",
            )
        if without[0]:
            loss = ordered_sum(losses) / run.micro_batches
        else:
            total = math.fsum(weights)
            products = [w * each if w else 0.0 for w, each in zip(weights, losses, strict=True)]
            loss = ordered_sum(products) / total if total else math.nan
            self._divide(total)
        run._buffers.finish(
            means_changed=any(record.means_changed for record in records),
            firsts_changed=any(record.firsts_changed for record in records),
        )
        with torch.no_grad():
            for parameter, before in previous:
                new = parameter.grad
                parameter.grad = before if new is None else before + new
        if self._loader is not None:
            self._loader._advance()
        step._finish_loop(loss, losses)
        seed_generators(derive_seed(run.seed, "after", step.number, step._phase))

    def _exchange(self) -> list[LoopRecord]:
        """Return every rank's record of the loop."""
        run, comm = self._run, self._run._comm
        changes = map(float, run._buffers.changes())
        mine = LoopRecord(self._losses, self._weights, float(self._signature), *changes)
        if comm.size == 1:
            return [mine]
        lengths = [len(block) for block in run._plan.blocks]
        longest = max(lengths)
        row = mine.pack(longest)
        # A sum is the fastest collective. What the others add is its identity, so numbers are kept.
        rows = torch.full((comm.size, len(row)), -0.0, dtype=torch.float64, device=comm.device)
        rows[comm.rank] = torch.tensor(row, dtype=torch.float64)
        comm.sum(rows.view(-1)).wait()
        pairs = zip(rows.tolist(), lengths, strict=True)
        records = [LoopRecord.unpack(row, count, longest) for row, count in pairs]
        if len({record.signature for record in records}) > 1:
            texts = comm.exchange("no loader" if self._loader is None else str(self._loader))
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RankMismatch(
                f"ranks have different micro-batches in step {self.step.number} ({listed}). Use "
                "the same loader on all ranks, and pad batches in collate_fn",
                group=comm.label,
                operation="micro_batches",
            )
        return records

    def _divide(self, total: float) -> None:
        gradients = [p.grad for p in self._run._reducer.parameters if p.grad is not None]
        if gradients and total:
            with torch.no_grad():
                torch._foreach_div_(gradients, total)
