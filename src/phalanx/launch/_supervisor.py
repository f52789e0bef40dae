"""The supervisor: starts the ranks, watches them, and makes sure they end together.

Everything that happens arrives in one queue: a child has exited (put there by a thread that
waits for it), the launcher received a signal, or, in an elastic run, a worker sent a message or a
client a request. The supervisor handles one event at a time, under a deadline if there is one:

- a rank fails: the others get `linger` seconds to report, then they are stopped;
- a signal arrives: it is forwarded to the ranks (as SIGTERM in an elastic run), which get `grace`
  seconds; a second signal kills them, unless it is a duplicate of the first;
- a rank exits after a preemption request: the others get `grace` seconds to do the same;
- the job's timeout passes: the ranks print their stacks and are stopped;
- stopping: SIGTERM to each rank, then to the processes it left behind, SIGKILL after `grace`
  seconds.

A restart policy decides which ranks run. In an elastic run it may also do without a rank that
died: what that rank left behind is killed, and a replacement started in the same attempt. A standby
is a process that waits to become a rank; until then it does not count as one of the attempt.

Each rank leads a session of its own. So Ctrl-C at the terminal reaches only the launcher, and
whatever a rank starts is found by its process group. If the launcher itself is killed, the
orphan guard kills the ranks.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

from .._signals import signal_name
from ..env import ElasticEnv
from ..errors import RanksFailed
from . import _orphan_guard
from ._child_process import ChildProcess, ProcessExited, RecordedExit, with_orphans
from ._control_socket import ControlRequest, ControlServer
from ._error_reports import ErrorReportFilter
from ._job import OWN_VARIABLES, Job
from ._outcome import Outcome, RankExit, describe_code
from ._output import OutputPump, OutputSource, Screen
from ._restart_policy import (
    START_RETRY_INTERVAL,
    ReplaceLost,
    RestartPolicy,
    RestartTogether,
)
from ._run_directory import run_directory
from ._standby import encode_assignment, standby_command
from ._worker_channel import ChannelReader, WorkerChannel

_MAX_LOST_STANDBYS = 3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class SupervisorTiming:
    """Time constants of the supervisor, in seconds."""

    duplicate_signal_window: float = 0.5
    """The same signal within this time is the same request: `timeout` and some schedulers signal
    a process and then its process group, too."""
    orphan_grace: float = 8.0
    """What a lost rank of an elastic run has started ends by itself within this time, or is killed.
    Workers of torch's data loaders look for their parent every 5 s; one that is killed while it
    sends a batch leaves that in shared memory."""
    orphan_poll_interval: float = 0.02
    """Interval of looking for orphans: the kernel reports the exit of own children only. Ten times
    as long while the ranks run."""
    kill_timeout: float = 5.0
    """A process that survives SIGKILL for this long is blocked in the kernel and abandoned."""
    stack_timeout: float = 2.0
    """Ranks that have not printed their stacks after this time are stopped without."""
    drain_timeout: float = 5.0
    """Output that the terminal has not accepted this long after the end of the run is dropped."""
    quorum_timeout: float = 60.0
    """An elastic run with too few members for this time starts over. Longer if its ranks take
    longer to start."""
    elastic_orphan_grace: float = 1.0
    """If the launcher is killed, ranks of an elastic run are killed after at most this time: the
    others must not wait for a worker that is never replaced."""


class _SignalReceived(NamedTuple):
    number: int
    at: float  # on the monotonic clock


@dataclass(frozen=True)
class _Standby:
    """A process that waits to become a rank."""

    process: subprocess.Popen[bytes]
    channel: WorkerChannel
    descriptor: int  # the worker's end of the channel, in that process
    env: dict[str, str]

    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def assign(self, env: dict[str, str]) -> None:
        """Make it a rank with this environment; raise OSError if it has died."""
        if self.has_exited():
            raise ChildProcessError("the standby has exited")
        self.channel.send(encode_assignment(self.env, env))

    def end(self, timeout: float) -> bool:
        """Kill it; return whether it has exited."""
        if not self.has_exited():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it is blocked in the kernel
                self.process.wait(timeout)
        self.channel.shut_down()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return self.has_exited()


_Event = ProcessExited | _SignalReceived | WorkerChannel | ControlRequest
_Events = SimpleQueue[_Event]
"""A channel is the event that it has messages."""


def supervise(job: Job, *, screen: Screen, timing: SupervisorTiming | None = None) -> Outcome:
    """Run a job to its end, restarting it as often as it allows."""
    timing = timing or SupervisorTiming()
    events: _Events = SimpleQueue()
    is_elastic = job.min_ranks is not None
    grace = min(job.grace, timing.elastic_orphan_grace) if is_elastic else job.grace
    with (
        standard_descriptors(),
        _signals_into(events),
        _orphan_guard_process(grace=grace, mark=job.mark) as guard,
        _output_pump(screen, timeout=timing.drain_timeout) as pump,
        _restart_policy(job, events, timing) as (policy, channels),
    ):
        began = time.monotonic()
        for number in count():
            attempt = _Attempt(job, number, policy, channels, events, guard, pump, timing, began)
            outcome = attempt.run()
            if outcome.signal is not None or not policy.wants_restart(outcome):
                break
            if not is_elastic:  # there a loss in one attempt can be the cause of a later failure
                began = time.monotonic()
    if outcome.signal is None:
        # One that came after the last rank had ended is the caller's to handle.
        outcome = replace(outcome, signal=_unhandled_signal(events))
    return outcome


@contextmanager
def _restart_policy(
    job: Job, events: _Events, timing: SupervisorTiming
) -> Iterator[tuple[RestartPolicy, ChannelReader | None]]:
    """Yield the policy of a run. If it is elastic, also read channels and serve requests."""
    if job.min_ranks is None:
        yield RestartTogether(job.world_size, max_restarts=job.max_restarts or 0), None
        return
    with run_directory(job.script, min_ranks=job.min_ranks) as directory:
        policy = ReplaceLost(
            job.world_size,
            run=directory.info,
            max_restarts=job.max_restarts,
            grace=job.grace,
            quorum_timeout=timing.quorum_timeout,
            keeps_standby=job.keeps_standby,
        )
        with (
            closing(ChannelReader(events.put)) as channels,
            closing(ControlServer(directory.socket, events.put)),
        ):
            yield policy, channels


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

    # Python runs handlers between instructions of the main thread, which may be about to wait for
    # an event, and once for all signals of a number that have come by then. What the kernel calls
    # writes each to the wakeup descriptor at once, so a thread that reads it misses none.
    _register_signal_reset()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Ignored signals stay ignored: nohup and background jobs of a shell rely on it.
    handled = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]

    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read() -> None:
        while True:
            for number in os.read(reader, 64):
                if number == 0:  # the end; not end of file, which a forked child would delay
                    return
                if number in handled:
                    events.put(_SignalReceived(number, time.monotonic()))
                elif previous_writer != -1:
                    with suppress(OSError):
                        os.write(previous_writer, bytes([number]))

    thread = threading.Thread(target=read, name="phalanx-signals", daemon=True)
    thread.start()
    try:
        for each in handled:
            _replaced_handlers[each] = signal.signal(each, _leave_to_wakeup)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # The kernel would reap the children, and their exit codes would be lost.
            _replaced_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        try:
            _restore_handlers()
        finally:
            signal.set_wakeup_fd(previous_writer)
            os.write(writer, b"\0")
            thread.join()
            os.close(writer)
            os.close(reader)


_replaced_handlers: dict[int, Any] = {}
"""Of the process, while a launcher handles its signals."""


def _restore_handlers() -> None:
    while _replaced_handlers:
        number, handler = _replaced_handlers.popitem()
        if handler is not None:  # not installed from Python
            signal.signal(number, handler)


@functools.cache
def _register_signal_reset() -> None:
    """Give processes that the caller's program forks meanwhile their own signals."""

    def reset() -> None:
        if _replaced_handlers:
            signal.set_wakeup_fd(-1)
            _restore_handlers()

    os.register_at_fork(after_in_child=reset)


