"""A script in a former standby behaves as ``python script`` does."""

import json
import os
import socket
import subprocess
import sys
import zipfile

import pytest

from phalanx.env import ElasticEnv

from .internals import encode_assignment, standby_command

pytestmark = pytest.mark.slow  # every standby imports torch and its compiler

DESCRIBE = """
    import os, pickle, sys

    class Mine:
        pass

    names = sorted(name for name in vars() if name.startswith("__"))
    print(__name__, __file__, __doc__, __package__, names)
    print(sys.argv, sys.path[:2], os.environ["RANK"], sys.flags.safe_path)
    print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine)
"""
SPAWN = """
    import dataclasses, multiprocessing

    @dataclasses.dataclass
    class Sample:
        value: int

    def make(value):
        return Sample(value)

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map_async(make, [1, 2]).get(60))
"""
AT_EXIT = """
    import atexit, pickle, sys

    class Mine:
        pass

    atexit.register(lambda: print(sys.argv, len(pickle.dumps(Mine())) > 0))
"""
END = """
    import sys
    sys.exit("not enough data")
"""
RAISE = """
    def fail():
        try:
            raise KeyError("a")
        except KeyError as error:
            raise ValueError("b") from error
    fail()
"""


def as_standby(target, environ, directory, **variables):
    """Run a target in a standby that becomes rank 1."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        command = standby_command([sys.executable, *target], theirs.fileno())
        mine.sendall(encode_assignment(environ, {**environ, "RANK": "1", **variables}))
        return run(command, environ, directory, pass_fds=[theirs.fileno()])


def run(command, environ, directory, **options):
    done = subprocess.run(
        command,
        env=environ,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("body", "module", "variables"),
    [
        (DESCRIBE, False, {}),
        (DESCRIBE, True, {}),
        (DESCRIBE, False, {"PYTHONSAFEPATH": "1"}),
        (SPAWN, False, {}),
        (AT_EXIT, True, {}),
        (END, False, {}),
        (RAISE, False, {}),
        (RAISE, True, {}),
    ],
)
def test_a_script_behaves_as_in_a_process_of_its_own(script, tmp_path, body, module, variables):
    """With a path that is relative, as most are."""
    script(body, name="job/train.py")
    (tmp_path / "library").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "library"), **variables}
    target = [*(["-m", "job.train"] if module else ["job/train.py"]), "--lr", "1"]
    expected = run([sys.executable, *target], {**environ, "RANK": "1"}, tmp_path)
    code, out, err = as_standby(target, environ, tmp_path)
    assert (code, out) == expected[:2], err
    # Python shows the frames of runpy, which are of no interest.
    shown = [line for line in expected[2].splitlines() if "runpy" not in line]
    assert err.splitlines() == shown


def test_a_script_behind_a_link_is_not_looked_for_elsewhere(script, tmp_path):
    script("print(__file__)", name="jobs/train.py")
    (tmp_path / "jobs" / "part").mkdir()
    (tmp_path / "link").symlink_to("jobs/part")
    for target in (["link/../train.py"], ["./jobs/train.py"]):
        expected = run([sys.executable, *target], os.environ, tmp_path)
        assert as_standby(target, dict(os.environ), tmp_path) == expected
        assert expected[0] == 0


def test_a_standby_that_cannot_import_torch_does_not_become_a_rank(script, tmp_path):
    """Modules may be half imported, after an error that a new process would not meet."""
    script("print('done')", name="train.py")
    script("raise OSError('no memory')", name="library/torch/__init__.py")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "library")}
    code, out, err = as_standby(["train.py"], environ, tmp_path)
    assert (code, out) == (1, "")
    assert "no memory" in err


def test_an_archive_runs_in_a_standby(tmp_path):
    archive = tmp_path / "job.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import sys, part; print(part.__name__, sys.argv)")
        file.writestr("part.py", "")
    environ = dict(os.environ)
    expected = run([sys.executable, "job.pyz", "a"], {**environ, "RANK": "1"}, tmp_path)
    assert as_standby(["job.pyz", "a"], environ, tmp_path) == expected
    assert expected[1] == "part ['job.pyz', 'a']\n"


def test_a_standby_whose_supervisor_is_gone_exits(tmp_path):
    mine, theirs = socket.socketpair()
    with theirs:
        mine.close()
        command = standby_command([sys.executable, "missing.py"], theirs.fileno())
        found = run(command, dict(os.environ), tmp_path, pass_fds=[theirs.fileno()])
    assert found == (0, "", "")


def test_a_former_standby_refuses_torchs_rendezvous(script, tmp_path):
    """It has imported torch before it was a worker of an elastic run."""
    script("import torch.distributed as dist; dist.init_process_group('gloo')", name="train.py")
    worker = ElasticEnv(
        worker="1.1",
        store="127.0.0.1:1",
        ranks=2,
        min_ranks=1,
        has_begun=True,
        is_initial=False,
        channel=0,
    )
    environ = dict(os.environ)
    code, _, err = as_standby(["train.py"], environ, tmp_path, **worker.to_variables())
    assert code == 1
    assert "init_process_group() is not available under `phalanx run --elastic`" in err


def test_an_assignment_has_what_differs():
    message = encode_assignment({"A": "1", "B": "2"}, {"A": "1", "B": "3", "RANK": "0"})
    assert message.endswith(b"\n")
    assert json.loads(message) == {"B": "3", "RANK": "0"}
