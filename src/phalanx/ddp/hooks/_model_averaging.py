"""Model averaging: ranks train independently, and their models are averaged periodically.

Averagers decide when and in which group. Post-local SGD (Lin et al. 2018, arXiv:1808.07217)
averages gradients over all ranks at first and over a subgroup afterwards.

DiLoCo (arXiv:2311.08105): every H steps each rank sends how far it has moved. The mean of that is a
gradient for an outer optimizer, SGD with Nesterov momentum. *Streaming* (arXiv:2501.18512) splits
the model into fragments that take turns, lets the mean arrive some steps later while training
continues, and mixes it with what the rank has learned meanwhile.

Averaging is a collective: whether a rank averages must depend on the step only, never on its
gradients. That is why `WrappingOptimizer` asks a GradScaler to call every step, even one that
it would skip.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import Parameter
from torch.optim import Optimizer

from ...errors import InvalidArgument, InvalidState, InvalidType
from ...groups import ProcessGroup
from ...groups._call_site import warn_user
from .._communicator import Communicator, FlatMessage, chunk_tensors
from . import _base as base


class CoalescedAverage:
    """An average of tensors over the ranks in flight, one call per dtype and device."""

    def __init__(self, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]  # they hold the means after `finish`
        chunks = chunk_tensors(self.tensors)
        self._messages = [FlatMessage(each, Communicator(group, each[0].device)) for each in chunks]
        for message in self._messages:
            message.pack()
        self._calls = [base.start_average(group, message.flat) for message in self._messages]

    def finish(self) -> list[Tensor]:
        """Wait for the means, copy them into the tensors, and return those; call it once."""
        for message, call in zip(self._messages, self._calls, strict=True):
            call.wait()
            message.unpack()  # into the existing memory, which may be shared or have views
        return self.tensors


ParametersOrGroups = Iterable[Tensor] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """Base class of averagers: a group, and the number of steps."""

    def __init__(self, process_group: base.OptionalGroup = None, *, warmup_steps: int = 0) -> None:
        self.process_group = base.hook_group(process_group)
        self.warmup_steps = base.check_count("warmup_steps", warmup_steps)
        self.step = 0
        """The number of steps so far."""

    @abstractmethod
    def group_for_step(self) -> dist.ProcessGroup | None:
        """Return the group in which to average in this step, or None."""

    def average_parameters(self, params: ParametersOrGroups) -> None:
        """Average parameters, or those of param groups, if it is time; call it once a step."""
        group = self.group_for_step() if self.step >= self.warmup_steps else None
        if group is not None:
            CoalescedAverage(trainable_parameters(params), group).finish()
        self.step += 1


class PeriodicModelAverager(ModelAverager):
    """Averages models every `period` steps after the warm-up."""

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: base.OptionalGroup = None
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        self.period = base.check_count("period", period, least=1)
        if period == 1:
            _warn_period_of_one()

    def group_for_step(self) -> dist.ProcessGroup | None:
        return None if (self.step - self.warmup_steps) % self.period else self.process_group


class HierarchicalModelAverager(ModelAverager):
    """Averages models in small groups often and in large ones rarely (arXiv:2010.12998).

    ``{2: 4, 8: 16}`` averages groups of 4 neighbouring ranks every 2 steps, and all 16 every 8. The
    last entry must have all ranks.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: base.OptionalGroup = None,
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        levels, whole = dict(period_group_size_dict or {}), self.process_group.size()
        if not levels:
            raise InvalidArgument("period_group_size_dict must have at least one period")
        for period, size in levels.items():
            base.check_count("a period of period_group_size_dict", period, least=1)
            base.check_count("a group size of period_group_size_dict", size, least=1)
            if whole % size:
                raise InvalidArgument(f"{whole} ranks do not divide into groups of {size}")
        periods, sizes = list(levels), list(levels.values())
        if periods != sorted(periods) or sizes != sorted(sizes):
            raise InvalidArgument(f"periods and group sizes must ascend, got {levels}")
        if size != whole:
            raise InvalidArgument(
                f"the last group size must be the world size ({whole}), got {size}"
            )
        if max(levels) == 1:
            _warn_period_of_one()
        self.period_process_group_dict = {
            period: _neighbour_group(self.process_group, size) for period, size in levels.items()
        }

    def group_for_step(self) -> dist.ProcessGroup | None:
        groups = self.period_process_group_dict
        return next((groups[each] for each in reversed(groups) if self.step % each == 0), None)


def trainable_parameters(params: ParametersOrGroups) -> list[Tensor]:
    """Return the parameters that require a gradient.

    torch leaves out those without one. Whether there is one may differ between ranks, and after
    ``zero_grad`` there is none, so nothing would be averaged.
    """
    found: list[Tensor] = []
    for each in params:
        if isinstance(each, Tensor | dict):
            found += each["params"] if isinstance(each, dict) else [each]
        else:
            raise InvalidType(
                f"params must be parameters or param groups, got {type(each).__name__}"
            )
    return [each for each in found if each.requires_grad]


