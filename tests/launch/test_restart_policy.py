"""Decisions of elastic runs, with a clock that the tests set."""

import signal

import pytest

from phalanx.launch import Outcome, RankExit

from .internals import RecordedExit, ReplaceLost, RunInfo, WorkerMessage

KILLED = -signal.SIGKILL


class Attempt:
    """Records what a policy does."""

    def __init__(self, *, has_memory=True):
        self.has_memory = has_memory
        self.started, self.messages, self.sent = [], [], []
        self.cause = None
        self.end = ""
        self.standbys = 0

    def prepare_standby(self):
        self.standbys += 1

    def start_rank(self, rank, *, incarnation):
        if not self.has_memory:
            raise OSError("no memory")
        self.started.append(f"{rank}.{incarnation}")

    def send(self, rank, number):
        self.sent.append((rank, number))

    def find_pid(self, rank):
        return 1000 + rank

    def show(self, message):
        self.messages.append(message)

    def fail(self, cause, message):
        self.cause, self.end = cause.result, "failed"
        self.messages.append(message)
        self.policy.stop(is_preemption=False)

    def finish(self):
        self.end = "finished"
        self.policy.stop(is_preemption=False)

    def kill(self):
        self.end = "killed"
        self.policy.stop(is_preemption=False)


class Run:
    """An elastic run without processes."""

    def __init__(
        self,
        ranks,
        *,
        min_ranks=1,
        max_restarts=None,
        members=True,
        standby=False,
        attempt=None,
    ):
        info = RunInfo(
            id="train-0000", script="train.py", min_ranks=min_ranks, pid=1, pid_since=2, started=3.0
        )
        self.policy = ReplaceLost(
            ranks,
            run=info,
            max_restarts=max_restarts,
            grace=30.0,
            quorum_timeout=60.0,
            keeps_standby=standby,
        )
        self.now = 100.0
        self.begin(attempt)
        for rank in range(ranks if members else 0):
            self.join(rank)

    def begin(self, attempt=None):
        self.attempt = attempt or Attempt()
        self.attempt.policy = self.policy
        self.policy.begin(self.attempt, self.now)

    def ready(self, rank, max_members=8):
        message = WorkerMessage(event="ready", max_members=max_members)
        self.policy.on_message(rank, message, self.now)

    def tell(self, rank, event):
        self.policy.on_message(rank, WorkerMessage(event=event), self.now)

    def join(self, rank, step=0):
        self.ready(rank)
        self.policy.on_message(rank, WorkerMessage(event="member", step=step), self.now)

    def lead(self, rank):
        self.policy.on_message(rank, WorkerMessage(event="progress", step=1, leader=True), self.now)

    def exit(self, rank, code=KILLED, *, ended=False, terminated=False):
        result = RankExit(rank=rank, code=code, at=self.now, was_terminated=terminated)
        return self.policy.on_exit(RecordedExit(result, None), self.now, is_orderly=ended)

    def finish(self, rank):
        self.tell(rank, "finished")
        return self.exit(rank, 0, ended=True)

    def pass_time(self, seconds):
        self.now += seconds
        self.policy.on_time(self.now)

    def scale(self, ranks):
        return self.policy.answer({"command": "scale", "ranks": ranks}, self.now)

    @property
    def status(self):
        return self.policy.answer({"command": "status"}, self.now)

    @property
    def states(self):
        return {each["worker"]: each["state"] for each in self.status["workers"]}


def test_a_lost_rank_is_replaced_at_once():
    run = Run(3, max_restarts=100)
    assert run.exit(2) is True
    assert run.attempt.messages[-1] == (
        "rank 2 lost: killed by SIGKILL; starting a replacement (1 of 100)"
    )
    assert run.states["2.1"] == "waiting to restart"
    assert run.policy.next_due() == run.now
    run.pass_time(0)
    assert run.attempt.started == ["0.0", "1.0", "2.0", "2.1"]
    assert run.states["2.1"] == "starting"
    run.join(2)
    assert run.states["2.1"] == "member"
    assert run.policy.next_due() is None


@pytest.mark.parametrize(
    ("code", "ended", "survived"),
    [(0, True, False), (0, False, True), (1, True, False), (1, False, True)],
)
def test_only_a_death_without_an_orderly_end_is_survived(code, ended, survived):
    run = Run(2)
    assert run.exit(1, code, ended=ended) is survived
    assert run.policy.is_waiting is survived


def test_the_backoff_doubles_until_a_replacement_becomes_a_member():
    run = Run(2)
    delays = []
    for _ in range(3):
        run.exit(1)
        delays.append(run.policy.next_due() - run.now)
        run.pass_time(delays[-1])
    assert delays == pytest.approx([0.0, 0.1, 0.2])
    run.join(1)
    run.exit(1)
    assert run.policy.next_due() == run.now


def test_the_third_loss_in_a_row_before_membership_fails_the_run():
    run = Run(2)
    for code in (KILLED, 7, 8, 9):
        assert run.attempt.end == ""
        run.exit(1, code)
        run.pass_time(1)
    assert run.attempt.end == "failed"
    assert run.attempt.cause.code == 7, "the first that was no member"
    assert "3 times in a row" in run.attempt.messages[-1]


