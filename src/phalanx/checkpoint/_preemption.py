"""`PreemptionGuard`: stop all ranks after the same step when any of them is told to.

A signal reaches ranks at different steps, and some ranks never. No rank acts on it alone: at
the end of a step each calls `requested`, a small allreduce of the signals seen so far. It is
the same collective on every rank, so the answer is the same after the same step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from .._signals import STOPPED, STOPPED_PREFIX, signal_name
from ..errors import InvalidArgument, InvalidState
from ..groups import ProcessGroup
from ._coordination import default_group_or_warn

_REQUESTED_BY_PROGRAM = 1 << 16  # beyond all signals
_SIGNAL_ECHO = 0.5
"""Seconds within which the same signal is the same request: a terminal sends it to all processes,
and their launcher once more."""


class PreemptionGuard:
    """Whether this run was asked to stop: by SIGTERM or SIGINT to any rank, or by the program.

    ::

        with PreemptionGuard(group) as stop:
            for step in range(first, last):
                ...
                if stop.requested():
                    folder.save(step, state)
                    stop.leave(step)

    All ranks of `group` call `requested` equally often. It is one collective of a few numbers, some
    microseconds in shared memory; where that costs a round trip over a network, `every` so many
    calls is enough. The ranks are those of `group`, or of the current group, or of torch's default
    group, or this process alone.

    Handlers of your own are set aside meanwhile. A second SIGINT is theirs, and interrupts as ever;
    so is a SIGTERM to a process that was forked off this one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        every: int = 1,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        if every < 1:
            raise InvalidArgument(f"every is {every}: ask at every call, or every second one…")
        group = default_group_or_warn() if group is None else group
        self._group = None if group is None or group.size() == 1 else group
        self._is_rank_zero = group is None or group.rank() == 0
        self._every = every
        self._signals = tuple(dict.fromkeys(signals))
        self._before: dict[int, Any] = {}
        self._process = 0
        self._interrupted_at: float | None = None
        self._heard = 0
        """The signal that this rank was sent; 0 for none."""
        self._decided = 0
        """The same of all ranks, when all know it."""
        self._calls = 0
        if self._group is not None:
            self._causes = (*self._signals, _REQUESTED_BY_PROGRAM)
            self._votes = torch.zeros(
                len(self._causes), dtype=torch.int32, device=_tensor_device(self._group)
            )

    def __enter__(self) -> Self:
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise InvalidState(
                "only the main thread hears signals: enter there, or pass signals=() and call "
                "request"
            )
        if self._before:
            raise InvalidState("this PreemptionGuard was entered already, and not left")
        self._process = os.getpid()
        for each in self._signals:
            try:
                # What is ignored stays ignored: that is how nohup asks for it.
                if signal.getsignal(each) is not signal.SIG_IGN:
                    self._before[each] = signal.signal(each, self._hear)
            except (OSError, ValueError) as error:
                self._restore()
                raise InvalidArgument(f"{signal_name(each)} cannot be heard: {error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()  # not sooner: until then, a signal may still be for others

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._belongs_to_previous_handler(number):
            before = self._before[number]
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, before)
                signal.raise_signal(number)
        self._heard = self._heard or number

    def _belongs_to_previous_handler(self, number: int) -> bool:
        """Tell whether a signal is for whoever heard them before this."""
        if number != signal.SIGINT:
            # A child that was forked off does not know of steps; how else would it be ended?
            return os.getpid() != self._process
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            return False
        return now >= self._interrupted_at + _SIGNAL_ECHO

    def request(self) -> None:
        """Ask for a stop from here: a time limit is near, say. One rank is enough."""
        self._heard = self._heard or _REQUESTED_BY_PROGRAM

    def requested(self) -> bool:
        """Tell whether to stop after this step: the same on all ranks, which all ask."""
        if self._group is None:
            self._decided = self._heard
        elif not self._decided:
            self._calls += 1
            if self._calls % self._every == 0:
                self._decided = self._agree(self._group)
        return self._decided != 0

    def _agree(self, group: dist.ProcessGroup) -> int:
        votes = self._votes.zero_()
        if self._heard:
            votes[self._causes.index(self._heard)] = 1
        if isinstance(group, ProcessGroup):
            group.allreduce(votes).wait()
        else:
            dist.all_reduce(votes, group=group)
        counted = zip(self._causes, votes.tolist(), strict=True)
        return next((cause for cause, count in counted if count), 0)

    def leave(self, step: int | None = None) -> NoReturn:
        """End this rank with the exit code `STOPPED`, and say which step was saved last."""
        if self._is_rank_zero:
            cause = (
                ""
                if self._decided in (0, _REQUESTED_BY_PROGRAM)
                else f" ({signal_name(self._decided)})"
            )
            saved = "" if step is None else f" after saving step {step}"
            with suppress(OSError):  # nobody may be left to read it
                print(f"{STOPPED_PREFIX}{saved}{cause}", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED)


def _tensor_device(group: dist.ProcessGroup) -> torch.device:
    """Return where a group's tensors have to be: in main memory if that is possible."""
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    return torch.device(devices[0].type) if devices else torch.device("cpu")
