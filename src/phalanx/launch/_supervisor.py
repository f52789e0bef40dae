"""The supervisor: starts the ranks, watches them, and makes sure they end together.

Everything that happens arrives in one queue: a child has exited (put there by a thread that
waits for it), or the launcher received a signal. The supervisor handles one event at a time,
under a deadline if there is one:

- a rank fails: the others get `linger` seconds to report, then they are stopped;
- a signal arrives: it is forwarded to the ranks, which get `grace` seconds; a second signal kills
  them, unless it is a duplicate of the first;
- a rank exits after a preemption request: the others get `grace` seconds to do the same;
- stopping: SIGTERM to each rank, then to the processes it left behind, SIGKILL after `grace`
  seconds.

Each rank leads a session of its own. So Ctrl-C at the terminal reaches only the launcher, and
whatever a rank starts is found by its process group. If the launcher itself is killed, the
orphan guard ends the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from .._signals import signal_name
from ..errors import RanksFailed
from . import _orphan_guard
from ._error_reports import ErrorReportFilter, SeenErrorReports
from ._job import Job
from ._outcome import Outcome, RankExit, describe_code
from ._output import OutputPump, OutputSource, Screen


@dataclass(frozen=True)
class ProcessExited:
    """A child has ended."""

    child: ChildProcess
    code: int
    """As `subprocess` counts: negative for the number of a signal."""
    at: float
    """When, on the monotonic clock."""


@dataclass(frozen=True)
class SignalReceived:
    """The launcher was sent a signal."""

    number: int


SupervisorEvent = ProcessExited | SignalReceived


@dataclass(frozen=True, eq=False)
class ChildProcess:
    """A process that the launcher has started, with all that it starts itself."""

    process: subprocess.Popen[bytes]

    @property
    def has_ended(self) -> bool:
        """Whether the process itself is over; what it started may not be."""
        return self.process.returncode is not None

    def send(self, number: int) -> None:
        """Signal the process itself, unless it has ended."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send_to_group(self, number: int) -> None:
        """Signal the process and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class OrphanGuard:
    """The launcher's side of the process that ends the ranks if the launcher is killed."""

    def __init__(self, *, grace: float) -> None:
        # -I and -S: nothing of the user's is loaded, so it is up in the time of a bare interpreter.
        command = [sys.executable, "-I", "-S", _orphan_guard.__file__, str(grace)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Killed before its pipe is closed: it must not take our orderly end for a sudden one.
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def watch(self, child: ChildProcess) -> None:
        """Take a child into care."""
        self._tell(f"+{child.process.pid}\n")

    def forget(self, child: ChildProcess) -> None:
        """Leave a child alone whose group is over: its number may soon be somebody else's."""
        self._tell(f"-{child.process.pid}\n")

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text.encode())


def start(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    events: SimpleQueue[SupervisorEvent],
    stdin: int | None = subprocess.DEVNULL,
    pass_fds: Collection[int] = (),
) -> ChildProcess:
    """Start a process in a session of its own and put its end into `events`."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    child = ChildProcess(process)

    def wait() -> None:
        code = process.wait()
        events.put(ProcessExited(child, code, time.monotonic()))

    threading.Thread(target=wait, name=f"phalanx-wait-{name}", daemon=True).start()
    return child


def start_store(
    *, env: Mapping[str, str], events: SimpleQueue[SupervisorEvent]
) -> tuple[ChildProcess, int]:
    """Start a store on a free port of this machine and return it and the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        fd = listener.fileno()
        # -P: a queue.py that lies where the user works is not for us to import.
        command = [sys.executable, "-P", "-m", "phalanx.launch._store_server", str(fd)]
        child = start("store", command, env=env, events=events, pass_fds=[fd])
        return child, listener.getsockname()[1]


def with_orphans(children: Iterable[ChildProcess]) -> list[ChildProcess]:
    """Return the children that have ended while something they started has not."""
    ended = {child.process.pid: child for child in children if child.has_ended}
    suspects = {group for group in ended if _group_exists(group)}
    return (
        [ended[group] for group in sorted(_groups_with_live_members(suspects))] if suspects else []
    )


def _group_exists(group: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return False


def _groups_with_live_members(groups: set[int]) -> set[int]:
    """Return which groups of leaders that have ended still have a member, other than a zombie."""
    if not Path("/proc/self/stat").exists():
        return groups
    living, reused = set(), set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name comes before this in parentheses and may contain anything.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) in groups and state not in b"ZX":
                living.add(int(group))
                # These leaders are gone. If one is here, the number has been given to a stranger.
                if path.parent.name == group.decode():
                    reused.add(int(group))
    return living - reused


