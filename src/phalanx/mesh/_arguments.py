"""Validation of mesh arguments: shapes, names, ranks, device types, backend overrides.

Every function raises `InvalidMesh` or `InvalidType`, naming the argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from ..errors import InvalidMesh, InvalidType
from ..groups._subgroups import DEFAULT_OPTIONS, GroupOptions


def check_device_type(device_type: object) -> str:
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
    return device_type


def check_shape(shape: Iterable[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(shape)
    except TypeError:
        raise InvalidType(f"mesh_shape must be a tuple of sizes, got {shape!r}") from None
    for size in sizes:
        if not isinstance(size, int):
            raise InvalidMesh(f"mesh_shape must have integers only, got {size!r} in {sizes}")
        if size < 1:
            raise InvalidMesh(f"sizes in mesh_shape must be at least 1, got {size} in {sizes}")
    return sizes


def check_names(names: Iterable[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise InvalidMesh(f"mesh_dim_names must be a tuple of names, got the string {names!r}")
    try:
        names = tuple(names)
    except TypeError:
        raise InvalidType(f"mesh_dim_names must be a tuple of names, got {names!r}") from None
    for name in names:
        if not isinstance(name, str):
            raise InvalidType(f"mesh_dim_names must be strings, got {name!r} in {names}")
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InvalidMesh(f"mesh_dim_names {names} has {repeated[0]!r} more than once")
    if len(names) != ndim:
        raise InvalidMesh(f"mesh_dim_names {names} has {len(names)} names for {ndim} axes")
    return names


def read_ranks(mesh: Any) -> tuple[tuple[int, ...], Sequence[int]]:
    """Return the shape of an array of ranks, and the ranks in order, as a range if possible."""
    tensor = mesh.detach().cpu() if isinstance(mesh, torch.Tensor) else _rank_tensor(mesh)
    whole = tensor.to(torch.int64)
    if tensor.dtype.is_floating_point and not torch.equal(whole.to(tensor.dtype), tensor):
        raise InvalidMesh(f"mesh must have integers only, got {tensor.tolist()}")
    return tuple(tensor.shape), as_range(whole.flatten().tolist())


def _rank_tensor(mesh: Any) -> torch.Tensor:
    try:
        return torch.tensor(mesh, device="cpu")
    except ValueError as error:
        raise InvalidMesh(f"mesh {mesh!r} is not an array of ranks: {error}") from error
    except TypeError as error:
        raise InvalidType(f"mesh {mesh!r} is not an array of ranks: {error}") from error


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
        raise InvalidMesh(f"mesh has {len(ranks)} ranks, more than its group ({size})")
    least, most = (ranks[0], ranks[-1]) if isinstance(ranks, range) else (min(ranks), max(ranks))
    limit = math.inf if size is None else size
    for rank in (least, most):
        if not 0 <= rank < limit:
            allowed = "at least 0" if size is None else f"0 to {size - 1}"
            raise InvalidMesh(f"mesh has rank {rank}, but ranks of its group are {allowed}")
    if not isinstance(ranks, range) and len(set(ranks)) < len(ranks):
        repeated = next(rank for rank, count in Counter(ranks).items() if count > 1)
        raise InvalidMesh(f"mesh has rank {repeated} more than once")


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
        axis = _override_axis(key, ndim, names)
        if axis in given:
            raise InvalidMesh(
                f"backend_override names axis {axis} twice, as {given[axis]!r} and as {key!r}"
            )
        given[axis] = key
        options[axis] = parse_override(value)
    return tuple(options)


def _override_axis(key: object, ndim: int, names: Sequence[str] | None) -> int:
    if isinstance(key, str) and names is not None and key in names:
        return names.index(key)
    if type(key) is int and 0 <= key < ndim:
        return key
    allowed = f"0 to {ndim - 1}" + (f" or one of {', '.join(map(repr, names))}" if names else "")
    raise InvalidMesh(f"backend_override has the key {key!r}, but axes are {allowed}")


def parse_override(value: Override | Sequence[Any] | None) -> GroupOptions:
    if value is None:
        return DEFAULT_OPTIONS
    if isinstance(value, str):
        return GroupOptions(backend=value)
    if isinstance(value, tuple | list) and len(value) == 2:
        backend, options = value
        if backend is None or isinstance(backend, str):
            return replace(_parse_options(options), backend=backend)
    return _parse_options(value)


def _parse_options(value: object) -> GroupOptions:
    if value is None:
        return DEFAULT_OPTIONS
    if isinstance(value, timedelta):
        return GroupOptions(timeout=value)
    if isinstance(value, Backend.Options):
        return GroupOptions(timeout=value._timeout, native=value)
    if isinstance(value, Mapping):
        timeout = value.get("timeout")
        if timeout is None or isinstance(timeout, timedelta):
            rest = tuple(sorted((k, v) for k, v in value.items() if k != "timeout"))
            return GroupOptions(timeout=timeout, options=rest)
    raise InvalidType(
        f"backend_override must be a backend, options (torch's object or a dict), a timeout, or a "
        f"pair of a backend and one of these, got {value!r}"
    )