def test_without_restarts_the_run_goes_on_with_the_minimum():
    run = Run(4, min_ranks=2, max_restarts=1)
    run.exit(3)
    run.pass_time(0)
    run.join(3)
    run.exit(2, 5)
    assert run.attempt.messages[-1] == "rank 2 lost: exit code 5; not replaced: no restarts left"
    run.exit(1)
    assert run.attempt.end == ""
    assert not run.policy.is_waiting
    run.exit(0)
    assert run.attempt.end == "failed"
    assert (run.attempt.cause.rank, run.attempt.cause.code) == (2, 5), "rank 3 was replaced"


def test_a_run_without_members_starts_over_with_its_current_size():
    run = Run(4)
    run.scale(3)
    run.finish(3)
    for rank in range(3):
        run.exit(rank)
        run.pass_time(0)  # replacements have started, and know nothing
    assert run.attempt.end == "killed"
    assert (
        run.attempt.messages[-1]
        == "all ranks lost; restarting all from the newest checkpoint, or from step 0"
    )
    assert run.policy.wants_restart(Outcome(exits=[]))
    assert run.policy.restarts == 1, "unused replacements do not count"
    run.begin()
    assert run.attempt.started == ["0.2", "1.2", "2.1"], "names are unique in the run"
    assert not run.policy.wants_restart(Outcome(exits=[]))


def test_ranks_that_cannot_be_started_again_are_started_later():
    """All ranks were lost, and maybe the machine has no memory."""
    run = Run(2)
    run.exit(0)
    run.exit(1)
    run.begin(Attempt(has_memory=False))
    assert run.policy.is_waiting
    assert run.attempt.messages == [
        f"could not start rank {rank}: no memory; trying again in 10 s" for rank in range(2)
    ]
    run.attempt.has_memory = True
    run.pass_time(10)
    assert run.attempt.started == ["0.2", "1.1"]


def test_a_run_whose_ranks_cannot_be_started_at_first_fails():
    with pytest.raises(OSError, match="no memory"):
        Run(2, attempt=Attempt(has_memory=False))


@pytest.mark.parametrize("has_begun", [True, False])
def test_ranks_that_end_while_a_stopped_run_starts_over_have_nothing_to_save(has_begun):
    run = Run(2, members=has_begun)
    run.exit(0)
    run.exit(1)
    run.begin()
    assert run.policy.is_starting_over is has_begun
    run.policy.stop(is_preemption=True)
    assert run.exit(0) is has_begun
    assert run.exit(1, 143, terminated=True, ended=True) is has_begun
    assert run.policy.is_starting_over is has_begun


def test_an_exception_while_a_run_starts_over_is_recorded():
    run = Run(2)
    run.exit(0)
    run.exit(1)
    run.begin()
    run.policy.stop(is_preemption=True)
    assert run.exit(0, 1, ended=True) is False


@pytest.mark.parametrize(("code", "ended"), [(1, True), (KILLED, True), (9, False)])
def test_a_worker_that_has_failed_is_not_replaced(code, ended):
    run = Run(2)
    run.tell(1, "failed")
    assert run.exit(1, code, ended=ended) is False
    assert not run.policy.is_waiting


def test_ranks_that_die_before_the_group_is_formed_are_replaced_one_by_one():
    run = Run(2, members=False)
    run.exit(0)
    run.pass_time(0)
    run.exit(1)
    run.pass_time(0)
    assert run.attempt.started == ["0.0", "1.0", "0.1", "1.1"]
    assert run.attempt.end == ""


def test_a_run_that_cannot_start_over_fails_with_the_first_loss():
    run = Run(2, max_restarts=0)
    run.exit(1, 5)
    run.exit(0, 6)
    assert (run.attempt.end, run.attempt.cause.code) == ("failed", 5)


def test_losing_all_ranks_takes_one_restart():
    run = Run(3, max_restarts=1)
    for rank in range(3):
        run.exit(rank)
    assert (run.attempt.end, run.policy.restarts) == ("killed", 1)


def test_the_run_has_finished_when_its_leader_has_and_the_others_are_lost():
    run = Run(2)
    run.lead(0)
    assert run.finish(0) is False
    assert run.exit(1) is True
    assert (run.attempt.end, run.policy.restarts) == ("finished", 0)
    assert "not replaced: the run has finished" in run.attempt.messages[-1]


@pytest.mark.parametrize("first", ["the others", "the leader"])
def test_a_run_whose_leader_is_lost_after_the_last_step_starts_over(first):
    run = Run(3)
    run.lead(0)
    for rank in (1, 2, 0) if first == "the others" else (0, 1, 2):
        run.exit(rank, 0 if rank else KILLED)
    assert (run.attempt.end, run.policy.restarts) == ("killed", 1)
    assert run.policy.wants_restart(Outcome(exits=[]))


