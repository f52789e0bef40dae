"""Rendezvous: the supported stores, and the errors when a group cannot form."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import groups
from phalanx.errors import (
    GroupAborted,
    GroupError,
    InvalidArgument,
    InvalidState,
    InvalidType,
    PeerLost,
    RankMismatch,
    RendezvousError,
    RendezvousTimeout,
)
from phalanx.groups.backends._shm_region import RegionOffer
from phalanx.testing import Died, Fault, kill
from ports import free_port

from .internals import (
    RESERVATION_PREFIX,
    ClosedGroup,
    PeerProcess,
    Rendezvous,
    Roster,
    StatusStore,
    StoreClient,
    Timing,
    _backend_registry,
    _store,
    _torch_integration,
    _worker_threads,
    override_timing,
)

SECOND = timedelta(seconds=1)
SECONDS = timedelta(seconds=10)


def works(group):
    tensor = torch.ones(2)
    group.allreduce(tensor).wait()
    return tensor.tolist() == [group.size()] * 2


# -- stores --------------------------------------------------------------------------------


def by_url(ctx, url):
    group = groups.new_group("gloo", SECONDS, store=url, rank=ctx.rank, world_size=ctx.size)
    ctx.closing(group)
    assert works(group)
    group.barrier().wait()  # rank 0 hosts the store: it must not leave first


def test_rendezvous_over_a_tcp_url(ranks):
    ranks.run(by_url, 2, args=(f"tcp://127.0.0.1:{free_port()}",))


def test_rendezvous_over_a_file_url(ranks, tmp_path):
    ranks.run(by_url, 3, args=(f"file://{tmp_path}/meeting",))


def by_environment(ctx, port):
    import os

    os.environ |= {
        "RANK": str(ctx.rank),
        "WORLD_SIZE": str(ctx.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    first = ctx.closing(groups.new_group("gloo", SECONDS, "cpu"))
    second = ctx.closing(groups.new_group("gloo", SECONDS, "cpu", name="another"))
    third = ctx.closing(groups.new_group("gloo", SECONDS, "cpu", store="env://"))
    for group in (third, first, second):
        assert works(group)
    assert {first.label, second.label, third.label} == {"group0", "another", "group1"}
    first.barrier().wait()


def test_several_groups_can_share_one_launcher_environment(ranks):
    ranks.run(by_environment, 2, args=(free_port(),))


def test_env_rendezvous_without_rank_suggests_phalanx_run(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidArgument, match="phalanx run"):
        groups.new_group("gloo", SECOND, "cpu", store="env://")


def test_a_group_name_can_be_reused_after_shutdown(threads):
    threads.run(use_name_again, 2)


def use_name_again(ctx):
    for _ in range(3):
        group = ctx.group("local", name="phoenix")
        assert works(group)
        group.shutdown()


# -- the port of a store that rank 0 hosts -------------------------------------------------


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def time_until_free(port):
    started = time.monotonic()
    while not is_free(port):
        assert time.monotonic() - started < 5, "the port is taken for good"
        time.sleep(0.01)
    return time.monotonic() - started


def hosted_group(ctx, port, backend="gloo", timeout=SECONDS, **options):
    url = f"tcp://127.0.0.1:{port}"
    place = {"store": url, "rank": ctx.rank, "world_size": ctx.size}
    return groups.new_group(backend, timeout, **place, **options)


def look_often(hosted, times=20):
    """Poll as often as the watcher does in five seconds."""
    if hosted is not None:
        hosted._idle_since = time.monotonic() - 60
        for _ in range(times):
            hosted.poll()


def release(ctx, port):
    group = hosted_group(ctx, port)
    part = group.split_group([0, 1])
    assert works(part)
    if ctx.rank == 0:
        group.shutdown()
        assert not is_free(port), "there is a group on it yet"
    part.shutdown()
    group.shutdown()
    took = time_until_free(port) if ctx.rank == 0 else 0
    if ctx.rank == 0:
        ctx.store.set("free", "")
    ctx.store.wait(["free"])
    return took


def test_the_port_is_released_when_the_last_group_on_it_closes(ranks):
    """It used to stay bound until the process exited, so a child could not bind it."""
    took, _ = ranks.run(release, 2, args=(free_port(),))
    assert took < 1.5  # seconds; the promise is one, on a machine that does nothing else


def call_late(ctx, port, backend, how):
    group = hosted_group(ctx, port, backend)
    group.barrier().wait()
    hosted = group._hosted
    if ctx.rank == 0:
        group.shutdown() if how == "shutdown" else group.abort("it rained")
        del group
        look_often(hosted)
        ctx.store.set("looked", "")
        return time_until_free(port)
    ctx.store.wait(["looked"])
    began = time.monotonic()
    with pytest.raises(GroupError, match="rank 0 .*(shut|left|aborted)"):
        works(group)
    took = time.monotonic() - began
    group.shutdown()
    return took


@pytest.mark.parametrize("how", ["shutdown", "abort"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_late_rank_is_told_that_the_store_host_has_shut_down(ranks, backend, how):
    """The store used to close half a second later, and the late rank ran into its deadline."""
    _, took = ranks.run(call_late, 2, args=(free_port(), backend, how), timeout=30)
    assert took < 5  # seconds, of the ten that it may take


def test_the_wait_for_a_remote_member_is_bounded():
    here = PeerProcess.current()
    far = replace(here, machine="another")
    board = StatusStore(StoreClient(dist.HashStore()), rank=0, size=2)

    def is_over(member, timeout):
        timing = Timing(remote_close_timeout=timeout)
        return ClosedGroup(board, Roster("", (here, member)), 0, timing=timing).is_over()

    assert not is_over(here, timeout=600)
    assert not is_over(far, timeout=600)
    assert not is_over(here, timeout=0), "it is known to be alive"
    assert is_over(far, timeout=0)


def split_what_is_left(ctx, port):
    group = hosted_group(ctx, port)
    group.barrier().wait()
    if ctx.rank == 0:
        group.abort("rank 2 is slow")
    else:
        with pytest.raises(GroupAborted):
            group.barrier().wait()
        group.abort()
    ctx.store.set(f"aborted/{ctx.rank}", "")
    ctx.store.wait([f"aborted/{rank}" for rank in range(3)])
    if ctx.rank == 0:
        look_often(group._hosted)
        ctx.store.set("looked", "")
    ctx.store.wait(["looked"])
    if ctx.rank < 2:
        part = group.split_group([0, 1])
        assert works(part)
        part.shutdown()
    group.shutdown()


def test_an_aborted_group_with_a_hosted_store_can_be_split(ranks):
    """The store used to close together with the aborted group."""
    ranks.run(split_what_is_left, 3, args=(free_port(),))


def test_split_group_is_refused_when_the_store_is_closed():
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    group = groups.new_group("gloo", SECONDS, store=url, rank=0, world_size=1)
    group.shutdown()
    time_until_free(port)
    with pytest.raises(InvalidState, match="store of this group is closed"):
        group.split_group([0])


def test_a_fake_group_can_be_split_off_when_the_store_is_closed():
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    group = groups.new_group("gloo", SECONDS, store=url, rank=0, world_size=1)
    group.shutdown()
    time_until_free(port)
    assert group.split_group([0], backend="fake").size() == 1


def fork_and_meet_again(ctx, port):
    group = hosted_group(ctx, port)
    group.barrier().wait()
    hosted = group._hosted
    child = None
    if ctx.rank == 0:
        child = os.fork()
        if child == 0:  # a worker of a data loader, say
            time.sleep(60)
            os._exit(0)
    try:
        group.shutdown()
        ctx.store.set(f"down/{ctx.rank}", "")
        ctx.store.wait(["down/0", "down/1"])
        if ctx.rank == 0:
            look_often(hosted)
            ctx.store.set("looked", "")
        ctx.store.wait(["looked"])
        again = ctx.closing(hosted_group(ctx, port))
        assert works(again)
        again.barrier().wait()
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_store_stays_open_if_a_forked_child_holds_its_port(ranks):
    """The child used to keep the port bound after the store had been closed."""
    ranks.run(fork_and_meet_again, 2, args=(free_port(),))


def test_a_held_exception_does_not_keep_the_port_bound():
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    with pytest.raises(RendezvousTimeout) as kept:
        groups.new_group("gloo", SECOND / 10, store=url, rank=0, world_size=2)
    assert time_until_free(port) < 2
    assert kept.tb is not None


def test_waiting_for_the_listener_counts_against_the_deadline(monkeypatch):
    """The full timeout used to start again for the connection."""
    given = []
    monkeypatch.setattr(_store, "wait_for_listener", lambda *_: time.sleep(0.2))
    monkeypatch.setattr(_store, "_tcp_store", lambda *args: given.append(args[-1]) or Connected())
    _store.open_store("tcp://127.0.0.1:1", rank=1, size=2, timeout=SECOND)
    assert given[0] <= SECOND * 0.8


class Connected:
    def set_timeout(self, timeout):
        assert timeout == SECOND, "later questions have all the time"


def meet_again_before_the_host(ctx, port):
    place = {"store": f"tcp://127.0.0.1:{port}", "rank": ctx.rank, "world_size": 2}
    group = groups.new_group("gloo", SECONDS, **place)
    group.barrier().wait()
    kept = group._hosted
    if ctx.rank == 0:
        while not any(key.startswith(RESERVATION_PREFIX) for key in kept.store.list_keys()):
            time.sleep(0.01)  # else it might be gone before the other comes
    group = group.shutdown()
    if ctx.rank == 0:
        while not kept._reservations_seen:  # the one who has come is in the way of its end
            assert kept.store is not None
            time.sleep(0.01)
    again = ctx.closing(groups.new_group("gloo", SECONDS, **place))
    assert works(again)
    assert again._hosted is kept, "the same store, if this rank hosts it"
    again.barrier().wait()
    if ctx.rank == 0:
        ctx.store.set("over", "")
    ctx.store.wait(["over"])


def test_a_store_stays_open_for_a_rank_waiting_for_the_next_group(ranks):
    ranks.run(meet_again_before_the_host, 2, args=(free_port(),))


def test_a_rank_that_arrives_while_a_store_closes_waits_for_the_next(ranks):
    port = free_port()
    for _ in range(3):
        ranks.run(by_url, 2, args=(f"tcp://127.0.0.1:{port}",))


def test_rendezvous_waits_for_a_port_that_is_being_released():
    """For example by a parent process that is closing the store of its groups."""
    port = free_port()
    holder = socket.socket()
    holder.bind(("127.0.0.1", port))
    holder.listen()
    closing = threading.Timer(0.2, holder.close)
    closing.start()
    url = f"tcp://127.0.0.1:{port}"
    group = groups.new_group("gloo", SECONDS, store=url, rank=0, world_size=1)
    assert works(group)
    group.shutdown()
    closing.join()


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"store": "tcp://127.0.0.1:1", "rank": 3, "world_size": 2}, "between 0 and 1"),
        ({"store": "tcp://127.0.0.1:1", "rank": 0, "world_size": 0}, "at least 1"),
        ({"store": "tcp://127.0.0.1:1"}, "rank and world_size"),
        ({"store": "tcp://127.0.0.1", "rank": 0, "world_size": 1}, "host and a port"),
        ({"store": "file://", "rank": 0, "world_size": 1}, "must have a path"),
        ({"store": "file:///no/such/folder/x", "rank": 0, "world_size": 1}, "does not exist"),
        ({"store": "carrier-pigeon://loft", "rank": 0, "world_size": 1}, "env://"),
        ({"store": dist.HashStore(), "rank": 0}, "rank and world_size"),
    ],
)
def test_invalid_store_rank_or_world_size_is_rejected(arguments, told):
    with pytest.raises(InvalidArgument, match=told):
        groups.new_group("gloo", SECOND, **arguments)


def test_a_store_of_the_wrong_type_is_rejected():
    with pytest.raises(InvalidType, match="Store or a URL"):
        groups.new_group("gloo", SECOND, store=42, rank=0, world_size=1)


def test_the_error_names_a_port_in_use():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        quick = override_timing(port_release_timeout=0.1)
        with quick, pytest.raises(RendezvousError, match=f"port {port} .* in use"):
            groups.new_group("gloo", SECOND, store=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)


def test_the_error_names_a_store_that_does_not_answer(capfd):
    port = free_port()
    with pytest.raises(RendezvousTimeout, match=f"127.0.0.1:{port} within 1 s"):
        groups.new_group("gloo", SECOND, store=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    assert "frame #" not in capfd.readouterr().err, "torch's stack traces are noise here"


def wait_for_absent(ctx):
    if ctx.rank != 1:
        with pytest.raises(RendezvousTimeout, match="missing: rank 1[.]") as caught:
            ctx.group("local", timeout=SECOND)
        assert isinstance(caught.value, TimeoutError)


def test_rendezvous_timeout_names_the_missing_rank(threads):
    threads.run(wait_for_absent, 3)


def test_waiting_for_a_rendezvous_prints_nothing(capfd):
    """torch prints a warning each time a store's own wait times out."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RendezvousTimeout):
        groups.new_group("gloo", SECOND / 4, store=store, rank=0, world_size=2)
    assert "waitForInput" not in capfd.readouterr().err
    with pytest.raises(dist.DistStoreError):
        store.wait(["nothing"], SECOND / 100)
    assert "waitForInput" in capfd.readouterr().err


