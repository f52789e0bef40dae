"""User-defined backends, the fake backend, and compatibility with upstream's names."""

import inspect
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._dist2 as upstream
from torch.distributed import HashStore, ReduceOp

import phalanx.groups as groups
from phalanx.errors import GroupAborted, InvalidArgument
from phalanx.groups import Traits, new_group, register_backend
from phalanx.testing import over_groups

MINUTE = timedelta(minutes=1)
MANY = 100_000


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", upstream.__all__)
def test_every_upstream_name_is_exported(name):
    assert name in groups.__all__
    assert hasattr(groups, name)


@pytest.mark.parametrize("name", ["new_group", "register_backend", "process_group"])
def test_upstream_parameters_come_first_in_the_same_order(name):
    theirs = inspect.signature(getattr(upstream, name)).parameters.values()
    ours = list(inspect.signature(getattr(groups, name)).parameters.values())
    for place, parameter in enumerate(theirs):
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert (ours[place].name, ours[place].kind) == (parameter.name, parameter.kind)
        else:
            assert parameter.kind in [each.kind for each in ours]  # **kwargs


def form_like_upstream(ctx):
    """Everything else comes from the launcher's environment."""
    os.environ.update(RANK=str(ctx.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    if ctx.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ctx.store.set("port", str(server.port))
    os.environ.update(
        MASTER_PORT=ctx.store.get("port").decode(), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    group = ctx.closing(new_group("gloo", MINUTE, "cpu"))
    tensor = torch.ones(1)
    group.allreduce(tensor).wait()
    group.barrier().wait()
    ctx.store.set(f"done/{ctx.rank}", "")
    ctx.store.wait(["done/0", "done/1"])  # the server goes with rank 0
    return group.rank(), group.size(), tensor.item()


def test_new_group_accepts_the_upstream_call(ranks):
    assert ranks.run(form_like_upstream, 2) == [(0, 2, 2.0), (1, 2, 2.0)]


# -- user-defined backends -----------------------------------------------------------------


def bare_gloo(store, rank, world_size, timeout, device, **options):
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


def whole_group(store, rank, world_size, timeout, device, **options):
    """Return a whole ProcessGroup, as upstream's factories do."""
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def counted(store, rank, world_size, timeout, device, *, start=0):
    store.add("made", start)
    return bare_gloo(store, rank, world_size, timeout, device)


class Basic:
    """An engine with few operations."""

    def __init__(self, engine):
        self.allreduce, self._allgather_base = engine.allreduce, engine._allgather_base


def basic(*args):
    return Basic(bare_gloo(*args))


# Ranks import this module too, so these are registered there as well.
register_backend("my bare gloo", bare_gloo)
register_backend("my whole group", whole_group)
register_backend("my counted gloo", counted)
register_backend("my basic engine", basic)


@over_groups(backends=("my bare gloo", "my whole group"), sizes=(1, 2), split=True)
def test_a_user_defined_backend_runs_collectives_and_point_to_point(group):
    size, rank = group.size(), group.rank()
    assert "my" in group.backend
    tensor = torch.full((3,), float(rank + 1))
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    group.allreduce(tensor, ReduceOp.AVG).wait()  # which the group makes of a sum
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    whole = torch.zeros(size)
    group.all_gather_single(whole, torch.tensor([float(rank)])).wait()
    assert whole.tolist() == [float(each) for each in range(size)]
    group.broadcast(tensor.fill_(rank), size - 1).wait()
    assert tensor.tolist() == [size - 1.0] * 3
    dist.barrier(group=group)
    if size > 1:
        works = [group.send(torch.ones(2) * rank, (rank + 1) % size)]
        received = torch.zeros(2)
        works.append(group.recv(received, (rank - 1) % size))
        for work in works:
            work.wait()
        assert received.tolist() == [float((rank - 1) % size)] * 2


@over_groups(backends=("my counted gloo",), sizes=(2,), start=3)
def test_options_are_passed_to_the_backend_factory(group):
    group.barrier().wait()
    assert group._config.options == {"start": 3}
    with pytest.raises(InvalidArgument, match="meta.*serves cpu"):
        group.allreduce(torch.ones(1, device="meta"))


@over_groups(backends=("my basic engine",), sizes=(3,))
def test_an_engine_with_few_operations_can_lose_a_rank(group):
    if group.rank() in group.update_membership(stays=group.rank() != 1):
        tensor = torch.ones(2)
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [2.0, 2.0]


def test_traits_passed_to_register_backend_are_used():
    def fake(store, rank, world_size, timeout, device, **options):
        return groups.backends.fake.FakeEngine(rank, world_size)

    register_backend("my fake", fake, traits=Traits(needs_store=False, devices=frozenset({"meta"})))
    group = new_group("my fake", MINUTE, rank=3, world_size=10)
    assert (group.rank(), group.size()) == (3, 10)
    assert group.devices == {"cpu", "meta"}
    group.allreduce(torch.ones(2, device="meta")).wait()
    group.shutdown()


# -- fake ----------------------------------------------------------------------------------


@pytest.fixture(params=[0, 1, 54_321, MANY - 1], ids="rank {}".format)
def fake(request):
    """One rank of a large fake group, without a store."""
    group = new_group("fake", MINUTE, "cpu", rank=request.param, world_size=MANY)
    yield group
    group.shutdown()


@pytest.mark.parametrize("given", [{}, {"rank": 0}, {"world_size": 2}])
def test_fake_requires_rank_and_world_size(given):
    with pytest.raises(InvalidArgument, match=r"backend 'fake' needs rank= and world_size="):
        new_group("fake", MINUTE, **given)


def test_fake_calls_complete_immediately(fake):
    tensor = torch.arange(3.0)
    works = [
        fake.allreduce(tensor),
        fake.allreduce(tensor, ReduceOp.AVG),
        fake.allreduce_coalesced([tensor]),
        fake.reduce(tensor, MANY - 1),
        fake.broadcast(tensor, 7),
        fake.barrier(),
        fake.send(tensor, (fake.rank() + 1) % MANY),
        fake.recv(tensor, (fake.rank() + 1) % MANY),
        fake.recv_anysource(tensor),
    ]
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all(work.wait() for work in works)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert works[0].get_future().wait()[0] is tensor


def test_fake_outputs_are_filled_with_this_ranks_values(fake):
    rank = fake.rank()
    whole, part = torch.zeros(MANY, 2), torch.tensor([1.0, float(rank)])
    fake.all_gather_single(whole, part).wait()
    assert torch.equal(whole, part.expand(MANY, 2))
    numbers = torch.arange(2.0 * MANY).view(MANY, 2)
    fake.reduce_scatter_single(part, numbers).wait()
    assert part.tolist() == [2.0 * rank, 2.0 * rank + 1]


def test_fake_list_and_rooted_collectives():
    group = new_group("fake", MINUTE, rank=1, world_size=3)
    mine, outputs = torch.ones(2), [torch.zeros(2) for _ in range(3)]
    group.allgather(outputs, mine).wait()
    assert torch.stack(outputs).tolist() == [[1.0, 1.0]] * 3
    inputs = [mine * 0, mine * 5, mine * 9]
    group.scatter(mine, inputs, 1).wait()
    assert mine.tolist() == [5.0, 5.0]
    group.reduce_scatter(mine, [mine * 2] * 3).wait()
    assert mine.tolist() == [10.0, 10.0]
    group.gather(outputs, mine, 1).wait()
    assert torch.stack(outputs).tolist() == [[10.0, 10.0]] * 3
    group.gather([], mine, 0).wait()
    group.scatter(mine, [], 0).wait()
    assert mine.tolist() == [10.0, 10.0]
    group.alltoall(outputs, inputs).wait()
    assert outputs[1].tolist() == [5.0, 5.0]
    exchanged = torch.zeros(6)
    group.all_to_all_single(exchanged, torch.arange(6.0)).wait()
    assert exchanged.tolist() == [2.0, 3.0] * 3
    group.all_to_all_single(exchanged.zero_(), torch.arange(6.0), [1, 3, 2], [2, 2, 2]).wait()
    assert exchanged.tolist() == [2.0, 2.0, 3.0, 0.0, 2.0, 3.0]
    group.shutdown()
    with pytest.raises(GroupAborted, match="this rank shut the group down"):
        group.barrier()


def test_fake_groups_split_in_any_order(fake):
    rank = fake.rank()
    row = list(range(rank % 100, MANY, 100))
    part = fake.split_group(row)
    assert (part.rank(), part.size()) == (row.index(rank), 1000)
    assert part.global_ranks == tuple(row)
    turned = part.split_group(list(reversed(range(1000))))
    assert turned.rank() == 999 - part.rank()
    assert turned.global_ranks == tuple(reversed(row))
    other = (rank + 1) % MANY
    assert fake.split_group([other]) is None
    assert dist.get_process_group_ranks(part) == row
    for group in (turned, part):
        group.barrier().wait()
        group.shutdown()


def test_fake_validates_arguments(fake):
    with pytest.raises(InvalidArgument, match="not a rank of this group"):
        fake.broadcast(torch.ones(1), MANY)
    with pytest.raises(InvalidArgument, match="needs"):
        fake.all_gather_single(torch.ones(5), torch.ones(1))


def test_fake_runs_on_the_meta_device():
    group = new_group("fake", MINUTE, "meta", rank=0, world_size=MANY)
    whole = torch.empty(MANY * 1000, device="meta")  # 400 MB, if it were there
    group.all_gather_single(whole, torch.empty(1000, device="meta")).wait()
    group.allreduce(whole, ReduceOp.AVG).wait()
    group.shutdown()


def test_a_group_of_one_rank_works_on_every_backend():
    for backend in ("local", "gloo", "fake"):
        group = new_group(backend, MINUTE, store=HashStore(), rank=0, world_size=1)
        tensor = torch.ones(2)
        group.allreduce(tensor, ReduceOp.AVG).wait()
        assert tensor.tolist() == [1.0, 1.0]
        group.shutdown()
