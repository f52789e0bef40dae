"""`RankPool`: processes as ranks, started once for many runs.

The pool starts one template process, which imports torch and forks the ranks (`_worker`). For
each run it sends every rank a task, then waits for results, deaths, and ranks that never
finish; for a rank that cannot report, the result is made up here. A rank whose body did not
return is killed after the run, since nothing is known about the state it left.

One more forked process hosts the store. It is no rank, and no fault strikes it.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    settle,
)
from ._run import RunDeadline, check_size, ranks_that_may_die
from ._task import (
    CallerEnvironment,
    FunctionReference,
    Task,
    pack_arguments,
    pack_task,
    rank_environment,
    unpack_report,
)
from ._worker import DUMP_SIGNAL, host_store
from .faults import Fault

_START_TIMEOUT = 120.0  # seconds to import torch and what is to be preloaded
_REAP_TIMEOUT = 10.0  # seconds from a kill to the news of the end
_DUMP_TIMEOUT = 2.0  # seconds to wait for stacks
_DUMP_QUIET_PERIOD = 0.05  # seconds without growth after which a dump is complete
_MAX_OUTPUT_BYTES = 8_000  # bytes of what a process printed
_MAX_STACK_BYTES = 100_000  # bytes of what it dumped

_TEMPLATE_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from phalanx.testing import _worker
_worker.template_main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


class ScratchFile:
    """A file without a name, that another process appends to."""

    def __init__(self) -> None:
        # To append, for the position is shared with the process that is given the file.
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - has our life

    def fileno(self) -> int:
        """Name its descriptor."""
        return self._file.fileno()

    @property
    def size(self) -> int:
        """How much has been written."""
        return os.fstat(self.fileno()).st_size

    def tail(self, most: int) -> str:
        """Read the end of it."""
        left_out = max(0, self.size - most)
        text = os.pread(self.fileno(), most, left_out).decode(errors="replace")
        return f"({left_out} bytes left out) ...{text}" if left_out else text

    def clear(self) -> None:
        """Forget what has been written."""
        self._file.truncate(0)

    def close(self) -> None:
        """Let it disappear."""
        self._file.close()


class RankProcess:
    """A rank process, as the pool sees it."""

    def __init__(self) -> None:
        self.pid = 0
        self.status: int | None = None
        """Set once it has ended."""
        self.output = ScratchFile()
        self.stacks = ScratchFile()
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.theirs = theirs

    def clear(self) -> None:
        """Forget what it has written."""
        self.output.clear()
        self.stacks.clear()

    def send(self, message: bytes) -> None:
        """Send it a task; if it has just ended, the template will say so."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(message)

    def printed(self) -> str:
        """Read the end of what it has printed."""
        return self.output.tail(_MAX_OUTPUT_BYTES)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    @property
    def ended(self) -> bool:
        """Whether its end is known."""
        return self.status is not None

    def close(self) -> None:
        """Let go of it; an idle one ends."""
        self.connection.close()
        self.output.close()
        self.stacks.close()


