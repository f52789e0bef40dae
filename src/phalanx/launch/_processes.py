"""Processes that the launcher starts, and how it makes sure that none of them stays.

Each rank leads a session of its own: a Ctrl-C at the terminal reaches the launcher alone, and
everything that a rank starts is found again by its process group.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from . import _guard

__all__ = ["Caught", "Child", "Ended", "Event", "Guard", "start", "start_store", "with_leftovers"]


@dataclass(frozen=True)
class Ended:
    """A child has ended."""

    child: Child
    code: int
    """As `subprocess` counts: negative for the number of a signal."""
    at: float
    """When, on the monotonic clock."""


@dataclass(frozen=True)
class Caught:
    """The launcher was sent a signal."""

    number: int


Event = Ended | Caught


@dataclass(frozen=True, eq=False)
class Child:
    """A process that the launcher has started, with all that it starts itself."""

    process: subprocess.Popen[bytes]

    @property
    def has_ended(self) -> bool:
        """Whether the process itself is over; what it started may not be."""
        return self.process.returncode is not None

    def send(self, number: int) -> None:
        """Signal the process itself, unless it has ended."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send_to_group(self, number: int) -> None:
        """Signal the process and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Guard:
    """The launcher's side of the process that ends the ranks if the launcher is killed."""

    def __init__(self, *, grace: float) -> None:
        # -I and -S: nothing of the user's is loaded, so it is up in the time of a bare interpreter.
        command = [sys.executable, "-I", "-S", _guard.__file__, str(grace)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Killed before its pipe is closed: it must not take our orderly end for a sudden one.
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def watch(self, child: Child) -> None:
        """Take a child into care."""
        self._tell(f"+{child.process.pid}\n")

    def forget(self, child: Child) -> None:
        """Leave a child alone whose group is over: its number may soon be somebody else's."""
        self._tell(f"-{child.process.pid}\n")

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text.encode())


def start(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    events: SimpleQueue[Event],
    stdin: int | None = subprocess.DEVNULL,
    pass_fds: Collection[int] = (),
) -> Child:
    """Start a process in a session of its own and put its end into `events`."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    child = Child(process)

    def wait() -> None:
        code = process.wait()
        events.put(Ended(child, code, time.monotonic()))

    threading.Thread(target=wait, name=f"phalanx-wait-{name}", daemon=True).start()
    return child


def start_store(*, env: Mapping[str, str], events: SimpleQueue[Event]) -> tuple[Child, int]:
    """Start a store on a free port of this machine and return it and the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        fd = listener.fileno()
        # -P: a queue.py that lies where the user works is not for us to import.
        command = [sys.executable, "-P", "-m", "phalanx.launch._store", str(fd)]
        child = start("store", command, env=env, events=events, pass_fds=[fd])
        return child, listener.getsockname()[1]


def with_leftovers(children: Iterable[Child]) -> list[Child]:
    """Return the children that have ended while something they started has not."""
    ended = {child.process.pid: child for child in children if child.has_ended}
    suspects = {group for group in ended if _exists(group)}
    return [ended[group] for group in sorted(_living(suspects))] if suspects else []


def _exists(group: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return False


def _living(groups: set[int]) -> set[int]:
    """Return which groups of leaders that have ended still have a member, other than a zombie."""
    if not Path("/proc/self/stat").exists():
        return groups
    living, reused = set(), set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name comes before this in parentheses and may contain anything.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) in groups and state not in b"ZX":
                living.add(int(group))
                # These leaders are gone. If one is here, the number has been given to a stranger.
                if path.parent.name == group.decode():
                    reused.add(int(group))
    return living - reused
