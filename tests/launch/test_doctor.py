import json
import time
from importlib import metadata

import pytest

from phalanx.launch import _checks
from phalanx.launch._checks import CHECKS, Finding, look
from phalanx.launch._doctor import Examination, Measurement, render, render_json, self_test

GOOD = Finding(True, "torch", "2.13.0")
BAD = Finding(False, "/dev/shm", "32 MiB, 1 MiB free", "enlarge it")
FAST = Measurement("gloo", "2 processes", 85.2, 1.25)


def test_people_read_what_is_wrong_and_what_to_do():
    text = render(Examination([GOOD, BAD], [FAST]))
    assert "/dev/shm  32 MiB, 1 MiB free" in text
    assert "-> enlarge it" in text
    assert "1 of 2 findings need care" in text
    assert "gloo     2 processes  85.2 us  1.25 GB/s" in text


def test_good_news_has_no_advice():
    text = render(Examination([Finding(True, "torch", "2.13.0", "install it")], []))
    assert "install it" not in text
    assert text.endswith("all is well")


def test_programs_read_the_same():
    read = json.loads(render_json(Examination([GOOD, BAD], [FAST])))
    assert read["ok"] is False
    assert read["findings"][1]["advice"] == "enlarge it"
    assert read["measurements"][0]["backend"] == "gloo"


def test_a_check_that_breaks_is_a_finding():
    def name_server():
        raise OSError("no such host")

    finding = look(name_server)
    assert (finding.ok, finding.label) == (False, "name server")
    assert "OSError: no such host" in finding.detail


def test_a_check_that_never_ends_is_a_finding():
    finding = look(lambda: time.sleep(1000), patience=0.01)
    assert not finding.ok
    assert "no answer in 0.01 s" in finding.detail


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_says_something_or_what_to_do(check):
    finding = look(check)
    assert finding.label
    assert finding.detail
    assert finding.ok or finding.advice
    assert "itself failed" not in finding.advice


@pytest.mark.parametrize(
    ("threads", "ok"), [("1", True), ("100000", False), ("many", False), ("0", False), ("", True)]
)
def test_threads_that_do_not_fit_the_cores(monkeypatch, threads, ok):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert _checks.cores().ok is ok


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    finding = _checks.compiler()
    assert not finding.ok
    assert "g++" in finding.advice


def test_the_oldest_torch_is_what_the_package_asks_for():
    oldest = ".".join(map(str, _checks.OLDEST_TORCH))
    assert f"torch>={oldest}" in (metadata.requires("phalanx") or [])


def test_a_self_test_that_hangs_ends_and_says_where():
    verdict, measurements = self_test(deadline=0.01)
    assert not verdict.ok
    assert "failed first: exit code 1" in verdict.detail
    assert "_selftest.py" in verdict.detail
    assert measurements == []


def test_doctor(phalanx):
    done = phalanx("doctor", "--json")
    read = json.loads(done.stdout)
    assert done.returncode == (0 if read["ok"] else 1)
    findings = {finding["label"]: finding for finding in read["findings"]}
    assert findings["phalanx"]["detail"] == metadata.version("phalanx")
    assert findings["self-test"]["ok"], findings["self-test"]["detail"]
    assert [each["backend"] for each in read["measurements"]] == ["gloo", "local"]
    for each in read["measurements"]:
        assert each["latency_us"] > 0
        assert each["bandwidth_gb_per_s"] > 0