class AttemptProcesses:
    """The store and the ranks of one attempt."""

    def __init__(
        self,
        job: Job,
        *,
        events: SimpleQueue[SupervisorEvent],
        guard: OrphanGuard,
        pump: OutputPump,
    ) -> None:
        self._job = job
        self._events = events
        self._guard = guard
        self._pump = pump
        self._ranks: dict[ChildProcess, int] = {}
        self._reports: dict[int | None, ErrorReportFilter] = {}
        self._seen = SeenErrorReports()
        self._running: set[ChildProcess] = set()

    @property
    def running(self) -> list[int]:
        """The ranks that have not been released."""
        return [rank for child, rank in self._ranks.items() if child in self._running]

    def start(self, *, attempt: int) -> None:
        """Start the store and all ranks; raise `RanksFailed` if the system cannot."""
        try:
            port = self._start_store()
            for rank in range(self._job.ranks):
                self._start_rank(rank, env=self._job.rank_env(rank, attempt=attempt, port=port))
        except OSError as error:
            started = f"{len(self._ranks)} of {self._job.ranks} ranks"
            raise RanksFailed(f"the system let us start only {started}: {error}") from error

    def knows(self, child: ChildProcess) -> bool:
        """Return whether a child is one of ours that has not been released."""
        return child in self._running

    def rank_of(self, child: ChildProcess) -> int | None:
        """Return a child's rank, or None for the store."""
        return self._ranks.get(child)

    def release(self, child: ChildProcess) -> None:
        """Take note that a child has ended."""
        self._running.discard(child)
        if not with_orphans([child]):
            self._guard.forget(child)

    def last_words(self, rank: int | None) -> list[str]:
        """Return how a rank (or the store) explained its end."""
        return self._reports[rank].last_words()

    def orphans(self) -> list[ChildProcess]:
        """Return the ranks that have ended while something they started has not."""
        return with_orphans(self._ranks)

    def is_gone(self) -> bool:
        """Return whether nothing is left of any child."""
        return not self._running and not self.orphans()

    def send(self, number: int) -> None:
        """Signal the ranks that run."""
        for child in self._ranks:
            child.send(number)

    def send_to_orphans(self, number: int) -> None:
        """Signal what ranks that have ended have left behind."""
        for child in self.orphans():
            child.send_to_group(number)

    def kill(self) -> None:
        """Kill everything that is left, and the store."""
        for child in {*self._running, *self.orphans()}:
            child.send_to_group(signal.SIGKILL)

    def _start_store(self) -> int:
        store, port = start_store(env=self._job.environ, events=self._events)
        self._adopt(store, None, OutputSource("[store] ", is_error=True))
        return port

    def _start_rank(self, rank: int, *, env: dict[str, str]) -> None:
        child = start(
            f"rank {rank}",
            self._job.command,
            env=env,
            events=self._events,
            # One rank may talk to whoever is at the keyboard, through a debugger for instance.
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )
        self._ranks[child] = rank
        label = f"[rank {rank}] " if self._job.prefix else ""
        self._adopt(child, rank, OutputSource(label, is_error=True, rank=rank))

    def _adopt(self, child: ChildProcess, rank: int | None, source: OutputSource) -> None:
        self._guard.watch(child)
        self._running.add(child)
        stdout, stderr = child.process.stdout, child.process.stderr
        assert stdout is not None
        assert stderr is not None
        self._pump.add(stdout, OutputSource(source.label, rank=source.rank))
        reports = ErrorReportFilter(
            self._seen, rank, labelled=self._job.prefix, full=self._job.full_tracebacks
        )
        self._reports[rank] = reports
        self._pump.add(stderr, source, reports)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds, all four. Within the first, the same signal is the same request: `timeout` and some
# schedulers send it to a process and then to its group, too.
_DUPLICATE_SIGNAL_WINDOW = 0.5
# The second is between two looks for what ranks have left behind: the kernel
# reports only a process's own children.
_ORPHAN_POLL_INTERVAL = 0.02
# What SIGKILL has not ended by then is held by the kernel, and is given up.
_KILL_TIMEOUT = 5.0
# What the ranks have written and the terminal has not taken by then is not shown.
_DRAIN_TIMEOUT = 5.0


def supervise(job: Job, *, screen: Screen) -> Outcome:
    """Run a job to its end, starting over as often as it allows."""
    events: SimpleQueue[SupervisorEvent] = SimpleQueue()
    with _signals_into(events), OrphanGuard(grace=job.grace) as guard:
        for number in range(job.max_restarts + 1):
            outcome = _Attempt(
                job, number, events=events, guard=guard, pump=OutputPump(screen)
            ).run()
            if outcome.first is None or outcome.signal is not None:
                break
    return outcome


