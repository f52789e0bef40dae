"""The deadline of a run, outcomes of ranks, and `RankFailures`, the error that reports them.

Failures are ordered by time, since the first is most likely the cause of the others. Equal
failures are reported once. Tracebacks omit the frames of this package's private modules.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from .._formatting import PACKAGE_ROOT, format_ranks
from .._signals import describe_exit
from ..errors import InvalidArgument, RanksFailed
from .faults import Fault

# Frames of the public modules stay: a body calls these, while the private ones call the body.
PRIVATE_MODULES = f"{PACKAGE_ROOT}testing/_"


@dataclass(frozen=True)
class Returned:
    value: Any

    def __str__(self) -> str:
        return "finished"


@dataclass(frozen=True)
class Failed:
    """The body raised or hung; the traceback is text, because exceptions may not be picklable."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Died:
    """The process of the rank died."""

    status: int
    """The exit status; negative for the number of a signal."""
    trace: str = field(default="", compare=False)
    """The stack dump of a crash, if any."""

    @property
    def signal(self) -> int | None:
        """The signal that killed the process, if any."""
        return -self.status if self.status < 0 else None

    def __str__(self) -> str:
        return f"died: {describe_exit(self.status)}\n{self.trace}".rstrip()


@dataclass(frozen=True)
class Stopped:
    """The process of the rank was stopped by a signal and not resumed."""

    def __str__(self) -> str:
        return "was stopped by a signal"


RankOutcome = Returned | Failed | Died | Stopped


def error_outcome(error: BaseException, note: str = "") -> Failed:
    """Return the outcome of a rank that raised, without the frames that called the body."""
    formatter = traceback.TracebackException.from_exception(error)
    frames: list[traceback.FrameSummary] = list(formatter.stack)
    inner = dropwhile(lambda frame: PRIVATE_MODULES in frame.filename, frames)
    formatter.stack = traceback.StackSummary.from_list(inner)
    return Failed("\n".join(["failed", *filter(None, [note]), "".join(formatter.format())]))


def hang_outcome(seconds: float, stacks: str) -> Failed:
    """Return the outcome of a rank that did not finish in time, with the stacks of its threads."""
    return Failed(f"did not finish in {seconds:.1f} s; stacks:\n{stacks}")


@dataclass(frozen=True)
class RankResult:
    outcome: RankOutcome
    missed: str = ""  # the faults that did not fire
    when: float = field(default_factory=time.monotonic)
    """Monotonic time of the end; the processes of a machine share this clock."""

    def is_failure(self, *, may_die: bool = False) -> bool:
        if isinstance(self.outcome, Died | Stopped):
            return not may_die
        return isinstance(self.outcome, Failed)


class RankFailures(RanksFailed):
    """Ranks of one run failed; the message has the traceback of every rank."""

    def __init__(
        self,
        title: str,
        *,
        outcomes: Mapping[int, RankOutcome],
        failures: Mapping[int, str],
        outputs: Mapping[int, str],
    ) -> None:
        self.failures = dict(failures)
        """The traceback or outcome of each failed rank, in order of time."""
        self.outcomes = dict(outcomes)
        """The outcome of every rank."""
        self.outputs = {rank: text for rank, text in outputs.items() if text.strip()}
        """The output of the ranks."""
        texts = {**failures, **{r: str(o) for r, o in outcomes.items() if r not in failures}}
        sections = [f"{ranks} {text}" for text, ranks in _group_by_text(texts)]
        printed = [f"{ranks} printed\n{text}" for text, ranks in _group_by_text(self.outputs)]
        super().__init__("\n\n".join([title, *sections, *printed]))


def _group_by_text(texts: Mapping[int, str]) -> Iterable[tuple[str, str]]:
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        key = re.sub(r"0x[0-9a-f]+", "0x...", text)  # addresses differ between ranks
        groups.setdefault(key, []).append(rank)
    return ((texts[ranks[0]].rstrip(), format_ranks(sorted(ranks))) for ranks in groups.values())


def results_or_raise(
    name: str,
    reports: Mapping[int, RankResult],
    *,
    may_die: Collection[int] = (),
    must_die: Collection[int] = (),
    outputs: Mapping[int, str] | None = None,
) -> list[Any]:
    """Return the results by rank, or raise one `RankFailures` for all failures."""
    __tracebackhide__ = True
    failures: dict[int, str] = {}
    for rank, report in sorted(reports.items(), key=lambda item: item[1].when):
        has_returned = isinstance(report.outcome, Returned)
        if report.is_failure(may_die=rank in may_die):
            failures[rank] = str(report.outcome)
        elif has_returned and report.missed:
            failures[rank] = f"finished, but did not reach its fault: {report.missed}"
        elif has_returned and rank in must_die:
            failures[rank] = "finished, but was expected to die"
    outcomes = {rank: report.outcome for rank, report in sorted(reports.items())}
    if failures:
        title = f"{len(failures)} of {len(outcomes)} ranks failed in {name}"
        raise RankFailures(title, outcomes=outcomes, failures=failures, outputs=outputs or {})
    return [
        outcome.value if isinstance(outcome, Returned) else outcome for outcome in outcomes.values()
    ]


class RunDeadline:
    """The deadline of a run, which moves closer once a rank has failed."""

    def __init__(self, timeout: float, linger: float) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + timeout
        self._linger = linger

    def shorten(self) -> None:
        """Leave the other ranks only `linger` seconds."""
        self._deadline = min(self._deadline, time.monotonic() + self._linger)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())


def check_fault_ranks(
    faults: Collection[Fault], must_die: Collection[int] = (), *, size: int
) -> None:
    for fault in faults:
        if fault.rank not in (None, *range(size)):
            raise InvalidArgument(f"fault for rank {fault.rank}: ranks are 0 to {size - 1}")
        if fault.incarnation not in (None, 0) or fault.needs_log:
            raise InvalidArgument(
                "incarnation, once and survivors of a fault are for workers of run_elastic"
            )
    if not set(must_die) <= set(range(size)):
        raise InvalidArgument(f"expect_dead={sorted(must_die)}: ranks are 0 to {size - 1}")


def ranks_that_may_die(faults: Collection[Fault], *, size: int) -> set[int]:
    fatal = [fault for fault in faults if fault.action.is_fatal]
    return {rank for rank in range(size) if any(fault.applies_to(rank) for fault in fatal)}
