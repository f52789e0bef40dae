"""Ranks that meet in a group of ours, as fast as its engine, and in its store after a failure.

A group that has failed stays so. The barrier therefore has a group of its own, and after a failure
meets in the store: there a use has one outcome, whoever comes when (`_barrier_line`). When a use
has passed there all ranks are back, and make the next group of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from ..errors import (
    BarrierError,
    BarrierTimeout,
    CollectiveTimeout,
    GroupError,
    RankMismatch,
    RendezvousError,
)
from ..groups import ProcessGroup, Work
from ..groups._formatting import first_line
from ..groups._store_client import clone_connection
from ._barrier_connection import address_of
from ._barrier_line import Line
from ._barrier_words import check_text

__all__ = ["GroupLine"]

FRAME = 512
"""Bytes in which what a rank says travels at first, with its length; the rest goes after it."""

LENGTH = 4  # bytes

NOTING = 1.0  # seconds for which an error may be held back to tell others of it


class GroupLine:
    """One rank's place at a barrier of a group; for one thread at a time, as a group is."""

    def __init__(self, group: ProcessGroup, timeout: timedelta) -> None:
        self.prefix = f"{group.label}/barrier-{group._count_split('barrier')}"
        self._group = group
        self._timeout = timeout
        self._number = 0  # of the last use
        self._passed = 0  # the last use that had passed when the group failed
        self._line: Line | None = None
        self._own: ProcessGroup | None = None
        self._start: Callable[[], Work | None] = _nothing
        self._form()

    def execute_barrier(self) -> None:
        """Wait until every rank has come; raise `BarrierTimeout` if some do not."""
        # At memory speed every line counts: no lock, no call of our own, nothing kept that can be
        # told afterwards.
        self._number += 1
        own = self._own
        if own is None:
            self._meet_in_store(None)
            return
        try:
            (self._start() or own.barrier()).wait()
        except GroupError as error:
            raise self._failed(own, error) from error
        except BaseException as error:
            self._leave(own, error)
            raise

    def exchange(self, text: str) -> list[str]:
        """Do the same, and return what every rank has said, by rank."""
        self._number += 1
        own = self._own
        if own is None:
            return self._meet_in_store(check_text(text))
        try:
            return _exchange(own, check_text(text))
        except GroupError as error:
            raise self._failed(own, error) from error
        except BaseException as error:
            self._leave(own, error)
            raise

    def _failed(self, own: ProcessGroup, error: GroupError) -> BarrierError:
        """Leave the group that has failed, and say why."""
        self._leave(own, error)
        kind = BarrierTimeout if isinstance(error, CollectiveTimeout) else BarrierError
        # Ranks that disagree have come, and so has one that is too late by now.
        missing = set() if isinstance(error, RankMismatch) else set(error.ranks) - {own.rank()}
        progress = dict.fromkeys(missing, self._passed)
        return self._error(kind, first_line(error), progress)

    def _leave(self, own: ProcessGroup, error: BaseException) -> None:
        """Go over to the store, and have everybody do so: nobody knows who has passed the use."""
        self._own = None
        self._passed = self._number - 1  # for the group was formed after one that has passed
        own.abort(f"its barrier raised {type(error).__name__}")
        with suppress(BarrierError):  # the store's host may be the one that is dead
            self._reach_store(patience=NOTING).note(self._number)

    def _error(
        self, kind: type[BarrierError], told: str, progress: dict[int, int] | None = None
    ) -> BarrierError:
        use, rank = self._number, self._group.rank()
        told = f"barrier {self.prefix!r}, use {use}, rank {rank}: {told}"
        return kind(told, barrier=self.prefix, use=use, progress=progress)

    def _meet_in_store(self, text: str | None) -> list[str]:
        began, timeout = time.monotonic(), self._timeout.total_seconds()
        line = self._reach_store(patience=timeout)
        line.skip_to(self._number, passed=self._passed)
        took = time.monotonic() - began
        texts = line.meet(text, timeout if took < NOTING else max(timeout - took, NOTING))
        self._passed = self._number
        with suppress(Exception):  # the use has passed; the next one meets in the store, too
            self._form()
            if self._group.rank() == 0:  # nobody forms a group before it has left the use
                line.forget()
        return texts

    def _reach_store(self, *, patience: float) -> Line:
        if self._line is None:
            store = self._group.get_group_store()
            assert store is not None, "a group that can fail was formed in a store"
            try:
                self._line = Line(
                    lambda: clone_connection(store),
                    self.prefix,
                    rank=self._group.rank(),
                    size=self._group.size(),
                    host=f"the store of group {self._group.label!r}",
                    patience=patience,
                    address=address_of(store),
                )
            except RendezvousError as error:
                kind = BarrierTimeout if isinstance(error, TimeoutError) else BarrierError
                raise self._error(kind, first_line(error)) from error
        return self._line

    def _form(self) -> None:
        """Make the barrier's own group, together with all other ranks."""
        name = f"{self.prefix.rpartition('/')[2]}-{self._number}"
        ranks = range(self._group.size())
        self._own = own = self._group.split_group(ranks, timeout=self._timeout, group_name=name)
        # The first thing that `own.barrier` tries, without the call; it has nothing to say where
        # the long way has to be taken.
        self._start = own._fast_path.barrier if own is not None and own._fast_path else _nothing


def _nothing() -> None:
    """Do what a group without a short way does."""


def _exchange(group: ProcessGroup, text: str) -> list[str]:
    """Bring to all ranks what each says."""
    mine = text.encode(errors="surrogatepass")  # a name of a file may have some
    framed = len(mine).to_bytes(LENGTH, "little") + mine
    frames = _gather(group, framed[:FRAME], FRAME)
    lengths = [int.from_bytes(frame[:LENGTH], "little") for frame in frames]
    rest = LENGTH + max(lengths) - FRAME
    if rest > 0:
        tails = _gather(group, framed[FRAME:], rest)
        frames = [frame + tail for frame, tail in zip(frames, tails, strict=True)]
    told = zip(frames, lengths, strict=True)
    return [
        frame[LENGTH : LENGTH + length].decode(errors="surrogatepass") for frame, length in told
    ]


def _gather(group: ProcessGroup, part: bytes, width: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(part.ljust(width, b"\0")), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather(every, mine).wait()
    return [bytes(each.tolist()) for each in every]
