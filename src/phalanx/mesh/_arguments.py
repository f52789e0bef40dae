"""Validation of mesh arguments: shapes, names, ranks, device types, backend overrides.

Every function raises `InvalidMesh` or `InvalidType` naming the argument, before anything is
made.
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
    """Check that a device type is one, and has no index."""
    if not isinstance(device_type, str):
        raise InvalidType(
            f"device_type is a name such as 'cpu' or 'cuda', not {device_type!r}"
            + (": pass its .type" if isinstance(device_type, torch.device) else "")
        )
    if not device_type.isalpha():
        kind = device_type.partition(":")[0]
        raise InvalidMesh(
            f"device type {device_type!r} is not the name of a kind of device: a mesh has one kind "
            f"for all ranks, without an index, such as {kind if kind.isalpha() else 'cuda'!r}"
        )
    return device_type


def check_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """Check the sizes of the axes."""
    try:
        sizes = tuple(shape)
    except TypeError:
        raise InvalidType(f"mesh_shape is a tuple of sizes, not {shape!r}") from None
    for size in sizes:
        if not isinstance(size, int):
            raise InvalidMesh(f"mesh_shape {sizes} has the size {size!r}: sizes are whole numbers")
        if size < 1:
            raise InvalidMesh(f"mesh_shape {sizes} has the size {size}: every axis has at least 1")
    return sizes


def check_names(names: Iterable[str] | None, ndim: int) -> tuple[str, ...] | None:
    """Check the names of the axes: one for each, all different."""
    if names is None:
        return None
    if isinstance(names, str):
        raise InvalidMesh(f"mesh_dim_names is a tuple of names, not the string {names!r}")
    try:
        names = tuple(names)
    except TypeError:
        raise InvalidType(f"mesh_dim_names is a tuple of names, not {names!r}") from None
    for name in names:
        if not isinstance(name, str):
            raise InvalidType(f"mesh_dim_names {names} has {name!r}: names are strings")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidMesh(f"mesh_dim_names {names} has {twice[0]!r} more than once")
    if len(names) != ndim:
        raise InvalidMesh(f"mesh_dim_names {names} are {len(names)} names for {ndim} axes")
    return names


def read_ranks(mesh: Any) -> tuple[tuple[int, ...], Sequence[int]]:
    """Return the shape of an array of ranks, and the ranks in order: a range where they are one."""
    tensor = mesh.detach().cpu() if isinstance(mesh, torch.Tensor) else _rank_tensor(mesh)
    whole = tensor.to(torch.int64)
    if tensor.dtype.is_floating_point and not torch.equal(whole.to(tensor.dtype), tensor):
        raise InvalidMesh(f"mesh {tensor.tolist()} has ranks that are not whole numbers")
    return tuple(tensor.shape), as_range(whole.flatten().tolist())


def _rank_tensor(mesh: Any) -> torch.Tensor:
    try:
        return torch.tensor(mesh, device="cpu")
    except ValueError as error:
        raise InvalidMesh(f"mesh {mesh!r} is not an array of ranks: {error}") from error
    except TypeError as error:
        raise InvalidType(f"mesh {mesh!r} is not an array of ranks: {error}") from error


def as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Return ranks as a range if they are evenly spaced and ascend, else as a tuple."""
    if isinstance(ranks, range):
        return ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks and step > 0:
        regular = range(ranks[0], ranks[0] + step * len(ranks), step)
        if all(map(int.__eq__, ranks, regular)):
            return regular
    return tuple(ranks)


def check_ranks(ranks: Sequence[int], *, size: int | None) -> None:
    """Check that ranks are different and in the group; its size may be unknown."""
    if not ranks:
        raise InvalidMesh("a mesh has at least one rank")
    if size is not None and len(ranks) > size:
        raise InvalidMesh(f"a mesh of {len(ranks)} ranks is larger than its group of {size}")
    least, most = (ranks[0], ranks[-1]) if isinstance(ranks, range) else (min(ranks), max(ranks))
    limit = math.inf if size is None else size
    for rank in (least, most):
        if not 0 <= rank < limit:
            allowed = "from 0" if size is None else f"0 to {size - 1}"
            raise InvalidMesh(f"mesh has rank {rank}: the ranks of its group are {allowed}")
    if not isinstance(ranks, range) and len(set(ranks)) < len(ranks):
        twice = next(rank for rank, count in Counter(ranks).items() if count > 1)
        raise InvalidMesh(f"mesh has rank {twice} more than once: every rank has one place")


Override = (
    str
    | timedelta
    | Mapping[str, Any]
    | Backend.Options
    | tuple[str | None, Backend.Options | Mapping[str, Any] | timedelta | None]
)
"""A backend, its options (torch's, or ours by name), a timeout, or a backend with one of these."""

Overrides = Mapping[int | str, Override] | Sequence[Override | tuple[None, None] | None]


def parse_overrides(
    overrides: Overrides | None, ndim: int, names: Sequence[str] | None
) -> tuple[GroupOptions, ...]:
    """Return the options of every axis, from overrides by name or number or one for each axis."""
    if overrides is None:
        return (DEFAULT_OPTIONS,) * ndim
    if not isinstance(overrides, Mapping):
        if isinstance(overrides, str) or not isinstance(overrides, Sequence):
            raise InvalidType(
                "backend_override is a dict from axes to backends and options, or has one of these "
                f"for every axis: not {overrides!r}"
            )
        if len(overrides) != ndim:
            raise InvalidMesh(
                f"backend_override has {len(overrides)} entries for a mesh of {ndim} axes: give "
                "one for each, or a dict for some of them"
            )
        return tuple(map(parse_override, overrides))
    found = [DEFAULT_OPTIONS] * ndim
    given: dict[int, int | str] = {}
    for key, value in overrides.items():
        axis = _override_axis(key, ndim, names)
        if axis in given:
            raise InvalidMesh(
                f"backend_override names axis {axis} twice, as {given[axis]!r} and as {key!r}"
            )
        given[axis] = key
        found[axis] = parse_override(value)
    return tuple(found)


def _override_axis(key: object, ndim: int, names: Sequence[str] | None) -> int:
    if isinstance(key, str) and names is not None and key in names:
        return names.index(key)
    if type(key) is int and 0 <= key < ndim:
        return key
    allowed = f"0 to {ndim - 1}" + (f" or one of {', '.join(map(repr, names))}" if names else "")
    raise InvalidMesh(f"backend_override has the key {key!r}: an axis is {allowed}")


def parse_override(value: Override | Sequence[Any] | None) -> GroupOptions:
    """Read one override."""
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
        f"backend_override has the value {value!r}: give the name of a backend, its options (an "
        "Options of torch, or a dict), a timeout, or a pair of a backend and one of these"
    )
