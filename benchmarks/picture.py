"""Results as pictures, PNG and SVG: lines of time by size or by ranks; or points, or rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import points, rows
from .results import EntryResult, Results
from .stats import Spread
from .style import BLUE, GREEN, GREY, ORANGE, SKY, Style, round_time
from .table import BUSY, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]


ENGINES = {
    "gloo": Style("Gloo", ORANGE, "s"),
    "mpi": Style("MPI (MPICH)", GREEN, "^"),
    "ordinary": Style("phalanx,\nordinary tensors", SKY, "D"),
    "shared": Style("phalanx,\ngroup.allocate", BLUE, "o"),
    "memcpy": Style("one memcpy of\nthe same bytes", GREY, "", "--"),
}
STEPS = {
    "torch": Style("torch DDP,\nGloo", ORANGE, "s"),
    "gloo": Style("phalanx DDP,\nGloo", SKY, "D"),
    "shm": Style("phalanx DDP,\nshared memory", BLUE, "o"),
    "alone": Style("no communication", GREY, "", "--"),
}


@dataclass(frozen=True)
class Chart:
    """How an entry is drawn."""

    title: str
    styles: Mapping[str, Style]
    by: str
    """The label of a case that goes to the right."""
    across: str
    """What that is."""
    upwards: str

    def tick(self, value: int) -> str:
        """Write a value of the axis to the right."""
        return size(value).replace(" ", "\n") if self.by == "bytes" else str(value)


_BY_SIZE = ("bytes", "size of the tensor", "time of one call (less is better)")
CHARTS = {
    "allreduce": Chart(
        "Allreduce of float32 by two ranks on one machine: time by size", ENGINES, *_BY_SIZE
    ),
    "allreduce_busy": Chart(
        "Allreduce by two ranks while other processes keep every core busy", ENGINES, *_BY_SIZE
    ),
    "ddp_scaling": Chart(
        "A step of training on two cores: time by number of ranks",
        STEPS,
        "ranks",
        "ranks, one batch each",
        "time of one step (less is better)",
    ),
}
"""The entries that are drawn as lines."""

Curve = Mapping[int, Spread]


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the entries that have a chart, and return the files."""
    from matplotlib import rc_context

    # The salt is fixed and the date left out, so that the same figures give the same file.
    with rc_context({"svg.hashsalt": "phalanx", "font.size": 10, "font.family": "DejaVu Sans"}):
        return [
            path
            for entry in results.entries
            if entry.name in CHARTS or entry.name in rows.ROWS or _has_points(entry)
            for path in _draw_entry(entry, _small_print(results, entry), folder / entry.name)
        ]


def _has_points(entry: EntryResult) -> bool:
    return entry.name in points.SCATTERS and any(result.sent for result in entry.cases)


def _small_print(results: Results, entry: EntryResult) -> str:
    machine = results.machine
    busy = any((result.others or 0) > BUSY for result in entry.cases)
    drawn = "band" if entry.name in CHARTS else "bar"
    return (
        f"Median of all rounds; the {drawn} is the middle half. "
        f"The Python call is included. {machine.cpu}, {machine.cores} cores"
        f"{' (busy)' if busy else ''}, torch {machine.torch}, {machine.date[:10]}."
    )


def _draw_entry(entry: EntryResult, small_print: str, stem: Path) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(9, 5.4), layout=ConstrainedLayoutEngine(rect=(0, 0, 0.985, 1)))
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    chart = CHARTS.get(entry.name) or rows.ROWS.get(entry.name) or points.SCATTERS[entry.name]
    axes.set_title(chart.title, loc="left", fontsize=12, fontweight="bold", pad=12)
    figure.supxlabel(small_print, fontsize=7.5, color="#555555", x=0.01, ha="left")
    if isinstance(chart, Chart):
        _plot(figure, axes, chart, _curves(entry, chart))
    elif isinstance(chart, rows.Rows):
        rows.plot(axes, entry)
    else:
        points.plot(canvas, axes, entry)
    files = {stem.with_suffix(".png"): {"Software": None}, stem.with_suffix(".svg"): {"Date": None}}
    for path, metadata in files.items():
        figure.savefig(path, dpi=160, metadata=metadata)
    return list(files)


def _plot(figure: Figure, axes: Axes, chart: Chart, curves: Mapping[str, Curve]) -> None:
    for name, curve in curves.items():
        _draw_curve(axes, chart.styles[name], curve)
    _dress(axes, chart, sorted({x for curve in curves.values() for x in curve}))
    figure.draw_without_rendering()  # the limits are final: labels can be placed by them
    _label_ends(axes, curves, chart.styles)


def _curves(entry: EntryResult, chart: Chart) -> dict[str, Curve]:
    """Gather what each competitor took, by what goes to the right."""
    curves: dict[str, dict[int, Spread]] = {}
    for result in entry.cases:
        for name, time in result.times().items():
            curves.setdefault(name, {})[int(result.case.labels[chart.by])] = time
    return {name: curves[name] for name in chart.styles if name in curves}


def _draw_curve(axes: Axes, style: Style, curve: Curve) -> None:
    sizes, times = list(curve), list(curve.values())
    axes.plot(
        sizes,
        [time.median for time in times],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dash,
        markersize=5,
        linewidth=1.8,
    )
    low, high = [time.low for time in times], [time.high for time in times]
    axes.fill_between(sizes, low, high, color=style.colour, alpha=0.22, linewidth=0)


def _dress(axes: Axes, chart: Chart, places: Sequence[int]) -> None:
    """Write the axes in people's units, and leave out what says nothing."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [chart.tick(place) for place in places])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: round_time(value))
    axes.set_ylabel(chart.upwards)
    axes.set_xlabel(chart.across)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _label_ends(axes: Axes, curves: Mapping[str, Curve], styles: Mapping[str, Style]) -> None:
    """Write each line's name at its right end, pushed apart where two would overlap."""
    last = max(x for curve in curves.values() for x in curve)
    ends = {name: curve[max(curve)].median for name, curve in curves.items()}
    bottom, top = (math.log10(limit) for limit in axes.get_ylim())
    height = (top - bottom) / 5.4 / 4.4  # of one line of text, in powers of ten
    wanted = sorted((math.log10(time), name) for name, time in ends.items())
    heights = [height * (1 + styles[name].label.count("\n")) + height / 3 for _, name in wanted]
    for (_, name), y in zip(wanted, _apart([y for y, _ in wanted], heights), strict=True):
        axes.annotate(
            styles[name].label,
            xy=(last, ends[name]),
            xytext=(1.03, (y - bottom) / (top - bottom)),
            textcoords="axes fraction",
            color=styles[name].colour,
            fontweight="bold" if styles[name].colour == BLUE else "normal",
            va="center",
            annotation_clip=False,
            arrowprops=_thin_line(styles[name].colour),
        )


def _thin_line(colour: str) -> dict[str, Any]:
    return {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 2, "shrinkB": 4}


def _apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Move sorted positions as little as needed for labels of these heights not to overlap."""
    placed = list(wanted)
    for _ in range(200):
        for i in range(len(placed) - 1):
            overlap = (heights[i] + heights[i + 1]) / 2 - (placed[i + 1] - placed[i])
            if overlap > 1e-9:
                placed[i] -= overlap / 2
                placed[i + 1] += overlap / 2
    return placed
