"""Leaving in the place of shadowing: who has run out of data is a member of the group no more.

From there on every call of the group goes on among the rest, whoever makes it: gradients,
statistics of a layer, the user's own metrics. So there is nothing to make up for, and nothing to
forget. When the block ends, everybody is a member again.

Where ranks see each other's membership (`ProcessGroup.can_leave`), a rank just leaves, and steps
cost nothing more than they do without a join. Elsewhere every step begins with a roll call, one
small message, and who has run out answers to it once more, to say so.
"""

from __future__ import annotations

from ..groups import ProcessGroup

__all__ = ["Leaving"]


class Leaving:
    """How ranks of a group part, and meet again."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def begin_step(self) -> None:
        """Go on among those who have data."""
        if not self._group.can_leave:
            self._group.update_membership()

    def see_others_off(self) -> int:
        """Leave, sleep until nobody has data, and be a member again; nothing is made up for."""
        if not self._group.can_leave:
            self._group.update_membership(stays=False)
        self._group.rejoin()
        return 0
