"""Model averaging: ranks train apart, and their models are averaged every so many steps.

Averagers decide when and in which group. Post-local SGD (Lin et al. 2018, arXiv:1808.07217)
averages gradients over all ranks at first and over a subgroup afterwards.

Averaging is a collective: whether a rank averages must depend on the step only, never on its
gradients. That is why `WrappingOptimizer` asks a GradScaler to call every step, even one that
it would skip.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.optim import Optimizer

from ...errors import InvalidArgument, InvalidType
from ...groups import ProcessGroup
from ._base import (
    HookState,
    average,
    check_count,
    check_group,
    check_state,
    completed,
    group_of,
    new_subgroup,
    start_average,
)


class CoalescedAverage:
    """Tensors on their way to their means over the ranks, all of one dtype and device at once."""

    def __init__(self, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        """What was given; it holds the means when all is finished."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self.tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._parts = list(alike.values())
        self._flats = [torch.cat([each.reshape(-1) for each in parts]) for parts in self._parts]
        self._calls = [start_average(group, flat) for flat in self._flats]

    def finish(self) -> list[Tensor]:
        """Wait for the means and put them in place, once; returns the tensors."""
        for parts, flat, call in zip(self._parts, self._flats, self._calls, strict=True):
            call.wait()
            means = torch.split(flat, [each.numel() for each in parts])
            # Into the memory that they have, which may be shared, or shown in views.
            shaped = [mean.view(each.shape) for mean, each in zip(means, parts, strict=True)]
            torch._foreach_copy_(parts, shaped)
        return self.tensors


ParametersOrGroups = Iterable[Tensor] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """What averagers have in common: a group, and the number of steps."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, warmup_steps: int = 0
    ) -> None:
        self.process_group = group_of(process_group)
        """Where models are averaged; torch's default group unless another was given."""
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self.step = 0
        """How many steps there have been."""

    @abstractmethod
    def group_for_step(self) -> dist.ProcessGroup | None:
        """Tell in which group models are averaged in this step, if they are."""

    def average_parameters(self, params: ParametersOrGroups) -> None:
        """Average parameters, or those of an optimizer's groups, if it is time; once a step."""
        group = self.group_for_step() if self.step >= self.warmup_steps else None
        if group is not None:
            CoalescedAverage(trainable_parameters(params), group).finish()
        self.step += 1


class PeriodicModelAverager(ModelAverager):
    """Averages models every `period` steps, from the end of the warm-up on."""

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        self.period = check_count("period", period, least=1)
        if period == 1:
            _warn_period_of_one()

    def group_for_step(self) -> dist.ProcessGroup | None:
        """Tell in which group models are averaged in this step, if they are."""
        return None if (self.step - self.warmup_steps) % self.period else self.process_group


class HierarchicalModelAverager(ModelAverager):
    """Averages models in small groups often and in large ones seldom (arXiv:2010.12998).

    ``{2: 4, 8: 16}`` averages fours of neighbouring ranks every 2 steps, and all 16 every 8. The
    last group is the whole one.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        levels = dict(period_group_size_dict or {})
        _check_levels(levels, self.process_group.size())
        if max(levels) == 1:
            _warn_period_of_one()
        self.period_process_group_dict = {
            period: _neighbour_group(self.process_group, size) for period, size in levels.items()
        }

    def group_for_step(self) -> dist.ProcessGroup | None:
        """Tell in which group models are averaged in this step: the largest whose turn it is."""
        for period in reversed(self.period_process_group_dict):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None


def trainable_parameters(params: ParametersOrGroups) -> list[Tensor]:
    """List the parameters that training changes.

    Torch leaves out those without a gradient. Whether there is one may differ between ranks, and
    after ``zero_grad`` there is none; then nothing would be averaged, and nobody told.
    """
    found: list[Tensor] = []
    for each in params:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict):
            found.extend(each["params"])
        else:
            raise InvalidType(
                f"parameters, or groups of them, can be averaged, not {type(each).__name__}"
            )
    return [each for each in found if each.requires_grad]


def _check_levels(levels: Mapping[int, int], whole: int) -> None:
    if not levels:
        raise InvalidArgument("period_group_size_dict has no period: what should be averaged when?")
    sizes = list(levels.values())
    for period, size in levels.items():
        check_count("a period of period_group_size_dict", period, least=1)
        check_count("a group size of period_group_size_dict", size, least=1)
        if whole % size:
            raise InvalidArgument(f"{whole} ranks cannot be divided into groups of {size}")
    if list(levels) != sorted(levels) or sizes != sorted(sizes):
        raise InvalidArgument(
            f"periods and group sizes of period_group_size_dict rise together, not {dict(levels)}"
        )
    if sizes[-1] != whole:
        raise InvalidArgument(
            f"the last group of period_group_size_dict has all {whole} ranks, not {sizes[-1]}"
        )


def _neighbour_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Make the group of the `size` neighbouring ranks that this one belongs to."""
    if size == group.size():
        return group
    if isinstance(group, ProcessGroup):
        first = group.rank() // size * size
        mine = group.split_group(range(first, first + size))
        assert mine is not None, "a rank is among its neighbours"
        return mine
    return new_subgroup(group_size=size, group=group)


