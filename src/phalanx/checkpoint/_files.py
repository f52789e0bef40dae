"""Checkpoints on a file system: temporary folder, flush, rename, flush.

Beside the target ``run/step-7`` a save works in ``run/.step-7.saving``::

    lock                     held by rank 0 (flock) and saying who that is
    3f2a…/rank0-3f2a….safetensors
    3f2a…/manifest.json

If nothing is at the target, the folder ``3f2a…`` is renamed to it. If there is a checkpoint, the
new files are moved in beside the old ones and the new manifest over the old one, which is the
instant of the commit. Both need nothing but the renames of POSIX, so they are as atomic on a
network file system as on a disk, and the folder itself is never missing. The old files go when the
ranks have left, each removing its own.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ..errors import DamagedCheckpoint
from . import _progress
from ._board import FileBoard
from ._bytes import CHUNK
from ._document import LARGEST, MANIFEST, Document
from ._locks import Lock
from ._points import reach
from ._storage import NOTE, OUR_FILES, Snapshot, Source, Storage, new_save

__all__ = ["LocalStorage", "flush_folder", "make_folders"]

_TEMPORARY = re.compile("[0-9a-f]{16}")
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Why a folder may not be flushed in which we cannot have made anything either."""


class LocalStorage(Storage):
    """A folder on a file system that all ranks share."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self.workspace = self._target.parent / f".{self._target.name}.saving"
        """Where saves to the path do their work."""
        self._lock: Lock | None = None
        self._is_published = False

    def begin(self, owner: str) -> str:
        """Lock the path, remove what dead jobs have left, and make a temporary folder."""
        make_folders(self._target.parent)
        self._lock = Lock.take(self.workspace, owner, purpose=self.path)
        save = new_save()
        try:
            reach("locked")
            self._remove_leftovers()
            (self.workspace / save).mkdir()
        except BaseException:
            self.end(save)
            raise
        return save

    def tidy(self, owner: str) -> None:
        """Remove what dead jobs have left; raises `FolderInUse` if one is alive."""
        self._lock = Lock.take(self.workspace, owner, purpose=self.path)
        try:
            self._remove_leftovers()
        finally:
            self.end(None)

    def _remove_leftovers(self) -> None:
        """Clean up after saves that were killed: whoever holds the lock knows that they are."""
        for entry in os.scandir(self.workspace):
            if _TEMPORARY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.lstrip(".").startswith(NOTE):
                with suppress(OSError):  # it may just be about to be put up
                    os.unlink(entry.path)  # whoever has left it just now will say it again
        self._remove_strays()

    def _remove_strays(self) -> None:
        """Remove files that no manifest names: a commit did not come, or nobody lived to do it."""
        with suppress(OSError):  # the next save will try again
            strays = self._strays(self._named_files())
            if strays:
                # The manifest may be newer than they are, and must not be lost when they are gone.
                flush_folder(self._target)
                self.discard(strays)

    def _named_files(self) -> set[str] | None:
        """Return the files that belong to the checkpoint, or None if it cannot be known."""
        try:
            with closing(LocalSnapshot(str(self._target))) as snapshot:
                return set(Document.load(snapshot.manifest(), self.path).files)
        except FileNotFoundError:
            return set()
        except (OSError, DamagedCheckpoint):
            return None  # somebody may want to rescue them

    def _strays(self, named: set[str] | None) -> list[str]:
        """List files of saves that are not among those named."""
        if named is None:
            return []
        names = os.listdir(self._target)
        return [name for name in names if OUR_FILES.fullmatch(name) and name not in named]

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
            reach("flush")
            _progress.enter("flushing")
            sink.flush()
        except BaseException:
            sink.remove()  # at once: on a full disk, there must be room to tell the others
            raise
        finally:
            sink.close()
        flush_folder(folder)

    def commit(self, save: str, manifest: bytes) -> list[str]:
        """Write the manifest and put the folder, or else its files, where readers look."""
        folder = self.workspace / save
        replaced: list[str] = []
        with self.create(save, MANIFEST) as sink:
            sink.write(memoryview(manifest))
        _progress.enter("committing")
        reach("publish")
        try:
            os.rename(folder, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            replaced = self._replace(folder)
        self._is_published = True
        reach("published")
        flush_folder(self.workspace)
        flush_folder(self._target.parent)
        return replaced

    def _replace(self, folder: Path) -> list[str]:
        files = [name for name in os.listdir(folder) if OUR_FILES.fullmatch(name)]
        for name in files:
            os.rename(folder / name, self._target / name)
            reach("moved")
        # The manifest must not become durable before the files that it names.
        flush_folder(self._target)
        reach("replace")
        os.rename(folder / MANIFEST, self._target / MANIFEST)
        flush_folder(self._target)
        reach("replaced")
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
                reach("discard")
                (self._target / name).unlink()

    def board(self) -> FileBoard:
        """Leave notes in the folder that saves work in."""
        return FileBoard(self.workspace)

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
            if source.length > LARGEST:
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
    chunk = CHUNK

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


_durable: set[tuple[int, int]] = set()
"""Folders (device and number) whose names are known to be on disk, which costs a flush to know."""


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, durably.

    Those that are there too: another rank may just have made them, to leave a note, or a save that
    was killed before it came to flush them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, *folder.parents[:-1]):
        status = os.stat(each)
        if (status.st_dev, status.st_ino) not in _durable:
            try:
                flush_folder(each.parent)
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
            _durable.add((status.st_dev, status.st_ino))


def flush_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, and keeps no cache of names
            raise
    finally:
        os.close(fd)
