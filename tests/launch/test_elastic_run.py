"""`phalanx run --elastic`, `phalanx ps` and `phalanx scale`, with workers that do not train."""

import contextlib
import errno
import io
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

import phalanx.launch
from phalanx.env import ElasticEnv, read_elastic_env, usable_cores
from phalanx.errors import InvalidArgument, InvalidState

from .conftest import DEADLINE, eventually, is_alive, unlabelled
from .internals import (
    ChannelReader,
    ControlServer,
    find_run,
    find_runs,
    run_directory,
    send_request,
)

# Becomes a member at once, then does what tests tell it. Leaves on SIGTERM.
WORKER = """
    import atexit, json, os, pathlib, signal, socket, subprocess, sys, time

    elastic = json.loads(os.environ["PHALANX_ELASTIC"])
    name = elastic["worker"]
    channel = socket.socket(fileno=elastic["channel"])

    def report(event, **fields):
        fields = {"event": event, "leader": name.startswith("0."), **fields}
        channel.sendall(json.dumps(fields).encode() + b"\\n")

    atexit.register(report, "ended")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    report("created")
    print("this is", name)
    SETUP
    report("member", step=7, ranks=1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        order = pathlib.Path("do-" + name)
        if order.exists():
            exec(order.read_text())
        time.sleep(0.005)
"""


class Run:
    """An elastic run in another process."""

    def __init__(self, launcher, path, directory, ranks, *options, timing=None, env=None):
        self.directory = directory
        # The directory may be too deep for the address of a socket.
        self.environ = {"XDG_RUNTIME_DIR": str(directory / "runtime")}
        (directory / "runtime").mkdir(exist_ok=True)
        env = {**self.environ, **(env or {})}
        arguments = ["run", "--elastic", "-n", ranks, *options, path]
        self.process = launcher(*arguments, timing=timing, env=env)

    @property
    def socket(self):
        (run,) = eventually(lambda: find_runs(self.environ), what="run")
        eventually(run.socket.exists, what="control socket")
        return run.socket

    def ask(self, **request):
        return send_request(self.socket, **request)

    @property
    def status(self):
        return self.ask(command="status")

    def workers(self):
        return {each["worker"]: each for each in self.status["workers"]}

    def wait_for(self, *names, seconds=DEADLINE):
        """Wait until exactly these workers are members; return their pids."""

        def pids():
            found = self.workers()
            if {name for name in found if found[name]["state"] == "member"} == {*names}:
                return [found[name]["pid"] for name in names]
            return None

        what = lambda: f"{names} among {self.workers()}"  # noqa: E731
        return eventually(pids, what=what, seconds=seconds)

    def store(self):
        """Return the process of the store."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for task in tasks for pid in task.read_text().split()]
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        return next(pid for pid in pids if b"_store_server" in commands[pid])

    def tell(self, name, order):
        unfinished = self.directory / "order"
        unfinished.write_text(order)
        unfinished.rename(self.directory / f"do-{name}")

    def end(self, *names):
        """Let these workers exit with 0; return the exit code of the launcher and its output."""
        for name in names:
            self.tell(name, "sys.exit(0)")
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def start(script, launcher, tmp_path):
    def start(ranks, *options, setup="", **keywords):
        path = script(WORKER.replace("SETUP", setup), name="train.py")
        return Run(launcher, path, tmp_path, ranks, *options, **keywords)

    return start


def test_a_killed_rank_is_replaced_while_the_others_go_on(start):
    run = start(3, "--max-restarts", 100)
    pids = run.wait_for("0.0", "1.0", "2.0")
    os.kill(pids[2], signal.SIGKILL)
    assert run.wait_for("0.0", "1.0", "2.1")[:2] == pids[:2]
    assert run.status["restarts"] == 1
    code, out, err = run.end("0.0", "1.0", "2.1")
    assert code == 0, err
    assert unlabelled(out, 2) == ["this is 2.0", "this is 2.1"]
    message = "rank 2 lost: killed by SIGKILL; starting a replacement (1 of 100)"
    assert f"phalanx: {message}\n" in err


def test_workers_are_described_in_their_environment(start):
    setup = "print(json.dumps(dict(os.environ)))"
    stale = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "PHALANX_ELASTIC": "{}"}
    run = start("2:3", setup=setup, env=stale)
    run.wait_for("0.0", "1.0", "2.0")
    assert run.ask(command="scale", ranks=4)["started"] == [3]
    names = [f"{rank}.0" for rank in range(4)]
    run.wait_for(*names)
    code, out, err = run.end(*names)
    assert code == 0, err
    stores = set()
    for rank in range(4):
        environ = json.loads(unlabelled(out, rank)[1])
        elastic = read_elastic_env(environ)
        stores.add(elastic.store)
        assert elastic == ElasticEnv(
            worker=f"{rank}.0",
            store=elastic.store,
            ranks=elastic.ranks,
            min_ranks=2,
            has_begun=rank == 3,
            is_initial=rank < 3,
            channel=elastic.channel,
        )
        assert elastic.ranks == (4 if rank == 3 else 3)
        world_size = str(max(3, rank + 1))
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_MAX_RESTARTS": "2147483647"}  # fmt: skip
        assert expected.items() <= environ.items()
        assert not environ.keys() & {"MASTER_ADDR", "MASTER_PORT"}
    assert len(stores) == 1


def test_an_exception_fails_the_run(start):
    run = start(2, "--linger", 0)
    run.wait_for("0.0", "1.0")
    many = "for step in range(3000): report('progress', step=step, leader=True)"
    run.tell("1.0", f"{many}\nraise ValueError('no such sample')")
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 1
    assert "rank 1 failed: exit code 1; stopping the others" in err
    assert "phalanx: rank 1 failed first: exit code 1\n    Traceback" in err
    assert "    ValueError: no such sample" in err
    assert "lost" not in err


@pytest.mark.parametrize("end", ["raise ValueError('no such module')", "sys.exit(1)"])
def test_an_exception_before_there_is_an_elastic_run_fails_the_run(script, launcher, end):
    """It would happen again in every replacement."""
    path = script(f"import sys\n{end}")
    process = launcher("run", "--elastic", "-n", 2, "--linger", 0, path)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "failed first: exit code 1" in err
    assert "replacement" not in err


def test_a_script_without_an_elastic_run_is_reported(script, launcher):
    process = launcher("run", "--elastic", "-n", 2, script("print('done')"))
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err.count("no rank created an ElasticRun: every rank ran the script for itself") == 1


def test_an_exit_is_judged_after_all_messages(script, monkeypatch, tmp_path):
    """Although the thread that reads the channels is late."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(ChannelReader, "_loop", lambda _: None)
    path = script(WORKER.replace("SETUP", "raise ValueError('no such sample')"))
    outcome = phalanx.launch.run(
        path, ranks=1, elastic=True, check=False, stdout=io.BytesIO(), stderr=io.BytesIO()
    )
    assert (outcome.exit_code, outcome.restarts) == (1, 0)


