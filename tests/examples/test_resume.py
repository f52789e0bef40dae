"""The resume example: an interrupted run ends with the weights of an uninterrupted one."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from example_scripts import ROOT, load

from phalanx.checkpoint import CheckpointManager, PreemptionGuard
from phalanx.testing import RankFailures

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "resume.py"
OPTIONS = {"epochs": 4, "every": 20}
LAST = 4 * 29  # steps of four epochs at two ranks


def run_main(ctx, path, signals=()):
    """Run the example's `main` and return its output; rank 1 sends itself the given signals."""
    resume = load("resume", ctx)

    class Signalled(resume.Batches):
        def __iter__(self):
            for batch in super().__iter__():
                if self.rank == 1 and self.step in dict(signals):
                    os.kill(os.getpid(), dict(signals)[self.step])
                yield batch

    resume.Batches = Signalled
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            resume.main(path, **OPTIONS)
        except SystemExit as end:
            print(f"exit code {end.code}")
    return printed.getvalue()


def test_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, ranks):
    path = str(tmp_path / "run")

    def run(path, **signals):
        return ranks.run(run_main, 2, args=(path,), kwargs=signals, timeout=60)

    assert run(path, signals=[(50, signal.SIGTERM)]) == [
        "stopped on request after saving step 50 (SIGTERM)\nexit code 75\n",
        "exit code 75\n",
    ]
    assert CheckpointManager(path).steps() == [40, 50]

    with pytest.raises(RankFailures, match="SIGKILL"):
        run(path, signals=[(90, signal.SIGKILL)])
    assert CheckpointManager(path).steps() == [60, 80]

    resumed, _ = run(path)
    never_stopped, _ = run(str(tmp_path / "other"))
    assert resumed.startswith(f"weights after step {LAST}: ")
    assert resumed == never_stopped


def test_launcher_forwards_sigterm_and_reports_the_saved_step(tmp_path):
    """With one rank, since other tests cover forwarding and a second rank takes seconds."""
    path = tmp_path / "run"
    command = [sys.executable, "-m", "phalanx", "run", "-n", "1", SCRIPT, path]
    command += ["--every", "1", "--epochs", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not CheckpointManager(path).steps():
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            *_, last = process.stderr.read().splitlines()
        finally:
            process.kill()  # its guard ends the rank
    assert process.returncode == PreemptionGuard.EXIT_CODE
    said = re.fullmatch(r"phalanx: stopped on request after saving step (\d+) \(SIGTERM\)", last)
    assert CheckpointManager(path).steps()[-1] == int(said[1])
