"""ShardedOptimizer: each rank steps a shard of the parameters and keeps the state for it only.

Three parts: which rank owns a parameter (`assign_owners`, the same result on every rank), how a
stepped parameter reaches the other ranks (`SharedParameters` has one copy for all ranks;
`BroadcastParameters` sends), and how the state of all shards is collected (`gather_states`; layout
as JSON, tensors as bytes, never pickle).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .._formatting import format_ranks
from ..errors import InvalidArgument, InvalidState, InvalidType, RankMismatch
from ..groups._call_site import warn_user
from ..join import Join, Joinable, JoinHook
from ..join._optimizer_state import OptimizerStates, gather_states
from ._communicator import Communicator, FlatMessage, chunk_tensors
from ._config import check_materialized, resolve_group
from ._parameter_consistency import NamedTensors, verify_parameters

OwnedTensors = list[tuple[Tensor, int]]  # parameters, each with the rank that owns it


def assign_owners(parameters: Sequence[Tensor], loads: list[int]) -> list[int]:
    """Return the owner of each parameter; parameters that overlap in memory share one."""
    # Nothing else may depend on addresses, which differ between ranks.
    units: list[list[int]] = [[index] for index, p in enumerate(parameters) if not p.numel()]
    end = 0
    for start, index in sorted((p.data_ptr(), i) for i, p in enumerate(parameters) if p.numel()):
        if start >= end:
            units.append([])
        units[-1].append(index)
        p = parameters[index]
        steps = zip(p.shape, p.stride(), strict=True)
        extent = 1 + sum((length - 1) * stride for length, stride in steps)
        end = max(end, start + extent * p.itemsize)
    units = sorted(map(sorted, units))
    sizes = [sum(parameters[index].nbytes for index in unit) for unit in units]
    owners = [0] * len(parameters)
    for unit, owner in zip(units, balance_by_size(sizes, loads), strict=True):
        for index in unit:
            owners[index] = owner
    return owners


def balance_by_size(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return the owner of each; updates `loads`, the bytes that each rank owns.

    The largest goes first, to the rank with the least: at most a third above the optimum (Graham
    1969). Ties go to the earlier parameter and the lower rank.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


ALIGNMENT_BYTES = 64  # of parameters, for vector instructions


class SharedParameters:
    """Keeps one copy of each parameter for all ranks, in its owner's shared memory.

    When it is collected, each rank gets its own copy back.
    """

    def __init__(self, pairs: OwnedTensors, comm: Communicator) -> None:
        self._comm = comm
        self.parameters = [p for p, _ in pairs]
        self._others = [p for p, owner in pairs if owner != comm.rank]
        # Each parameter has its own storage, so that saving one saves no other.
        views: dict[Tensor, Tensor] = {}
        for owner in sorted({owner for _, owner in pairs}):
            owned = [p for p, each in pairs if each == owner]
            sizes = [-(-p.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for p in owned]
            memory = comm.allocate_shared(sum(sizes), owner).numpy()
            for p, start in zip(owned, accumulate(sizes, initial=0), strict=False):
                flat = torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=start)
                views[p] = flat.as_strided(p.shape, p.stride())
        if comm.rank == 0:
            for parameter, view in views.items():
                view.copy_(parameter.detach())
        comm.barrier()
        for parameter, view in views.items():
            parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]
        shared = [(weakref.ref(parameter), view) for parameter, view in views.items()]
        weakref.finalize(self, _restore_private_copies, shared).atexit = False

    def is_stale(self) -> bool:
        return [p.data_ptr() for p in self.parameters] != self._addresses

    def wait_writable(self) -> None:
        # Another rank may still be in backward, or reading the last weights.
        self._comm.barrier()

    def publish(self) -> None:
        self._comm.barrier()
        # Autograd did not see the change and must not run backward through old graphs.
        torch.autograd.graph.increment_version(self._others)


def _restore_private_copies(shared: list[tuple[weakref.ref[Tensor], Tensor]]) -> None:
    # The memory is alive until here, so an equal address means the same memory.
    for reference, memory in shared:
        parameter = reference()
        if parameter is not None and parameter.data_ptr() == memory.data_ptr():
            parameter.data = memory.clone()


class BroadcastParameters:
    """Broadcasts parameters from their owners; every rank has its own copy."""

    def __init__(self, pairs: OwnedTensors, comm: Communicator) -> None:
        self._comm = comm
        self.parameters = [p for p, _ in pairs]
        self._kinds = [(p.dtype, p.device) for p in self.parameters]
        self._messages = [
            (owner, FlatMessage(chunk, comm))
            for owner in sorted({owner for _, owner in pairs})
            for chunk in chunk_tensors([p for p, each in pairs if each == owner])
        ]
        self.publish(root=0)

    def is_stale(self) -> bool:
        return [(p.dtype, p.device) for p in self.parameters] != self._kinds

    def wait_writable(self) -> None:
        """Do nothing: no other rank reads this rank's copy."""

    @torch.no_grad()
    def publish(self, root: int | None = None) -> None:
        """Give all ranks the values of the owners, or those of `root`."""
        works = []
        for owner, message in self._messages:
            sender = owner if root is None else root
            if sender == self._comm.rank:
                message.pack()
            # As bytes, since not every backend has every dtype.
            work = self._comm.broadcast(message.flat.view(torch.uint8), sender)
            works.append((work, sender, message))
        for work, sender, message in works:
            work.wait()
            if sender != self._comm.rank:
                message.unpack()