def disagree_on_size(ctx):
    with pytest.raises(
        RankMismatch, match="world size 2, backend local.*world size 3, backend local"
    ):
        ctx.group("local", timeout=SECONDS, world_size=2 + ctx.rank)


def test_a_world_size_mismatch_is_reported_on_both_ranks(threads):
    threads.run(disagree_on_size, 2)


def too_many(ctx):
    if ctx.rank < 2:
        assert works(ctx.group("local", world_size=2))
        ctx.store.set(f"formed/{ctx.rank}", "")
    else:
        ctx.store.wait(["formed/0", "formed/1"])
        with pytest.raises(RankMismatch, match="world size 2.*world size 3"):
            ctx.group("local", timeout=SECONDS, world_size=3)


def test_an_extra_rank_is_told_the_world_size(threads):
    threads.run(too_many, 3)


def come_beside_an_extra_rank(ctx):
    size = 3 if ctx.rank == 2 else 2
    if ctx.rank == 1:  # late: the extra rank has time to see what rank 0 forms
        ctx.store.wait(["phalanx/g/1/request/0", "phalanx/g/1/request/2"])
        time.sleep(0.3)
    if ctx.rank < 2:
        assert works(ctx.group("gloo", timeout=SECONDS, name="g", world_size=size))
        return
    with pytest.raises(RankMismatch, match="world size 2.*world size 3"):
        ctx.group("gloo", timeout=SECONDS, name="g", world_size=size)


