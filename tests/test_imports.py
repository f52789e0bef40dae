"""What importing phalanx does, and what it leaves alone, in one fresh interpreter."""

import json
import subprocess
import sys

import pytest

from test_public_names import PROMISED

PROGRAM = """
import json, logging, os, sys, threading

environment = dict(os.environ)
found = {}

def torch_modules():
    return [name for name in sys.modules if "torch" in name]

import phalanx
found["dir"] = [name for name in dir(phalanx) if name[:1] != "_"]
found["torch for phalanx"] = torch_modules()
import phalanx.mesh.layout
found["torch for layouts"] = torch_modules()
import phalanx.checkpoint as checkpoint
found["torch for checkpoint"] = torch_modules()
found["early"] = "barriers" in dir(checkpoint)
checkpoint.barriers.Barrier, checkpoint.components.RankInfo
import phalanx.groups
found["threads"] = [thread.name for thread in threading.enumerate()]
found["environment is kept"] = dict(os.environ) == environment
found["handlers"] = len(logging.getLogger("phalanx").handlers)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """What the program found; it takes seconds, since it imports torch at last."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, timeout=60, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("part", ["phalanx", "layouts", "checkpoint"])
def test_torch_is_not_imported(found, part):
    assert found[f"torch for {part}"] == []


def test_dir_of_a_fresh_import_shows_all_public_names(found):
    public = PROMISED["phalanx"] - {"__version__"}
    assert public <= {*found["dir"]} <= public | {"env"}


def test_modules_of_checkpoint_are_imported_on_first_use(found):
    assert not found["early"]


def test_no_thread_is_started(found):
    assert found["threads"] == ["MainThread"]


def test_the_environment_and_logging_are_left_alone(found):
    assert found["environment is kept"]
    assert found["handlers"] == 0
