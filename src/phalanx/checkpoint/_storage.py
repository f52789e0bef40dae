"""The interface between checkpoints and the place that holds them.

Every save writes files of its own, with the save's random id in their names, and the manifest
last. The manifest decides: it appears atomically, it names all files that belong to the
checkpoint, and files that no manifest names are ignored. A save can therefore run beside an
older checkpoint at the same path, and a reader sees the one or the other.

Torch-free. Imports nothing of this package, so that every module may import it.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import xxhash

from .. import _faultpoints
from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ._tensor_file import Sink


CHUNK_BYTES = 2 << 20
"""Bytes that are hashed and then written while they are still in the processor's cache."""


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, as manifests have it."""
    return xxhash.xxh3_128_hexdigest(data)


def fault_point(point: str) -> None:
    """Say that a save has come to a point."""
    if _faultpoints.armed:
        _faultpoints.reach(f"checkpoint:{point}")


DATA_FILE_NAME = re.compile(r"rank(\d+)-[0-9a-f]{16}\.safetensors")
"""The names of data files; nothing else in a folder is ever removed."""

MESSAGE_PREFIX = "note."
"""How the names of notes begin."""


def new_save_id() -> str:
    """Draw the number of a save."""
    return secrets.token_hex(8)


def data_file_name(save: str, rank: int) -> str:
    """Name the file in which a rank writes."""
    return f"rank{rank}-{save}.safetensors"


def files_to_remove(names: list[str], ranks: int, rank: int) -> list[str]:
    """Choose what one of the ranks removes: what it has written, as its machine has it cached."""
    writers = {name: int(found[1]) for name in names if (found := DATA_FILE_NAME.fullmatch(name))}
    return [name for name, writer in writers.items() if writer % ranks == rank]


class MessageStore(Protocol):
    """A place where ranks leave notes for each other if they have nothing better."""

    def put(self, name: str, text: str) -> None:
        """Leave a note; nobody reads half of it."""

    def names(self) -> set[str]:
        """Return the names of all notes."""

    def get(self, name: str) -> str | None:
        """Read a note, if it is there and whole."""

    def remove(self, name: str) -> None:
        """Take a note away, if it is there."""

    def stand(self, name: str) -> int | None:
        """Leave a note that others can see to be deserted when this process dies.

        Returns a file to be closed by who is done, or None where there is no such thing.
        """

    def is_abandoned(self, name: str) -> bool:
        """Tell whether it is certain that nobody stands by a note any more."""


class Source(ABC):
    """A file of tensors that is open for reading."""

    chunk: int
    """How many bytes are best read at once."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Its real length in bytes."""

    @abstractmethod
    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `tensor_memory` with what is at `offset`; raises `EOFError` if there is not enough."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class Snapshot(ABC):
    """A checkpoint as it was at one instant."""

    stays: bool
    """Whether a source that is open can be read even after the file was removed."""

    @abstractmethod
    def manifest(self) -> bytes:
        """Read the manifest; raises `FileNotFoundError` if there is none."""

    @abstractmethod
    def open(self, name: str) -> Source:
        """Open a file of tensors; raises `FileNotFoundError` if it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it, but not of its sources."""


class Storage(ABC):
    """The place of one checkpoint, for one save or one load."""

    path: str

    @abstractmethod
    def begin(self, owner: str) -> str:
        """Take the place for the calling job, clean up after dead ones, and number the save."""

    @abstractmethod
    def create(self, save: str, name: str) -> AbstractContextManager[Sink]:
        """Open a new file of a save for writing; it is durable when the block ends."""

    @abstractmethod
    def commit(self, save: str, manifest: bytes) -> list[str]:
        """Make a save visible in one instant, and durable; return the files that it replaces."""

    @abstractmethod
    def end(self, save: str | None) -> None:
        """Remove what was not committed, and let others have the place; raises nothing."""

    @abstractmethod
    def discard(self, names: list[str]) -> None:
        """Remove files that no manifest names any more, as far as possible; raises nothing.

        No other save uses their names, so nobody has to have the place for this.
        """

    @abstractmethod
    def board(self) -> MessageStore:
        """Return the place for notes among the ranks of one save."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Look at what is there now; raises `FileNotFoundError` if there is nothing."""


def strip_file_scheme(path: str) -> str:
    """Return what a URL of the local file system means, and any other path as it is.

    Not by fsspec, which would write over the manifest that is there: it has no rename.
    """
    return path.removeprefix("file://").removeprefix("local://")


def storage_at(path: str) -> Storage:
    """Return the storage for a path: the local file system, or fsspec for what has a ``://``."""
    if not path:
        raise InvalidArgument("a checkpoint needs a path, and this one is empty")
    path = strip_file_scheme(path)
    if "://" in path:
        from ._remote_storage import RemoteStorage

        return RemoteStorage(path)
    from ._local_storage import LocalStorage

    return LocalStorage(path)