class TemplateProcess:
    """The process that forks, signals and reaps the ranks."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = ScratchFile()
        self._ranks: dict[int, RankProcess] = {}
        # A session of its own: an interrupt at the terminal is the caller's to handle.
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
        """Name what is readable when there is news."""
        return self._control.fileno()

    def fork(self) -> RankProcess:
        """Make a new rank."""
        rank = RankProcess()
        try:
            with rank.theirs:
                files = [rank.theirs.fileno(), rank.output.fileno(), rank.stacks.fileno()]
                self._say({"do": "fork"}, files)
            rank.pid = self._await_fork()
        except BaseException:
            rank.close()
            raise
        self._ranks[rank.pid] = rank
        return rank

    def _await_fork(self) -> int:
        deadline = time.monotonic() + _START_TIMEOUT
        while "forked" not in (news := self._hear(deadline)):
            pass
        return int(news["forked"])

    def send_signal(self, rank: RankProcess, signum: int) -> None:
        """Send a rank a signal, unless it has ended."""
        self._say({"do": "signal", "rank": rank.pid, "signal": int(signum)})

    def end(self, rank: RankProcess) -> None:
        """Kill a rank and wait for its end."""
        deadline = time.monotonic() + _REAP_TIMEOUT
        if not rank.ended:
            self.send_signal(rank, signal.SIGKILL)
        while not rank.ended:
            self._hear(deadline)

    def catch_up(self) -> None:
        """Take note of the ranks that have ended."""
        while wait([self._control], 0):
            self._hear(time.monotonic() + 1)

    def _say(self, order: dict[str, Any], files: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], files)
        except ConnectionError:
            raise self._has_ended() from None

    def _hear(self, deadline: float) -> dict[str, Any]:
        self._control.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            message = self._control.recv(4096)
        except TimeoutError:
            raise RanksFailed("the process that starts the ranks does not answer") from None
        except ConnectionError:  # it ended before it had read what we said
            message = b""
        if not message:
            raise self._has_ended()
        news: dict[str, Any] = json.loads(message)
        if "ended" in news:
            self._ranks.pop(news["ended"]).status = news["status"]
        return news

    def _has_ended(self) -> RanksFailed:
        words = self._errors.tail(_MAX_OUTPUT_BYTES).strip()
        told = f":\n{words}" if words else ""
        return RanksFailed(f"the process that starts the ranks has ended{told}")

    def close(self) -> None:
        """End the template, which ends the ranks."""
        self._control.close()
        try:
            self._process.wait(_REAP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def dump_stacks(template: TemplateProcess, ranks: Sequence[RankProcess]) -> list[str]:
    """Ask ranks where they are; one that cannot answer is described."""
    for rank in ranks:
        template.send_signal(rank, DUMP_SIGNAL)
    _wait_for_dumps([rank for rank in ranks if not rank.stopped])
    return [_dumped_stacks(rank) for rank in ranks]


def _wait_for_dumps(ranks: Sequence[RankProcess]) -> None:
    # A dump has no end mark: it is complete when it has not grown for a moment.
    sizes: list[int] = []
    deadline = time.monotonic() + _DUMP_TIMEOUT
    while ranks and time.monotonic() < deadline:
        time.sleep(_DUMP_QUIET_PERIOD)
        before, sizes = sizes, [rank.stacks.size for rank in ranks]
        if all(sizes) and sizes == before:
            break


def _dumped_stacks(rank: RankProcess) -> str:
    if rank.stopped:
        return "  stopped by a signal"
    return read_stacks(rank) or "  no answer, not even from a signal handler"


def read_stacks(rank: RankProcess) -> str:
    """Read what the rank's interpreter dumped, without the frames that led into the body."""
    lines = rank.stacks.tail(_MAX_STACK_BYTES).splitlines()
    return "\n".join(
        f"  {line}" for line in lines if not (is_internal_frame(line) or "<string>" in line)
    )


# Seconds between looks whether a rank that is to be stopped has been; the kernel tells only its
# parent.
_STOPPED_POLL_INTERVAL = 0.02


def collect_results(
    template: TemplateProcess,
    ranks: Mapping[int, RankProcess],
    *,
    patience: RunDeadline,
    mortal: Collection[int],
) -> dict[int, RankResult]:
    """Collect a report of every rank, made up here for those that cannot make it."""
    return _ResultCollector(template, ranks, patience=patience, mortal=mortal).run()


class _ResultCollector:
    def __init__(
        self,
        template: TemplateProcess,
        ranks: Mapping[int, RankProcess],
        *,
        patience: RunDeadline,
        mortal: Collection[int],
    ) -> None:
        self._template = template
        self._patience = patience
        self._mortal = frozenset(mortal)
        self._waiting = dict(ranks)
        self._disconnected: set[int] = set()  # hung up; the template will say how they ended
        self.reports: dict[int, RankResult] = {}

    def run(self) -> dict[int, RankResult]:
        while self._waiting and self._patience.left:
            self._look()
        self._give_up()
        return self.reports

    def _look(self) -> None:
        speaking = {
            process.connection: rank
            for rank, process in self._waiting.items()
            if rank not in self._disconnected
        }
        only_mortal = self._waiting.keys() <= self._mortal
        pause = min(self._patience.left, _STOPPED_POLL_INTERVAL if only_mortal else float("inf"))
        wait([*speaking, self._template.fileno()], pause)
        self._template.catch_up()
        for rank, process in list(self._waiting.items()):
            self._look_at(rank, process, only_mortal=only_mortal)

    def _look_at(self, rank: int, process: RankProcess, *, only_mortal: bool) -> None:
        # What it said before it ended counts for more than its end.
        if rank not in self._disconnected and process.connection.poll():
            try:
                self._note(rank, unpack_report(process.connection.recv_bytes()))
                return
            except (EOFError, OSError):
                self._disconnected.add(rank)
        if process.status is not None:
            self._note(rank, RankResult(Died(process.status, read_stacks(process))))
        elif only_mortal and process.stopped:
            self._note(rank, RankResult(Stopped()))

    def _note(self, rank: int, report: RankResult) -> None:
        del self._waiting[rank]
        self.reports[rank] = report
        if is_failure(report.outcome, mortal=rank in self._mortal):
            self._patience.shorten()

    def _give_up(self) -> None:
        spent = self._patience.spent
        stacks = dump_stacks(self._template, list(self._waiting.values()))
        for rank, text in zip(list(self._waiting), stacks, strict=True):
            self._note(rank, RankResult(Hung(spent, text)))


