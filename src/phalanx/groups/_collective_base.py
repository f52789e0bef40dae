"""What the collectives share: reading torch's options, checking tensors, preparing reductions."""

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
from . import _validate as validate
from ._adapt import adapt_reduction, as_bytes, is_sum, plain_op
from ._engine import Engine, RawWork, Traits
from ._joint import JointWork
from ._sparse import SparseSum
from ._work import Work

if TYPE_CHECKING:
    from ..native._engine import Shortcut

__all__ = ["CollectiveBase", "Tensors", "Timeout", "also_named", "is_plain_real", "with_op"]

SUM = ReduceOp.SUM
PREMUL_SUM = ReduceOp.PREMUL_SUM
_STRIDED = torch.strided  # a name of this module is found sooner than one of torch's
Timeout = timedelta | None
Tensors = Sequence[Tensor]


Method = TypeVar("Method", bound=Callable[..., Work])


def also_named(**others: str) -> Callable[[Method], Method]:
    """Let a method take keywords under the other names that torch's overloads have for them."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def accepting(self: CollectiveBase, *args: Any, **kwargs: Any) -> Work:
            named = {others.get(name, name): value for name, value in kwargs.items()}
            return method(self, *args, **named)

        return cast(Method, accepting)

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
    _parties: int
    """How many ranks take part, where the engine does not know by itself."""
    _short: Shortcut | None
    """A shorter way for what is nothing special, where there is one."""
    _quick_types: frozenset[torch.dtype]
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
                validate.seconds(timeout)
                options.timeout = timeout
            if root is not None:
                options.rootRank = validate.rank(operation, root, self._size)
        elif root is not None:
            validate.rank(operation, options.rootRank, self._size)
        return options

    # -- tensors ---------------------------------------------------------------------------

    def _check_tensors(self, operation: str, tensors: Tensors, op: Any = SUM) -> None:
        for tensor in tensors:
            # Most are plain, and asking in one place is quicker.
            if not (self._takes_cpu and _is_plain(tensor)):
                validate.usable(operation, tensor, self._devices, self._backend)
        if not is_sum(op) and tensors:
            validate.reduction(operation, plain_op(op), tensors[0].dtype)
            if op == PREMUL_SUM:
                validate.factor(operation, tensors[0], op.factor)

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
        mine = validate.single(operation, tensors)
        if timeout is not None:
            validate.seconds(timeout)
        validate.rank(operation, peer, self._size, word=word)
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
                self._traits, operation, op, inputs=tensors, outputs=tensors, size=self._parties
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
        outs, ins = validate.flat_list(operation, outputs), validate.flat_list(operation, inputs)
        validate.same_length(operation, outs, len(ins), word="output")
        validate.same_dtype(operation, [*outs, *ins])
        self._check_tensors(operation, [*outs, *ins], op)
        for out, whole in zip(outs, ins, strict=True):
            validate.numel(operation, whole, out.numel() * self._size, word="input")
        plan = adapt_reduction(
            self._traits, operation, op, inputs=ins, outputs=outs, size=self._parties
        )
        adapted = with_op(opts, plan.op)
        method = self._engine._reduce_scatter_base
        pairs = list(zip(plan.outputs, plan.inputs, strict=True))

        def start() -> RawWork:
            return _joined([method(_flat(out), _flat(whole), adapted) for out, whole in pairs])

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
        validate.on_device("allreduce", tensors[0], self._devices, self._backend)
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
        outs, ins = validate.flat_list(operation, outputs), validate.flat_list(operation, inputs)
        validate.same_length(operation, outs, len(ins), word="output")
        validate.same_dtype(operation, [*outs, *ins])
        for out, part in zip(outs, ins, strict=True):
            validate.numel(operation, out, part.numel() * self._size, word="output")
        opts = self._options(c10d.AllgatherOptions, operation, opts, timeout)
        method = self._engine._allgather_base
        pairs = list(
            zip(self._movable(operation, outs), self._movable(operation, ins), strict=True)
        )
        return self._issue(
            operation,
            ins,
            lambda: _joined([method(_flat(out), _flat(part), opts) for out, part in pairs]),
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


def _joined(works: list[RawWork]) -> RawWork:
    return works[0] if len(works) == 1 else JointWork(works)
