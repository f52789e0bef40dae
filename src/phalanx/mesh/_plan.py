"""The plan behind `phalanx mesh`: coordinates, groups and hosts of a mesh before any rank runs.

Used by the command line, so it must not import torch.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict, dataclass, replace

from .._formatting import format_count, format_table
from ..errors import InvalidArgument
from ._drawing import MeshView
from .layout import MeshLayout, format_rank_pattern


@dataclass(frozen=True, slots=True)
class AxisPlan:
    """One axis of a planned mesh, and the group along it of the plan's rank, if it has one."""

    name: str
    size: int
    stride: int
    crosses_hosts: bool
    coordinate: int | None = None
    group: str | None = None
    """The ranks of the group, as ``1-897:128``."""
    first_host: int | None = None
    host_count: int | None = None  # on how many hosts the group is


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A mesh, and the position of one rank in it."""

    layout: MeshLayout
    names: tuple[str, ...] | None
    rank: int | None
    ranks_per_host: int | None

    def axes(self) -> list[AxisPlan]:
        return [self._plan_axis(axis) for axis in range(len(self.layout))]

    def _plan_axis(self, axis: int) -> AxisPlan:
        name = self.names[axis] if self.names else f"axis {axis}"
        stride = self._stride(axis)
        plan = AxisPlan(name, self.layout[axis].numel(), stride, self.crosses_hosts(axis))
        if self.rank is None:
            return plan
        ranks = self.layout.ranks_of_group(self.rank, axis)
        per_host = self.ranks_per_host or self.layout.numel()
        first, last = ranks[0] // per_host, ranks[-1] // per_host
        return replace(
            plan,
            coordinate=self.layout.locate(self.rank)[1][axis],
            group=format_rank_pattern(ranks),
            first_host=first,
            # Strides smaller than a host skip no host; larger ones visit a new host each time.
            host_count=last - first + 1 if stride < per_host else len(ranks),
        )

    def text(self, *, picture: bool = False) -> str:
        """Return a table of the axes, optionally below a drawing."""
        drawn = self.draw()
        head = drawn if picture else "\n".join(drawn.splitlines()[: 1 if self.rank is None else 2])
        titles = ["axis", "size", "stride"]
        if self.ranks_per_host is not None:
            titles.append("crosses hosts")
        if self.rank is not None:
            titles += ["at", f"group of rank {self.rank}"]
        rows = []
        for axis in self.axes():
            row = [axis.name, str(axis.size), str(axis.stride)]
            if self.ranks_per_host is not None:
                row.append("yes" if axis.crosses_hosts else "no")
            if axis.group is not None:
                row += [str(axis.coordinate), axis.group]
            if axis.group is not None and self.ranks_per_host is not None:
                hosts = f"host {axis.first_host}"
                row[-1] += f" on {hosts if axis.host_count == 1 else f'{axis.host_count} hosts'}"
            rows.append(row)
        return "\n".join([head, "", *format_table(titles, rows)])

    def to_json(self) -> str:
        facts = {"ranks": self.layout.numel(), "ranks_per_host": self.ranks_per_host}
        axes = [asdict(axis) for axis in self.axes()]
        return json.dumps({**facts, "rank": self.rank, "axes": axes}, indent=2)

    def crosses_hosts(self, axis: int) -> bool:
        """Whether any group along the axis has ranks on several hosts."""
        size, per_host = self.layout.top_level_sizes[axis], self.ranks_per_host
        if per_host is None or per_host == self.layout.numel():
            return False
        # Groups fill a block of size * stride ranks. If hosts end only at block ends, no group is
        # split; otherwise the first host to end inside a block splits at least one group.
        return size > 1 and per_host % (size * self._stride(axis)) != 0

    def _stride(self, axis: int) -> int:
        return self.layout[axis + 1 :].numel()

    def draw(self, *, svg: bool = False) -> str:
        names, rank, per_host = self.names, self.rank, self.ranks_per_host
        view = MeshView(self.layout, names=names, rank=rank, ranks_per_host=per_host, svg=svg)
        return view.draw()


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
    return MeshPlan(layout=layout, names=labels, rank=rank, ranks_per_host=per_host)


def _parse_names(names: str | None, *, shape: str, count: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    parts = tuple(name.strip() for name in names.split(","))
    if len(parts) != count:
        raise InvalidArgument(
            f"--names has {format_count(len(parts), 'name')}, but shape {shape} has {count} "
            f"{'axis' if count == 1 else 'axes'}"
        )
    for name in parts:
        if not name:
            raise InvalidArgument("--names has an empty name")
        if parts.count(name) > 1:
            raise InvalidArgument(f"--names has {name!r} twice")
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
