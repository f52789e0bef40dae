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

from ..groups import ProcessGroup
from ..groups._words import runs
from ._axis_options import DEFAULT, AxisOptions
from ._bases import Base
from ._consistency import Ledger, Use

__all__ = ["AxisGroups", "axis_groups"]


class Keeper(Protocol):
    """Who keeps groups at hand: a mesh."""

    def let_go(self) -> None:
        """Keep none any more."""


class AxisGroups:
    """The groups that were made of one group's ranks for axes of meshes, as one rank sees them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        """The meshes that this rank has made on the group, to be compared with those of others."""
        self._made: dict[tuple[Sequence[int], AxisOptions, str], Future[dist.ProcessGroup]] = {}
        # Over `_made`, for moments: ranks may form two groups in different order on two threads,
        # and must not wait for each other here.
        self._lock = threading.Lock()
        self._kept_by: WeakValueDictionary[int, Keeper] = WeakValueDictionary()

    def keep_in(self, keeper: Keeper) -> None:
        """Let a mesh keep groups at hand, until they are shut down."""
        self._kept_by[id(keeper)] = keeper

    def find(
        self, base: Base, ranks: Sequence[int], options: AxisOptions, *, use: Use
    ) -> dist.ProcessGroup:
        """Return the group of these ranks, in this order, or make it."""
        device_type = use.root.device_type
        if options == DEFAULT and ranks == range(base.size) and base.takes(device_type):
            self.ledger.announce(base, use)
            return base.group
        name = f"mesh {_short(ranks)}{options.label}"

        def make() -> dist.ProcessGroup:
            purpose = self.ledger.purpose(base, ranks, use, label=f"{base.label}/{name}")
            return base.make(ranks, options, name=name, device_type=device_type, purpose=purpose)

        return self._once((ranks, options, device_type), make)

    def shutdown(self) -> None:
        """End this rank's part in all groups that were made so far."""
        with self._lock:
            made, self._made = self._made, {}
        for keeper in self._kept_by.values():
            keeper.let_go()  # an engine's threads and memory end with the last who has it
        for future in made.values():
            group = future.result()
            if isinstance(group, ProcessGroup):
                group.shutdown()
            else:
                dist.destroy_process_group(group)

    def _once(
        self,
        key: tuple[Sequence[int], AxisOptions, str],
        make: Callable[[], dist.ProcessGroup],
    ) -> dist.ProcessGroup:
        with self._lock:
            found = self._made.get(key)
            if found is None:
                made = self._made[key] = Future[dist.ProcessGroup]()
        if found is not None:
            return found.result()  # what makes it has a deadline
        try:
            group = make()
        except BaseException as error:
            with self._lock:
                del self._made[key]  # the next to ask tries again
            made.set_exception(error)
            raise
        made.set_result(group)
        return group


def _short(ranks: Sequence[int]) -> str:
    """Write ranks in short, the same on every rank: ``0-6:2`` is 0, 2, 4, 6."""
    if isinstance(ranks, range) and ranks.step > 1 and len(ranks) > 1:
        return f"{ranks[0]}-{ranks[-1]}:{ranks.step}"
    return runs(ranks)


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