def test_nothing_is_replaced_after_a_failure(start):
    run = start(2, "--linger", 1000)
    pids = run.wait_for("0.0", "1.0")
    run.tell("1.0", "raise ValueError('no such sample')")
    eventually(lambda: "stopping the others" in run.process.stderr.readline(), what="failure")
    os.kill(pids[0], signal.SIGKILL)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 1
    assert "phalanx: rank 0 failed" in err
    assert "replacement" not in err


def test_a_rank_that_exits_too_early_is_not_said_to_have_failed(start):
    run = start("2:2", "--linger", 0)
    run.wait_for("0.0", "1.0")
    run.tell("0.0", "print('enough', file=sys.stderr)\nsys.exit(0)")
    run.tell("1.0", "report('short')")
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 1
    reason = "it exited with 0 and the others have more steps to do"
    assert f"phalanx: rank 0 failed first: {reason}\n    enough\n" in err
    assert "exit code 1" not in err


def test_exit_codes_without_an_orderly_end(start):
    run = start(3)
    run.wait_for("0.0", "1.0", "2.0")
    run.tell("1.0", "os._exit(3)")
    run.wait_for("0.0", "1.1", "2.0")
    run.tell("2.0", "os._exit(0)")
    run.wait_for("0.0", "1.1", "2.1")
    run.tell("2.1", "report('finished')\nos._exit(0)")
    run.wait_for("0.0", "1.1")
    code, _, err = run.end("0.0", "1.1")
    assert code == 0
    assert "phalanx: rank 1 lost: exit code 3; starting a replacement\n" in err
    assert "phalanx: rank 2 lost: exit code 0; starting a replacement\n" in err
    assert err.count("lost") == 2


def test_without_restarts_the_run_goes_on_with_fewer_ranks(start):
    run = start("2:3", "--max-restarts", 1, "--linger", 0)
    pids = run.wait_for("0.0", "1.0", "2.0")
    os.kill(pids[2], signal.SIGKILL)
    pids = run.wait_for("0.0", "1.0", "2.1")
    os.kill(pids[1], signal.SIGSEGV)
    run.wait_for("0.0", "2.1")
    os.kill(pids[2], signal.SIGKILL)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 128 + signal.SIGSEGV
    assert "rank 1 lost: killed by SIGSEGV; not replaced: no restarts left" in err
    assert "fewer than 2 ranks left; stopping the others" in err
    assert "phalanx: rank 1 failed first: SIGSEGV" in err


def test_a_rank_that_dies_on_every_start_fails_the_run(start):
    setup = "name[0] == '1' and (print('bad driver', file=sys.stderr), os._exit(5))"
    run = start(2, "--linger", 0, setup=setup)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 5
    assert "rank 1 lost: exit code 5; starting a replacement in 0.1 s" in err
    assert "3 times in a row before it was a member; stopping the others" in err
    assert "phalanx: rank 1 failed first: exit code 5\n    bad driver" in err


