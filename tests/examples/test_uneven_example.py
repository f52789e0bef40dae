"""The uneven inputs example."""

import contextlib
import io
import re

import pytest
from example_scripts import load

pytestmark = pytest.mark.slow


def run_main(ctx):
    """Run the example's `main` and return its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        load("uneven", ctx, backend="shm").main(epochs=6)
    return printed.getvalue()


def test_uneven_example_trains(ranks):
    output, *others = ranks.run(run_main, 3, timeout=60)
    assert others == ["", ""], "rank 0 alone prints"
    assert re.findall(r"^rank \d: (\d+) steps", output, re.MULTILINE) == ["8", "15", "23"]
    assert "idle: 33.3% of steps" in output
    accuracy = re.search(r"test accuracy: ([\d.]+)% of 360 images", output)
    assert float(accuracy[1]) > 93
