"""The part of a group's interface that is about who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from . import _membership as membership
from ._collectives import Collectives
from ._rejoin import rejoin
from ._roll_call import roll_call

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["Members"]


class Members(Collectives):
    """Who takes part in a group's calls, and how that changes."""

    @property
    def members(self) -> tuple[int, ...]:
        """Tell the ranks that take part in the next call, as far as is known here."""
        return membership.members(self._whole)

    @property
    def can_leave(self) -> bool:
        """Tell whether a rank may `leave` by itself; everywhere else there is `roll_call`."""
        return self._whole._can_leave

    def leave(self) -> None:
        """End this rank's membership: the others' next calls go on without it, at once.

        Waits for the collectives that this rank has begun. Ranks keep their numbers, a mean is
        taken over those who are left, and what a rank would have filled in an output stays as it
        is. Nothing but `rejoin` and `shutdown` can be called here any more.
        """
        membership.leave(self._whole)

    def roll_call(self, stays: bool = True) -> tuple[int, ...]:
        """Tell which ranks stay; every member calls it at the same point and says if it does.

        Who does not has left when it returns, as by `leave`, and the others' next calls go on among
        those who stay. It works on every backend: where no rank may leave by itself the others make
        an engine of their own, once for a departure; if everybody stays it is one small collective.
        """
        return roll_call(self._whole, stays)

    def rejoin(self, timeout: timedelta | None = None) -> None:
        """Make everybody a member again; all ranks call it, whether they have left or not.

        Who has not left does so, and the others' calls go on without it until they come, too. When
        the last has come all are members, and number their calls alike. Until then a rank sleeps.
        The deadline counts from the last call that an awaited rank has made on the group. When it
        has passed, or a rank was lost and is forgotten, it can be called again. Where a rank cannot
        leave by itself (`can_leave`), all who are still members come without a call in between.
        """
        rejoin(self._whole, timeout)

    def forget(self, ranks: Sequence[int]) -> None:
        """Go on without ranks that were lost, as if they had left; every survivor calls it.

        What they took no part in goes on among the rest, so that a ``work`` which raised `PeerLost`
        can be waited for again. It raises again, on every survivor, if they died in the middle.
        """
        membership.forget(self._whole, ranks)

    @property
    def _whole(self) -> ProcessGroup:
        return cast("ProcessGroup", self)
