"""Mixed precision: compute in a small dtype, keep parameters and gradients in full precision.

While forward runs, layers find a low-precision copy in the place of each parameter, derived
from it by autograd. Autograd's own cast brings the gradients back to full precision, so
optimizers, checkpoints and hooks see only full-precision parameters. The copies are in place
again during backward, for layers that are recomputed (activation checkpointing).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from ..errors import InvalidArgument, InvalidState, InvalidType


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes to compute, reduce and keep buffers in; None for the module's own."""

    param_dtype: torch.dtype | None = None
    """Of parameters and inputs, in forward and backward."""
    reduce_dtype: torch.dtype | None = None
    """Of gradients while they are reduced; by default `param_dtype`."""
    buffer_dtype: torch.dtype | None = None
    """Of buffers, permanently."""

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if not isinstance(dtype, torch.dtype | None):
                raise InvalidType(f"{name} must be a torch.dtype or None, got {dtype!r}")
            if dtype is not None and not dtype.is_floating_point:
                raise InvalidArgument(f"{name} must be a floating-point dtype, got {dtype}")

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced."""
        return self.reduce_dtype or self.param_dtype


def resolve_mixed_precision(
    given: Any, named: Sequence[tuple[str, Parameter]]
) -> MixedPrecision | None:
    """Accept our class or torch's; raise if parameters have no higher precision to keep."""
    if given is None:
        return None
    config = given
    if not isinstance(given, MixedPrecision):
        try:
            config = MixedPrecision(given.param_dtype, given.reduce_dtype, given.buffer_dtype)
        except AttributeError:
            kind = type(given).__name__
            raise InvalidType(f"mixed_precision must be a MixedPrecision, got {kind}") from None
    wanted = config.param_dtype
    lowered = [(name, p) for name, p in named if wanted and p.is_floating_point()]
    for name, parameter in lowered:
        if wanted and torch.finfo(parameter.dtype).bits < torch.finfo(wanted).bits:
            raise InvalidArgument(
                f"param_dtype={wanted} is wider than parameter {name!r} ({parameter.dtype}), so "
                "the extra precision would be lost. Keep the module in full precision"
            )
    if lowered and all(p.dtype == wanted for _, p in lowered):
        raise InvalidArgument(
            f"the module is already in {wanted} and has no full-precision parameters to keep. Wrap "
            "it in full precision, or pass only reduce_dtype: "
            "MixedPrecision(reduce_dtype=torch.float32)"
        )
    return cast("MixedPrecision", config)


class PrecisionPolicy:
    """Swaps low-precision copies for the parameters of a module."""

    def __init__(
        self, config: MixedPrecision, module: nn.Module, parameters: Sequence[Parameter]
    ) -> None:
        self._dtype = wanted = config.param_dtype
        lowered = {p for p in parameters if wanted and p.is_floating_point() and p.dtype != wanted}
        self._places: list[tuple[nn.Module, str, Parameter]] = [
            (submodule, name, p)
            for submodule in module.modules()
            for name, p in submodule._parameters.items()
            if p is not None and p in lowered
        ]
        self._copies: dict[Parameter, Tensor] = {}
        self._holders = 0
        self._task: int | None = None  # the graph task that holds the copies

    def run(self, module: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        copies = self._hold()
        try:
            output = module(*self._cast(inputs), **self._cast(kwargs))
        finally:
            self._release()
        for copy, name in copies:
            if copy._version:
                raise InvalidState(
                    f"forward wrote to the low-precision copy of parameter {name!r}, so the change "
                    "would be lost. Change parameters outside forward"
                )
        return output

    def _cast(self, value: Any) -> Any:
        dtype = self._dtype
        if dtype is None:
            return value
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)

    def use_copies_in_backward(self) -> None:
        """Keep the copies in place until the current graph task ends."""
        task = torch._C._current_graph_task_id()
        if self._places and self._task != task:
            with torch.enable_grad():
                self._hold()
            self._task = task

            def end() -> None:
                finalizer()

            # Runs once: when autograd calls it, or drops it because the task has failed.
            finalizer = weakref.finalize(end, self._end_backward)
            finalizer.atexit = False
            Variable._execution_engine.queue_callback(end)

    def _end_backward(self) -> None:
        self._task = None
        self._release()

    def _hold(self) -> list[tuple[Tensor, str]]:
        """Swap in the copies; return them, unless they were already in place."""
        self._holders += 1
        if self._holders > 1:
            return []
        for submodule, _, parameter in self._places:
            if parameter not in self._copies:
                cast = _SparseCast.apply if getattr(submodule, "sparse", False) else Tensor.to
                self._copies[parameter] = cast(parameter, self._dtype)
        self._put(self._copies)
        return [(self._copies[parameter], name) for _, name, parameter in self._places]

    def _release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._copies = {}
            self._put({})

    @contextmanager
    def without_copies(self) -> Generator[None, None, None]:
        """Restore the parameters in the body, even if copies are held."""
        self._put({})
        try:
            yield
        finally:
            self._put(self._copies)

    def _put(self, copies: dict[Parameter, Tensor]) -> None:
        for submodule, name, parameter in self._places:
            submodule._parameters[name] = copies.get(parameter, parameter)  # type: ignore[assignment]
        # Recurrent layers keep lists of their parameters.
        recurrent = {layer for layer, _, _ in self._places if isinstance(layer, nn.RNNBase)}
        for layer in recurrent:
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]


class _SparseCast(torch.autograd.Function):
    """A cast that supports sparse gradients, unlike torch's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype), None


def cast_buffers(module: nn.Module, dtype: torch.dtype, *, ignored: Collection[str]) -> None:
    """Convert the floating-point buffers of a module permanently."""
    for name, buffer in module.named_buffers():
        if name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
