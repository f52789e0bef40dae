"""A directory of checkpoints: found by step, locked while they are read, removed atomically.

A checkpoint is ``step-00001000`` in the directory. It is removed by renaming it to a name that
nobody looks for, then deleting its files, so it is there as a whole or not at all. Readers hold
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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ..errors import (
    CheckpointDirectoryInUse,
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
)
from ._local_storage import DirectoryLock, LocalStorage, fsync_directory, make_durable_directories
from ._manifest import MANIFEST, FileEntry, Manifest, read_file_entries
from ._remote_storage import list_names, open_filesystem
from ._storage import (
    DATA_FILE_NAME,
    RETRIES,
    Snapshot,
    fault_point,
    storage_at,
    strip_file_scheme,
)

T = TypeVar("T")

_STEP_NAME = re.compile(r"step-(\d{8,18})")
_REMOVED_NAME = re.compile(r"\.step-\d{8,18}\.removed-[0-9a-f]{8}")
_WORKSPACE = re.compile(r"\.(?P<name>.+)\.saving")
_LOCK_DIRECTORY = ".saving"


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint. Names sort in the order of steps."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Return the step of a checkpoint's name, or None for any other name."""
    found = _STEP_NAME.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and name == step_name(step) else None


def read_manifest(path: str) -> Manifest:
    """Read the manifest of a checkpoint, and check that its files exist with the right lengths."""
    return _read_checked(path, Manifest.load, lambda document: document.files)


def _read_checked(
    path: str, parse: Callable[[bytes, str], T], files: Callable[[T], dict[str, FileEntry]]
) -> T:
    """Read a manifest and check its files; start over if a save replaces it meanwhile."""
    try:
        with closing(storage_at(path).snapshot()) as snapshot:
            while True:
                data = snapshot.manifest()
                parsed = parse(data, f"{path}/{MANIFEST}")
                try:
                    _check_files(path, files(parsed), snapshot)
                except DamagedCheckpoint:
                    if snapshot.manifest() == data:
                        raise
                else:
                    return parsed
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"there is no checkpoint at {path}") from None


def _check_files(path: str, files: dict[str, FileEntry], snapshot: Snapshot) -> None:
    for name, entry in files.items():
        try:
            with closing(snapshot.open(name)) as source:
                length = source.length
        except OSError as error:
            raise DamagedCheckpoint(f"{path}/{name} cannot be opened: {error.strerror}") from None
        if length != entry.bytes:
            raise DamagedCheckpoint(f"{path}/{name} has {length} bytes, expected {entry.bytes}")


class StepDirectory(ABC):
    """A directory of checkpoints."""

    path: str

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, in order."""

    @abstractmethod
    def obstacle(self, step: int) -> str | None:
        """Return why a checkpoint must not be removed, or None if it may."""

    @abstractmethod
    def remove(self, step: int) -> bool:
        """Remove a checkpoint; False if it is being read."""

    @abstractmethod
    def lock_for_reading(self, step: int) -> ReadLock | None:
        """Protect a checkpoint from removal; None if it does not exist."""

    @abstractmethod
    def lock(self, owner: str) -> None:
        """Lock the directory for a job; raises `CheckpointDirectoryInUse` if another has it."""

    @abstractmethod
    def unlock(self) -> None:
        """Unlock the directory."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what dead jobs left."""

    def path_of(self, step: int) -> str:
        """Return the path of a step's checkpoint."""
        return f"{self.path.rstrip('/')}/{step_name(step)}"

    def damage(self, step: int) -> str | None:
        """Return what is wrong with a checkpoint's manifest and files. Their data is not read."""
        try:
            _read_checked(self.path_of(step), read_file_entries, lambda files: files)
        except (DamagedCheckpoint, CheckpointNotFound, OSError) as error:
            return str(error)
        return None


def step_directory_at(path: str | os.PathLike[str]) -> StepDirectory:
    """Return the directory at a path: local, or on fsspec if it contains ``://``."""
    path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"the path of a checkpoint directory cannot be {path!r}")
    path = strip_file_scheme(path)
    if "://" in path:
        return RemoteStepDirectory(path)
    return LocalStepDirectory(path)


def _committed_steps(
    path: str, names: Collection[str], is_committed: Callable[[int], bool]
) -> list[int]:
    if MANIFEST in names:  # a manager there would start a new run inside of a checkpoint
        raise InvalidArgument(f"{path} is a checkpoint itself, not a directory of checkpoints")
    steps = {step for name in names if (step := parse_step_name(name)) is not None}
    return sorted(step for step in steps if is_committed(step))


def _is_our_file(name: str) -> bool:
    return name == MANIFEST or DATA_FILE_NAME.fullmatch(name) is not None


