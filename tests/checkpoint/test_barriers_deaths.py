"""Barriers whose ranks or store hosts die or stop: the other ranks raise in time."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx import native
from phalanx.checkpoint.barriers import DistBarrier, GroupBarrier, TCPStoreBarrier
from phalanx.checkpoint.components import CheckpointWriter, CheckpointWriterConfig, RankInfo
from phalanx.errors import BarrierError, BarrierTimeout, InvalidState, SaveFailed
from phalanx.groups import new_group
from phalanx.testing import Fault, kill
from ports import free_port

from .internals import BarrierTimings, _store_connection
from .states import load, mixed, plain, same

LONG = 25.0  # seconds
SOON = 8.0


def tcp(ctx, port, **more):
    return TCPStoreBarrier(ctx.rank, ctx.size, "save", 20, True, port, "127.0.0.1", LONG, **more)


def pid_of(ctx, rank):
    return int(ctx.store.get(f"pid/{rank}"))


def host_dies(ctx, port):
    barrier = tcp(ctx, port)
    barrier.execute_barrier()
    if ctx.rank == 0:
        ctx.store.wait(["waits/1", "waits/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    ctx.store.set(f"waits/{ctx.rank}", "")
    with pytest.raises(BarrierError, match=r"hosted by rank 0\) is gone") as error:
        barrier.execute_barrier()
    assert error.value.round == 2
    assert not isinstance(error.value, TimeoutError)
    return time.monotonic() - began


def test_death_of_the_store_host_is_raised_at_once(ranks):
    _, *times = ranks.run(host_dies, 3, args=(free_port(),), expect_dead=[0])
    assert max(times) < SOON


def save_while_the_host_dies(ctx, path, port):
    """Kill the host between the first and the second save, then replace it."""
    writer = saver(tcp(ctx, port), ctx.rank, ctx.size)
    writer.write(path, mixed(ctx.rank, 1))
    ctx.store.set(f"saved/{ctx.rank}", "")
    if ctx.rank == 0:
        ctx.store.wait(["saved/1", "saved/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    await_refusal(port)
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"hosted by rank 0\) is gone"):
        writer.write(path, mixed(ctx.rank, 2))
    took = time.monotonic() - began
    assert same(load(path, ctx.rank, ctx.size)[0], plain(mixed(ctx.rank, 1)))
    ctx.store.set(f"failed/{ctx.rank}", "")
    ctx.store.wait(["failed/1", "failed/2"])
    with ThreadPoolExecutor(1) as pool:
        successor = pool.submit(save_instead, path, port, ctx.size) if ctx.rank == 1 else None
        writer.write(path, mixed(ctx.rank, 3))
        if successor:
            successor.result()
    return took


def saver(barrier, rank, size):
    return CheckpointWriter(CheckpointWriterConfig(LONG), RankInfo(rank, size), barrier)


def save_instead(path, port, size):
    barrier = TCPStoreBarrier(0, size, "save", 20, True, port, "127.0.0.1", LONG)
    writer = saver(barrier, 0, size)
    writer._writes = 2  # as if a restarted rank knew
    writer.write(path, mixed(0, 3))


def await_refusal(port):
    with suppress(ConnectionRefusedError):
        while True:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.005)


def test_store_death_between_saves_fails_one_save(ranks, tmp_path):
    path = str(tmp_path / "c")
    _, *times = ranks.run(save_while_the_host_dies, 3, args=(path, free_port()), expect_dead=[0])
    assert max(times) < SOON
    for rank in range(3):
        assert same(load(path, rank, 3)[0], plain(mixed(rank, 3)))
    assert os.listdir(tmp_path) == ["c"]


def save_twice(ctx, path, port):
    writer = saver(tcp(ctx, port), ctx.rank, ctx.size)
    writer.write(path, mixed(ctx.rank, 1))
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"hosted by rank 0\) is gone"):
        writer.write(path, mixed(ctx.rank, 2))
    return time.monotonic() - began


def test_store_death_during_a_save_keeps_the_previous_checkpoint(ranks, tmp_path):
    path = str(tmp_path / "c")
    fault = Fault("checkpoint:written", kill(), rank=0, nth=2)
    _, took = ranks.run(save_twice, 2, args=(path, free_port()), faults=[fault])
    assert took < SOON
    for rank in range(2):
        assert same(load(path, rank, 2)[0], plain(mixed(rank, 1)))


def group_host_dies(ctx, port):
    """The group's store dies with rank 0; that must not delay the error."""
    group = new_group(
        "shm",
        store=f"tcp://127.0.0.1:{port}",
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=timedelta(seconds=LONG),
    )
    barrier = GroupBarrier(group, timeout_secs=LONG)
    barrier.execute_barrier()
    ctx.store.set(f"waits/{ctx.rank}", "")
    if ctx.rank == 0:
        ctx.store.wait(["waits/1", "waits/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(BarrierError, match="rank 0.* is dead") as error:
        barrier.execute_barrier()
    took = time.monotonic() - began
    assert (error.value.round, error.value.progress) == (2, {0: 1})
    barrier._timeout = 0.2
    with pytest.raises(BarrierTimeout, match="no store at ") as error:
        barrier.exchange("")
    assert error.value.round == 3
    return took


@pytest.mark.skipif(native.engine is None, reason=native.why_missing)
def test_death_of_a_groups_store_host_is_raised_at_once(ranks):
    _, *times = ranks.run(group_host_dies, 3, args=(free_port(),), expect_dead=[0])
    assert max(times) < SOON


def test_forked_child_does_not_disturb_its_parent():
    """It exits normally while its parent waits, and cannot use the inherited barrier."""
    port = free_port()
    both = [TCPStoreBarrier(r, 2, "fork", 20, True, port, "127.0.0.1", LONG) for r in range(2)]
    root = both[0]._member.root
    watcher = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(both[0].exchange, "a")
        watcher.wait([f"{root}progress/0"])
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                _store_connection.flush_connections()
                try:
                    both[1].execute_barrier()
                except InvalidState:
                    os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert both[1].exchange("b") == waiting.result() == ["a", "b"]


HOST = """
import sys
from phalanx.checkpoint.barriers import TCPStoreBarrier
barrier = TCPStoreBarrier(0, 2, "last", 20, True, int(sys.argv[1]), "127.0.0.1", 20)
sys.stdin.readline()  # the other waits
barrier.execute_barrier()
"""


def test_exiting_host_has_released_all_ranks():
    """It arrives last, so it must complete the round, and exits at once."""
    port = free_port()
    command = [sys.executable, "-c", HOST, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as host:
        barrier = TCPStoreBarrier(1, 2, "last", 20, True, port, "127.0.0.1", LONG)
        root = barrier._member.root

        def tell_the_host():
            watcher = dist.TCPStore("127.0.0.1", port, is_master=False)
            watcher.wait([f"{root}progress/1"])  # set by a waiting rank
            host.communicate("go")

        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(tell_the_host)
            barrier.execute_barrier()
            told.result()
    assert host.returncode == 0


def test_host_registers_one_exit_hook_for_all_barriers():
    port, before = free_port(), atexit._ncallbacks()
    for number in range(3):  # each is garbage collected before the next
        TCPStoreBarrier(0, 1, f"{number}", 20, True, port, "127.0.0.1", LONG).execute_barrier()
    assert atexit._ncallbacks() <= before + 1


def host_stops(ctx, port):
    """A stopped host does not answer: the timeout holds, and later rounds pass again.

    The others cannot know whether their arrivals reached it, so its own call may succeed once it
    resumes.
    """
    barrier = tcp(ctx, port, timings=BarrierTimings(store_grace=0.1))
    barrier.execute_barrier()
    barrier._timeout = 0.5
    ctx.store.set(f"pid/{ctx.rank}", str(os.getpid()))
    if ctx.rank == 0:
        ctx.store.wait(["told/1", "told/2"])
        with suppress(BarrierTimeout):
            barrier.exchange("")
        with pytest.raises(BarrierTimeout):
            barrier.exchange("")
    else:
        stop_the_host(ctx)
        for use, told in ((2, "did not answer within 0.5 s"), (3, "did not answer")):
            began = time.monotonic()
            with pytest.raises(BarrierTimeout, match=told) as error:
                barrier.exchange("")
            assert error.value.round == use
            assert time.monotonic() - began < SOON
        ctx.store.set(f"raised/{ctx.rank}", "")
        ctx.store.wait(["raised/1", "raised/2"])
        if ctx.rank == 1:
            os.kill(pid_of(ctx, 0), signal.SIGCONT)
        ctx.store.set(f"told/{ctx.rank}", "")
    ctx.store.set(f"over/{ctx.rank}", "")
    ctx.store.wait([f"over/{rank}" for rank in range(ctx.size)])
    barrier._timeout = LONG
    return barrier.exchange(str(ctx.rank))


def stop_the_host(ctx):
    if ctx.rank == 1:
        os.kill(pid_of(ctx, 0), signal.SIGSTOP)
        ctx.store.set("stopped", "")
    ctx.store.wait(["stopped"])


def test_stopped_host_does_not_void_the_timeout(ranks):
    assert ranks.run(host_stops, 3, args=(free_port(),)) == [["0", "1", "2"]] * 3


def rank_dies(ctx, port):
    barrier = tcp(ctx, port)
    for _ in range(3):
        barrier.execute_barrier()
    barrier._timeout = 0.7
    if ctx.rank == 2:  # may have been the last to arrive at the third round
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(BarrierTimeout) as error:
        barrier.execute_barrier()
    return error.value.round, error.value.progress


def test_dead_rank_is_named(ranks):
    *told, _ = ranks.run(rank_dies, 3, args=(free_port(),), expect_dead=[2])
    assert told == [(4, {2: 3})] * 2


def rank_dies_in_a_group(ctx):
    group = ctx.group("shm")
    barrier = GroupBarrier(group, timeout_secs=LONG)
    barrier.execute_barrier()
    if ctx.rank == 2:
        ctx.store.wait(["waits/0", "waits/1"])
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    ctx.store.set(f"waits/{ctx.rank}", "")
    with pytest.raises(BarrierError, match="rank 2.* is dead") as error:
        barrier.execute_barrier()
    return error.value.progress, time.monotonic() - began


@pytest.mark.skipif(native.engine is None, reason=native.why_missing)
def test_death_in_a_group_is_raised_at_once(ranks):
    *told, _ = ranks.run(rank_dies_in_a_group, 3, expect_dead=[2])
    assert [progress for progress, _ in told] == [{2: 1}] * 2
    assert max(took for _, took in told) < SOON


def meet_in_the_default_group(ctx, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=ctx.rank, world_size=ctx.size
    )
    try:
        one, other = DistBarrier(timeout_secs=LONG), DistBarrier(timeout_secs=0.2)
        for _ in range(5):
            one.execute_barrier()
        assert other.exchange(str(ctx.rank)) == [str(rank) for rank in range(ctx.size)]
        if ctx.rank == 0:
            ctx.store.wait(["failed"])
        with pytest.raises(BarrierTimeout) as error:
            other.execute_barrier()
        ctx.store.set("failed", "")
        assert error.value.round == 7
        one.execute_barrier()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_dist_barrier_timeout_does_not_break_the_default_group(ranks):
    ranks.run(meet_in_the_default_group, 2, args=(free_port(),))
