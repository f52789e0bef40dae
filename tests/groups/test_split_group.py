"""split_group: a shorter rendezvous between known ranks, with the same guarantees."""

import gc
import os
import resource
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from phalanx.errors import (
    InvalidArgument,
    PeerLost,
    RankMismatch,
    RendezvousError,
    RendezvousTimeout,
    UnknownOption,
)
from phalanx.groups import new_group
from phalanx.groups.backends._shm_region import RegionOffer
from phalanx.testing import Died, Fault, faults, kill, over_groups, stop
from ports import free_port

from .internals import override_timing

LONG = timedelta(seconds=60)
SECONDS = timedelta(seconds=10)
KINDS = pytest.mark.parametrize("backend", ["shm", "gloo"])


def total(group, value=1):
    tensor = torch.tensor([float(value)])
    group.allreduce(tensor).wait()
    return tensor.item()


@over_groups(sizes=(4,), backends=("gloo",))
def test_a_split_can_have_its_own_backend_and_options(group):
    half = [0, 1] if group.rank() < 2 else [3, 2]
    quick = group.split_group(half, backend="shm", options={"driver": "caller"}, timeout=SECONDS)
    assert (quick.backend, quick.timeout, quick.size()) == ("shm", SECONDS, 2)
    assert total(quick) == 2
    chosen = group.split_group(half, backend="auto", group_name="chosen")
    assert chosen.backend == "shm"
    assert total(chosen) == 2
    again = quick.split_group([1, 0])  # with the options of the group that it comes from
    assert (again.backend, again.rank()) == ("shm", 1 - quick.rank())
    assert total(again) == 2
    for part in (quick, chosen, again):
        part.shutdown()


@over_groups(sizes=(1,), backends=("gloo",))
def test_invalid_split_arguments_are_rejected_before_rendezvous(group):
    with pytest.raises(InvalidArgument, match="'pigeon'.*gloo"):
        group.split_group([0], backend="pigeon")
    with pytest.raises(UnknownOption, match="speed"):
        group.split_group([0], backend="shm", options={"speed": 9})
    with pytest.raises(InvalidArgument, match="positive"):
        group.split_group([0], timeout=timedelta(0))


def test_a_fake_group_can_only_split_into_fake_groups():
    group = new_group("fake", rank=1, world_size=4)
    with pytest.raises(UnknownOption, match="'gloo'.*'fake'"):
        group.split_group([0, 1], backend="gloo")
    assert group.split_group([0, 1], backend="fake").size() == 2
    group.shutdown()


# -- missing ranks and mismatches ----------------------------------------------------------


def miss_one(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    if ctx.rank == 1:
        return ctx.store.wait(["over"])
    started = time.monotonic()
    with pytest.raises(RendezvousTimeout, match="missing: rank 1[.]"):
        group.split_group([0, 1, 2], timeout=timedelta(seconds=1))
    assert 0.9 < time.monotonic() - started < 5
    ctx.store.set(f"told/{ctx.rank}", "")
    ctx.store.wait(["told/0", "told/2"])
    ctx.store.set("over", "")
    return None


@KINDS
def test_split_timeout_names_the_missing_rank(ranks, backend):
    ranks.run(miss_one, 3, args=(backend,))


def disagree(ctx, backend):
    group = ctx.group(backend, timeout=LONG)
    started = time.monotonic()
    with pytest.raises(RankMismatch, match="backend (gloo|shm).*backend (gloo|shm)"):
        group.split_group([0, 1, 2], backend="gloo" if ctx.rank == 2 else "shm")
    assert time.monotonic() - started < 5, "well before the deadline"


@KINDS
def test_a_backend_mismatch_is_reported_on_all_ranks(ranks, backend):
    ranks.run(disagree, 3, args=(backend,))


def split_in_different_order(ctx):
    group = ctx.group("shm", timeout=LONG)
    quick = override_timing(other_groups_interval=0.2)
    with quick, pytest.raises(RankMismatch, match="same order"):
        group.split_group([0, 1], group_name=["left", "right"][ctx.rank])


def test_splits_in_different_order_are_reported(ranks):
    ranks.run(split_in_different_order, 2, timeout=20)


def come_late(ctx, backend):
    """Rank 2 arrives after the others have timed out twice, and joins their next attempts."""
    group = ctx.group(backend, timeout=LONG)

    def form():
        part = group.split_group([2, 0, 1], group_name="g", timeout=SECONDS)
        assert total(part) == 3
        part.barrier().wait()
        part.shutdown()

    form()
    if ctx.rank == 2:
        ctx.store.wait(["given up/0", "given up/1"])
    else:
        for _ in range(2):
            with pytest.raises(RendezvousTimeout):
                group.split_group([2, 0, 1], group_name="g", timeout=timedelta(seconds=0.3))
            ctx.closing(group.split_group([0, 1]))  # both have given up
        ctx.store.set(f"given up/{ctx.rank}", "")
    form()
    form()


@KINDS
def test_a_rank_that_missed_failed_attempts_joins_the_next_one(ranks, backend):
    ranks.run(come_late, 3, args=(backend,))


# -- deaths --------------------------------------------------------------------------------


def lose_one(ctx, backend, victim):
    group = ctx.group(backend, timeout=LONG)
    group.barrier().wait()
    started = time.monotonic()
    with pytest.raises(PeerLost, match=rf"rank {victim} .* died during"):
        group.split_group([0, 1, 2], group_name="first")
    assert time.monotonic() - started < 5
    rest = ctx.closing(group.split_group([rank for rank in (0, 1, 2) if rank != victim]))
    return total(rest)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("backend", "point"),
    [("gloo", "form:requested"), ("shm", "form:requested"), ("shm", "form:mapped")],
)
def test_a_death_during_a_split_is_detected_and_survivors_can_split(ranks, backend, point, victim):
    strike = Fault(point, kill(), rank=victim, nth=2)  # the first time is the whole group's
    outcome = ranks.run(lose_one, 3, args=(backend, victim), faults=[strike])
    assert isinstance(outcome.pop(victim), Died)
    assert outcome == [2, 2]


