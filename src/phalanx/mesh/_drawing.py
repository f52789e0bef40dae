"""Drawings of a mesh, as text and as SVG.

`MeshView` decides what is shown: a few blocks of cells, however large the mesh is. The last axis
runs along the columns of a block and the one before along its rows; there is one block for each
position along the other axes. Of a long axis the ends and the neighbourhood of the given rank are
shown; None marks what is left out.

No colour carries meaning by itself: axes have dash patterns too, and the given rank is filled.
The colours are Okabe and Ito's, which are distinguishable with any colour vision. This module
is used without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias
from xml.sax.saxutils import escape

from .._formatting import format_count
from ..errors import InvalidArgument
from .layout import FlatLayout, MeshLayout, format_axes

Positions: TypeAlias = tuple[int | None, ...]


_TEXT_WIDTH = 96  # columns, approximately


class _Cell(NamedTuple):
    rank: int
    host: int | None
    is_mine: bool
    axis: int | None  # along which this rank is in the group of the given rank


_Cells: TypeAlias = Sequence[_Cell | None]


class _Block(NamedTuple):
    """Two axes of a mesh, at one position along the others."""

    title: str
    rows: Positions
    columns: Positions
    cells: list[_Cells]


class MeshView:
    """Everything that a drawing shows: one block per position on all but two axes.

    As text, `rank` is in brackets and lines separate hosts. As SVG, each host is a box, and the
    groups of `rank` have one colour and outline per axis. `start` is the first rank of the copy of
    the layout to draw; `rank_map[i]` is the rank to print for position i of the layout.
    """

    def __init__(
        self,
        layout: MeshLayout,
        *,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        ranks_per_host: int | None = None,
        start: int = 0,
        rank_map: Sequence[int] | None = None,
        svg: bool = False,
    ) -> None:
        sizes = layout.top_level_sizes
        if names is not None and len(names) != len(sizes):
            raise InvalidArgument(f"{len(names)} names {tuple(names)} for {len(sizes)} axes")
        if ranks_per_host is not None and ranks_per_host < 1:
            raise InvalidArgument(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        # A mesh of one axis is a single row, and one of none is a single cell.
        self._padding = max(0, 2 - len(sizes))
        self._layout = MeshLayout([FlatLayout(1)] * self._padding + list(layout))
        self._start = start
        self._rank_map = rank_map
        self._ranks_per_host = ranks_per_host
        self._svg = svg
        self._limits = self._choose_limits(sizes, digits=len(str(start + layout.cosize())))
        self.labels = tuple(names or [f"axis {axis}" for axis in range(len(sizes))])
        position = rank
        if rank is not None and rank_map is not None:
            position = rank_map.index(rank) if rank in rank_map else None
        self._here = None if position is None else self._layout.coordinate_of(position - start)
        self.rank = None if self._here is None else rank
        self.title = self._title(sizes, is_named=bool(names))
        self.caption = "" if rank is None else self._caption(rank)
        outer = MeshLayout.from_sizes_strides(self._layout.top_level_sizes[:-2])
        index = None if self._here is None else outer.rank_of(self._here[:-2])
        places = visible_positions(outer.numel(), here=index, limit=self._limits[0])
        leads = [None if place is None else outer.coordinate_of(place) for place in places]
        self.blocks = [None if lead is None else self._block(lead) for lead in leads]
        self.cells = [c for block in self.blocks if block for row in block.cells for c in row if c]

    def _choose_limits(self, sizes: Sequence[int], *, digits: int) -> tuple[int, int, int]:
        """Return the maximum numbers of blocks, of rows of a block, and of columns."""
        columns = 8 if self._svg else max(4, min(16, (_TEXT_WIDTH - 16) // (digits + 3)))
        rows = 16 if self._svg else 32  # of all blocks together
        blocks = math.prod(sizes[:-2])
        height = sizes[-2] if len(sizes) > 1 else 1
        if blocks * height > rows:
            blocks, height = (1, rows // 2) if blocks == 1 else (3, min(rows // 3, 6))
        return blocks, height, columns

    def draw(self) -> str:
        if self._svg:
            return _render_svg(self)
        lines = [self.title, *([self.caption] if self.caption else [])]
        if self.labels:
            for block in self.blocks:
                lines += ["", "…"] if block is None else ["", *_text_block(self.labels, block)]
        return "\n".join(line.rstrip() for line in lines)

    def _title(self, sizes: Sequence[int], *, is_named: bool) -> str:
        title = format_count(self._layout.numel(), "rank")
        if self._ranks_per_host is not None:
            title += f", {format_count(self._ranks_per_host, 'rank')} per host"
        shape = format_axes(self.labels if is_named else None, sizes, " × ")  # noqa: RUF001 - the sign
        return f"{shape}: {title}" if is_named or len(sizes) > 1 else title

    def _caption(self, rank: int) -> str:
        if self._here is None:
            return f"rank {rank} is not in this mesh"
        place = format_axes(self.labels, self._here[self._padding :]) or "the only place"
        host = "" if self._ranks_per_host is None else f", on host {rank // self._ranks_per_host}"
        return f"rank {rank} is at {place}{host}"

    def _block(self, lead: tuple[int, ...]) -> _Block:
        here: Positions = (None, None) if self._here is None else self._here[-2:]
        rows, columns = (
            visible_positions(size, here=at, limit=limit)
            for size, at, limit in zip(
                self._layout.top_level_sizes[-2:], here, self._limits[1:], strict=True
            )
        )
        cells: list[_Cells] = [
            [
                None if row is None or column is None else self._cell((*lead, row, column))
                for column in columns
            ]
            for row in rows
        ]
        return _Block(format_axes(self.labels, lead), rows, columns, cells)

    def _cell(self, coordinate: tuple[int, ...]) -> _Cell:
        position = self._start + self._layout.rank_of(coordinate)
        rank = position if self._rank_map is None else self._rank_map[position]
        here = self._here or ()
        differs = [axis for axis, at in enumerate(here) if coordinate[axis] != at]
        return _Cell(
            rank=rank,
            host=None if self._ranks_per_host is None else rank // self._ranks_per_host,
            is_mine=coordinate == self._here,
            axis=differs[0] - self._padding if len(differs) == 1 else None,
        )


def visible_positions(size: int, *, here: int | None, limit: int) -> Positions:
    """Return the positions of an axis to show: its ends and the neighbourhood of `here`."""
    if size <= limit:
        return tuple(range(size))
    anchors = [0, size - 1] if here is None else [here, 0, size - 1]
    around = [(abs(d), a + d) for a in anchors for d in range(-limit, limit + 1)]
    nearest = dict.fromkeys(place for _, place in sorted(around, key=lambda each: each[0]))
    kept = sorted([place for place in nearest if 0 <= place < size][:limit])
    places: list[int | None] = []
    for place in kept:
        if places and places[-1] != place - 1:
            places.append(None)
        places.append(place)
    return tuple(places)


def _number(place: int | None) -> str:
    return "…" if place is None else str(place)


_INK = "#1b1f24"
_FAINT = "#57606a"
_LINE = "#c4cbd3"
_MINE = f'fill="#0072b2" stroke="{_INK}" stroke-width="2"'
_AXES = [("#d55e00", ""), ("#009e73", "6 2"), ("#a14f7d", "2 2"), ("#b97f00", "8 2 2 2")]
_HOSTS = ["#e9eff5", "#f5f0e4"]

_PAPER = 16  # around everything
_CELL = 30  # the height of a cell, and its least width
_GAP = 6  # between cells
_PAD = 5  # between a cell and its host's box
_LABEL = 13  # above a host's box, for its name
_MARGIN = 44  # left of a block, for its row axis
_HEAD = 34  # above a block's cells, for its column axis
_WRAP_WIDTH = 1280  # where blocks wrap


class _Box(NamedTuple):
    left: float
    top: float
    width: float
    height: float


class _SvgBlock:
    """A block of cells as SVG, with coordinates relative to its corner."""

    def __init__(self, block: _Block, *, cell_width: int) -> None:
        self.block = block
        self.cell_width = cell_width
        has_hosts = any(cell and cell.host is not None for row in block.cells for cell in row)
        label = _LABEL if has_hosts else 0
        self.top = _HEAD + (18 if block.title else 0)
        columns = list(zip(*block.cells, strict=True))
        self.x = _positions(columns, first=_MARGIN + _PAD, size=cell_width, between=2 * _PAD)
        self.y = _positions(
            block.cells, first=self.top + _PAD + label, size=_CELL, between=2 * _PAD + label
        )
        self.width = max(self.x[-1] + cell_width + _PAD, _MARGIN + 7 * len(block.title))
        self.height = self.y[-1] + _CELL + _PAD

    def box(self, rows: Sequence[int], columns: Sequence[int], *, pad: int = 0) -> _Box:
        left, top = self.x[columns[0]], self.y[rows[0]]
        return _Box(
            left - pad,
            top - pad,
            self.x[columns[-1]] + self.cell_width - left + 2 * pad,
            self.y[rows[-1]] + _CELL - top + 2 * pad,
        )

    def hosts(self) -> Iterator[tuple[int, _Box]]:
        """Yield each host's boxes: one if its cells fill a rectangle, else one per cell."""
        places: dict[int, list[tuple[int, int]]] = {}
        for row, cells in enumerate(self.block.cells):
            for column, cell in enumerate(cells):
                if cell is not None and cell.host is not None:
                    places.setdefault(cell.host, []).append((row, column))
        for host, taken in places.items():
            rows = sorted({row for row, _ in taken})
            columns = sorted({column for _, column in taken})
            inside = [
                cell
                for cells in self.block.cells[rows[0] : rows[-1] + 1]
                for cell in cells[columns[0] : columns[-1] + 1]
            ]
            if all(cell is None or cell.host == host for cell in inside):
                yield host, self.box(rows, columns, pad=_PAD)
            else:
                for row, column in taken:
                    yield host, self.box([row], [column], pad=_GAP // 2)

    def draw(self, view: MeshView) -> Iterator[str]:
        block, ndim = self.block, len(view.labels)
        if block.title:
            yield _svg_text(_MARGIN, 12, block.title, size=12, weight="bold")
        if ndim:
            across = self.box([0], range(len(block.columns)))
            yield _axis_name(view, ndim - 1, across.left + across.width / 2, self.top - 18)
        if ndim > 1:
            down = self.box(range(len(block.rows)), [0])
            yield _axis_name(view, ndim - 2, 10, down.top + down.height / 2, turned=True)
        for host, box in self.hosts():
            yield _svg_rect(box, f'fill="{_HOSTS[host % len(_HOSTS)]}" stroke="{_LINE}"')
            yield _svg_text(box.left + 1, box.top - 3, f"host {host}", size=9, fill=_FAINT)
        half = self.cell_width / 2
        if ndim:
            for x, place in zip(self.x, block.columns, strict=True):
                yield _svg_text(x + half, self.top - 3, _number(place), fill=_FAINT, at="middle")
        if ndim > 1:
            for y, place in zip(self.y, block.rows, strict=True):
                yield _svg_text(_MARGIN - 6, y + 19, _number(place), fill=_FAINT, at="end")
        for y, row in zip(self.y, block.cells, strict=True):
            for x, cell in zip(self.x, row, strict=True):
                is_mine = cell is not None and cell.is_mine
                if cell is not None:
                    style = _MINE if is_mine else _axis_style(cell.axis)
                    yield _svg_rect(_Box(x, y, self.cell_width, _CELL), style)
                yield _svg_text(
                    x + half,
                    y + 19.5,
                    "…" if cell is None else str(cell.rank),
                    size=13,
                    fill=_FAINT if cell is None else "#ffffff" if is_mine else _INK,
                    weight="bold" if is_mine else "normal",
                    at="middle",
                )


def _positions(lines: Sequence[_Cells], *, first: int, size: int, between: int) -> list[int]:
    """Return the start of each row or column, with more room where hosts change."""
    positions = [first]
    for above, below in pairwise(lines):
        pairs = list(zip(above, below, strict=True))
        # A gap ends a box, so the same host needs a new one after it.
        has_hosts = any(b and b.host is not None for _, b in pairs)
        changes = has_hosts and any(b and (not a or a.host != b.host) for a, b in pairs)
        positions.append(positions[-1] + size + _GAP + (between if changes else 0))
    return positions


def _render_svg(view: MeshView) -> str:
    digits = max(len(str(cell.rank)) for cell in view.cells)
    hosts = max((len(str(cell.host)) for cell in view.cells if cell.host is not None), default=0)
    # A host of one column must be as wide as its name.
    cell_width = max(_CELL + 4, 8 * digits + 14, 6 * (hosts + 4) if hosts else 0)
    body = [_svg_text(_PAPER, 30, view.title, size=15, weight="bold")]
    if view.caption:
        body.append(_svg_text(_PAPER, 49, view.caption, size=12, fill=_FAINT))
    left = _PAPER
    top = 62
    right = bottom = 0
    for block in view.blocks:
        if block is None:
            width = 24
            height = 0
            drawn = [_svg_text(12, 90, "…", size=18, fill=_FAINT, at="middle")]
        else:
            svg = _SvgBlock(block, cell_width=cell_width)
            width = svg.width
            height = svg.height
            drawn = list(svg.draw(view))
        if left > _PAPER and left + width > _WRAP_WIDTH:
            left = _PAPER
            top = bottom + 20
        body += [f'<g transform="translate({left:g} {top:g})">', *drawn, "</g>"]
        right = max(right, left + width)
        bottom = max(bottom, top + height)
        left += width + 14
    legend_width = 0.0
    if view.rank is not None:
        axes = sorted({cell.axis for cell in view.cells if cell.axis is not None})
        legend = [(f"rank {view.rank}", _MINE)]
        legend += [(f"its {view.labels[axis]} group", _axis_style(axis)) for axis in axes]
        legend_width = float(_PAPER)
        for label, style in legend:
            body.append(_svg_rect(_Box(legend_width, bottom + 12, 22, 16), style))
            body.append(_svg_text(legend_width + 28, bottom + 24, label, size=12, fill=_FAINT))
            legend_width += 44 + 6.6 * len(label)
        bottom += 26
    longest = max(8.2 * len(view.title), 6.4 * len(view.caption), legend_width)
    total_width = f"{max(right, _PAPER + longest) + _PAPER:.0f}"
    total_height = f"{bottom + _PAPER:.0f}"
    font = 'font-family="Helvetica, Arial, sans-serif"'
    area = (
        f'width="{total_width}" height="{total_height}" viewBox="0 0 {total_width} {total_height}"'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {area} role="img" {font}>',
            f"<title>{_escaped(view.title)}</title>",
            *([f"<desc>{_escaped(view.caption)}</desc>"] if view.caption else []),
            f'<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="{_LINE}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _axis_name(view: MeshView, axis: int, x: float, y: float, *, turned: bool = False) -> str:
    fill = _AXES[axis % len(_AXES)][0] if view.rank is not None else _INK
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    label = view.labels[axis]
    return _svg_text(x, y, label, size=12, weight="bold", fill=fill, at="middle", more=turn)


def _axis_style(axis: int | None) -> str:
    if axis is None:
        return f'fill="#ffffff" stroke="{_LINE}"'
    colour, dash = _AXES[axis % len(_AXES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="#ffffff" stroke="{colour}" stroke-width="2.5"{pattern}'


def _escaped(words: str) -> str:
    """Escape text for XML, which cannot contain most control characters."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in words))


def _svg_rect(box: _Box, style: str) -> str:
    return (
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}" '
        f'rx="4" {style}/>'
    )


def _svg_text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    fill: str = _INK,
    weight: str = "normal",
    at: str = "start",
    more: str = "",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{at}"{more}>{_escaped(words)}</text>'
    )


def _text_block(axes: Sequence[str], block: _Block) -> list[str]:
    width = 2 + max(len(str(cell.rank)) for row in block.cells for cell in row if cell)
    labels = [""]
    if len(axes) > 1:
        labels = ["…" if place is None else f"{axes[-2]}={place}" for place in block.rows]
    margin = max(map(len, labels))
    head = "".join(f"{_number(place):>{width - 1}}  " for place in block.columns)
    lines = [block.title] if block.title else []
    lines.append(f"{' ' * margin}  {head} {axes[-1]}")
    # Lines between rows help only if some host has ranks in two adjacent rows.
    has_rules = any(
        upper and lower and upper.host == lower.host is not None
        for above, below in pairwise(block.cells)
        for upper, lower in zip(above, below, strict=True)
    )
    for number, (label, row) in enumerate(zip(labels, block.cells, strict=True)):
        if has_rules and number:
            rule = _host_rule(block.cells[number - 1], row, width)
            lines += [f"{' ' * margin}  {rule}"] if "─" in rule else []
        pieces = []
        for cell, following in zip(row, [*row[1:], None], strict=True):
            if cell is None:
                pieces.append(f"{'…':>{width - 1}} ")
            else:
                pieces.append(f"{f'[{cell.rank}]' if cell.is_mine else f'{cell.rank} ':>{width}}")
            pieces.append("│" if _on_different_hosts(cell, following) else " ")
        lines.append(f"{label:>{margin}}  {''.join(pieces)}{_row_hosts(row)}")
    return lines


def _host_rule(above: _Cells, below: _Cells, width: int) -> str:
    """Return the line between two rows, drawn where the host changes."""
    pieces = []
    for column, (upper, lower) in enumerate(zip(above, below, strict=True)):
        differs = _on_different_hosts(upper, lower)
        crosses = any(
            _on_different_hosts(*row[column : column + 2])
            for row in (above, below)
            if row[column + 1 :]
        )
        pieces.append(("─" if differs else " ") * width)
        pieces.append("┼" if differs and crosses else "─" if differs else "│" if crosses else " ")
    return "".join(pieces)


def _row_hosts(row: _Cells) -> str:
    hosts = sorted({cell.host for cell in row if cell is not None and cell.host is not None})
    if not hosts:
        return ""
    if len(hosts) == 1:
        return f" host {hosts[0]}"
    joint = "-" if hosts[-1] - hosts[0] == len(hosts) - 1 else "…"
    return f" hosts {hosts[0]}{joint}{hosts[-1]}"


def _on_different_hosts(one: _Cell | None, other: _Cell | None) -> bool:
    return one is not None and other is not None and one.host != other.host
