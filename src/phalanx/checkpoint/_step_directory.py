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
from collections.abc import Callable, Collection, Iterator
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
from ._storage import DATA_FILE_NAME, Snapshot, fault_point, storage_at, strip_file_scheme

_WORKSPACE = re.compile(r"\.(?P<name>.+)\.saving")


def remove_stale_workspaces(folder: str | os.PathLike[str]) -> list[str]:
    """Remove what killed saves have left in a folder of checkpoints, and return their names.

    What belongs to a save that is going on is left alone.
    """
    removed = []
    for entry in sorted(os.listdir(folder)):
        found = _WORKSPACE.fullmatch(entry)
        if found is None or not (Path(folder) / entry).is_dir():
            continue
        try:
            LocalStorage(str(Path(folder) / found["name"])).tidy(
                f"process {os.getpid()}, tidying up"
            )
        except CheckpointDirectoryInUse:
            continue
        removed.append(found["name"])
    return removed


T = TypeVar("T")

_STEP_NAME = re.compile(r"step-(\d{8,18})")
_REMOVED_NAME = re.compile(r"\.step-\d{8,18}\.removed-[0-9a-f]{8}")
_LOCK_DIRECTORY = ".saving"


def step_name(step: int) -> str:
    """Name the checkpoint of a step, so that names are in the order of steps."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Return the step of which a name is, if it is one."""
    found = _STEP_NAME.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and name == step_name(step) else None


def check_not_checkpoint(path: str, names: Collection[str]) -> None:
    """Refuse what is a checkpoint: whoever took it for a folder of them would begin anew in it."""
    if MANIFEST in names:
        raise InvalidArgument(f"{path} is a checkpoint itself, not a folder of checkpoints")


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the checkpoint at a path, and check that its files are all there."""
    return _read_checked(path, Manifest.load, lambda document: document.files)


def _read_checked(
    path: str, parse: Callable[[bytes, str], T], files: Callable[[T], dict[str, FileEntry]]
) -> T:
    """Read a manifest and check that its files are there, unless a save has just replaced them."""
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
            raise DamagedCheckpoint(
                f"{path}/{name} has {length} bytes and should have {entry.bytes}"
            )


class StepDirectory(ABC):
    """The place of many checkpoints."""

    path: str

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of which there is a committed checkpoint, in order."""

    @abstractmethod
    def obstacle(self, step: int) -> str | None:
        """Say what forbids the removal of a checkpoint; None if nothing does."""

    @abstractmethod
    def remove(self, step: int) -> bool:
        """Take a checkpoint away; False if somebody is reading it."""

    @abstractmethod
    def hold(self, step: int) -> ReadLock | None:
        """Keep a checkpoint from being removed; None if it is not there."""

    @abstractmethod
    def take(self, owner: str) -> None:
        """Take the place for the calling job; raises `CheckpointDirectoryInUse` if another one has
        it.
        """

    @abstractmethod
    def release(self) -> None:
        """Let others have the place."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what dead jobs have left."""

    def place(self, step: int) -> str:
        """Return the path of a step's checkpoint."""
        return f"{self.path.rstrip('/')}/{step_name(step)}"

    def damage(self, step: int) -> str | None:
        """Say why a checkpoint cannot be whole; neither its state nor its data is read."""
        try:
            _read_checked(self.place(step), read_file_entries, lambda files: files)
        except (DamagedCheckpoint, CheckpointNotFound, OSError) as error:
            return str(error)
        return None


