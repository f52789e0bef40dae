"""The plan behind `phalanx mesh`: coordinates, groups and hosts of a mesh before any rank runs.

Used by the command line, so it must not import torch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._formatting import format_table
from ..errors import InvalidArgument
from . import _drawing
from .layout import MeshLayout, format_ranks


class AxisPlan(NamedTuple):
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
        drawn = self.draw()
        head = drawn if picture else "\n".join(drawn.splitlines()[: 1 if self.rank is None else 2])
        titles = ["axis", "size", "stride"]
        rows = [[axis.label, str(axis.size), str(axis.stride)] for axis in self.axes]
        if self.ranks_per_host is not None:
            titles.append("crosses hosts")
            for axis, row in zip(self.axes, rows, strict=True):
                row.append("yes" if axis.crosses_hosts else "no")
        if self.rank is not None:
            titles += ["at", f"group of rank {self.rank}"]
            for axis, row in zip(self.axes, rows, strict=True):
                row += [str(axis.coordinate), format_ranks(axis.ranks) + self._group_hosts(axis)]
        return "\n".join([head, "", *format_table(titles, rows)])

    def draw(self, *, svg: bool = False) -> str:
        """Draw the mesh as text or as SVG."""
        return _drawing.draw_mesh(
            self.layout,
            names=self.names,
            rank=self.rank,
            ranks_per_host=self.ranks_per_host,
            svg=svg,
        )

    def _group_hosts(self, axis: AxisPlan) -> str:
        if self.ranks_per_host is None:
            return ""
        first, last = (axis.ranks[end] // self.ranks_per_host for end in (0, -1))
        if first == last:
            return f" on host {first}"
        # Strides smaller than a host skip no host; larger ones visit a new host each time.
        count = last - first + 1 if axis.stride < self.ranks_per_host else axis.size
        return f" on {count} hosts"


def plan_mesh(
    shape: str, *, names: str | None = None, rank: int | None = None, hosts: int | None = None
) -> MeshPlan:
    """Plan a mesh such as ``8x16x8``, with names such as ``dp,pp,tp``."""
    words = re.split(r"[xX×,]", shape.strip())  # noqa: RUF001 - both are typed
    if not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", word) for word in words):
        raise InvalidArgument(f"shape must be sizes separated by x, such as 8x16x8, got {shape!r}")
    sizes = tuple(map(int, words))
    if min(sizes) < 1:
        raise InvalidArgument(f"shape {shape!r} has size {min(sizes)}: the minimum is 1")
    count = math.prod(sizes)
    if count > sys.maxsize:
        raise InvalidArgument(f"shape {shape!r} has more than {sys.maxsize} ranks")
    layout = MeshLayout.from_sizes_strides(sizes)
    labels = _parse_names(names, shape=shape, count=len(sizes))
    per_host = None if hosts is None else _ranks_per_host(hosts, count)
    if rank is not None and not 0 <= rank < count:
        raise InvalidArgument(
            f"rank {rank} is out of range: a mesh of {count} ranks has ranks 0 to {count - 1}"
        )
    coordinate = None if rank is None else layout.coordinate_of(rank)
    axes = []
    for axis, size in enumerate(sizes):
        stride = layout[axis + 1 :].numel()
        axes.append(
            AxisPlan(
                label=labels[axis] if labels else f"axis {axis}",
                size=size,
                stride=stride,
                crosses_hosts=_crosses_hosts(size, stride, ranks=count, ranks_per_host=per_host),
                coordinate=None if coordinate is None else coordinate[axis],
                ranks=() if rank is None else layout.ranks_of_group(rank, axis),
            )
        )
    return MeshPlan(
        layout=layout, names=labels, rank=rank, ranks_per_host=per_host, axes=tuple(axes)
    )


def _crosses_hosts(
    size: int, stride: int, *, ranks: int, ranks_per_host: int | None
) -> bool | None:
    if ranks_per_host is None:
        return None
    # Groups fill a block of size * stride ranks. If hosts end only at block ends, no group is
    # split; otherwise the first host to end inside a block splits at least one group.
    return size > 1 and ranks_per_host < ranks and ranks_per_host % (size * stride) != 0


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


def _ranks_per_host(hosts: int, ranks: int) -> int:
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
