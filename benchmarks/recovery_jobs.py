"""Training jobs to kill parts of: how each system starts one, and how one is followed and stopped.

The processes of a job are those of its launchers, in sessions of their own, and the workers that
have written a log. Nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .peers.commit_log import LogFollower, WorkerLog
from .recovery_times import Kill

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
PEERS = SCRIPTS / ".venv"
"""The environment that ``make peers`` makes."""
POLL = 0.02
STOP_TIMEOUT = 10.0
MANY = "1000"  # restarts
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Failure(Exception):
    """A job that hung or ended, by the reason."""


@dataclass(frozen=True)
class Process:
    """A process of a launcher."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


Launch = Callable[[int, Sequence[str], Path], list[Process]]
"""Returns the launchers of a job, given the number of ranks, the script's arguments and a directory
for checkpoints."""


@dataclass(frozen=True)
class System:
    """A way to train that survives the death of a worker."""

    name: str
    launch: Launch
    absent: str | None = None
    """Why it cannot be measured here."""


def find_systems(*parts: str) -> list[System]:
    """Return the systems whose name contains one of these parts, by default all.

    Those that cannot be measured here say why.
    """
    wanted = [name for name in LAUNCHES if not parts or any(part in name for part in parts)]
    why = _why_no_torchft() if any(name.startswith("torchft") for name in wanted) else None
    return [
        System(name, LAUNCHES[name], why if name.startswith("torchft") else None) for name in wanted
    ]


def _elastic(ranks: int, args: Sequence[str], _: Path) -> list[Process]:
    return [Process([_tool("phalanx"), "run", "-n", str(ranks), "--elastic", *_script(args)])]


def _standby(ranks: int, args: Sequence[str], checkpoints: Path) -> list[Process]:
    (process,) = _elastic(ranks, args, checkpoints)
    place = process.command.index("--elastic")
    return [Process([*process.command[:place], "--standby", *process.command[place:]])]


def _restart(ranks: int, args: Sequence[str], checkpoints: Path) -> list[Process]:
    command = [_tool("phalanx"), "run", "-n", str(ranks), "--max-restarts", MANY]
    return [Process([*command, *_script(args), "--checkpoints", str(checkpoints)])]


