"""The part of the wrapper that keeps buffers alike: rank 0's, or what a hook makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ..errors import InvalidArgument, InvalidHook
from ._arguments import check_layers
from ._buffer_hook import BufferHook, Pending, _BufferCommHook, _BufferCommHookLocation
from ._buffers import CHUNK, broadcast_tensors
from ._channel import Channel
from ._outputs import on_backward
from ._survey import Survey

__all__ = ["BufferSync"]


class BufferSync:
    """Torch's methods for buffers."""

    forward_sync_buffers: bool
    require_forward_param_sync: bool
    device: torch.device
    _channel: Channel
    _survey: Survey
    _join_config: Any

    buffer_hook: _BufferCommHook | None = None
    """What is called in the place of the broadcast."""
    _pending: Pending | None = None

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
        is_late = self.buffer_hook is not None and self.buffer_hook.is_late
        return not is_late and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Tell whether buffers are made alike after forward."""
        is_late = self.buffer_hook is not None and self.buffer_hook.is_late
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
        self._finish_buffers()
        self._pending = Pending()
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
        size = CHUNK if bucket_size is None else bucket_size
        self._distributed_broadcast_coalesced(tensors, size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_tensors(tensors, self._channel, root=authoritative_rank, chunk=buffer_size)

    def _finish_buffers(self) -> None:
        """Wait for what the hook has begun."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _finish_forward(self, output: Any) -> None:
        """Call the hook if its time is after forward; backward waits for what it has begun."""
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if self._pending and torch.is_grad_enabled():
            on_backward(output, self._finish_buffers_at_the_end)

    def _finish_buffers_at_the_end(self) -> None:
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
        check_layers(Survey.of(module, ()).sync_norms, self.device)
