"""The example that is stopped and goes on: it ends with the weights of one that never was."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.checkpoint import STOPPED, Folder
from phalanx.testing import RankFailures

SCRIPT = Path(__file__).parents[2] / "examples" / "resume.py"
OPTIONS = {"epochs": 4, "every": 20}
LAST = 4 * 29  # steps of four epochs at two ranks

# The example, but rank 1 waits before a step until it is told to go on.
PAUSING = f"""
    import importlib.util, pathlib, sys, time

    spec = importlib.util.spec_from_file_location("resume", {str(SCRIPT)!r})
    resume = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resume)

    class Pausing(resume.Batches):
        def __iter__(self):
            for batch in super().__iter__():
                if self.rank == 1 and self.step == int(sys.argv[1]):
                    pathlib.Path("paused").touch()
                    while not pathlib.Path("go").exists():
                        time.sleep(0.005)
                yield batch

    resume.Batches = Pausing
    resume.main("run", **{OPTIONS})
"""


@contextlib.contextmanager
def paused(folder, step):
    """Start two ranks, and give the launcher when rank 1 waits at a step."""
    script = folder / "pausing.py"
    script.write_text(re.sub("^    ", "", PAUSING, flags=re.MULTILINE))
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", "run", "-n", "2", script, str(step)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while not (folder / "paused").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.005)
            yield process
        finally:
            process.kill()  # its guard ends the ranks


def run_main(ctx, path, kill_at=None):
    """Run the example's `main` to its end, and return what it printed; or let rank 1 be killed."""
    spec = importlib.util.spec_from_file_location("resume", SCRIPT)
    resume = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resume)
    resume.new_group = ctx.group

    class Mortal(resume.Batches):
        def __iter__(self):
            for batch in super().__iter__():
                if self.rank == 1 and self.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

    resume.Batches = Mortal
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        resume.main(path, **OPTIONS)
    return printed.getvalue()


def test_stopped_and_killed_it_ends_with_the_weights_of_a_run_that_never_was(tmp_path, ranks):
    with paused(tmp_path, 50) as process:
        process.send_signal(signal.SIGTERM)
        while "phalanx: SIGTERM: passed on" not in process.stderr.readline():
            pass
        (tmp_path / "go").touch()
        _, errors = process.communicate()
    assert process.returncode == STOPPED, errors
    assert errors.splitlines()[-1] == "phalanx: stopped on request after saving step 50 (SIGTERM)"
    path = str(tmp_path / "run")
    assert Folder(path).steps() == [40, 50]

    with pytest.raises(RankFailures, match="SIGKILL"):
        ranks.run(run_main, 2, args=(path,), kwargs={"kill_at": 90}, timeout=60)
    assert Folder(path).steps() == [60, 80]

    resumed, _ = ranks.run(run_main, 2, args=(path,), timeout=60)
    never_stopped, _ = ranks.run(run_main, 2, args=(str(tmp_path / "other"),), timeout=60)
    assert resumed.startswith(f"weights after step {LAST}: ")
    assert resumed == never_stopped
