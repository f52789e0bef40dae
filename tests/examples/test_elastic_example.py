"""The elastic example: one hash at every world size, uninterrupted or resumed."""

import contextlib
import io
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from example_scripts import load

from phalanx.elastic import ElasticRun

pytestmark = pytest.mark.slow


def run_main(ctx, **options):
    """Run the example's `main` and return its output."""
    printed = io.StringIO()
    example = load("elastic", ctx)
    example.ElasticRun = partial(ElasticRun, group=ctx.group("shm"))
    defaults = {"steps": 60, "directory": None, "workers": 0, "stop_after": None}
    try:
        with contextlib.redirect_stdout(printed):
            example.main(**{**defaults, **options})
    finally:
        torch.use_deterministic_algorithms(False)
    return printed.getvalue()


def digest(output):
    return re.search(r"hash after 60 steps, world size \d: (\w{32})\n", output)[1]


def test_elastic_example_ends_with_one_hash(ranks, tmp_path):
    (alone,) = ranks.run(run_main, 1, timeout=60)
    accuracy = re.search(r"test accuracy: ([\d.]+)% of 360 images", alone)
    assert float(accuracy[1]) > 85
    output, *others = ranks.run(run_main, 3, kwargs={"workers": 2}, timeout=60)
    assert others == ["", ""], "rank 0 alone prints"
    assert digest(output) == digest(alone)
    directory = {"directory": str(tmp_path / "run")}
    ranks.run(run_main, 2, kwargs={**directory, "stop_after": 23}, timeout=60)
    output = ranks.run(run_main, 4, kwargs=directory, timeout=60)[0]
    assert "continuing after step 23" in output
    assert digest(output) == digest(alone)


def test_elastic_example_survives_kills():
    script = Path(__file__).parents[2] / "examples" / "elastic.py"
    command = [sys.executable, script, "--chaos", "--steps=80"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, before, after = re.search(
        r"(\d+) kills; undisturbed (\w{32}), with kills (\w{32})\n", done.stdout
    ).groups()
    assert int(kills) > 0
    assert before == after
