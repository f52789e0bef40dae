"""The exceptions of phalanx.

::

    PhalanxError
    ├── GroupError (RuntimeError)            a collective or a group failed; same cause on all ranks
    │   ├── CollectiveTimeout (TimeoutError) a deadline passed; names the missing ranks
    │   ├── PeerLost                         a rank is dead; names it
    │   ├── PeerLeft                         a rank that the call needs left the group; names it
    │   ├── RankMismatch                     ranks made different calls; names both
    │   └── GroupAborted                     a rank called abort or shutdown
    ├── RendezvousError (RuntimeError)       a group could not be formed
    │   └── RendezvousTimeout (TimeoutError) ranks did not arrive in time; names them
    ├── BarrierError (RuntimeError)          a checkpoint barrier failed
    │   └── BarrierTimeout (TimeoutError)    ranks did not arrive in time; names them
    ├── MisuseError                          a mistake of the caller; says what to do instead
    │   ├── InvalidArgument (ValueError)
    │   ├── InvalidType (TypeError)
    │   ├── InvalidState (RuntimeError)
    │   ├── InvalidHook (TypeError, AssertionError)
    │   ├── UnknownOption (KeyError, AssertionError)
    │   ├── InvalidMesh (ValueError, RuntimeError, AssertionError)
    │   ├── UnknownAxis (KeyError, IndexError, ValueError, AssertionError)
    │   ├── NotInMesh (RuntimeError, IndexError)
    │   └── Unprepared (RuntimeError, AssertionError)
    ├── CheckpointError (RuntimeError)       a checkpoint could not be saved or loaded
    │   ├── SaveFailed                       a save failed on all ranks; names the first cause (1)
    │   │   ├── SaveTimeout (TimeoutError)   ranks did not take part in time; names them
    │   │   ├── CheckpointDirectoryInUse     another job is saving to the directory; names it
    │   │   └── WriterLost                   the writer process died; says how
    │   ├── DamagedCheckpoint (ValueError)   files do not match the manifest
    │   ├── CheckpointNotFound (FileNotFoundError)
    │   ├── MissingKeys                      the checkpoint lacks requested keys
    │   ├── StateMismatch                    a value has another shape or type
    │   └── UnsupportedState (TypeError)     a value cannot be stored; names it
    ├── HookError (RuntimeError)             a communication hook failed
    ├── UnevenInputs (RuntimeError)          ranks ran out of data at different steps
    ├── RanksFailed (RuntimeError)           ranks started by a launcher or a pool failed
    │   └── RanksTimeout (TimeoutError)      they did not finish in time; has their stacks
    └── InternalError (RuntimeError)         a bug in phalanx; please report it

(1) A rank whose caller made the mistake raises that `MisuseError` or `UnsupportedState` itself.

The built-in in parentheses is what torch raises for the same mistake, so an ``except`` clause
written for torch still catches it. Where torch's methods raise different classes for the same
mistake, the class here derives from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankReport:
    """The state of one rank when a group failed."""

    rank: int
    """The rank in the group that failed."""
    state: str
    """One of ``waiting``, ``idle``, ``failed``, ``busy``, ``silent``, ``stopped``, ``left``,
    ``shut down``, ``dead``."""
    operation: str | None = None
    """The last call and its tensors: ``allreduce float32[10]``."""
    sequence: int | None = None
    """The sequence number of that call."""
    site: str | None = None
    """The line of user code that made that call, or shut the group down: ``train.py:12``."""
    here: str | None = None
    """The line of user code that is running now, and the library call in it."""
    collectives: int | None = None
    """How many collectives of the group the rank has started."""
    quiet: float | None = None
    """Seconds since it began its last call of the group."""
    call: str | None = None
    """The name of its last call, without tensors: ``allreduce``."""
    transfer: bool = False
    """Whether its last call was a send or receive; those are numbered separately."""

    def __str__(self) -> str:
        text = f"rank {self.rank}: {RANK_STATE_TEXTS[self.state]}"
        if self.here is not None and self.state != "waiting":
            text += f": {self.here}"
        place = "" if self.site is None else f" at {self.site}"
        if self.operation is None:
            return text + place
        number = "" if self.sequence is None else f" #{self.sequence}"
        call = f"{self.operation}{number}{place}"
        return f"{text} in {call}" if self.state == "waiting" else f"{text} (last call: {call})"


RANK_STATE_TEXTS = {
    "waiting": "waiting",
    "idle": "alive, in user code",
    "failed": "gave up",
    "busy": "busy, did not report in time",
    "silent": "does not answer (its interpreter is blocked, or its machine is unreachable)",
    "stopped": "stopped by a signal",
    "left": "left the group",
    "shut down": "shut the group down",
    "dead": "dead",
}


class PhalanxError(Exception):
    """Base of all phalanx exceptions."""


class GroupError(PhalanxError, RuntimeError):
    """A collective or a group failed; every rank raises the same cause."""

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
        """The name of the group."""
        self.operation = operation
        """The call that failed, and its tensors."""
        self.sequence = sequence
        """The sequence number of that call."""
        self.ranks = tuple(ranks)
        """The group-local ranks that caused the failure: missing, dead or mismatched."""
        self.reports = dict(reports or {})
        """The state of each rank."""
        lines = [message, *(f"  {report}" for _, report in sorted(self.reports.items()))]
        super().__init__("\n".join(lines))


class CollectiveTimeout(GroupError, TimeoutError):
    """A call timed out before every rank took part."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The group-local ranks that did not take part."""
        return self.ranks