def test_all_ranks_lost_start_over_with_a_new_store(start):
    setup = "print(os.environ['TORCHELASTIC_RESTART_COUNT'], elastic['store'])"
    run = start(3, setup=setup)
    run.wait_for("0.0", "1.0", "2.0")
    run.ask(command="scale", ranks=2)
    eventually(lambda: [*run.workers()] == ["0.0", "1.0"], what="end of rank 2")
    for pid in run.wait_for("0.0", "1.0"):
        os.kill(pid, signal.SIGKILL)

    def new_members():
        status = run.status
        names = [each["worker"] for each in status["workers"] if each["state"] == "member"]
        return names if len({*names} - {"0.0", "1.0"}) == 2 else None

    names = eventually(new_members, what="new members")
    assert [name[0] for name in names] == ["0", "1"], "the current size"
    assert run.status["restarts"] == 1, "not one for each rank"
    code, out, err = run.end(*names)
    assert code == 0
    assert (
        "phalanx: all ranks lost; restarting all from the newest checkpoint, or from step 0\n"
        in err
    )
    attempts = {line for line in unlabelled(out, 0) if "127.0.0.1" in line}
    counts, stores = zip(*map(str.split, attempts), strict=True)
    assert {*counts} == {"0", "1"}
    assert len({*stores}) == 2


def test_all_ranks_lost_without_restarts_fail_the_run(start):
    run = start(1, "--max-restarts", 0)
    (pid,) = run.wait_for("0.0")
    os.kill(pid, signal.SIGKILL)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 137
    assert "phalanx: rank 0 failed first: SIGKILL" in err


def test_too_few_members_for_too_long_start_over(start):
    setup = "name == '1.1' and time.sleep(60)"
    run = start("2:2", setup=setup, timing={"quorum_timeout": 0.2})
    pids = run.wait_for("0.0", "1.0")
    os.kill(pids[1], signal.SIGKILL)
    run.wait_for("0.1", "1.2")
    assert not is_alive(pids[0])
    code, _, err = run.end("0.1", "1.2")
    assert code == 0
    assert "fewer than 2 members for" in err
    assert "; restarting all from the newest checkpoint, or from step 0" in err


def test_the_death_of_the_store_fails_the_run(start):
    run = start("auto", "--linger", 0)
    run.wait_for(*(f"{rank}.0" for rank in range(usable_cores())))
    os.kill(run.store(), signal.SIGKILL)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 137
    assert "phalanx: the store failed first: SIGKILL" in err


def test_the_store_outlives_signals_to_all_processes(start):
    """A scheduler may send them. Ranks that leave and save need the store."""
    run = start(1)
    run.wait_for("0.0")
    store = run.store()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        eventually(lambda number=number: _ignores(store, number), what=number.name)
        os.kill(store, number)
    code, _, err = run.end("0.0")
    assert code == 0, err
    assert not is_alive(store)


@pytest.mark.parametrize(("linger", "delay"), [(20, 1), (0, 60)])
def test_the_rank_that_says_first_that_it_failed_is_the_first_failure(start, linger, delay):
    """Although the others, which fail because of it, end sooner; and if it must be stopped."""
    run = start(3, "--linger", linger)
    run.wait_for("0.0", "1.0", "2.0")
    run.tell(
        "2.0",
        f"signal.signal(signal.SIGTERM, signal.SIG_DFL)\natexit.register(time.sleep, {delay})\n"
        "report('failed')\npathlib.Path('failed').touch()\nraise ValueError('no such sample')",
    )
    eventually((run.directory / "failed").exists, what="failure")
    for name in ("0.0", "1.0") if linger else ("0.0",):
        run.tell(name, "report('failed')\nsys.exit(3)")
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 1, err
    assert "rank 2 failed: uncaught exception; stopping the others" in err
    assert "phalanx: rank 2 failed first: exit code 1\n    Traceback" in err
    others = "ranks 0, 1" if linger else "rank 0"
    assert re.search(rf"\n {{4}}ValueError: no such sample\nphalanx: {others} failed \d", err)


def test_a_rank_that_is_killed_after_it_failed_is_not_replaced(start):
    run = start(2, "--linger", 0)
    run.wait_for("0.0", "1.0")
    run.tell("1.0", "report('failed')\nos.kill(os.getpid(), signal.SIGKILL)")
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 137
    assert "rank 1 failed first: SIGKILL" in err
    assert "replacement" not in err


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_ranks_end_soon_after_a_killed_launcher(start):
    run = start(2, setup=STUBBORN)
    pids = run.wait_for("0.0", "1.0")
    run.process.kill()
    killed_at = time.monotonic()
    eventually(lambda: not any(map(is_alive, pids)), what="end of the ranks")
    assert time.monotonic() < killed_at + 2, "although the grace period is 30 s"


def test_nothing_is_replaced_after_a_signal(start):
    setup = """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name[0] == '1' and signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    """
    run = start(2, setup=setup)
    run.wait_for("0.0", "1.0")
    run.process.send_signal(signal.SIGTERM)
    out, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 143
    assert "SIGTERM: asking the ranks to leave" in err
    assert "this is 1.1" not in out
    assert "replacement" not in err


