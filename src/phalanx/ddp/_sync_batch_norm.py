"""Batch normalization with the statistics of all ranks, on any device; torch has it on GPUs only.

Forward makes one collective and backward another. In forward every rank sends its count, mean
and variance per channel, and all ranks combine them with Chan's formula, in rank order. This is
a gather and not a sum: a variance is a sum only about a mean that is not known yet, and sums of
plain squares lose their digits where means are large. Ranks may have different numbers of rows,
or none; a rank that has left the group has count zero.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InvalidArgument, InvalidState, InvalidType
from ..groups._current_group import default_group
from ._communicator import Communicator


class GroupRef:
    """A group that is kept by copies of a layer and dropped by pickles."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        return self

    def __reduce__(self) -> tuple[type[GroupRef], tuple[()]]:
        return GroupRef, ()


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalization over the rows of all ranks, on any device; otherwise torch's class.

    The group is `process_group`, else that of the `DDP` around it, else this thread's current
    group, else torch's default; without any, and in evaluation, it does not communicate. On an
    accelerator torch's own code runs if it would use the same group. A copy keeps the group, a
    pickle does not.
    """

    wrapper_group: Any = GroupRef()
    """The group of the `DDP` around this layer."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group passed to the constructor, or None."""
        return self._own.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        if not isinstance(group, dist.ProcessGroup | None):
            kind = type(group).__name__
            raise InvalidType(f"process_group must be a ProcessGroup or None, got {kind}")
        self._own = GroupRef(group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> Any:
        """Replace all batch norms of a module by layers of this class.

        They have the same parameters and buffers. Returns the new layer if the module is a batch
        norm itself, else the module.
        """
        submodules = list(module.modules())
        layers: dict[nn.Module, nn.Module] = {
            norm: cls.of(norm, process_group) for norm in submodules if isinstance(norm, _BatchNorm)
        }
        for submodule in submodules:
            for name, child in submodule._modules.items():
                if child is not None:
                    layers.get(submodule, submodule).add_module(name, layers.get(child, child))
        return layers.get(module, module)

    @classmethod
    def of(cls, norm: _BatchNorm, process_group: Any = None) -> Self:
        """Make a layer with the parameters and buffers of a batch norm."""
        if isinstance(norm.weight, nn.parameter.UninitializedParameter):
            raise InvalidState("a batch norm has no shape yet. Run the module once, then convert")
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

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch named it
        """Normalize by the statistics of all ranks in training, else by the running ones."""
        group = self._group() if self.training else None
        if group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        torch_group = (self.process_group or dist.group.WORLD) if dist.is_initialized() else None
        if input.device.type != "cpu" and group is torch_group:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        channels = input.size(1)
        if channels != self.num_features:
            raise InvalidArgument(f"expected {self.num_features} channels (dim 1), got {channels}")
        with torch.no_grad():
            count, mean, var = _global_statistics(input, group)
            if count == 1:
                raise InvalidArgument(
                    "expected more than 1 value per channel when training, but all ranks together "
                    f"have one; the input of this rank is {list(input.shape)}"
                )
            self._track(count, mean, var)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, var, count, self.eps, group
        )
        return output

    def _group(self) -> dist.ProcessGroup | None:
        return self.process_group or self.wrapper_group.group or default_group()

    def _track(self, count: int, mean: Tensor, var: Tensor) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        if not count:
            return
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        for running, seen in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(seen.to(running.dtype), share)


def _global_statistics(values: Tensor, group: dist.ProcessGroup) -> tuple[int, Tensor, Tensor]:
    """Return count, mean and biased variance per channel over all ranks, in float64."""
    # By the formula of Chan, Golub and LeVeque (1983).
    channels = values.size(1)
    row = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    if values.numel():
        wide = torch.promote_types(values.dtype, torch.float32)
        # The result has the dtype of the running statistics, so pass unused ones.
        unused = torch.zeros(2, channels, dtype=wide, device=values.device)
        row[0] = values.numel() // channels
        mean, var = torch.batch_norm_update_stats(values, unused[0], unused[1], 0.0)
        row[1 : 1 + channels], row[1 + channels :] = mean, var
    rows = row.new_zeros(group.size(), row.numel())  # the row of a rank that has left stays zero
    group._allgather_base(rows.view(-1), row, c10d.AllgatherOptions()).wait()
    counts = rows[:, :1]
    means, variances = rows[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    return int(total), mean, var


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
        wide = torch.promote_types(values.dtype, torch.float32)
        mean, var = mean.to(wide), var.to(wide)
        ctx.save_for_backward(values, weight, mean, var)
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.group = count, eps, group
        weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        return functional.batch_norm(values, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, weight, mean, var = ctx.saved_tensors
        values, gradient = given.to(mean.dtype), gradient.to(mean.dtype)
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # The gradients with the statistics held constant.
        if values.numel():
            grad_input, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
                gradient, values, scale, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        else:  # torch would divide by zero
            grad_input, sum_dy_xhat, sum_dy = map(torch.zeros_like, (values, scale, scale))
        grad_weight = sum_dy_xhat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_dy.to(ctx.bias_type) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None, None, None, None, None
        # Every value affects the statistics, and through them all values of all ranks.
        means = torch.stack((sum_dy, sum_dy_xhat))
        Communicator(ctx.group, means.device).sum(means).wait()
        means /= ctx.count
        inverse = (var + ctx.eps).rsqrt()
        by_mean, by_var = means * scale * inverse
        shape = -1, *(1,) * (values.dim() - 2)
        grad_input.sub_(by_mean.view(shape))
        centred = values - mean.view(shape)
        grad_input.addcmul_(centred, (by_var * inverse).view(shape), value=-1)
        return grad_input.to(given.dtype), grad_weight, grad_bias, None, None, None, None, None