@contextmanager
def _signals_into(events: SimpleQueue[SupervisorEvent]) -> Iterator[None]:
    """Turn signals that ask us to stop into events."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may decide about signals
        return
    # What is ignored stays ignored: that is how nohup and a shell's background jobs ask for it.
    wanted = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    # A SimpleQueue may be filled from within a handler, unlike a Queue.
    previous = {
        each: signal.signal(each, lambda number, _: events.put(SignalReceived(number)))
        for each in wanted
    }
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class _Attempt:
    """All ranks once: started together, watched, ended together."""

    def __init__(
        self,
        job: Job,
        number: int,
        *,
        events: SimpleQueue[SupervisorEvent],
        guard: OrphanGuard,
        pump: OutputPump,
    ) -> None:
        self._job = job
        self._number = number
        self._events = events
        self._pump = pump
        self._processes = AttemptProcesses(job, events=events, guard=guard, pump=pump)
        self._exits: list[RankExit] = []
        self._began = time.monotonic()
        self._deadline: float | None = None
        self._signal: int | None = None
        self._signal_at = 0.0
        self._stop_requested_at: float | None = None
        """When the ranks were first told to end; what they do from then on is not their failure."""
        self._is_killing = False

    def run(self) -> Outcome:
        """Start the ranks, wait for them, and leave none behind."""
        try:
            self._processes.start(attempt=self._number)
            self._pump.start()
            self._wait_until(lambda: not self._processes.running)
        finally:
            self._stop()
            self._announce_restart()
            self._pump.finish(timeout=_DRAIN_TIMEOUT)
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

    def _handle(self, event: SupervisorEvent) -> None:
        if isinstance(event, SignalReceived):
            self._on_signal(event.number)
        elif self._processes.knows(event.child):
            self._on_end(event)

    def _on_end(self, event: ProcessExited) -> None:
        rank = self._processes.rank_of(event.child)
        was_told_to_end = (
            self._stop_requested_at is not None and event.at >= self._stop_requested_at
        )
        self._processes.release(event.child)
        if rank is None and was_told_to_end:
            return  # the store is not missed at the end
        end = RankExit(
            rank=rank,
            # Whatever the store says, it has no business to end before the ranks.
            code=event.code or (1 if rank is None else 0),
            at=event.at - self._began,
            was_terminated=was_told_to_end,
        )
        is_first = end.failed and not any(each.failed for each in self._exits)
        self._exits.append(end)
        if is_first and self._stop_requested_at is None:
            self._on_failure(end)

    def _on_failure(self, end: RankExit) -> None:
        patience = self._job.grace if end.stopped else self._job.linger
        self._deadline = time.monotonic() + patience
        if self._processes.running and not end.stopped:
            self._pump.say(f"{end.name} failed: {describe_code(end.code)}; stopping the others")

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if number == self._signal and now < self._signal_at + _DUPLICATE_SIGNAL_WINDOW:
            return
        if self._stop_requested_at is not None:
            # Asked again: no more patience. Those that are being killed are only waited for.
            self._deadline = self._deadline if self._is_killing else now
            return
        self._signal, self._signal_at = number, now
        self._stop_requested_at, self._deadline = now, now + self._job.grace
        self._processes.send(number)
        self._pump.say(f"{signal_name(number)}: passed on to the ranks; once more kills them")

    def _stop(self) -> None:
        """End what still runs: ranks first, as they know best how to end what they have started."""
        crew = self._processes
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._deadline = self._stop_requested_at + self._job.grace
        crew.send(signal.SIGTERM)
        self._wait_until(lambda: not crew.running)
        crew.send_to_orphans(signal.SIGTERM)
        self._wait_until(
            lambda: not crew.running and not crew.orphans(), poll=_ORPHAN_POLL_INTERVAL
        )
        self._is_killing, self._deadline = True, time.monotonic() + _KILL_TIMEOUT
        crew.kill()
        self._wait_until(crew.is_gone, poll=_ORPHAN_POLL_INTERVAL)

    def _announce_restart(self) -> None:
        failed = Outcome(exits=self._exits, signal=self._signal).first is not None
        if failed and self._signal is None and self._number < self._job.max_restarts:
            total = self._job.max_restarts + 1
            self._pump.say(f"starting all ranks again: attempt {self._number + 2} of {total}")

    def _outcome(self) -> Outcome:
        exits = [
            replace(each, last_words=self._processes.last_words(each.rank)) if each.code else each
            for each in sorted(self._exits, key=lambda each: each.at)
        ]
        return Outcome(exits=exits, signal=self._signal, attempts=self._number + 1)