RESTARTING = "stopped on request while restarting; the run continues from its newest checkpoint"


def test_a_run_that_is_stopped_while_it_starts_over_can_continue(start):
    """There is nothing to save."""
    setup = """
    if not name.endswith(".0"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pathlib.Path("restarts" + name[0]).touch()
        time.sleep(60)
    """
    run = start(2, setup=setup)
    for pid in run.wait_for("0.0", "1.0"):
        os.kill(pid, signal.SIGKILL)
    for rank in range(2):
        eventually((run.directory / f"restarts{rank}").exists, what="restart")
    run.process.send_signal(signal.SIGTERM)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 75, err
    assert f"phalanx: {RESTARTING}, or from step 0\n" in err


def test_the_first_signal_does_not_hurry_a_run_that_starts_over(start):
    """What lost ranks have started may end by itself."""
    code = """if True:
        import os, pathlib, sys, time
        while os.getppid() == int(sys.argv[1]) or not pathlib.Path("signalled").exists():
            time.sleep(0.02)
        pathlib.Path("loader-ended").touch()
    """
    command = f'[sys.executable, "-c", {code!r}, str(os.getpid())]'
    run = start(2, setup=f'name == "1.0" and subprocess.Popen({command})')
    for pid in run.wait_for("0.0", "1.0"):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: "restarting all" in run.process.stderr.readline(), what="restart")
    run.process.send_signal(signal.SIGTERM)
    line = run.process.stderr.readline()
    assert line == "phalanx: SIGTERM: not restarting; a second one kills what still runs\n"
    (run.directory / "signalled").touch()
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 75, err
    assert RESTARTING in err
    assert (run.directory / "loader-ended").exists()


@pytest.mark.parametrize("saves", [False, True])
def test_a_run_is_stopped_without_its_save(start, saves):
    """Rank 0 was to save. Exit code 75 means that the run stopped as asked."""
    setup = f"""
    def leave(*_):
        report("leaving")
        name == "0.0" and os.kill(os.getpid(), signal.SIGKILL)
        {saves} and report("saved")
        sys.exit(75)

    signal.signal(signal.SIGTERM, leave)
    """
    run = start(2, setup=setup)
    run.wait_for("0.0", "1.0")
    run.process.send_signal(signal.SIGTERM)
    _, err = run.process.communicate(timeout=20)
    line = "phalanx: stopped without saving: rank 0 was lost before it saved; a restart continues"
    assert run.process.returncode == (75 if saves else 128 + signal.SIGKILL), err
    assert (line in err) != saves
    assert ("phalanx: rank 0 failed first: SIGKILL" in err) != saves