def test_a_run_without_restarts_fails_if_its_leader_is_lost_after_the_last_step():
    run = Run(2, max_restarts=0)
    run.lead(0)
    run.finish(1)
    run.exit(0)
    assert (run.attempt.end, run.attempt.cause.rank) == ("failed", 0)


def test_the_run_has_succeeded_when_the_last_member_has():
    run = Run(3)
    run.lead(0)
    run.exit(2)
    run.pass_time(0)
    run.finish(0)
    assert run.attempt.end == ""
    assert run.finish(1) is False
    assert run.attempt.end == "finished"
    assert run.exit(2, -signal.SIGTERM) is True


def test_too_few_members_for_too_long_start_over():
    run = Run(3, min_ranks=3)
    run.exit(2)
    run.pass_time(0)
    run.pass_time(59)
    assert run.attempt.end == ""
    assert run.policy.next_due() == run.now + 1
    run.pass_time(1)
    assert run.attempt.end == "killed"
    assert run.attempt.messages[-1] == (
        "fewer than 3 members for 60 s; restarting all from the newest checkpoint, or from step 0"
    )
    assert run.policy.next_due() is None


def test_a_slow_start_or_a_member_in_time_does_not_start_over():
    run = Run(2, min_ranks=2, members=False)
    run.pass_time(500)
    for rank in range(2):
        run.join(rank)
    run.exit(1)
    run.pass_time(0)
    run.pass_time(999)
    assert run.attempt.end == "", "the program takes that long to start"
    run.join(1)
    assert run.policy.next_due() is None


def test_finished_ranks_are_not_missing_members():
    run = Run(2, min_ranks=2)
    run.finish(0)
    assert run.policy.next_due() is None


def test_a_rank_that_exits_while_the_others_need_it_fails_the_run():
    """Ranks that disagree on the last step would wait for one another."""
    run = Run(2, min_ranks=2)
    run.lead(1)
    run.tell(1, "short")  # before its exit is known
    run.finish(0)
    assert run.attempt.end == ""  # the other may be about to finish, too
    run.tell(1, "short")
    assert run.attempt.end == "failed"
    assert (run.attempt.cause.rank, run.attempt.cause.code) == (0, 0)
    assert run.attempt.cause.failed
    assert run.attempt.cause.reason == "it exited with 0 and the others have more steps to do"
    message = "rank 0 exited with 0 and the others have more steps to do; fewer than 2 ranks left"
    assert run.attempt.messages[-1] == message


def test_members_that_wait_for_a_replacement_are_given_time():
    run = Run(3, min_ranks=2)
    run.finish(0)  # too early, and not missed
    run.exit(1)
    run.pass_time(0)
    run.tell(2, "short")
    run.pass_time(59)
    run.join(1)
    run.pass_time(2)
    assert run.attempt.end == ""


def test_members_whose_replacement_does_not_come_start_over():
    run = Run(3, min_ranks=2)
    run.finish(0)
    run.exit(1)
    run.pass_time(0)
    run.tell(2, "short")
    run.pass_time(60)
    assert run.attempt.end == "killed"


def test_a_rank_that_leaves_after_another_has_ended_is_replaced():
    """As one that is killed there is."""
    run = Run(3, min_ranks=2)
    run.finish(0)
    run.tell(2, "leaving")
    run.pass_time(2)
    assert run.attempt.started == ["0.0", "1.0", "2.0"]
    run.tell(1, "short")
    run.pass_time(2)
    assert (run.attempt.end, run.attempt.started[-1]) == ("", "0.1")
    run.ready(0)
    run.exit(0, 0, ended=True)  # it cannot join
    run.tell(1, "short")
    assert run.attempt.end == "failed"


def wait_short(run, rank, seconds):
    """Let a member report each second that it waits for others, until the attempt ends."""
    for _ in range(seconds):
        if not run.attempt.end:
            run.tell(rank, "short")
            run.pass_time(1)


def test_a_replacement_that_hangs_while_members_wait_is_killed():
    """Without restarts left, its loss ends the run."""
    run = Run(2, min_ranks=2, max_restarts=1)
    run.tell(1, "leaving")
    run.pass_time(1)
    assert run.attempt.started[-1] == "2.0"
    wait_short(run, 0, 62)
    assert run.attempt.sent == [(2, signal.SIGKILL)]
    run.exit(2)
    assert (run.attempt.end, run.attempt.cause.rank) == ("failed", 2)


def test_a_replacement_that_ends_while_members_wait_fails_the_run():
    run = Run(2, min_ranks=2, max_restarts=1)
    run.tell(1, "leaving")
    run.pass_time(1)
    run.ready(2)
    run.exit(2, 0, ended=True)
    wait_short(run, 0, 62)
    assert run.attempt.end == "failed"
    assert run.attempt.messages[-1] == "fewer than 2 members for 60 s"
    assert run.attempt.cause.reason == "it exited with 0; fewer than 2 members for 60 s"


def test_members_that_never_were_enough_start_over():
    """A rank that dies in the first transfer of the state was no member yet."""
    run = Run(3, min_ranks=3, members=False)
    run.join(0)
    run.join(1)
    run.ready(2)
    run.exit(2)
    run.pass_time(0)
    wait_short(run, 0, 62)
    assert run.attempt.end == "killed"


