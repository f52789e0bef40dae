"""A hook of the user's in the place of the group's reduction.

What a hook does is not ours: it may raise on one rank only, return what is no use, or nothing at
all. Peers wait for it meanwhile, so whoever finds a hook at fault says so to all of them.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from ..errors import GroupError, HookError, InvalidArgument, InvalidType
from ._channel import Channel
from ._grad_bucket import GradBucket

__all__ = ["CommHook", "HookWork", "check_hook", "name_of", "patience"]

Hook = Callable[[Any, Any], Future[Tensor]]
MARGIN = 0.1
"""The share of a group's timeout that is left for telling peers, before theirs is over."""
TELLING = 1.0
"""Seconds that telling them takes, at most; but of a short timeout no more than half."""
Blame = Callable[[str], HookError | GroupError]
"""Makes an error of what is wrong with a hook."""
GRACE = 10.0
"""Seconds for a group whose deadline has passed to find out who is missing, at most."""
LONG = 1800.0
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
            f"a communication hook takes (state, bucket), and {name_of(hook)} takes {signature}"
        )
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _is_any(bucket.annotation, _BUCKETS):
        raise InvalidArgument(
            f"hook {name_of(hook)} takes a bucket that is {bucket.annotation}, not a GradBucket"
        )
    returns = signature.return_annotation
    told = returns if isinstance(returns, str) else str(returns)
    if returns is not signature.empty and not told.endswith(_FUTURES):
        raise InvalidArgument(
            f"hook {name_of(hook)} returns {told}, not torch.futures.Future[torch.Tensor]"
        )


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _is_any(annotation: Any, known: set[Any]) -> bool:
    return annotation is inspect.Parameter.empty or annotation in known


def patience(channel: Channel) -> float:
    """Tell how many seconds a hook may take, so that peers hear of it before their deadline."""
    whole = channel.timeout or LONG
    return whole - max(MARGIN * whole, min(TELLING, whole / 2))


def name_of(hook: Any) -> str:
    """Tell what to call a hook."""
    return str(getattr(hook, "__qualname__", None) or repr(hook))


class CommHook:
    """A hook, with its state and the group that it is to reduce in."""

    def __init__(self, state: Any, hook: Hook, channel: Channel) -> None:
        self._state = state
        self._hook = hook
        self._channel = channel
        self.name = name_of(hook)

    def start(
        self, shown: GradBucket, take: Callable[[Any], str], *, told: Callable[[], str]
    ) -> HookWork:
        """Have the hook reduce a bucket; `take` is given the result, `told` describes it."""
        work = HookWork(take, self._channel, lambda why: self._error(why, told()))
        with work.told_to_peers():
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

    def __init__(self, take: Callable[[Any], str], channel: Channel, error: Blame) -> None:
        self._take = take
        self._channel = channel
        self._error = error
        self._timeout = patience(channel)
        self._until = time.monotonic() + self._timeout

    def told_to_peers(self) -> _ToldToPeers:
        """Have what a hook of the user's raises in the body raised on every rank."""
        return _ToldToPeers(self._error, self._channel)

    def wait(self) -> bool:
        """Block until the bucket holds what the hook has made of it."""
        if self._has_ended:
            return True
        if not isinstance(self.future, torch._C.Future):
            raise self._error(f"returned {_kind(self.future)}, not a torch.futures.Future")
        if not self._is_done_in_time():
            raise self._error(f"did not end its future within {self._timeout:.3g} s")
        with self.told_to_peers():
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
        return self._channel.is_busy() and done.wait(self._timeout + GRACE)


class _ToldToPeers:
    """Turns what is raised in the body into an error of the hook's."""

    def __init__(self, error: Blame, channel: Channel) -> None:
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
