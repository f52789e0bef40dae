"""What `phalanx doctor` looks at: functions that return a `Finding`, listed in `CHECKS`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..env import usable_cores

__all__ = ["CHECKS", "Check", "Finding", "look"]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
SMALLEST_SHM = 64 << 20  # bytes
SMALLEST_MEMORY = 1 << 30  # bytes
# Seconds. Torch may be on a slow drive, a name server may never answer.
CHECK_WITHIN = 60.0
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


def look(check: Check, *, within: float = CHECK_WITHIN) -> Finding:
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
    return _judge(sys.version_info >= OLDEST_PYTHON, "python", detail, f"use Python {oldest}")


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
    return _judge(is_new, "torch", version, advice)


def gloo() -> Finding:
    """Say whether torch has Gloo."""
    from torch import distributed

    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    return _judge(
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
    return _judge(has_nccl or not gpus, "nccl", detail, "install a CUDA build of torch")


def cores() -> Finding:
    """Say how many cores may be used, and whether the user's number of threads fits them."""
    usable = usable_cores()
    detail = f"{usable} usable of {os.cpu_count()}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads:
        return Finding(True, "cores", detail)
    fits = threads.isdecimal() and 1 <= int(threads) <= usable
    advice = "unset OMP_NUM_THREADS; phalanx run divides the cores between the ranks"
    return _judge(fits, "cores", f"{detail}, OMP_NUM_THREADS={threads}", advice)


def memory() -> Finding:
    """Say how much memory there is."""
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = (int(table[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    detail = f"{_size(total)}, {_size(free)} available"
    return _judge(free >= SMALLEST_MEMORY, "memory", detail, "each rank loads torch: make room")


def shared_memory() -> Finding:
    """Say how large /dev/shm is, where the workers of a DataLoader leave their batches."""
    label = "/dev/shm"
    try:
        stats = os.statvfs(label)
    except OSError as error:
        return Finding(True, label, f"not there ({error.strerror})", "DataLoader workers may fail")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    detail = f"{_size(size)}, {_size(free)} free"
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


def _judge(ok: bool, label: str, detail: str, advice: str) -> Finding:
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


def _size(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB"
