"""An engine for the remaining ranks of a group whose own engine needs all of them.

Collectives go through an engine of the members and keep the group's ranks: roots are translated,
outputs have a slot for every rank, and the slots of absent ranks are left unchanged.
Sends and receives go through the group's full engine, since the two sides of a transfer may
have been started before and after a departure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from ...errors import PeerLeft
from .._engine import CallFailed, Engine, PythonWork, RawWork

T = TypeVar("T")
Tensors = list[Tensor]


class SubsetEngine:
    """An engine of some ranks that uses the numbering of all."""

    def __init__(self, full: Engine, inner: Engine, members: Sequence[int], size: int) -> None:
        self._full = full
        self._inner = inner
        self._members = tuple(members)
        self._size = size
        self.begun: list[Any] = []
        """Started works of both engines, and of calls that failed here."""

    # -- reductions ------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> RawWork:
        work: RawWork = self._inner.allreduce(tensors, opts)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> RawWork:
        work: RawWork = self._inner.allreduce_coalesced(tensors, opts)
        return work

    def reduce(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._rooted(opts, lambda translated: self._inner.reduce(tensors, translated))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        work: RawWork = self._inner.reduce_scatter(outputs, [self._pick(inputs[0])], opts)
        return work

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> RawWork:
        parts = whole.detach().reshape(self._size, output.numel())
        translated = torch.cat(self._pick(list(parts)))
        work: RawWork = self._inner._reduce_scatter_base(output, translated, opts)
        return work

    # -- one to all, all to one, all to all ------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> RawWork:
        return self._rooted(opts, lambda translated: self._inner.broadcast(tensors, translated))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        targets = [self._pick(each) for each in outputs]
        return self._rooted(
            opts, lambda translated: self._inner.gather(targets, inputs, translated)
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        sources = [self._pick(each) for each in inputs]
        return self._rooted(
            opts, lambda translated: self._inner.scatter(outputs, sources, translated)
        )

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        work: RawWork = self._inner.allgather([self._pick(outputs[0])], inputs, opts)
        return work

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
        return _CopyBackWork(raw, copy_back)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> RawWork:
        work: RawWork = self._inner.alltoall(self._pick(outputs), self._pick(inputs), opts)
        return work

    def barrier(self, opts: Any) -> RawWork:
        work: RawWork = self._inner.barrier(opts)
        return work

    # -- one to one ------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        if peer not in self._members:
            return self._failed(peer, f"rank {peer} has left the group")
        work: RawWork = self._full.send(tensors, peer, tag)
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        if peer not in self._members:
            return self._failed(peer, f"rank {peer} has left the group")
        work: RawWork = self._full.recv(tensors, peer, tag)
        return work

    def recv_anysource(self, tensors: Tensors, tag: int) -> RawWork:
        work: RawWork = self._full.recv_anysource(tensors, tag)
        return work

    # -- both engines ----------------------------------------------------------------------

    def abort(self) -> None:
        for engine in (self._inner, self._full):
            if hasattr(engine, "abort"):
                engine.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        for engine in (self._inner, self._full):
            if hasattr(engine, "set_timeout"):
                engine.set_timeout(timeout)

    # -- translation -----------------------------------------------------------------------

    def _pick(self, items: Sequence[T]) -> list[T]:
        """Of one item per rank, return those of the members."""
        return [items[rank] for rank in self._members]

    def _rooted(self, opts: Any, start: Callable[[Any], RawWork]) -> RawWork:
        """Start a call with the root's rank in the engine of the members."""
        root = opts.rootRank
        if root not in self._members:
            return self._failed(root, f"its root, rank {root}, has left the group")
        translated = type(opts)()
        for field in ("timeout", "asyncOp", "rootTensor", "reduceOp"):
            if hasattr(opts, field):
                setattr(translated, field, getattr(opts, field))
        translated.rootRank = self._members.index(root)
        return start(translated)

    def _failed(self, rank: int, message: str) -> RawWork:
        work = PythonWork([])
        work.finish(CallFailed(PeerLeft, rank, message))
        self.begun += [work]
        return work


class _CopyBackWork:
    """A call whose output is copied back when the engine is done."""

    def __init__(self, raw: RawWork, finish: Callable[[], None]) -> None:
        self._raw = raw
        self._finish: Callable[[], None] | None = finish
        self._once = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._raw.wait(timeout) if timeout else self._raw.wait()
        self._copy_back()
        return True

    def is_completed(self) -> bool:
        return self._raw.is_completed()

    def get_future(self) -> Future[Any]:
        def finish(done: Future[Any]) -> Any:
            result = done.wait()
            self._copy_back()
            return result

        return self._raw.get_future().then(finish)

    def result(self) -> list[Tensor]:
        return self._raw.result()

    def _source_rank(self) -> int:
        return -1

    def _copy_back(self) -> None:
        with self._once:
            if self._finish is not None:
                self._finish()
                self._finish = None
