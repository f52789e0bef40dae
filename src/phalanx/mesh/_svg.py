"""A picture of a mesh as SVG.

No colour says anything by itself: an axis has a dash pattern too, and this rank is filled. The
colours are those of Okabe and Ito, which people tell apart whatever colours they see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from ._view import Block, Cell, View

__all__ = ["render"]

_INK, _FAINT, _LINE = "#1b1f24", "#57606a", "#c4cbd3"
_MINE = "#0072b2"
_AXES = [("#d55e00", ""), ("#009e73", "6 2"), ("#a14f7d", "2 2"), ("#b97f00", "8 2 2 2")]
_HOSTS = ["#e9eff5", "#f5f0e4"]

_PAPER = 16  # around everything
_CELL = 30  # the height of a cell, and its least width
_GAP = 6  # between cells
_PAD = 5  # between a cell and its host's box
_LABEL = 13  # above a host's box, for its name
_MARGIN = 44  # left of a block, for its row axis
_HEAD = 34  # above a block's cells, for its column axis
_WIDE = 1280  # where blocks wrap


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle."""

    left: float
    top: float
    width: float
    height: float


class _Plan:
    """Where the cells of a block are, seen from the block's own corner."""

    def __init__(self, block: Block, *, cell_width: int) -> None:
        self.block = block
        self.has_hosts = any(cell and cell.host is not None for row in block.cells for cell in row)
        columns = list(zip(*block.cells, strict=True))
        self.top = _HEAD + (18 if block.title else 0)
        self.x = _positions(columns, first=_MARGIN + _PAD, size=cell_width, between=2 * _PAD)
        label = _LABEL if self.has_hosts else 0
        self.y = _positions(
            block.cells, first=self.top + _PAD + label, size=_CELL, between=2 * _PAD + label
        )
        self.cell_width = cell_width
        self.width = max(self.x[-1] + cell_width + _PAD, _MARGIN + 7 * len(block.title))
        self.height = self.y[-1] + _CELL + _PAD

    def box(self, rows: Sequence[int], columns: Sequence[int], *, pad: int = 0) -> _Box:
        """Return what surrounds the cells from the first to the last of these."""
        left, top = self.x[columns[0]], self.y[rows[0]]
        return _Box(
            left - pad,
            top - pad,
            self.x[columns[-1]] + self.cell_width - left + 2 * pad,
            self.y[rows[-1]] + _CELL - top + 2 * pad,
        )

    def hosts(self) -> Iterator[tuple[int, _Box]]:
        """Yield each host's boxes: one if its cells fill a rectangle, else one for each run."""
        places: dict[int, list[tuple[int, int]]] = {}
        for row, cells in enumerate(self.block.cells):
            for column, cell in enumerate(cells):
                if cell is not None and cell.host is not None:
                    places.setdefault(cell.host, []).append((row, column))
        for host, taken in places.items():
            rows = sorted({row for row, _ in taken})
            columns = sorted({column for _, column in taken})
            if self._all_of(host, rows, columns):
                yield host, self.box(rows, columns, pad=_PAD)
            else:
                for row, column in taken:
                    yield host, self.box([row], [column], pad=_GAP // 2)

    def _all_of(self, host: int, rows: Sequence[int], columns: Sequence[int]) -> bool:
        inside = [
            cell
            for row in self.block.cells[rows[0] : rows[-1] + 1]
            for cell in row[columns[0] : columns[-1] + 1]
        ]
        return all(cell is None or cell.host == host for cell in inside)


def render(view: View) -> str:
    """Return the picture as a complete SVG document."""
    plans = _plans(view)
    corners, right, bottom = _arrange(plans)
    body = [
        _text(_PAPER, 30, view.title, size=15, weight="bold"),
        _text(_PAPER, 49, view.place, size=12, fill=_FAINT) if view.place else "",
    ]
    for plan, (left, top) in zip(plans, corners, strict=True):
        drawn = _ellipsis() if plan is None else _block(view, plan)
        body += [f'<g transform="translate({left:g} {top:g})">', *drawn, "</g>"]
    legend, legend_width = _legend(view, plans, bottom + 8)
    body += legend
    longest = max(8.2 * len(view.title), 6.4 * len(view.place), legend_width)
    width, height = max(right, _PAPER + longest) + _PAPER, bottom + (26 if legend else 0) + _PAPER
    font = 'font-family="Helvetica, Arial, sans-serif"'
    area = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {area} role="img" {font}>',
        f"<title>{_escaped(view.title)}</title>",
        f"<desc>{_escaped(view.place)}</desc>" if view.place else "",
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="{_LINE}"/>',
    ]
    return "\n".join([line for line in [*head, *body] if line] + ["</svg>", ""])


def _plans(view: View) -> list[_Plan | None]:
    cells = [c for block in view.blocks if block for row in block.cells for c in row if c]
    digits = max(len(str(cell.rank)) for cell in cells)
    hosts = max((len(str(cell.host)) for cell in cells if cell.host is not None), default=0)
    # A host of one column has to be as wide as its name.
    width = max(_CELL + 4, 8 * digits + 14, 6 * (hosts + 4) if hosts else 0)
    return [_Plan(block, cell_width=width) if block else None for block in view.blocks]


