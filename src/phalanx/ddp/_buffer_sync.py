"""Buffer synchronization: rank 0's buffers before forward, or what a user's hook makes of them.

In a `Join`, rank 0 may have run out of data, so the root is the highest rank that still has
some. Futures that a hook returns are waited for at the end of backward.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ..errors import GroupError, HookError, InvalidArgument, InvalidHook
from ._autograd_hooks import on_backward
from ._comm_hook import hook_name, hook_timeout
from ._communicator import BROADCAST_BUCKET_BYTES, Communicator, broadcast_coalesced
from ._config import check_sync_batch_norms
from ._module_inspection import ModuleInventory

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
    def is_post_forward(self) -> bool:
        """Tell whether it is called after forward."""
        return self.buffer_comm_hook_location is _BufferCommHookLocation.POST_FORWARD


class PendingBufferHooks:
    """What a hook for buffers has begun and backward has to wait for."""

    def __init__(self) -> None:
        self._works: list[tuple[str, Communicator, float, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._works)

    def call(
        self, hook: _BufferCommHook, buffers: dict[str, torch.Tensor], channel: Communicator
    ) -> None:
        """Call a hook, and keep the futures that it returns."""
        name = hook_name(hook.buffer_comm_hook)
        try:
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, buffers)
        except GroupError:
            raise  # which the group raises on every rank
        except Exception as error:
            raise _hook_error(channel, name, f"raised {type(error).__name__}: {error}") from error
        until = time.monotonic() + hook_timeout(channel)
        if futures is not None:
            found = list(_futures(futures))
            for wrong in [each for each in found if not isinstance(each, torch._C.Future)]:
                raise _hook_error(channel, name, f"returned a {type(wrong).__name__}, not futures")
            self._works += [(name, channel, until, future) for future in found]

    def wait(self) -> None:
        """Block until every future has ended."""
        works, self._works = self._works, []
        for name, channel, until, future in works:
            if not _completes_by(future, until):
                raise _hook_error(channel, name, "did not end its future in time")
            try:
                future.wait()
            except GroupError:
                raise
            except Exception as error:
                raise _hook_error(
                    channel, name, f"raised {type(error).__name__}: {error}"
                ) from error


def _futures(returned: Any) -> Iterable[Any]:
    return returned if isinstance(returned, (list, tuple)) else (returned,)


def _completes_by(future: Any, until: float) -> bool:
    if future.done():
        return True
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(max(0.0, until - time.monotonic()))


def _hook_error(channel: Communicator, name: str, why: str) -> HookError | GroupError:
    """Say what is wrong with a hook, here and to all ranks; unless all know already."""
    failure = channel.failure()
    if failure is not None:
        return failure
    text = f"the hook for buffers {name} {why}"
    channel.give_up(text)
    return HookError(text)


class BufferSync:
    """Torch's methods for buffers."""

    forward_sync_buffers: bool
    require_forward_param_sync: bool
    device: torch.device
    _channel: Communicator
    _survey: ModuleInventory
    _join_config: Any

    buffer_hook: _BufferCommHook | None = None
    """What is called in the place of the broadcast."""
    _pending: PendingBufferHooks | None = None

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # -- when ------------------------------------------------------------------------------

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next forward pass begins with rank 0's buffers."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self._survey.buffers())
        )

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Tell whether buffers are made alike before forward."""
        is_late = self.buffer_hook is not None and self.buffer_hook.is_post_forward
        return not is_late and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Tell whether buffers are made alike after forward."""
        is_late = self.buffer_hook is not None and self.buffer_hook.is_post_forward
        return is_late and self.will_sync_module_buffers()

    # -- how -------------------------------------------------------------------------------

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Have a hook make buffers alike: ``hook(state, buffers by name)``.

        The futures that it returns, if any, have ended when backward has.
        """
        if not callable(hook):
            raise InvalidHook(f"a hook for buffers is a function, not {type(hook).__name__}")
        if not isinstance(comm_hook_location, _BufferCommHookLocation):
            raise InvalidHook(
                f"a hook for buffers is called at a _BufferCommHookLocation, not "
                f"{comm_hook_location!r}"
            )
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _sync_buffers(self) -> None:
        # In a join, rank 0 may be without data, and its buffers be old.
        if self._join_config.enable:
            self._sync_module_buffers(self._find_common_rank(self._channel.rank, True))
        else:
            self._sync_module_buffers(min(self._channel.members()))  # 0, unless it has left

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Make buffers alike: those of a rank, or what the hook makes of all of them."""
        if self.buffer_hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        named = self._survey.named_buffers()
        self._wait_for_buffers()
        self._pending = PendingBufferHooks()
        with torch.no_grad():
            self._pending.call(self.buffer_hook, named, self._channel)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Give every rank one rank's tensors; without any, its buffers."""
        tensors = self._survey.buffers() if bufs is None else bufs
        size = BROADCAST_BUCKET_BYTES if bucket_size is None else bucket_size
        self._distributed_broadcast_coalesced(tensors, size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(tensors, self._channel, root=authoritative_rank, chunk=buffer_size)

    def _wait_for_buffers(self) -> None:
        """Wait for what the hook has begun."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _finish_forward(self, output: Any) -> None:
        """Call the hook if its time is after forward; backward waits for what it has begun."""
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if self._pending and torch.is_grad_enabled():
            on_backward(output, self._wait_for_buffers_after_backward)

    def _wait_for_buffers_after_backward(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:  # it comes here for every output
            Variable._execution_engine.queue_callback(pending.wait)

    # -- what torch's class has besides ----------------------------------------------------

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """Agree on the highest rank of those that say that they will do."""
        # From 1: ranks that have left the group say 0.
        card = torch.tensor([input_rank + 1 if rank_cond else 0], device=self._channel.device)
        highest = max(int(part) for part in self._channel.gather(card))
        if not highest:
            raise InvalidArgument("no rank says that it will do: rank_cond is False on all")
        return highest - 1

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Refuse layers that normalise over all ranks where torch has none."""
        check_sync_batch_norms(ModuleInventory.of(module, ()).sync_norms, self.device)
