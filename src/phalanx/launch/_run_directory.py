"""Directories of elastic runs: how other processes of this user find a run.

A run has the directory ``<base>/<id>`` with the control socket and ``run.json``, which names the
launcher's process. Only its owner can enter the base, which depends on the environment of the
launcher: `find_runs` looks in all the usual ones. A launcher that was killed leaves its directory
behind; `find_runs` removes it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from .._control_client import is_listening
from .._processes import read_stat
from ..errors import InvalidArgument, InvalidState

RUNTIME_DIRECTORIES = Path("/run/user")  # where logind has XDG_RUNTIME_DIR of each user
TEMPORARY_DIRECTORY = Path("/tmp")  # what TMPDIR replaces
_SOCKET = "control.sock"
_DESCRIPTION = "run.json"
_MAX_NAME = 24  # characters of the script's name in an id
_ABANDONED_AFTER = 60.0  # seconds after which a directory without a description is removed


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What does not change during a run."""

    id: str
    script: str
    min_ranks: int
    pid: int
    """The launcher."""
    pid_since: int | None
    """When that process started, in clock ticks since boot. A pid may be reused."""
    started: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run whose launcher lives."""

    path: Path
    info: RunInfo

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.path / _SOCKET


@contextmanager
def run_directory(
    script: str, *, min_ranks: int, environ: Mapping[str, str] = os.environ
) -> Iterator[RunDirectory]:
    """Create the directory of a run of this process, and remove it at the end."""
    stem = Path(script).stem if script.endswith(".py") else script.rpartition(".")[2]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", stem)[:_MAX_NAME].strip("-") or "run"
    with _os_errors_as_invalid_state():
        base = _base(environ)
        _create_base(base)
        path = _make_unique(base, name)
    try:
        info = RunInfo(
            id=path.name,
            script=script,
            min_ranks=min_ranks,
            pid=os.getpid(),
            pid_since=_process_start(os.getpid()),
            started=time.time(),
        )
        # Renamed, so that nobody reads one half.
        unfinished = path / f"{_DESCRIPTION}.new"
        with _os_errors_as_invalid_state():
            unfinished.write_text(json.dumps(asdict(info)))
            unfinished.rename(path / _DESCRIPTION)
        yield RunDirectory(path, info)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def find_runs(environ: Mapping[str, str] | None = None) -> list[RunDirectory]:
    """Return the runs of this user, oldest first; remove the directories of dead launchers.

    With `environ`, only look where a launcher with this environment has its runs.
    """
    if environ is None:
        bases = _own_bases()
    else:
        bases = [base for base in [_base(environ)] if base.is_dir()]
        for base in bases:
            _check_owner(base)
    runs = [run for base in bases for run in _runs_in(base)]
    return sorted(runs, key=lambda run: run.info.started)


def _runs_in(base: Path) -> list[RunDirectory]:
    try:
        paths = [*base.iterdir()]
    except OSError:  # it was removed, or is not readable
        return []
    runs = []
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            continue
        info = _read_info(path)
        # A launcher in another container has no pid here. One of another version may describe its
        # run in another way.
        is_used = (info is not None and _is_running(info)) or is_listening(path / _SOCKET)
        if info is not None and is_used:
            runs.append(RunDirectory(path, info))
        elif not is_used and (info is not None or _age(path) > _ABANDONED_AFTER):
            shutil.rmtree(path, ignore_errors=True)
    return runs


def find_run(prefix: str, environ: Mapping[str, str] | None = None) -> RunDirectory:
    """Return the run with this id, or the only one whose id starts like this."""
    if not prefix:
        raise InvalidArgument("the id of a run must not be empty. `phalanx ps` lists the runs")
    runs = find_runs(environ)
    matching = [run for run in runs if run.info.id.startswith(prefix)]
    exact = [run for run in matching if run.info.id == prefix]
    if len(exact or matching) != 1:
        ids = ", ".join(run.info.id for run in matching or runs)
        if matching:
            raise InvalidArgument(f"several runs match {prefix!r}: {ids}; give more of the id")
        raise InvalidArgument(
            f"no elastic run {prefix!r}. " + (f"Running: {ids}" if ids else "None is running")
        )
    return (exact or matching)[0]


def _base(environ: Mapping[str, str]) -> Path:
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        with suppress(OSError):
            if _is_own_directory(os.stat(runtime)):
                return Path(runtime, "phalanx")
    return Path(tempfile.gettempdir(), f"phalanx-{os.geteuid()}")


def _own_bases() -> list[Path]:
    """Return the bases of this user that exist, each once."""
    user = os.geteuid()
    bases = [RUNTIME_DIRECTORIES / str(user) / "phalanx", TEMPORARY_DIRECTORY / f"phalanx-{user}"]
    with suppress(OSError):  # no temporary directory is writable
        bases.append(_base(os.environ))
        bases.append(Path(tempfile.gettempdir(), f"phalanx-{user}"))
    found: dict[tuple[int, int], Path] = {}
    for base in bases:
        with suppress(OSError):
            status = base.lstat()
            if _is_own_directory(status):
                found.setdefault((status.st_dev, status.st_ino), base)
    return [*found.values()]


@contextmanager
def _os_errors_as_invalid_state() -> Iterator[None]:
    """Raise `InvalidState` where a run cannot have its directory."""
    try:
        yield
    except OSError as error:
        raise InvalidState(
            f"elastic runs need a directory for their sockets: {error}. Set XDG_RUNTIME_DIR to a "
            "writable directory of yours with free space"
        ) from error


def _create_base(base: Path) -> None:
    try:
        base.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        if not base.is_symlink() and not base.exists():
            raise
    _check_owner(base)
    if stat.S_IMODE(base.stat().st_mode) != 0o700:
        base.chmod(0o700)


def _is_own_directory(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _check_owner(base: Path) -> None:
    """Raise `InvalidState` unless the directory is ours: another user could replace the socket."""
    found = base.lstat()
    if not _is_own_directory(found):
        kind = "is not a directory" if found.st_uid == os.geteuid() else "belongs to another user"
        raise InvalidState(
            f"{base} {kind}, so it cannot hold the sockets of elastic runs. Remove it, or set "
            "XDG_RUNTIME_DIR to a directory of yours"
        )


def _make_unique(base: Path, name: str) -> Path:
    while True:
        path = base / f"{name}-{secrets.token_hex(2)}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


def _read_info(path: Path) -> RunInfo | None:
    """Return the description of a run, None if there is none or another program wrote it."""
    types = get_type_hints(RunInfo)
    try:
        told = json.loads((path / _DESCRIPTION).read_text())
        values = {name: told[name] for name in types}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not all(isinstance(values[name], types[name]) for name in types) or values["pid"] < 1:
        return None
    return RunInfo(**values)


def _is_running(info: RunInfo) -> bool:
    if info.pid_since is not None:
        return _process_start(info.pid) == info.pid_since
    try:
        os.kill(info.pid, 0)
    except (OSError, OverflowError):
        return False
    return True


def _process_start(pid: int) -> int | None:
    try:
        found = read_stat(pid)
    except OSError:
        return None
    return None if found.has_exited else int(found.started)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
