"""A picture of points: what a call sends to the right, what it takes upwards, names beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .results import EntryResult
from .stats import Spread
from .style import BLACK, BLUE, GREEN, GREY, ORANGE, Style, round_time
from .table import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

__all__ = ["SCATTERS", "Scatter", "plot"]


@dataclass(frozen=True)
class Scatter:
    """How an entry is drawn."""

    title: str
    styles: Mapping[str, Style]
    across: str
    upwards: str


@dataclass(frozen=True)
class Point:
    """One competitor."""

    style: Style
    sent: int
    time: Spread


def _alike(colour: str, marker: str, *labels: str) -> dict[str, Style]:
    return {label: Style(label, colour, marker) for label in labels}


SCATTERS = {
    "ddp_hooks": Scatter(
        "A step of training by two ranks over Gloo: bytes and time, by communication hook",
        {
            **_alike(BLACK, "o", "no hook", "allreduce"),
            **_alike(BLUE, "s", "fp16", "bf16"),
            **_alike(BLUE, "P", "8 bits, tensor", "8 bits, channel"),
            **_alike(ORANGE, "^", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4"),
            **_alike(ORANGE, "v", "batched PowerSGD"),
            **_alike(GREEN, "D", "top-k 1%", "random-k 1%"),
            **_alike(GREY, "X", "post-local", "noop"),
        },
        "bytes that a rank sends in a step (less is better)",
        "time of one step (less is better)",
    ),
}
"""The entries that are drawn so."""


def plot(canvas: FigureCanvasAgg, axes: Axes, entry: EntryResult) -> None:
    """Draw the only case of an entry, as far as its bytes were counted."""
    scatter = SCATTERS[entry.name]
    (result,) = entry.cases
    times = result.times()
    points = [
        Point(style, max(result.sent[name], 1), times[name])
        for name, style in scatter.styles.items()
        if name in result.sent
    ]
    for point in points:
        _draw(axes, point)
    if entry.peer in times:  # who is below takes less time
        axes.axhline(times[entry.peer].median, color=GREY, linestyle="--", linewidth=0.9, zorder=1)
    _dress(axes, scatter, [point.sent for point in points])
    canvas.figure.draw_without_rendering()  # the limits are final: labels can be placed by them
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    _label_all(renderer, axes, points)


def _draw(axes: Axes, point: Point) -> None:
    time = point.time
    axes.errorbar(
        [point.sent],
        [time.median],
        yerr=[[time.median - time.low], [time.high - time.median]],
        color=point.style.colour,
        marker=point.style.marker,
        markersize=8,
        markeredgecolor="white",
        elinewidth=1.2,
    )


def _dress(axes: Axes, scatter: Scatter, sent: Sequence[int]) -> None:
    """Write the axes in people's units, and leave room for names at the edges."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.1, y=0.12)
    ticks = [
        1 << power for power in range(0, 60, 2) if min(sent) / 2 <= 1 << power <= max(sent) * 2
    ]
    axes.set_xticks(ticks, [size(tick) for tick in ticks])
    low, high = axes.get_ylim()
    times = [digit * 10.0**power for power in range(-9, 4) for digit in (1, 2, 5)]
    times = [time for time in times if low <= time <= high]
    axes.set_yticks(times, [round_time(time) for time in times])
    axes.minorticks_off()
    axes.set_xlabel(scatter.across)
    axes.set_ylabel(scatter.upwards)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


# -- names --------------------------------------------------------------------------------------


def _label_all(renderer: RendererBase, axes: Axes, points: Sequence[Point]) -> None:
    """Write each name as near to its point as it can be without covering anything."""
    inside = axes.get_window_extent()
    taken = [_point_box(axes, point) for point in points]
    for point in points:
        label = _label(axes, point)
        boxes = ((offset, _move(renderer, label, offset)) for offset in _offsets())
        free = (
            (offset, box)
            for offset, box in boxes
            if _within(box, inside) and not any(box.overlaps(other) for other in taken)
        )
        nowhere = (0, 20)
        offset, box = next(free, (nowhere, _move(renderer, label, nowhere)))
        _move(renderer, label, offset)
        taken.append(box)


def _offsets() -> Iterator[tuple[int, int]]:
    """List places around a point, in points of print, the nearest ones first."""
    for away in range(12, 120, 6):
        up = (away, -away)
        yield from ((side * 10, y) for y in (0, *up) if y or away == 12 for side in (1, -1))
        yield from ((side * away, y) for y in up for side in (1, -1))


def _label(axes: Axes, point: Point) -> Annotation:
    return axes.annotate(
        point.style.label,
        xy=(point.sent, point.time.median),
        xytext=(0, 0),
        textcoords="offset points",
        color=point.style.colour,
        fontsize=9,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # lines pass behind it
        arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
    )


def _move(renderer: RendererBase, label: Annotation, offset: tuple[int, int]) -> Bbox:
    """Put a label beside its point, and tell what its text then covers."""
    from matplotlib.text import Text

    label.set_position(offset)
    label.set_horizontalalignment("left" if offset[0] > 0 else "right")
    label.update_positions(renderer)
    return Text.get_window_extent(label)


def _point_box(axes: Axes, point: Point) -> Bbox:
    """Tell what a point and its bar cover."""
    from matplotlib.transforms import Bbox

    ends = axes.transData.transform([(point.sent, y) for y in (point.time.low, point.time.high)])
    (x, low), (_, high) = ends
    half = 9  # of a marker, in pixels at matplotlib's 100 to an inch
    return Bbox([(x - half, low - half), (x + half, high + half)])


def _within(box: Bbox, outer: Bbox) -> bool:
    return bool(
        outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1
    )
