"""Hooks that send some elements of each bucket and keep the rest as residual.

Top-k: each rank sends its largest elements (Aji and Heafield 2017, arXiv:1704.05021). Random-k:
all ranks send the same elements, drawn in every step (Stich et al. 2018,
arXiv:1809.07599).
"""

import math
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument
from . import _base as base


@dataclass(eq=False, repr=False)
class SparsificationState(base.HookState):
    """Settings and residuals of hooks that send some elements."""

    memory_fields = ("error_dict",)

    process_group: base.OptionalGroup = None
    k: int | float = 0.01
    """How many elements of each bucket are sent, or which fraction of them if it is a float."""
    _: KW_ONLY
    start_iter: int = 2
    """So many steps send everything: torch's DDP rebuilds its buckets after the first one, which
    would lose the residuals."""
    use_error_feedback: bool = True
    error_dict: base.HookMemory = field(init=False)
    """Residuals, by parameter name, or by bucket without names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        k = self.k
        is_count = isinstance(k, int) and not isinstance(k, bool) and k >= 1
        if not (is_count or (isinstance(k, float) and 0 < k < 1)):
            raise InvalidArgument(
                f"k must be an integer of at least 1 or a fraction between 0.0 and 1.0, got {k!r}"
            )
        base.check_count("start_iter", self.start_iter)

    def selected_count(self, buffer: Tensor) -> int:
        wanted = self.k if isinstance(self.k, int) else max(1, round(self.k * buffer.numel()))
        return min(wanted, buffer.numel())

    def take(self, bucket: GradBucket, indices: Tensor) -> Tensor:
        """Return the selected elements of a bucket, and keep the others as residual."""
        buffer = bucket.buffer()
        if self.use_error_feedback:
            rest = buffer.index_fill(0, indices, 0)
            base.keep_residuals(self.error_dict, rest, base.parts_by_name(bucket, rest))
        return buffer[indices]


_SAMPLE_MIN_SIZE = 1 << 16
_SAMPLE_STRIDE = 251  # a prime, since row lengths of matrices are often multiples of others


def topk_indices(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` elements of largest magnitude; NaN is the largest."""
    # A sample estimates their minimum. Only elements above it are sorted, unless they are too few.
    magnitudes = values.abs()
    if values.device.type == "cpu" and len(values) >= max(4 * count, _SAMPLE_MIN_SIZE):
        expected = count / _SAMPLE_STRIDE
        more = int(expected + 4 * math.sqrt(expected)) + 1
        least = torch.topk(magnitudes[::_SAMPLE_STRIDE], more).values[-1]
        indices = (magnitudes < least).logical_not_().nonzero().view(-1)
        if len(indices) >= count:
            return indices[torch.topk(magnitudes[indices], count, sorted=False).indices]
    return torch.topk(magnitudes, count, sorted=False).indices


class TopKState(SparsificationState):
    """Settings and residuals of top-k."""


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[Tensor]:
    """Average the largest elements of each rank's gradients; keep the others as residual.

    Ranks choose different elements, so each sends values and indices to all. What a rank receives
    grows with the world size.
    """
    buffer = base.dense_buffer(bucket, "topk_hook")
    step = base.begin_step(state, TopKState, bucket, "topk_hook")
    group = base.hook_group(state.process_group, bucket)
    if step < state.start_iter:
        return base.average(group, buffer)
    if state.use_error_feedback:
        base.add_residuals(state.error_dict, base.parts_by_name(bucket, buffer))
    indices = topk_indices(buffer, state.selected_count(buffer))
    sent = state.take(bucket, indices)
    narrow = torch.int32 if buffer.numel() <= torch.iinfo(torch.int32).max else torch.int64
    value_call, values = base.start_gather(group, sent)
    index_call, all_indices = base.start_gather(group, indices.to(narrow))

    def add_up() -> Tensor:
        buffer.zero_()
        for rank_indices, rank_values in zip(all_indices, values, strict=True):
            buffer.index_add_(0, rank_indices, rank_values)
        return buffer.div_(len(values))

    return base.when_done([value_call, index_call], add_up, buffer.device)


_SHUFFLE_MAX = 1000  # above this, a pass over all numbers costs less than a shuffle


def sample_without_replacement(count: int, among: int, generator: torch.Generator) -> Tensor:
    """Draw different integers below `among`, all choices with equal probability."""
    if 20 * count < among:
        # Few of many: drawing some twice costs less than shuffling all.
        drawn = torch.randint(among, (count + count // 2 + 16,), generator=generator)
        different: Tensor = torch.unique(drawn)
        if len(different) >= count:
            return different[torch.randperm(len(different), generator=generator)[:count]]
    elif among > _SHUFFLE_MAX:
        # Take each with a probability that yields slightly too many, then drop the surplus.
        probability = count / among
        wanted = count + 6 * math.sqrt(count * (1 - probability)) + 1
        taken = torch.rand(among, generator=generator) < wanted / among
        indices = taken.nonzero().view(-1)
        if len(indices) >= count:
            surplus = len(indices) - count
            indices[sample_without_replacement(surplus, len(indices), generator)] = -1
            return indices[indices >= 0]
    return torch.randperm(among, generator=generator)[:count]


@dataclass(eq=False, repr=False)
class RandomKState(SparsificationState):
    """Settings and residuals of random-k."""

    random_seed: int = field(default=0, kw_only=True)
    """The same on all ranks, so that they draw the same elements."""


def randomk_hook(state: RandomKState, bucket: GradBucket) -> Future[Tensor]:
    """Average randomly drawn elements, the same on all ranks; keep the others as residual.

    Without error feedback the elements are scaled up, so that their expectation is right.
    """
    buffer = base.dense_buffer(bucket, "randomk_hook")
    step = base.begin_step(state, RandomKState, bucket, "randomk_hook")
    group = base.hook_group(state.process_group, bucket)
    if step < state.start_iter:
        return base.average(group, buffer)
    if state.use_error_feedback:
        base.add_residuals(state.error_dict, base.parts_by_name(bucket, buffer))
    count = state.selected_count(buffer)
    generator = base.shared_generator(state.random_seed, step, bucket.index())
    indices = sample_without_replacement(count, buffer.numel(), generator).to(buffer.device)
    sent = state.take(bucket, indices)
    if not state.use_error_feedback:
        sent.mul_(buffer.numel() / max(count, 1))

    def place() -> Tensor:
        buffer.zero_()
        buffer[indices] = sent
        return buffer

    return base.when_done([base.start_average(group, sent)], place, buffer.device)
