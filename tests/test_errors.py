"""The exception tree, and the wording of all error messages."""

import ast
import builtins
import pickle
import re
from pathlib import Path

import pytest

from phalanx import errors


def test_the_docstring_lists_every_exception():
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__)) | {"PhalanxError"}
    real = {name for name in errors.__all__ if name != "RankReport"}
    assert drawn == real


def test_the_docstring_lists_builtin_parents_correctly():
    for name, listed in re.findall(r"── (\w+) \(([\w, ]+)\)", errors.__doc__):
        for parent in listed.split(", "):
            assert issubclass(getattr(errors, name), getattr(builtins, parent)), name


def test_a_timeout_carries_ranks_sequence_and_reports():
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
        "  rank 2: alive, in user code: load.py:3 in get "
        "(last call: broadcast float32[4] #11 at train.py:9)"
    )


@pytest.mark.parametrize(
    "state", ["waiting", "idle", "failed", "busy", "silent", "stopped", "left", "shut down", "dead"]
)
def test_every_state_has_a_text(state):
    assert str(errors.RankReport(0, state)).startswith("rank 0: ")


@pytest.mark.parametrize("kind", [errors.UnknownOption, errors.UnknownAxis])
def test_a_key_error_prints_its_message_not_the_repr(kind):
    assert str(kind("no option 'x'")) == "no option 'x'"


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "RankReport"])
def test_errors_are_picklable(name):
    error = getattr(errors, name)("what happened")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


OLD_WORDS = re.compile(
    r"\b(hall|company|shelf|scribe|olds|meeting|meets?|met|alike|apart|roll call|no use|nobody|"
    r"somebody|told|tells?|whoever|who|goodbye|heard|any more|of its own|go(es)? on|is meant|"
    r"did not come|has come|have come|came|as can be)\b",
    re.IGNORECASE,
)
"""Words of earlier versions that are not standard in the field."""


def message_template(node):
    """Return a string expression with ``{}`` for its values; None if it is not a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return None


def raised_messages():
    """Yield the module, line and template of each message of an exception in the package."""
    kinds = {*errors.__all__, "ValueError", "TypeError", "RuntimeError"} - {"RankReport"}
    root = Path(errors.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            template = message_template(node.args[0])
            if name in kinds and template is not None:
                yield f"{path.relative_to(root)}:{node.lineno}", template


def test_messages_use_no_obsolete_vocabulary():
    found = dict(raised_messages())
    assert len(found) > 300, "the collection does not work"
    odd = {place: template for place, template in found.items() if OLD_WORDS.search(template)}
    assert odd == {}


def test_messages_have_no_stray_space_or_exclamation():
    odd = {
        place: template
        for place, template in raised_messages()
        if template != template.strip() or template.endswith("!") or "  " in template
    }
    assert odd == {}