def test_an_extra_rank_does_not_break_a_group_that_forms(ranks):
    ranks.run(come_beside_an_extra_rank, 3)


def disagree_on_backend(ctx):
    with pytest.raises(RankMismatch, match="backend local.*backend gloo"):
        ctx.group(["local", "gloo"][ctx.rank], timeout=SECONDS)


def test_a_backend_mismatch_is_reported_on_both_ranks(threads):
    threads.run(disagree_on_backend, 2)


def form_in_different_order(ctx):
    names = ["left", "right"] if ctx.rank == 0 else ["right", "left"]
    with pytest.raises(RankMismatch, match="'left'.*'right'") as caught:
        ctx.group("local", timeout=timedelta(seconds=20), name=names[0])
    assert "same order" in str(caught.value)
    assert "test_rendezvous.py:" in str(caught.value)


def test_forming_groups_in_different_order_is_reported(threads):
    with override_timing(other_groups_interval=0.2):
        threads.run(form_in_different_order, 2, timeout=15)


def form_from_two_threads(ctx):
    names = ["left", "right"] if ctx.rank == 0 else ["right", "left"]
    formed = {}

    def form(name):
        formed[name] = ctx.group("gloo", timeout=SECONDS, name=name)

    workers = [threading.Thread(target=form, args=(name,)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(works(formed[name]) for name in ("left", "right"))


def test_threads_can_form_groups_in_any_order(ranks):
    ranks.run(form_from_two_threads, 2)


class SlowStore(dist.HashStore):
    """A store that opens no further connection until it may, once rank 0 has joined."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def clone(self):
        if self.check(["phalanx/slow/1/request/0"]):
            self.is_asked.set()
            self.may_answer.wait(20)
        return self


def form_alone(store, name):
    with pytest.raises(RendezvousTimeout, match="missing: rank 1"):
        groups.new_group("local", SECOND, store=store, rank=0, world_size=2, name=name)


def test_forming_a_group_does_not_wait_for_the_store_of_another_thread():
    """Every thread asks its store whether a peer has failed, on a connection of its own."""
    slow = SlowStore()
    with override_timing(request_timeout=20):
        other = threading.Thread(target=form_alone, args=(slow, "slow"))
        other.start()
        try:
            assert slow.is_asked.wait(10)
            began = time.monotonic()
            form_alone(dist.HashStore(), "quick")
            assert time.monotonic() - began < 10
        finally:
            slow.may_answer.set()
            other.join()


def claim_the_same_rank(ctx):
    if ctx.rank == 0:
        return ctx.store.get("done")  # stay away, so that the others are still forming
    if ctx.rank == 1:
        with pytest.raises(RendezvousTimeout):
            ctx.group("gloo", name="g", rank=1, world_size=2, timeout=timedelta(seconds=1.5))
        ctx.store.set("done", "")
    if ctx.rank == 2:
        ctx.store.wait(["phalanx/g/1/request/1"])
        with pytest.raises(InvalidState, match="same rank"):
            ctx.group("gloo", name="g", rank=1, world_size=2, timeout=timedelta(seconds=3))
    return None


def test_two_processes_with_the_same_rank_are_rejected(ranks):
    ranks.run(claim_the_same_rank, 3)


def die_while_forming(ctx):
    with pytest.raises(PeerLost, match=r"rank 1 .* died during") as caught:
        ctx.group("gloo", timeout=timedelta(seconds=15), world_size=3)  # rank 2 never comes
    assert caught.value.lost == (1,)


def test_a_death_during_rendezvous_names_the_rank(ranks):
    strike = Fault("form:requested", kill(), rank=1)
    outcome = ranks.run(die_while_forming, 2, faults=[strike], timeout=25)
    assert isinstance(outcome[1], Died)


# -- a rank that fails during rendezvous and stays alive -------------------------------------


def no_reason(*_, **__):
    raise RuntimeError("my reason")


def leave_the_program(*_, **__):
    raise SystemExit(3)


def fail_in_factory(monkeypatch, error):
    for name in ("gloo", "shm"):
        changed = replace(_backend_registry._backends[name], factory=error)
        monkeypatch.setitem(_backend_registry._backends, name, changed)


FAILING = {
    "factory": lambda patch: fail_in_factory(patch, no_reason),
    "exit": lambda patch: fail_in_factory(patch, leave_the_program),
    "check": lambda patch: patch.setattr(Rendezvous, "_require_one_process", no_reason),
    "others": lambda patch: patch.setattr(Rendezvous, "_await_others", no_reason),
    "offer": lambda patch: patch.setattr(RegionOffer, "absent", no_reason),
    "construct": lambda patch: patch.setattr(_torch_integration, "register_group", no_reason),
}


def fail_and_live_on(ctx, where, backend):
    world = ctx.group("gloo", timeout=timedelta(seconds=20))
    began = time.monotonic()
    if ctx.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            FAILING[where](patch)
            with pytest.raises((RuntimeError, SystemExit)):
                world.split_group([0, 1], backend=backend)
    else:
        told = "rank 1.* SystemExit" if where == "exit" else "rank 1.* my reason"
        with pytest.raises((RendezvousError, GroupError), match=told):
            world.split_group([0, 1], backend=backend).barrier().wait()
    took = time.monotonic() - began
    ctx.store.set(f"raised/{ctx.rank}", "")
    ctx.store.wait(["raised/0", "raised/1"])
    return took


@pytest.mark.parametrize(
    ("where", "backend"),
    [
        ("factory", "gloo"),
        ("exit", "gloo"),
        ("check", "gloo"),
        ("others", "gloo"),
        ("construct", "gloo"),
        ("construct", "shm"),
        ("offer", "shm"),
    ],
)
def test_a_rank_that_fails_during_rendezvous_is_reported_to_the_others(ranks, where, backend):
    """They used to run into their deadline, in the rendezvous or in the first call."""
    assert max(ranks.run(fail_and_live_on, 2, args=(where, backend), timeout=30)) < 5


def worker_threads():
    return set() if _worker_threads._pool is None else set(_worker_threads._pool._busy)


def fail_in_the_factory(ctx):
    before = worker_threads()
    if ctx.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            fail_in_factory(patch, no_reason)
            with pytest.raises(RendezvousError):
                ctx.group("shm", timeout=SECONDS)
    else:
        with pytest.raises(RendezvousError, match="rank 1: my reason"):
            ctx.group("shm", timeout=SECONDS)
        began = time.monotonic()
        while worker_threads() - before and time.monotonic() - began < 3:
            time.sleep(0.01)
        assert not worker_threads() - before, "no thread waits for rank 1 any more"
    ctx.store.set(f"raised/{ctx.rank}", "")
    ctx.store.wait(["raised/0", "raised/1"])


def test_no_worker_thread_keeps_waiting_after_a_failed_rendezvous(ranks, capfd):
    """A thread used to, until the deadline, and torch printed a warning for each wait."""
    ranks.run(fail_in_the_factory, 2)
    assert "waitForInput" not in capfd.readouterr().err
