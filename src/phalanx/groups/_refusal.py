"""Calls that a group does not begin, and why; and those that were interrupted while they began."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..errors import GroupAborted, GroupError, InvalidArgument, PhalanxError
from ._engine import is_about_peers
from ._failure import Failure
from ._record import Call, user_site
from ._words import first_line
from ._work import Work

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["cut_short", "refuse"]


def refuse(group: ProcessGroup, operation: str) -> NoReturn:
    """Say why nothing can be called any more: the group was closed, or has failed."""
    failure = group._health.failure
    if group._closed and (failure is None or failure.kind == "aborted"):
        hint = "make a new one with new_group or split_group"
        if group._is_away:
            hint = "call rejoin() on every rank to become a member again"
        raise GroupAborted(
            f"{operation} at {user_site()}: group {group._name!r} {group._closed} here; {hint}",
            group=group._name,
            operation=operation,
        )
    assert failure is not None
    error = group._health.error(failure, None, None)
    error.add_note(
        f"{operation} at {user_site()} was refused: the group has already failed. "
        "Create a new group of the surviving ranks with split_group or new_group."
    )
    raise error


def cut_short(
    group: ProcessGroup,
    work: Work | None,
    error: BaseException | None = None,
    *,
    is_whole: bool = False,
) -> None:
    """Bring the numbers of calls in line with the engine after the start of one was cut short.

    An engine's error may have done that, or an interrupt: an exception that a signal's handler has
    raised, anywhere. What counts is what the engine has got. Nothing: the number is taken back. The
    call: it is under way, whoever waits for it. A part of the call: the group has failed, for this
    rank's next call would meet the rest of this one on the others.

    `is_whole` says that one handle in `begun` is the call and not a part of it. An interrupt in
    here leaves `starting` set, and the next call does this again; `error` is None then.
    """
    call, begun = group._recorder.starting, group._begun
    if call is None:  # it had no number yet
        return
    if isinstance(error, GroupError):  # a part has failed, and was waited for
        group._recorder.undo(call)
        del begun[:]
        return
    has_all = work is not None and hasattr(work, "raw")
    raw = begun[0] if is_whole and len(begun) == 1 else None
    if work is not None and not has_all and raw is not None:
        has_all = getattr(raw, "ticket", None) != 0
        work.raw = raw
    if work is not None and has_all:
        if not call.transfer:
            group._health.in_flight[call] = work
        group._recorder.starting = None
        del begun[:]
    elif begun:
        _fail_half_begun(group, call, error)
    else:
        _refuse_start(group, call, work, error)


def _fail_half_begun(group: ProcessGroup, call: Call, error: BaseException | None) -> None:
    by = "" if error is None else f" ({type(error).__name__})"
    cause = f"was interrupted{by} while starting the call"
    # Before the failure is known: if a rank was lost as well, and that came first, others would go
    # on without it.
    group._health.half_begun = call.what
    group._health.parts_begun = [*group._begun]
    failure = group._health.fail(
        Failure("aborted", group._rank, cause, operation=call.what, sequence=call.sequence)
    )
    group._recorder.starting = None
    del group._begun[:]
    if failure.kind == "aborted":
        # The engine has been stopped; what it cannot stop keeps its memory itself.
        group._health.parts_begun = []
    if error is None:
        refuse(group, call.operation)


def _refuse_start(
    group: ProcessGroup, call: Call, work: Work | None, error: BaseException | None
) -> None:
    """Say why the engine did not even start: a broken connection, or the arguments."""
    group._recorder.undo(call)
    if work is None or isinstance(error, PhalanxError):
        return  # nobody had spoken to the engine yet, or the error says what is wrong
    if not isinstance(error, RuntimeError | ValueError | TypeError):
        return  # which is none of an engine's
    if group._health.failure is not None or is_about_peers(error):
        failure = group._health.fail(group._health.diagnose(work, error))
        raise group._health.error(failure, work, call) from error
    raise InvalidArgument(
        f"{call.what} at {call.site}: {group._backend} rejected the call: {first_line(error)}"
    ) from error
