"""Restart policies: which ranks to start, what the exit of one means, and when to start over.

The supervisor of an attempt watches processes and asks the policy of the run what to do.
`RestartTogether` restarts all ranks after a failure. `ReplaceLost` is the policy of elastic runs:
it replaces single ranks while the others go on. Policies start no threads and read no clock.

In an elastic run a *worker* is one process. It has a rank, in which later workers replace it, and
becomes a member of the group when it has the state of the others. What its exit means:

- killed by a signal, or ended without running its exit handlers (``os._exit``): it is lost, and
  replaced;
- it has sent that it left, or was asked to leave and exits as asked: it is gone;
- 0 of a member that ended without its exit handlers before the last step: it is lost, too;
- 0 otherwise: it has finished, unless the others then report that they lack a member for their next
  step: the job fails, since ranks disagree on the last step;
- that of a preemption while others start or stay: it is gone;
- any but 0 of a worker that has sent that it failed: the job fails, even if it was killed then;
- any other exit code, such as that of an exception: the job fails. So does any
  non-zero exit code of a process that has no `ElasticRun` yet: whether its exit handlers ran is
  not known.

While the run is stopped, members save what there is to save, and one that is lost does not matter
if another has sent that it saved. If all have ended and none has, the job fails because of the
loss. A run that is stopped while it starts over, before it has members again, has nothing to save.

The losses of a rank are forgotten when a worker in it becomes a member. The first cause of a
failure is the earliest loss that is not forgotten.
"""

from __future__ import annotations

import itertools
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from .._formatting import format_count, format_ranks
from .._signals import describe_exit
from ._child_process import RecordedExit
from ._outcome import Outcome
from ._run_directory import RunInfo
from ._worker_channel import WorkerMessage

CRASH_LOOP = 3
"""Losses of one rank in a row, each before the worker became a member, that end the job."""
REPLACEMENT_DELAYS = (0.0, 0.1, 0.2)
"""Seconds before a replacement, by how many workers of the rank were lost in a row."""
START_RETRY_INTERVAL = 10.0
"""Seconds after the system could not start a process."""
LEAVE_WINDOW = 1.0
"""Seconds before a worker that leaves is replaced. A scheduler that preempts the whole job may
signal the ranks before the launcher."""
START_TIMEOUT_FACTOR = 10
"""A process that has not created an `ElasticRun` after this many times `quorum_timeout`, or twice
the time that the slowest rank took to its first step if that is longer, is killed, and so replaced.
Before there are members, only if the first step waits for it."""
FUTILE_RESTARTS = 10
"""Restarts of all ranks in a row, none of which got any further, that end the job."""
MAX_RANKS = 1024
"""What a run can be scaled to: a larger number is probably a typo."""


class AttemptControl(Protocol):
    """What a policy can do: the supervisor of one attempt."""

    def start_rank(self, rank: int, *, incarnation: int) -> None:
        """Start a rank; raise OSError if that fails."""

    def prepare_standby(self) -> None:
        """Start a process that becomes the next rank to be started, unless there is one.

        Called at every message of a worker, so it must be cheap. A standby that has died is
        replaced then.
        """

    def send(self, rank: int, number: int) -> None:
        """Signal a rank."""

    def find_pid(self, rank: int) -> int | None:
        """Return the process of a rank that runs."""

    def show(self, message: str) -> None:
        """Print a message of the launcher."""

    def fail(self, cause: RecordedExit, message: str) -> None:
        """Stop the attempt. The exit is the first cause."""

    def finish(self) -> None:
        """Stop the attempt. The run has succeeded."""

    def kill(self) -> None:
        """End the attempt immediately, for another one."""


