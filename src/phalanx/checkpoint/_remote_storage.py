"""Checkpoints on any fsspec file system, which may have neither renames nor locks.

Data is written under its final, unique names, and the manifest last. An object store shows an
object only when it is complete, which takes the place of the rename. It cannot be proven that the
owner of a stray file is dead, so only files of the checkpoint that was replaced are removed.

Torch-free.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from ..errors import DamagedCheckpoint, InvalidArgument
from ._manifest import MANIFEST, MAX_MANIFEST_BYTES, named_files
from ._storage import DATA_FILE_NAME, MessageStore, Sink, Snapshot, Source, Storage, fault_point

_MESSAGE_END = b"\0"
"""Ends a message: some file systems show part of a file before the rest is written."""


def open_filesystem(path: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise InvalidArgument(f"{path} needs fsspec: pip install 'phalanx[cloud]'") from error
    fs, directory = fsspec.core.url_to_fs(path)
    return fs, directory.rstrip("/")


def list_names(fs: Any, directory: str) -> list[str]:
    """List a directory, bypassing fsspec's cache."""
    try:
        found = fs.ls(directory, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    return [each.rstrip("/").rpartition("/")[2] for each in found]


class RemoteStorage(Storage, Snapshot):
    """A checkpoint in a directory of an fsspec file system.

    It is its own snapshot: a save that replaces the checkpoint may remove the files of a reader.
    """

    survives_removal = False

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs, self._directory = open_filesystem(path)
        self._is_committed = False

    def begin(self, owner: str) -> str:  # noqa: ARG002 - there are no locks
        """Create the directory, where directories exist, and remove old messages."""
        self._fs.makedirs(self._directory, exist_ok=True)
        messages = self.message_store()
        for name in messages.names():
            messages.remove(name)  # a live peer sends its message again
        return secrets.token_hex(8)

    @contextmanager
    def create(self, save_id: str, name: str) -> Iterator[Sink]:
        """Write an object. It appears when the block ends, as durable as the store makes it."""
        assert name == MANIFEST or save_id in name, "no two saves write the same object"
        file = self._fs.open(f"{self._directory}/{name}", "wb")
        try:
            yield Sink(file.write)
        except BaseException:
            with suppress(Exception):  # discard, if the store can do that: then nothing appears
                (file.discard if hasattr(file, "discard") else file.close)()
            raise
        fault_point("flush")
        file.close()

    def commit(self, save_id: str, manifest: bytes) -> list[str]:
        old = named_files(self)
        fault_point("publish")
        self._fs.pipe_file(f"{self._directory}/{MANIFEST}", manifest)
        self._is_committed = True
        fault_point("published")
        names = filter(DATA_FILE_NAME.fullmatch, old or ())
        return [name for name in names if save_id not in name]

    def end(self, save_id: str) -> None:
        if self._is_committed:
            return
        with suppress(Exception):  # stores raise errors of any class
            named = named_files(self)  # an upload may have succeeded although it raised
            if named is not None:
                names = {*list_names(self._fs, self._directory)} - named
                ours = filter(DATA_FILE_NAME.fullmatch, names)
                self.discard([name for name in ours if save_id in name])

    def discard(self, names: list[str]) -> None:
        for name in names:
            with suppress(Exception):
                fault_point("discard")
                self._fs.rm_file(f"{self._directory}/{name}")

    def message_store(self) -> RemoteMessageStore:
        return RemoteMessageStore(self._fs, f"{self._directory}/.saving")

    def snapshot(self) -> Self:
        return self

    def manifest(self) -> bytes:
        name = f"{self._directory}/{MANIFEST}"
        if self._fs.info(name)["size"] > MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{name} is too large for a manifest")
        data: bytes = self._fs.cat_file(name)
        return data

    def open(self, name: str) -> _RemoteSource:
        return _RemoteSource(self._fs, f"{self._directory}/{name}")

    def names(self) -> list[str]:
        return list_names(self._fs, self._directory)


class RemoteMessageStore(MessageStore):
    def __init__(self, fs: Any, directory: str) -> None:
        self._fs = fs
        self._directory = directory

    def _write(self, name: str, text: str) -> None:
        with suppress(FileExistsError):  # despite exist_ok, if a peer removes it at that instant
            self._fs.makedirs(self._directory, exist_ok=True)
        self._fs.pipe_file(f"{self._directory}/{name}", text.encode() + _MESSAGE_END)

    def names(self) -> set[str]:
        return {*list_names(self._fs, self._directory)}

    def get(self, name: str) -> str | None:
        try:
            data: bytes = self._fs.cat_file(f"{self._directory}/{name}")
        except FileNotFoundError:
            return None
        return data.removesuffix(_MESSAGE_END).decode() if data.endswith(_MESSAGE_END) else None

    def remove(self, name: str) -> None:
        """Remove an object, and the directory with the last one."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._directory}/{name}")
        with suppress(OSError):
            self._fs.rmdir(self._directory)


class _RemoteSource(Source):
    chunk = 16 << 20  # each chunk is a request

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self.length = fs.info(path)["size"]

    def read_into(self, memory: memoryview, offset: int) -> None:
        data = self._fs.cat_file(self._path, start=offset, end=offset + len(memory))
        if len(data) < len(memory):
            raise EOFError(f"the file ends at {offset + len(data)}")
        memory[:] = data
