"""How a run ended: `Outcome` and `RankExit` for programs, a text for people.

The first rank that failed is the cause; failures after it are listed as consequences.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from .._signals import STOPPED, STOPPED_PREFIX, signal_name

_MAX_LISTED = 8  # different failures that are told, besides the first; and ranks that are listed
_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel's, for lack of memory: see dmesg",
    signal.SIGBUS: "often a full /dev/shm: see phalanx doctor",
    signal.SIGSEGV: "set PYTHONFAULTHANDLER=1 to see where",
    signal.SIGABRT: "C++ code gave up: see its message above",
}


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int | None
    """Its global rank, or None for the store that the launcher hosts."""
    code: int
    """Exit code; negative for the number of the signal that ended it."""
    at: float
    """Seconds after the ranks were started."""
    was_terminated: bool = False
    """Whether it ended because the launcher told it to."""
    last_words: Sequence[str] = ()
    """Its traceback, or its last lines on stderr."""

    @property
    def name(self) -> str:
        """What people call it."""
        return "the store" if self.rank is None else f"rank {self.rank}"

    @property
    def failed(self) -> bool:
        """Whether it ended badly, and by itself."""
        return self.code != 0 and not self.was_terminated

    @property
    def stopped(self) -> bool:
        """Whether it says that it was asked to stop, and has saved its work."""
        return self.code == STOPPED

    @property
    def error(self) -> str:
        """The line of its traceback that names the exception, if it had one."""
        headers = [
            place for place, line in enumerate(self.last_words) if line.startswith("Traceback")
        ]
        if not headers:
            return ""
        # Frames are indented; what a message says on further lines may be, or not.
        words = self.last_words[headers[-1] + 1 :]
        return next((line for line in words if line[:1].strip()), "")

    @property
    def words(self) -> str:
        """One line that says why it ended, as far as it said so."""
        return (self.error or next(iter(self.last_words[-1:]), "")).strip()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exits: Sequence[RankExit]
    """How each rank ended in the last attempt, in order of time."""
    signal: int | None = None
    """The signal that asked the launcher to stop."""
    attempts: int = 1
    """How often the ranks were started."""

    @property
    def stopped(self) -> bool:
        """Whether the ranks were asked to stop and have saved their work, all of them."""
        codes = {each.code for each in self.exits}
        return STOPPED in codes and codes <= {0, STOPPED}

    @property
    def first(self) -> RankExit | None:
        """The rank that failed first, if any did."""
        if self.stopped:
            return None
        failed = [each for each in self.exits if each.failed]
        # Whoever left on request, though others did not, is to blame only if nobody else is.
        return next(iter(sorted(failed, key=lambda each: each.stopped)), None)

    @property
    def exit_code(self) -> int:
        """What a shell should see: the first failure's code, 128 + number for a signal.

        `STOPPED` if all ranks were asked to stop and have saved their work.
        """
        if self.stopped:
            return STOPPED
        if self.first is not None:
            return _shell_code(self.first.code)
        # Ranks that heard the signal, saved their work and ended well make a run that ended well.
        if self.signal is not None and any(each.code for each in self.exits):
            return 128 + self.signal
        return 0


def describe(outcome: Outcome) -> str:
    """Say what went wrong: who failed first and why, who followed, who was stopped."""
    first = outcome.first
    if outcome.stopped:
        return _describe_preemption(outcome)
    if first is None:
        return (
            f"stopped by {signal_name(outcome.signal)}"
            if outcome.signal
            else "all ranks ended well"
        )
    lines = [f"{first.name} failed first: {describe_code(first.code)}"]
    lines += [f"    {line}" for line in first.last_words]
    others = [each for each in outcome.exits if each is not first]
    told = _alike([each for each in others if each.failed or each.error])
    lines += [_describe_consequence(each, first) for each in told[:_MAX_LISTED]]
    if len(told) > _MAX_LISTED:
        lines.append(f"and so did {sum(map(len, told[_MAX_LISTED:]))} more")
    silent = [each for each in others if each.was_terminated and not each.error]
    if silent:
        lines.append(f"{_format_rank_names(silent)} {_was_or_were(silent)} stopped")
    if outcome.attempts > 1:
        lines.append(f"gave up after {outcome.attempts} attempts")
    return "\n".join(lines)


def _describe_preemption(outcome: Outcome) -> str:
    """Quote the rank that says what was saved."""
    words = [line for each in outcome.exits for line in each.last_words]
    return next((line for line in words if line.startswith(STOPPED_PREFIX)), STOPPED_PREFIX)


def describe_code(code: int) -> str:
    """Say what an exit code means."""
    if code >= 0:
        return f"exit code {code}"
    hint = _HINTS.get(-code)
    return f"{signal_name(-code)} ({hint})" if hint else signal_name(-code)


def _alike(exits: Sequence[RankExit]) -> list[list[RankExit]]:
    """Put those together that ended in the same way and said the same."""
    found: dict[tuple[object, ...], list[RankExit]] = {}
    for each in exits:
        said = re.sub(rf"\brank ?{each.rank}\b", "rank *", each.words)
        found.setdefault((each.was_terminated, each.code, said), []).append(each)
    return list(found.values())


def _describe_consequence(alike: Sequence[RankExit], first: RankExit) -> str:
    one, names = alike[0], _format_rank_names(alike)
    if one.was_terminated:
        return f"{names} {_was_or_were(alike)} stopped after {one.error}"
    times = [f"{each.at - first.at:.2f}" for each in alike]
    later = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    end = f"{names} failed {later} s later: {describe_code(one.code)}"
    return f"{end}: {one.words}" if one.words else end


def _format_rank_names(exits: Sequence[RankExit]) -> str:
    ranks = sorted(each.rank for each in exits if each.rank is not None)
    if not ranks:
        return exits[0].name
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MAX_LISTED + 1:
        return (
            f"ranks {', '.join(map(str, ranks[:_MAX_LISTED]))} and {len(ranks) - _MAX_LISTED} more"
        )
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _was_or_were(exits: Sequence[RankExit]) -> str:
    return "was" if len(exits) == 1 else "were"


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
