"""Checkpoints on a file system: temporary directory, fsync, rename, fsync.

A save to ``run/step-7`` works in ``run/.step-7.saving``::

    lock                     held by rank 0 (flock); its content names the owner
    3f2a.../rank0-3f2a....safetensors
    3f2a.../manifest.json

If nothing is at the target, ``3f2a...`` is renamed to it. If a checkpoint is there, the new
files are moved in beside the old ones and the new manifest over the old one, which is the
commit. Both need only POSIX renames, so they are atomic on network file systems too, and the
directory is never missing. The old files are removed after the commit, by the ranks that wrote
them.

A lock dies with its holder: a job that gets it knows that the previous owner is gone.
Torch-free.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from weakref import WeakSet

from .._processes import read_stat
from ..errors import CheckpointDirectoryInUse, SaveFailed
from ._manifest import MANIFEST, MAX_MANIFEST_BYTES, named_files
from ._progress import Phase, ProgressMeter
from ._storage import (
    CHUNK_BYTES,
    DATA_FILE_NAME,
    MESSAGE_PREFIX,
    RETRIES,
    MessageStore,
    Sink,
    Snapshot,
    Source,
    Storage,
    fault_point,
)

_LOCK_NAME = "lock"
_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of fsync in a directory in which we cannot have created anything either."""
_SAVE_ID = re.compile("[0-9a-f]{16}")
_DYING_TIMEOUT = 5.0
"""Seconds to wait for a lock of a process that was killed: the kernel closes its files only when it
has freed its memory."""
_DYING_INTERVAL = 0.01


