"""No process outlives the launcher that started it."""

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from .conftest import eventually, is_alive, read_pid
from .internals import ChildProcess, _orphan_guard, signals_into, with_orphans

PR_SET_CHILD_SUBREAPER = 36

# Writes its pid and waits; the setup for signals and children is filled in.
WAITING = """
    import os, pathlib, signal, subprocess, sys, time
    {setup}
    pathlib.Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.02)
"""
STUBBORN = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
)
CHILD = """
    child = subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\\n"
    pathlib.Path("child" + os.environ["RANK"]).write_text(str(child.pid))
"""
LAZY_CHILD = CHILD.format(code="print('ready', flush=True); import time; time.sleep(60)")
STUBBORN_CHILD = CHILD.format(
    code="import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(60)"
)


def waiting(setup="", end=""):
    return WAITING.format(setup=setup) + end


def all_gone(pids):
    return not any(map(is_alive, pids))


@pytest.fixture
def pids(tmp_path):
    def read(*names):
        return [read_pid(tmp_path / name) for name in names]

    return read


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_reaches_every_rank(script, launcher, pids, number, code):
    process = launcher("run", "-n", 2, script(waiting()))
    ranks = pids("pid0", "pid1")
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code
    assert f"phalanx: {number.name}: forwarded to the ranks" in err
    assert f"phalanx: stopped by {number.name}" in err
    assert "failed" not in err
    assert err.count("KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)
    assert all_gone(ranks)


def test_exit_code_is_0_if_ranks_exit_with_0_on_a_signal(script, launcher, pids):
    setup = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved') or 0))"
    process = launcher("run", "-n", 2, script(waiting(setup)))
    pids("pid0", "pid1")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]