# The process that keeps the store is one of the crew, but no rank: no fault strikes it.
_STORE_HOST = -1
_STORE_HOST_TIMEOUT = 60.0  # seconds to open the store


class PoolProcesses:
    """A template and the processes forked from it."""

    def __init__(self, preload: Sequence[str]) -> None:
        test_tools = ["pytest"] if "pytest" in sys.modules else []
        self._template = TemplateProcess(["phalanx.groups", *test_tools, *preload])
        self._processes: dict[int, RankProcess] = {}
        self._port = 0
        self._runs = 0
        self._generation = 0

    def work(
        self, task: Task, *, linger: float, mortal: Collection[int]
    ) -> tuple[dict[int, RankResult], dict[int, str]]:
        """Carry out a task and return what the ranks report and what they printed."""
        if self._ready([_STORE_HOST]):
            self._port = self._host_store(task)
        self._ready(range(task.size))
        self._runs += 1
        prefix = f"run {self._runs}"
        task = replace(task, port=self._port, prefix=prefix, generation=self._generation)
        ranks = {rank: self._processes[rank] for rank in range(task.size)}
        return self._perform(task, ranks, RunDeadline(task.timeout, linger), mortal)

    def _host_store(self, task: Task) -> int:
        host = FunctionReference.of(host_store)
        task = replace(task, body=host, arguments=pack_arguments((), {}), size=1, faults=())
        keeper = {0: self._processes[_STORE_HOST]}
        patience = RunDeadline(_STORE_HOST_TIMEOUT, _STORE_HOST_TIMEOUT)
        reports, outputs = self._perform(task, keeper, patience, ())
        (port,) = settle(str(host), reports, outputs=outputs)
        return int(port)

    def _ready(self, seats: Iterable[int]) -> bool:
        """Fill the seats and return whether any was empty."""
        self._template.catch_up()
        for seat in [seat for seat, process in self._processes.items() if process.ended]:
            self._processes.pop(seat).close()
        empty = [seat for seat in seats if seat not in self._processes]
        for seat in empty:
            self._processes[seat] = self._template.fork()
            self._generation += 1
        return bool(empty)

    def _perform(
        self,
        task: Task,
        ranks: Mapping[int, RankProcess],
        patience: RunDeadline,
        mortal: Collection[int],
    ) -> tuple[dict[int, RankResult], dict[int, str]]:
        for rank, process in ranks.items():
            process.clear()
            process.send(pack_task(replace(task, rank=rank)))
        reports = collect_results(self._template, ranks, patience=patience, mortal=mortal)
        outputs = {rank: process.printed() for rank, process in ranks.items()}
        # Nobody knows what a failed body has left behind, and a new process is cheap.
        for rank, report in reports.items():
            if not isinstance(report.outcome, Returned):
                self._template.end(ranks[rank])
        return reports, outputs

    def close(self) -> None:
        """End all processes."""
        self._template.close()
        for process in self._processes.values():
            process.close()


class RankPool:
    """Processes that run a body as the ranks of a group, again and again.

    A rank that fails, dies or hangs is replaced before the next run; the others are used again.
    Bodies find themselves in the caller's directory, with its environment, import path and warning
    filters, one thread and the same random seed.
    """

    def __init__(
        self, size: int = 4, *, backend: str = "gloo", preload: Sequence[str] = ()
    ) -> None:
        self.size = check_size(size)
        """The largest number of ranks that a run can have."""
        self.backend = backend
        """The backend of the groups that a body's context makes."""
        self.preload = tuple(preload)
        """Modules that are imported once for all ranks, besides torch and `phalanx.groups`."""
        self._processes: PoolProcesses | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to import torch in the background, so that the first run waits less."""
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

        The body is a function of a module, and what it takes and returns can be pickled. A rank
        that had to die has `Died` or `Stopped` for a result: one that a fault ends, or that is
        in `expect_dead`. All failures are raised as one `RankFailures`, which calls the body
        `name`; once a rank has failed, the others have `linger` seconds to finish.
        """
        __tracebackhide__ = True
        size = check_size(self.size if ranks is None else ranks, most=self.size)
        doomed = frozenset(expect_dead)
        mortal = ranks_that_may_die(faults, doomed, size=size)
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
                reports, outputs = self._ensure_started().work(task, linger=linger, mortal=mortal)
            except BaseException:  # an interrupt, perhaps: nobody knows what they are up to
                self._dismiss()
                raise
        return settle(
            name or str(task.body), reports, mortal=mortal, doomed=doomed, outputs=outputs
        )

    def _ensure_started(self) -> PoolProcesses:
        if self._closed:
            raise InvalidState("the pool is closed")
        if self._processes is None:
            self._processes = PoolProcesses(self.preload)
        return self._processes

    def _dismiss(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            self._dismiss()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
