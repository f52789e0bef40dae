"""How a run ended: `Outcome` and `RankExit` for programs, `describe` for people.

The first rank that failed is the cause; failures after it are listed as consequences.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from .._formatting import format_ranks, mask_rank
from .._signals import PREEMPTED_EXIT_CODE, PREEMPTED_MESSAGE, describe_exit, signal_name

_MAX_CONSEQUENCES = 8
_CONTINUES = "the run continues from its newest checkpoint, or from step 0"
_TIMEOUT_EXIT_CODE = 124  # as that of timeout(1)
_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel running out of memory: see dmesg",
    signal.SIGBUS: "often a full /dev/shm: see phalanx doctor",
    signal.SIGSEGV: "set PYTHONFAULTHANDLER=1 for a stack trace",
    signal.SIGABRT: "C++ code aborted: see its message above",
}


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int | None
    """The global rank, or None for the store that the launcher hosts."""
    code: int
    """The exit code; negative for the number of the signal that killed it."""
    at: float
    """Seconds after the ranks were started at which it exited or, if that was earlier, a worker of
    an elastic run reported the exception that it failed with."""
    was_terminated: bool = False
    """Whether the launcher had asked it to stop."""
    final_output: Sequence[str] = ()
    """Its traceback, or its last lines on stderr."""
    reason: str = ""
    """Why it failed, if it exited with 0: ``it exited with 0 and the others have more to do``."""

    @property
    def name(self) -> str:
        """``rank 3``, or ``the store``."""
        return "the store" if self.rank is None else f"rank {self.rank}"

    @property
    def failed(self) -> bool:
        """Whether it failed before the launcher asked it to stop."""
        has_failed = self.code != 0 or self.reason != ""
        return has_failed and not self.preempted and not self.was_terminated

    @property
    def preempted(self) -> bool:
        """Whether it stopped on request, after saving if it has a directory for that."""
        return self.code == PREEMPTED_EXIT_CODE

    @property
    def error(self) -> str:
        """The line of its traceback that names the exception, or an empty string."""
        headers = [
            index for index, line in enumerate(self.final_output) if line.startswith("Traceback")
        ]
        if not headers:
            return ""
        # Frames are indented; further lines of a message may be indented or not.
        lines = self.final_output[headers[-1] + 1 :]
        return next((line for line in lines if line[:1].strip()), "")

    @property
    def summary(self) -> str:
        """The exception, or the last line on stderr."""
        return (self.error or next(iter(self.final_output[-1:]), "")).strip()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exits: Sequence[RankExit]
    """How each rank ended in the last attempt, in order of time.

    Not in it are ranks that an elastic run has replaced, done without or asked to leave.
    """
    signal: int | None = None
    """The signal that asked the launcher to stop."""
    timeout: float | None = None
    """The seconds that the ranks had, if they took longer."""
    attempts: int = 1
    """How often the ranks were started."""
    restarts: int = 0
    """How many restarts were used: in an elastic run replacements too, otherwise of all ranks."""
    was_starting_over: bool = False
    """Whether a signal stopped an elastic run while all its ranks were restarted. Nothing is lost:
    the run continues from its newest checkpoint, or from step 0."""

    @property
    def preempted(self) -> bool:
        """Whether all ranks stopped on request, after saving if they have a directory for that."""
        if self.was_starting_over:
            return not any(each.failed for each in self.exits)
        stopped = [each for each in self.exits if each.preempted]
        return bool(stopped) and not any(
            each.code or each.reason for each in self.exits if not each.preempted
        )

    @property
    def first_failure(self) -> RankExit | None:
        """The rank that failed first, if any did."""
        if self.preempted:
            return None
        failed = [each for each in self.exits if each.failed]
        # If no rank failed, one that was preempted without the others is the cause.
        left = [each for each in self.exits if each.preempted and not each.was_terminated]
        return next(iter(failed or left), None)

    @property
    def exit_code(self) -> int:
        """The exit code for the shell: the first failure's, or 128 + number for a signal.

        1 if the first failure is a rank that exited with 0 too early, 124 if the ranks took too
        long, 75 (`PreemptionGuard.EXIT_CODE`) if all of them stopped on request.
        """
        if self.preempted:
            return PREEMPTED_EXIT_CODE
        if self.first_failure is not None:
            code = self.first_failure.code
            return 128 - code if code < 0 else code or 1
        if self.timeout is not None:
            return _TIMEOUT_EXIT_CODE
        # Ranks that handled the signal and exited with 0 make a successful run.
        has_succeeded = self.exits and not any(each.code for each in self.exits)
        if self.signal is not None and not has_succeeded:
            return 128 + self.signal
        return 0


def describe(outcome: Outcome) -> str:
    """Describe which rank failed first and why, which followed, and which were stopped."""
    first = outcome.first_failure
    if outcome.preempted:
        if outcome.was_starting_over:
            return f"{PREEMPTED_MESSAGE} while restarting; {_CONTINUES}"
        output = [line for each in outcome.exits for line in each.final_output]
        messages = [line for line in output if line.startswith(PREEMPTED_MESSAGE)]
        return messages[0] if messages else PREEMPTED_MESSAGE
    if first is None and outcome.timeout is not None:
        return _describe_timeout(outcome)
    if first is None:
        return (
            f"stopped by {signal_name(outcome.signal)}" if outcome.signal else "all ranks succeeded"
        )
    lines = [f"{first.name} failed first: {_describe_failure(first)}"]
    lines += [f"    {line}" for line in first.final_output]
    others = [each for each in outcome.exits if each is not first]
    identical: dict[tuple[object, ...], list[RankExit]] = {}
    for each in others:
        if each.failed or each.error:
            key = each.was_terminated, each.code, mask_rank(each.summary, each.rank)
            identical.setdefault(key, []).append(each)
    consequences = list(identical.values())
    lines += [_describe_consequence(each, first) for each in consequences[:_MAX_CONSEQUENCES]]
    if unlisted := sum(map(len, consequences[_MAX_CONSEQUENCES:])):
        lines.append(f"{unlisted} more ranks failed")
    silent = [each for each in others if not each.failed and not each.error]
    if preempted := [each for each in silent if each.preempted]:
        lines.append(f"{_format_names(preempted)} {PREEMPTED_MESSAGE}")
    if stopped := [each for each in silent if each.was_terminated and not each.preempted]:
        lines.append(f"{_format_names(stopped)} stopped")
    if outcome.attempts > 1:
        lines.append(f"gave up after {outcome.attempts} attempts")
    return "\n".join(lines)


def describe_code(code: int) -> str:
    """Describe an exit code: ``exit code 3``, or a signal with a hint."""
    hint = _HINTS.get(-code)
    return f"{describe_exit(code)} ({hint})" if hint else describe_exit(code)


def _describe_failure(failed: RankExit) -> str:
    return failed.reason or describe_code(failed.code)


def _describe_timeout(outcome: Outcome) -> str:
    late = [each for each in outcome.exits if each.was_terminated]
    lines = [f"timed out after {outcome.timeout:g} s"]
    lines += [f"{_format_names(late)} did not finish"] if late else []
    for each in sorted(late, key=lambda each: each.rank or 0)[:_MAX_CONSEQUENCES]:
        if each.final_output:
            lines += [f"{each.name}:", *(f"    {line}" for line in each.final_output)]
    return "\n".join(lines)


def _describe_consequence(exits: Sequence[RankExit], first: RankExit) -> str:
    one = exits[0]
    if one.was_terminated:
        pronoun = "they were" if len(exits) > 1 else "it was"
        return f"{_format_names(exits)} raised {one.error} while {pronoun} being stopped"
    times = [f"{each.at - first.at:.2f}" for each in exits]
    later = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    end = f"{_format_names(exits)} failed {later} s later: {_describe_failure(one)}"
    return f"{end}: {one.summary}" if one.summary else end


def _format_names(exits: Sequence[RankExit]) -> str:
    ranks = sorted(each.rank for each in exits if each.rank is not None)
    return format_ranks(ranks) if ranks else exits[0].name
