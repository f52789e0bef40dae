"""PowerSGD: gradients as products of thin matrices (Vogels et al. 2019, arXiv:1905.13727).

A gradient M of n x m becomes P Q^T with r columns each, found by one step of a power iteration
that starts from the previous step's Q: P = M Q, averaged over the ranks and made orthonormal,
then Q = M^T P, averaged. Both are linear in M, so the result approximates the mean.

The residual of a rank is M minus its own part P Q_w^T, as in the paper. torch subtracts the
mean of all ranks' parts instead; summed over the ranks both are the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument
from .._communicator import AnyWork
from ._base import (
    HookMemory,
    HookState,
    MemoryKey,
    add_residuals,
    average,
    bucket_key,
    check_count,
    check_state,
    dense_buffer,
    hook_group,
    is_finite,
    keep_residuals,
    known_parts,
    names_of,
    parts_by_name,
    shared_generator,
    start_average,
    when_done,
)

MatrixShape = tuple[int, int]


@dataclass(frozen=True)
class Factors:
    """Matrices, or one factor of each, consecutive in one flat tensor."""

    flat: Tensor
    parts: list[Tensor]

    @classmethod
    def of(cls, flat: Tensor, shapes: Sequence[MatrixShape]) -> Self:
        return cls(flat, split_matrices(flat, shapes))

    @classmethod
    def empty(cls, like: Tensor, shapes: Sequence[MatrixShape]) -> Self:
        return cls.of(like.new_empty(sum(rows * columns for rows, columns in shapes)), shapes)

    @property
    def shapes(self) -> list[MatrixShape]:
        return [(len(part), part.shape[1]) for part in self.parts]

    def orthogonalize(self, epsilon: float) -> None:
        for part in self.parts:
            orthogonalize(part, epsilon)


def split_matrices(flat: Tensor, shapes: Sequence[MatrixShape]) -> list[Tensor]:
    ends = list(accumulate(rows * columns for rows, columns in shapes))
    parts = torch.tensor_split(flat, ends[:-1]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# On a CPU, BLAS takes 3 to 15 times as long for these products if the thin matrix is row-major, as
# factors are.


def multiply(matrix: Tensor, thin: Tensor, *, out: Tensor) -> None:
    torch.mm(matrix, thin.T.contiguous().T, out=out)


def multiply_transposed(matrix: Tensor, thin: Tensor, *, out: Tensor) -> None:
    out.copy_((thin.T.contiguous() @ matrix).T)


def orthogonalize(matrix: Tensor, epsilon: float) -> None:
    """Make the columns of a matrix orthonormal, in place.

    Without an epsilon the result is exact, also for dependent columns. With one, this is the
    Gram-Schmidt process with epsilon added to every norm, and dependent columns become nearly 0.
    """
    if epsilon:
        for i, column in enumerate(matrix.unbind(1)):
            column.div_(column.norm() + epsilon)
            rest = matrix[:, i + 1 :]
            rest.addr_(column, column @ rest, alpha=-1)
    else:
        # LAPACK has no 16-bit types.
        full = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
        matrix.copy_(torch.linalg.qr(full).Q)


KeyFactors = Callable[[Factors], dict[MemoryKey, Tensor]]
"""Returns factors by their keys in the memory."""


class PowerSGDState(HookState):
    """Settings and memory of PowerSGD; the names are torch's."""

    counter_fields = ("iter", "total_numel_before_compression", "total_numel_after_compression")
    memory_fields = ("error_dict", "q_memory_dict")

    error_dict: HookMemory
    """Residuals, by parameter name, or by bucket without names."""
    q_memory_dict: HookMemory
    """The second factors of the last step, from which the next one starts, by the same keys."""

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
        """The last two arguments are accepted for compatibility and have no effect."""
        super().__init__(process_group)
        del compression_stats_logging_frequency, batch_tensors_with_same_shape
        check_count("matrix_approximation_rank", matrix_approximation_rank, least=1)
        remembers = use_error_feedback or warm_start
        # torch's DDP rebuilds its buckets after the first step, which loses the memory.
        check_count("start_powerSGD_iter", start_powerSGD_iter, least=2 if remembers else 0)
        for name, value in (
            ("min_compression_rate", min_compression_rate),
            ("orthogonalization_epsilon", orthogonalization_epsilon),
        ):
            if not value >= 0:
                raise InvalidArgument(f"{name} must be at least 0, got {value!r}")
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
        """Return the compression rate so far, and the numbers of elements before and after."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after

    def factor_rank(self, shape: MatrixShape) -> int:
        return min(*shape, self.matrix_approximation_rank)

    def should_compress(self, shape: MatrixShape) -> bool:
        """Whether the factors of a matrix are smaller by `min_compression_rate`."""
        factors = sum(shape) * self.factor_rank(shape)
        return factors * self.min_compression_rate < math.prod(shape)


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: GradBucket
) -> Future[Tensor]:
    """Average each layer's gradient as a low-rank matrix; small ones uncompressed."""
    check_state(state, PowerSGDState, "powerSGD_hook")
    buffer = dense_buffer(bucket, "powerSGD_hook")
    group = hook_group(state.process_group, bucket)
    if state.iter < state.start_powerSGD_iter:
        return _uncompressed(state, bucket, group)
    gradients = bucket.gradients()
    is_large = [each.dim() > 1 and state.should_compress(_matrix_shape(each)) for each in gradients]
    large = list(compress(gradients, is_large))
    small = [each for each, large_ in zip(gradients, is_large, strict=True) if not large_]
    if not large:
        _count(state, bucket, len(buffer))
        return average(group, buffer)
    rest = _concatenate(small, like=buffer)
    calls = [start_average(group, rest)] if len(rest) else []
    matrices = Factors.of(_concatenate(large, like=buffer), [_matrix_shape(each) for each in large])
    names = names_of(bucket)
    chosen = None if names is None else list(compress(names, is_large))
    keyed = partial(_by_name, chosen, bucket.index())
    p, q, sending = _approximate(state, group, matrices, keyed(matrices), keyed)
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
    """Average the whole bucket as one square low-rank matrix: faster and less exact."""
    check_state(state, PowerSGDState, "batched_powerSGD_hook")
    buffer = dense_buffer(bucket, "batched_powerSGD_hook")
    group = hook_group(state.process_group, bucket)
    if state.iter < state.start_powerSGD_iter:
        return _uncompressed(state, bucket, group)
    side = math.ceil(math.sqrt(len(buffer)))
    square = Factors.of(buffer.new_zeros(side * side), [(side, side)])
    filled = square.flat[: len(buffer)]
    filled.copy_(buffer)
    held = parts_by_name(bucket, filled)  # without the padding
    keyed = partial(_by_name, None, bucket_key(bucket))
    p, q, sending = _approximate(state, group, square, held, keyed)
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
    group: dist.ProcessGroup,
    matrices: Factors,
    held: Mapping[MemoryKey, Tensor],
    keyed: KeyFactors,
) -> tuple[Factors, Factors, AnyWork]:
    """Compute the factors P and Q of the ranks' mean; the call that averages Q is in flight.

    `held` has the matrices by the keys of their residuals; `keyed` returns factors by key. Waits
    for P here: a call made later, from a callback, could be matched with another call of a peer.
    """
    if state.use_error_feedback:
        add_residuals(state.error_dict, held)
    sides = [(n, m, state.factor_rank((n, m))) for n, m in matrices.shapes]
    q = Factors.empty(matrices.flat, [(m, rank) for _, m, rank in sides])
    _initialize_q(state, q, keyed)
    q.orthogonalize(state.orthogonalization_epsilon)
    p = Factors.empty(matrices.flat, [(n, rank) for n, _, rank in sides])
    for part, left, right in zip(matrices.parts, p.parts, q.parts, strict=True):
        multiply(part, right, out=left)
    start_average(group, p.flat).wait()
    p.orthogonalize(state.orthogonalization_epsilon)
    for part, left, right in zip(matrices.parts, p.parts, q.parts, strict=True):
        multiply_transposed(part, left, out=right)
    if state.use_error_feedback:
        for part, left, right in zip(matrices.parts, p.parts, q.parts, strict=True):
            part.addmm_(left, right.T, alpha=-1)
        keep_residuals(state.error_dict, matrices.flat, held)
    if state.warm_start:
        state.q_memory_dict |= keyed(q)  # a view: it holds the mean when the call completes
    return p, q, start_average(group, q.flat)


