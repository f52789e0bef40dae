"""Lifetime of axis groups: concurrent requests, failures, shutdown and pickling."""

import copy
import pickle
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import GroupAborted, InvalidState, RankMismatch
from phalanx.groups import new_group
from phalanx.groups.backends import fake
from phalanx.mesh import DeviceMesh, init_device_mesh
from phalanx.testing import over_groups

from .internals import Backend, _backend_registry

SECONDS = timedelta(seconds=20)
NAMES = ("dp", "tp")


def total(group, value=1):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# -- concurrency ---------------------------------------------------------------------------


class Gate:
    """An engine factory that blocks until the test releases it, and may fail."""

    def __init__(self):
        self.entered, self.open = threading.Semaphore(0), threading.Event()
        self.error = None

    def make(self, *args, **kwargs):
        self.entered.release()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        return fake.make(*args, **kwargs)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    # Not by `register_backend`, which is permanent: other tests list the backends.
    monkeypatch.setitem(
        _backend_registry._backends, "gated", Backend("gated", gate.make, fake.TRAITS)
    )
    return gate


@pytest.fixture
def gated(gate):
    """A mesh whose group along the first axis blocks at the gate."""
    group = new_group("fake", rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), backend_override={0: "gated"}, group=group)
    group.shutdown()


@contextmanager
def on_thread(function):
    """Run a function on a thread; yields a list that receives its result or error."""
    came = []

    def run():
        try:
            came.append(function())
        except RuntimeError as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield came
    thread.join(20)
    assert not thread.is_alive()


def all_forgotten(mesh):
    """Wait until a shutdown on another thread has begun."""
    while mesh._root_state.groups._groups:
        threading.Event().wait(0.001)


def test_concurrent_requests_get_one_group(gate, gated):
    with on_thread(lambda: gated.get_group(0)) as first:
        assert gate.entered.acquire(timeout=20)
        with on_thread(lambda: gated.get_group(0)) as second:
            gate.open.set()
    assert first == second == [gated.get_group(0)]
    assert not gate.entered.acquire(blocking=False)  # no other thread was at the gate


def test_concurrent_requests_all_raise_if_the_group_cannot_be_created(gate, gated):
    gate.error = RuntimeError("no engine today")
    with on_thread(lambda: gated.get_group(0)) as first:
        assert gate.entered.acquire(timeout=20)
        with on_thread(lambda: gated.get_group(0)) as second:
            gate.open.set()
    assert "no engine today" in str(first[0])
    assert "no engine today" in str(second[0])
    gate.error = None
    assert gated.get_group(0).size() == 2  # the next to ask tries again


def test_a_creation_failure_during_shutdown_reaches_the_requester(gate, gated):
    gate.error = RuntimeError("no engine today")
    other = gated.get_group(1)
    with on_thread(lambda: gated.get_group(0)) as asked:
        assert gate.entered.acquire(timeout=20)
        with on_thread(gated.shutdown) as ended:
            all_forgotten(gated)
            gate.open.set()
    assert "no engine today" in str(asked[0])
    assert ended == [None]
    with pytest.raises(GroupAborted):
        other.barrier()


def test_a_group_created_during_shutdown_is_not_kept(gate, gated):
    with on_thread(lambda: gated.get_group(0)) as asked:
        assert gate.entered.acquire(timeout=20)
        with on_thread(gated.shutdown):
            all_forgotten(gated)
            gate.open.set()
    with pytest.raises(GroupAborted):
        asked[0].barrier()
    assert gated.get_group(0) is not asked[0]
    gated.get_group(0).barrier()


# -- groups shut down by the user ----------------------------------------------------------


@over_groups(sizes=(4,), backends=("local", "gloo", "shm"), reuse=True)
def test_a_group_shut_down_by_the_user_is_recreated_after_mesh_shutdown(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, group=group)
    row = mesh.get_group("tp")
    total(row)
    row.shutdown()
    assert mesh.get_group("tp") is row  # only some ranks may have ended it
    with pytest.raises(GroupAborted, match="shut the group down"):
        total(row)
    mesh.shutdown()
    assert total(mesh.get_group("tp")) == 2
    mesh.shutdown()


def torchs_own(ctx):
    dist.init_process_group(
        "gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size, timeout=SECONDS
    )
    try:
        mesh = with_torchs_options()
        pair = mesh.get_group(1)
        other = with_torchs_options().get_group(1)
        assert other is not pair  # for its options are others
        assert total(pair) == total(other) == 2
        dist.barrier()
        dist.destroy_process_group(pair)
        mesh.shutdown()  # which is not confused by that
        dist.barrier()
        assert total(mesh.get_group(1)) == 2
        dist.barrier()
    finally:
        dist.destroy_process_group()
    with pytest.raises(InvalidState, match="'default' was destroyed"):
        mesh["dp"].get_group()
    assert mesh.get_coordinate() == (ctx.rank // 2, ctx.rank % 2)
    mesh.shutdown()


def with_torchs_options():
    options = dist.ProcessGroupGloo._Options()
    options._timeout = SECONDS / 2
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override={1: options})


def test_torch_groups_are_recreated_after_mesh_shutdown(ranks):
    ranks.run(torchs_own, 4)


# -- groups passed by the user -------------------------------------------------------------


@over_groups(sizes=(4,), backends=("local",))
def test_user_groups_are_kept_by_pickled_and_copied_meshes(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, group=group)
    column, row = mesh.get_all_groups()
    given = DeviceMesh.from_group(
        [column, row], "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("a", "b")
    )
    for again in (given, pickle.loads(pickle.dumps(given)), copy.deepcopy(given)):
        assert again.get_group("a") is again["a"].get_group() is column
        (mine,) = (each for each in again.get_all_submeshes("b") if each.get_coordinate())
        assert mine.get_group() is row
    one = DeviceMesh.from_group(row, "cpu")
    assert pickle.loads(pickle.dumps(one)).get_group() is row
    pickled = pickle.dumps(given)
    mesh.shutdown()
    group.barrier().wait()
    with pytest.raises(InvalidState, match="without a group of all its ranks"):
        pickle.loads(pickled).get_group("a")


def test_unpickling_ignores_a_group_of_a_different_size():
    group = new_group("fake", rank=1, world_size=4, name="as before")
    pickled = pickle.dumps(init_device_mesh("cpu", (4,), group=group))
    group.shutdown()
    smaller = new_group("fake", rank=0, world_size=2, name="as before")
    again = pickle.loads(pickled)
    assert again.group is None
    assert again.get_coordinate() == (1,)
    smaller.shutdown()


# -- repeated mismatches -------------------------------------------------------------------


def disagree_twice(ctx):
    group = ctx.group("local")
    name = "a" if ctx.rank == 0 else "b"
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(name,), group=group)
    if ctx.rank != 0:
        group.barrier().wait()
        for _ in range(2):
            with pytest.raises(RankMismatch, match=r"a=4.*b=4"):
                mesh.get_group()
    else:
        assert mesh.get_group() is group  # no other rank can disagree yet
        group.barrier().wait()
    group.barrier().wait()


def test_a_mesh_mismatch_is_raised_on_every_request(threads):
    threads.run(disagree_twice, 4)
