"""Buffer synchronization: one rank's buffers before forward, or what a user's hook makes of them.

Futures that a hook returns are waited for at the end of backward.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable

from ..errors import InvalidHook
from ._autograd_hooks import on_backward
from ._comm_hook import HookCall, hook_name
from ._communicator import Communicator, broadcast_coalesced
from ._module_inspection import ModuleInventory

BufferHook = Callable[[Any, Any], Any]
"""``hook(state, buffers by name)`` returns None, a future or a list of futures."""


class _BufferCommHookLocation(enum.Enum):
    """When a buffer hook is called."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()


@dataclass
class _BufferCommHook:
    """A buffer hook, its state, and when it is called."""

    buffer_comm_hook: BufferHook
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: _BufferCommHookLocation

    def __post_init__(self) -> None:
        hook: Any = self.buffer_comm_hook
        if not callable(hook):
            raise InvalidHook(f"a buffer hook must be callable, got {type(hook).__name__}")
        if not isinstance(self.buffer_comm_hook_location, _BufferCommHookLocation):
            raise InvalidHook(
                "the location of a buffer hook must be a _BufferCommHookLocation, "
                f"got {self.buffer_comm_hook_location!r}"
            )


@dataclass
class BufferSynchronizer:
    """Makes the buffers of a module equal on all ranks."""

    _inventory: ModuleInventory
    _comm: Communicator
    hook: _BufferCommHook | None = None  # called instead of the broadcast
    _call: HookCall | None = None
    _futures: list[Any] = field(default_factory=list)

    @property
    def runs_after_forward(self) -> bool:
        after = _BufferCommHookLocation.POST_FORWARD
        return self.hook is not None and self.hook.buffer_comm_hook_location is after

    def sync(self, root: int) -> None:
        if self.hook is None:
            broadcast_coalesced(self._inventory.buffers(), self._comm, root=root)
            return
        self.wait()
        hook, name = self.hook.buffer_comm_hook, hook_name(self.hook.buffer_comm_hook)
        self._call = HookCall(self._comm, f"buffer hook {name}")
        with torch.no_grad(), self._call:
            returned = hook(self.hook.buffer_comm_hook_state, self._inventory.named_buffers())
        self._call.restart_timeout()  # the limit is for the futures
        if returned is not None:
            futures = list(returned) if isinstance(returned, (list, tuple)) else [returned]
            for future in futures:
                self._call.check_future(future)
            self._futures = futures

    def wait(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            assert self._call is not None
            self._call.result(future)

    def wait_in_backward(self, output: Any) -> None:
        """Make the backward pass from an output wait for the futures that the hook returned."""
        if self._futures and torch.is_grad_enabled():
            on_backward(output, lambda: Variable._execution_engine.queue_callback(self.wait))
