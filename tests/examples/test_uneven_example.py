"""The example of uneven data."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ("examples/uneven.py", "--epochs", "6")


def test_ranks_with_different_amounts_of_data_learn_to_read():
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "-n", "3", "--no-prefix", *SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^rank \d: (\d+) steps", done.stdout, re.MULTILINE)
    assert steps == ["8", "15", "23"]
    assert "idle: 33.3% of steps" in done.stdout
    accuracy = re.search(r"test accuracy: ([\d.]+)% of 360 images", done.stdout)
    assert float(accuracy[1]) > 93
