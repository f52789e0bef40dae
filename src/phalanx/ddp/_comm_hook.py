"""Communication hooks: user code that reduces a bucket instead of the group.

A hook may raise on one rank only, return the wrong thing, or never finish, while its peers
wait. Every such fault aborts the group with a message, so that all ranks raise, and it must do
so before the peers' own deadline passes.

`GradBucket` is what a hook receives. It has the methods of `torch.distributed.GradBucket`.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.nn import Parameter

from ..errors import GroupError, HookError, InvalidArgument, InvalidType
from ._buckets import ResultMismatch
from ._communicator import Communicator
from ._dtensor import original_parameter


class GradBucket:
    """The gradients of some parameters, flat and one by one.

    Has the methods of ``torch.distributed.GradBucket``, so that hooks written for torch accept it,
    and `group` and `names`.
    """

    __slots__ = ("_buffer", "_gradients", "_index", "_is_last", "_parameters", "group", "names")

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[Parameter],
        is_last: bool,
        *,
        group: dist.ProcessGroup | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._index, self._buffer, self._is_last = index, buffer, is_last
        self._gradients, self._parameters = gradients, parameters
        self.group = group
        """The group in which the module reduces its gradients, if known."""
        self.names = names
        """The names of the parameters in the module, in order, if known.

        Buckets can be rearranged after the first step or after a restart. A hook that keeps state
        about gradients should key it by name."""

    def __repr__(self) -> str:
        dtype = str(self._buffer.dtype).removeprefix("torch.")
        what = f"{len(self._parameters)} gradients, {dtype}[{self._buffer.numel()}]"
        return f"<GradBucket {self._index}: {what}{', the last' if self._is_last else ''}>"

    def index(self) -> int:
        """Return the index of the bucket, in the order of reduction."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat tensor that holds the gradients one after the other."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """List the gradients: views of the buffer with the shapes and strides of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[Parameter]:
        """List the parameters, in the order of their gradients."""
        return [original_parameter(parameter) for parameter in self._parameters]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer by a tensor of the same size or larger, of any dtype."""
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"the buffer of a bucket is a Tensor, got {type(tensor).__name__}")
        old = self._buffer
        if old.is_sparse:
            fits, wanted = tensor.is_sparse and tensor.shape == old.shape, f"sparse {[*old.shape]}"
        else:
            needed = sum(each.numel() for each in self._gradients)
            fits = (
                tensor.layout is torch.strided
                and tensor.dim() == 1
                and tensor.is_contiguous()
                and tensor.numel() >= needed
            )
            wanted = f"flat, with at least {needed} elements"
        if not fits:
            raise InvalidArgument(
                f"the buffer of bucket {self._index} must be {wanted}, got "
                f"{str(tensor.layout).removeprefix('torch.')} {[*tensor.shape]}"
            )
        self._buffer = tensor
        if old.is_sparse:
            self._gradients = [tensor]
        else:
            shift = tensor.storage_offset() - old.storage_offset()
            self._gradients = [
                tensor.as_strided(view.shape, view.stride(), view.storage_offset() + shift)
                for view in self._gradients
            ]


Hook = Callable[[Any, Any], Future[Tensor]]
_BUCKETS = (inspect.Parameter.empty, GradBucket, c10d.GradBucket, "GradBucket", "dist.GradBucket")
_FUTURES = ("Future[Tensor]", "Future[torch.Tensor]")


def check_hook(hook: Any) -> None:
    """Raise if the signature of `hook` is not that of a communication hook."""
    if not callable(hook):
        raise InvalidType(f"a communication hook must be callable, got {type(hook).__name__}")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # some C functions have no signature
    try:
        signature.bind(None, None)
    except TypeError:
        raise InvalidArgument(
            f"a communication hook takes (state, bucket), but {hook_name(hook)} takes {signature}"
        ) from None
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in _BUCKETS:
        raise InvalidArgument(
            f"the bucket of hook {hook_name(hook)} must be annotated as GradBucket, "
            f"got {bucket.annotation}"
        )
    returns = signature.return_annotation
    text = returns if isinstance(returns, str) else str(returns)
    if returns is not signature.empty and not text.endswith(_FUTURES):
        raise InvalidArgument(
            f"hook {hook_name(hook)} must return torch.futures.Future[torch.Tensor], got {text}"
        )


