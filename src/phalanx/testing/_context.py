"""What a body is given: its rank, a store, and groups that are closed when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ..groups import ProcessGroup

__all__ = ["RankContext"]

# A group gives up before its run does, so that its own error, which knows more, comes first.
_SHARE_OF_RUN = 0.8


class RankContext:
    """One rank of a run."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        backend: str,
        timeout: float,
        connect: Callable[[], Store],
        generation: int | None = None,
    ) -> None:
        self.rank = rank
        """This rank's number in the run."""
        self.size = size
        """How many ranks take part."""
        self.backend = backend
        """The backend of `group` unless it is told another."""
        self.timeout = timedelta(seconds=timeout * _SHARE_OF_RUN)
        """The timeout of `group` unless it is told another."""
        self.generation = generation
        """Changes whenever a rank process is replaced; None where ranks are threads."""
        self.ended_at = 0.0
        """When the body ended."""
        self._connect = connect
        self._groups: list[ProcessGroup] = []

    def __repr__(self) -> str:
        return "<RankContext>"  # the same on every rank, so that equal failures look equal

    @cached_property
    def store(self) -> Store:
        """A store that the ranks of this run share, empty at its start."""
        return self._connect()

    def group(self, backend: str | None = None, **options: Any) -> ProcessGroup:
        """Form a group of all ranks of the run; it is closed when the body ends."""
        from .. import groups

        known = {"store": self.store, "rank": self.rank, "world_size": self.size}
        defaults = {"timeout": self.timeout, "device": "cpu", **known}
        return self.closing(groups.new_group(backend or self.backend, **{**defaults, **options}))

    def closing(self, group: ProcessGroup) -> ProcessGroup:
        """Close a group that was made in another way when the body ends."""
        self._groups.append(group)
        return group

    def abort(self) -> None:
        """Abort the groups, which ends whoever waits in one of them."""
        while self._groups:
            self._groups.pop().abort()

    def leave_open(self) -> None:
        """Do not close the groups made so far when the body ends."""
        self._groups.clear()

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended_at = time.monotonic()
        # Newest first, as they may be splits of older ones. After a failure nobody is waited for.
        try:
            while self._groups and error is None:
                self._groups.pop().shutdown()
        finally:
            self.abort()
