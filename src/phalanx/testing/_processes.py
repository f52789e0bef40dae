"""The pool's side of its processes: the template and the ranks forked from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import RanksFailed
from ._outcome import is_ours
from ._task import rank_environment
from ._worker import DUMP_SIGNAL

__all__ = ["RankProcess", "TemplateProcess", "read_stacks", "stacks_of"]

_START_TIMEOUT = 120.0  # seconds to import torch and what is to be preloaded
_END_TIMEOUT = 10.0  # seconds from a kill to the news of the end
_DUMP_TIMEOUT = 2.0  # seconds to wait for stacks
_SETTLED = 0.05  # seconds without growth after which a dump is complete
_OUTPUT_SHOWN = 8_000  # bytes of what a process printed
_STACKS_SHOWN = 100_000  # bytes of what it dumped

_COMMAND = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from phalanx.testing import _template
_template.main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""


class Scratch:
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
        self.output = Scratch()
        self.stacks = Scratch()
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
        return self.output.tail(_OUTPUT_SHOWN)

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
        self._errors = Scratch()
        self._ranks: dict[int, RankProcess] = {}
        # A session of its own: an interrupt at the terminal is the caller's to handle.
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), json.dumps(list(preload))]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _COMMAND, *arguments],
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
            rank.pid = self._hear_of_fork()
        except BaseException:
            rank.close()
            raise
        self._ranks[rank.pid] = rank
        return rank

    def _hear_of_fork(self) -> int:
        deadline = time.monotonic() + _START_TIMEOUT
        while "forked" not in (news := self._hear(deadline)):
            pass
        return int(news["forked"])

    def send_signal(self, rank: RankProcess, signum: int) -> None:
        """Send a rank a signal, unless it has ended."""
        self._say({"do": "signal", "rank": rank.pid, "signal": int(signum)})

    def end(self, rank: RankProcess) -> None:
        """Kill a rank and wait for its end."""
        deadline = time.monotonic() + _END_TIMEOUT
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
        words = self._errors.tail(_OUTPUT_SHOWN).strip()
        told = f":\n{words}" if words else ""
        return RanksFailed(f"the process that starts the ranks has ended{told}")

    def close(self) -> None:
        """End the template, which ends the ranks."""
        self._control.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def stacks_of(template: TemplateProcess, ranks: Sequence[RankProcess]) -> list[str]:
    """Ask ranks where they are; one that cannot answer is described."""
    for rank in ranks:
        template.send_signal(rank, DUMP_SIGNAL)
    _wait_for_answers([rank for rank in ranks if not rank.stopped])
    return [_answer(rank) for rank in ranks]


def _wait_for_answers(ranks: Sequence[RankProcess]) -> None:
    # A dump has no end mark: it is complete when it has not grown for a moment.
    sizes: list[int] = []
    deadline = time.monotonic() + _DUMP_TIMEOUT
    while ranks and time.monotonic() < deadline:
        time.sleep(_SETTLED)
        before, sizes = sizes, [rank.stacks.size for rank in ranks]
        if all(sizes) and sizes == before:
            break


def _answer(rank: RankProcess) -> str:
    if rank.stopped:
        return "  stopped by a signal"
    return read_stacks(rank) or "  no answer, not even from a signal handler"


def read_stacks(rank: RankProcess) -> str:
    """Read what the rank's interpreter dumped, without the frames that led into the body."""
    lines = rank.stacks.tail(_STACKS_SHOWN).splitlines()
    return "\n".join(f"  {line}" for line in lines if not (is_ours(line) or "<string>" in line))
