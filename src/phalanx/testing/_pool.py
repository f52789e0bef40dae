"""`RankPool`: processes as ranks, started once for many runs.

The pool starts one template process, which imports torch and forks the ranks (`_worker`). For
each run it sends every rank a task, then waits for results, deaths and timeouts; for a rank that
cannot report, the pool makes the result. A rank whose body did not return is killed after the
run, since its state is unknown.

One more forked process hosts the store. It is not a rank and has no faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from ..errors import InvalidState, RanksFailed
from ._results import (
    Died,
    Hung,
    RankResult,
    Returned,
    Stopped,
    is_failure,
    is_internal_frame,
    results_or_raise,
)
from ._run import RunDeadline, check_size, ranks_that_may_die
from ._task import (
    CallerEnvironment,
    FunctionReference,
    Task,
    pack_arguments,
    rank_environment,
    unpack_report,
)
from ._worker import DUMP_SIGNAL, host_store
from .faults import Fault

_MAX_OUTPUT_BYTES = 8_000  # of the output of a process
_MAX_STACK_BYTES = 100_000  # of its stack dump
_STORE_HOST = -1  # slot of the process that hosts the store


@dataclass(frozen=True, kw_only=True)
class PoolTiming:
    """Time constants of a pool, in seconds."""

    start_timeout: float = 120.0
    """To import torch and the preloaded modules."""
    store_timeout: float = 60.0
    """To open the store."""
    reap_timeout: float = 10.0
    """From killing a rank to learning its exit status."""
    dump_timeout: float = 2.0
    """To wait for stack dumps."""
    dump_quiet_period: float = 0.05
    """A dump that has not grown for this long is complete."""
    stopped_poll_interval: float = 0.02
    """Interval of checking for stopped ranks: the kernel notifies only their parent."""


_TEMPLATE_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from phalanx.testing import _worker
_worker.template_main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


class ScratchFile:
    """An anonymous file that another process appends to."""

    def __init__(self) -> None:
        # Append mode, because the file position is shared with the other process.
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - closed by close()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def tail(self, limit: int) -> str:
        """Return the last `limit` bytes as text."""
        skipped = max(0, self.size - limit)
        text = os.pread(self.fileno(), limit, skipped).decode(errors="replace")
        return f"({skipped} bytes omitted) ...{text}" if skipped else text

    def clear(self) -> None:
        self._file.truncate(0)

    def close(self) -> None:
        self._file.close()


class RankProcess:
    """The pool's side of a rank process."""

    def __init__(self) -> None:
        self.pid = 0
        self.status: int | None = None
        """The exit status, once it is known."""
        self.output = ScratchFile()
        self.stacks = ScratchFile()
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.theirs = theirs

    def clear(self) -> None:
        self.output.clear()
        self.stacks.clear()

    def send(self, message: bytes) -> None:
        """Send a task; if the process just died, the template reports it."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(message)

    def printed(self) -> str:
        """Return the end of its output."""
        return self.output.tail(_MAX_OUTPUT_BYTES)

    def dumped_stacks(self) -> str:
        """Return its stack dump without the frames of the pool."""
        lines = self.stacks.tail(_MAX_STACK_BYTES).splitlines()
        return "\n".join(
            f"  {line}" for line in lines if not (is_internal_frame(line) or "<string>" in line)
        )

    @property
    def stopped(self) -> bool:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    @property
    def ended(self) -> bool:
        return self.status is not None

    def close(self) -> None:
        self.connection.close()
        self.output.close()
        self.stacks.close()


class TemplateProcess:
    """The process that forks, signals and reaps the ranks."""

    def __init__(self, preload: Sequence[str], timing: PoolTiming) -> None:
        self._timing = timing
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = ScratchFile()
        self._ranks: dict[int, RankProcess] = {}
        # A new session, so that Ctrl-C reaches only the caller.
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), json.dumps(list(preload))]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _TEMPLATE_PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._errors.fileno(),
                stderr=self._errors.fileno(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=rank_environment(),
            )

    def fileno(self) -> int:
        return self._control.fileno()

    def fork(self) -> RankProcess:
        """Fork a new rank process."""
        rank = RankProcess()
        try:
            with rank.theirs:
                files = [rank.theirs.fileno(), rank.output.fileno(), rank.stacks.fileno()]
                self._send({"do": "fork"}, files)
            rank.pid = self._await_fork()
        except BaseException:
            rank.close()
            raise
        self._ranks[rank.pid] = rank
        return rank

    def _await_fork(self) -> int:
        deadline = time.monotonic() + self._timing.start_timeout
        while "forked" not in (message := self._receive(deadline)):
            pass
        return int(message["forked"])

    def send_signal(self, rank: RankProcess, signum: int) -> None:
        self._send({"do": "signal", "rank": rank.pid, "signal": int(signum)})

    def end(self, rank: RankProcess) -> None:
        """Kill a rank and wait until it is reaped."""
        deadline = time.monotonic() + self._timing.reap_timeout
        if not rank.ended:
            self.send_signal(rank, signal.SIGKILL)
        while not rank.ended:
            self._receive(deadline)

    def catch_up(self) -> None:
        """Process pending messages about exited ranks."""
        while wait([self._control], 0):
            self._receive(time.monotonic() + 1)

    def _send(self, request: dict[str, Any], files: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], files)
        except ConnectionError:
            raise self._died() from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        self._control.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = self._control.recv(4096)
        except TimeoutError:
            raise RanksFailed("the template process of the pool does not answer") from None
        except ConnectionError:  # it died before it read the request
            data = b""
        if not data:
            raise self._died()
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            self._ranks.pop(message["ended"]).status = message["status"]
        return message

    def _died(self) -> RanksFailed:
        output = self._errors.tail(_MAX_OUTPUT_BYTES).strip()
        details = f":\n{output}" if output else ""
        return RanksFailed(f"the template process of the pool died{details}")

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(self._timing.reap_timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class ResultCollector:
    """Collects the result of every rank; makes one for ranks that cannot report."""

    def __init__(
        self,
        template: TemplateProcess,
        ranks: Mapping[int, RankProcess],
        *,
        deadline: RunDeadline,
        may_die: Collection[int],
        timing: PoolTiming,
    ) -> None:
        self._template = template
        self._deadline = deadline
        self._may_die = frozenset(may_die)
        self._timing = timing
        self._waiting = dict(ranks)
        self._disconnected: set[int] = set()  # their exit status is still to come
        self._results: dict[int, RankResult] = {}

    def collect(self) -> dict[int, RankResult]:
        """Wait for all ranks, at most until the deadline."""
        while self._waiting and self._deadline.remaining:
            self._wait()
        elapsed = self._deadline.elapsed
        for rank, stacks in self._dump_stacks().items():
            self._record(rank, RankResult(Hung(elapsed, stacks)))
        return self._results

    def _wait(self) -> None:
        connected = [
            process.connection
            for rank, process in self._waiting.items()
            if rank not in self._disconnected
        ]
        only_may_die = self._waiting.keys() <= self._may_die
        pause = self._deadline.remaining
        if only_may_die:
            pause = min(pause, self._timing.stopped_poll_interval)
        wait([*connected, self._template.fileno()], pause)
        self._template.catch_up()
        for rank, process in list(self._waiting.items()):
            self._check_rank(rank, process, only_may_die=only_may_die)

    def _check_rank(self, rank: int, process: RankProcess, *, only_may_die: bool) -> None:
        # A result that was sent before the process died counts.
        if rank not in self._disconnected and process.connection.poll():
            try:
                self._record(rank, unpack_report(process.connection.recv_bytes()))
                return
            except (EOFError, OSError):
                self._disconnected.add(rank)
        if process.status is not None:
            self._record(rank, RankResult(Died(process.status, process.dumped_stacks())))
        elif only_may_die and process.stopped:
            self._record(rank, RankResult(Stopped()))

    def _record(self, rank: int, result: RankResult) -> None:
        del self._waiting[rank]
        self._results[rank] = result
        if is_failure(result.outcome, may_die=rank in self._may_die):
            self._deadline.shorten()

    def _dump_stacks(self) -> dict[int, str]:
        """Return the stacks of the ranks that have not finished."""
        for process in self._waiting.values():
            self._template.send_signal(process, DUMP_SIGNAL)
        running = [process for process in self._waiting.values() if not process.stopped]
        # A dump has no end mark: it is complete when it has not grown for a moment.
        sizes: list[int] = []
        deadline = time.monotonic() + self._timing.dump_timeout
        while running and time.monotonic() < deadline:
            time.sleep(self._timing.dump_quiet_period)
            before, sizes = sizes, [process.stacks.size for process in running]
            if all(sizes) and sizes == before:
                break
        return {
            rank: "  stopped by a signal"
            if process.stopped
            else process.dumped_stacks() or "  no answer, not even from a signal handler"
            for rank, process in self._waiting.items()
        }


class PoolProcesses:
    """A template and the processes forked from it."""

    def __init__(self, preload: Sequence[str], timing: PoolTiming) -> None:
        test_tools = ["pytest"] if "pytest" in sys.modules else []
        self._timing = timing
        self._template = TemplateProcess(["phalanx.groups", *test_tools, *preload], timing)
        self._processes: dict[int, RankProcess] = {}
        self._port = 0
        self._runs = 0
        self._generation = 0

    def run(
        self, task: Task, *, linger: float, may_die: Collection[int]
    ) -> tuple[dict[int, RankResult], dict[int, str]]:
        """Run a task and return the results and the output of the ranks."""
        if self._fill([_STORE_HOST]):
            self._port = self._host_store(task)
        self._fill(range(task.size))
        self._runs += 1
        prefix = f"run {self._runs}"
        task = replace(task, port=self._port, prefix=prefix, generation=self._generation)
        ranks = {rank: self._processes[rank] for rank in range(task.size)}
        return self._run_on(task, ranks, RunDeadline(task.timeout, linger), may_die)

    def _host_store(self, task: Task) -> int:
        host = FunctionReference.of(host_store)
        task = replace(task, body=host, arguments=pack_arguments((), {}), size=1, faults=())
        processes = {0: self._processes[_STORE_HOST]}
        deadline = RunDeadline(self._timing.store_timeout, self._timing.store_timeout)
        reports, outputs = self._run_on(task, processes, deadline, ())
        (port,) = results_or_raise(str(host), reports, outputs=outputs)
        return int(port)

    def _fill(self, slots: Iterable[int]) -> bool:
        """Fork a process for each empty slot and return whether there was one."""
        self._template.catch_up()
        for slot in [slot for slot, process in self._processes.items() if process.ended]:
            self._processes.pop(slot).close()
        empty = [slot for slot in slots if slot not in self._processes]
        for slot in empty:
            self._processes[slot] = self._template.fork()
            self._generation += 1
        return bool(empty)

    def _run_on(
        self,
        task: Task,
        ranks: Mapping[int, RankProcess],
        deadline: RunDeadline,
        may_die: Collection[int],
    ) -> tuple[dict[int, RankResult], dict[int, str]]:
        for rank, process in ranks.items():
            process.clear()
            process.send(pickle.dumps(replace(task, rank=rank)))
        reports = ResultCollector(
            self._template, ranks, deadline=deadline, may_die=may_die, timing=self._timing
        ).collect()
        outputs = {rank: process.printed() for rank, process in ranks.items()}
        # The state after a failed body is unknown, and a new process is cheap.
        for rank, report in reports.items():
            if not isinstance(report.outcome, Returned):
                self._template.end(ranks[rank])
        return reports, outputs

    def close(self) -> None:
        self._template.close()
        for process in self._processes.values():
            process.close()


class RankPool:
    """Processes that run test bodies as ranks, reused between runs.

    A rank that fails, dies or hangs is replaced before the next run; the others are reused. Bodies
    run in the caller's directory with its environment, import path and warning filters, with one
    thread and the same random seed.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        backend: str = "gloo",
        preload: Sequence[str] = (),
        timing: PoolTiming | None = None,
    ) -> None:
        self.size = check_size(size)
        """The maximum number of ranks of a run."""
        self.backend = backend
        """The default backend of `RankContext.group`."""
        self.preload = tuple(preload)
        """Modules that the template imports once, besides torch and `phalanx.groups`."""
        self._timing = timing or PoolTiming()
        self._processes: PoolProcesses | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start importing torch in the background, so that the first run starts sooner."""
        with self._lock:
            self._ensure_started()

    def run(
        self,
        body: Callable[..., Any],
        ranks: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        linger: float = 1.0,
        faults: Sequence[Fault] = (),
        expect_dead: Iterable[int] = (),
        name: str | None = None,
    ) -> list[Any]:
        """Call ``body(context, *args, **kwargs)`` on every rank and return the results by rank.

        The body must be a function of a module; its arguments and results must be picklable. The
        result of a rank that a fault kills, or that is in `expect_dead`, is `Died` or `Stopped`.

        Args:
            body: the function to run.
            ranks: how many ranks; all of the pool by default.
            args: positional arguments of the body.
            kwargs: keyword arguments of the body.
            timeout: seconds until a rank counts as hung.
            linger: seconds that the other ranks have to finish after one failed.
            faults: faults to inject.
            expect_dead: ranks that must die.
            name: name of the body in `RankFailures`, the error that reports all failures.
        """
        __tracebackhide__ = True
        size = check_size(self.size if ranks is None else ranks, maximum=self.size)
        must_die = frozenset(expect_dead)
        may_die = ranks_that_may_die(faults, must_die, size=size)
        task = Task(
            body=FunctionReference.of(body),
            arguments=pack_arguments(args, kwargs or {}),
            size=size,
            backend=self.backend,
            timeout=timeout,
            caller_environment=CallerEnvironment.here(),
            faults=tuple(faults),
        )
        with self._lock:
            try:
                reports, outputs = self._ensure_started().run(task, linger=linger, may_die=may_die)
            except BaseException:  # a KeyboardInterrupt, for example: their state is unknown
                self._stop_processes()
                raise
        return results_or_raise(
            name or str(task.body), reports, may_die=may_die, must_die=must_die, outputs=outputs
        )

    def _ensure_started(self) -> PoolProcesses:
        if self._closed:
            raise InvalidState("the pool is closed")
        if self._processes is None:
            self._processes = PoolProcesses(self.preload, self._timing)
        return self._processes

    def _stop_processes(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop_processes()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
