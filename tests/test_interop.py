"""What `make interop` takes for a failure."""

import subprocess
import sys
from pathlib import Path

import pytest
from interop import runner, table
from interop.catalog import Launcher, Mode, Program, command, environment

ROOT = Path(__file__).parents[1]
PROGRAM = Program("torch", ("train.py",), ("case",))
SCRIPT = Program("Accelerate", ("-m", "package.test_ops"))


def run(
    *, status=0, ranks=2, group="phalanx", ddp="phalanx", output="", digests=("a", "a"), **given
):
    """Return a run of PROGRAM in which all went well, but for what is given."""
    records = {
        ("case", rank): {
            "world": ranks,
            "loss": (0.5).hex(),
            "digest": digests[rank],
            "replicated": True,
            "group": group,
            "ddp": ddp,
            "seconds": [0.01] * 6,
            **given,
        }
        for rank in range(ranks)
    }
    return runner.Run(status, 1.0, records, output)


def row(drop_in, *, gloo=None):
    theirs = gloo or run(group="torch", ddp="torch")
    runs = {Mode.GLOO: [theirs], Mode.RUN: [run(group="torch", ddp="torch")]}
    return runner.Row(PROGRAM, "case", {**runs, Mode.DROP_IN: [drop_in]})


def test_equal_results_on_phalanx_are_no_failure():
    assert list(runner.verdicts([row(run())])) == []
    assert "same bits" in table.reporting_table([row(run())])


@pytest.mark.parametrize(
    ("drop_in", "reason"),
    [
        (run(loss=(0.25).hex()), "differs from torch: loss 0.5 and 0.25"),
        (run(digests=("b", "b")), "differs from torch"),
        (run(digests=("a", "b")), "ranks differ"),
        (run(ranks=1), "1 of 2 ranks"),
        (run(group="torch"), "backend not replaced"),
        (run(ddp="torch"), "DDP not replaced"),
        (run(status=1, output="[rank 1] phalanx.errors.PeerLost: gone\n"), "PeerLost"),
        (runner.Run(None, 180.0), "no end"),
        (runner.Run(0, 1.0), "reported nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_from_torch_is_a_failure(drop_in, reason):
    (found,) = runner.verdicts([row(drop_in)])
    assert found.startswith("train: case: ")
    assert reason in found


def test_our_own_program_must_pass_with_torch():
    assert list(runner.verdicts([row(run(), gloo=runner.Run(1, 1.0, output="KeyError: 3\n"))])) == [
        "train: case: fails with torch itself: KeyError"
    ]


def test_a_script_that_fails_with_torch_is_shown_and_not_judged():
    failed = runner.Run(1, 1.0, output="[rank0]: KeyError: None\nx.ChildFailedError: \n")
    runs = {mode: [failed] for mode in Mode}
    assert list(runner.verdicts([runner.Row(SCRIPT, "", runs)])) == []
    assert "fails: KeyError | fails: KeyError" in table.script_table([runner.Row(SCRIPT, "", runs)])
    runs[Mode.GLOO] = [runner.Run(0, 1.0)]
    assert len(list(runner.verdicts([runner.Row(SCRIPT, "", runs)]))) == 2


def test_drop_in_is_an_option_of_ours_and_a_variable_for_other_launchers():
    assert "--drop-in" in command(PROGRAM, Mode.DROP_IN)
    assert "PHALANX_DROP_IN" not in environment(PROGRAM, Mode.DROP_IN)
    for launcher in (Launcher.TORCHRUN, Launcher.SCRIPT):
        program = Program("torch", ("train.py",), launcher=launcher)
        assert command(program, Mode.DROP_IN) == command(program, Mode.GLOO)
        assert environment(program, Mode.DROP_IN)["PHALANX_DROP_IN"] == "1"
        assert "PHALANX_DROP_IN" not in environment(program, Mode.GLOO)


def test_a_missing_framework_is_named_and_is_not_a_success():
    """The environment of the tests has none of them."""
    got = subprocess.run(
        [sys.executable, "-m", "interop"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert got.returncode == 1
    assert got.stderr.startswith("interop: accelerate is not installed: no program was run")


def test_a_page_without_a_mark_is_not_left_as_it_was():
    page = "a\n<!-- interop: x -->\nold\n<!-- end of interop -->\nb"
    assert "old" not in table.refresh(page, "x", "new")
    with pytest.raises(ValueError, match="no mark"):
        table.refresh(page, "y", "new")
