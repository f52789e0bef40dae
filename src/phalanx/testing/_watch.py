"""Wait for the ranks of one run: reports, deaths, and those that never finish."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from multiprocessing.connection import wait

from ._outcome import Died, Report, Stopped, Stuck, fatal
from ._processes import RankProcess, TemplateProcess, read_stacks, stacks_of
from ._run import Patience
from ._task import unpack_report

__all__ = ["watch"]

# Seconds between looks whether a rank that is to be stopped has been; the kernel tells only its
# parent.
_POLL = 0.02


def watch(
    template: TemplateProcess,
    ranks: Mapping[int, RankProcess],
    *,
    patience: Patience,
    mortal: Collection[int],
) -> dict[int, Report]:
    """Collect a report of every rank, made up here for those that cannot make it."""
    return _Watch(template, ranks, patience=patience, mortal=mortal).run()


class _Watch:
    def __init__(
        self,
        template: TemplateProcess,
        ranks: Mapping[int, RankProcess],
        *,
        patience: Patience,
        mortal: Collection[int],
    ) -> None:
        self._template = template
        self._patience = patience
        self._mortal = frozenset(mortal)
        self._waiting = dict(ranks)
        self._mute: set[int] = set()  # hung up; the template will say how they ended
        self.reports: dict[int, Report] = {}

    def run(self) -> dict[int, Report]:
        while self._waiting and self._patience.left:
            self._look()
        self._give_up()
        return self.reports

    def _look(self) -> None:
        speaking = {
            process.connection: rank
            for rank, process in self._waiting.items()
            if rank not in self._mute
        }
        only_mortal = self._waiting.keys() <= self._mortal
        pause = min(self._patience.left, _POLL if only_mortal else float("inf"))
        wait([*speaking, self._template.fileno()], pause)
        self._template.catch_up()
        for rank, process in list(self._waiting.items()):
            self._look_at(rank, process, only_mortal=only_mortal)

    def _look_at(self, rank: int, process: RankProcess, *, only_mortal: bool) -> None:
        # What it said before it ended counts for more than its end.
        if rank not in self._mute and process.connection.poll():
            try:
                self._note(rank, unpack_report(process.connection.recv_bytes()))
                return
            except (EOFError, OSError):
                self._mute.add(rank)
        if process.status is not None:
            self._note(rank, Report(Died(process.status, read_stacks(process))))
        elif only_mortal and process.stopped:
            self._note(rank, Report(Stopped()))

    def _note(self, rank: int, report: Report) -> None:
        del self._waiting[rank]
        self.reports[rank] = report
        if fatal(report.outcome, mortal=rank in self._mortal):
            self._patience.shorten()

    def _give_up(self) -> None:
        spent = self._patience.spent
        stacks = stacks_of(self._template, list(self._waiting.values()))
        for rank, text in zip(list(self._waiting), stacks, strict=True):
            self._note(rank, Report(Stuck(spent, text)))
