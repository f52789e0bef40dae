"""Hooks that send some elements of each bucket and keep the rest as residual.

Top-k: each rank sends its largest elements (Aji and Heafield 2017, arXiv:1704.05021). Random-k:
all ranks send the same elements, drawn anew in every step (Stich et al. 2018,
arXiv:1809.07599).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument
from ._base import (
    HookMemory,
    HookState,
    add_residuals,
    average,
    check_count,
    check_state,
    dense_buffer,
    draw,
    gather,
    group_of,
    keep_residuals,
    parts_by_name,
    shared_generator,
    start_average,
    when_done,
)


class SparsificationState(HookState):
    """What hooks that send some elements have in common."""

    memory_fields = ("error_dict",)

    error_dict: HookMemory
    """What was held back, by the names of parameters, or by bucket where they have none."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        k: int | float = 0.01,
        *,
        start_iter: int = 2,
        use_error_feedback: bool = True,
    ) -> None:
        """Set it up.

        Of each bucket are sent `k` elements if that is a whole number, or that share of them if it
        is a fraction. The first `start_iter` steps send everything: torch's modules plan their
        buckets anew after the first one, and what was held back of old ones would be lost there.
        """
        super().__init__(process_group)
        self.k = _check_k(k)
        self.start_iter = check_count("start_iter", start_iter)
        self.use_error_feedback = use_error_feedback

    def selected_count(self, buffer: Tensor) -> int:
        """Tell how many elements of a buffer are sent: one at least, if there is one."""
        wanted = self.k if isinstance(self.k, int) else max(1, round(self.k * buffer.numel()))
        return min(wanted, buffer.numel())


def _check_k(k: Any) -> int | float:
    if isinstance(k, int) and not isinstance(k, bool) and k >= 1:
        return k
    if isinstance(k, float) and 0 < k < 1:
        return k
    raise InvalidArgument(
        f"k is a number of elements, 1 or more, or a share of them between 0.0 and 1.0, not {k!r}"
    )


_SAMPLE_MIN_SIZE = 1 << 16
"""From how many on a sample is worth its while."""
_SAMPLE_STRIDE = 251
"""One in so many is in the sample; a prime, for rows of matrices are often multiples of others."""


def topk_indices(values: Tensor, count: int) -> Tensor:
    """Find the places of the `count` elements that are farthest from zero; NaN is farther.

    A sample tells how large they are at least, more or less. It is enough to search among those
    that are as large, unless they are too few.
    """
    magnitudes = values.abs()
    if values.device.type == "cpu" and len(values) >= max(4 * count, _SAMPLE_MIN_SIZE):
        expected = count / _SAMPLE_STRIDE
        more = int(expected + 4 * math.sqrt(expected)) + 1
        least = torch.topk(magnitudes[::_SAMPLE_STRIDE], more).values[-1]
        places = (magnitudes < least).logical_not_().nonzero().view(-1)
        if len(places) >= count:
            return places[torch.topk(magnitudes[places], count, sorted=False).indices]
    return torch.topk(magnitudes, count, sorted=False).indices


class TopKState(SparsificationState):
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
        add_residuals(state.error_dict, parts_by_name(bucket, buffer))
    places = topk_indices(buffer, state.selected_count(buffer))
    sent = buffer[places]
    if state.use_error_feedback:
        rest = buffer.index_fill(0, places, 0)
        keep_residuals(state.error_dict, rest, parts_by_name(bucket, rest))
    narrow = torch.int32 if buffer.numel() <= torch.iinfo(torch.int32).max else torch.int64
    getting_values, values = gather(group, sent)
    getting_places, everyones_places = gather(group, places.to(narrow))

    def add_up() -> Tensor:
        buffer.zero_()
        for their_places, their_values in zip(everyones_places, values, strict=True):
            buffer.index_add_(0, their_places, their_values)
        return buffer.div_(len(values))

    return when_done([getting_values, getting_places], add_up, buffer.device)


class RandomKState(SparsificationState):
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
    count = state.selected_count(buffer)
    if state.use_error_feedback:
        add_residuals(state.error_dict, parts_by_name(bucket, buffer))
    generator = shared_generator(state.random_seed, step, bucket.index())
    places = draw(count, buffer.numel(), generator).to(buffer.device)
    sent = buffer[places]
    if state.use_error_feedback:
        rest = buffer.index_fill(0, places, 0)
        keep_residuals(state.error_dict, rest, parts_by_name(bucket, rest))
    else:
        sent.mul_(buffer.numel() / max(count, 1))

    def place() -> Tensor:
        buffer.zero_()
        buffer[places] = sent
        return buffer

    return when_done([start_average(group, sent)], place, buffer.device)
