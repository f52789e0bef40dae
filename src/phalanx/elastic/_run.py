"""`ElasticRun`: a training run whose result does not depend on the number of ranks.

A step is a fixed number of micro-batches. What a micro-batch computes depends on nothing but the
seed, the step and its own number, and gradients are added up in an order that depends on nothing
but those numbers (`phalanx.ddp._summation_tree`). So a run has the same bits at every world size,
and may be stopped and continued at another.

The parts: `_micro_batches` has the loop, `_loader` the data, `_randomness` the generators,
`_buffers` the buffers, `_fingerprint` what else the bits depend on. Gradients take the path of
`phalanx.ddp`: its reducer, its buckets.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import CheckpointManager, Replicated
from ..checkpoint._replication import state_digest
from ..checkpoint._types import check_integer
from ..ddp import DistributedDataParallel
from ..ddp._buckets import BucketOptions, DelayedReduction
from ..ddp._communicator import Communicator, broadcast_coalesced
from ..ddp._config import check_parameters, resolve_bucket_caps
from ..ddp._dtensor import LocalShard, as_local_shard
from ..ddp._gradient_fold import GradientFold
from ..ddp._module_inspection import ModuleInventory
from ..ddp._parameter_consistency import verify_parameters
from ..ddp._reducer import Reducer
from ..ddp._summation_tree import SummationPlan
from ..errors import InvalidArgument, InvalidState, InvalidType, RankMismatch
from ..groups import ProcessGroup, new_group
from ..groups._call_site import warn_user
from ..groups._current_group import default_group
from ._buffers import BufferAverage, BufferRule, is_expanded
from ._evaluation import evaluate
from ._fingerprint import current_fingerprint, fingerprint_differences
from ._loader import ElasticLoader
from ._micro_batches import Step
from ._randomness import derive_seed, seed_generators

SEED_LIMIT = 1 << 63


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
    ) -> None:
        self.model = model
        self.optimizers = _check_optimizers(optimizer)
        self.micro_batches = _check_integer("micro_batches", micro_batches, 1)
        self.seed = _check_integer("seed", seed, 0)
        self.threads = _check_integer("threads", threads, 1)
        if self.seed >= SEED_LIMIT:
            raise InvalidArgument(f"seed must be below 2**63, got {seed}")
        self.state = _check_state(state or {})
        self.group = _resolve_group(group)
        """The process group. Do not call collectives in the loop over micro-batches: ranks may run
        different numbers of them."""
        inventory = _inspect(model)
        named = inventory.parameters
        self._comm = Communicator(self.group, named[0][1].device)
        self._compare_arguments({"bucket_cap_mb": bucket_cap_mb, "buffers": dict(buffers or {})})
        torch.set_num_threads(self.threads)
        _use_deterministic_algorithms(strict)
        self._strict = strict
        verify_parameters(named, self._comm, operation="ElasticRun")
        self._parameter_ids = {id(parameter) for _, parameter in named}
        self._optimized = -1  # how many parameters the optimizers had at the last check
        self._check_parameters()
        self._plan = SummationPlan(self._comm.rank, self._comm.size, self.micro_batches)
        self._fold = GradientFold(self._comm, self._plan)
        self._buffers = BufferAverage(model, self._comm, self._plan, buffers or {})
        options = BucketOptions(
            caps=resolve_bucket_caps(bucket_cap_mb, None, shared=self._comm.shares_memory),
            sparse=inventory.sparse,
            delay=DelayedReduction(),
            dtype=None,
            slots=self._plan.slots,
        )
        named_buffers = self._buffers.named()
        verify_parameters(named_buffers, self._comm, what="buffers", operation="ElasticRun")
        self._reducer = Reducer(named, self._comm, options, reduce="sum")
        if self._reducer.optimizers:
            raise InvalidState(
                "ElasticRun cannot step optimizers in backward: call optimizer.step()"
            )
        self._reducer.on_unmanaged_backward = _weakly(self._refuse_unmanaged_backward)
        self._reducer.broadcast_parameters()
        writable = [tensor for _, tensor in named_buffers if not is_expanded(tensor)]
        broadcast_coalesced(writable, self._comm, root=0)
        self._handles = _check_before_step(self)
        self._handles.append(_check_after_load(self))
        self.loaders: list[ElasticLoader] = []
        self._current_step: Step | None = None
        self._completed = 0
        self._phase = 0
        self._loader_states: list[dict[str, Any]] = []
        """States of loaders that were restored and are not made yet."""
        self._checkpoints: CheckpointManager | None = None
        self._saved_step: int | None = None

    # -- the loop --------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0; to print or log once."""
        return self._comm.rank == 0

    @property
    def completed_steps(self) -> int:
        """How many steps the run has made."""
        step = self._current_step
        return self._completed if step is None or not step._phase else step.number

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
        loader._set_block(self._plan.block.lo, self._plan.block.hi)
        if key < len(self._loader_states):
            self._report_differences(loader._differences(self._loader_states[key]))
            loader.load_state_dict(self._loader_states[key])
        self.loaders.append(loader)
        return loader

    def steps(self, total: int) -> Iterator[Step]:
        """Yield steps until the run has made `total` of them in all, in this process or earlier."""
        total = _check_integer("total", total, 0)
        while self.completed_steps < total:
            self._end_step()
            step = self._current_step = Step(self, self._completed + 1)
            seed_generators(derive_seed(self.seed, "begin", step.number))
            yield step
            if self._current_step is not step:
                raise InvalidState("run.steps() or run.restore() was called within a step")
            step._check_complete("the next step of run.steps()")
            if not step._phase:
                message = f"step {step.number} had no micro-batches"
                self.group.abort(message)
                raise InvalidState(f"{message}. Loop over step.micro_batches(loader)")
        self._end_step()

    def _end_step(self) -> None:
        step = self._current_step
        if step is not None:
            step._check_complete("run.steps() or run.restore()")
            if step._phase:
                self._completed, self._phase = step.number, step._phase
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
        Every rank calls it.
        """
        self._check_between_loops("run.evaluate()")
        self._buffers.begin()
        try:
            return evaluate(self.model, self._comm, fn, loader)
        except Exception as error:  # the other ranks wait for this one's results
            self.group.abort(f"run.evaluate() raised {type(error).__name__}: {error}")
            raise
        finally:
            self._buffers.restore()

    # -- checkpoints -----------------------------------------------------------------------

    def restore(
        self, directory: str | os.PathLike[str], *, step: int | None = None, **options: Any
    ) -> int:
        """Continue from the newest checkpoint in a directory, or from a given step of it.

        Returns the number of steps that the run has made; 0 if the directory has no checkpoint. The
        checkpoint may be of any world size. `save` and `save_every` save there. Other options are
        those of `CheckpointManager`. To save again after an older step was restored, remove the
        later ones first: ``run.checkpoints.rewind(step)``.
        """
        self._end_step()
        if self._checkpoints is not None:
            self._checkpoints.close()
        checkpoints = CheckpointManager(directory, group=self.group, **options)
        self._checkpoints, self._saved_step = checkpoints, None
        step = checkpoints.latest() if step is None else step
        if step is None:
            return self._completed
        # First, so that nothing has changed if it raises.
        saved = checkpoints.load(step, {"elastic": None})["elastic"]
        self._compare_run(saved)
        loaded = checkpoints.load(step, {**self._objects(), "buffers": None})
        self._restore_tensors(loaded["buffers"], saved["gradients"])
        self._completed, self._phase = saved["step"], saved["phase"]
        self._saved_step = self._completed
        self._loader_states = list(saved["loaders"])
        for loader in self.loaders:  # those that were made later start again
            loader.load_state_dict({"loop": 0})
        for loader, state in zip(self.loaders, self._loader_states, strict=False):
            loader.load_state_dict(state)
        seed_generators(derive_seed(self.seed, "after", self._completed, self._phase))
        return self._completed

    def _restore_tensors(self, buffers: dict[str, Tensor], gradients: list[str]) -> None:
        """Set what is in no state dict: temporary buffers, and which gradients there are."""
        own = dict(self._buffers.named())
        with torch.no_grad():
            for name, value in buffers.items():
                own[name].data.copy_(value)
                self._buffers.changed_unsaved[name] = own[name]
            for name, parameter in self._reducer.named:
                # Zeros, and not None, for users of zero_grad(set_to_none=False).
                parameter.grad = torch.zeros_like(parameter) if name in gradients else None

    @property
    def checkpoints(self) -> CheckpointManager | None:
        """The checkpoints of the directory that `restore` was given, or None."""
        return self._checkpoints

    def save(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Save the run, to `directory` or to the one passed to `restore`; every rank calls it."""
        if directory is not None:
            checkpoints = CheckpointManager(directory, group=self.group)
        elif self._checkpoints is None:
            raise InvalidState(
                "there is no directory to save to. Call run.restore(directory) before the loop (it "
                "may be empty), or run.save(directory)"
            )
        else:
            checkpoints = self._checkpoints
        self._check_between_loops("run.save()")
        self._check_whole_step()
        checkpoints.save(self.completed_steps, self._state())
        if directory is not None:
            checkpoints.close()
        else:
            self._saved_step = self.completed_steps

    def _check_whole_step(self) -> None:
        step = self._current_step
        if step is not None and 0 < step._phase < self._phase:
            raise InvalidState(
                f"step {step.number} has had {step._phase} loops over micro-batches, the step "
                f"before {self._phase}. Save after the last loop: a restored run continues with "
                "the next step"
            )

    def save_every(self, steps: int) -> bool:
        """Save if the number of steps is a multiple of `steps`; return whether it was saved now."""
        interval = _check_integer("steps", steps, 1)
        step = self.completed_steps
        if step % interval or step == self._saved_step:
            return False
        self.save()
        return True

    def hash(self) -> str:
        """Return a digest of every bit of the run's state: 32 hexadecimal digits.

        Two runs with the same hash have the same model, optimizers, registered state and position
        in the data. Every rank calls it, and gets the same.
        """
        self._check_between_loops("run.hash()")
        state = {name: getattr(each, "value", each) for name, each in self._state().items()}
        del state["elastic"]["fingerprint"]
        return state_digest(state)

    def _objects(self) -> dict[str, Any]:
        """Return the objects to save, for every rank the same."""
        optimizers = {str(i): each for i, each in enumerate(self.optimizers)}
        return {
            "model": Replicated(self.model),
            "optimizers": Replicated(optimizers),
            "state": Replicated(self.state),
        }

    def _state(self) -> dict[str, Any]:
        step = self._current_step
        loaders = [loader.state_dict() for loader in self.loaders]
        return {
            **self._objects(),
            "buffers": Replicated(dict(self._buffers.changed_unsaved)),
            "elastic": {
                "step": self.completed_steps,
                "phase": step._phase if step is not None and step._phase else self._phase,
                "seed": self.seed,
                "micro_batches": self.micro_batches,
                "loaders": loaders + self._loader_states[len(loaders) :],
                "gradients": [n for n, p in self._reducer.named if p.grad is not None],
                "fingerprint": current_fingerprint(self._comm.device),
            },
        }

    def _compare_run(self, saved: dict[str, Any]) -> None:
        names = {"micro_batches": self.micro_batches, "seed": self.seed}
        found = [
            f"{name}: {saved[name]} saved, {value} now"
            for name, value in names.items()
            if saved[name] != value
        ]
        fingerprint = current_fingerprint(self._comm.device)
        found += fingerprint_differences(saved["fingerprint"], fingerprint)
        for loader, state in zip(self.loaders, saved["loaders"], strict=False):
            found += loader._differences(state)
        self._report_differences(found)

    def _report_differences(self, found: list[str]) -> None:
        """Warn or raise if any rank has found differences; all ranks call it."""
        texts = self._comm.exchange(json.dumps(found)) if self._comm.size > 1 else []
        for rank, text in enumerate(texts):
            others = [each for each in json.loads(text) if each not in found]
            found = found + [f"{each} (rank {rank})" for each in others]
        if not found:
            return
        message = f"resuming will not be bitwise identical to the saved run: {'; '.join(found)}"
        if self._strict:
            raise InvalidState(f"{message}. Use the saved settings, or pass strict=False")
        warn_user(message, RuntimeWarning)

    def _compare_arguments(self, options: dict[str, Any]) -> None:
        ranks = self._comm.size
        fingerprint = current_fingerprint(self._comm.device)
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
                f"{self.micro_batches} ranks"
            )

    def close(self) -> None:
        """Stop loader workers, wait for pending saves, and remove the hooks from the module.

        The group stays open. The run cannot be used afterwards.
        """
        for handle in self._handles:
            handle.remove()
        for loader in self.loaders:
            loader.close()
        self._reducer.close()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def __repr__(self) -> str:
        return (
            f"<ElasticRun: step {self.completed_steps}, {self.micro_batches} micro-batches, "
            f"rank {self._comm.rank} of {self._comm.size}>"
        )


def _resolve_group(group: Any) -> ProcessGroup:
    if group is None:
        group = default_group()
        if not isinstance(group, ProcessGroup):
            return new_group()
    if not isinstance(group, ProcessGroup):
        raise InvalidType(
            f"group must be a group of phalanx.groups.new_group(), got {type(group).__name__}"
        )
    return group


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


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method while its object is alive, without keeping it so."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        alive = weak()
        if alive is not None:
            alive()

    return call


def _check_before_step(run: ElasticRun) -> list[Any]:
    """Have the optimizers refuse to step with the gradients of a part of a step."""
    weak = weakref.ref(run)

    def check(*_: object) -> None:
        alive = weak()
        if alive is not None:
            alive._check_between_loops("optimizer.step()")

    return [optimizer.register_step_pre_hook(check) for optimizer in run.optimizers]


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
