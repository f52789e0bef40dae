"""Random-k: all ranks send the same elements, drawn anew in every step (Stich et al. 2018,
arXiv:1809.07599)."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ._communicate import average, group_of, start_average, when_done
from ._feedback import add_held, hold
from ._hook import GradBucket, dense_buffer
from ._memory import parts_by_name
from ._seeds import draw, shared_generator
from ._selection import SelectionState
from ._state import check_state

__all__ = ["RandomKState", "randomk_hook"]


class RandomKState(SelectionState):
    """What random-k is told and what it remembers."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        k: int | float = 0.01,
        *,
        start_iter: int = 2,
        use_error_feedback: bool = True,
        random_seed: int = 0,
    ) -> None:
        """Set it up; ranks have the same seed, and so draw the same elements."""
        super().__init__(
            process_group, k, start_iter=start_iter, use_error_feedback=use_error_feedback
        )
        self.random_seed = random_seed


def randomk_hook(state: RandomKState, bucket: GradBucket) -> Future[Tensor]:
    """Average elements that all ranks draw alike, and hold the others back.

    Without error feedback what is sent is scaled up, so that it is right in the long run.
    """
    check_state(state, RandomKState, "randomk_hook")
    buffer = dense_buffer(bucket, "randomk_hook")
    group = group_of(state.process_group, bucket)
    step = state.iter
    state.maybe_increase_iter(bucket)
    if step < state.start_iter:
        return average(group, buffer)
    count = state.count_of(buffer)
    if state.use_error_feedback:
        add_held(state.error_dict, parts_by_name(bucket, buffer))
    generator = shared_generator(state.random_seed, step, bucket.index())
    places = draw(count, buffer.numel(), generator).to(buffer.device)
    sent = buffer[places]
    if state.use_error_feedback:
        rest = buffer.index_fill(0, places, 0)
        hold(state.error_dict, rest, parts_by_name(bucket, rest))
    else:
        sent.mul_(buffer.numel() / max(count, 1))

    def place() -> Tensor:
        buffer.zero_()
        buffer[places] = sent
        return buffer

    return when_done([start_average(group, sent)], place, buffer.device)
