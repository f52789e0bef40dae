"""Axes on backends that other packages have registered with torch."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import InvalidArgument, RendezvousError
from phalanx.groups import new_group
from phalanx.mesh import DeviceMesh, init_device_mesh

EXTENDED, SIMPLE, FAILING = "mesh_test_extended", "mesh_test_simple", "mesh_test_failing"
SECONDS = timedelta(seconds=20)
requests = []


def make_extended(request, options):
    ranks = list(request.global_ranks_in_group)
    requests.append((request.group_rank, ranks, request.timeout, options))
    return dist.ProcessGroupGloo(
        request.store, request.group_rank, request.group_size, timeout=request.timeout
    )


def make_simple(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def make_failing(store, rank, size, timeout):
    if rank == 1:
        raise ValueError("no such device")
    return make_simple(store, rank, size, timeout)


def register():
    if EXTENDED not in dist.Backend.backend_list:  # there is no way to take one back
        dist.Backend.register_backend(EXTENDED, make_extended, extended_api=True, devices=["cpu"])
        dist.Backend.register_backend(SIMPLE, make_simple, devices=["cpu"])
        dist.Backend.register_backend(FAILING, make_failing, devices=["cpu"])
    requests.clear()


def total(group):
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return tensor[0].item()


def check_axes(ctx, **on):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = SECONDS / 2
    overrides = {0: (EXTENDED, options), "tp": SIMPLE}
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=overrides, **on
    )
    row, column = divmod(ctx.rank, 2)
    for axis, name in ((0, EXTENDED), (1, SIMPLE)):
        group = mesh.get_group(axis)
        assert group._get_backend_name() == dist.get_backend(group) == name
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        assert total(group) == 2
    assert requests == [(row, [column, 2 + column], SECONDS / 2, options)]
    assert mesh.get_group(0).timeout == SECONDS / 2
    flat = mesh._flatten("all", backend_override=EXTENDED)
    assert flat.get_group()._get_backend_name() == EXTENDED
    assert requests[1][1:] == ([0, 1, 2, 3], SECONDS, None)
    halves = mesh.flatten("all").unflatten(
        0, (2, 2), ("x", "y"), backend_override={"y": (EXTENDED, options)}
    )
    assert halves.get_group("y")._get_backend_name() == EXTENDED
    assert total(halves.get_group("y")) == 2
    whole = DeviceMesh("cpu", [0, 1, 2, 3], backend_override=((EXTENDED, options),), **on)
    assert total(whole.get_group()) == 4
    mesh.shutdown()


def on_torchs_group(ctx, backend):
    register()
    dist.init_process_group(
        backend, store=ctx.store, rank=ctx.rank, world_size=ctx.size, timeout=SECONDS
    )
    try:
        check_axes(ctx)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_our_group(ctx, backend):
    register()
    group = ctx.group(backend, timeout=SECONDS)
    check_axes(ctx, group=group)
    made = new_group(EXTENDED, SECONDS, store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    assert requests[-1][1:] == ([0, 1, 2, 3], SECONDS, None)
    half = made.split_group([ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1])
    assert requests[-1][1] == list(half.global_ranks)
    assert total(half) == 2
    half.shutdown()
    made.shutdown()


@pytest.mark.parametrize(("where", "backend"), [(on_torchs_group, "gloo"), (on_our_group, "shm")])
def test_axes_on_registered_backends(ranks, where, backend):
    ranks.run(where, 4, args=(backend,))


def form_on_failing(ctx):
    register()
    kind = ValueError if ctx.rank == 1 else RendezvousError
    with pytest.raises(kind, match="no such device"):
        new_group(
            FAILING, timedelta(seconds=1), store=ctx.store, rank=ctx.rank, world_size=ctx.size
        )


def test_all_ranks_learn_why_an_engine_was_not_made(ranks):
    ranks.run(form_on_failing, 2)


def test_an_unknown_backend_is_refused_before_any_rank_waits():
    group = new_group("fake", rank=0, world_size=4)
    with pytest.raises(InvalidArgument, match="unknown backend 'mesh_test_missing'"):
        init_device_mesh("cpu", (4,), backend_override={0: "mesh_test_missing"}, group=group)
    group.shutdown()
