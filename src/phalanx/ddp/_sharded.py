"""An optimizer whose work and state are divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType
from ..groups import ProcessGroup
from ..join import Join, Joinable, JoinHook
from ._agreement import verify_parameters
from ._arguments import choose_group
from ._channel import Channel
from ._sharded_memory import Exchange, make_exchanges
from ._sharded_shares import share_out
from ._sharded_state import States, collect

__all__ = ["ShardedOptimizer"]

Group = dict[str, Any]
NAMES = ("params", "param_names")
"""What a rank's own optimizer has of its own; all else in a group is options."""


class ShardedOptimizer(Optimizer, Joinable):
    """Step each parameter on one rank only, which alone keeps the state for it.

    `optimizer_class` is any of torch's optimizers that steps each parameter by itself; `defaults`
    are its arguments. Gradients have to be the same on all ranks, as `phalanx.DDP` makes them.
    Whole parameters are divided among the ranks, by bytes. At the start all ranks are given the
    values of rank 0.

    On groups that share memory there is one copy of each parameter for all ranks: ``.data`` moves
    into the shared memory of the rank that steps it, where all ranks read it, so nothing is sent
    after a step; ranks meet before the step and after it. So whatever else writes to a parameter
    does so for all ranks: edit weights in place on one rank, not on each, or pass
    ``share_parameters=False``. When the optimizer goes, each rank has its own copy again. On other
    groups, for parameters on other devices, and for those whose memory belongs to something else
    too, owners send what they have stepped.

    `step`, `add_param_group`, `consolidate_state_dict` and `state_dict` are called by every rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        share_parameters: bool = True,
        **defaults: Any,
    ) -> None:
        _check_class(optimizer_class)
        group = _choose_group(process_group)
        self._is_made = False
        self._collected: tuple[int, States | None] | None = None
        """The rank that has collected the state since the last step, and what it has collected."""
        Joinable.__init__(self)
        listed = _listed(params)
        if isinstance(listed, list) and not listed:
            listed = [{"params": []}]  # which is refused below
        Optimizer.__init__(self, listed, dict(defaults))
        parameters = self._parameters()
        if not parameters:
            raise InvalidArgument("the optimizer was given an empty parameter list")
        self._channel = Channel(group, parameters[0].device)
        self._share = share_parameters
        self._loads = [0] * group.size()
        self._owners: dict[Tensor, int] = {}
        self._exchanges: list[Exchange] = []
        self._divide(parameters)
        groups = [self._own_part(each) for each in self.param_groups]
        self._own = optimizer_class(groups, **defaults)
        self.defaults = self._own.defaults
        self._copy_options(self._own, self)
        self.state = self._own.state
        self._is_made = True
        self._verify(self.param_groups)
        self._exchange(parameters)

    # -- parameters ------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, and divide them so that shares are about equal again; all ranks do so."""
        param_group = {**param_group, "params": _listed(param_group["params"])}
        _check_distinct(param_group["params"])
        super().add_param_group(param_group)
        if not self._is_made:
            return
        added = self.param_groups[-1]
        self._divide(added["params"])
        self._own.add_param_group(self._own_part(added))
        self._collected = None
        self._verify([added], first=len(self.param_groups) - 1)
        self._exchange(added["params"])

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _divide(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if isinstance(parameter, UninitializedParameter):
                raise InvalidState("a parameter has no shape yet: run the module once before this")
            if parameter.device.type == "meta":
                raise InvalidState("a parameter has no values: it is on the meta device")
        owners = share_out(parameters, self._loads)
        self._owners.update(zip(parameters, owners, strict=True))

    def _own_part(self, group: Group) -> Group:
        """Make this rank's part of a group, without a parameter if it comes to that."""
        mine = [p for p in group["params"] if self._owners[p] == self._channel.rank]
        return {**_options(group), "params": mine}

    def _verify(self, groups: list[Group], first: int = 0) -> None:
        named = []
        for number, group in enumerate(groups, first):
            names = group.get("param_names") or range(len(group["params"]))
            named += [
                (f"{name} of group {number}", p)
                for name, p in zip(names, group["params"], strict=True)
            ]
        verify_parameters(
            named,
            self._channel,
            what="parameters to optimize",
            advice="Give the optimizer the same parameters, in the same order, on every rank",
            operation="ShardedOptimizer",
        )

    def _exchange(self, parameters: list[Tensor]) -> None:
        owners = [self._owners[p] for p in parameters]
        self._exchanges += make_exchanges(parameters, owners, self._channel, share=self._share)

    def _exchange_again(self) -> None:
        """Start over with parameters that have been given other memory, or another type."""
        for exchange in [each for each in self._exchanges if each.is_stale()]:
            self._exchanges.remove(exchange)
            self._exchange(exchange.parameters)

    # -- a step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's share, and wait until all ranks have the parameters of all shares."""
        Join.notify_join_context(self)
        self._check_members()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._collected = None
        self._exchange_again()
        self._copy_options(self, self._own)
        for exchange in self._exchanges:
            exchange.meet()
        self._step_own()
        for exchange in self._exchanges:
            exchange.publish()
        self._copy_options(self._own, self)
        return loss

    def _step_own(self) -> None:
        try:
            self._own.step()
        except Exception as error:
            # The others wait for this share, and can learn of it in no other way.
            told = f"the step of its share raised {type(error).__name__}: {error}"
            self._channel.give_up(told)
            raise

    def _check_members(self) -> None:
        group = self._channel.group
        if isinstance(group, ProcessGroup) and len(group.members) < self._channel.size:
            gone = sorted(set(range(self._channel.size)) - set(group.members))
            raise InvalidState(
                f"rank {gone[0]} is not in the group any more, and the state of its share with it: "
                "make another optimizer on a group of those who are left, and load a checkpoint"
            )

    @staticmethod
    def _copy_options(source: Optimizer, target: Optimizer) -> None:
        # Schedulers and users set the options of the whole; a class may change its own.
        for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
            ours.update(_options(theirs))

    # -- state -----------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all shares on one rank, for its `state_dict`; all ranks call it."""
        if not 0 <= to < self._channel.size:
            raise InvalidArgument(f"there is no rank {to} among {self._channel.size} ranks")
        self._collected = to, collect(self._own_states(), self._channel, to=to)

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer would, with the state of all shares, as copies.

        All ranks call it and all get it. After `consolidate_state_dict` and until the next step it
        is the one rank that has the state, and nobody else, who calls this.
        """
        if self._collected is None:
            whole = collect(self._own_states(), self._channel, to=None)
        else:
            rank, whole = self._collected
            if whole is None:
                raise InvalidState(
                    f"the state was collected on rank {rank}, which alone can call state_dict "
                    "until the next step"
                )
        assert whole is not None
        parameters = self._parameters()
        mine = self.state
        self.state = {parameters[place]: state for place, state in whole.items()}  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a whole state, be it ours, at any number of ranks, or plain."""
        if not {"state", "param_groups"} <= set(state_dict):
            raise InvalidArgument("a state_dict of an optimizer has 'state' and 'param_groups'")
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        owned = {
            place
            for place, p in zip(places, self._parameters(), strict=False)
            if self._owners[p] == self._channel.rank
        }
        states = {
            place: {name: _copied(value) for name, value in state.items()}
            for place, state in state_dict["state"].items()
            if place in owned
        }
        super().load_state_dict({**state_dict, "state": states})
        groups = [self._own_part(group) for group in self.param_groups]
        self._own.__setstate__({"state": self.state, "param_groups": groups})
        self._copy_options(self._own, self)
        self.state = self._own.state
        self._collected = None

    def _own_states(self) -> States:
        return {
            place: self._own.state[p]
            for place, p in enumerate(self._parameters())
            if p in self._own.state
        }

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidState("a ShardedOptimizer cannot be copied or pickled: save its state_dict()")

    # -- uneven inputs ---------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook by which a rank that is out of data goes on stepping its share.

        It steps with the gradients that are there: those that the hook of DDP has put there.
        """
        del kwargs
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """Tell where the parameters are, or the first of them."""
        return self._channel.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Tell the group among whose ranks parameters are divided."""
        return self._channel.group


class _Hook(JoinHook):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Step, without a word to the `Join` that there is data here, which torch's would take."""
        optimizer = self._optimizer
        config = optimizer._join_config
        optimizer._join_config = config._replace(is_first_joinable=False)
        try:
            optimizer.step()
        finally:
            optimizer._join_config = config


def _copied(value: Any) -> Any:
    # Otherwise a step would change some of what was loaded, and leave the rest.
    return value.detach().clone() if isinstance(value, Tensor) else value


def _options(group: Group) -> Group:
    return {name: value for name, value in group.items() if name not in NAMES}


def _listed(params: Any) -> Any:
    """Make a list of what can be gone through but once; torch refuses the rest."""
    if isinstance(params, (Tensor, set, dict)) or not isinstance(params, Iterable):
        return params
    return list(params)


def _check_distinct(params: Any) -> None:
    seen: dict[int, int] = {}
    for place, each in enumerate(params if isinstance(params, list) else []):
        parameter = each[1] if isinstance(each, tuple) else each
        if id(parameter) in seen:
            raise InvalidArgument(
                f"parameters {seen[id(parameter)]} and {place} of a group are the same one"
            )
        seen[id(parameter)] = place


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        told = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        raise InvalidType(f"optimizer_class is a class of torch optimizers, and {told} is none")
    if issubclass(optimizer_class, (LBFGS, Joinable)):
        raise InvalidArgument(
            f"{optimizer_class.__name__} does not step each parameter by itself, so ranks cannot "
            "divide them"
        )


def _choose_group(process_group: Any) -> dist.ProcessGroup:
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument("this rank is not in the group: make the optimizer on its ranks only")
    return choose_group(process_group, None)
