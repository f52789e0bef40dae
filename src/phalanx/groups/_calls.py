"""What the collectives share: reading torch's options, checking tensors, preparing reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from ..errors import InvalidArgument
from . import _validate as validate
from ._adapt import adapt_reduction, as_bytes, plain_op
from ._engine import Engine, RawWork, Traits
from ._joint import JointWork
from ._work import Work

__all__ = ["Calls", "Tensors", "Timeout", "with_op"]

SUM = ReduceOp.SUM
PREMUL_SUM = ReduceOp.PREMUL_SUM
Timeout = timedelta | None
Tensors = Sequence[Tensor]


class Calls(dist.ProcessGroup):
    """The machinery under `Collectives`; `ProcessGroup` provides `_issue`."""

    _engine: Engine
    _traits: Traits
    _devices: frozenset[str]
    _backend: str
    _size: int
    _rank: int
    _sum_options: dict[Any, Any]

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
    ) -> Work:
        """Number, check, record and start a call.

        `terms` is what ranks must agree on beside the operation and its first tensor; `uneven`
        says that even the shape may differ; `peer` is the one rank that a transfer depends on.
        """
        raise NotImplementedError  # `ProcessGroup` has it

    # -- options ---------------------------------------------------------------------------

    def _reduce_options(self, kind: Any, opts: Any, op: Any, timeout: Timeout) -> tuple[Any, Any]:
        """Read a reduction's options, whichever form they came in: (options, operation).

        The operation is a plain enumeration, which compares fast, unless it carries a factor.
        """
        if opts is None and timeout is None and (op is None or op is SUM):
            # By far the most frequent case; making and filling options costs microseconds.
            known = self._sum_options.get(kind)
            if known is None:
                known = self._sum_options[kind] = kind()
            return known, SUM
        if isinstance(op, kind):
            opts = op
        if opts is None:
            opts = self._options(kind, kind.__name__, None, timeout)
            opts.reduceOp = SUM if op is None else op
        op = opts.reduceOp
        return opts, op if op == PREMUL_SUM else plain_op(op)

    def _options(self, kind: Any, operation: str, opts: Any, timeout: Any, root: Any = None) -> Any:
        """Read a call's options, whichever argument they came in."""
        options = next((o for o in (opts, root, timeout) if isinstance(o, kind)), None)
        if options is None:
            options = kind()
            if timeout is not None:
                validate.seconds(timeout)
                options.timeout = timeout
            if root is not None:
                options.rootRank = validate.root_rank(operation, root, self._size)
        elif root is not None:
            validate.root_rank(operation, options.rootRank, self._size)
        return options

    # -- tensors ---------------------------------------------------------------------------

    def _check_tensors(self, operation: str, tensors: Tensors, op: Any = SUM) -> None:
        for tensor in tensors:
            validate.usable(operation, tensor, self._devices, self._backend)
        if op is not SUM and op != SUM and tensors:
            validate.reduction(operation, plain_op(op), tensors[0].dtype)

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
            seen if seen is tensor else seen.view(tensor.size(0), -1)
            for seen, tensor in zip(moved, tensors, strict=True)
        ]

    def _other(self, operation: str, rank: int, *, word: str) -> None:
        validate.root_rank(operation, rank, self._size, word=word)
        if rank == self._rank:
            raise InvalidArgument(
                f"{operation}: {word} {rank} is this rank itself; copy the tensor instead"
            )

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
        plain = op is SUM or op == SUM
        if not plain or not (known is None or tensors[0].dtype in known):
            plan = adapt_reduction(
                self._traits, operation, op, inputs=tensors, outputs=tensors, size=self._size
            )
            mine, finish = plan.outputs, plan.finish
            opts, op = with_op(opts, plan.op, op), plain_op(op)
        return self._issue(
            operation,
            tensors,
            method,
            (mine, opts),
            timeout=opts.timeout,
            outputs=outputs,
            terms=(op, *terms),
            finish=finish,
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
            self._traits, operation, op, inputs=ins, outputs=outs, size=self._size
        )
        adapted = with_op(opts, plan.op, op)
        method = self._engine._reduce_scatter_base
        pairs = list(zip(plan.outputs, plan.inputs, strict=True))
        return self._issue(
            operation,
            ins,
            lambda: _joined([method(out, whole, adapted) for out, whole in pairs]),
            (),
            outputs=outs,
            timeout=opts.timeout,
            terms=(plain_op(op),),
            finish=plan.finish,
        )

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
            lambda: _joined([method(out, part, opts) for out, part in pairs]),
            (),
            outputs=outs,
            timeout=opts.timeout,
        )


def with_op(opts: Any, op: Any, given: Any) -> Any:
    """Return options that ask for `op` where the caller's ask for `given`."""
    if op is given:
        return opts
    copy = type(opts)()
    for field in ("timeout", "asyncOp", "rootRank", "rootTensor"):
        if hasattr(opts, field):
            setattr(copy, field, getattr(opts, field))
    copy.reduceOp = op
    return copy


def _joined(works: list[RawWork]) -> RawWork:
    return works[0] if len(works) == 1 else JointWork(works)
