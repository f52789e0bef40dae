"""How a parameter that its owner has stepped gets to the other ranks.

In shared memory it is there already: all ranks' parameters are the same bytes, in the memory of the
owner (`OneCopy`). Elsewhere, and where a parameter cannot be moved, it is sent (`Sent`).
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import InvalidState, RankMismatch
from ..groups import ProcessGroup
from ..groups._process_group import allocate_shared
from ._channel import Channel

__all__ = ["Exchange", "OneCopy", "Sent", "make_exchanges"]

ALIGNED = 64
"""Bytes: where a parameter begins, for the sake of vector instructions."""


class Exchange:
    """Some parameters, and who steps each of them."""

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self.owners = list(owners)

    def is_stale(self) -> bool:
        """Tell whether parameters are not any more what they were when this was made."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait until parameters may be written to."""

    def publish(self) -> None:
        """Wait until all ranks have what the owners have written."""
        raise NotImplementedError


def make_exchanges(
    parameters: Sequence[Tensor], owners: Sequence[int], channel: Channel, *, share: bool
) -> list[Exchange]:
    """Choose for each parameter how it travels, and give all ranks the values of rank 0."""
    pairs = [pair for pair in zip(parameters, owners, strict=True) if pair[0].numel()]
    if channel.size == 1 or not pairs:
        return []
    movable = _agree(pairs, channel, share=share and channel.shares_memory)
    moved = [pair for pair in pairs if id(pair[0]) in movable]
    exchanges: list[Exchange] = []
    if moved:
        try:
            exchanges.append(OneCopy(*_unzip(moved), channel))
        except InvalidState as error:  # on all ranks alike
            moved = []
            warnings.warn(f"every rank keeps its own copy of the parameters, which is slower: "
                          f"{error}", RuntimeWarning, stacklevel=4)  # fmt: skip
    rest = [pair for pair in pairs if not moved or id(pair[0]) not in movable]
    if rest:
        exchanges.append(Sent(*_unzip(rest), channel))
    return exchanges


