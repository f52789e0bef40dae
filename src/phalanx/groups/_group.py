"""The group itself: an object that numbers, checks, records and starts every call."""

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
from ..errors import GroupError
from . import _torch as torch_tables
from . import _validate as validate
from ._agree import Agreement, agreement_for
from ._collective_base import SUM
from ._engine import ClosedEngine, Engine, RawWork, Traits, noting, summing
from ._failure import Failure
from ._health import Health
from ._hosting import ClosedGroup
from ._members import Members
from ._record import Record, Recorder, user_site
from ._refusal import cut_short, refuse
from ._retired import guard, retire
from ._shortcut import shortcut_for
from ._watch import watch
from ._words import runs
from ._work import Work

if TYPE_CHECKING:
    from ._board import Board
    from ._forming import Purpose
    from ._hosting import Hosted
    from ._narrowing import Narrowing
    from ._roster import Roster

__all__ = ["ProcessGroup", "Recipe"]


@dataclass(frozen=True)
class Recipe:
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
        recipe: Recipe,
        backend: str,
        engine: Engine,
        traits: Traits,
        devices: frozenset[str],
        store: Store | None,
        lent_store: Store | None = None,
        hosted: Hosted | None = None,
        board: Board | None,
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
        self._timeout = validate.seconds(recipe.timeout)
        self._engine = engine
        self._can_leave = hasattr(engine, "leave")
        self._narrowing: Narrowing | None = None  # other engines, for when ranks have left
        self._traits = traits
        self._devices = devices
        self._takes_cpu = "cpu" in devices
        self._store = store
        self._lent_store = lent_store  # kept, for it may be the one that hosts the group's
        self._hosted = hosted  # the one that does, if this process opened it
        self._lease = None if hosted is None else hosted.lease()
        self._roster = roster
        self._global_ranks = tuple(global_ranks)
        self._recorder = Recorder()
        self._splits: dict[str, int] = {}
        self._closed = ""  # why nothing can be called any more, where it was closed on purpose
        self._is_away = False  # closed, but only for having left
        self._announced: set[int] = set()  # who is leaving since the last roll call
        self._is_returning = False  # a thread of this rank is in `rejoin`
        # Keeps the order in which calls are numbered the order in which the engine gets them.
        # Taken by `_issue` alone, for as long as checking takes; the engine's locks come after it.
        self._order = threading.Lock()
        # The handles of what the engine has started of a call, until the call's own work has them.
        # In order, as that lock keeps it.
        self._begun: list[RawWork | None] = []
        self._state = threading.Lock()  # over `_closed` and `_splits`, for moments
        self._health = Health(
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
        self._short = shortcut_for(self)
        self._quick_types = traits.real_dtypes if self._takes_cpu else frozenset()
        # What torch has named it enters in its tables itself, and takes out again.
        self._is_enlisted = not torch_name
        self._torch_name = torch_name or torch_tables.enlist(self, engine)
        guard(self._health, engine)
        if board is not None:
            watch(self._health)

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
        turn = self._count_split(runs(ranks))
        return f"{runs(ranks)}#{turn}" if turn > 1 else runs(ranks)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a tensor that this group's engine reaches without a copy, where it can.

        On ``shm`` it lives in shared memory, until its last view dies; elsewhere it is an ordinary
        tensor on the group's device. Its contents are not set.
        """
        if self.shares_memory:
            return cast(Tensor, self._engine.allocate(shape, dtype))
        return torch.empty(tuple(shape), dtype=dtype, device=self._recipe.device)

    def failure(self) -> GroupError | None:
        """Return the error that a call would raise now because the group has failed, if it has."""
        cause = self._health.failure
        return None if cause is None else self._health.error(cause, None, None)

    def records(self) -> list[Record]:
        """List the last calls of this rank, oldest first."""
        return self._recorder.records()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take where it does not say itself."""
        if self._closed:
            refuse(self, "set_timeout")
        self._timeout = validate.seconds(timeout)
        if self._short is not None:
            self._short.timeout = self._timeout
        if hasattr(self._engine, "set_timeout"):
            self._engine.set_timeout(timeout)

    def get_group_store(self) -> Store | None:
        """Return the store that the group keeps its own keys in."""
        return self._store

    def __repr__(self) -> str:
        state = self._closed or ("failed" if self._health.failure else "")
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
        from . import _create as create  # here, for it makes groups and so imports this module

        recipe = create.adjusted(
            self._recipe, backend=backend, options=options, timeout=timeout, device=device
        )
        return create.split(
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
        from ._create import merge  # here, for it makes groups and so imports this module

        return merge(
            self, store, size, timeout=timeout, name=group_name or "", desc=group_desc or ""
        )

    # -- ending ----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End this rank's part in the group; peers that still wait for it are told."""
        if not self._close("was shut down"):
            return
        self._health.leave(user_site())
        self._retire()
        self._end_lease()

    def abort(self, why: str = "") -> None:
        """Break the group on every rank: calls under way raise `GroupAborted`, and say why."""
        site = user_site()
        if not self._close("was aborted"):
            return
        cause = f"aborted the group at {site}{f', because {why}' if why else ''}"
        self._health.fail(Failure("aborted", self._rank, cause))
        self._health.attend_futures()
        if hasattr(self._engine, "abort"):
            self._engine.abort()
        self._health.leave(site)
        self._retire()

    def _close(self, how: str) -> bool:
        with self._state:
            if self._closed and not self._is_away:
                return False
            self._closed, self._is_away = how, False
        self._close_shortcut()
        self._health.closed = True
        if self._is_enlisted:
            torch_tables.strike(self)
        return True

    def _reopen(self) -> None:
        """Take calls again, after this rank was away."""
        self._closed, self._is_away = "", False
        self._short = shortcut_for(self)

    def _close_shortcut(self) -> None:
        """Have every call come by `_issue`, which refuses."""
        if self._short is not None:
            self._short.close()

    def _use(self, engine: Engine, members: Sequence[int] | None) -> None:
        """Go on with an engine, one of those that the group keeps; None for `members` is all."""
        self._engine = engine = noting(engine, self._begun)
        self._parties = self._size if members is None else len(members)
        self._start_sum = summing(engine)
        self._agreement: Agreement | None = agreement_for(engine, self._recipe.checks, self._health)
        if not self._can_leave:
            self._health.take_part(members)

    def _retire(self) -> None:
        """Let go of the engines; with calls under way they outlive the group until these end."""
        self._engine, self._narrowing = ClosedEngine(), None
        self._start_sum = summing(self._engine)
        retire(self._health)
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
            seconds = validate.seconds(timeout)
        if faultpoints.armed:
            faultpoints.reach(f"{operation}:before")
        with self._order:
            if self._closed or self._health.failure is not None or self._recorder.starting:
                self._refuse_or_tidy(operation)
            work = None
            is_checked = False
            try:
                call = self._recorder.begin(operation, tensors, transfer=transfer)
                work = Work(
                    self._health, call, seconds, None, tensors if outputs is None else outputs
                )
                work.peer = peer
                if finish is not None:
                    work.ends_with(finish)
                if self._agreement is not None and not transfer:
                    self._agreement.check(call, seconds, terms, uneven=uneven)
                    del self._begun[:]  # what was compared with has ended
                is_checked = True
                work.raw = method(*args)
            except BaseException as error:
                cut_short(self, work, error, is_whole=is_checked and single)
                raise
            # No function is called in the next lines, so no signal is handled in between.
            if not transfer:
                self._health.in_flight[call] = work
            self._recorder.starting = None
            del self._begun[:]
        if transfer:
            work.wrap(self._traits.wrap_transfer)
        else:
            self._health.look_through()
        if faultpoints.armed:
            faultpoints.reach(f"{operation}:issued")
        return work

    def _issue_sum(self, tensor: Tensor) -> Work:
        # What `_issue` does, without what a plain sum never needs: at memory speed, it counts.
        if self._agreement is not None or faultpoints.armed:
            return self._issue("allreduce", [tensor], self._start_sum, (tensor,), terms=(SUM,))
        with self._order:
            if self._closed or self._health.failure is not None or self._recorder.starting:
                self._refuse_or_tidy("allreduce")
            work = None
            try:
                mine = [tensor]
                call = self._recorder.begin("allreduce", mine)
                work = Work(self._health, call, self._timeout, None, mine)
                work.raw = self._start_sum(tensor)
            except BaseException as error:
                cut_short(self, work, error, is_whole=True)
                raise
            self._health.in_flight[call] = work
            self._recorder.starting = None
            del self._begun[:]
        self._health.look_through()
        return work

    def _refuse_or_tidy(self, operation: str) -> None:
        if self._closed or self._health.failure is not None:
            refuse(self, operation)
        cut_short(self, None)

    def _await_part(self, raw: RawWork) -> None:
        call = self._recorder.last
        assert call is not None, "a call is recorded before its engine sees it"
        Work(self._health, call, self._timeout, raw, []).await_part()
        del self._begun[:]  # the part has ended; what comes next is the rest
