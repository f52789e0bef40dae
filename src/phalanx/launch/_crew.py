"""The processes of one attempt: the store and the ranks, and what they leave behind."""

from __future__ import annotations

import signal
import subprocess
from queue import SimpleQueue

from ..errors import RanksFailed
from ._job import Job
from ._output import Pump
from ._processes import Child, Event, Guard, start, start_store, with_leftovers
from ._reports import ReportReader, SeenReports
from ._screen import Source

__all__ = ["Crew"]


class Crew:
    """The store and the ranks of one attempt."""

    def __init__(self, job: Job, *, events: SimpleQueue[Event], guard: Guard, pump: Pump) -> None:
        self._job = job
        self._events = events
        self._guard = guard
        self._pump = pump
        self._ranks: dict[Child, int] = {}
        self._reports: dict[int | None, ReportReader] = {}
        self._seen = SeenReports()
        self._running: set[Child] = set()

    @property
    def running(self) -> list[int]:
        """The ranks that have not been released."""
        return [rank for child, rank in self._ranks.items() if child in self._running]

    def start(self, *, attempt: int) -> None:
        """Start the store and all ranks; raise `RanksFailed` if the system cannot."""
        try:
            port = self._start_store()
            for rank in range(self._job.ranks):
                self._start_rank(rank, env=self._job.rank_env(rank, attempt=attempt, port=port))
        except OSError as error:
            started = f"{len(self._ranks)} of {self._job.ranks} ranks"
            raise RanksFailed(f"the system let us start only {started}: {error}") from error

    def knows(self, child: Child) -> bool:
        """Return whether a child is one of ours that has not been released."""
        return child in self._running

    def rank_of(self, child: Child) -> int | None:
        """Return a child's rank, or None for the store."""
        return self._ranks.get(child)

    def release(self, child: Child) -> None:
        """Take note that a child has ended."""
        self._running.discard(child)
        if not with_leftovers([child]):
            self._guard.forget(child)

    def last_words(self, rank: int | None) -> list[str]:
        """Return how a rank (or the store) explained its end."""
        return self._reports[rank].last_words()

    def leftovers(self) -> list[Child]:
        """Return the ranks that have ended while something they started has not."""
        return with_leftovers(self._ranks)

    def is_gone(self) -> bool:
        """Return whether nothing is left of any child."""
        return not self._running and not self.leftovers()

    def send(self, number: int) -> None:
        """Signal the ranks that run."""
        for child in self._ranks:
            child.send(number)

    def send_to_leftovers(self, number: int) -> None:
        """Signal what ranks that have ended have left behind."""
        for child in self.leftovers():
            child.send_to_group(number)

    def kill(self) -> None:
        """Kill everything that is left, and the store."""
        for child in {*self._running, *self.leftovers()}:
            child.send_to_group(signal.SIGKILL)

    def _start_store(self) -> int:
        store, port = start_store(env=self._job.environ, events=self._events)
        self._adopt(store, None, Source("[store] ", is_error=True))
        return port

    def _start_rank(self, rank: int, *, env: dict[str, str]) -> None:
        child = start(
            f"rank {rank}",
            self._job.command,
            env=env,
            events=self._events,
            # One rank may talk to whoever is at the keyboard, through a debugger for instance.
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )
        self._ranks[child] = rank
        label = f"[rank {rank}] " if self._job.prefix else ""
        self._adopt(child, rank, Source(label, is_error=True, rank=rank))

    def _adopt(self, child: Child, rank: int | None, source: Source) -> None:
        self._guard.watch(child)
        self._running.add(child)
        stdout, stderr = child.process.stdout, child.process.stderr
        assert stdout is not None
        assert stderr is not None
        self._pump.add(stdout, Source(source.label, rank=source.rank))
        reports = ReportReader(
            self._seen, rank, labelled=self._job.prefix, full=self._job.full_tracebacks
        )
        self._reports[rank] = reports
        self._pump.add(stderr, source, reports)
