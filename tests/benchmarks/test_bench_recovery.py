"""Recovery times: what logs say about kills, and jobs that are killed, hang or end."""

import json
import os
import sys
from dataclasses import replace

import pytest
from benchmarks.machine import Machine
from benchmarks.page import replace_figures
from benchmarks.peers.commit_log import Commit, CommitLog, LogFollower, WorkerLog, to_ranges
from benchmarks.recovery import Plan, RecoveryResults, Run, main, render
from benchmarks.recovery_jobs import Failure, Process, System, start_job
from benchmarks.recovery_picture import make_curve
from benchmarks.recovery_times import (
    Kill,
    Recovery,
    SampleCount,
    count_samples,
    next_step,
    recovery,
    replacement,
    step_times,
)
from benchmarks.stats import percentile
from click.testing import CliRunner

S = 1_000_000_000
BATCH = 8


def commits(*rows, world=2):
    """Commits of (step, seconds) or (step, seconds, generation, world)."""
    return [
        Commit(step, round(seconds * S), *(rest or (0, world)), 1.0)
        for step, seconds, *rest in rows
    ]


def worker(slot, *rows, pid=None, started=0.0, attempt=0, ran=None, imported=None):
    return WorkerLog(
        slot,
        attempt,
        slot if pid is None else pid,
        round(started * S),
        imported=None if imported is None else round(imported * S),
        ran={step: [(*ids, 1)] for step, ids in (ran or {}).items()},
        commits=commits(*rows),
    )


KILL = Kill(slot=1, pid=1, time=round(2.5 * S))


# -- logs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([], []),
        ([7], [(7, 8, 1)]),
        ([3, 4, 5], [(3, 6, 1)]),
        ([1, 3, 5], [(1, 6, 2)]),
        ([0, 1, 8, 9], [(0, 2, 1), (8, 10, 1)]),
        ([5, 2], [(5, 6, 1), (2, 3, 1)]),
    ],
)
def test_sample_ids_are_written_as_ranges(ids, ranges):
    assert to_ranges(ids) == ranges
    assert [sample for each in ranges for sample in range(*each)] == ids


def test_a_log_is_read_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    log, follower = CommitLog.of_rank(tmp_path), LogFollower(tmp_path)
    log.imported()
    log.ran(1, [0, 1])
    log.ran(1, [4, 5])
    log.commit(1, generation=3, world=2, loss=0.5)
    (found,) = follower.read()
    assert (found.slot, found.attempt, found.pid) == (1, 2, os.getpid())
    assert found.imported >= found.started
    assert found.ran == {1: [(0, 2, 1), (4, 6, 1)]}
    assert found.commits[0].generation == 3
    log.ran(2, [8])
    log.abandon(2)
    log.end("digest")
    log.close()
    (found,) = follower.read()
    assert found.ran.keys() == {1}
    assert found.digest == "digest"


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path):
    path, follower = tmp_path / "0.0.7.log", LogFollower(tmp_path)
    path.write_text('["start", 1, 0, 0, 7]\n["commit", 1, 2, 0')
    assert follower.read()[0].commits == []
    with path.open("a") as file:
        file.write(", 2, 0.5]\n")
    assert follower.read()[0].commits == [Commit(1, 2, 0, 2, 0.5)]


def test_an_unknown_line_is_rejected():
    with pytest.raises(ValueError, match="no line"):
        WorkerLog(0, 0, 1, 0).add('["unknown"]')


# -- times -------------------------------------------------------------------------------------


def test_the_next_step_is_committed_by_a_group_without_the_victim():
    victim = worker(1, (1, 1), (2, 2))
    survivor = worker(0, (1, 1), (2, 2), (3, 2.6, 0, 2), (4, 2.9, 1, 1))
    assert next_step([survivor, victim], KILL).step == 4, "step 3 has the victim's gradients"
    found = recovery([survivor, victim], KILL)
    assert found == Recovery(pytest.approx(0.4), None, None)
    assert not found.is_complete


def test_steps_that_are_redone_are_not_the_next_step():
    before = [worker(slot, (1, 1), (2, 2)) for slot in (0, 1)]
    after = [
        worker(slot, (1, 7), (2, 8), (3, 9), pid=slot + 10, started=3, imported=5, attempt=1)
        for slot in (0, 1)
    ]
    assert next_step(before + after[:0], KILL) is None
    assert recovery(before + after, KILL) == Recovery(6.5, 4.5, 2.0)


def test_the_replacement_is_the_worker_in_the_place_of_the_victim():
    there = [worker(0, (1, 1)), worker(1, (1, 1))]
    other = worker(0, (5, 5), pid=8, started=3)
    silent = worker(1, pid=9, started=3)
    assert replacement([*there, other, silent], KILL) is None
    new = worker(1, (6, 6), pid=10, started=4)
    assert replacement([*there, other, silent, new], KILL) == (new, new.commits[0])