def test_a_run_that_goes_on_without_its_first_leader_has_not_finished():
    run = Run(2)
    run.lead(0)
    run.finish(0)
    run.lead(1)
    run.exit(1)
    assert run.attempt.end == "killed"  # to start over


def test_a_rank_that_cannot_be_started_is_tried_again(monkeypatch):
    run = Run(2)

    def refuse(rank, *, incarnation):
        raise BlockingIOError("no more processes")

    run.exit(1)
    with monkeypatch.context() as patch:
        patch.setattr(run.attempt, "start_rank", refuse)
        run.pass_time(0)
    assert "could not start rank 1: no more processes" in run.attempt.messages[-1]
    run.pass_time(10)
    assert run.attempt.started[-1] == "1.1"


def test_nothing_is_replaced_while_the_run_is_stopped():
    run = Run(3)
    run.exit(2)
    run.policy.stop(is_preemption=False)
    assert not run.policy.is_waiting
    assert run.exit(1) is False
    run.pass_time(100)
    assert run.attempt.started == ["0.0", "1.0", "2.0"]
    assert run.scale(5) == {"error": "the run is being stopped"}


def test_preempted_members_do_not_depend_on_the_others():
    run = Run(3)
    run.exit(2)
    run.pass_time(0)
    run.policy.stop(is_preemption=True)
    assert run.exit(2, -signal.SIGTERM, terminated=True) is True, "it had nothing to save"
    assert run.exit(1) is True, "it was lost just before"
    assert run.exit(0, 75, terminated=True) is False


def test_scaling_starts_the_lowest_free_ranks_and_asks_the_highest_to_leave():
    run = Run(3)
    assert run.scale(2) == {
        "ok": True,
        "ranks": 2,
        "started": [],
        "leaving": [2],
        "max_members": 8,
    }
    assert run.attempt.sent == [(2, signal.SIGTERM)]
    assert run.states["2.0"] == "leaving"
    assert run.scale(4)["started"] == [3, 4], "rank 2 is still there"
    run.pass_time(0)
    assert run.exit(2, -signal.SIGTERM) is True, "it was asked to leave"
    assert run.scale(5)["started"] == [2]
    run.pass_time(0)
    assert run.attempt.started[3:] == ["3.0", "4.0", "2.1"]
    assert run.status["ranks"] == 5


def test_a_rank_that_does_not_leave_is_killed():
    run = Run(2)
    run.scale(1)
    run.pass_time(29)
    assert run.attempt.sent == [(1, signal.SIGTERM)]
    run.pass_time(1)
    assert run.attempt.sent[1:] == [(1, signal.SIGKILL)]
    assert run.policy.next_due() is None
    assert run.exit(1) is True
    assert run.attempt.end == ""


def test_scaling_down_cancels_a_replacement():
    run = Run(2)
    run.exit(1)
    run.scale(1)
    assert not run.policy.is_waiting
    run.exit(0)
    assert run.policy.wants_restart(Outcome(exits=[]))
    run.begin()
    assert run.attempt.started == ["0.1"]


def test_the_loss_of_a_rank_that_is_not_wanted_any_more_is_no_cause():
    run = Run(2, max_restarts=1)
    run.exit(1, 5)
    run.scale(1)
    assert run.policy.restarts == 0, "it was not started"
    run.exit(0, 6)
    assert run.attempt.end == "killed"
    run.begin()
    run.exit(0, 7)
    assert (run.attempt.end, run.attempt.cause.code) == ("failed", 6)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, "needs at least 2"), (0, "at least 1"), (-3, "at least 1"), ("3", "at least 1"),
     (None, "at least 1"), (True, "at least 1")],
)  # fmt: skip
def test_an_invalid_size_is_rejected(ranks, words):
    run = Run(3, min_ranks=2)
    assert words in run.scale(ranks)["error"]
    assert run.status["ranks"] == 3


def test_status_describes_the_run():
    run = Run(2, min_ranks=2, max_restarts=9)
    run.policy.on_message(0, WorkerMessage(event="progress", step=13, leader=True), run.now)
    run.policy.on_message(1, WorkerMessage(event="progress", step=99), run.now)
    run.policy.on_message(1, WorkerMessage(event="unknown"), run.now)
    assert run.status == {
        "id": "train-0000",
        "script": "train.py",
        "pid": 1,
        "started": 3.0,
        "min_ranks": 2,
        "ranks": 2,
        "step": 13,
        "members": 2,
        "restarts": 0,
        "workers": [
            {"rank": 0, "worker": "0.0", "pid": 1000, "state": "member"},
            {"rank": 1, "worker": "1.0", "pid": 1001, "state": "member"},
        ],
    }
    assert "unknown command" in run.policy.answer({}, run.now)["error"]


