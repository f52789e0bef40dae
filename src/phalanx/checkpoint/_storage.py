"""Where checkpoints live: what the commit and the reader need of a place.

Every save writes files of its own, with a random number in their names, and last the manifest. The
manifest decides: it appears under its name in one instant, it names all files that belong to it,
and nobody looks at files that no manifest names. So a save may go on beside an older checkpoint at
the same path, and a reader has the one or the other, never some of both.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ._tensors import Sink

__all__ = [
    "NOTE",
    "OUR_FILES",
    "Board",
    "Snapshot",
    "Source",
    "Storage",
    "data_file_name",
    "new_save",
    "share_of_removal",
    "storage_at",
    "without_scheme",
]

OUR_FILES = re.compile(r"rank(\d+)-[0-9a-f]{16}\.safetensors")
"""The names of data files; nothing else in a folder is ever removed."""

NOTE = "note."
"""How the names of notes begin."""


def new_save() -> str:
    """Draw the number of a save."""
    return secrets.token_hex(8)


def data_file_name(save: str, rank: int) -> str:
    """Name the file in which a rank writes."""
    return f"rank{rank}-{save}.safetensors"


def share_of_removal(names: list[str], ranks: int, rank: int) -> list[str]:
    """Choose what one of the ranks removes: what it has written, as its machine has it cached."""
    writers = {name: int(found[1]) for name in names if (found := OUR_FILES.fullmatch(name))}
    return [name for name, writer in writers.items() if writer % ranks == rank]


class Board(Protocol):
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

    def is_deserted(self, name: str) -> bool:
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
        """Fill `memory` with what is at `offset`; raises `EOFError` if there is not enough."""

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
    def board(self) -> Board:
        """Return the place for notes among the ranks of one save."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Look at what is there now; raises `FileNotFoundError` if there is nothing."""


def without_scheme(path: str) -> str:
    """Return what a URL of the local file system means, and any other path as it is.

    Not by fsspec, which would write over the manifest that is there: it has no rename.
    """
    return path.removeprefix("file://").removeprefix("local://")


def storage_at(path: str) -> Storage:
    """Return the storage for a path: the local file system, or fsspec for what has a ``://``."""
    if not path:
        raise InvalidArgument("a checkpoint needs a path, and this one is empty")
    path = without_scheme(path)
    if "://" in path:
        from ._remote import RemoteStorage

        return RemoteStorage(path)
    from ._files import LocalStorage

    return LocalStorage(path)
