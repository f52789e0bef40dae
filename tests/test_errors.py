"""The tree of errors: what catches what, and how an error reads."""

import builtins
import pickle
import re

import pytest

from phalanx import errors


def test_the_docstring_draws_the_whole_tree():
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__)) | {"PhalanxError"}
    real = {name for name in errors.__all__ if name != "RankReport"}
    assert drawn == real


def test_the_docstring_draws_every_built_in_parent():
    for name, told in re.findall(r"── (\w+) \(([\w, ]+)\)", errors.__doc__):
        for parent in told.split(", "):
            assert issubclass(getattr(errors, name), getattr(builtins, parent)), name


def test_a_timeout_carries_its_facts():
    report = errors.RankReport(
        2, "idle", "broadcast float32[4]", 11, "train.py:9", "load.py:3 in get"
    )
    error = errors.CollectiveTimeout(
        "allreduce timed out",
        group="world",
        operation="allreduce float32[10]",
        sequence=12,
        ranks=[2],
        reports={2: report},
    )
    assert (error.missing, error.sequence, error.group) == ((2,), 12, "world")
    assert error.reports[2].site == "train.py:9"
    first, second = str(error).splitlines()
    assert first == "allreduce timed out"
    assert second == (
        "  rank 2: alive, in user code, last call was broadcast float32[4] #11, at train.py:9, "
        "now at load.py:3 in get"
    )


@pytest.mark.parametrize(
    "state", ["waiting", "idle", "failed", "busy", "silent", "stopped", "left", "dead"]
)
def test_every_state_has_words(state):
    assert str(errors.RankReport(0, state)).startswith("rank 0: ")


@pytest.mark.parametrize("kind", [errors.UnknownOption, errors.UnknownAxis])
def test_what_is_unknown_reads_plainly(kind):
    assert str(kind("no option 'x'")) == "no option 'x'"


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "RankReport"])
def test_errors_survive_pickling(name):
    error = getattr(errors, name)("what happened")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
