"""Uneven inputs: what a wrapped module does in a `Join` when ranks run out of data.

A rank without data leaves the group, and its header row stays empty. If it cannot leave,
because a communication hook needs all ranks, it shadows the calls of the ranks that have data:
buffer sync, the announcement of the next backward pass, and the pass itself with zero
gradients. The mean is over the initial world size or over the ranks that still have data.

At the end all ranks resynchronize: `broadcast_progress` and `broadcast_gradients` give every
rank the step counters, bucket order and gradients of one that had data to the end.
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
from ._communicator import Communicator, broadcast_coalesced
from ._module_inspection import ModuleInventory
from ._reducer import Reducer

if TYPE_CHECKING:
    from ._data_parallel import DistributedDataParallel


def broadcast_progress(reducer: Reducer, root: int) -> None:
    """Give every rank what one rank goes on with: what it trains, and how far it is."""
    mine = set(reducer.names)
    trained = [name in mine for name, _ in reducer.named]
    progress = [reducer.weights.unit or 0.0, *reducer.progress()]
    room = [0.0] * (len(trained) - len(mine))  # as long as if all were trained
    numbers = [*trained, *progress, *room]
    card = torch.tensor(numbers, dtype=torch.float64, device=reducer.channel.device)
    reducer.channel.broadcast(card, root).wait()
    numbers = card.tolist()
    unit, *rest = numbers[len(trained) :]
    _set_trainable(reducer, [bool(flag) for flag in numbers[: len(trained)]])
    reducer.weights.unit = unit or None
    reducer.catch_up(
        [int(number) for number in rest[: len(rest) - len(reducer.named) + len(reducer.names)]]
    )


def _set_trainable(reducer: Reducer, trained: list[bool]) -> None:
    """Have these parameters need gradients and no others, if that is a change."""
    mine = set(reducer.names)
    changed = False
    for (name, parameter), is_trained in zip(reducer.named, trained, strict=True):
        if is_trained != (name in mine):
            parameter.requires_grad_(is_trained)
            changed = True
    if changed:
        reducer.track_trainable_parameters()


def broadcast_gradients(reducer: Reducer, root: int) -> None:
    """Give every rank the root's gradients, unless they are its own alone, or sparse."""
    gradients = [p.grad for p in reducer.parameters]
    shared = [
        int(g is not None and not g.is_sparse and not reducer.has_local_grads) for g in gradients
    ]
    card = torch.tensor(shared, device=reducer.channel.device)
    reducer.channel.broadcast(card, root).wait()
    with torch.no_grad():
        for parameter, is_there in zip(reducer.parameters, card.tolist(), strict=True):
            if not is_there:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.zeros_like(parameter)
    there = [p.grad for p in reducer.parameters if p.grad is not None]
    broadcast_coalesced(there, reducer.channel, root=root)
    reducer.drop_local_grads()


class NextBackward(enum.IntEnum):
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
    _channel: Communicator
    _survey: ModuleInventory
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
        return self.reducer.expects_backward or self.reducer.is_running

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

    def _begin_join_step(self) -> None:
        """Say that there is data, before any other call; not in evaluation, which is no step."""
        if torch.is_grad_enabled():
            Join.notify_join_context(self)
            self.reducer.scaling.divides_by_all = self._divides_by_all
            self.reducer.may_lack_data = True

    def _announce_backward(self) -> None:
        """Make buffers alike, and tell ranks that follow what backward pass will come."""
        if not torch.is_grad_enabled():
            return
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if not self._ranks_leave:
            is_reduced = self.require_backward_grad_sync
            self._agree_on_backward(NextBackward.REDUCED if is_reduced else NextBackward.LOCAL)
        else:
            self.reducer.weights.unit = None  # whoever is still there chooses it with the pass

    @property
    def _ranks_leave(self) -> bool:
        """Tell whether ranks without data leave, so that nobody has to know what calls to make."""
        return self._join_block is not None and self._join_block.leaves

    def _agree_on_backward(self, follows: NextBackward) -> NextBackward:
        weight = self.reducer.weights.current if follows is not NextBackward.UNKNOWN else None
        mine = [float(follows), weight or 0.0]
        card = torch.tensor(mine, dtype=torch.float64, device=self._channel.device)
        heard = [part.tolist() for part in self._channel.gather(card)]
        self.reducer.weights.agree([weight for _, weight in heard])
        return NextBackward(max(int(theirs) for theirs, _ in heard))

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Give every rank the parameters and buffers of one that had data to the end."""
        cards = self._channel.gather(torch.tensor([int(is_last_joiner)], device=self.device))
        last = [rank for rank, card in enumerate(cards) if card.item()]
        root = last[-1]
        if len(last) < len(cards):
            if self._ranks_leave:
                broadcast_progress(self.reducer, root)
            broadcast_gradients(self.reducer, root)
            self.reducer.record_again()
            self.require_forward_param_sync = True  # whatever pass each rank has made last
        parameters = [parameter for _, parameter in self._survey.parameters]
        broadcast_coalesced([*parameters, *self._survey.buffers()], self._channel, root=root)

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
        follows = ddp._agree_on_backward(NextBackward.UNKNOWN)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers()
        ddp._wait_for_buffers()
        ddp.require_forward_param_sync = follows is NextBackward.REDUCED
        ddp.reducer.shadow(reduces=follows is NextBackward.REDUCED)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had data to the end."""
        self.ddp._sync_final_model(is_last_joiner)
        self.ddp.reducer.scaling.divides_by_all = None
        self.ddp.reducer.may_lack_data = False
