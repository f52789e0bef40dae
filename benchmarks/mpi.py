"""MPI as a competitor: its ranks need an mpiexec of their own, so they cannot be the pool's.

Rank 0 starts them beside the pool, once for each case, and tells them by a socket how many calls to
make; they answer how long those took. While they work our ranks sleep, and while ours work they do.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from phalanx.testing import RankContext

from .entry import Absent, SelfTimed

__all__ = ["MpiRanks", "Unavailable", "mpi"]

ROOT = Path(__file__).parents[1]
START_TIMEOUT = 60.0
TURN_TIMEOUT = 300.0
END_TIMEOUT = 20.0


class Unavailable(Exception):
    """MPI cannot be had here, for a reason that the table can give."""


@contextlib.contextmanager
def mpi(ctx: RankContext, operation: str, nbytes: int) -> Iterator[SelfTimed | Absent]:
    """Let as many MPI ranks compete as there are ranks; rank 0 drives them, the others wait."""
    with contextlib.ExitStack() as stack:
        ranks, why = None, ""
        if ctx.rank == 0:
            try:
                ranks = stack.enter_context(contextlib.closing(MpiRanks(ctx.size)))
            except Unavailable as error:
                why = str(error)
            ctx.store.set("why no MPI", why)
        else:
            why = ctx.store.get("why no MPI").decode()
        if why:
            yield Absent(why)
        else:
            yield SelfTimed(
                lambda calls: 0.0 if ranks is None else ranks.time(operation, nbytes, calls)
            )


class MpiRanks:
    """Processes under mpiexec that make calls when told to, and sleep between orders."""

    def __init__(self, size: int) -> None:
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the rest
        self._streams: list[TextIO] = []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(size)
        except BaseException:
            self.close()
            raise

    def time(self, operation: str, nbytes: int, calls: int) -> float:
        """Let every rank make so many calls and tell what the slowest took, in seconds."""
        order = {"operation": operation, "bytes": nbytes, "calls": calls}
        for stream in self._streams:
            stream.write(json.dumps(order) + "\n")
            stream.flush()
        return max(float(self._hear(stream)["seconds"]) for stream in self._streams)

    def close(self) -> None:
        """Close the connections, which ends the ranks, and wait for them."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._streams.clear()
        if self._process is not None:
            try:
                self._process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()

    # -- inside ----------------------------------------------------------------------------

    def _start(self, size: int) -> None:
        command = [_mpiexec(), "-n", str(size), sys.executable, "-m", f"{__package__}.mpi_rank"]
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = f"{folder}/orders"
            listener.bind(path)
            listener.listen(size)
            listener.settimeout(0.1)
            self._process = subprocess.Popen(
                [*command, path],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
            deadline = time.monotonic() + START_TIMEOUT
            for _ in range(size):
                self._streams.append(self._accept(listener, deadline))
        for stream in self._streams:
            found = self._hear(stream)["size"]
            if found != size:
                raise Unavailable(f"this mpiexec makes worlds of {found}, not {size}: not mpi4py's")

    def _accept(self, listener: socket.socket, deadline: float) -> TextIO:
        assert self._process is not None
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                raise Unavailable(f"it did not start: {self._last_output_line()}") from None
            connection.settimeout(TURN_TIMEOUT)
            with connection:  # the stream keeps it open
                return connection.makefile("rw")

    def _hear(self, stream: TextIO) -> Any:
        line = stream.readline()
        if not line:
            raise RuntimeError(f"an MPI rank has ended: {self._last_output_line()}")
        return json.loads(line)

    def _last_output_line(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _mpiexec() -> str:
    """Find the mpiexec that belongs to mpi4py: the one that was installed beside it, if any."""
    for name in ("mpi4py", "numpy"):
        if find_spec(name) is None:
            raise Unavailable(f"{name} is not installed; pip install 'phalanx[bench]' brings it")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise Unavailable("there is no mpiexec; pip install mpich brings one")
    return found
