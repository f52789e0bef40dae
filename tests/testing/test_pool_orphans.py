"""No rank process outlives the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.testing import RankFailures

PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from testing import test_pool_orphans
from phalanx.testing import RankPool

with RankPool(2) as pool:
    pids = pool.run(test_pool_orphans.report_pid)
    print(*pids, flush=True)
    pool.run(test_pool_orphans.hang, kwargs={"started": sys.argv[2]}, timeout=60)
"""


def report_pid(ctx):
    return os.getpid()


def hang(ctx, started):
    Path(started, str(ctx.rank)).touch()
    time.sleep(60)


def wait_until(condition, *, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_killed(tmp_path):
    here = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", PARENT, here, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert all(map(is_running, pids))
        parent.kill()
    wait_until(lambda: not any(map(is_running, pids)))


def start_child(ctx, path):
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_child_processes_of_a_body_end_with_its_rank(ranks, tmp_path):
    path = tmp_path / "child"
    with pytest.raises(RankFailures, match="SIGKILL"):
        ranks.run(start_child, 1, args=(path,))
    wait_until(lambda: not is_running(int(path.read_text())))
