"""Top-k: each rank sends its largest elements (Aji and Heafield 2017, arXiv:1704.05021)."""

import torch
from torch import Tensor
from torch.futures import Future

from ._communicate import average, gather, group_of, when_done
from ._feedback import add_held, hold
from ._hook import GradBucket, dense_buffer
from ._largest import largest
from ._memory import parts_by_name
from ._selection import SelectionState
from ._state import check_state

__all__ = ["TopKState", "topk_hook"]


class TopKState(SelectionState):
    """What top-k is told and what it remembers."""


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[Tensor]:
    """Average the largest elements of each rank's gradients, and hold the others back.

    Ranks choose different elements, so each sends which they are, and all of it to everybody: what
    a rank receives grows with their number.
    """
    check_state(state, TopKState, "topk_hook")
    buffer = dense_buffer(bucket, "topk_hook")
    group = group_of(state.process_group, bucket)
    compresses = state.iter >= state.start_iter
    state.maybe_increase_iter(bucket)
    if not compresses:
        return average(group, buffer)
    if state.use_error_feedback:
        add_held(state.error_dict, parts_by_name(bucket, buffer))
    places = largest(buffer, state.count_of(buffer))
    sent = buffer[places]
    if state.use_error_feedback:
        rest = buffer.index_fill(0, places, 0)
        hold(state.error_dict, rest, parts_by_name(bucket, rest))
    narrow = torch.int32 if buffer.numel() <= torch.iinfo(torch.int32).max else torch.int64
    getting_values, values = gather(group, sent)
    getting_places, everyones_places = gather(group, places.to(narrow))

    def add_up() -> Tensor:
        buffer.zero_()
        for their_places, their_values in zip(everyones_places, values, strict=True):
            buffer.index_add_(0, their_places, their_values)
        return buffer.div_(len(values))

    return when_done([getting_values, getting_places], add_up, buffer.device)
