"""Low precision where it is computed, full precision wherever anybody looks.

Parameters are of a smaller type only while the module's forward runs and while a backward pass is
under way: their ``.data`` is replaced by a copy, and by the full values again before anything else
gets to see them. So the optimizer, checkpoints and hooks of the user's know nothing of it. What
forward saved for backward is the parameter itself, mostly, which is why backward needs a copy too:
one of the same bits, for nobody has changed the full values in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from ..errors import InvalidArgument, InvalidType
from ._local_part import local

__all__ = ["MixedPrecision", "Precision", "cast_buffers", "check_precision", "setting_of"]


@dataclass(frozen=True)
class MixedPrecision:
    """The types to compute, reduce and keep buffers in; None for the module's own."""

    param_dtype: torch.dtype | None = None
    """Of parameters and inputs, in forward and backward."""
    reduce_dtype: torch.dtype | None = None
    """Of gradients while they are reduced; by default `param_dtype`."""
    buffer_dtype: torch.dtype | None = None
    """Of buffers, for good."""

    def __post_init__(self) -> None:
        for each in fields(self):
            dtype = getattr(self, each.name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise InvalidType(f"{each.name} is a torch.dtype or None, not {dtype!r}")
            if dtype is not None and not dtype.is_floating_point:
                raise InvalidArgument(f"{each.name} is a floating-point type, not {dtype}")

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Tell the type in which gradients are reduced."""
        return self.reduce_dtype or self.param_dtype


def setting_of(given: Any) -> MixedPrecision:
    """Take our setting, or torch's class for it."""
    if isinstance(given, MixedPrecision):
        return given
    try:
        return MixedPrecision(*(getattr(given, each.name) for each in fields(MixedPrecision)))
    except AttributeError:
        kind = type(given).__name__
        raise InvalidType(f"mixed_precision is a MixedPrecision, not a {kind}") from None


def check_precision(config: MixedPrecision, named: Sequence[tuple[str, Parameter]]) -> None:
    """Refuse a setting under which full values would be lost."""
    wanted = config.param_dtype
    if wanted is None:
        return
    lowered = [(name, p) for name, p in named if p.is_floating_point()]
    for name, parameter in lowered:
        if local(parameter) is not parameter:
            raise InvalidArgument(
                f"param_dtype is {wanted}, but parameter {name!r} is spread over a mesh, and such "
                "cannot be replaced by a copy: leave param_dtype out, or use autocast"
            )
        if torch.finfo(parameter.dtype).bits < torch.finfo(wanted).bits:
            raise InvalidArgument(
                f"param_dtype is {wanted}, but parameter {name!r} is only {parameter.dtype}: what "
                "is more precise than it would be lost; keep the module in full precision"
            )
    if lowered and all(p.dtype == wanted for _, p in lowered):
        raise InvalidArgument(
            f"the module is in {wanted} already, so that there are no full values to keep: wrap it "
            "in full precision, or leave mixed_precision out"
        )


class Precision:
    """The parameters of a module in two precisions."""

    def __init__(self, config: MixedPrecision, parameters: Sequence[Parameter]) -> None:
        self._config = config
        wanted = config.param_dtype
        self._parameters = [
            p for p in parameters if wanted and p.is_floating_point() and p.dtype != wanted
        ]
        self._full: list[Tensor] = []

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Tell the type in which gradients are reduced, if it is not their own."""
        return self._config.gradient_dtype

    @property
    def is_low(self) -> bool:
        """Tell whether parameters are of the smaller type now."""
        return bool(self._full)

    def lower(self) -> None:
        """Have the parameters be of the smaller type."""
        wanted = self._config.param_dtype
        if self.is_low or not self._parameters:
            return
        self._full = [p.data for p in self._parameters]
        low = [torch.empty_like(full, dtype=wanted) for full in self._full]
        torch._foreach_copy_(low, self._full)
        for parameter, data in zip(self._parameters, low, strict=True):
            parameter.data = data

    def restore(self, _: object = None) -> None:
        """Have the parameters be what they are for everybody else, and their gradients likewise."""
        full, self._full = self._full, []
        for parameter, data in zip(self._parameters, full, strict=bool(full)):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = data
            if gradient is not None:
                parameter.grad = gradient.to(data.dtype)

    def run(self, module: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        """Run a module in the smaller type."""
        was_low = self.is_low  # a checkpointed part of a backward pass
        self.lower()
        try:
            return module(*self._cast(inputs), **self._cast(kwargs))
        finally:
            if not was_low:
                self.restore()

    def _cast(self, value: Any) -> Any:
        """Turn the floating-point tensors in some inputs into the smaller type."""
        wanted = self._config.param_dtype

        def smaller(item: Any) -> Any:
            is_number = isinstance(item, Tensor) and item.is_floating_point()
            return item.to(wanted) if is_number else item

        return value if wanted is None else tree_map(smaller, value)


def cast_buffers(module: nn.Module, dtype: torch.dtype, *, ignored: Collection[str]) -> None:
    """Turn the floating-point buffers of a module into another type, for good."""
    for name, buffer in module.named_buffers():
        if name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
