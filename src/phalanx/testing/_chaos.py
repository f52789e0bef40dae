"""`run_elastic`: a script under ``phalanx run --elastic``, with injected failures.

The launcher runs as a process of its own, with its output in a file. Failures of a plan are
injected through the pids that the launcher reports on its control socket; faults at points are
armed in the workers (`_faulty_worker`), which note in a file what has fired. Every process of the
run inherits a mark (`_marked_processes`), by which it is found when the run is over or late.

The run has a directory of its own as ``XDG_RUNTIME_DIR``, so that its control socket and what it
leaves behind are told apart from those of other runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._control_client import send_request
from ..errors import InvalidArgument, InvalidState
from ._actions import Action, Fault, faults_to_json
from ._fault_plan import FaultPlan, PlannedFailure
from ._marked_processes import MarkedProcesses

FAULTS_VARIABLE = "PHALANX_FAULTS"
FAULT_LOG_VARIABLE = "PHALANX_FAULT_LOG"
STACK_SIGNAL = signal.SIGRTMIN + 6  # on which a worker prints the stacks of its threads

_POLL_INTERVAL = 0.02  # seconds
_LEAK_POLL_INTERVAL = 0.1  # seconds
_LEAK_TIMEOUT = 10.0  # loader workers look every five seconds whether their parent is alive
_STACK_TIMEOUT = 3.0  # seconds for all workers to print their stacks
_STACK_QUIET_PERIOD = 0.3  # output that has not grown for this many seconds is complete
_KILL_TIMEOUT = 10.0
_SHARED_MEMORY = Path("/dev/shm")
_STORE_MODULE = "phalanx.launch._store_server"
_WORKER_MODULE = "phalanx.testing._faulty_worker"
_SERVERS = {"store", "supervisor"}  # what else fails, besides workers

_WITH_SMALL_SHM = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class InjectedFailure:
    """A failure that was really injected."""

    at: float
    """Seconds since the start of the run."""
    step: int | None
    """The step that the run had made by then, as last reported; None if not known."""
    worker: str
    """The name of the worker, such as ``2.1``; ``store`` or ``supervisor`` for those."""
    action: Action
    point: str | None = None
    """The fault point; None for a failure from outside."""

    def __str__(self) -> str:
        place = f" at {self.point}" if self.point else ""
        return f"{self.at:7.2f} s, step {self.step}: {self.action} {self.worker}{place}"


@dataclass(frozen=True, kw_only=True)
class ChaosOutcome:
    """What happened in a run with failures, and what it left behind."""

    exit_code: int | None
    """Of the launcher, negative for the number of a signal; None if the run timed out."""
    output: str
    """What the launcher printed, with the output of the workers."""
    injected: tuple[InjectedFailure, ...]
    """The failures that were really injected, in order of time."""
    missed: tuple[Fault, ...]
    """Faults that did not fire, except optional ones."""
    skipped: tuple[PlannedFailure, ...]
    """Failures of the plan that were not injected, because the run ended before they were due, too
    few members would have survived, or no process was there to fail."""
    points: frozenset[str]
    """The fault points that any worker reached; empty for a run without faults."""
    lost: frozenset[str]
    """The workers that were replaced or had a fatal failure."""
    duration: float
    """In seconds, from the start of the launcher to its end."""
    leaks: tuple[str, ...]
    """What was left some seconds after the end: processes, files in /dev/shm, run directories."""
    descriptors: tuple[int, int] | None
    """How many open files the supervisor had when all ranks were members: first, and last. None if
    they never were."""
    evidence: str
    """After a timeout, what every thread of the run was waiting for; else empty."""

    def __str__(self) -> str:
        end = "timed out" if self.exit_code is None else f"exit code {self.exit_code}"
        lines = [
            f"{end} after {self.duration:.1f} s; lost {', '.join(sorted(self.lost)) or 'none'}"
        ]
        lines += [str(each) for each in self.injected]
        lines += [f"missed: {fault} of worker {_worker_name(fault)}" for fault in self.missed]
        lines += [f"skipped: {_describe_planned(failure)}" for failure in self.skipped]
        lines += [f"left behind: {each}" for each in self.leaks]
        return "\n".join([*lines, self.output, self.evidence]).rstrip()


def run_elastic(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    ranks: int,
    min_ranks: int = 1,
    plan: FaultPlan | None = None,
    faults: Sequence[Fault] = (),
    timeout: float,
    env: Mapping[str, str] | None = None,
    max_restarts: int | None = None,
    survivors: int = 0,
    shm_limit: str | None = None,
    options: Sequence[str] = (),
) -> ChaosOutcome:
    """Run a script under ``phalanx run --elastic`` with failures, to its end or to a timeout.

    On a timeout, the workers print their stacks and all processes of the run are killed.

    Args:
        script: the script of the workers.
        args: its arguments.
        ranks: how many workers.
        min_ranks: the run pauses while fewer are members.
        plan: failures to inject from outside; none once a worker has finished.
        faults: faults to inject in the workers, at fault points.
        timeout: seconds until the run must have ended.
        env: variables to add to the environment.
        max_restarts: of the launcher; its default if None.
        survivors: a failure of the plan waits while it would leave fewer members.
        shm_limit: the size of /dev/shm in the run, such as ``8m``; needs root.
        options: other options of the launcher.

    Raises:
        InvalidState: if `shm_limit` is given and this process cannot mount, or if the supervisor
            never answered, so that no failure of the plan could be injected.
    """
    for fault in faults:
        if fault.rank is not None and fault.rank >= ranks:
            raise InvalidArgument(f"fault for rank {fault.rank}: ranks are 0 to {ranks - 1}")
    limits = [f"--max-restarts={max_restarts}"] if max_restarts is not None else []
    command = [
        *_shm_prefix(shm_limit),
        *(sys.executable, "-P", "-m", "phalanx", "run", "--elastic"),
        *(f"-n{min_ranks}:{ranks}", *limits, *options),
        *("-m", _WORKER_MODULE, os.fspath(script), *map(str, args)),
    ]
    with tempfile.TemporaryDirectory(prefix="phx-") as directory:
        run = _FaultyRun(command, Path(directory), plan, faults, survivors=survivors, ranks=ranks)
        return run.run(env or {}, timeout=timeout)


def _shm_prefix(limit: str | None) -> list[str]:
    """Return a command that runs another one with a /dev/shm of limited size."""
    if limit is None:
        return []
    if not re.fullmatch(r"[1-9][0-9]*[kmgKMG]?", limit):
        raise InvalidArgument(f"shm_limit must be a size such as '8m', got {limit!r}")
    namespace = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _WITH_SMALL_SHM]
    prefix = [*namespace, "sh", limit]
    problem = "there is no unshare command"
    if shutil.which("unshare"):
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
        problem = done.stderr.strip()
        if done.returncode == 0:
            return prefix
    raise InvalidState(f"shm_limit needs permission to mount a tmpfs on /dev/shm: {problem}")


def _worker_name(fault: Fault) -> str:
    rank, incarnation = (
        "*" if each is None else str(each) for each in (fault.rank, fault.incarnation)
    )
    return f"{rank}.{incarnation}"


def _describe_planned(failure: PlannedFailure) -> str:
    place = "" if failure.rank is None else f" of rank {failure.rank}"
    return f"{failure.action}{place}, planned at {failure.at:.2f} s"


@dataclass(frozen=True)
class _ReportedWorker:
    """A worker in an answer of the supervisor."""

    name: str
    pid: int | None
    state: str

    @property
    def rank(self) -> int:
        return int(self.name.partition(".")[0])

    @property
    def incarnation(self) -> int:
        return int(self.name.partition(".")[2])


@dataclass
class _Status:
    """An answer of the supervisor."""

    step: int | None = None
    workers: list[_ReportedWorker] = field(default_factory=list)

    @classmethod
    def ask(cls, directory: Path) -> _Status | None:
        """Ask the supervisor; return None if it does not answer."""
        for path in directory.glob("phalanx/*/control.sock"):
            with suppress(OSError):
                answer = send_request(path, command="status")
                return cls._read(answer) if "workers" in answer else None
        return None

    @classmethod
    def _read(cls, answer: dict[str, Any]) -> _Status:
        workers = [
            _ReportedWorker(each["worker"], each.get("pid"), each["state"])
            for each in answer["workers"]
        ]
        return cls(answer.get("step"), workers)


class _Injector:
    """Injects the failures of a plan into the processes of a run.

    A supervisor ends a run if a rank is lost several times before it is a member. So after a worker
    was killed while it started, the workers of its rank are spared until one is a member.
    """

    def __init__(
        self,
        plan: FaultPlan | None,
        processes: MarkedProcesses,
        *,
        launcher: int,
        ranks: int,
        survivors: int,
    ) -> None:
        self.injected: list[tuple[float, str, Action]] = []  # with the monotonic time
        self._pending = list(plan.failures) if plan is not None else []
        self._processes = processes
        self._launcher = launcher
        self._ranks = ranks
        self._survivors = survivors
        self._spared: set[int] = set()  # ranks
        self._began: float | None = None  # when the first worker became a member
        self._doomed: set[str] = set()  # workers that had a fatal failure
        self._stopped: list[tuple[float, int]] = []  # when to continue which pid

    @property
    def pending(self) -> tuple[PlannedFailure, ...]:
        """The failures that were not injected yet."""
        return tuple(self._pending)

    def advance(self, status: _Status) -> None:
        """Inject what is due, and continue what was stopped."""
        now = time.monotonic()
        for when, pid in [each for each in self._stopped if each[0] <= now]:
            self._stopped.remove((when, pid))
            self._processes.send(pid, signal.SIGCONT)
        members = {each.rank for each in status.workers if each.state == "member"}
        self._spared -= members
        if self._began is None and members:
            self._began = now
        # When workers have finished, the run is about to end.
        if self._began is None or len(status.workers) < self._ranks:
            return
        due = [each for each in self._pending if self._began + each.at <= now]
        for failure in due:
            if self._inject(failure, status):
                self._pending.remove(failure)

    def _inject(self, failure: PlannedFailure, status: _Status) -> bool:
        """Inject a failure; return False if it has to wait for a worker."""
        action = failure.action
        if action.name == "kill_supervisor":
            return self._send(self._launcher, signal.SIGKILL, "supervisor", action)
        if action.name == "store_unreachable":
            commands = self._processes.find()
            (store,) = [pid for pid, text in commands.items() if _STORE_MODULE in text][:1] or [0]
            return self._stop(store, "store", action)
        candidates = self._candidates(status, action)
        if failure.rank is not None:
            candidates = [each for each in candidates if each.rank == failure.rank]
        if not candidates:
            return False
        worker = candidates[int(failure.share * len(candidates))]
        assert worker.pid is not None
        if action.name == "stop":
            return self._stop(worker.pid, worker.name, action)
        assert action.name in ("kill", "segfault"), f"{action} cannot be injected from outside"
        number = signal.SIGSEGV if action.name == "segfault" else int(action.argument or 0)
        if worker.state != "member":
            self._spared.add(worker.rank)
        return self._send(worker.pid, number, worker.name, action)

    def _candidates(self, status: _Status, action: Action) -> list[_ReportedWorker]:
        living = [each for each in status.workers if self._may_fail(each)]
        members = [each for each in living if each.state == "member"]
        if len(members) < self._survivors:
            return []
        if action.is_fatal and len(members) == self._survivors:
            return [each for each in living if each.state != "member"]
        return living

    def _may_fail(self, worker: _ReportedWorker) -> bool:
        if worker.pid is None or worker.name in self._doomed:
            return False
        return worker.state == "member" or worker.rank not in self._spared

    def _send(self, pid: int, number: int, worker: str, action: Action) -> bool:
        now = time.monotonic()  # before it takes effect
        if not self._processes.send(pid, number):
            return False
        if action.is_fatal:
            self._doomed.add(worker)
        self.injected.append((now, worker, action))
        return True

    def _stop(self, pid: int, worker: str, action: Action) -> bool:
        if not self._send(pid, signal.SIGSTOP, worker, action):
            return False
        if action.argument is not None:
            self._stopped.append((time.monotonic() + action.argument, pid))
        return True


class _FaultyRun:
    """One run of the launcher, from its start until nothing of it is left."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        plan: FaultPlan | None,
        faults: Sequence[Fault],
        *,
        survivors: int,
        ranks: int,
    ) -> None:
        self._command = command
        self._runtime = directory / "runtime"
        self._runtime.mkdir(mode=0o700)
        self._log = directory / "faults"
        self._output = directory / "output"
        self._plan, self._faults, self._survivors = plan, faults, survivors
        self._ranks = ranks
        self._processes = MarkedProcesses()
        self._steps: list[tuple[float, int | None]] = []  # as reported, with the time
        self._workers: set[str] = set()  # all names that were reported
        self._descriptors: list[int] = []  # how many the supervisor had

    def run(self, env: Mapping[str, str], *, timeout: float) -> ChaosOutcome:
        own = {
            **self._processes.variables,
            "XDG_RUNTIME_DIR": str(self._runtime),
            FAULTS_VARIABLE: faults_to_json(self._faults),
            FAULT_LOG_VARIABLE: str(self._log),
        }
        shared_before = _shared_files()
        leaks: tuple[str, ...] = ()
        evidence = ""
        began = time.monotonic()
        with self._output.open("ab") as output:
            launcher = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, **own},
                start_new_session=True,  # so that Ctrl-C reaches only the caller
            )
        injector = _Injector(
            self._plan,
            self._processes,
            launcher=launcher.pid,
            ranks=self._ranks,
            survivors=self._survivors,
        )
        try:
            exit_code = self._watch(launcher, injector, deadline=began + timeout)
            duration = time.monotonic() - began
            if exit_code is None:
                evidence = self._collect_evidence()
            else:
                leaks = self._find_leaks(shared_before)
        finally:
            self._processes.kill_all(timeout=_KILL_TIMEOUT)
            launcher.kill()
            launcher.wait()
        fired, points = self._read_log()
        failures = self._combine(injector, fired, began)
        numbers = {event["fired"] for event in fired}
        missed = [each for number, each in enumerate(self._faults) if number not in numbers]
        outcome = ChaosOutcome(
            exit_code=exit_code,
            output=self._output.read_text(errors="replace"),
            injected=failures,
            missed=tuple(each for each in missed if not each.optional),
            skipped=injector.pending,
            points=frozenset(points),
            lost=self._lost(failures),
            duration=duration,
            leaks=leaks,
            descriptors=(self._descriptors[0], self._descriptors[-1])
            if self._descriptors
            else None,
            evidence=evidence,
        )
        has_answered = bool(self._steps)
        if outcome.skipped and not has_answered:
            raise InvalidState(
                "no failure of the plan was injected: the supervisor never answered on its control "
                f"socket. The run:\n{outcome}"
            )
        return outcome

    def _watch(
        self, launcher: subprocess.Popen[bytes], injector: _Injector, *, deadline: float
    ) -> int | None:
        """Inject failures until the launcher ends; return its exit code, or None if it is late."""
        while True:
            try:
                return launcher.wait(_POLL_INTERVAL)
            except subprocess.TimeoutExpired:
                pass
            if time.monotonic() > deadline:
                return None
            status = _Status.ask(self._runtime)
            if status is None:
                continue
            self._note(status, launcher.pid)
            if launcher.poll() is None:
                injector.advance(status)

    def _note(self, status: _Status, supervisor: int) -> None:
        now = time.monotonic()
        if not self._steps or self._steps[-1][1] != status.step:
            self._steps.append((now, status.step))
        self._workers |= {each.name for each in status.workers}
        members = sum(each.state == "member" for each in status.workers)
        if members == self._ranks:
            with suppress(OSError):
                self._descriptors.append(len(os.listdir(f"/proc/{supervisor}/fd")))

    def _collect_evidence(self) -> str:
        """Have the workers print their stacks, and describe all threads of the run."""
        report = self._processes.report()
        for pid in self._processes.find():
            if self._processes.catches(pid, STACK_SIGNAL):
                self._processes.send(pid, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_TIMEOUT
        size = -1
        while size != self._output.stat().st_size and time.monotonic() < deadline:
            size = self._output.stat().st_size
            time.sleep(_STACK_QUIET_PERIOD)
        return report

    def _find_leaks(self, shared_before: set[Path]) -> tuple[str, ...]:
        """Return what is left of the run, once it had some seconds to disappear."""
        new = _shared_files() - shared_before
        deadline = time.monotonic() + _LEAK_TIMEOUT
        while True:
            found = [f"process {pid}: {text}" for pid, text in self._processes.find().items()]
            found += [f"file {path}" for path in sorted((_shared_files() & new) - _files_in_use())]
            found += [f"directory {path}" for path in sorted(self._runtime.glob("phalanx/*"))]
            if not found or time.monotonic() > deadline:
                return tuple(found)
            time.sleep(_LEAK_POLL_INTERVAL)

    def _read_log(self) -> tuple[list[dict[str, Any]], set[str]]:
        """Return the faults that fired and the points that were reached."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        events = [json.loads(line) for line in lines]
        fired = [event for event in events if "fired" in event]
        return fired, {event["reached"] for event in events if "reached" in event}

    def _combine(
        self, injector: _Injector, fired: list[dict[str, Any]], began: float
    ) -> tuple[InjectedFailure, ...]:
        found: list[tuple[float, str, Action, str | None]]
        found = [(at, worker, action, None) for at, worker, action in injector.injected]
        for event in fired:
            fault = self._faults[event["fired"]]
            found.append((event["time"], event["worker"], fault.action, fault.point))
        return tuple(
            InjectedFailure(
                at=at - began, step=self._step_at(at), worker=worker, action=action, point=point
            )
            for at, worker, action, point in sorted(found, key=lambda each: each[0])
        )

    def _step_at(self, when: float) -> int | None:
        index = bisect(self._steps, when, key=lambda each: each[0])
        return self._steps[index - 1][1] if index else None

    def _lost(self, failures: Sequence[InjectedFailure]) -> frozenset[str]:
        names = self._workers | {each.worker for each in failures if each.worker not in _SERVERS}
        newest: dict[str, int] = {}
        for rank, _, incarnation in (name.partition(".") for name in names):
            newest[rank] = max(newest.get(rank, 0), int(incarnation))
        replaced = {f"{rank}.{number}" for rank, last in newest.items() for number in range(last)}
        fatal = {each.worker for each in failures if each.action.is_fatal}
        return frozenset(replaced | (fatal - _SERVERS))


def _shared_files() -> set[Path]:
    # A process that is killed within sem_open() leaves a file of 32 bytes, which cannot be
    # told from a semaphore in use: those of multiprocessing, in data loaders, do not count.
    return {path for path in _SHARED_MEMORY.iterdir() if not path.name.startswith("sem.")}


def _files_in_use() -> set[Path]:
    """Return the files in /dev/shm that a living process has open or mapped."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(descriptor.readlink())
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text(errors="replace").splitlines()
            found |= {
                Path(line[line.index("/") :]) for line in lines if f" {_SHARED_MEMORY}/" in line
            }
    return {path for path in found if path.parent == _SHARED_MEMORY}
