"""This process as a worker of an elastic run: it joins, recovers after lost ranks, and leaves.

`ElasticWorker` brings together the run, whose state and reducer follow the current group, the
generations, which say who is in it, and the supervisor, which is told of both.

`SupervisorChannel` is this worker's end of a socket with lines of JSON. The other end, and the
events, are in `launch._worker_channel`; `launch._restart_policy` says what the exit of a worker
means after them.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import logging
import os
import signal
import socket
import sys
import termios
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from .. import _faultpoints as faultpoints
from .._formatting import format_ranks
from .._signals import PREEMPTED_EXIT_CODE, PREEMPTED_MESSAGE
from ..env import ElasticEnv, changed_variables
from ..errors import GroupError, InvalidArgument, RendezvousError
from ._generations import Departure, Generations, Member, NotNeeded, Plan, drop_frames
from ._run_state import receive_state

if TYPE_CHECKING:
    from ._run import ElasticRun

_log = logging.getLogger("phalanx.elastic")

PROGRESS_INTERVAL = 0.5
"""Seconds between two reports of progress."""
SEND_TIMEOUT = 0.5
"""Seconds that a worker waits for a supervisor that does not read."""


@dataclass(frozen=True)
class MembershipChange:
    """Ranks of an elastic run that were lost, have joined or have left."""

    kind: Literal["lost", "joined", "left"]
    ranks: tuple[int, ...]
    """As the launcher counts them: a replacement has the rank of the one it replaces."""
    step: int
    """How many steps the run had completed."""
    world_size: int
    """How many ranks it has now."""


class SupervisorChannel:
    """This worker's end of the socket to the supervisor."""

    def __init__(self, descriptor: int, *, changed_variables: list[str]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        self._pid = os.getpid()
        self._reported = 0.0
        self.is_leader = False
        """Whether this worker is the leader of the run. If the leader is lost after the last step,
        its remaining work, such as writing the model, is lost."""
        atexit.register(self.tell, "ended")
        self.tell("created", changed_variables=changed_variables)

    def tell(self, event: str, **facts: Any) -> None:
        """Send an event; a supervisor that is gone or stopped misses it."""
        if os.getpid() != self._pid:  # a forked child, such as a worker of a data loader
            return
        with suppress(OSError):
            fields = {"event": event, "leader": self.is_leader, **facts}
            self._socket.settimeout(SEND_TIMEOUT)
            self._socket.send(json.dumps(fields).encode() + b"\n")

    def tell_progress(self, step: int) -> None:
        """Tell how far the run is, if this worker is the leader and has not just done so.

        Not while the supervisor has not read what was sent before: if it is suspended, reports must
        not fill the socket, which is to have room for other events.
        """
        now = time.monotonic()
        if self.is_leader and now >= self._reported + PROGRESS_INTERVAL:
            self._reported = now
            if not self._has_unread():
                self.tell("progress", step=step)

    def _has_unread(self) -> bool:
        size = array("i", [0])
        with suppress(OSError):
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, size)
        return size[0] > 0


