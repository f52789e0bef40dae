"""The processes of a rank pool: the template, and the rank processes forked from it.

The template imports torch once and then waits. A new rank is a fork of it, which takes
milliseconds where a new interpreter takes seconds, so a rank that died or hung is cheap to
replace. Forking is safe because the template never starts a thread.

The template also reaps the ranks and sends them signals: until it has waited for a rank, that
rank's pid cannot belong to another process.

A rank process waits for a task, runs it, reports, and resets what a body may have changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import traceback
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ._run import RankContext, run_body
from ._task import Task, pack_report, unpack_task, unpacked_arguments

# One that neither torch nor a test is likely to use.
DUMP_SIGNAL = signal.SIGRTMIN + 6

_PR_SET_PDEATHSIG = 1


def rank_main(tasks: int, output: int, stacks: int, *, parent: int) -> None:
    """Run tasks until the pool closes the connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)
    os.setsid()  # so that its process group has all that a body starts
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The handler is in C, so it also works if the rank is blocked outside of Python.
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    with Connection(tasks) as connection:
        while True:
            try:
                task = unpack_task(connection.recv_bytes())
            except EOFError:
                return
            context = RankContext(
                task.rank,
                task.size,
                backend=task.backend,
                timeout=task.timeout,
                connect=partial(_connect_to_store, task),
                generation=task.generation,
            )
            result = run_body(partial(_call_body, task), context, faults=task.faults)
            connection.send_bytes(pack_report(result))


def _call_body(task: Task, context: RankContext) -> Any:
    task.caller_environment.enter()
    torch.set_num_threads(1)  # ranks share the machine
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    body = task.body.load()  # first: arguments may refer to its module
    with unpacked_arguments(task.arguments) as (args, kwargs):
        result = body(context, *args, **kwargs)
    # Reset torch's state, but not after a failure: the process is replaced then.
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    # The remaining objects are permanent. Scanning them after every body would dominate the run.
    gc.freeze()
    return result


def _connect_to_store(task: Task) -> Store:
    timeout = timedelta(seconds=task.timeout)
    store = TCPStore(
        "127.0.0.1", task.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return PrefixStore(task.prefix, store)


_hosted_stores: list[TCPStore] = []


def host_store(context: RankContext) -> int:
    """Open a store for the life of this process and return its port."""
    del context
    _hosted_stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _hosted_stores[-1].port


def template_main(control: int, preload: list[str]) -> None:
    """Serve the pool until it closes its end of `control`."""
    for name in preload:
        importlib.import_module(name)
    # torch detects the CPU's features at the first conversion and never tries again. A rank whose
    # body has used up its descriptors by then could not convert until the process ends.
    torch.zeros(1).to(torch.float16)
    gc.collect()
    gc.freeze()
    TemplateServer(socket.socket(fileno=control)).serve()
    os._exit(0)  # unloading torch takes a while


class TemplateServer:
    """The parent of the ranks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}  # pid to pidfd
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork, signal and reap ranks until the pool disconnects, then kill them."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._reap(key.data)
                        continue
                    message, descriptors, _, _ = socket.recv_fds(self._control, 4096, 3)
                    if not message:
                        return
                    request = json.loads(message)
                    if request["do"] == "fork":
                        self._fork(descriptors)
                    elif request["rank"] in self._ranks:
                        os.kill(request["rank"], request["signal"])
        finally:
            for pid in self._ranks:
                _kill_rank(pid)

    def _fork(self, descriptors: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[pid] = os.pidfd_open(pid)
        self._selector.register(self._ranks[pid], selectors.EVENT_READ, pid)
        self._send(forked=pid)

    def _become_rank(self, descriptors: list[int], parent: int) -> None:
        status = 1
        try:
            # Close the template's descriptors, or the pool would not notice its death.
            self._selector.close()
            self._control.close()
            for descriptor in self._ranks.values():
                os.close(descriptor)
            rank_main(*descriptors, parent=parent)
            status = 0
        except BaseException:  # noqa: BLE001 - must not return into the template's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _reap(self, pid: int) -> None:
        descriptor = self._ranks.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _kill_rank(pid)
        _, status = os.waitpid(pid, 0)
        self._send(ended=pid, status=os.waitstatus_to_exitcode(status))

    def _send(self, **message: Any) -> None:
        self._control.send(json.dumps(message).encode())


def _kill_rank(pid: int) -> None:
    """Kill a rank and what it started. Its pid cannot be reused before it is reaped."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it died before setsid
        os.killpg(pid, signal.SIGKILL)
