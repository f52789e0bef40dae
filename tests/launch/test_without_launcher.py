"""Scripts started without a launcher: a group of one rank, with one warning."""

import logging

import pytest
import torch

from phalanx.env import is_launched
from phalanx.errors import InvalidArgument
from phalanx.groups import new_group

from .internals import _store

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    _store._warn_no_launcher.cache_clear()
    yield monkeypatch
    _store._warn_no_launcher.cache_clear()


def test_without_a_launcher_a_group_of_one_is_formed_with_a_warning(alone, caplog):
    alone.setattr("sys.argv", ["/home/me/train.py", "--lr", "0.1"])
    for _ in range(2):
        group = new_group()
        assert (group.rank(), group.size()) == (0, 1)
        tensor = torch.ones(3)
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [1.0] * 3
        group.shutdown()
    (line,) = caplog.messages
    assert line.startswith("phalanx: no launcher, so this is rank 0 of 1")
    assert line.endswith("phalanx run -n 4 train.py")
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, "1") for name in PLACE), ("SLURM_STEP_NUM_TASKS", "4"), ("PMIX_RANK", "0")],
)
def test_an_incomplete_environment_is_an_error(alone, name, value):
    alone.setenv(name, value)
    assert is_launched()
    with pytest.raises(InvalidArgument, match="is not set|environment variable"):
        new_group()


def test_env_rendezvous_without_a_launcher_is_an_error(alone):
    assert not is_launched()
    with pytest.raises(InvalidArgument, match="WORLD_SIZE is not set"):
        new_group(store="env://")
    alone.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert not is_launched()


@pytest.mark.parametrize(
    ("environ", "launched"),
    [
        ({"OMPI_COMM_WORLD_SIZE": ""}, False),
        ({"SLURM_STEP_NUM_TASKS": " 1", "RANK": " ", "PMIX_RANK": " "}, False),
        ({"PMI_SIZE": " 2"}, True),
        ({"PMIX_RANK": "1"}, True),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "1"}, True),
    ],
)
def test_other_launchers_are_detected_by_their_variables(environ, launched):
    assert is_launched(environ) == launched
