"""The rank processes of a pool: forked when needed, used again while they are healthy."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ._function_reference import Reference
from ._outcome import Report, Returned, settle
from ._processes import RankProcess, TemplateProcess
from ._run import Patience
from ._task import Task, pack_arguments, pack_task
from ._watch import watch
from ._worker import host_store

__all__ = ["Crew"]

# The process that keeps the store is one of the crew, but no rank: no fault strikes it.
_KEEPER = -1
_KEEPER_TIMEOUT = 60.0  # seconds to open the store


class Crew:
    """A template and the processes forked from it."""

    def __init__(self, preload: Sequence[str]) -> None:
        test_tools = ["pytest"] if "pytest" in sys.modules else []
        self._template = TemplateProcess(["phalanx.groups", *test_tools, *preload])
        self._processes: dict[int, RankProcess] = {}
        self._port = 0
        self._runs = 0
        self._generation = 0

    def work(
        self, task: Task, *, linger: float, mortal: Collection[int]
    ) -> tuple[dict[int, Report], dict[int, str]]:
        """Carry out a task and return what the ranks report and what they printed."""
        if self._ready([_KEEPER]):
            self._port = self._host_store(task)
        self._ready(range(task.size))
        self._runs += 1
        prefix = f"run {self._runs}"
        task = replace(task, port=self._port, prefix=prefix, generation=self._generation)
        ranks = {rank: self._processes[rank] for rank in range(task.size)}
        return self._perform(task, ranks, Patience(task.timeout, linger), mortal)

    def _host_store(self, task: Task) -> int:
        host = Reference.of(host_store)
        task = replace(task, body=host, arguments=pack_arguments((), {}), size=1, faults=())
        keeper = {0: self._processes[_KEEPER]}
        patience = Patience(_KEEPER_TIMEOUT, _KEEPER_TIMEOUT)
        reports, outputs = self._perform(task, keeper, patience, ())
        (port,) = settle(str(host), reports, outputs=outputs)
        return int(port)

    def _ready(self, seats: Iterable[int]) -> bool:
        """Fill the seats and return whether any was empty."""
        self._template.catch_up()
        for seat in [seat for seat, process in self._processes.items() if process.ended]:
            self._processes.pop(seat).close()
        empty = [seat for seat in seats if seat not in self._processes]
        for seat in empty:
            self._processes[seat] = self._template.fork()
            self._generation += 1
        return bool(empty)

    def _perform(
        self,
        task: Task,
        ranks: Mapping[int, RankProcess],
        patience: Patience,
        mortal: Collection[int],
    ) -> tuple[dict[int, Report], dict[int, str]]:
        for rank, process in ranks.items():
            process.clear()
            process.send(pack_task(replace(task, rank=rank)))
        reports = watch(self._template, ranks, patience=patience, mortal=mortal)
        outputs = {rank: process.printed() for rank, process in ranks.items()}
        # Nobody knows what a failed body has left behind, and a new process is cheap.
        for rank, report in reports.items():
            if not isinstance(report.outcome, Returned):
                self._template.end(ranks[rank])
        return reports, outputs

    def close(self) -> None:
        """End all processes."""
        self._template.close()
        for process in self._processes.values():
            process.close()
