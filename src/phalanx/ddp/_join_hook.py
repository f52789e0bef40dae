"""Uneven inputs: what a wrapped module does in a `Join` when ranks run out of data.

A rank without data leaves the group, and its header row stays empty. If it cannot leave,
because a communication hook needs all ranks, it shadows the calls of the ranks that have data:
buffer sync, the announcement of the next backward pass, and the pass itself with zero
gradients. The mean is over the initial world size or over the ranks that still have data.

At the end all ranks resynchronize: every rank receives the step counters, bucket order, gradients,
parameters and buffers of one that had data to the end.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..errors import InvalidType
from ..join import Join, Joinable, JoinHook
from ._communicator import broadcast_coalesced
from ._dtensor import local_tensor
from ._reducer import Reducer

if TYPE_CHECKING:
    from ._data_parallel import DistributedDataParallel


class NextBackward(enum.IntEnum):
    """The backward pass that follows a forward pass."""

    UNKNOWN = 0  # on a rank without data
    LOCAL = 1
    REDUCED = 2


def agree_on_next_backward(reducer: Reducer, mine: NextBackward) -> NextBackward:
    """Exchange which backward pass follows, and the weight of this rank's loss in it."""
    weight = reducer.weights.current if mine is not NextBackward.UNKNOWN else None
    rows = reducer.comm.gather_numbers([mine, weight or 0.0], torch.float64)
    total = sum(weight for _, weight in rows)
    if total:
        reducer.weights.unit = total
    return NextBackward(max(int(theirs) for theirs, _ in rows))


def announce_step(ddp: DistributedDataParallel) -> None:
    """Tell the other ranks that this one has data for another step."""
    Join.notify_join_context(ddp)
    ddp.reducer.scaling.divide_by_initial_world_size = ddp._divide_by_initial_world_size
    ddp.reducer.may_lack_data = True


def announce_backward(ddp: DistributedDataParallel) -> None:
    """Tell ranks that shadow this one which backward pass follows."""
    if ddp._ranks_leave:  # so none shadows
        ddp.reducer.weights.unit = None  # the remaining ranks choose one with the pass
        return
    is_reduced = ddp.reducer.syncs_next_pass
    ddp.reducer.announced_local = not is_reduced
    agree_on_next_backward(ddp.reducer, NextBackward.REDUCED if is_reduced else NextBackward.LOCAL)


class _DDPJoinHook(JoinHook):
    """What a rank without data does in place of a step of a wrapped module."""

    def __init__(self, ddp: Joinable, divide_by_initial_world_size: bool) -> None:
        if not (isinstance(ddp, Joinable) and isinstance(ddp, TorchDDP)):
            raise InvalidType(
                f"the join hook is for DistributedDataParallel, got {type(ddp).__name__}"
            )
        self.ddp = cast("DistributedDataParallel", ddp)
        self.ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Make the calls of one forward and one backward pass."""
        ddp, reducer = self.ddp, self.ddp.reducer
        reducer.scaling.divide_by_initial_world_size = ddp._divide_by_initial_world_size
        reducer.prepare()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_module_buffers(ddp._find_common_rank(reducer.comm.rank, False))
        follows = agree_on_next_backward(reducer, NextBackward.UNKNOWN)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers()
        ddp._buffer_sync.wait()
        is_reduced = follows is NextBackward.REDUCED
        ddp.require_forward_param_sync = is_reduced
        reducer.shadow(reduces=is_reduced)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that had data to the end."""
        self.ddp._sync_final_model(is_last_joiner)
        self.ddp.reducer.scaling.divide_by_initial_world_size = None
        self.ddp.reducer.may_lack_data = False


def sync_final_model(ddp: DistributedDataParallel, is_last_joiner: bool) -> None:
    """Give every rank the training state of a rank that had data to the end."""
    comm, reducer, block = ddp._comm, ddp.reducer, ddp._join_block
    last_joiners: Sequence[int] = () if block is None else block.last_joiners
    if not last_joiners:  # torch's `Join` tells a rank only about itself
        flags = comm.gather_numbers([is_last_joiner])
        last_joiners = [rank for rank, (is_last,) in enumerate(flags) if is_last]
    root = max(last_joiners)
    if len(last_joiners) < comm.size:
        if ddp._ranks_leave:
            broadcast_progress(reducer, root)
        broadcast_gradients(reducer, root)
        reducer.must_record = True
        ddp.require_forward_param_sync = True  # ranks may differ in their last pass
    parameters = [parameter for _, parameter in ddp._inventory.parameters]
    broadcast_coalesced([*parameters, *ddp._inventory.buffers()], comm, root=root)


def broadcast_progress(reducer: Reducer, root: int) -> None:
    """Give every rank the root's trainable parameters, step counters and bucket order."""
    comm, mine = reducer.comm, set(reducer.names)
    is_trained = comm.broadcast_numbers([name in mine for name, _ in reducer.named], root)
    names = {name for (name, _), trained in zip(reducer.named, is_trained, strict=True) if trained}
    if names != mine:
        for name, parameter in reducer.named:
            if name in names ^ mine:
                parameter.requires_grad_(name in names)
        reducer.track_trainable_parameters()
    reducer.load_progress(comm.broadcast_numbers(reducer.progress(), root))
    (unit,) = comm.broadcast_numbers([reducer.weights.unit or 0.0], root, torch.float64)
    reducer.weights.unit = unit or None


def broadcast_gradients(reducer: Reducer, root: int) -> None:
    """Give every rank the root's reduced gradients, except sparse ones."""
    shared = [
        p.grad is not None and not p.grad.is_sparse and not reducer.has_local_grads
        for p in reducer.parameters
    ]
    shared = reducer.comm.broadcast_numbers(shared, root)
    with torch.no_grad():
        for parameter, is_shared in zip(reducer.parameters, shared, strict=True):
            if not is_shared:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.zeros_like(local_tensor(parameter))
    present = [p.grad for p in reducer.parameters if p.grad is not None]
    broadcast_coalesced(present, reducer.comm, root=root)
    reducer.drop_local_grads()
