"""What each rank contributes to a loop over micro-batches, and how the other ranks get it.

A contribution is a `LoopRecord` (losses, weights, flags) and the sums of the rank's micro-batches:
nodes of the step's tree, of gradients and of buffers.

Where ranks share memory, every rank has a row in one table. It writes its record there before the
gradients are reduced. All ranks take part in that, so afterwards each can read the records of all
without another collective.

In a run that may lose ranks, a rank also *publishes* its sums before it waits for the others: its
row says where in its shared memory they are. If the rank dies, they outlive it: the survivors read
them and need not run its micro-batches again.

The mark of a row is the section whose contribution is complete, or 0. It is read only after the
death of the rank, which orders it behind all that the rank has stored before it, and the rest of
the row. So these rules keep a torn contribution from being used:

- The mark is stored after everything that it vouches for, and set to 0 before any of that is
  changed or freed: at the commit, and however else the loop ends.
- A rank is dead when the engine says so, by a pidfd: no thread of it can run any more. A killed
  process is a zombie before that, while its last thread frees its memory. Survivors that have seen
  the zombie wait for a moment.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ddp._buckets import GRADIENT_ALIGNMENT, Bucket, FlatViews
from ..ddp._communicator import Communicator
from ..ddp._reducer import Reducer
from ..ddp._summation_tree import Node, SummationPlan
from ..errors import InvalidState
from ..groups._store import from_json, to_json
from ._buffers import StagedBuffers

LINE_WORDS = 8  # of 8 bytes: rows of different ranks are in different cache lines
MARK, DESCRIPTION_OFFSET, DESCRIPTION_LENGTH, RECORD_INDEX, RECORDS = range(
    5
)  # words of a row; two records follow
MAX_DESCRIPTIONS = 8
DYING_TIMEOUT = 1.0
"""Seconds to wait for the end of a rank that is a zombie and had published. Freeing a gigabyte
takes some 100 ms. If it takes longer than this, the micro-batches are run again."""
DYING_INTERVAL = 0.001


class LoopFlags(NamedTuple):
    """What ranks combine at the end of every loop, whether or not a rank was lost in it."""

    means_changed: float  # whether micro-batches changed buffers; see `BufferAverage`
    firsts_changed: float
    known_requests: float  # to join or leave

    @classmethod
    def combine(cls, flags: Iterable[LoopFlags]) -> LoopFlags:
        """Return whether any rank changed buffers, and the most requests that any knows of."""
        return cls(*map(max, zip(*flags, strict=True)))


class LoopRecord(NamedTuple):
    """What a rank tells the others at the end of a loop, as numbers of equal count on all ranks.

    `losses` and `weights` have one number per micro-batch. All other fields, and those of `flags`,
    must be single floats: `pack` puts them in a row.
    """

    losses: list[float]
    weights: list[float]  # `NO_WEIGHT` for each, or at least 0
    signature: float  # a hash of the shapes of its batches
    seconds: float  # per micro-batch, in the user's code
    flags: LoopFlags

    def pack(self, longest: int) -> list[float]:
        padding = [0.0] * (longest - len(self.losses))
        numbers = [self.signature, self.seconds, *self.flags]
        return [*self.losses, *padding, *self.weights, *padding, *numbers]

    @classmethod
    def unpack(cls, row: list[float], count: int, longest: int) -> LoopRecord:
        signature, seconds, *flags = row[2 * longest :]
        losses, weights = row[:count], row[longest : longest + count]
        return cls(losses, weights, signature, seconds, LoopFlags(*flags))


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is in the shared memory of a rank."""

    offset: int
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class PublishedSums:
    """Where the sums of a rank are, and what they are sums of; stored as JSON."""

    nodes: list[Node]
    parameters: list[str]
    used: TensorPlace
    """Whether each parameter got a gradient."""
    buckets: list[tuple[list[str], TensorPlace]]
    """The parameters of each bucket, and its slots: a row for the result, then one per node."""
    means: list[TensorPlace]
    firsts: TensorPlace | None
    has_first: bool


@dataclass(frozen=True)
class Contribution:
    """The contribution of a rank that has died, in its memory."""

    rank: int
    record: LoopRecord
    used: set[str]
    gradients: dict[Node, dict[str, Tensor]]
    buffers: StagedBuffers

    @property
    def results(self) -> dict[int, tuple[float, float]]:
        """The loss and the weight of its micro-batches, by number."""
        numbers = [leaf for lo, hi in self.gradients for leaf in range(lo, hi)]
        pairs = zip(self.record.losses, self.record.weights, strict=True)
        return dict(zip(numbers, pairs, strict=True))


