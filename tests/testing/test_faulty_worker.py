"""Faults in launched workers: which worker they are for, and the script that it runs."""

import json
import os
import subprocess
import sys

import pytest

from phalanx.env import ElasticEnv
from phalanx.errors import InvalidArgument
from phalanx.testing.faults import Fault, delay, exit_abruptly, kill, stop

from .internals import current_worker, faults_from_json, faults_to_json

WORKER = "phalanx.testing._faulty_worker"

SCRIPT = """
import json, os, sys

if "phalanx" in sys.modules:
    from phalanx.testing import faults
    for step in range(3):
        faults.reach(f"step {step}")
        faults.reach("step")
if __name__ == "__main__":
    is_main = sys.modules["__main__"].__dict__ is globals()
    print(json.dumps([sys.argv, sys.path[0], os.path.abspath(__file__), is_main]))
    sys.exit(4)
"""


def call(directory, *args, **env):
    return subprocess.run(
        [sys.executable, *args],
        cwd=directory,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_fault_fires_in_its_worker_of_a_script(tmp_path):
    """Rank 1 dies at its fault, and is logged; rank 0 finds what `python script` gives it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    faults = [
        Fault("step", kill(), rank=0, incarnation=1),
        Fault("step", delay(0.01), rank=1),
        Fault("step", exit_abruptly(75), rank=1, nth=3),
        Fault("step 1", delay(0.01), once=True),
        Fault("step 2", delay(0.01), survivors=2),
    ]
    log = tmp_path / "log"
    variables = {"PHALANX_FAULTS": faults_to_json(faults), "PHALANX_FAULT_LOG": str(log)}
    command = ["code/train.py", "--lr", "1 2"]
    options = ["-m", "phalanx", "run", "-n2", "--linger=20", "--no-prefix", "-m", WORKER]
    done = call(tmp_path, *options, *command, **variables)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    fired = [(each["worker"], each["fired"]) for each in events if "fired" in each]
    assert [each for each in fired if each[1] != 3] == [("1.0", 1), ("1.0", 2)], done.stderr
    assert len(fired) == 3, "one fault fires once, in any worker, and one never"
    for worker in ("0.0", "1.0"):
        points = {each.get("reached") for each in events if each["worker"] == worker}
        assert points - {None} == {"step", "step 0", "step 1", "step 2"}
    plain = call(tmp_path, *command)
    assert plain.returncode == 4
    assert json.loads(plain.stdout)[0] == command
    assert done.stdout == plain.stdout, "rank 0 printed something else, or rank 1 did not die"


def test_a_worker_is_known_by_its_launcher():
    elastic = ElasticEnv(
        worker="2.1",
        store="127.0.0.1:1",
        ranks=3,
        min_ranks=1,
        has_begun=False,
        is_initial=False,
        channel=3,
    )
    ranks = {"RANK": "3", "WORLD_SIZE": "4"}
    assert current_worker({**ranks, **elastic.to_variables()}) == (2, 1)
    assert current_worker({**ranks, "TORCHELASTIC_RESTART_COUNT": "5"}) == (3, 5)
    assert current_worker(ranks) == (3, 0)
    assert current_worker({}) == (0, 0)


def test_faults_are_read_back():
    faults = [
        Fault("a", kill(15), rank=1, nth=2, optional=True, incarnation=None),
        Fault("b", stop(resume_after=0.5), incarnation=3, once=True, survivors=2),
    ]
    assert faults_from_json(faults_to_json(faults)) == faults


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[3]",
        '[{"point": "a"}]',
        '[{"point": "a", "action": 3}]',
        '[{"point": "a", "action": "explode"}]',
        '[{"point": "a", "action": "kill", "color": 1}]',
        '[{"point": "a", "action": "kill_supervisor"}]',
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(InvalidArgument):
        faults_from_json(text)


def test_a_fault_is_for_one_process_of_a_rank_or_for_all():
    first = Fault("a", kill(), rank=2)
    assert [first.applies_to(2, n) for n in range(3)] == [True, False, False]
    second = Fault("a", kill(), incarnation=1)
    assert [second.applies_to(7, n) for n in range(3)] == [False, True, False]
    every = Fault("a", kill(), rank=2, incarnation=None)
    assert [every.applies_to(2, n) for n in range(3)] == [True, True, True]
    assert not every.applies_to(1, 0)
