"""The sum of sparse tensors, for an engine that knows only dense ones.

How many entries each rank has is exchanged first, and waited for; then indices and values travel in
rows as long as the longest. They are added up by rank, as `local` does it, for the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ..errors import InvalidArgument
from ._engine import Engine, RawWork
from ._joint import JointWork

__all__ = ["SparseSum"]


class SparseSum:
    """One sparse tensor of each rank on its way to their sum."""

    def __init__(self, engine: Engine, tensor: Tensor, *, rank: int, size: int) -> None:
        self._engine = engine
        self._tensor = tensor
        self._rank = rank
        self._size = size

    def start(self, wait_for: Callable[[RawWork], None]) -> RawWork:
        """Tell the others how many entries there are, hear it from them, and send the entries."""
        mine = self._tensor.detach().coalesce()
        self._counts = self._exchange_counts(mine, wait_for)
        longest = max(self._counts)
        self._indices = self._rows(longest, mine.indices().t())
        self._values = self._rows(longest, mine.values())
        return JointWork([self._gather(rows) for rows in (self._indices, self._values)])

    def finish(self) -> None:
        """Add up what came and make it this rank's tensor."""
        shape = self._tensor.shape
        parts = [
            torch.sparse_coo_tensor(
                self._indices[rank, :count].t(),
                self._values[rank, :count],
                shape,
                check_invariants=False,  # it was such a tensor, of the same shape
            )
            for rank, count in enumerate(self._counts)
            if count
        ]
        with torch.no_grad():  # a detached view would not see the new entries
            self._tensor.zero_()
            if parts:
                self._tensor.add_(functools.reduce(torch.add, parts).coalesce())

    def _exchange_counts(self, mine: Tensor, wait_for: Callable[[RawWork], None]) -> list[int]:
        said = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape], dtype=torch.int64)
        heard = torch.zeros(self._size, len(said), dtype=torch.int64)
        heard[:, 1:] = said[1:]  # those who have left say nothing, and bring nothing
        heard[self._rank] = said
        wait_for(self._gather(heard))
        if not torch.equal(heard[:, 1:], said[1:].expand(self._size, -1)):
            shapes = sorted({str(row[2:].tolist()) for row in heard})
            raise InvalidArgument(f"ranks add up sparse tensors of different shapes: {shapes}")
        return [int(count) for count in heard[:, 0]]

    def _rows(self, longest: int, own: Tensor) -> Tensor:
        rows = own.new_zeros((self._size, longest, *own.shape[1:]))
        rows[self._rank, : len(own)] = own
        return rows

    def _gather(self, rows: Tensor) -> RawWork:
        """Fill every rank's row with what that rank has there."""
        flat = rows.view(-1)
        mine = rows[self._rank].reshape(-1).clone()
        work: RawWork = self._engine._allgather_base(flat, mine, AllgatherOptions())
        return work
