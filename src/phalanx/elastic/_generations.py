"""Generations: which workers are the ranks of an elastic run, from one change to the next.

A worker is a process that ``phalanx run --elastic`` started. The members of a generation have a
process group; their order is that of their requests to join, and the first is the leader. Two
things end a generation:

- A member is lost. Ranks that notice call `regroup`: the survivors form a group of their own, in
  the middle of a step. No agreement on the survivors is needed. A group's name contains its members
  and its section, so survivors that know of different deaths rendezvous under different names until
  they agree.
- A worker wants to join or leave. The members learn of it in a step, and all act on it after that
  step, in `change_members`: they read one *plan* in the store, form the group that it says, report,
  and read one *decision*. Of each, the first one written is in effect, so all read the same.
  Without a decision to commit, the old generation continues.

A *section* is what the members do together: the loop over the micro-batches of a step, or an
evaluation. It ends with a barrier. A rank that has passed it knows that all others can end the
section by themselves, so a section that any rank has committed is committed. Ranks of one regroup
are in the same section; one that is a section behind finds out from ``committed/<n>`` and
first catches up.

Requests to join or leave are counted in ``changes``. A worker *knows* of as many as its watcher has
read. Members *agree* on the greatest number that any of them knew of in the last loop
(`RunState.agreed_requests`). A plan has *handled* as many as its author had agreed on; a change is
due when members have agreed on more.

The store is the launcher's. In steps without a change or a loss, one thread per member polls the
request counter every 50 ms, and a worker that waits to join polls its own keys. In the table,
``<n>`` is the number of a request to join, and ``*`` marks a key whose first value stays
(compare-and-set):

=================================  ==============================================================
``request/<n>`` *                  a worker that asks to join; read by the author of a plan
``withdrawn/<n>``                  worker n, which became a member without the state, or has left;
                                   read by all
``leaving/<n>``                    worker n, which was told to leave; read by the author of a plan,
                                   and by members to tell it from a lost one
``changes``                        counter of requests to join or leave; polled by all members
``invitation/<n>``                 the id of a plan, from its members to worker n
``plan/<id>``                      a plan, from all that know it; read by those it invites
``formed/<id>/<n>``                "" or an error, from worker n; read for the decision
``decision/<id>`` *                "commit" or "abandon", from the plan's first living member;
                                   read by all in the plan
``change/<section>/<members>`` *   the plan, from the first living member; read by all members
``planning/<section>/<n>``         member n waits for that plan; one that does not may be fenced
``regrouping/<section>/<n>``       survivor n regroups; one that does not may be fenced
``committed/<n>``                  the last section that member n has committed, written when it
                                   regroups, plans a change, ends an evaluation between steps, or
                                   finishes; read by survivors
``generation``                     the current members, from all of them; read by joining workers
``bootstrap/<generation>/<try>`` * a plan for workers without members, from the first of them
``.../<try>/counted`` *            who counts an abandoned try in the counter ``.../abandoned``
``failed`` *                       a mistake, from the rank that made it; read before a recovery
``saved/<id>``                     the state is saved after all have left, from the one that did;
                                   read by those that wait for it
``over``                           all steps are completed; read by workers that wait
``run_of/<worker>`` *              the only `ElasticRun` of a worker; read by that worker
=================================  ==============================================================
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .. import _faultpoints as faultpoints
from .._formatting import first_line, format_ranks
from ..env import ElasticEnv
from ..errors import (
    CollectiveTimeout,
    GroupError,
    InvalidState,
    PeerLost,
    PhalanxError,
    RankMismatch,
    RendezvousError,
)
from ..groups import ProcessGroup
from ..groups._factory import form_group
from ..groups._peers import PeerProcess
from ..groups._process_group import GroupConfig
from ..groups._store import StoreClient, clone_connection, from_json, to_json

_log = logging.getLogger("phalanx.elastic")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ElasticTiming:
    """Time constants of an elastic run, in seconds, and limits."""

    watch_interval: float = 0.05
    """Interval for polling the counter of requests to join or leave."""
    poll_interval: float = 0.005
    """Interval for polling a key that another worker is about to write."""
    bootstrap_timeout: float = 20.0
    """How long the first workers wait for those that started with them."""
    join_timeout: float = 30.0
    """How long members wait for a worker that joins; then it is killed."""
    shortage_interval: float = 1.0
    """Between two reports that there are fewer members than the minimum."""
    leave_window: float = 0.2
    """Workers that are told to leave within this time leave together."""
    request_timeout: float = 2.0
    """For one request to the store. One that is not answered is made again."""
    futile_regroups: int = 20
    """How often in a row the members may regroup in one section without finding a dead one."""


@dataclass(frozen=True)
class Member:
    """A worker that is, or wants to be, a member."""

    number: int
    """The number of its request. A worker that starts again has another."""
    worker: str
    process: PeerProcess

    @property
    def global_rank(self) -> int:
        """The rank that the launcher gave it; a replacement has that of the one it replaces."""
        return int(self.worker.partition(".")[0])


@dataclass(frozen=True)
class Plan:
    """The members of the next generation."""

    id: str
    members: list[Member]
    sources: list[int]
    """The numbers of the members that have the state of the run."""
    waiting: list[Member]
    """Workers for which there is no micro-batch: hot spares."""
    author: int
    """The number of the worker that made it."""
    join_requests: int
    """How many requests to join it has considered: those up to this number."""
    handled_requests: int
    """How many requests to join or leave it has considered, as ``changes`` counts them."""


@dataclass(frozen=True)
class GenerationRecord:
    """What joining workers must know of the current generation."""

    number: int
    members: list[Member]


class NotNeeded(Exception):
    """The run is over, or this worker was told to leave before it joined."""


class Departure(Exception):
    """This worker has left the run, alone or with everybody else."""

    def __init__(self, plan: Plan, members: list[Member]) -> None:
        super().__init__("this worker left the run")
        self.plan = plan
        self.members = members
        """Those of the generation that it has left."""

    @property
    def all_left(self) -> bool:
        return not self.plan.members


class _Committed(PhalanxError):
    """Another member has committed the section that this rank is in."""


class Generations:
    """The generations of one elastic run, as one worker sees them."""

    def __init__(
        self,
        env: ElasticEnv,
        *,
        backend: str,
        device: torch.device,
        timeout: timedelta,
        initial_workers: int,
        max_members: int,
        on_shortage: Callable[[], object] = lambda: None,
    ) -> None:
        self._timing = ElasticTiming()
        self._on_shortage = on_shortage
        """Called about once a second while the next step waits for the minimum of members."""
        self._config = GroupConfig(backend, device, timeout, None, {})
        self._timeout = timeout.total_seconds()
        self._min_members = env.min_ranks
        self._initial_workers = initial_workers
        self._max_members = max_members
        host, _, port = env.store.rpartition(":")
        connection = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        self._connection = PrefixStore("elastic", connection)
        self._store = StoreClient(self._connection, timeout=self._timing.request_timeout)
        self._worker = env.worker
        self._process = PeerProcess.current()
        self.member = Member(0, env.worker, self._process)
        """This worker; the number is 0 until it has asked to join."""
        self.group: ProcessGroup | None = None
        self.members: list[Member] = []
        """The members of the current generation, by rank; empty before the first."""
        self.number = 0
        """How many generations the run has had.

        Ranks may count differently: one whose group formed counts a generation that another failed
        to form. That is harmless: workers that bootstrap one take the number from the store.
        """
        self._join_requests = 0
        """How many requests to join the last plan has considered."""
        self.handled_requests = 0
        """How many requests to join or leave the last plan has considered."""
        self._waiting: list[Member] = []
        self.known_requests = 0
        """How many requests to join or leave this worker knows of."""
        self.is_leaving = False
        """Whether this worker is to leave; set by a signal handler."""
        self._futile = self._futile_section = 0  # regroups without a loss, and where
        self._watch_stop = threading.Event()
        self._watcher: threading.Thread | None = None

    # -- the store ---------------------------------------------------------------------------

    def _ask(self, request: Callable[[StoreClient], T]) -> T:
        """Make a request, again if it is not answered, until the deadline of a call."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return request(self._store)
            except RendezvousError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(self._timing.watch_interval)
            except RuntimeError as error:  # torch's: the connection is gone
                raise RendezvousError(
                    f"the launcher's store is gone: {first_line(error)}"
                ) from error

    def _read(self, key: str, kind: type[T]) -> T | None:
        text = self._ask(lambda store: store.read(key))
        return None if text is None else from_json(text, kind)

    def _write_once(self, key: str, value: object, kind: type[T]) -> T:
        text = self._ask(lambda store: store.write_once(key, to_json(value)))
        return from_json(text, kind)

    def _set(self, key: str, value: object = "") -> None:
        self._ask(lambda store: store.set(key, to_json(value)))

    def _has(self, key: str) -> bool:
        return self._ask(lambda store: store.has(key))

    def _count(self, key: str, amount: int = 0) -> int:
        return self._ask(lambda store: store.add(key, amount))

    def _is_gone(self, member: Member) -> bool:
        return member.process.is_dead or self._has(f"withdrawn/{member.number}")

    def mark_failed(self, why: str) -> None:
        """Note that the run has failed by a mistake: no rank is to recover from it."""
        with suppress(PhalanxError):
            self._ask(lambda store: store.write_once("failed", to_json(why)))

    def abort(self, why: str) -> None:
        """Make the other members raise `why`."""
        if self.group is not None:
            self.group.abort(why)

    def mark_over(self) -> None:
        """Note that all steps are completed; workers that come now are not needed."""
        with suppress(PhalanxError):
            self._set("over")

    def claim_worker(self) -> None:
        """Make this the only run of its process; a second one would share its keys in the store."""
        token = uuid.uuid4().hex
        if self._write_once(f"run_of/{self._worker}", token, str) != token:
            raise InvalidState(
                "a process may create only one ElasticRun under `phalanx run --elastic`. Put all "
                "trained modules in one, such as a ModuleDict, and use several loops in a step"
            )

    # -- joining -----------------------------------------------------------------------------

    def join(self, restore: Callable[[bool], object]) -> Plan:
        """Wait until this worker is a member; return the plan that made it one.

        `restore` loads a checkpoint, if there is one, for a generation none of whose members has
        the state; it is told whether this is the first one of the attempt.
        """
        self._request_to_join()
        while True:
            plan = self._await_plan(restore)
            group = self._form_planned(plan)
            if group is not None:
                self._note_considered(plan)
                self._use(plan.members, group)
                return plan
            if self._has(f"withdrawn/{self.member.number}"):
                self._request_to_join()

    def withdraw(self) -> None:
        """Give up a membership without the state of the run, to join again."""
        self._set(f"withdrawn/{self.member.number}")
        self._leave_group("its state was not complete")

    def _request_to_join(self) -> None:
        # The first free number. So there are no gaps, in which a plan would miss a request.
        number = self._join_requests
        while True:
            number += 1
            mine = Member(number, self._worker, self._process)
            if self._write_once(f"request/{number}", mine, Member) == mine:
                break
        self.member = mine
        self._count("changes", 1)
        if faultpoints.armed:
            faultpoints.reach("elastic:join")

    def _await_plan(self, restore: Callable[[bool], object]) -> Plan:
        """Wait for a plan with this worker in it; bootstrap a generation if there is none."""
        mine, began, seen = self.member.number, time.monotonic(), ""
        while True:
            if self.is_leaving or self._has("over"):
                raise NotNeeded
            plan_id = self._read(f"invitation/{mine}", str)
            if plan_id is not None and plan_id != seen:
                seen = plan_id
                plan = self._read(f"plan/{plan_id}", Plan)
                if plan is not None and not self._has(f"decision/{plan.id}"):
                    return plan
            record = self._read("generation", GenerationRecord)
            self.number = 0 if record is None else record.number
            if record is None or all(self._is_gone(each) for each in record.members):
                plan = self._bootstrap(began, restore)
                if plan is not None:
                    return plan
            time.sleep(self._timing.poll_interval * 2)

    def _bootstrap(self, began: float, restore: Callable[[bool], object]) -> Plan | None:
        """Plan the first generation, or the first after all members were lost.

        The living worker with the lowest request number writes the plan; an abandoned plan is
        retried under the next ``<try>``.
        """
        place = f"bootstrap/{self.number}/{self._count(f'bootstrap/{self.number}/abandoned')}"
        plan = self._read(place, Plan)
        if plan is None:
            workers, join_requests = self._requests_after(0)
            is_complete = len(workers) >= max(self._initial_workers, self._min_members)
            is_late = time.monotonic() - began >= self._timing.bootstrap_timeout
            ready = is_complete or (is_late and len(workers) >= self._min_members)
            if not ready or workers[0].number != self.member.number:
                return None
            restore(self.number == 0)
            proposal = self._make_plan(
                [],
                workers,
                sources=[self.member.number],
                join_requests=join_requests,
                # The workers have not agreed on a number: the first step plans once more.
                handled_requests=self.handled_requests,
            )
            plan = self._write_once(place, proposal, Plan)
            self._set(f"plan/{plan.id}", plan)
        decision = self._read(f"decision/{plan.id}", str)
        if decision == "abandon" or all(self._is_gone(each) for each in plan.members):
            with suppress(PhalanxError):  # count it once: the first that sees it does
                if self._write_once(f"{place}/counted", self.member.number, int) == (
                    self.member.number
                ):
                    self._count(f"bootstrap/{self.number}/abandoned", 1)
            return None
        is_mine = any(each.number == self.member.number for each in plan.members)
        return plan if is_mine and decision is None else None

    def _requests_after(self, number: int) -> tuple[list[Member], int]:
        """Return the living workers with later requests to join, and the number of the last one."""
        found: list[Member] = []
        while (request := self._read(f"request/{number + len(found) + 1}", Member)) is not None:
            found.append(request)
        return [each for each in found if not self._is_gone(each)], number + len(found)

    def _make_plan(
        self,
        staying: Sequence[Member],
        new: Sequence[Member],
        *,
        sources: Sequence[int],
        join_requests: int,
        handled_requests: int,
    ) -> Plan:
        room = max(0, self._max_members - len(staying))
        return Plan(
            uuid.uuid4().hex,
            [*staying, *new[:room]],
            list(sources),
            list(new[room:]),
            self.member.number,
            join_requests,
            handled_requests,
        )

    def _form_planned(self, plan: Plan) -> ProcessGroup | None:
        """Form the group of a plan; None if the decision is to abandon it."""
        if faultpoints.armed:
            faultpoints.reach("elastic:forming")
        group: ProcessGroup | None = None
        report = ""
        try:
            timeout = min(self._timing.join_timeout, self._timeout)
            group = self._form(
                plan.members,
                f"elastic {plan.id[:12]}",
                timeout,
                lambda: self._check_alive(plan.members),
            )
        except PhalanxError as error:
            report = first_line(error) or "unknown"
        self._set(f"formed/{plan.id}/{self.member.number}", report)
        if faultpoints.armed:
            faultpoints.reach("elastic:formed")
        if self._decide(plan) == "commit":
            assert group is not None, "all members reported that they have the group"
            return group
        if group is not None:
            group.abort("another worker could not join")
        return None

    def _decide(self, plan: Plan) -> str:
        """Return the decision on a plan, which its first living member takes."""
        deadline = time.monotonic() + self._timing.join_timeout + self._timing.request_timeout
        place = f"decision/{plan.id}"
        while True:
            decision = self._read(place, str)
            if decision is not None:
                return decision
            living = [each for each in plan.members if not self._is_gone(each)]
            if living and living[0].number == self.member.number:
                reports = {
                    each.number: self._read(f"formed/{plan.id}/{each.number}", str)
                    for each in plan.members
                }
                if all(text == "" for text in reports.values()):
                    return self._write_once(place, "commit", str)
                is_dead = any(
                    reports[each.number] is None for each in plan.members if each not in living
                )
                if is_dead or any(reports.values()):
                    return self._write_once(place, "abandon", str)
                if time.monotonic() >= deadline:
                    silent = [each for each in living if reports[each.number] is None]
                    self._fence(silent, "did not join in time")
                    return self._write_once(place, "abandon", str)
            elif time.monotonic() >= deadline + self._timeout:
                self._fence(living[:1], "did not decide whether workers join")
            time.sleep(self._timing.poll_interval)

    def _note_considered(self, plan: Plan) -> None:
        """Remember up to which request a plan has gone, and who waits."""
        self._join_requests, self.handled_requests = plan.join_requests, plan.handled_requests
        self._waiting = list(plan.waiting)

    def _use(self, members: list[Member], group: ProcessGroup) -> None:
        old, self.group = self.group, group
        self.members = members
        self.number += 1
        self._set("generation", GenerationRecord(self.number, members))
        if old is not None:
            old.abort("a new generation has formed")
        if self._watcher is None:
            self._start_watcher()

    def _form(
        self, members: Sequence[Member], name: str, timeout: float, check: Callable[[], None]
    ) -> ProcessGroup:
        """Form a group of workers that all call this. `check` raises if that has become futile."""
        global_ranks = [each.global_rank for each in members]
        rank = [each.number for each in members].index(self.member.number)
        return form_group(
            self._config,
            clone_connection(self._connection),
            rank,
            name,
            global_ranks=global_ranks,
            store_ranks=global_ranks,
            given_name="elastic",
            check=check,
            forming_timeout=timedelta(seconds=max(timeout, 0.1)),
        )

    def _check_alive(self, members: Sequence[Member]) -> None:
        dead = [rank for rank, each in enumerate(members) if each.process.is_dead]
        if dead:
            raise PeerLost(f"{format_ranks(dead)} died while forming a generation", ranks=dead)

    # -- lost ranks --------------------------------------------------------------------------

    def can_recover(self, error: BaseException) -> bool:
        """Whether survivors may regroup after an error.

        They may after any failure of a group or of the store, except a mismatch between ranks,
        unless some rank recorded a mistake (``failed``). Regrouping finds out who died.
        """
        if not isinstance(error, (GroupError, RendezvousError)) or isinstance(error, RankMismatch):
            return False
        return not self._has("failed")

    def regroup(self, error: BaseException, section: int) -> bool:
        """Form a group of the survivors, in a section of the run.

        Returns False if the section was committed by another member; there is no new group then.
        Raises `error` if regroups keep finding no dead member.
        """
        self._abandon_group(error)
        self.note_committed(section - 1)
        self._set(f"regrouping/{section}/{self.member.number}")
        deadline = time.monotonic() + self._timeout
        while True:
            survivors = [each for each in self.members if not self._is_gone(each)]
            if any(self._committed(each) >= section for each in self.members):
                return False
            try:
                group = self._regroup_with(survivors, section, deadline)
            except _Committed:
                return False
            except PhalanxError as caught:  # also that others know of other deaths
                if self._has("failed"):
                    raise
                time.sleep(self._timing.poll_interval)
                if time.monotonic() >= deadline:
                    if not self._fence_silent(survivors, section):
                        raise
                    deadline = time.monotonic() + self._timeout
                drop_frames(caught)
                continue
            is_futile = survivors == self.members and section == self._futile_section
            self._futile, self._futile_section = self._futile + 1 if is_futile else 0, section
            if self._futile > self._timing.futile_regroups:
                group.abort(
                    f"the group failed {self._futile} times in a row in this step, but no rank has "
                    f"died; the last time: {first_line(error)}"
                )
                raise error
            self._use(survivors, group)
            if faultpoints.armed:
                faultpoints.reach("elastic:regrouped")
            return True

    def _abandon_group(self, error: BaseException) -> None:
        if faultpoints.armed:
            faultpoints.reach("elastic:regroup")
        if isinstance(error, CollectiveTimeout):
            self._fence([self.members[rank] for rank in error.ranks], "missed the deadline")
        if self.group is not None:
            self.group.abort("a member is lost")

    def _regroup_with(self, survivors: list[Member], section: int, deadline: float) -> ProcessGroup:
        def check() -> None:
            self._check_alive(survivors)
            if any(self._has(f"withdrawn/{each.number}") for each in survivors):
                raise PeerLost("a worker withdrew")
            if any(self._committed(each) >= section for each in survivors):
                raise _Committed

        name = f"elastic section {section} of {self._name_of(survivors)}"
        return self._form(survivors, name, deadline - time.monotonic(), check)

    def note_committed(self, section: int) -> None:
        """Tell members that are behind that a section is committed."""
        self._set(f"committed/{self.member.number}", section)

    def _committed(self, member: Member) -> int:
        found = self._read(f"committed/{member.number}", int)
        return -1 if found is None else found

    def _fence_silent(self, members: Sequence[Member], section: int) -> bool:
        """Kill those that do not regroup; return whether there were any."""
        silent = [
            each
            for each in members
            if each.number != self.member.number
            and self._is_silent(each, f"regrouping/{section}/{each.number}")
        ]
        self._fence(silent, f"did not respond within {self._timeout:g} s after a loss")
        return bool(silent)

    def _is_silent(self, member: Member, key: str) -> bool:
        """Whether a worker is stopped or has not written `key`."""
        return member.process.is_stopped or not self._has(key)

    def _fence(self, members: Sequence[Member], why: str) -> None:
        """Kill processes, so that what they were is final, and wait for their death."""
        for each in members:
            if each.number == self.member.number:
                continue
            _log.warning("rank %d (worker %s) %s; killing it", each.global_rank, each.worker, why)
            each.process.kill()
        deadline = time.monotonic() + self._timeout
        while any(not each.process.is_dead for each in members if each != self.member):
            if time.monotonic() >= deadline:  # blocked in the kernel
                break
            time.sleep(self._timing.poll_interval)

    # -- members that join and leave ---------------------------------------------------------

    def change_members(self, requests: int, section: int) -> Plan | None:
        """Act on the first `requests` requests to join or leave, after a committed section.

        All members know of these requests, and have committed the section.

        Returns the plan, on all members the same; `group` has changed if it has other members and
        was not abandoned. Raises `Departure` on a worker that leaves.
        """
        self.note_committed(section)
        plan = self._plan_change(requests, section)
        self._note_considered(plan)
        if all(each.number != self.member.number for each in plan.members):
            self._leave(plan)
        if plan.members == self.members:
            return plan
        group = self._form_planned(plan)
        if group is None:
            self._waiting += [each for each in plan.members if each not in self.members]
            return None
        self._use(plan.members, group)
        return plan

    def _plan_change(self, requests: int, section: int) -> Plan:
        """Read the plan for the end of a section; the first living member writes it."""
        place = f"change/{section}/{self._name_of(self.members)}"
        proposal: Plan | None = None
        self._set(f"planning/{section}/{self.member.number}")
        deadline, reported = time.monotonic() + self._timeout, -math.inf
        while True:
            plan = self._read(place, Plan)
            if plan is not None:
                self._announce_plan(plan)
                return plan
            living = [each for each in self.members if not self._is_gone(each)]
            if living[0].number == self.member.number:
                if proposal is None:
                    proposal = self._propose(living, requests)
                if proposal is not None:
                    plan = self._write_once(place, proposal, Plan)
                    if faultpoints.armed:
                        faultpoints.reach("elastic:planned")
                    self._announce_plan(plan)
                    return plan
                # The launcher starts a replacement, or ends the run: it sets the deadline.
                if time.monotonic() >= reported + self._timing.shortage_interval:
                    reported = time.monotonic()
                    self._on_shortage()
            elif time.monotonic() >= deadline:
                if self._is_silent(living[0], f"planning/{section}/{living[0].number}"):
                    self._fence(living[:1], f"did not end its step within {self._timeout:g} s")
                deadline = time.monotonic() + self._timeout
            time.sleep(self._timing.poll_interval)

    def _announce_plan(self, plan: Plan) -> None:
        """Let workers that join find a plan.

        All members of it do, since the one that wrote it may be lost. One that leaves does not: it
        could be so late that it replaces the next invitation.
        """
        self._set(f"plan/{plan.id}", plan)
        if self.member in plan.members:
            for each in plan.members:
                if each not in self.members:
                    self._set(f"invitation/{each.number}", plan.id)

    def _propose(self, living: list[Member], handled_requests: int) -> Plan | None:
        """Return a plan, or None while there are fewer workers than the minimum."""
        leaving = self.find_leaving(living)
        if leaving and len(leaving) < len(living):
            # The launcher signals one rank after the other.
            time.sleep(self._timing.leave_window)
            leaving = self.find_leaving(living)
        staying = [each for each in living if each not in leaving]
        new = [each for each in self._waiting if not self._is_gone(each)]
        asking, join_requests = self._requests_after(self._join_requests)
        new += [
            each
            for each in asking
            if each.number not in {other.number for other in (*self.members, *new)}
        ]
        if not staying:
            new = []  # no member would have the state
        plan = self._make_plan(
            staying,
            new,
            sources=[each.number for each in staying],
            join_requests=join_requests,
            handled_requests=handled_requests,
        )
        if staying and len(plan.members) < self._min_members:
            return None
        return plan

    def find_leaving(self, members: Sequence[Member]) -> list[Member]:
        """Return those of some members that were told to leave."""
        return [each for each in members if self._has(f"leaving/{each.number}")]

    def _leave(self, plan: Plan) -> NoReturn:
        if faultpoints.armed:
            faultpoints.reach("elastic:leave")
        if plan.members:
            # The others may abandon the plan: they must not wait for this worker then.
            self._set(f"withdrawn/{self.member.number}")
        departure = Departure(plan, self.members)
        self._leave_group("it left")
        raise departure

    def await_turn_to_save(self, departure: Departure) -> bool:
        """After all have left: wait until another one has saved (False) or this one is to (True).

        The first living one saves. The others wait until it has, since it may die.
        """
        deadline = time.monotonic() + self._timeout
        while not self._has(f"saved/{departure.plan.id}") and not self._has("failed"):
            first = next(each for each in departure.members if not each.process.is_dead)
            if first.number == self.member.number:
                return True
            if time.monotonic() >= deadline and first.process.is_stopped:
                self._fence([first], "is stopped and was to save")
            time.sleep(self._timing.poll_interval)
        return False

    def note_saved(self, departure: Departure) -> None:
        """Tell the others that have left that they need not save."""
        self._set(f"saved/{departure.plan.id}")

    def _leave_group(self, why: str) -> None:
        group, self.group, self.members = self.group, None, []
        if group is not None:
            group.abort(why)

    def _name_of(self, members: Sequence[Member]) -> str:
        return ",".join(str(each.number) for each in members)

    # -- watching for requests ---------------------------------------------------------------

    def _start_watcher(self) -> None:
        connection = StoreClient(clone_connection(self._connection))
        self._watcher = threading.Thread(
            target=self._watch, args=(connection,), name="phalanx-elastic", daemon=True
        )
        self._watcher.start()

    def _watch(self, store: StoreClient) -> None:
        announced = False
        while not self._watch_stop.wait(self._timing.watch_interval):
            with suppress(Exception):  # the store does not answer: later
                if self.is_leaving and not announced:
                    store.set(f"leaving/{self.member.number}", "1")
                    store.add("changes", 1)
                    announced = True
                self.known_requests = store.add("changes", 0)

    def close(self) -> None:
        """Stop watching for requests."""
        self._watch_stop.set()


def drop_frames(error: BaseException | None) -> None:
    """Drop the traceback of a group's error that is handled, and those of its causes.

    The call that raised it refers to it. So its frames would keep the loop, and with it the memory
    of the old group, until a garbage collection. What the script itself was handling when the group
    failed keeps its traceback.
    """
    seen = set()
    while isinstance(error, (PhalanxError, RuntimeError)) and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
