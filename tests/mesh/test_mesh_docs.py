"""docs/mesh.md: its code runs, its values are right, and its pictures are current."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from phalanx.groups import process_group
from phalanx.testing import ThreadRanks

from .internals import plan_mesh

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "mesh.md").read_text()
PICTURES = runpy.run_path(str(DOCS / "mesh/pictures.py"))["pictures"]()


def blocks(language):
    """Return the code blocks of the page, except those on to_torch, which are tested elsewhere."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if "to_torch" not in block]


def statements():
    """Yield each statement of the page, and its documented value, if any."""
    for block in blocks("python"):
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            _, arrow, promised = lines[statement.end_lineno - 1].partition("# -> ")
            yield ast.get_source_segment(block, statement), promised if arrow else None


# Parsed here and not by the ranks: Python 3.11 sometimes fails to parse on several threads.
STATEMENTS = list(statements())


def read_along(context):
    """Run the page; returns each value together with the documented one."""
    names, seen = {"print": lambda *_: None}, []
    with process_group(context.group()):
        for source, promised in STATEMENTS:
            if promised is None:
                exec(source, names)  # noqa: S102 - our own document
            else:
                seen.append((source, repr(eval(source, names)), promised))  # noqa: S307
        drawn = names["mesh"].draw(ranks_per_host=8)
        names["mesh"].shutdown()
    return seen, drawn


@pytest.fixture(scope="module")
def read():
    return ThreadRanks(16).run(read_along)


def test_documented_values_are_those_of_rank_6(read):
    seen, _ = read[6]
    assert len(seen) > 20
    for source, value, promised in seen:
        assert value == promised, source


def test_the_documented_drawing_is_current(read):
    _, drawn = read[6]
    assert f"{drawn}\n" in blocks("text")


def test_the_documented_plan_is_current():
    planned = plan_mesh("8x16x8", names="dp,pp,tp", rank=513, hosts=128).text()
    [shown] = blocks("console")
    assert shown.partition("\n")[2] == f"{planned}\n"


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_current(name):
    current = (DOCS / "mesh" / name).read_text() == PICTURES[name]
    assert current, "run python docs/mesh/pictures.py"


def test_every_picture_is_on_the_page():
    assert set(re.findall(r"\(mesh/(.*?\.svg)\)", TEXT)) == set(PICTURES)