def test_a_preempted_run_does_not_depend_on_a_rank_that_starts(start):
    setup = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if name == "1.1":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pathlib.Path("starts").touch()
        time.sleep(60)
    """
    run = start(2, setup=setup)
    pids = run.wait_for("0.0", "1.0")
    os.kill(pids[1], signal.SIGKILL)
    eventually((run.directory / "starts").exists, what="replacement")
    run.process.send_signal(signal.SIGTERM)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 75, err


def test_a_replacement_that_comes_too_late_does_not_delay_the_end(start):
    run = start(2, setup="name == '1.1' and time.sleep(60)")
    pids = run.wait_for("0.0", "1.0")
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: "1.1" in run.workers(), what="replacement")
    code, _, err = run.end("0.0")
    assert code == 0, err


def test_processes_of_a_lost_rank_are_killed(start):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    setup = f"""
    if name == "1.0":
        child = subprocess.Popen([sys.executable, "-c", {code!r}])
        pathlib.Path("loader").write_text(str(child.pid))
    """
    run = start(2, setup=setup, timing={"orphan_grace": 0.1})
    pids = run.wait_for("0.0", "1.0")
    loader = int((run.directory / "loader").read_text())
    os.kill(pids[1], signal.SIGKILL)
    run.wait_for("0.0", "1.1")
    eventually(lambda: not is_alive(loader), what="end of the loader")
    assert run.process.poll() is None
    assert run.end("0.0", "1.1")[0] == 0


@pytest.mark.parametrize("victims", [[1], [0, 1]], ids=["one", "all"])
def test_processes_of_a_lost_rank_may_end_by_themselves(start, victims):
    """Also if the run starts over."""
    code = """if True:
        import os, pathlib, sys, time
        while os.getppid() == int(sys.argv[1]):
            time.sleep(0.02)
        time.sleep(0.5)
        pathlib.Path("loader-ended").touch()
    """
    command = f'[sys.executable, "-c", {code!r}, str(os.getpid())]'
    run = start(2, setup=f'name == "1.0" and subprocess.Popen({command})')
    pids = run.wait_for("0.0", "1.0")
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    eventually((run.directory / "loader-ended").exists, what="end of the loader")
    eventually(lambda: run.status["members"] == 2, what="replacements")
    assert run.end(*run.workers())[0] == 0


def test_restarts_leave_no_descriptors_and_threads(start):
    run = start(2)
    run.wait_for("0.0", "1.0")

    def resources():
        return [len(os.listdir(f"/proc/{run.process.pid}/{kind}")) for kind in ("fd", "task")]

    before = resources()
    for number in range(15):
        pids = run.wait_for("0.0", f"1.{number}")
        os.kill(pids[1], signal.SIGKILL)
    run.wait_for("0.0", "1.15")

    def is_unchanged():
        # A request that was being answered may have been counted before.
        return all(now <= then for now, then in zip(resources(), before, strict=True))

    eventually(is_unchanged, what=lambda: f"{before}, but {resources()}")
    assert run.status["restarts"] == 15
    assert run.end("0.0", "1.15")[0] == 0


def test_ps_and_scale(start, cli):
    run = start("1:2", "--grace", 0.2)
    run.wait_for("0.0", "1.0")
    run.tell("0.0", "report('progress', step=12, ranks=2, leader=True)")
    eventually(lambda: run.status["step"] == 12, what="progress")
    identity = run.status["id"]
    assert identity.startswith("train-")
    listed = cli("ps", env=run.environ).stdout.splitlines()
    assert listed[0].split() == ["ID", "SCRIPT", "RANKS", "STEP", "UPTIME", "RESTARTS"]
    assert listed[1].split()[0] == identity
    assert listed[1].split()[2:4] == ["2/2", "12"]
    (found,) = json.loads(cli("ps", "--json", env=run.environ).stdout)
    assert (found["id"], found["pid"]) == (identity, run.process.pid)

    grown = cli("scale", "tra", 4, env=run.environ)
    assert grown.stdout == f"{identity}: 4 ranks; ranks 2, 3 started\n", grown.stderr
    pids = run.wait_for("0.0", "1.0", "2.0", "3.0")
    run.tell("3.0", STUBBORN)
    eventually(lambda: _ignores(pids[3], signal.SIGTERM), what="stubborn rank")
    shrunk = cli("scale", identity, 2, env=run.environ)
    assert shrunk.stdout == f"{identity}: 2 ranks; ranks 2, 3 leaving\n", shrunk.stderr
    eventually(lambda: [*run.workers()] == ["0.0", "1.0"], what="end of the highest ranks")

    for arguments, words in [
        ((identity, 0), "the number of ranks must be at least 1, got 0"),
        ((identity, -1), "the number of ranks must be at least 1, got -1"),
        ((identity, "--force"), "'--force' is not a valid integer"),
        (("other", 2), f"no elastic run 'other'. Running: {identity}"),
    ]:
        refused = cli("scale", *arguments, env=run.environ)
        assert refused.returncode == 2
        assert words in refused.stderr
    code, _, err = run.end("0.0", "1.0")
    assert code == 0
    assert "rank 3 left: killed by SIGKILL" in err
    assert "lost" not in err
    assert [*(run.directory / "runtime/phalanx").iterdir()] == []


def test_scale_tells_of_hot_spares(start, cli):
    run = start(1, setup="report('ready', max_members=2)")
    run.wait_for("0.0")
    grown = cli("scale", "train", 4, env=run.environ).stdout
    spares = "micro_batches=2, so 2 ranks will wait as hot spares"
    assert grown.endswith(f": 4 ranks; ranks 1, 2, 3 started; {spares}\n")
    shrunk = cli("scale", "train", 1, env=run.environ).stdout
    assert shrunk.endswith(": 1 rank; ranks 1, 2, 3 leaving\n")
    assert run.end("0.0")[0] == 0


def _ignores(pid, number):
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("SigIgn:")[2].split()[0], 16) >> number - 1 & 1


def test_ps_removes_the_directories_of_killed_launchers(start, cli):
    run = start(1)
    run.wait_for("0.0")
    directory = run.socket.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    run.process.kill()
    run.process.wait()
    assert cli("ps", env=run.environ).stdout == "no elastic runs\n"
    assert not directory.exists()


def test_malformed_requests_are_answered(start):
    run = start(1)
    run.wait_for("0.0")
    for line in (b"\n", b"nonsense\n", b"[]\n", b'{"command": 3}\n', b'{"command": "scale"}\n'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            directory = os.open(run.socket.parent, os.O_PATH)
            client.connect(f"/proc/self/fd/{directory}/control.sock")
            os.close(directory)
            client.sendall(line)
            assert "error" in json.loads(client.makefile().readline())
    assert run.end("0.0")[0] == 0


def test_launch_run_replaces_a_lost_rank(script, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    setup = """
    name == "1.0" and os._exit(4)
    report("member", step=7, ranks=1)
    replaced = pathlib.Path(sys.argv[1])
    name == "1.1" and replaced.touch()
    while not replaced.exists():
        time.sleep(0.005)
    sys.exit(0)
    """
    err = io.BytesIO()
    outcome = phalanx.launch.run(
        script(WORKER.replace("SETUP", setup)),
        [str(tmp_path / "replaced")],
        ranks=2,
        elastic=True,
        min_ranks=1,
        stdout=io.BytesIO(),
        stderr=err,
    )
    assert (outcome.exit_code, outcome.restarts, outcome.attempts) == (0, 1, 1)
    assert sorted((each.rank, each.code) for each in outcome.exits) == [(0, 0), (1, 0)]
    assert b"rank 1 lost: exit code 4; starting a replacement\n" in err.getvalue()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "2:4"], "-n MIN:N is for elastic runs"),
        (["-n", "4:2", "--elastic"], "MIN must not be greater than N, got '4:2'"),
        (
            ["-n", "0:2", "--elastic"],
            "must be N, MIN:N or 'auto', with positive integers, got '0:2'",
        ),
        (["-n", ":2", "--elastic"], "must be N, MIN:N or 'auto', with positive integers, got ':2'"),
        (["-n", "2", "--elastic", "--nnodes", "2"], "elastic runs are on one machine"),
        (["-n", "2", "--elastic", "--drop-in"], "cannot be used with --drop-in"),
    ],
)
def test_usage_errors_of_elastic_runs(cli, script, options, words):
    done = cli("run", *options, script(""))
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    "options",
    [{"min_ranks": 1}, {"elastic": True, "min_ranks": 3}, {"elastic": True, "drop_in": True}],
)
def test_api_rejects_invalid_elastic_arguments(script, options):
    with pytest.raises(InvalidArgument):
        phalanx.launch.run(script(""), ranks=2, **options)


def test_a_run_that_cannot_have_a_directory_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "missing"))
    with (
        pytest.raises(InvalidState, match="elastic runs need a directory.*XDG_RUNTIME_DIR"),
        run_directory("train.py", min_ranks=1, environ={}),
    ):
        pass


def test_runs_are_found_by_an_unambiguous_prefix(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert find_runs(environ) == []
    with (
        run_directory("some/train.py", min_ranks=1, environ=environ) as one,
        run_directory("package.train", min_ranks=1, environ=environ) as other,
        run_directory("päth/ev al?.py", min_ranks=1, environ=environ) as odd,
    ):
        assert find_runs(environ) == [one, other, odd]
        assert odd.info.id.startswith("ev-al-")
        assert find_run("ev", environ) == odd
        assert find_run(one.info.id, environ) == one
        both = ", ".join(each.info.id for each in (one, other))
        match = f"^several runs match 'train': {both}; give more of the id$"
        with pytest.raises(InvalidArgument, match=match):
            find_run("train", environ)
    with pytest.raises(InvalidArgument, match="no elastic run 'train'. None is running"):
        find_run("train", environ)


def test_an_unfinished_directory_is_removed_when_it_is_old(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    made = tmp_path / "phalanx/train-0000"
    made.mkdir(parents=True)
    assert find_runs(environ) == []
    assert made.exists(), "its launcher may be writing the description"
    os.utime(made, (0, 0))
    assert find_runs(environ) == []
    assert not made.exists()


def test_a_reused_pid_is_not_the_launcher(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with run_directory("train.py", min_ranks=1, environ=environ) as run:
        description = run.path / "run.json"
        fields = json.loads(description.read_text())
        description.write_text(json.dumps({**fields, "pid_since": fields["pid_since"] + 1}))
        assert find_runs(environ) == []


def test_a_run_of_another_version_is_left_alone(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with run_directory("train.py", min_ranks=1, environ=environ) as run:
        description = run.path / "run.json"
        fields = json.loads(description.read_text())
        description.write_text(json.dumps({**fields, "added_later": 1}))
        assert find_runs(environ) == [run]
        description.write_text("something else")
        os.utime(run.path, (0, 0))
        with contextlib.closing(ControlServer(run.socket, lambda _: None)):
            assert find_runs(environ) == []
            assert run.path.exists(), "somebody listens"
        os.utime(run.path, (0, 0))
        find_runs(environ)
        assert not run.path.exists()


def test_a_request_that_was_refused_is_not_carried_out_later(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.launch._control_socket.REQUEST_TIMEOUT", 0.2)
    requests = []
    path = tmp_path / "control.sock"
    with contextlib.closing(ControlServer(path, requests.append)):
        assert "Try again" in send_request(path, command="scale", ranks=3)["error"]
    assert not requests[0].reply.set_running_or_notify_cancel()


def test_a_client_that_dribbles_does_not_block_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.launch._control_socket.REQUEST_TIMEOUT", 0.5)
    path = tmp_path / "control.sock"

    def answer(request):
        request.reply.set_result({"ok": True})

    with (
        contextlib.closing(ControlServer(path, answer)),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow,
    ):
        slow.connect(str(path))
        done = threading.Event()

        def dribble():
            with contextlib.suppress(OSError):
                while not done.wait(0.1):
                    slow.send(b" ")

        thread = threading.Thread(target=dribble)
        thread.start()
        assert send_request(path, command="status") == {"ok": True}
        done.set()
        thread.join()


def test_the_control_socket_survives_a_lack_of_descriptors(start):
    run = start(1)
    run.wait_for("0.0")
    path = run.socket
    soft, hard = resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (3, hard))
    directory = os.open(path.parent, os.O_PATH)
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # accept() may have got a descriptor before
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.connect(f"/proc/self/fd/{directory}/control.sock")
            client.sendall(b'{"command": "status"}\n')
            if not select.select([client], [], [], 0.3)[0]:
                break
        else:
            raise AssertionError("the limit has no effect")
        resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(20)
        assert "workers" in json.loads(client.makefile().readline())
    os.close(directory)
    assert run.end("0.0")[0] == 0


def test_a_run_starts_over_when_it_can_start_a_store(script, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("phalanx.launch._supervisor.START_RETRY_INTERVAL", 0.1)
    create, calls = socket.create_server, []

    def create_server(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return create(*args, **options)

    monkeypatch.setattr("socket.create_server", create_server)
    setup = """
    report("member", step=7)
    os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)
    """
    path, err = script(WORKER.replace("SETUP", setup)), io.BytesIO()
    outcome = phalanx.launch.run(path, ranks=1, elastic=True, stdout=io.BytesIO(), stderr=err)
    assert (outcome.exit_code, outcome.restarts, outcome.attempts) == (0, 1, 2)
    again = "could not start the store: [Errno 24] Too many open files; trying again in 0.1 s"
    assert f"phalanx: {again}\n" in err.getvalue().decode()


def test_a_signal_ends_a_run_that_cannot_start_over(start):
    run = start(1)
    (pid,) = run.wait_for("0.0")
    soft, hard = resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (3, hard))
    os.kill(pid, signal.SIGKILL)
    lack = "could not start the store: [Errno 24]"
    eventually(lambda: lack in run.process.stderr.readline(), what="lack of descriptors")
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    run.process.send_signal(signal.SIGTERM)
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 75, err
    assert RESTARTING in err


def test_the_base_must_be_a_directory_of_this_user(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "phalanx").symlink_to("elsewhere")
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with (
        pytest.raises(InvalidState, match="is not a directory"),
        run_directory("train.py", min_ranks=1, environ=environ),
    ):
        pass
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    stranger = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: stranger)
    (tmp_path / f"phalanx-{stranger}").mkdir()
    for use in (
        find_runs,
        lambda _: run_directory("train.py", min_ranks=1, environ={}).__enter__(),
    ):
        with pytest.raises(InvalidState, match="belongs to another user"):
            use({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_channel_keeps_what_was_written_before_the_end():
    notified = []
    reader = ChannelReader(notified.append)
    try:
        channel = reader.open()
        with socket.socket(fileno=os.dup(channel.worker_fd)) as worker:
            worker.sendall(b"\n")
            eventually(lambda: channel in notified, what="notification")
            worker.sendall(b'{"event": "member", "step": 3}\nnonsense\n[1]\n{"event": 1}\n')
            worker.sendall(b'{"event": "prog' + b"x" * 100_000 + b"\n")
            worker.sendall(
                b'{"event": "progress", "step": 4, "leader": true}\n{"event": "ended"}\n'
            )
            # Whether the thread has read it or not.
            messages = channel.receive()
        assert [(each.event, each.step, each.leader) for each in messages] == [
            ("member", 3, False),
            ("progress", 4, True),
            ("ended", None, False),
        ]
        assert channel.has_ended
        # Another process has the worker's end.
        channel.shut_down()
        eventually(lambda: channel.fileno() == -1, what="end of the channel")
        channel.close_worker_end()
    finally:
        reader.close()


# -- a standby -----------------------------------------------------------------------------

PRELOADING = 60.0  # seconds that a standby has to import torch and its compiler
READY = "report('ready', max_members=8)\n    "
DESCRIBE = """
    import torch
    print(__name__, __file__, sys.argv, sys.path[0], os.readlink("/proc/self/fd/0"))
    print(type(sys.modules["__main__"]).__name__, sys.modules["__main__"].name)
