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
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from ..errors import CheckpointDirectoryInUse, DamagedCheckpoint
from . import _progress
from ._manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from ._storage import (
    CHUNK_BYTES,
    DATA_FILE_NAME,
    MESSAGE_PREFIX,
    Snapshot,
    Source,
    Storage,
    fault_point,
    new_save_id,
)

_LOCK_NAME = "lock"
_ATTEMPTS = 100


_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def lock_file(fd: int) -> bool:
    """Lock a file of one's own, and tell whether the file system can do that."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise
        return False
    return True


def is_unlocked(fd: int) -> bool:
    """Tell whether nobody holds the lock of a file; whoever asks next gets the same answer."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class DirectoryLock:
    """A locked file in a folder of its own, which is made for it and goes with it."""

    def __init__(self, folder: Path, fd: int) -> None:
        self._folder = folder
        self._fd = fd

    @classmethod
    def take(cls, folder: Path, owner: str, *, purpose: str) -> DirectoryLock:
        """Make the folder, take its lock, and write into it who `owner` is."""
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError):
                os.mkdir(folder)  # not by pathlib, which trips if it is removed at that instant
            try:
                fd = _open_lock(folder)
            except FileNotFoundError:
                continue  # the folder went with its holder just now
            lock = cls(folder, fd)
            try:
                lock._acquire(purpose)
                if lock._is_current():
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, owner.encode(), 0)
                    _held_locks.add(lock)
                    return lock
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its holder has removed the file while we waited at it
        raise CheckpointDirectoryInUse(f"{purpose} is being saved to by others again and again")

    def _acquire(self, purpose: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 1000, 0).decode(errors="replace")
            if error.errno == errno.EWOULDBLOCK:
                who = holder or "somebody who has not said who it is"
                raise CheckpointDirectoryInUse(f"{purpose} is being saved to by {who}") from None
            if error.errno in _LOCKS_UNSUPPORTED and not holder:
                return  # a file system without locks, and nobody has been here
            raise CheckpointDirectoryInUse(
                f"{purpose} may be being saved to by {holder}; its file system has no locks to "
                f"tell ({error.strerror}). If that job is gone, remove {self._folder}"
            ) from None

    def _is_current(self) -> bool:
        try:
            named = os.stat(self._folder / _LOCK_NAME)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def release(self) -> None:
        """Remove the file and the folder, then let go; once only."""
        if self._fd < 0:
            return
        with suppress(OSError):
            (self._folder / _LOCK_NAME).unlink()
            self._folder.rmdir()  # stays while ranks still have notes in it
        self.forget()

    def forget(self) -> None:
        """Close the file, and leave the rest to whoever else has it open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _open_lock(folder: Path) -> int:
    """Open the lock of a folder, of which neither may be a link: who knows to whose file."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        return os.open(_LOCK_NAME, os.O_CREAT | os.O_RDWR | flags, 0o644, dir_fd=inside)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / _LOCK_NAME)) from None
    finally:
        os.close(inside)


_held_locks: WeakSet[DirectoryLock] = WeakSet()


def _forget_locks_in_child() -> None:
    for lock in _held_locks:
        lock.forget()


# A forked child (a data loader's, say) would hold the lock when its parent is long dead, and would
# remove its file at its own end.
os.register_at_fork(after_in_child=_forget_locks_in_child)


