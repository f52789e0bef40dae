"""Runs with injected failures: what is injected, what is reported, and what is left behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from phalanx.errors import InvalidArgument, InvalidState
from phalanx.testing.faults import (
    Fault,
    FaultPlan,
    PlannedFailure,
    exit_abruptly,
    kill,
    kill_supervisor,
    run_elastic,
    segfault,
    stop,
    store_unreachable,
)

from .internals import MarkedProcesses

# A worker that trains nothing, and tells its supervisor how far it is. The last statements are
# filled in; they have the name of the worker and the step.
WORKER = """
import atexit, itertools, json, os, pathlib, signal, socket, subprocess, sys, time
from phalanx.env import read_elastic_env
from phalanx.testing import faults

worker = read_elastic_env().worker
channel = socket.socket(fileno=read_elastic_env().channel)

def tell(event, **facts):
    channel.send(json.dumps({{"event": event, **facts}}).encode() + b"\\n")

atexit.register(tell, "ended")
tell("member", step=0)
last = time.monotonic()
for step in itertools.count(1):
    faults.reach("step")
    time.sleep(0.02)
    now = time.monotonic()
    pause, last = now - last, now
    tell("progress", step=step, leader=worker[0] == "2")
    {body}
    if {until}:
        break
"""


@pytest.fixture
def run(tmp_path):
    """Run workers, with steps of 20 ms, and return the outcome."""

    def call(until, body="pass", *, timeout=60, ranks=3, **options):
        path = tmp_path / "worker.py"
        path.write_text(WORKER.format(body=body, until=until))
        return run_elastic(path, [str(tmp_path)], ranks=ranks, timeout=timeout, **options)

    return call


def plan(*failures):
    return FaultPlan(tuple(PlannedFailure(at=at, action=action, rank=0) for at, action in failures))


@pytest.mark.slow
def test_failures_from_outside_and_at_points(run):
    faults = [
        Fault("step", exit_abruptly(), rank=1, nth=30),
        Fault("step", segfault(), rank=1, incarnation=1, nth=2),
        Fault("nowhere", kill()),
        Fault("nowhere", kill(), optional=True),
    ]
    # All go on until there is a second replacement of rank 1 and a first one of rank 0.
    body = "pathlib.Path(sys.argv[1], worker).touch()"
    until = "all(pathlib.Path(sys.argv[1], name).exists() for name in ('0.1', '1.2'))"
    outcome = run(until, body, plan=plan((0.1, kill())), faults=faults, survivors=1)
    assert outcome.exit_code == 0, str(outcome)
    found = {(each.worker, str(each.action), each.point) for each in outcome.injected}
    assert found == {
        ("0.0", "kill:9", None),
        ("1.0", "exit_abruptly:137", "step"),
        ("1.1", "segfault", "step"),
    }
    times = [each.at for each in outcome.injected]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < outcome.duration
    assert outcome.injected[0].step is not None
    assert outcome.lost == {"0.0", "1.0", "1.1"}
    assert outcome.missed == (faults[2],)
    assert outcome.skipped == ()
    assert outcome.points == {"step"}
    assert outcome.leaks == ()
    assert outcome.evidence == ""
    assert "missed: kill at 'nowhere' of worker *.0" in str(outcome)


@pytest.mark.slow
def test_failures_are_injected_in_a_long_tmpdir(run, tmp_path, monkeypatch):
    """The path of the control socket is longer than the address of a socket can be."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)  # where it is remembered
    body = "pathlib.Path(sys.argv[1], worker).touch()"
    until = "pathlib.Path(sys.argv[1], '0.1').exists() or step == 2000"
    failures = plan((0.1, kill()), (3600.0, kill()))
    outcome = run(until, body, plan=failures, ranks=2)
    assert outcome.exit_code == 0, str(outcome)
    assert [each.worker for each in outcome.injected] == ["0.0"]
    assert outcome.skipped == failures.failures[1:]
    assert "skipped: kill:9 of rank 0, planned at 3600.00 s" in str(outcome)
    assert outcome.missed == ()
    assert outcome.leaks == ()


def test_a_plan_needs_a_supervisor_that_answers(run):
    """Else nothing would be injected, and a test could pass without any failure."""
    with pytest.raises(InvalidState, match=r"never answered(.|\n)*exit code 2(.|\n)*--nonsense"):
        run("True", plan=plan((0.1, kill())), options=["--nonsense"])
    for nothing in (None, FaultPlan(())):
        assert run("True", plan=nothing, options=["--nonsense"]).exit_code == 2


@pytest.mark.slow
def test_stops_are_resumed(run):
    body = "pause > 1.0 and print('paused', worker, flush=True)"
    failures = plan((0.2, stop(resume_after=1.5)), (2.0, store_unreachable(0.2)))
    outcome = run("step == 200", body, plan=failures, survivors=3)
    assert outcome.exit_code == 0, str(outcome)
    assert [each.worker for each in outcome.injected] == ["0.0", "store"]
    assert "paused 0.0" in outcome.output
    assert "paused 1.0" not in outcome.output
    assert outcome.lost == frozenset()
    first, last = outcome.descriptors
    assert 0 < last <= first


