"""The life of a rank process: wait for a task, run it, report, be as new."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ._context import RankContext
from ._outcome import Report
from ._run import perform
from ._task import Task, pack_report, unpack_task, unpacked_arguments

__all__ = ["DUMP_SIGNAL", "host_store", "main"]

# One that neither torch nor a test is likely to use.
DUMP_SIGNAL = signal.SIGRTMIN + 6

_PR_SET_PDEATHSIG = 1


def main(tasks: int, output: int, stacks: int, *, parent: int) -> None:
    """Serve tasks until the pool hangs up."""
    _die_with(parent)
    os.setsid()  # so that whatever a body starts can be ended together with it
    os.dup2(output, 1)
    os.dup2(output, 2)
    # From the signal's handler in C, so that a rank that is blocked outside of Python shows, too.
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    with Connection(tasks) as connection:
        while True:
            try:
                task = unpack_task(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(pack_report(_run(task)))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _run(task: Task) -> Report:
    context = RankContext(
        task.rank,
        task.size,
        backend=task.backend,
        timeout=task.timeout,
        connect=lambda: _connect(task),
        generation=task.generation,
    )
    return perform(lambda rank: _call(task, rank), context, faults=task.faults)


def _call(task: Task, context: RankContext) -> Any:
    task.surroundings.enter()
    _seed()
    body = task.body.load()  # first: what the arguments refer to may be in its module
    with unpacked_arguments(task.arguments) as (args, kwargs):
        result = body(context, *args, **kwargs)
    _tidy()  # not after a failure: then the process is not used again
    return result


def _connect(task: Task) -> Store:
    store = TCPStore(
        "127.0.0.1",
        task.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=task.timeout),
    )
    return PrefixStore(task.prefix, store)


_stores: list[TCPStore] = []


def host_store(context: RankContext) -> int:
    """Open a store that lives as long as this process and return its port."""
    del context
    _stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _stores[-1].port


def _seed() -> None:
    torch.set_num_threads(1)  # ranks share the machine
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def _tidy() -> None:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    # What is left was imported, or is kept. To walk through it after every body would soon take
    # longer than the bodies.
    gc.freeze()