def _warn_period_of_one() -> None:
    warnings.warn(
        "a period of 1 averages the model in every step, which costs as much as averaging the "
        "gradients: plain data parallel training does that during backward",
        stacklevel=3,
    )


class WrappingOptimizer(Optimizer):
    """Passes on what an optimizer is asked; schedulers and scalers take it for one.

    A `GradScaler` leaves out a step in which it has found what is not finite. Where gradients are a
    rank's own, that may be so on one rank alone, and the others would wait for it after theirs. So
    it is asked to call every step, as it does with optimizers that scale themselves: it says what
    it has found by two attributes, which are there during the call.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor
    """Not zero if there are gradients that are not finite."""
    grad_scale: Tensor | None
    """What gradients have yet to be divided by."""

    def __init__(self, optim: Optimizer) -> None:
        # Not Optimizer's own: parameters and state are those of the optimizer inside.
        if not isinstance(optim, Optimizer):
            raise InvalidType(f"optim is an Optimizer, not {type(optim).__name__}")
        self.optim = optim
        """The optimizer inside."""
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameters of the optimizer inside."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer inside."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of the optimizer inside, and do what is to be done after it, always."""
        given = () if closure is None else (closure,)
        if not hasattr(self, "found_inf"):
            loss = self.optim.step(*given)
            self.after_step()
            return loss
        try:
            loss = self._scaled_step(*given)
            self.after_step()
        except BaseException:
            # The scaler takes them away after the call, unless that raises.
            del self.found_inf, self.grad_scale
            raise
        return loss

    def _scaled_step(self, *given: Callable[[], float]) -> float | None:
        """Take the step for a scaler, or leave it out."""
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            inside: Any = self.optim
            inside.found_inf, inside.grad_scale = self.found_inf, self.grad_scale
            try:
                return inside.step(*given)  # type: ignore[no-any-return]
            finally:
                del inside.found_inf, inside.grad_scale
        if self.found_inf.item():
            return None
        if self.grad_scale is not None:
            _unscale(self.param_groups, self.grad_scale)
        return self.optim.step(*given)

    def after_step(self) -> None:
        """Do what is to be done after a step."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside."""
        self.optim.add_param_group(param_group)


@torch.no_grad()
def _unscale(groups: Iterable[dict[str, Any]], scale: Tensor) -> None:
    """Divide gradients by a scale."""
    inverse = scale.double().reciprocal().float()
    for parameter in (each for group in groups for each in group["params"]):
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))


class PostLocalSGDOptimizer(WrappingOptimizer):
    """Takes local steps, and lets an averager average the models after each."""

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        if not callable(getattr(averager, "average_parameters", None)):
            raise InvalidType(f"averager is a ModelAverager, not {type(averager).__name__}")
        self.averager = averager

    def after_step(self) -> None:
        """Average the models, if it is time."""
        self.averager.average_parameters(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, and the averager's number of steps."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved; the state of a plain optimizer will do."""
        self.optim.load_state_dict(
            {name: value for name, value in state_dict.items() if name != "step"}
        )
        if "step" not in state_dict:
            warnings.warn(
                "what is loaded does not say how many steps the averager has counted: it begins "
                "at 0, with its warm-up",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)


class PostLocalSGDState(HookState):
    """Which groups average the gradients, and from which step on; the names are torch's."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        """Set it up; a subgroup of None is made by torch, one for each machine with accelerators.

        Without `post_local_gradient_allreduce` every rank is on its own after the first steps.
        """
        super().__init__(process_group)
        self.subgroup = check_group(subgroup)
        self.start_localSGD_iter = check_count("start_localSGD_iter", start_localSGD_iter)
        self.post_local_gradient_allreduce = post_local_gradient_allreduce

    def local_group(self) -> dist.ProcessGroup:
        """Return the group that gradients are averaged in after the first steps."""
        if self.subgroup is None:
            self.subgroup = _per_machine_group()
        return self.subgroup

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "subgroup": None}


def post_localSGD_hook(  # noqa: N802
    state: PostLocalSGDState, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients over all ranks in the first steps, then over the subgroup."""
    check_state(state, PostLocalSGDState, "post_localSGD_hook")
    is_global = state.iter < state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if is_global:
        return average(group_of(state.process_group, bucket), bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return average(state.local_group(), bucket.buffer())


def _per_machine_group() -> dist.ProcessGroup:
    try:
        return new_subgroup()
    except (RuntimeError, ValueError) as error:
        raise InvalidArgument(
            f"PostLocalSGDState has no subgroup, and torch makes none here: pass one, such as "
            f"group.split_group(ranks) returns ({error})"
        ) from error