def test_restarts_that_never_get_further_fail_the_run():
    run = Run(1)
    run.policy.on_message(0, WorkerMessage(event="progress", step=7, leader=True), run.now)
    starts = 1
    while True:
        run.exit(0)
        if run.attempt.end == "failed":
            break
        run.begin()
        run.join(0, step=5)
        starts += 1
    assert starts == 11  # the first, and ten that got no further
    assert "without a further step" in run.attempt.messages[-1]


def test_a_worker_that_left_has_not_finished_the_run():
    run = Run(2)
    run.lead(0)
    run.tell(0, "leaving")
    run.tell(0, "left")
    assert run.finish(0) is True
    run.lead(1)
    run.exit(1)
    assert (run.attempt.end, run.policy.restarts) == ("killed", 1), "it starts over"


def test_a_worker_that_is_told_to_leave_after_the_last_step_has_finished():
    run = Run(2)
    run.lead(0)
    run.tell(0, "leaving")
    assert run.finish(0) is False
    run.exit(1)
    assert run.attempt.end == "finished"


def test_a_worker_that_leaves_is_replaced_if_the_run_needs_it():
    run = Run(3, min_ranks=2)
    run.tell(2, "leaving")
    run.pass_time(10)
    assert run.attempt.started[3:] == []
    run.tell(1, "leaving")
    run.pass_time(10)
    assert run.attempt.started[3:] == ["3.0"]
    assert "the run needs 2 ranks; starting rank 3 in its place" in run.attempt.messages[-1]


def leave(run, rank, code=0):
    """A member is told to leave by others than the launcher, and does so."""
    run.tell(rank, "leaving")
    run.tell(rank, "left")
    run.exit(rank, code, ended=True)


def test_a_rank_that_left_on_sigterm_is_reported_and_not_expected_any_more():
    run = Run(3)
    run.tell(2, "leaving")
    run.tell(2, "left")
    assert run.status["ranks"] == 3
    run.exit(2, 0, ended=True)
    assert run.attempt.messages[-1] == "rank 2 left after SIGTERM"
    assert (run.status["members"], run.status["ranks"]) == (2, 2)
    run.exit(1)
    run.exit(0)
    run.begin()
    assert [each[0] for each in run.attempt.started] == ["0", "1"], "the current size"


def test_a_rank_that_left_before_it_had_joined_is_reported():
    run = Run(2)
    run.scale(3)
    run.pass_time(0)
    run.ready(2)
    leave(run, 2, 75)
    assert run.attempt.messages[-1] == "rank 2 left after SIGTERM before it had joined"
    assert run.status["ranks"] == 2


def test_a_rank_that_left_and_was_replaced_is_expected():
    run = Run(3, min_ranks=3)
    run.tell(2, "leaving")
    run.pass_time(1)
    run.join(3, step=7)
    leave(run, 2)
    assert run.attempt.messages[-2:] == ["rank 3 joined after step 7", "rank 2 left after SIGTERM"]
    assert run.status["ranks"] == 3


def test_ranks_that_leave_do_not_change_what_others_were_scaled_to():
    run = Run(4)
    run.tell(3, "leaving")
    assert run.scale(4)["started"] == [4]
    run.pass_time(0)
    run.tell(2, "leaving")
    leave(run, 3)
    assert run.status["ranks"] == 4, "rank 4 is one of them, and rank 2 may still be lost"
    leave(run, 2)
    assert run.status["ranks"] == 3
    run.scale(2)
    run.tell(4, "left")
    run.exit(4, 0, ended=True)
    assert run.status["ranks"] == 2


def test_the_minimum_is_expected_although_ranks_left():
    run = Run(2, min_ranks=2, max_restarts=0)
    leave(run, 1)
    assert run.status["ranks"] == 2


def test_ranks_that_have_finished_are_expected_after_others_left():
    run = Run(3)
    run.finish(0)
    leave(run, 1)
    assert run.status["ranks"] == 2


def test_ranks_that_join_a_run_are_reported():
    run = Run(2, members=False)
    run.join(0, step=5)
    run.join(1, step=5)
    assert "joined" not in "".join(run.attempt.messages), "they began the run"
    run.exit(1)
    run.pass_time(0)
    run.join(1, step=120)
    assert run.attempt.messages[-1] == "rank 1 joined after step 120"
    run.scale(3)
    run.pass_time(0)
    run.join(2, step=121)
    run.join(2, step=121)
    assert run.attempt.messages.count("rank 2 joined after step 121") == 1


@pytest.mark.parametrize("late", ["spare", "slow"])
def test_an_initial_rank_that_joins_later_is_reported(late):
    run = Run(3, members=False)
    run.join(0)
    run.join(1)
    if late == "spare":
        run.ready(2, max_members=2)
        run.exit(1)
    run.join(2, step=9)
    assert run.attempt.messages[-1] == "rank 2 joined after step 9"


def test_a_worker_that_leaves_below_the_minimum_without_restarts_is_killed_in_the_end():
    run = Run(2, min_ranks=2, max_restarts=0)
    run.tell(1, "leaving")
    assert run.attempt.messages[-1].endswith("no restarts left")
    run.pass_time(31)
    assert run.attempt.sent == [(1, signal.SIGKILL)]
    run.exit(1)
    assert (run.attempt.end, run.attempt.cause.rank) == ("failed", 1)


