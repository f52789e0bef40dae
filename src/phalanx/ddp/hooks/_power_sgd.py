"""PowerSGD: gradients as products of thin matrices (Vogels et al. 2019, arXiv:1905.13727).

A gradient M of n x m becomes P Q^T with r columns each, found by one step of a power iteration
that starts from the previous step's Q: P = M Q, averaged over the ranks and made orthonormal,
then Q = M^T P, averaged. Both are linear in M, so the result approximates the mean.

The residual of a rank is M minus its own part P Q_w^T, as in the paper. torch subtracts the
mean of all ranks' parts instead; summed over the ranks both are the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument
from .._communicator import AnyWork
from . import _base as base


class Matrices(NamedTuple):
    """Matrices, or one factor of each, consecutive in one flat tensor."""

    flat: Tensor
    parts: Sequence[Tensor]

    def by_key(self, keys: Sequence[str] | base.MemoryKey) -> dict[base.MemoryKey, Tensor]:
        """Return the matrices by their keys, or all of them under one key."""
        if isinstance(keys, int | str):
            return {keys: self.flat}
        return dict(zip(keys, self.parts, strict=True))


def split_matrices(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> Matrices:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return Matrices(flat, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


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


@dataclass(eq=False, repr=False)
class PowerSGDState(base.HookState):
    """Settings and memory of PowerSGD; the names are torch's.

    The last two arguments are accepted for compatibility and have no effect.
    """

    counter_fields = ("iter", "total_numel_before_compression", "total_numel_after_compression")
    memory_fields = ("error_dict", "q_memory_dict")

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000  # noqa: N815
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: InitVar[int] = 10_000
    batch_tensors_with_same_shape: InitVar[bool] = False
    total_numel_before_compression: int = field(default=0, init=False)
    total_numel_after_compression: int = field(default=0, init=False)
    error_dict: base.HookMemory = field(init=False)
    """Residuals, by parameter name, or by bucket without names."""
    q_memory_dict: base.HookMemory = field(init=False)
    """The second factors of the last step, from which the next one starts, by the same keys."""

    def __post_init__(self, *_: object) -> None:
        super().__post_init__()
        base.check_count("matrix_approximation_rank", self.matrix_approximation_rank, least=1)
        # torch's DDP rebuilds its buckets after the first step, which loses the memory.
        least = 2 if self.use_error_feedback or self.warm_start else 0
        base.check_count("start_powerSGD_iter", self.start_powerSGD_iter, least=least)
        for name in ("min_compression_rate", "orthogonalization_epsilon"):
            if not getattr(self, name) >= 0:
                raise InvalidArgument(f"{name} must be at least 0, got {getattr(self, name)!r}")

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate so far, and the numbers of elements before and after."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after

    def should_compress(self, gradient: Tensor) -> bool:
        """Whether the factors of a gradient are smaller by `min_compression_rate`."""
        if gradient.dim() < 2:
            return False
        shape = _matrix_shape(gradient)
        factors = sum(shape) * min(*shape, self.matrix_approximation_rank)
        return factors * self.min_compression_rate < math.prod(shape)

    def count(self, before: int, after: int) -> None:
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:  # noqa: N802
    """Average each layer's gradient as a low-rank matrix; small ones uncompressed."""
    buffer = base.dense_buffer(bucket, "powerSGD_hook")
    step = base.begin_step(state, PowerSGDState, bucket, "powerSGD_hook")
    group = base.hook_group(state.process_group, bucket)
    if step < state.start_powerSGD_iter:
        return base.average(group, buffer)
    gradients, names = bucket.gradients(), base.names_of(bucket)
    is_large = [state.should_compress(each) for each in gradients]
    large = list(compress(gradients, is_large))
    small = [each for each, compressed in zip(gradients, is_large, strict=True) if not compressed]
    if not large:
        state.count(len(buffer), len(buffer))
        return base.average(group, buffer)
    rest = torch.cat([buffer.new_empty(0), *(each.reshape(-1) for each in small)])
    calls = [base.start_average(group, rest)] if len(rest) else []
    flat = torch.cat([each.reshape(-1) for each in large])
    matrices = split_matrices(flat, [_matrix_shape(each) for each in large])
    keys = bucket.index() if names is None else list(compress(names, is_large))
    p, q, sending = _approximate(state, step, group, matrices, matrices.by_key(keys), keys)
    state.count(len(buffer), len(rest) + len(p.flat) + len(q.flat))

    def decompress() -> Tensor:
        means = torch.split(rest, [each.numel() for each in small]) if small else ()
        products = (left @ right.T for left, right in zip(p.parts, q.parts, strict=True))
        for gradient, mean in zip([*small, *large], [*means, *products], strict=True):
            gradient.copy_(mean.view(gradient.shape))
        return buffer

    return base.when_done([*calls, sending], decompress, buffer.device)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:  # noqa: N802
    """Average the whole bucket as one square low-rank matrix: faster and less exact."""
    buffer = base.dense_buffer(bucket, "batched_powerSGD_hook")
    step = base.begin_step(state, PowerSGDState, bucket, "batched_powerSGD_hook")
    group = base.hook_group(state.process_group, bucket)
    if step < state.start_powerSGD_iter:
        return base.average(group, buffer)
    side = math.ceil(math.sqrt(len(buffer)))
    square = split_matrices(buffer.new_zeros(side * side), [(side, side)])
    filled = square.flat[: len(buffer)].copy_(buffer)
    held = base.parts_by_name(bucket, filled)  # without the padding
    p, q, sending = _approximate(state, step, group, square, held, base.bucket_key(bucket))
    state.count(len(buffer), len(p.flat) + len(q.flat))

    def decompress() -> Tensor:
        return buffer.copy_((p.parts[0] @ q.parts[0].T).view(-1)[: len(buffer)])

    return base.when_done([sending], decompress, buffer.device)


