"""Ranks that meet in a group of ours, as fast as its engine, and in its store after a failure.

A group that has failed stays so. The barrier therefore has a group of its own, and after a failure
meets in the store: there a use has one outcome, whoever comes when (`_barrier_line`). When a use
has passed there all ranks are back, and make the next group of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from ..errors import BarrierError, BarrierTimeout, CollectiveTimeout, GroupError, RendezvousError
from ..groups import ProcessGroup, Work
from ..groups._stores import own_connection
from ..groups._words import first_line
from ._barrier_connection import address_of
from ._barrier_line import Line

__all__ = ["GroupLine"]

FRAME = 512
"""Bytes in which what a rank says travels at first, with its length; the rest goes after it."""

LENGTH = 4  # bytes


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
        """Wait until every rank has come; raise `BarrierTimeout`, on all alike, if some do not."""
        # At memory speed every line counts: no lock, no call of our own, nothing kept that can be
        # told afterwards.
        own = self._own
        if own is None:
            self._meet_in_store(None)
            return
        self._number += 1
        try:
            (self._start() or own.barrier()).wait()
        except GroupError as error:
            raise self._failed(own, error) from error

    def exchange(self, text: str) -> list[str]:
        """Do the same, and return what every rank has said, by rank."""
        own = self._own
        if own is None:
            return self._meet_in_store(text)
        self._number += 1
        try:
            return _exchange(own, text)
        except GroupError as error:
            raise self._failed(own, error) from error

    def _failed(self, own: ProcessGroup, error: GroupError) -> BarrierError:
        """Leave the group that has failed, go over to the store, and say why."""
        self._own = None
        self._passed = self._number - 1  # for the group was formed after one that has passed
        own.abort()
        with suppress(BarrierError, RendezvousError):
            self._reach_store().note(self._number)
        kind = BarrierTimeout if isinstance(error, CollectiveTimeout) else BarrierError
        return kind(
            f"barrier {self.prefix!r}, use {self._number}, rank {own.rank()}: {first_line(error)}",
            barrier=self.prefix,
            use=self._number,
            progress=dict.fromkeys(error.ranks, self._passed),
        )

    def _meet_in_store(self, text: str | None) -> list[str]:
        self._number += 1
        line = self._reach_store()
        line.skip_to(self._number, passed=self._passed)
        texts = line.meet(text, self._timeout.total_seconds())
        self._passed = self._number
        with suppress(RendezvousError):  # the use has passed; the next one meets in the store, too
            self._form()
            if self._group.rank() == 0:  # nobody forms a group before it has left the use
                line.forget(self._number)
        return texts

    def _reach_store(self) -> Line:
        if self._line is None:
            store = self._group.get_group_store()
            assert store is not None, "a group that can fail was formed in a store"
            self._line = Line(
                lambda: own_connection(store),
                self.prefix,
                rank=self._group.rank(),
                size=self._group.size(),
                host=f"the store of group {self._group.label!r}",
                patience=self._timeout.total_seconds(),
                address=address_of(store),
            )
        return self._line

    def _form(self) -> None:
        """Make the barrier's own group, together with all other ranks."""
        name = f"{self.prefix.rpartition('/')[2]}-{self._number}"
        ranks = range(self._group.size())
        self._own = own = self._group.split_group(ranks, timeout=self._timeout, group_name=name)
        # The first thing that `own.barrier` tries, without the call; it has nothing to say where
        # the long way has to be taken.
        self._start = own._short.barrier if own is not None and own._short else _nothing


def _nothing() -> None:
    """Do what a group without a short way does."""


def _exchange(group: ProcessGroup, text: str) -> list[str]:
    """Bring to all ranks what each says."""
    mine = text.encode()
    framed = len(mine).to_bytes(LENGTH, "little") + mine
    frames = _gather(group, framed[:FRAME], FRAME)
    lengths = [int.from_bytes(frame[:LENGTH], "little") for frame in frames]
    rest = LENGTH + max(lengths) - FRAME
    if rest > 0:
        tails = _gather(group, framed[FRAME:], rest)
        frames = [frame + tail for frame, tail in zip(frames, tails, strict=True)]
    told = zip(frames, lengths, strict=True)
    return [frame[LENGTH : LENGTH + length].decode() for frame, length in told]


def _gather(group: ProcessGroup, part: bytes, width: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(part.ljust(width, b"\0")), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather(every, mine).wait()
    return [bytes(each.tolist()) for each in every]
