"""The supervisor: starts the ranks, watches them, and makes sure they end together.

Everything that happens arrives in one queue: a child has exited (put there by a thread that
waits for it), or the launcher received a signal. The supervisor handles one event at a time,
under a deadline if there is one:

- a rank fails: the others get `linger` seconds to report, then they are stopped;
- a signal arrives: it is forwarded to the ranks, which get `grace` seconds; a second signal kills
  them, unless it is a duplicate of the first;
- a rank exits after a preemption request: the others get `grace` seconds to do the same;
- the job's timeout passes: the ranks print their stacks and are stopped;
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

from .._signals import signal_name
from ..errors import RanksFailed
from . import _orphan_guard
from ._error_reports import ErrorReportFilter
from ._job import Job
from ._outcome import Outcome, RankExit, describe_code
from ._output import OutputPump, OutputSource, Screen

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
    stack_timeout: float = 2.0
    """Ranks that have not printed their stacks after this time are stopped without."""
    drain_timeout: float = 5.0
    """Output that the terminal has not accepted after this time is dropped."""


@dataclass(frozen=True, eq=False)
class _Child:
    """A rank or the store; leader of its own session and process group."""

    rank: int | None
    process: subprocess.Popen[bytes]
    reports: ErrorReportFilter

    @property
    def has_exited(self) -> bool:  # processes that it started may still run
        return self.process.returncode is not None

    def send_to_group(self, number: int) -> bool:
        """Signal the process and all that it started; return whether there are any."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
            return True
        return False


class _ProcessExited(NamedTuple):
    child: _Child
    code: int  # negative for the number of a signal
    at: float  # on the monotonic clock


class _SignalReceived(NamedTuple):
    number: int
    at: float  # on the monotonic clock


_Events = SimpleQueue[_ProcessExited | _SignalReceived]


def supervise(job: Job, *, screen: Screen, timing: SupervisorTiming | None = None) -> Outcome:
    """Run a job to its end, restarting it as often as it allows."""
    timing = timing or SupervisorTiming()
    events: _Events = SimpleQueue()
    with (
        standard_descriptors(),
        _signals_into(events),
        _orphan_guard_process(grace=job.grace) as guard,
    ):
        for number in range(job.max_restarts + 1):
            pump = OutputPump(screen)
            if number:
                attempt = f"attempt {number + 1} of {job.max_restarts + 1}"
                pump.write_message(f"restarting all ranks: {attempt}")
            outcome = _Attempt(job, number, events, guard, pump, timing).run()
            if outcome.first_failure is None or outcome.signal is not None:
                break
    if outcome.signal is None:
        # One that came after the last rank had ended is the caller's to handle.
        outcome = replace(outcome, signal=_unhandled_signal(events))
    return outcome


def _unhandled_signal(events: _Events) -> int | None:
    with suppress(Empty):
        while True:
            event = events.get_nowait()
            if isinstance(event, _SignalReceived):
                return event.number
    return None


@contextmanager
def standard_descriptors() -> Iterator[None]:
    """Open those of the descriptors 0 to 2 that are closed.

    Otherwise a descriptor that a child inherits gets one of these numbers, and the child's own
    stdin, stdout or stderr replaces it.
    """
    with ExitStack() as opened:
        while True:
            fd = os.open(os.devnull, os.O_RDWR)
            opened.callback(os.close, fd)
            if fd > 2:
                break
        yield


@contextmanager
def _signals_into(events: _Events) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers in the main thread only
        return

    def put(number: int, _: object) -> None:
        # A SimpleQueue is reentrant, unlike a Queue, so a handler may fill it.
        events.put(_SignalReceived(number, time.monotonic()))

    # Ignored signals stay ignored: nohup and background jobs of a shell rely on it.
    handled = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    previous = {each: signal.signal(each, put) for each in handled}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def _orphan_guard_process(*, grace: float) -> Iterator[IO[bytes]]:
    """Run the process that kills the ranks if the launcher is killed; yield its stdin."""
    # -I and -S: no user code is loaded, and it starts as fast as a bare interpreter.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _orphan_guard.__file__, str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield process.stdin
    finally:
        # Kill it before closing its pipe: end of file means that the launcher died.
        process.kill()
        process.wait()
        process.stdin.close()