def _neighbour_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    if size == group.size():
        return group
    if isinstance(group, ProcessGroup):
        first = group.rank() // size * size
        return cast("ProcessGroup", group.split_group(range(first, first + size)))
    return dist.new_subgroups(group_size=size, group=group)[0]  # type: ignore[no-any-return,no-untyped-call]


def _warn_period_of_one() -> None:
    warn_user(
        "a period of 1 averages the model in every step, which costs as much as plain data "
        "parallel training and does not overlap with backward"
    )


class WrappingOptimizer(Optimizer, ABC):
    """An optimizer around another; schedulers and scalers accept it.

    A `GradScaler` skips a step whose gradients are not finite. With local gradients that may happen
    on one rank only, and the others would wait for its average. So the scaler is asked to call
    every step, as for optimizers that unscale themselves. During the call it sets ``found_inf``,
    not zero if any gradient is not finite, and ``grad_scale``, a divisor of the gradients or None.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optim: Optimizer) -> None:
        # Not Optimizer.__init__: parameters and state are those of the wrapped optimizer.
        if not isinstance(optim, Optimizer):
            raise InvalidType(f"optim must be an Optimizer, got {type(optim).__name__}")
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameters of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the wrapped optimizer."""
        return self.optim.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the wrapped optimizer, then call `after_step`, even if the step was skipped."""
        loss = None
        try:
            if not getattr(self, "found_inf", 0):
                self._unscale()
                loss = self.optim.step() if closure is None else self.optim.step(closure)
            self.after_step()
        except BaseException:
            # The scaler deletes them after the call, unless that raises.
            vars(self).pop("found_inf", None)
            vars(self).pop("grad_scale", None)
            raise
        return loss

    @torch.no_grad()
    def _unscale(self) -> None:
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for parameter in (each for group in self.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))

    @abstractmethod
    def after_step(self) -> None:
        """Run after every step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        self.optim.add_param_group(param_group)


