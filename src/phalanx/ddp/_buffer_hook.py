"""A hook of the user's in the place of the broadcast of buffers."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import GroupError, HookError
from ._channel import Channel
from ._comm_hook import name_of, patience

__all__ = ["BufferHook", "Pending", "_BufferCommHook", "_BufferCommHookLocation"]

BufferHook = Callable[[Any, Any], Any]
"""``hook(state, buffers by name)``, which returns nothing or futures."""


class _BufferCommHookLocation(enum.Enum):
    """When a hook for buffers is called."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()


@dataclass
class _BufferCommHook:
    """A hook for buffers, its state, and when it is called."""

    buffer_comm_hook: BufferHook
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: _BufferCommHookLocation

    @property
    def is_late(self) -> bool:
        """Tell whether it is called after forward."""
        return self.buffer_comm_hook_location is _BufferCommHookLocation.POST_FORWARD


class Pending:
    """What a hook for buffers has begun and backward has to wait for."""

    def __init__(self) -> None:
        self._works: list[tuple[str, Channel, float, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._works)

    def call(
        self, hook: _BufferCommHook, buffers: dict[str, torch.Tensor], channel: Channel
    ) -> None:
        """Call a hook, and keep the futures that it returns."""
        name = name_of(hook.buffer_comm_hook)
        try:
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, buffers)
        except GroupError:
            raise  # which the group raises on every rank
        except Exception as error:
            raise _blame(channel, name, f"raised {type(error).__name__}: {error}") from error
        until = time.monotonic() + patience(channel)
        if futures is not None:
            found = list(_futures(futures))
            for wrong in [each for each in found if not isinstance(each, torch._C.Future)]:
                raise _blame(channel, name, f"returned a {type(wrong).__name__}, not futures")
            self._works += [(name, channel, until, future) for future in found]

    def wait(self) -> None:
        """Block until every future has ended."""
        works, self._works = self._works, []
        for name, channel, until, future in works:
            if not _ends(future, until):
                raise _blame(channel, name, "did not end its future in time")
            try:
                future.wait()
            except GroupError:
                raise
            except Exception as error:
                raise _blame(channel, name, f"raised {type(error).__name__}: {error}") from error


def _futures(returned: Any) -> Iterable[Any]:
    return returned if isinstance(returned, (list, tuple)) else (returned,)


def _ends(future: Any, until: float) -> bool:
    if future.done():
        return True
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(max(0.0, until - time.monotonic()))


def _blame(channel: Channel, name: str, why: str) -> HookError | GroupError:
    """Say what is wrong with a hook, here and to all ranks; unless all know already."""
    failure = channel.failure()
    if failure is not None:
        return failure
    text = f"the hook for buffers {name} {why}"
    channel.give_up(text)
    return HookError(text)
