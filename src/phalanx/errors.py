"""What phalanx raises.

::

    PhalanxError
    ├── GroupError (RuntimeError)            a group cannot go on
    │   ├── CollectiveTimeout (TimeoutError) a deadline passed; says who is missing
    │   ├── PeerLost                         a rank is dead; says which
    │   ├── PeerLeft                         a rank that the call needs has left; says which
    │   ├── RankMismatch                     ranks disagree on what to do; names both sides
    │   └── GroupAborted                     somebody called abort or shutdown
    ├── RendezvousError (RuntimeError)       ranks could not meet to form a group
    │   └── RendezvousTimeout (TimeoutError) some never came; says who
    ├── BarrierError (RuntimeError)          ranks could not meet at a barrier
    │   └── BarrierTimeout (TimeoutError)    some did not come in time; says how far each got
    ├── MisuseError                          the caller's mistake; says what to do instead
    │   ├── InvalidArgument (ValueError)
    │   ├── InvalidType (TypeError)
    │   ├── InvalidState (RuntimeError)
    │   ├── InvalidHook (TypeError, AssertionError)
    │   ├── UnknownOption (KeyError, AssertionError)
    │   ├── InvalidMesh (ValueError, RuntimeError, AssertionError)
    │   ├── UnknownAxis (KeyError, IndexError, ValueError, AssertionError)
    │   ├── NotInMesh (RuntimeError, IndexError)
    │   └── Unprepared (RuntimeError, AssertionError)
    ├── CheckpointError (RuntimeError)       a checkpoint cannot be saved or loaded
    │   ├── SaveFailed                       on every rank alike; names the first cause
    │   │   ├── SaveTimeout (TimeoutError)   a rank did not come; says who
    │   │   ├── CheckpointDirectoryInUse     another job is saving there; says who
    │   │   └── WriterLost                   the process that writes has died; says how
    │   ├── DamagedCheckpoint (ValueError)   what is on disk is not what was written
    │   ├── CheckpointNotFound (FileNotFoundError)
    │   ├── MissingKeys                      what was asked for is not in the checkpoint
    │   ├── StateMismatch                    it is there, but of another shape or type
    │   └── UnsupportedState (TypeError)     a value that cannot be stored; names it
    ├── HookError (RuntimeError)             a hook of the user's raised, or gave what is no use
    ├── UnevenInputs (RuntimeError)          some ranks have run out of data, which was forbidden
    ├── RanksFailed (RuntimeError)           ranks that we started ended badly
    └── InternalError (RuntimeError)         our own bug; please report it

The built-in in parentheses is what upstream raises for the same mistake, so an ``except`` clause
written for torch still catches it. Where upstream's methods differ in what they raise for one and
the same mistake, the class here is all of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "BarrierError",
    "BarrierTimeout",
    "CheckpointDirectoryInUse",
    "CheckpointError",
    "CheckpointNotFound",
    "CollectiveTimeout",
    "DamagedCheckpoint",
    "GroupAborted",
    "GroupError",
    "HookError",
    "InternalError",
    "InvalidArgument",
    "InvalidHook",
    "InvalidMesh",
    "InvalidState",
    "InvalidType",
    "MissingKeys",
    "MisuseError",
    "NotInMesh",
    "PeerLeft",
    "PeerLost",
    "PhalanxError",
    "RankMismatch",
    "RankReport",
    "RanksFailed",
    "RendezvousError",
    "RendezvousTimeout",
    "SaveFailed",
    "SaveTimeout",
    "StateMismatch",
    "UnevenInputs",
    "UnknownAxis",
    "UnknownOption",
    "Unprepared",
    "UnsupportedState",
    "WriterLost",
]


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank when a group fails."""

    rank: int
    """Its rank in the group that failed."""
    state: str
    """One of ``waiting``, ``idle``, ``failed``, ``busy``, ``silent``, ``stopped``, ``left``,
    ``dead``."""
    operation: str | None = None
    """Its last call with its tensors: ``allreduce float32[10]``."""
    sequence: int | None = None
    """The number of that call."""
    site: str | None = None
    """Where the user's code made that call, or left: ``train.py:12``."""
    here: str | None = None
    """The line of user code that it is at right now, and what that waits for inside a library."""
    collectives: int | None = None
    """How many collectives of the group it has begun."""
    quiet: float | None = None
    """Seconds since it began its last call of the group."""

    def __str__(self) -> str:
        parts = [f"rank {self.rank}: {_STATE_TEXTS[self.state]}"]
        if self.operation is not None:
            number = "" if self.sequence is None else f" #{self.sequence}"
            verb = "in" if self.state == "waiting" else "last call was"
            parts.append(f"{verb} {self.operation}{number}")
        if self.site is not None:
            parts.append(f"at {self.site}")
        if self.here is not None and self.state != "waiting":
            parts.append(f"now at {self.here}")
        return ", ".join(parts)


_STATE_TEXTS = {
    "waiting": "waiting",
    "idle": "alive, in user code",
    "failed": "gave up",
    "busy": "busy (a death is raised without waiting for its report)",
    "silent": "does not answer (its interpreter is blocked, or its machine is out of reach)",
    "stopped": "stopped by a signal",
    "left": "left the group",
    "dead": "dead",
}


class PhalanxError(Exception):
    """Base of everything that phalanx raises on purpose."""