def _torchrun(ranks: int, args: Sequence[str], checkpoints: Path) -> list[Process]:
    command = [_tool("torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(SCRIPTS / "train_ddp.py"), *args, "--checkpoints", str(checkpoints)]
    # By default the workers share a store with torchrun, in which restarted ones find the addresses
    # of their predecessors and do not start: https://github.com/pytorch/pytorch/issues/135712
    variables = {**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Process([*command, "--max-restarts", MANY, "--", *script], variables)]


def _torchft(heartbeat: float) -> Launch:
    """Launch as torchft's examples do, but for the time without a heartbeat; its default is 5 s."""

    def launch(ranks: int, args: Sequence[str], _: Path) -> list[Process]:
        port, *ports = _free_ports(ranks + 1)
        lighthouse = [str(PEERS / "bin" / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
        lighthouse += ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms"]
        lighthouse += ["10000", "--heartbeat_timeout_ms", str(round(heartbeat * 1000))]
        script = [str(SCRIPTS / "train_torchft.py"), *args]
        torchrun = [str(PEERS / "bin" / "torchrun"), "--nnodes", "1", "--nproc-per-node", "1"]
        torchrun += ["--max-restarts", MANY, "--master-addr", "127.0.0.1", "--master-port"]
        place = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "REPLICAS": str(ranks)}
        return [
            Process(lighthouse),
            *(
                Process(
                    [*torchrun, str(each), "--", *script],
                    {**ONE_THREAD, **place, "REPLICA": str(replica)},
                )
                for replica, each in enumerate(ports)
            ),
        ]

    return launch


LAUNCHES: dict[str, Launch] = {
    "phalanx, elastic": _elastic,
    "phalanx, standby": _standby,
    "phalanx, restart": _restart,
    "torchrun": _torchrun,
    "torchft, 5 s": _torchft(5.0),
    "torchft, 1 s": _torchft(1.0),
}
"""The systems, in the order of tables."""
ELASTIC = System("phalanx, elastic", _elastic)


def _script(args: Sequence[str]) -> list[str]:
    return [str(SCRIPTS / "train_elastic.py"), *args]


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _why_no_torchft() -> str | None:
    python = PEERS / "bin" / "python"
    if not python.exists():
        return f"{PEERS.relative_to(ROOT)} is missing: make peers"
    command = [python, "-c", "import torchft"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"it cannot be imported: {lines[-1] if lines else 'no reason given'}"
    return None


class Job:
    """A job that trains, its logs, and the means to kill a part of it."""

    def __init__(
        self, system: System, ranks: int, args: Sequence[str], *, directory: Path, seed: int = 0
    ) -> None:
        self._random = random.Random(seed)
        self._ranks = ranks
        logs, checkpoints = directory / "logs", directory / "checkpoints"
        logs.mkdir()
        checkpoints.mkdir()
        self._logs = LogFollower(logs)
        self._mark = str(logs)  # in the arguments of every worker
        self._output = (directory / "output").open("w+b")
        self.launchers: list[subprocess.Popen[bytes]] = []
        try:
            for process in system.launch(ranks, [*args, "--log", str(logs)], checkpoints):
                self.launchers.append(self._start(process))
        except BaseException:
            self.stop()
            raise

    def _start(self, process: Process) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            process.command,
            cwd=ROOT,
            env={**os.environ, **process.variables},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    @property
    def workers(self) -> list[WorkerLog]:
        """All workers that there have been, as far as their logs were read."""
        return self._logs.workers

    def await_(
        self, condition: Callable[[list[WorkerLog]], bool], timeout: float, what: str
    ) -> None:
        """Wait until the logs say so; raise `Failure` if the job ends before, or time is up."""
        deadline = time.monotonic() + timeout
        while not condition(self._logs.read()):
            ended = [each.returncode for each in self.launchers if each.poll() is not None]
            if ended and not condition(self._logs.read()):
                raise Failure(f"the launcher exited with {ended[0]} before {what}")
            if time.monotonic() >= deadline:
                raise Failure(f"no {what} within {timeout:g} s")
            time.sleep(POLL)

    def wait(self, timeout: float) -> None:
        """Wait until the job ends by itself."""
        for launcher in self.launchers:
            try:
                code = launcher.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Failure(f"it has not ended within {timeout:g} s") from None
            if code:
                raise Failure(f"the launcher exited with {code}")
        self._logs.read()

    def is_formed(self, workers: Sequence[WorkerLog], steps: int = 1) -> bool:
        """Return whether all ranks have committed so many steps together."""
        members = {
            worker.slot
            for worker in workers
            if self._runs(worker)
            and sum(each.world == self._ranks for each in worker.commits[-steps:]) == steps
        }
        return len(members) == self._ranks

    def kill_one(self) -> Kill:
        """Kill a worker, any, at any instant, with SIGKILL."""
        worker = self._random.choice([each for each in self._logs.read() if self._runs(each)])
        descriptor = os.pidfd_open(worker.pid)
        try:
            assert self._runs(worker), "it was there a moment ago"
            now = time.time_ns()
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        return Kill(worker.slot, worker.pid, now)

    def _runs(self, worker: WorkerLog) -> bool:
        """Return whether the process of a worker is there, and is that worker's."""
        try:
            arguments = Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        except OSError:
            return False
        return self._mark.encode() in arguments

    def stop(self) -> None:
        """End all processes of the job; may be called again."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline - time.monotonic()))
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        for worker in self._logs.read():
            if self._runs(worker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        self._output.close()


@contextlib.contextmanager
def start_job(
    system: System, ranks: int, args: Sequence[str], *, seed: int = 0, keep: Path | None = None
) -> Iterator[Job]:
    """Start a job in a directory of its own; stop it and remove the directory afterwards.

    The directory of a job that failed is copied to `keep`, if that is given.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        directory = Path(name)
        job = Job(system, ranks, args, directory=directory, seed=seed)
        try:
            yield job
        except Failure as failure:
            job.stop()
            said = (directory / "output").read_text(errors="replace").strip().splitlines()
            if keep is not None:
                shutil.copytree(directory, keep)
            raise Failure(f"{failure}; last output: {said[-1] if said else 'none'}") from None
        finally:
            job.stop()
