"""What a run has found, and how it is kept: every sample, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.errors import InvalidArgument

from .entry import Aim, Case, Entry
from .machine import Machine
from .stats import FEWEST, Compare, Spread, compare_pairs, quartiles

__all__ = ["CaseResult", "EntryResult", "Results", "Verdict"]

FORMAT = 1
"""Grows when older files can no longer be read."""


@dataclass(frozen=True)
class Verdict:
    """How a case came out, measured by an aim."""

    aim: Aim
    peer: str | None
    """The competitor that the aim is about; where there is none, it is about the time."""
    compare: Compare
    found: Spread

    @property
    def slack(self) -> float:
        """Tell how far the median is on the good side of the bound; negative on the bad one."""
        if self.aim.at_most is not None:
            return self.aim.at_most - self.found.median
        assert self.aim.at_least is not None
        return self.found.median - self.aim.at_least

    @property
    def met(self) -> bool:
        """Tell whether the aim is met."""
        return self.slack >= 0

    @property
    def sure(self) -> bool:
        """Tell whether the whole interval is on one side of the bound, and worth the name."""
        bound = self.aim.at_least if self.aim.at_most is None else self.aim.at_most
        assert bound is not None
        return self.found.count >= FEWEST and not self.found.low < bound < self.found.high


@dataclass(frozen=True)
class CaseResult:
    """The samples of one case."""

    case: Case
    samples: Mapping[str, Sequence[float]]
    """Seconds per call on the slowest rank, one for each round, by competitor."""
    calls: Mapping[str, int]
    """How many calls a sample is of, at least."""
    threads: int
    """How many threads an operation of torch could use."""
    others: float | None
    """How many cores were busy with something else meanwhile."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Which competitors could not take part, and why."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes per call that the rank which sends most has sent, where that was counted."""

    def times(self) -> dict[str, Spread]:
        """Tell the seconds per call of every competitor, with quartiles."""
        return {name: quartiles(samples) for name, samples in self.samples.items()}

    def against(self, peer: str | None, how: Compare) -> dict[str, Spread]:
        """Hold every other competitor against the peer; nobody, where it is not there."""
        if peer is None or peer not in self.samples:
            return {}
        return {
            name: compare_pairs(how, samples, self.samples[peer])
            for name, samples in self.samples.items()
            if name != peer
        }


@dataclass(frozen=True)
class EntryResult:
    """The cases of one entry."""

    name: str
    title: str
    peer: str | None
    compare: Compare
    aims: Sequence[Aim]
    cases: Sequence[CaseResult]

    @classmethod
    def of(cls, entry: Entry, cases: Sequence[CaseResult]) -> EntryResult:
        """Put an entry's results together."""
        return cls(entry.name, entry.title, entry.peer, entry.compare, tuple(entry.aims), cases)

    def verdicts(self, result: CaseResult) -> list[Verdict]:
        """Judge a case by the aims that are for it, as far as those concerned took part."""
        return [
            self._judge(aim, result)
            for aim in self.aims
            if aim.covers(result.case) and self.concerned(aim) <= result.samples.keys()
        ]

    def unjudged(self, result: CaseResult) -> list[Aim]:
        """List the aims that are for a case, but about somebody who did not take part."""
        return [
            aim
            for aim in self.aims
            if aim.covers(result.case) and not self.concerned(aim) <= result.samples.keys()
        ]

    def concerned(self, aim: Aim) -> set[str]:
        """Tell whose samples an aim needs."""
        peer = aim.against or self.peer
        return {aim.competitor} if peer is None else {aim.competitor, peer}

    def _judge(self, aim: Aim, result: CaseResult) -> Verdict:
        peer, how = aim.against or self.peer, aim.compare or self.compare
        found = {**result.times(), **result.against(peer, how)}
        return Verdict(aim, peer, how, found[aim.competitor])


@dataclass(frozen=True)
class Results:
    """All that one run has found."""

    machine: Machine
    entries: Sequence[EntryResult]

    def to_json(self) -> str:
        """Write it all down; what follows from the samples is there for other readers."""
        told = {"format": FORMAT, **asdict(self)}
        for entry, entry_told in zip(self.entries, told["entries"], strict=True):
            for result, case_told in zip(entry.cases, entry_told["cases"], strict=True):
                case_told["derived"] = _derive(entry, result)
        return json.dumps(told, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what `to_json` wrote."""
        told = json.loads(text)
        if told.get("format") != FORMAT:
            raise InvalidArgument(f"this is not a file of results in format {FORMAT}")
        return cls(Machine(**told["machine"]), [_read_entry(each) for each in told["entries"]])


def _derive(entry: EntryResult, result: CaseResult) -> dict[str, Any]:
    return {
        "seconds": {name: asdict(time) for name, time in result.times().items()},
        "against_peer": {
            name: asdict(found) for name, found in result.against(entry.peer, entry.compare).items()
        },
        "aims": [
            {"aim": asdict(verdict.aim), "met": verdict.met, "sure": verdict.sure}
            for verdict in entry.verdicts(result)
        ],
    }


def _read_entry(told: dict[str, Any]) -> EntryResult:
    return EntryResult(
        name=told["name"],
        title=told["title"],
        peer=told["peer"],
        compare=Compare(told["compare"]),
        aims=tuple(_read_aim(aim) for aim in told["aims"]),
        cases=[_read_case(case) for case in told["cases"]],
    )


def _read_aim(told: dict[str, Any]) -> Aim:
    how = told.get("compare")
    return Aim(**{**told, "compare": None if how is None else Compare(how)})


def _read_case(told: dict[str, Any]) -> CaseResult:
    known = {name: told[name] for name in ("samples", "calls", "threads", "others")}
    for name in ("absent", "sent"):
        known[name] = told.get(name, {})  # older files had none
    return CaseResult(case=Case(**told["case"]), **known)
