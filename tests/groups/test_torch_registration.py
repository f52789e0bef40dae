"""Plain torch scripts on shared memory: ``dist.init_process_group("shm")`` and its groups."""

import os
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from phalanx import native
from phalanx.errors import (
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    InvalidState,
    PeerLost,
    RankMismatch,
)
from phalanx.groups import ProcessGroup
from phalanx.testing import Fault, kill

LONG = timedelta(seconds=60)
WITH_ENGINE = pytest.mark.skipif(native.engine is None, reason=native.why_missing)


@contextmanager
def world(ctx, backend="shm", *, timeout=LONG, prefix="", **options):
    """Initialize torch as a plain script does, and clean up afterwards."""
    store = dist.PrefixStore(prefix, ctx.store)
    place = {"store": store, "rank": ctx.rank, "world_size": ctx.size, "timeout": timeout}
    hook = sys.excepthook  # which torch wraps once more every time
    dist.init_process_group(backend, **place, **options)
    try:
        yield dist.group.WORLD
        if backend == "gloo":
            # Destroying Gloo while a peer is in a call makes that peer hang, even after a barrier.
            store.set(f"done {ctx.rank}", "")
            store.wait([f"done {rank}" for rank in range(ctx.size)])
    finally:
        sys.excepthook = hook
        ctx.keep(dist.group.WORLD)
        dist.destroy_process_group()


# -- backend names -------------------------------------------------------------------------


def use_names(ctx):
    for backend in ("shm", "SHM", "cpu:shm", "cpu:shm,cuda:nccl"):
        with world(ctx, backend, prefix=backend) as group:
            assert isinstance(group, ProcessGroup)
            assert group.backend == "shm"
            assert dist.get_backend() == backend.lower()
            assert (dist.get_rank(), dist.get_world_size()) == (ctx.rank, ctx.size)
            assert dist.get_process_group_ranks(group) == [0, 1]
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 3
    assert not dist.is_initialized()


@WITH_ENGINE
def test_init_process_group_accepts_shm_in_every_spelling(ranks):
    ranks.run(use_names, 2)


def test_torchs_default_cpu_backend_stays_gloo():
    assert c10d.Backend.default_device_backend_map["cpu"] == "gloo"
    assert c10d.Backend.backend_capability["shm"] == ["cpu"]


# -- collectives ---------------------------------------------------------------------------


def call_collectives(ctx):
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[ctx.rank]
    with world(ctx):
        tensor = mine.clone()
        dist.all_reduce(tensor)
        assert tensor.tolist() == [4.0, 6.0]
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
        assert work.get_future().wait()[0] is tensor
        assert work.wait()
        assert work.is_completed()
        dist.broadcast(tensor.copy_(mine), src=1)
        assert tensor.tolist() == [3.0, 4.0]
        outputs = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(outputs, mine)
        assert torch.stack(outputs).tolist() == [[1.0, 2.0], [3.0, 4.0]]
        whole = torch.zeros(4)
        with pytest.deprecated_call(match="all_gather_into_tensor"):
            dist.all_gather_into_tensor(whole, mine)
        assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
        part = torch.zeros(1)
        with pytest.deprecated_call(match="reduce_scatter_tensor"):
            dist.reduce_scatter_tensor(part, mine)
        assert part.tolist() == [[4.0], [6.0]][ctx.rank]
        dist.all_to_all_single(tensor, mine)
        assert tensor.tolist() == [[1.0, 3.0], [2.0, 4.0]][ctx.rank]
        dist.barrier()
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()


@WITH_ENGINE
def test_collectives(ranks):
    ranks.run(call_collectives, 2)


