"""Calls that a group does not begin, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..errors import GroupAborted, InvalidArgument, PhalanxError
from ._health import is_about_connections
from ._pending import Pending
from ._record import Call, user_site
from ._words import first_line

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["refuse", "refuse_start"]


def refuse(group: ProcessGroup, operation: str) -> NoReturn:
    """Say why nothing can be called any more: the group was closed, or has failed."""
    failure = group._health.failure
    if group._closed and (failure is None or failure.kind == "aborted"):
        hint = "make a new one with new_group or split_group"
        if group._is_away:
            hint = "this rank is a member again after rejoin, which all ranks call"
        raise GroupAborted(
            f"{operation} at {user_site()}: group {group._name!r} {group._closed} here; {hint}",
            group=group._name,
            operation=operation,
        )
    assert failure is not None
    error = group._health.error(failure, None, None)
    error.add_note(
        f"{operation} at {user_site()} was refused: the group has failed before. "
        "Make a new one of the ranks that are left, with split_group or new_group."
    )
    raise error


def refuse_start(
    group: ProcessGroup, call: Call, seconds: float, peer: int | None, error: Exception
) -> NoReturn:
    """Say why the engine did not even start: a broken connection, or the arguments."""
    group._recorder.undo(call)
    if isinstance(error, PhalanxError):
        raise error
    if group._health.failure is not None or is_about_connections(error):
        pending = Pending()
        pending.call, pending.timeout, pending.peer = call, seconds, peer
        failure = group._health.fail(group._health.diagnose(pending, error))
        raise group._health.error(failure, pending, call) from error
    raise InvalidArgument(
        f"{call.what} at {call.site}: {group._backend} cannot do this: {first_line(error)}"
    ) from error