class RestartPolicy(ABC):
    """What the supervisor asks; one policy for all attempts of a run.

    The defaults are those of a run whose ranks are started together and end together.
    """

    ranks: int
    """The number of ranks of an attempt."""
    restarts = 0
    """How many were used."""
    has_begun = False
    """Whether a worker of the run, in any attempt, has been a member."""

    @abstractmethod
    def begin(self, attempt: AttemptControl, now: float) -> None:
        """Start the ranks of an attempt."""

    @abstractmethod
    def wants_restart(self, outcome: Outcome) -> bool:
        """Return whether to start another attempt after one that ended without a signal."""

    @property
    def is_waiting(self) -> bool:
        """Whether a rank will be started later."""
        return False

    @property
    def is_starting_over(self) -> bool:
        """Whether the run has had members, and all ranks are restarted."""
        return False

    def on_message(  # noqa: B027
        self, rank: int, message: WorkerMessage, now: float
    ) -> None:
        """Handle what a worker tells."""

    def on_exit(
        self,
        exit_: RecordedExit,  # noqa: ARG002
        now: float,  # noqa: ARG002
        *,
        is_orderly: bool,  # noqa: ARG002
    ) -> bool:
        """Handle the exit of a rank; return True if the run goes on without recording it.

        Otherwise the supervisor adds the exit to the outcome and, if it is a failure, stops the
        others.
        """
        return False

    def on_time(self, now: float) -> None:  # noqa: B027
        """Do what is due."""

    def next_due(self) -> float | None:
        """Return when to call `on_time`."""
        return None

    def stop(self, *, is_preemption: bool) -> None:  # noqa: B027
        """Start no more ranks: the attempt ends, or the ranks save what there is to save."""

    def answer(
        self,
        request: Mapping[str, Any],  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Answer a request to the control socket, which only elastic runs have."""
        return {"error": "this run is not elastic"}


class RestartTogether(RestartPolicy):
    """Restart all ranks after a failure, a limited number of times."""

    def __init__(self, ranks: int, *, max_restarts: int) -> None:
        self.ranks = ranks
        self._max_restarts = max_restarts
        self._attempts = 0

    def begin(self, attempt: AttemptControl, now: float) -> None:  # noqa: ARG002
        self.restarts = self._attempts
        self._attempts += 1
        if self.restarts:
            number = f"attempt {self._attempts} of {self._max_restarts + 1}"
            attempt.show(f"restarting all ranks: {number}")
        for rank in range(self.ranks):
            attempt.start_rank(rank, incarnation=self.restarts)

    def wants_restart(self, outcome: Outcome) -> bool:
        return outcome.first_failure is not None and self._attempts <= self._max_restarts


class WorkerState(StrEnum):
    """What a worker of an elastic run is doing."""

    WAITING = "waiting to restart"
    STARTING = "starting"
    MEMBER = "member"
    LEAVING = "leaving"


@dataclass(eq=False, kw_only=True)
class _SupervisedWorker:
    rank: int
    incarnation: int
    state: WorkerState = WorkerState.WAITING
    due: float | None = None
    """When to start it, or to kill it if it has not left."""
    started_at: float = 0.0
    warnings: int = 0  # that it has not created its ElasticRun
    seems_to_hang: bool = False  # and was killed
    max_members: int | None = None  # told when it has asked to join; more workers are spares
    is_member: bool = False  # also while it leaves
    was_member: bool = False
    has_created: bool = False  # its ElasticRun
    has_finished: bool = False  # all steps
    is_leader: bool = False  # it stays the leader until it ends
    is_initial: bool = False  # started with the attempt
    is_replacement: bool = False
    has_failed: bool = False  # with an uncaught exception
    was_asked_to_leave: bool = False  # by this launcher
    has_successor: bool = False  # one was started because this worker leaves
    has_left: bool = False

    @property
    def is_without_run(self) -> bool:
        """Whether it is starting and has not created its `ElasticRun`."""
        return self.state is WorkerState.STARTING and not self.has_created

    @property
    def is_ready(self) -> bool:
        """Whether it has asked to join."""
        return self.max_members is not None

    @property
    def name(self) -> str:
        return f"{self.rank}.{self.incarnation}"


@dataclass(eq=False)
class _Losses:
    """The losses of a rank since a worker in it was a member."""

    first: RecordedExit
    count: int = 0
    early: list[RecordedExit] = field(default_factory=list)  # before the worker became a member


class ReplaceLost(RestartPolicy):
    """Replace lost ranks while the others go on; start over if no member is left.

    Each replacement is a restart, and so is starting over. With no restarts left the run goes on
    while at least `min_ranks` workers live.
    """

    def __init__(
        self,
        ranks: int,
        *,
        run: RunInfo,
        max_restarts: int | None,
        grace: float,
        quorum_timeout: float,
        keeps_standby: bool = False,
    ) -> None:
        self.ranks = ranks
        self._keeps_standby = keeps_standby
        self._run = run
        self._min_ranks = run.min_ranks
        self._max_restarts = max_restarts
        self._grace = grace
        self._quorum_timeout = quorum_timeout
        self._workers: dict[int, _SupervisedWorker] = {}
        self._incarnations: dict[int, int] = {}  # how many workers each rank has had
        self._losses: dict[int, _Losses] = {}  # by rank, oldest first
        self._last_exit: RecordedExit | None = None
        self._longest_start = 0.0
        self._step: int | None = None
        self._furthest_step = -1
        self._futile_restarts = 0
        self._wants_restart = False
        self._has_elastic_run = False  # in any of its workers
        self._max_members: int | None = None  # what workers have told
        self._has_shown_spares = False
        self._reset()

    def _reset(self) -> None:
        """Forget what holds for one attempt only."""
        self._workers.clear()
        self._is_formed = False  # whether there has been a member
        self._first_step: int | None = None  # of the first members
        self._had_quorum = False
        self._without_quorum_since: float | None = None
        self._is_short = False  # the members have said that they wait for others
        self._finished = 0  # workers that exited with 0 and had not been asked to leave
        self._waiting_since: float | None = None  # for workers without an ElasticRun
        self._warnings = 0
        self._has_leader_finished = False
        self._is_leader_lost = False  # and no other has taken over
        self._ended_early: RecordedExit | None = None  # with 0, before there was a member
        self._first_finished: RecordedExit | None = None  # the first exit with 0 of a member
        self._is_stopping = False
        self._is_preempted = False
        self._is_ending = False  # what still runs is killed
        self._has_saved = False  # the worker that saves for all, if there is anything to save
        self._is_departing = False  # a member has ended that had said it leaves
        self._lost_unsaved: list[RecordedExit] = []  # members, while the run was stopped
        self._has_succeeded = False
        self._wants_restart = False

    def begin(self, attempt: AttemptControl, now: float) -> None:
        is_first = not self._incarnations
        if is_first:
            attempt.show(f"elastic run {self._run.id}: {format_count(self.ranks, 'rank')}")
        self._attempt = attempt
        self._reset()
        for rank in range(self.ranks):
            worker = self._add(rank)
            worker.is_initial = True
            self._start(worker, now, retries=not is_first)

    def wants_restart(self, outcome: Outcome) -> bool:  # noqa: ARG002
        return self._wants_restart

    @property
    def is_starting_over(self) -> bool:
        return self.has_begun and (self._wants_restart or not self._is_formed)

    @property
    def is_waiting(self) -> bool:
        return any(each.state is WorkerState.WAITING for each in self._workers.values())

    def stop(self, *, is_preemption: bool) -> None:
        self._is_stopping = True
        self._is_preempted |= is_preemption
        self._is_ending |= not is_preemption
        for worker in [*self._workers.values()]:
            if worker.state is WorkerState.WAITING:
                self._cancel(worker)

    def on_message(self, rank: int, message: WorkerMessage, now: float) -> None:
        worker = self._workers[rank]
        self._has_elastic_run = worker.has_created = True
        if message.leader:
            worker.is_leader, self._is_leader_lost = True, False
        self._check_variables(message.changed_variables)
        match message.event:
            case "ready" if worker.max_members is None:
                worker.max_members = self._max_members = message.max_members
                self._waiting_since = self._waiting_since or now
                self._longest_start = max(self._longest_start, now - worker.started_at)
                self._show_spares()
                self._check_start()
            case "member" if not worker.is_member:
                self._on_member(worker, message.step, now)
            case "progress" if message.leader and message.step is not None:
                self._step = message.step
                self._has_leader_finished = False  # an earlier leader ended before the last step
            case "short" if worker.is_member:
                self._on_shortage(now)
            case "leaving" if worker.state in (WorkerState.STARTING, WorkerState.MEMBER):
                self._on_leaving(worker, now)
            case "left":
                worker.has_left, worker.is_member = True, False
                worker.state, worker.due = WorkerState.LEAVING, now + self._grace
            case "saved":
                self._has_saved = True
            case "finished" | "continuing":
                worker.has_finished = message.event == "finished"
            case "failed":
                worker.has_failed = True

        self._prepare_standby()

    def _on_member(self, worker: _SupervisedWorker, step: int | None, now: float) -> None:
        worker.is_member = worker.was_member = True
        if worker.state is WorkerState.STARTING:
            worker.state = WorkerState.MEMBER
        self._losses.pop(worker.rank, None)
        if not self._is_formed:
            self._is_formed, self._step, self._first_step = True, step, step
        if step is not None and not (worker.is_initial and step == self._first_step):
            self._attempt.show(f"rank {worker.rank} joined after step {step}")
        self.has_begun = True
        self._check_quorum(now)

    def _check_variables(self, changed: Sequence[str]) -> None:
        """Do without a standby if scripts set variables that torch may read when it is imported."""
        if self._keeps_standby and changed:
            self._keeps_standby = False
            names = ", ".join(changed)
            self._attempt.show(
                f"no standby: the script sets {names}, maybe before it imports torch"
            )

    def _prepare_standby(self) -> None:
        """Have a standby when all workers have reached their first step, and not before: it takes
        some of the machine's time."""
        if not self._keeps_standby or self._is_stopping or not self._has_restarts():
            return
        if self._is_formed and all(each.is_ready for each in self._workers.values()):
            self._attempt.prepare_standby()

    def _on_shortage(self, now: float) -> None:
        """Handle that the next step waits for more members: those that ended had not finished."""
        if self._is_stopping:
            return
        self._finished, self._has_leader_finished = 0, False
        self._is_short = self._had_quorum = True
        # Those that have ended counted when others were told to leave.
        for worker in [*self._workers.values()]:
            is_missed = len(self._staying()) < self._min_ranks and self._has_restarts()
            if is_missed and self._is_preempted_member(worker) and not worker.has_successor:
                self._replace_leaving(worker, now)
        if self._first_finished is not None and len(self._staying()) < self._min_ranks:
            self._fail_after_end(
                self._first_finished, "exited with 0 and the others have more steps to do"
            )
        else:
            self._check_quorum(now)

    def _show_spares(self) -> None:
        """Tell the user, once, if some ranks have nothing to do."""
        limit = self._max_members
        if limit is None or limit >= self.ranks or self._has_shown_spares:
            return
        self._has_shown_spares = True
        spares = format_count(self.ranks - limit, "hot spare")
        trains = f"micro_batches={limit}, so at most {format_count(limit, 'rank')} train"
        self._attempt.show(f"{trains}; {spares} will wait")

    def _on_leaving(self, worker: _SupervisedWorker, now: float) -> None:
        """Replace a worker that others than the launcher told to leave, if it is needed."""
        worker.state = WorkerState.LEAVING
        if self._is_stopping:
            return
        others = [self._workers[rank] for rank in self._staying()]
        if len(others) + self._finished >= self._min_ranks:
            return
        if worker.is_member and not any(each.is_member for each in others):
            return  # all that have the state leave: they save it
        self._check_quorum(now)
        self._replace_leaving(worker, now)

    def _is_preempted_member(self, worker: _SupervisedWorker) -> bool:
        """Whether others than the launcher told this member to leave."""
        is_leaving = worker.state is WorkerState.LEAVING and not worker.was_asked_to_leave
        return worker.is_member and is_leaving

    def _replace_leaving(self, worker: _SupervisedWorker, now: float) -> None:
        minimum = f"the run needs {format_count(self._min_ranks, 'rank')}"
        worker.has_successor = True
        if self._has_restarts():
            self.restarts += 1
            (rank,) = self._free_ranks(1)
            self._add(rank, due=now + LEAVE_WINDOW).is_replacement = True
            what = f"starting rank {rank} in its place"
        else:
            worker.due = now + self._grace
            what = "no restarts left"
        self._attempt.show(f"rank {worker.rank} was told to leave, and {minimum}; {what}")

    def on_exit(self, exit_: RecordedExit, now: float, *, is_orderly: bool) -> bool:
        result = exit_.result
        assert result.rank is not None
        worker = self._workers.pop(result.rank)
        self._last_exit = exit_
        # Python ends itself by SIGINT after an uncaught KeyboardInterrupt.
        is_killed = result.code < 0 and result.code != -signal.SIGINT
        has_more_to_do = worker.is_member and not worker.has_finished
        is_lost = (result.code != 0 or has_more_to_do) and (is_killed or not is_orderly)
        is_lost &= not result.preempted and not worker.has_failed
        if self._is_stopping:
            return self._on_exit_while_stopping(worker, exit_, is_lost=is_lost)
        if worker.has_left or (worker.was_asked_to_leave and result.code):
            is_expected = result.preempted or result.code in (0, 128 + signal.SIGTERM)
            if not is_lost and not is_expected:
                return False  # an exception
            self._show_departure(worker, exit_, is_expected=is_expected)
            self._on_departure(worker)
        elif is_lost:
            self._on_loss(worker, exit_, now)
        elif result.code == 0:
            self._on_success(worker, exit_)
            self._check_quorum(now)
            return False
        elif result.preempted and self._goes_on_without(worker, now):
            self._attempt.show(f"{result.name} was told to leave; the run goes on")
            self._lower_ranks()
        else:
            return False
        self._check_quorum(now)
        return True

    def _show_departure(
        self, worker: _SupervisedWorker, exit_: RecordedExit, *, is_expected: bool
    ) -> None:
        result = exit_.result
        when = "" if worker.was_member else " before it had joined"
        if is_expected and not worker.was_asked_to_leave:
            self._attempt.show(f"{result.name} left after SIGTERM{when}")
        elif result.code:
            self._attempt.show(f"{result.name} left{when}: {_how(result.code)}")

    def _on_departure(self, worker: _SupervisedWorker) -> None:
        """Go on without a worker that has left, if any of the others can."""
        self._lower_ranks()
        if self._is_formed and not self._has_member() and not self._finished:
            self._start_over("all ranks lost")
        elif worker.is_leader and not self._has_member() and self._finished:
            self._start_over("the leader was lost after the last step")
        elif not self._workers and not self._finished:
            self._fail("no rank is left")

    def _lower_ranks(self) -> None:
        """Expect no rank in place of one that left and was not replaced."""
        expected = [each for each in self._workers.values() if not each.was_asked_to_leave]
        self.ranks = max(self._min_ranks, min(self.ranks, len(expected) + self._finished))

    def _goes_on_without(self, worker: _SupervisedWorker, now: float) -> bool:
        """Return whether others go on after a member saved and left; replace it if needed."""
        staying = len(self._staying())
        if staying and staying + self._finished < self._min_ranks and self._has_restarts():
            self.restarts += 1
            self._add(worker.rank, due=now).is_replacement = True
            return True
        return bool(staying) and staying + self._finished >= self._min_ranks

    def _on_exit_while_stopping(
        self, worker: _SupervisedWorker, exit_: RecordedExit, *, is_lost: bool
    ) -> bool:
        """Handle an exit while the run is stopped; return True if it need not be recorded."""
        if self._has_succeeded:
            return True
        if not self._is_preempted:
            return False
        if not self._is_formed:  # if there have been members, what they saved is not lost
            return self.has_begun and (is_lost or exit_.result.was_terminated)
        if not worker.is_member:
            return True
        self._is_departing |= worker.state is WorkerState.LEAVING
        if exit_.result.code == 0 and not is_lost:
            self._finished += 1
        if is_lost and not self._is_ending and not self._has_saved:
            self._lost_unsaved.append(exit_)
        # Members save what there is to save, with or without those that are lost.
        if self._has_member() or self._has_saved:
            return is_lost
        # Scripts that handle SIGTERM themselves also save themselves, and nobody tells of it.
        if not self._lost_unsaved or not self._is_departing or self._finished:
            return False
        self._report_unsaved()
        return is_lost

    def _report_unsaved(self) -> None:
        """Let a run that was stopped fail: the rank that was to save was lost."""
        lost = [each.result.rank for each in self._lost_unsaved if each.result.rank is not None]
        was = "was lost before it saved" if len(lost) == 1 else "were lost before they saved"
        why = f"{format_ranks(sorted(lost))} {was}"
        self._attempt.show(
            f"stopped without saving: {why}; a restart continues from the last checkpoint"
        )
        self._fail(why, self._lost_unsaved[0])

    def _on_success(self, worker: _SupervisedWorker, exit_: RecordedExit) -> None:
        if worker.is_member:
            self._finished += 1
            self._first_finished = self._first_finished or exit_
        self._has_leader_finished |= worker.is_leader
        if self._is_formed and not self._has_member():
            # What still starts has come too late.
            if self._has_leader_finished or not self._is_leader_lost:
                self._succeed()
            else:
                self._start_over("the leader was lost after the last step")
        elif not self._is_formed:
            self._ended_early = exit_
            self._check_start()
        if not self._workers and not self._has_elastic_run:
            self._attempt.show(
                "no rank created an ElasticRun: every rank ran the script for itself. Train with "
                "phalanx.elastic.ElasticRun, or leave out --elastic"
            )

    def _check_start(self) -> None:
        """Fail if workers wait for the first step and too many have ended without a failure."""
        ended = self._ended_early
        if ended is None or self._is_formed or len(self._staying()) >= self._min_ranks:
            return
        if any(each.max_members is not None for each in self._workers.values()):
            self._fail_after_end(ended, "ended before the first step")

    def _succeed(self) -> None:
        self._has_succeeded = True
        self._attempt.finish()

    def _on_loss(self, worker: _SupervisedWorker, exit_: RecordedExit, now: float) -> None:
        """Schedule the replacement of a lost worker, or end the attempt."""
        rank, words = worker.rank, f"{exit_.result.name} lost: {_how(exit_.result.code)}"
        losses = self._losses.setdefault(rank, _Losses(exit_))
        losses.count += 1
        # One that hangs costs the others nothing: it does not end a run that makes steps.
        hangs = worker.seems_to_hang and self._is_formed
        if not worker.is_member and not self._is_spare(worker) and not hangs:
            losses.early.append(exit_)
        self._is_leader_lost |= worker.is_leader
        if len(losses.early) == CRASH_LOOP:
            times = f"{CRASH_LOOP} times in a row before it was a member"
            self._attempt.fail(losses.early[0], f"{words}, {times}")
        elif self._is_all_lost() and self._has_leader_finished:
            self._attempt.show(f"{words}; not replaced: the run has finished")
            self._succeed()
        elif self._is_all_lost():
            self._attempt.show(words)
            self._start_over("all ranks lost")
        elif not self._has_restarts():
            self._attempt.show(f"{words}; not replaced: no restarts left")
            if len(self._staying()) + self._finished < self._min_ranks:
                self._fail(f"fewer than {format_count(self._min_ranks, 'rank')} left")
        elif worker.state is WorkerState.LEAVING and len(self._staying()) >= self.ranks:
            self._attempt.show(f"{words}; not replaced: another rank has taken its place")
        else:
            self.restarts += 1
            delay = REPLACEMENT_DELAYS[min(losses.count, len(REPLACEMENT_DELAYS)) - 1]
            self._add(rank, due=now + delay).is_replacement = True
            later = f" in {delay:g} s" if delay else ""
            limit = self._max_restarts
            number = "" if limit is None else f" ({self.restarts} of {limit})"
            self._attempt.show(f"{words}; starting a replacement{later}{number}")

    def _is_spare(self, worker: _SupervisedWorker) -> bool:
        members = sum(each.is_member for each in self._workers.values())
        return worker.max_members is not None and members >= worker.max_members

    def _is_all_lost(self) -> bool:
        """Return whether no worker has the state of the run, or none runs."""
        runs = any(each.state is not WorkerState.WAITING for each in self._workers.values())
        return not self._has_member() and (self._is_formed or not runs)

    def _check_quorum(self, now: float) -> None:
        states = [each.state for each in self._workers.values() if each.is_member]
        members = len(states) - states.count(WorkerState.LEAVING) + self._finished
        if members >= self._min_ranks:
            self._had_quorum, self._without_quorum_since = True, None
            self._is_short = False
        elif self._had_quorum and self._without_quorum_since is None:
            self._without_quorum_since = now

    def _start_over(self, reason: str) -> None:
        # Do not count replacements that never became members.
        for worker in [*self._workers.values()]:
            if worker.state is WorkerState.WAITING:
                self._cancel(worker)
            else:
                self.restarts -= worker.is_replacement and not worker.was_member
        step = self._step or 0
        self._futile_restarts = 0 if step > self._furthest_step else self._futile_restarts + 1
        self._furthest_step = max(step, self._furthest_step)
        if self._futile_restarts >= FUTILE_RESTARTS:
            reason += f", {FUTILE_RESTARTS} times in a row without a further step"
            self._fail(reason)
            return
        if not self._has_restarts():
            self._fail(reason)
            return
        self.restarts += 1
        self._attempt.show(f"{reason}; restarting all from the newest checkpoint, or from step 0")
        self._wants_restart = True
        self._attempt.kill()

    def _fail(self, message: str, cause: RecordedExit | None = None) -> None:
        """Fail the run: because of `cause`, the earliest loss, or whatever happened last."""
        cause = cause or next((each.first for each in self._losses.values()), self._last_exit)
        assert cause is not None, "a run in which nothing has ended does not fail"
        result = cause.result
        reason = result.reason or ("" if result.code else f"it exited with 0; {message}")
        # Whatever it was: this run fails. It may even have ended as the launcher wanted it to.
        result = replace(result, reason=reason, was_terminated=False)
        self._attempt.fail(cause._replace(result=result), message)

    def _fail_after_end(self, ended: RecordedExit, what: str) -> None:
        """Fail the run because of a rank that exited with 0 while the others need it."""
        few = f"fewer than {format_count(self._min_ranks, 'rank')} left"
        result = replace(ended.result, reason=f"it {what}")
        self._fail(f"{result.name} {what}; {few}", ended._replace(result=result))

    def _has_member(self) -> bool:
        return any(each.is_member for each in self._workers.values())

    def _staying(self) -> list[int]:
        states = {each.rank: each.state for each in self._workers.values()}
        return sorted(rank for rank in states if states[rank] is not WorkerState.LEAVING)

    def _has_restarts(self) -> bool:
        return self._max_restarts is None or self.restarts < self._max_restarts

    def _add(self, rank: int, *, due: float | None = None) -> _SupervisedWorker:
        incarnation = self._incarnations.get(rank, 0)
        self._incarnations[rank] = incarnation + 1
        worker = self._workers[rank] = _SupervisedWorker(
            rank=rank, incarnation=incarnation, due=due
        )
        return worker

    def next_due(self) -> float | None:
        if self._is_stopping:
            return None
        dues = [each.due for each in self._workers.values() if each.due is not None]
        if self._without_quorum_since is not None:
            dues.append(self._without_quorum_since + self._quorum_deadline())
        if self._waiting_since is not None and not self._is_formed:
            dues.append(self._waiting_since + (self._warnings + 1) * self._quorum_timeout)
        if self._is_formed:
            dues += map(self._next_warning, self._without_run())
        return min(dues, default=None)

    def _quorum_deadline(self) -> float:
        # A program that takes minutes to start takes as long to be replaced.
        return max(self._quorum_timeout, 2 * self._longest_start)

    def on_time(self, now: float) -> None:
        if self._is_stopping:
            return
        for worker in self._workers.values():
            if worker.due is None or now < worker.due:
                continue
            worker.due = None
            if worker.state is WorkerState.LEAVING:
                self._attempt.send(worker.rank, signal.SIGKILL)
            else:
                self._start(worker, now)
        if self._is_formed:
            self._warn_of_late_replacements(now)
        elif self._waiting_since is not None:
            self._warn_of_missing_ranks(now, now - self._waiting_since)
        since, deadline = self._without_quorum_since, self._quorum_deadline()
        if since is not None and now >= since + deadline:
            self._without_quorum_since = None
            reason = f"fewer than {format_count(self._min_ranks, 'member')} for {deadline:.3g} s"
            if self._losses or self._has_restarts():
                self._start_over(reason)
            elif self._is_short:
                self._end_shortage(reason)

    def _end_shortage(self, reason: str) -> None:
        """End a run without restarts whose members wait for others."""
        starting = [each for each in self._workers.values() if each.state is WorkerState.STARTING]
        for each in starting:  # its loss fails the run
            self._attempt.show(f"{reason}; killing rank {each.rank}: it is not a member yet")
            self._attempt.send(each.rank, signal.SIGKILL)
        if not starting and self._last_exit is not None:
            self._fail(reason)

    def _warn_of_missing_ranks(self, now: float, waited: float) -> None:
        """Say which ranks the first step waits for; kill those that seem to hang."""
        if waited < (self._warnings + 1) * self._quorum_timeout:
            return
        self._warnings += 1
        missing = [each for each in self._workers.values() if each.max_members is None]
        if not missing:
            return  # the members are forming their group
        have = "has" if len(missing) == 1 else "have"
        ranks = format_ranks([each.rank for each in missing])
        self._attempt.show(f"{ranks} {have} not reached the first step after {waited:.3g} s")
        for each in self._without_run():
            self._kill_if_late(each, now)

    def _warn_of_late_replacements(self, now: float) -> None:
        """Say which workers have not begun; kill those that seem to hang."""
        for each in self._without_run():
            if now >= self._next_warning(each):
                waited = now - each.started_at
                each.warnings = max(each.warnings + 1, int(waited // self._warning_interval()))
                self._attempt.show(
                    f"rank {each.rank} has not created an ElasticRun after {waited:.3g} s"
                )
                self._kill_if_late(each, now)

    def _without_run(self) -> list[_SupervisedWorker]:
        return [each for each in self._workers.values() if each.is_without_run]

    def _next_warning(self, worker: _SupervisedWorker) -> float:
        return worker.started_at + (worker.warnings + 1) * self._warning_interval()

    def _warning_interval(self) -> float:
        return max(self._quorum_timeout, self._longest_start)

    def _kill_if_late(self, worker: _SupervisedWorker, now: float) -> None:
        deadline = max(START_TIMEOUT_FACTOR * self._quorum_timeout, 2 * self._longest_start)
        if now - worker.started_at >= deadline:
            worker.seems_to_hang = True
            why = "it has not created an ElasticRun"
            self._attempt.show(f"killing rank {worker.rank}: {why}")
            self._attempt.send(worker.rank, signal.SIGKILL)

    def _start(self, worker: _SupervisedWorker, now: float, *, retries: bool = True) -> None:
        try:
            self._attempt.start_rank(worker.rank, incarnation=worker.incarnation)
        except OSError as error:  # no memory, or too many processes
            if not retries:
                raise
            worker.due = now + START_RETRY_INTERVAL
            again = f"trying again in {START_RETRY_INTERVAL:g} s"
            self._attempt.show(f"could not start rank {worker.rank}: {error}; {again}")
            return
        worker.state, worker.started_at = WorkerState.STARTING, now

    def answer(self, request: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        command = request.get("command")
        if command == "status":
            return self._status()
        if command == "scale":
            return self._scale(request.get("ranks"), now)
        return {"error": f"unknown command {command!r}; there are 'status' and 'scale'"}

    def _status(self) -> Mapping[str, Any]:
        workers = [
            {
                "rank": each.rank,
                "worker": each.name,
                "pid": self._attempt.find_pid(each.rank),
                "state": each.state.value,
            }
            for _, each in sorted(self._workers.items())
        ]
        return {
            "id": self._run.id,
            "script": self._run.script,
            "pid": self._run.pid,
            "started": self._run.started,
            "min_ranks": self._min_ranks,
            "ranks": self.ranks,
            "step": self._step,
            "members": sum(each.is_member for each in self._workers.values()),
            "restarts": self.restarts,
            "workers": workers,
        }

    def _scale(self, ranks: object, now: float) -> Mapping[str, Any]:
        if type(ranks) is not int or ranks < 1:
            return {"error": f"the number of ranks must be at least 1, got {ranks!r}"}
        if ranks > MAX_RANKS:
            return {"error": f"the number of ranks must be at most {MAX_RANKS}, got {ranks}"}
        if ranks < self._min_ranks:
            return {"error": f"the run needs at least {self._min_ranks} ranks, got {ranks}"}
        if self._is_stopping:
            return {"error": "the run is being stopped"}
        staying = self._staying()
        self.ranks = ranks
        # Those that have the state stay, and of these the ones with the lowest ranks.
        by_use = sorted(staying, key=lambda rank: (not self._workers[rank].is_member, rank))
        leaving = sorted(by_use[ranks:])
        for rank in leaving:
            self._ask_to_leave(self._workers[rank], now)
        new = self._free_ranks(ranks - len(staying))
        for rank in new:
            self._add(rank, due=now)
        if new or leaving:
            self._attempt.show(f"scaled to {format_count(ranks, 'rank')}")
        return {
            "ok": True,
            "ranks": ranks,
            "started": new,
            "leaving": leaving,
            "max_members": self._max_members,
        }

    def _free_ranks(self, count: int) -> list[int]:
        free = (rank for rank in itertools.count() if rank not in self._workers)
        return [next(free) for _ in range(count)]

    def _ask_to_leave(self, worker: _SupervisedWorker, now: float) -> None:
        self._losses.pop(worker.rank, None)
        worker.was_asked_to_leave = True
        if worker.state is WorkerState.WAITING:
            self._cancel(worker)
            return
        worker.state, worker.due = WorkerState.LEAVING, now + self._grace
        self._attempt.send(worker.rank, signal.SIGTERM)

    def _cancel(self, worker: _SupervisedWorker) -> None:
        """Cancel the start of a worker that waits."""
        self.restarts -= worker.is_replacement
        del self._workers[worker.rank]


def _how(code: int) -> str:
    return f"killed by {describe_exit(code)}" if code < 0 else describe_exit(code)
