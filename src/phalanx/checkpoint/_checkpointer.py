"""Save and load with one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from ._checkpoint_reader import CheckpointReader
from ._checkpoint_writer import CheckpointWriter
from ._types import STATE_DICT

__all__ = ["Checkpointer", "ReadingCheckpointer", "SyncCheckpointer"]


class Checkpointer(ABC):
    """Save states to storage, and load them again."""

    @abstractmethod
    def save(
        self, path: str, state_dict: STATE_DICT, **kwargs: Any
    ) -> tuple[Future[None], Future[None]] | None:
        """Save a state; an asynchronous one returns futures of the copy and of the write."""

    @abstractmethod
    def load(
        self,
        path: str,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load a state, or what a given one asks for; strict, it must all be there."""

    @abstractmethod
    def close(self) -> None:
        """Release what the checkpointer holds."""


class ReadingCheckpointer(Checkpointer):
    """Loads by a reader, while the caller waits; how it saves is left open."""

    _reader: CheckpointReader

    def load(
        self,
        path: str,
        state_dict: STATE_DICT | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> STATE_DICT:
        """Load a state, or what a given one asks for; strict, it must all be there."""
        loaded, _ = self._reader.read(
            path, state_dict, map_location=default_map_location, strict=strict, **kwargs
        )
        return loaded


class SyncCheckpointer(ReadingCheckpointer):
    """Save and load while the caller waits."""

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        self._writer = writer
        self._reader = reader

    def save(self, path: str, state_dict: STATE_DICT, **kwargs: Any) -> None:
        """Save a state, and return when it is durable; further arguments go to the writer."""
        self._writer.write(path, state_dict, **kwargs)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()
