"""Starts the ranks, watches them, and sees to it that they end together.

Everything that happens arrives in one queue: a child has ended (put there by a thread that waits
for it), or the launcher was sent a signal. The supervisor takes one event after the other, under a
deadline when there is one:

- a rank fails: the others get `linger` seconds to say what it did to them, then they are stopped;
- a signal comes: the ranks get it too, and `grace` seconds; a second signal ends the patience, but
  not its echo;
- a rank leaves on request: the others agreed to, and have as many seconds to do the same;
- stopping: SIGTERM to each rank, then to whatever it left behind, and SIGKILL after `grace`
  seconds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue

from .._signals import signal_name
from ._crew import Crew
from ._job import Job
from ._outcome import Outcome, RankExit, describe_code
from ._output import Pump
from ._processes import Caught, Ended, Event, Guard
from ._screen import Screen

__all__ = ["supervise"]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds, all four. Within the first, the same signal is the same request: `timeout` and some
# schedulers send it to a process and then to its group, too.
_ECHO = 0.5
# The second is between two looks for what ranks have left behind: the kernel
# reports only a process's own children.
_POLL = 0.02
# What SIGKILL has not ended by then is held by the kernel, and is given up.
_AFTER_KILL = 5.0
# What the ranks have written and the terminal has not taken by then is not shown.
_DRAIN = 5.0


def supervise(job: Job, *, screen: Screen) -> Outcome:
    """Run a job to its end, starting over as often as it allows."""
    events: SimpleQueue[Event] = SimpleQueue()
    with _signals_into(events), Guard(grace=job.grace) as guard:
        for number in range(job.max_restarts + 1):
            outcome = _Attempt(job, number, events=events, guard=guard, pump=Pump(screen)).run()
            if outcome.first is None or outcome.signal is not None:
                break
    return outcome


@contextmanager
def _signals_into(events: SimpleQueue[Event]) -> Iterator[None]:
    """Turn signals that ask us to stop into events."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may decide about signals
        return
    # What is ignored stays ignored: that is how nohup and a shell's background jobs ask for it.
    wanted = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    # A SimpleQueue may be filled from within a handler, unlike a Queue.
    previous = {
        each: signal.signal(each, lambda number, _: events.put(Caught(number))) for each in wanted
    }
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class _Attempt:
    """All ranks once: started together, watched, ended together."""

    def __init__(
        self, job: Job, number: int, *, events: SimpleQueue[Event], guard: Guard, pump: Pump
    ) -> None:
        self._job = job
        self._number = number
        self._events = events
        self._pump = pump
        self._crew = Crew(job, events=events, guard=guard, pump=pump)
        self._exits: list[RankExit] = []
        self._began = time.monotonic()
        self._deadline: float | None = None
        self._signal: int | None = None
        self._signal_at = 0.0
        self._told_at: float | None = None
        """When the ranks were first told to end; what they do from then on is not their failure."""
        self._is_killing = False

    def run(self) -> Outcome:
        """Start the ranks, wait for them, and leave none behind."""
        try:
            self._crew.start(attempt=self._number)
            self._pump.start()
            self._wait_until(lambda: not self._crew.running)
        finally:
            self._stop()
            self._announce_restart()
            self._pump.finish(timeout=_DRAIN)
        return self._outcome()

    def _wait_until(self, condition: Callable[[], bool], *, poll: float | None = None) -> None:
        """Handle events until the condition holds or the deadline has passed."""
        while not condition():
            patience = None if self._deadline is None else self._deadline - time.monotonic()
            if patience is not None and patience <= 0:
                return
            waits = [each for each in (patience, poll) if each is not None]
            try:
                event = self._events.get(timeout=min(waits, default=None))
            except Empty:
                continue
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Caught):
            self._on_signal(event.number)
        elif self._crew.knows(event.child):
            self._on_end(event)

    def _on_end(self, event: Ended) -> None:
        rank = self._crew.rank_of(event.child)
        was_told_to_end = self._told_at is not None and event.at >= self._told_at
        self._crew.release(event.child)
        if rank is None and was_told_to_end:
            return  # the store is not missed at the end
        end = RankExit(
            rank=rank,
            # Whatever the store says, it has no business to end before the ranks.
            code=event.code or (1 if rank is None else 0),
            at=event.at - self._began,
            was_told_to_end=was_told_to_end,
        )
        is_first = end.failed and not any(each.failed for each in self._exits)
        self._exits.append(end)
        if is_first and self._told_at is None:
            self._on_failure(end)

    def _on_failure(self, end: RankExit) -> None:
        patience = self._job.grace if end.stopped else self._job.linger
        self._deadline = time.monotonic() + patience
        if self._crew.running and not end.stopped:
            self._pump.say(f"{end.name} failed: {describe_code(end.code)}; stopping the others")

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if number == self._signal and now < self._signal_at + _ECHO:
            return
        if self._told_at is not None:
            # Asked again: no more patience. Those that are being killed are only waited for.
            self._deadline = self._deadline if self._is_killing else now
            return
        self._signal, self._signal_at = number, now
        self._told_at, self._deadline = now, now + self._job.grace
        self._crew.send(number)
        self._pump.say(f"{signal_name(number)}: passed on to the ranks; once more kills them")

    def _stop(self) -> None:
        """End what still runs: ranks first, as they know best how to end what they have started."""
        crew = self._crew
        if self._told_at is None:
            self._told_at = time.monotonic()
            self._deadline = self._told_at + self._job.grace
        crew.send(signal.SIGTERM)
        self._wait_until(lambda: not crew.running)
        crew.send_to_leftovers(signal.SIGTERM)
        self._wait_until(lambda: not crew.running and not crew.leftovers(), poll=_POLL)
        self._is_killing, self._deadline = True, time.monotonic() + _AFTER_KILL
        crew.kill()
        self._wait_until(crew.is_gone, poll=_POLL)

    def _announce_restart(self) -> None:
        failed = Outcome(exits=self._exits, signal=self._signal).first is not None
        if failed and self._signal is None and self._number < self._job.max_restarts:
            total = self._job.max_restarts + 1
            self._pump.say(f"starting all ranks again: attempt {self._number + 2} of {total}")

    def _outcome(self) -> Outcome:
        exits = [
            replace(each, last_words=self._crew.last_words(each.rank)) if each.code else each
            for each in sorted(self._exits, key=lambda each: each.at)
        ]
        return Outcome(exits=exits, signal=self._signal, attempts=self._number + 1)
