"""Drawings of a mesh, as text and as SVG.

`make_view` decides what is shown: a few blocks of cells, however large the mesh is. The last axis
runs along the columns of a block and the one before along its rows; there is one block for each
position along the other axes. Of a long axis the ends and the neighbourhood of the given rank are
shown; None marks what is left out. `draw_mesh` renders the view.

No colour carries meaning by itself: axes have dash patterns too, and the given rank is filled.
The colours are Okabe and Ito's, which are distinguishable with any colour vision. This module
is used without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias
from xml.sax.saxutils import escape

from ..errors import InvalidArgument
from .layout import MeshLayout

Positions: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewCell:
    """One rank in a picture."""

    rank: int
    host: int | None
    is_mine: bool
    """Whether the picture is drawn for this rank."""
    axis: int | None
    """The axis along which this rank is in that rank's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewBlock:
    """Two axes of a mesh, at one position along the others."""

    title: str
    rows: Positions
    columns: Positions
    cells: tuple[tuple[ViewCell | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLimits:
    """Maximum numbers of blocks, rows and columns to show."""

    blocks: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """Everything that a picture shows."""

    title: str
    place: str
    """The coordinate of `rank`; empty without one."""
    labels: tuple[str, ...]
    blocks: tuple[ViewBlock | None, ...]
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnMesh:
    layout: MeshLayout
    labels: tuple[str, ...]
    start: int
    rank_map: Sequence[int] | None
    ranks_per_host: int | None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        position = self.start + self.layout.rank_of(coordinate)
        return position if self.rank_map is None else self.rank_map[position]

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        if self.rank_map is None:
            return self.layout.coordinate_of(rank - self.start)
        if rank not in self.rank_map:
            return None
        return self.layout.coordinate_of(self.rank_map.index(rank) - self.start)


def make_view(
    layout: MeshLayout,
    *,
    names: Sequence[str] | None,
    rank: int | None,
    ranks_per_host: int | None,
    limits: ViewLimits,
    start: int = 0,
    rank_map: Sequence[int] | None = None,
) -> MeshView:
    if names is not None and len(names) != len(layout):
        raise InvalidArgument(f"{len(names)} names {tuple(names)} for {len(layout)} axes")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise InvalidArgument(f"ranks_per_host must be at least 1, got {ranks_per_host}")
    mesh = _DrawnMesh(
        layout=layout,
        labels=tuple(names) if names else tuple(f"axis {axis}" for axis in range(len(layout))),
        start=start,
        rank_map=rank_map,
        ranks_per_host=ranks_per_host,
    )
    here = None if rank is None else mesh.coordinate_of(rank)
    return MeshView(
        title=_title(mesh, named=bool(names)),
        place=_rank_caption(mesh, rank, here),
        labels=mesh.labels,
        blocks=_view_blocks(mesh, here, limits),
        rank=None if here is None else rank,
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


def _title(mesh: _DrawnMesh, *, named: bool) -> str:
    parts = [
        f"{label}={size}" if named else str(size)
        for label, size in zip(mesh.labels, mesh.layout.top_level_sizes, strict=True)
    ]
    shape = " × ".join(parts)  # noqa: RUF001 - the sign for it
    count = mesh.layout.numel()
    ranks = f"{count} {'rank' if count == 1 else 'ranks'}"
    hosts = "" if mesh.ranks_per_host is None else f", hosts of {mesh.ranks_per_host}"
    return f"{shape}: {ranks}{hosts}" if len(parts) > 1 or named else f"{ranks}{hosts}"


def _rank_caption(mesh: _DrawnMesh, rank: int | None, here: tuple[int, ...] | None) -> str:
    if rank is None:
        return ""
    if here is None:
        return f"rank {rank} is not in this mesh"
    parts = [f"{label}={number}" for label, number in zip(mesh.labels, here, strict=True)]
    host = "" if mesh.ranks_per_host is None else f", on host {rank // mesh.ranks_per_host}"
    return f"rank {rank} is at {', '.join(parts) or 'the only place'}{host}"


def _view_blocks(
    mesh: _DrawnMesh, here: tuple[int, ...] | None, limits: ViewLimits
) -> tuple[ViewBlock | None, ...]:
    sizes = mesh.layout.top_level_sizes
    outer = MeshLayout.from_sizes_strides(sizes[:-2])
    index = None if here is None else outer.rank_of(here[:-2])
    blocks: list[ViewBlock | None] = []
    for place in visible_positions(outer.numel(), here=index, limit=limits.blocks):
        lead = None if place is None else outer.coordinate_of(place)
        blocks.append(None if lead is None else _view_block(mesh, lead, here, limits))
    return tuple(blocks)


def _view_block(
    mesh: _DrawnMesh, lead: tuple[int, ...], here: tuple[int, ...] | None, limits: ViewLimits
) -> ViewBlock:
    inner = mesh.layout.top_level_sizes[len(lead) :]
    near = (None,) * len(inner) if here is None else here[len(lead) :]
    bounds = [limits.rows, limits.columns][2 - len(inner) :]
    places = [
        visible_positions(size, here=at, limit=limit)
        for size, at, limit in zip(inner, near, bounds, strict=True)
    ]
    # A mesh of one axis is a single row, and one of none is a single cell.
    columns = places[-1] if places else (0,)
    rows = places[0] if len(places) == 2 else (0,)

    def cell(row: int | None, column: int | None) -> ViewCell | None:
        if row is None or column is None:
            return None
        return _view_cell(mesh, (*lead, *(row, column)[2 - len(inner) :]), here)

    named = zip(mesh.labels, lead, strict=False)
    return ViewBlock(
        title=", ".join(f"{label}={number}" for label, number in named),
        rows=rows,
        columns=columns,
        cells=tuple(tuple(cell(row, column) for column in columns) for row in rows),
    )


def _view_cell(
    mesh: _DrawnMesh, coordinate: tuple[int, ...], here: tuple[int, ...] | None
) -> ViewCell:
    rank = mesh.rank_at(coordinate)
    differs = (
        []
        if here is None
        else [axis for axis, number in enumerate(coordinate) if number != here[axis]]
    )
    return ViewCell(
        rank=rank,
        host=None if mesh.ranks_per_host is None else rank // mesh.ranks_per_host,
        is_mine=coordinate == here,
        axis=differs[0] if len(differs) == 1 else None,
    )


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
_WRAP_WIDTH = 1280  # where blocks wrap


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    top: float
    width: float
    height: float


class _BlockGeometry:
    """Coordinates of the cells of a block, relative to its corner."""

    def __init__(self, block: ViewBlock, *, cell_width: int) -> None:
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
        """Return the bounding box of these cells."""
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


def _render_svg(view: MeshView) -> str:
    plans = _block_geometries(view)
    corners, right, bottom = _arrange(plans)
    body = [
        _svg_text(_PAPER, 30, view.title, size=15, weight="bold"),
        _svg_text(_PAPER, 49, view.place, size=12, fill=_FAINT) if view.place else "",
    ]
    for plan, (left, top) in zip(plans, corners, strict=True):
        drawn = _ellipsis() if plan is None else _svg_block(view, plan)
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


def _block_geometries(view: MeshView) -> list[_BlockGeometry | None]:
    cells = [c for block in view.blocks if block for row in block.cells for c in row if c]
    digits = max(len(str(cell.rank)) for cell in cells)
    hosts = max((len(str(cell.host)) for cell in cells if cell.host is not None), default=0)
    # A host of one column must be as wide as its name.
    width = max(_CELL + 4, 8 * digits + 14, 6 * (hosts + 4) if hosts else 0)
    return [_BlockGeometry(block, cell_width=width) if block else None for block in view.blocks]


def _arrange(
    plans: Sequence[_BlockGeometry | None],
) -> tuple[list[tuple[float, float]], float, float]:
    """Return the corner of each block, and the right and bottom ends of all."""
    corners = []
    left, top, right, bottom = float(_PAPER), 62.0, 0.0, 0.0
    for plan in plans:
        width, height = (24, 0) if plan is None else (plan.width, plan.height)
        if left > _PAPER and left + width > _WRAP_WIDTH:
            left, top = _PAPER, bottom + 20
        corners.append((left, top))
        right, bottom = max(right, left + width), max(bottom, top + height)
        left += width + 14
    return corners, right, bottom


def _positions(
    lines: Sequence[Sequence[ViewCell | None]], *, first: int, size: int, between: int
) -> list[int]:
    """Return the start of each row or column, with more room where hosts change."""
    positions = [first]
    for above, below in pairwise(lines):
        pairs = list(zip(above, below, strict=True))
        # A gap ends a box, so the same host needs a new one after it.
        has_hosts = any(b and b.host is not None for _, b in pairs)
        changes = has_hosts and any(b and (not a or a.host != b.host) for a, b in pairs)
        positions.append(positions[-1] + size + _GAP + (between if changes else 0))
    return positions


def _svg_block(view: MeshView, plan: _BlockGeometry) -> Iterator[str]:
    block = plan.block
    across = plan.box([0], range(len(block.columns)))
    down = plan.box(range(len(block.rows)), [0])
    if block.title:
        yield _svg_text(_MARGIN, 12, block.title, size=12, weight="bold")
    if view.labels:
        middle = across.left + across.width / 2
        yield _axis_name(view, len(view.labels) - 1, middle, plan.top - 18)
    if len(view.labels) > 1:
        middle = down.top + down.height / 2
        yield _axis_name(view, len(view.labels) - 2, 10, middle, turned=True)
    for host, box in plan.hosts():
        style = f'fill="{_HOSTS[host % len(_HOSTS)]}" stroke="{_LINE}"'
        yield _svg_rect(box, style=style)
        yield _svg_text(box.left + 1, box.top - 3, f"host {host}", size=9, fill=_FAINT)
    yield from _numbers(view, plan)
    for y, row in zip(plan.y, block.cells, strict=True):
        for x, cell in zip(plan.x, row, strict=True):
            yield from _svg_cell(cell, _Box(x, y, plan.cell_width, _CELL))


def _numbers(view: MeshView, plan: _BlockGeometry) -> Iterator[str]:
    half = plan.cell_width / 2
    if view.labels:
        for x, place in zip(plan.x, plan.block.columns, strict=True):
            yield _svg_text(x + half, plan.top - 3, _number(place), fill=_FAINT, anchor="middle")
    if len(view.labels) > 1:
        for y, place in zip(plan.y, plan.block.rows, strict=True):
            yield _svg_text(_MARGIN - 6, y + 19, _number(place), fill=_FAINT, anchor="end")


def _number(place: int | None) -> str:
    return "…" if place is None else str(place)


def _axis_name(view: MeshView, axis: int, x: float, y: float, *, turned: bool = False) -> str:
    fill = _AXES[axis % len(_AXES)][0] if view.rank is not None else _INK
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    label = view.labels[axis]
    return _svg_text(x, y, label, size=12, weight="bold", fill=fill, anchor="middle", more=turn)


def _svg_cell(cell: ViewCell | None, box: _Box) -> Iterator[str]:
    middle, base = box.left + box.width / 2, box.top + 19.5
    if cell is None:
        yield _svg_text(middle, base, "…", size=13, fill=_FAINT, anchor="middle")
        return
    yield _svg_rect(box, style=_cell_style(cell))
    fill, weight = ("#ffffff", "bold") if cell.is_mine else (_INK, "normal")
    yield _svg_text(
        middle, base, str(cell.rank), size=13, fill=fill, weight=weight, anchor="middle"
    )


def _cell_style(cell: ViewCell) -> str:
    if cell.is_mine:
        return f'fill="{_MINE}" stroke="{_INK}" stroke-width="2"'
    if cell.axis is None:
        return f'fill="#ffffff" stroke="{_LINE}"'
    return _axis_style(cell.axis)


def _axis_style(axis: int) -> str:
    colour, dash = _AXES[axis % len(_AXES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="#ffffff" stroke="{colour}" stroke-width="2.5"{pattern}'


def _legend(
    view: MeshView, plans: Sequence[_BlockGeometry | None], top: float
) -> tuple[list[str], float]:
    """Return the explanation of the colours, and its width."""
    if view.rank is None:
        return [], 0
    cells = [c for plan in plans if plan for row in plan.block.cells for c in row if c]
    axes = sorted({cell.axis for cell in cells if cell.axis is not None})
    entries = [(f"rank {view.rank}", f'fill="{_MINE}" stroke="{_INK}" stroke-width="2"')]
    entries += [(f"its {view.labels[axis]} group", _axis_style(axis)) for axis in axes]
    parts, left = [], float(_PAPER)
    for label, style in entries:
        parts += [
            _svg_rect(_Box(left, top + 4, 22, 16), style=style),
            _svg_text(left + 28, top + 16, label, size=12, fill=_FAINT),
        ]
        left += 44 + 6.6 * len(label)
    return parts, left


def _ellipsis() -> list[str]:
    return [_svg_text(12, 90, "…", size=18, fill=_FAINT, anchor="middle")]


def _escaped(words: str) -> str:
    """Escape text for XML, which cannot contain most control characters."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in words))


def _svg_rect(box: _Box, *, style: str) -> str:
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
    anchor: str = "start",
    more: str = "",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}"{more}>{_escaped(words)}</text>'
    )


_TEXT_WIDTH = 96  # columns, approximately


def draw_mesh(
    layout: MeshLayout,
    *,
    names: Sequence[str] | None = None,
    rank: int | None = None,
    ranks_per_host: int | None = None,
    start: int = 0,
    rank_map: Sequence[int] | None = None,
    svg: bool = False,
) -> str:
    """Draw a mesh as text, or as an SVG image: one block per position on all but two axes.

    As text, `rank` is in brackets and lines separate hosts. As SVG, each host is a box, and the
    groups of `rank` have one colour and outline per axis. `start` is the first rank of the copy of
    the layout to draw; `rank_map` gives the global rank for each of the layout's.
    """
    digits = len(str(start + layout.cosize()))
    columns = 8 if svg else max(4, min(16, (_TEXT_WIDTH - 16) // (digits + 3)))
    view = make_view(
        layout,
        names=names,
        rank=rank,
        ranks_per_host=ranks_per_host,
        limits=_limits(layout, rows=16 if svg else 32, columns=columns),
        start=start,
        rank_map=rank_map,
    )
    return _render_svg(view) if svg else _render_text(view)


def _render_text(view: MeshView) -> str:
    lines = [view.title, *([view.place] if view.place else [])]
    if view.labels:
        for block in view.blocks:
            lines += ["", "…"] if block is None else ["", *_text_block(view, block)]
    return "\n".join(line.rstrip() for line in lines)


def _limits(layout: MeshLayout, *, rows: int, columns: int) -> ViewLimits:
    """Choose how much to show, with at most `rows` rows in all blocks together."""
    *outer, height = (1, *layout.top_level_sizes[:-1])
    blocks = math.prod(outer)
    if blocks * height <= rows:
        return ViewLimits(blocks=blocks, rows=height, columns=columns)
    if blocks == 1:
        return ViewLimits(blocks=1, rows=rows // 2, columns=columns)
    return ViewLimits(blocks=3, rows=min(rows // 3, 6), columns=columns)


def _text_block(view: MeshView, block: ViewBlock) -> list[str]:
    cells = [cell for row in block.cells for cell in row if cell is not None]
    width = 2 + max(len(str(cell.rank)) for cell in cells)
    labels = _row_labels(view, block)
    margin = max(map(len, labels))
    head = "".join(_column_heading(place, width) for place in block.columns)
    lines = [block.title] if block.title else []
    lines.append(f"{' ' * margin}  {head} {view.labels[-1]}")
    rows = [_text_row(row, width) for row in block.cells]
    has_rules = _host_spans_rows(block)
    for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
        if has_rules and number:
            rule = _host_rule(block.cells[number - 1], block.cells[number], width)
            lines += [f"{' ' * margin}  {rule}"] if "─" in rule else []
        lines.append(f"{label:>{margin}}  {row}{_row_hosts(block.cells[number])}")
    return lines


def _row_labels(view: MeshView, block: ViewBlock) -> list[str]:
    if len(view.labels) < 2:
        return [""]
    name = view.labels[-2]
    return ["…" if place is None else f"{name}={place}" for place in block.rows]


def _column_heading(place: int | None, width: int) -> str:
    return f"{'…' if place is None else place:>{width - 1}}  "


def _text_row(row: Sequence[ViewCell | None], width: int) -> str:
    pieces = []
    for position, cell in enumerate(row):
        if cell is None:
            pieces.append(f"{'…':>{width - 1}} ")
        else:
            pieces.append(f"{f'[{cell.rank}]' if cell.is_mine else f'{cell.rank} ':>{width}}")
        following = row[position + 1] if position + 1 < len(row) else None
        pieces.append("│" if _on_different_hosts(cell, following) else " ")
    return "".join(pieces)


def _host_rule(
    above: Sequence[ViewCell | None], below: Sequence[ViewCell | None], width: int
) -> str:
    """Return the line between two rows, drawn where the host changes."""
    pieces = []
    for column, (upper, lower) in enumerate(zip(above, below, strict=True)):
        differs = _on_different_hosts(upper, lower)
        pieces.append(("─" if differs else " ") * width)
        crosses = any(
            _on_different_hosts(*row[column : column + 2])
            for row in (above, below)
            if row[column + 1 :]
        )
        pieces.append("┼" if differs and crosses else "─" if differs else "│" if crosses else " ")
    return "".join(pieces)


def _host_spans_rows(block: ViewBlock) -> bool:
    """Whether any host has ranks in two adjacent rows."""
    return any(
        _on_same_host(upper, lower)
        for above, below in pairwise(block.cells)
        for upper, lower in zip(above, below, strict=True)
    )


def _row_hosts(row: Sequence[ViewCell | None]) -> str:
    hosts = sorted({cell.host for cell in row if cell is not None and cell.host is not None})
    if not hosts:
        return ""
    if len(hosts) == 1:
        return f" host {hosts[0]}"
    joint = "-" if hosts[-1] - hosts[0] == len(hosts) - 1 else "…"
    return f" hosts {hosts[0]}{joint}{hosts[-1]}"


def _on_different_hosts(one: ViewCell | None, other: ViewCell | None) -> bool:
    return one is not None and other is not None and one.host != other.host


def _on_same_host(one: ViewCell | None, other: ViewCell | None) -> bool:
    return one is not None and other is not None and one.host == other.host is not None