class GroupError(PhalanxError, RuntimeError):
    """A group cannot go on: the same cause is raised on every rank."""

    def __init__(
        self,
        message: str,
        *,
        group: str = "",
        operation: str = "",
        sequence: int | None = None,
        ranks: Sequence[int] = (),
        reports: Mapping[int, RankReport] | None = None,
    ) -> None:
        self.group = group
        """Name of the group."""
        self.operation = operation
        """The call that failed, with its tensors."""
        self.sequence = sequence
        """The number of that call in its group."""
        self.ranks = tuple(ranks)
        """The ranks at fault, group-local: missing, lost or disagreeing."""
        self.reports = dict(reports or {})
        """What each rank last did."""
        lines = [message, *(f"  {report}" for _, report in sorted(self.reports.items()))]
        super().__init__("\n".join(lines))


class CollectiveTimeout(GroupError, TimeoutError):
    """A call's deadline passed before every rank took part."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not take part, group-local."""
        return self.ranks


class PeerLost(GroupError):
    """A rank of the group is dead."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that are dead, group-local."""
        return self.ranks


class PeerLeft(GroupError):
    """A rank without which the call means nothing has left the group, which goes on."""

    @property
    def left(self) -> tuple[int, ...]:
        """Ranks that have left, group-local."""
        return self.ranks


class RankMismatch(GroupError):
    """Ranks disagree on the operation, its tensors, or the group itself."""


class GroupAborted(GroupError):
    """The group was aborted or shut down, here or by a peer."""


class RendezvousError(PhalanxError, RuntimeError):
    """Ranks could not meet to form a group."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Some ranks, or the store, did not appear before the deadline."""


class BarrierError(PhalanxError, RuntimeError):
    """Ranks could not meet at a barrier; the barrier itself can be used again."""

    def __init__(
        self,
        message: str,
        *,
        barrier: str = "",
        use: int | None = None,
        progress: Mapping[int, int] | None = None,
    ) -> None:
        self.barrier = barrier
        """The barrier's prefix."""
        self.use = use
        """Which use of the barrier failed; the first is 1."""
        self.progress = dict(progress or {})
        """The last use that each missing rank came to; 0 if it never came."""
        lines = [message, *(self._how_far(rank) for rank in sorted(self.progress))]
        super().__init__("\n".join(lines))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not come."""
        return tuple(sorted(self.progress))

    def _how_far(self, rank: int) -> str:
        last = self.progress[rank]
        if last == 0:
            return f"  rank {rank} never arrived"
        where = f"  rank {rank} arrived at use {last} of {self.barrier!r}"
        behind = 0 if self.use is None else self.use - last
        return f"{where}, {behind} use{'s' if behind > 1 else ''} behind" if behind > 0 else where


class BarrierTimeout(BarrierError, TimeoutError):
    """A barrier's deadline passed before every rank came."""


class MisuseError(PhalanxError):
    """The caller asked for something that cannot be done."""


class InvalidArgument(MisuseError, ValueError):
    """An argument's value is not usable."""


class InvalidType(MisuseError, TypeError):
    """An argument's type is not usable."""


class InvalidState(MisuseError, RuntimeError):
    """A call that does not fit the state of things."""


class UnknownOption(MisuseError, KeyError, AssertionError):
    """A backend was given an option that it does not have."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class InvalidHook(MisuseError, TypeError, AssertionError):
    """What was given for a hook is none."""


class InvalidMesh(MisuseError, ValueError, RuntimeError, AssertionError):
    """A mesh cannot be like this: it contradicts itself, or the group that it is made on."""


class UnknownAxis(MisuseError, KeyError, IndexError, ValueError, AssertionError):
    """A mesh has no axis of that name or number, or not in that order."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class NotInMesh(MisuseError, RuntimeError, IndexError):
    """The calling rank is not in the mesh, so there is no answer for it."""


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint cannot be saved or loaded."""


class SaveFailed(CheckpointError):
    """A save did not happen: every rank raises this, and the message names the first cause."""


class SaveTimeout(SaveFailed, TimeoutError):
    """A save did not happen because ranks were missing at a meeting."""


class CheckpointDirectoryInUse(SaveFailed):
    """A save did not happen because another job is saving at the same place."""


class WriterLost(SaveFailed):
    """The process that writes checkpoints in the background has died."""


class DamagedCheckpoint(CheckpointError, ValueError):
    """A checkpoint's files are not what a save has written."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path, or no complete one."""


class MissingKeys(CheckpointError):
    """A checkpoint lacks keys that were asked for."""


class StateMismatch(CheckpointError):
    """A value in the checkpoint does not fit the one that it is to be loaded into."""


class UnsupportedState(CheckpointError, TypeError):
    """A value of the state cannot be stored."""


class HookError(PhalanxError, RuntimeError):
    """A communication hook raised, returned what is no use, or did not end in time."""


class Unprepared(MisuseError, RuntimeError, AssertionError):
    """An object's constructor has not called that of its base class."""


class UnevenInputs(PhalanxError, RuntimeError):
    """Ranks have run out of data at different steps, where that was to be an error."""


class RanksFailed(PhalanxError, RuntimeError):
    """Ranks that were started here ended badly."""


class InternalError(PhalanxError, RuntimeError):
    """A bug in phalanx itself."""
