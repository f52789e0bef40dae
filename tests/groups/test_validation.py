"""Argument validation: errors are raised on the calling rank only, and name a fix.

A rejected call is never issued, so the other ranks are unaffected and the group stays usable.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import HashStore, ReduceOp

from phalanx.errors import InvalidArgument, InvalidState, InvalidType, MisuseError, UnknownOption
from phalanx.groups import new_group, register_backend
from phalanx.groups.backends import nccl
from phalanx.testing import over_groups

SECOND = timedelta(seconds=1)


def some(*shape, dtype=torch.float32):
    return torch.ones(shape or (4,), dtype=dtype)


def rooted(kind, root):
    options = kind()
    options.rootRank = root
    return options


# Rank 1 of two makes these calls: error type, part of the message, call.
REFUSED = {
    # not a tensor
    "a number": (InvalidType, "tensors, got int", lambda g: g.allreduce(3)),
    "nothing": (InvalidType, "tensors, got NoneType", lambda g: g.allreduce()),
    "numbers": (InvalidType, "list of float", lambda g: g.broadcast([1.0], 0)),
    "a tensor for a list": (InvalidType, "tensors", lambda g: g.allreduce_coalesced(some())),
    "a tensor for outputs": (InvalidType, "tensors", lambda g: g.allgather(some(), some())),
    "numbers for inputs": (InvalidType, "tensors", lambda g: g.alltoall([some()] * 2, [1, 2])),
    # a list where one tensor belongs
    "two to allreduce": (InvalidArgument, "coalesced", lambda g: g.allreduce([some(), some()])),
    "two to broadcast": (InvalidArgument, "once for each", lambda g: g.broadcast([some()] * 2, 0)),
    "two to send": (InvalidArgument, "one tensor", lambda g: g.send([some(), some()], 0)),
    "none to allreduce": (InvalidArgument, "list of 0", lambda g: g.allreduce([])),
    # tensors that cannot be used as they are
    "a transposed one": (InvalidArgument, "contiguous", lambda g: g.allreduce(some(2, 3).t())),
    "a column": (InvalidArgument, "contiguous", lambda g: g.send(some(2, 3)[:, 0], 0)),
    "every other output": (
        InvalidArgument,
        "contiguous",
        lambda g: g.all_gather_single(some(16)[::2], some()),
    ),
    "a conjugate": (
        InvalidArgument,
        "resolve_conj",
        lambda g: g.allreduce(some(dtype=torch.complex64).conj()),
    ),
    "a negated view": (
        InvalidArgument,
        "resolve_neg",
        lambda g: g.broadcast(torch._neg_view(some()), 0),
    ),
    "two dtypes in a list": (
        InvalidArgument,
        "float32, int64",
        lambda g: g.allreduce_coalesced([some(), some(dtype=torch.int64)]),
    ),
    "two dtypes": (
        InvalidArgument,
        "float32, int64",
        lambda g: g.all_gather_single(some(8), some(dtype=torch.int64)),
    ),
    # operations and options
    "a word for an operation": (InvalidType, "ReduceOp", lambda g: g.allreduce(some(), "sum")),
    "a word to reduce with": (InvalidType, "ReduceOp", lambda g: g.reduce(some(), 0, "sum")),
    "options of another call": (
        InvalidType,
        "AllreduceOptions",
        lambda g: g.allreduce([some()], c10d.BroadcastOptions()),
    ),
    "a maximum of sparse ones": (
        InvalidArgument,
        "sparse",
        lambda g: g.allreduce(some().to_sparse_coo(), ReduceOp.MAX),
    ),
    # ranks
    "a root beyond": (InvalidArgument, "0 to 1", lambda g: g.broadcast(some(), 2)),
    "a root below": (InvalidArgument, "group-local", lambda g: g.reduce(some(), -1)),
    "a root in words": (InvalidArgument, "'0'", lambda g: g.broadcast(some(), "0")),
    "a root in options": (
        InvalidArgument,
        "root 5",
        lambda g: g.broadcast([some()], rooted(c10d.BroadcastOptions, 5)),
    ),
    "a root to gather on": (InvalidArgument, "root 5", lambda g: g.gather([], some(), 5)),
    "a root to scatter from": (
        InvalidArgument,
        "root 5",
        lambda g: g.scatter([some()], [], opts=rooted(c10d.ScatterOptions, 5)),
    ),
    "sending to oneself": (InvalidArgument, "itself; copy", lambda g: g.send(some(), 1)),
    "receiving from oneself": (InvalidArgument, "itself; copy", lambda g: g.recv(some(), 1)),
    "sending beyond": (InvalidArgument, "destination 2", lambda g: g.send(some(), 2)),
    # counts and sizes
    "an output too few": (
        InvalidArgument,
        "expected 2, got 1",
        lambda g: g.allgather([some()], some()),
    ),
    "an output too many": (
        InvalidArgument,
        "expected 2, got 3",
        lambda g: g.gather([some()] * 3, some(), 1),
    ),
    "an input too few": (
        InvalidArgument,
        "expected 2, got 1",
        lambda g: g.scatter(some(), [some()], 1),
    ),
    "a part too few": (
        InvalidArgument,
        "expected 2, got 1",
        lambda g: g.reduce_scatter(some(), [some()]),
    ),
    "no tensor to exchange": (InvalidArgument, "expected 2, got 0", lambda g: g.alltoall([], [])),
    "a list too few": (
        InvalidArgument,
        "expected 2, got 1",
        lambda g: g.allgather_coalesced([[some()]], [some()]),
    ),
    "a list too short": (
        InvalidArgument,
        "allgather_coalesced",
        lambda g: g.allgather_coalesced([[some()], []], [some()]),
    ),
    "a small output": (
        InvalidArgument,
        "has 3 elements, needs 4",
        lambda g: g.allgather([some(), some(3)], some()),
    ),
    "a small whole": (
        InvalidArgument,
        "has 7 elements, needs 8",
        lambda g: g.all_gather_single(some(7), some()),
    ),
    "a small part": (
        InvalidArgument,
        "has 3 elements, needs 4",
        lambda g: g.reduce_scatter(some(3), [some(), some()]),
    ),
    "a large part": (
        InvalidArgument,
        "has 8 elements, needs 10",
        lambda g: g.reduce_scatter_single(some(5), some(8)),
    ),
    "a small place to gather": (
        InvalidArgument,
        "has 3 elements, needs 4",
        lambda g: g.gather([some(3), some(4)], some(), 1),
    ),
    "a small piece to scatter": (
        InvalidArgument,
        "has 3 elements, needs 4",
        lambda g: g.scatter(some(), [some(3), some()], 1),
    ),
    # splits
    "rows that do not divide": (
        InvalidArgument,
        "3 rows.*output_split_sizes",
        lambda g: g.all_to_all_single(some(3), some(4)),
    ),
    "splits that do not add up": (
        InvalidArgument,
        "add up to the 4 rows",
        lambda g: g.all_to_all_single(some(), some(), [2, 2], [1, 2]),
    ),
    "a split too many": (
        InvalidArgument,
        "must be 2 numbers",
        lambda g: g.all_to_all_single(some(), some(), [2, 1, 1], [2, 2]),
    ),
    "a negative split": (
        InvalidArgument,
        "input_split_sizes",
        lambda g: g.all_to_all_single(some(), some(), [2, 2], [5, -1]),
    ),
    "a tensor without rows": (
        InvalidArgument,
        "rows",
        lambda g: g.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
    ),
    # timeouts
    "seconds": (InvalidType, "timedelta, got int", lambda g: g.allreduce(some(), timeout=5)),
    "seconds to meet": (InvalidType, "timedelta, got int", lambda g: g.barrier(timeout=5)),
    "seconds to send": (InvalidType, "timedelta, got int", lambda g: g.send(some(), 0, timeout=5)),
    "seconds by place": (InvalidType, "timedelta|BarrierOptions", lambda g: g.barrier(5)),
    "no time": (InvalidArgument, "positive", lambda g: g.broadcast(some(), 0, timedelta(0))),
    "less than no time": (
        InvalidArgument,
        "positive",
        lambda g: g.allreduce(some(), timeout=-SECOND),
    ),
    "no time to send": (InvalidArgument, "positive", lambda g: g.send(some(), 0, timeout=-SECOND)),
    "seconds for all calls": (InvalidType, "timedelta", lambda g: g.set_timeout(5)),
    "no time for all calls": (InvalidArgument, "positive", lambda g: g.set_timeout(-SECOND)),
}


@over_groups(backends=("local",), sizes=(2,), reuse=True)  # nothing reaches an engine
@pytest.mark.parametrize("mistake", REFUSED)
def test_invalid_arguments_on_one_rank_do_not_affect_the_group(group, mistake):
    error, telling, call = REFUSED[mistake]
    before = [record.sequence for record in group.records()]
    if group.rank() == 1:
        with pytest.raises(error, match=telling) as caught:
            call(group)
        assert isinstance(caught.value, MisuseError)
    tensor = torch.ones(3)
    group.allreduce(tensor).wait()
    assert tensor.tolist() == [2.0] * 3
    assert group.records()[-1].sequence == max(before, default=0) + 1


@over_groups(backends=("gloo",), sizes=(1,))
def test_tensors_on_an_unsupported_device_are_rejected(group):
    elsewhere = torch.ones(3, device="meta")
    calls = [
        lambda: group.allreduce(elsewhere),
        lambda: group.broadcast(elsewhere, 0),
        lambda: group.allgather([torch.ones(3)], elsewhere),
        lambda: group.all_to_all_single(torch.ones(3), elsewhere),
        lambda: group.reduce_scatter_single(elsewhere, torch.ones(3)),
    ]
    for call in calls:
        with pytest.raises(
            InvalidArgument, match=r"on meta.*gloo group serves cpu.*move the tensor"
        ):
            call()
    tensor = torch.ones(3)
    group.allreduce(tensor).wait()


# -- backends and their options ------------------------------------------------------------


def alone(backend, **options):
    """Form one rank of a group of two; arguments are checked before waiting for the other."""
    return new_group(backend, SECOND, store=HashStore(), rank=0, world_size=2, **options)


@pytest.mark.parametrize("name", ["no such backend", "", None, ["gloo"]])
def test_an_unknown_backend_is_rejected(name):
    with pytest.raises(InvalidArgument, match="fake, gloo, local.*register_backend"):
        alone(name)


@pytest.mark.parametrize("name", ["gloo", "nccl", "local", "fake"])
def test_registering_a_backend_name_twice_is_rejected(name):
    with pytest.raises(ValueError, match=f"{name}.*already.*another name"):
        register_backend(name, alone)


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_an_unknown_backend_option_is_rejected(backend):
    with pytest.raises(UnknownOption, match=f"^{backend} .*colour, shape$") as caught:
        alone(backend, colour="red", shape="round")
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, AssertionError)


def test_nccl_options_are_set_by_name():
    target = SimpleNamespace(is_high_priority_stream=False)
    nccl.apply_options(target, {"is_high_priority_stream": True})
    assert target.is_high_priority_stream
    with pytest.raises(KeyError, match="nccl has no option 'colour'"):
        nccl.apply_options(target, {"colour": "red"})
    assert not hasattr(target, "colour")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_on_a_torch_without_nccl_is_rejected():
    with pytest.raises(InvalidState, match="no NCCL.*'gloo'"):
        alone("nccl")


@pytest.mark.parametrize(
    ("timeout", "error", "telling"),
    [
        (5, InvalidType, "timedelta, got int"),
        (None, InvalidType, "timedelta, got NoneType"),
        (timedelta(0), InvalidArgument, "positive"),
        (-SECOND, InvalidArgument, "positive"),
    ],
)
def test_an_invalid_timeout_is_rejected(timeout, error, telling):
    with pytest.raises(error, match=telling):
        new_group("local", timeout, store=HashStore(), rank=0, world_size=1)


def form_local(ctx):
    with pytest.raises(InvalidState, match="threads of one process.*'gloo'"):
        ctx.group("local", timeout=timedelta(seconds=10))


def test_the_local_backend_rejects_processes(ranks):
    ranks.run(form_local, 2)


def test_send_and_recv_require_a_rank():
    group = new_group("fake", rank=0, world_size=2)
    for call in (group.send, group.recv):
        with pytest.raises(InvalidArgument, match="None is not a rank of this group"):
            call(torch.ones(1), None)