class DirectoryLock:
    """A locked file in a directory that is created for it and removed with it."""

    def __init__(self, directory: Path, fd: int) -> None:
        self._directory = directory
        self._fd = fd

    @classmethod
    def take(cls, directory: Path, owner: str, *, target: str) -> DirectoryLock:
        """Create the directory, take its lock, and write `owner` into it. Protects `target`."""
        for _ in range(RETRIES):
            with suppress(FileExistsError):
                os.mkdir(directory)  # pathlib's mkdir raises if it is removed at that instant
            # The previous holder may remove the directory, or the file while we wait for its lock.
            with suppress(FileNotFoundError), ExitStack() as undo:
                fd = _open_lock(directory)
                undo.callback(os.close, fd)
                lock = cls(directory, fd)
                lock._acquire(target)
                if os.path.samestat(os.stat(directory / _LOCK_NAME), os.fstat(fd)):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, owner.encode(), 0)
                    _held_locks.add(lock)
                    undo.pop_all()
                    return lock
        raise CheckpointDirectoryInUse(f"cannot lock {target}: other jobs keep saving to it")

    def _acquire(self, target: str) -> None:
        deadline = time.monotonic() + _DYING_TIMEOUT
        while not self._try_lock(target):
            if time.monotonic() >= deadline or not _is_held_by_dead(self._fd):
                if self._try_lock(target):  # it was unlocked meanwhile
                    return
                raise CheckpointDirectoryInUse(
                    f"{self._holder() or 'an unknown process'} is saving to {target}"
                )
            time.sleep(_DYING_INTERVAL)

    def _try_lock(self, target: str) -> bool:
        """Take the lock unless another process has it; True if the file system has no locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                return False
            if error.errno not in _LOCKS_UNSUPPORTED:
                raise OSError(error.errno, error.strerror, str(self._directory)) from None
            if holder := self._holder():
                raise CheckpointDirectoryInUse(
                    f"{target} may be in use by {holder}: its file system has no locks "
                    f"({error.strerror}). If that job is dead, remove {self._directory}"
                ) from None
        return True

    def _holder(self) -> str:
        return os.pread(self._fd, 1000, 0).decode(errors="replace")

    def release(self) -> None:
        """Remove the file and the directory, then unlock. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                (self._directory / _LOCK_NAME).unlink()
                self._directory.rmdir()  # fails while ranks still have messages in it
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor without unlocking, if another process shares it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _is_held_by_dead(fd: int) -> bool:
    """Whether a process that has exited still holds the lock of a file on this machine."""
    inode = str(os.fstat(fd).st_ino)
    with suppress(OSError, IndexError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 3185 fe:00:2483075 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                return read_stat(int(fields[4])).has_exited
    return False


def _open_lock(directory: Path) -> int:
    """Open the lock of a directory. Neither may be a symbolic link to someone else's file."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    inside = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        return os.open(_LOCK_NAME, os.O_CREAT | os.O_RDWR | flags, 0o644, dir_fd=inside)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory / _LOCK_NAME)) from None
    finally:
        os.close(inside)


_held_locks: WeakSet[DirectoryLock] = WeakSet()


def _abandon_locks_in_child() -> None:
    for lock in _held_locks:
        lock.abandon()


# A forked child (of a data loader, say) would keep the lock after its parent's death, and would
# remove the lock file when it exits.
os.register_at_fork(after_in_child=_abandon_locks_in_child)


class FileMessageStore(MessageStore):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _write(self, name: str, text: str) -> None:
        with suppress(FileExistsError):
            self._directory.mkdir(parents=True)
        draft = self._directory / f".{name}.draft"
        draft.write_text(text)
        os.rename(draft, self._directory / name)

    def names(self) -> set[str]:
        with suppress(FileNotFoundError):
            return {*os.listdir(self._directory)}
        return set()

    def get(self, name: str) -> str | None:
        with suppress(FileNotFoundError):
            return (self._directory / name).read_text()
        return None

    def remove(self, name: str) -> None:
        """Remove a file, and the directory with the last one."""
        (self._directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            self._directory.rmdir()

    def put_locked(self, name: str) -> int | None:
        """Create a file that is locked when its name appears."""
        draft = f".{name}.draft"
        self.put(draft, "")
        with ExitStack() as undo:
            fd = os.open(self._directory / draft, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _LOCKS_UNSUPPORTED:
                    raise
                self.put(name, "unlocked")
                return None
            os.rename(self._directory / draft, self._directory / name)  # keeps the lock
            undo.pop_all()
            return fd

    def is_abandoned(self, name: str) -> bool:
        """Whether the lock of a message is free. A message that could not be locked has content."""
        try:
            with open(self._directory / name, "r+b") as file:
                if os.fstat(file.fileno()).st_size:
                    return False
                # Shared, so that peers that look at the same time get the same answer.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
        except OSError:
            return False


class LocalStorage(Storage):
    """A checkpoint in a directory of a file system that all ranks share."""

    def __init__(self, path: str, meter: ProgressMeter | None = None) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self.workspace = self._target.parent / f".{self._target.name}.saving"
        """The directory in which saves to the path prepare their files."""
        self._meter = ProgressMeter() if meter is None else meter
        self._lock: DirectoryLock | None = None
        self._is_committed = False

    def begin(self, owner: str) -> str:
        make_durable_directories(self._target.parent)
        self._lock = DirectoryLock.take(self.workspace, owner, target=self.path)
        save_id = secrets.token_hex(8)
        try:
            fault_point("locked")
            for entry in os.scandir(self.workspace):
                if _SAVE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name.lstrip(".").startswith(MESSAGE_PREFIX):
                    # A message of a live peer may be among them; the peer sends it again.
                    with suppress(OSError):
                        os.unlink(entry.path)
            self._remove_strays()
            (self.workspace / save_id).mkdir()
        except BaseException:
            self.end(save_id)
            raise
        return save_id

    def remove_leftovers(self) -> None:
        """Remove what dead jobs left; raises `CheckpointDirectoryInUse` if a save is running."""
        self.end(self.begin(f"process {os.getpid()}, which removes leftovers"))

    def _remove_strays(self) -> None:
        with suppress(OSError):  # the next save tries again
            named = named_files(self)
            # Files of a damaged checkpoint may be worth rescuing.
            if named is not None and (strays := self._strays(named)):
                # The manifest may be newer than the strays, and must be durable before they go.
                fsync_directory(self._target)
                self.discard(strays)

    def _strays(self, named: set[str]) -> list[str]:
        names = os.listdir(self._target)
        return [name for name in names if DATA_FILE_NAME.fullmatch(name) and name not in named]

    @contextmanager
    def create(self, save_id: str, name: str) -> Iterator[Sink]:
        """Write a file in the temporary directory, then fsync it and the directory."""
        directory = self.workspace / save_id
        if not directory.is_dir():
            raise SaveFailed(
                f"{directory} is not visible on this rank; all ranks must share the file system"
            )
        path = directory / name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            yield Sink(partial(os.write, fd))
            fault_point("flush")
            self._meter.enter(Phase.FLUSHING)
            os.fsync(fd)
        except BaseException as error:
            # Before anything else: on a full disk, messages to other ranks need the space.
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)
            raise
        finally:
            os.close(fd)
        fsync_directory(directory)

    def commit(self, save_id: str, manifest: bytes) -> list[str]:
        """Write the manifest, then rename the directory, or its files, to the target."""
        directory = self.workspace / save_id
        replaced: list[str] = []
        with self.create(save_id, MANIFEST) as sink:
            sink.write(memoryview(manifest))
        self._meter.enter(Phase.COMMITTING)
        fault_point("publish")
        try:
            os.rename(directory, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            replaced = self._replace(directory)
        self._is_committed = True
        fault_point("published")
        fsync_directory(self.workspace)
        fsync_directory(self._target.parent)
        return replaced

    def _replace(self, directory: Path) -> list[str]:
        files = [name for name in os.listdir(directory) if DATA_FILE_NAME.fullmatch(name)]
        for name in files:
            os.rename(directory / name, self._target / name)
            fault_point("moved")
        # The manifest must not become durable before the files that it names.
        fsync_directory(self._target)
        fault_point("replace")
        os.rename(directory / MANIFEST, self._target / MANIFEST)
        fsync_directory(self._target)
        fault_point("replaced")
        return self._strays(set(files))

    def end(self, save_id: str) -> None:
        try:
            shutil.rmtree(self.workspace / save_id, ignore_errors=True)
            if self._lock is not None and not self._is_committed:
                self._remove_strays()
        finally:  # else no job could save here while this process lives
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def discard(self, names: list[str]) -> None:
        for name in names:
            with suppress(OSError):  # the next save tries again
                fault_point("discard")
                (self._target / name).unlink()

    def message_store(self) -> FileMessageStore:
        return FileMessageStore(self.workspace)

    def snapshot(self) -> LocalSnapshot:
        return LocalSnapshot(self.path)


class LocalSnapshot(Snapshot):
    """An open directory; renames and removals do not affect what is read."""

    survives_removal = True

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def manifest(self) -> bytes:
        with closing(self.open(MANIFEST)) as source:
            if source.length > MAX_MANIFEST_BYTES:
                raise OSError(errno.EFBIG, f"a manifest of {source.length} bytes", MANIFEST)
            data = bytearray(source.length)
            source.read_into(memoryview(data), 0)
        return bytes(data)

    def open(self, name: str) -> _FileSource:
        """Open a regular file: a link could lead anywhere, and a pipe would block."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=self._fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return _FileSource(fd)

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _FileSource(Source):
    chunk = CHUNK_BYTES

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.length = os.fstat(fd).st_size

    def read_into(self, memory: memoryview, offset: int) -> None:
        while memory:
            # Not mapped: reading a file that was truncated must raise, not kill the process.
            count = os.preadv(self._fd, [memory], offset)
            if count == 0:
                raise EOFError(f"the file ends at {offset}")
            memory, offset = memory[count:], offset + count

    def close(self) -> None:
        os.close(self._fd)


_durable_directories: set[tuple[int, int]] = set()
"""Directories (device and inode) whose names are known to be durable, to save an fsync."""


def make_durable_directories(directory: Path) -> None:
    """Create a directory and its parents durably.

    Existing ones are synced too: another rank may have just created them, or a save that was
    killed before it synced them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for each in (directory, *directory.parents[:-1]):
        status = os.stat(each)
        if (status.st_dev, status.st_ino) not in _durable_directories:
            try:
                fsync_directory(each.parent)
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
            _durable_directories.add((status.st_dev, status.st_ino))


def fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot, and need not
            raise
    finally:
        os.close(fd)
