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
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from ..errors import InvalidState, RanksFailed
from ..groups._peers import process_state
from ._context import RankRunner
from ._results import (
    PRIVATE_MODULES,
    Died,
    RankResult,
    Returned,
    RunDeadline,
    Stopped,
    check_fault_ranks,
    hang_outcome,
    ranks_that_may_die,
    results_or_raise,
)
from ._worker import (
    DUMP_SIGNAL,
    FunctionReference,
    Task,
    host_store,
    pack_arguments,
    rank_environment,
    unpack_report,
)
from .faults import Fault

_MAX_OUTPUT_BYTES = 8_000  # of the output of a process
_MAX_STACK_BYTES = 100_000  # of its stack dump
_STORE_HOST = -1  # slot of the process that hosts the store

_START_TIMEOUT = 120.0  # seconds to import torch and the preloaded modules
_STORE_TIMEOUT = 60.0  # seconds to open the store
_REAP_TIMEOUT = 10.0  # seconds from killing a rank to learning its exit status
_DUMP_TIMEOUT = 2.0  # seconds to wait for stack dumps
_DUMP_QUIET_PERIOD = 0.05  # a dump that has not grown for this many seconds is complete
_STOPPED_POLL_INTERVAL = 0.02  # the kernel tells only the parent of a rank that it has stopped

_TEMPLATE_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from phalanx.testing import _worker
_worker.template_main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


def _scratch_file() -> IO[bytes]:
    """Open an anonymous file that another process appends to."""
    # Append mode, because the file position is shared with the other process.
    return tempfile.TemporaryFile("a+b", buffering=0)


def _tail(file: IO[bytes], limit: int) -> str:
    skipped = max(0, os.fstat(file.fileno()).st_size - limit)
    text = os.pread(file.fileno(), limit, skipped).decode(errors="replace")
    return f"({skipped} bytes omitted) ...{text}" if skipped else text


class RankProcess:
    """The pool's side of a rank process."""

    def __init__(self) -> None:
        self.pid = 0
        self.status: int | None = None  # the exit status, once it is known
        self.output = _scratch_file()
        self.stacks = _scratch_file()
        ours, self.theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.is_connected = True

    def start(self, task: Task) -> None:
        """Send a task; if the process just died, the template reports it."""
        self.output.truncate(0)
        self.stacks.truncate(0)
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps(task))

    def result(self, *, may_be_stopped: bool) -> RankResult | None:
        # A result that was sent before the process died counts.
        if self.is_connected and self.connection.poll():
            try:
                return unpack_report(self.connection.recv_bytes())
            except (EOFError, OSError):
                self.is_connected = False  # its exit status is still to come
        if self.status is not None:
            return RankResult(Died(self.status, self.dumped_stacks()))
        return RankResult(Stopped()) if may_be_stopped and self.stopped else None

    def dumped_stacks(self) -> str:
        """Return its stack dump without the frames of the pool."""
        lines = _tail(self.stacks, _MAX_STACK_BYTES).splitlines()
        return "\n".join(
            f"  {line}" for line in lines if not (PRIVATE_MODULES in line or "<string>" in line)
        )

    @property
    def stopped(self) -> bool:
        return process_state(self.pid) == "stopped"

    def close(self) -> None:
        self.connection.close()
        self.output.close()
        self.stacks.close()