"""


def standby_of(run, members):
    """Wait for the standby of a run; return its pid. Members may have been standbys, too."""

    def find():
        for path in {*Path("/proc").glob("[0-9]*")} - {Path(f"/proc/{pid}") for pid in members}:
            with contextlib.suppress(OSError):
                is_child = f"\nPPid:\t{run.process.pid}\n" in (path / "status").read_text()
                if is_child and b"/_standby.py\0" in (path / "cmdline").read_bytes():
                    return int(path.name)
        return None

    return eventually(find, what="standby")


@pytest.mark.slow
def test_a_standby_becomes_the_replacement_of_a_lost_rank(start, tmp_path):
    run = start(2, "--standby", setup=READY + DESCRIBE.strip())
    pids = run.wait_for("0.0", "1.0")
    for number in (1, 2):
        standby = standby_of(run, pids)
        os.kill(pids[1], signal.SIGKILL)
        pids = run.wait_for("0.0", f"1.{number}", seconds=PRELOADING)
        assert pids[1] == standby
    standby = standby_of(run, pids)
    os.kill(pids[0], signal.SIGKILL)
    pids = run.wait_for("0.1", "1.2", seconds=PRELOADING)
    assert pids[0] == standby
    standby = standby_of(run, pids)
    code, out, err = run.end("0.1", "1.2")
    assert code == 0, err
    assert not is_alive(standby)
    path = tmp_path / "train.py"
    described = f"__main__ {path} ['{path}'] {tmp_path} /dev/null"
    lines = unlabelled(out, 1)
    assert lines[1::3] == [described] * 3, "as in a process of its own"
    assert lines[2::3] == [f"module 1.{number}" for number in range(3)]
    assert unlabelled(out, 0)[1::3] == [described] * 2


def find_line(file, start):
    """Return the next line of a file, or None if it starts differently."""
    line = file.readline()
    return line if line.startswith(start) else None


def test_standbys_that_die_are_replaced_twice(start):
    setup = READY + "name == '0.0' and signal.signal(signal.SIGUSR1, lambda *_: report('progress'))"
    run = start(2, "--standby", setup=setup)
    pids = run.wait_for("0.0", "1.0")
    for _ in range(3):
        standby = standby_of(run, pids)
        os.kill(standby, signal.SIGKILL)
        eventually(lambda standby=standby: not is_alive(standby), what="end of the standby")
        os.kill(pids[0], signal.SIGUSR1)
    message = "phalanx: the standby was lost: SIGKILL"
    line = eventually(lambda: find_line(run.process.stderr, message), what="message")
    assert line.endswith("; not replaced any more\n")
    code, _, _ = run.end("0.0", "1.0")
    assert code == 0


def test_a_standby_that_has_died_is_not_used(start):
    run = start(2, "--standby", setup=READY)
    pids = run.wait_for("0.0", "1.0")
    standby = standby_of(run, pids)
    os.kill(standby, signal.SIGKILL)
    eventually(lambda: not is_alive(standby), what="end of the standby")
    os.kill(pids[1], signal.SIGKILL)
    assert standby_of(run, run.wait_for("0.0", "1.1"))
    code, _, err = run.end("0.0", "1.1")
    assert code == 0, err
    assert err.count("lost") == 1


def test_a_standby_ends_with_the_launcher(start):
    run = start(2, "--standby", setup=READY)
    pids = run.wait_for("0.0", "1.0")
    pids.append(standby_of(run, pids))
    run.process.kill()
    eventually(lambda: not any(map(is_alive, pids)), what="end of all processes")


@pytest.mark.slow
def test_an_exception_of_a_former_standby_has_the_traceback_of_a_script(start, tmp_path):
    run = start(2, "--standby", "--linger", 0, setup=READY)
    pids = run.wait_for("0.0", "1.0")
    assert standby_of(run, pids)
    os.kill(pids[1], signal.SIGKILL)
    run.wait_for("0.0", "1.1", seconds=PRELOADING)
    run.tell("1.1", "raise ValueError('no such sample')")
    _, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 1
    first = f'    Traceback (most recent call last):\n      File "{tmp_path / "train.py"}", line'
    assert f"rank 1 failed first: exit code 1\n{first}" in err
    assert "_standby.py" not in err


@pytest.mark.slow
def test_a_module_runs_in_a_standby(script, launcher, tmp_path):
    body = WORKER.replace("SETUP", READY + "print(__spec__.name, sys.argv[1:], sys.path[0])")
    script(body, name="train/job.py")
    run = Run(launcher, "train.job", tmp_path, 2, "--standby", "-m")
    pids = run.wait_for("0.0", "1.0")
    standby = standby_of(run, pids)
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait_for("0.0", "1.1", seconds=PRELOADING)[1] == standby
    code, out, err = run.end("0.0", "1.1")
    assert code == 0, err
    assert unlabelled(out, 1)[1::2] == [f"train.job [] {tmp_path}"] * 2


def test_a_script_that_sets_variables_has_no_standby(start):
    """torch may have read them when it was imported."""
    setup = READY + "report('created', changed_variables=['MKL_CBWR', '\\udcff'])"
    run = start(2, "--standby", setup=setup)
    pids = run.wait_for("0.0", "1.0")
    os.kill(pids[1], signal.SIGKILL)
    run.wait_for("0.0", "1.1")
    code, _, err = run.end("0.0", "1.1")
    assert code == 0
    message = r"no standby: the script sets MKL_CBWR, \udcff, maybe before it imports torch"
    assert err.count(f"phalanx: {message}\n") == 1


def test_a_standby_is_for_elastic_runs(cli, script):
    path = script("")
    done = cli("run", "--standby", "-n", 2, path)
    assert done.returncode == 2
    assert "--standby is for elastic runs: add --elastic" in done.stderr
    with pytest.raises(InvalidArgument, match="standby is for elastic runs"):
        phalanx.launch.run(path, ranks=2, standby=True)
