"""Stopping: whichever rank hears of it, all of them stop after the same step."""

import contextlib
import io
import os
import signal
import threading

import pytest
import torch.distributed as dist

from phalanx.checkpoint import STOPPED, StopRequest
from phalanx.errors import InvalidArgument, InvalidState

STEPS = 12


def train(stop, rank, *, heard_by, at):
    """Take steps until all agree to stop; returns the last one. One rank hears of it at a step."""
    for step in range(STEPS):
        if rank == heard_by and step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.requested():
            return step
    return None


def stop_together(ctx, heard_by, at, every):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(ctx.group(), every=every) as stop:
        last = train(stop, ctx.rank, heard_by=heard_by, at=at)
        assert stop.requested() == (last is not None), "an answer is for good"
    assert signal.getsignal(signal.SIGTERM) is before
    return last


@pytest.mark.parametrize(
    ("heard_by", "at", "every", "last"),
    [(0, 0, 1, 0), (2, 3, 1, 3), (1, 4, 5, 4), (1, 5, 5, 9), (1, 11, 5, None), (None, 0, 1, None)],
)
def test_all_ranks_stop_after_the_same_step(ranks, heard_by, at, every, last):
    assert ranks.run(stop_together, 3, args=(heard_by, at, every)) == [last] * 3


def hear_in_turn(ctx):
    """Let every rank hear of it at another step."""
    with StopRequest(ctx.group("gloo")) as stop:
        return train(stop, ctx.rank, heard_by=ctx.rank, at=2 + ctx.rank)


def test_ranks_that_hear_of_it_at_different_steps_stop_at_the_first(ranks):
    assert ranks.run(hear_in_turn, 3) == [2, 2, 2]


def leave_the_default_group(ctx):
    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), StopRequest() as stop:
            last = train(stop, ctx.rank, heard_by=1, at=3)
            stop.leave(last)
    except SystemExit as end:
        return end.code, said.getvalue()
    finally:
        dist.destroy_process_group()


def test_ranks_leave_with_the_code_and_the_first_one_says_why(ranks):
    assert ranks.run(leave_the_default_group, 2) == [
        (STOPPED, "stopped on request after saving step 3 (SIGTERM)\n"),
        (STOPPED, ""),
    ]


def test_one_process_needs_no_group():
    with StopRequest() as stop:
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a scheduler may tell the launcher and the ranks
        assert stop.requested()


def test_a_second_interrupt_interrupts():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_signals_can_be_meant():
    with StopRequest(signals=[signal.SIGUSR1]) as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert stop.requested()


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_may_ask_for_itself(capsys):
    with StopRequest(signals=()) as stop:
        stop.request()
        assert stop.requested()
        with pytest.raises(SystemExit) as end:
            stop.leave()
    assert end.value.code == STOPPED == 75
    assert capsys.readouterr().err == "stopped on request\n"


def test_only_the_main_thread_hears_signals():
    errors = []

    def enter():
        try:
            with StopRequest():
                pass
        except InvalidState as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    with pytest.raises(InvalidArgument, match="every is 0"):
        StopRequest(every=0)
