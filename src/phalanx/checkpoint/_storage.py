"""The interface between checkpoints and the storage that holds them.

Every save writes new files, with the save's random id in their names, and the manifest last.
The manifest decides: it appears atomically, it names all files that belong to the checkpoint,
and files that no manifest names are ignored. A save can therefore run beside an older checkpoint
at the same path, and a reader sees either the old checkpoint or the new one.

Torch-free. `_local_storage` and `_remote_storage` implement the interface and import this module;
`storage_at` imports the one it needs when it is called.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import xxhash

from .. import _faultpoints
from ..env import job_id
from ..errors import InvalidArgument
from ._progress import ProgressMeter

CHUNK_BYTES = 2 << 20
"""Data is hashed and written in chunks of this size, which fit into the processor's cache."""
RETRIES = 100  # how often to retry an operation whose directory is removed by another process

DATA_FILE_NAME = re.compile(r"rank(\d+)-[0-9a-f]{16}\.safetensors")
"""Names of data files. Nothing else in a checkpoint's directory is ever removed."""

MESSAGE_PREFIX = "note."


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def fault_point(point: str) -> None:
    """Mark a point of a save at which tests can inject a fault."""
    if _faultpoints.armed:
        _faultpoints.reach(f"checkpoint:{point}")


def data_file_name(save_id: str, rank: int) -> str:
    return f"rank{rank}-{save_id}.safetensors"


def files_to_remove(names: list[str], world_size: int, rank: int) -> list[str]:
    """Return the files that `rank` removes: those it wrote, which its machine has cached."""
    writers = {name: int(found[1]) for name in names if (found := DATA_FILE_NAME.fullmatch(name))}
    return [name for name, writer in writers.items() if writer % world_size == rank]


_adopted_job = ""


def adopt_job_name(job: str) -> None:
    """Use the job name of the rank for which this process writes."""
    global _adopted_job  # noqa: PLW0603 - a process belongs to one job
    _adopted_job = job


def job_name() -> str:
    """Return a name for this job, so that two jobs at one path ignore each other's messages."""
    if _adopted_job:
        return _adopted_job
    return hashlib.sha256((job_id() or str(os.getppid())).encode()).hexdigest()[:16]


class MessageStore(ABC):
    """Small texts by name, through which the ranks of a save communicate without a barrier."""

    def put(self, name: str, text: str) -> None:
        """Store a message; no reader sees part of it."""
        for _ in range(RETRIES):  # a peer that removes its last message removes the directory
            with suppress(FileNotFoundError):
                self._write(name, text)
                return
        raise FileNotFoundError(f"cannot store {name}: a process keeps removing its directory")

    @abstractmethod
    def _write(self, name: str, text: str) -> None:
        """Store a message, in a directory that is created if it does not exist."""

    @abstractmethod
    def names(self) -> set[str]:
        """Return the names of all messages."""

    @abstractmethod
    def get(self, name: str) -> str | None:
        """Return a message, or None if it does not exist or is incomplete."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a message if it exists."""

    def put_locked(self, name: str) -> int | None:
        """Store a message and lock it, so that peers notice when this process dies.

        Returns the descriptor that holds the lock, or None if the storage has no locks.
        """
        self.put(name, "")
        return None

    def is_abandoned(self, name: str) -> bool:  # noqa: ARG002
        """Whether the process that stored a locked message is certainly dead."""
        return False


class Sink:
    """A file that is being written, by a function that may write less than it is given."""

    def __init__(self, write: Callable[[memoryview], int | None]) -> None:
        self._write = write

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        while data:
            count = self._write(data)
            data = data[len(data) if count is None else count :]


class Source(ABC):
    """A data file that is open for reading."""

    chunk: int  # the number of bytes to read at once
    length: int  # the actual length in bytes
    _scratch = bytearray()

    @abstractmethod
    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes at `offset`; raises `EOFError` if there are too few."""

    def close(self) -> None:  # noqa: B027
        """Close the file."""

    def read_chunks(
        self, begin: int, end: int, into: memoryview | None = None
    ) -> Iterator[memoryview]:
        """Yield a range in chunks, read into `into` or else into a buffer that is reused."""
        if into is None and len(self._scratch) < min(self.chunk, end - begin):
            self._scratch = bytearray(min(self.chunk, end - begin))
        for position in range(begin, end, self.chunk):
            size = min(self.chunk, end - position)
            memory = memoryview(self._scratch) if into is None else into[position - begin :]
            self.read_into(memory[:size], position)
            yield memory[:size]

    def checksum(
        self,
        begin: int,
        end: int,
        *,
        into: memoryview | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> str:
        """Return the checksum of a range; `progress` is called with the length of each chunk."""
        digest = xxhash.xxh3_128()
        for chunk in self.read_chunks(begin, end, into):
            digest.update(chunk)
            progress(len(chunk))
        return digest.hexdigest()


class Snapshot(ABC):
    """A checkpoint as it was when it was opened."""

    survives_removal: bool  # whether an open source can be read after its file was removed

    @abstractmethod
    def manifest(self) -> bytes:
        """Read the manifest; raises `FileNotFoundError` if there is none."""

    @abstractmethod
    def open(self, name: str) -> Source:
        """Open a data file; raises `FileNotFoundError` if it was removed."""

    @abstractmethod
    def names(self) -> list[str]:
        """List its directory."""

    def close(self) -> None:  # noqa: B027
        """Close the snapshot, but not its sources."""


class Storage(ABC):
    """The storage of one checkpoint, for one save or one load."""

    path: str

    @abstractmethod
    def begin(self, owner: str) -> str:
        """Lock the path for the job `owner`, remove what dead jobs left, and return a save id."""

    @abstractmethod
    def create(self, save_id: str, name: str) -> AbstractContextManager[Sink]:
        """Open a new file of a save for writing. It is durable when the block ends."""

    @abstractmethod
    def commit(self, save_id: str, manifest: bytes) -> list[str]:
        """Make a save visible atomically and durably; return the files that it replaces."""

    @abstractmethod
    def end(self, save_id: str) -> None:
        """Remove what was not committed and unlock the path. Never raises."""

    @abstractmethod
    def discard(self, names: list[str]) -> None:
        """Remove files that no manifest names any more, as far as possible. Never raises.

        Needs no lock, since no other save uses these names.
        """

    @abstractmethod
    def message_store(self) -> MessageStore:
        """Return the store for messages among the ranks of a save."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Open the current checkpoint; raises `FileNotFoundError` if there is none."""


def strip_file_scheme(path: str) -> str:
    """Return the path of a local file URL, and any other path unchanged.

    Local URLs do not go through fsspec, which has no rename and would overwrite the manifest.
    """
    return path.removeprefix("file://").removeprefix("local://")


def is_remote(path: str) -> bool:
    return "://" in strip_file_scheme(path)


def storage_at(path: str, meter: ProgressMeter | None = None) -> Storage:
    """Return the storage for a path: the local file system, or fsspec for a URL."""
    if not path:
        raise InvalidArgument("path must not be empty")
    path = strip_file_scheme(path)
    if is_remote(path):
        from ._remote_storage import RemoteStorage

        return RemoteStorage(path)
    from ._local_storage import LocalStorage

    return LocalStorage(path, meter)
