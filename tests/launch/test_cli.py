import resource
import subprocess
import sys
from importlib import metadata

import pytest

from .conftest import clean_env


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], ["phalanx run -n 4 train.py", "doctor", "--version"]),
        (["run", "--help"], ["phalanx run -n auto -m package.train", "--max-restarts", "--nnodes"]),
        (["run", "--help"], ["phalanx run -n 2:4 --elastic train.py", "[MIN:]N"]),
        (["doctor", "-h"], ["--json"]),
    ],
)
def test_help_shows_examples_and_options(cli, args, words):
    done = cli(*args)
    assert done.returncode == 0
    for word in words:
        assert word in done.stdout


@pytest.mark.parametrize(
    "command", [[], ["run"], ["ps"], ["scale"], ["mesh"], ["doctor"], ["checkpoint"]]
)
def test_the_help_text_fits_80_columns_and_is_not_truncated(cli, command):
    done = cli(*command, "--help", env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80 or line.endswith("...")] == [
        line for line in lines[:1] if line.endswith("[ARGS]...")
    ]


def test_version(cli):
    assert cli("--version").stdout == f"phalanx {metadata.version('phalanx')}\n"


def test_the_help_command_starts_fast():
    def seconds():
        # CPU time, not wall time: the machine may be busy.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "phalanx", "run", "--help"]
        subprocess.run(command, capture_output=True, env=clean_env(), check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.4, "torch alone would take more than a second"


def test_the_launcher_does_not_import_torch(script):
    code = """
        import sys
        from phalanx.launch.cli import main
        main(["run", "-n", "1", __file__ + "x"], standalone_mode=False)
        print("torch" in sys.modules)
    """
    script("", name="script.pyx")
    command = [sys.executable, script(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_env(), check=True)
    assert done.stdout == "False\n"


def test_no_command_prints_usage_and_exits_with_2(cli):
    done = cli()
    assert done.returncode == 2
    assert "Usage:" in done.stdout + done.stderr
