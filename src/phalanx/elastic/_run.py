"""`ElasticRun`: a training run whose result does not depend on the number of ranks.

A step is a fixed number of micro-batches. What a micro-batch computes depends on nothing but the
seed, the step and its own number, and gradients are added up in an order that depends on nothing
but those numbers (`phalanx.ddp._summation_tree`). So a run has the same bits at every world size,
and may be stopped and continued at another.

Under `phalanx run --elastic` the ranks are *workers* that may be lost, replaced, added and removed
while the run goes on. Workers are interchangeable: the others run the micro-batches of a lost rank,
with the same bits. The constructor, `loader` and `restore` do not wait for other
workers there. The first step does: a worker joins the others and gets their state.

``docs/design.md`` lists the modules and the paths through them. Gradients take the path of
`phalanx.ddp`: its reducer, its buckets.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .. import _faultpoints as faultpoints
from .._formatting import format_count
from ..checkpoint import CheckpointManager
from ..checkpoint._replication import state_digest
from ..checkpoint._types import check_integer
from ..ddp import DistributedDataParallel, ShardedOptimizer
from ..ddp._buckets import BucketOptions, DelayedReduction
from ..ddp._communicator import Communicator, broadcast_coalesced
from ..ddp._config import check_parameters, resolve_bucket_caps
from ..ddp._dtensor import LocalShard, as_local_shard
from ..ddp._gradient_fold import GradientFold
from ..ddp._module_inspection import ModuleInventory
from ..ddp._parameter_consistency import verify_parameters
from ..ddp._reducer import Reducer
from ..ddp._summation_tree import LeafBlock, SummationPlan, max_subtrees
from ..env import ElasticEnv, read_elastic_env, refuse_in_elastic_run
from ..errors import (
    GroupError,
    InvalidArgument,
    InvalidState,
    InvalidType,
    PeerLost,
    PhalanxError,
    RankMismatch,
    RendezvousError,
)
from ..groups import ProcessGroup, new_group
from ..groups._call_site import warn_user
from ..groups._current_group import default_group
from ..groups._factory import DEFAULT_TIMEOUT
from ._buffers import BufferAverage, BufferRule, is_expanded
from ._contributions import Contributions
from ._division import Rebalancing, share_of
from ._elastic_worker import ElasticWorker, MembershipChange
from ._evaluation import Evaluation
from ._loader import ElasticLoader
from ._micro_batches import Step
from ._randomness import derive_seed, seed_generators
from ._run_checkpoints import RestoreRequest, RunCheckpoints
from ._run_state import (
    RunPosition,
    RunState,
    ScriptReplay,
    current_fingerprint,
    receive_state,
    send_state,
)

SEED_LIMIT = 1 << 63
LEADER_LOCK_TIMEOUT = 30.0
"""Seconds that a new leader waits for the one before to unlock the directory of checkpoints."""

P = ParamSpec("P")


class ElasticRun:
    """Train a module in steps of micro-batches, bitwise identical at any number of ranks.

    ::

        run = ElasticRun(model, optimizer, micro_batches=8, seed=0)
        loader = run.loader(dataset, batch_size=16)
        run.restore("run/")
        for step in run.steps(1000):
            for micro in step.micro_batches(loader):
                micro.backward(loss_fn(model(micro.inputs), micro.targets))
            optimizer.step()
            optimizer.zero_grad()
            run.save_every(100)

    Every rank makes one, with the same arguments; all ranks start with rank 0's parameters and
    buffers. It sets the process's number of intra-op threads, to 1 by default, and asks torch for
    deterministic algorithms, since the bits depend on both.

    Arguments:
        model: the module to train, not wrapped in DDP.
        optimizer: the optimizer, or several.
        micro_batches: how many micro-batches a step has; at least the world size.
        seed: all randomness of the run derives from it.
        state: other objects to save and restore, by name: schedulers, moving averages, a
            `GradScaler`, anything with ``state_dict`` and ``load_state_dict``.
        group: the ranks; by default the current group, else a new one from the launcher's
            environment, else this process alone.
        threads: the number of intra-op threads, equal on all ranks and in all parts of a run.
        buffers: how buffers are combined over micro-batches, by name or pattern: "mean" (default
            of floating-point buffers) or "first", that of micro-batch 0 (default of others).
        strict: whether torch raises for operations without a deterministic algorithm, and `restore`
            if the fingerprint differs; otherwise both warn.
        bucket_cap_mb: as in `phalanx.DDP`.
        backend, timeout: those of the groups of an elastic run (`phalanx run --elastic`). A rank
            that does not respond for this long is killed and counts as lost.
        rebalance: whether the ranks' shares of the micro-batches follow their measured speed, so
            that a slow rank runs fewer. The bits stay the same; it costs memory for a few more
            copies of the gradients.
        on_change: called in an elastic run, after ranks were lost, have joined or have left, with a
            `MembershipChange`, on every member that was one before.

    Raises:
        RankMismatch: if the arguments or the module differ between ranks; on every rank.
        InvalidArgument, InvalidState, InvalidType: if an argument is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        micro_batches: int,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        threads: int = 1,
        buffers: Mapping[str, BufferRule] | None = None,
        strict: bool = False,
        bucket_cap_mb: float | None = None,
        backend: str = "auto",
        timeout: timedelta = DEFAULT_TIMEOUT,
        rebalance: bool = False,
        on_change: Callable[[MembershipChange], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizers = _check_optimizers(optimizer)
        self.micro_batches = _check_integer("micro_batches", micro_batches, 1)
        self.seed = _check_integer("seed", seed, 0)
        self.threads = _check_integer("threads", threads, 1)
        if self.seed >= SEED_LIMIT:
            raise InvalidArgument(f"seed must be below 2**63, got {seed}")
        self.state = _check_state(state or {})
        inventory = _inspect(model)
        self._named = inventory.parameters
        self._sparse = inventory.sparse
        self._device = self._named[0][1].device
        self._bucket_cap_mb = bucket_cap_mb
        self._buffer_rules = dict(buffers or {})
        self._strict = strict
        self._parameter_ids = {id(parameter) for _, parameter in self._named}
        self._optimized = -1  # how many parameters the optimizers had at the last check
        self.loaders: list[ElasticLoader] = []
        self._current_step: Step | None = None
        self._on_change = on_change
        self._may_rebalance = rebalance
        self._rebalancing: Rebalancing | None = None
        self._worker: ElasticWorker | None = None
        self._buffers = BufferAverage(model, self._buffer_rules)
        self._run_state = RunState(
            model,
            self.optimizers,
            self.state,
            self.loaders,
            named=self._named,
            buffers=self._buffers,
            seed=self.seed,
            micro_batches=self.micro_batches,
        )
        self._replay = ScriptReplay(self._run_state)
        self._has_reducer = False
        self._contributions: Contributions | None = None  # None without a reducer
        self._progress: tuple[list[str], list[int] | None] = [], None
        """The names of the parameters of the last reducer, and its progress."""
        self._owns_group = False
        env = read_elastic_env()
        self._checkpoints = RunCheckpoints(
            self._run_state,
            _weakly(self._report_differences),
            lock_timeout=0.0 if env is None else LEADER_LOCK_TIMEOUT,
        )
        if env is None or group is not None:
            _refuse_elastic_group(env)
            self._use_group(self._resolve_group(group))
        else:
            _refuse_default_group()
            self._use_local_settings()
            _refuse_sharded(self.optimizers)
            self._check_parameters()
            self._worker = ElasticWorker(
                env,
                backend=backend,
                device=self._device,
                timeout=timeout,
                max_members=self.micro_batches,
            )
        self._handles = _register_optimizer_hooks(self)
        self._handles.append(_check_after_load(self))

    def _resolve_group(self, group: Any) -> ProcessGroup:
        if group is None:
            group = default_group()
            if not isinstance(group, ProcessGroup):
                self._owns_group = True
                return new_group()
        if not isinstance(group, ProcessGroup):
            raise InvalidType(
                f"group must be a group of phalanx.groups.new_group(), got {type(group).__name__}"
            )
        return group

    def _use_group(self, group: ProcessGroup) -> None:
        """Make a fixed group the ranks of this run: all of them call this."""
        self._comm = Communicator(group, self._device)
        self._compare_arguments()
        self._use_local_settings()
        verify_parameters(self._named, self._comm, operation="ElasticRun")
        self._check_parameters()
        self._divide_equally()
        self._buffers.attach(self._comm, self._plan)
        named_buffers = self._buffers.named()
        verify_parameters(named_buffers, self._comm, what="buffers", operation="ElasticRun")
        self._make_reducer()
        self._reducer.broadcast_parameters()
        writable = [tensor for _, tensor in named_buffers if not is_expanded(tensor)]
        broadcast_coalesced(writable, self._comm, root=0)

    def _divide_equally(self) -> None:
        self._plan = SummationPlan(self._comm.rank, self._comm.size, self.micro_batches)
        self._fold = GradientFold(self._comm, self._plan)
        self._rebalancing = None
        if self._may_rebalance and self._comm.size > 1:
            shares = [len(block) for block in self._plan.blocks]
            self._rebalancing = Rebalancing(self.micro_batches, shares)

    def _rebalance(self, seconds: list[float]) -> None:
        """Divide the micro-batches by the speeds of all ranks in a step, equal on all ranks."""
        rebalancing = self._rebalancing
        if rebalancing is None or not seconds or not rebalancing.update(seconds):
            return
        comm = self._comm
        self._plan = SummationPlan(comm.rank, comm.size, self.micro_batches, rebalancing.shares)
        self._fold = GradientFold(comm, self._plan)
        self._buffers.attach(comm, self._plan)
        for loader in self.loaders:
            loader._set_block(self._plan.block.lo, self._plan.block.hi)

    def _use_local_settings(self) -> None:
        torch.set_num_threads(self.threads)
        _use_deterministic_algorithms(self._strict)

    def _make_reducer(self, tracked: Collection[str] | None = None) -> None:
        """Make what reduces the gradients of the current group; all its ranks call this."""
        options = BucketOptions(
            caps=resolve_bucket_caps(self._bucket_cap_mb, None, shared=self._comm.shares_memory),
            sparse=self._sparse,
            delay=DelayedReduction(),
            dtype=None,
            slots=self._plan.slots
            if self._rebalancing is None
            else max_subtrees(self.micro_batches, self._comm.size),
        )
        self._reducer = Reducer(
            self._named, self._comm, options, reduce="sum", tracked=tracked, keeps_frozen=True
        )
        self._has_reducer = True
        self._contributions = Contributions(self._comm, self.micro_batches)
        if self._reducer.optimizers:
            raise InvalidState(
                "ElasticRun cannot step optimizers in backward: call optimizer.step()"
            )
        self._reducer.on_unmanaged_backward = _weakly(self._refuse_unmanaged_backward)

    def _close_reducer(self) -> None:
        if self._has_reducer:
            self._reducer.close()
            self._has_reducer = False
            self._contributions = None

    def _make_fold(self, block: LeafBlock) -> GradientFold:
        """Make a fold of micro-batches whose sums are not reduced in backward."""
        return GradientFold(self._comm, self._plan, block=block)

    # -- the loop --------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The process group. Do not call collectives in the loop over micro-batches: ranks may run
        different numbers of them."""
        if self._has_dynamic_membership:
            raise InvalidState(
                "run.group is not available under `phalanx run --elastic`: collectives of your own "
                "would wait for ranks that have died. Use run.evaluate(), step.loss, run.is_leader "
                "and run.world_size"
            )
        assert self._comm._ours is not None
        return self._comm._ours

    @property
    def _has_dynamic_membership(self) -> bool:
        """Whether `phalanx run --elastic` started this process, so that its membership changes."""
        return self._worker is not None

    @property
    def world_size(self) -> int:
        """The number of ranks at the moment; 0 before the first step of an elastic run."""
        return self._comm.size if self._is_member else 0

    @property
    def _is_member(self) -> bool:
        return self._worker is None or self._worker.is_member

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0; to print or log once.

        If that rank is lost, another becomes the leader. Before the first step of an elastic run it
        is the process that the launcher started as rank 0, and no replacement.
        """
        if self._worker is not None and not self._worker.is_member:
            return self._worker.is_initial_leader
        return self._comm.rank == 0

    @property
    def completed_steps(self) -> int:
        """The number of completed steps."""
        return self._position.steps

    @property
    def _position(self) -> RunPosition:
        step = self._current_step
        if step is None or not step._completed_loops:
            return self._run_state.position
        return RunPosition(step.number, step._completed_loops)

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        order: Callable[[int], Iterable[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> ElasticLoader:
        """Make a loader of micro-batches of a dataset; see `ElasticLoader` for the options.

        `batch_size` is that of one micro-batch. Make loaders in the same order in every run. If a
        checkpoint was restored before, every rank calls it.
        """
        key = len(self.loaders)
        loader = ElasticLoader(
            dataset,
            batch_size,
            seed=self.seed,
            micro_batches=self.micro_batches,
            key=key,
            shuffle=shuffle,
            drop_last=drop_last,
            order=order,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
        )
        if self._is_member:
            loader._set_block(self._plan.block.lo, self._plan.block.hi)
        restored = self._run_state.loader_states
        if key < len(restored):
            self._report_differences(loader._differences(restored[key]))
            loader.load_state_dict(restored[key])
        self.loaders.append(loader)
        return loader

    def steps(self, total: int) -> Iterator[Step]:
        """Yield steps until the run has made `total` of them in all, in this process or earlier.

        In an elastic run the first step waits until this worker is a member. A worker that is told
        to leave (SIGTERM) exits here, after its step.

        A script may call it several times, say once per epoch. A run that is restored, or a worker
        that joins, gets no steps from calls that were over. What the script does after them does
        not count again: where its state was taken, it has that state.
        """
        total = _check_integer("total", total, 0)
        state = self._run_state
        state.begin_call(total)
        if self._worker is not None:
            self._worker.join(self)
        self._replay.enter(total)
        while self.completed_steps < total:
            self._end_step()
            if self._worker is not None:
                self._worker.change_members(self)
            step = self._current_step = Step(self, state.position.steps + 1)
            seed_generators(derive_seed(self.seed, "begin", step.number))
            try:
                yield step
            except GeneratorExit:  # the script left the loop over steps
                # At the end of the interpreter there is no thread left to ask the store; then
                # `_leave_steps_at_exit` was called before.
                if self._current_step is step and not sys.is_finalizing():
                    self._leave_steps(step)
                raise
            if self._current_step is not step:
                raise InvalidState("run.steps() or run.restore() was called within a step")
            step._check_complete("the next step of run.steps()")
            if not step._completed_loops:
                message = f"step {step.number} had no micro-batches"
                self._fail(message)
                raise InvalidState(f"{message}. Loop over step.micro_batches(loader)")
        self._end_step()
        state.end_call(may_save=self.checkpoints is not None)
        if self._worker is not None:
            self._worker.finish(self)

    def _leave_steps(self, step: Step) -> None:
        """Note that the script left the loop over steps early."""
        if step._open_loop is not None:
            return
        self._run_state.end_call(may_save=self.checkpoints is not None)
        if self._worker is not None:
            self._end_step()
            with suppress(PhalanxError):  # the store does not answer
                self._worker.finish(self)

    def _leave_steps_at_exit(self) -> None:
        """Do so for a script that left the loop, and still holds what `steps` returned."""
        if self._current_step is not None and self._current_step._completed_loops:
            self._leave_steps(self._current_step)

    def _end_step(self) -> None:
        step = self._current_step
        if step is not None:
            step._check_complete("run.steps() or run.restore()")
            self._run_state.position = self._position
            self._current_step = None

    def _refuse_unmanaged_backward(self) -> None:
        step = self._current_step
        if step is not None and step._open_loop is not None:
            step._open_loop.refuse_unmanaged_backward()

    def _check_between_loops(self, caller: str) -> None:
        """Raise if a loop over micro-batches has not ended."""
        if self._current_step is not None:
            self._current_step._check_complete(caller)

    def _check_parameters(self) -> None:
        """Raise if an optimizer steps parameters whose gradients the run does not reduce."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        count = sum(len(group["params"]) for group in groups)
        if count == self._optimized:
            return
        self._optimized = count
        unknown = [
            p for group in groups for p in group["params"] if id(p) not in self._parameter_ids
        ]
        if unknown:
            raise InvalidArgument(
                f"an optimizer has {len(unknown)} parameters that are not the model's, whose "
                f"gradients would not be reduced; the first has shape {list(unknown[0].shape)}. "
                "Put all trained modules in one, such as a ModuleDict, and pass that as model"
            )

    def evaluate(self, fn: Callable[[Any], Any], loader: ElasticLoader) -> Any:
        """Average `fn(batch)` over a dataset, weighting each batch by its number of samples.

        The ranks divide the batches among them. `fn` gets a batch, with the module in evaluation
        mode and gradients disabled, and returns the mean over its samples: a number, a tensor, or a
        dict of these, of the same shapes for every batch. Every sample counts once. The result has
        the same bits at every world size, and is a float, a float64 tensor, or a dict of these.
        Every rank calls it. A run that was restored, or a worker that joins an elastic run, has the
        results of evaluations between calls of `steps` that are over, and does not run them again.
        """
        if self._worker is not None and self._worker.is_announcing:
            raise InvalidState(
                "on_change= must not call run.evaluate(): ranks that have just joined do not. Set "
                "a flag there, and evaluate after the step"
            )
        self._check_between_loops("run.evaluate()")
        if self._current_step is not None:
            return self._evaluate_section(fn, loader)
        if self._worker is not None:
            self._worker.join(self)
        state = self._run_state
        key, results = state.count_evaluation(), state.evaluations
        if key not in results or not (state.has_live_evaluations or self._replay.has_begun):
            results[key] = self._evaluate_section(fn, loader)
            if self._worker is not None:
                self._worker.note_committed(self)
        return copy.deepcopy(results[key])

    def _evaluate_section(self, fn: Callable[[Any], Any], loader: ElasticLoader) -> Any:
        self._begin_section()
        self._buffers.begin()
        try:
            return self._evaluate(Evaluation(self.model, fn, loader))
        except Exception as error:  # the other ranks wait for this one's results
            self._fail(f"run.evaluate() raised {type(error).__name__}: {error}")
            raise
        finally:
            self._buffers.restore()

    def _evaluate(self, evaluation: Evaluation) -> Any:
        block = LeafBlock.of_rank(self._comm.rank, self._comm.size, evaluation.batches)
        to_run, is_complete = [range(block.lo, block.hi)], False
        while True:
            try:
                for each in to_run:
                    evaluation.run(each.start, each.stop)
                if self._comm.size > 1:
                    for text in self._comm.exchange(evaluation.to_text()):
                        evaluation.add(text)
                if missing := evaluation.missing():  # after a rank was lost
                    to_run = share_of(missing, self._comm.rank, self._comm.size)
                    continue
                is_complete = True
                if self._has_dynamic_membership:
                    if faultpoints.armed:
                        faultpoints.reach("elastic:evaluate")
                    self._comm.barrier()
                return evaluation.result()
            except (GroupError, RendezvousError) as error:
                self._raise_unless_recoverable(error)
                if not self._regroup(error, has_all=is_complete):
                    return evaluation.result()
                to_run, is_complete = [], False

    # -- membership changes ------------------------------------------------------------------

    def _begin_section(self) -> None:
        self._run_state.section += 1

    def _has_regrouped(self) -> bool:
        return self._worker is not None and self._worker.has_regrouped(self._run_state.section)

    @property
    def _known_requests(self) -> int:
        return 0 if self._worker is None else self._worker.known_requests

    def _note_requests(self, known: int) -> None:
        state = self._run_state
        state.agreed_requests = max(state.agreed_requests, known)

    def _raise_unless_recoverable(self, error: BaseException) -> None:
        if self._worker is None:
            if isinstance(error, PeerLost):
                error.add_note("With `phalanx run --elastic` the other ranks would go on.")
            raise error
        self._worker.raise_unless_recoverable(error)

    def _regroup(self, error: BaseException, *, has_all: bool) -> bool:
        """Continue the current section with the survivors; False if others have committed it.

        `has_all`: whether this rank has the whole section. Without it no rank can commit.
        """
        assert self._worker is not None
        is_open = self._worker.regroup(self, error)
        assert is_open or has_all, "a section was committed before this rank had all of it"
        return is_open

    def _fail(self, message: str) -> None:
        """Make all ranks raise."""
        if self._worker is not None:
            self._worker.mark_failed(message)
        if self._is_member:
            self._comm.abort(message)

    def _attach(self, group: ProcessGroup) -> None:
        """Continue with another group; all of its ranks call this.

        A worker without the state of the run also learns which parameters the others reduce. They
        may all be lost before the next loop.
        """
        if self._has_reducer:
            self._progress = self._reducer.names, self._reducer.progress()
        self._close_reducer()
        self._comm = Communicator(group, self._device)
        self._divide_equally()
        self._buffers.attach(self._comm, self._plan)
        reduced = json.loads(self._comm.exchange(json.dumps(self._progress[0]))[0])
        if not self._is_member:
            self._progress = reduced, None
        for loader in self.loaders:
            loader._set_block(self._plan.block.lo, self._plan.block.hi)

    def _ensure_reducer(self) -> None:
        """Make the reducer of the current group, if there is none; all ranks of a section call it.

        Rank 0 sends which parameters it reduces, and the order of their gradients, so that no rank
        has to learn it again. In the middle of a loop `requires_grad` may be that of one
        micro-batch, so what the reducer before has reduced is reduced by this one, too.
        """
        if self._has_reducer:
            return
        before, progress = self._progress
        names = [name for name, p in self._named if p.requires_grad or name in before]
        mine = names, progress if names == before else None
        tracked, first = json.loads(self._comm.exchange(json.dumps(mine))[0])
        self._make_reducer(tracked)
        if first is not None:
            self._reducer.load_progress(first)

    def _send_state(self) -> None:
        """Send the state of this worker, rank 0, to the others."""
        send_state(self._run_state.to_transfer(self._position), self._comm)

    def _receive_state(self) -> None:
        state = receive_state(self._comm)
        self._replay.begin()
        self._report_differences(self._run_state.differences(state["elastic"]))
        self._run_state.load_transferred(state)

    # -- checkpoints -----------------------------------------------------------------------

    def restore(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        rewind: bool = False,
        **options: Any,
    ) -> int:
        """Continue from the newest checkpoint in a directory, or from a given step of it.

        Returns the number of completed steps; 0 if the directory has no checkpoint. The checkpoint
        may be of any world size. `save` and `save_every` save there. Other options are those of
        `CheckpointManager`. To save again after an older step was restored, remove the later ones:
        ``rewind=True``. In an elastic run one of the first workers does that; those that start
        later continue from a member, or from the newest checkpoint.
        """
        request = RestoreRequest(directory=directory, step=step, rewind=rewind, options=options)
        self._end_step()
        self._replay.begin()
        if self._worker is None:
            return self._checkpoints.restore(request, self.group)
        if self._is_member:
            raise InvalidState("call run.restore() before the first step of an elastic run")
        # The later steps are removed when the first generation begins, by one worker.
        has_begun = self._worker.has_run_begun
        return self._checkpoints.restore(request, None, has_begun=has_begun, may_rewind=False)

    def _restore_for_all(self, is_first: bool) -> None:
        """Restore what the script asked for, in a worker that begins a generation without members.

        The others get the state from it. `is_first`: whether it is the first one of the attempt.
        """
        assert self._worker is not None
        request, has_begun = self._checkpoints.request, self._worker.has_run_begun or not is_first
        if request is not None:
            self._replay.begin()
            self._checkpoints.restore(request, None, has_begun=has_begun)

    @property
    def checkpoints(self) -> CheckpointManager | None:
        """The checkpoints of the directory that `restore` was given, or None."""
        return self._checkpoints.manager

    def save(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Save the run, to `directory` or to the one passed to `restore`; every rank calls it."""
        self._check_between_loops("run.save()")
        self._check_parameters()
        self._check_whole_step()
        if self._replay.is_past_save():
            return
        has_fixed_membership = self._worker is None
        self._checkpoints.save(
            self._position,
            self.group if has_fixed_membership else None,
            directory,
            writes=has_fixed_membership or self.is_leader,
        )

    def _save_before_exit(self) -> bool:
        """Save before all workers leave; return whether there is a directory to save to."""
        return self._checkpoints.save_before_exit(self._position)

    def _check_whole_step(self) -> None:
        step, before = self._current_step, self._run_state.position.loops
        if step is not None and 0 < step._completed_loops < before:
            raise InvalidState(
                f"step {step.number} has had {step._completed_loops} loops over micro-batches, the "
                f"step before {before}. Save after the last loop: a restored run "
                "continues with the next step"
            )

    def save_every(self, steps: int) -> bool:
        """Save if the number of steps is a multiple of `steps`; return whether it was saved now."""
        interval = _check_integer("steps", steps, 1)
        step = self.completed_steps
        if step % interval or self._replay.is_past_save() or self._checkpoints.is_saved(step):
            return False
        self.save()
        return True

    def hash(self) -> str:
        """Return a digest of every bit of the run's state: 32 hexadecimal digits.

        Two runs with the same hash have the same model, optimizers, registered state and position
        in the data. Every rank calls it, and gets the same.
        """
        self._check_between_loops("run.hash()")
        self._check_parameters()
        state = self._run_state.values(self._position)
        del state["evaluations"]
        for name in ("fingerprint", "total", "at_end"):
            del state["elastic"][name]
        return state_digest(state)

    def _report_differences(self, found: list[str]) -> None:
        """Warn or raise if any rank has found differences; all ranks call it."""
        is_shared = not self._has_dynamic_membership and self._comm.size > 1
        for rank, text in enumerate(self._comm.exchange(json.dumps(found)) if is_shared else ()):
            others = [each for each in json.loads(text) if each not in found]
            found = found + [f"{each} (rank {rank})" for each in others]
        if not found:
            return
        message = f"resuming will not be bitwise identical to the saved run: {'; '.join(found)}"
        if self._strict:
            raise InvalidState(f"{message}. Use the saved settings, or pass strict=False")
        warn_user(message, RuntimeWarning)

    def _compare_with_others(self) -> None:
        """Raise if workers disagree on what the run is; all ranks of a new group call it."""
        self._compare_arguments()
        # Each rank has frozen what its last micro-batch has.
        verify_parameters(self._named, self._comm, operation="ElasticRun", compares_frozen=False)
        verify_parameters(self._buffers.named(), self._comm, what="buffers", operation="ElasticRun")

    def _compare_arguments(self) -> None:
        ranks = self._comm.size
        options = {"bucket_cap_mb": self._bucket_cap_mb, "buffers": self._buffer_rules}
        fingerprint = current_fingerprint(self._device)
        del fingerprint["threads"]  # the launcher's division, until the run sets its own
        mine = {name: getattr(self, name) for name in ("micro_batches", "seed", "threads")}
        everything = json.dumps({**mine, **options, **fingerprint})
        texts = self._comm.exchange(everything) if ranks > 1 else []
        for rank, text in enumerate(texts):
            theirs = json.loads(text)
            for name, expected in json.loads(texts[0]).items():
                if theirs.get(name) != expected:
                    raise RankMismatch(
                        f"ranks disagree on {name}: rank 0 says {expected}, rank {rank} says "
                        f"{theirs.get(name)}",
                        group=self._comm.label,
                        operation="ElasticRun",
                        ranks=[0, rank],
                    )
        if ranks > self.micro_batches:
            raise InvalidArgument(
                f"micro_batches must be at least the world size ({ranks}), got "
                f"{self.micro_batches}. Use micro_batches={ranks} or start at most "
                f"{format_count(self.micro_batches, 'rank')}"
            )

    def close(self) -> None:
        """Stop loader workers, wait for pending saves, and remove the hooks from the module.

        Also shuts down the group, unless it is the caller's. The run cannot be used afterwards.
        """
        for handle in self._handles:
            handle.remove()
        for loader in self.loaders:
            loader.close()
        self._close_reducer()
        if self._worker is not None:
            self._worker.close()
        self._checkpoints.close()
        if self._owns_group:
            self.group.shutdown()

    def __repr__(self) -> str:
        return f"<ElasticRun: step {self.completed_steps}, {self.micro_batches} micro-batches, " + (
            f"rank {self._comm.rank} of {self._comm.size}>" if self._is_member else "waiting>"
        )


def _refuse_elastic_group(env: ElasticEnv | None) -> None:
    if env is not None:
        raise InvalidState(
            "group= is not allowed under `phalanx run --elastic`: ElasticRun forms a group after "
            "every membership change. Leave out group="
        )


def _refuse_default_group() -> None:
    """Raise for a group that ranks have formed by other means than the launcher's variables."""
    group = default_group()
    if group is not None and group.size() > 1:
        refuse_in_elastic_run(f"a process group of {group.size()} ranks")


def _refuse_sharded(optimizers: Sequence[Optimizer]) -> None:
    if any(isinstance(each, ShardedOptimizer) for each in optimizers):
        raise InvalidArgument(
            "a ShardedOptimizer keeps each state on one rank only, and an elastic run could lose "
            "it. Use a plain optimizer, or run without --elastic"
        )


def _inspect(model: Any) -> ModuleInventory:
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | DistributedDataParallel):
        raise InvalidArgument(
            "ElasticRun takes the module itself, not wrapped in DDP: pass model.module"
        )
    inventory = ModuleInventory(model, ())
    check_parameters(inventory.parameters)
    trainable = [(name, p) for name, p in inventory.parameters if p.requires_grad]
    if not trainable:
        raise InvalidState("no parameter of the module requires a gradient: nothing to reduce")
    if inventory.sparse:
        raise InvalidArgument(
            f"{min(inventory.sparse)!r} has sparse gradients. ElasticRun keeps the sums of "
            "micro-batches in dense buckets, so they would become dense. Use sparse=False"
        )
    if inventory.sync_norms:
        raise InvalidArgument(
            f"{inventory.sync_norms[0][0]!r} is a SyncBatchNorm, whose statistics depend on the "
            "world size. Use BatchNorm: its running statistics become the mean over micro-batches"
        )
    shards = [name for name, p in trainable if isinstance(as_local_shard(p), LocalShard)]
    if shards:
        raise InvalidArgument(f"parameter {shards[0]!r} is a DTensor; ElasticRun takes plain ones")
    return inventory


def _check_optimizers(optimizer: Any) -> list[Optimizer]:
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if not isinstance(each, Optimizer):
            raise InvalidType(
                f"optimizer must be a torch Optimizer or a list of them, got {type(each).__name__}"
            )
    return found


def _check_state(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise InvalidType(f'state must be a dict, as in {{"scheduler": scheduler}}, got {kind}')
    for name, each in state.items():
        if not all(callable(getattr(each, f, None)) for f in ("state_dict", "load_state_dict")):
            raise InvalidType(
                f"state[{name!r}] must have state_dict and load_state_dict, got "
                f"{type(each).__name__}"
            )
    return dict(state)


def _check_integer(name: str, value: Any, least: int) -> int:
    number = check_integer(name, value)
    if number < least:
        raise InvalidArgument(f"{name} must be at least {least}, got {number}")
    return number


def _use_deterministic_algorithms(strict: bool) -> None:
    """Let torch name operations without a deterministic algorithm."""
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Filling new tensors with NaN finds reads of uninitialized memory and costs a pass over each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a function that calls a method while its object is alive, without keeping it so."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        alive = weak()
        if alive is not None:
            alive(*args, **kwargs)

    return call


def _register_optimizer_hooks(run: ElasticRun) -> list[Any]:
    """Refuse to step in the middle of a loop; reach the optimizer fault points."""
    weak = weakref.ref(run)

    def check(*_: object) -> None:
        alive = weak()
        if alive is not None:
            alive._check_between_loops("optimizer.step()")
        if faultpoints.armed:
            faultpoints.reach("elastic:before_optimizer")

    def after(*_: object) -> None:
        if faultpoints.armed:
            faultpoints.reach("elastic:after_optimizer")

    handles = [optimizer.register_step_pre_hook(check) for optimizer in run.optimizers]
    return handles + [optimizer.register_step_post_hook(after) for optimizer in run.optimizers]


def _check_after_load(run: ElasticRun) -> Any:
    """Have the module refuse a state that replaced its parameters."""
    weak = weakref.ref(run)

    def check(module: nn.Module, _: object) -> None:
        alive = weak()
        if alive is None:
            return
        if {id(parameter) for parameter in module.parameters()} != alive._parameter_ids:
            raise InvalidState(
                "load_state_dict(assign=True) replaced parameters of the model. Load without "
                "assign=True, or load before making the ElasticRun"
            )

    return run.model.register_load_state_dict_post_hook(check)  # type: ignore[no-untyped-call]