def _leave_to_wakeup(number: int, frame: object) -> None:
    """Handle a signal in the thread that reads the wakeup descriptor."""


@contextmanager
def _orphan_guard_process(*, grace: float, mark: str) -> Iterator[IO[bytes]]:
    """Run the process that kills the ranks if the launcher is killed; yield its stdin."""
    # -I and -S: no user code is loaded, and it starts as fast as a bare interpreter.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _orphan_guard.__file__, str(grace), mark],
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


@contextmanager
def _output_pump(screen: Screen, *, timeout: float) -> Iterator[OutputPump]:
    pump = OutputPump(screen)
    pump.start()
    try:
        yield pump
    finally:
        pump.finish(timeout=timeout)


class _Attempt:
    """One attempt: all ranks are started together, watched, and stopped together.

    In an elastic run the policy may also go on without a rank, and start others.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        policy: RestartPolicy,
        channels: ChannelReader | None,
        events: _Events,
        guard: IO[bytes],
        pump: OutputPump,
        timing: SupervisorTiming,
        began: float,
    ) -> None:
        self._job = job
        self._number = number
        self._is_starting = True
        self._policy = policy
        self._channels = channels
        self._events = events
        self._guard = guard
        self._pump = pump
        self._timing = timing
        self._children: list[ChildProcess] = []
        self._running: set[ChildProcess] = set()
        self._seen_errors: dict[tuple[str, ...], int] = {}
        self._exits: list[RecordedExit] = []
        self._began = began  # the time from which exits are counted
        self._deadline = None if job.timeout is None else time.monotonic() + job.timeout
        self._timed_out = False
        self._signal: _SignalReceived | None = None
        self._stop_requested_at: float | None = None
        """When the ranks were first asked to stop; later exits are not failures."""
        self._is_killing = False
        self._is_urgent = False
        """A second signal: nothing is waited for."""
        self._is_over = False
        """The policy has ended the attempt."""
        self._is_killed = False
        """The policy has ended it for another one."""
        self._orphaned: dict[ChildProcess, float] = {}
        """Lost ranks, and when to kill what they have started."""
        self._next_orphan_check = 0.0
        self._standby: _Standby | None = None
        self._lost_standbys = 0  # that died before they were needed

    def run(self) -> Outcome:
        try:
            self._start_all()
            self._wait_until(
                lambda: self._is_over or (self._ranks_exited() and not self._policy.is_waiting)
            )
            self._check_timeout()
        finally:
            self._stop()
            self._pump.drain(timeout=self._timing.drain_timeout)
        exits = sorted((each.with_output() for each in self._exits), key=lambda each: each.at)
        number = None if self._signal is None else self._signal.number
        timeout = self._job.timeout if self._timed_out else None
        return Outcome(
            exits=exits,
            signal=number,
            timeout=timeout,
            attempts=self._number + 1,
            restarts=self._policy.restarts,
            was_starting_over=number is not None and self._policy.is_starting_over,
        )

    def _start_all(self) -> None:
        try:
            if self._number == 0 or self._channels is None:
                self._start_store()
            elif not self._retry_store():
                return
            self._policy.begin(self, time.monotonic())
            self._is_starting = False
        except OSError as error:
            started = f"{len(self._children[1:])} of {self._policy.ranks} started"
            raise RanksFailed(f"could not start all ranks ({started}): {error}") from error

    def _start_store(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            fd, self._port = listener.fileno(), listener.getsockname()[1]
            # -P: do not import a queue.py from the user's working directory.
            command = [sys.executable, "-P", "-m", "phalanx.launch._store_server", str(fd)]
            env = self._job.store_env()
            self._start(None, command, env=env, stdin=subprocess.DEVNULL, pass_fds=[fd])

    def _retry_store(self) -> bool:
        """Start the store of an elastic run that starts over, when the system has what it takes.

        Return False if a signal stops the run meanwhile.
        """
        while self._signal is None:
            try:
                self._start_store()
                return True
            except OSError as error:
                again = f"trying again in {START_RETRY_INTERVAL:g} s"
                self.show(f"could not start the store: {error}; {again}")
            self._await_signal(START_RETRY_INTERVAL)
        return False

    def _await_signal(self, timeout: float) -> None:
        due = time.monotonic() + timeout
        self._wait_until(
            lambda: self._signal is not None or time.monotonic() >= due, poll=timeout / 10
        )

    def start_rank(self, rank: int, *, incarnation: int) -> None:
        """Start a rank; raise OSError if that fails."""
        if self._use_standby(rank, incarnation):
            return
        job, channel = self._job, None if self._channels is None else self._channels.open()
        fds = [*job.rank_descriptors(rank)]
        descriptor = None if channel is None else channel.worker_fd
        if descriptor is not None:
            fds.append(descriptor)
        env = self._rank_env(rank, incarnation, descriptor)
        # Rank 0 keeps the terminal, so that a debugger works there.
        stdin = None if rank == 0 else subprocess.DEVNULL
        command = job.rank_command(rank)
        try:
            self._start(rank, command, channel, env=env, stdin=stdin, pass_fds=fds)
        except OSError:
            if channel is not None:
                channel.shut_down()
            raise
        finally:
            if channel is not None:
                channel.close_worker_end()

    def _rank_env(self, rank: int, incarnation: int, channel: int | None) -> dict[str, str]:
        job, elastic = self._job, None
        if channel is not None:
            assert job.min_ranks is not None
            elastic = ElasticEnv(
                worker=f"{rank}.{incarnation}",
                store=f"127.0.0.1:{self._port}",
                ranks=self._policy.ranks,
                min_ranks=job.min_ranks,
                has_begun=self._policy.has_begun,
                is_initial=self._is_starting,
                channel=channel,
            )
        return job.rank_env(rank, attempt=self._number, port=self._port, elastic=elastic)

    def prepare_standby(self) -> None:
        """Start a process that becomes the next rank to be started, unless there is one."""
        if self._standby is not None and self._standby.has_exited():
            code = self._standby.process.returncode
            self._end_standby()
            self._lost_standbys += 1
            if self._lost_standbys == _MAX_LOST_STANDBYS:
                self.show(f"the standby was lost: {describe_code(code)}; not replaced any more")
        if self._standby is None and self._lost_standbys < _MAX_LOST_STANDBYS:
            # Without it, a rank that is lost is started as usual, if that is possible.
            with suppress(OSError):
                self._standby = self._start_standby()

    def _start_standby(self) -> _Standby:
        assert self._channels is not None, "the run is elastic"
        channel = self._channels.open()
        descriptor = channel.worker_fd
        rank_env = self._rank_env(0, 0, descriptor)
        env = {name: rank_env[name] for name in rank_env if name not in OWN_VARIABLES}
        command = standby_command(self._job.command, descriptor)
        try:
            process = self._spawn(command, env=env, pass_fds=[descriptor])
        except OSError:
            channel.shut_down()
            raise
        finally:
            channel.close_worker_end()
        return _Standby(process, channel, descriptor, env)

    def _use_standby(self, rank: int, incarnation: int) -> bool:
        """Make the standby a rank; return False if there is none."""
        standby = self._standby
        if standby is None:
            return False
        try:
            standby.assign(self._rank_env(rank, incarnation, standby.descriptor))
        except OSError:
            self._end_standby()
            return False
        self._standby = None
        try:
            self._register(rank, standby.process, standby.channel)
        except OSError:
            standby.channel.shut_down()
            raise
        return True

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None and standby.end(self._timing.kill_timeout):
            self._tell_guard(f"-{standby.process.pid}")

    def send(self, rank: int, number: int) -> None:
        """Signal a rank."""
        for child in self._running:
            if child.rank == rank:
                child.send(number)

    def find_pid(self, rank: int) -> int | None:
        """Return the process of a rank that runs."""
        return next((each.process.pid for each in self._running if each.rank == rank), None)

    def fail(self, cause: RecordedExit, message: str) -> None:
        """Stop the attempt. The exit is the first cause."""
        self._record(cause, message)

    def finish(self) -> None:
        """Stop the attempt. The run has succeeded."""
        self._is_over = True
        self._policy.stop(is_preemption=False)

    def kill(self) -> None:
        """End the attempt immediately, for another one."""
        self.finish()
        self._is_killed = True
        self._stop_requested_at = self._deadline = time.monotonic()

    def show(self, message: str) -> None:
        """Print a message of the launcher."""
        self._pump.write_message(message)

    def _start(
        self,
        rank: int | None,
        command: Sequence[str],
        channel: WorkerChannel | None = None,
        **options: Any,
    ) -> None:
        """Start a rank or the store in a new session; its exit becomes an event."""
        process = self._spawn(command, is_store=rank is None, **options)
        self._register(rank, process, channel)

    def _spawn(
        self, command: Sequence[str], *, is_store: bool = False, **options: Any
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            **options,
        )
        self._tell_guard(f"{'=' if is_store else '+'}{process.pid}")
        return process

    def _register(
        self, rank: int | None, process: subprocess.Popen[bytes], channel: WorkerChannel | None
    ) -> None:
        """Show the output of a process, and make its exit an event."""
        job = self._job
        reports = ErrorReportFilter(
            self._seen_errors, rank, labelled=job.prefix, full=job.full_tracebacks
        )
        child = ChildProcess(rank, process, reports, channel)
        self._children.append(child)
        self._running.add(child)
        label = "[store] " if rank is None else f"[rank {rank}] " if job.prefix else ""
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            self._pump.add(process.stdout, OutputSource(label, rank=rank))
            self._pump.add(process.stderr, OutputSource(label, is_error=True, rank=rank), reports)
            child.watch(self._events.put)
        except (OSError, RuntimeError) as error:  # there is no descriptor or thread left
            self._children.remove(child)
            self._running.discard(child)
            child.send_to_group(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._timing.kill_timeout)
            self._tell_guard(f"-{process.pid}")
            raise OSError(str(error)) from error

    def _tell_guard(self, line: str) -> None:
        with suppress(BrokenPipeError):
            self._guard.write(f"{line}\n".encode())

    def _ranks_exited(self) -> bool:
        return all(child.rank is None for child in self._running)

    def _orphans(self) -> list[ChildProcess]:
        return with_orphans(child for child in self._children if child.rank is not None)

    def _wait_until(self, condition: Callable[[], bool], *, poll: float | None = None) -> None:
        """Handle events until the condition holds or the deadline has passed."""
        while not condition():
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                return
            dues = (self._deadline, self._policy.next_due())
            waits = [max(0.0, due - now) for due in dues if due is not None]
            if self._orphaned:
                self._end_orphaned(now)
                waits.append(max(0.0, self._next_orphan_check - now))
            if poll is not None:
                waits.append(poll)
            try:
                event = self._events.get(timeout=min([*waits, threading.TIMEOUT_MAX]))
            except Empty:
                # Only now: what has happened counts before what is due.
                self._policy.on_time(time.monotonic())
                continue
            self._handle(event)

    def _handle(self, event: _Event) -> None:
        if isinstance(event, _SignalReceived):
            self._on_signal(event)
        elif isinstance(event, ControlRequest):
            if event.reply.set_running_or_notify_cancel():  # the client still waits
                event.reply.set_result(self._policy.answer(event.fields, time.monotonic()))
        elif isinstance(event, WorkerChannel):
            self._receive_messages()
        elif event.child in self._running:  # not one of an earlier attempt
            self._on_exit(event)

    def _receive_messages(self) -> None:
        now = time.monotonic()
        for child in self._running:
            if child.channel is not None and child.rank is not None:
                for message in child.channel.receive():
                    self._policy.on_message(child.rank, message, now)

    def _on_exit(self, event: ProcessExited) -> None:
        child, requested = event.child, self._stop_requested_at
        rank, code = child.rank, child.reap()
        # Of all ranks: what the others wrote before this exit counts before it, too.
        self._receive_messages()
        self._running.discard(child)
        failed_at = None if child.channel is None else child.channel.failed_at
        at = event.at if failed_at is None else min(failed_at, event.at)
        was_terminated = requested is not None and at >= requested
        if failed_at is not None and code < 0 and requested is not None and not was_terminated:
            code = 1  # it was still ending because of its exception when it was killed
        result = RankExit(
            rank=rank,
            # A store that exits before the ranks has failed, whatever its code.
            code=code or (1 if rank is None else 0),
            at=at - self._began,
            was_terminated=was_terminated,
        )
        exit_, is_orderly = RecordedExit(result, child.reports), True
        if child.channel is not None:
            # Before it has an ElasticRun, an exit code is that of an exception.
            is_orderly = child.channel.has_ended or child.channel.is_silent
            child.channel.shut_down()
        now = time.monotonic()
        is_handled = rank is not None and self._policy.on_exit(exit_, now, is_orderly=is_orderly)
        orphans = with_orphans([child])
        if not orphans:
            # The group is empty, so the kernel may reuse its id.
            self._tell_guard(f"-{child.process.pid}")
        if is_handled:
            self._children.remove(child)
            self._orphaned |= dict.fromkeys(orphans, now + self._timing.orphan_grace)
        elif rank is not None or not was_terminated:
            self._record(exit_)

    def _end_orphaned(self, now: float) -> None:
        """Kill what lost ranks have started and has not ended in time; forget what has."""
        if now < self._next_orphan_check:
            return
        self._next_orphan_check = now + 10 * self._timing.orphan_poll_interval
        living = with_orphans(self._orphaned)
        for child, due in [*self._orphaned.items()]:
            if child not in living:
                self._tell_guard(f"-{child.process.pid}")  # the kernel may reuse its id
                del self._orphaned[child]
            elif now >= due:
                child.send_to_group(signal.SIGKILL)

    def _record(self, exit_: RecordedExit, message: str = "") -> None:
        """Add an exit to the outcome; the first failure gives the others a deadline."""
        result, is_first = exit_.result, not self._has_failed()
        self._exits.append(exit_)
        is_cause = is_first and (result.failed or result.preempted)
        if is_cause and self._stop_requested_at is None:
            self._policy.stop(is_preemption=result.preempted)
            delay = self._job.grace if result.preempted else self._job.linger
            self._deadline = time.monotonic() + delay
            if not self._ranks_exited() and not result.preempted:
                message = message or self._describe_failure(result)
                self.show(f"{message}; stopping the others")

    def _describe_failure(self, result: RankExit) -> str:
        """Describe the first failure: this exit, or one that a rank has reported and ends from."""
        reported = {
            each.channel.failed_at - self._began: each.rank
            for each in self._running
            if each.channel is not None and each.channel.failed_at is not None
        }
        first = min(reported, default=result.at)
        if first < result.at:
            return f"rank {reported[first]} failed: uncaught exception"
        return f"{result.name} failed: {describe_code(result.code)}"

    def _has_failed(self) -> bool:
        return any(each.result.failed or each.result.preempted for each in self._exits)

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
        if self._is_killed and first is None:
            self._signal = event  # the ranks are being killed
            self.show(
                f"{signal_name(event.number)}: not restarting; a second one kills what still runs"
            )
            return
        if self._stop_requested_at is not None:
            # A second request: kill now. Killed processes keep their deadline.
            self._signal = first or event
            self._is_urgent = True
            self._deadline = self._deadline if self._is_killing else now
            return
        self._signal = event
        self._policy.stop(is_preemption=True)
        self._stop_requested_at = now
        self._deadline = now + self._job.grace
        # Elastic workers leave, and save, on SIGTERM. Others choose what they do on each.
        is_elastic = self._job.min_ranks is not None
        self._send_to_ranks(signal.SIGTERM if is_elastic else event.number)
        what = "asking the ranks to leave" if is_elastic else "forwarded to the ranks"
        self.show(f"{signal_name(event.number)}: {what}; a second one kills them")

    def _check_timeout(self) -> None:
        """If the job's own deadline has passed, and not one that replaced it, ask for stacks."""
        is_stopping = self._is_over or self._signal is not None or self._has_failed()
        if self._ranks_exited() or is_stopping:
            return
        self._timed_out = True
        self._policy.stop(is_preemption=False)
        self.show(f"timed out after {self._job.timeout:g} s; stopping the ranks")
        if self._job.stack_signal is not None:
            # Alone: the kernel would let a fatal signal end a rank before the handler of this one.
            self._stop_requested_at = time.monotonic()
            self._deadline = self._stop_requested_at + self._timing.stack_timeout
            self._send_to_ranks(self._job.stack_signal)
            self._wait_until(self._ranks_exited)
            self._deadline = time.monotonic() + self._job.grace

    def _stop(self) -> None:
        """Stop what still runs: ranks first, so that they can stop what they started."""
        self._policy.stop(is_preemption=False)
        self._end_standby()
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._deadline = self._stop_requested_at + self._job.grace
        self._send_to_ranks(signal.SIGTERM)
        self._wait_until(self._ranks_exited)
        for child in self._orphans():
            child.send_to_group(signal.SIGTERM)
        poll = self._timing.orphan_poll_interval
        self._wait_until(lambda: self._ranks_exited() and not self._orphans(), poll=poll)
        if self._orphaned and not self._is_urgent:
            self._deadline = max(self._orphaned.values())
            self._wait_until(lambda: not self._orphaned)
        self._is_killing = True
        self._deadline = time.monotonic() + self._timing.kill_timeout
        for child in {*self._running, *self._orphans(), *self._orphaned}:
            child.send_to_group(signal.SIGKILL)
        self._wait_until(
            lambda: not self._running and not self._orphans() and not self._orphaned, poll=poll
        )

    def _send_to_ranks(self, number: int) -> None:
        for child in self._children:
            if child.rank is not None:
                child.send(number)
