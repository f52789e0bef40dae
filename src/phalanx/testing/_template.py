"""The process of which every rank process is a copy.

It imports torch once and then only waits. A new rank is a fork of it, which costs milliseconds
where a new interpreter costs seconds; so a rank that died or hung is cheap to replace. Forking is
safe because the template never starts a thread and never runs an operation.

It also is the one that waits for the ranks' ends: while it has not, a rank's process id cannot
belong to anybody else, and so it is the one that sends them signals.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from . import _worker

__all__ = ["main"]


def main(control: int, preload: list[str]) -> None:
    """Serve the pool at the other end of `control` until it hangs up."""
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    Template(socket.socket(fileno=control)).serve()
    os._exit(0)  # nothing is left to do, and to unload torch takes a while


class Template:
    """The parent of the ranks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}  # process id to a descriptor that is readable at its end
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork, signal and reap ranks; end with the pool, and end them, too."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._reap(key.data)
                    elif not self._obey():
                        return
        finally:
            for pid in self._ranks:
                _kill(pid)

    def _obey(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, 4096, 3)
        if not message:
            return False
        order = json.loads(message)
        if order["do"] == "fork":
            self._fork(descriptors)
        elif order["rank"] in self._ranks:
            os.kill(order["rank"], order["signal"])
        return True

    def _fork(self, descriptors: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[pid] = os.pidfd_open(pid)
        self._selector.register(self._ranks[pid], selectors.EVENT_READ, pid)
        self._tell(forked=pid)

    def _become_rank(self, descriptors: list[int], parent: int) -> None:
        status = 1
        try:
            # Nothing of the template's may stay open here, or its end would go unnoticed.
            self._selector.close()
            self._control.close()
            for descriptor in self._ranks.values():
                os.close(descriptor)
            _worker.main(*descriptors, parent=parent)
            status = 0
        except BaseException:  # noqa: BLE001 - nothing may return into the template's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _reap(self, pid: int) -> None:
        descriptor = self._ranks.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _kill(pid)
        _, status = os.waitpid(pid, 0)
        self._tell(ended=pid, status=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: Any) -> None:
        self._control.send(json.dumps(message).encode())


def _kill(pid: int) -> None:
    """Kill a rank and what it started; until it is waited for, nobody else has its ids."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it had no time to make its group
        os.killpg(pid, signal.SIGKILL)
