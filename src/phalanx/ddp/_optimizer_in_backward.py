"""Optimizers that step at the end of a backward pass, when gradients are reduced.

By default no parameter is stepped before all gradients are reduced: only the header, which comes
with the last bucket, tells whether a gradient was late or a parameter unused. With
`static_graph=True` the user rules both out, and the parameters of a bucket are stepped when it is
reduced. No parameter is stepped before backward is over, since autograd may still need its value.

A pass in `no_sync` steps nothing; its gradients are part of the next reduced pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType


def _applied(parameter: Tensor) -> Sequence[Optimizer]:
    """Return the optimizers that torch's ``_apply_optimizer_in_backward`` gave to a parameter."""
    return getattr(parameter, "_in_backward_optimizers", ())


class OptimizersInBackward:
    """The optimizers that step parameters at the end of backward."""

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self._named = list(named)
        self.ends = self._named[:1] + self._named[-1:]  # cheap enough to check in every step
        self._fused: list[Optimizer] = []  # at most one
        self._per_parameter = [(id(p), optimizer) for _, p in named for optimizer in _applied(p)]
        """Optimizers of single parameters, with the id of the parameter."""
        self._counts = Counter(parameter for parameter, _ in self._per_parameter)
        if self._per_parameter:
            # Remove torch's hooks, which would step with gradients that are not reduced yet.
            module = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"]
            for _, parameter in named:
                for handle in module.param_to_optim_hook_handle_map.get(parameter, []):
                    handle.remove()

    def register(
        self, kind: type[Optimizer], parameters: Iterable[Tensor] | None, *args: Any, **kwargs: Any
    ) -> Optimizer:
        """Make one optimizer for these parameters, or for all."""
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise InvalidType(f"optim must be a subclass of torch.optim.Optimizer, got {kind!r}")
        if self._fused:
            raise InvalidState(
                f"{type(self._fused[0]).__name__} already steps this module in backward; an "
                "optimizer applied twice would step twice"
            )
        ours: dict[Tensor, str] = {p: name for name, p in self._named}
        chosen = list(ours if parameters is None else parameters)
        for parameter in chosen:
            if parameter not in ours:
                raise InvalidArgument("optim_params must be parameters of the wrapped module")
            if _applied(parameter):
                raise InvalidState(
                    f"an optimizer already steps parameter {ours[parameter]!r} in backward; an "
                    "optimizer applied twice would step twice"
                )
        self._fused = [kind(chosen, *args, **kwargs)]
        return self._fused[0]

    def all(self) -> list[Optimizer]:
        return [optimizer for _, optimizer in self._per_parameter] + self._fused

    def step(self, *, already_stepped: Collection[int] = ()) -> None:
        """Step and clear all gradients, except for parameters with these ids."""
        rest = [each for p, each in self._per_parameter if p not in already_stepped]
        _step_and_clear(rest + self._fused)

    def step_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Step and clear some parameters, where the optimizer steps each independently."""
        chosen = set(map(id, parameters))
        _step_and_clear([each for p, each in self._per_parameter if p in chosen])
        for optimizer in filter(_is_separable, self._fused):
            every = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in chosen]
            try:
                _step_and_clear([optimizer])
            finally:
                for group, members in zip(optimizer.param_groups, every, strict=True):
                    group["params"] = members

    def check(self, named: Sequence[tuple[str, Parameter]] | None = None) -> None:
        """Raise if an optimizer was applied after wrapping, to these parameters or to any."""
        for name, parameter in self._named if named is None else named:
            if len(_applied(parameter)) != self._counts[id(parameter)]:
                raise InvalidState(
                    f"an optimizer was applied to parameter {name!r} after the module was wrapped "
                    "and would step with this rank's gradients only. Apply it before wrapping"
                )

    def __bool__(self) -> bool:
        return bool(self._per_parameter or self._fused)


def _step_and_clear(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _is_separable(optimizer: Optimizer) -> bool:
    """Whether stepping parameters in parts equals one step of all."""
    # Hooks, and optimizers that are not torch's, may read all gradients.
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    return is_known and not hooks and not isinstance(optimizer, LBFGS)
