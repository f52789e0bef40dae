"""A process beside each rank that writes its checkpoints, so that training need not wait."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument, InvalidState, InvalidType
from ._checkpoint_process_child import Setup
from ._checkpoint_process_scribe import Job, Scribe
from ._checkpoint_process_start import Recipe
from ._checkpoint_writer import CheckpointWriter
from ._futures import WriteFuture
from ._progress import SaveProgress
from ._staging import check_process
from ._staging_layout import BranchNote, describe
from ._structure import leaves, parse
from ._types import STATE_DICT, RankInfo

__all__ = ["CheckpointProcess", "CheckpointProcessConfig"]


@dataclass
class CheckpointProcessConfig:
    """Say how long to wait for the writer process, and how many saves may wait for it."""

    subprocess_init_timeout_secs: int = 30
    """How long it may take to start; a save does not wait for it, but its end does."""
    subprocess_shutdown_timeout_secs: int = 60
    """How long `close` waits for the writes under way; what is not done then has failed."""
    max_pending_writes: int = 2
    """How many saves may be under way; one more waits for the oldest. Each needs a buffer."""
    pending_timeout_secs: float = 1800
    """How long a save waits for an older one before it fails."""


class CheckpointProcess:
    """Have states written by another process. It survives writes that fail; if it dies, the write
    fails at once, and the next one gets a new process.

    The process is started when this is made, in the background. It dies with the calling process.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        config: CheckpointProcessConfig,
        subprocess_init_fn: Callable[..., None],
        subprocess_init_args: tuple[Any, ...],
        checkpoint_writer_init_fn: Callable[..., CheckpointWriter],
        checkpoint_writer_init_args: dict[str, Any],
    ) -> None:
        _check_imported()
        self.config = config
        self._rank_info = rank_info
        setup = Setup(
            rank_info,
            subprocess_init_fn,
            subprocess_init_args,
            checkpoint_writer_init_fn,
            checkpoint_writer_init_args,
        )
        self._scribe = Scribe(
            Recipe(setup),
            rank_info,
            start_timeout=config.subprocess_init_timeout_secs,
            end_timeout=config.subprocess_shutdown_timeout_secs,
        )
        self._lock = threading.RLock()  # saves are numbered in the order in which they are written
        self._turns = 0
        self._is_closed = False
        # Forgotten without a close, it ends when all is written.
        self._forget = weakref.finalize(self, self._scribe.stop)
        self._forget.atexit = False

    @property
    def process_creation_future(self) -> Future[None]:
        """Done when the process has started for the first time."""
        return self._scribe.created

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process, if there is one now."""
        child = self._scribe.child
        return None if child is None else child.popen

    def write(
        self, state_dict: STATE_DICT | Future[STATE_DICT], path: str, **kwargs: Any
    ) -> WriteFuture:
        """Have a state written once it is staged; further arguments go to the writer.

        They must be values like those that a state may hold.
        """
        try:
            where, words = _whole_path(path), _in_words(kwargs)
        except BaseException as error:
            self.refuse(path, error, **kwargs)
            raise
        return self._submit(where, state_dict, words)

    def refuse(self, path: str, error: BaseException, **kwargs: Any) -> None:
        """Tell the other ranks, which may be about to save, that this one cannot.

        Whatever the arguments are, this counts as a save. Else the numbers of the saves that follow
        would not be the same on all ranks, and states of different steps would be put together.
        """
        is_wanted = self._rank_info.global_world_size > 1 and self._scribe.pid == os.getpid()
        if self._is_closed or not is_wanted:
            return
        try:
            where = _whole_path(path)
        except Exception:  # noqa: BLE001 - then there is no place to tell them
            with self._lock:
                self._turns += 1
            return
        usable = {key: value for key, value in kwargs.items() if _can_be_said(value)}
        self._submit(where, error, _in_words(usable))

    def _submit(
        self, path: str, state: STATE_DICT | Future[STATE_DICT] | BaseException, kwargs: BranchNote
    ) -> WriteFuture:
        check_process(self._scribe.pid)
        future = WriteFuture(path)
        with self._lock:
            if self._is_closed:
                raise InvalidState("the checkpoint process was closed")
            self._turns += 1
            self._scribe.submit(Job(self._turns, path, state, kwargs, future))
        return future

    def progress(self) -> SaveProgress | None:
        """Tell how far the save is that is under way, if one is."""
        return self._scribe.progress()

    def close(self) -> None:
        """Wait for the writes under way as long as the configuration says, and end the process.

        In a fork of the process in which this was made, there is nothing to end.
        """
        with self._lock:
            self._is_closed = True
        self._forget.detach()
        if self._scribe.pid == os.getpid():
            self._scribe.close()


def _check_imported() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidState(
            "a process that was started by this script is importing it, for a function or a class "
            "that is in it. What the script does must be kept from being done there again: "
            'put it under if __name__ == "__main__":, or that function into a module of its own'
        )


def _whole_path(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another process, wherever that works."""
    path = os.fspath(path)
    if not isinstance(path, str):
        raise InvalidType(f"a path is a str or a pathlib.Path, and {path!r} is neither")
    return path if "://" in path else os.path.join(os.getcwd(), path)


def _can_be_said(value: Any) -> bool:
    try:
        _in_words({"": value})
    except Exception:  # noqa: BLE001 - whatever it is
        return False
    return True


def _in_words(kwargs: dict[str, Any]) -> BranchNote:
    tree = parse(kwargs)
    for leaf in leaves(tree):
        raise InvalidArgument(
            f"{leaf.name} is a tensor: arguments for the writer are plain values; "
            "what is to be saved belongs in the state"
        )
    note = describe(tree, lambda _: 0)
    assert isinstance(note, BranchNote)
    return note
