"""Kills and stops at any moment: the other ranks learn soon which rank, and continue.

The ranks of `test_kills` die at fault points, between the steps of a call. Here another rank
kills them at a random time: in the middle of a copy, a sum or a sleep. A few by default;
``PHALANX_KILLS=300 make test ARGS="tests/groups/test_shm_deaths.py -s"`` for many, with the times.
"""

import gc
import os
import random
import signal
import statistics
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from phalanx import native
from phalanx.errors import CollectiveTimeout, GroupError, PeerLost
from phalanx.testing import Fault, faults, kill, stop

from .internals import PeerProcess, watch_peers
from .test_shm import no_names_but

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

KILLS = int(os.environ.get("PHALANX_KILLS", "16"))
LONG = timedelta(seconds=60)
SOON = 1.0  # seconds; the aim is a tenth of it, on a machine that does nothing else


def regions():
    """Count the regions that this process holds, by descriptor and by mapping."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # the one that lists the folder
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    held = [*links, *maps]
    return sum("memfd:phalanx" in each or "/phalanx-" in each for each in held)


def settled(before):
    """Wait until regions held only by garbage or by exiting threads are gone."""
    until = time.monotonic() + 5
    while regions() > before and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return regions() <= before


# -- detection latency ---------------------------------------------------------------------


def die_while_others_wait(ctx, count, shared):
    group = ctx.group("shm", timeout=LONG)
    victim = ctx.size - 1
    tensor = group.allocate((count,)) if shared else torch.empty(count)
    group.allreduce(tensor.fill_(1)).wait()
    if ctx.rank == victim:
        ctx.store.wait([f"waits/{rank}" for rank in range(victim)])
        ctx.store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.allreduce(tensor)
    ctx.store.set(f"waits/{ctx.rank}", "")
    with pytest.raises(PeerLost) as caught:
        work.wait()
    noticed = time.monotonic()
    assert caught.value.lost == (victim,)
    return noticed - float(ctx.store.get("died"))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "ordinary"])
@pytest.mark.parametrize("size", [2, 4])
def test_waiting_ranks_learn_of_a_death_at_once(ranks, size, shared):
    times = []
    for turn in range(max(2, KILLS // 8)):
        args = ([4, 200_000][turn % 2], shared)
        *delays, _ = ranks.run(die_while_others_wait, size, args=args, expect_dead=[size - 1])
        times += delays
    tell("until all who waited knew", times)
    assert max(times) < SOON


def die_while_another_is_busy(ctx):
    """Rank 1, the next in line, is alive and in user code when rank 2 dies."""
    group = ctx.group("shm", timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 1:
        ctx.store.wait(["noticed"])
        return None
    if ctx.rank == 2:
        ctx.store.wait(["waits"])
        ctx.store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.allreduce(torch.ones(4))
    ctx.store.set("waits", "")
    with pytest.raises(PeerLost) as caught:
        work.wait()
    noticed = time.monotonic()
    ctx.store.set("noticed", "")
    assert caught.value.lost == (2,)
    assert set(caught.value.reports) == {1, 2}
    return noticed - float(ctx.store.get("died"))


def test_a_death_is_detected_at_once_while_another_rank_is_busy(ranks):
    turns = range(max(3, KILLS // 8))
    times = [ranks.run(die_while_another_is_busy, 3, expect_dead=[2])[0] for _ in turns]
    tell("with another in user code", times)
    assert max(times) < SOON
    assert min(times) < 0.4, "sooner than anybody would wonder about a call that takes long"


def tell(what, times):
    """Print the distribution, visible with ``-s``."""
    ordered = sorted(1000 * each for each in times)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    middle = statistics.median(ordered)
    print(f"{what}: {len(ordered)} times, median {middle:.0f} ms,", end=" ")
    print(f"99 of 100 within {late:.0f} ms, all within {ordered[-1]:.0f} ms")


# -- at any moment -------------------------------------------------------------------------

CALLS = {
    "allreduce": lambda group, tensor, _: group.allreduce(tensor),
    "broadcast": lambda group, tensor, _: group.broadcast(tensor, root=group.size() - 1),
    "reduce": lambda group, tensor, _: group.reduce(tensor, 0),
    "barrier": lambda group, *_: group.barrier(),
    "allgather": lambda group, tensor, _: group.allgather(
        [torch.empty_like(tensor) for _ in range(group.size())], tensor
    ),
    "all_to_all_single": lambda group, tensor, other: group.all_to_all_single(other, tensor),
    "reduce_scatter_single": lambda group, tensor, other: group.reduce_scatter_single(
        other[: len(other) // group.size()], tensor
    ),
}


def be_killed_by_another(ctx, plan):
    before = regions()
    group = ctx.group("shm", timeout=LONG)
    assert regions() > before
    victim, count = plan["victim"], plan["count"] * ctx.size
    tensor = group.allocate((count,)) if plan["shared"] else torch.empty(count)
    tensor.zero_()
    group.barrier().wait()
    if ctx.rank == plan["killer"]:
        pid = int(ctx.store.get("pid"))
        strike = threading.Timer(plan["after"], kill_and_note, [pid, ctx.store])
        strike.start()
    elif ctx.rank == victim:
        ctx.store.set("pid", str(os.getpid()))
    with pytest.raises(PeerLost) as caught:
        go_round(group, tensor, plan)
    noticed = time.monotonic()
    assert caught.value.lost == (victim,)
    ctx.store.wait(["killed"])
    after = noticed - float(ctx.store.get("killed"))
    group.abort()
    go_on(ctx, group, victim)
    del group, tensor, caught
    ctx.leave_open()
    assert settled(before), "a region is left over"
    return after


def kill_and_note(pid, store):
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    store.set("killed", str(killed))


def go_round(group, tensor, plan):
    """Call until an error is raised, with several calls in flight if the plan says so."""
    other = torch.zeros_like(tensor)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        works = [CALLS[name](group, tensor, other) for name in plan["calls"]]
        for work in works:
            work.wait()


def go_on(ctx, group, victim):
    """Form a group of the survivors, and use it."""
    alive = [rank for rank in range(ctx.size) if rank != victim]
    rest = group.split_group(alive)
    total = torch.ones(20_000)
    rest.allreduce(total).wait()
    assert total.unique().tolist() == [float(len(alive))]
    rest.shutdown()


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_is_detected(ranks):
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    names = set(Path("/dev/shm").glob("phalanx*"))
    times = []
    for _ in range(KILLS):
        size = chance.choice([2, 3, 4])
        victim, killer = chance.sample(range(size), 2)
        plan = {
            "victim": victim,
            "killer": killer,
            "after": chance.uniform(0, 0.02),
            "calls": chance.choices(list(CALLS), k=chance.randint(1, 4)),
            "count": chance.choice([1, 1_000, 50_000, 300_000]),
            "shared": chance.random() < 0.5,
        }
        name = f"{plan} of {size} (seed {seed})"
        given = {"args": (plan,), "expect_dead": [victim], "name": name}
        delays = ranks.run(be_killed_by_another, size, **given)
        times += [each for rank, each in enumerate(delays) if rank != victim]
    tell("until all survivors knew", times)
    # The rank that reports a death waits for the others' reports, which may be late on a busy host.
    assert sorted(times)[len(times) * 9 // 10] < SOON, f"seed {seed}"
    assert max(times) < 3 * SOON, f"seed {seed}"
    assert no_names_but(names)


# -- agreement of survivors ----------------------------------------------------------------


def lose_two_after_a_call(ctx):
    """Rank 2 dies after a call; rank 3 fails in the next and dies too. Rank 1 did its share of
    the first call but has not waited for it yet."""
    group = ctx.group("shm", timeout=LONG, driver="caller")
    tensor = group.allocate((200_000,)).fill_(ctx.rank + 1)
    group.barrier().wait()
    if ctx.rank == 1:
        ctx.store.wait([f"issued/{rank}" for rank in (0, 2, 3)])
        work = group.allreduce(tensor)
    else:
        work = group.allreduce(tensor)
        ctx.store.set(f"issued/{ctx.rank}", "")
        work.wait()
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            group.allreduce(torch.ones(4)).wait()
        if ctx.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    while group._detector.dead_ranks() != {2, 3}:
        time.sleep(0.001)
    group.exclude([2, 3])
    work.wait()
    return tensor.unique().tolist()


def test_survivors_agree_on_a_call_that_completed_before_the_failure(ranks):
    found = ranks.run(lose_two_after_a_call, 4, expect_dead=[2, 3])
    assert found[:2] == [[10.0], [10.0]]


# -- in other waits ------------------------------------------------------------------------


def die_in_another_wait(ctx, how):
    group = ctx.group("shm", timeout=LONG)
    group.barrier().wait()
    if ctx.rank == 1:
        ctx.store.wait(["waits/0", "waits/2"])
        ctx.store.set("died", str(time.monotonic()))
        faults.reach("now")
    wait = {
        "recv": lambda: group.recv(torch.empty(3), 1).wait,
        "send": lambda: group.send(torch.ones(500_000), 1).wait,  # more than a channel holds
        "future": lambda: group.allreduce(torch.ones(3)).get_future().wait,
    }[how]()
    ctx.store.set(f"waits/{ctx.rank}", "")
    with pytest.raises(RuntimeError, match="rank 1 .* is dead"):
        wait()
    assert time.monotonic() - float(ctx.store.get("died")) < SOON


@pytest.mark.parametrize("how", ["recv", "send", "future"])
def test_transfers_and_futures_fail_when_a_peer_dies(ranks, how):
    ranks.run(die_in_another_wait, 3, args=(how,), faults=[Fault("now", kill(), rank=1)])


def exit_without_doing_the_share(ctx):
    """Rank 1 issues the call, reports a clean exit, and dies before it has done its share."""
    group = ctx.group("shm", timeout=LONG, driver="caller")
    tensor = torch.ones(700_000)
    if ctx.rank == 1:
        group.allreduce(tensor)
        group._detector.exit()
        ctx.store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.store.wait(["died"])
    with pytest.raises(PeerLost) as caught:
        group.allreduce(tensor).wait()
    assert caught.value.lost == (1,)
    assert time.monotonic() - float(ctx.store.get("died")) < SOON


def test_a_death_seen_by_the_engine_overrides_a_reported_clean_exit(ranks):
    ranks.run(exit_without_doing_the_share, 2, expect_dead=[1])


# -- during rendezvous ---------------------------------------------------------------------


def lose_a_rank_while_forming(ctx):
    before = regions()
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        ctx.group("shm", timeout=LONG)
    assert time.monotonic() - started < 5, "well before the deadline of a minute"
    lost = caught.value.lost
    del caught
    assert settled(before), "a region is left over"
    return lost


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_the_region_is_being_mapped_is_detected(ranks, victim):
    strike = Fault("form:mapped", kill(), rank=victim)
    results = ranks.run(lose_a_rank_while_forming, 3, faults=[strike])
    assert [each for rank, each in enumerate(results) if rank != victim] == [(victim,)] * 2


# -- stopped -------------------------------------------------------------------------------


def wait_for_a_stopped_rank(ctx, count):
    group = ctx.group("shm", timeout=LONG)
    tensor = group.allocate((count,)).fill_(1)
    if ctx.rank == 1:
        ctx.store.set("pid", str(os.getpid()))
    else:
        await_stop(int(ctx.store.get("pid")))
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        group.allreduce(tensor, timeout=timedelta(seconds=1)).wait()
    assert caught.value.missing == (1,)
    assert caught.value.reports[1].state == "stopped"
    assert 0.99 < time.monotonic() - started < 3
    group.abort()
    rest = ctx.closing(group.split_group([0, 2]))
    rest.barrier().wait()


def await_stop(pid):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


@pytest.mark.parametrize("point", ["before", "issued"])
def test_a_rank_stopped_past_the_deadline_is_named(ranks, point):
    strike = Fault(f"allreduce:{point}", stop(), rank=1)
    ranks.run(wait_for_a_stopped_rank, 3, args=(100_000,), faults=[strike])


def come_back_too_late(ctx):
    group = ctx.group("shm", timeout=LONG)
    tensor = group.allocate((100_000,)).fill_(1)
    if ctx.rank == 1:
        work = group.allreduce(tensor)
        ctx.store.set("pid", str(os.getpid()))
        ctx.store.wait(["given up"])
        with pytest.raises(GroupError):
            work.wait()
        ctx.store.set("tried", "")
        return
    pid = int(ctx.store.get("pid"))
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)
    try:
        with pytest.raises(CollectiveTimeout) as caught:
            group.allreduce(tensor, timeout=timedelta(seconds=0.5)).wait()
        assert caught.value.missing == (1,)
        tensor.fill_(5)  # it is the caller's again
        ctx.store.set("given up", "")
    finally:
        os.kill(pid, signal.SIGCONT)
    ctx.store.wait(["tried"])
    assert tensor.unique().tolist() == [5.0]


def test_a_rank_resumed_after_the_deadline_does_not_write_to_tensors(ranks):
    ranks.run(come_back_too_late, 2)


PIECE = (
    256 * 1024
)  # bytes of each buffer that a rank touches between two looks; `region_layout.hpp`


def be_stopped_in_the_middle(ctx, count):
    """Rank 1 is stopped while it writes its half of a sum; rank 0 times out and continues."""
    group = ctx.group("shm", timeout=LONG, driver="caller")
    tensor = group.allocate((count,))
    if ctx.rank == 1:
        ctx.store.set("pid", str(os.getpid()))
        with pytest.raises(GroupError):
            while True:
                sum_of_ones(group, tensor, LONG).wait()
        ctx.store.set("tried", "")
        return None
    pid = int(ctx.store.get("pid"))
    try:
        while not stop_in_the_middle(group, tensor, pid):
            os.kill(pid, signal.SIGCONT)
        tensor.fill_(5)  # it is the caller's again
        recycled = are_recycled(group)
    finally:
        os.kill(pid, signal.SIGCONT)
    ctx.store.wait(["tried"])
    written = (tensor != 5).nonzero().flatten()
    spread = 0 if len(written) == 0 else int(written[-1] - written[0]) + 1
    return spread * tensor.itemsize, recycled, are_recycled(group)


def sum_of_ones(group, tensor, timeout):
    tensor.fill_(1)
    group.barrier().wait()
    return group.allreduce(tensor, timeout=timeout)


def stop_in_the_middle(group, tensor, pid):
    """Stop a peer as soon as it starts its half; returns whether it was still unfinished."""
    work = sum_of_ones(group, tensor, timedelta(seconds=1))
    theirs = tensor.numpy()[len(tensor) // 2 :]
    while theirs[0] == 1:
        pass
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)
    if theirs[-1] != 1:
        os.kill(pid, signal.SIGCONT)
        work.wait()
        return False
    with pytest.raises(CollectiveTimeout):
        work.wait()
    return True


def are_recycled(group):
    """Return whether a new tensor gets the memory of a freed one."""
    place = group.allocate((1000,)).data_ptr()
    return group.allocate((1000,)).data_ptr() == place


def test_a_rank_stopped_while_writing_writes_at_most_one_more_piece(ranks):
    (stored, recycled, recycled_later), _ = ranks.run(be_stopped_in_the_middle, 2, args=(8 << 20,))
    assert stored <= PIECE
    assert not recycled, "what a stopped rank may yet store into"
    assert recycled_later, "now that it has let go"


def be_stopped_again_and_again(ctx, count, shared):
    group = ctx.group("shm", timeout=LONG)
    if ctx.rank == 0:
        ctx.store.wait(["pid"])
        over = threading.Event()
        pid = int(ctx.store.get("pid"))
        stopper = threading.Thread(target=stop_and_go, args=(pid, over))
        stopper.start()
    else:
        ctx.store.set("pid", str(os.getpid()))
    tensor = group.allocate((count,)) if shared else torch.empty(count)
    numbers = torch.arange(count, dtype=torch.float32)
    try:
        for turn in range(60):
            torch.add(numbers, ctx.rank + turn, out=tensor)
            group.allreduce(tensor).wait()
            assert torch.equal(tensor, 2 * numbers + (1 + 2 * turn)), turn
    finally:
        if ctx.rank == 0:
            over.set()
            stopper.join()


def stop_and_go(pid, over):
    """Stop a process at random moments, for much less than any deadline."""
    chance = random.Random()
    while not over.is_set():
        os.kill(pid, signal.SIGSTOP)
        over.wait(chance.uniform(0, 0.01))
        os.kill(pid, signal.SIGCONT)
        over.wait(chance.uniform(0, 0.005))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "ordinary"])
def test_results_are_correct_if_a_rank_is_stopped_at_any_moment(ranks, shared):
    ranks.run(be_stopped_again_and_again, 2, args=(150_000, shared))


# -- pid reuse -----------------------------------------------------------------------------


def test_a_reused_pid_counts_as_a_death():
    """Watching an unrelated process with the peer's pid would hide the peer's death."""
    me = PeerProcess.current()
    peer = replace(me, pid=os.getppid(), started="1")  # a parent that started later
    with pytest.raises(PeerLost, match="rank 1 .* died") as raised:
        watch_peers(Mock(), 0, [me, peer])
    assert raised.value.ranks == (1,)
