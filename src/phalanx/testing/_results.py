"""How ranks ended, and the one error that reports all of them.

Failures are ordered by time, since the first is most likely the cause of the others. Ranks that
failed with the same text are reported once. Frames of this package's private modules are left
out of tracebacks.
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
from .._signals import signal_name
from ..errors import RanksFailed

# Public modules of this package are not counted: a body calls them, they do not lead into it.
_PRIVATE_MODULES = f"{PACKAGE_ROOT}testing/_"


@dataclass(frozen=True)
class Returned:
    """The body returned."""

    value: Any

    def __str__(self) -> str:
        return "finished"


@dataclass(frozen=True)
class Raised:
    """The body raised; the traceback is text, for an exception may not survive the journey."""

    traceback: str

    def __str__(self) -> str:
        return f"failed\n{self.traceback}"


@dataclass(frozen=True)
class Died:
    """The process of the rank ended."""

    status: int
    """Its exit status, or the negative number of the signal that killed it."""
    trace: str = field(default="", compare=False)
    """What the interpreter could still say about a crash."""

    @property
    def signal(self) -> int | None:
        """The signal that killed it, if one did."""
        return -self.status if self.status < 0 else None

    def __str__(self) -> str:
        how = f"exited with status {self.status}"
        if self.signal is not None:
            how = f"was killed by {signal_name(self.signal)}"
        return f"{how}\n{self.trace}".rstrip()


@dataclass(frozen=True)
class Stopped:
    """The process of the rank was stopped by a signal and never woken."""

    def __str__(self) -> str:
        return "was stopped by a signal"


@dataclass(frozen=True)
class Hung:
    """The rank did not finish."""

    seconds: float
    """How long it was given."""
    stacks: str
    """Where its threads were."""

    def __str__(self) -> str:
        return f"did not finish in {self.seconds:.1f} s; it was here:\n{self.stacks}"


Outcome = Returned | Raised | Died | Stopped | Hung


@dataclass(frozen=True)
class RankResult:
    """How a rank's run ended, and what it left undone."""

    outcome: Outcome
    missed: str | None = None
    """The faults that had to strike and did not."""
    when: float = field(default_factory=time.monotonic)
    """When it ended; the processes of a machine share this clock."""


class RankFailures(RanksFailed):
    """Ranks of one run failed; the message has every rank's traceback."""

    def __init__(
        self,
        title: str,
        *,
        outcomes: Mapping[int, Outcome],
        failures: Mapping[int, str],
        outputs: Mapping[int, str],
    ) -> None:
        self.failures = dict(failures)
        """The ranks that failed, the first one first, each with its traceback or its end."""
        self.outcomes = dict(outcomes)
        """How every rank ended."""
        self.outputs = {rank: text for rank, text in outputs.items() if text.strip()}
        """What the ranks printed."""
        told = {rank: failures.get(rank, str(outcome)) for rank, outcome in outcomes.items()}
        sections = [
            f"{format_ranks(ranks)} {text.rstrip()}"
            for text, ranks in _group_by_text(told, first=failures)
        ]
        printed = [
            f"{format_ranks(ranks)} printed\n{text.rstrip()}"
            for text, ranks in _group_by_text(self.outputs)
        ]
        super().__init__("\n\n".join([title, *sections, *printed]))


def settle(
    name: str,
    reports: Mapping[int, RankResult],
    *,
    mortal: Collection[int] = (),
    doomed: Collection[int] = (),
    outputs: Mapping[int, str] | None = None,
) -> list[Any]:
    """Return the ranks' results, or raise one error for all that failed.

    Those that are `mortal` may die, and those that are `doomed` must.
    """
    __tracebackhide__ = True
    # In the order of time: the failure that came first is likely to be the cause of the others.
    in_time = sorted(reports.items(), key=lambda item: item[1].when)
    failures = {
        rank: text
        for rank, report in in_time
        if (text := _failure_text(report, mortal=rank in mortal, doomed=rank in doomed))
    }
    outcomes = {rank: report.outcome for rank, report in sorted(reports.items())}
    if failures:
        title = f"{len(failures)} of {len(outcomes)} ranks failed in {name}"
        raise RankFailures(title, outcomes=outcomes, failures=failures, outputs=outputs or {})
    return [
        outcome.value if isinstance(outcome, Returned) else outcome for outcome in outcomes.values()
    ]


def is_failure(outcome: Outcome, *, mortal: bool) -> bool:
    """Tell whether an outcome makes waiting for the other ranks pointless."""
    if isinstance(outcome, Died | Stopped):
        return not mortal
    return not isinstance(outcome, Returned)


def _failure_text(report: RankResult, *, mortal: bool, doomed: bool) -> str | None:
    outcome = report.outcome
    if is_failure(outcome, mortal=mortal):
        return str(outcome)
    if isinstance(outcome, Returned) and report.missed is not None:
        return f"finished, but never came to its fault: {report.missed}"
    if isinstance(outcome, Returned) and doomed:
        return "finished, but was expected to die"
    return None


def format_traceback(error: BaseException) -> str:
    """Format a traceback without the frames that led into the body."""
    told = traceback.TracebackException.from_exception(error)
    frames: list[traceback.FrameSummary] = list(told.stack)
    inner = dropwhile(lambda frame: is_internal_frame(frame.filename), frames)
    told.stack = traceback.StackSummary.from_list(inner)
    return "".join(told.format())


def is_internal_frame(text: str) -> bool:
    """Tell whether a file name, or a line with one, is of the machinery around bodies."""
    return _PRIVATE_MODULES in text


def _group_by_text(
    texts: Mapping[int, str], *, first: Iterable[int] = ()
) -> list[tuple[str, list[int]]]:
    order = [*first, *(rank for rank in sorted(texts) if rank not in set(first))]
    folded: dict[str, list[int]] = {}
    for rank in order:
        alike = re.sub(r"0x[0-9a-f]+", "0x...", texts[rank])  # addresses differ, and tell nothing
        folded.setdefault(alike, []).append(rank)
    return [(texts[ranks[0]], sorted(ranks)) for ranks in folded.values()]
