"""Interrupts while a call is issued: Ctrl-C, or a test's timeout, at every possible point.

A signal handler runs between two instructions of the interpreter: on function entry, after a
call, and on a backward jump. So it may raise after the engine has received a tensor and before
the caller has stored the handle that the engine returned.
"""

import dis
import gc
import os
import sys
import weakref
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count, pairwise

import pytest
import torch
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_map

from phalanx import groups, native
from phalanx.errors import GroupAborted, GroupError, InvalidState, PeerLost
from phalanx.groups import new_group
from phalanx.groups.backends.shm import ShmEngine
from phalanx.testing import RankFailures

from .internals import averaging, user_frame

LONG = timedelta(seconds=60)
COUNT = 100_000  # more than the engine copies aside
OURS = groups.__path__[0]
HANDLED_AFTER = ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")


@cache
def points(code):
    """List the offsets of instructions before which signals are handled."""
    table = dis._parse_exception_table(code)

    def handler(offset):
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    steps = list(dis.get_instructions(code))
    return {
        step.offset
        for last, step in pairwise(steps)
        # The exception counts as raised by the instruction before.
        if last.opname in HANDLED_AFTER and handler(last.offset) == handler(step.offset)
    }


class Strike:
    """Raises at the n-th point where a signal may be handled in the code of a file or folder."""

    def __init__(self, nth, where=OURS):
        self.left = nth
        self.where = where

    def enter(self, frame, _event, _arg):
        if not frame.f_code.co_filename.startswith(self.where):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self.pass_point()
        return self.step

    def step(self, frame, event, _arg):
        if event == "opcode" and frame.f_lasti in points(frame.f_code):
            self.pass_point()
        return self.step

    def pass_point(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@contextmanager
def interrupted(nth):
    """Interrupt the body at the n-th point; ``strike.left`` is zero if that point was reached."""
    strike = Strike(nth)
    sys.settrace(strike.enter)
    try:
        yield strike
    except KeyboardInterrupt:
        assert strike.left == 0
    finally:
        sys.settrace(None)


def as_list(tensor):
    return [tensor[: COUNT // 4], tensor[COUNT // 4 :]]


CALLS = {
    "short": lambda group, tensor: group.allreduce(tensor),
    "plain": lambda group, tensor: group.allreduce(tensor, op=ReduceOp.SUM),
    "max": lambda group, tensor: group.allreduce(tensor, op=ReduceOp.MAX),
    "list": lambda group, tensor: group.allreduce_coalesced(as_list(tensor)),
    "gather": lambda group, tensor: group.all_gather_single(torch.empty(2 * COUNT), tensor),
    "parts": lambda group, tensor: group.reduce_scatter(
        tensor[: COUNT // 4] if group.rank() == 0 else tensor[COUNT // 4 :], as_list(tensor)
    ),
}


def interrupt_everywhere(ctx, backend, name, **options):
    """Interrupt rank 0 at the first point, then the second, and so on; rank 1 calls later."""
    form = ctx.group(backend, timeout=LONG, **options)
    numbers, failures = [], 0
    for nth in count(1):
        group = form
        if ctx.rank == 0:
            state, others = be_interrupted(group, CALLS[name], nth)
            ctx.store.set(f"{name}/{nth}", state)
            if state == "again":
                CALLS[name](group, torch.ones(COUNT)).wait()
        else:
            ctx.store.wait([f"{name}/{nth}"])
            state = ctx.store.get(f"{name}/{nth}").decode()
            if state != "failed":
                CALLS[name](group, torch.ones(COUNT)).wait()
        if state == "failed":
            failures += 1
            if failures == 1:  # to look for a cause takes a quarter of a second
                with pytest.raises(GroupAborted, match=r"interrupted \(KeyboardInterrupt\)"):
                    CALLS[name](group, torch.ones(COUNT)).wait()
            form = ctx.group(backend, timeout=LONG, **options)
        else:
            check(group)
            numbers.append(group._recorder.collectives)
        if ctx.rank == 0:
            assert all((other == 0).all() for other in others), nth
        if state == "over":
            return numbers, failures
    return None


def be_interrupted(group, call, nth):
    """Make a call that is interrupted, and drop the tensor; returns the state of the call."""
    before = group._recorder.collectives
    tensor = torch.ones(COUNT)
    with interrupted(nth) as strike:
        call(group, tensor)
    alive = weakref.ref(tensor.untyped_storage())
    del tensor
    gc.collect()
    has_begun = group._recorder.collectives > before
    if group.failure() is not None:
        state = "failed"
    elif strike.left > 0:
        state = "over"
    else:
        state = "begun" if has_begun else "again"
        assert (alive() is not None) == has_begun, f"at point {nth}"
    # New tensors that would reuse the memory, had it been freed too early.
    return state, [torch.zeros(COUNT) for _ in range(3)]


def check(group):
    """Check that both ranks are at the same sequence number."""
    total = torch.full((3,), float(group.rank() + 1))
    group.allreduce(total).wait()
    assert total.tolist() == [3.0] * 3
    group.barrier().wait()


@pytest.mark.skipif(native.engine is None, reason="the engine was not built")
@pytest.mark.parametrize(
    ("driver", "name"),
    [*(("caller", name) for name in CALLS), ("thread", "short"), ("thread", "plain")],
)
def test_an_interrupted_call_is_issued_completely_or_not_at_all(ranks, driver, name):
    outcomes = ranks.run(interrupt_everywhere, 2, args=("shm", name), kwargs={"driver": driver})
    assert outcomes[0] == outcomes[1], "ranks have counted alike"
    numbers, failures = outcomes[0]
    assert (failures > 0) == (name in ("list", "parts")), "only between two parts of a call"
    assert len(numbers) > (2 if name == "short" else 20)


def test_an_interrupted_gloo_call_is_issued_completely_or_not_at_all(ranks):
    outcomes = ranks.run(interrupt_everywhere, 2, args=("gloo", "plain"))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == 0


# -- sends and receives --------------------------------------------------------------------


def interrupt_a_transfer(ctx, name):
    """Interrupt rank 0 at every point of a transfer that cannot complete before rank 1 calls."""
    group = ctx.group("shm", timeout=LONG, driver="caller")
    size = 5 * COUNT if name == "send" else COUNT  # a send, if it is more than a channel holds
    for nth in count(1):
        if ctx.rank == 0:
            before = group._recorder._transfers
            tensor = torch.full((size,), float(nth))
            with interrupted(nth) as strike:
                getattr(group, name)(tensor, 1)
            del tensor
            others = [torch.zeros(size) for _ in range(3)]
            if group._recorder._transfers == before:
                getattr(group, name)(torch.full((size,), float(nth)), 1)
            ctx.store.set(f"{name}/{nth}", "over" if strike.left else "on")
        else:
            ctx.store.wait([f"{name}/{nth}"])
            tensor = torch.full((size,), -1.0)
            {"send": group.recv, "recv": group.send}[name](tensor, 0).wait()
            assert name == "recv" or (tensor == nth).all(), nth
        check(group)
        if ctx.rank == 0:
            assert all((other == 0).all() for other in others), nth
        if ctx.store.get(f"{name}/{nth}") == b"over":
            return nth
    return None


@pytest.mark.skipif(native.engine is None, reason="the engine was not built")
@pytest.mark.parametrize("name", ["send", "recv"])
def test_an_interrupted_transfer_completes_if_it_was_issued(ranks, name):
    first, second = ranks.run(interrupt_a_transfer, 2, args=(name,))
    assert first == second > 20


# -- threads -------------------------------------------------------------------------------


def test_interrupting_the_rank_that_reduces_fails_the_call_on_all_ranks(threads):
    """On ``local`` the last rank to arrive computes the result for all."""

    def body(ctx):
        ended = []
        for nth in count(1):
            group = ctx.group("local", timeout=timedelta(seconds=20))
            mine = torch.ones(3)
            work = None
            if ctx.rank == 1:
                work = group.allreduce(mine, op=ReduceOp.SUM)
                ctx.store.set(f"{nth}/waits", "")
                ctx.store.wait([f"{nth}/struck"])
            else:
                ctx.store.wait([f"{nth}/waits"])
                before = group._recorder.collectives
                with interrupted(nth) as strike:
                    group.allreduce(mine, op=ReduceOp.SUM)
                told = "over" if strike.left else "on"
                if group._recorder.collectives == before:
                    work = group.allreduce(mine, op=ReduceOp.SUM)
                ctx.store.set(f"{nth}/struck", told)
            try:
                if work is not None:
                    work.wait()
                check(group)
            except GroupError as error:
                told = str(error).splitlines()[0]
                ended.append(told.partition("failed in its engine: ")[2])
            else:
                ended.append("")
            if ctx.store.get(f"{nth}/struck") == b"over":
                return ended
        return None

    first, second = threads.run(body, 2)
    assert first == second
    assert set(first) == {"", "rank 0 was interrupted during the call"}


# -- after completion ----------------------------------------------------------------------


def test_an_average_is_divided_once_even_if_interrupted():
    for nth in count(1):
        tensors = [torch.full((4,), 12.0), torch.full((4,), 24.0)]
        finish = averaging(tensors, 2)
        with interrupted(nth) as strike:
            finish()
        finish()
        assert [tensor.tolist() for tensor in tensors] == [[6.0] * 4, [12.0] * 4]
        if strike.left:
            assert nth > 2
            return


@pytest.mark.skipif(native.engine is None, reason="the engine was not built")
def test_an_interrupt_on_the_fast_path_does_not_fall_back_to_the_slow_path():
    """The fast path looks up the user's frame in Python, where an interrupt may come."""
    group = new_group("shm", rank=0, world_size=1, store=torch.distributed.HashStore())
    for nth in count(1):
        strike = Strike(nth, user_frame.__code__.co_filename)
        begun = False
        sys.settrace(strike.enter)
        try:
            tree_map(group.allreduce, torch.ones(3))  # a frame of torch's in between
            begun = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert begun == (strike.left > 0), nth
        if begun:
            assert nth > 2
            break
    group.shutdown()


def be_interrupted_twice(ctx):
    """The second interrupt comes while the first is handled, so the next call finishes that."""
    group = ctx.group("shm", timeout=LONG)
    tensor = torch.ones(3)

    def strike(*args, **kwargs):
        raise KeyboardInterrupt

    if ctx.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group._engine, "broadcast", strike, raising=False)
            patch.setattr("phalanx.groups._issuer.Issuer._reconcile", strike)
            with pytest.raises(KeyboardInterrupt):
                group.broadcast(tensor, 0)
    for _ in range(2):
        group.allreduce(tensor).wait()
    group.broadcast(tensor, 0).wait()
    return [record.sequence for record in group.records() if record.operation == "allreduce"]


@pytest.mark.skipif(native.engine is None, reason="the engine was not built")
def test_the_fast_path_defers_to_the_slow_path_after_an_interrupted_issue(ranks):
    first, second = ranks.run(be_interrupted_twice, 2)
    assert first == second


def be_interrupted_between_parts_when_a_rank_is_lost(ctx):
    group = ctx.group("shm", timeout=LONG, driver="caller")
    group.barrier().wait()
    if ctx.rank == 2:
        os._exit(9)
    pending = group.allreduce(torch.ones(3))
    tensors = [torch.full((COUNT,), 1.0), torch.full((COUNT,), 2.0)]
    if ctx.rank == 1:
        group.allreduce_coalesced(tensors)
        with pytest.raises(PeerLost):
            pending.wait()
        ctx.store.wait(["refused"])
        return True
    real, parts = ShmEngine._in_place, count(1)

    def strike(*args, **kwargs):
        if next(parts) == 1:
            return real(*args, **kwargs)
        with pytest.raises(PeerLost):
            pending.wait()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShmEngine, "_in_place", strike)
        with pytest.raises(KeyboardInterrupt):
            group.allreduce_coalesced(tensors)
    kept = weakref.ref(tensors[0])
    del tensors
    gc.collect()
    with pytest.raises(InvalidState, match="interrupted while starting"):
        group.exclude([2])
    ctx.store.set("refused", "")
    assert kept() is not None, "the engine has it"
    return True


@pytest.mark.skipif(native.engine is None, reason="the engine was not built")
def test_exclude_is_refused_while_a_call_is_partially_issued(ranks):
    with pytest.raises(RankFailures) as caught:
        ranks.run(be_interrupted_between_parts_when_a_rank_is_lost, 3)
    assert set(caught.value.failures) == {2}
