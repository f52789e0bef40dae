"""Buffer communication hooks, which replace the buffer broadcast."""

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.futures import Future

import phalanx
from cases import over_cases
from phalanx.ddp import DDP, _BufferCommHookLocation
from phalanx.errors import GroupError, HookError

from .whole import ROWS, batch, compare, everywhere, mlp, seeded, share, squares

BEFORE, AFTER = _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD
both_times = pytest.mark.parametrize("location", [BEFORE, AFTER], ids=["before", "after"])


class Counting(nn.Module):
    """Counts its rows and has a buffer that autograd saves."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("scale", torch.ones(3))
        self.again = self.count

    def forward(self, rows):
        self.count += len(rows)
        return self.layer(rows) * self.scale


def make(group, **options):
    return DDP(seeded(Counting), process_group=group, **options)


def total(group, buffers):
    """All-reduce the counter and wait."""
    group.allreduce(buffers["count"]).wait()


@everywhere
@both_times
def test_buffer_hook_replaces_the_broadcast(group, location):
    ddp, whole = make(group), seeded(Counting)
    seen = []

    def hook(state, buffers):
        seen.append((state, list(buffers), float(buffers["count"])))
        total(group, buffers)

    ddp._register_buffer_comm_hook("mine", hook, location)
    assert ddp.buffer_hook.buffer_comm_hook is hook
    assert ddp._check_sync_bufs_pre_fwd() == (location is BEFORE)
    assert ddp._check_sync_bufs_post_fwd() == (location is AFTER)
    ddp.module.count.fill_(group.rank())
    ranks = sum(range(group.size()))
    for step in range(2):
        rows = batch(step, group.size())
        squares(ddp, share(rows, group)).backward()
        squares(whole, rows).backward()
        compare(ddp, whole)
    assert [each[:2] for each in seen] == [("mine", ["count", "scale"])] * 2
    size = group.size()
    if location is BEFORE:
        assert [each[2] for each in seen] == [group.rank(), ranks + ROWS]
        assert ddp.module.count == (ranks + ROWS) * size + ROWS
    else:
        first = ranks + ROWS * size
        assert [each[2] for each in seen] == [group.rank() + ROWS, first + ROWS]
        assert ddp.module.count == (first + ROWS) * size


@everywhere
@both_times
def test_backward_waits_for_the_hooks_futures(group, location):
    ddp = make(group)
    futures = []

    def hook(state, buffers):
        futures.append(Future())
        return [group.allreduce(buffers["count"]).get_future(), futures[-1]]

    ddp._register_buffer_comm_hook(None, hook, location)
    for step in range(3):
        output = ddp(share(batch(step, group.size()), group))
        assert len(futures) == step + 1
        # Completed during backward, so forward has not waited for it.
        output.register_hook(lambda _: futures[-1].set_result(None))
        assert not futures[-1].done()
        output.sum().backward()
        assert futures[-1].done()
        ddp.zero_grad()
    if location is AFTER:
        size = group.size()
        assert ddp.module.count == ROWS * (size + size**2 + size**3)


@everywhere
def test_next_forward_waits_for_the_hooks_futures(group):
    ddp = make(group)
    events = []

    class Told(Future):
        def wait(self):
            events.append("waited")
            return super().wait()

    def hook(state, buffers):
        events.append("called")
        future = Told()
        future.set_result(None)
        return future

    ddp._register_buffer_comm_hook(None, hook)
    for _ in range(2):
        ddp(torch.ones(1, 5))
    assert events == ["called", "waited", "called"]


@everywhere
def test_no_sync_and_no_grad_passes_skip_the_hook(group):
    ddp, calls = make(group), []
    ddp._register_buffer_comm_hook(None, lambda *_: calls.append(1))
    rows = share(batch(0, group.size()), group)
    squares(ddp, rows).backward()
    with ddp.no_sync():
        squares(ddp, rows).backward()
        assert len(calls) == 2  # as in torch's class: it goes by the forward pass before
        squares(ddp, rows).backward()
    assert len(calls) == 2
    with torch.no_grad():
        ddp(rows)
    assert len(calls) == 2


@everywhere
def test_several_forwards_with_buffers_saved_by_autograd(group):
    ddp, whole = make(group), seeded(Counting)

    def hook(state, buffers):
        buffers["scale"].mul_(1.0)

    ddp._register_buffer_comm_hook(None, hook, AFTER)
    rows = batch(0, group.size())
    sum(squares(ddp, share(rows, group) * n) for n in (1, 2)).backward()
    sum(squares(whole, rows * n) for n in (1, 2)).backward()
    compare(ddp, whole)


@everywhere
def test_bad_buffer_hook_is_rejected(group):
    ddp = make(group)
    for kind in (AssertionError, TypeError, phalanx.errors.MisuseError):
        with pytest.raises(kind, match="must be callable, got str"):
            ddp._register_buffer_comm_hook(None, "hook")
    with pytest.raises(TypeError, match="_BufferCommHookLocation"):
        ddp._register_buffer_comm_hook(None, total, "before")
    assert ddp.buffer_hook is None


def raises(state, buffers):
    raise OSError("no disk")


def returns_text(state, buffers):
    return "done"


def future_raises(state, buffers):
    future = Future()
    future.set_exception(ValueError("not today"))
    return [future]


def never_ends(state, buffers):
    return [Future()]


def nothing(state, buffers):
    pass


WRONG = {
    raises: "raised OSError: no disk",
    returns_text: "a str, not a torch.futures.Future",
    future_raises: "ValueError: not today",
    never_ends: "did not complete its future within",
}


@over_cases("local-2", "shm-4", timeout=2, reuse=False)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda hook: hook.__name__)
def test_buffer_hook_failure_on_one_rank_is_raised_on_all(group, wrong):
    ddp = make(group)
    ddp._register_buffer_comm_hook(None, wrong if group.rank() == 1 else nothing, AFTER)
    kind = HookError if group.rank() == 1 else GroupError
    with pytest.raises(kind, match=f"(?s)buffer hook {wrong.__name__} .*{WRONG[wrong]}"):
        for _ in range(2):
            squares(ddp, torch.ones(ROWS, 5)).backward()


@everywhere
def test_find_common_rank_returns_the_highest_candidate(group):
    ddp = DDP(mlp(), process_group=group)
    rank, size = group.rank(), group.size()
    assert ddp._find_common_rank(rank, True) == size - 1
    assert ddp._find_common_rank(rank, rank == 0) == 0
    with pytest.raises(ValueError, match="no candidate"):
        ddp._find_common_rank(rank, False)


@everywhere
def test_torchs_private_buffer_sync_methods(group):
    ddp = make(group)
    root = group.size() - 1
    ddp.module.count.fill_(group.rank())
    ddp._sync_module_buffers(root)
    assert ddp.module.count == root
    ddp.module.count.fill_(group.rank())
    ddp._default_broadcast_coalesced(authoritative_rank=root)
    assert ddp.module.count == root
    other = torch.tensor([group.rank()])
    ddp._default_broadcast_coalesced([other], 1 << 20, root)
    assert other == root
    ddp._passing_sync_batchnorm_handle(ddp.module)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        ddp._passing_sync_batchnorm_handle(nn.Sequential(nn.SyncBatchNorm(3)))


@over_cases("local-2", timeout=2, reuse=False)
def test_the_time_limit_is_for_the_futures(group):
    """A hook that takes long itself does not shorten the time that its future has."""
    ddp = make(group)

    def hook(state, buffers):
        time.sleep(1.2)  # of a limit of one second
        future = Future()
        threading.Timer(0.2, future.set_result, [None]).start()
        return future

    ddp._register_buffer_comm_hook(None, hook, BEFORE)
    ddp(torch.ones(ROWS, 5))
    ddp._buffer_sync.wait()  # as backward does, but while the group is idle


@everywhere
@both_times
def test_a_hook_can_be_taken_away(group, location):
    ddp, calls = make(group), []
    ddp._register_buffer_comm_hook(None, lambda *_: calls.append(1), location)
    ddp.buffer_hook = None
    ddp.module.count.fill_(group.rank())
    for _ in range(2):
        squares(ddp, torch.ones(ROWS, 5)).backward()
    assert not calls
    assert ddp.module.count == 2 * ROWS, "rank 0's, and the rows of both steps"


@everywhere
def test_a_copy_has_the_hook(group):
    ddp = make(group)
    ddp._register_buffer_comm_hook("mine", nothing, BEFORE)
    with phalanx.groups.process_group(group):
        again = copy.deepcopy(ddp)
    assert again.buffer_hook.buffer_comm_hook is nothing
    assert again._buffer_sync.hook.buffer_comm_hook_state == "mine"
