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
orphan guard kills the ranks.
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
    """A child process exited."""

    child: ChildProcess
    code: int
    """The exit code; negative for the number of a signal."""
    at: float
    """Time on the monotonic clock."""


@dataclass(frozen=True)
class SignalReceived:
    """The launcher received a signal."""

    number: int
    at: float
    """Time on the monotonic clock."""


SupervisorEvent = ProcessExited | SignalReceived


@dataclass(frozen=True, eq=False)
class ChildProcess:
    """A process that the launcher started, leader of its own session and process group."""

    process: subprocess.Popen[bytes]

    @property
    def has_exited(self) -> bool:
        """Whether the process exited; processes that it started may still run."""
        return self.process.returncode is not None

    def send(self, number: int) -> None:
        if not self.has_exited:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send_to_group(self, number: int) -> None:
        """Signal the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class OrphanGuard:
    """The launcher's side of the process that kills the ranks if the launcher is killed."""

    def __init__(self, *, grace: float) -> None:
        # -I and -S: no user code is loaded, and it starts as fast as a bare interpreter.
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
        # Kill it before closing its pipe: end of file means that the launcher died.
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def add(self, child: ChildProcess) -> None:
        """Guard a child's process group."""
        self._write(f"+{child.process.pid}\n")

    def remove(self, child: ChildProcess) -> None:
        """Stop guarding a process group that is empty: the kernel may reuse its id."""
        self._write(f"-{child.process.pid}\n")

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text.encode())


