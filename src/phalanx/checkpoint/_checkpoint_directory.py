"""A directory of checkpoints: found by step, locked while they are read, removed atomically.

A checkpoint is ``step-00001000`` in the directory. It is removed by renaming it to a name that
no reader looks for, then deleting its files, so it is there as a whole or not at all. Readers hold
a shared lock on it, and a locked checkpoint stays; without locks, readers that have its files
open can still finish. A checkpoint that is a symbolic link or contains foreign files is never
removed.

Steps are ordered by number; the times of files are never used. Torch-free.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from .. import errors
from ._local_storage import DirectoryLock, LocalStorage, fsync_directory, make_durable_directories
from ._manifest import MANIFEST, ManifestOutline
from ._remote_storage import list_names, open_filesystem
from ._storage import DATA_FILE_NAME, RETRIES, fault_point, is_remote, strip_file_scheme
from ._verify import read_checked_manifest, verify

_STEP_NAME = re.compile(r"step-(\d{8,18})")
_REMOVED_NAME = re.compile(r"\.step-\d{8,18}\.removed-[0-9a-f]{8}")
_WORKSPACE = re.compile(r"\.(.+)\.saving")
_LOCK_DIRECTORY = ".saving"


DCP_METADATA = ".metadata"
DCP_RANK_METADATA = re.compile(r"__(0|[1-9][0-9]{0,7})\.metadata")  # of a save without collectives
RANK_ARCHIVE = re.compile(
    r"checkpoint_(0|[1-9][0-9]{0,7})\.pt"
)  # of torch's experimental checkpointer


def torch_layout(names: Collection[str]) -> Literal["dcp", "rank archives", "hugging face", ""]:
    """Return which layout of torch a directory has, by the names in it; "" if none."""
    if DCP_METADATA in names or any(map(DCP_RANK_METADATA.fullmatch, names)):
        return "dcp"
    if any(map(RANK_ARCHIVE.fullmatch, names)):
        return "rank archives"
    if any(each.endswith(".safetensors") and not _is_our_file(each) for each in names):
        return "hugging face"
    return ""


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint. Names sort in the order of steps."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Return the step of a checkpoint's name, or None for any other name."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found and name == step_name(int(found[1])) else None


def _is_our_file(name: str) -> bool:
    return name == MANIFEST or DATA_FILE_NAME.fullmatch(name) is not None


class CheckpointDirectory(ABC):
    """A directory of checkpoints; without locks, unless a subclass has them."""

    path: str

    @abstractmethod
    def _names(self, step: int | None = None) -> list[str]:
        """List the directory, or the checkpoint of a step; empty if it does not exist."""

    @abstractmethod
    def _is_committed(self, step: int) -> bool: ...

    @abstractmethod
    def remove(self, step: int) -> bool:
        """Remove a checkpoint; False if it is being read."""

    def path_of(self, step: int) -> str:
        return f"{self.path.rstrip('/')}/{step_name(step)}"

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, in order."""
        for _ in range(RETRIES):
            names = self._names()
            if MANIFEST in names:  # a manager there would start a new run inside of a checkpoint
                raise errors.InvalidArgument(
                    f"{self.path} is a checkpoint itself, not a directory of checkpoints"
                )
            found = {step for name in names if (step := parse_step_name(name)) is not None}
            steps = sorted(filter(self._is_committed, found))
            # A newer checkpoint may have replaced the only one since the directory was listed.
            if steps or {*names} == {*self._names()}:
                break
        return steps

    def torch_layout(self) -> str:
        """Return which layout of torch the directory has if it is a checkpoint; "" if none."""
        return torch_layout(self._names())

    def is_damaged(self, step: int, *, read_data: bool = False) -> bool:
        """Whether the manifest or the files of a checkpoint are damaged, or their data."""
        try:
            read_checked_manifest(self.path_of(step), ManifestOutline)
            return read_data and bool(verify(self.path_of(step)))
        except (errors.DamagedCheckpoint, errors.CheckpointNotFound, OSError):
            return True

    def obstacle(self, step: int) -> str | None:
        """Return why a checkpoint must not be removed, or None if it may."""
        foreign = [name for name in self._names(step) if not _is_our_file(name)]
        return f"it contains {min(foreign)}, which is not part of a checkpoint" if foreign else None

    def lock_for_reading(self, step: int) -> ExitStack | None:
        """Protect a checkpoint from removal until the result is closed; None if there is none."""
        return ExitStack() if self._is_committed(step) else None

    def lock(self, owner: str) -> None:  # noqa: B027
        """Lock the directory for a job; raises `CheckpointDirectoryInUse` if another has it."""

    def unlock(self) -> None:  # noqa: B027
        """Unlock the directory."""

    def clean(self) -> None:  # noqa: B027
        """Remove what dead jobs left. Without locks, no owner of a file is certainly dead."""


