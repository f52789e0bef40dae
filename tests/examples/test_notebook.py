"""The notebook runs in a kernel, and prints what it was saved with."""

import re

import nbformat
import pytest
from example_scripts import ROOT
from nbclient import NotebookClient

pytestmark = [
    pytest.mark.slow,
    # Of the kernel's client, not of ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NOTEBOOK = ROOT / "examples" / "spawn.ipynb"


def printed(notebook):
    """Return what each cell printed."""
    return [
        "".join(each.text for each in cell.outputs if each.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def comparable(text):
    """Return a text without numbers and without the end of rank 0, which the first failure ends."""
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"(?m)^rank 0 (failed|raised|stopped).*\n", "", text))


def test_spawn_notebook_prints_what_it_was_saved_with(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    saved = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(fresh, timeout=100, coalesce_streams=True).execute()
    assert [*map(comparable, printed(fresh))] == [*map(comparable, printed(saved))]

    _, progress, results, failure = printed(fresh)
    losses = [
        float(loss) for loss in re.findall(r"^\[rank 0\] step \d+: loss (\S+)$", progress, re.M)
    ]
    assert losses == sorted(losses, reverse=True)
    assert re.findall(r"^rank (\d): loss", results, re.M) == ["0", "1"]
    assert results.endswith("equal weights: True\n")
    assert failure.startswith("rank 1 failed first: exit code 1\n    Traceback")
    assert "GroupAborted" not in failure, "rank 1 has not ended its program as intended"
    assert "mean = batch @ torch.ones(4)" in failure, "the source is in the notebook only"
