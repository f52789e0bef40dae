"""The reducers that share a group: what they send must go in the same order on every rank.

One reducer launches its buckets in the order of its plan, whatever the graph. Two that take part in
one backward pass would launch in the order in which autograd comes to them, and ranks whose graphs
differ would reduce gradients of one with those of the other. So nothing is launched early while
another reducer may take part; when backward is over, they finish in the order in which they were
made.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch.distributed as dist

__all__ = ["Company"]


class Member(Protocol):
    """What reducers of a group have to know of each other."""

    expects_backward: bool
    """There was a forward pass whose backward pass has not come."""
    has_met_others: bool
    """Some backward pass was not its own alone."""

    @property
    def graph_task(self) -> int | None:
        """Tell the run of autograd that its pass under way belongs to."""

    def end(self) -> None:
        """End that pass."""


class Company:
    """The reducers of one group, in the order in which they were made."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Member]] = []

    @staticmethod
    def of(group: dist.ProcessGroup) -> Company:
        """Return the company of a group; all who ask for the same group get the same."""
        return _companies.setdefault(group, Company())

    def enter(self, member: Member) -> None:
        """Become a member; on every rank in the same order."""
        self._members.append(weakref.ref(member, self._members.remove))

    def leave(self, member: Member) -> None:
        """Be a member no more."""
        self._members[:] = [known for known in self._members if known() is not member]

    def is_alone(self, member: Member) -> bool:
        """Tell whether no other reducer can take part in the backward pass that begins."""
        if len(self._members) == 1:
            return True
        others = [other for other in self._all() if other is not member]
        return not (member.has_met_others or any(other.expects_backward for other in others))

    def together_with(self, member: Member) -> list[Member]:
        """List who takes part in a member's backward pass, itself included, in order."""
        if len(self._members) == 1:
            return [member]
        present = [other for other in self._all() if other.graph_task == member.graph_task]
        for each in present:
            each.has_met_others |= len(present) > 1
        return present

    def _all(self) -> list[Member]:
        members = (known() for known in self._members)
        return [member for member in members if member is not None]


_companies: weakref.WeakKeyDictionary[dist.ProcessGroup, Company] = weakref.WeakKeyDictionary()
