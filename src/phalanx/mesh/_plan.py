"""The plan behind `phalanx mesh`: coordinates, groups and hosts of a mesh before any rank runs.

Used by the command line, so it must not import torch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .._formatting import format_table
from ..errors import InvalidArgument
from . import _drawing
from .layout import MeshLayout, format_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """One axis of a planned mesh."""

    label: str
    size: int
    stride: int
    crosses_hosts: bool | None
    """Whether any group along the axis has ranks on several hosts; None if hosts are unknown."""
    coordinate: int | None
    """The coordinate of the planned rank, if there is one."""
    ranks: Sequence[int]
    """The group of the planned rank, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A mesh, and the position of one rank in it."""

    layout: MeshLayout
    names: tuple[str, ...] | None
    rank: int | None
    ranks_per_host: int | None
    axes: tuple[AxisPlan, ...]

    def text(self, *, picture: bool = False) -> str:
        """Return a table of the axes, optionally below a drawing."""
        drawn = self._draw(svg=False)
        head = drawn if picture else "\n".join(drawn.splitlines()[: 1 if self.rank is None else 2])
        return f"{head}\n\n{self._table()}"

    def svg(self) -> str:
        """Return an SVG drawing of the mesh."""
        return self._draw(svg=True)

    def _draw(self, *, svg: bool) -> str:
        return _drawing.draw_mesh(
            self.layout,
            names=self.names,
            rank=self.rank,
            ranks_per_host=self.ranks_per_host,
            svg=svg,
        )

    def _table(self) -> str:
        titles = ["axis", "size", "stride"]
        if self.ranks_per_host is not None:
            titles.append("crosses hosts")
        if self.rank is not None:
            titles += ["at", f"group of rank {self.rank}"]
        return "\n".join(format_table(titles, [self._row(axis) for axis in self.axes]))

    def _row(self, axis: AxisPlan) -> list[str]:
        row = [axis.label, str(axis.size), str(axis.stride)]
        if self.ranks_per_host is not None:
            row.append("yes" if axis.crosses_hosts else "no")
        if self.rank is not None:
            row += [str(axis.coordinate), self._group(axis)]
        return row

    def _group(self, axis: AxisPlan) -> str:
        if self.ranks_per_host is None:
            return format_ranks(axis.ranks)
        first, last = (axis.ranks[end] // self.ranks_per_host for end in (0, -1))
        if first == last:
            return f"{format_ranks(axis.ranks)} on host {first}"
        # Strides smaller than a host skip no host; larger ones visit a new host each time.
        count = last - first + 1 if axis.stride < self.ranks_per_host else axis.size
        return f"{format_ranks(axis.ranks)} on {count} hosts"


def plan_mesh(
    shape: str, *, names: str | None = None, rank: int | None = None, hosts: int | None = None
) -> MeshPlan:
    """Plan a mesh such as ``8x16x8``, with names such as ``dp,pp,tp``."""
    sizes = _parse_shape(shape)
    layout = MeshLayout.from_sizes_strides(sizes)
    labels = _parse_names(names, shape=shape, count=len(sizes))
    per_host = _ranks_per_host(hosts, layout.numel())
    if rank is not None and not 0 <= rank < layout.numel():
        raise InvalidArgument(
            f"rank {rank} is out of range: a mesh of {layout.numel()} ranks has ranks 0 to "
            f"{layout.numel() - 1}"
        )
    axes = [
        _plan_axis(layout, axis, label=label, rank=rank, ranks_per_host=per_host)
        for axis, label in enumerate(labels or [f"axis {axis}" for axis in range(len(sizes))])
    ]
    return MeshPlan(
        layout=layout, names=labels, rank=rank, ranks_per_host=per_host, axes=tuple(axes)
    )


def _plan_axis(
    layout: MeshLayout, axis: int, *, label: str, rank: int | None, ranks_per_host: int | None
) -> AxisPlan:
    size = layout.top_level_sizes[axis]
    stride = layout[axis + 1 :].numel()
    crosses = None
    if ranks_per_host is not None:
        # Groups fill a block of size * stride ranks. If hosts end only at block ends, no group is
        # split; otherwise the first host to end inside a block splits at least one group.
        one_host = ranks_per_host == layout.numel()
        crosses = size > 1 and not one_host and ranks_per_host % (size * stride) != 0
    coordinate = None if rank is None else layout.coordinate_of(rank)
    return AxisPlan(
        label=label,
        size=size,
        stride=stride,
        crosses_hosts=crosses,
        coordinate=None if coordinate is None else coordinate[axis],
        ranks=() if rank is None else layout.ranks_of_group(rank, axis),
    )


def _parse_shape(shape: str) -> tuple[int, ...]:
    words = re.split(r"[xX×,]", shape.strip())  # noqa: RUF001 - both are typed
    if not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", word) for word in words):
        raise InvalidArgument(f"shape must be sizes separated by x, such as 8x16x8, got {shape!r}")
    sizes = tuple(map(int, words))
    if min(sizes) < 1:
        raise InvalidArgument(f"shape {shape!r} has size {min(sizes)}: the minimum is 1")
    if math.prod(sizes) > sys.maxsize:
        raise InvalidArgument(f"shape {shape!r} has more than {sys.maxsize} ranks")
    return sizes


def _parse_names(names: str | None, *, shape: str, count: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    parts = tuple(name.strip() for name in names.split(","))
    if len(parts) != count:
        raise InvalidArgument(
            f"names {names!r} are {len(parts)}, but shape {shape!r} has {count} "
            f"{'axis' if count == 1 else 'axes'}: pass one name per axis, separated by commas"
        )
    for name in parts:
        if not name:
            raise InvalidArgument(f"names {names!r} have an empty name")
        if parts.count(name) > 1:
            raise InvalidArgument(f"names {names!r} have {name!r} twice")
    return parts


def _ranks_per_host(hosts: int | None, ranks: int) -> int | None:
    if hosts is None:
        return None
    if hosts < 1:
        raise InvalidArgument(f"hosts must be at least 1, got {hosts}")
    if ranks % hosts:
        # Suggest the next smaller divisor if it is close, else the greatest common divisor.
        most = min(hosts, ranks)
        close = (count for count in range(most, max(0, most - 1000), -1) if ranks % count == 0)
        near = next(close, math.gcd(ranks, hosts))
        raise InvalidArgument(
            f"{ranks} ranks do not divide among {hosts} hosts: pass a divisor of {ranks}, "
            f"such as {near}"
        )
    return ranks // hosts
