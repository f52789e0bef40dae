"""Failed ranks: the rank that is named, the output, the exit code, and restarts."""

import re
import subprocess
import sys

import pytest

from .conftest import clean_env

# Waits until a file exists.
AWAIT = """
    import os, pathlib, sys, time

    def wait_for(name):
        deadline = time.monotonic() + 20
        while not pathlib.Path(name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.005)

    rank = int(os.environ["RANK"])
"""


@pytest.mark.parametrize(
    ("death", "words", "code"),
    [
        ("sys.exit(3)", "exit code 3", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 137),
        # Not sent by the launcher.
        ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM", 143),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", "signal 35", 163),
    ],
)
def test_the_exit_code_is_that_of_the_failed_rank(phalanx, script, death, words, code):
    done = phalanx("run", "-n", 1, script(f"import os, signal, sys\n{death}"))
    assert done.returncode == code
    assert f"phalanx: rank 0 failed first: {words}" in done.stderr


def test_the_first_failure_is_named_before_later_ones(phalanx, script):
    path = script(
        AWAIT
        + """
    if rank == 1:
        # Rank 2 fails when this process is gone.
        pathlib.Path("pid").write_text(str(os.getpid()))
        pathlib.Path("written").touch()
        sys.exit(7)
    if rank == 2:
        wait_for("written")
        while pathlib.Path("/proc", pathlib.Path("pid").read_text()).exists():
            time.sleep(0.005)
        sys.exit("lost rank 1")
    wait_for("never")
    """
    )
    done = phalanx("run", "-n", 4, "--linger", 1, path)
    assert done.returncode == 7
    assert "phalanx: rank 1 failed: exit code 7; stopping the others" in done.stderr
    report = done.stderr[done.stderr.index("phalanx: rank 1 failed first") :].splitlines()
    assert report[0] == "phalanx: rank 1 failed first: exit code 7"
    assert re.fullmatch(
        r"phalanx: rank 2 failed \d\.\d\d s later: exit code 1: lost rank 1", report[1]
    )
    assert report[2:] == ["phalanx: ranks 0, 3 stopped"]


def test_the_first_traceback_is_repeated_at_the_end(phalanx, script):
    path = script(
        AWAIT
        + """
    if rank == 1:
        print("a warning that nobody needs", file=sys.stderr)
        raise RuntimeError("the cause")
    wait_for("never")
    """
    )
    done = phalanx("run", "-n", 2, "--linger", 0, path)
    report = done.stderr[done.stderr.index("failed first") :].splitlines()
    assert report[1] == "    Traceback (most recent call last):"
    assert "    RuntimeError: the cause" in report
    assert not any("warning" in line for line in report)


def test_a_long_traceback_is_truncated(phalanx, script):
    path = script(
        """
        import sys
        print("Traceback (most recent call last):", file=sys.stderr)
        for i in range(100):
            print(f"  frame {i}", file=sys.stderr)
        sys.exit("the end")
        """
    )
    report = phalanx("run", "-n", 1, path).stderr.split("failed first")[1].splitlines()
    assert report[1:] == [
        "    Traceback (most recent call last):",
        "      (80 lines not shown)",
        *(f"      frame {i}" for i in range(80, 100)),
        "    the end",
    ]


def test_linger_0_stops_the_other_ranks_immediately(phalanx, script):
    path = script(AWAIT + "    sys.exit(3) if rank == 0 else wait_for('never')")
    done = phalanx("run", "-n", 2, "--linger", 0, path)
    assert done.returncode == 3
    assert "phalanx: rank 1 stopped" in done.stderr


def test_an_early_successful_exit_does_not_stop_the_others(phalanx, script):
    path = script(
        AWAIT
        + """
    if rank == 0:
        pathlib.Path("pid").write_text(str(os.getpid()))
        pathlib.Path("written").touch()
    else:
        wait_for("written")
        while pathlib.Path("/proc", pathlib.Path("pid").read_text()).exists():
            time.sleep(0.005)
        print("still here")
    """
    )
    done = phalanx("run", "-n", 2, path)
    assert (done.returncode, done.stdout) == (0, "[rank 1] still here\n")


ATTEMPTS = """
    import os, pathlib, sys
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    print(count, os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["TORCHELASTIC_RUN_ID"])
    if rank == "1" and count in sys.argv[1:]:
        sys.exit(5)
"""


def test_all_ranks_restart_after_a_failure(phalanx, script):
    done = phalanx("run", "-n", 2, "--max-restarts", 3, script(ATTEMPTS), "0", "1")
    assert done.returncode == 0
    assert "restarting all ranks: attempt 2 of 4" in done.stderr
    assert "restarting all ranks: attempt 3 of 4" in done.stderr
    lines = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
    counts, limits, runs = zip(*(line.split() for line in lines), strict=True)
    assert sorted(set(counts)) == ["0", "1", "2"]
    assert (set(limits), len(set(runs))) == ({"3"}, 1)


def test_restarts_stop_at_max_restarts(phalanx, script):
    done = phalanx("run", "-n", 2, "--max-restarts", 1, script(ATTEMPTS), "0", "1")
    assert done.returncode == 5
    assert done.stderr.count("restarting all ranks") == 1
    assert "phalanx: gave up after 2 attempts" in done.stderr


# Finds the launcher's other child.
STORE = """
    import signal

    def command(pid):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()

    launcher = os.getppid()
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (store,) = [int(pid) for pid in children if b"phalanx.launch._store_server" in command(pid)]
"""


def test_the_death_of_the_store_is_a_failure(phalanx, script):
    path = script(AWAIT + STORE + "    os.kill(store, signal.SIGKILL); wait_for('never')")
    done = phalanx("run", "-n", 1, "--linger", 0, path)
    assert done.returncode == 137
    assert "phalanx: the store failed first: SIGKILL" in done.stderr
    assert "phalanx: rank 0 stopped" in done.stderr


def test_the_store_does_not_import_from_the_working_directory(phalanx, script):
    script("raise SystemExit('loaded by mistake')", name="socket.py")
    has_torch = """
    while b"libtorch" not in pathlib.Path(f"/proc/{store}/maps").read_bytes():
        time.sleep(0.005)
    """
    path = script(AWAIT + STORE + has_torch, name="elsewhere/train.py")
    done = phalanx("run", "-n", 1, path)
    assert done.returncode == 0, done.stderr


def test_failures_are_seen_if_the_caller_ignores_sigchld(script, tmp_path):
    path = script("raise SystemExit(3)")
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'phalanx', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "-n", "2", path],
        cwd=tmp_path,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