class ReadLock:
    """A checkpoint that is kept from being removed."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def close(self) -> None:
        """Let it go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_for_reading(folder: str) -> ReadLock | None:
    """Keep a checkpoint on a file system from being removed; None if it is not there."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    hold = ReadLock(fd)
    if _flock(fd, fcntl.LOCK_SH) and _is_at(fd, folder):
        return hold
    hold.close()
    return None


class LocalStepDirectory(StepDirectory):
    """A folder on a file system."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = Path(path)
        self._lock: DirectoryLock | None = None

    def steps(self) -> list[int]:
        """List the folder."""
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        check_not_checkpoint(self.path, names)
        steps = {name: step for name in names if (step := parse_step_name(name)) is not None}
        return sorted(step for name, step in steps.items() if self._is_committed(name))

    def _is_committed(self, name: str) -> bool:
        return (self._folder / name / MANIFEST).is_file()

    def obstacle(self, step: int) -> str | None:
        """Look for a link and for files that are not ours."""
        folder = Path(self.place(step))
        if folder.is_symlink():
            return "it is a link"
        foreign = sorted(set(os.listdir(folder)) - set(_our_files(folder)))
        return f"{foreign[0]} in it is not ours" if foreign else None

    def remove(self, step: int) -> bool:
        """Rename it, then remove its files."""
        folder = Path(self.place(step))
        away = folder.with_name(f".{folder.name}.removed-{secrets.token_hex(4)}")
        try:
            with _locked(folder, fcntl.LOCK_EX) as held:
                if held:
                    os.rename(folder, away)
        except FileNotFoundError:
            return True  # somebody else has removed it
        fault_point("renamed")
        if held:
            # Else a power cut could bring its name back, and not its files.
            fsync_directory(self._folder)
            _remove_files(away)
        return held

    def hold(self, step: int) -> ReadLock | None:
        """Lock the folder, shared with other readers."""
        return lock_for_reading(self.place(step))

    def take(self, owner: str) -> None:
        """Hold a lock in the folder until it is released, or this process ends."""
        if self._lock is None:
            make_durable_directories(self._folder)
            self._lock = DirectoryLock.take(
                self._folder / _LOCK_DIRECTORY, owner, purpose=self.path
            )

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self) -> None:
        """Remove checkpoints that were being removed, and saves whose owner is proven dead."""
        for name in os.listdir(self._folder):
            if _REMOVED_NAME.fullmatch(name):
                _remove_files(self._folder / name)
        remove_stale_workspaces(self._folder)


def step_directory_at(path: str | os.PathLike[str]) -> StepDirectory:
    """Return the shelf at a path: on the file system, or by fsspec for what has a ``://``."""
    path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"a folder of checkpoints cannot be at {path!r}")
    path = strip_file_scheme(path)
    if "://" in path:
        return RemoteStepDirectory(path)
    return LocalStepDirectory(path)


def _our_files(folder: Path) -> list[str]:
    return [
        name for name in os.listdir(folder) if name == MANIFEST or DATA_FILE_NAME.fullmatch(name)
    ]


def _remove_files(folder: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in _our_files(folder):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody is at the same, or has put something there just now
        folder.rmdir()


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[bool]:
    """Try to lock a folder; tells whether it is, and still under its name."""
    # Not through a link: what is there is not ours to rename, let alone to remove.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _flock(fd, kind) and _is_at(fd, str(folder))
    finally:
        os.close(fd)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        # Anything else says that this file system cannot lock folders; then the rename must do.
        return error.errno != errno.EWOULDBLOCK
    return True


def _is_at(fd: int, folder: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError:
        return False


class RemoteStepDirectory(StepDirectory):
    """A folder of a file system of fsspec: one job at a time must be seen to by the user."""

    def __init__(self, path: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise InvalidArgument(f"{path} needs fsspec: pip install 'phalanx[cloud]'") from error
        self.path = path
        self._fs, folder = fsspec.core.url_to_fs(path)
        self._folder = folder.rstrip("/")

    def steps(self) -> list[int]:
        """List the folder, past any cache."""
        names = self._names(self._folder)
        check_not_checkpoint(self.path, names)
        steps = {parse_step_name(name) for name in names} - {None}
        return sorted(step for step in steps if step is not None and self._is_committed(step))

    def _names(self, folder: str) -> list[str]:
        try:
            found = self._fs.ls(folder, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def _is_committed(self, step: int) -> bool:
        return bool(self._fs.exists(f"{self._at(step)}/{MANIFEST}"))

    def _at(self, step: int) -> str:
        return f"{self._folder}/{step_name(step)}"

    def obstacle(self, step: int) -> str | None:
        """Look for objects that are not ours."""
        names = self._names(self._at(step))
        foreign = sorted(name for name in names if not _is_our_file(name))
        return f"{foreign[0]} in it is not ours" if foreign else None

    def remove(self, step: int) -> bool:
        """Remove the manifest, without which there is no checkpoint, then the rest."""
        folder = self._at(step)
        for name in sorted(self._names(folder), key=lambda name: name != MANIFEST):
            if _is_our_file(name):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{folder}/{name}")
        with suppress(OSError):
            self._fs.rmdir(folder)
        return True

    def hold(self, step: int) -> ReadLock | None:
        """Tell whether it is there; nobody can be kept from removing it."""
        return ReadLock() if self._is_committed(step) else None

    def take(self, owner: str) -> None:
        """Do nothing: there is nowhere to lock."""

    def release(self) -> None:
        """Do nothing."""

    def clean(self) -> None:
        """Do nothing: nobody can prove that the owner of a file is dead."""


def _is_our_file(name: str) -> bool:
    return name == MANIFEST or DATA_FILE_NAME.fullmatch(name) is not None