def _agree(pairs: list[tuple[Tensor, int]], channel: Channel, *, share: bool) -> set[int]:
    """Choose what is moved: what can be on all ranks; they must agree on the owners anyway."""
    movable = _movable([p for p, _ in pairs]) if share else set()
    codes = [2 * owner + (id(p) in movable) for p, owner in pairs]
    card = torch.tensor(codes, dtype=torch.int64, device=channel.device)
    cards = torch.stack([part.cpu() for part in channel.gather(card)])
    odd = ((cards // 2) != (cards[:1] // 2)).any(dim=1).nonzero().flatten().tolist()
    if odd:
        raise RankMismatch(
            f"ranks divide the parameters differently: rank {odd[0]} not as rank 0 does. Those "
            "that overlap in memory stay together, so they must overlap on all ranks or on none",
            group=getattr(channel.group, "label", ""),
            operation="ShardedOptimizer",
            ranks=odd,
        )
    both = (cards % 2).all(dim=0).tolist()
    return {id(p) for (p, _), can in zip(pairs, both, strict=True) if can}


def _movable(parameters: list[Tensor]) -> set[int]:
    """Choose parameters whose memory nobody else has: to move one would part it from the other."""
    storages = Counter(p.untyped_storage().data_ptr() for p in parameters)
    return {
        id(p)
        for p in parameters
        if p.device.type == "cpu"
        and p.layout is torch.strided
        and p.untyped_storage().nbytes() == p.nbytes
        and storages[p.untyped_storage().data_ptr()] == 1
    }


def _unzip(pairs: list[tuple[Tensor, int]]) -> tuple[list[Tensor], list[int]]:
    return [p for p, _ in pairs], [owner for _, owner in pairs]


class OneCopy(Exchange):
    """Parameters of which there is one copy for all ranks, each in its owner's shared memory.

    When this goes away, with its optimizer, each rank has its own copy again.
    """

    def __init__(
        self, parameters: Sequence[Tensor], owners: Sequence[int], channel: Channel
    ) -> None:
        super().__init__(parameters, owners)
        assert isinstance(channel.group, ProcessGroup)
        self._group = channel.group
        views = self._allocate(channel.size)
        if channel.rank == 0:
            for view, parameter in zip(views, self.parameters, strict=True):
                view.copy_(parameter.detach())
        self._group.barrier().wait()
        for view, parameter in zip(views, self.parameters, strict=True):
            parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]
        shared = list(zip(map(weakref.ref, self.parameters), views, strict=True))
        weakref.finalize(self, _part_with, shared).atexit = False
        mine = channel.rank
        self._others = [
            p for p, owner in zip(self.parameters, owners, strict=True) if owner != mine
        ]

    def _allocate(self, size: int) -> list[Tensor]:
        """Make room for each parameter, in a storage of its own, so that one is saved as one."""
        views: dict[int, Tensor] = {}
        for owner in range(size):
            mine = [p for p, o in zip(self.parameters, self.owners, strict=True) if o == owner]
            ends = list(accumulate((-(-p.nbytes // ALIGNED) * ALIGNED for p in mine), initial=0))
            if mine:
                memory = allocate_shared(self._group, ends[-1], owner=owner).numpy()
                for p, start in zip(mine, ends, strict=False):
                    flat = torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=start)
                    views[id(p)] = flat.as_strided(p.shape, p.stride())
        return [views[id(p)] for p in self.parameters]

    def is_stale(self) -> bool:
        return [p.data_ptr() for p in self.parameters] != self._addresses

    def meet(self) -> None:
        # Another rank may not be done with backward, nor with looking at the last weights.
        self._group.barrier().wait()

    def publish(self) -> None:
        self._group.barrier().wait()
        # They have changed behind autograd's back: it must not run backward through old graphs.
        torch.autograd.graph.increment_version(self._others)


def _part_with(shared: list[tuple[weakref.ref[Tensor], Tensor]]) -> None:
    """Give this rank its own copy of what another optimizer would step on every rank.

    A parameter may have moved on since. That the old memory is kept until here, and so is not where
    it has moved to, makes its address tell.
    """
    for reference, memory in shared:
        parameter = reference()
        if parameter is not None and parameter.data_ptr() == memory.data_ptr():
            parameter.data = memory.clone()


class Sent(Exchange):
    """Parameters of which every rank has its own copy: owners send theirs to all."""

    def __init__(
        self, parameters: Sequence[Tensor], owners: Sequence[int], channel: Channel
    ) -> None:
        super().__init__(parameters, owners)
        self._channel = channel
        self._kinds = [(p.dtype, p.device) for p in self.parameters]
        keys = list(zip(self.owners, self._kinds, strict=True))
        self._parcels = [
            _Parcel([p for p, k in zip(self.parameters, keys, strict=True) if k == key], key[0],
                    channel) for key in dict.fromkeys(keys)
        ]  # fmt: skip
        self._deliver([0] * len(self._parcels))

    def is_stale(self) -> bool:
        return [(p.dtype, p.device) for p in self.parameters] != self._kinds

    def publish(self) -> None:
        self._deliver([parcel.owner for parcel in self._parcels])

    def _deliver(self, senders: list[int]) -> None:
        rank, broadcast = self._channel.rank, self._channel.broadcast
        works = []
        for parcel, sender in zip(self._parcels, senders, strict=True):
            if sender == rank:
                torch._foreach_copy_(parcel.views, parcel.values())
            works.append(broadcast(parcel.flat.view(torch.uint8), sender))  # of any type
        for work, parcel, sender in zip(works, self._parcels, senders, strict=True):
            work.wait()
            if sender != rank:
                torch._foreach_copy_(parcel.values(), parcel.views)


class _Parcel:
    """What one owner sends of one type: a flat tensor."""

    def __init__(self, parameters: list[Tensor], owner: int, channel: Channel) -> None:
        self.owner = owner
        self._parameters = parameters
        first = parameters[0]
        sizes = [p.numel() for p in parameters]
        self.flat = channel.allocate(sum(sizes), first.dtype, first.device)
        self.views = [
            part.view(p.shape)
            for part, p in zip(torch.split(self.flat, sizes), parameters, strict=True)
        ]

    def values(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters]