def test_steps_around_a_change_are_not_timed():
    log = worker(
        0, (1, 1), (2, 2), (3, 3), (4, 9, 1, 1), (5, 10, 1, 1), (6, 20, 2, 2), (7, 24, 2, 2)
    )
    assert step_times([log], 2, skip=0) == [1.0, 1.0, 4.0]
    assert step_times([log], 2, skip=1) == [1.0]
    assert step_times([], 2) == []


def test_percentiles_are_samples():
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([1.0, 2.0, 3.0], 99) == 3.0
    assert percentile([5.0], 50) == 5.0


# -- samples -----------------------------------------------------------------------------------


def halves(step, slot):
    begin = (step - 1) * BATCH + slot * BATCH // 2
    return begin, begin + BATCH // 2


def test_all_samples_are_used_once():
    logs = [
        worker(slot, (1, 1), (2, 2), (3, 3), ran={step: halves(step, slot) for step in (1, 2, 3)})
        for slot in (0, 1)
    ]
    assert count_samples(logs, BATCH, 2) == SampleCount(0, 0, 0)
    assert count_samples([], BATCH, 2) == SampleCount(0, 0, 0)


def test_a_survivor_runs_the_samples_of_the_victim():
    survivor = worker(0, (1, 1), (2, 3, 1, 1), (3, 4, 1, 1), ran={1: halves(1, 0), 2: (8, 16)})
    victim = worker(1, (1, 1), ran={1: halves(1, 1), 2: halves(2, 1)})
    assert count_samples([survivor, victim], BATCH, 2) == SampleCount(0, 0, 0)


