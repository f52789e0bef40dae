"""Validation of mesh arguments: shapes, names, ranks, device types, backend overrides.

Every function raises `InvalidMesh`, `InvalidType` or `UnknownAxis`, naming the argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Backend

from ..errors import InvalidMesh, InvalidType, MisuseError, UnknownAxis
from ..groups._parent_group import DEFAULT_OPTIONS, GroupOptions

_T = TypeVar("_T")


def check_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise InvalidType(
            f"device_type must be a string such as 'cpu' or 'cuda', got {device_type!r}"
            + (": pass its .type" if isinstance(device_type, torch.device) else "")
        )
    if not device_type.isalpha():
        kind = device_type.partition(":")[0]
        raise InvalidMesh(
            f"device_type must be a type without an index, such as "
            f"{kind if kind.isalpha() else 'cuda'!r}, got {device_type!r}"
        )


def as_tuple(
    values: Iterable[_T], name: str, description: str, kind: type = object
) -> tuple[_T, ...]:
    """Return values as a tuple; raise `InvalidType` unless all are of one type."""
    try:
        checked = tuple(values)
    except TypeError:
        raise InvalidType(f"{name} must be {description}, got {values!r}") from None
    for each in checked:
        if not isinstance(each, kind):
            raise InvalidType(f"{name} must be {description}, got {each!r} in it")
    return checked


def check_shape(shape: Iterable[int]) -> tuple[int, ...]:
    sizes = as_tuple(shape, "mesh_shape", "a tuple of sizes")
    for size in sizes:
        if not isinstance(size, int):
            raise InvalidMesh(f"mesh_shape must contain only integers, got {size!r} in {sizes}")
        if size < 1:
            raise InvalidMesh(f"sizes in mesh_shape must be at least 1, got {size} in {sizes}")
    return sizes


def check_names(names: Iterable[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise InvalidMesh(f"mesh_dim_names must be a tuple of names, got the string {names!r}")
    names = as_tuple(names, "mesh_dim_names", "a tuple of names", str)
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InvalidMesh(f"mesh_dim_names {names} has {repeated[0]!r} more than once")
    if len(names) != ndim:
        raise InvalidMesh(f"mesh_dim_names {names} has {len(names)} names for {ndim} axes")
    return names


def read_ranks(mesh: Any) -> tuple[tuple[int, ...], Sequence[int]]:
    """Return the shape of an array of ranks, and the ranks in order, as a range if possible."""
    try:
        is_tensor = isinstance(mesh, torch.Tensor)
        tensor = mesh.detach().cpu() if is_tensor else torch.tensor(mesh, device="cpu")
    except (TypeError, ValueError) as error:
        kind = InvalidMesh if isinstance(error, ValueError) else InvalidType
        raise kind(f"mesh {mesh!r} is not an array of ranks: {error}") from error
    whole = tensor.to(torch.int64)
    if tensor.dtype.is_floating_point and not torch.equal(whole.to(tensor.dtype), tensor):
        raise InvalidMesh(f"mesh must contain only integers, got {tensor.tolist()}")
    return tuple(tensor.shape), as_range(whole.flatten().tolist())


def as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced, ascending ranks as a range, others as a tuple."""
    if isinstance(ranks, range):
        return ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks and step > 0:
        regular = range(ranks[0], ranks[0] + step * len(ranks), step)
        if all(map(int.__eq__, ranks, regular)):
            return regular
    return tuple(ranks)


def check_ranks(ranks: Sequence[int], *, size: int | None) -> None:
    if not ranks:
        raise InvalidMesh("mesh must have at least one rank")
    if size is not None and len(ranks) > size:
        raise InvalidMesh(f"mesh has {len(ranks)} ranks but its group has only {size}")
    ends = (ranks[0], ranks[-1]) if isinstance(ranks, range) else (min(ranks), max(ranks))
    for rank in ends:
        if rank < 0 or (size is not None and rank >= size):
            if size is None:
                raise InvalidMesh(f"ranks of a mesh must be at least 0, got {rank}")
            raise InvalidMesh(f"rank {rank} is not in the mesh's group (ranks 0 to {size - 1})")
    if not isinstance(ranks, range) and len(set(ranks)) < len(ranks):
        repeated = next(rank for rank, count in Counter(ranks).items() if count > 1)
        raise InvalidMesh(f"mesh has rank {repeated} more than once")


def find_axis(
    axis: object,
    names: Sequence[str] | None,
    *,
    ndim: int,
    mesh: object,
    error: type[MisuseError] = UnknownAxis,
) -> int:
    """Return the number of an axis, given by its name or by a number below `ndim`."""
    if isinstance(axis, str) and names and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and -ndim <= axis < ndim:
        return axis % ndim
    axes = ", ".join(map(repr, names or range(ndim))) or "none"
    unnamed = ", without names" if ndim and not names else ""
    raise error(f"{mesh} has no axis {axis!r}; its axes are {axes}{unnamed}")


Override = (
    str
    | timedelta
    | Mapping[str, Any]
    | Backend.Options
    | tuple[str | None, Backend.Options | Mapping[str, Any] | timedelta | None]
)
"""A backend, its options (torch's object or a dict), a timeout, or a backend and one of these."""

Overrides = Mapping[int | str, Override] | Sequence[Override | tuple[None, None] | None]


def parse_overrides(
    overrides: Overrides | None, ndim: int, names: Sequence[str] | None
) -> tuple[GroupOptions, ...]:
    """Return the options of each axis, from a dict by axis or a sequence with one per axis."""
    if overrides is None:
        return (DEFAULT_OPTIONS,) * ndim
    if not isinstance(overrides, Mapping):
        if isinstance(overrides, str) or not isinstance(overrides, Sequence):
            raise InvalidType(
                f"backend_override must be a dict by axis or one entry per axis, got {overrides!r}"
            )
        if len(overrides) != ndim:
            raise InvalidMesh(
                f"backend_override has {len(overrides)} entries for a mesh of {ndim} axes. "
                "Hint: a dict may name some of them."
            )
        return tuple(map(parse_override, overrides))
    options = [DEFAULT_OPTIONS] * ndim
    given: dict[int, int | str] = {}
    for key, value in overrides.items():
        axis = find_axis(
            key, names, ndim=ndim, mesh="backend_override: the mesh", error=InvalidMesh
        )
        if axis in given:
            raise InvalidMesh(
                f"backend_override names axis {axis} twice, as {given[axis]!r} and as {key!r}"
            )
        given[axis] = key
        options[axis] = parse_override(value)
    return tuple(options)


def parse_override(value: Override | Sequence[Any] | None) -> GroupOptions:
    backend, options = None, value
    if isinstance(value, str):
        backend, options = value, None
    elif isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str | None):
        backend, options = value
    if options is None:
        return GroupOptions(backend=backend)
    if isinstance(options, timedelta):
        return GroupOptions(backend=backend, timeout=options)
    if isinstance(options, Backend.Options):
        return GroupOptions(backend=backend, timeout=options._timeout, torch_options=options)
    if isinstance(options, Mapping) and isinstance(options.get("timeout"), timedelta | None):
        others = tuple(sorted((k, v) for k, v in options.items() if k != "timeout"))
        return GroupOptions(backend=backend, timeout=options.get("timeout"), options=others)
    raise InvalidType(
        f"backend_override must be a backend, options (torch's object or a dict), a timeout, or a "
        f"pair of a backend and one of these, got {value!r}"
    )
