"""The plan behind `phalanx mesh`: coordinates, groups and hosts of a mesh before any rank runs.

Used by the command line, so it must not import torch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidArgument
from . import _drawing
from .layout import MeshLayout

_MAX_RANKS_SHOWN = 8
"""How many ranks are written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """One axis of a planned mesh."""

    label: str
    size: int
    stride: int
    crosses_hosts: bool | None
    """Whether any group along it has ranks on several hosts; None if hosts are not known."""
    place: int | None
    """Where the rank is on it, if one is given."""
    ranks: Sequence[int]
    """The rank's group along it, if one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A mesh by its shape, and what is known of the ranks that will be in it."""

    layout: MeshLayout
    names: tuple[str, ...] | None
    rank: int | None
    ranks_per_host: int | None
    axes: tuple[AxisPlan, ...]

    def text(self, *, picture: bool = False) -> str:
        """Return the plan as lines to read: a table of the axes, or with a picture before it."""
        drawn = _drawing.text(
            self.layout, names=self.names, rank=self.rank, ranks_per_host=self.ranks_per_host
        )
        head = drawn if picture else "\n".join(drawn.splitlines()[: 1 if self.rank is None else 2])
        return f"{head}\n\n{self._table()}"

    def svg(self) -> str:
        """Return a picture of the mesh."""
        return _drawing.svg(
            self.layout, names=self.names, rank=self.rank, ranks_per_host=self.ranks_per_host
        )

    def _table(self) -> str:
        titles = ["axis", "size", "stride"]
        if self.ranks_per_host is not None:
            titles.append("crosses hosts")
        if self.rank is not None:
            titles += ["at", f"group of rank {self.rank}"]
        rows = [titles, *(self._row(axis) for axis in self.axes)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [word.ljust(width) for word, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _row(self, axis: AxisPlan) -> list[str]:
        row = [axis.label, str(axis.size), str(axis.stride)]
        if self.ranks_per_host is not None:
            row.append("yes" if axis.crosses_hosts else "no")
        if self.rank is not None:
            row += [str(axis.place), self._group(axis)]
        return row

    def _group(self, axis: AxisPlan) -> str:
        if self.ranks_per_host is None:
            return format_strided_ranks(axis.ranks)
        first, last = (axis.ranks[end] // self.ranks_per_host for end in (0, -1))
        if first == last:
            return f"{format_strided_ranks(axis.ranks)} on host {first}"
        # Steps smaller than a host leave none out; larger ones never stay on one.
        count = last - first + 1 if axis.stride < self.ranks_per_host else axis.size
        return f"{format_strided_ranks(axis.ranks)} on {count} hosts"


def plan_mesh(
    shape: str, *, names: str | None = None, rank: int | None = None, hosts: int | None = None
) -> MeshPlan:
    """Return the plan of a mesh such as ``8x16x8``, with names such as ``dp,pp,tp``."""
    sizes = _parse_shape(shape)
    layout = MeshLayout.from_sizes_strides(sizes)
    labels = _parse_names(names, shape=shape, count=len(sizes))
    per_host = _ranks_per_host(hosts, layout.numel())
    if rank is not None and not 0 <= rank < layout.numel():
        raise InvalidArgument(
            f"rank {rank} is not in a mesh of {layout.numel()} ranks: "
            f"give one from 0 to {layout.numel() - 1}"
        )
    axes = [
        _plan_axis(layout, axis, label=label, rank=rank, ranks_per_host=per_host)
        for axis, label in enumerate(labels or [f"axis {axis}" for axis in range(len(sizes))])
    ]
    return MeshPlan(
        layout=layout, names=labels, rank=rank, ranks_per_host=per_host, axes=tuple(axes)
    )


def format_strided_ranks(ranks: Sequence[int]) -> str:
    """Write ranks that are evenly spaced: ``0-7``, ``1,3,5``, or ``512,520,528,…,632``."""
    if len(ranks) > 2 and ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MAX_RANKS_SHOWN:
        return ",".join(map(str, ranks))
    return ",".join([*map(str, ranks[:3]), "…", str(ranks[-1])])


def _plan_axis(
    layout: MeshLayout, axis: int, *, label: str, rank: int | None, ranks_per_host: int | None
) -> AxisPlan:
    size = layout.top_level_sizes[axis]
    stride = layout[axis + 1 :].numel()
    crosses = None
    if ranks_per_host is not None:
        # Groups fill a block of size * stride ranks. If hosts end only where such blocks do, none
        # is cut; else the first host to end inside a block cuts at least one of its groups.
        one_host = ranks_per_host == layout.numel()
        crosses = size > 1 and not one_host and ranks_per_host % (size * stride) != 0
    coordinate = None if rank is None else layout.coordinate_of(rank)
    return AxisPlan(
        label=label,
        size=size,
        stride=stride,
        crosses_hosts=crosses,
        place=None if coordinate is None else coordinate[axis],
        ranks=() if rank is None else layout.ranks_of_group(rank, axis),
    )


def _parse_shape(shape: str) -> tuple[int, ...]:
    words = re.split(r"[xX×,]", shape.strip())  # noqa: RUF001 - both are typed
    if not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", word) for word in words):
        raise InvalidArgument(
            f"shape {shape!r} is not one: give sizes with an x between, as 8x16x8"
        )
    sizes = tuple(map(int, words))
    if min(sizes) < 1:
        raise InvalidArgument(f"shape {shape!r} has size {min(sizes)}: an axis has 1 rank or more")
    if math.prod(sizes) > sys.maxsize:
        raise InvalidArgument(f"shape {shape!r} has more ranks than {sys.maxsize}: give fewer")
    return sizes


def _parse_names(names: str | None, *, shape: str, count: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    parts = tuple(name.strip() for name in names.split(","))
    if len(parts) != count:
        raise InvalidArgument(
            f"names {names!r} are {len(parts)}, and shape {shape!r} has {count} "
            f"{'axis' if count == 1 else 'axes'}: give one name for each, with a comma between"
        )
    for name in parts:
        if not name:
            raise InvalidArgument(f"names {names!r} have an empty one: give every axis a name")
        if parts.count(name) > 1:
            raise InvalidArgument(f"names {names!r} have {name!r} twice: give each axis its own")
    return parts


def _ranks_per_host(hosts: int | None, ranks: int) -> int | None:
    if hosts is None:
        return None
    if hosts < 1:
        raise InvalidArgument(f"{hosts} hosts cannot hold {ranks} ranks: give 1 or more")
    if ranks % hosts:
        # The next smaller divisor, if it is close; their common divisor always is one.
        most = min(hosts, ranks)
        close = (count for count in range(most, max(0, most - 1000), -1) if ranks % count == 0)
        near = next(close, math.gcd(ranks, hosts))
        raise InvalidArgument(
            f"{ranks} ranks do not divide among {hosts} hosts: give a number that divides {ranks}, "
            f"such as {near}"
        )
    return ranks // hosts