def test_samples_of_a_victim_that_nobody_runs_are_lost():
    ran = {step: halves(step, 0) for step in (1, 2)}
    survivor = worker(0, (1, 1), (2, 3, 1, 1), (3, 4, 1, 1), ran=ran)
    victim = worker(1, (1, 1), ran={1: halves(1, 1), 2: halves(2, 1)})
    assert count_samples([survivor, victim], BATCH, 2) == SampleCount(0, BATCH // 2, 0)


def test_a_victim_may_have_contributed_without_logging_its_commit():
    ran = {step: halves(step, 0) for step in (1, 2)}
    survivor = worker(0, (1, 1), (2, 2, 0, 2), (3, 4, 1, 1), ran=ran)
    victim = worker(1, (1, 1), ran={1: halves(1, 1), 2: halves(2, 1)})
    assert count_samples([survivor, victim], BATCH, 2) == SampleCount(0, 0, 0)


def test_survivors_may_use_what_a_victim_had_published():
    """The step is committed by one worker, with the samples of two."""
    ran = {step: halves(step, 0) for step in (1, 2)}
    survivor = worker(0, (1, 1), (2, 2, 1, 1), (3, 4, 1, 1), ran=ran)
    victim = worker(1, (1, 1), ran={1: halves(1, 1), 2: halves(2, 1)})
    survivor.commits[1] = replace(survivor.commits[1], samples=BATCH)
    assert count_samples([survivor, victim], BATCH, 2) == SampleCount(0, 0, 0)


def test_steps_after_the_checkpoint_are_redone():
    ran = {step: ((step - 1) * BATCH, step * BATCH) for step in range(1, 6)}
    first = worker(0, (1, 1), (2, 2), (3, 3), ran=ran)
    again = worker(0, (2, 7), (3, 8), (4, 9), (5, 10), pid=5, started=4, attempt=1, ran=ran)
    assert count_samples([first, again], BATCH, 2) == SampleCount(2, 0, 0)


def test_samples_before_all_workers_are_there_are_not_lost_by_a_kill():
    first = worker(0, (1, 1, 0, 1), (2, 2), (3, 3), ran={n: halves(n, 0) for n in (1, 2, 3)})
    second = worker(1, (2, 2), (3, 3), ran={n: halves(n, 1) for n in (2, 3)})
    assert count_samples([first, second], BATCH, 2) == SampleCount(0, 0, 0)


def test_samples_of_another_step_are_repeated():
    log = worker(0, (1, 1), (2, 2), (3, 3), ran={1: (0, 8), 2: (4, 16)})
    assert count_samples([log], BATCH, 2) == SampleCount(0, 0, 4)


# -- jobs --------------------------------------------------------------------------------------

WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from commit_log import CommitLog
log = CommitLog(Path(sys.argv[-1]), slot=0)
for step in range(1, int(sys.argv[2]) + 1):
    log.commit(step, generation=0, world=1, loss=1.0)
time.sleep(float(sys.argv[3]))
"""


def fake_system(steps, seconds):
    peers = os.path.dirname(sys.modules["benchmarks.peers"].__file__)

    def launch(ranks, args, checkpoints):
        return [Process([sys.executable, "-c", WORKER, peers, str(steps), str(seconds), *args])]

    return System("fake", launch)


def test_a_worker_is_killed_and_the_end_of_the_job_noticed(tmp_path):
    failure = "exited with -9 before next step; last output: none"
    with (
        pytest.raises(Failure, match=failure),
        start_job(fake_system(3, 60), 1, [], keep=tmp_path / "kept") as job,
    ):
        job.await_(lambda workers: job.is_formed(workers, 3), 20, "steps")
        kill = job.kill_one()
        assert kill.pid == job.launchers[0].pid
        job.await_(lambda workers: recovery(workers, kill).is_complete, 20, "next step")
    assert len(list((tmp_path / "kept" / "logs").iterdir())) == 1


def test_a_hang_is_a_failure_and_the_job_is_stopped():
    with (
        pytest.raises(Failure, match=r"no step 5 within 0\.1 s"),
        start_job(fake_system(1, 60), 1, []) as job,
    ):
        job.await_(bool, 20, "start")
        job.await_(lambda workers: len(workers[0].commits) == 5, 0.1, "step 5")
    assert job.launchers[0].poll() is not None


def test_a_job_that_ends_is_read_to_its_end():
    with start_job(fake_system(4, 0), 1, []) as job:
        job.wait(20)
        assert len(job.workers[0].commits) == 4


def test_systems_take_turns_and_absent_ones_are_left_out():
    systems = [System(name, None) for name in "ab"] + [System("c", None, "not installed")]
    cases = list(Plan(systems, ["m", "n"], [2], rounds=3, kills=1).cases())
    assert len(cases) == 3 * 2 * 2
    for turn in (1, 2, 3):
        found = [(case[1].name, case[2]) for case in cases if case[0] == turn]
        assert sorted(found) == [("a", "m"), ("a", "n"), ("b", "m"), ("b", "n")]


# -- results -----------------------------------------------------------------------------------


def results():
    machine = Machine("2026-01-01T00:00:00", "A processor", 2, 0.1, "Linux 6", "3.11", "2.13")
    elastic, torchrun = "phalanx, elastic", "torchrun"
    runs = [
        Run(
            *(1, 1, torchrun, "MLP, 26 k", 2),
            recoveries=[Recovery(6.0, 5.0, 2.0), Recovery()],
            step=0.02,
            samples=SampleCount(7, 0, 0),
            failure="kill 2: no next step within 90 s",
        ),
        Run(
            *(2, 1, elastic, "MLP, 26 k", 2),
            recoveries=[Recovery(0.1, 4.0, 2.0), Recovery(0.3, 5.0, 2.0)],
            step=0.01,
            samples=SampleCount(0, 0, 0),
        ),
    ]
    return RecoveryResults(machine, runs, {"MLP, 26 k": 0.002}, {"torchft, 1 s": "not installed"})


def test_the_tables_show_times_losses_and_failures():
    text = render(results(), markdown=True)
    lines = text.splitlines()
    assert lines[2] == (
        "| 2 | MLP, 26 k | phalanx, elastic | 2 "
        "| 200 ms | 300 ms | 300 ms | 4.50 s | 5.00 s | 5.00 s | 2.00 s |"
    )
    assert "| 2 | MLP, 26 k | torchrun | 20.0 ms | 3.5 | 0 | 0 | 1 of 1 runs |" in lines
    assert "- run 1 (torchrun) failed, kill 2: no next step within 90 s" in lines
    assert "- torchft, 1 s was not measured: not installed" in lines
    assert "4 micro-batches, what a rank loses at most, take 8.00 ms on one rank" in text
    assert max(map(len, render(results()).splitlines())) <= 110


def test_results_round_trip_through_json():
    assert RecoveryResults.from_json(results().to_json()) == results()


def test_saved_results_are_written_between_marks(tmp_path):
    kept, page = tmp_path / "kept.json", tmp_path / "page.md"
    kept.write_text(results().to_json())
    page.write_text(
        "Before.\n\n<!-- figures: recovery -->\nold\n<!-- end of figures -->\n\nAfter.\n"
    )
    done = CliRunner().invoke(main, ["--show", str(kept), "--docs", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.startswith("Before.\n\n<!-- figures: recovery -->\nA processor")
    assert text.endswith("<!-- end of figures -->\n\nAfter.\n")
    assert "old" not in text
    assert replace_figures("# Page\n", "recovery", "A title", "x").startswith(
        "# Page\n\n## A title"
    )


def test_wrong_arguments_are_rejected(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.json"
    page.touch()
    other.write_text(json.dumps({"format": 1}))
    for arguments, message in (
        (["--quick", "--docs", str(page)], "mean nothing"),
        (["--show", str(other)], "not a file of recovery times"),
        (["--system", "unknown"], "no system has that in its name"),
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2
        assert message in done.output


def test_a_curve_has_every_step_once():
    logs = [worker(0, (1, 1), (2, 3), (3, 4)), worker(1, (1, 2), (3, 3.5))]
    logs[0].digest = logs[1].digest = "same"
    curve = make_curve(logs, [2 * S], [3 * S])
    assert curve.times == [0.0, 2.0, 2.5]
    assert (curve.kills, curve.joins, curve.digest) == ([1.0], [2.0], "same")
