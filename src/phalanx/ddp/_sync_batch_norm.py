"""Batch normalization with the statistics of all ranks, on any device; torch has it on GPUs only.

Forward makes one collective and backward another. In forward every rank sends its count, mean
and variance per channel, and all ranks combine them with Chan's formula, in rank order. This is
a gather and not a sum: a variance is a sum only about a mean that is not known yet, and sums of
plain squares lose their digits where means are large. Ranks may have different numbers of rows,
or none; a rank that has left the group has count zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InvalidArgument, InvalidState, InvalidType
from ..groups._factory import default_group
from ._communicator import Communicator


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalization over the rows of all ranks, on any device; otherwise torch's class.

    The group is `process_group`, else that of the `DDP` around it, else this thread's current
    group, else torch's default; without any, and in evaluation, it does not communicate. On an
    accelerator torch's own code runs if it would use the same group. A copy keeps the group, a
    pickle does not.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            process_group,
            device,
            dtype,
            bias=bias,
        )
        self._wrapper_group = GroupRef()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group passed to the constructor, or None."""
        return self._own.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        if not isinstance(group, dist.ProcessGroup | None):
            raise InvalidType(f"process_group is a group, not {type(group).__name__}")
        self._own = GroupRef(group)

    def lend(self, group: dist.ProcessGroup) -> None:
        """Set the group of the wrapper, used if this layer was given none."""
        self._wrapper_group = GroupRef(group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> Any:
        """Replace all batch norms of a module by layers of this class.

        They have the same parameters and buffers. Returns the new layer if the module is a batch
        norm itself, else the module.
        """
        return _convert(cls, module, process_group, {})

    @classmethod
    def of(cls, norm: _BatchNorm, process_group: Any = None) -> Self:
        """Make a layer with the parameters and buffers of a batch norm."""
        if isinstance(norm.weight, nn.parameter.UninitializedParameter):
            raise InvalidState("a batch norm has no shape yet: run the module once, then convert")
        layer = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            getattr(norm, "process_group", None) if process_group is None else process_group,
            device="meta",  # its parameters are replaced below
            bias=norm.bias is not None,
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(layer, name, getattr(norm, name))
        layer.training = norm.training
        if hasattr(norm, "qconfig"):
            layer.qconfig = norm.qconfig
        return layer

    # -- forward ---------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch named it
        """Normalize by the statistics of all ranks in training, else by the running ones."""
        group = self._group() if self.training else None
        if group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        if input.device.type != "cpu" and dist.is_initialized() and group is self._torch_group():
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.size(1) != self.num_features:
            raise InvalidArgument(
                f"expected {self.num_features} channels (dim 1), not {input.size(1)}"
            )
        with torch.no_grad():
            whole = _combine(_gather(_local_statistics(input), group))
            if whole.count == 1:
                raise InvalidArgument(
                    "expected more than 1 value per channel when training, and all ranks together "
                    f"have one: the input here is {list(input.shape)}"
                )
            self._track(whole)
            kind = _accumulation_dtype(input.dtype)
            mean, var = whole.mean.to(kind), whole.var.to(kind)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, var, whole.count, self.eps, group
        )
        return output

    def _group(self) -> dist.ProcessGroup | None:
        return self.process_group or self._wrapper_group.group or default_group()

    def _torch_group(self) -> dist.ProcessGroup | None:
        return self.process_group or dist.group.WORLD

    def _track(self, whole: BatchStatistics) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        if not whole.count:
            return
        share = self.momentum
        if share is None:
            share = 1 / int(self.num_batches_tracked)
        unbiased = whole.var * (whole.count / (whole.count - 1))
        for running, seen in ((self.running_mean, whole.mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(seen.to(running.dtype), share)


class GroupRef:
    """A group that is kept by copies of a layer and dropped by pickles."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        return self

    def __reduce__(self) -> tuple[type[GroupRef], tuple[()]]:
        return GroupRef, ()


def _convert(
    cls: type[SyncBatchNorm], module: nn.Module, group: Any, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Convert a module and its children, each once, so that shared ones stay shared."""
    if module not in done:
        done[module] = cls.of(module, group) if isinstance(module, _BatchNorm) else module
        for name, part in module._modules.items():
            if part is not None:
                done[module].add_module(name, _convert(cls, part, group, done))
    return done[module]


# -- statistics ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchStatistics:
    """Statistics of some values per channel."""

    count: int
    mean: Tensor
    var: Tensor
    """Biased."""


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _local_statistics(values: Tensor) -> Tensor:
    """Return count, means and variances of this rank's values in one row."""
    channels = values.size(1)
    if not values.numel():
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    count = torch.tensor([values.numel() // channels], dtype=torch.float64, device=values.device)
    return torch.cat((count, *_moments(values)))


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances per channel, in float32 or wider."""
    wide = _accumulation_dtype(values.dtype)
    if values.dtype == wide:
        return torch.batch_norm_update_stats(values, None, None, 0.0)
    # The result has the dtype of the running statistics, so pass unused ones.
    running = torch.zeros(2, values.size(1), dtype=wide, device=values.device)
    return torch.batch_norm_update_stats(values, running[0], running[1], 0.0)


def _gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks; the row of a rank that has left is zero."""
    rows = row.new_zeros(group.size(), row.numel())
    group._allgather_base(rows.view(-1), row, c10d.AllgatherOptions()).wait()
    return rows


def _combine(rows: Tensor) -> BatchStatistics:
    """Combine the statistics of all ranks (Chan, Golub and LeVeque 1983)."""
    counts = rows[:, :1]
    means, variances = rows[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    return BatchStatistics(int(total), mean, var)


class _Normalize(torch.autograd.Function):
    """Normalizes by the statistics of all ranks, and propagates gradients through them."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: int,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(values, weight, mean, var)
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.group = count, eps, group
        weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return functional.batch_norm(values, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, weight, mean, var = ctx.saved_tensors
        values, gradient = given.to(mean.dtype), gradient.to(mean.dtype)
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        of_values, dots, sums = _grads_for_fixed_statistics(
            gradient, values, scale, mean, var, ctx.eps
        )
        of_weight = dots.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sums.to(ctx.bias_type) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None, None, None, None
        # Every value affects the statistics, and through them all values of all ranks.
        both = torch.stack((sums, dots))
        Communicator(ctx.group, both.device).sum(both).wait()
        both /= ctx.count
        inverse = (var + ctx.eps).rsqrt()
        by_mean, by_var = both * scale * inverse
        of_values.sub_(_per_channel(by_mean, values))
        centred, slope = values - _per_channel(mean, values), _per_channel(by_var * inverse, values)
        of_values.addcmul_(centred, slope, value=-1)
        return of_values.to(given.dtype), of_weight, of_bias, None, None, None, None, None


def _grads_for_fixed_statistics(
    gradient: Tensor, values: Tensor, scale: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, weight and bias with the statistics held constant."""
    if not values.numel():  # torch would divide by zero
        return torch.zeros_like(values), torch.zeros_like(scale), torch.zeros_like(scale)
    of_values, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, values, scale, mean, var, None, None, False, eps, [True, True, True]
    )
    return of_values, of_weight, of_bias


def _per_channel(channel: Tensor, like: Tensor) -> Tensor:
    # Broadcastable to `like`.
    return channel.view(-1, *(1 for _ in range(like.dim() - 2)))