def _with_orphans(children: Iterable[_Child]) -> list[_Child]:
    """Return the children that exited while a process that they started still runs."""
    exited = {c.process.pid: c for c in children if c.has_exited and c.send_to_group(0)}
    if not exited or not Path("/proc/self/stat").exists():
        return list(exited.values())
    living, reused = set(), set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command name before this is in parentheses and may contain anything.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) in exited and state not in b"ZX":
                living.add(int(group))
                # The leaders have exited. If one exists, the kernel has reused its id.
                if path.parent.name == group.decode():
                    reused.add(int(group))
    return [exited[group] for group in sorted(living - reused)]


class _Attempt:
    """One attempt: all ranks are started together, watched, and stopped together."""

    def __init__(
        self,
        job: Job,
        number: int,
        events: _Events,
        guard: IO[bytes],
        pump: OutputPump,
        timing: SupervisorTiming,
    ) -> None:
        self._job = job
        self._number = number
        self._events = events
        self._guard = guard
        self._pump = pump
        self._timing = timing
        self._children: list[_Child] = []
        self._running: set[_Child] = set()
        self._seen_errors: dict[tuple[str, ...], int] = {}
        self._exits: list[RankExit] = []
        self._began = time.monotonic()
        self._deadline = None if job.timeout is None else self._began + job.timeout
        self._timed_out = False
        self._signal: _SignalReceived | None = None
        self._stop_requested_at: float | None = None
        """When the ranks were first asked to stop; later exits are not failures."""
        self._is_killing = False

    def run(self) -> Outcome:
        try:
            self._start_all()
            self._pump.start()
            self._wait_until(self._ranks_exited)
            self._check_timeout()
        finally:
            self._stop()
            self._pump.finish(timeout=self._timing.drain_timeout)
        reports = {child.rank: child.reports for child in self._children}
        exits = [
            replace(each, final_output=reports[each.rank].final_output()) if each.code else each
            for each in sorted(self._exits, key=lambda each: each.at)
        ]
        number = None if self._signal is None else self._signal.number
        timeout = self._job.timeout if self._timed_out else None
        return Outcome(exits=exits, signal=number, timeout=timeout, attempts=self._number + 1)

    def _start_all(self) -> None:
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
                fd, port = listener.fileno(), listener.getsockname()[1]
                # -P: do not import a queue.py from the user's working directory.
                command = [sys.executable, "-P", "-m", "phalanx.launch._store_server", str(fd)]
                env = self._job.environ
                self._start(None, command, env=env, stdin=subprocess.DEVNULL, pass_fds=[fd])
            for rank in range(self._job.world_size):
                env = self._job.rank_env(rank, attempt=self._number, port=port)
                # Rank 0 keeps the terminal, so that a debugger works there.
                stdin = None if rank == 0 else subprocess.DEVNULL
                fds = self._job.rank_descriptors(rank)
                arguments = self._job.rank_command(rank)
                self._start(rank, arguments, env=env, stdin=stdin, pass_fds=fds)
        except OSError as error:
            started = f"{len(self._children[1:])} of {self._job.world_size} started"
            raise RanksFailed(f"could not start all ranks ({started}): {error}") from error

    def _start(self, rank: int | None, command: Sequence[str], **options: Any) -> None:
        """Start a rank or the store in a new session; its exit becomes an event."""
        job = self._job
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            **options,
        )
        reports = ErrorReportFilter(
            self._seen_errors, rank, labelled=job.prefix, full=job.full_tracebacks
        )
        child = _Child(rank, process, reports)

        def wait() -> None:
            code = process.wait()
            self._events.put(_ProcessExited(child, code, time.monotonic()))

        name = "store" if rank is None else f"rank {rank}"
        threading.Thread(target=wait, name=f"phalanx-wait-{name}", daemon=True).start()
        self._children.append(child)
        self._running.add(child)
        self._tell_guard(f"+{process.pid}")
        label = f"[{name}] " if rank is None or job.prefix else ""
        assert process.stdout is not None
        assert process.stderr is not None
        self._pump.add(process.stdout, OutputSource(label, rank=rank))
        self._pump.add(process.stderr, OutputSource(label, is_error=True, rank=rank), reports)

    def _tell_guard(self, line: str) -> None:
        with suppress(BrokenPipeError):
            self._guard.write(f"{line}\n".encode())

    def _ranks_exited(self) -> bool:
        return all(child.rank is None for child in self._running)

    def _orphans(self) -> list[_Child]:
        return _with_orphans(child for child in self._children if child.rank is not None)

    def _wait_until(self, condition: Callable[[], bool], *, poll: float | None = None) -> None:
        """Handle events until the condition holds or the deadline has passed."""
        while not condition():
            remaining = None if self._deadline is None else self._deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            # SimpleQueue raises OverflowError above TIMEOUT_MAX.
            waits = [each for each in (remaining, poll, threading.TIMEOUT_MAX) if each is not None]
            try:
                event = self._events.get(timeout=min(waits))
            except Empty:
                continue
            if isinstance(event, _SignalReceived):
                self._on_signal(event)
            elif event.child in self._running:  # not one of an earlier attempt
                self._on_exit(event)

    def _on_exit(self, event: _ProcessExited) -> None:
        rank, requested = event.child.rank, self._stop_requested_at
        was_terminated = requested is not None and event.at >= requested
        self._running.discard(event.child)
        if not _with_orphans([event.child]):
            # The group is empty, so the kernel may reuse its id.
            self._tell_guard(f"-{event.child.process.pid}")
        if rank is None and was_terminated:
            return
        exit_ = RankExit(
            rank=rank,
            # A store that exits before the ranks has failed, whatever its code.
            code=event.code or (1 if rank is None else 0),
            at=event.at - self._began,
            was_terminated=was_terminated,
        )
        is_first = not any(each.failed or each.preempted for each in self._exits)
        self._exits.append(exit_)
        if is_first and (exit_.failed or exit_.preempted) and requested is None:
            delay = self._job.grace if exit_.preempted else self._job.linger
            self._deadline = time.monotonic() + delay
            if not self._ranks_exited() and not exit_.preempted:
                self._pump.write_message(
                    f"{exit_.name} failed: {describe_code(exit_.code)}; stopping the others"
                )

    def _on_signal(self, event: _SignalReceived) -> None:
        first = self._signal
        now = time.monotonic()
        # By time of arrival: under load an event may wait in the queue.
        if (
            first is not None
            and event.number == first.number
            and event.at < first.at + self._timing.duplicate_signal_window
        ):
            return
        if self._stop_requested_at is not None:
            # A second request: kill now. Killed processes keep their deadline.
            self._deadline = self._deadline if self._is_killing else now
            return
        self._signal = event
        self._stop_requested_at = now
        self._deadline = now + self._job.grace
        self._send_to_ranks(event.number)
        self._pump.write_message(
            f"{signal_name(event.number)}: forwarded to the ranks; a second one kills them"
        )

    def _check_timeout(self) -> None:
        """If the job's own deadline has passed, and not one that replaced it, ask for stacks."""
        is_stopping = self._signal is not None or any(
            each.failed or each.preempted for each in self._exits
        )
        if self._ranks_exited() or is_stopping:
            return
        self._timed_out = True
        self._pump.write_message(f"timed out after {self._job.timeout:g} s; stopping the ranks")
        if self._job.stack_signal is not None:
            # Alone: the kernel would let a fatal signal end a rank before the handler of this one.
            self._stop_requested_at = time.monotonic()
            self._deadline = self._stop_requested_at + self._timing.stack_timeout
            self._send_to_ranks(self._job.stack_signal)
            self._wait_until(self._ranks_exited)
            self._deadline = time.monotonic() + self._job.grace

    def _stop(self) -> None:
        """Stop what still runs: ranks first, so that they can stop what they started."""
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._deadline = self._stop_requested_at + self._job.grace
        self._send_to_ranks(signal.SIGTERM)
        self._wait_until(self._ranks_exited)
        for child in self._orphans():
            child.send_to_group(signal.SIGTERM)
        poll = self._timing.orphan_poll_interval
        self._wait_until(lambda: self._ranks_exited() and not self._orphans(), poll=poll)
        self._is_killing = True
        self._deadline = time.monotonic() + self._timing.kill_timeout
        for child in {*self._running, *self._orphans()}:
            child.send_to_group(signal.SIGKILL)
        self._wait_until(lambda: not self._running and not self._orphans(), poll=poll)

    def _send_to_ranks(self, number: int) -> None:
        for child in self._children:
            if child.rank is not None and not child.has_exited:
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, number)
