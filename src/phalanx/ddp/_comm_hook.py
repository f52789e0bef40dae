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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.nn import Parameter

from ..errors import GroupError, HookError, InvalidArgument, InvalidType
from ._communicator import Communicator
from ._dtensor import whole


class GradBucket:
    """The gradients of some parameters, flat and one by one.

    Has the methods of ``torch.distributed.GradBucket``, so that hooks written for torch take it,
    and `group`, which torch leaves its hooks to guess.
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
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters
        self._is_last = is_last
        self.group = group
        """The group that the module reduces its gradients in; None if nobody has said."""
        self.names = names
        """What the parameters are called in the module, in order; None if nobody has said.

        A bucket may have other parameters after the first step, or when training goes on from a
        checkpoint: what is remembered of gradients goes by these."""

    def __repr__(self) -> str:
        kind = str(self._buffer.dtype).removeprefix("torch.")
        what = f"{len(self._parameters)} gradients, {kind}[{self._buffer.numel()}]"
        return f"<GradBucket {self._index}: {what}{', the last' if self._is_last else ''}>"

    def index(self) -> int:
        """Tell which bucket of the module this is."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat tensor in which the gradients lie one after the other."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """List the gradients: views of the buffer, shaped and laid out as their parameters are."""
        return list(self._gradients)

    def parameters(self) -> list[Parameter]:
        """List the parameters, in the order of their gradients."""
        return [whole(parameter) for parameter in self._parameters]

    def is_last(self) -> bool:
        """Tell whether no other bucket follows in this backward pass."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Have the gradients lie in another tensor, which may be of another dtype."""
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"a bucket's buffer is a Tensor, not {type(tensor).__name__}")
        old, self._buffer = self._buffer, self._checked(tensor)
        if old.is_sparse:
            self._gradients = [tensor]
        else:
            self._gradients = [_moved(each, old, tensor) for each in self._gradients]

    def _checked(self, tensor: Tensor) -> Tensor:
        """Refuse what has no room for the gradients, here where it is still known who gave it."""
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
            wanted = f"flat, with {needed} elements or more"
        if not fits:
            raise InvalidArgument(
                f"the buffer of bucket {self._index} is {wanted}, and not "
                f"{str(tensor.layout).removeprefix('torch.')} {[*tensor.shape]}"
            )
        return tensor


def _moved(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Show in one buffer what a view shows in another."""
    offset = view.storage_offset() - old.storage_offset()
    return new.as_strided(view.shape, view.stride(), new.storage_offset() + offset)


Hook = Callable[[Any, Any], Future[Tensor]]
ABORT_MARGIN = 0.1
"""The share of a group's timeout that is left for telling peers, before theirs is over."""
ABORT_SECONDS = 1.0
"""Seconds that telling them takes, at most; but of a short timeout no more than half."""
MakeHookError = Callable[[str], HookError | GroupError]
"""Makes an error of what is wrong with a hook."""
DIAGNOSIS_SECONDS = 10.0
"""Seconds for a group whose deadline has passed to find out who is missing, at most."""
DEFAULT_HOOK_TIMEOUT = 1800.0
"""Seconds that a hook may take where the group says nothing."""
_BUCKETS = {GradBucket, c10d.GradBucket, "GradBucket", "dist.GradBucket"}
_FUTURES = ("Future[Tensor]", "Future[torch.Tensor]")


def check_hook(hook: Any) -> None:
    """Refuse what cannot be a communication hook, as far as its signature tells."""
    if not callable(hook):
        raise InvalidType(f"a communication hook is a function, not {type(hook).__name__}")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # a function of C's does not tell
    positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    if not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in positional) and not (
        len(positional) >= 2 and all(p.default is not p.empty for p in positional[2:])
    ):
        raise InvalidArgument(
            f"a communication hook takes (state, bucket), and {hook_name(hook)} takes {signature}"
        )
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _is_any(bucket.annotation, _BUCKETS):
        raise InvalidArgument(
            f"hook {hook_name(hook)} takes a bucket that is {bucket.annotation}, not a GradBucket"
        )
    returns = signature.return_annotation
    told = returns if isinstance(returns, str) else str(returns)
    if returns is not signature.empty and not told.endswith(_FUTURES):
        raise InvalidArgument(
            f"hook {hook_name(hook)} returns {told}, not torch.futures.Future[torch.Tensor]"
        )


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _is_any(annotation: Any, known: set[Any]) -> bool:
    return annotation is inspect.Parameter.empty or annotation in known


