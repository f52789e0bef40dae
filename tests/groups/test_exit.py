"""Exit of a program with calls in flight, and calls that outlast the engine's wait."""

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import native
from phalanx.groups.backends import shm

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

LONG = timedelta(seconds=60)

# Rank 1 exits while the interpreter of rank 0 is shutting down, which ends rank 0's waits.
PROGRAM = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path

import torch

from phalanx.groups import new_group

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
where = {"store": f"file://{folder}/store", "rank": rank, "world_size": 2}
group = new_group("shm", **where, timeout=timedelta(seconds=60), driver="caller")
other = group.split_group([0, 1], backend="gloo")
other.barrier().wait()


class Slow:
    def __del__(self, touch=(folder / "down").touch, sleep=time.sleep):
        touch()
        sleep(0.4)


if rank == 0:
    sys.modules["slow"] = Slow()
    future = group.allreduce(torch.ones(3)).get_future()
    receive = other.recv(torch.ones(3), 1).get_future()
    waiter = threading.Thread(target=group.allreduce(torch.ones(3)).wait, daemon=True)
    waiter.start()
else:
    while not (folder / "down").exists():
        time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_program_exits_cleanly_with_calls_in_flight(tmp_path):
    """A future of ours, one of torch's, and a waiting thread; none crashes the process."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py", str(rank), tmp_path],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert "terminate" not in errors[0]


# The callback blocks a thread of rank 0's engine. A function of the program would keep the names of
# the program, and so the groups, until the process has ended.
BLOCKED = """
import queue, threading

import torch
from torch.distributed import HashStore

from phalanx.groups import new_group

store, groups, runs = HashStore(), {}, queue.SimpleQueue()


def form(rank):
    groups[rank] = new_group("gloo", store=store, rank=rank, world_size=2)


threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
future = groups[0].allreduce(torch.ones(3)).get_future()
future.then(runs.put)
future.then(queue.SimpleQueue().get)
groups[1].allreduce(torch.ones(3)).wait()
runs.get()
for group in groups.values():
    group.shutdown()
"""


@pytest.mark.slow
def test_a_program_exits_after_shutdown_while_a_gloo_thread_is_blocked():
    """The group used to destroy its engine, which waits for the thread."""
    subprocess.run([sys.executable, "-c", BLOCKED], check=True, timeout=60)


def wait_longer_than_the_engine_does(ctx, how):
    group = ctx.group("shm", timeout=LONG, driver="caller")
    usual, shm._LONG_WAIT = shm._LONG_WAIT, 0.02  # an hour, usually
    try:
        tensor = torch.full((3,), float(ctx.rank + 1))
        if ctx.rank == 1:
            ctx.store.wait(["waits"])
        call = {
            "future": lambda: group.allreduce(tensor).get_future(),
            "call": lambda: group._engine.allreduce([tensor], dist.AllreduceOptions()),
            "transfer": lambda: (
                group._engine.send([tensor], 0, 0)
                if ctx.rank
                else group._engine.recv([tensor], 1, 0)
            ),
        }[how]()
        if ctx.rank == 0:
            threading.Timer(0.1, ctx.store.set, ["waits", ""]).start()
        call.wait()
        return tensor.tolist()
    finally:
        shm._LONG_WAIT = usual


@pytest.mark.parametrize("how", ["future", "call", "transfer"])
def test_a_wait_without_timeout_outlasts_the_engines_longest_wait(ranks, how):
    both = ranks.run(wait_longer_than_the_engine_does, 2, args=(how,))
    assert both == ([[2.0] * 3] * 2 if how == "transfer" else [[3.0] * 3] * 2)
