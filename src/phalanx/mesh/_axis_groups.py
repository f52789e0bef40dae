"""The groups of axes: made on first use, by their members only, and shared.

What was made for one group is kept as long as that group, not as long as a mesh: two meshes, or two
slices, whose axes have the same ranks and options have the same group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from ..errors import InvalidState
from ..groups._formatting import format_rank_ranges
from ..groups._subgroups import DEFAULT_OPTIONS, GroupOptions, ParentGroup, end_group
from ._consistency import Ledger, Use

__all__ = ["AxisGroups", "axis_groups"]


_Key = tuple[Sequence[int], GroupOptions, str]
"""Ranks, options and the type of device: who has all of these alike shares a group."""


class Keeper(Protocol):
    """Who keeps groups at hand: a mesh."""

    def let_go(self) -> None:
        """Keep none any more."""


class AxisGroups:
    """The groups that were made of one group's ranks for axes of meshes, as one rank sees them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        """The meshes that this rank has made on the group, to be compared with those of others."""
        self.era = 0
        """How often all groups were shut down: what was found in an earlier era is not to be kept.
        """
        # Over the rest and the era, for moments: ranks may form two groups in different order on
        # two threads, and must not wait for each other here.
        self._lock = threading.Lock()
        self._made: dict[_Key, Future[dist.ProcessGroup]] = {}
        self._kept_by: WeakValueDictionary[int, Keeper] = WeakValueDictionary()

    def keep(self, keeper: Keeper, keep: Callable[[], None], *, era: int) -> None:
        """Let a mesh keep a group at hand until it is shut down, which it may have been since."""
        with self._lock:
            if era == self.era:
                keep()
                self._kept_by[id(keeper)] = keeper

    def find(
        self, base: ParentGroup, ranks: Sequence[int], options: GroupOptions, *, use: Use, desc: str
    ) -> dist.ProcessGroup:
        """Return the group of these ranks, in this order, or make it."""
        device_type = use.root.device_type
        if base.is_gone:
            raise InvalidState(
                f"group {base.label!r} was destroyed: {use.root.text} gets no more groups, make it "
                "on another one"
            )
        if options == DEFAULT_OPTIONS and ranks == range(base.size) and base.takes(device_type):
            self.ledger.announce(base, use)
            return base.group
        name = f"mesh {_short(ranks)}{options.label}"

        def make() -> dist.ProcessGroup:
            purpose = self.ledger.purpose(base, ranks, use, label=f"{base.label}/{name}")
            return base.make(
                ranks, options, name=name, desc=desc, device_type=device_type, purpose=purpose
            )

        return self._once((ranks, options, device_type), make)

    def shutdown(self) -> None:
        """End this rank's part in all groups that were made so far, or are being made."""
        with self._lock:
            made, self._made = self._made, {}
            self.era += 1
            for keeper in list(self._kept_by.values()):
                keeper.let_go()  # an engine's threads and memory end with the last who has it
        for future in made.values():
            if future.exception() is None:  # otherwise who has asked for it is told
                end_group(future.result())

    def _once(self, key: _Key, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        with self._lock:
            found = self._made.get(key)
            if found is None:
                mine = self._made[key] = Future[dist.ProcessGroup]()
        if found is not None:
            return found.result()  # what makes it has a deadline
        try:
            group = make()
        except BaseException as error:
            with self._lock:
                if self._made.get(key) is mine:  # and none of a later era
                    del self._made[key]  # the next to ask tries again
            mine.set_exception(error)
            raise
        mine.set_result(group)
        return group


def _short(ranks: Sequence[int]) -> str:
    """Write ranks in short, the same on every rank: ``0-6:2`` is 0, 2, 4, 6."""
    if isinstance(ranks, range) and ranks.step > 1 and len(ranks) > 1:
        return f"{ranks[0]}-{ranks[-1]}:{ranks.step}"
    return format_rank_ranges(ranks)


# Groups of torch's own take no attributes, so this stands in for one: it has nothing of a group
# that is gone.
_of_groups: WeakKeyDictionary[dist.ProcessGroup, AxisGroups] = WeakKeyDictionary()
_finding = threading.Lock()


def axis_groups(group: dist.ProcessGroup) -> AxisGroups:
    """Return what was made of this group's ranks so far."""
    with _finding:
        found = _of_groups.get(group)
        if found is None:
            found = _of_groups[group] = AxisGroups()
        return found