class PostLocalSGDOptimizer(WrappingOptimizer):
    """Steps locally, and calls an averager after each step."""

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        if not callable(getattr(averager, "average_parameters", None)):
            raise InvalidType(f"averager must be a ModelAverager, got {type(averager).__name__}")
        self.averager = averager

    def after_step(self) -> None:
        """Average the models, if it is time."""
        self.averager.average_parameters(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and the averager's number of steps."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned here or on a plain optimizer."""
        self.optim.load_state_dict({k: state_dict[k] for k in state_dict if k != "step"})
        if "step" not in state_dict:
            warn_user("state_dict has no 'step': the averager starts at step 0, with its warm-up")
        self.averager.step = state_dict.get("step", 0)


@dataclass(eq=False, repr=False)
class PostLocalSGDState(base.HookState):
    """The groups that average gradients, and when to switch; the names are torch's."""

    subgroup: base.OptionalGroup
    """If None, torch makes one for each machine with accelerators."""
    start_localSGD_iter: int  # noqa: N815
    post_local_gradient_allreduce: bool = True
    """Whether the subgroup averages gradients after the first steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_group(self.subgroup)
        base.check_count("start_localSGD_iter", self.start_localSGD_iter)

    def local_group(self) -> dist.ProcessGroup:
        """Return the group that averages gradients after the first steps."""
        if self.subgroup is None:
            try:
                self.subgroup, _ = dist.new_subgroups()  # type: ignore[no-untyped-call]
            except (RuntimeError, ValueError) as error:
                raise InvalidArgument(
                    f"PostLocalSGDState has no subgroup, and torch cannot make one: {error}. "
                    "Hint: pass group.split_group(ranks)."
                ) from error
        return self.subgroup

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "subgroup": None}


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:  # noqa: N802
    """Average the gradients over all ranks in the first steps, then over the subgroup."""
    step = base.begin_step(state, PostLocalSGDState, bucket, "post_localSGD_hook")
    if step < state.start_localSGD_iter:
        return base.average(base.hook_group(state.process_group, bucket), bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return base.completed(bucket.buffer())
    return base.average(state.local_group(), bucket.buffer())


OuterFactory = Callable[[list[Tensor]], Optimizer]
_nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)  # the paper's best


class Fragment:
    """Parameters that are synchronized together."""

    def __init__(self, parameters: Sequence[Tensor], make_outer: OuterFactory) -> None:
        self.parameters = list(parameters)
        self.anchors: list[Tensor] = [Parameter(each.detach().clone()) for each in parameters]
        """The values of the last synchronization, equal on all ranks; the outer optimizer's."""
        self.outer = make_outer(self.anchors)
        self.due: int | None = None  # the step at which the average in flight takes effect
        self._in_flight: CoalescedAverage | None = None
        self._deltas: list[Tensor] = []

    @torch.no_grad()
    def start(self, group: dist.ProcessGroup, due: int) -> None:
        """Start to average how far the ranks have moved; the result is used at step `due`."""
        # Negated, as a gradient: the outer optimizer steps against it.
        deltas = torch._foreach_sub(self.anchors, self.parameters)
        self._in_flight, self.due = CoalescedAverage(deltas, group), due

    @torch.no_grad()
    def finish(self, alpha: float) -> None:
        """Step the anchors with the mean of all ranks, and move the parameters towards them."""
        for anchor, delta in zip(self.anchors, self._arrived(), strict=True):
            anchor.grad = delta
        self.outer.step()
        self.outer.zero_grad()
        self._deltas, self.due = [], None
        if alpha:
            torch._foreach_lerp_(self.parameters, self.anchors, 1 - alpha)
        else:
            torch._foreach_copy_(self.parameters, self.anchors)

    def _arrived(self) -> list[Tensor]:
        if self._in_flight is not None:
            self._deltas, self._in_flight = self._in_flight.finish(), None
        return self._deltas

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the anchors, the outer optimizer's state, and the average in flight."""
        return {
            "anchors": [anchor.detach().clone() for anchor in self.anchors],
            "outer": copy.deepcopy(self.outer.state_dict()),  # torch returns references
            "due": self.due,
            "deltas": [delta.clone() for delta in self._arrived()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch._foreach_copy_(self.anchors, state_dict["anchors"])
        self.outer.load_state_dict(state_dict["outer"])
        self.due, self._in_flight = state_dict["due"], None
        self._deltas = [delta.clone() for delta in state_dict["deltas"]]


class DiLoCo(WrappingOptimizer):
    """Steps locally, and synchronizes the model every `sync_every` steps.

    Ranks must start with the same parameters, as they do if DDP wraps the module. Register
    `noop_hook` there, or a hook that averages within a small group.
    """

    def __init__(
        self,
        optim: Optimizer,
        *,
        sync_every: int,
        process_group: base.OptionalGroup = None,
        outer: OuterFactory | None = None,
        fragments: int | Iterable[Iterable[Tensor]] = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        """Wrap the optimizer of the local steps.

        `outer` makes the outer optimizer from a list of parameters. `fragments` is a number of
        fragments, or lists that together contain all parameters. An average takes effect `delay`
        steps after it started; a parameter then keeps the fraction `alpha` of its own value.
        """
        super().__init__(optim)
        self.process_group = base.hook_group(process_group)
        self.sync_every = base.check_count("sync_every", sync_every, least=1)
        self.delay = base.check_count("delay", delay)
        if delay >= sync_every:
            raise InvalidArgument(f"delay must be less than sync_every ({sync_every}), got {delay}")
        if not 0 <= alpha < 1:
            raise InvalidArgument(f"alpha must be in [0, 1), got {alpha!r}")
        self.alpha = alpha
        self.steps = 0
        """The number of steps so far."""
        parameters = trainable_parameters(self.param_groups)
        if isinstance(fragments, int):
            count = base.check_count("fragments", fragments, least=1)
            # Each has layers from all over the model, which the paper found better than a range.
            fragments = [parameters[i::count] for i in range(count)]
        parts = [list(fragment) for fragment in fragments]
        if not parts or not all(parts) or len(parts) > sync_every:
            raise InvalidArgument(
                f"fragments must be 1 to {min(sync_every, len(parameters))}, each with a parameter "
                f"and its own step of sync_every, got {len(parts)}"
            )
        given = sorted(id(parameter) for part in parts for parameter in part)
        if given != sorted(map(id, parameters)):
            raise InvalidArgument("fragments must contain each trainable parameter exactly once")
        self.fragments = [Fragment(part, outer or _nesterov) for part in parts]

    def after_step(self) -> None:
        """Start and finish averages of the fragments whose turn it is."""
        self.steps += 1
        count = len(self.fragments)
        for i, fragment in enumerate(self.fragments):
            if (self.steps - i * self.sync_every // count) % self.sync_every == 0:
                fragment.start(self.process_group, self.steps + self.delay)
            if fragment.due == self.steps:
                fragment.finish(self.alpha)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the fragments are fixed."""
        del param_group
        raise InvalidState("add parameters to the optimizer before DiLoCo wraps it")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on, averages in flight included."""
        return {
            "optim": self.optim.state_dict(),
            "steps": self.steps,
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the parameters must be restored separately."""
        saved, count = state_dict["fragments"], len(self.fragments)
        if len(saved) != count:
            raise InvalidArgument(f"state_dict has {len(saved)} fragments, expected {count}")
        self.optim.load_state_dict(state_dict["optim"])
        self.steps = state_dict["steps"]
        for fragment, its_state in zip(self.fragments, saved, strict=True):
            fragment.load_state_dict(its_state)