class PeerLost(GroupError):
    """A rank of the group is dead."""

    @property
    def lost(self) -> tuple[int, ...]:
        """The group-local ranks that are dead."""
        return self.ranks


class PeerLeft(GroupError):
    """A rank that the call needs, such as its root, has left the group. The group stays usable."""

    @property
    def left(self) -> tuple[int, ...]:
        """The group-local ranks that have left."""
        return self.ranks


class RankMismatch(GroupError):
    """Ranks disagree on the operation, its tensors, or the group itself."""


class GroupAborted(GroupError):
    """The group was aborted or shut down, here or by a peer."""


class RendezvousError(PhalanxError, RuntimeError):
    """A group could not be formed."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Ranks or the store did not respond before the deadline."""


class BarrierError(PhalanxError, RuntimeError):
    """A barrier failed; it can be used again."""

    def __init__(
        self,
        message: str,
        *,
        barrier: str = "",
        round: int | None = None,  # noqa: A002 - as the attribute
        progress: Mapping[int, int] | None = None,
    ) -> None:
        self.barrier = barrier
        """The prefix of the barrier."""
        self.round = round
        """The number of the call that failed, from 1: the same on all ranks."""
        self.progress = dict(progress or {})
        """The last round that each missing rank reached; 0 for none."""
        lines = [message]
        for rank, last in sorted(self.progress.items()):
            if last == 0:
                lines.append(f"  rank {rank} never arrived")
                continue
            behind = 0 if round is None else round - last
            late = f", {behind} round{'s' if behind > 1 else ''} behind" if behind > 0 else ""
            lines.append(f"  rank {rank} arrived at round {last} of {barrier!r}{late}")
        super().__init__("\n".join(lines))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that did not arrive."""
        return tuple(sorted(self.progress))


class BarrierTimeout(BarrierError, TimeoutError):
    """A barrier timed out before every rank arrived."""


class MisuseError(PhalanxError):
    """A mistake of the caller."""


class InvalidArgument(MisuseError, ValueError):
    """An argument has an invalid value."""


class InvalidType(MisuseError, TypeError):
    """An argument has an invalid type."""


class InvalidState(MisuseError, RuntimeError):
    """The object is in a state that does not allow the call."""


class UnknownOption(MisuseError, KeyError, AssertionError):
    """A backend does not have the given option."""

    __str__ = Exception.__str__  # KeyError prints the repr of the message


class InvalidHook(MisuseError, TypeError, AssertionError):
    """The given communication hook is not a valid hook."""


class InvalidMesh(MisuseError, ValueError, RuntimeError, AssertionError):
    """The mesh is inconsistent in itself or with its process group."""


class UnknownAxis(MisuseError, KeyError, IndexError, ValueError, AssertionError):
    """The mesh has no such axis, or not in that order."""

    __str__ = Exception.__str__  # KeyError prints the repr of the message


class NotInMesh(MisuseError, RuntimeError, IndexError):
    """The calling rank is not in the mesh."""


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint could not be saved or loaded."""


class SaveFailed(CheckpointError):
    """A save failed; the message names the first cause.

    All ranks raise this. Only a rank whose caller made a mistake raises that `MisuseError` or
    `UnsupportedState` itself.
    """


class SaveTimeout(SaveFailed, TimeoutError):
    """A save failed because ranks did not take part in time."""


class CheckpointDirectoryInUse(SaveFailed):
    """A save failed because another job is saving to the same directory."""


class WriterLost(SaveFailed):
    """The process that writes checkpoints in the background died."""


class DamagedCheckpoint(CheckpointError, ValueError):
    """The files of a checkpoint do not match its manifest."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """The path has no complete checkpoint."""


class MissingKeys(CheckpointError):
    """The checkpoint lacks requested keys."""


class StateMismatch(CheckpointError):
    """A value in the checkpoint has another shape or type than its destination."""


class UnsupportedState(CheckpointError, TypeError):
    """The state has a value that cannot be stored."""


class HookError(PhalanxError, RuntimeError):
    """A communication hook raised, returned an invalid value, or timed out."""


class Unprepared(MisuseError, RuntimeError, AssertionError):
    """Something that must come first is missing: a base constructor, torch's default group."""


class UnevenInputs(PhalanxError, RuntimeError):
    """Ranks ran out of data at different steps, and the caller asked for an error."""


class RanksFailed(PhalanxError, RuntimeError):
    """Ranks that a launcher or a pool started have failed."""


class RanksTimeout(RanksFailed, TimeoutError):
    """Ranks did not finish in time."""


class InternalError(PhalanxError, RuntimeError):
    """A bug in phalanx."""


__all__ = [  # every class defined here
    name for name, value in globals().items() if getattr(value, "__module__", "") == __name__
]
