"""The command `phalanx mesh`."""

import json
import resource
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from .conftest import clean_env


def test_mesh_prints_coordinates_groups_and_hosts(cli):
    done = cli("mesh", "8x16x8", "--names", "dp,pp,tp", "--rank", 513, "--hosts", 128)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "dp=8 × pp=16 × tp=8: 1,024 ranks, 8 ranks per host",  # noqa: RUF001
        "rank 513 is at dp=4, pp=0, tp=1, on host 64",
        "",
        "axis  size  stride  crosses hosts  at  group of rank 513",
        "dp    8     128     yes            4   1-897:128 on 8 hosts",
        "pp    16    8       yes            0   513-633:8 on 16 hosts",
        "tp    8     1       no             1   512-519 on host 64",
    ]


def test_a_shape_is_the_only_required_argument(cli):
    done = cli("mesh", "2x4")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "2 × 4: 8 ranks",  # noqa: RUF001
        "",
        "axis    size  stride",
        "axis 0  2     4",
        "axis 1  4     1",
    ]


def test_mesh_draws_text_and_svg(cli, tmp_path):
    done = cli("mesh", "2x4", "--rank", 5, "--hosts", 2, "--draw", "--svg", "mesh.svg")
    assert done.returncode == 0
    assert "axis 0=1   4  [5]  6   7   host 1" in done.stdout
    picture = ET.parse(tmp_path / "mesh.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"


def test_json_has_the_same_values(cli):
    done = cli("mesh", "2x4", "--names", "dp,tp", "--rank", 5, "--hosts", 2, "--json")
    read = json.loads(done.stdout)
    dp, tp = read.pop("axes")
    assert read == {"ranks": 8, "ranks_per_host": 4, "rank": 5}
    assert dp == {
        "name": "dp",
        "size": 2,
        "stride": 4,
        "crosses_hosts": True,
        "coordinate": 1,
        "group": "1-5:4",
        "first_host": 0,
        "host_count": 2,
    }
    assert (tp["group"], tp["first_host"], tp["host_count"]) == ("4-7", 1, 1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["foo"], ["'foo'", "8x16x8"]),
        (["8x0"], ["size 0"]),
        (["-8x2"], ["size -8"]),
        (["2x3", "--names", "dp"], ["1 name", "2 axes"]),
        (["2x3", "--rank", "6"], ["rank 6", "0 to 5"]),
        (["2x3", "--rank", "-1"], ["rank -1"]),
        (["2x3", "--rank", "two"], ["'two'", "integer"]),
        (["2x3", "--hosts", "4"], ["4 hosts", "such as 3"]),
        (["2x3", "--svg", "no/such/place.svg"], ["no/such/place.svg"]),
        (["2x3", "--svg", "."], ["directory"]),
        (["2x3", "--bogus"], ["--bogus"]),
        ([], ["SHAPE"]),
    ],
)
def test_usage_errors_print_no_traceback(cli, args, words):
    done = cli("mesh", *args)
    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_mesh_is_fast_and_does_not_import_torch():
    code = (
        "import sys; from phalanx.launch.cli import main\n"
        "main(['mesh', '64x64x64', '--rank', '70000', '--hosts', '64'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )

    def seconds():
        # CPU time, not wall time: the machine may be busy.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", code], env=clean_env(), capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


def test_help_lists_the_options(cli):
    done = cli("mesh", "--help")
    assert done.returncode == 0
    for word in ["8x16x8", "--names", "--hosts", "--svg", "--draw"]:
        assert word in done.stdout