def test_preempted_ranks_that_saved_are_not_reported_as_failed(script, launcher, pids):
    words = "stopped on request after saving step 7 (SIGTERM)"
    leave = f"(print({words!r}, file=sys.stderr), sys.exit(75))"
    setup = f"signal.signal(signal.SIGTERM, lambda *_: {leave})"
    process = launcher("run", "-n", 2, "--max-restarts", 3, script(waiting(setup)))
    pids("pid0", "pid1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 75
    assert err.splitlines()[-1] == f"phalanx: {words}"
    assert "failed" not in err


def test_a_failure_is_not_restarted_after_the_launcher_was_signalled(script, launcher, pids):
    setup = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        os._exit(0)
    os.environ["RANK"] == "0" and os._exit(3)
    """
    process = launcher("run", "-n", 2, "--max-restarts", 3, "--linger", 60, script(waiting(setup)))
    pids("pid1")
    assert "rank 0 failed: exit code 3" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "restarting" not in err


def test_a_failure_is_not_restarted_after_a_signal_while_the_others_are_stopped(
    script, launcher, pids
):
    setup = """
    os.environ["RANK"] == "0" and os._exit(3)
    def asked(*_): pathlib.Path("asked").write_text("1")
    signal.signal(signal.SIGTERM, asked)
    """
    options = ["--max-restarts", 1, "--linger", 1, "--grace", 1000]
    process = launcher("run", "-n", 2, *options, script(waiting(setup)))
    pids("pid1", "asked")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "restarting" not in err


def test_ranks_can_be_preempted_without_signalling_the_launcher(script, launcher, pids):
    setup = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"
    process = launcher("run", "-n", 2, "--max-restarts", 3, "--linger", 0, script(waiting(setup)))
    for rank in pids("pid0", "pid1"):
        os.kill(rank, signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 75
    assert err.splitlines()[-1] == "phalanx: stopped on request"
    assert "again" not in err


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(script, launcher, pids):
    process = launcher("run", "-n", 2, "--grace", 0.2, script(waiting(STUBBORN)))
    ranks = pids("pid0", "pid1")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert all_gone(ranks)


def test_a_second_signal_kills_the_ranks(script, launcher, pids):
    no_window = {"duplicate_signal_window": 0.0}
    path = script(waiting(STUBBORN))
    process = launcher("run", "-n", 2, "--grace", 1000, path, timing=no_window)
    ranks = pids("pid0", "pid1")
    process.send_signal(signal.SIGINT)
    eventually(lambda: "forwarded" in process.stderr.readline(), what="first signal")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert all_gone(ranks)


def test_a_different_second_signal_kills_the_ranks_at_once(script, launcher, pids):
    process = launcher("run", "-n", 2, "--grace", 1000, script(waiting(STUBBORN)))
    ranks = pids("pid0", "pid1")
    process.send_signal(signal.SIGINT)
    eventually(lambda: "forwarded" in process.stderr.readline(), what="first signal")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    assert all_gone(ranks)


def test_duplicate_signals_within_the_window_count_once(script, launcher, pids, tmp_path):
    """The `timeout` command signals a process and then its process group."""
    setup = """
    def stop(*_):
        if pathlib.Path("go").exists():
            sys.exit(75)
        pathlib.Path("signalled" + os.environ["RANK"]).write_text("1")

    signal.signal(signal.SIGTERM, stop)
    """
    # On a busy machine the second signal may be late, so the window is long.
    window = {"duplicate_signal_window": 1000.0}
    path = script(waiting(setup))
    process = launcher("run", "-n", 2, "--grace", 1000, path, timing=window)
    ranks = pids("pid0", "pid1")
    process.send_signal(signal.SIGTERM)
    # A rank that is exiting has no handler any more: another signal would kill it.
    pids("signalled0", "signalled1")
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 75, err


def test_signals_ignored_in_the_background_stay_ignored(script, launcher, pids):
    """nohup and a shell's `&` start processes with these signals ignored."""
    background = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh"]
    process = launcher("run", "-n", 2, script(waiting()), before=background)
    ranks = pids("pid0", "pid1")
    for number in (signal.SIGINT, signal.SIGHUP):
        for pid in (process.pid, *ranks):
            os.kill(pid, number)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143
    assert "SIGTERM: forwarded to the ranks" in err
    assert "SIGINT" not in err
    assert "SIGHUP" not in err
    assert all_gone(ranks)


IGNORED = (signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def background():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("background", "foreground")
def test_the_foreground_fixture_restores_default_signal_handling():
    code = "print(next(line for line in open('/proc/self/status') if line[:7] == 'SigIgn:'))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert not int(done.stdout.split()[1], 16) & sum(1 << number - 1 for number in IGNORED)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)


def test_a_failure_kills_ranks_that_ignore_sigterm(script, phalanx, pids):
    setup = f"os.environ['RANK'] == '1' and sys.exit(4)\n    {STUBBORN}"
    done = phalanx("run", "-n", 3, "--linger", 0.3, "--grace", 0.2, script(waiting(setup)))
    assert done.returncode == 4
    assert "phalanx: ranks 0, 2 stopped" in done.stderr
    assert all_gone(pids("pid0", "pid2"))


@pytest.mark.parametrize("child", [LAZY_CHILD, STUBBORN_CHILD])
def test_grandchildren_are_killed_after_a_failure(script, phalanx, pids, child):
    path = script(waiting(child).replace("while time", "os._exit(4)\n    while time"))
    done = phalanx("run", "-n", 2, "--grace", 0.3, path)
    assert done.returncode == 4
    assert all_gone(pids("child0", "child1"))


@pytest.mark.parametrize("child", [LAZY_CHILD, STUBBORN_CHILD])
def test_grandchildren_are_killed_after_a_signal(script, launcher, pids, child):
    process = launcher("run", "-n", 2, "--grace", 0.3, script(waiting(child)))
    family = pids("child0", "child1", "pid0", "pid1")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert all_gone(family)


def test_grandchildren_are_killed_after_success(script, phalanx, pids):
    path = script(waiting(LAZY_CHILD).replace("while time", "os._exit(0)\n    while time"))
    done = phalanx("run", "-n", 2, path)
    assert done.returncode == 0
    assert all_gone(pids("child0", "child1"))


def test_a_detached_process_does_not_delay_the_launchers_exit(script, phalanx, pids):
    # In its own session, with our pipes open.
    path = script(
        """
        import pathlib, subprocess, sys
        code = "import time; time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        pathlib.Path("child").write_text(str(child.pid))
        """
    )
    try:
        done = phalanx("run", "-n", 1, path)
    finally:
        os.kill(pids("child")[0], signal.SIGKILL)
    assert done.returncode == 0


def test_ranks_end_on_a_signal_even_if_stdout_is_not_read(script, launcher, pids):
    setup = "pathlib.Path('pid0').write_text(str(os.getpid()))\n    while True: print('x' * 1000)"
    process = launcher("run", "-n", 1, script(waiting(setup)))
    (rank,) = pids("pid0")
    capacity = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
    # A pipe can be full below its capacity: a write that does not fit a page starts a new one.
    eventually(lambda: _unread(process.stdout) > capacity // 2, what="full pipe")
    process.send_signal(signal.SIGTERM)
    eventually(lambda: not is_alive(rank), what="end of the rank")


@pytest.mark.parametrize("setup", [LAZY_CHILD, STUBBORN + "\n" + STUBBORN_CHILD])
def test_no_process_outlives_a_killed_launcher(script, launcher, pids, setup):
    process = launcher("run", "-n", 2, "--grace", 0.3, script(waiting(setup)))
    family = pids("child0", "child1", "pid0", "pid1")
    helpers = _children_of(process.pid)
    assert len(helpers) == 4, "two ranks, the store and the guard"
    process.kill()
    process.communicate()
    eventually(lambda: all_gone([*family, *helpers]), what="end of the ranks")


def _children_of(pid):
    # The kernel lists children by the thread that started them.
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _unread(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"1234"))[0]


def test_a_process_that_is_forked_meanwhile_has_signals_of_its_own():
    events, (reader, writer) = SimpleQueue(), os.pipe()
    with signals_into(events), open(reader, "rb") as ready, open(writer, "wb") as write:
        child = os.fork()
        if child == 0:
            write.write(b"!")
            write.flush()
            time.sleep(60)
            os._exit(7)
        ready.read(1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert events.empty()


def test_the_store_ends_with_a_killed_launcher(script, launcher, pids):
    """It ignores SIGTERM. The grace period is for the ranks."""
    process = launcher("run", "-n", 1, "--grace", 1000, script(waiting()))
    (rank,) = pids("pid0")

    def find_store():
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        for pid in [int(pid) for task in tasks for pid in task.read_text().split()]:
            if b"_store_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
                return pid if int(ignored, 16) >> signal.SIGTERM - 1 & 1 else None
        return None

    store = eventually(find_store, what="store that ignores SIGTERM")
    process.kill()
    eventually(lambda: all_gone([rank, store]), what="end of the rank and the store")


@pytest.fixture
def subreaper():
    """Make this process adopt what processes that it has started leave behind, as PID 1 would."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.usefixtures("subreaper")
def test_pid_1_reaps_what_a_lost_rank_has_left(monkeypatch):
    code = """if True:
        import subprocess, sys, time
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        time.sleep(60)
    """
    rank = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    child = ChildProcess(0, rank, None)
    loader = int(rank.stdout.readline())
    os.killpg(rank.pid, signal.SIGKILL)
    eventually(lambda: all_gone([rank.pid, loader]), what="end of both")
    rank.stdout.close()
    assert with_orphans([child]) == []
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        child.reap_adopted()
        assert child.reap() == -signal.SIGKILL, "its exit code is not lost"
        assert with_orphans([child]) == []
    assert not Path(f"/proc/{loader}").exists()


def test_the_guard_finds_processes_that_it_was_not_told_of():
    """The launcher may be killed between starting a process and telling the guard."""
    mark = f"PHALANX_TEST_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, name: each}, start_new_session=True
        )
        for each in (value, f"{value}0")
    ]
    for each in started:
        each.stdout.read(1)
    subprocess.run(
        [sys.executable, "-I", "-S", _orphan_guard.__file__, "5", mark],
        stdin=subprocess.DEVNULL,
        timeout=20,
        check=True,
    )
    ours, other = started
    assert ours.wait(10) == -signal.SIGTERM
    assert other.poll() is None
    other.kill()
    for each in started:
        each.communicate()