@pytest.mark.slow
def test_a_killed_supervisor(run):
    outcome = run("False", plan=plan((0.2, kill_supervisor())), options=["--grace=1"])
    assert outcome.exit_code == -signal.SIGKILL, str(outcome)
    assert [each.worker for each in outcome.injected] == ["supervisor"]
    assert outcome.lost == frozenset()
    (left,) = outcome.leaks
    assert left.startswith("directory ")


@pytest.mark.slow
def test_faults_wait_for_members(run):
    """Whoever gets there first, while one other is a member; then the next, and so on."""
    faults = [
        Fault("step", kill(), incarnation=None, once=True, survivors=1, nth=1 + number)
        for number in range(5)
    ]
    body = "step == 2 and faults.reach('elastic:member')"
    until = "pathlib.Path(os.environ['PHALANX_FAULT_LOG']).read_text().count('fired') == 5"
    outcome = run(until, body, faults=faults)
    assert outcome.exit_code == 0, str(outcome)
    assert len(outcome.injected) == 5
    assert len({each.worker for each in outcome.injected}) == 5
    assert "all ranks lost" not in outcome.output


@pytest.mark.slow
def test_survivors_are_spared(run):
    """Of two failures that are due at once, the second waits for the replacement."""
    body = "pathlib.Path(sys.argv[1], worker).touch()"
    until = "pathlib.Path(sys.argv[1], '0.2').exists()"
    outcome = run(until, body, plan=plan((0.1, kill()), (0.1, kill())), survivors=2)
    assert outcome.exit_code == 0, str(outcome)
    first, second = outcome.injected
    assert (first.worker, second.worker) == ("0.0", "0.1")


@pytest.mark.slow
def test_a_late_run_is_described_and_killed(run):
    body = "worker[0] == '1' and step == 5 and signal.pause()"
    outcome = run("step == 20", body, timeout=12)
    assert outcome.exit_code is None
    assert outcome.duration >= 12
    assert re.search(r"worker\.py.*line \d+ in <module>", outcome.output), "no stack"
    assert re.search(r"thread \d+ \S+: S \(sleeping\)", outcome.evidence)
    assert "timed out" in str(outcome)
    pids = [int(each) for each in re.findall(r"^process (\d+)", outcome.evidence, re.MULTILINE)]
    assert len(pids) >= 3
    assert not any(map(is_alive, pids))


def is_alive(pid):
    try:
        return bool(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return False


@pytest.mark.slow
def test_what_is_left_behind_is_found(run, tmp_path):
    """A process in a session of its own, and a file that nobody has open."""
    name = f"/dev/shm/left-{os.getpid()}"
    sleep = "subprocess.Popen(['sleep', '61'], start_new_session=True)"
    body = f"step == 1 and worker == '0.0' and (pathlib.Path({name!r}).touch(), {sleep})"
    try:
        outcome = run("step == 5", body)
    finally:
        Path(name).unlink(missing_ok=True)
    assert outcome.exit_code == 0, str(outcome)
    process, file = outcome.leaks
    assert process.endswith(": sleep 61")
    assert file == f"file {name}"
    assert not is_alive(int(process.split()[1].rstrip(":")))


@pytest.mark.slow
def test_shared_memory_can_be_small(run):
    body = "print('size', os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize)"
    try:
        outcome = run("True", body, shm_limit="8m")
    except InvalidState as error:
        pytest.skip(str(error))
    assert outcome.exit_code == 0, str(outcome)
    assert f"size {8 << 20}" in outcome.output


def test_arguments_are_checked(run):
    with pytest.raises(InvalidArgument, match="such as '8m'"):
        run("True", shm_limit="much")
    with pytest.raises(InvalidArgument, match="ranks are 0 to 2"):
        run("True", faults=[Fault("step", kill(), rank=3)])


def test_marked_processes_are_found_wherever_they_are():
    """Also one whose parent has exited and that leads a session of its own."""
    processes, others = MarkedProcesses(), MarkedProcesses()
    code = "import subprocess; subprocess.Popen(['sleep', '62'], start_new_session=True)"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **processes.variables}, check=True
    )
    (pid,) = [pid for pid, command in processes.find().items() if command == "sleep 62"]
    assert f"process {pid}: sleep 62" in processes.report()
    assert not others.send(pid, signal.SIGKILL)
    assert not others.find()
    assert not processes.catches(pid, signal.SIGUSR1)
    processes.kill_all(timeout=10)
    deadline = time.monotonic() + 10
    while processes.find() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.find()
    assert not processes.send(pid, signal.SIGKILL)
