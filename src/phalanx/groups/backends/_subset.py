"""An engine for the remaining ranks of a group whose own engine needs all of them.

Collectives go through an engine of the members and keep the group's rank numbers: roots are
translated, outputs have a slot for every rank, and the slots of absent ranks stay as they are.
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
_NO_TIMEOUT = timedelta(0)


class SubsetEngine:
    """An engine of some ranks that goes by the numbers of all."""

    def __init__(self, full: Engine, inner: Engine, members: Sequence[int], size: int) -> None:
        self._full = full
        self._inner = inner
        self._members = tuple(members)
        self._size = size
        self.begun: list[Any] = []
        """Where both engines put their handles, and this one those of calls that it refuses."""

    # -- reductions ------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> RawWork:
        """Reduce on every rank."""
        work: RawWork = self._inner.allreduce(tensors, opts)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> RawWork:
        """Reduce several."""
        work: RawWork = self._inner.allreduce_coalesced(tensors, opts)
        return work

    def reduce(self, tensors: Tensors, opts: Any) -> RawWork:
        """Reduce on the root."""
        return self._rooted(opts, lambda theirs: self._inner.reduce(tensors, theirs))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        """Reduce lists and keep one tensor."""
        work: RawWork = self._inner.reduce_scatter(outputs, [self._pick(inputs[0])], opts)
        return work

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> RawWork:
        parts = whole.detach().reshape(self._size, output.numel())
        theirs = torch.cat(self._pick(list(parts)))
        work: RawWork = self._inner._reduce_scatter_base(output, theirs, opts)
        return work

    # -- one to all, all to one, all to all ------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> RawWork:
        """Copy from the root."""
        return self._rooted(opts, lambda theirs: self._inner.broadcast(tensors, theirs))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        """Collect on the root."""
        targets = [self._pick(each) for each in outputs]
        return self._rooted(opts, lambda theirs: self._inner.gather(targets, inputs, theirs))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> RawWork:
        """Hand out from the root."""
        sources = [self._pick(each) for each in inputs]
        return self._rooted(opts, lambda theirs: self._inner.scatter(outputs, sources, theirs))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> RawWork:
        """Collect in lists."""
        work: RawWork = self._inner.allgather([self._pick(outputs[0])], inputs, opts)
        return work

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any) -> RawWork:
        rows = output.detach().view(self._size, part.numel())
        return self.allgather([list(rows)], [part.view(-1)], opts)

    def alltoall_base(
        self, output: Tensor, source: Tensor, into: list[int], out_of: list[int], opts: Any
    ) -> RawWork:
        """Exchange rows."""
        places = self._pick(torch.split(output.detach(), into))
        sent = torch.cat(self._pick(torch.split(source.detach(), out_of)))
        received = torch.cat(places)
        sizes = self._pick(into)

        def hand_out() -> None:
            for place, piece in zip(places, torch.split(received, sizes), strict=True):
                place.copy_(piece)

        raw = self._inner.alltoall_base(received, sent, sizes, self._pick(out_of), opts)
        return _CopyBackWork(raw, hand_out)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> RawWork:
        """Exchange tensors."""
        work: RawWork = self._inner.alltoall(self._pick(outputs), self._pick(inputs), opts)
        return work

    def barrier(self, opts: Any) -> RawWork:
        """Meet."""
        work: RawWork = self._inner.barrier(opts)
        return work

    # -- one to one ------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        """Send to one rank."""
        if peer not in self._members:
            return self._spoiled(peer, f"rank {peer} has left the group")
        work: RawWork = self._full.send(tensors, peer, tag)
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> RawWork:
        """Receive from one rank."""
        if peer not in self._members:
            return self._spoiled(peer, f"rank {peer} has left the group")
        work: RawWork = self._full.recv(tensors, peer, tag)
        return work

    def recv_anysource(self, tensors: Tensors, tag: int) -> RawWork:
        """Receive from anybody."""
        work: RawWork = self._full.recv_anysource(tensors, tag)
        return work

    # -- both engines ----------------------------------------------------------------------

    def abort(self) -> None:
        """End what is under way, where an engine can."""
        for engine in (self._inner, self._full):
            if hasattr(engine, "abort"):
                engine.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take."""
        for engine in (self._inner, self._full):
            if hasattr(engine, "set_timeout"):
                engine.set_timeout(timeout)

    # -- inside ----------------------------------------------------------------------------

    def _pick(self, ofall: Sequence[T]) -> list[T]:
        """Take what belongs to the members of what there is for every rank."""
        return [ofall[rank] for rank in self._members]

    def _rooted(self, opts: Any, start: Callable[[Any], RawWork]) -> RawWork:
        """Start a call with a root, by the number that it has in the engine of the members."""
        root = opts.rootRank
        if root not in self._members:
            return self._spoiled(root, f"its root, rank {root}, has left the group")
        theirs = type(opts)()
        for field in ("timeout", "asyncOp", "rootTensor", "reduceOp"):
            if hasattr(opts, field):
                setattr(theirs, field, getattr(opts, field))
        theirs.rootRank = self._members.index(root)
        return start(theirs)

    def _spoiled(self, rank: int, told: str) -> RawWork:
        work = PythonWork([])
        work.finish(CallFailed(PeerLeft, rank, told))
        self.begun += [work]
        return work


class _CopyBackWork:
    """A call whose result is put in its place when the engine is done."""

    def __init__(self, raw: RawWork, finish: Callable[[], None]) -> None:
        self._raw = raw
        self._finish: Callable[[], None] | None = finish
        self._once = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until done."""
        self._raw.wait(timeout) if timeout > _NO_TIMEOUT else self._raw.wait()
        self._put()
        return True

    def is_completed(self) -> bool:
        """Tell whether the call has ended."""
        return self._raw.is_completed()

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""

        def put(done: Future[Any]) -> Any:
            result = done.wait()
            self._put()
            return result

        return self._raw.get_future().then(put)

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._raw.result()

    def _source_rank(self) -> int:
        return -1

    def _put(self) -> None:
        with self._once:
            if self._finish is not None:
                self._finish()
                self._finish = None
