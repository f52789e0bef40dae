"""Arguments of collectives: torch's two call forms, checks, and what engines cannot take.

`group.allreduce(tensor, op=ReduceOp.MAX, timeout=...)` and `group.allreduce([tensor], opts)` mean
the same; so do the tensor and list forms of the other collectives. `ProcessGroup` reads either
form with `CallArguments`, which also completes the validation, and issues the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import InvalidType
from . import _validation
from ._engine import Traits, copy_options
from ._reductions import PREMUL_SUM, SUM, as_bytes, is_sum, plain_op
from ._work import Work

_STRIDED = torch.strided  # a module global is faster to load than an attribute of torch
Timeout = timedelta | None
Tensors = Sequence[Tensor]
OneTensor = Tensor | Tensors  # the tensor, or a list of one
Method = TypeVar("Method", bound=Callable[..., Work])


def keyword_aliases(**aliases: str) -> Callable[[Method], Method]:
    """Accept keywords under the other names that torch's overloads use for them."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def accepting(self: object, *args: Any, **kwargs: Any) -> Work:
            renamed = {aliases.get(name, name): value for name, value in kwargs.items()}
            return method(self, *args, **renamed)

        return cast("Method", accepting)

    return decorate


class CallArguments:
    """Reads, checks and adapts the arguments of one group's collectives."""

    def __init__(self, size: int, devices: frozenset[str], backend: str, traits: Traits) -> None:
        self._size = size
        self._devices = devices
        self._takes_cpu = "cpu" in devices
        self._backend = backend
        self._dtypes = traits.dtypes

    def options(self, kind: Any, operation: str, opts: Any, timeout: Any, root: Any = None) -> Any:
        """Return a call's options of type `kind`, from whichever argument has them."""
        if isinstance(opts, timedelta):  # torch's overloads accept a timeout in its place
            opts, timeout = None, opts
        options = next((o for o in (opts, root, timeout) if isinstance(o, kind)), None)
        if options is None:
            other = root if type(root).__name__.endswith("Options") else opts
            if other is not None:
                raise InvalidType(
                    f"{operation}: opts must be {kind.__name__}, got {type(other).__name__}"
                )
            options = kind()
            if timeout is not None:
                _validation.as_seconds(timeout)
                options.timeout = timeout
            if root is not None:
                options.rootRank = _validation.as_rank(operation, root, self._size)
        elif root is not None:
            _validation.as_rank(operation, options.rootRank, self._size)
        return options

    def reduce_options(
        self, kind: Any, operation: str, opts: Any, op: Any, timeout: Timeout
    ) -> tuple[Any, Any]:
        """Return a reduction's options and its operation.

        The operation is a plain enumeration, which compares fast, unless it carries a factor.
        """
        if isinstance(op, kind):
            opts = op
        elif not (op is None or isinstance(op, ReduceOp)):
            raise InvalidType(
                f"{operation}: op must be a ReduceOp or {kind.__name__}, got {type(op).__name__}"
            )
        given = opts
        opts = self.options(kind, operation, opts, timeout)
        if op is not None and op is not opts:
            if given is not None:  # the caller's object stays as it is
                opts = copy_options(opts)
            opts.reduceOp = op
        op = opts.reduceOp
        return opts, op if op == PREMUL_SUM else plain_op(op)

    def check_tensors(self, operation: str, tensors: Tensors, op: Any = SUM) -> None:
        """Reject tensors that the engine cannot access, or cannot reduce with `op`."""
        for tensor in tensors:
            # Most tensors are plain; one test of that is faster than one for each mistake.
            if not (self._takes_cpu and is_plain(tensor) and not tensor.is_conj()):
                _validation.check_tensor(operation, tensor, self._devices, self._backend)
        if not is_sum(op) and tensors:
            _validation.check_reduction(operation, plain_op(op), tensors[0].dtype)
            if op == PREMUL_SUM:
                _validation.check_factor(operation, tensors[0], op.factor)

    def movable(self, operation: str, tensors: list[Tensor]) -> list[Tensor]:
        """Check tensors, and view those of a dtype that the engine lacks as bytes."""
        self.check_tensors(operation, tensors)
        known = self._dtypes
        if known is None:
            return tensors
        return [tensor if tensor.dtype in known else as_bytes(tensor) for tensor in tensors]

    def movable_rows(self, operation: str, tensors: list[Tensor]) -> list[Tensor]:
        """Do the same for tensors that are split by rows: the bytes of a row stay together."""
        moved = self.movable(operation, tensors)
        for place, tensor in enumerate(tensors):
            if moved[place] is not tensor:
                row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
                moved[place] = moved[place].view(len(tensor), row_bytes)
        return moved

    def pairs(
        self, operation: str, outputs: Tensors, inputs: Tensors
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Check that there is one output for each input, all of one dtype."""
        outs = _validation.as_list(operation, outputs)
        ins = _validation.as_list(operation, inputs)
        _validation.check_length(operation, outs, len(ins), word="output")
        _validation.check_same_dtype(operation, [*outs, *ins])
        return outs, ins


def is_plain(t: Tensor) -> bool:
    """Whether every engine takes this tensor of real numbers as it is."""
    return t.is_cpu and t.layout is _STRIDED and t.is_contiguous() and not t.is_neg()
