"""Groups whose membership changes: a rank leaves, comes back, or is lost and gone on without.

Either way the others' calls go on among those who are left, from a number that all of them see
alike; how, is the engine's business (see ``docs/design.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument, InvalidState
from . import _validate as validate
from ._record import user_site
from ._refusal import refuse
from ._words import ranks_text

if TYPE_CHECKING:
    from ._group import ProcessGroup

_HINTS = {
    "leave": "that leaves by itself; all ranks call roll_call, and tell each other who stays",
    "forget": "that is dead; make a group of those who are left with split_group",
}

__all__ = ["changing", "depart", "forget", "leave", "members"]


def members(group: ProcessGroup) -> tuple[int, ...]:
    """List the ranks that take part in a group's next call, as far as this rank knows."""
    absent = group._health.absent() | group._announced
    return tuple(rank for rank in range(group._size) if rank not in absent)


def leave(group: ProcessGroup) -> None:
    """End this rank's membership as soon as what it has begun is done."""
    changing(group, "leave")
    depart(group, "leave")


def depart(group: ProcessGroup, operation: str) -> None:
    """End this rank's membership on behalf of an operation."""
    site = user_site()
    with group._order, group._state:  # no call is begun after this
        if group._closed or group._health.failure is not None:
            refuse(group, operation)
        group._closed, group._is_away = f"was left at {site}", True
        group._close_shortcut()
    try:
        group._health.settle_all()
        under_way = group._engine.leave() if group._can_leave else ""
        if under_way:
            raise InvalidState(f"{operation}: wait for this rank's {under_way} first")
    except BaseException:
        with group._state:
            if group._is_away:  # and not closed meanwhile
                group._reopen()
        raise


def forget(group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Go on without ranks that were lost."""
    engine = changing(group, "forget")
    gone = {validate.rank("forget", rank, group._size, word="rank") for rank in ranks}
    if group._closed and not group._is_away:
        refuse(group, "forget")
    alive = gone - group._health.dead()
    if alive:
        raise InvalidArgument(
            f"forget: {ranks_text(sorted(alive))} {'is' if len(alive) == 1 else 'are'} alive; "
            "forget() accepts only dead ranks, and a live rank must call leave()"
        )
    failure = group._health.failure
    if failure is not None and failure.kind != "lost":
        refuse(group, "forget")
    if group._health.half_begun:
        raise InvalidState(
            f"forget: {group._health.half_begun} was interrupted while starting, so ranks may have "
            "issued different parts of it; create a new group of the survivors with split_group"
        )
    lost = set(failure.ranks if failure is not None else ()) - gone
    if lost:
        raise InvalidArgument(f"forget: {ranks_text(sorted(lost))} also died; pass error.lost")
    group._health.go_on(gone, engine.forget)


def changing(group: ProcessGroup, operation: str) -> Any:
    """Return the engine of a group whose membership may change; refuse other groups."""
    if not hasattr(group._engine, operation) and not group._closed:
        raise InvalidState(
            f"{operation}: {group._backend} cannot go on without a rank {_HINTS[operation]}, or "
            "use shm"
        )
    return group._engine