def lose_the_store(ctx, port):
    with override_timing(request_timeout=0.3, deadline_grace=0.2):
        split_without_the_store(ctx, port)


def split_without_the_store(ctx, port):
    place = {"store": f"tcp://127.0.0.1:{port}", "rank": ctx.rank, "world_size": ctx.size}
    group = ctx.closing(new_group("shm", LONG, **place))
    host = torch.tensor([os.getpid()])
    group.broadcast(host, root=0).wait()
    if ctx.rank == 0:
        faults.reach("now")  # and with it stops the store, which it hosts
    while Path(f"/proc/{host.item()}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    started = time.monotonic()
    with pytest.raises(RendezvousTimeout, match="store does not answer"):
        group.split_group([1, 2], timeout=timedelta(seconds=0.5))
    assert time.monotonic() - started < 5


def test_deadlines_hold_when_the_store_does_not_answer(ranks):
    strike = Fault("now", stop(), rank=0)
    ranks.run(lose_the_store, 3, args=(free_port(),), faults=[strike], timeout=30)


# -- regions that cannot be offered early --------------------------------------------------


def fail(*_):
    raise OSError("it is out of reach")


def without_offer(ctx, backend, who):
    """Split where one rank can neither make nor open an offered region."""
    if ctx.rank == who:
        kept = RegionOffer.make, RegionOffer.take
        RegionOffer.make = lambda _: None
        RegionOffer.take = fail
    try:
        group = ctx.group("gloo", timeout=SECONDS)
        part = ctx.closing(group.split_group([0, 1, 2], backend=backend))
        return part.backend, total(part)
    finally:
        if ctx.rank == who:
            RegionOffer.make, RegionOffer.take = kept


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("backend", ["shm", "auto"])
def test_a_split_falls_back_to_the_full_exchange_without_an_offer(ranks, backend, who):
    assert ranks.run(without_offer, 3, args=(backend, who)) == [("shm", 3)] * 3


# -- descriptors that run out --------------------------------------------------------------


@contextmanager
def few_descriptors(spare):
    """Leave this process only this many free descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    filler = []
    try:
        with suppress(OSError):
            while True:
                filler.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(filler.pop())
        yield
    finally:
        for descriptor in filler:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run_short(ctx, backend, who):
    group = ctx.group("gloo", timeout=LONG)
    outcomes = []
    for spare in range(5):
        group.barrier().wait()
        started = time.monotonic()
        try:
            with few_descriptors(spare) if ctx.rank == who else nullcontext():
                part = group.split_group([0, 1, 2], backend=backend)
        except RendezvousError as error:
            outcomes.append(f"rank {who}: " in str(error) or "open files" in str(error))
        else:
            assert total(part) == 3
            part.shutdown()
            outcomes.append("formed")
        assert time.monotonic() - started < 10
    return outcomes


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("backend", ["shm", "auto"])
def test_running_out_of_descriptors_fails_all_ranks_or_none(ranks, backend, who):
    """A rank that runs out after it mapped the region used to leave the others with a group."""
    outcomes = ranks.run(run_short, 3, args=(backend, who))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert (outcomes[0][0], outcomes[0][-1]) == (True, "formed")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def open_many(ctx):
    group = ctx.group("gloo", timeout=LONG)
    group.split_group([0, 1, 2], backend="shm").shutdown()  # the first brings threads to life
    gc.collect()
    group.barrier().wait()
    before = descriptors()
    parts = [group.split_group([0, 1, 2], backend="shm") for _ in range(10)]
    during = descriptors()
    for part in parts:
        assert total(part) == 3
    group.barrier().wait()
    for part in parts:
        part.shutdown()
    del part
    parts.clear()
    gc.collect()
    return during - before, descriptors() - before


def test_groups_in_shared_memory_share_descriptors(ranks):
    """They use one per peer process, and close it with the last group."""
    for opened, remaining in ranks.run(open_many, 3):
        # Fewer if what an earlier test left behind is closed meanwhile.
        assert opened <= 2
        assert remaining <= 0
