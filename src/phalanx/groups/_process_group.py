"""The process group: a `torch.distributed.ProcessGroup` that is an object of its own.

A collective takes the native fast path if it can (`_fast_path`). Otherwise its arguments are read
and checked (`_call_arguments`), rewritten if the engine lacks the reduction (`_reductions`), and
`Issuer.issue` starts it on the engine and returns a `Work`. `Membership` changes which ranks take
part; `FailureDetector` explains calls that do not end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d_ext
from torch._C._distributed_c10d import Store

from .._formatting import format_rank_ranges
from ..errors import GroupError, InvalidArgument, InvalidState
from . import _torch_integration as torch_tables
from . import _validation
from ._call_arguments import CallArguments, OneTensor, Tensors, Timeout, is_plain, keyword_aliases
from ._call_site import user_site
from ._engine import REAL_DTYPES, Engine, RawWork, flat_pairs, start_each
from ._failure_detector import FailureDetector, drop_engines_when_idle, keep_engine_alive
from ._flight_recorder import FlightRecorder, Record
from ._issuer import SUM_OPTIONS, Issuer
from ._membership import LEAVES, STAYS, Membership
from ._reductions import AVG, SparseSum, adapt_reduction, flatten_lists, is_sum
from ._status_store import Failure, StatusStore
from ._store import ClosedGroup, StoreClient
from ._watchdog import watch
from ._work import Work

if TYPE_CHECKING:
    from ._backend_registry import Backend
    from ._peers import Roster
    from ._store import HostedStore
    from .backends._shm_region import Slab


@dataclass(frozen=True)
class GroupConfig:
    """How a group was made, so that subgroups can be made the same way."""

    backend: str
    device: torch.device
    timeout: timedelta
    checks: bool | None
    options: dict[str, object]


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks that communicate; torch APIs accept it as a process group.

    Made by `new_group`, `split_group` and `merge_remote_group`, not by its constructor.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        config: GroupConfig,
        backend: Backend,
        engine: Engine,
        store: Store | None = None,
        caller_store: Store | None = None,
        hosted: HostedStore | None = None,
        roster: Roster,
        global_ranks: Sequence[int],
        torch_name: str = "",
        given_name: str = "",
        name_suffix: int = 0,
        desc: str = "",
    ) -> None:
        # The group's names:
        #   name, label   the full name in the store and in errors, equal on every rank
        #   given_name    the name that the user asked for; the label if there is none
        #   name_suffix   the number that tells groups of one given name apart, equal on every rank
        #   torch_name    the name in torch's tables, from the last two unless torch chose it
        #   desc          free text for torch
        size = len(global_ranks)
        traits = backend.traits
        # Without a store: with one, pybind11 would not make the object that calls back into Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.label = name
        """The group's full name, equal on every rank."""
        self.backend = backend.name
        """The name of the backend."""
        self.devices = traits.devices | {config.device.type}
        """The types of devices whose tensors the group accepts."""
        self.detects_mismatch = traits.detects_mismatch
        """Whether ranks that make different calls find out immediately, at no cost."""
        self.global_ranks = tuple(global_ranks)
        """The global rank of every rank of this group."""
        self._given_name = given_name
        self._name_suffix = name_suffix
        self._desc = desc
        self._rank = rank
        self._size = size
        self._config = config
        self._traits = traits
        self._store = store
        self._caller_store = caller_store  # kept alive: it may host the group's store
        self._hosted = hosted  # the store server, if this process opened it
        self._lease = None if hosted is None else hosted.lease()
        self._roster = roster
        self._status_store: StatusStore | None = None
        if store is not None:
            client = StoreClient(store).under("status")
            self._status_store = StatusStore(client, rank=rank, size=size)
        self._splits: dict[str, int] = {}
        self._splits_lock = threading.Lock()
        self._recorder = FlightRecorder()
        self._detector = FailureDetector(
            name=name,
            rank=rank,
            size=size,
            roster=roster,
            status_store=self._status_store,
            recorder=self._recorder,
            traits=traits,
            engine=engine,
        )
        self._issuer = Issuer(
            engine=engine,
            detector=self._detector,
            recorder=self._recorder,
            backend=backend.name,
            wrap_transfer=traits.wrap_transfer,
            timeout=_validation.as_seconds(config.timeout),
            checks=config.checks,
        )
        self._issue = self._issuer.issue
        self.can_leave_alone = self._issuer.can_leave_alone
        """Whether a rank may `leave` alone; other backends need `update_membership`."""
        self._membership = Membership(self._issuer, config, store)
        self._adapt = partial(adapt_reduction, traits, self._issuer)
        self._arguments = CallArguments(size, self.devices, backend.name, traits)
        # Dtypes that the engine sums without help.
        self._fast_dtypes = REAL_DTYPES if "cpu" in self.devices else frozenset[torch.dtype]()
        if traits.dtypes is not None:
            self._fast_dtypes &= traits.dtypes
        # A group that torch has named is entered in torch's tables by torch.
        self._is_registered_with_torch = not torch_name
        self._torch_name = torch_name or torch_tables.register_group(self, engine)
        keep_engine_alive(self._detector, engine)
        if self._status_store is not None:
            watch(self._detector)

    # -- properties ------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        """The name under which torch finds the group in this process.

        It is the given name, with a number if another group of any of its ranks has that name. It
        is equal on every rank, unless ranks are threads of one process.
        """
        return self._torch_name

    @property
    def group_desc(self) -> str:
        """The given description, or the backend and size."""
        return self._desc or f"{self.backend} group of {self._size}"

    def _set_group_desc(self, desc: str) -> None:
        """Set the description; torch calls this on groups that it has made."""
        self._desc = desc

    @property
    def shares_memory(self) -> bool:
        """Whether tensors of `allocate` lie in memory that every rank of the group can access."""
        return hasattr(self._engine, "allocate") and not self._issuer.closed

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls that do not pass one."""
        return timedelta(seconds=self._issuer.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls that do not pass one."""
        self._issuer.set_timeout(timeout)

    def failure(self) -> GroupError | None:
        """Return the error that a call would raise because the group has failed, or None."""
        cause = self._detector.failure
        return None if cause is None else self._detector.error(cause, None, None)

    def records(self) -> list[Record]:
        """List the last calls of this rank, oldest first."""
        return self._recorder.records()

    def get_group_store(self) -> Store | None:
        """Return the store in which the group keeps its keys."""
        return self._store

    @property
    def _engine(self) -> Engine:
        return self._issuer.engine

    def __repr__(self) -> str:
        state = self._issuer.closed or ("failed" if self._detector.failure else "")
        return (
            f"<ProcessGroup {self.label!r}: rank {self._rank} of {self._size} on {self.backend}"
            f"{', ' + state if state else ''}>"
        )

    # torch's C++ calls these by their C++ names.

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name under which torch finds the group."""
        return self._torch_name

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return self.backend

    # -- memory ----------------------------------------------------------------------------

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a tensor that this group's engine accesses without a copy, where it can.

        On ``shm`` it lives in shared memory, until its last view dies; elsewhere it is an ordinary
        tensor on the group's device. Its contents are not set.
        """
        if self.shares_memory:
            return cast("Tensor", self._engine.allocate(shape, dtype))
        return torch.empty(tuple(shape), dtype=dtype, device=self._config.device)

    def _allocate_shared(self, nbytes: int, *, owner: int) -> Tensor:
        """Make a byte tensor in the owner's shared memory, visible on every rank; all call it.

        Its contents are not set. If the owner has no room, every rank raises.
        """
        if not self.shares_memory:
            raise InvalidState(f"group {self.label!r} ({self.backend}) does not share memory")
        slab = self._engine._slab
        offset = torch.tensor([-1], dtype=torch.int64)
        error = InvalidState(f"rank {owner} has no shared memory for {nbytes} bytes")
        if self._rank == owner:
            try:
                offset.fill_(slab.allocate_shared(nbytes))
            except InvalidState as out_of_memory:
                error = out_of_memory
        self.broadcast(offset, root=owner).wait()
        if offset.item() < 0:
            raise error
        return cast("Tensor", slab.map_shared(owner, int(offset.item()), nbytes))

    @property
    def _shared_memory(self) -> Slab | None:
        """This rank's part of the memory that all ranks share, if there is any."""
        return cast("Slab", self._engine._slab) if self.shares_memory else None

    def _is_shared(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this rank's shared memory."""
        return self.shares_memory and self._engine._slab.holds(tensor)

    # -- membership ------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in the next call, as far as this rank knows."""
        return self._membership.members()

    def leave(self) -> None:
        """End this rank's membership: the other ranks' next calls continue without it.

        Waits for the collectives that this rank has started. Ranks keep their numbers, a mean is
        taken over the remaining ranks, and the part of an output that belongs to a rank that has
        left stays as it is. Afterwards only `rejoin` and `shutdown` can be called on this rank.
        """
        self._membership.leave()

    def update_membership(self, stays: bool = True) -> tuple[int, ...]:
        """Agree on which ranks stay; every member calls it at the same point.

        A rank that passes False has left when it returns, as after `leave`; the others' next calls
        continue among the returned ranks. It works on every backend. Where no rank may leave alone,
        the remaining ranks connect a new engine, once for each departure; if all ranks stay it is
        one small collective.
        """
        mine = STAYS if stays else LEAVES
        answer = torch.tensor([mine], dtype=torch.uint8, device=self._config.device)
        answers = answer.new_zeros(self._size)  # a rank that has left stays zero
        work = self._gather_into("update_membership", [answers], [answer], None, None)
        work.wait()
        return self._membership.update(answers.tolist(), work.call)

    def rejoin(self, timeout: timedelta | None = None) -> None:
        """Make every rank a member again, with equal sequence numbers.

        All ranks call it, whether they have left or not. A rank that has not left does so, and the
        calls of the others continue without it until they call this, too. It sleeps until the last
        rank has called. Unless `can_leave_alone`, all members call it at the same point.

        The timeout counts from the last call that a missing rank made on the group.

        After a timeout, or after a dead rank was excluded, it can be called again.
        """
        self._membership.rejoin(timeout)

    def exclude(self, ranks: Sequence[int]) -> None:
        """Continue without dead ranks, as if they had left; every survivor calls it.

        Calls in which they took no part complete among the survivors, so a ``work`` that raised
        `PeerLost` can be waited for again. It raises again, on every survivor, if they died halfway
        through it.
        """
        self._membership.exclude(ranks)

    # -- subgroups -------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
        *,
        backend: str | None = None,
        options: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this group's ranks, in the order given; None for the others.

        Only the members need to call it. It uses the store, not this group's engine, so the
        survivors of a failed or aborted group can continue with it. Backend, its options and the
        device default to this group's.
        """
        del opts, device_types
        from . import _factory  # here, since it imports this module

        config = _factory.derive_config(
            self._config, backend=backend, options=options, timeout=timeout, device=device
        )
        name = group_name or ""
        return _factory.split_group(
            self, ranks, config, name=name, given_name=name, desc=group_desc or ""
        )

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """Make one group of this group and others through `store`, `size` ranks in all.

        Every rank of each group calls it. Groups are ordered by the global rank of their first
        member, then by name, so that the new ranks do not depend on arrival.
        """
        from ._factory import merge_groups  # here, since it imports this module

        return merge_groups(
            self, store, size, timeout=timeout, name=group_name or "", desc=group_desc or ""
        )

    def _count_split(self, what: str) -> int:
        """Count the groups split off under a name that is equal on all of their ranks."""
        with self._splits_lock:
            count = self._splits[what] = self._splits.get(what, 0) + 1
        return count

    def _name_split(self, ranks: Sequence[int]) -> str:
        name = format_rank_ranges(ranks)
        count = self._count_split(name)
        return f"{name}#{count}" if count > 1 else name

    # -- closing ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End this rank's part in the group; peers that wait for it raise."""
        if self._close("shut the group down"):
            self._detector.record_shutdown(user_site())
            self._detach_engines()
            self._end_lease()

    def abort(self, why: str = "") -> None:
        """Fail the group on every rank: calls in flight raise `GroupAborted` with the reason."""
        site = user_site()
        if not self._close("aborted the group"):
            return
        cause = f"aborted the group at {site}{f', because {why}' if why else ''}"
        self._detector.fail(Failure("aborted", self._rank, cause))
        self._detector.check_futures()
        if hasattr(self._engine, "abort"):
            self._engine.abort()
        self._detector.record_shutdown(site)
        self._detach_engines()

    def _close(self, reason: str) -> bool:
        is_first = self._issuer.close(reason)
        if is_first and self._is_registered_with_torch:
            torch_tables.unregister_group(self)
        return is_first

    def _detach_engines(self) -> None:
        """Release the engines; with calls in flight they outlive the group until these end."""
        self._issuer.detach_engine()
        self._membership.detach_engines()
        drop_engines_when_idle(self._detector)
        if self._hosted is not None and self._status_store is not None:
            closed = ClosedGroup(self._status_store, self._roster, self._rank)
            self._hosted.closed_groups.append(closed)

    def _end_lease(self) -> None:
        """Release the hosted store; no group can be split off once it has closed."""
        if self._lease is not None:
            self._lease.end()

    # -- reductions ------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: OneTensor | None = None,
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
        tensor: Tensor | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place, so that every rank has the result."""
        # Nearly all calls are plain sums or means, so these are recognized first.
        if op is AVG and opts is timeout is None and self._issuer.fast_path:
            if work := self._issuer.fast_path.mean(tensors):
                return work
        elif op is opts is timeout is None:
            fast_path = self._issuer.fast_path
            if fast_path and (work := fast_path.sum(tensors)):
                return work
            if (
                isinstance(tensors, Tensor)
                and tensors.dtype in self._fast_dtypes
                and is_plain(tensors)
            ):
                args = ([tensors], SUM_OPTIONS)
                return self._issue("allreduce", args[0], self._engine.allreduce, args, SUM_OPTIONS)
        inputs = _validation.as_single("allreduce", tensors if tensor is None else tensor)
        kind = c10d_ext.AllreduceOptions
        opts, op = self._arguments.reduce_options(kind, "allreduce", opts, op, timeout)
        if inputs[0].is_sparse:
            return self._reduce_sparse(opts, op, inputs)
        return self._reduce("allreduce", self._engine.allreduce, opts, op, inputs)

    def allreduce_coalesced(
        self, tensors: Tensors, op: Any = None, timeout: Timeout = None, *, opts: Any = None
    ) -> Work:
        """Reduce several tensors of one dtype over all ranks, in place, in one call."""
        name = "allreduce_coalesced"
        kind = c10d_ext.AllreduceCoalescedOptions
        inputs = _validation.as_list(name, tensors)
        _validation.check_same_dtype(name, inputs)
        opts, op = self._arguments.reduce_options(kind, name, opts, op, timeout)
        if not inputs:
            return self.barrier(timeout=timeout)
        return self._reduce(name, self._engine.allreduce_coalesced, opts, op, inputs)

    @keyword_aliases(tensor="tensors")
    def reduce(
        self,
        tensors: OneTensor,
        root: Any = 0,
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place on the rank `root`."""
        outputs = _validation.as_single("reduce", tensors)
        opts = self._arguments.options(c10d_ext.ReduceOptions, "reduce", opts, timeout, root)
        opts, op = self._arguments.reduce_options(c10d_ext.ReduceOptions, "reduce", opts, op, None)
        self._arguments.check_tensors("reduce", outputs, op)
        # Only the root's tensor may change, whatever the engine uses for scratch.
        scratch = outputs if self._rank == opts.rootRank else [outputs[0].detach().clone()]
        return self._reduce("reduce", self._engine.reduce, opts, op, scratch, outputs)

    @keyword_aliases(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self,
        output_tensors: OneTensor,
        input_tensors: Tensors | Sequence[Tensors],
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Reduce a list of tensors over all ranks; rank i keeps the i-th."""
        name = "reduce_scatter"
        kind = c10d_ext.ReduceScatterOptions
        output = _validation.as_single(name, output_tensors)
        inputs = _validation.as_nested_list(name, input_tensors)
        _validation.check_length(name, inputs, self._size, word="input")
        _validation.check_same_dtype(name, [*output, *inputs])
        _validation.check_numel(name, output[0], inputs[self._rank].numel(), word="output")
        opts, op = self._arguments.reduce_options(kind, name, opts, op, timeout)
        self._arguments.check_tensors(name, [*output, *inputs], op)
        plan = self._adapt(name, self._engine.reduce_scatter, opts, inputs, output)
        args = (plan.outputs, [plan.inputs], plan.opts)
        finish = plan.finish
        # Engines may make one reduction for each part if the parts differ in size.
        one = len({part.numel() for part in inputs}) == 1
        return self._issue(
            name, inputs, plan.start, args, opts, outputs=output, finish=finish, one_engine_call=one
        )

    @keyword_aliases(outputTensor="output", inputTensor="input")
    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce a tensor over all ranks; rank i keeps the i-th part of it."""
        return self._reduce_parts("reduce_scatter_single", [output], [input], opts, op, timeout)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors over all ranks; rank i keeps the i-th part of each."""
        name = "reduce_scatter_single_coalesced"
        return self._reduce_parts(name, outputs, inputs, opts, None, None)

    # -- one to all, all to one ------------------------------------------------------------

    @keyword_aliases(tensor="tensors")
    def broadcast(
        self, tensors: OneTensor, root: Any = 0, timeout: Timeout = None, *, opts: Any = None
    ) -> Work:
        """Copy a tensor from the rank `root` to every rank."""
        name = "broadcast"
        inputs = _validation.as_single(name, tensors)
        opts = self._arguments.options(c10d_ext.BroadcastOptions, name, opts, timeout, root)
        args = (self._arguments.movable(name, inputs), opts)
        return self._issue(name, inputs, self._engine.broadcast, args, opts)

    @keyword_aliases(input_tensor="input_tensors")
    def gather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: OneTensor,
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Collect a tensor from every rank on the rank `root`."""
        name = "gather"
        inputs = _validation.as_single(name, input_tensors)
        opts = self._arguments.options(c10d_ext.GatherOptions, name, opts, timeout, root)
        like = inputs[0] if self._rank == opts.rootRank else None
        outputs = _validation.as_one_per_rank(name, output_tensors, like, self._size, word="output")
        received = [self._arguments.movable(name, outputs)] if outputs else []
        args = (received, self._arguments.movable(name, inputs), opts)
        return self._issue(name, inputs, self._engine.gather, args, opts, outputs=outputs)

    @keyword_aliases(output_tensor="output_tensors")
    def scatter(
        self,
        output_tensors: OneTensor,
        input_tensors: Tensors | Sequence[Tensors] = (),
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Send the i-th tensor of a list on the rank `root` to rank i."""
        name = "scatter"
        output = _validation.as_single(name, output_tensors)
        opts = self._arguments.options(c10d_ext.ScatterOptions, name, opts, timeout, root)
        like = output[0] if self._rank == opts.rootRank else None
        inputs = _validation.as_one_per_rank(name, input_tensors, like, self._size, word="input")
        sent = [self._arguments.movable(name, inputs)] if inputs else []
        args = (self._arguments.movable(name, output), sent, opts)
        return self._issue(name, output, self._engine.scatter, args, opts)

    # -- all to all ------------------------------------------------------------------------

    @keyword_aliases(input_tensor="input_tensors")
    def allgather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: OneTensor,
        timeout: Any = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Collect a tensor from every rank in a list on every rank."""
        name = "allgather"
        inputs = _validation.as_single(name, input_tensors)
        like = inputs[0]
        outputs = _validation.as_one_per_rank(name, output_tensors, like, self._size, word="output")
        opts = self._arguments.options(c10d_ext.AllgatherOptions, name, opts, timeout)
        movable = self._arguments.movable
        args = ([movable(name, outputs)], movable(name, inputs), opts)
        work = self._issue(name, inputs, self._engine.allgather, args, opts, outputs=outputs)
        work.is_gathered = True
        return work

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> Work:
        """Concatenate a tensor from every rank in one tensor on every rank."""
        return self._gather_into("all_gather_single", [output], [input], opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Concatenate several tensors from every rank, each in one tensor on every rank."""
        return self._gather_into("all_gather_single_coalesced", outputs, inputs, opts, None)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work:
        """Collect a list of tensors from every rank: ``output_lists[rank][i]``."""
        name = "allgather_coalesced"
        inputs = _validation.as_list(name, input_list)
        lists = [_validation.as_list(name, outputs) for outputs in output_lists]
        _validation.check_length(name, lists, self._size, word="list of output")
        for outputs in lists:
            _validation.check_length(name, outputs, len(inputs), word="output", each="input")
        columns = [list(column) for column in zip(*lists, strict=True)]
        for column, tensor in zip(columns, inputs, strict=True):
            _validation.as_one_per_rank(name, column, tensor, self._size, word="output")
        opts = self._arguments.options(c10d_ext.AllgatherOptions, name, opts, None)
        # One engine call for each, since engines differ in what they accept in one list.
        movable = self._arguments.movable
        calls = [
            ([movable(name, column)], movable(name, [tensor]), opts)
            for column, tensor in zip(columns, inputs, strict=True)
        ]
        args = (self._engine.allgather, calls)
        outs = [tensor for outputs in lists for tensor in outputs]
        one = len(calls) == 1
        return self._issue(name, inputs, start_each, args, opts, outputs=outs, one_engine_call=one)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send the i-th part of a tensor to rank i and receive one part from each."""
        name = "all_to_all_single"
        size = self._size
        both = _validation.as_single(name, output) + _validation.as_single(name, input)
        self._arguments.check_tensors(name, both)
        _validation.check_same_dtype(name, both)
        received = _validation.as_splits(name, output, output_split_sizes, size, word="output")
        sent = _validation.as_splits(name, input, input_split_sizes, size, word="input")
        opts = self._arguments.options(c10d_ext.AllToAllOptions, name, opts, timeout)
        args = (*self._arguments.movable_rows(name, both), received, sent, opts)
        method = self._engine.alltoall_base
        return self._issue(name, [input], method, args, opts, outputs=[output], uneven=True)

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send the i-th tensor of a list to rank i and receive one tensor from each."""
        name = "alltoall"
        outputs = _validation.as_list(name, output_tensors)
        inputs = _validation.as_list(name, input_tensors)
        _validation.check_length(name, outputs, self._size, word="output")
        _validation.check_length(name, inputs, self._size, word="input")
        _validation.check_same_dtype(name, [*outputs, *inputs])
        opts = self._arguments.options(c10d_ext.AllToAllOptions, name, opts, timeout)
        outs = self._arguments.movable(name, outputs)
        ins = self._arguments.movable(name, inputs)
        finish: Callable[[], None] | None = None
        if not self._traits.alltoall_lists:
            method, args, finish = flatten_lists(self._engine, outs, ins, opts)
        else:
            method = self._engine.alltoall
            args = (outs, ins, opts)
        return self._issue(
            name, inputs, method, args, opts, outputs=outputs, uneven=True, finish=finish
        )

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> Work:
        """Wait until every rank has called it."""
        fast_path = self._issuer.fast_path
        if opts is timeout is None and fast_path and (work := fast_path.barrier()):
            return work
        opts = self._arguments.options(c10d_ext.BarrierOptions, "barrier", opts, timeout)
        return self._issue("barrier", [], self._engine.barrier, (opts,), opts)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called it; a timeout always names all missing ranks."""
        del wait_all_ranks
        self.barrier(timeout=timeout).wait()

    # -- point to point --------------------------------------------------------------------

    def send(self, tensors: OneTensor, dstRank: int, tag: int = 0, timeout: Timeout = None) -> Work:
        """Send a tensor to one rank."""
        return self._transfer("send", tensors, dstRank, tag, timeout, "destination")

    def recv(self, tensors: OneTensor, srcRank: int, tag: int = 0, timeout: Timeout = None) -> Work:
        """Receive a tensor from one rank."""
        return self._transfer("recv", tensors, srcRank, tag, timeout, "source")

    def recv_anysource(self, tensors: OneTensor, tag: int = 0, timeout: Timeout = None) -> Work:
        """Receive a tensor from any rank; ``work.source_rank()`` returns which."""
        return self._transfer("recv_anysource", tensors, None, tag, timeout, "source")

    # torch's other names of these methods.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- shared by several collectives -----------------------------------------------------

    def _reduce(
        self,
        name: str,
        method: Callable[..., RawWork],
        opts: Any,
        op: Any,
        tensors: list[Tensor],
        outs: list[Tensor] | None = None,
    ) -> Work:
        """Reduce tensors in place."""
        self._arguments.check_tensors(name, tensors, op)
        known = self._traits.dtypes
        dtype = tensors[0].dtype
        args = (tensors, opts)
        finish = None
        if not is_sum(op) or dtype is torch.bool or not (known is None or dtype in known):
            plan = self._adapt(name, method, opts, tensors, tensors)
            method = plan.start
            args = (plan.outputs, plan.opts)
            finish = plan.finish
        one = len(tensors) == 1
        return self._issue(
            name, tensors, method, args, opts, outputs=outs, finish=finish, one_engine_call=one
        )

    def _ordered_allreduce(
        self, slots: Tensor, counts: Sequence[int], merges: Sequence[int], divisor: float
    ) -> Work:
        """Sum tensors of all ranks in the order of a tree; the quotient is stored in row 0.

        `slots` is two-dimensional and in shared memory. The `counts[rank]` rows of each rank that
        follow row 0 are added up, in rank order; after each of them come as many additions as
        `merges` says. They are not written to.
        """
        count = slots.shape[1]
        args = (slots, count, list(counts), list(merges), divisor)
        method = self._engine.ordered_allreduce
        return self._issue("allreduce", [slots[0]], method, args, SUM_OPTIONS)

    def _reduce_sparse(self, opts: Any, op: Any, tensors: list[Tensor]) -> Work:
        """Sum a sparse tensor; ranks may have different entries."""
        _validation.check_device("allreduce", tensors[0], self.devices, self.backend)
        if not is_sum(op):
            raise InvalidArgument(
                "allreduce: sparse tensors support only ReduceOp.SUM; pass tensor.to_dense()"
            )
        if self._traits.sums_sparse:
            method = self._engine.allreduce
            return self._issue("allreduce", tensors, method, (tensors, opts), opts, uneven=True)
        total = SparseSum(self._engine, tensors[0], self._rank, self._size)
        start = partial(total.start, self._issuer.await_part)
        finish = total.finish
        return self._issue(
            "allreduce", tensors, start, (), opts, uneven=True, finish=finish, one_engine_call=False
        )

    def _reduce_parts(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any, op: Any, timeout: Timeout
    ) -> Work:
        """Reduce whole tensors of which each rank keeps its part."""
        kind = c10d_ext.ReduceScatterOptions
        opts, op = self._arguments.reduce_options(kind, name, opts, op, timeout)
        outs, ins = self._arguments.pairs(name, outputs, inputs)
        self._arguments.check_tensors(name, [*outs, *ins], op)
        for out, whole in zip(outs, ins, strict=True):
            _validation.check_numel(name, whole, out.numel() * self._size, word="input")
        plan = self._adapt(name, start_each, opts, ins, outs)
        calls = flat_pairs(plan.outputs, plan.inputs, plan.opts)
        args = (self._engine._reduce_scatter_base, calls)
        finish = plan.finish
        one = len(ins) == 1
        return self._issue(
            name, ins, plan.start, args, opts, outputs=outs, finish=finish, one_engine_call=one
        )

    def _gather_into(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any, timeout: Timeout
    ) -> Work:
        """Collect tensors of all ranks, each into one tensor."""
        outs, ins = self._arguments.pairs(name, outputs, inputs)
        for out, part in zip(outs, ins, strict=True):
            _validation.check_numel(name, out, part.numel() * self._size, word="output")
        opts = self._arguments.options(c10d_ext.AllgatherOptions, name, opts, timeout)
        movable = self._arguments.movable
        calls = flat_pairs(movable(name, outs), movable(name, ins), opts)
        args = (self._engine._allgather_base, calls)
        one = len(ins) == 1
        return self._issue(name, ins, start_each, args, opts, outputs=outs, one_engine_call=one)

    def _transfer(
        self, name: str, tensors: OneTensor, peer: int | None, tag: int, timeout: Timeout, word: str
    ) -> Work:
        """Send or receive a tensor; `peer` is None for a receive from any rank."""
        moved = _validation.as_single(name, tensors)
        if timeout is not None:
            _validation.as_seconds(timeout)
        if name != "recv_anysource":
            _validation.as_rank(name, peer, self._size, word=word)
        if peer == self._rank:
            raise InvalidArgument(f"{name}: {word} {peer} is this rank itself; copy the tensor")
        route = (tag,) if peer is None else (peer, tag)
        args = (self._arguments.movable(name, moved), *route)
        method = getattr(self._engine, name)
        return self._issue(name, moved, method, args, timeout=timeout, peer=peer)