def checkpoint_directory_at(
    path: str | os.PathLike[str], *, absolute: bool = False
) -> CheckpointDirectory:
    """Return the directory at a path: local, or on fsspec for a URL.

    If `absolute`, a local path survives a change of the working directory.
    """
    path = os.fspath(path)
    if not isinstance(path, str):
        raise errors.InvalidArgument(f"path must be a str or pathlib.Path, got {path!r}")
    if not path:
        raise errors.InvalidArgument("path must not be empty")
    path = strip_file_scheme(path)
    if is_remote(path):
        return RemoteCheckpointDirectory(path)
    return LocalCheckpointDirectory(os.path.abspath(os.path.expanduser(path)) if absolute else path)


class RemoteCheckpointDirectory(CheckpointDirectory):
    """A directory of an fsspec file system. It has no locks: run one job at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs, self._directory = open_filesystem(path)

    def _names(self, step: int | None = None) -> list[str]:
        name = "" if step is None else f"/{step_name(step)}"
        return list_names(self._fs, self._directory + name)

    def _is_committed(self, step: int) -> bool:
        return bool(self._fs.exists(f"{self._directory}/{step_name(step)}/{MANIFEST}"))

    def remove(self, step: int) -> bool:
        """Remove the manifest, without which there is no checkpoint, then the data."""
        directory = f"{self._directory}/{step_name(step)}"
        names = filter(_is_our_file, self._names(step))
        for name in sorted(names, key=lambda name: name != MANIFEST):
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{directory}/{name}")
        with suppress(OSError):
            self._fs.rmdir(directory)
        return True


class LocalCheckpointDirectory(CheckpointDirectory):
    def __init__(self, path: str) -> None:
        self.path = path
        self._directory = Path(path)
        self._lock: DirectoryLock | None = None

    def _names(self, step: int | None = None) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.path if step is None else self.path_of(step))
        return []

    def _is_committed(self, step: int) -> bool:
        return os.path.isfile(f"{self.path_of(step)}/{MANIFEST}")

    def obstacle(self, step: int) -> str | None:
        return "it is a link" if os.path.islink(self.path_of(step)) else super().obstacle(step)

    def remove(self, step: int) -> bool:
        """Rename the checkpoint, then remove its files."""
        directory = Path(self.path_of(step))
        renamed = directory.with_name(f".{directory.name}.removed-{secrets.token_hex(4)}")
        try:
            # Not through a symbolic link: its target is not ours to rename or remove.
            with _locked(directory, fcntl.LOCK_EX, os.O_NOFOLLOW) as is_locked:
                if is_locked:
                    os.rename(directory, renamed)
        except FileNotFoundError:
            return True  # another process has removed it
        fault_point("renamed")
        if is_locked:
            # Else a power failure could restore the name but not the files.
            fsync_directory(self._directory)
            _remove_files(renamed)
        return is_locked

    def lock_for_reading(self, step: int) -> ExitStack | None:
        return lock_for_reading(self.path_of(step))

    def lock(self, owner: str) -> None:
        if self._lock is None:
            make_durable_directories(self._directory)
            self._lock = DirectoryLock.take(
                self._directory / _LOCK_DIRECTORY, owner, target=self.path
            )

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self) -> None:
        for name in os.listdir(self.path):
            found = _WORKSPACE.fullmatch(name)
            if _REMOVED_NAME.fullmatch(name):
                _remove_files(self._directory / name)
            elif found is not None and (self._directory / name).is_dir():
                with suppress(errors.CheckpointDirectoryInUse):  # a save that is alive
                    LocalStorage(str(self._directory / found[1])).remove_leftovers()


def _remove_files(directory: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in filter(_is_our_file, os.listdir(directory)):
            (directory / name).unlink(missing_ok=True)
    with suppress(OSError):  # another process is removing it too, or has put a file there
        directory.rmdir()


def lock_for_reading(directory: str) -> ExitStack | None:
    """Protect a local checkpoint from removal until the result is closed; None if there is none."""
    with ExitStack() as lock, suppress(FileNotFoundError, NotADirectoryError):
        if lock.enter_context(_locked(directory, fcntl.LOCK_SH)):
            return lock.pop_all()
    return None


@contextmanager
def _locked(directory: str | Path, kind: int, flags: int = 0) -> Iterator[bool]:
    """Try to lock a directory; yield whether that succeeded and no process has renamed it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            is_locked = True
        except OSError as error:
            # Any other error: this file system cannot lock directories, and the rename must do.
            is_locked = error.errno != errno.EWOULDBLOCK
        yield is_locked and os.path.samestat(os.fstat(fd), os.stat(directory))
    finally:
        os.close(fd)
