"""The part of the wrapper that lets ranks run out of data at different steps.

In a `Join`, a rank that has no data left leaves the group, and its row of the header is empty. If
that cannot be, because of a hook which counts on all ranks, it makes the calls of those that have
data: in forward the buffers, then what backward pass follows, then the pass itself, to which it
brings zeros; its row says so. The mean is over all ranks that there were, or over those that still
have data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..errors import InvalidType
from ..join import Join, Joinable, JoinHook
from ._buffers import broadcast_tensors
from ._catching_up import share_gradients, share_progress
from ._channel import Channel
from ._reducer import Reducer
from ._survey import Survey

if TYPE_CHECKING:
    from ._module import DistributedDataParallel

__all__ = ["Joining", "_DDPJoinHook"]


class Follows(enum.IntEnum):
    """What a forward pass is followed by."""

    UNKNOWN = 0
    """What a rank without data can say."""
    LOCAL = 1
    """A backward pass that is kept local."""
    REDUCED = 2


class Joining(Joinable):
    """Torch's methods for uneven inputs."""

    device: torch.device
    process_group: dist.ProcessGroup
    reducer: Reducer
    buffer_hook: Any
    require_backward_grad_sync: bool
    _channel: Channel
    _survey: Survey
    _divides_by_all = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> Join:
        """Let ranks run out of data at different steps of a loop in the body."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            optimizers=optimizers,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make what a rank without data does; takes `divide_by_initial_world_size`."""
        return _DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def can_leave(self) -> bool:
        """Tell whether gradients are right when ranks leave: hooks count on all of them."""
        return self.reducer.hook is None and self.buffer_hook is None

    @property
    def is_in_step(self) -> bool:
        """Tell whether a backward pass is to come, or has not ended."""
        return self.reducer.expects_backward or self.reducer.is_under_way

    @property
    def join_optimizers(self) -> list[Optimizer]:
        """List the optimizers in backward."""
        return self.reducer.optimizers.all()

    @property
    def join_device(self) -> torch.device:
        """Tell where the module is."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Tell the group in which gradients are reduced."""
        return self.process_group

    def _begin_step_of_join(self) -> None:
        """Say that there is data, before any other call; not in evaluation, which is no step."""
        if torch.is_grad_enabled():
            Join.notify_join_context(self)
            self.reducer.scaling.divides_by_all = self._divides_by_all
            self.reducer.keeps_apart = True

    def _tell_what_follows(self) -> None:
        """Make buffers alike, and tell ranks that follow what backward pass will come."""
        if not torch.is_grad_enabled():
            return
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if not self._is_left_by_others:
            is_reduced = self.require_backward_grad_sync
            self._agree_on_what_follows(Follows.REDUCED if is_reduced else Follows.LOCAL)
        else:
            self.reducer.weights.unit = None  # whoever is still there chooses it with the pass

    @property
    def _is_left_by_others(self) -> bool:
        """Tell whether ranks without data leave, so that nobody has to know what calls to make."""
        return self._join_block is not None and self._join_block.leaves

    def _agree_on_what_follows(self, follows: Follows) -> Follows:
        weight = self.reducer.weights.current if follows is not Follows.UNKNOWN else None
        mine = [float(follows), weight or 0.0]
        card = torch.tensor(mine, dtype=torch.float64, device=self._channel.device)
        heard = [part.tolist() for part in self._channel.gather(card)]
        self.reducer.weights.agree([weight for _, weight in heard])
        return Follows(max(int(theirs) for theirs, _ in heard))

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Give every rank the parameters and buffers of one that had data to the end."""
        cards = self._channel.gather(torch.tensor([int(is_last_joiner)], device=self.device))
        last = [rank for rank, card in enumerate(cards) if card.item()]
        root = last[-1]
        if len(last) < len(cards):
            if self._is_left_by_others:
                share_progress(self.reducer, root)
            share_gradients(self.reducer, root)
            self.reducer.learn_anew()
            self.require_forward_param_sync = True  # whatever pass each rank has made last
        parameters = [parameter for _, parameter in self._survey.parameters]
        broadcast_tensors([*parameters, *self._survey.buffers()], self._channel, root=root)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        raise NotImplementedError

    def _check_sync_bufs_pre_fwd(self) -> bool:
        raise NotImplementedError

    def _sync_buffers(self) -> None:
        raise NotImplementedError


class _DDPJoinHook(JoinHook):
    """What a rank without data does in the place of a step of a wrapped module."""

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        if not isinstance(ddp, Joining):
            raise InvalidType(f"the hook is for a wrapped module, not {type(ddp).__name__}")
        self.ddp: DistributedDataParallel = ddp  # type: ignore[assignment]
        self.ddp._divides_by_all = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Make the calls of one forward and one backward pass."""
        ddp = self.ddp
        ddp.reducer.scaling.divides_by_all = ddp._divides_by_all
        ddp.reducer.prepare()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_module_buffers(ddp._find_common_rank(ddp._channel.rank, False))
        follows = ddp._agree_on_what_follows(Follows.UNKNOWN)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers()
        ddp._finish_buffers()
        ddp.require_forward_param_sync = follows is Follows.REDUCED
        ddp.reducer.shadow(reduces=follows is Follows.REDUCED)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had data to the end."""
        self.ddp._sync_final_model(is_last_joiner)
        self.ddp.reducer.scaling.divides_by_all = None
        self.ddp.reducer.keeps_apart = False
