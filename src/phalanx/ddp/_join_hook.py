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
from typing import TYPE_CHECKING, cast

import torch

from ..errors import InvalidType
from ..join import Joinable, JoinHook
from ._communicator import broadcast_coalesced
from ._reducer import Reducer

if TYPE_CHECKING:
    from ._data_parallel import DistributedDataParallel


class NextBackward(enum.IntEnum):
    """The backward pass that follows a forward pass."""

    UNKNOWN = 0
    """On a rank without data."""
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


class _DDPJoinHook(JoinHook):
    """What a rank without data does in place of a step of a wrapped module."""

    def __init__(self, ddp: Joinable, divide_by_initial_world_size: bool) -> None:
        if not isinstance(ddp, Joinable):
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


def broadcast_progress(reducer: Reducer, root: int) -> None:
    """Give every rank the root's trainable parameters, step counters and bucket order."""
    mine = set(reducer.names)
    trained = [name in mine for name, _ in reducer.named]
    padding = [0.0] * (len(trained) - len(mine))  # all ranks send as if all were trained
    numbers = [*trained, reducer.weights.unit or 0.0, *reducer.progress(), *padding]
    numbers = reducer.comm.broadcast_numbers(numbers, root, torch.float64)
    unit, *progress = numbers[len(trained) :]
    changed = False
    for (name, parameter), is_trained in zip(reducer.named, numbers, strict=False):
        if is_trained != (name in mine):
            parameter.requires_grad_(bool(is_trained))
            changed = True
    if changed:
        reducer.track_trainable_parameters()
    reducer.weights.unit = unit or None
    frozen = len(reducer.named) - len(reducer.names)
    reducer.load_progress([int(number) for number in progress[: len(progress) - frozen]])


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
                parameter.grad = torch.zeros_like(parameter)
    present = [p.grad for p in reducer.parameters if p.grad is not None]
    broadcast_coalesced(present, reducer.comm, root=root)
    reducer.drop_local_grads()
