"""The flight recorder: the last calls of a group on this rank, always on.

A call is recorded on the calling thread before the engine sees it, so recording does the
minimum: it builds no strings and keeps no frame alive. Text is produced when it is read.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

import torch

from .._formatting import dtype_name, format_tensor
from ._call_site import format_site, known_files, user_frame


@dataclass(frozen=True)
class Record:
    """One call in a group's flight recorder."""

    sequence: int
    """Its number among this rank's collectives, or among its sends and receives."""
    operation: str
    """The name of the method: ``allreduce``."""
    shape: tuple[int, ...]
    dtype: str
    """Of the first tensor; empty for a call without tensors."""
    tensors: int
    """How many tensors were passed."""
    started: float
    """Seconds since the epoch."""
    ended: float | None
    """When completion was observed by ``wait`` or ``is_completed``; None until then."""
    site: str
    """The line of the user's code that made the call: ``train.py:12``."""

    def __str__(self) -> str:
        return f"{self.operation} {self.dtype}{list(self.shape)} #{self.sequence} at {self.site}"


@dataclass(slots=True, init=False, repr=False, eq=False)
class Call:
    """One call in flight; the recorder keeps it, its `Work` sets `ended`."""

    sequence: int
    operation: str
    dtype: torch.dtype | None
    shape: Sequence[int]
    tensors: int
    started: float
    ended: float | None
    code: CodeType
    instruction: int
    """Where in `code` the call was made; the line is computed when somebody reads it."""
    transfer: bool
    """A send or receive: numbered separately, since ranks need not make the same ones."""

    @property
    def what(self) -> str:
        """The operation and its tensors: ``allreduce float32[10]``."""
        if self.dtype is None:
            return self.operation
        more = f" and {self.tensors - 1} more" if self.tensors > 1 else ""
        return f"{self.operation} {format_tensor(self.dtype, self.shape)}{more}"

    @property
    def site(self) -> str:
        return format_site(self.code, self.instruction)

    @property
    def age(self) -> float:
        return time.monotonic() - self.started


class FlightRecorder:
    """Numbers calls and keeps the last ones."""

    # Native code records calls, too (`_fast_path`), and accesses these slots directly.
    __slots__ = ("_epoch", "_transfers", "calls", "collectives", "starting")

    def __init__(self, capacity: int = 1024) -> None:
        self.calls: deque[Call] = deque(maxlen=capacity)
        self.collectives = 0  # how many have started
        self.starting: Call | None = None  # has a number, but may not have reached the engine
        self._transfers = 0
        self._epoch = time.time() - time.monotonic()

    def begin(
        self, operation: str, tensors: Sequence[torch.Tensor], *, transfer: bool = False
    ) -> Call:
        """Record an operation that is about to start, as `starting` until the caller resets it.

        It counts stack frames: it must be called by `Issuer.issue`, called by the collective.
        """
        call = Call()
        call.transfer = transfer
        call.operation = operation
        call.tensors = len(tensors)
        if tensors:
            first = tensors[0]
            call.dtype = first.dtype
            call.shape = first.shape
        else:
            call.dtype = None
            call.shape = ()
        frame = sys._getframe(3)
        if known_files.get(frame.f_code.co_filename) is not False:
            frame = user_frame(frame)
        call.code = frame.f_code
        call.instruction = frame.f_lasti
        call.started = time.monotonic()
        call.ended = None
        # No function is called from here to the number, so no signal is handled in between.
        self.starting = call
        if transfer:
            self._transfers = call.sequence = self._transfers + 1
        else:
            self.collectives = call.sequence = self.collectives + 1
        self.calls.append(call)
        return call

    def undo(self, call: Call) -> None:
        """Take back the number of a call that never started; its record stays."""
        call.ended = time.monotonic()
        if call.transfer:
            self._transfers -= 1
        else:
            self.collectives -= 1
        self.starting = None

    @property
    def last(self) -> Call | None:
        return self.calls[-1] if self.calls else None

    def records(self) -> list[Record]:
        return [
            Record(
                sequence=call.sequence,
                operation=call.operation,
                shape=tuple(call.shape),
                dtype="" if call.dtype is None else dtype_name(call.dtype),
                tensors=call.tensors,
                started=self._epoch + call.started,
                ended=None if call.ended is None else self._epoch + call.ended,
                site=call.site,
            )
            for call in tuple(self.calls)
        ]
