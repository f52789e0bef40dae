"""The process group: a `torch.distributed.ProcessGroup` that numbers, checks, records and starts
calls.

Every collective ends up in `ProcessGroup._issue`, which takes the issue lock, gives the call
its sequence number, hands it to the engine and returns a `Work`. Joining, leaving and failing
are delegated: `_membership` changes who takes part, `_failure_detector` explains calls that do
not end.

The order in which calls are numbered must be the order in which the engine receives them, so
both happen under the issue lock. The engine's locks come after it. An exception raised by a
signal handler may arrive between any two bytecodes; the comments in `_issue` mark where none
can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from .. import _faultpoints as faultpoints
from ..errors import GroupError, InvalidState
from . import _membership as membership
from . import _torch_integration as torch_tables
from . import _validation
from ._call_consistency import CallConsistencyCheck, consistency_check_for
from ._collectives import SUM, Collectives
from ._engine import ClosedEngine, Engine, RawWork, Traits, plain_sum_method, track_started_works
from ._failure_detector import FailureDetector, register_engine, retire_engines
from ._fast_path import fast_path_for
from ._flight_recorder import FlightRecorder, Record, user_site
from ._formatting import format_rank_ranges
from ._membership import rejoin, update_membership
from ._status_store import Failure
from ._store import ClosedGroup
from ._watchdog import watch
from ._work import Work, reconcile_interrupted_start, refuse

if TYPE_CHECKING:
    from ._membership import SubsetEngines
    from ._peers import Roster
    from ._rendezvous import Purpose
    from ._status_store import StatusStore
    from ._store import HostedStore


class Members(Collectives):
    """Who takes part in a group's calls, and how that changes."""

    @property
    def members(self) -> tuple[int, ...]:
        """Tell the ranks that take part in the next call, as far as is known here."""
        return membership.members(self._whole)

    @property
    def can_leave(self) -> bool:
        """Tell whether a rank may `leave` by itself; everywhere else there is `update_membership`."""
        return self._whole._can_leave

    def leave(self) -> None:
        """End this rank's membership: the others' next calls go on without it, at once.

        Waits for the collectives that this rank has begun. Ranks keep their numbers, a mean is
        taken over those who are left, and what a rank would have filled in an output stays as it
        is. Nothing but `rejoin` and `shutdown` can be called here any more.
        """
        membership.leave(self._whole)

    def update_membership(self, stays: bool = True) -> tuple[int, ...]:
        """Tell which ranks stay; every member calls it at the same point and says if it does.

        Who does not has left when it returns, as by `leave`, and the others' next calls go on among
        those who stay. It works on every backend: where no rank may leave by itself the others make
        an engine of their own, once for a departure; if everybody stays it is one small collective.
        """
        return update_membership(self._whole, stays)

    def rejoin(self, timeout: timedelta | None = None) -> None:
        """Make everybody a member again; all ranks call it, whether they have left or not.

        Who has not left does so, and the others' calls go on without it until they come, too. When
        the last has come all are members, and number their calls alike. Until then a rank sleeps.
        The deadline counts from the last call that an awaited rank has made on the group. When it
        has passed, or a rank was lost and is forgotten, it can be called again. Where a rank cannot
        leave by itself (`can_leave`), all who are still members come without a call in between.
        """
        rejoin(self._whole, timeout)

    def exclude(self, ranks: Sequence[int]) -> None:
        """Go on without ranks that were lost, as if they had left; every survivor calls it.

        What they took no part in goes on among the rest, so that a ``work`` which raised `PeerLost`
        can be waited for again. It raises again, on every survivor, if they died in the middle.
        """
        membership.exclude(self._whole, ranks)

    @property
    def _whole(self) -> ProcessGroup:
        return cast("ProcessGroup", self)


@dataclass(frozen=True)
class GroupConfig:
    """How a group was made, so that another like it can be made of some of its ranks."""

    backend: str
    device: torch.device
    timeout: timedelta
    checks: bool | None
    options: dict[str, object]


