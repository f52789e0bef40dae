"""A picture of rows: one for each case, with a point on it for each competitor, by its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .results import EntryResult
from .stats import Spread
from .style import BLUE, GREEN, GREY, ORANGE, SKY, Style, round_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ROWS", "Rows", "plot"]


@dataclass(frozen=True)
class Rows:
    """How an entry is drawn."""

    title: str
    styles: Mapping[str, Style]
    by: str
    """The label of a case that names its row."""
    names: Mapping[str, str]
    """What the rows are called, from the top."""
    across: str


ROWS = {
    "checkpoint": Rows(
        "Saving 1 GiB that two ranks hold alike, while training goes on",
        {
            "async_save": Style("torch async_save,\nin a thread", ORANGE, "s"),
            "async_save, process": Style("torch async_save,\nin a process", ORANGE, "D"),
            "experimental": Style("torch's experimental\ncheckpointer", GREEN, "^"),
            "phalanx, unprepared": Style("phalanx,\nunprepared", SKY, "o"),
            "phalanx": Style("phalanx", BLUE, "o"),
            "memcpy of a part": Style("one memcpy of\na rank's part", GREY, "|"),
        },
        "of",
        {
            "first stall": "training stands still:\nfirst save",
            "later stall": "training stands still:\nlater saves",
            "write": "until the checkpoint\nis there, in memory",
            "write, flushed": "until it is there,\nflushed to disk",
        },
        "time (less is better)",
    ),
}
"""The entries that are drawn so."""

_APART = 0.11  # of a row, between two competitors


def plot(axes: Axes, entry: EntryResult) -> None:
    """Draw the cases of an entry from top to bottom."""
    rows = ROWS[entry.name]
    order = list(rows.names)
    drawn: list[float] = []
    for result in entry.cases:
        row = order.index(str(result.case.labels[rows.by]))
        for place, (name, style) in enumerate(rows.styles.items()):
            if name in result.samples:
                time = result.times()[name]
                height = row + (place - (len(rows.styles) - 1) / 2) * _APART
                _draw(axes, style, time, height, label=style.label if row == 0 else None)
                drawn += [time.low, time.high]
    _dress(axes, rows, drawn)


def _draw(axes: Axes, style: Style, time: Spread, height: float, *, label: str | None) -> None:
    axes.errorbar(
        [time.median],
        [height],
        xerr=[[time.median - time.low], [time.high - time.median]],
        color=style.colour,
        marker=style.marker,
        markersize=8,
        markeredgecolor=style.colour if style.marker == "|" else "white",
        elinewidth=1.2,
        linestyle="none",
        label=label,
    )


def _dress(axes: Axes, rows: Rows, times: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.06)
    low, high = min(times) / 1.3, max(times) * 1.3
    ticks = [digit * 10.0**power for power in range(-9, 4) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(ticks, [round_time(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows.names)), list(rows.names.values()))
    axes.set_ylim(len(rows.names) - 0.5, -0.5)
    for border in range(1, len(rows.names)):
        axes.axhline(border - 0.5, color="#dddddd", linewidth=0.7)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(rows.across)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelspacing=1.1, fontsize=9
    )
