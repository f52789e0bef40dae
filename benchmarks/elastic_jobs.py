"""Jobs under ``phalanx run`` as competitors.

Rank 0 of the pool starts a job beside the pool, and tells its ranks by a socket how many steps to
make; they answer how long those took. Between orders they are blocked in a read.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from phalanx.testing import RankContext

from .entry import SelfTimed

__all__ = ["ElasticJob", "launched"]

ROOT = Path(__file__).parents[1]
START_TIMEOUT = 120.0
TURN_TIMEOUT = 300.0
END_TIMEOUT = 20.0


@contextlib.contextmanager
def launched(
    ctx: RankContext, options: Sequence[str], model: str, micro_batches: int
) -> Iterator[SelfTimed]:
    """Let a job with as many ranks compete; rank 0 drives it, the others wait."""
    if ctx.rank:
        yield SelfTimed(lambda _: 0.0)
        return
    with ElasticJob(ctx.size, options, model, micro_batches) as job:
        yield SelfTimed(job.time)


class ElasticJob:
    """A run of `ElasticRun` under ``phalanx run`` that makes steps when told to."""

    def __init__(
        self,
        ranks: int,
        options: Sequence[str],
        model: str,
        micro_batches: int,
        *,
        samples_memory: bool = False,
    ) -> None:
        self._streams: list[TextIO] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the rest
        phalanx = str(Path(sys.executable).with_name("phalanx"))
        command = [phalanx, "run", "-n", str(ranks), *options, "-m", f"{__package__}.elastic_rank"]
        what = "memory" if samples_memory else "time"
        try:
            self._start(ranks, [*command, model, str(micro_batches), what])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def time(self, steps: int) -> float:
        """Let all ranks make so many steps; return the seconds of the slowest."""
        return max(float(each["seconds"]) for each in self._order(steps=steps))

    def peaks(self, steps: int) -> list[int]:
        """Let all ranks make so many steps; return the most bytes that each has had."""
        return [int(each["peak"]) for each in self._order(steps=steps)]

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
                self._process.kill()  # the ranks end with their launcher
                self._process.wait()
        self._output.close()

    # -- inside ----------------------------------------------------------------------------

    def _start(self, ranks: int, command: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = f"{folder}/orders"
            listener.bind(path)
            listener.listen(ranks)
            listener.settimeout(0.1)
            self._process = subprocess.Popen(
                [*command, path],
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
            deadline = time.monotonic() + START_TIMEOUT
            for _ in range(ranks):
                self._streams.append(self._accept(listener, deadline))

    def _accept(self, listener: socket.socket, deadline: float) -> TextIO:
        assert self._process is not None
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                raise RuntimeError(f"the job did not start: {self._last_output_line()}") from None
            connection.settimeout(TURN_TIMEOUT)
            with connection:  # the stream keeps it open
                return connection.makefile("rw")

    def _order(self, **order: Any) -> list[Any]:
        for stream in self._streams:
            stream.write(json.dumps(order) + "\n")
            stream.flush()
        return [self._hear(stream) for stream in self._streams]

    def _hear(self, stream: TextIO) -> Any:
        line = stream.readline()
        if not line:
            raise RuntimeError(f"a rank of the job has ended: {self._last_output_line()}")
        return json.loads(line)

    def _last_output_line(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _environment() -> dict[str, str]:
    """Return what is not of the pool: the job has ranks of its own."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in own}
