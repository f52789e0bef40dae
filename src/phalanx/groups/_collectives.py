"""The collectives of a process group, in both of torch's call forms.

`group.allreduce(tensor, op=ReduceOp.MAX, timeout=...)` and `group.allreduce([tensor], opts)` mean
the
same; so do the tensor and list forms of the other collectives. Each method validates its arguments,
adapts them to what the engine supports (`_reductions`) and calls `_issue`.

Validation must be complete before `_issue`: a mistake that only one rank makes must not leave
the other ranks waiting.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from ..errors import InvalidArgument, InvalidType
from . import _validation
from ._engine import Engine, JointWork, RawWork, Traits
from ._reductions import SparseSum, adapt_reduction, as_bytes, is_sum, plain_op
from ._work import Work

if TYPE_CHECKING:
    from ..native._engine import FastPath


SUM = ReduceOp.SUM
PREMUL_SUM = ReduceOp.PREMUL_SUM
_STRIDED = torch.strided  # a name of this module is found sooner than one of torch's
Timeout = timedelta | None
Tensors = Sequence[Tensor]


Method = TypeVar("Method", bound=Callable[..., Work])


def keyword_aliases(**others: str) -> Callable[[Method], Method]:
    """Let a method take keywords under the other names that torch's overloads have for them."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def accepting(self: CollectiveBase, *args: Any, **kwargs: Any) -> Work:
            named = {others.get(name, name): value for name, value in kwargs.items()}
            return method(self, *args, **named)

        return cast("Method", accepting)

    return decorate


