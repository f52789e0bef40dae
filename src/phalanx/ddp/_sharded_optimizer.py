"""ShardedOptimizer: each rank steps a share of the parameters and keeps the state for it only.

Three parts: which rank owns a parameter (`assign_owners`, the same result on every rank), how a
stepped parameter reaches the other ranks (`SharedMemoryExchange` has one copy for all ranks;
`BroadcastExchange` sends), and how the state of all shares is collected (`gather_states`; layout
as JSON, tensors as bytes, never pickle).
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType, RankMismatch
from ..groups import ProcessGroup
from ..join import Join, Joinable, JoinHook
from ..join._optimizer_state import OptimizerStates, gather_states
from ._communicator import Communicator
from ._config import resolve_group
from ._parameter_consistency import verify_parameters


def assign_owners(parameters: Sequence[Tensor], loads: list[int]) -> list[int]:
    """Return the owner of each parameter; parameters that overlap in memory share one."""
    units = _overlapping(parameters)
    sizes = [sum(parameters[place].nbytes for place in unit) for unit in units]
    owners = [0] * len(parameters)
    for unit, owner in zip(units, balance_by_size(sizes, loads), strict=True):
        for place in unit:
            owners[place] = owner
    return owners


def balance_by_size(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return the owner of each; updates `loads`, the bytes that each rank owns.

    The largest goes first, to the rank with the least: at most a third above the optimum (Graham
    1969). Ties go to the earlier parameter and the lower rank.
    """
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def _overlapping(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Group indices of parameters whose memory overlaps, in order of the first of each group.

    Nothing else may depend on addresses, which differ between ranks.
    """
    spans = sorted((p.data_ptr(), place) for place, p in enumerate(parameters) if p.numel())
    units: list[list[int]] = [[place] for place, p in enumerate(parameters) if not p.numel()]
    end = 0
    for start, place in spans:
        if start >= end:
            units.append([])
        units[-1].append(place)
        end = max(end, start + _extent(parameters[place]))
    return sorted(map(sorted, units))


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((count - 1) * stride for count, stride in steps)) * tensor.itemsize


ALIGNMENT_BYTES = 64  # of parameters, for vector instructions


class ParameterExchange(ABC):
    """Brings stepped parameters from their owners to all ranks."""

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self.owners = list(owners)

    @abstractmethod
    def is_stale(self) -> bool:
        """Whether parameters have changed memory or dtype since this was made."""

    def wait_writable(self) -> None:  # noqa: B027 - nothing to wait for by default
        """Wait until owners may write to parameters."""

    @abstractmethod
    def publish(self) -> None:
        """Wait until all ranks have the values that owners wrote."""


def make_exchanges(
    parameters: Sequence[Tensor], owners: Sequence[int], channel: Communicator, *, share: bool
) -> list[ParameterExchange]:
    """Choose an exchange for each parameter, and give all ranks the values of rank 0."""
    pairs = [pair for pair in zip(parameters, owners, strict=True) if pair[0].numel()]
    if channel.size == 1 or not pairs:
        return []
    movable = _agree_on_movable(pairs, channel, share=share and channel.shares_memory)
    moved = [pair for pair in pairs if id(pair[0]) in movable]
    exchanges: list[ParameterExchange] = []
    if moved:
        try:
            exchanges.append(SharedMemoryExchange(*_unzip(moved), channel))
        except InvalidState as error:  # on all ranks alike
            moved = []
            warnings.warn(f"every rank keeps its own copy of the parameters, which is slower: "
                          f"{error}", RuntimeWarning, stacklevel=4)  # fmt: skip
    rest = [pair for pair in pairs if not moved or id(pair[0]) not in movable]
    if rest:
        exchanges.append(BroadcastExchange(*_unzip(rest), channel))
    return exchanges


def _agree_on_movable(
    pairs: list[tuple[Tensor, int]], channel: Communicator, *, share: bool
) -> set[int]:
    """Return the parameters that every rank can move; raise if ranks differ on the owners."""
    movable = _movable([p for p, _ in pairs]) if share else set()
    codes = [2 * owner + (id(p) in movable) for p, owner in pairs]
    card = torch.tensor(codes, dtype=torch.int64, device=channel.device)
    cards = torch.stack([part.cpu() for part in channel.gather(card)])
    odd = ((cards // 2) != (cards[:1] // 2)).any(dim=1).nonzero().flatten().tolist()
    if odd:
        raise RankMismatch(
            f"ranks divide the parameters differently: rank {odd[0]} not as rank 0 does. Those "
            "that overlap in memory stay together, so they must overlap on all ranks or on none",
            group=getattr(channel.group, "label", ""),
            operation="ShardedOptimizer",
            ranks=odd,
        )
    both = (cards % 2).all(dim=0).tolist()
    return {id(p) for (p, _), can in zip(pairs, both, strict=True) if can}


def _movable(parameters: list[Tensor]) -> set[int]:
    """Return the parameters that share no memory, since moving one would separate it."""
    storages = Counter(p.untyped_storage().data_ptr() for p in parameters)
    return {
        id(p)
        for p in parameters
        if p.device.type == "cpu"
        and p.layout is torch.strided
        and p.untyped_storage().nbytes() == p.nbytes
        and storages[p.untyped_storage().data_ptr()] == 1
    }


def _unzip(pairs: list[tuple[Tensor, int]]) -> tuple[list[Tensor], list[int]]:
    return [p for p, _ in pairs], [owner for _, owner in pairs]


class SharedMemoryExchange(ParameterExchange):
    """Keeps one copy of each parameter for all ranks, in its owner's shared memory.

    When it is collected, each rank gets its own copy back.
    """

    def __init__(
        self, parameters: Sequence[Tensor], owners: Sequence[int], channel: Communicator
    ) -> None:
        super().__init__(parameters, owners)
        assert isinstance(channel.group, ProcessGroup)
        self._group = channel.group
        views = self._allocate(channel.size)
        if channel.rank == 0:
            for view, parameter in zip(views, self.parameters, strict=True):
                view.copy_(parameter.detach())
        self._group.barrier().wait()
        for view, parameter in zip(views, self.parameters, strict=True):
            parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]
        shared = list(zip(map(weakref.ref, self.parameters), views, strict=True))
        weakref.finalize(self, _restore_private_copies, shared).atexit = False
        mine = channel.rank
        self._others = [
            p for p, owner in zip(self.parameters, owners, strict=True) if owner != mine
        ]

    def _allocate(self, size: int) -> list[Tensor]:
        """Allocate a separate storage per parameter, so that saving one saves no other."""
        views: dict[int, Tensor] = {}
        for owner in range(size):
            mine = [p for p, o in zip(self.parameters, self.owners, strict=True) if o == owner]
            ends = list(
                accumulate(
                    (-(-p.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for p in mine), initial=0
                )
            )
            if mine:
                memory = self._group._allocate_shared(ends[-1], owner=owner).numpy()
                for p, start in zip(mine, ends, strict=False):
                    flat = torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=start)
                    views[id(p)] = flat.as_strided(p.shape, p.stride())
        return [views[id(p)] for p in self.parameters]

    def is_stale(self) -> bool:
        return [p.data_ptr() for p in self.parameters] != self._addresses

    def wait_writable(self) -> None:
        # Another rank may still be in backward, or reading the last weights.
        self._group.barrier().wait()

    def publish(self) -> None:
        self._group.barrier().wait()
        # Autograd did not see the change and must not run backward through old graphs.
        torch.autograd.graph.increment_version(self._others)


def _restore_private_copies(shared: list[tuple[weakref.ref[Tensor], Tensor]]) -> None:
    """Give this rank its own copies, of parameters that are still in shared memory.

    The memory is alive until here, so an equal address means the same memory.
    """
    for reference, memory in shared:
        parameter = reference()
        if parameter is not None and parameter.data_ptr() == memory.data_ptr():
            parameter.data = memory.clone()


class BroadcastExchange(ParameterExchange):
    """Broadcasts parameters from their owners; every rank has its own copy."""

    def __init__(
        self, parameters: Sequence[Tensor], owners: Sequence[int], channel: Communicator
    ) -> None:
        super().__init__(parameters, owners)
        self._channel = channel
        self._kinds = [(p.dtype, p.device) for p in self.parameters]
        keys = list(zip(self.owners, self._kinds, strict=True))
        self._parcels = [
            _FlatBuffer([p for p, k in zip(self.parameters, keys, strict=True) if k == key], key[0],
                    channel) for key in dict.fromkeys(keys)
        ]  # fmt: skip
        self._deliver([0] * len(self._parcels))

    def is_stale(self) -> bool:
        return [(p.dtype, p.device) for p in self.parameters] != self._kinds

    def publish(self) -> None:
        self._deliver([parcel.owner for parcel in self._parcels])

    def _deliver(self, senders: list[int]) -> None:
        rank, broadcast = self._channel.rank, self._channel.broadcast
        works = []
        for parcel, sender in zip(self._parcels, senders, strict=True):
            if sender == rank:
                torch._foreach_copy_(parcel.views, parcel.values())
            works.append(broadcast(parcel.flat.view(torch.uint8), sender))  # of any type
        for work, parcel, sender in zip(works, self._parcels, senders, strict=True):
            work.wait()
            if sender != rank:
                torch._foreach_copy_(parcel.values(), parcel.views)


class _FlatBuffer:
    """The parameters of one owner and dtype as a flat tensor."""

    def __init__(self, parameters: list[Tensor], owner: int, channel: Communicator) -> None:
        self.owner = owner
        self._parameters = parameters
        first = parameters[0]
        sizes = [p.numel() for p in parameters]
        self.flat = channel.allocate(sum(sizes), first.dtype, first.device)
        self.views = [
            part.view(p.shape)
            for part, p in zip(torch.split(self.flat, sizes), parameters, strict=True)
        ]

    def values(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters]


ParamGroup = dict[str, Any]
LOCAL_KEYS = ("params", "param_names")
"""Keys of a param group that are not options."""


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
        self._collected: tuple[int, OptimizerStates | None] | None = None
        """The rank that has collected the state since the last step, and what it has collected."""
        Joinable.__init__(self)
        listed = _as_list(params)
        if isinstance(listed, list) and not listed:
            listed = [{"params": []}]  # which is refused below
        Optimizer.__init__(self, listed, dict(defaults))
        parameters = self._parameters()
        if not parameters:
            raise InvalidArgument("the optimizer was given an empty parameter list")
        self._channel = Communicator(group, parameters[0].device)
        self._share = share_parameters
        self._loads = [0] * group.size()
        self._owners: dict[Tensor, int] = {}
        self._exchanges: list[ParameterExchange] = []
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

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters, and divide them so that shares are about equal again; all ranks do so."""
        param_group = {**param_group, "params": _as_list(param_group["params"])}
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
        owners = assign_owners(parameters, self._loads)
        self._owners.update(zip(parameters, owners, strict=True))

    def _own_part(self, group: ParamGroup) -> ParamGroup:
        """Make this rank's part of a group, without a parameter if it comes to that."""
        mine = [p for p in group["params"] if self._owners[p] == self._channel.rank]
        return {**_options(group), "params": mine}

    def _verify(self, groups: list[ParamGroup], first: int = 0) -> None:
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
            exchange.wait_writable()
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
            self._channel.abort(told)
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
        self._collected = to, self._gather_states(to=to)

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer would, with the state of all shares, as copies.

        All ranks call it and all get it. After `consolidate_state_dict` and until the next step it
        is the one rank that has the state, and nobody else, who calls this.
        """
        if self._collected is None:
            whole = self._gather_states(to=None)
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
            place: {name: _copy_value(value) for name, value in state.items()}
            for place, state in state_dict["state"].items()
            if place in owned
        }
        super().load_state_dict({**state_dict, "state": states})
        groups = [self._own_part(group) for group in self.param_groups]
        self._own.__setstate__({"state": self.state, "param_groups": groups})
        self._copy_options(self._own, self)
        self.state = self._own.state
        self._collected = None

    def _gather_states(self, *, to: int | None) -> OptimizerStates | None:
        states = {
            index: self._own.state[p]
            for index, p in enumerate(self._parameters())
            if p in self._own.state
        }
        return gather_states(states, self._channel.group, self._channel.device, to=to)

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidState("a ShardedOptimizer cannot be copied or pickled: save its state_dict()")

    # -- uneven inputs ---------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook by which a rank that is out of data goes on stepping its share.

        It steps with the gradients that are there: those that the hook of DDP has put there.
        """
        del kwargs
        return _ShardedOptimizerJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Tell where the parameters are, or the first of them."""
        return self._channel.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Tell the group among whose ranks parameters are divided."""
        return self._channel.group


class _ShardedOptimizerJoinHook(JoinHook):
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


def _copy_value(value: Any) -> Any:
    # Otherwise a step would change some of what was loaded, and leave the rest.
    return value.detach().clone() if isinstance(value, Tensor) else value


def _options(group: ParamGroup) -> ParamGroup:
    return {name: value for name, value in group.items() if name not in LOCAL_KEYS}


def _as_list(params: Any) -> Any:
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
    return resolve_group(process_group, None)