class PoolProcesses:
    """The template process, which forks, signals and reaps the ranks; and the ranks."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._ranks: dict[int, RankProcess] = {}  # by slot: a rank, or the host of the store
        self._port = 0
        self._runs = 0
        self._generation = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = _scratch_file()
        test_tools = ["pytest"] if "pytest" in sys.modules else []
        modules = json.dumps(["phalanx.groups", *test_tools, *preload])
        # A new session, so that Ctrl-C reaches only the caller.
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), modules]
            self._template = subprocess.Popen(
                [sys.executable, "-u", "-c", _TEMPLATE_PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._errors.fileno(),
                stderr=self._errors.fileno(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=rank_environment(),
            )

    def run(
        self, task: Task, *, linger: float, may_die: Collection[int]
    ) -> tuple[dict[int, RankResult], dict[int, str]]:
        """Run a task and return the results and the output of the ranks."""
        if self._fill([_STORE_HOST]):
            host = FunctionReference.of(host_store)
            hosting = replace(task, body=host, arguments=pack_arguments((), {}), size=1, faults=())
            deadline = RunDeadline(_STORE_TIMEOUT, _STORE_TIMEOUT)
            reports, outputs = self._run_on(hosting, [_STORE_HOST], deadline, ())
            (self._port,) = results_or_raise(str(host), reports, outputs=outputs)
        self._fill(range(task.size))
        self._runs += 1
        prefix = f"run {self._runs}"
        task = replace(task, port=self._port, prefix=prefix, generation=self._generation)
        deadline = RunDeadline(task.timeout, linger)
        return self._run_on(task, range(task.size), deadline, may_die)

    def _fill(self, slots: Iterable[int]) -> bool:
        """Fork a process for each empty slot and return whether there was one."""
        self._catch_up()
        for rank in self._ranks.values():
            if rank.status is None and rank.connection.poll():  # at its end: an idle rank is silent
                self._end(rank)
        for slot in [slot for slot, rank in self._ranks.items() if rank.status is not None]:
            self._ranks.pop(slot).close()
        empty = [slot for slot in slots if slot not in self._ranks]
        for slot in empty:
            self._ranks[slot] = self._fork()
            self._generation += 1
        return bool(empty)

    def _fork(self) -> RankProcess:
        rank = RankProcess()
        deadline = time.monotonic() + _START_TIMEOUT
        try:
            with rank.theirs:
                files = [rank.theirs.fileno(), rank.output.fileno(), rank.stacks.fileno()]
                self._send({"do": "fork"}, files)
            while "forked" not in (message := self._receive(deadline)):
                pass
        except BaseException:
            rank.close()
            raise
        rank.pid = message["forked"]
        return rank

    def _run_on(
        self, task: Task, slots: Sequence[int], deadline: RunDeadline, may_die: Collection[int]
    ) -> tuple[dict[int, RankResult], dict[int, str]]:
        ranks = {number: self._ranks[slot] for number, slot in enumerate(slots)}
        for number, rank in ranks.items():
            rank.start(replace(task, rank=number))
        reports: dict[int, RankResult] = {}
        while len(reports) < len(ranks) and deadline.remaining:
            waiting = {number: rank for number, rank in ranks.items() if number not in reports}
            may_be_stopped = waiting.keys() <= set(may_die)
            pause = _STOPPED_POLL_INTERVAL if may_be_stopped else deadline.remaining
            connections = [rank.connection for rank in waiting.values() if rank.is_connected]
            wait([*connections, self._control], min(pause, deadline.remaining))
            self._catch_up()
            for number, rank in waiting.items():
                if result := rank.result(may_be_stopped=may_be_stopped):
                    reports[number] = result
                    if result.is_failure(may_die=number in may_die):
                        deadline.shorten()
        elapsed = deadline.elapsed
        hanging = {number: rank for number, rank in ranks.items() if number not in reports}
        self._dump_stacks(hanging.values())
        for number, rank in hanging.items():
            stacks = rank.dumped_stacks() or "  no answer, not even from a signal handler"
            stacks = "  stopped by a signal" if rank.stopped else stacks
            reports[number] = RankResult(hang_outcome(elapsed, stacks))
        outputs = {number: _tail(rank.output, _MAX_OUTPUT_BYTES) for number, rank in ranks.items()}
        # The state after a failed body is unknown, and a new process is cheap.
        for number, report in reports.items():
            if not isinstance(report.outcome, Returned):
                self._end(ranks[number])
        return reports, outputs

    def _dump_stacks(self, hanging: Collection[RankProcess]) -> None:
        for rank in hanging:
            self._send({"do": "signal", "rank": rank.pid, "signal": int(DUMP_SIGNAL)})
        running = [rank for rank in hanging if not rank.stopped]
        # A dump has no end mark: it is complete when it has not grown for a moment.
        sizes: list[int] = []
        deadline = time.monotonic() + _DUMP_TIMEOUT
        while running and time.monotonic() < deadline:
            time.sleep(_DUMP_QUIET_PERIOD)
            before, sizes = sizes, [os.fstat(rank.stacks.fileno()).st_size for rank in running]
            if all(sizes) and sizes == before:
                break

    def _end(self, rank: RankProcess) -> None:
        """Kill a rank and wait until it is reaped."""
        deadline = time.monotonic() + _REAP_TIMEOUT
        if rank.status is None:
            self._send({"do": "signal", "rank": rank.pid, "signal": int(signal.SIGKILL)})
        while rank.status is None:
            self._receive(deadline)

    def _catch_up(self) -> None:
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
        for rank in self._ranks.values():
            if rank.pid == message.get("ended") and rank.status is None:
                rank.status = message["status"]
        return message

    def _died(self) -> RanksFailed:
        output = _tail(self._errors, _MAX_OUTPUT_BYTES).strip()
        details = f":\n{output}" if output else ""
        return RanksFailed(f"the template process of the pool died{details}")

    def close(self) -> None:
        self._control.close()  # the template then kills the ranks and exits
        try:
            self._template.wait(_REAP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._template.kill()
            self._template.wait()
        self._errors.close()
        for rank in self._ranks.values():
            rank.close()


class RankPool(RankRunner):
    """Processes that run test bodies as ranks, reused between runs.

    A rank that fails, dies or hangs is replaced before the next run; the others are reused. Bodies
    run in the caller's directory with its environment, import path and warning filters, with one
    thread and the same random seed.
    """

    def __init__(
        self, size: int = 4, *, backend: str = "gloo", preload: Sequence[str] = ()
    ) -> None:
        super().__init__(size, backend)
        self.preload = tuple(preload)
        """Modules that the template imports once, besides torch and `phalanx.groups`."""
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
        size = self._world_size(ranks)
        must_die = frozenset(expect_dead)
        check_fault_ranks(faults, must_die, size=size)
        may_die = ranks_that_may_die(faults, size=size) | must_die
        task = Task(
            body=FunctionReference.of(body),
            arguments=pack_arguments(args, kwargs or {}),
            size=size,
            backend=self.backend,
            timeout=timeout,
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
            self._processes = PoolProcesses(self.preload)
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

    def __exit__(self, *_: object) -> None:
        self.close()
