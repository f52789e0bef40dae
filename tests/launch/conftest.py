"""Fixtures that run the launcher on small scripts. Tests poll with a deadline and never sleep."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from phalanx.launch.cli import main

DEADLINE = 20.0


@pytest.fixture(autouse=True)
def no_other_runs(tmp_path, monkeypatch):
    """Keep `phalanx ps` from listing the runs of other tests."""
    monkeypatch.setattr("phalanx.launch._run_directory.RUNTIME_DIRECTORIES", tmp_path)
    monkeypatch.setattr("phalanx.launch._run_directory.TEMPORARY_DIRECTORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def eventually(condition, *, what="it", seconds=DEADLINE):
    """Return the first true value of `condition`; fail after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"no {what() if callable(what) else what} in {seconds} s")


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def read_pid(path):
    """Wait until a rank has written its pid (or a child's) and return it."""
    return int(eventually(lambda: path.exists() and path.read_text(), what=path.name))


@pytest.fixture
def script(tmp_path):
    """Write a script and return its path."""

    def write(body, *, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Run a `phalanx` command that starts no process, in this process."""
    monkeypatch.chdir(tmp_path)

    def call(*args, env=None):
        done = CliRunner(env=env).invoke(main, [*map(str, args)], prog_name="phalanx")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    return call


@pytest.fixture
def phalanx(tmp_path, foreground):
    """Run `phalanx` in a new process and return the completed process."""

    def call(*args, env=None, stdin=subprocess.DEVNULL):
        # -P, like the installed command: do not import from the current directory.
        command = [sys.executable, "-P", "-m", "phalanx", *map(str, args)]
        return subprocess.run(
            command,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=3 * DEADLINE,
            cwd=tmp_path,
            env=clean_env(env),
            check=False,
        )

    return call


WITH_TIMING = """
import functools, phalanx.launch
from phalanx.launch import _supervisor, cli
timing = _supervisor.SupervisorTiming(**{})
phalanx.launch.supervise = functools.partial(_supervisor.supervise, timing=timing)
cli.main()
"""


@pytest.fixture
def launcher(tmp_path, foreground):
    """Start `phalanx` and return the process; it is killed at the end of the test."""
    started = []

    def start(
        *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=None, before=(), timing=None
    ):
        program = ["-m", "phalanx"] if timing is None else ["-c", WITH_TIMING.format(timing)]
        command = [*before, sys.executable, *program, *map(str, args)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            cwd=tmp_path,
            env=clean_env(env),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def clean_env(extra=None):
    """Return the environment without settings for threads, colour and imports."""
    removed = ("OMP_NUM_THREADS", "NO_COLOR", "TERM", "PYTHONPATH", "PYTHONUNBUFFERED")
    own = {name: value for name, value in os.environ.items() if name not in removed}
    return {**own, **(extra or {})}


def unlabelled(text, rank):
    """Return the lines of one rank, without their label."""
    label = f"[rank {rank}] "
    return [line.removeprefix(label) for line in text.splitlines() if line.startswith(label)]