def hook_name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or repr(hook))


# In seconds. An abort must reach the peers before they time out.
ABORT_MARGIN = 0.1  # the fraction of a group's timeout that is reserved for aborting
ABORT_SECONDS = 1.0  # the least to reserve, but no more than half of a short timeout
DIAGNOSIS_TIMEOUT = 10.0  # for a group whose deadline has passed to find the missing ranks
DEFAULT_TIMEOUT = 1800.0  # of groups that do not report a timeout


@dataclass(frozen=True)
class CommHook:
    """A hook, its state, and the group in which it reduces."""

    state: Any
    hook: Hook
    comm: Communicator

    @property
    def name(self) -> str:
        return hook_name(self.hook)

    def start(
        self, bucket: GradBucket, store: Callable[[Any], None], *, describe: Callable[[], str]
    ) -> HookWork:
        """Start to reduce a bucket; `store` stores the result, or raises `ResultMismatch`."""
        name = f"communication hook {self.name}"
        work = HookWork(self.comm, name, describe)
        work.store = store
        with work:
            work.future = self.hook(self.state, bucket)
        return work


class HookCall:
    """One call of a user's hook. A fault in it aborts the group and raises on every rank."""

    def __init__(
        self, comm: Communicator, name: str, describe: Callable[[], str] | None = None
    ) -> None:
        self._comm = comm
        self._name = name
        self._describe = describe
        timeout = comm.timeout or DEFAULT_TIMEOUT
        reserved = max(ABORT_MARGIN * timeout, min(ABORT_SECONDS, timeout / 2))
        self._timeout = timeout - reserved
        self.restart_timeout()

    def restart_timeout(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def error(self, why: str) -> HookError | GroupError:
        """Abort the group; return the error to raise, which is an earlier one if there is one."""
        failure = self._comm.failure()
        if failure is not None:
            return failure
        text = f"{self._name} {why}" + (f", for {self._describe()}" if self._describe else "")
        self._comm.abort(text)
        return HookError(text)

    def __enter__(self) -> None:
        """Begin to run the user's code. What it raises, every rank raises."""

    # Not a generator: the group names the user's line, which is the nearest frame outside phalanx.
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The group raises its own failures on every rank. Another group does not.
        is_known = isinstance(error, GroupError) and self._comm.failure() is not None
        if isinstance(error, Exception) and not (is_known or isinstance(error, HookError)):
            raise self.error(f"raised {type(error).__name__}: {error}") from error

    def check_future(self, future: Any) -> None:
        if not isinstance(future, torch._C.Future):
            kind = "None" if future is None else f"a {type(future).__name__}"
            raise self.error(f"returned {kind}, not a torch.futures.Future")

    def result(self, future: Any) -> Any:
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            # If the hook waits for peers in this group, the group will name the missing ranks.
            if not done.wait(max(0.0, self._deadline - time.monotonic())) and not (
                self._comm.is_busy() and done.wait(self._timeout + DIAGNOSIS_TIMEOUT)
            ):
                raise self.error(f"did not complete its future within {self._timeout:.3g} s")
        with self:
            return future.wait()


class HookWork(HookCall):
    """A bucket that a hook is reducing."""

    store: Callable[[Any], None]
    future: Any = None
    _has_ended = False

    def wait(self) -> bool:
        if self._has_ended:
            return True
        self.check_future(self.future)
        result = self.result(self.future)
        if isinstance(result, (list, tuple)) and len(result) == 1:
            (result,) = result
        with self:
            try:
                self.store(result)
            except ResultMismatch as error:
                raise self.error(f"returned a future of {error}") from None
        self._has_ended = True
        return True
