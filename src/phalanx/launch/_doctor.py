"""`phalanx doctor`: check this machine, run two ranks on it, and report what is wrong.

A check is a function in `CHECKS` that returns a `Finding`. A check that raises or does not return
in time is a finding too. The self-test starts two ranks of `_doctor_selftest` through the
launcher, which is thereby tested as well.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from .._formatting import format_size, format_table
from ..env import find_accelerator, is_drop_in, usable_cores
from . import run
from ._job import AUTOLOAD_SWITCH, has_entry_point
from ._outcome import describe
from ._script_analysis import ScriptUse, analyze_script

OLDEST_TORCH = (2, 13)
SMALLEST_SHM = 64 << 20  # bytes
SMALLEST_MEMORY = 1 << 30  # bytes
CHECK_TIMEOUT = 60.0  # seconds; torch may be on a slow drive, a name server may not answer
SLOW_LOOKUP = 0.5  # seconds of one name lookup, above which it is a warning
FAILED_LOOKUP = 2.0  # and above which the check fails
LOOKUP_TIMEOUT = 5.0


@dataclass(frozen=True)
class Finding:
    """The result of a check: ok, a warning (ok with advice), or failed."""

    ok: bool
    label: str
    detail: str
    advice: str = ""  # what the user should do, if anything

    @property
    def status(self) -> str:
        if not self.ok:
            return "FAILED"
        return "warning" if self.advice else "ok"


Check = Callable[[], Finding]


def _in_thread(action: Callable[[], object], name: str, timeout: float) -> bool:
    """Run an action in a thread, and return whether it ended in time."""
    thread = threading.Thread(target=action, name=f"phalanx-{name}", daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


def run_check(check: Check, *, timeout: float = CHECK_TIMEOUT) -> Finding:
    """Return a check's finding; an exception or a timeout is a finding too."""
    label = check.__name__.removeprefix("check_").replace("_", " ")
    findings: list[Finding] = []

    def attempt() -> None:
        try:
            findings.append(check())
        except BaseException as error:  # noqa: BLE001 - shown to the user; may be SystemExit
            detail = f"{type(error).__name__}: {error}"
            findings.append(Finding(False, label, detail, "the check itself failed"))

    if _in_thread(attempt, f"check-{label}", timeout):
        return findings[0]
    return Finding(False, label, f"no answer in {timeout:g} s", "find out what blocks it")


def check_phalanx() -> Finding:
    return Finding(True, "phalanx", metadata.version("phalanx"))


def check_python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(True, "python", detail)


def check_torch() -> Finding:
    oldest = ".".join(map(str, OLDEST_TORCH))
    advice = f"pip install 'torch>={oldest}'"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(False, "torch", "not installed", advice)
    found = re.match(r"(\d+)\.(\d+)", version)
    is_new = found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH
    return _finding(is_new, "torch", version, advice)


def check_gloo() -> Finding:
    from torch import distributed

    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    detail = f"{'in' if has_gloo else 'not in'} this build of torch"
    advice = "install a build of torch that has it; the ones on PyPI do"
    return _finding(has_gloo, "gloo", detail, advice)


def check_nccl() -> Finding:
    from torch import cuda, distributed

    gpus = cuda.device_count()
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    detail = f"{'in' if has_nccl else 'not in'} this build of torch, {gpus} GPUs"
    return _finding(has_nccl or not gpus, "nccl", detail, "install a CUDA build of torch")


def check_cores() -> Finding:
    usable = usable_cores()
    detail = f"{usable} usable of {os.cpu_count()}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads:
        return Finding(True, "cores", detail)
    fits = threads.isdecimal() and 1 <= int(threads) <= usable
    advice = "unset OMP_NUM_THREADS; phalanx run divides the cores between the ranks"
    return _finding(fits, "cores", f"{detail}, OMP_NUM_THREADS={threads}", advice)