def start_process(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    events: SimpleQueue[SupervisorEvent],
    stdin: int | None = subprocess.DEVNULL,
    pass_fds: Collection[int] = (),
) -> ChildProcess:
    """Start a process in a new session; put a `ProcessExited` into `events` when it exits."""
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
    """Start a store on a free port of this machine; return the process and the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        fd = listener.fileno()
        # -P: do not import a queue.py from the user's working directory.
        command = [sys.executable, "-P", "-m", "phalanx.launch._store_server", str(fd)]
        child = start_process("store", command, env=env, events=events, pass_fds=[fd])
        return child, listener.getsockname()[1]


def with_orphans(children: Iterable[ChildProcess]) -> list[ChildProcess]:
    """Return the children that exited while a process that they started still runs."""
    exited = {child.process.pid: child for child in children if child.has_exited}
    candidates = {group for group in exited if _group_exists(group)}
    if not candidates:
        return []
    return [exited[group] for group in sorted(_groups_with_live_members(candidates))]


def _group_exists(group: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return False


def _groups_with_live_members(groups: set[int]) -> set[int]:
    """Return the groups, whose leaders have exited, that have a member other than a zombie."""
    if not Path("/proc/self/stat").exists():
        return groups
    living, reused = set(), set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command name before this is in parentheses and may contain anything.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) in groups and state not in b"ZX":
                living.add(int(group))
                # The leaders have exited. If one exists, the kernel has reused its id.
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
        """The ranks that have not exited."""
        return [rank for child, rank in self._ranks.items() if child in self._running]

    def start(self, *, attempt: int) -> None:
        try:
            port = self._start_store()
            for rank in range(self._job.ranks):
                self._start_rank(rank, env=self._job.rank_env(rank, attempt=attempt, port=port))
        except OSError as error:
            started = f"{len(self._ranks)} of {self._job.ranks}"
            raise RanksFailed(f"cannot start ranks: {error} ({started} started)") from error

    def is_running(self, child: ChildProcess) -> bool:
        """Whether a child belongs to this attempt and has not exited."""
        return child in self._running

    def rank_of(self, child: ChildProcess) -> int | None:
        return self._ranks.get(child)

    def release(self, child: ChildProcess) -> None:
        """Record that a child exited."""
        self._running.discard(child)
        if not with_orphans([child]):
            self._guard.remove(child)

    def final_output(self, rank: int | None) -> list[str]:
        """Return the traceback or the last lines of a rank, or of the store."""
        return self._reports[rank].final_output()

    def orphans(self) -> list[ChildProcess]:
        """Return the ranks that exited while a process that they started still runs."""
        return with_orphans(self._ranks)

    def is_gone(self) -> bool:
        """Whether neither a child nor a process that it started still runs."""
        return not self._running and not self.orphans()

    def send(self, number: int) -> None:
        for child in self._ranks:
            child.send(number)

    def send_to_orphans(self, number: int) -> None:
        for child in self.orphans():
            child.send_to_group(number)

    def kill(self) -> None:
        """Kill everything that still runs, including the store."""
        for child in {*self._running, *self.orphans()}:
            child.send_to_group(signal.SIGKILL)

    def _start_store(self) -> int:
        store, port = start_store(env=self._job.environ, events=self._events)
        self._register(store, None, OutputSource("[store] ", is_error=True))
        return port

    def _start_rank(self, rank: int, *, env: dict[str, str]) -> None:
        child = start_process(
            f"rank {rank}",
            self._job.command,
            env=env,
            events=self._events,
            # Rank 0 keeps the terminal, so that a debugger works there.
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )
        self._ranks[child] = rank
        label = f"[rank {rank}] " if self._job.prefix else ""
        self._register(child, rank, OutputSource(label, is_error=True, rank=rank))

    def _register(self, child: ChildProcess, rank: int | None, source: OutputSource) -> None:
        self._guard.add(child)
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


@dataclass(frozen=True, kw_only=True)
class SupervisorTiming:
    """Time constants of the supervisor, in seconds."""

    duplicate_signal_window: float = 0.5
    """The same signal within this time is the same request: `timeout` and some schedulers signal
    a process and then its process group, too."""
    orphan_poll_interval: float = 0.02
    """Interval of looking for orphans: the kernel reports the exit of own children only."""
    kill_timeout: float = 5.0
    """A process that survives SIGKILL for this long is blocked in the kernel and abandoned."""
    drain_timeout: float = 5.0
    """Output that the terminal has not accepted after this time is dropped."""


def supervise(job: Job, *, screen: Screen, timing: SupervisorTiming | None = None) -> Outcome:
    """Run a job to its end, restarting it as often as it allows."""
    timing = timing or SupervisorTiming()
    events: SimpleQueue[SupervisorEvent] = SimpleQueue()
    with _signals_into(events), OrphanGuard(grace=job.grace) as guard:
        for number in range(job.max_restarts + 1):
            pump = OutputPump(screen)
            outcome = _Attempt(
                job, number, events=events, guard=guard, pump=pump, timing=timing
            ).run()
            if outcome.first is None or outcome.signal is not None:
                break
    return outcome


@contextmanager
def _signals_into(events: SimpleQueue[SupervisorEvent]) -> Iterator[None]:
    """Turn stop signals into events."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers in the main thread only
        return

    def put(number: int, _: object) -> None:
        # A SimpleQueue is reentrant, unlike a Queue, so a handler may fill it.
        events.put(SignalReceived(number, time.monotonic()))

    # Ignored signals stay ignored: nohup and background jobs of a shell rely on it.
    handled = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    previous = {each: signal.signal(each, put) for each in handled}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class _Attempt:
    """One attempt: all ranks are started together, watched, and stopped together."""

    def __init__(
        self,
        job: Job,
        number: int,
        *,
        events: SimpleQueue[SupervisorEvent],
        guard: OrphanGuard,
        pump: OutputPump,
        timing: SupervisorTiming,
    ) -> None:
        self._job = job
        self._number = number
        self._events = events
        self._pump = pump
        self._timing = timing
        self._processes = AttemptProcesses(job, events=events, guard=guard, pump=pump)
        self._exits: list[RankExit] = []
        self._began = time.monotonic()
        self._deadline: float | None = None
        self._signal: SignalReceived | None = None
        self._stop_requested_at: float | None = None
        """When the ranks were first asked to stop; later exits are not failures."""
        self._is_killing = False

    def run(self) -> Outcome:
        try:
            self._processes.start(attempt=self._number)
            self._pump.start()
            self._wait_until(lambda: not self._processes.running)
        finally:
            self._stop()
            self._announce_restart()
            self._pump.finish(timeout=self._timing.drain_timeout)
        return self._outcome()

    def _wait_until(self, condition: Callable[[], bool], *, poll: float | None = None) -> None:
        """Handle events until the condition holds or the deadline has passed."""
        while not condition():
            remaining = None if self._deadline is None else self._deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            waits = [each for each in (remaining, poll) if each is not None]
            try:
                event = self._events.get(timeout=min(waits, default=None))
            except Empty:
                continue
            if isinstance(event, SignalReceived):
                self._on_signal(event)
            elif self._processes.is_running(event.child):
                self._on_exit(event)

    def _on_exit(self, event: ProcessExited) -> None:
        rank = self._processes.rank_of(event.child)
        was_terminated = self._stop_requested_at is not None and event.at >= self._stop_requested_at
        self._processes.release(event.child)
        if rank is None and was_terminated:
            return
        exit_ = RankExit(
            rank=rank,
            # A store that exits before the ranks has failed, whatever its code.
            code=event.code or (1 if rank is None else 0),
            at=event.at - self._began,
            was_terminated=was_terminated,
        )
        is_first = exit_.failed and not any(each.failed for each in self._exits)
        self._exits.append(exit_)
        if is_first and self._stop_requested_at is None:
            self._on_failure(exit_)

    def _on_failure(self, first: RankExit) -> None:
        delay = self._job.grace if first.preempted else self._job.linger
        self._deadline = time.monotonic() + delay
        if self._processes.running and not first.preempted:
            self._pump.write_message(
                f"{first.name} failed: {describe_code(first.code)}; stopping the others"
            )

    def _on_signal(self, event: SignalReceived) -> None:
        if self._is_duplicate(event):
            return
        now = time.monotonic()
        if self._stop_requested_at is not None:
            # A second request: kill now. Killed processes keep their deadline.
            self._deadline = self._deadline if self._is_killing else now
            return
        self._signal = event
        self._stop_requested_at, self._deadline = now, now + self._job.grace
        self._processes.send(event.number)
        self._pump.write_message(
            f"{signal_name(event.number)}: forwarded to the ranks; a second one kills them"
        )

    def _is_duplicate(self, event: SignalReceived) -> bool:
        first = self._signal
        if first is None or event.number != first.number:
            return False
        # By time of arrival: under load an event may wait in the queue.
        return event.at < first.at + self._timing.duplicate_signal_window

    def _stop(self) -> None:
        """Stop what still runs: ranks first, so that they can stop what they started."""
        processes = self._processes
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._deadline = self._stop_requested_at + self._job.grace
        processes.send(signal.SIGTERM)
        self._wait_until(lambda: not processes.running)
        processes.send_to_orphans(signal.SIGTERM)
        poll = self._timing.orphan_poll_interval
        self._wait_until(lambda: not processes.running and not processes.orphans(), poll=poll)
        self._is_killing, self._deadline = True, time.monotonic() + self._timing.kill_timeout
        processes.kill()
        self._wait_until(processes.is_gone, poll=poll)

    def _announce_restart(self) -> None:
        has_failed = Outcome(exits=self._exits).first is not None
        if has_failed and self._signal is None and self._number < self._job.max_restarts:
            total = self._job.max_restarts + 1
            self._pump.write_message(f"restarting all ranks: attempt {self._number + 2} of {total}")

    def _outcome(self) -> Outcome:
        exits = [
            replace(each, final_output=self._processes.final_output(each.rank))
            if each.code
            else each
            for each in sorted(self._exits, key=lambda each: each.at)
        ]
        number = None if self._signal is None else self._signal.number
        return Outcome(exits=exits, signal=number, attempts=self._number + 1)
