"""The process group as data parallelism uses it: flat tensors, sums, means, broadcasts.

phalanx groups and torch groups differ in what they support. `Communicator` hides the
difference; no other module of this package asks which kind a group is.

`broadcast_coalesced` sends many tensors in few calls. It does not write to a tensor whose value is
already right, since autograd may have saved it for backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..errors import GroupError, InvalidState
from ..groups import ProcessGroup, ReduceOp, Work
from ._dtensor import local_tensor

AnyWork = Work | dist.Work


class Communicator:
    """What the reducer and the wrapper ask of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        """Where small tensors have to be for the group to take them."""
        self._ours = group if isinstance(group, ProcessGroup) else None

    @property
    def timeout(self) -> float | None:
        """Tell how many seconds a call may take, if the group says."""
        if self._ours is not None:
            return self._ours.timeout.total_seconds()
        try:
            options: Any = self.group._get_backend(self.device).options
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):  # not every backend has options
            return None

    def members(self) -> tuple[int, ...]:
        """List the ranks that have not left."""
        return tuple(range(self.size)) if self._ours is None else self._ours.members

    def is_busy(self) -> bool:
        """Tell whether calls of this rank are under way, as far as the group says."""
        return self._ours is not None and self._ours._detector.is_busy()

    def failure(self) -> GroupError | None:
        """Return why the group cannot go on, if it cannot and says so."""
        return self._ours.failure() if self._ours is not None else None

    def abort(self, why: str) -> None:
        """Have peers that wait for this rank raise, and tell them why; torch's groups cannot."""
        if self._ours is not None:
            self._ours.abort(why)

    @property
    def compares_calls(self) -> bool:
        """Tell whether a rank that makes another call than its peers is found out at once."""
        return self._ours is not None and self._ours.compares_calls

    @property
    def shares_memory(self) -> bool:
        """Tell whether ranks reach each other's flat tensors, so that nothing has to be sent."""
        return self._ours is not None and self._ours.shares_memory

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a flat tensor where the group reaches it without a copy, if it can."""
        if self._ours is not None and device.type == "cpu":
            try:
                return self._ours.allocate((count,), dtype)
            except InvalidState as error:
                warnings.warn(f"gradients stay in ordinary memory, which is slower: {error}",
                              RuntimeWarning, stacklevel=2)  # fmt: skip
        return torch.empty(count, dtype=dtype, device=device)

    def mean(self, flat: Tensor) -> AnyWork:
        """Replace a tensor by its mean over the ranks."""
        if self._ours is not None:
            return self._ours.allreduce(flat, op=ReduceOp.AVG)
        return self.sum(flat.div_(self.size))  # not every engine of torch's knows a mean

    def sum(self, flat: Tensor) -> AnyWork:
        """Replace a tensor by its sum over the ranks."""
        if self._ours is not None:
            return self._ours.allreduce(flat)
        return self.group.allreduce([flat], c10d.AllreduceOptions())

    def broadcast(self, tensor: Tensor, root: int = 0) -> AnyWork:
        """Copy a tensor from one rank to all."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self.group.broadcast([tensor], options)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Wait for everybody's tensor of the same size; that of a rank which has left is zero."""
        parts = [torch.zeros_like(tensor) for _ in range(self.size)]
        self.group.allgather([parts], [tensor], c10d.AllgatherOptions()).wait()
        return parts

    def exchange(self, text: str) -> list[str]:
        """Wait for everybody's text, of any length."""
        data = text.encode()
        lengths = [int(part) for part in self.gather(self._small([len(data)], torch.int64))]
        card = self._small(list(data.ljust(max(lengths), b"\0")), torch.uint8)
        cards = self.gather(card)
        return [
            bytes(card.tolist())[:length].decode()
            for card, length in zip(cards, lengths, strict=True)
        ]

    def announce_local_pass(self) -> AnyWork:
        """Say to peers that see it that a backward pass was kept local; nobody waits for it."""
        return self.group.barrier(c10d.BarrierOptions())

    def _small(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


BROADCAST_BUCKET_BYTES = 250 << 20  # bytes that are sent at once


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    comm: Communicator,
    *,
    root: int = 0,
    chunk: int = BROADCAST_BUCKET_BYTES,
) -> None:
    """Give every rank the root's values, tensors of one type together.

    A tensor that has them already is not written to: autograd may have saved it for backward, and
    would take any write for a change.
    """
    with torch.no_grad():
        for group in _chunks([local_tensor(t).detach() for t in tensors if t.numel()], chunk):
            _broadcast_together(group, comm, root)


def _broadcast_together(tensors: list[Tensor], comm: Communicator, root: int) -> None:
    first = tensors[0]
    flat = comm.allocate(sum(t.numel() for t in tensors), first.dtype, first.device)
    parts = torch.split(flat, [t.numel() for t in tensors])
    if comm.rank == root:
        torch._foreach_copy_(list(parts), [t.reshape(-1) for t in tensors])
    comm.broadcast(flat, root).wait()
    if comm.rank != root:
        for tensor, part in zip(tensors, parts, strict=True):
            received = part.view(tensor.shape)
            if not torch.equal(tensor, received):
                tensor.copy_(received)


def _chunks(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Divide tensors into lists of one type and device, of about so many bytes."""
    chunks: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        chunk, size = filling.get(key, ([], limit))
        if size >= limit:
            chunk, size = [], 0
            chunks.append(chunk)
        chunk.append(tensor)
        filling[key] = chunk, size + tensor.nbytes
    return chunks