class Contributions:
    """The contributions of a group's ranks to the loop that they are in."""

    def __init__(self, comm: Communicator, micro_batches: int) -> None:
        """Every rank of the group calls it."""
        self._comm = comm
        self._pid = os.getpid()
        self._micro_batches = micro_batches
        empty = LoopRecord([], [], 0.0, 0.0, LoopFlags(0.0, 0.0, 0.0))
        length = len(empty.pack(micro_batches))
        # A rank may write its next record while others read this one. None can be two ahead: every
        # loop has a reduction that all ranks take part in, between `write_record` and `exchange`.
        self._records = [slice(RECORDS + i * length, RECORDS + (i + 1) * length) for i in (0, 1)]
        self._record_index = 0
        # One memory. Single words of it are accessed without torch, which takes a microsecond each.
        self._table = torch.empty(0)
        self._words: list[ctypes.Array[ctypes.c_int64]] = []
        self._numbers: list[ctypes.Array[ctypes.c_double]] = []
        self._memory = comm.shared_memory if comm.size > 1 else None
        """The shared memory of this group; None if it has none."""
        self._descriptions: dict[object, Tensor] = {}
        """A `PublishedSums` of this rank for each set of tensors that it has published."""
        self._used = torch.empty(0, dtype=torch.uint8)
        self._used_indices: set[int] = set()  # what `_used` says
        self._first_bucket: Callable[[], Bucket | None] = lambda: None
        if self._memory is not None:
            self._make_table()

    def _make_table(self) -> None:
        words = -(-self._records[1].stop // LINE_WORDS) * LINE_WORDS
        try:
            memory = self._comm.allocate_shared(8 * words * self._comm.size, owner=0)
        except InvalidState:  # on all ranks: there is no memory left
            self._memory = None
            return
        self._table = memory
        rows = [memory.data_ptr() + 8 * words * rank for rank in range(self._comm.size)]
        self._words = [(ctypes.c_int64 * words).from_address(row) for row in rows]
        self._numbers = [(ctypes.c_double * words).from_address(row) for row in rows]
        self.clear()
        self._comm.barrier()  # from now on the mark of every rank is valid

    def clear(self) -> None:
        """Withdraw what this rank has published, before it changes or frees any of it."""
        # A forked child that ends a loop must not take it back for its parent.
        if self._memory is not None and os.getpid() == self._pid:
            self._words[self._comm.rank][MARK] = 0

    def exchange(self, mine: LoopRecord, plan: SummationPlan) -> list[LoopRecord]:
        """Return the records of all ranks; call it after the gradients are reduced."""
        comm, lengths = self._comm, [len(block) for block in plan.blocks]
        if comm.size == 1:
            return [mine]
        if self._memory is not None:
            longest, place = self._micro_batches, self._records[self._record_index]
            rows = [row[place] for row in self._numbers]
        else:
            longest = max(lengths)
            row = mine.pack(longest)
            # A sum is the fastest collective. What the others add is its identity, so that numbers
            # are kept.
            sums = torch.full((comm.size, len(row)), -0.0, dtype=torch.float64, device=comm.device)
            sums[comm.rank] = torch.tensor(row, dtype=torch.float64)
            comm.sum(sums.view(-1)).wait()
            rows = sums.tolist()
        pairs = zip(rows, lengths, strict=True)
        return [LoopRecord.unpack(row, count, longest) for row, count in pairs]

    # -- shared memory -----------------------------------------------------------------------

    @property
    def outlive_ranks(self) -> bool:
        """Whether the survivors can read what a rank that died has published."""
        return self._memory is not None

    def write_record(self, mine: LoopRecord) -> None:
        """Let the other ranks read the record of this one; once per loop, before the gradients are
        reduced. With two records per row, a rank may be one loop ahead of its readers, not two.
        """
        if self._memory is not None:
            self._record_index = 1 - self._record_index
            row = self._numbers[self._comm.rank]
            row[self._records[self._record_index]] = [*mine.pack(self._micro_batches)]

    def publish(
        self,
        section: int,
        reducer: Reducer,
        nodes: list[Node],
        used: set[int],
        buffers: StagedBuffers,
    ) -> None:
        """Let survivors use the sums of this rank, which must not change until `clear`.

        `nodes` are the maximal subtrees of the whole block, in order: `_read` relies on node i
        being in input slot i of every bucket, and on one loss per micro-batch in the record. Sums
        of a part of the block cannot be published, since the next micro-batch is added to them in
        place. Without shared memory left for any of them, nothing is published.
        """
        if self._memory is None:
            return
        # New buckets may be at the address of old ones, with other members.
        if self._first_bucket() is not reducer.buckets[0]:
            self._first_bucket = weakref.ref(reducer.buckets[0])
            self._descriptions.clear()
            self._used = self._allocate(len(reducer.names)).zero_()
            self._used_indices = set()
        try:
            text = self._describe(reducer, nodes, buffers)
        except InvalidState:
            return
        if used != self._used_indices:
            self._used_indices = set(used)
            self._used.zero_()[sorted(used)] = 1
        row = self._words[self._comm.rank]
        row[DESCRIPTION_OFFSET] = self._memory.offset_of(text)
        row[DESCRIPTION_LENGTH] = len(text)
        row[RECORD_INDEX] = self._record_index
        row[MARK] = section

    def _describe(self, reducer: Reducer, nodes: list[Node], buffers: StagedBuffers) -> Tensor:
        """Return a description of sums, in shared memory; raise if they are not there."""
        tensors = [*buffers.means, *([] if buffers.firsts is None else [buffers.firsts])]
        addresses = [(each.data_ptr(), each.shape, each.dtype) for each in tensors]
        key = tuple(nodes), tuple(addresses), buffers.has_first
        if key not in self._descriptions:
            sums = PublishedSums(
                nodes,
                reducer.names,
                self._place(self._used),
                [
                    ([reducer.names[i] for i in bucket.members], self._place(_slots(bucket)))
                    for bucket in reducer.buckets
                ],
                [self._place(each) for each in buffers.means],
                None if buffers.firsts is None else self._place(buffers.firsts),
                buffers.has_first,
            )
            data = bytearray(to_json(sums).encode())
            text = self._allocate(len(data)).copy_(torch.frombuffer(data, dtype=torch.uint8))
            self._place(text)  # raises if other ranks could not read it
            if len(self._descriptions) == MAX_DESCRIPTIONS:
                self._descriptions.clear()
            self._descriptions[key] = text
        return self._descriptions[key]

    def _allocate(self, count: int) -> Tensor:
        return self._comm.allocate(count, torch.uint8, torch.device("cpu"), warns=False)

    def _place(self, tensor: Tensor) -> TensorPlace:
        assert self._memory is not None
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if not tensor.numel():  # it is nowhere
            return TensorPlace(0, dtype, shape)
        if not self._memory.holds(tensor):
            raise InvalidState("a tensor is not in shared memory")
        return TensorPlace(self._memory.offset_of(tensor), dtype, shape)

    def of_dead_ranks(
        self, section: int, parameters: Mapping[str, Parameter]
    ) -> list[Contribution]:
        """Return what ranks have published in a section and left behind; `parameters` by name."""
        if self._memory is None:
            return []
        dying = self._comm.dead_or_dying_ranks()
        deadline = time.monotonic() + DYING_TIMEOUT
        while True:
            dead = set(self._memory.dead_ranks())  # first: then the marks of these are final
            marks = [row[MARK] for row in self._words]
            marked = {rank for rank in dying | dead if marks[rank] == section}
            if marked <= dead or time.monotonic() >= deadline:
                return [self._read(rank, parameters) for rank in sorted(marked & dead)]
            time.sleep(DYING_INTERVAL)

    def _read(self, rank: int, parameters: Mapping[str, Parameter]) -> Contribution:
        assert self._memory is not None
        offset, length, index = self._words[rank][DESCRIPTION_OFFSET : RECORD_INDEX + 1]
        text = self._memory.map_peer(rank, offset, length)
        sums = from_json(bytes(text.tolist()), PublishedSums)
        gradients: dict[Node, dict[str, Tensor]] = {node: {} for node in sums.nodes}
        for names, place in sums.buckets:
            slots = self._map(rank, place)
            members = [parameters[name] for name in names]
            # Slot 0 is the result; a bucket may have more slots than this rank has nodes.
            for node, row in zip(sums.nodes, slots[1:], strict=False):
                views = FlatViews(row, members, GRADIENT_ALIGNMENT).views
                gradients[node].update(zip(names, views, strict=True))
        buffers = StagedBuffers(
            [self._map(rank, place) for place in sums.means],
            None if sums.firsts is None else self._map(rank, sums.firsts),
            sums.has_first,
        )
        count, longest = sum(hi - lo for lo, hi in sums.nodes), self._micro_batches
        record = LoopRecord.unpack(self._numbers[rank][self._records[index]], count, longest)
        is_used = self._map(rank, sums.used).tolist()
        used = {name for name, flag in zip(sums.parameters, is_used, strict=True) if flag}
        return Contribution(rank, record, used, gradients, buffers)

    def _map(self, rank: int, place: TensorPlace) -> Tensor:
        assert self._memory is not None
        dtype = getattr(torch, place.dtype)
        nbytes = math.prod(place.shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(place.shape, dtype=dtype)
        return self._memory.map_peer(rank, place.offset, nbytes).view(dtype).view(place.shape)


def _slots(bucket: Bucket) -> Tensor:
    assert bucket.slots is not None, "sparse gradients are refused"
    return bucket.slots.tensor
