"""The process group as data parallelism uses it: flat tensors, sums, means, broadcasts.

phalanx groups and torch groups differ in what they support. `Communicator` hides the
difference. The only other module of this package that asks which kind a group is makes subgroups
(`hooks/_model_averaging`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from .. import native
from ..errors import GroupError, InvalidState
from ..groups import ProcessGroup, ReduceOp, Work
from ..groups._call_site import warn_user
from ..groups._text_exchange import exchange_texts
from ..groups.backends.shm import DTYPES
from ._dtensor import local_tensor
from ._summation_tree import SummationPlan, add_in_order

if TYPE_CHECKING:
    from ..groups.backends._shm_region import Slab

AnyWork = Work | dist.Work
TREE_DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.complex64, torch.complex128),
    }
)
"""Dtypes that the native engine sums in the order of a tree."""
SLICE_GRAIN = 64
"""Slices of ranks are multiples of so many elements, so that no two share a cache line."""


class Communicator:
    """The collectives that the reducer and the wrapper need."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.device = device  # the device of small tensors that the group communicates
        self._ours = group if isinstance(group, ProcessGroup) else None

    @property
    def label(self) -> str:
        """The name of the group in errors; torch groups have none."""
        return self._ours.label if self._ours is not None else ""

    @property
    def timeout(self) -> float | None:
        if self._ours is not None:
            return self._ours.timeout.total_seconds()
        try:
            options: Any = self.group._get_backend(self.device).options
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):  # not every backend has options
            return None

    def members(self) -> tuple[int, ...]:
        return tuple(range(self.size)) if self._ours is None else self._ours.members

    def dead_or_dying_ranks(self) -> set[int]:
        """Return the ranks whose process has died, or is about to end, as far as is known."""
        return set() if self._ours is None else self._ours._detector.dead_ranks()

    def is_busy(self) -> bool:
        """Whether calls of this rank are in flight, as far as the group reports it."""
        return self._ours is not None and self._ours._detector.is_busy()

    def failure(self) -> GroupError | None:
        return self._ours.failure() if self._ours is not None else None

    def abort(self, why: str) -> None:
        """Make the peers raise with this reason. A torch group cannot, and does nothing."""
        if self._ours is not None:
            self._ours.abort(why)

    @property
    def detects_mismatch(self) -> bool:
        """Whether the group itself detects that ranks make different calls."""
        return self._ours is not None and self._ours.detects_mismatch

    @property
    def shares_memory(self) -> bool:
        """Whether ranks can read each other's flat tensors."""
        return self._ours is not None and self._ours.shares_memory

    @property
    def shared_memory(self) -> Slab | None:
        """This rank's part of the memory that ranks share; None unless `shares_memory`."""
        return self._ours._shared_memory if self._ours is not None else None

    def allocate(
        self, count: int, dtype: torch.dtype, device: torch.device, *, warns: bool = True
    ) -> Tensor:
        """Allocate a flat tensor that the group can reduce without a copy, if possible."""
        if self._ours is not None and device.type == "cpu":
            try:
                return self._ours.allocate((count,), dtype)
            except InvalidState as error:
                if warns:
                    warn_user(
                        f"gradients are in ordinary memory, which is slower: {error}",
                        RuntimeWarning,
                    )
        return torch.empty(count, dtype=dtype, device=device)

    def allocate_shared(self, nbytes: int, owner: int) -> Tensor:
        """Allocate bytes that all ranks map; only where `shares_memory`."""
        assert self._ours is not None
        return self._ours._allocate_shared(nbytes, owner=owner)

    def mean(self, flat: Tensor) -> AnyWork:
        if self._ours is not None:
            return self._ours.allreduce(flat, op=ReduceOp.AVG)
        return self.sum(flat.div_(self.size))  # not every torch backend has AVG

    def sum(self, flat: Tensor) -> AnyWork:
        if self._ours is not None:
            return self._ours.allreduce(flat)
        return self.group.allreduce([flat], c10d.AllreduceOptions())

    def allocate_slots(
        self, slots: int, numel: int, dtype: torch.dtype, device: torch.device
    ) -> SumSlots:
        """Allocate flat tensors of at least `numel` zeros each, for `ordered_sum`; all call it.

        `slots`: the greatest number of subtrees of a rank.
        """
        grain = self.size * SLICE_GRAIN
        stride, rows = -(-numel // grain) * grain, slots + 1
        tensor = self.allocate(rows * stride, dtype, device).zero_().view(rows, stride)
        is_shared = (
            self._ours is not None and dtype in TREE_DTYPES and self._ours._is_shared(tensor)
        )
        # If one rank has no shared memory left, none can use the others'.
        if self.size > 1:
            is_shared = all(shared for (shared,) in self.gather_numbers([int(is_shared)]))
        return SumSlots(tensor, is_shared)

    def ordered_sum(
        self, slots: SumSlots, plan: SummationPlan, divisor: float
    ) -> AnyWork | OrderedSum:
        """Sum the subtrees of all ranks in the order of a tree; store the quotient as the result.

        The subtrees of this rank stay as they are, even if the sum fails.
        """
        if self.size == 1 or not slots.is_shared:
            subtrees = slots.inputs[: plan.counts[self.rank]]
            order = SumOrder(plan.counts, plan.merges)
            return OrderedSum(self.group, subtrees, slots.result, order, divisor)
        assert self._ours is not None
        return self._ours._ordered_allreduce(slots.tensor, plan.counts, plan.merges, divisor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> AnyWork:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self.group.broadcast([tensor], options)

    def broadcast_numbers(
        self, numbers: Sequence[float], root: int, dtype: torch.dtype = torch.int64
    ) -> list[Any]:
        """Return the root's numbers; all ranks pass as many."""
        tensor = torch.tensor(list(numbers), dtype=dtype, device=self.device)
        self.broadcast(tensor, root).wait()
        return list(tensor.tolist())

    def gather_numbers(
        self, numbers: Sequence[float], dtype: torch.dtype = torch.int64
    ) -> list[list[Any]]:
        """Return the numbers of every rank; zeros for a rank that has left."""
        tensor = torch.tensor(list(numbers), dtype=dtype, device=self.device)
        return [part.tolist() for part in self.gather(tensor)]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from every rank and wait; zeros for a rank that has left."""
        parts = [torch.zeros_like(tensor) for _ in range(self.size)]
        self.group.allgather([parts], [tensor], c10d.AllgatherOptions()).wait()
        return parts

    def exchange(self, text: str) -> list[str]:
        """Gather a text from every rank and wait; it is empty for a rank that has left."""
        texts = exchange_texts(text, self.group, self.device)
        return [texts.get(rank, "") for rank in range(self.size)]

    def barrier(self) -> None:
        work: AnyWork = (self._ours or self.group).barrier()
        work.wait()

    def announce_local_pass(self) -> None:
        """Issue a barrier that is not waited for, so that a peer that reduces instead raises."""
        self.group.barrier(c10d.BarrierOptions())


class SumSlots(NamedTuple):
    """Flat tensors of one rank: its subtrees, and the sum of the whole tree.

    The two are apart, so that what a rank has computed outlives a sum that a dead rank has torn.
    """

    tensor: Tensor  # one slot per row; all ranks have as many, of equal slices for all ranks
    is_shared: bool  # whether all ranks can access those of all others

    @property
    def result(self) -> Tensor:
        """The first slot. Sums of all ranks write to it, and only this rank reads it."""
        return self.tensor[0]

    @property
    def inputs(self) -> Tensor:
        """The other slots, the first of which have this rank's subtrees. No sum writes to them."""
        return self.tensor[1:]


class SumOrder(NamedTuple):
    """The order in which the subtrees of all ranks are added up."""

    counts: list[int]  # of subtrees, by rank
    merges: list[int]  # see `add_in_order`
    rows: list[int] | None = None
    """For each subtree in tree order, its place when all are listed by rank; None if that is the
    same."""


class OrderedSum:
    """A sum in tree order on engines that lack it: ranks exchange slices and add up their own.

    The flat subtrees of this rank and the result have as many elements on all ranks, a multiple of
    the world size.

    The second half starts when it is first waited for, so all ranks must wait for sums in the same
    order, and after they have started the same ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        subtrees: Tensor,
        result: Tensor,
        order: SumOrder,
        divisor: float,
    ) -> None:
        self._group = group
        self._result = result
        self._order = order
        self._divisor = divisor
        mine, size, length = len(subtrees), group.size(), result.numel() // group.size()
        self._is_done = False
        # The slices of all my subtrees for one rank lie together.
        self._sent = subtrees.view(mine, size, length).transpose(0, 1).reshape(-1)
        self._received = self._sent
        if size > 1:
            received = [count * length for count in order.counts]
            self._received = self._sent.new_empty(sum(received))
            options = c10d.AllToAllOptions()
            sent = [mine * length] * size
            self._work = group.alltoall_base(self._received, self._sent, received, sent, options)

    def wait(self) -> bool:
        if self._is_done:
            return True
        self._is_done = True
        size, merges, result = self._group.size(), self._order.merges, self._result
        if size > 1:
            self._work.wait()
        subtrees = self._received.view(sum(self._order.counts), result.numel() // size)
        if self._order.rows is not None:
            subtrees = subtrees[self._order.rows]
        if size == 1:
            sum_rows(subtrees, merges, self._divisor, into=result)
            return True
        own = sum_rows(subtrees, merges, self._divisor, into=torch.empty_like(subtrees[0]))
        return bool(self._group._allgather_base(result, own, c10d.AllgatherOptions()).wait())


def sum_rows(subtrees: Tensor, merges: Sequence[int], divisor: float, *, into: Tensor) -> Tensor:
    """Add the rows of a tensor in the order of a tree, and divide."""
    if subtrees.is_complex():  # torch's complex arithmetic does not keep the signs of zeros
        parts, target = torch.view_as_real(subtrees).flatten(1), torch.view_as_real(into).view(-1)
        sum_rows(parts, merges, divisor, into=target)
        return into
    if subtrees.device.type == "cpu" and subtrees.dtype in TREE_DTYPES and native.engine:
        rows = [row.data_ptr() for row in subtrees]
        dtype, numel = DTYPES[into.dtype], into.numel()
        native.engine.sum_tree(into.data_ptr(), rows, list(merges), dtype, numel, divisor)
        return into
    total = add_in_order(list(subtrees), merges, torch.add)
    return into.copy_(total if divisor == 1 else total / divisor)


BROADCAST_BUCKET_BYTES = 250 << 20


class FlatMessage:
    """Tensors of one dtype and device, and a flat tensor to send them in."""

    def __init__(self, tensors: list[Tensor], comm: Communicator) -> None:
        self.tensors = tensors
        sizes = [tensor.numel() for tensor in tensors]
        self.flat = comm.allocate(sum(sizes), tensors[0].dtype, tensors[0].device)
        parts = zip(torch.split(self.flat, sizes), tensors, strict=True)
        self.views = [part.view(tensor.shape) for part, tensor in parts]

    def pack(self) -> None:
        torch._foreach_copy_(self.views, self.tensors)

    def unpack(self) -> None:
        torch._foreach_copy_(self.tensors, self.views)


def broadcast_coalesced(
    tensors: Sequence[Tensor], comm: Communicator, *, root: int, limit: int = BROADCAST_BUCKET_BYTES
) -> None:
    """Give every rank the root's values, with tensors of one dtype in one message.

    A tensor that already has the right value is not written to: autograd may have saved it for
    backward and would detect the write.
    """
    with torch.no_grad():
        for chunk in chunk_tensors([local_tensor(t).detach() for t in tensors if t.numel()], limit):
            message = FlatMessage(chunk, comm)
            if comm.rank == root:
                message.pack()
            comm.broadcast(message.flat, root).wait()
            if comm.rank != root:
                for tensor, received in zip(chunk, message.views, strict=True):
                    if not same_bits(tensor, received):
                        tensor.copy_(received)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and dtype have the same bytes: 0.0 equals -0.0, but differs."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def chunk_tensors(tensors: Sequence[Tensor], limit: float = math.inf) -> list[list[Tensor]]:
    """Divide tensors into lists of one dtype and device, of about `limit` bytes."""
    chunks: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], float]] = {}
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        chunk, size = filling.get(key, ([], limit))
        if size >= limit:
            chunk, size = [], 0
            chunks.append(chunk)
        chunk.append(tensor)
        filling[key] = chunk, size + tensor.nbytes
    return chunks