def test_an_exception_of_a_rank_that_was_asked_to_leave_fails_the_run():
    run = Run(2)
    run.scale(1)
    assert run.exit(1, 1, ended=True) is False


def test_spares_may_be_lost_as_often_as_members():
    run = Run(2, members=False)
    for rank in range(2):
        run.ready(rank, max_members=1)
    run.join(0)
    for _ in range(5):
        assert run.exit(1) is True
        run.pass_time(1)
        run.ready(1, max_members=1)
    assert run.attempt.end == ""
    assert run.attempt.started[-1] == "1.5"


def test_a_kill_after_the_interpreter_has_begun_to_end_is_a_loss():
    run = Run(2)
    assert run.exit(1, ended=True) is True
    assert "starting a replacement" in run.attempt.messages[-1]
    assert run.exit(0, -signal.SIGINT, ended=True) is False


def test_scaling_down_keeps_the_ranks_that_have_the_state():
    run = Run(2)
    run.exit(0)
    run.pass_time(0)
    assert run.scale(1)["leaving"] == [0]


def test_time_as_a_spare_is_not_time_to_start():
    run = Run(2, min_ranks=2, members=False)
    for rank in range(2):
        run.ready(rank)
    run.pass_time(5000)
    for rank in range(2):
        run.join(rank)
    run.exit(1)
    run.pass_time(61)
    assert run.attempt.end == "killed"


def test_a_rank_that_ends_before_the_first_step_is_missed():
    run = Run(2, min_ranks=2, members=False)
    run.exit(1, 0, ended=True)
    assert run.attempt.end == "", "all may end, after they have printed help"
    run.ready(0)
    assert (run.attempt.end, run.attempt.cause.rank) == ("failed", 1)
    assert run.attempt.cause.reason == "it ended before the first step"
    assert "ended before the first step; fewer than 2 ranks left" in run.attempt.messages[-1]


@pytest.mark.parametrize("saved", [False, True])
def test_a_preempted_run_may_lose_its_last_rank_after_it_was_saved(saved):
    run = Run(2)
    run.policy.stop(is_preemption=True)
    assert run.exit(0, 75, ended=True) is False, "another rank saves"
    if saved:
        run.tell(1, "saved")
    assert run.exit(1, terminated=True) is saved


def stop(run):
    """The launcher gets SIGTERM, and all ranks are told to leave."""
    run.policy.stop(is_preemption=True)
    for rank in range(len(run.status["workers"])):
        run.tell(rank, "leaving")


@pytest.mark.parametrize("last", ["a survivor", "the lost rank"])
def test_a_rank_that_is_lost_before_it_saved_fails_a_run_that_is_stopped(last):
    """Exit code 75 would mean that nothing is lost."""
    run = Run(2)
    stop(run)
    if last == "a survivor":
        assert run.exit(0, terminated=True) is True, "another may save"
        assert run.attempt.end == ""
        assert run.exit(1, 75, ended=True, terminated=True) is False
    else:
        assert run.exit(1, 75, ended=True, terminated=True) is False
        assert run.exit(0, terminated=True) is True, "it is recorded as the cause"
    assert run.attempt.end == "failed"
    assert (run.attempt.cause.rank, run.attempt.cause.code) == (0, KILLED)
    assert run.attempt.cause.failed
    assert (
        "stopped without saving: rank 0 was lost before it saved; a restart continues from the "
        "last checkpoint"
    ) in run.attempt.messages


def test_another_member_may_save_in_place_of_a_lost_one():
    run = Run(3)
    stop(run)
    run.exit(0, terminated=True)
    run.tell(1, "saved")
    assert run.exit(1, 75, ended=True, terminated=True) is False
    assert run.exit(2, terminated=True) is True, "after the run was saved"
    assert run.attempt.end == ""


def test_ranks_that_are_lost_before_one_saved_are_named():
    run = Run(3)
    stop(run)
    run.exit(1, terminated=True)
    run.exit(0, terminated=True)
    run.exit(2, 75, ended=True, terminated=True)
    assert run.attempt.cause.rank == 1, "the first"
    assert any("ranks 0, 1 were lost before they saved" in each for each in run.attempt.messages)


def test_ranks_that_the_launcher_kills_are_not_lost():
    """The time to save is over, or there was a second signal."""
    run = Run(2)
    stop(run)
    run.policy.stop(is_preemption=False)
    assert run.exit(1, terminated=True) is True
    assert run.exit(0, terminated=True) is False
    assert run.attempt.end == ""


def test_a_run_that_has_finished_while_it_was_stopped_has_nothing_to_save():
    run = Run(2)
    stop(run)
    run.exit(1, terminated=True)
    assert run.finish(0) is False
    assert run.attempt.end == ""


def test_scripts_that_handle_sigterm_themselves_save_themselves():
    run = Run(2)
    run.policy.stop(is_preemption=True)
    run.exit(0, terminated=True)
    assert run.exit(1, 75, ended=True, terminated=True) is False
    assert run.attempt.end == ""


