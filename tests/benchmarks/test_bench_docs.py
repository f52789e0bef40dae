"""Writing benchmark figures into the documentation."""

import itertools

import pytest
from benchmarks.__main__ import main
from benchmarks.entry import Case
from benchmarks.machine import Machine
from benchmarks.page import refresh
from benchmarks.picture import _apart, draw
from benchmarks.results import CaseResult, EntryResult, Results
from benchmarks.stats import Compare
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

PAGE = """# Figures

Before.

<!-- figures: other -->
kept
<!-- end of figures -->

<!-- figures: allreduce -->
old
<!-- end of figures -->

After.
"""


def results(name="allreduce"):
    cases = [
        CaseResult(
            case=Case(2, {"bytes": size}),
            samples={"shared": [size * 1e-9, size * 2e-9], "gloo": [size * 1e-8, size * 2e-8]},
            calls={"shared": 1, "gloo": 1},
            threads=1,
            others=None,
        )
        for size in (4, 1 << 10, 1 << 20)
    ]
    machine = Machine("2026-01-01T00:00:00", "A processor", 2, 0.1, "Linux 6", "3.11", "2.13")
    return Results(machine, [EntryResult(name, "All \\1", "gloo", Compare.SPEED, (), cases)])


def test_figures_are_replaced_and_prose_is_kept():
    page = refresh(PAGE, results())
    assert page.startswith(PAGE[: PAGE.index("old")])
    assert page.endswith("\n\n<!-- end of figures -->\n\nAfter.\n")
    assert "| 2 | 4 B | shared |" in page
    assert "old" not in page
    assert refresh(page, results()) == page


def test_an_entry_without_a_marker_is_appended():
    page = refresh(PAGE, results("new"))
    assert page.startswith(PAGE)
    assert "## All \\1\n\n<!-- figures: new -->\nA processor" in page
    assert refresh(page, results("new")) == page


def test_equal_figures_give_identical_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "again").mkdir()
    first, second = draw(results(), tmp_path), draw(results(), tmp_path / "again")
    assert [path.name for path in first] == ["allreduce.png", "allreduce.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert draw(results("recorder"), tmp_path) == []


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6).map(sorted))
def test_labels_do_not_overlap(wanted):
    placed = _apart(wanted, [0.3] * len(wanted))
    assert all(b - a > 0.299 for a, b in itertools.pairwise(placed))
    if all(b - a >= 0.3 for a, b in itertools.pairwise(wanted)):
        assert placed == wanted


def test_saved_results_can_be_published(tmp_path):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "out.json"
    kept.write_text(results().to_json())
    (tmp_path / "benchmarks.md").write_text(PAGE)
    done = CliRunner().invoke(main, ["--show", str(kept), "--docs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "benchmarks.md").read_text() == refresh(PAGE, results())
    assert (tmp_path / "allreduce.svg").exists()


def test_a_quick_run_is_not_written_to_the_docs(tmp_path):
    done = CliRunner().invoke(main, ["recorder", "--quick", "--docs", str(tmp_path)])
    assert done.exit_code == 2
    assert "mean nothing" in done.output
