"""The example of `make demo`: under both launchers, and with diverging ranks."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
from example_scripts import ROOT, load

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "digits.py"
LAUNCHERS = {
    "phalanx": ["phalanx", "run", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2"],
}


def launched(launcher, *args):
    # One thread, as both launchers would choose; torchrun warns if it is not set.
    return subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], SCRIPT, *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def facts(output):
    """Parse the output: accuracy in percent, speed, and the line about the weights."""
    accuracy = re.search(r"test accuracy: ([\d.]+)% of 360 images$", output, re.MULTILINE)
    speed = re.search(r"speed: ([\d,]+) samples per second$", output, re.MULTILINE)
    weights = re.search(r"weights: (.*)$", output, re.MULTILINE)
    assert accuracy, output
    assert speed, output
    assert weights, output
    return float(accuracy[1]), int(speed[1].replace(",", "")), weights[1]


def test_digits_trains_under_phalanx_run():
    done = launched("phalanx")
    assert done.returncode == 0, done.stderr
    accuracy, speed, weights = facts(done.stdout)
    assert accuracy > 97
    assert speed > 0
    assert re.fullmatch(r"identical on 2 ranks: [0-9a-f]{8}", weights)
    assert "20/20" in done.stderr  # the progress bar finished
    assert len(done.stdout.splitlines()) == 3, "rank 0 alone prints, and nothing else"


def test_digits_runs_under_torchrun():
    done = launched("torchrun", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    accuracy, _, weights = facts(done.stdout)
    assert accuracy > 50
    assert weights.startswith("identical on 2 ranks: ")
    assert len(done.stdout.splitlines()) == 3, "rank 0 alone prints, and nothing else"


def run_main(ctx, *, drift):
    """Run the example's `main` for one epoch; return its exit code and output."""
    digits = load("digits", ctx)
    if drift:
        digits.DDP = lambda module, **_: module
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            digits.main(epochs=1)
        except SystemExit as end:
            return end.code, printed.getvalue()
    return 0, printed.getvalue()


@pytest.mark.parametrize("size", [1, 3])
def test_digits_runs_at_any_world_size(ranks, size):
    (code, output), *others = ranks.run(run_main, size, kwargs={"drift": False}, timeout=60)
    assert code == 0
    assert facts(output)[2].startswith(f"identical on {size} ranks: ")
    assert others == [(0, "")] * (size - 1)


def test_diverging_ranks_are_reported(ranks):
    (code, output), (other_code, _) = ranks.run(run_main, 2, kwargs={"drift": True}, timeout=60)
    assert (code, other_code) == (1, 1)
    assert re.fullmatch(r"DIFFERENT on 2 ranks: [0-9a-f]{8} [0-9a-f]{8}", facts(output)[2])