def _arrange(plans: Sequence[_Plan | None]) -> tuple[list[tuple[float, float]], float, float]:
    """Return where each block goes, and how far right and down they reach."""
    corners = []
    left, top, right, bottom = float(_PAPER), 62.0, 0.0, 0.0
    for plan in plans:
        width, height = (24, 0) if plan is None else (plan.width, plan.height)
        if left > _PAPER and left + width > _WIDE:
            left, top = _PAPER, bottom + 20
        corners.append((left, top))
        right, bottom = max(right, left + width), max(bottom, top + height)
        left += width + 14
    return corners, right, bottom


def _positions(
    lines: Sequence[Sequence[Cell | None]], *, first: int, size: int, between: int
) -> list[int]:
    """Return where each row (or column) starts, with more room where hosts change."""
    positions = [first]
    for above, below in pairwise(lines):
        pairs = list(zip(above, below, strict=True))
        # What follows a gap is a box of its own, whatever host it is.
        has_hosts = any(b and b.host is not None for _, b in pairs)
        changes = has_hosts and any(b and (not a or a.host != b.host) for a, b in pairs)
        positions.append(positions[-1] + size + _GAP + (between if changes else 0))
    return positions


def _block(view: View, plan: _Plan) -> Iterator[str]:
    block = plan.block
    across = plan.box([0], range(len(block.columns)))
    down = plan.box(range(len(block.rows)), [0])
    if block.title:
        yield _text(_MARGIN, 12, block.title, size=12, weight="bold")
    if view.labels:
        middle = across.left + across.width / 2
        yield _axis_name(view, len(view.labels) - 1, middle, plan.top - 18)
    if len(view.labels) > 1:
        middle = down.top + down.height / 2
        yield _axis_name(view, len(view.labels) - 2, 10, middle, turned=True)
    for host, box in plan.hosts():
        style = f'fill="{_HOSTS[host % len(_HOSTS)]}" stroke="{_LINE}"'
        yield _rect(box, style=style)
        yield _text(box.left + 1, box.top - 3, f"host {host}", size=9, fill=_FAINT)
    yield from _numbers(view, plan)
    for y, row in zip(plan.y, block.cells, strict=True):
        for x, cell in zip(plan.x, row, strict=True):
            yield from _cell(cell, _Box(x, y, plan.cell_width, _CELL))


def _numbers(view: View, plan: _Plan) -> Iterator[str]:
    half = plan.cell_width / 2
    if view.labels:
        for x, place in zip(plan.x, plan.block.columns, strict=True):
            yield _text(x + half, plan.top - 3, _number(place), fill=_FAINT, anchor="middle")
    if len(view.labels) > 1:
        for y, place in zip(plan.y, plan.block.rows, strict=True):
            yield _text(_MARGIN - 6, y + 19, _number(place), fill=_FAINT, anchor="end")


def _number(place: int | None) -> str:
    return "…" if place is None else str(place)


def _axis_name(view: View, axis: int, x: float, y: float, *, turned: bool = False) -> str:
    fill = _AXES[axis % len(_AXES)][0] if view.rank is not None else _INK
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    label = view.labels[axis]
    return _text(x, y, label, size=12, weight="bold", fill=fill, anchor="middle", more=turn)


def _cell(cell: Cell | None, box: _Box) -> Iterator[str]:
    middle, base = box.left + box.width / 2, box.top + 19.5
    if cell is None:
        yield _text(middle, base, "…", size=13, fill=_FAINT, anchor="middle")
        return
    yield _rect(box, style=_cell_style(cell))
    fill, weight = ("#ffffff", "bold") if cell.is_mine else (_INK, "normal")
    yield _text(middle, base, str(cell.rank), size=13, fill=fill, weight=weight, anchor="middle")


def _cell_style(cell: Cell) -> str:
    if cell.is_mine:
        return f'fill="{_MINE}" stroke="{_INK}" stroke-width="2"'
    if cell.axis is None:
        return f'fill="#ffffff" stroke="{_LINE}"'
    return _axis_style(cell.axis)


def _axis_style(axis: int) -> str:
    colour, dash = _AXES[axis % len(_AXES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="#ffffff" stroke="{colour}" stroke-width="2.5"{pattern}'


def _legend(view: View, plans: Sequence[_Plan | None], top: float) -> tuple[list[str], float]:
    """Return the explanation of what is coloured, and its width."""
    if view.rank is None:
        return [], 0
    cells = [c for plan in plans if plan for row in plan.block.cells for c in row if c]
    axes = sorted({cell.axis for cell in cells if cell.axis is not None})
    entries = [(f"rank {view.rank}", f'fill="{_MINE}" stroke="{_INK}" stroke-width="2"')]
    entries += [(f"its {view.labels[axis]} group", _axis_style(axis)) for axis in axes]
    parts, left = [], float(_PAPER)
    for label, style in entries:
        parts += [
            _rect(_Box(left, top + 4, 22, 16), style=style),
            _text(left + 28, top + 16, label, size=12, fill=_FAINT),
        ]
        left += 44 + 6.6 * len(label)
    return parts, left


def _ellipsis() -> list[str]:
    return [_text(12, 90, "…", size=18, fill=_FAINT, anchor="middle")]


def _escaped(words: str) -> str:
    """Return text for XML, which has no way to write most control characters."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in words))


def _rect(box: _Box, *, style: str) -> str:
    return (
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}" '
        f'rx="4" {style}/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    fill: str = _INK,
    weight: str = "normal",
    anchor: str = "start",
    more: str = "",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}"{more}>{_escaped(words)}</text>'
    )
