"""A lock that dies with its holder, so that who finds it free knows that the holder is gone."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from ..errors import FolderInUse

__all__ = ["Lock", "is_free", "lock_file"]

_NAME = "lock"
_ATTEMPTS = 100


_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def lock_file(fd: int) -> bool:
    """Lock a file of one's own, and tell whether the file system can do that."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def is_free(fd: int) -> bool:
    """Tell whether nobody holds the lock of a file; whoever asks next gets the same answer."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Lock:
    """A locked file in a folder of its own, which is made for it and goes with it."""

    def __init__(self, folder: Path, fd: int) -> None:
        self._folder = folder
        self._fd = fd

    @classmethod
    def take(cls, folder: Path, owner: str, *, purpose: str) -> Lock:
        """Make the folder, take its lock, and write into it who `owner` is."""
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError):
                os.mkdir(folder)  # not by pathlib, which trips if it is removed at that instant
            try:
                fd = _open(folder)
            except FileNotFoundError:
                continue  # the folder went with its holder just now
            lock = cls(folder, fd)
            try:
                lock._acquire(purpose)
                if lock._is_current():
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, owner.encode(), 0)
                    _held.add(lock)
                    return lock
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its holder has removed the file while we waited at it
        raise FolderInUse(f"{purpose} is being saved to by others again and again")

    def _acquire(self, purpose: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 1000, 0).decode(errors="replace")
            if error.errno == errno.EWOULDBLOCK:
                who = holder or "somebody who has not said who it is"
                raise FolderInUse(f"{purpose} is being saved to by {who}") from None
            if error.errno in _NO_LOCKS and not holder:
                return  # a file system without locks, and nobody has been here
            raise FolderInUse(
                f"{purpose} may be being saved to by {holder}; its file system has no locks to "
                f"tell ({error.strerror}). If that job is gone, remove {self._folder}"
            ) from None

    def _is_current(self) -> bool:
        try:
            named = os.stat(self._folder / _NAME)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def release(self) -> None:
        """Remove the file and the folder, then let go; once only."""
        if self._fd < 0:
            return
        with suppress(OSError):
            (self._folder / _NAME).unlink()
            self._folder.rmdir()  # stays while ranks still have notes in it
        self.forget()

    def forget(self) -> None:
        """Close the file, and leave the rest to whoever else has it open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _open(folder: Path) -> int:
    """Open the lock of a folder, of which neither may be a link: who knows to whose file."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        return os.open(_NAME, os.O_CREAT | os.O_RDWR | flags, 0o644, dir_fd=inside)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / _NAME)) from None
    finally:
        os.close(inside)


_held: WeakSet[Lock] = WeakSet()


def _leave_to_parent() -> None:
    for lock in _held:
        lock.forget()


# A forked child (a data loader's, say) would hold the lock when its parent is long dead, and would
# remove its file at its own end.
os.register_at_fork(after_in_child=_leave_to_parent)
