"""Checkpoints on any fsspec file system, which may have neither renames nor locks.

Data is written under its final, unique names, and the manifest last. An object store shows an
object only when it is complete, which takes the place of the rename. Nobody can prove that the
owner of a stray file is dead, so only files of the checkpoint that was replaced are removed.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from ..errors import DamagedCheckpoint, InvalidArgument
from ._manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from ._storage import DATA_FILE_NAME, Snapshot, Source, Storage, fault_point, new_save_id

_ATTEMPTS = 100
_MESSAGE_END = (
    b"\0"  # of a note: on what is no object store, some of it may be seen before the rest
)


class RemoteStorage(Storage):
    """A folder of a file system of fsspec."""

    def __init__(self, path: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise InvalidArgument(f"{path} needs fsspec: pip install 'phalanx[cloud]'") from error
        self.path = path
        self._fs, folder = fsspec.core.url_to_fs(path)
        self._folder = folder.rstrip("/")
        self._is_published = False

    def begin(self, owner: str) -> str:  # noqa: ARG002 - there is nowhere to lock
        """Make the folder, where folders exist, and take old notes away."""
        self._fs.makedirs(self._folder, exist_ok=True)
        board = self.board()
        for name in board.names():
            board.remove(name)  # whoever has left it just now will say it again
        return new_save_id()

    @contextmanager
    def create(self, save: str, name: str) -> Iterator[_RemoteSink]:
        """Write an object; it is there when the block ends, as durable as the store makes it."""
        assert name == MANIFEST or save in name, "no two saves write the same object"
        file = self._fs.open(f"{self._folder}/{name}", "wb")
        try:
            yield _RemoteSink(file)
        except BaseException:
            _discard(file)
            raise
        fault_point("flush")
        file.close()

    def commit(self, save: str, manifest: bytes) -> list[str]:
        """Put the manifest, and return the files of the one that it has replaced."""
        old = self._named_files()
        fault_point("publish")
        self._fs.pipe_file(f"{self._folder}/{MANIFEST}", manifest)
        self._is_published = True
        fault_point("published")
        return [name for name in old or () if DATA_FILE_NAME.fullmatch(name) and save not in name]

    def _named_files(self) -> list[str] | None:
        """Return the files that belong to the checkpoint, or None if it cannot be known."""
        try:
            data = self._fs.cat_file(f"{self._folder}/{MANIFEST}")
            return list(Manifest.load(data, self.path).files)
        except FileNotFoundError:
            return []
        except DamagedCheckpoint:
            return None

    def end(self, save: str | None) -> None:
        """Remove the files of a save that did not happen."""
        if save is None or self._is_published:
            return
        with suppress(Exception):  # of any kind, as stores have their own
            named = self._named_files()  # an upload may have arrived although it seemed to fail
            found = self._fs.ls(self._folder, detail=False, refresh=True)
            names = {each.rpartition("/")[2] for each in found if named is not None}
            names -= set(named or ())
            self.discard(
                [name for name in names if DATA_FILE_NAME.fullmatch(name) and save in name]
            )

    def discard(self, names: list[str]) -> None:
        """Remove objects."""
        for name in names:
            with suppress(Exception):
                fault_point("discard")
                self._fs.rm_file(f"{self._folder}/{name}")

    def board(self) -> RemoteMessageStore:
        """Leave notes in a folder below."""
        return RemoteMessageStore(self._fs, f"{self._folder}/.saving")

    def snapshot(self) -> RemoteSnapshot:
        """Look at the folder."""
        return RemoteSnapshot(self._fs, self._folder)


class _RemoteSink:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        while data:
            count = self._file.write(data)
            data = data[len(data) if count is None else count :]


def _discard(file: Any) -> None:
    """Close a file so that nothing appears, where the store can do that."""
    with suppress(Exception):
        if hasattr(file, "discard"):
            file.discard()
        else:
            file.close()


class RemoteMessageStore:
    """Notes as small objects."""

    def __init__(self, fs: Any, folder: str) -> None:
        self._fs = fs
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        """Put an object."""
        for _ in range(_ATTEMPTS):  # where there are folders, others remove this one when empty
            with suppress(FileExistsError):
                self._fs.makedirs(self._folder, exist_ok=True)
            with suppress(FileNotFoundError):
                self._fs.pipe_file(f"{self._folder}/{name}", text.encode() + _MESSAGE_END)
                return
        raise FileNotFoundError(f"somebody removes {self._folder} again and again")

    def names(self) -> set[str]:
        """List the folder, past any cache."""
        try:
            found = self._fs.ls(self._folder, detail=False, refresh=True)
        except FileNotFoundError:
            return set()
        return {each.rpartition("/")[2] for each in found}

    def get(self, name: str) -> str | None:
        """Get an object, if all of it has arrived."""
        try:
            data: bytes = self._fs.cat_file(f"{self._folder}/{name}")
        except FileNotFoundError:
            return None
        return data.removesuffix(_MESSAGE_END).decode() if data.endswith(_MESSAGE_END) else None

    def remove(self, name: str) -> None:
        """Remove an object."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._folder}/{name}")
        with suppress(OSError):
            self._fs.rmdir(self._folder)

    def stand(self, name: str) -> int | None:
        """Leave a note; an object store cannot know whether anybody is alive."""
        self.put(name, "")
        return None

    def is_abandoned(self, name: str) -> bool:  # noqa: ARG002 - of no note
        """Be certain of nothing."""
        return False


class RemoteSnapshot(Snapshot):
    """A folder as it is now; a save that replaces it may remove its files at any time."""

    stays = False

    def __init__(self, fs: Any, folder: str) -> None:
        self._fs = fs
        self._folder = folder

    def manifest(self) -> bytes:
        """Get the manifest."""
        name = f"{self._folder}/{MANIFEST}"
        if self._fs.info(name)["size"] > MAX_MANIFEST_BYTES:
            raise OSError(f"{name} is too large for a manifest")
        data: bytes = self._fs.cat_file(name)
        return data

    def open(self, name: str) -> _RemoteSource:
        """Open an object."""
        return _RemoteSource(self._fs, f"{self._folder}/{name}")

    def close(self) -> None:
        """Nothing is held."""


class _RemoteSource(Source):
    chunk = 16 << 20  # every one is a request

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._length: int = fs.info(path)["size"]

    @property
    def length(self) -> int:
        return self._length

    def read_into(self, memory: memoryview, offset: int) -> None:
        data = self._fs.cat_file(self._path, start=offset, end=offset + len(memory))
        if len(data) < len(memory):
            raise EOFError(f"the file ends at {offset + len(data)}")
        memory[:] = data

    def close(self) -> None:
        pass