Exchange = SharedParameters | BroadcastParameters


def make_exchanges(pairs: OwnedTensors, comm: Communicator, *, share: bool) -> list[Exchange]:
    """Choose an exchange for each parameter, and give all ranks the values of rank 0."""
    pairs = [(p, owner) for p, owner in pairs if p.numel()]
    if comm.size == 1 or not pairs:
        return []
    # A parameter that shares its memory stays there: moving it would separate it.
    share = share and comm.shares_memory
    storages = Counter(p.untyped_storage().data_ptr() for p, _ in pairs) if share else Counter()
    can_move = [
        share
        and p.device.type == "cpu"
        and p.layout is torch.strided
        and p.untyped_storage().nbytes() == p.nbytes
        and storages[p.untyped_storage().data_ptr()] == 1
        for p, _ in pairs
    ]
    codes = [2 * owner + movable for (_, owner), movable in zip(pairs, can_move, strict=True)]
    row = torch.tensor(codes, dtype=torch.int64, device=comm.device)
    rows = torch.stack([part.cpu() for part in comm.gather(row)])
    differing = ((rows // 2) != (rows[:1] // 2)).any(dim=1).nonzero().flatten().tolist()
    if differing:
        raise RankMismatch(
            f"ranks divide the parameters differently: rank {differing[0]} and rank 0 disagree on "
            "the owners. Parameters that overlap in memory must overlap on every rank",
            group=comm.label,
            operation="ShardedOptimizer",
            ranks=differing,
        )
    can_move = (rows % 2).all(dim=0).tolist()
    moved = [pair for pair, movable in zip(pairs, can_move, strict=True) if movable]
    sent = [pair for pair, movable in zip(pairs, can_move, strict=True) if not movable]
    exchanges: list[Exchange] = []
    if moved:
        try:
            exchanges.append(SharedParameters(moved, comm))
        except InvalidState as error:  # on all ranks
            sent = pairs
            text = f"every rank keeps its own copy of the parameters, which is slower: {error}"
            warn_user(text, RuntimeWarning)
    if sent:
        exchanges.append(BroadcastParameters(sent, comm))
    return exchanges


ParamGroup = dict[str, Any]


class ShardedOptimizer(Optimizer, Joinable):
    """Step each parameter on one rank only, which alone keeps the state for it.

    `optimizer_class` is any of torch's optimizers that steps each parameter independently;
    `defaults` are its arguments. Gradients must be the same on all ranks, as `phalanx.DDP` makes
    them. Whole parameters are divided among the ranks, by bytes. At the start all ranks get the
    values of rank 0.

    On groups that share memory there is one copy of each parameter for all ranks: ``.data`` moves
    into the shared memory of the rank that steps it, where all ranks read it, so nothing is sent
    after a step; there is a barrier before the step and one after it. Anything else that writes to
    a parameter writes for all ranks: edit weights in place on one rank, not on each, or pass
    ``share_parameters=False``. When the optimizer is collected, each rank has its own copy again.
    On other groups, for parameters on other devices, and for those that share their memory with
    another tensor, owners send what they have stepped.

    Every rank calls `step`, `add_param_group`, `consolidate_state_dict` and `state_dict`.
    """

    _own: Optimizer  # steps the shard of this rank

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        share_parameters: bool = True,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise InvalidType(f"optimizer_class must be a torch Optimizer, got {optimizer_class!r}")
        if issubclass(optimizer_class, (LBFGS, Joinable)):
            kind = optimizer_class.__name__
            raise InvalidArgument(f"cannot shard {kind}: parameters must be stepped independently")
        given: Any = process_group
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidArgument("this rank is not in the process group")
        group = resolve_group(given, None, user="ShardedOptimizer")
        self._collected: tuple[int, OptimizerStates | None] | None = None
        """The rank that has collected the state since the last step, and what it has collected."""
        Joinable.__init__(self)
        groups = params if isinstance(params, Tensor) else list(params) or [{"params": []}]
        Optimizer.__init__(self, groups, dict(defaults))
        parameters = self._parameters()
        if not parameters:
            raise InvalidArgument("the optimizer was given an empty parameter list")
        self._comm = Communicator(group, parameters[0].device)
        self._share_parameters = share_parameters
        self._loads = [0] * group.size()
        self._owners: dict[Tensor, int] = {}
        self._exchanges: list[Exchange] = []
        named = self._divide()
        self._own = optimizer_class([*map(self._own_shard, self.param_groups)], **defaults)
        self.defaults = self._own.defaults
        self._copy_options(self._own, self)
        self.state = self._own.state
        self._start(named)

    # -- parameters ------------------------------------------------------------------------

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters and divide them among the ranks; every rank calls it."""
        params, number = param_group["params"], len(self.param_groups)
        if not isinstance(params, set):  # which torch refuses
            params = [params] if isinstance(params, Tensor) else list(params)
            indices: dict[int, int] = {}
            for index, each in enumerate(params):
                name, parameter = each if isinstance(each, tuple) else (index, each)
                first = indices.setdefault(id(parameter), index)
                if first != index:
                    twice = f"{first} and {index} of a group"
                    raise InvalidArgument(f"parameters {twice} are the same tensor")
                if isinstance(parameter, Tensor):
                    check_materialized([(f"{name} of group {number}", parameter)])
        super().add_param_group({**param_group, "params": params})
        if hasattr(self, "_own"):  # else called by the constructor
            named = self._divide(first=len(self.param_groups) - 1)
            self._own.add_param_group(self._own_shard(self.param_groups[-1]))
            self._collected = None
            self._start(named)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _divide(self, first: int = 0) -> NamedTensors:
        """Choose owners for the parameters of all groups from the `first`; return those, named."""
        named = [
            (f"{name} of group {number}", p)
            for number, group in enumerate(self.param_groups[first:], first)
            for name, p in zip(group.get("param_names") or count(), group["params"], strict=False)
        ]
        parameters = [p for _, p in named]
        owners = assign_owners(parameters, self._loads)
        self._owners.update(zip(parameters, owners, strict=True))
        return named

    def _own_shard(self, group: ParamGroup) -> ParamGroup:
        mine = [p for p in group["params"] if self._owners[p] == self._comm.rank]
        return {**_options(group), "params": mine}

    def _start(self, named: NamedTensors) -> None:
        """Compare new parameters over the ranks, and give all ranks the values of rank 0."""
        verify_parameters(
            named,
            self._comm,
            what="parameters to optimize",
            advice="Give the optimizer the same parameters, in the same order, on every rank",
            operation="ShardedOptimizer",
        )
        self._exchange([p for _, p in named])

    def _exchange(self, parameters: list[Tensor]) -> None:
        pairs = [(p, self._owners[p]) for p in parameters]
        self._exchanges += make_exchanges(pairs, self._comm, share=self._share_parameters)

    # -- a step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's shard, and wait until all ranks have the parameters of all shards."""
        Join.notify_join_context(self)
        self._check_members()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._collected = None
        for exchange in [each for each in self._exchanges if each.is_stale()]:
            self._exchanges.remove(exchange)
            self._exchange(exchange.parameters)
        self._copy_options(self, self._own)
        for exchange in self._exchanges:
            exchange.wait_writable()
        try:
            self._own.step()
        except Exception as error:
            # The other ranks wait for this shard.
            self._comm.abort(f"the step of its shard raised {type(error).__name__}: {error}")
            raise
        for exchange in self._exchanges:
            exchange.publish()
        self._copy_options(self._own, self)
        return loss

    def _check_members(self) -> None:
        left = sorted(set(range(self._comm.size)) - set(self._comm.members()))
        if left:
            raise InvalidState(
                f"{format_ranks(left)} left the group, and the optimizer state there is lost. Make "
                "another ShardedOptimizer on a group of the remaining ranks and load a checkpoint"
            )

    @staticmethod
    def _copy_options(source: Optimizer, target: Optimizer) -> None:
        # Schedulers and users set the options of the whole; a class may change its own.
        for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
            ours.update(_options(theirs))

    # -- state -----------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all shards on one rank, for its `state_dict`; all ranks call it."""
        if not 0 <= to < self._comm.size:
            raise InvalidArgument(f"to must be a rank from 0 to {self._comm.size - 1}, got {to}")
        self._collected = to, self._gather_states(to=to)

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer would, with the state of all shards, as copies.

        All ranks call it and all get it. After `consolidate_state_dict` and until the next step,
        only the rank that has collected the state may call it.
        """
        rank, whole = self._collected or (None, self._gather_states(to=None))
        if whole is None:
            raise InvalidState(
                f"the state was collected on rank {rank}: until the next step, only that rank can "
                "call state_dict"
            )
        parameters = self._parameters()
        mine = self.state
        self.state = {parameters[index]: state for index, state in whole.items()}  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole state: of any world size, or of a plain optimizer."""
        if not {"state", "param_groups"} <= set(state_dict):
            keys = sorted(state_dict)
            raise InvalidArgument(f"state_dict must have 'state' and 'param_groups', got {keys}")
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        pairs = zip(indices, self._parameters(), strict=False)
        owned = {index for index, p in pairs if self._owners[p] == self._comm.rank}
        # Copies: a step would change some of what was loaded and not the rest.
        states = {
            index: {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
            for index, state in state_dict["state"].items()
            if index in owned
        }
        super().load_state_dict({**state_dict, "state": states})
        groups = [*map(self._own_shard, self.param_groups)]
        self._own.__setstate__({"state": self.state, "param_groups": groups})
        self._copy_options(self._own, self)
        self.state = self._own.state
        self._collected = None

    def _gather_states(self, *, to: int | None) -> OptimizerStates | None:
        state = self._own.state
        own = {index: state[p] for index, p in enumerate(self._parameters()) if p in state}
        return gather_states(own, self._comm.group, self._comm.device, to=to)

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidState("a ShardedOptimizer cannot be copied or pickled: save its state_dict()")

    # -- uneven inputs ---------------------------------------------------------------------

    join_hook_arguments = ()

    def join_hook(self, **_: Any) -> JoinHook:
        """Return the hook with which a rank without data keeps stepping its shard.

        It steps with the current gradients, which the hook of DDP has set.
        """
        return _ShardedOptimizerJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._comm.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group whose ranks share the parameters."""
        return self._comm.group


class _ShardedOptimizerJoinHook(JoinHook):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Step without notifying the `Join`, which torch's would take for a rank with data."""
        optimizer = self._optimizer
        config = optimizer._join_config
        optimizer._join_config = config._replace(is_first_joinable=False)
        try:
            optimizer.step()
        finally:
            optimizer._join_config = config


def _options(group: ParamGroup) -> ParamGroup:
    return {k: value for k, value in group.items() if k not in ("params", "param_names")}
