"""Failed ranks in a pool: error messages, replacement, and captured output."""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest

from phalanx.errors import RanksFailed
from phalanx.testing import Died, RankFailures


def failing(ranks, body, size=2, **options):
    with pytest.raises(RankFailures) as caught:
        ranks.run(body, size, **options)
    return caught.value


def report_pid(ctx):
    return os.getpid()


def compare(ctx):
    answer = 6 * 7
    assert answer == 50 + ctx.size


def test_assertions_are_rewritten_and_equal_tracebacks_are_folded(ranks):
    error = failing(ranks, compare, 3)
    text = str(error)
    assert isinstance(error, RanksFailed)
    assert text.startswith(f"3 of 3 ranks failed in {__name__}.compare\n\nranks 0, 1, 2 failed\n")
    assert "assert 42 == (50 + 3)" in text
    assert text.count("Traceback (most recent call last)") == 1
    assert "phalanx/testing" not in text
    assert sorted(error.failures) == [0, 1, 2]


def raise_own(ctx):
    if ctx.rank:
        raise ValueError(f"rank {ctx.rank} is odd")
    return "fine"


def test_every_failed_rank_is_shown_and_finished_ranks_are_listed(ranks):
    text = str(failing(ranks, raise_own, 3, linger=5))
    assert text.startswith("2 of 3 ranks failed")
    assert "ValueError: rank 1 is odd" in text
    assert "ValueError: rank 2 is odd" in text
    assert text.index("rank 2 failed") < text.index("rank 0 finished")


class BrokenGroup:
    """A group that cannot be aborted."""

    def abort(self):
        raise RuntimeError("cannot abort")


class RecordingGroup:
    def abort(self):
        print("aborted the other group")


def raise_with_a_broken_group(ctx):
    ctx.closing(RecordingGroup())
    ctx.closing(BrokenGroup())
    raise ValueError("the cause")


@pytest.mark.parametrize("kind", ["ranks", "threads"])
def test_a_group_that_cannot_be_aborted_does_not_hide_the_cause(request, kind, capfd):
    error = failing(request.getfixturevalue(kind), raise_with_a_broken_group, 2, timeout=10)
    for rank in range(2):
        text = error.failures[rank]
        assert text.index("ValueError: the cause") < text.index("RuntimeError: cannot abort")
    printed = "".join(error.outputs.values()) + capfd.readouterr().out
    assert printed.count("aborted the other group") == 2


def fail_late(ctx):
    """Fail first, but report last: this rank waits for the other one while cleaning up."""
    if ctx.rank == 0:
        ctx.store.wait(["cause"])
        ctx.store.set("effect", "")
        raise ValueError("the effect")
    ctx.closing(SlowToAbort(ctx.store))
    raise ValueError("the cause")


class SlowToAbort:
    def __init__(self, store):
        self.store = store

    def abort(self):
        self.store.set("cause", "")
        self.store.wait(["effect"])


def test_the_first_failure_is_shown_first(ranks, threads):
    for runner in (ranks, threads):
        text = str(failing(runner, fail_late))
        assert text.index("the cause") < text.index("the effect")


def raise_chained(ctx):
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise RuntimeError("effect") from error


def test_chained_exceptions_are_shown(ranks):
    text = str(failing(ranks, raise_chained, 1))
    assert text.index("KeyError: 'cause'") < text.index("RuntimeError: effect")


def test_failed_ranks_are_replaced_and_others_are_kept(ranks):
    before = ranks.run(report_pid, 3)
    failing(ranks, raise_own, 3, linger=5)
    after = ranks.run(report_pid, 3)
    assert after[0] == before[0]
    assert not set(after[1:]) & set(before)


# -- processes that exit ---------------------------------------------------------------------


def leave_by_exit(ctx):
    sys.exit(3)


def leave_at_once(ctx):
    os._exit(3)


def leave_by_signal(ctx):
    os.kill(os.getpid(), signal.SIGKILL)


def crash(ctx):
    ctypes.string_at(0)


def test_sys_exit_is_a_failure_of_the_body(ranks):
    assert "SystemExit: 3" in str(failing(ranks, leave_by_exit, 1))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (leave_at_once, "rank 0 died: exit code 3"),
        (leave_by_signal, "rank 0 died: SIGKILL"),
        (crash, r"(?s)rank 0 died: SIGSEGV\n.*test_failures.py.* in crash"),
    ],
)
def test_exit_codes_and_signals_of_dead_ranks_are_reported(ranks, body, told):
    assert re.search(told, str(failing(ranks, body, 1)))


def test_an_expected_death_is_returned_as_a_result(ranks):
    assert ranks.run(leave_at_once, 1, expect_dead={0}) == [Died(3)]
    (died,) = ranks.run(leave_by_signal, 1, expect_dead={0})
    assert died.signal == signal.SIGKILL


def test_a_missing_expected_death_fails_the_run(ranks):
    assert "expected to die" in str(failing(ranks, report_pid, 2, expect_dead={1}))


# -- ranks that do not finish ----------------------------------------------------------------


def hang_in_python(ctx):
    threading.Event().wait()


def hang_in_sleep(ctx):
    time.sleep(1000)


def hang_in_store(ctx):
    ctx.store.wait(["never set"], timedelta(seconds=60))  # longer than the run may take


def hang_with_the_interpreter(ctx):
    re.match(r"(a+)+$", "a" * 64 + "b")


def hang_stopped(ctx):
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    "body", [hang_in_python, hang_in_sleep, hang_in_store, hang_with_the_interpreter]
)
def test_a_hung_rank_is_dumped_and_replaced(ranks, body):
    ranks.run(report_pid, 2)  # so that no rank has to be started first
    start = time.monotonic()
    text = str(failing(ranks, body, 2, timeout=0.5))
    assert time.monotonic() - start < 5
    assert re.search(r"did not finish in \d\.\d s", text)  # a busy machine looks later
    assert f"in {body.__name__}" in text
    assert ranks.run(report_pid, 2)


def test_a_stopped_rank_is_distinguished_from_a_hung_one(ranks):
    assert "stopped by a signal" in str(failing(ranks, hang_stopped, 1, timeout=0.5))


def fail_and_hang(ctx):
    if ctx.rank == 1:
        raise ValueError("the cause")
    hang_in_store(ctx)


def test_after_a_failure_the_others_are_waited_for_until_linger(ranks):
    start = time.monotonic()
    text = str(failing(ranks, fail_and_hang, 3, timeout=60, linger=0.2))
    assert time.monotonic() - start < 10
    assert text.startswith("3 of 3 ranks failed")
    assert "ValueError: the cause" in text
    assert "in hang_in_store" in text


# -- output ----------------------------------------------------------------------------------


def print_and_fail(ctx):
    print("to stdout")
    os.write(2, b"to stderr\n")
    assert ctx.rank == 0


def test_output_is_shown_with_a_failure(ranks):
    error = failing(ranks, print_and_fail, 2)
    assert str(error).endswith("ranks 0, 1 printed\nto stdout\nto stderr")
    assert error.outputs[1] == "to stdout\nto stderr\n"


def print_and_die(ctx):
    print("x" * 100_000, "last words", sep="\n", end="")
    os.kill(os.getpid(), signal.SIGKILL)


def test_long_output_is_truncated_to_its_end(ranks):
    text = str(failing(ranks, print_and_die, 1))
    assert "bytes omitted" in text
    assert text.endswith("last words")
    assert len(text) < 20_000


def test_output_of_an_earlier_run_is_not_shown(ranks):
    failing(ranks, print_and_fail, 2)
    assert "to stdout" not in str(failing(ranks, compare, 2))
