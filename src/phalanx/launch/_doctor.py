"""`phalanx doctor`: check this machine, run two ranks on it, and report what is wrong.

A check is a function that returns a `Finding`, listed in `CHECKS`. A check that raises or does
not return in time is a finding too. The self-test starts two ranks of `_doctor_selftest`
through the launcher, which is thereby tested as well.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from ..env import usable_cores
from . import run
from ._outcome import Outcome, describe

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
SMALLEST_SHM = 64 << 20  # bytes
SMALLEST_MEMORY = 1 << 30  # bytes
# Seconds. Torch may be on a slow drive, a name server may never answer.
CHECK_TIMEOUT = 60.0
# Seconds that one look-up of a name may take: to go unmentioned, to be no fault, and at all.
SLOW_LOOKUP, FAULTY_LOOKUP, LOOKUP_WITHIN = 0.5, 2.0, 5.0


@dataclass(frozen=True)
class Finding:
    """What a check has found: that all is well, something to note (ok, with advice), or a fault."""

    ok: bool
    label: str
    detail: str
    advice: str = ""
    """What to do about it, if there is something to do."""


Check = Callable[[], Finding]


def look(check: Check, *, within: float = CHECK_TIMEOUT) -> Finding:
    """Return a check's finding; one that breaks or never ends is a finding too."""
    label = check.__name__.replace("_", " ")
    findings: list[Finding] = []

    def attempt() -> None:
        try:
            findings.append(check())
        except Exception as error:  # noqa: BLE001 - whatever it is, the user should read it
            detail = f"{type(error).__name__}: {error}"
            findings.append(Finding(False, label, detail, "this check itself failed"))

    thread = threading.Thread(target=attempt, name=f"phalanx-check-{label}", daemon=True)
    thread.start()
    thread.join(within)
    if findings:
        return findings[0]
    return Finding(False, label, f"no answer in {within:g} s", "find out what it waits for")


def phalanx() -> Finding:
    """Say which phalanx this is."""
    return Finding(True, "phalanx", metadata.version("phalanx"))


def python() -> Finding:
    """Say which Python this is, and whether it is new enough."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return _finding(sys.version_info >= OLDEST_PYTHON, "python", detail, f"use Python {oldest}")


def torch() -> Finding:
    """Say which torch is installed, and whether it is new enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    advice = f"pip install 'torch>={oldest}'"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(False, "torch", "not installed", advice)
    found = re.match(r"(\d+)\.(\d+)", version)
    is_new = found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH
    return _finding(is_new, "torch", version, advice)


def gloo() -> Finding:
    """Say whether torch has Gloo."""
    from torch import distributed

    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    return _finding(
        has_gloo,
        "gloo",
        "in this build of torch" if has_gloo else "not in this build of torch",
        "install a build of torch that has it; the ones on PyPI do",
    )


def nccl() -> Finding:
    """Say whether torch has NCCL, which only matters where there are GPUs."""
    from torch import cuda, distributed

    gpus = cuda.device_count()
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    detail = f"{'in' if has_nccl else 'not in'} this build of torch, {gpus} GPUs"
    return _finding(has_nccl or not gpus, "nccl", detail, "install a CUDA build of torch")


def cores() -> Finding:
    """Say how many cores may be used, and whether the user's number of threads fits them."""
    usable = usable_cores()
    detail = f"{usable} usable of {os.cpu_count()}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads:
        return Finding(True, "cores", detail)
    fits = threads.isdecimal() and 1 <= int(threads) <= usable
    advice = "unset OMP_NUM_THREADS; phalanx run divides the cores between the ranks"
    return _finding(fits, "cores", f"{detail}, OMP_NUM_THREADS={threads}", advice)