def test_the_only_worker_that_leaves_before_the_first_step_ends_the_run():
    run = Run(1, max_restarts=0, members=False)
    run.ready(0)
    run.tell(0, "leaving")
    run.tell(0, "left")
    run.exit(0, 75, ended=True)
    assert (run.attempt.end, run.attempt.cause.code) == ("failed", 75)


def test_a_worker_that_left_does_not_delay_the_end():
    run = Run(2)
    run.lead(0)
    run.tell(1, "leaving")
    run.tell(1, "left")
    run.finish(0)
    assert run.attempt.end == "finished"


def test_a_leader_that_is_asked_to_leave_after_the_last_step_has_finished():
    run = Run(2)
    run.lead(1)
    run.scale(1)
    run.exit(0)
    run.pass_time(0)
    run.exit(1, 0, ended=True)
    assert run.attempt.end == "finished"


def test_a_run_whose_leader_is_killed_after_it_was_asked_to_leave_starts_over():
    run = Run(3)
    run.lead(2)
    run.scale(2)
    for rank in range(2):
        run.exit(rank, 0, ended=True)
    run.pass_time(31)
    assert run.attempt.sent[-1] == (2, signal.SIGKILL)
    run.exit(2)
    assert run.attempt.end == "killed"


def test_a_worker_that_is_killed_while_it_leaves_is_replaced_once():
    run = Run(2, min_ranks=2)
    run.tell(1, "leaving")
    run.exit(1)
    run.pass_time(5)
    assert run.attempt.started[2:] == ["2.0"]
    assert "another rank has taken its place" in run.attempt.messages[-1]


def test_a_replacement_that_hangs_does_not_keep_others_waiting():
    run = Run(2, min_ranks=2)
    run.tell(1, "leaving")
    run.pass_time(2)
    run.pass_time(61)
    assert run.attempt.end == "killed"


def test_the_only_member_is_not_replaced_if_it_leaves():
    run = Run(1)
    run.tell(0, "leaving")
    run.pass_time(5)
    assert run.attempt.started == ["0.0"]


def test_scaling_does_not_forget_that_the_leader_was_lost():
    run = Run(2)
    run.lead(0)
    run.exit(0)
    run.pass_time(0)
    run.scale(1)
    run.exit(1, 0, ended=True)
    assert run.attempt.end == "killed", "it starts over"


def test_ranks_without_a_micro_batch_are_reported_once():
    run = Run(4, members=False)
    for rank in range(4):
        run.ready(rank, max_members=2)
    (message,) = run.attempt.messages[1:]
    assert message == "micro_batches=2, so at most 2 ranks train; 2 hot spares will wait"
    run.scale(2)
    run.scale(1)
    assert sum("hot spare" in each for each in run.attempt.messages) == 1


def test_a_reply_tells_how_many_ranks_can_train():
    run = Run(2, members=False)
    assert run.scale(3)["max_members"] is None, "no worker has told"
    run.ready(0, max_members=2)
    assert run.scale(4)["max_members"] == 2
    run.begin()
    assert run.scale(5)["max_members"] == 2, "it was told in the attempt before"


def test_the_end_of_a_member_without_its_exit_handlers_is_a_loss():
    """Also with exit code 0, unless it has completed all steps."""
    run = Run(2, min_ranks=2)
    run.lead(0)
    assert run.exit(0, 0) is True
    assert run.states["0.1"] == "waiting to restart"
    run.tell(1, "finished")
    assert run.exit(1, 0) is False


def test_a_leader_that_ends_in_order_has_finished():
    """A script may stop early, and its own way."""
    run = Run(2)
    run.lead(0)
    run.exit(0, 0, ended=True)
    run.exit(1)
    assert run.attempt.end == "finished"


def test_more_steps_after_the_last_one():
    run = Run(2)
    run.tell(1, "finished")
    run.tell(1, "continuing")
    assert run.exit(1, 0) is True


def test_a_run_fails_even_if_the_launcher_ended_its_last_process():
    """As after restarts because of a replacement that hangs."""
    run = Run(1, max_restarts=0)
    run.tell(0, "leaving")
    run.tell(0, "left")
    run.exit(0, KILLED, terminated=True)
    assert (run.attempt.end, run.attempt.cause.failed) == ("failed", True)


def test_a_member_that_was_preempted_leaves_the_run_to_those_that_start():
    run = Run(2)
    run.exit(0)
    run.pass_time(0)
    run.tell(1, "leaving")
    assert run.exit(1, 75, ended=True) is True
    assert run.attempt.end == ""
    run.join(0)
    run.finish(0)
    assert run.attempt.end == "finished"


def test_a_replacement_that_was_a_member_is_counted_when_the_run_starts_over():
    run = Run(2)
    run.exit(1)
    run.pass_time(0)
    run.join(1)
    run.tell(1, "left")
    run.exit(0)
    assert (run.attempt.end, run.policy.restarts) == ("killed", 2)


