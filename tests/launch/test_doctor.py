import errno
import json
import os
import socket
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import pytest

from .internals import (
    CHECKS,
    Finding,
    Report,
    _doctor,
    format_finding,
    format_summary,
    run_check,
    run_checks,
    self_test,
)

GOOD = Finding(True, "torch", "2.13.0")
BAD = Finding(False, "/dev/shm", "32 MiB, 1 MiB free", "enlarge it")
FAST = {
    "backend": "gloo",
    "ranks": "2 processes",
    "latency_us": 85.2,
    "bandwidth_gb_per_s": 1.25,
}


def render(report):
    return "\n".join([*map(format_finding, report.findings), format_summary(report)])


def test_failed_checks_are_shown_with_advice():
    text = render(Report([GOOD, BAD], [FAST]))
    assert "FAILED" in text
    assert "/dev/shm       32 MiB, 1 MiB free" in text
    assert "-> enlarge it" in text
    assert "1 of 2 checks failed" in text
    assert "gloo     2 processes  85.2 us  1.25 GB/s" in text


def test_passed_checks_have_no_advice():
    text = render(Report([GOOD], []))
    assert "->" not in text
    assert text.endswith("no problems")


def test_a_warning_has_advice_and_does_not_fail():
    report = Report([GOOD, Finding(True, "compiler", "none", "install one")], [])
    text = render(report)
    assert "warning" in text
    assert "-> install one" in text
    assert text.endswith("no problems")
    assert report.ok


def test_each_finding_is_shown_before_the_next_check_runs(monkeypatch):
    events = []

    def check(name):
        return lambda: (events.append(f"run {name}"), Finding(True, name, "fine"))[1]

    monkeypatch.setattr(_doctor, "CHECKS", [check("a"), check("b")])
    monkeypatch.setattr(_doctor, "self_test", lambda **_: (Finding(True, "self-test", "fine"), []))
    report = run_checks(lambda finding: events.append(f"show {finding.label}"))
    assert events == ["run a", "show a", "run b", "show b", "show self-test"]
    assert [finding.label for finding in report.findings] == ["a", "b", "self-test"]


def test_every_check_is_run_and_its_label_fits_the_column():
    defined = {name for name in vars(_doctor) if name.startswith("check_")}
    checks = [*CHECKS, *_doctor.DROP_IN_CHECKS]
    assert {check.__name__ for check in checks} == defined
    assert max(len(run_check(check).label) for check in checks) <= _doctor._LABEL_WIDTH


def test_json_has_findings_and_measurements():
    read = json.loads(Report([GOOD, BAD], [FAST]).to_json())
    assert read["ok"] is False
    assert read["findings"][1]["advice"] == "enlarge it"
    assert read["measurements"][0]["backend"] == "gloo"


def test_a_check_that_raises_is_a_failed_finding():
    def name_server():
        raise OSError("no such host")

    finding = run_check(name_server)
    assert (finding.ok, finding.label) == (False, "name server")
    assert "OSError: no such host" in finding.detail


def test_a_check_that_exits_is_a_finding():
    def check_exit():
        raise SystemExit(3)

    finding = run_check(check_exit)
    assert not finding.ok
    assert finding.detail == "SystemExit: 3"


def test_a_check_that_hangs_is_a_failed_finding():
    finding = run_check(lambda: time.sleep(1000), timeout=0.01)
    assert not finding.ok
    assert "no answer in 0.01 s" in finding.detail


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_has_a_detail_and_advice_if_it_fails(check):
    finding = run_check(check)
    assert finding.label
    assert finding.detail
    assert finding.ok or finding.advice
    assert "itself failed" not in finding.advice


@pytest.mark.parametrize(
    ("threads", "ok"), [("1", True), ("100000", False), ("many", False), ("0", False), ("", True)]
)
def test_check_cores_rejects_bad_omp_num_threads(monkeypatch, threads, ok):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert _doctor.check_cores().ok is ok


def test_a_missing_compiler_is_a_warning(monkeypatch):
    monkeypatch.setenv("PATH", "")
    finding = _doctor.check_compiler()
    assert finding.ok
    assert "needed only to build the shm engine" in finding.advice
    assert "g++" in finding.advice


@pytest.mark.parametrize(
    ("size", "free", "told"),
    [(1024, 1024, ""), (32, 32, "--shm-size"), (1024, 1, "it is full"), (None, None, "")],
)
def test_small_shared_memory_is_a_warning(monkeypatch, size, free, told):
    def statvfs(_path):
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return SimpleNamespace(f_frsize=1 << 20, f_blocks=size, f_bavail=free)

    monkeypatch.setattr(os, "statvfs", statvfs)
    finding = _doctor.check_shared_memory()
    assert finding.ok
    assert told in finding.advice
    assert ("DataLoader workers may fail" in finding.advice) == (free != 1024)


@pytest.mark.parametrize(
    ("bounds", "ok", "advised"),
    [((100, 200), True, False), ((0, 200), True, True), ((0, 0), False, True)],
)
def test_a_slow_name_lookup_warns_and_a_very_slow_one_fails(monkeypatch, bounds, ok, advised):
    monkeypatch.setattr(_doctor, "SLOW_LOOKUP", bounds[0])
    monkeypatch.setattr(_doctor, "FAILED_LOOKUP", bounds[1])
    finding = _doctor.check_loopback_name()
    assert (finding.ok, "/etc/hosts" in finding.advice) == (ok, advised)


def test_a_name_lookup_that_hangs_fails(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(_doctor, "LOOKUP_TIMEOUT", 0.01)
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: over.wait())
    finding = _doctor.check_loopback_name()
    over.set()
    assert not finding.ok
    assert finding.detail == "no answer in 0.01 s"


def test_a_name_lookup_that_errors_quickly_passes(monkeypatch):
    def fail(*_):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(socket, "getnameinfo", fail)
    assert _doctor.check_loopback_name().ok


def test_the_oldest_torch_matches_the_package_requirement():
    oldest = ".".join(map(str, _doctor.OLDEST_TORCH))
    assert f"torch>={oldest}" in (metadata.requires("phalanx") or [])


def test_a_self_test_that_hangs_times_out_and_shows_where():
    verdict, measurements = self_test(deadline=0.01)
    assert not verdict.ok
    assert "failed first: SIGALRM" in verdict.detail
    assert "_selftest.py" in verdict.detail
    assert measurements == []


@pytest.mark.slow
def test_doctor_command_runs_all_backends(phalanx):
    done = phalanx("doctor", "--json")
    read = json.loads(done.stdout)
    assert done.returncode == (0 if read["ok"] else 1)
    findings = {finding["label"]: finding for finding in read["findings"]}
    assert findings["phalanx"]["detail"] == metadata.version("phalanx")
    assert findings["self-test"]["ok"], findings["self-test"]["detail"]
    assert [each["backend"] for each in read["measurements"]] == ["gloo", "shm", "local"]
    for each in read["measurements"]:
        assert each["latency_us"] > 0
        assert each["bandwidth_gb_per_s"] > 0
