"""A step of an elastic run, and the loop over this rank's share of its micro-batches.

The loop seeds the generators, restores the buffers and fetches the data of a micro-batch before the
user's code runs, and afterwards checks that it called `MicroBatch.backward` once. When the last
micro-batch is done, a rank publishes what it contributes to the step (`_contributions`), gradients
are reduced, and buffers and losses follow. Then the gradients of the whole step are in ``.grad``.

In a run whose ranks may be lost (`phalanx run --elastic`), a lost rank is noticed at the end of the
loop. The survivors then form a group, tell each other which micro-batches they have, their own and
those that the lost rank had published, and the loop goes on with those that are missing
(`_recovery`). The loop ends with a barrier: see `_generations`.

A mistake that one rank finds fails the group, so that all ranks raise it. Leaving the loop early is
reported by the next step of an optimizer or of the run, not in the loop, so that an exception that
passes through it is not masked.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .. import _faultpoints as faultpoints
from ..ddp._autograd_hooks import find_tensors
from ..ddp._gradient_fold import GradientFold
from ..ddp._summation_tree import LeafBlock, ordered_sum
from ..errors import GroupError, InvalidState, RankMismatch, RendezvousError
from ..groups._call_site import user_site
from ._buffers import StagedBuffers
from ._contributions import Contributions, LoopFlags, LoopRecord
from ._cover import Cover
from ._generations import drop_frames
from ._randomness import derive_seed, seed_generators
from ._recovery import LoopRecovery

if TYPE_CHECKING:
    from ._loader import ElasticLoader
    from ._run import ElasticRun

SIGNATURE_BITS = 48  # of the hash of a batch's shapes; a float64 holds them exactly
NO_WEIGHT = -1.0
_running = threading.local()  # has `is_managed` while this thread is in `MicroBatch.backward`


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
    """One step of the run: `micro_batches` micro-batches, divided among the ranks."""

    def __init__(self, run: ElasticRun, number: int) -> None:
        self.number = number
        """How many steps the run has made, counting this one."""
        self._completed_loops = 0
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
        if loop.backward_passes == loop.planned:
            loop.fail(
                f"{caller} was called before the loop over the micro-batches of step {self.number} "
                "was over. Let the for loop run to its end; zip() and break leave it early"
            )
        else:
            loop.fail(
                f"{caller} was called after {loop.backward_passes} of {loop.planned} micro-batches "
                f"of this rank in step {self.number}. Call it after the loop, and do not break out "
                "of the loop: the other ranks wait for the rest"
            )

    def _finish_loop(self, loss: float, losses: list[float]) -> None:
        self._open_loop, self._loss, self._losses = None, loss, losses
        self._completed_loops += 1


class MicroBatchLoop:
    """One loop over this rank's micro-batches of a step."""

    def __init__(self, run: ElasticRun, step: Step, loader: ElasticLoader | None) -> None:
        self.step = step
        self.planned = len(run._plan.block)
        """How many micro-batches this rank is to run, as far as is known."""
        self._run = run
        self._loader = loader
        self._current: MicroBatch | None = None
        self._results: dict[int, tuple[float, float]] = {}
        """The loss and the weight of the micro-batches that this rank has run, by number."""
        self._signature = 0
        self._raised = ""  # by a backward pass; the loop must not go on after it
        self._fold = run._fold
        self._recovery: LoopRecovery | None = None  # after a rank was lost
        self._published: Contributions | None = None
        """Where this rank has published its sums, if it has."""
        self._staged: StagedBuffers | None = None
        """The buffers that it has published. `BufferAverage` may drop its own reference to them
        before `_published` is cleared."""
        self._previous_grads: list[tuple[Tensor, Tensor]] = []
        self._outcome: tuple[float, list[float]] | None = None
        """The loss of the step and of its micro-batches, once this rank has all of the step."""
        self._agreed_requests = 0  # to join or leave: the most that any rank knows of
        self._seconds = 0.0
        self._all_seconds: list[float] = []  # per micro-batch, by rank
        self._has_run = False  # all micro-batches of this rank's block

    def __iter__(self) -> Iterator[MicroBatch]:
        run, loader = self._run, self._loader
        if loader is not None and loader not in run.loaders:
            self.fail(
                "step.micro_batches() takes a loader that run.loader() of this run has made, got "
                f"another {type(loader).__name__}"
            )
        run._check_parameters()
        run._begin_section()
        has_regrouped = run._has_regrouped()
        failure: GroupError | RendezvousError | None = None
        try:
            if not has_regrouped:
                run._ensure_reducer()
                run._reducer.begin_fold(run._fold)
        except (GroupError, RendezvousError) as error:
            run._raise_unless_recoverable(error)
            failure = error
        self._previous_grads = self._stash_previous_grads()
        run._buffers.begin()
        try:
            if failure is None and not has_regrouped:
                yield from self._run_block(run._fold, run._plan.block)
                self._has_run = True
                failure = self._try_to_finish()
            if failure is not None or has_regrouped:
                yield from self._recover(failure)
        finally:
            self._release()
        self._complete()

    def _release(self) -> None:
        """Take back what this rank has published, and free what it holds for a recovery.

        A frame that an error keeps may keep this loop, but not the memory of a lost group.
        """
        if self._published is not None:
            self._published.clear()
        self._published = self._staged = None
        if self._recovery is not None:
            self._recovery.release()
            self._recovery = None

    def _run_block(self, fold: GradientFold, block: LeafBlock) -> Iterator[MicroBatch]:
        """Yield some micro-batches, and fold their gradients."""
        run, step, loader = self._run, self.step, self._loader
        self._fold = fold
        for number, merges in zip(range(block.lo, block.hi), block.merges, strict=True):
            batch = None
            if loader is not None:
                batch = loader._fetch(loader.next_loop, number)
                self._check_shapes(loader, number, batch)
            run._buffers.restore()
            seed_generators(
                derive_seed(run.seed, "step", step.number, step._completed_loops, number)
            )
            micro = self._current = MicroBatch(self, number, batch)
            if faultpoints.armed:
                faultpoints.reach("elastic:forward")
            began = time.perf_counter()
            yield micro
            self._seconds += time.perf_counter() - began
            if self._raised:
                self.fail(
                    f"the backward pass of micro-batch {number} of step {step.number} raised "
                    f"{self._raised}, and the loop went on. Its gradients are incomplete: do not "
                    "catch exceptions of micro.backward() in the loop"
                )
            if micro._backward_calls == 0:
                self.fail(
                    f"micro-batch {number} of step {step.number} had no backward pass. Call "
                    "micro.backward(loss) in the body of the loop; the micro-batches cannot be "
                    "collected in a list"
                )
            try:
                run._buffers.collect(number, merges)
            except InvalidState as error:
                self.fail(str(error))
            self._current = None
            if faultpoints.armed:
                faultpoints.reach("elastic:folded")

    def refuse_unmanaged_backward(self) -> None:
        """Raise for a call of backward in the loop that is not `MicroBatch.backward`."""
        # Another run may train the same parameters, after this one has failed.
        if not getattr(_running, "is_managed", False) and self._run._comm.failure() is None:
            self.fail(
                f"backward() was called on a tensor in the micro-batches of step {self.step.number}"
                ". Call micro.backward(loss) instead of loss.backward()"
            )

    @property
    def backward_passes(self) -> int:
        """How many micro-batches of this rank had their backward pass."""
        return len(self._results)

    def fail(self, message: str) -> NoReturn:
        """Raise here, and fail the group, so that the other ranks raise too."""
        # Clear it first, or the next call would report it again.
        self.step._open_loop = None
        self._run._fail(message)
        raise InvalidState(f"{message} ({user_site()}, rank {self._run._comm.rank})")

    def _stash_previous_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Take gradients that were not zeroed, to add those of this loop to them."""
        previous: list[tuple[Tensor, Tensor]] = []
        for _, parameter in self._run._named:
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
        if unfrozen := run._reducer.unfrozen_names():
            self.fail(
                f"parameter {unfrozen[0]!r} was unfrozen in the micro-batches of step {step.number}"
                ", which does not reduce its gradient. Call requires_grad_(True) before the loop, "
                "or requires_grad_(False) before micro.backward()"
            )
        self._check_weight(micro, weight)
        micro._backward_calls += 1
        reported = float(report.detach() if isinstance(report, Tensor) else report)
        self._results[micro.number] = reported, NO_WEIGHT if weight is None else float(weight)
        # With weights, the sum of all is known only after the loop.
        self._fold.divisor = self._divisor(has_weights=weight is not None)
        if weight == 0:
            loss = None  # it contributes nothing, even if it is NaN
        elif weight is not None:
            loss = loss * weight
        outer, _running.is_managed = getattr(_running, "is_managed", False), True
        if faultpoints.armed:
            faultpoints.reach("elastic:backward")
        try:
            run._reducer.run_micro_batch(self._fold, loss, **kwargs)
        except InvalidState as error:  # of ours: a late or sparse gradient
            self.fail(str(error))
        except Exception as error:
            self._raised = f"{type(error).__name__}: {error}"
            raise
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
        before = next(iter(self._results.values()), None)
        if before is not None and (weight is None) != (before[1] == NO_WEIGHT):
            self.fail(
                f"micro-batch {micro.number} of step {self.step.number} has weight {weight}, the "
                f"one before had {None if weight is not None else before[1]}. Give all "
                "micro-batches a weight, or none"
            )

    # -- the end of the loop ---------------------------------------------------------------

    def _try_to_finish(self) -> GroupError | RendezvousError | None:
        """End the loop; return the error if a rank was lost meanwhile."""
        try:
            self._finish()
        except (GroupError, RendezvousError) as error:
            self._run._raise_unless_recoverable(error)
            return error
        return None

    def _finish(self) -> None:
        """Combine what all ranks have run, if none was lost, and commit the loop."""
        run, contributions = self._run, self._run._contributions
        if contributions is None:
            self.fail(
                f"run.close() was called in the micro-batches of step {self.step.number}. Call it "
                "after the last step"
            )
        mine = self._record()
        contributions.write_record(mine)
        self._publish(contributions, mine.flags)
        run._reducer.reduce_fold()
        if faultpoints.armed:
            faultpoints.reach("elastic:reduced")
        records = contributions.exchange(mine, run._plan)
        self._check_signatures({record.signature for record in records})
        if faultpoints.armed:
            faultpoints.reach("elastic:recorded")
        losses = [loss for record in records for loss in record.losses]
        weights = [weight for record in records for weight in record.weights]
        outcome = self._apply_weights(losses, weights)
        flags = LoopFlags.combine(record.flags for record in records)
        run._buffers.finish(
            means_changed=bool(flags.means_changed), firsts_changed=bool(flags.firsts_changed)
        )
        self._agreed_requests = int(flags.known_requests)
        self._all_seconds = [record.seconds for record in records]
        self._pass_barrier(outcome)

    def _publish(self, contributions: Contributions, flags: LoopFlags) -> None:
        """Let survivors use the sums of this rank if it dies before the step is committed."""
        run = self._run
        if not run._has_dynamic_membership or not contributions.outlive_ranks:
            return
        self._staged = run._buffers.stage(
            means_changed=bool(flags.means_changed), firsts_changed=bool(flags.firsts_changed)
        )
        if faultpoints.armed:
            faultpoints.reach("elastic:publish")
        self._published = contributions
        contributions.publish(
            run._run_state.section,
            run._reducer,
            run._plan.block.nodes,
            run._fold.used,
            self._staged,
        )
        if faultpoints.armed:
            faultpoints.reach("elastic:published")

    def _apply_weights(
        self, losses: list[float], weights: list[float]
    ) -> tuple[float, list[float]]:
        """Divide the gradients by the sum of weights; return the losses."""
        run, step = self._run, self.step
        without = [weight == NO_WEIGHT for weight in weights]
        if any(without) and not all(without):
            raise RankMismatch(
                f"micro-batches {[i for i, each in enumerate(without) if each]} of step "
                f"{step.number} have no weight and the others have one. Give all a weight, or none",
                group=run._comm.label,
                operation="micro_batches",
            )
        if without[0]:
            return ordered_sum(losses) / run.micro_batches, losses
        total = math.fsum(weights)
        products = [w * each if w else 0.0 for w, each in zip(weights, losses, strict=True)]
        self._divide(total)
        return ordered_sum(products) / total if total else math.nan, losses

    def _divisor(self, *, has_weights: bool) -> float:
        """Return what the sum of gradients is divided by; with weights, `_divide` follows."""
        return 1.0 if has_weights else float(self._run.micro_batches)

    def _divide(self, total: float) -> None:
        gradients = [p.grad for p in self._run._reducer.parameters if p.grad is not None]
        if gradients and total:
            with torch.no_grad():
                torch._foreach_div_(gradients, total)

    def _pass_barrier(self, outcome: tuple[float, list[float]]) -> None:
        """Wait until every rank has all of the step. Passing the barrier is the commit."""
        self._outcome = outcome
        if self._run._has_dynamic_membership:
            if faultpoints.armed:
                faultpoints.reach("elastic:commit")
            self._run._comm.barrier()

    def _complete(self) -> None:
        """Show the user the committed step: ``.grad``, loader position, losses."""
        run, step = self._run, self.step
        assert self._outcome is not None
        if faultpoints.armed:
            faultpoints.reach("elastic:committed")
        with torch.no_grad():
            for parameter, before in self._previous_grads:
                new = parameter.grad
                parameter.grad = before if new is None else before + new
        if self._loader is not None:
            self._loader._advance()
        run._note_requests(self._agreed_requests)
        if run._worker is not None:
            run._worker.tell_progress(step.number)
        run._rebalance(self._all_seconds)
        step._finish_loop(*self._outcome)
        seed_generators(derive_seed(run.seed, "after", step.number, step._completed_loops))

    def _flags(self) -> LoopFlags:
        means_changed, firsts_changed = self._run._buffers.changed_kinds()
        return LoopFlags(
            float(means_changed), float(firsts_changed), float(self._run._known_requests)
        )

    def _record(self) -> LoopRecord:
        pairs = [self._results[number] for number in sorted(self._results)]
        return LoopRecord(
            [loss for loss, _ in pairs],
            [weight for _, weight in pairs],
            float(self._signature),
            self._seconds / len(pairs),
            self._flags(),
        )

    def _check_signatures(self, signatures: set[float]) -> None:
        comm = self._run._comm
        if len(signatures) > 1:
            texts = comm.exchange("no loader" if self._loader is None else str(self._loader))
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RankMismatch(
                f"ranks have different micro-batches in step {self.step.number} ({listed}). Use "
                "the same loader on all ranks, and pad batches in collate_fn",
                group=comm.label,
                operation="micro_batches",
            )

    # -- after a rank was lost -----------------------------------------------------------------

    def _recover(self, error: GroupError | RendezvousError | None) -> Iterator[MicroBatch]:
        """End the loop with the survivors; yield what they have to run again.

        `error`: what reported the lost rank; None if the survivors have regrouped already.
        """
        run = self._run
        recovery = self._recovery = LoopRecovery(run)
        if self._has_run:
            recovery.hold(run._fold, clones=False)
        run._buffers.take_nodes()  # sums of redone micro-batches start empty
        while True:
            drop_frames(error)
            try:
                has_all = self._outcome is not None
                if error is not None and not run._regroup(error, has_all=has_all):
                    return
                self._outcome = None  # of a commit that did not happen
                recovery.adopt()
                run._ensure_reducer()
                while (cover := self._exchange_held(recovery)).missing:
                    yield from self._redo(cover.to_redo(run._comm.rank), recovery)
                self._finish_recovery(recovery, cover)
                return
            except (GroupError, RendezvousError) as caught:
                run._raise_unless_recoverable(caught)
                error = caught

    def _exchange_held(self, recovery: LoopRecovery) -> Cover:
        if faultpoints.armed:
            faultpoints.reach("elastic:cover")
        return recovery.exchange(self._results, self._signature, self._flags())

    def _redo(self, ranges: list[range], recovery: LoopRecovery) -> Iterator[MicroBatch]:
        run = self._run
        if faultpoints.armed:
            faultpoints.reach("elastic:redo")
        for _, parameter in run._named:
            parameter.grad = None  # it may have the sum of a loop that was not committed
        count = sum(map(len, ranges))
        self.planned += count
        for each in ranges:
            block = LeafBlock(each.start, each.stop, run.micro_batches)
            fold = run._make_fold(block)
            run._reducer.begin_fold(fold)
            yield from self._run_block(fold, block)
            recovery.hold(fold, clones=True)

    def _finish_recovery(self, recovery: LoopRecovery, cover: Cover) -> None:
        """Like `_finish`, with what the survivors hold."""
        self._check_signatures(recovery.signatures)
        losses, weights = recovery.results()
        recovery.sum_gradients(cover, self._divisor(has_weights=weights[0] != NO_WEIGHT))
        outcome = self._apply_weights(losses, weights)
        recovery.sum_buffers(cover)
        self._agreed_requests = int(recovery.flags.known_requests)
        self._all_seconds = []  # some ranks may have those of the group before
        self._pass_barrier(outcome)
