"""Layouts: where the ranks of a mesh are, as arithmetic.

A `FlatLayout` is one axis: a list of ranks that starts at 0, written as nested sizes and strides.
A `MeshLayout` is several of them; the rank at a coordinate is the sum of what its axes say. Neither
knows of processes or groups, and neither holds more than a few numbers, however many ranks there
are: a question about one rank is answered from the strides.

A layout says where *its copy at 0* is. The same layout moved along covers the rest of the world:
``FlatLayout(4, 2)`` is ranks 0, 2, 4, 6, and in a world of 8 the other copy is 1, 3, 5, 7. Layouts
of which this is true are *orthogonal*; those of slices, flattened and unflattened meshes are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

from ..errors import InvalidArgument, InvalidType
from ._integers import IntTuple, contiguous, integers, structure
from ._loops import (
    Loop,
    Loops,
    add_up,
    compose,
    digits_at,
    enumerate_ranks,
    find_digits,
    gaps,
    has_repeats,
    merge,
    place_in_tile,
    reach,
    tiles,
)

if TYPE_CHECKING:
    import torch

__all__ = ["FlatLayout", "MeshLayout"]


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class FlatLayout:
    """One axis: ranks in order, from 0, as sizes and strides with the outermost first.

    Without strides the ranks are 0, 1, 2, ... Sizes and strides are kept in the shortest form, so
    two layouts are equal if and only if they hold the same ranks in the same order.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    _loops: Loops
    _hash: int

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        sizes = integers(shape, name="shape", least=1)
        if stride is None:
            steps = contiguous(sizes)
        else:
            steps = integers(stride, name="stride", least=0)
            if structure(shape) != structure(stride):
                raise InvalidArgument(f"shape {shape} and stride {stride} are not nested alike")
        self._set(merge(zip(sizes, steps, strict=True)))

    @classmethod
    def _of(cls, loops: Iterable[Loop]) -> FlatLayout:
        """Return a layout of loops that need no checks."""
        layout = cls.__new__(cls)
        layout._set(merge(loops))
        return layout

    def _set(self, loops: Loops) -> None:
        object.__setattr__(self, "shape", tuple([size for size, _ in loops]))
        object.__setattr__(self, "stride", tuple([step for _, step in loops]))
        object.__setattr__(self, "_loops", loops)
        object.__setattr__(self, "_hash", hash(loops))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._loops == other._loops if isinstance(other, FlatLayout) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatLayout, (self.shape, self.stride)

    def __repr__(self) -> str:
        return f"FlatLayout({self.shape}, {self.stride})"

    def __str__(self) -> str:
        text = ",".join(f"{size}:{step}" for size, step in self._loops)
        return text if len(self._loops) == 1 else f"({text})"

    @property
    def sizes_and_strides(self) -> Iterator[tuple[int, int]]:
        """Iterate over pairs of a size and its stride, the outermost first."""
        return iter(self._loops)

    def numel(self) -> int:
        """Return how many ranks there are."""
        return math.prod(self.shape)

    def cosize(self) -> int:
        """Return the smallest world that has room for all ranks: the largest of them, plus 1."""
        return reach(self._loops) + 1

    def rank_at(self, index: int) -> int:
        """Return the rank at a position in the list of ranks."""
        if not 0 <= index < self.numel():
            raise InvalidArgument(f"index {index} is not in 0 to {self.numel() - 1}")
        return add_up(self._loops, digits_at(self._loops, index))

    def all_ranks_from_zero(self) -> list[int]:
        """Return all ranks, in order."""
        return enumerate_ranks(self._loops)

    def check_sorted(self) -> bool:
        """Tell whether no stride is larger than one further out."""
        return all(left >= right for left, right in pairwise(self.stride))

    def check_orthogonal(self) -> bool:
        """Tell whether copies of this layout can cover a world with every rank in one of them.

        Such a layout has no rank twice. The reverse does not hold: (2, 2) by (3, 1) is ranks 0, 1,
        3, 4, and no other copy has rank 2 without one of these.
        """
        return tiles(self._loops)

    def has_repeats(self) -> bool:
        """Tell whether any rank comes more than once."""
        return has_repeats(self._loops)

    def composition(self, layout: MeshLayout) -> MeshLayout:
        """Return this layout after another: its rank at each index that the other one gives.

        Raise `InvalidArgument` if the other leads beyond the last index, or if the result is not
        regular enough to have strides.
        """
        composed = compose(self._loops, [axis._loops for axis in layout])
        if composed is not None:
            return MeshLayout([FlatLayout._of(loops) for loops in composed])
        if layout.cosize() > self.numel():
            raise InvalidArgument(
                f"layout {layout} leads to index {layout.cosize() - 1}, and {self} ends at "
                f"{self.numel() - 1}"
            )
        raise InvalidArgument(f"layout {self} at the indices of {layout} has no regular strides")

    def complement(self, world_size: int) -> FlatLayout:
        """Return where the copies of this layout start that together cover a world.

        Raise `InvalidArgument` if none do: this layout is not orthogonal, or the world is not a
        multiple of what a copy and those in its gaps take.
        """
        [world_size] = integers(world_size, name="world_size", least=1)
        if not tiles(self._loops):
            raise InvalidArgument(f"layout {self} is not orthogonal: its copies cannot cover ranks")
        found = gaps(self._loops, world_size)
        if found is None:
            extent = max(size * step for size, step in self._loops)
            raise InvalidArgument(
                f"copies of layout {self} cannot cover {world_size} ranks, only a multiple of "
                f"{extent}"
            )
        return FlatLayout._of(found)

    def global_ranks(self, world_size: int) -> list[list[int]]:
        """Return the ranks of each copy of this layout in a world: its groups along this axis."""
        ranks = self.all_ranks_from_zero()
        starts = self.complement(world_size).all_ranks_from_zero()
        return [[start + rank for rank in ranks] for start in starts]

    def group_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the copy of this layout that holds a rank."""
        if not tiles(self._loops):
            raise InvalidArgument(
                f"layout {self} is not orthogonal: rank {rank} has several groups"
            )
        [rank] = integers(rank, name="rank", least=0)
        start, _ = place_in_tile(self._loops, rank)
        if len(self._loops) == 1:
            [(size, step)] = self._loops
            return range(start, start + size * step, step)
        return [start + each for each in enumerate_ranks(self._loops)]


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class MeshLayout(Sequence[FlatLayout]):
    """The axes of a mesh, outermost first, each of them a `FlatLayout`."""

    axes: tuple[FlatLayout, ...]
    _loops: Loops
    _tiles: bool
    _key: tuple[Loops, ...]
    _hash: int

    def __init__(self, axes: Sequence[FlatLayout]) -> None:
        axes = tuple(axes)
        for axis in axes:
            if not isinstance(axis, FlatLayout):
                raise InvalidType(f"an axis is a FlatLayout, and not {axis!r}")
        loops = tuple(loop for axis in axes for loop in axis._loops)
        key = tuple([axis._loops for axis in axes])  # plain tuples compare at once
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "_loops", loops)
        object.__setattr__(self, "_tiles", tiles(loops))
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    @classmethod
    def from_sizes_strides(
        cls, sizes: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> MeshLayout:
        """Return a layout with an axis for each size and its stride, by default contiguous."""
        sizes = integers(tuple(sizes), name="sizes", least=1)
        if strides is None:
            strides = contiguous(sizes)
        strides = integers(tuple(strides), name="strides", least=0)
        if len(sizes) != len(strides):
            raise InvalidArgument(
                f"{len(sizes)} sizes {sizes} and {len(strides)} strides {strides}: give one each"
            )
        return cls([FlatLayout._of((loop,)) for loop in zip(sizes, strides, strict=True)])

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._key == other._key if isinstance(other, MeshLayout) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshLayout, (self.axes,)

    def __repr__(self) -> str:
        return f"MeshLayout({list(self.axes)})"

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.axes))})"

    def __len__(self) -> int:
        return len(self.axes)

    @overload
    def __getitem__(self, index: int) -> FlatLayout: ...

    @overload
    def __getitem__(self, index: slice) -> MeshLayout: ...

    def __getitem__(self, index: int | slice) -> FlatLayout | MeshLayout:
        return MeshLayout(self.axes[index]) if isinstance(index, slice) else self.axes[index]

    def __iter__(self) -> Iterator[FlatLayout]:
        return iter(self.axes)

    @property
    def top_level_sizes(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(axis.numel() for axis in self.axes)

    def numel(self) -> int:
        """Return how many coordinates there are."""
        return math.prod(size for size, _ in self._loops)

    def cosize(self) -> int:
        """Return the smallest world that has room for all ranks: the largest of them, plus 1."""
        return reach(self._loops) + 1

    def check_sorted(self) -> bool:
        """Tell whether no stride is larger than one further out, over all axes."""
        return self.collapse().check_sorted()

    def check_orthogonal(self) -> bool:
        """Tell whether copies of this mesh can cover a world with every rank in one of them."""
        return self._tiles

    def has_repeats(self) -> bool:
        """Tell whether any rank is at more than one coordinate."""
        return not self._tiles and has_repeats(self._loops)

    def collapse(self) -> FlatLayout:
        """Return all axes as one, the last running fastest."""
        return FlatLayout._of(self._loops)

    coalesce = collapse

    def nest(self, start: int = 0, end: int | None = None) -> MeshLayout:
        """Return a mesh in which the axes from `start` to before `end` have become one."""
        end = len(self) if end is None else end
        return self.splice(start, end, MeshLayout([self[start:end].collapse()]))

    def flatten(self) -> MeshLayout:
        """Return a mesh in which all axes have become one."""
        return self.nest()

    def splice(self, start: int, end: int, layout: MeshLayout) -> MeshLayout:
        """Return a mesh with the axes of another in place of those from `start` to before `end`."""
        axes = list(self.axes)
        axes[start:end] = layout.axes
        return MeshLayout(axes)

    def contains(self, rank: int) -> bool:
        """Tell whether a rank is in this layout, that is, in its copy at 0."""
        return self.coordinate_of(rank) is not None

    def rank_of(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate."""
        if len(coordinate) != len(self.axes):
            raise InvalidArgument(
                f"coordinate {tuple(coordinate)} has {len(coordinate)} numbers for "
                f"{len(self.axes)} axes"
            )
        sizes = self.top_level_sizes
        if not all(0 <= number < size for number, size in zip(coordinate, sizes, strict=True)):
            raise InvalidArgument(f"coordinate {tuple(coordinate)} is not in a mesh of {sizes}")
        return sum(axis.rank_at(number) for axis, number in zip(self.axes, coordinate, strict=True))

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, or None if it is not in this layout.

        A rank that is at several coordinates has one of them returned.
        """
        if rank < 0:
            return None
        if self._tiles:
            start, digits = place_in_tile(self._loops, rank)
            return None if start else self._coordinate(digits)
        found = find_digits(self._loops, rank)
        return None if found is None else self._coordinate(found)

    def locate(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return where the copy of this mesh that holds a rank starts, and the coordinate in it.

        The axes ``dp`` and ``tp`` of a larger mesh are a mesh of their own for each place along
        the other axes; this is which of them, and where in it, for any rank.
        """
        self._require_orthogonal()
        [rank] = integers(rank, name="rank", least=0)
        start, digits = place_in_tile(self._loops, rank)
        return start, self._coordinate(digits)

    def ranks_of_group(self, rank: int, axis: int) -> Sequence[int]:
        """Return the ranks that differ from a rank in the coordinate along one axis only.

        The rank may be in any copy of this mesh. A plain axis gives a `range`, a flattened one may
        give a list.
        """
        self._require_orthogonal()
        if not -len(self.axes) <= axis < len(self.axes):
            raise InvalidArgument(f"axis {axis} is not one of {len(self.axes)} axes")
        return self.axes[axis].group_of(rank)

    def remap_to_tensor(self, rank_map: torch.Tensor) -> torch.Tensor:
        """Return the meshes that the copies of this layout pick from a list of ranks.

        The list is a contiguous tensor of one dim. The result has one dim more than there are axes:
        the first counts the copies. It is a view if the strides allow one.
        """
        if rank_map.ndim != 1 or not rank_map.is_contiguous():
            raise InvalidArgument(
                f"rank_map of shape {tuple(rank_map.shape)} and strides {rank_map.stride()} is "
                "not contiguous in one dim"
            )
        inner = self.collapse()
        outer = inner.complement(rank_map.numel())
        picked = rank_map.as_strided(outer.shape + inner.shape, outer.stride + inner.stride)
        return picked.reshape(-1, *self.top_level_sizes)

    def _require_orthogonal(self) -> None:
        if not self._tiles:
            raise InvalidArgument(f"layout {self} is not orthogonal: its axes overlap")

    def _coordinate(self, digits: Sequence[int]) -> tuple[int, ...]:
        turns = iter(digits)
        coordinate = []
        for axis in self.axes:
            number = 0
            for size in axis.shape:
                number = number * size + next(turns)
            coordinate.append(number)
        return tuple(coordinate)


_FlatLayout = FlatLayout
_MeshLayout = MeshLayout