class CollectiveBase(dist.ProcessGroup):
    """The machinery under `Collectives`; `ProcessGroup` provides `_issue`."""

    _engine: Engine
    _traits: Traits
    _devices: frozenset[str]
    _takes_cpu: bool
    _backend: str
    _size: int
    _rank: int
    _participants: int
    """How many ranks take part, where the engine does not know by itself."""
    _fast_path: FastPath | None
    """A shorter way for what is nothing special, where there is one."""
    _fast_dtypes: frozenset[torch.dtype]
    """Element types that the engine adds up with nobody's help."""

    def _issue(
        self,
        operation: str,
        tensors: list[Tensor],
        method: Callable[..., RawWork],
        args: tuple[Any, ...],
        *,
        timeout: Timeout = None,
        outputs: list[Tensor] | None = None,
        terms: tuple[Any, ...] = (),
        uneven: bool = False,
        finish: Callable[[], None] | None = None,
        transfer: bool = False,
        peer: int | None = None,
        single: bool = True,
    ) -> Work:
        """Number, check, record and start a call.

        `terms` is what ranks must agree on beside the operation and its first tensor; `uneven`
        says that even the shape may differ; `peer` is the one rank that a transfer depends on;
        `single` says that to the engine, too, it is one call.
        """
        raise NotImplementedError  # `ProcessGroup` has it

    def _issue_sum(self, tensor: Tensor) -> Work:
        """Do the same for a plain sum of one tensor, in the shortest way."""
        raise NotImplementedError  # `ProcessGroup` has it

    def _await_part(self, raw: RawWork) -> None:
        """Wait for the first part of a call that is being started, with the group's deadline."""
        raise NotImplementedError  # `ProcessGroup` has it

    # -- options ---------------------------------------------------------------------------

    def _reduce_options(
        self, kind: Any, operation: str, opts: Any, op: Any, timeout: Timeout
    ) -> tuple[Any, Any]:
        """Read a reduction's options, whichever form they came in: (options, operation).

        The operation is a plain enumeration, which compares fast, unless it carries a factor.
        """
        if isinstance(op, kind):
            opts = op
        elif not (op is None or isinstance(op, ReduceOp)):
            raise InvalidType(f"op is a ReduceOp or {kind.__name__}, not {type(op).__name__}")
        given = opts
        opts = self._options(kind, operation, opts, timeout)
        if op is not None and op is not opts:
            opts = with_op(opts, op) if given is not None else opts
            opts.reduceOp = op
        op = opts.reduceOp
        return opts, op if op == PREMUL_SUM else plain_op(op)

    def _options(self, kind: Any, operation: str, opts: Any, timeout: Any, root: Any = None) -> Any:
        """Read a call's options, whichever argument they came in."""
        if isinstance(opts, timedelta):  # torch's overloads have it in the same place
            opts, timeout = None, opts
        options = next((o for o in (opts, root, timeout) if isinstance(o, kind)), None)
        if options is None:
            _refuse_other_options(operation, kind, opts, root)
            options = kind()
            if timeout is not None:
                _validation.seconds(timeout)
                options.timeout = timeout
            if root is not None:
                options.rootRank = _validation.rank(operation, root, self._size)
        elif root is not None:
            _validation.rank(operation, options.rootRank, self._size)
        return options

    # -- tensors ---------------------------------------------------------------------------

    def _check_tensors(self, operation: str, tensors: Tensors, op: Any = SUM) -> None:
        for tensor in tensors:
            # Most are plain, and asking in one place is quicker.
            if not (self._takes_cpu and _is_plain(tensor)):
                _validation.usable(operation, tensor, self._devices, self._backend)
        if not is_sum(op) and tensors:
            _validation.reduction(operation, plain_op(op), tensors[0].dtype)
            if op == PREMUL_SUM:
                _validation.factor(operation, tensors[0], op.factor)

    def _movable(self, operation: str, tensors: list[Tensor]) -> list[Tensor]:
        """Check tensors, and show an engine that does not know their type the bytes."""
        self._check_tensors(operation, tensors)
        known = self._traits.dtypes
        if known is None:
            return tensors
        return [tensor if tensor.dtype in known else as_bytes(tensor) for tensor in tensors]

    def _movable_rows(self, operation: str, tensors: list[Tensor]) -> list[Tensor]:
        """Do the same for tensors that are split by rows: the bytes of a row stay together."""
        moved = self._movable(operation, tensors)
        return [
            seen if seen is tensor else seen.view(tensor.size(0), _row_bytes(tensor))
            for seen, tensor in zip(moved, tensors, strict=True)
        ]

    # -- transfers -------------------------------------------------------------------------

    def _transfer(
        self,
        operation: str,
        method: Callable[..., RawWork],
        tensors: Tensor | Tensors,
        peer: int,
        tag: int,
        timeout: Timeout,
        *,
        word: str,
    ) -> Work:
        """Send or receive a tensor."""
        mine = _validation.single(operation, tensors)
        if timeout is not None:
            _validation.seconds(timeout)
        _validation.rank(operation, peer, self._size, word=word)
        if peer == self._rank:
            raise InvalidArgument(
                f"{operation}: {word} {peer} is this rank itself; copy the tensor instead"
            )
        args = (self._movable(operation, mine), peer, tag)
        return self._issue(operation, mine, method, args, timeout=timeout, transfer=True, peer=peer)

    # -- reductions ------------------------------------------------------------------------

    def _reduce(
        self,
        operation: str,
        method: Callable[..., RawWork],
        opts: Any,
        op: Any,
        tensors: list[Tensor],
        *,
        outputs: list[Tensor] | None = None,
        terms: tuple[Any, ...] = (),
    ) -> Work:
        """Reduce tensors in place."""
        self._check_tensors(operation, tensors, op)
        known = self._traits.dtypes
        finish = None
        mine = tensors
        plain = is_sum(op)
        dtype = tensors[0].dtype
        if not plain or dtype is torch.bool or not (known is None or dtype in known):
            plan = adapt_reduction(
                self._traits,
                operation,
                op,
                inputs=tensors,
                outputs=tensors,
                size=self._participants,
            )
            mine, finish, method = plan.outputs, plan.finish, plan.starting(method)
            opts, op = with_op(opts, plan.op), plain_op(op)
        return self._issue(
            operation,
            tensors,
            method,
            (mine, opts),
            timeout=opts.timeout,
            outputs=outputs,
            terms=(op, *terms),
            finish=finish,
            single=len(tensors) == 1,
        )

    def _reduce_parts(
        self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any, op: Any
    ) -> Work:
        """Reduce whole tensors of which each rank keeps its part."""
        outs, ins = (
            _validation.flat_list(operation, outputs),
            _validation.flat_list(operation, inputs),
        )
        _validation.same_length(operation, outs, len(ins), word="output")
        _validation.same_dtype(operation, [*outs, *ins])
        self._check_tensors(operation, [*outs, *ins], op)
        for out, whole in zip(outs, ins, strict=True):
            _validation.numel(operation, whole, out.numel() * self._size, word="input")
        plan = adapt_reduction(
            self._traits, operation, op, inputs=ins, outputs=outs, size=self._participants
        )
        adapted = with_op(opts, plan.op)
        method = self._engine._reduce_scatter_base
        pairs = list(zip(plan.outputs, plan.inputs, strict=True))

        def start() -> RawWork:
            return _joint_work([method(_flat(out), _flat(whole), adapted) for out, whole in pairs])

        return self._issue(
            operation,
            ins,
            plan.starting(start),
            (),
            outputs=outs,
            timeout=opts.timeout,
            terms=(plain_op(op),),
            finish=plan.finish,
            single=len(pairs) == 1,
        )

    def _reduce_sparse(self, opts: Any, op: Any, tensors: list[Tensor]) -> Work:
        """Sum a sparse tensor; ranks may have different entries."""
        _validation.on_device("allreduce", tensors[0], self._devices, self._backend)
        if not is_sum(op):
            raise InvalidArgument("allreduce of sparse tensors can only SUM: make them dense first")
        start: Callable[[], RawWork] = functools.partial(self._engine.allreduce, tensors, opts)
        finish = None
        if not self._traits.sums_sparse:
            whole = SparseSum(self._engine, tensors[0], rank=self._rank, size=self._size)
            start, finish = functools.partial(whole.start, self._await_part), whole.finish
        return self._issue(
            "allreduce",
            tensors,
            start,
            (),
            timeout=opts.timeout,
            uneven=True,
            finish=finish,
            single=self._traits.sums_sparse,
        )

    def _exchange(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> tuple[Callable[..., RawWork], tuple[Any, ...], Callable[[], None] | None]:
        """Prepare an all-to-all of lists: (engine's method, arguments, finish)."""
        if self._traits.alltoall_lists:
            return self._engine.alltoall, (outputs, inputs, opts), None
        sizes = [tensor.numel() for tensor in outputs]
        # A copy, for what a rank that has left would have sent stays as it is.
        received = torch.cat([tensor.detach().reshape(-1) for tensor in outputs])

        def hand_out() -> None:
            for output, part in zip(outputs, torch.split(received, sizes), strict=True):
                output.detach().copy_(part.view(output.shape))

        sent = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        out_of = [tensor.numel() for tensor in inputs]
        return self._engine.alltoall_base, (received, sent, sizes, out_of, opts), hand_out

    def _gather_into(
        self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any, timeout: Timeout
    ) -> Work:
        """Collect tensors of all ranks, each into one tensor."""
        outs, ins = (
            _validation.flat_list(operation, outputs),
            _validation.flat_list(operation, inputs),
        )
        _validation.same_length(operation, outs, len(ins), word="output")
        _validation.same_dtype(operation, [*outs, *ins])
        for out, part in zip(outs, ins, strict=True):
            _validation.numel(operation, out, part.numel() * self._size, word="output")
        opts = self._options(c10d.AllgatherOptions, operation, opts, timeout)
        method = self._engine._allgather_base
        pairs = list(
            zip(self._movable(operation, outs), self._movable(operation, ins), strict=True)
        )
        return self._issue(
            operation,
            ins,
            lambda: _joint_work([method(_flat(out), _flat(part), opts) for out, part in pairs]),
            (),
            outputs=outs,
            timeout=opts.timeout,
            single=len(pairs) == 1,
        )


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def is_plain_real(tensor: Tensor) -> bool:
    """Tell whether a tensor of real numbers is what every engine takes."""
    return (
        tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is what every engine takes: dense memory of the CPU, as it reads."""
    return is_plain_real(tensor) and not tensor.is_conj()


def _refuse_other_options(operation: str, kind: Any, opts: Any, root: Any) -> None:
    strange = root if type(root).__name__.endswith("Options") else opts
    if strange is not None:
        told = type(strange).__name__
        raise InvalidType(f"{operation}: opts is {kind.__name__}, not {told}")


def with_op(opts: Any, op: Any) -> Any:
    """Copy options, for another operation: the caller's own stay as they are."""
    copy = type(opts)()
    for field in ("timeout", "asyncOp", "rootRank", "rootTensor"):
        if hasattr(opts, field):
            setattr(copy, field, getattr(opts, field))
    copy.reduceOp = op
    return copy


def _flat(tensor: Tensor) -> Tensor:
    """Show an engine that is particular about shapes a row of numbers."""
    return tensor.detach().view(-1)


def _joint_work(works: list[RawWork]) -> RawWork:
    return works[0] if len(works) == 1 else JointWork(works)


AVG = ReduceOp.AVG


class Collectives(CollectiveBase):
    """The collectives of a group, in terms of its engine."""

    # -- reductions ------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Tensor | Tensors | None = None,
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
        tensor: Tensor | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place, so that every rank has the result."""
        # The call of calls: what nearly everybody does, a plain sum or mean, takes a short way.
        if op is AVG and opts is timeout is None and self._fast_path:
            if work := self._fast_path.mean(tensors):
                return work
        elif op is opts is timeout is None:
            if self._fast_path and (work := self._fast_path.sum(tensors)):
                return work
            if (
                isinstance(tensors, Tensor)
                and tensors.dtype in self._fast_dtypes
                and is_plain_real(tensors)
            ):
                return self._issue_sum(tensors)
        mine = _validation.single("allreduce", tensors if tensor is None else tensor)
        opts, op = self._reduce_options(c10d.AllreduceOptions, "allreduce", opts, op, timeout)
        if mine[0].is_sparse:
            return self._reduce_sparse(opts, op, mine)
        return self._reduce("allreduce", self._engine.allreduce, opts, op, mine)

    def allreduce_coalesced(
        self, tensors: Tensors, op: Any = None, timeout: Timeout = None, *, opts: Any = None
    ) -> Work:
        """Reduce several tensors of one dtype over all ranks, in place, in one call."""
        name, kind = "allreduce_coalesced", c10d.AllreduceCoalescedOptions
        mine = _validation.flat_list(name, tensors)
        _validation.same_dtype(name, mine)
        opts, op = self._reduce_options(kind, name, opts, op, timeout)
        if not mine:
            return self.barrier(timeout=timeout)
        return self._reduce(name, self._engine.allreduce_coalesced, opts, op, mine)

    @keyword_aliases(tensor="tensors")
    def reduce(
        self,
        tensors: Tensor | Tensors,
        root: Any = 0,
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place on the rank `root`."""
        mine = _validation.single("reduce", tensors)
        opts = self._options(c10d.ReduceOptions, "reduce", opts, timeout, root)
        opts, op = self._reduce_options(c10d.ReduceOptions, "reduce", opts, op, None)
        self._check_tensors("reduce", mine, op)
        # Only the root's tensor may change, whatever the engine uses for scratch.
        scratch = mine if self._rank == opts.rootRank else [mine[0].detach().clone()]
        return self._reduce(
            "reduce", self._engine.reduce, opts, op, scratch, outputs=mine, terms=(opts.rootRank,)
        )

    @keyword_aliases(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Tensors | Sequence[Tensors],
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Reduce a list of tensors over all ranks; rank i keeps the i-th."""
        name, kind = "reduce_scatter", c10d.ReduceScatterOptions
        output = _validation.single(name, output_tensors)
        inputs = _validation.nested_list(name, input_tensors)
        _validation.same_length(name, inputs, self._size, word="input")
        _validation.same_dtype(name, [*output, *inputs])
        _validation.numel(name, output[0], inputs[self._rank].numel(), word="output")
        opts, op = self._reduce_options(kind, name, opts, op, timeout)
        self._check_tensors(name, [*output, *inputs], op)
        plan = adapt_reduction(
            self._traits, name, op, inputs=inputs, outputs=output, size=self._participants
        )
        return self._issue(
            name,
            inputs,
            plan.starting(self._engine.reduce_scatter),
            (plan.outputs, [plan.inputs], with_op(opts, plan.op)),
            outputs=output,
            timeout=opts.timeout,
            terms=(plain_op(op),),
            finish=plan.finish,
            single=len({part.numel() for part in inputs}) == 1,
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
        name, kind = "reduce_scatter_single", c10d.ReduceScatterOptions
        opts, op = self._reduce_options(kind, name, opts, op, timeout)
        return self._reduce_parts(name, [output], [input], opts, op)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors over all ranks; rank i keeps the i-th part of each."""
        name = "reduce_scatter_single_coalesced"
        opts, op = self._reduce_options(c10d.ReduceScatterOptions, name, opts, None, None)
        return self._reduce_parts(name, outputs, inputs, opts, op)

    # -- one to all, all to one ------------------------------------------------------------

    @keyword_aliases(tensor="tensors")
    def broadcast(
        self,
        tensors: Tensor | Tensors,
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Copy a tensor from the rank `root` to every rank."""
        mine = _validation.single("broadcast", tensors)
        opts = self._options(c10d.BroadcastOptions, "broadcast", opts, timeout, root)
        args = (self._movable("broadcast", mine), opts)
        return self._issue(
            "broadcast",
            mine,
            self._engine.broadcast,
            args,
            timeout=opts.timeout,
            terms=(opts.rootRank,),
        )

    @keyword_aliases(input_tensor="input_tensors")
    def gather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: Tensor | Tensors,
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Collect a tensor from every rank on the rank `root`."""
        mine = _validation.single("gather", input_tensors)
        opts = self._options(c10d.GatherOptions, "gather", opts, timeout, root)
        outputs = _validation.nested_list("gather", output_tensors)
        if self._rank == opts.rootRank:
            _validation.one_for_each_rank("gather", outputs, mine[0], self._size, word="output")
        moved = self._movable("gather", outputs)
        args = ([moved] if outputs else [], self._movable("gather", mine), opts)
        return self._issue(
            "gather",
            mine,
            self._engine.gather,
            args,
            outputs=outputs,
            timeout=opts.timeout,
            terms=(opts.rootRank,),
        )

    @keyword_aliases(output_tensor="output_tensors")
    def scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Tensors | Sequence[Tensors] = (),
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Hand out a list of tensors from the rank `root`; rank i receives the i-th."""
        mine = _validation.single("scatter", output_tensors)
        opts = self._options(c10d.ScatterOptions, "scatter", opts, timeout, root)
        inputs = _validation.nested_list("scatter", input_tensors)
        if self._rank == opts.rootRank:
            _validation.one_for_each_rank("scatter", inputs, mine[0], self._size, word="input")
        moved = self._movable("scatter", inputs)
        args = (self._movable("scatter", mine), [moved] if inputs else [], opts)
        return self._issue(
            "scatter",
            mine,
            self._engine.scatter,
            args,
            timeout=opts.timeout,
            terms=(opts.rootRank,),
        )

    # -- all to all ------------------------------------------------------------------------

    @keyword_aliases(input_tensor="input_tensors")
    def allgather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: Tensor | Tensors,
        timeout: Any = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Collect a tensor from every rank in a list on every rank."""
        mine = _validation.single("allgather", input_tensors)
        outputs = _validation.nested_list("allgather", output_tensors)
        _validation.one_for_each_rank("allgather", outputs, mine[0], self._size, word="output")
        opts = self._options(c10d.AllgatherOptions, "allgather", opts, timeout)
        args = ([self._movable("allgather", outputs)], self._movable("allgather", mine), opts)
        work = self._issue(
            "allgather", mine, self._engine.allgather, args, outputs=outputs, timeout=opts.timeout
        )
        work.mark_gathered()
        return work

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> Work:
        """Collect a tensor from every rank, one after the other, in one tensor on every rank."""
        return self._gather_into("all_gather_single", [output], [input], opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Collect several tensors from every rank, each in one tensor on every rank."""
        return self._gather_into("all_gather_single_coalesced", outputs, inputs, opts, None)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work:
        """Collect a list of tensors from every rank: ``output_lists[rank][i]``."""
        name = "allgather_coalesced"
        mine = _validation.flat_list(name, input_list)
        lists = [_validation.flat_list(name, outputs) for outputs in output_lists]
        _validation.same_length(name, lists, self._size, word="list of output")
        opts = self._options(c10d.AllgatherOptions, name, opts, None)
        for outputs in lists:
            _validation.same_length(name, outputs, len(mine), word="output", each="input")
        for i, tensor in enumerate(mine):
            column = [outputs[i] for outputs in lists]
            _validation.one_for_each_rank(name, column, tensor, self._size, word="output")
        # One call for each, for engines differ in what they accept in one list.
        method = self._engine.allgather
        pairs = [
            (self._movable(name, [outputs[i] for outputs in lists]), self._movable(name, [tensor]))
            for i, tensor in enumerate(mine)
        ]
        return self._issue(
            name,
            mine,
            lambda: JointWork([method([outs], ins, opts) for outs, ins in pairs]),
            (),
            outputs=[tensor for outputs in lists for tensor in outputs],
            timeout=opts.timeout,
            single=len(mine) == 1,
        )

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
        both = self._movable_rows(
            name, _validation.single(name, output) + _validation.single(name, input)
        )
        _validation.same_dtype(name, [output, input])
        sizes = self._size
        into = _validation.splits(
            name, output, list(output_split_sizes or ()), sizes, word="output"
        )
        out_of = _validation.splits(name, input, list(input_split_sizes or ()), sizes, word="input")
        opts = self._options(c10d.AllToAllOptions, name, opts, timeout)
        args = (*self._movable_rows(name, both), into, out_of, opts)
        return self._issue(
            name,
            [input],
            self._engine.alltoall_base,
            args,
            outputs=[output],
            timeout=opts.timeout,
            uneven=True,
        )

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send the i-th tensor of a list to rank i and receive one tensor from each."""
        outputs = _validation.flat_list("alltoall", output_tensors)
        inputs = _validation.flat_list("alltoall", input_tensors)
        _validation.same_length("alltoall", outputs, self._size, word="output")
        _validation.same_length("alltoall", inputs, self._size, word="input")
        _validation.same_dtype("alltoall", [*outputs, *inputs])
        opts = self._options(c10d.AllToAllOptions, "alltoall", opts, timeout)
        method, args, finish = self._exchange(
            self._movable("alltoall", outputs), self._movable("alltoall", inputs), opts
        )
        return self._issue(
            "alltoall",
            inputs,
            method,
            args,
            outputs=outputs,
            timeout=opts.timeout,
            uneven=True,
            finish=finish,
        )

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> Work:
        """Wait until every rank has come here."""
        if opts is timeout is None and self._fast_path and (work := self._fast_path.barrier()):
            return work
        opts = self._options(c10d.BarrierOptions, "barrier", opts, timeout)
        return self._issue("barrier", [], self._engine.barrier, (opts,), timeout=opts.timeout)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here; every barrier of ours names who is missing."""
        del wait_all_ranks  # a timeout names them all in any case
        self.barrier(timeout=timeout).wait()

    # -- point to point --------------------------------------------------------------------

    def send(
        self, tensors: Tensor | Tensors, dstRank: int, tag: int = 0, timeout: Timeout = None
    ) -> Work:
        """Send a tensor to one rank."""
        method = self._engine.send
        return self._transfer("send", method, tensors, dstRank, tag, timeout, word="destination")

    def recv(
        self, tensors: Tensor | Tensors, srcRank: int, tag: int = 0, timeout: Timeout = None
    ) -> Work:
        """Receive a tensor from one rank."""
        method = self._engine.recv
        return self._transfer("recv", method, tensors, srcRank, tag, timeout, word="source")

    def recv_anysource(
        self, tensors: Tensor | Tensors, tag: int = 0, timeout: Timeout = None
    ) -> Work:
        """Receive a tensor from whichever rank sends one; ``work.source_rank()`` tells which."""
        mine = _validation.single("recv_anysource", tensors)
        if timeout is not None:
            _validation.seconds(timeout)
        args = (self._movable("recv_anysource", mine), tag)
        return self._issue(
            "recv_anysource",
            mine,
            self._engine.recv_anysource,
            args,
            timeout=timeout,
            transfer=True,
        )

    # -- torch's other names for the same --------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
