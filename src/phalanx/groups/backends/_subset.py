"""An engine for the remaining ranks of a group whose own engine needs all of them.

Collectives go through an engine of the members and keep the group's ranks: roots are translated,
outputs have a slot for every rank, and the slots of absent ranks are left unchanged.
Sends and receives go through the group's full engine, since the two sides of a transfer may
have been started before and after a departure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._engine import CallFailed, Engine, JointWork, PythonWork, RawWork, copy_options, peer_left

T = TypeVar("T")
Tensors = list[Tensor]
Method = Callable[..., RawWork]


class SubsetEngine:
    """An engine of some ranks that uses the numbering of all."""

    def __init__(self, full: Engine, inner: Engine, members: Sequence[int], size: int) -> None:
        self._full = full
        self._inner = inner
        self._members = tuple(members)
        self._size = size
        self.started_works: list[Any] = []  # of both engines, and of calls that failed here

    def __getattr__(self, name: str) -> Method:
        if name not in ("allreduce", "allreduce_coalesced", "barrier", "recv_anysource"):
            raise AttributeError(name)
        method: Method = getattr(self._full if name == "recv_anysource" else self._inner, name)
        return method

    def reduce(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._rooted(self._inner.reduce, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        start: Method = self._inner.reduce_scatter
        return start(outputs, [self._pick(inputs[0])], opts)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> RawWork:
        start: Method = self._inner._reduce_scatter_base
        parts = whole.detach().reshape(self._size, output.numel())
        return start(output, torch.cat(self._pick(list(parts))), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._rooted(self._inner.broadcast, tensors, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        return self._rooted(self._inner.gather, [*map(self._pick, outputs)], inputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        return self._rooted(self._inner.scatter, outputs, [*map(self._pick, inputs)], opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        start: Method = self._inner.allgather
        return start([self._pick(outputs[0])], inputs, opts)

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any) -> RawWork:
        rows = output.detach().view(self._size, part.numel())
        return self.allgather([list(rows)], [part.view(-1)], opts)

    def alltoall_base(
        self, output: Tensor, source: Tensor, into: list[int], out_of: list[int], opts: Any
    ) -> RawWork:
        slots = self._pick(torch.split(output.detach(), into))
        sent = torch.cat(self._pick(torch.split(source.detach(), out_of)))
        received = torch.cat(slots)
        sizes = self._pick(into)

        def copy_back() -> None:
            for slot, piece in zip(slots, torch.split(received, sizes), strict=True):
                slot.copy_(piece)

        raw = self._inner.alltoall_base(received, sent, sizes, self._pick(out_of), opts)
        return JointWork([raw], copy_back)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> RawWork:
        start: Method = self._inner.alltoall
        return start(self._pick(outputs), self._pick(inputs), opts)

    def send(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        return self._transfer(self._full.send, tensors, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        return self._transfer(self._full.recv, tensors, peer, tag)

    def _transfer(self, start: Method, tensors: Tensors, peer: int, tag: int) -> RawWork:
        if peer not in self._members:
            return self._failed(peer_left(peer))
        return start(tensors, peer, tag)

    def abort(self) -> None:
        for engine in (self._inner, self._full):
            if hasattr(engine, "abort"):
                engine.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        for engine in (self._inner, self._full):
            if hasattr(engine, "set_timeout"):
                engine.set_timeout(timeout)

    def _pick(self, items: Sequence[T]) -> list[T]:
        """Of one item per rank, return those of the members."""
        return [items[rank] for rank in self._members]

    def _rooted(self, start: Method, *args: Any) -> RawWork:
        """Start a call with the root's rank in the engine of the members."""
        *tensors, opts = args
        root = opts.rootRank
        if root not in self._members:
            return self._failed(peer_left(root, is_root=True))
        return start(*tensors, copy_options(opts, rootRank=self._members.index(root)))

    def _failed(self, error: CallFailed) -> RawWork:
        work = PythonWork([])
        work.finish(error)
        self.started_works += [work]
        return work