def _initialize_q(state: PowerSGDState, q: Factors, keyed: KeyFactors) -> None:
    """Start from Q of the last step, or from random values that are equal on all ranks."""
    wanted = keyed(q)
    known = known_parts(state.q_memory_dict, wanted) if state.warm_start else {}
    for key, part in wanted.items():
        part.copy_(known[key] if key in known else _random(state, key, part))
    if known and not is_finite(q.flat):
        for key, part in wanted.items():
            part.copy_(_random(state, key, part))


def _random(state: PowerSGDState, key: MemoryKey, like: Tensor) -> Tensor:
    generator = shared_generator(state.random_seed, state.iter, key)
    return torch.randn(like.shape, generator=generator)


def _by_name(
    names: Sequence[str] | None, whole: MemoryKey, factors: Factors
) -> dict[MemoryKey, Tensor]:
    return {whole: factors.flat} if names is None else dict(zip(names, factors.parts, strict=True))


def _matrix_shape(gradient: Tensor) -> MatrixShape:
    return len(gradient), math.prod(gradient.shape[1:])


def _concatenate(tensors: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(each.reshape(-1) for each in tensors)])


def _count(state: PowerSGDState, bucket: GradBucket, sent: int) -> None:
    state.total_numel_before_compression += bucket.buffer().numel()
    state.total_numel_after_compression += sent
    state.maybe_increase_iter(bucket)
