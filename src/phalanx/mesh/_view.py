"""What a picture of a mesh shows: a few blocks of cells, however large the mesh is.

The last axis runs along the columns of a block and the one before it along the rows; there is a
block for each place along the axes before those. Of a long axis the ends and the surroundings of
this rank are shown, and None stands for what is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import InvalidArgument
from .layout import MeshLayout

__all__ = ["Block", "Cell", "Limits", "View", "look", "shown"]

Places: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One rank in a picture."""

    rank: int
    """Its global rank."""
    host: int | None
    """The number of its host, if hosts are known."""
    is_mine: bool
    """Whether it is the rank that the picture is drawn for."""
    axis: int | None
    """The axis along which it is in that rank's group, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Two axes of a mesh, at one place along the others."""

    title: str
    rows: Places
    columns: Places
    cells: tuple[tuple[Cell | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a mesh is shown."""

    blocks: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a picture shows."""

    title: str
    """The axes and their sizes, how many ranks, how many hosts."""
    place: str
    """Where this rank is; empty if it is not in the mesh, or none is given."""
    labels: tuple[str, ...]
    """What the axes are called."""
    blocks: tuple[Block | None, ...]
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    """What is known of a mesh: plain data."""

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


def look(
    layout: MeshLayout,
    *,
    names: Sequence[str] | None,
    rank: int | None,
    ranks_per_host: int | None,
    limits: Limits,
    start: int = 0,
    rank_map: Sequence[int] | None = None,
) -> View:
    """Return what to show of a mesh."""
    if names is not None and len(names) != len(layout):
        raise InvalidArgument(f"{len(names)} names {tuple(names)} for {len(layout)} axes")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise InvalidArgument(f"ranks_per_host has to be at least 1, and not {ranks_per_host}")
    mesh = _Mesh(
        layout=layout,
        labels=tuple(names) if names else tuple(f"axis {axis}" for axis in range(len(layout))),
        start=start,
        rank_map=rank_map,
        ranks_per_host=ranks_per_host,
    )
    here = None if rank is None else mesh.coordinate_of(rank)
    return View(
        title=_title(mesh, named=bool(names)),
        place=_place(mesh, rank, here),
        labels=mesh.labels,
        blocks=_blocks(mesh, here, limits),
        rank=None if here is None else rank,
    )


def shown(size: int, *, here: int | None, limit: int) -> Places:
    """Return which places of an axis to show: its ends, and what is around `here`."""
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


def _title(mesh: _Mesh, *, named: bool) -> str:
    parts = [
        f"{label}={size}" if named else str(size)
        for label, size in zip(mesh.labels, mesh.layout.top_level_sizes, strict=True)
    ]
    shape = " × ".join(parts)  # noqa: RUF001 - the sign for it
    count = mesh.layout.numel()
    ranks = f"{count} {'rank' if count == 1 else 'ranks'}"
    hosts = "" if mesh.ranks_per_host is None else f", hosts of {mesh.ranks_per_host}"
    return f"{shape}: {ranks}{hosts}" if len(parts) > 1 or named else f"{ranks}{hosts}"


def _place(mesh: _Mesh, rank: int | None, here: tuple[int, ...] | None) -> str:
    if rank is None:
        return ""
    if here is None:
        return f"rank {rank} is not in this mesh"
    parts = [f"{label}={number}" for label, number in zip(mesh.labels, here, strict=True)]
    host = "" if mesh.ranks_per_host is None else f", on host {rank // mesh.ranks_per_host}"
    return f"rank {rank} is at {', '.join(parts) or 'the only place'}{host}"


def _blocks(mesh: _Mesh, here: tuple[int, ...] | None, limits: Limits) -> tuple[Block | None, ...]:
    sizes = mesh.layout.top_level_sizes
    outer = MeshLayout.from_sizes_strides(sizes[:-2])
    index = None if here is None else outer.rank_of(here[:-2])
    blocks: list[Block | None] = []
    for place in shown(outer.numel(), here=index, limit=limits.blocks):
        lead = None if place is None else outer.coordinate_of(place)
        blocks.append(None if lead is None else _block(mesh, lead, here, limits))
    return tuple(blocks)


def _block(
    mesh: _Mesh, lead: tuple[int, ...], here: tuple[int, ...] | None, limits: Limits
) -> Block:
    inner = mesh.layout.top_level_sizes[len(lead) :]
    near = (None,) * len(inner) if here is None else here[len(lead) :]
    bounds = [limits.rows, limits.columns][2 - len(inner) :]
    places = [
        shown(size, here=at, limit=limit)
        for size, at, limit in zip(inner, near, bounds, strict=True)
    ]
    # A mesh of one axis is a single row, and one of none is a single cell.
    columns = places[-1] if places else (0,)
    rows = places[0] if len(places) == 2 else (0,)

    def cell(row: int | None, column: int | None) -> Cell | None:
        if row is None or column is None:
            return None
        return _cell(mesh, (*lead, *(row, column)[2 - len(inner) :]), here)

    named = zip(mesh.labels, lead, strict=False)
    return Block(
        title=", ".join(f"{label}={number}" for label, number in named),
        rows=rows,
        columns=columns,
        cells=tuple(tuple(cell(row, column) for column in columns) for row in rows),
    )


def _cell(mesh: _Mesh, coordinate: tuple[int, ...], here: tuple[int, ...] | None) -> Cell:
    rank = mesh.rank_at(coordinate)
    differs = (
        []
        if here is None
        else [axis for axis, number in enumerate(coordinate) if number != here[axis]]
    )
    return Cell(
        rank=rank,
        host=None if mesh.ranks_per_host is None else rank // mesh.ranks_per_host,
        is_mine=coordinate == here,
        axis=differs[0] if len(differs) == 1 else None,
    )