class FileMessageStore:
    """Notes as small files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        """Leave a note under a name that appears at once."""
        draft = self._folder / f".{name}.draft"
        for _ in range(_ATTEMPTS):  # the folder may be removed right after it was made
            with suppress(FileExistsError):
                self._folder.mkdir(parents=True)
            with suppress(FileNotFoundError):
                draft.write_text(text)
                os.rename(draft, self._folder / name)
                return
        raise FileNotFoundError(f"somebody removes {self._folder} again and again")

    def names(self) -> set[str]:
        """List the folder."""
        try:
            return set(os.listdir(self._folder))
        except FileNotFoundError:
            return set()

    def get(self, name: str) -> str | None:
        """Read a note."""
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove a note."""
        (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()  # the last one closes the door

    def stand(self, name: str) -> int | None:
        """Leave a note, and hold a lock on it."""
        draft = f".{name}.draft"
        self.put(draft, "")
        fd = os.open(self._folder / draft, os.O_RDWR | os.O_CLOEXEC)
        try:
            is_locked = lock_file(fd)
            os.rename(self._folder / draft, self._folder / name)  # the lock goes with it
        except BaseException:
            os.close(fd)
            raise
        if is_locked:
            return fd
        os.close(fd)
        self.put(name, "unlocked")
        return None

    def is_abandoned(self, name: str) -> bool:
        """Try whether the lock is free; a note without one says so."""
        try:
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not os.fstat(fd).st_size and is_unlocked(fd)
        finally:
            os.close(fd)


_SAVE_ID = re.compile("[0-9a-f]{16}")
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Why a folder may not be flushed in which we cannot have made anything either."""


class LocalStorage(Storage):
    """A folder on a file system that all ranks share."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self.workspace = self._target.parent / f".{self._target.name}.saving"
        """Where saves to the path do their work."""
        self._lock: DirectoryLock | None = None
        self._is_published = False

    def begin(self, owner: str) -> str:
        """Lock the path, remove what dead jobs have left, and make a temporary folder."""
        make_durable_directories(self._target.parent)
        self._lock = DirectoryLock.take(self.workspace, owner, purpose=self.path)
        save = new_save_id()
        try:
            fault_point("locked")
            self._remove_leftovers()
            (self.workspace / save).mkdir()
        except BaseException:
            self.end(save)
            raise
        return save

    def tidy(self, owner: str) -> None:
        """Remove what dead jobs have left; raises `CheckpointDirectoryInUse` if one is alive."""
        self._lock = DirectoryLock.take(self.workspace, owner, purpose=self.path)
        try:
            self._remove_leftovers()
        finally:
            self.end(None)

    def _remove_leftovers(self) -> None:
        """Clean up after saves that were killed: whoever holds the lock knows that they are."""
        for entry in os.scandir(self.workspace):
            if _SAVE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.lstrip(".").startswith(MESSAGE_PREFIX):
                with suppress(OSError):  # it may just be about to be put up
                    os.unlink(entry.path)  # whoever has left it just now will say it again
        self._remove_strays()

    def _remove_strays(self) -> None:
        """Remove files that no manifest names: a commit did not come, or nobody lived to do it."""
        with suppress(OSError):  # the next save will try again
            strays = self._strays(self._named_files())
            if strays:
                # The manifest may be newer than they are, and must not be lost when they are gone.
                fsync_directory(self._target)
                self.discard(strays)

    def _named_files(self) -> set[str] | None:
        """Return the files that belong to the checkpoint, or None if it cannot be known."""
        try:
            with closing(LocalSnapshot(str(self._target))) as snapshot:
                return set(Manifest.load(snapshot.manifest(), self.path).files)
        except FileNotFoundError:
            return set()
        except (OSError, DamagedCheckpoint):
            return None  # somebody may want to rescue them

    def _strays(self, named: set[str] | None) -> list[str]:
        """List files of saves that are not among those named."""
        if named is None:
            return []
        names = os.listdir(self._target)
        return [name for name in names if DATA_FILE_NAME.fullmatch(name) and name not in named]

    @contextmanager
    def create(self, save: str, name: str) -> Iterator[_Sink]:
        """Write a file in the temporary folder, and flush it and its folder."""
        folder = self.workspace / save
        if not folder.is_dir():
            problem = "rank 0 has made this folder, but not here; do ranks share the file system?"
            raise FileNotFoundError(errno.ENOENT, problem, str(folder))
        sink = _Sink(folder / name)
        try:
            yield sink
            fault_point("flush")
            _progress.enter_phase("flushing")
            sink.flush()
        except BaseException:
            sink.remove()  # at once: on a full disk, there must be room to tell the others
            raise
        finally:
            sink.close()
        fsync_directory(folder)

    def commit(self, save: str, manifest: bytes) -> list[str]:
        """Write the manifest and put the folder, or else its files, where readers look."""
        folder = self.workspace / save
        replaced: list[str] = []
        with self.create(save, MANIFEST) as sink:
            sink.write(memoryview(manifest))
        _progress.enter_phase("committing")
        fault_point("publish")
        try:
            os.rename(folder, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            replaced = self._replace(folder)
        self._is_published = True
        fault_point("published")
        fsync_directory(self.workspace)
        fsync_directory(self._target.parent)
        return replaced

    def _replace(self, folder: Path) -> list[str]:
        files = [name for name in os.listdir(folder) if DATA_FILE_NAME.fullmatch(name)]
        for name in files:
            os.rename(folder / name, self._target / name)
            fault_point("moved")
        # The manifest must not become durable before the files that it names.
        fsync_directory(self._target)
        fault_point("replace")
        os.rename(folder / MANIFEST, self._target / MANIFEST)
        fsync_directory(self._target)
        fault_point("replaced")
        return self._strays(set(files))

    def end(self, save: str | None) -> None:
        """Remove the temporary folder, and unlock the path."""
        try:
            if save is not None:
                shutil.rmtree(self.workspace / save, ignore_errors=True)
            if self._lock is not None and not self._is_published:
                self._remove_strays()
        finally:  # whatever happens: nobody could save here as long as this process lives
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def discard(self, names: list[str]) -> None:
        """Remove files from the folder."""
        for name in names:
            with suppress(OSError):  # the next save will try again
                fault_point("discard")
                (self._target / name).unlink()

    def board(self) -> FileMessageStore:
        """Leave notes in the folder that saves work in."""
        return FileMessageStore(self.workspace)

    def snapshot(self) -> LocalSnapshot:
        """Open the folder."""
        return LocalSnapshot(self.path)


class _Sink:
    """A new file; its name is told in errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        with self._naming():
            while data:
                data = data[os.write(self._fd, data) :]

    def flush(self) -> None:
        """Wait until the disk has it."""
        with self._naming():
            os.fsync(self._fd)

    def remove(self) -> None:
        """Give its space back."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class LocalSnapshot(Snapshot):
    """A folder that is held open: nothing that happens to its name changes what is read."""

    stays = True

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def manifest(self) -> bytes:
        """Read the manifest."""
        source = self.open(MANIFEST)
        try:
            if source.length > MAX_MANIFEST_BYTES:
                raise OSError(errno.EFBIG, f"a manifest of {source.length} bytes", MANIFEST)
            data = bytearray(source.length)
            source.read_into(memoryview(data), 0)
        finally:
            source.close()
        return bytes(data)

    def open(self, name: str) -> _FileSource:
        """Open a plain file of the folder; a link could lead anywhere, and a pipe would block."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        source = _FileSource(os.open(name, flags, dir_fd=self._fd))
        if not source.is_plain:
            source.close()
            raise OSError(errno.EINVAL, "not a plain file", name)
        return source

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)


class _FileSource(Source):
    chunk = CHUNK_BYTES

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def is_plain(self) -> bool:
        return stat.S_ISREG(os.fstat(self._fd).st_mode)

    @property
    def length(self) -> int:
        return os.fstat(self._fd).st_size

    def read_into(self, memory: memoryview, offset: int) -> None:
        while memory:
            # Not mapped: a file that somebody cuts short must raise, not kill the process.
            count = os.preadv(self._fd, [memory], offset)
            if count == 0:
                raise EOFError(f"the file ends at {offset}")
            memory, offset = memory[count:], offset + count

    def close(self) -> None:
        os.close(self._fd)


_durable_directories: set[tuple[int, int]] = set()
"""Folders (device and number) whose names are known to be on disk, which costs a flush to know."""


def make_durable_directories(folder: Path) -> None:
    """Make a folder and those above it, durably.

    Those that are there too: another rank may just have made them, to leave a note, or a save that
    was killed before it came to flush them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, *folder.parents[:-1]):
        status = os.stat(each)
        if (status.st_dev, status.st_ino) not in _durable_directories:
            try:
                fsync_directory(each.parent)
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
            _durable_directories.add((status.st_dev, status.st_ino))


def fsync_directory(folder: Path) -> None:
    """Wait until the disk knows the names in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, and keeps no cache of names
            raise
    finally:
        os.close(fd)
