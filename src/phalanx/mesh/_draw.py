"""Pictures of a mesh, from plain data: as text here, as SVG in `_svg`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ._svg import render
from ._view import Block, Cell, Limits, View, look
from .layout import MeshLayout

__all__ = ["svg", "text"]

_LINE = 96
"""How wide text may be, about."""


def text(
    layout: MeshLayout,
    *,
    names: Sequence[str] | None = None,
    rank: int | None = None,
    ranks_per_host: int | None = None,
    start: int = 0,
    rank_map: Sequence[int] | None = None,
) -> str:
    """Draw a mesh as text: a block of ranks for each place along all but the last two axes.

    `rank` is marked with brackets; a line lies between ranks of different hosts. `start` is where
    the copy of the layout is that is drawn, and `rank_map` has the global rank for each of the
    layout's.
    """
    digits = len(str(start + layout.cosize()))
    columns = max(4, min(16, (_LINE - 16) // (digits + 3)))
    view = look(
        layout,
        names=names,
        rank=rank,
        ranks_per_host=ranks_per_host,
        limits=_limits(layout, rows=32, columns=columns),
        start=start,
        rank_map=rank_map,
    )
    lines = [view.title, *([view.place] if view.place else [])]
    if len(layout):
        for block in view.blocks:
            lines += ["", "…"] if block is None else ["", *_block_lines(view, block)]
    return "\n".join(line.rstrip() for line in lines)


def svg(
    layout: MeshLayout,
    *,
    names: Sequence[str] | None = None,
    rank: int | None = None,
    ranks_per_host: int | None = None,
    start: int = 0,
    rank_map: Sequence[int] | None = None,
) -> str:
    """Draw a mesh as an SVG image; the arguments are those of `text`.

    Each host is a box, and the groups of `rank` are coloured, one colour and one outline per axis.
    """
    view = look(
        layout,
        names=names,
        rank=rank,
        ranks_per_host=ranks_per_host,
        limits=_limits(layout, rows=16, columns=8),
        start=start,
        rank_map=rank_map,
    )
    return render(view)


def _limits(layout: MeshLayout, *, rows: int, columns: int) -> Limits:
    """Return how much to show, given how many rows there may be in all blocks together."""
    *outer, height = (1, *layout.top_level_sizes[:-1])
    blocks = math.prod(outer)
    if blocks * height <= rows:
        return Limits(blocks=blocks, rows=height, columns=columns)
    if blocks == 1:
        return Limits(blocks=1, rows=rows // 2, columns=columns)
    return Limits(blocks=3, rows=min(rows // 3, 6), columns=columns)


def _block_lines(view: View, block: Block) -> list[str]:
    cells = [cell for row in block.cells for cell in row if cell is not None]
    width = 2 + max(len(str(cell.rank)) for cell in cells)
    labels = _row_labels(view, block)
    margin = max(map(len, labels))
    head = "".join(_head(place, width) for place in block.columns)
    lines = [block.title] if block.title else []
    lines.append(f"{' ' * margin}  {head} {view.labels[-1]}")
    rows = [_row(row, width) for row in block.cells]
    has_rules = _host_has_rows(block)
    for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
        if has_rules and number:
            rule = _rule(block.cells[number - 1], block.cells[number], width)
            lines += [f"{' ' * margin}  {rule}"] if "─" in rule else []
        lines.append(f"{label:>{margin}}  {row}{_hosts(block.cells[number])}")
    return lines


def _row_labels(view: View, block: Block) -> list[str]:
    if len(view.labels) < 2:
        return [""]
    name = view.labels[-2]
    return ["…" if place is None else f"{name}={place}" for place in block.rows]


def _head(place: int | None, width: int) -> str:
    return f"{'…' if place is None else place:>{width - 1}}  "


def _row(row: Sequence[Cell | None], width: int) -> str:
    pieces = []
    for position, cell in enumerate(row):
        if cell is None:
            pieces.append(f"{'…':>{width - 1}} ")
        else:
            pieces.append(f"{f'[{cell.rank}]' if cell.is_mine else f'{cell.rank} ':>{width}}")
        following = row[position + 1] if position + 1 < len(row) else None
        pieces.append("│" if _differ(cell, following) else " ")
    return "".join(pieces)


def _rule(above: Sequence[Cell | None], below: Sequence[Cell | None], width: int) -> str:
    """Return the line between two rows: under each cell that is on another host than the next."""
    pieces = []
    for column, (upper, lower) in enumerate(zip(above, below, strict=True)):
        differs = _differ(upper, lower)
        pieces.append(("─" if differs else " ") * width)
        crosses = any(
            _differ(*row[column : column + 2]) for row in (above, below) if row[column + 1 :]
        )
        pieces.append("┼" if differs and crosses else "─" if differs else "│" if crosses else " ")
    return "".join(pieces)


def _host_has_rows(block: Block) -> bool:
    """Tell whether any host has ranks in two rows, so that it takes a line to tell them apart."""
    return any(
        _same(upper, lower)
        for above, below in pairwise(block.cells)
        for upper, lower in zip(above, below, strict=True)
    )


def _hosts(row: Sequence[Cell | None]) -> str:
    hosts = sorted({cell.host for cell in row if cell is not None and cell.host is not None})
    if not hosts:
        return ""
    if len(hosts) == 1:
        return f" host {hosts[0]}"
    joint = "-" if hosts[-1] - hosts[0] == len(hosts) - 1 else "…"
    return f" hosts {hosts[0]}{joint}{hosts[-1]}"


def _differ(one: Cell | None, other: Cell | None) -> bool:
    return one is not None and other is not None and one.host != other.host


def _same(one: Cell | None, other: Cell | None) -> bool:
    return one is not None and other is not None and one.host == other.host is not None