class ElasticWorker:
    """This process as a worker of an elastic run.

    It joins, recovers after lost ranks, takes part in membership changes, and leaves.
    """

    def __init__(
        self,
        env: ElasticEnv,
        *,
        backend: str,
        device: torch.device,
        timeout: timedelta,
        max_members: int,
    ) -> None:
        # The script is the same in all workers. A replacement may have been a standby, which has
        # changed its variables into those of a rank.
        self._channel = SupervisorChannel(
            env.channel, changed_variables=changed_variables() if env.is_initial else []
        )
        if env.min_ranks > max_members:
            raise InvalidArgument(
                f"micro_batches must be at least the minimum number of ranks ({env.min_ranks}), "
                f"got {max_members}. Use micro_batches={env.min_ranks}, or lower MIN in "
                "`phalanx run -n MIN:N`"
            )
        self._max_members = max_members
        self._generations = Generations(
            env,
            backend=backend,
            device=device,
            timeout=timeout,
            initial_workers=min(env.ranks, max_members),
            max_members=max_members,
            on_shortage=partial(self._channel.tell, "short"),
        )
        self._generations.claim_worker()
        self.has_run_begun = env.has_begun
        """Whether the run had members before this process was started."""
        self.is_initial_leader = env.is_initial and self._generations.member.global_rank == 0
        """Whether this worker logs for all before there are members."""
        self.is_member = False
        """Whether this worker takes part in steps, with the state of the run."""
        self._run: weakref.ref[ElasticRun] | None = None
        self._unchecked_steps = 2
        """Before so many steps it is checked that the state can be sent to others: the first one
        may change its types. Later it is known when a rank joins."""
        self.is_announcing = False
        """Whether the script's `on_change` is running."""
        self._must_plan = False
        """After a lost rank or an abandoned plan: plan even without new requests."""
        self._is_new = False
        """Joined since the last step. The others made this change before admitting this worker, so
        it skips it once."""
        self._regrouped_section = 0
        """The last section that survivors have formed a group in."""
        self._pid = os.getpid()
        self._is_finished = self._has_failed = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._on_exit)
        # The garbage collector of a forked child, such as a worker of a data loader, must not
        # destroy groups of this process: their engines have threads that the child lacks.
        os.register_at_fork(after_in_child=gc.freeze)
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, self._on_sigterm)

    # -- the process -------------------------------------------------------------------------

    def _on_sigterm(self, *_: object) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a worker of a data loader
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        # After the last step there is nothing to leave: the script ends, or is told again.
        if self._is_finished and self._generations.is_leaving:
            raise SystemExit(128 + signal.SIGTERM)
        self._generations.is_leaving = True
        if not self._is_finished:
            self._channel.tell("leaving")

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # The others would make the same mistake: they raise this cause, and do not recover.
        if os.getpid() == self._pid:
            why = f"{kind.__name__}: {error}"
            self._channel.tell("failed")  # first: the others may end sooner than this process
            self.mark_failed(why)
            self._generations.abort(f"{why} (uncaught)")
        self._previous_hook(kind, error, trace)

    def _on_exit(self) -> None:
        if os.getpid() != self._pid or self._has_failed:
            return
        run = None if self._run is None else self._run()
        if run is not None and not self._is_finished:
            run._leave_steps_at_exit()
        if self._is_finished:
            self._generations.mark_over()

    def note_committed(self, run: ElasticRun) -> None:
        """Tell members that are behind that the last section is committed."""
        self._generations.note_committed(run._run_state.section)

    def finish(self, run: ElasticRun) -> None:
        """Note that this worker has completed all steps, or as many as its script wants."""
        self._is_finished = True
        self._channel.tell("finished")
        self.note_committed(run)

    def close(self) -> None:
        self._generations.close()

    def tell_progress(self, step: int) -> None:
        self._channel.tell_progress(step)

    def mark_failed(self, why: str) -> None:
        self._has_failed = True
        self._generations.mark_failed(why)

    def raise_unless_recoverable(self, error: BaseException) -> None:
        """Raise an error unless survivors may regroup after it."""
        if not self._generations.can_recover(error):
            raise error

    @property
    def known_requests(self) -> int:
        return self._generations.known_requests

    # -- members -----------------------------------------------------------------------------

    def join(self, run: ElasticRun) -> None:
        """Wait until this worker is a member and has the state of the run."""
        self._run = weakref.ref(run)
        if not self.is_member:
            self._channel.tell("ready", max_members=self._max_members)
        while not self.is_member:
            try:
                plan = self._generations.join(run._restore_for_all)
            except NotNeeded:
                if self._generations.is_leaving:
                    self._channel.tell("left")
                    _log.info("this worker was told to leave before it joined")
                    raise SystemExit(PREEMPTED_EXIT_CODE) from None
                _log.info("the run is complete; this worker exits without joining")
                raise SystemExit(0) from None
            self._begin_generation(run, plan)

    def _begin_generation(self, run: ElasticRun, plan: Plan) -> None:
        """Give the state of the run to the new members of a plan, whose group has formed.

        Only between two loops: the state has no sums of micro-batches, and all that have it must
        have the same.
        """
        generations = self._generations
        had_state = self.is_member
        new = [each for each in plan.members if each.number not in plan.sources]
        try:
            group = generations.group
            assert group is not None
            run._attach(group)
            run._compare_with_others()
            # Rank 0 has the state: a plan lists its sources first. A worker that bootstraps is one,
            # without having been a member.
            if run._comm.rank == 0:
                if new:
                    run._send_state()
            elif generations.member.number not in plan.sources:
                run._receive_state()
            elif new:  # take part in the broadcast and discard the result; it costs a copy
                receive_state(run._comm)
            self.is_member = True
            run._comm.barrier()
        except (GroupError, RendezvousError) as error:
            self.raise_unless_recoverable(error)
            if not self.is_member:
                generations.withdraw()
                return
            # Others may have passed the barrier and begun the next section, so survivors meet
            # there; has_regrouped() then starts that loop in recovery.
            has_regrouped = self._recover(run, error, run._run_state.section + 1)
            # The barrier of that section would have waited for this rank.
            assert has_regrouped, "a section was committed without a living member"
        self._is_new = not had_state
        self._channel.is_leader = run._comm.rank == 0
        self._channel.tell("member", step=run.completed_steps)
        if faultpoints.armed:
            faultpoints.reach("elastic:member")
        if had_state:
            self._announce(run, "joined", new)

    def regroup(self, run: ElasticRun, error: BaseException) -> bool:
        """Continue the section that the run is in; False if another rank has committed it."""
        return self._recover(run, error, run._run_state.section)

    def has_regrouped(self, section: int) -> bool:
        """Whether survivors already regrouped for a section that this rank has not begun."""
        return self._regrouped_section == section

    def _recover(self, run: ElasticRun, error: BaseException, section: int) -> bool:
        before = self._generations.members
        while True:
            if not self._generations.regroup(error, section):
                return False
            assert self._generations.group is not None
            try:
                run._attach(self._generations.group)
                break
            except (GroupError, RendezvousError) as caught:
                self.raise_unless_recoverable(caught)
                drop_frames(caught)
                error = caught
        self._channel.is_leader = run._comm.rank == 0
        self._must_plan = True
        self._regrouped_section = section
        now = {each.number for each in self._generations.members}
        self._announce_gone(run, [each for each in before if each.number not in now])
        return True

    def change_members(self, run: ElasticRun) -> None:
        """Let workers join or leave, if all members know that some want to."""
        generations = self._generations
        if self._unchecked_steps:
            self._unchecked_steps -= 1
            run._run_state.check_transferable(run._position)
        is_new, self._is_new = self._is_new, False
        if self._is_finished:  # by an earlier call of run.steps()
            self._is_finished = False
            self._channel.tell("continuing")
            if generations.is_leaving:
                self._channel.tell("leaving")
        is_due = run._run_state.agreed_requests > generations.handled_requests or self._must_plan
        if is_new or not is_due:
            return
        before, group = generations.members, generations.group
        try:
            plan = generations.change_members(
                run._run_state.agreed_requests, run._run_state.section
            )
        except Departure as departure:
            self.is_member = False
            self._depart(run, departure)
        self._must_plan = plan is None  # it was abandoned: plan again after the next step
        if plan is None or generations.group is group:
            return
        staying = {each.number for each in plan.members}
        self._begin_generation(run, plan)
        self._announce_gone(run, [each for each in before if each.number not in staying])

    def _depart(self, run: ElasticRun, departure: Departure) -> NoReturn:
        if not departure.all_left:
            run._checkpoints.close()  # another leader is about to save in the directory
            self._channel.tell("left")
            raise SystemExit(0)
        if self._generations.await_turn_to_save(departure):
            saved = run._save_before_exit()
            step = run.completed_steps
            how = (
                f"saving step {step}"
                if saved
                else f"step {step}; not saved: run.restore() was not called"
            )
            print(f"{PREEMPTED_MESSAGE} after {how}", file=sys.stderr, flush=True)
            self._channel.tell("saved")
            self._generations.note_saved(departure)
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def _announce_gone(self, run: ElasticRun, members: list[Member]) -> None:
        left = self._generations.find_leaving(members)
        self._announce(run, "left", left)
        self._announce(run, "lost", [each for each in members if each not in left])

    def _announce(
        self,
        run: ElasticRun,
        kind: Literal["lost", "joined", "left"],
        members: Sequence[Member],
    ) -> None:
        if not members:
            return
        ranks = tuple(sorted(each.global_rank for each in members))
        change = MembershipChange(kind, ranks, run.completed_steps, run._comm.size)
        if run._comm.rank == 0:
            level = logging.WARNING if kind == "lost" else logging.INFO
            _log.log(
                level,
                "%s %s after step %d; world size %d",
                format_ranks(ranks),
                kind,
                change.step,
                change.world_size,
            )
        if run._on_change is not None:
            self.is_announcing = True
            try:
                run._on_change(change)
            finally:
                self.is_announcing = False
