"""Preemption: whichever rank gets the signal, all ranks stop after the same step."""

import contextlib
import io
import os
import signal
import threading

import pytest
import torch.distributed as dist

from phalanx.checkpoint import PreemptionGuard
from phalanx.errors import InvalidArgument, InvalidState

STEPS = 12


def train(stop, rank, *, heard_by, at):
    """Run steps until all ranks agree to stop and return the last; one rank gets a signal."""
    for step in range(STEPS):
        if rank == heard_by and step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.should_stop():
            return step
    return None


def stop_together(ctx, heard_by, at, every):
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionGuard(ctx.group(), every=every) as stop:
        last = train(stop, ctx.rank, heard_by=heard_by, at=at)
        assert stop.should_stop() == (last is not None), "an answer is for good"
    assert signal.getsignal(signal.SIGTERM) is before
    return last


@pytest.mark.parametrize(
    ("heard_by", "at", "every", "last"),
    [(0, 0, 1, 0), (2, 3, 1, 3), (1, 4, 5, 4), (1, 5, 5, 9), (1, 11, 5, None), (None, 0, 1, None)],
)
def test_all_ranks_stop_after_the_same_step(ranks, heard_by, at, every, last):
    assert ranks.run(stop_together, 3, args=(heard_by, at, every)) == [last] * 3


def hear_in_turn(ctx):
    """Signal every rank at another step."""
    with PreemptionGuard(ctx.group("gloo")) as stop:
        return train(stop, ctx.rank, heard_by=ctx.rank, at=2 + ctx.rank)


def test_signals_at_different_steps_stop_all_ranks_at_the_first(ranks):
    assert ranks.run(hear_in_turn, 3) == [2, 2, 2]


def leave_the_default_group(ctx):
    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), PreemptionGuard() as stop:
            last = train(stop, ctx.rank, heard_by=1, at=3)
            stop.exit(last)
    except SystemExit as end:
        return end.code, said.getvalue()
    finally:
        dist.destroy_process_group()


def test_exit_uses_the_exit_code_and_rank_0_prints_the_reason(ranks):
    assert ranks.run(leave_the_default_group, 2) == [
        (PreemptionGuard.EXIT_CODE, "stopped on request after saving step 3 (SIGTERM)\n"),
        (PreemptionGuard.EXIT_CODE, ""),
    ]


def test_single_process_needs_no_group():
    with PreemptionGuard() as stop:
        assert not stop.should_stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a scheduler may signal the launcher and the ranks
        assert stop.should_stop()


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize("first", [None, signal.SIGTERM])
def test_second_sigint_raises_keyboard_interrupt(first):
    with PreemptionGuard(repeat_window=0.0) as stop:
        if first is not None:
            signal.raise_signal(first)
        signal.raise_signal(signal.SIGINT)
        assert stop.should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("foreground")
def test_duplicate_sigint_within_the_window_counts_once():
    """A terminal signals launcher and ranks, and the launcher forwards it to the ranks."""
    with PreemptionGuard() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.should_stop()


def test_second_sigint_calls_the_previous_handler():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with PreemptionGuard(repeat_window=0.0):
            signal.raise_signal(signal.SIGINT)
            assert not heard
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(heard) == 2, "which is back"
    finally:
        signal.signal(signal.SIGINT, before)


def in_child(body):
    """Run a function in a forked child and return the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_keeps_the_default_signal_behaviour():
    with PreemptionGuard(repeat_window=0.0) as stop:
        assert in_child(lambda: signal.raise_signal(signal.SIGTERM)) == signal.SIGTERM
        assert in_child(lambda: signal.raise_signal(signal.SIGINT)) == 0, "its parent decides"
        assert not stop.should_stop()

    def interrupt():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with PreemptionGuard(repeat_window=0.0):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert in_child(interrupt) == signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGKILL, 4096])
def test_signal_that_cannot_be_handled_is_rejected(number):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InvalidArgument, match="cannot be handled"):
        PreemptionGuard(signals=[signal.SIGTERM, number]).__enter__()
    assert signal.getsignal(signal.SIGTERM) is before
    with PreemptionGuard(signals=[signal.SIGTERM, signal.SIGTERM]):
        pass
    assert signal.getsignal(signal.SIGTERM) is before, "also if it was named twice"


def test_guard_is_not_reentrant():
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionGuard() as stop, pytest.raises(InvalidState, match="already active"), stop:
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    with stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.should_stop()


def test_exit_survives_a_broken_stderr(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    with pytest.raises(SystemExit) as end:
        PreemptionGuard().exit(3)
    assert end.value.code == PreemptionGuard.EXIT_CODE


def test_rank_without_a_group_logs_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    PreemptionGuard()
    assert "rank 0 of 2 has no process group" in caplog.text


def test_custom_signals():
    with PreemptionGuard(signals=[signal.SIGUSR1]) as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert stop.should_stop()


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with PreemptionGuard() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.should_stop()
    finally:
        signal.signal(signal.SIGINT, before)


def test_stop_can_be_requested_by_the_program(capsys):
    with PreemptionGuard(signals=()) as stop:
        stop.request()
        assert stop.should_stop()
        with pytest.raises(SystemExit) as end:
            stop.exit()
    assert end.value.code == PreemptionGuard.EXIT_CODE == 75
    assert capsys.readouterr().err == "stopped on request\n"


def test_guard_must_be_entered_in_the_main_thread():
    errors = []

    def enter():
        try:
            with PreemptionGuard():
                pass
        except InvalidState as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    with pytest.raises(InvalidArgument, match="every must be at least 1"):
        PreemptionGuard(every=0)
