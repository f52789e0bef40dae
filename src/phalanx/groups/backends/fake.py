"""Fake: no communication, any number of ranks.

For planning: a mesh of 100,000 ranks fits a laptop when only one of them exists. Every call
completes at once, as if all ranks held what this rank holds; reductions leave their input
unchanged.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from .._engine import REDUCTIONS, Engine, PythonWork, Traits
from . import refuse_options

Tensors = list[Tensor]


class FakeEngine:
    """The engine of a rank whose peers do not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.started_works: list[Any] = []  # stays empty: every call completes immediately

    def allreduce(self, tensors: Tensors, *_: object) -> PythonWork:
        """Leave the tensors unchanged."""
        return _done(tensors)

    allreduce_coalesced = reduce = broadcast = recv = recv_anysource = allreduce

    def barrier(self, *_: object) -> PythonWork:
        return _done([])

    send = barrier

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> PythonWork:
        """Keep this rank's own part."""
        return _done(outputs, [inputs[0][self._rank]])

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> PythonWork:
        part = whole.reshape(self._size, -1)[self._rank]
        return _done([output], [part.view(output.shape)])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> PythonWork:
        """Receive this rank's own tensor from every rank."""
        return _done(outputs[0], inputs * self._size)

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any) -> PythonWork:
        rows = output.view(self._size, -1)
        return _done([rows], [part.reshape(1, -1).expand_as(rows)])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> PythonWork:
        return _done(outputs[0], inputs * self._size) if outputs else _done([])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> PythonWork:
        return _done(outputs, [inputs[0][self._rank]]) if inputs else _done(outputs)

    def alltoall_base(
        self, output: Tensor, source: Tensor, into: list[int], out_of: list[int], opts: Any
    ) -> PythonWork:
        """Receive this rank's own part from every rank, cut to the expected size."""
        before = sum(out_of[: self._rank])
        own = source.detach()[before : before + out_of[self._rank]]
        if set(into) == {len(own)}:
            pieces = output.detach().view(self._size, *own.shape)
            return _done([pieces], [own.expand_as(pieces)])
        for piece in torch.split(output.detach(), into):
            rows = min(len(piece), len(own))
            piece[:rows].copy_(own[:rows])
        return _done([output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> PythonWork:
        return _done([outputs[self._rank]], [inputs[self._rank]])


def _done(outputs: Tensors, values: Tensors | None = None) -> PythonWork:
    for output, value in zip(outputs, values or (), strict=values is not None):
        output.detach().copy_(value)
    work = PythonWork(outputs)
    work.finish()
    return work


def make(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **_: object
) -> Engine:
    """Create an engine without peers."""
    del store, timeout, device
    return FakeEngine(rank, world_size)


TRAITS = Traits(
    devices=frozenset({"cpu", "cuda", "meta"}),
    averages=REDUCTIONS,
    averages_all_types=True,
    premultiplies=True,
    needs_store=False,
    alltoall_lists=True,
    check_options=refuse_options("fake"),
)
