"""Optimizers that step at the end of a backward pass, when gradients are reduced.

By default no parameter is stepped before all gradients are reduced: only the header, which comes
with the last bucket, tells whether a gradient was late or a parameter unused. With
`static_graph=True` the user rules both out, and the parameters of a bucket are stepped when it is
reduced. No parameter is stepped before backward is over, since autograd may still need its value.

A pass in `no_sync` steps nothing; its gradients are part of the next reduced pass.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType

OPTIMIZERS_ATTRIBUTE = "_in_backward_optimizers"
"""Where torch's ``_apply_optimizer_in_backward`` stores the optimizers of a parameter."""


class OptimizersInBackward:
    """The optimizers that step parameters at the end of backward."""

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self._named = list(named)
        self._ends = self._named[:1] + self._named[-1:]
        self._applied = {
            p: len(getattr(p, OPTIMIZERS_ATTRIBUTE, ()))
            for _, p in named
            if hasattr(p, OPTIMIZERS_ATTRIBUTE)
        }
        self._fused: Optimizer | None = None
        self._single: list[tuple[int, Optimizer]] = [
            (id(p), optimizer)
            for _, p in named
            for optimizer in getattr(p, OPTIMIZERS_ATTRIBUTE, ())
        ]
        """Optimizers of single parameters, with the id of the parameter."""
        if self._single:
            _remove_torch_hooks([p for _, p in named])

    def fuse(
        self, kind: type[Optimizer], parameters: Iterable[Tensor] | None, *args: Any, **kwargs: Any
    ) -> Optimizer:
        """Make one optimizer for these parameters, or for all."""
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise InvalidType(f"an optimizer is a class of torch.optim, not {kind!r}")
        if self._fused is not None:
            raise InvalidState(
                f"the module has {type(self._fused).__name__} in backward already: an optimizer "
                "that is applied twice would step twice"
            )
        ours = {p: name for name, p in self._named}
        chosen = list(ours if parameters is None else parameters)
        for parameter in chosen:
            self._check(parameter, ours)
        self._fused = kind(chosen, *args, **kwargs)
        return self._fused

    def _check(self, parameter: Tensor, ours: dict[Any, str]) -> None:
        if parameter not in ours:
            raise InvalidArgument(
                "a parameter is not one whose gradients the module reduces: pass those of the "
                "wrapped module"
            )
        if getattr(parameter, OPTIMIZERS_ATTRIBUTE, ()):
            raise InvalidState(
                f"parameter {ours[parameter]!r} has an optimizer in backward already: an optimizer "
                "that is applied twice would step twice"
            )

    def all(self) -> list[Optimizer]:
        single = [optimizer for _, optimizer in self._single]
        return single if self._fused is None else [*single, self._fused]

    def step(self, *, besides: Collection[int] = ()) -> None:
        """Step and clear all gradients.

        `besides` are ids of parameters that were stepped already. They have no gradient, but their
        optimizers would still call step hooks.
        """
        optimizers = [each for parameter, each in self._single if parameter not in besides]
        if self._fused is not None:
            optimizers.append(self._fused)
        _step_and_clear(optimizers)

    def step_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Step and clear some parameters, where the optimizer steps each independently."""
        chosen = set(map(id, parameters))
        _step_and_clear([each for parameter, each in self._single if parameter in chosen])
        if self._fused is not None and _is_separable(self._fused):
            with _restricted_to(self._fused, chosen):
                _step_and_clear([self._fused])

    def check_first(self) -> None:
        """Raise if an optimizer was applied after wrapping; checks two parameters, every step."""
        self._check_known(self._ends)

    def check(self) -> None:
        """Raise if an optimizer was applied to any parameter after wrapping."""
        self._check_known(self._named)

    def _check_known(self, named: Sequence[tuple[str, Parameter]]) -> None:
        for name, parameter in named:
            if len(getattr(parameter, OPTIMIZERS_ATTRIBUTE, ())) != self._applied.get(parameter, 0):
                raise InvalidState(
                    f"an optimizer was applied to parameter {name!r} after the module was wrapped, "
                    "so it would step with the gradients of one rank: apply it before"
                )

    def __bool__(self) -> bool:
        return bool(self._single or self._fused)


def _step_and_clear(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _is_separable(optimizer: Optimizer) -> bool:
    """Whether stepping parameters in parts equals one step of all.

    Hooks, and optimizers that are not torch's, may read all gradients.
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    return is_known and not hooks and not isinstance(optimizer, LBFGS)


@contextmanager
def _restricted_to(optimizer: Optimizer, parameters: Collection[int]) -> Iterator[None]:
    """Hide all other parameters from an optimizer."""
    every = [group["params"] for group in optimizer.param_groups]
    for group, members in zip(optimizer.param_groups, every, strict=True):
        group["params"] = [p for p in members if id(p) in parameters]
    try:
        yield
    finally:
        for group, members in zip(optimizer.param_groups, every, strict=True):
            group["params"] = members


def _remove_torch_hooks(parameters: Sequence[Parameter]) -> None:
    """Remove torch's hooks, which would step with gradients that are not reduced yet."""
    module = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"]
    handles = module.param_to_optim_hook_handle_map
    for parameter in parameters:
        for handle in handles.get(parameter, []):
            handle.remove()
