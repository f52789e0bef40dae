import signal
from dataclasses import replace

import pytest

from phalanx.launch import Outcome, RankExit

from .internals import describe

LOST = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "phalanx.errors.PeerLost: rank 1 is dead",
    "  rank 1: dead",
)
FIRST = RankExit(rank=1, code=-9, at=1.0)


def followers(*exits):
    """Return the lines about ranks that failed after the first."""
    return describe(Outcome(exits=[FIRST, *exits])).splitlines()[1:]


def test_a_later_failure_is_quoted_by_its_exception():
    failed = RankExit(rank=0, code=1, at=1.5, final_output=LOST)
    assert followers(failed) == [
        "rank 0 failed 0.50 s later: exit code 1: phalanx.errors.PeerLost: rank 1 is dead"
    ]


def test_a_later_failure_is_quoted_by_the_first_line_of_its_error():
    words = ("Traceback (most recent call last):", *LOST[1:], "This is bucket 1 of 1.")
    failed = RankExit(rank=0, code=1, at=1.5, final_output=words)
    assert followers(failed)[0].endswith("exit code 1: phalanx.errors.PeerLost: rank 1 is dead")


def test_later_failures_with_the_same_error_are_grouped():
    said = "PeerLost: (group 'dp', rank {}): rank 1 is dead"

    def end(rank, at, said=said):
        words = (*LOST[:2], said.format(rank))
        return RankExit(rank=rank, code=1, at=at, final_output=words)

    assert followers(end(3, 1.5), end(0, 1.75), end(2, 2.0), end(4, 3.0, "ValueError: no")) == [
        f"ranks 0, 2, 3 failed 0.50 to 1.00 s later: exit code 1: {said.format(3)}",
        "rank 4 failed 2.00 s later: exit code 1: ValueError: no",
    ]


def test_an_error_raised_while_being_stopped_is_quoted():
    stopped = RankExit(rank=0, code=-15, at=3.0, was_terminated=True, final_output=LOST)
    silent = RankExit(rank=2, code=-15, at=3.0, was_terminated=True, final_output=["a warning"])
    assert followers(stopped, silent) == [
        "rank 0 raised phalanx.errors.PeerLost: rank 1 is dead while it was being stopped",
        "rank 2 stopped",
    ]


def test_many_later_failures_are_summarized():
    crowd = [RankExit(rank=rank, code=1, at=2.0, final_output=LOST) for rank in range(2, 102)]
    (said,) = followers(*crowd)
    assert said.startswith("ranks 2-101 failed 1.00 s later: exit")
    said = followers(*(replace(each, code=each.rank) for each in crowd))
    assert len(said) == 9
    assert said[-1] == "92 more ranks failed"


def test_a_long_list_of_ranks_is_cut():
    odd = [RankExit(rank=rank, code=-15, at=2.0, was_terminated=True) for rank in range(1, 4000, 2)]
    assert followers(*odd) == [
        "ranks 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31,... (2,000 ranks) stopped"
    ]
    assert followers(*odd[:16]) == ["ranks 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31 stopped"]


def test_a_later_failure_without_output_has_no_quote():
    assert followers(RankExit(rank=0, code=3, at=1.25)) == [
        "rank 0 failed 0.25 s later: exit code 3"
    ]


@pytest.mark.parametrize(
    ("number", "hint"),
    [(signal.SIGSEGV, "PYTHONFAULTHANDLER"), (signal.SIGABRT, "C++ code"), (signal.SIGUSR1, "")],
)
def test_death_by_signal_has_a_hint_and_exit_code_128_plus_n(number, hint):
    outcome = Outcome(exits=[RankExit(rank=0, code=-number, at=1.0)])
    assert outcome.exit_code == 128 + number
    assert describe(outcome).startswith(f"rank 0 failed first: {number.name}")
    assert hint in describe(outcome)


def test_a_signal_before_any_rank_succeeded_is_the_exit_code():
    """An elastic run may get one while it waits to start ranks again."""
    assert Outcome(exits=[], signal=signal.SIGTERM).exit_code == 143


def test_the_exit_code_is_that_of_the_first_failure():
    late = RankExit(rank=0, code=1, at=2.0)
    assert Outcome(exits=[FIRST, late]).exit_code == 137
    assert Outcome(exits=[late], signal=15).exit_code == 1


def test_a_rank_that_exited_with_0_too_early_is_the_first_failure():
    """The job fails with exit code 1, which was not that of the rank."""
    reason = "it exited with 0 and the others have more steps to do"
    early = RankExit(rank=0, code=0, at=1.0, reason=reason)
    left = RankExit(rank=1, code=75, at=2.0, was_terminated=True)
    outcome = Outcome(exits=[early, left])
    assert outcome.first_failure is early
    assert (outcome.exit_code, outcome.preempted) == (1, False)
    assert describe(outcome).splitlines() == [
        f"rank 0 failed first: {reason}",
        "rank 1 stopped on request",
    ]
    late = replace(early, at=3.0)
    assert followers(late) == [f"rank 0 failed 2.00 s later: {reason}"]


def test_the_exit_code_shows_a_signal_unless_all_ranks_succeeded():
    stopped = RankExit(rank=0, code=-15, at=1.0, was_terminated=True)
    well = RankExit(rank=0, code=0, at=1.0, was_terminated=True)
    assert Outcome(exits=[stopped], signal=15).exit_code == 143
    assert Outcome(exits=[well], signal=15).exit_code == 0


def test_preempted_ranks_have_not_failed():
    words = ("100%", "stopped on request after saving step 7 (SIGTERM)", "a warning")
    left = [
        RankExit(rank=0, code=75, at=1.0, final_output=words),
        RankExit(rank=1, code=75, at=1.1),
    ]
    for number in (None, 15):
        outcome = Outcome(exits=left, signal=number)
        assert outcome.preempted
        assert outcome.first_failure is None
        assert outcome.exit_code == 75
        assert describe(outcome) == "stopped on request after saving step 7 (SIGTERM)"
    assert describe(Outcome(exits=left[1:])) == "stopped on request"


def test_a_run_that_was_stopped_while_it_started_over_was_preempted():
    killed = RankExit(rank=0, code=-9, at=1.0, was_terminated=True)
    for exits in ([], [killed]):
        outcome = Outcome(exits=exits, signal=15, was_starting_over=True)
        assert (outcome.preempted, outcome.exit_code) == (True, 75)
        assert describe(outcome) == (
            "stopped on request while restarting; "
            "the run continues from its newest checkpoint, or from step 0"
        )
    failed = replace(killed, code=3, was_terminated=False)
    outcome = Outcome(exits=[failed], signal=15, was_starting_over=True)
    assert (outcome.preempted, outcome.exit_code) == (False, 3)


def test_a_preempted_rank_does_not_hide_a_failure():
    left = RankExit(rank=0, code=75, at=1.0)
    failed = RankExit(rank=1, code=3, at=2.0)
    killed = RankExit(rank=1, code=-9, at=2.0, was_terminated=True)
    assert not left.failed
    assert Outcome(exits=[left, failed]).first_failure is failed
    assert describe(Outcome(exits=[left, failed])).splitlines()[1:] == ["rank 0 stopped on request"]
    assert Outcome(exits=[left, killed]).first_failure is left
    assert Outcome(exits=[left, killed]).exit_code == 75
    told = RankExit(rank=0, code=75, at=1.0, was_terminated=True)
    assert Outcome(exits=[told, killed], signal=15).exit_code == 143