def hook_timeout(channel: Communicator) -> float:
    """Tell how many seconds a hook may take, so that peers hear of it before their deadline."""
    whole = channel.timeout or DEFAULT_HOOK_TIMEOUT
    return whole - max(ABORT_MARGIN * whole, min(ABORT_SECONDS, whole / 2))


def hook_name(hook: Any) -> str:
    """Tell what to call a hook."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))


class CommHook:
    """A hook, with its state and the group that it is to reduce in."""

    def __init__(self, state: Any, hook: Hook, channel: Communicator) -> None:
        self._state = state
        self._hook = hook
        self._channel = channel
        self.name = hook_name(hook)

    def start(
        self, shown: GradBucket, take: Callable[[Any], str], *, told: Callable[[], str]
    ) -> HookWork:
        """Have the hook reduce a bucket; `take` is given the result, `told` describes it."""
        work = HookWork(take, self._channel, lambda why: self._error(why, told()))
        with work.abort_on_error():
            work.future = self._hook(self._state, shown)
        return work

    def _error(self, why: str, told: str) -> HookError | GroupError:
        """Say what is wrong, here and to all ranks; unless all know already, from another."""
        failure = self._channel.failure()
        if failure is not None:
            return failure
        text = f"communication hook {self.name} {why}, for {told}"
        self._channel.give_up(text)
        return HookError(text)


class HookWork:
    """A bucket that a hook is reducing."""

    future: Any = None
    _has_ended = False

    def __init__(
        self, take: Callable[[Any], str], channel: Communicator, error: MakeHookError
    ) -> None:
        self._take = take
        self._channel = channel
        self._error = error
        self._timeout = hook_timeout(channel)
        self._until = time.monotonic() + self._timeout

    def abort_on_error(self) -> _AbortOnError:
        """Have what a hook of the user's raises in the body raised on every rank."""
        return _AbortOnError(self._error, self._channel)

    def wait(self) -> bool:
        """Block until the bucket holds what the hook has made of it."""
        if self._has_ended:
            return True
        if not isinstance(self.future, torch._C.Future):
            raise self._error(f"returned {_kind(self.future)}, not a torch.futures.Future")
        if not self._is_done_in_time():
            raise self._error(f"did not end its future within {self._timeout:.3g} s")
        with self.abort_on_error():
            result = self.future.wait()
            if isinstance(result, (list, tuple)) and len(result) == 1:
                (result,) = result
            wrong = self._take(result)
        if wrong:
            raise self._error(f"returned a future of {wrong}")
        self._has_ended = True
        return True

    def _is_done_in_time(self) -> bool:
        if self.future.done():
            return True
        done = threading.Event()
        self.future.add_done_callback(lambda _: done.set())
        if done.wait(max(0.0, self._until - time.monotonic())):
            return True
        # If it waits for peers, the group knows who does not come, and will say so.
        return self._channel.is_busy() and done.wait(self._timeout + DIAGNOSIS_SECONDS)


class _AbortOnError:
    """Turns what is raised in the body into an error of the hook's."""

    def __init__(self, error: MakeHookError, channel: Communicator) -> None:
        self._error = error
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # What the group raises it raises on every rank; another group does not.
        is_known = isinstance(error, GroupError) and self._channel.failure() is not None
        if isinstance(error, Exception) and not (is_known or isinstance(error, HookError)):
            raise self._error(f"raised {type(error).__name__}: {error}") from error


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