def _approximate(
    state: PowerSGDState,
    step: int,
    group: dist.ProcessGroup,
    matrices: Matrices,
    held: Mapping[base.MemoryKey, Tensor],
    keys: Sequence[str] | base.MemoryKey,
) -> tuple[Matrices, Matrices, AnyWork]:
    """Compute the factors P and Q of the ranks' mean; the call that averages Q is in flight.

    `held` has the matrices by the keys of their residuals; `keys` are those of their factors. Waits
    for P here: a call made later, from a callback, could be matched with another call of a peer.
    """
    if state.use_error_feedback:
        base.add_residuals(state.error_dict, held)
    p_shapes, q_shapes = [], []
    for rows, columns in (part.shape for part in matrices.parts):
        matrix_rank = min(rows, columns, state.matrix_approximation_rank)
        p_shapes.append((rows, matrix_rank))
        q_shapes.append((columns, matrix_rank))
    new_empty = matrices.flat.new_empty
    p = split_matrices(new_empty(sum(map(math.prod, p_shapes))), p_shapes)
    q = split_matrices(new_empty(sum(map(math.prod, q_shapes))), q_shapes)
    known = base.known_parts(state.q_memory_dict, q.by_key(keys)) if state.warm_start else {}
    _initialize(q.by_key(keys), known, state.random_seed, step)
    if known and not base.is_finite(q.flat):
        _initialize(q.by_key(keys), {}, state.random_seed, step)
    # On a CPU, BLAS takes 3 to 15 times as long for these products if the thin matrix is row-major,
    # as factors are.
    for part, left, right in zip(matrices.parts, p.parts, q.parts, strict=True):
        orthogonalize(right, state.orthogonalization_epsilon)
        torch.mm(part, right.T.contiguous().T, out=left)
    base.start_average(group, p.flat).wait()
    for part, left, right in zip(matrices.parts, p.parts, q.parts, strict=True):
        orthogonalize(left, state.orthogonalization_epsilon)
        right.copy_((left.T.contiguous() @ part).T)
        if state.use_error_feedback:
            part.addmm_(left, right.T, alpha=-1)
    if state.use_error_feedback:
        base.keep_residuals(state.error_dict, matrices.flat, held)
    if state.warm_start:
        state.q_memory_dict |= q.by_key(keys)  # a view: it holds the mean when the call completes
    return p, q, base.start_average(group, q.flat)


def _initialize(
    q: Mapping[base.MemoryKey, Tensor], known: Mapping[base.MemoryKey, Tensor], seed: int, step: int
) -> None:
    """Start from Q of the last step, or from random values that are equal on all ranks."""
    for key, part in q.items():
        if key in known:
            part.copy_(known[key])
        else:
            part.copy_(torch.randn(part.shape, generator=base.shared_generator(seed, step, key)))


def _matrix_shape(gradient: Tensor) -> tuple[int, int]:
    return len(gradient), math.prod(gradient.shape[1:])
