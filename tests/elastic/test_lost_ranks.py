"""A short elastic run that loses ranks, for the default suite; and the list of fault points.

`test_chaos` kills at every point.
"""

import re
from pathlib import Path

import phalanx
from phalanx.testing import faults
from phalanx.testing.faults import Fault, kill

from .chaos import POINTS, RUNS, TESTED_ELSEWHERE, Training, faults_of_run, train

SOURCE = Path(phalanx.__file__).parent


def test_a_run_that_loses_ranks_has_the_bits_of_one_that_does_not(tmp_path):
    """One in backward, and another while it runs what the first has left."""
    kills = [
        Fault("elastic:backward", kill(), rank=1, nth=7),
        Fault("elastic:redo", kill(), rank=2),  # while it runs what rank 1 has left
    ]
    outcome = train(Training("conv", steps=12), tmp_path, ranks=3, faults=kills, timeout=120)
    assert {"1.0", "2.0"} <= outcome.lost


def points_in_source():
    """Return the fault points that trainings can reach, as the source names them."""
    found = set()
    for package in ("elastic", "checkpoint", "ddp"):
        for path in (SOURCE / package).rglob("*.py"):
            text = path.read_text()
            found |= {*re.findall(r'\breach\(\s*"([^"]+)"', text)}
            # A helper adds the prefix.
            found |= {f"checkpoint:{name}" for name in re.findall(r'\bfault_point\("(\w+)"', text)}
    return found


def test_every_point_in_the_source_is_killed_at():
    """A new fault point needs an entry in `chaos`."""
    here = {point for point in POINTS if not point.startswith("user:")}
    assert points_in_source() == here | TESTED_ELSEWHERE
    planned = [each for number in range(len(RUNS)) for each in faults_of_run(number)]
    assert {each.point for each in planned} == {*POINTS}


def test_every_point_of_an_elastic_run_is_documented():
    points = {point for point in points_in_source() if not point.startswith("checkpoint:")}
    assert [point for point in points if f"``{point}``" not in faults.__doc__] == []