def test_ranks_that_the_first_step_waits_for_are_named_and_then_killed():
    run = Run(3, min_ranks=3, members=False)
    run.ready(0)
    run.tell(1, "created")
    run.pass_time(61)
    assert run.attempt.messages[-1] == "ranks 1, 2 have not reached the first step after 61 s"
    for _ in range(8):
        run.pass_time(60)
    assert not run.attempt.sent
    run.pass_time(60)
    assert run.attempt.messages[-1] == "killing rank 2: it has not created an ElasticRun"
    assert run.attempt.sent == [(2, signal.SIGKILL)], "rank 1 may be reading its data"


def test_a_replacement_that_does_not_begin_is_named_and_then_killed():
    """A standby that has been stopped, for example."""
    run = Run(2)
    run.exit(1)
    run.pass_time(0)
    assert run.policy.next_due() == run.now + 60
    for number in range(1, 10):
        run.pass_time(60)
        message = f"rank 1 has not created an ElasticRun after {60 * number} s"
        assert run.attempt.messages[-1] == message
    assert not run.attempt.sent
    run.pass_time(60)
    run.pass_time(1)
    assert run.attempt.messages[-1] == "killing rank 1: it has not created an ElasticRun"
    assert run.attempt.sent == [(1, signal.SIGKILL)]


def test_a_replacement_may_take_as_long_as_the_others_took():
    """Twice as long, if that is more than ten minutes."""
    run = Run(2, members=False)
    run.pass_time(660)
    run.join(0)
    run.join(1)
    run.exit(1)
    run.pass_time(0)
    assert run.policy.next_due() == run.now + 660
    for _ in range(13):
        run.pass_time(100)
    assert not run.attempt.sent
    run.pass_time(20)
    assert run.attempt.sent == [(1, signal.SIGKILL)]


def test_replacements_that_hang_do_not_end_a_run_that_makes_steps():
    run = Run(2)
    run.exit(1)
    for number in range(1, 6):
        run.pass_time(1)
        run.pass_time(600)
        assert run.attempt.sent == [(1, signal.SIGKILL)] * number
        run.exit(1)
    assert run.attempt.end == ""


def test_a_rank_that_the_others_started_without_is_named_once_per_minute():
    run = Run(3, members=False)
    run.join(0)
    run.join(1)
    run.pass_time(150)
    before = list(run.attempt.messages)
    assert before[-1] == "rank 2 has not created an ElasticRun after 150 s"
    run.pass_time(1)
    assert run.attempt.messages == before
    assert run.policy.next_due() == run.now + 29


def test_a_replacement_that_reads_its_data_is_not_killed():
    run = Run(2)
    run.exit(1)
    run.pass_time(0)
    run.tell(1, "created")
    run.pass_time(1000)
    assert not run.attempt.sent


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_preempted_rank_is_replaced_if_the_others_are_too_few(restarts):
    run = Run(2, min_ranks=2, max_restarts=restarts)
    assert run.exit(1, 75, ended=True) is bool(restarts)
    assert run.policy.is_waiting is bool(restarts)


# -- a standby -----------------------------------------------------------------------------


def test_a_standby_is_prepared_when_no_rank_is_starting():
    run = Run(3, standby=True, members=False)
    run.join(0)
    run.join(1)
    assert run.attempt.standbys == 0, "rank 2 is starting"
    run.join(2)
    before = run.attempt.standbys
    assert before > 0
    run.exit(1)
    run.lead(0)
    assert run.attempt.standbys == before, "rank 1 is starting"
    run.join(1)
    assert run.attempt.standbys > before, "it may be the one that replaced rank 1"


def test_a_standby_is_prepared_after_a_rank_that_never_joined():
    run = Run(2, standby=True)
    run.scale(3)
    run.pass_time(0)
    before = run.attempt.standbys
    run.scale(2)
    run.exit(2)
    run.lead(0)
    assert run.attempt.standbys > before


def test_there_is_no_standby_without_restarts():
    run = Run(2, standby=True, max_restarts=1)
    before = run.attempt.standbys
    assert before > 0
    run.exit(1)
    run.join(1)
    assert run.attempt.standbys == before


@pytest.mark.parametrize("spare", [0, 2])
def test_hot_spares_are_not_waited_for(spare):
    """Whether they are ready before the members or after them."""
    run = Run(3, standby=True, members=False)
    for rank in range(3):
        run.ready(rank, max_members=2) if rank == spare else run.join(rank)
    assert run.attempt.standbys > 0


@pytest.mark.parametrize("when", [0, 2])
def test_there_is_no_standby_for_scripts_that_set_variables(when):
    run = Run(3, standby=True, members=False)
    for rank in range(3):
        changed = ("OMP_NUM_THREADS",) if rank == when else ()
        message = WorkerMessage(event="created", changed_variables=changed)
        run.policy.on_message(rank, message, run.now)
        run.join(rank)
    assert run.attempt.standbys == 0
    assert [each for each in run.attempt.messages if "no standby" in each] == [
        "no standby: the script sets OMP_NUM_THREADS, maybe before it imports torch"
    ]


def test_without_the_option_there_is_no_standby():
    assert Run(3).attempt.standbys == 0
