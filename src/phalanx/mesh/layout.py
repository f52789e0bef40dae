"""Mesh layouts: which ranks a mesh consists of, as sizes and strides.

A `FlatLayout` is one axis: a list of ranks starting at 0, stored as nested sizes and strides. A
`MeshLayout` is a sequence of axes; the rank at a coordinate is the sum of what its axes give. Both
hold a few integers however many ranks there are, and answer questions about one rank from the
strides alone. They know nothing of processes or groups.

A layout describes its copy at 0. The same layout shifted covers the rest of the world:
``FlatLayout(4, 2)`` is ranks 0, 2, 4, 6, and in a world of 8 the other copy is 1, 3, 5, 7. Layouts
for which such copies exist are *orthogonal*; those of slices, flattened and unflattened meshes
are.

Inside, a layout is a nest of loops ``(count, step)``, outermost first: ``((2, 4), (3, 1))``
yields 0, 1, 2, 4, 5, 6. A position in that list is an *index*, and its *digits* are the
iteration of each loop. Unless a docstring says otherwise, the cost depends on the number of
loops, not on their counts. `phalanx mesh` uses this module without torch, so it must not import
torch.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

from .._formatting import format_rank_ranges
from ..errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    import torch

__all__ = ["FlatLayout", "MeshLayout"]


def format_rank_pattern(ranks: Sequence[int], *, limit: int | None = None) -> str:
    """Format ranks as ``0-3,7``, and a strided range as ``0-6:2``, which is 0, 2, 4, 6.

    Of an irregular list, at most `limit` ranks are shown.
    """
    if isinstance(ranks, range) and len(ranks) > 1:
        return f"{ranks[0]}-{ranks[-1]}" + (f":{ranks.step}" if ranks.step > 1 else "")
    more = ",..." if limit is not None and len(ranks) > limit else ""
    return format_rank_ranges(ranks[:limit]) + more


def format_axes(names: Sequence[str] | None, numbers: Sequence[int], joint: str = ", ") -> str:
    """Format sizes or coordinates of the first axes as ``dp=2, tp=4``."""
    if names is None:
        return joint.join(map(str, numbers))
    return joint.join(f"{name}={number}" for name, number in zip(names, numbers, strict=False))


IntTuple: TypeAlias = "SupportsIndex | tuple[IntTuple, ...]"


def _flat_integers(value: object, *, name: str, least: int) -> tuple[int, ...]:
    """Return the integers of a nested tuple, each of them at least `least`."""
    if isinstance(value, tuple):
        return tuple(
            [each for part in value for each in _flat_integers(part, name=name, least=least)]
        )
    # The check of the type first: that of a protocol is slow.
    if type(value) is not int and not isinstance(value, SupportsIndex):
        raise InvalidType(f"{name} must be an integer or a tuple of integers, got {value!r}")
    number = operator.index(value)
    if number < least:
        raise InvalidArgument(f"{name} must be at least {least}, got {number}")
    return (number,)


def _nesting(value: object) -> object:
    """Return a value that is equal for tuples of the same nesting."""
    return tuple(map(_nesting, value)) if isinstance(value, tuple) else None


def _contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple([math.prod(sizes[position + 1 :]) for position in range(len(sizes))])


_Loop: TypeAlias = tuple[int, int]
_Loops: TypeAlias = tuple[_Loop, ...]


def _coalesce_loops(loops: Iterable[_Loop]) -> _Loops:
    """Return the fewest loops that give the same ranks in the same order."""
    merged: list[_Loop] = []
    for count, step in reversed(tuple(loops)):
        if count == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == step:
            merged[-1] = (count * merged[-1][0], merged[-1][1])
        else:
            merged.append((count, step))
    return tuple(reversed(merged))


def _enumerate_ranks(loops: Iterable[_Loop]) -> list[int]:
    """Return all ranks in order, in time that grows with their number."""
    ranks = [0]
    for count, step in loops:
        turns = [turn * step for turn in range(count)]
        ranks = [rank + turn for rank in ranks for turn in turns]
    return ranks


def _loops_are_orthogonal(loops: _Loops) -> bool:
    """Whether shifted copies of the ranks can cover 0, 1, 2, ... once each.

    They can if and only if every step is a multiple of the extent of the next smaller loop, since
    the copies must fill the gaps within it before the larger loop advances.
    """
    if len(loops) == 1:  # a shortcut for plain axes
        return loops[0][1] > 0
    extent = 1
    for step, count in _ascending(loops):
        if step == 0 or step % extent:
            return False
        extent = step * count
    return True


def _digits_at(loops: Sequence[_Loop], index: int) -> list[int]:
    """Return the digits of an index; beyond the end, the outermost digit is out of range."""
    digits = []
    for count, _ in reversed(loops[1:]):
        index, digit = divmod(index, count)
        digits.append(digit)
    if loops:
        digits.append(index)
    return digits[::-1]


def _rank_of_digits(loops: Sequence[_Loop], digits: Sequence[int]) -> int:
    return sum([digit * step for digit, (_, step) in zip(digits, loops, strict=True)])


def _compose_loops(loops: _Loops, selectors: Iterable[_Loops]) -> list[_Loops] | None:
    """Return the loops over the ranks at the indices that each selector enumerates.

    Return None if indices add up to more than the last one, or if no loops give the ranks.

    Loops ((2, 8), (4, 1)) give ranks 0-3 and 8-11. The selector (4, 2) is indices 0, 2, 4, 6, which
    split into pieces (2, 4) and (2, 2). Their ranks are 0, 2, 8, 10: loops ((2, 8), (2, 2)).
    """
    used = [0] * len(loops)
    composed = []
    for selector in selectors:
        found: list[_Loop] = []
        for count, step in selector:
            pieces = _linear_pieces(loops, count, step)
            if pieces is None:
                return None
            for size, stride in pieces:
                digits = _digits_at(loops, stride)
                used = [sum_ + (size - 1) * each for sum_, each in zip(used, digits, strict=True)]
                found.append((size, _rank_of_digits(loops, digits)))
        composed.append(tuple(found))
    # Ranks add up as their indices do only while no digit carries into the next.
    fits = all(digit < count for digit, (count, _) in zip(used, loops, strict=True))
    return composed if fits else None


def _linear_pieces(loops: _Loops, count: int, step: int) -> list[_Loop] | None:
    """Split a loop over indices into loops along which the rank grows evenly, outermost first.

    Return None if it exceeds the last index, or if no loops give its ranks.
    """
    pieces: list[_Loop] = []
    while count > 1:
        digits = _digits_at(loops, step)
        # No digit carries into the next loop until its multiples exceed its count.
        turns = [
            (size - 1) // digit + 1 for digit, (size, _) in zip(digits, loops, strict=True) if digit
        ]
        run = min([count, *turns]) if loops or step == 0 else 1
        if run < 2 or count % run:
            return None
        pieces.append((run, step))
        count //= run
        step *= run
    return pieces[::-1]


def _ascending(loops: Iterable[_Loop]) -> list[tuple[int, int]]:
    return sorted((step, count) for count, step in loops if count > 1)


def _fields(layout: Any) -> tuple[Any, ...]:
    """Return what a layout, ours or torch's, is constructed from."""
    return tuple([getattr(layout, name) for name in layout.__match_args__])


