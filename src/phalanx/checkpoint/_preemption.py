"""`PreemptionGuard`: stop all ranks after the same step when any of them is told to.

A signal reaches ranks at different steps, and some ranks never. No rank acts on it alone: at the
end of a step all ranks call `should_stop`, a small allreduce of the signals seen so far.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from .._signals import PREEMPTED_EXIT_CODE, PREEMPTED_MESSAGE, signal_name
from ..errors import InvalidArgument, InvalidState
from ..groups import ProcessGroup
from ._barriers import find_group

_REQUESTED_BY_PROGRAM = 1 << 16  # greater than any signal


class PreemptionGuard:
    """Stop all ranks after the same step on SIGTERM or SIGINT to any of them, or on `request`.

    ::

        with PreemptionGuard(group) as stop:
            for step in range(first, last):
                ...
                if stop.should_stop():
                    checkpoints.save(step, state)
                    stop.exit(step)

    All ranks of `group` call `should_stop` equally often. It is an allreduce of a few numbers,
    which takes microseconds in shared memory; over a network, `every` limits it to every n-th call.
    The default is the current group, else torch's default group, else this process alone.

    While active, the guard replaces the existing handlers. It calls them for a second SIGINT that
    arrives after `repeat_window` seconds, and in a forked child for any signal but SIGINT. Within
    the window signals are one: a terminal signals all processes, and the launcher forwards it.
    """

    EXIT_CODE = PREEMPTED_EXIT_CODE
    """Exit code of a rank that saved its work and stopped (EX_TEMPFAIL): start the run again."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        every: int = 1,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
        repeat_window: float = 0.5,
    ) -> None:
        if every < 1:
            raise InvalidArgument(f"every must be at least 1, got {every}")
        group = find_group(group)
        self._group = None if group is None or group.size() == 1 else group
        self._is_rank_zero = group is None or group.rank() == 0
        self._every = every
        self._signals = tuple(dict.fromkeys(signals))
        self._repeat_window = repeat_window
        self._previous: dict[int, Any] = {}
        self._process = 0
        self._interrupted_at = math.inf  # the time of the first SIGINT
        self._signal = 0  # that this rank received; 0 for none
        self._decision = 0  # the signal that all ranks agreed on; 0 for none
        self._calls = 0
        if self._group is not None:
            self._causes = (*self._signals, _REQUESTED_BY_PROGRAM)
            devices = {device.type for device in self._group._device_types} or {"cpu"}
            device = "cpu" if "cpu" in devices else min(devices)
            self._votes = torch.zeros(len(self._causes), dtype=torch.int32, device=device)

    def __enter__(self) -> Self:
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise InvalidState(
                "only the main thread can handle signals: enter there, or pass signals=() and call "
                "request()"
            )
        if self._previous:
            raise InvalidState("this PreemptionGuard is already active")
        self._process = os.getpid()
        for number in self._signals:
            try:
                # An ignored signal stays ignored, as under nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
            except (OSError, ValueError) as error:
                self.__exit__()
                raise InvalidArgument(f"{signal_name(number)} cannot be handled: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()  # last: `_on_signal` may run until all handlers are restored

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            delegates = now >= self._interrupted_at + self._repeat_window
            self._interrupted_at = min(now, self._interrupted_at)
        else:  # a forked child has no training loop that would end it
            delegates = os.getpid() != self._process
        if delegates:
            previous = self._previous[number]
            if callable(previous):
                previous(number, frame)
            else:
                signal.signal(number, previous)
                signal.raise_signal(number)
        self._signal = self._signal or number

    def request(self) -> None:
        """Request a stop from the program, near a time limit for example. One rank is enough."""
        self._signal = self._signal or _REQUESTED_BY_PROGRAM

    def should_stop(self) -> bool:
        """Whether to stop after this step. All ranks call this, and get the same answer."""
        if self._group is None:
            self._decision = self._signal
        elif not self._decision:
            self._calls += 1
            if self._calls % self._every == 0:
                self._decision = self._agree(self._group)
        return self._decision != 0

    def _agree(self, group: dist.ProcessGroup) -> int:
        votes = self._votes.zero_()
        if self._signal:
            votes[self._causes.index(self._signal)] = 1
        if isinstance(group, ProcessGroup):
            group.allreduce(votes).wait()
        else:
            dist.all_reduce(votes, group=group)
        return next((self._causes[i] for i, count in enumerate(votes.tolist()) if count), 0)

    def exit(self, step: int | None = None) -> NoReturn:
        """Exit with `EXIT_CODE`; rank 0 prints the step that was saved last."""
        if self._is_rank_zero:
            is_signal = self._decision not in (0, _REQUESTED_BY_PROGRAM)
            cause = f" ({signal_name(self._decision)})" if is_signal else ""
            saved = "" if step is None else f" after saving step {step}"
            with suppress(OSError):  # stderr may be closed
                print(f"{PREEMPTED_MESSAGE}{saved}{cause}", file=sys.stderr, flush=True)
        raise SystemExit(self.EXIT_CODE)