class ProcessGroup(Members):
    """A group of ranks that communicate; any torch API takes it for a process group.

    Made by `new_group`, `split_group` and `merge_remote_group`, not by its constructor.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        size: int,
        recipe: GroupConfig,
        backend: str,
        engine: Engine,
        traits: Traits,
        devices: frozenset[str],
        store: Store | None,
        lent_store: Store | None = None,
        hosted: HostedStore | None = None,
        board: StatusStore | None,
        roster: Roster,
        global_ranks: Sequence[int],
        torch_name: str = "",
        given_name: str = "",
        name_number: int = 0,
        desc: str = "",
    ) -> None:
        # Without a store: with one, pybind11 would not make the object that calls back into Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        self._given_name = given_name
        self._name_number = name_number  # what tells it from others of that name, on all ranks
        self._desc = desc
        self._rank = rank
        self._size = size
        self._recipe = recipe
        self._backend = backend
        self._timeout = _validation.seconds(recipe.timeout)
        self._engine = engine
        self._can_leave = hasattr(engine, "leave")
        self._subset_engines: SubsetEngines | None = None  # other engines, for when ranks have left
        self._traits = traits
        self._devices = devices
        self._takes_cpu = "cpu" in devices
        self._store = store
        self._lent_store = lent_store  # kept, for it may be the one that hosts the group's
        self._hosted = hosted  # the one that does, if this process opened it
        self._lease = None if hosted is None else hosted.lease()
        self._roster = roster
        self._global_ranks = tuple(global_ranks)
        self._recorder = FlightRecorder()
        self._splits: dict[str, int] = {}
        self._closed = ""  # why nothing can be called any more, where it was closed on purpose
        self._has_left = False  # closed, but only for having left
        self._announced: set[int] = set()  # who is leaving since the last roll call
        self._is_rejoining = False  # a thread of this rank is in `rejoin`
        # Keeps the order in which calls are numbered the order in which the engine gets them.
        # Taken by `_issue` alone, for as long as checking takes; the engine's locks come after it.
        self._order = threading.Lock()
        # The handles of what the engine has started of a call, until the call's own work has them.
        # In order, as that lock keeps it.
        self._started_works: list[RawWork | None] = []
        self._state = threading.Lock()  # over `_closed` and `_splits`, for moments
        self._detector = FailureDetector(
            name=name,
            rank=rank,
            size=size,
            roster=roster,
            board=board,
            recorder=self._recorder,
            streams=traits.waits_on_stream,
            lost_ranks=getattr(engine, "lost_ranks", None),
            wake=getattr(engine, "wake", None),
            drive=getattr(engine, "drive", None),
            members=getattr(engine, "members", None),
        )
        self._board = board
        self._use(engine, None)
        self._fast_path = fast_path_for(self)
        self._fast_dtypes = traits.real_dtypes if self._takes_cpu else frozenset()
        # What torch has named it enters in its tables itself, and takes out again.
        self._is_registered_with_torch = not torch_name
        self._torch_name = torch_name or torch_tables.register_group(self, engine)
        register_engine(self._detector, engine)
        if board is not None:
            watch(self._detector)

    # -- what it is ------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        """Tell the name under which torch finds the group in this process.

        It is the one that was given, with a number if a group of any of its ranks has that already.
        It is the same on every rank, unless ranks are threads of one process.
        """
        return self._torch_name

    @property
    def label(self) -> str:
        """Tell the group's full name, which is the same on every rank."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Tell the description that was given, or else the backend and size."""
        return self._desc or f"{self._backend} group of {self._size}"

    def _set_group_desc(self, desc: str) -> None:
        """Take the description that torch gives a group that it has made."""
        self._desc = desc

    @property
    def backend(self) -> str:
        """Tell the name of the backend."""
        return self._backend

    @property
    def devices(self) -> frozenset[str]:
        """Tell the types of devices whose tensors it takes."""
        return self._devices

    @property
    def shares_memory(self) -> bool:
        """Tell whether tensors of `allocate` lie where every rank of the group reaches them."""
        return hasattr(self._engine, "allocate") and not self._closed

    @property
    def compares_calls(self) -> bool:
        """Tell whether ranks that make different calls find out at once, at no cost."""
        return self._traits.compares_calls

    @property
    def timeout(self) -> timedelta:
        """Tell how long a call may take where it does not say itself."""
        return timedelta(seconds=self._timeout)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Tell the launcher's number of every rank, in the order of this group's ranks."""
        return self._global_ranks

    def _count_split(self, what: str) -> int:
        """Count how often a group was split off, under what is the same on all of its ranks."""
        with self._state:
            turn = self._splits[what] = self._splits.get(what, 0) + 1
        return turn

    def _name_split(self, ranks: Sequence[int]) -> str:
        """Name the next group that is split off with these ranks."""
        turn = self._count_split(format_rank_ranges(ranks))
        return f"{format_rank_ranges(ranks)}#{turn}" if turn > 1 else format_rank_ranges(ranks)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a tensor that this group's engine reaches without a copy, where it can.

        On ``shm`` it lives in shared memory, until its last view dies; elsewhere it is an ordinary
        tensor on the group's device. Its contents are not set.
        """
        if self.shares_memory:
            return cast("Tensor", self._engine.allocate(shape, dtype))
        return torch.empty(tuple(shape), dtype=dtype, device=self._recipe.device)

    def failure(self) -> GroupError | None:
        """Return the error that a call would raise now because the group has failed, if it has."""
        cause = self._detector.failure
        return None if cause is None else self._detector.error(cause, None, None)

    def records(self) -> list[Record]:
        """List the last calls of this rank, oldest first."""
        return self._recorder.records()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take where it does not say itself."""
        if self._closed:
            refuse(self, "set_timeout")
        self._timeout = _validation.seconds(timeout)
        if self._fast_path is not None:
            self._fast_path.timeout = self._timeout
        if hasattr(self._engine, "set_timeout"):
            self._engine.set_timeout(timeout)

    def get_group_store(self) -> Store | None:
        """Return the store that the group keeps its own keys in."""
        return self._store

    def __repr__(self) -> str:
        state = self._closed or ("failed" if self._detector.failure else "")
        return (
            f"<ProcessGroup {self._name!r}: rank {self._rank} of {self._size} on {self._backend}"
            f"{', ' + state if state else ''}>"
        )

    # torch's C++ asks for these by their C++ names.

    def getGroupName(self) -> str:  # noqa: N802
        """Tell the name under which torch finds the group."""
        return self._torch_name

    def getBackendName(self) -> str:  # noqa: N802
        """Tell the name of the backend."""
        return self._backend

    # -- making groups of groups -----------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
        *,
        backend: str | None = None,
        options: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
        purpose: Purpose | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this group's ranks, in the order given; None for the others.

        Only the members need to call it. It goes through the store, not through this group's
        engine, so the survivors of a group that failed or was aborted can use it to go on. Backend,
        its options and the device are by default this group's.
        """
        del opts, device_types
        from . import _factory  # here, for it makes groups and so imports this module

        recipe = _factory.derive_config(
            self._recipe, backend=backend, options=options, timeout=timeout, device=device
        )
        return _factory.split_group(
            self,
            ranks,
            recipe,
            name=group_name,
            given_name=group_name or "",
            desc=group_desc or "",
            purpose=purpose,
        )

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """Make one group of this group and others that meet in `store`, `size` ranks in all.

        Every rank of each group calls it. Groups are lined up by the global rank of their first
        member, then by name, so that the new ranks do not depend on who came first.
        """
        from ._factory import merge_groups  # here, for it makes groups and so imports this module

        return merge_groups(
            self, store, size, timeout=timeout, name=group_name or "", desc=group_desc or ""
        )

    # -- ending ----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End this rank's part in the group; peers that still wait for it are told."""
        if not self._close("was shut down"):
            return
        self._detector.leave(user_site())
        self._retire()
        self._end_lease()

    def abort(self, why: str = "") -> None:
        """Break the group on every rank: calls under way raise `GroupAborted`, and say why."""
        site = user_site()
        if not self._close("was aborted"):
            return
        cause = f"aborted the group at {site}{f', because {why}' if why else ''}"
        self._detector.fail(Failure("aborted", self._rank, cause))
        self._detector.check_futures()
        if hasattr(self._engine, "abort"):
            self._engine.abort()
        self._detector.leave(site)
        self._retire()

    def _close(self, how: str) -> bool:
        with self._state:
            if self._closed and not self._has_left:
                return False
            self._closed, self._has_left = how, False
        self._close_fast_path()
        self._detector.closed = True
        if self._is_registered_with_torch:
            torch_tables.unregister_group(self)
        return True

    def _reopen(self) -> None:
        """Take calls again, after this rank was away."""
        self._closed, self._has_left = "", False
        self._fast_path = fast_path_for(self)

    def _close_fast_path(self) -> None:
        """Have every call come by `_issue`, which refuses."""
        if self._fast_path is not None:
            self._fast_path.close()

    def _use(self, engine: Engine, members: Sequence[int] | None) -> None:
        """Go on with an engine, one of those that the group keeps; None for `members` is all."""
        self._engine = engine = track_started_works(engine, self._started_works)
        self._participants = self._size if members is None else len(members)
        self._start_sum = plain_sum_method(engine)
        self._agreement: CallConsistencyCheck | None = consistency_check_for(
            engine, self._recipe.checks, self._detector
        )
        if not self._can_leave:
            self._detector.set_members(members)

    def _retire(self) -> None:
        """Let go of the engines; with calls under way they outlive the group until these end."""
        self._engine, self._subset_engines = ClosedEngine(), None
        self._start_sum = plain_sum_method(self._engine)
        retire_engines(self._detector)
        if self._hosted is not None and self._board is not None:
            self._hosted.note_closed(ClosedGroup(self._board, self._roster, self._rank))

    def _end_lease(self) -> None:
        """Do without the hosted store, of which groups can be split off no longer than it lives."""
        if self._lease is not None:
            self._lease.end()

    # -- a call ----------------------------------------------------------------------------

    def _issue(
        self,
        operation: str,
        tensors: list[Tensor],
        method: Callable[..., RawWork],
        args: tuple[Any, ...],
        *,
        timeout: timedelta | None = None,
        outputs: list[Tensor] | None = None,
        terms: tuple[Any, ...] = (),
        uneven: bool = False,
        finish: Callable[[], None] | None = None,
        transfer: bool = False,
        peer: int | None = None,
        single: bool = True,
    ) -> Work:
        seconds = self._timeout
        if timeout is not None and timeout.days >= 0:  # torch's way to leave it out is -1 ms
            seconds = _validation.seconds(timeout)
        if faultpoints.armed:
            faultpoints.reach(f"{operation}:before")
        with self._order:
            if self._closed or self._detector.failure is not None or self._recorder.starting:
                self._refuse_or_reconcile(operation)
            work = None
            is_checked = False
            try:
                call = self._recorder.begin(operation, tensors, transfer=transfer)
                work = Work(
                    self._detector, call, seconds, None, tensors if outputs is None else outputs
                )
                work.peer = peer
                if finish is not None:
                    work.set_finish(finish)
                if self._agreement is not None and not transfer:
                    self._agreement.check(call, seconds, terms, uneven=uneven)
                    del self._started_works[:]  # what was compared with has ended
                is_checked = True
                work.raw = method(*args)
            except BaseException as error:
                reconcile_interrupted_start(self, work, error, is_whole=is_checked and single)
                raise
            # No function is called in the next lines, so no signal is handled in between.
            if not transfer:
                self._detector.in_flight[call] = work
            self._recorder.starting = None
            del self._started_works[:]
        if transfer:
            work.wrap(self._traits.wrap_transfer)
        else:
            self._detector.prune_in_flight()
        if faultpoints.armed:
            faultpoints.reach(f"{operation}:issued")
        return work

    def _issue_sum(self, tensor: Tensor) -> Work:
        # What `_issue` does, without what a plain sum never needs: at memory speed, it counts.
        if self._agreement is not None or faultpoints.armed:
            return self._issue("allreduce", [tensor], self._start_sum, (tensor,), terms=(SUM,))
        with self._order:
            if self._closed or self._detector.failure is not None or self._recorder.starting:
                self._refuse_or_reconcile("allreduce")
            work = None
            try:
                mine = [tensor]
                call = self._recorder.begin("allreduce", mine)
                work = Work(self._detector, call, self._timeout, None, mine)
                work.raw = self._start_sum(tensor)
            except BaseException as error:
                reconcile_interrupted_start(self, work, error, is_whole=True)
                raise
            self._detector.in_flight[call] = work
            self._recorder.starting = None
            del self._started_works[:]
        self._detector.prune_in_flight()
        return work

    def _refuse_or_reconcile(self, operation: str) -> None:
        if self._closed or self._detector.failure is not None:
            refuse(self, operation)
        reconcile_interrupted_start(self, None)

    def _await_part(self, raw: RawWork) -> None:
        call = self._recorder.last
        assert call is not None, "a call is recorded before its engine sees it"
        Work(self._detector, call, self._timeout, raw, []).await_part()
        del self._started_works[:]  # the part has ended; what comes next is the rest


NO_OFFSET = -1


def allocate_shared(group: ProcessGroup, nbytes: int, *, owner: int) -> Tensor:
    """Make a tensor of bytes in the owner's shared memory, on every rank; all call it.

    Its contents are not set. If the owner has no room, every rank raises.
    """
    if not group.shares_memory:
        raise InvalidState(f"{group.label} does not share memory")
    slab = group._engine._slab
    place = torch.tensor([NO_OFFSET], dtype=torch.int64)
    why: InvalidState | None = None
    if group.rank() == owner:
        try:
            place.fill_(slab.allocate_shared(nbytes))
        except InvalidState as error:
            why = error
    group.broadcast(place, root=owner).wait()
    if place.item() == NO_OFFSET:
        raise why or InvalidState(f"rank {owner} has no shared memory for {nbytes} bytes")
    tensor: Tensor = slab.reach(owner, int(place.item()), nbytes)
    return tensor