class _LoopNest:
    """What one axis and a mesh of several have in common. Layouts are immutable and hashable."""

    __slots__ = ("_hash", "_is_orthogonal", "_key", "_loops")
    __match_args__: tuple[str, ...]  # as in torch's class, which has an underscore before the name

    def _set_loops(self, loops: _Loops, key: object) -> None:
        self._loops = loops
        self._is_orthogonal = _loops_are_orthogonal(loops)
        self._key = key  # of plain tuples, which compare faster
        self._hash: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), _fields(self)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(_fields(self))  # as torch's layouts, which may be equal
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self is other or self._key == other._key
        torch_layouts = sys.modules.get("torch.distributed._mesh_layout")
        if isinstance(other, getattr(torch_layouts, f"_{type(self).__name__}", ())):
            return _fields(self) == _fields(other)
        return NotImplemented

    def to_pycute(self) -> Any:
        """Return the layout in the form that torch's layout algebra computes with."""
        from torch.distributed import _mesh_layout

        torch_class = getattr(_mesh_layout, f"_{type(self).__name__}")
        return torch_class(*_fields(self)).to_pycute()

    def numel(self) -> int:
        """Return the number of ranks, or of coordinates where ranks repeat."""
        return math.prod([count for count, _ in self._loops])

    def cosize(self) -> int:
        """Return the smallest world size that contains all ranks: the largest rank plus 1."""
        return sum((count - 1) * step for count, step in self._loops) + 1

    def check_orthogonal(self) -> bool:
        """Whether shifted copies of this layout can cover a world with each rank in one of them.

        Such a layout has no rank twice. The reverse does not hold: sizes (2, 2) with strides
        (3, 1) are ranks 0, 1, 3, 4, and any copy with rank 2 repeats one of these.
        """
        return self._is_orthogonal

    def has_repeats(self) -> bool:
        """Whether any rank occurs more than once."""
        below = 0
        for step, count in _ascending(self._loops):
            if step == 0:
                return True
            if step <= below:  # only where steps interleave are ranks enumerated
                ranks = _enumerate_ranks(self._loops)
                return len(set(ranks)) < len(ranks)
            below += (count - 1) * step
        return False

    def _locate(self, rank: int) -> tuple[int, list[int]]:
        """Return the start of the copy that contains a rank, and its digits."""
        [rank] = _flat_integers(rank, name="rank", least=0)
        if not self._is_orthogonal:
            raise InvalidArgument(
                f"layout {self} is not orthogonal: its axes overlap, so rank {rank} is in several "
                "copies"
            )
        digits = [rank // step % count for count, step in self._loops]
        return rank - _rank_of_digits(self._loops, digits), digits


class FlatLayout(_LoopNest):
    """One axis: an ordered list of ranks from 0, as sizes and strides, outermost first.

    Without strides the ranks are 0, 1, 2, ... Sizes and strides are stored in their shortest form,
    so two layouts are equal if and only if they have the same ranks in the same order.
    """

    __slots__ = ()
    __match_args__ = ("shape", "stride")

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        sizes = _flat_integers(shape, name="shape", least=1)
        if stride is None:
            steps = _contiguous_strides(sizes)
        else:
            steps = _flat_integers(stride, name="stride", least=0)
            if _nesting(shape) != _nesting(stride):
                raise InvalidArgument(f"shape {shape} and stride {stride} have different nesting")
        self._set_axis(zip(sizes, steps, strict=True))

    @classmethod
    def _of(cls, loops: Iterable[_Loop]) -> FlatLayout:
        layout = cls.__new__(cls)
        layout._set_axis(loops)
        return layout

    def _set_axis(self, loops: Iterable[_Loop]) -> None:
        loops = _coalesce_loops(loops)
        self._set_loops(loops, key=loops)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, outermost first."""
        return tuple([count for count, _ in self._loops])

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides, outermost first."""
        return tuple([step for _, step in self._loops])

    def __repr__(self) -> str:
        return f"FlatLayout({self.shape}, {self.stride})"

    def __str__(self) -> str:
        text = ",".join(f"{size}:{step}" for size, step in self._loops)
        return text if len(self._loops) == 1 else f"({text})"

    @property
    def sizes_and_strides(self) -> Iterator[tuple[int, int]]:
        """Iterate over pairs of a size and its stride, the outermost first."""
        return iter(self._loops)

    def rank_at(self, index: int) -> int:
        """Return the rank at a position in the list of ranks."""
        if not 0 <= index < self.numel():
            raise InvalidArgument(f"index must be 0 to {self.numel() - 1}, got {index}")
        return _rank_of_digits(self._loops, _digits_at(self._loops, index))

    def all_ranks_from_zero(self) -> list[int]:
        """Return all ranks, in order."""
        return _enumerate_ranks(self._loops)

    def check_sorted(self) -> bool:
        """Whether strides do not increase from the outermost to the innermost."""
        return all(left >= right for left, right in pairwise(self.stride))

    def composition(self, layout: MeshLayout) -> MeshLayout:
        """Return this layout's rank at each index that another layout gives.

        Raise `InvalidArgument` if an index is out of range, or if the result has no strides.
        """
        composed = _compose_loops(self._loops, [axis._loops for axis in layout])
        if composed is not None:
            return MeshLayout([FlatLayout._of(loops) for loops in composed])
        if layout.cosize() > self.numel():
            raise InvalidArgument(
                f"layout {layout} has index {layout.cosize() - 1}, but {self} ends at "
                f"{self.numel() - 1}"
            )
        raise InvalidArgument(f"layout {self} at the indices of {layout} has no regular strides")

    def complement(self, world_size: int) -> FlatLayout:
        """Return the starts of the copies of this layout that together cover a world.

        Raise `InvalidArgument` if this layout is not orthogonal, or if the world size is not a
        multiple of its extent.
        """
        [world_size] = _flat_integers(world_size, name="world_size", least=1)
        if not self._is_orthogonal:
            raise InvalidArgument(f"layout {self} is not orthogonal: its copies cannot cover ranks")
        extent = 1
        starts: list[_Loop] = []
        for step, count in _ascending(self._loops):
            starts.append((step // extent, extent))
            extent = step * count
        if world_size % extent:
            raise InvalidArgument(
                f"copies of layout {self} cannot cover {world_size} ranks: the world size must "
                f"be a multiple of {extent}"
            )
        return FlatLayout._of([(world_size // extent, extent), *reversed(starts)])

    def global_ranks(self, world_size: int) -> list[list[int]]:
        """Return the ranks of each copy in a world: the groups along this axis."""
        ranks = self.all_ranks_from_zero()
        starts = self.complement(world_size).all_ranks_from_zero()
        return [[start + rank for rank in ranks] for start in starts]

    def group_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the copy that contains a rank."""
        start, _ = self._locate(rank)
        if len(self._loops) == 1:
            [(size, step)] = self._loops
            return range(start, start + size * step, step)
        return [start + each for each in _enumerate_ranks(self._loops)]


class MeshLayout(_LoopNest, Sequence[FlatLayout]):
    """The axes of a mesh, outermost first, each of them a `FlatLayout`."""

    __slots__ = ("_axes",)
    __match_args__ = ("axes",)

    def __init__(self, axes: Sequence[FlatLayout]) -> None:
        self._axes = tuple(axes)
        for axis in self._axes:
            if not isinstance(axis, FlatLayout):
                raise InvalidType(f"an axis must be a FlatLayout, got {axis!r}")
        key = tuple([axis._loops for axis in self._axes])
        self._set_loops(tuple(chain(*key)), key=key)

    @property
    def axes(self) -> tuple[FlatLayout, ...]:
        """The axes, outermost first."""
        return self._axes

    @classmethod
    def from_sizes_strides(
        cls, sizes: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> MeshLayout:
        """Return a layout with one axis per size and stride; strides default to contiguous."""
        sizes = _flat_integers(tuple(sizes), name="sizes", least=1)
        if strides is None:
            strides = _contiguous_strides(sizes)
        else:
            strides = _flat_integers(tuple(strides), name="strides", least=0)
        if len(sizes) != len(strides):
            raise InvalidArgument(f"sizes {sizes} and strides {strides} must have the same length")
        return cls([FlatLayout._of((loop,)) for loop in zip(sizes, strides, strict=True)])

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
        return iter(self._axes)

    @property
    def top_level_sizes(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(axis.numel() for axis in self._axes)

    def check_sorted(self) -> bool:
        """Whether strides do not increase from the outermost axis to the innermost."""
        return self.collapse().check_sorted()

    def collapse(self) -> FlatLayout:
        """Return all axes as one, the last varying fastest."""
        return FlatLayout._of(self._loops)

    coalesce = collapse

    def nest(self, start: int = 0, end: int | None = None) -> MeshLayout:
        """Return a mesh with the axes `start` to `end`, exclusive, merged into one."""
        end = len(self) if end is None else end
        return self.splice(start, end, MeshLayout([self[start:end].collapse()]))

    def flatten(self) -> MeshLayout:
        """Return a mesh with all axes merged into one."""
        return self.nest()

    def splice(self, start: int, end: int, layout: MeshLayout) -> MeshLayout:
        """Return a mesh with the axes `start` to `end`, exclusive, replaced by those of another."""
        axes = list(self.axes)
        axes[start:end] = layout.axes
        return MeshLayout(axes)

    def contains(self, rank: int) -> bool:
        """Whether a rank is in this layout, that is, in the copy at 0."""
        return self.coordinate_of(rank) is not None

    def rank_of(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate."""
        sizes = self.top_level_sizes
        is_inside = all(0 <= number < size for number, size in zip(coordinate, sizes, strict=False))
        if len(coordinate) != len(sizes) or not is_inside:
            raise InvalidArgument(
                f"coordinate {tuple(coordinate)} is not in a mesh of {len(sizes)} axes, {sizes}"
            )
        return sum(axis.rank_at(number) for axis, number in zip(self.axes, coordinate, strict=True))

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return a coordinate of a rank, or None if it is not in this layout.

        For a layout that is not orthogonal, the cost grows with the number of ranks.
        """
        if not 0 <= rank < self.cosize():
            return None
        if self._is_orthogonal:
            start, digits = self._locate(rank)
            return None if start else self._coordinate(digits)
        ranks = _enumerate_ranks(self._loops)
        if rank not in ranks:
            return None
        return self._coordinate(_digits_at(self._loops, ranks.index(rank)))

    def locate(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the start of the copy that contains a rank, and the rank's coordinate in it.

        The axes ``dp`` and ``tp`` of a larger mesh form one copy for each coordinate on the other
        axes.
        """
        start, digits = self._locate(rank)
        return start, self._coordinate(digits)

    def ranks_of_group(self, rank: int, axis: int) -> Sequence[int]:
        """Return the ranks that differ from a rank only in the coordinate along one axis.

        The rank may be in any copy of this mesh. The result is a `range` for a plain axis, and may
        be a list for a flattened one.
        """
        self._locate(rank)
        if not -len(self.axes) <= axis < len(self.axes):
            raise InvalidArgument(f"axis {axis} is out of range for {len(self.axes)} axes")
        return self.axes[axis].group_of(rank)

    def remap_to_tensor(self, rank_map: torch.Tensor) -> torch.Tensor:
        """Index a list of ranks with every copy of this layout.

        The list is a contiguous one-dimensional tensor. The result has one dim for the copies, then
        one per axis. It is a view if the strides allow one.
        """
        if rank_map.ndim != 1 or not rank_map.is_contiguous():
            raise InvalidArgument(
                f"rank_map must be contiguous and one-dimensional, got shape "
                f"{tuple(rank_map.shape)} and strides {rank_map.stride()}"
            )
        inner = self.collapse()
        outer = inner.complement(rank_map.numel())
        picked = rank_map.as_strided(outer.shape + inner.shape, outer.stride + inner.stride)
        return picked.reshape(-1, *self.top_level_sizes)

    def _coordinate(self, digits: Sequence[int]) -> tuple[int, ...]:
        turns = iter(digits)
        coordinate = []
        for axis in self.axes:
            number = 0
            for size, _ in axis._loops:
                number = number * size + next(turns)
            coordinate.append(number)
        return tuple(coordinate)


_FlatLayout = FlatLayout
_MeshLayout = MeshLayout