def memory() -> Finding:
    """Say how much memory there is."""
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = (int(table[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    detail = f"{_format_bytes(total)}, {_format_bytes(free)} available"
    return _finding(free >= SMALLEST_MEMORY, "memory", detail, "each rank loads torch: make room")


def shared_memory() -> Finding:
    """Say how large /dev/shm is, where the workers of a DataLoader leave their batches."""
    label = "/dev/shm"
    try:
        stats = os.statvfs(label)
    except OSError as error:
        return Finding(True, label, f"not there ({error.strerror})", "DataLoader workers may fail")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    detail = f"{_format_bytes(size)}, {_format_bytes(free)} free"
    if free >= SMALLEST_SHM:
        return Finding(True, label, detail)
    remedy = "enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    if size >= SMALLEST_SHM:
        remedy = "it is full: remove files in it that no process uses"
    return Finding(True, label, detail, f"DataLoader workers may fail; {remedy}")


def loopback() -> Finding:
    """Say whether processes of this machine can reach each other at 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError as error:
            advice = "a firewall or a container without a loopback interface: ip link set lo up"
            return Finding(False, "loopback", f"127.0.0.1: {error}", advice)
    return Finding(True, "loopback", "127.0.0.1 answers")


def hostname() -> Finding:
    """Say whether this machine's name leads to it: that is how Gloo chooses an address."""
    name = socket.gethostname()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return Finding(True, "hostname", f"{name}, GLOO_SOCKET_IFNAME={chosen}")
    try:
        address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        advice = f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Finding(False, "hostname", f"{name} does not resolve: {error}", advice)
    return Finding(True, "hostname", f"{name} is {address}")


def loopback_name() -> Finding:
    """Say how long it takes to look up the name of 127.0.0.1."""
    took = _lookup_seconds(LOOKUP_WITHIN)
    if took is not None and took <= SLOW_LOOKUP:
        return Finding(True, "loopback name", f"looked up in {took * 1000:.0f} ms")
    detail = f"no answer in {LOOKUP_WITHIN:g} s" if took is None else f"looked up in {took:.1f} s"
    advice = (
        "torch asks for this name at every connection to a store, so groups form slowly; "
        "add '127.0.0.1 localhost' to /etc/hosts"
    )
    return Finding(took is not None and took <= FAULTY_LOOKUP, "loopback name", detail, advice)


def compiler() -> Finding:
    """Say whether C++ can be compiled here: the shared-memory engine is, when phalanx is built."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found:
        return Finding(True, "compiler", found)
    advice = "a phalanx built here will lack the shared-memory engine; apt install g++"
    return Finding(True, "compiler", "no C++ compiler", advice)


def engine() -> Finding:
    """Say whether the shared-memory engine is there, and which instructions it uses."""
    from .. import native

    if native.engine is not None:
        return Finding(True, "shm engine", f"built, uses {native.engine.instruction_set()}")
    advice = "backend 'shm' is absent; install a C++ compiler and install phalanx again"
    return Finding(True, "shm engine", native.why_missing, advice)


CHECKS: list[Check] = [
    phalanx,
    python,
    torch,
    gloo,
    nccl,
    cores,
    memory,
    shared_memory,
    loopback,
    loopback_name,
    hostname,
    compiler,
    engine,
]


def _finding(ok: bool, label: str, detail: str, advice: str) -> Finding:
    """Return a finding whose advice is for the case that it is not ok."""
    return Finding(ok, label, detail, "" if ok else advice)


def _lookup_seconds(within: float) -> float | None:
    """Return how long it takes to look up the name of 127.0.0.1; None for too long."""

    def ask() -> None:
        with suppress(OSError):  # a name server that fails has answered, too
            socket.getnameinfo(("127.0.0.1", 1), 0)

    began = time.monotonic()
    thread = threading.Thread(target=ask, name="phalanx-lookup", daemon=True)
    thread.start()
    thread.join(within)
    return None if thread.is_alive() else time.monotonic() - began


def _format_bytes(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB"


SELF_TEST_TIMEOUT = 60.0
"""Seconds that the self-test may take."""
_OK, _NOTE, _WRONG = (
    click.style(f"{word:<5}", fg=colour)
    for word, colour in (("ok", "green"), ("note", "yellow"), ("WRONG", "red"))
)
_HEADINGS = ("backend", "ranks", "latency", "bandwidth at 4 MiB")


@dataclass(frozen=True)
class Measurement:
    """How fast one backend is between two ranks."""

    backend: str
    ranks: str
    latency_us: float
    bandwidth_gb_per_s: float


@dataclass(frozen=True)
class Examination:
    """Everything that was found."""

    findings: Sequence[Finding]
    measurements: Sequence[Measurement]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok for finding in self.findings)


def examine(*, deadline: float = SELF_TEST_TIMEOUT) -> Examination:
    """Run all checks, then the self-test."""
    findings = [look(check) for check in CHECKS]
    verdict, measurements = self_test(deadline=deadline)
    return Examination([*findings, verdict], measurements)


def self_test(*, deadline: float) -> tuple[Finding, list[Measurement]]:
    """Start two ranks, as any script's are, and collect what they measure."""
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
    measurements = [Measurement(**json.loads(line)) for line in lines]
    return _self_test_finding(outcome), measurements


def render(examination: Examination) -> str:
    """Return an examination for people to read."""
    width = max(len(finding.label) for finding in examination.findings)
    lines = [_finding_line(finding, width) for finding in examination.findings]
    if examination.measurements:
        lines += ["", *_measurement_table(examination.measurements)]
    wrong = sum(not finding.ok for finding in examination.findings)
    verdict = (
        f"{wrong} of {len(examination.findings)} findings need care" if wrong else "all is well"
    )
    return "\n".join([*lines, "", verdict])


def render_json(examination: Examination) -> str:
    """Return an examination for programs to read."""
    return json.dumps({"ok": examination.ok, **asdict(examination)}, indent=2)


def _self_test_finding(outcome: Outcome) -> Finding:
    if outcome.exit_code == 0:
        return Finding(True, "self-test", "two ranks met, agreed on a sum, and ended")
    advice = "correct what is wrong above, then see what the traceback says"
    return Finding(False, "self-test", describe(outcome), advice)


def _finding_line(finding: Finding, width: int) -> str:
    mark = _NOTE if finding.ok and finding.advice else _OK if finding.ok else _WRONG
    margin = " " * (width + 9)
    detail = finding.detail.replace("\n", "\n" + margin)
    line = f"{mark}  {finding.label:<{width}}  {detail}"
    return f"{line}\n{margin}-> {finding.advice}" if finding.advice else line


def _measurement_table(measurements: Sequence[Measurement]) -> list[str]:
    rows = [_HEADINGS] + [
        (each.backend, each.ranks, f"{each.latency_us:g} us", f"{each.bandwidth_gb_per_s:g} GB/s")
        for each in measurements
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