def check_memory() -> Finding:
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = (int(table[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    detail = f"{format_size(total)}, {format_size(free)} available"
    advice = "each rank loads torch: free some memory"
    return _finding(free >= SMALLEST_MEMORY, "memory", detail, advice)


def check_shared_memory() -> Finding:
    label = "/dev/shm"
    try:
        stats = os.statvfs(label)
    except OSError as error:
        return Finding(True, label, f"missing ({error.strerror})", "DataLoader workers may fail")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    detail = f"{format_size(size)}, {format_size(free)} free"
    if free >= SMALLEST_SHM:
        return Finding(True, label, detail)
    advice = "enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    if size >= SMALLEST_SHM:
        advice = "it is full: remove files in it that no process uses"
    return Finding(True, label, detail, f"DataLoader workers may fail; {advice}")


def check_loopback() -> Finding:
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError as error:
            advice = "a firewall or a container without a loopback interface: ip link set lo up"
            return Finding(False, "loopback", f"127.0.0.1: {error}", advice)
    return Finding(True, "loopback", "127.0.0.1 answers")


def check_loopback_name() -> Finding:
    def ask() -> None:
        with suppress(OSError):  # a failure is an answer too
            socket.getnameinfo(("127.0.0.1", 1), 0)

    began = time.monotonic()
    is_done = _in_thread(ask, "lookup", LOOKUP_TIMEOUT)
    took = time.monotonic() - began
    if is_done and took <= SLOW_LOOKUP:
        return Finding(True, "loopback name", f"looked up in {took * 1000:.0f} ms")
    detail = f"looked up in {took:.1f} s" if is_done else f"no answer in {LOOKUP_TIMEOUT:g} s"
    advice = (
        "torch asks for this name at every connection to a store, so groups form slowly; "
        "add '127.0.0.1 localhost' to /etc/hosts"
    )
    return Finding(is_done and took <= FAILED_LOOKUP, "loopback name", detail, advice)


def check_hostname() -> Finding:
    name = socket.gethostname()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return Finding(True, "hostname", f"{name}, GLOO_SOCKET_IFNAME={chosen}")
    try:
        address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        advice = f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Finding(False, "hostname", f"{name} does not resolve: {error}", advice)
    return Finding(True, "hostname", f"{name} resolves to {address}")


def check_compiler() -> Finding:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding(True, "compiler", path)
    advice = "needed only to build the shm engine: apt install g++"
    return Finding(True, "compiler", "no C++ compiler", advice)


def check_engine() -> Finding:
    from .. import native

    if native.engine is not None:
        return Finding(True, "shm engine", f"built, uses {native.engine.instruction_set()}")
    advice = "backend 'shm' is absent; install a C++ compiler and reinstall phalanx"
    return Finding(True, "shm engine", native.why_missing, advice)


def check_entry_point() -> Finding:
    if not has_entry_point():
        advice = "install phalanx again: torch does not find it"
        return Finding(False, "entry point", "none in 'torch.backends'", advice)
    switch = os.environ.get(AUTOLOAD_SWITCH, "1")
    if switch != "1":
        detail = f"off: {AUTOLOAD_SWITCH}={switch}"
        return Finding(False, "entry point", detail, f"unset {AUTOLOAD_SWITCH}")
    return Finding(True, "entry point", "found by torch")


def check_accelerator() -> Finding:
    found = find_accelerator()
    if found is None:
        return Finding(True, "accelerator", "none, so programs run on CPUs")
    advice = "drop-in replaces nothing here; hide the devices to train on CPUs"
    return Finding(True, "accelerator", found, advice)


def check_switch() -> Finding:
    is_on = is_drop_in()  # an invalid value raises, which is a finding too
    return Finding(True, "switch", f"PHALANX_DROP_IN is {'on' if is_on else 'off in this shell'}")


CHECKS: list[Check] = [
    check_phalanx, check_python, check_torch, check_gloo, check_nccl, check_cores, check_memory,
    check_shared_memory, check_loopback, check_loopback_name, check_hostname, check_compiler,
    check_engine,
]  # fmt: skip
DROP_IN_CHECKS: list[Check] = [check_entry_point, check_accelerator, check_switch, check_engine]


def _finding(ok: bool, label: str, detail: str, advice: str) -> Finding:
    """Return a finding that has advice only if it is not ok."""
    return Finding(ok, label, detail, "" if ok else advice)


SELF_TEST_TIMEOUT = 60.0  # seconds
_COLOURS = {"ok": "green", "warning": "yellow", "FAILED": "red"}
_LABEL_WIDTH = 13  # of the longest label, since each line is printed as soon as it is known
_HEADINGS = ("backend", "ranks", "latency", "bandwidth at 4 MiB")


@dataclass(frozen=True)
class Report:
    findings: Sequence[Finding]
    measurements: Sequence[Mapping[str, Any]]  # what `_doctor_selftest` prints for each backend

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)


def run_checks(show: Callable[[Finding], None], *, deadline: float = SELF_TEST_TIMEOUT) -> Report:
    """Run all checks, then the self-test; show each finding at once."""
    findings = []
    for check in CHECKS:
        findings.append(run_check(check))
        show(findings[-1])
    result, measurements = self_test(deadline=deadline)
    show(result)
    return Report([*findings, result], measurements)


def run_drop_in_checks(script: Path, show: Callable[[Finding], None]) -> Report:
    """Tell what drop-in would replace in a script; show each finding at once."""
    uses = analyze_script(script)
    findings = [run_check(check) for check in DROP_IN_CHECKS]
    accelerator = find_accelerator()
    findings += [_describe_use(use, accelerator) for use in uses]
    detail = f"{script.name} was read, not run; the modules that it imports were not"
    if not uses:
        detail += "\nit has no call that drop-in replaces"
    findings.append(Finding(True, "script", detail))
    for finding in findings:
        show(finding)
    return Report(findings, [])


def _describe_use(use: ScriptUse, accelerator: str | None) -> Finding:
    reason = use.reason or (
        f"this machine has an accelerator: {accelerator}" if accelerator else ""
    )
    if reason:
        return Finding(True, f"line {use.line}", f"{use.text}: kept", reason)
    outcome = f" -> {use.replaced_by}" if use.replaced_by else ": decided at run time"
    return Finding(True, f"line {use.line}", f"{use.text}{outcome}")


def self_test(*, deadline: float) -> tuple[Finding, list[dict[str, Any]]]:
    """Start two ranks through the launcher and collect their measurements."""
    out, err = io.BytesIO(), io.BytesIO()
    outcome = run(
        "phalanx.launch._doctor_selftest",
        [str(deadline)],
        ranks=2,
        module=True,
        prefix=False,
        stdout=out,
        stderr=err,
        check=False,
    )
    if outcome.signal is not None:
        raise KeyboardInterrupt
    lines = [line for line in out.getvalue().splitlines() if line.startswith(b"{")]
    measurements = [json.loads(line) for line in lines]
    if outcome.exit_code == 0:
        detail = "two ranks formed groups and summed tensors"
        return Finding(True, "self-test", detail), measurements
    advice = "fix the problems above, then read the traceback"
    return Finding(False, "self-test", describe(outcome), advice), measurements


def format_finding(finding: Finding) -> str:
    status = click.style(f"{finding.status:<7}", fg=_COLOURS[finding.status])
    margin = " " * (7 + 2 + _LABEL_WIDTH + 2)
    detail = finding.detail.replace("\n", "\n" + margin)
    line = f"{status}  {finding.label:<{_LABEL_WIDTH}}  {detail}"
    return f"{line}\n{margin}-> {finding.advice}" if finding.advice else line


def format_summary(report: Report) -> str:
    """Format what follows the findings: the measurements, and how many checks failed."""
    lines = []
    if report.measurements:
        rows = [
            (
                m["backend"],
                m["ranks"],
                f"{m['latency_us']:g} us",
                f"{m['bandwidth_gb_per_s']:g} GB/s",
            )
            for m in report.measurements
        ]
        lines += ["", *format_table(_HEADINGS, rows)]
    failed = sum(not finding.ok for finding in report.findings)
    summary = f"{failed} of {len(report.findings)} checks failed" if failed else "no problems"
    return "\n".join([*lines, "", summary])