def send_and_receive(ctx):
    peer = 1 - ctx.rank
    mine, theirs = torch.full((5,), float(ctx.rank)), torch.zeros(5)
    with world(ctx):
        if ctx.rank == 0:
            dist.send(mine, 1)
        else:
            assert dist.recv(theirs, 0) == 0
            assert dist.recv(theirs) == 0
        works = [dist.isend(mine, peer, tag=2), dist.irecv(theirs, peer, tag=2)]
        if ctx.rank == 0:
            dist.send(mine, 1)
        for work in works:
            work.wait()
        assert theirs.tolist() == [float(peer)] * 5
        both = [
            dist.P2POp(dist.isend, mine + 7, peer, tag=3),
            dist.P2POp(dist.irecv, theirs, peer, tag=3),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert theirs.tolist() == [peer + 7.0] * 5


@WITH_ENGINE
def test_point_to_point(ranks):
    ranks.run(send_and_receive, 2)


def exchange_objects(ctx):
    with world(ctx):
        everybody = [None] * ctx.size
        dist.all_gather_object(everybody, {"rank": ctx.rank, "x": "y" * ctx.rank})
        assert everybody == [{"rank": rank, "x": "y" * rank} for rank in range(ctx.size)]
        told = ["news", 3] if ctx.rank == 1 else [None, None]
        dist.broadcast_object_list(told, src=1)
        assert told == ["news", 3]


@WITH_ENGINE
def test_object_collectives(ranks):
    ranks.run(exchange_objects, 2)


def call_functional(ctx):
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[ctx.rank]
    with world(ctx) as group:
        mesh = init_device_mesh("cpu", (2,))
        for where in (group, group.group_name, mesh):
            assert functional.all_reduce(mine, "sum", where).tolist() == [4.0, 6.0]
        assert functional.all_gather_single(mine, 0, group).tolist() == [1.0, 2.0, 3.0, 4.0]
        scattered = functional.reduce_scatter_single(mine, "avg", 0, group)
        assert scattered.tolist() == [[2.0], [3.0]][ctx.rank]
        exchanged = functional.all_to_all_single(mine, None, None, group)
        assert exchanged.tolist() == [[1.0, 3.0], [2.0, 4.0]][ctx.rank]


@WITH_ENGINE
def test_functional_collectives(ranks):
    ranks.run(call_functional, 2)


# -- several groups ------------------------------------------------------------------------


def make_subgroups(ctx):
    with world(ctx):
        outer = dist.new_group([0, 2], group_desc="both ends")
        again = dist.new_group([0, 2])
        if ctx.rank == 1:
            assert outer == again == dist.GroupMember.NON_GROUP_MEMBER
        else:
            assert outer.global_ranks == (0, 2)
            assert outer.group_desc == "both ends"
            assert dist.get_group_rank(outer, 2) == 1
            for group in (outer, again):
                tensor = torch.full((2,), float(ctx.rank))
                dist.broadcast(tensor, src=2, group=group)
                assert tensor.tolist() == [2.0, 2.0]
            dist.destroy_process_group(outer)
            with pytest.raises(GroupAborted, match="this rank shut the group down"):
                outer.barrier()
            dist.barrier(group=again)
        dist.barrier()


@WITH_ENGINE
def test_subgroups(ranks):
    ranks.run(make_subgroups, 3)


def sit_beside_gloo(ctx):
    with world(ctx, "gloo"):
        assert not isinstance(dist.group.WORLD, ProcessGroup)
        quick = dist.new_group(backend="shm")
        assert isinstance(quick, ProcessGroup)
        for group in (quick, None):
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2.0, 2.0]


@WITH_ENGINE
def test_new_group_can_use_shm_on_a_gloo_world(ranks):
    ranks.run(sit_beside_gloo, 2)


# -- torch's own DDP -----------------------------------------------------------------------


class Forked(nn.Module):
    """A model with a branch that may be unused in a step."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 16)
        self.left = nn.Linear(16, 2)
        self.right = nn.Linear(16, 2)

    def forward(self, inputs, way):
        return getattr(self, way)(torch.tanh(self.stem(inputs)))


def train(ctx, backend, flags):
    with world(ctx, backend):
        return learn(ctx.rank, flags)


def learn(rank, flags):
    batches = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(rank)  # DDP begins with rank 0's
    model = DistributedDataParallel(Forked(), bucket_cap_mb=0.0001, **flags)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        way = "right" if step == 1 and "find_unused_parameters" in flags else "left"
        model(batch[rank], way).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


@WITH_ENGINE
@pytest.mark.parametrize(
    "flags",
    [{"find_unused_parameters": True}, {"static_graph": True}],
    ids=["unused", "static"],
)
def test_torch_ddp_is_bitwise_equal_on_shm_and_gloo(ranks, flags):
    ours = ranks.run(train, 2, args=("shm", flags))
    theirs = ranks.run(train, 2, args=("gloo", flags))
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[0], theirs[0])


# -- destroy_process_group -----------------------------------------------------------------


def regions():
    """List the shared-memory regions that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ph" in line]


def come_and_go(ctx):
    before = set(regions())  # other tests may have kept a group, or be about to let go of it
    models = []
    for _ in range(3):
        with world(ctx, prefix="the same"):
            assert set(regions()) - before
            models.append(DistributedDataParallel(nn.Linear(3, 3)))  # which holds on to its group
            models[-1](torch.ones(1, 3)).sum().backward()
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        assert not c10d._world.pg_map
        deadline = time.monotonic() + 10  # threads that filled a future may be on their way home
        while set(regions()) - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not set(regions()) - before


