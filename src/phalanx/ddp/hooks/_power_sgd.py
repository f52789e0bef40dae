"""PowerSGD: gradients as products of thin matrices (Vogels et al. 2019, arXiv:1905.13727).

A gradient M of n x m becomes P Q^T with r columns each. One step of a power iteration finds them,
begun from the Q of the step before: P = M Q, averaged over the ranks and made orthonormal, then
Q = M^T P, averaged. Both are linear in M, so what comes out is the approximation of the mean.

What a rank holds back is M less its own part of that, P Q_w^T, as the paper has it. Torch takes the
mean of all ranks' parts instead; over the ranks that comes to the same.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ...errors import InvalidArgument
from ._communicate import Handle, average, group_of, start_average, when_done
from ._feedback import add_held, hold, is_finite
from ._hook import GradBucket, dense_buffer
from ._low_rank import Factors, Shape, stacked
from ._seeds import shared_generator
from ._state import HookState, check_count, check_state

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


class PowerSGDState(HookState):
    """What PowerSGD is told and what it remembers; the names are torch's."""

    counts = ("iter", "total_numel_before_compression", "total_numel_after_compression")
    memories = ("error_dict", "q_memory_dict")

    error_dict: dict[int, Tensor]
    """What was held back of each bucket's matrices."""
    q_memory_dict: dict[int, Tensor]
    """The second factors of the last step, with which the next begins."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        """Set it up; the last two are taken for torch's sake and change nothing."""
        super().__init__(process_group)
        del compression_stats_logging_frequency, batch_tensors_with_same_shape
        check_count("matrix_approximation_rank", matrix_approximation_rank, least=1)
        remembers = use_error_feedback or warm_start
        # Buckets are planned anew after the first step, and with them what was remembered.
        check_count("start_powerSGD_iter", start_powerSGD_iter, least=2 if remembers else 0)
        for name, value in (
            ("min_compression_rate", min_compression_rate),
            ("orthogonalization_epsilon", orthogonalization_epsilon),
        ):
            if not value >= 0:
                raise InvalidArgument(f"{name} is a number, 0 or more, not {value!r}")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Tell the rate of compression so far, and the numbers of elements before and after."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after

    def factor_rank(self, shape: Shape) -> int:
        """Tell how many columns the factors of a matrix have."""
        return min(*shape, self.matrix_approximation_rank)

    def is_worth_it(self, shape: Shape) -> bool:
        """Tell whether a matrix is so much larger than its factors that they are sent instead."""
        factors = sum(shape) * self.factor_rank(shape)
        return factors * self.min_compression_rate < math.prod(shape)


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as matrices of low rank, layer by layer; small ones as they are."""
    check_state(state, PowerSGDState, "powerSGD_hook")
    buffer = dense_buffer(bucket, "powerSGD_hook")
    group = group_of(state.process_group, bucket)
    if state.iter < state.start_powerSGD_iter:
        return _uncompressed(state, bucket, group)
    large: list[Tensor] = []
    small: list[Tensor] = []
    for gradient in bucket.gradients():
        worth_it = gradient.dim() > 1 and state.is_worth_it(_matrix_shape(gradient))
        (large if worth_it else small).append(gradient)
    if not large:
        _count(state, bucket, len(buffer))
        return average(group, buffer)
    rest = _joined(small, like=buffer)
    calls = [start_average(group, rest)] if len(rest) else []
    shapes = [_matrix_shape(each) for each in large]
    p, q, sending = _approximate(state, bucket.index(), _joined(large, like=buffer), shapes, group)
    _count(state, bucket, len(rest) + len(p.flat) + len(q.flat))

    def decompress() -> Tensor:
        means = torch.split(rest, [each.numel() for each in small]) if small else ()
        products = (left @ right.T for left, right in zip(p.parts, q.parts, strict=True))
        for gradient, mean in zip([*small, *large], [*means, *products], strict=True):
            gradient.copy_(mean.view(gradient.shape))
        return buffer

    return when_done([*calls, sending], decompress, buffer.device)


def batched_powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: GradBucket
) -> Future[Tensor]:
    """Average the whole bucket as one square matrix of low rank: quicker, and less exact."""
    check_state(state, PowerSGDState, "batched_powerSGD_hook")
    buffer = dense_buffer(bucket, "batched_powerSGD_hook")
    group = group_of(state.process_group, bucket)
    if state.iter < state.start_powerSGD_iter:
        return _uncompressed(state, bucket, group)
    side = math.ceil(math.sqrt(len(buffer)))
    square = buffer.new_zeros(side * side)
    square[: len(buffer)] = buffer
    p, q, sending = _approximate(state, bucket.index(), square, [(side, side)], group)
    _count(state, bucket, len(p.flat) + len(q.flat))

    def decompress() -> Tensor:
        return buffer.copy_((p.parts[0] @ q.parts[0].T).view(-1)[: len(buffer)])

    return when_done([sending], decompress, buffer.device)


def _uncompressed(
    state: PowerSGDState, bucket: GradBucket, group: dist.ProcessGroup
) -> Future[Tensor]:
    state.maybe_increase_iter(bucket)
    return average(group, bucket.buffer())


def _approximate(
    state: PowerSGDState,
    index: int,
    matrices: Tensor,
    shapes: Sequence[Shape],
    group: dist.ProcessGroup,
) -> tuple[Factors, Factors, Handle]:
    """Find the factors of the ranks' mean; the first ones are there, the second on their way.

    Waits for the first ones, as the second depend on them, and a call that was made later, from
    wherever the first one ended, could meet another call of its peers.
    """
    before = add_held(state.error_dict, index, matrices) if state.use_error_feedback else None
    parts = stacked(matrices, shapes)
    q = _first_guess(state, index, matrices, [(m, state.factor_rank((n, m))) for n, m in shapes])
    q.orthogonalize(state.orthogonalization_epsilon)
    p = Factors.empty(matrices, [(n, state.factor_rank((n, m))) for n, m in shapes])
    for i, part in enumerate(parts):
        torch.mm(part, q.parts[i], out=p.parts[i])
    start_average(group, p.flat).wait()
    p.orthogonalize(state.orthogonalization_epsilon)
    for i, part in enumerate(parts):
        torch.mm(part.T, p.parts[i], out=q.parts[i])
    if state.use_error_feedback:
        for i, part in enumerate(parts):
            part.addmm_(p.parts[i], q.parts[i].T, alpha=-1)
        hold(state.error_dict, index, matrices, before)
    if state.warm_start:
        state.q_memory_dict[index] = q.flat  # which holds the mean before the next step begins
    return p, q, start_average(group, q.flat)


def _first_guess(
    state: PowerSGDState, index: int, matrices: Tensor, shapes: Sequence[Shape]
) -> Factors:
    """Take the second factors of the last step, or random ones that are the same on all ranks."""
    count = sum(math.prod(shape) for shape in shapes)
    known = state.q_memory_dict.get(index)
    if known is None or len(known) != count or not is_finite(known):
        generator = shared_generator(state.random_seed, state.iter, index)
        known = torch.randn(count, generator=generator).to(matrices)
    return Factors.of(known.to(matrices), shapes)


def _matrix_shape(gradient: Tensor) -> Shape:
    """Tell the shape of a gradient as a matrix: an output channel or neuron to a row."""
    return len(gradient), math.prod(gradient.shape[1:])


def _joined(tensors: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Copy tensors into one flat one; gradients need not be contiguous."""
    return torch.cat([like.new_empty(0), *(each.reshape(-1) for each in tensors)])


def _count(state: PowerSGDState, bucket: GradBucket, sent: int) -> None:
    state.total_numel_before_compression += bucket.buffer().numel()
    state.total_numel_after_compression += sent
    state.maybe_increase_iter(bucket)