def _foreign_file(names: Iterable[str]) -> str | None:
    foreign = sorted(name for name in names if not _is_our_file(name))
    return f"it contains {foreign[0]}, which is not part of a checkpoint" if foreign else None


class ReadLock:
    """A lock that protects a checkpoint from removal."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_for_reading(directory: str) -> ReadLock | None:
    """Protect a local checkpoint from removal; None if it does not exist."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    lock = ReadLock(fd)
    if _flock(fd, fcntl.LOCK_SH) and _is_at(fd, directory):
        return lock
    lock.close()
    return None


class LocalStepDirectory(StepDirectory):
    """A directory on a local or shared file system."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._directory = Path(path)
        self._lock: DirectoryLock | None = None

    def steps(self) -> list[int]:
        for _ in range(RETRIES):
            names = self._names()
            steps = _committed_steps(
                self.path, names, lambda step: (Path(self.path_of(step)) / MANIFEST).is_file()
            )
            # A newer checkpoint may have replaced the only one since the directory was listed.
            if steps or {*names} == {*self._names()}:
                break
        return steps

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def obstacle(self, step: int) -> str | None:
        """Look for a symbolic link and for foreign files."""
        directory = Path(self.path_of(step))
        if directory.is_symlink():
            return "it is a link"
        return _foreign_file(os.listdir(directory))

    def remove(self, step: int) -> bool:
        """Rename the checkpoint, then remove its files."""
        directory = Path(self.path_of(step))
        renamed = directory.with_name(f".{directory.name}.removed-{secrets.token_hex(4)}")
        try:
            with _locked(directory, fcntl.LOCK_EX) as is_locked:
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

    def lock_for_reading(self, step: int) -> ReadLock | None:
        return lock_for_reading(self.path_of(step))

    def lock(self, owner: str) -> None:
        if self._lock is None:
            make_durable_directories(self._directory)
            self._lock = DirectoryLock.take(
                self._directory / _LOCK_DIRECTORY, owner, purpose=self.path
            )

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self) -> None:
        for name in os.listdir(self._directory):
            if _REMOVED_NAME.fullmatch(name):
                _remove_files(self._directory / name)
        remove_stale_workspaces(self._directory)


def remove_stale_workspaces(directory: str | os.PathLike[str]) -> list[str]:
    """Remove what killed saves left in a directory of checkpoints, and return their names.

    Workspaces of live saves stay.
    """
    removed = []
    for entry in sorted(os.listdir(directory)):
        found = _WORKSPACE.fullmatch(entry)
        if found is None or not (Path(directory) / entry).is_dir():
            continue
        storage = LocalStorage(str(Path(directory) / found["name"]))
        try:
            storage.remove_stale_files(f"process {os.getpid()}, which removes stale files")
        except CheckpointDirectoryInUse:
            continue
        removed.append(found["name"])
    return removed


def _remove_files(directory: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in filter(_is_our_file, os.listdir(directory)):
            (directory / name).unlink(missing_ok=True)
    with suppress(OSError):  # another process is removing it too, or has put a file there
        directory.rmdir()


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[bool]:
    """Try to lock a directory; yields whether it is locked and still has its name."""
    # Not through a symbolic link: its target is not ours to rename or remove.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _flock(fd, kind) and _is_at(fd, str(directory))
    finally:
        os.close(fd)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error: this file system cannot lock directories, and the rename must do.
        return error.errno != errno.EWOULDBLOCK
    return True


def _is_at(fd: int, directory: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(directory))
    except FileNotFoundError:
        return False


class RemoteStepDirectory(StepDirectory):
    """A directory of an fsspec file system. It has no locks: run one job at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs, self._directory = open_filesystem(path)

    def steps(self) -> list[int]:
        return _committed_steps(
            self.path, list_names(self._fs, self._directory), self._is_committed
        )

    def _is_committed(self, step: int) -> bool:
        return bool(self._fs.exists(f"{self._directory}/{step_name(step)}/{MANIFEST}"))

    def obstacle(self, step: int) -> str | None:
        """Look for foreign objects."""
        return _foreign_file(list_names(self._fs, f"{self._directory}/{step_name(step)}"))

    def remove(self, step: int) -> bool:
        """Remove the manifest, without which there is no checkpoint, then the data."""
        directory = f"{self._directory}/{step_name(step)}"
        names = filter(_is_our_file, list_names(self._fs, directory))
        for name in sorted(names, key=lambda name: name != MANIFEST):
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{directory}/{name}")
        with suppress(OSError):
            self._fs.rmdir(directory)
        return True

    def lock_for_reading(self, step: int) -> ReadLock | None:
        return ReadLock() if self._is_committed(step) else None

    def lock(self, owner: str) -> None:
        """Do nothing: there are no locks."""

    def unlock(self) -> None:
        """Do nothing."""

    def clean(self) -> None:
        """Do nothing: nobody can prove that the owner of a file is dead."""