@WITH_ENGINE
def test_destroy_releases_memory_and_torch_can_be_initialized_again(ranks):
    ranks.run(come_and_go, 2)


def destroy_own(ctx):
    group, other = ctx.group("gloo"), ctx.group("gloo")
    name = group.group_name
    dist.destroy_process_group(group)
    assert group not in c10d._world.pg_map
    with pytest.raises(GroupAborted, match="this rank shut the group down"):
        group.barrier()
    assert ctx.group("gloo", name=name).group_name == name  # it is free again
    other.barrier().wait()


def test_torch_destroys_a_group_that_it_did_not_create(ranks):
    ranks.run(destroy_own, 2)


# -- failures ------------------------------------------------------------------------------


def miss_a_rank(ctx):
    with world(ctx, timeout=timedelta(seconds=1)):
        if ctx.rank == 1:
            ctx.store.wait(["told"])
            return
        with pytest.raises(CollectiveTimeout, match="Missing: rank 1") as caught:
            dist.all_reduce(torch.ones(3))
        assert caught.value.missing == (1,)
        ctx.store.set("told", "")


@WITH_ENGINE
def test_the_init_timeout_applies_to_every_call(ranks):
    ranks.run(miss_a_rank, 2)


def disagree(ctx):
    with world(ctx), pytest.raises(RankMismatch, match=r"float32\[3\].*float32\[4\]"):
        dist.all_reduce(torch.ones(3 + ctx.rank))


@WITH_ENGINE
def test_mismatched_calls_raise_on_both_ranks(ranks):
    ranks.run(disagree, 2)


def lack_the_engine(ctx):
    engine, native.engine, native.why_missing = native.engine, None, "there was no compiler"
    try:
        with pytest.raises(InvalidState, match="'shm' is not available: there was no compiler"):
            dist.init_process_group("shm", store=ctx.store, rank=0, world_size=1)
    finally:
        native.engine, native.why_missing = engine, ""
    assert not dist.is_initialized()


def test_init_without_the_engine_reports_why(ranks):
    ranks.run(lack_the_engine, 1)


def bring_options(ctx):
    place = {"store": ctx.store, "rank": ctx.rank, "world_size": ctx.size}
    with pytest.raises(InvalidArgument, match="backend 'shm' has no pg_options"):
        dist.init_process_group("shm", pg_options={"fast": True}, **place)
    with world(ctx, prefix="again"), pytest.raises(InvalidArgument, match="on meta"):
        dist.all_reduce(torch.ones(3, device="meta"))


@WITH_ENGINE
def test_unsupported_options_and_devices_are_rejected(ranks):
    ranks.run(bring_options, 1)


def lose_a_rank_in_backward(ctx):
    with world(ctx):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises(RuntimeError, match=r"rank 1 \(pid \d+ on .*\) is dead"):
            for _ in range(9):
                model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(PeerLost) as caught:  # what C++ made of it has lost its type
            dist.barrier()
        assert caught.value.lost == (1,)


@WITH_ENGINE
def test_a_rank_killed_in_torch_ddp_is_named(ranks):
    strike = Fault("allreduce:issued", kill(), rank=1, nth=4)
    ranks.run(lose_a_rank_in_backward, 2, faults=[strike])


def lose_a_rank(ctx):
    with world(ctx):
        tensor = torch.ones(3)
        last = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+ on .*\) is dead") as caught:
            for _ in range(9):
                dist.all_reduce(tensor)
                last = time.monotonic()
        assert time.monotonic() - last < 5
        assert caught.value.lost == (1,)
        assert Path(__file__).name in str(caught.value)  # the line of the script


@WITH_ENGINE
def test_a_killed_rank_is_named(ranks):
    ranks.run(lose_a_rank, 3, faults=[Fault("allreduce:issued", kill(), rank=1, nth=5)])


# -- plain scripts -------------------------------------------------------------------------

SCRIPT = """
    import os, sys
    import torch, phalanx  # in the other order it is in the documents
    import torch.distributed as dist

    assert "phalanx.groups" not in sys.modules
    dist.init_process_group("shm")
    total = torch.full([3], 1.0 + dist.get_rank())
    dist.all_reduce(total)
    os.write(1, f"{dist.get_backend()} {total.tolist()}\\n".encode())
"""  # many a script does not bother to destroy the group


@pytest.mark.slow
@WITH_ENGINE
def test_a_plain_script_needs_one_extra_import(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shm [3.0, 3.0, 3.0]\n" * 2
    assert "Error" not in done.stderr
    assert "leak" not in done.stderr
