"""Fault injection: at a named point of a rank, or from outside at an instant.

**At a point.** A fault is an argument of a run::

    pool.run(body, 3, faults=[Fault("allreduce:issued", kill(), rank=2)])

or is injected by the body::

    with faults.inject("my point", delay(0.5)):
        ...

The actions are `kill`, `stop`, `delay`, `segfault`, `exit_abruptly` and `hold_gil`.

Fault points of groups are ``<operation>:before``, ``<operation>:issued`` and
``<operation>:after``; ``form:requested`` and, in shared memory, ``form:mapped``; and
``rejoin:left``, ``rejoin:waiting`` and, in shared memory, ``rejoin:entering``. Those of a save are
``checkpoint:`` followed by ``begin``, ``locked``, ``tensor`` (before each one), ``flush`` (of each
file), ``written``, ``publish``, ``published`` and ``committed``, and when it overwrites another
checkpoint also ``moved``, ``replace``, ``replaced`` and, after the commit, ``discard`` (of each old
file). A checkpoint that is removed reaches ``checkpoint:renamed`` before its files are deleted.
Bodies add points with `reach`.

Those of `phalanx.elastic.ElasticRun`, in the order of a run:

``elastic:join``              a worker has written its request to join
``elastic:planned``           a member has written a plan, which others are to join
``elastic:forming``           before the group of a plan forms
``elastic:formed``            after it has formed, or has failed to
``elastic:transfer``          after each piece of the state, on all ranks
``elastic:member``            a new generation has begun on a member, which has the state
``elastic:forward``           before the script gets a micro-batch
``elastic:backward``          before the backward pass of a micro-batch
``elastic:folded``            after a micro-batch: gradients and buffers are added to this rank's
``elastic:publish``           before a rank publishes the sums of its micro-batches (shared memory)
``elastic:published``         after it, also if there was no shared memory left to publish in
``ddp:reduce_fold``           before the sum of each bucket over ranks starts: in the last backward
                              pass, the last bucket after ``elastic:published``
``elastic:reduced``           the gradients of a loop are summed, also after a recovery
``elastic:recorded``          ranks have exchanged the losses and flags of a loop
``elastic:commit``            before the barrier that ends a loop
``elastic:committed``         after it, when the sums of this rank were withdrawn
``elastic:before_optimizer``  before a step of an optimizer
``elastic:after_optimizer``   after it
``elastic:save``              before a rank saves; in an elastic run, the leader
``elastic:saved``             after it
``elastic:evaluate``          before the barrier that ends an evaluation
``elastic:regroup``           before a survivor gives up the group that lost a rank
``elastic:regrouped``         after the survivors have formed a group
``elastic:cover``             before survivors compare what they hold
``elastic:redo``              before missing micro-batches run
``elastic:leave``             before a worker that was told to leave gives up its group

**In launched workers.** `run_elastic` runs a script under ``phalanx run --elastic``, injects faults
into its workers and failures from outside, and returns what happened and what was left behind::

    plan = FaultPlan.random(7, mean_time_between_failures=1.0, count=20)
    outcome = run_elastic("train.py", ranks=3, plan=plan, timeout=120)
    assert outcome.exit_code == 0 and not outcome.leaks

A `FaultPlan` is drawn at random from a seed or read from a trace of preemptions. From outside a
worker can be killed, stopped or crashed; `store_unreachable` and `kill_supervisor` affect the
launcher. What was not injected is in ``outcome.missed`` (faults at points) and ``outcome.skipped``
(failures of the plan). After `kill_supervisor`, ``outcome.leaks`` names the directory of the run:
a killed launcher leaves it behind, and whoever lists runs next removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from .. import _faultpoints
from .._faultpoints import reach
from ._actions import (
    Action,
    Fault,
    delay,
    exit_abruptly,
    hold_gil,
    kill,
    kill_supervisor,
    segfault,
    stop,
    store_unreachable,
)
from ._chaos import ChaosOutcome, InjectedFailure, run_elastic
from ._fault_plan import FaultPlan, PlannedFailure

__all__ = [
    "Action",
    "ChaosOutcome",
    "Fault",
    "FaultPlan",
    "InjectedFailure",
    "PlannedFailure",
    "delay",
    "exit_abruptly",
    "hold_gil",
    "inject",
    "kill",
    "kill_supervisor",
    "reach",
    "run_elastic",
    "segfault",
    "stop",
    "store_unreachable",
]


_current_rank = threading.local()


class ArmedFault:
    """A fault that has not fired yet."""

    def __init__(self, fault: Fault, may_fire: Callable[[Fault], bool] | None = None) -> None:
        self.fault = fault
        self.fired = False
        self._may_fire = may_fire
        self._thread: int | None = getattr(_current_rank, "thread", None)
        self._left = fault.nth
        self._lock = threading.Lock()  # guards the count; not held during the action

    def __call__(self, point: str) -> None:
        """Count the point if it is this fault's, and act at the nth time."""
        if point != self.fault.point or self._thread not in (None, threading.get_ident()):
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due and self._may_fire is not None and not self._may_fire(self.fault):
            with self._lock:
                self._left = 1  # at the next time
        elif due:
            self.fired = True
            self.fault.action()


@contextmanager
def arm_faults(
    faults: Sequence[Fault], *, may_fire: Callable[[Fault], bool] | None = None
) -> Iterator[list[ArmedFault]]:
    """Arm faults for the calling rank; one that is due fires if `may_fire` returns True."""
    armed = [ArmedFault(fault, may_fire) for fault in faults]
    with ExitStack() as stack:
        for each in armed:
            _faultpoints.arm(each)
            stack.callback(_faultpoints.disarm, each)
        yield armed


def mark_thread_as_rank() -> None:
    """Make this thread a rank until it ends: faults armed in it do not affect other threads."""
    _current_rank.thread = threading.get_ident()


def inject(point: str, action: Action, *, nth: int = 1) -> AbstractContextManager[object]:
    """Act at the nth time that the calling rank reaches `point` in the block."""
    return arm_faults([Fault(point, action, nth=nth)])
